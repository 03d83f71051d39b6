"""Products on a CPU with weights that are laid out for them once.

    in_widths                   a product in parts whose numbers of rows round alike
    PackedWeights, PackedInt8   weights (out, in), or int8 codes, in oneDNN's layout;  PlainWeights  as they are
    to_digits, from_digits      float activations as 8-bit digits, whose products with int8 codes are exact sums
    int4_layout, unpack_int4    the codes in the rows that aten's int4 kernel reads

A plain Linear rearranges its weights inside every product, which costs as much as reading them; benchmarks/NOTES.md has
the measurements. oneDNN's layout is opaque: torch.compile cannot trace such a tensor, so compiled code holds a number
for it (`handle`) and multiplies through one operator. This file does not know formats, Linears or models.
"""

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weights.compiling import known_few
from weights.rounding import same_widths

LARGE = 2**21  # bytes: larger weights lie beyond the inner caches, and reading them is what a product costs
ROWS = 5  # oneDNN reads 16-bit and 8-bit weights up to a quarter faster for 4 to 6 rows than for 1: fewer are padded
WIDTHS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 24, 32, 48, 64, 128, 512)  # numbers of rows that products may have
LARGE_WIDTHS = (ROWS, 6, 9, 12, 16, 32, 64, 128)  # the same where trying one takes milliseconds
ANY = 2**31  # rows

_numbers = itertools.count()
_held: "weakref.WeakValueDictionary[int, nn.Module]" = weakref.WeakValueDictionary()  # with `multiply`, by handle
_library = torch.library.Library("quickdraft", "FRAGMENT")
_library.define("packed_product(Tensor x, Tensor handle, int out_features, ScalarType dtype) -> Tensor")


def _packed_product(x: Tensor, handle: Tensor, out_features: int, dtype: torch.dtype) -> Tensor:
    return _held[handle.item()].multiply(x.contiguous())  # Inductor chooses strides


_library.impl("packed_product", _packed_product, "CPU")


def new_handle(weights: nn.Module) -> Tensor:
    """A number by which `packed_product` finds the weights, whose `multiply(x)` it runs."""
    number = next(_numbers)
    _held[number] = weights
    return torch.tensor(number)


@torch.library.register_fake("quickdraft::packed_product")
def _shape_of_product(x: Tensor, handle: Tensor, out_features: int, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.size(0), out_features, dtype=dtype)


# ----------------------------------------------------------------------------------------------- oneDNN


def in_widths(product: Callable[[Tensor], Tensor], x: Tensor, widths: Sequence[int], most: int = ANY) -> Tensor:
    """product(x (M, in)) -> (M, out), in parts of as many rows as there are in `widths`, ascending, the last one padded
    with zeros; as a whole for more than `most` rows, and without widths."""
    M = x.size(0)
    for width in widths:
        if width >= M:
            return product(x) if width == M else product(F.pad(x, (0, 0, 0, width - M)))[:M]
    if most < M or not widths:
        return product(x)
    return torch.cat([in_widths(product, part, widths) for part in x.split(widths[-1])])


