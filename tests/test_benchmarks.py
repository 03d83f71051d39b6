"""What measures: bytes by hand, time in the phase where it was spent, results that merge and that
the READMEs show."""

import argparse
import contextlib
import fcntl
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import BASE, FAMILIES, ROOT, generate

from benchmarks import (
    background,
    bench,
    bench_gpu,
    context,
    evaluation,
    generated,
    gpu_programs,
    gpu_step,
    levels,
    memory,
    peers,
    real,
)
from benchmarks.bench import compare_decode
from benchmarks.hybrid import DraftComparison, hybrid_rows
from benchmarks.pipes import Worker, WorkerFailed
from benchmarks.record import publish, row, write_results
from benchmarks.shapes import TINY, TINYLLAMA
from benchmarks.tables import PAGES, TABLES, fill
from benchmarks.workers import Contender, interleave, quickdraft, race, race_rows
from decoding.costs import Costs
from decoding.engine import Engine
from decoding.sampling import Sampling
from decoding.statistics import Timing
from drafts.base import ModelDraft
from drafts.ngram import NgramDraft
from drafts.suffix import SuffixDraft
from loading.checkpoint import load_model
from loading.tokenizer import load_tokenizer
from model import Transformer

DEMO = ROOT / "checkpoints" / "demo"
SHAPE = {**BASE, **FAMILIES["llama-3"]}
PAUSE = 0.25  # seconds; a busy machine may stop a step for a tenth
DRY = ["--device", "cpu", "--tiny", "--rounds", "1", "--steps", "2"]


def test_bytes_of_a_step_by_hand():
    """3 layers, D 64, F 96, V 131, 2 KV heads of 16; two rows, the middle step's positions."""
    layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96 + 2 * 64
    weights = 3 * layer + 64 + 131 * 64
    for dtype, size in (("bfloat16", 2), ("float32", 4)):
        answer = Contender(SHAPE, dtype=dtype, batch=2, cache=64).decode(steps=4, filled=20)
        assert answer["bytes"] == size * (weights + 2 * (20 + 2) * 2 * 3 * 32)


@pytest.mark.attack
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_sleep_shows_in_its_phase_alone(monkeypatch, phase):
    """Ten tokens of prompt are one call of T = 10, each decode step one of T = 1. The consumer's
    time is nobody's."""
    contender, timing, is_prefill = (
        Contender(SHAPE, dtype="float32", cache=64),
        Timing(),
        phase == "prefill",
    )
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
    """A row that is measured again is replaced; the others keep the machine and the day that
    measured them."""
    file = tmp_path / "cpu.json"
    old = {
        "hardware": "elsewhere",
        "date": "2020-01-01",
        "rows": [{"id": "a", "value": 1.0}, {"id": "b", "value": 2}],
    }
    file.write_text(json.dumps(old))
    write_results(file, [row("b", [3.0, 1.0, 2.0], "s"), row("c", [1 / 3], "ratio")], "command")
    result = json.loads(file.read_text())
    assert result.keys() == {"commit", "date", "hardware", "torch", "command", "rows"}
    a, b, c = result["rows"]
    assert (a["hardware"], a["date"], a["value"]) == ("elsewhere", "2020-01-01", 1.0)
    assert (b["value"], b["min"], b["max"], c["value"]) == (2.0, 1.0, 3.0, 0.3333)
    assert b["hardware"] == result["hardware"] != "elsewhere"


