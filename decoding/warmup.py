"""Before the first request: compile every step that will run, and measure the cost of steps.

    warm_up         compile and, on a GPU, record the steps of one kind of sampling
    calibrate       seconds of a plain step, of drafting and of verifying

This file knows an engine's rows and steps, and no request. Both functions empty the slots at their end.
"""

import itertools
import statistics
import time

import torch

from decoding.costs import Costs
from decoding.sampling import Sampling
from decoding.timing import step_times, synchronize

STEADY_S = 0.01


def compiled_row_counts(engine) -> list[int]:
    """The numbers of rows of compiled steps: one, and all."""
    return sorted({1, engine.batch_size})


@torch.inference_mode()
def warm_up(engine, kind: str) -> float:
    """Compile the engine's steps for `kind` and run them at every length of a CUDA graph. Compile prompts, short and
    long, at the start, later, and beyond a sliding window. Returns seconds."""
    start, S, uses_graphs = time.perf_counter(), engine.max_seq_length, engine.runner.uses_cuda_graphs
    first = engine.rows(0, 1)
    runners = [first.target] + ([first.drafter.runner] if len(engine.runners) > 1 else [])
    for runner in runners if engine.compile_prompts else ():
        # Few and many quantized rows use different kernels; warm up both.
        for T in sorted({2, 2 if uses_graphs else min(engine.chunk, S)}):
            for begin in sorted({0, min(1, S - T), S - T}):
                runner.hidden(*runner.inputs(first.state, begin, begin + T))
    lengths = (
        {min(1 << i, engine.runner.S) for i in range(8, engine.runner.S.bit_length() + 8)} if uses_graphs else {2, S}
    )
    for num_rows, length, k in itertools.product(compiled_row_counts(engine), sorted(lengths), (0, *engine.ks)):
        rows = engine.rows(0, num_rows)
        rows.state.kind = kind
        rows.state.pos.zero_(), rows.state.done.fill_(True)
        for _ in range(3 if uses_graphs else 1):  # CUDA graphs: warm up, record, replay
            engine.draft_lag = 1
            engine.run(rows, max(1, length - k), k)
    synchronize(engine.device)
    engine.clear()
    return time.perf_counter() - start


@torch.inference_mode()
def calibrate(engine, sampling: Sampling, length: int, rounds: int) -> dict[int, Costs]:
    """Number of rows, one and all -> medians of a plain step, of drafting and of verifying with `length` positions
    filled, measured in turn."""
    assert 1 <= length < engine.max_seq_length, f"{length} positions filled leave no room in {engine.max_seq_length}"
    costs = {n: costs_of_rows(engine, n, sampling, length, rounds) for n in compiled_row_counts(engine)}
    engine.clear()
    return engine.ranks.broadcast_object(costs)  # draft lengths follow from costs: ranks share them


def costs_of_rows(engine, num_rows: int, sampling: Sampling, length: int, rounds: int) -> Costs:
    """A short step that follows one of another kind is slower, because the processor's caches hold other code. So steps
    of a kind repeat for STEADY_S, and the last one counts."""
    rows, times = engine.rows(0, num_rows), {k: [] for k in (0, *engine.ks)}
    state = rows.state
    state.pos.fill_(length - 1), state.done.fill_(True)
    state.kind = sampling.kind
    state.values.copy_(sampling.values)
    V, random = engine.model.config.vocab_size, torch.Generator().manual_seed(0)

    def run_step(k: int) -> tuple[float, float]:
        """Seconds of drafter and target, over new tokens: experts' costs depend on them."""
        engine.draft_lag = 0
        state.tokens.copy_(torch.randint(V, state.tokens.shape, generator=random))
        other = torch.randint(V, (len(state.pos), k), generator=random).to(engine.device)  # (B, k)
        synchronize(engine.device)
        step = engine.run(rows, length, k, other=other)
        synchronize(engine.device)
        return step_times(step)

    # Ranks must run the same steps.
    seconds = engine.ranks.broadcast_object({k: min(sum(run_step(k)) for _ in range(2)) for k in times})
    for _, k in itertools.product(range(rounds), times):
        for _ in range(int(STEADY_S / seconds[k])):
            run_step(k)
        times[k].append(run_step(k))
    # The times of K = 0, plain steps, are those of the target's pass, and of a drafter that reads its token.
    draft, verify = ({k: statistics.median(s[part] for s in times[k]) for k in times} for part in (0, 1))
    return Costs(verify.pop(0), draft, verify)
