"""scripts/bench.py: bytes by hand, time in the phase where it was spent, results that merge."""

import json
import time

import pytest
import torch
from conftest import BASE, FAMILIES

from generate import Timing, generate
from model import Transformer
from sampling import Sampling
from scripts.bench import Contender, PeakAnonymous, Worker, interleave, ours, row, write_results

SHAPE = {**BASE, **FAMILIES["llama-3"]}
PAUSE = 0.05


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
