"""Measure quickdraft on one GPU in ten minutes: `python -m benchmarks.bench_gpu --output DIR
--gptfast DIR`.

    formats       the demo's tokens, next to those of a CPU; then a decode step and a verification
                  of six rows in every format, some layers of the shape, beside gpt-fast
    options       what each of Inductor's options is worth, and a longer context
    headline      all layers, beside gpt-fast and transformers
    speculation   8B and 1B in int4, acceptance set by construction: speed-up, and measured over
                  predicted

Each program is a process of its own (gpu_programs.py). All programs of a stage compile at once, and
a lock on a file gives the GPU to one at a time. Those that are ready by the stage's share of
--minutes are measured in turn, each round behind the read bandwidth. Weights are random.

DIR/rows.jsonl gets a line as soon as something is known, so that a run that is cut off leaves what
it has; DIR/results.json has the figures of every finished stage, and DIR/log.txt the errors. A
failure, or a step whose logits are wrong (gpu_step.py), is the row "….correct" with value 0 and the
reason as its note; the other programs go on. Nothing needs git, a network or a package index.
"""

import argparse
import importlib.util
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu_programs import LOCK
from benchmarks.pipes import Worker, WorkerFailed
from benchmarks.record import list_of, one_of, publish, ratios, row
from benchmarks.shapes import GPU_SHAPES, K
from cli.errors import exit_on_error
from cli.flags import Parser, positive
from decoding.errors import UserError
from loading.target import pick_device
from weights.compiling import GPU_OPTIONS
from weights.schemes import SCHEMES

FORMATS = "bf16,int8,int4-g32,fp8,mxfp6"
GPTFAST_FORMATS = ("bf16", "int8", "int4-g32")
HEADLINE_FORMATS = ("bf16", "int8")
ALPHAS = (0.8, 0.5, 0.95)
LONG_CONTEXT = 8000
ANSWER_S = 90.0  # for one measurement, after waiting for the others
MAX_LOG = 20_000  # characters of a worker's stderr

# Inductor's options, and where each may matter: (format, drafted tokens). Each is switched to what
# the project does not choose.
OPTIONS = {
    "triton.enable_pdl": [("bf16", 0)],
    "triton.native_matmul": [("bf16", K), ("int8", K), ("fp8", K)],
    "split_reductions": [("mxfp6", 0), ("mxfp6", K)],
    "coordinate_descent_tuning": [("int8", 0), ("int8", K)],
}
DEFAULTS = {"split_reductions": True}  # of Inductor; the others are off


class Measured(NamedTuple):
    """A program that is ready, and what it answered in each round."""

    facts: dict
    answers: list[dict]

    def seconds(self, k: int) -> list[float]:
        """Seconds of a step (0), or of a verification of k tokens, by round."""
        return [answer[str(k)] for answer in self.answers]


