"""The Llama-architecture decoder: configuration, RoPE, KV cache, Transformer.

    Config              a Hugging Face config.json as a flat dataclass; refuses what it would compute wrongly
    rope_frequencies    default | linear | llama3 | yarn
    KVCache             static, position-indexed keys and values of one layer
    Attention, FeedForward, Block, Transformer

This file does not know sampling, quantization, ranks, compilation, checkpoints or text. It sees token ids,
their absolute positions, and weights that someone else filled in.

Dimension letters, here and everywhere: B batch, T query length, S cache length, D model dim, H query heads,
G KV heads, R = H / G query heads per KV head, E head dim, F ffn dim, V vocabulary, K draft length.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# ---------------------------------------------------------------------------------------------- Config

# What each supported architecture means by a key that its config.json leaves out (transformers' own defaults).
FAMILIES = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
}

# Keys of related architectures that change the arithmetic, with the values under which they change nothing.
# None (JSON null) is neutral for every one of them.
NEUTRAL = {
    "add_cross_attention": (False,),
    "alibi": (False,),
    "attention_chunk_size": (),
    "attention_multiplier": (),
    "attention_out_bias": (False,),
    "attn_logit_softcapping": (),
    "attn_output_gate": (False,),
    "attn_temperature_tuning": (False, 0),
    "bias": (False,),
    "clip_qkv": (),
    "cross_attention_layers": ([],),
    "dim_model_base": (),
    "embedding_multiplier": (1,),
    "embedding_scale": (1,),
    "final_logit_softcapping": (),
    "hidden_act": ("silu", "swish"),
    "hidden_activation": ("silu", "swish"),
    "is_encoder_decoder": (False,),
    "kv_lora_rank": (),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "n_routed_experts": (0,),
    "no_rope_layer_interval": (0,),
    "num_experts": (0,),
    "num_local_experts": (0, 1),
    "partial_rotary_factor": (1,),
    "position_embedding_type": ("rope", "rotary"),
    "pruned_heads": ({},),
    "q_lora_rank": (),
    "qk_layernorm": (False,),
    "quantization_config": ({},),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1,),
    "rope_interleaved": (False,),
    "rope_local_base_freq": (),
    "rotary_pct": (1,),
    "scale_depth": (),
    "scale_emb": (1,),
    "swiglu_limit": (),
    "use_parallel_residual": (False,),
    "use_qk_norm": (False,),
}

ROPE_KEYS = {  # rope type -> (required, optional); any other key in the dictionary is refused
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor",),
        ("original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "mscale",
         "mscale_all_dim", "truncate", "finetuned"),
    ),
}  # fmt: skip

SMALLEST = 1e-30  # float32 holds this and its reciprocal
LARGEST_SIZE = 2**24  # no dimension, vocabulary or context of a real decoder is larger; 2**40 is a broken file


@dataclass(frozen=True)
class Config:
    """Everything that the arithmetic depends on, in one flat place. Build it with `Config.from_hf`."""

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
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()  # per layer: tokens attended, itself included; None is all of them
    rope_theta: float = 10000.0
    rope_type: str = "default"
    rope_factor: float = 1.0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_length: int = 0  # llama3 and yarn: the context before it was stretched
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    rope_truncate: bool = True
    rope_attention_factor: float = 1.0  # multiplies cos and sin
    dtype: str | None = None  # what the checkpoint says its weights are; no part of the arithmetic

    @staticmethod
    def from_hf(hf: dict) -> "Config":
        """Read a config.json of transformers v4 or v5 spelling.

        Raises ValueError, naming key and value, for an unknown architecture, a missing or senseless size, and
        every key that changes the arithmetic in a way this file does not compute.
        """
        if not isinstance(hf, dict):
            raise ValueError(f"config.json: expected a JSON object, found {type(hf).__name__}")
        family = hf.get("model_type")
        if not isinstance(family, str) or family not in FAMILIES:
            raise ValueError(f"config.json: model_type {family!r} is not supported; supported: {', '.join(FAMILIES)}")
        for key, neutral in NEUTRAL.items():
            if hf.get(key) is not None and hf[key] not in neutral:
                raise ValueError(f"config.json: {key} = {hf[key]!r} is not supported{_would_work(neutral)}")
        no_rope = hf.get("no_rope_layers") or []
        if not isinstance(no_rope, list) or not all(use == 1 for use in no_rope):
            raise ValueError(f"config.json: no_rope_layers = {no_rope!r} is not supported; every layer must use RoPE")
        hf = {**FAMILIES[family], **hf}

        n_layers = _size(hf, "num_hidden_layers", largest=4096)
        dim, n_heads = _size(hf, "hidden_size"), _size(hf, "num_attention_heads")
        n_kv_heads = _size(hf, "num_key_value_heads", default=n_heads)
        if n_heads % n_kv_heads:
            raise ValueError(
                f"config.json: num_attention_heads = {n_heads} is not a multiple of num_key_value_heads = {n_kv_heads}"
            )
        if hf.get("head_dim") is None and dim % n_heads:
            raise ValueError(f"config.json: hidden_size = {dim} is not a multiple of num_attention_heads = {n_heads}")
        head_dim = _size(hf, "head_dim", default=dim // n_heads)
        if head_dim % 2:
            raise ValueError(f"config.json: head_dim = {head_dim} is odd; RoPE rotates pairs")
        if n_heads * head_dim > LARGEST_SIZE:
            raise ValueError(f"config.json: {n_heads} heads of head_dim = {head_dim} are over {LARGEST_SIZE:,} in all")
        bias = _flag(hf, "attention_bias")
        if bias and family == "mistral":
            raise ValueError("config.json: attention_bias = True is not supported for model_type 'mistral'")
        max_seq_length = _size(hf, "max_position_embeddings")
        return Config(
            dim=dim,
            n_layers=n_layers,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            ffn_dim=_size(hf, "intermediate_size"),
            vocab_size=_size(hf, "vocab_size"),
            max_seq_length=max_seq_length,
            norm_eps=_number(hf, "rms_norm_eps"),
            tie_embeddings=_flag(hf, "tie_word_embeddings"),
            qkv_bias=bias or family == "qwen2",  # Qwen2's is implied by the model type, no key says it
            out_bias=bias and family != "qwen2",
            ffn_bias=_flag(hf, "mlp_bias"),
            qk_norm=family == "qwen3",
            windows=_windows(hf, family, n_layers),
            dtype=_dtype(hf),
            **_rope(hf, max_seq_length),
        )


def _would_work(neutral: tuple) -> str:
    if not neutral:
        return "; only a config.json without it, or with null, is"
    return f"; supported: {' or '.join(repr(value) for value in neutral)}"


def _number(hf: dict, key: str, default: float | None = None, where: str = "") -> float:
    value = hf.get(key)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"config.json: {where}{key} is missing")
    if isinstance(value, bool) or not isinstance(value, int | float) or not (SMALLEST < value < 1 / SMALLEST):
        raise ValueError(f"config.json: {where}{key} = {value!r} must be a positive number, within float32's range")
    return float(value)


def _size(hf: dict, key: str, default: int | None = None, largest: int = LARGEST_SIZE, where: str = "") -> int:
    value = _number(hf, key, default, where)
    if value != int(value) or value > largest:
        raise ValueError(f"config.json: {where}{key} = {hf[key]!r} must be a whole number up to {largest:,}")
    return int(value)


def _flag(hf: dict, key: str) -> bool:
    value = hf.get(key)
    if value not in (None, True, False):
        raise ValueError(f"config.json: {key} = {value!r} must be true or false")
    return bool(value)


def _dtype(hf: dict) -> str | None:
    """transformers v5 writes `dtype`, v4 `torch_dtype`; both may carry a `torch.` prefix."""
    name = hf.get("dtype") or hf.get("torch_dtype")
    return name.removeprefix("torch.") if isinstance(name, str) else None


def _windows(hf: dict, family: str, n_layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer. Qwen writes a `sliding_window` that `use_sliding_window: false` turns off."""
    qwen = family in ("qwen2", "qwen3")
    size, turned_off = hf.get("sliding_window"), hf.get("use_sliding_window") is False
    if family == "llama" and size is not None and not turned_off:
        raise ValueError(f"config.json: sliding_window = {size!r} is not supported for model_type 'llama'")
    if family == "mistral" and size is not None and turned_off:
        raise ValueError("config.json: use_sliding_window = False contradicts sliding_window; set that to null")
    sliding = _flag(hf, "use_sliding_window") if qwen else family == "mistral" and size is not None
    window = _size(hf, "sliding_window") if sliding else None
    kinds = hf.get("layer_types")
    if kinds is None:
        # Qwen slides from max_window_layers on; Mistral has no such key and slides everywhere.
        first = hf.get("max_window_layers") or 0 if qwen else 0
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise ValueError(f"config.json: max_window_layers = {first!r} must be a whole number")
        return tuple(window if i >= first else None for i in range(n_layers))
    known = {"full_attention": None, "sliding_attention": window}
    if not isinstance(kinds, list) or len(kinds) != n_layers or any(str(kind) not in known for kind in kinds):
        raise ValueError(
            f"config.json: layer_types = {kinds!r} must name full_attention or sliding_attention for each of"
            f" {n_layers} layers"
        )
    if "sliding_attention" in kinds and window is None:
        raise ValueError("config.json: layer_types asks for sliding_attention, but no sliding_window is in use")
    if family == "mistral" and window is not None and "full_attention" in kinds:
        raise ValueError("config.json: layer_types mixes full and sliding attention, which 'mistral' does not define")
    return tuple(known[kind] for kind in kinds)


