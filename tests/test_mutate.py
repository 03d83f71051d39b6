"""scripts/mutate.py: its list fits the code, and what it says of a mutation is so, on a tree of two small files."""

import json

import pytest
from conftest import ROOT

from scripts import mutate
from scripts.mutate import KILLED, MUTATIONS, SURVIVED, Mutation, check, measure, summary

FILES = {
    "model.py", "sampling.py", "speculative.py", "quantize.py", "tp.py", "checkpoint.py", "packed.py", "fused.py",
    "generate.py", "tokenizer.py",
}  # fmt: skip


def test_every_mutation_fits_the_code():
    """Fails when code changes under a mutation, or a test is renamed: the list must follow."""
    check(ROOT, MUTATIONS)
    assert len(MUTATIONS) >= 60 and {mutation.file for mutation in MUTATIONS} == FILES


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A function, and a test that looks at half of it."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # it needs none, and they take seconds to import
    root = tmp_path / "toy"
    (root / "tests").mkdir(parents=True)
    (root / "toy.py").write_text("def scaled(x, y):\n    return 2 * x + 3 * y\n")
    (root / "tests" / "test_toy.py").write_text(
        "from toy import scaled\n\ndef test_x():\n    assert scaled(5, 0) == 10\n\ndef test_no():\n    assert False\n"
    )
    (root / "pyproject.toml").write_text('[tool.pytest.ini_options]\npythonpath = ["."]\n')
    return root


SLIP = Mutation("x alone", "toy.py", "2 * x", "x", "test_toy.py::test_x")


def test_a_slip_is_noticed_and_another_is_not(toy, tmp_path):
    """One mutation that the test sees, one of what it does not look at; nothing changes in place."""
    before = {file: file.read_bytes() for file in toy.rglob("*") if file.is_file()}
    blind = SLIP._replace(name="y alone", old="3 * y", new="y")
    results = measure(toy, [SLIP, blind], libraries=())
    assert [result.outcome for result in results] == [KILLED, SURVIVED]
    assert {file: file.read_bytes() for file in toy.rglob("*") if file.is_file()} == before
    found = summary(results, 1.0)
    assert (found["mutations"], found["killed"], found["score"], found["survivors"]) == (2, 1, 0.5, ["y alone"])
    mutate.write(tmp_path / "found.json", results, 1.0)
    assert json.loads((tmp_path / "found.json").read_text()).items() >= found.items()


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"old": "4 * x"}, "'4 * x' stands 0 times"),
        ({"old": " * "}, "' * ' stands 2 times"),
        ({"tests": "test_toy.py::test_z"}, "there is no test tests/test_toy.py::test_z"),
        ({"tests": "test_tea.py::test_x"}, "there is no test tests/test_tea.py::test_x"),
    ],
)
def test_a_list_that_does_not_fit_is_refused(toy, changes, says):
    with pytest.raises(ValueError, match="x alone") as error:
        check(toy, [SLIP._replace(**changes)])
    assert says in str(error.value)
    with pytest.raises(ValueError, match="two mutations are called 'x alone'"):
        check(toy, [SLIP, SLIP])


def test_what_is_mutated_is_a_copy(toy, tmp_path):
    """Also while a mutation stands in it: no file of the copy is one of the original, or a link to one."""
    before = {file: file.read_bytes() for file in toy.rglob("*") if file.is_file()}
    tree = mutate.copy(toy, tmp_path / "tree")
    for file in before:
        (tree / file.relative_to(toy)).write_text("changed")
    assert {file: file.read_bytes() for file in before} == before


def test_a_test_that_fails_anyway_shows_nothing(toy):
    with pytest.raises(ValueError, match="do not pass without a mutation"):
        measure(toy, [SLIP._replace(tests="test_toy.py::test_no")], libraries=())


def test_a_mutant_without_end_is_ended(toy):
    """And the next one runs as if nothing had been."""
    runner, tests = mutate.Runner(toy, ()), ["tests/test_toy.py::test_x"]
    try:
        (toy / "toy.py").write_text("def scaled(x, y):\n    while True:\n        pass\n")
        assert runner.run(tests, 0.5) == (None, "")
        (toy / "toy.py").write_text("def scaled(x, y):\n    return 10\n")
        status, out = runner.run(tests, 60)
        assert status == 0 and "1 passed" in out
    finally:
        runner.stop()


def test_only_what_is_asked_for():
    assert {mutation.file for mutation in mutate.chosen(["tp.py"])} == {"tp.py"}
    assert [mutation.name for mutation in mutate.chosen(["broadcast left"])] == ["broadcast left out"]
    with pytest.raises(ValueError, match="--only no such slip: no mutation is called so"):
        mutate.chosen(["no such slip"])
