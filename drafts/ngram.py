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
        is_open = ~state.done[:, None]  # (B, 1)
        K = self.tokens.size(1)
        N = min(self.n, state.tokens.size(1))
        match_end = latest_match(state.tokens, pos, N)  # (B, 1)
        has_match = is_open & (match_end >= 0)
        state.can_draft.copy_(has_match[:, 0])
        distance = pos - match_end
        period = torch.where(has_match, distance, 1)
        begin = pos - period + 1
        ahead = torch.arange(K, device=pos.device)
        ahead = ahead % period  # (B, K)
        continuation = state.tokens.gather(1, begin + ahead)
        self.tokens.copy_(continuation)
        # Without a match q is 0, and the row is decided as in plain decoding.
        q = has_match.float()
        q = q.expand(-1, K)  # (B, K)
        self.probs.zero_()
        self.probs.scatter_(2, continuation[..., None], q[..., None])


def latest_match(tokens: Tensor, pos: Tensor, N: int) -> Tensor:
    """Where the latest earlier occurrence of the N tokens up to pos (B, 1) ends in tokens (B, S):
    (B, 1), -1 for none."""
    S = tokens.size(1)
    device = tokens.device
    offset = torch.arange(1 - N, 1, device=device)  # (N,)
    last = pos + offset
    last = last.clamp(min=0)  # (B, N)
    last_gram = tokens.gather(1, last)
    last_gram = last_gram[:, None]  # (B, 1, N)
    grams = tokens.unfold(1, N, 1)  # (B, S - N + 1, N)
    is_same = grams == last_gram
    is_match = is_same.all(dim=-1)  # (B, S - N + 1)
    end = torch.arange(N - 1, S, device=device)  # (S - N + 1,) where each n-gram ends
    is_earlier = end < pos
    ends = torch.where(is_match & is_earlier, end, -1)
    return ends.amax(dim=1, keepdim=True)
