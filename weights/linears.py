"""Linears that own their weights in a stored form.

    QuantizedLinear      a Linear that owns the parts of a format: from_float, shard, pack; a subclass per kernel family
    QuantizedEmbedding   rows of a tied, quantized head;  PackedLinear  plain weights in a CPU kernel's layout

Parts are the same for every device; what `pack` makes of them is not, and is never sharded, saved or read back. This
file does not know checkpoints, ranks or decoding.
"""

import dataclasses
import functools
import math
import sys
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weights import cpu, formats, gpu
from weights.compiling import known_few
from weights.cpu import PackedInt8, PackedWeights, in_widths
from weights.formats import FORMATS, dequantize_tensor, format_of, quantize_tensor, release, row_chunks

KERNEL_ROWS = 16  # inputs up to which a kernel that reads the codes beats one product with the unpacked weights
FUSING_DEVICE = "cuda"  # whose compiler makes one kernel of unpacking, multiplying and summing
KERNEL_LANES = 16  # inputs that a CPU's int8 kernel reads at once, also beyond a row's end
KERNEL_CENTER = 8  # the code that aten's int4 kernels take for zero


class QuantizedLinear(nn.Module):
    """A Linear that owns its stored parts and computes with the weights they stand for.

    Parts are parameters: what moves, counts or fills a model's parameters treats them like any other. Until `pack`,
    every product unpacks the weights. This class has no kernel that reads codes. Packed for a CPU it holds the weights
    in the activations' dtype. Compiled for a GPU, products of a few rows become one kernel with the unpacking.
    """

    looked_up = False  # does an embedding read rows of the stored parts?
    is_packed = False
    expanded_bytes = 0  # that a product reads beyond the stored parts' size
    widths: Sequence[int] = ()  # numbers of rows for which the kernel rounds alike, where it is no PackedWeights

    def __init__(self, in_features: int, out_features: int, scheme: str, bias: bool = False, device=None, dtype=None):
        super().__init__()
        formats.check_columns(scheme, in_features, "Linear")
        self.in_features, self.out_features, self.scheme = in_features, out_features, scheme
        self.format, self.dtype = FORMATS[scheme], dtype or torch.get_default_dtype()  # of activations
        self.packed: PackedWeights | None = None
        for name, (shape, kind) in self.format.shapes(out_features, in_features).items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=kind, device=device), False))
        bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype), False) if bias else None
        self.register_parameter("bias", bias)

    @staticmethod
    def empty(in_features: int, out_features: int, scheme: str, **options) -> "QuantizedLinear":
        """Of the class that has the scheme's kernel, its parts not filled in."""
        return KERNELS.get(type(format_of(scheme)), QuantizedLinear)(in_features, out_features, scheme, **options)

    @classmethod
    def like(cls, linear: "nn.Linear | QuantizedLinear", scheme: str) -> "QuantizedLinear":
        """Of a Linear's shape, device and dtype, its parts not filled in."""
        dtype = linear.dtype if isinstance(linear, QuantizedLinear) else linear.weight.dtype
        options = {"bias": linear.bias is not None, "device": next(linear.parameters()).device, "dtype": dtype}
        return cls.empty(linear.in_features, linear.out_features, scheme, **options)

    @classmethod
    def from_float(
        cls, linear: "nn.Linear | QuantizedLinear", scheme: str, parts: dict[str, Tensor] | None = None
    ) -> "QuantizedLinear":
        """The quantized form of a Linear, not packed. `parts`: chosen by something better than rounding."""
        if parts is None:
            quantized = isinstance(linear, QuantizedLinear)
            weight = linear.dequantized(torch.float32) if quantized else linear.weight.detach()
            parts = quantize_tensor(weight, scheme)
        found = cls.like(linear, scheme)
        found.fill(slice(None), parts if linear.bias is None else parts | {"bias": linear.bias})
        return found

    def parts(self) -> dict[str, Tensor]:
        """As stored."""
        return {name: getattr(self, name) for name in self.format.shapes(1, self.in_features)}

    @torch.no_grad()
    def fill(self, rows: slice, parts: dict[str, Tensor]) -> None:
        """Copy the parts of some rows into place."""
        for name, part in parts.items():
            getattr(self, name)[rows] = part.to(getattr(self, name).device)

    def check_part(self, name: str, part: Tensor) -> None:
        """ValueError for a stored scale or zero that is no finite number. Codes are other parts."""
        if name.endswith(".codes"):
            return
        is_exponent = isinstance(self.format, formats.Mx) and part.dtype == torch.uint8
        if (part == formats.E8M0_NAN).any() if is_exponent else not part.float().isfinite().all():
            raise ValueError(f"{name}: holds NaN or infinity, of which no weights follow")

    def shard(self, dim: int, rank: int, world: int) -> "QuantizedLinear":
        """The part of rank `rank` of `world`: of the output rows (dim 0) or of the inputs (dim 1, whole groups; bias
        with rank 0 alone). Rows' scales stay those of the whole row. ValueError for what cannot be cut."""
        check_unpacked(self, "cut")
        sizes, unit = [self.out_features, self.in_features], (self.format.group or 1) if dim else 1
        if sizes[dim] % (world * unit):
            raise ValueError(f"{sizes[dim]} cannot be cut into {world} parts of whole groups of {unit} ({self.scheme})")
        sizes[dim] //= world
        bias = self.bias is not None and (dim == 0 or rank == 0)
        options = {"bias": bias, "device": self.codes.device, "dtype": self.dtype}
        found = self.empty(sizes[1], sizes[0], self.scheme, **options)
        for name, part in (self.parts() | ({"bias": self.bias} if bias else {})).items():
            is_full = part.shape[dim : dim + 1] == getattr(found, name).shape[dim : dim + 1]  # () of a row's scales
            found.fill(slice(None), {name: part if is_full else part.chunk(world, dim)[rank]})
        return found

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weights (out, in)."""
        return dequantize_tensor(self.parts(), self.scheme, dtype)

    @torch.no_grad()
    def pack(self) -> None:
        """Last step of loading, once all parts are filled in: make what a kernel needs for activations of `dtype`."""
        if not self.is_packed:
            self.lay_out()
            self.is_packed = True
            release()

    def lay_out(self) -> None:
        """What `pack` does for this class's kernel."""
        if self.codes.device.type == "cpu":
            weight = self.dequantized(self.dtype)
            self.packed = cpu.laid_out(weight)
            self.expanded_bytes = weight.nbytes - sum(part.nbytes for part in self.parts().values())
            self.let_go(*self.parts())
        if self.codes.device.type != "cuda":
            say_no_kernel(self.scheme, self.dtype, self.packed is not None)

    @property
    def batch_invariant_rows(self) -> int:
        """Rows up to which a row's result depends on the row alone."""
        return self.packed.batch_invariant_rows if self.packed is not None else cpu.ANY if self.widths else 0

    def let_go(self, *names: str) -> None:
        """Free parts that the kernel holds in its own form, unless an embedding looks rows up in them. A parameter
        stays on the meta device: name, shape, type and size."""
        for name in () if self.looked_up else names:
            self.register_parameter(name, nn.Parameter(getattr(self, name).to("meta"), False))

    def hold(self, widths: Sequence[int]) -> None:
        """Multiply by `kernel` on a CPU from now on, for any number of rows: a row's result must not depend on how many
        others there are."""
        self.widths = widths
        self.register_buffer("handle", cpu.new_handle(self), persistent=False)

    def multiply(self, x: Tensor) -> Tensor:
        """x (M, in) -> (M, out or more) by `kernel`, in parts that round alike."""
        if known_few(x.size(0), max(self.widths, default=0)) or not torch.compiler.is_compiling():
            return in_widths(self.kernel, x, self.widths)
        return torch.ops.quickdraft.packed_product(x, self.handle, self.kernel_rows, x.dtype)

    def product(self, x: Tensor) -> Tensor:
        """x (M, in) -> (M, out), without bias."""
        if self.packed is not None:
            return self.packed(x)
        return self.fused_product(x) if fuses(x) else F.linear(x, self.dequantized(x.dtype))

    def fused_product(self, x: Tensor) -> Tensor:
        """The same of a few rows, for a compiler to make one kernel of."""
        if isinstance(self.format, formats.PerRow):
            return gpu.row_sums(self.codes.float(), x, self.scale.float())
        return gpu.row_sums(self.format.dequantize(self.parts()), x)

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x.reshape(-1, self.in_features).contiguous()).view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias


