"""generate.LLM: text in, text out, as a program uses it.

Oracles: `decode`, the plain loop; the same prompt alone; Python's str and json; ids that a
processor dictates.
"""

import asyncio
import copy
import gc
import itertools
import json
import pickle
import shutil
import signal
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import ROOT

from decoding.answers import Completion
from decoding.errors import UserError
from decoding.fair_lock import FairLock
from decoding.sampling import Sampling
from drafts.ngram import NgramDraft
from generate import LLM, decode
from loading.tokenizer import conversation_ids

DEMO = ROOT / "checkpoints" / "demo"
DRAFT = ROOT / "checkpoints" / "demo-draft"
PROMPT = "Once upon a time"
PROMPTS = [PROMPT, "The dog", "One day, Tim and his mother", "A bird", "Lily likes the"]
GREEDY = {"temperature": 0, "max_new_tokens": 40}
TEMPLATE = """{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}
{%- if add_generation_prompt %}assistant:{% endif %}"""
SCHEMA = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
        "happy": {"type": "boolean"},
    },
    "required": ["age", "happy"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    """In float32, where sampled tokens do not depend on the number of rows either."""
    return LLM(DEMO, batch_size=2, device="cpu", dtype="float32")


def alone(llm: LLM, prompt, **settings) -> str:
    return llm.generate([prompt], **settings)[0].text


def dictate(llm: LLM, prompt: str, ids: list[int]):
    """A logits_processor whose answer to this prompt is these ids."""
    start = len(llm.encode(prompt)) - 1  # the position whose logits decide the first of them
    script = torch.tensor(ids)

    def processor(logits, tokens, pos):  # (B, T, V), (B, S), (B, T)
        number = (pos - start).clamp(0, len(ids) - 1)
        allowed = torch.nn.functional.one_hot(script[number], logits.size(-1))  # (B, T, V)
        return logits.masked_fill(allowed == 0, float("-inf"))

    return processor


def dictated_ids(llm: LLM, text: str) -> list[int]:
    """Ids of a text inside an answer, where no space is put in front."""
    return llm.encode("\x02" + text)[len(llm.encode("\x02")) :]


# --------------------------------------------------------------------------------------- one text


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "settings", [{"temperature": 0}, {"temperature": 1.1, "top_k": 40, "seed": 5}]
)
def test_stream_and_generate_are_the_plain_loop(llm, settings):
    ids = llm.encode(PROMPT)
    numbers = {name: value for name, value in settings.items() if name != "seed"}
    options = {
        "sampling": Sampling(**numbers),
        "seed": settings.get("seed", 0),
        "max_new_tokens": 40,
    }
    tokens = list(decode(llm.engine.model, ids, stop_ids=llm.tokenizer.stop_ids, **options))
    stream = llm.tokenizer.stream(continues=True)
    text = "".join(stream.feed(id) for id in tokens) + stream.flush()
    completion = llm.generate([PROMPT], max_new_tokens=40, **settings)[0]
    assert (completion.tokens, completion.text, completion.finish_reason) == (
        tokens,
        text,
        "length",
    )
    pieces = list(llm.stream(PROMPT, max_new_tokens=40, **settings))
    assert "".join(pieces) == text and len(pieces) > 20


def test_a_stop_string_ends_the_text_wherever_tokens_and_pieces_part(llm):
    text = alone(llm, PROMPT, **GREEDY)
    for start in range(4, 64, 7):
        stop = text[start : start + 6]
        wanted = text[: text.index(stop)]
        completion = llm.generate([PROMPT], stop=["never", stop], **GREEDY)[0]
        assert (completion.text, completion.finish_reason) == (wanted, "stop"), stop
        assert len(completion.tokens) < 40
        assert "".join(llm.stream(PROMPT, stop=stop, **GREEDY)) == wanted
    assert alone(llm, PROMPT, stop="never", **GREEDY) == text


def test_pieces_are_whole_characters(llm):
    text = "né 日本 🎉!"
    ids = dictated_ids(llm, text)
    assert len(ids) > len(text) + 4  # several tokens are parts of a character
    processor = dictate(llm, PROMPT, ids)
    pieces = list(llm.stream(PROMPT, logits_processor=processor, max_new_tokens=len(ids)))
    assert "".join(pieces) == text
    assert set(filter(None, pieces)) <= set(text) | {"n", "né"}


