"""The Llama-architecture decoder: the whole arithmetic and nothing else.

Llama comes first, a page to print and to read from top to bottom:

    LlamaConfig                 the numbers of a Llama
    RMSNorm, Rope, apply_rope   norms, and rotary positions
    attend, visible_keys, AttentionKernel           attention with grouped heads
    KVCache, Caches             static keys and values, indexed by position
    Attention, FeedForward, Block, Transformer      tokens and positions in, logits out

What deviates stands behind, by name, and replaces these parts in models of other families:

    Config                      every number that the arithmetic depends on;  parts_of
    FamilyRope, rope_frequencies        positions by layer, and for longer contexts
    FamilyAttention             norms of q and k, and sinks
    FamilyFeedForward, SparseMoE        other activations, and a choice among experts
    FamilyBlock                 norms before and after, and a scale
    Embedding, Linear, silu     small modules, and functions that round alike in any place

A forward pass depends only on its arguments: `model(tokens, pos, caches)`. Sampling, quantization,
ranks, files and text are handled elsewhere; the few lines that torch's compiler needs say so.

Dimension letters, here and everywhere: B batch, T query length, S cache length, D model dim, H
query heads, G KV heads, R = H / G query heads per KV head, E head dim, F ffn dim, V vocabulary, K
draft length.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, compiler, nn


@dataclass(frozen=True)
class LlamaConfig:
    """The numbers that a Llama uses. Models take a Config (below), which adds those of other
    families."""

    dim: int  # D
    n_layers: int
    n_heads: int  # H
    n_kv_heads: int  # G
    head_dim: int  # E
    ffn_dim: int  # F
    vocab_size: int  # V
    max_seq_length: int  # positions the model was trained for
    norm_eps: float
    tie_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    ffn_bias: bool = False
    rope_theta: float = 10000.0
    rope_type: str = "default"  # how rope_frequencies stretches positions; the numbers follow
    rope_factor: float = 1.0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_length: int = 0  # llama3, yarn, longrope: the context before it was stretched
    dtype: str | None = None  # of the checkpoint's weights; no part of the arithmetic


# ------------------------------------------------------------------------------- norms and RoPE


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in x's dtype; `F.rms_norm` accumulates 16-bit
    input in float32. Gemma stores weights less 1, which keeps more of their digits in 16 bits; this
    offset is added in float32."""

    def __init__(
        self,
        dim: int,
        eps: float,
        offset: float = 0.0,
    ):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.float() + self.offset if self.offset else self.weight
        # Autocast hands 16-bit x to a float32 weight; torch fuses only equal dtypes, and warns of
        # others.
        y = F.rms_norm(x.to(weight.dtype), weight.shape, weight, self.eps)
        return y.to(x.dtype)


