"""DFlash (arXiv:2602.06036): a few layers over the target's hidden states draw a block of tokens in one pass.

    DFlash          settings of config.json that a Qwen3 model does not have (github.com/z-lab/dflash)
    DFlashModel     the target's hidden states -> keys and values of decided tokens; a block -> hidden states
    DFlashDraft     runs a block of the last decided token and masks, whose i-th mask draws token i
    check, load     read a published folder

The draft uses the embedding and the head of its target. q_i does not depend on drafted tokens, so rejection sampling
applies unchanged. This file does not know sampling or training.
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from drafts.hidden_states import AcceptanceWatch, record_hidden_states
from loading.checkpoint import DTYPES, allocate
from loading.config import Section, config_from_hf
from loading.files import check_headers, open_shards, read_json, shards, tensor_reader
from loading.plain_files import error_prefix
from loading.weight_names import pieces
from model import Caches, Config, Linear, RMSNorm, Transformer, apply_rope
from speculative import ModelDraft
from weights.walker import quantized_copy

MAX_BLOCK = 64  # positions that an engine clears behind a request's last one
OPTIONS = {"block_size", "mask_token_id", "target_layer_ids", "causal"}  # the keys of dflash_config
UNSUPPORTED = ("speculators_model_type", "draft_vocab_size", "sample_from_anchor")  # keys of other layouts


class DFlash(NamedTuple):
    block_size: int  # tokens of a block, the last decided one included
    mask: int  # the id of the mask token
    target_layer_ids: tuple[int, ...]  # the target's layers whose outputs go into `fc`
    is_assumed: bool = False  # does config.json leave them open?


class DFlashModel(Transformer):
    """Layers that attend to decided positions and to a block. Decided positions have keys and values of their context,
    a state made of the target's hidden states. Layers with a window are causal; others see all of the block."""

    def __init__(self, config: Config, dflash: DFlash):
        super().__init__(config)
        self.dflash, n = dflash, len(dflash.target_layer_ids)
        self.embed = self.lm_head = None  # DFlashDraft.setup sets the target's
        self.fc, self.hidden_norm = Linear(n * config.dim, config.dim, bias=False), RMSNorm(config.dim, config.norm_eps)

    def fuse(self, *hidden_states: Tensor) -> Tensor:
        """The outputs (B, T, D) of the target's layers -> the context (B, T, D)."""
        return self.hidden_norm(self.fc(torch.cat(hidden_states, dim=-1)))

    def keys_values(self, context: Tensor, pos: Tensor, max_positions: Tensor | None) -> list[tuple[Tensor, Tensor]]:
        """Each layer's keys and values (B, G, T, E) of a context (B, T, D) at pos (B, T)."""
        cos, sin = self.rope(pos, max_positions)
        parts = []
        for layer in self.layers:
            attention = layer.attention
            H, _ = attention.heads()
            kv = attention.qkv(context).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)[:, H:]  # (B, 2G, T, E)
            k, v = kv.chunk(2, dim=1)
            parts.append((apply_rope(attention.k_norm(k), cos, sin), v))
        return parts

    def hidden(self, tokens: Tensor, pos: Tensor, caches: Caches) -> Tensor:
        """Write keys and values of decided positions pos (B, T) or (T,), whose hidden states the target has recorded.
        Returns the context (B, T, D)."""
        pos = pos.expand(tokens.shape)
        context = self.fuse(*(caches.aux_hidden_states[i + 1].read(pos) for i in self.dflash.target_layer_ids))
        for cache, (k, v) in zip(caches.layers, self.keys_values(context, pos, caches.max_positions), strict=True):
            cache.update(k, v, pos)
        return context

    def block_hidden(self, tokens: Tensor, pos: Tensor, caches: Caches) -> Tensor:
        """Normed hidden states (B, W, D) of blocks (B, W) at pos (B, W). The next round overwrites their keys and
        values."""
        return super().hidden(tokens, pos, caches._replace(aux_hidden_states=None))

    def visible_by_window(self, pos: Tensor, caches: Caches | None, dtype: torch.dtype) -> dict:
        causal = super().visible_by_window(pos, caches, dtype) if any(self.windows) else {}
        return causal | {None: super().visible_by_window(pos[:, -1:].expand_as(pos), caches, dtype).get(None)}


