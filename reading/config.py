"""config.json -> the fields of model.Config.

    config_fields   the one door: a parsed config.json in, a dict of Config's fields out
    FAMILIES        supported architectures, each with transformers' values for keys that a file leaves out
    NEUTRAL         keys that would change the arithmetic, with the values under which they do not; null never does

A file of transformers v4 and one of v5 give the same fields. Every message names key and value.
This file knows no other file of the project: no path, no tensor, no Config.
"""

import math

FAMILIES = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
}

NEUTRAL = {
    key: values
    for values, keys in [
        ((), "attention_chunk_size attention_multiplier attn_logit_softcapping clip_qkv dim_model_base kv_lora_rank"),
        ((), "final_logit_softcapping q_lora_rank query_pre_attn_scalar rope_local_base_freq scale_depth swiglu_limit"),
        ((False,), "add_cross_attention alibi attention_out_bias attn_output_gate bias is_encoder_decoder"),
        ((False,), "qk_layernorm rope_interleaved use_parallel_residual use_qk_norm"),
        ((False, 0), "attn_temperature_tuning"),
        ((0,), "n_routed_experts no_rope_layer_interval num_experts"),
        ((0, 1), "num_local_experts"),
        ((1,), "embedding_multiplier embedding_scale logit_scale logits_scaling partial_rotary_factor"),
        ((1,), "residual_multiplier rotary_pct scale_emb"),
        (([],), "cross_attention_layers"),
        (({},), "pruned_heads quantization_config"),
        (("silu", "swish"), "hidden_act hidden_activation"),
        (("rope", "rotary"), "position_embedding_type"),
    ]
    for key in keys.split()
}

# Rope type -> the keys it reads. Another key beside them is refused.
ROPE_KEYS = {
    "default": "",
    "linear": "factor",
    "llama3": "factor low_freq_factor high_freq_factor original_max_position_embeddings",
    "yarn": "factor original_max_position_embeddings beta_fast beta_slow truncate"
    " attention_factor mscale mscale_all_dim finetuned attn_factor",  # the last two mean nothing to transformers
}

SMALLEST = 1e-30  # float32 holds this and its reciprocal
LARGEST_SIZE = 2**24  # no dimension, vocabulary or context of a real decoder is larger; 2**40 is a broken file


