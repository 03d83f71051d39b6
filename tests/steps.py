"""Engines brought to a step of one's own choice, for tests of single steps and of thousands of
rows."""

import torch

from decoding.draft_length import DraftLength
from decoding.memory import MemoryPlan
from decoding.prefill import next_prompt, prefill
from decoding.runner import slot_tensors
from speculative import decide


def token_records(timing) -> list[list]:
    """What was recorded of each token, by request."""
    return [request.token_records for request in timing.requests]


def plan_k(engine, choose) -> None:
    """From now on the next step drafts choose(requests) tokens for the requests of a memory."""

    def plan_memory(memory, requests, waiting):
        memory.draft_length = memory.draft_length or DraftLength(1)
        expected = [None] * len(requests)
        num_inputs = engine.drafter.num_first_inputs
        return MemoryPlan(memory, requests, choose(requests), None, expected, num_inputs)

    engine.planner.plan_memory = plan_memory


def prefill_all(engine, prompts, max_new_tokens: int, sampling, seeds=None, stop_ids=()) -> None:
    """Give every prompt a slot and run it: `engine.run(Step(engine.rows(0, n), length, k))` is then
    a step of them all."""
    for prompt, seed in zip(prompts, seeds or [0] * len(prompts)):
        engine.add_request(
            prompt, sampling=sampling, max_new_tokens=max_new_tokens, stop_ids=stop_ids, seed=seed
        )
    while (request := next_prompt(engine)) is not None:
        prefill(engine, request)
    engine.rows(0, engine.batch_size).batch.sampling_path = sampling.path


@torch.inference_mode()
def start_all_alike(
    engine, prompt: list[int], max_new_tokens: int, sampling, seeds: list[int]
) -> None:
    """One prompt in all slots, run once, each with a seed of its own: thousands of rows for a test
    of their law."""
    engine.clear()
    state, n = engine.batch, len(prompt)
    one, rows = engine.rows(0, 1), engine.rows(0, engine.batch_size)
    state.tokens[:, :n] = torch.tensor(prompt)
    state.prompt_length.fill_(n)
    state.seed.copy_(torch.tensor(seeds))
    state.values.copy_(sampling.values), state.biases.copy_(sampling.biases)
    state.stop_ids.fill_(-1), state.draft_limit.fill_(99), state.end.fill_(n - 1 + max_new_tokens)
    h = one.target.prefill(one.batch.tokens, 0, n)[:, -1]  # (1, D)
    if len(engine.runners) > 1:
        one.drafter.runner.prefill(one.batch.tokens, 0, n)
    for x in slot_tensors(engine.runners, slice(None), 0, n).values():
        x.copy_(x[:1].clone().expand_as(x))
    state.pos.fill_(n - 1), state.done.fill_(False)
    rows.batch.sampling_path = sampling.path
    logits = engine.model.head(h).expand(engine.batch_size, -1)  # (B, V)
    decide(rows.batch, logits[:, None])
