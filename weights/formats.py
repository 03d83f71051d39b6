"""Formats of quantized weights: what is stored, bit-packed, the same for every device.

    Format              one small class per stored form: shapes, quantize, dequantize; FORMATS names the instances
    quantize_tensor     (out, in) weights -> a scheme's parts;  dequantize_tensor  the inverse

Schemes: int8, int4-g32 | g64 | g128, fp8, and OCP Microscaling v1.0 (MX) mxfp8, mxfp6, mxfp4. int8, int4 and fp8 exist
with float32 scales too (int4-g128-float32), which hold other programs' folders exactly; so do fp8-g128, for blocks of
fp8, and nvfp4. q4_1 and q8_0 hold what GGUF files call Q4_0, Q4_1 and Q8_0. Parts can be cut by rows or by whole
groups. This file does not know Linears, kernels or files.
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

# ------------------------------------------------------------------------------------------------ bits


FILLED = {4: (2, 1), 6: (4, 3), 8: (1, 1)}  # bits of a code -> codes that fill whole bytes, and these bytes


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """codes (..., n) in [0, 2^bits) -> bytes (..., n * bits / 8), the first code in the lowest bits."""
    return _regroup(codes, *FILLED[bits], bits, 8).to(torch.uint8)


def unpack_bits(packed: Tensor, bits: int) -> Tensor:
    """The inverse of pack_bits: int32 codes (..., n)."""
    return _regroup(packed, *FILLED[bits][::-1], 8, bits)


def _regroup(x: Tensor, n: int, m: int, have: int, want: int) -> Tensor:
    """Every n numbers of `have` bits, lowest first -> m numbers of `want` bits, int32."""
    x = x.to(torch.int32)
    if n == m:
        return x
    word = sum(x[..., i::n] << have * i for i in range(n))
    return torch.stack([word >> want * i & 2**want - 1 for i in range(m)], dim=-1).flatten(-2)


E8M0_NAN = 255


def power_of_two(code: Tensor) -> Tensor:
    """E8M0 uint8 -> float32 2^(code - 127), by placing the exponent. 0 is 2^-127, a subnormal number."""
    code = code.to(torch.int32)
    return (code << 23 | (code == 0).to(torch.int32) << 22).view(torch.float32)


def scale_of(x: Tensor, stored: torch.dtype) -> Tensor:
    """A float32 scale in its stored type. bfloat16 is rounded up: less would not reach the largest weight."""
    if stored != torch.bfloat16:
        return x.to(stored)
    bits = x.float().contiguous().view(torch.int32)
    return ((bits + 0xFFFF) & ~0xFFFF).view(torch.float32).to(torch.bfloat16)


def divisor(scale: Tensor) -> Tensor:
    """A stored scale as what weights are divided by: 1 in place of 0, the scale of a row or group of zeros."""
    scale = scale.float()
    return torch.where(scale > 0, scale, 1.0)


# --------------------------------------------------------------------------------------------- formats

SMALLEST_ROW = 1e-30  # of a row's largest weight, for NVFP4's reciprocal


@dataclass(frozen=True)
class Format:
    """How a weight (out, in) is stored. `group`: inputs that share a scale; 0: the whole row."""

    bits: int
    group: int = 0
    ragged: ClassVar[bool] = False  # may a row end inside a group?
    # The least that `quantize` must see: any whole "groups" of a row, whole "rows", or the whole "matrix" (as stacked:
    # q, k and v are one). Chunks and ranks that hold less of a weight quantize all of it, and keep their share.
    scope: ClassVar[str] = "rows"
    takes_row_max: ClassVar[bool] = False  # does `quantize` take parts of rows too, with the rows' largest |weight|?

    def __init_subclass__(cls):
        if "quantize" in vars(cls):  # the base class knows nothing about what this one must see
            cls.scope = vars(cls).get("scope", Format.scope)
            cls.takes_row_max = vars(cls).get("takes_row_max", Format.takes_row_max)

    def shapes(self, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Part -> (shape, dtype). The first dimension of every part is the weight's rows; one part is "codes"."""
        raise NotImplementedError

    def quantize(self, w: Tensor) -> dict[str, Tensor]:
        """Finite float32 (out, in) -> parts."""
        raise NotImplementedError

    def dequantize(self, parts: dict[str, Tensor]) -> Tensor:
        """Parts -> float32 (out, in)."""
        raise NotImplementedError

    @property
    def bits_per_weight(self) -> float:
        """Of codes and scales, in a row so long that scales per row do not count."""
        shapes = self.shapes(1, 2**20)
        return sum(math.prod(shape) * dtype.itemsize * 8 for shape, dtype in shapes.values()) / 2**20


