"""A rule of your own in place of `speculative.accept`: which drafted tokens a round keeps.

    Rule            what a rule says, for `verification` of EngineOptions

speculative.verify asks it in every round. docs/fork.md has typical acceptance as an example.
"""

from torch import Tensor

from decoding.sampling import draw
from speculative import after_kept, count_kept


class Rule:
    """A round asks `keep` which drafted tokens may stay, keeps those before the first that may not,
    and draws one more from `next_law`. Reports and "auto" go by what is `expected`. `is_lossless`:
    does text keep the target's distribution? A subclass overrides `keep` and `expected`, and the
    others where they differ."""

    is_lossless = False

    def keep(
        self,
        draft_tokens: Tensor,
        q: Tensor,
        p: Tensor,
        u: Tensor,
    ) -> Tensor:
        """Which tokens (B, K), drawn from q (B, K, V), may be kept where the target has p (B, K,
        V): (B, K) bool. `u` (B, K) are uniform numbers."""
        raise NotImplementedError

    def next_law(self, p: Tensor, q: Tensor) -> Tensor:
        """The distribution (B, V) of the token after those that are kept, where the target has p
        (B, V), and the draft q (B, V), or zeros."""
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
        is_drafted = q.amax(dim=-1) > 0  # (B, K) False with NaN
        may_keep = self.keep(draft_tokens, q, p[:, :-1], to_accept)  # (B, K)
        is_number = ~p[:, :-1].isnan().any(dim=-1)  # (B, K)
        n = count_kept(may_keep & is_drafted & is_number)
        q = q.where(is_drafted[..., None], 0.0)  # (B, K, V)
        p, q, to_draw = after_kept(n, p, q, to_draw)
        return n, draw(self.next_law(p, q), to_draw)
