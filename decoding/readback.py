"""Decisions of steps, on their way from the device to the host.

    StepResult              the tensors of a step, or its lists on the host, and its marks in time
    timestamp, step_times   a point in time on the device; seconds between such points
    Readback                results that the host has yet to read; on a GPU it reads a few steps
                            late

The device idles only where the host must read a result before it can launch the next step.
"""

import time
from collections import deque
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


def host_lag(device: torch.device) -> int:
    """How many steps may be in flight: launched, but not yet read by the host."""
    return 2 if device.type == "cuda" else 0


class StepResult(NamedTuple):
    """The decisions of a step, as tensors or lists. `times` marks its start, the end of drafting
    and of the step; it is empty for a prompt's first token."""

    times: tuple
    tokens: list[list[int]] | Tensor
    num_decided: list[int] | Tensor
    num_drafted: list[int] | Tensor
    accepted: list[int] | Tensor
    overlap: list[list[float]] | Tensor
    drafted: list[list[int]] | Tensor
    # If recorded: ids and log-probabilities (B, K + 1, 1 + n, 2), and p and q of the decided and
    # of the drafted tokens (B, K + 1, 4).
    top_logprobs: list | Tensor | None = None
    token_probs: list | Tensor | None = None

    @classmethod
    def of(cls, batch, times: tuple = (), records_logprobs: bool = False) -> "StepResult":
        """What a step left in a Batch."""
        logprobs = (batch.top_logprobs, batch.token_probs) if records_logprobs else ()
        drafting = (batch.num_drafted, batch.accepted, batch.overlap, batch.drafted)
        return cls(times, batch.out, batch.num_decided, *drafting, *logprobs)

    def ids_of(self, row: int) -> list[int]:
        """The tokens that a row got."""
        return self.tokens[row][: self.num_decided[row]]

    def overlaps_of(self, row: int) -> list[float]:
        """The overlap of each position that was drafted for a row, whose draft may be shorter than
        the round's."""
        return self.overlap[row][: self.num_drafted[row]]


def timestamp(device: torch.device):
    """A point in time on the device: seconds on a CPU, an event on a GPU."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def step_times(result: StepResult) -> tuple[float, float]:
    """(seconds of the drafter, seconds of the target's pass) of a finished step."""
    begin, drafted, end = result.times
    return seconds_between(begin, drafted), seconds_between(drafted, end)


def seconds_between(begin, end) -> float:
    """Seconds between two marks that the device has passed."""
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Readback:
    """Results on their way to the host. On a GPU they are read a few steps late, from pinned
    copies, so that the device does not wait for the host."""

    def __init__(self, device: torch.device, timeout_s: float | None = None):
        self.device = device
        self.timeout_s = timeout_s
        self.host_lag = host_lag(device)
        self.in_flight: deque[tuple[StepResult, object, object]] = deque()

    def __len__(self) -> int:
        """The number of steps that the host has yet to read."""
        return len(self.in_flight)

    @property
    def steps(self) -> list:
        """The steps that the host has yet to read."""
        return [step for *_, step in self.in_flight]

    def send(self, result: StepResult, step: object) -> None:
        """Queue the result of a step; `receive` returns both."""
        copies = [host_copy(tensor) for tensor in result[1:] if tensor is not None]
        result = StepResult(result.times, *copies)
        self.in_flight.append((result, timestamp(self.device), step))

    def receive(self) -> tuple[object, StepResult]:
        """(step, its result as lists) of the oldest step."""
        result, event, step = self.in_flight.popleft()
        if not isinstance(event, float):
            wait_for(event, self.timeout_s)
        lists = [copy.tolist() for copy in result[1:] if copy is not None]
        return step, StepResult(result.times, *lists)

    def clear(self) -> None:
        """Forget the results that the host has not read."""
        self.in_flight.clear()


def host_copy(x: Tensor) -> Tensor:
    """A copy on the host, which is complete once the device has passed an event recorded after this
    call."""
    copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
    return copy.copy_(x, non_blocking=x.is_cuda)  # elsewhere no event tells when it is complete


def wait_for(event, timeout_s: float | None) -> None:
    """Wait until the device has passed the event. DistError after `timeout_s`, if there is one: a
    replayed CUDA graph would wait for other ranks forever."""
    if timeout_s is None:
        event.synchronize()
        return
    end = time.monotonic() + timeout_s
    while not event.query():
        if time.monotonic() > end:
            raise dist.DistError(f"nothing came in {timeout_s} s")
