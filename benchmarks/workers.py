"""This project's side of a comparison: models that decode inside a worker process, and the device's
read bandwidth.

    quickdraft      a worker process, by the parameters of Contender or of Pair
    Contender       random weights: seconds of a step, of a verification, of a prompt
    Pair            a target with a drafter
    race            one prompt decoded plainly and with rounds, in turn
    interleave      every worker in turn, with the read bandwidth of each round

`python -m benchmarks.workers SPEC` is such a worker: it answers lines of JSON. Decoding is greedy
unless the spec has a temperature.
"""

import contextlib
import json
import statistics
import sys
import time
from collections.abc import Collection

import torch

from benchmarks.pipes import ROOT, Worker, answer_lines, in_turn
from benchmarks.record import row
from benchmarks.shapes import SMALL, TINYLLAMA, K, counting_model, scheme_of
from cli.report import attended_bytes, position_bytes, speculative, weight_bytes
from decoding.engine import Engine
from decoding.planner import Step
from decoding.runner import Rows
from decoding.sampling import GREEDY, Sampling
from decoding.scheduler import Request
from decoding.statistics import Timing
from drafts.base import ModelDraft
from drafts.ngram import NgramDraft
from drafts.suffix import SuffixDraft
from loading.checkpoint import load_model
from loading.config import config_from_hf
from loading.models import random_model
from loading.tokenizer import load_tokenizer
from weights.walker import pack_model

READ_BYTES = 2**31
READ_NOTE = "faster of a sum and a dot product over 2 GiB of float32"


def quickdraft(**spec) -> Worker:
    """A process with a Contender, or with a Pair if the spec has "pair". `env` adds to its
    environment."""
    env = spec.pop("env", None)
    return Worker("benchmarks.workers", json.dumps(spec), env=env)


class Contender:
    """quickdraft with random weights; `format` holds for every matrix, the head's too, as in the
    other programs."""

    def __init__(
        self,
        hf: dict,
        format: str = "bf16",
        dtype: str = "bfloat16",
        compile: bool = False,
        batch: int = 1,
        cache: int = 1024,
        eager_prompts: bool = False,
    ):
        """`eager_prompts`: compile decode steps alone, as generate.py does on a CPU for short
        prompts."""
        options = {
            "dtype": getattr(torch, dtype),
            "quantize": scheme_of(format),
            "head_scheme": scheme_of(format),
        }
        self.model = pack_model(random_model(config_from_hf(hf), **options))
        compile_prompts = compile and not eager_prompts
        self.engine = Engine(
            self.model, batch, cache, compile=compile, compile_prompts=compile_prompts
        )
        self.compile_s = self.engine.warm_up(GREEDY) if compile else 0.0
        self.batch = batch
        self.verifying_engine: Engine | None = None

    def decode(self, steps: int, filled: int) -> dict:
        """Median seconds of a step, and its bytes. The first step attends to `filled` positions in
        every row, its own included."""
        seconds, kv_bytes = median_step(self.engine, filled, steps), position_bytes(self.model)
        num_bytes = weight_bytes(self.model) + self.batch * attended_bytes(
            kv_bytes, filled + steps // 2
        )
        return {"seconds": seconds, "bytes": num_bytes, "compile_s": self.compile_s}

    def verify(self, filled: int) -> dict:
        """Median seconds of verifying K drafted tokens, and of a plain step, in turn."""
        if self.verifying_engine is None:
            compile = self.engine.runner.compile
            options = {"compile": compile, "drafter": NgramDraft(), "speculate_k": K}
            self.verifying_engine = Engine(self.model, 1, self.engine.max_seq_length, **options)
            if compile:
                self.verifying_engine.warm_up(GREEDY)
        costs = self.verifying_engine.calibrate(Sampling(0), filled)
        return {"seconds": costs.verify_s[K], "plain": costs.decode_s}

    @torch.inference_mode()
    def prefill(self, length: int) -> dict:
        """Seconds of prompts of `length` tokens, up to the logits. No two rows' prompts begin
        alike."""
        timing, prompts = Timing(), [[7 + row] * length for row in range(self.batch)]
        self.engine.clear()
        list(self.engine.generate(prompts, sampling=Sampling(0), max_new_tokens=1, timing=timing))
        return {"seconds": timing.prefill_s}


def fill_slots(engine: Engine, filled: int, steps: int) -> Rows:
    """Occupy all slots: `filled` positions, which no pass has computed, and room for `steps` greedy
    steps behind."""
    for slot in range(engine.batch_size):
        engine.batch.fill(slot, Request(slot, [7] * filled, Sampling(0), steps + 1))
        engine.batch.activate(slot, filled)
    return engine.rows(0, engine.batch_size)


@torch.inference_mode()
def median_step(engine: Engine, filled: int, steps: int) -> float:
    """Median seconds of `steps` steps, the first with `filled` positions in every row."""
    seconds, rows = [], fill_slots(engine, filled, steps)
    for step in range(steps):
        start = time.perf_counter()
        engine.run(Step(rows, filled + step))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


