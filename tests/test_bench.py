"""scripts/bench.py: bytes by hand, time in the phase where it was spent, results that merge."""

import json
import time

import pytest
import torch
from conftest import BASE, FAMILIES, ROOT
from matplotlib.figure import Figure

from generate import Timing, generate
from model import Transformer
from sampling import Sampling
from scripts.bench import Contender, PeakAnonymous, Worker, hardware, interleave, ours, row, write_results
from scripts.plots import draw, draw_context, draw_drafts, draw_quality, draw_rates
from scripts.products import check
from scripts.tables import fill

SHAPE = {**BASE, **FAMILIES["llama-3"]}
PAUSE = 0.25  # seconds; a busy machine may stop a step for a tenth


def test_bytes_of_a_step_by_hand():
    """The hand count of tests/test_generate.py's shape: 3 layers, D 64, F 96, V 131, 2 KV heads of 16."""
    layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96 + 2 * 64
    weights = 3 * layer + 64 + 131 * 64
    for dtype, size in (("bfloat16", 2), ("float32", 4)):
        answer = Contender(SHAPE, dtype=dtype, batch=2, cache=64).decode(steps=4, filled=20)
        assert answer["bytes"] == size * (weights + 2 * (20 + 2) * 2 * 3 * 32)  # two rows, the middle step's positions


def slow(function, when):
    def wrapped(*args, **options):
        if when(*args):
            time.sleep(PAUSE)
        return function(*args, **options)

    return wrapped


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_sleep_shows_in_its_phase_alone(monkeypatch, phase):
    """Ten tokens of prompt are one call of T = 10, each decode step one of T = 1."""
    contender = Contender(SHAPE, dtype="float32", cache=64)
    is_prefill = phase == "prefill"
    wrapped = slow(Transformer.hidden, lambda model, tokens, pos: (tokens.size(1) > 1) == is_prefill)
    contender.prefill(length=10), contender.decode(steps=3, filled=10)  # first calls are slower by themselves
    monkeypatch.setattr(Transformer, "hidden", wrapped)
    in_prefill = contender.prefill(length=10)["seconds"] > PAUSE
    in_decode = contender.decode(steps=3, filled=10)["seconds"] > PAUSE
    assert (in_prefill, in_decode) == (is_prefill, not is_prefill)
    timing = Timing()
    list(generate(contender.model, [[7] * 10], sampling=Sampling(0), max_new_tokens=5, timing=timing))
    assert (timing.prefill_s > PAUSE, timing.decode_s > 4 * PAUSE) == (is_prefill, not is_prefill)


def test_a_slow_consumer_is_not_counted():
    contender, timing = Contender(SHAPE, dtype="float32", cache=64), Timing()
    start = time.perf_counter()
    for _ in generate(contender.model, [[7] * 10], sampling=Sampling(0), max_new_tokens=9, timing=timing):
        time.sleep(PAUSE)
    assert time.perf_counter() - start > 9 * PAUSE > timing.prefill_s + timing.decode_s


def test_workers_take_turns_and_answer():
    """A real worker beside a fake one that records the order; the first round is not counted."""
    order = []

    class Fake:
        def ask(self, **request):
            order.append(request["filled"])
            return {"seconds": 1.0 + len(order)}

    worker = ours(hf=SHAPE, cache=64)
    answers, bandwidths = interleave({"a": worker, "b": Fake()}, 2, {"what": "decode", "steps": 2, "filled": 9})
    worker.close()
    assert order == [9, 9, 9] and [a["seconds"] for a in answers["b"]] == [3.0, 4.0]
    assert len(answers["a"]) == len(bandwidths) == 2 and min(bandwidths) > 1e8
    with pytest.raises(ValueError, match="the worker died"):
        Worker("scripts.peers", "nobody").ask(what="decode")


def test_results_merge_by_id(tmp_path):
    file = tmp_path / "cpu.json"
    write_results(file, [row("a", [3.0, 1.0, 2.0], "s"), row("b", [1.0], "s")], "first")
    write_results(file, [row("b", [2.0], "s", "again"), row("c", [1 / 3], "ratio")], "second")
    result = json.loads(file.read_text())
    assert result.keys() == {"commit", "date", "hardware", "torch", "command", "rows"}
    assert [r["id"] for r in result["rows"]] == ["a", "b", "c"]
    first = {"id": "a", "value": 2.0, "min": 1.0, "max": 3.0, "unit": "s", "note": ""}
    assert first.items() <= result["rows"][0].items() and [r["command"] for r in result["rows"]] == [
        "first",
        *["second"] * 2,
    ]
    assert result["rows"][1]["value"] == 2.0 and result["rows"][2]["value"] == 0.3333


def test_peak_counts_what_was_freed_again():
    with PeakAnonymous() as peak:
        block = torch.ones(50_000_000)
        del block
        time.sleep(0.01)
    assert 150e6 < peak.bytes < 300e6


def test_breakdown_finds_the_products():
    found = Contender({**SHAPE, "intermediate_size": 4096, "hidden_size": 512, "head_dim": 64}, cache=64).breakdown(
        4, 10
    )
    assert found["matmul"] > max(found["attention"], found["norm"]) > 0


