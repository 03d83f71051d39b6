"""The Llama-architecture decoder: KV cache, attention, block, Transformer.

    KVCache, Caches         static, position-indexed keys and values; how far attention runs over them
    Attention, Block, Transformer

A forward pass depends on its arguments alone: `model(tokens, pos, caches)`. This file does not know sampling,
quantization, ranks, compilation, checkpoints or text. It sees token ids, their absolute positions, and weights that
someone else filled in. Its numbers stand in config.py, rotary positions in rope.py, norms, feed-forwards and
their experts in feedforward.py.

Dimension letters, here and everywhere: B batch, T query length, S cache length, D model dim, H query heads,
G KV heads, R = H / G query heads per KV head, E head dim, F ffn dim, V vocabulary, K draft length.
"""

import copy
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, compiler, nn

from config import Config
from feedforward import Embedding, Experts, FeedForward, Linear, RMSNorm, sigmoid
from rope import Rope, apply_rope, rope_frequencies  # noqa: F401
from rounding import KEY_BLOCK

KERNEL_WITH_SUMS = "cpu"  # the device whose kernel says what its softmax divided by


# ------------------------------------------------------------------------------------------- Attention


def attention_mask(pos: Tensor, key_pos: Tensor, window: int | None) -> Tensor:
    """What may be attended: pos (B, T), key_pos (S,) or (B, S) -> bool (B, 1, T, S).

    A query sees keys at its own position and before, at most `window` of them counting itself. A negative key
    position stands for no key at all.
    """
    key = key_pos.view(-1, 1, 1, key_pos.size(-1))  # (B or 1, 1, 1, S)
    distance = pos[:, None, :, None] - key  # (B, 1, T, S)
    return distance >= 0 if window is None else (distance >= 0) & (distance < window) & (key >= 0)


class Keys(NamedTuple):
    """Which cached keys the queries of one call look at, the same for every layer with the same window."""

    mask: Tensor  # (B, 1, T, S) bool; as layers take it, (B, 1, rows, S) to add to scores
    index: Tensor | None  # (B, S) positions to gather, or None: the first S

    def as_bias(self, R: int, rows: int, dtype: torch.dtype) -> "Keys":
        """The mask as 0 and -inf, made once a call, where every layer would make it, for R * T query rows, padded to a
        multiple of `rows`."""
        bias = torch.zeros((), dtype=dtype, device=self.mask.device).where(self.mask, -math.inf)  # (B, 1, T, S)
        bias = bias.repeat(1, 1, R, 1)  # (B, 1, R*T, S)
        extra = -bias.size(2) % rows
        return self._replace(mask=F.pad(bias, (0, 0, 0, extra)) if extra else bias)


def visible_keys(pos: Tensor, key_pos: Tensor, window: int | None, cached: bool) -> Keys:
    """pos (B, T), consecutive within a row; key_pos (S,) of the filled cache, or (B, T) without one.

    Once more is filled than a window spans, only the window is gathered, so that its cost stops growing: from where a
    block of keys begins, so that passes over different positions add up the same blocks.
    """
    T, S = pos.size(1), key_pos.size(-1)
    n = math.ceil((window + T + KEY_BLOCK - 2) / KEY_BLOCK) * KEY_BLOCK if cached and window else S
    if n >= S:
        return Keys(attention_mask(pos, key_pos, window), None)
    begin = (pos[:, :1] - (window - 1)).clamp(min=0) // KEY_BLOCK * KEY_BLOCK  # (B, 1)
    key_pos = begin + torch.arange(n, device=pos.device)  # (B, n), beyond the cache where a row is full
    return Keys(attention_mask(pos, key_pos, window), key_pos.clamp(max=S - 1))


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Softmax attention in float32. q (B, H, T, E), k and v (B, G, S, E), bias (B, 1, rows, S) -> (B, H, T, E).

    The R query heads that share a KV head become rows of one product, so K and V are read once, never repeated. Rows of
    zeros are added where the bias has more than R * T. sinks (H,): a score of each head that takes its part of the
    softmax and brings no value.
    """
    B, H, T, E = q.shape
    G = k.size(1)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))  # a CPU's kernel reads rows of E numbers
    q = q.reshape(B, G, H // G * T, E)  # (B, H, T, E) -> (B, G, R*T, E)
    q = F.pad(q, (0, 0, 0, bias.size(2) - q.size(2))) if bias.size(2) > q.size(2) else q  # (B, G, rows, E)
    if sinks is None:
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return y[:, :, : H // G * T].reshape(B, H, T, E)
    y, total = attend_with_sums(q, k, v, bias)
    y, total = (x[:, :, : H // G * T].reshape(B, H, T, -1) for x in (y, total))
    return (y * sigmoid(total - sinks.float()[:, None, None])).to(q.dtype)  # e^total / (e^total + e^sink)


def attend_with_sums(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Attention (B, G, rows, E), and the logarithms of the sums that its softmax divides by (B, G, rows) float32."""
    if q.device.type == KERNEL_WITH_SUMS:  # the kernel behind scaled_dot_product_attention, which tells no sums
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias)
    scores = (q @ k.mT).float() / math.sqrt(q.size(-1)) + bias  # (B, G, rows, S)
    return scores.softmax(-1).to(v.dtype) @ v, scores.logsumexp(-1)


