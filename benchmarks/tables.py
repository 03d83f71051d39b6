"""Results files as Markdown tables, written between marks in a text: the figures that README.md shows.

    fill        a text with its tables made anew from the rows
    TABLES      name in a mark -> the function that makes that table

A table stands between `<!-- table NAME -->` and `<!-- end -->`. `python -m benchmarks.bench --plot` fills README.md and
benchmarks/README.md; a test compares them with the files. A dash stands for a figure that was not measured.
"""

import functools
import re
from collections.abc import Sequence

from benchmarks.plots import RATED
from weights.formats import FORMATS, SCHEMES

MARKED = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", flags=re.DOTALL)

RATES = {
    "quickdraft, compiled, tok/s": "1b.{}.compiled.tok_s",
    "quickdraft, eager, tok/s": "1b.{}.tok_s",
    "of the read bandwidth, compiled": "1b.{}.compiled.of_read_bandwidth",
    "over llama.cpp 0.3.36 (BF16, Q8_0, Q4_0)": "1b.{}.vs_llamacpp",
    "over gpt-fast HEAD, compiled": "1b.{}.vs_gptfast",
    "over transformers 5.23, eager": "1b.{}.vs_transformers",
    "over transformers 5.23, static cache, compiled": "1b.{}.vs_transformers.compiled",
    "verifying 6 rows, in steps of one": "1b.{}.compiled.verify6_over_1",
}
OTHERS = {
    "prefill of 512 tokens, compiled, over transformers eager": "1b.prefill512.vs_transformers",
    "a step in a cache of 32,768 over one of 256, 100 tokens filled": "1b.bf16.cache32k_over_256",
    "a step with 16,000 tokens filled, over the time of its bytes": "1b.bf16.ctx16k_over_bytes",
    "an int8 cache over a bf16 one, 16,000 tokens filled": "1b.kv_int8.ctx16k.speedup",
    "the same, verifying 6 rows": "1b.kv_int8.ctx16k.verify6_speedup",
    "prefill of 8,192 tokens, eager, over transformers eager": "prefill8k.vs_transformers",
    "the same over llama.cpp": "prefill8k.vs_llamacpp",
    "a sparse 1B shape, bf16, over llama.cpp": "moe.bf16.vs_llamacpp",
    "the same in int8, of the read bandwidth": "moe.int8.of_read_bandwidth",
    "the same in bf16, verifying 6 rows, in steps of one": "moe.verify6_over_1",
    "`python generate.py` to its first byte of text, s": "demo.first_token_s",
    "compiling 22 layers, empty caches on disk, s": "compile.22layers.cold_s",
    "compiling 22 layers, filled caches, s": "compile.22layers.warm_s",
    "peak of anonymous memory while loading, over the weights": "load.peak_over_weights",
    "speculation: measured speed-up over predicted, memory-bound pair": "spec.measured_over_predicted",
}
DRAFTS = {
    "1.1B, 0.1B, α set to 0.5": "spec.1b.alpha50",
    "1.1B, 0.1B, α set to 0.8": "spec.1b.alpha80",
    "1.1B, 0.1B, α set to 0.8, compiled": "spec.1b.alpha80.compiled",
    "1.1B, 0.1B, α set to 0.95": "spec.1b.alpha95",
    "demo pair, greedy, K = 2": "spec.demo.greedy.k2",
    "demo pair, greedy, compiled": "spec.demo.greedy.k5.compiled",
    "demo pair, T = 0.8, K = 2": "spec.demo.t08.k2",
    "demo pair, T = 0.8, compiled, auto": "spec.demo.t08.kauto.compiled",
    "1.1B that copies its prompt, ngram": "spec.ngram.copy",
    "1.1B where nothing matches, ngram": "spec.ngram.nothing",
}
REAL = {
    "Q4_1 file, compiled, over llama.cpp on the same file": "smollm2.q4_1.vs_llamacpp",
    "Q4_1 file, eager, over the same": "smollm2.q4_1.eager.vs_llamacpp",
    "BF16 file, compiled, over llama.cpp on the same file": "smollm2.bf16.vs_llamacpp",
    "Q4_1 file beside one busy process, over quiet": "smollm2.q4_1.busy_over_quiet",
    "`python generate.py --compile` with filled caches to its first byte of text, s": "smollm2.compiled.warm_start_s",
    "prompt lookup where there is a text to copy, over plain": "smollm2.spec.ngram.speedup",
    "llama.cpp's prompt lookup on the same prompts, over its plain": "smollm2.spec.ngram.llamacpp.speedup",
    "its int4-g32 self drafts for the BF16 file, over plain": "smollm2.spec.quantized.speedup",
    "a PARD draft of six layers drafts 5 for the BF16 file, over plain": "smollm2.spec.pard.speedup",
    "an EAGLE-3 draft of 8,192 tokens drafts 5 for it, over plain": "smollm2.spec.eagle3.speedup",
    "a model of the PARD draft's size drafts 5 for it, over plain": "smollm2.spec.distilled.speedup",
    "all layers but some draft, over plain": "smollm2.spec.layers.speedup",
}
MOE = {
    "over llama.cpp 0.3.36 (BF16, Q8_0)": "moe.{}.vs_llamacpp",
    "of the read bandwidth, experts that were read": "moe.{}.of_read_bandwidth",
    "quickdraft, compiled, tok/s": "moe.{}.compiled.tok_s",
    "quickdraft, eager, tok/s": "moe.{}.tok_s",
    "verifying 6 rows, in steps of one": "moe.{}.verify6_over_1",
}
FILLED = (100, 1000, 4000, 16_000)
MEDIANS = ("median (min–max)",)