class Session:
    """The processes, the clock and the files of a run."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.started = time.monotonic()
        self.workers: dict[str, Worker] = {}
        self.measured: dict[str, Measured] = {}
        self.bandwidths: list[float] = []  # of the last stage, by round
        self.machine: str | None = None
        args.output.mkdir(parents=True, exist_ok=True)
        self.lock = (args.output / "lock").resolve()

    def seconds_left(self, share: float = 1.0) -> float:
        """Until this share of --minutes is over."""
        return self.started + share * 60 * self.args.minutes - time.monotonic()

    def log(self, event: str, **fields) -> None:
        """Append a line to rows.jsonl, which stays if this process is killed."""
        line = {"s": round(time.monotonic() - self.started, 1), "event": event} | fields
        with open(self.args.output / "rows.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def publish(self, rows: list[dict]) -> None:
        for r in rows:
            self.log("row", **r)
        if rows:
            publish(rows, self.args.output / "results.json", self.machine, self.args.commit)

    # -------------------------------------------------------------------------------- programs

    def start(self, name: str, program: str, **fields) -> None:
        """Start a program, which loads and compiles next to the others."""
        args = self.args
        spec = {
            "program": program,
            "device": str(args.device),
            "tiny": args.tiny,
            "eager": args.eager,
            "lenient": args.lenient,
            "shape": args.shape,
            "filled": args.filled,
            "layers": args.layers,
            "steps": args.steps,
            "rounds": args.rounds,
            "gptfast": args.gptfast and str(args.gptfast.resolve()),
        }
        env = {LOCK: str(self.lock), "TORCHINDUCTOR_COMPILE_THREADS": str(args.compile_threads)}
        self.workers[name] = Worker("benchmarks.gpu_programs", json.dumps(spec | fields), env=env)
        self.workers[name].send(method="facts")

    def start_steps(self, name: str, format: str, ks: Sequence[int] = (0, K), **fields) -> None:
        fields = {"options": {}} | fields
        self.start(name, "steps", format=format, ks=list(ks), **fields)

    def start_peer(self, peer: str, format: str, **fields) -> None:
        self.start(f"{peer}.{format}", "peer", peer=peer, format=format, **fields)

    def wait(self, share: float) -> None:
        """Wait until all programs are ready or this share of the time is over."""
        pending = [name for name in self.workers if name not in self.measured]
        while pending:
            for name in list(pending):
                is_late = self.seconds_left(share) < 0
                if not is_late and not self.workers[name].has_answer(0.1):
                    continue
                pending.remove(name)
                facts = self.answer(name, 0.0 if is_late else None)
                if facts is not None:
                    self.measured[name] = Measured(facts, [])
                    self.log("ready", name=name, **facts)

    def answer(self, name: str, timeout_s: float | None) -> dict | None:
        """A program's answer to its last request; None if there is none, and then the program is
        ended."""
        worker = self.workers[name]
        try:
            return worker.receive(timeout_s)
        except WorkerFailed as error:
            self.workers.pop(name)
            self.measured.pop(name, None)
            self.log("failed", name=name, error=str(error))
            self.publish([failure(self.id(name), worker.failure)])
            worker.close()
            stderr = Path(worker.stderr.name)
            text = stderr.read_text(errors="replace")[-MAX_LOG:]
            stderr.unlink()
            with open(self.args.output / "log.txt", "a") as file:
                file.write(f"== {name}\n{text}\n")
            return None

    def call(self, name: str, timeout_s: float, **request) -> dict | list | None:
        self.workers[name].send(**request)
        return self.answer(name, timeout_s)

    def measure(self, names: Sequence[str], share: float = 1.0) -> dict[str, Measured]:
        """Rounds of these programs in turn, behind the read bandwidth. The programs that answered
        every round, with their answers."""
        self.bandwidths = []
        ready = {
            name: Measured(self.measured[name].facts, []) for name in names if name in self.measured
        }
        for number in range(self.args.rounds):
            if number and self.seconds_left(share) < 0:
                break
            bandwidth = self.call("bandwidth", ANSWER_S, method="measure")
            if bandwidth is None:
                break
            self.bandwidths.append(bandwidth["bandwidth"])
            for name in list(ready):
                answer = self.call(name, ANSWER_S, method="measure")
                if answer is None:
                    del ready[name]
                    continue
                ready[name].answers.append(answer)
                self.log("round", name=name, number=number, seconds=answer, **bandwidth)
        return {name: measured for name, measured in ready.items() if measured.answers}

    def profile(self, names: Sequence[str]) -> None:
        """The kernels of a step of these programs, in rows.jsonl alone."""
        for name in names:
            if name in self.measured and self.seconds_left() > 20:
                self.log("profile", name=name, kernels=self.call(name, ANSWER_S, method="profile"))

    def names(self) -> list[str]:
        """The programs that are measured in rounds, ready or not."""
        return [name for name in self.workers if name not in ("tokens", "bandwidth", "spec")]

    def close(self, *kept: str) -> None:
        """End all programs but these."""
        for name in [name for name in self.workers if name not in kept]:
            worker = self.workers.pop(name)
            self.measured.pop(name, None)
            worker.process.kill()  # it may still compile
            worker.close()

    # ------------------------------------------------------------------------------------ rows

    def id(self, name: str) -> str:
        """SHAPE.NAME, or SHAPE.Nlayers.NAME where not all layers run."""
        if name.startswith(("tokens", "spec", "bandwidth")):
            return name
        infix = f".{self.args.layers}layers" if self.args.layers else ""
        return f"{self.args.shape}{infix}.{name}"

    def step_rows(self, name: str, ready: dict[str, Measured]) -> list[dict]:
        """The rows of a program of this project, next to the others that are ready."""
        measured = ready[name]
        facts = measured.facts
        id = self.id(name)
        step_s = measured.seconds(0)
        num_bytes = facts["bytes"]
        bandwidth = f"read bandwidth {statistics.median(self.bandwidths) / 1e9:.0f} GB/s"
        note = f"{num_bytes / 1e9:.3f} GB a step; {bandwidth}"
        error = f"logits off by {facts['error']:.2g} of their size"
        allowed = f"{facts['allowed_error']:.2g} allowed"
        shares = ratios([num_bytes / s for s in step_s], self.bandwidths)
        tuned = "with tuning, while other programs compile"
        rows = [
            row(f"{id}.tok_s", [1 / s for s in step_s], "tok/s", note),
            row(f"{id}.step_ms", [1e3 * s for s in step_s], "ms", note),
            row(f"{id}.of_read_bandwidth", shares, "ratio", note),
            row(f"{id}.compile_s", [facts["compile_s"]], "s", tuned),
            row(f"{id}.correct", [1.0], "", f"{error}, {allowed}"),
        ]
        if all(str(K) in answer for answer in measured.answers):
            verify = ratios(measured.seconds(K), step_s)
            paid = "6 rows over 1, as --fixed_width_steps pays"
            rows.append(row(f"{id}.verify6_over_1", verify, "ratio", paid))
        if "bf16" in ready:
            gain = ratios(ready["bf16"].seconds(0), step_s)
            rows.append(row(f"{id}.vs_bf16", gain, "ratio", note))
        for peer in ("gptfast", "transformers"):
            if f"{peer}.{name}" in ready:
                peer_s = ready[f"{peer}.{name}"].seconds(0)
                rows.append(row(f"{id}.vs_{peer}", ratios(peer_s, step_s), "ratio", note))
                rows.append(row(f"{id}.{peer}.tok_s", [1 / s for s in peer_s], "tok/s", note))
        return rows


def failure(id: str, reason: str) -> dict:
    return row(f"{id}.correct", [0.0], "", reason)


# ----------------------------------------------------------------------------------------- stages


def measure_formats(session: Session) -> None:
    args = session.args
    session.start("tokens", "tokens")
    for format in args.formats:
        session.start_steps(format, format)
        if args.gptfast and format in GPTFAST_FORMATS:
            session.start_peer("gptfast", format)
    session.wait(0.4)
    if "tokens" in session.measured:
        ways = session.measured["tokens"].facts
        session.publish([token_row(way, agrees) for way, agrees in ways.items()])
    ready = session.measure(session.names(), 0.45)
    for format in args.formats:
        if format in ready:
            session.publish(session.step_rows(format, ready))
    session.profile(args.formats)
    session.close("bandwidth", *args.formats)


def token_row(way: str, agrees: bool | str) -> dict:
    """Are the GPU's greedy tokens those of a CPU?"""
    note = "greedy tokens of the demo in float32 are a CPU's"
    if agrees is not True:
        note = agrees or "other tokens than a CPU's, of the demo in float32"
    return row(f"tokens.{way}.correct", [float(agrees is True)], "", note)


