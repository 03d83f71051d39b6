"""Measure quickdraft on one GPU: `python -m benchmarks.bench_gpu decode --write
benchmarks/h200.json`.

    decode        one compiled step by format, 100 tokens filled: rate, share of the read bandwidth,
                  ratio to bf16; six rows over one; seconds to compile
    speculation   8B and 1B in int4, acceptance set by construction: speed-up, and measured over
                  predicted
    peers         gpt-fast (--gptfast) and transformers, compiled, in turn with this project's step

Weights are random. Rows are written after every item, and a run ends when the next item might not
fit in --minutes. A failure, or a step whose logits are wrong (gpu_step.py), is the row "….correct"
with value 0 and the reason as its note; the other items still run.
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
from benchmarks.gpu_step import Contender, Subject, forbid_sync_and_recompile, shape_config
from benchmarks.pipes import Worker
from benchmarks.record import list_of, one_of, publish, ratios, row
from benchmarks.shapes import GPU_SHAPES, K, counting_model, mislead
from benchmarks.workers import race, race_rows
from cli.errors import exit_on_error
from cli.flags import Parser, positive
from decoding.engine import Engine
from decoding.readback import step_times, synchronize
from decoding.sampling import GREEDY, Sampling
from loading.target import pick_device
from speculative import Costs, ModelDraft
from weights.formats import SCHEMES
from weights.walker import pack_model

Rows = list[dict]
CORRECT_NOTE = "within the allowed error of float32"


def rounds_of(
    args: argparse.Namespace, contenders: dict[str, Contender], k: int = 0
) -> tuple[dict, list[float]]:
    """Every contender in turn, behind a measurement of the read bandwidth: (name -> median seconds
    of a step by round, read bandwidth by round)."""
    seconds, reads = {name: [] for name in contenders}, []
    for _ in range(args.rounds):
        reads.append(gpu_step.read_bandwidth(args))
        for name, contender in contenders.items():
            seconds[name].append(statistics.median(contender.run(args.steps, k)))
    return seconds, reads


def attempt(id: str, measure: Callable[[], Rows], note: str = CORRECT_NOTE) -> Rows:
    """The rows of `measure` and ID.correct = 1, or ID.correct = 0 alone with the error as its
    note."""
    try:
        return [*measure(), row(f"{id}.correct", [1.0], "", note)]
    except Exception as error:
        return [failure(id, error)]


def failure(id: str, error: Exception) -> dict:
    return row(
        f"{id}.correct", [0.0], "", " ".join(f"{type(error).__name__}: {error}".split())[:400]
    )


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ------------------------------------------------------------------------------------------ steps


def measure_decode(args: argparse.Namespace) -> Iterator[Rows]:
    """Each format beside bf16, in turn."""
    for name in args.shapes:
        bf16 = None
        if len(args.formats) > 1:
            with contextlib.suppress(Exception):  # bf16's own rows have the error
                bf16 = Contender(Subject(args, name, "bf16"))
        for format in args.formats:
            yield attempt(
                f"{name}.{format}", functools.partial(decode_rows, args, name, format, bf16)
            )
            free_memory()


def decode_rows(args: argparse.Namespace, name: str, format: str, bf16: Contender | None) -> Rows:
    contender = bf16 if bf16 and format == "bf16" else Contender(Subject(args, name, format))
    id, contenders = f"{name}.{format}", {format: contender} | ({"bf16": bf16} if bf16 else {})
    seconds, bandwidths = rounds_of(args, contenders)
    verify_s, _ = rounds_of(args, {format: contender}, K)
    num_bytes, step_s = contender.bytes(), seconds[format]
    bandwidth = f"read bandwidth {statistics.median(bandwidths) / 1e9:.0f} GB/s"
    note = f"{num_bytes / 1e9:.3f} GB a step, {args.filled} filled; {bandwidth}"
    bound = gpu_step.allowed_error(contender.subject.model.config.n_layers)
    error = f"logits off by {contender.error:.2g} of their size, {bound:.2g} allowed"
    return [
        row(f"{id}.tok_s", [1 / s for s in step_s], "tok/s", note),
        row(f"{id}.step_ms", [1e3 * s for s in step_s], "ms", error),
        row(
            f"{id}.of_read_bandwidth",
            ratios([num_bytes / s for s in step_s], bandwidths),
            "ratio",
            note,
        ),
        row(
            f"{id}.verify6_over_1",
            ratios(verify_s[format], step_s),
            "ratio",
            "6 rows over 1, as --fixed_width_steps pays",
        ),
        row(
            f"{id}.compile_s",
            [contender.compile_s],
            "s",
            "a decode step and a verification, with tuning",
        ),
        *([row(f"{id}.vs_bf16", ratios(seconds["bf16"], step_s), "ratio", note)] if bf16 else []),
    ]


# ------------------------------------------------------------------------------------ speculation


def measure_speculation(args: argparse.Namespace) -> Iterator[Rows]:
    """Both models in int4. A counting model cannot tie its head, whose rows are the embedding's in
    another order."""
    note, values = "random int4 weights, K = 5, greedy, acceptance set by construction", []
    options = {"device": args.device, "quantize": "int4-g32"}
    with gpu_step.larger_chunks(args.device):
        shapes = [
            shape_config(args, name) | {"tie_word_embeddings": False} for name in ("8b", "1b")
        ]
        target, draft = (pack_model(counting_model(hf, 0.0, **options)) for hf in shapes)
    weight = draft.embed.weight.clone()
    engine = Engine(
        target,
        1,
        gpu_step.POSITIONS,
        compile=not args.eager,
        drafter=ModelDraft(draft),
        speculate_k=K,
    )
    if not args.eager:
        engine.warm_up(GREEDY)
    for alpha in (0.8, 0.5, 0.95):
        draft.embed.weight.copy_(weight)
        mislead(draft, 1 - alpha)
        id = f"spec.8b_int4_1b_int4.alpha{round(100 * alpha)}"
        rows = attempt(
            id,
            functools.partial(speculation_rows, args, engine, id, note),
            "rounds decide like plain steps",
        )
        values += [r["value"] for r in rows if r["id"].endswith("measured_over_predicted")]
        yield rows + (
            [row("spec.measured_over_predicted", values, "ratio", note)] if values else []
        )


def speculation_rows(args: argparse.Namespace, engine: Engine, id: str, note: str) -> Rows:
    """A race for each of --rounds prompts. Only the loop's own reading of events may wait for the
    device. ValueError if rounds decide other tokens than plain steps."""
    engine.costs, races, vocab_size = (
        measure_costs(args, engine),
        [],
        engine.model.config.vocab_size,
    )
    options = {"sampling": Sampling(0), "max_new_tokens": 24 if args.tiny else 256}
    forbid = functools.partial(forbid_sync_and_recompile, engine.device)
    for prompt in ([997 * (n + 1) % vocab_size] for n in range(args.rounds)):
        races.append(race(engine, prompt, K, forbid, **options))
        plain, drafted = races[-1]["texts"]
        if plain != drafted:
            raise ValueError(f"wrong: rounds decided {drafted[:8]}…, plain steps {plain[:8]}…")
    return [
        *race_rows(id, races, note),
        row(f"{id}.plain_tok_s", [1 / r["plain"] for r in races], "tok/s", note),
        row(f"{id}.tok_s", [1 / r["drafted"] for r in races], "tok/s", note),
    ]


@torch.inference_mode()
def measure_costs(args: argparse.Namespace, engine: Engine) -> Costs:
    """As Engine.calibrate, but with steps back to back. After a pause a GPU waits for the host to
    launch the step, so that a small draft's step seems to take longer than it does."""
    rows, times = engine.rows(0, 1), {}
    rows.state.pos.fill_(args.filled - 1)
    rows.state.done.fill_(True)
    for k in (0, K):
        steps = []
        for _ in range(args.steps + gpu_step.UNCOUNTED):
            steps.append(engine.run(rows, args.filled, k))
            engine.max_draft_lag = 0
        synchronize(engine.device)
        # (draft, verify) seconds
        times[k] = [step_times(step) for step in steps[gpu_step.UNCOUNTED :]]
    draft_s = statistics.median(draft_s for draft_s, _ in times[K])
    plain_s, verify_s = (statistics.median(verify_s for _, verify_s in times[k]) for k in (0, K))
    return Costs(plain_s, {K: draft_s}, {K: verify_s})


