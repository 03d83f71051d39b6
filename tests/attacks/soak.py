"""Hours of random requests to engines that live on, every answer compared with a fresh process's.

    python -m tests.attacks.soak [--minutes 60] [--requests N] [--seed 0] [--engines NAME ...]
    [--write FILE]

    ENGINES         engines by their flags: compiled and eager, single and batched, with four kinds
                    of drafts
    random_request  texts in a batch, or the turns of a chat; sampling, budgets, stop strings,
                    interrupts
    serve           a request through the program's own text loop and chat, with its interrupts
    repeat          the same in a process that never served another: what differs
    soak, verdict   both sides for so long; did memory, files and threads stay where they were?

The engines are built and compiled once. Then the process forks: the child serves request after
request, as somebody's server would for a night, and the parent, which never serves any, forks a
fresh process for each of them, which serves that one alone and must decide the same tokens, bit for
bit. A real signal interrupts some answers at any moment; what was decided until then must be where
the fresh process's answer begins, and what comes afterwards must be as if the answer had been ended
there by hand. Compiling anything after the fork is an error. Each process has one thread, or forks
would not be safe. What this cannot show: leaks slower than the noise of a process's memory, GPUs,
other models.
"""

import contextlib
import io
import itertools
import json
import multiprocessing
import os
import random
import signal
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks.record import record
from cli.answers import RowAnswer
from cli.chat import chat
from cli.errors import exit_on_error
from cli.flags import Parser, positive
from cli.flags import parse_args as generate_options
from cli.prompts import Prompt, Row
from cli.running import run_interruptibly
from decoding.costs import Costs
from decoding.engine import Engine
from decoding.errors import UserError
from decoding.runner import padded_length
from decoding.sampling import FILTERED, GREEDY, PLAIN, Sampling
from drafts.base import Drafter
from drafts.registry import draft_source
from generate import LLM
from loading.target import Target, load_target, pick_device
from loading.tokenizer import Tokenizer
from weights.walker import pack_model

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "checkpoints"
DRAFT = f"--draft_checkpoint {DEMO / 'demo-draft'}"
CONTEXT = 512
ENGINES = {
    "plain": "--compile",
    "drafted": f"--compile {DRAFT} --speculate_k 4",
    "batch": "--compile --batch_size 4",
    "eager": "",
    "ngram": "--draft ngram",
    "layers": "--draft layers:0-2 --speculate_k 3",
    "self": "--draft quantized:int4-g32 --dtype float32",
    "auto": f"{DRAFT} --speculate_k auto",
    "drafted batch": f"--batch_size 3 {DRAFT}",
    "ngram batch": "--batch_size 4 --draft ngram:2 --dtype float16",
    "int8": f"--quantize int8 {DRAFT} --draft_quantize int8",
}
# What `auto` goes by, in place of measurements, which differ from process to process: it drafts for
# some texts only.
COSTS = Costs(1.0, {k: 0.45 * k for k in Drafter.auto_k}, dict.fromkeys(Drafter.auto_k, 1.15))

SAMPLINGS = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.3},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.5, "min_p": 0.1},
    {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "min_p": 0.02},
)
PATIENCE_S = 300  # a fresh process that takes longer hangs
GROWTH_MB, GROWTH = 16, 0.02  # memory is flat when it grew by no more than this much, or this share
# --------------------------------------------------------------------------------------- requests


@dataclass
class Request:
    """What somebody asks of an engine: texts to continue together, or the turns of a chat, one
    after the other."""

    engine: str
    texts: list[str]
    sampling: dict
    new: list[int]  # tokens of each row; of each turn, the first number
    seed: int
    chat: bool = False
    stop: list[str] = field(default_factory=list)
    # seconds after which each answer is interrupted
    interrupts: list[float | None] = field(default_factory=list)


@dataclass
class Answer:
    """What one call of LLM.run gave, by row."""

    ids: list[list[int]]
    texts: list[str]
    interrupted: bool = False
    error: str | None = None