class Section(dict):
    """An object of config.json. A key that is null counts as absent."""

    where = ""  # leads its keys in messages

    def refused(self, key: str, why: str) -> ValueError:
        return ValueError(f"config.json: {self.where}{key} = {self.get(key)!r} {why}")

    def number(self, key: str, default: float | None = None) -> float:
        value = default if self.get(key) is None else self[key]
        if value is None:
            raise ValueError(f"config.json: {self.where}{key} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not SMALLEST < value < 1 / SMALLEST:
            raise self.refused(key, "must be a positive number, within float32's range")
        return float(value)

    def size(self, key: str, default: int | None = None, largest: int = LARGEST_SIZE) -> int:
        value = self.number(key, default)
        if value != int(value) or value > largest:
            raise self.refused(key, f"must be a whole number up to {largest:,}")
        return int(value)

    def flag(self, key: str) -> bool:
        if self.get(key) not in (None, True, False):
            raise self.refused(key, "must be true or false")
        return bool(self.get(key))


def config_fields(hf: dict) -> dict:
    """Config's fields. ValueError for an unknown family, a senseless size, and arithmetic that we do not compute."""
    if not isinstance(hf, dict):
        raise ValueError(f"config.json: expected a JSON object, found {type(hf).__name__}")
    family = hf.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(f"config.json: model_type {family!r} is not supported; supported: {', '.join(FAMILIES)}")
    hf = Section({**FAMILIES[family], **hf})
    check_neutral(hf)

    n_layers = hf.size("num_hidden_layers", largest=4096)
    dim, n_heads = hf.size("hidden_size"), hf.size("num_attention_heads")
    n_kv_heads = hf.size("num_key_value_heads", n_heads)
    if n_heads % n_kv_heads:
        raise hf.refused("num_attention_heads", f"is not a multiple of num_key_value_heads = {n_kv_heads}")
    if hf.get("head_dim") is None and dim % n_heads:
        raise hf.refused("hidden_size", f"is not a multiple of num_attention_heads = {n_heads}")
    head_dim = hf.size("head_dim", dim // n_heads)
    if head_dim % 2:
        raise ValueError(f"config.json: head_dim = {head_dim} is odd; RoPE rotates pairs")
    if n_heads * head_dim > LARGEST_SIZE:
        raise ValueError(f"config.json: {n_heads} heads of head_dim = {head_dim} are over {LARGEST_SIZE:,} in all")
    bias = hf.flag("attention_bias")
    if bias and family == "mistral":
        raise hf.refused("attention_bias", "is not supported for model_type 'mistral'")
    dtype = hf.get("dtype") or hf.get("torch_dtype")  # v5, v4
    return {
        "dim": dim,
        "n_layers": n_layers,
        "n_heads": n_heads,
        "n_kv_heads": n_kv_heads,
        "head_dim": head_dim,
        "ffn_dim": hf.size("intermediate_size"),
        "vocab_size": hf.size("vocab_size"),
        "max_seq_length": hf.size("max_position_embeddings"),
        "norm_eps": hf.number("rms_norm_eps"),
        "tie_embeddings": hf.flag("tie_word_embeddings"),
        "qkv_bias": bias or family == "qwen2",  # Qwen2 always has one, and no key for it
        "out_bias": bias and family != "qwen2",
        "ffn_bias": hf.flag("mlp_bias"),
        "qk_norm": family == "qwen3",
        "windows": windows(hf, family, n_layers),
        "dtype": dtype.removeprefix("torch.") if isinstance(dtype, str) else None,
        **rope_fields(hf),
    }


def check_neutral(hf: Section) -> None:
    for key, neutral in NEUTRAL.items():
        if hf.get(key) is not None and hf[key] not in neutral:
            values = " or ".join(map(repr, neutral))
            works = f"supported: {values}" if neutral else "only a config.json without it, or with null, is"
            raise hf.refused(key, f"is not supported; {works}")
    no_rope = hf.get("no_rope_layers") or []
    if not isinstance(no_rope, list) or not all(use == 1 for use in no_rope):
        raise hf.refused("no_rope_layers", "is not supported; every layer must use RoPE")


def windows(hf: Section, family: str, n_layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer. None: the layer attends to all tokens."""
    qwen = family in ("qwen2", "qwen3")
    size, turned_off = hf.get("sliding_window"), hf.get("use_sliding_window") is False
    if family == "llama" and size is not None and not turned_off:
        raise hf.refused("sliding_window", "is not supported for model_type 'llama'")
    if family == "mistral" and size is not None and turned_off:
        raise hf.refused("use_sliding_window", "contradicts sliding_window; set that to null")
    # Qwen slides only if use_sliding_window says so. Mistral slides wherever there is a size.
    sliding = hf.flag("use_sliding_window") if qwen else family == "mistral" and size is not None
    window = hf.size("sliding_window") if sliding else None
    kinds = hf.get("layer_types")
    if kinds is None:
        # Qwen slides from layer max_window_layers on. Mistral has no such key and slides everywhere.
        first = hf.get("max_window_layers") or 0 if qwen else 0
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise hf.refused("max_window_layers", "must be a whole number")
        return tuple(window if i >= first else None for i in range(n_layers))
    known = {"full_attention": None, "sliding_attention": window}
    if not isinstance(kinds, list) or len(kinds) != n_layers or any(str(kind) not in known for kind in kinds):
        raise hf.refused("layer_types", f"must name full_attention or sliding_attention for each of {n_layers} layers")
    if "sliding_attention" in kinds and window is None:
        raise ValueError("config.json: layer_types asks for sliding_attention, but no sliding_window is in use")
    if family == "mistral" and window is not None and "full_attention" in kinds:
        raise ValueError("config.json: layer_types mixes full and sliding attention, which 'mistral' does not define")
    return tuple(known[kind] for kind in kinds)


def rope_fields(hf: Section) -> dict:
    """Config's RoPE fields from `rope_theta` + `rope_scaling` (transformers v4) or `rope_parameters` (v5)."""
    rope = rope_section(hf)
    kind, theta = rope["rope_type"], rope.number("rope_theta", 10000.0)
    if theta <= 1:
        raise ValueError(f"config.json: rope_theta = {theta} must be larger than 1")
    fields = {"rope_type": kind, "rope_theta": theta}
    if kind != "default":
        fields["rope_factor"] = rope.number("factor")
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        fields["rope_low_freq_factor"], fields["rope_high_freq_factor"] = low, high
        fields["rope_original_length"] = rope.size("original_max_position_embeddings")
        if high <= low:
            raise ValueError(f"config.json: {rope.where}high_freq_factor must be larger than low_freq_factor")
    if kind == "yarn":
        fields["rope_beta_fast"] = rope.number("beta_fast", 32.0)
        fields["rope_beta_slow"] = rope.number("beta_slow", 1.0)
        fields["rope_truncate"] = rope.get("truncate") is not False
        fields["rope_original_length"] = rope.size("original_max_position_embeddings", hf["max_position_embeddings"])
        fields["rope_attention_factor"] = yarn_attention_factor(rope, fields["rope_factor"])
    return fields


def rope_section(hf: Section) -> Section:
    """The object with RoPE's keys, completed by what stands beside it. What a file says twice must agree."""
    name = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
    if not isinstance(hf.get(name) or {}, dict):
        raise hf.refused(name, "must be an object")
    if hf.get("rope_parameters") and hf.get("rope_scaling") and hf["rope_parameters"] != hf["rope_scaling"]:
        raise ValueError(f"config.json: rope_parameters and rope_scaling = {hf['rope_scaling']!r} disagree; keep one")
    rope = Section(hf.get(name) or {})
    rope.where = f"{name}."
    kind, old_kind = rope.get("rope_type"), rope.get("type")
    if None not in (kind, old_kind) and kind != old_kind:
        raise rope.refused("rope_type", f"and {rope.where}type = {old_kind!r} disagree; keep one")
    said_nothing = not set(rope) - {"rope_theta", "partial_rotary_factor"}
    kind = rope["rope_type"] = kind or old_kind or ("default" if said_nothing else None)
    if not isinstance(kind, str) or kind not in ROPE_KEYS:
        raise rope.refused("rope_type", f"is not supported; supported: {', '.join(ROPE_KEYS)}")
    for key, value in rope.items():
        harmless = key in ("rope_type", "type", "rope_theta") or (key == "partial_rotary_factor" and value in (None, 1))
        if not harmless and key not in ROPE_KEYS[kind].split() and value is not None:
            raise rope.refused(key, f"is not supported with rope_type {kind!r}")
    # These keys may stand beside the object. v4 keeps rope_theta there.
    for key in ("original_max_position_embeddings", "rope_theta"):
        if hf.get(key) is not None and rope.get(key) not in (None, hf[key]):
            raise hf.refused(key, f"and {rope.where}{key} = {rope[key]!r} disagree; keep one")
        rope[key] = hf.get(key) if rope.get(key) is None else rope[key]
    return rope


def yarn_attention_factor(rope: Section, factor: float) -> float:
    """YaRN (arXiv:2309.00071 eq. 22): sqrt(1/t) = 0.1 ln(s) + 1, or DeepSeek's ratio of two such terms."""
    if rope.get("attention_factor") is not None:
        return rope.number("attention_factor")
    stretch = math.log(max(factor, 1.0))
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        top, bottom = rope.number("mscale"), rope.number("mscale_all_dim")
        return (0.1 * top * stretch + 1.0) / (0.1 * bottom * stretch + 1.0)
    return 0.1 * stretch + 1.0
