"""The papers' formulas of speculative decoding, and measured costs of steps.

    expected_tokens, speedup, operations    with an acceptance alpha that is the same at every position
    Costs                                   seconds of steps and rounds, and the fastest draft length

Source: Leviathan et al., arXiv:2211.17192 (below: L). K is L's gamma. This file holds numbers alone: no tensor, no
model.
"""

from dataclasses import dataclass, field


def expected_tokens(alpha: float, k: int) -> float:
    """Tokens that one round yields on average when each drafted token is accepted with probability alpha,
    independently: (1 - alpha^(K+1)) / (1 - alpha), L eq. (1)."""
    return float(sum(alpha**i for i in range(k + 1)))


def speedup(alpha: float, k: int, c: float, v: float = 1.0) -> float:
    """Factor by which wall time per token shrinks: expected_tokens / (K c + v). c: cost of drafting one token, v: of
    verifying K + 1 positions, both in plain decode steps. With v = 1 it is L theorem 3.8."""
    return expected_tokens(alpha, k) / (k * c + v)


def operations(alpha: float, k: int, c_ops: float) -> float:
    """Factor by which arithmetic per token grows: (K c_ops + K + 1) / expected_tokens, L theorem 3.11. c_ops: the
    drafter's operations for one token over the target's."""
    return (k * c_ops + k + 1) / expected_tokens(alpha, k)


@dataclass
class Costs:
    """Seconds, calibrated outside the rounds: of the target's pass in a plain step, and by K of the drafter and of
    verifying. draft_s[0]: of a drafter beside a plain step, when it reads the new token."""

    decode_s: float
    draft_s: dict[int, float] = field(default_factory=dict)
    verify_s: dict[int, float] = field(default_factory=dict)

    def c(self, k: int) -> float:
        """Cost of drafting one token, in plain steps."""
        return self.draft_s[k] / k / self.decode_s

    def v(self, k: int) -> float:
        """Cost of verifying K + 1 positions, in plain steps."""
        return self.verify_s[k] / self.decode_s

    def round(self, k: int) -> float:
        """Cost of a step that drafts k tokens, in plain steps without a drafter."""
        return (self.draft_s.get(k, 0.0) + (self.verify_s[k] if k else self.decode_s)) / self.decode_s

    def speedup(self, k: int, alpha: float, draft_share: float = 1.0, round_share: float = 1.0) -> float:
        """Expected speed-up of a batch. draft_share: the share of a row's steps in which the row has a draft;
        round_share: the share of all steps that are rounds, because some row has a draft."""
        cost = round_share * self.round(k) + (1 - round_share) * self.round(0)
        return (1 + draft_share * (expected_tokens(alpha, k) - 1)) / cost

    def best(self, alpha: float, *shares: float) -> tuple[int, float]:
        """The calibrated K with the largest `speedup`, and that speed-up; 0 stands for plain steps."""
        return max(((k, self.speedup(k, alpha, *shares)) for k in (0, *self.verify_s)), key=lambda pair: pair[1])