class DFlashDraft(ModelDraft):
    """A ModelDraft that runs once a round: it writes the context of the tokens that the last round decided, then draws
    from a block. The block has its trained width for any K; its first K masks draw tokens."""

    def __init__(self, model: DFlashModel):
        super().__init__(model)
        self.num_scratch = model.dflash.block_size
        self.max_draft_tokens = self.num_scratch - 1

    def setup(self, state: nn.Module, k_max: int, target, maybe_compile: Callable) -> None:
        self.acceptance_watch = AcceptanceWatch(layers_read(self.model.dflash))
        streams = record_hidden_states([i + 1 for i in self.model.dflash.target_layer_ids], state, target)
        self.model.embed, self.model.lm_head = target.model.embed, target.model.lm_head
        super().setup(state, k_max, target, maybe_compile)
        self.runner.caches = self.runner.caches._replace(aux_hidden_states=streams)
        self.num_input_tokens = k_max + 2  # k_max + 1 as context, and the last one in the block

    def observe(self, overlap: float) -> None:
        self.acceptance_watch.observe(overlap)

    def passes(self, k: int) -> int:
        return min(k, 1)

    def propose(self, state: nn.Module) -> tuple[Tensor, Tensor]:
        self.drawn.zero_()
        caches = self.runner.slice_to(state.length - state.k + self.num_scratch)
        self.maybe_compile(self.draw_all, state, state.k)(caches, state, state.k)
        return self.tokens[:, : state.k], self.probs[:, : state.k]

    def draw_all(self, caches: Caches, state: nn.Module, K: int) -> None:
        """Write the context of the `num_input_tokens` - 1 decided tokens before the last, and draw K tokens."""
        self.write_context(caches, state, state.pos - 1, self.num_input_tokens - 1)
        steps, dflash = torch.arange(self.num_scratch, device=state.pos.device), self.model.dflash
        last = state.tokens.gather(1, state.pos[:, None])  # (B, 1)
        tokens = torch.where(steps == 0, last, dflash.mask)  # (B, W)
        # The blocks of parked rows go behind all positions of this cache, where nothing attends to them.
        begin = torch.where(state.pos < state.parking, state.pos, self.runner.S)[:, None]  # (B, 1)
        h = self.model.block_hidden(tokens, begin + steps, caches)  # (B, W, D)
        self.draw(state, h[:, 1 : K + 1], state.pos[:, None] + steps[1 : K + 1])

    def fill(self, caches: Caches, state: nn.Module) -> None:
        self.write_context(caches, state, state.pos - self.num_behind, self.CHUNK)

    def write_context(self, caches: Caches, state: nn.Module, last: Tensor, T: int) -> None:
        """Write the context of the T positions up to `last` (B,). Positions before 0 become 0."""
        pos = (last[:, None] + torch.arange(1 - T, 1, device=last.device)).clamp(min=0)  # (B, T)
        self.model.hidden(pos, pos, caches)


def layers_read(dflash: DFlash) -> str:
    layer_ids = list(dflash.target_layer_ids)
    key = "dflash_config.target_layer_ids"
    return f"The draft reads the outputs of the target's layers {layer_ids}; {key} in its config.json would set others"


@torch.no_grad()
def load_dflash(folder: Path, target: Transformer) -> DFlashModel:
    """A DFlash folder for this target, on its device, in its dtype, not packed. ValueError names file and key, or the
    tensor, that does not fit."""
    with error_prefix(folder / "config.json"):
        dflash, config = dflash_of(read_json(folder / "config.json"), target.config)
    if dflash.is_assumed:
        # z-lab/dflash#156: this guess would be wrong for 14 of 20 published drafts, all of which have the key.
        print(f"{folder}: its config.json names no layers. {layers_read(dflash)}", file=sys.stderr)
    readers = open_shards(shards(folder))
    with torch.device("meta"):
        model = DFlashModel(config, dflash).to(target.norm.weight.dtype)
    allocate(model, target.norm.weight.device)
    parts = dict(tensors_of(model))
    check_headers(folder, {name: (tuple(part.shape), DTYPES) for name, part in parts.items()}, readers, False)
    read = tensor_reader(readers)
    for name, part in parts.items():
        part.copy_(read(name))
    return model


