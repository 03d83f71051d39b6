"""Do the tests notice a slip? Small mistakes drawn at random from the code, one at a time, against
its fast and slow tests.

    python -m tests.attacks.mutate [--sample N | all] [--only FILE ...] [--minutes M] [--write
    benchmarks/mutation.json]

    TESTS       file of the product -> the fast tests that must notice a mistake in it, the
                likeliest first
    slips       the mistakes of one expression or statement, by kind; mutants   all of a file, as
                texts
    Runner      pytest in a tree, forked from a process that has the libraries in memory; tests that
                were fast go first
    measure     every mutant by itself, in one of several trees; before a first one its tests. A
                file whose tests do not pass then is untestable, and no mutants of it are tried

A kind of mistake: a comparison or a sign flipped, a number off by one, a term or a condition
dropped, operands or arguments swapped, branches exchanged, a statement left out. Everything happens
in temporary copies. Every file has one mutant tried, then every file a second one, and so on: a run
may stop at any time. The results are written after every mutant. A survivor is one of three things:
a test that is missing, code that nobody needs, or the same program in other words; a person
decides. A mutant is killed, too, by tests that take five times as long, or by a lack of memory. Why
no library: cosmic-ray drops no terms and swaps no operands, mutmut's trampolines do not compile,
and both start pytest anew for each mutant, which takes longer than most tests.
"""

import ast
import copy
import hashlib
import itertools
import json
import math
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tqdm import tqdm

from benchmarks.record import commit_of_checkout, record
from cli.errors import exit_on_error
from cli.flags import Parser, positive
from tests.attacks.processors import NOTHING_COMPILED