class Rope(nn.Module):
    """cos and sin of position times frequency, always float32: a 16-bit table loses positions at
    long context."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.make_table("cpu")

    def make_table(self, device: torch.device | str) -> None:
        """The inverse frequencies (n,) of n pairs."""
        inv_freq = rope_frequencies(self.config)
        self.register_buffer("inv_freq", inv_freq.to(device), persistent=False)

    def _apply(self, fn, recurse: bool = True):
        # `to` and `float` come through here. The table follows the device, but stays float32 where
        # the model is cast to 16 bits.
        super()._apply(fn, recurse)
        self.make_table(self.inv_freq.device)
        return self

    def forward(self, pos: Tensor, max_seq_length: int = 0) -> tuple[Tensor, ...]:
        """pos (B, T) int -> cos, sin (B, 1, T, n) float32 of n pairs. `max_seq_length`, of a text,
        counts in a FamilyRope."""
        angle = pos[:, None, :, None].float() * self.inv_freq  # (B, 1, T, n)
        return angle.cos(), angle.sin()

    def by_type(self, pos: Tensor, max_seq_length: int) -> dict:
        """Rope type of a layer -> the result of `forward`. All layers of a Llama have type 0."""
        return {0: self(pos, max_seq_length)}


def apply_rope(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    """Rotate x (B, heads, T, E) by cos and sin (B, 1, T, n): n pairs (x[i], x[i + n])."""
    a, b = x.float().chunk(2, dim=-1)  # each (B, heads, T, n)
    rotated = (a * cos - b * sin, b * cos + a * sin)
    return torch.cat(rotated, dim=-1).to(x.dtype)


# -------------------------------------------------------------------------- attention and KV cache


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    sinks: Tensor | None = None,
) -> Tensor:
    """Softmax attention in float32. q (B, H, T, E), k and v (B, G, S, E), bias (B, 1, rows, S) ->
    (B, H, T, E).

    The R query heads that share a KV head become rows of one product, so K and V are read once.
    Zero rows pad the queries to the bias's rows. sinks (H,): see `beside_sinks`.
    """
    B, H, T, E = q.shape
    G = k.size(1)
    num_rows = H // G * T
    # A CPU kernel reads rows of E numbers.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    q = q.reshape(B, G, num_rows, E)  # (B, H, T, E) -> (B, G, R*T, E)
    num_padding = bias.size(2) - num_rows
    if num_padding:
        q = F.pad(q, (0, 0, 0, num_padding))  # (B, G, rows, E)
    if sinks is None:
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return y[:, :, :num_rows].reshape(B, H, T, E)
    y, logsumexp = attend_with_logsumexp(q, k, v, bias)
    parts = (x[:, :, :num_rows].reshape(B, H, T, -1) for x in (y, logsumexp[..., None]))
    return beside_sinks(*parts, sinks)


class AttentionMask(NamedTuple):
    """The cached keys that the queries of one call see, and the function that attends to them."""

    # (B, 1, T, S) bool; after AttentionKernel.prepare a float bias (B, 1, rows, S) of scores
    mask: Tensor
    index: Tensor | None  # (B, S) positions to gather, or None: the first S
    run: Callable = attend


def attention_mask(pos: Tensor, key_pos: Tensor, window: int | None) -> Tensor:
    """True where a query may see a key: pos (B, T), key_pos (S,) or (B, S) -> bool (B, 1, T, S).

    A query sees the keys up to its position; with a window, the last `window` of them.
    """
    query_pos = pos[:, None, :, None]  # (B, 1, T, 1)
    distance = query_pos - key_pos.view(-1, 1, 1, key_pos.size(-1))  # (B, 1, T, S)
    is_visible = distance >= 0
    if window is not None:
        is_visible = is_visible & (distance < window)
    return is_visible


def visible_keys(
    pos: Tensor,
    key_pos: Tensor,
    window: int | None,
    key_block: int,
) -> AttentionMask:
    """The keys that queries at pos (B, T), consecutive within a row, see. key_pos: (S,) of a cache,
    or pos itself.

    In a cache that is longer than the window, only the blocks of key_block keys that cover it are
    gathered, so that the cost stays constant.
    """
    S = key_pos.size(-1)
    num_keys = S
    if window is not None:
        # T queries see window + T - 1 keys, which may begin anywhere in a block.
        num_blocks = 1 + math.ceil((window + pos.size(1) - 2) / key_block)
        num_keys = num_blocks * key_block
    if num_keys >= S:
        return AttentionMask(attention_mask(pos, key_pos, window), None)
    first_key = (pos[:, :1] - (window - 1)).clamp(min=0)  # (B, 1)
    block_begin = first_key // key_block * key_block
    index = block_begin + torch.arange(num_keys, device=pos.device)  # (B, num_keys)
    mask = attention_mask(pos, index, window)
    # The last block may reach beyond the cache; what is gathered there in its place is masked.
    return AttentionMask(mask, index.clamp(max=S - 1))


class AttentionKernel:
    """How attention runs. Other kernels give the same results up to rounding: exact/attention.py
    has the one by which all passes round alike, decoding/split_kv.py a GPU's."""

    key_block = 1  # the keys of a window are gathered in whole blocks of this many
    run = staticmethod(attend)

    def prepare(
        self,
        keys: AttentionMask,
        R: int,
        dtype: torch.dtype,
    ) -> AttentionMask:
        """The mask as 0 and -inf (B, 1, R * T, S), to be added to scores."""
        zero = torch.zeros((), dtype=dtype, device=keys.mask.device)
        bias = zero.where(keys.mask, -math.inf)
        bias = bias.repeat(1, 1, R, 1)  # (B, 1, T, S) -> (B, 1, R*T, S)
        return AttentionMask(bias, keys.index, self.run)


class CacheSpec(NamedTuple):
    """What a layer's cache is made for: B rows, G heads of keys and S positions of E channels on
    this rank. Rows without a text run too: they write from `parked_pos` on, where no row looks."""

    B: int
    G: int
    S: int
    E: int
    dtype: torch.dtype
    device: torch.device
    parked_pos: int
    layer: int
    config: Config
    rope: Rope


def row_index(pos: Tensor) -> Tensor:
    """The row of each position in pos (B, T), to index a tensor of rows by both: (B, 1)."""
    return torch.arange(pos.size(0), device=pos.device)[:, None]


