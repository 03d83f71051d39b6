"""Formats of quantized weights: bit-packed parts, the same for every device.

    Format              a class per stored form: shapes, quantize, dequantize; FORMATS holds the instances by scheme
    quantize_tensor     (out, in) weights -> a scheme's parts
    dequantize_tensor   parts -> (out, in) weights

Users choose from int8, int4-g32 | g64 | g128, fp8, and OCP Microscaling v1.0 (MX) mxfp8, mxfp6, mxfp4. Other schemes
hold other programs' files exactly: float32 scales (int4-g128-float32), fp8-g128 for blocks of fp8, nvfp4, and q4_1,
q4_k and q8_0 for GGUF's Q4_0, Q4_1, Q4_K and Q8_0. Parts can be sharded by rows or by full groups.
"""

import contextlib
import ctypes
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from weights.schemes import SCHEMES, check_scheme  # noqa: F401

# ------------------------------------------------------------------------------------------------ bits


CODES_PER_BYTES = {4: (2, 1), 6: (4, 3), 8: (1, 1)}  # bits of a code -> (number of codes, of bytes that they fill)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """codes (..., n) in [0, 2^bits) -> bytes (..., n * bits / 8), the first code in the lowest bits."""
    return _repack_bits(codes, *CODES_PER_BYTES[bits], bits, 8).to(torch.uint8)


def unpack_bits(packed: Tensor, bits: int) -> Tensor:
    """The inverse of pack_bits: int32 codes (..., n)."""
    return _repack_bits(packed, *CODES_PER_BYTES[bits][::-1], 8, bits)


def _repack_bits(x: Tensor, n: int, m: int, bits: int, new_bits: int) -> Tensor:
    """Every n numbers of `bits` bits, lowest first -> m numbers of `new_bits` bits, int32."""
    x = x.to(torch.int32)
    if n == m:
        return x
    word = sum(x[..., i::n] << bits * i for i in range(n))
    return torch.stack([word >> new_bits * i & 2**new_bits - 1 for i in range(m)], dim=-1).flatten(-2)


E8M0_NAN = 255


def power_of_two(code: Tensor) -> Tensor:
    """E8M0 uint8 -> float32 2^(code - 127), by placing the exponent. 0 is 2^-127, a subnormal number."""
    code = code.to(torch.int32)
    return (code << 23 | (code == 0).to(torch.int32) << 22).view(torch.float32)


