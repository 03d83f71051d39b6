"""Products on a CPU with weights that are packed once, ahead of decoding.

    RowKernel                           a kernel that runs in numbers of rows that round alike
    PackedWeights, PackedInt8           weights (out, in), or int8 codes, in oneDNN's layout
    TransposedWeights, TransposedInt8   weights as they are, on the left of the product, for AMX
    FbgemmWeights, FbgemmInt8           float16 weights, or int8 codes, in fbgemm's layout, for
                                        processors without 16-bit or VNNI instructions
    PlainWeights                        weights as they are, where nothing gains
    prepack_weight, int8_form           the class that suits the processor
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
import os
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from exact.products import (
    ANY_ROWS,
    FBGEMM_ROW_COUNTS,
    INTEGER_SPLIT,
    LARGE_ROW_COUNTS,
    ROW_COUNTS,
    UNPADDED_ROW_COUNTS,
    RowSplit,
    find_row_split,
)
from weights.compiling import LIBRARY, is_small_batch, module_of, register_handle
from weights.formats import row_chunks

HALF_TYPES = (torch.bfloat16, torch.float16)
# Larger weights do not fit the inner caches, so reading them is a product's cost.
LARGE_BYTES = 2**21
TILE_ROWS = 16  # of a tile of AMX
# Weights that fbgemm packs at once, from float32 numbers of 128 MB. More parts cost 0.1 ms each.
MAX_PART_WEIGHTS = 2**25
NUM_PACKERS = 4  # parts that are packed at the same time

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


class RowKernel(nn.Module):
    """A product of rows by a `kernel`, which runs in the numbers of rows of `row_split` alone.

    Compiled code splits few rows in the graph, where their number is known, and leaves the rows of
    a prompt to one operator, which splits them when it runs.
    """

    row_split = RowSplit()

    def use_kernel(self, row_split: RowSplit, kernel_outputs: int) -> None:
        """Let `run_kernel` run `kernel`, with `kernel_outputs` outputs a row, on a CPU."""
        self.row_split = row_split
        self.kernel_outputs = kernel_outputs
        register_handle(self)

    @property
    def batch_invariant_rows(self) -> int:
        """The largest number of rows for which a row's result depends on the row alone."""
        return self.row_split.batch_invariant_rows

    def kernel(self, x: Tensor) -> Tensor:
        """x (M, in) -> (M, kernel_outputs)"""
        raise NotImplementedError

    def opaque_kernel(self, x: Tensor) -> Tensor:
        """`run_kernel` as one operator of compiled code."""
        dtype = x.dtype if x.is_floating_point() else torch.float32
        return torch.ops.quickdraft.packed_product(x, self.handle, self.kernel_outputs, dtype)

    def traced_kernel(self, x: Tensor) -> Tensor:
        """`kernel` in the graph of compiled code, by default as that operator."""
        return self.opaque_kernel(x)

    def run_kernel(self, x: Tensor) -> Tensor:
        """`kernel` in the numbers of rows of `row_split`."""
        if not torch.compiler.is_compiling():
            return self.row_split.run(self.kernel, x)
        if is_small_batch(x.size(0), max(self.row_split.row_counts, default=0)):
            return self.row_split.run(self.traced_kernel, x)
        return self.opaque_kernel(x)


# ----------------------------------------------------------------------------------------- oneDNN


