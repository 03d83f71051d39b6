"""Folders that other programs quantized: their stored tensors -> the parts of one of our formats.

    layout_of           config.json's quantization_config -> a Layout; what cannot be read is refused by key and value
    Gptq, Awq, PackQuantized, Plain   where each program keeps the codes, scales and zero points of a matrix
    find, needed        which matrices of a folder are quantized, and what it must hold of them
    scheme_of           the scheme of ours that holds them exactly, or is nearest
    reading             our parts of a matrix, or its weights, by the names under which we would have stored them
    config_for, plain   the way back: how a folder of ours tells others to read it, and parts as they call them

Every program means w[o, i] = scale[o, g] * (code[o, i] - zero_point[o, g]), g the group of input i. Our int4 has
(code - 8) * scale + zero, so zero = (8 - zero_point) * scale. With scale and zero in float32 (int4-g128-float32)
nothing of this rounds if the folder's scales are float16 or bfloat16: 11 bits of a scale times 4 bits of the other
factor are 15 of float32's 24, and the sum is a multiple of the same last bit, of at most 15 scales. So these are the
published weights, bit for bit. If the scales are float32 and zero points not 8, they are so within 2^-20 scale. Where
the inputs of a group are no neighbours, no scheme of ours holds them: weights are computed and quantized again.

Nothing is converted ahead: a part is made when it is read, whole, one matrix at a time. This file does not know
models, ranks or decoding.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from reading.merged import is_mxfp4
from weights.formats import FORMATS, Fp8, Int4, Int8, row_chunks, unpack_bits

WORDS, FLOATS = ("I32",), ("BF16", "F16", "F32")  # stored types, as safetensors calls them
# Of a folder that only we read. Other programs refuse it for want of a quant_method; at an unknown one transformers
# warns and loads random weights.
OWN = {"format": "quickdraft"}


class Matrix(NamedTuple):
    """One quantized matrix (out, in) of a folder, under its Hugging Face name."""

    name: str
    rows: int
    columns: int
    readers: dict  # tensor name -> (file, open reader)

    def get(self, kind: str) -> Tensor:
        return self.readers[f"{self.name}.{kind}"][1].get_tensor(f"{self.name}.{kind}")

    def header(self, kind: str):
        return self.readers[f"{self.name}.{kind}"][1].get_slice(f"{self.name}.{kind}")


def as_bytes(words: Tensor) -> Tensor:
    """int32 (…, n) -> uint8 (…, 4 n), lowest byte first: words filled from the lowest bits on, as by pack_bits."""
    return words.contiguous().view(torch.uint8)


# --------------------------------------------------------------------------------------------- layouts


@dataclass(frozen=True)
class Layout:
    """Where a program keeps what belongs to one matrix. This class packs codes into int32 words from the lowest bits
    on: those of neighbouring inputs; of zero points, those of neighbouring outputs."""

    bits: int
    group: int  # neighbouring inputs that share a scale; -1: all
    note: str | None = None  # what the user should hear when such a folder is loaded
    symmetric: bool = False
    act_order: bool = True  # is the group of every input stored?

    key, scale_key, zero_key, order_key = "qweight", "scales", "qzeros", "g_idx"  # a matrix is known by the first
    inputs_first = True  # is every matrix stored transposed?
    zeros_only = ()  # tensors that some writers add, and that change nothing when they hold zeros
    stores_zeros = True

    def tensors(self, m: Matrix) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
        """Tensor -> (shape, stored types that can be read)."""
        found = {self.key: ((m.rows, self.words(m.columns)), WORDS), self.scale_key: ((m.rows, self.groups(m)), FLOATS)}
        if self.stores_zeros:
            found[self.zero_key] = ((self.words(m.rows), self.groups(m)), WORDS)
        if self.act_order:
            found[self.order_key] = ((m.columns,), WORDS)
        return {name: (shape[::-1] if self.inputs_first else shape, types) for name, (shape, types) in found.items()}

    def get(self, m: Matrix, kind: str) -> Tensor:
        """A stored matrix, outputs first."""
        return m.get(kind).T if self.inputs_first else m.get(kind)

    def codes(self, m: Matrix) -> Tensor:
        """(out, in * bits / 8) uint8, packed as pack_bits does; of floats (out, in) as they are."""
        return as_bytes(self.get(m, self.key))[:, : m.columns * self.bits // 8]

    def scales(self, m: Matrix) -> Tensor:
        """(out, groups)"""
        return self.get(m, self.scale_key)

    def zero_points(self, m: Matrix) -> Tensor:
        """(out, groups), in [0, 2^bits)"""
        if not self.stores_zeros:
            return torch.tensor(2 ** (self.bits - 1)).expand(m.rows, self.groups(m))
        words = self.get(m, self.zero_key).T  # (groups, out / 8), of 4 bits
        return unpack_bits(as_bytes(self.whole_words(words)), self.bits)[:, : m.rows].T

    def whole_words(self, words: Tensor) -> Tensor:
        """Stored words of zero points -> words that hold them."""
        return words

    def group_of(self, m: Matrix) -> Tensor:
        """(in,): the group of every input."""
        return m.get(self.order_key).long() if self.act_order else torch.arange(m.columns) // self.size(m)

    def size(self, m: Matrix) -> int:
        return m.columns if self.group == -1 else self.group

    def groups(self, m: Matrix) -> int:
        return math.ceil(m.columns / self.size(m))

    def words(self, n: int) -> int:
        """int32 that hold n codes."""
        return math.ceil(n * self.bits / 32)


@dataclass(frozen=True)
class Gptq(Layout):
    """AutoGPTQ and GPTQModel: qweight (in * bits / 32, out), qzeros (groups, out * bits / 32), scales (groups, out),
    g_idx (in,).

    Version 1 holds every zero point minus one, subtracted from whole words, borrows and all; so one is added to whole
    words again. Sources: GPTQModel, gptqmodel/nn_modules/qlinear/__init__.py (pack_original, dequantize_weight) and
    gptqmodel/utils/model.py (convert_gptq_v1_to_v2_format_module).
    """

    version: int = 1
    zeros_only = ("bias",)  # AutoGPTQ once gave every matrix one

    def whole_words(self, words):
        return words + (0x11111111 if self.bits == 4 else 0x01010101) if self.version == 1 else words


@dataclass(frozen=True)
class Awq(Layout):
    """AutoAWQ's version "gemm": qweight (in, out / 8) int32, of the eight outputs in a word the ones called 0 2 4 6 1 3
    5 7 from the lowest bits on; qzeros (groups, out / 8) alike; scales (groups, out). Source: AutoAWQ,
    awq/modules/linear/gemm.py (from_linear) and awq/utils/packing_utils.py."""

    act_order: bool = False

    def tensors(self, m):
        return super().tensors(m) | {"qweight": ((m.columns, self.words(m.rows)), WORDS)}

    def codes(self, m):
        codes = self.outputs(m.get("qweight"))[:, : m.rows].T  # (in, out) -> (out, in)
        return codes[:, ::2] | codes[:, 1::2] << 4

    def zero_points(self, m):
        return self.outputs(m.get("qzeros"))[:, : m.rows].T.int()

    @staticmethod
    def outputs(words: Tensor) -> Tensor:
        """(n, out / 8) int32 -> (n, out) uint8."""
        two = as_bytes(words)  # (n, out / 2)
        eight = torch.stack((two & 15, two >> 4), -1).view(len(words), -1, 8)  # (n, out / 8, 8), lowest bits first
        return eight[..., [0, 4, 1, 5, 2, 6, 3, 7]].flatten(1)  # where outputs 0 to 7 stand


@dataclass(frozen=True)
class PackQuantized(Layout):
    """compressed-tensors' pack-quantized: weight_packed (out, in * bits / 32), signed codes plus 2^(bits - 1);
    weight_scale (out, groups); unless symmetric, weight_zero_point (out * bits / 32, groups); weight_g_idx (in,) with
    actorder "group"; weight_shape. Source: compressed-tensors, compressors/pack_quantized/{base,helpers}.py and
    quantization/lifecycle/forward_helpers.py (_process_group)."""

    key, scale_key, zero_key, order_key = "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx"
    inputs_first = False
    zeros_only = ("weight_zero_point",)

    @property
    def stores_zeros(self) -> bool:
        return not self.symmetric

    def tensors(self, m):
        return super().tensors(m) | {"weight_shape": ((2,), ("I64", "I32"))}


@dataclass(frozen=True)
class Plain(Layout):
    """compressed-tensors' int-quantized, float-quantized and naive-quantized: weight (out, in), int8 or float8 E4M3,
    symmetric; weight_scale (out, groups), or one number. Source: compressed-tensors,
    compressors/naive_quantized/base.py."""

    act_order: bool = False
    float8: bool = False
    one_scale: bool = False
    key = scale_key = "weight_scale"
    zeros_only = ("weight_zero_point",)
    inputs_first = stores_zeros = False

    def tensors(self, m):
        shape = tuple(m.header("weight_scale").get_shape())
        if not (self.one_scale and math.prod(shape) == 1):
            shape = (1,) if self.one_scale else (m.rows, self.groups(m))
        kind = "F8_E4M3" if self.float8 else "I8"
        return {"weight": ((m.rows, m.columns), (kind,)), "weight_scale": (shape, FLOATS)}

    def codes(self, m):
        return m.get("weight") if self.float8 else m.get("weight").view(torch.uint8) ^ 128  # two's complement plus 128

    def scales(self, m):
        return m.get("weight_scale").reshape(-1, self.groups(m)).expand(m.rows, -1)


# ------------------------------------------------------------------------------------------ config.json


def only(found: dict, where: str, key: str, *values):
    """found[key], which must be one of the values; None stands for a key that is missing."""
    value = found.get(key)
    if not any(type(value) is type(known) and value == known for known in values):
        works = " or ".join("none" if known is None else repr(known) for known in values)
        raise ValueError(f"config.json: {where}{key} = {value!r} is not supported; supported: {works}")
    return value


def a_dict(found: dict, where: str, key: str) -> dict:
    value = found.get(key)
    if not isinstance(value, dict):
        raise ValueError(f"config.json: {where}{key} = {value!r} is not supported; it must be an object")
    return value


def group_size(found: dict, where: str, key: str = "group_size") -> int:
    size = found.get(key)
    if type(size) is not int or (size < 1 and size != -1):
        raise ValueError(f"config.json: {where}{key} = {size!r} is not supported; it must be positive, or -1 for rows")
    return size


def layout_of(hf: dict) -> Layout | None:
    """The layout that a config.json's quantization_config names, None without one. ValueError names key and value of
    what is not read here."""
    if hf.get("quantization_config") in (None, {}, OWN) or is_mxfp4(hf):
        return None
    where, found = "quantization_config: ", a_dict(hf, "", "quantization_config")
    method = only(found, where, "quant_method", *METHODS)
    if hf.get("quantization") is not None and method != "compressed-tensors":  # which we write too
        raise ValueError("config.json: it has both quantization and quantization_config; one of them must be wrong")
    return METHODS[method](found, where)


def gptq_layout(found: dict, where: str) -> Layout:
    bits = only(found, where, "bits", 4, 8)
    key = "checkpoint_format" if found.get("checkpoint_format") is not None else "format"
    format = only(found, where, key, None, "gptq", "gptq_v2")
    only(found, where, "is_marlin_format", None, False)
    only(found, where, "pack_dtype", None, "int32")
    only(found, where, "rotation", None)
    only(found, where, "adapter", None)
    symmetric, version = found.get("sym") is True, 2 if format == "gptq_v2" else 1
    return Gptq(bits, group_size(found, where), symmetric=symmetric, version=version)


def awq_layout(found: dict, where: str) -> Layout:
    bits = only(found, where, "w_bit" if "w_bit" in found else "bits", 4)
    key = next((key for key in ("version", "checkpoint_format", "format") if found.get(key) is not None), "version")
    only(found, where, key, None, "gemm", "GEMM")
    return Awq(bits, group_size(found, where, "q_group_size" if "q_group_size" in found else "group_size"))


def compressed_layout(found: dict, where: str) -> Layout:
    """compressed-tensors, src/compressed_tensors/quantization/{quant_config,quant_args}.py"""
    groups = a_dict(found, where, "config_groups")
    if len(groups) != 1:
        raise ValueError(f"config.json: {where}config_groups = {sorted(groups)} is not supported; one group is")
    only(found, where, "kv_cache_scheme", None, {})
    only(found, where, "transform_config", None, {})
    sparsity = found.get("sparsity_config")
    only(sparsity if isinstance(sparsity, dict) else {"format": sparsity}, f"{where}sparsity_config: ", "format",
         None, "dense")  # fmt: skip
    inside = f"{where}config_groups: "
    scheme = a_dict(groups, inside, next(iter(groups)))
    weights, activations = a_dict(scheme, inside, "weights"), scheme.get("input_activations")
    only(scheme, inside, "output_activations", None)
    note = None
    if activations is not None:
        only(a_dict(scheme, inside, "input_activations"), f"{inside}input_activations: ", "dynamic", True)
        note = "its activations would be quantized as they come; here they are not, only its weights"
    return _by_format(scheme if scheme.get("format") is not None else found, weights, f"{inside}weights: ", note)


def _by_format(found: dict, weights: dict, where: str, note: str | None) -> Layout:
    """The layout of compressed-tensors' `weights` stored in found["format"]."""
    known = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
    format = only(found, "quantization_config: ", "format", *known)
    packed = format == "pack-quantized"
    kinds = {"pack-quantized": ("int",), "int-quantized": ("int",), "float-quantized": ("float",)}
    kind = only(weights, where, "type", *kinds.get(format, ("int", "float")))
    bits = only(weights, where, "num_bits", *((4, 8) if packed else (8,)))
    only(weights, where, "dynamic", None, False)
    only(weights, where, "block_structure", None)
    symmetric = only(weights, where, "symmetric", *((True, False) if packed else (True,)))
    size = weights.get("group_size")
    implied = "tensor" if size is None else "channel" if size == -1 else "group"
    strategies = ("channel", "group") if packed else ("channel", "tensor") + (("group",) if kind == "int" else ())
    strategy = only({"strategy": weights.get("strategy") or implied}, where, "strategy", *strategies)
    size = group_size(weights, where) if strategy == "group" else -1
    order = only(weights, where, "actorder", None, False, "weight", "static", *((True, "group", "dynamic") * packed))
    if packed:
        return PackQuantized(bits, size, note, symmetric, order in (True, "group", "dynamic"))
    return Plain(bits, size, note, float8=kind == "float", one_scale=strategy == "tensor")


