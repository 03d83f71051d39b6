"""What bit-identical drafting costs plain decoding on a CPU: steps as they are, over steps with each measure undone.

    python -m benchmarks.identical [--formats bf16 int8 int4-g32] [--filled 100 16000] [--write benchmarks/cpu.json]

Both kinds of step run in turn on the same packed weights of the 1.1B shape, so nothing differs but the measures of
decoding/exactness.py: numbers of rows that round alike, lengths of attention in whole blocks, query rows in
multiples. This file knows no engine but this project's.
"""

import contextlib
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch

from benchmarks.bench import TINYLLAMA, fill_slots, row, write_results
from cli.errors import ending_plainly
from cli.flags import Parser, positive
from decoding.runner import ModelRunner
from generate import Engine
from loading.checkpoint import random_model
from loading.config import config_from_hf
from model import Transformer
from weights import cpu
from weights.walker import pack_model

FORMATS = ("bf16", "int8", "int4-g32")


@contextlib.contextmanager
def undone(model: Transformer, engine: Engine) -> Iterator[None]:
    """Every measure undone: products of the rows that there are, but for the padding that makes large ones faster;
    attention over the exact length, for the exact number of query rows."""

    def exact(self: ModelRunner, length: int) -> int:
        return min(length, self.S)

    target = engine.rows(0, 1).target
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(ModelRunner, "bucket_length", exact))
        stack.enter_context(mock.patch.object(target, "caches", target.caches._replace(row_multiple=1)))
        for module in model.modules():
            if type(module) is cpu.PackedWeights:
                for name, value in (("row_counts", (min(module.row_counts[0], cpu.FAST_ROWS),)), ("max_split", 0)):
                    stack.enter_context(mock.patch.object(module, name, value))
        yield


@torch.inference_mode()
def step_seconds(engine: Engine, filled: int, steps: int) -> float:
    """Median of steps with so many positions filled."""
    seconds, rows = [], fill_slots(engine, filled, steps)
    for step in range(steps):
        begun = time.perf_counter()
        engine.run(rows, filled + step)
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def measure(format: str, lengths: list[int], rounds: int, steps: int) -> list[dict]:
    hf = TINYLLAMA | {"max_position_embeddings": max(lengths) + steps + 1}
    scheme = None if format == "bf16" else format
    model = pack_model(
        random_model(config_from_hf(hf), dtype=torch.bfloat16, device="cpu", quantize=scheme, pack=False)
    )
    engine, rows = Engine(model, 1, max(lengths) + steps + 1), []
    for filled in lengths:
        ratios = []
        for turn in range(rounds + 1):
            found = {}
            for kind in (0, 1) if turn % 2 else (1, 0):
                with undone(model, engine) if kind else contextlib.nullcontext():
                    found[kind] = step_seconds(engine, filled, steps)
            if turn:  # the first one warms up
                ratios.append(found[0] / found[1])
        name = f"1b.{format}" + (f".ctx{filled // 1000}k" if filled >= 1000 else "") + ".identical_price"
        rows.append(row(name, ratios, "ratio", f"time of a step over one without the measures, {filled} tokens filled"))
    return rows


def main() -> None:
    parser = Parser(description="The price of bit-identical drafting, for plain decoding on a CPU.")
    add = parser.add_argument
    add("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), help="default: all")
    add("--filled", nargs="+", type=positive, default=[100, 16000], metavar="N", help="positions; default: 100 16000")
    add("--rounds", type=positive, default=15, metavar="N", help="both kinds of step in turn; default: 15")
    add("--steps", type=positive, default=8, metavar="N", help="of a kind in a round; default: 8")
    add("--write", type=Path, metavar="FILE", help="merge the rows into this results file")
    args = parser.parse_args()
    with ending_plainly():
        for format in args.formats:
            rows = measure(format, args.filled, args.rounds, args.steps)
            for r in rows:
                print(f"{r['id']:34} {r['value']:>7} ({r['min']}–{r['max']})", flush=True)
            if args.write:
                write_results(args.write, rows, f"python -m benchmarks.identical {' '.join(sys.argv[1:])}".strip())


if __name__ == "__main__":
    main()
