"""Ctrl-C at any line of the code: what was decided stands, and whatever the engines do next is as
if nothing had been.

A trace function raises KeyboardInterrupt at the n-th line that runs in the project's files, for n
from the first line of a call to its last; a real signal comes at one of these, or inside a call
that a line makes. The caller then goes on as generate.py's chat does: the next turn keeps what the
caches are said to hold. Both the tokens of that turn and what its draft was worth are compared with
a new engine's, and so is another engine's work on the same model.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch
from conftest import ROOT, generate
from steps import token_records

from cli.errors import defer_interrupts
from decoding.costs import Costs
from decoding.engine import Engine
from decoding.sampling import Sampling
from decoding.statistics import Timing
from drafts.base import ModelDraft
from drafts.ngram import NgramDraft
from drafts.target_layers import layer_subset
from loading.checkpoint import load_model

FILES = {
    str(file)
    for folder in (ROOT, ROOT / "decoding", ROOT / "drafts")
    for file in folder.glob("*.py")
}
PROMPT, LENGTH = [5, 9, 17, 9, 5, 9], 40
COSTS = Costs(1.0, {k: 0.1 * k for k in (1, 2, 3, 5, 8)}, {k: 1.2 for k in (1, 2, 3, 5, 8)})


def interrupted(run: Callable[[], None], where: int) -> bool:
    """run(), with a KeyboardInterrupt at line number `where` of those that run in FILES; did that
    line come?"""
    left = where

    def trace(frame, event, _):
        nonlocal left
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.fixture(scope="module")
def model(text_folder):
    return load_model(text_folder, dtype=torch.float32)


def drafter_of(kind: str, model):
    if kind in ("model", "auto"):
        return ModelDraft(layer_subset(model, [0, 1]))
    if kind == "layers":
        return ModelDraft(layer_subset(model, [0, 2]), on_layers=[0, 2])
    return NgramDraft(2) if kind == "ngram" else None


def engine_of(kind: str, model, rows: int = 1) -> Engine:
    k = "auto" if kind == "auto" else 2
    engine = Engine(model, rows, LENGTH, drafter=drafter_of(kind, model), speculate_k=k)
    engine.planner.costs = COSTS
    return engine


def turn(engine: Engine, prompts: list[list[int]], n: int, got: list | None = None):
    """(tokens of every row, what drafting did for each); `got` keeps row 0's tokens as they
    come."""
    rows, timing = [[] for _ in prompts], Timing()
    options = {"sampling": Sampling(0.8), "seed": 3, "timing": timing}
    for row, id in generate(engine.model, prompts, engine=engine, max_new_tokens=n, **options):
        rows[row].append(id)
        if got is not None:
            got.append(id)
    return rows, [
        [token._replace(overlap=round(token.overlap, 3)) for token in row]
        for row in token_records(timing)
    ]


def spoil(engine: Engine) -> None:
    """What nobody wrote since must not count."""
    engine.clear()
    engine.planner.memories.shared.draft_length = None  # else `auto` goes on
    for runner in engine.runners:
        for cache in runner.caches.layers:
            cache.k.fill_(9.0), cache.v.fill_(-9.0)


KINDS = ["plain", "model", "layers", "ngram", "auto"]


@pytest.mark.attack
@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_at_many_lines_changes_nothing_that_follows(kind, model):
    check_lines(kind, model, every=61)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_at_any_line_changes_nothing_that_follows(kind, model):
    check_lines(kind, model, every=1)


def check_lines(kind: str, model, every: int) -> None:
    engine, other = engine_of(kind, model), engine_of("ngram", model, rows=2)
    expected = turn(engine_of(kind, model), [PROMPT], 12)[0][0]
    others = [[7, 8], [30, 31, 32]]
    want, follow, where = turn(engine_of("ngram", model, rows=2), others, 4), {}, 0
    while True:
        turn(other, others, 2)
        spoil(engine)
        got = []
        if not interrupted(lambda got=got: turn(engine, [PROMPT], 12, got=got), where):
            break
        assert got == expected[: len(got)]
        prompt = [*PROMPT, *got, 40, 41]
        if len(got) not in follow:
            follow[len(got)] = turn(engine_of(kind, model), [prompt], 8)
        engine.planner.memories.shared.draft_length = None
        assert turn(engine, [prompt], 8) == follow[len(got)], where
        assert turn(other, others, 4) == want, where
        where += every
    assert 0 in follow and len(follow) > 2, "few lines were interrupted"


# ----------------------------------------------------------------------------------- real signals


def test_a_first_ctrl_c_is_held_and_a_second_acts_at_once():
    usual = signal.getsignal(signal.SIGINT)
    reached = []
    with pytest.raises(KeyboardInterrupt), defer_interrupts() as noted:
        signal.raise_signal(signal.SIGINT)
        assert len(noted) == 1
        reached.append("behind the first")
        signal.raise_signal(signal.SIGINT)
        reached.append("behind the second")
    assert reached == ["behind the first"] and signal.getsignal(signal.SIGINT) is usual
    with pytest.raises(KeyboardInterrupt), defer_interrupts():
        signal.raise_signal(signal.SIGINT)
    with defer_interrupts() as noted:
        pass
    assert not noted and signal.getsignal(signal.SIGINT) is usual


@pytest.mark.compiled
def test_signals_neither_get_lost_in_compiled_code_nor_compile_it_anew(model):
    """Real signals at moments spread over turns of a compiled engine: torch takes an interrupt
    inside a guard for a guard that fails. Each signal ends its turn between two tokens, and nothing
    is compiled."""
    engine = Engine(model, 1, LENGTH, compile=True)
    engine.warm_up("plain")
    want, ended = turn(engine, [PROMPT], 30)[0], []

    def interrupt(after: float) -> None:
        time.sleep(after)
        os.kill(os.getpid(), signal.SIGINT)

    with torch.compiler.set_stance("fail_on_recompile"):
        for number in range(100):
            got, sender = (
                [],
                threading.Thread(target=interrupt, args=(0.0005 + 0.001 * (number % 50),)),
            )
            with pytest.raises(KeyboardInterrupt), defer_interrupts() as noted:
                sender.start()
                while not noted:  # one turn after the other, until the signal comes
                    got.clear()
                    options = {"sampling": Sampling(0.8), "seed": 3, "max_new_tokens": 30}
                    for _, id in generate(model, [PROMPT], engine=engine, **options):
                        got.append(id)
                        if noted:
                            break
            sender.join()
            assert got == want[0][: len(got)]
            ended.append(len(got))
        assert len(set(ended)) > 3, ended
        assert turn(engine, [PROMPT], 30)[0] == want
