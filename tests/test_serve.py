"""The server as its clients see it: the real `openai` package against a running one, with the demo
pair.

Expected answers come from `generate` on the same model, one prompt at a time without a draft.
Servers are forks of this process, so that none takes the seconds of importing torch.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import itertools
import json
import math
import os
import re
import shutil
import signal
import socket
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Literal

import openai
import pydantic
import pytest
import torch
from conftest import ROOT, generate, started, status_of
from safetensors.torch import load_file, save_file

import decoding.prefill as prompt_room
from decoding.engine import Engine
from decoding.sampling import Sampling, uniform
from generate import LLM
from loading.checkpoint import load_model
from loading.tokenizer import load_tokenizer
from scripts.serve import serve, serve_flags
from scripts.serve.batches import Decoder, Job, Row
from scripts.serve.openai_form import Answer, Chat, Completion, Event, Refusal, Token, read_request
from scripts.serve.other_servers import DEFAULTS as OTHER_DEFAULTS
from scripts.serve.other_servers import LABELS
from weights.walker import pack_model

pytestmark = pytest.mark.attack  # half a minute on two cores

DEMO = ROOT / "checkpoints" / "demo"
DRAFT = ["--draft_checkpoint", str(ROOT / "checkpoints" / "demo-draft"), "--speculate_k", "3"]
PROMPTS = [
    f"{who} {did}"
    for who in ("Once upon a time", "One day, Tom", "The dog", "Lily and Sam")
    for did in ("saw", "went to the park and", "was sad. ", "had a big red ball")
]


class Running:
    """A server of its own, and clients of it."""

    def __init__(self, folder: Path, *flags: str):
        self.log = folder / f"log{len(list(folder.iterdir()))}"
        argv = [
            "--checkpoint",
            str(DEMO),
            "--device",
            "cpu",
            "--threads",
            "1",
            "--no-compile",
            "--port",
            "0",
            *flags,
        ]
        self.pid, self.status = started(lambda: serve.main(argv), self.log), None
        end = time.monotonic() + 120
        while "listening on" not in (text := self.log.read_text() if self.log.exists() else ""):
            assert time.monotonic() < end and os.waitpid(self.pid, os.WNOHANG) == (0, 0), text
            time.sleep(0.02)
        self.url = text.split("listening on ")[1].split()[0]
        self.client = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120
        )

    def ask(self, prompt, **others):
        usual = {"model": "demo", "max_tokens": 40, "temperature": 0}
        return self.client.completions.create(prompt=prompt, **usual | others)

    def raw(self, path: str, body: bytes | None = None, **headers: str) -> tuple[int, dict]:
        """Status and body of a request as no client of OpenAI's would make it."""
        all_headers = {
            "Content-Type": "application/json",
            **{k.replace("_", "-"): v for k, v in headers.items()},
        }
        try:
            with urllib.request.urlopen(
                urllib.request.Request(self.url + path, body, all_headers), timeout=60
            ) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def wait_for(self, words: str) -> None:
        """Wait until these stand on stderr, where a line may follow the answer."""
        end = time.monotonic() + 10
        while words not in self.log.read_text():
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.02)

    def end(self, number: int = signal.SIGTERM) -> int:
        if self.status is None:
            os.kill(self.pid, number)
            self.status = status_of(self.pid)
        return self.status


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    running = Running(tmp_path_factory.mktemp("serve"), *DRAFT, "--batch_size", "4")
    yield running
    assert running.end() == 0, running.log.read_text()
    assert "Traceback" not in running.log.read_text()


@pytest.fixture
def serving(tmp_path):
    """Starts servers of a test's own, of which none outlives it."""
    servers = []

    def start(*flags: str) -> Running:
        servers.append(Running(tmp_path, *flags))
        return servers[-1]

    yield start
    for running in servers:
        running.end(signal.SIGKILL)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(DEMO)


@pytest.fixture(scope="module")
def model():
    """As the programs hold it: packed weights round otherwise on some processors."""
    return pack_model(load_model(DEMO))


@pytest.fixture(scope="module")
def plain_answer(model, tokenizer):
    """(text, ids) of a prompt alone, without a draft."""

    def decode(prompt: str, new: int = 40) -> tuple[str, list[int]]:
        options = {"sampling": Sampling(0.0), "max_new_tokens": new, "stop_ids": tokenizer.stop_ids}
        ids = [id for _, id in generate(model, [tokenizer.encode(prompt)], **options)]
        stream = tokenizer.stream(continues=True)
        return "".join(stream.feed(id) for id in ids) + stream.flush(), ids

    return decode


def test_completion_whole_and_streamed_is_what_the_prompt_alone_gives(
    server, plain_answer, tokenizer
):
    text, ids = plain_answer(PROMPTS[0])
    answer = server.ask(PROMPTS[0])
    chunks = list(server.ask(PROMPTS[0], stream=True, stream_options={"include_usage": True}))
    parts = [chunk.choices[0] for chunk in chunks[:-1]]
    assert answer.choices[0].text == "".join(part.text for part in parts) == text
    assert answer.choices[0].finish_reason == parts[-1].finish_reason == "length"
    assert [part.finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
    for usage in (answer.usage, chunks[-1].usage):
        assert (usage.prompt_tokens, usage.completion_tokens) == (
            len(tokenizer.encode(PROMPTS[0])),
            len(ids),
        )
    for timings in (answer.choices[0].timings, parts[-1].timings):
        assert (
            timings["ttft_s"] > 0
            and timings["decode_tok_s"] > 0
            and timings["speculative"]["accepted"] > 0
        )
    assert server.ask(tokenizer.encode(PROMPTS[0])).choices[0].text == text  # ids for a prompt


def test_a_chat_goes_on_where_its_caches_end(server, plain_answer):
    """Without a template a conversation is its texts, a line each, so the second turn's prompt is
    known here."""
    messages = [{"role": "user", "content": "One day, Lily found"}]
    options = {"model": "demo", "temperature": 0, "max_completion_tokens": 20}
    first = server.client.chat.completions.create(messages=messages, **options).choices[0].message
    assert (
        first.role == "assistant" and first.content == plain_answer(messages[0]["content"], 20)[0]
    )
    messages += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [{"type": "text", "text": "Then"}]},
    ]
    stream = list(server.client.chat.completions.create(messages=messages, stream=True, **options))
    answer_text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert (
        answer_text
        == plain_answer("\n".join(["One day, Lily found", first.content, "Then"]), 20)[0]
    )
    assert stream[0].choices[0].delta.role == "assistant"
    assert stream[-1].choices[0].timings["cached_tokens"] >= 4


def test_stop_strings_end_before_themselves(server, plain_answer):
    text = plain_answer(PROMPTS[0])[0]
    for stop in (text[20:25], [text[30:34], "never"]):
        choice = server.ask(PROMPTS[0], stop=stop).choices[0]
        assert choice.text == text[: text.index(stop if isinstance(stop, str) else stop[0])]
        assert choice.finish_reason == "stop"
    for at in range(8, 20):  # tokens that a round decides behind a stop string count nowhere
        options = {"stop": text[at : at + 2], "extra_body": {"tokens": True}}
        choice = server.ask(PROMPTS[0], **options).choices[0]
        accepted = sum(token["origin"] == "accepted" for token in choice.tokens)
        assert accepted == choice.timings["speculative"]["accepted"]
    alone = server.ask(PROMPTS[0], max_tokens=0, echo=True, stop=[*"abehiltw", " ", ","]).choices[0]
    assert (alone.text, alone.finish_reason) == (PROMPTS[0], "length")
    # what could have become one is not lost
    choice = server.ask(PROMPTS[0], stop=text[-3:] + "zzz").choices[0]
    assert (choice.text, choice.finish_reason) == (text, "length")


def test_special_tokens_of_prompts_and_stop_strings(server):
    """parse_special of /v1/completions, and a stop string that names the token which a bias makes
    certain."""
    tokenizer = load_tokenizer(DEMO)
    prompt = f"{PROMPTS[0]}</s> The"
    for value, ids in ((True, [1, *tokenizer.parse(prompt)]), (False, tokenizer.encode(prompt))):
        usage = server.ask(prompt, max_tokens=1, extra_body={"parse_special": value}).usage
        assert usage.prompt_tokens == len(ids)
    unknown = {"max_tokens": 9, "logit_bias": {"0": 100}}  # <unk>, which ends no answer
    choice = server.ask(PROMPTS[0], stop="<unk>", **unknown).choices[0]
    assert (choice.text, choice.finish_reason, choice.timings["tokens"]) == ("", "stop", 1)
    choice = server.ask(PROMPTS[0], stop="unk", **unknown).choices[0]
    assert (choice.text, choice.finish_reason, choice.timings["tokens"]) == ("", "length", 9)


def test_rows_of_a_batch_are_each_their_seed_alone(server):
    settings = {"temperature": 0.9, "top_p": 0.95, "max_tokens": 16}
    three = server.ask(PROMPTS[1], n=3, seed=5, **settings).choices
    assert [choice.timings["rows"] for choice in three] == [3, 3, 3]
    alone = [server.ask(PROMPTS[1], seed=seed, **settings).choices[0] for seed in (5, 6, 7)]
    assert [choice.text for choice in three] == [choice.text for choice in alone] and len(
        {c.text for c in three}
    ) == 3
    assert alone[0].timings["rows"] == 1
    # of a prompt that is counted once, and was kept three times
    usage = server.ask(PROMPTS[1], n=3, **settings).usage
    assert usage.prompt_tokens_details.cached_tokens <= usage.prompt_tokens
    # new but for BOS, in each of four rows
    usage = server.ask("Sue met nine purple zebras", n=4, **settings).usage
    assert usage.prompt_tokens_details.cached_tokens == 1
    four = server.ask([PROMPTS[2], PROMPTS[3]], n=2, seed=5, **settings).choices
    assert [choice.index for choice in four] == [0, 1, 2, 3]
    assert four[3].text == server.ask(PROMPTS[3], seed=6, **settings).choices[0].text
    first, second = (server.ask(PROMPTS[1], n=3, **settings).choices for _ in range(2))
    assert len({choice.timings["seed"] for choice in [*first, *second]}) == 6  # no draw is repeated
    unseeded = server.ask(PROMPTS[1], **settings).choices[0]
    assert (
        server.ask(PROMPTS[1], seed=unseeded.timings["seed"], **settings).choices[0].text
        == unseeded.text
    )


def test_equal_prompts_of_a_request_differ_without_a_seed(server):
    settings = {"temperature": 1, "max_tokens": 16, "n": 2}
    first, second = (server.ask([PROMPTS[1]] * 2, **settings).choices for _ in range(2))
    assert len({choice.timings["seed"] for choice in (*first, *second)}) == 8
    assert len({choice.text for choice in first}) == 4
    seeded = server.ask([PROMPTS[1]] * 2, seed=5, **settings).choices
    assert [choice.timings["seed"] for choice in seeded] == [5, 6, 5, 6]


def test_too_many_answers_are_refused_before_their_prompts_are_read(server):
    begin = time.monotonic()
    for n, param in ((128, "n"), (1, "prompt")):
        body = json.dumps({"prompt": [[1]] * 4000, "n": n, "max_tokens": 1}).encode()
        status, answer = server.raw("/v1/completions", body)
        assert (status, answer["error"]["param"]) == (400, param) and "256 that may wait" in answer[
            "error"
        ]["message"]
    assert time.monotonic() - begin < 2


