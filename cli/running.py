"""The text loop of generate.LLM as a program runs it: compiled and calibrated first, and with
Ctrl-C between two tokens.

warm_up             compile the steps, and measure what drafting costs
run_interruptibly   LLM.run, which Ctrl-C ends between two tokens
"""

import contextlib
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
    if engine.compile:
        for path in paths:
            seconds = engine.warm_up(path)
            rows = engine.batch_size
            print_status(f"compiled the {path} step for batch {rows} in {seconds:.1f} s")
    if engine.runs_rounds:
        with defer_interrupts() if engine.compile else contextlib.nullcontext():
            engine.calibrate(sampling)


def run_interruptibly(llm: LLM, answers: Iterable[Answer]) -> Iterator[Answer]:
    """LLM.run for programs. Ctrl-C ends all answers between two tokens; text that was printed
    stays."""
    with defer_interrupts() as interrupts:
        yield from llm.run(answers, interrupts)