ROOT = Path(__file__).parents[2]
LIMIT_S = 900  # for the tests of the unchanged code
MAX_BYTES = 12 << 30  # of memory: a mutant may ask for any number
LIBRARIES = ("torch", "hypothesis", "transformers.models.llama.modeling_llama")
# How the names of slow tests begin, which never run here.
SLOW = """
caches::drafted_greedy_text drafts::greedy_equals drafts::a_broken_eagle drafts::sequences_have
drafts::turns_keep experts::drafts_of_sparse experts::every_matrix generate::64_greedy
grammar::grammars_come grammar::json_obeys grammar::masked prompt_cache::a_resumed
prompt_cache::newcomers prompt_cache::rows_that_begin program::a_chat_on program::a_closed_pipe
program::a_full_disk program::a_terminal program::a_whole_run program::ctrl_c program::every_program
rounding::a_kept rounding::drafted_greedy rounding::logits_are serve::a_request_for_many
serve::the_evaluation slots::in_16_bits speculative_cli::greedy_json
"""
TESTS = {
    "generate.py": "llm engine requests generate interrupts",
    "model.py": "model config engine experts generate caches -k 'not test_caches or rows_take'",
    "quantize.py": "quantize families experts -k 'quantize or calibration or gptq'",
    "cli/quantized_folder.py": "quantize families -k 'quantize or calibration'",
    "speculative.py": "speculative speculate numbers",
    "tp.py": "tp errors experts -k 'test_tp or test_errors or parts'",
    "decoding/answers.py": "llm requests prompt_cache",
    "decoding/costs.py": "report suffix speculative -k 'report or suffix or theory or auto or"
    " length'",
    "decoding/draft_length.py": "speculative report suffix hybrid",
    "decoding/meter.py": "hybrid suffix draft_memory",
    "decoding/engine.py": "engine requests generate interrupts",
    "decoding/grammar.py": "grammar -m attack",
    "decoding/kv_8bit.py": "rows_alone caches",
    "decoding/logits.py": "requests generate",
    "decoding/memory.py": "draft_memory",
    "decoding/planner.py": "hybrid speculative engine draft_memory",
    "decoding/prefill.py": "engine requests slots hybrid",
    "decoding/runner.py": "engine requests caches -k 'engine or requests or clearing or rows_take'",
    "decoding/sampling.py": "sampling requests numbers",
    "decoding/scheduler.py": "engine requests generate slots",
    "decoding/batch.py": "requests generate slots",
    "decoding/statistics.py": "report engine requests tp suffix speculative"
    " -k 'report or engine or requests or host or late or turns_keep'",
    "decoding/stop_strings.py": "stop_strings inputs",
    "decoding/validation.py": "requests inputs generate dflash -k 'not test_dflash or windows'",
    "decoding/warmup.py": "engine",
    "drafts/base.py": "speculative drafts slots",
    "drafts/dflash.py": "dflash deepspec",
    "drafts/eagle.py": "drafts -k 'eagle or config or folder or tensors or layer_ids or turns'",
    "drafts/hidden_states.py": "dflash drafts -k 'dflash or eagle_is_its_twin'",
    "drafts/published.py": "dflash drafts",
    "drafts/ngram.py": "speculative errors inputs -k 'prompt_lookup or ngram or inputs or errors'",
    "drafts/pard.py": "errors drafts -k 'errors or pard or config or folder'",
    "drafts/suffix.py": "suffix numbers",
    "drafts/vocabulary.py": "drafts -k 'strings or tokenizers or command_line or shared'",
    "exact/attention.py": "rows_alone engine rounding",
    "exact/probes.py": "rows_alone rounding",
    "exact/products.py": "rows_alone rounding",
    "weights/compiling.py": "faults",
    "weights/cpu.py": "cpu_products quantize rounding -k 'cpu_products or quantize or products or"
    " parts'",
    "weights/experts.py": "experts",
    "weights/formats.py": "fused floats cpu_products quantize tp -k 'not test_tp or slice'",
    "weights/gpu.py": "fused",
    "weights/linears.py": "cpu_products fused quantize quantized_folders rounding -k"
    " 'not test_rounding or chunks'",
    "weights/walker.py": "families quantize experts",
    "loading/adapter.py": "adapter -m attack",
    "loading/chat_messages.py": "requests tokenizer chat_templates -k 'message or arguments or"
    " template or chat'",
    "loading/chat_templates.py": "chat_templates tokenizer fuzz requests -k 'tokenizer or fuzz or"
    " template'",
    "loading/checkpoint.py": "checkpoint families floats faults tp -k 'not plan'",
    "loading/target.py": "errors program quantize -k 'errors or device or random_weights or"
    " packed'",
    "loading/models.py": "checkpoint families floats tp quantize -k 'not plan'",
    "loading/saving.py": "checkpoint families quantize faults",
    "loading/config.py": "config checkpoint families model",
    "drafts/registry.py": "errors compare suffix drafts -k 'not (broken or law or twin)'",
    "loading/families.py": "config checkpoint families model",
    "loading/files.py": "checkpoint families faults prompt_cache",
    "loading/gguf.py": "gguf",
    "loading/gguf_folder.py": "gguf",
    "loading/gguf_vocabulary.py": "gguf",
    "loading/hub.py": "hub -m 'not real'",
    "loading/quantization.py": "checkpoint floats errors quantized_folders",
    "loading/tokenizer.py": "tokenizer tekken fuzz requests",
    "loading/plain_files.py": "files tokenizer hub fuzz",
    "loading/tokenizers/base.py": "tokenizer tekken fuzz gguf",
    "loading/tokenizers/ranks.py": "tokenizer tekken fuzz gguf",
    "loading/tokenizers/sentencepiece_model.py": "tokenizer fuzz gguf",
    "loading/tokenizers/settings.py": "tokenizer fuzz gguf",
    "loading/tokenizers/tokenizer_json.py": "tokenizer fuzz gguf",
    "loading/weight_names.py": "checkpoint families floats model",
    "loading/quantized/detection.py": "floats fuzz quantized_folders",
    "loading/quantized/floats.py": "floats fuzz",
    "loading/quantized/layouts.py": "quantized_folders",
    "loading/quantized/merged_experts.py": "experts gguf",
    "loading/folder.py": "floats faults quantized_folders mlx",
    "cli/answers.py": "requests inputs program",
    "cli/chat.py": "program prompt_cache -k 'chat or message or turn or command or answer or"
    " conversation'",
    "cli/errors.py": "errors faults files tp program -k 'errors or faults or free_memory or nccl"
    " or old_torch'",
    "cli/flags.py": "flags requests errors files program",
    "cli/main.py": "requests files program",
    "cli/memory.py": "memory",
    "cli/opening.py": "errors files prompt_cache program speculative_cli"
    " -k 'errors or files or moved or random_weights or packed or gpu or generation_config or"
    " json_per_row'",
    "cli/options.py": "requests errors files program",
    "cli/output.py": "files requests program",
    "cli/page.py": "page serve -m 'attack and not browser'",
    "cli/prompt_cache.py": "prompt_cache",
    "cli/prompts.py": "requests files program",
    "cli/report.py": "report experts speculative_cli program -k 'report or bytes or count or json"
    " or statistics'",
    "cli/running.py": "prompt_cache program -k 'half_known or chat or text'",
    "scripts/serve/batches.py": "serve -m 'attack and not browser'",
    "scripts/compare.py": "compare live",
    "scripts/distill/distill_draft.py": "distill_draft draft_kinds",
    "scripts/distill/draft_kinds.py": "draft_kinds distill_draft",
    "scripts/distill/draft_start.py": "distill_draft draft_kinds",
    "scripts/distill/draft_text.py": "distill_draft draft_kinds",
    "scripts/eval_lm.py": "eval_lm -m attack",
    "scripts/serve/openai_form.py": "tool_calls responses serve -m 'not browser and not real'",
    "scripts/perplexity.py": "quantize -k perplexity",
    "scripts/serve/serve.py": "responses serve -m 'not browser and not real'",
    "scripts/tp_plan.py": "tp -k plan",
}
PAIRS = (
    "Lt LtE, Gt GtE, Eq NotEq, Is IsNot, In NotIn, Add Sub, Mult Div, FloorDiv Mod, LShift"
    " RShift, BitAnd BitOr, And Or"
)
OTHER = {}  # what each operator is mistaken for
for one, other in ((getattr(ast, name) for name in pair.split()) for pair in PAIRS.split(", ")):
    OTHER |= {one: other, other: one}