class KVCache(nn.Module):
    """Keys and values of one layer at fixed addresses, indexed by absolute position.

    Nothing is removed: positions after a row's last token are masked, and later overwritten. The
    cache starts as zeros, because a masked NaN still makes 0 * NaN = NaN.
    """

    # Buffers (B, G, S, …) with a value for each position, which are cleared for a new text, copied
    # to one that begins alike, and stored. Nobody else touches what other buffers hold.
    by_position: tuple[str, ...] = ("k", "v")
    cleared_to: Mapping[str, float] = {}  # of these, what a buffer is cleared to, if not to 0
    shared: tuple[str, ...] = ()  # buffers that all rows share; of others a step gets its rows
    parked_pos: int  # rows without a text write from here on
    # May a text that begins alike take over the first positions of a slot? Not from a cache that
    # drops them.
    keeps_prefixes = True
    # The function behind `attend`, which exact/attention.py probes; `attend` calls visible.run.
    kernel = staticmethod(attend)

    def __init__(
        self,
        B: int,
        G: int,
        S: int,
        E: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        super().__init__()
        for name in ("k", "v"):
            zeros = torch.zeros(B, G, S, E, dtype=dtype, device=device)
            self.register_buffer(name, zeros, persistent=False)

    @classmethod
    def of(cls, spec: CacheSpec) -> KVCache:
        """A layer's cache, for a class that needs more of it than its sizes."""
        cache = cls(spec.B, spec.G, spec.S, spec.E, spec.dtype, spec.device)
        cache.parked_pos = spec.parked_pos
        return cache

    @staticmethod
    def position_bytes(G: int, E: int, dtype: torch.dtype) -> int:
        """Bytes of one position in one layer."""
        return 2 * G * E * dtype.itemsize

    def update(
        self,
        k: Tensor,
        v: Tensor,
        pos: Tensor,
    ) -> None:
        """Write k and v (B, G, T, E) at pos (B, T)."""
        self.write(pos, k=k, v=v)

    def write(self, pos: Tensor, **values: Tensor) -> None:
        """Write (B, G, T, …) at pos (B, T), into the buffers of these names."""
        if pos.size(0) == self.k.size(0) == 1:  # a third of the time of indexing by two tensors
            index = pos[0]  # (T,)
            for name, x in values.items():
                getattr(self, name).index_copy_(2, index, x)
            return
        row = row_index(pos)  # (B, 1)
        for name, x in values.items():
            getattr(self, name)[row, :, pos] = x.transpose(1, 2)  # (B, G, T, …) -> (B, T, G, …)

    def attend(
        self,
        q: Tensor,
        visible: AttentionMask,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q (B, H, T, E) over the visible positions -> (B, H, T, E). B may be smaller than the
        cache's."""
        k, v = self.read(q.size(0), visible)
        return visible.run(q, k, v, visible.mask, sinks)

    def read(
        self,
        B: int,
        visible: AttentionMask,
        names: tuple[str, ...] = ("k", "v"),
    ) -> list[Tensor]:
        """The visible positions (B, G, S, …) of the first B rows of these buffers."""
        if visible.index is None:
            S = visible.mask.size(-1)
            return [getattr(self, name)[:B, :, :S] for name in names]
        row = row_index(visible.index)  # (B, 1)
        # (B, S, G, …) -> (B, G, S, …)
        return [getattr(self, name)[row, :, visible.index].transpose(1, 2) for name in names]

    def views(
        self,
        rows: int | slice | list[int],
        begin: int,
        end: int,
    ) -> dict[str, Tensor]:
        """Positions [begin, end) of these rows by buffer name: views, or copies where rows are a
        list."""
        return {name: getattr(self, name)[rows, :, begin:end] for name in self.by_position}

    def clear(self, row: int, begin: int, end: int) -> None:
        """Empty positions [begin, end) of a row, because a masked NaN still makes 0 * NaN = NaN."""
        for name, x in self.views(row, begin, end).items():
            x.fill_(self.cleared_to.get(name, 0))


class Caches(NamedTuple):
    """A KVCache for every layer, and the positions that attention runs over."""

    layers: tuple[KVCache, ...]
    key_pos: Tensor  # (S,) 0, 1, 2, …
    # Layer, or the number of layers -> recorder of what enters it.
    aux_hidden_states: Mapping[int, nn.Module] = {}
    max_seq_length: int = 0  # of a row's text, by which longrope chooses its factors
    kernel: AttentionKernel = AttentionKernel()  # how attention runs

    def slice_to(self, length: int) -> Caches:
        """Attend to positions < `length` only. The length is the size of key_pos, and no number,
        because a traced program can leave a size dynamic."""
        return self._replace(key_pos=self.key_pos[:length])

    def row_view(self, begin: int, end: int) -> Caches:
        """The caches of rows [begin, end)."""
        aux = self.aux_hidden_states.items()
        return self._replace(
            layers=tuple(row_view(layer, begin, end) for layer in self.layers),
            aux_hidden_states={layer: row_view(states, begin, end) for layer, states in aux},
        )

    def record(self, layer: int, x: Tensor, pos: Tensor) -> None:
        """Record what enters a layer, x (B, T, D), if a recorder asks for it."""
        if layer in self.aux_hidden_states:
            self.aux_hidden_states[layer].update(x, pos)


# -------------------------------------------------------------------------- layers and Transformer


class Attention(nn.Module):
    """Grouped-query attention. Head counts follow from the Linears' shapes, so a rank's slice just
    works."""

    def __init__(self, config: Config):
        super().__init__()
        self.head_dim = config.head_dim
        q_dim = config.n_heads * config.head_dim
        k_dim = config.n_kv_heads * config.head_dim
        self.qkv = Linear(config.dim, q_dim + 2 * k_dim, bias=config.qkv_bias)
        self.out = Linear(q_dim, config.dim, bias=config.out_bias)
        self.register_parameter("sinks", None)

    def heads(self) -> tuple[int, int]:
        """(H, G) on this rank."""
        H = self.out.in_features // self.head_dim
        num_qkv = self.qkv.out_features // self.head_dim
        return H, (num_qkv - H) // 2

    def queries_keys(self, qk: Tensor, rope: tuple) -> tuple[Tensor, ...]:
        """Rotate q and k (B, H + G, T, E) -> q (B, H, T, E), k (B, G, T, E). They rotate together:
        small models are bound by the number of operations."""
        qk = apply_rope(qk, *rope)
        return qk.split(self.heads(), dim=1)

    def forward(
        self,
        x: Tensor,
        pos: Tensor,
        rope: tuple | None,
        visible: AttentionMask,
        cache: KVCache | None,
    ) -> Tensor:
        H, G = self.heads()
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim))  # (B, T, H + 2G, E)
        qkv = qkv.transpose(1, 2)  # (B, H + 2G, T, E)
        qk, v = qkv.split((H + G, G), dim=1)
        q, k = self.queries_keys(qk, rope)
        if cache is None:
            y = visible.run(q, k, v, visible.mask, self.sinks)
        else:
            cache.update(k, v, pos)
            y = cache.attend(q, visible, self.sinks)
        y = y.transpose(1, 2).flatten(2)  # (B, H, T, E) -> (B, T, H*E)
        return self.out(y)


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), gate and up in one matrix."""

    def __init__(
        self,
        config: Config,
        dim: int,
        bias: bool,
    ):
        super().__init__()
        self.gate_up = Linear(config.dim, 2 * dim, bias=bias)
        self.down = Linear(dim, config.dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up.halves(x)  # each (..., F)
        return self.down(self.gated(gate, up))

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """(..., F), (..., F) -> (..., F)"""
        return silu(gate) * up


class Block(nn.Module):
    """Attention and a feed-forward, each added to the residual stream."""

    def __init__(self, config: Config):
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn = FeedForward(config, config.ffn_dim, config.ffn_bias)

    @compiler.nested_compile_region  # a compiler traces one block for all layers
    def forward(
        self,
        x: Tensor,
        pos: Tensor,
        rope: tuple,
        visible: AttentionMask,
        cache: KVCache | None,
    ) -> Tensor:
        y = self.attention(self.attention_norm(x), pos, rope, visible, cache)
        x = x + y
        y = self.ffn(self.ffn_norm(x))
        return x + y


class Transformer(nn.Module):
    """Tokens and their positions in, logits out. Without caches a call attends over its own tokens
    (training, scoring); with caches also over all earlier positions (decoding)."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        # One of each layer. A Llama's Config has none, for its layers are all alike.
        self.windows = config.windows or (None,) * config.n_layers
        self.rope_types = config.rope_types or (0,) * config.n_layers
        # Of the classes Block and Rope for a Llama, of those of families otherwise.
        blocks, self.rope = parts_of(config)
        self.embed = Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(blocks)
        self.norm = RMSNorm(config.dim, config.norm_eps, config.norm_offset)
        self.lm_head = Linear(config.dim, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed.weight

    def make_caches(
        self,
        batch_size: int,
        max_seq_length: int,
        cache_type: type[KVCache] = KVCache,
        parked_pos: int | None = None,
    ) -> Caches:
        """Empty caches for batch_size rows of max_seq_length positions. Any number of sets may be
        in use at once. `parked_pos`: where rows without a text write from, by default nowhere."""
        weight = self.norm.weight
        S = max_seq_length
        sizes = (S, self.config.head_dim, weight.dtype, weight.device)
        parked_pos = S if parked_pos is None else parked_pos
        layers = []
        with torch.inference_mode(False):  # plain tensors, which any later code may write to
            for i, layer in enumerate(self.layers):
                _, G = layer.attention.heads()
                spec = CacheSpec(batch_size, G, *sizes, parked_pos, i, self.config, self.rope)
                layers.append(cache_type.of(spec))
            key_pos = torch.arange(max_seq_length, device=weight.device)
        return Caches(tuple(layers), key_pos, max_seq_length=max_seq_length)

    visible_keys = staticmethod(visible_keys)

    def visible_by_window(
        self,
        pos: Tensor,
        caches: Caches | None,
        dtype: torch.dtype,
    ) -> dict[int | None, AttentionMask]:
        """Window of a layer -> the keys that queries at pos (B, T) see through that window."""
        if caches is None:
            caches = Caches((), key_pos=pos)
        H, G = self.layers[0].attention.heads()
        kernel = caches.kernel
        visible = {}
        for window in set(self.windows):
            keys = self.visible_keys(pos, caches.key_pos, window, kernel.key_block)
            visible[window] = kernel.prepare(keys, H // G, dtype)
        return visible

    def embedded(self, tokens: Tensor) -> Tensor:
        """tokens (B, T) int -> what enters the first layer (B, T, D). The scale is rounded to the
        embeddings' dtype, as Gemma's was in its training."""
        x = self.embed(tokens)
        if self.config.embed_scale == 1:
            return x
        return x * x.new_full((), self.config.embed_scale)

    def hidden(
        self,
        tokens: Tensor,
        pos: Tensor,
        caches: Caches | None = None,
    ) -> Tensor:
        """tokens (B, T) int, pos (T,) or (B, T) int, consecutive within a row -> normed states (B,
        T, D)."""
        pos = pos.expand(tokens.shape)  # (B, T)
        x = self.embedded(tokens)  # (B, T, D)
        visible_by_window = self.visible_by_window(pos, caches, x.dtype)
        if caches is None:
            T = pos.size(1)
            caches = Caches((None,) * len(self.layers), key_pos=pos, max_seq_length=T)
        rope_by_type = self.rope.by_type(pos, caches.max_seq_length)
        for i, layer in enumerate(self.layers):
            caches.record(i, x, pos)
            rope = rope_by_type[self.rope_types[i]]
            visible = visible_by_window[self.windows[i]]
            x = layer(x, pos, rope, visible, caches.layers[i])
        caches.record(len(self.layers), x, pos)
        return self.norm(x)

    def head(self, h: Tensor) -> Tensor:
        """h (..., D) -> logits (..., V) float32."""
        return scaled(self.lm_head(h).float(), self.config.logit_scale)

    def forward(
        self,
        tokens: Tensor,
        pos: Tensor,
        caches: Caches | None = None,
    ) -> Tensor:
        """Logits (B, T, V) float32 for the token after each position."""
        return self.head(self.hidden(tokens, pos, caches))


# ------------------------------------------------------------- what deviates: Config, and its parts


@dataclass(frozen=True)
class Config(LlamaConfig):
    """Every number that the arithmetic depends on: a Llama's, and those by which other families
    deviate. loading.config_from_hf makes one from a config.json."""

    gate_limit: float | None = None  # bound of a feed-forward's gate and up
    gate_alpha: float = 1.0  # of a bounded gate: gate * sigmoid(gate_alpha * gate)
    gelu: bool = False  # is a feed-forward's gate activated by GELU, and not by SiLU?
    # RMSNorm of q and k: of each head before ("heads") or after the rotation ("rotated"), or of
    # all heads as one vector ("full").
    qk_norm: str | None = None
    norms_before: bool = True  # of the inputs of attention and feed-forward
    norms_after: bool = False  # of their outputs
    norm_offset: float = 0.0  # added to the weights of all norms
    embed_scale: float = 1.0  # factor of embeddings
    residual_scale: float = 1.0  # factor of the outputs of attention and feed-forward
    score_scale: float = 1.0  # of q k / sqrt(E)
    logit_scale: float = 1.0
    sinks: bool = False  # a learned score of each head in the softmax, without a value
    # For each layer the number of latest tokens that a token attends to, itself included; None: all
    # of them. An empty tuple: all, in every layer.
    windows: tuple[int | None, ...] = ()

    # For each layer: does it have experts in place of one feed-forward? An empty tuple: none has.
    sparse: tuple[bool, ...] = ()
    n_experts: int = 0
    experts_per_token: int = 0  # the router's top-k
    expert_dim: int = 0  # F of an expert
    expert_bias: bool = False
    router_bias: bool = False
    router_sigmoid: bool = False  # are the experts' scores sigmoids, and not a softmax?
    router_float32: bool = False  # does the router stay float32 whatever the model's dtype is?
    selection_bias: bool = False  # a bias of each score that counts for the choice alone
    router_norm: bool = True  # do the weights of a token's experts sum to 1?
    routed_scale: float = 1.0  # factor of these weights
    shared_dim: int = 0  # F of the expert that every token takes; 0: none
    shared_gate: bool = False  # is it weighted by the sigmoid of a score of its own?

    rope_dim: int = 0  # rotated leading dimensions of a head; 0: all
    rope_interleaved: bool = False  # pairs are (x[2 i], x[2 i + 1])
    # For each layer: 0 rotates by rope_theta, 1 by rope_local_theta, None not at all. An empty
    # tuple: 0 in every layer.
    rope_types: tuple[int | None, ...] = ()
    rope_local_theta: float = 10000.0  # of layers with rope type 1: sliding windows
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    rope_truncate: bool = True
    rope_attention_factor: float = 1.0  # multiplies cos and sin
    # Longrope's divisor of each frequency where no text is longer than the original length.
    rope_short: tuple[float, ...] = ()
    rope_long: tuple[float, ...] = ()  # the same where texts may be longer
    # Scales queries by 1 + query_scale * log(1 + position // original length)
    query_scale: float = 0.0
    # Names the checkpoint's tensors; no part of the arithmetic
    family: str = field(default="llama", compare=False)


def parts_of(config: Config) -> tuple[list[Block], Rope]:
    """The layers and the rotary positions of a Llama, or where the config has any number of another
    family those that read it."""
    names = [field.name for field in fields(LlamaConfig)]
    # Windows only choose masks, and the other is for rope types that a Llama lacks.
    names += ["windows", "rope_local_theta"]
    if config == Config(**{name: getattr(config, name) for name in names}):
        blocks = [Block(config) for _ in range(config.n_layers)]
        return blocks, Rope(config)
    sparse = config.sparse or (False,) * config.n_layers
    blocks = [FamilyBlock(config, is_sparse) for is_sparse in sparse]
    return blocks, FamilyRope(config)


# -------------------------------------------------------------------------------- rotary positions


class FamilyRope(Rope):
    """Rotations that differ by layer (Config.rope_types) or by the length that texts may reach
    (longrope), and that scale what they rotate."""

    def __init__(self, config: Config):
        super().__init__(config)
        if config.rope_long:
            self.long = FamilyRope(replace(config, rope_short=config.rope_long, rope_long=()))
        if 1 in config.rope_types:
            plain = {"rope_types": (), "rope_type": "default", "rope_attention_factor": 1.0}
            self.local = FamilyRope(replace(config, rope_theta=config.rope_local_theta, **plain))

    def forward(self, pos: Tensor, max_seq_length: int = 0) -> tuple[Tensor, ...]:
        """cos, sin, and the queries' scale (B, 1, T, 1) where the config has one. max_seq_length:
        see `takes_long_factors`."""
        if takes_long_factors(self.config, max_seq_length):
            return self.long(pos)
        config = self.config
        cos, sin = (x * config.rope_attention_factor for x in super().forward(pos))
        if not config.query_scale:
            return cos, sin
        num_contexts = pos // config.rope_original_length
        query_scale = 1 + config.query_scale * (1 + num_contexts).log()  # (B, T)
        return cos, sin, query_scale[:, None, :, None]

    def by_type(self, pos: Tensor, max_seq_length: int) -> dict:
        """Rope type, as in Config.rope_types -> the result of `forward`, or None."""
        rope_by_type = {None: None, 0: self(pos, max_seq_length)}
        if 1 in self.config.rope_types:
            rope_by_type[1] = self.local(pos)
        return rope_by_type


def takes_long_factors(config: Config, max_seq_length: int) -> bool:
    """Does longrope take its long factors? It does for all texts where they may grow beyond the
    original context, so that no text changes from one set of factors to the other. vLLM does the
    same."""
    return bool(config.rope_long) and max_seq_length > config.rope_original_length


def apply_rope_partly(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
) -> Tensor:
    """`apply_rope` for the leading n pairs of x (B, heads, T, E), which may be interleaved: pair i
    is (x[2i], x[2i + 1])."""
    x, rest = x.tensor_split((2 * cos.size(-1),), dim=-1)
    if interleaved:
        a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)  # each (B, heads, T, n)
        pairs = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1)
        rotated = pairs.flatten(-2).to(x.dtype)
    else:
        rotated = apply_rope(x, cos, sin)
    return torch.cat((rotated, rest), dim=-1) if rest.size(-1) else rotated


