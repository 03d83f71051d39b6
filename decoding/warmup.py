"""Before the first request: compile every step that will run, and measure the cost of steps.

    warm_up         compile and, on a GPU, record the steps of one sampling path
    calibrate       seconds of a plain step, of drafting and of verifying, in short and long texts

This file knows an engine's rows and steps, and no request. Both functions empty the slots at their
end.
"""

import itertools
import statistics
import time
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from decoding.costs import Costs
from decoding.planner import Step
from decoding.readback import step_times, synchronize
from decoding.sampling import Sampling
from tp import ranks_of

STEADY_S = 0.01
# In a context of more positions steps are measured at SHORT_LENGTH and at its end. With the
# tokens of a round SHORT_LENGTH lies within the first CUDA graph's 256 positions.
LONG_CONTEXT = 1024
SHORT_LENGTH = 200


def steps_to_compile(engine) -> Iterable[tuple[int, int, int]]:
    """(rows, positions, drafted tokens) of every step that will run: at each number of positions of
    a CUDA graph, or at a short and a long one."""
    S = engine.runner.S
    lengths = {2, S}
    if engine.runner.uses_cuda_graphs:
        lengths = {min(1 << i, S) for i in range(8, S.bit_length() + 8)}
    return itertools.product(engine.planner.row_counts, sorted(lengths), (0, *engine.planner.ks))


@torch.inference_mode()
def warm_up(engine, path: str) -> float:
    """Compile the engine's steps for a sampling path and run them at every length that has a CUDA
    graph. Also compile prefill for short and long chunks, at position 0, at later positions, and
    past a sliding window. Returns seconds."""
    assert not engine.requests, f"{len(engine.requests)} requests would lose their slots"
    start = time.perf_counter()
    if engine.runner.compile_prompts:
        warm_up_prompts(engine)
    records = engine.planner.records_logprobs
    num_runs = 3 if engine.runner.uses_cuda_graphs else 1  # CUDA graphs: warm up, record, replay
    try:
        for num_rows, length, k in steps_to_compile(engine):
            rows = engine.rows(0, num_rows)
            rows.batch.sampling_path = path
            rows.batch.pos.zero_()
            rows.batch.done.fill_(True)
            for _ in range(num_runs):
                engine.run(Step(rows, max(1, length - k), k, records_logprobs=records))
        synchronize(engine.runner.device)
    finally:
        engine.clear()
    return time.perf_counter() - start


def warm_up_prompts(engine) -> None:
    """Run short and long chunks of a prompt through every model with caches."""
    S = engine.max_seq_length
    rows = engine.rows(0, 1)
    runners = [rows.target]
    if len(engine.runners) > 1:
        runners.append(rows.drafter.runner)
    # Few and many quantized rows use different kernels; warm up both.
    long = 2 if engine.runner.uses_cuda_graphs else min(engine.runner.chunk, S)
    for runner, T in itertools.product(runners, sorted({2, long})):
        for begin in sorted({0, min(1, S - T), S - T}):
            inputs = runner.inputs(rows.batch.tokens, begin, begin + T)
            runner.hidden(*inputs)


class OtherTokens:
    """Runs a drafter, and proposes these tokens (B, k) in place of its own."""

    def __init__(self, drafter, tokens: Tensor):
        self.drafter = drafter
        self.tokens = tokens

    def propose(self, batch, plan):
        _, q = self.drafter.propose(batch, plan)
        return self.tokens, q


@torch.inference_mode()
def calibrate(
    engine,
    sampling: Sampling,
    lengths: Sequence[int],
    rounds: int,
) -> dict[int, dict[int, Costs]]:
    """Number of rows -> attended length -> medians of a plain step, of drafting and
    of verifying, measured in turn. `lengths`: how many positions are filled."""
    assert not engine.requests, f"{len(engine.requests)} requests would lose their slots"
    assert min(lengths) >= 1 and max(lengths) < engine.max_seq_length, (
        f"{lengths} positions filled leave no room in {engine.max_seq_length}"
    )
    try:
        costs = {
            num_rows: {
                engine.runner.bucket_length(length): costs_of_rows(
                    engine, num_rows, sampling, length, rounds
                )
                for length in lengths
            }
            for num_rows in engine.planner.row_counts
        }
    finally:
        engine.clear()
    # Draft lengths follow from costs, so that ranks share them.
    return ranks_of(engine.model).broadcast_object(costs)


def lengths_to_calibrate(max_seq_length: int) -> list[int]:
    """Numbers of filled positions that stand for all that texts may have: the middle of a short
    context, both ends of a long one."""
    if max_seq_length <= LONG_CONTEXT:
        return [max_seq_length // 2]
    return [SHORT_LENGTH, max_seq_length - 1]


def costs_of_rows(
    engine,
    num_rows: int,
    sampling: Sampling,
    length: int,
    rounds: int,
) -> Costs:
    """Time every K: repeat its step for STEADY_S and take the last run, because the first ones
    still find another step's code and data in the processor's caches."""
    rows = engine.rows(0, num_rows)
    batch = rows.batch
    batch.pos.fill_(length - 1)
    batch.done.fill_(True)
    batch.sampling_path = sampling.path
    batch.values.copy_(sampling.values)
    records = engine.planner.records_logprobs
    V = engine.model.config.vocab_size
    generator = torch.Generator().manual_seed(0)

    def run_step(k: int) -> tuple[float, float]:
        """Seconds of drafter and target, over new tokens: experts' costs depend on them."""
        tokens = torch.randint(V, batch.tokens.shape, generator=generator)
        drafted = torch.randint(V, (num_rows, k), generator=generator)  # (B, k)
        batch.tokens.copy_(tokens)
        drafter = rows.drafter
        if drafter is not None:
            drafter = OtherTokens(drafter, drafted.to(engine.runner.device))
        synchronize(engine.runner.device)
        step = Step(rows._replace(drafter=drafter), length, k, records_logprobs=records)
        result = engine.run(step)
        synchronize(engine.runner.device)
        return step_times(result)

    ks = (0, *engine.planner.ks)
    seconds = {k: min(sum(run_step(k)) for _ in range(2)) for k in ks}
    seconds = ranks_of(engine.model).broadcast_object(seconds)  # ranks must run the same steps
    times = {k: [] for k in ks}
    for _, k in itertools.product(range(rounds), ks):
        for _ in range(int(STEADY_S / seconds[k])):
            run_step(k)
        times[k].append(run_step(k))
    draft_s = {}
    target_s = {}
    for k, pairs in times.items():
        draft_times, target_times = zip(*pairs)
        draft_s[k] = statistics.median(draft_times)
        target_s[k] = statistics.median(target_times)
    del draft_s[0]
    decode_s = target_s.pop(0)
    return Costs(decode_s, draft_s, verify_s=target_s)