def attend_beside_sinks(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """`attend` with sinks of 0: what shows how its kernels round."""
    return attend(q, k, v, bias, q.new_zeros(q.size(1)))


class KVCache(nn.Module):
    """Keys and values of one layer at fixed addresses, indexed by absolute position.

    Nothing is ever removed: what stands at or beyond the next position is masked, then overwritten. Zeros, not
    uninitialised memory, because a masked NaN still makes 0 * NaN = NaN.
    """

    def __init__(self, B: int, G: int, S: int, E: int, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.register_buffer("k", torch.zeros(B, G, S, E, dtype=dtype, device=device), persistent=False)
        self.register_buffer("v", torch.zeros(B, G, S, E, dtype=dtype, device=device), persistent=False)

    @staticmethod
    def position_bytes(G: int, E: int, dtype: torch.dtype) -> int:
        """Of one layer."""
        return 2 * G * E * dtype.itemsize

    @classmethod
    def kernel(cls, sinks: bool, E: int, like: Tensor) -> Callable:
        """The function that attends, as `attend` does, for a model of heads of E channels, of this device and type."""
        return attend_beside_sinks if sinks else attend

    def update(self, k: Tensor, v: Tensor, pos: Tensor) -> None:
        """Write k and v (B, G, T, E) at pos (B, T)."""
        if pos.size(0) == self.k.size(0) == 1:  # a third of the time that indexing by two tensors takes
            self.k.index_copy_(2, pos[0], k), self.v.index_copy_(2, pos[0], v)
            return
        row = torch.arange(pos.size(0), device=pos.device)[:, None]  # (B, 1)
        self.k[row, :, pos] = k.transpose(1, 2)  # (B, G, T, E) -> (B, T, G, E)
        self.v[row, :, pos] = v.transpose(1, 2)

    def attend(self, q: Tensor, keys: Keys, sinks: Tensor | None = None) -> Tensor:
        """q (B, H, T, E) over the positions in `keys` -> (B, H, T, E). B may be smaller than the cache's."""
        k, v = self.read(q.size(0), keys)
        return attend(q, k, v, keys.mask, sinks)

    def read(self, B: int, keys: Keys) -> tuple[Tensor, Tensor]:
        """Keys and values (B, G, S, E) of the first B rows."""
        if keys.index is None:
            return tuple(x[:B, :, : keys.mask.size(-1)] for x in (self.k, self.v))
        row = torch.arange(B, device=self.k.device)[:, None]  # (B, 1)
        return tuple(x[row, :, keys.index].transpose(1, 2) for x in (self.k, self.v))  # (B, S, G, E) -> (B, G, S, E)

    def at(self, rows: int | slice | list[int], begin: int, end: int) -> dict[str, Tensor]:
        """What positions [begin, end) of these rows left behind, by name: views, but copies where rows are listed."""
        return {name: x[rows, :, begin:end] for name, x in self.named_buffers()}


def row_view(module: nn.Module, begin: int, end: int) -> nn.Module:
    """The module for rows [begin, end) of a batch alone: a shallow copy whose buffers are views of these rows. Scalars
    and the buffers that `shared` names are those of all rows."""
    view = copy.copy(module)
    shared = getattr(module, "shared", ())
    view._buffers = {
        name: x if name in shared or x is None or x.dim() == 0 else x[begin:end] for name, x in module._buffers.items()
    }
    return view


class Caches(NamedTuple):
    """A KVCache for every layer, and the positions that attention runs over: their number is what attention costs."""

    layers: tuple[KVCache, ...]
    key_pos: Tensor  # (S,) 0, 1, 2, …
    rows: int = 1  # attention takes a multiple of so many query rows
    taps: dict[int, nn.Module] | None = None  # layer -> what is told, by `update(x, pos)`, what enters that layer
    ends: Tensor | None = None  # (B or more,) the last position that a row may come to have

    def upto(self, length: int) -> "Caches":
        """The same, for calls that query no position >= `length`: a tensor's length, which a trace can leave open."""
        return self._replace(key_pos=self.key_pos[:length])

    def row_view(self, begin: int, end: int) -> "Caches":
        """The same for rows [begin, end) alone."""
        layers = tuple(row_view(layer, begin, end) for layer in self.layers)
        taps = self.taps and {number: row_view(tap, begin, end) for number, tap in self.taps.items()}
        return self._replace(layers=layers, taps=taps, ends=self.ends[begin:end])


# --------------------------------------------------------------------------------------------- modules


def scaled(x: Tensor, scale: float) -> Tensor:
    return x if scale == 1 else x * scale


class Attention(nn.Module):
    """Grouped-query attention. Head counts are read off the Linears, so a rank that holds a slice just works."""

    def __init__(self, config: Config):
        super().__init__()
        self.head_dim = config.head_dim
        heads, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        self.qkv = Linear(config.dim, heads + 2 * kv, bias=config.qkv_bias)
        self.out = Linear(heads, config.dim, bias=config.out_bias)
        self.norms, self.interleaved = config.qk_norm, config.rope_interleaved
        q_dim, k_dim = (heads, kv) if self.norms == "whole" else (config.head_dim, config.head_dim)
        self.q_norm = RMSNorm(q_dim, config.norm_eps) if self.norms else None
        self.k_norm = RMSNorm(k_dim, config.norm_eps) if self.norms else None
        self.register_parameter("sinks", nn.Parameter(torch.zeros(config.n_heads)) if config.sinks else None)

    def heads(self) -> tuple[int, int]:
        """(H, G) on this rank."""
        H = self.out.in_features // self.head_dim
        return H, (self.qkv.out_features // self.head_dim - H) // 2

    def normed(self, qk: Tensor, H: int) -> Tensor:  # (B, H + G, T, E)
        return torch.cat((self.q_norm(qk[:, :H]), self.k_norm(qk[:, H:])), dim=1)

    def forward(self, x: Tensor, pos: Tensor, rope: tuple | None, keys: Keys, cache: KVCache | None) -> Tensor:
        B, T, _ = x.shape
        H, G = self.heads()
        qkv = self.qkv(x)  # (B, T, (H + 2G)*E)
        if self.norms == "whole":
            q, k, v = qkv.split([n * self.head_dim for n in (H, G, G)], dim=-1)
            qkv = torch.cat((self.q_norm(q), self.k_norm(k), v), dim=-1)
        qkv = qkv.view(B, T, H + 2 * G, self.head_dim).transpose(1, 2)  # (B, H + 2G, T, E)
        qk, v = qkv.split((H + G, G), dim=1)
        qk = self.normed(qk, H) if self.norms == "heads" else qk
        cos, sin, *growth = rope or (None, None)
        # Rotate q and k together: small models are bound by the number of operations.
        qk = qk if cos is None else apply_rope(qk, cos, sin, self.interleaved)
        qk = self.normed(qk, H) if self.norms == "rotated" else qk
        q, k = qk.split((H, G), dim=1)  # (B, H, T, E), (B, G, T, E)
        q = (q * growth[0]).to(q.dtype) if growth else q
        if cache is None:
            y = attend(q, k, v, keys.mask, self.sinks)
        else:
            cache.update(k, v, pos)
            y = cache.attend(q, keys, self.sinks)
        return self.out(y.transpose(1, 2).reshape(B, T, -1))  # (B, H, T, E) -> (B, T, H*E) -> (B, T, D)


class Block(nn.Module):
    def __init__(self, config: Config, sparse: bool = False):
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn = Experts(config) if sparse else FeedForward(config, config.ffn_dim, config.ffn_bias)
        self.norms_after, self.scale = config.norms_after, config.residual_scale

    @compiler.nested_compile_region  # whoever compiles a model compiles one block for all layers; eagerly a plain call
    def forward(self, x: Tensor, pos: Tensor, rope: tuple | None, keys: Keys, cache: KVCache | None) -> Tensor:
        if self.norms_after:
            x = x + self.attention_norm(self.attention(x, pos, rope, keys, cache))
            return x + self.ffn_norm(self.ffn(x))
        x = x + scaled(self.attention(self.attention_norm(x), pos, rope, keys, cache), self.scale)
        return x + scaled(self.ffn(self.ffn_norm(x)), self.scale)


# ----------------------------------------------------------------------------------------- Transformer


class Transformer(nn.Module):
    """tokens and their positions in, logits out.

    Without caches a call attends over its own tokens (training, scoring). With them it also attends over everything
    written at earlier positions (decoding).
    """

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.windows = config.windows or (None,) * config.n_layers
        self.turns = config.turns or (0,) * config.n_layers
        self.embed = Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config, sparse) for sparse in config.sparse or (False,) * config.n_layers)
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.lm_head = Linear(config.dim, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed.weight
        self.rope = Rope(config)

    def make_caches(self, batch_size: int, max_seq_length: int, kind: type[KVCache] = KVCache) -> Caches:
        """Empty caches of (batch_size, G, max_seq_length, E) a layer in the norms' dtype, or as their kind holds it.
        Any number of them may be in use at once."""
        weight, E = self.norm.weight, self.config.head_dim
        with torch.inference_mode(False):  # plain tensors, which any later code may write to
            layers = [
                kind(batch_size, layer.attention.heads()[1], max_seq_length, E, weight.dtype, weight.device)
                for layer in self.layers
            ]
            ends = torch.full((batch_size,), max_seq_length - 1, device=weight.device)
            return Caches(tuple(layers), torch.arange(max_seq_length, device=weight.device), ends=ends)

    def keys(self, pos: Tensor, caches: Caches | None, dtype: torch.dtype) -> dict[int | None, Keys]:
        """What queries at pos (B, T) see, for each window that some layer has."""
        H, G = self.layers[0].attention.heads()
        key_pos, rows = (pos, 1) if caches is None else (caches.key_pos, caches.rows)
        return {
            window: visible_keys(pos, key_pos, window, caches is not None).as_bias(H // G, rows, dtype)
            for window in set(self.windows)
        }

    def hidden(self, tokens: Tensor, pos: Tensor, caches: Caches | None = None) -> Tensor:
        """tokens (B, T) int, pos (T,) or (B, T) int, consecutive within a row -> normed hidden states (B, T, D)."""
        pos = pos.expand(tokens.shape)  # (B, T)
        ropes = self.rope.kinds(pos, None if caches is None else caches.ends)
        x = scaled(self.embed(tokens), self.config.embed_scale)  # (B, T, D)
        keys = self.keys(pos, caches, x.dtype)
        cached, taps = ([None] * len(self.layers), None) if caches is None else (caches.layers, caches.taps)
        each = zip(self.layers, self.windows, self.turns, cached, strict=True)
        for number, (layer, window, turn, cache) in enumerate(each):
            if taps and number in taps:
                taps[number].update(x, pos)
            x = layer(x, pos, ropes[turn], keys[window], cache)
        return self.norm(x)

    def head(self, h: Tensor) -> Tensor:
        """h (..., D) -> logits (..., V) float32."""
        return scaled(self.lm_head(h).float(), self.config.logit_scale)

    def forward(self, tokens: Tensor, pos: Tensor, caches: Caches | None = None) -> Tensor:
        """Logits (B, T, V) float32 for the token after each position."""
        return self.head(self.hidden(tokens, pos, caches))
