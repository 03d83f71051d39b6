"""What the caches of an engine hold of which texts, so that no position is computed twice.

    common_prefix       leading ids that texts have in common
    shared_prefix       leading positions that are the same in every row of a batch
    parts, copy_rows    what positions leave something behind in, by name; from some rows to others
    Kept                the ids behind the rows of an engine's caches, from one batch to the next

What a position leaves behind follows from the ids up to it, and from how they are rotated: longrope rotates all of a
text by how long it may become. This file knows neither a model's arithmetic nor files.
"""

from collections.abc import Sequence

import torch
from torch import nn

LEAST_SAVED = 64  # positions that must be saved by a pass of their own, which reads all weights once more


def common_prefix(first: Sequence[int], *others: Sequence[int]) -> int:
    """How many leading ids agree in all texts."""
    ends = (next((i for i, (x, y) in enumerate(zip(first, other)) if x != y), len(other)) for other in others)
    return min((len(first), *ends))


def long_texts(engine, prompts: Sequence[Sequence[int]], budgets: Sequence[int]) -> list[list[bool]]:
    """Of each prompt: is it, with so many new tokens, a long text, by longrope, for each model with caches?"""
    configs = [prompted.model.config for prompted in engine.prompted]
    lengths = [len(prompt) + new for prompt, new in zip(prompts, budgets)]
    return [[bool(config.rope_long) and n > config.rope_original_length for config in configs] for n in lengths]


def shared_prefix(engine, prompts: Sequence[Sequence[int]], budgets: Sequence[int], cached: int) -> int:
    """Positions that row 0 may run for all rows, or 0 where that would save too little: not where rows are rotated in
    different ways, and not beside compiled prompts whose bits are vouched for, since eager ones round otherwise."""
    first, *others = long_texts(engine, prompts, budgets)
    if any(other != first for other in others) or (engine.identical and engine.cached.compile_prompts):
        return 0
    n = min(common_prefix(*prompts), min(map(len, prompts)) - 1)  # the last token of each prompt must run
    return n if (n - cached) * len(others) >= LEAST_SAVED else 0


def parts(*caches) -> dict[str, nn.Module]:
    """Each layer's cache in these model.Caches, and each tap, which a target and its draft have in common."""
    found = {f"{i}.{layer}": cache for i, each in enumerate(caches) for layer, cache in enumerate(each.layers)}
    return found | {f"tap.{layer}": tap for each in caches for layer, tap in (each.taps or {}).items()}


def copy_rows(parts: dict[str, nn.Module], rows: int, sources: list[int], begin: int, end: int) -> None:
    """Row i, of so many, takes what row sources[i] holds at positions [begin, end); a single source serves all."""
    for part in parts.values():
        found = part.at(sources, begin, end)  # copies: rows may change places
        for name, x in part.at(slice(rows), begin, end).items():
            x.copy_(found[name])


class Kept:
    """Of each row of an engine's caches the ids that they hold, one a position, and whether as a long text's. What
    writes to the caches otherwise, as Engine.warm_up and calibrate do, comes before."""

    def __init__(self, engine):
        self.engine, self.rows, self.taken = engine, [], []

    def parts(self) -> dict[str, nn.Module]:
        return parts(*(prompted.caches for prompted in self.engine.prompted))

    @torch.inference_mode()
    def take(self, prompts: Sequence[list[int]], budgets: Sequence[int]) -> int:
        """How many leading tokens of every prompt the caches hold, each now in its prompt's row. From here on they
        count as empty, until `hold`: what fails half way leaves nothing that anybody relies on."""
        rows, self.rows, self.taken = self.rows, [], list(zip(prompts, long_texts(self.engine, prompts, budgets)))
        found = [
            [common_prefix(prompt[:-1], ids) if long == was else 0 for ids, was in rows] or [0]
            for prompt, long in self.taken
        ]
        known = min(map(max, found))
        sources = [i if known in each[i : i + 1] else each.index(max(each)) for i, each in enumerate(found)]
        if known and sources != [*range(len(prompts))]:
            copy_rows(self.parts(), len(prompts), sources, 0, known)
        return known

    def hold(self, decided: Sequence[list[int]]) -> None:
        """The batch that took has ended, or was stopped between two tokens: no layer has seen the last of each row."""
        self.rows = [((prompt + ids)[:-1], long) for (prompt, long), ids in zip(self.taken, decided)]
