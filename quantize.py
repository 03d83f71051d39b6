"""Weight-only quantization: fewer bytes per weight, in forms that every device reads.

    Format              one small class per stored form: shapes, quantize, dequantize; FORMATS names them
    quantize_tensor     (out, in) weights -> the form's parts;  dequantize_tensor  the inverse
    QuantizedLinear     a Linear that owns its parts: from_float, shard, pack; a subclass per kernel family
    replace_linears     the one walker: a Transformer's Linears -> QuantizedLinears, in place
    gptq, search_range  codes chosen by what real inputs show; ranges chosen by least squared error
    main                python quantize.py: a folder in, a quantized folder out, layer by layer

What is stored is bit-packed, the same for every device, and split by rows or whole groups. Packing for a kernel is the
last step of loading; what it makes is never sharded or saved. This file does not know checkpoints, sampling or ranks:
checkpoint.py reads and writes the parts under the names that it gives every tensor. Only `run`, which is a program and
stands above both files, uses it.

Formats: int8, int4-g32 | g64 | g128, fp8, and OCP Microscaling v1.0 (MX) mxfp8, mxfp6, mxfp4. int8, int4
and fp8 exist with float32 scales too (int4-g128-float32), which hold those of other programs' folders exactly.
"""

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until `main`: imports answer Ctrl-C with a traceback, or swallow it

import argparse
import contextlib
import ctypes
import functools
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true
from tqdm import tqdm

from fused import grouped_sums, in_order, minifloat, power_of_two, row_sums, unpack_words, word_order
from model import Block, Shapes, Transformer, visible_keys
from packed import Holder, Packed, PackedInt8, from_digits, to_digits

# --------------------------------------------------------------------------------------------- formats


def round_up(x: Tensor) -> Tensor:
    """float32 -> the next bfloat16 at or above: a scale that is rounded down would not reach the largest weight."""
    bits = x.float().contiguous().view(torch.int32)
    return ((bits + 0xFFFF) & ~0xFFFF).view(torch.float32).to(torch.bfloat16)


