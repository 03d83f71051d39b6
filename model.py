"""The Llama-architecture decoder, read from top to bottom: the whole arithmetic and nothing else.

    Config                          every number that the arithmetic depends on
    Embedding, Linear, RMSNorm      the small modules
    rope_frequencies, Rope          rotary positions
    AttentionMask, attend           attention with grouped heads
    KVCache, Caches                 static keys and values, indexed by position
    Attention, FeedForward, Experts, Block, Transformer

A forward pass depends on its arguments alone: `model(tokens, pos, caches)`. This file does not know sampling,
quantization, ranks, compilation, files or text.

Dimension letters, here and everywhere: B batch, T query length, S cache length, D model dim, H query heads,
G KV heads, R = H / G query heads per KV head, E head dim, F ffn dim, V vocabulary, K draft length.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, compiler, nn

KEY_BLOCK = 512  # keys that a CPU's attention kernel adds up at once (torch 2.11 to 2.13)
LOGSUMEXP_DEVICE = "cpu"  # only its attention kernel also returns the log-sum-exp


@dataclass(frozen=True)
class Config:
    """Every number that the arithmetic depends on. loading.config_from_hf makes one from a config.json."""

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
    gate_limit: float | None = None  # bound of a feed-forward's gate and up
    gate_alpha: float = 1.0  # of a bounded gate: gate * sigmoid(gate_alpha * gate)
    qk_norm: str | None = None  # RMSNorm of q and k: of "heads", of "rotated" heads, of all heads as one "full" vector
    norms_after: bool = False  # norms follow attention and feed-forward instead of preceding them
    embed_scale: float = 1.0  # factor of embeddings
    residual_scale: float = 1.0  # factor of the outputs of attention and feed-forward
    score_scale: float = 1.0  # of q k / sqrt(E)
    logit_scale: float = 1.0
    sinks: bool = False  # a learned score of each head in the softmax, without a value
    sparse: tuple[bool, ...] = ()  # per layer: experts in place of one feed-forward? (): in no layer
    n_experts: int = 0
    n_chosen: int = 0  # experts per token
    expert_dim: int = 0  # F of an expert
    expert_bias: bool = False
    router_bias: bool = False
    router_norm: bool = True  # do the weights of the chosen experts sum to 1?
    shared_dim: int = 0  # F of the expert that every token takes; 0: none
    windows: tuple[int | None, ...] = ()  # per layer: tokens attended, itself included; None is all of them
    rope_theta: float = 10000.0
    rope_types: tuple[int | None, ...] = ()  # per layer: 0 as below, 1 with rope_local_theta, None: no rotation; (): 0
    rope_local_theta: float = 10000.0  # of layers with rope type 1: sliding windows
    rope_dim: int = 0  # rotated leading dimensions of a head; 0: all
    rope_interleaved: bool = False  # pairs are (x[2 i], x[2 i + 1])
    rope_type: str = "default"
    rope_factor: float = 1.0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_length: int = 0  # llama3, yarn, longrope: the context before it was stretched
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    rope_truncate: bool = True
    rope_attention_factor: float = 1.0  # multiplies cos and sin
    rope_short: tuple[float, ...] = ()  # longrope: divisor of each frequency, in texts of up to the original length
    rope_long: tuple[float, ...] = ()  # longrope: the same in longer texts
    query_scale: float = 0.0  # scales queries by 1 + query_scale * log(1 + position // original length)
    dtype: str | None = None  # of the checkpoint's weights; no part of the arithmetic
    family: str = field(default="llama", compare=False)  # names the checkpoint's tensors; no part of the arithmetic


# ------------------------------------------------------------------------------------ small modules


class Embedding(nn.Embedding):
    """Rows of a table; on the meta device without initial values."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


class Linear(nn.Linear):
    """y = x W^T + b; on the meta device without initial values."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return F.linear(x, self.weight)
        # Flatten to two dimensions: torch 2.13 specialises a biased 3-D product on the T that it was traced with.
        return F.linear(x.flatten(0, -2), self.weight, self.bias).unflatten(0, x.shape[:-1])


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x) in float32. An element's bits do not depend on its place in the tensor. torch.sigmoid rounds
    differently in vector lanes and in the remainder."""
    return 1 / (1 + (-x.float()).exp())


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in x's dtype; `F.rms_norm` accumulates 16-bit input in float32."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # Autocast hands 16-bit x to a float32 weight; torch fuses only equal dtypes, and warns of others.
        return F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps).to(x.dtype)