def random_request(draw: random.Random, name: str, rows: int, words: list[str]) -> Request:
    def text(most: int = 150) -> str:
        if draw.random() < 0.05:
            return "".join(chr(draw.randrange(33, 0x2FFF)) for _ in range(draw.randint(1, 20)))
        begin = draw.randrange(len(words))
        return " ".join(words[begin : begin + draw.randint(1, most)])

    talk = rows == 1 and draw.random() < 0.4
    if talk:
        texts = ["/reset" if draw.random() < 0.1 else text(40) for _ in range(draw.randint(1, 8))]
    else:
        texts = [text() for _ in range(rows if draw.random() < 0.7 else draw.randint(1, rows))]
    if draw.random() < 0.03:
        texts[-1] = " ".join(words * 2)  # never fits: refused, and then as if nothing had been
    new = [draw.randint(1, 60 if talk else 200)] * len(texts)
    if draw.random() < 0.5:
        new = [draw.randint(1, most) for most in new]
    return Request(
        name,
        texts,
        draw.choice(SAMPLINGS),
        new,
        draw.randrange(2**62),
        talk,
        stop=draw.sample([" the", ".", "\n", "Tim", " said"], draw.randint(1, 2))
        if draw.random() < 0.2
        else [],
        interrupts=[
            draw.uniform(0, 0.4) if draw.random() < 0.15 else None for _ in (texts if talk else [0])
        ],
    )


# ---------------------------------------------------------------------------------------- serving


def build(names: list[str]) -> dict[str, tuple[Engine, Tokenizer]]:
    """The engines, compiled for every kind of sampling. Those of equal weights share one model."""
    chosen = {name: generate_options(ENGINES[name].split()) for name in names}
    device = pick_device("cpu")
    targets = {options.model: load_target(options.model, device) for options in chosen.values()}
    drafters = {}
    for name, options in chosen.items():
        model, tokenizer = targets[options.model]
        source = draft_source(options.draft, Target(options.model))
        drafters[name] = source.load(model, tokenizer)
    models = [model for model, _ in targets.values()]
    pack_model(
        *models, *[drafter.model for drafter in drafters.values() if drafter and drafter.model]
    )
    built = {}
    for name, options in tqdm(chosen.items(), desc="engines"):
        model, tokenizer = targets[options.model]
        engine = Engine(model, options.run.batch_size, CONTEXT, options.engine, drafters[name])
        engine.planner.costs = COSTS
        warm_lengths(engine)
        for kind in (GREEDY, PLAIN, FILTERED) if engine.runner.compile else ():
            engine.warm_up(kind)
        built[name] = engine, tokenizer
    return built


@torch.inference_mode()
def warm_lengths(engine: Engine) -> None:
    """Run prompts of every length that there is: libraries keep something for each."""
    first = engine.rows(0, 1)
    runners = [first.target] + ([first.drafter.runner] if len(engine.runners) > 1 else [])
    for n in sorted({padded_length(n) for n in range(1, CONTEXT + 1)}):
        for runner in runners:
            runner.hidden(*runner.inputs(first.batch.tokens, 0, min(n, CONTEXT)))


class Recorded(LLM):
    """An LLM whose answers are kept, and interrupted: by a signal after some seconds, or where
    `before` says that they once were. From there on it goes by the text that was shown then, which
    may lack the last token's: the signal may come between the two."""

    def begin(self, interrupts: list[float | None], before: list[Answer] | None) -> None:
        self.answers: list[Answer] = []
        self.interrupts = interrupts
        self.before = before
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))

    def once(self, number: int) -> Answer | None:
        """The interrupted answer of another process that this one repeats."""
        if self.before is None or number >= len(self.before) or not self.before[number].interrupted:
            return None
        return self.before[number]

    def run(self, answers: Iterable[RowAnswer], interrupts: Collection = ()) -> Iterator[RowAnswer]:
        rows = list(answers)
        # What `auto` learned in earlier answers would choose other K, and so other sampled text.
        self.engine.planner.memories.shared.draft_length = None
        number = len(self.answers)
        kept = Answer([], [])
        self.answers.append(kept)
        once = self.once(number)
        if once is not None:
            interrupts = AfterTokens(rows, sum(map(len, once.ids)))
        seconds = self.interrupts[number] if self.before is None else None
        try:
            if seconds is not None:
                signal.setitimer(signal.ITIMER_REAL, seconds)
            yield from super().run(rows, interrupts)
            if once is not None:
                raise KeyboardInterrupt
        except UserError as error:
            kept.error = str(error)
            raise
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            kept.interrupted = once is not None or bool(interrupts)
            kept.ids = [row.ids for row in rows]
            kept.texts = [row.text for row in rows]
            if once is not None:
                for row, text in zip(rows, once.texts):
                    row.pieces = [text]


class AfterTokens(Collection):
    """Interrupts that hold something once these rows have n tokens together."""

    def __init__(self, rows: list[RowAnswer], n: int):
        self.rows = rows
        self.n = n

    def __len__(self) -> int:
        return sum(len(row.ids) for row in self.rows) >= self.n

    def __iter__(self) -> Iterator:
        return iter(())

    def __contains__(self, item: object) -> bool:
        return False


