"""scripts/race.py: every column says what its configuration says alone, clocks are fair, the picture fits any width.

What can fail: columns that share weights may share caches; a clock may count what others did; a moment may show tokens
that are not all there yet; wide characters may push a line over the edge.
"""

import fcntl
import io
import itertools
import json
import math
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
import xml.etree.ElementTree as xml
from types import SimpleNamespace

import pytest
from conftest import ROOT
from rich.console import Console
from rich.style import Style

from cli.answers import COLOURS
from cli.flags import parse_args as generate_args
from cli.main import run
from cli.report import ACCEPTED, CORRECTED, PLAIN_TOKEN, RowStatistics, origin, rate, weight_bytes
from decoding.sampling import Sampling
from decoding.scheduler import Request
from decoding.timing import StepRecord, Timing
from scripts import race
from scripts.race import STYLES, Moment, load_columns, main, parse_args, picture, results, shown, take_turns

DRAFT = str(ROOT / "checkpoints" / "demo-draft")
ALONE = {  # a column's spec; what it means, in generate.py's words
    "plain": [],
    "draft": ["--draft_checkpoint", DRAFT],
    "int8+draft": ["--quantize", "int8", "--draft_checkpoint", DRAFT],
    "ngram:2": ["--draft", "ngram:2"],
    "layers:0-3,5": ["--draft", "layers:0-3,5"],
    "quantized:int8": ["--draft", "quantized:int8"],
}
COMMON = ["--max_new_tokens", "16", "--dtype", "float32", "--device", "cpu", "--seed", "3", "--prompt", "One day, Tom"]


def columns_of(specs, *arguments: str) -> list:
    args = parse_args([*COMMON, "--columns", ",".join(specs), *arguments])
    return load_columns(args, race.column_specs(args))


def alone(capsys, spec: str, *arguments: str) -> dict:
    capsys.readouterr()
    run(generate_args([*COMMON, *arguments, *ALONE[spec], "--json"]))
    return json.loads(capsys.readouterr().out)


# ------------------------------------------------------------------------------------------- the texts


@pytest.mark.parametrize(
    "specs",
    [["plain", "draft", "int8+draft"], ["plain", "ngram:2", "layers:0-3,5", "quantized:int8"]],
    ids=["checkpoints", "others"],
)
def test_every_column_says_what_it_says_alone(specs, capsys, monkeypatch):
    """Turns of one step, so that columns alternate as often as they can."""
    monkeypatch.setattr(race, "TURN_S", 0.0)
    columns = columns_of(specs, "--temperature", "0.8")
    assert len({id(column.engine.model) for column in columns}) == len({spec.startswith("int8") for spec in specs})
    list(take_turns(columns))
    for spec, column in zip(specs, columns, strict=True):
        want = alone(capsys, spec, "--temperature", "0.8")
        assert column.ids == want["tokens"] and column.text == want["text"] and len(column.ids) == 16, spec
    assert len({column.text for column in columns}) > 1  # control: not all the same anyhow


# ------------------------------------------------------------------------------------------ the clocks


class Made:
    """A column with made-up rounds (seconds, tokens), which hands out one token a turn."""

    def __init__(self, rounds):
        self.schedule = [
            Moment(at, f"{n}.{i} ", PLAIN_TOKEN, n)
            for n, (at, (_, tokens)) in enumerate(zip(itertools.accumulate(s for s, _ in rounds), rounds))
            for i in range(tokens)
        ]
        self.moments, self.clock, self.ended = [], 0.0, False

    def turn(self):
        if len(self.moments) == len(self.schedule):
            self.ended = True
            return
        self.moments.append(self.schedule[len(self.moments)])
        self.clock = self.moments[-1].at


MADE = {
    "even": [[(1, 1)] * 9] * 3,
    "one is four times slower": [[(1, 1)] * 12, [(4, 1)] * 5, [(2.5, 3)] * 4],
    "rounds of one to five tokens": [[(1, 1)] * 20, [(3, 5), (3, 1), (3, 2)] * 3, [(0.5, 1), (6, 4)] * 2],
    "a long prefill": [[(10, 1), (0.1, 1), (0.1, 1)], [(1, 1)] * 15],
}