def rope_frequencies(config: Config) -> Tensor:
    """Inverse frequencies (n,) float32 of n pairs, scaled by `config.rope_type`.

    Sources: default RoFormer arXiv:2104.09864, eq. 15; linear interpolation arXiv:2306.15595;
    llama3 the published Llama 3.1 reference; yarn arXiv:2309.00071 §3.2 (NTK-by-parts); longrope
    arXiv:2402.13753 §3.
    """
    rope_dim = config.rope_dim or config.head_dim
    exponent = torch.arange(0, rope_dim, 2, dtype=torch.float32, device="cpu") / rope_dim
    inv_freq = 1.0 / config.rope_theta**exponent
    match config.rope_type:
        case "default":
            return inv_freq
        case "linear":
            return inv_freq / config.rope_factor
        case "longrope":
            return inv_freq / torch.tensor(config.rope_short, dtype=torch.float32, device="cpu")
        case "llama3":
            share = llama3_share(config, inv_freq)
        case "yarn":
            share = yarn_share(config, rope_dim)
    # A fast pair (share 1) stays; a slow one (share 0) is stretched to the longer context.
    return inv_freq / config.rope_factor * (1 - share) + inv_freq * share


def llama3_share(config: Config, inv_freq: Tensor) -> Tensor:
    """How much of each pair (n,) stays, by the circles that it makes in the original context."""
    num_circles = config.rope_original_length * inv_freq / (2 * math.pi)
    low = config.rope_low_freq_factor
    ramp = (num_circles - low) / (config.rope_high_freq_factor - low)
    return ramp.clamp(0, 1)


