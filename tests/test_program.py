"""python generate.py as its users run it: flags, prompt files, text and JSON, chat, errors,
signals, figures."""

import collections
import fcntl
import functools
import importlib
import io
import itertools
import json
import os
import pty
import re
import runpy
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
import types
from pathlib import Path

import pytest
import torch
from conftest import BASE, FAMILIES, ROOT, forked, generate

import cli.chat as chat_room
import decoding.scheduler as scheduler
import drafts.registry as registry
import loading.files as files
import loading.plain_files as plain_files
from cli.answers import RowAnswer
from cli.errors import cpu_share, exit_on_error
from cli.flags import parse_args
from cli.main import main as run_args
from cli.prompts import Prompt, Row, read_prompts
from cli.report import attended_bytes, bytes_read, position_bytes, weight_bytes
from decoding.engine import Engine
from decoding.errors import UserError
from decoding.sampling import Sampling
from decoding.settings import DEFAULT_LENGTH
from decoding.statistics import Timing
from drafts.registry import load_models
from generate import LLM
from loading.checkpoint import load_model
from loading.target import Target, pick_device
from loading.tokenizer import load_tokenizer
from scripts.serve.serve_flags import parse_args as serve_args
from weights.linears import check_unpacked


def run(capsys, *arguments) -> tuple[list[dict], str]:
    """The command line in this process: (JSON lines, stderr)."""
    run_args(parse_args([*map(str, arguments), "--json", "--device", "cpu"]))
    out, err = capsys.readouterr()
    return [json.loads(line) for line in out.splitlines()], err


def test_json_has_the_promised_keys_and_stdout_nothing_else(text_folder):
    prompt = ("--checkpoint", str(text_folder), "--prompt", "the little cat")
    command = [
        sys.executable,
        ROOT / "generate.py",
        *prompt,
        "--max_new_tokens",
        "9",
        "--json",
        "--num_samples",
        "2",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    tokenizer = load_tokenizer(text_folder)
    assert len(rows) == 2 and rows[0]["tokens"] != rows[1]["tokens"]
    for row in rows:
        assert set(row) >= {
            "prompt_tokens",
            "tokens",
            "text",
            "finish_reason",
            "ttft_s",
            "prefill_tok_s",
            "decode_tok_s",
            "bandwidth_gb_s",
            "peak_memory_gb",
            "speculative",
            "seed",
            "sample",
        }
        assert row["prompt_tokens"] == tokenizer.encode("the little cat")
        assert (
            row["finish_reason"] == "length"
            and len(row["tokens"]) == 9
            and row["speculative"] is None
        )
        assert (
            min(row["ttft_s"], row["decode_tok_s"], row["bandwidth_gb_s"], row["peak_memory_gb"])
            > 0
        )
    assert "decode" in done.stderr and "GB/s" in done.stderr


def test_text_streams_to_stdout_and_equals_the_json(text_folder, capsys):
    arguments = (
        "--checkpoint",
        str(text_folder),
        "--prompt",
        "a big dog",
        "--max_new_tokens",
        "30",
        "--seed",
        "4",
    )
    rows, _ = run(capsys, *arguments)
    run_args(parse_args([*arguments, "--device", "cpu"]))
    out, err = capsys.readouterr()
    assert out == rows[0]["text"] + "\n" and "a big dog" in err
    assert re.search(r"^peak memory \d+\.\d\d GB$", err, re.MULTILINE)


@pytest.mark.parametrize("prompts", [["the cat"], ["the cat", "a dog"]])
def test_a_prompt_has_its_own_line_where_the_answer_goes_elsewhere(
    text_folder, capsys, monkeypatch, tmp_path, prompts
):
    """On a terminal with `> file`, the line of the rates followed the prompt's last word."""
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(prompts))
    for out_is_terminal, err_is_terminal in itertools.product((True, False), repeat=2):
        monkeypatch.setattr(sys.stdout, "isatty", lambda value=out_is_terminal: value)
        monkeypatch.setattr(sys.stderr, "isatty", lambda value=err_is_terminal: value)
        run_args(
            parse_args(
                [
                    "--checkpoint",
                    str(text_folder),
                    "--prompt_file",
                    str(file),
                    "--max_new_tokens",
                    "3",
                ]
            )
        )
        err = capsys.readouterr().err
        has_own_line = not (out_is_terminal and err_is_terminal)
        assert all((f"{prompt}\n" in err) == has_own_line for prompt in prompts), err


def test_stop_token_ends_a_row_and_is_no_text(text_folder, capsys):
    common = (
        "--checkpoint",
        text_folder,
        "--prompt",
        "the",
        "--temperature",
        0,
        "--max_new_tokens",
        12,
    )
    free = run(capsys, *common)[0][0]
    tokenizer = load_tokenizer(text_folder)
    # not one without text
    stop = next(id for id in free["tokens"][3:] if tokenizer.decode([id]).strip("\ufffd "))
    (text_folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [stop]}))
    try:
        cut = run(capsys, *common)[0][0]
        ignored = run(capsys, *common, "--ignore_eos")[0][0]
    finally:
        (text_folder / "generation_config.json").unlink()
    assert (
        cut["tokens"] == free["tokens"][: free["tokens"].index(stop) + 1]
        and cut["finish_reason"] == "stop"
    )
    stream = tokenizer.stream(continues=True)
    assert cut["text"] == "".join(stream.feed(id) for id in cut["tokens"][:-1]) + stream.flush()
    assert ignored["tokens"] == free["tokens"] and ignored["finish_reason"] == "length"


def test_a_folders_own_sampling_is_the_default_and_is_said(text_folder, tmp_path, capsys):
    """In files of prompts, chats and the server too, whose options are these. A flag wins, and so
    does a line's key. Oracle: the same settings as flags."""
    folder = shutil.copytree(text_folder, tmp_path / "own")
    settings = {"do_sample": True, "temperature": 0.6, "top_k": 7}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    flags = ("--prompt", "a big dog", "--max_new_tokens", "20")
    (plain,), err = run(capsys, "--checkpoint", text_folder, *flags)
    assert "generation_config" not in err
    asked, _ = run(
        capsys, "--checkpoint", text_folder, *flags, "--temperature", "0.6", "--top_k", "7"
    )
    own, err = run(capsys, "--checkpoint", folder, *flags)
    assert own[0]["tokens"] == asked[0]["tokens"] != plain["tokens"]
    assert f"{folder}: generation_config.json asks for temperature 0.6, top_k 7\n" in err
    rows, err = run(capsys, "--checkpoint", folder, *flags, "--temperature", "0.8", "--top_k", "0")
    assert rows[0]["tokens"] == plain["tokens"] and "generation_config" not in err
    lines = tmp_path / "lines"
    line = {"prompt": "a big dog", "temperature": 0.8, "top_k": 0}
    lines.write_text(json.dumps(line) + "\n" + json.dumps({"prompt": "a big dog"}))
    rows, _ = run(capsys, "--checkpoint", folder, "--prompt_file", lines, "--max_new_tokens", "20")
    assert [row["tokens"] for row in rows] == [plain["tokens"], own[0]["tokens"]]
    served = serve_args(["--checkpoint", str(folder)]).options.requests.sampling
    assert (served["temperature"], served["top_k"]) == (0.6, 7)
    (folder / "generation_config.json").write_text('{"top_p": 2}')
    with pytest.raises(ValueError, match=r"own/generation_config.json: top_p = 2 must lie in"):
        parse_args(["--checkpoint", str(folder)])
    parse_args(["--checkpoint", str(folder), "--top_p", "0.9"])