def at_once(columns, monkeypatch=None):
    """Take all turns; checks that the one who took it was behind, and that what is shown is complete and no more."""
    turns = take_turns(columns)
    last = 0.0
    while True:
        clocks = [column.clock if not column.ended else math.inf for column in columns]
        before = [len(column.moments) + column.ended for column in columns]
        at = next(turns, None)
        if at is None:
            return
        moved = [n for n, column in enumerate(columns) if len(column.moments) + column.ended != before[n]]
        assert len(moved) == 1 and clocks[moved[0]] == min(clocks)
        assert at >= last
        last = at
        for column in columns:
            assert list(shown(column.moments, at)) == [moment for moment in column.schedule if moment.at < at]


@pytest.mark.parametrize("case", MADE)
def test_turns_are_fair_and_what_is_shown_stood_there(case):
    columns = [Made(rounds) for rounds in MADE[case]]
    at_once(columns)
    assert all(column.moments == column.schedule for column in columns)


@pytest.mark.parametrize(
    "broken",
    [
        ("take_turns", lambda columns: unfair(columns)),
        ("shown", lambda moments, at: [moment for moment in moments if moment.at <= at]),
    ],
    ids=["in a fixed order", "rounds that are not complete"],
)
def test_control_unfair_turns_are_caught(broken, monkeypatch):
    monkeypatch.setitem(globals(), *broken)
    with pytest.raises(AssertionError):
        at_once([Made(rounds) for rounds in MADE["rounds of one to five tokens"]])


def unfair(columns):
    while running := [column for column in columns if not column.ended]:
        for column in running:
            column.turn()
            yield min((column.clock for column in columns if not column.ended), default=math.inf)


def decoded_ahead(model, prompts, *, max_new_tokens: int, timing: Timing | None = None, **_):
    """`generate` on a device that runs ahead of its host: Timing goes on while nobody asks for tokens."""
    timing, request = timing or Timing(), Request(0, prompts[0], Sampling(0), max_new_tokens)
    timing.requests.append(request)
    begun = time.perf_counter()
    for number in range(max_new_tokens):
        time.sleep(0.003)
        now = time.perf_counter()
        if number:
            request.record(StepRecord(0, now - begun, 0.0, 0.0, ()))
        else:
            request.prefill_s = now - begun
        begun = now
        yield 0, 5


@pytest.mark.parametrize("kind", ["cpu", "as a gpu", "control"])
def test_a_clock_counts_its_own_column_alone(monkeypatch, kind):
    """Clocks never overlap: together with the time slept between turns they fit in the time that passed. A host that
    reads late has a Timing that goes on meanwhile, which a column must take off; the control does not."""
    if kind != "cpu":
        monkeypatch.setattr(race, "generate", decoded_ahead)
        monkeypatch.setattr(race, "runs_ahead", lambda engine: kind == "as a gpu")
    columns, slept = columns_of(["plain", "draft"] if kind == "cpu" else ["plain", "int8"]), 0.0
    start = time.perf_counter()
    for _ in take_turns(columns):
        before = time.perf_counter()
        time.sleep(0.02)
        slept += time.perf_counter() - before
    passed = time.perf_counter() - start
    fits = sum(column.clock for column in columns) + slept <= passed
    assert fits == (kind != "control")
    for column in columns:
        assert [moment.at for moment in column.moments] == sorted(moment.at for moment in column.moments)
        assert column.moments[-1].at <= column.clock
    if kind == "cpu":  # a CPU's Timing is the clock, as generate.py reports it
        assert all(c.clock == c.timing.prefill_s + c.timing.decode_s for c in columns)
        rates = [rate(len(c.ids) - 1, c.timing.decode_s) for c in columns]
        assert [race.tok_s(c.moments) for c in columns] == pytest.approx(rates)


# ------------------------------------------------------------------------------------------ the picture


def cells(text: str) -> int:
    """Width on a terminal, without rich: wide and full-width characters take two cells, marks none."""
    marks = ("Mn", "Me", "Cf")
    return sum(
        0 if unicodedata.category(c) in marks else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text
    )


TEXTS = {
    "words": ["Once upon a time ", "there was a little ", "dog. "] * 40,
    "one long word": ["Donaudampfschiff"] * 40,
    "chinese": ["从前有一只小狗，", "它喜欢在公园里", "跑步。"] * 30,
    "emoji": ["\N{PARTY POPPER}", "\N{DOG FACE} said ", "hello\N{RED APPLE}", "e\u0301te\u0301 "] * 30,
    "lines": ["a\n", "\n\n", "new ", "\t[red]line[/red]\x1b[2J\r\n"] * 20,
    "nothing": [],
}