def test_the_token_that_ends_an_answer_adds_no_text(llm):
    eos = min(llm.stop_ids)
    processor = dictate(llm, PROMPT, [*dictated_ids(llm, "cat"), eos])
    completion = llm.generate([PROMPT], logits_processor=processor, max_new_tokens=30)[0]
    assert (completion.text, completion.tokens[-1], completion.finish_reason) == (
        "cat",
        eos,
        "stop",
    )
    ids = dictated_ids(llm, "cat dog")
    other = LLM.from_engine(llm.engine, llm.tokenizer, stop_ids=ids[-1:])  # a token that has text
    processor = dictate(llm, PROMPT, ids)
    completion = other.generate([PROMPT], logits_processor=processor, max_new_tokens=30)[0]
    assert (completion.tokens, completion.finish_reason) == (ids, "stop")
    assert completion.text and not completion.text.endswith("g")


def test_closing_a_stream_frees_its_slot():
    llm = LLM(DEMO, device="cpu")  # one slot
    wanted = alone(llm, "The dog", **GREEDY)
    stream = llm.stream(PROMPT, **GREEDY)
    next(stream)
    assert llm.engine.has_unfinished()
    stream.close()
    assert not llm.engine.has_unfinished() and not llm.running
    assert alone(llm, "The dog", **GREEDY) == wanted


# ---------------------------------------------------------------------------------- several texts


@pytest.mark.slow
def test_more_prompts_than_slots_get_what_each_gets_alone(llm):
    for settings in (GREEDY, {"temperature": 1.0, "seed": 7, "max_new_tokens": 30}):
        seed = settings.get("seed", 0)
        together = [completion.text for completion in llm.generate(PROMPTS, **settings)]
        one_by_one = [
            alone(llm, prompt, **settings | {"seed": seed + number})
            for number, prompt in enumerate(PROMPTS)
        ]
        assert together == one_by_one
        assert len(set(together)) == len(PROMPTS)


def test_streams_may_run_side_by_side(llm):
    wanted = [alone(llm, prompt, **GREEDY) for prompt in PROMPTS[:2]]
    streams = [llm.stream(prompt, **GREEDY) for prompt in PROMPTS[:2]]
    pieces = itertools.zip_longest(*streams, fillvalue="")
    assert ["".join(column) for column in zip(*pieces)] == wanted


@pytest.mark.slow
@pytest.mark.parametrize(
    "draft, k",
    [("ngram", 3), (DRAFT, 3), pytest.param(str(DRAFT), "auto", marks=pytest.mark.attack)],
)
def test_drafts_leave_the_greedy_text_as_it_is(llm, draft, k):
    drafted = LLM(DEMO, batch_size=2, device="cpu", dtype="float32", draft=draft, speculate_k=k)
    prompts = [*PROMPTS, "the cat sat on the mat, the cat sat on the"]
    answers = drafted.generate(prompts, **GREEDY)
    assert [answer.text for answer in answers] == [
        answer.text for answer in llm.generate(prompts, **GREEDY)
    ]
    for start in range(4, 60, 9):  # a round may have decided more tokens than a stop string leaves
        stop = answers[0].text[start : start + 6]
        ended, plain = (one.generate([PROMPT], stop=stop, **GREEDY)[0] for one in (drafted, llm))
        assert (ended.text, ended.tokens, ended.finish_reason) == plain[:3]
    if k != "auto":
        assert any(token.index < token.accepted for answer in answers for token in answer.drafting)


def test_a_chat_computes_its_earlier_turns_once(tmp_path):
    folder = shutil.copytree(DEMO, tmp_path / "chat")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    llm = LLM(folder, device="cpu")
    messages = [{"role": "user", "content": "Tell me about the dog."}]
    reply = llm.chat(messages, **GREEDY)
    messages += [
        {"role": "assistant", "content": reply.text},
        {"role": "user", "content": "And the cat?"},
    ]
    second = llm.answer(messages, **GREEDY)
    list(llm.run([second]))
    assert second.request.num_reused > len(llm.encode(messages[:1])) + 20
    fresh = LLM(folder, device="cpu").chat(messages, **GREEDY)
    assert second.completion().text == fresh.text


# --------------------------------------------------------------------------------------- settings


def test_prompts_are_text_ids_or_messages(llm):
    messages = [{"role": "user", "content": "The dog"}]
    ids = llm.encode("The dog")
    assert llm.encode(tuple(ids)) == ids == llm.tokenizer.encode("The dog")
    assert llm.encode(messages) == conversation_ids(llm.tokenizer, messages)
    text, by_ids, by_messages = (
        answer.text for answer in llm.generate(["The dog", ids, messages], **GREEDY)
    )
    assert text == by_ids
    assert (
        by_messages
        == llm.chat(messages, **GREEDY).text
        == alone(llm, llm.encode(messages), **GREEDY)
    )


