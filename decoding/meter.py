"""What is measured and learned of a step, once the host has read what it decided.

    Meter       makes the records of steps and tokens, and tells the drafter and DraftLength how
                drafting went

No step waits for this file. What the next steps do follows from it only through a memory's
DraftLength and a drafter's figures, which choose how many tokens are drafted.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

from decoding.memory import DraftPlan
from decoding.readback import StepResult, seconds_between, step_times
from decoding.scheduler import Request
from decoding.statistics import StepRecord


class Decided(NamedTuple):
    """The tokens that a step decided for the request in one of its rows."""

    row: int
    request: Request
    ids: list[int]


class Meter:
    """The records of one engine's steps. `drafter`: drafts.base.Drafter; without `runs_rounds`
    nothing is recorded of drafts."""

    def __init__(self, drafter, runs_rounds: bool):
        self.drafter = drafter
        self.runs_rounds = runs_rounds
        self.read_at = 0.0  # time.perf_counter of the last read

    def record(self, step, result: StepResult, decided: Sequence[Decided]) -> None:
        """Record an engine's Step, whose result has given these tokens to requests that had not
        ended before."""
        now = time.perf_counter()
        record = self.step_record(step, result, decided, now)
        for row, request, ids in decided:
            if len(request.tokens) == len(ids):  # its first ones
                times = request.prefill_times
                request.prefill_s = sum(seconds_between(*pair) for pair in times)
                request.ttft_s = now - request.started
            if record is not None:
                request.steps.append(record)
                request.decode_s += record.seconds
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
            step.runs_model,
        )

    def observe(self, step, result: StepResult, decided: Sequence[Decided]) -> None:
        """Tell the drafter and DraftLength how a step went, memory by memory."""
        for plan in step.plans:
            mine = [row for row in decided if row.request in plan.requests]
            drawn = [row for row in mine if row.request not in plan.suffix_requests]
            if plan.k and drawn:
                self.observe_round(plan, result, drawn)
            if mine and result.times:
                num_tokens = sum(len(ids) for *_, ids in mine)
                self.drafter.observe_step(plan, num_tokens / len(mine))

    def observe_round(
        self, plan: DraftPlan, result: StepResult, decided: Sequence[Decided]
    ) -> None:
        """Tell the drafter and DraftLength how a round went. `decided`: the rows that the drafter's
        model drafted for, or all of them if the drafter has no model."""
        draft_length = plan.memory.draft_length
        drafted = [(row, len(ids)) for row, _, ids in decided if result.accepted[row] >= 0]
        draft_length.drafted(len(drafted), len(decided))
        for row, num_tokens in drafted:
            overlaps = result.overlaps_of(row)
            self.drafter.observe(overlaps[0])
            for overlap in overlaps[:num_tokens]:
                draft_length.observe(overlap)
