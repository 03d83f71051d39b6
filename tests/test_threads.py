"""The number of threads follows who else runs on the machine."""

import pytest
from conftest import ROOT

from cli.answers import Answer
from cli.prompts import Request
from cli.session import Session
from cli.threads import MAX_PATIENCE, TRY, Threads
from decoding.sampling import Sampling
from generate import Engine
from loading.checkpoint import load_model
from loading.tokenizer import load_tokenizer


class Machine:
    """Two processors; a step takes 10 ms with both, 16 ms with one. While somebody else runs, the thread that lost its
    processor keeps the other waiting now and then, and one thread is as fast as ever."""

    def __init__(self):
        self.threads, self.busy, self.steps, self.seconds = 2, False, 0, 0.0

    def use(self, number: int) -> None:
        self.threads = number

    def step(self) -> float:
        self.steps += 1
        waits = 0.09 if self.busy and self.steps % 3 else 0.0
        took = 0.016 if self.threads == 1 else 0.010 + waits
        self.seconds += took
        return took


def run(machine: Machine, threads: Threads, steps: int, k: int = 0) -> float:
    """Mean seconds of a step."""
    before = machine.seconds
    for _ in range(steps):
        threads.observe(k, machine.step())
    return (machine.seconds - before) / steps


def test_all_threads_decode_where_nobody_else_runs():
    machine = Machine()
    threads = Threads(2, machine.use)
    assert run(machine, threads, 200) < 0.0102  # one trial of three steps, 6 ms longer each
    assert machine.threads == 2


@pytest.mark.parametrize("quiet", [0, 50])
def test_one_thread_decodes_beside_a_busy_neighbour_and_all_do_when_it_has_gone(quiet):
    machine = Machine()
    threads = Threads(2, machine.use)
    if quiet:
        run(machine, threads, quiet)
    machine.busy = True
    assert run(machine, threads, 600) < 0.5 * 0.070  # what two threads would take
    assert run(machine, threads, 600) < 1.15 * 0.016  # trials become rare
    machine.busy = False
    run(machine, threads, MAX_PATIENCE + 2 * TRY)
    assert machine.threads == 2
    assert run(machine, threads, 100) < 0.0101


def test_steps_that_grow_longer_are_no_neighbour():
    """A longer context is no reason to try again and again."""
    machine = Machine()
    threads = Threads(2, lambda number: (machine.use(number), tried.append(number)))
    tried = []
    run(machine, threads, 50)
    machine.step = lambda: 0.030 if machine.threads == 2 else 0.048
    for step in range(200):
        if step == 20:
            tried.clear()
        threads.observe(0, machine.step())
    assert not tried


def test_rounds_are_compared_with_rounds():
    """Three times the time for a round of three tokens is no sign of a neighbour."""
    machine, tried = Machine(), []
    threads = Threads(2, lambda number: (machine.use(number), tried.append(number)))
    for step in range(300):
        k = 3 * (step % 2)
        threads.observe(k, (0.010 if machine.threads == 2 else 0.016) * (1 + k))
    assert tried == [1, 2]


def test_a_step_that_the_system_interrupts_changes_nothing():
    machine = Machine()
    threads = Threads(2, machine.use)
    for step in range(300):
        threads.observe(0, machine.step() + (0.2 if step % 7 == 0 else 0.0))
        assert machine.threads == 2 or step < 2 * TRY


def test_a_single_processor_is_left_alone():
    tried = []
    threads = Threads(1, tried.append)
    for _ in range(100):
        threads.observe(0, 0.01)
    assert not tried


def test_a_neighbour_that_leaves_in_part_is_noticed_when_it_grows():
    """Steps beside a neighbour do not count as the fastest ones with all threads."""
    machine = Machine()
    threads = Threads(2, machine.use)
    for seconds, steps, number in ((0.010, 50, 2), (0.040, 2 * MAX_PATIENCE, 1), (0.014, 2 * MAX_PATIENCE, 2),
                                   (0.020, 50, 1)):  # fmt: skip
        for _ in range(steps):
            threads.observe(0, 0.016 if machine.threads == 1 else seconds)
        assert machine.threads == number


def test_a_session_observes_its_steps():
    """So one thread is tried for a moment."""
    tried = []
    model = load_model(ROOT / "checkpoints/demo")
    session = Session(Engine(model, 1, 64), load_tokenizer(ROOT / "checkpoints/demo"), Sampling(0), frozenset())
    session.threads = Threads(2, tried.append)
    request = Request("a", ids=[1, 2, 3], max_new_tokens=3 * TRY, seed=0)
    list(session.decode([Answer(request, session.printer([]))]))
    assert tried[0] == 1 and len(tried) > 1
