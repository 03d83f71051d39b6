"""The cost of compiling beside decoding: `python -m benchmarks.background`.

    pauses      gaps between the tokens of an eager engine while a thread compiles the same steps,
                with empty caches and with full ones
    texts       greedy answers that an eager and a compiled engine give alike

It answers why a CPU decodes eagerly until --compile: benchmarks/NOTES.md, "Compiling in the
background".
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from benchmarks.pipes import ROOT
from benchmarks.real import PROMPTS
from cli.flags import Parser
from decoding.engine import Engine
from decoding.sampling import Sampling
from decoding.warmup import warm_up
from loading import load_model, load_tokenizer
from weights.walker import pack_model

GREEDY = Sampling(temperature=0)


def gaps_until(engine: Engine, is_over) -> list[float]:
    """Seconds between tokens of one request after another, until `is_over`(their number)."""
    gaps, last = [], None
    while True:
        engine.add_request(range(100, 120), sampling=GREEDY, max_new_tokens=400)
        while engine.requests:
            for _ in engine.step():
                now = time.perf_counter()
                gaps += [] if last is None else [now - last]
                last = now
            if is_over(len(gaps)):
                engine.reset()
                return gaps


def summary(gaps: list[float]) -> dict:
    return {
        "tok_s": round(len(gaps) / sum(gaps), 1),
        "median_ms": round(1e3 * statistics.median(gaps), 1),
        "longest_ms": round(1e3 * max(gaps)),
        "over_50_ms": sum(gap > 0.05 for gap in gaps),
    }


def measure(args: argparse.Namespace) -> dict:
    model = load_model(args.checkpoint)
    pack_model(model)
    eager = Engine(model, 1, 512)
    compiled = Engine(model, 1, 512, compile=True, compile_prompts=False)
    gaps_until(eager, lambda num_gaps: num_gaps > 50)
    alone, start = gaps_until(eager, lambda num_gaps: num_gaps > 200), time.perf_counter()
    thread = threading.Thread(target=warm_up, args=(compiled, GREEDY.path))
    thread.start()
    beside = gaps_until(eager, lambda num_gaps: not thread.is_alive())
    result = {
        "seconds": round(time.perf_counter() - start, 1),
        "alone": summary(alone),
        "beside": summary(beside),
    }
    if args.texts:
        tokenizer = load_tokenizer(args.checkpoint)
        prompts = [tokenizer.encode(question) for question in PROMPTS["questions"][: args.texts]]
        options = {"sampling": GREEDY, "max_new_tokens": 128, "stop_ids": tokenizer.stop_ids}
        answers = [sorted(engine.generate(prompts, **options)) for engine in (eager, compiled)]
        rows = [
            [list(group) for _, group in itertools.groupby(answer, key=lambda pair: pair[0])]
            for answer in answers
        ]
        result["equal_texts"] = (
            f"{sum(a == b for a, b in zip(*rows, strict=True))} of {len(prompts)}"
        )
    return result


def main() -> None:
    parser = Parser(description="Measure decoding beside compiling.")
    parser.add_argument(
        "--checkpoint", type=Path, default="checkpoints/demo", help="default: %(default)s"
    )
    parser.add_argument(
        "--texts", type=int, default=12, help="questions answered by both; default: %(default)s"
    )
    parser.add_argument("--part", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        print(json.dumps(measure(args)))
        return
    with tempfile.TemporaryDirectory() as folder:
        for part, texts in (("empty caches", 0), ("full caches", args.texts)):
            command = [
                sys.executable,
                "-m",
                "benchmarks.background",
                "--part",
                "--checkpoint",
                str(args.checkpoint),
            ]
            run = subprocess.run(
                [*command, "--texts", str(texts)],
                cwd=ROOT,
                env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder},
                stdout=subprocess.PIPE,
                check=True,
            )
            print(part, run.stdout.decode().strip())


if __name__ == "__main__":
    main()