def test_stop_strings_cut_text_tokens_and_statistics(text_folder, capsys, tmp_path):
    """In a batch whose rows meet their stop strings at different places, each is cut where it would
    be alone."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the little cat\na dog\nplay in the park\n")
    common = (
        "--checkpoint",
        text_folder,
        "--prompt_file",
        prompts,
        "--temperature",
        0,
        "--dtype",
        "float32",
    )
    common = (*common, "--max_new_tokens", 40, "--ignore_eos")
    free, _ = run(capsys, *common)
    stops = (free[0]["text"][10:13], free[1]["text"][20:22])
    assert all(stops) and stops[0] not in free[0]["text"][:10]
    for batch_size in (1, 3):
        cut, _ = run(capsys, *common, "--batch_size", batch_size, "--stop", *stops)
        for whole, row in zip(free, cut, strict=True):
            found = min(
                (whole["text"].find(stop) for stop in stops if stop in whole["text"]), default=None
            )
            assert row["text"] == whole["text"][:found]
            assert row["finish_reason"] == ("length" if found is None else "stop")
            n = len(row["tokens"])
            assert row["tokens"] == whole["tokens"][:n] and (found is None) == (n == 40)
            # the last token completes the stop string, the one before does not
            if found is not None:
                decoded = [decoded_text(text_folder, whole["tokens"][:k]) for k in (n - 1, n)]
                assert [any(stop in text for stop in stops) for text in decoded] == [False, True]


def decoded_text(folder, ids) -> str:
    stream = load_tokenizer(folder).stream(continues=True)
    return "".join(stream.feed(id) for id in ids)


def test_a_number_is_text(text_folder, capsys):
    """Trap: --prompt 2024 parsed as a number."""
    rows, _ = run(capsys, "--checkpoint", text_folder, "--prompt", "2024", "--max_new_tokens", 2)
    assert rows[0]["prompt_tokens"] == load_tokenizer(text_folder).encode("2024")


def test_prompt_files(text_folder, capsys, tmp_path):
    tokenizer, texts = load_tokenizer(text_folder), ["the little cat", "2024", "a dog"]
    lines, objects = tmp_path / "lines.txt", tmp_path / "objects.jsonl"
    lines.write_text("\n".join([texts[0], "", *texts[1:]]) + "\n")
    objects.write_text("\n".join(json.dumps({"prompt": text, "id": 3}) for text in texts))
    common = (
        "--checkpoint",
        text_folder,
        "--max_new_tokens",
        5,
        "--temperature",
        0,
        "--dtype",
        "float32",
    )
    one_by_one, _ = run(capsys, *common, "--prompt_file", lines)
    assert [row["prompt_tokens"] for row in one_by_one] == [
        tokenizer.encode(text) for text in texts
    ]
    together, _ = run(capsys, *common, "--prompt_file", objects, "--batch_size", 2)
    assert [row["tokens"] for row in together] == [row["tokens"] for row in one_by_one]


def test_line_separators_inside_a_prompt_and_a_byte_order_mark(text_folder, capsys, tmp_path):
    """U+2028 ends no line of JSONL; a BOM is no part of the first one."""
    file, text = tmp_path / "objects.jsonl", "a\u2028b\x85c\x0cd"
    file.write_text(
        "\ufeff" + json.dumps({"prompt": text}, ensure_ascii=False) + "\r\n", newline=""
    )
    rows, _ = run(capsys, "--checkpoint", text_folder, "--prompt_file", file, "--max_new_tokens", 1)
    assert [row["prompt_tokens"] for row in rows] == [load_tokenizer(text_folder).encode(text)]


def test_a_byte_order_mark_on_stdin_is_no_part_of_the_first_prompt(
    text_folder, capsys, monkeypatch
):
    """It would hide that the lines are JSON."""
    tokenizer = load_tokenizer(text_folder)
    for text in ('{"prompt": "the cat", "id": 1}\r\n{"prompt": "a dog"}\r\n', "the cat\na dog\n"):
        monkeypatch.setattr(
            sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbf" + text.encode()))
        )
        rows, _ = run(
            capsys, "--checkpoint", text_folder, "--prompt_file", "-", "--max_new_tokens", 1
        )
        assert [row["prompt_tokens"] for row in rows] == [
            tokenizer.encode(text) for text in ("the cat", "a dog")
        ]


def test_a_line_that_does_not_fit_is_named_and_the_rest_decoded(chat_folder, capsys, tmp_path):
    """Too long, nothing asked for, or refused by the chat template: by line and id, and the exit
    status says it."""
    (chat_folder / "chat_template.jinja").write_text("{{ raise_exception('no such role') }}")
    lines = [
        {"prompt": "the cat", "id": "a"},
        {"prompt": "dog " * 2000, "id": "long"},
        {"prompt": "play"},
        {"prompt": "a", "max_new_tokens": 0},
        {"messages": [{"role": "x", "content": "y"}], "id": 5},
    ]
    file = tmp_path / "objects.jsonl"
    common = (
        "--checkpoint",
        chat_folder,
        "--prompt_file",
        file,
        "--max_new_tokens",
        3,
        "--batch_size",
        2,
    )
    for kept, expected in ((lines, ["the cat", "play"]), ([lines[1]], [])):
        file.write_text("\n".join(map(json.dumps, kept)))
        with pytest.raises(SystemExit) as exit:
            run(capsys, *common)
        out, err = capsys.readouterr()
        tokenizer = load_tokenizer(chat_folder)
        assert [json.loads(line)["prompt_tokens"] for line in out.splitlines()] == list(
            map(tokenizer.encode, expected)
        )
        errors = sorted(
            line.split(f"{file}, ")[1] for line in err.splitlines() if line.startswith("error: ")
        )
        assert exit.value.code == 2 and len(errors) == (3 if expected else 1)
        assert re.match(
            rf"line {kept.index(lines[1]) + 1}, id long: has \d+ tokens; .* limit of 2000",
            errors[0],
        )
        if expected:
            assert errors[1].startswith('line 4: "max_new_tokens": 0 must')
            assert errors[2].startswith("line 5, id 5: ")


@pytest.mark.parametrize("source", ["file", "stdin"])
def test_a_line_that_is_no_utf_8_is_named_and_the_rest_decoded(
    source, text_folder, capsys, tmp_path, monkeypatch
):
    """From a file and from stdin alike, and a lone carriage return ends no line in either."""
    data, file = b"the cat\nthe \xff dog\na\rdog\n", tmp_path / "lines.txt"
    file.write_bytes(data)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), errors="surrogateescape"))
    name = str(file) if source == "file" else "-"
    with pytest.raises(SystemExit) as exit:
        run(capsys, "--checkpoint", text_folder, "--prompt_file", name, "--max_new_tokens", 1)
    out, err = capsys.readouterr()
    tokenizer = load_tokenizer(text_folder)
    prompts = [json.loads(line)["prompt_tokens"] for line in out.splitlines()]
    assert exit.value.code == 2 and prompts == [
        tokenizer.encode(text) for text in ("the cat", "a\rdog")
    ]
    assert f"error: {name if source == 'file' else 'stdin'}, line 2: " in err


def test_an_error_of_a_line_names_its_id(text_folder, capsys, tmp_path):
    file = tmp_path / "lines.jsonl"
    file.write_text(
        '{"prompt": "a", "id": "x", "temperature": -1}\n{"prompt": "", "id": 7}\n{"id":'
        ' 8}\n{"prompt": "a"}\n'
    )
    with pytest.raises(SystemExit):
        run(capsys, "--checkpoint", text_folder, "--prompt_file", file, "--max_new_tokens", 1)
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    starts = [
        f"error: {file}, line {number}, id {id}: " for number, id in ((1, "x"), (2, 7), (3, 8))
    ]
    assert len(errors) == 3 and all(error.startswith(start) for error, start in zip(errors, starts))


def test_an_empty_stop_of_a_line_replaces_the_flag(text_folder, capsys, tmp_path):
    file = tmp_path / "lines.jsonl"
    file.write_text('{"prompt": "the cat"}\n{"prompt": "the cat", "stop": []}\n')
    flags = (
        "--checkpoint",
        text_folder,
        "--prompt_file",
        file,
        "--max_new_tokens",
        30,
        "--temperature",
        0,
        "--ignore_eos",
        "--ordered",
    )
    text = run(capsys, *flags)[0][0]["text"]
    stopped, free = run(capsys, *flags, "--stop", text[5:8])[0]
    assert len(stopped["text"]) < len(text) and free["text"] == text


def test_samples_of_a_prompt_are_one_batch(text_folder, capsys, monkeypatch, tmp_path):
    """Each as it would be alone with its seed, which the JSON names; --batch_size takes fewer at a
    time."""
    sizes, step = [], Engine.step
    monkeypatch.setattr(
        Engine, "step", lambda engine: sizes.append(len(engine.requests)) or step(engine)
    )
    file = tmp_path / "two.txt"
    file.write_text("the cat\na dog\n")
    common = (
        "--checkpoint",
        text_folder,
        "--prompt_file",
        file,
        "--max_new_tokens",
        9,
        "--dtype",
        "float32",
    )
    alone = [run(capsys, *common, "--seed", seed)[0] for seed in (4, 5, 6)]
    for options, size in (((), 6), (("--batch_size", 4), 4), (("--batch_size", 1), 1)):
        sizes.clear()
        rows, _ = run(capsys, *common, "--seed", 4, "--num_samples", 3, "--ordered", *options)
        assert max(sizes) == size
        assert [(row["seed"], row["sample"]) for row in rows] == [(4, 0), (5, 1), (6, 2)] * 2
        assert [row["tokens"] for row in rows] == [
            alone[n][prompt]["tokens"] for prompt in (0, 1) for n in range(3)
        ]


def test_a_line_may_have_its_own_seed_and_number_of_new_tokens(text_folder, capsys, tmp_path):
    """Equal prompts in a batch are then different samples, each the one that its seed gives
    alone."""
    file, asked = tmp_path / "objects.jsonl", [(7, 12), (8, 5), (None, None)]
    file.write_text(
        "\n".join(json.dumps({"prompt": "a", "seed": s, "max_new_tokens": n}) for s, n in asked)
    )
    common = (
        "--checkpoint",
        text_folder,
        "--dtype",
        "float32",
        "--ignore_eos",
        "--max_new_tokens",
        9,
        "--seed",
        3,
    )
    rows, _ = run(capsys, *common, "--prompt_file", file, "--batch_size", 3, "--ordered")
    assert [row["seed"] for row in rows] == [7, 8, 3] and [len(row["tokens"]) for row in rows] == [
        12,
        5,
        9,
    ]
    for row in rows:
        options = ("--prompt", "a", "--seed", row["seed"], "--max_new_tokens", len(row["tokens"]))
        assert run(capsys, *common, *options)[0][0]["tokens"] == row["tokens"]


def test_each_rows_rate_is_its_own(text_folder, capsys, tmp_path):
    """A row that ends early must not be charged for the steps that others take after it."""
    file = tmp_path / "two.txt"
    file.write_text("the cat\n" + "dog " * 40 + "\n")
    rows, _ = run(
        capsys,
        "--checkpoint",
        text_folder,
        "--prompt_file",
        file,
        "--batch_size",
        2,
        "--ignore_eos",
        "--ordered",
    )
    steps = [len(row["tokens"]) - 1 for row in rows]
    seconds = [n / row["decode_tok_s"] for n, row in zip(steps, rows)]
    # else both are the batch's
    assert steps[0] > 1.3 * steps[1] and seconds[0] > 1.0001 * seconds[1]


@pytest.mark.attack
def test_a_full_disk_behind_stdout_is_said(text_folder):
    with open("/dev/full", "w") as full:
        command = [
            sys.executable,
            ROOT / "generate.py",
            "--checkpoint",
            text_folder,
            "--max_new_tokens",
            "3",
        ]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 2 and "error: " in done.stderr and "Traceback" not in done.stderr


def test_broken_jsonl_lines_are_named_and_the_rest_answered(text_folder, capsys, tmp_path):
    file = tmp_path / "objects.jsonl"
    file.write_text(
        '{"prompt": "a"}\n{"text": "b"}\n{"prompt": 7}\n{"prompt": "c"\n{"prompt": "d"}\n'
    )
    arguments = [
        "--checkpoint",
        str(text_folder),
        "--max_new_tokens",
        "3",
        "--prompt_file",
        str(file),
        "--json",
    ]
    with pytest.raises(SystemExit) as exit:
        run_args(parse_args(arguments))
    out, err = capsys.readouterr()
    tokenizer = load_tokenizer(text_folder)
    assert [json.loads(line)["prompt_tokens"] for line in out.splitlines()] == [
        tokenizer.encode(t) for t in "ad"
    ]
    assert exit.value.code == 2 and [f"line {n}:" in err for n in range(1, 6)] == [
        False,
        True,
        True,
        True,
        False,
    ]


def test_jsonl_conversations_and_ids(text_folder, chat_folder, capsys, tmp_path):
    """What comes back is matched by id, and a conversation is in the folder's own format, or plain
    text without one."""
    messages = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "a dog"}]
    objects = [{"prompt": "a", "id": "first"}, {"messages": messages, "id": 2}, {"prompt": "a"}]
    file = tmp_path / "objects.jsonl"
    file.write_text("\n".join(map(json.dumps, objects)))
    for folder, conversation in ((text_folder, None), (chat_folder, messages)):
        rows, _ = run(
            capsys,
            "--checkpoint",
            folder,
            "--prompt_file",
            file,
            "--batch_size",
            2,
            "--max_new_tokens",
            3,
        )
        tokenizer = load_tokenizer(folder)
        want = tokenizer.chat(messages) if conversation else tokenizer.encode("the cat\na dog")
        assert [row["prompt_tokens"] for row in rows] == [
            tokenizer.encode("a"),
            want,
            tokenizer.encode("a"),
        ]
        assert [row.get("id", "none") for row in rows] == ["first", 2, "none"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt": ""},
        {"messages": []},
        {"messages": ["a"]},
        {"messages": [{"role": "user"}]},
        {"prompt": "a", "messages": [{"role": "user", "content": "a"}]},
        {"prompt": "a", "seed": "7"},
        {"prompt": "a", "seed": -2},
        {"prompt": "a", "max_new_tokens": 1.5},
    ],
)
def test_a_line_that_is_no_request_is_named(wrong, tmp_path):
    file = tmp_path / "objects.jsonl"
    file.write_text(json.dumps({"prompt": "a"}) + "\n" + json.dumps(wrong))
    asked, problems = read_prompts(parse_args(["--prompt_file", str(file)]).prompts)
    assert (
        [request.text for request in asked] == ["a"]
        and len(problems) == 1
        and "line 2" in problems[0]
    )


def test_stdin_batches_and_plain_text(text_folder, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the cat\na dog\n")))
    flags = [
        "--checkpoint",
        str(text_folder),
        "--prompt_file",
        "-",
        "--batch_size",
        "2",
        "--max_new_tokens",
        "4",
    ]
    run_args(parse_args(flags))
    out, err = capsys.readouterr()
    assert len(out.splitlines()) >= 2 and "the cat" in err and "a dog" in err


def test_new_tokens_default_to_the_end_of_the_context(text_folder, capsys):
    prompt = " ".join(["cat"] * 100)
    rows, _ = run(capsys, "--checkpoint", text_folder, "--prompt", prompt, "--ignore_eos")
    assert len(rows[0]["prompt_tokens"]) + len(rows[0]["tokens"]) == 160
    rows, _ = run(
        capsys,
        "--checkpoint",
        text_folder,
        "--prompt",
        prompt,
        "--ignore_eos",
        "--max_seq_length",
        140,
    )
    assert len(rows[0]["prompt_tokens"]) + len(rows[0]["tokens"]) == 140


def test_models_are_packed_once_they_are_loaded():
    """Target and draft: few rows are decoded by kernels that read packed weights."""
    flags = (
        "--checkpoint checkpoints/demo --draft_checkpoint checkpoints/demo-draft --quantize"
        " int4-g32"
    )
    options = parse_args(flags.split())
    model, _, drafter = load_models(options.model, options.draft, torch.device("cpu"))
    for part in (model, drafter.model):
        with pytest.raises(ValueError, match="a packed model cannot be saved"):
            check_unpacked(part, "saved")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc names the mapped files")
def test_no_file_stays_mapped_while_weights_are_packed(monkeypatch):
    """The pages of a mapped file count as memory of the process."""
    options = parse_args(["--checkpoint", "checkpoints/demo"])
    target = Target(options.model)
    mapped = []

    def note_mapped(*models):
        mapped.append("checkpoints/demo/" in Path("/proc/self/maps").read_text())

    monkeypatch.setattr(registry, "pack_with", note_mapped)
    assert target.checkpoint.tensors
    note_mapped()  # the control
    load_models(target, options.draft, torch.device("cpu"))
    assert mapped == [True, False]


def test_a_start_opens_each_file_once(text_folder, tmp_path, capsys, monkeypatch):
    """Of a model and its draft: config.json is parsed once for the check of memory, the weights and
    the tokenizer, generation_config.json for the flags and the tokenizer, and tensors are opened
    once."""
    folders = [shutil.copytree(text_folder, tmp_path / name) for name in ("target", "draft")]
    for folder in folders:
        (folder / "generation_config.json").write_text('{"temperature": 0.5}')
    opened = collections.Counter()

    def counting(function, number: int):
        def call(*arguments, **options):
            file = Path(arguments[number])
            opened[function.__name__, file.parent, file.name] += 1
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(plain_files, "read_plain", counting(plain_files.read_plain, 0))
    monkeypatch.setattr(plain_files, "parse_json", counting(plain_files.parse_json, 1))
    monkeypatch.setattr(files, "safe_open", counting(files.safe_open, 0))
    run(capsys, "--checkpoint", folders[0], "--draft_checkpoint", folders[1], "-n", 4)
    for folder in folders:
        for function, name in (
            ("read_plain", "config.json"),
            ("parse_json", "config.json"),
            ("read_plain", "generation_config.json"),
            ("parse_json", "generation_config.json"),
            ("safe_open", "model.safetensors"),
        ):
            assert opened.pop((function, folder, name)) == 1, (function, folder, name)
    assert not [key for key, count in opened.items() if count > 1]


def test_random_weights_measure_a_shape_without_a_tokenizer(tmp_path, capsys):
    config = tmp_path / "shape.json"
    config.write_text(json.dumps({**BASE, **FAMILIES["llama-3"]}))
    rows, err = run(capsys, "--random_weights", config, "--prompt", "ab", "--max_new_tokens", 6)
    assert rows[0]["prompt_tokens"] == [97, 98] and len(rows[0]["tokens"]) == 6
    assert rows[0]["text"].split() == [str(id) for id in rows[0]["tokens"]] and "decode" in err


def endless(tmp_path) -> subprocess.Popen:
    """A run that would print 90,000 tokens."""
    config = tmp_path / "long.json"
    config.write_text(
        json.dumps({**BASE, **FAMILIES["llama-3"], "max_position_embeddings": 100_000})
    )
    command = [
        sys.executable,
        ROOT / "generate.py",
        "--random_weights",
        config,
        "--max_new_tokens",
        "90000",
    ]
    return subprocess.Popen(
        [*command, "--device", "cpu"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.attack
def test_ctrl_c_keeps_what_was_printed_and_exits_130(text_folder, tmp_path):
    process = endless(tmp_path)
    first = process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=30)
    assert (
        process.returncode == 130
        and len(first) == 20
        and rest.endswith("\n")
        and "Traceback" not in err
    )


@pytest.mark.attack
def test_a_closed_pipe_ends_quietly(tmp_path):
    process = endless(tmp_path)
    assert process.stdout.read(5)
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=30) == 0 and "Traceback" not in err and "BrokenPipe" not in err


def test_a_character_split_over_tokens_is_printed_whole(text_folder, capfd):
    """Byte tokens of an emoji, fed one by one: nothing until the last, never U+FFFD in between."""
    tokenizer = load_tokenizer(text_folder)
    row = Row(Prompt(""), [], Sampling(0), 1, seed=0, stop=[])
    answer = RowAnswer(types.SimpleNamespace(tokenizer=tokenizer, stop_ids=()), row, streaming=True)
    answer.request = types.SimpleNamespace(
        tokens=[], token_steps=[], token_records=[], finish_reason=None
    )
    seen = []
    for id in tokenizer.encode("🎉é", bos=False)[1:]:
        answer.request.tokens.append(id)
        answer.feed()
        seen.append(capfd.readouterr().out)
    assert seen == ["", "", "", "🎉", "", "é"]


def test_old_torch_is_refused_plainly(monkeypatch, capsys):
    for version, fine in (
        ("2.10.1", False),
        ("1.13.0", False),
        ("2.11.0+cu130", True),
        ("2.13.0", True),
    ):
        monkeypatch.setattr(torch, "__version__", version)
        if fine:
            with exit_on_error():
                pass
        else:
            with pytest.raises(SystemExit) as exit, exit_on_error():
                pytest.fail("the program ran")
            assert (
                exit.value.code == 2
                and f"error: torch {version} is too old" in capsys.readouterr().err
            )


def test_the_version_names_torch(capsys):
    with pytest.raises(SystemExit) as exit:
        parse_args(["--version"])
    line = capsys.readouterr().out
    assert not exit.value.code and torch.__version__.partition("+")[0] in line
    assert line.startswith("quickdraft ") and line.count("\n") == 1


# ------------------------------------------------------------------------------------------- chat


@pytest.fixture
def chat_folder(text_folder, tmp_path):
    """text_folder with a chat template and a longer context."""
    folder = shutil.copytree(text_folder, tmp_path / "chat")
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 2000}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{%"
        " endfor %}[assistant]"
    )
    settings = {"add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


class Terminal:
    """generate.py --interactive behind a pseudo-terminal."""

    def __init__(self, folder, *arguments: str):
        self.master, slave = pty.openpty()
        command = [
            sys.executable,
            ROOT / "generate.py",
            "--checkpoint",
            folder,
            "--interactive",
            "--device",
            "cpu",
        ]
        self.process = subprocess.Popen(
            [*command, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            close_fds=True,
            cwd=ROOT,
            preexec_fn=lambda: (os.setsid(), fcntl.ioctl(slave, termios.TIOCSCTTY, 0)),
        )
        os.close(slave)
        self.seen = ""

    def wait_for(self, pattern: str, seconds: float = 60) -> re.Match:
        """Read until the pattern stands in what has not been matched before; that part is then used
        up."""
        end = time.monotonic() + seconds
        while (match := re.search(pattern, self.seen)) is None:
            assert select.select([self.master], [], [], max(0, end - time.monotonic()))[0], (
                f"no {pattern}: {self.seen!r}"
            )
            try:
                self.seen += os.read(self.master, 4096).decode(errors="replace")
            except OSError:  # the other side has closed
                pytest.fail(f"ended before {pattern}: {self.seen!r}")
        self.seen = self.seen[match.end() :]
        return match

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def interrupt(self) -> None:
        """Type Ctrl-C. CPython's readline may miss a signal that comes just before it waits for a
        key."""
        time.sleep(0.2)
        self.type("\x03")


@pytest.mark.attack
def test_a_chat_on_a_terminal(chat_folder):
    """Two turns with the prefix kept, an answer ended by Ctrl-C, and another turn after it."""
    terminal = Terminal(
        chat_folder, "--max_new_tokens", "8", "--system", "Be a cat.", "--ignore_eos"
    )
    tokenizer = load_tokenizer(chat_folder)
    terminal.wait_for("> ")
    terminal.type("the little dog\n")
    first = terminal.wait_for(r"\[(\d+) tokens read, (\d+) reused")
    system = {"role": "system", "content": "Be a cat."}
    opening = tokenizer.chat([system, {"role": "user", "content": "the little dog"}])
    assert (int(first[1]), int(first[2])) == (len(opening), 0)
    terminal.wait_for("> ")
    terminal.type("went to play\n")
    second = terminal.wait_for(r"\[(\d+) tokens read, (\d+) reused")
    assert int(second[2]) >= len(opening) - 1 and int(second[1]) < len(opening) + 40
    terminal.wait_for("> ")
    terminal.type("/reset\n")
    terminal.wait_for("> ")
    terminal.type("the little dog\n")
    again = terminal.wait_for(r"\[(\d+) tokens read, (\d+) reused")
    assert int(again[1]) + int(again[2]) == len(opening)
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.process.wait(timeout=30) == 0


@pytest.mark.attack
def test_ctrl_c_ends_the_answer_not_the_chat(chat_folder):
    terminal = Terminal(chat_folder, "--max_new_tokens", "1960", "--ignore_eos")
    terminal.wait_for("> ")
    terminal.type("a\n")
    terminal.wait_for("a\r\n.{20}")
    terminal.type("\x03")
    terminal.wait_for(r"\[interrupted\]")
    terminal.wait_for("> ")
    terminal.type("b\n")  # the interrupted answer and 1960 new tokens are more than fits
    terminal.wait_for("the context of 2000 positions is full: the oldest turns leave it\r\n.{20}")
    terminal.type("\x03")
    terminal.wait_for(r"\[interrupted\]")
    terminal.wait_for("> ")
    terminal.interrupt()
    assert terminal.process.wait(timeout=30) == 130


def remember_ids(monkeypatch) -> None:
    """A conversation as the very ids that it consisted of, as with text that encodes to the ids it
    was decoded from: a random model's does not."""
    history, run = [], LLM.run

    def conversation_ids(tokenizer, messages, **names):
        return [*(history if len(messages) > 1 else ()), *tokenizer.encode(messages[-1]["content"])]

    def remember(llm, answers, *others):
        yield from run(llm, answers, *others)
        for answer in answers:
            history[:] = answer.prompt + answer.ids

    monkeypatch.setattr(chat_room, "conversation_ids", conversation_ids)
    monkeypatch.setattr(LLM, "run", remember)


