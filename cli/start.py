"""The start of a program: its flags first, then torch.

torch takes seconds to import. `--help` and the refusals of flags need nothing of it, and are answered before.

    answer_flags    parses a program's flags, and ends it where they ask for help or are wrong
    main            `python generate.py` and the command `quickdraft`
"""

import argparse
from collections.abc import Callable

from cli.exits import fail
from cli.flags import check_options, parse_args
from cli.process import prepare


def answer_flags(parse: Callable[[], argparse.Namespace]) -> argparse.Namespace:
    """The flags that `parse` returns. --help ends the program, and so does its ValueError or OSError."""
    prepare()
    try:
        return parse()
    except (ValueError, OSError) as error:
        fail(error)


def checked_args() -> argparse.Namespace:
    """The flags of the command line. ValueError for those that cannot work."""
    args = parse_args()
    check_options(args)
    return args


def main() -> None:
    args = answer_flags(checked_args)
    from cli.main import main as run_program

    run_program(args)
