"""Prompt lookup: a draft without a model, from the text of the request itself.

This file knows token ids in the state's tensors. It knows no model, no text and no other request.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from model import Config, Transformer
from speculative import Drafter


class NgramDraft(Drafter):
    """Prompt lookup (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding): propose the continuation of the most
    recent earlier occurrence of the last N tokens. A continuation that reaches the text's end repeats."""

    def __init__(self, n: int = 3):
        super().__init__()
        if n < 1:
            raise ValueError(f"ngram:{n} must match at least 1 token")
        self.n = n

    def propose(self, state: nn.Module) -> tuple[Tensor, Tensor]:
        return self.tokens[:, : state.k], self.probs[:, : state.k]  # as `update` wrote them

    def update(self, state: nn.Module) -> None:
        self.maybe_compile(self.find, state)(state)

    def find(self, state: nn.Module) -> None:
        """Find an earlier occurrence of the last N tokens, and write the next round's proposal."""
        pos, tokens, N = state.pos[:, None], state.tokens, min(self.n, state.tokens.size(1))  # (B, 1), (B, S)
        last = (pos + torch.arange(1 - N, 1, device=pos.device)).clamp(min=0)  # (B, N)
        grams = tokens.unfold(1, N, 1)  # (B, S - N + 1, N)
        end = torch.arange(N - 1, tokens.size(1), device=pos.device)  # (S - N + 1,) where each n-gram ends
        match = (grams == tokens.gather(1, last)[:, None]).all(dim=-1) & (end < pos) & ~state.done[:, None]
        match_end = torch.where(match, end, -1).amax(dim=1, keepdim=True)  # (B, 1)
        matched = match_end >= 0
        state.can_draft.copy_(matched[:, 0])
        period = torch.where(matched, pos - match_end, 1)
        ahead = torch.arange(self.tokens.size(1), device=pos.device)
        self.tokens.copy_(tokens.gather(1, pos - period + 1 + ahead % period))  # (B, K)
        # Without a match q is 0, and the row is decided as in plain decoding.
        drawn = matched.float()[..., None].expand(-1, self.tokens.size(1), 1)  # (B, K, 1)
        self.probs.zero_().scatter_(2, self.tokens[..., None], drawn)


def from_spec(value: str, config: Config) -> Callable[[Transformer], NgramDraft]:
    """`--draft ngram` or `ngram:N`. ValueError for an N that is no number of tokens."""
    if value and not value.isdigit():
        raise ValueError(f"{value!r} is no number of tokens to match")
    drafter = NgramDraft(int(value)) if value else NgramDraft()
    return lambda model: drafter