class PackedWeights(RowKernel):
    """Weights (out, in), bfloat16, float16 or float32, in oneDNN's layout for products with few
    rows. They stay on the CPU and are never unpacked. Forms for other kernels inherit from it, and
    override `prepack` and `kernel`."""

    # One row in 16 bits is padded to at most so many, which cost hardly more than one.
    tile_rows = TILE_ROWS

    def __init__(self, weight: Tensor, row_split: RowSplit | None = None):
        super().__init__()
        self.data = self.prepack(weight)
        self.use_kernel(row_split or self.find_row_split(weight), len(weight))

    @classmethod
    def find_row_split(cls, weight: Tensor) -> RowSplit:
        threads = torch.get_num_threads()
        candidates = cls.probed_rows(weight)
        max_first = cls.tile_rows if weight.dtype in HALF_TYPES else 2  # float32: every row costs
        shape = tuple(weight.shape)
        return find_row_split(
            cls.kernel_on_ones, weight.dtype, candidates, threads, max_first, shape
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
        return cls(torch.ones(out, n, dtype=dtype), RowSplit()).kernel

    def prepack(self, weight: Tensor) -> Tensor:
        return torch.ops.mkldnn._reorder_linear_weight(weight, 1)

    def kernel(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.data, None, "none", [], "")

    def forward(self, x: Tensor) -> Tensor:
        """x (M, in) -> (M, out)"""
        return self.run_kernel(x)

    @staticmethod
    def is_faster(weight: Tensor) -> bool:
        """Does oneDNN multiply this dtype on this machine, and gain? In float32 only large weights
        gain."""
        if weight.dtype == torch.float32:
            return torch.backends.mkldnn.is_available() and weight.nbytes >= LARGE_BYTES
        return multiplies(weight.dtype)


def multiplies(dtype: torch.dtype) -> bool:
    """Does oneDNN multiply numbers of this 16-bit dtype on this machine?"""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float16 and torch.ops.mkldnn._is_mkldnn_fp16_supported()


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """This dtype if oneDNN multiplies it, else float32."""
    return dtype if multiplies(dtype) else torch.float32


class PlainWeights(PackedWeights):
    """Weights as they are, where packing gains nothing. Batches are split all the same.

    In 16 bits aten reads the weights anew for every row, so that each row of padding costs as much
    as a row of the batch.
    """

    tile_rows = 1

    @staticmethod
    def probed_rows(weight: Tensor) -> tuple[int, ...]:
        return ROW_COUNTS if weight.dtype.itemsize == 4 else UNPADDED_ROW_COUNTS

    def prepack(self, weight: Tensor) -> Tensor:
        return weight

    def kernel(self, x: Tensor) -> Tensor:
        return F.linear(x, self.data)


class TransposedWeights(PlainWeights):
    """Weights as they are, on the left of the product: y^T = W x^T."""

    tile_rows = TILE_ROWS

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
    return next(form for suits, form in FORMS if suits(weight))(weight)


# ----------------------------------------------------------------------------------------- fbgemm


def has_fbgemm() -> bool:
    """Does torch pack for fbgemm, as it does by default on x86 processors with AVX2?"""
    engine = torch.backends.quantized.engine
    return engine in ("x86", "fbgemm") and engine in torch.backends.quantized.supported_engines


@functools.cache
def packers_of(process_id: int) -> tuple[ThreadPoolExecutor, threading.Semaphore]:
    """Threads that pack for fbgemm, whose packing runs on one thread and takes 10 to 25 ns a
    weight, and the number of idle ones. A process that was forked from this one has none of its
    threads."""
    return ThreadPoolExecutor(NUM_PACKERS, "packer"), threading.Semaphore(NUM_PACKERS)


def pack_float16(numbers: Tensor) -> Future:
    """Pack float32 numbers (rows, in) as float16. Waits until a thread is idle."""
    threads, idle = packers_of(os.getpid())
    idle.acquire()
    future = threads.submit(torch.ops.quantized.linear_prepack_fp16, numbers, None)
    future.add_done_callback(lambda _: idle.release())
    return future


def row_scale(weight: Tensor) -> Tensor:
    """weight (rows, in) -> (rows, 1) float32, powers of two: divided by them, a row's largest
    number lies in float16's highest octave."""
    largest = weight.abs().amax(dim=1, keepdim=True).float().clamp(min=2.0**-100)
    mantissa = torch.frexp(largest).mantissa  # 0.5 to 1
    return largest / mantissa * 2.0**-16


def fits_float16(weight: Tensor) -> bool:
    """Are the weights float16 numbers times their `row_scale`? A bfloat16 has 8 significant bits,
    so float16 holds it down to 2^-17, its own lowest bit being 2^-24: a row may span 33 octaves."""
    for rows in row_chunks(*weight.shape):
        numbers = weight[rows].float() / row_scale(weight[rows])
        if not torch.equal(numbers.half().float(), numbers):
            return False
    return True


class FbgemmWeights(PackedWeights):
    """16-bit weights as float16 numbers with a scale a row, which lose nothing, in fbgemm's layout.
    Activations and sums are float32, so that only the result is rounded.

    For processors without instructions that multiply bfloat16: fbgemm converts weights in
    registers and reads them once for 6 rows with AVX2, for 14 with AVX-512. aten reads them once a
    row, and oneDNN lacks 16-bit products (AVX2) or converts more slowly (AVX-512).
    """

    tile_rows = 6

    def __init__(self, weight: Tensor, row_split: RowSplit | None = None):
        super().__init__(weight, row_split)
        scales = [row_scale(weight[rows]) for rows in row_chunks(*weight.shape)]
        self.register_buffer("scale", torch.cat(scales).flatten(), persistent=False)  # (out,)

    @classmethod
    def find_row_split(cls, weight: Tensor) -> RowSplit:
        threads = torch.get_num_threads()
        return find_row_split(
            cls.kernel_on_ones, torch.float32, FBGEMM_ROW_COUNTS, threads, cls.tile_rows
        )

    def prepack(self, weight: Tensor) -> list[Future]:
        """Packed parts, which other threads finish. The number and size of the parts bound the
        memory of their float32 numbers."""
        parts = []
        for part in weight.split(MAX_PART_WEIGHTS // weight.size(1)):
            numbers = torch.empty(part.shape)
            for rows in row_chunks(*part.shape):
                torch.div(part[rows], row_scale(part[rows]), out=numbers[rows])
            parts.append(pack_float16(numbers))
        return parts

    def kernel(self, x: Tensor) -> Tensor:
        """x (M, in) float32 -> products with the numbers (M, out) float32"""
        product = torch.ops.quantized.linear_dynamic_fp16
        return torch.cat([product(x, part.result()) for part in self.data], dim=1)

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x.float()) * self.scale).to(x.dtype)

    @staticmethod
    def is_faster(weight: Tensor) -> bool:
        return weight.dtype in HALF_TYPES and has_fbgemm() and fits_float16(weight)


