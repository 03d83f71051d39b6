"""scripts/live.py: columns in turns give each side's text, the slower clock waits, the picture fits
its terminal."""

import fcntl
import io
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
import unicodedata
from types import SimpleNamespace

import pytest
from conftest import ROOT
from rich.console import Console
from rich.style import Style
from rich.text import Text

from cli.draft_marks import ANSI_MARKS
from cli.flags import parse_args
from cli.main import run
from cli.prompts import Prompt
from cli.report import ACCEPTED, CORRECTED, token_origin
from scripts import compare
from scripts.live import STYLES, Column, picture, watch

COMMON = "--max_new_tokens 16 --dtype float32 --device cpu --seed 3"
DRAFT = f"--draft_checkpoint {ROOT}/checkpoints/demo-draft"


def columns_of(a: str, b: str) -> list[Column]:
    args = [compare.side_options(name, flags) for name, flags in (("a", a), ("b", b))]
    return [
        Column(name, side)
        for name, side in zip("ab", compare.load_sides(*args, [Prompt("One day, Tom")]))
    ]


@pytest.mark.attack
@pytest.mark.parametrize(
    "a, b",
    [
        ("", DRAFT),
        ("--quantize int8 --draft ngram:2", "--draft quantized:int8"),
        ("--stop the", "--threads 1"),
    ],
    ids=["draft", "drafts without a folder", "stop"],
)
def test_each_column_says_what_its_side_says_alone(a, b, capsys):
    columns = columns_of(f"{COMMON} {a}", f"{COMMON} {b}")
    watch(columns)
    for column, flags in zip(columns, (a, b), strict=True):
        capsys.readouterr()
        run(parse_args([*f"{COMMON} {flags}".split(), "--prompt", "One day, Tom", "--json"]))
        want = json.loads(capsys.readouterr().out)
        assert (
            column.answer.ids == want["tokens"]
            and column.text().plain == "One day, Tom" + want["text"]
        )


class TimedColumn:
    """A column whose steps take these seconds."""

    def __init__(self, name: str, step_s: list[float], log: list):
        self.name, self.step_s, self.log, self.seconds, self.is_finished = (
            name,
            step_s,
            log,
            0.0,
            False,
        )

    def step(self):
        self.log.append(self.name)
        self.seconds += self.step_s.pop(0)
        self.is_finished = not self.step_s

    text, rates = lambda self: Text("text"), lambda self: "rates"


def test_the_column_behind_decodes():
    log: list = []
    watch([TimedColumn("f", [1.0] * 9, log), TimedColumn("s", [0.5, 4.0, 1.0], log)])
    assert "".join(log) == "fssffffsffff"


def test_the_picture_leaves_one_line_of_the_terminal(monkeypatch):
    """For the ^C that a terminal echoes; the texts get all others."""
    monkeypatch.setenv("TERM", "xterm")
    terminal = Console(file=io.StringIO(), force_terminal=True, width=80, height=20)
    monkeypatch.setattr("scripts.live.Console", lambda **_: terminal)
    watch([TimedColumn(name, [1.0, 1.0], []) for name in "ab"])
    assert terminal.file.getvalue().split("╭")[-1].count("\n") == 19


def num_cells(text: str) -> int:
    """Width on a terminal, without rich: wide and full-width characters take two cells, marks
    none."""
    marks = [c for c in text if unicodedata.category(c) in ("Mn", "Me", "Cf")]
    return len(text) - len(marks) + sum(unicodedata.east_asian_width(c) in "WF" for c in text)


TEXTS = {
    "words": "Once upon a time there was a little dog. " * 40,
    "one long word": "Donaudampfschiff" * 40,
    "chinese": "从前有一只小狗，它喜欢在公园里跑步。" * 30,
    "emoji": "\N{PARTY POPPER}\N{DOG FACE} said hello\N{RED APPLE}e\u0301te\u0301 " * 30,
    "controls": "a\n\n\nnew \t[red]line[/red]\x1b[2J\r\n" * 20,
    "nothing": "",
}


def column_with(text: str) -> Column:
    """A column with this text in three seconds, the first token after one."""
    column = object.__new__(Column)
    column.name, column.seconds, column.first_token_s = (
        "a: --temperature 0 --quantize int8",
        3.0,
        1.0,
    )
    pieces = re.findall(r"\S+\s*|\s+", text)
    column.answer = SimpleNamespace(
        row=SimpleNamespace(prompt=Prompt("P! ")),
        pieces=pieces,
        ids=pieces,
        is_finished=True,
        request=SimpleNamespace(token_records=[]),
    )
    return column


