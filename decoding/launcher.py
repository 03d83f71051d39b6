"""What torchrun tells the processes that it starts. This file needs no torch, whose import takes
seconds."""

import os

from decoding.errors import UserError


def launched() -> bool:
    """Did torchrun start this process as one of several?"""
    return "LOCAL_RANK" in os.environ and int(os.environ.get("WORLD_SIZE", 1)) > 1


def check_single_process() -> None:
    """UserError under torchrun, for programs that do not divide their work."""
    if launched():
        raise UserError(
            "only generate.py divides its work over ranks: start this program without torchrun"
        )