def has_instructions(weight: Tensor) -> bool:
    """Does this processor multiply 16-bit weights of this dtype by instructions of their own?"""
    if weight.dtype == torch.bfloat16 and not torch.cpu._is_avx512_bf16_supported():
        return False
    return multiplies(weight.dtype)


# The form of weights: the first that suits, with what each gains (benchmarks/NOTES.md has the
# times).
FORMS = (
    # AMX: all rows of a tile are used.
    (lambda weight: weight.dtype in HALF_TYPES and has_tiles(), TransposedWeights),
    # AVX-512 with bfloat16 or float16: as fast as fbgemm, and no conversion.
    (has_instructions, PackedWeights),
    # AVX2, and AVX-512 without them.
    (FbgemmWeights.is_faster, FbgemmWeights),
    # Weights that no scale makes float16; large ones in float32; other processors than x86.
    (PackedWeights.is_faster, PackedWeights),
    (lambda weight: True, PlainWeights),
)


# ------------------------------------------------------------------------------------------- int8

ONE_PRODUCT = RowSplit((1,), ANY_ROWS)  # any number of rows will do, in one product


class PackedInt8(PackedWeights):
    """int8 codes (out, in) with a float32 scale a row. They multiply the uint8 digits of
    `to_digits`."""

    digit_bits = 8
    split = INTEGER_SPLIT

    def __init__(self, codes: Tensor, scale: Tensor):
        super().__init__(codes, self.split)
        self.scale = scale.float()
        self.zeros = torch.zeros(len(codes), dtype=torch.int64)

    def forward(self, x: Tensor) -> Tensor:
        """x (M, in) of a float type -> (M, out) of that type"""
        return self.product(x).to(x.dtype)

    def product(self, x: Tensor) -> Tensor:
        """`forward`, in float32"""
        digits, step = to_digits(x, self.digit_bits)
        return from_digits(self.run_kernel(digits), step, self.digit_bits)

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


class TransposedInt8(PackedInt8):
    """int8 codes as they are, on the left of the product."""

    split = ONE_PRODUCT

    def prepack(self, weight: Tensor) -> Tensor:
        return weight

    def kernel(self, x: Tensor) -> Tensor:
        digits = (x ^ 128).view(torch.int8)  # x - 128
        sums = torch._int_mm(self.data, digits.t())  # (out, in) (in, M) -> (out, M)
        return sums.t().contiguous().float() * self.scale  # (M, out)

    def traced_kernel(self, x: Tensor) -> Tensor:
        return self.kernel(x)


class FbgemmInt8(PackedInt8):
    """int8 codes in fbgemm's layout. Without VNNI instructions processors add pairs of products in
    16 bits, which hold 2 * 127 * 127: so digits have 7 bits here."""

    digit_bits = 7
    split = ONE_PRODUCT

    def prepack(self, weight: Tensor) -> torch.ScriptObject:
        scales = torch.ones(len(weight))
        zeros = torch.zeros(len(weight), dtype=torch.int64)
        engine = torch.backends.quantized.engine
        torch.backends.quantized.engine = "fbgemm"  # "x86" would pack for oneDNN
        try:
            with warnings.catch_warnings():  # that torch will replace the type of such tensors
                warnings.simplefilter("ignore")
                codes = torch._make_per_channel_quantized_tensor(weight, scales, zeros, 0)
            return torch.ops.quantized.linear_prepack(codes, None)
        finally:
            torch.backends.quantized.engine = engine

    def kernel(self, x: Tensor) -> Tensor:
        """x (M, in) uint8 digits -> (M, out) float32, products with the codes"""
        product = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
        # The operator quantizes its input: with scale 1 and zero point 64 to these digits again.
        return product(x.float() - 64, 1.0, 64, self.data)

    def product(self, x: Tensor) -> Tensor:
        return super().product(x) * self.scale  # once a row, not once for each of its digits


