"""Speculation as its users run it: flags, JSON, colours, chat, errors."""

import io
import json
import re
import shutil
import sys

import pytest
from conftest import ROOT
from test_program import Terminal, run

from cli.flags import parse_args
from cli.main import main as run_args
from drafts.target_layers import layer_subset
from loading.checkpoint import load_model
from loading.saving import save_model
from loading.tokenizer import load_tokenizer


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


@pytest.mark.one_in(6)
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
    notice = "the draft model's context ends at 50 positions; it drafts nothing beyond"
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


# An accepted token, or rejected ones in front of the one that corrects them, by the marks of a
# terminal and of a file.
ON_TERMINAL = re.compile(
    r"\x1b\[38;5;33m(?P<accepted>[^\x1b]*)\x1b\[0m"
    r"|\x1b\[9;38;5;244m(?P<rejected>[^\x1b]*)\x1b\[0m"
    r"\x1b\[1;38;5;196m(?P<corrected>[^\x1b]*)\x1b\[0m"
)
IN_FILE = re.compile(
    r"\{==(?P<accepted>.*?)==\}|\{~~(?P<rejected>.*?)~>(?P<corrected>.*?)~~\}", re.DOTALL
)


def without_marks(text: str, marks: re.Pattern) -> str:
    return marks.sub(lambda match: match["accepted"] or match["corrected"] or "", text)


@pytest.mark.attack
def test_show_drafts_marks_the_tokens_of_the_record_and_changes_no_text(capsys):
    """On a terminal by colours and strikes, where a chat breaks lines at words; in a file by
    CriticMarkup. Both show the same tokens, and the text between is that of a run without marks."""
    folder = str(ROOT / "checkpoints" / "demo")
    draft = str(ROOT / "checkpoints" / "demo-draft")
    common = ["--draft_checkpoint", draft, "--speculate_k", "3", "--temperature", "0"]
    common += ["--max_new_tokens", "60"]
    prompt = "One day, the dog"
    arguments = ["--checkpoint", folder, "--prompt", prompt, "--device", "cpu", *common]
    run_args(parse_args(arguments))
    plain = capsys.readouterr().out
    run_args(parse_args([*arguments, "--show_drafts"]))
    out, err = capsys.readouterr()
    assert without_marks(out, IN_FILE) == plain and "\x1b" not in out + err
    legend = "{==drafted and accepted==}, {~~drafted and rejected~>the model's own~~}"
    assert legend in err
    terminal = Terminal(folder, *common, "--show_drafts")
    terminal.wait_for("drafted and accepted")
    terminal.wait_for("> ")
    terminal.type(f"{prompt}\n")
    shown = terminal.wait_for(r"dog\r\n((?:.|\n)*)\r\n(?:\x1b\[2m)?\[\d+ tokens read[^>]*> ")[1]
    shown = shown.replace("\x1b[?2004l\r", "")  # the end of a line that may be pasted
    terminal.type("\x04")
    assert terminal.process.wait(timeout=30) == 0
    shown = shown.replace("\r\n", "\n")
    marked = without_marks(shown, ON_TERMINAL)
    assert marked.split() == plain.split() and "\x1b" not in marked
    assert max(map(len, re.sub(r"\x1b\[[0-9;]*m", "", shown).split("\n"))) <= 80
    seen, expected = (
        [re.sub(r"\s", "", "|".join(map(str, match.groups()))) for match in marks.finditer(text)]
        for text, marks in ((shown, ON_TERMINAL), (out, IN_FILE))
    )
    assert seen == expected
    run_args(parse_args([*arguments, "--json"]))
    drafting = json.loads(capsys.readouterr().out)["speculative"]
    num_corrected = sum(match["corrected"] is not None for match in IN_FILE.finditer(out))
    assert 0 < num_corrected <= drafting["rounds"]
    assert 0 < len(expected) - num_corrected <= drafting["accepted"]


def test_pieces_tell_tokenizers_apart(text_folder):
    """Padding apart: equal folders have equal pieces, specials by name."""
    a, b = load_tokenizer(text_folder), load_tokenizer(ROOT / "checkpoints" / "demo")
    assert a.pieces() == load_tokenizer(text_folder).pieces() != b.pieces()
    assert len(a.pieces()) == a.vocab_size and a.pieces()[1:3] == [b"<s>", b"</s>"]
    assert b.pieces() == load_tokenizer(ROOT / "checkpoints" / "demo-draft").pieces()