# ------------------------------------------------------------------------------------------ peers


def measure_peers(args: argparse.Namespace) -> Iterator[Rows]:
    """Each peer in a process of its own that waits while the others run."""
    for name, format in itertools.product(args.shapes, args.formats):
        hf, device, peers = json.dumps(shape_config(args, name)), str(args.device), {}
        if args.gptfast:
            peers["gptfast"] = ("gptfast", hf, str(args.gptfast.resolve()), format, device)
        if format == "bf16":
            peers["transformers"] = ("transformers_compiled", hf, device)
        for peer, command in peers.items():
            measure = functools.partial(peer_rows, args, name, format, peer, command)
            yield attempt(f"{name}.{format}.vs_{peer}", measure)
            free_memory()


def peer_rows(args: argparse.Namespace, name: str, format: str, peer: str, command: tuple) -> Rows:
    contender, worker = Contender(Subject(args, name, format)), Worker("benchmarks.peers", *command)
    step_s, peer_s = [], []
    for number in range(args.rounds + 1):
        answer = worker.call(method="decode", steps=args.steps, filled=args.filled)
        if number:  # the first round compiles
            peer_s.append(answer["seconds"])
            step_s.append(statistics.median(contender.run(args.steps)))
    worker.close()
    note = f"plain steps against {peer}, {args.filled} filled"
    return [
        row(f"{name}.{format}.vs_{peer}", ratios(peer_s, step_s), "ratio", note),
        row(f"{name}.{format}.{peer}.tok_s", [1 / s for s in peer_s], "tok/s", note),
    ]


