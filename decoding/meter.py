"""What is measured and learned of a step, once the host has read what it decided.

    Meter       makes the records of steps and tokens, tells each memory how drafting went, and
                counts how often the first token of a model's draft is accepted

No step waits for this file. What the next steps do follows from it only through a memory's
DraftLength and Gains, which choose what is drafted.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

from decoding.draft_length import Gains
from decoding.memory import MemoryPlan
from decoding.readback import StepResult, seconds_between, step_times
from decoding.scheduler import Request
from decoding.statistics import StepRecord


class Decided(NamedTuple):
    """The tokens that a step decided for the request in one of its rows."""

    row: int
    request: Request
    ids: list[int]


class Meter:
    """The records of one engine's steps; of drafts only if it `runs_rounds`."""

    def __init__(self, runs_rounds: bool):
        self.runs_rounds = runs_rounds
        self.num_rounds = 0  # of rows that the drafter's model drafted for
        self.total_overlap = 0.0  # of their first tokens
        self.has_warned = False  # of a low acceptance (cli/report.py)
        self.read_at = 0.0  # time.perf_counter of the last read

    def record(self, step, result: StepResult, decided: Sequence[Decided]) -> None:
        """Record an engine's Step, whose result has given these tokens to requests that had not
        ended before."""
        now = time.perf_counter()
        step_record = self.step_record(step, result, decided, now)
        for row, request, ids in decided:
            if len(request.tokens) == len(ids):  # its first ones
                request.prefill_s = sum(seconds_between(*pair) for pair in request.prefill_times)
                request.ttft_s = now - request.started
            if step_record is not None:
                request.steps.append(step_record)
                request.decode_s += step_record.seconds
            request.token_steps += [len(request.steps)] * len(ids)
            if self.runs_rounds:
                overlaps = result.overlaps_of(row)
                is_first = not result.times
                request.record_drafting(
                    len(ids), result.accepted[row], overlaps, result.drafted[row], is_first
                )
        if self.runs_rounds and decided:
            self.observe(step, result, decided)
        self.read_at = now

    def step_record(
        self, step, result: StepResult, decided: Sequence[Decided], now: float
    ) -> StepRecord | None:
        """The record of a step that was read at `now`; None if it ran the end of a prompt alone."""
        if not result.times:
            return None
        seconds = now - max(step.begin_s, self.read_at)
        draft_s, verify_s = step_times(result)
        positions = tuple(request.num_positions - len(ids) for _, request, ids in decided)
        return StepRecord(
            step.k,
            seconds,
            draft_s + step.draft_s,
            verify_s,
            positions,
            step.costs,
            step.runs_drafter,
        )

    def observe(self, step, result: StepResult, decided: Sequence[Decided]) -> None:
        """Tell each memory how a step went by its plan: Gains in all rows that go on, DraftLength
        in those whose draft's acceptance was not known beforehand: the drafter expected None."""
        for plan in step.plans:
            expected = dict(zip(plan.requests, plan.expected))
            planned = [one for one in decided if one.request in expected]
            gains = [len(ids) for _, request, ids in planned if request.ending is None]
            if gains:
                plan.memory.of(Gains).observe(plan, sum(gains) / len(gains))
            unforeseen = [one for one in planned if expected[one.request] is None]
            if plan.k and unforeseen:
                self.observe_round(plan, result, unforeseen)

    def observe_round(
        self, plan: MemoryPlan, result: StepResult, decided: Sequence[Decided]
    ) -> None:
        """Tell a memory the overlap at each position that was reached, of rows with a draft."""
        draft_length = plan.memory.draft_length
        drafted = [(row, len(ids)) for row, _, ids in decided if result.num_drafted[row]]
        draft_length.observe_share(len(drafted), len(decided))
        for row, num_tokens in drafted:
            overlaps = result.overlaps_of(row)
            self.num_rounds += 1
            # max(0.0, NaN) is 0.0: a draft's NaN is rejected.
            self.total_overlap += max(0.0, overlaps[0])
            for overlap in overlaps[:num_tokens]:
                draft_length.observe(overlap)
