"""Both sides of scripts.compare decoding one prompt, drawn side by side with rich.

    watch      decodes both sides in turn; draws them while they run, or prints them once if there
               is no terminal
    Column     one side's answer, and the seconds that it has taken
    picture    the columns as a table

The column that has taken fewer seconds decodes the next step, so both columns show the same second
of decoding. Each side's steps push the other's weights out of the processor's caches, so rates may
be lower than those of one side alone.
"""

import time

import torch

from cli.errors import defer_interrupts
from cli.report import ACCEPTED, CORRECTED, RowStatistics, rate, token_origin
from decoding.readback import synchronize

try:
    from rich import box
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text
except ImportError:
    raise ValueError("--live draws with rich: pip install rich==15.0.0") from None

FRAME_S = 1 / 12
# cli.draft_marks.ANSI_MARKS, in rich's words.
STYLES = {ACCEPTED: "color(33)", CORRECTED: "bold color(196)"}
# Control characters, which would move the cursor, become spaces.
CONTROLS = {code: " " for code in (*range(32), *range(127, 160)) if code != ord("\n")}


class Column:
    """One side of scripts.compare on its way through its first row."""

    def __init__(self, name: str, side):
        self.name = name
        self.side = side
        self.llm = side.llm
        self.seconds = 0.0  # of this side's steps alone
        self.first_token_s = 0.0
        self.llm.engine.clear()
        self.answer = side.answer(side.rows[0])
        self.llm.start(self.answer)

    @property
    def is_finished(self) -> bool:
        return self.answer.is_finished

    def step(self) -> None:
        """Decode one step, and wait until a GPU has finished it."""
        torch.set_num_threads(self.side.num_threads)
        started = time.perf_counter()
        self.llm.step()
        synchronize(self.llm.engine.device)
        self.seconds += time.perf_counter() - started
        if self.answer.ids and self.first_token_s == 0:
            self.first_token_s = self.seconds

    def text(self) -> Text:
        """The prompt, dim, and the new text in the colours of --show_drafts."""
        text = Text()
        text.append(self.answer.row.prompt.text.translate(CONTROLS), "dim")
        records = self.answer.request.token_records  # none without a drafter
        for number, piece in enumerate(self.answer.pieces):
            style = None
            if number < len(records):
                style = STYLES.get(token_origin(records[number]))
            text.append(piece.translate(CONTROLS), style)
        return text

    def rates(self) -> str:
        drafts = RowStatistics(self.answer.request.token_records)
        num_verified = drafts.reached.total()
        acceptance = "nothing drafted"
        if num_verified:
            acceptance = f"{drafts.accepted.total() / num_verified:.0%} of drafts accepted"
        tok_s = rate(len(self.answer.ids) - 1, self.seconds - self.first_token_s)
        return f"{tok_s:.1f} tok/s after {self.seconds:.2f} s\n{acceptance}"


def picture(console: Console, columns: list[Column], height: int | None) -> Table:
    """Both columns with the last `height` lines (None: all) of their texts."""
    width = max(1, (console.width - 1) // len(columns) - 3)
    table = Table(
        box=box.ROUNDED, caption="blue: drafted and accepted, red: in a rejected token's place"
    )
    for column in columns:
        table.add_column(Text(column.name, overflow="fold"), width=width)
    lines_by_column = [list(column.text().wrap(console, width)) for column in columns]
    num_lines = height or max(map(len, lines_by_column))
    texts = []
    for lines in lines_by_column:
        padding = [Text()] * (num_lines - len(lines))
        texts.append(Text("\n").join(lines[-num_lines:] + padding))
    table.add_row(*texts)
    table.add_section()
    table.add_row(*[column.rates() for column in columns])
    return table


def watch(columns: list[Column]) -> None:
    """Decode both columns to their ends, drawn on stderr. KeyboardInterrupt leaves the last
    picture."""
    console = Console(stderr=True)
    height = None
    if console.is_terminal:
        # Lines other than the text: the frame, and one for the ^C that a terminal echoes.
        num_other_lines = len(console.render_lines(picture(console, columns, 1)))
        height = max(3, console.height - num_other_lines)
    next_frame_s = 0.0
    with Live(console=console, auto_refresh=False) as live, defer_interrupts() as interrupts:
        while not interrupts:
            unfinished = [column for column in columns if not column.is_finished]
            if not unfinished:
                break
            min(unfinished, key=lambda column: column.seconds).step()
            if console.is_terminal and time.perf_counter() > next_frame_s:
                live.update(picture(console, columns, height), refresh=True)
                next_frame_s = time.perf_counter() + FRAME_S
        live.update(picture(console, columns, height), refresh=True)
    if not console.is_terminal:
        console.line()