def test_a_newcomer_ends_while_a_long_answer_runs(server, plain_answer):
    long = server.ask("Once there was a", max_tokens=400, temperature=30, stream=True)
    next(stream := iter(long))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        finished = pool.submit(lambda: (list(stream), time.monotonic())[1])
        text = server.ask(PROMPTS[0], max_tokens=4).choices[0].text
        assert time.monotonic() < finished.result() and text == plain_answer(PROMPTS[0], 4)[0]


def test_a_request_for_many_answers_delays_another_by_one_at_most(serving, plain_answer):
    running = serving("--batch_size", "1")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        many = pool.submit(
            running.ask, "Once there was a", n=40, max_tokens=24, temperature=30, seed=0
        )
        time.sleep(0.3)  # it decodes
        choice = running.ask(PROMPTS[0], max_tokens=4).choices[0]
        assert not many.done() and choice.text == plain_answer(PROMPTS[0], 4)[0]
        done = many.result()
    starts = sorted(other.timings["queue_s"] for other in done.choices)
    # It waits for the rest of the answer that runs, and for one more: it comes between three starts
    # in a row.
    longest = max(third - first for first, third in zip(starts, starts[2:]))
    assert len(done.choices) == 40 and choice.timings["queue_s"] <= longest


def test_sixteen_clients_of_all_kinds_at_once_get_what_they_get_alone(server, plain_answer):
    settings = [
        {"temperature": 0},
        {"temperature": 0.9, "seed": 3},
        {"temperature": 0.8, "top_p": 0.7, "seed": 4},
        {"temperature": 0, "logprobs": 3},
        {"temperature": 1, "logprobs": 2, "echo": True, "seed": 5},
        {"temperature": 0.7, "seed": 6, "extra_body": {"top_k": 5, "draft": False}},
        {"temperature": 0, "frequency_penalty": 1.5, "extra_body": {"repetition_penalty": 1.3}},
        {
            "temperature": 0.8,
            "presence_penalty": 2,
            "seed": 7,
            "logit_bias": {"13": -100, "300": 1.5},
        },
    ] * 2

    def ask(number: int) -> tuple:
        choice = server.ask(
            PROMPTS[number], **{"max_tokens": 10 + number} | settings[number]
        ).choices[0]
        return choice.text, choice.logprobs and choice.logprobs.tokens

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        together = list(pool.map(ask, range(16)))
    assert together == [ask(number) for number in range(16)]
    assert [together[n][0] for n in (0, 8)] == [plain_answer(PROMPTS[n], 10 + n)[0] for n in (0, 8)]


def log_probs(model, ids: list[int]) -> torch.Tensor:
    """(T, V) of the next token after each."""
    with torch.inference_mode():
        return model(torch.tensor([ids]), torch.arange(len(ids)))[0].log_softmax(-1)


