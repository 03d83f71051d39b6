"""Five forks by docs/fork.md's recipes, one of each kind, applied to a copy of the project: the
tests that know of lists pass on it, and so does what each fork brings, which runs the conformance
kit.

    drafter.diff    Medusa's heads on the target's last state, in a folder
    family.diff     tests for examples/k2_horizon.diff, a family that transformers does not have
    format.diff     weights of -scale, 0 and scale
    cache.diff      the keys of a window in a ring, which marks empty places
    rule.diff       typical acceptance, which is not lossless
"""

import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT
from test_rooms import copy_without

DIFFS = (
    "examples/k2_horizon.diff",
    *(f"tests/forks/{name}.diff" for name in ("drafter", "family", "format", "cache", "rule")),
)
OWN = ("medusa", "k2_horizon", "ternary", "ring", "typical")
# Those that fail where a list of drafters, families, formats, caches or rules grows.
LISTS = ("config", "caches", "drafts", "flags", "model", "quantize")


@pytest.fixture(scope="module")
def fork(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forks") / "quickdraft"
    copy_without(folder, [])
    for diff in DIFFS:
        text = (ROOT / diff).read_text()
        done = subprocess.run(
            ["patch", "-p1", "--no-backup-if-mismatch"],
            cwd=folder,
            input=text,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{diff}: {done.stdout}"
    return folder


def run_tests(folder, names) -> subprocess.CompletedProcess:
    files = [f"tests/test_{name}.py" for name in names]
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", *files]
    # Not the environment of this run's own worker.
    env = {name: x for name, x in os.environ.items() if not name.startswith("PYTEST")}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def test_the_page_shows_lines_of_a_fork():
    page = (ROOT / "docs" / "fork.md").read_text()
    (code,) = re.findall(r"```py\n(.*?)```", page, re.DOTALL)
    diff = (ROOT / "tests" / "forks" / "drafter.diff").read_text()
    added = [line[1:] for line in diff.splitlines(keepends=True) if line.startswith("+")]
    assert code in "".join(added)


@pytest.mark.attack
def test_forks_pass_their_own_tests(fork):
    done = run_tests(fork, OWN)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout


@pytest.mark.attack
@pytest.mark.parametrize("name", LISTS)
def test_forks_pass_the_tests_that_know_of_lists(name, fork):
    done = run_tests(fork, [name])
    assert done.returncode == 0, done.stdout[-3000:]
