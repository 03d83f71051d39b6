"""Results and times of steps: on the device, on their way to the host, and in records for reports.

    StepResult              the tensors of a step, or its lists on the host, and its marks
    mark, step_times        a point in time on the device; seconds between points
    Readback                results on their way to the host, read a few steps late on a GPU
    Timing, StepRecord, TokenRecord    records of several requests, which cli/report.py turns into rates

This file knows no model and no sampling. The device waits only for a result that the host must read.
"""

import itertools
import time
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


def host_lag(device: torch.device) -> int:
    """Steps that a device may run ahead of the host's reading."""
    return 2 if device.type == "cuda" else 0


class StepResult(NamedTuple):
    """The decisions of a step, as tensors or lists. `times` marks its start, the end of drafting, of verifying and of
    the step; it is empty for a prompt's first token."""

    k: int  # tokens drafted
    times: tuple
    tokens: list[list[int]] | Tensor
    accepted: list[int] | Tensor
    overlap: list[list[float]] | Tensor
    can_draft: list[bool] | Tensor
    top_logprobs: list | Tensor | None = None  # (B, K + 1, 1 + n, 2) of ids and log-probabilities, if recorded
    token_probs: list | Tensor | None = None  # (B, K + 1, 2) p and q of the decided tokens, if recorded


def mark(device: torch.device):
    """A point in time on the device: seconds on a CPU, an event on a GPU."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def step_times(step: StepResult) -> tuple[float, float]:
    """(seconds of the drafter, seconds of the target's pass) of a finished step."""
    draft, verify, update = (seconds_between(begin, end) for begin, end in itertools.pairwise(step.times))
    return draft + update, verify


def seconds_between(begin, end) -> float:
    """Seconds between two marks that the device has passed."""
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class StepRecord(NamedTuple):
    """One step after the prompt."""

    k: int
    seconds: float
    draft_s: float
    verify_s: float  # the full pass of a plain step
    positions: tuple[int, ...]  # decided positions of each active row before the step
    costs: object = None  # calibrated decoding.costs.Costs for this number of rows and threads


class TokenRecord(NamedTuple):
    """Token `index` of a round that drafted k tokens for its row (0: no draft) and accepted so many. overlap: sum of
    min(p, q) at this position, 0 beyond k. first: the token after the prompt, which no round decided."""

    index: int
    k: int
    accepted: int
    overlap: float
    first: bool


@dataclass
class Timing:
    """Records of several requests, one per row. Times in seconds."""

    requests: list = field(default_factory=list)  # scheduler.Request

    @property
    def records(self) -> list[StepRecord]:
        """The steps of all rows, without repetition."""
        return list({id(step): step for request in self.requests for step in request.steps}.values())

    decoded = property(lambda self: [len(request.tokens) for request in self.requests])
    cached = property(lambda self: [request.num_reused for request in self.requests])
    prompt_tokens = property(lambda self: sum(len(r.prompt) - r.num_reused for r in self.requests))  # that ran
    prefill_s = property(lambda self: sum(request.prefill_s for request in self.requests))
    row_s = property(lambda self: [request.decode_s for request in self.requests])
    decode_s = property(lambda self: sum(step.seconds for step in self.records))
    tokens = property(lambda self: [request.token_records for request in self.requests])
    top_logprobs = property(lambda self: [request.top_logprobs for request in self.requests])
    token_probs = property(lambda self: [request.token_probs for request in self.requests])
    steps = property(lambda self: len(self.records))
    draft_s = property(lambda self: sum(record.draft_s for record in self.records))
    verify_s = property(lambda self: sum(record.verify_s for record in self.records if record.k))


class Readback:
    """Results on their way to the host. On a GPU they are read a few steps late, from pinned copies, so that the device
    does not wait for the host."""

    def __init__(self, device: torch.device, timeout_s: float | None = None):
        self.on_gpu, self.timeout_s = device.type == "cuda", timeout_s
        self.lag = host_lag(device)
        self.waiting: deque[tuple[StepResult, object, object]] = deque()

    @property
    def unread(self) -> int:
        """A bound on the tokens of a row that the host has yet to read."""
        return sum(step.k + 1 for step, *_ in self.waiting)

    def send(self, step: StepResult, label: object) -> None:
        """Queue a result; `receive` returns `label` with it."""
        tensors, event = [tensor for tensor in step[2:] if tensor is not None], None
        if self.on_gpu:
            copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in tensors]
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(tensors[0].device))
        else:
            copies = [tensor.clone() for tensor in tensors]
        self.waiting.append((StepResult(step.k, step.times, *copies), event, label))

    def receive(self) -> tuple[object, StepResult]:
        """(label, result as lists) of the oldest step."""
        step, event, label = self.waiting.popleft()
        if event is not None and self.timeout_s is None:
            event.synchronize()
        elif event is not None:  # a replayed CUDA graph would wait for other ranks forever
            wait_for(event, self.timeout_s)
        return label, StepResult(step.k, step.times, *(copy.tolist() for copy in step[2:] if copy is not None))


def wait_for(event, timeout_s: float) -> None:
    """Wait until the device has passed the event. DistError after `timeout_s`."""
    end = time.monotonic() + timeout_s
    while not event.query():
        if time.monotonic() > end:
            raise dist.DistError(f"nothing came in {timeout_s} s")