def test_log_probabilities_are_the_models(server, model, tokenizer, plain_answer):
    prompt, ids = tokenizer.encode(PROMPTS[0]), plain_answer(PROMPTS[0], 12)[1]
    expected = log_probs(model, prompt + ids)
    logprobs = server.ask(PROMPTS[0], max_tokens=12, logprobs=2, echo=True).choices[0].logprobs
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    assert logprobs.tokens[len(prompt) :] == [tokenizer.pieces()[id].decode() for id in ids]
    close = [expected[i, id].item() for i, id in enumerate((prompt + ids)[1:])]
    # bfloat16: other shapes, other rounding
    assert logprobs.token_logprobs[1:] == pytest.approx(close, abs=0.05)
    for i, top in enumerate(logprobs.top_logprobs[1:]):
        assert max(top.values()) == pytest.approx(expected[i].max().item(), abs=0.05)
    messages = [{"role": "user", "content": PROMPTS[0]}]
    chat = server.client.chat.completions.create(
        model="demo",
        messages=messages,
        max_tokens=12,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
        stream=True,
    )
    entries = [
        entry
        for chunk in chat
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert [entry.logprob for entry in entries] == pytest.approx(close[len(prompt) - 1 :], abs=0.05)
    assert [len(entry.top_logprobs) for entry in entries] == [3] * 12
    assert (
        b"".join(bytes(entry.bytes) for entry in entries).decode()
        == plain_answer(PROMPTS[0], 12)[0]
    )
    scored = server.ask(PROMPTS[0], max_tokens=0, logprobs=0, echo=True).choices[0]
    assert scored.text == PROMPTS[0] and len(scored.logprobs.tokens) == len(prompt)


def test_a_chats_log_probabilities_are_those_of_its_text(server, tokenizer, plain_answer):
    """Without the token that ended it, as in OpenAI's API: guidance joins the entries."""
    ids = plain_answer(PROMPTS[0], 12)[1]
    end = next(id for id in ids[6:] if id not in ids[:6])
    pieces = [tokenizer.pieces()[id] for id in ids[: ids.index(end)]]
    options = {
        "model": "demo",
        "messages": [{"role": "user", "content": PROMPTS[0]}],
        "temperature": 0,
        "logprobs": True,
        "extra_body": {"stop_token_ids": [end]},
    }
    create = server.client.chat.completions.create
    (choice,) = create(**options).choices
    chunks = [chunk.choices[0] for chunk in create(**options, stream=True)]
    streamed = [entry for part in chunks if part.logprobs for entry in part.logprobs.content]
    assert choice.finish_reason == chunks[-1].finish_reason == "stop"
    assert choice.message.content == b"".join(pieces).decode()
    for entries in (choice.logprobs.content, streamed):
        assert [bytes(entry.bytes) for entry in entries] == pieces


@pytest.mark.parametrize("draft", [[], DRAFT], ids=["plain", "drafted"])
def test_an_echoed_prompt_runs_once_in_chunks_while_others_decode(
    serving, tokenizer, monkeypatch, draft
):
    """In chunks of 16 here: log-probabilities are those of one pass, whatever a slot has stored;
    four answers cost one prompt; and a client that decodes is not in the way."""
    monkeypatch.setattr("decoding.runner.PREFILL_CHUNK", 16)
    monkeypatch.setattr(prompt_room, "PROMPT_LOGITS", 7 * 2048)
    running = serving("--dtype", "float32", "--batch_size", "4", *draft)
    exact = load_model(DEMO, dtype=torch.float32)
    prompt = tokenizer.encode("Once upon a time a dog went to the park and saw a cat. " * 12)[:161]
    expected = log_probs(exact, prompt)
    close = [expected[i, id].item() for i, id in enumerate(prompt[1:])]
    likely = [expected[i].max().item() for i in range(len(prompt) - 1)]
    lengths = (161, 160, 17, 16, 2, 1)  # chunks full, begun and of one token
    prompts = [prompt[:length] for length in lengths]
    scored = running.ask(prompts, max_tokens=0, logprobs=2, echo=True).choices
    for length, choice in zip(lengths, scored, strict=True):
        assert choice.logprobs.token_logprobs[0] is None
        logprobs = choice.logprobs.token_logprobs[1:]
        assert logprobs == pytest.approx(close[: length - 1], abs=1e-4)
        tops = [max(top.values()) for top in choice.logprobs.top_logprobs[1:]]
        assert tops == pytest.approx(likely[: length - 1], abs=1e-4)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: list(running.ask("One", max_tokens=100, stream=True)))
        time.sleep(0.2)
        options = {"max_tokens": 2, "logprobs": 1, "echo": True, "temperature": 1, "seed": 3}
        four = running.ask([prompt, prompt[:40]], n=4, **options).choices
        assert len(other.result()) > 2
    for number, choice in enumerate(four):
        ids = (prompt, prompt[:40])[number // 4]
        assert choice.logprobs.token_logprobs[1:-2] == pytest.approx(
            close[: len(ids) - 1], abs=1e-4
        )
        if number % 3 == 0:
            alone = running.ask(ids, **options | {"seed": 3 + number % 4, "echo": False})
            assert choice.text.endswith(alone.choices[0].text)
    cached = [choice.timings["cached_tokens"] for choice in four]
    assert cached[0] == cached[4] == 0 and min(cached[1:4]) == 160 and min(cached[5:]) == 39


def test_clients_decode_between_the_chunks_of_an_echo(model, tokenizer):
    """Steps of the decoder, one by one: each runs one chunk of the echo and one step of the other
    client's answer."""
    engine = Engine(model, 2, 512, logprobs=0)
    engine.runner.chunk = 16
    llm = LLM.from_engine(engine, tokenizer)

    async def steps() -> tuple[list[int], list]:
        job, decoder = Job(asyncio.get_running_loop()), Decoder(llm, 9)
        request = read_request({"prompt": "a", "max_tokens": 50}, False, "m", Sampling(0))
        first = Row(job, request, 0, tokenizer.encode("Once upon"), 50, 0, tokenizer)
        decoder.add([first])
        decoder.step(0)
        echo = read_request(
            {"prompt": "a", "echo": True, "logprobs": 0, "max_tokens": 0}, False, "m", Sampling(0)
        )
        second = Row(Job(job.loop), echo, 0, [1, *range(5, 104)], 0, 0, tokenizer)
        decoder.add([second])
        numbers = []
        while not second.is_finished and len(numbers) < 20:
            numbers.append(len(first.ids))
            decoder.step(0)
        return numbers, second.request.prompt_logprobs

    numbers, scores = asyncio.run(steps())
    assert (
        len(numbers) == 7 and numbers == [*range(numbers[0], numbers[0] + 7)] and len(scores) == 99
    )


def test_tokens_say_where_they_came_from(server, plain_answer):
    options = {"extra_body": {"tokens": True}, "temperature": 0.8, "seed": 3}
    choice = server.ask(PROMPTS[1], **options).choices[0]
    tokens, result = choice.tokens, choice.timings["speculative"]
    assert "".join(token["text"] for token in tokens) == choice.text
    counts = Counter(token["origin"] for token in tokens)
    assert (
        counts["plain"] == 1
        and counts["accepted"] == result["accepted"]
        and counts["corrected"] > 0
    )
    assert max(token["round"] for token in tokens) == result["rounds"] + 1
    for token in tokens:
        assert 0 < token["p"] <= 1 and (token["q"] is None) == (
            token["origin"] in ("bonus", "plain")
        )
    overlaps = [token["overlap"] for token in tokens if token["q"] is not None]
    assert sum(overlaps) / len(overlaps) == pytest.approx(result["alpha"])
    plain = server.ask(PROMPTS[1], extra_body={"tokens": True, "draft": False}).choices[0]
    assert {token["origin"] for token in plain.tokens} == {"plain"} and plain.timings[
        "speculative"
    ] is None
    assert plain.text == plain_answer(PROMPTS[1])[0]


def test_a_client_that_leaves_frees_its_row(server, plain_answer, tokenizer):
    """What the caches hold afterwards says how far the row came: not to its end."""
    ids = plain_answer("Once there was a", 300)[1]
    stream = server.ask("Once there was a", max_tokens=300, stream=True)
    next(iter(stream))
    stream.close()
    full = tokenizer.encode("Once there was a") + ids
    after = server.ask(full, max_tokens=1).choices[0]
    assert (
        len(tokenizer.encode("Once there was a")) <= after.timings["cached_tokens"] < len(full) - 20
    )
    waiting = [server.ask(prompt, max_tokens=300, stream=True) for prompt in PROMPTS[:8]]
    for stream in waiting:
        stream.close()
    assert (
        server.ask("Once there was a", max_tokens=10).choices[0].text
        == plain_answer("Once there was a", 10)[0]
    )


def test_clients_that_leave_delay_no_end(serving):
    """Each leaves before its answer is complete. The server forgets their connections, and ends at
    once on SIGTERM."""
    running = serving()
    body = json.dumps({"prompt": PROMPTS[0], "max_tokens": 400}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    for _ in range(4):
        with socket.create_connection(
            ("127.0.0.1", int(running.url.rpartition(":")[2]))
        ) as connection:
            connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
            time.sleep(0.1)
    assert running.ask(PROMPTS[1], max_tokens=4).choices[0].text
    begin = time.monotonic()
    assert running.end() == 0 and time.monotonic() - begin < 60  # --answer_s is 600


def json_format(schema: dict) -> dict:
    return {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema, "strict": True},
    }


REFUSED = {
    "an impossible penalty": ({"presence_penalty": 2.5}, 400, "presence_penalty"),
    "a bias of no token": ({"logit_bias": {"99999": 1}}, 400, "logit_bias"),
    "too large a bias": ({"logit_bias": {"5": 101}}, 400, "logit_bias"),
    "a bias that is no number": ({"extra_body": {"logit_bias": {"5": "1"}}}, 400, "logit_bias"),
    "no whole number": ({"n": 1.5}, 400, "n"),
    "an impossible temperature": ({"temperature": -1}, 400, "temperature"),
    "an impossible mass": ({"top_p": 1.5}, 400, "top_p"),
    "a stop that is no text": ({"extra_body": {"stop": [3]}}, 400, "stop"),
    "more tokens than it may have": ({"extra_body": {"min_tokens": 3}}, 400, "min_tokens"),
    "special tokens in the text": (
        {"extra_body": {"skip_special_tokens": False}},
        400,
        "skip_special_tokens",
    ),
    "an effort": ({"extra_body": {"reasoning_effort": "high"}}, 400, "reasoning_effort"),
    "a stop token that there is not": (
        {"extra_body": {"stop_token_ids": [99999]}},
        400,
        "stop_token_ids",
    ),
    "JSON without an end": (
        {"extra_body": {"ignore_eos": True, "response_format": {"type": "json_object"}}},
        400,
        "response_format",
    ),
    "too long": ({"prompt": "a dog " * 600}, 400, "prompt"),
    "an id that there is not": ({"prompt": [5, 99999]}, 400, "prompt"),
    "no prompt": ({"prompt": None}, 400, "prompt"),
    "another model": ({"model": "gpt-4"}, 404, "model"),
    "an unknown key": ({"extra_body": {"mirostat": 2}}, 400, "mirostat"),
    "options of a stream": ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
    "a schema that another key holds": (
        {"extra_body": {"response_format": {"type": "json_object", "schema": {"type": "array"}}}},
        400,
        "response_format",
    ),
    "no format of answers": (
        {"extra_body": {"response_format": {"type": "xml"}}},
        400,
        "response_format",
    ),
    "no schema": (
        {"extra_body": {"response_format": {"type": "json_schema"}}},
        400,
        "response_format",
    ),
    "a broken schema": (
        {"extra_body": {"response_format": json_format({"type": "objct"})}},
        400,
        "response_format",
    ),
    "a schema that the grammar cannot follow": (
        {
            "extra_body": {
                "response_format": json_format(
                    {"type": "object", "properties": {f"p{n}": {} for n in range(700)}}
                )
            }
        },
        400,
        None,  # the answer has begun
    ),
    "more text than can fit": ({"prompt": "dog" * 100_000}, 400, "prompt"),
    "both lengths": ({"extra_body": {"max_completion_tokens": 3}}, 400, "max_tokens"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_keys_are_refused_by_name(server, case):
    options, status, param = REFUSED[case]
    with pytest.raises(openai.APIStatusError) as caught:
        server.ask(**{"prompt": "a"} | options)
    body = caught.value.body
    assert caught.value.status_code == status and set(body) == {"message", "type", "param", "code"}
    assert body["param"] == param and body["type"] == "invalid_request_error", body


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e400", "-1e999"])
def test_a_number_that_json_has_not_is_refused_wherever_it_stands(server, number):
    """Answers repeat parts of a request, and strict parsers refuse such a number there."""
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
        body = f'{{"input": "a", "tools": [{{"parameters": {{"x": [{number}]}}}}]}}'
        status, answer = server.raw(path, body.encode())
        assert status == 400 and f"it holds {number}; JSON has no NaN" in answer["error"]["message"]


def test_bodies_and_paths_that_mean_nothing(server):
    path, chat, fine = (
        "/v1/completions",
        "/v1/chat/completions",
        b'{"prompt": "a", "max_tokens": 1}',
    )
    for status, result in (
        (400, server.raw(path, b"{")),
        (400, server.raw(path, b"[" * 100_000)),
        (400, server.raw(path, b'"text"')),
        (400, server.raw(path, rb'{"prompt": "a", "\ud800": 1}')),
        (400, server.raw(path, rb'{"prompt": "a", "stop": ["b", "\ud83d"]}')),
        (
            400,
            server.raw(
                chat, b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}'
            ),
        ),
        (400, server.raw(chat, b'{"messages": [{"role": "user", "content": "a"}], "tools": [{}]}')),
        (
            400,
            server.raw(
                chat,
                b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"x":'
                b" 1}}",
            ),
        ),
        (413, server.raw(path, b" " * (serve.MAX_BODY_BYTES + 1))),
        (415, server.raw(path, fine, Content_Type="text/plain")),
        (403, server.raw(path, fine, Host="rebound.example")),
        (404, server.raw("/v1/embeddings", fine)),
        (404, server.raw("/v1/models/../../etc/passwd")),
        (405, server.raw(path)),
    ):
        assert result[0] == status and set(result[1]["error"]) == {
            "message",
            "type",
            "param",
            "code",
        }, result
        assert "Traceback" not in result[1]["error"]["message"]
    assert server.raw(path, fine, Host="localhost")[0] == 200
    assert server.raw("/v1/models")[1]["data"][0]["id"] == "demo"
    assert server.raw("/health") == (200, {"status": "ok"})


def test_references_to_a_long_item_are_refused_before_they_are_rendered():
    messages = [{"role": "user", "content": " " * 2**20}] * 5
    for n in (4, 5):
        request = read_request({"messages": messages[:n]}, True, "m", Sampling())
        with pytest.raises(Refusal, match="characters") if n == 5 else contextlib.nullcontext():
            serve.check_size(request)


@pytest.mark.parametrize("key", ["messages", "prompt", "stop_token_ids", "tools"])
def test_of_a_wrong_list_the_first_item_is_read(key):
    """A body has room for two million items, and an error for each of them takes seconds."""
    wrong = {"messages": [0], "prompt": [{}], "stop_token_ids": [-1], "tools": [0]}[key]
    body = {"messages": [{"role": "user", "content": "a"}]} if key != "prompt" else {}
    request_type = Completion if key == "prompt" else Chat
    with pytest.raises(pydantic.ValidationError) as caught:
        request_type.model_validate(body | {key: wrong * 1000})
    assert caught.value.error_count() <= 2  # a prompt may be of two types


def connect(running: Running) -> socket.socket:
    host, port = running.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def test_names_of_hosts_and_addresses_of_clients(serving, server):
    """HTTP/1.0 needs no Host. A name that a flag allows is answered. X-Forwarded-For is believed
    from a trusted address alone, and no control code of it reaches the log."""
    forwarded = {"X_Forwarded_For": "6.6.6.6\x1b[31m"}
    proxied = serving("--forwarded_allow_ips", "127.0.0.1", "--allowed_host", "Box.example")
    for running, address, status in ((server, "127.0.0.1", 403), (proxied, "6.6.6.6", 200)):
        with connect(running) as connection:
            connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            assert connection.recv(99).startswith(b"HTTP/1.1 200")
        assert running.raw("/v1/models", Host="box.example:80")[0] == status
        assert running.raw("/v1/models", **forwarded)[0] == 200
        time.sleep(0.1)
        line = running.log.read_text().splitlines()[-1]
        assert line.split()[1].startswith(address) and "\x1b" not in running.log.read_text()


def test_the_page_fetches_nothing_from_elsewhere(server):
    with urllib.request.urlopen(server.url) as answer:
        page, policy = answer.read().decode(), answer.headers["Content-Security-Policy"]
    assert "connect-src 'self'" in policy and "default-src 'none'" in policy
    assert (
        "http://" not in page
        and "https://" not in page
        and " src=" not in page
        and "@import" not in page
    )


def test_key_queue_and_time_are_bounded(serving):
    limits = ("--queue", "2", "--batch_size", "1", "--answer_s", "0.6", "--stop", "zebra")
    others = (
        "--api_key",
        "k",
        "--served_model_name",
        "mine",
        "--cors",
        "http://a.example:3000",
        "--cors",
        "https://b.example",
    )
    running = serving(*limits, *others)
    with pytest.raises(openai.AuthenticationError):
        running.ask("a", model="mine")
    assert running.raw("/health")[0] == 200
    for origin, is_allowed in (
        ("http://a.example:3000", True),
        ("https://b.example", True),
        ("http://c.example", False),
    ):
        headers = {
            "Origin": origin,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
        }
        preflight = urllib.request.Request(
            running.url + "/v1/completions", headers=headers, method="OPTIONS"
        )
        with contextlib.nullcontext() if is_allowed else pytest.raises(urllib.error.HTTPError):
            assert (
                urllib.request.urlopen(preflight).headers["Access-Control-Allow-Origin"] == origin
            )
    for scheme, status in (
        ("bearer k", 200),
        ("BEARER k", 200),
        ("Basic k", 401),
        ("k", 401),
        ("Bearer ", 401),
    ):
        assert running.raw("/v1/models", Authorization=scheme)[0] == status
    running.client = running.client.with_options(api_key="k")
    assert running.raw("/v1/models", Authorization="bearer k")[0] == 200
    assert running.raw("/v1/models", Authorization="Bearer \xfc")[0] == 401
    running.ask = functools.partial(running.ask, model="mine")
    with pytest.raises(openai.NotFoundError, match="this server has 'mine'"):
        running.ask("a", model="demo")
    with pytest.raises(openai.BadRequestError, match="may wait"):
        running.ask("a", n=3)
    assert running.ask("One", max_tokens=2).choices[0].finish_reason == "length"
    # sampled nearly evenly: no end comes early
    with pytest.raises(openai.APIStatusError, match="answer_s") as caught:
        running.ask("a", max_tokens=500, temperature=30, n=2)
    assert caught.value.status_code == 504
    running.client = running.client.with_options(timeout=5)
    codes = []
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for done in [
            pool.submit(running.ask, "a", max_tokens=500, temperature=30) for _ in range(8)
        ]:
            codes.append(getattr(done.exception(), "status_code", 200))
    assert codes.count(429) >= 4 and set(codes) <= {429, 504}, codes
    assert running.end(signal.SIGINT) == 130
    assert "Traceback" not in running.log.read_text()


def test_sigterm_finishes_running_requests_and_accepts_no_others(serving, plain_answer):
    running = serving()
    text = plain_answer("Once there was a", 90)[0]
    stream = iter(running.ask("Once there was a", max_tokens=90, stream=True))
    first = next(stream).choices[0].text
    os.kill(running.pid, signal.SIGTERM)
    assert first + "".join(chunk.choices[0].text for chunk in stream) == text
    running.status = status_of(running.pid)
    assert running.status == 0, running.log.read_text()
    with pytest.raises(openai.APIConnectionError):
        running.ask("a")


def test_sigint_ends_at_once_though_a_request_is_half_sent(serving):
    running = serving("--answer_s", "20")
    with socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2]))) as connection:
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type:"
            b" application/json\r\n"
        )
        connection.sendall(head + b"Content-Length: 9\r\n\r\n{")
        time.sleep(0.2)
        begin = time.monotonic()
        assert running.end(signal.SIGINT) == 130 and time.monotonic() - begin < 10


