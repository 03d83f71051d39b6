"""What torchrun tells the processes that it starts. This file needs no torch, whose import takes
seconds."""

import os


def launched() -> bool:
    """Did torchrun start this process as one of several?"""
    return "LOCAL_RANK" in os.environ and int(os.environ.get("WORLD_SIZE", 1)) > 1


def check_single_process() -> None:
    """ValueError under torchrun, for programs that do not divide their work."""
    if launched():
        raise ValueError(
            "only generate.py divides its work over ranks: start this program without torchrun"
        )
