"""Requests, and the slots that they decode in: who waits, who takes which slot, which positions are computed already.

    Request             a prompt and its settings, then its tokens and the facts that reports are made of
    Slot                a row of the caches: whose it is, and the ids of the positions that it holds
    Scheduler           the waiting line, and the slot that shares the longest beginning with a newcomer
    common_prefix       leading ids that two texts have in common

Keys and values of a position follow from the ids up to it, so a slot whose ids begin as a prompt does holds what the
beginning of that prompt would compute. This file holds no tensor and knows no model.
"""

import itertools
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sampling import INVALID, Sampling
from state import NO_TOKEN
from timing import StepRecord, StepResult, TokenRecord, seconds_between

MIN_REUSED = 16  # positions below which a shared beginning, such as BOS alone, decides nothing and is not copied


def common_prefix(first: Sequence[int], *others: Sequence[int]) -> int:
    """How many leading ids agree in all texts."""
    ends = (next((i for i, (x, y) in enumerate(zip(first, other)) if x != y), len(other)) for other in others)
    return min((len(first), *ends))


@dataclass(eq=False)
class Request:
    """One prompt on its way through an engine. Seconds; `prefill_s` and `decode_s` count its own passes alone."""

    id: int
    prompt: list[int]
    sampling: Sampling
    max_new_tokens: int
    stop_ids: Collection[int] = ()
    seed: int = 0
    draft: bool = True  # may its tokens be drafted?
    is_long: tuple[bool, ...] = ()  # per model with caches: is it rotated as a long text, by longrope?

    slot: "Slot | None" = None
    num_computed: int = 0  # prompt positions that the target's cache holds
    num_reused: int = 0  # of these, positions that another request had computed
    tokens: list[int] = field(default_factory=list)
    num_launched: int = 0  # tokens that the launched steps decide at least
    can_draft: bool = True  # did the drafter have something to propose?
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    error: Exception | None = None
    ending: tuple | None = None  # finish_reason, and perhaps the error, that the last read token asks for

    arrived: float = 0.0  # points in time of time.perf_counter
    started: float = 0.0
    prefill_marks: list[tuple] = field(default_factory=list)  # when each chunk began and ended on the device
    prefill_s: float = 0.0
    ttft_s: float = 0.0  # from taking a slot to the first token
    decode_s: float = 0.0
    steps: list[StepRecord] = field(default_factory=list)  # after the prompt, shared with its neighbours
    token_records: list[TokenRecord] = field(default_factory=list)  # with a drafter
    top_logprobs: list[list] = field(default_factory=list)
    token_probs: list[list[float]] = field(default_factory=list)

    @property
    def num_positions(self) -> int:
        """Prompt and tokens."""
        return len(self.prompt) + len(self.tokens)

    @property
    def is_decoding(self) -> bool:
        return self.num_launched > 0 and self.finish_reason is None

    def cached_ids(self) -> list[int]:
        """The ids whose positions the caches hold: no layer has seen the last token."""
        return self.prompt[: self.num_computed] + self.tokens[:-1]

    def first_token(self, now: float) -> None:
        """The prompt has run, and its first token is read."""
        self.prefill_s = sum(seconds_between(*marks) for marks in self.prefill_marks)
        self.ttft_s = now - self.started

    def record(self, step: StepRecord) -> None:
        self.steps.append(step)
        self.decode_s += step.seconds

    def receive(self, step: StepResult, row: int, draft_length) -> list[int]:
        """Take the tokens that a step decided in this row, and say in `ending` whether the last of them ends the text.
        `draft_length` (speculative.DraftLength) hears how well the draft fitted; None without a drafter."""
        ids = list(itertools.takewhile(NO_TOKEN.__ne__, step.tokens[row]))
        k = step.k if step.accepted[row] >= 0 else 0
        self.can_draft = step.can_draft[row]
        if INVALID in ids:
            ids = ids[: ids.index(INVALID)]
            position = self.num_positions + len(ids)
            self.ending = "error", ValueError(f"position {position}: the model's logits are not finite")
        for index, id in enumerate(ids):
            self.tokens.append(id)
            if step.top_logprobs is not None:
                self.top_logprobs.append(step.top_logprobs[row][index])
                self.token_probs.append(step.token_probs[row][index])
            if draft_length is not None:
                overlap = step.overlap[row][index] if index < k else 0.0
                self.token_records.append(TokenRecord(index, k, step.accepted[row], overlap, first=not step.times))
                if index < k:
                    draft_length.observe(overlap)
        if ids and self.ending is None:
            if ids[-1] in self.stop_ids:
                self.ending = ("stop",)
            elif len(self.tokens) == self.max_new_tokens:
                self.ending = ("length",)
        return ids