METHODS: dict[str, Callable[[dict, str], Layout]] = {
    "gptq": gptq_layout, "awq": awq_layout, "compressed-tensors": compressed_layout,
}  # fmt: skip

# --------------------------------------------------------------------------------------------- folders


class Found(NamedTuple):
    """The quantized matrices of a folder, and our names of those in blocks that are not."""

    layout: Layout
    matrices: dict[str, Matrix]
    kept: tuple[str, ...]


def find(layout: Layout, readers: dict, shapes: dict[str, dict[str, tuple[int, int]]]) -> Found:
    """shapes: our name of a matrix -> {Hugging Face module stacked in it: (out, in)}. ValueError names a matrix that is
    quantized in part."""
    matrices, kept = {}, []
    for ours, sources in shapes.items():
        here = [name for name in sources if f"{name}.{layout.key}" in readers]
        if here and len(here) < len(sources):
            other = next(name for name in sources if name not in here)
            raise ValueError(f"{here[0]} is quantized and {other} is not; they are one matrix here")
        matrices |= {name: Matrix(name, *sources[name], readers) for name in here}
        kept += [ours] if not here and ours.startswith("layers.") else []
    if not matrices:
        raise ValueError(f"config.json says that it is quantized, but none of its tensors is called *.{layout.key}")
    return Found(layout, matrices, tuple(kept))