def yarn_share(config: Config, rope_dim: int) -> Tensor:
    """How much of each pair (n,) stays: all up to the pair that makes `rope_beta_fast` circles in
    the original context, nothing from that of `rope_beta_slow`, and a ramp between them."""

    def pair_of(num_circles: float) -> float:
        ratio = config.rope_original_length / (num_circles * 2 * math.pi)
        return rope_dim * math.log(ratio) / (2 * math.log(config.rope_theta))

    low = pair_of(config.rope_beta_fast)
    high = pair_of(config.rope_beta_slow)
    if config.rope_truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, rope_dim - 1)
    pair = torch.arange(rope_dim // 2, dtype=torch.float32, device="cpu")
    ramp = (pair - low) / ((high - low) or 0.001)
    return 1 - ramp.clamp(0, 1)


# ------------------------------------------------------------------------------------ attention


LOGSUMEXP_DEVICE = "cpu"  # only its attention kernel also returns the log-sum-exp


def attend_with_logsumexp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
) -> tuple[Tensor, Tensor]:
    """Attention (B, G, rows, E), and the log-sum-exp of its scores (B, G, rows) float32."""
    if q.device.type == LOGSUMEXP_DEVICE:  # the kernel behind scaled_dot_product_attention
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias)
    scores = (q @ k.mT).float() / math.sqrt(q.size(-1)) + bias  # (B, G, rows, S)
    weights = scores.softmax(-1).to(v.dtype)
    return weights @ v, scores.logsumexp(-1)