def scale_of(x: Tensor, stored: torch.dtype) -> Tensor:
    """A float32 scale as it is stored, not below x."""
    return round_up(x) if stored == torch.bfloat16 else x.to(stored)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """codes (..., n) in [0, 2^bits) -> bytes (..., n * bits / 8), the first code in the lowest bits."""
    if bits == 8:
        return codes.to(torch.uint8)
    per = {4: 2, 6: 4}[bits]  # codes that fill whole bytes
    word = codes.to(torch.int32).unflatten(-1, (-1, per))  # (..., n / per, per)
    word = (word << _shifts(per, bits, word)).sum(-1, keepdim=True, dtype=torch.int32)  # (..., n / per, 1)
    shift = _shifts(per * bits // 8, 8, word)
    return ((word >> shift) & 0xFF).to(torch.uint8).flatten(-2)


def unpack_bits(packed: Tensor, bits: int) -> Tensor:
    """The inverse of pack_bits: int32 codes (..., n)."""
    if bits == 8:
        return packed.to(torch.int32)
    per = {4: 2, 6: 4}[bits]
    word = packed.to(torch.int32).unflatten(-1, (-1, per * bits // 8))  # (..., n / per, bytes)
    word = (word << _shifts(word.size(-1), 8, word)).sum(-1, keepdim=True, dtype=torch.int32)
    return ((word >> _shifts(per, bits, word)) & (2**bits - 1)).flatten(-2)


def pack_words(packed: Tensor, bits: int, group: int) -> Tensor:
    """bytes of pack_bits (out, n * bits / 8) -> the same codes as int32 words (out, n * bits / 32), in `word_order`."""
    return pack_bits(word_order(unpack_bits(packed, bits), bits, group), bits).view(torch.int32)


def _shifts(n: int, bits: int, like: Tensor) -> Tensor:
    return torch.arange(n, dtype=torch.int32, device=like.device) * bits


@dataclass(frozen=True)
class Format:
    """How a weight (out, in) is stored. `group`: inputs that share a scale; 0: the whole row."""

    bits: int
    group: int = 0

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
        """Codes and scales, as stored; of a row so long that scales per row do not count."""
        shapes = self.shapes(1, 2**20)
        return sum(math.prod(shape) * dtype.itemsize * 8 for shape, dtype in shapes.values()) / 2**20


@dataclass(frozen=True)
class PerRow(Format):
    """Codes times one scale a row."""

    stored: torch.dtype = torch.bfloat16  # of scales

    def quantize(self, w):
        return self.with_max(w, w.abs().amax(1))

    def with_max(self, w: Tensor, row_max: Tensor) -> dict[str, Tensor]:
        """The codes of w (out, in) where the largest |weights| of its rows are row_max (out,)."""
        raise NotImplementedError

    def dequantize(self, parts):
        return parts["codes"].float() * parts["scale"].float()[:, None]


class Int8(PerRow):
    """Symmetric, one scale a row: w = code * scale, code in [-127, 127]. |w - w'| <= scale / 2, scale <= max|w| / 127 *
    (1 + 2^-7)."""

    def shapes(self, rows, columns):
        return {"codes": ((rows, columns), torch.int8), "scale": ((rows,), self.stored)}

    def with_max(self, w, row_max):
        scale = scale_of(row_max / 127, self.stored)  # (out,)
        step = _divisor(scale)[:, None]
        return {"codes": (w / step).round().clamp(-127, 127).to(torch.int8), "scale": scale}


@dataclass(frozen=True)
class Int4(Format):
    """Asymmetric groups along the input: w = (code - 8) * scale + zero, code in [0, 15], scale and zero in bfloat16.

    |w - w'| <= scale / 2 + |zero| * 2^-8, scale <= (max - min) / 15 * (1 + 2^-7): both are rounded before the codes are
    chosen, so only weights at a group's ends can lie outside by what the zero's rounding moved.
    """

    stored: torch.dtype = torch.bfloat16  # of scale and zero

    def shapes(self, rows, columns):
        groups = ((rows, columns // self.group), self.stored)
        return {"codes": ((rows, columns // 2), torch.uint8), "scale": groups, "zero": groups}

    def quantize(self, w):
        w = w.unflatten(1, (-1, self.group))  # (out, in / g, g)
        low, high = w.amin(-1), w.amax(-1)
        return self.with_range(w, low, high)

    def with_range(self, w, low, high):
        """The codes of w (out, in / g, g) when its groups span low to high (out, in / g)."""
        scale = scale_of((high - low) / 15, self.stored)
        zero = (low + 8 * scale.float()).to(self.stored)
        codes = ((w - zero.float()[..., None]) / _divisor(scale)[..., None]).round() + 8
        return {"codes": pack_bits(codes.clamp(0, 15).flatten(1), 4), "scale": scale, "zero": zero}

    def dequantize(self, parts):
        codes = unpack_bits(parts["codes"], 4).unflatten(1, (-1, self.group)) - 8  # (out, in / g, g)
        return (codes * parts["scale"].float()[..., None] + parts["zero"].float()[..., None]).flatten(1)


class Fp8(PerRow):
    """E4M3 elements, one scale a row. |w - w'| <= |w| * 2^-4 for normal elements, scale * 2^-10 below them."""

    def shapes(self, rows, columns):
        return {"codes": ((rows, columns), torch.float8_e4m3fn), "scale": ((rows,), self.stored)}

    def with_max(self, w, row_max):
        scale = scale_of(row_max / 448, self.stored)
        return {"codes": (w / _divisor(scale)[:, None]).to(torch.float8_e4m3fn), "scale": scale}


@dataclass(frozen=True)
class Mx(Format):
    """OCP Microscaling v1.0: blocks of 32 inputs share a power of two (E8M0), elements are minifloats.

    Shared exponent floor(log2 max|x|) - emax; elements rounded half to even, saturating (section 6.3). A block of zeros
    has the smallest scale. Error of a normal element: |w| * 2^-(mantissa + 1); of the largest ones, which saturate, up
    to max|w| * (1 - largest / 2^(emax + 1)).
    """

    mantissa: int = 0
    bias: int = 0
    largest: float = 0.0  # of the element format

    @property
    def emax(self) -> int:
        return math.floor(math.log2(self.largest))

    def shapes(self, rows, columns):
        blocks = columns // self.group
        return {
            "codes": ((rows, columns * self.bits // 8), torch.uint8), "scale": ((rows, blocks), torch.uint8),
        }  # fmt: skip

    def quantize(self, w):
        w = w.unflatten(1, (-1, self.group))  # (out, in / 32, 32)
        _, exponent = w.abs().amax(-1).frexp()  # max = m * 2^exponent, m in [0.5, 1)
        exponent = torch.where(w.any(-1), exponent - 1 - self.emax, -127).clamp(-127, 127)  # (out, in / 32)
        codes = self.encode(torch.ldexp(w, -exponent[..., None]))
        return {"codes": pack_bits(codes.flatten(1), self.bits), "scale": (exponent + 127).to(torch.uint8)}

    def encode(self, x: Tensor) -> Tensor:
        """float32 -> element codes: sign, exponent, mantissa."""
        _, exponent = x.abs().frexp()
        lowest = 1 - self.bias
        exponent = torch.where(x == 0, lowest, exponent - 1).clamp(min=lowest)  # subnormals share the smallest normal's
        steps = torch.ldexp(x.abs(), self.mantissa - exponent).round()  # half to even
        code = (exponent - lowest) * 2**self.mantissa + steps.to(torch.int32)
        return code.clamp(max=self.code_of_largest) + x.signbit() * 2 ** (self.bits - 1)

    @property
    def code_of_largest(self) -> int:
        exponent = self.emax
        return int((exponent - (1 - self.bias)) * 2**self.mantissa + self.largest * 2.0 ** (self.mantissa - exponent))

    def decode(self, codes: Tensor) -> Tensor:
        """Element codes -> float32."""
        field = (codes >> self.mantissa) & (2 ** (self.bits - 1 - self.mantissa) - 1)
        steps = (codes & (2**self.mantissa - 1)) + torch.where(field > 0, 2**self.mantissa, 0)
        value = torch.ldexp(steps.float(), field.clamp(min=1) - self.bias - self.mantissa)
        return torch.where(codes >> (self.bits - 1) > 0, -value, value)

    def dequantize(self, parts):
        elements, scales = _mx_tables(self, parts["codes"].device)
        if self.bits == 4:  # a byte at a time: two elements
            values = elements[unpack_bits(parts["codes"], 8)].flatten(1)  # (out, in / 2, 2) -> (out, in)
        else:
            values = elements[unpack_bits(parts["codes"], self.bits)]  # (out, in)
        return (values.unflatten(1, (-1, self.group)) * scales[parts["scale"].to(torch.int32)][..., None]).flatten(1)


@functools.cache
def _mx_tables(format: Mx, device: torch.device) -> tuple[Tensor, Tensor]:
    """What every code (of a 4-bit form: every byte of two) and every E8M0 scale stand for."""
    codes = torch.arange(256 if format.bits == 4 else 2**format.bits)
    elements = format.decode(unpack_bits(codes.to(torch.uint8)[:, None], 4) if format.bits == 4 else codes)
    return elements.to(device), torch.ldexp(torch.ones(256), torch.arange(256) - 127).to(device)


def _divisor(scale: Tensor) -> Tensor:
    """float32, 1 in place of 0: a row or group of zeros has scale 0 and codes that mean 0."""
    scale = scale.float()
    return torch.where(scale > 0, scale, 1.0)


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
SCHEMES = tuple(FORMATS)  # to choose from; those that follow hold what somebody else chose
FORMATS |= {
    f"{name}-float32": replace(format, stored=torch.float32)
    for name, format in FORMATS.items()
    if not isinstance(format, Mx)
}


def format_of(scheme: str) -> Format:
    """ValueError for a scheme that does not exist."""
    if scheme not in FORMATS:
        raise ValueError(f"quantization scheme {scheme!r} does not exist; there are {', '.join(FORMATS)}")
    return FORMATS[scheme]


def check_columns(scheme: str, columns: int, what: str) -> None:
    """ValueError where rows of so many inputs are not whole groups."""
    group = format_of(scheme).group
    if group and columns % group:
        raise ValueError(f"{what}: {columns} inputs are no multiple of the {group} that share a scale in {scheme}")


def quantize_tensor(weight: Tensor, scheme: str, row_max: Tensor | None = None) -> dict[str, Tensor]:
    """weight (out, in), any float type -> the scheme's parts, bit-packed, the same for every device. `row_max` (out,),
    for a scheme with a scale a row: the rows' largest |weights|, where `weight` holds some of their inputs.

    Raises ValueError for an unknown scheme, an input dimension that does not divide, and weights that are not finite.
    """
    check_columns(scheme, weight.size(1), f"weight of shape {tuple(weight.shape)}")
    if row_max is not None and not isinstance(FORMATS[scheme], PerRow):
        raise ValueError(f"{scheme} takes whole rows only: write the folder with quantize.py, then divide that one")
    shapes = FORMATS[scheme].shapes(*weight.shape)
    found = {name: torch.empty(shape, dtype=dtype, device=weight.device) for name, (shape, dtype) in shapes.items()}
    for rows in row_chunks(*weight.shape):
        w = weight[rows].float()
        if not w.isfinite().all() or (row_max is not None and not row_max[rows].isfinite().all()):
            raise ValueError("weights hold NaN or infinity; a scale cannot be taken over them")
        parts = FORMATS[scheme].quantize(w) if row_max is None else FORMATS[scheme].with_max(w, row_max[rows])
        for name, part in parts.items():
            found[name][rows] = part
    return found


CHUNK = 2**20  # weights at a time: what a format works on is several times their size, and should stay in the cache


def release() -> None:
    """Give freed memory back to the system. glibc keeps pieces of a chunk's size: 1 GB after 22 layers of a 1.1B model.
    Other C libraries keep less, or have no call for it."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def row_chunks(rows: int, columns: int) -> Iterator[slice]:
    size = max(1, CHUNK // columns)
    return (slice(begin, begin + size) for begin in range(0, rows, size))


def dequantize_tensor(tensors: dict[str, Tensor], scheme: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weights (out, in) that the parts stand for."""
    return decoded(format_of(scheme).dequantize, tensors, dtype)


def decoded(decode: Callable[[dict[str, Tensor]], Tensor], tensors: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    """decode(tensors), float32 (out, in), in `dtype`, some rows at a time."""
    if torch.compiler.is_compiling():  # what is compiled fuses, and needs no chunks
        return decode(tensors).to(dtype)
    found = None
    for rows in row_chunks(*tensors["codes"].shape):
        w = decode({name: part[rows] for name, part in tensors.items()})
        if found is None:
            found = w.new_empty(len(tensors["codes"]), w.size(1), dtype=dtype)
        found[rows] = w
    return found


# --------------------------------------------------------------------------------------------- Linears

KERNEL_ROWS = 16  # inputs up to which a kernel that reads the codes beats one product with the unpacked weights
FUSING_DEVICE = "cuda"  # whose compiler makes one kernel of unpacking, multiplying and summing
CPU_INT4_ROWS = 256  # the same for int4 on a CPU, where unpacking takes as long as the kernel with 200 rows


class QuantizedLinear(Holder):
    """A Linear that owns its stored parts and computes with the weights they stand for.

    This class has no kernel that reads them. On a CPU it keeps the weights beside them in the dtype of the activations.
    Elsewhere products of a few rows are written so that what compiles them makes one kernel of unpacking and
    multiplying; all others unpack the weights first. Subclasses know a kernel. Parts are parameters, so that what
    moves, counts or fills a model's parameters treats them like any other; once a kernel holds the codes in a form of
    its own, the parameter is left without values (see `Holder`).
    """

    looked_up = False  # does an embedding read rows of the stored parts?
    expanded_bytes = 0  # that a product reads beyond the stored parts' size

    def __init__(self, in_features: int, out_features: int, scheme: str, bias: bool = False, device=None, dtype=None):
        super().__init__()
        check_columns(scheme, in_features, "Linear")
        self.in_features, self.out_features, self.scheme = in_features, out_features, scheme
        for name, (shape, kind) in FORMATS[scheme].shapes(out_features, in_features).items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=kind, device=device), False))
        bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype), False) if bias else None
        self.register_parameter("bias", bias)

    @classmethod
    def empty(cls, in_features: int, out_features: int, scheme: str, **options) -> "QuantizedLinear":
        """Of the class that has the scheme's kernel, its parts not filled in."""
        return KERNELS.get(type(format_of(scheme)), QuantizedLinear)(in_features, out_features, scheme, **options)

    @classmethod
    def from_float(cls, linear: "nn.Linear | QuantizedLinear", scheme: str) -> "QuantizedLinear":
        """The quantized form of a Linear, ready to compute; of a quantized one, of the weights that it stands for."""
        found = cls.stored(linear, scheme)
        found.pack(linear.dtype if isinstance(linear, QuantizedLinear) else linear.weight.dtype)
        return found

    @classmethod
    def stored(
        cls, linear: "nn.Linear | QuantizedLinear", scheme: str, parts: dict[str, Tensor] | None = None
    ) -> "QuantizedLinear":
        """The quantized form of a Linear, not packed. `parts`: chosen by something better than rounding."""
        quantized = isinstance(linear, QuantizedLinear)
        weight = linear.dequantized(torch.float32) if quantized else full_weight(linear)
        dtype = linear.dtype if quantized else weight.dtype
        options = {"bias": linear.bias is not None, "device": weight.device, "dtype": dtype}
        found = cls.empty(linear.in_features, linear.out_features, scheme, **options)
        found.fill(slice(None), quantize_tensor(weight, scheme) if parts is None else parts)
        if linear.bias is not None:
            found.bias.copy_(linear.bias.detach())
        found._forward_hooks.update(linear._forward_hooks)  # what stands behind the one stands behind the other
        return found

    def parts(self) -> dict[str, Tensor]:
        """As stored, read back out of the kernel's form where that is the only one left."""
        if self.freed:
            return self.read_back()
        return {name: getattr(self, name) for name in FORMATS[self.scheme].shapes(1, self.in_features)}

    def read_back(self) -> dict[str, Tensor]:
        """The stored parts, from what a kernel holds. Of classes that free them."""
        raise NotImplementedError

    @torch.no_grad()
    def fill(self, rows: slice, parts: dict[str, Tensor]) -> None:
        """Copy the parts of some rows into place."""
        for name, part in parts.items():
            getattr(self, name)[rows] = part.to(getattr(self, name).device)

    def shard(self, dim: int, rank: int, world: int) -> "QuantizedLinear":
        """The part of rank `rank` of `world`: of the output rows (dim 0) or of the inputs (dim 1, whole groups; bias
        with rank 0 alone). Rows' scales stay those of the whole row. ValueError for what cannot be cut."""
        size = (self.out_features, self.in_features)[dim]
        group = FORMATS[self.scheme].group or 1
        unit = group if dim else 1
        if size % (world * unit):
            raise ValueError(f"{size} cannot be cut into {world} parts of whole groups of {unit} ({self.scheme})")
        part = size // world
        out_features, in_features = (part, self.in_features) if dim == 0 else (self.out_features, part)
        parts = self.parts()
        options = {"device": parts["codes"].device, "dtype": None if self.bias is None else self.bias.dtype}
        bias = self.bias is not None and (dim == 0 or rank == 0)
        found = self.empty(in_features, out_features, self.scheme, bias=bias, **options)
        for name, part in parts.items():
            found.fill(slice(None), {name: part.chunk(world, dim)[rank] if dim < part.dim() else part})
        if bias:
            found.bias.data.copy_(self.bias.chunk(world)[rank] if dim == 0 else self.bias)
        return found

    def pack(self, dtype: torch.dtype) -> None:
        """Last step of loading: make what a kernel needs for activations of this dtype. Called once all parts are
        filled in and on their device."""
        self.dtype = dtype
        weight = self.dequantized(dtype) if self.codes.device.type == "cpu" else None
        if weight is not None and Packed.takes(weight):
            self.hold(Packed(weight))
            self.expanded_bytes = weight.nbytes - sum(part.nbytes for part in self.parts().values())
        if self.codes.device.type != "cuda":
            _say_no_kernel(self.scheme, dtype, self.packed is not None)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        return dequantize_tensor(self.parts(), self.scheme, dtype)

    def product(self, x: Tensor) -> Tensor:
        """x (M, in) -> (M, out), without bias."""
        if self.packed is not None:
            return self.packed_product(x)
        return self.fused_product(x) if fuses(x) else F.linear(x, self.dequantized(x.dtype))

    def fused_product(self, x: Tensor) -> Tensor:
        """The same of a few rows, for a compiler to make one kernel of."""
        parts, format = self.parts(), FORMATS[self.scheme]
        if isinstance(format, PerRow):
            return row_sums(parts["codes"].float(), x, parts["scale"].float())
        return row_sums(format.dequantize(parts), x)

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x.reshape(-1, self.in_features).contiguous()).view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias


def fuses(x: Tensor) -> bool:
    """Is this a product of few rows (M, in) in code that is compiled for a GPU? Of prompts, whose length is left open,
    it is none."""
    compiled = torch.compiler.is_compiling() and x.device.type == FUSING_DEVICE
    return compiled and statically_known_true(x.size(0) <= KERNEL_ROWS)


class Int8Linear(QuantizedLinear):
    """codes times scale, factored out of the product: y = (x @ codes.T) * scale. On a CPU large ones multiply in
    integers, for any number of rows; the rounding of x is below that of the result (see `to_digits`), and their scales
    are float32. All others take them in the activations' type: of a float32 one (int8-float32) bfloat16 loses 2^-9,
    half a last bit of the result."""

    def pack(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        if PackedInt8.takes(self.codes):
            self.hold(PackedInt8(self.codes, self.scale))
            if not self.looked_up:
                self.free("codes")
            return
        # A cast inside the compiled product would be a computed scale, which Inductor's lowering does not take.
        self.register_buffer("kernel_scale", self.scale.to(dtype), persistent=False)

    def read_back(self):
        return {"codes": self.packed.dense(), "scale": self.scale}

    def product(self, x: Tensor) -> Tensor:
        if self.packed is not None:
            digits, step = to_digits(x)
            return from_digits(self.packed_product(digits), step).to(x.dtype)
        if x.device.type == "cpu" and x.size(0) <= KERNEL_ROWS:
            return torch._weight_int8pack_mm(x, self.codes, self.kernel_scale)
        return self.fused_product(x) if fuses(x) else F.linear(x, self.codes.to(x.dtype)) * self.kernel_scale


class Int4Linear(QuantizedLinear):
    """aten's int4 kernels, which take (code - 8) * scale + zero, as it is stored. A CPU wants multiples of 16 rows,
    CUDA bfloat16 activations.

    They take scale and zero in the activations' type. Of float32 ones (int4-g128-float32) bfloat16 loses up to 2^-9 *
    (|code - 8| * scale + |zero|), which is at most scale / 32 where zero is up to 8 scales, as in other programs'
    folders; choosing codes had already moved the weights by up to scale / 2. float16 loses an eighth of that, float32
    nothing. Products with more rows than a kernel takes, and what is saved, lose nothing.
    """

    kernel = None  # until packed, and where none fits

    def pack(self, dtype: torch.dtype) -> None:
        group, rows = FORMATS[self.scheme].group, math.ceil(self.out_features / 16) * 16
        on_cpu = self.codes.device.type == "cpu"
        if not on_cpu and (rows > self.out_features or self.in_features % 32 or self.codes.device.type != "cuda"):
            return super().pack(dtype)
        codes = torch.zeros(rows, self.in_features, dtype=torch.int32, device=self.codes.device)
        for part in row_chunks(*self.codes.shape):
            codes[: self.out_features][part] = unpack_bits(self.codes[part], 4)
        both = torch.stack((self.scale, self.zero), dim=-1)  # (out, in / g, 2)
        both = F.pad(both, (0, 0, 0, 0, 0, rows - self.out_features)).transpose(0, 1).contiguous()  # (in / g, rows, 2)
        self.dtype = dtype
        self.register_buffer("scales_and_zeros", both.to(dtype), persistent=False)
        self.group = group
        if on_cpu:
            # What Inductor would call for aten's own operator, whose lowering loses the group size inside a region that
            # is compiled once for many layers (torch 2.13); older ones may not have it.
            self.kernel = torch.ops.aten._weight_int4pack_mm_for_cpu
            if hasattr(torch.ops.quantized, "int4mm_packed_weight_cpu"):
                self.kernel = torch.ops.quantized.int4mm_packed_weight_cpu
                del self.group
                self.register_buffer("group", torch.tensor(group), persistent=False)
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        else:
            self.kernel = torch.ops.aten._weight_int4pack_mm
            pairs = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)  # this kernel takes the first code high
            tiles = math.gcd(self.in_features // 16, 8)  # of 16 inputs that one thread block takes in a go: 2, 4 or 8
            packed = torch.ops.aten._convert_weight_to_int4pack(pairs, tiles)
        self.register_buffer("packed_codes", packed, persistent=False)
        self.expanded_bytes = self.scales_and_zeros.nbytes - self.scale.nbytes - self.zero.nbytes  # the kernel's type
        self.layout = int4_layout() if on_cpu else None
        if self.layout and not self.looked_up:
            exact = dtype in (FORMATS[self.scheme].stored, torch.float32)  # else the kernel's scales are rounded ones
            for name in self.parts() if exact else ("codes",):
                self.free(name)

    def kernel_parts(self, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Codes (n, in) int32, scale and zero (n, in / g) float32 of whole blocks of rows, or of the last ones."""
        codes = unpack_int4(self.packed_codes[rows], *self.layout)[: self.out_features - rows.start]  # no padding
        if not self.scale.is_meta:
            return codes, self.scale[rows].float(), self.zero[rows].float()
        scale, zero = self.scales_and_zeros[:, rows.start : rows.start + len(codes)].float().unbind(-1)  # (in / g, n)
        return codes, scale.T, zero.T

    def row_blocks(self) -> list[slice]:
        """All rows, in chunks that are whole blocks of the kernel's."""
        size = max(1, CHUNK // self.in_features // self.layout[0]) * self.layout[0]
        return [slice(begin, begin + size) for begin in range(0, len(self.packed_codes), size)]

    def read_back(self):
        found = [self.kernel_parts(rows) for rows in self.row_blocks()]
        codes, scale, zero = (torch.cat(part) for part in zip(*found))
        stored = FORMATS[self.scheme].stored
        return {"codes": pack_bits(codes, 4), "scale": scale.to(stored), "zero": zero.to(stored)}

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        if not self.freed:
            return super().dequantized(dtype)
        found = torch.empty(self.out_features, self.in_features, dtype=dtype)
        for rows in self.row_blocks():
            codes, scale, zero = self.kernel_parts(rows)
            codes = codes.unflatten(1, (scale.size(1), -1)) - 8  # (n, in / g, g)
            found[rows] = (codes * scale[..., None] + zero[..., None]).flatten(1)
        return found

    def product(self, x: Tensor) -> Tensor:
        on_cpu = x.device.type == "cpu"
        few = x.size(0) <= CPU_INT4_ROWS if on_cpu else statically_known_true(x.size(0) <= KERNEL_ROWS)
        if self.kernel is None or not few or not (on_cpu or x.dtype == torch.bfloat16):
            return super().product(x)
        y = self.kernel(x, self.packed_codes, self.group, self.scales_and_zeros)
        return y[:, : self.out_features]


class MxLinear(QuantizedLinear):
    """On a GPU the codes are held as 32-bit words, which a thread unpacks by shifts: a third of the instructions that
    bytes and tables take (benchmarks/NOTES.md)."""

    def pack(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.hold_words() if self.codes.device.type == "cuda" else super().pack(dtype)

    def hold_words(self) -> None:
        format = FORMATS[self.scheme]
        words = torch.empty(self.out_features, self.codes.size(1) // 4, dtype=torch.int32, device=self.codes.device)
        for rows in row_chunks(self.out_features, self.in_features):
            words[rows] = pack_words(self.codes[rows], format.bits, format.group)
        self.register_buffer("words", words, persistent=False)
        if not self.looked_up:
            self.free("codes")

    def values(self, words: Tensor) -> list[Tensor]:
        """Elements, float32, times 2^(bias - 15), in the order of `unpack_words`."""
        format = FORMATS[self.scheme]
        return [minifloat(code, format.bits, format.mantissa) for code in unpack_words(words, format.bits)]

    @property
    def factor(self) -> float:
        """What `values` lack."""
        return 2.0 ** (15 - FORMATS[self.scheme].bias)

    def read_back(self):
        format = FORMATS[self.scheme]
        codes = unpack_words(self.words, format.bits)
        return {"codes": pack_bits(in_order(codes, format.group), format.bits), "scale": self.scale}

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        if not self.freed:
            return super().dequantized(dtype)
        return decoded(self.decode_words, {"codes": self.words, "scale": self.scale}, dtype)

    def decode_words(self, parts: dict[str, Tensor]) -> Tensor:
        """float32 (out, in)."""
        group = FORMATS[self.scheme].group
        values = in_order(self.values(parts["codes"]), group).unflatten(1, (-1, group))  # (out, in / g, g)
        return (values * self.factor * power_of_two(parts["scale"])[..., None]).flatten(1)

    def fused_product(self, x: Tensor) -> Tensor:
        values, group = self.values(self.words), FORMATS[self.scheme].group
        return grouped_sums(values, x, group, power_of_two(self.scale), factor=self.factor)


def unpack_int4(packed: Tensor, block: int, width: int) -> Tensor:
    """Codes (n, in) int32 of a CPU kernel's packed rows (n, in / 2) uint8, n whole blocks, or whole blocks and a last
    one of a multiple of 16.

    A block holds its rows input by input; of `width` bytes in a row the low halves are that many rows, the high halves
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
    """(block, width) of what this processor's int4 packing makes, for unpack_int4; None if it is none of the known."""
    codes = torch.randint(0, 16, (176, 32), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    known = ((64, 32), (32, 16), (32, 1))  # AVX-512, AVX2, no vectors
    return next((layout for layout in known if torch.equal(unpack_int4(packed, *layout), codes)), None)


KERNELS = {Int8: Int8Linear, Int4: Int4Linear, Mx: MxLinear}  # format -> the Linear that has a kernel for it


def full_weight(linear: nn.Module) -> Tensor:
    """The weights (out, in) of a Linear that is not quantized, packed or not."""
    return linear.parts()["weight"] if isinstance(linear, Holder) else linear.weight.detach()


@functools.cache
def _say_no_kernel(scheme: str, dtype: torch.dtype, expanded: bool) -> None:
    name = str(dtype).removeprefix("torch.")
    how = f"weights are held in {name} beside it" if expanded else "weights are unpacked for every product: slow"
    print(f"{scheme}: no kernel here reads it; {how}", file=sys.stderr)


class QuantizedEmbedding(nn.Module):
    """A tied embedding: rows of the quantized head, looked up. It holds no second copy."""

    def __init__(self, head: QuantizedLinear, dtype: torch.dtype):
        super().__init__()
        object.__setattr__(self, "head", head)  # not a submodule: its parameters are counted once
        head.looked_up = True
        self.dtype = dtype

    def forward(self, tokens: Tensor) -> Tensor:
        head = self.head
        rows = {name: part[tokens.flatten()] for name, part in head.parts().items()}  # of T * B rows
        return dequantize_tensor(rows, head.scheme, self.dtype).view(*tokens.shape, head.in_features)


def _matrices(layer: Block) -> tuple:
    """The modules of a block that own Linears, and the Linears' names."""
    return (layer.attention, ("qkv", "out")), (layer.ffn, ("gate_up", "down"))


def replace_linears(model: Transformer, scheme: str, head: str | None = None, kept: Iterable[str] = ()) -> Transformer:
    """Put QuantizedLinears, not filled in, in place of every block's Linears but the `kept` ("layers.3.ffn.down"); in
    place of the head too if `head` names its scheme, and of the embedding when they are tied. ValueError names a matrix
    whose inputs do not divide."""
    format_of(scheme)
    kept = {id(module) for name, module in model.named_modules() if name in kept}
    for number, layer in enumerate(model.layers):
        for owner, names in _matrices(layer):
            for name in names:
                linear = getattr(owner, name)
                if id(linear) in kept:
                    continue
                check_columns(scheme, linear.in_features, f"layers.{number}.{name}")
                setattr(owner, name, _like(linear, scheme))
    if head is not None:
        format_of(head)
        check_columns(head, model.lm_head.in_features, "lm_head")
        _set_head(model, _like(model.lm_head, head))
    return model


def _set_head(model: Transformer, head: QuantizedLinear) -> None:
    """A quantized head, which a tied embedding then looks its rows up in."""
    dtype = model.lm_head.weight.dtype
    model.lm_head = head
    if model.config.tie_embeddings:
        assert "forward" not in vars(model.embed), "quantize the tied head of a model before dividing it over ranks"
        model.embed = QuantizedEmbedding(head, dtype)


def _like(linear: nn.Linear, scheme: str) -> QuantizedLinear:
    options = {"bias": linear.bias is not None, "device": linear.weight.device, "dtype": linear.weight.dtype}
    return QuantizedLinear.empty(linear.in_features, linear.out_features, scheme, **options)


def quantized_linears(model: Transformer) -> list[QuantizedLinear]:
    return [module for module in model.modules() if isinstance(module, QuantizedLinear)]


@torch.no_grad()
def quantize_model(model: Transformer, scheme: str, head: str | None = None) -> Transformer:
    """A model in memory, quantized in place, matrix by matrix: each one's full precision is freed before the next."""
    for layer in model.layers:
        for owner, names in _matrices(layer):
            for name in names:
                setattr(owner, name, QuantizedLinear.from_float(getattr(owner, name), scheme))
    if head is not None:
        dtype = model.lm_head.weight.dtype
        _set_head(model, QuantizedLinear.stored(model.lm_head, head))
        model.lm_head.pack(dtype)  # knowing whether an embedding looks its rows up
    return model


def quantized_copy(model: Transformer, scheme: str) -> Transformer:
    """The model's quantized self, for drafting: new Linears, everything else shared with the model."""
    blocks = []
    for layer in model.layers:
        with Shapes():
            block = Block(model.config)
        block.attention_norm, block.ffn_norm = layer.attention_norm, layer.ffn_norm
        block.attention.q_norm, block.attention.k_norm = layer.attention.q_norm, layer.attention.k_norm
        for (mine, names), (other, _) in zip(_matrices(block), _matrices(layer)):
            for name in names:
                setattr(mine, name, QuantizedLinear.from_float(getattr(other, name), scheme))
        blocks.append(block)
    return model.with_layers(blocks, model.windows)


# ------------------------------------------------------------------------------------------ calibration

METHODS = ("rtn", "search", "gptq")
DAMPING = 0.01  # of the mean diagonal, added to it
BLOCK_COLUMNS = 128  # columns whose errors are spread among themselves before the rest hears of them


def search_range(w: Tensor, format: Int4, importance: Tensor | None = None, steps: int = 20) -> tuple[Tensor, Tensor]:
    """(low, high) of each group, shrunk together to the fraction (1, 0.975, … 0.525) with the least squared error.

    w (out, in / g, g); importance (in / g, g): weight of each input's error, such as its mean square.
    """
    low, high = w.amin(-1), w.amax(-1)
    best = torch.full_like(low, math.inf)
    found = low.clone(), high.clone()
    for step in range(steps):
        shrunk = low * (1 - step / 40), high * (1 - step / 40)
        error = (format.dequantize(format.with_range(w, *shrunk)).view_as(w) - w) ** 2
        error = (error if importance is None else error * importance).sum(-1)  # (out, in / g)
        better = error < best
        best = torch.where(better, error, best)
        found = tuple(torch.where(better, new, old) for new, old in zip(shrunk, found))
    return found


@torch.no_grad()
def gptq(w: Tensor, hessian: Tensor, format: Int4) -> dict[str, Tensor]:
    """Int4 parts of w (out, in) that keep w @ x for the inputs x whose sum of x x^T is `hessian` (in, in).

    Frantar et al., arXiv:2210.17323: columns are rounded one after the other, each one's error spread over those still
    to come by the inverse Hessian's Cholesky factor. The columns with the largest diagonal go first; ranges of groups
    are fixed before ("static groups"), so that the stored layout is that of any other int4 weight. In float64.
    """
    w, hessian = w.double().clone(), hessian.double().clone()
    diagonal = hessian.diagonal()
    dead = diagonal == 0  # inputs that never occurred: any weight will do
    diagonal[dead] = 1
    w[:, dead] = 0
    importance = diagonal.float().unflatten(0, (-1, format.group))
    grouped = w.float().unflatten(1, (-1, format.group))
    parts = format.with_range(grouped, *search_range(grouped, format, importance))
    scale = parts["scale"].double().repeat_interleave(format.group, 1)  # (out, in)
    zero = parts["zero"].double().repeat_interleave(format.group, 1)
    scale = torch.where(scale > 0, scale, 1.0)
    diagonal += DAMPING * diagonal.mean()
    order = diagonal.argsort(descending=True)
    spread = hessian[order][:, order]
    spread = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(spread)), upper=True)
    codes = torch.zeros_like(w)
    for begin in range(0, w.size(1), BLOCK_COLUMNS):
        columns = order[begin : begin + BLOCK_COLUMNS]
        inner, errors = spread[begin : begin + len(columns)][:, begin : begin + len(columns)], []
        for i, column in enumerate(columns):
            code = ((w[:, column] - zero[:, column]) / scale[:, column]).round().clamp(-8, 7)
            error = (w[:, column] - code * scale[:, column] - zero[:, column]) / inner[i, i]
            codes[:, column] = code + 8
            w[:, columns[i + 1 :]] -= error[:, None] * inner[i, i + 1 :]
            errors.append(error)
        rest = order[begin + len(columns) :]
        w[:, rest] -= torch.stack(errors, 1) @ spread[begin : begin + len(columns)][:, begin + len(columns) :]
    return parts | {"codes": pack_bits(codes.to(torch.int32), 4)}


def sum_of_squares(linear: nn.Linear, run: Callable[[], object]) -> Tensor:
    """Sum of x x^T (in, in) over every input that `linear` meets while `run` runs, in float64."""
    total = torch.zeros(linear.in_features, linear.in_features, dtype=torch.float64, device=linear.weight.device)

    def meet(_, inputs) -> None:
        x = inputs[0].reshape(-1, linear.in_features)  # (rows, in)
        total.add_((x.T @ x).double())

    hook = linear.register_forward_pre_hook(meet)
    try:
        run()
    finally:
        hook.remove()
    return total


def quantize_block(block: Block, scheme: str, method: str, run: Callable[[], object]) -> float:
    """Replace a block's Linears, in the order in which they compute; `run` runs the block on the calibration text, and
    each Linear is chosen by inputs that went through those before it in their quantized form. Relative error of weights
    (root of summed squares)."""
    squares = [0.0, 0.0]
    for owner, names in _matrices(block):
        for name in names:
            linear = getattr(owner, name)
            w = linear.weight.detach().float()
            parts = None
            if method == "gptq":
                parts = gptq(w, sum_of_squares(linear, run), FORMATS[scheme])
            elif method == "search":
                grouped = w.unflatten(1, (-1, FORMATS[scheme].group))
                parts = FORMATS[scheme].with_range(grouped, *search_range(grouped, FORMATS[scheme]))
            quantized = QuantizedLinear.stored(linear, scheme, parts)
            squares[0] += torch.linalg.vector_norm(quantized.dequantized(torch.float32).sub_(w)).item() ** 2
            squares[1] += torch.linalg.vector_norm(w).item() ** 2
            setattr(owner, name, quantized)
    return math.sqrt(squares[0] / squares[1]) if squares[1] else 0.0


# ---------------------------------------------------------------------------------------- command line


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Quantize a Hugging Face folder, layer by layer.")
    add = parser.add_argument
    add("--checkpoint", required=True, metavar="DIR")
    add("--scheme", required=True, metavar="SCHEME", help=", ".join(SCHEMES))
    add("--output", required=True, metavar="DIR", help="must not exist yet")
    add("--method", choices=METHODS, default="rtn", help="nearest code; ranges searched; GPTQ (both int4 only)")
    add("--head", metavar="SCHEME", help="of lm_head, and of an embedding tied to it; default: as it is")
    add("--calibration", metavar="FILE", help="text for gptq")
    add("--samples", type=int, default=128, help="windows of the text, for gptq")
    add("--context", type=int, default=512, help="tokens a window")
    add("--device", default="cpu")
    return parser.parse_args(argv)


def check_request(args: argparse.Namespace, stored: str | None) -> None:
    """ValueError for what cannot be done, before anything is read."""
    output = Path(args.output)
    if stored:
        raise ValueError(f"{args.checkpoint}: is stored in {stored} already; take the original")
    for scheme in (args.scheme, args.head or args.scheme):
        format_of(scheme)
    if args.method != "rtn" and not isinstance(FORMATS[args.scheme], Int4):
        raise ValueError(f"--method {args.method} chooses int4 codes; {args.scheme} takes --method rtn")
    if (args.method == "gptq") != (args.calibration is not None):
        raise ValueError("--method gptq and --calibration FILE need each other")
    if output.exists():
        raise ValueError(f"{output}: exists already; remove it or choose another --output")


@torch.no_grad()
def run(args: argparse.Namespace) -> None:
    """Write the quantized folder, under another name until it is whole. One layer at a time is in full precision."""
    import checkpoint
    import tokenizer

    folder, output = Path(args.checkpoint), Path(args.output)
    config = checkpoint.load_config(folder)
    check_request(args, checkpoint.stored_in(folder / "config.json"))
    dtype = getattr(torch, config.dtype or "", torch.bfloat16)
    model = checkpoint.empty_model(config, torch.float32 if args.method == "gptq" else dtype)
    readers = checkpoint.open_shards(checkpoint.shards(folder))
    checkpoint.check_headers(folder, config, checkpoint.needed(config, model), readers)
    read = checkpoint.reading(readers)
    checkpoint.empty_model(config, torch.float32, args.scheme, args.head)  # do all inputs divide?
    names = [name for name, _ in model.named_parameters()]
    outer = [name for name in names if not name.startswith("layers.")]
    _load_outer(model, outer, args.device, read, checkpoint.fill)
    states = calibration_states(args, model) if args.method == "gptq" else []
    files, total = {}, config.n_layers + 1

    def write(partial: Path, number: int, prefix: str) -> None:
        every = [name for name, _ in model.named_parameters()]
        mine = [name for name in every if (name.startswith(prefix) if prefix else not name.startswith("layers."))]
        files.update(checkpoint.write_tensors(partial / checkpoint.shard_name(number, total), model, mine, dtype))

    desc = f"{args.method} {args.scheme}"
    with checkpoint.whole_folder(output) as partial, tqdm(model.layers, unit="layer", desc=desc) as bar:
        for number, layer in enumerate(bar):
            layer.to_empty(device=args.device).requires_grad_(False)
            prefix = f"layers.{number}."
            checkpoint.fill(model, [name for name in names if name.startswith(prefix)], read)
            check_finite(layer, f"{folder}: {prefix}")
            through = functools.partial(run_block, layer, states, block_context(model, number, states))
            error = quantize_block(layer, args.scheme, args.method, through)
            states = through()
            write(partial, number + 1, prefix)
            layer.to("meta")
            release()
            bar.set_postfix(error=f"{error:.4f}")
        check_finite(model.lm_head, f"{folder}: lm_head.")
        if args.head:
            _set_head(model, QuantizedLinear.stored(model.lm_head, args.head))
        write(partial, total, "")
        tokenizer.copy_files(folder, partial)
        hf = json.loads((folder / "config.json").read_text())
        hf["quantization"] = {"scheme": args.scheme, "head": args.head, "method": args.method}
        (partial / "config.json").write_text(json.dumps(hf, indent=2) + "\n")
        checkpoint.write_index(partial, files)
    sizes = [sum(file.stat().st_size for file in where.glob("*.safetensors")) for where in (folder, output)]
    print(f"{output}: {sizes[1] / 1e6:.1f} MB, {sizes[0] / sizes[1]:.2f} times smaller", file=sys.stderr)


def _load_outer(model: Transformer, names: list[str], device: str, read, fill) -> None:
    """Everything but the layers, in place."""
    for module in (model.embed, model.norm, model.rope, model.lm_head):
        module.to_empty(device=device)
    if model.config.tie_embeddings:
        model.lm_head.weight = model.embed.weight
    model.requires_grad_(False).eval()
    fill(model, names, read)


def check_finite(module: nn.Module, where: str) -> None:
    for name, parameter in module.named_parameters():
        if not parameter.isfinite().all():
            raise ValueError(f"{where}{name}: weights hold NaN or infinity; a scale cannot be taken over them")


def calibration_states(args: argparse.Namespace, model: Transformer) -> list[Tensor]:
    """Embedded windows of the calibration text, spread over it, in batches (8, T, D)."""
    from tokenizer import load_tokenizer

    tokenizer = load_tokenizer(args.checkpoint)
    ids = tokenizer.encode(Path(args.calibration).read_text(encoding="utf-8"), bos=False)
    size = min(args.context, model.config.max_seq_length - 1)
    count = min(args.samples, len(ids) // size)
    if count < 1:
        raise ValueError(f"{args.calibration}: {len(ids)} tokens are fewer than one window of {size}")
    stride = len(ids) // count
    before = [tokenizer.bos_id] if tokenizer.bos_id is not None else []
    rows = torch.tensor([before + ids[i * stride : i * stride + size] for i in range(count)], device=args.device)
    return [model.embed(batch) for batch in rows.split(8)]


def block_context(model: Transformer, number: int, states: list[Tensor]) -> tuple | None:
    """What layer `number` is given besides x: positions, rotations, and which keys may be seen."""
    if not states:
        return None
    T = states[0].size(1)
    pos = torch.arange(T, device=states[0].device)[None]  # (1, T)
    return pos, model.rope(pos), visible_keys(pos, pos, model.windows[number], cached=False)


def run_block(layer: Block, states: list[Tensor], context: tuple | None) -> list[Tensor]:
    return [layer(x, *context) for x in states]


def main(argv: list[str] | None = None) -> None:
    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run(parse_args(argv))
    except (ValueError, OSError, MemoryError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    import quantize  # the copy that checkpoint.py knows: its classes are not this program's

    quantize.main()