def scaled(x: Tensor, scale: float) -> Tensor:
    return x if scale == 1 else x * scale


# --------------------------------------------------------------------------------------------- RoPE


def rope_frequencies(config: Config, stretch: tuple[float, ...] = ()) -> Tensor:
    """Inverse frequencies (rotated dimensions / 2,) float32, scaled by `config.rope_type`. `stretch` holds
    longrope's divisors, by default those of short texts.

    Sources: RoFormer arXiv:2104.09864 eq. 15; linear interpolation arXiv:2306.15595; llama3 the published
    Llama 3.1 reference; yarn arXiv:2309.00071 §3.2 (NTK-by-parts); longrope arXiv:2402.13753 §3.
    """
    rope_dim, theta, factor = config.rope_dim or config.head_dim, config.rope_theta, config.rope_factor
    inv_freq = 1.0 / theta ** (torch.arange(0, rope_dim, 2, dtype=torch.float32, device="cpu") / rope_dim)
    if config.rope_type == "longrope":
        return inv_freq / torch.tensor(stretch or config.rope_short, dtype=torch.float32, device="cpu")
    if config.rope_type == "linear":
        return inv_freq / factor
    if config.rope_type == "llama3":
        num_circles = config.rope_original_length * inv_freq / (2 * math.pi)  # of each pair, in the original context
        low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
        fast = ((num_circles - low) / (high - low)).clamp(0, 1)  # 1: a fast pair stays; 0: a slow pair is stretched
        return inv_freq / factor * (1 - fast) + inv_freq * fast
    if config.rope_type == "yarn":

        def pair_of(num_circles: float) -> float:  # the pair that makes so many circles in the original context
            angle = num_circles * 2 * math.pi
            return rope_dim * math.log(config.rope_original_length / angle) / (2 * math.log(theta))

        low, high = pair_of(config.rope_beta_fast), pair_of(config.rope_beta_slow)
        if config.rope_truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rope_dim - 1)
        ramp = (torch.arange(rope_dim // 2, dtype=torch.float32, device="cpu") - low) / ((high - low) or 0.001)
        fast = 1 - ramp.clamp(0, 1)
        return inv_freq / factor * (1 - fast) + inv_freq * fast
    return inv_freq


class Rope(nn.Module):
    """cos and sin of position times frequency, always float32: a 16-bit table loses positions at long context."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.register_buffer("inv_freq", rope_frequencies(config), persistent=False)  # (rotated dimensions / 2,)
        long_inv_freq = rope_frequencies(config, config.rope_long) if config.rope_long else None
        self.register_buffer("long_inv_freq", long_inv_freq, persistent=False)  # replaces inv_freq in long texts
        overrides = {"rope_type": "default", "rope_theta": config.rope_local_theta, "rope_attention_factor": 1.0}
        self.local_rope = Rope(replace(config, rope_types=(), **overrides)) if 1 in config.rope_types else None

    def _apply(self, fn, recurse: bool = True):
        super()._apply(fn, recurse)  # moves the table; it is then made anew, because a cast must not reach it
        self.inv_freq = rope_frequencies(self.config).to(self.inv_freq.device)
        if self.long_inv_freq is not None:
            self.long_inv_freq = rope_frequencies(self.config, self.config.rope_long).to(self.inv_freq.device)
        return self

    def by_type(self, pos: Tensor, max_positions: Tensor | None = None) -> dict[int | None, tuple | None]:
        """Rope type, as in Config.rope_types -> the result of `forward`, or None."""
        rope_by_type = {None: None, 0: self(pos, max_positions)}
        return rope_by_type if self.local_rope is None else rope_by_type | {1: self.local_rope(pos)}

    def forward(self, pos: Tensor, max_positions: Tensor | None = None) -> tuple[Tensor, ...]:
        """pos (B, T) int -> cos, sin (B, 1, T, n) float32 of n pairs, and the queries' scale (B, 1, T, 1) where the
        config has one. max_positions (B or more,): each row's final position, by default its last in pos. It decides
        whether longrope takes the row for a long text."""
        config, inv_freq = self.config, self.inv_freq
        if self.long_inv_freq is not None:
            max_positions = pos.amax(1) if max_positions is None else max_positions[: len(pos)]  # (B,)
            is_long = (max_positions >= config.rope_original_length)[:, None, None, None]
            inv_freq = torch.where(is_long, self.long_inv_freq, inv_freq)  # (B, 1, 1, n)
        angle = pos[:, None, :, None].float() * inv_freq  # (B, 1, T, n)
        scale = config.rope_attention_factor * math.sqrt(config.score_scale)  # of q and k: q k^T has its square
        cos, sin = angle.cos() * scale, angle.sin() * scale
        if not config.query_scale:
            return cos, sin
        query_scale = 1 + config.query_scale * (1 + pos // config.rope_original_length).log()  # (B, T)
        return cos, sin, query_scale[:, None, :, None]


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the leading n pairs of x (B, heads, T, E). Pair i is (x[i], x[i + n]), or interleaved (x[2i], x[2i + 1]).
    cos and sin (B, 1, T, n)."""
    n, E = cos.size(-1), x.size(-1)
    rotated, rest = (x, None) if 2 * n == E else x.split((2 * n, E - 2 * n), dim=-1)
    if interleaved:
        a, b = rotated.float().unflatten(-1, (-1, 2)).unbind(-1)  # each (B, heads, T, n)
        rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2).to(x.dtype)
    else:
        a, b = rotated.float().chunk(2, dim=-1)  # each (B, heads, T, n)
        rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
    return rotated if rest is None else torch.cat((rotated, rest), dim=-1)


# ---------------------------------------------------------------------------------------- attention


def attention_mask(pos: Tensor, key_pos: Tensor, window: int | None) -> Tensor:
    """True where a query may see a key: pos (B, T), key_pos (S,) or (B, S) -> bool (B, 1, T, S).

    A query sees the keys up to its position; with a window, the last `window` of them.
    """
    distance = pos[:, None, :, None] - key_pos.view(-1, 1, 1, key_pos.size(-1))  # (B, 1, T, S)
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


class AttentionMask(NamedTuple):
    """The cached keys that the queries of one call see; shared by all layers with the same window."""

    mask: Tensor  # (B, 1, T, S) bool; after `as_bias` (B, 1, rows, S), added to scores
    index: Tensor | None  # (B, S) positions to gather, or None: the first S

    def as_bias(self, R: int, row_multiple: int, dtype: torch.dtype) -> "AttentionMask":
        """The mask as 0 and -inf for R * T query rows, padded to a multiple of `row_multiple`."""
        bias = torch.zeros((), dtype=dtype, device=self.mask.device).where(self.mask, -math.inf)  # (B, 1, T, S)
        bias = bias.repeat(1, 1, R, 1)  # (B, 1, R*T, S)
        num_padding = -bias.size(2) % row_multiple
        return self._replace(mask=F.pad(bias, (0, 0, 0, num_padding)) if num_padding else bias)


def visible_keys(pos: Tensor, key_pos: Tensor, window: int | None, cached: bool) -> AttentionMask:
    """The keys that queries at pos (B, T), consecutive within a row, see. key_pos (S,) of a cache, or (B, T) without.

    Past the window, gather only its keys, from a KEY_BLOCK boundary on. The cost then stays constant, and passes over
    different positions add up the same blocks.
    """
    T, S = pos.size(1), key_pos.size(-1)
    num_keys = math.ceil((window + T + KEY_BLOCK - 2) / KEY_BLOCK) * KEY_BLOCK if cached and window else S
    if num_keys >= S:
        return AttentionMask(attention_mask(pos, key_pos, window), None)
    begin = (pos[:, :1] - (window - 1)).clamp(min=0) // KEY_BLOCK * KEY_BLOCK  # (B, 1)
    key_pos = begin + torch.arange(num_keys, device=pos.device)  # (B, num_keys); beyond the cache if a row is full
    return AttentionMask(attention_mask(pos, key_pos, window), key_pos.clamp(max=S - 1))


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Softmax attention in float32. q (B, H, T, E), k and v (B, G, S, E), bias (B, 1, rows, S) -> (B, H, T, E).

    The R query heads that share a KV head become rows of one product, so K and V are read once. Zero rows pad the
    queries to the bias's rows. sinks (H,): a score of each head that takes part in the softmax without a value.
    """
    B, H, T, E = q.shape
    G = k.size(1)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))  # a CPU kernel reads rows of E numbers
    q = q.reshape(B, G, H // G * T, E)  # (B, H, T, E) -> (B, G, R*T, E)
    q = F.pad(q, (0, 0, 0, bias.size(2) - q.size(2))) if bias.size(2) > q.size(2) else q  # (B, G, rows, E)
    if sinks is None:
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return y[:, :, : H // G * T].reshape(B, H, T, E)
    y, logsumexp = attend_with_logsumexp(q, k, v, bias)
    y, logsumexp = (x[:, :, : H // G * T].reshape(B, H, T, -1) for x in (y, logsumexp))
    return (y * sigmoid(logsumexp - sinks.float()[:, None, None])).to(q.dtype)  # sum / (sum + e^sink)


def attend_with_logsumexp(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Attention (B, G, rows, E), and the log-sum-exp of its scores (B, G, rows) float32."""
    if q.device.type == LOGSUMEXP_DEVICE:  # the kernel behind scaled_dot_product_attention
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias)
    scores = (q @ k.mT).float() / math.sqrt(q.size(-1)) + bias  # (B, G, rows, S)
    return scores.softmax(-1).to(v.dtype) @ v, scores.logsumexp(-1)