@dataclass(frozen=True)
class PerRow(Format):
    """Codes of type `kind` up to `largest`, times one scale a row."""

    takes_row_max = True

    stored: torch.dtype = torch.bfloat16  # of scales
    kind: ClassVar[torch.dtype]
    largest: ClassVar[int]

    def shapes(self, rows, columns):
        return {"codes": ((rows, columns), self.kind), "scale": ((rows,), self.stored)}

    def quantize(self, w, row_max: Tensor | None = None):
        """`row_max` (out,): the largest |weight| of each row, when w holds a part of the row."""
        row_max = w.abs().amax(1) if row_max is None else row_max
        scale = scale_of(row_max / self.largest, self.stored)  # (out,)
        codes = w / divisor(scale)[:, None]
        codes = codes if self.kind.is_floating_point else codes.round()
        return {"codes": codes.clamp(-self.largest, self.largest).to(self.kind), "scale": scale}

    def dequantize(self, parts):
        return parts["codes"].float() * parts["scale"].float()[:, None]


class Int8(PerRow):
    """|w - w'| <= scale / 2, scale <= max|w| / 127 * (1 + 2^-7)."""

    kind, largest = torch.int8, 127


class Fp8(PerRow):
    """E4M3 elements. |w - w'| <= |w| * 2^-4 for normal elements, scale * 2^-10 below them."""

    kind, largest = torch.float8_e4m3fn, 448