def test_a_logits_processor_is_one_calls():
    """Drafted or not, and the next call is as if there had been none. One that the LLM was made
    with stays."""

    def no_letter_e(logits, tokens, pos):
        return logits.masked_fill(has_e, float("-inf"))

    llm = LLM(DEMO, device="cpu")
    has_e = torch.tensor([b"e" in piece for piece in llm.tokenizer.pieces()])
    plain = alone(llm, PROMPT, **GREEDY)
    without = alone(llm, PROMPT, logits_processor=no_letter_e, **GREEDY)
    assert "e" in plain and "e" not in without and len(without) > 40
    assert alone(llm, PROMPT, **GREEDY) == plain
    other = LLM(DEMO, device="cpu", logits_processor=no_letter_e, draft="ngram", speculate_k=2)
    assert alone(other, PROMPT, **GREEDY) == without
    assert alone(other, PROMPT, logits_processor=None, **GREEDY) == plain
    assert alone(other, PROMPT, **GREEDY) == without


@pytest.mark.one_in(2)
@pytest.mark.parametrize("draft", [None, "ngram"])
def test_an_answer_obeys_its_schema(draft):
    pytest.importorskip("llguidance")
    llm = LLM(DEMO, batch_size=2, device="cpu", draft=draft)
    answers = llm.generate(PROMPTS, schema=SCHEMA, temperature=1.0, max_new_tokens=120)
    for answer in answers:
        value = json.loads(answer.text)
        assert value.keys() == {"age", "happy"} and answer.finish_reason == "stop"
        assert (
            type(value["age"]) is int and 1 <= value["age"] <= 99 and type(value["happy"]) is bool
        )
    with pytest.raises(ValueError, match="schema"):
        llm.generate([PROMPT], schema={"type": "no such type"})


def test_names_that_do_not_exist_are_refused(llm):
    for make in (
        lambda: LLM(DEMO, colour="red"),
        lambda: llm.generate([PROMPT], colour="red"),
        lambda: next(llm.stream(PROMPT, colour="red")),
    ):
        with pytest.raises(TypeError, match="colour"):
            make()