def attend_with_zero_sinks(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """`attend` with zero sinks, for the probe of how kernels round."""
    return attend(q, k, v, bias, q.new_zeros(q.size(1)))


# ----------------------------------------------------------------------------------------- KV cache


class KVCache(nn.Module):
    """Keys and values of one layer at fixed addresses, indexed by absolute position.

    Nothing is removed: positions after a row's last token are masked, and later overwritten. The cache starts as zeros,
    because a masked NaN still makes 0 * NaN = NaN.
    """

    def __init__(self, B: int, G: int, S: int, E: int, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.register_buffer("k", torch.zeros(B, G, S, E, dtype=dtype, device=device), persistent=False)
        self.register_buffer("v", torch.zeros(B, G, S, E, dtype=dtype, device=device), persistent=False)

    @staticmethod
    def position_bytes(G: int, E: int, dtype: torch.dtype) -> int:
        """Bytes of one position in one layer."""
        return 2 * G * E * dtype.itemsize

    @classmethod
    def kernel(cls, sinks: bool, E: int, like: Tensor) -> Callable:
        """The function that attends, with `attend`'s signature, for heads of E channels like the tensor `like`."""
        return attend_with_zero_sinks if sinks else attend

    def update(self, k: Tensor, v: Tensor, pos: Tensor) -> None:
        """Write k and v (B, G, T, E) at pos (B, T)."""
        if pos.size(0) == self.k.size(0) == 1:  # a third of the time of indexing by two tensors
            self.k.index_copy_(2, pos[0], k), self.v.index_copy_(2, pos[0], v)
            return
        row = torch.arange(pos.size(0), device=pos.device)[:, None]  # (B, 1)
        self.k[row, :, pos] = k.transpose(1, 2)  # (B, G, T, E) -> (B, T, G, E)
        self.v[row, :, pos] = v.transpose(1, 2)

    def attend(self, q: Tensor, visible: AttentionMask, sinks: Tensor | None = None) -> Tensor:
        """q (B, H, T, E) over the visible positions -> (B, H, T, E). B may be smaller than the cache's."""
        k, v = self.read(q.size(0), visible)
        return attend(q, k, v, visible.mask, sinks)

    def read(self, B: int, visible: AttentionMask) -> tuple[Tensor, Tensor]:
        """Keys and values (B, G, S, E) of the first B rows."""
        if visible.index is None:
            return tuple(x[:B, :, : visible.mask.size(-1)] for x in (self.k, self.v))
        row = torch.arange(B, device=self.k.device)[:, None]  # (B, 1)
        return tuple(x[row, :, visible.index].transpose(1, 2) for x in (self.k, self.v))  # (B, S, G, E) -> (B, G, S, E)

    def at(self, rows: int | slice | list[int], begin: int, end: int) -> dict[str, Tensor]:
        """Positions [begin, end) of these rows by buffer name: views, or copies where rows are a list."""
        return {name: x[rows, :, begin:end] for name, x in self.named_buffers()}


def row_view(module: nn.Module, begin: int, end: int) -> nn.Module:
    """The module for rows [begin, end) of a batch: a shallow copy whose buffers are views of these rows. Scalars and
    the buffers named in `shared` stay those of all rows."""
    view = copy.copy(module)
    shared = getattr(module, "shared", ())
    view._buffers = {
        name: x if name in shared or x is None or x.dim() == 0 else x[begin:end] for name, x in module._buffers.items()
    }
    return view


class Caches(NamedTuple):
    """A KVCache for every layer, and the positions that attention runs over."""

    layers: tuple[KVCache, ...]
    key_pos: Tensor  # (S,) 0, 1, 2, …
    row_multiple: int = 1  # query rows are padded to a multiple of this
    aux_hidden_states: dict[int, nn.Module] | None = None  # layer, or their number -> recorder of what enters it
    max_positions: Tensor | None = None  # (B or more,) each row's final position; longrope needs it

    def slice_to(self, length: int) -> "Caches":
        """For calls that query no position >= `length`. key_pos carries it as a size that a trace can leave dynamic."""
        return self._replace(key_pos=self.key_pos[:length])

    def row_view(self, begin: int, end: int) -> "Caches":
        """The caches of rows [begin, end)."""
        layers = tuple(row_view(layer, begin, end) for layer in self.layers)
        aux = self.aux_hidden_states and {i: row_view(x, begin, end) for i, x in self.aux_hidden_states.items()}
        return self._replace(layers=layers, aux_hidden_states=aux, max_positions=self.max_positions[begin:end])


# ----------------------------------------------------------------------- attention and feed-forward


class Attention(nn.Module):
    """Grouped-query attention. Head counts follow from the Linears' shapes, so a rank's slice just works."""

    def __init__(self, config: Config):
        super().__init__()
        self.head_dim = config.head_dim
        heads, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        self.qkv = Linear(config.dim, heads + 2 * kv, bias=config.qkv_bias)
        self.out = Linear(heads, config.dim, bias=config.out_bias)
        self.qk_norm, self.interleaved = config.qk_norm, config.rope_interleaved
        q_dim, k_dim = (heads, kv) if self.qk_norm == "full" else (config.head_dim, config.head_dim)
        self.q_norm = RMSNorm(q_dim, config.norm_eps) if self.qk_norm else None
        self.k_norm = RMSNorm(k_dim, config.norm_eps) if self.qk_norm else None
        self.register_parameter("sinks", nn.Parameter(torch.zeros(config.n_heads)) if config.sinks else None)

    def heads(self) -> tuple[int, int]:
        """(H, G) on this rank."""
        H = self.out.in_features // self.head_dim
        return H, (self.qkv.out_features // self.head_dim - H) // 2

    def normalize(self, qk: Tensor, H: int) -> Tensor:  # (B, H + G, T, E)
        return torch.cat((self.q_norm(qk[:, :H]), self.k_norm(qk[:, H:])), dim=1)

    def forward(self, x: Tensor, pos: Tensor, rope: tuple | None, visible: AttentionMask, cache: KVCache | None):
        B, T, _ = x.shape
        H, G = self.heads()
        qkv = self.qkv(x)  # (B, T, (H + 2G)*E)
        if self.qk_norm == "full":
            q, k, v = qkv.split([n * self.head_dim for n in (H, G, G)], dim=-1)
            qkv = torch.cat((self.q_norm(q), self.k_norm(k), v), dim=-1)
        qkv = qkv.view(B, T, H + 2 * G, self.head_dim).transpose(1, 2)  # (B, H + 2G, T, E)
        qk, v = qkv.split((H + G, G), dim=1)
        qk = self.normalize(qk, H) if self.qk_norm == "heads" else qk
        cos, sin, *query_scale = rope or (None, None)
        # Rotate q and k together: small models are bound by the number of operations.
        qk = qk if cos is None else apply_rope(qk, cos, sin, self.interleaved)
        qk = self.normalize(qk, H) if self.qk_norm == "rotated" else qk
        q, k = qk.split((H, G), dim=1)  # (B, H, T, E), (B, G, T, E)
        q = (q * query_scale[0]).to(q.dtype) if query_scale else q
        if cache is None:
            y = attend(q, k, v, visible.mask, self.sinks)
        else:
            cache.update(k, v, pos)
            y = cache.attend(q, visible, self.sinks)
        return self.out(y.transpose(1, 2).reshape(B, T, -1))  # (B, H, T, E) -> (B, T, H*E) -> (B, T, D)


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), gate and up in one matrix. gpt-oss clamps both and adds 1 to up."""

    def __init__(self, config: Config, dim: int, bias: bool):
        super().__init__()
        self.limit, self.alpha = config.gate_limit, config.gate_alpha
        self.gate_up = Linear(config.dim, 2 * dim, bias=bias)
        self.down = Linear(dim, config.dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gated(self.gate_up(x)))

    def gated(self, gate_up: Tensor) -> Tensor:
        """(..., 2F) -> (..., F)"""
        gate, up = gate_up.chunk(2, dim=-1)  # each (..., F)
        if self.limit is None:  # F.silu rounds float32 by an element's place, as torch.sigmoid does
            return (F.silu(gate) if gate.dtype != torch.float32 else gate * sigmoid(gate)) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (gate * sigmoid(self.alpha * gate)).to(gate.dtype) * (up + 1)


class Router(Linear):
    """Scores of the experts. It is small and sensitive, so it is never quantized."""

    is_router = True


class Mixture(nn.ModuleList):
    """The experts of a layer. Each token takes a few, weighted by the router's logits (Shazeer et al.,
    arXiv:1701.06538)."""

    def __init__(self, config: Config):
        super().__init__(FeedForward(config, config.expert_dim, config.expert_bias) for _ in range(config.n_experts))
        self.n_chosen, self.renormalise = config.n_chosen, config.router_norm

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits (N, experts) -> ids of the chosen experts (N, n_chosen), of equal ones the first, and their float32
        weights: a softmax over all experts, renormalised over the chosen ones where the config says so."""
        logits = logits.float()
        top_logits, chosen = (x[:, : self.n_chosen] for x in logits.sort(dim=1, descending=True, stable=True))
        return chosen, top_logits.softmax(1) if self.renormalise else logits.softmax(1).gather(1, chosen)

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        """x (N, D), logits (N, experts) -> (N, D). Each expert runs once, on the rows that chose it. A row's sum runs
        in the experts' order, so it does not depend on other rows."""
        chosen, weights = self.route(logits)
        if compiler.is_compiling():  # static shapes: any row may choose any expert
            weights = weights.new_zeros(logits.shape).scatter(1, chosen, weights)  # (N, experts)
            return sum(expert(x) * weight[:, None] for expert, weight in zip(self, weights.unbind(1))).to(x.dtype)
        y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        if len(x) == 1:
            for id, weight in sorted(zip(chosen[0].tolist(), weights[0])):
                y += self[id](x).float() * weight
            return y.to(x.dtype)
        for id in chosen.unique().tolist():
            row, choice = (chosen == id).nonzero(as_tuple=True)
            y.index_add_(0, row, self[id](x[row]) * weights[row, choice, None])
        return y.to(x.dtype)


class Experts(nn.Module):
    """The feed-forward of a sparse layer. Qwen2-MoE adds one that every token takes, gated by the router's last row."""

    def __init__(self, config: Config):
        super().__init__()
        self.n_experts, self.n_chosen = config.n_experts, config.n_chosen
        self.router = Router(config.dim, config.n_experts + bool(config.shared_dim), bias=config.router_bias)
        self.experts = Mixture(config)
        self.shared = FeedForward(config, config.shared_dim, False) if config.shared_dim else None

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)  # (B, T, D) -> (N, D)
        logits, gate = self.router(flat).tensor_split((self.n_experts,), dim=1)  # (N, experts), (N, 1 or 0)
        y = self.experts(flat, logits)
        y = y if self.shared is None else y + (sigmoid(gate) * self.shared(flat)).to(y.dtype)
        return y.view(x.shape)