def test_hardware_stays_with_the_rows_it_measured(tmp_path):
    """A file that another machine began: its rows keep that machine's name, the new ones have this one's."""
    file = tmp_path / "cpu.json"
    old = {
        "hardware": "elsewhere",
        "date": "2020-01-01",
        "rows": [{"id": "a", "value": 1.0}, {"id": "b", "value": 2.0}],
    }
    file.write_text(json.dumps(old))
    write_results(file, [row("b", [3.0], "s")], "second")
    a, b = json.loads(file.read_text())["rows"]
    assert a["hardware"] == "elsewhere" and a["date"] == "2020-01-01"
    assert b["hardware"] == hardware() and b["value"] == 3.0


def test_the_picture_shows_what_was_measured(tmp_path):
    """One bar a program and format, two lines a curve, the limit where the rate's share says; nothing for the rest."""
    rows = [row("1b.bf16.compiled.tok_s", [10.0], "tok/s"), row("1b.bf16.tok_s", [8.0], "tok/s")]
    rows += [row("1b.bf16.compiled.of_read_bandwidth", [0.5], "ratio"), row("1b.bf16.llamacpp.tok_s", [12.0], "tok/s")]
    rows += [
        row("spec.1b.alpha80.k3.speedup", [1.8], "x"),
        row("spec.1b.alpha80.k3.measured_over_predicted", [0.9], "x"),
    ]
    for filled, ms in ((100, 10.0), (16_000, 14.0)):
        rows.append(row(f"1b.bf16.compiled.full.filled{filled}.ms", [ms], "ms"))
        rows.append(row(f"1b.bf16.compiled.full.filled{filled}.gb", [ms / 5], "GB"))
    rates, context, drafts = Figure().subplots(1, 3)
    found = {r["id"]: r for r in rows}
    draw_rates(rates, found), draw_context(context, found), draw_drafts(drafts, found)
    assert [bar.get_height() for bar in rates.patches] == [10.0, 12.0]
    assert any(list(line.get_ydata()) == [20.0, 20.0] for line in rates.lines)
    assert [list(line.get_ydata()) for line in context.lines] == [[10.0, 14.0], [10.0, 14.0]]
    assert [list(line.get_ydata()) for line in drafts.lines[:2]] == [[1.8], [2.0]]
    draw(rows, tmp_path / "picture.svg", "title")
    assert "<svg" in (tmp_path / "picture.svg").read_text()


def test_the_picture_of_quality_stands_at_the_stored_bits():
    """By hand: int4-g128 has 4 bits and two 16-bit numbers per 128, mxfp6 6 bits and 8 per 32."""
    rows = [row("demo.int4-g128.kl", [0.01], "nats"), row("demo.mxfp6.kl", [0.001], "nats")]
    axes = Figure().subplots()
    draw_quality(axes, {r["id"]: r for r in rows})
    points = {text.get_text(): text.xy for text in axes.texts}
    assert points == {"int4-g128": (4.25, 0.01), "mxfp6": (6.25, 0.001)}


def test_nothing_to_draw_is_said(tmp_path):
    with pytest.raises(ValueError, match="nothing among 1 rows"):
        draw([row("tp.1b.read_bandwidth", [1.0], "GB/s")], tmp_path / "picture.png", "title")


def test_the_tables_of_the_readmes_say_what_the_files_say():
    """Figures are measured anew and texts forgotten: the same command that draws the pictures fills the tables."""
    rows = [r for file in (ROOT / "benchmarks").glob("*.json") for r in json.loads(file.read_text()).get("rows", ())]
    for file in (ROOT / "README.md", ROOT / "benchmarks" / "README.md"):
        text = file.read_text()
        assert "<!-- table " in text and fill(text, rows) == text, f"python -m scripts.bench --plot changes {file}"


def test_a_table_cell_is_the_row_with_its_spread():
    text = "before\n<!-- table rates -->\nstale\n<!-- end -->\nafter"
    filled = fill(text, [row("1b.int8.tok_s", [10.04, 20.06, 123.4], "tok/s")])
    lines = filled.splitlines()
    assert (lines[0], lines[-1]) == ("before", "after") and "stale" not in filled
    assert "| quickdraft, eager, tok/s | – | 20.1 (10.0–123) | – |" in lines
    assert fill(filled, []) != filled
    with pytest.raises(ValueError, match="no table is called 'nonsense'"):
        fill(text.replace("rates", "nonsense"), [])


def test_a_wrong_product_is_called_wrong():
    weight = torch.randn(32, 64)
    assert check(lambda x: (x.float() @ weight.T).bfloat16(), weight, 6) is None
    assert "wrong" in check(lambda x: x.float() @ weight.flip(0).T, weight, 6)
    assert "fails: mat1 and mat2" in check(lambda x: x.float() @ weight, weight, 6)


def test_verification_is_timed_beside_a_plain_step():
    found = Contender(SHAPE, dtype="float32", cache=64, quantize="int8").verify(20, k=3)
    assert found["seconds"] > 0 and found["plain"] > 0
