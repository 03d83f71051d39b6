"""Where other programs store a quantized matrix: codes packed into words, scales, zero points.

    IntegerLayout               the stored tensors, and their conversion to our parts
    Gptq, Awq, PackQuantized    4 and 8 bits, packed into int32 words; floats.py has the other
                                layouts

Every program means w[o, i] = scale[o, g] * (code[o, i] - zero_point[o, g]), g the group of input i.
Our int4 has (code - 8) * scale + zero, so zero = (8 - zero_point) * scale. With float16 or bfloat16
scales, our float32 schemes (int4-g128-float32) give the published weights bit for bit: a scale's 11
bits times the other factor's 4 bits fit in float32's 24, and the sum is a multiple of the same last
bit, at most 15 scales. With float32 scales and zero points other than 8, a weight differs by at
most 2^-20 scale. Groups of inputs that are not neighbours are quantized again.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.errors import UserError
from loading.files import Expected
from loading.folder import Fit, Matrix
from weights.formats import FORMATS, by_chunks, unpack_bits

# Stored types, as safetensors calls them.
WORDS = ("I32",)
FLOATS = ("BF16", "F16", "F32")


def as_bytes(words: Tensor) -> Tensor:
    """int32 (…, n) -> uint8 (…, 4 n), lowest byte first, the order of pack_bits."""
    return words.contiguous().view(torch.uint8)


@dataclass(frozen=True)
class IntegerLayout:
    """A program's layout of one matrix. In this class int32 words hold the codes of neighbouring
    inputs, and the zero points of neighbouring outputs, from the lowest bits on."""

    bits: int
    group: int  # neighbouring inputs that share a scale; -1: all
    note: str = ""  # for the user, when such a folder is loaded
    has_zeros: bool = True  # are zero points stored? Otherwise they are the middle code
    has_order: bool = False  # is the group of every input stored?

    key = "qweight"  # marks a quantized matrix
    scale_key = "scales"
    zero_key = "qzeros"
    order_key = "g_idx"
    inputs_first = True  # is every matrix stored transposed?
    stacks_with_plain = False  # may matrices of full precision be stacked with quantized ones?

    def tensors(self, m: Matrix) -> dict[str, Expected]:
        groups = self.groups(m)
        headers = {
            self.key: ((m.rows, self.words(m.columns)), WORDS),
            self.scale_key: ((m.rows, groups), FLOATS),
        }
        if self.has_zeros:
            headers[self.zero_key] = ((self.words(m.rows), groups), WORDS)
        if self.has_order:
            headers[self.order_key] = ((m.columns,), WORDS)
        if not self.inputs_first:
            return headers
        return {name: (shape[::-1], types) for name, (shape, types) in headers.items()}

    @property
    def middle(self) -> int:
        """The zero point of symmetric codes."""
        return 2 ** (self.bits - 1)

    def get(self, m: Matrix, part: str) -> Tensor:
        """A stored matrix, outputs first."""
        stored = m.get(part)
        return stored.T if self.inputs_first else stored

    def codes(self, m: Matrix) -> Tensor:
        """(out, in * bits / 8), packed as pack_bits does."""
        codes = as_bytes(self.get(m, self.key))
        return codes[:, : m.columns * self.bits // 8]

    def scales(self, m: Matrix) -> Tensor:
        """(out, groups)"""
        return self.get(m, self.scale_key)

    def zero_points(self, m: Matrix, offset: int = 0) -> Tensor:
        """(out, groups), in [0, 2^bits). `offset` is added to every stored word, so that it carries
        from code to code, as in GPTQModel."""
        if not self.has_zeros:
            return torch.full((m.rows, self.groups(m)), self.middle)
        words = self.get(m, self.zero_key).T + offset  # (groups, out * bits / 32)
        zeros = unpack_bits(as_bytes(words), self.bits)
        return zeros[:, : m.rows].T

    def group_of(self, m: Matrix) -> Tensor:
        """(in,): the group of every input."""
        if self.has_order:
            groups = m.get(self.order_key).long()
            if not 0 <= groups.min() <= groups.max() < self.groups(m):
                raise UserError(
                    f"{m.name}.{self.order_key} has groups outside 0 to {self.groups(m) - 1}"
                )
            return groups
        return torch.arange(m.columns) // self.group_size(m)

    def group_size(self, m: Matrix) -> int:
        return m.columns if self.group == -1 else self.group

    def groups(self, m: Matrix) -> int:
        return math.ceil(m.columns / self.group_size(m))

    def words(self, n: int) -> int:
        """The number of int32 words for n codes."""
        return math.ceil(n * self.bits / 32)

    def is_centred(self, m: Matrix) -> bool:
        """Is every zero point the middle code?"""
        return bool((self.zero_points(m) == self.middle).all())

    def fit(self, matrices: Collection[Matrix]) -> Fit:
        is_centred = all(map(self.is_centred, matrices))
        suffix = self.suffix(matrices) if is_centred else "-float32"
        if self.bits == 8:
            has_rows = all(self.groups(m) == 1 for m in matrices)
            if is_centred and has_rows:
                return Fit(f"int8{suffix}")
            reason = "its 8-bit codes have scales of groups, or zero points"
            return Fit(None, "int8", "8 bits", f"{reason}; int8 has one scale a row")
        for size in (128, 64, 32):
            if all(are_runs(self.group_of(m), size) for m in matrices):
                return Fit(f"int4-g{size}{suffix}")
        reason = "its groups are not runs of 32 neighbouring inputs, as with act-order"
        return Fit(None, "int4-g32", "4 bits", reason)

    def suffix(self, matrices: Collection[Matrix]) -> str:
        """Of the scheme that holds the scales: ours are bfloat16, or float32."""
        is_bf16 = all(m.stored(self.scale_key).get_dtype() == "BF16" for m in matrices)
        return "" if is_bf16 else "-float32"

    def part(self, m: Matrix, scheme: str, part: str) -> Tensor:
        format = FORMATS[scheme]
        shape, dtype = format.shapes(m.rows, m.columns)[part]
        if part == "codes":
            codes = self.codes(m)
            if dtype == torch.int8:
                codes = codes ^ 128
            return codes.view(dtype)
        values = self.scales(m).float()  # (out, groups)
        if part == "zero":
            values = values * (format.center - self.zero_points(m))
        groups = self.group_of(m)[:: format.group or m.columns]  # of the scheme's groups
        return values[:, groups].view(shape).to(dtype)

    def weight(self, m: Matrix) -> Tensor:
        groups = self.group_of(m)

        def decode(parts: dict[str, Tensor]) -> Tensor:
            steps = unpack_bits(parts["codes"], self.bits) - parts["zero"][:, groups]
            return steps * parts["scale"][:, groups]

        parts = {"codes": self.codes(m), "zero": self.zero_points(m), "scale": self.scales(m)}
        parts["scale"] = parts["scale"].float()
        return by_chunks(decode, parts, torch.float32)


def are_runs(groups: Tensor, size: int) -> bool:
    """groups (in,): does every run of `size` inputs, from the first on, share one?"""
    if len(groups) % size:
        return False
    runs = groups.view(-1, size)  # (in / size, size)
    return bool((runs == runs[:, :1]).all())


@dataclass(frozen=True)
class Gptq(IntegerLayout):
    """AutoGPTQ and GPTQModel: qweight (in * bits / 32, out), qzeros (groups, out * bits / 32),
    scales (groups, out), g_idx (in,).

    Version 1 stores every zero point minus one, subtracted from the packed words with borrows, so
    one is added to the words again. Some writers say version 1 and store version 2
    (vllm-project/vllm pull request 38966), so a matrix of a symmetric folder whose stored zero
    points all equal the middle code is read as version 2. Sources: GPTQModel,
    gptqmodel/nn_modules/qlinear/__init__.py (pack_original, dequantize_weight) and
    gptqmodel/utils/model.py (convert_gptq_v1_to_v2_format_module).
    """

    has_order: bool = True
    version: int = 1
    symmetric: bool = False

    def zero_points(self, m):
        stored = super().zero_points(m)
        if self.version == 2 or (self.symmetric and (stored == self.middle).all()):
            return stored
        ones = 0x11111111 if self.bits == 4 else 0x01010101
        return super().zero_points(m, ones)


@dataclass(frozen=True)
class Awq(IntegerLayout):
    """AutoAWQ's version "gemm": qweight (in, out / 8) int32, a word's eight outputs in the order 0
    2 4 6 1 3 5 7 from the lowest bits on; qzeros (groups, out / 8) alike; scales (groups, out).
    Source: AutoAWQ, awq/modules/linear/gemm.py (from_linear) and awq/utils/packing_utils.py."""

    def tensors(self, m):
        return super().tensors(m) | {"qweight": ((m.columns, self.words(m.rows)), WORDS)}

    def codes(self, m):
        codes = self.outputs(m.get("qweight")).T  # (in, out) -> (out, in)
        return codes[:, ::2] | codes[:, 1::2] << 4

    def zero_points(self, m):
        return self.outputs(m.get("qzeros")).T.int()

    @staticmethod
    def outputs(words: Tensor) -> Tensor:
        """(n, out / 8) int32 -> (n, out) uint8."""
        codes = unpack_bits(as_bytes(words), 4)
        codes = codes.to(torch.uint8).unflatten(1, (-1, 8))  # (n, out / 8, 8), lowest bits first
        return codes[..., [0, 4, 1, 5, 2, 6, 3, 7]].flatten(1)  # outputs 0 to 7


class PackQuantized(IntegerLayout):
    """compressed-tensors' pack-quantized: weight_packed (out, in * bits / 32), signed codes plus
    2^(bits - 1); weight_scale (out, groups); unless symmetric, weight_zero_point (out * bits / 32,
    groups); weight_g_idx (in,) with actorder "group"; weight_shape. Source: compressed-tensors,
    compressors/pack_quantized/{base,helpers}.py and quantization/lifecycle/forward_helpers.py
    (_process_group)."""

    key = "weight_packed"
    scale_key = "weight_scale"
    zero_key = "weight_zero_point"
    order_key = "weight_g_idx"
    inputs_first = False

    def tensors(self, m):
        return super().tensors(m) | {"weight_shape": ((2,), ("I64", "I32"))}
