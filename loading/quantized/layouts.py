"""Where other programs store a quantized matrix: codes packed into words, scales, zero points.

    Matrix                      the stored tensors of one matrix
    Layout                      their names and shapes, and their conversion to our parts
    Gptq, Awq, PackQuantized    4 and 8 bits, packed into int32 words; floats.py has the other layouts

Every program means w[o, i] = scale[o, g] * (code[o, i] - zero_point[o, g]), g the group of input i. Our int4 has
(code - 8) * scale + zero, so zero = (8 - zero_point) * scale. With float16 or bfloat16 scales, our float32 schemes
(int4-g128-float32) give the published weights bit for bit: a scale's 11 bits times the other factor's 4 bits fit in
float32's 24, and the sum is a multiple of the same last bit, at most 15 scales. With float32 scales and zero points
other than 8, a weight differs by at most 2^-20 scale. Groups of inputs that are not neighbours are quantized again.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from weights.formats import FORMATS, Int4, Int8, row_chunks, unpack_bits

WORDS, FLOATS = ("I32",), ("BF16", "F16", "F32")  # stored types, as safetensors calls them


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

    def shape(self, kind: str) -> tuple[int, ...]:
        """() for a tensor that does not exist."""
        return tuple(self.header(kind).get_shape()) if f"{self.name}.{kind}" in self.readers else ()


def as_bytes(words: Tensor) -> Tensor:
    """int32 (…, n) -> uint8 (…, 4 n), lowest byte first, the order of pack_bits."""
    return words.contiguous().view(torch.uint8)


@dataclass(frozen=True)
class Layout:
    """A program's layout of one matrix. In this class int32 words hold the codes of neighbouring inputs, and the zero
    points of neighbouring outputs, from the lowest bits on."""

    bits: int
    group: int  # neighbouring inputs that share a scale; -1: all
    notes: tuple[str, ...] = ()  # for the user, when such a folder is loaded
    symmetric: bool = False
    act_order: bool = True  # is the group of every input stored?

    key, scale_key, zero_key, order_key = "qweight", "scales", "qzeros", "g_idx"  # `key` marks a quantized matrix
    inputs_first = True  # is every matrix stored transposed?
    zeros_only = ()  # tensors that some writers add; they are ignored if they hold zeros
    has_zeros = True
    stacks_with_plain = False  # may matrices of full precision be stacked with quantized ones?

    def tensors(self, m: Matrix) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
        """Tensor -> (shape, supported stored types)."""
        headers = {self.key: ((m.rows, self.words(m.columns)), WORDS)}
        headers[self.scale_key] = (m.rows, self.groups(m)), FLOATS
        if self.has_zeros:
            headers[self.zero_key] = ((self.words(m.rows), self.groups(m)), WORDS)
        if self.act_order:
            headers[self.order_key] = ((m.columns,), WORDS)
        return {name: (shape[::-1] if self.inputs_first else shape, types) for name, (shape, types) in headers.items()}

    def get(self, m: Matrix, kind: str) -> Tensor:
        """A stored matrix, outputs first."""
        return m.get(kind).T if self.inputs_first else m.get(kind)

    def codes(self, m: Matrix) -> Tensor:
        """(out, in * bits / 8) uint8, packed as pack_bits does."""
        return as_bytes(self.get(m, self.key))[:, : m.columns * self.bits // 8]

    def scales(self, m: Matrix) -> Tensor:
        """(out, groups)"""
        return self.get(m, self.scale_key)

    def zero_points(self, m: Matrix) -> Tensor:
        """(out, groups), in [0, 2^bits)"""
        if not self.has_zeros:
            return torch.tensor(2 ** (self.bits - 1)).expand(m.rows, self.groups(m))
        words = self.get(m, self.zero_key).T  # (groups, out / 8), of 4 bits
        return unpack_bits(as_bytes(self.restore_words(words)), self.bits)[:, : m.rows].T

    def restore_words(self, words: Tensor) -> Tensor:
        """Stored words of zero points -> words of the zero points themselves."""
        return words

    def group_of(self, m: Matrix) -> Tensor:
        """(in,): the group of every input."""
        return m.get(self.order_key).long() if self.act_order else torch.arange(m.columns) // self.group_size(m)

    def group_size(self, m: Matrix) -> int:
        return m.columns if self.group == -1 else self.group

    def groups(self, m: Matrix) -> int:
        return math.ceil(m.columns / self.group_size(m))

    def words(self, n: int) -> int:
        """The number of int32 words for n codes."""
        return math.ceil(n * self.bits / 32)

    def check(self, m: Matrix) -> None:
        """ValueError names a tensor with invalid values. All headers must have been checked."""
        groups = self.group_of(m)
        if groups.min() < 0 or groups.max() >= self.groups(m):
            raise ValueError(f"{m.name}: its g_idx has groups outside 0 to {self.groups(m) - 1}")

    def is_centred(self, m: Matrix) -> bool:
        """Is every zero point the middle code?"""
        return bool((self.zero_points(m) == 2 ** (self.bits - 1)).all())

    def scheme(self, matrices: Collection[Matrix]) -> tuple[str | None, str | None]:
        """(scheme, None) if a scheme holds every matrix exactly; else (nearest scheme, reason), or (None, reason) if
        none is near."""
        is_centred = all(map(self.is_centred, matrices))
        suffix = "" if self.is_bfloat16(matrices) and is_centred else "-float32"
        if self.bits == 8:
            if is_centred and all(self.groups(m) == 1 for m in matrices):
                return f"int8{suffix}", None
            return "int8", "its 8-bit codes have scales of groups, or zero points; int8 has one scale a row"
        for size in (128, 64, 32):
            if all(m.columns % size == 0 and are_runs(self.group_of(m), size) for m in matrices):
                return f"int4-g{size}{suffix}", None
        return "int4-g32", "its groups are not runs of 32 neighbouring inputs, as with act-order"

    def is_bfloat16(self, matrices: Collection[Matrix]) -> bool:
        """Are all scales bfloat16?"""
        return all(m.header(self.scale_key).get_dtype() == "BF16" for m in matrices)

    def part(self, m: Matrix, scheme: str, kind: str) -> Tensor:
        """One stored part of a scheme that holds the matrix exactly."""
        format = FORMATS[scheme]
        if kind == "codes":
            codes = self.codes(m)
            return (codes ^ 128).view(torch.int8) if isinstance(format, Int8) else codes
        scale = self.scales(m).float()  # (out, groups)
        if not isinstance(format, Int4):
            return scale[:, 0].to(format.scale_dtype)
        if kind == "zero":
            scale = scale * (8 - self.zero_points(m))
        return scale[:, self.group_of(m)[:: format.group]].to(format.scale_dtype)  # (out, in / g)

    def weight(self, m: Matrix) -> Tensor:
        """The weights (out, in) in float32."""
        groups, codes = self.group_of(m), self.codes(m)
        scale, zero = self.scales(m).float(), self.zero_points(m)
        weight = torch.empty(m.rows, m.columns)
        for rows in row_chunks(m.rows, m.columns):
            weight[rows] = (unpack_bits(codes[rows], self.bits) - zero[rows][:, groups]) * scale[rows][:, groups]
        return weight


def are_runs(groups: Tensor, size: int) -> bool:
    """groups (in,): does every run of `size` inputs, from the first on, share one?"""
    groups = groups.view(-1, size)  # (in / size, size)
    return bool((groups == groups[:, :1]).all())


@dataclass(frozen=True)
class Gptq(Layout):
    """AutoGPTQ and GPTQModel: qweight (in * bits / 32, out), qzeros (groups, out * bits / 32), scales (groups, out),
    g_idx (in,).

    Version 1 stores every zero point minus one, subtracted from the packed words with borrows, so one is added to the
    words again. Sources: GPTQModel, gptqmodel/nn_modules/qlinear/__init__.py (pack_original, dequantize_weight) and
    gptqmodel/utils/model.py (convert_gptq_v1_to_v2_format_module).
    """

    version: int = 1
    zeros_only = ("bias",)  # older AutoGPTQ gave one to every matrix

    def restore_words(self, words):
        return words + (0x11111111 if self.bits == 4 else 0x01010101) if self.version == 1 else words


@dataclass(frozen=True)
class Awq(Layout):
    """AutoAWQ's version "gemm": qweight (in, out / 8) int32, a word's eight outputs in the order 0 2 4 6 1 3 5 7 from
    the lowest bits on; qzeros (groups, out / 8) alike; scales (groups, out). Source: AutoAWQ,
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
        pairs = as_bytes(words)  # (n, out / 2)
        codes = torch.stack((pairs & 15, pairs >> 4), -1).view(len(words), -1, 8)  # (n, out / 8, 8), lowest bits first
        return codes[..., [0, 4, 1, 5, 2, 6, 3, 7]].flatten(1)  # outputs 0 to 7


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
    def has_zeros(self) -> bool:
        return not self.symmetric

    def tensors(self, m):
        return super().tensors(m) | {"weight_shape": ((2,), ("I64", "I32"))}

    def check(self, m):
        super().check(m)
        if m.get("weight_shape").tolist() != [m.rows, m.columns]:
            raise ValueError(f"{m.name}.weight_shape is {m.get('weight_shape').tolist()}, not {[m.rows, m.columns]}")
