"""Imports, frames, and what nobody may do. A reader may open any file alone, in an evening."""

import ast
import json
import re
import subprocess
import sys
import traceback
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import torch
from conftest import ROOT

import cli.main
from cli.flags import parse_args

FOLDERS = ("decoding", "drafts", "exact", "loading", "loading/quantized", "weights", "cli")
FILES = sorted(
    [*ROOT.glob("*.py"), *(file for folder in FOLDERS for file in (ROOT / folder).glob("*.py"))]
)
PROGRAMS = ("scripts", "benchmarks", "tests")

# What a file may know of the project, besides what these know themselves and UserError, which all
# raise. What is not listed here is free to know what it likes, as long as imports form a DAG.
EVERYWHERE = {"decoding.errors"}
KNOWS = {
    "model": set(),
    "tp": {"decoding.launcher"},
    "exact": {"exact", "model"},
    "weights": {"weights", "exact", "model"},
    "loading": {"loading", "weights", "model", "tp"},
    "decoding": {"decoding", "weights", "exact", "model", "tp"},
    "decoding.engine": {"decoding", "speculative", "drafts.base", "weights", "model", "tp"},
    "decoding.planner": {"decoding", "drafts.base"},
    "decoding.prefill": {"decoding", "speculative", "model", "tp"},
    "decoding.rule": {"decoding", "speculative"},
    "speculative": {"decoding.runner", "decoding.sampling", "decoding.validation", "model"},
    "drafts.base": {"decoding", "model"},
    "drafts": {"drafts", "speculative", "loading", "decoding", "weights", "model", "tp"},
    "generate": {"decoding", "drafts", "loading", "model", "tp"},
    "quantize": {"weights", "model"},
}


def name_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


NAMES = {name_of(file): file for file in FILES}


def imported(file: Path) -> set[str]:
    """Project files that a file imports, anywhere in its code but where it hands over as a
    program."""
    tree, found = ast.parse(file.read_text()), set()
    skipped = ("__name__", "TYPE_CHECKING")  # hands over as a program; for type checkers alone
    tree.body = [
        part
        for part in tree.body
        if not (
            isinstance(part, ast.If) and any(word in ast.unparse(part.test) for word in skipped)
        )
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name in NAMES or name.split(".")[0] in PROGRAMS}


@pytest.mark.house
def test_imports_form_a_dag():
    graph = {name: imported(file) - EVERYWHERE for name, file in NAMES.items()}
    tuple(TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle
    assert not graph["decoding.errors"]
    for name, known in graph.items():
        assert not {other for other in known if other.split(".")[0] in PROGRAMS}, (
            f"{name} imports a program"
        )
        if not name.startswith("cli"):
            assert not {other for other in known if other.startswith("cli")}, f"{name} imports cli/"
        allowed = KNOWS.get(name, KNOWS.get(name.split(".")[0]))
        if allowed is not None:
            assert all(other in allowed or other.split(".")[0] in allowed for other in known), (
                name,
                known,
            )


@pytest.mark.house
def test_model_knows_nothing_of_its_users():
    tree = ast.parse(NAMES["model"].read_text())
    code = ast.unparse(tree).replace(ast.get_docstring(tree), "")
    for word in (
        "import quantize",
        "from weights",
        "world_size",
        "torch.compile",
        "torch.distributed",
        "Sampling",
    ):
        assert word not in code, word


@pytest.mark.house
def test_nothing_is_rebound():
    """No object has a method put on it from outside, by assignment, setattr or a cloned code
    object; and code is compiled in one place."""
    compiled = []
    for name, file in NAMES.items():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    assert not (
                        isinstance(target, ast.Attribute) and target.attr in ("forward", "__call__")
                    ), name
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("setattr", "types.MethodType", "types.FunctionType"), (
                    name,
                    called,
                )
                compiled += [name] * (called == "torch.compile")
    assert compiled == ["weights.compiling"]


@pytest.mark.house
def test_eight_frames_from_main_to_attention(capsys):
    """Frames of this project, as a hook on attention sees them, its own `forward` the last. README
    names them. Products of packed matrices lie a few frames further, as many as their kernels
    take."""
    stacks: list[list[str]] = []

    def watch(module, args) -> None:
        if type(module).__name__ == "Attention":
            frames = [frame.f_code for frame, _ in traceback.walk_stack(None)][::-1]
            stack = [code.co_qualname for code in frames if Path(code.co_filename) in FILES]
            stacks.append([*stack[stack.index("main") :], "Attention.forward"])

    handle = torch.nn.modules.module.register_module_forward_pre_hook(watch)
    try:
        cli.main.main(parse_args(["--max_new_tokens", "3", "--device", "cpu"]))
    finally:
        handle.remove()
    assert max(map(len, stacks)) == 8, max(stacks, key=len)
    readme = " ".join((ROOT / "README.md").read_text().split())
    sentence = re.search(
        r"From the command line to attention in eight frames: (.*?)\. ", readme + " "
    )[1]
    assert stacks[-1] == re.findall(r"`(.+?)`", sentence)


def test_importing_the_library_changes_nothing_of_the_process():
    """Signals, streams and the environment are a program's, which sets them in its main."""
    code = """
import os, signal, sys
import torch
names = ("SIGINT", "SIGTERM", "SIGPIPE")
handlers = lambda: [signal.getsignal(getattr(signal, name)) for name in names]
state = lambda: (dict(os.environ), handlers(), sys.stdout, sys.stderr)
before = state()
import generate, model, quantize, speculative, tp
import decoding.kv_8bit, drafts.registry, loading.checkpoint, loading.tokenizer
import cli.main, cli.chat, cli.quantize, cli.start
import scripts.distill.distill_flags, scripts.serve.serve_flags
assert state() == before
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.house
def test_starting_imports_little():
    """The plain loop needs the model and sampling: no loader, tokenizer, command line, engine or
    server. The command line needs no compiler, which is half of a start's time for runs that
    compile nothing, and nothing that is for tests and scripts."""
    code = """
import json, sys
import generate
with_the_plain_loop = sorted(sys.modules)
import cli.main
print(json.dumps([with_the_plain_loop, sorted(sys.modules)]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    with_the_plain_loop, with_the_command_line = json.loads(done.stdout)
    ours = [name for name in with_the_plain_loop if name in NAMES]
    assert len(ours) <= 10
    rooms = {name.split(".")[0] for name in ours}
    assert not rooms & {"loading", "cli", "drafts", "weights", "scripts"}
    unwanted = {"torch._dynamo", "sympy", "transformers"}
    unwanted |= {"matplotlib", "lm_eval", "huggingface_hub"}
    assert not unwanted & set(with_the_command_line)
    assert done.stderr == ""
