"""`--prompt_file -` from a pipe or a terminal that stays open: a line is answered while the next is not yet written.

    is_open_pipe        is stdin one?
    piped_lines         the lines of stdin, as they are written
    piped_answers       answers to come to them, for Session.decode

The engine stands before the first line comes, so a line that does not fit in it is named and skipped.
"""

import argparse
import functools
import os
import select
import stat
import sys
from collections.abc import Callable, Iterator

from cli.answers import Answer
from cli.output import POLL_S, Output, print_skipped, unanswered
from cli.prompts import Request, encoded, parsed_lines
from cli.session import Session
from decoding.scheduler import common_prefix
from decoding.validation import check_lengths
from tp import launched


def is_open_pipe(args: argparse.Namespace) -> bool:
    """Is --prompt_file a stdin whose lines may still be written while others are decoded? Several ranks read it to its
    end first."""
    try:
        is_file = args.prompt_file != "-" or stat.S_ISREG(os.fstat(sys.stdin.fileno()).st_mode)
    except (OSError, ValueError):  # an object in place of stdin
        is_file = True
    return not is_file and not launched()


def piped_lines(is_busy: Callable[[], bool]) -> Iterator[bytes | None]:
    """The lines of stdin as they are written. None where there is none yet: at once if the program is busy, else after
    POLL_S."""
    rest = b""
    while True:
        *lines, rest = rest.split(b"\n")
        yield from lines
        if not select.select([sys.stdin], [], [], 0 if is_busy() else POLL_S)[0]:
            yield None
        elif block := os.read(sys.stdin.fileno(), 2**16):
            rest += block
        else:
            break
    if rest:
        yield rest


def piped_answers(
    session: Session, args: argparse.Namespace, output: Output, answered: dict, prompts: list[list[int]]
) -> Iterator[Answer | None]:
    """Answers to come to the lines of an open pipe, as they are written; None where there is no line yet. `prompts`
    ends as their common prefix."""
    engine, num_skipped, warns = session.engine, 0, True
    check = functools.partial(check_lengths, engine.model, limit=engine.max_seq_length, drafter=engine.drafter)
    for item in parsed_lines(piped_lines(engine.has_unfinished), "stdin", args):
        if item is None:
            yield None
            continue
        samples, refused = [], [item]
        if isinstance(item, Request):
            samples, refused = encoded([item], args, session.tokenizer, engine.max_seq_length, check, warns)
            warns = warns and not item.messages
        for message in refused:
            output.refuse(message)
        rows = unanswered(samples, answered)
        num_skipped += len(samples) - len(rows)
        for row in rows:
            prompts[:] = [row.ids[: common_prefix(row.ids, *prompts)]]
            yield output.answer(row)
    print_skipped(args.output, num_skipped)