@pytest.mark.parametrize("encodes_back", [False, True])
def test_chat_equals_the_conversation_without_kept_caches(
    chat_folder, capsys, monkeypatch, encodes_back
):
    """What is kept between turns must change nothing: compare with each turn decoded from nothing.
    Where the next prompt begins with all ids of the last answer, the last of them is not in the
    caches."""
    if encodes_back:
        remember_ids(monkeypatch)
    arguments = [
        "--checkpoint",
        str(chat_folder),
        "--interactive",
        "--temperature",
        "0",
        "--dtype",
        "float32",
    ]
    arguments += ["--max_new_tokens", "12", "--device", "cpu", "--ignore_eos"]
    turns = ["the little cat", "a big dog", "play"]
    answers = []
    for keep in (True, False):
        if not keep:
            monkeypatch.setattr(scheduler, "common_prefix", lambda *texts: 0)
        monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(turns) + "\n"))
        run_args(parse_args(arguments))
        out, err = capsys.readouterr()
        answers.append(out)
        assert (" 0 reused" not in err.split("reused", 1)[1]) == keep
    assert answers[0] == answers[1] and answers[0].strip()


def chatted(capsys, monkeypatch, folder, typed: str, *options) -> tuple[str, str]:
    """(answers, what else is said) of a greedy chat."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    arguments = [
        "--checkpoint",
        folder,
        "--interactive",
        "--temperature",
        0,
        "--dtype",
        "float32",
        "--device",
        "cpu",
    ]
    run_args(parse_args([str(part) for part in (*arguments, *options)]))
    return capsys.readouterr()


def test_an_answer_goes_on_to_the_contexts_end_and_says_why_it_ended(
    chat_folder, capsys, monkeypatch
):
    lengths, run = [], LLM.run

    def remember(llm, answers, *others):
        yield from run(llm, answers, *others)
        lengths.extend((len(answer.prompt), len(answer.ids)) for answer in answers)

    monkeypatch.setattr(LLM, "run", remember)
    chat = functools.partial(chatted, capsys, monkeypatch, chat_folder, "the cat\n")
    out, err = chat("--ignore_eos", "--max_seq_length", 300)
    assert sum(lengths[0]) == 300 and lengths[0][1] > 200 and " reused, length, " in err
    assert " reused, length, " in chat("--ignore_eos", "--max_new_tokens", 8)[1]
    assert " reused, stop, " in chat("--ignore_eos", "--max_new_tokens", 40, "--stop", out[5:7])[1]
    first = load_tokenizer(chat_folder).encode(out[:40])[1:]
    (chat_folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": list(range(384))[:60] + first[:4]})
    )
    assert " reused, stop, " in chat("--max_new_tokens", 100)[1]


def test_a_chats_lines_may_end_as_in_windows(chat_folder, capsys, monkeypatch):
    """The carriage return is no part of a message, and a line of nothing else is skipped."""
    options = ("--max_new_tokens", 9, "--ignore_eos")
    want = chatted(capsys, monkeypatch, chat_folder, "the cat\na dog\n", *options)
    typed = "\ufeffthe cat\r\n\r\n  \r\na dog\r\n/exit\r\nnever read\r\n"
    got = chatted(capsys, monkeypatch, chat_folder, typed, *options)
    assert got[0] == want[0] and got[1].count("tokens read") == 2


def test_a_full_context_drops_its_oldest_turns(chat_folder, capsys, monkeypatch):
    """Afterwards the chat is the one that never had them."""
    options = ("--max_new_tokens", 30, "--ignore_eos", "--max_seq_length", 100, "--seed", 0)
    first, last = "the little cat and a big dog went to play\n", "a red ball\n"
    out, err = chatted(
        capsys, monkeypatch, chat_folder, first * 3 + last + "word " * 90 + "\n/help\n", *options
    )
    assert (
        err.count("the oldest turns leave it") == 1
        and err.count("tokens read") == 4
        and "/exit" in err
    )
    assert "this message is too long: " in err and "do not fit in 100 positions" in err
    alone = chatted(capsys, monkeypatch, chat_folder, last, *options)[0]
    assert out.endswith("\n" + alone)
    system = ("--system", "Be a cat.", "--max_new_tokens", 20)
    out, err = chatted(capsys, monkeypatch, chat_folder, first * 3 + last, *options, *system)
    assert err.count("the oldest turns leave it") == 1
    assert out.endswith(
        "\n" + chatted(capsys, monkeypatch, chat_folder, last, *options, *system)[0]
    )


@pytest.mark.attack
def test_a_conversation_that_just_fits_drops_no_turn(chat_folder, capsys, monkeypatch):
    options = ("--max_new_tokens", 12, "--ignore_eos")
    expected, err = chatted(capsys, monkeypatch, chat_folder, "the cat\na dog\n", *options)
    num_read, num_kept = re.findall(r"(\d+) tokens read, (\d+) reused", err)[-1]
    length = int(num_read) + int(num_kept) + 12
    for limit, num_drops in ((length, 0), (length - 1, 1)):
        out, err = chatted(
            capsys,
            monkeypatch,
            chat_folder,
            "the cat\na dog\n",
            *options,
            "--max_seq_length",
            limit,
        )
        assert err.count("the oldest turns leave it") == num_drops and (out == expected) == (
            num_drops == 0
        )


def test_a_message_that_is_too_long_drops_no_turn(chat_folder, capsys, monkeypatch):
    options = ("--max_new_tokens", 12, "--ignore_eos", "--max_seq_length", 100)
    expected, _ = chatted(capsys, monkeypatch, chat_folder, "the cat\na dog\n", *options)
    typed = "the cat\n" + "word " * 90 + "\na dog\n"
    out, err = chatted(capsys, monkeypatch, chat_folder, typed, *options)
    assert (
        out == expected
        and "this message is too long" in err
        and "the oldest turns leave it" not in err
    )
    with pytest.raises(
        ValueError, match="--max_new_tokens 100 must be less than the context's 100 positions"
    ):
        chatted(
            capsys, monkeypatch, chat_folder, "the cat\n", *options[2:], "--max_new_tokens", 100
        )


def test_a_byte_that_is_no_utf_8_ends_no_chat(chat_folder, capsys, monkeypatch):
    for errors in ("surrogateescape", "strict"):
        typed = b"bad \xff x\nthe cat\n"
        stdin = io.TextIOWrapper(io.BytesIO(typed), encoding="utf-8", errors=errors)
        monkeypatch.setattr(io, "StringIO", lambda text, stdin=stdin: stdin)
        _, err = chatted(capsys, monkeypatch, chat_folder, "", "--max_new_tokens", 5)
        assert err.count("tokens read") == 2


def test_thoughts_leave_the_next_turn_as_the_template_says(chat_folder, capsys, monkeypatch):
    template = (chat_folder / "chat_template.jinja").read_text()
    stripped = template.replace("m.content }}", "m.content.split('</think>')[-1] }}")
    (chat_folder / "chat_template.jinja").write_text(stripped)
    prompts, run = [], LLM.run

    def remember(llm, answers, *others):
        prompts.extend(answer.prompt for answer in answers)
        yield from run(llm, answers, *others)

    monkeypatch.setattr(LLM, "run", remember)
    options = ("--max_new_tokens", 5, "--ignore_eos", "--prefill", "<think>a ball</think>")
    out, _ = chatted(capsys, monkeypatch, chat_folder, "the cat\na dog\n", *options)
    tokenizer, first = load_tokenizer(chat_folder), out.splitlines()[0]
    texts = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": first}]
    want = tokenizer.chat(
        [*texts, {"role": "user", "content": "a dog"}], prefill="<think>a ball</think>"
    )
    assert prompts[1] == want and "\x1b" not in out


@pytest.mark.attack
def test_a_terminal_takes_long_lines_edits_and_pastes(chat_folder):
    terminal = Terminal(chat_folder, "--max_new_tokens", "4", "--ignore_eos")
    tokenizer = load_tokenizer(chat_folder)
    terminal.wait_for("> ")
    line = "the little cat " * 500
    terminal.type(line + "\n")
    full = terminal.wait_for(r"is too long: (\d+) tokens")
    assert int(full[1]) == len(tokenizer.chat([{"role": "user", "content": line}]))
    terminal.wait_for("> ")
    terminal.type("\n")  # a blank line ends nothing
    terminal.wait_for("> ")
    # a terminal pastes the ends of lines as \\r
    terminal.type("\x1b[200~the cat\ra dog\x1b[201~\n")
    first = terminal.wait_for(r"\[(\d+) tokens read, (\d+) reused")
    pasted = tokenizer.chat([{"role": "user", "content": "the cat\na dog"}])
    assert int(first[1]) + int(first[2]) == len(pasted)
    terminal.wait_for("> ")
    terminal.type("/reset\n")
    terminal.wait_for("> ")
    terminal.type("a doz\x7fg\n")  # an error that is rubbed out
    again = terminal.wait_for(r"\[(\d+) tokens read, (\d+) reused")
    assert int(again[1]) + int(again[2]) == len(
        tokenizer.chat([{"role": "user", "content": "a dog"}])
    )
    terminal.wait_for("> ")
    terminal.type("/exit\n")
    assert terminal.process.wait(timeout=30) == 0


def test_a_report_without_a_terminal_or_a_draft(chat_folder, capsys, monkeypatch):
    _, err = chatted(
        capsys, monkeypatch, chat_folder, "the cat\n", "--max_new_tokens", 4, "--ignore_eos"
    )
    assert re.search(
        r"^(?:> )?\[\d+ tokens read, 0 reused, length, [\d.]+ tok/s\]$",
        err,
        re.MULTILINE,
    )
    assert "\x1b" not in err


def test_a_terminal_shows_an_answer_to_its_last_word(chat_folder, capsys, monkeypatch):
    """Words wait for their ends there, because a line may have to end before them."""
    options = ("--max_new_tokens", 30, "--ignore_eos")
    piped, _ = chatted(capsys, monkeypatch, chat_folder, "the cat\n", *options)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(shutil, "get_terminal_size", lambda *_, **__: os.terminal_size((20, 24)))
    shown, _ = chatted(capsys, monkeypatch, chat_folder, "the cat\n", *options)
    assert shown.count("\n") > piped.count("\n") and shown.split() == piped.split()


def test_an_unknown_command_is_no_message(chat_folder, capsys, monkeypatch):
    typed = "/rest now\nthe cat\n/exit\nnever read\n"
    _, err = chatted(capsys, monkeypatch, chat_folder, typed, "--max_new_tokens", 4, "--ignore_eos")
    assert "there is no command /rest: see /help" in err and err.count("tokens read") == 1


def test_a_line_may_continue_in_the_next(chat_folder, capsys, monkeypatch):
    """After a backslash at its end, as in llama.cpp."""
    messages = [{"role": "user", "content": "the cat\na dog"}]
    length = len(load_tokenizer(chat_folder).chat(messages))
    _, err = chatted(capsys, monkeypatch, chat_folder, "the cat\\\na dog\n", "--max_new_tokens", 4)
    assert f"[{length} tokens read, 0 reused" in err


def test_the_help_text_knows_a_chats_length(capsys):
    with pytest.raises(SystemExit):
        parse_args(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert f"of a chat or scripts.serve, the context, at most {DEFAULT_LENGTH}" in text


def test_a_folder_without_a_template_chats_as_plain_text(text_folder, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("the cat\n"))
    run_args(
        parse_args(["--checkpoint", str(text_folder), "--interactive", "--max_new_tokens", "4"])
    )
    out, err = capsys.readouterr()
    assert "no chat template: chatting as plain text" in err and out.strip()


def test_a_chat_goes_back_and_is_saved(chat_folder, tmp_path, capsys, monkeypatch):
    """After /undo the chat is the one without that turn; /retry answers the last message with what
    stood before it."""
    options = ("--max_new_tokens", 12, "--ignore_eos")
    want, _ = chatted(capsys, monkeypatch, chat_folder, "the cat\na dog\n", *options)
    cat, dog = want.splitlines()
    file = tmp_path / "chats.jsonl"
    typed = f"/undo\nthe cat\na ball\n/undo\na dog\n/save {file}\n/retry\n/save {file}\n"
    typed += f"/save\n/save a\0b\n/save {tmp_path}\n/retry\n/reset\n/undo\n"
    out, err = chatted(capsys, monkeypatch, chat_folder, typed, *options)
    lines = out.splitlines()
    assert (lines[0], *lines[2:]) == (cat, dog, dog, dog)
    assert err.count("there is no message yet") == 2
    assert err.count("error: /save ") == 2 and err.count(f"saved to {file}") == 2
    assert err.count("/save FILE needs a name, and a message to save") == 1
    saved = [json.loads(line)["messages"] for line in file.read_text().splitlines()]
    assert saved[0] == saved[1]
    assert [message["content"] for message in saved[0]] == ["the cat", cat, "a dog", dog]


def test_a_saved_conversation_goes_on(chat_folder, tmp_path, capsys, monkeypatch):
    """/load makes the last conversation of a file this chat's; a file without one leaves the chat
    as it is."""
    options = ("--max_new_tokens", 12, "--ignore_eos", "--system", "Be brief.")
    whole, _ = chatted(capsys, monkeypatch, chat_folder, "the cat\na dog\na ball\n", *options)
    file = tmp_path / "chats.jsonl"
    chatted(capsys, monkeypatch, chat_folder, f"a tree\n/save {file}\n", *options)
    chatted(capsys, monkeypatch, chat_folder, f"the cat\na dog\n/save {file}\n", *options)
    for name, line in (
        ("prompt", {"prompt": "the cat"}),
        ("half", {"messages": [{"role": "user", "content": "the cat"}]}),
        ("text", "the cat"),
    ):
        (tmp_path / name).write_text(json.dumps(line))
    typed = f"a sun\n/load {file}\n"
    typed += "".join(f"/load {tmp_path / name}\n" for name in ("prompt", "half", "text", "no"))
    typed += f"/load\na ball\n/undo\n/undo\n/undo\n/undo\n/save {file}\na dog\n/save {file}\n"
    out, err = chatted(capsys, monkeypatch, chat_folder, typed, *options[:-2])
    assert out.splitlines()[1] == whole.splitlines()[2]
    assert err.count("error: /load ") == 5 and err.count("there is no message yet") == 1
    saved = [json.loads(line)["messages"] for line in file.read_text().splitlines()]
    assert [message["role"] for message in saved[-1]] == ["system", "user", "assistant"]
    assert err.count("/save FILE needs a name, and a message to save") == 1


REFUSES_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}{{ m.content }}{% endfor %}"
)


def test_a_conversation_that_cannot_go_on_leaves_the_chat_as_it_was(
    chat_folder, tmp_path, capsys, monkeypatch
):
    """A loaded one that the template refuses is refused; /reset brings --system back; an error
    counts the file's lines."""
    turns = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "a dog"}]
    for name, messages in (
        ("system", [{"role": "system", "content": "x"}, *turns]),
        ("plain", turns),
    ):
        (tmp_path / name).write_text("\n\n" + json.dumps({"messages": messages}) + "\n")
    (tmp_path / "broken").write_text("{}\n{}\n")
    saved = tmp_path / "saved"
    typed = f"/load {tmp_path}/plain\n/reset\na sun\n/save {saved}\n/load {tmp_path}/broken\n"
    _, err = chatted(capsys, monkeypatch, chat_folder, typed, "--system", "Be kind.", "-n", 4)
    (line,) = saved.read_text().splitlines()
    assert json.loads(line)["messages"][0] == {"role": "system", "content": "Be kind."}
    assert "broken, line 2: " in err
    (chat_folder / "chat_template.jinja").write_text(REFUSES_SYSTEM)
    typed = f"a sun\n/load {tmp_path}/system\na ball\n/save {saved}\n"
    _, err = chatted(capsys, monkeypatch, chat_folder, typed, "-n", 4)
    assert err.count("no system") == 1 and "error: /load" in err
    messages = json.loads(saved.read_text().splitlines()[-1])["messages"]
    assert [message["content"] for message in messages[::2]] == ["a sun", "a ball"]