def column_with(pieces, name="plain", origins=(PLAIN_TOKEN,)):
    """A column that holds these pieces, one a second."""
    moments = [
        Moment(1.0 + n, piece, origin, n) for n, (piece, origin) in enumerate(zip(pieces, itertools.cycle(origins)))
    ]
    return SimpleNamespace(name=name, moments=moments, clock=1.0 * len(pieces), text="".join(pieces))


def drawn(columns, width: int, height: int | None, styles: bool = False) -> list[str]:
    console = Console(width=width, record=True, file=io.StringIO(), force_terminal=True, color_system="standard")
    console.print(picture(console, columns, "P! ", math.inf, height))
    return console.export_text(styles=styles).splitlines()


def body(lines: list[str]) -> list[list[str]]:
    """The rows of text between the table's first two rules, cell by cell."""
    rules = [n for n, line in enumerate(lines) if line.startswith(("├", "╭"))]
    return [[cell[1:-1] for cell in line.split("│")[1:-1]] for line in lines[rules[1] + 1 : rules[2]]]


@pytest.mark.parametrize("width", [60, 80, 100, 200])
@pytest.mark.parametrize("height", [7, None])
def test_every_line_fits_and_the_tail_stays(width, height):
    names = ["words", "one long word", "chinese", "emoji"]
    for chosen in (names, ["lines", "nothing", "chinese"], ["emoji"]):
        columns = [column_with(TEXTS[name], name) for name in chosen]
        lines = drawn(columns, width, height)
        assert max(map(cells, lines)) <= width
        table = [line for line in lines if line[:1] in "╭│├╰"]
        assert len({cells(line) for line in table}) == 1  # all borders below each other
        rows = body(lines)
        assert height is None or len(rows) == height
        for n, column in enumerate(columns):
            whole = re.sub(r"[\x00-\x20\x7f]", "", "P!" + column.text)
            part = "".join(row[n] for row in rows).replace(" ", "")
            assert whole.endswith(part) and "\x1b" not in part
            assert part == whole if height is None else len(part) > 3 or part == whole
            if height and part != whole:  # nothing is left out that had room
                assert all(row[n].strip() for row in rows) or column.name == "lines"


def test_too_many_columns_for_the_width():
    columns = [column_with([], "plain")] * 4
    assert drawn(columns, 57, 3)
    with pytest.raises(ValueError, match="4 columns need 57 cells: this terminal has 56"):
        drawn(columns, 56, 3)


def coloured(lines: list[str], column: int) -> dict[str, str]:
    """The text of one column by colour ('' for none), without spaces, out of lines with colour codes."""
    found = {}
    for line in lines:
        if not re.sub(r"\x1b\[[\d;]*m", "", line).startswith("│"):
            continue
        colour, cell = "", 0
        for code, character in re.findall(r"\x1b\[([\d;]*)m|(.)", line):
            if not character:
                colour = "" if code in ("0", "") else code
            elif character == "│":
                cell += 1
            elif cell == column + 1 and character != " ":
                found[colour] = found.get(colour, "") + character
    return found


def test_colours_tell_where_tokens_came_from():
    assert all(COLOURS[origin] == f"\033[{Style.parse(name).color.number + 30}m" for origin, name in STYLES.items())
    assert COLOURS.keys() == STYLES.keys()
    columns = columns_of(["plain", "draft"], "--temperature", "0")
    list(take_turns(columns))
    lines = drawn(columns, 200, None, styles=True)
    plain, draft = (coloured(lines, n) for n in range(2))
    assert "34" not in plain and "31" not in plain
    origins = [origin(token) for token in columns[1].timing.tokens[0]]
    stream = columns[1].tokenizer.stream(continues=True)
    pieces = [stream.feed(id) for id in columns[1].ids]
    for code, wanted in (("34", ACCEPTED), ("31", CORRECTED)):
        want = "".join(piece for piece, its in zip(pieces, origins, strict=True) if its == wanted)
        assert draft[code] == re.sub(r"\s", "", want) and len(want) > 3


def test_rates_and_results_by_hand():
    """21 tokens: the first after 1 s, twenty more in 4 s and 8 rounds that judged 20 and kept 12."""
    moments = [Moment(1.0, "a", PLAIN_TOKEN, 0), *[Moment(1 + n / 5, "b", ACCEPTED, 8, 20, 12) for n in range(1, 21)]]
    assert race.rates(moments, 5.0).plain == "5.0 tok/s\n2.50/round\n60% kept\n5.00 s"
    assert race.rates([], 0.25).plain == "0.0 tok/s\n0.00/round\n–\n0.25 s"