class Launch(NamedTuple):
    """A step that the device has been given: whose rows it advances, and when."""

    requests: list[tuple[int, Request]]  # (row of the step, request)
    at: float = 0.0


@dataclass(eq=False)
class Slot:
    """One row of the caches. Free, it still holds the positions of its last request."""

    index: int
    request: Request | None = None
    ids: list[int] = field(default_factory=list)
    num_draft: int = 0  # positions that the draft's own cache holds
    num_written: int = 0  # positions that may hold something other than zeros
    is_long: tuple[bool, ...] = ()

    def cached_ids(self) -> list[int]:
        return self.ids if self.request is None else self.request.cached_ids()


class Scheduler:
    """Requests in the order of their arrival, and the slots."""

    def __init__(self, num_slots: int):
        self.slots = [Slot(index) for index in range(num_slots)]
        self.waiting: deque[Request] = deque()

    def decoding(self) -> list[Request]:
        """Requests that want another token than those that the launched steps decide, in the order of their slots."""
        running = (slot.request for slot in self.slots if slot.request is not None)
        return [request for request in running if request.is_decoding and request.num_launched < request.max_new_tokens]

    def prefilling(self) -> Request | None:
        """The request that the next pass over a prompt belongs to: one that has begun, before one that takes a slot."""
        running = (slot.request for slot in self.slots if slot.request is not None)
        return next((request for request in running if not request.num_launched), None)

    def admit(self, draft_lag: int) -> tuple[Request, Slot] | None:
        """Give the first waiting request a free slot: (request, the slot that holds its prompt's beginning). None
        if nobody waits, or no slot is free. `draft_lag`: positions that a draft's own cache may be behind."""
        free = [slot for slot in self.slots if slot.request is None]
        if not self.waiting or not free:
            return None
        request = self.waiting.popleft()
        shared, longest = dict.fromkeys(self.slots, 0), 0
        for slot in self.slots:
            if slot.request is None or longest < len(request.prompt) - 1:  # another busy slot could not hold more
                shared[slot] = self.shared(request, slot)
                longest = max(longest, shared[slot])
        lost = {slot: len(slot.ids) - shared[slot] for slot in free}
        # The slot that loses least; then the one that shares most; then the first, so that busy slots stand together.
        slot = min(free, key=lambda s: (lost[s] if lost[s] >= MIN_REUSED else 0, -shared[s], s.index))
        source = max(self.slots, key=shared.get)
        source = source if shared[source] >= shared[slot] + MIN_REUSED else slot
        request.slot, request.num_computed, request.num_reused = slot, shared[source], shared[source]
        num_draft = source.num_draft if source.request is None else max(0, len(source.cached_ids()) - draft_lag)
        slot.num_draft = min(num_draft, shared[source])
        slot.request, slot.is_long = request, request.is_long
        return request, source

    def release(self, request: Request, draft_lag: int, num_scratch: int) -> None:
        """Free the slot of a request that has ended. The slot goes on holding its positions, unless they may be NaN.
        `num_scratch`: positions behind a text that its steps may have written."""
        slot, request.slot = request.slot, None
        slot.num_written = max(request.num_computed, request.num_positions) + num_scratch
        slot.ids = [] if request.finish_reason == "error" else request.cached_ids()
        slot.num_draft, slot.request = max(0, len(slot.ids) - draft_lag), None

    def shared(self, request: Request, slot: Slot) -> int:
        """Leading positions of the prompt that the slot holds; the last token of a prompt must run."""
        prompt, ids = request.prompt[:-1], slot.cached_ids()
        return common_prefix(prompt, ids) if slot.is_long == request.is_long else 0
