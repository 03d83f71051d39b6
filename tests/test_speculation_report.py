"""scripts/speculation_report.py: the table follows from acceptance and costs; the picture is a picture."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT

from scripts.speculation_report import main, print_table, table
from speculative import Costs


def report(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "scripts.speculation_report", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_the_table_by_hand():
    costs = Costs(0.1, {1: 0.02, 5: 0.1}, {1: 0.11, 5: 0.15})
    rows = table({"costs": costs, "alpha": 0.5, "c_ops": 0.1, "draft_share": 1.0})
    assert [r["k"] for r in rows] == [1, 5] and rows[1]["c"] == pytest.approx(0.2)
    assert rows[1]["v"] == pytest.approx(1.5) and rows[1]["tokens_per_round"] == pytest.approx(1.96875)
    assert rows[1]["speedup"] == pytest.approx(1.96875 / 2.5)
    assert rows[1]["speedup_if_v_were_1"] == pytest.approx(1.96875 / 2)
    assert rows[1]["operations"] == pytest.approx((0.5 + 6) / 1.96875)


def test_the_table_of_a_drafter_that_seldom_finds_anything(capsys):
    """Prompt lookup that matches in a tenth of the steps: the others give one token at a plain step's cost."""
    costs = Costs(0.1, {1: 0.0, 5: 0.0}, {1: 0.11, 5: 0.15})
    found = {"costs": costs, "alpha": 0.5, "c_ops": 0.0, "draft_share": 0.1}
    rows = table(found)
    assert rows[1]["tokens_per_round"] == pytest.approx(0.9 + 0.196875)
    assert rows[1]["speedup"] == pytest.approx(1.096875 / (0.9 + 0.15))
    assert rows[1]["speedup_if_v_were_1"] == pytest.approx(1.096875)
    assert rows[1]["operations"] == pytest.approx((0.9 + 0.6) / 1.096875)
    measured = dict.fromkeys(("tokens_per_round", "measured_speedup", "predicted_speedup"), 1.0)
    print_table({**found, **measured, "by_position": [0.5], "k": 5}, rows)
    out = capsys.readouterr().out
    assert "drafted in 10.0% of the rounds" in out and "best: K = 5, speed-up 1.04" in out


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "stories.txt"
    file.write_text("Once upon a time there was a little dog. He liked to run in the park with his friend Tom. " * 30)
    return file


def test_a_report_of_the_demo_pair(text, tmp_path, capsys):
    """Measured acceptance lies between never and always, what it leads to is printed, and the picture is a PNG."""
    png = tmp_path / "report.png"
    common = ("--text", text, "--samples", 2, "--new_tokens", 24, "--draft_checkpoint", "checkpoints/demo-draft")
    done = report(*common, "--plot", png, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert 0.2 < found["alpha"] < 1 and found["c_ops"] == pytest.approx(0.14, abs=0.03)
    assert [r["k"] for r in found["by_k"]] == [1, 2, 3, 5, 8] and found["tokens_per_round"] > 1
    assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 10_000
    costs = [found["costs"][name] for name in ("decode_s", "draft_s", "verify_s")]
    costs = [{int(k): v for k, v in c.items()} if isinstance(c, dict) else c for c in costs]  # JSON's keys are strings
    print_table({**found, "costs": Costs(*costs)}, found["by_k"])
    out = capsys.readouterr().out
    assert "best: K =" in out and "operations" in out


@pytest.mark.parametrize(
    "arguments, names",
    [
        (["--draft", "ngram", "--samples", "9999"], "too few for 9999 prompts"),
        ([], "give a drafter"),
        (["--draft", "ngram", "--new_tokens", "500"], "over the model's context of 512"),
        (["--draft", "ngram", "--prompt_tokens", "0"], "--prompt_tokens"),
    ],
)
def test_user_errors(text, arguments, names, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["speculation_report", "--text", str(text), *arguments])
    with pytest.raises(SystemExit) as exit:
        main()
    err = capsys.readouterr().err
    assert exit.value.code == 2 and names in err and "Traceback" not in err
