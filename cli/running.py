"""The text loop of generate.LLM as a program runs it: compiled and calibrated first, and with
Ctrl-C between two tokens.

warm_up             compile the steps, and measure what drafting costs
compiling           the line about a step that is being compiled, in place of torch's warnings
run_interruptibly   LLM.run, which Ctrl-C ends between two tokens
"""

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence

from cli.errors import defer_interrupts
from cli.exits import print_status
from decoding.answers import Answer
from decoding.engine import Engine
from decoding.sampling import Sampling
from generate import LLM


def warm_up(engine: Engine, sampling: Sampling, paths: Sequence[str]) -> None:
    """Compile the steps of these sampling paths if the engine compiles; with a drafter, measure
    the costs of steps."""
    if engine.runner.compile:
        for path in paths:
            step = f"the {path} step for batch {max(engine.planner.row_counts)}"
            with compiling(step):
                seconds = engine.warm_up(path)
            print_status(f"compiled {step} in {seconds:.1f} s")
    if engine.planner.ks:
        with defer_interrupts() if engine.runner.compile else contextlib.nullcontext():
            engine.calibrate(sampling)


@contextlib.contextmanager
def compiling(step: str) -> Iterator[None]:
    """On a terminal, say what is being compiled, until the block is over. torch's warnings on the
    way, about this processor or GPU, are nothing that a user can act on: TORCH_LOGS=all shows
    them."""
    has_line = sys.stderr.isatty()
    if has_line:
        print(f"compiling {step} …", end="", file=sys.stderr, flush=True)
    is_quiet = "TORCH_LOGS" not in os.environ
    disabled = logging.root.manager.disable
    try:
        with warnings.catch_warnings():
            if is_quiet:
                warnings.simplefilter("ignore")
                logging.disable(max(disabled, logging.WARNING))
            yield
    finally:
        logging.disable(disabled)
        if has_line:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def run_interruptibly(llm: LLM, answers: Iterable[Answer]) -> Iterator[Answer]:
    """LLM.run for programs. Ctrl-C ends all answers between two tokens; text that was printed
    stays."""
    with defer_interrupts() as interrupts:
        yield from llm.run(answers, interrupts)
