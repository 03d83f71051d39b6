"""Prompt lookup: a draft without a model, from the text of the request itself."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafts.base import Draft, Drafter

BASE = 0x9E3779B97F4A7C15 - 2**64  # odd: its powers do not vanish modulo 2^64


class NgramDraft(Drafter):
    """Prompt lookup (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding): propose the
    continuation of the most recent earlier occurrence of the last `n` tokens. A continuation that
    reaches the text's end repeats."""

    def __init__(self, n: int = 3):
        super().__init__()
        self.n = n

    shared = ("powers",)  # by all rows

    def setup(self, state: nn.Module, k_max: int, target, *args) -> None:
        super().setup(state, k_max, target, *args)
        self.bucket_length = target.bucket_length
        self.is_compiled = target.compile
        powers = torch.full_like(state.tokens[0], BASE)
        powers[0] = 1
        self.register_buffer("powers", powers.cumprod(dim=0), persistent=False)

    def propose(self, batch: nn.Module, plan) -> Draft:
        return self.proposal(plan.k)  # as `update` wrote it

    def update(self, state: nn.Module) -> None:
        S = state.tokens.size(1)
        if not self.is_compiled:  # compiled code would be compiled anew for every other length
            S = self.bucket_length(state.length + 1)
        find = self.maybe_compile(self.find, state, S)
        find(state, S)

    def find(self, state: nn.Module, S: int) -> None:
        """Find an earlier occurrence of the last N tokens among S, and write the next round's
        proposal."""
        pos = state.pos[:, None]  # (B, 1)
        is_open = ~state.done[:, None]  # (B, 1)
        K = self.tokens.size(1)
        N = min(self.n, S)
        text = state.tokens[:, :S]
        powers = self.powers[:S]
        match_end = latest_match(text, pos, N, powers)
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


def latest_match(tokens: Tensor, pos: Tensor, N: int, powers: Tensor) -> Tensor:
    """Where the latest earlier occurrence of the N tokens up to pos (B, 1) ends in tokens (B, S):
    (B, 1), -1 for none.

    N-grams are compared by a hash, so that the work does not grow with N: the sum of token * BASE^i
    modulo 2^64 over their positions i, moved to one place by another power. `powers` (S,) are
    BASE^i. What is found is compared token by token: two texts of one hash cost a draft at most."""
    S = tokens.size(1)
    device = tokens.device
    end = torch.arange(S, device=device)
    last = pos.clamp(max=S - 1)  # (B, 1), of a parked row too
    terms = tokens * powers
    sums = terms.cumsum(dim=1)  # (B, S)
    before = F.pad(sums, (N, 0))
    before = before[:, :S]
    hashes = sums - before  # of the N-gram that ends at each position
    distance = last - end
    distance = distance.clamp(min=0)  # (B, S)
    moved = hashes * powers[distance]
    is_same = moved == hashes.gather(1, last)
    is_earlier = end < pos
    is_whole = end >= N - 1
    is_match = is_same & is_earlier & is_whole
    ends = torch.where(is_match, end, -1)
    match_end = ends.amax(dim=1, keepdim=True)  # (B, 1)
    offset = torch.arange(1 - N, 1, device=device)  # (N,)
    index = match_end + offset
    gram = tokens.gather(1, index.clamp(min=0))  # (B, N)
    index = last + offset
    last_gram = tokens.gather(1, index.clamp(min=0))
    is_equal = gram == last_gram
    is_equal = is_equal.all(dim=1, keepdim=True)  # (B, 1)
    return torch.where(is_equal, match_end, -1)
