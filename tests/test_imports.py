"""The import graph of DESIGN: a reader may open any file alone, and no file learns what it must not know."""

import ast

from conftest import ROOT

ALLOWED = {
    "model": set(),
    "tokenizer": set(),
    "sampling": set(),
    "tp": set(),
    "packed": set(),
    "fused": set(),
    "quantize": {"model", "packed", "fused"},
    "foreign": {"quantize"},
    "checkpoint": {"model", "quantize", "foreign", "tp"},
    "speculative": {"model", "sampling"},
    "generate": {
        "model", "tokenizer", "sampling", "tp", "packed", "fused", "quantize", "checkpoint", "speculative",
    },
}  # fmt: skip

# A script is an entry point, which nothing imports; only what measures shares its rounds and pictures, and what trains
# its steps.
BESIDE = {
    **{name: {"record"} for name in ("drift", "faults", "law", "mutate", "soak")},
    "bench": {"plots", "record", "tables"},
    "tables": {"plots"},
    "products": {"bench"},
    "bench_gpu": {"bench", "candidates"},
    "train_demo": {"distill_draft"},
}

# A program's own functions stand above the graph: python quantize.py reads folders and text, which import quantize.
PROGRAMS = {"quantize": ("run", "calibration_states")}


def imported(file) -> set[str]:
    names, tree = set(), ast.parse(file.read_text())
    tree.body = [part for part in tree.body if getattr(part, "name", None) not in PROGRAMS.get(file.stem, ())]
    tree.body = [part for part in tree.body if not (isinstance(part, ast.If) and "__name__" in ast.unparse(part.test))]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    return names


def test_imports_form_the_dag():
    files = {file.stem: file for file in ROOT.glob("*.py")}
    assert files.keys() <= ALLOWED.keys() and "model" in files
    for name, file in files.items():
        assert imported(file) & (ALLOWED.keys() | {"scripts"}) <= ALLOWED[name], name


def test_scripts_stand_alone_but_for_the_benchmarks():
    for file in (ROOT / "scripts").glob("*.py"):
        tree = ast.parse(file.read_text())
        froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        paths = [f"{node.module}.{alias.name}" for node in froms for alias in node.names]
        names = {path.split(".")[1] for path in paths if path.startswith("scripts.")}
        assert names <= BESIDE.get(file.stem, set()), file


def test_model_knows_nothing_of_its_users():
    source = (ROOT / "model.py").read_text()
    code = ast.unparse(ast.parse(source)).replace(ast.get_docstring(ast.parse(source)), "")
    for word in ("quantize", "world_size", "torch.compile", "torch.distributed", "Sampling"):
        assert word not in code, word
