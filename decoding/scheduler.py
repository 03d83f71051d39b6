"""Requests and slots: the waiting line, the choice of a slot, and the reuse of computed positions.

    Request             a prompt with its settings, its tokens, and how far it has come, which its
                        Status says
    Slot                a row of the caches: its request, and the ids behind its positions
    Scheduler           the waiting line, and the slot that shares the longest prefix with a new
                        request
    common_prefix       the number of leading ids that texts share

Keys and values of a position depend only on the ids up to it, so they are equal in slots with a
common prefix.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum

from decoding.errors import UserError
from decoding.readback import StepResult
from decoding.sampling import INVALID, PENALIZED, Sampling
from decoding.statistics import RequestStatistics

MIN_REUSED = 16  # shorter prefixes, such as BOS alone, are not worth a copy


def common_prefix(first: Sequence[int], *others: Sequence[int]) -> int:
    """The number of leading ids that all texts share."""
    length = len(first)
    for other in others:
        length = min(length, len(other))
        if first[:length] != other[:length]:
            length = next((i for i in range(length) if first[i] != other[i]), length)
    return length


class Status(Enum):
    """How far a request has come."""

    WAITING = "waiting"  # for a slot
    PREFILLING = "prefilling"  # chunks of its prompt run
    DECODING = "decoding"  # steps decide its tokens
    FINISHED = "finished"  # has a finish_reason


@dataclass(eq=False)
class Request(RequestStatistics):
    """One prompt on its way through an engine: its settings, its tokens, and how far it has come.
    What is measured of it stands in RequestStatistics."""

    id: int
    prompt: list[int]
    sampling: Sampling
    max_new_tokens: int
    stop_ids: Collection[int] = ()
    seed: int = 0
    may_draft: bool = True  # may its tokens be drafted?
    grammar: object = None  # of its answer: decoding/grammar.py
    num_prompt_logprobs: int | None = None  # likeliest tokens to record of the prompt; None: none

    status: Status = Status.WAITING
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    error: Exception | None = None

    slot: "Slot | None" = None
    num_computed: int = 0  # positions that the target's cache holds
    # Positions that are known to be finite there: a NaN reaches all positions of its chunk, since
    # a masked NaN still makes 0 * NaN = NaN.
    num_finite: int = 0
    num_launched: int = 0  # a lower bound on the tokens that the launched steps decide
    # Has a step been launched that did not draft for it? Then the draft's own cache lacks more than
    # the first pass of a round computes.
    is_draft_behind: bool = False
    memory: object = None  # what its drafts have learned: decoding/memory.py

    @property
    def path(self) -> str:
        """The path of its sampling, or the one whose code also reads masks."""
        return self.sampling.path if self.grammar is None else PENALIZED

    @property
    def noise_seed(self) -> int | None:
        """The seed of the random numbers that decide its tokens; None for greedy text, which needs
        none."""
        return None if self.sampling.is_greedy else self.seed

    @property
    def num_positions(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.prompt) + len(self.tokens)

    @property
    def end(self) -> int:
        """The index of the last token to decide."""
        return len(self.prompt) - 1 + self.max_new_tokens

    @property
    def ending(self) -> str | None:
        """The finish reason that is due after its last token; None if the text goes on."""
        if self.error is not None:
            return "error"
        if self.tokens and self.tokens[-1] in self.stop_ids:
            return "stop"
        return "length" if len(self.tokens) == self.max_new_tokens else None

    def cached_ids(self) -> list[int]:
        """The ids whose positions are in the caches and known to be finite."""
        return (self.prompt + self.tokens)[: self.num_finite]

    def append_tokens(self, result: StepResult, row: int) -> list[int]:
        """Append the tokens that a step decided in this row, and return them. Logits that are not
        finite end them, and set `error`."""
        ids = result.ids_of(row)
        if INVALID in ids:
            del ids[ids.index(INVALID) :]
            position = self.num_positions + len(ids)
            failed = getattr(self.grammar, "error", None)  # it masked every token
            self.error = failed or UserError(
                f"position {position}: the model's logits are not finite"
            )
        self.tokens += ids
        if ids:
            self.num_finite = self.num_positions - 1
        if result.top_logprobs is not None:
            self.top_logprobs += result.top_logprobs[row][: len(ids)]
            self.token_probs += result.token_probs[row][: len(ids)]
        return ids


@dataclass(eq=False)
class Slot:
    """One row of the caches. A free slot keeps the positions of its last request."""

    index: int
    request: Request | None = None
    ids: list[int] = field(default_factory=list)  # behind the positions of a free slot
    num_draft: int = 0  # leading positions that the draft's cache holds too
    num_written: int = 0  # positions that may not be zero
    keeps_prefixes: bool = True  # can another text take over the first positions of its caches?

    def cached_ids(self) -> list[int]:
        if not self.keeps_prefixes:
            return []
        return self.ids if self.request is None else self.request.cached_ids()

    def store(self, ids: list[int], num_written: int) -> None:
        """Free the slot. It keeps the positions of `ids`."""
        self.num_written = num_written
        self.ids = ids
        self.request = None  # last: Ctrl-C may come before it


class Scheduler:
    """The waiting requests, in order of arrival, and the slots. `keeps_prefixes`: as of
    model.KVCache."""

    def __init__(self, num_slots: int, keeps_prefixes: bool = True):
        self.slots = [Slot(index, keeps_prefixes=keeps_prefixes) for index in range(num_slots)]
        self.waiting: deque[Request] = deque()
        self.next_id = 0  # of a request

    def add(self, request: Request) -> None:
        """Put a new request in line."""
        self.next_id += 1
        self.waiting.append(request)

    @property
    def running(self) -> list[Request]:
        """The requests that have a slot, in the order of their slots."""
        return [slot.request for slot in self.slots if slot.request is not None]

    def decoding(self) -> list[Request]:
        """Requests that need more tokens than the launched steps decide."""
        return [
            request
            for request in self.running
            if request.status is Status.DECODING and request.num_launched < request.max_new_tokens
        ]

    def prefilling(self) -> Request | None:
        """A request whose prompt has started and not finished."""
        prompts = (request for request in self.running if request.status is Status.PREFILLING)
        return next(prompts, None)

    def admit(self) -> tuple[Request, Slot, int] | None:
        """Give the first waiting request a free slot. Returns (request, the slot to copy its prefix
        from, positions of the prefix); None if no request waits or no slot is free."""
        free = [slot for slot in self.slots if slot.request is None]
        if not self.waiting or not free:
            return None
        request = self.waiting.popleft()
        num_shared = self.count_shared(request)
        source = max(self.slots, key=num_shared.get)
        slot = min(free, key=lambda slot: cost_of(slot, num_shared[slot]))
        if num_shared[source] < num_shared[slot] + MIN_REUSED:
            source = slot
        slot.num_draft = min(source.num_draft, num_shared[source])
        slot.request = request
        request.slot = slot
        request.status = Status.PREFILLING
        return request, source, num_shared[source]

    def count_shared(self, request: Request) -> dict[Slot, int]:
        """Slot -> the length of the prefix that it shares with the request's prompt. The prompt's
        last token must run, and all of a prompt whose log-probabilities are recorded: slots keep no
        hidden states."""
        is_recorded = request.num_prompt_logprobs is not None
        prefix = [] if is_recorded else request.prompt[:-1]
        return {slot: common_prefix(prefix, slot.cached_ids()) for slot in self.slots}

    def release(self, request: Request, num_overrun: int) -> None:
        """Free the slot of a finished request. The slot keeps the positions that are known to be
        finite. `num_overrun`: positions past the text that launched steps or padding may
        have written."""
        slot = request.slot
        request.slot = None
        ids = [] if request.finish_reason == "error" else request.cached_ids()
        slot.store(ids, request.num_positions + num_overrun)


def cost_of(slot: Slot, num_shared: int) -> tuple[int, int, int]:
    """Order of free slots for a request: the one that loses the fewest positions, then that with
    the longest prefix, then the first."""
    num_lost = len(slot.ids) - num_shared
    return (num_lost if num_lost >= MIN_REUSED else 0, -num_shared, slot.index)
