"""Formats of quantized weights: bit-packed parts, the same for every device.

    Format              a class per stored form: shapes, quantize, dequantize; FORMATS holds the
                        instances by scheme
    quantize_tensor     (out, in) weights -> a scheme's parts
    dequantize_tensor   parts -> (out, in) weights

Users choose from int8, int4-g32 | g64 | g128, fp8, and OCP Microscaling v1.0 (MX) mxfp8, mxfp6,
mxfp4. Other schemes hold other programs' files exactly: float32 scales (int4-g128-float32),
fp8-g128 for blocks of fp8, nvfp4, GGUF's q4_1 (Q4_0 too), q4_k, q5_k, q6_k and q8_0, and mlx4-g64
and its kind for MLX's 2 to 8 bits.
Parts can be sharded by rows or by full groups.
"""

import contextlib
import ctypes
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding.errors import UserError
from weights.schemes import (
    FLOAT32_SCHEMES,
    MLX_BITS,
    MLX_GROUPS,
    check_scheme,
)

# -------------------------------------------------------------------------------------------- bits


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """codes (..., n) in [0, 2^bits) -> bytes (..., n * bits / 8), the first code in the lowest
    bits."""
    return _repack_bits(codes, bits, 8)


def unpack_bits(packed: Tensor, bits: int) -> Tensor:
    """The inverse of pack_bits: int32 codes (..., n)."""
    return _repack_bits(packed, 8, bits).to(torch.int32)


def _repack_bits(x: Tensor, bits: int, new_bits: int) -> Tensor:
    """Numbers of `bits` bits, lowest first -> the same bits as uint8 numbers of `new_bits` bits."""
    x = x.to(torch.uint8)
    word_bits = math.lcm(bits, new_bits)  # 8, 24 or 40: a word holds n numbers, and m new ones
    n = word_bits // bits
    numbers = []
    for begin in range(0, word_bits, new_bits):
        number = 0
        for i in range(n):
            shift = bits * i - begin  # from the new number's first bit to this one's
            if -bits < shift < new_bits:
                old = x[..., i::n]
                number = number | (old << shift if shift >= 0 else old >> -shift)
        numbers.append(number & 2**new_bits - 1)
    return torch.stack(numbers, dim=-1).flatten(-2)  # (..., words, m) -> (..., words * m)


def power_of_two(code: Tensor) -> Tensor:
    """E8M0 uint8 -> float32 2^(code - 127), by placing the exponent. 0 is 2^-127, a subnormal
    number."""
    code = code.to(torch.int32)
    is_zero = (code == 0).to(torch.int32)
    bits = code << 23 | is_zero << 22
    return bits.view(torch.float32)


def from_e4m3(x: Tensor) -> Tensor:
    """Codes or scales -> float32. uint8 is E4M3 as bytes, for a GPU whose compiler lacks that type
    (gpu.as_compilable)."""
    if x.dtype != torch.uint8:
        return x.float()
    e4m3 = FORMATS["mxfp8"]
    return e4m3.elements(x.to(torch.int32)) * e4m3.factor