def test_what_cannot_be_answered_is_refused_by_number(llm):
    """Before anything runs, and nothing waits in the engine afterwards."""
    context = llm.engine.max_seq_length
    for prompts, settings, message in (
        (
            [PROMPT, [5] * context],
            {},
            rf"prompt 1: has {context} tokens; .* over the limit of {context}",
        ),
        ([PROMPT, PROMPT, [5, 99_999]], {}, "prompt 2: holds token id 99999"),
        ([PROMPT, []], {}, "prompt 1: is empty"),
        ([PROMPT], {"max_new_tokens": context}, f"over the limit of {context} positions"),
        ([PROMPT], {"max_new_tokens": 0}, "max_new_tokens = 0"),
        ([PROMPT], {"temperature": -1}, "temperature"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.generate(prompts, **settings)
        assert not llm.engine.has_unfinished() and not llm.running
    with pytest.raises(ValueError, match="over the limit"):
        next(llm.stream(PROMPT, max_new_tokens=context))
    with pytest.raises(ValueError, match="max_seq_length = 1 must lie between 2 and"):
        LLM(DEMO, max_seq_length=1, device="cpu")


def test_without_a_number_an_answer_takes_the_room_there_is(llm):
    """Up to 200 tokens, and never none."""
    context = llm.engine.max_seq_length
    for num_ids, expected in ((3, 200), (context - 200, 200), (context - 7, 7), (context - 1, 1)):
        assert llm.answer([5] * num_ids).request_args["max_new_tokens"] == expected


def test_an_answer_never_loses_its_processor():
    """Not to an answer that was asked for in between, without one."""
    llm = LLM(DEMO, device="cpu")
    first = llm.answer(PROMPT, logits_processor=lambda logits, tokens, pos: -logits, **GREEDY)
    second = llm.answer(PROMPT, **GREEDY)
    with pytest.raises(ValueError, match="before another logits_processor is asked for"):
        list(llm.run([first]))
    assert [answer.text for answer in llm.run([second])] == [alone(llm, PROMPT, **GREEDY)]
    with pytest.raises(UserError, match="an answer runs once"):
        list(llm.run([second]))
    assert not llm.running and not llm.engine.has_unfinished()


def test_an_error_while_decoding_names_its_prompt(llm):
    """The neighbour in the other slot has the text that it has alone."""
    wanted = alone(llm, "The dog", **GREEDY)
    marker = llm.encode("Lily likes the")[-1]

    def fail_for_lily(logits, tokens, pos):
        is_lily = (tokens[:, : len(llm.encode("Lily likes the"))] == marker).any(1)  # (B,)
        return logits.masked_fill(is_lily[:, None, None] & (pos > 8)[..., None], float("nan"))

    prompts = ["A bird", "Lily likes the"]
    with pytest.raises(ValueError, match=r"prompt 1: position \d+: .* not finite"):
        llm.generate(prompts, logits_processor=fail_for_lily, **GREEDY)
    with pytest.raises(ValueError, match="not finite"):
        list(llm.stream("Lily likes the", logits_processor=fail_for_lily, **GREEDY))
    answers = [
        llm.answer(prompt, logits_processor=fail_for_lily, **GREEDY)
        for prompt in ("The dog", prompts[1])
    ]
    list(llm.run(answers))
    assert answers[0].completion().text == wanted and answers[1].request.error is not None
    assert not llm.engine.has_unfinished() and not llm.running


# ------------------------------------------------------------------------------- beside each other

LONG = {"max_new_tokens": 60, "temperature": 0}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("how", ["bad bias", "bad seed", "closed early"])
def test_a_call_that_ends_early_leaves_others_alone(how):
    """A stream goes on although another call fails, or drops its answers."""
    llm = LLM(DEMO, batch_size=2)
    want = alone(llm, "Once upon a time", **LONG)
    stream = llm.stream("Once upon a time", **LONG)
    text = next(stream)
    if how == "closed early":
        answers = llm.run([llm.answer("One day", max_new_tokens=2), llm.answer("The", **LONG)])
        next(answers)
        answers.close()
    else:
        settings = {"bad bias": {"logit_bias": ((5000, 1.0),)}, "bad seed": {"seed": 2**63 - 1}}
        with pytest.raises(ValueError, match=r"logit_bias|seed = ") as error:
            llm.generate(["x", "y"], **settings[how], **LONG)
        assert "prompt" in str(error.value)
    assert text + "".join(stream) == want
    assert not llm.running and not llm.engine.has_unfinished()


def test_an_error_in_a_step_reaches_every_stream():
    """None of them may look complete."""

    def processor(logits, tokens, pos):  # (B, T, V), (B, S), (B, T)
        if (pos > 12).any():
            raise ArithmeticError("too far")
        return logits

    llm = LLM(DEMO, batch_size=2, logits_processor=processor)
    streams = [llm.stream("Once upon a time", **LONG) for _ in range(2)]
    for stream in streams:
        next(stream)
    for stream in streams:
        with pytest.raises(ArithmeticError, match="too far"):
            list(stream)


MESSAGES = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ("ab", {}, "give a list"),
        ([b"abc"], {}, "prompt 0: a prompt is text"),
        ([bytearray(b"abc")], {}, "prompt 0: a prompt is text.*, not bytearray"),
        ([{"role": "user", "content": "x"}], {}, "prompt 0: a prompt is text.*, not dict"),
        (["x", torch.tensor([5])], {}, "prompt 1: a prompt is text.*, not Tensor"),
        ([5], {}, "prompt 0: a prompt is text.*, not int"),
        ([[5, "x"]], {}, "prompt 0: 'x' in a list of token ids"),
        ([[5, 6.0]], {}, "prompt 0: 6.0 in a list of token ids"),
        ([[{"role": "user"}]], {}, "prompt 0: message 0 must be a dict with a role and a content"),
        *(
            ([[MESSAGES[0] | {"tool_calls": calls}]], {}, "or with tool_calls as a list")
            for calls in (5, {"function": {"name": "f"}}, [5], "f")
        ),
        ([[{"role": "user", "content": "x"}, "y"]], {}, "prompt 0: message 1 must be a dict"),
        ([[{"content": "x"}]], {}, "prompt 0: message 0 must be a dict with a role"),
        ([[{"role": "assistant", "tool_calls": []}]], {}, "prompt 0: message 0 must be a dict"),
        ([[{"role": "user", "content": None}]], {}, "prompt 0: message 0 must be a dict"),
        (["x"], {"temperature": "x"}, "prompt 0: temperature = 'x' must be 0"),
        (["x"], {"top_k": [5]}, r"prompt 0: top_k = \[5\] must be a whole number"),
        (["x"], {"seed": "x"}, "seed = 'x'"),
        (["x"], {"max_new_tokens": "5"}, "max_new_tokens = '5'"),
        (["x"], {"seed": 1.5}, "seed = 1.5"),
        (["x"], {"max_new_tokens": float("inf")}, "max_new_tokens = inf"),
        (["x"], {"max_new_tokens": float("nan")}, "max_new_tokens = nan"),
        (["x"], {"stop": [1]}, r"stop = \[1\] must be a string or a list of strings"),
        (["x"], {"stop": 5}, "stop = 5 must be a string"),
        (["x"], {"stop": b"a"}, "stop = b'a' must be a string"),
        (["x"], {"schema": Completion}, "schema = <class .* must be a JSON schema"),
        (["x"], {"schema": {"type": int}}, "schema = .* must be a JSON schema"),
        (["x"], {"schema": "{}"}, "schema = '{}' must be a JSON schema"),
        (["x"], {"logit_bias": {"5": 1.0}}, "logit_bias = {'5': 1.0} must map token ids"),
        (["x"], {"logit_bias": [5]}, r"logit_bias = \[5\] must map token ids"),
        (["x"], {"logit_bias": {5: "x"}}, "logit_bias = {5: 'x'} must map token ids"),
        (["x"], {"logit_bias": {5: float("nan")}}, "logit_bias: nan for token 5"),
        (["x"], {"tools": [{}]}, "prompt 0: tools: only messages have a chat template"),
        (["x"], {"prefill": "a"}, "prompt 0: prefill: only messages"),
        ([[5]], {"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs: only messages"),
        ([MESSAGES, "x"], {"prefill": "a"}, "prompt 1: prefill: only messages"),
        ([MESSAGES], {"parse_special": True}, "parse_special: only a text"),
        ([[5]], {"parse_special": True}, "parse_special: only a text"),
        ([MESSAGES], {"prefill": 5}, "prefill = 5 must be a string"),
        ([MESSAGES], {"tools": "x"}, "tools = 'x' must be a list"),
        ([MESSAGES], {"chat_template_kwargs": [1]}, r"chat_template_kwargs = \[1\] must be a dict"),
        ([MESSAGES], {"chat_template_kwargs": {"tools": []}}, "tools cannot be given there"),
    ],
)
def test_what_is_no_prompt_or_setting_is_refused(prompts, settings, message, llm):
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, **settings)


