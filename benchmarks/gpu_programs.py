"""The programs that bench_gpu measures: each is a process of its own, `python -m
benchmarks.gpu_programs SPEC`, that answers lines of JSON.

    Tokens          the demo's greedy tokens on the GPU in several ways, beside those of a CPU
    Bandwidth       bytes/s of reading
    Steps           this project's steps and verifications in a format
    Peer            another program's steps: gpt-fast's, or those of transformers
    Speculation     8B and 1B in int4, acceptance set by construction

A program is ready when it answers `facts`; until then it loads and compiles, next to all others.
`alone` gives the GPU to one of them at a time: to load, to tune a kernel, and to be measured.
"""

import argparse
import contextlib
import fcntl
import functools
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from unittest import mock

import torch

import weights.compiling as compiling
from benchmarks import gpu_step, peers
from benchmarks.gpu_step import Contender, Subject, forbid_sync_and_recompile, shape_config
from benchmarks.pipes import ROOT, answer_lines
from benchmarks.record import row
from benchmarks.shapes import K, counting_model, mislead
from benchmarks.workers import race, race_rows
from decoding.costs import Costs
from decoding.engine import Engine
from decoding.planner import Step
from decoding.readback import step_times, synchronize
from decoding.sampling import GREEDY, Sampling
from drafts.base import ModelDraft
from generate import LLM
from loading.target import pick_device
from weights.walker import pack_model

LOCK = "QUICKDRAFT_GPU_LOCK"  # in the environment: the file whose lock is the GPU's
NUM_KERNELS = 16  # of a profile
DEMO = ROOT / "checkpoints" / "demo"
# What a GPU may decode with, next to the CPU's options that must give the same tokens.
INT8 = {"quantize": "int8"}
WAYS = {
    "eager": ({"compile": False}, {}),
    "drafted": ({"draft": ROOT / "checkpoints" / "demo-draft", "speculate_k": 3}, {}),
    "int8": (INT8, INT8),
    "compiled": ({}, {}),
}


locked: list = []  # the file, while this process has the GPU


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """The GPU for this process alone. A block inside another one passes."""
    if locked:
        yield
        return
    with open(os.environ[LOCK], "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        locked.append(file)
        try:
            yield
        finally:
            locked.clear()  # closing the file unlocks it


def tune_alone() -> None:
    """Let each of Inductor's timings of a kernel wait for its turn."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    bench = CachingAutotuner.bench

    @functools.wraps(bench)
    def bench_alone(*args, **kwargs):
        with alone():
            return bench(*args, **kwargs)

    CachingAutotuner.bench = bench_alone


class Tokens:
    """Is what a GPU decodes in float32 what a CPU decodes?"""

    def __init__(self, args: argparse.Namespace):
        self.args = args

    def facts(self) -> dict:
        """way -> are its tokens the CPU's?, or an error."""
        return {way: self.agrees(*options) for way, options in WAYS.items()}

    def agrees(self, options: dict, cpu_options: dict) -> bool | str:
        compile = not self.args.eager
        try:
            expected = self.tokens(device="cpu", compile=False, **cpu_options)
            return (
                self.tokens(**{"device": str(self.args.device), "compile": compile} | options)
                == expected
            )
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:300]

    def tokens(self, **options) -> list[int]:
        llm = LLM(DEMO, dtype="float32", max_seq_length=128, **options)
        prompt = "Once upon a time"
        return llm.generate([prompt], temperature=0, max_new_tokens=40)[0].tokens


class Bandwidth:
    def __init__(self, args: argparse.Namespace):
        self.args = args

    def facts(self) -> dict:
        """The machine."""
        facts = {"torch": torch.__version__, "cpus": os.cpu_count(), "machine": platform.machine()}
        if self.args.device.type == "cuda":
            query = "--query-gpu=driver_version,clocks.sm,clocks.mem,power.limit"
            command = ["nvidia-smi", query, "--format=csv,noheader"]
            facts["gpu"] = torch.cuda.get_device_name(self.args.device)
            with contextlib.suppress(OSError):
                answer = subprocess.run(command, capture_output=True, text=True)
                facts["clocks"] = answer.stdout.strip()
        return facts

    def measure(self) -> dict:
        with alone():
            return {"bandwidth": gpu_step.read_bandwidth(self.args)}


class Steps:
    """A shape in a format, with `args.options` of Inductor's over the project's own. `args.ks`: 0
    for a plain step, or drafted tokens to verify."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        with alone():
            subject = Subject(args, args.shape, args.format)
        with mock.patch.dict(compiling.GPU_OPTIONS, args.options):
            self.contender = Contender(subject, args.ks)

    def facts(self) -> dict:
        config = self.contender.subject.model.config
        return {
            "compile_s": self.contender.compile_s,
            "error": self.contender.error,
            "allowed_error": gpu_step.allowed_error(config.n_layers),
            "bytes": self.contender.bytes(),
        }

    def measure(self) -> dict:
        """Median seconds by the number of drafted tokens."""
        with alone():
            return {
                str(k): statistics.median(self.contender.run(self.args.steps, k))
                for k in self.args.ks
            }

    def profile(self) -> dict:
        """The kernels of one replayed step or verification: how many, their microseconds, and the
        (name, calls, microseconds) of those that take longest."""
        return {str(k): self.profile_step(k) for k in self.args.ks}

    def profile_step(self, k: int) -> dict:
        activities = [torch.profiler.ProfilerActivity.CUDA]
        if self.args.device.type != "cuda":
            activities = [torch.profiler.ProfilerActivity.CPU]
        with alone(), torch.profiler.profile(activities=activities) as profile:
            self.contender.run(1, k)
        num_steps = 1 + gpu_step.UNCOUNTED
        calls, seconds = defaultdict(int), defaultdict(float)
        for event in profile.events():
            if event.device_time:
                calls[event.name] += 1
                seconds[event.name] += event.device_time
        slowest = sorted(seconds, key=seconds.get, reverse=True)[:NUM_KERNELS]
        return {
            "kernels": sum(calls.values()) / num_steps,
            "us": sum(seconds.values()) / num_steps,
            "slowest": [
                (name[-70:], calls[name] / num_steps, seconds[name] / num_steps) for name in slowest
            ],
        }


class Peer:
    """gpt-fast's compiled step, from the checkout `args.gptfast`, or that of transformers."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        hf = shape_config(args, args.shape)
        if args.peer == "gptfast":
            self.program = peers.GptFast(hf, args.gptfast, args.format, args.device.type)
        else:
            self.program = peers.TransformersCompiled(hf, args.device.type)
        self.program.decode(1, args.filled)  # compiles

    def facts(self) -> dict:
        return {}

    def measure(self) -> dict:
        with alone():
            return {"0": self.program.decode(self.args.steps, self.args.filled)["seconds"]}


