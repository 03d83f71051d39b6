"""Prompt lookup: a draft without a model, from the text of the request itself."""

import torch
from torch import Tensor, nn

from speculative import Drafter


class NgramDraft(Drafter):
    """Prompt lookup (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding): propose the
    continuation of the most recent earlier occurrence of the last `n` tokens. A continuation that
    reaches the text's end repeats."""

    def __init__(self, n: int = 3):
        super().__init__()
        self.n = n

    def propose(self, state: nn.Module) -> tuple[Tensor, Tensor]:
        return self.proposal(state.k)  # as `update` wrote it

    def update(self, state: nn.Module) -> None:
        find = self.maybe_compile(self.find, state)
        find(state)

    def find(self, state: nn.Module) -> None:
        """Find an earlier occurrence of the last N tokens, and write the next round's proposal."""
        pos = state.pos[:, None]  # (B, 1)
        tokens = state.tokens  # (B, S)
        device = pos.device
        S = tokens.size(1)
        N = min(self.n, S)
        last = pos + torch.arange(1 - N, 1, device=device)  # (B, N)
        last = last.clamp(min=0)
        last_gram = tokens.gather(1, last)
        grams = tokens.unfold(1, N, 1)  # (B, S - N + 1, N)
        end = torch.arange(N - 1, S, device=device)  # (S - N + 1,) where each n-gram ends
        is_same = grams == last_gram[:, None]  # (B, S - N + 1, N)
        is_same = is_same.all(dim=-1)
        is_earlier = end < pos
        is_open = ~state.done[:, None]  # (B, 1)
        positions = torch.where(is_same & is_earlier & is_open, end, -1)
        match_end = positions.amax(dim=1, keepdim=True)  # (B, 1)
        has_match = match_end >= 0
        state.can_draft.copy_(has_match[:, 0])
        period = torch.where(has_match, pos - match_end, 1)
        begin = pos - period + 1
        ahead = torch.arange(self.tokens.size(1), device=device) % period  # (B, K)
        continuation = tokens.gather(1, begin + ahead)
        self.tokens.copy_(continuation)
        # Without a match q is 0, and the row is decided as in plain decoding.
        drafted = self.tokens[..., None]  # (B, K, 1)
        q = has_match.float()[..., None]  # (B, 1, 1)
        self.probs.zero_()
        self.probs.scatter_(2, drafted, q.expand_as(drafted))