def int8_form(codes: Tensor) -> type[PackedInt8] | None:
    """The form of int8 codes (out, in) that this processor reads fastest; None: digits gain
    nothing. Only large weights gain, because the time to make digits is more than that to read
    small ones. Sums of more than 2^16 products could overflow."""
    if codes.device.type != "cpu" or codes.nbytes < LARGE_BYTES or codes.size(1) > 2**16:
        return None
    # oneDNN's kernels for AMX and VNNI read as fast as fbgemm's, and compute faster. Held to older
    # instructions, they may add pairs in 16 bits.
    forms = (TransposedInt8 if has_tiles() else PackedInt8, FbgemmInt8)
    return next((form for form in forms if sums_exactly(form)), None)


def reads_int8_faster(num_weights: int) -> bool:
    """Does this processor read large matrices faster in int8 than in int4? So it is without VNNI
    instructions, where aten's int4 kernel computes as long as fbgemm reads twice the bytes."""
    lacks_vnni = not sums_exactly(PackedInt8)
    return num_weights >= LARGE_BYTES and lacks_vnni and sums_exactly(FbgemmInt8)


@functools.cache
def sums_exactly(form: type[PackedInt8]) -> bool:
    """Does this processor add products of the form's digits without overflow? Without VNNI
    instructions it may add pairs in 16 bits, which the largest 8-bit values exceed. Processors
    other than x86 may lack the operator."""
    n = 256
    largest = 2 ** (form.digit_bits - 1) - 1
    digits = torch.full((1, n), 2**form.digit_bits - 1, dtype=torch.uint8)
    try:
        packed = form(torch.full((32, n), 127, dtype=torch.int8), torch.ones(32))
        sums = packed.run_kernel(digits)
    except (RuntimeError, AttributeError):  # torch.ops lacks an operator that was not built
        return False
    return bool((sums == 127 * largest * n).all())


def to_digits(x: Tensor, bits: int = 8) -> tuple[Tensor, Tensor]:
    """x (M, in) -> digits (n * M, in) uint8, all rows' lowest digits first; step (M, 1) float32.

    x is rounded to whole steps of its row: with a base of 2^bits and digits less their center, base
    / 2, x = step * sum_i base^i (digit_i - center), |error| <= step / 2. The relative error of a
    product is about step / sqrt(12) / rms(x).

    With 8 bits, two digits make a step max|x| / 32638, and that error 2^-16 / sqrt(3) * max|x| /
    rms(x). As max|x| <= sqrt(in) * rms(x), it is below the rounding of a bfloat16 result, 2^-9 /
    sqrt(3), for up to 16384 inputs. Three digits, a step of max|x| / 8355710, do the same for
    float32.

    With 7 bits, two digits make a step max|x| / 8126, four times as long: the error is below the
    rounding of a bfloat16 result up to max|x| = 31 rms(x), so for up to 961 inputs whatever they
    are. Three digits, a step of max|x| / 1040318, are below that of a float16 result for up to 2^17
    inputs, and lose 2^-21 / sqrt(3) * max|x| / rms(x) of a float32 result.
    """
    n = 2 if x.dtype == torch.bfloat16 else 3
    base = 2**bits
    center = base // 2
    ones = sum(base**i for i in range(n))  # the number whose digits are all 1
    # The largest number whose digits are all center - 1, less 1 for rounding x / step.
    max_steps = (center - 1) * ones - 1
    # Cast before the maximum: compiled code may hold x unrounded, and a rounded maximum would be
    # too small.
    x = x.float()
    # clamp keeps NaN, so one NaN makes its row's results NaN.
    step = x.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / max_steps
    rest = (x / step).round().to(torch.int32) + center * ones
    digits = []
    for _ in range(n - 1):
        digits.append(rest & (base - 1))
        rest = rest >> bits
    digits = torch.stack([*digits, rest]).to(torch.uint8)
    return digits.flatten(0, 1), step  # (n, M, in) -> (n * M, in)


