"""Measure quickdraft on one GPU: `python -m benchmarks.bench_gpu decode --write benchmarks/h200.json`.

    decode        one compiled step by format, 100 tokens filled: rate, share of the read bandwidth, ratio to bf16; six
                  rows over one; seconds to compile
    speculation   8B and 1B in int4, acceptance set by construction: speed-up, and measured over predicted
    peers         gpt-fast (--gptfast) and transformers, compiled, in turn with this project's step

Weights are random, at the real shapes, made on the device. Rows are merged by id into --write after every item, so a
run that is stopped keeps its rows; a run ends when the next item might not fit into --minutes. A step whose logits are
wrong (gpu_step.py) is reported as "….correct" 0 with the reason, and other failures too; the rest goes on. Compared
programs run in turn, A B A B …, with the read bandwidth measured in every round.

`--device cpu --tiny` runs the same code on tiny shapes, `--eager` without compiling. For a machine with a GPU that is
there for half an hour, in this order ($OUT: a folder that stays; --commit: where git does not know it):

    python -m pytest -m gpu tests; python -m benchmarks.bench_gpu decode --formats bf16,int8,int4-g32,fp8,mxfp6 \\
        --write $OUT/h200.json --minutes 7 --commit COMMIT
    python -m benchmarks.bench_gpu peers speculation --formats bf16,int8 --gptfast DIR --write $OUT/h200.json \\
        --minutes 7
    python -m benchmarks.bench_gpu decode --shapes 1b --formats bf16 --write $OUT/h200.json --minutes 2

If every row of the first command says that a CUDA graph was skipped, repeat it with --lenient.
"""

import argparse
import contextlib
import functools
import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks import gpu_step
from benchmarks.gpu_step import Contender, K, Subject, no_surprises, shape
from benchmarks.pipes import Worker
from benchmarks.record import list_of, one_of, publish, ratios, row
from benchmarks.shapes import GPU_SHAPES, counting_model, mislead
from cli.errors import ending_plainly
from cli.flags import Parser, positive
from cli.load import pick_device
from cli.report import speculative
from decoding.sampling import GREEDY, Sampling
from decoding.timing import step_times, synchronize
from generate import Engine, Timing, generate
from speculative import Costs, ModelDraft
from weights.formats import SCHEMES
from weights.walker import pack_model

Rows = list[dict]
CORRECT_NOTE = "within the allowed error of float32"


def rounds_of(args: argparse.Namespace, contenders: dict[str, Contender], k: int = 0) -> tuple[dict, list[float]]:
    """Every contender in turn, after a read of the device's memory: (name -> medians of seconds, bandwidths)."""
    seconds, reads = {name: [] for name in contenders}, []
    for _ in range(args.rounds):
        reads.append(gpu_step.read_bandwidth(args))
        for name, contender in contenders.items():
            seconds[name].append(statistics.median(contender.run(args.steps, k)))
    return seconds, reads


def attempt(id: str, make: Callable[[], Rows], note: str = CORRECT_NOTE) -> Rows:
    """The rows that `make` returns, and "id.correct" 1; or that row alone with 0 and the error."""
    try:
        return [*make(), row(f"{id}.correct", [1.0], "", note)]
    except Exception as error:
        return [failure(id, error)]


def failure(id: str, error: Exception) -> dict:
    return row(f"{id}.correct", [0.0], "", " ".join(f"{type(error).__name__}: {error}".split())[:400])


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ------------------------------------------------------------------------------------------------- steps


def measure_decode(args: argparse.Namespace) -> Iterator[Rows]:
    """Each format beside bf16, in turn."""
    for name in args.shapes:
        base = None
        if len(args.formats) > 1:
            with contextlib.suppress(Exception):  # bf16's own rows have the error
                base = Contender(Subject(args, name, "bf16"))
        for format in args.formats:
            yield attempt(f"{name}.{format}", functools.partial(decode_rows, args, name, format, base))
            free_memory()


def decode_rows(args: argparse.Namespace, name: str, format: str, base: Contender | None) -> Rows:
    contender = base if base and format == "bf16" else Contender(Subject(args, name, format))
    id, contenders = f"{name}.{format}", {format: contender} | ({"bf16": base} if base else {})
    seconds, reads = rounds_of(args, contenders)
    six, _ = rounds_of(args, {format: contender}, K)
    num_bytes, step_s = contender.bytes(), seconds[format]
    bandwidth = f"read bandwidth {statistics.median(reads) / 1e9:.0f} GB/s"
    note = f"{num_bytes / 1e9:.3f} GB a step, {args.filled} filled; {bandwidth}"
    bound = gpu_step.allowed_error(contender.subject.model.config.n_layers)
    error = f"logits off by {contender.error:.2g} of their size, {bound:.2g} allowed"
    return [
        row(f"{id}.tok_s", [1 / s for s in step_s], "tok/s", note),
        row(f"{id}.step_ms", [1e3 * s for s in step_s], "ms", error),
        row(f"{id}.of_read_bandwidth", ratios([num_bytes / s for s in step_s], reads), "ratio", note),
        row(f"{id}.verify6_over_1", ratios(six[format], step_s), "ratio", "6 rows over 1: the price of --one_width"),
        row(f"{id}.compile_s", [contender.compile_s], "s", "a decode step and a verification, with tuning"),
        *([row(f"{id}.vs_bf16", ratios(seconds["bf16"], step_s), "ratio", note)] if base else []),
    ]