def measure_options(session: Session) -> None:
    """Each program next to the one with the project's own options, which `formats` leaves here."""
    formats = session.args.formats
    base = [format for format in formats if format in session.measured]
    if "formats" not in session.args.stages:
        base = formats
        for format in formats:
            session.start_steps(format, format)
    changes = {}  # name -> (format, drafted tokens, option, value)
    for option, cases in OPTIONS.items():
        value = not GPU_OPTIONS.get(option, DEFAULTS.get(option, False))
        for format, k in cases:
            if format in base:
                changes[f"{format}.{option}.rows{k + 1}"] = (format, k, option, value)
    for name, (format, k, option, value) in changes.items():
        session.start_steps(name, format, [k], options={option: value})
    long = f"bf16.filled{session.args.long}"
    if "bf16" in base:
        session.start_steps(long, "bf16", [0], filled=session.args.long)
    session.wait(0.68)
    ready = session.measure(session.names(), 0.72)
    for name, (format, k, option, value) in changes.items():
        if name in ready and format in ready:
            note = f"{option} = {value} over the project's options, {k + 1} rows; above 1: faster"
            gain = ratios(ready[format].seconds(k), ready[name].seconds(k))
            session.publish([row(f"{session.id(name)}.gain", gain, "ratio", note)])
    if long in ready:
        session.publish(session.step_rows(long, ready))
    session.close("bandwidth")


