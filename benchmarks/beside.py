"""Two checkouts of this project in one run: `python -m benchmarks.beside ../before --models demo`.

    single1, single8    one greedy request, in an engine of one slot and of eight
    lines               48 prompts on eight slots; every eighth wants 200 tokens, the others 20
    equal               96 equal prompts of 100 tokens on 32 slots, 20 tokens each

Each model runs in one process a checkout, which loads, compiles with empty caches if the case
compiles, and then waits. They run in turn, A B B A, and ratios are taken within a round. A case is
a line of JSON: tokens a second as median (min–max), `single` after its prompt, the others with
their prompts; seconds to compile; peak of resident memory.
"""

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
MODELS = ("demo", "demo-draft", "smollm2", "1b", "1b.int8", "1b.int4-g32")
JOBS = {
    "demo": ("single1", "single8", "lines", "equal"),
    "smollm2": ("single1", "single8"),
    "1b": ("single1", "single8"),
}


class Checkout:
    """One model in one checkout's code, inside a worker. An older checkout has no queue: it runs a
    batch at a time."""

    def __init__(self, root: str, name: str, compile: bool):
        sys.path[0] = root
        if Path(root, "cli").is_dir():
            import cli  # noqa: F401, which sets its environment before torch in older checkouts

            if Path(root, "cli", "process.py").exists():
                from cli.process import prepare

                prepare()
            from loading.checkpoint import load_model
            from loading.config import config_from_hf
            from loading.models import random_model
            from weights.walker import pack_model
        else:  # before the files moved to rooms
            import program  # noqa: F401
            from checkpoint import load_model, random_model

            from model import Config
            from weights.linears import pack_model

            config_from_hf = Config.from_hf
        from benchmarks.bench import TINYLLAMA
        from benchmarks.real import packaged

        self.compile, self.is_small, self.engines, self.compile_s = (
            compile,
            name.startswith("demo"),
            {},
            0.0,
        )
        folder, self.draft = f"{root}/checkpoints", None
        if name.startswith("1b"):
            self.model = pack_model(
                random_model(config_from_hf(TINYLLAMA), quantize=name[3:] or None)
            )
        else:
            self.model = pack_model(
                load_model(packaged() if name == "smollm2" else f"{folder}/demo")
            )
        if name == "demo-draft":
            self.draft = pack_model(load_model(f"{folder}/demo-draft"))

    def engine(self, slots: int):
        from decoding.engine import Engine
        from drafts.base import ModelDraft

        if slots not in self.engines:
            drafter = ModelDraft(self.draft) if self.draft else None
            options = {
                "compile": self.compile,
                "compile_prompts": False,
                "drafter": drafter,
                "speculate_k": 3,
            }
            engine = self.engines[slots] = Engine(self.model, slots, 384, **options)
            self.compile_s += engine.warm_up("greedy") if self.compile else 0.0
        return self.engines[slots]

    def run(self, job: str, number: int) -> dict:
        """Tokens a second of a job. Prompts differ between rounds: an engine may hold those of the
        last one."""
        from decoding.sampling import Sampling
        from decoding.statistics import Timing

        slots = {"single1": 1, "single8": 8, "lines": 8, "equal": 32}[job]
        engine, timing = self.engine(slots), Timing()
        if job == "lines":
            prompts = [prompt_of(20 + 3 * i, 100 * number + i) for i in range(48)]
            budgets = [200 if i % 8 == 0 else 20 for i in range(48)]
        else:
            num_prompts = 96 if job == "equal" else 1
            prompts = [prompt_of(100, number)] * num_prompts
            budgets = [20 if job == "equal" else 200 if self.is_small else 40] * num_prompts
        start = time.perf_counter()
        batch = len(prompts) if engine_has_queue(engine) else slots
        for i in range(0, len(prompts), batch):
            options = {"max_new_tokens": budgets[i : i + batch], "timing": timing}
            for _ in engine.generate(prompts[i : i + batch], sampling=Sampling(0), **options):
                pass
        seconds, tokens = time.perf_counter() - start, sum(budgets)
        if job.startswith("single"):
            seconds, tokens = timing.decode_s, tokens - 1
        peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        return {"tok_s": tokens / seconds, "compile_s": self.compile_s, "peak_gb": peak_gb}


def engine_has_queue(engine) -> bool:
    return hasattr(engine, "add_request")


def prompt_of(length: int, number: int) -> list[int]:
    return [(i * 7 + number * 31) % 1000 + 3 for i in range(length)]


def work(root: str, name: str, compile: str) -> None:
    """The process of one checkout: a line of JSON for each line that it reads."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    checkout = Checkout(root, name, json.loads(compile))
    for line in sys.stdin:
        print(json.dumps(checkout.run(*json.loads(line))), file=out, flush=True)


def measure(name: str, compile: bool, roots: dict[str, Path], rounds: int) -> None:
    """Print a line for each job of a model."""
    answers: dict[str, dict[str, list[dict]]] = {
        job: {root: [] for root in roots} for job in JOBS.get(name, ("single1",))
    }
    with contextlib.ExitStack() as stack:
        workers = {}
        for root, folder in roots.items():
            env = os.environ | {
                "TORCHINDUCTOR_CACHE_DIR": stack.enter_context(tempfile.TemporaryDirectory())
            }
            command = [sys.executable, __file__, "--work", str(folder), name, json.dumps(compile)]
            pipes = {
                "stdin": subprocess.PIPE,
                "stdout": subprocess.PIPE,
                "stderr": subprocess.DEVNULL,
                "text": True,
            }
            workers[root] = stack.enter_context(
                subprocess.Popen(command, cwd=folder, env=env, **pipes)
            )
        for number in range(rounds + 1):  # the first round does not count
            for job in answers:
                for root, worker in sorted(workers.items(), reverse=number % 2 == 1):
                    worker.stdin.write(json.dumps([job, number]) + "\n")
                    worker.stdin.flush()
                    answers[job][root] += [json.loads(worker.stdout.readline())][:number]
        for worker in workers.values():
            worker.stdin.close()
    for job, by_root in answers.items():
        result = {"case": f"{job}.{name}{'.compiled' * compile}"}
        for root in roots:
            result |= {
                f"{root}.{key}": spread(a[key] for a in by_root[root]) for key in by_root[root][0]
            }
        result["after_over_before"] = spread(
            a["tok_s"] / b["tok_s"] for a, b in zip(by_root["after"], by_root["before"])
        )
        if job == "single8":
            alone = answers["single1"]["after"]
            result["after.8_slots_over_1"] = spread(
                a["tok_s"] / b["tok_s"] for a, b in zip(by_root["after"], alone)
            )
        print(json.dumps(result, ensure_ascii=False), flush=True)


def spread(values) -> str:
    values = list(values)
    return f"{statistics.median(values):.3g} ({min(values):.3g}–{max(values):.3g})"


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        return work(*sys.argv[2:])
    parser = argparse.ArgumentParser(description="Two checkouts side by side.")
    parser.add_argument("before", type=Path, metavar="CHECKOUT")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="default: all")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    for name in args.models:
        for compile in (False, True):
            measure(name, compile, {"before": args.before.resolve(), "after": HERE}, args.rounds)


if __name__ == "__main__":
    main()
