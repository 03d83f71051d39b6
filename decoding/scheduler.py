"""Requests and slots: the waiting line, the choice of a slot, and the reuse of computed positions.

    Request             a prompt with its settings, tokens and measured times
    Slot                a row of the caches: its request, and the ids behind its positions
    Scheduler           the waiting line, and the slot that shares the longest prefix with a new request
    common_prefix       the number of leading ids that texts share

Keys and values of a position depend only on the ids up to it, so they are equal in slots with a common prefix.
This file holds no tensor and knows no model.
"""

import itertools
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from decoding.sampling import INVALID, PENALIZED, Sampling
from decoding.slots import NO_TOKEN
from decoding.timing import StepRecord, StepResult, TokenRecord, seconds_between

MIN_REUSED = 16  # shorter prefixes, such as BOS alone, are not worth a copy


def common_prefix(first: Sequence[int], *others: Sequence[int]) -> int:
    """The number of leading ids that all texts share."""
    lengths = (next((i for i, (x, y) in enumerate(zip(first, other)) if x != y), len(other)) for other in others)
    return min((len(first), *lengths))


@dataclass(eq=False)
class Request:
    """One prompt on its way through an engine. Times are in seconds; prefill_s and decode_s are those of its passes."""

    id: int
    prompt: list[int]
    sampling: Sampling
    max_new_tokens: int
    stop_ids: Collection[int] = ()
    seed: int = 0
    draft: bool = True  # may its tokens be drafted?
    is_long: tuple[bool, ...] = ()  # for each model with caches: does longrope take it for a long text?
    short_length: int | None = None  # longrope: the tokens after which its short text is computed anew as a long one
    grammar: object = None  # of its answer: decoding/grammar.py
    num_prompt_logprobs: int | None = None  # likeliest tokens to record of the prompt; None: none

    slot: "Slot | None" = None
    num_computed: int = 0  # prompt positions that the target's cache holds
    num_reused: int = 0  # of num_computed: positions from another request
    tokens: list[int] = field(default_factory=list)
    is_active: bool = False  # do steps decide its tokens?
    is_recomputing: bool = False  # are its positions being computed anew, as those of a long text?
    num_launched: int = 0  # a minimum of the tokens that launched steps decide
    draft_lag: int = 0  # a bound on the decided positions that the draft's cache lacks after the launched steps
    can_draft: bool = True  # did the drafter have a proposal?
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    error: Exception | None = None
    ending: tuple | None = None  # arguments of Engine.finish, due after the last token

    started: float = 0.0  # time.perf_counter as it took a slot
    prefill_marks: list[tuple] = field(default_factory=list)  # (begin, end) of each chunk on the device
    prefill_s: float = 0.0
    ttft_s: float = 0.0  # from `started` to the first token
    decode_s: float = 0.0
    steps: list[StepRecord] = field(default_factory=list)  # after the prompt, shared with other rows
    token_records: list[TokenRecord] = field(default_factory=list)  # with a drafter
    prompt_logprobs: list[list] = field(default_factory=list)  # of the prompt from its second token
    top_logprobs: list[list] = field(default_factory=list)
    token_probs: list[list[float]] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """The kind of its sampling, or the one whose code also reads masks."""
        return self.sampling.kind if self.grammar is None else PENALIZED

    @property
    def num_positions(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.prompt) + len(self.tokens)

    @property
    def end(self) -> int:
        """The index of its last token, or of the last one that a short text decides."""
        end = len(self.prompt) - 1 + self.max_new_tokens
        return end if self.short_length is None else min(end, self.short_length)

    @property
    def max_position(self) -> int:
        """The final position that longrope judges its length by."""
        return self.end if self.short_length is None else self.short_length - 1

    @property
    def outgrows_short_text(self) -> bool:
        return self.short_length is not None and self.num_positions > self.short_length

    @property
    def is_decoding(self) -> bool:
        return self.is_active and self.finish_reason is None

    def cached_ids(self) -> list[int]:
        """The ids whose positions are in the caches and finite: all but the last token. Before the first token is read,
        only the reused positions are known to be finite."""
        if self.is_recomputing:
            return []
        return self.prompt + self.tokens[:-1] if self.tokens else self.prompt[: self.num_reused]

    def record(self, step: StepRecord | None, now: float) -> None:
        """Record a step that was read at `now`; None if it ran the end of the prompt alone."""
        if not self.tokens:
            self.num_computed = len(self.prompt)
            self.prefill_s = sum(seconds_between(*marks) for marks in self.prefill_marks)
            self.ttft_s = now - self.started
        if step is not None:
            self.steps.append(step)
            self.decode_s += step.seconds

    def receive(self, step: StepResult, row: int, draft_length) -> list[int]:
        """Append the tokens that a step decided in this row, and set `ending` if the last one ends the text.
        `draft_length` (speculative.DraftLength) observes the acceptance; None without a drafter."""
        ids = list(itertools.takewhile(NO_TOKEN.__ne__, step.tokens[row]))
        # A row's draft may be shorter than the round's.
        k = sum(x != -1 for x in step.overlap[row][: step.k]) if step.accepted[row] >= 0 else 0
        self.can_draft = step.can_draft[row]
        if INVALID in ids:
            ids = ids[: ids.index(INVALID)]
            position = self.num_positions + len(ids)
            self.ending = "error", ValueError(f"position {position}: the model's logits are not finite")
        self.is_recomputing = self.is_recomputing and not ids
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
    """A step on the device: the requests that it advances, and its start."""

    requests: list[tuple[int, Request]]  # (row of the step, request)
    at: float = 0.0  # its start, time.perf_counter
    draft_s: float = 0.0  # seconds that the host drafted before it


