"""What a block does with each token alone: one feed-forward, or a few experts of many.

    Embedding     rows of a table
    Linear        y = x W^T + b
    RMSNorm       x / rms(x) * weight
    FeedForward   gate, up, down
    Experts       the feed-forward of a sparse layer: a Router, a Mixture of FeedForwards, perhaps one that all share

An expert is a FeedForward, so what quantizes, cuts, stores or counts Linears needs no word of experts. This file does
not know attention, files, ranks or kernels: weights/experts.py has the products that a device is quick with.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, compiler, nn

from config import Config


class Embedding(nn.Embedding):
    """Rows of a table, left uninitialised on the meta device."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


class Linear(nn.Linear):
    """y = x W^T + b. The weights of a model on the meta device have shapes and no values, so nothing is initialised."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return F.linear(x, self.weight)
        # Flatten to two dimensions: torch 2.13 specialises a biased 3-D product on the T that it was traced with.
        return F.linear(x.flatten(0, -2), self.weight, self.bias).unflatten(0, x.shape[:-1])


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x) in float32, with the same bits wherever in a tensor x stands: those of torch.sigmoid differ
    between the lanes of a vector and the rest, and so between passes over one row and over several."""
    return 1 / (1 + (-x.float()).exp())


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension; `F.rms_norm` accumulates 16-bit input in float32."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), gate and up in one matrix; gpt-oss clamps both and adds 1 to up."""

    def __init__(self, config: Config, dim: int, bias: bool):
        super().__init__()
        self.limit, self.alpha = config.gate_limit, config.gate_alpha
        self.gate_up = Linear(config.dim, 2 * dim, bias=bias)
        self.down = Linear(dim, config.dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gated(self.gate_up(x)))

    def gated(self, gate_up: Tensor) -> Tensor:
        """(..., 2F) -> (..., F)"""
        gate, up = gate_up.chunk(2, dim=-1)  # each (..., F)
        if self.limit is None:
            return F.silu(gate) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (gate * sigmoid(self.alpha * gate)).to(gate.dtype) * (up + 1)


# --------------------------------------------------------------------------------------------- experts


class Router(Linear):
    """A matrix of so few rows, and of such consequence, that no scheme quantizes it."""

    is_router = True


class Mixture(nn.ModuleList):
    """The experts of a layer: every token takes a few, weighed by the router's logits (Shazeer et al.,
    arXiv:1701.06538)."""

    def __init__(self, config: Config):
        super().__init__(FeedForward(config, config.expert_dim, config.expert_bias) for _ in range(config.n_experts))
        self.n_chosen, self.renormalise = config.n_chosen, config.router_norm

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits (N, experts) -> the chosen experts (N, n_chosen), of equal ones the first, and their weights, float32:
        the softmax over all experts, or over the chosen ones, which is the same renormalised."""
        logits = logits.float()
        best, chosen = (x[:, : self.n_chosen] for x in logits.sort(dim=1, descending=True, stable=True))
        return chosen, best.softmax(1) if self.renormalise else logits.softmax(1).gather(1, chosen)

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        """x (N, D), logits (N, experts) -> (N, D). Each expert runs once, on the rows that chose it. What a row gets is
        added up in the experts' order, whatever other rows there are."""
        chosen, weight = self.route(logits)
        if compiler.is_compiling():  # with static shapes, any expert may be chosen by any row
            shares = weight.new_zeros(logits.shape).scatter(1, chosen, weight)  # (N, experts)
            return sum(expert(x) * share[:, None] for expert, share in zip(self, shares.unbind(1))).to(x.dtype)
        y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        if len(x) == 1:
            for number, share in sorted(zip(chosen[0].tolist(), weight[0])):
                y += self[number](x).float() * share
            return y.to(x.dtype)
        for number in chosen.unique().tolist():
            row, slot = (chosen == number).nonzero(as_tuple=True)
            y.index_add_(0, row, self[number](x[row]) * weight[row, slot, None])
        return y.to(x.dtype)


class Experts(nn.Module):
    """The feed-forward of a sparse layer. Qwen2-MoE adds an expert that every token takes, times a gate of its own: the
    router's last row."""

    def __init__(self, config: Config):
        super().__init__()
        self.n_experts, self.n_chosen = config.n_experts, config.n_chosen
        self.router = Router(config.dim, config.n_experts + bool(config.shared_dim), bias=config.router_bias)
        self.experts = Mixture(config)
        self.shared = FeedForward(config, config.shared_dim, False) if config.shared_dim else None

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)  # (B, T, D) -> (N, D)
        logits, gate = self.router(flat).tensor_split((self.n_experts,), dim=1)  # (N, experts), (N, 1 or 0)
        y = self.experts(flat, logits)
        y = y if self.shared is None else y + (sigmoid(gate) * self.shared(flat)).to(y.dtype)
        return y.view(x.shape)
