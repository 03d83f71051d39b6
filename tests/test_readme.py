"""README.md promises commands: each shell block that needs neither a download nor hours runs here as it stands."""

import itertools
import json
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
    "benchmarks.train_demo",
    "benchmarks.bench",
    "tests.attacks",
    "TinyLlama",
    ".gguf",
    "pip download",
    "scripts.serve",
    "127.0.0.1:8000",
)  # network, hours, a server, which has a test of its own
FIRST = 2  # commands and snippets of the default run


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


def later(cases: list[str]) -> list:
    return [case if i < FIRST else pytest.param(case, marks=pytest.mark.readme) for i, case in enumerate(cases)]


@pytest.mark.parametrize("command", later(commands()))
def test_readme_command_runs(command):
    written = [ROOT / name for name in re.findall(r"--(?:output|prompt_cache) (\S+)", command)]
    remove(written)
    names = f'python() {{ {sys.executable} "$@"; }}; torchrun() {{ python -m torch.distributed.run "$@"; }}'
    script = f"{names}; {command}"
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300)
    remove(written)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "it printed nothing"


def remove(paths: list) -> None:
    for path in paths:
        path.unlink() if path.is_file() else shutil.rmtree(path, ignore_errors=True)


@pytest.mark.parametrize("code", later(SNIPPETS))
def test_readme_snippet_runs(code):
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "it printed nothing"


@pytest.mark.readme
def test_readme_server_answers_its_clients():
    """The block's first command runs until the others have."""
    (block,) = (block for block in BLOCKS if "scripts.serve" in block)
    start, *clients = (line for line in block.splitlines() if not line.startswith("#"))
    command = start.split("&& ")[1].split()
    server = subprocess.Popen(
        [sys.executable, *command[1:], "--port", "0"], cwd=ROOT, stderr=subprocess.PIPE, text=True, bufsize=1
    )
    try:
        address = next(line.split("http://")[1].strip() for line in server.stderr if "listening on" in line)
        assert clients
        for client in clients:
            line = client.replace("127.0.0.1:8000", address)
            done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
            assert done.returncode == 0 and json.loads(done.stdout)["choices"][0]["text"], done
    finally:
        server.terminate()
    assert server.wait(60) == 0


def test_forks_take_as_many_lines_as_it_states():
    """Of a sampler, a format, a drafter and a family: the lines of the idea itself, without imports and its use."""
    section = README[README.index("## Change it") : README.index("## Beside others")]
    stated = [int(n) for n in re.findall(r"^\*Another [\w ]+\*, (\d+) lines?", section, flags=re.MULTILINE)]
    snippets = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    assert len(stated) == len(snippets) == 4
    for n, code in zip(stated, snippets, strict=True):
        lines = [line for line in code.splitlines() if line.strip() and not line.startswith(("import ", "from "))]
        starts = [i for i, line in enumerate(lines) if line.startswith(("class ", "def ", "FAMILIES"))]
        idea = lines[starts[0] : starts[0] + 1] + list(
            itertools.takewhile(lambda line: line.startswith(" "), lines[starts[0] + 1 :])
        )
        hooked = [line for line in lines if re.match(r"(quantize\.FORMATS\[|sampling\.distribution = |usual = )", line)]
        assert len(idea) + len(hooked) == n, (n, idea, hooked)


def test_the_sizes_that_it_states_are_true():
    """Within a twentieth: a page that says 5,000 lines of what has become 8,000 misleads those who mean to read it."""
    rooms = [
        *ROOT.glob("*.py"),
        *(file for room in ("drafts", "reading", "weights", "program") for file in (ROOT / room).glob("*.py")),
    ]
    product, scripts = (
        sum(len(file.read_text().splitlines()) for file in files) for files in (rooms, (ROOT / "scripts").glob("*.py"))
    )
    core = sum(
        len((ROOT / f"{name}.py").read_text().splitlines()) for name in ("model", "sampling", "state", "generate")
    )
    for pattern, lines in (
        (r"is\s+four\s+files of\s+([\d,]+)\s+lines\s+together", core),
        (r"product\s+has\s+some\s+([\d,]+)\s+lines", product),
        (r"its\s+scripts\s+some\s+([\d,]+)\s+more", scripts),
        (r"all\s+the\s+rest\s+some\s+(\d+)\s+times\s+that,\s+scripts\s+included", (product + scripts) / core - 1),
    ):
        stated = int(re.search(pattern, README)[1].replace(",", ""))
        assert abs(stated / lines - 1) < 0.05, (pattern, lines)
    listed = README[README.index("## Read it in this order") :].split("\n## ")[0]
    named = set(re.findall(r"^    ([\w/]+(?:\.py|/))", listed, flags=re.MULTILINE))
    assert {file.name for file in ROOT.glob("*.py")} == {name for name in named if name.endswith(".py")}
    folders = {f"{file.parent.name}/" for file in ROOT.glob("*/*.py")} | {"checkpoints/"}  # these hold data alone
    assert {name for name in named if name.endswith("/")} == folders


def test_set_up_is_two_commands_and_ci_runs_the_second():
    install = [line for block in BLOCKS for line in block.splitlines() if "pip install -r" in line]
    assert len(install) == 2
    assert install[0].endswith("&& python generate.py") and install[1].endswith("&& python -m pytest")
    assert "eval \"$(grep -m1 'python -m pytest' README.md)\"" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.readme
def test_scripts_that_are_not_run_at_least_explain_themselves():
    def ask(name: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", name, "--help"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)

    names = sorted(set(re.findall(r"python -m ((?:scripts|benchmarks|tests\.attacks)\.\w+)", README)))
    with ThreadPoolExecutor(2) as pool:
        for name, done in zip(names, pool.map(ask, names), strict=True):
            assert done.returncode == 0 and "--" in done.stdout, name


def test_what_runs_is_what_is_tested():
    """`python -m tests.runs` writes both lists anew."""
    from tests import runs

    assert runs.filled(README) == README
