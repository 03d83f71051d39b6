"""Results files as Markdown tables, written between marks in a text: the figures that README.md
shows.

    fill        a text with its tables made anew from the rows
    TABLES      name in a mark -> the function that makes that table
    PAGES       the pages that hold tables

A table stands between `<!-- table NAME -->` and `<!-- end -->`. `python -m benchmarks.bench --plot`
fills the pages; a test compares them with the files. A dash stands for a figure that was not
measured.
"""

import functools
import json
import math
import re
from collections.abc import Callable

from benchmarks.pipes import ROOT
from decoding.errors import UserError
from weights.formats import FORMATS
from weights.schemes import SCHEMES

PAGES = ("README.md", "benchmarks/README.md", "docs/measured.md", "docs/proof.md")
MARKED = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", flags=re.DOTALL)

# name -> the table's title, its columns (head -> word in an id), and its lines (label -> id, {} for
# the column's word)
TABLES_BY_COLUMN = json.loads((ROOT / "benchmarks" / "tables.json").read_text())
FILLED = (100, 1000, 4000, 16_000)

RowById = dict[str, dict]
Lines = list[list[str]]  # of cells; the first one is the head


def bits_per_weight(scheme: str) -> float:
    """Bits of codes and scales per weight, for rows so long that a scale per row is negligible."""
    columns = 2**20
    parts = FORMATS[scheme].shapes(1, columns).values()
    return 8 * sum(math.prod(shape) * dtype.itemsize for shape, dtype in parts) / columns


def by_column(table: dict, rows: RowById) -> Lines:
    """A table of tables.json."""
    lines = [
        [label, *(cell(rows, id.format(word)) for word in table["columns"].values())]
        for label, id in table["ids"].items()
    ]
    return [[table["title"], *table["columns"]], *lines]


def summary(rows: RowById) -> Lines:
    head, *lines = by_column(TABLES_BY_COLUMN["summary"], rows)
    return [head, *([label, "not measured" if value == "–" else value] for label, value in lines)]


def context(rows: RowById) -> Lines:
    """Milliseconds a step, and GB that it reads, by positions filled."""
    lines = [["positions filled", *(f"{filled:,}" for filled in FILLED)]]
    for label, kind in (("all attended to", "full"), ("a window of 1,024", "window1024")):
        for unit, name in (("ms", "ms"), ("gb", "GB")):
            ids = [f"1b.bf16.compiled.{kind}.filled{filled}.{unit}" for filled in FILLED]
            lines.append([f"{label}, {name}", *(cell(rows, id) for id in ids)])
    return lines


def quality(rows: RowById) -> Lines:
    ids = {"bf16": "bf16"} | {name: name for name in SCHEMES}
    ids |= {"int4-g128, searched ranges": "int4-g128.search", "int4-g128, GPTQ": "int4-g128.gptq"}
    lines = []
    for label, id in ids.items():
        scheme = id.split(".")[0]
        bits = 16 if scheme == "bf16" else bits_per_weight(scheme)
        figures = (rows.get(f"demo.{id}.{name}") for name in ("ppl", "kl", "top1"))
        lines.append(
            [label, f"{bits:.3g}", *(f"{row['value']:.4g}" if row else "–" for row in figures)]
        )
    lines.sort(key=lambda line: -float(line[1]))
    return [
        ["", "bits a weight", "perplexity", "KL, nats a token", "same most likely token"],
        *lines,
    ]


def proof(rows: RowById) -> Lines:
    """The last recorded run of each attack, from the attacks' own files."""
    lines = []
    for name, result in RESULTS.items():
        attack = "mutate" if name == "mutation" else name
        run = json.loads((ROOT / "benchmarks" / f"{name}.json").read_text())
        command = re.sub(r"^python -m \w+(\.attacks)?\.", "", run["command"])
        lines.append(
            [f"`{attack}`", result(run), f"`{command}`", f"{run['commit']}, {run['date']}"]
        )
    return [["attack", "result", "command: `python -m tests.attacks.…`", "commit"], *lines]


