"""README.md and docs/ promise commands: each shell block that needs neither a download nor hours
runs as it stands.

A command or snippet that several pages show runs once. Figures and lists are compared with their
sources.
"""

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

import cli.main
from cli.flags import parse_args
from cli.prompts import LINE_KEYS
from tests import runs

README = (ROOT / "README.md").read_text()
PAGES = {"README.md": README} | {
    f"docs/{file.name}": file.read_text() for file in sorted((ROOT / "docs").glob("*.md"))
}


def blocks(language: str) -> list[str]:
    """Code blocks of all pages without repetition, README's first."""
    texts = (
        re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL) for page in PAGES.values()
    )
    return list(dict.fromkeys(itertools.chain(*texts)))


BLOCKS = blocks("bash")
LOCAL = "127.0.0.1:8000"  # commands and snippets that talk to the server
SNIPPETS = [textwrap.dedent(code) for code in blocks("python") if LOCAL not in code]

# Parts of a command that this test leaves out, and why. `.ci/run` runs the line with pytest.
SET_UP = ("python3 -m venv", ". .venv/bin/activate", "pip install", "python -m pytest")
# network, hours, a patch and a server, which have tests of their own
ELSEWHERE = (
    "train_demo",
    "benchmarks.",
    "tests.attacks",
    "TinyLlama",
    ".gguf",
    "-GGUF:",
    "pip download",
    "patch -p1",
    "scripts.serve",
    LOCAL,
)
NUM_FAST = 1  # commands and snippets of the default run


def commands() -> list[str]:
    """The lines of all blocks (continuations joined) without set-up parts and repetition."""
    lines = []
    for block in BLOCKS:
        for line in block.replace("\\\n", " ").splitlines():
            parts = [part.strip() for part in line.split("&&")]
            rest = " && ".join(part for part in parts if not part.startswith(SET_UP))
            if rest and not rest.startswith("#") and not any(name in rest for name in ELSEWHERE):
                lines.append(" ".join(rest.split()))
    return list(dict.fromkeys(lines))


def slow_after_first(cases: list[str], num_fast: int = NUM_FAST) -> list:
    return [
        case if i < num_fast else pytest.param(case, marks=pytest.mark.readme)
        for i, case in enumerate(cases)
    ]


@pytest.mark.parametrize("command", slow_after_first(commands()))
def test_command_runs(command):
    outputs = [
        ROOT / name for name in re.findall(r"--(?:output|prompt_cache|report) (\S+)", command)
    ]
    remove(outputs)
    names = (
        f'python() {{ {sys.executable} "$@"; }}; torchrun() {{ python -m torch.distributed.run'
        f' "$@"; }}'
    )
    script = f"{names}; {command}"
    done = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    remove(outputs)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "it printed nothing"


def remove(paths: list) -> None:
    for path in paths:
        path.unlink() if path.is_file() else shutil.rmtree(path, ignore_errors=True)


@pytest.mark.parametrize("code", slow_after_first(SNIPPETS, 1))
def test_snippet_runs(code):
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "it printed nothing"


@pytest.mark.readme
def test_server_answers_the_clients_of_all_pages():
    """README's server runs until every curl command and every snippet of a client has its
    answer."""
    start = next(
        line for block in BLOCKS for line in block.splitlines() if "scripts.serve --draft" in line
    )
    lines = dict.fromkeys(
        line for block in BLOCKS for line in block.replace("\\\n", " ").splitlines()
    )
    clients = [
        ["bash", "-c", f"{line} --fail"]
        for line in lines
        if line.startswith("curl ") and LOCAL in line
    ]
    clients += [[sys.executable, "-c", code] for code in blocks("python") if LOCAL in code]
    command = [sys.executable, *start.split("&& ")[1].split()[1:], "--port", "0"]
    server = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, bufsize=1)
    try:
        address = next(
            line.split("http://")[1].strip() for line in server.stderr if "listening on" in line
        )
        assert clients
        for client in clients:
            client = [word.replace(LOCAL, address) for word in client]
            done = subprocess.run(client, capture_output=True, text=True, timeout=60)
            assert done.returncode == 0 and done.stdout.strip() and '"error"' not in done.stdout, (
                done
            )
    finally:
        server.terminate()
    assert server.wait(60) == 0