def column_of_ids(name, ids, ended=True):
    tokenizer = SimpleNamespace(stream=lambda continues: SimpleNamespace(feed=lambda id: f"<{id}>"))
    return SimpleNamespace(name=name, ids=ids, ended=ended, tokenizer=tokenizer)


@pytest.mark.parametrize(
    "first, second, says",
    [
        (([5, 6, 7], True), ([5, 6, 7], True), "equal"),
        (([5, 6, 7], True), ([5, 8, 7], True), "token 1: '<8>' for '<6>'"),
        (([5, 6, 7], True), ([5, 6], True), "token 2: the end for '<7>'"),
        (([5, 6, 7], True), ([5, 6], False), "equal in 2 tokens"),
        (([5, 6], False), ([5, 6], False), "equal in 2 tokens"),
        (([5, 6], True), ([5, 6, 7], False), "token 2: '<7>' for the end"),
        (([], False), ([5], False), "equal in 0 tokens"),
        (([5, 6], False), ([4, 6], False), "token 0: '<4>' for '<5>'"),
    ],
)
def test_the_verdict_on_a_text(first, second, says):
    a, b = column_of_ids("a", *first), column_of_ids("b", *second)
    assert race.verdict(a, b, False) == says
    assert race.verdict(a, a, False) == "–" and race.verdict(a, b, True) == "sampled"


def test_weights_read_by_a_step():
    """Plain: what load keeps of the target; a round: the target once, and the draft as often as it drafted."""
    plain, fixed, auto = columns_of(["plain", "draft"], "--speculate_k", "3") + columns_of(
        ["draft"], "--speculate_k", "auto"
    )
    target, draft = (weight_bytes(model) for model in fixed.engine.models)
    list(take_turns([plain, fixed, auto]))
    assert plain.weights_read() == target and fixed.weights_read() == target + 3 * draft
    rounds = RowStatistics(auto.timing.tokens[0]).rounds
    drafted = sum(k * n for k, n in rounds.items()) / sum(rounds.values())
    assert auto.weights_read() == pytest.approx(target + drafted * draft)
    (pard,) = columns_of(["draft"], "--speculate_k", "3", "--draft_checkpoint", str(ROOT / "checkpoints" / "demo-pard"))
    list(take_turns([pard]))
    assert pard.weights_read() == target + weight_bytes(pard.engine.models[1]), "it drafts all three in one pass"


# ------------------------------------------------------------------------------------------ the program


def run_main(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["race", *COMMON, "--max_new_tokens", "12", *arguments])
    monkeypatch.setenv("COLUMNS", "100")
    status = 0
    try:
        main()
    except SystemExit as exit:
        status = exit.code
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return status, out, err


def test_the_default_race_printed_and_saved(monkeypatch, capsys, tmp_path):
    """Not a terminal: no codes, the columns and the table once; --save .txt is the same, .svg an SVG with it."""
    status, out, err = run_main(monkeypatch, capsys, "--save", str(tmp_path / "race.txt"))
    assert status == 0 and "\x1b" not in out and out.count("╭") == 1 and "int8+draft: ready" in err
    assert (tmp_path / "race.txt").read_text().split() == out.split()
    lines = out.splitlines()
    table = [line.split() for line in lines[next(n for n, line in enumerate(lines) if "configuration" in line) :]]
    rows = {words[0]: words for words in table if words and re.match("(plain|int8|draft)", words[0])}
    assert list(rows) == ["plain", "int8", "draft", "int8+draft"] and rows["plain"][2] == "1.00"
    assert rows["draft"][-1] == "equal" and rows["plain"][4] == "–" and 0 < float(rows["draft"][4]) <= 1
    assert float(rows["int8"][1]) / float(rows["plain"][1]) == pytest.approx(float(rows["int8"][2]), abs=0.02)
    status, _, _ = run_main(monkeypatch, capsys, "--columns", "plain,draft", "--save", str(tmp_path / "race.svg"))
    svg = "".join(xml.fromstring((tmp_path / "race.svg").read_text()).itertext())
    assert status == 0 and "Tom" in svg and "draft" in svg and "tok/s" in svg
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("after", [0, 3])
def test_interrupted_it_shows_what_there_is(monkeypatch, capsys, after):
    turn, turns = race.Column.turn, itertools.count()

    def interrupted(column):
        if next(turns) == after:
            raise KeyboardInterrupt
        turn(column)

    monkeypatch.setattr(race.Column, "turn", interrupted)
    status, out, _ = run_main(monkeypatch, capsys, "--columns", "plain,draft")
    assert status == 130 and "One day, Tom" in out and "equal in" in out and "configuration" in out


