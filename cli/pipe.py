"""`--prompt_file -` from an open pipe or terminal: a line is answered before the next one is written.

    is_open_pipe        is --prompt_file such a stdin?
    piped_lines         the lines of stdin, as they are written
    piped_answers       new Answers for these lines, which Session.decode fills

The engine is made before the first line comes. A line that does not fit in it is printed as an error and skipped.
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
from decoding.launcher import launched
from decoding.scheduler import common_prefix
from decoding.validation import check_lengths


def is_open_pipe(args: argparse.Namespace) -> bool:
    """Is --prompt_file a stdin that is no file? False under torchrun, where stdin is read to its end before decoding
    starts."""
    try:
        is_file = args.prompt_file != "-" or stat.S_ISREG(os.fstat(sys.stdin.fileno()).st_mode)
    except (OSError, ValueError):  # an object in place of stdin
        is_file = True
    return not is_file and not launched()


def piped_lines(is_busy: Callable[[], bool]) -> Iterator[bytes | None]:
    """The lines of stdin as they are written. None if there is no line yet: at once if the program is busy, else after
    POLL_S seconds."""
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
    """New Answers for the lines of an open pipe; None if there is no line yet. `prompts` becomes the common prefix of
    all rows."""
    engine, num_skipped, warns = session.engine, 0, True
    check = functools.partial(check_lengths, engine.model, limit=engine.max_seq_length)
    for item in parsed_lines(piped_lines(engine.has_unfinished), "stdin"):
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