def _rope(hf: dict, max_seq_length: int) -> dict:
    """RoPE fields from `rope_theta` + `rope_scaling` (transformers v4) or `rope_parameters` (v5)."""
    name = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
    rope = hf.get(name) or {}
    if not isinstance(rope, dict):
        raise ValueError(f"config.json: {name} = {rope!r} must be an object")
    if hf.get("rope_parameters") and hf.get("rope_scaling") and hf["rope_parameters"] != hf["rope_scaling"]:
        raise ValueError(f"config.json: rope_parameters and rope_scaling = {hf['rope_scaling']!r} disagree; keep one")
    where = f"{name}."
    kind, old_kind = rope.get("rope_type"), rope.get("type")
    if kind is not None and old_kind is not None and kind != old_kind:
        raise ValueError(f"config.json: {where}rope_type = {kind!r} and {where}type = {old_kind!r} disagree; keep one")
    kind = kind or old_kind or ("default" if not set(rope) - {"rope_theta", "partial_rotary_factor"} else None)
    if not isinstance(kind, str) or kind not in ROPE_KEYS:
        names = ", ".join(ROPE_KEYS)
        raise ValueError(f"config.json: {where}rope_type = {kind!r} is not supported; supported: {names}")
    required, optional = ROPE_KEYS[kind]
    for key, value in rope.items():
        harmless = key in ("rope_type", "type", "rope_theta") or (key == "partial_rotary_factor" and value in (None, 1))
        if not harmless and key not in required + optional and value is not None:
            raise ValueError(f"config.json: {where}{key} = {value!r} is not supported with rope_type {kind!r}")
    original = "original_max_position_embeddings"  # some folders keep it beside the object
    if original in required + optional and hf.get(original) is not None:
        if rope.get(original) not in (None, hf[original]):
            raise ValueError(f"config.json: {original} = {hf[original]!r} and {where}{original} disagree; keep one")
        rope = {**rope, original: hf[original]}
    theta = hf.get("rope_theta")
    if theta is not None and rope.get("rope_theta") is not None and theta != rope["rope_theta"]:
        raise ValueError(
            f"config.json: rope_theta = {theta!r} and {where}rope_theta = {rope['rope_theta']!r} disagree; keep one"
        )
    fields = {"rope_type": kind, "rope_theta": _number(rope, "rope_theta", 10000.0 if theta is None else theta, where)}
    if fields["rope_theta"] <= 1:
        raise ValueError(f"config.json: rope_theta = {fields['rope_theta']} must be larger than 1")
    if "factor" in required:
        fields["rope_factor"] = _number(rope, "factor", where=where)
    if kind == "llama3":
        fields["rope_low_freq_factor"] = _number(rope, "low_freq_factor", where=where)
        fields["rope_high_freq_factor"] = _number(rope, "high_freq_factor", where=where)
        fields["rope_original_length"] = _size(rope, "original_max_position_embeddings", where=where)
        if fields["rope_high_freq_factor"] <= fields["rope_low_freq_factor"]:
            raise ValueError(f"config.json: {where}high_freq_factor must be larger than low_freq_factor")
    if kind == "yarn":
        fields["rope_beta_fast"] = _number(rope, "beta_fast", 32.0, where)
        fields["rope_beta_slow"] = _number(rope, "beta_slow", 1.0, where)
        fields["rope_truncate"] = rope.get("truncate") is not False
        fields["rope_original_length"] = _size(rope, "original_max_position_embeddings", max_seq_length, where=where)
        fields["rope_attention_factor"] = _yarn_attention_factor(rope, fields["rope_factor"], where)
    return fields


