"""What the next step runs: which requests, and how many tokens it drafts for each.

    Step            one step, as the host planned it
    Planner         which rows run, how far they attend, and what each memory drafts
    draft_lengths   the lengths that an engine's drafts may have

A memory is what drafts have learned from the texts of the requests that share it (memory.py);
usually all share one, and there is one plan a step. decoding/draft_length.py chooses for the
requests of one memory, decoding/costs.py has the formulas.
"""

from collections.abc import Sequence
from typing import NamedTuple

from decoding.costs import Costs, costs_at
from decoding.draft_length import DraftLength
from decoding.errors import UserError
from decoding.memory import Memories, Memory, MemoryPlan
from decoding.options import EngineOptions
from decoding.runner import ModelRunner, Rows
from decoding.scheduler import Request
from drafts.base import Drafter


class Step(NamedTuple):
    """One decode step or round, or the end of a prompt, which decides a first token."""

    rows: Rows  # the slots that run
    length: int  # a bound on the decided positions of a row before the step
    k: int = 0  # drafted tokens; 0: a plain step
    requests: Sequence[tuple[int, Request]] = ()  # (row, request) of those that it advances
    drafts_unevenly: bool = False  # do rows draft fewer than k, as their draft_limit says?
    records_logprobs: bool = False
    plans: Sequence[MemoryPlan] = ()  # one for each memory of its requests
    costs: Costs | None = None  # of all its rows
    begin_s: float = 0.0  # time.perf_counter as the host began to plan it
    draft_s: float = 0.0  # seconds that the host then drafted

    @property
    def drafting(self) -> list[tuple[int, Request]]:
        """The (row, request) pairs that draft."""
        ks = {request: plan.k for plan in self.plans for request in plan.requests}
        return [
            (row, request) for row, request in self.requests if ks[request] and request.may_draft
        ]

    @property
    def runs_drafter(self) -> bool:
        # Not for drafts that Drafter.expect made before the step, of n-grams and suffixes.
        return any(plan.runs_drafter for plan in self.plans)