# a - b is not b - a
ONE_WAY = (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.MatMult, ast.LShift, ast.RShift)
# messages and imports stay as they are
SAID = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)
Mutant = namedtuple("Mutant", "file line kind old new text")  # text: of the whole file
# ---------------------------------------------------------------------------------------- mistakes


def slips(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """(kind, node to put in its place)."""

    def but(**changes) -> ast.AST:
        other = copy.copy(node)
        vars(other).update(changes)
        return other

    match node:
        case ast.Compare(ops=[op, *rest]) if type(op) in OTHER:
            yield "comparison", but(ops=[OTHER[type(op)](), *rest])
        case ast.Constant(value=bool(value)):
            yield "truth", but(value=not value)
        case ast.Constant(value=int(value)):
            yield "off by one", but(value=value + 1)
        case ast.Constant(value=float(value)):
            yield "number", but(value=2 * value + 1)
        case ast.BinOp(left=left, op=op, right=right):
            yield "dropped term", left
            if type(op) in OTHER:
                yield "operator", but(op=OTHER[type(op)]())
            if isinstance(op, ONE_WAY):
                yield "swapped operands", but(left=right, right=left)
        case ast.BoolOp(op=op, values=values):
            yield "operator", but(op=OTHER[type(op)]())
            yield "dropped condition", but(values=values[:-1]) if len(values) > 2 else values[0]
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert(), operand=operand):
            yield "dropped sign", operand
        case ast.IfExp(body=body, orelse=other):
            yield "exchanged branches", but(body=other, orelse=body)
        case ast.Call(
            args=[
                ast.Name() | ast.Attribute() as first,
                ast.Name() | ast.Attribute() as second,
                *rest,
            ]
        ):
            yield "swapped arguments", but(args=[second, first, *rest])
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield "left out", ast.Pass()


def changeable(node: ast.AST) -> Iterator[ast.AST]:
    """What a program does: not annotations, messages or imports."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ast.AST) and not isinstance(part, SAID):
                yield part
                yield from changeable(part)


def mutants(root: Path, file: str) -> list[Mutant]:
    """Every mistake that is another program, by its position."""
    source = (root / file).read_bytes()
    starts, results = [0], []
    for line in source.split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    for node in changeable(ast.parse(source)):
        for kind, slip in slips(node):
            begin = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            new = ast.unparse(slip)
            if new != ast.unparse(node):
                new = new if isinstance(node, ast.stmt | ast.Constant) else f"({new})"
                text = (source[:begin] + new.encode() + source[end:]).decode()
                results.append(
                    Mutant(file, node.lineno, kind, source[begin:end].decode(), new, text)
                )
    return results


# -------------------------------------------------------------------------------------- measuring


class Runner:
    """pytest in a copy of the code, from a process that has the libraries in memory and forks for
    every run: importing them takes longer than most tests. It never imports a file of the copy
    before the fork."""

    SERVER = f"""
