"""Experts as each device is quick with them: a Mixture of feedforward.py, packed.

    pack_experts     the last step of a model's mixtures; what comes of them takes x and the router's logits
    HostMixture      on a CPU: the chosen experts one by one, a single operator for the compiler
    StackedMixture   on a GPU: matrices of all experts side by side; nothing waits for the host, no routing recompiles

A decode step reads what was chosen: on a CPU only those experts run, on a GPU their rows are gathered inside the
product, unpacked where they are quantized. This file does not know routers, layers or models.
"""

import itertools
import weakref

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weights import formats, gpu
from weights.compiling import is_small_batch
from weights.formats import release

MAX_KERNEL_ROWS = 16  # rows of x up to which chosen weights are gathered; more are grouped by expert

_numbers = itertools.count()
_held: "weakref.WeakValueDictionary[int, HostMixture]" = weakref.WeakValueDictionary()  # by handle
_library = torch.library.Library("quickdraft", "FRAGMENT")
_library.define("mixture(Tensor x, Tensor logits, Tensor handle) -> Tensor")


def _mixture(x: Tensor, logits: Tensor, handle: Tensor) -> Tensor:
    return _held[handle.item()].mixture(x.contiguous(), logits.contiguous())  # Inductor chooses strides


_library.impl("mixture", _mixture, "CPU")


@torch.library.register_fake("quickdraft::mixture")
def _like_x(x: Tensor, logits: Tensor, handle: Tensor) -> Tensor:
    return x.new_empty(x.shape)


class HostMixture(nn.Module):
    """A Mixture for a CPU, whose host knows the routing anyway. Compiled code holds a number for it and routes, weighs
    and adds up inside one operator, so that a row has the same bits compiled or not, alone or among others."""

    is_packed = True

    def __init__(self, mixture: nn.Module):
        super().__init__()
        self.mixture, number = mixture, next(_numbers)
        _held[number] = self
        self.register_buffer("handle", torch.tensor(number), persistent=False)

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return torch.ops.quickdraft.mixture(x, logits, self.handle)
        return self.mixture(x, logits)


class Stack(nn.Module):
    """One matrix of every expert side by side: parts (E, rows of a part, …), and the products of chosen experts.

    Codes of groups are held as 32-bit words, which a GPU's thread unpacks by shifts (weights/gpu.py).
    """

    is_packed = True

    def __init__(self, linears: list[nn.Module]):
        super().__init__()
        first = linears[0]
        self.in_features, self.out_features = first.in_features, first.out_features * len(linears)
        self.scheme = getattr(first, "scheme", None)
        self.format = formats.FORMATS[self.scheme] if self.scheme else None
        self.in_words = isinstance(self.format, formats.Int4 | formats.Mx)
        names = [*first.parts()] if self.scheme else ["weight"]
        self.register_parameter("bias", None)
        for name in [*names, "bias"] if first.bias is not None else names:
            found = None  # room for all, filled one by one: each is freed before the next is made
            for number, linear in enumerate(linears):
                part = getattr(linear, name).detach()
                if name == "codes" and self.in_words:
                    part = gpu.pack_words(part, self.format.bits, self.format.group)
                found = part.new_empty(len(linears), *part.shape) if found is None else found
                found[number] = part
                linear.register_parameter(name, None)
            self.register_parameter(name, nn.Parameter(found, False))
        release()

    def weights(self, dtype: torch.dtype) -> Tensor:
        """Of all experts (E, out, in)."""
        if not self.scheme:
            return self.weight.to(dtype)
        E = len(self.codes)
        parts = {name: getattr(self, name).flatten(0, 1) for name in self.format.shapes(1, self.in_features)}
        return self.unpacked(parts).unflatten(0, (E, -1)).to(dtype)

    def unpacked(self, parts: dict[str, Tensor]) -> Tensor:
        """Rows of the held parts -> float32 (n, in)."""
        if not self.in_words:
            return self.format.dequantize(parts)
        codes = gpu.in_order(gpu.unpack_words(parts["codes"], self.format.bits), self.format.group)
        if isinstance(self.format, formats.Mx):
            return self.format.weights(codes, parts["scale"])
        return self.format.weights(codes, parts["scale"].float(), parts["zero"].float())

    def gathered(self, x: Tensor, expert: Tensor) -> Tensor:
        """x (n, in), each row times the matrix of its expert (n,) -> (n, out), for a compiler to make one kernel of: it
        reads the rows of chosen experts as they are stored."""
        if not self.scheme:
            y = gpu.paired_sums([self.weight[expert].float()], x, x.size(1))
        elif self.in_words:
            words = self.codes[expert]  # (n, out, words)
            codes = [c.view(*words.shape[:2], -1) for c in gpu.unpack_words(words.flatten(0, 1), self.format.bits)]
            scale, zero = self.scale[expert], None  # (n, out, in / g)
            if isinstance(self.format, formats.Mx):
                values, scale = [self.format.elements(code) for code in codes], formats.power_of_two(scale)
            else:
                values, scale = [(code - self.format.center).float() for code in codes], scale.float()
                zero = self.zero[expert].float()
            factor = getattr(self.format, "factor", 1.0)
            y = gpu.paired_sums(values, x, self.format.group, scale, factor=factor, zero=zero)
        elif isinstance(self.format, formats.PerRow):
            scale = self.scale[expert].float()[..., None]  # (n, out, 1)
            y = gpu.paired_sums([self.codes[expert].float()], x, x.size(1), scale)
        else:  # Int8Groups
            y = gpu.paired_sums([self.codes[expert].float()], x, self.format.group, self.scale[expert].float())
        return y if self.bias is None else y + self.bias[expert]

    def grouped(self, x: Tensor, ends: Tensor, expert: Tensor) -> Tensor:
        """x (n, in), rows in the order of their experts (n,), of which expert e's end before ends[e] -> (n, out)."""
        if one_product(x):
            y = F.grouped_mm(x, self.weights(x.dtype).mT, offs=ends)
        else:  # any expert may have any row
            y = sum(
                F.linear(torch.where((expert == number)[:, None], x, 0), weight)
                for number, weight in enumerate(self.weights(x.dtype))
            )
        return y if self.bias is None else y + self.bias[expert]