# -------------------------------------------------------------------------------------------- speculation


def measure_speculation(args: argparse.Namespace) -> Iterator[Rows]:
    """Both models in int4. Their heads and embeddings are apart, because rows of a counting model's head say what
    follows."""
    note, values = "random int4 weights, K = 5, greedy, acceptance set by construction", []
    options = {"device": args.device, "quantize": "int4-g32"}
    with gpu_step.larger_chunks(args.device):
        shapes = [shape(args, name) | {"tie_word_embeddings": False} for name in ("8b", "1b")]
        target, draft = (pack_model(counting_model(hf, 0.0, **options)) for hf in shapes)
    weight = draft.embed.weight.clone()
    engine = Engine(target, 1, gpu_step.POSITIONS, compile=not args.eager, drafter=ModelDraft(draft), speculate_k=K)
    if not args.eager:
        engine.warm_up(GREEDY)
    for alpha in (0.8, 0.5, 0.95):
        draft.embed.weight.copy_(weight)
        mislead(draft, 1 - alpha)
        id = f"spec.8b_int4_1b_int4.alpha{round(100 * alpha)}"
        rows = attempt(id, functools.partial(race_rows, args, engine, id, note), "rounds decide as plain steps do")
        values += [r["value"] for r in rows if r["id"].endswith("measured_over_predicted")]
        yield rows + ([row("spec.measured_over_predicted", values, "ratio", note)] if values else [])


def race_rows(args: argparse.Namespace, engine: Engine, id: str, note: str) -> Rows:
    """Plain decoding and rounds in turn, once for each of --rounds prompts."""
    engine.costs = measure_costs(args, engine)
    vocab_size = engine.model.config.vocab_size
    plain, drafted, reports = zip(*(race(args, engine, [997 * (n + 1) % vocab_size]) for n in range(args.rounds)))
    speedups = ratios(plain, drafted)
    over_predicted = ratios(speedups, [report["predicted_speedup"] for report in reports])
    rows = [
        row(f"{id}.speedup", speedups, "ratio", note),
        row(f"{id}.measured_over_predicted", over_predicted, "ratio", note),
        row(f"{id}.plain_tok_s", [1 / s for s in plain], "tok/s", note),
        row(f"{id}.tok_s", [1 / s for s in drafted], "tok/s", note),
    ]
    keys = ("alpha", "c", "v", "tokens_per_round")
    return rows + [row(f"{id}.{key}", [report[key] for report in reports], "", note) for key in keys]


def race(args: argparse.Namespace, engine: Engine, prompt: list[int]) -> tuple[float, float, dict]:
    """Seconds a token of decoding plainly and with rounds, and the report of speculation. After the prompt only the
    loop's own reading of events may wait for the device. ValueError if the two decide different tokens."""
    seconds, texts = [], []
    for k in (0, K):
        engine.clear()
        engine.speculate_k, timing = k, Timing()
        options = {"sampling": Sampling(0), "max_new_tokens": 24 if args.tiny else 256, "engine": engine}
        stream = generate(engine.model, [prompt], timing=timing, **options)
        ids = [next(stream)[1]]
        with no_surprises(engine.device):
            ids += [id for _, id in stream]
        seconds.append(timing.decode_s / (timing.decoded[0] - 1))
        texts.append(ids)
    if texts[0] != texts[1]:
        raise ValueError(f"wrong: rounds decided {texts[1][:8]}…, plain steps {texts[0][:8]}…")
    return *seconds, speculative(engine, [timing])


@torch.inference_mode()
def measure_costs(args: argparse.Namespace, engine: Engine) -> Costs:
    """As Engine.calibrate, but back to back. With a pause before each, a GPU's step seems to cost what the host takes
    to launch it, and a small draft's step more than it does."""
    rows, parts = engine.rows(0, 1), {}
    rows.state.pos.fill_(args.filled - 1)
    rows.state.done.fill_(True)
    for k in (0, K):
        steps = []
        for _ in range(args.steps + gpu_step.UNCOUNTED):
            steps.append(engine.run(rows, args.filled, k))
            engine.draft_lag = 0
        synchronize(engine.device)
        parts[k] = [step_times(step) for step in steps[gpu_step.UNCOUNTED :]]  # (draft, verify) seconds
    draft_s = statistics.median(draft_s for draft_s, _ in parts[K])
    plain_s, verify_s = (statistics.median(verify_s for _, verify_s in parts[k]) for k in (0, K))
    return Costs(plain_s, {K: draft_s}, {K: verify_s})


