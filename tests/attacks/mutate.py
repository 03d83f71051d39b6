"""Do the tests notice a slip? Small mistakes drawn at random from the code, one at a time, against its fast tests.

    python -m tests.attacks.mutate [--seed 0] [--sample 20] [--only model.py ...]

    TESTS       file of the core -> the test files that must notice a mistake in it
    slips       the mistakes of one expression or statement, by kind; mutants   all of a file, as texts
    Runner      pytest in a tree, forked from a process that has the libraries in memory
    measure     the tests of the unchanged code, which must pass; then every mutant by itself

A kind of mistake: a comparison or a sign flipped, a number off by one, a term or a condition dropped, operands or
arguments swapped, branches exchanged, a statement left out. Everything happens in a temporary copy. A survivor is one
of three things: a test that is missing, code that nobody needs, or the same program in other words; a person decides.
Why no library: cosmic-ray drops no terms and swaps no operands, mutmut's trampolines do not compile, and both start
pytest anew for each mutant, which takes longer than most tests.
"""

import ast
import copy
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import namedtuple
from collections.abc import Iterator, Mapping
from pathlib import Path

from tqdm import tqdm

from cli.errors import ending_plainly
from cli.flags import Parser, positive

ROOT = Path(__file__).parents[2]
LIMIT_S = 300  # for the tests of one mutant, which may run for ever
LIBRARIES = ("torch", "hypothesis", "transformers.models.llama.modeling_llama")
TESTS = {
    "model.py": ("test_model.py", "test_engine.py"),
    "decoding/sampling.py": ("test_sampling.py",),
    "generate.py": ("test_generate.py", "test_engine.py", "test_speculative.py"),
    "speculative.py": ("test_speculative.py",),
    "tp.py": ("test_tp.py",),
    "weights/formats.py": ("test_quantize.py",),
    "loading/checkpoint.py": ("test_checkpoint.py", "test_model.py"),
    "loading/tokenizer.py": ("test_tokenizer.py",),
}
PAIRS = (
    "Lt LtE, Gt GtE, Eq NotEq, Is IsNot, In NotIn, Add Sub, Mult Div, FloorDiv Mod, LShift RShift, BitAnd BitOr, And Or"
)
OTHER = {}  # what each operator is mistaken for
for one, other in ((getattr(ast, name) for name in pair.split()) for pair in PAIRS.split(", ")):
    OTHER |= {one: other, other: one}
ONE_WAY = (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.MatMult, ast.LShift, ast.RShift)  # a - b is not b - a
SAID = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)  # messages and imports stay as they are
Mutant = namedtuple("Mutant", "file line kind old new text")  # text: of the whole file

# ---------------------------------------------------------------------------------------------- mistakes


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
        case ast.Call(args=[ast.Name() | ast.Attribute() as first, ast.Name() | ast.Attribute() as second, *rest]):
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
    """Every mistake that still parses as another program, by its place."""
    text = (root / file).read_text(encoding="utf-8")
    tree = ast.parse(text)
    starts, same, found = [0], ast.unparse(tree), []
    for line in (whole := text.encode()).split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    for node in changeable(tree):
        for kind, slip in slips(node):
            begin = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            new = ast.unparse(slip) if isinstance(node, ast.stmt | ast.Constant) else f"({ast.unparse(slip)})"
            mutated = (whole[:begin] + new.encode() + whole[end:]).decode()
            if ast.unparse(ast.parse(mutated)) != same:
                found.append(Mutant(file, node.lineno, kind, whole[begin:end].decode(), new, mutated))
    return found


# --------------------------------------------------------------------------------------------- measuring


class Runner:
    """pytest in a copy of the code, from a process that has the libraries in memory and forks for every run: importing
    them takes longer than most tests. It never imports a file of the copy before the fork."""

    SERVER = f"""
import contextlib, importlib, json, os, signal, sys
import pytest
for name in sys.argv[1:]:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
for line in sys.stdin:
    if (child := os.fork()) == 0:
        signal.alarm({LIMIT_S})
        file = os.open(os.devnull, os.O_WRONLY)
        os.dup2(file, 1), os.dup2(file, 2)
        os._exit(pytest.main(json.loads(line)))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

    def __init__(self, root: Path, tree: Path):
        self.tree = tree
        shutil.copytree(root, tree, symlinks=True, ignore=shutil.ignore_patterns(".*", "__pycache__", "build"))
        # No compiled files: two texts of one length, written within a second, would be taken for the same.
        env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [sys.executable, "-c", self.SERVER, *LIBRARIES]
        self.process = subprocess.Popen(command, cwd=tree, env=env, start_new_session=True, **pipes)

    def passes(self, tests: tuple[str, ...]) -> bool:
        arguments = ["-x", "-q", "-p", "no:cacheprovider", *(f"tests/{test}" for test in tests)]
        self.process.stdin.write(json.dumps(arguments) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline()) == 0

    def stop(self) -> None:
        """With whatever it has started."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


def measure(root: Path, chosen: list[Mutant], tests: Mapping[str, tuple[str, ...]]) -> dict:
    """The summary with every survivor. ValueError where tests fail without a mistake."""
    start, survivors = time.perf_counter(), []
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        runner = Runner(root, Path(folder) / "tree")
        try:
            for file in dict.fromkeys(mutant.file for mutant in chosen):
                if not runner.passes(tests[file]):
                    raise ValueError(f"{file}: its tests do not pass without a mistake: {' '.join(tests[file])}")
            for mutant in tqdm(chosen, desc="mutants"):
                (runner.tree / mutant.file).write_text(mutant.text, encoding="utf-8")
                if runner.passes(tests[mutant.file]):
                    survivors.append(mutant[:-1])
                shutil.copy(root / mutant.file, runner.tree / mutant.file)
        finally:
            runner.stop()
    return {"mutants": len(chosen), "survivors": survivors, "seconds": round(time.perf_counter() - start)}


def main() -> None:
    parser = Parser(description="Do the tests notice small mistakes that are put into the code?")
    add = parser.add_argument
    add("--seed", type=int, default=0)
    add("--sample", type=positive, default=20, metavar="N", help="mutants of each file; default: 20")
    add("--only", nargs="+", choices=TESTS, default=list(TESTS), metavar="FILE", help="only these")
    args = parser.parse_args()
    with ending_plainly():
        chosen = []
        for file in args.only:
            every = mutants(ROOT, file)
            chosen += random.Random(f"{args.seed} {file}").sample(every, min(args.sample, len(every)))
        found = measure(ROOT, chosen, TESTS)
        for one in found["survivors"]:
            print("{}:{}: {}: {} -> {}".format(*one))
        print(f"{found['mutants'] - len(found['survivors'])} of {found['mutants']} killed in {found['seconds']} s")


if __name__ == "__main__":
    main()