def beside_sinks(y: Tensor, logsumexp: Tensor, sinks: Tensor) -> Tensor:
    """Attention y (B, H, T, E) with one more score of each head, sinks (H,), that takes part in the
    softmax without a value. logsumexp (B, H, T, 1): of the scores behind y."""
    share = sigmoid(logsumexp - sinks.float()[:, None, None])  # sum / (sum + e^sink)
    return (y * share).to(y.dtype)


class FamilyAttention(Attention):
    """Attention with norms of queries and keys, layers without RoPE, and sinks."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.qk_norm = config.qk_norm
        self.interleaved = config.rope_interleaved
        self.score_scale = config.score_scale
        if self.qk_norm:
            is_full = self.qk_norm == "full"
            heads = (config.n_heads, config.n_kv_heads) if is_full else (1, 1)
            self.q_norm, self.k_norm = (
                RMSNorm(num * config.head_dim, config.norm_eps, config.norm_offset) for num in heads
            )
        if config.sinks:
            self.sinks = nn.Parameter(torch.zeros(config.n_heads))

    def normalize(self, qk: Tensor) -> Tensor:
        """RMSNorm of q and k (B, H + G, T, E): of each head, or of all heads as one vector."""
        normed = []
        for x, norm in zip(qk.split(self.heads(), dim=1), (self.q_norm, self.k_norm)):
            if self.qk_norm == "full":
                x = x.transpose(1, 2)  # (B, T, heads, E)
                y = norm(x.flatten(2)).view(x.shape).transpose(1, 2)
            else:
                y = norm(x)
            normed.append(y)
        return torch.cat(normed, dim=1)

    def queries_keys(self, qk: Tensor, rope: tuple | None) -> tuple[Tensor, ...]:
        if self.qk_norm in ("heads", "full"):
            qk = self.normalize(qk)
        if rope is not None:
            qk = apply_rope_partly(qk, *rope[:2], self.interleaved)
        if self.qk_norm == "rotated":
            qk = self.normalize(qk)
        q, k = qk.split(self.heads(), dim=1)
        q = scaled(q, self.score_scale)
        if rope is not None and len(rope) > 2:  # the queries' scale
            q = (q * rope[2]).to(q.dtype)
        return q, k


# ----------------------------------------------------------------------- feed-forward and experts


class FamilyFeedForward(FeedForward):
    """gpt-oss clamps gate and up and adds 1 to up; Gemma has GELU in place of SiLU."""

    def __init__(self, config: Config, dim: int, bias: bool):
        super().__init__(config, dim, bias)
        self.limit = config.gate_limit
        self.alpha = config.gate_alpha
        self.activation = gelu if config.gelu else silu

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """(..., F), (..., F) -> (..., F)"""
        if self.limit is None:
            return self.activation(gate) * up
        gate = gate.clamp(max=self.limit)
        up = up.clamp(-self.limit, self.limit)
        activated = gate * sigmoid(self.alpha * gate)
        return activated.to(gate.dtype) * (up + 1)


class Experts(nn.ModuleList):
    """The experts of a layer. Each token takes the top k of the router's scores, and weights their
    outputs by them (Shazeer et al., arXiv:1701.06538). A selection bias, which balances the
    experts' load in training, changes the choice and not the weights (DeepSeek-V3,
    arXiv:2412.19437 eq. 16)."""

    def __init__(self, config: Config):
        dim = config.expert_dim
        bias = config.expert_bias
        super().__init__(FamilyFeedForward(config, dim, bias) for _ in range(config.n_experts))
        self.config = config
        self.selection_bias = None
        if config.selection_bias:
            self.selection_bias = nn.Parameter(torch.zeros(config.n_experts))

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits (N, experts) -> ids of the top k experts (N, k), of equal ones the first, and
        their float32 weights (N, k): their scores, divided by their sum or not."""
        config = self.config
        logits = logits.float()
        scores = sigmoid(logits) if config.router_sigmoid else logits.softmax(1)
        ranking = logits
        if self.selection_bias is not None:
            ranking = scores + self.selection_bias
        order = ranking.sort(dim=1, descending=True, stable=True).indices
        top_experts = order[:, : config.experts_per_token]
        weights = scores.gather(1, top_experts)
        if config.router_norm:
            weights = weights / weights.sum(1, keepdim=True)
        return top_experts, scaled(weights, config.routed_scale)

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        """x (N, D), logits (N, experts) -> (N, D). Each expert runs once, on the rows that chose
        it. A row's sum runs in the experts' order, so it does not depend on other rows.

        Whoever compiles packs the experts first (weights/experts.py): these lines read the router's
        choice on the host."""
        top_experts, weights = self.route(logits)
        y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        if len(x) == 1:
            for id, weight in sorted(zip(top_experts[0].tolist(), weights[0])):
                y += self[id](x).float() * weight
            return y.to(x.dtype)
        for id in top_experts.unique().tolist():
            row, choice = (top_experts == id).nonzero(as_tuple=True)
            weight = weights[row, choice, None]
            y.index_add_(0, row, self[id](x[row]) * weight)
        return y.to(x.dtype)


