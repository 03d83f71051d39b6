"""DFlash (arXiv:2602.06036): a few layers over the target's hidden states draw a block of tokens in
one pass.

A block is the last decided token and masks behind it. Its width is that of the training, whatever K
is. One pass of the draft's layers runs it, and the hidden states of K of its positions draw the K
tokens: those of the masks in z-lab's layout, in DeepSpec's those of the last decided token and of
K - 1 masks; in speculators' config.json says which.

The block attends to itself and to all decided positions. These never run as tokens: each has a
context, which `fuse` makes of the target's states there (hidden_states.py has their numbers), and
the layers make keys and values of it. A round therefore first writes those of the positions that
the last round ran through the target and kept. The newest token is not among them: the target has
yet to compute its states, and it stands in the block.

    DFlash          settings of config.json that a Qwen3 model does not have
    DFlashModel     contexts -> keys and values; a block -> hidden states
    DFlashDraft     its drafter
    DFlashSource    a folder in any of three layouts: z-lab's (github.com/z-lab/dflash),
                    speculators' (github.com/vllm-project/speculators), and DeepSpec's, with
                    DSpark's Markov head (arXiv:2607.05147, github.com/deepseek-ai/DeepSpec);
                    dflash_of reads its config.json

A draft uses the embedding and the head of its target where its folder stores none. q_i depends on
no drafted token, or with a Markov head on the one before it, which is drawn first, so rejection
sampling applies unchanged.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from drafts.base import ParallelDraft
from drafts.hidden_states import HiddenStateDraft, HiddenStateModel, HiddenStateSource
from drafts.published import (
    STATES_KEY,
    check_target,
    inner_section,
    layer_config,
    neighbours,
    read_state_ids,
)
from drafts.vocabulary import read_token_id
from loading.config import Section
from model import Caches, Config, Linear, RMSNorm, apply_rope_partly

MAX_BLOCK = 64  # a block may not reach past the positions that an engine clears after a request
# In z-lab's layout: all keys of dflash_config, and keys of config.json that only others have.
OPTIONS = {"block_size", "mask_token_id", "target_layer_ids", "causal"}
OTHER_LAYOUTS = ("speculators_model_type", "draft_vocab_size", "sample_from_anchor")


class DFlash(NamedTuple):
    block_size: int  # tokens of a block, the last decided one included
    mask: int  # the id of the mask token
    state_ids: tuple[int, ...]  # of the target, which go into `fc`
    has_anchor: bool = False  # does the last decided token draw the first one, not the first mask?
    markov_rank: int = 0  # of the Markov head; 0: there is none
    vocab_size: int = 0  # of the draft's head; 0: the target's
    draft_topk: int = 0  # with a Markov head, so many best logits stay before it adds; 0: all


class DFlashModel(HiddenStateModel):
    """Layers that attend to decided positions and to a block. Decided positions have keys and
    values of their context, a state made of the target's hidden states. Layers with a window are
    causal; others see all of the block."""

    def __init__(self, config: Config, dflash: DFlash, has_embed: bool = False):
        """`has_embed`: make an embedding and a head of its own. Loading makes both, and
        drop_unstored removes what the folder lacks. Training makes them only for a draft with an
        anchor, DeepSpec's."""
        V = config.vocab_size
        super().__init__(config, dflash.vocab_size or V)
        self.dflash = dflash
        if not (has_embed or dflash.has_anchor):
            self.embed = self.lm_head = None
        R = dflash.markov_rank
        # Tokens (B, T) -> what they add to the logits (B, T, V) of the next ones.
        self.markov_head = nn.Sequential()
        if R:
            self.markov_head.markov_w1 = nn.Embedding(V, R)
            self.markov_head.markov_w2 = Linear(R, V, bias=False)
        self.state_ids = dflash.state_ids
        num_inputs = len(dflash.state_ids) * config.dim
        self.fc = Linear(num_inputs, config.dim, bias=False)
        self.hidden_norm = RMSNorm(config.dim, config.norm_eps)

    def fuse(self, *states: Tensor) -> Tensor:
        """The target's states (B, T, D) -> the context (B, T, D)."""
        return self.hidden_norm(self.fc(torch.cat(states, dim=-1)))

    def keys_values(
        self,
        context: Tensor,
        pos: Tensor,
        max_seq_length: int,
    ) -> list[tuple[Tensor, Tensor]]:
        """Each layer's keys and values (B, G, T, E) of a context (B, T, D) at pos (B, T)."""
        cos, sin = self.rope(pos, max_seq_length)
        keys_values = []
        for layer in self.layers:
            attention = layer.attention
            H, G = attention.heads()
            qkv = attention.qkv(context).unflatten(-1, (-1, attention.head_dim))  # (B, T, H+2G, E)
            # One Linear makes queries too, which a context does not need.
            _, k, v = qkv.transpose(1, 2).split((H, G, G), dim=1)  # (B, G, T, E)
            k = apply_rope_partly(attention.k_norm(k), cos, sin, attention.interleaved)
            keys_values.append((k, v))
        return keys_values

    def hidden(
        self,
        tokens: Tensor,
        pos: Tensor,
        caches: Caches,
    ) -> Tensor:
        """Write keys and values of the context at decided positions pos (B, T) or (T,), whose
        states the target has recorded. It takes the place of Transformer.hidden, so that
        ModelRunner.prefill fills this cache: `tokens` (B, T) give the shape alone, and nobody uses
        the context (B, T, D) that it returns."""
        pos = pos.expand(tokens.shape)
        context = self.target_states(caches, pos)
        keys_values = self.keys_values(context, pos, caches.max_seq_length)
        for cache, (k, v) in zip(caches.layers, keys_values, strict=True):
            cache.update(k, v, pos)
        return context

    def block_hidden(
        self,
        tokens: Tensor,
        pos: Tensor,
        caches: Caches,
    ) -> Tensor:
        """Normed hidden states (B, W, D) of blocks (B, W) at pos (B, W). The next round overwrites
        their keys and values."""
        # The draft's own layers must not overwrite the states that the target has recorded.
        return super().hidden(tokens, pos, caches._replace(aux_hidden_states={}))

    def visible_by_window(
        self,
        pos: Tensor,
        caches: Caches | None,
        dtype: torch.dtype,
    ) -> dict:
        """As in any model, but layers without a window see the block up to its end."""
        visible = super().visible_by_window(pos, caches, dtype)
        if None in visible:  # layers without a window: every query sees what the block's last sees
            end = pos[:, -1:].expand_as(pos)
            visible[None] = super().visible_by_window(end, caches, dtype)[None]
        return visible