def needed(found: Found, plain: dict[str, tuple], readers: dict) -> dict[str, tuple]:
    """Tensor -> (shape, stored types) of the folder, from those of the same model in full precision. Tensors of zeros
    that some writers add are taken out of `readers`."""
    wanted = {name: how for name, how in plain.items() if name.removesuffix(".weight") not in found.matrices}
    for name, m in found.matrices.items():
        wanted |= {f"{name}.{kind}": how for kind, how in found.layout.tensors(m).items()}
        for extra in (f"{name}.{kind}" for kind in found.layout.zeros_only):
            if extra in readers and extra not in wanted and not readers[extra][1].get_tensor(extra).float().any():
                del readers[extra]
    return wanted


def checked(found: Found) -> Found:
    """To be called once all tensors are there in their shapes. ValueError names a tensor with senseless values."""
    layout, matrices = found.layout, found.matrices.values()
    for m in matrices:
        groups = layout.group_of(m)
        if groups.min() < 0 or groups.max() >= layout.groups(m):
            raise ValueError(f"{m.name}: its g_idx goes beyond its {layout.groups(m)} groups")
        if isinstance(layout, PackQuantized) and m.get("weight_shape").tolist() != [m.rows, m.columns]:
            raise ValueError(f"{m.name}.weight_shape is {m.get('weight_shape').tolist()}, not {[m.rows, m.columns]}")
    if isinstance(layout, Gptq) and layout.version == 1 and layout.symmetric:
        # Some writers say version 1 and store version 2 (vllm-project/vllm pull request 38966). Symmetric codes tell.
        second = replace(layout, version=2, note="it says version 1, but holds the zero points of version 2")
        if all(centred(second, m) for m in matrices):
            return found._replace(layout=second)
    return found


