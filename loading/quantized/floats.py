"""Layouts of eight bits a weight and of floats: int8, fp8, MX, NVFP4, bitsandbytes' tables, and
MLX's codes.

    Int8Rows, Fp8     unpacked codes with a scale per matrix, row or block
    Renamed           the parts of one of our own formats, bit for bit, by other names
    MXFP4, NVFP4, …   such names
    Table4            bitsandbytes' NF4 and FP4: entries of a table times a block's largest weight

The codes of all but Table4 are stored unchanged in our formats, so the weights are the published
ones.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from decoding.errors import UserError
from loading.files import Expected
from loading.folder import Fit, Matrix, OwnLayout
from loading.plain_files import parse_json, refused
from loading.quantized.layouts import FLOATS, IntegerLayout
from weights.formats import FORMATS, check_finite

SCALES = (*FLOATS, "F8_E8M0")  # E8M0: a power of two
BYTES = ("U8",)
UNSIGNED_WORDS = ("U32",)


@dataclass(frozen=True)
class Int8Rows(IntegerLayout):
    """Unpacked codes: weight (out, in), and scale_key, a number for each block of `rows` outputs
    and `group` inputs. Blocks never cross matrices, and those at the edges may be smaller. This
    class is compressed-tensors' int-quantized, symmetric. Source:
    compressors/naive_quantized/base.py."""

    has_zeros: bool = False
    rows: int = 1  # outputs that share a scale; -1: all
    scale_key: str = "weight_scale"
    code_type = "I8"

    @property
    def key(self) -> str:
        return self.scale_key

    def rows_of_block(self, m) -> int:
        if self.rows == -1:
            return m.rows
        return min(self.rows, m.rows)

    def tensors(self, m):
        shape = (math.ceil(m.rows / self.rows_of_block(m)), self.groups(m))
        if self.rows == -1:
            shape = m.shape_of_number(self.scale_key)
        return {"weight": ((m.rows, m.columns), (self.code_type,)), self.scale_key: (shape, SCALES)}

    def codes(self, m):
        return m.get("weight").view(torch.uint8) ^ 128  # two's complement plus 128

    def scales(self, m):
        scale = m.get(self.scale_key).float().reshape(-1, self.groups(m))  # (blocks, groups)
        return scale.repeat_interleave(self.rows_of_block(m), 0)[: m.rows]


class Fp8(Int8Rows):
    """float8 E4M3, w = code * scale. Sources: compressed-tensors,
    quantization/lifecycle/forward_helpers.py (_process_block); transformers,
    integrations/finegrained_fp8.py; AutoFP8, auto_fp8/quantize.py."""

    code_type = "F8_E4M3"

    def codes(self, m):
        return m.get("weight")

    def fit(self, matrices):
        name = "fp8" if self.group == -1 else f"fp8-g{self.group}"
        return Fit(name + self.suffix(matrices))


@dataclass(frozen=True)
class Renamed(OwnLayout):
    """`names`: our part -> the stored tensor and its types."""

    names: dict[str, tuple[str, tuple[str, ...]]] = field(kw_only=True, hash=False)
    stacks_with_plain = False

    @property
    def key(self) -> str:
        return self.names["scale"][0]

    def tensors(self, m: Matrix) -> dict[str, Expected]:
        headers = {}
        for part, (shape, _) in FORMATS[self.format].shapes(m.rows, m.columns).items():
            name, types = self.names[part]
            if types == UNSIGNED_WORDS:  # of four bytes
                shape = (m.rows, shape[1] // 4)
            if part == "global_scale":  # of all rows
                shape = m.shape_of_number(name)
            headers[name] = (shape, types)
        return headers

    def part(self, m: Matrix, scheme: str, part: str) -> Tensor:
        name, _ = self.names[part]
        stored = m.get(name)
        if part == "codes" and stored.is_floating_point():  # ours would read NaN as a number
            check_finite(stored, f"{m.name}.{name}: ")
        shape, dtype = FORMATS[scheme].shapes(m.rows, m.columns)[part]
        converted = stored.to(dtype) if dtype.is_floating_point else stored.view(dtype)
        return converted.expand(shape)


class ModelOptNvFp4(Renamed):
    """Its global scale multiplies. Our format divides by its float32 reciprocal, which is within
    2^-22 of each weight. Source: ModelOpt, modelopt/torch/quantization/qtensor/nvfp4_tensor.py
    (dequantize)."""

    def part(self, m, scheme, part):
        converted = super().part(m, scheme, part)
        return 1 / converted if part == "global_scale" else converted


# compressed-tensors stores mxfp4-pack-quantized (low nibble first) and mxfp8-quantized (E4M3) in
# blocks of 32 inputs that share an E8M0 exponent. Sources: compressors/{mxfp4,mxfp8,mx_utils}.
EXPONENTS = ("weight_scale", ("U8", "F8_E8M0"))
MXFP4 = {"codes": ("weight_packed", BYTES), "scale": EXPONENTS}
MXFP8 = {"codes": ("weight", ("F8_E4M3",)), "scale": EXPONENTS}

# gpt-oss's experts, as merged_experts.py splits them.
GPT_OSS = {"codes": ("codes", BYTES), "scale": ("scale", BYTES)}

# MLX packs words from the lowest bits on: mode "affine", w = code * scale + bias in groups, in the
# form of our mlx formats, and MXFP4. Sources: MLX, python/src/ops.cpp (quantize),
# mlx/backend/cpu/quantized.cpp and python/mlx/nn/layers/quantized.py.
MLX_AFFINE = {
    "codes": ("weight", UNSIGNED_WORDS),
    "scale": ("scales", FLOATS),
    "zero": ("biases", FLOATS),
}
MLX_MXFP4 = {"codes": ("weight", UNSIGNED_WORDS), "scale": ("scales", BYTES)}

# compressed-tensors' nvfp4-pack-quantized has one weight_scale for 16 inputs, divided by
# weight_global_scale. Source: compressors/nvfp4.
NVFP4 = {
    "codes": ("weight_packed", BYTES),
    "scale": ("weight_scale", ("F8_E4M3",)),
    "global_scale": ("weight_global_scale", ("F32",)),
}

MODELOPT_NVFP4 = {
    "codes": ("weight", BYTES),
    "scale": ("weight_scale", ("F8_E4M3",)),
    "global_scale": ("weight_scale_2", ("F32",)),
}


@dataclass(frozen=True)
class Table4:
    """bitsandbytes' 4 bits: weight (out * in / 2, 1) uint8, high nibble first, over all weights in
    a row; quant_map, 16 entries; absmax, a factor per `blocksize` weights. A uint8 absmax means
    nested_quant_map[absmax] * nested_absmax + nested_offset, with a nested_absmax per
    nested_blocksize factors. quant_state.bitsandbytes__nf4 has blocksize, nested_blocksize and
    nested_offset as JSON. Source: bitsandbytes, functional.py (QuantState, dequantize_blockwise)
    and backends/default/ops.py (dequantize_4bit)."""

    table: str  # nf4 or fp4
    note: str = ""
    stacks_with_plain = True

    @property
    def key(self) -> str:
        return f"weight.quant_state.bitsandbytes__{self.table}"

    def state(self, m) -> dict:
        """UserError for bytes that are no JSON object, and for missing or invalid sizes."""
        source = f"{m.name}.{self.key}"
        stored = m.get(self.key)
        if stored.dtype != torch.uint8 or stored.dim() != 1:
            raise UserError(f"{source} must be bytes, and is {list(stored.shape)} {stored.dtype}")
        state = parse_json(bytes(stored.tolist()), source)
        check_size(state, "blocksize", source)
        if "nested_blocksize" in state:
            check_size(state, "nested_blocksize", source)
            offset = state.get("nested_offset")
            if not isinstance(offset, float | int):
                raise refused(f"{source}: nested_offset", offset, "is no number")
        return state

    def tensors(self, m):
        state = self.state(m)
        size = m.rows * m.columns
        blocks = math.ceil(size / state["blocksize"])
        headers = {
            "weight": ((math.ceil(size / 2), 1), BYTES),
            "weight.quant_map": ((16,), ("F32",)),
            "weight.absmax": ((blocks,), ("F32",)),
            self.key: (tuple(m.stored(self.key).get_shape()), BYTES),
        }
        if "nested_blocksize" in state:
            outer_blocks = math.ceil(blocks / state["nested_blocksize"])
            headers["weight.absmax"] = ((blocks,), BYTES)
            headers["weight.nested_absmax"] = ((outer_blocks,), ("F32",))
            headers["weight.nested_quant_map"] = ((256,), ("F32",))
        return headers

    def fit(self, matrices):
        return Fit(stored_type=f"bitsandbytes' {self.table}")

    def weight(self, m):
        state = self.state(m)
        absmax = m.get("weight.absmax")
        if "nested_blocksize" in state:
            outer = m.get("weight.nested_absmax").repeat_interleave(state["nested_blocksize"])
            inner = m.get("weight.nested_quant_map")[absmax.int()]
            absmax = inner * outer[: len(absmax)] + torch.tensor(float(state["nested_offset"]))
        packed = m.get("weight").flatten()
        codes = torch.stack((packed >> 4, packed & 15), -1).flatten()[: m.rows * m.columns]
        entries = m.get("weight.quant_map")[codes.int()]  # (out * in,)
        factors = absmax.repeat_interleave(state["blocksize"])[: len(entries)]
        return (entries * factors).view(m.rows, m.columns)  # (out * in,) -> (out, in)


def check_size(state: dict, key: str, source: str) -> None:
    size = state.get(key)
    if type(size) is not int or size < 1:
        raise refused(f"{source}: {key}", size, "must be a positive whole number")
