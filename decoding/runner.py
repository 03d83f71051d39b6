"""A model with its caches: how a prompt runs, and how far a step attends.

    ModelRunner         a model and caches of B rows and S positions
    Rows                a range of slots as a batch
    caches_by_name      all buffers indexed by position;  copy_positions, clear_positions  of one slot

This file knows no request, no sampling and no compiler.
"""

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from decoding.exactness import invariant_multiples, round_up_length
from decoding.slots import State
from decoding.validation import rounded_up
from model import Caches, KVCache, Transformer
from weights.compiling import mark_dynamic


class ModelRunner:
    """A model with caches of B rows and S positions, or with `layers` of another model's caches.

    `slack` more positions follow, which no query sees and parked rows write to. At least one is needed: steps over the
    full length of a cache would compile once more. `compile_prompts` compiles the pass over prompts; None runs it
    eagerly. `max_positions` and `kind`: see Caches and make_caches.
    """

    def __init__(
        self, model: Transformer, B: int, S: int, slack: int, compile: bool, compile_prompts: Callable | None = None,
        layers: Sequence[nn.Module] | None = None, max_positions: Tensor | None = None, kind: type[KVCache] = KVCache,
    ):  # fmt: skip
        self.model, self.B, self.compile, self.compile_prompts, self.kind = model, B, compile, compile_prompts, kind
        (H, G), E = model.layers[0].attention.heads(), model.config.head_dim
        kernel = kind.kernel(model.config.sinks, E, model.norm.weight)
        multiples = invariant_multiples(kernel, B, H, G, E, model.norm.weight)
        self.attends_alike = multiples is not None  # does a query have the same bits in every pass?
        row_multiple, self.length_multiple = multiples or (1, 16)
        self.S, self.slack = round_up_length(S, self.length_multiple), slack
        caches = model.make_caches(B if layers is None else 0, self.S + slack, kind)
        self.caches = caches._replace(row_multiple=row_multiple)
        if layers is not None:
            self.caches = self.caches._replace(layers=tuple(layers))
        if max_positions is not None:
            self.caches = self.caches._replace(max_positions=max_positions)
        self.device = self.caches.key_pos.device
        self.uses_cuda_graphs = compile and self.device.type == "cuda"  # one for each length attended
        self.hidden = model.hidden if compile_prompts is None else compile_prompts(model.hidden)

    def for_draft(
        self, model: Transformer, on_layers: Sequence[int] | None = None, num_scratch: int = 0
    ) -> "ModelRunner":
        """A runner for a draft model, with separate caches or on the caches of some of this model's layers. Separate
        caches have `num_scratch` positions more, and as many more that nothing attends to."""
        layers = None if on_layers is None else [self.caches.layers[i] for i in on_layers]
        return ModelRunner(
            model, self.B, self.S + num_scratch, self.slack + num_scratch, self.compile, self.compile_prompts, layers,
            self.caches.max_positions, self.kind,
        )  # fmt: skip

    def row_view(self, begin: int, end: int) -> "ModelRunner":
        """The runner of rows [begin, end)."""
        view = copy.copy(self)
        view.caches = self.caches.row_view(begin, end)
        return view

    def bucket_length(self, length: int) -> int:
        """Round `length` up to the next compiled length, or the next that rounds alike."""
        if self.uses_cuda_graphs:
            length = max(256, 1 << (length - 1).bit_length())
        return min(round_up_length(length, self.length_multiple), self.S)

    def slice_to(self, length: int) -> Caches:
        """The caches for a step after which `length` positions are filled."""
        caches = self.caches.slice_to(self.bucket_length(length))
        if self.compile:
            mark_dynamic(caches.key_pos, 0)
        return caches

    def inputs(self, state: State, begin: int, end: int) -> tuple[Tensor, Tensor, Caches]:
        """(tokens (B, T), pos (T,), caches) of positions [begin, end), the arguments of `hidden`."""
        # A draft's vocabulary may be smaller than its target's.
        tokens = state.tokens[:, begin:end].clamp(max=self.model.config.vocab_size - 1)
        pos = torch.arange(begin, end, device=self.device)
        if self.compile_prompts:
            mark_dynamic(tokens, 1), mark_dynamic(pos, 0)
        return tokens, pos, self.slice_to(end)

    def prefill(self, state: State, begin: int, end: int, chunk: int) -> Tensor:
        """Run positions [begin, end) of a prompt in chunks; the hidden states (B, T, D) of the last chunk.

        A chunk is padded on the right. Decoding overwrites the padding's keys and values before any query sees them.
        """
        for first in range(begin, end, chunk):
            num_tokens = min(chunk, end - first)
            h = self.hidden(*self.inputs(state, first, min(first + rounded_up(num_tokens), state.parking)))  # (B, T, D)
        return h[:, :num_tokens]


class Rows(NamedTuple):
    """A range of slots: their rows of the state, of the model's caches, and of the drafter."""

    state: State
    target: ModelRunner
    drafter: object  # speculative.Drafter, or None


def caches_by_name(runners: Sequence[ModelRunner]) -> dict[str, nn.Module]:
    """Name -> cache, of each layer of these runners and of the hidden states that a draft reads from its target."""
    caches = [runner.caches for runner in runners]
    layers = {f"{i}.{layer}": cache for i, part in enumerate(caches) for layer, cache in enumerate(part.layers)}
    return layers | {f"aux.{layer}": x for part in caches for layer, x in (part.aux_hidden_states or {}).items()}


def copy_positions(runners: Sequence[ModelRunner], source: int, target: int, num_positions: int) -> None:
    """Copy the first positions of slot `source` to slot `target`."""
    for cache in caches_by_name(runners).values():
        stored = cache.at(source, 0, num_positions)
        for name, x in cache.at(target, 0, num_positions).items():
            x.copy_(stored[name])


def clear_positions(runners: Sequence[ModelRunner], slot: int, begin: int, end: int) -> None:
    """Write zeros, because a masked NaN still makes 0 * NaN = NaN."""
    for cache in caches_by_name(runners).values():
        for x in cache.at(slot, begin, end).values():
            x.zero_()