def centred(layout: Layout, m: Matrix) -> bool:
    """Do the middle codes stand for 0?"""
    return bool((layout.zero_points(m) == 2 ** (layout.bits - 1)).all())


def scheme_of(found: Found) -> tuple[str, str | None]:
    """(scheme, None): it holds every matrix exactly. (scheme, why not): it is the nearest."""
    layout, matrices = found.layout, found.matrices.values()
    zeros = all(centred(layout, m) for m in matrices)
    half = all(m.header(layout.scale_key).get_dtype() == "BF16" for m in matrices)
    wide = "" if half and zeros else "-float32"
    if layout.bits == 8:
        if zeros and all(layout.groups(m) == 1 for m in matrices):
            return ("fp8" if isinstance(layout, Plain) and layout.float8 else "int8") + wide, None
        return "int8", "its 8-bit codes have scales of groups, or zero points; int8 has one scale a row"
    for size in (128, 64, 32):
        if all(m.columns % size == 0 and runs(layout.group_of(m), size) for m in matrices):
            return f"int4-g{size}{wide}", None
    return "int4-g32", "the inputs of its groups are not runs of 32 neighbours, as with act-order"


def runs(groups: Tensor, size: int) -> bool:
    """groups (in,): do each `size` neighbours, from the first on, share one?"""
    groups = groups.view(-1, size)  # (in / size, size)
    return bool((groups == groups[:, :1]).all())