# -------------------------------------------------------------------------------------- Transformer


class Block(nn.Module):
    def __init__(self, config: Config, sparse: bool = False):
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn = Experts(config) if sparse else FeedForward(config, config.ffn_dim, config.ffn_bias)
        self.norms_after, self.scale = config.norms_after, config.residual_scale

    @compiler.nested_compile_region  # a compiler traces one block for all layers
    def forward(self, x: Tensor, pos: Tensor, rope: tuple | None, visible: AttentionMask, cache: KVCache | None):
        if self.norms_after:
            x = x + self.attention_norm(self.attention(x, pos, rope, visible, cache))
            return x + self.ffn_norm(self.ffn(x))
        x = x + scaled(self.attention(self.attention_norm(x), pos, rope, visible, cache), self.scale)
        return x + scaled(self.ffn(self.ffn_norm(x)), self.scale)


class Transformer(nn.Module):
    """Tokens and their positions in, logits out. Without caches a call attends over its own tokens (training, scoring);
    with caches also over all earlier positions (decoding)."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.windows = config.windows or (None,) * config.n_layers
        self.rope_types = config.rope_types or (0,) * config.n_layers
        self.embed = Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config, sparse) for sparse in config.sparse or (False,) * config.n_layers)
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.lm_head = Linear(config.dim, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed.weight
        self.rope = Rope(config)

    def make_caches(
        self, batch_size: int, max_seq_length: int, kind: type[KVCache] | Sequence[type[KVCache]] = KVCache
    ) -> Caches:
        """Empty caches for batch_size rows of max_seq_length positions, all layers of one kind or a kind per layer. Any
        number of sets may be in use at once."""
        weight, E = self.norm.weight, self.config.head_dim
        with torch.inference_mode(False):  # plain tensors, which any later code may write to
            kinds = [kind] * len(self.layers) if isinstance(kind, type) else kind
            layers = [
                kind(batch_size, layer.attention.heads()[1], max_seq_length, E, weight.dtype, weight.device)
                for layer, kind in zip(self.layers, kinds, strict=True)
            ]
            key_pos = torch.arange(max_seq_length, device=weight.device)
            return Caches(tuple(layers), key_pos, max_positions=key_pos[-1:].repeat(batch_size))

    def visible_by_window(
        self, pos: Tensor, caches: Caches | None, dtype: torch.dtype
    ) -> dict[int | None, AttentionMask]:
        """Window of a layer -> the keys that queries at pos (B, T) see through that window."""
        H, G = self.layers[0].attention.heads()
        key_pos, row_multiple = (pos, 1) if caches is None else (caches.key_pos, caches.row_multiple)
        return {
            window: visible_keys(pos, key_pos, window, caches is not None).as_bias(H // G, row_multiple, dtype)
            for window in set(self.windows)
        }

    def hidden(self, tokens: Tensor, pos: Tensor, caches: Caches | None = None) -> Tensor:
        """tokens (B, T) int, pos (T,) or (B, T) int, consecutive within a row -> normed hidden states (B, T, D)."""
        pos = pos.expand(tokens.shape)  # (B, T)
        rope_by_type = self.rope.by_type(pos, None if caches is None else caches.max_positions)
        x = scaled(self.embed(tokens), self.config.embed_scale)  # (B, T, D)
        visible = self.visible_by_window(pos, caches, x.dtype)
        layer_caches = [None] * len(self.layers) if caches is None else caches.layers
        recorders = (caches and caches.aux_hidden_states) or {}
        for i, (layer, cache) in enumerate(zip(self.layers, layer_caches, strict=True)):
            if i in recorders:
                recorders[i].update(x, pos)
            x = layer(x, pos, rope_by_type[self.rope_types[i]], visible[self.windows[i]], cache)
        if len(self.layers) in recorders:
            recorders[len(self.layers)].update(x, pos)
        return self.norm(x)

    def head(self, h: Tensor) -> Tensor:
        """h (..., D) -> logits (..., V) float32."""
        return scaled(self.lm_head(h).float(), self.config.logit_scale)

    def forward(self, tokens: Tensor, pos: Tensor, caches: Caches | None = None) -> Tensor:
        """Logits (B, T, V) float32 for the token after each position."""
        return self.head(self.hidden(tokens, pos, caches))
