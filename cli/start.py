"""The start of a program: its flags first, then torch.

torch takes seconds to import. `--help` and the refusals of flags need nothing of it, and are
answered before.

    answer_flags    parses a program's flags, and ends it where they ask for help or are wrong
    main            `python generate.py`
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from cli.exits import fail
from cli.flags import parse_args
from cli.process import prepare
from decoding.errors import UserError

T = TypeVar("T")


def answer_flags(parse: Callable[[], T]) -> T:
    """The options that `parse` returns. --help ends the program, and so does its UserError or
    OSError."""
    prepare()
    try:
        return parse()
    except (UserError, OSError) as error:
        fail(error)


def main(words: Sequence[str] | None = None) -> None:
    options = answer_flags(lambda: parse_args(words))
    from cli.errors import exit_on_error
    from cli.main import main as run_program

    with exit_on_error(joins_ranks=True):
        run_program(options)