def test_an_empty_word_is_one_line(tmp_path):
    done = subprocess.run(
        [sys.executable, "generate.py", "Hello", ""], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (2, "error: unrecognized arguments:\n")


def test_a_message_may_begin_with_a_slash(chat_folder, tmp_path, capsys, monkeypatch):
    """Two slashes are one; a line with one is a command, known or not."""
    file = tmp_path / "chats.jsonl"
    typed = f"/save {file}\n/rest now\n//etc is // a folder\n/save {file}\n/exit now\nnever read\n"
    _, err = chatted(capsys, monkeypatch, chat_folder, typed, "--max_new_tokens", 4)
    assert "there is no command /rest: see /help" in err and err.count("tokens read") == 1
    assert err.count("/save FILE needs a name, and a message to save") == 1  # before any message
    (conversation,) = [json.loads(line)["messages"] for line in file.read_text().splitlines()]
    assert conversation[0]["content"] == "/etc is // a folder"


def test_a_chat_refuses_at_its_start_what_the_template_leaves_out(chat_folder, capsys, monkeypatch):
    template = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
    (chat_folder / "chat_template.jinja").write_text(template)
    for options, reason in (
        (
            ("--system", "Be a cat."),
            "messages[0], role 'system': the chat template leaves out its content",
        ),
        (("--chat_template_kwargs", '{"enable_thinkin": false}'), "does not read enable_thinkin"),
        (("--tools", "[{}]"), "does not mention tools"),
    ):
        with pytest.raises(ValueError, match=re.escape(reason)):
            chatted(capsys, monkeypatch, chat_folder, "", *options)


def test_a_tokenizer_may_know_a_token_that_the_model_has_not(text_folder, tmp_path, capsys):
    """Early Llama-2 mirrors put <pad> at vocab_size: text in a prompt, unless the folder finds it
    in any text."""
    folder = shutil.copytree(text_folder, tmp_path / "model")
    prompt = [
        "--prompt",
        "the cat <pad>",
        "--temperature",
        0,
        "--max_new_tokens",
        4,
        "--checkpoint",
    ]
    want, _ = run(capsys, *prompt, text_folder)
    (folder / "added_tokens.json").write_text('{"<pad>": 384}')
    assert run(capsys, *prompt, folder)[0][0]["tokens"] == want[0]["tokens"]
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["added_tokens_decoder"] = {"384": {"content": "<pad>", "special": False}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(
        ValueError, match="'<pad>', whose id 384 lies outside the model's vocabulary of 384"
    ):
        run(capsys, *prompt, folder)


@pytest.mark.parametrize("flag", ["--draft_checkpoint=", "--draft=", "--draft=suffix,"])
def test_an_empty_draft_is_no_draft_by_accident(flag):
    """Such as that of a shell's variable without a value."""
    with pytest.raises(ValueError, match="the draft has an empty name"):
        parse_args([flag])


def test_threads_stay_within_a_containers_share(tmp_path):
    """A quota of one and a half processors is two; none, or no such file, is what the process may
    run on."""
    file, here = tmp_path / "cpu.max", len(os.sched_getaffinity(0))
    for text, want in (
        ("150000 100000", min(2, here)),
        ("50000 100000", 1),
        ("max 100000", here),
        ("", here),
    ):
        file.write_text(text + "\n")
        assert cpu_share(str(file)) == want
    assert cpu_share(str(tmp_path / "none")) == here


@pytest.mark.parametrize("asked, index", [(None, 0), ("cuda", 0), ("cuda:1", 1)])
def test_a_gpu_without_a_number_is_the_first_one(monkeypatch, asked, index):
    """torch.cuda.set_device refuses a device without an index, which is what the default and
    --device cuda are."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", lambda *size, device: None)
    current, switched = [], []
    monkeypatch.setattr(torch._C, "_cuda_setDevice", current.append, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: 2, raising=False)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", switched.append)
    assert pick_device(asked).type == "cuda"
    # cuDNN's attention plans anew for every length
    assert current == [index] and switched == [False]


def test_a_gpu_that_fails_is_named_though_nobody_asked_for_it(monkeypatch):
    def fail(*size, device) -> None:
        raise RuntimeError("CUDA driver is too old")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", fail)
    with pytest.raises(UserError, match=r"^--device cuda: not available here: CUDA driver"):
        pick_device(None)


# -------------------------------------------------------------------------------- what is counted


def test_byte_accounting_by_hand(folder_of):
    """Weights of a step: all but the embedding table of an untied model. Keys and values: 2 *
    layers * G * E each."""
    D, F, V, E, G, H, L = 64, 96, 131, 16, 2, 4, 3
    layer = D * (H + 2 * G) * E + H * E * D + 3 * D * F + 2 * D
    untied, tied = load_model(folder_of("llama-3")), load_model(folder_of("qwen2"))
    assert weight_bytes(untied) == 2 * (L * layer + D + V * D)
    assert weight_bytes(tied) == 2 * (L * (layer + (H + 2 * G) * E) + D + V * D)  # and qkv biases
    engine, timing = Engine(untied, 2, 13), Timing()
    list(
        generate(
            untied,
            [[5] * 10, [6] * 4],
            engine=engine,
            sampling=Sampling(0),
            max_new_tokens=3,
            timing=timing,
        )
    )
    per_token = 2 * L * G * E * 2
    # Two steps: each query attends to its own position and all before it, 11 and 5 positions, then
    # 12 and 6.
    read = 2 * weight_bytes(untied) + per_token * (11 + 5 + 12 + 6)
    assert timing.steps == 2 and bytes_read(engine, timing) == read
    windowed = load_model(folder_of("mistral-v0.1"))
    assert attended_bytes(position_bytes(windowed), 30) == per_token * 9  # a window of 9
    assert timing.prompt_tokens == 14
    assert [len(request.tokens) for request in timing.requests] == [3, 3]


# ---------------------------------------------------------------------------------- every program

LISTED = subprocess.run(
    ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
).stdout.split()
PROGRAMS = [  # the others take no flags, or are processes that a program starts
    name
    for name in LISTED
    if re.search('^if __name__ == "__main__"', text := (ROOT / name).read_text(), re.MULTILINE)
    and re.search(r"parse_args|from cli\.(start|quantize)", text)
]


@pytest.mark.parametrize("file", PROGRAMS)
def test_every_program_helps(file, tmp_path):
    """It imports what there is, and its flags can be printed."""

    def help() -> None:
        sys.argv = [file, "--help"]
        runpy.run_module(
            file.removesuffix(".py").replace("/", "."), run_name="__main__", alter_sys=True
        )

    assert forked(help, tmp_path / "stderr") == 0, (tmp_path / "stderr").read_text()


ANSWERED_FLAGS = {  # words of a command line -> (exit status, what is printed)
    "generate.py --help": (0, "--draft_checkpoint PATH"),
    "generate.py --max_new_tokenz 3": (
        2,
        "error: unrecognized arguments: --max_new_tokenz; did you mean --max_new_tokens?\n",
    ),
    "generate.py one two": (2, "error: unrecognized arguments: two\n"),
    "generate.py one --prompt two": (2, "error: argument -p/--prompt: not allowed with"),
    "scripts/serve one": (2, "error: PROMPT is about generate.py's own prompts and output"),
    "generate.py --dtype int3": (2, "error: argument --dtype: invalid choice: 'int3'"),
    "generate.py --tools nosuch.json": (2, "is not a list, or a file that holds one in JSON\n"),
    f"generate.py --tools {{{'x' * 300}}}": (
        2,
        "xxx is not a list, or a file that holds one in JSON\n",
    ),
    "generate.py --temperature -1": (
        2,
        "error: temperature = -1.0 must be 0 (greedy) or a number from 1e-38 on\n",
    ),
    "generate.py --quantize int3": (
        2,
        "error: quantization scheme 'int3' does not exist; there are int8, int4-g32,",
    ),
    "generate.py --quantize int8 --quantize_head int3": (
        2,
        "error: quantization scheme 'int3' does not exist",
    ),
    "generate.py --system a": (2, "error: --system needs --interactive\n"),
    "generate.py --draft ngram --speculate_k x": (
        2,
        "x must be a number of tokens",
    ),
    "quantize.py --help": (0, "--calibration FILE"),
    "quantize.py --scheme int8": (
        2,
        "error: the following arguments are required: --checkpoint, --output\n",
    ),
    "scripts/serve --help": (0, "All other flags are generate.py's"),
    "scripts/serve --port 70000": (2, "error: --port 70000 must lie between 0 and 65535\n"),
    "scripts/serve --json": (2, "error: --json is about generate.py's own prompts and output"),
    "scripts/serve --top_p 2": (2, "error: top_p = 2.0 must lie in (0, 1]; 1 for no limit\n"),
    "scripts/distill_draft.py --kind x": (2, "error: argument --kind: invalid choice: 'x'"),
}


def test_help_and_wrong_flags_are_answered_without_torch():
    """Its import takes seconds. A module that is None cannot be imported."""
    code = """
import contextlib, io, json, runpy, sys
sys.modules["torch"] = None
for words in map(str.split, json.loads(sys.argv[1])):
    sys.argv, printed, status = words, io.StringIO(), None
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            runpy.run_module(words[0].removesuffix(".py").replace("/", "."), run_name="__main__")
        except SystemExit as end:
            status = end.code
    print(json.dumps([status, printed.getvalue()]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps([*ANSWERED_FLAGS])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    answers = map(json.loads, done.stdout.splitlines())
    for (words, (status, message)), (actual_status, printed) in zip(
        ANSWERED_FLAGS.items(), answers, strict=True
    ):
        assert (actual_status, message in printed) == (status, True), (words, printed)


@pytest.mark.parametrize(
    "program, flags, missing",
    [
        ("compare", "--b x", "--a"),
        ("perplexity", "--text x", "-m/--checkpoint"),
        ("eval_lm", "--checkpoint x", "--tasks"),
        ("tp_plan", "--json", "PATH"),
    ],
)
def test_scripts_refuse_wrong_flags(program, flags, missing, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [program, *flags.split()])
    with pytest.raises(SystemExit) as end:
        importlib.import_module(f"scripts.{program}").main()
    error = f"error: the following arguments are required: {missing}\n"
    assert (end.value.code, capsys.readouterr().err) == (2, error)


def required(file: str) -> set[str]:
    """The modules of the packages that a requirements file pins."""
    return set(
        re.findall(r"^([\w-]+)==", (ROOT / file).read_text().replace("-", "_"), re.MULTILINE)
    )


@pytest.mark.one_in(4)
@pytest.mark.parametrize("file", [file for file in PROGRAMS if not file.startswith("tests/")])
def test_every_program_names_the_packages_that_it_lacks(file, tmp_path):
    """With requirements.txt alone it helps, or says in one line how to install the rest."""
    missing = required("requirements-dev.txt") - required("requirements.txt") | {
        "pydantic",
        "starlette",
    }

    def help() -> None:
        for name in list(sys.modules):
            if name.partition(".")[0] in {*missing, "scripts", "benchmarks"}:
                del sys.modules[name]
        sys.modules.update(dict.fromkeys(missing))
        sys.argv = [file, "--help"]
        runpy.run_module(
            file.removesuffix(".py").replace("/", "."), run_name="__main__", alter_sys=True
        )

    status, error = forked(help, tmp_path / "stderr"), (tmp_path / "stderr").read_text()
    assert status == 0 or (
        status == 2 and re.fullmatch(r"error: \S+ needs .+: pip install .+\n", error)
    ), error


@pytest.mark.parametrize(
    "program, flags",
    [
        ("cli.quantize", "--checkpoint a --output b --scheme int8"),
        ("scripts.perplexity", "--checkpoint a --text b"),
        ("scripts.compare", "--a= --b="),
        ("scripts.eval_lm", "--checkpoint a --tasks x"),
        ("scripts.serve.serve", ""),
    ],
)
def test_programs_of_one_process_refuse_torchrun(monkeypatch, capsys, tmp_path, program, flags):
    """Otherwise every rank does and prints all of it, and they write the same folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [program, *flags.split()])
    for name, value in {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as exit:
        importlib.import_module(program).main()
    out, err = capsys.readouterr()
    assert exit.value.code == 2 and out == "" and not list(tmp_path.iterdir()), out
    assert "without torchrun" in err and err.count("\n") == 1, err


@pytest.mark.parametrize(
    "program", ["generate.py", "quantize.py", "-m scripts.serve", "-m scripts.perplexity"]
)
def test_without_packages_a_program_says_how_to_install_them(program):
    """As where an environment is not activated: -S hides its packages. The command is README's."""
    done = subprocess.run(
        [sys.executable, "-S", *program.split()], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    command = re.fullmatch("error: no torch in this Python's environment: (.+)\n", done.stderr)[1]
    assert command in (ROOT / "README.md").read_text()


def closed(number: int, command: list) -> subprocess.CompletedProcess:
    """A command with a closed stdin, stdout or stderr, as of `<&-`, `>&-` and `2>&-`."""
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {number}>&-', "sh", *map(str, command)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.PIPE if number else None,
    )


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_closed_stream_is_opened_by_its_number(number, tmp_path):
    """The next file that is opened would take it, and get what is printed by C code."""
    code = """
import os, sys
from cli.process import prepare
prepare()
file = open(sys.argv[1], "w")
assert file.fileno() > 2
print("text", flush=True)
print("message", file=sys.stderr)
os.write(2, b"raw")
sys.exit(3 + len(sys.stdin.read()))
"""
    done = closed(number, [sys.executable, "-c", code, tmp_path / "file"])
    assert done.returncode == 3, done.stderr
    assert done.stdout == ("" if number == 1 else "text\n")
    assert done.stderr == ("" if number == 2 else "message\nraw")
    assert not (tmp_path / "file").read_bytes()


@pytest.mark.attack
@pytest.mark.parametrize("number", [0, 1, 2])
def test_generate_runs_with_a_closed_stream(number, text_folder):
    command = [sys.executable, "generate.py", "--checkpoint", text_folder, "-n", "5"]
    if number == 0:
        command.append("--interactive")
    done = closed(number, command)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert bool(done.stdout) == (number == 2)
    wrong = closed(number, [*command, "--top_p", "2"])
    assert wrong.returncode == 2 and "Traceback" not in wrong.stderr


def test_programs_are_looked_for_where_they_are():
    starts = {"generate.py", "quantize.py", "scripts/distill_draft.py", "scripts/serve/__main__.py"}
    assert {*starts, "benchmarks/bench_gpu.py"} <= {*PROGRAMS}