def serve(
    engine: Engine, tokenizer: Tokenizer, asked: Request, before: list[Answer] | None = None
) -> list[Answer]:
    """The answers to a request: one of a batch, or one a turn. `before`: what another process
    answered, for the places where that was interrupted."""
    llm = Recorded.from_engine(engine, tokenizer)
    llm.begin(asked.interrupts, before)
    with silence(), contextlib.suppress(UserError, KeyboardInterrupt):
        if asked.chat:
            sys.stdin = io.StringIO("".join(" ".join(text.split()) + "\n" for text in asked.texts))
            chat(llm, generate_options(chat_flags(asked)))
        else:
            rows = [row_of(llm, asked, number) for number in range(len(asked.texts))]
            list(run_interruptibly(llm, rows))
    return llm.answers


def chat_flags(asked: Request) -> list[str]:
    flags = [
        "--interactive",
        "--seed",
        str(asked.seed % 2**32),
        "--max_new_tokens",
        str(asked.new[0]),
    ]
    flags += [f"--{name}={value}" for name, value in asked.sampling.items()]
    return [*flags, "--stop", *asked.stop] if asked.stop else flags


def row_of(llm: LLM, asked: Request, number: int) -> RowAnswer:
    """An answer to one of the texts of a batch."""
    text = asked.texts[number]
    row = Row(
        Prompt(text),
        ids=llm.tokenizer.encode(text),
        max_new_tokens=asked.new[number],
        seed=asked.seed,
        sampling=Sampling(**asked.sampling),
        stop=asked.stop,
    )
    return RowAnswer(llm, row)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


# -------------------------------------------------------------------------------------- comparing


def difference(got: list[Answer], fresh: list[Answer]) -> str | None:
    """What a fresh process answers otherwise; None if nothing. Of an interrupted answer the ids
    count, and of several interrupted rows those that both have: a row whose prompt was cached gets
    its first token a step later, so that the same number of tokens may lie in other rows."""
    if len(got) != len(fresh):
        return f"{len(got)} answers, a fresh process's {len(fresh)}"
    for number, (a, b) in enumerate(zip(got, fresh)):
        for what in ("ids", "interrupted", "error") + (() if a.interrupted else ("texts",)):
            ours, theirs = getattr(a, what), getattr(b, what)
            if what == "ids" and a.interrupted and len(ours) == len(theirs) > 1:
                lengths = [min(map(len, pair)) for pair in zip(ours, theirs)]
                ours = [ids[:n] for ids, n in zip(ours, lengths)]
                theirs = [ids[:n] for ids, n in zip(theirs, lengths)]
            if ours != theirs:
                return f"answer {number}: {what} {ours!r}, a fresh process's {theirs!r}"
    return None


def repeat(engines: dict, asked: Request, got: list[Answer], say) -> None:
    """In a process that never served a request: tell the pipe `say` what comes out otherwise."""
    os.setpgrp()
    with torch.compiler.set_stance("fail_on_recompile"):
        say.send(difference(got, serve(*engines[asked.engine], asked, before=got)))


def fresh(processes, engines: dict, asked: Request, got: list[Answer]) -> str | None:
    """`repeat` in a process of its own; what is wrong, if something is."""
    hear, say = processes.Pipe(duplex=False)
    process = processes.Process(target=repeat, args=(engines, asked, got, say))
    process.start()
    say.close()
    try:
        return (
            hear.recv()
            if hear.poll(PATIENCE_S)
            else f"a fresh process found no end in {PATIENCE_S} s"
        )
    except EOFError:
        return "a fresh process failed"
    finally:
        hear.close()
        process.kill()
        process.join()


# -------------------------------------------------------------------------------------- the hours


def work(engines: dict, minutes: float, most: int | None, seed: int, words: list[str], say) -> None:
    """Serve random requests, and tell the pipe each with its answers and what the process holds by
    then."""
    os.setpgrp()  # Ctrl-C on the terminal is the parent's
    draw, end = random.Random(seed), time.monotonic() + 60 * minutes
    with torch.compiler.set_stance("fail_on_recompile"):
        for _ in itertools.count() if most is None else range(most):
            if time.monotonic() > end:
                return
            name = draw.choice(list(engines))
            asked = random_request(draw, name, engines[name][0].batch.pos.size(0), words)
            try:
                say.send((asked, serve(*engines[name], asked), holds()))
            except Exception:
                say.send((asked, traceback.format_exc(), None))
                return