def test_a_name_of_the_host_may_have_capitals(serving, monkeypatch):
    create = socket.create_server
    monkeypatch.setattr(
        socket, "create_server", lambda address, **others: create(("127.0.0.1", 0), **others)
    )
    running = serving("--host", "MyBox")
    running.url = running.url.replace("MyBox", "127.0.0.1")
    assert [running.raw("/v1/models", Host=name)[0] for name in ("MyBox", "mybox", "other")] == [
        200,
        200,
        403,
    ]


def test_ids_of_the_model_alone_have_log_probabilities(serving, tmp_path, tokenizer):
    """Its embedding has more rows than the tokenizer has tokens. Here they are as likely as a full
    stop."""
    folder = shutil.copytree(DEMO, tmp_path / "padded")
    weights, config = (
        load_file(DEMO / "model.safetensors"),
        json.loads((DEMO / "config.json").read_text()),
    )
    embedding = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = torch.cat(
        (embedding, embedding[tokenizer.encode("a.")[-1]].expand(64, -1))
    )
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": len(embedding) + 64}))
    running = serving("--checkpoint", str(folder))
    options = {"model": "padded", "logprobs": 20, "temperature": 1, "max_tokens": 60, "seed": 1}
    logprobs = running.ask("Once", **options).choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.top_logprobs) and any(
        "" in top for top in logprobs.top_logprobs
    )


def test_flags_are_the_defaults_of_requests(serving, plain_answer):
    """A request's stop strings replace the server's, and no stop string replaces them too."""
    text = plain_answer(PROMPTS[0])[0]
    running = serving("--stop", text[20:25])
    assert running.ask(PROMPTS[0]).choices[0].text == text[: text.index(text[20:25])]
    assert running.ask(PROMPTS[0], stop=["zzz"]).choices[0].text == text
    assert running.ask(PROMPTS[0], stop=[]).choices[0].text == text
    assert [serve.parse_args(flags).options.run.batch_size for flags in (["--batch", "8"], [])] == [
        8,
        4,
    ]


def test_flags_that_mean_nothing_to_a_server_are_refused(capsys):
    for flags, flag in (
        (["--prompt", "a"], "--prompt"),
        (["--json"], "--json"),
        (["--port", "70000"], "--port"),
        (["--output", "x"], "--output"),
        (["--ordered"], "--ordered"),
        (["--cors", "http://a.example/"], "--cors http://a.example/: an origin is"),
        (["--cors", "http://[::1"], "--cors http://[::1: an origin is"),
        (["--host", "é..x"], "--host é..x --port"),
    ):
        with pytest.raises(SystemExit) as exit:
            serve.main([*flags, "--device", "cpu"])
        assert exit.value.code == 2 and flag in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(SystemExit):
        serve.main(["--port", str(listener.getsockname()[1]), "--device", "cpu"])
    assert "cannot listen there" in capsys.readouterr().err


def sabotage(*_, **__):
    first, second = 1, 2, 3
    return first, second


@pytest.mark.parametrize("function", ["new_tokens", "conversation_ids", "check_settings"])
def test_a_bug_before_a_slot_is_an_internal_error(serving, monkeypatch, function):
    """500, and a traceback on stderr. What the client can put right stays a 400."""
    monkeypatch.setattr(serve, function, sabotage)  # the server is a fork of this process
    running = serving()
    messages = [{"role": "user", "content": "a"}]
    body = json.dumps({"model": "demo", "messages": messages, "max_tokens": 2}).encode()
    status, answer = running.raw("/v1/chat/completions", body)
    assert status == 500 and answer["error"]["message"] == "internal error", answer
    running.wait_for("ValueError: too many values to unpack")
    assert "in sabotage" in running.log.read_text()
    for wrong in ({"top_p": 7}, {"max_tokens": 0}, {"logit_bias": {"99999": 1}}):
        body = json.dumps({"model": "demo", "prompt": "a"} | wrong).encode()
        status, answer = running.raw("/v1/completions", body)
        assert status == 400 or function == "check_settings", answer


def test_a_bug_in_a_step_is_an_internal_error(serving, monkeypatch):
    """Its class for the client, its traceback for the operator."""
    running = serving()
    assert running.ask("a", max_tokens=2).choices
    monkeypatch.setattr(prompt_room, "decide", sabotage)
    running = serving()
    body = json.dumps({"model": "demo", "prompt": "a", "max_tokens": 2}).encode()
    status, answer = running.raw("/v1/completions", body)
    assert status == 500 and "decoding failed: " in answer["error"]["message"], answer
    assert "in sabotage" in running.log.read_text()


