"""How an engine's prompts run: chunk by chunk, through the target and the drafter's own cache.

    next_prompt     the request whose prompt runs next, in its slot
    prefill         runs a chunk of it; the last one decides the first token
    prefill_draft   computes what the drafter's own cache lacks, of prompts and of later tokens
    lacks_positions, count_draft_positions
                    whether a step needs that; how far the cache reaches after a round
    record_prompt   the log-probabilities of a prompt

The functions write to an engine's slots, and engine.py calls them.
"""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from decoding.logits import top_logprobs
from decoding.memory import MemoryPlan
from decoding.planner import Step
from decoding.readback import StepResult, timestamp
from decoding.runner import PREFILL_CHUNK, clear_positions, copy_positions
from decoding.scheduler import Request, Slot, Status
from model import Transformer
from speculative import decide
from tp import lost_contact

# A chunk costs the budget of Engine.step at least this many tokens, because reading the weights
# dominates a shorter one. By device type; elsewhere half of PREFILL_CHUNK.
MIN_PREFILL_COST = {"cpu": 16}
PROMPT_LOGITS = 2**24  # computed at once for the log-probabilities of a prompt: 64 MB in float32


def next_prompt(engine) -> Request | None:
    """The request whose prompt runs next. A new one first gets its prefix from a slot that has
    it."""
    request = engine.scheduler.prefilling()
    if request is not None:
        return request
    admitted = engine.scheduler.admit()
    if admitted is None:
        return None
    request, source, num_shared = admitted
    slot = request.slot
    request.started = time.perf_counter()
    engine.batch.fill(slot.index, request)
    if source is not slot:
        copy_positions(engine.runners, source.index, slot.index, num_shared)
    clear_positions(engine.runners, slot.index, num_shared, slot.num_written)
    request.num_computed = num_shared
    request.num_finite = num_shared
    request.num_reused = num_shared
    return request


def prefill(engine, request: Request) -> int:
    """Run the next chunk of a prompt through all models; returns its cost in tokens. The last chunk
    decides the first token.

    A prompt whose last token alone is left, like that of a second answer to one prompt, runs with
    the next decode step if there are other requests. It does not in an engine that runs rounds: a
    draft might then decide the first token, depending on which other requests there are."""
    device = engine.runner.device
    start = timestamp(device)
    slot = request.slot
    end = min(request.num_computed + engine.runner.chunk, request.num_positions)
    min_cost = MIN_PREFILL_COST.get(device.type, PREFILL_CHUNK // 2)
    cost = max(end - request.num_computed, min_cost)
    is_last_chunk = end == request.num_positions
    if is_last_chunk:
        request.status = Status.DECODING
        engine.batch.activate(slot.index, end)
        lacks_one = 0 < request.num_computed == end - 1  # all before it is in the cache
        joins_step = lacks_one and len(engine.requests) > 1 and not engine.planner.ks
        if joins_step:
            return 0  # its status is DECODING already: the next decode step runs this token
    rows = engine.rows(slot.index, slot.index + 1)
    batch = rows.batch
    running = [(0, request)]
    records_logprobs = engine.planner.records_logprobs
    try:
        h = rows.target.prefill(batch.tokens, request.num_computed, end)  # (1, T, D)
        prefill_draft(engine, slot, end)
        record_prompt(request, engine.model, h)
        request.num_computed = end
        if is_last_chunk:
            batch.prepare(running)
            batch.write_masks(running)
            decide(batch, engine.model.head(h[:, -1:]), records_logprobs=records_logprobs)
    except Exception as error:
        if lost_contact(error):
            raise
        request.error = error
        engine.finish(request, "error")
        return cost
    request.prefill_times.append((start, timestamp(device)))
    if is_last_chunk:
        request.num_launched = 1  # its first token
        # With these plans `Planner` counts the tokens in flight.
        plans = [MemoryPlan(request.memory, (request,))]
        step = Step(rows, end, requests=running, records_logprobs=records_logprobs, plans=plans)
        engine.readback.send(StepResult.of(batch, records_logprobs=records_logprobs), step)
    return cost


def prefill_draft(engine, slot: Slot, end: int) -> None:
    """Run the positions up to `end` that the drafter's own cache lacks."""
    if len(engine.runners) == 1:  # no drafter with a cache of its own
        return
    if slot.num_draft < end:
        rows = engine.rows(slot.index, slot.index + 1)
        rows.drafter.prefill(rows.batch, slot.num_draft, end)
        slot.num_draft = end


def lacks_positions(engine, plans: Sequence[MemoryPlan]) -> bool:
    """Does the drafter's own cache lack positions that the planned step reads?"""
    return any(
        request.is_draft_behind and request.num_positions < engine.drafter.max_positions
        for plan in plans
        if plan.fills_cache
        for request in plan.requests
    )


def count_draft_positions(plan: MemoryPlan, decided: Sequence) -> None:
    """Set each slot's num_draft after a round that `decided` tokens (meter.Decided): the larger of
    two numbers of positions that the drafter's own cache surely holds. These are all before the
    token that was the newest as the round began, and all but the last num_first_inputs."""
    for _, request, ids in decided:
        if request in plan.requests:
            num_before = request.num_positions - len(ids) - 1
            request.slot.num_draft = max(num_before, request.num_positions - plan.num_first_inputs)


def record_prompt(request: Request, model: Transformer, h: Tensor) -> None:
    """Record the log-probabilities of the prompt tokens that follow h (1, T, D), if the request
    asks for them."""
    begin = request.num_computed + 1  # `prefill` counts the chunk after this call
    ids = request.prompt[begin : begin + h.size(1)]  # one fewer at the prompt's end
    if request.num_prompt_logprobs is None or not ids:
        return
    h = h[:, : len(ids)]
    ids = torch.tensor([ids], device=h.device)  # (1, T)
    size = max(1, PROMPT_LOGITS // model.config.vocab_size)
    for part, next_ids in zip(h.split(size, dim=1), ids.split(size, dim=1)):
        logits = model.head(part)  # (1, size, V)
        logprobs = top_logprobs(logits, next_ids, request.num_prompt_logprobs)
        request.prompt_logprobs += logprobs[0].tolist()
