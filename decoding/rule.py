"""A rule of your own in place of `speculative.accept`: which drafted tokens a round keeps.

    Rule            what a rule says, for `verification` of EngineOptions

speculative.verify asks it in every round. docs/fork.md has typical acceptance as an example.
"""

from torch import Tensor

from decoding.sampling import draw
from speculative import after_kept, count_kept


class Rule:
    """A round keeps the drafted tokens before the first that `keep` refuses, and draws the next
    from `next_law`. Reports and "auto" read `expected`. `is_lossless`: does text keep the target's
    distribution? A subclass overrides `keep` and `expected`, and `next_law` and `is_lossless` where
    the defaults do not fit. No token whose p is 0 may be kept or drawn: greedy text would change,
    and a grammar be broken."""

    is_lossless = False

    def keep(
        self,
        draft_tokens: Tensor,
        q: Tensor,
        p: Tensor,
        u: Tensor,
    ) -> Tensor:
        """(B, K) bool: may these tokens (B, K), drawn from q (B, K, V), be kept where the target
        has p (B, K, V)? `u` (B, K) are uniform numbers."""
        raise NotImplementedError

    def next_law(self, p: Tensor, q: Tensor) -> Tensor:
        """The distribution (B, V) of the token after those that are kept, where the target has p
        (B, V) and the draft q (B, V). It must be p in rows where q is zero, which have no draft."""
        return p

    def expected(self, p: Tensor, q: Tensor) -> Tensor:
        """The probability (B, K) that a token drawn from q (B, K, V) is kept, p as of `keep`."""
        raise NotImplementedError

    def accept(
        self,
        draft_tokens: Tensor,
        q: Tensor,
        p: Tensor,
        noise: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """n_accepted and next_token, as of `speculative.accept`."""
        to_accept, to_draw = noise
        has_draft = q.amax(dim=-1) > 0  # (B, K) False where q is NaN: such a token is rejected
        may_keep = self.keep(draft_tokens, q, p[:, :-1], to_accept)  # (B, K)
        is_valid = ~p[:, :-1].isnan().any(dim=-1)  # (B, K) False where p is NaN
        n = count_kept(may_keep & has_draft & is_valid)
        q = q.where(has_draft[..., None], 0.0)  # (B, K, V)
        p, q, to_draw = after_kept(n, p, q, to_draw)
        return n, draw(self.next_law(p, q), to_draw)
