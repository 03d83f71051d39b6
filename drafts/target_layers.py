"""Drafts that are the target itself, on its own caches: some of its layers (`--draft
layers:0-7,24-31`), or all of them quantized (`--draft quantized:SCHEME`).

    layer_subset        a Transformer of some of a model's layers
    layers_from_spec, quantized_from_spec       the parsers of these specs (drafts/registry.py)
"""

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import nn

from decoding.errors import UserError
from drafts.base import ModelDraft
from model import Config, Transformer
from weights.formats import format_of
from weights.walker import quantized_copy


def layer_subset(model: Transformer, layer_ids: Sequence[int]) -> Transformer:
    """A Transformer of some of `model`'s layers, which shares its modules. UserError for layers
    that are not there."""
    check_layers(layer_ids, model.config.n_layers)
    subset = copy.copy(model)
    subset._modules = dict(model._modules)
    subset.layers = nn.ModuleList(model.layers[i] for i in layer_ids)
    subset.config = replace(model.config, n_layers=len(layer_ids))
    subset.windows = tuple(model.windows[i] for i in layer_ids)
    subset.rope_types = tuple(model.rope_types[i] for i in layer_ids)
    return subset


def check_layers(layer_ids: Sequence[int], n_layers: int) -> None:
    in_order = [i for i in range(n_layers) if i in layer_ids]
    if not layer_ids or in_order != list(layer_ids):
        raise UserError(f"layers {list(layer_ids)} must be some of 0 to {n_layers - 1}, in order")


def parse_layers(text: str) -> list[int]:
    """ "0-7,24-31" -> the layers in these ranges, both ends included. UserError for anything
    else."""
    layers = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        layer_range = range(0)
        if match:
            first, last = match.groups()
            layer_range = range(int(first), int(last or first) + 1)
        if not layer_range:
            raise UserError(f"{part!r} is no layer or range of layers; give ranges like 0-7,24-31")
        layers += layer_range
    return layers


def layers_from_spec(value: str, config: Config) -> Callable[..., ModelDraft]:
    """`--draft layers:0-7,24-31`: the target with some of its layers, on the target's caches."""
    layers = parse_layers(value)
    check_layers(layers, config.n_layers)
    return lambda target, *_, **options: ModelDraft(layer_subset(target, layers), layers)


def quantized_from_spec(value: str, config: Config) -> Callable[..., ModelDraft]:
    """`--draft quantized:SCHEME`: the target's quantized self, on the target's caches."""
    format_of(value)
    layers = range(config.n_layers)
    return lambda target, *_, **options: ModelDraft(quantized_copy(target, value), layers)
