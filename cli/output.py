"""Finished answers -> stdout, or the file of --output, in the order of the flags.

Output          shows answers as they finish, or in the order of the rows
open_output     the file of --output
"""

import json
import sys
import time
from collections.abc import Iterator
from typing import TextIO

import torch
from tqdm import tqdm

from cli.answers import RowAnswer
from cli.draft_marks import draft_marks, print_legend
from cli.errors import is_out_of_memory
from cli.exits import print_error
from cli.options import Options
from cli.prompts import Row
from decoding.errors import UserError
from decoding.statistics import Timing
from generate import LLM


def open_output(name: str | None) -> TextIO | None:
    """The file of --output, to which lines are added. UserError for one that cannot be written."""
    try:
        return open(name, "a", encoding="utf-8") if name else None
    except OSError as error:
        raise UserError(f"--output {name}: {error.strerror}") from None


def print_prompt(text: str) -> None:
    """Print a prompt on stderr. Where its answer goes to the same terminal, it continues the
    line."""
    is_continued = sys.stderr.isatty() and sys.stdout.isatty()
    print(text, end="" if is_continued else "\n", file=sys.stderr, flush=True)


class Output:
    """Shows results on rank 0. A single text streams. With --json a line appears as soon as its row
    ends, or with --ordered in the order of the rows. Texts appear in that order too, each after its
    prompt. Ctrl-C also shows finished results that wait for an earlier row. On a terminal, a bar on
    stderr counts rows."""

    def __init__(
        self,
        llm: LLM,
        rows: list[Row],
        options: Options,
        file: TextIO | None = None,
    ):
        self.llm = llm
        self.file = file
        self.as_json = options.output.json
        self.in_order = options.output.ordered or not self.as_json
        self.streaming = len(rows) == 1 and not self.as_json
        self.marks = draft_marks(options)
        if self.marks and not self.as_json and rows:
            print_legend(self.marks)
        if self.streaming:
            print_prompt(rows[0].prompt.text)
        self.rows = rows
        self.answers: list[RowAnswer] = []
        self.num_tokens = 0
        self.next_number = 0
        self.waiting: dict[int, RowAnswer] = {}  # for an earlier row
        self.has_errors = False
        self.start = time.perf_counter()
        has_bar = len(rows) > 1 and sys.stderr.isatty()
        self.bar = tqdm(
            total=len(rows), unit="row", disable=not has_bar, file=sys.stderr, leave=False
        )

    def __enter__(self) -> "Output":
        return self

    def __exit__(self, error_type, *error) -> None:
        if error_type is KeyboardInterrupt:
            for _, answer in sorted(self.waiting.items()):
                self.show(answer)
        self.bar.close()

    def new_answers(self) -> Iterator[RowAnswer]:
        """An answer for each row, as it is asked for."""
        for number, row in enumerate(self.rows):
            self.answers.append(RowAnswer(self.llm, row, self.streaming, self.marks, number))
            yield self.answers[-1]

    def add(self, answer: RowAnswer) -> None:
        """Show a finished answer. Raises a bug's error, and any if the prompt is not a file's
        line."""
        if answer.request.error is not None:
            self.refuse(answer)
        self.num_tokens += len(answer.ids)
        seconds = time.perf_counter() - self.start
        self.bar.set_postfix_str(f"{self.num_tokens / seconds:.1f} tok/s", refresh=False)
        self.bar.update()
        if not self.in_order:
            self.show(answer)
            return
        self.waiting[answer.number] = answer
        while self.next_number in self.waiting:
            self.show(self.waiting.pop(self.next_number))
            self.next_number += 1

    def refuse(self, answer: RowAnswer) -> None:
        error = answer.request.error
        location = answer.row.prompt.location
        is_users = isinstance(error, UserError)
        if is_users and self.llm.engine.model.norm.weight.dtype == torch.float16:
            hint = "float16 may have overflowed: try --dtype bfloat16 or float32"
            error = UserError(f"{error}; {hint}")
        if location is None or not (is_users or is_out_of_memory(error)):
            raise error
        print_error(f"{location}: {error}")
        self.has_errors = True

    def show(self, answer: RowAnswer) -> None:
        """Print an answer that has no error, and was not streamed."""
        if self.streaming or answer.request.error is not None:
            return
        with tqdm.external_write_mode():
            if self.as_json:
                text = json.dumps(answer.result(self.llm.engine))
            else:
                print_prompt(answer.row.prompt.text)
                text = "".join(answer.marked_pieces)
            print(text, file=self.file, flush=True)

    def timings(self) -> list[Timing]:
        """One Timing for each row that ran alone, or one for all rows that ran together."""
        requests = [answer.request for answer in self.answers]
        if self.llm.engine.batch_size > 1:
            return [Timing(requests)]
        return [Timing([request]) for request in requests]
