"""How much the code does, and how densely. Whoever deletes lowers the bounds.

How it is counted. Python's own `ast` splits a file into nodes; only expressions and statements
count, and neither annotations nor docstrings do. `total += price * n` is one statement and six
expressions: the product, its two names and its result, and so on. So a node is the same amount of
meaning however it is laid out, which a line is not, and only less logic makes fewer of them.
A code line is a line that is not blank, a comment or a docstring. Nodes per code line say how much
a reader must take in at once: nanochat has 5.5, gpt-fast 4.8, nano-vllm 4.5, mlx-lm 4.2.
Packed places are those where several things share a line: `a, b = x, y` that is no swap, a
conditional expression inside another, and a tuple, `x and f()`, `f() if c else g()` or a
comprehension that stands alone as a statement. Complexity is one more than the branches of a
function: if, for, while, except, and, or, conditional expressions, comprehensions, match cases.
"""

import ast
import io
import tokenize
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import ROOT

pytestmark = pytest.mark.house
ROOT_FILES = ("generate.py", "model.py", "speculative.py", "quantize.py", "tp.py")
ROOMS = ("cli", "decoding", "drafts", "exact", "loading", "weights")
PRODUCT = [
    *(ROOT / name for name in ROOT_FILES),
    *(file for room in ROOMS for file in sorted((ROOT / room).rglob("*.py"))),
]
SCRIPTS = sorted((ROOT / "scripts").rglob("*.py"))

MAX_NODES = 76_209
MAX_DENSITY = 5.1
MAX_ROOT_DENSITY = 5.5
MAX_FILE_DENSITY = 6.5
MAX_PACKED = 10
MAX_COMPLEXITY = 15
MAX_PARAMETERS = 8
MAX_COLUMNS = 100

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BRANCHES = (
    ast.If,
    ast.IfExp,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.ExceptHandler,
    ast.match_case,
)
LAYOUT = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


class Density(NamedTuple):
    nodes: int
    code_lines: int

    @property
    def ratio(self) -> float:
        return self.nodes / max(self.code_lines, 1)


def all_arguments(function: ast.FunctionDef) -> list[ast.arg]:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return named + [each for each in (arguments.vararg, arguments.kwarg) if each is not None]


def num_nodes(source: str) -> int:
    """Expressions and statements of a file, without annotations."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS):
            node.returns = None
            for argument in all_arguments(node):
                argument.annotation = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(0)
    return sum(isinstance(node, ast.expr | ast.stmt) for node in ast.walk(tree))


def num_code_lines(source: str) -> int:
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_constant and isinstance(node.value.value, str):
            docstrings |= set(range(node.lineno, node.end_lineno + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def density(files: list[Path]) -> Density:
    sources = [file.read_text() for file in files]
    return Density(sum(map(num_nodes, sources)), sum(map(num_code_lines, sources)))


def is_packed_assignment(node: ast.Assign) -> bool:
    """Is it `a, b = x, y`, and no swap? A value that its targets mention makes it one."""
    target = node.targets[0]
    if not (isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)):
        return False
    names = {ast.unparse(element) for element in target.elts}
    values = {ast.unparse(element) for element in node.value.elts}
    if names & values:
        return False
    return not (len(names) == 2 and any(value in " ".join(names) for value in values))


def packed_places(source: str) -> list[int]:
    """Lines that pack several things."""
    lines = []
    alone = (ast.Tuple, ast.BoolOp, ast.IfExp, ast.ListComp, ast.SetComp, ast.DictComp)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign):
            is_packed = is_packed_assignment(node)
        elif isinstance(node, ast.IfExp):
            parts = (node.test, node.body, node.orelse)
            inner = (child for part in parts for child in ast.walk(part))
            is_packed = any(isinstance(child, ast.IfExp) for child in inner)
        else:
            is_packed = isinstance(node, ast.Expr) and isinstance(node.value, alone)
        if is_packed:
            lines.append(node.lineno)
    return sorted(lines)


def complexity(function: ast.AST) -> int:
    branches = 1
    for node in ast.walk(function):
        if isinstance(node, ast.BoolOp):
            branches += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            branches += 1 + len(node.ifs)
        else:
            branches += isinstance(node, BRANCHES)
    return branches


def functions(file: Path) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, FUNCTIONS)]


def place(file: Path, line: int) -> str:
    return f"{file.relative_to(ROOT)}:{line}"


def test_the_count_is_what_its_text_says():
    source = '"""Doc."""\n\n# comment\ntotal: int = f(1)\nif a and b:\n    c, d = 1, 2\n'
    # The docstring 2; the assignment 6 with the 0 of its annotation; the `if` 4; its body 7.
    assert num_nodes(source) == 2 + 6 + 4 + 7
    assert num_code_lines(source) == 3
    assert packed_places(source) == [6] and packed_places("a, b = b, a\n") == []
    assert packed_places("x = a if b else c if d else e\nf() if a else g()\na and f()\n") == [
        1,
        2,
        3,
    ]
    function = "def f(a, *, b):\n    return [i for i in a if i and b] if a else None\n"
    assert complexity(ast.parse(function)) == 5
    assert [argument.arg for argument in all_arguments(ast.parse(function).body[0])] == ["a", "b"]


def test_the_product_is_small():
    assert density(PRODUCT).nodes <= MAX_NODES


def test_no_line_does_much():
    whole = density(PRODUCT)
    assert whole.ratio <= MAX_DENSITY, whole
    for name in ROOT_FILES:
        assert density([ROOT / name]).ratio <= MAX_ROOT_DENSITY, name
    for file in [*PRODUCT, *SCRIPTS]:
        assert density([file]).ratio <= MAX_FILE_DENSITY, file


def test_few_places_are_packed():
    places = [place(file, line) for file in PRODUCT for line in packed_places(file.read_text())]
    assert len(places) <= MAX_PACKED, places


@pytest.mark.parametrize("files", [PRODUCT, SCRIPTS], ids=["product", "scripts"])
def test_functions_are_simple(files):
    for file in files:
        for function in functions(file):
            where = place(file, function.lineno)
            arguments = function.args.args + function.args.kwonlyargs
            names = [argument.arg for argument in arguments if argument.arg not in ("self", "cls")]
            assert len(names) <= MAX_PARAMETERS, where
            assert complexity(function) <= MAX_COMPLEXITY, where


def test_lines_fit_a_page_and_the_formatter_sees_them_all():
    for file in ROOT.rglob("*.py"):
        if ".venv" in file.parts or "build" in file.parts:
            continue
        for number, line in enumerate(file.read_text().splitlines(), start=1):
            assert len(line) <= MAX_COLUMNS, place(file, number)
            for pragma in ("skip", "off"):
                assert f"fmt: {pragma}" not in line, place(file, number)
