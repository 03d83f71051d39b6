"""A layer's experts (model.Mixture), packed for a device.

    pack_experts     replaces every Mixture of a model, the last step of loading
    HostMixture      on a CPU: runs the chosen experts one by one, a single operator for the compiler
    StackedMixture   on a GPU: stacks the matrices of all experts; never waits for the host, never recompiles
    Stack            one matrix of every expert, and the products of chosen experts

A decode step reads the chosen experts only. On a GPU their rows are gathered and unpacked inside the product.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weights import formats
from weights.compiling import LIBRARY, is_small_batch, module_of, register_handle
from weights.formats import release_memory

MAX_KERNEL_ROWS = 16  # rows of x up to which the chosen experts' weights are gathered; more rows are grouped by expert

LIBRARY.define("mixture(Tensor x, Tensor logits, Tensor handle) -> Tensor")


@torch.library.impl(LIBRARY, "mixture", "CPU")
def _mixture(x: Tensor, logits: Tensor, handle: Tensor) -> Tensor:
    return module_of(handle).mixture(x.contiguous(), logits.contiguous())  # Inductor chooses strides


@torch.library.register_fake("quickdraft::mixture")
def _like_x(x: Tensor, logits: Tensor, handle: Tensor) -> Tensor:
    return x.new_empty(x.shape)


class HostMixture(nn.Module):
    """A Mixture for a CPU. Compiled code routes, weights and sums inside one operator, which finds the mixture by its
    handle, so that a row has the same bits compiled or not, alone or in a batch."""

    is_packed = True

    def __init__(self, mixture: nn.Module):
        super().__init__()
        self.mixture = mixture
        self.register_buffer("handle", register_handle(self), persistent=False)

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return torch.ops.quickdraft.mixture(x, logits, self.handle)
        return self.mixture(x, logits)


class Stack(nn.Module):
    """One matrix of every expert, stacked: parts (experts, rows of a part, …), and the products of chosen experts.

    Codes of groups are stored as 32-bit words, which a GPU's thread unpacks by shifts (weights/gpu.py).
    """

    is_packed = True

    def __init__(self, linears: list[nn.Module]):
        from weights import gpu

        super().__init__()
        first = linears[0]
        self.in_features, self.out_features = first.in_features, first.out_features * len(linears)
        self.scheme = getattr(first, "scheme", None)
        self.format = formats.FORMATS[self.scheme] if self.scheme else None
        # A subclass may give words or scales another meaning, so that it computes with dequantized weights.
        self.uses_words = type(self.format) in (formats.Int4, formats.Mx)
        if len({getattr(linear, "scheme", None) for linear in linears}) > 1:
            raise ValueError("experts of a layer are stored in several formats; on a GPU all of them need the same")
        names = [*first.parts()] if self.scheme else ["weight"]
        self.register_parameter("bias", None)
        for name in [*names, "bias"] if first.bias is not None else names:
            stack = None  # filled one by one: each part is freed before the next is made
            for number, linear in enumerate(linears):
                part = getattr(linear, name).detach()
                if name == "codes" and self.uses_words:
                    part = gpu.pack_words(part, self.format.bits, self.format.group)
                stack = part.new_empty(len(linears), *part.shape) if stack is None else stack
                stack[number] = part
                linear.register_parameter(name, None)
            self.register_parameter(name, nn.Parameter(stack, False))
        release_memory()

    def weights(self, dtype: torch.dtype, expert: Tensor | None = None) -> Tensor:
        """The weights (experts, out, in) of these experts, or of all."""
        names = self.format.shapes(1, self.in_features) if self.scheme else ("weight",)
        parts = {name: getattr(self, name) if expert is None else getattr(self, name)[expert] for name in names}
        if not self.scheme:
            return parts["weight"].to(dtype)
        w = self.unpack({name: part.flatten(0, 1) for name, part in parts.items()})
        return w.unflatten(0, (len(parts["codes"]), -1)).to(dtype)

    def unpack(self, parts: dict[str, Tensor]) -> Tensor:
        """Parts of n rows -> float32 (n, in)."""
        if not self.uses_words:
            return self.format.dequantize(parts)
        from weights import gpu

        codes = gpu.in_order(gpu.unpack_words(parts["codes"], self.format.bits), self.format.group)
        if isinstance(self.format, formats.Mx):
            return self.format.weights(codes, parts["scale"])
        return self.format.weights(codes, parts["scale"].float(), parts["zero"].float())

    def multiply_gathered(self, x: Tensor, expert: Tensor) -> Tensor:
        """x (n, in), each row times the matrix of its expert (n,) -> (n, out). Compiled, it is one kernel that reads
        the stored parts of the chosen experts."""
        from weights import gpu

        if self.uses_words:
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
        elif type(self.format) in (formats.Int8, formats.Fp8):
            scale = self.scale[expert].float()[..., None]  # (n, out, 1)
            y = gpu.paired_sums([self.codes[expert].float()], x, x.size(1), scale)
        elif type(self.format) in (formats.Int8Groups, formats.Fp8Groups) and x.size(1) % self.format.group == 0:
            y = gpu.paired_sums([self.codes[expert].float()], x, self.format.group, self.scale[expert].float())
        else:
            y = gpu.paired_sums([self.weights(torch.float32, expert)], x, x.size(1))
        return y if self.bias is None else y + self.bias[expert]

    def multiply_grouped(self, x: Tensor, group_ends: Tensor, expert: Tensor) -> Tensor:
        """x (n, in), sorted by expert (n,), the rows of expert e ending before group_ends[e] -> (n, out)."""
        if has_grouped_product(x):
            y = F.grouped_mm(x, self.weights(x.dtype).mT, offs=group_ends)
        else:  # every expert multiplies all rows, with zeros for other experts' rows
            y = sum(
                F.linear(torch.where((expert == number)[:, None], x, 0), weight)
                for number, weight in enumerate(self.weights(x.dtype))
            )
        return y if self.bias is None else y + self.bias[expert]


def has_grouped_product(x: Tensor) -> bool:
    """Does this device have a grouped product that reads the sizes of its groups itself? In dtypes other than bfloat16
    torch reads them on the host."""
    return x.is_cuda and x.dtype == torch.bfloat16


class StackedMixture(nn.Module):
    """A Mixture for a GPU."""

    is_packed = True

    def __init__(self, mixture: nn.Module):
        super().__init__()
        self.gate_up = Stack([expert.gate_up for expert in mixture])
        self.down = Stack([expert.down for expert in mixture])
        del mixture[1:]  # the first expert keeps the activation function of all, without its matrices
        mixture[0].gate_up = mixture[0].down = None
        self.mixture = mixture

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        top_experts, weight = self.mixture.route(logits)  # (N, k) each
        gated, (N, k) = self.mixture[0].gated, top_experts.shape
        expert = top_experts.flatten()  # (N * k,)
        if torch.compiler.is_compiling() and is_small_batch(N, MAX_KERNEL_ROWS):
            rows = x[:, None].expand(N, k, x.size(1)).flatten(0, 1)  # (N * k, D)
            y = self.down.multiply_gathered(gated(self.gate_up.multiply_gathered(rows, expert)), expert)
        else:
            order = expert.argsort(stable=True)
            expert = expert[order]
            experts = torch.arange(logits.size(1), device=x.device)
            group_ends = torch.searchsorted(expert, experts, right=True).to(torch.int32)  # (experts,)
            y = self.gate_up.multiply_grouped(x[order // k], group_ends, expert)
            y = self.down.multiply_grouped(gated(y), group_ends, expert)[order.argsort()]
        return (y.view(N, k, -1).float() * weight[..., None]).sum(1).to(x.dtype)  # (N, k, D) -> (N, D)


@torch.no_grad()
def pack_experts(model: nn.Module) -> None:
    """Replace each Mixture, a module with a method `route`, by its packed form. On a GPU its Linears must not be packed
    yet; on a CPU they may be packed before or after."""
    for layer in model.modules():
        mixture = getattr(layer, "experts", None)
        if hasattr(mixture, "route"):
            on_cpu = next(mixture.parameters()).device.type in ("cpu", "meta")
            layer.experts = (HostMixture if on_cpu else StackedMixture)(mixture)
            layer.experts._forward_hooks.update(mixture._forward_hooks)  # tensor parallelism's collectives
            mixture._forward_hooks.clear()