def measure_headline(session: Session) -> None:
    """All layers of the shape. A draft's models compile meanwhile."""
    args = session.args
    args.layers = None
    if "speculation" in args.stages:
        start_speculation(session)
    for format in HEADLINE_FORMATS:
        if format in args.formats:
            session.start_steps(format, format)
            if args.gptfast:
                session.start_peer("gptfast", format)
    if args.device.type == "cuda" and importlib.util.find_spec("transformers"):
        session.start_peer("transformers", "bf16")
    session.wait(0.86)
    ready = session.measure(session.names(), 0.89)
    for format in HEADLINE_FORMATS:
        if format in ready:
            session.publish(session.step_rows(format, ready))
    session.close("bandwidth", "spec")


def start_speculation(session: Session) -> None:
    session.start("spec", "speculation", layers=None)


def measure_speculation(session: Session) -> None:
    if "spec" not in session.workers:
        start_speculation(session)
    session.wait(0.93)
    values = []
    for alpha in ALPHAS:
        if "spec" not in session.measured or session.seconds_left() < 5:
            break
        rows = session.call("spec", session.seconds_left(), method="rows", alpha=alpha) or []
        values += [r["value"] for r in rows if r["id"].endswith("measured_over_predicted")]
        session.publish(rows)
    if values:
        note = "all acceptances that were measured"
        session.publish([row("spec.measured_over_predicted", values, "ratio", note)])


STAGES: dict[str, Callable[[Session], None]] = {
    "formats": measure_formats,
    "options": measure_options,
    "headline": measure_headline,
    "speculation": measure_speculation,
}


# ----------------------------------------------------------------------------------- command line


def run(args: argparse.Namespace) -> None:
    session = Session(args)
    try:
        session.start("bandwidth", "bandwidth")
        session.wait(1.0)
        facts = session.measured["bandwidth"].facts if session.measured else {}
        session.machine = facts.get("gpu")
        for name, measure in STAGES.items():
            if name in args.stages and session.seconds_left() > 0:
                measure(session)
        session.log("end")
    finally:
        session.close()
        session.lock.unlink(missing_ok=True)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(description="Measure quickdraft on one GPU in ten minutes.")
    add = parser.add_argument
    names = ", ".join(STAGES)
    commas = "with commas between; default: %(default)s"
    add(
        "stages",
        nargs="*",
        type=one_of("stage", STAGES),
        metavar="STAGE",
        help=f"any of {names}; default: all",
    )
    add("--output", type=Path, metavar="DIR", help="for rows.jsonl, results.json and log.txt")
    add("--gptfast", type=Path, metavar="DIR", help="a gpt-fast checkout, to compare with")
    add(
        "--minutes",
        type=float,
        default=9.2,
        metavar="M",
        help="end after M minutes; default: %(default)s",
    )
    add(
        "--formats",
        type=list_of("format", ["bf16", *SCHEMES]),
        default=FORMATS,
        help=f"bf16 and schemes, {commas}",
    )
    add(
        "--shape",
        type=one_of("shape", GPU_SHAPES),
        default="8b",
        help=f"one of {', '.join(GPU_SHAPES)}; default: %(default)s",
    )
    add(
        "--layers",
        type=positive,
        default=8,
        help="layers of the shape before `headline`; default: %(default)s",
    )
    add("--rounds", type=positive, default=3, help="of every stage; default: %(default)s")
    add(
        "--steps",
        type=positive,
        default=24,
        help="steps of every program a round; default: %(default)s",
    )
    add(
        "--filled",
        type=positive,
        default=100,
        help="positions that a step attends to; default: %(default)s",
    )
    add("--commit", metavar="TEXT", help="the commit, for a checkout without git")
    add(
        "--compile_threads",
        type=positive,
        default=4,
        help="of every program; default: %(default)s",
    )
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
        raise UserError("needs a CUDA device; --device cpu --tiny tries the program out on a CPU")
    if args.output is None:
        raise UserError("--output DIR: name a folder for the results")
    args.eager = args.eager or args.device.type == "cpu"
    args.stages = args.stages or list(STAGES)
    args.long = LONG_CONTEXT
    if args.tiny:
        args.layers, args.long = 1, 2 * args.filled
    return args


def main() -> None:
    with exit_on_error():
        run(parse_args())


if __name__ == "__main__":
    main()