def _yarn_attention_factor(rope: dict, factor: float, where: str) -> float:
    """YaRN (arXiv:2309.00071 eq. 22): sqrt(1/t) = 0.1 ln(s) + 1, or DeepSeek's ratio of two such terms."""
    if rope.get("attention_factor") is not None:
        return _number(rope, "attention_factor", where=where)

    def mscale(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        top, bottom = _number(rope, "mscale", where=where), _number(rope, "mscale_all_dim", where=where)
        return mscale(top) / mscale(bottom)
    return mscale(1.0)


# ------------------------------------------------------------------------------------------------ RoPE


def rope_frequencies(config: Config) -> Tensor:
    """Inverse frequencies (E/2,) in float32, stretched as `config.rope_type` says.

    Sources: RoFormer arXiv:2104.09864 eq. 15; linear interpolation arXiv:2306.15595; llama3 the published
    Llama 3.1 reference; yarn arXiv:2309.00071 §3.2 (NTK-by-parts).
    """
    E, theta, factor = config.head_dim, config.rope_theta, config.rope_factor
    inv_freq = 1.0 / theta ** (torch.arange(0, E, 2, dtype=torch.float32) / E)  # (E/2,)
    if config.rope_type == "linear":
        return inv_freq / factor
    if config.rope_type == "llama3":
        rotations = config.rope_original_length * inv_freq / (2 * math.pi)  # turns within the original context
        low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
        keep = ((rotations - low) / (high - low)).clamp(0, 1)  # 1: fast pairs stay, 0: slow pairs are stretched
        return inv_freq / factor * (1 - keep) + inv_freq * keep
    if config.rope_type == "yarn":

        def pair_that_turns(times: float) -> float:  # index of the pair that turns so often in the original context
            return E * math.log(config.rope_original_length / (times * 2 * math.pi)) / (2 * math.log(theta))

        low, high = pair_that_turns(config.rope_beta_fast), pair_that_turns(config.rope_beta_slow)
        if config.rope_truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, E - 1)
        ramp = (torch.arange(E // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
        keep = 1 - ramp.clamp(0, 1)
        return inv_freq / factor * (1 - keep) + inv_freq * keep
    return inv_freq


class Rope(nn.Module):
    """cos and sin of position times frequency, float32 whatever the weights are.

    A 16-bit table loses whole positions at long context, so a cast of the model rebuilds it instead.
    """

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.register_buffer("inv_freq", rope_frequencies(config), persistent=False)  # (E/2,)

    def _apply(self, fn, recurse: bool = True):
        super()._apply(fn, recurse)  # moves between devices, and out of meta; a cast must not survive
        self.inv_freq = rope_frequencies(self.config).to(self.inv_freq.device)
        return self

    def forward(self, pos: Tensor) -> tuple[Tensor, Tensor]:
        """pos (B, T) int -> cos, sin (B, 1, T, E/2) float32."""
        angle = pos[:, None, :, None].float() * self.inv_freq  # (B, 1, T, E/2)
        scale = self.config.rope_attention_factor
        return angle.cos() * scale, angle.sin() * scale


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x (B, n, T, E), half-split layout: pair i is (x[i], x[i + E/2])."""
    a, b = x.float().chunk(2, dim=-1)  # each (B, n, T, E/2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


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

    mask: Tensor  # (B, 1, T, S) bool, or as `attend` adds it
    index: Tensor | None  # (B, S) positions to gather, or None: the first S

    def added(self, R: int, dtype: torch.dtype) -> "Keys":
        """With a mask (B, 1, R*T, S) to add to scores: made once a call, where every layer would make it."""
        bias = torch.zeros((), dtype=dtype, device=self.mask.device).where(self.mask, -math.inf)  # (B, 1, T, S)
        return self._replace(mask=rows_of_heads(bias, R))


def visible_keys(pos: Tensor, key_pos: Tensor, window: int | None, cached: bool) -> Keys:
    """pos (B, T), consecutive within a row; key_pos (S,) of the filled cache, or (B, T) without one.

    Once more is filled than a window spans, only the window is gathered, so that its cost stops growing.
    """
    T, S = pos.size(1), key_pos.size(-1)
    if not cached or window is None or window + T > S:
        return Keys(attention_mask(pos, key_pos, window), None)
    offset = torch.arange(window + T - 1, device=pos.device)
    key_pos = pos[:, :1] - (window - 1) + offset  # (B, window + T - 1), negative where a row is shorter
    return Keys(attention_mask(pos, key_pos, window), key_pos.clamp(min=0))


def rows_of_heads(mask: Tensor, R: int) -> Tensor:
    """mask (B, 1, T, S) -> (B, 1, R*T, S); at T = 1 it broadcasts over R by itself."""
    return mask.repeat(1, 1, R, 1) if mask.size(2) > 1 else mask


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Softmax attention in float32. q (B, H, T, E), k and v (B, G, S, E) -> (B, H, T, E); mask (B, 1, T, S), true where
    a key is seen, or (B, 1, R*T, S) to add.

    The R query heads that share a KV head become rows of one product, so K and V are read once, never repeated.
    """
    B, H, T, E = q.shape
    G = k.size(1)
    q = q.reshape(B, G, H // G * T, E)  # rows: R times T
    if mask.dtype == torch.bool:
        mask = rows_of_heads(mask, H // G)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).reshape(B, H, T, E)


class KVCache(nn.Module):
    """Keys and values of one layer at fixed addresses, indexed by absolute position.

    Nothing is ever removed: what stands at or beyond the next position is masked, then overwritten. Zeros, not
    uninitialised memory, because a masked NaN still makes 0 * NaN = NaN.
    """

    def __init__(self, B: int, G: int, S: int, E: int, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.register_buffer("k", torch.zeros(B, G, S, E, dtype=dtype, device=device), persistent=False)
        self.register_buffer("v", torch.zeros(B, G, S, E, dtype=dtype, device=device), persistent=False)

    def update(self, k: Tensor, v: Tensor, pos: Tensor) -> None:
        """Write k and v (B, G, T, E) at pos (B, T)."""
        row = torch.arange(pos.size(0), device=pos.device)[:, None]  # (B, 1)
        self.k[row, :, pos] = k.transpose(1, 2)  # (B, T, G, E)
        self.v[row, :, pos] = v.transpose(1, 2)

    def attend(self, q: Tensor, keys: Keys) -> Tensor:
        """q (B, H, T, E) over the positions in `keys` -> (B, H, T, E)."""
        B, S = q.size(0), keys.mask.size(-1)  # fewer rows than the cache has use its first ones
        if keys.index is None:
            return attend(q, self.k[:B, :, :S], self.v[:B, :, :S], keys.mask)
        row = torch.arange(B, device=q.device)[:, None]  # (B, 1)
        k, v = (cached[row, :, keys.index].transpose(1, 2) for cached in (self.k, self.v))  # (B, G, S, E)
        return attend(q, k, v, keys.mask)


class Shapes(TorchFunctionMode):
    """`with Shapes():` the weights of what is built have shapes and types, on the meta device, and no values.

    Initialising them would do nothing, and calculating there would import torch's compiler, half of a start's time: so
    the first is left out, and RoPE's frequencies are calculated where they otherwise would be.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_):
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        if function in (torch.empty, torch.ones):
            kwargs = {**kwargs, "device": "meta"}
        return function(*args, **kwargs)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension; `F.rms_norm` accumulates 16-bit input in float32."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention. Head counts are read off the Linears, so a rank that holds a slice just works."""

    def __init__(self, config: Config):
        super().__init__()
        self.head_dim = config.head_dim
        heads, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        self.qkv = nn.Linear(config.dim, heads + 2 * kv, bias=config.qkv_bias)
        self.out = nn.Linear(heads, config.dim, bias=config.out_bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.cache: KVCache | None = None

    def kv_heads(self) -> int:
        """G on this rank."""
        return (self.qkv.out_features - self.out.in_features) // 2 // self.head_dim

    def heads_per_key(self) -> int:
        """R, the query heads that share a KV head."""
        return self.out.in_features // self.head_dim // self.kv_heads()

    def forward(self, x: Tensor, pos: Tensor, rope: tuple[Tensor, Tensor], keys: Keys) -> Tensor:
        B, T, _ = x.shape
        E, G = self.head_dim, self.kv_heads()
        qkv = self.qkv(x).view(B, T, -1, E).transpose(1, 2)  # (B, H + 2G, T, E)
        q, k, v = qkv.split((qkv.size(1) - 2 * G, G, G), dim=1)
        # Queries and keys lie side by side and turn together: on a small model a step costs what its operations' number
        # does.
        together = qkv[:, :-G] if self.q_norm is None else torch.cat((self.q_norm(q), self.k_norm(k)), dim=1)
        q, k = apply_rope(together, *rope).split((q.size(1), G), dim=1)  # (B, H, T, E), (B, G, T, E)
        if self.cache is None:
            y = attend(q, k, v, keys.mask)
        else:
            self.cache.update(k, v, pos)
            y = self.cache.attend(q, keys)
        return self.out(y.transpose(1, 2).reshape(B, T, -1))  # (B, T, H*E) -> (B, T, D)


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), gate and up in one matrix."""

    def __init__(self, config: Config):
        super().__init__()
        self.gate_up = nn.Linear(config.dim, 2 * config.ffn_dim, bias=config.ffn_bias)
        self.down = nn.Linear(config.ffn_dim, config.dim, bias=config.ffn_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)  # each (B, T, F)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn = FeedForward(config)

    def forward(self, x: Tensor, pos: Tensor, rope: tuple[Tensor, Tensor], keys: Keys) -> Tensor:
        x = x + self.attention(self.attention_norm(x), pos, rope, keys)
        return x + self.ffn(self.ffn_norm(x))


# ----------------------------------------------------------------------------------------- Transformer


class Transformer(nn.Module):
    """tokens and their positions in, logits out.

    Without caches a call attends over its own tokens (training, scoring). After `setup_caches` it also attends
    over everything written at earlier positions (decoding).
    """

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.windows = config.windows or (None,) * config.n_layers
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed.weight
        self.rope = Rope(config)
        self.key_pos: Tensor | None = None  # (S,) positions that attention runs over; its length is what it costs

    def setup_caches(self, batch_size: int, max_seq_length: int) -> None:
        """Give every layer an empty cache of (batch_size, G, max_seq_length, E) in the norms' dtype."""
        weight, E = self.norm.weight, self.config.head_dim
        heads = [layer.attention.kv_heads() for layer in self.layers]
        self.use_caches([KVCache(batch_size, G, max_seq_length, E, weight.dtype, weight.device) for G in heads])

    def use_caches(self, caches: "list[KVCache] | None") -> None:
        """Attend over these caches, one per layer, with what they hold; None: over a call's own tokens."""
        self.key_pos = None
        if caches:
            k = caches[0].k
            self.positions = torch.arange(k.size(2), device=k.device)
            self.attend_to(k.size(2))
        # Last, so that whoever finds these caches in every layer finds the positions that go with them.
        for layer, cache in zip(self.layers, caches or [None] * len(self.layers), strict=True):
            layer.attention.cache = cache

    def with_layers(self, layers: "list[Block]", windows: tuple[int | None, ...]) -> "Transformer":
        """Another Transformer of these blocks, whose embedding, final norm, head and rotations are this one's own."""
        with Shapes():
            other = Transformer(replace(self.config, n_layers=0, windows=(), tie_embeddings=False))
        other.config, other.windows = replace(self.config, n_layers=len(layers), windows=windows), windows
        other.embed, other.norm, other.lm_head, other.rope = self.embed, self.norm, self.lm_head, self.rope
        other.layers = nn.ModuleList(layers)
        return other.eval()

    def attend_to(self, length: int) -> None:
        """The caller's promise that no position >= `length` is queried until the next promise.

        It bounds what attention costs. Reading it off `pos` would make the host wait for the device; it is the length
        of a tensor, not a number, so that whoever traces this model can leave it open.
        """
        self.key_pos = self.positions[:length]

    def hidden(self, tokens: Tensor, pos: Tensor) -> Tensor:
        """tokens (B, T) int, pos (T,) or (B, T) int, absolute and consecutive within a row -> final
        normed hidden states (B, T, D)."""
        pos = pos.expand(tokens.shape)  # (B, T)
        cached = self.key_pos is not None
        key_pos = self.key_pos if cached else pos
        rope = self.rope(pos)
        x = self.embed(tokens)  # (B, T, D)
        R = self.layers[0].attention.heads_per_key()
        keys = {w: visible_keys(pos, key_pos, w, cached).added(R, x.dtype) for w in set(self.windows)}
        for layer, window in zip(self.layers, self.windows, strict=True):
            x = layer(x, pos, rope, keys[window])
        return self.norm(x)

    def head(self, h: Tensor) -> Tensor:
        """h (..., D) -> logits (..., V) float32."""
        return self.lm_head(h).float()

    def forward(self, tokens: Tensor, pos: Tensor) -> Tensor:
        """Logits (B, T, V) float32 for the token after each position."""
        return self.head(self.hidden(tokens, pos))
