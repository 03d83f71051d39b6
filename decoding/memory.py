"""What drafting learns from texts, and which requests may use it.

    Memory      running figures of the requests that share it
    MemoryPlan  what the requests of one memory draft in a step
    Memories    the memory of each request

A round keeps the target's distribution if the random numbers that decide it are independent of what
it drafts, how much, and by which drafter. These numbers are hashes of the request's seed and of
positions (decoding/sampling.py), so two requests of one seed use the same ones: what one of them
taught a drafter may already depend on the numbers that the other has yet to use. Hence one rule:

* A sampled request whose seed is new shares one memory, and the pool of answers, with all others of
  that kind and with greedy ones, which use no numbers.
* Two sampled requests of one seed learn alone, each from its own text and from nothing else. One
  that runs when a second one of its seed comes leaves the shared memory then.

A program whose calls all have the default seed therefore drafts its second answer from that
answer's own text. Prompts need no marks of where their words come from, for a quoted answer belongs
to a seed that is used already. All requests teach the pool; only those of the first kind read it.
Cached keys and values are functions of a prompt's own ids: they save time and tell nothing.

Not covered: seeds that another process has used; a seed counts as new again after MAX_SEEDS others;
and on a GPU the host reads a few steps late, by a number of steps that depends on when other rows'
prompts run.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

MAX_SEEDS = 1 << 18  # that are known to be used, some 100 bytes each


class Memory:
    """What was learned from the texts of some requests. `draft_length`: draft_length.DraftLength,
    made by the engine."""

    def __init__(self, is_shared: bool):
        self.is_shared = is_shared
        self.draft_length = None
        self.figures: dict[type, object] = {}

    def of(self, kind: type) -> object:
        """Figures of this kind, a drafter's own or Gains, which begin as kind()."""
        if kind not in self.figures:
            self.figures[kind] = kind()
        return self.figures[kind]


class MemoryPlan(NamedTuple):
    """What the requests of one memory draft in a step. `expected`: as of drafts.base.Drafter, for
    each of them; `num_first_inputs`: the drafter's; `costs` those that the plan was made by."""

    memory: Memory
    requests: Sequence
    k: int = 0
    costs: object = None
    expected: Sequence[list[float] | None] = ()
    num_first_inputs: int = 0

    @property
    def runs_drafter(self) -> bool:
        """Is a draft computed whose acceptance is not known beforehand?"""
        return self.k > 0 and None in self.expected

    @property
    def fills_cache(self) -> bool:
        """Does the drafter's own cache follow this step?"""
        return self.runs_drafter and self.num_first_inputs > 0


class Memories:
    """The memory of each request, by the rule above."""

    def __init__(self):
        self.shared = Memory(is_shared=True)
        self.seeds: dict[int, None] = {}  # of sampled requests, the oldest first

    def assign(self, request, others: Iterable) -> None:
        """Give a new scheduler.Request its memory. `others` have not ended."""
        request.memory = self.shared
        seed = request.noise_seed
        if seed is None:
            return
        if seed in self.seeds:
            sharing = [other for other in others if other.noise_seed == seed]
            for same_seed in (request, *sharing):
                if same_seed.memory is self.shared:
                    same_seed.memory = Memory(is_shared=False)
        elif len(self.seeds) == MAX_SEEDS:
            del self.seeds[next(iter(self.seeds))]
        self.seeds.pop(seed, None)  # to stand last
        self.seeds[seed] = None
