"""Layouts of eight bits a weight and of floats: int8, fp8, MX, NVFP4, and bitsandbytes' tables.

    Unpacked, Int8Rows, Fp8     unpacked codes with a scale per matrix, row or block
    Mx, NvFp4, ModelOptNvFp4    minifloats in blocks of 32 and 16, as our own formats store them
    Table4                      bitsandbytes' NF4 and FP4: entries of a table times a block's largest weight

The codes of all but Table4 are stored unchanged in our formats, so the weights are the published ones.
"""

import json
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from loading.quantized.layouts import FLOATS, Layout
from weights.formats import CHUNK_WEIGHTS, FORMATS

SCALES = (*FLOATS, "F8_E8M0")  # E8M0: a power of two


@dataclass(frozen=True)
class Unpacked(Layout):
    """Unpacked codes: weight (out, in), and scale_key: one number, or (out, groups). Source: compressed-tensors,
    compressors/naive_quantized/base.py."""

    act_order: bool = False
    one_scale: bool = False
    code_type = "I8"
    key = scale_key = "weight_scale"
    zeros_only = ("weight_zero_point",)
    inputs_first = has_zeros = False

    def tensors(self, m):
        shape = m.shape(self.scale_key)
        if not (self.one_scale and math.prod(shape) == 1):
            shape = (1,) if self.one_scale else self.scales_shape(m)
        return {"weight": ((m.rows, m.columns), (self.code_type,)), self.scale_key: (shape, SCALES)}

    def scales_shape(self, m) -> tuple[int, ...]:
        return m.rows, self.groups(m)

    def scales(self, m):
        return m.get(self.scale_key).reshape(-1, self.groups(m)).expand(m.rows, -1)


class Int8Rows(Unpacked):
    """compressed-tensors' int-quantized, symmetric."""

    def codes(self, m):
        return m.get("weight").view(torch.uint8) ^ 128  # two's complement plus 128


@dataclass(frozen=True)
class Fp8(Unpacked):
    """float8 E4M3, w = code * scale. Blocks of `rows` outputs and `group` inputs start anew in every matrix; the last
    ones may be ragged. Sources: compressed-tensors, quantization/lifecycle/forward_helpers.py (_process_block);
    transformers, integrations/finegrained_fp8.py; AutoFP8, auto_fp8/quantize.py."""

    rows: int = 1  # outputs that share a scale
    scale_key: str = "weight_scale"
    code_type = "F8_E4M3"

    @property
    def key(self) -> str:
        return self.scale_key

    def scales_shape(self, m):
        return math.ceil(m.rows / self.rows), self.groups(m)

    def codes(self, m):
        return check_finite(m.get("weight"), m)

    def scales(self, m):
        scale = super().scales(m) if self.one_scale or self.rows == 1 else m.get(self.scale_key)
        return check_finite(scale.float(), m).repeat_interleave(min(self.rows, m.rows), 0)[: m.rows]  # (out, groups)

    def scheme(self, matrices):
        blocks = "" if self.group == -1 else f"-g{self.group}"
        return f"fp8{blocks}" + ("" if self.is_bfloat16(matrices) else "-float32"), None

    def part(self, m, scheme, kind):
        format = FORMATS[scheme]
        if kind == "codes":
            return self.codes(m)
        return (self.scales(m) if format.group else self.scales(m)[:, 0]).to(format.scale_dtype)


def check_finite(x: Tensor, m) -> Tensor:
    """The same tensor. ValueError for stored codes or scales with NaN or infinity, which our formats do not hold."""
    for part in x.flatten().split(CHUNK_WEIGHTS):  # temporaries are several times a part's size
        is_e4m3 = part.dtype == torch.float8_e4m3fn  # whose only other codes are NaN, in all seven bits below the sign
        is_finite = (part.view(torch.uint8) & 0x7F) < 0x7F if is_e4m3 else part.float().isfinite()
        if not is_finite.all():
            raise ValueError(f"{m.name}: its codes or scales hold NaN or infinity")
    return x


