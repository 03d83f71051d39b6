"""How many threads decode on a CPU: all or one, by the times of recent steps.

A step of a small model is hundreds of parallel regions. If another process takes a processor, each region waits for the
thread that lost it, and one thread alone is several times faster than two (benchmarks/NOTES.md). Other processes come
and go, so steps are compared throughout. This file knows the seconds of steps, and no model.
"""

import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Hashable

import torch

TRY = 3  # steps with each number of threads that are compared
SLOWER = 1.5  # times the fastest step with all threads: beyond it another process may be running
PATIENCE, MAX_PATIENCE = 32, 128  # steps with one thread until all are tried again; doubles while one is faster


class Threads:
    """Chooses between `max_threads` threads and one. Steps are compared with those that draft as many tokens."""

    def __init__(self, max_threads: int, use: Callable[[int], object] = torch.set_num_threads):
        self.max_threads, self.use = max_threads, use
        self.chosen = self.number = max_threads  # the other number is tried while they differ
        self.steps, self.patience = 0, PATIENCE  # steps since the number was set
        self.recent: dict[tuple[int, Hashable], deque[float]] = defaultdict(lambda: deque(maxlen=TRY))  # (number, k) ->
        self.fastest: dict[Hashable, float] = {}  # k -> seconds of an undisturbed step with all threads

    def observe(self, k: Hashable, seconds: float) -> None:
        """Record the seconds of a step that drafted k tokens, and set the number of threads for the next one."""
        recent, usual = self.recent[self.number, k], self.recent[self.chosen, k]
        recent.append(seconds)
        self.steps += 1
        if self.max_threads == 1 or len(recent) < TRY:
            return
        typical = statistics.median(recent)  # one interrupted step does not count as another process
        if self.number != self.chosen:
            if len(usual) == TRY and typical < statistics.median(usual):
                self.chosen, self.patience = self.number, PATIENCE
            else:
                self.patience = min(2 * self.patience, MAX_PATIENCE)
                if usual and self.chosen == self.max_threads:  # no processor is missing: steps have become longer
                    self.fastest[k] = statistics.median(usual)
            self.set(self.chosen)
        elif self.due(k, typical):
            self.set(1 if self.number == self.max_threads else self.max_threads)
            for key in [key for key in self.recent if key[0] == self.number]:
                del self.recent[key]

    def due(self, k: Hashable, typical: float) -> bool:
        """Is it time to try the other number?"""
        if self.chosen == 1:
            return self.steps >= self.patience
        first = not self.fastest
        fastest = self.fastest[k] = min(typical, self.fastest.get(k, typical))
        return first or typical > SLOWER * fastest

    def set(self, number: int) -> None:
        self.number, self.steps = number, 0
        self.use(number)
