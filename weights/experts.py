"""A layer's experts (model.Experts), packed for a device.

    pack_experts     replaces every Experts of a model, the last step of loading
    HostExperts      on a CPU: runs the chosen experts one by one, a single operator for the
                     compiler
    StackedExperts   on a GPU: stacks the matrices of all experts; never waits for the host, never
                     recompiles
    Stack            one matrix of every expert, and the products of chosen experts

A decode step reads the chosen experts only. On a GPU their rows are gathered and unpacked inside
the product.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decoding.errors import UserError
from weights import formats
from weights.compiling import LIBRARY, is_small_batch, module_of, register_handle
from weights.formats import release_memory

# For up to this many rows the chosen experts' weights are gathered; more are grouped by expert.
MAX_GATHERED_ROWS = 16
# Values of Format.kernel whose codes multiply_gathered reads. It dequantizes all others.
READ_KERNELS = ("int8", "codes", "int4", "mx")

LIBRARY.define("experts(Tensor x, Tensor logits, Tensor handle) -> Tensor")


@torch.library.impl(LIBRARY, "experts", "CPU")
def _experts(x: Tensor, logits: Tensor, handle: Tensor) -> Tensor:
    # Inductor chooses the inputs' strides.
    return module_of(handle).module(x.contiguous(), logits.contiguous())


@torch.library.register_fake("quickdraft::experts")
def _like_x(x: Tensor, logits: Tensor, handle: Tensor) -> Tensor:
    return x.new_empty(x.shape)


class HostExperts(nn.Module):
    """Experts for a CPU. Compiled code routes, weights and sums inside one operator, which finds
    the experts by its handle, so that a row has the same bits compiled or not, alone or in a
    batch."""

    is_packed = True

    def __init__(self, experts: nn.Module):
        super().__init__()
        self.module = experts
        register_handle(self)

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return torch.ops.quickdraft.experts(x, logits, self.handle)
        return self.module(x, logits)


class Stack(nn.Module):
    """One matrix of every expert, stacked: parts (experts, rows of a part, …), and the products of
    chosen experts.

    Codes of groups are stored as 32-bit words, which a GPU's thread unpacks by shifts
    (weights/gpu.py).
    """

    is_packed = True

    def __init__(self, linears: list[nn.Module]):
        super().__init__()
        first = linears[0]
        self.in_features = first.in_features
        self.scheme = getattr(first, "scheme", None)
        self.format = formats.FORMATS.get(self.scheme)
        self.kernel = self.format.kernel if self.scheme else ""
        self.uses_words = self.kernel in ("int4", "mx")
        if any(getattr(linear, "scheme", None) != self.scheme for linear in linears):
            raise UserError(
                "experts of a layer are stored in several formats; on a GPU all of them need the"
                " same"
            )
        self.register_parameter("bias", None)
        self.part_names = getattr(first, "part_names", ("weight",))
        for name in dict(first.named_parameters()):
            self.stack_parameter(linears, name)
        release_memory()

    def stack_parameter(self, linears: list[nn.Module], name: str) -> None:
        """Stack a parameter of all Linears, one by one: each part is freed before the next is
        made."""
        from weights import gpu

        stack = None
        for number, linear in enumerate(linears):
            part = gpu.as_compilable(getattr(linear, name).detach())
            if name == "codes" and self.uses_words:
                part = gpu.pack_words(part, self.format.bits, self.format.group)
            if stack is None:
                stack = part.new_empty(len(linears), *part.shape)
            stack[number] = part
            linear.register_parameter(name, None)
        self.register_parameter(name, nn.Parameter(stack, False))

    def chosen(self, expert: Tensor | slice) -> dict[str, Tensor]:
        """The parts of these experts."""
        return {name: getattr(self, name)[expert] for name in self.part_names}

    def weights(self, dtype: torch.dtype, expert: Tensor | slice = slice(None)) -> Tensor:
        """The weights (experts, out, in) of these experts, or of all."""
        if not self.scheme:
            return self.weight[expert].to(dtype)
        chosen = self.chosen(expert)  # (experts, out, …), below (experts * out, …)
        parts = {name: part.flatten(0, 1) for name, part in chosen.items()}
        if self.uses_words:
            from weights import gpu

            w = gpu.decode_words(self.format, parts)  # (experts * out, in)
        else:
            w = self.format.dequantize(parts)
        w = w.unflatten(0, (-1, self.codes.size(1)))  # (experts, out, in)
        return w.to(dtype)

    def multiply_gathered(self, x: Tensor, expert: Tensor) -> Tensor:
        """x (n, in), each row times the matrix of its expert (n,) -> (n, out). Compiled, it is one
        kernel that reads the stored parts of the chosen experts."""
        from weights import gpu

        format = self.format
        n_inputs = x.size(1)
        group = (format.group or n_inputs) if self.kernel in READ_KERNELS else None
        # Plain weights, a format without codes to read, or a row that ends inside a group.
        if group is None or n_inputs % group:
            values = self.weights(torch.float32, expert)
            y = gpu.paired_sums([values], x, n_inputs)
        else:
            parts = self.chosen(expert)
            n, out, _ = parts["codes"].shape  # (n, out, in), or words
            codes = [parts["codes"]]
            if self.uses_words:
                words = parts["codes"].flatten(0, 1)  # (n * out, words)
                codes = gpu.unpack_words(words, format.bits)
            values = [format.elements(code).view(n, out, -1) for code in codes]
            scale = format.group_scale(parts).view(n, out, -1)
            zero = parts.get("zero")
            y = gpu.paired_sums(values, x, group, scale, factor=format.factor, zero=zero)
        return self.add_bias(y, expert)

    def add_bias(self, y: Tensor, expert: Tensor) -> Tensor:
        return y if self.bias is None else y + self.bias[expert]

    def multiply_grouped(self, x: Tensor, group_ends: Tensor, expert: Tensor) -> Tensor:
        """x (n, in), sorted by expert (n,), the rows of expert e ending before group_ends[e] -> (n,
        out)."""
        weights = self.weights(x.dtype)  # (experts, out, in)
        if has_grouped_product(x):
            y = F.grouped_mm(x, weights.mT, offs=group_ends)
        else:  # every expert multiplies all rows, with zeros for other experts' rows
            y = 0
            for number, weight in enumerate(weights):
                is_chosen = (expert == number)[:, None]  # (n, 1)
                rows = torch.where(is_chosen, x, 0)
                y = y + F.linear(rows, weight)
        return self.add_bias(y, expert)


def has_grouped_product(x: Tensor) -> bool:
    """Does this device have a grouped product that reads the sizes of its groups itself? In dtypes
    other than bfloat16 torch reads them on the host."""
    return x.is_cuda and x.dtype == torch.bfloat16


class StackedExperts(nn.Module):
    """Experts for a GPU."""

    is_packed = True

    def __init__(self, experts: nn.Module):
        super().__init__()
        self.gate_up = Stack([expert.gate_up for expert in experts])
        self.down = Stack([expert.down for expert in experts])
        # The first expert stays, without its matrices, for its activation function.
        del experts[1:]
        experts[0].gate_up = experts[0].down = None
        self.module = experts

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        top_experts, weight = self.module.route(logits)  # (N, k) each
        N, k = top_experts.shape
        gated = self.module[0].gated
        expert = top_experts.flatten()  # (N * k,)
        if torch.compiler.is_compiling() and is_small_batch(N, MAX_GATHERED_ROWS):
            rows = x[:, None].expand(N, k, x.size(1))
            rows = rows.flatten(0, 1)  # (N * k, D)
            y = self.gate_up.multiply_gathered(rows, expert)
            y = self.down.multiply_gathered(gated(*y.chunk(2, dim=-1)), expert)
        else:
            order = expert.argsort(stable=True)
            expert = expert[order]
            expert_ids = torch.arange(logits.size(1), device=x.device)
            group_ends = torch.searchsorted(expert, expert_ids, right=True)  # (experts,)
            group_ends = group_ends.to(torch.int32)
            rows = x[order // k]  # (N * k, D)
            y = self.gate_up.multiply_grouped(rows, group_ends, expert)
            y = self.down.multiply_grouped(gated(*y.chunk(2, dim=-1)), group_ends, expert)
            y = y[order.argsort()]
        y = y.view(N, k, -1).float()
        weighted = y * weight[..., None]  # (N, k, D)
        return weighted.sum(1).to(x.dtype)


@torch.no_grad()
def pack_experts(model: nn.Module) -> None:
    """Replace each Experts, a module with a method `route`, by its packed form. On a GPU its
    Linears must not be packed yet; on a CPU they may be packed before or after."""
    for layer in model.modules():
        experts = getattr(layer, "experts", None)
        if not hasattr(experts, "route"):
            continue
        device = next(experts.parameters()).device
        on_host = device.type in ("cpu", "meta")
        packed = HostExperts(experts) if on_host else StackedExperts(experts)
        # Tensor parallelism's collectives.
        packed._forward_hooks.update(experts._forward_hooks)
        experts._forward_hooks.clear()
        layer.experts = packed
