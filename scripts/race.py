"""One prompt, up to four configurations, side by side: `python -m scripts.race`.

    column_flags            a column's spec, such as int8+draft, as flags of generate.py
    load_columns, Column    a configuration with its engine, its clock, and what it has decoded so far
    take_turns, shown       who decodes next, and what each column had at one moment
    picture, results, save  the columns, the table below them, and both as a file

"At the same moment" needs care on one machine. Each column has a clock that counts its own prefill and decoding alone
(generate.Timing's seconds), the column whose clock is behind takes the next turn, and what is shown is what each had
when its own clock stood at the same time. Loading, drawing and the others' turns are on nobody's clock, so the race is
seen slower than it is, by about the number of columns, and drifts of the machine hit all of them alike.

What this cannot hide is caches: the others' turns push a column's weights out of the processor's caches. Weights larger
than those are read from memory in every step anyhow, but a small model, such as the demo, would find its own again if
it were alone. Hence turns last TURN_S, several steps of a small model, of which only the first finds the caches cold.
Measured with the demo's four columns on two busy EPYC cores, by the fastest tenth of the steps: turns of one step made
a column's steps 2 % shorter to 7 % longer than alone. With TURN_S what is left drowned in that machine's noise.

This file has no loading, decoding or sampling of its own: a column is a Namespace of generate.py's flags. It is the
only file that needs rich.
"""

import argparse
import contextlib
import io
import math
import os
import re
import sys
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from cli.errors import ending_plainly, fail, interrupts_held, use_threads
from cli.flags import DTYPES, Parser, check_options, positive, speculate_k, thread_count
from cli.flags import parse_args as generate_flags
from cli.load import compiles, pick_device, warm_up
from cli.prompts import new_tokens
from cli.report import ACCEPTED, CORRECTED, PLAIN_TOKEN, RowStatistics, origin, rate, weight_bytes
from decoding.sampling import Sampling
from decoding.scheduler import common_prefix
from decoding.timing import Timing, synchronize
from decoding.validation import check_lengths
from generate import Engine, generate
from loading.files import write_atomically
from loading.tokenizer import Tokenizer
from quantize import SCHEMES
from scripts.compare import load_all

try:
    from rich import box
    from rich.console import Console, Group
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text
except ImportError:
    fail("scripts.race draws with rich: pip install rich==15.0.0")

DEMO = Path(__file__).parent.parent / "checkpoints"
MOST_COLUMNS = 4
LEAST_WIDTH = 11  # cells of text in a column: 1234.5 tok/s
TURN_S = 0.02  # of the column's own clock; at least one step
FRAMES_A_SECOND = 12
REHEARSED = 8  # tokens that each column decodes before the race, uncounted
CONTROLS = {code: " " for code in (*range(32), *range(127, 160)) if code != ord("\n")}  # would move the cursor


# -------------------------------------------------------------------------------------------- columns


def column_flags(spec: str, args: argparse.Namespace) -> list[str]:
    """The flags of generate.py that a column stands for. ValueError for a spec that means nothing."""
    parts = spec.split("+")
    schemes = [part for part in parts if part in SCHEMES]
    drafts = [part for part in parts if re.match("(draft|ngram)$|(ngram|layers|quantized):", part)]
    if parts != ["plain"] and (len(schemes) + len(drafts) < len(parts) or len(schemes) > 1 or len(drafts) > 1):
        raise ValueError(
            f"column {spec!r}: give plain, or one of {', '.join(SCHEMES)}, or one of draft, ngram, ngram:N,"
            " layers:0-7,24-31 and quantized:SCHEME, or one of each joined by +, such as int8+draft"
        )
    flags = [f"--checkpoint={args.checkpoint}", f"--temperature={args.temperature}", f"--seed={args.seed}"]
    flags += [f"--device={args.device}"] * (args.device is not None)
    flags += [f"--dtype={args.dtype}"] * (args.dtype is not None)
    flags += [] if args.compile is None else ["--compile" if args.compile else "--no-compile"]
    flags += [f"--quantize={scheme}" for scheme in schemes]
    for draft in drafts:
        flags += [f"--draft_checkpoint={args.draft_checkpoint}" if draft == "draft" else f"--draft={draft}"]
        flags += [f"--speculate_k={args.speculate_k}"] * (args.speculate_k is not None)
    return flags


