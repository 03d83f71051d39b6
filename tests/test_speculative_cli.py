"""Speculation as its users run it: flags, JSON, colours, chat, errors."""

import io
import json
import shutil
import sys

import pytest
from conftest import ROOT
from test_program import Terminal, run

from cli.flags import parse_args
from cli.main import main
from cli.main import run as run_args
from loading.checkpoint import load_model
from loading.saving import save_model
from loading.tokenizer import load_tokenizer
from speculative import layer_subset


@pytest.fixture(scope="module")
def draft_folder(text_folder, tmp_path_factory):
    """The first layer of text_folder's model, as a folder of its own with the same tokenizer."""
    folder = tmp_path_factory.mktemp("draft")
    hf = json.loads((text_folder / "config.json").read_text()) | {
        "num_hidden_layers": 1,
        "layer_types": None,
    }
    model = layer_subset(load_model(text_folder), [0])
    save_model(model, folder, hf)
    for name in ("tokenizer.model", "tokenizer_config.json"):
        shutil.copy(text_folder / name, folder)
    return folder


def drafts(draft_folder) -> dict[str, list]:
    return {
        "checkpoint": ["--draft_checkpoint", draft_folder],
        "ngram": ["--draft", "ngram:1"],
        "suffix": ["--draft", "suffix"],
        "layers": ["--draft", "layers:0-1"],
    }


KEYS = {
    "k",
    "rounds",
    "drafted",
    "accepted",
    "accepted_by_position",
    "alpha",
    "c",
    "v",
    "tokens_per_round",
    "measured_speedup",
    "predicted_speedup",
    "draft_s",
    "verify_s",
}


@pytest.mark.parametrize("kind", ["checkpoint", "ngram", "suffix", "layers"])
@pytest.mark.parametrize(
    "k", ["3", *(pytest.param(k, marks=pytest.mark.attack) for k in ("auto", "0"))]
)
def test_greedy_json_per_row(text_folder, draft_folder, capsys, tmp_path, kind, k):
    """Same ids as without a drafter, batch 1 and 2; the promised keys; counts that fit together,
    row by row."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the little cat went\nplay in the park with a dog\n")
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
    plain, _ = run(capsys, *common)
    for batch_size in (1, 2):
        options = (*drafts(draft_folder)[kind], "--speculate_k", k, "--batch_size", batch_size)
        rows, err = run(capsys, *common, *options)
        assert [row["tokens"] for row in rows] == [row["tokens"] for row in plain]
        for row in rows:
            found = row["speculative"]
            assert found.keys() >= KEYS and str(found["k"]) == k
            assert sum(found["accepted_by_position"]) == found["accepted"] <= found["drafted"]
            assert found["drafted"] == sum(int(k) * n for k, n in found["rounds_by_k"].items())
            assert found["tokens_per_round"] == pytest.approx(39 / found["rounds"])
            assert found["draft_s"] + found["verify_s"] <= 39 / row["decode_tok_s"] + 1
            if found["drafted"]:
                assert found["c"] >= 0 and found["v"] > 0 and 0 <= found["alpha"] <= 1
                assert found["measured_speedup"] > 0 and found["predicted_speedup"] > 0
        assert "tokens a round" in err and "predicted" in err


def test_a_stop_string_cuts_the_statistics(text_folder, draft_folder, capsys):
    """The row's last token completes the stop string; nothing behind it is counted."""
    common = (
        "--checkpoint",
        text_folder,
        "--prompt",
        "a big",
        "--temperature",
        0,
        "--dtype",
        "float32",
    )
    common = (
        *common,
        "--max_new_tokens",
        60,
        "--ignore_eos",
        *drafts(draft_folder)["layers"],
        "--draft",
        "layers:0-2",
    )
    free = run(capsys, *common)[0][0]
    stop = free["text"][20:23]
    cut = run(capsys, *common, "--stop", stop)[0][0]
    assert (
        cut["text"] == free["text"][: free["text"].index(stop)] and cut["finish_reason"] == "stop"
    )
    n = len(cut["tokens"])
    assert n < 60 and cut["tokens"] == free["tokens"][:n]
    found = cut["speculative"]
    # the last round may end inside its draft
    assert found["accepted"] + found["rounds"] in (n - 1, n)
    assert found["tokens_per_round"] == pytest.approx((n - 1) / found["rounds"])


@pytest.mark.compiled
@pytest.mark.long
def test_compiled_on_the_command_line(text_folder, draft_folder, capsys):
    common = (
        "--checkpoint",
        text_folder,
        "--prompt",
        "the",
        "--temperature",
        0,
        "--dtype",
        "float32",
        "--ignore_eos",
    )
    common = (*common, "--max_new_tokens", 20)
    plain, _ = run(capsys, *common)
    rows, err = run(
        capsys, *common, "--draft_checkpoint", draft_folder, "--speculate_k", 2, "--compile"
    )
    assert rows[0]["tokens"] == plain[0]["tokens"] and "compiled" in err