def test_an_engine_needs_rows_and_a_draft_needs_a_name():
    for batch_size in (0, -1):
        with pytest.raises(ValueError, match=f"batch_size = {batch_size} must be at least 1"):
            LLM(DEMO, batch_size=batch_size)
    for batch_size in ("2", 2.5, None):
        with pytest.raises(ValueError, match=f"batch_size = {batch_size!r} must be a whole number"):
            LLM(DEMO, batch_size=batch_size)
    for length in ("64", 64.5):
        with pytest.raises(ValueError, match=f"max_seq_length = {length!r} must be a whole number"):
            LLM(DEMO, max_seq_length=length)
    with pytest.raises(ValueError, match="logprobs = 'all' must be a whole number"):
        LLM(DEMO, logprobs="all")
    with pytest.raises(ValueError, match="the draft has an empty name"):
        LLM(DEMO, draft="")
    with pytest.raises(ValueError, match="dtype = 'int8' must be one of bfloat16"):
        LLM(DEMO, dtype="int8")


def test_none_and_a_dict_are_settings_too(llm):
    plain = alone(llm, PROMPT, **GREEDY)
    neutral = ("stop", "schema", "logit_bias", "tools", "prefill", "chat_template_kwargs")
    assert alone(llm, PROMPT, **dict.fromkeys(neutral), **GREEDY) == plain
    first = llm.encode(PROMPT + plain)[len(llm.encode(PROMPT))]
    by_dict, by_pairs = (
        alone(llm, PROMPT, logit_bias=bias, **GREEDY)
        for bias in ({first: -100}, ((first, -100.0),))
    )
    assert by_dict == by_pairs != plain


@pytest.mark.parametrize("messages", ["Hello", {"role": "user", "content": "x"}, ["x"], [], 5])
def test_a_chat_takes_messages(llm, messages):
    with pytest.raises(ValueError, match=r"messages = .* must be a list of {.role., .content.}"):
        llm.chat(messages)


@pytest.mark.parametrize("columns", [-1, 1, None])
@pytest.mark.parametrize("draft", [None, "ngram"])
def test_a_processor_returns_logits_of_the_same_shape(columns, draft):
    """Fewer would draw padding for tokens, more would draw ids that there are not."""

    def processor(logits, tokens, pos):
        if columns is None:
            return None
        wide = torch.nn.functional.pad(logits, (0, 1))
        return wide[..., : logits.size(-1) + columns]

    llm = LLM(DEMO, device="cpu", logits_processor=processor, draft=draft)
    message = "logits_processor returned .* for logits of shape"
    with pytest.raises(ValueError, match=message):
        llm.generate([PROMPT], **GREEDY)
    with pytest.raises(ValueError, match=message):
        list(llm.stream(PROMPT, **GREEDY))
    model = llm.engine.model
    with pytest.raises(ValueError, match=message):
        list(
            decode(
                model,
                [5],
                sampling=Sampling(0.0),
                max_new_tokens=3,
                logits_processor=processor,
            )
        )