import contextlib, gc, importlib, json, os, resource, signal, sys
from pathlib import Path
import pytest
for name in sys.argv[1:]:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
gc.collect(), gc.freeze()  # pytest collects several times
class FastFirst:
    def __init__(self, file):
        self.file, self.seconds = file, json.loads(file.read_text()) if file.exists() else {{}}
    def pytest_collection_modifyitems(self, items):
        items.sort(key=lambda item: self.seconds.get(item.nodeid, 0) > 0.5)
    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0) + report.duration
    def pytest_sessionfinish(self, exitstatus):
        if exitstatus == 0 and not self.file.exists():
            self.file.write_text(json.dumps(self.seconds))
def end(number=0, frame=None):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if number == signal.SIGTERM:
        os._exit(1)
def tick(number, frame):
    global seconds
    seconds += 1
    if seconds > limit_s:
        end()
for line in sys.stdin:
    limit_s, file, *arguments = json.loads(line)
    if (child := os.fork()) == 0:
        os.setpgid(0, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL), signal.signal(signal.SIGTERM, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_AS, ({MAX_BYTES}, {MAX_BYTES}))
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1), os.dup2(null, 2)
        os._exit(pytest.main(arguments, plugins=[FastFirst(Path(file))]))
    signal.signal(signal.SIGALRM, tick), signal.signal(signal.SIGTERM, end)
    seconds = 0
    # A while in which all this is stopped counts as one tick.
    signal.setitimer(signal.ITIMER_REAL, 1, 1)
    status = os.waitpid(child, 0)[1]
    signal.setitimer(signal.ITIMER_REAL, 0)
    end()
    print(json.dumps([status == 0, seconds]), flush=True)
