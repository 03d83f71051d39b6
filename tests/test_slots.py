"""Requests that come and go: each gets, bit for bit, what it gets alone, whatever comes, ends or is
aborted beside it.

A schedule is random: who comes when, with which prompt, sampling and length, who is aborted. The
oracle is an engine of one slot that has never seen another text.
"""

import dataclasses
import random

import pytest
import torch
from conftest import generate, in_context
from test_dflash import dflash_folder
from test_drafts import eagle_folder, pard_folder

import decoding.batch
import decoding.engine as program
import decoding.readback as clock
import decoding.scheduler as scheduler
from decoding.engine import Engine
from decoding.kv_8bit import Int8Cache
from decoding.prefill import next_prompt
from decoding.sampling import Sampling
from drafts.base import ModelDraft
from drafts.ngram import NgramDraft
from drafts.pard import PardDraft
from drafts.registry import load_drafter
from drafts.suffix import SuffixDraft
from drafts.target_layers import layer_subset
from loading.checkpoint import load_model
from model import KVCache
from weights.walker import pack_model

SAMPLINGS = (
    Sampling(0),
    Sampling(0.9),
    Sampling(1.2, top_k=9),
    Sampling(0.7, top_p=0.8, min_p=0.01),
    Sampling(0, repetition_penalty=1.3),
    Sampling(0.9, top_k=20, presence_penalty=0.7, frequency_penalty=-0.3),
    Sampling(1.1, logit_bias=((5, 3.0), (9, -100.0)), repetition_penalty=0.9),
)
V, LENGTH = 131, 150


@pytest.fixture(scope="module")
def model_of(folder_of):
    models = {}

    def make(
        dtype: torch.dtype = torch.float32, quantize: str | None = None, family: str = "llama-3"
    ):
        key = dtype, quantize, family
        if key not in models:
            models[key] = pack_model(load_model(folder_of(family), dtype=dtype, quantize=quantize))
        return models[key]

    return make


DRAFT_FOLDERS = {}


@pytest.fixture(scope="module", autouse=True)
def draft_folders(folder_of, tmp_path_factory):
    root = tmp_path_factory.mktemp("drafts")
    DRAFT_FOLDERS["pard"] = pard_folder(folder_of("llama-3"), root / "pard")
    DRAFT_FOLDERS["eagle3"] = eagle_folder("speculators", root / "eagle3")
    DRAFT_FOLDERS["dflash"] = dflash_folder("published", root / "dflash")


def drafter_of(kind: str, model):
    if kind == "model":
        return ModelDraft(layer_subset(model, [0, 2]))
    if kind == "pard":
        return PardDraft(load_model(DRAFT_FOLDERS["pard"], dtype=model.norm.weight.dtype), V - 1)
    if kind in ("eagle3", "dflash"):
        return load_drafter(DRAFT_FOLDERS[kind], model, None, pack=False)
    if kind.startswith("suffix"):  # sampled text depends on a pool's earlier answers
        return SuffixDraft() if kind == "suffix, pool" else SuffixDraft(pool_tokens=0)
    return {
        "none": None,
        "ngram": NgramDraft(2),
        "layers": ModelDraft(layer_subset(model, [0, 2]), [0, 2]),
    }[kind]


@dataclasses.dataclass
class Arrival:
    step: int
    prompt: list[int]
    options: dict
    abort_at: int | None


def arrivals(seed: int, n: int = 12) -> list[Arrival]:
    """Prompts short and long, of which some begin alike, with lengths and samplings of all
    kinds."""
    rng = random.Random(seed)
    beginnings = [[rng.randrange(3, V) for _ in range(40)] for _ in range(2)]
    plan = []
    for number in range(n):
        prompt = [rng.randrange(3, V) for _ in range(rng.choice((1, 3, 17, 60)))]
        if rng.random() < 0.5:
            prompt = rng.choice(beginnings)[: rng.randrange(1, 41)] + prompt
        new = rng.choice((1, 2, 9, 25))
        options = {
            "sampling": rng.choice(SAMPLINGS),
            "max_new_tokens": new,
            "seed": number,
            "stop_ids": {rng.randrange(V)} if rng.random() < 0.3 else (),
        }
        plan.append(
            Arrival(
                rng.randrange(30),
                prompt,
                options,
                rng.randrange(45) if rng.random() < 0.2 else None,
            )
        )
    return plan


def alone(model, engine_options: dict, drafter: str, arrival: Arrival) -> list[int]:
    engine = Engine(
        model, 1, LENGTH, drafter=drafter_of(drafter, model), speculate_k=3, **engine_options
    )
    return [id for _, id in generate(model, [arrival.prompt], engine=engine, **arrival.options)]


