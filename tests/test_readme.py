"""README.md promises commands: each shell block that needs neither a download nor hours runs here as it stands."""

import re
import shutil
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import ROOT

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)
SNIPPETS = [textwrap.dedent(code) for code in re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)]

# Parts of a command that this test leaves out, and why. `.ci/run` runs the line with pytest whole.
SET_UP = ("python3 -m venv", ". .venv/bin/activate", "pip install", "python -m pytest")
ELSEWHERE = (
    "scripts.download",
    "scripts.convert_meta",
    "scripts.train_demo",
    "scripts.bench",
    "TinyLlama",
)  # network, hours


def commands() -> list[str]:
    """The lines of all blocks (continuations joined) with set-up parts taken out."""
    found = []
    for block in BLOCKS:
        for line in block.replace("\\\n", " ").splitlines():
            parts = [part.strip() for part in line.split("&&")]
            kept = " && ".join(part for part in parts if not part.startswith(SET_UP))
            if kept and not kept.startswith("#") and not any(name in kept for name in ELSEWHERE):
                found.append(" ".join(kept.split()))
    return found


@pytest.mark.parametrize("command", commands())
def test_readme_command_runs(command):
    written = [ROOT / name for name in re.findall(r"--output (\S+)", command)]
    for folder in written:
        shutil.rmtree(folder, ignore_errors=True)
    names = f'python() {{ {sys.executable} "$@"; }}; torchrun() {{ python -m torch.distributed.run "$@"; }}'
    script = f"{names}; {command}"
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300)
    for folder in written:
        shutil.rmtree(folder, ignore_errors=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "it printed nothing"


@pytest.mark.parametrize("code", SNIPPETS)
def test_readme_snippet_runs(code):
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "it printed nothing"


def test_the_sizes_that_it_states_are_true():
    """Within a tenth: a page that says 5,000 lines of what has become 8,000 misleads those who mean to read it."""
    files = list(ROOT.glob("*.py"))
    lines = sum(len(file.read_text().splitlines()) for file in files)
    word, said = re.search(r"(\w+) files and\s+some ([\d,]+) lines", README).groups()
    assert abs(int(said.replace(",", "")) / lines - 1) < 0.1, lines
    assert len(files) == ["Eight", "Nine", "Ten", "Eleven", "Twelve"].index(word) + 8
    listed = README[README.index("## Read it in this order") :].split("\n\n")[1]
    assert {file.name for file in files} == set(re.findall(r"^    (\w+\.py)", listed, flags=re.MULTILINE))


def test_set_up_is_two_commands_and_ci_runs_the_second():
    install = [line for block in BLOCKS for line in block.splitlines() if "pip install -r" in line]
    assert len(install) == 2
    assert install[0].endswith("&& python generate.py") and install[1].endswith("&& python -m pytest")
    assert "eval \"$(grep -m1 'python -m pytest' README.md)\"" in (ROOT / ".ci" / "run").read_text()


def test_scripts_that_are_not_run_at_least_explain_themselves():
    def ask(name: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", name, "--help"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)

    names = sorted(set(re.findall(r"python -m (scripts\.\w+)", README)))
    with ThreadPoolExecutor(2) as pool:
        for name, done in zip(names, pool.map(ask, names), strict=True):
            assert done.returncode == 0 and "--" in done.stdout, name