RowById = dict[str, dict]
Lines = list[list[str]]  # of cells; the first one is the head


def by_column(title: str, columns: Sequence[str], ids: dict[str, str], rows: RowById) -> Lines:
    """A line for each label of `ids`, whose {} stands for a column."""
    return [[title, *columns], *([label, *(cell(rows, id.format(c)) for c in columns)] for label, id in ids.items())]


def context(rows: RowById) -> Lines:
    """Milliseconds a step, and GB that it reads, by positions filled."""
    lines = [["positions filled", *(f"{filled:,}" for filled in FILLED)]]
    for label, kind in (("all attended to", "full"), ("a window of 1,024", "window1024")):
        for unit, name in (("ms", "ms"), ("gb", "GB")):
            ids = [f"1b.bf16.compiled.{kind}.filled{filled}.{unit}" for filled in FILLED]
            lines.append([f"{label}, {name}", *(cell(rows, id) for id in ids)])
    return lines


def drafts(rows: RowById) -> Lines:
    columns = {"α": "alpha", "tokens a round": "tokens_per_round", "speed-up": "speedup"}
    columns["over predicted"] = "measured_over_predicted"
    lines = [[label, *(cell(rows, f"{id}.{name}") for name in columns.values())] for label, id in DRAFTS.items()]
    return [["target, drafter", *columns], *lines]


def quality(rows: RowById) -> Lines:
    ids = {"bf16": "bf16"} | {name: name for name in SCHEMES}
    ids |= {"int4-g128, searched ranges": "int4-g128.search", "int4-g128, GPTQ": "int4-g128.gptq"}
    lines = []
    for label, id in ids.items():
        scheme = id.split(".")[0]
        bits = 16 if scheme == "bf16" else FORMATS[scheme].bits_per_weight
        figures = (rows.get(f"demo.{id}.{name}") for name in ("ppl", "kl", "top1"))
        lines.append([label, f"{bits:.3g}", *(f"{row['value']:.4g}" if row else "–" for row in figures)])
    lines.sort(key=lambda line: -float(line[1]))
    return [["", "bits a weight", "perplexity", "KL, nats a token", "same likeliest token"], *lines]


TABLES = {
    "rates": functools.partial(by_column, "", RATED, RATES),
    "others": functools.partial(by_column, "", MEDIANS, OTHERS),
    "real": functools.partial(by_column, "SmolLM2-135M-Instruct", MEDIANS, REAL),
    "moe": functools.partial(by_column, "", ("bf16", "int8"), MOE),
    "context": context,
    "drafts": drafts,
    "quality": quality,
}


def cell(rows: RowById, id: str) -> str:
    if id not in rows:
        return "–"
    value, low, high = (number(rows[id][name]) for name in ("value", "min", "max"))
    return value if low == high else f"{value} ({low}–{high})"


def number(value: float) -> str:
    """Three figures, or all that stand before the point."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def markdown(lines: Lines) -> str:
    head, *rest = (f"| {' | '.join(line)} |\n" for line in lines)
    return head + "|" + "---|" * len(lines[0]) + "\n" + "".join(rest)


def fill(text: str, rows: list[dict]) -> str:
    """The text with every marked table made from `rows` (of all results files). ValueError for an unknown table."""
    row_by_id = {row["id"]: row for row in rows}

    def table(match: re.Match) -> str:
        if match[2] not in TABLES:
            raise ValueError(f"no table is called {match[2]!r}; there are {', '.join(TABLES)}")
        return match[1] + markdown(TABLES[match[2]](row_by_id)) + match[3]

    return MARKED.sub(table, text)