def test_a_name_on_the_hub_is_a_checkpoint(monkeypatch):
    """The folder that the client gives; without it, one line about the name."""
    names = []

    def snapshot_download(name, **options):
        names.append(name)
        if name != "someone/demo":
            raise ConnectionError("no network")
        return str(DRAFT if names.count(name) > 1 else DEMO)

    monkeypatch.setitem(sys.modules, "huggingface_hub", FakeHub(snapshot_download))
    llm = LLM("someone/demo", draft="someone/demo", speculate_k=2, device="cpu")
    assert names == ["someone/demo"] * 2 and llm.engine.drafter.model is not None
    with pytest.raises(ValueError, match=r"someone/none: .* the hub cannot give it: no network"):
        LLM("someone/none")


class FakeHub:
    def __init__(self, snapshot_download):
        self.snapshot_download = snapshot_download


def test_a_draft_may_be_an_object(llm):
    """A drafts.base.Drafter, or any object with `propose`."""

    class Parrot:
        def propose(self, batch, plan):
            tokens = batch.tokens.gather(1, batch.pos[:, None]).expand(-1, plan.k)
            return tokens, torch.nn.functional.one_hot(tokens, 2048).float()

    prompt = "the cat sat on the mat, the cat sat on the"
    wanted = alone(llm, prompt, **GREEDY)
    for draft in (Parrot(), NgramDraft()):
        drafted = LLM(DEMO, draft=draft, speculate_k=3, device="cpu", dtype="float32")
        answer = drafted.generate([prompt], **GREEDY)[0]
        assert answer.text == wanted and any(record.k for record in answer.drafting)
    for draft in (object(), 5, [], Parrot):
        with pytest.raises(ValueError, match=r"draft = .* must be a folder, a spec or a drafter"):
            LLM(DEMO, draft=draft)


@pytest.fixture
def sampling_folder(tmp_path):
    """The demo with these settings in its generation_config.json."""

    def folder(settings: dict):
        copied = shutil.copytree(DEMO, tmp_path / "sampling", dirs_exist_ok=True)
        (copied / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, **settings}))
        return copied

    return folder


FOLDER_SAMPLINGS = [
    ({}, {"temperature": 0.8}),
    (
        {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20},
        {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    ),
    ({"do_sample": True, "top_k": -1}, {"temperature": 1.0}),
    ({"temperature": 0.5, "min_p": 0.2, "top_p": None}, {"temperature": 0.5, "min_p": 0.2}),
    ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0, "top_p": 0.9}),
    (
        {"do_sample": False, "repetition_penalty": 1.4, "num_beams": 1},
        {"temperature": 0, "repetition_penalty": 1.4},
    ),
]


@pytest.mark.one_in(3, 2)
@pytest.mark.parametrize(("settings", "wanted"), FOLDER_SAMPLINGS)
def test_a_folders_own_sampling_is_the_default(settings, wanted, llm, sampling_folder):
    """Oracle: the same settings, asked for. transformers' GenerationConfig reads the same values
    where a file says that it samples."""
    own = LLM(sampling_folder(settings), device="cpu", dtype="float32")
    more = {"max_new_tokens": 30, "seed": 3}
    assert alone(own, PROMPT, **more) == alone(llm, PROMPT, **wanted, **more)
    assert own.answer(PROMPT).request_args["sampling"] == Sampling(**wanted)
    explicit = {"temperature": 1.2, "top_k": 0, "repetition_penalty": 1.0}
    assert own.answer(PROMPT, **explicit).request_args["sampling"] == Sampling(**wanted | explicit)
    if settings.get("do_sample"):
        from transformers import GenerationConfig

        theirs = GenerationConfig.from_pretrained(sampling_folder(settings))
        assert wanted["temperature"] == (theirs.temperature or 1.0)


def test_a_folders_broken_sampling_is_named(sampling_folder):
    folder = sampling_folder({"temperature": "hot"})
    with pytest.raises(ValueError, match=r"generation_config.json: temperature = 'hot' must be 0"):
        LLM(folder, device="cpu")


# ----------------------------------------------------------------------------- threads, and memory