class Moment(NamedTuple):
    """A token that a column got, and what its run had come to by then."""

    at: float  # seconds on the column's own clock
    text: str
    origin: int  # cli/report.py's
    steps: int
    judged: int = 0  # drafted tokens that were accepted or rejected
    accepted: int = 0


class Column:
    """One configuration on its way through the prompt. `clock` counts its own seconds and nobody else's."""

    def __init__(
        self, name: str, engine: Engine, tokenizer: Tokenizer, sampling: Sampling, prompt: list[int], new: int,
        seed: int = 0, stop_ids: frozenset[int] = frozenset(),
    ):  # fmt: skip
        self.name, self.engine, self.tokenizer, self.stop_ids = name, engine, tokenizer, stop_ids
        self.timing, self.ids, self.moments, self.ended = Timing(), [], [], False
        self.paused = None  # since when others have their turns; for how long, not yet and already counted by Timing:
        self.pause, self.waited = 0.0, 0.0
        self.stream = tokenizer.stream(continues=True)
        options = {"sampling": sampling, "seed": seed, "stop_ids": stop_ids, "engine": engine}
        list(generate(engine.model, [prompt], max_new_tokens=min(new, REHEARSED), **options))
        self.tokens = generate(engine.model, [prompt], max_new_tokens=new, timing=self.timing, **options)

    @property
    def clock(self) -> float:
        return self.timing.prefill_s + self.timing.decode_s - self.waited

    @property
    def text(self) -> str:
        return "".join(moment.text for moment in self.moments)

    def turn(self) -> None:
        """Decode for TURN_S, at least one step. A GPU is given time to finish what it was told to do: its steps run
        ahead of the host, and its Timing, unlike a CPU's, goes on while nobody asks for tokens."""
        begin = self.clock
        if self.paused is not None and runs_ahead(self.engine):
            self.pause += time.perf_counter() - self.paused
        with interrupts_held() as interrupts:
            while not self.ended and not interrupts and (self.clock <= begin or self.clock < begin + TURN_S):
                self._next()
        synchronize(self.engine.device)
        self.paused = time.perf_counter()

    def _next(self) -> None:
        before = self.clock
        row, id = next(self.tokens, (0, None))
        if self.clock > before:  # a step was read, and with it the pause before it
            self.waited, self.pause = self.waited + self.pause, 0.0
        self.ended = id is None
        if self.ended:
            last = self.moments[-1]
            self.moments[-1] = last._replace(text=last.text + self.stream.flush())
            return
        self.ids.append(id)
        text = "" if id in self.stop_ids else self.stream.feed(id)
        came_from = origin(self.timing.tokens[row][len(self.ids) - 1]) if self.timing.tokens else PLAIN_TOKEN
        judged, accepted = (self.moments[-1].judged, self.moments[-1].accepted) if self.moments else (0, 0)
        judged, accepted = judged + (came_from in STYLES), accepted + (came_from == ACCEPTED)
        self.moments.append(Moment(self.clock, text, came_from, self.timing.steps, judged, accepted))

    def weights_read(self) -> float:
        """Bytes of weights that a step read, drafting included; the mean over its rounds where their K varied."""
        target, *draft = self.engine.models
        lengths = [step.k for step in self.timing.records] or [0]
        by_length = {k: weight_bytes(target, k + 1) for k in {*lengths}}
        passes = sum(self.engine.drafter.passes(k) for k in lengths if k) if draft else 0
        read = sum(by_length[k] for k in lengths) + sum(weight_bytes(model) for model in draft) * passes
        return read / len(lengths)


def runs_ahead(engine: Engine) -> bool:
    """Does the device go on while nobody asks for tokens, and Timing with it?"""
    return engine.device.type == "cuda"


