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
from model import AttentionMask, Config, Transformer, attention_mask, visible_keys
from weights.formats import format_of
from weights.walker import quantized_copy

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
    the same weights. A layer with a window of its own sees no key beyond that."""

    def __init__(self, model: Transformer, window: int):
        nn.Module.__init__(self)
        self.__dict__.update(model.__dict__)
        self._modules = dict(model._modules)
        self.window = window
        # For reports.
        self.read_windows = [min(layer_window or window, window) for layer_window in self.windows]

    def visible_keys(
        self,
        pos: Tensor,
        key_pos: Tensor,
        layer_window: int | None,
        key_block: int,
    ) -> AttentionMask:
        """Of the keys that a layer with this window of its own sees, the last ones and the first
        NUM_SINKS, which precede the gathered ones."""
        window = min(layer_window or self.window, self.window)
        keys = visible_keys(pos, key_pos, window, key_block)
        if keys.index is None:
            is_first = key_pos.view(-1, 1, 1, key_pos.size(-1)) < NUM_SINKS  # (1 or B, 1, 1, S)
            is_sink = is_first & attention_mask(pos, key_pos, layer_window)
            return keys._replace(mask=keys.mask | is_sink)
        sinks = torch.arange(NUM_SINKS, device=pos.device)
        is_last = attention_mask(pos, sinks, window)  # (B, 1, T, NUM_SINKS)
        is_before = attention_mask(pos, sinks, layer_window) & ~is_last
        mask = torch.cat((is_before, keys.mask), dim=-1)
        index = torch.cat((sinks.expand(len(pos), -1), keys.index), dim=1)
        return AttentionMask(mask, index)


def check_layers(layer_ids: Sequence[int], n_layers: int) -> None:
    in_order = [i for i in range(n_layers) if i in layer_ids]
    if not layer_ids or in_order != list(layer_ids):
        raise UserError(f"layers {list(layer_ids)} must be some of 0 to {n_layers - 1}, in order")


def parse_layers(text: str, n_layers: int) -> list[int]:
    """ "0-7,24-31" -> the layers in these ranges, both ends included, of n_layers. UserError for
    anything else."""
    layers = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part)
        layer_range = range(0)
        if match:
            first, last = match.groups()
            layer_range = range(int(first), int(last or first) + 1)
        if not layer_range or layer_range[-1] >= n_layers:
            raise UserError(
                f"{part!r} is no layer or range of layers of 0 to {n_layers - 1}; give ranges like"
                f" 0-7,24-31"
            )
        layers += layer_range
    return layers


class LayersSource(DraftSource):
    """`--draft layers:0-7,24-31`: the target with some of its layers, on the target's caches."""

    def check(self, config: Config) -> None:
        self.layers = parse_layers(self.origin, config.n_layers)
        check_layers(self.layers, config.n_layers)

    def load(self, target: Transformer, tokenizer) -> ModelDraft:
        return ModelDraft(layer_subset(target, self.layers), self.layers)


def read_window(value: str, config: Config) -> int:
    """The N of window:N. UserError where all layers of a target of this Config have windows that
    are as short."""
    window = read_count(value, "keys for window:N")
    if all(own and own <= window for own in config.windows or [None]):
        raise UserError(f"{window} keys shorten nothing: each layer's own window is as short")
    return window


class WindowSource(DraftSource):
    """`--draft window:N`: the target on its first keys and its last N, on the target's caches."""

    def check(self, config: Config) -> None:
        self.window = read_window(self.origin, config)

    def load(self, target: Transformer, tokenizer) -> ModelDraft:
        return on_all_layers(WindowedTarget(target, self.window))


class QuantizedSource(DraftSource):
    """`--draft quantized:SCHEME[,window:N]`: the target's quantized self, on the target's
    caches."""

    def check(self, config: Config) -> None:
        self.scheme, separator, window = self.origin.partition(",window:")
        format_of(self.scheme)
        self.window = read_window(window, config) if separator else None

    def load(self, target: Transformer, tokenizer) -> ModelDraft:
        draft = quantized_copy(target, self.scheme)
        if self.window is not None:
            draft = WindowedTarget(draft, self.window)
        return on_all_layers(draft)


def on_all_layers(model: Transformer) -> ModelDraft:
    """The drafter of a model with the target's layers, on their caches."""
    return ModelDraft(model, range(model.config.n_layers))