class SparseMoE(nn.Module):
    """The feed-forward of a sparse layer. A shared expert is one that every token takes; Qwen2-MoE
    multiplies it by a sigmoid gate, whose weights are one more row of the router. The router may be
    float32 in a 16-bit model: scores can be close, and rounding them would change the choice."""

    def __init__(self, config: Config):
        super().__init__()
        self.n_experts = config.n_experts
        self.top_k = config.experts_per_token
        num_scores = config.n_experts + config.shared_gate
        self.router = Linear(config.dim, num_scores, bias=config.router_bias)
        self.experts = Experts(config)
        self.shared = None
        if config.shared_dim:
            self.shared = FamilyFeedForward(config, config.shared_dim, False)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)  # (B, T, D) -> (N, D)
        scores = self.router(flat.to(self.router.weight.dtype))
        logits, gate = scores.tensor_split((self.n_experts,), dim=1)  # (N, experts), (N, 1 or 0)
        y = self.experts(flat, logits)
        if self.shared is not None:
            shared = self.shared(flat)
            if gate.size(1):
                shared = sigmoid(gate) * shared
            y = y + shared.to(y.dtype)
        return y.view(x.shape)


class FamilyBlock(Block):
    """A block with norms before or after attention and feed-forward, a scale, and maybe experts."""

    def __init__(self, config: Config, sparse: bool = False):
        nn.Module.__init__(self)
        self.scale = config.residual_scale

        def norm(is_present: bool) -> nn.Module:
            if not is_present:
                return nn.Identity()
            return RMSNorm(config.dim, config.norm_eps, config.norm_offset)

        self.attention_norm = norm(config.norms_before)
        self.attention = FamilyAttention(config)
        self.attention_after = norm(config.norms_after)
        self.ffn_norm = norm(config.norms_before)
        if sparse:
            self.ffn = SparseMoE(config)
        else:
            self.ffn = FamilyFeedForward(config, config.ffn_dim, config.ffn_bias)
        self.ffn_after = norm(config.norms_after)

    @compiler.nested_compile_region
    def forward(
        self,
        x: Tensor,
        pos: Tensor,
        rope: tuple | None,
        visible: AttentionMask,
        cache: KVCache | None,
    ) -> Tensor:
        y = self.attention(self.attention_norm(x), pos, rope, visible, cache)
        x = x + scaled(self.attention_after(y), self.scale)
        y = self.ffn(self.ffn_norm(x))
        return x + scaled(self.ffn_after(y), self.scale)