class DFlashDraft(HiddenStateDraft, ParallelDraft):
    """A ParallelDraft that writes the context of the tokens that the last round decided, then draws
    from a block. The block has its trained width for any K; its first K masks draw tokens, or the
    last decided token and K - 1 masks."""

    # The newest token stands in the block and has no context yet. The k_max + 1 before it may lack
    # one: the token that was the newest before the last round, and those decided after it.
    num_extra_inputs = 1

    def __init__(self, model: DFlashModel):
        super().__init__(model)
        self.num_scratch = model.dflash.block_size
        # The first position of the block that draws: the last decided token, or the first mask.
        self.first_drawn = int(not model.dflash.has_anchor)
        self.max_k = self.num_scratch - self.first_drawn

    def draw_all(
        self,
        caches: Caches,
        batch,
        K: int,
    ) -> None:
        """Write the context of the latest decided tokens but the last, and draw K tokens."""
        num_contexts = self.num_first_inputs - 1  # all but the newest token's
        self.hidden_up_to(caches, batch, batch.pos - 1, num_contexts)  # for what it writes
        pos = batch.pos[:, None]  # (B, 1)
        ahead = torch.arange(self.num_scratch, device=pos.device)  # (W,)
        last = batch.tokens.gather(1, pos)  # (B, 1)
        tokens = torch.where(ahead == 0, last, self.model.dflash.mask)  # (B, W)
        # The blocks of parked rows begin at S of this cache, and no query sees S or later keys.
        block_begin = torch.where(pos < batch.parked_pos, pos, self.runner.S)
        h = self.model.block_hidden(tokens, block_begin + ahead, caches)  # (B, W, D)
        h = h[:, self.first_drawn : self.first_drawn + K]  # (B, K, D)
        logits = self.model.head(h)  # (B, K, V)
        if not self.model.markov_head:  # an empty Sequential: there is none
            self.draw(batch, logits, pos + 1 + ahead[:K])
            return
        if self.model.dflash.draft_topk:
            min_logit = logits.topk(self.model.dflash.draft_topk).values[..., -1:]  # (B, K, 1)
            logits = logits.masked_fill(logits < min_logit, -math.inf)
        for i in range(K):
            before = batch.tokens.gather(1, pos + i)  # (B, 1), as drawn
            bias = self.model.markov_head(before)  # (B, 1, V)
            self.draw(batch, logits[:, i : i + 1] + bias, pos + i + 1)


