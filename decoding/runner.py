"""A model with caches of its own: how a prompt runs, and how far a step attends.

    ModelRunner         a model and caches of B rows and S positions
    Rows                some neighbouring slots as a batch of their own
    caches_by_name          all that positions leave behind;  copy_positions, clear_positions  of one slot

This file knows no request, no sampling and no compiler.
"""

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from decoding.exactness import in_blocks, same_attention
from decoding.slots import State
from decoding.validation import rounded_up
from model import Caches, KVCache, Transformer
from weights.compiling import mark_dynamic


class ModelRunner:
    """A model with caches of B rows and S positions; or, with `layers`, with some layers of another model's caches.

    Behind the S positions that are attended to lie `slack` more, which parked rows write to; one at least, because
    attending to the whole cache would be a special case that compiles once more. `compile_prompts` compiles what runs
    prompts; None: they run eagerly.
    """

    def __init__(
        self, model: Transformer, B: int, S: int, slack: int, compile: bool, compile_prompts: Callable | None = None,
        layers: Sequence[nn.Module] | None = None, ends: Tensor | None = None, kind: type[KVCache] = KVCache,
    ):  # fmt: skip
        self.model, self.B, self.compile, self.compile_prompts, self.kind = model, B, compile, compile_prompts, kind
        (H, G), E = model.layers[0].attention.heads(), model.config.head_dim
        kernel = kind.kernel(model.config.sinks, E, model.norm.weight)
        self.tile = same_attention(kernel, B, H, G, E, model.norm.weight)
        rows, self.unit = self.tile or (1, 16)
        self.S, self.slack = in_blocks(S, self.unit), slack
        self.caches = model.make_caches(B if layers is None else 0, self.S + slack, kind)._replace(row_multiple=rows)
        if layers is not None:
            self.caches = self.caches._replace(layers=tuple(layers))
        if ends is not None:
            self.caches = self.caches._replace(max_positions=ends)
        self.device = self.caches.key_pos.device
        self.uses_cuda_graphs = compile and self.device.type == "cuda"  # one for each length attended
        self.hidden = model.hidden if compile_prompts is None else compile_prompts(model.hidden)

    def for_draft(self, model: Transformer, on_layers: Sequence[int] | None = None) -> "ModelRunner":
        """A draft for this model: with caches of its own, or on the caches of some of this model's layers."""
        layers = None if on_layers is None else [self.caches.layers[i] for i in on_layers]
        return ModelRunner(
            model,
            self.B,
            self.S,
            self.slack,
            self.compile,
            self.compile_prompts,
            layers,
            self.caches.max_positions,
            self.kind,
        )

    def row_view(self, begin: int, end: int) -> "ModelRunner":
        """The same for rows [begin, end) alone."""
        view = copy.copy(self)
        view.caches = self.caches.row_view(begin, end)
        return view

    def bucket_length(self, length: int) -> int:
        """`length` filled positions, rounded up to the next of a few lengths, or of those that round alike."""
        if self.uses_cuda_graphs:
            length = max(256, 1 << (length - 1).bit_length())
        return min(in_blocks(length, self.unit), self.S)

    def slice_to(self, length: int) -> Caches:
        """The caches, for steps after which `length` positions are filled."""
        caches = self.caches.slice_to(self.bucket_length(length))
        if self.compile:
            mark_dynamic(caches.key_pos, 0)
        return caches

    def inputs(self, state: State, begin: int, end: int) -> tuple[Tensor, Tensor, Caches]:
        """Positions [begin, end) of the texts in the state, as `hidden` takes them: tokens (B, T), pos (T,)."""
        # A draft may know fewer ids than its target.
        tokens = state.tokens[:, begin:end].clamp(max=self.model.config.vocab_size - 1)
        pos = torch.arange(begin, end, device=self.device)
        if self.compile_prompts:
            mark_dynamic(tokens, 1), mark_dynamic(pos, 0)
        return tokens, pos, self.slice_to(end)

    def prefill(self, state: State, begin: int, end: int, chunk: int) -> Tensor:
        """Run positions [begin, end) of a prompt in chunks; the hidden states (B, D) at the last one.

        A chunk is padded on the right. Padding writes keys and values beyond the prompt's end, where decoding
        overwrites each position before any query may see it.
        """
        for first in range(begin, end, chunk):
            num_tokens = min(chunk, end - first)
            h = self.hidden(*self.inputs(state, first, min(first + rounded_up(num_tokens), self.S)))  # (B, T, D)
        return h[:, num_tokens - 1]


class Rows(NamedTuple):
    """Some neighbouring slots: their part of the state, of the model's caches, and of the drafter."""

    state: State
    target: ModelRunner
    drafter: object  # speculative.Drafter, or None


def caches_by_name(runners: Sequence[ModelRunner]) -> dict[str, nn.Module]:
    """Each layer's cache in these runners, and the hidden states that a target and its draft share."""
    caches = [runner.caches for runner in runners]
    layers = {f"{i}.{layer}": cache for i, own in enumerate(caches) for layer, cache in enumerate(own.layers)}
    return layers | {f"aux.{layer}": x for own in caches for layer, x in (own.aux_hidden_states or {}).items()}


def copy_positions(runners: Sequence[ModelRunner], source: int, target: int, num_positions: int) -> None:
    """Slot `target` takes the first positions of slot `source`."""
    for cache in caches_by_name(runners).values():
        stored = cache.at(source, 0, num_positions)
        for name, x in cache.at(target, 0, num_positions).items():
            x.copy_(stored[name])


def clear_positions(runners: Sequence[ModelRunner], slot: int, begin: int, end: int) -> None:
    """Zeros in place of what may be NaN: a masked NaN still makes 0 * NaN = NaN."""
    for cache in caches_by_name(runners).values():
        for x in cache.at(slot, begin, end).values():
            x.zero_()