# ------------------------------------------------------------------------------------------------- peers


def measure_peers(args: argparse.Namespace) -> Iterator[Rows]:
    """Each peer in a process of its own that waits while the others run."""
    for name, format in itertools.product(args.shapes, args.formats):
        hf, device, peers = json.dumps(shape(args, name)), str(args.device), {}
        if args.gptfast:
            peers["gptfast"] = ("gptfast", hf, str(args.gptfast.resolve()), format, device)
        if format == "bf16":
            peers["transformers"] = ("transformers_compiled", hf, device)
        for peer, command in peers.items():
            make = functools.partial(peer_rows, args, name, format, peer, command)
            yield attempt(f"{name}.{format}.vs_{peer}", make)
            free_memory()


def peer_rows(args: argparse.Namespace, name: str, format: str, peer: str, command: tuple) -> Rows:
    contender, worker = Contender(Subject(args, name, format)), Worker("benchmarks.peers", *command)
    ours, theirs = [], []
    for number in range(args.rounds + 1):
        answer = worker.call(method="decode", steps=args.steps, filled=args.filled)
        if number:  # the first round compiles
            theirs.append(answer["seconds"])
            ours.append(statistics.median(contender.run(args.steps)))
    worker.close()
    note = f"plain against {peer}, {args.filled} filled"
    return [
        row(f"{name}.{format}.vs_{peer}", ratios(theirs, ours), "ratio", note),
        row(f"{name}.{format}.{peer}.tok_s", [1 / s for s in theirs], "tok/s", note),
    ]


# ------------------------------------------------------------------------------------------- command line

MEASUREMENTS = {
    "decode": measure_decode,
    "speculation": measure_speculation,
    "peers": measure_peers,
}


def with_failure(name: str, items: Iterator[Rows]) -> Iterator[Rows]:
    """The items, and a row with the error if the next one cannot be started."""
    try:
        yield from items
    except Exception as error:
        yield [failure(name, error)]


def until(items: Iterator[Rows], end: float, clock: Callable[[], float] = time.monotonic) -> Iterator[Rows]:
    """The items, for as long as another one that takes as long as the longest so far would end before `end`."""
    longest, start = 0.0, clock()
    for rows in items:
        yield rows
        now = clock()
        longest, start = max(longest, now - start), now
        if now + longest > end:
            print("out of time: the rest is left out", file=sys.stderr)
            return


def run(args: argparse.Namespace) -> None:
    end = time.monotonic() + 60 * args.minutes
    machine = torch.cuda.get_device_name(args.device) if args.device.type == "cuda" else None
    for name in args.measurements:
        for rows in until(with_failure(name, MEASUREMENTS[name](args)), end):
            publish(rows, args.write, machine, args.commit)
        if time.monotonic() > end:
            return


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser, names = Parser(description="Measure quickdraft on one GPU."), ", ".join(MEASUREMENTS)
    add, formats = parser.add_argument, ["bf16", *SCHEMES]
    measurement = one_of("measurement", MEASUREMENTS)
    add("measurements", nargs="*", type=measurement, metavar="MEASUREMENT", help=f"of {names}")
    add(
        "--formats", type=list_of("format", formats), default="bf16,int8,int4-g32,fp8,mxfp6", help="bf16 or a scheme, …"
    )
    add("--shapes", type=list_of("shape", GPU_SHAPES), default="8b", help=f"of {', '.join(GPU_SHAPES)}; default: 8b")
    add("--minutes", type=float, default=1e9, metavar="M", help="start nothing that may end later")
    add("--write", type=Path, metavar="FILE", help="merge the rows into this results file")
    add("--rounds", type=positive, default=5)
    add("--steps", type=positive, default=32, help="of each contender a round")
    add("--filled", type=positive, default=100, help="positions, the step's own included")
    add("--gptfast", type=Path, metavar="DIR", help="a gpt-fast checkout, for peers")
    add("--commit", metavar="TEXT", help="where git does not know it")
    add("--device", type=pick_device, default=None, help="cuda; cpu to try the program out")
    add("--tiny", action="store_true", help="tiny shapes, to try the program out")
    add("--eager", action="store_true", help="without compiling")
    add("--lenient", action="store_true", help="also measure steps of which torch makes no CUDA graph")
    args = parser.parse_args(argv)
    args.device = args.device or pick_device(None)
    if args.device.type != "cuda" and not args.tiny:
        raise ValueError("needs a CUDA device; --device cpu --tiny tries the program out on a CPU")
    if not args.measurements:
        raise ValueError(f"name a measurement: {names}")
    return args


def main() -> None:
    with ending_plainly():
        run(parse_args())


if __name__ == "__main__":
    main()