@pytest.mark.parametrize(
    "arguments, names",
    [
        (["--columns", "plain,magic"], "column 'magic': give plain, or one of int8, int4-g32"),
        (["--columns", "int8+int4-g32"], "column 'int8+int4-g32': give plain"),
        (["--columns", "draft+ngram"], "column 'draft+ngram': give plain"),
        (["--columns", "plain+draft"], "column 'plain+draft': give plain"),
        (["--columns", ""], "column '': give plain"),
        (["--columns", "plain,int8,draft,ngram,layers:0"], "5 columns are more than the 4 that fit"),
        (["--columns", "layers:0-9"], "--draft layers:0-9: layers"),
        (["--columns", "quantized:int3"], "quantization scheme 'int3' does not exist"),
        (["--columns", "plain", "--quantize", "int8"], "with --columns say it there: int8"),
        (["--columns", "plain", "--speculate_k", "3"], "--speculate_k needs a column that drafts"),
        (["--columns", "draft", "--speculate_k", "x"], "--speculate_k x must be a number"),
        (["--quantize", "int3"], "column 'int3': give plain"),
        (["--checkpoint", "nowhere"], "nowhere: no such folder"),
        (["--prompt", ""], "--prompt is empty"),
        (["--max_new_tokens", "9999"], "over the limit of 512 positions"),
        (["--temperature", "-1"], "temperature = -1.0"),
        (["--seed", "-1"], "--seed -1"),
        (["--save", "race.png"], "--save race.png: its name must end in .svg or .txt"),
        (["--save", "nowhere/race.svg"], "--save nowhere/race.svg: its folder"),
    ],
)
def test_user_errors(monkeypatch, capsys, arguments, names):
    status, out, err = run_main(monkeypatch, capsys, *arguments)
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert status == 2 and out == "" and len(lines) == 1 and names in lines[0]


def test_without_rich_one_line_names_the_command():
    code = "import sys, runpy; sys.modules['rich'] = None; runpy.run_module('scripts.race', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "error: scripts.race draws with rich: pip install rich==15.0.0\n"
    assert "rich==15.0.0" in (ROOT / "requirements-dev.txt").read_text().splitlines()


def test_on_a_terminal_it_moves_and_ctrl_c_ends_it():
    """A pseudo-terminal of 100 by 30: frames are drawn over each other, Ctrl-C leaves columns and table, exit 130."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    command = [sys.executable, "-m", "scripts.race", *COMMON, "--max_new_tokens", "500", "--ignore_eos"]
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [*command, "--columns", "plain,draft"], cwd=ROOT, stdin=slave, stdout=slave, stderr=slave, close_fds=True,
        env={**environment, "TERM": "xterm"},
        preexec_fn=lambda: (os.setsid(), fcntl.ioctl(slave, termios.TIOCSCTTY, 0)),
    )  # fmt: skip
    os.close(slave)
    seen, end, typed = b"", time.monotonic() + 60, False
    while select.select([master], [], [], max(0, end - time.monotonic()))[0]:
        try:
            seen += os.read(master, 65536)
        except OSError:  # the other side has closed
            break
        if not typed and seen.count("╭".encode()) >= 3:
            os.write(master, b"\x03")
            typed = True
    os.close(master)
    seen = seen.replace(b"^C", b"").decode()  # the terminal echoes it, wherever it comes
    assert process.wait(timeout=30) == 130, seen
    assert "Traceback" not in seen and "\x1b[34m" in seen and seen.count("\x1b[?25l") == seen.count("\x1b[?25h") == 1
    lines = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", seen).replace("\r", "\n").splitlines()
    lines = [line for line in lines if "MB/s" not in line and "?B/s" not in line]  # of tqdm
    assert max(map(cells, lines)) <= 100
    assert seen.count("╭") > 3 and "configuration" in seen.rsplit("╭", 1)[1] and "equal in" in seen
    frames = seen.split("╭")[1:]
    assert all(frame.count("\n") < 30 for frame in frames[:-1])  # a frame never scrolls


def test_results_fit_any_width():
    columns = columns_of(["plain", "int8+draft"], "--max_new_tokens", "3")
    list(take_turns(columns))
    for width in (60, 80, 100, 200):
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(results(columns, False))
        assert max(map(cells, console.export_text().splitlines())) <= width
