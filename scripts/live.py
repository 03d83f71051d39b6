"""Both sides of scripts.compare decoding one prompt, drawn side by side with rich.

    watch      decodes both sides in turn; draws them while they run, or prints them once if there is no terminal
    Column     one side's answer, and the seconds that it has taken
    picture    the columns as a table

The column that has taken fewer seconds decodes the next step, so both columns show the same second of decoding. Each
side's steps push the other's weights out of the processor's caches, so rates may be lower than those of one side alone.
"""

import itertools
import time

import torch

from cli.answers import Answer
from cli.errors import defer_interrupts
from cli.report import ACCEPTED, CORRECTED, RowStatistics, origin, rate
from decoding.timing import synchronize

try:
    from rich import box
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text
except ImportError:
    raise ValueError("--live draws with rich: pip install rich==15.0.0") from None

FRAME_S = 1 / 12
STYLES = {ACCEPTED: "blue", CORRECTED: "red"}  # cli.answers.COLOURS, in rich's words
CONTROLS = {code: " " for code in (*range(32), *range(127, 160)) if code != ord("\n")}  # would move the cursor


class Column:
    """One side of scripts.compare on its way through its first row."""

    def __init__(self, name: str, side):
        self.name, self.side, self.session = name, side, side.session
        self.seconds = self.first_token_s = 0.0  # of this side's steps alone
        self.is_finished = False
        self.session.engine.clear()
        self.answer = Answer(side.rows[0], self.session.printer(side.rows[0].stop))
        self.id = self.session.start(self.answer)

    def step(self) -> None:
        """Decode one step, and wait until a GPU has finished it."""
        torch.set_num_threads(self.side.num_threads)
        started = time.perf_counter()
        self.session.engine.step()
        synchronize(self.session.engine.device)
        self.seconds += time.perf_counter() - started
        self.is_finished = self.answer.feed()
        if self.answer.printer.ids:
            self.first_token_s = self.first_token_s or self.seconds
        if self.is_finished:
            self.session.engine.abort(self.id)  # a stop string ends a text before its request
            self.answer.printer.close()

    def text(self) -> Text:
        """The prompt, dim, and the new text in the colours of --show_drafts."""
        text = Text()
        text.append(self.answer.row.text.translate(CONTROLS), "dim")
        origins = map(origin, self.answer.request.token_records)
        for piece, source in itertools.zip_longest(self.answer.printer.pieces, origins, fillvalue=None):
            text.append((piece or "").translate(CONTROLS), STYLES.get(source))
        return text

    def rates(self) -> str:
        drafts = RowStatistics(self.answer.request.token_records)
        num_verified, num_accepted = sum(drafts.reached.values()), sum(drafts.accepted.values())
        tok_s = rate(len(self.answer.printer.ids) - 1, self.seconds - self.first_token_s)
        acceptance = f"{num_accepted / num_verified:.0%} of drafts accepted" if num_verified else "nothing drafted"
        return f"{tok_s:.1f} tok/s after {self.seconds:.2f} s\n{acceptance}"


def picture(console: Console, columns: list[Column], height: int | None) -> Table:
    """Both columns with the last `height` lines (None: all) of their texts."""
    width = max(1, (console.width - 1) // len(columns) - 3)
    table = Table(box=box.ROUNDED, caption="blue: drafted and accepted, red: in a rejected token's place")
    for column in columns:
        table.add_column(Text(column.name, overflow="fold"), width=width)
    texts = [list(column.text().wrap(console, width)) for column in columns]
    num_lines = height or max(map(len, texts))
    for lines in texts:
        lines[:] = lines[-num_lines:] + [Text()] * (num_lines - len(lines))
    table.add_row(*[Text("\n").join(lines) for lines in texts])
    table.add_section()
    table.add_row(*[column.rates() for column in columns])
    return table


def watch(columns: list[Column]) -> None:
    """Decode both columns to their ends, drawn on stderr. KeyboardInterrupt leaves the last picture."""
    console, frame_at = Console(stderr=True), 0.0
    num_lines = len(console.render_lines(picture(console, columns, 1)))  # and one for the ^C that a terminal echoes
    height = max(3, console.height - num_lines) if console.is_terminal else None
    with Live(console=console, auto_refresh=False) as live, defer_interrupts() as interrupts:
        while not interrupts and (unfinished_columns := [column for column in columns if not column.is_finished]):
            min(unfinished_columns, key=lambda column: column.seconds).step()
            if console.is_terminal and time.perf_counter() > frame_at + FRAME_S:
                live.update(picture(console, columns, height), refresh=True)
                frame_at = time.perf_counter()
        live.update(picture(console, columns, height), refresh=True)
    if not console.is_terminal:
        console.line()
