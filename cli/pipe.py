"""`--prompt_file -` from an open pipe or terminal: a line is answered before the next one is
written.

    is_open_pipe        is --prompt_file such a stdin?
    piped_lines         the lines of stdin, as they are written
    piped_answers       new Answers for these lines, which LLM.run fills

The engine is made before the first line comes. A line that does not fit in it is printed as an
error and skipped.
"""

import os
import select
import stat
import sys
from collections.abc import Callable, Iterator

from cli.answers import RowAnswer
from cli.output import POLL_S, Output, unanswered
from cli.prompts import Encoder, parsed_lines
from decoding.launcher import launched
from decoding.scheduler import common_prefix


def is_open_pipe(prompt_file: str | None) -> bool:
    """Is --prompt_file a stdin that is no file? False under torchrun, where stdin is read to its
    end before decoding starts."""
    if prompt_file != "-" or launched():
        return False
    try:
        return not stat.S_ISREG(os.fstat(sys.stdin.fileno()).st_mode)
    except OSError:  # an object in place of stdin
        return False


def piped_lines(is_busy: Callable[[], bool]) -> Iterator[bytes | None]:
    """The lines of stdin as they are written. None if there is no line yet: at once if the program
    is busy, else after POLL_S seconds."""
    rest = b""
    while True:
        *lines, rest = rest.split(b"\n")
        yield from lines
        if not select.select([sys.stdin], [], [], 0 if is_busy() else POLL_S)[0]:
            yield None
            continue
        block = os.read(sys.stdin.fileno(), 2**16)
        if not block:
            break
        rest += block
    if rest:
        yield rest


def piped_answers(
    encoder: Encoder, output: Output, answered: dict, prefix: list[list[int]]
) -> Iterator[RowAnswer | None]:
    """New answers for the lines of an open pipe; None if there is no line yet. `prefix` comes to
    hold the common beginning of all prompts."""
    num_rows = 0
    for item in parsed_lines(piped_lines(output.llm.engine.has_unfinished), "stdin"):
        if item is None:
            yield None
            continue
        if isinstance(item, str):
            output.refuse(item)
            continue
        samples, refused = encoder.encode_all([item])
        for message in refused:
            output.refuse(message)
        for row in unanswered(samples, answered):
            prefix[:] = [row.ids[: common_prefix(row.ids, *prefix)]]
            yield output.answer(row, num_rows)
            num_rows += 1