@pytest.mark.slow
def test_a_peer_that_fails_is_a_row_and_the_others_go_on(monkeypatch, tmp_path, capsys):
    """Its stderr is kept, and its line in a table says so. A worker of ours that fails ends the
    run."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("benchmarks.workers.READ_BYTES", 2**16)
    args = SimpleNamespace(steps=2, rounds=1)
    ours = {"bf16": quickdraft(hf=TINYLLAMA | TINY)}
    broken = {"gptfast": Worker("benchmarks.peers", "gptfast", "{}", str(tmp_path / "nowhere"))}
    rows = {r["id"]: r for r in compare_decode(args, ours, broken, "bf16")}
    assert rows["1b.bf16.tok_s"]["value"] > 0
    failed = rows["1b.bf16.vs_gptfast"]
    assert failed["value"] is None and failed["note"].startswith("failed: ")
    (stderr,) = tmp_path.glob("*.stderr")
    assert "Traceback" in stderr.read_text() and str(stderr) in capsys.readouterr().err
    publish([failed], tmp_path / "rows.json")
    assert failed["note"] in capsys.readouterr().err
    text = fill("<!-- table rate_ratios -->\n<!-- end -->", [failed])
    assert "failed" in text and "–" in text
    with pytest.raises(WorkerFailed, match="all of its stderr is in"):
        interleave(
            {"gptfast": Worker("benchmarks.peers", "gptfast", "{}")}, 1, {"method": "decode"}
        )


ROW = {"id": "1b.bf16.vs_llamacpp", "value": 0.5}


def test_rows_of_a_level_say_which_program_was_held_and_how():
    """A build of llama.cpp with newer instructions gives no such row."""
    build = "llama.cpp without its extra buffers; llama-cpp-python 0.3.36: AVX AVX2 F16C FMA"
    rows = [ROW | {"note": build}, {"id": "a", "note": ""}]
    assert levels.labelled(rows, None) == rows
    compared, alone = levels.labelled(rows, "avx2")
    assert (compared["id"], alone["id"]) == ("avx2.1b.bf16.vs_llamacpp", "avx2.a")
    assert compared["value"] == 0.5 and compared["note"].startswith(f"{build}; quickdraft held by ")
    assert "ONEDNN_MAX_CPU_ISA=AVX2 " in compared["note"]
    assert compared["note"].endswith(", llama.cpp by its build")
    assert alone["note"].startswith("quickdraft held by ") and "llama" not in alone["note"]
    for newer in ("AVX512", "AVX512_BF16", "AVX_VNNI", "AMX_INT8"):
        with pytest.raises(ValueError, match=f"uses {newer}; give --llamacpp DIR"):
            levels.labelled([ROW | {"note": f"{build} {newer}"}], "avx2")


def test_a_program_that_measures_restarts_once_at_its_level(monkeypatch, tmp_path):
    """What it is held to elsewhere does not stay; without flags nothing restarts."""
    restarts = []
    monkeypatch.setattr(os, "execve", lambda file, command, env: restarts.append(env))
    monkeypatch.setattr(levels, "cpu_flags", lambda: {"avx2"})
    monkeypatch.setenv("FBGEMM_ENABLE_INSTRUCTIONS", "AVX512_E1")
    args = real.options(["--level", "avx2", "--llamacpp", str(tmp_path)])
    levels.hold(real.options([]))
    assert not restarts
    levels.hold(args)
    (env,) = restarts
    assert env["LLAMA_CPP_LIB_PATH"] == str(tmp_path) and env["PATH"] == os.environ["PATH"]
    assert levels.LEVELS["AVX2/avx2"].environment.items() <= env.items()
    assert env["FBGEMM_ENABLE_INSTRUCTIONS"] == "AVX2"
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    levels.hold(args)
    assert len(restarts) == 1
    monkeypatch.setattr(levels, "cpu_flags", lambda: {"sse4_2"})
    with pytest.raises(ValueError, match="--level avx2: this processor lacks avx2"):
        levels.hold(args)


HELD = """
import torch
print(torch.backends.cpu.get_cpu_capability(), torch.ops.mkldnn._is_mkldnn_bf16_supported())
"""


@pytest.mark.slow
@pytest.mark.skipif("avx2" not in levels.cpu_flags(), reason="needs AVX2")
def test_torch_is_held_to_a_level():
    command = [sys.executable, "-c", HELD]
    env = levels.environment_of("AVX2/avx2")
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["AVX2", "False"]


@pytest.mark.parametrize(
    "only, names",
    [(None, ["int8", "int8.compiled", "llamacpp"]), (["compiled"], ["int8.compiled"])],
)
def test_programs_of_a_comparison_are_chosen_by_name(only, names):
    workers = dict.fromkeys(("int8", "int8.compiled", "llamacpp"))
    assert list(bench.chosen(workers, only, "int8")) == names


def test_rounds_of_the_same_work_that_differ_much_are_called_unsteady():
    assert row("a", [10.0, 14.0], "tok/s", "note", same_work=True)["note"] == "note"
    assert row("a", [10.0, 19.0], "tok/s", same_work=True)["note"] == "unsteady, max / min 1.9"
    assert row("a", [10.0, 19.0], "tokens", "note")["note"] == "note"


@pytest.mark.slow
def test_races_without_a_draft_have_no_prediction():
    """The report of a run that drafted nothing predicts 1 and has no costs."""
    model = load_model(ROOT / "checkpoints" / "demo")
    engine = Engine(model, 1, 32, drafter=NgramDraft(), speculate_k=5)
    engine.calibrate(Sampling(0), 8, rounds=1)
    undrafted = race(engine, [1000], 5, sampling=Sampling(0), max_new_tokens=2)
    assert {r["id"] for r in race_rows("x", [undrafted], "")} == {"x.speedup", "x.tokens_per_round"}
    drafted = race(engine, [7, 8, 9] * 5, 5, sampling=Sampling(0), max_new_tokens=9)
    rows = {r["id"]: r["value"] for r in race_rows("x", [undrafted, drafted], "")}
    assert (
        rows["x.c"] == pytest.approx(drafted["report"]["c"], rel=1e-3)
        and "x.measured_over_predicted" in rows
    )


@pytest.mark.house
def test_the_tables_of_the_pages_say_what_the_files_say():
    """Figures are measured anew and texts forgotten: the same command that draws the pictures fills
    the tables."""
    rows = [
        r
        for file in (ROOT / "benchmarks").glob("*.json")
        for r in json.loads(file.read_text()).get("rows", ())
    ]
    texts = {page: (ROOT / page).read_text() for page in PAGES}
    for page, text in texts.items():
        assert fill(text, rows) == text, f"python -m benchmarks.bench --plot changes {page}"
    assert set(re.findall(r"<!-- table (\w+) -->", "".join(texts.values()))) == TABLES.keys()


@pytest.mark.slow
def test_the_price_of_identical_text_is_measured(monkeypatch):
    """At a tiny shape. The step without exactness changes the products' attributes, which may have
    been renamed."""
    monkeypatch.setattr(context, "TINYLLAMA", TINYLLAMA | TINY)
    monkeypatch.setattr(context, "LENGTHS", (20, 1000))
    rows = context.measure_identical(types.SimpleNamespace(rounds=1, steps=1))
    names = [
        f"1b.{format}{length}"
        for format in ("bf16", "int8", "int4-g32")
        for length in ("", ".ctx1k")
    ]
    assert [r["id"] for r in rows] == [f"{name}.identical_price" for name in names]


@pytest.mark.long
def test_the_8b_shape_at_a_tiny_one(monkeypatch):
    shape = {**bench.config_json("llama-3.1-8b"), **TINY}
    for module in (bench, memory):
        monkeypatch.setattr(module, "config_json", lambda name: shape)
    # the rows are the subject, and compiling takes most of the time
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    args = types.SimpleNamespace(rounds=1, steps=2, peers=False)
    rows = {
        row["id"]: row["value"] for row in memory.measure_8b_load(args) + bench.measure_8b(args)
    }
    assert {"8b.int8.of_read_bandwidth", "8b.int4-g32.of_read_bandwidth"} <= set(rows)
    peaks = [rows[f"8b.load.{format}.peak_over_weights"] for format in ("int8", "int4-g32")]
    assert rows["8b.load.peak_over_weights"] == max(peaks) > 0


@pytest.mark.long
def test_the_gpu_s_benchmark_on_a_cpu(tmp_path, monkeypatch):
    """The ids that others read are written, each line before the run ends, on a machine without
    git; and few files come back. A program that cannot start is a row, and the others go on."""
    monkeypatch.setenv("PATH", str(tmp_path))
    arguments = ["--formats", "bf16,int8", *DRY, "--output", str(tmp_path / "out")]
    bench_gpu.run(bench_gpu.parse_args([*arguments, "--gptfast", str(tmp_path)]))
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "rows.jsonl",
        "results.json",
        "log.txt",
    }
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["commit"] == "unknown"
    rows = {row["id"]: row for row in results["rows"]}
    for format in ("1layers.bf16", "1layers.int8", "bf16", "int8"):
        for what in ("of_read_bandwidth", "tok_s", "vs_bf16", "verify6_over_1", "correct"):
            assert rows[f"8b.{format}.{what}"]["value"] > 0, (format, what, rows)
    for way in ("eager", "drafted", "int8", "compiled"):
        assert rows[f"tokens.{way}.correct"]["value"] == 1, rows[f"tokens.{way}.correct"]
    assert rows["8b.1layers.int8.triton.native_matmul.rows6.gain"]["value"] > 0
    assert rows["8b.1layers.bf16.filled200.correct"]["value"] == 1
    assert rows["spec.8b_int4_1b_int4.alpha80.correct"]["value"] == 1
    assert rows["8b.gptfast.int8.correct"]["value"] == 0
    lines = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").open()]
    assert lines[-1]["event"] == "end" and lines == sorted(lines, key=lambda line: line["s"])
    assert {line["id"] for line in lines if line["event"] == "row"} == {*rows}


@pytest.mark.slow
def test_wrong_logits_are_an_error():
    arguments = bench_gpu.parse_args([*DRY, "--output", "unused"])
    subject = gpu_step.Subject(arguments, "8b", "bf16")
    assert gpu_step.Contender(subject).error <= gpu_step.allowed_error(1)
    subject.model.layers[0].ffn.down.weight.mul_(-1)  # after float32 has said what is right
    with pytest.raises(ValueError, match="wrong: logits are off by"):
        gpu_step.Contender(subject)


def test_a_gpu_is_one_process_s_at_a_time(tmp_path, monkeypatch):
    """Another process cannot take the lock inside, this one can."""
    monkeypatch.setenv(gpu_programs.LOCK, str(tmp_path / "lock"))

    def lock() -> None:
        with (tmp_path / "lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    with gpu_programs.alone(), gpu_programs.alone(), pytest.raises(BlockingIOError):
        lock()
    lock()


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--device", "cpu"], "CUDA device"),
        (["foo", *DRY], "stage foo"),
        (DRY, "--output DIR"),
    ],
)
def test_the_gpu_s_benchmark_refuses_in_one_line(monkeypatch, capsys, arguments, words):
    """No CUDA device: nothing of a real shape is begun on a CPU."""
    monkeypatch.setattr(sys, "argv", ["bench_gpu", *arguments])
    with pytest.raises(SystemExit) as exit:
        bench_gpu.main()
    error = capsys.readouterr().err
    assert (
        exit.value.code == 2
        and words in error
        and error.startswith("error: ")
        and error.count("\n") == 1
    )


@pytest.mark.skipif(torch.version.cuda is not None, reason="needs a CPU build of torch")
def test_generated_code_needs_a_cuda_build_of_torch(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["generated", "bf16"])
    with pytest.raises(SystemExit) as exit:
        generated.main()
    error = capsys.readouterr().err
    assert exit.value.code == 2 and error.startswith("error: emulating a GPU needs a CUDA build")
    assert error.count("\n") == 1


class Scripted:
    """A worker whose rates are known: `first`, which is not counted, then these; and once more."""

    def __init__(self, rates: list[float], first: float = 1e9, **answer):
        self.rates, self.answer, self.requests, self.closed = [first, *rates], answer, [], False

    def call(self, **request) -> dict:
        self.requests.append(request)
        rate = self.rates[(len(self.requests) - 1) % len(self.rates)]
        return {"decode_tok_s": rate, "tokens": [1, 2], **self.answer}

    def close(self) -> None:
        self.closed = True


def report(**others) -> dict:
    found = {
        "k": 5,
        "alpha": 0.5,
        "tokens_per_round": 2.0,
        "c": 0.1,
        "v": 1.5,
        "predicted_speedup": 1.25,
    }
    return found | {"accepted_by_position": [3, 1], "reached_by_position": [4, 3, 0]} | others


@pytest.fixture
def workers(monkeypatch):
    """Ours by its flags, llama.cpp's by its drafted tokens, generate.py's runs by number. No
    process is started."""
    drafted = {"speculative": report()}
    found = {
        "--no-compile": Scripted([1.0, 2.0, 3.0]),
        "--compile": Scripted([2.0, 4.0, 9.0]),
        "ngram": Scripted([4.0, 4.0, 27.0], **drafted),
        "demo-draft": Scripted([1.0, 2.0, 4.5], **drafted),
        0: Scripted([4.0, 4.0, 4.0], settings="as it was built"),
        2: Scripted([4.0, 4.0, 4.0]),
        5: Scripted([6.0, 8.0, 4.0]),
        10: Scripted([1.0, 1.0, 1.0]),
        "program": Scripted([8.0, 2.0, 8.0, 4.0, 10.0, 6.0]),  # quiet, busy, quiet, …
    }
    named = {"ngram": "ngram", "suffix": "suffix", str(DEMO.with_name("demo-draft")): "demo-draft"}
    found["named"] = named
    monkeypatch.setattr(
        real,
        "quickdraft",
        lambda file, flag, *more: found[named.get(more[1] if more else None, flag)],
    )
    monkeypatch.setattr(real, "llamacpp", lambda file, lookup=0, context=0: found[lookup])
    monkeypatch.setattr(real, "run_program", lambda args: found["program"].call())
    return found


def measured(tmp_path, monkeypatch, *flags: str) -> dict[str, dict]:
    """Rows that benchmarks.real writes for the demo, in three rounds."""
    file = tmp_path / "cpu.json"
    given = [
        *flags,
        "--rounds",
        "3",
        "--checkpoint",
        str(DEMO),
        "--bf16",
        str(DEMO),
        "--write",
        str(file),
    ]
    monkeypatch.setattr(sys, "argv", ["real", *given])
    real.run(real.options())
    assert str(DEMO) not in file.read_text()
    return {row["id"]: row for row in json.loads(file.read_text())["rows"]}


def test_a_real_model_s_rates_are_compared_within_rounds(workers, tmp_path, monkeypatch):
    rows = measured(tmp_path, monkeypatch, "rates")
    assert {
        id.removeprefix("smollm2."): (r["min"], r["value"], r["max"]) for id, r in rows.items()
    } == {
        "q4_1.compiled.tok_s": (2, 4, 9),
        "q4_1.eager.tok_s": (1, 2, 3),
        "q4_1.llamacpp.tok_s": (4, 4, 4),
        "q4_1.vs_llamacpp": (0.5, 1, 2.25),
        "q4_1.eager.vs_llamacpp": (0.25, 0.5, 0.75),
        "bf16.compiled.tok_s": (2, 4, 9),
        "bf16.llamacpp.tok_s": (4, 4, 4),
        "bf16.vs_llamacpp": (0.5, 1, 2.25),
    }


def test_prompts_are_compared_by_their_seconds_and_never_begin_alike(
    workers, tmp_path, monkeypatch
):
    """The faster of eager and compiled is compared with llama.cpp, float32 with eager."""
    monkeypatch.setattr(real, "load_tokenizer", lambda file: Encoder())
    monkeypatch.setattr(
        real, "file_of_type", lambda source, type_name: contextlib.nullcontext(Path(type_name))
    )
    seconds = {"--no-compile": 3.0, "--compile": 2.0, "float32": 6.0, 0: 1.0}
    timed = {name: Timed(value) for name, value in seconds.items()}
    monkeypatch.setattr(
        real,
        "quickdraft",
        lambda file, flag, *more: timed["float32" if "float32" in more else flag],
    )
    monkeypatch.setattr(real, "llamacpp", lambda file, context: timed[0])
    rows = measured(tmp_path, monkeypatch, "prompts")
    for id in ("q4_1.prompt100", "q4_1.prompt1000", "q8_0.prompt512", "q8_0.prompt1000"):
        assert rows[f"smollm2.{id}.vs_llamacpp"]["value"] == 0.5
        assert rows[f"smollm2.{id}.float32_over_bf16"]["value"] == 2
        assert rows[f"smollm2.{id}.compiled.ttft_s"]["value"] == 2
    prompts = timed["--compile"].prompts
    assert {len(prompt) for prompt in prompts} == {100, 512, 1000}
    by_file = [prompts[i : i + 4] for i in range(0, 24, 4)]  # an uncounted one and three rounds
    assert all(len({prompt[0] for prompt in four}) == 4 for four in by_file)


def test_the_cost_of_verification_between_two_lengths_is_compared_with_what_was_measured(
    monkeypatch,
):
    """At 4,000 tokens a step takes 0.2 s by the ends and a pass over six rows 0.3; 0.25 and 0.3
    were measured, so auto's v of 1.5 is 1.25 of 1.2."""
    first, last = context.LENGTHS[0], context.LENGTHS[-1]
    share = (4000 - first) / (last - first)
    ends = {first: (0.2 - 0.1 * share, 0.3 - 0.2 * share)}
    ends[last] = (ends[first][0] + 0.1, ends[first][1] + 0.2)
    by_length = {**ends, 1000: (0.2, 0.3), 4000: (0.25, 0.3)}
    seconds = {
        (cache, filled): ([decode_s] * 3, [verify_s] * 3)
        for cache in context.CACHE_NAMES
        for filled, (decode_s, verify_s) in by_length.items()
    }
    monkeypatch.setattr(context, "TINYLLAMA", TINYLLAMA | TINY)
    model = context.long_model("bf16", 100)
    rows = {row["id"]: row for row in context.context_rows(model, seconds, "1b", 4000)}
    row = rows["1b.bf16.ctx4k.predicted_v_over_measured"]
    assert row["value"] == pytest.approx(1.25)
    at_the_end = context.context_rows(model, seconds, "1b", last)
    assert not any("predicted_v" in row["id"] for row in at_the_end)