def fuses(x: Tensor) -> bool:
    """Is this a product of few rows (M, in) in code that is compiled for a GPU?"""
    return torch.compiler.is_compiling() and x.device.type == FUSING_DEVICE and known_few(x.size(0), KERNEL_ROWS)


@functools.cache
def say_no_kernel(scheme: str, dtype: torch.dtype, expanded: bool) -> None:
    name = str(dtype).removeprefix("torch.")
    how = f"weights are held in {name} instead" if expanded else "weights are unpacked for every product: slow"
    print(f"{scheme}: no kernel here reads it; {how}", file=sys.stderr)


class Int8Linear(QuantizedLinear):
    """codes times scale, factored out of the product: y = (x @ codes.T) * scale.

    On a CPU large weights multiply in integers, with float32 scales. The rounding of x is below
    that of the result (see `to_digits`). All other products take scales in the activations' type: of a float32 scale
    (int8-float32) bfloat16 loses 2^-9, half a last bit of the result. float16 holds neither small scales, below 6e-5,
    nor large products with codes, above 65,504: there the scale stays float32 and goes to the codes, not the product.
    """

    def lay_out(self):
        on_cpu = self.codes.device.type == "cpu"
        if PackedInt8.gains(self.codes):
            self.packed = PackedInt8(self.codes, self.scale)
            self.let_go("codes")
        elif on_cpu and self.in_features % KERNEL_LANES:
            super().lay_out()
        else:  # A cast inside the compiled product would be a computed scale, which Inductor's lowering does not take.
            dtype = torch.float32 if self.dtype == torch.float16 else self.dtype
            self.register_buffer("kernel_scale", self.scale.to(dtype), persistent=False)
            if on_cpu:
                self.kernel_rows = self.out_features
                self.hold(cpu.int8_widths(dtype, torch.get_num_threads()))

    def product(self, x: Tensor) -> Tensor:
        if isinstance(self.packed, PackedInt8):
            digits, step = cpu.to_digits(x)
            return cpu.from_digits(self.packed(digits), step).to(x.dtype)
        if not self.is_packed or self.packed is not None or fuses(x):
            return super().product(x)
        if x.device.type == "cpu":
            return self.multiply(x.to(self.kernel_scale.dtype)).to(x.dtype)
        if x.dtype == torch.float16:
            return F.linear(x, (self.codes * self.kernel_scale[:, None]).to(x.dtype))
        return F.linear(x, self.codes.to(x.dtype)) * self.kernel_scale

    def kernel(self, x: Tensor) -> Tensor:
        return torch._weight_int8pack_mm(x, self.codes, self.kernel_scale)