def holds() -> dict[str, float]:
    """What this process has: resident megabytes, open files, threads (of Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    count = lambda name: len(os.listdir(f"/proc/self/{name}"))  # noqa: E731
    return {
        "mb": pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
        "files": count("fd"),
        "threads": count("task"),
    }


def soak(minutes: float, most: int | None, seed: int, names: list[str]) -> dict:
    """Serve for so long or so many requests, compare everything, and say what happened."""
    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1  # no pool of processes with threads that watch it
    engines, words = build(names), (DEMO / "stories.txt").read_text().split()
    processes = multiprocessing.get_context("fork")
    hear, say = processes.Pipe(duplex=False)
    worker = processes.Process(
        target=work, args=(engines, minutes, most, seed, words, say), daemon=True
    )
    worker.start()
    say.close()
    counts, held, wrong = Counter(), [], []
    start = time.monotonic()
    with tqdm(desc="requests", unit="", mininterval=10) as bar, contextlib.suppress(EOFError):
        while True:
            asked, got, now = hear.recv()
            found = (
                {"the server": got}
                if isinstance(got, str)
                else {"fresh": fresh(processes, engines, asked, got)}
            )
            wrong += [{"request": vars(asked), who: what} for who, what in found.items() if what]
            if isinstance(got, list):
                counts += counted(asked, got)
                held.append({"minute": (time.monotonic() - start) / 60, **now})
            for who, what in found.items():
                if what:
                    tqdm.write(f"{vars(asked)}\n{who}: {what}", file=sys.stderr)
            bar.update()
            bar.set_postfix(wrong=len(wrong), mb=held and round(held[-1]["mb"]))
    worker.join()
    if worker.exitcode:
        wrong.append({"the server": f"ended with {worker.exitcode}"})
    return {
        "minutes": minutes,
        "seed": seed,
        "engines": names,
        **counts,
        "wrong": wrong,
        **verdict(held),
    }


def counted(asked: Request, got: list[Answer]) -> Counter:
    return Counter(
        {
            "requests": 1,
            "answers": len(got),
            "tokens": sum(len(ids) for answer in got for ids in answer.ids),
            "turns of chats": len(got) * asked.chat,
            "batches": len(asked.texts) > 1 and not asked.chat,
            "interrupted": sum(answer.interrupted for answer in got),
            "refused": sum(answer.error is not None for answer in got),
        }
    )


def verdict(held: list[dict[str, float]]) -> dict:
    """How much of everything the process held after a tenth of the requests and at the end, and
    what has grown: memory by medians of a tenth of the requests each, files and threads by their
    largest numbers of the two halves."""
    if len(held) < 2:
        return {"grown": []}
    tenth = max(1, len(held) // 10)
    column = lambda name, part: [now[name] for now in held[part]]  # noqa: E731
    early, late = (
        statistics.median(column("mb", part))
        for part in (slice(tenth, 2 * tenth), slice(-tenth, None))
    )
    grown = ["memory"] * (late - early > max(GROWTH_MB, GROWTH * early))
    halves = slice(len(held) // 2), slice(len(held) // 2, None)
    grown += [
        name
        for name in ("files", "threads")
        if max(column(name, halves[1])) > max(column(name, halves[0]))
    ]
    every = max(1, len(held) // 60)
    series = " ".join(f"{now['minute']:.0f}:{now['mb']:.0f}" for now in held[::every])
    return {
        "mb_early": round(early, 1),
        "mb_late": round(late, 1),
        "grown": grown,
        "mb_by_minute": series,
    }


# ----------------------------------------------------------------------------------- command line


def main() -> None:
    parser = Parser(
        description="Random requests to engines that live on; every answer compared with a new"
        " process's."
    )
    add = parser.add_argument
    add("--minutes", type=float, default=60, metavar="M", help="default: 60")
    add(
        "--requests",
        type=positive,
        metavar="N",
        help="end after so many; default: no limit but the time",
    )
    add("--seed", type=int, default=0, metavar="N", help="of the requests; default: 0")
    add(
        "--engines",
        nargs="+",
        choices=ENGINES,
        default=list(ENGINES),
        metavar="NAME",
        help="default: all",
    )
    add("--write", type=Path, metavar="FILE", help="results as JSON")
    args = parser.parse_args()
    with exit_on_error():
        start = time.perf_counter()
        found = soak(args.minutes, args.requests, args.seed, args.engines)
        found["seconds"] = round(time.perf_counter() - start)
        print(json.dumps(found, indent=1, ensure_ascii=False))
        if args.write:
            record(args.write, found)
    sys.exit(1 if found["wrong"] or found["grown"] else 0)


if __name__ == "__main__":
    main()
