"""A model with its caches: how a prompt runs, and how far a step attends.

ModelRunner         a model and caches for B rows
target_runner       that of an engine
cache_class         the class of caches that EngineOptions name
padded_length       the length to which a prompt's chunk is padded
Rows                a range of slots as a batch
slot_tensors        views of a slot's positions in all caches
copy_positions      copies them to another slot
clear_positions     empties them
"""

import copy
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from decoding.batch import Batch
from decoding.options import EngineOptions
from decoding.split_kv import CHUNK, MIN_KEYS, GraphKernel, has_efficient_kernel
from exact.attention import ExactKernel, Heads, invariant_multiples, round_up_length
from model import Caches, KVCache, Transformer, row_view
from weights.compiling import compiled, mark_dynamic

PREFILL_CHUNK = 512  # tokens of a prompt per pass; bounds the memory of activations
# By device type. On a GPU each pass first unpacks all quantized weights, so passes are longer.
PREFILL_CHUNKS = {"cuda": 2048}


class ModelRunner:
    """A model with its own caches of B rows, or on `layers` of another runner's. It chooses the
    shapes in which prompts and steps run, for an engine and for generate.decode. K is the number of
    tokens that a round drafts (speculative.py), 0 in plain decoding. A slot is parked while no step
    decodes it: it has no text, or its prompt still runs.

        max_seq_length  positions of a text
        slack           K + 1: a round may draft K positions past a text's end; for_draft adds more.
                        At least 1, because a step over the full length of a cache would specialize
                        and recompile
        S               positions that a query may see: max_seq_length + slack - 1, rounded up for
                        the padding of a prompt's last chunk, then to a length at which all passes
                        round alike
        S + slack       positions of the caches; parked rows write from S on
        compile         are steps compiled?
        compile_prompts are passes over prompts?
        cache_type      the class of the caches

    With 100 positions, K = 3 and attention in multiples of 16, slack is 4, S is 103 rounded up to
    104 and then to 112, and the caches hold 116.
    """

    draft_cache_type: type[KVCache] = KVCache  # of a draft's own caches

    def __init__(
        self,
        model: Transformer,
        B: int,
        max_seq_length: int,
        slack: int = 1,
        compile: bool = False,
        compile_prompts: bool = False,
        layers: Sequence[nn.Module] | None = None,
        cache_type: type[KVCache] = KVCache,
    ):
        self.model = model
        self.B = B
        self.slack = slack
        self.compile = compile
        self.compile_prompts = compile_prompts
        self.cache_type = cache_type
        H, G = model.layers[0].attention.heads()
        E = model.config.head_dim
        weight = model.norm.weight
        self.device = weight.device
        self.chunk = PREFILL_CHUNKS.get(self.device.type, PREFILL_CHUNK)
        length = max_seq_length + slack - 1  # a round may run past the end of a text
        # Each bucket of attended lengths then has its own graph.
        self.uses_cuda_graphs = compile and self.device.type == "cuda"
        # Beyond MIN_KEYS, so that several multiples of CHUNK are possible from there on: Dynamo
        # would make a single one a constant, and refuse that.
        is_split = self.uses_cuda_graphs and length > MIN_KEYS and has_efficient_kernel(E, weight)
        heads = Heads(B, G, H // G, E, weight.dtype, model.config.sinks)
        threads = torch.get_num_threads()
        multiples = invariant_multiples(cache_type.kernel, heads, self.device, threads)
        self.attends_alike = multiples is not None  # does a query have the same bits in every pass?
        row_multiple, self.length_multiple = multiples or (1, CHUNK if is_split else 16)
        # Where the padding of the longest prompt's last chunk ends.
        num_full = (length - 1) // self.chunk * self.chunk
        padded_end = num_full + padded_length(length - num_full)
        self.S = round_up_length(padded_end, self.length_multiple)
        num_rows = B if layers is None else 0  # on another runner's layers only key_pos is needed
        caches = model.make_caches(num_rows, self.S + slack, cache_type, self.S)
        if layers is not None:
            caches = caches._replace(layers=tuple(layers))
        kernel = ExactKernel(row_multiple)
        if self.uses_cuda_graphs:
            kernel = GraphKernel(self.S + slack, is_split)
        self.caches = caches._replace(max_seq_length=max_seq_length, kernel=kernel)
        self.hidden = model.hidden
        if compile_prompts:
            self.hidden = compiled(model.hidden, self.device, prompts=True)

    def for_draft(
        self, model: Transformer, on_layers: Sequence[int] | None = None, num_scratch: int = 0
    ) -> "ModelRunner":
        """A runner for a draft model, with its own caches or on the caches of some of this model's
        layers. `num_scratch`: positions that its own caches need besides `slack`, for what the
        draft writes past a row's last decided token, or past S in a parked row."""
        layers = None if on_layers is None else [self.caches.layers[i] for i in on_layers]
        return ModelRunner(
            model,
            self.B,
            self.caches.max_seq_length,
            self.slack + num_scratch,
            compile=self.compile,
            compile_prompts=self.compile_prompts,
            layers=layers,
            cache_type=self.draft_cache_type if layers is None else self.cache_type,
        )

    def row_view(self, begin: int, end: int) -> "ModelRunner":
        """A runner on rows [begin, end) of the caches. Its `B` is still that of all rows."""
        view = copy.copy(self)
        view.caches = self.caches.row_view(begin, end)
        return view

    def bucket_length(self, length: int) -> int:
        """How far a step attends that fills `length` positions, at most S: to the next multiple of
        length_multiple, at which passes round alike if attends_alike. CUDA graphs, one for each
        length, are few: theirs are powers of two from 256 on, and S."""
        if self.uses_cuda_graphs:
            length = max(256, 1 << (length - 1).bit_length())
        return min(round_up_length(length, self.length_multiple), self.S)

    def slice_to(self, length: int) -> Caches:
        """The caches for a step after which `length` positions are filled."""
        caches = self.caches.slice_to(self.bucket_length(length))
        if self.compile:
            mark_dynamic(caches.key_pos, 0)
        return caches

    def inputs(self, tokens: Tensor, begin: int, end: int) -> tuple[Tensor, Tensor, Caches]:
        """(tokens (B, T), pos (T,), caches) of positions [begin, end), the arguments of `hidden`.
        Positions past the end of tokens (B, S) repeat its last token."""
        pos = torch.arange(begin, end, device=self.device)
        tokens = tokens[:, pos.clamp(max=tokens.size(1) - 1)]
        # A draft's vocabulary may be smaller than its target's.
        tokens = tokens.clamp(max=self.model.config.vocab_size - 1)
        if self.compile_prompts:
            mark_dynamic(tokens, 1)
            mark_dynamic(pos, 0)
        return tokens, pos, self.slice_to(end)

    def prefill(self, tokens: Tensor, begin: int, end: int) -> Tensor:
        """Run positions [begin, end) of prompts tokens (B, S) in chunks; the hidden states (B, T,
        D) of the last chunk.

        A chunk is padded on the right with its last token. Another token's states might be NaN, and
        a NaN spoils attention even where it is masked. Decoding overwrites the padding's keys and
        values before any query sees them.
        """
        for first in range(begin, end, self.chunk):
            num_tokens = min(self.chunk, end - first)
            padded_end = min(first + padded_length(num_tokens), self.S)
            h = self.hidden(*self.inputs(tokens[:, :end], first, padded_end))  # (B, T, D)
        return h[:, :num_tokens]


def cache_class(cache_type: str | type[KVCache] | None) -> type[KVCache]:
    """The class of caches for the `cache_type` of EngineOptions. None: the model's."""
    if cache_type in ("model", None):
        return KVCache
    if isinstance(cache_type, str):
        from decoding.kv_8bit import CACHE_TYPES

        return CACHE_TYPES[cache_type]
    return cache_type


def target_runner(
    model: Transformer, batch_size: int, max_seq_length: int, slack: int, options: EngineOptions
) -> ModelRunner:
    """The runner of an engine's model: compiled, and with caches, as its options say."""
    compile = options.compile
    if compile is None:
        compile = model.norm.weight.is_cuda
    compile_prompts = options.compile_prompts
    if compile_prompts is None:
        compile_prompts = compile
    runner = ModelRunner(
        model,
        batch_size,
        max_seq_length,
        slack,
        compile=compile,
        compile_prompts=compile_prompts,
        cache_type=cache_class(options.cache_type),
    )
    runner.draft_cache_type = cache_class(options.cache_type_for_drafts())
    return runner


def padded_length(n: int) -> int:
    """n rounded up, by at most 7 or an eighth, to one of 32 lengths up to 512 or 48 up to 2048.
    There should be few of them, since oneDNN keeps 0.8 MB of machine code for each shape of a
    bfloat16 product."""
    step = max(8, (1 << n.bit_length()) // 16)
    return math.ceil(n / step) * step


class Rows(NamedTuple):
    """A range of slots: their rows of the batch, of the model's caches, and of the drafter."""

    batch: Batch
    target: ModelRunner
    drafter: object  # drafts.base.Drafter, or None

    @torch.inference_mode(False)  # plain tensors, which any later code may write to
    def view(self, begin: int, end: int) -> "Rows":
        """Rows [begin, end) of these: views of their tensors."""
        drafter = None if self.drafter is None else self.drafter.row_view(begin, end)
        batch = row_view(self.batch, begin, end)
        return Rows(batch, self.target.row_view(begin, end), drafter)


def slot_caches(runners: Sequence[ModelRunner]) -> dict[str, nn.Module]:
    """Name -> cache: that of each layer of these runners, and the hidden states that a draft reads
    from its target. The draft's runner holds the same states as the target's: one name for both."""
    caches = {}
    for i, runner in enumerate(runners):
        for layer, cache in enumerate(runner.caches.layers):
            caches[f"{i}.{layer}"] = cache
        for layer, states in runner.caches.aux_hidden_states.items():
            caches[f"aux.{layer}"] = states
    return caches


def slot_tensors(
    runners: Sequence[ModelRunner], slot: int | slice, begin: int, end: int
) -> dict[str, Tensor]:
    """Name -> view of positions [begin, end) of a slot in all caches of these runners."""
    tensors = {}
    for name, cache in slot_caches(runners).items():
        for part, x in cache.views(slot, begin, end).items():
            tensors[f"{name}.{part}"] = x
    return tensors


def copy_positions(
    runners: Sequence[ModelRunner], source: int, destination: int, num_positions: int
) -> None:
    """Copy the first positions of slot `source` to slot `destination`."""
    stored = slot_tensors(runners, source, 0, num_positions)
    for name, x in slot_tensors(runners, destination, 0, num_positions).items():
        x.copy_(stored[name])


def clear_positions(runners: Sequence[ModelRunner], slot: int, begin: int, end: int) -> None:
    """Empty positions [begin, end) of a slot in all caches."""
    for cache in slot_caches(runners).values():
        cache.clear(slot, begin, end)
