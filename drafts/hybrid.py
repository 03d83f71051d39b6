"""Two drafters as one: in each step the requests that share a memory (decoding/memory.py) take the
draft that promises more.

The first (suffix, ngram) copies what the text or an earlier answer went on with. Its draft exists
before the step and costs nothing, and it knows how probable it is that 1, 2, … of its tokens are
accepted. The second runs a model. Its draft takes time, and what it promises is the acceptance of
its earlier rounds.

The choice (`prefers_first`) is made before each step, from decided tokens alone. As in
ArcticInference (github.com/snowflakedb/ArcticInference, vllm/model_runner.py), no drafted token
takes part in it, so it does not change the distribution of the text.
"""

from collections.abc import Sequence

from torch import nn

from decoding.costs import expected_tokens
from decoding.draft_length import MIN_GAIN, Gains
from decoding.memory import Memory
from drafts.base import Draft, Drafter, DraftSource
from model import Transformer


class Choice:
    """Do the requests of a memory take the first draft in this step? It is `memory.of(Choice)`."""

    def __init__(self):
        self.takes_first = False


class HybridDraft(Drafter):
    """`first`, a SuffixDraft, or `second`, a ModelDraft, by what is expected of each."""

    def __init__(self, first: Drafter, second: Drafter):
        super().__init__(second.model)
        self.first = first
        self.second = second
        self.auto_k = first.auto_k
        self.max_k = min(first.max_k, second.max_k)
        self.max_positions = second.max_positions  # of its cache; the first drafts beyond
        self.min_acceptance = second.min_acceptance
        self.causes = second.causes

    @property
    def num_first_inputs(self) -> int:
        return self.second.num_first_inputs  # which its `setup` may change

    def setup(self, *args) -> None:
        self.first.setup(*args)
        self.second.setup(*args)
        self.runner = self.second.runner

    def prefill(self, *args) -> None:
        self.second.prefill(*args)

    def passes(self, k: int) -> int:
        return self.second.passes(k)

    def expect(self, requests: Sequence, unread: int) -> list[list[float] | None]:
        memory = requests[0].memory
        first_expected = self.first.expect(requests, unread)
        second_expected = self.second.expect(requests, unread)
        takes_first = self.prefers_first(first_expected, second_expected, memory)
        memory.of(Choice).takes_first = takes_first
        return first_expected if takes_first else second_expected

    def prefers_first(
        self, first_expected: Sequence, second_expected: Sequence, memory: Memory
    ) -> bool:
        """Does the first draft in this step?

        With a fixed K, if it promises at least the tokens that the second's acceptance so far
        predicts. With "auto" both are rated at their best K, in tokens for a plain step's cost.
        Between two copies the first promises nothing, but a round of the model could delay the next
        copy: so the first also takes the step while the memory's running gain without the model
        (draft_length.Gains) is at least what the second promises. Where neither pays, the second
        has the step: DraftLength then makes plain ones, and tries the second after a while.
        """
        num_rows = second_expected.count(None)  # rows that the second can draft for
        draft_length = memory.draft_length
        fixed = draft_length.fixed
        if fixed is not None:  # no K to choose: compare expected tokens
            promised = sum(sum(row[:fixed]) for row in first_expected)
            predicted = expected_tokens(draft_length.alpha, fixed) - 1  # less the target's own
            return promised >= num_rows * predicted
        if num_rows == 0:
            return True
        # Compare tokens for the cost of a plain step, each draft at its best K.
        k, first_rate = draft_length.best_for(first_expected)
        # By MIN_GAIN too, as `best_for` has divided the first's: a round must gain that much.
        second_rate = draft_length.best()[1] / MIN_GAIN
        if k == 0 and second_rate < 1:
            return False  # neither pays: the second's DraftLength makes plain steps
        return max(first_rate, memory.of(Gains).rate) >= second_rate

    def propose(self, batch: nn.Module, plan) -> Draft:
        first_rows = [
            row for row, request in plan.requests if request.memory.of(Choice).takes_first
        ]
        if first_rows and len(first_rows) == len(plan.requests):
            return self.first.propose(batch, plan)
        # `draft` is the second's fixed tensors, and an earlier step wrote rows of the first there
        # (below). The second overwrites its own ids alone, so the target's other ids are zeroed.
        self.second.probs[..., self.second.vocab_size :] = 0.0
        draft = self.second.propose(batch, plan)
        if first_rows or not plan.requests:  # without requests both are compiled and measured
            first = self.first.propose(batch, plan)
            draft.tokens[first_rows] = first.tokens[first_rows]
            draft.q[first_rows] = first.q[first_rows]
        return draft


class HybridSource(DraftSource):
    """`--draft suffix,OTHER`: the sources of both. Its variants are those of the second alone: a
    first draft would hide how they differ."""

    def __init__(self, first: DraftSource, second: DraftSource):
        self.first = first
        self.second = second
        self.variants = second.variants

    def load(self, target: Transformer, tokenizer) -> HybridDraft:
        first = self.first.load(target, tokenizer)
        return HybridDraft(first, self.second.load(target, tokenizer))