"""

    def __init__(self, root: Path, tree: Path):
        self.tree = tree
        shutil.copytree(
            root, tree, symlinks=True, ignore=shutil.ignore_patterns(".*", "__pycache__", "build")
        )
        for command in ("git init --quiet", "git add ."):  # tests ask git for the list of programs
            subprocess.run(command.split(), cwd=tree, check=True)
        # No compiled files: two texts of one length, written within a second, would be taken for
        # the same. Inductor's cache is this tree's own, so that no other program reads it.
        cache = {"TORCHINDUCTOR_CACHE_DIR": f"{tree}-cache"}
        env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", **cache}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [sys.executable, "-c", self.SERVER, *LIBRARIES]
        self.process = subprocess.Popen(command, cwd=tree, env=env, start_new_session=True, **pipes)

    def run(self, tests: str, limit_s: int) -> tuple[bool, int]:
        """Whether they pass, and the seconds that they took."""
        names, dash, others = tests.partition(" -")
        words = [f"tests/test_{name}.py" for name in names.split()] + shlex.split(dash + others)
        words += [
            f"--deselect=tests/test_{name.replace('::', '.py::test_')}" for name in SLOW.split()
        ]
        options = [
            "-x",
            "-q",
            "-n0",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:anyio",
            f"--basetemp={self.tree}-files",
            "-m",
            NOTHING_COMPILED,
        ]
        # of the seconds of every test
        file = self.tree.parent / hashlib.sha256(tests.encode()).hexdigest()
        self.process.stdin.write(json.dumps([limit_s, str(file), *options, *words]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def run_mutant(self, mutant: Mutant, tests: str, limit_s: int) -> tuple[bool, int]:
        path = self.tree / mutant.file
        source = path.read_bytes()
        path.write_bytes(mutant.text.encode())
        try:
            return self.run(tests, limit_s)
        finally:
            path.write_bytes(source)

    def stop(self) -> None:
        """With the tests that run."""
        self.process.terminate()
        self.process.communicate()


def measure(
    root: Path,
    tests: Mapping[str, str],
    sample: int | None = None,
    seed: int = 0,
    workers: int = 1,
    minutes: float = math.inf,
    report: Callable[[dict], None] = lambda results: None,
) -> dict:
    """`sample` mutants of each file, by default all; results go to `report` after each. Files whose
    tests fail without a mistake are "untestable"."""
    start, lock, seconds = time.monotonic(), threading.Lock(), {}
    mutants_by_file = {file: mutants(root, file) for file in tests}
    for file, group in mutants_by_file.items():
        random.Random(f"{seed} {file}").shuffle(group)
    groups = random.Random(seed).sample(list(mutants_by_file.values()), len(tests))
    rounds = itertools.zip_longest(*(group[:sample] for group in groups))
    chosen = [mutant for mutants_of_round in rounds for mutant in mutants_of_round if mutant]
    files = {
        file: {
            "mutants": len(group),
            "seconds_of_tests": None,
            "tried": 0,
            "killed": 0,
            "survivors": [],
        }
        for file, group in mutants_by_file.items()
    }
    untestable = set()
    results = {
        "seconds": 0,
        "tried": 0,
        "killed": 0,
        "timeouts": 0,
        "untestable": [],
        "files": files,
    }
    remaining = iter(tqdm(chosen, desc="mutants"))

    def try_mutants(runner: Runner) -> None:
        while time.monotonic() - start < 60 * minutes:
            with lock:
                mutant = next(remaining, None)
            if mutant is None:
                break
            text, counts = tests[mutant.file], files[mutant.file]
            if mutant.file in untestable:
                continue
            if text not in seconds:
                passes, of_tests = runner.run(text, LIMIT_S)
                if not passes:
                    with lock:
                        untestable.add(mutant.file)
                        results["untestable"] = sorted(untestable)
                    continue
                seconds[text] = of_tests
            counts["seconds_of_tests"], limit_s = seconds[text], 5 * seconds[text] + 10
            survives, mutant_s = runner.run_mutant(mutant, text, limit_s)
            with lock:
                for totals in (results, counts):
                    totals["tried"] += 1
                    totals["killed"] += not survives
                if survives:
                    counts["survivors"].append("{1}: {2}: {3} -> {4}".format(*mutant))
                results["timeouts"] += mutant_s > limit_s
                results["seconds"] = round(time.monotonic() - start)
                report(results)

    with (
        tempfile.TemporaryDirectory(prefix="mutate-") as folder,
        ThreadPoolExecutor(workers) as pool,
    ):
        runners = [Runner(root, Path(folder) / str(number)) for number in range(workers)]
        try:
            for future in as_completed([pool.submit(try_mutants, runner) for runner in runners]):
                future.result()
        finally:
            for runner in runners:
                runner.stop()
    return results


def number_or_all(text: str) -> int | None:
    return None if text == "all" else positive(text)


def main() -> None:
    parser = Parser(description="Do the tests notice small mistakes that are put into the code?")
    add = parser.add_argument
    add("--seed", type=int, default=0)
    add(
        "--sample",
        type=number_or_all,
        default=10,
        metavar="N",
        help="mutants of each file, or all; default: 10",
    )
    add("--only", nargs="+", choices=TESTS, default=list(TESTS), metavar="FILE", help="only these")
    add(
        "--workers",
        type=positive,
        default=2,
        metavar="N",
        help="trees that run at the same time; default: 2",
    )
    add(
        "--minutes",
        type=float,
        default=math.inf,
        metavar="M",
        help="begin no mutant after so many; default: no end",
    )
    add("--write", type=Path, metavar="FILE", help="results as JSON")
    args = parser.parse_args()
    source = {"commit": commit_of_checkout(), "seed": args.seed}  # before anybody commits more

    def report(results: dict) -> None:
        if args.write:
            record(args.write, source | results)

    with exit_on_error():
        tests = {file: TESTS[file] for file in args.only}
        results = measure(ROOT, tests, args.sample, args.seed, args.workers, args.minutes, report)
        for file, counts in results["files"].items():
            for survivor in counts["survivors"]:
                print(f"{file}:{survivor}")
        for file in results["untestable"]:
            print(f"{file}: its tests do not pass without a mistake: {tests[file]}")
        print(
            "{killed} of {tried} killed, {timeouts} of them by the clock, in {seconds} s".format(
                **results
            )
        )


if __name__ == "__main__":
    main()
