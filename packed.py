"""Products on a CPU with weights that were laid out for them once: oneDNN's own layout, through torch.

    Packed, PackedInt8      weights (out, in), or int8 codes, in that layout: product, and back
    to_digits, from_digits  float activations as 8-bit digits, whose products with int8 codes are exact sums
    PackedLinear            a Linear whose weights are Packed;  pack_linears  puts them in place of a model's Linears

A plain Linear rearranges its weights inside every product, which costs as much as reading them; what else was measured
stands in benchmarks/NOTES.md. The layout is opaque: torch.compile cannot trace such a tensor, so compiled code holds a
number for it (`handle`) and multiplies through one operator. This file does not know formats, checkpoints, ranks or
decoding.
"""

import functools
import itertools
import weakref

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LARGE = 2**21  # bytes: weights beyond the inner caches, whose reading is what a product costs
ROWS = 5  # oneDNN reads 16-bit and 8-bit weights up to a quarter faster for 4 to 6 rows than for 1: fewer are padded


# ------------------------------------------------------------------------------------------- operators

_numbers = itertools.count()
_held: "weakref.WeakValueDictionary[int, Packed]" = weakref.WeakValueDictionary()  # handle -> what it stands for
_library = torch.library.Library("quickdraft", "FRAGMENT")
_library.define("packed_product(Tensor x, Tensor handle, int out_features, ScalarType dtype) -> Tensor")


def _packed_product(x: Tensor, handle: Tensor, out_features: int, dtype: torch.dtype) -> Tensor:
    return _held[handle.item()].product(x.contiguous())  # Inductor chooses strides


_library.impl("packed_product", _packed_product, "CPU")


@torch.library.register_fake("quickdraft::packed_product")
def _shape_of_product(x: Tensor, handle: Tensor, out_features: int, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.size(0), out_features, dtype=dtype)


class Packed:
    """Weights (out, in), bfloat16 or float32, in oneDNN's layout for products with few rows."""

    def __init__(self, weight: Tensor):
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype  # of products
        self.rows = ROWS if weight.nbytes >= LARGE and weight.dtype.itemsize < 4 else 1
        self.data = self._reorder(weight)
        self.number = next(_numbers)
        _held[self.number] = self

    def _reorder(self, weight: Tensor) -> Tensor:
        return torch.ops.mkldnn._reorder_linear_weight(weight, 1)

    def dense(self) -> Tensor:
        """The weights (out, in) again."""
        return self.data.to_dense()

    def handle(self) -> Tensor:
        """What compiled code holds in place of this object, which must outlive it."""
        return torch.tensor(self.number)

    def product(self, x: Tensor) -> Tensor:
        """x (M, in) -> (M, out) of `dtype`; fastest from M = `rows` on."""
        return torch.ops.mkldnn._linear_pointwise(x, self.data, None, "none", [], "")

    @staticmethod
    def takes(weight: Tensor) -> bool:
        """Is there such a product for weights of this type here, and is it the faster one? Float32 gains only beyond
        the caches."""
        if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
            return False
        if weight.dtype == torch.bfloat16:
            return torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return weight.dtype == torch.float32 and weight.nbytes >= LARGE


class PackedInt8(Packed):
    """int8 codes (out, in) with a float32 scale a row. Activations are digits as `to_digits` makes them: uint8 that
    stand for themselves minus 128."""

    def __init__(self, codes: Tensor, scale: Tensor):
        super().__init__(codes)
        self.dtype, self.scale, self.zeros = torch.float32, scale.float(), torch.zeros(len(codes), dtype=torch.int64)

    def _reorder(self, weight: Tensor) -> Tensor:
        return torch.ops.onednn.qlinear_prepack(weight, None)

    def dense(self) -> Tensor:
        return self.data.to_dense().T.contiguous()  # (in, out) -> (out, in)

    def product(self, x: Tensor) -> Tensor:
        return torch.ops.onednn.qlinear_pointwise(
            x, 1.0, 128, self.data, self.scale, self.zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )

    @staticmethod
    def takes(weight: Tensor) -> bool:
        """Only beyond the caches: where reading costs nothing, making digits does."""
        return weight.device.type == "cpu" and weight.nbytes >= LARGE and weight.size(1) <= 2**16 and sums_exactly()