class PackedWeights(nn.Module):
    """Weights (out, in), bfloat16, float16 or float32, in oneDNN's layout for products with few rows. They stay on the
    CPU and are never read back.

    Up to `cut` rows are multiplied in parts that round alike, of `widths` rows. A row's result depends on the row alone
    in products of up to `batch_invariant_rows` rows.
    """

    def __init__(self, weight: Tensor):
        super().__init__()
        self.out_features = len(weight)
        self.dtype = weight.dtype  # of products
        self.data = self.lay_out(weight)
        self.widths, self.cut = self.shapes(*weight.shape, weight.dtype, torch.get_num_threads())
        self.batch_invariant_rows = self.cut
        self.register_buffer("handle", new_handle(self), persistent=False)

    @classmethod
    @functools.cache
    def shapes(cls, out: int, n: int, dtype: torch.dtype, threads: int) -> tuple[Sequence[int], int]:
        """(widths, cut) of weights of a shape."""
        large = out * n * dtype.itemsize >= LARGE
        ones = cls.__new__(cls)
        nn.Module.__init__(ones)
        ones.data = ones.lay_out(torch.ones(out, n, dtype=dtype))
        widths = WIDTHS if not large else LARGE_WIDTHS if dtype.itemsize == 2 else (1, 2, 3, *LARGE_WIDTHS)
        # A tile of AMX has 16 rows, which cost as much as one; in float32 each row costs.
        found = tuple(same_widths(ones.product, n, dtype, widths, fewest=16 if dtype.itemsize == 2 else 2))
        return (found, ANY) if found else (widths[:1], 0)

    def lay_out(self, weight: Tensor) -> Tensor:
        return torch.ops.mkldnn._reorder_linear_weight(weight, 1)

    def product(self, x: Tensor) -> Tensor:
        """The kernel alone, on x (M, in)."""
        return torch.ops.mkldnn._linear_pointwise(x, self.data, None, "none", [], "")

    def multiply(self, x: Tensor) -> Tensor:
        """What `forward` does outside compiled code."""
        return in_widths(self.product, x, self.widths, self.cut)

    def forward(self, x: Tensor) -> Tensor:
        """x (M, in) -> (M, out) of `dtype`."""
        if not torch.compiler.is_compiling():
            return self.product(x) if x.size(0) in self.widths else self.multiply(x)

        def product(x: Tensor) -> Tensor:
            return torch.ops.quickdraft.packed_product(x, self.handle, self.out_features, self.dtype)

        return in_widths(product, x, self.widths) if known_few(x.size(0), self.widths[-1]) else product(x)

    @staticmethod
    def gains(weight: Tensor) -> bool:
        """Is there such a product for weights of this type here, and is it as fast as a plain one? In float32 it is
        only beyond the caches."""
        if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
            return False
        if weight.dtype == torch.bfloat16:
            return torch.ops.mkldnn._is_mkldnn_bf16_supported()
        if weight.dtype == torch.float16:
            return torch.ops.mkldnn._is_mkldnn_fp16_supported()
        return weight.dtype == torch.float32 and weight.nbytes >= LARGE


class PlainWeights(PackedWeights):
    """Weights as they are, where no layout gains: still in products that round alike."""

    def lay_out(self, weight: Tensor) -> Tensor:
        return weight

    def product(self, x: Tensor) -> Tensor:
        return F.linear(x, self.data)


def laid_out(weight: Tensor) -> PackedWeights:
    """Weights (out, in) for products on a CPU."""
    return PackedWeights(weight) if PackedWeights.gains(weight) else PlainWeights(weight)


class PackedInt8(PackedWeights):
    """int8 codes (out, in) with a float32 scale a row. They multiply the uint8 digits of `to_digits`."""

    def __init__(self, codes: Tensor, scale: Tensor):
        super().__init__(codes)
        self.dtype, self.scale, self.zeros = torch.float32, scale.float(), torch.zeros(len(codes), dtype=torch.int64)
        self.batch_invariant_rows = ANY

    @classmethod
    def shapes(cls, out: int, n: int, dtype: torch.dtype, threads: int) -> tuple[Sequence[int], int]:
        """Sums of whole numbers have no order: any number of rows rounds alike."""
        return (ROWS,), 0

    def lay_out(self, weight: Tensor) -> Tensor:
        return torch.ops.onednn.qlinear_prepack(weight, None)

    def product(self, x: Tensor) -> Tensor:
        return torch.ops.onednn.qlinear_pointwise(
            x, 1.0, 128, self.data, self.scale, self.zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )

    @staticmethod
    def gains(weight: Tensor) -> bool:
        """Only beyond the caches: where reading costs nothing, making digits does."""
        return weight.device.type == "cpu" and weight.nbytes >= LARGE and weight.size(1) <= 2**16 and sums_exactly()


@functools.cache
def sums_exactly() -> bool:
    """Does this processor add up products of 8-bit numbers without overflow? A processor without VNNI instructions may
    add pairs in 16 bits, which the largest values exceed. One that is no x86 may have no such product."""
    n, wanted = 256, torch.full((1, 32), float(127 * 127 * 256))
    try:
        packed = PackedInt8(torch.full((32, n), 127, dtype=torch.int8), torch.ones(32))
        return torch.equal(packed.multiply(torch.full((1, n), 255, dtype=torch.uint8)), wanted)
    except (RuntimeError, AttributeError):  # torch.ops has the latter for an operator that was not built
        return False