class Planner:
    """What the requests of each memory draft in the next step. `ks` are the lengths that drafts may
    have: none without a drafter, unless steps have a fixed width."""

    def __init__(
        self,
        options: EngineOptions,
        ks: tuple[int, ...],
        drafter: Drafter | None,
        runner: ModelRunner,
    ):
        self.has_fixed_width = options.fixed_width_steps
        self.speculate_k = options.speculate_k if ks else 0
        self.ks = ks
        self.max_k = max(ks, default=0)
        # Do steps record log-probabilities? A program may pause this while no answer needs them.
        self.records_logprobs = options.logprobs is not None
        # Numbers of rows that `warm_up` compiles and `calibrate` measures: all that a compiled step
        # may have. An eager step may have any number between; its costs are interpolated.
        self.row_counts = sorted({1, runner.B})
        self.drafter = drafter
        self.runner = runner
        self.memories = Memories() if drafter is None else drafter.memories
        self.memories.shared.draft_length = None  # an earlier engine of the drafter had other costs
        # Of the step planned last. Before `calibrate` None, or what a program has set.
        self.costs: Costs | None = None
        # What `calibrate` has measured, by number of rows, then by attended length.
        self.measured_costs: dict[int, dict[int, Costs]] = {}

    def assign_memory(self, request, others: Sequence) -> None:
        """Give a new scheduler.Request its memory; `others` have not ended. What was learned of the
        shared acceptance stays, unless speculate_k was changed and no other request runs."""
        shared = self.memories.shared
        draft_length = shared.draft_length
        if draft_length is None or (draft_length.k != self.speculate_k and not others):
            shared.draft_length = DraftLength(self.speculate_k, self.costs)
        self.memories.assign(request, others)

    def costs_of(self, num_rows: int, length: int) -> Costs | None:
        """Costs of steps of so many rows at this length; before `calibrate` those in `costs`, None
        unless a program has set them."""
        if not self.measured_costs:
            return self.costs
        attended = self.runner.bucket_length(length)
        costs_by_rows = {
            measured_rows: costs_at(costs_by_length, attended)
            for measured_rows, costs_by_length in self.measured_costs.items()
        }
        return costs_at(costs_by_rows, num_rows)

    def row_range(self, requests: Sequence[Request]) -> tuple[int, int]:
        """The range of rows that a step for these requests runs. A compiled step runs one row or
        the full batch. A CUDA graph has fixed addresses, so its single row is always row 0."""
        slots = [request.slot.index for request in requests]
        begin = min(slots)
        end = max(slots) + 1
        runner = self.runner
        if runner.compile and (end - begin > 1 or (begin and runner.uses_cuda_graphs)):
            return 0, runner.B
        return begin, end

    def max_length(self, requests: Sequence[Request], in_flight: Sequence[Step]) -> int:
        """An upper bound on the decided positions of these requests before the next step, with the
        steps that are `in_flight`: launched, and not read yet."""
        unread = sum(step.k + 1 for step in in_flight)
        length = max(request.num_positions for request in requests) + unread
        return min(length, self.runner.caches.max_seq_length)

    def plan(self, requests: Sequence[Request], in_flight: Sequence[Step]) -> list[MemoryPlan]:
        """One plan for each memory, made from its own requests."""
        begin, end = self.row_range(requests)
        self.costs = self.costs_of(end - begin, self.max_length(requests, in_flight))
        requests_by_memory: dict[Memory, list] = {}
        for request in requests:
            requests_by_memory.setdefault(request.memory, []).append(request)
        return [
            self.plan_memory(memory, own_requests, in_flight)
            for memory, own_requests in requests_by_memory.items()
        ]

    def plan_memory(self, memory: Memory, requests: list, in_flight: Sequence) -> MemoryPlan:
        """What the requests of one memory draft."""
        if self.drafter is None or not self.ks:
            # No draft: K is 0, or the fixed width.
            return MemoryPlan(memory, requests, self.max_k, self.costs)
        own_requests = set(requests)
        unread = sum(  # tokens of a request that the steps in flight may decide
            plan.k + 1
            for step in in_flight
            for plan in step.plans
            if not own_requests.isdisjoint(plan.requests)
        )
        costs = self.costs
        if not memory.is_shared:
            # A request that learns alone must not depend on other rows: how many run, and how long
            # they are, may follow from random numbers that it shares with them. So its costs are
            # those of a full batch at its own length.
            length = requests[0].num_positions + unread
            costs = self.costs_of(self.runner.B, min(length, self.runner.caches.max_seq_length))
        if memory.draft_length is None:
            memory.draft_length = DraftLength(self.speculate_k, costs)
        memory.draft_length.costs = costs  # before `expect`: a HybridDraft chooses by them
        expected = self.drafter.expect(requests, unread)
        has_draft = any(probs != [] for probs in expected)  # None, of a model's draft, counts too
        k = memory.draft_length.choose(expected) if has_draft else 0
        if self.has_fixed_width:
            k = self.max_k
        return MemoryPlan(memory, requests, k, costs, expected, self.drafter.num_first_inputs)


def draft_lengths(options: EngineOptions, drafter: Drafter | None) -> tuple[int, ...]:
    """The numbers of tokens that a round may draft: `speculate_k`, or the drafter's choices for
    "auto". UserError if it cannot draft so many."""
    if drafter is None and not options.fixed_width_steps:
        return ()
    drafter = drafter or Drafter  # the class has the defaults
    k = options.speculate_k
    choices = drafter.auto_k if k == "auto" else (k,)
    ks = tuple(choice for choice in choices if 0 < choice <= drafter.max_k)
    if k and not ks:
        raise UserError(f"speculate_k = {k}: this draft has at most {drafter.max_k} tokens a round")
    return ks