@pytest.mark.parametrize("draft", [None, pytest.param("suffix", marks=pytest.mark.slow)])
def test_threads_share_an_llm(draft):
    """Eight at a time, with two slots: each gets the text that it gets alone."""
    llm = LLM(DEMO, batch_size=2, device="cpu", dtype="float32", draft=draft)
    settings = [
        {"temperature": 0.0 if draft else n % 2, "seed": n, "max_new_tokens": 12 + n}
        for n in range(8)
    ]
    prompts = [PROMPTS[n % len(PROMPTS)] for n in range(8)]
    wanted = [alone(llm, prompt, **one) for prompt, one in zip(prompts, settings)]
    barrier = threading.Barrier(8)

    def answer(n: int) -> str:
        barrier.wait()
        if n % 3 == 0:
            return "".join(llm.stream(prompts[n], **settings[n]))
        return alone(llm, prompts[n], **settings[n])

    with ThreadPoolExecutor(8) as threads:
        for _ in range(2):
            assert list(threads.map(answer, range(8))) == wanted
    assert not llm.running and not llm.engine.has_unfinished()
    assert [alone(llm, prompt, **one) for prompt, one in zip(prompts, settings)] == wanted


def test_threads_take_a_lock_in_turn():
    """Also by a thread that has it already; and each has it alone."""
    lock = FairLock()
    counts = [0, 0, 0]
    inside = []

    def work(number: int) -> None:
        while sum(counts) < 300:
            with lock, lock:
                inside.append(number)
                counts[number] += 1
                time.sleep(0.001)
                assert inside.pop() == number and not inside

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(work, range(3)))
    assert min(counts) > max(counts) / 3, counts


def test_a_signal_handler_may_use_the_lock_that_its_thread_waits_for():
    """And an interrupt while a thread waits leaves the lock to others."""
    lock = FairLock()
    handled = []

    def handle(*_) -> None:
        with lock:
            handled.append(True)
        raise InterruptedError

    def hold() -> None:
        with lock:
            held.set()
            time.sleep(0.2)
            signal.raise_signal(signal.SIGUSR1)  # the main thread's, whatever thread raises it
            time.sleep(0.2)

    held = threading.Event()
    before = signal.signal(signal.SIGUSR1, handle)
    thread = threading.Thread(target=hold)
    try:
        thread.start()
        with pytest.raises(InterruptedError):
            held.wait()
            with lock:
                time.sleep(1)
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    assert handled == [True]
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(lock.acquire, timeout=5).result()


def test_a_thread_that_waits_gets_its_turn(llm):
    """A short answer is there long before another thread's long one."""
    events = []
    started = threading.Event()

    def long() -> None:
        for number, _ in enumerate(llm.stream(PROMPT, **GREEDY | {"max_new_tokens": 200})):
            events.append("long")
            if number == 3:
                started.set()

    thread = threading.Thread(target=long)
    thread.start()
    started.wait()
    alone(llm, "The dog", temperature=0, max_new_tokens=4)
    events.append("short")
    thread.join()
    assert events.count("long") > 100 and events.index("short") < 60


def test_coroutines_run_calls_in_threads(llm):
    wanted = [alone(llm, prompt, **GREEDY) for prompt in PROMPTS[:3]]

    async def answers() -> list:
        calls = [asyncio.to_thread(llm.generate, [prompt], **GREEDY) for prompt in PROMPTS[:3]]
        return await asyncio.gather(*calls)

    assert [answer.text for (answer,) in asyncio.run(answers())] == wanted


def test_an_error_in_one_thread_reaches_the_others_as_it_is():
    """None hangs, and the LLM serves on."""

    def processor(logits, tokens, pos):  # (B, T, V), (B, S), (B, T)
        if (pos > 12).any():
            raise ArithmeticError("too far")
        return logits

    llm = LLM(DEMO, batch_size=2, logits_processor=processor)
    with ThreadPoolExecutor(4) as threads:
        futures = [threads.submit(alone, llm, PROMPT, **GREEDY) for _ in range(4)]
        for future in futures:
            with pytest.raises(ArithmeticError, match="too far"):
                future.result(timeout=60)
    assert len(alone(llm, "A", temperature=0, max_new_tokens=3)) > 3


def test_an_error_elsewhere_ends_a_run_that_nobody_steps():
    """The error empties the engine, and the run must not wait for a step that never comes."""

    llm = LLM(DEMO, batch_size=2)

    def fail(step):
        raise ArithmeticError("elsewhere")

    def answers():
        yield llm.answer(PROMPT, **GREEDY)
        llm.step()  # the prompt
        llm.engine.run = fail
        with pytest.raises(ArithmeticError, match="elsewhere"):  # as if in another thread
            llm.step()

    (answer,) = llm.run(answers())
    with pytest.raises(ArithmeticError, match="elsewhere"):
        answer.check()


