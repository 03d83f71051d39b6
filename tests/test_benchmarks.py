"""What measures: bytes by hand, time in the phase where it was spent, results that merge and that the READMEs show."""

import json
import time

import pytest
import torch
from conftest import BASE, FAMILIES, ROOT

from benchmarks import bench_gpu
from benchmarks.bench import Contender, row, write_results
from benchmarks.tables import fill
from generate import Timing, generate
from model import Transformer
from sampling import Sampling

SHAPE = {**BASE, **FAMILIES["llama-3"]}
PAUSE = 0.25  # seconds; a busy machine may stop a step for a tenth
DRY = ["--device", "cpu", "--tiny", "--eager", "--rounds", "1", "--steps", "2"]


def test_bytes_of_a_step_by_hand():
    """3 layers, D 64, F 96, V 131, 2 KV heads of 16; two rows, the middle step's positions."""
    layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96 + 2 * 64
    weights = 3 * layer + 64 + 131 * 64
    for dtype, size in (("bfloat16", 2), ("float32", 4)):
        answer = Contender(SHAPE, dtype=dtype, batch=2, cache=64).decode(steps=4, filled=20)
        assert answer["bytes"] == size * (weights + 2 * (20 + 2) * 2 * 3 * 32)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_sleep_shows_in_its_phase_alone(monkeypatch, phase):
    """Ten tokens of prompt are one call of T = 10, each decode step one of T = 1. The consumer's time is nobody's."""
    contender, timing, is_prefill = Contender(SHAPE, dtype="float32", cache=64), Timing(), phase == "prefill"
    contender.prefill(length=10)  # first calls are slower by themselves
    hidden = Transformer.hidden

    def slow(model, tokens, *others):
        if (tokens.size(1) > 1) == is_prefill:
            time.sleep(PAUSE)
        return hidden(model, tokens, *others)

    monkeypatch.setattr(Transformer, "hidden", slow)
    options = {"sampling": Sampling(0), "max_new_tokens": 5, "timing": timing}
    for _ in generate(contender.model, [[7] * 10], **options):
        time.sleep(PAUSE)
    assert (timing.prefill_s > PAUSE, timing.decode_s > 4 * PAUSE) == (is_prefill, not is_prefill)
    assert timing.prefill_s + timing.decode_s < 5 * PAUSE


def test_results_merge_by_id(tmp_path):
    """A row that is measured again is replaced; the others keep the machine and the day that measured them."""
    file = tmp_path / "cpu.json"
    old = {"hardware": "elsewhere", "date": "2020-01-01", "rows": [{"id": "a", "value": 1.0}, {"id": "b", "value": 2}]}
    file.write_text(json.dumps(old))
    write_results(file, [row("b", [3.0, 1.0, 2.0], "s"), row("c", [1 / 3], "ratio")], "command")
    result = json.loads(file.read_text())
    assert result.keys() == {"commit", "date", "hardware", "torch", "command", "rows"}
    a, b, c = result["rows"]
    assert (a["hardware"], a["date"], a["value"]) == ("elsewhere", "2020-01-01", 1.0)
    assert (b["value"], b["min"], b["max"], c["value"]) == (2.0, 1.0, 3.0, 0.3333)
    assert b["hardware"] == result["hardware"] != "elsewhere"


def test_the_tables_of_the_readmes_say_what_the_files_say():
    """Figures are measured anew and texts forgotten: the same command that draws the pictures fills the tables."""
    rows = [r for file in (ROOT / "benchmarks").glob("*.json") for r in json.loads(file.read_text()).get("rows", ())]
    for file in (ROOT / "README.md", ROOT / "benchmarks" / "README.md"):
        text = file.read_text()
        assert "<!-- table " in text and fill(text, rows) == text, f"python -m benchmarks.bench --plot changes {file}"


def test_the_gpu_s_benchmark_on_a_cpu(tmp_path):
    """The ids that others read are written, steps are compared with float32, and a wrong product is called wrong."""
    file = tmp_path / "h200.json"
    arguments = ["decode", "speculation", "--formats", "bf16,int8", *DRY, "--write", str(file)]
    bench_gpu.run(bench_gpu.parse_args(arguments))
    rows = {row["id"]: row for row in json.loads(file.read_text())["rows"]}
    for format in ("bf16", "int8"):
        for what in ("of_read_bandwidth", "tok_s", "vs_bf16", "verify6_over_1", "correct"):
            assert rows[f"8b.{format}.{what}"]["value"] > 0, (format, what, rows)
    assert rows["spec.8b_int4_1b_int4.alpha80.correct"]["value"] == 1
    subject = bench_gpu.Subject(bench_gpu.parse_args(DRY), "8b", "bf16")
    wrong = bench_gpu.Variant("wrong", product=lambda linear, x: bench_gpu.by_rows(linear, x).flip(-1))
    with pytest.raises(ValueError, match="wrong: logits are off by"):
        bench_gpu.Contender(subject, wrong)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("format", ["bf16", "int8", "int4-g32", "fp8", "mxfp6"])
def test_compiled_steps_on_a_gpu(format):
    """The decoder's own step, and other products, at a tiny shape: wrong ones raise."""
    args = bench_gpu.parse_args(["--tiny", "--rounds", "1", "--steps", "4"])
    subject = bench_gpu.Subject(args, "8b", format)
    fit = [v for v in bench_gpu.VARIANTS if v.name in ("words", "rows", "library") and format.startswith(v.formats)]
    for variant in (bench_gpu.PLAIN, *fit):
        assert min(bench_gpu.Contender(subject, variant).run(4)) > 0