class Encoder:
    def encode(self, text: str) -> list[int]:
        return list(range(40))


class Timed:
    """A worker whose first token takes the same number of seconds each time."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.prompts = []

    def call(self, method: str, ids: list[int], new: int) -> dict:
        self.prompts.append(ids)
        return {"ttft_s": self.seconds, "settings": "as it was built"}

    def close(self) -> None:
        pass


def test_a_busy_neighbour_s_price_is_a_ratio_within_rounds(workers, tmp_path, monkeypatch):
    """Quiet and busy take turns, after one uncounted quiet run of each; the other process is gone
    afterwards."""
    started, popen = [], subprocess.Popen
    monkeypatch.setattr(
        subprocess,
        "Popen",
        lambda *args, **others: started.append(popen(*args, **others)) or started[-1],
    )
    workers[0].rates = [1e9, 4.0, 4.0, 4.0, 2.0, 4.0, 1.0]
    rows = measured(tmp_path, monkeypatch, "busy")
    row, other = (rows[f"smollm2.q4_1.{who}busy_over_quiet"] for who in ("", "llamacpp."))
    assert (row["min"], row["value"], row["max"]) == (
        0.25,
        0.5,
        0.6,
    ) and "llama.cpp's own is 0.5," in row["note"]
    assert (other["min"], other["value"], other["max"]) == (0.25, 0.5, 1)
    assert rows["smollm2.q4_1.quiet.tok_s"]["value"] == 8 and workers[0].closed
    loops = [process for process in started if "while True" in process.args[-1]]
    assert len(loops) == 3 and all(process.poll() is not None for process in loops)


def test_drafts_are_measured_against_plain_decoding(workers, tmp_path, monkeypatch):
    """A speed-up is that of a round; the best of llama.cpp's lookups is taken; what nobody drafted
    has no alpha."""
    rows = measured(tmp_path, monkeypatch, "spec", "--kinds", "ngram", "distilled")
    assert not any("distilled" in id for id in rows)  # no draft was given
    values = {
        id.removeprefix("smollm2.spec."): (r["min"], r["value"], r["max"]) for id, r in rows.items()
    }
    assert values == {
        "ngram.speedup": (1, 2, 3),
        "ngram.tok_s": (4, 4, 27),
        "ngram.alpha": (0.5, 0.5, 0.5),
        "ngram.tokens_per_round": (2, 2, 2),
        "ngram.llamacpp.speedup": (1, 1.5, 2),
        "ngram.predicted_speedup": (1.25, 1.25, 1.25),
    }
    note = rows["smollm2.spec.ngram.alpha"]["note"]
    assert note == (
        "--draft ngram; greedy, K = 5, c 0.1, v 1.5, predicted 1.25; accepted by position 0.75"
        " 0.33; 3 of 3 texts equal"
        " plain ones"
    )
    assert (
        "of 5 tokens, the best of (2, 5, 10)" in rows["smollm2.spec.ngram.llamacpp.speedup"]["note"]
    )
    requests = workers["ngram"].requests
    assert len(requests) == 4 and requests[0] == requests[1]
    assert len({tuple(request["ids"]) for request in requests}) == 3
    assert all(
        worker.closed
        for name, worker in workers.items()
        if name in ("--compile", "ngram", 0, 2, 5, 10)
    )

    for name in ("--compile", "demo-draft"):
        workers[name].requests.clear()
    workers["demo-draft"].answer["speculative"] = report(alpha=None, predicted_speedup=None)
    draft = str(DEMO.with_name("demo-draft"))
    rows = measured(tmp_path, monkeypatch, "spec", "--kinds", "distilled", "--distilled", draft)
    assert (
        rows["smollm2.spec.distilled.speedup"]["value"] == 0.5
        and "smollm2.spec.distilled.alpha" not in rows
    )
    assert rows["smollm2.spec.distilled.speedup"]["note"].startswith(
        "--draft_checkpoint DIR --speculate_k 5; greedy"
    )
    # the same at another temperature, where texts are not compared
    warm = rows["smollm2.spec.distilled.t1.speedup"]
    assert "temperature 1, K = 5" in warm["note"] and "texts" not in warm["note"]
    assert rows["smollm2.spec.ngram.speedup"]["value"] == 2  # stays


def test_the_best_draft_is_the_fastest_one(workers, tmp_path, monkeypatch):
    """Its ratio is over the BF16 file without a draft. Nothing is measured where no draft is
    given."""
    assert not any("vs_bf16_plain" in id for id in measured(tmp_path, monkeypatch, "best"))
    draft = str(DEMO.with_name("demo-draft"))
    rows = measured(tmp_path, monkeypatch, "best", "--distilled", draft, "--eagle3", draft)
    values = {
        kind: rows[f"smollm2.{kind}.vs_bf16_plain"]["value"]
        for kind in ("distilled", "eagle3", "best")
    }
    assert (
        values["best"] == max(values["distilled"], values["eagle3"])
        and values["distilled"] != values["eagle3"]
    )


def test_prompts_that_repeat_are_answered_once_by_all(workers, tmp_path, monkeypatch):
    """The uncounted request is another text: a suffix draft would know its answer."""
    for name in ("ngram", "suffix"):
        workers[name] = Scripted(
            [4.0, 8.0, 6.0], speculative=report(k="auto", drafted=8, accepted=4)
        )
    rows = measured(tmp_path, monkeypatch, "repeats")
    kinds = {id.split(".")[2] for id in rows}
    assert kinds == {"copy", "edit", "edit_again", "chat", "story", "quote"}
    assert rows["smollm2.repeats.copy.suffix_over_ngram"]["value"] == 1
    assert rows["smollm2.repeats.copy.suffix.speedup"]["max"] == 2, "4 over 2, 8 over 4, 6 over 9"
    remark = rows["smollm2.repeats.copy.suffix.speedup"]["note"]
    assert remark.startswith("--draft suffix; 24 proposed, 12 accepted; greedy, K = auto")
    sent = [tuple(request["ids"]) for request in workers["suffix"].requests]
    assert len(set(sent)) == len(sent) == 28 and workers["suffix"].closed


def test_every_draft_with_k_auto_answers_chats_and_stories_once(workers, tmp_path, monkeypatch):
    """Those without a folder, and those given, over one plain worker."""
    workers["--compile"] = Scripted([8.0], first=8.0)
    for name in ("ngram", "demo-draft"):
        answer = report(k="auto", drafted=8, accepted=4)
        workers[name] = Scripted([6.0], first=6.0, speculative=answer)
    for name, flags in real.AUTO.items():
        workers["named"][flags[1]] = name
        workers[name] = workers["ngram"]
    draft = str(DEMO.with_name("demo-draft"))
    rows = measured(tmp_path, monkeypatch, "auto", "--distilled", draft)
    speedups = {id: r["value"] for id, r in rows.items() if id.endswith(".speedup")}
    names = ("ngram", "suffix", "layers", "quantized", "distilled")
    assert speedups == {f"smollm2.auto.{name}.speedup": 0.75 for name in names}
    sent = [tuple(request["ids"]) for request in workers["demo-draft"].requests]
    assert len(set(sent)) == len(sent) == 1 + 12 + 3


def test_a_hybrid_is_compared_with_the_better_of_its_two():
    """The better one by the median, of each figure: here the model has the speed and the suffixes
    the tokens. An answer of one token has no speed."""

    def given(tok_s: float, tokens_per_round: float) -> list[dict]:
        answer = {"tok_s": tok_s, "tokens_by_costs": 2.0, "tokens_per_round": tokens_per_round}
        return [answer, {"tok_s": None, "tokens_by_costs": None, "tokens_per_round": 1.0}, answer]

    answers = {"suffix": given(4.0, 3.0), "model": given(5.0, 2.0), "hybrid": given(6.0, 2.7)}
    rows = {row["id"]: row for row in hybrid_rows("copy", answers, "a note")}
    speed = rows["smollm2.hybrid.copy.vs_best"]
    assert speed["value"] == 1.2 and speed["note"] == "over model, the better of its two; a note"
    length = rows["smollm2.hybrid.copy.tokens_vs_best"]
    assert length["value"] == 0.9 and length["note"].startswith("over suffix, ")
    assert rows["smollm2.hybrid.copy.by_costs_vs_best"]["value"] == 1
    assert rows["smollm2.hybrid.copy.model.tok_s"]["value"] == 5


@pytest.mark.slow
def test_the_engines_of_a_comparison_share_costs_and_write_the_plain_text(monkeypatch):
    """Where every step costs as much as a plain one, tokens by costs are tokens a step."""
    costs = Costs(0.5, dict.fromkeys((1, 2, 3, 5, 8, 16), 0.0), dict.fromkeys((1, 2, 16), 0.5))
    monkeypatch.setattr(SuffixDraft, "auto_k", (1, 2, 16))
    monkeypatch.setattr(ModelDraft, "auto_k", (1, 2))
    monkeypatch.setattr(Engine, "calibrate", lambda engine, sampling: costs)
    model, tokenizer = load_model(DEMO), load_tokenizer(DEMO)
    comparison = DraftComparison(model, tokenizer, DEMO.with_name("demo-draft"), 128, compile=False)
    assert comparison.engines["suffix"].planner.costs.draft_s == {1: 0, 2: 0, 16: 0}
    assert comparison.engines["model"].planner.costs.verify_s == {1: 0.5, 2: 0.5}
    request = {"ids": tokenizer.encode("Once upon a time there was a dog. Once upon"), "new": 24}
    answers = comparison.answers([request])
    pairs = generate(model, [request["ids"]], sampling=Sampling(0), max_new_tokens=24)
    want = [id for _, id in pairs]
    for name, (answer,) in answers.items():
        assert answer["ids"] == want
        steps = (len(want) - 1) / answer["tokens_by_costs"]
        assert steps == pytest.approx(round(steps)) and steps < 23, name
    shortest = {"ids": request["ids"], "new": 1}
    for answers in comparison.answers([shortest]).values():
        assert answers[0]["tok_s"] is None and answers[0]["tokens_per_round"] == 1

    comparison.answer = lambda name, request: {"ids": [name]}
    with pytest.raises(ValueError, match="greedy texts differ"):
        comparison.answers([request])


@pytest.mark.slow
def test_the_hybrid_is_measured_in_every_kind_of_text(tmp_path, monkeypatch):
    assert measured(tmp_path, monkeypatch, "hybrid") == {}, "no --hybrid, no rows"
    folder = str(DEMO.with_name("demo-draft"))
    request = {"ids": [5, 6, 7, 5, 6], "new": 6, "stop_ids": []}
    kinds = ("copy", "story")
    monkeypatch.setattr(real, "repeats", lambda *args: {kind: [request] for kind in kinds})
    rows = measured(tmp_path, monkeypatch, "hybrid", "--hybrid", folder, "--no-compile")
    for kind in kinds:
        ratio = rows[f"smollm2.hybrid.{kind}.vs_best"]
        assert 0 < ratio["min"] <= ratio["value"] <= ratio["max"]
        assert ratio["note"].endswith("K = auto, greedy, eager") and folder not in ratio["note"]


def test_workers_start_one_after_the_other():
    """With their first request: two that load and calibrate at once would disturb each other."""
    log = "import json, sys, time; sys.stdin.readline(); print(json.dumps(time.monotonic()))"
    first, second = Worker("timeit", "-n1", "-r1", log), Worker("timeit", "-n1", "-r1", log)
    assert first.process is None and second.process is None
    first.send(method="time")
    assert first.process is not None and second.process is None
    assert first.receive() > 0
    first.close(), second.close()


def evaluated(monkeypatch, capsys, *flags: str) -> dict:
    monkeypatch.setattr(sys, "argv", ["benchmarks.evaluation", *flags])
    evaluation.main()
    return {row["id"]: row for row in json.loads(capsys.readouterr().out.splitlines()[-1])}


def test_both_sides_of_the_harness_are_compared_round_by_round(monkeypatch, capsys):
    """With scripted rates: ratios are taken within a round, the first answers do not count, all
    workers are closed."""

    class Side(Scripted):
        def call(self, method, task):
            rate = super().call(method=method, task=task)["decode_tok_s"]
            return {
                "rate": rate,
                "metric": 0.5,
                "texts": [rate, "same"] if task == "answer" else None,
            }

    rates = {
        "quickdraft": [2.0, 6.0, 9.0],
        "transformers": [1.0, 2.0, 3.0],
        "drafted": [4.0, 8.0, 3.0],
    }
    sides = {program: Side(values, first=len(program)) for program, values in rates.items()}
    monkeypatch.setattr(
        evaluation, "Worker", lambda module, flag, program, *args, env: sides[program]
    )
    rows = evaluated(monkeypatch, capsys, "--rounds", "3", "--draft", "suffix")
    for task in ("choose", "answer"):
        ratios = (
            rows[f"demo.eval.{task}.vs_transformers"],
            rows[f"demo.eval.{task}.drafted.vs_transformers"],
        )
        assert [(row["min"], row["value"], row["max"]) for row in ratios] == [(2, 3, 3), (1, 4, 4)]
        assert rows[f"demo.eval.{task}.quickdraft.documents_s"]["value"] == 6
        assert ratios[0]["note"].endswith("1 texts equal") == (task == "answer")
    assert all(side.closed for side in sides.values())


@pytest.mark.long
def test_both_sides_of_the_harness_answer_alike(monkeypatch, capsys):
    """The demo in float32, drafted too: scores are equal, and so are texts."""
    pytest.importorskip("lm_eval")
    flags = [
        "--documents",
        "4",
        "--new",
        "8",
        "--rounds",
        "1",
        "--batch_size",
        "2",
        "--dtype",
        "float32",
    ]
    rows = evaluated(monkeypatch, capsys, *flags, "--draft", "suffix")
    for task, ending in (("choose", ""), ("answer", "; 4 texts equal")):
        note = rows[f"demo.eval.{task}.vs_transformers"]["note"]
        scores = re.search(
            r"scores: quickdraft (\S+), transformers (\S+), drafted ([^\s;]+)", note
        ).groups()
        assert len(set(scores)) == 1 and note.endswith(ending), note


@pytest.mark.long
@pytest.mark.skipif(
    torch.__version__ < torch.torch_version.TorchVersion("2.12"), reason="later traces would crash"
)
def test_a_thread_that_compiles_beside_decoding(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    result = background.measure(
        argparse.Namespace(checkpoint=ROOT / "checkpoints" / "demo", texts=2)
    )
    assert result["equal_texts"] in ("0 of 2", "1 of 2", "2 of 2")
    assert (
        result["seconds"] > 0
        and result["beside"]["longest_ms"] >= result["beside"]["median_ms"] > 0
    )
    assert background.summary([0.01, 0.02, 0.06]) == {
        "tok_s": 33.3,
        "median_ms": 20.0,
        "longest_ms": 60,
        "over_50_ms": 1,
    }


@pytest.mark.slow
def test_a_start_ends_with_the_first_byte(tmp_path, monkeypatch):
    """Of a program that prints, waits and would print more. One that prints nothing is an error."""
    code = "import time; time.sleep(0.3); print('a', flush=True); time.sleep(60)"
    monkeypatch.setattr(real, "program_command", lambda args: [sys.executable, "-c", code])
    rows = measured(tmp_path, monkeypatch, "start")
    assert 0.3 < rows["smollm2.compiled.warm_start_s"]["value"] < 30
    monkeypatch.setattr(
        real, "program_command", lambda args: [sys.executable, "-c", "raise SystemExit(1)"]
    )
    with pytest.raises(ValueError, match="before its first token"):
        measured(tmp_path, monkeypatch, "start")


@pytest.mark.attack
def test_requests_from_a_pipe_are_answered_as_the_program_answers():
    """In a process of its own: the ids that `generate` decides, with stop ids or without, drafted
    too."""
    model, tokenizer = load_model(DEMO, dtype=torch.float32), load_tokenizer(DEMO)
    ids = tokenizer.encode("Once upon a time")
    (*_, stop) = wanted = [
        id for _, id in generate(model, [ids], sampling=Sampling(0), max_new_tokens=12)
    ]
    worker = real.quickdraft(
        DEMO, "--no-compile", "--dtype", "float32", "--draft", "ngram", "--device", "cpu"
    )
    try:
        whole = worker.call(method="generate", ids=ids, new=12)
        short = worker.call(method="generate", ids=ids, new=12, stop_ids=[wanted[5], stop])
    finally:
        worker.close()
    assert whole["tokens"] == wanted and short["tokens"] == wanted[: wanted.index(wanted[5]) + 1]
    assert whole["decode_tok_s"] > 0 and whole["speculative"]["rounds"] > 0


@pytest.mark.attack
@pytest.mark.parametrize("survives", [True, False])
def test_llama_cpp_s_buffers_are_tried_in_another_process(monkeypatch, survives):
    """Without the package: its parameters are changed where both of its modules look them up, and
    its own rate is that of the tokens after the first one."""

    class Llama:
        def __init__(self, file, **options):
            self.extra = fake.llama_cpp.llama_model_default_params().use_extra_bufts
            # of a step: without it is faster
            self.pause = 0.005 if options["flash_attn"] else 0.001

        def eval(self, ids):
            time.sleep(self.pause * len(ids))

        def close(self):
            del self.extra

        def reset(self):
            self.at = 0

        def generate(self, ids, temp):
            assert temp == 0
            time.sleep(PAUSE)  # the prompt
            for token in range(100):
                yield token
                time.sleep(0.01)

    fake = types.SimpleNamespace(
        Llama=Llama,
        llama_model_default_params=lambda: types.SimpleNamespace(use_extra_bufts=None),
        llama_print_system_info=lambda: b"CPU : AVX2 = 1 | AVX512 = 0 | FMA = 1 |",
        __version__="1.2",
    )
    fake.llama_cpp = types.SimpleNamespace(
        llama_model_default_params=fake.llama_model_default_params
    )
    monkeypatch.setitem(sys.modules, "llama_cpp", fake)
    probes = []
    ended = types.SimpleNamespace(returncode=0 if survives else -11)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: probes.append(command) or ended)
    peer = peers.LlamaCppFile("m.gguf")
    assert peer.llm.extra is survives and probes[0][2:] == [
        "benchmarks.peers",
        "llamacpp_probe",
        '"m.gguf"',
    ]
    found = peer.generate([1, 2], 5)
    assert found["tokens"] == [0, 1, 2, 3, 4] and found["ttft_s"] >= PAUSE and len(probes) == 1
    settings = (
        "its extra buffers, flash attention off, the faster one; llama-cpp-python 1.2: AVX2 FMA"
    )
    assert found["settings"] == f"llama.cpp {'with' if survives else 'without'} {settings}"
    assert 20 < found["decode_tok_s"] <= 100
    assert peer.generate([1, 2], 50, [2])["tokens"] == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("type_name", ["BF16", "Q8_0"])
def test_a_file_in_another_type_says_the_same(type_name, tmp_path):
    """All keys but the type, and all weights: exactly what the type makes of them, vectors
    untouched."""
    gguf = pytest.importorskip("gguf")
    from test_gguf import write

    file = write(
        tmp_path / "a.gguf",
        "llama-3.2",
        "Q4_1",
        keys=lambda writer: writer.add_array("x", [1.5, 2.5]),
    )
    other = tmp_path / "b.gguf"
    from benchmarks.gguf_files import write_as

    write_as(file, other, type_name)
    a, b = gguf.GGUFReader(file), gguf.GGUFReader(other)
    keys, others = (
        {name: (field.types, field.contents()) for name, field in x.fields.items()} for x in (a, b)
    )
    for name in ("GGUF.kv_count", "general.file_type"):  # of the file itself
        keys.pop(name, None), others.pop(name, None)
    assert keys == others and keys["llama.block_count"][1] == 3 and keys["x"][1] == [1.5, 2.5]
    for x, y in zip(a.tensors, b.tensors, strict=True):
        is_matrix = len(x.shape) > 1
        assert x.name == y.name and y.tensor_type.name == (type_name if is_matrix else "F32")
        expected, weights = (gguf.quants.dequantize(t.data, t.tensor_type) for t in (x, y))
        if is_matrix:
            codes = gguf.quants.quantize(expected, y.tensor_type)
            expected = gguf.quants.dequantize(codes, y.tensor_type)
        assert np.array_equal(weights, expected), x.name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("format", ["bf16", "int8", "int4-g32", "fp8", "mxfp6"])
def test_compiled_steps_on_a_gpu(format):
    """At a tiny shape: wrong logits raise."""
    args = bench_gpu.parse_args(["--tiny", "--steps", "4", "--output", "unused"])
    assert min(gpu_step.Contender(gpu_step.Subject(args, "8b", format)).run(4)) > 0