def test_options_are_checked_before_weights_are_read(monkeypatch):
    monkeypatch.setattr("drafts.registry.load_models", None)
    with pytest.raises(UserError, match="speculate_k = -1 must be"):
        LLM(DEMO, draft="ngram", speculate_k=-1)


def test_a_run_ends_with_its_last_answer_though_others_hold_all_slots():
    llm = LLM(DEMO, batch_size=1)
    other = llm.answer(PROMPT, **GREEDY | {"max_new_tokens": 100})
    llm.start(other)
    assert list(llm.run([])) == [] and llm.generate([]) == [] and not other.is_finished
    answer = llm.answer(PROMPT, **GREEDY | {"max_new_tokens": 5})
    last = llm.answer(PROMPT, **GREEDY | {"max_new_tokens": 100})

    def answers():
        yield answer
        llm.start(last)  # as if in another thread

    assert list(llm.run(answers())) == [answer]
    assert other.is_finished and not last.is_finished


def test_torchs_default_type_changes_no_text():
    """Token ids, biases and probabilities are no bfloat16, which ends at 256 whole numbers."""
    options = {"dtype": "float32", "draft": DRAFT, "speculate_k": 3, "cache_type": "int8"}
    settings = {"temperature": 1.0, "top_p": 0.9, "seed": 4, "logit_bias": {1001: 3.0, 1003: -2.5}}
    want = alone(LLM(DEMO, **options), PROMPT, **settings, max_new_tokens=30)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert alone(LLM(DEMO, **options), PROMPT, **settings, max_new_tokens=30) == want
    finally:
        torch.set_default_dtype(torch.float32)


def test_an_answer_belongs_to_the_engine_of_its_own_processor():
    """Also if another thread asks for another one while the prompt is encoded."""
    llm = LLM(DEMO, batch_size=1)

    class Prompt(list):
        def __iter__(self):
            llm.answer([5], logits_processor=lambda logits, tokens, pos: -logits)
            return super().__iter__()

    answer = llm.answer(Prompt([1, 5]), logits_processor=lambda logits, tokens, pos: logits)
    with pytest.raises(UserError, match="before another logits_processor is asked for"):
        llm.start(answer)


def test_a_drafter_returns_after_an_engine_that_failed():
    """An engine for a processor that cannot be used takes the drafter with it, while a notebook
    keeps its exception, which holds it."""
    llm = LLM(DEMO, draft="ngram", speculate_k="auto")
    want = alone(llm, PROMPT, **GREEDY)
    with pytest.raises(UserError, match="logits_processor") as kept:
        llm.generate([PROMPT], logits_processor=lambda logits, tokens, pos: logits[..., :7])
    assert alone(llm, PROMPT, **GREEDY) == want
    assert kept.value


@pytest.mark.parametrize("copied", [pickle.dumps, copy.deepcopy])
def test_an_llm_is_not_copied(llm, copied):
    for value in (llm, llm.engine, [{"llm": llm}]):
        with pytest.raises(TypeError, match=r"(LLM|Engine) cannot be pickled or copied: "):
            copied(value)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"draft": DRAFT},
        pytest.param({"draft": "ngram"}, marks=pytest.mark.slow),
        pytest.param({"draft": "suffix"}, marks=pytest.mark.slow),
        pytest.param({"draft": "layers:0-1"}, marks=pytest.mark.slow),
        pytest.param({"draft": ROOT / "checkpoints" / "demo-pard"}, marks=pytest.mark.slow),
        pytest.param({"draft": f"suffix,{DRAFT}"}, marks=pytest.mark.slow),
        pytest.param({"draft": "quantized:int8"}, marks=pytest.mark.slow),
        pytest.param({"quantize": "int8", "cache_type": "int8"}, marks=pytest.mark.slow),
    ],
)
def test_a_deleted_llm_is_freed_at_once(options):
    """Without a collection of cycles, also after an answer that was cut off and another
    processor."""
    gc.collect()
    gc.disable()
    try:
        llm = LLM(DEMO, device="cpu", **options)
        answer = llm.answer(PROMPT, **GREEDY)
        list(llm.run([answer]))
        llm.generate([PROMPT], logits_processor=lambda logits, *_: -logits, **GREEDY)
        stream = llm.stream(PROMPT, **GREEDY)
        next(stream)
        stream.close()
        parts = [llm, llm.engine, llm.engine.model, llm.engine.drafter, llm.engine.batch]
        parts = [part for part in parts if part is not None]
        freed = [weakref.ref(part) for part in parts]
        del llm, parts
        assert [part() for part in freed] == [None] * len(freed)
        assert answer.text
    finally:
        gc.enable()
