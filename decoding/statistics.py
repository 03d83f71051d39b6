"""Figures of requests and steps, which cli/report.py turns into rates. This file needs no torch.

StepRecord          one step after the prompt: its seconds, and its cost as calibrated
TokenRecord         one token of a drafted request: was it drafted, and was it accepted?
RequestStatistics   what was measured and recorded of one request
Timing              the figures of several requests together
"""

from dataclasses import dataclass, field
from typing import NamedTuple


class StepRecord(NamedTuple):
    """One step after the prompt."""

    k: int
    seconds: float
    draft_s: float
    verify_s: float  # the full pass of a plain step
    positions: tuple[int, ...]  # decided positions of each active row before the step
    costs: object = None  # calibrated decoding.costs.Costs for this number of rows and threads
    runs_drafter: bool = True  # is a draft computed whose acceptance was not known?


class TokenRecord(NamedTuple):
    """Token number `index` of a round. The round drafted k tokens for this row (0: none) and
    accepted `accepted` of them. overlap: how probable it was at this position that a draft is kept,
    sum of min(p, q) or what a decoding.rule.Rule `expected`, 0 past the draft. first: this is the
    token after the prompt, which no round decided. rejected: at the token that corrects a draft,
    the drafted tokens from there on: one that was rejected, and those behind it, which went with
    it."""

    index: int
    k: int
    accepted: int
    overlap: float
    first: bool
    rejected: tuple[int, ...] = ()


@dataclass(eq=False, kw_only=True)
class RequestStatistics:
    """What is measured and recorded of one request. Times are in seconds; prefill_s and decode_s
    are those of its passes."""

    started: float = 0.0  # time.perf_counter as it took a slot
    num_reused: int = 0  # positions of its prompt that another request had computed
    prefill_times: list[tuple] = field(default_factory=list)  # (begin, end) of each chunk
    prefill_s: float = 0.0
    ttft_s: float = 0.0  # from `started` to the first token
    decode_s: float = 0.0
    steps: list[StepRecord] = field(default_factory=list)  # after the prompt, shared by rows
    # For each token the number of the step that decided it; 0 is the end of the prompt.
    token_steps: list[int] = field(default_factory=list)
    token_records: list[TokenRecord] = field(default_factory=list)  # with a drafter
    prompt_logprobs: list[list] = field(default_factory=list)  # of the prompt from its second token
    top_logprobs: list[list] = field(default_factory=list)
    token_probs: list[list[float]] = field(default_factory=list)

    def record_drafting(
        self,
        num_tokens: int,
        accepted: int,
        overlaps: list[float],
        drafted: list[int],
        first: bool,
    ) -> None:
        """Record the tokens that a step decided. `overlaps`: of each drafted position, whose
        tokens `drafted` begins with."""
        k = len(overlaps)
        for index in range(num_tokens):
            overlap = overlaps[index] if index < k else 0.0
            rejected = tuple(drafted[index:k]) if index == accepted else ()
            record = TokenRecord(index, k, accepted, overlap, first, rejected)
            self.token_records.append(record)


@dataclass
class Timing:
    """Records of several requests, one per row. Times in seconds."""

    requests: list = field(default_factory=list)  # scheduler.Request

    @property
    def records(self) -> list[StepRecord]:
        """The steps of all rows, without repetition."""
        return list(
            {id(step): step for request in self.requests for step in request.steps}.values()
        )

    cached = property(lambda self: [request.num_reused for request in self.requests])
    # Only tokens that ran count; reused ones do not.
    prompt_tokens = property(lambda self: sum(len(r.prompt) - r.num_reused for r in self.requests))
    prefill_s = property(lambda self: sum(request.prefill_s for request in self.requests))
    decode_s = property(lambda self: sum(step.seconds for step in self.records))
    steps = property(lambda self: len(self.records))
    draft_s = property(lambda self: sum(record.draft_s for record in self.records))
    verify_s = property(lambda self: sum(record.verify_s for record in self.records if record.k))