def load_columns(args: argparse.Namespace, specs: Sequence[str]) -> list[Column]:
    """Every column, warmed up. Columns with the same weights share them. ValueError for what does not fit."""
    settings = [generate_flags(column_flags(spec, args)) for spec in specs]
    if args.speculate_k is not None and not any(own.draft or own.draft_checkpoint for own in settings):
        raise ValueError("--speculate_k needs a column that drafts")
    for own in settings:
        check_options(own)
    sampling, ks, device = Sampling(args.temperature), [speculate_k(own) for own in settings], pick_device(args.device)
    use_threads(args.threads)
    models, tokenizers, drafters = zip(*load_all(settings), strict=True)
    tokenizer = tokenizers[0]
    prompt, new = fitting(args, models, drafters, tokenizer)
    stop_ids = frozenset() if args.ignore_eos else tokenizer.stop_ids
    columns = []
    for spec, model, drafter, k in zip(specs, models, drafters, ks, strict=True):
        compile = compiles(args.compile, device)
        engine = Engine(model, 1, len(prompt) + new, compile=compile, drafter=drafter, speculate_k=k)
        warm_up(engine, sampling, filled=(len(prompt) + new) // 2)
        columns.append(Column(spec, engine, tokenizer, sampling, prompt, new, args.seed, stop_ids))
        print(f"{spec}: ready", file=sys.stderr)
    return columns


def fitting(args, models: Sequence, drafters: Sequence, tokenizer: Tokenizer) -> tuple[list[int], int]:
    """(prompt, new tokens), which fit in every column's contexts. ValueError if they do not."""
    if not args.prompt:
        raise ValueError("--prompt is empty: give it at least one character")
    own_caches = [drafter.model for drafter in drafters if drafter is not None and drafter.owns_cache]
    limit = min(model.config.max_seq_length for model in [*models, *own_caches])
    prompt = tokenizer.encode(args.prompt)
    new = new_tokens(args.max_new_tokens, prompt, limit)
    for model, drafter in zip(models, drafters, strict=True):
        check_lengths(model, [prompt], [new], model.config.max_seq_length, drafter)
    return prompt, new


# ---------------------------------------------------------------------------------------------- turns


def take_turns(columns: Sequence[Column]) -> Iterator[float]:
    """Let the column whose clock is behind take a turn, until all have ended. Yields the time that all clocks have
    reached: what each column has before it is complete. Columns that have ended wait for nobody."""
    while running := [column for column in columns if not column.ended]:
        min(running, key=lambda column: column.clock).turn()
        yield min((column.clock for column in columns if not column.ended), default=math.inf)


def shown(moments: Sequence[Moment], at: float) -> Sequence[Moment]:
    """What stood in a column before `at`. Not at it: more tokens of the round that ended then may be still to come."""
    return moments[: bisect_left(moments, at, key=lambda moment: moment.at)]


# -------------------------------------------------------------------------------------------- picture

STYLES = {ACCEPTED: "blue", CORRECTED: "red"}  # printing.COLOURS, in rich's words


def styled(prompt: str, moments: Sequence[Moment]) -> Text:
    """The prompt, dim, and the tokens in the colours that --show_drafts gives their origins."""
    text = Text()
    text.append(prompt.translate(CONTROLS), "dim")
    for moment in moments:
        text.append(moment.text.translate(CONTROLS), STYLES.get(moment.origin))
    return text


def tail(console: Console, text: Text, width: int, height: int | None) -> Text:
    """The last `height` lines (None: all) of the text, wrapped at so many cells, and empty lines up to the height."""
    lines = list(text.wrap(console, width))
    lines = lines[-height:] if height else lines
    return Text("\n").join(lines + [Text()] * ((height or 0) - len(lines)))


def tok_s(moments: Sequence[Moment]) -> float:
    """Without the prefill and its token."""
    return rate(len(moments) - 1, moments[-1].at - moments[0].at) if moments else 0.0


def rates(moments: Sequence[Moment], elapsed: float) -> Text:
    """What stands under a column, in four lines."""
    last = moments[-1] if moments else Moment(0.0, "", PLAIN_TOKEN, 0)
    kept = f"{last.accepted / last.judged:.0%} kept" if last.judged else "–"
    a_round = f"{rate(len(moments) - 1, last.steps):.2f}/round"
    lines = f"{tok_s(moments):.1f} tok/s", a_round, kept, f"{elapsed:.2f} s"
    return Text("\n".join(lines), no_wrap=True, overflow="ellipsis")


def cells(console: Console, n: int) -> int:
    """How wide each of n columns is, without a border and a space on either side. ValueError where it is too narrow."""
    inner = (console.width - 1) // n - 3
    if inner < LEAST_WIDTH:
        raise ValueError(f"{n} columns need {(LEAST_WIDTH + 3) * n + 1} cells: this terminal has {console.width}")
    return inner


def picture(console: Console, columns: Sequence[Column], prompt: str, at: float, height: int | None) -> Group:
    """All columns at one moment of their clocks, each `height` lines of text high."""
    inner = cells(console, len(columns))
    table = Table(box=box.ROUNDED)
    for column in columns:
        table.add_column(Text(column.name, no_wrap=True, overflow="ellipsis"), width=inner)
    now = [shown(column.moments, at) for column in columns]
    table.add_row(*[tail(console, styled(prompt, moments), inner, height) for moments in now])
    table.add_section()
    table.add_row(*[rates(moments, min(at, column.clock)) for moments, column in zip(now, columns, strict=True)])
    head = Text("each column at the same time on its own clock: its rate is that of decoding alone, caches aside")
    legend = Text.assemble(("blue", "blue"), ": drafted and accepted, ", ("red", "red"), ": in a rejected one's place")
    return Group(head, table, legend)  # the last line has room for the ^C that a terminal echoes


def results(columns: Sequence[Column], sampled: bool) -> Table:
    """One line a column: its rates, the weights that a step reads, and whether it says what the first one says."""
    table = Table(box=box.SIMPLE)
    table.add_column("configuration", overflow="fold", min_width=13)
    for name in ("tok/s", "speed-up", "tokens/round", "α", "MB/step"):
        table.add_column(name, justify="right")
    table.add_column("text")
    first = columns[0]
    for column in columns:
        steps, speed = column.timing.steps, tok_s(column.moments)
        alpha = RowStatistics(column.timing.tokens[0]).alpha if column.timing.tokens else None
        table.add_row(
            Text(column.name), f"{speed:.1f}", f"{rate(speed, tok_s(first.moments)):.2f}",
            f"{rate(len(column.ids) - 1, steps):.2f}", "–" if alpha is None else f"{alpha:.2f}",
            f"{column.weights_read() / 1e6:.2f}", Text(verdict(first, column, sampled)),
        )  # fmt: skip
    return table


def verdict(first: Column, column: Column, sampled: bool) -> str:
    """Is the column's text the first one's? As far as both have come, where the race was broken off."""
    if column is first:
        return "–"
    if sampled:
        return "sampled"
    a, b = first.ids, column.ids
    same = common_prefix(a, b)
    shorter = min((first, column), key=lambda one: len(one.ids))
    if same == len(shorter.ids) and (len(a) == len(b) or not shorter.ended):
        return "equal" if first.ended and column.ended else f"equal in {same} tokens"
    said = [repr(column.tokenizer.stream(continues=True).feed(ids[same])) if same < len(ids) else "the end"
            for ids in (b, a)]  # fmt: skip
    return f"token {same}: {said[0]} for {said[1]}"


def save(file: Path, width: int, *parts) -> None:
    """What was printed last, as SVG or plain text."""
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(*parts, sep="\n")
    if file.suffix == ".svg":
        write_atomically(file, lambda partial: console.save_svg(str(partial), title="python -m scripts.race"))
    else:
        write_atomically(file, lambda partial: console.save_text(str(partial)))


# ----------------------------------------------------------------------------------------------- main


def run(args: argparse.Namespace) -> bool:
    """Load, race, print; False where Ctrl-C broke it off, with what there was by then."""
    specs = column_specs(args)
    check_file(args.save)
    console = Console()
    cells(console, len(specs))
    columns = load_columns(args, specs)
    height = text_height(console, columns) if sys.stdout.isatty() else None
    finished = race(console, columns, args.prompt, height)
    parts = picture(console, columns, args.prompt, math.inf, height), results(columns, args.temperature > 0)
    if height is None:
        console.print(parts[0])
    console.print(parts[1])
    if args.save:
        save(Path(args.save), console.width, *parts)
    return finished


def text_height(console: Console, columns: Sequence[Column]) -> int:
    """How many lines of text leave room for the rest of the picture and the cursor, at least 3."""
    return max(3, console.height - len(console.render_lines(picture(console, columns, "", 0.0, 1))))


def race(console: Console, columns: Sequence[Column], prompt: str, height: int | None) -> bool:
    """Decode all columns in turns, drawn as they go on a terminal (`height` of text); False if Ctrl-C broke it off.
    Drawing waits for the end of a turn: a thread that draws would take time from whoever decodes."""
    live = Live(console=console, auto_refresh=False) if height else contextlib.nullcontext()
    drawn, finished = 0.0, True
    with live:
        try:
            for at in take_turns(columns):
                if height and time.perf_counter() - drawn > 1 / FRAMES_A_SECOND:
                    live.update(picture(console, columns, prompt, at, height), refresh=True)
                    drawn = time.perf_counter()
        except KeyboardInterrupt:
            finished = False
        if height:
            live.update(picture(console, columns, prompt, math.inf, height), refresh=True)
    return finished


def column_specs(args: argparse.Namespace) -> list[str]:
    """--columns, or by default four of --quantize and the draft. Commas inside layers:0-3,5 separate nothing."""
    if args.columns is None:
        scheme = args.quantize or "int8"
        return ["plain", scheme, "draft", f"{scheme}+draft"]
    if args.quantize:
        raise ValueError(f"--quantize is for the usual columns; with --columns say it there: {args.quantize}")
    specs = re.split(r",(?!\d)", args.columns)
    if len(specs) > MOST_COLUMNS:
        raise ValueError(f"--columns {args.columns}: {len(specs)} columns are more than the {MOST_COLUMNS} that fit")
    return specs


def check_file(name: str | None) -> None:
    """ValueError for a --save that would fail after the race."""
    if name is None:
        return
    if Path(name).suffix not in (".svg", ".txt"):
        raise ValueError(f"--save {name}: its name must end in .svg or .txt")
    if not os.access(Path(name).resolve().parent, os.W_OK):
        raise ValueError(f"--save {name}: its folder does not exist or cannot be written to")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(description="One prompt, up to four configurations, side by side.")
    add = parser.add_argument
    add("--checkpoint", default=str(DEMO / "demo"), metavar="PATH", help="a Hugging Face folder or a .gguf file")
    add("--draft_checkpoint", default=str(DEMO / "demo-draft"), metavar="PATH", help="what `draft` means in a column")
    add("--columns", metavar="SPEC,SPEC,…", help="each plain, or a scheme, draft, ngram:N, layers:0-3,5 or"
        " quantized:SCHEME, or a scheme and a draft joined by +; default: plain,int8,draft,int8+draft")  # fmt: skip
    add("--quantize", metavar="SCHEME", help="in place of int8 in the default columns")
    add("--prompt", default="Once upon a time")
    add("--max_new_tokens", type=positive, help="default: as generate.py's")
    add("--temperature", type=float, default=0.0, help="default: 0, at which all should say the same")
    add("--seed", type=int, default=0)
    add("--speculate_k", metavar="N|auto", help="tokens drafted a round, as generate.py's")
    add("--ignore_eos", action="store_true", help="do not end at the model's stop tokens")
    add("--device", help="as generate.py's")
    add("--threads", type=thread_count, metavar="N", help="of a CPU")
    add("--dtype", choices=DTYPES, help="default: the checkpoint's")
    add("--compile", action=argparse.BooleanOptionalAction, help="compile the steps; default: on cuda")
    add("--save", metavar="FILE", help="also write the final screen: FILE.svg or FILE.txt")
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args()
    with ending_plainly():
        finished = run(args)
    if not finished:
        sys.exit(130)


if __name__ == "__main__":
    main()
