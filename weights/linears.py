"""Linears that own their weights in a stored form.

    RowsLinear                           base of most Linears below: adds the bias to a product
    QuantizedLinear                      a Linear that owns the parts of a format: from_float, pack
    Int8Linear, Int4Linear, MxLinear     its subclasses with a kernel that reads the codes
    QuantizedEmbedding                   rows of a tied, quantized head
    FusedLinear                          plain weights on a GPU
    PackedLinear                         plain weights in a CPU kernel's layout
    LinearParts                          a fused matrix whose sources are stored in unlike forms

Stored parts are the same for every device. Packed forms depend on the device and are never sharded
or saved.
"""

import functools
import math
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decoding.errors import UserError
from exact.products import ROW_COUNTS, STEP_ROWS, find_row_split
from weights import cpu, formats
from weights.compiling import is_small_batch
from weights.cpu import PackedWeights, RowKernel
from weights.formats import (
    FORMATS,
    dequantize_tensor,
    format_of,
    quantize_tensor,
    release_memory,
    row_chunks,
)
from weights.schemes import SCHEMES

# Rows of x up to which a kernel that reads the codes beats unpacking and a plain product.
MAX_KERNEL_ROWS = 16
FUSING_DEVICE = "cuda"  # its compiler fuses unpacking, multiplying and summing into one kernel
KERNEL_LANES = 16  # inputs that a CPU's int8 kernel reads at once, even beyond a row's end
FASTER_INT8 = (
    "this processor decodes faster in int8 (--quantize int8), which takes up to twice the memory"
)


class RowsLinear(RowKernel):
    """The base of Linears, which define a `product` of rows x (M, in) -> (M, out) without bias."""

    def __init__(self, linear: "nn.Linear | QuantizedLinear"):
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias, False)
        # A CPU kernel's own form of the weights. None where the kernel reads parts, or where a
        # subclass keeps its own.
        self.packed: PackedWeights | None = None

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features).contiguous()
        y = self.product(rows).view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias

    def halves(self, x: Tensor) -> tuple[Tensor, ...]:
        """The two halves of the outputs, as in `model.Linear`. For a single row a GPU's compiler
        gets two sums, so that it fuses the activation that joins them, silu(gate) * up, with the
        product."""
        rows = x.reshape(-1, self.in_features)
        if not self.is_fused(rows) or rows.size(0) > 1 or self.bias is not None:
            return self(x).chunk(2, dim=-1)
        half = self.out_features // 2
        products = self.fused_products(rows, [slice(half), slice(half, None)])
        return tuple(product.view(*x.shape[:-1], half) for product in products)

    @property
    def batch_invariant_rows(self) -> int:
        if self.packed is None:
            return super().batch_invariant_rows
        return self.packed.batch_invariant_rows

    def product(self, x: Tensor) -> Tensor:
        """x (M, in) -> (M, out), without bias."""
        if self.packed is not None:
            return self.packed(x)
        if self.is_fused(x):
            return self.fused_products(x, [slice(None)])[0]
        return F.linear(x, self.dequantized(x.dtype))

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weights (out, in)."""
        raise NotImplementedError

    def fused_products(self, x: Tensor, outputs: list[slice]) -> list[Tensor]:
        """x (M, in) -> the products with some rows of the weights each, for a few rows x, in
        operations that a compiler fuses into one kernel."""
        raise NotImplementedError

    def is_fused(self, x: Tensor) -> bool:
        """Does `product` of a few rows x (M, in) leave everything to a GPU's compiler?"""
        return (
            self.packed is None
            and torch.compiler.is_compiling()
            and x.device.type == FUSING_DEVICE
            and is_small_batch(x.size(0), MAX_KERNEL_ROWS)
        )


class LinearParts(nn.ModuleList):
    """A fused matrix, such as q, k and v, whose sources are stored in unlike forms: a Linear for
    each of them, whose outputs are joined."""

    @classmethod
    def empty_like(cls, linear: nn.Linear, rows: list[int]) -> "LinearParts":
        """Plain Linears of these numbers of outputs, without initial values, that replace
        `linear`."""
        has_bias = linear.bias is not None
        weight = linear.weight
        return cls(
            type(linear)(linear.in_features, count, has_bias, weight.device, weight.dtype)
            for count in rows
        )

    @property
    def out_features(self) -> int:
        return sum(part.out_features for part in self)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(self.halves(x), dim=-1)

    def halves(self, x: Tensor) -> tuple[Tensor, ...]:
        """The outputs of each part, which for gate and up are those of `model.Linear.halves`."""
        return tuple(part(x) for part in self)