def test_neutral_values_ask_for_nothing_and_an_answer_is_pure_ascii():
    neutral = {
        "presence_penalty": 0,
        "logit_bias": {},
        "tools": [],
        "response_format": {"type": "text"},
        "user": "me",
    }
    ask = read_request(
        {"messages": [{"role": "user", "content": "a"}], **neutral}, True, "m", Sampling(0.5)
    )
    assert ask.sampling == Sampling(0.5) and ask.prompts == [[{"role": "user", "content": "a"}]]
    for message in (
        {"content": "a", "tool_calls": [{}]},
        {"content": None},
        {},
        {"content": "a", "audio": {"id": 1}},
    ):
        with pytest.raises(Refusal, match="messages"):
            read_request({"messages": [{"role": "user", **message}]}, True, "m", Sampling())
    with pytest.raises(Refusal):
        read_request({"prompt": "a", "temperature": math.nan}, False, "m", Sampling())
    chat = {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 3}
    with pytest.raises(Refusal, match="top_logprobs = 3 needs logprobs = true") as caught:
        read_request(chat, True, "m", Sampling())
    assert caught.value.body["error"]["param"] == "top_logprobs"
    numbers = [
        read_request(chat | keys, True, "m", Sampling())
        for keys in ({"logprobs": True}, {"top_logprobs": 0})
    ]
    assert [request.num_logprobs for request in numbers] == [3, None]
    named = [{"role": "user", "content": "a", "name": "Bob"}]
    assert read_request({"messages": named}, True, "m", Sampling()).prompts == [named]
    assert (
        read_request({"messages": [named[0] | {"name": None}]}, True, "m", Sampling()).prompts
        == ask.prompts
    )
    refusing = [{"role": "assistant", "content": None, "refusal": "I will not."}]
    answered = [{"role": "assistant", "content": "I will not."}]
    assert read_request({"messages": refusing}, True, "m", Sampling()).prompts == [answered]
    thoughts = {
        "role": "assistant",
        "content": "a",
        "reasoning_content": "b",
        "reasoning": "b",
        "thinking": "b",
    }
    assert read_request({"messages": [thoughts]}, True, "m", Sampling()).prompts == [[thoughts]]
    for arguments in ('{"x":1}', {"x": 1}, "", None, "missing"):
        function = {"name": "f"} | ({} if arguments == "missing" else {"arguments": arguments})
        calling = {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
        ((message,),) = read_request({"messages": [calling]}, True, "m", Sampling()).prompts
        read = message["tool_calls"][0]["function"]["arguments"]
        assert read == ({} if arguments in (None, "missing") else arguments)
    tools = [{"type": "function", "function": {"name": "f"}}]
    for value in ("auto", "none"):
        request = read_request(
            {"messages": named, "tools": tools, "tool_choice": value}, True, "m", Sampling()
        )
        assert request.template_tools == (tools if value == "auto" else None)
    for arguments in (3, [1]):
        call = {
            "role": "assistant",
            "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
        }
        with pytest.raises(Refusal, match="the arguments must be a JSON object"):
            read_request({"messages": [call]}, True, "m", Sampling())
    assert read_request({"prompt": "a", "n": None, "best_of": 1}, False, "m", Sampling()).n == 1
    ask_logprobs = read_request({"prompt": "a", "logprobs": 2}, False, "m", Sampling())
    # its piece begins with a blank
    first = Token(1, "One", top_logprobs=[[1, -0.5], [1, -0.5], [0, -1.0]])
    logprobs = Answer(ask_logprobs, "m", [b"a", b" One"]).choices(Event(0, [first], None))[0][
        "logprobs"
    ]
    assert logprobs["top_logprobs"] == [{"One": -0.5, "a": -1.0}] and logprobs["tokens"] == ["One"]
    (choice,) = Answer(ask, "m", []).choices(Event(0, [Token(5, "é"), Token(6, "")], None))
    assert choice["message"]["content"] == "é" and serve.json_response(choice).body.isascii()


def test_an_unknown_key_counts_where_it_asks_for_something():
    """Whatever its name, it is ignored at a value that asks for nothing, and refused by name at any
    other. The page names the keys that are exceptions."""
    messages = [{"role": "user", "content": "a"}]
    page = (ROOT / "docs" / "serve.md").read_text().partition("## Keys of other servers")[2]
    assert len(OTHER_DEFAULTS) <= 13  # and the two that depend on the rest of a request
    own_keys = {*Chat.model_fields}
    assert {*LABELS, *OTHER_DEFAULTS} - own_keys <= set(re.findall(r"`(\w+)`", page))
    ignored = [
        (name, value) for name in ("mirostat", "x") for value in (None, False, 0, "", [], {})
    ]
    ignored += [(name, 1.0) for name in ("typical_p", "length_penalty", "dynatemp_exponent")]
    ignored += [(name, {"any": [1]}) for name in LABELS]
    ignored += [(name, value) for name, values in OTHER_DEFAULTS.items() for value in values]
    plain = read_request({"messages": messages}, True, "m", Sampling())
    for name, value in ignored:
        request = read_request({"messages": messages, name: value}, True, "m", Sampling())
        others = {"separate_reasoning": request.separate_reasoning}
        assert request.model_dump() == plain.model_dump() | others
    refused = [
        (name, value) for name in ("mirostat", "x") for value in (True, 1, 1.0, "a", [0], -1)
    ]
    refused += [("typical_p", 0.9), ("skip_special_tokens", False), ("include_reasoning", False)]
    refused += [("reasoning_effort", "low"), ("verbosity", "low"), ("modalities", ["audio"])]
    for name, value in refused:
        with pytest.raises(Refusal) as caught:
            read_request({"messages": messages, name: value}, True, "m", Sampling())
        assert caught.value.body["error"]["param"] == name


# What clients of these servers send when nobody has set anything, from their request types and
# clients.
DEFAULTS = [
    {
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "reasoning_effort": "none",
        "verbosity": "medium",
        "modalities": ["text"],
        "tool_choice": "auto",
        "tools": [],
        "stop": None,
        "logit_bias": None,
        "frequency_penalty": 0,
        "top_p": 1,
        "n": 1,
        "stream_options": None,
    },
    {
        "use_beam_search": False,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "length_penalty": 1.0,
        "stop_token_ids": [],
        "include_stop_str_in_output": False,
        "ignore_eos": False,
        "min_tokens": 0,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "truncate_prompt_tokens": None,
        "prompt_logprobs": None,
        "allowed_token_ids": None,
        "bad_words": [],
        "priority": 0,
        "request_id": "r",
        "return_tokens_as_token_ids": False,
        "return_token_ids": None,
        "cache_salt": None,
        "vllm_xargs": None,
        "include_reasoning": True,
        "add_generation_prompt": True,
        "continue_final_message": False,
        "documents": None,
    },
    {
        "top_k": -1,
        "regex": None,
        "ebnf": None,
        "stop_regex": None,
        "no_stop_trim": False,
        "ignore_eos": False,
        "lora_path": None,
        "session_params": None,
        "return_hidden_states": False,
        "separate_reasoning": True,
        "rid": None,
        "custom_logit_processor": None,
        "return_routed_experts": False,
    },
    {
        "repeat_penalty": 1.0,
        "typical_p": 1.0,
        "dynatemp_range": 0.0,
        "dynatemp_exponent": 1.0,
        "dry_multiplier": 0,
        "xtc_probability": 0.0,
        "mirostat": 0,
        "grammar": "",
        "top_k": 0,
        "n_probs": 0,
        "min_keep": 0,
        "n_keep": 0,
        "n_discard": 0,
        "cache_prompt": True,
        "max_tokens": -1,
        "n_predict": None,
        "timings_per_token": False,
        "samplers": None,
        "reasoning_format": "none",
        "return_progress": False,
        "post_sampling_probs": False,
        "logit_bias": [],
        "lora": [],
        "stop": [""],
    },
]


OF_CHATS = {"add_generation_prompt", "separate_reasoning"}  # true by default


def test_keys_of_other_servers_at_their_defaults_change_nothing():
    messages = [{"role": "user", "content": "a"}]
    chat = read_request({"messages": messages}, True, "m", Sampling(0.5))
    text = read_request({"prompt": "a"}, False, "m", Sampling(0.5))
    for keys in DEFAULTS:
        asked = read_request({"messages": messages, **keys}, True, "m", Sampling(0.5))
        of_text = {key: value for key, value in keys.items() if key not in OF_CHATS}
        completed = read_request(
            {"prompt": "a", "add_special_tokens": True, **of_text}, False, "m", Sampling(0.5)
        )
        for request, plain in ((asked, chat), (completed, text)):
            assert (
                request.sampling.path == plain.sampling.path and request.sampling.temperature == 0.5
            )
            assert (
                request.prompts == plain.prompts and not request.stop and not request.stop_token_ids
            )
            assert request.num_logprobs is None and not request.echo and not request.ignore_eos
    both = {
        "prompt": "a",
        "logprobs": False,
        "top_logprobs": 0,
        "best_of": 2,
        "n": 2,
        "echo": False,
    }
    assert read_request(both, False, "m", Sampling()).num_logprobs is None
    assert read_request({"prompt": "a", "logprobs": 0}, False, "m", Sampling()).num_logprobs == 0
    limited = [
        read_request({"prompt": "a", key: x}, False, "m", Sampling()).max_new_tokens
        for key, x in (
            ("n_predict", 7),
            ("max_tokens", -1),
            ("max_completion_tokens", -1),
            ("n_predict", -1),
        )
    ]
    assert limited == [7, 2**31, 2**31, 2**31]  # no limit but the context's
    unlimited = read_request({"prompt": "a", "top_k": -1}, False, "m", Sampling(0.5, top_k=4))
    assert unlimited.sampling == Sampling(0.5, top_k=0)  # not the server's default
    penalized = Sampling(0, repetition_penalty=1.3)
    unpenalized = read_request({"prompt": "a", "repeat_penalty": 1.0}, False, "m", penalized)
    assert unpenalized.sampling == Sampling(0)  # not the server's default either
    limits = {"max_tokens": -1, "max_completion_tokens": 2}
    assert read_request({"messages": messages, **limits}, True, "m", Sampling()).max_new_tokens == 2
    for key, value in (
        ("min_tokens", 1),
        ("repeat_penalty", 1.1),
        ("mirostat", 2),
        ("ignore_eos", 1),
        ("top_k", -2),
        ("max_tokens", -2),
        ("cache_prompt", False),
        ("reasoning_effort", "low"),
        ("n_predict", "7"),
        ("best_of", 2),
        ("lora", [{"id": 0}]),
    ):
        with pytest.raises(Refusal) as caught:
            read_request({"prompt": "a", key: value}, False, "m", Sampling())
        param = {"n_predict": "max_tokens"}.get(key, key)
        assert caught.value.body["error"]["param"] == param, key
    for keys, key in (({"n_predict": 3, "max_tokens": 4}, "n_predict"),):
        with pytest.raises(Refusal, match=key):
            read_request({"prompt": "a", **keys}, False, "m", Sampling())


def test_end_tokens_of_a_request(server, plain_answer, tokenizer):
    """ignore_eos decodes past the end, a request's own stop tokens end it, and their text stays
    away."""
    end, most = sorted(tokenizer.stop_ids)[0], {"max_tokens": 30}
    text, ids = plain_answer(PROMPTS[0], 30)
    at = next(i for i, id in enumerate(ids) if i > 8 and id not in ids[:i])
    choice = server.ask(PROMPTS[0], **most, extra_body={"stop_token_ids": [ids[at]]}).choices[0]
    assert choice.finish_reason == "stop" and choice.timings["tokens"] == at + 1
    assert text.startswith(choice.text) and len(choice.text) < len(text)
    bias = {"logit_bias": {str(end): 100}}  # the model ends at once
    for ignored, reason, number in ((False, "stop", 1), (None, "stop", 1), (True, "length", 30)):
        choice = server.ask(PROMPTS[0], **most, **bias, extra_body={"ignore_eos": ignored}).choices[
            0
        ]
        assert (choice.finish_reason, choice.timings["tokens"]) == (
            reason,
            number,
        ) and not choice.text


def test_usage_comes_with_every_chunk_on_request(server, tokenizer):
    num_prompt_tokens = len(tokenizer.encode(PROMPTS[0]))
    for final in (True, None):
        options = {"continuous_usage_stats": True} | ({"include_usage": True} if final else {})
        chunks = list(
            server.ask(PROMPTS[0], stream=True, stream_options=options, echo=True, n=2, seed=1)
        )
        counts = [chunk.usage.completion_tokens for chunk in chunks]
        assert counts == sorted(counts) and counts[-1] == 80 and len(set(counts)) > 2
        assert all(chunk.usage.prompt_tokens == num_prompt_tokens for chunk in chunks)
        assert all(
            chunk.usage.total_tokens == num_prompt_tokens + n for chunk, n in zip(chunks, counts)
        )
        assert (chunks[-1].choices == []) == bool(final)
    # as in vLLM, no usage at all
    options = {"continuous_usage_stats": True, "include_usage": False}
    chunks = list(server.ask(PROMPTS[0], stream=True, stream_options=options))
    assert all(chunk.usage is None for chunk in chunks)
    chat = {
        "messages": [{"role": "user", "content": "One"}],
        "model": "demo",
        "max_tokens": 3,
        "stream": True,
    }
    chunks = list(
        server.client.chat.completions.create(
            **chat, stream_options={"continuous_usage_stats": True}
        )
    )
    assert all(chunk.usage is not None for chunk in chunks)
    # asks for nothing
    server.ask("a", stream=False, max_tokens=1, stream_options={"include_usage": False})


def test_a_chats_role_comes_with_its_first_token():
    """A time to first token is the time of the first chunk that has a choice."""
    messages = [{"role": "user", "content": "a"}]
    request = read_request({"messages": messages, "n": 2, "stream": True}, True, "m", Sampling())

    async def lines() -> list[dict]:
        job = Job(asyncio.get_running_loop())
        chunks = serve.answer_chunks(job, Answer(request, "m", []), 2, 5)
        events = serve.event_lines(None, chunks, None)
        first = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0.05)
        assert not first.done()
        end = {"finish_reason": "length", "timings": {"tokens": 1, "cached_tokens": 0}}
        for event in (
            Event(1, [Token(5, "x", round=1)]),
            Event(0, [Token(5, "y", round=1)], end),
            Event(1, [], end),
        ):
            job.send(event)
        received = [await first, *[line async for line in events]]
        return [json.loads(line.removeprefix("data: ")) for line in received if line]

    choices = [line["choices"][0] for line in asyncio.run(lines())]
    shown = [
        (choice["index"], choice["delta"].get("role"), choice["delta"].get("content"))
        for choice in choices
    ]
    assert shown[:4] == [(1, "assistant", ""), (1, None, "x"), (0, "assistant", ""), (0, None, "y")]


def test_empty_stop_strings_are_ignored(server, plain_answer):
    text = plain_answer(PROMPTS[0])[0]
    for stop in ("", [""], ["", ""]):
        assert server.ask(PROMPTS[0], stop=stop).choices[0].text == text
    assert (
        server.ask(PROMPTS[0], stop=[text[20:25], ""]).choices[0].text
        == text[: text.index(text[20:25])]
    )
    assert (
        len(
            read_request(
                {"prompt": "a", "stop": [*"abcdefghijklmnop", ""]}, False, "m", Sampling()
            ).stop
        )
        == 16
    )


def test_a_seed_of_minus_one_is_random(server):
    settings = {"temperature": 1, "max_tokens": 8}
    choices = [
        choice
        for _ in range(2)
        for choice in server.ask([PROMPTS[1]] * 2, n=2, seed=-1, **settings).choices
    ]
    seeds = [choice.timings["seed"] for choice in choices]
    assert len(set(seeds)) == 8 and all(0 <= seed < 2**53 + 4 for seed in seeds)
    assert server.ask(PROMPTS[1], seed=seeds[5], **settings).choices[0].text == choices[5].text


def test_paths_without_a_version_head_and_a_hint(server):
    chat = b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}'
    assert server.raw("/chat/completions", chat)[1]["object"] == "chat.completion"
    assert (
        server.raw("/completions", b'{"prompt": "a", "max_tokens": 1}')[1]["object"]
        == "text_completion"
    )
    assert (
        server.raw("/models")[1] == server.raw("/v1/models")[1]
        and server.raw("/models/demo")[0] == 200
    )
    for path in ("/v1/v1/chat/completions", "/chat", "/v1/embeddings"):
        status, body = server.raw(path, chat)
        assert status == 404 and "/v1/chat/completions" in body["error"]["message"]
    for path in ("/health", "/", "/v1/models"):
        with urllib.request.urlopen(
            urllib.request.Request(server.url + path, method="HEAD")
        ) as answer:
            assert (
                answer.status == 200
                and int(answer.headers["Content-Length"]) > 0
                and answer.read() == b""
            )


def test_too_long_a_prompt_says_so_in_openais_words(server):
    """litellm and others look for them, and for the code."""
    chat = {"messages": [{"role": "user", "content": "a dog " * 600}], "model": "demo"}
    for ask in (
        functools.partial(server.ask, "a dog " * 600),
        lambda: server.client.chat.completions.create(**chat),
    ):
        with pytest.raises(
            openai.BadRequestError, match="This model's maximum context length is 512 tokens"
        ) as caught:
            ask()
        assert caught.value.code == "context_length_exceeded"