@pytest.mark.parametrize("height", [7, None])
@pytest.mark.parametrize("width", [40, 80, 200])
def test_every_line_fits_and_the_tail_stays(width, height):
    for names in (("words", "chinese"), ("one long word", "emoji"), ("controls", "nothing")):
        console = Console(width=width, record=True, file=io.StringIO(), force_terminal=True)
        console.print(picture(console, [column_with(TEXTS[name]) for name in names], height))
        lines = console.export_text().splitlines()
        assert max(map(num_cells, lines)) <= width
        table = [line for line in lines if line[:1] in "╭│├╰"]
        assert len({num_cells(line) for line in table}) == 1, "all borders below each other"
        rules = [n for n, line in enumerate(lines) if line.startswith("├")]
        rows = [line.split("│")[1:-1] for line in lines[rules[0] + 1 : rules[1]]]
        assert height is None or len(rows) == height
        for n, name in enumerate(names):
            full = re.sub(r"[\x00-\x20\x7f]", "", "P!" + TEXTS[name])
            part = "".join(row[n] for row in rows).replace(" ", "")
            assert full.endswith(part) and (
                part == full if height is None else len(part) > 3 or part == full
            )


def test_colours_and_rates_tell_which_tokens_were_drafted():
    for source, name in STYLES.items():
        style = Style.parse(name)
        code = f"{'1;' * bool(style.bold)}38;5;{style.color.number}"
        assert getattr(ANSI_MARKS, source) == f"\033[{code}m{{}}\033[0m"
    plain, drafted = columns = columns_of(
        COMMON, f"{COMMON} {DRAFT} --temperature 0 --speculate_k 3"
    )
    started = time.perf_counter()
    watch(columns)
    assert 0 < plain.seconds + drafted.seconds <= time.perf_counter() - started, (
        "clocks never overlap"
    )
    assert all(0 < column.first_token_s < column.seconds for column in columns)
    text, stream = drafted.text(), drafted.llm.tokenizer.stream(continues=True)
    records = drafted.answer.request.token_records
    pieces = [
        (stream.feed(id), token_origin(record))
        for id, record in zip(drafted.answer.ids, records, strict=True)
    ]
    for source in (ACCEPTED, CORRECTED):
        want = "".join(piece for piece, its_source in pieces if its_source == source)
        spans = [span for span in text.spans if span.style == STYLES[source]]
        assert (
            "".join(text.plain[span.start : span.end] for span in spans) == want and len(want) > 3
        )
    assert {span.style for span in plain.text().spans} <= {"dim"} and plain.rates().endswith(
        "\nnothing drafted"
    )
    origins = [token_origin(record) for record in records]
    num_accepted, num_judged = (
        origins.count(ACCEPTED),
        len([source for source in origins if source in STYLES]),
    )
    assert drafted.rates().endswith(f"\n{num_accepted / num_judged:.0%} of drafts accepted")
    assert column_with("a b c d e").rates().startswith("2.0 tok/s after 3.00 s"), (
        "four tokens in two seconds"
    )


def program(*arguments: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "scripts.compare",
        f"--a={COMMON}",
        f"--b={COMMON} {DRAFT}",
        "--live",
        *arguments,
    ]


@pytest.mark.attack
def test_without_a_terminal_it_prints_the_picture_once():
    done = subprocess.run(
        [*program("--json")], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and json.loads(done.stdout)["pairs"] == 1
    assert (
        done.stderr.count("╭") == 1
        and "\x1b" not in done.stderr
        and "Once upon a time" in done.stderr
    )


@pytest.mark.attack
def test_without_rich_one_line_names_the_command():
    code = (
        "import sys, runpy; sys.modules['rich'] = None; runpy.run_module('scripts.compare',"
        " run_name='__main__')"
    )
    command = [sys.executable, "-c", code, "--a=", "--b=", "--live"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "error: --live draws with rich: pip install rich==15.0.0\n"
    assert "rich==15.0.0" in (ROOT / "requirements-dev.txt").read_text().splitlines()


@pytest.mark.attack
def test_on_a_terminal_it_moves_and_ctrl_c_ends_it():
    """A pseudo-terminal of 100 by 30: frames are drawn over each other and never scroll, Ctrl-C
    leaves the last one."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    environment = {
        name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")
    }
    long = f"{COMMON} --max_new_tokens 500 --ignore_eos"
    process = subprocess.Popen(
        [*program(f"--a={long}", f"--b={long} {DRAFT}")],
        cwd=ROOT,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        close_fds=True,
        env={**environment, "TERM": "xterm-256color"},
        preexec_fn=lambda: (os.setsid(), fcntl.ioctl(slave, termios.TIOCSCTTY, 0)),
    )
    os.close(slave)
    seen, deadline, typed = b"", time.monotonic() + 60, False
    while select.select([master], [], [], max(0, deadline - time.monotonic()))[0]:
        try:
            seen += os.read(master, 65536)
        except OSError:  # the program has closed its side
            break
        if not typed and b"\x1b[38;5;33m" in seen and seen.count("╭".encode()) >= 3:
            os.write(master, b"\x03")
            typed = True
    os.close(master)
    text = seen.replace(b"^C", b"").decode()
    assert process.wait(timeout=30) == 130 and "Traceback" not in text, text
    assert typed and text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1
    frames = text.split("╭")[1:]
    assert len(frames) >= 3 and all(frame.count("\n") < 30 for frame in frames)
