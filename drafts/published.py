"""config.json and tensors of published drafts that read the target's hidden states.

    layer_config        the Config of a draft's layers
    inner_section       an object of config.json inside another one
    check_target        refuses a draft for another target
    read_state_ids      the states that a list of layers names;  neighbours  other readings of it
    check_target_ids    refuses tokens that stand for no id of the target's, or two for one
    fill_parts          copies a folder's tensors into a model

hidden_states.py numbers the states. Published files count in two ways. Some name the layers whose
inputs they read, counted from 0: these numbers are the states'. Others name the layers whose
outputs they read, counted from 0: these are one less than the states'.
"""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from decoding.errors import UserError
from loading.config import Section, config_from_hf
from loading.files import check_headers
from loading.models import FLOAT_TYPES
from model import Config

NEOX_KEYS = ("is_neox_style", "rope_is_neox_style")  # false: RoPE's pairs are interleaved
# The key of config.json that names states by their numbers here. It is our own, and goes before the
# keys of other programs, which count inputs in one file and outputs in the next.
STATES_KEY = "target_hidden_states"


def layer_config(layer: Section, outer: Section) -> Config:
    """The Config of a draft's layers, whose settings may stand inside `outer`. `is_neox_style`
    false, a key of vLLM and SGLang, is interleaved RoPE."""
    neox_flags = [
        section.flag(key)
        for section in (layer, outer)
        for key in NEOX_KEYS
        if section.get(key) is not None
    ]
    config = config_from_hf({key: value for key, value in layer.items() if key not in NEOX_KEYS})
    return replace(config, rope_interleaved=not all(neox_flags))


def inner_section(outer: Section, key: str) -> Section:
    """The object of this key, empty where it is absent. UserError for anything else."""
    value = outer.get(key) or {}
    if not isinstance(value, dict):
        raise outer.refused(key, "must be an object")
    section = Section(value)
    section.prefix = f"{key}."
    return section


def check_target(section: Section, sizes: dict[str, int]) -> None:
    """UserError for a draft whose config.json states other sizes of its target than these."""
    for key, size in sizes.items():
        if section.size(key, size) != size:
            raise section.refused(key, f"is of another target: this one has {size}")


def read_state_ids(
    section: Section, key: str, last_state: int, are_outputs: bool = False
) -> tuple[int, ...]:
    """The states, up to `last_state`, that a list of config.json names by their layers: by the
    layers that they enter, or by those that they leave if `are_outputs`. UserError for another
    list."""
    ids = section.get(key)
    offset = 1 if are_outputs else 0  # layer i, counted from 0, outputs state i + 1
    highest = last_state - offset
    is_list = isinstance(ids, list) and len(ids) > 0
    if not is_list or not all(type(i) is int and 0 <= i <= highest for i in ids):
        raise section.refused(key, f"must be layers of the target, 0 to {highest}")
    return tuple(i + offset for i in ids)


def neighbours(state_ids: tuple[int, ...], L: int) -> list[list[int]]:
    """These states of a target of L layers, those before them and those after them."""
    shifted = [[i + step for i in state_ids] for step in (0, -1, 1)]
    return [ids for ids in shifted if min(ids) >= 0 and max(ids) <= L]


def check_target_ids(target_ids: Tensor, V: int, path: Path) -> None:
    """UserError unless a draft's tokens (n,) stand for different ids of the target's V."""
    is_outside = (target_ids < 0) | (target_ids >= V)
    if is_outside.any():
        draft_id = is_outside.nonzero()[0].item()
        raise UserError(
            f"{path}: d2t gives token {draft_id} the target's id {target_ids[draft_id]}, and the"
            f" target has {V}: this draft was made for another target"
        )
    unique_ids, counts = target_ids.unique(return_counts=True)
    if len(unique_ids) < len(target_ids):
        repeated_id = unique_ids[counts > 1][0]
        draft_ids = (target_ids == repeated_id).nonzero().flatten().tolist()
        raise UserError(
            f"{path}: d2t gives tokens {draft_ids[0]} and {draft_ids[1]} the same id of the"
            f" target's, {repeated_id}: fetch the file again"
        )


@torch.no_grad()
def fill_parts(
    path: Path,
    tensors: dict[str, object],
    parts: dict[str, Tensor],
    maps: dict[str, tuple] | None = None,
) -> None:
    """Copy the stored tensors of a folder into the parts of these names. UserError lists those
    that do not fit. `maps`: shape and types of further tensors, which are not copied."""
    expected = {name: (tuple(part.shape), FLOAT_TYPES) for name, part in parts.items()}
    check_headers(path, expected | (maps or {}), tensors, tied=False)
    for name, part in parts.items():
        part.copy_(tensors[name][...])
