"""What drafting learns from texts, and which requests may use it.

    Memory      running figures of the requests that share it
    DraftPlan   what the requests of one memory draft in a step
    Memories    the memory of each request

A round keeps the target's distribution if its drafted tokens, their number and the choice of a
drafter are independent of the random numbers that it uses. These are hashes of the request's seed
and of positions (decoding/sampling.py), so requests of one seed use the same numbers. One rule
follows, for all that outlives a step:

* A sampled request whose seed no other has used shares one memory, and the pool of answers, with
  all others of that kind and with greedy ones. Nobody has read the numbers that lie before it, so
  whatever others have learned, drafted, answered or quoted in a prompt is independent of them.
* Two sampled requests of one seed each learn alone, from nothing: what one of them learned, what
  was decided next to it, and any answer to a prompt that quotes it may depend on numbers that the
  other has yet to use. A request that runs when a second one of its seed comes leaves the shared
  memory then. Its own text is always its to use, for the numbers of its past never return.

So a seed is used up for sharing, whoever has shown its answers to whom; prompts need no marks of
where their words come from. All requests still teach the pool, which only those of the first kind
read. Greedy text needs no numbers. Cached keys and values of a prefix, in slots and in files, are
functions of ids that the prompt has itself: they save time and tell nothing. What this process
cannot know are seeds that another one has used; a seed also counts as new again after MAX_SEEDS
others. And on a GPU the host reads a few steps late, by a number of steps that depends on when
other rows' prompts run.
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
        """A drafter's own figures of this kind, which begin as kind()."""
        if kind not in self.figures:
            self.figures[kind] = kind()
        return self.figures[kind]


class DraftPlan(NamedTuple):
    """What the requests of one memory draft in a step. `expected`: as of drafts.base.Drafter, for
    each of them; `window`: the drafter's; `costs` those that the plan was made by."""

    memory: Memory
    requests: Sequence
    k: int = 0
    costs: object = None
    expected: Sequence[list[float] | None] = ()
    window: int = 0

    @property
    def runs_drafter(self) -> bool:
        """Is a draft computed whose acceptance is not known beforehand?"""
        return self.k > 0 and None in self.expected

    @property
    def fills_cache(self) -> bool:
        """Does the drafter's own cache follow this step?"""
        return self.k > 0 and self.window > 0


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
        self.seeds[seed] = None