@pytest.mark.readme
def test_scripts_explain_themselves():
    """Those that no test runs as a page shows them. tests/test_program.py has every program's flags
    printed."""

    def ask(name: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", name, "--help"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)

    text = "".join(PAGES.values())
    names = sorted(set(re.findall(r"python -m ((?:scripts|benchmarks|tests\.attacks)\.\w+)", text)))
    names = [name for name in names if not any(name in command for command in commands())]
    assert len(names) > 5
    with ThreadPoolExecutor(2) as pool:
        for name, done in zip(names, pool.map(ask, names), strict=True):
            assert done.returncode == 0 and "--" in done.stdout, name


# ---------------------------------------------------------------------------------------- figures


@pytest.mark.house
def test_readme_is_one_page():
    assert len(README.splitlines()) <= 220 and len(README.split()) <= 2400


def rows(name: str) -> dict[str, dict]:
    results = json.loads((ROOT / "benchmarks" / f"{name}.json").read_text())
    return {row["id"]: row for row in results["rows"]}


@pytest.mark.house
def test_figures_are_those_of_the_results_files():
    """In sentences of all pages, digit for digit. Tables have a test in test_benchmarks.py."""
    cpu = rows("cpu")
    prices = [row["value"] for id, row in cpu.items() if id.endswith(".identical_price")]
    text = " ".join(" ".join(PAGES.values()).split())
    law, drift = (
        json.loads((ROOT / "benchmarks" / f"{name}.json").read_text()) for name in ("law", "drift")
    )
    for pattern, figure in (
        (r"([\d.]+) times as fast as gpt-fast", f"{cpu['1b.bf16.vs_gptfast']['value']:.2f}"),
        (
            r"([\d.]+) times as fast as transformers",
            f"{cpu['1b.bf16.vs_transformers']['value']:.2f}",
        ),
        (
            r"([\d]+ %) of its speed in bf16",
            f"{cpu['1b.bf16.vs_llamacpp']['value']:.0%}".replace("%", " %"),
        ),
        (
            r"bf16 and ([\d]+ %) in 4 bits",
            f"{cpu['1b.int4-g32.vs_llamacpp']['value']:.0%}".replace("%", " %"),
        ),
        (r"memory peaks at ([\d.]+) times", f"{cpu['load.peak_over_weights']['value']:.2f}"),
        (
            r"quickdraft keeps ([\d]+ %) of its speed",
            f"{cpu['smollm2.q4_1.busy_over_quiet']['value']:.0%}".replace("%", " %"),
        ),
        (
            r"llama.cpp keeps ([\d]+ %) of its own",
            f"{cpu['smollm2.q4_1.llamacpp.busy_over_quiet']['value']:.0%}".replace("%", " %"),
        ),
        (r"over ([\d,]+) sampled tokens", f"{law['tokens']:,}"),
        (r"Of ([\d,]+) greedy tokens", drift["total"].split()[3]),
        (r"in (\d+) (?:eager )?settings", drift["total"].split()[5]),
        (r"price is ([\d.]+ %) of a step", f"{100 * (max(prices) - 1):.1f} %"),
    ):
        stated = re.findall(pattern, text)
        assert stated and set(stated) == {figure}, (pattern, stated, figure)
    assert drift["total"].startswith("0 flips") and drift["total"].endswith("bits differ in 0")


@pytest.mark.house
def test_sizes_are_true():
    """Within a twentieth. `python -m tests.runs` writes the table of files anew."""
    core = sum(runs.num_lines(name) for name in runs.CORE)
    drafting = sum(runs.num_lines(name) for name in runs.DRAFTING)
    product = sum(runs.num_lines(file.name) for file in ROOT.glob("*.py"))
    product += sum(
        runs.num_lines(folder)
        for folder in ("decoding", "drafts", "exact", "loading", "weights", "cli")
    )
    text = " ".join("".join(PAGES.values()).split())
    for pattern, lines in (
        (r"four files, ([\d,]+) lines in all", core),
        (r"round adds the next five, ([\d,]+) lines", drafting),
        (r"that is shipped is some ([\d,]+)", product),
    ):
        stated = re.findall(pattern, text)
        assert stated, pattern
        assert all(abs(int(number.replace(",", "")) / lines - 1) < 0.05 for number in stated), (
            pattern,
            lines,
        )


@pytest.mark.house
def test_the_table_of_files_is_true():
    """Every file of the root and every folder of code is in it; minutes follow from lines."""
    section = README[README.index("## Read it in this order") :].split("\n## ")[0]
    table = re.findall(
        r"^\| \[([\w/.]+)\]\(\S+\) \| ([\d,]+) \| (\d*) ?\|", section, flags=re.MULTILINE
    )
    for name, stated, minutes in table:
        n = int(stated.replace(",", ""))
        assert abs(n / runs.num_lines(name) - 1) < 0.05, f"python -m tests.runs changes {name}"
        assert not minutes or int(minutes) == round(n / runs.LINES_A_MINUTE), (name, minutes)
    names = {name for name, *_ in table}
    assert {file.name for file in ROOT.glob("*.py")} == {
        n for n in names if n.endswith(".py") and "/" not in n
    }
    folders = {f"{file.parent.name}/" for file in ROOT.glob("*/*.py")} - {"checkpoints/"}
    assert folders == {name for name in names if name.endswith("/")}
    assert [name for name, *_ in table][: len(runs.CORE)] == list(runs.CORE)


@pytest.mark.house
def test_forks_take_as_many_lines_as_the_page_states():
    """A sampler, a format, a drafter and a family: the lines of the idea, without imports and
    use."""
    page = PAGES["docs/fork.md"]
    found = re.findall(
        r"^## Another [\w ]+: (\d+) lines?\n(?:(?!^## ).)*?```python\n(.*?)```",
        page,
        flags=re.MULTILINE | re.DOTALL,
    )
    assert len(found) == len(re.findall(r"^## Another .*: \d+ line", page, re.MULTILINE)) == 4
    snippets = [code for _, code in found]
    for n, code in found:
        lines = [
            line
            for line in code.splitlines()
            if line.strip() and not line.strip().startswith(("import ", "from ", "#"))
        ]
        starts = [
            i for i, line in enumerate(lines) if line.startswith(("class ", "def ", "FAMILIES"))
        ]
        idea = lines[starts[0] : starts[0] + 1] + list(
            itertools.takewhile(lambda line: line.startswith(" "), lines[starts[0] + 1 :])
        )
        hooks = [line for line in lines if re.match(r"FORMATS\[", line)]
        assert len(idea) + len(hooks) == int(n), (n, idea, hooks)
    assert any(
        code in snippets for code in re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    )


# ------------------------------------------------------------------------------------------ lists


@pytest.mark.house
def test_lists_are_those_of_the_tests_tables():
    """`python -m tests.runs` writes them anew."""
    marked = re.findall(r"<!-- runs (\w+) -->", "".join(PAGES.values()))
    assert sorted(marked) == sorted(runs.BLOCKS)
    assert all(runs.filled(page) == page for page in PAGES.values())


@pytest.mark.house
def test_every_flag_has_its_line(capsys):
    with pytest.raises(SystemExit):
        parse_args(["--help"])
    flags = set(re.findall(r"^  (--\w+)", capsys.readouterr().out, flags=re.MULTILINE))
    assert len(flags) > 40 and not (
        absent := flags - set(re.findall(r"--\w+", PAGES["docs/use.md"]))
    ), absent


@pytest.mark.house
def test_every_key_of_json_has_its_line(capsys):
    """Keys of a line that goes in, and of an object that comes out."""
    flags = [
        "--json",
        "--logprobs",
        "1",
        "--draft",
        "ngram",
        "--max_new_tokens",
        "3",
        "--device",
        "cpu",
    ]
    cli.main.main(parse_args(flags))
    result = json.loads(capsys.readouterr().out)
    keys = LINE_KEYS.keys() | result.keys() | result["speculative"].keys()
    page = PAGES["docs/use.md"]
    assert not (absent := {key for key in keys if f"`{key}`" not in page}), absent


@pytest.mark.house
def test_links_lead_somewhere():
    """From a page to a file, and to a heading where a link has one. README links to every page."""

    def anchors(text: str) -> set[str]:
        heads = re.findall(
            r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE
        )
        return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}

    linked = set()
    for name, text in PAGES.items():
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", text):
            file = (ROOT / name).parent / target if target else ROOT / name
            assert file.exists(), (name, target)
            assert not anchor or anchor in anchors(file.read_text()), (name, target, anchor)
            linked |= {str(file.resolve().relative_to(ROOT))} if name == "README.md" else set()
    assert PAGES.keys() - {"README.md"} <= linked


@pytest.mark.house
def test_set_up_is_two_commands_and_ci_runs_the_second():
    install = [line for block in BLOCKS for line in block.splitlines() if "pip install -r" in line]
    assert len(install) == 2
    assert install[0].endswith("&& python generate.py") and install[1].endswith(
        "&& python -m pytest"
    )
    assert "eval \"$(grep -m1 'python -m pytest' README.md)\"" in (ROOT / ".ci" / "run").read_text()