def part(layout: Layout, m: Matrix, scheme: str, kind: str) -> Tensor:
    """One stored part of quantize.py's scheme, which must hold the matrix exactly."""
    format = FORMATS[scheme]
    if kind == "codes":
        codes = layout.codes(m)
        return (codes ^ 128).view(torch.int8) if isinstance(format, Int8) else codes
    scale = layout.scales(m).float()  # (out, groups)
    if not isinstance(format, Int4):
        return scale[:, 0].to(format.stored)
    if kind == "zero":
        scale = scale * (8 - layout.zero_points(m))
    return scale[:, layout.group_of(m)[:: format.group]].to(format.stored)  # (out, in / g)


def dequantized(layout: Layout, m: Matrix) -> Tensor:
    """The weights (out, in) in float32."""
    groups, codes = layout.group_of(m), layout.codes(m)
    scale, zero = layout.scales(m).float(), layout.zero_points(m)
    found = torch.empty(m.rows, m.columns)
    for rows in row_chunks(m.rows, m.columns):
        found[rows] = (unpack_bits(codes[rows], layout.bits) - zero[rows][:, groups]) * scale[rows][:, groups]
    return found


def reading(found: Found, scheme: str, read: Callable[[str], Tensor]) -> Callable[[str], Tensor]:
    """A folder's `read` (name -> tensor), to which quantized matrices have the scheme's parts, or a weight."""

    def made(name: str) -> Tensor:
        module, _, kind = name.rpartition(".")
        if module not in found.matrices or kind == "bias":
            return read(name)
        m = found.matrices[module]
        return dequantized(found.layout, m) if kind == "weight" else part(found.layout, m, scheme, kind)

    return made


def config_for(format: Int8 | Fp8, head: bool) -> dict:
    """The quantization_config under which compressed-tensors reads a folder in `format`, with its head or without."""
    kind = "float" if format.kind.is_floating_point else "int"
    weights = {"num_bits": 8, "type": kind, "strategy": "channel", "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "format": f"{kind}-quantized", "weights": weights}
    about = {"quant_method": "compressed-tensors", "format": group["format"], "quantization_status": "compressed"}
    return {**about, "config_groups": {"group_0": group}, "ignore": [] if head else ["lm_head"]}


def plain(name: str, part: Tensor) -> tuple[str, Tensor]:
    """Name and shape of such a format's part there."""
    module, _, kind = name.rpartition(".")
    return (f"{module}.weight", part) if kind == "codes" else (f"{module}.weight_scale", part[:, None])