def round_scale(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A float32 scale in its stored dtype. bfloat16 rounds up, so that codes still reach the
    largest weight."""
    if dtype != torch.bfloat16:
        return x.to(dtype)
    bits = x.float().contiguous().view(torch.int32)
    bits = (bits + 0xFFFF) & ~0xFFFF
    return bits.view(torch.float32).to(torch.bfloat16)


def divisor(scale: Tensor) -> Tensor:
    """The stored scale as a divisor: 1 in place of 0, which a row or group of zeros has."""
    scale = scale.float()
    return torch.where(scale > 0, scale, 1.0)


# ---------------------------------------------------------------------------------------- formats


@dataclass(frozen=True)
class Format:
    """A stored form of weights (out, in). `group`: inputs that share a scale; 0: all inputs of a
    row. The default `shapes` reads code_dtype and scale_dtype, the types of codes and scales."""

    bits: int
    group: int = 0
    ragged: bool = field(default=False, kw_only=True)  # may a row end inside a group?
    # Stated for each instance, because a subclass may give its codes and scales another meaning:
    is_portable: bool = field(default=False, kw_only=True)  # are they those of compressed-tensors?
    # Which kernels read the codes: "int8" and "codes" one in each byte, "int4" and "mx" packed
    # ones; "codes" and "mx" on a GPU alone. "": none, so weights are dequantized first.
    kernel: str = field(default="", kw_only=True)
    # The smallest piece of a matrix that `quantize` can work on by itself:
    #   "groups"   full groups of a row
    #   "row_max"  any part of a row, in full groups if it has groups, given the row's largest
    #              |weight| as a second argument
    #   "rows"     full rows
    #   "matrix"   the full matrix as stored (q, k and v are one)
    # No format here has one of the last two, which a fork's may.
    # If a rank's shard is smaller, the rank quantizes the full weight and keeps its shard. A
    # subclass whose `quantize` needs another piece than its parent's sets its own scope.
    scope: ClassVar[str] = "rows"
    factor: ClassVar[float] = 1.0  # of all elements

    def shapes(self, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Part -> (shape, dtype). The first dimension of every part is `rows`; one part is called
        "codes". Here they are codes, packed or not, and a scale for each row or group."""
        width = columns * self.bits // (8 * self.code_dtype.itemsize)
        groups = (rows, math.ceil(columns / self.group)) if self.group else (rows,)
        return {"codes": ((rows, width), self.code_dtype), "scale": (groups, self.scale_dtype)}

    def quantize(self, w: Tensor) -> dict[str, Tensor]:
        """Finite float32 (out, in) -> parts."""
        raise NotImplementedError

    def grouped(self, x: Tensor) -> Tensor:
        """(out, in) -> (out, in / g, g), a ragged last group padded with zeros."""
        if not self.group:
            return x[:, None]
        padding = -x.size(1) % self.group
        if padding:
            x = F.pad(x, (0, padding))
        return x.unflatten(1, (-1, self.group))

    def dequantize(self, parts: dict[str, Tensor]) -> Tensor:
        """Parts -> float32 (out, in)."""
        return self.weights(self.unpacked(parts["codes"]), parts)

    def weights(self, codes: Tensor, parts: dict[str, Tensor]) -> Tensor:
        """Unpacked codes (out, in), and the other parts -> float32 (out, in): elements(code) *
        factor * group_scale + zero."""
        rows, columns = codes.shape
        weights = self.grouped(self.elements(codes))  # (out, in / g, g)
        if self.factor != 1:
            weights = weights * self.factor
        scale = self.group_scale(parts)
        weights = weights * scale.view(rows, -1, 1)
        zero = self.group_zero(parts)
        if zero is not None:
            weights = weights + zero[..., None]
        weights = weights.flatten(1)  # (out, in / g, g) -> (out, in)
        return weights[:, :columns]

    def unpacked(self, codes: Tensor) -> Tensor:
        """Stored codes -> one number each (out, in)."""
        return codes

    def elements(self, code: Tensor) -> Tensor:
        """Unpacked codes -> float32 elements."""
        return code.float()

    def group_scale(self, parts: dict[str, Tensor]) -> Tensor:
        """The scales of rows or groups, float32."""
        return parts["scale"].float()

    def group_zero(self, parts: dict[str, Tensor]) -> Tensor | None:
        """What is added to the weights of groups, in a float type; None: nothing."""
        return parts.get("zero")


@dataclass(frozen=True)
class Symmetric(Format):
    """A format of codes up to `max_code`, w = code * scale, with a scale per row or group.

    In groups of int8 codes |w - w'| <= scale / 2 + 127 * 2^-11 * scale, the second term by rounding
    a float16 scale.
    """

    scope = "groups"

    scale_dtype: torch.dtype = torch.bfloat16
    code_dtype: torch.dtype = torch.int8
    max_code: int = 127

    def quantize(self, w, row_max: Tensor | None = None):
        """`row_max` (out,): the largest |weight| of each full row, when w holds parts of rows."""
        grouped = self.grouped(w)
        if row_max is None:
            largest = grouped.abs().amax(-1)  # (out, in / g)
        else:
            largest = row_max[:, None]
        scale = round_scale(largest / self.max_code, self.scale_dtype)
        codes = grouped / divisor(scale)[..., None]
        if not self.code_dtype.is_floating_point:
            codes = codes.round()
        codes = codes.clamp(-self.max_code, self.max_code)
        codes = codes.flatten(1)[:, : w.size(1)]  # (out, in / g, g) -> (out, in)
        if not self.group:
            scale = scale[:, 0]
        return {"codes": codes.to(self.code_dtype), "scale": scale}

    def elements(self, code):
        return from_e4m3(code)


class Int8(Symmetric):
    """|w - w'| <= scale / 2, scale <= max|w| / 127 * (1 + 2^-7)."""

    scope = "row_max"


@dataclass(frozen=True)
class Fp8(Symmetric):
    """E4M3 elements. |w - w'| <= |w| * 2^-4 for normal elements, scale * 2^-10 for subnormal
    ones."""

    scope = "row_max"

    code_dtype: torch.dtype = torch.float8_e4m3fn
    max_code: int = 448


@dataclass(frozen=True)
class Packed(Format):
    """A format of packed codes in groups along the input: w = element * factor * scale + zero, by
    the element of a code and the scale of its group."""

    scope = "groups"

    code_dtype: ClassVar[torch.dtype] = torch.uint8

    def packed(self, codes: Tensor) -> Tensor:
        """Codes (out, in / g, g) -> bytes (out, in * bits / 8)"""
        return pack_bits(codes.flatten(1), self.bits)

    def unpacked(self, codes):
        return unpack_bits(codes, self.bits)


@dataclass(frozen=True)
class Asymmetric(Packed):
    """Groups with a scale and a zero, in codes of 2 to 8 bits: w = (code - center) * scale + zero,
    code in [0, max_code].

    |w - w'| <= scale / 2 + |zero| * 2^-8, scale <= (max - min) / max_code * (1 + 2^-7). Scale and
    zero are rounded before the codes are chosen. Only weights at the ends of a group can lie
    outside its range, by the rounding error of the zero.
    """

    scale_dtype: torch.dtype = torch.bfloat16  # of scale and zero
    center: int = 8

    def shapes(self, rows, columns):
        shapes = super().shapes(rows, columns)
        return shapes | {"zero": shapes["scale"]}

    def quantize(self, w):
        w = self.grouped(w)
        return self.with_range(w, w.amin(-1), w.amax(-1))

    def with_range(self, w: Tensor, low: Tensor, high: Tensor) -> dict[str, Tensor]:
        """Quantize w (out, in / g, g) with groups that span low to high (out, in / g)."""
        max_code = 2**self.bits - 1
        scale = round_scale((high - low) / max_code, self.scale_dtype)
        zero = (low + self.center * scale.float()).to(self.scale_dtype)
        steps = (w - zero[..., None]) / divisor(scale)[..., None]
        codes = steps.round() + self.center
        codes = codes.clamp(0, max_code)
        return {"codes": self.packed(codes), "scale": scale, "zero": zero}

    def elements(self, code):
        return (code - self.center).float()


@dataclass(frozen=True)
class KQuant(Asymmetric):
    """llama.cpp's Q5_K and Q6_K, whose scales and zeros are quantized too, after the codes are
    chosen. A group of 256 inputs consists of runs. A run has a scale and, if the format has no
    center, a zero: integers of 8 bits, times float16 units that the group shares. Zeros are stored
    with the other sign.

    Source: ggml, ggml-quants.c (dequantize_row_q5_K, dequantize_row_q6_K).
    """

    group: int = 256
    scale_dtype: torch.dtype = torch.float32  # which holds an integer times its unit exactly
    center: int = 0
    # The format of scales and zeros, of which a row has one for each run of inputs.
    scale_format: Symmetric = Symmetric(8, 8, torch.float16, max_code=63)

    @property
    def run(self) -> int:
        return self.group // self.scale_format.group

    @property
    def scale_names(self) -> tuple[str, ...]:
        return ("scale",) if self.center else ("scale", "zero")

    def shapes(self, rows, columns):
        shapes = {"codes": ((rows, columns * self.bits // 8), self.code_dtype)}
        scale_shapes = self.scale_format.shapes(rows, columns // self.run)
        for name in self.scale_names:
            shapes |= {name: scale_shapes["codes"], f"{name}_unit": scale_shapes["scale"]}
        return shapes

    def grouped(self, x):
        return x.unflatten(1, (-1, self.run))  # (out, in) -> (out, in / r, r)

    def quantize(self, w):
        """A run's range surrounds 0, so that with a center its zero is 0."""
        w = self.grouped(w)
        largest = w.abs().amax(-1)  # (out, in / r)
        # Codes reach -center but only center - 1, so the range above 0 is a step shorter.
        missing_step = 1 / self.center if self.center else 0
        floats = self.with_range(w, -largest, largest * (1 - missing_step))
        parts = {"codes": floats["codes"]}
        for name in self.scale_names:
            quantized = self.scale_format.quantize(floats[name].abs())
            parts |= {name: quantized["codes"], f"{name}_unit": quantized["scale"]}
        return parts

    def times_unit(self, parts: dict[str, Tensor], name: str) -> Tensor:
        """Integers times their units (out, in / r)."""
        return self.scale_format.dequantize({"codes": parts[name], "scale": parts[f"{name}_unit"]})

    def group_scale(self, parts):
        return self.times_unit(parts, "scale")

    def group_zero(self, parts):
        return None if self.center else -self.times_unit(parts, "zero")


@dataclass(frozen=True)
class Mx(Packed):
    """OCP Microscaling v1.0: minifloat elements in blocks of 32 inputs that share a power of two
    (E8M0).

    The shared exponent is floor(log2 max|x|) - emax; elements are rounded half to even and saturate
    (section 6.3). A block of zeros has the smallest scale. A normal element's error is up to |w| *
    2^-(mantissa + 1), a saturated one's up to max|w| * (1 - max_element / 2^(emax + 1)). No code
    is a NaN: E4M3's reads as 480.
    """

    mantissa: int = 0
    bias: int = 0
    max_element: float = 0.0
    scale_dtype: ClassVar[torch.dtype] = torch.uint8

    def quantize(self, w):
        w = self.grouped(w)
        _, exponent = w.abs().amax(-1).frexp()  # max = m * 2^exponent, m in [0.5, 1)
        emax = math.floor(math.log2(self.max_element))
        exponent = torch.where(w.any(-1), exponent - 1 - emax, -127)  # (out, in / 32)
        exponent = exponent.clamp(-127, 127)
        elements = torch.ldexp(w, -exponent[..., None])
        codes = self.encode(elements)
        scale = (exponent + 127).to(torch.uint8)
        return {"codes": self.packed(codes), "scale": scale}

    def encode(self, x: Tensor) -> Tensor:
        """float32 -> element codes: sign, exponent, mantissa."""
        size = x.abs().clamp(max=self.max_element)
        min_exponent = 1 - self.bias  # subnormals share it
        exponent = torch.where(size == 0, min_exponent, size.frexp().exponent - 1)
        exponent = exponent.clamp(min=min_exponent)
        steps = torch.ldexp(size, self.mantissa - exponent).round()  # half to even
        code = (exponent - min_exponent) * 2**self.mantissa
        # The implicit bit of a normal number, which `steps` has, adds 1 to its exponent's field.
        code = code + steps.to(torch.int32)
        sign = 2 ** (self.bits - 1)
        return code + x.signbit() * sign

    def elements(self, code):
        """The bit fields move to those of float16, so that subnormal elements become subnormal
        float16 numbers; `factor` corrects the exponent. A table would cost a GPU a load per
        element."""
        sign = 2 ** (self.bits - 1)
        half_sign = (code & sign) << (16 - self.bits)
        half_size = (code & (sign - 1)) << (10 - self.mantissa)
        half = half_sign | half_size
        return half.to(torch.int16).view(torch.float16).float()

    @property
    def factor(self) -> float:
        return 2.0 ** (15 - self.bias)

    def group_scale(self, parts):
        return power_of_two(parts["scale"])


class NvFp4(Mx):
    """NVFP4: E2M1 elements in blocks of 16 inputs, w = element * (scale / global_scale). The scale
    is E4M3. `global_scale` is float32: other programs store one per matrix, we store one per row,
    so that matrices can be stacked.

    Sources: NVIDIA's Transformer Engine; compressed-tensors, compressors/nvfp4 and
    quantization/lifecycle/forward_helpers.py (_dequantize).
    """

    scope = "row_max"

    scale_dtype = torch.float8_e4m3fn

    def shapes(self, rows, columns):
        return super().shapes(rows, columns) | {"global_scale": ((rows,), torch.float32)}

    def quantize(self, w, row_max: Tensor | None = None):
        """`row_max` as in Symmetric."""
        w = self.grouped(w)
        group_max = w.abs().amax(-1)  # (out, in / 16)
        if row_max is None:
            row_max = group_max.amax(1)
        # (out,). A tiny row_max overflows here; the next line puts 1 in its place.
        global_scale = self.max_element * Fp8.max_code / row_max
        global_scale = torch.where(row_max > 1e-30, global_scale, 1.0)
        scale = group_max * global_scale[:, None] / self.max_element
        scale = scale.clamp(max=Fp8.max_code).to(torch.float8_e4m3fn)
        step = divisor(self.group_scale({"scale": scale, "global_scale": global_scale}))
        codes = self.encode(w / step[..., None])
        return {"codes": self.packed(codes), "scale": scale, "global_scale": global_scale}

    def group_scale(self, parts):
        return from_e4m3(parts["scale"]) / parts["global_scale"][:, None]


# A block of r rows and g inputs shares a scale. Each row stores a copy of it, so that rows can be
# stacked and sharded anywhere: one stored scale for every g weights.
FP8_BLOCKS = Symmetric(
    8, 128, code_dtype=torch.float8_e4m3fn, max_code=448, ragged=True, kernel="codes"
)
FORMATS: dict[str, Format] = {  # of SCHEMES, then of STORED_SCHEMES
    "int8": Int8(8, is_portable=True, kernel="int8"),
    "int4-g32": Asymmetric(4, 32, kernel="int4"),
    "int4-g64": Asymmetric(4, 64, kernel="int4"),
    "int4-g128": Asymmetric(4, 128, kernel="int4"),
    "fp8": Fp8(8, is_portable=True, kernel="codes"),
    "mxfp8": Mx(8, 32, mantissa=3, bias=7, max_element=448.0, kernel="mx"),  # E4M3
    "mxfp6": Mx(6, 32, mantissa=3, bias=1, max_element=7.5, kernel="mx"),  # E2M3
    "mxfp4": Mx(4, 32, mantissa=1, bias=1, max_element=6.0, kernel="mx"),  # E2M1
}
FORMATS |= {
    f"{name}-float32": replace(FORMATS[name], scale_dtype=torch.float32) for name in FLOAT32_SCHEMES
}
FORMATS |= {
    "q4_1": Asymmetric(4, 32, torch.float16, center=0, kernel="int4"),  # GGUF's
    "q8_0": Symmetric(8, 32, torch.float16, kernel="codes"),
    "q4_k": Asymmetric(4, 32, torch.float32, center=0, kernel="int4"),
    "q5_k": KQuant(5),
    "q6_k": KQuant(6, center=32, scale_format=Symmetric(8, 16, torch.float16)),
    "fp8-g128": FP8_BLOCKS,
    "fp8-g128-float32": replace(FP8_BLOCKS, scale_dtype=torch.float32),
    "nvfp4": NvFp4(4, 16, mantissa=1, bias=1, max_element=6.0),
}
FORMATS |= {
    f"mlx{bits}-g{group}": Asymmetric(
        bits, group, torch.float32, center=0, kernel="int4" if bits == 4 else ""
    )
    for bits in MLX_BITS
    for group in MLX_GROUPS
}

# ---------------------------------------------------------------------------------------- tensors


def format_of(scheme: str) -> Format:
    """The format of a scheme. UserError for a scheme that does not exist."""
    check_scheme(scheme, FORMATS)
    return FORMATS[scheme]


def check_columns(scheme: str, columns: int, name: str) -> None:
    """UserError for rows of `columns` inputs that do not divide into groups."""
    format = format_of(scheme)
    if format.group and columns % format.group and not format.ragged:
        raise UserError(
            f"{name}: {columns} inputs are no multiple of the {format.group} that share a scale in"
            f" {scheme}",
        )


def check_finite(weight: Tensor, prefix: str = "") -> None:
    """UserError for weights or scales that are NaN or infinite: the formats have no such codes."""
    if not weight.float().isfinite().all():
        raise UserError(f"{prefix}weights hold NaN or infinity; no scale can be taken over them")


# Weights per chunk: temporaries take several times their size and should stay in the cache.
CHUNK_WEIGHTS = 2**20


def row_chunks(rows: int, columns: int) -> Iterator[slice]:
    """Slices of rows with about CHUNK_WEIGHTS weights each."""
    size = max(1, CHUNK_WEIGHTS // columns)
    # A generator, because building the list would fix `rows` in compiled code.
    for begin in range(0, rows, size):
        yield slice(begin, begin + size)


def quantize_tensor(
    weight: Tensor,
    scheme: str,
    row_max: Tensor | None = None,
) -> dict[str, Tensor]:
    """weight (out, in), any float type -> the scheme's parts, bit-packed, the same for every
    device.

    `row_max` (out,), for a scheme with a scale per row: the largest |weight| of each full row, when
    `weight` holds parts of rows. UserError for an unknown scheme, inputs that do not divide, and
    weights that are not finite.
    """
    check_columns(scheme, weight.size(1), f"weight of shape {tuple(weight.shape)}")
    format = FORMATS[scheme]
    if row_max is not None and format.scope != "row_max":
        raise UserError(f"{scheme} takes no row_max: it has no scale per row")
    parts = {
        name: torch.empty(shape, dtype=dtype, device=weight.device)
        for name, (shape, dtype) in format.shapes(*weight.shape).items()
    }
    needs_matrix = format.scope == "matrix"
    for rows in [slice(None)] if needs_matrix else row_chunks(*weight.shape):
        w = weight[rows].float()
        check_finite(w)
        # Only formats of scope "row_max" have this argument.
        limits = [] if row_max is None else [row_max[rows]]
        for name, part in format.quantize(w, *limits).items():
            parts[name][rows] = part
    return parts


def dequantize_tensor(
    tensors: dict[str, Tensor],
    scheme: str,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Parts -> weights (out, in)."""
    return by_chunks(format_of(scheme).dequantize, tensors, dtype)


def by_chunks(
    convert: Callable[[dict[str, Tensor]], Tensor],
    parts: dict[str, Tensor],
    dtype: torch.dtype,
) -> Tensor:
    """convert(parts), such as weights (out, in), cast to `dtype` chunk by chunk. Compiled code
    fuses and needs no chunks."""
    if torch.compiler.is_compiling():
        return convert(parts).to(dtype)
    codes = parts["codes"]
    result = None
    # Bytes of codes stand for columns, whose number the parts do not tell.
    for rows in row_chunks(len(codes), codes[0].nbytes):
        chunk = convert({name: part[rows] for name, part in parts.items()})
        if result is None:
            result = chunk.new_empty(len(codes), chunk.size(1), dtype=dtype)
        result[rows] = chunk
    return result


def release_memory() -> None:
    """Give freed memory back to the system. glibc keeps pieces of a chunk's size: 1 GB after 22
    layers of a 1.1B model. Other C libraries keep less, or lack the call."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