def test_a_line_for_every_request_and_refusal(server, serving):
    """On stderr, with the reason that clients hide, and without what the request said."""
    secret = "the sentence that nobody should read"
    server.ask(secret, max_tokens=1)
    for path, body in (
        ("/v1/completions", {"prompt": secret, "temperature": -7}),
        ("/v1/completions", {"prompt": {"secret": secret}}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image", "x": secret}]}]},
        ),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": {"x": secret}}]}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": secret, "function_call": secret}]},
        ),
    ):
        assert server.raw(path, json.dumps(body).encode())[0] == 400
    server.raw("/nowhere/%1b[31m", b"{}")
    time.sleep(0.1)
    text = server.log.read_text()
    assert (
        '"POST /v1/completions HTTP/1.1" 200' in text
        and '"POST /v1/completions HTTP/1.1" 400' in text
    )
    assert "POST /v1/completions: 400, temperature = -7" in text and "POST /nowhere/" in text
    assert (
        "messages[0]: a part that is not text" in text and "function_call is not supported" in text
    )
    assert secret not in text and secret[4:20] not in text and "\x1b[31m" not in text
    quiet = serving("--log_level", "error")
    quiet.raw("/v1/completions", b"{")
    assert quiet.ask("a", max_tokens=1).choices and "HTTP/1.1" not in quiet.log.read_text()
    loud = serving("--log_level", "debug")
    loud.raw("/v1/completions", json.dumps({"prompt": {"secret": secret}}).encode())
    time.sleep(0.1)
    assert secret[:20] in loud.log.read_text()


def test_seeds_are_int64_and_decide_an_answer(server):
    for seed in (-(2**63) - 1, 2**63):
        with pytest.raises(Refusal, match="seed"):
            read_request({"prompt": "a", "seed": seed}, False, "m", Sampling())
    settings = {"temperature": 1, "max_tokens": 16, "n": 2}
    texts = [
        [c.text for c in server.ask("a", seed=seed, **settings).choices]
        for seed in (-2, -2, 2**63 - 1, -(2**63))
    ]
    assert texts[0] == texts[1] != texts[2]
    assert texts[2][1] == texts[3][0]  # the seed after the largest is the smallest
    noise = [
        uniform(torch.full((64,), seed), torch.arange(64)) for seed in (-1, 2**63 - 1, -(2**63), 0)
    ]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(noise, 2))


def test_a_key_comes_from_a_flag_a_file_or_the_environment(monkeypatch, tmp_path):
    def key(*flags: str) -> str | None:
        return serve_flags.read_api_key(serve.parse_args(flags))

    file = tmp_path / "key"
    file.write_text("from-file\n")
    assert key() is None
    monkeypatch.setenv("QUICKDRAFT_API_KEY", "from-environment")
    assert key() == "from-environment" and key("--api_key", "k") == "k"
    assert key("--api_key_file", str(file)) == "from-file"
    reader, writer = os.pipe()  # as bash's <(…), which can be read once
    os.write(writer, b"from-pipe")
    os.close(writer)
    args = serve.parse_args(["--api_key_file", f"/dev/fd/{reader}"])
    assert serve_flags.read_api_key(args) == "from-pipe"
    os.close(reader)
    for flags, message in (
        (("--api_key", ""), "--api_key: a key must be visible ASCII"),
        (("--api_key", "schlüssel"), "visible ASCII"),
        (("--api_key", "k", "--api_key_file", str(file)), "one of them"),
        (("--api_key_file", str(tmp_path / "none")), "none"),
    ):
        with pytest.raises(ValueError, match=message):
            key(*flags)
    monkeypatch.setenv("QUICKDRAFT_API_KEY", "")
    with pytest.raises(ValueError, match="QUICKDRAFT_API_KEY"):
        key()


def test_a_broken_host_and_a_client_that_leaves_are_no_bugs(server):
    fine = b'{"prompt": "a", "max_tokens": 1}'
    status, body = server.raw("/v1/completions", fine, Host="[::1")
    assert status == 400 and "Host" in body["error"]["message"]
    before = server.log.read_text()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        )
        connection.sendall(f"{head}Content-Length: 1000\r\n\r\n{{".encode())
        time.sleep(0.2)
    assert server.raw("/v1/completions", fine)[0] == 200
    time.sleep(0.2)
    lines = server.log.read_text().removeprefix(before)
    assert (
        "Traceback" not in lines
        and "ERROR" not in lines
        and "the client left before the body's end" in lines
    )


def test_text_offsets_index_the_text(server, tokenizer):
    """With BOS, the blank that begins a text and tokens that are parts of a character."""
    prompt = "Once upon 😀 a time, é"
    for echo in (True, False):
        options = {"logprobs": 2, "echo": echo, "max_tokens": 6}
        choice = server.ask(prompt, **options).choices[0]
        logprobs = choice.logprobs
        for text, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
            assert choice.text[offset:].startswith(text), (text, offset)
        assert "".join(logprobs.tokens) == choice.text
        assert len(logprobs.tokens) == 6 + echo * len(tokenizer.encode(prompt))
        parts = [chunk.choices[0].logprobs for chunk in server.ask(prompt, stream=True, **options)]
        assert [
            offset for part in parts if part for offset in part.text_offset
        ] == logprobs.text_offset


def test_max_tokens_are_clipped_to_the_room_that_the_prompt_leaves(server, tokenizer):
    prompt = [1, *[tokenizer.encode("Once")[-1]] * 499]
    for ask in (
        server.ask,
        lambda ids, **keys: server.ask(ids, **keys, extra_body={"max_completion_tokens": 5000}),
    ):
        # sampled nearly evenly: no end comes early
        answer = ask(prompt, max_tokens=5000, temperature=30)
        assert (
            answer.choices[0].finish_reason == "length"
            and answer.usage.completion_tokens == 512 - 500
        )
    with pytest.raises(openai.BadRequestError, match="512 positions: shorten the prompt") as caught:
        server.ask([*prompt, *prompt[:12]], max_tokens=1)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.long
class Pet(pydantic.BaseModel, extra="forbid"):
    kind: Literal["cat", "dog"]
    age: int = pydantic.Field(ge=0, le=9)


def test_answers_obey_a_schema_drafted_or_not_beside_free_ones(server, plain_answer):
    """Streamed too, with several answers, and through the client's parser."""
    schema = Pet.model_json_schema()
    options = {
        "extra_body": {"response_format": json_format(schema)},
        "prompt": "Tom has a",
        "max_tokens": 120,
    }
    with concurrent.futures.ThreadPoolExecutor() as pool:
        free = pool.submit(server.ask, PROMPTS[0])
        sampled = pool.submit(server.ask, **options, temperature=1, n=3)
        greedy = server.ask(**options).choices[0]
        assert free.result().choices[0].text == plain_answer(PROMPTS[0])[0]
    for choice in (greedy, *sampled.result().choices):
        assert choice.finish_reason == "stop" and Pet.model_validate_json(choice.text, strict=True)
    assert greedy.timings["speculative"]["drafted"] > 0
    plain = server.ask(
        **{**options, "extra_body": {**options["extra_body"], "draft": False}}
    ).choices[0]
    assert plain.text == greedy.text and plain.timings["speculative"] is None
    assert (
        "".join(chunk.choices[0].text for chunk in server.ask(**options, stream=True))
        == greedy.text
    )
    short = server.ask(**{**options, "max_tokens": 3}).choices[0]
    assert short.finish_reason == "length" and greedy.text.startswith(short.text)
    chat = {
        "messages": [{"role": "user", "content": "Tom has a"}],
        "model": "demo",
        "max_tokens": 120,
    }
    assert isinstance(
        server.client.chat.completions.parse(**chat, response_format=Pet).choices[0].message.parsed,
        Pet,
    )
    answer = server.client.chat.completions.create(
        **chat, temperature=0, response_format={"type": "json_object"}
    )
    assert answer.choices[0].message.content.startswith("{")


def test_an_agent_frameworks_client(server):
    """pydantic-ai: text, a stream, and an answer of a type."""
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{server.url}/v1", api_key="none")
    options = {"model_settings": {"temperature": 0, "max_tokens": 120}}
    agent = Agent(OpenAIChatModel("demo", provider=provider), instructions="Be brief.")
    text = agent.run_sync("Tom has a", **options).output
    assert len(text) > 20

    async def stream() -> str:
        async with agent.run_stream("Tom has a", **options) as result:
            return "".join([part async for part in result.stream_text(delta=True)])

    assert asyncio.run(stream()) == text
    agent = Agent(OpenAIChatModel("demo", provider=provider), output_type=NativeOutput(Pet))
    assert isinstance(agent.run_sync("Tom has a", **options).output, Pet)


def test_tools_and_their_results_reach_the_template(serving, tmp_path):
    """What is no call in the template's form comes back as text; a template without calls refuses
    tools (the demo's folder has none)."""
    folder = tmp_path / "folder"
    shutil.copytree(DEMO, folder)
    template = (
        "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
        "{% for m in messages %}{{ m.content if m.content is defined else '-' }}"
        "{% for c in m.tool_calls or [] %} {{ c.function.name }}({{ c.function.arguments.name"
        " }}){% endfor %} "
        "{% endfor %}{# [ARGS] #}"
    )
    (folder / "chat_template.jinja").write_text(template)
    running = serving("--checkpoint", str(folder))
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "call", "arguments": '{"name": "Max"}'},
    }
    messages = [
        {"role": "user", "content": "Tom"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "barks"},
    ]
    tools = [{"type": "function", "function": {"name": "call", "parameters": {}}}]
    ask = functools.partial(
        running.client.chat.completions.create, model="folder", max_tokens=8, temperature=0
    )
    text = ask(messages=messages, tools=tools).choices[0].message.content
    prompt = load_tokenizer(folder).parse("call Tom - call(Max) barks ")
    assert text == running.ask(prompt, model="folder", max_tokens=8).choices[0].text
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    running = serving("--checkpoint", str(folder))
    body = json.dumps({"messages": messages[:1], "tools": tools}).encode()
    status, answer = running.raw("/v1/chat/completions", body)
    assert status == 400 and "reads no calls of the model's chat" in answer["error"]["message"]
    for changed, reason in (
        (
            {"messages": messages[1:]},
            "messages[0], role 'assistant': the chat template leaves out its tool_calls",
        ),
        (
            {"messages": messages[:1], "chat_template_kwargs": {"x": 1}},
            "the chat template does not read x",
        ),
    ):
        status, answer = running.raw("/v1/chat/completions", json.dumps(changed).encode())
        assert status == 400 and reason in answer["error"]["message"]
    body = json.dumps(
        {"messages": messages[:1], "tools": tools, "tool_choice": "required"}
    ).encode()
    assert running.raw("/v1/chat/completions", body)[1]["error"]["param"] == "tools"


def test_the_evaluation_harness_gets_eval_lms_figures(serving):
    """Through the server's echoed log-probabilities, in float32: other shapes, the same figures."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from scripts import eval_lm

    flags = [
        "--checkpoint",
        str(DEMO),
        "--tasks",
        "stories",
        "--include_path",
        "benchmarks/tasks",
        "--limit",
        "4",
    ]
    manager = TaskManager(include_path=str(ROOT / "benchmarks" / "tasks"))
    running = serving("--dtype", "float32")
    about = {"model": "demo", "base_url": f"{running.url}/v1/completions", "tokenizer": str(DEMO)}
    options = {"tasks": ["stories"], "limit": 4, "task_manager": manager}
    served = simple_evaluate("local-completions", model_args=about, **options)["results"]["stories"]
    assert running.end() == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["eval_lm", *flags, "--dtype", "float32"])
        patch.chdir(ROOT)
        direct = eval_lm.run(eval_lm.parse_args())["results"]["stories"]
    for metric in ("word_perplexity,none", "bits_per_byte,none"):
        assert served[metric] == pytest.approx(direct[metric], rel=1e-5)


# --------------------------------------------------------------------------------------- the page


@pytest.fixture(scope="module")
def chromium():
    """A headless Chromium of the system's."""
    binary = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    if binary is None:
        pytest.skip("no chromium on this machine: apt-get install chromium")
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="no playwright: pip install playwright"
    )
    playwright.expect.set_options(timeout=60_000)
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=binary, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(chromium, server):
    """The server's page, just opened: greedy, 60 tokens an answer. It may raise no error and ask no
    other server."""
    from playwright.sync_api import expect

    errors = []
    opened = chromium.new_page(viewport={"width": 1000, "height": 720})
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.on(
        "request", lambda request: request.url.startswith(server.url) or errors.append(request.url)
    )
    opened.goto(server.url)
    # and the server's temperature is in its field
    expect(opened.locator("#about")).to_contain_text("drafted by")
    opened.fill("#temperature", "0")
    opened.fill("#most", "60")
    yield opened
    opened.close()
    assert errors == []


