"""How many tokens the next round drafts: a fixed number, or with "auto" what earlier rounds and
calibrated costs make the fastest (decoding/costs.py has the formulas).

    DraftLength     chooses it
    Gains           what a memory's steps yield, for a drafter that can do without its model
"""

import math
from collections.abc import Sequence

from decoding.costs import Costs
from decoding.errors import UserError
from decoding.memory import MemoryPlan

DECAY = 1 - 1 / 64  # of the running acceptance, per drafted position
MIN_GAIN = 1.03  # expected of a round: costs are measured to a few percent, and plain steps have 1
PROBE_ROUNDS = 4
# Plain steps before drafting is tried again; they double with every try that does not pay, the
# first too.
PROBE_AFTER = 64


class DraftLength:
    """K of the next round, from earlier rounds. K must not depend on this round's tokens."""

    def __init__(self, k: int | str, costs: Costs | None = None):
        if k == "auto" and costs is None:
            raise UserError(
                "speculate_k = 'auto' needs calibrated costs: call engine.calibrate first",
            )
        self.k = k
        self.costs = costs
        # overlap / weight is the mean acceptance. It starts at 0.8, with the weight of four
        # positions.
        self.overlap = 0.8 * 4
        self.weight = 4.0
        self.draft_share = 1.0  # the share of rows with a draft
        self.patience = PROBE_AFTER
        # Plain steps still to make; from -1 to -PROBE_ROUNDS the rounds that try drafting, as at
        # first.
        self.num_steps_to_probe = 0

    @property
    def fixed(self) -> int | None:
        """K, unless it is "auto"."""
        return None if self.k == "auto" else self.k

    @property
    def alpha(self) -> float:
        """The mean acceptance."""
        return self.overlap / self.weight

    def observe(self, overlap: float) -> None:
        """`overlap`: sum of min(p, q), or what a decoding.rule.Rule `expected`, at one drafted
        position that was reached."""
        if math.isfinite(overlap):  # a draft's NaN would stay in the mean for good
            self.overlap = self.overlap * DECAY + overlap
            self.weight = self.weight * DECAY + 1

    def observe_share(self, num_drafted: int, num_rows: int) -> None:
        """A round had a draft for some of its rows."""
        share = num_drafted / num_rows
        self.draft_share += (share - self.draft_share) / 16

    def choose(self, expected: Sequence[list[float] | None] = (None,)) -> int:
        """K of the next round, or 0 for a plain step. Where no K gains MIN_GAIN, PROBE_ROUNDS
        rounds of the smallest K try again after every `patience` plain steps. `expected`: of each
        row, as Drafter.expect has it."""
        if self.fixed is not None:
            return self.fixed
        if None not in expected:
            return self.best_for(expected)[0]
        k, gain = self.best()
        if gain >= MIN_GAIN:
            self.patience = PROBE_AFTER
            self.num_steps_to_probe = PROBE_AFTER
            return k
        self.num_steps_to_probe -= 1
        if self.num_steps_to_probe >= 0:
            return 0
        if self.num_steps_to_probe == -PROBE_ROUNDS:
            self.patience *= 2
            self.num_steps_to_probe = self.patience
        return min(self.costs.verify_s)

    def best(self) -> tuple[int, float]:
        """K with the largest expected speed-up by the acceptance so far, and that speed-up."""
        return self.costs.best(self.alpha, self.draft_share)

    def best_for(self, expected: Sequence[list[float]]) -> tuple[int, float]:
        """K with the largest gain by what is expected of each row, and that gain. A round has to
        gain more than a plain step. Such a draft is known already, and costs nothing."""
        gains = []
        for k in (0, *self.costs.verify_s):
            num_drafted = sum(sum(row[:k]) for row in expected)
            cost = self.costs.round(k, runs_drafter=False) * (MIN_GAIN if k else 1.0)
            gain = (1 + num_drafted / len(expected)) / cost
            gains.append((gain, k))
        gain, k = max(gains)
        return k, gain


class Gains:
    """Running sums of the tokens that a row got a step, and of what these cost, or would have cost
    without a model that drafts, in plain steps."""

    def __init__(self):
        self.tokens = 8.0
        self.cost = 8.0

    @property
    def rate(self) -> float:
        """Tokens for the cost of a plain step."""
        return self.tokens / self.cost

    def observe(self, plan: MemoryPlan, num_tokens: float) -> None:
        """A step that was planned so gave each row this number of tokens, on average. One that ran
        a drafter's model, or has an uncalibrated K, counts as one that yields what it costs."""
        cost = num_tokens
        if plan.costs and not plan.runs_drafter and plan.k in (0, *plan.costs.verify_s):
            cost = plan.costs.round(plan.k, runs_drafter=False)
        decay = DECAY**num_tokens
        self.tokens = self.tokens * decay + num_tokens
        self.cost = self.cost * decay + cost