def test_a_shorter_draft_context(text_folder, draft_folder, capsys, tmp_path):
    """A draft of a shorter context does not shorten the target's: the text is the plain one, and a
    line says where the draft ends."""
    folder = shutil.copytree(draft_folder, tmp_path / "short")
    hf = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 50}
    (folder / "config.json").write_text(json.dumps(hf))
    common = (
        "--checkpoint",
        text_folder,
        "--prompt",
        "the",
        "--ignore_eos",
        "--temperature",
        0,
        "--dtype",
        "float32",
    )
    notice = "the draft's context ends at 50 positions; texts decode plainly beyond it"
    for num_tokens, is_said in ((70, True), (40, False)):
        options = ("--max_new_tokens", num_tokens)
        plain, _ = run(capsys, *common, *options)
        rows, err = run(capsys, *common, *options, "--draft_checkpoint", folder)
        assert rows[0]["tokens"] == plain[0]["tokens"] and len(rows[0]["tokens"]) == num_tokens
        assert err.count(notice) == is_said


def test_a_chat_keeps_both_caches(text_folder, draft_folder, capsys, monkeypatch, tmp_path):
    """Three turns: the same answers with a drafter as without, prefixes kept."""
    folder = shutil.copytree(text_folder, tmp_path / "chat")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}[a]"
    )
    common = [
        "--checkpoint",
        folder,
        "--interactive",
        "--temperature",
        0,
        "--dtype",
        "float32",
        "--ignore_eos",
    ]
    common += ["--max_new_tokens", 12, "--device", "cpu"]
    answers = []
    for options in (
        [],
        ["--draft_checkpoint", draft_folder],
        ["--draft", "layers:0", "--speculate_k", "auto"],
    ):
        monkeypatch.setattr(sys, "stdin", io.StringIO("the little cat\na big dog\nplay\n"))
        run_args(parse_args([str(part) for part in common + options]))
        out, err = capsys.readouterr()
        answers.append(out)
        assert (" 0 reused" not in err.split("reused", 1)[1]) and ("tokens a round" in err) == bool(
            options
        )
    assert answers[0] == answers[1] == answers[2] and answers[0].strip()


@pytest.mark.attack
def test_show_drafts_colours_a_terminal_and_nothing_else(text_folder, draft_folder, capsys):
    """Blue: accepted; red: in the place of a rejected one. The text itself is the same."""
    common = [
        "--draft",
        "layers:0-1",
        "--temperature",
        "0",
        "--dtype",
        "float32",
        "--ignore_eos",
        "--show_drafts",
    ]
    terminal = Terminal(text_folder, *common, "--max_new_tokens", "60")
    terminal.wait_for("> ")
    terminal.type("the little cat\n")
    shown = terminal.wait_for(r"cat\r\n(.*)\r\n(?:\x1b\[2m)?\[\d+ tokens read[^>]*> ")[1]
    shown = shown.replace("\x1b[?2004l\r", "")  # the end of a line that may be pasted
    terminal.type("\x04")
    assert terminal.process.wait(timeout=30) == 0
    assert "\x1b[34m" in shown and "\x1b[31m" in shown
    plain = shown
    for code in ("\x1b[34m", "\x1b[31m", "\x1b[0m"):
        plain = plain.replace(code, "")
    arguments = [
        str(a) for a in ("--checkpoint", text_folder, *common, "--prompt", "the little cat")
    ]
    run_args(parse_args([*arguments, "--max_new_tokens", "60", "--device", "cpu"]))
    out = capsys.readouterr().out
    assert out == plain.replace("\r\n", "\n") + "\n" and "\x1b" not in out


@pytest.mark.parametrize(
    "arguments, names",
    [
        (["--draft_checkpoint", "nowhere"], "nowhere"),
        (["--draft", "layers:0-9"], "--draft layers:0-9: layers"),
        (["--draft", "layers:2-1"], "--draft layers:2-1: '2-1' is no layer"),
        (["--draft", "ngram:0"], "--draft ngram:0: '0' is no number of tokens"),
        (["--draft", "ngram:x"], "--draft ngram:x"),
        (["--draft", "magic"], "--draft magic: expected"),
        (["--draft", "ngram", "--speculate_k", "-1"], "--speculate_k: -1 must be a number"),
        (["--draft", "ngram", "--speculate_k", "many"], "--speculate_k: many"),
        (["--draft", "ngram", "--draft_checkpoint", "x"], "not allowed with"),
        (["--speculate_k", "3"], "--speculate_k and --show_drafts need"),
        (["--show_drafts"], "--speculate_k and --show_drafts need"),
        (["--draft_quantize", "int8"], "--draft_quantize needs --draft_checkpoint"),
    ],
)
def test_user_errors(text_folder, arguments, names, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["generate.py", "--checkpoint", str(text_folder), *arguments])
    with pytest.raises(SystemExit) as exit:
        main()
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert (
        exit.value.code == 2
        and out == ""
        and len(lines) == 1
        and names in lines[0]
        and "Traceback" not in err
    )


def test_pieces_tell_tokenizers_apart(text_folder):
    """Padding apart: equal folders have equal pieces, specials by name."""
    a, b = load_tokenizer(text_folder), load_tokenizer(ROOT / "checkpoints" / "demo")
    assert a.pieces() == load_tokenizer(text_folder).pieces() != b.pieces()
    assert len(a.pieces()) == a.vocab_size and a.pieces()[1:3] == [b"<s>", b"</s>"]
    assert b.pieces() == load_tokenizer(ROOT / "checkpoints" / "demo-draft").pieces()