class Pair:
    """A target with a drafter: plain decoding and speculation in turn, on one engine. `pair`:

    "counting"   1.1B and 0.1B, both in the scheme `quantize`; a drafted token is accepted with
                 probability alpha
    "count"      1.1B whose output never repeats, with `draft`: "ngram", or "suffix" without earlier
                 answers
    "cycle"      1.1B that repeats its prompt of 100 tokens, likewise
    "demo"       the target and draft in checkpoints/
    """

    def __init__(
        self,
        pair: str,
        temperature: float = 0.0,
        k: int | str = K,
        alpha: float = 0.8,
        compile: bool = False,
        quantize: str | None = None,
        draft: str = "ngram",
    ):
        self.sampling, self.k, self.tokenizer = Sampling(temperature), k, None
        if pair in ("counting", "count", "cycle"):
            period = 100 if pair == "cycle" else None
            self.model = pack_model(counting_model(TINYLLAMA, 0.0, period, quantize=quantize))
            if pair == "counting":
                drafter = ModelDraft(
                    pack_model(counting_model(SMALL, 1 - alpha, quantize=quantize))
                )
            else:  # plain decoding of the same prompt comes first, and a pool would know its answer
                drafter = NgramDraft() if draft == "ngram" else SuffixDraft(pool_tokens=0)
        else:
            folder = ROOT / "checkpoints"
            self.model, self.tokenizer = (
                pack_model(load_model(folder / "demo")),
                load_tokenizer(folder / "demo"),
            )
            drafter = ModelDraft(pack_model(load_model(folder / "demo-draft")))
        self.engine = Engine(self.model, 1, 400, compile=compile, drafter=drafter, speculate_k=k)
        if compile:
            self.engine.warm_up(self.sampling.path)

    def race(self, prompt: list[int] | str, new: int, seed: int = 0) -> dict:
        """As `race`, after measuring the costs at the middle of the text."""
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        self.engine.calibrate(
            self.sampling, min(len(ids) + new // 2, self.engine.max_seq_length - 1), rounds=5
        )
        return race(self.engine, ids, self.k, sampling=self.sampling, max_new_tokens=new, seed=seed)


def race(
    engine: Engine, prompt: list[int], k: int | str, decoding=contextlib.nullcontext, **options
) -> dict:
    """Seconds a token of decoding a prompt plainly and with K = k, the tokens of both, and the
    report of speculation. All tokens but the first are decoded inside decoding()."""
    seconds, texts = [], []
    for speculate_k in (0, k):
        engine.clear()
        engine.planner.speculate_k, timing = speculate_k, Timing()
        pairs = engine.generate([prompt], timing=timing, **options)
        ids = [next(pairs)[1]]
        with decoding():
            ids += [id for _, id in pairs]
        seconds.append(timing.decode_s / (len(timing.requests[0].tokens) - 1))
        texts.append(ids)
    return {
        "plain": seconds[0],
        "drafted": seconds[1],
        "texts": texts,
        "report": speculative(engine, timing),
    }


def race_rows(id: str, races: list[dict], note: str) -> list[dict]:
    """Rows of one drafter from its races: speed-up, tokens a round, acceptance, costs, and the
    speed-up over its prediction. Races in which nothing was drafted have no prediction."""
    speedups, reports = [r["plain"] / r["drafted"] for r in races], [r["report"] for r in races]
    rows = [row(f"{id}.speedup", speedups, "ratio", note)]
    rows.append(
        row(f"{id}.tokens_per_round", [r["tokens_per_round"] for r in reports], "tokens", note)
    )
    predicted = [
        (speedup, r) for speedup, r in zip(speedups, reports, strict=True) if r["c"] is not None
    ]
    if predicted:
        over_predicted = [speedup / r["predicted_speedup"] for speedup, r in predicted]
        rows.append(row(f"{id}.measured_over_predicted", over_predicted, "ratio", note))
        rows += [
            row(f"{id}.{key}", [r[key] for _, r in predicted], "ratio", note)
            for key in ("alpha", "c", "v")
        ]
    return rows


def read_bandwidth(buffer: torch.Tensor) -> float:
    """Bytes/s of reading a buffer far larger than the caches, by the faster of a sum and a dot
    product of its halves. The sum is slower by a fifth on an Intel Xeon, and faster by half on an
    AMD EPYC."""
    half, seconds = buffer.numel() // 2, []
    for read in (buffer.sum, lambda: torch.dot(buffer[:half], buffer[half:])):
        start = time.perf_counter()
        read()
        seconds.append(time.perf_counter() - start)
    return buffer.nbytes / min(seconds)


def interleave(
    workers: dict[str, Worker], rounds: int, *requests: dict, optional: Collection[str] = ()
) -> tuple[dict[str, list[dict]], list[float]]:
    """(name of a worker -> its answers, read bandwidth of each round in bytes/s), as `in_turn` runs
    them."""
    buffer = torch.ones(READ_BYTES // 4)

    def bandwidth() -> float:
        return max(read_bandwidth(buffer) for _ in range(2))

    return in_turn(workers, rounds, requests, bandwidth, optional)


def seconds_of(answers: list[dict]) -> list[float]:
    return [answer["seconds"] for answer in answers]


if __name__ == "__main__":
    spec = json.loads(sys.argv[1])
    answer_lines((Pair if "pair" in spec else Contender)(**spec))
