"""cli/running.py: compiling shows one line, and torch's warnings only to those who ask for them."""

import io
import logging
import sys
import types
import warnings

import pytest

from cli.running import compiling, warm_up
from decoding.sampling import Sampling


class Stream(io.StringIO):
    def __init__(self, is_terminal: bool):
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


def complain(*_) -> float:
    """What Inductor does on machines that it does not like; the seconds of a compilation."""
    warnings.warn("not enough SMs", UserWarning, stacklevel=1)
    logging.getLogger("torch._inductor.utils").warning("TensorFloat32 tensor cores")
    return 1.25


@pytest.fixture
def noise(monkeypatch):
    """What warnings and loggers of torch have said."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("torch._inductor.utils")
    logger.addHandler(handler)
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_, **__: said.append(message))
    monkeypatch.delenv("TORCH_LOGS", raising=False)
    yield said
    logger.removeHandler(handler)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_compilation_leaves_one_line(is_terminal, monkeypatch, noise):
    monkeypatch.setattr(sys, "stderr", Stream(is_terminal))
    planner = types.SimpleNamespace(ks=(), row_counts=[1, 2])
    runner = types.SimpleNamespace(compile=True)
    engine = types.SimpleNamespace(runner=runner, planner=planner, warm_up=complain)
    warm_up(engine, Sampling(0), ["greedy", "plain"])
    lines = [f"compiled the {path} step for batch 2 in 1.2 s\n" for path in ("greedy", "plain")]
    text = sys.stderr.getvalue()
    if is_terminal:  # each line replaces the one about the compilation
        parts = text.split("\r\033[K")
        assert parts[0] == "compiling the greedy step for batch 2 …"
        assert [part[: len(line)] for part, line in zip(parts[1:], lines)] == lines
    else:
        assert text == "".join(lines)
    assert noise == []


def test_warnings_come_back_after_it_and_with_torch_logs(monkeypatch, noise):
    monkeypatch.setattr(sys, "stderr", Stream(False))
    with pytest.raises(ZeroDivisionError), compiling("a step"):
        complain()
        1 / 0  # noqa: B018
    assert noise == []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        complain()
        assert len(noise) == 2
        monkeypatch.setenv("TORCH_LOGS", "+dynamo")
        with compiling("a step"):
            complain()
    assert len(noise) == 4