@functools.cache
def sums_exactly() -> bool:
    """Does this processor add up products of 8-bit numbers without overflow? Those without VNNI instructions may add
    pairs in 16 bits, which the largest values exceed."""
    if not torch.backends.mkldnn.is_available():
        return False
    n, wanted = 256, torch.full((1, 32), float(127 * 127 * 256))
    packed = PackedInt8(torch.full((32, n), 127, dtype=torch.int8), torch.ones(32))
    return torch.equal(packed.product(torch.full((1, n), 255, dtype=torch.uint8)), wanted)


# ---------------------------------------------------------------------------------------------- digits


def to_digits(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (M, in) -> digits (n * M, in) uint8, all rows' lowest digits first; step (M, 1) float32.

    x is rounded to whole steps of its row: x = step * sum_i 256^i (digit_i - 128), |error| <= step / 2. With two digits
    a step is max|x| / 32638. The error of a product, relative to its size, is then about 2^-16 / sqrt(3) * max|x| /
    rms(x) at random signs, and as max|x| <= sqrt(in) * rms(x), below the rounding of a bfloat16 result (2^-9 / sqrt(3))
    for any row of up to 16384 inputs. With three digits the same holds for float32 and a step of max|x| / 8355710.
    """
    n = 2 if x.dtype == torch.bfloat16 else 3
    largest = sum(127 * 256**i for i in range(n)) - 1  # of what digits from -127 to 127 hold; 1 for rounding x / step
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


# --------------------------------------------------------------------------------------------- modules


class Holder(nn.Module):
    """A module that computes with Packed weights. What it packs, it no longer holds as a parameter's values: the
    parameter stays, on the meta device, to say name, shape, type and size."""

    packed: Packed | None = None
    freed = False  # is there a parameter whose values only the kernel's form holds?

    def hold(self, packed: Packed) -> None:
        self.packed = packed
        self.register_buffer("handle", packed.handle(), persistent=False)

    def free(self, name: str) -> None:
        """Let go of a parameter's values, which `packed` can give back."""
        setattr(self, name, nn.Parameter(getattr(self, name).detach().to("meta"), False))
        self.freed = True

    def packed_product(self, x: Tensor) -> Tensor:
        """x (M, in) -> (M, out)."""
        M = x.size(0)
        if self.packed.rows > M:
            x = F.pad(x, (0, 0, 0, self.packed.rows - M))
        if torch.compiler.is_compiling():
            y = torch.ops.quickdraft.packed_product(x, self.handle, self.out_features, self.packed.dtype)
        else:
            y = self.packed.product(x)
        return y[:M]


class PackedLinear(Holder):
    """y = x W^T + b."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.hold(Packed(linear.weight.detach()))
        self.free("weight")
        self._forward_hooks.update(linear._forward_hooks)  # what stands behind the one stands behind the other

    def parts(self) -> dict[str, Tensor]:
        return {"weight": self.packed.dense()}

    def forward(self, x: Tensor) -> Tensor:
        y = self.packed_product(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias


@torch.no_grad()
def pack_linears(model: nn.Module) -> nn.Module:
    """Put PackedLinears in place of the Linears that gain by it, one by one, so that one matrix exists twice at a time.
    The last step before decoding: a packed model stays on its CPU and is not trained. An embedding that shares its
    head's weights keeps them, to look rows up in."""
    for owner in list(model.modules()):
        for name, linear in list(owner.named_children()):
            if type(linear) is nn.Linear and Packed.takes(linear.weight):
                setattr(owner, name, PackedLinear(linear))
    return model