def run_schedule(engine: Engine, plan: list[Arrival]) -> list[list[int]]:
    """The tokens of each arrival, as far as they came."""
    requests, tokens, number = {}, {}, 0
    while number <= max(arrival.step for arrival in plan) or engine.has_unfinished():
        for index, arrival in enumerate(plan):
            if arrival.step == number:
                id = engine.add_request(arrival.prompt, **arrival.options)
                requests[index], tokens[id] = id, []
            if arrival.abort_at == number and index in requests:
                engine.abort(requests[index])
        for id, token in engine.step():
            tokens[id].append(token)
        number += 1
    return [tokens[requests[index]] for index in range(len(plan))]


def parted(model, drafter: str, num_slots: int, seed: int, **engine_options) -> list[int]:
    """The arrivals of a random schedule whose tokens are not those that they get alone."""
    engine = Engine(
        model,
        num_slots,
        LENGTH,
        drafter=drafter_of(drafter, model),
        speculate_k=3,
        **engine_options,
    )
    # Most prompts take several, between others' steps; alone they take one.
    engine.runner.chunk = 16
    plan, wrong = arrivals(seed), []
    for index, (arrival, tokens) in enumerate(zip(plan, run_schedule(engine, plan))):
        expected = alone(model, engine_options, drafter, arrival)
        is_complete = arrival.abort_at is None
        assert not is_complete or tokens
        if tokens != (expected if is_complete else expected[: len(tokens)]):
            wrong.append(index)
    assert not engine.requests and all(slot.request is None for slot in engine.scheduler.slots)
    return wrong


TRAINED = ("pard", "eagle3", "dflash")


@pytest.mark.one_in(6, 2)
@pytest.mark.parametrize(
    "num_slots", [5, *(pytest.param(n, marks=pytest.mark.attack) for n in (1, 2, 8))]
)
@pytest.mark.parametrize(
    "drafter",
    [
        "none",
        "ngram",
        "suffix",
        "model",
        "layers",
        *(pytest.param(x, marks=pytest.mark.attack) for x in TRAINED),
    ],
)
def test_each_request_equals_itself_alone(model_of, drafter, num_slots):
    model = model_of()
    assert not parted(model, drafter, num_slots, seed=num_slots)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("num_slots", [1, 3, 8])
def test_greedy_requests_with_a_pool_equal_themselves_alone(model_of, num_slots, monkeypatch):
    """Whatever the pool has read by then. `parted` compares with an engine that has never seen
    another text."""
    monkeypatch.setitem(globals(), "SAMPLINGS", (Sampling(0), Sampling(0, repetition_penalty=1.3)))
    assert not parted(model_of(), "suffix, pool", num_slots, seed=num_slots)


def test_a_pool_forgets_the_oldest_answers(model_of):
    drafter, plan = SuffixDraft(pool_tokens=200), arrivals(3, 20)
    engine = Engine(model_of(), 2, 150, drafter=drafter, speculate_k=3)
    tokens = run_schedule(engine, plan)
    drafter.expect([], 0)
    assert not drafter.texts
    sizes = [len(text.ids) for text in drafter.pool]
    assert max(sizes) <= 100 < sum(map(len, tokens)) and all(sizes)
    last = max(
        range(20), key=lambda i: (plan[i].abort_at is None) * (plan[i].step + len(tokens[i]))
    )
    assert str(tokens[last])[1:-1] in str([*drafter.pool[0].ids, -1, *drafter.pool[1].ids])


@pytest.mark.one_in(4, 2)
@pytest.mark.parametrize("kind", [KVCache, pytest.param(Int8Cache, marks=pytest.mark.attack)])
@pytest.mark.parametrize(
    "quantize", [None, pytest.param("int8", marks=pytest.mark.attack), "int4-g32"]
)
@pytest.mark.parametrize("drafter", ["none", "model"])
def test_in_16_bits_too(model_of, quantize, kind, drafter):
    model = model_of(torch.bfloat16, quantize)
    if Engine(model, 4, LENGTH, cache_type=kind).identical:
        assert not parted(model, drafter, 4, seed=7, cache_type=kind)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "family", ["mistral-v0.1", "phi-4-mini", pytest.param("gpt-oss", marks=pytest.mark.attack)]
)
def test_windows_long_texts_and_sinks(model_of, family):
    """phi-4-mini rotates a text by how long it may become; its texts here are short and long."""
    assert not parted(model_of(family=family), "model", 4, seed=3)


def test_equal_prompts_run_once(model_of, monkeypatch):
    """All but their last token comes from the first, and that one runs in a step beside others.
    Until then nobody may copy its position: the longer prompt has two tokens to run. A pass is
    padded to 8."""
    model, passes = model_of(), []
    prompt, hidden = [(7 * i) % V for i in range(40)], model.hidden
    settings = [
        {"sampling": SAMPLINGS[i], "max_new_tokens": 9 if i else 1, "seed": i} for i in range(5)
    ]
    plan = [
        Arrival(2 if i else 0, prompt + [5] * (i == 4), options, None)
        for i, options in enumerate(settings)
    ]
    engine = Engine(model, 4, LENGTH)
    monkeypatch.setattr(
        engine.runner,
        "hidden",
        lambda tokens, *rest: passes.append(tokens.size(1)) or hidden(tokens, *rest),
    )
    for arrival, tokens in zip(plan, run_schedule(engine, plan), strict=True):
        assert tokens == alone(model, {}, "none", arrival)
    assert passes == [40, 8]


@pytest.mark.attack
@pytest.mark.parametrize("broken", ["prefix", "parking", "mixed kinds"])
def test_a_broken_admission_is_caught(model_of, monkeypatch, broken):
    """The negative control: a newcomer that trusts one position too many, rows that are not parked,
    and rows that share the first one's sampling."""
    if broken == "prefix":
        usual = scheduler.common_prefix
        monkeypatch.setattr(scheduler, "common_prefix", lambda x, y: min(len(x), usual(x, y) + 1))
    elif broken == "parking":
        monkeypatch.setattr(program.Batch, "park", lambda self, slot: self.done[slot].fill_(False))
    else:
        monkeypatch.setattr(
            decoding.batch, "common_path", lambda requests: next(iter(requests)).path
        )
    wrong = set()
    for seed in (7, 13):
        wrong |= set(parted(model_of(), "none", 5, seed=seed))
    assert wrong


@pytest.mark.parametrize("kind", ["model", "pard"])
def test_a_parked_slot_keeps_its_positions_in_the_drafts_cache(model_of, kind):
    """A slot whose text nearly fills the context is free, and others beside it decode plainly, so
    that a later round lets the draft catch up. What the slot holds for another request stays."""
    length = (
        380  # with a round's 3 tokens, just below twice the 192 that lengths are rounded up to here
    )
    model, prompt = model_of(), [(7 * i) % V for i in range(length - 10)]

    def run(engine: Engine, ids: list[int], new: int, draft: bool, until: int):
        options = {"sampling": Sampling(0), "max_new_tokens": new, "draft": draft}
        request = engine.requests[engine.add_request(ids, **options)]
        while len(request.tokens) < until:
            engine.step()
        return request

    def keys(engine: Engine, index: int) -> torch.Tensor:
        slot = engine.scheduler.slots[index]
        assert slot.ids[: len(prompt)] == prompt and slot.num_draft >= len(prompt)
        return torch.stack(
            [layer.k[index, :, : slot.num_draft] for layer in engine.drafter.runner.caches.layers]
        )

    drafter = drafter_of(kind, model)
    in_context(drafter.model, length)
    engine = Engine(in_context(model, length), 3, length, drafter=drafter, speculate_k=3)
    first = run(engine, [5, 6, 7], 80, False, 1)
    run(engine, prompt, 5, True, 5)
    run(engine, [9, 8, 7], 80, False, 40)
    engine.abort(first.id)
    before = keys(engine, 1).clone()
    run(engine, [5, 6, 7, 9], 4, True, 4)
    assert torch.equal(keys(engine, 1), before)


@pytest.mark.parametrize("lag", [0, 2])
def test_a_free_slot_claims_no_position_that_the_draft_has_not_run(model_of, lag, monkeypatch):
    """The last plain steps of a request are unread, as on a GPU, when a round of another one
    begins."""
    monkeypatch.setattr(clock, "host_lag", lambda device: lag)
    model = model_of()
    engine = Engine(model, 2, LENGTH, drafter=drafter_of("model", model), speculate_k=3)
    options = {"sampling": Sampling(0), "max_new_tokens": 30}
    request = engine.requests[engine.add_request([5, 6, 7], draft=False, **options)]
    while request.num_launched < 30 and request.finish_reason is None:
        engine.step()
    engine.add_request([9, 8, 7], **options)
    while engine.has_unfinished():
        engine.step()
    slot = next(slot for slot in engine.scheduler.slots if slot.ids[:3] == [5, 6, 7])
    written = engine.drafter.runner.caches.layers[0].k[slot.index].abs().amax((0, 2)) > 0  # (S,)
    assert len(slot.ids) == 32 and written[: slot.num_draft].all()


def test_an_aborted_prompt_claims_what_the_draft_had_of_its_prefix(model_of):
    """It took a prefix from a request that was not drafted, and no chunk of it has run."""
    model = model_of()
    engine = Engine(model, 2, LENGTH, drafter=drafter_of("model", model), speculate_k=3)
    for prompt, draft in (([5, 6, 7], False), ([9, 8, 7], True)):
        engine.add_request(prompt, sampling=Sampling(0), max_new_tokens=60, draft=draft)
        while engine.has_unfinished():
            engine.step()
    slot = engine.scheduler.slots[0]
    num_draft = slot.num_draft
    id = engine.add_request([*slot.ids, 5, 6], sampling=Sampling(0), max_new_tokens=5)
    assert next_prompt(engine).num_reused == 62 and num_draft < 20
    engine.abort(id)
    assert len(slot.ids) == 62 and slot.num_draft == num_draft
