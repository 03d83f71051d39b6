"""Products on a CPU with weights that are packed once, ahead of decoding.

    multiply_in_parts           a product in parts whose numbers of rows give bitwise equal rows
    PackedWeights, PackedInt8   weights (out, in), or int8 codes, in oneDNN's layout
    PlainWeights                weights as they are
    to_digits, from_digits      float activations as 8-bit digits, whose products with int8 codes are exact sums

A plain Linear rearranges its weights inside every product, which costs as much as reading them (benchmarks/NOTES.md).
torch.compile cannot trace a tensor in oneDNN's opaque layout, so compiled code holds its number, the `handle`, and
multiplies through one operator.
"""

import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weights.compiling import LIBRARY, is_small_batch, module_of, register_handle
from weights.rounding import invariant_row_counts

LARGE_BYTES = 2**21  # larger weights do not fit the inner caches: reading them is the cost of a product
FAST_ROWS = 5  # smaller batches are padded: for 4 to 6 rows oneDNN reads 16- and 8-bit weights up to 25 % faster
ROW_COUNTS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 24, 32, 48, 64, 128, 512)  # numbers of rows to probe
LARGE_ROW_COUNTS = (FAST_ROWS, 6, 9, 12, 16, 32, 64, 128)  # for large weights, whose probe takes milliseconds
ANY_ROWS = 2**31  # as a bound: no bound

LIBRARY.define("packed_product(Tensor x, Tensor handle, int out_features, ScalarType dtype) -> Tensor")


@torch.library.impl(LIBRARY, "packed_product", "CPU")
def _packed_product(x: Tensor, handle: Tensor, out_features: int, dtype: torch.dtype) -> Tensor:
    return module_of(handle).multiply(x.contiguous())  # Inductor chooses strides


@torch.library.register_fake("quickdraft::packed_product")
def _shape_of_product(x: Tensor, handle: Tensor, out_features: int, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.size(0), out_features, dtype=dtype)


# ----------------------------------------------------------------------------------------------- oneDNN


def multiply_in_parts(
    product: Callable[[Tensor], Tensor], x: Tensor, row_counts: Sequence[int], max_split: int = ANY_ROWS
) -> Tensor:
    """product(x (M, in)) -> (M, out), padded with zeros to the next of `row_counts`, ascending, or split into parts of
    the largest. One product of all rows for more than `max_split`, and without row counts."""
    M = x.size(0)
    for count in row_counts:
        if count >= M:
            return product(x) if count == M else product(F.pad(x, (0, 0, 0, count - M)))[:M]
    if max_split < M or not row_counts:
        return product(x)
    return torch.cat([multiply_in_parts(product, part, row_counts) for part in x.split(row_counts[-1])])


class PackedWeights(nn.Module):
    """Weights (out, in), bfloat16, float16 or float32, in oneDNN's layout for products with few rows. They stay on the
    CPU and are never unpacked.

    Batches of up to `max_split` rows are split into `row_counts`, sizes that give bitwise equal rows. A row's result
    depends on the row alone in products of up to `batch_invariant_rows` rows.
    """

    def __init__(self, weight: Tensor):
        super().__init__()
        self.out_features = len(weight)
        self.dtype = weight.dtype  # of products
        self.data = self.prepack(weight)
        self.row_counts, self.max_split = self.find_row_counts(*weight.shape, weight.dtype, torch.get_num_threads())
        self.batch_invariant_rows = self.max_split
        self.register_buffer("handle", register_handle(self), persistent=False)

    @classmethod
    @functools.cache
    def find_row_counts(cls, out: int, n: int, dtype: torch.dtype, threads: int) -> tuple[Sequence[int], int]:
        """(row_counts, max_split) for weights (out, n)."""
        is_large = out * n * dtype.itemsize >= LARGE_BYTES
        ones = cls.__new__(cls)
        nn.Module.__init__(ones)
        ones.data = ones.prepack(torch.ones(out, n, dtype=dtype))
        candidates = LARGE_ROW_COUNTS if is_large else ROW_COUNTS
        if is_large and dtype.itemsize == 4:
            candidates = (1, 2, 3, *candidates)
        # A tile of AMX has 16 rows, which cost as much as one; in float32 every row costs.
        max_first = 16 if dtype.itemsize == 2 else 2
        row_counts = tuple(invariant_row_counts(ones.product, n, dtype, candidates, max_first))
        return (row_counts, ANY_ROWS) if row_counts else (candidates[:1], 0)

    def prepack(self, weight: Tensor) -> Tensor:
        return torch.ops.mkldnn._reorder_linear_weight(weight, 1)

    def product(self, x: Tensor) -> Tensor:
        """The kernel alone, on x (M, in)."""
        return torch.ops.mkldnn._linear_pointwise(x, self.data, None, "none", [], "")

    def multiply(self, x: Tensor) -> Tensor:
        """`forward` in eager code."""
        return multiply_in_parts(self.product, x, self.row_counts, self.max_split)

    def forward(self, x: Tensor) -> Tensor:
        """x (M, in) -> (M, out) of `dtype`."""
        if not torch.compiler.is_compiling():
            return self.product(x) if x.size(0) in self.row_counts else self.multiply(x)

        def product(x: Tensor) -> Tensor:
            return torch.ops.quickdraft.packed_product(x, self.handle, self.out_features, self.dtype)

        is_split = is_small_batch(x.size(0), self.row_counts[-1])
        return multiply_in_parts(product, x, self.row_counts) if is_split else product(x)

    @staticmethod
    def is_faster(weight: Tensor) -> bool:
        """Does oneDNN multiply this dtype on this machine, and gain? In float32 only large weights gain."""
        if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
            return False
        if weight.dtype == torch.bfloat16:
            return torch.ops.mkldnn._is_mkldnn_bf16_supported()
        if weight.dtype == torch.float16:
            return torch.ops.mkldnn._is_mkldnn_fp16_supported()
        return weight.dtype == torch.float32 and weight.nbytes >= LARGE_BYTES