@dataclass(frozen=True)
class Mx(Layout):
    """compressed-tensors' mxfp4-pack-quantized (weight_packed, low nibble first) and mxfp8-quantized (weight, E4M3):
    blocks of 32 inputs, weight_scale an E8M0 exponent. Our mxfp4 and mxfp8 are the same bits. Sources:
    compressors/{mxfp4,mxfp8,mx_utils}."""

    act_order: bool = False
    key = "weight_scale"
    zeros_only = ("weight_zero_point",)

    def tensors(self, m):
        codes = ("weight_packed", m.columns // 2, "U8") if self.bits == 4 else ("weight", m.columns, "F8_E4M3")
        scale = ((m.rows, self.groups(m)), ("U8", "F8_E8M0"))
        return {codes[0]: ((m.rows, codes[1]), (codes[2],)), "weight_scale": scale}

    def scheme(self, matrices):
        return f"mxfp{self.bits}", None

    def part(self, m, scheme, kind):
        if kind == "codes":
            return m.get("weight_packed") if self.bits == 4 else check_finite(m.get("weight"), m).view(torch.uint8)
        scale = m.get("weight_scale").view(torch.uint8)
        if (scale == 255).any():
            raise ValueError(f"{m.name}.weight_scale holds 255, which is E8M0's NaN")
        return scale


class NvFp4(Mx):
    """compressed-tensors' nvfp4-pack-quantized: weight_packed, low nibble first; weight_scale E4M3, one for 16 inputs;
    weight_global_scale, by which it is divided. Source: compressors/nvfp4."""

    def tensors(self, m):
        scale = ((m.rows, self.groups(m)), ("F8_E4M3",))
        return {**super().tensors(m), "weight_scale": scale, "weight_global_scale": ((1,), ("F32",))}

    def scheme(self, matrices):
        return "nvfp4", None

    def part(self, m, scheme, kind):
        if kind == "codes":
            return m.get("weight_packed")
        if kind == "scale":
            return check_finite(m.get("weight_scale"), m)
        global_scale = m.get("weight_global_scale")
        check_finite(1 / global_scale, m)
        return global_scale.expand(m.rows)


class ModelOptNvFp4(NvFp4):
    """ModelOpt's NVFP4: weight uint8, low nibble first; weight_scale; weight_scale_2, one number that multiplies it.
    Our format divides by its float32 reciprocal, which is within 2^-22 of each weight. Source: ModelOpt,
    modelopt/torch/quantization/qtensor/nvfp4_tensor.py (dequantize)."""

    def tensors(self, m):
        headers, shape = super().tensors(m), m.shape("weight_scale_2")
        shape = shape if math.prod(shape) == 1 else ()
        renamed = {"weight": headers["weight_packed"], "weight_scale": headers["weight_scale"]}
        return renamed | {"weight_scale_2": (shape, ("F32",))}

    def part(self, m, scheme, kind):
        if kind == "codes":
            return m.get("weight")
        if kind == "scale":
            return super().part(m, scheme, kind)
        return check_finite(1 / m.get("weight_scale_2").reshape(1), m).expand(m.rows)


@dataclass(frozen=True)
class Table4(Layout):
    """bitsandbytes' 4 bits: weight (out * in / 2, 1) uint8, high nibble first, over all weights in a row; quant_map, 16
    entries; absmax, a factor per `blocksize` weights. A uint8 absmax means nested_quant_map[absmax] * nested_absmax +
    nested_offset, with a nested_absmax per nested_blocksize factors. quant_state.bitsandbytes__nf4 has blocksize,
    nested_blocksize and nested_offset as JSON. Source: bitsandbytes, functional.py (QuantState,
    dequantize_blockwise) and backends/default/ops.py (dequantize_4bit)."""

    kind: str = "nf4"
    act_order: bool = False
    key = "weight.quant_map"
    zeros_only = ()
    stacks_with_plain = True

    def tensors(self, m):
        size, state = m.rows * m.columns, self.state(m)
        blocks = math.ceil(size / state["blocksize"])
        headers = {"weight": ((math.ceil(size / 2), 1), ("U8",)), "weight.quant_map": ((16,), ("F32",))}
        headers["weight.absmax"] = (blocks,), (("U8",) if "nested_blocksize" in state else ("F32",))
        if "nested_blocksize" in state:
            headers["weight.nested_absmax"] = (math.ceil(blocks / state["nested_blocksize"]),), ("F32",)
            headers["weight.nested_quant_map"] = (256,), ("F32",)
        return headers | {self.state_key: (m.shape(self.state_key), ("U8",))}

    @property
    def state_key(self) -> str:
        return f"weight.quant_state.bitsandbytes__{self.kind}"

    def state(self, m) -> dict:
        """The checked numbers of quant_state."""
        name = self.state_key
        try:
            state = json.loads(bytes(m.get(name).tolist()))
            sizes = [state[key] for key in ("blocksize", "nested_blocksize") if key in state]
            is_valid = all(type(size) is int and 0 < size < 2**20 for size in sizes) and "blocksize" in state
            offset = state.get("nested_offset", 0.0)
            is_valid = is_valid and type(offset) in (int, float) and math.isfinite(offset)
            if not is_valid or state["shape"] != [m.rows, m.columns] or state["quant_type"] != self.kind:
                raise ValueError(state)
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            message = " ".join(str(error).split())[:200]
            raise ValueError(f"{m.name}.{name}: does not fit a matrix {[m.rows, m.columns]}: {message}") from None
        return state

    def check(self, m):
        self.state(m)

    def scheme(self, matrices):
        return None, f"no scheme here keeps bitsandbytes' {self.kind} exactly: it loads as plain weights"

    def weight(self, m):
        state = self.state(m)
        absmax = m.get("weight.absmax")
        if "nested_blocksize" in state:
            outer = m.get("weight.nested_absmax").repeat_interleave(state["nested_blocksize"])[: len(absmax)]
            absmax = m.get("weight.nested_quant_map")[absmax.int()] * outer + torch.tensor(
                float(state["nested_offset"])
            )
        packed = m.get("weight").flatten()
        codes = torch.stack((packed >> 4, packed & 15), -1).flatten()[: m.rows * m.columns].int()  # (out * in,)
        table = check_finite(m.get("weight.quant_map"), m)[codes]
        factor = check_finite(absmax, m).repeat_interleave(state["blocksize"])[: len(table)]
        return (table * factor).view(m.rows, m.columns)  # (out * in,) -> (out, in)
