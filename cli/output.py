"""Finished answers -> stdout, or the file of --output, in the order of the flags.

    Result          a finished answer as text, which replicas send to rank 0
    Output          shows the results of all replicas, as they finish or in the order of the rows
    ResultFile      the JSON lines of --output, from earlier runs and this one
    unanswered      the rows that no earlier run has answered

This file decodes nothing and knows no prompt format.
"""

import argparse
import contextlib
import json
import sys
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from cli.answers import Answer
from cli.errors import print_error
from cli.prompts import Request, row_key
from cli.replicas import Replicas
from cli.session import Session
from decoding.timing import Timing

POLL_S = 0.1  # seconds between looks at a pipe and at the results of other replicas; Ctrl-C may wait as long
MAX_TIMINGS = 1000  # latest answers of an open pipe that its report covers


class Result(NamedTuple):
    number: int  # of the row
    text: str | None = None  # for stdout; None after an error, or if it was streamed
    prompt: str | None = None  # for stderr, before the text
    error: str | None = None
    num_tokens: int = 0


class ResultFile:
    """The file of --output. ValueError for a line that is no result. The beginning of a result at the end, as a crash
    leaves it, is cut off before the first new result."""

    BEGINNINGS = tuple(f'{{"{key}": '.encode() for key in ("id", "line", "seed"))

    def __init__(self, name: str):
        self.answered: dict[str, tuple] = {}  # row_key -> (ids of the prompt, seed)
        self.complete_size: int | None = None  # bytes before a last line that is cut off
        try:
            if Path(name).is_file():
                self.read(name)
            self.file = open(name, "a", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise ValueError(f"--output {name}: {error.strerror}") from None

    def read(self, name: str) -> None:
        *lines, rest = Path(name).read_bytes().split(b"\n")
        for number, line in enumerate(lines, 1):
            try:
                result = json.loads(line)
                self.answered[row_key(result)] = result["prompt_tokens"], result["seed"]
            except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
                raise ValueError(f"--output {name}: line {number} is no result of --json; name another file") from None
        if rest:
            is_result = any(rest.startswith(beginning) or beginning.startswith(rest) for beginning in self.BEGINNINGS)
            with contextlib.suppress(ValueError, TypeError, RecursionError):
                is_result = "prompt_tokens" in json.loads(rest)  # complete but for its end
            if not is_result:
                raise ValueError(f"--output {name}: its last line is no result of --json; name another file")
            self.complete_size = sum(len(line) + 1 for line in lines)

    def write(self, line: str) -> None:
        if self.complete_size is not None:
            self.file.truncate(self.complete_size)
            self.complete_size = None
        print(line, file=self.file, flush=True)


def unanswered(rows: Iterable[Request], answered: dict[str, tuple]) -> list[Request]:
    """The rows without an answer yet. ValueError for a row whose answer is to another prompt or seed."""
    rows, remaining = list(rows), []
    for row in rows:
        earlier = answered.get(row_key(row.labels()))
        if earlier is None:
            remaining.append(row)
        elif (row.ids, earlier[1] if row.has_random_seed else row.seed) != tuple(earlier):
            label = {key: value for key, value in row.labels().items() if key != "seed"}
            raise ValueError(f"--output: {label} is answered there for another prompt or seed; name another file")
    return remaining


def print_skipped(file: str | None, num_rows: int) -> None:
    if num_rows:
        print(f"{file} answers {num_rows} rows already: skipped", file=sys.stderr)


def print_prompt(text: str) -> None:
    """Print a prompt on stderr. Where its answer goes to the same terminal, it continues the line."""
    is_continued = sys.stderr.isatty() and sys.stdout.isatty()
    print(text, end="" if is_continued else "\n", file=sys.stderr, flush=True)


class Output:
    """Shows results on rank 0. A single text streams. With --json a line appears as soon as its row ends, or with
    --ordered in the order of the rows. Texts appear in that order too, each after its prompt. Ctrl-C also shows
    finished results that wait for an earlier row. On a terminal, a bar on stderr counts rows."""

    def __init__(
        self, session: Session, rows: list[Request], args: argparse.Namespace, replicas: Replicas,
        file: ResultFile | None = None, piped: bool = False,
    ):  # fmt: skip
        self.session, self.engine, self.replicas, self.file = session, session.engine, replicas, file
        self.as_json, self.in_order = args.json, args.ordered or not args.json
        self.streaming = len(rows) == replicas.count == 1 and not args.json
        if self.streaming:
            print_prompt(rows[0].text)
        self.answers: deque[Answer] = deque(maxlen=MAX_TIMINGS if piped else None)
        self.num_started = self.num_received = self.num_tokens = 0
        self.next_number, self.waiting, self.has_errors = 0, {}, False
        self.start, self.polled = time.perf_counter(), 0.0
        has_bar = args.prompt_file is not None and not piped and not self.streaming and sys.stderr.isatty()
        self.bar = tqdm(total=len(rows), unit="row", disable=not has_bar, file=sys.stderr, leave=False)

    def __enter__(self) -> "Output":
        return self

    def __exit__(self, kind, *error) -> None:
        if kind is KeyboardInterrupt:
            self.poll(0)
            for _, result in sorted(self.waiting.items()):
                self.show(result)
        self.bar.close()

    def answer(self, row: Request, number: int | None = None) -> Answer:
        """A new Answer for a row. `number` is the row's, by default the next one."""
        number = self.num_started if number is None else number
        self.answers.append(Answer(row, self.session.printer(row.stop, self.streaming), number=number))
        self.num_started += 1
        return self.answers[-1]

    def add(self, answer: Answer) -> None:
        """Show or send a finished answer. Raises its error if the prompt is not a file's line."""
        if error := answer.request.error:
            if isinstance(error, ValueError) and self.engine.model.norm.weight.dtype == torch.float16:
                error = ValueError(f"{error}; float16 may have overflowed: try --dtype bfloat16 or float32")
            if answer.row.location is None:
                raise error
            result = Result(answer.number, error=f"{answer.row.location}: {error}")
        elif answer.printer.streaming:
            result = Result(answer.number)
        elif self.as_json:
            result = Result(answer.number, json.dumps(answer.result(self.engine)))
        else:
            result = Result(answer.number, "".join(answer.printer.coloured_pieces), answer.row.text)
        result = result._replace(num_tokens=len(answer.printer.ids))
        if self.replicas.is_first:
            self.receive(result)
        else:
            self.replicas.send(result)

    def poll(self, every_s: float = POLL_S) -> None:
        """Show the results of other replicas, at most once in `every_s` seconds."""
        if (now := time.perf_counter()) - self.polled >= every_s:
            self.polled = now
            for result in self.replicas.received():
                self.receive(Result(*result))

    def wait_for_others(self, num_rows: int) -> None:
        while self.replicas.is_root and self.num_received < num_rows:
            self.poll(0)
            time.sleep(POLL_S / 5)

    def refuse(self, message: str) -> None:
        print_error(message)
        self.has_errors = True

    def receive(self, result: Result) -> None:
        self.num_received, self.num_tokens = self.num_received + 1, self.num_tokens + result.num_tokens
        self.bar.set_postfix_str(f"{self.num_tokens / (time.perf_counter() - self.start):.1f} tok/s", refresh=False)
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
            (self.file.write if self.file else lambda text: print(text, flush=True))(result.text)

    def print_total(self) -> None:
        """Print the rate of all replicas together: the report covers the first replica alone."""
        if self.replicas.count > 1:
            seconds = time.perf_counter() - self.start
            rate = f"{self.num_tokens} tokens in {seconds:.1f} s, {self.num_tokens / seconds:.1f} tok/s"
            print(f"these are the first replica's; all {self.replicas.count} together: {rate}", file=sys.stderr)

    def timings(self) -> list[Timing]:
        """One Timing for each row that ran alone, or one for all rows that ran together."""
        requests = [answer.request for answer in self.answers]
        return [Timing([request]) for request in requests] if self.engine.batch_size == 1 else [Timing(requests)]