class QuantizedLinear(RowsLinear):
    """A Linear that owns its stored parts, which are parameters, and computes with the weights that
    they encode.

    Until `pack`, every product unpacks the weights. This class has no kernel that reads codes:
    packed for a CPU it holds the weights in the activations' dtype. Compiled for a GPU, a product
    of a few rows is one kernel with the unpacking.
    """

    reads_codes_on_cpu = False  # has it a kernel for them? Otherwise a CPU holds the weights
    has_embedding = False  # does an embedding read rows of the stored parts?
    is_packed = False
    expanded_bytes = 0  # bytes that a product reads beyond the size of the stored parts

    def __init__(self, linear: "nn.Linear | QuantizedLinear", scheme: str):
        """With the shape, device, dtype and bias of `linear`; parts have no initial values."""
        super().__init__(linear)
        self.scheme = scheme
        self.format = FORMATS[scheme]
        like = next(linear.parameters())
        self.dtype = getattr(linear, "dtype", like.dtype)  # of activations
        shapes = self.format.shapes(self.out_features, self.in_features)
        self.part_names = tuple(shapes)
        for name, (shape, part_dtype) in shapes.items():
            self.set_part(name, torch.empty(shape, dtype=part_dtype, device=like.device))

    @staticmethod
    def empty_like(linear: "nn.Linear | QuantizedLinear", scheme: str) -> "QuantizedLinear":
        """Of the class with the scheme's kernel, whichever class this is called on."""
        return KERNELS.get(format_of(scheme).kernel, QuantizedLinear)(linear, scheme)

    @classmethod
    @torch.no_grad()
    def from_float(
        cls,
        linear: "nn.Linear | QuantizedLinear",
        scheme: str,
        parts: dict[str, Tensor] | None = None,
    ) -> "QuantizedLinear":
        """`linear` quantized, or quantized anew, and not packed. `parts` replace rounding to the
        nearest code."""
        if parts is None:
            is_quantized = isinstance(linear, QuantizedLinear)
            weight = linear.dequantized(torch.float32) if is_quantized else linear.weight.detach()
            parts = quantize_tensor(weight, scheme)
        quantized = cls.empty_like(linear, scheme)
        quantized.copy_parts(slice(None), parts)
        return quantized

    def parts(self) -> dict[str, Tensor]:
        """The stored parts by name."""
        return {name: getattr(self, name) for name in self.part_names}

    def set_part(self, name: str, part: Tensor) -> None:
        self.register_parameter(name, nn.Parameter(part, False))

    @property
    def stored_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts().values())

    def held_bytes(self, device_type: str) -> int:
        """Bytes of weights that a packed Linear holds on a device, at least: a CPU may hold a tied
        head's codes twice, the second time in its kernel's form."""
        if device_type != "cpu" or self.reads_codes_on_cpu:
            return self.stored_bytes
        expanded = self.out_features * self.in_features * self.dtype.itemsize
        return expanded + self.stored_bytes if self.has_embedding else expanded

    @torch.no_grad()
    def copy_parts(self, rows: slice, parts: dict[str, Tensor]) -> None:
        """Copy the parts of these rows into the parameters."""
        for name, part in parts.items():
            getattr(self, name)[rows] = part

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        return self.decoded(self.parts(), dtype)

    def decoded(self, parts: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        """The weights (n, in) of some rows' parts."""
        return dequantize_tensor(parts, self.scheme, dtype)

    @torch.no_grad()
    def pack(self) -> None:
        """Build the kernel's form for activations of `dtype`: the last step of loading, after all
        parts are filled."""
        if not self.is_packed:
            self.prepack()
            self.is_packed = True
            release_memory()

    def prepack(self) -> None:
        """`pack` for this class's kernel."""
        device = self.codes.device.type
        if device == "cuda":
            from weights import gpu

            for name, part in self.parts().items():
                self.set_part(name, gpu.as_compilable(part))
            return
        if device == "cpu":
            weight = self.dequantized(self.dtype)
            self.packed = cpu.prepack_weight(weight)
            self.expanded_bytes = weight.nbytes - self.stored_bytes
            self.free(*self.parts())
            dtype = str(self.dtype).removeprefix("torch.")
            note = f"weights are held in {dtype} instead"
        else:
            note = "weights are unpacked for every product: slow"
        note_once(self.scheme, f"no kernel here reads them; {note}")

    def free(self, *names: str) -> None:
        """Free parts that the kernel holds in its own form, unless an embedding reads them. The
        parameters stay on the meta device with name, shape and dtype."""
        if self.has_embedding:
            return
        for name in names:
            self.set_part(name, getattr(self, name).to("meta"))

    def traced_kernel(self, x: Tensor) -> Tensor:
        return self.kernel(x)

    def fused_products(self, x: Tensor, outputs: list[slice]) -> list[Tensor]:
        return [self.fused_part(x, rows) for rows in outputs]

    def fused_part(self, x: Tensor, outputs: slice) -> Tensor:
        """One of `fused_products`."""
        from weights import gpu

        parts = {name: part[outputs] for name, part in self.parts().items()}
        if self.format.kernel not in ("int8", "codes") or self.format.group:
            return gpu.row_sums(self.format.dequantize(parts), x)
        codes = self.format.elements(parts["codes"])
        scale = parts["scale"].float()
        if x.size(0) == 1 or x.dtype == torch.float16:  # float16 sums may overflow
            return gpu.row_sums(codes, x, scale)
        y = F.linear(gpu.stored(x), codes.to(x.dtype))
        return (y * scale).to(x.dtype)


@functools.cache
def note_once(scheme: str, note: str) -> None:
    """One line on stderr for each scheme."""
    print(f"the matrices in {scheme}: {note}", file=sys.stderr)


class Int8Linear(QuantizedLinear):
    """A Linear of int8 codes with a scale per row, factored out of the product: y = (x @ codes.T) *
    scale.

    On a CPU large weights are multiplied in integers with float32 scales; quantizing x this way
    loses less than rounding the result does (see `to_digits`). A GPU's fused products take float32
    scales too, and other products take them in the activations' dtype. bfloat16 rounds a float32
    scale (int8-float32) by up to 2^-8, half a unit in the last place of the result. float16 can
    hold neither scales below 6e-5 nor sums above 65,504: with float16 activations a CPU's kernel
    gets x in float32, and elsewhere the codes are scaled in float32 before the product.
    """

    def __init__(self, linear, scheme):
        super().__init__(linear, scheme)
        # Scales of products with the codes; None where another product is chosen.
        self.register_buffer("kernel_scale", None, persistent=False)

    @property
    def reads_codes_on_cpu(self) -> bool:
        """aten's kernel reads full lanes of inputs; a kernel of digits reads large weights of any
        number. (A processor that lacks the latter unpacks large weights without full lanes, so
        that `held_bytes` is too small there.)"""
        return self.in_features % KERNEL_LANES == 0 or self.codes.nbytes >= cpu.LARGE_BYTES

    def prepack(self):
        on_cpu = self.codes.device.type == "cpu"
        form = cpu.int8_form(self.codes)
        if form is not None:
            # Detached: a parameter of the packed module would be counted twice.
            self.packed = form(self.codes.detach(), self.scale.detach())
            self.free("codes")
        elif on_cpu and self.in_features % KERNEL_LANES:
            super().prepack()
        elif on_cpu or self.dtype != torch.float16:
            # Not float16 on a GPU, where sums of codes may overflow: `product` unpacks there.
            # Cast here: Inductor's lowering takes no scale that is computed inside the product.
            dtype = torch.float32 if self.dtype == torch.float16 else self.dtype
            self.kernel_scale = self.scale.to(dtype)
            if on_cpu:
                threads = torch.get_num_threads()
                row_split = find_row_split(cpu.int8_kernel_on_ones, dtype, ROW_COUNTS[:10], threads)
                self.use_kernel(row_split, self.out_features)

    def product(self, x: Tensor) -> Tensor:
        if self.kernel_scale is None or self.is_fused(x):
            return super().product(x)
        if x.device.type == "cpu":
            return self.run_kernel(x.to(self.kernel_scale.dtype)).to(x.dtype)
        return F.linear(x, self.codes.to(x.dtype)) * self.kernel_scale

    def kernel(self, x: Tensor) -> Tensor:
        return torch._weight_int8pack_mm(x, self.codes, self.kernel_scale)

    def run_kernel(self, x: Tensor) -> Tensor:
        # The kernel's time grows with every row, so a prompt takes plain products instead.
        if torch.compiler.is_compiling() or len(x) <= STEP_ROWS:
            return super().run_kernel(x)
        dtype = cpu.product_dtype(x.dtype)
        inputs = x.to(dtype)
        parts = [
            F.linear(inputs, self.codes[rows].to(dtype)) for rows in row_chunks(*self.codes.shape)
        ]
        y = torch.cat(parts, dim=1) * self.kernel_scale
        return y.to(x.dtype)


class Int4Linear(QuantizedLinear):
    """A Linear of int4 codes, for aten's kernels: w = (code - 8) * scale + zero. On a CPU they take
    a multiple of 16 outputs, so the last ones are padded; on CUDA they take bfloat16 alone.

    The kernels take scale and zero in the activations' dtype, which is never float32. bfloat16
    rounds float32 scales (int4-g128-float32), which adds an error of at most 2^-8 * (|code - 8| *
    scale + |zero|) to a weight: for |zero| <= 8 * scale, as in other programs' folders, that is
    scale / 16, vs. up to scale / 2 from quantization itself. float16 adds an eighth of that, but up
    to 2^-25 * (|code - 8| + 1) below 6e-5, where its numbers are 2^-24 apart.
    """

    operator = None  # set by `prepack` where a kernel fits
    has_slices = False  # can a CPU unpack some outputs at a time?

    @property
    def reads_codes_on_cpu(self) -> bool:
        """In float32 aten's kernel multiplies one number at a time, and is not used."""
        return self.dtype != torch.float32

    @property
    def has_cuda_kernel(self) -> bool:
        fits_tiles = self.out_features % 16 == 0 and self.in_features % 32 == 0
        return fits_tiles and self.dtype == torch.bfloat16

    def held_bytes(self, device_type: str) -> int:
        """On a CUDA GPU few rows read the kernel's copy, and more rows the stored parts."""
        num_bytes = super().held_bytes(device_type)
        if device_type == "cuda" and self.has_cuda_kernel:
            num_scales = 2 * self.scale.numel()  # and zeros, in the activations' dtype
            num_bytes += self.codes.nbytes + num_scales * self.dtype.itemsize
        return num_bytes

    def prepack(self):
        device = self.codes.device.type
        if device == "cpu" and self.reads_codes_on_cpu:
            self.pack_for_cpu()
        elif device == "cuda" and self.has_cuda_kernel:
            self.pack_for_cuda()
        else:
            super().prepack()

    def pack_for_cuda(self) -> None:
        self.pack_scales(self.out_features)
        self.operator = torch.ops.aten._weight_int4pack_mm
        self.kernel_group = self.format.group
        code_pairs = self.codes << 4 | self.codes >> 4  # this kernel takes the first code high
        # Tiles of 16 inputs that a thread block reads: 2, 4 or 8.
        tiles = math.gcd(self.in_features // 16, 8)
        packed = torch.ops.aten._convert_weight_to_int4pack(code_pairs, tiles)
        self.register_buffer("packed_codes", packed, persistent=False)

    def pack_for_cpu(self) -> None:
        """Pack the codes for aten's kernel, with padded outputs, and free the stored parts."""
        num_outputs = math.ceil(self.out_features / 16) * 16
        self.pack_scales(num_outputs)
        if self.scheme in SCHEMES and cpu.reads_int8_faster(self.out_features * self.in_features):
            note_once(self.scheme, FASTER_INT8)
        self.operator = cpu.INT4_KERNEL
        threads = torch.get_num_threads()
        row_split = find_row_split(cpu.int4_kernel_on_ones, self.dtype, range(1, 65), threads)
        self.use_kernel(row_split, num_outputs)
        # A tensor: Inductor lowers aten's own operator, which takes a number, to this one, but
        # loses it inside a region that is compiled once for many layers (torch 2.13).
        self.register_buffer("kernel_group", torch.tensor(self.format.group), persistent=False)
        codes = torch.zeros(num_outputs, self.in_features, dtype=torch.int32)
        for rows in row_chunks(*self.codes.shape):
            codes[: self.out_features][rows] = formats.unpack_bits(self.codes[rows], 4)
        self.free(*self.parts())
        packed = cpu.pack_int4(codes)
        self.register_buffer("packed_codes", packed, persistent=False)
        order = cpu.int4_order()
        self.has_slices = order is not None and num_outputs % len(order) == 0

    def pack_scales(self, num_outputs: int) -> None:
        """Scales and zeros as the kernels take them, of as many outputs."""
        scale = self.scale.float()
        zero = self.zero.float() + (cpu.KERNEL_CENTER - self.format.center) * scale
        pairs = torch.stack((scale, zero), dim=-1).to(self.dtype)  # (out, in / g, 2)
        pairs = F.pad(pairs, (0, 0, 0, 0, 0, num_outputs - self.out_features))
        pairs = pairs.transpose(0, 1).contiguous()  # (in / g, num_outputs, 2)
        self.register_buffer("scales_and_zeros", pairs, persistent=False)
        self.expanded_bytes = pairs.nbytes - self.scale.nbytes - self.zero.nbytes

    def product(self, x: Tensor) -> Tensor:
        on_cpu = x.device.type == "cpu"
        fits = on_cpu or is_small_batch(x.size(0), MAX_KERNEL_ROWS)
        if self.operator is None or not fits:
            return super().product(x)
        y = self.run_kernel(x) if on_cpu else self.kernel(x)  # (M, kernel_outputs)
        return y[:, : self.out_features]

    def is_fused(self, x: Tensor) -> bool:
        return self.operator is None and super().is_fused(x)

    def kernel(self, x: Tensor) -> Tensor:
        return self.operator(x, self.packed_codes, self.kernel_group, self.scales_and_zeros)

    @property
    def batch_invariant_rows(self) -> int:
        rows = super().batch_invariant_rows
        return min(rows, cpu.MAX_INT4_ROWS) if self.has_slices else rows

    def run_kernel(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or not self.has_slices or len(x) <= cpu.MAX_INT4_ROWS:
            return super().run_kernel(x)
        parts = (self.packed_codes, self.format.group, self.scales_and_zeros)
        return cpu.int4_product_by_slices(x, *parts)


class MxLinear(QuantizedLinear):
    """A Linear of MX codes. On a GPU it holds them as 32-bit words, which a thread unpacks by
    shifts in a third of the instructions that bytes and tables take (benchmarks/NOTES.md)."""

    has_words = False

    def prepack(self):
        if self.codes.device.type != FUSING_DEVICE:
            return super().prepack()
        from weights import gpu

        def pack(parts: dict[str, Tensor]) -> Tensor:
            return gpu.pack_words(parts["codes"], self.format.bits, self.format.group)

        self.set_part("codes", formats.by_chunks(pack, self.parts(), torch.int32))
        self.has_words = True

    def decoded(self, parts: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        if not self.has_words:
            return super().decoded(parts, dtype)
        from weights import gpu

        return formats.by_chunks(functools.partial(gpu.decode_words, self.format), parts, dtype)

    def is_fused(self, x: Tensor) -> bool:
        return self.has_words and super().is_fused(x)

    def fused_products(self, x: Tensor, outputs: list[slice]) -> list[Tensor]:
        from weights import gpu

        _, P = gpu.word_sizes(self.format.bits)
        return super().fused_products(gpu.in_word_order(x, P, self.format.group), outputs)

    def fused_part(self, x: Tensor, outputs: slice) -> Tensor:
        from weights import gpu

        format = self.format
        codes = gpu.unpack_words(self.codes[outputs], format.bits)
        values = [format.elements(code) for code in codes]
        scale = format.group_scale({"scale": self.scale[outputs]})
        return gpu.grouped_sums(values, x, scale, factor=format.factor)


KERNELS = {"int8": Int8Linear, "int4": Int4Linear, "mx": MxLinear}  # by Format.kernel


def check_unpacked(module: nn.Module, purpose: str) -> None:
    """UserError for a packed model or Linear, whose weights only a kernel can read."""
    if any(getattr(part, "is_packed", False) for part in module.modules()):
        raise UserError(
            f"a packed model cannot be {purpose}: only kernels read its weights; load it with"
            f" pack=False"
        )


class QuantizedEmbedding(nn.Module):
    """A tied embedding that reads rows of the quantized head and holds no second copy."""

    def __init__(self, head: QuantizedLinear):
        super().__init__()
        object.__setattr__(self, "head", head)  # not a submodule: its parameters are counted once
        head.has_embedding = True

    def forward(self, tokens: Tensor) -> Tensor:
        head = self.head
        rows = {name: part[tokens.flatten()] for name, part in head.parts().items()}
        weights = head.decoded(rows, head.dtype)  # (B * T, D)
        return weights.view(*tokens.shape, head.in_features)


class FusedLinear(RowsLinear):
    """A Linear with plain weights on a GPU. `is_activated`: does its input come from an activation
    function, which takes longer to compute than to read?"""

    is_packed = True

    def __init__(self, linear: nn.Linear, is_activated: bool):
        super().__init__(linear)
        self.is_activated = is_activated
        self.weight = linear.weight

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        return self.weight

    def fused_products(self, x: Tensor, outputs: list[slice]) -> list[Tensor]:
        from weights import gpu

        if x.size(0) > 1 or self.is_activated:
            x = gpu.stored(x)
        if x.size(0) > 1:
            return [F.linear(x, self.weight[rows]) for rows in outputs]
        return [gpu.row_sums(self.weight[rows].float(), x) for rows in outputs]


class PackedLinear(RowsLinear):
    """A Linear with plain weights in a CPU kernel's layout. `weight` stays on the meta device with
    shape and dtype."""

    is_packed = True

    def __init__(self, linear: nn.Linear):
        super().__init__(linear)
        weight = linear.weight.detach()
        self.packed = cpu.prepack_weight(weight)
        self.weight = nn.Parameter(weight.to("meta"), False)
