"""scripts/drift.py: it measures what it says, and a wrong token at a distance is not taken for rounding."""

import json
import sys

import pytest
import torch

import generate as program
from scripts import drift
from speculative import accept


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """The command on two prompts, in float32, with one drafter."""
    file = tmp_path / "drift.json"
    monkeypatch.setattr(drift, "DTYPES", ("float32",))
    monkeypatch.setattr(drift, "DRAFTERS", ("layers",))
    monkeypatch.setattr(drift, "KS", (3,))
    monkeypatch.setattr(sys, "argv", ["drift", "--prompts", "2", "--new_tokens", "12", "--write", str(file)])

    def run() -> tuple[int, dict]:
        with pytest.raises(SystemExit) as end:
            drift.main()
        return end.value.code, json.loads(file.read_text())

    return run


def test_float32_does_not_drift(quick):
    """And both ways to decide a known text agree with a pass without a cache, as far as float32 goes."""
    status, found = quick()
    (said,), (row,) = found["widths"], found["drafted"]
    assert status == 0 and row["same"] == 2 and row["distances"] == [] and row["within_2d"]
    assert said["tokens"] == 24 and said["as_float32"] == 1 and said["by_k"]["3"]["decided_otherwise"] == 0
    assert 0 < said["d"] < 1e-3, "logits of size 10: some hundred roundings of float32, no more"


def test_an_error_is_no_rounding(quick, monkeypatch):
    """A program that keeps every drafted token parts far from plain decoding's choice."""
    monkeypatch.setattr(program, "accept", lambda *given, noise: accept(*given, noise=(noise[0] - 1, noise[1])))
    status, found = quick()
    assert status == 1 and not found["drafted"][0]["within_2d"] and max(found["drafted"][0]["ulps"]) > 100


def test_spacing_by_hand():
    x = torch.tensor([1.0, -1.5, 2.0, 17.0, 0.75])
    assert drift.spacing(x, "bfloat16").tolist() == [2**-7, 2**-7, 2**-6, 2**-3, 2**-8]
    assert drift.spacing(x, "float16").tolist() == [2**-10, 2**-10, 2**-9, 2**-6, 2**-11]


def test_too_few_paragraphs_are_refused(tmp_path):
    (tmp_path / "text").write_text("One sentence that is long enough to begin a story with, as it seems.\nShort.\n")
    assert drift.prompts_of(tmp_path / "text", 1).shape == (1, drift.PROMPT)
    with pytest.raises(ValueError, match="1 paragraphs of 12 tokens, fewer than --prompts 2"):
        drift.prompts_of(tmp_path / "text", 2)
