"""Drafts that are the target itself, on its own caches: some of its layers (`--draft
layers:0-7,24-31`), all of them on a part of the keys (`--draft window:N`), or quantized (`--draft
quantized:SCHEME[,window:N]`).

    layer_subset        a Transformer of some of a model's layers
    WindowedTarget      a Transformer that attends to the first keys and to the last N
    LayersSource, WindowSource, QuantizedSource
                        these specs
"""

import copy
import re
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from decoding.errors import UserError
from drafts.base import DraftSource, ModelDraft, read_count
from model import AttentionMask, Config, Transformer, visible_keys
from weights.formats import format_of
from weights.walker import quantized_copy

WINDOW_KEYS = "keys for window:N"  # what a spec counts
NUM_SINKS = 4  # keys at a text's beginning, which attention needs even if it uses them little


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


class WindowedTarget(Transformer):
    """A model's own modules with attention to NUM_SINKS keys at the text's beginning and to the
    last `window` ones, as in StreamingLLM (arXiv:2309.17453). It reads less of a long cache, and
    the same weights."""

    def __init__(self, model: Transformer, window: int):
        nn.Module.__init__(self)
        self.__dict__.update(model.__dict__)
        self._modules = dict(model._modules)
        self.windows = tuple(window if own is None else min(own, window) for own in model.windows)

    @staticmethod
    def visible_keys(pos: Tensor, key_pos: Tensor, window: int, key_block: int) -> AttentionMask:
        """As model.visible_keys, and the first NUM_SINKS keys, which precede the gathered ones."""
        keys = visible_keys(pos, key_pos, window, key_block)
        query_pos = pos[:, None, :, None]  # (B, 1, T, 1)
        if keys.index is None:
            key_pos = key_pos.view(-1, 1, 1, key_pos.size(-1))  # (1 or B, 1, 1, S)
            is_sink = (key_pos < NUM_SINKS) & (key_pos <= query_pos)
            return keys._replace(mask=keys.mask | is_sink)
        sinks = torch.arange(NUM_SINKS, device=pos.device)
        is_before = query_pos - sinks >= window  # (B, 1, T, NUM_SINKS): not among the last ones
        mask = torch.cat((is_before, keys.mask), dim=-1)
        index = torch.cat((sinks.expand(len(pos), -1), keys.index), dim=1)
        return AttentionMask(mask, index)


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


class LayersSource(DraftSource):
    """`--draft layers:0-7,24-31`: the target with some of its layers, on the target's caches."""

    def check(self, config: Config) -> None:
        self.layers = parse_layers(self.origin)
        check_layers(self.layers, config.n_layers)

    def load(self, target: Transformer, tokenizer) -> ModelDraft:
        return ModelDraft(layer_subset(target, self.layers), self.layers)


class WindowSource(DraftSource):
    """`--draft window:N`: the target on its first keys and its last N, on the target's caches."""

    def check(self, config: Config) -> None:
        self.window = read_count(self.origin, WINDOW_KEYS)

    def load(self, target: Transformer, tokenizer) -> ModelDraft:
        return on_all_layers(WindowedTarget(target, self.window))


class QuantizedSource(DraftSource):
    """`--draft quantized:SCHEME[,window:N]`: the target's quantized self, on the target's
    caches."""

    def check(self, config: Config) -> None:
        self.scheme, separator, window = self.origin.partition(",window:")
        format_of(self.scheme)
        self.window = read_count(window, WINDOW_KEYS) if separator else None

    def load(self, target: Transformer, tokenizer) -> ModelDraft:
        draft = quantized_copy(target, self.scheme)
        if self.window is not None:
            draft = WindowedTarget(draft, self.window)
        return on_all_layers(draft)


def on_all_layers(model: Transformer) -> ModelDraft:
    """The drafter of a model with the target's layers, on their caches."""
    return ModelDraft(model, range(model.config.n_layers))
