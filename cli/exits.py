"""Lines on stderr, and the exit status of a program that fails. This file needs no torch, so flags
are refused early."""

import os
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from decoding.launcher import launched

OTHERS_WAIT_S = 3.0  # until a rank prints an error, which local rank 0 may print first


def fail(error: Exception | str) -> NoReturn:
    """Print one line and exit with status 2."""
    if isinstance(error, OSError):
        close_stdout()
    if launched():
        # Local rank 0 reports first. Then torchrun ends the waiting ranks, so that a common error
        # is printed once.
        if os.environ["LOCAL_RANK"] != "0":
            time.sleep(OTHERS_WAIT_S)
        rank = os.environ["RANK"]
        error = error if rank == "0" else f"rank {rank}: {error}"
    print_error(error)
    sys.exit(2)


def print_status(text: str) -> None:
    """Print on stderr what is no answer: stdout has answers alone."""
    print(text, file=sys.stderr)


def print_error(error: Exception | str) -> None:
    from tqdm import tqdm  # here: flags are refused without any package

    tqdm.write(f"error: {' '.join(str(error).split())}", file=sys.stderr)


def print_broken(errors: Sequence[str], remaining: Sequence) -> None:
    """Print the errors of lines that cannot be decoded. End if no other line is left."""
    for error in errors:
        print_error(error)
    if errors and not remaining:
        sys.exit(2)


def close_stdout() -> None:
    """Discard buffered output: Python writes it at exit, and would fail again."""
    if sys.stdout is sys.__stdout__:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
