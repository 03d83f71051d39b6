"""This project's side of a comparison: models that decode inside a worker process, and the device's read bandwidth.

    quickdraft      a worker of this project; `Contender` and `Pair` have the keys of its spec
    Contender       random weights: seconds of a step, of a verification, of a prompt
    Pair            a target with a drafter: plain decoding and rounds in turn
    interleave      every worker in turn, with the read bandwidth of each round

Run as a program (`python -m benchmarks.workers SPEC`), it answers lines of JSON. All decoding is greedy unless a spec
has a temperature.
"""

import json
import statistics
import sys
import time

import torch

from benchmarks.pipes import ROOT, Worker, answer_lines, in_turn
from benchmarks.shapes import SMALL, TINYLLAMA, counting_model, scheme_of
from cli.report import attended_bytes, position_bytes, speculative, weight_bytes
from decoding.runner import Rows
from decoding.sampling import GREEDY, Sampling
from decoding.scheduler import Request
from drafts.ngram import NgramDraft
from generate import Engine, Timing, generate
from loading.checkpoint import load_model, random_model
from loading.config import config_from_hf
from loading.tokenizer import load_tokenizer
from speculative import ModelDraft
from weights.walker import pack_model

READ_BYTES = 2**31
READ_NOTE = "faster of a sum and a dot product over 2 GiB of float32"


def quickdraft(**spec) -> Worker:
    """Keys as in Contender, or in Pair if there is "pair"; `env` adds to the environment."""
    env = spec.pop("env", None)
    return Worker("benchmarks.workers", json.dumps(spec), env=env)


