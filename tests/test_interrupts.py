"""Ctrl-C at any line of the code: what was decided stands, and whatever the engines do next is as if nothing had been.

A trace function raises KeyboardInterrupt at the n-th line that runs in the project's files, for n from the first line
of a call to its last; a real signal comes at one of these, or inside a call that a line makes. The caller then goes on
as generate.py's chat does: the next turn keeps what the caches are said to hold. Both the tokens of that turn and what
its draft was worth are compared with a new engine's, and so is another engine's work on the same model.
"""

import signal
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from conftest import ROOT

from checkpoint import load_model
from generate import Engine, Timing, generate, uninterrupted
from sampling import Sampling
from speculative import Costs, ModelDraft, NgramDraft, layer_subset

FILES = {str(ROOT / f"{name}.py") for name in ("generate", "model", "sampling", "speculative", "tp")}
PROMPT, LENGTH = [5, 9, 17, 9, 5, 9], 40
COSTS = Costs(1.0, {k: 0.1 * k for k in (1, 2, 3, 5, 8)}, {k: 1.2 for k in (1, 2, 3, 5, 8)})


def interrupted(run: Callable[[], None], where: int) -> bool:
    """run(), with a KeyboardInterrupt at line number `where` of those that run in FILES; did that line come?"""
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
    engine.costs = COSTS
    return engine


def turn(engine: Engine, prompts: list[list[int]], n: int, cached: int = 0, got: list | None = None):
    """(tokens of every row, where each came from, how well drafts fitted); `got` keeps row 0's tokens as they come."""
    rows, timing = [[] for _ in prompts], Timing()
    options = {"sampling": Sampling(0.8), "seed": 3, "cached": cached, "timing": timing}
    for row, id in generate(engine.model, prompts, engine=engine, max_new_tokens=n, **options):
        rows[row].append(id)
        if got is not None:
            got.append(id)
    return rows, [row.origins for row in timing.rows], [round(row.overlap, 3) for row in timing.rows]


def spoil(engine: Engine) -> None:
    """What nobody wrote since must not count."""
    for seat in engine.seats:
        for cache in seat.caches:
            cache.k.fill_(9.0), cache.v.fill_(-9.0)


KINDS = ["plain", "model", "layers", "ngram", "auto"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_at_many_lines_changes_nothing_that_follows(kind, model):
    check_lines(kind, model, every=97)


@pytest.mark.parametrize("kind", ["model", "layers"])
def test_engines_that_change_places_do_so_whole_or_again(kind, model):
    """Two engines of one model and one drafter, of different sizes: interrupted at every line of taking the other's
    place, and then asked for the second turn of a chat."""
    drafter = drafter_of(kind, model)
    engine, other = (Engine(model, rows, length, drafter=drafter, speculate_k=2) for rows, length in ((1, 40), (2, 10)))
    first = PROMPT + turn(engine, [PROMPT], 3)[0][0]
    want, where = turn(engine_of(kind, model), [[*first, 40]], 12), 0
    while True:
        turn(engine, [PROMPT], 3)
        turn(other, [[7, 8]], 2)
        if not interrupted(engine.attach, where):
            break
        assert turn(engine, [[*first, 40]], 12, cached=len(first) - 1) == want, where
        where += 1
    assert where > 20, "few lines were interrupted"


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_at_any_line_changes_nothing_that_follows(kind, model):
    check_lines(kind, model, every=1)


def check_lines(kind: str, model, every: int) -> None:
    engine, other = engine_of(kind, model), engine_of("ngram", model, rows=2)
    whole = turn(engine_of(kind, model), [PROMPT], 5)[0][0]
    others = [[7, 8], [30, 31, 32]]
    want, follow, where = turn(engine_of("ngram", model, rows=2), others, 4), {}, 0
    while True:
        turn(other, others, 2)  # takes the model's caches away, so that `attach` has work to do
        spoil(engine)
        got = []
        if not interrupted(lambda got=got: turn(engine, [PROMPT], 5, got=got), where):
            break
        assert got == whole[: len(got)]
        prompt, cached = [*PROMPT, *got, 40, 41], len(PROMPT + got) - 1 if got else 0
        if len(got) not in follow:
            follow[len(got)] = turn(engine_of(kind, model), [prompt], 8)
        assert turn(engine, [prompt], 8, cached=cached) == follow[len(got)], where
        assert turn(other, others, 4) == want, where
        where += every
    assert follow.keys() >= {0, 1, 3}, "few lines were interrupted"


# ----------------------------------------------------------------------------------------- compiled code


def test_compiled_code_is_interrupted_while_it_compiles_and_then_between_calls():
    reached = []

    def run(x):
        signal.raise_signal(signal.SIGINT)
        reached.append(x)
        return x

    with pytest.raises(KeyboardInterrupt):
        uninterrupted(run)(1)
    assert reached == []
    ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        call = uninterrupted(run)
        assert [call(2), call(3)] == reached == [2, 3] and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, ignored)
    with pytest.raises(KeyboardInterrupt):
        call(4)
    assert reached == [2, 3, 4] and signal.getsignal(signal.SIGINT) is ignored
    quiet = uninterrupted(lambda x: x)
    elsewhere = threading.Thread(target=lambda: reached.extend((quiet(5), quiet(6))))
    elsewhere.start(), elsewhere.join()
    assert reached[-2:] == [5, 6]


def interrupt_often(engine: Engine, times: int = 100) -> None:
    """Real signals at moments spread over a chat turn of a compiled engine: each ends it, none is taken for a guard
    that fails, and none is lost. For a test that has such an engine, and forbids recompiling."""
    want, ended = turn(engine, [PROMPT], 30)[0], []
    before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        for number in range(times):
            got = []
            signal.setitimer(signal.ITIMER_REAL, 0.0005 + 0.001 * (number % 50))
            with pytest.raises(KeyboardInterrupt):
                for _ in range(1000):  # one turn after the other, until the signal comes
                    got.clear()
                    turn(engine, [PROMPT], 30, got=got)
            assert got == want[0][: len(got)]
            ended.append(len(got))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert len(set(ended)) > 3, ended
    assert turn(engine, [PROMPT], 30)[0] == want
