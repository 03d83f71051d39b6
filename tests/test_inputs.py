"""Hostile text, and lengths at every limit: nothing is lost, nothing is run over, and too much is
one quick line."""

import itertools
import json
import os
import resource
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT, generate

from cli.start import main
from decoding.engine import Engine
from decoding.sampling import Sampling
from decoding.stop_strings import StopStrings
from drafts.base import ModelDraft
from drafts.ngram import NgramDraft
from drafts.target_layers import layer_subset
from loading.checkpoint import load_model
from loading.config import config_from_hf
from loading.models import random_model
from loading.saving import save_model
from loading.tokenizer import load_tokenizer
from tests.attacks import fuzz
from weights.walker import quantized_copy

KINDS = ["sentencepiece", "tokenizers", "tiktoken"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of every kind of tokenizer."""
    folders = fuzz.build(tmp_path_factory.mktemp("folders"))
    hf = fuzz.HF | {"vocab_size": 520}  # 260 ranks and 256 special tokens
    save_model(random_model(config_from_hf(hf), dtype=torch.float32), folders["tiktoken"], hf)
    return folders


def run(monkeypatch, capsys, *arguments) -> tuple[int, str, list[str]]:
    """(exit status, stdout, error lines) of the program in this process."""
    monkeypatch.setattr(sys, "argv", ["generate.py", "--device", "cpu", *map(str, arguments)])
    status = 0
    try:
        main()
    except SystemExit as exit:
        status = exit.code
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return status, out, [line for line in err.splitlines() if line.startswith("error: ")]


TEXTS = {
    "NULs": "a\0b\0\0",
    "controls": "\x01\x1b[31m\x7f\x85",
    "right to left": "שלום עולם \u200f\u202eabc\u202c مرحبا",
    "combining": "e\u0301\u0323 Z\u0351\u036b\u0343 \u1100\u1161\u11a8 👩\u200d👩\u200d👧",
    "noncharacters": "\ufdd0\ufdd1\ufffe\uffff a",
    "replacement": "\ufffd\ufffd",
    "widest": "\U0010ffff\U000e0001",
    "spaces": " \u3000\u00a0 \u2028\t ",
    "line ends": "a\r\nb\rc\n\n",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(text, kind, folders):
    """Byte fallback and byte levels lose nothing; what a folder's normalizer changes
    (sentencepiece's NFKC here, NFC in the other) is what it changes alone: encoding the result once
    more changes no id. A message goes the same way."""
    tokenizer, text = load_tokenizer(folders[kind]), TEXTS[text]
    ids = tokenizer.encode(text, bos=False)
    found = tokenizer.decode(ids)
    assert tokenizer.encode(found, bos=False) == ids
    if kind == "tiktoken":
        assert found == text
    chat = tokenizer.chat([{"role": "user", "content": text}])
    assert 0 <= min(chat) <= max(chat) < tokenizer.vocab_size and "[INST]" in tokenizer.decode(chat)


@pytest.mark.parametrize("kind", KINDS)
def test_spelled_special_tokens_are_text_everywhere(kind, folders):
    """Every special token of the folder, in a prompt and in a message, together and one inside
    another."""
    tokenizer = load_tokenizer(folders[kind])
    special = set(tokenizer.specials.values())
    names = sorted(tokenizer.specials)
    assert {"sentencepiece": 3, "tokenizers": 2, "tiktoken": 256}[kind] <= len(names)
    own = sum(id in special for id in tokenizer.chat([{"role": "user", "content": "x"}]))
    for text in [
        *names,
        "".join(names),
        "".join(f"{a[:2]}{b}{a[2:]}" for a, b in itertools.pairwise(names)),
    ]:
        assert not special & set(tokenizer.encode(text, bos=False)), text
        assert (
            sum(id in special for id in tokenizer.chat([{"role": "user", "content": text}])) == own
        ), text
    messages = [{"role": "user", "content": names[0]}]
    assert names[0] in tokenizer.decode(tokenizer.chat(messages))


@pytest.mark.attack
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unit", ["a", "日", "<s>\ne\u0301 "])
def test_a_megabyte_is_one_quick_line(unit, kind, folders, tmp_path, monkeypatch, capsys):
    (tmp_path / "p.jsonl").write_text(
        json.dumps({"prompt": unit * (1_000_000 // len(unit.encode()))})
    )
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    status, out, lines = run(
        monkeypatch, capsys, "--checkpoint", folders[kind], "--prompt_file", tmp_path / "p.jsonl"
    )
    assert (
        status == 2
        and out == ""
        and len(lines) == 1
        and "over the limit of 96 positions" in lines[0]
    )
    assert time.perf_counter() - start < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512_000  # kilobytes


@pytest.mark.attack
def test_bytes_that_are_no_text_in_arguments(text_folder):
    """Python hands them over as lone surrogates; they, and JSON's, are read as question marks, and
    others still run."""
    command = [
        sys.executable,
        ROOT / "generate.py",
        "--checkpoint",
        text_folder,
        "--max_new_tokens",
        "2",
        "--json",
    ]
    lines = b'{"prompt": "a\\ud800b"}\n{"prompt": "a?b"}\n{"prompt": "a\\u0000b"}\n'
    done = subprocess.run(
        [*command, "--prompt_file", "-"], input=lines, capture_output=True, timeout=60
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert (
        done.returncode == 0
        and len(rows) == 3
        and rows[0]["prompt_tokens"] == rows[1]["prompt_tokens"]
    )
    done = subprocess.run(
        [*map(os.fsencode, command), b"--prompt", b"a\xffb"], capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["prompt_tokens"] == rows[0]["prompt_tokens"]


# ---------------------------------------------------------------------------------------- lengths


@pytest.fixture(scope="module")
def model(text_folder):
    return load_model(text_folder, dtype=torch.float32)  # a context of 160


def drafter_of(kind: str, model):
    if kind == "model":
        return ModelDraft(layer_subset(model, [0, 1]))  # with a cache of its own
    if kind == "quantized":
        return ModelDraft(quantized_copy(model, "int8"), on_layers=range(model.config.n_layers))
    if kind == "layers":
        return ModelDraft(layer_subset(model, [0, 2]), on_layers=[0, 2])
    return NgramDraft() if kind == "ngram" else None


def rows_of(model, prompts, **options) -> list[list[int]]:
    rows = [[] for _ in prompts]
    for row, id in generate(model, prompts, sampling=Sampling(0), **options):
        rows[row].append(id)
    return rows


LIMITS = [("plain", 12), ("model", 12), ("layers", 12), ("quantized", 12), ("ngram", 12)]
LIMITS.append(pytest.param("model", 160, marks=pytest.mark.attack))


@pytest.mark.parametrize("kind, limit", LIMITS)
def test_rows_that_end_at_the_limit(kind, limit, model):
    """Prompt and new tokens fill the cache to the last position, in rows of all lengths, from one
    token on: each gets what it gets alone in a longer context; one position more is refused, for
    whichever row."""
    prompts = [[5], [7, 9] * (limit // 4), [11] * (limit - 1), list(range(20, 20 + limit - 2))]
    budgets = [limit - len(prompt) for prompt in prompts]
    want = [rows_of(model, [prompt], max_new_tokens=n)[0] for prompt, n in zip(prompts, budgets)]
    drafter = drafter_of(kind, model)
    options = {"engine": Engine(model, 4, limit, drafter=drafter, speculate_k=5)}
    for short in (0, 1):  # the limit itself, and one less
        fitting = [max(1, n - short) for n in budgets]
        got = rows_of(model, prompts, max_new_tokens=fitting, **options)
        assert got == [row[:n] for row, n in zip(want, fitting)]
    for row in range(4):
        over = [n + (i == row) for i, n in enumerate(budgets)]
        with pytest.raises(
            ValueError, match=f"prompt {row} has .* over the limit of {limit} positions"
        ):
            rows_of(model, prompts, max_new_tokens=over, **options)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("kind", ["plain", "model", "layers", "quantized", "ngram"])
def test_a_used_engine_of_exactly_that_length(kind, model):
    """The cache holds max_seq_length positions and what an earlier batch left in them."""
    engine = Engine(model, 2, 20, drafter=drafter_of(kind, model), speculate_k=5)
    for prompts in ([[5] * 19, [6] * 10], [[9], [8] * 18], [[7, 3] * 5]):
        budgets = [20 - len(prompt) for prompt in prompts]
        want = [
            rows_of(model, [prompt], max_new_tokens=n)[0] for prompt, n in zip(prompts, budgets)
        ]
        assert rows_of(model, prompts, max_new_tokens=budgets, engine=engine) == want
        with pytest.raises(ValueError, match="over the limit of 20 positions"):
            rows_of(model, prompts, max_new_tokens=20 - min(map(len, prompts)) + 1, engine=engine)


def test_max_seq_length_on_the_command_line(text_folder, monkeypatch, capsys):
    tokens = len(load_tokenizer(text_folder).encode("the cat"))
    given = [
        "--checkpoint",
        text_folder,
        "--prompt",
        "the cat",
        "--ignore_eos",
        "--json",
        "--max_seq_length",
    ]
    for draft in (
        [],
        ["--draft", "ngram"],
        ["--draft", "layers:0-1"],
        ["--draft", "quantized:int8"],
    ):
        status, out, _ = run(monkeypatch, capsys, *given, tokens + 1, *draft)
        assert status == 0 and len(json.loads(out)["tokens"]) == 1  # by default, to the end
        status, out, lines = run(
            monkeypatch, capsys, *given, tokens + 3, "--max_new_tokens", 3, *draft
        )
        assert status == 0 and len(json.loads(out)["tokens"]) == 3
        status, out, lines = run(
            monkeypatch, capsys, *given, tokens + 2, "--max_new_tokens", 3, *draft
        )
        assert (
            status == 2
            and out == ""
            and len(lines) == 1
            and f"over the limit of {tokens + 2}" in lines[0]
        )
        status, out, lines = run(monkeypatch, capsys, *given, tokens, *draft)
        assert status == 2 and out == "" and len(lines) == 1


def test_a_stop_string_that_is_the_first_character(text_folder, monkeypatch, capsys):
    """Nothing is printed, the first token is all that counts; with a drafter too."""
    given = ["--checkpoint", text_folder, "--prompt", "the cat", "--max_new_tokens", 8, "--json"]
    _, out, _ = run(monkeypatch, capsys, *given)
    whole = json.loads(out)
    assert whole["text"]
    for draft in (
        [],
        ["--draft", "ngram"],
        ["--draft", "layers:0-1"],
        ["--draft", "quantized:int8"],
    ):
        status, out, _ = run(monkeypatch, capsys, *given, "--stop", whole["text"][0], *draft)
        row = json.loads(out)
        assert (
            status == 0
            and row["text"] == ""
            and row["tokens"] == whole["tokens"][: len(row["tokens"])]
        )
        assert len(load_tokenizer(text_folder).decode(row["tokens"][:-1]).strip()) == 0
    stops = StopStrings(["a"])
    assert stops.feed("abc") == "" and stops.stopped and stops.flush() == ""
