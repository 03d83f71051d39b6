"""Finished answers -> stdout, or the file of --output, in the order of the flags.

Result          a finished answer as text
Output          shows results as they finish, or in the order of the rows
open_output     the file of --output
"""

import json
import sys
import time
from typing import NamedTuple, TextIO

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


class Result(NamedTuple):
    number: int  # of the row
    text: str | None = None  # for stdout; None after an error, or if it was streamed
    prompt: str | None = None  # for stderr, before the text
    error: str | None = None
    num_tokens: int = 0


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
        self.answers: list[RowAnswer] = []
        self.num_tokens = 0
        self.next_number = 0
        self.waiting: dict[int, Result] = {}  # for an earlier row
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
            for _, result in sorted(self.waiting.items()):
                self.show(result)
        self.bar.close()

    def answer(self, row: Row, number: int) -> RowAnswer:
        """A new answer for row `number`."""
        answer = RowAnswer(self.llm, row, self.streaming, self.marks, number)
        self.answers.append(answer)
        return answer

    def add(self, answer: RowAnswer) -> None:
        """Show a finished answer. Raises a bug's error, and any if the prompt is not a file's
        line."""
        error = answer.request.error
        result = Result(answer.number, num_tokens=len(answer.ids))
        if error is not None:
            is_users = isinstance(error, UserError)
            if not is_users and not is_out_of_memory(error):
                raise error
            if is_users and self.llm.engine.model.norm.weight.dtype == torch.float16:
                hint = "float16 may have overflowed: try --dtype bfloat16 or float32"
                error = UserError(f"{error}; {hint}")
            location = answer.row.prompt.location
            if location is None:
                raise error
            result = result._replace(error=f"{location}: {error}")
        elif self.as_json:
            result = result._replace(text=json.dumps(answer.result(self.llm.engine)))
        elif not self.streaming:
            text = "".join(answer.marked_pieces)
            result = result._replace(text=text, prompt=answer.row.prompt.text)
        self.receive(result)

    def refuse(self, message: str) -> None:
        print_error(message)
        self.has_errors = True

    def receive(self, result: Result) -> None:
        self.num_tokens += result.num_tokens
        self.bar.set_postfix_str(self.rate(), refresh=False)
        self.bar.update()
        if result.error is not None:
            self.refuse(result.error)
        if not self.in_order:
            self.show(result)
            return
        self.waiting[result.number] = result
        while self.next_number in self.waiting:
            self.show(self.waiting.pop(self.next_number))
            self.next_number += 1

    def show(self, result: Result) -> None:
        if result.text is None:
            return
        with tqdm.external_write_mode():
            if result.prompt is not None:
                print_prompt(result.prompt)
            print(result.text, file=self.file, flush=True)

    def rate(self) -> str:
        """The rate of all rows together."""
        return f"{self.num_tokens / (time.perf_counter() - self.start):.1f} tok/s"

    def timings(self) -> list[Timing]:
        """One Timing for each row that ran alone, or one for all rows that ran together."""
        requests = [answer.request for answer in self.answers]
        if self.llm.engine.batch_size > 1:
            return [Timing(requests)]
        return [Timing([request]) for request in requests]