class DFlashSource(HiddenStateSource):
    """A DFlash folder in any of these layouts. UserError for a wrong config.json."""

    draft_class = DFlashDraft

    def check(self, config: Config) -> None:
        self.dflash, self.config = dflash_of(self.origin.hf, config)

    def choices(self) -> dict[str, list]:
        return {STATES_KEY: neighbours(self.dflash.state_ids, self.target_config.n_layers)}

    def new_model(self) -> DFlashModel:
        return DFlashModel(self.config, self.dflash, has_embed=True)


def dflash_of(hf: dict, target: Config) -> tuple[DFlash, Config]:
    """The draft's settings and Config, for a target of this Config. UserError names the wrong key
    and value."""
    hf = Section(hf)
    # The sections with the block's settings and with the layers': in two layouts not config.json's.
    options = hf
    layer = hf
    has_anchor = hf.flag("sample_from_anchor")
    if hf.get("dflash_config") is not None:
        options = zlab_options(hf)
    elif hf.get("speculators_model_type") is not None:
        layer = speculators_layer(hf)
    else:  # DeepSpec's layout
        has_anchor = True
    check_target(layer, {"hidden_size": target.dim, "vocab_size": target.vocab_size})
    check_target(hf, {"num_target_layers": target.n_layers, "target_hidden_size": target.dim})
    config = layer_config(Section(layer | {"is_causal": None, "tie_word_embeddings": False}), hf)
    # Here layers with a window are causal and others are not. True asks it of the others too, false
    # of none: so true is always refused, and false where a layer has a window.
    for section, key in ((hf, "is_causal"), (options, "causal")):
        is_false = section.get(key) is False
        if section.flag(key) or (is_false and any(config.windows)):
            raise section.refused(key, "is not supported: only layers with a window are causal")
    section = hf if options.get("block_size") is None else options
    block_size = section.size("block_size", max_size=MAX_BLOCK)
    mask = read_token_id(options, "mask_token_id", target.vocab_size)
    is_speculators = layer is not hf  # only this layout has a section for the layers
    state_ids = state_ids_of(hf, is_speculators, options, target.n_layers)
    rank = hf.count("markov_rank")
    if rank and hf.get("markov_head_type") != "vanilla":
        raise hf.refused("markov_head_type", "is not supported; supported: 'vanilla'")
    vocab_size = hf.size("draft_vocab_size", target.vocab_size)
    has_topk = hf.get("dspark_draft_topk")
    topk = hf.size("dspark_draft_topk", max_size=vocab_size) if has_topk else 0
    if topk and not rank:
        raise hf.refused("dspark_draft_topk", "needs a Markov head, which markov_rank gives")
    dflash = DFlash(block_size, mask, state_ids, has_anchor, rank, vocab_size, topk)
    return dflash, config


def state_ids_of(hf: Section, is_speculators: bool, options: Section, L: int) -> tuple[int, ...]:
    """The states of a target of L layers that the draft reads: speculators' layout names them by
    the layers that they enter, the others by those that they leave. Neither may name state L,
    because transformers gives the last layer's output normed."""
    if hf.get(STATES_KEY):
        return read_state_ids(hf, STATES_KEY, L)
    if is_speculators:
        return read_state_ids(hf, "aux_hidden_state_layer_ids", L - 1)
    return read_state_ids(options, "target_layer_ids", L - 1, are_outputs=True)


def speculators_layer(hf: Section) -> Section:
    """The object transformer_layer_config of speculators' layout. UserError for a model of another
    type, and for other speculators than the plain one."""
    layer = inner_section(hf, "transformer_layer_config")
    layer["model_type"] = layer.get("model_type") or "qwen3"
    for section, key, supported in (
        (layer, "model_type", "qwen3"),
        (hf, "projector_type", "dflash"),
        (hf, "sliding_window_non_causal", False),
    ):
        if section.get(key) not in (None, supported):
            raise section.refused(key, f"is not supported; supported: {supported!r}")
    return layer


def zlab_options(hf: Section) -> Section:
    """The object dflash_config of z-lab's layout. UserError for a model of another type, and for
    keys of other layouts."""
    options = inner_section(hf, "dflash_config")
    if hf.get("model_type") != "qwen3":
        raise hf.refused("model_type", "is not supported as a DFlash draft; supported: 'qwen3'")
    for section, keys in ((hf, OTHER_LAYOUTS), (options, options.keys() - OPTIONS)):
        for key in keys:
            if section.get(key):
                reason = "is not supported; the layout of github.com/z-lab/dflash is"
                raise section.refused(key, reason)
    return options