def to_digits(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (M, in) -> digits (n * M, in) uint8, all rows' lowest digits first; step (M, 1) float32.

    x is rounded to whole steps of its row: x = step * sum_i 256^i (digit_i - 128), |error| <= step / 2. Two digits make
    a step max|x| / 32638, and the relative error of a product about 2^-16 / sqrt(3) * max|x| / rms(x). As max|x| <=
    sqrt(in) * rms(x), that is below the rounding of a bfloat16 result, 2^-9 / sqrt(3), for up to 16384 inputs. Three
    digits, a step of max|x| / 8355710, do the same for float32.
    """
    n = 2 if x.dtype == torch.bfloat16 else 3
    largest = sum(127 * 256**i for i in range(n)) - 1  # that digits from -127 to 127 hold; 1 for rounding x / step
    x = x.float()  # before the maximum: compiled code may hold x unrounded, and a rounded maximum would be too small
    # clamp keeps NaN, and so does the step, which reaches every result of the row
    step = x.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / largest
    whole, digits = (x / step).round().to(torch.int32) + sum(128 * 256**i for i in range(n)), []
    for _ in range(n - 1):
        digits.append(whole & 255)
        whole = whole >> 8
    return torch.stack([*digits, whole]).to(torch.uint8).flatten(0, 1), step  # (n, M, in) -> (n * M, in)


def from_digits(y: Tensor, step: Tensor) -> Tensor:
    """Products (n * M, out) of digits, and the rows' steps (M, 1) -> products (M, out) float32."""
    *lower, total = y.view(-1, step.size(0), y.size(1)).unbind()  # n of (M, out)
    for digit in reversed(lower):
        total = torch.add(digit, total, alpha=256)
    return total * step


@functools.cache
def int8_widths(dtype: torch.dtype, threads: int) -> Sequence[int]:
    """Numbers of rows for which aten's product with int8 codes rounds alike, of activations of this type."""
    ones = torch.ones(64, 512, dtype=torch.int8), torch.ones(64, dtype=dtype)
    return same_widths(lambda x: torch._weight_int8pack_mm(x, *ones), 512, dtype, WIDTHS[:10], fewest=1)


# ------------------------------------------------------------------------------------------------- int4

INT4_KERNEL = torch.ops.quantized.int4mm_packed_weight_cpu


@functools.cache
def int4_widths(dtype: torch.dtype, threads: int) -> Sequence[int]:
    """Numbers of rows for which aten's product with int4 codes rounds alike, of activations of this type."""
    codes = torch.ones(64, 512, dtype=torch.int32)  # (1 - 8) * 1 + 8: every weight is 1
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    scales = torch.tensor([1.0, 8.0], dtype=dtype).repeat(4, 64, 1)  # (in / 128, 64, 2)
    return same_widths(lambda x: INT4_KERNEL(x, packed, torch.tensor(128), scales), 512, dtype, range(1, 65), fewest=1)


def unpack_int4(packed: Tensor, block: int, width: int) -> Tensor:
    """Codes (n, in) int32 of a CPU kernel's packed rows (n, in / 2) uint8: whole blocks, the last one a multiple of 16.

    A block holds its rows input by input. Of `width` bytes in a row the low halves are that many rows, the high halves
    the next ones. In the last, smaller block neighbouring rows share a byte.
    """
    n, columns = packed.size(0), 2 * packed.size(1)
    whole = n // block * block
    found = []
    for begin, end, size, wide in ((0, whole, block, width), (whole, n, n - whole, 1)):
        if end > begin:
            bytes_ = packed[begin:end].reshape(-1, columns, size // 2 // wide, 1, wide)  # (blocks, in, …, 1, width)
            codes = torch.cat((bytes_ & 15, bytes_ >> 4), dim=3)  # (blocks, in, …, 2, width)
            found.append(codes.flatten(2).transpose(1, 2).reshape(end - begin, columns))
    return torch.cat(found).to(torch.int32)


@functools.cache
def int4_layout() -> tuple[int, int] | None:
    """(block, width) of what this processor's int4 packing makes, for unpack_int4; None for an unknown layout."""
    codes = torch.randint(0, 16, (176, 32), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    known = ((64, 32), (32, 16), (32, 1))  # AVX-512, AVX2, no vectors
    return next((layout for layout in known if torch.equal(unpack_int4(packed, *layout), codes)), None)