def tensors_of(model: DFlashModel):
    """(a tensor's name in a folder, the part of a parameter that it fills)."""
    for name, parameter in model.named_parameters():
        if name.startswith(("fc", "hidden_norm")):
            yield name, parameter
        else:
            yield from ((source.removeprefix("model."), x) for source, x in pieces(model.config, name, parameter))


def check(folder: Path, hf: dict, config: Config) -> Callable[..., DFlashDraft]:
    """Check a DFlash folder and return its loader (drafts.registry.FOLDERS). ValueError for a wrong config.json."""
    with error_prefix(folder / "config.json"):
        dflash_of(hf, config)
    return functools.partial(load, folder)


def load(
    folder: Path, target: Transformer, tokenizer, *, quantize: str | None, sharded: bool, **options
) -> DFlashDraft:
    """A DFlash folder for this target, not packed, in the target's dtype."""
    if sharded:
        raise ValueError(f"--draft_tp sharded: {folder} is a DFlash draft, which every rank holds in full")
    draft = load_dflash(folder, target)
    return DFlashDraft(quantized_copy(draft, quantize) if quantize else draft)


def dflash_of(hf: dict, target: Config) -> tuple[DFlash, Config]:
    """The draft's settings and Config, for a target of this Config. ValueError names the wrong key and value."""
    hf = Section(hf)
    if not isinstance(hf.get("dflash_config"), dict):
        raise hf.refused("dflash_config", "must be an object, as in github.com/z-lab/dflash")
    options = Section(hf["dflash_config"])
    options.prefix = "dflash_config."
    if hf.get("model_type") != "qwen3":
        raise hf.refused("model_type", "is not supported as a DFlash draft; supported: 'qwen3'")
    for section, keys in ((hf, UNSUPPORTED), (options, set(options) - OPTIONS)):
        for key in keys:
            if section.get(key):
                raise section.refused(key, "is not supported; the layout of github.com/z-lab/dflash is")
    config = config_from_hf({key: value for key, value in hf.items() if key != "is_causal"})
    for section, key in ((hf, "is_causal"), (options, "causal")):
        if section.flag(key) or (any(config.windows) and section.get(key) is False):
            raise section.refused(key, "is not supported: layers with a window are causal, other layers are not")
    sizes = {"hidden_size": target.dim, "vocab_size": target.vocab_size, "num_target_layers": target.n_layers}
    for key, size in sizes.items():
        if hf.size(key, size) != size:
            raise hf.refused(key, f"is of another target: this one has {size}")
    section = hf if options.get("block_size") is None else options
    block_size, mask = section.size("block_size", max_size=MAX_BLOCK), options.get("mask_token_id")
    if block_size < 2:
        raise section.refused("block_size", "must be at least 2: the last decided token and a mask")
    if type(mask) is not int or not 0 <= mask < target.vocab_size:
        raise options.refused("mask_token_id", f"must be a token's id below vocab_size = {target.vocab_size}")
    ids, highest = options.get("target_layer_ids"), target.n_layers - 2
    is_assumed = ids is None
    ids = default_layer_ids(target.n_layers, hf.size("num_hidden_layers")) if is_assumed else ids
    if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i <= highest for i in ids):
        raise options.refused("target_layer_ids", f"must be layers of the target, 0 to {highest}")
    return DFlash(block_size, mask, tuple(ids), is_assumed), config


def default_layer_ids(n_target: int, n_draft: int) -> list[int]:
    """For a draft of one layer the target's middle layer, else n_draft layers, evenly from 1 to n_target - 3."""
    if n_draft == 1:
        return [n_target // 2]
    return [round(1 + i * (n_target - 4) / (n_draft - 1)) for i in range(n_draft)]
