"""Two drafters as one: the requests of a memory take in each step the draft that promises more.

The first (suffix, ngram) copies what the text or an earlier answer went on with. Its draft exists
before the step and costs nothing, and it knows how probable it is that 1, 2, … of its tokens are
accepted. The second runs a model. Its draft takes time, and what it promises is the acceptance of
its earlier rounds.

The choice is made before each step, from decided tokens alone. With a fixed K the first drafts if
it promises at least the tokens that the second's acceptance so far predicts. With "auto" both are
rated at their best K, in tokens for the cost of a plain step. Between two copies the first promises
nothing, and a round of the model would notice the next copy late. So the first also keeps a step
while the memory's latest steps without the model gave more tokens for their cost
(decoding.draft_length.Gains) than the second promises. Where neither pays, DraftLength makes plain
steps, and tries the second again after a while. As in ArcticInference
(github.com/snowflakedb/ArcticInference, vllm/model_runner.py), no drafted token takes part in the
choice, so it does not change the distribution of the text.
"""

from collections.abc import Sequence

from torch import nn

from decoding.costs import expected_tokens
from decoding.draft_length import MIN_GAIN, Gains
from decoding.memory import Memory
from drafts.base import Draft, Drafter, DraftSource
from model import Transformer


class Choice:
    """Do the requests of a memory take the first draft in this step? `memory.of(Choice)` is its."""

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
        self.max_positions = second.max_positions
        self.min_acceptance = second.min_acceptance
        self.causes = second.causes

    @property
    def num_first_inputs(self) -> int:
        return self.second.num_first_inputs

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
        of_first = self.first.expect(requests, unread)
        of_second = self.second.expect(requests, unread)
        takes_first = self.prefers_first(of_first, of_second, memory)
        memory.of(Choice).takes_first = takes_first
        return of_first if takes_first else of_second

    def prefers_first(self, of_first: Sequence, of_second: Sequence, memory: Memory) -> bool:
        """Does the first promise more, by what `expect` says of both?"""
        num_rows = of_second.count(None)  # those that the second can draft for
        draft_length = memory.draft_length
        if draft_length.fixed is not None:
            promised = sum(sum(row[: draft_length.fixed]) for row in of_first)
            predicted = expected_tokens(draft_length.alpha, draft_length.fixed) - 1
            return promised >= num_rows * predicted
        if num_rows == 0:
            return True
        k, first_rate = draft_length.best_for(of_first)
        # Rounds of the first had to gain MIN_GAIN more than a plain step (`best_for`).
        second_rate = draft_length.best()[1] / MIN_GAIN
        if k == 0 and second_rate < 1:
            return False  # neither pays
        return max(first_rate, memory.of(Gains).rate) >= second_rate

    def propose(self, batch: nn.Module, plan) -> Draft:
        first_rows = [r for r, request in plan.requests if request.memory.of(Choice).takes_first]
        if first_rows and len(first_rows) == len(plan.requests):
            return self.first.propose(batch, plan)
        # `draft.q` below is a view of these fixed tensors, into which an earlier step may have
        # written ids of the first's that the second does not have.
        self.second.probs[..., self.second.vocab :] = 0.0
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