@pytest.mark.browser
def test_page_streams_what_is_typed_and_colours_it(page, plain_answer):
    from playwright.sync_api import expect

    expect(page.locator("#about")).to_contain_text("drafted by demo-draft, K = 3")
    page.locator("#prompt").focus()
    seen = page.evaluate_handle("new Set()")
    page.evaluate(
        """seen => new MutationObserver(() => {
            const text = document.querySelector("article.assistant")?.textContent;
            if (text) seen.add(text);
        }).observe(document.getElementById("log"), {childList: true, subtree: true})""",
        seen,
    )
    page.keyboard.type(PROMPTS[0])
    page.keyboard.press("Enter")
    expect(page.locator("#send")).to_have_text("Stop")
    expect(page.locator("#send")).to_have_text("Send")
    text = plain_answer(PROMPTS[0], 60)[0]
    assert page.text_content("article.assistant") == text
    grown = page.evaluate("seen => [...seen]", seen)
    assert len(grown) > 2 and all(text.startswith(part) for part in grown)  # it came piece by piece
    blue, red = (
        page.evaluate(
            "name => getComputedStyle(document.querySelector(`article.assistant .${name}`)).color",
            name,
        )
        for name in ("accepted", "corrected")
    )
    plain = page.evaluate("getComputedStyle(document.querySelector('article.assistant')).color")
    assert len({blue, red, plain}) == 3
    page.uncheck("#colours")  # the text as Markdown, without tokens
    assert page.locator("article.assistant [data-origin]").count() == 0
    assert page.text_content("article.assistant").split() == text.split()
    page.check("#colours")
    assert page.text_content("article.assistant") == text
    line = page.text_content("#live")
    assert (
        all(fact in line for fact in ("tok/s", "α 0.", "tokens a round"))
        and "plain decoding" not in line
    )


@pytest.mark.browser
def test_page_asks_for_what_is_typed_and_loses_nothing(page):
    """An empty temperature or limit is the server's default; a message that gets no answer stays in
    its box."""
    from playwright.sync_api import expect

    bodies = []
    page.on(
        "request",
        lambda request: request.post_data and bodies.append(json.loads(request.post_data)),
    )
    assert page.locator("#most").evaluate("input => input.defaultValue") == ""
    page.fill("#temperature", "")
    page.fill("#most", "3")
    page.fill("#prompt", "Once")
    page.keyboard.press("Enter")
    expect(page.locator("#live")).to_contain_text("finish_reason: length")
    expect(page.locator("#send")).to_have_text("Send")
    assert "temperature" not in bodies[0] and bodies[0]["max_tokens"] == 3
    page.click("#race")  # an empty box: what was asked last
    expect(page.locator(".race p")).to_contain_text("drafted over plain")
    assert [body["messages"] for body in bodies[1:]] == [[{"role": "user", "content": "Once"}]] * 2
    expect(page.locator(".race h2").first).to_contain_text("finish_reason: length")
    page.fill("#most", "")
    page.fill("#prompt", "a dog " * 2000)
    page.locator("#prompt").press("Enter")
    expect(page.locator("article.error")).to_contain_text("maximum context length")
    assert "max_tokens" not in bodies[3] and page.locator("article.user").count() == 1
    assert page.locator("#prompt").input_value() == "a dog " * 2000


@pytest.mark.browser
def test_page_tells_p_and_q_by_mouse_and_by_keys(page):
    from playwright.sync_api import expect

    page.fill("#prompt", PROMPTS[0])
    page.locator("#prompt").press("Enter")
    expect(page.locator("#live")).to_contain_text("finish_reason")
    expect(page.locator("#send")).to_have_text("Send")
    page.hover("article.assistant .corrected >> nth=0")
    tip = page.text_content("#tip")
    # greedy: 0 or 1
    assert tip.startswith("corrected") and "p 1.0000 of the target, q 0.0000 of the draft" in tip
    page.locator("#log").focus()
    page.mouse.move(0, 0)
    page.keyboard.press("ArrowRight")
    page.wait_for_timeout(200)
    assert page.text_content("#tip").startswith("plain\np ") and page.is_visible("#tip")
    page.keyboard.press("ArrowRight")
    page.wait_for_timeout(200)
    assert not page.text_content("#tip").startswith("plain")


@pytest.mark.browser
def test_page_races_plain_against_drafted(page, plain_answer):
    from playwright.sync_api import expect

    page.fill("#prompt", PROMPTS[1])
    page.locator("#race").focus()
    page.keyboard.press("Enter")
    expect(page.locator(".race p")).to_contain_text("the same text")
    plain, drafted = page.locator(".race section > div").all()
    assert plain.text_content() == drafted.text_content() == plain_answer(PROMPTS[1], 60)[0]
    assert plain.locator(".accepted").count() == 0 < drafted.locator(".accepted").count()
    assert page.locator(".race h2").all_text_contents()[1].startswith("drafted by demo-draft: ")
    raced = page.locator(".race h2").first.text_content().removeprefix("plain: ").partition(",")[0]
    expect(page.locator("#live")).to_contain_text(f"plain decoding: {raced} as raced")
    page.evaluate("about.plain_until = performance.now()")  # minutes later
    page.fill("#prompt", PROMPTS[0])
    page.keyboard.press("Enter")
    expect(page.locator("#live")).to_contain_text("finish_reason")
    assert "plain decoding" not in page.text_content("#live")


def answered(page, prompt: str) -> None:
    """Send a message from its box, and wait for the end of the answer."""
    from playwright.sync_api import expect

    page.fill("#prompt", prompt)
    page.locator("#prompt").press("Enter")
    expect(page.locator("#live")).to_contain_text("finish_reason")
    expect(page.locator("#send")).to_have_text("Send")


TOKENS = """() => [...document.querySelectorAll("article.assistant [data-origin]")].map(
    span => [span.dataset.origin, span.textContent, span.dataset.rejected ?? ""])"""


@pytest.mark.browser
def test_page_strikes_out_what_the_draft_had_and_replays_every_round(page, server):
    """Struck and kept tokens are those of the server's record, all together and round by round."""
    body = {
        "messages": [{"role": "user", "content": PROMPTS[0]}],
        "tokens": True,
        "temperature": 0,
        "max_tokens": 60,
    }
    _, answer = server.raw("/v1/chat/completions", json.dumps(body).encode())
    tokens = answer["choices"][0]["tokens"]
    answered(page, PROMPTS[0])
    shown = [[t["origin"], t["text"], "".join(t["rejected"])] for t in tokens]
    assert page.evaluate(TOKENS) == [[*t[:2], t[2].replace("\n", "↵")] for t in shown]
    assert sum(bool(t[2]) for t in shown) == sum(t[0] == "corrected" for t in shown) > 3
    before = page.evaluate(
        """() => { const span = document.querySelector("article.assistant [data-rejected]");
        const style = getComputedStyle(span, "::before");
        return [style.content, style.textDecorationLine, span.dataset.rejected]; }"""
    )
    assert before[1] == "line-through" and before[2] in before[0]
    page.click("text=Replay")
    slider, words = page.locator(".replay input"), page.locator(".replay output")
    for round, group in itertools.groupby(tokens, key=lambda token: token["round"]):
        group = list(group)
        accepted = "".join(t["text"] for t in group if t["origin"] == "accepted")
        proposed = accepted + "".join(part for t in group for part in t["rejected"])
        story = words.text_content()
        assert story.startswith(f"round {round} of {tokens[-1]['round']}")
        if round > 1:
            assert f"proposed “{proposed}”".replace("\n", "↵") in story
        seen = page.evaluate(
            """() => [...document.querySelectorAll("article.assistant [data-origin]")]
            .filter(span => !span.hidden).map(span => span.textContent).join("")"""
        )
        assert seen == "".join(t["text"] for t in tokens if t["round"] <= round)
        slider.press("ArrowRight")
    page.click("text=Close")
    assert len(page.evaluate(TOKENS)) == len(tokens)
    counts = Counter(t["round"] for t in tokens if t["q"] is not None)
    assert page.locator(".bars span").count() == max(counts.values())


@pytest.mark.browser
def test_page_survives_a_reload(page):
    from playwright.sync_api import expect

    about = page.locator("#about")
    assert page.locator(".intro button").count() == 3
    assert {"accepted", "rejected", "corrected", "bonus", "plain"} <= {
        *page.locator(".intro dt").all_text_contents()
    }
    page.fill("#most", "24")
    page.locator(".intro button").first.click()
    expect(page.locator("#live")).to_contain_text("finish_reason")
    expect(page.locator("#send")).to_have_text("Send")
    page.fill("#prompt", PROMPTS[1])
    page.click("#race")
    expect(page.locator(".race p")).to_contain_text("the same text")
    page.fill("#system", "Be brief.")
    page.uncheck("#greedy")
    expressions = (
        TOKENS,
        "[...log.querySelectorAll('article')].map(article => article.textContent)",
        "Object.entries(FIELDS).map(([id, property]) => [id, at(id)[property]])",
        "JSON.stringify(messages())",
    )
    before = [page.evaluate(expression) for expression in expressions]
    page.reload()
    expect(about).to_contain_text("drafted by")
    assert [page.evaluate(expression) for expression in expressions] == before
    assert before[3].startswith('[{"role":"system","content":"Be brief."},{"role":"user"')
    page.click("#reset")
    page.reload()
    expect(about).to_contain_text("drafted by")
    assert page.locator(".intro").count() == 1 and page.input_value("#system") == "Be brief."
    page.evaluate("STORES.forEach(name => window[name].setItem(STORE, '{'))")  # not this page's
    page.reload()
    expect(about).to_contain_text("drafted by")
    assert page.locator(".intro").count() == 1


@pytest.mark.browser
def test_page_draws_the_others_where_one_message_cannot_be_drawn(page):
    """A conversation that was stored by another version of the page, or one that breaks it."""
    from playwright.sync_api import expect

    page.evaluate(
        """() => {
            turns = [{role: "user", text: "first"}, {role: "race", text: "second"},
                {role: "assistant", text: "third", tokens: 3},
                {role: "assistant", text: "> ".repeat(4000) + "- ".repeat(2000), tokens: []}];
            at("colours").checked = false;
        }"""
    )
    page.reload()  # which stores them
    expect(page.locator("#about")).to_contain_text("drafted by")
    texts = page.locator("#log article").all_text_contents()
    assert texts[:3] == ["first", "second", "third"] and "> > > " in texts[3]
    page.click("#reset")
    answered(page, PROMPTS[0])
    assert page.locator("article.assistant").count() == 1


