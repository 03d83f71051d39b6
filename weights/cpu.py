"""Products on a CPU with weights that are packed once, ahead of decoding.

    PackedWeights, PackedInt8           weights (out, in), or int8 codes, in oneDNN's layout
    TransposedWeights, TransposedInt8   weights as they are, on the left of the product, for AMX
    PlainWeights                        weights as they are, where neither gains
    prepack_weight, prepack_int8        the class that suits the processor
    to_digits, from_digits              float activations as 8-bit digits, whose products with int8
                                        codes are exact sums

A plain Linear rearranges its weights inside every product, which costs as much as reading them
(benchmarks/NOTES.md). torch.compile cannot trace a tensor in oneDNN's opaque layout, so compiled
code holds its number, the `handle`, and runs the kernel through one operator. exact/products.py
decides how many rows such a product takes at once.

With AMX the plain layout is best. An AMX tile has 16 rows, so with x on the left a batch of a few
rows leaves most of the tile as padding. Two virtual CPUs of a cloud machine are usually two threads
of one core that share its AMX unit, so this wasted arithmetic, not memory, is the bottleneck: a
packed model of 1.1B parameters was read at 10 of 27 GB/s. With the weights on the left, W x^T, all
rows of a tile are used, and the same machine reads 21 to 33 GB/s.
"""

import functools
from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from exact.products import (
    INTEGER_SPLIT,
    LARGE_ROW_COUNTS,
    ROW_COUNTS,
    UNPADDED_ROW_COUNTS,
    RowSplit,
    find_packed_split,
)
from weights.compiling import LIBRARY, is_small_batch, module_of, register_handle

# Larger weights do not fit the inner caches, so reading them is a product's cost.
LARGE_BYTES = 2**21
TILE_ROWS = 16  # of a tile of AMX

LIBRARY.define(
    "packed_product(Tensor x, Tensor handle, int out_features, ScalarType dtype) -> Tensor"
)


@torch.library.impl(LIBRARY, "packed_product", "CPU")
def _packed_product(x: Tensor, handle: Tensor, out_features: int, dtype: torch.dtype) -> Tensor:
    return module_of(handle).run_kernel(x.contiguous())  # Inductor chooses strides


@torch.library.register_fake("quickdraft::packed_product")
def _shape_of_product(x: Tensor, handle: Tensor, out_features: int, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.size(0), out_features, dtype=dtype)


LIBRARY.define("transposed_product(Tensor x, Tensor weight) -> Tensor")


@torch.library.impl(LIBRARY, "transposed_product", "CPU")
def transposed_product(x: Tensor, weight: Tensor) -> Tensor:
    """x (M, in), weight (out, in) -> (M, out)"""
    x = x.contiguous()  # Inductor chooses strides, and kernels are chosen by them
    if len(x) == 1:
        return torch.mv(weight, x[0])[None]  # (in,) -> (1, out)
    if len(x) <= TILE_ROWS:
        # (out, in) (in, M) -> (out, M) -> (M, out), laid out as the operator says
        return torch.mm(weight, x.t()).t().contiguous()
    return F.linear(x, weight)


@torch.library.register_fake("quickdraft::transposed_product")
def _shape_of_transposed_product(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.size(0), weight.size(0))


# ----------------------------------------------------------------------------------------- oneDNN