def one_product(x: Tensor) -> bool:
    """Has this device a product of groups of rows that reads their sizes by itself? In other types than bfloat16 torch
    asks the host for them."""
    return x.is_cuda and x.dtype == torch.bfloat16


class StackedMixture(nn.Module):
    """A Mixture for a GPU."""

    is_packed = True

    def __init__(self, mixture: nn.Module):
        super().__init__()
        self.gate_up = Stack([expert.gate_up for expert in mixture])
        self.down = Stack([expert.down for expert in mixture])
        del mixture[1:]  # the first keeps the rule of all; its matrices have gone too
        mixture[0].gate_up = mixture[0].down = None
        self.mixture = mixture

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        chosen, weight = self.mixture.route(logits)
        gated, (N, k) = self.mixture[0].gated, chosen.shape
        expert = chosen.flatten()  # (N * k,)
        if torch.compiler.is_compiling() and is_small_batch(N, MAX_KERNEL_ROWS):
            rows = x[:, None].expand(N, k, x.size(1)).flatten(0, 1)  # (N * k, D)
            y = self.down.gathered(gated(self.gate_up.gathered(rows, expert)), expert)
        else:
            order = expert.argsort(stable=True)
            expert = expert[order]
            E = logits.size(1)
            ends = torch.searchsorted(expert, torch.arange(E, device=x.device), right=True).to(torch.int32)  # (E,)
            y = self.gate_up.grouped(x[order // k], ends, expert)
            y = self.down.grouped(gated(y), ends, expert)[order.argsort()]
        return (y.view(N, k, -1).float() * weight[..., None]).sum(1).to(x.dtype)  # (N, k, D) -> (N, D)


@torch.no_grad()
def pack_experts(model: nn.Module) -> None:
    """Put the form for its device in place of each Mixture, known by its rule `route`. On a CPU its Linears have been
    packed before, or are packed after; on a GPU they are still as stored."""
    for layer in model.modules():
        mixture = getattr(layer, "experts", None)
        if hasattr(mixture, "route"):
            on_cpu = next(mixture.parameters()).device.type in ("cpu", "meta")
            layer.experts = (HostMixture if on_cpu else StackedMixture)(mixture)
            layer.experts._forward_hooks.update(mixture._forward_hooks)  # tensor parallelism's sums
            mixture._forward_hooks.clear()