@dataclass(eq=False)
class Slot:
    """One row of the caches. A free slot keeps the positions of its last request."""

    index: int
    request: Request | None = None
    ids: list[int] = field(default_factory=list)  # behind the positions of a free slot
    num_draft: int = 0  # positions in the draft's cache
    num_written: int = 0  # positions that may not be zero
    is_long: tuple[bool, ...] = ()  # of its last request

    def cached_ids(self) -> list[int]:
        return self.ids if self.request is None else self.request.cached_ids()

    def num_draft_positions(self) -> int:
        """The number of leading `cached_ids` whose positions the draft's cache holds too."""
        if self.request is None or not self.request.tokens:
            return min(self.num_draft, len(self.cached_ids()))
        return max(0, len(self.cached_ids()) - self.request.draft_lag)


class Scheduler:
    """The waiting requests, in order of arrival, and the slots."""

    def __init__(self, num_slots: int):
        self.slots = [Slot(index) for index in range(num_slots)]
        self.waiting: deque[Request] = deque()

    def decoding(self) -> list[Request]:
        """Requests that need more tokens than the launched steps decide, in the order of their slots."""
        running = (slot.request for slot in self.slots if slot.request is not None)
        return [request for request in running if request.is_decoding and request.num_launched < request.max_new_tokens]

    def prefilling(self) -> Request | None:
        """A request whose prompt has started and not finished."""
        running = (slot.request for slot in self.slots if slot.request is not None)
        return next((request for request in running if not request.is_active), None)

    def admit(self) -> tuple[Request, Slot, int] | None:
        """Give the first waiting request a free slot. Returns (request, the slot to copy its prefix from, positions of
        the prefix); None if no request waits or no slot is free."""
        free = [slot for slot in self.slots if slot.request is None]
        if not self.waiting or not free:
            return None
        request = self.waiting.popleft()
        num_shared, longest = dict.fromkeys(self.slots, 0), 0
        for slot in self.slots:
            if slot.request is None or longest < len(request.prompt) - 1:  # a busy slot could not share more
                num_shared[slot] = self.count_shared(request, slot)
                longest = max(longest, num_shared[slot])
        num_lost = {slot: len(slot.ids) - num_shared[slot] for slot in free}
        # Prefer the slot that loses the fewest positions, then the longest prefix, then the first slot.
        slot = min(free, key=lambda s: (num_lost[s] if num_lost[s] >= MIN_REUSED else 0, -num_shared[s], s.index))
        source = max(self.slots, key=num_shared.get)
        source = source if num_shared[source] >= num_shared[slot] + MIN_REUSED else slot
        slot.num_draft = min(source.num_draft_positions(), num_shared[source])
        request.slot, slot.request, slot.is_long = slot, request, request.is_long
        return request, source, num_shared[source]

    def release(self, request: Request, num_scratch: int) -> None:
        """Free the slot of a finished request. The slot keeps the positions that are known to be finite. `num_scratch`:
        positions behind the text that the request's steps may have written."""
        slot, request.slot = request.slot, None
        slot.num_written = max(request.num_computed, request.num_positions) + num_scratch
        slot.num_draft = slot.num_draft_positions() if request.finish_reason != "error" else 0
        slot.ids, slot.request = [] if request.finish_reason == "error" else request.cached_ids(), None

    def count_shared(self, request: Request, slot: Slot) -> int:
        """The length of the prefix that prompt and slot share. A prompt's last token must run, and
        all of a prompt whose log-probabilities are recorded: slots keep no hidden states."""
        if slot.is_long != request.is_long or request.num_prompt_logprobs is not None:
            return 0
        return common_prefix(request.prompt[:-1], slot.cached_ids())