@pytest.mark.browser
def test_two_tabs_keep_a_conversation_each(chromium, server):
    from playwright.sync_api import expect

    context = chromium.new_context()
    tabs = []
    for prompt in PROMPTS[:2]:
        tab = context.new_page()
        tab.goto(server.url)
        expect(tab.locator("#about")).to_contain_text("drafted by")
        assert tab.locator("article.user").all_text_contents() == PROMPTS[: len(tabs)]
        tab.click("#reset")
        tab.fill("#most", "8")
        answered(tab, prompt)
        tabs.append((tab, prompt))
    for tab, prompt in [*tabs, tabs[0]]:
        tab.reload()
        expect(tab.locator("#about")).to_contain_text("drafted by")
        assert tab.locator("article.user").all_text_contents() == [prompt]
    context.close()


@pytest.mark.browser
def test_page_goes_on_after_a_restart_with_another_model(page):
    page.evaluate("model.id = 'another'; model.created = 1; about.draft = null")
    answered(page, PROMPTS[0])
    assert page.locator("article.error").count() == 0
    assert page.evaluate("model.id") == "demo" and page.evaluate("about.draft") is not None


@pytest.mark.browser
def test_page_races_greedily_unless_told_otherwise(page):
    from playwright.sync_api import expect

    bodies = []
    page.on("request", lambda request: request.post_data and bodies.append(request.post_data_json))
    page.fill("#temperature", "1.3")
    page.fill("#prompt", PROMPTS[2])
    page.click("#race")
    expect(page.locator(".race p")).to_contain_text("the same text")
    page.uncheck("#greedy")
    page.fill("#prompt", PROMPTS[3])
    page.click("#race")
    expect(page.locator(".race p")).to_have_count(2)
    assert [body["temperature"] for body in bodies] == [0, 0, 1.3, 1.3]
    assert bodies[2]["seed"] == bodies[3]["seed"]
    page.uncheck("#draft")
    answered(page, PROMPTS[4])
    assert bodies[-1]["draft"] is False
    assert {origin for origin, *_ in page.evaluate(TOKENS)} == {"plain"}


ATTACK = "<img src=x onerror='window.attacked = 1'><script>window.attacked = 1</script>"
LINK = "[safe](https://example.org/a) [unsafe](javascript:window.attacked=1)"


@pytest.mark.browser
@pytest.mark.parametrize("coloured", [True, False], ids=["tokens", "markdown"])
def test_page_never_interprets_what_a_model_writes(page, coloured):
    """The control puts the same text in as HTML, and finds the image and its script."""
    from playwright.sync_api import expect

    token = {"text": f"**{ATTACK}** {LINK}", "origin": "corrected", "rejected": [ATTACK]}
    token |= {"round": 1, "at": 0, "p": 1, "q": 0, "overlap": 0, "logprob": 0}
    choices = [{"tokens": [token]}, {"finish_reason": "stop"}]
    lines = [f"data: {json.dumps({'choices': [choice]})}\n\n" for choice in choices]
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(body="".join([*lines, "data: [DONE]\n\n"])),
    )
    page.set_checked("#colours", coloured)
    answered(page, ATTACK)
    for _ in range(2):
        assert page.locator("#log img, #log script, #log a[href^=javascript]").count() == 0
        assert ATTACK in page.text_content("article.assistant")
        assert page.text_content("article.user") == ATTACK
        page.wait_for_timeout(200)
        assert page.evaluate("window.attacked") is None
        page.reload()
        expect(page.locator("#about")).to_contain_text("drafted by")
    hrefs = page.locator("article.assistant a").evaluate_all("links => links.map(a => a.href)")
    assert hrefs == ([] if coloured else ["https://example.org/a"])
    page.evaluate("text => { log.innerHTML = text; }", ATTACK)
    page.wait_for_timeout(200)
    assert page.locator("#log img").count() == 1 and page.evaluate("window.attacked") == 1


MARKDOWN = [
    "# Title\n\nSome *words* and **more** and `a < b`.\n\n---\n\nAfter.",
    "- one\n- two **bold**\n  - inner\n  - other\n- three\n\nText",
    "  - one\n- two\n  - inner\n\n  of two",
    "3. three\n4. four\n\n> quoted *text*\n> goes on\n",
    "```python\nif a < b:\n    print('*no*')\n```\nafter `` a ` b `` end",
    "snake_case_name and 2 * 3 * 4 and \\*escaped\\* and __strong__ _em_",
    "[label](https://example.org/x?y=1) and [none](ftp://example.org)",
    "**a *b* c** and ***",
    "plain text\nin two lines\n\n\nthird",
]


@pytest.mark.browser
def test_page_formats_markdown_as_its_definition_says(page):
    """markdown-it, CommonMark's reference in Python, writes the same elements around the same text;
    list items may have a paragraph more, and headings stand two levels lower."""
    markdown_it = pytest.importorskip("markdown_it")
    oracle = markdown_it.MarkdownIt("commonmark", {"html": False})
    for text in MARKDOWN:
        html = page.evaluate(
            "text => { const box = make('p'); box.append(markdown(text)); return box.innerHTML; }",
            text,
        )
        html = html.replace(' rel="noopener noreferrer" target="_blank"', "")
        html = re.sub(r"(</?h)(\d)", lambda match: f"{match[1]}{int(match[2]) - 2}", html)
        html = html.replace(' class=""', "")
        want = oracle.render(text).replace("<hr />", "<hr>").replace("&quot;", '"')
        want = re.sub(r' class="language-\w+"', "", want)
        want = want.replace('<a href="ftp://example.org">none</a>', "[none](ftp://example.org)")

        def normal(html: str) -> str:
            html = re.sub(r"<li>\s*<p>(.*?)</p>", r"<li>\1", html, flags=re.DOTALL)
            return re.sub(
                r"\s*(</?(?:li|ul|ol|p|h\d|pre|blockquote|hr)\b[^>]*>|</code>)\s*", r"\1", html
            )

        assert normal(html) == normal(want), text


@pytest.mark.browser
def test_page_edits_retries_and_copies(page, chromium):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.fill("#most", "12")
    answered(page, PROMPTS[0])
    first = page.text_content("article.assistant")
    page.locator(".foot >> nth=1 >> text=Copy").click()
    wait_until(
        page, "[...document.querySelectorAll('.foot button')].some(b => b.textContent === 'Copied')"
    )
    assert page.evaluate("navigator.clipboard.readText()") == first
    answered(page, PROMPTS[1])
    page.locator("text=Retry").last.click()
    wait_until(page, "!stopping && turns.length === 4")
    assert page.locator("article.user").all_text_contents() == PROMPTS[:2]
    page.locator("text=Edit").first.click()
    assert page.input_value("#prompt") == PROMPTS[0]
    page.keyboard.press("Escape")
    assert page.input_value("#prompt") == "" and page.locator(".editing").count() == 0
    page.locator("text=Edit").first.click()
    answered(page, PROMPTS[2])
    assert page.locator("article.user").all_text_contents() == [PROMPTS[2]]
    assert page.locator("article.assistant").count() == 1


@pytest.mark.browser
def test_page_works_by_keyboard_and_every_control_has_a_name_and_a_visible_focus(page):
    page.locator("#prompt").focus()
    page.keyboard.type(PROMPTS[0])
    page.keyboard.press("Enter")
    wait_until(page, "!stopping && turns.length === 2")
    controls = page.locator(
        "button:enabled:visible, input:visible, textarea:visible, summary"
    ).count()
    names = []
    page.evaluate("document.activeElement.blur()")
    for _ in range(controls + 4):
        page.keyboard.press("Tab")
        name, outline = page.evaluate(
            """() => { const element = document.activeElement, style = getComputedStyle(element);
            const [label] = element.labels ?? [];
            const name = element.ariaLabel || label?.textContent || element.textContent;
            return [element === document.body ? null : name.trim(),
                style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2]; }"""
        )
        if name is not None:
            assert name and outline, name
            names.append(name)
    assert len({*names}) >= controls - 2  # Copy stands twice
    for name in ("Replay", "Retry", "Edit", "Race", "New", "Settings", "system message"):
        assert name in names
    page.locator("text=Replay").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("End")
    assert (
        page.text_content(".replay output").split(":")[0].split()[1::2]
        == [page.get_attribute(".replay input", "max")] * 2
    )


CONTRAST = """([name, scheme]) => {
    const box = make("span", name, "text");
    document.body.append(box);
    const canvas = new OffscreenCanvas(1, 1).getContext("2d");
    const luminance = colour => {
        canvas.fillStyle = colour;
        canvas.fillRect(0, 0, 1, 1);
        const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map(x => x / 255)
            .map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const pair = [getComputedStyle(box).color, getComputedStyle(document.body).backgroundColor];
    const [low, high] = pair.map(luminance).sort((a, b) => a - b);
    box.remove();
    return (high + 0.05) / (low + 0.05);
}"""


@pytest.mark.browser
def test_page_can_be_read_in_both_schemes_and_fits_both_widths(page):
    """WCAG's contrast of 4.5 for every origin, and nothing wider than the window."""
    answered(page, PROMPTS[0])
    page.click("text=Replay")
    page.fill("#prompt", PROMPTS[1])
    page.click("#race")
    wait_until(page, "!stopping")
    for width, scheme in itertools.product((390, 1280), ("light", "dark")):
        page.set_viewport_size({"width": width, "height": 800})
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate("log.scrollWidth <= log.clientWidth")
        for name in ("accepted", "swatch rejected", "corrected", "bonus", "plain"):
            assert page.evaluate(CONTRAST, [name, scheme]) >= 4.5, (name, scheme)


def wait_until(page, expression: str) -> None:
    """As wait_for_function does, which the page's policy forbids."""
    end = time.monotonic() + 60
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        page.wait_for_timeout(20)


@pytest.mark.browser
@pytest.mark.parametrize("button, width", [("#race", 1000), ("#race", 390), ("#send", 390)])
def test_page_follows_an_answer_until_somebody_scrolls_up(page, button, width):
    from playwright.sync_api import expect

    page.set_viewport_size({"width": width, "height": 420})
    page.fill("#most", "300")
    page.fill("#prompt", "Once there was a")
    page.click(button)
    below = "log.scrollHeight - log.scrollTop - log.clientHeight"
    wait_until(page, "log.scrollTop > 50")
    assert page.evaluate(below) < 2
    page.locator("#log").hover()
    page.mouse.wheel(0, -30)
    wait_until(page, "!following")
    num_tokens = page.evaluate("log.querySelectorAll('[data-origin]').length")
    expect(page.locator("#send")).to_have_text("Send")
    assert page.evaluate("log.querySelectorAll('[data-origin]').length") > num_tokens, (
        "it was still growing"
    )
    assert page.evaluate(below) > 20


@pytest.mark.browser
def test_page_stops_shows_errors_and_fits_a_phone(page, plain_answer):
    from playwright.sync_api import expect

    page.fill("#most", "300")
    page.fill("#prompt", "Once there was a")
    page.keyboard.press("Enter")
    expect(page.locator("article.assistant [data-origin]").first).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#send")).to_have_text("Send")
    assert (
        page.locator("article.assistant [data-origin]").count()
        < len(plain_answer("Once there was a", 300)[1]) - 5
    )
    page.fill("#prompt", "a dog " * 2000)
    page.keyboard.press("Enter")
    expect(page.locator("article.error")).to_contain_text("maximum context length")
    for width, scheme in ((390, "dark"), (1000, "light")):
        page.set_viewport_size({"width": width, "height": 760})
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (int(ground.split("(")[1].split(",")[0]) < 80) == (scheme == "dark")
