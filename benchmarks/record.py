"""Results as JSON with their source: rows with a median and a range, merged by id into one file.

row, failed_row     one result; a program's failure in place of one
ratios              quotients of two series, round by round
publish             print rows, and merge them into a results file
write_results       the merge
record              results of another form, as a file of their own
one_of, list_of     types for argparse: names of measurements, shapes or formats
"""

import argparse
import datetime
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import torch

from benchmarks.pipes import ROOT
from loading.files import write_atomically

UNSTEADY = 1.5  # max / min of rounds of the same work, from which on a median says little


def row(
    id: str, values: Iterable[float], unit: str, note: str = "", same_work: bool = False
) -> dict:
    """One result: the median of `values` with their range. Where every round did the same work, a
    range that no single rate can explain is said in the note: a processor with two modes, or
    another program beside this one."""
    values = list(values)
    value, low, high = (float(f"{f(values):.4g}") for f in (statistics.median, min, max))
    if same_work and high > UNSTEADY * low:
        note = f"unsteady, max / min {high / low:.1f}; {note}".removesuffix("; ")
    return {"id": id, "value": value, "min": low, "max": high, "unit": unit, "note": note}


def failed_row(id: str, failure: str) -> dict:
    """The row of a program that gave no figure."""
    return {"id": id, "value": None, "min": None, "max": None, "unit": "", "note": failure}


def ratios(numerators: Iterable[float], denominators: Iterable[float]) -> list[float]:
    """Quotients, round by round."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def publish(
    rows: list[dict], file: Path | None, machine: str | None = None, commit: str | None = None
) -> list[dict]:
    """Print rows on stderr, and merge them into `file` if there is one. Returns the rows."""
    for r in rows:
        figures = ""
        if r["value"] is not None:
            figures = f"{r['value']:>9} ({r['min']}–{r['max']}) {r['unit']}  "
        print(f"{r['id']:42} {figures}{r['note']}", file=sys.stderr)
    if file is not None:
        write_results(file, rows, command_line(), machine, commit)
    return rows


def write_results(
    file: Path,
    rows: list[dict],
    command: str,
    machine: str | None = None,
    commit: str | None = None,
) -> None:
    """Merge rows into a results file by id. `machine` measured them, by default this CPU. `commit`
    is for a checkout without git."""
    machine, commit, date = (
        machine or hardware(),
        commit or commit_of_checkout(),
        str(datetime.date.today()),
    )
    previous = json.loads(file.read_text()) if file.exists() else {"rows": []}
    # Rows of one file may come from several runs and machines. Old rows without a source have the
    # file's.
    file_source = {"hardware": previous.get("hardware"), "date": previous.get("date")}
    source = {"commit": commit, "command": command, "hardware": machine, "date": date}
    merged = {r["id"]: file_source | r for r in previous["rows"]} | {
        r["id"]: r | source for r in rows
    }
    result = {
        "commit": commit,
        "date": date,
        "hardware": machine,
        "torch": torch.__version__,
        "command": command,
        "rows": sorted(merged.values(), key=lambda r: r["id"]),
    }
    write_json(file, result)


def record(file: Path, results: dict) -> None:
    """Write command, commit, date and torch's version, then `results`. If that fails, the file
    stays as it was."""
    source = {
        "command": shlex.join(
            ["python", "-m", sys.modules["__main__"].__spec__.name, *sys.argv[1:]]
        ),
        "commit": commit_of_checkout(),
        "date": str(datetime.date.today()),
        "torch": torch.__version__,
    }
    write_json(file, source | results)


def write_json(file: Path, value: dict) -> None:
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    write_atomically(file, lambda partial: partial.write_text(text, encoding="utf-8"))


def hardware() -> str:
    """The processor's name and number of cores."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.processor()}, {os.cpu_count()} cores"


def commit_of_checkout() -> str:
    """The commit, with "-dirty" if files differ from it; "unknown" without git or its folder."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        describe = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:  # no git program
        return "unknown"
    return describe.stdout.strip() or "unknown"


# ----------------------------------------------------------------------------------- command line


def command_line() -> str:
    """This program's command line, with FILE and DIR in place of this machine's paths."""
    words = ["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}"]
    for previous, word in zip(sys.argv, sys.argv[1:]):
        if previous == "--write":
            word = f"benchmarks/{Path(word).name}"
        elif os.sep in word:
            word = "DIR" if Path(word).is_dir() else "FILE"
        words.append(word)
    return " ".join(words)


def one_of(kind: str, names: Collection[str]) -> Callable[[str], str]:
    """A type for argparse: one of these names."""

    def check(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(
                f"there is no {kind} {text}; take one of {', '.join(names)}"
            )
        return text

    return check


def list_of(kind: str, names: Collection[str]) -> Callable[[str], list[str]]:
    """A type for argparse: some of these names, separated by commas."""
    check = one_of(kind, names)
    return lambda text: [check(name) for name in text.split(",")]