class Contender:
    """quickdraft with random weights; `format` holds for every matrix, the head's too, as in the other programs."""

    def __init__(
        self, hf: dict, format: str = "bf16", dtype: str = "bfloat16", compile: bool = False, batch: int = 1,
        cache: int = 1024,
    ):  # fmt: skip
        options = {"dtype": getattr(torch, dtype), "quantize": scheme_of(format), "head": scheme_of(format)}
        self.model = pack_model(random_model(config_from_hf(hf), **options))
        self.engine = Engine(self.model, batch, cache, compile=compile)
        self.compile_s = self.engine.warm_up(GREEDY) if compile else 0.0
        self.batch = batch
        self.verifying: Engine | None = None

    def decode(self, steps: int, filled: int) -> dict:
        """Median seconds of a step, and its bytes. The first step has `filled` positions in every row, its own one
        included."""
        seconds = median_step(self.engine, filled, steps)
        read = weight_bytes(self.model) + self.batch * attended_bytes(position_bytes(self.model), filled + steps // 2)
        return {"seconds": seconds, "bytes": read, "compile_s": self.compile_s}

    def verify(self, filled: int, k: int = 5) -> dict:
        """Median seconds of verifying k drafted tokens, and of a plain step, in turn."""
        if self.verifying is None:
            options = {"compile": self.engine.compile, "drafter": NgramDraft(), "speculate_k": k}
            self.verifying = Engine(self.model, 1, self.engine.max_seq_length, **options)
            if self.verifying.compile:
                self.verifying.warm_up(GREEDY)
        costs = self.verifying.calibrate(Sampling(0), filled)
        return {"seconds": costs.verify_s[k], "plain": costs.decode_s}

    @torch.inference_mode()
    def prefill(self, length: int) -> dict:
        """Seconds until the logits after `length` tokens are there. The rows' prompts have nothing in common."""
        timing, prompts = Timing(), [[7 + row] * length for row in range(self.batch)]
        self.engine.clear()
        list(generate(self.model, prompts, sampling=Sampling(0), max_new_tokens=1, engine=self.engine, timing=timing))
        return {"seconds": timing.prefill_s}


def fill_slots(engine: Engine, filled: int, steps: int) -> Rows:
    """All slots, each with room for `steps` greedy steps behind `filled` positions, which no pass has computed."""
    for slot in range(engine.batch_size):
        engine.state.fill(slot, Request(slot, [7] * filled, Sampling(0), steps + 1))
        engine.state.activate(slot, filled)
    return engine.rows(0, engine.batch_size)


@torch.inference_mode()
def median_step(engine: Engine, filled: int, steps: int) -> float:
    """Median seconds of `steps` steps, the first with `filled` positions in every row."""
    seconds, rows = [], fill_slots(engine, filled, steps)
    for step in range(steps):
        start = time.perf_counter()
        engine.run(rows, filled + step)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


class Pair:
    """A target with a drafter: plain decoding and speculation in turn, on one engine."""

    def __init__(
        self, pair: str, temperature: float = 0.0, k: int | str = 5, alpha: float = 0.8, compile: bool = False,
        positions: int = 400,
    ):  # fmt: skip
        """pair: 'counting' (1.1B and 0.1B, accepted with probability alpha), 'count' and 'cycle' (1.1B whose output
        never repeats, or copies its prompt, with prompt lookup), or 'demo' (the shipped pair)."""
        self.sampling, self.k, self.tokenizer = Sampling(temperature), k, None
        if pair in ("counting", "count", "cycle"):
            self.model = pack_model(counting_model(TINYLLAMA, 0.0, period=100 if pair == "cycle" else None))
            draft = pack_model(counting_model(SMALL, 1 - alpha)) if pair == "counting" else None
            drafter = NgramDraft() if draft is None else ModelDraft(draft)
        else:
            folder = ROOT / "checkpoints"
            self.model, self.tokenizer = pack_model(load_model(folder / "demo")), load_tokenizer(folder / "demo")
            drafter = ModelDraft(pack_model(load_model(folder / "demo-draft")))
        self.engine = Engine(self.model, 1, positions, compile=compile, drafter=drafter, speculate_k=k)
        if compile:
            self.engine.warm_up(self.sampling.kind)

    def race(self, prompt: list[int] | str, new: int, seed: int = 0) -> dict:
        """Seconds a token without and with the drafter, and the report of speculation."""
        if isinstance(prompt, str):
            prompt = self.tokenizer.encode(prompt)
        self.engine.calibrate(self.sampling, min(len(prompt) + new // 2, self.engine.max_seq_length - 1), rounds=5)
        seconds, options = [], {"sampling": self.sampling, "max_new_tokens": new, "seed": seed, "engine": self.engine}
        for k in (0, self.k):
            self.engine.clear()
            self.engine.speculate_k, timing = k, Timing()
            list(generate(self.model, [prompt], **options, timing=timing))
            seconds.append(timing.decode_s / (timing.decoded[0] - 1))
        return {"plain": seconds[0], "drafted": seconds[1], "report": speculative(self.engine, [timing])}


def read_bandwidth(buffer: torch.Tensor) -> float:
    """Bytes/s of reading a buffer that is far larger than the caches: the faster of a sum and a dot product of its
    halves. The sum is slower by a fifth on an Intel Xeon, and faster by half on an AMD EPYC."""
    half, seconds = buffer.numel() // 2, []
    for read in (buffer.sum, lambda: torch.dot(buffer[:half], buffer[half:])):
        start = time.perf_counter()
        read()
        seconds.append(time.perf_counter() - start)
    return buffer.nbytes / min(seconds)


def interleave(workers: dict[str, Worker], rounds: int, *requests: dict) -> tuple[dict[str, list[dict]], list[float]]:
    """As `in_turn`: (worker -> answers, read bandwidth of each round in bytes/s)."""
    buffer = torch.ones(READ_BYTES // 4)
    return in_turn(workers, rounds, requests, lambda: max(read_bandwidth(buffer) for _ in range(2)))


def seconds_of(answers: list[dict]) -> list[float]:
    return [answer["seconds"] for answer in answers]


if __name__ == "__main__":
    spec = json.loads(sys.argv[1])
    answer_lines((Pair if "pair" in spec else Contender)(**spec))