# ----------------------------------------------------------------------------------- command line

MEASUREMENTS = {
    "decode": measure_decode,
    "speculation": measure_speculation,
    "peers": measure_peers,
}


def with_failure(name: str, items: Iterator[Rows]) -> Iterator[Rows]:
    """The items; if one raises, a row with the error in its place, and no further items."""
    try:
        yield from items
    except Exception as error:
        yield [failure(name, error)]


def until_deadline(items: Iterator[Rows], deadline: float) -> Iterator[Rows]:
    """The items, up to the first after which another one of the longest duration so far would miss
    the deadline."""
    max_s, start = 0.0, time.monotonic()
    for rows in items:
        yield rows
        now = time.monotonic()
        max_s, start = max(max_s, now - start), now
        if now + max_s > deadline:
            print("--minutes are over: the remaining items do not run", file=sys.stderr)
            return


def run(args: argparse.Namespace) -> None:
    deadline = time.monotonic() + 60 * args.minutes
    machine = torch.cuda.get_device_name(args.device) if args.device.type == "cuda" else None
    for name in args.measurements:
        for rows in until_deadline(with_failure(name, MEASUREMENTS[name](args)), deadline):
            publish(rows, args.write, machine, args.commit)
        if time.monotonic() > deadline:
            return


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser, names = Parser(description="Measure quickdraft on one GPU."), ", ".join(MEASUREMENTS)
    add, formats = parser.add_argument, ["bf16", *SCHEMES]
    measurement = one_of("measurement", MEASUREMENTS)
    add("measurements", nargs="*", type=measurement, metavar="MEASUREMENT", help=f"any of {names}")
    commas = "with commas between; default: %(default)s"
    default = "bf16,int8,int4-g32,fp8,mxfp6"
    add(
        "--formats",
        type=list_of("format", formats),
        default=default,
        help=f"bf16 and schemes, {commas}",
    )
    add(
        "--shapes",
        type=list_of("shape", GPU_SHAPES),
        default="8b",
        help=f"any of {', '.join(GPU_SHAPES)}, {commas}",
    )
    add(
        "--minutes",
        type=float,
        default=1e9,
        metavar="M",
        help="start no item that may end after M minutes",
    )
    add("--write", type=Path, metavar="FILE", help="merge the rows into this results file")
    add(
        "--rounds",
        type=positive,
        default=5,
        help="measurements of every step; default: %(default)s",
    )
    add(
        "--steps",
        type=positive,
        default=32,
        help="steps of every program a round; default: %(default)s",
    )
    add(
        "--filled",
        type=positive,
        default=100,
        help="positions that a step attends to; default: %(default)s",
    )
    add("--gptfast", type=Path, metavar="DIR", help="a gpt-fast checkout, for peers")
    add("--commit", metavar="TEXT", help="the commit, for a checkout without git")
    add("--device", type=pick_device, default=None, help="default: cuda; cpu needs --tiny")
    add("--tiny", action="store_true", help="tiny shapes, to try the program out")
    add("--eager", action="store_true", help="without compiling")
    add(
        "--lenient",
        action="store_true",
        help="also measure steps that torch does not make a CUDA graph of",
    )
    args = parser.parse_args(argv)
    args.device = args.device or pick_device(None)
    if args.device.type != "cuda" and not args.tiny:
        raise ValueError("needs a CUDA device; --device cpu --tiny tries the program out on a CPU")
    if not args.measurements:
        raise ValueError(f"name a measurement: {names}")
    return args


def main() -> None:
    with exit_on_error():
        run(parse_args())


if __name__ == "__main__":
    main()