def controls_of(run: dict) -> str:
    controls = run["controls"].values()
    return (
        f"{sum(control['as_it_should_be'] for control in controls)} of {len(controls)} controls"
        f" as expected"
    )


def suite_of(row: dict) -> str:
    others = sum(row["other"].values())
    return f"{row['suite']}: {row['passed']} of {row['apply']} tests pass, {others:,} do not apply"


def levels_of(run: dict) -> str:
    def names(status: str) -> str:
        return ", ".join(level["level"] for level in run["levels"] if level["status"] == status)

    texts = {
        status: names(status) for status in ("passed", "failed", "crashed", "not this processor")
    }
    return "; ".join(f"{status}: {text}" for status, text in texts.items() if text)


RESULTS: dict[str, Callable[[dict], str]] = {
    "law": lambda run: (
        f"{run['tokens']:,} tokens in {len(run['cases']) - 1} cases, {run['tests']} tests:"
        f" smallest p "
        f"{run['smallest_p']:.1e}, threshold {run['threshold']:.1e}; {controls_of(run)}"
    ),
    "drift": lambda run: (
        run["total"] + "; all report `identical`" * all(row["identical"] for row in run["settings"])
    ),
    "fuzz": lambda run: (
        f"{run['cases']:,} cases: {run['loaded']:,} loaded, {sum(run['refused'].values()):,}"
        f" refused, "
        f"{len(run['failures'])} failed; slowest {run['slowest_s']} s"
    ),
    "faults": lambda run: f"{run['cases']} cases, {len(run['failures'])} failed",
    "serve_load": lambda run: (
        f"{run['minutes']:.0f} minutes, {run['counts']['asked']:,} requests: {run['lost']} lost,"
        f" {len(run['wrong'])} "
        f"wrong; memory {run['resident_mb'][0]:.0f} MB in the second quarter,"
        f" {run['resident_mb'][1]:.0f} in the last"
    ),
    "soak": lambda run: (
        f"{run['minutes']:.0f} minutes, {run['answers']:,} answers of {run['tokens']:,} tokens,"
        f" {run['interrupted']} "
        f"interrupts: {len(run['wrong'])} wrong; memory {run['mb_early']:.0f} MB early,"
        f" {run['mb_late']:.0f} late"
    ),
    "processors": levels_of,
    "openai_suites": lambda run: "; ".join(map(suite_of, run["suites"])),
    "mutation": lambda run: f"{run['tried']:,} mutants, {run['killed']:,} killed",
}
TABLES = {name: functools.partial(by_column, table) for name, table in TABLES_BY_COLUMN.items()}
TABLES |= {"summary": summary, "context": context, "quality": quality, "proof": proof}


def cell(rows: RowById, id: str) -> str:
    if id not in rows:
        return "–"
    if rows[id]["value"] is None:
        return "failed"
    value, low, high = (number(rows[id][name]) for name in ("value", "min", "max"))
    return value if low == high else f"{value} ({low}–{high})"


def number(value: float) -> str:
    """Three significant digits, or all digits before the point."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def markdown(lines: Lines) -> str:
    head, *body = (f"| {' | '.join(line)} |\n" for line in lines)
    return head + "|" + "---|" * len(lines[0]) + "\n" + "".join(body)


def fill(text: str, rows: list[dict]) -> str:
    """The text with every marked table made from `rows` (of all results files). UserError for an
    unknown table."""
    row_by_id = {row["id"]: row for row in rows}

    def table(match: re.Match) -> str:
        if match[2] not in TABLES:
            raise UserError(f"no table is called {match[2]!r}; there are {', '.join(TABLES)}")
        return match[1] + markdown(TABLES[match[2]](row_by_id)) + match[3]

    return MARKED.sub(table, text)