class Int4Linear(QuantizedLinear):
    """aten's int4 kernels, which take (code - 8) * scale + zero, as it is stored (a GGUF file's zero is moved by 8
    scales). A CPU wants multiples of 16 rows, CUDA bfloat16 activations.

    The kernels take scale and zero in the activations' type. Of float32 ones (int4-g128-float32) bfloat16 loses up to
    2^-9 * (|code - 8| * scale + |zero|), which is at most scale / 32 where zero is up to 8 scales, as in other
    programs' folders; choosing codes had already moved the weights by up to scale / 2. float16 loses an eighth of that,
    and up to 2^-25 * (|code - 8| + 1) below 6e-5, where its numbers are 2^-24 apart; float32 nothing. On a CPU only the
    kernel's form is kept.
    """

    operator = None  # until packed, and where none fits
    layout = None  # of packed_codes, where it is known

    def lay_out(self):
        device, rows = self.codes.device.type, math.ceil(self.out_features / 16) * 16
        if device != "cpu" and (device != "cuda" or rows > self.out_features or self.in_features % 32):
            return super().lay_out()
        codes = torch.zeros(rows, self.in_features, dtype=torch.int32, device=device)
        for part in row_chunks(*self.codes.shape):
            codes[: self.out_features][part] = formats.unpack_bits(self.codes[part], 4)
        self.kernel_format, scale = dataclasses.replace(self.format, center=KERNEL_CENTER), self.scale.float()
        zero = self.zero.float() + (KERNEL_CENTER - self.format.center) * scale
        both = torch.stack((scale, zero), dim=-1).to(self.dtype)  # (out, in / g, 2)
        both = F.pad(both, (0, 0, 0, 0, 0, rows - self.out_features)).transpose(0, 1).contiguous()  # (in / g, rows, 2)
        self.register_buffer("scales_and_zeros", both, persistent=False)
        self.expanded_bytes = both.nbytes - self.scale.nbytes - self.zero.nbytes  # the kernel's type
        if device == "cpu":
            # Not aten's operator, for which Inductor would call this one: its lowering loses the group size inside a
            # region that is compiled once for many layers (torch 2.13).
            self.operator, self.layout = cpu.INT4_KERNEL, cpu.int4_layout()
            self.kernel_rows = rows
            self.hold(cpu.int4_widths(self.dtype, torch.get_num_threads()))
            self.register_buffer("kernel_group", torch.tensor(self.format.group), persistent=False)
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        else:
            self.operator, self.kernel_group = torch.ops.aten._weight_int4pack_mm, self.format.group
            pairs = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)  # this kernel takes the first code high
            tiles = math.gcd(self.in_features // 16, 8)  # of 16 inputs that one thread block takes in a go: 2, 4 or 8
            packed = torch.ops.aten._convert_weight_to_int4pack(pairs, tiles)
        self.register_buffer("packed_codes", packed, persistent=False)
        if self.layout is not None:
            self.let_go(*self.parts())

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        if self.layout is None:
            return super().dequantized(dtype)
        held = {"codes": self.packed_codes, "scale and zero": self.scales_and_zeros.transpose(0, 1)}
        chunks = row_chunks(len(self.packed_codes), self.in_features, self.layout[0])
        return formats.by_chunks(self.decode, held, dtype, chunks)[: self.out_features]

    def decode(self, held: dict[str, Tensor]) -> Tensor:
        """Whole blocks of the kernel's rows -> float32 (n, in)."""
        scale, zero = held["scale and zero"].float().unbind(-1)  # (n, in / g)
        return self.kernel_format.weights(cpu.unpack_int4(held["codes"], *self.layout), scale, zero)

    def product(self, x: Tensor) -> Tensor:
        on_cpu = x.device.type == "cpu"
        few = on_cpu or known_few(x.size(0), KERNEL_ROWS)
        if self.operator is None or not few or not (on_cpu or x.dtype == torch.bfloat16):
            return super().product(x)
        y = self.multiply(x) if on_cpu else self.kernel(x)  # (M, rows)
        return y if y.size(1) == self.out_features else y[:, : self.out_features]

    def kernel(self, x: Tensor) -> Tensor:
        return self.operator(x, self.packed_codes, self.kernel_group, self.scales_and_zeros)


class MxLinear(QuantizedLinear):
    """On a GPU the codes are held as 32-bit words, which a thread unpacks by shifts: a third of the instructions that
    bytes and tables take (benchmarks/NOTES.md)."""

    def lay_out(self):
        if self.codes.device.type != FUSING_DEVICE:
            return super().lay_out()
        words = torch.empty(self.out_features, self.codes.size(1) // 4, dtype=torch.int32, device=self.codes.device)
        for rows in row_chunks(self.out_features, self.in_features):
            words[rows] = gpu.pack_words(self.codes[rows], self.format.bits, self.format.group)
        self.register_buffer("words", words, persistent=False)
        self.let_go("codes")

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        if not hasattr(self, "words"):
            return super().dequantized(dtype)
        chunks = row_chunks(self.out_features, self.in_features)
        return formats.by_chunks(self.decode, {"codes": self.words, "scale": self.scale}, dtype, chunks)

    def decode(self, held: dict[str, Tensor]) -> Tensor:
        """Rows of words and scales -> float32 (n, in)."""
        codes = gpu.in_order(gpu.unpack_words(held["codes"], self.format.bits), self.format.group)
        return self.format.weights(codes, held["scale"])

    def fused_product(self, x: Tensor) -> Tensor:
        if not hasattr(self, "words"):
            return super().fused_product(x)
        format = self.format
        values = [format.elements(code) for code in gpu.unpack_words(self.words, format.bits)]
        return gpu.grouped_sums(values, x, format.group, formats.power_of_two(self.scale), factor=format.factor)


KERNELS = {formats.Int8: Int8Linear, formats.Int4: Int4Linear, formats.Mx: MxLinear}


def check_unpacked(module: nn.Module, purpose: str) -> None:
    """ValueError for a packed model or Linear, whose weights only a kernel can read."""
    if any(getattr(part, "is_packed", False) for part in module.modules()):
        raise ValueError(f"a packed model cannot be {purpose}: only kernels read its weights; load it with pack=False")


class QuantizedEmbedding(nn.Module):
    """A tied embedding: rows of the quantized head, looked up. It holds no second copy."""

    def __init__(self, head: QuantizedLinear):
        super().__init__()
        object.__setattr__(self, "head", head)  # not a submodule: its parameters are counted once
        head.looked_up = True

    def forward(self, tokens: Tensor) -> Tensor:
        head = self.head
        rows = {name: part[tokens.flatten()] for name, part in head.parts().items()}  # of T * B rows
        return dequantize_tensor(rows, head.scheme, head.dtype).view(*tokens.shape, head.in_features)


class PackedLinear(nn.Module):
    """y = x W^T + b with W in a CPU kernel's layout. `weight` stays on the meta device: name, shape, type and size."""

    is_packed = True

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed = cpu.laid_out(linear.weight.detach())
        self.batch_invariant_rows = self.packed.batch_invariant_rows
        self.weight, self.bias = nn.Parameter(linear.weight.detach().to("meta"), False), linear.bias

    def forward(self, x: Tensor) -> Tensor:
        y = self.packed(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias
