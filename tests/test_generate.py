"""generate.py: the loop against transformers and against itself alone."""

import math
from types import SimpleNamespace

import pytest
import torch
from conftest import BASE, FAMILIES, changed_family, generate, oracle
from steps import token_records

import decoding.readback as timing
from decoding.engine import Engine
from decoding.errors import UserError
from decoding.kv_8bit import Fp8Cache, Int8Cache
from decoding.runner import padded_length
from decoding.sampling import Sampling
from decoding.statistics import Timing
from decoding.validation import PromptError
from drafts.base import ModelDraft
from drafts.ngram import NgramDraft
from drafts.target_layers import layer_subset
from generate import decode
from loading.checkpoint import load_model
from model import KVCache
from speculative import speculate
from weights.formats import FORMATS
from weights.walker import pack_model

PROMPTS = [[5, 9, 17], [40, 3, 99, 12, 7, 61, 20], [88], [4, 4, 4, 4, 4]]
SAMPLED = Sampling(1.1, top_k=50, top_p=0.95)


def rows_of(model, prompts, **options) -> list[list[int]]:
    out = [[] for _ in prompts]
    for row, id in generate(
        model, prompts, **{"sampling": Sampling(0), "max_new_tokens": 20, **options}
    ):
        out[row].append(id)
    return out


# Families that differ most in their arithmetic. All others run with the attacks, and in
# test_model.py against the same oracle.
FAST_FAMILIES = (
    "llama-3.1",
    "mistral-v0.1",
    "qwen2.5-yarn",
    "qwen3",
    "mixtral",
    "qwen3-moe",
    "gpt-oss",
    "phi-3",
    "olmo2",
    "glm-4-0414",
    "glm-4.5",
    "gemma-3",
)


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "family",
    [
        *FAST_FAMILIES,
        *(
            pytest.param(family, marks=pytest.mark.attack)
            for family in FAMILIES
            if family not in FAST_FAMILIES
        ),
    ],
)
def test_64_greedy_tokens_equal_transformers(family, folder_of):
    """A wrong position, mask or cache entry in any of 64 steps changes a token of a random
    model."""
    # Where a row's whole length decides about its positions, transformers changes its mind on the
    # way.
    prompt = torch.tensor([[*range(3, 48)] if family == "phi-4-mini" else PROMPTS[1]])
    with torch.no_grad():
        want = oracle(family).generate(
            prompt,
            max_new_tokens=64,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            attention_mask=torch.ones_like(prompt),
        )[0, prompt.size(1) :]
    assert len(set(want.tolist())) > 4, "the oracle repeats itself: nothing is shown"
    got = rows_of(
        load_model(folder_of(family), dtype=torch.float32), prompt.tolist(), max_new_tokens=64
    )
    assert got == [want.tolist()]
    model = load_model(folder_of(family), dtype=torch.float32)
    plain = decode(model, prompt[0].tolist(), sampling=Sampling(0), max_new_tokens=20)
    assert [*plain] == want[:20].tolist()


LOOP_SAMPLINGS = [
    Sampling(1.1),
    SAMPLED,
    Sampling(0, repetition_penalty=1.3, frequency_penalty=0.5),
    Sampling(0.9, min_p=0.02, presence_penalty=1.0, logit_bias=((7, 3.0), (40, -100.0))),
]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Those whose groups divide the tiny matrices.
LOOP_SCHEMES = (None, *(name for name in FORMATS if FORMATS[name].group <= 32))


def loop_model(folder, dtype: torch.dtype, is_packed: bool, scheme: str | None = None):
    model = load_model(folder, dtype=dtype, quantize=scheme)
    return pack_model(model) if is_packed else model


@pytest.mark.one_in(139, 17)
@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("dtype", DTYPES[1:] + DTYPES[:1], ids=str)
@pytest.mark.parametrize("cache_type", [KVCache, Int8Cache, Fp8Cache])
@pytest.mark.parametrize("scheme", LOOP_SCHEMES)
def test_the_plain_loop_and_the_engine_give_the_same_tokens(
    scheme, cache_type, dtype, is_packed, folder_of
):
    """For every format, cache and dtype, by several kinds of sampling, up to a stop id."""
    model = loop_model(folder_of("llama-3"), dtype, is_packed, scheme)
    engine = Engine(model, 1, 40, cache_type=cache_type)
    for sampling in LOOP_SAMPLINGS[is_packed::2]:
        options = {"sampling": sampling, "max_new_tokens": 20, "seed": 5}
        ids = [*decode(model, PROMPTS[1], cache_type=cache_type, **options)]
        assert rows_of(model, PROMPTS[1:2], engine=engine, **options) == [ids]
        stop_id = next(id for id in ids[5:] if id not in ids[:5])
        expected = ids[: ids.index(stop_id) + 1]
        options["stop_ids"] = {stop_id}
        assert [*decode(model, PROMPTS[1], cache_type=cache_type, **options)] == expected
        assert rows_of(model, PROMPTS[1:2], engine=engine, **options) == [expected]


@pytest.mark.one_in(83, 7)
@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("dtype", DTYPES[1:] + DTYPES[:1], ids=str)
@pytest.mark.parametrize("family", ["glm-4.5", *(name for name in FAMILIES if name != "glm-4.5")])
def test_the_plain_loop_has_the_engines_text_for_every_family(family, dtype, is_packed, folder_of):
    """Greedy texts of random models part at the first bit that differs: attention over other
    lengths, or a prompt in another shape."""
    model = loop_model(folder_of(family), dtype, is_packed)
    for prompt in PROMPTS:
        plain = [*decode(model, prompt, sampling=Sampling(0), max_new_tokens=30)]
        assert rows_of(model, [prompt], max_new_tokens=30) == [plain]


@pytest.mark.parametrize("num_slots", [1, 3])
@pytest.mark.parametrize("chunk", [64, 512])
def test_the_plain_loop_runs_prompts_in_the_engines_shapes(
    chunk, num_slots, folder_of, monkeypatch
):
    """The last chunk is padded even where its end is the loop's, and not the engine's. Without
    packed weights a product's bits follow its shape."""
    monkeypatch.setattr("decoding.runner.PREFILL_CHUNK", chunk)
    monkeypatch.setattr("decoding.runner.invariant_multiples", lambda *_: None)
    with changed_family("glm-4.5", max_position_embeddings=400) as family:
        model = load_model(folder_of(family), dtype=torch.bfloat16)
    engine = Engine(model, num_slots, 400)
    hidden = model.hidden
    generator = torch.Generator().manual_seed(0)
    shapes = []

    def recording(tokens, pos, caches):
        shapes.append((tokens.size(1), caches.key_pos.size(0)))
        return hidden(tokens, pos, caches)

    model.hidden = recording
    engine.runner.hidden = recording
    for length in (3, 65, 257):
        prompt = torch.randint(3, 131, (length,), generator=generator).tolist()
        plain = [*decode(model, prompt, sampling=Sampling(0), max_new_tokens=2)]
        expected = [*shapes]
        shapes.clear()
        assert rows_of(model, [prompt], engine=engine, max_new_tokens=2) == [plain]
        assert shapes == expected and expected[-1][0] == 1
        shapes.clear()


@pytest.mark.parametrize(
    "sampling", [Sampling(0), Sampling(0.8, top_k=20, repetition_penalty=1.2)], ids=str
)
def test_a_logits_processor_changes_the_plain_loop_as_it_does_an_engine(folder_of, sampling):
    """It sees the same positions, and all tokens up to them."""
    seen = {"plain": [], "engine": []}

    def spreading(name: str):
        def spread(logits, tokens, pos):
            last = tokens.gather(1, pos)  # (B, T)
            seen[name] += zip(pos[:, -1].tolist(), last[:, -1].tolist())
            return logits - 50.0 * torch.nn.functional.one_hot(last, logits.size(-1))

        return spread

    model = load_model(folder_of("llama-3"), dtype=torch.float32)
    options = {"sampling": sampling, "max_new_tokens": 20, "seed": 3}
    plain = [*decode(model, PROMPTS[1], logits_processor=spreading("plain"), **options)]
    engine = generate(model, PROMPTS[1:2], logits_processor=spreading("engine"), **options)
    assert [id for _, id in engine] == plain
    assert len(plain) == 20 and seen["engine"][:20] == seen["plain"]
    assert plain != [*decode(model, PROMPTS[1], **options)]


def speculated(model, prompt, **options):
    return speculate(model, SimpleNamespace(propose=None), prompt, k=2, **options)


LOOPS = {"decode": decode, "speculate": speculated}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    "prompt, options, error",
    [
        ([], {}, "prompt 0 is empty"),
        ([5], {"max_new_tokens": BASE["max_position_embeddings"]}, "over the limit of"),
        ([5], {"max_new_tokens": 0}, "max_new_tokens = 0 must be"),
        ([5], {"max_new_tokens": 1.5}, "max_new_tokens = 1.5 must be"),
        ([10**6], {}, "holds token id 1000000"),
        ([5], {"seed": 2**64}, "seed = 18446744073709551616 must lie"),
        ([5], {"sampling": Sampling(0, logit_bias=((10**6, 5.0),))}, "logit_bias holds token"),
    ],
)
def test_the_loops_refuse_what_they_cannot_decode(loop, prompt, options, error, folder_of):
    model = load_model(folder_of("llama-3"), dtype=torch.float32)
    options = {"max_new_tokens": 1, "sampling": Sampling(0), **options}
    with pytest.raises(UserError, match=error):
        next(LOOPS[loop](model, prompt, **options))


def test_what_is_no_number_of_tokens_or_no_token_id_is_refused(folder_of):
    """An id of 5.9 is not the token 5."""
    model = load_model(folder_of("llama-3"), dtype=torch.float32)
    options = {"sampling": Sampling(0), "max_new_tokens": 1}
    with pytest.raises(UserError, match="k = -1 must be at least 1"):
        next(speculate(model, SimpleNamespace(propose=None), [5], k=-1, **options))
    for loop in LOOPS.values():
        with pytest.raises(UserError, match=r"holds token id 5\.9"):
            next(loop(model, [5.9], **options))
    with pytest.raises(UserError, match=r"holds token id 5\.9"):
        Engine(model, 1, 40).add_request([5.9], **options)
    for prompt in ([5, 9], torch.tensor([5, 9]), (5.0, 9.0)):
        for loop in LOOPS.values():
            assert [*loop(model, prompt, **options)] == [*decode(model, [5, 9], **options)]


@pytest.mark.parametrize("loop", LOOPS)
def test_the_loops_take_whole_numbers_of_either_type(loop, folder_of):
    """As an engine does."""
    model = load_model(folder_of("llama-3"), dtype=torch.float32)
    texts = [
        [*LOOPS[loop](model, [5, 9], max_new_tokens=number(1), seed=number(3), sampling=Sampling())]
        for number in (int, float)
    ]
    assert texts[0] == texts[1]


def test_requests_are_refused_that_cannot_be_decoded(folder_of):
    model, options = (
        load_model(folder_of("llama-3"), dtype=torch.float32),
        {"sampling": Sampling(0)},
    )
    with pytest.raises(ValueError, match="logprobs = -1"):
        Engine(model, 1, 40).add_request([5], max_new_tokens=1, prompt_logprobs=-1, **options)
    model.norm.weight.data.fill_(torch.nan)
    with pytest.raises(ValueError, match="position 3: the model's logits are not finite"):
        next(decode(model, PROMPTS[0], max_new_tokens=1, **options))


def test_longrope_follows_the_engines_length(folder_of):
    """40 positions are the original context. An engine for texts of up to 40 takes the short
    factors, and a longer one the long factors for all texts, as vLLM does. transformers computes
    with the short ones up to there, and with the long ones in a pass over more tokens."""
    model = load_model(folder_of("phi-4-mini"), dtype=torch.float32)
    prompts = [[*range(9, 9 + n)] for n in (10, 16, 29)]
    twin = oracle("phi-4-mini")

    def greedy(prompt: list[int], num_tokens: int, max_length: int) -> list[int]:
        text = list(prompt)
        for _ in range(num_tokens):
            # Tokens after a position do not change its logits, only the choice of the factors.
            padding = [0] * (max_length - len(text))
            with torch.no_grad():
                logits = twin(torch.tensor([text + padding])).logits
            text.append(logits[0, len(text) - 1].argmax().item())
        return text[len(prompt) :]

    expected_by_length = {}
    for max_length in (40, 41):
        expected = [greedy(prompt, 10, max_length) for prompt in prompts]
        expected_by_length[max_length] = expected
        for drafter in (None, NgramDraft(1), ModelDraft(model)):
            engine = Engine(model, 2, max_length, drafter=drafter, speculate_k=3)
            assert rows_of(model, prompts, max_new_tokens=10, engine=engine) == expected
    assert expected_by_length[40] != expected_by_length[41], "the factors make no difference here"
    for max_new_tokens, max_length in ((11, 40), (12, 41)):
        tokens = decode(model, prompts[2], sampling=Sampling(0), max_new_tokens=max_new_tokens)
        assert [*tokens][:10] == expected_by_length[max_length][2]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("sampling", [Sampling(0), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", ["llama-3", "mistral-v0.1", "qwen3"])
def test_a_row_equals_its_prompt_alone(family, sampling, folder_of):
    """Different lengths, different ends: a stop id that some rows meet early freezes them while
    others go on."""
    model = load_model(folder_of(family), dtype=torch.float32)
    alone = [rows_of(model, [prompt], sampling=sampling, seed=3)[0] for prompt in PROMPTS]
    assert rows_of(model, PROMPTS, sampling=sampling, seed=3) == alone
    stop = {alone[0][4], alone[3][9]}
    cut = [
        row[: 1 + next((i for i, id in enumerate(row) if id in stop), len(row))] for row in alone
    ]
    assert len({len(row) for row in cut}) > 1
    assert rows_of(model, PROMPTS, sampling=sampling, seed=3, stop_ids=stop) == cut


@pytest.mark.parametrize("drafted", [False, True], ids=["plain", "drafted"])
def test_what_is_told_of_a_token_is_what_the_models_give_it(drafted, folder_of):
    """p, q and log-probabilities of every token, by passes over the whole text."""
    model, sampling, told = (
        load_model(folder_of("llama-3"), dtype=torch.float32),
        Sampling(1.1),
        Timing(),
    )
    draft = layer_subset(model, [0, 1])
    engine = Engine(
        model, 4, 40, drafter=ModelDraft(draft) if drafted else None, speculate_k=3, logprobs=2
    )
    options = {"sampling": sampling, "seed": 3, "engine": engine}
    rows = rows_of(model, PROMPTS, timing=told, **options)
    for prompt, ids, request in zip(PROMPTS, rows, told.requests, strict=True):
        text, pos = torch.tensor([prompt + ids]), torch.arange(len(prompt + ids))
        logits, draft_logits = (each(text, pos)[0, len(prompt) - 1 : -1] for each in (model, draft))
        log_p = logits.log_softmax(-1)
        p, q = (sampling.probs(each) for each in (logits, draft_logits))
        assert len(request.top_logprobs) == len(request.token_probs) == len(ids)
        for i, id in enumerate(ids):
            fact = request.token_records[i] if drafted else None
            judged = drafted and fact.index < fact.k
            values, top = log_p[i].topk(2)
            expected = [p[i, id].item(), q[i, id].item() if judged else 0.0]
            assert request.token_probs[i][:2] == pytest.approx(expected, abs=1e-4)
            if judged:
                drafted_id = fact.rejected[0] if fact.rejected else id
                expected = [p[i, drafted_id].item(), q[i, drafted_id].item()]
                assert request.token_probs[i][2:] == pytest.approx(expected, abs=1e-4)
            pairs = [
                [id, log_p[i, id].item()],
                *([n.item(), x.item()] for n, x in zip(top, values)),
            ]
            assert request.top_logprobs[i] == [pytest.approx(pair, abs=1e-4) for pair in pairs]
    engine.planner.records_logprobs, again = False, Timing()
    assert rows_of(model, PROMPTS, timing=again, **options) == rows
    assert not any(request.token_probs for request in again.requests)


@pytest.mark.compiled
def test_compiled_steps_record_log_probabilities_when_they_are_asked_to(folder_of):
    """Steps that were compiled without the records must not serve an answer that wants them."""
    model = load_model(folder_of("llama-3"), dtype=torch.float32)
    records = []
    for compile in (False, True):
        engine = Engine(model, 1, 40, compile=compile, compile_prompts=False, logprobs=2)
        for returns in (False, True, False, True):
            engine.planner.records_logprobs = returns
            timing = Timing()
            options = {"sampling": Sampling(0), "max_new_tokens": 5, "engine": engine}
            rows_of(model, PROMPTS[:1], timing=timing, **options)
            request = timing.requests[0]
            assert len(request.top_logprobs) == (5 if returns else 0)
            if returns:
                records.append(torch.tensor(request.top_logprobs))
    for record in records[1:]:
        torch.testing.assert_close(record, records[0], atol=1e-4, rtol=0)


def greedy_ids(model, ids: list[int], num_new: int) -> list[int]:
    """Greedy continuation by full passes, without caches or an engine."""
    text = list(ids)
    for _ in range(num_new):
        logits = model(torch.tensor([text]), torch.arange(len(text)))
        text.append(logits[0, -1].argmax().item())
    return text[len(ids) :]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_accepted_and_rejected_tokens_spell_what_the_draft_proposed(batch_size, folder_of):
    """A greedy draft proposes its model's own continuation of the text before the round."""
    model, timing = load_model(folder_of("llama-3"), dtype=torch.float32), Timing()
    draft = layer_subset(model, [0, 1])
    engine = Engine(model, batch_size, 40, drafter=ModelDraft(draft), speculate_k=3)
    rows = rows_of(model, PROMPTS, timing=timing, sampling=Sampling(0), engine=engine)
    num_corrected = 0
    records_of_rows = [request.token_records for request in timing.requests]
    for prompt, ids, records in zip(PROMPTS, rows, records_of_rows, strict=True):
        for i, (id, record) in enumerate(zip(ids, records, strict=True)):
            is_corrected = record.index == record.accepted < record.k
            assert bool(record.rejected) == is_corrected
            if is_corrected:
                begin = i - record.index
                proposed = [*ids[begin:i], *record.rejected]
                assert proposed == greedy_ids(draft, prompt + ids[:begin], record.k)
                assert record.rejected[0] != id
                num_corrected += 1
    assert num_corrected > 4


def test_a_prompts_error_has_its_row_and_the_reason_apart(folder_of):
    model = load_model(folder_of("llama-3"), dtype=torch.float32)
    with pytest.raises(PromptError) as caught:
        rows_of(model, [[1], [1, 10**6]], max_new_tokens=2)
    reason = f"holds token id 1000000, outside the vocabulary of {model.config.vocab_size}"
    assert (caught.value.row, caught.value.reason) == (1, reason)
    assert str(caught.value) == f"prompt 1 {reason}"


def test_the_recorded_p_is_that_of_the_processed_logits(folder_of):
    model, timing = load_model(folder_of("llama-3"), dtype=torch.float32), Timing()
    engine = Engine(
        model, 1, 40, logprobs=0, logits_processor=lambda logits, tokens, pos: 2 * logits
    )
    (ids,) = rows_of(model, PROMPTS[:1], timing=timing, sampling=Sampling(1), seed=3, engine=engine)
    text, pos = torch.tensor([PROMPTS[0] + ids]), torch.arange(len(PROMPTS[0] + ids))
    p = (2 * model(text, pos)[0, len(PROMPTS[0]) - 1 : -1]).softmax(-1)  # (T, V)
    recorded = [token_p for token_p, *_ in timing.requests[0].token_probs]
    assert recorded == pytest.approx([p[i, id].item() for i, id in enumerate(ids)], abs=1e-4)


def second_best(logits, tokens, pos):
    """Bans the most likely token, so that the argmax of the model is not the greedy choice."""
    return logits.scatter(-1, logits.argmax(-1, keepdim=True), float("-inf"))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_proposes_from_the_processed_logits(temperature, folder_of):
    """Greedy text is that of plain decoding. The target drafts for itself, so p = q, and every
    token is accepted; a draft without the processor would propose the banned token and lose every
    round."""
    model = load_model(folder_of("llama-3"), dtype=torch.float32)
    options = {"sampling": Sampling(temperature), "seed": 3}
    before = rows_of(model, PROMPTS, **options)
    plain = rows_of(model, PROMPTS, logits_processor=second_best, **options)
    assert plain != before
    for layers, is_accepted in ((range(model.config.n_layers), True), ([0, 1], False)):
        drafter, timing = ModelDraft(layer_subset(model, layers)), Timing()
        drafted = rows_of(
            model,
            PROMPTS,
            drafter=drafter,
            speculate_k=3,
            logits_processor=second_best,
            timing=timing,
            **options,
        )
        assert temperature or drafted == plain
        records = [
            record
            for records in token_records(timing)
            for record in records
            if record.index < record.k
        ]
        assert records and (not is_accepted or all(record.overlap > 1 - 1e-3 for record in records))


@pytest.mark.parametrize("sampling", [Sampling(0), Sampling(0, repetition_penalty=1.1)])
def test_log_probabilities_are_those_before_the_processor(sampling, folder_of):
    """Also of a function that writes to its argument."""

    def ban(logits, tokens, pos):
        logits[..., :100] = float("-inf")
        return logits

    model, timing = load_model(folder_of("llama-3"), dtype=torch.float32), Timing()
    engine = Engine(model, 1, 40, logits_processor=ban, logprobs=0)
    ((id, *_),) = rows_of(model, PROMPTS[:1], sampling=sampling, engine=engine, timing=timing)
    logits = model(torch.tensor(PROMPTS[:1]), torch.arange(len(PROMPTS[0])))[0, -1]
    assert id >= 100 and timing.requests[0].top_logprobs[0][0][1] == pytest.approx(
        logits.log_softmax(-1)[id].item(), abs=1e-4
    )


def test_stop_ids_and_numbers_of_tokens_of_any_form(folder_of):
    """An iterator of stop ids is one too; a fraction of a token would never be reached."""
    model = load_model(folder_of("llama-3"), dtype=torch.float32)
    ids = rows_of(model, PROMPTS[:1])[0]
    end = next(i for i, id in enumerate(ids) if id not in ids[:i] and i > 2)
    assert rows_of(model, PROMPTS[:1], stop_ids=iter([ids[end]])) == [ids[: end + 1]]
    stop_ids = torch.tensor(ids[end : end + 1])
    assert rows_of(model, PROMPTS[:1], stop_ids=stop_ids) == [ids[: end + 1]]
    options = {"sampling": Sampling(0), "max_new_tokens": 20}
    assert [*decode(model, PROMPTS[0], stop_ids=stop_ids, **options)] == ids[: end + 1]
    with pytest.raises(ValueError, match=r"max_new_tokens = 2\.5"):
        Engine(model, 1, 40).add_request(PROMPTS[0], sampling=Sampling(0), max_new_tokens=2.5)


@pytest.mark.parametrize(
    "prompt, settings, message",
    [
        ([5], {"stop_ids": [None]}, r"stop_ids = \[None\] must be token ids"),
        ([5], {"stop_ids": [3, 2**63]}, r"stop_ids = \[3, 9223372036854775808\] must be token ids"),
        ([None, 5], {}, "holds token id None, outside the vocabulary"),
        (["a"], {}, "holds token id 'a', outside the vocabulary"),
        ([math.inf], {}, "holds token id inf, outside the vocabulary"),
        ([5], {"prompt_logprobs": 5.0}, r"logprobs = 5\.0 must be a whole number"),
        ([5], {"prompt_logprobs": -1}, "logprobs = -1 must be at least 0"),
    ],
)
def test_a_request_that_cannot_run_is_refused_before_others_suffer(
    folder_of, prompt, settings, message
):
    engine = Engine(load_model(folder_of("llama-3"), dtype=torch.float32), 2, 40)
    options = {"sampling": Sampling(0), "max_new_tokens": 5}
    other = engine.requests[engine.add_request([7, 8], **options)]
    with pytest.raises(UserError, match=message):
        engine.add_request(prompt, **options, **settings)
    while engine.has_unfinished():
        engine.step()
    assert len(other.tokens) == 5 and other.error is None


def test_an_engine_is_not_longer_than_its_model(folder_of):
    model = load_model(folder_of("llama-3"), dtype=torch.float32)
    context = model.config.max_seq_length
    Engine(model, 1, context)
    with pytest.raises(UserError, match=f"= {context + 1} is more than the model's {context}"):
        Engine(model, 1, context + 1)


def test_an_interrupted_step_ends_no_other_text_silently(folder_of, monkeypatch):
    """Ctrl-C in the step of one program ends the requests of all: none looks complete."""
    engine = Engine(load_model(folder_of("llama-3"), dtype=torch.float32), 2, 40)
    tokens = engine.generate([[5, 6]], sampling=Sampling(0), max_new_tokens=20)
    next(tokens)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine, "run", raiser(KeyboardInterrupt()))
        engine.step()
    with pytest.raises(UserError, match="a step was interrupted"):
        list(tokens)


def test_a_request_that_an_interrupt_kept_out_of_the_line_ends(folder_of, monkeypatch):
    engine = Engine(load_model(folder_of("llama-3"), dtype=torch.float32), 1, 40)
    want = list(engine.generate([[5, 6]], sampling=Sampling(0), max_new_tokens=5))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine.scheduler, "add", raiser(KeyboardInterrupt()))
        list(engine.generate([[5, 6]], sampling=Sampling(0), max_new_tokens=5))
    assert not engine.has_unfinished()
    assert list(engine.generate([[5, 6]], sampling=Sampling(0), max_new_tokens=5)) == want


def raiser(error: BaseException):
    def call(*arguments, **options):
        raise error

    return call


def test_one_timing_records_several_calls(folder_of):
    """The second call decodes its own rows alone."""
    model, timing = load_model(folder_of("llama-3"), dtype=torch.float32), Timing()
    first, second = (
        rows_of(model, prompts, timing=timing, max_new_tokens=5)
        for prompts in (PROMPTS[:3], PROMPTS[3:])
    )
    assert [request.tokens for request in timing.requests] == first + second
    assert [len(request.tokens) for request in timing.requests] == [5] * len(PROMPTS)


def test_a_batch_after_a_larger_batch(folder_of):
    """Trap: batch 4, then batch 1, with caches kept; then longer than the caches were."""
    model = load_model(folder_of("llama-3"), dtype=torch.float32)
    want = rows_of(model, PROMPTS[1:2])
    rows_of(model, PROMPTS)
    assert rows_of(model, PROMPTS[1:2]) == want
    assert rows_of(model, PROMPTS[1:2], max_new_tokens=90)[0][:20] == want[0]


def test_prompts_run_at_few_lengths(folder_of, monkeypatch):
    """Libraries keep something for every shape that they meet: 32 lengths, of prompts and of what a
    chat adds."""
    rounded = {n: padded_length(n) for n in range(1, 513)}
    assert (
        all(n <= r <= n + max(7, n // 8) for n, r in rounded.items())
        and len(set(rounded.values())) == 32
    )
    model = load_model(folder_of("llama-3"), dtype=torch.float32)
    seen, hidden = [], model.hidden
    monkeypatch.setattr(
        model,
        "hidden",
        lambda tokens, *others: seen.append(tokens.size(1)) or hidden(tokens, *others),
    )
    engine = Engine(model, 1, 159)
    for n in (1, 5, 8, 9, 70, 130, 158):
        engine.clear()
        rows_of(model, [[5] * n], engine=engine, max_new_tokens=1)
        rows_of(model, [[5] * (n // 2) + [6] * (n - n // 2)], engine=engine, max_new_tokens=1)
    assert seen == [8, 8, 8, 8, 8, 8, 16, 8, 72, 40, 144, 72, 160, 80]


def test_prefill_gives_the_logits_after_each_prompt(folder_of, monkeypatch):
    """Not those after its padding, with which a small model would often say the same."""
    model, plain = (load_model(folder_of("llama-3"), dtype=torch.float32) for _ in range(2))
    found, head = [], model.head
    monkeypatch.setattr(model, "head", lambda h: found.append(head(h)) or found[-1])
    rows_of(model, PROMPTS, max_new_tokens=1)
    for prompt, logits in zip(PROMPTS, found, strict=True):
        logits = logits.flatten()  # (1, 1, V)
        want = plain(torch.tensor([prompt]), torch.arange(len(prompt)))[0, -1]
        torch.testing.assert_close(logits, want, atol=1e-4, rtol=1e-4)


def test_prefill_in_chunks_equals_whole(folder_of, monkeypatch):
    model = load_model(folder_of("mistral-v0.1"), dtype=torch.float32)
    prompts = [
        torch.randint(3, 131, (n,), generator=torch.Generator().manual_seed(n)).tolist()
        for n in (23, 8, 16, 1)
    ]
    want = rows_of(model, prompts)
    monkeypatch.setattr("decoding.runner.PREFILL_CHUNK", 8)
    assert rows_of(model, prompts) == want


def test_seeds(folder_of):
    model = load_model(folder_of("llama-3"), dtype=torch.float32)
    a, b, c = (rows_of(model, PROMPTS[:1], sampling=SAMPLED, seed=seed) for seed in (7, 7, 8))
    assert a == b != c
    assert rows_of(model, PROMPTS[:1] * 2, sampling=SAMPLED, seed=[7, 8]) == [*a, *c]  # one a row


def test_lengths_are_checked_before_anything_runs(folder_of, monkeypatch):
    model = load_model(folder_of("llama-3"), dtype=torch.float32)  # a context of 160
    prompt = [5] * 100
    for limit, extra in ((160, 60), (130, 30)):
        engine = Engine(model, 1, limit)
        for budget in (extra - 1, extra):
            assert len(rows_of(model, [prompt], max_new_tokens=budget, engine=engine)[0]) == budget
    monkeypatch.setattr(model, "hidden", lambda *_: pytest.fail("something ran"))
    for options, names in [
        (
            {"max_new_tokens": 61},
            "prompt 0 has 100 tokens; with 61 new ones that is 161, over the limit of 160",
        ),
        ({"engine": engine, "max_new_tokens": 31}, "over the limit of 130"),
        ({"max_new_tokens": 0}, "max_new_tokens = 0"),
    ]:
        with pytest.raises(ValueError, match=names):
            rows_of(model, [prompt], **options)
    for prompts, names in [
        ([], "no prompt"),
        ([[5], []], "prompt 1 is empty"),
        ([[5, 131]], "token id 131"),
    ]:
        with pytest.raises(ValueError, match=names):
            rows_of(model, prompts)


@pytest.mark.parametrize("lag", [0, 2])
def test_logits_that_are_not_finite_are_named(folder_of, monkeypatch, lag):
    """Also when the host learns of it late: the steps in between must not embed the token that is
    none."""
    monkeypatch.setattr(
        timing.Readback,
        "host_lag",
        property(lambda self: lag, lambda self, value: None),
        raising=False,
    )
    model = load_model(folder_of("llama-3"), dtype=torch.float32)
    model.norm.weight[3] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        rows_of(model, PROMPTS[:1])