def from_digits(y: Tensor, step: Tensor, bits: int = 8) -> Tensor:
    """Products (n * M, out) of digits, and the rows' steps (M, 1) -> products (M, out) float32."""
    *lower, total = y.view(-1, step.size(0), y.size(1)).unbind()  # n of (M, out)
    for digit in reversed(lower):
        total = torch.add(digit, total, alpha=2**bits)
    return total * step


def int8_kernel_on_ones(out: int, n: int, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """aten's product of int8 codes (out, n) that are 1, for x (M, n) of this dtype."""
    codes = torch.ones(out, n, dtype=torch.int8)
    scale = torch.ones(out, dtype=dtype)
    return lambda x: torch._weight_int8pack_mm(x, codes, scale)


# ------------------------------------------------------------------------------------------- int4

INT4_KERNEL = torch.ops.quantized.int4mm_packed_weight_cpu
KERNEL_CENTER = 8  # the code that aten's int4 kernels take for zero
# More rows than this are multiplied by slices of unpacked weights: the kernel's cost is per row.
MAX_INT4_ROWS = 128
SLICE_WEIGHTS = 2**21  # that are unpacked at once, of 8 MB in float32


def pack_int4(codes: Tensor) -> Tensor:
    """int32 codes (out, in) as aten's kernel takes them."""
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)


def int4_kernel_on_ones(out: int, n: int, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """aten's product of int4 codes (out, n) in groups of 128 whose weights are 1, for x (M, n) of
    this dtype."""
    group = 128
    codes = torch.ones(out, n, dtype=torch.int32)  # (1 - 8) * 1 + 8: every weight is 1
    packed = pack_int4(codes)
    scales = torch.tensor([1.0, 8.0], dtype=dtype).repeat(n // group, out, 1)  # (in / g, out, 2)
    return lambda x: INT4_KERNEL(x, packed, torch.tensor(group), scales)


def int4_codes(packed: Tensor) -> Tensor:
    """Bytes (blocks, K, n / 2) of aten's layout -> codes (K, blocks, n) uint8. For each block of n
    outputs and each input, the low halves of the bytes come first, then the high ones."""
    halves = packed.transpose(0, 1)  # (K, blocks, n / 2)
    return torch.cat((halves & 15, halves >> 4), dim=-1)


@functools.cache
def int4_order() -> Tensor | None:
    """A block's outputs (n,) in the order of `int4_codes` on this processor, found by packing the
    numbers of 128 outputs, with a binary digit for each input; None if the layout is another
    one."""
    K = 8
    digit = torch.arange(K)
    number = torch.arange(128)[:, None]  # (128, 1)
    digits = number >> digit & 1  # (128, K)
    packed = pack_int4(digits.int())
    for n in (16, 32, 64):
        digits = int4_codes(packed.view(-1, K, n // 2)).long()  # (K, 128 / n, n)
        numbers = (digits << digit[:, None, None]).sum(0)  # (128 / n, n)
        order = numbers[0]
        if torch.equal(numbers, number[::n] + order):
            return order
    return None


def int4_product_by_slices(
    x: Tensor, packed: Tensor, group: int, scales_and_zeros: Tensor
) -> Tensor:
    """x (M, K), aten's packed codes of N outputs, and pairs (K / g, N, 2) -> (M, N): some outputs
    at a time are unpacked, w = (code - 8) * scale + zero, and multiplied in x's dtype or, where the
    processor has no products of that, in float32."""
    order = int4_order()
    M, K = x.shape
    n = len(order)
    blocks = packed.view(-1, K, n // 2)  # (N / n, K, n / 2)
    pairs = scales_and_zeros.view(K // group, -1, n, 2)
    dtype = product_dtype(x.dtype)
    inputs = x.to(dtype)
    y = x.new_empty(M, len(blocks), n)
    size = max(1, SLICE_WEIGHTS // (K * n))
    for begin in range(0, len(blocks), size):
        some = slice(begin, begin + size)
        codes = int4_codes(blocks[some]).float()  # (K, b, n)
        codes = codes.view(K // group, group, -1, n)  # (K / g, g, b, n)
        scale, zero = pairs[:, some, order].float().unbind(-1)  # (K / g, b, n)
        weights = torch.addcmul(zero[:, None], codes - KERNEL_CENTER, scale[:, None])
        weights = weights.to(dtype).view(K, -1)  # (K, b * n)
        products = (inputs @ weights).to(x.dtype)  # (M, b * n)
        y[:, some, order] = products.view(M, -1, n)
    return y.flatten(1)  # (M, N / n, n) -> (M, N)