@dataclass(frozen=True)
class Int4(Format):
    """Asymmetric groups along the input: w = (code - center) * scale + zero, code in [0, 15], all but codes bfloat16.

    |w - w'| <= scale / 2 + |zero| * 2^-8, scale <= (max - min) / 15 * (1 + 2^-7). Scale and zero are rounded before the
    codes are chosen, so only weights at a group's ends can lie outside, by what the zero's rounding moved.
    """

    scope = "groups"

    stored: torch.dtype = torch.bfloat16  # of scale and zero
    center: int = 8  # the code that stands for zero

    def shapes(self, rows, columns):
        groups = ((rows, columns // self.group), self.stored)
        return {"codes": ((rows, columns // 2), torch.uint8), "scale": groups, "zero": groups}

    def quantize(self, w):
        w = w.unflatten(1, (-1, self.group))  # (out, in) -> (out, in / g, g)
        return self.with_range(w, w.amin(-1), w.amax(-1))

    def with_range(self, w: Tensor, low: Tensor, high: Tensor) -> dict[str, Tensor]:
        """The parts of w (out, in / g, g) when its groups span low to high (out, in / g)."""
        scale = scale_of((high - low) / 15, self.stored)
        zero = (low + self.center * scale.float()).to(self.stored)
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
    """Groups along the input: w = code * scale, codes of type `kind` up to `largest`."""

    scope = "groups"

    stored: torch.dtype = torch.float16  # of scales
    kind: ClassVar[torch.dtype]
    largest: ClassVar[int]

    def shapes(self, rows, columns):
        groups = math.ceil(columns / self.group)
        return {"codes": ((rows, columns), self.kind), "scale": ((rows, groups), self.stored)}

    def quantize(self, w):
        scale = scale_of(self.grouped(w).abs().amax(-1) / self.largest, self.stored)
        codes = self.grouped(w) / divisor(scale)[..., None]
        codes = codes if self.kind.is_floating_point else codes.round()
        codes = codes.clamp(-self.largest, self.largest).flatten(1)[:, : w.size(1)]  # (out, in)
        return {"codes": codes.to(self.kind), "scale": scale}

    def dequantize(self, parts):
        codes = parts["codes"].float()
        return (self.grouped(codes) * parts["scale"].float()[..., None]).flatten(1)[:, : codes.size(1)]

    def grouped(self, x: Tensor) -> Tensor:
        """(out, in) -> (out, in / g, g), a last group that is cut off filled up with zeros."""
        missing = -x.size(1) % self.group
        return (F.pad(x, (0, missing)) if missing else x).unflatten(1, (-1, self.group))


class Int8Groups(Groups):
    """|w - w'| <= scale / 2, but for what rounding the scale moves: up to 127 * 2^-11 * scale."""

    kind, largest = torch.int8, 127


class Fp8Groups(Groups):
    """E4M3 elements. A block of r rows and g inputs with one scale is r rows here that repeat it: that costs scales of
    1 / g, and rows can be stacked and cut anywhere."""

    kind, largest, ragged = torch.float8_e4m3fn, 448, True


@dataclass(frozen=True)
class Mx(Format):
    """OCP Microscaling v1.0: blocks of 32 inputs share a power of two (E8M0), elements are minifloats.

    Shared exponent floor(log2 max|x|) - emax; elements rounded half to even, saturating (section 6.3). A block of zeros
    has the smallest scale. Error of a normal element: |w| * 2^-(mantissa + 1); of the largest ones, which saturate, up
    to max|w| * (1 - largest / 2^(emax + 1)).
    """

    scope = "groups"

    mantissa: int = 0
    bias: int = 0
    largest: float = 0.0  # element

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
        size, lowest = x.abs().clamp(max=self.largest), 1 - self.bias  # exponent of subnormal elements, and the next
        exponent = torch.where(size == 0, lowest, size.frexp().exponent - 1).clamp(min=lowest)
        steps = torch.ldexp(size, self.mantissa - exponent).round()  # half to even
        code = (exponent - lowest) * 2**self.mantissa + steps.to(torch.int32)
        return code + x.signbit() * 2 ** (self.bits - 1)

    def elements(self, code: Tensor) -> Tensor:
        """int32 codes -> float32 elements / `factor`. The fields move to where float16 has its own, so that subnormal
        elements are subnormal float16 numbers. On a GPU a table would be loads."""
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
    """NVFP4: E2M1 elements, blocks of 16 inputs, w = element * (scale / whole). The scale is E4M3; `whole`, float32, is
    stored once a matrix there and once a row here, so that matrices can be stacked. Source: NVIDIA's Transformer Engine
    and compressed-tensors, compressors/nvfp4 and quantization/lifecycle/forward_helpers.py (_dequantize)."""

    scope, takes_row_max = "rows", True

    def shapes(self, rows, columns):
        scales = {"scale": ((rows, columns // self.group), torch.float8_e4m3fn), "whole": ((rows,), torch.float32)}
        return {"codes": ((rows, columns // 2), torch.uint8), **scales}

    def quantize(self, w, row_max: Tensor | None = None):
        """`row_max` as in PerRow."""
        w = w.unflatten(1, (-1, self.group))  # (out, in) -> (out, in / 16, 16)
        row_max, largest_scale = w.abs().amax((1, 2)) if row_max is None else row_max, Fp8.largest
        whole = torch.where(row_max > SMALLEST_ROW, self.largest * largest_scale / row_max, 1.0)  # (out,)
        scale = (w.abs().amax(-1) * whole[:, None] / self.largest).clamp(max=largest_scale).to(torch.float8_e4m3fn)
        codes = self.encode(w / divisor(scale.float() / whole[:, None])[..., None])
        return {"codes": pack_bits(codes.flatten(1), 4), "scale": scale, "whole": whole}

    def dequantize(self, parts):
        elements = self.elements(unpack_bits(parts["codes"], 4)) * self.factor
        scale = parts["scale"].float() / parts["whole"][:, None]  # (out, in / 16)
        return (elements.unflatten(1, (-1, self.group)) * scale[..., None]).flatten(1)


FORMATS: dict[str, Format] = {
    "int8": Int8(8),
    "int4-g32": Int4(4, 32),
    "int4-g64": Int4(4, 64),
    "int4-g128": Int4(4, 128),
    "fp8": Fp8(8),
    "mxfp8": Mx(8, 32, mantissa=3, bias=7, largest=448.0),  # E4M3
    "mxfp6": Mx(6, 32, mantissa=3, bias=1, largest=7.5),  # E2M3
    "mxfp4": Mx(4, 32, mantissa=1, bias=1, largest=6.0),  # E2M1
}
SCHEMES = tuple(FORMATS)  # to choose from; the schemes below hold what another program chose
FORMATS |= {
    f"{name}-float32": replace(format, stored=torch.float32)
    for name, format in FORMATS.items()
    if not isinstance(format, Mx)
}
FORMATS |= {"q4_1": Int4(4, 32, torch.float16, center=0), "q8_0": Int8Groups(8, 32)}  # GGUF's
FORMATS |= {"fp8-g128": Fp8Groups(8, 128, torch.bfloat16), "fp8-g128-float32": Fp8Groups(8, 128, torch.float32)}
FORMATS |= {"nvfp4": NvFp4(4, 16, mantissa=1, bias=1, largest=6.0)}

# --------------------------------------------------------------------------------------------- tensors


def format_of(scheme: str) -> Format:
    """ValueError for a scheme that does not exist."""
    if scheme not in FORMATS:
        raise ValueError(f"quantization scheme {scheme!r} does not exist; there are {', '.join(FORMATS)}")
    return FORMATS[scheme]


def check_columns(scheme: str, columns: int, what: str) -> None:
    """ValueError for rows whose inputs are not whole groups."""
    group = format_of(scheme).group
    if group and columns % group and not FORMATS[scheme].ragged:
        raise ValueError(f"{what}: {columns} inputs are no multiple of the {group} that share a scale in {scheme}")


CHUNK = 2**20  # weights at a time: temporaries are several times their size, and should stay in the cache


def row_chunks(rows: int, columns: int, block: int = 1) -> Iterator[slice]:
    """All rows, about CHUNK weights and whole blocks of rows at a time."""
    size = max(1, CHUNK // columns // block) * block
    return (slice(begin, begin + size) for begin in range(0, rows, size))


def quantize_tensor(weight: Tensor, scheme: str, row_max: Tensor | None = None) -> dict[str, Tensor]:
    """weight (out, in), any float type -> the scheme's parts, bit-packed, the same for every device.

    `row_max` (out,), for a scheme with a scale a row: the rows' largest |weight|, when `weight` holds a part of them.
    ValueError for an unknown scheme, inputs that do not divide, and weights that are not finite.
    """
    check_columns(scheme, weight.size(1), f"weight of shape {tuple(weight.shape)}")
    if row_max is not None and not FORMATS[scheme].takes_row_max:
        raise ValueError(f"{scheme} takes whole rows only: hand it all inputs, without row_max")
    shapes = FORMATS[scheme].shapes(*weight.shape)
    found = {name: torch.empty(shape, dtype=dtype, device=weight.device) for name, (shape, dtype) in shapes.items()}
    chunks = [slice(None)] if FORMATS[scheme].scope == "matrix" else row_chunks(*weight.shape)
    for rows in chunks:
        w = weight[rows].float()
        if not w.isfinite().all() or (row_max is not None and not row_max[rows].isfinite().all()):
            raise ValueError("weights hold NaN or infinity; a scale cannot be taken over them")
        parts = FORMATS[scheme].quantize(w) if row_max is None else FORMATS[scheme].quantize(w, row_max[rows])
        for name, part in parts.items():
            found[name][rows] = part
    return found


def dequantize_tensor(tensors: dict[str, Tensor], scheme: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weights (out, in) that the parts stand for."""
    return by_chunks(format_of(scheme).dequantize, tensors, dtype, row_chunks(*tensors["codes"].shape))


def by_chunks(
    decode: Callable[[dict[str, Tensor]], Tensor], parts: dict[str, Tensor], dtype: torch.dtype, chunks: Iterable[slice]
) -> Tensor:
    """decode(parts), float32 (out, in), in `dtype`, some rows at a time. Compiled code fuses, and needs no chunks."""
    if torch.compiler.is_compiling():
        return decode(parts).to(dtype)
    found = None
    for rows in chunks:
        w = decode({name: part[rows] for name, part in parts.items()})
        if found is None:
            found = w.new_empty(len(parts["codes"]), w.size(1), dtype=dtype)
        found[rows] = w
    return found


def add_squares(squares: list[float], found: Tensor, w: Tensor) -> None:
    """Add the sums of squares of found - w, and of w. `found` is overwritten."""
    for i, x in enumerate((found.sub_(w), w)):
        squares[i] += torch.linalg.vector_norm(x).item() ** 2


def release() -> None:
    """Give freed memory back to the system. glibc keeps pieces of a chunk's size: 1 GB after 22 layers of a 1.1B model.
    Other C libraries keep less, or have no call for it."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