class Speculation:
    """Random weights that count, so that a draft is accepted as often as it is asked to be. A
    counting model cannot tie its head, whose rows are the embedding's in another order."""

    NOTE = "random int4 weights, K = 5, greedy, acceptance set by construction"

    def __init__(self, args: argparse.Namespace):
        self.args = args
        options = {"device": args.device, "quantize": "int4-g32"}
        with alone(), gpu_step.larger_chunks(args.device):
            shapes = [
                shape_config(args, name) | {"tie_word_embeddings": False} for name in ("8b", "1b")
            ]
            target, draft = (pack_model(counting_model(hf, 0.0, **options)) for hf in shapes)
        self.draft, self.embeddings = draft, draft.embed.weight.clone()
        self.engine = Engine(
            target,
            1,
            gpu_step.POSITIONS,
            compile=not args.eager,
            drafter=ModelDraft(draft),
            speculate_k=K,
        )
        if not args.eager:
            self.engine.warm_up(GREEDY)

    def facts(self) -> dict:
        return {}

    def rows(self, alpha: float) -> list[dict]:
        """The rows of one acceptance, or why there are none."""
        id = f"spec.8b_int4_1b_int4.alpha{round(100 * alpha)}"
        self.draft.embed.weight.copy_(self.embeddings)
        mislead(self.draft, 1 - alpha)
        try:
            with alone():
                races = self.races()
        except ValueError as error:
            return [row(f"{id}.correct", [0.0], "", str(error))]
        return [
            *race_rows(id, races, self.NOTE),
            row(f"{id}.plain_tok_s", [1 / r["plain"] for r in races], "tok/s", self.NOTE),
            row(f"{id}.tok_s", [1 / r["drafted"] for r in races], "tok/s", self.NOTE),
            row(f"{id}.correct", [1.0], "", "rounds decide like plain steps"),
        ]

    def races(self) -> list[dict]:
        """A race for each of args.rounds prompts. Only the loop's own reading of events may wait
        for the device. ValueError if rounds decide other tokens than plain steps."""
        options = {"sampling": Sampling(0), "max_new_tokens": 24 if self.args.tiny else 256}
        forbid = functools.partial(forbid_sync_and_recompile, self.engine.runner.device)
        vocab_size = self.engine.model.config.vocab_size
        self.engine.planner.costs = measure_costs(self.args, self.engine)
        races = []
        for number in range(self.args.rounds):
            prompt = [997 * (number + 1) % vocab_size]
            races.append(race(self.engine, prompt, K, forbid, **options))
            plain, drafted = races[-1]["texts"]
            if plain != drafted:
                raise ValueError(f"wrong: rounds decided {drafted[:8]}…, plain steps {plain[:8]}…")
        return races


@torch.inference_mode()
def measure_costs(args: argparse.Namespace, engine: Engine) -> Costs:
    """As Engine.calibrate, but with steps back to back. After a pause a GPU waits for the host to
    launch the step, so that a small draft's step seems to take longer than it does."""
    rows, times = engine.rows(0, 1), {}
    rows.batch.pos.fill_(args.filled - 1)
    rows.batch.done.fill_(True)
    for k in (0, K):
        steps = []
        for _ in range(args.steps + gpu_step.UNCOUNTED):
            steps.append(engine.run(Step(rows, args.filled, k)))
        synchronize(engine.runner.device)
        # (draft, verify) seconds
        times[k] = [step_times(step) for step in steps[gpu_step.UNCOUNTED :]]
    draft_s = statistics.median(draft_s for draft_s, _ in times[K])
    plain_s, verify_s = (statistics.median(verify_s for _, verify_s in times[k]) for k in (0, K))
    return Costs(plain_s, {K: draft_s}, {K: verify_s})


PROGRAMS = {
    "tokens": Tokens,
    "bandwidth": Bandwidth,
    "steps": Steps,
    "peer": Peer,
    "speculation": Speculation,
}


def main() -> None:
    args = argparse.Namespace(**json.loads(sys.argv[1]))
    args.device = pick_device(args.device)
    if args.device.type == "cuda":
        tune_alone()
    program = PROGRAMS[args.program](args)
    gc.collect()
    if args.device.type == "cuda":
        torch.cuda.empty_cache()  # for the other programs
    answer_lines(program)


if __name__ == "__main__":
    main()
