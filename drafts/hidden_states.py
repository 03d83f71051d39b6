"""The target's hidden states at some layers, which EAGLE-3 and DFlash read.

    AuxHiddenStates         the residual stream at one layer, by position
    record_hidden_states    makes a target record some layers' inputs
    AcceptanceWatch         warns once of a draft whose first tokens are accepted no more often than by chance

This file knows no draft.
"""

import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class AuxHiddenStates(nn.Module):
    """The input of one layer of the target, (B, S, D) at fixed addresses, written like its caches: the next pass
    overwrites everything beyond the last decided token."""

    def __init__(self, B: int, S: int, D: int, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.register_buffer("x", torch.zeros(B, S, D, dtype=dtype, device=device), persistent=False)

    def update(self, x: Tensor, pos: Tensor) -> None:
        """Write x (B, T, D) at pos (B, T)."""
        self.x[torch.arange(pos.size(0), device=pos.device)[:, None], pos] = x

    def read(self, pos: Tensor) -> Tensor:
        """(B, T, D) at pos (B, T). A parked row's pos may lie behind the target's cache."""
        return self.x[torch.arange(pos.size(0), device=pos.device)[:, None], pos.clamp(max=self.x.size(1) - 1)]

    def at(self, rows: int | slice | list[int], begin: int, end: int) -> dict[str, Tensor]:
        """As KVCache.at."""
        return {"x": self.x[rows, begin:end]}


def record_hidden_states(layer_ids: Sequence[int], state: nn.Module, target) -> dict[int, AuxHiddenStates]:
    """Make the target's ModelRunner record the inputs of these layers from now on. Returns the recordings."""
    like = target.model.norm.weight
    sizes = state.pos.size(0), target.S + target.slack, target.model.config.dim, like.dtype, like.device
    with torch.inference_mode(False):  # plain tensors, which any later code may write to
        streams = {i: AuxHiddenStates(*sizes) for i in layer_ids}
    target.caches = target.caches._replace(aux_hidden_states=streams)
    return streams


class AcceptanceWatch:
    """The mean acceptance of a draft's first tokens. A head that reads other hidden states than it was trained on still
    decodes losslessly, so that nothing but its acceptance shows it."""

    MIN_ROUNDS = 48
    CHANCE = 0.1  # vllm-project/vllm#43671: some 0.1 with states of a neighbouring layer, 0.45 with the right ones

    def __init__(self, states: str):
        """`states`: what the draft reads, and the key that would change it."""
        self.states = states
        self.total = 0.0
        self.num_rounds = 0

    def observe(self, overlap: float) -> None:
        """`overlap`: sum of min(p, q) at a row's first drafted token."""
        self.total += overlap
        self.num_rounds += 1
        mean = self.total / self.num_rounds
        if self.num_rounds == self.MIN_ROUNDS and not mean >= self.CHANCE:
            message = f"the first drafted token of {self.num_rounds} rounds was accepted with probability {mean:.2f}"
            print(f"{message}, which is near chance. {self.states}", file=sys.stderr)