# ---------------------------------------------------------------------------------- small modules


class Unfilled:
    """A module that has no initial values on the meta device."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


class Embedding(Unfilled, nn.Embedding):
    """Rows of a table."""


class Linear(Unfilled, nn.Linear):
    """y = x W^T + b"""

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return F.linear(x, self.weight)
        # Flatten to two dimensions: torch 2.13 specialises a biased 3-D product on the T that it
        # was traced with.
        y = F.linear(x.flatten(0, -2), self.weight, self.bias)
        return y.unflatten(0, x.shape[:-1])

    def halves(self, x: Tensor) -> tuple[Tensor, ...]:
        """(..., in) -> the two halves of (..., out)."""
        return self(x).chunk(2, dim=-1)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x) in float32. An element's bits do not depend on its place in the tensor.
    torch.sigmoid rounds differently in vector lanes and in the remainder."""
    return 1 / (1 + (-x.float()).exp())


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x). F.silu rounds float32 by an element's place, as torch.sigmoid does."""
    return x * sigmoid(x) if x.dtype == torch.float32 else F.silu(x)


def gelu(x: Tensor) -> Tensor:
    """GELU by its tanh approximation, Hendrycks and Gimpel, arXiv:1606.08415 sec. 2: as tanh(u) is
    2 sigmoid(2 u) - 1, it is x * sigmoid(sqrt(8 / pi) * (x + 0.044715 x^3)), in float32."""
    wide = x.float()
    gate = sigmoid(math.sqrt(8 / math.pi) * (wide + 0.044715 * wide * wide * wide))
    return (wide * gate).to(x.dtype)


def scaled(x: Tensor, scale: float) -> Tensor:
    return x if scale == 1 else x * scale


def row_view(module: nn.Module, begin: int, end: int) -> nn.Module:
    """The module for rows [begin, end) of a batch: a shallow copy whose buffers are views of these
    rows. Scalars and the buffers named in `shared` stay those of all rows."""
    shared = getattr(module, "shared", ())
    view = copy.copy(module)
    view._buffers = dict(module._buffers)
    for name, x in module.named_buffers(recurse=False):
        if name not in shared and x.dim() > 0:
            view._buffers[name] = x[begin:end]
    return view