class PlainWeights(PackedWeights):
    """Weights as they are, where packing gains nothing. Batches are split all the same."""

    def prepack(self, weight: Tensor) -> Tensor:
        return weight

    def product(self, x: Tensor) -> Tensor:
        return F.linear(x, self.data)


def prepack_weight(weight: Tensor) -> PackedWeights:
    """Weights (out, in) for products on a CPU, packed where packing gains."""
    return PackedWeights(weight) if PackedWeights.is_faster(weight) else PlainWeights(weight)


class PackedInt8(PackedWeights):
    """int8 codes (out, in) with a float32 scale a row. They multiply the uint8 digits of `to_digits`."""

    def __init__(self, codes: Tensor, scale: Tensor):
        super().__init__(codes)
        self.dtype, self.scale, self.zeros = torch.float32, scale.float(), torch.zeros(len(codes), dtype=torch.int64)
        self.batch_invariant_rows = ANY_ROWS

    @classmethod
    def find_row_counts(cls, out: int, n: int, dtype: torch.dtype, threads: int) -> tuple[Sequence[int], int]:
        """Integer sums are exact in any order, so any number of rows will do."""
        return (FAST_ROWS,), 0

    def prepack(self, weight: Tensor) -> Tensor:
        return torch.ops.onednn.qlinear_prepack(weight, None)

    def product(self, x: Tensor) -> Tensor:
        return torch.ops.onednn.qlinear_pointwise(
            x, 1.0, 128, self.data, self.scale, self.zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )

    @staticmethod
    def is_faster(weight: Tensor) -> bool:
        """Only large weights gain: the time to make digits is more than that to read small ones."""
        is_large = weight.nbytes >= LARGE_BYTES
        return weight.device.type == "cpu" and is_large and weight.size(1) <= 2**16 and sums_exactly()


@functools.cache
def sums_exactly() -> bool:
    """Does this processor add products of 8-bit numbers without overflow? Without VNNI instructions it may add pairs in
    16 bits, which the largest values exceed. Processors other than x86 may lack the operator."""
    n, expected = 256, torch.full((1, 32), float(127 * 127 * 256))
    try:
        packed = PackedInt8(torch.full((32, n), 127, dtype=torch.int8), torch.ones(32))
        return torch.equal(packed.multiply(torch.full((1, n), 255, dtype=torch.uint8)), expected)
    except (RuntimeError, AttributeError):  # torch.ops raises AttributeError for an operator that was not built
        return False


def to_digits(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (M, in) -> digits (n * M, in) uint8, all rows' lowest digits first; step (M, 1) float32.

    x is rounded to whole steps of its row: x = step * sum_i 256^i (digit_i - 128), |error| <= step / 2. Two digits make
    a step max|x| / 32638, and the relative error of a product about 2^-16 / sqrt(3) * max|x| / rms(x). As max|x| <=
    sqrt(in) * rms(x), that is below the rounding of a bfloat16 result, 2^-9 / sqrt(3), for up to 16384 inputs. Three
    digits, a step of max|x| / 8355710, do the same for float32.
    """
    n = 2 if x.dtype == torch.bfloat16 else 3
    max_steps = sum(127 * 256**i for i in range(n)) - 1  # all digits 127, less 1 for rounding x / step
    x = x.float()  # before the maximum: compiled code may hold x unrounded, and a rounded maximum would be too small
    # clamp keeps NaN: one NaN makes every result of its row NaN
    step = x.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / max_steps
    rest, digits = (x / step).round().to(torch.int32) + sum(128 * 256**i for i in range(n)), []
    for _ in range(n - 1):
        digits.append(rest & 255)
        rest = rest >> 8
    return torch.stack([*digits, rest]).to(torch.uint8).flatten(0, 1), step  # (n, M, in) -> (n * M, in)


def from_digits(y: Tensor, step: Tensor) -> Tensor:
    """Products (n * M, out) of digits, and the rows' steps (M, 1) -> products (M, out) float32."""
    *lower, total = y.view(-1, step.size(0), y.size(1)).unbind()  # n of (M, out)
    for digit in reversed(lower):
        total = torch.add(digit, total, alpha=256)
    return total * step


@functools.cache
def int8_row_counts(dtype: torch.dtype, threads: int) -> Sequence[int]:
    """Numbers of rows with bitwise equal rows in aten's product of int8 codes and activations of this type."""
    ones = torch.ones(64, 512, dtype=torch.int8), torch.ones(64, dtype=dtype)
    return invariant_row_counts(lambda x: torch._weight_int8pack_mm(x, *ones), 512, dtype, ROW_COUNTS[:10], max_first=1)


# ------------------------------------------------------------------------------------------------- int4

INT4_KERNEL = torch.ops.quantized.int4mm_packed_weight_cpu


@functools.cache
def int4_row_counts(dtype: torch.dtype, threads: int) -> Sequence[int]:
    """Numbers of rows with bitwise equal rows in aten's product of int4 codes."""
    codes = torch.ones(64, 512, dtype=torch.int32)  # (1 - 8) * 1 + 8: every weight is 1
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    scales = torch.tensor([1.0, 8.0], dtype=dtype).repeat(4, 64, 1)  # (in / 128, 64, 2)
    return invariant_row_counts(
        lambda x: INT4_KERNEL(x, packed, torch.tensor(128), scales), 512, dtype, range(1, 65), max_first=1
    )