class PackedWeights(nn.Module):
    """Weights (out, in), bfloat16, float16 or float32, in oneDNN's layout for products with few
    rows. They stay on the CPU and are never unpacked. `row_split` says in which numbers of rows
    `kernel` runs."""

    # Rows that cost little more than one, by the weights' dtype: a batch is padded up to there.
    tile_rows: ClassVar[dict[torch.dtype, int]] = {
        torch.bfloat16: TILE_ROWS,
        torch.float16: TILE_ROWS,
        torch.float32: 2,
    }

    def __init__(self, weight: Tensor):
        super().__init__()
        self.out_features = len(weight)
        self.dtype = weight.dtype  # of products
        self.data = self.prepack(weight)
        self.row_split = self.find_row_split(weight)
        self.register_buffer("handle", register_handle(self), persistent=False)

    @classmethod
    def find_row_split(cls, weight: Tensor) -> RowSplit:
        threads = torch.get_num_threads()
        candidates = cls.probed_rows(weight)
        max_first = cls.tile_rows[weight.dtype]
        return find_packed_split(
            cls.kernel_on_ones, *weight.shape, weight.dtype, candidates, max_first, threads
        )

    @staticmethod
    def probed_rows(weight: Tensor) -> tuple[int, ...]:
        """The numbers of rows to try."""
        if weight.nbytes < LARGE_BYTES:
            return ROW_COUNTS
        return LARGE_ROW_COUNTS if weight.dtype.itemsize == 2 else (1, 2, 3, *LARGE_ROW_COUNTS)

    @classmethod
    def kernel_on_ones(cls, out: int, n: int, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        """`kernel` of weights (out, n) that are 1."""
        ones = cls.__new__(cls)
        nn.Module.__init__(ones)
        ones.data = ones.prepack(torch.ones(out, n, dtype=dtype))
        return ones.kernel

    @property
    def batch_invariant_rows(self) -> int:
        """The largest number of rows for which a row's result depends on the row alone."""
        return self.row_split.batch_invariant_rows

    def prepack(self, weight: Tensor) -> Tensor:
        return torch.ops.mkldnn._reorder_linear_weight(weight, 1)

    def kernel(self, x: Tensor) -> Tensor:
        """The kernel alone, on x (M, in)."""
        return torch.ops.mkldnn._linear_pointwise(x, self.data, None, "none", [], "")

    def traced_kernel(self, x: Tensor) -> Tensor:
        """`kernel` for compiled code, which cannot trace oneDNN's layout."""
        return torch.ops.quickdraft.packed_product(x, self.handle, self.out_features, self.dtype)

    def run_kernel(self, x: Tensor) -> Tensor:
        """`kernel` in the numbers of rows of `row_split`."""
        return self.row_split.run(self.kernel, x)

    def forward(self, x: Tensor) -> Tensor:
        """x (M, in) -> (M, out) of `dtype`."""
        if not torch.compiler.is_compiling():
            return self.run_kernel(x)

        if is_small_batch(x.size(0), self.row_split.row_counts[-1]):
            return self.row_split.run(self.traced_kernel, x)
        return self.traced_kernel(x)

    @staticmethod
    def is_faster(weight: Tensor) -> bool:
        """Does oneDNN multiply this dtype on this machine, and gain? In float32 only large weights
        gain."""
        if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
            return False
        if weight.dtype == torch.bfloat16:
            return torch.ops.mkldnn._is_mkldnn_bf16_supported()
        if weight.dtype == torch.float16:
            return torch.ops.mkldnn._is_mkldnn_fp16_supported()
        return weight.dtype == torch.float32 and weight.nbytes >= LARGE_BYTES


class PlainWeights(PackedWeights):
    """Weights as they are, where packing gains nothing. Batches are split all the same.

    In 16 bits aten reads the weights anew for every row, so that each row of padding costs as much
    as a row of the batch.
    """

    tile_rows: ClassVar[dict[torch.dtype, int]] = {
        torch.bfloat16: 1,
        torch.float16: 1,
        torch.float32: 2,
    }

    @staticmethod
    def probed_rows(weight: Tensor) -> tuple[int, ...]:
        return ROW_COUNTS if weight.dtype.itemsize == 4 else UNPADDED_ROW_COUNTS

    def prepack(self, weight: Tensor) -> Tensor:
        return weight

    def kernel(self, x: Tensor) -> Tensor:
        return F.linear(x, self.data)


class TransposedWeights(PlainWeights):
    """Weights as they are, on the left of the product: y^T = W x^T."""

    tile_rows = PackedWeights.tile_rows

    @staticmethod
    def probed_rows(weight: Tensor) -> tuple[int, ...]:
        return ROW_COUNTS  # one row may be the best split for weights of any size

    def kernel(self, x: Tensor) -> Tensor:
        return transposed_product(x, self.data)

    def traced_kernel(self, x: Tensor) -> Tensor:
        """`kernel` without the detour over the handle, which takes 20 µs a product."""
        return torch.ops.quickdraft.transposed_product(x, self.data)


def has_tiles() -> bool:
    """Does this processor have AMX?"""
    return torch.cpu._is_amx_tile_supported()


def prepack_weight(weight: Tensor) -> PackedWeights:
    """Weights (out, in) for products on a CPU, in the form that this processor reads fastest."""
    if weight.dtype.itemsize == 2 and has_tiles():
        return TransposedWeights(weight)
    return PackedWeights(weight) if PackedWeights.is_faster(weight) else PlainWeights(weight)


class PackedInt8(PackedWeights):
    """int8 codes (out, in) with a float32 scale a row. They multiply the uint8 digits of
    `to_digits`."""

    def __init__(self, codes: Tensor, scale: Tensor):
        super().__init__(codes)
        self.dtype = torch.float32
        self.scale = scale.float()
        self.zeros = torch.zeros(len(codes), dtype=torch.int64)

    @classmethod
    def find_row_split(cls, weight: Tensor) -> RowSplit:
        return INTEGER_SPLIT

    def prepack(self, weight: Tensor) -> Tensor:
        return torch.ops.onednn.qlinear_prepack(weight, None)

    def kernel(self, x: Tensor) -> Tensor:
        return torch.ops.onednn.qlinear_pointwise(
            x,
            1.0,
            128,
            self.data,
            self.scale,
            self.zeros,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )

    @staticmethod
    def is_faster(weight: Tensor) -> bool:
        """Only large weights gain: the time to make digits is more than that to read small ones."""
        is_large = weight.nbytes >= LARGE_BYTES
        return (
            weight.device.type == "cpu" and is_large and weight.size(1) <= 2**16 and sums_exactly()
        )


class TransposedInt8(PackedInt8):
    """int8 codes as they are, on the left of the product."""

    @classmethod
    def find_row_split(cls, weight: Tensor) -> RowSplit:
        return RowSplit((1,), is_exact=True)  # any number of rows will do, in one product

    def prepack(self, weight: Tensor) -> Tensor:
        return weight

    def kernel(self, x: Tensor) -> Tensor:
        digits = (x ^ 128).view(torch.int8)  # x - 128
        sums = torch._int_mm(self.data, digits.t())  # (out, in) (in, M) -> (out, M)
        return sums.t().contiguous().float() * self.scale  # (M, out)

    def traced_kernel(self, x: Tensor) -> Tensor:
        return self.kernel(x)


def prepack_int8(codes: Tensor, scale: Tensor) -> PackedInt8:
    """int8 codes (out, in), in the form that this processor reads fastest."""
    return TransposedInt8(codes, scale) if has_tiles() else PackedInt8(codes, scale)


@functools.cache
def sums_exactly() -> bool:
    """Does this processor add products of 8-bit numbers without overflow? Without VNNI instructions
    it may add pairs in 16 bits, which the largest values exceed. Processors other than x86 may lack
    the operator."""
    n = 256
    expected = torch.full((1, 32), float(127 * 127 * n))
    try:
        packed = prepack_int8(torch.full((32, n), 127, dtype=torch.int8), torch.ones(32))
        return torch.equal(packed.run_kernel(torch.full((1, n), 255, dtype=torch.uint8)), expected)
    except (RuntimeError, AttributeError):  # torch.ops lacks an operator that was not built
        return False


def to_digits(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (M, in) -> digits (n * M, in) uint8, all rows' lowest digits first; step (M, 1) float32.

    x is rounded to whole steps of its row: x = step * sum_i 256^i (digit_i - 128), |error| <= step
    / 2. Two digits make a step max|x| / 32638, and the relative error of a product about 2^-16 /
    sqrt(3) * max|x| / rms(x). As max|x| <= sqrt(in) * rms(x), that is below the rounding of a
    bfloat16 result, 2^-9 / sqrt(3), for up to 16384 inputs. Three digits, a step of max|x| /
    8355710, do the same for float32.
    """
    n = 2 if x.dtype == torch.bfloat16 else 3
    # The largest number whose digits are all 127, less 1 for rounding x / step.
    max_steps = sum(127 * 256**i for i in range(n)) - 1
    # Cast before the maximum: compiled code may hold x unrounded, and a rounded maximum would be
    # too small.
    x = x.float()
    # clamp keeps NaN, so one NaN makes its row's results NaN.
    step = x.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / max_steps
    rest = (x / step).round().to(torch.int32) + sum(128 * 256**i for i in range(n))
    digits = []
    for _ in range(n - 1):
        digits.append(rest & 255)
        rest = rest >> 8
    digits = torch.stack([*digits, rest]).to(torch.uint8)
    return digits.flatten(0, 1), step  # (n, M, in) -> (n * M, in)


def from_digits(y: Tensor, step: Tensor) -> Tensor:
    """Products (n * M, out) of digits, and the rows' steps (M, 1) -> products (M, out) float32."""
    *lower, total = y.view(-1, step.size(0), y.size(1)).unbind()  # n of (M, out)
    for digit in reversed(lower):
        total = torch.add(digit, total, alpha=256)
    return total * step


def int8_kernel_on_ones(out: int, n: int, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """aten's product of int8 codes (out, n) that are 1, for x (M, n) of this dtype."""
    codes = torch.ones(out, n, dtype=torch.int8)
    scale = torch.ones(out, dtype=dtype)
    return lambda x: torch._weight_int8pack_mm(x, codes, scale)


# ------------------------------------------------------------------------------------------- int4

INT4_KERNEL = torch.ops.quantized.int4mm_packed_weight_cpu


def int4_kernel_on_ones(out: int, n: int, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """aten's product of int4 codes (out, n) in groups of 128 whose weights are 1, for x (M, n) of
    this dtype."""
    group = 128
    codes = torch.ones(out, n, dtype=torch.int32)  # (1 - 8) * 1 + 8: every weight is 1
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    scales = torch.tensor([1.0, 8.0], dtype=dtype).repeat(n // group, out, 1)  # (in / g, out, 2)
    return lambda x: INT4_KERNEL(x, packed, torch.tensor(group), scales)
