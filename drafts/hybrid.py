"""Two drafters as one: the requests of a memory take in each step the draft that promises more.

The first costs next to nothing and knows what it promises (suffix, ngram), the second runs a model.
As in ArcticInference (github.com/snowflakedb/ArcticInference, vllm/model_runner.py), the choice
reads decided tokens and earlier rounds alone, so it does not change the distribution of the text.
"""

import statistics
from collections.abc import Sequence

from torch import nn

from decoding.costs import expected_tokens
from decoding.draft_length import DECAY, MIN_GAIN, DraftLength
from drafts.base import Draft, Drafter


class Choice:
    """Of one memory: which draft its requests take, and running sums of the tokens that they got
    and of what these cost, or would have cost without the second drafter, in plain steps."""

    def __init__(self):
        self.takes_first = False
        self.k = 0  # of the first draft
        self.lengths: dict[object, int] = {}  # of its requests' texts, one step ago
        self.tokens = 8.0
        self.cost = 8.0

    def observe(self, requests: Sequence, draft_length: DraftLength) -> None:
        """See how many tokens the requests have got since the last step."""
        lengths = {request: request.num_positions for request in requests}
        gains = [n - self.lengths[r] for r, n in lengths.items() if r in self.lengths]
        self.lengths = lengths
        if not gains or max(gains) == 0:
            return
        gain = statistics.mean(gains)
        cost = gain
        if self.takes_first and draft_length.costs is not None:
            cost = draft_length.costs.round(self.k, runs_drafter=False)
        decay = DECAY**gain
        self.tokens = self.tokens * decay + gain
        self.cost = self.cost * decay + cost


class HybridDraft(Drafter):
    """`first`, a SuffixDraft, or `second`, a ModelDraft, by what is expected of each."""

    def __init__(self, first: Drafter, second: Drafter):
        super().__init__(second.model)
        self.first = first
        self.second = second
        self.auto_k = first.auto_k
        self.max_k = min(first.max_k, second.max_k)
        self.max_positions = second.max_positions
        self.window = second.window

    def setup(self, *args) -> None:
        self.first.setup(*args)
        self.second.setup(*args)
        self.runner = self.second.runner
        self.window = self.second.window

    def prefill(self, *args) -> None:
        self.second.prefill(*args)

    def passes(self, k: int) -> int:
        return self.second.passes(k)

    def expect(self, requests: Sequence, unread: int) -> list[list[float] | None]:
        memory = requests[0].memory
        choice = memory.of(Choice)
        choice.observe(requests, memory.draft_length)
        first = self.first.expect(requests, unread)
        second = self.second.expect(requests, unread)
        choice.takes_first = self.prefers_first(first, second, choice, memory.draft_length)
        return first if choice.takes_first else second

    def prefers_first(
        self, first: Sequence, second: Sequence, choice: Choice, draft_length: DraftLength
    ) -> bool:
        """Does the first promise more? With "auto" the second has to be faster than the latest
        steps without it were on average. Otherwise it would delay copies, which are noticed once
        they have begun, and its cache would have to catch up after each."""
        num_rows = second.count(None)
        if draft_length.fixed is not None:
            choice.k = draft_length.fixed if any(first) else 0
            promised = sum(sum(row[: choice.k]) for row in first)
            expected = expected_tokens(draft_length.alpha, draft_length.fixed) - 1
            return promised >= num_rows * expected
        choice.k, first_rate = draft_length.best_for(first)
        second_rate = draft_length.best()[1] / MIN_GAIN
        if num_rows == 0:
            return True
        if choice.k == 0 and second_rate < 1:
            return False  # neither pays, and DraftLength tries the second again after a while
        return max(first_rate, choice.tokens / choice.cost) >= second_rate

    def propose(self, batch: nn.Module, plan) -> Draft:
        rows = [row for row, request in plan.requests if request.memory.of(Choice).takes_first]
        if rows and len(rows) == len(plan.requests):
            return self.first.propose(batch, plan)
        # The first may have drafted ids there that the second does not have.
        self.second.probs[..., self.second.vocab :] = 0.0
        draft = self.second.propose(batch, plan)
        if rows or not plan.requests:  # without requests both are compiled and measured
            first = self.first.propose(batch, plan)
            draft.tokens[rows] = first.tokens[rows]  # other memories' requests take it
            draft.q[rows] = first.q[rows]
        return draft
