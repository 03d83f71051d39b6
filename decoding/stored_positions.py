"""The computed positions of a text outside an engine: keys and values, with the ids behind them.

    find_longest_prefix the slot that stores the longest beginning of some prompts
    prefix_tensors      its positions by name, to be written to a file
    restore             such tensors, into the first slot of an engine

An engine that restores positions finds them like those of an earlier request.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from decoding.engine import Engine
from decoding.runner import slot_tensors
from decoding.scheduler import common_prefix


class CachedPrefix(NamedTuple):
    """The first positions of a slot."""

    slot: int
    ids: list[int]


def find_longest_prefix(engine: Engine, prompts: Sequence[Sequence[int]]) -> CachedPrefix:
    """The longest prefix of all prompts that some slot has cached; without prompts, the longest
    cached text of any slot."""
    cached_ids = {slot: slot.cached_ids() for slot in engine.scheduler.slots}
    slot = max(cached_ids, key=lambda slot: common_prefix(cached_ids[slot], *prompts))
    ids = cached_ids[slot]
    num_shared = common_prefix(ids, *prompts)
    if len(engine.runners) > 1:
        # A draft's own caches may lack the positions that a round or plain steps decided.
        num_shared = min(num_shared, slot.num_draft)
    return CachedPrefix(slot.index, ids[:num_shared])


def prefix_tensors(engine: Engine, prefix: CachedPrefix) -> dict[str, Tensor]:
    """Name -> tensor of a beginning: views of the caches, and the ids."""
    ids = torch.tensor(prefix.ids, dtype=torch.int64)
    tensors = slot_tensors(engine.runners, prefix.slot, 0, len(ids))
    return tensors | {"ids": ids}


def restore(
    engine: Engine,
    tensors: dict[str, Tensor],
) -> CachedPrefix:
    """Write tensors of the same models to the first slot, as many positions as fit. Returns what it
    stores then."""
    ids = tensors["ids"].tolist()[: engine.max_seq_length]
    num_positions = len(ids)
    slot = engine.scheduler.slots[0]
    for name, view in slot_tensors(engine.runners, slot.index, 0, num_positions).items():
        fitting = [slice(size) for size in view.shape]
        view.copy_(tensors[name][tuple(fitting)])
    slot.store(ids, num_written=max(num_positions, slot.num_written))
    slot.num_draft = num_positions
    return CachedPrefix(slot.index, ids)
