"""The papers' formulas of speculative decoding, and measured costs of steps.

    expected_tokens     tokens of a round, if the acceptance alpha is the same at every position
    Costs               seconds of steps and rounds, their speed-up, and the fastest draft length
    costs_at            Costs at any length or number of rows, from those that were measured at two

Source: Leviathan et al., arXiv:2211.17192 (below: L). K is L's gamma. This file holds numbers
alone: no tensor, no model.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


def expected_tokens(alpha: float, k: int) -> float:
    """Tokens that one round yields on average when each drafted token is accepted with probability
    alpha, independently: (1 - alpha^(K+1)) / (1 - alpha), L eq. (1)."""
    terms = [alpha**i for i in range(k + 1)]
    return float(sum(terms))


@dataclass
class Costs:
    """Calibrated costs in seconds: `decode_s` of the target in a plain step, `draft_s` and
    `verify_s` of a round by its K."""

    decode_s: float
    draft_s: dict[int, float] = field(default_factory=dict)
    verify_s: dict[int, float] = field(default_factory=dict)

    def c(self, k: int) -> float:
        """Cost of drafting one token, in plain steps."""
        return self.draft_s[k] / k / self.decode_s

    def v(self, k: int) -> float:
        """Cost of verifying K + 1 positions, in plain steps."""
        return self.verify_s[k] / self.decode_s

    def round(self, k: int, runs_drafter: bool = True) -> float:
        """Cost of a step that drafts k tokens, in plain steps; `runs_drafter`: False where the
        draft is known already."""
        if k == 0:
            return 1.0
        return (self.draft_s[k] * runs_drafter + self.verify_s[k]) / self.decode_s

    def speedup(
        self,
        k: int,
        alpha: float,
        draft_share: float = 1.0,
        round_share: float = 1.0,
    ) -> float:
        """Expected speed-up of a batch; expected_tokens / (K c + v) where every step is a round,
        which is L theorem 3.8 for v = 1. draft_share: the share of a row's steps in which the row
        has a draft; round_share: the share of all steps that are rounds, because some row has a
        draft."""
        cost = round_share * self.round(k) + (1 - round_share)
        tokens = 1 + draft_share * (expected_tokens(alpha, k) - 1)
        return tokens / cost

    def best(self, alpha: float, *shares: float) -> tuple[int, float]:
        """The calibrated K with the largest `speedup`, and that speed-up; 0 stands for plain
        steps."""
        speedups = {k: self.speedup(k, alpha, *shares) for k in (0, *self.verify_s)}
        best_k = max(speedups, key=speedups.get)
        return best_k, speedups[best_k]


def weighted_mean(costs: Sequence[Costs], weights: Sequence[float]) -> Costs:
    """The mean of Costs of the same values of K, by weights that sum to 1."""

    def mean(seconds: Iterable[float]) -> float:
        return sum(weight * s for weight, s in zip(weights, seconds))

    return Costs(
        mean(item.decode_s for item in costs),
        {k: mean(item.draft_s[k] for item in costs) for k in costs[0].draft_s},
        {k: mean(item.verify_s[k] for item in costs) for k in costs[0].verify_s},
    )


def costs_at(measured: dict[int, Costs], size: int) -> Costs:
    """Costs of steps of this size, an attended length or a number of rows, by those measured at one
    size or at two: seconds are linear in between, as attention's work is in the length, and
    constant outside."""
    low = min(measured)
    high = max(measured)
    share = (size - low) / max(1, high - low)
    share = min(1.0, max(0.0, share))
    return weighted_mean([measured[low], measured[high]], [1 - share, share])