def round_scale(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A float32 scale in its stored dtype. bfloat16 rounds up, so that codes still reach the largest weight."""
    if dtype != torch.bfloat16:
        return x.to(dtype)
    bits = x.float().contiguous().view(torch.int32)
    return ((bits + 0xFFFF) & ~0xFFFF).view(torch.float32).to(torch.bfloat16)


def divisor(scale: Tensor) -> Tensor:
    """The stored scale as a divisor: 1 in place of 0, which a row or group of zeros has."""
    scale = scale.float()
    return torch.where(scale > 0, scale, 1.0)


# --------------------------------------------------------------------------------------------- formats


@dataclass(frozen=True)
class Format:
    """A stored form of weights (out, in). `group`: inputs that share a scale; 0: all inputs of a row."""

    bits: int
    group: int = 0
    ragged: ClassVar[bool] = False  # may a row end inside a group?
    # The smallest input of `quantize`: full "groups" of a row, full "rows", or the full "matrix" as stored
    # (q, k and v are one). A rank whose shard is smaller quantizes the full weight, then takes its shard.
    scope: ClassVar[str] = "rows"
    takes_row_max: ClassVar[bool] = False  # can `quantize` take parts of rows, given the rows' largest |weight|?

    def __init_subclass__(cls):
        if "quantize" in vars(cls):  # a class with a `quantize` of its own does not inherit these two
            cls.scope = vars(cls).get("scope", Format.scope)
            cls.takes_row_max = vars(cls).get("takes_row_max", Format.takes_row_max)

    def shapes(self, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Part -> (shape, dtype). The first dimension of every part is `rows`; one part is called "codes"."""
        raise NotImplementedError

    def quantize(self, w: Tensor) -> dict[str, Tensor]:
        """Finite float32 (out, in) -> parts."""
        raise NotImplementedError

    def dequantize(self, parts: dict[str, Tensor]) -> Tensor:
        """Parts -> float32 (out, in)."""
        raise NotImplementedError

    @property
    def bits_per_weight(self) -> float:
        """Bits of codes and scales per weight, for rows so long that a scale per row is negligible."""
        shapes = self.shapes(1, 2**20)
        return sum(math.prod(shape) * dtype.itemsize * 8 for shape, dtype in shapes.values()) / 2**20


@dataclass(frozen=True)
class PerRow(Format):
    """A format of codes up to `max_code` with one scale per row: w = code * scale."""

    takes_row_max = True

    scale_dtype: torch.dtype = torch.bfloat16
    code_dtype: ClassVar[torch.dtype]
    max_code: ClassVar[int]

    def shapes(self, rows, columns):
        return {"codes": ((rows, columns), self.code_dtype), "scale": ((rows,), self.scale_dtype)}

    def quantize(self, w, row_max: Tensor | None = None):
        """`row_max` (out,): the largest |weight| of each full row, when w holds parts of rows."""
        row_max = w.abs().amax(1) if row_max is None else row_max
        scale = round_scale(row_max / self.max_code, self.scale_dtype)  # (out,)
        codes = w / divisor(scale)[:, None]
        codes = codes if self.code_dtype.is_floating_point else codes.round()
        return {"codes": codes.clamp(-self.max_code, self.max_code).to(self.code_dtype), "scale": scale}

    def dequantize(self, parts):
        return parts["codes"].float() * parts["scale"].float()[:, None]


class Int8(PerRow):
    """|w - w'| <= scale / 2, scale <= max|w| / 127 * (1 + 2^-7)."""

    code_dtype, max_code = torch.int8, 127


class Fp8(PerRow):
    """E4M3 elements. |w - w'| <= |w| * 2^-4 for normal elements, scale * 2^-10 for subnormal ones."""

    code_dtype, max_code = torch.float8_e4m3fn, 448


@dataclass(frozen=True)
class Int4(Format):
    """A format of asymmetric groups along the input: w = (code - center) * scale + zero, code in [0, 15].

    |w - w'| <= scale / 2 + |zero| * 2^-8, scale <= (max - min) / 15 * (1 + 2^-7). Scale and zero are rounded before the
    codes are chosen. Only weights at the ends of a group can lie outside its range, by the rounding error of the zero.
    """

    scope = "groups"

    scale_dtype: torch.dtype = torch.bfloat16  # of scale and zero
    center: int = 8

    def shapes(self, rows, columns):
        groups = ((rows, columns // self.group), self.scale_dtype)
        return {"codes": ((rows, columns // 2), torch.uint8), "scale": groups, "zero": groups}

    def quantize(self, w):
        w = w.unflatten(1, (-1, self.group))  # (out, in) -> (out, in / g, g)
        return self.with_range(w, w.amin(-1), w.amax(-1))

    def with_range(self, w: Tensor, low: Tensor, high: Tensor) -> dict[str, Tensor]:
        """Quantize w (out, in / g, g) with groups that span low to high (out, in / g)."""
        scale = round_scale((high - low) / 15, self.scale_dtype)
        zero = (low + self.center * scale.float()).to(self.scale_dtype)
        codes = ((w - zero.float()[..., None]) / divisor(scale)[..., None]).round() + self.center
        return {"codes": pack_bits(codes.clamp(0, 15).flatten(1), 4), "scale": scale, "zero": zero}

    def dequantize(self, parts):
        return self.weights(unpack_bits(parts["codes"], 4), parts["scale"].float(), parts["zero"].float())

    def weights(self, codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """Unpacked codes (out, in), scale and zero (out, in / g) float32 -> float32 (out, in)."""
        codes = codes.unflatten(1, (-1, self.group)) - self.center  # (out, in) -> (out, in / g, g)
        return (codes * scale[..., None] + zero[..., None]).flatten(1)


@dataclass(frozen=True)
class Groups(Format):
    """A format of symmetric groups along the input: w = code * scale, codes up to `max_code`."""

    scope = "groups"

    scale_dtype: torch.dtype = torch.float16
    code_dtype: ClassVar[torch.dtype]
    max_code: ClassVar[int]

    def shapes(self, rows, columns):
        groups = math.ceil(columns / self.group)
        return {"codes": ((rows, columns), self.code_dtype), "scale": ((rows, groups), self.scale_dtype)}

    def quantize(self, w):
        scale = round_scale(self.grouped(w).abs().amax(-1) / self.max_code, self.scale_dtype)
        codes = self.grouped(w) / divisor(scale)[..., None]
        codes = codes if self.code_dtype.is_floating_point else codes.round()
        codes = codes.clamp(-self.max_code, self.max_code).flatten(1)[:, : w.size(1)]  # (out, in)
        return {"codes": codes.to(self.code_dtype), "scale": scale}

    def dequantize(self, parts):
        codes = parts["codes"].float()
        return (self.grouped(codes) * parts["scale"].float()[..., None]).flatten(1)[:, : codes.size(1)]

    def grouped(self, x: Tensor) -> Tensor:
        """(out, in) -> (out, in / g, g), a ragged last group padded with zeros."""
        padding = -x.size(1) % self.group
        return (F.pad(x, (0, padding)) if padding else x).unflatten(1, (-1, self.group))


class Int8Groups(Groups):
    """|w - w'| <= scale / 2 + 127 * 2^-11 * scale, the second term by rounding the scale."""

    code_dtype, max_code = torch.int8, 127


class Fp8Groups(Groups):
    """E4M3 elements. A block of r rows and g inputs with one scale is stored as r rows that repeat it, so that rows can
    be stacked and sharded anywhere. The scales take 1 / g of the weights."""

    code_dtype, max_code, ragged = torch.float8_e4m3fn, 448, True


@dataclass(frozen=True)
class Mx(Format):
    """OCP Microscaling v1.0: minifloat elements in blocks of 32 inputs that share a power of two (E8M0).

    The shared exponent is floor(log2 max|x|) - emax; elements are rounded half to even and saturate (section 6.3). A
    block of zeros has the smallest scale. A normal element's error is up to |w| * 2^-(mantissa + 1), a saturated one's
    up to max|w| * (1 - largest / 2^(emax + 1)).
    """

    scope = "groups"

    mantissa: int = 0
    bias: int = 0
    largest: float = 0.0  # largest element

    def shapes(self, rows, columns):
        codes = ((rows, columns * self.bits // 8), torch.uint8)
        return {"codes": codes, "scale": ((rows, columns // self.group), torch.uint8)}

    def quantize(self, w):
        w = w.unflatten(1, (-1, self.group))  # (out, in) -> (out, in / 32, 32)
        _, exponent = w.abs().amax(-1).frexp()  # max = m * 2^exponent, m in [0.5, 1)
        emax = math.floor(math.log2(self.largest))
        exponent = torch.where(w.any(-1), exponent - 1 - emax, -127).clamp(-127, 127)  # (out, in / 32)
        codes = self.encode(torch.ldexp(w, -exponent[..., None]))
        return {"codes": pack_bits(codes.flatten(1), self.bits), "scale": (exponent + 127).to(torch.uint8)}

    def encode(self, x: Tensor) -> Tensor:
        """float32 -> element codes: sign, exponent, mantissa."""
        size, min_exponent = x.abs().clamp(max=self.largest), 1 - self.bias  # subnormals share the lowest exponent
        exponent = torch.where(size == 0, min_exponent, size.frexp().exponent - 1).clamp(min=min_exponent)
        steps = torch.ldexp(size, self.mantissa - exponent).round()  # half to even
        code = (exponent - min_exponent) * 2**self.mantissa + steps.to(torch.int32)
        return code + x.signbit() * 2 ** (self.bits - 1)

    def elements(self, code: Tensor) -> Tensor:
        """int32 codes -> float32 elements / `factor`. The bit fields move to those of float16, so that subnormal
        elements become subnormal float16 numbers. A table would cost a GPU a load per element."""
        sign = 2 ** (self.bits - 1)
        half = (code & sign) << (16 - self.bits) | (code & (sign - 1)) << (10 - self.mantissa)
        return half.to(torch.int16).view(torch.float16).float()

    @property
    def factor(self) -> float:
        return 2.0 ** (15 - self.bias)

    def dequantize(self, parts):
        return self.weights(unpack_bits(parts["codes"], self.bits), parts["scale"])

    def weights(self, codes: Tensor, scale: Tensor) -> Tensor:
        """Unpacked codes (out, in) int32, scale (out, in / 32) uint8 -> float32 (out, in)."""
        elements = self.elements(codes).unflatten(1, (-1, self.group))  # (out, in) -> (out, in / 32, 32)
        return (elements * self.factor * power_of_two(scale)[..., None]).flatten(1)


class NvFp4(Mx):
    """NVFP4: E2M1 elements in blocks of 16 inputs, w = element * (scale / whole). The scale is E4M3. `whole` is the
    float32 global scale, one per matrix in other programs and one per row here, so that matrices can be stacked.

    Sources: NVIDIA's Transformer Engine; compressed-tensors, compressors/nvfp4 and
    quantization/lifecycle/forward_helpers.py (_dequantize).
    """

    scope, takes_row_max = "rows", True

    def shapes(self, rows, columns):
        scales = {"scale": ((rows, columns // self.group), torch.float8_e4m3fn), "whole": ((rows,), torch.float32)}
        return {"codes": ((rows, columns // 2), torch.uint8), **scales}

    def quantize(self, w, row_max: Tensor | None = None):
        """`row_max` as in PerRow."""
        w = w.unflatten(1, (-1, self.group))  # (out, in) -> (out, in / 16, 16)
        row_max = w.abs().amax((1, 2)) if row_max is None else row_max
        # (out,); the reciprocal of a tiny row_max would overflow
        global_scale = torch.where(row_max > 1e-30, self.largest * Fp8.max_code / row_max, 1.0)
        scale = w.abs().amax(-1) * global_scale[:, None] / self.largest
        scale = scale.clamp(max=Fp8.max_code).to(torch.float8_e4m3fn)
        codes = self.encode(w / divisor(scale.float() / global_scale[:, None])[..., None])
        return {"codes": pack_bits(codes.flatten(1), 4), "scale": scale, "whole": global_scale}

    def dequantize(self, parts):
        elements = self.elements(unpack_bits(parts["codes"], 4)) * self.factor
        scale = parts["scale"].float() / parts["whole"][:, None]  # (out, in / 16)
        return (elements.unflatten(1, (-1, self.group)) * scale[..., None]).flatten(1)


FORMATS: dict[str, Format] = {  # of SCHEMES, then of STORED_SCHEMES
    "int8": Int8(8),
    "int4-g32": Int4(4, 32),
    "int4-g64": Int4(4, 64),
    "int4-g128": Int4(4, 128),
    "fp8": Fp8(8),
    "mxfp8": Mx(8, 32, mantissa=3, bias=7, largest=448.0),  # E4M3
    "mxfp6": Mx(6, 32, mantissa=3, bias=1, largest=7.5),  # E2M3
    "mxfp4": Mx(4, 32, mantissa=1, bias=1, largest=6.0),  # E2M1
}
FORMATS |= {
    f"{name}-float32": replace(format, scale_dtype=torch.float32)
    for name, format in FORMATS.items()
    if not isinstance(format, Mx)
}
FORMATS |= {"q4_1": Int4(4, 32, torch.float16, center=0), "q8_0": Int8Groups(8, 32)}  # GGUF's
FORMATS |= {"q4_k": Int4(4, 32, torch.float32, center=0)}
FORMATS |= {"fp8-g128": Fp8Groups(8, 128, torch.bfloat16), "fp8-g128-float32": Fp8Groups(8, 128, torch.float32)}
FORMATS |= {"nvfp4": NvFp4(4, 16, mantissa=1, bias=1, largest=6.0)}

# --------------------------------------------------------------------------------------------- tensors


def format_of(scheme: str) -> Format:
    """The format of a scheme. ValueError for a scheme that does not exist."""
    check_scheme(scheme, FORMATS)
    return FORMATS[scheme]


def check_columns(scheme: str, columns: int, name: str) -> None:
    """ValueError for rows of `columns` inputs that do not divide into groups."""
    group = format_of(scheme).group
    if group and columns % group and not FORMATS[scheme].ragged:
        raise ValueError(f"{name}: {columns} inputs are no multiple of the {group} that share a scale in {scheme}")


CHUNK_WEIGHTS = 2**20  # weights per chunk: temporaries are several times their size and should stay in the cache


def row_chunks(rows: int, columns: int) -> Iterator[slice]:
    """Slices of rows with about CHUNK_WEIGHTS weights each."""
    size = max(1, CHUNK_WEIGHTS // columns)
    for begin in range(0, rows, size):  # a generator: unused, it does not fix `rows` in compiled code
        yield slice(begin, begin + size)


def quantize_tensor(weight: Tensor, scheme: str, row_max: Tensor | None = None) -> dict[str, Tensor]:
    """weight (out, in), any float type -> the scheme's parts, bit-packed, the same for every device.

    `row_max` (out,), for a scheme with a scale per row: the largest |weight| of each full row, when `weight` holds
    parts of rows. ValueError for an unknown scheme, inputs that do not divide, and weights that are not finite.
    """
    check_columns(scheme, weight.size(1), f"weight of shape {tuple(weight.shape)}")
    if row_max is not None and not FORMATS[scheme].takes_row_max:
        raise ValueError(f"{scheme} needs full rows: pass all inputs, without row_max")
    shapes = FORMATS[scheme].shapes(*weight.shape)
    parts = {name: torch.empty(shape, dtype=dtype, device=weight.device) for name, (shape, dtype) in shapes.items()}
    chunks = [slice(None)] if FORMATS[scheme].scope == "matrix" else row_chunks(*weight.shape)
    for rows in chunks:
        w = weight[rows].float()
        if not w.isfinite().all() or (row_max is not None and not row_max[rows].isfinite().all()):
            raise ValueError("weights hold NaN or infinity; a scale cannot be taken over them")
        chunk = FORMATS[scheme].quantize(w) if row_max is None else FORMATS[scheme].quantize(w, row_max[rows])
        for name, part in chunk.items():
            parts[name][rows] = part
    return parts


def dequantize_tensor(tensors: dict[str, Tensor], scheme: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Parts -> weights (out, in)."""
    return decode_by_chunks(format_of(scheme).dequantize, tensors, dtype, row_chunks(*tensors["codes"].shape))


def decode_by_chunks(
    decode: Callable[[dict[str, Tensor]], Tensor], parts: dict[str, Tensor], dtype: torch.dtype, chunks: Iterable[slice]
) -> Tensor:
    """decode(parts), float32 (out, in), cast to `dtype` chunk by chunk. Compiled code fuses and needs no chunks."""
    if torch.compiler.is_compiling():
        return decode(parts).to(dtype)
    weight = None
    for rows in chunks:
        w = decode({name: part[rows] for name, part in parts.items()})
        if weight is None:
            weight = w.new_empty(len(parts["codes"]), w.size(1), dtype=dtype)
        weight[rows] = w
    return weight


def add_squares(squares: list[float], approximate: Tensor, w: Tensor) -> None:
    """Add the sums of squares of approximate - w, and of w, to `squares`. `approximate` is overwritten."""
    for i, x in enumerate((approximate.sub_(w), w)):
        squares[i] += torch.linalg.vector_norm(x).item() ** 2


def release_memory() -> None:
    """Give freed memory back to the system. glibc keeps pieces of a chunk's size: 1 GB after 22 layers of a 1.1B model.
    Other C libraries keep less, or lack the call."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
