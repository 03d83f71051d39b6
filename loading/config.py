"""config.json -> model.Config. Files of transformers v4 and v5 give the same; every message names key and value.

    config_from_hf    the Config of a parsed file;  text_part  the text model's file inside another model's
    Section           an object of the file, whose values are checked as they are read
    NEUTRAL           keys that would change the arithmetic, with the values under which they do not; null never does

families.py holds the differences between model_types.
"""

import math

from loading.families import FAMILIES, SLIDING, Family, family_of
from model import Config

NEUTRAL = {
    key: values
    for values, keys in [
        ((), "attention_chunk_size attention_multiplier attn_logit_softcapping clip_qkv dim_model_base kv_lora_rank"),
        ((), "final_logit_softcapping q_lora_rank query_pre_attn_scalar rope_local_base_freq scale_depth swiglu_limit"),
        ((False,), "add_cross_attention alibi attention_out_bias attn_output_gate bias is_encoder_decoder"),
        ((False,), "qk_layernorm rope_interleaved use_parallel_residual use_qk_norm"),
        ((False, 0), "attn_temperature_tuning"),
        ((0,), "first_k_dense_replace n_routed_experts n_shared_experts no_rope_layer_interval num_experts"),
        ((0,), "shared_expert_intermediate_size"),
        ((0, 1), "num_local_experts"),
        ((1,), "embedding_multiplier embedding_scale logit_scale logits_scaling partial_rotary_factor"),
        ((1,), "moe_layer_freq n_group residual_multiplier rotary_pct routed_scaling_factor scale_emb topk_group"),
        ((True,), "is_causal"),
        (("softmax",), "moe_router_activation_func scoring_func"),
        (([],), "cross_attention_layers"),
        (({},), "pruned_heads quantization_config"),
        (("silu", "swish"), "hidden_act hidden_activation"),
        (("rope", "rotary"), "position_embedding_type"),
    ]
    for key in keys.split()
}
# Keys of NEUTRAL that turn on norms of queries and keys, with their values where a family always has them.
QK_NORM_KEYS = {"use_qk_norm": (True, False), "qk_layernorm": (True, False)}
# Rope type -> the keys it reads. Another key beside them is refused.
ROPE_KEYS = {
    "default": "",
    "linear": "factor",
    "llama3": "factor low_freq_factor high_freq_factor original_max_position_embeddings",
    "yarn": "factor original_max_position_embeddings beta_fast beta_slow truncate"
    " attention_factor mscale mscale_all_dim finetuned attn_factor",  # the last two mean nothing to transformers
    "longrope": "factor original_max_position_embeddings short_factor long_factor attention_factor",
    "dynamic": "alpha factor beta_fast beta_slow mscale mscale_all_dim",  # Hunyuan's, which reads alpha alone
}

MIN_NUMBER = 1e-30  # float32 holds this and its reciprocal
MAX_SIZE = 2**24  # no dimension, vocabulary or context of a real decoder is larger; 2**40 is a broken file


class Section(dict):
    """An object of config.json. A key that is null counts as absent."""

    prefix = ""  # stands before a key in messages: "rope_scaling."

    def set_default(self, key: str, value: float) -> None:
        """Give a key that is absent, or null, this value."""
        if self.get(key) is None:
            self[key] = value

    def refused(self, key: str, reason: str) -> ValueError:
        return ValueError(f"config.json: {self.prefix}{key} = {self.get(key)!r} {reason}")

    def number(self, key: str, default: float | None = None) -> float:
        value = default if self.get(key) is None else self[key]
        if value is None:
            raise ValueError(f"config.json: {self.prefix}{key} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not MIN_NUMBER < value < 1 / MIN_NUMBER:
            raise self.refused(key, "must be a positive number, within float32's range")
        return float(value)

    def size(self, key: str, default: int | None = None, max_size: int = MAX_SIZE) -> int:
        value = self.number(key, default)
        if value != int(value) or value > max_size:
            raise self.refused(key, f"must be a whole number up to {max_size:,}")
        return int(value)

    def flag(self, key: str) -> bool:
        if self.get(key) not in (None, True, False):
            raise self.refused(key, "must be true or false")
        return bool(self.get(key))


def config_from_hf(hf: dict) -> Config:
    """The Config of a parsed config.json, in the spelling of transformers v4 or v5. ValueError names key and value of
    an unknown family, a senseless size, or arithmetic that model.py does not compute."""
    if not isinstance(hf, dict):
        raise ValueError(f"config.json: expected a JSON object, found {type(hf).__name__}")
    hf = text_part(hf)
    family = family_of(hf)
    if family is None:
        raise ValueError(
            f"config.json: model_type {hf.get('model_type')!r} is not supported; supported: {', '.join(FAMILIES)}"
        )
    hf = Section({**family.defaults, **hf})
    hf.set_default("max_position_embeddings", family.max_length)
    hf.set_default("rms_norm_eps", family.norm_eps)
    check_supported(hf, family)

    n_layers = hf.size("num_hidden_layers", max_size=4096)
    dim, n_heads = hf.size("hidden_size"), hf.size("num_attention_heads")
    n_kv_heads = hf.size("num_key_value_heads", n_heads)
    if n_heads % n_kv_heads:
        raise hf.refused("num_attention_heads", f"is not a multiple of num_key_value_heads = {n_kv_heads}")
    if hf.get("head_dim") is None and dim % n_heads:
        raise hf.refused("hidden_size", f"is not a multiple of num_attention_heads = {n_heads}")
    head_dim = hf.size("head_dim", dim // n_heads)
    if head_dim % 2:
        raise ValueError(f"config.json: head_dim = {head_dim} is odd; RoPE rotates pairs")
    if n_heads * head_dim > MAX_SIZE:
        raise ValueError(f"config.json: num_attention_heads * head_dim = {n_heads * head_dim:,} is over {MAX_SIZE:,}")

    def has_bias(key: str | bool) -> bool:
        return hf.flag(key) if isinstance(key, str) else key

    layer_windows = windows(hf, family, n_layers)
    dtype = hf.get("dtype") or hf.get("torch_dtype")  # v5, v4
    fields = expert_fields(hf, family, n_layers) | rope_fields(hf, family, head_dim)
    return Config(
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        ffn_dim=hf.size("intermediate_size"),
        vocab_size=hf.size("vocab_size"),
        max_seq_length=context_length(hf, fields),
        norm_eps=hf.number("rms_norm_eps"),
        tie_embeddings=hf.flag("tie_word_embeddings"),
        qkv_bias=has_bias(family.qkv_bias),
        out_bias=has_bias(family.out_bias),
        ffn_bias=has_bias(family.ffn_bias),
        windows=layer_windows,
        rope_types=rope_types(hf, family, layer_windows),
        dtype=dtype.removeprefix("torch.") if isinstance(dtype, str) else None,
        family=hf["model_type"],
        **(fields | family.fields | family.own_fields(hf, head_dim)),
    )


def context_length(hf: Section, fields: dict) -> int:
    """Positions that the model is good for. YaRN's original context times its factor, where a user has added YaRN to a
    file and left the rest of it, as Qwen's model cards advise."""
    length = hf.size("max_position_embeddings")
    if fields["rope_type"] != "yarn" or fields["rope_original_length"] > length:
        return length
    return max(length, round(fields["rope_original_length"] * fields["rope_factor"]))


def text_part(hf: dict) -> dict:
    """The text model's config.json, where `hf` wraps one; otherwise `hf`."""
    family = family_of(hf)
    if family is None or not family.text_models:
        return hf
    text, wrapper = hf.get("text_config"), Section(hf)
    if not isinstance(text, dict) or text.get("model_type") not in family.text_models:
        raise wrapper.refused("text_config", f"must be an object with model_type {' or '.join(family.text_models)}")
    keys = ("dtype", "torch_dtype", "quantization", "quantization_config")
    inherited = {key: hf[key] for key in keys if hf.get(key) is not None and text.get(key) is None}
    is_tied = hf.get("tie_word_embeddings") is None or hf["tie_word_embeddings"]  # the wrapper has the head
    eos = text.get("eos_token_id", hf.get("eos_token_id"))
    return {**text, **inherited, "tie_word_embeddings": is_tied, "eos_token_id": eos}


def check_supported(hf: Section, family: Family) -> None:
    """ValueError for a key whose value would change the arithmetic."""
    # A family that always norms queries and keys does so whatever these keys say, as in transformers.
    norms = QK_NORM_KEYS if family.fields.get("qk_norm") else {}
    for key, values in {**NEUTRAL, **norms, **family.supported}.items():
        if key not in family.own_keys and hf.get(key) is not None and hf[key] not in values:
            alternatives = f"supported: {' or '.join(map(repr, values))}"
            absent = "only a config.json without it, or with null, is"
            raise hf.refused(key, f"is not supported; {alternatives if values else absent}")
    if "no_rope_layers" in family.own_keys:
        return
    no_rope = hf.get("no_rope_layers") or []
    if not isinstance(no_rope, list) or not all(use == 1 for use in no_rope):
        raise hf.refused("no_rope_layers", "is not supported; every layer must use RoPE")


def expert_fields(hf: Section, family: Family, n_layers: int) -> dict:
    """Config's fields of experts; none for a dense family."""
    defaults = family.experts
    if defaults is None:
        return {}
    new_count, old_count = hf.get("num_experts"), hf.get("num_local_experts")  # v5 reads either name
    if None not in (new_count, old_count) and new_count != old_count:
        raise hf.refused("num_experts", f"and num_local_experts = {old_count!r} disagree; keep one")
    n_experts = hf.size("num_local_experts" if new_count is None else "num_experts", defaults.num_experts)
    n_chosen = hf.size("num_experts_per_tok", defaults.num_chosen)
    if n_chosen > n_experts:
        raise hf.refused("num_experts_per_tok", f"is more than the number of experts, {n_experts}")
    dense, step = hf.get("mlp_only_layers") or [], hf.size("decoder_sparse_step", 1)
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise hf.refused("mlp_only_layers", "must be null, or the numbers of layers")
    dim = hf.size("moe_intermediate_size", defaults.dim) if defaults.dim else hf.size("intermediate_size")
    shared = hf.size("shared_expert_intermediate_size", defaults.shared_dim) if defaults.shared_dim else 0
    return {
        "sparse": tuple(i not in dense and (i + 1) % step == 0 for i in range(n_layers)),
        "n_experts": n_experts,
        "n_chosen": n_chosen,
        "expert_dim": dim,
        "router_norm": hf.flag("norm_topk_prob"),
        "shared_dim": shared,
    }


def windows(hf: Section, family: Family, n_layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer. None: the layer attends to all tokens."""
    size, is_off = hf.get("sliding_window"), hf.get("use_sliding_window") is False
    if family.sliding is None and size is not None and not is_off:
        raise hf.refused("sliding_window", f"is not supported for model_type {hf['model_type']!r}")
    if family.use_sliding_window == "agrees" and size is not None and is_off:
        raise hf.refused("use_sliding_window", "contradicts sliding_window; set that to null")
    decides = family.use_sliding_window == "decides"
    slides = hf.flag("use_sliding_window") if decides else family.sliding is not None and size is not None
    window = hf.size("sliding_window") if slides else None
    layer_types = hf.get("layer_types")
    if layer_types is None:
        return tuple(window if slides and SLIDING[family.sliding](i, hf) else None for i in range(n_layers))
    window_by_type = {"full_attention": None, "sliding_attention": window}
    is_per_layer = isinstance(layer_types, list) and len(layer_types) == n_layers
    if not is_per_layer or not all(str(layer_type) in window_by_type for layer_type in layer_types):
        raise hf.refused("layer_types", f"must name full_attention or sliding_attention for each of {n_layers} layers")
    if "sliding_attention" in layer_types and window is None:
        raise ValueError("config.json: layer_types asks for sliding_attention, but no sliding_window is in use")
    if family.sliding == "every" and window is not None and "full_attention" in layer_types:
        raise ValueError(f"config.json: layer_types mixes full and sliding attention, unlike any {hf['model_type']!r}")
    return tuple(window_by_type[layer_type] for layer_type in layer_types)


def rope_types(hf: Section, family: Family, layer_windows: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """How each layer rotates queries and keys, as in Config; () where all layers rotate alike."""
    if "no_rope_layers" in family.own_keys:
        n_layers, interval, use = len(layer_windows), hf.size("no_rope_layer_interval"), hf.get("no_rope_layers")
        use = [int((i + 1) % interval != 0) for i in range(n_layers)] if use is None else use
        if not isinstance(use, list) or len(use) != n_layers or not all(layer in (0, 1) for layer in use):
            raise hf.refused("no_rope_layers", f"must be 1 or 0 for each of {n_layers} layers")
        return tuple(0 if layer else None for layer in use)
    if family.full_rope_type == family.sliding_rope_type or hf.get("sliding_window") is None:
        return ()
    return tuple(family.sliding_rope_type if window else family.full_rope_type for window in layer_windows)


def rope_fields(hf: Section, family: Family, head_dim: int) -> dict:
    """Config's RoPE fields from `rope_theta` + `rope_scaling` (transformers v4) or `rope_parameters` (v5)."""
    rope = rope_section(hf, family)
    rope_type, theta = rope["rope_type"], rope.number("rope_theta", family.rope_theta)
    if theta <= 1:
        raise ValueError(f"config.json: rope_theta = {theta} must be larger than 1")
    fields = {"rope_type": rope_type, "rope_theta": theta, "rope_local_theta": rope.number("local_theta", theta)}
    if rope_type == "dynamic":
        if "alpha" not in family.own_keys or rope.get("alpha") is None:
            raise rope.refused("rope_type", "is supported only for hunyuan_v1_dense, with alpha")
        stretched = theta * rope.number("alpha") ** (head_dim / (head_dim - 2))
        return fields | {"rope_type": "default", "rope_theta": stretched}
    if "partial_rotary_factor" in family.own_keys:
        share = rope.number("partial_rotary_factor", hf.number("partial_rotary_factor", 1.0))
        rotated_dim = int(head_dim * share)
        if share > 1 or rotated_dim % 2 or not rotated_dim:
            raise hf.refused("partial_rotary_factor", f"rotates {rotated_dim} of {head_dim} dimensions")
        fields["rope_dim"] = rotated_dim if rotated_dim < head_dim else 0
    if rope_type == "longrope":
        return fields | longrope_fields(hf, rope, fields.get("rope_dim") or head_dim)
    if rope_type != "default":
        fields["rope_factor"] = rope.number("factor")
    if rope_type == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        fields["rope_low_freq_factor"], fields["rope_high_freq_factor"] = low, high
        fields["rope_original_length"] = rope.size("original_max_position_embeddings")
        if high <= low:
            raise ValueError(f"config.json: {rope.prefix}high_freq_factor must be larger than low_freq_factor")
    if rope_type == "yarn":
        fields["rope_beta_fast"] = rope.number("beta_fast", 32.0)
        fields["rope_beta_slow"] = rope.number("beta_slow", 1.0)
        fields["rope_truncate"] = "truncate" not in rope or rope.flag("truncate")  # transformers takes null for false
        fields["rope_original_length"] = rope.size(
            "original_max_position_embeddings", hf.size("max_position_embeddings")
        )
        fields["rope_attention_factor"] = yarn_attention_factor(rope, fields["rope_factor"])
        if "llama_4_scaling_beta" in family.own_keys and rope.get("llama_4_scaling_beta") not in (None, 0):
            fields["query_scale"] = rope.number("llama_4_scaling_beta")
    return fields


def longrope_fields(hf: Section, rope: Section, rotated_dim: int) -> dict:
    """LongRoPE (arXiv:2402.13753): every pair has one stretch for short texts and one for long texts."""
    original = rope.size("original_max_position_embeddings")
    factor = rope.number("factor", hf.size("max_position_embeddings") / original)
    fields = {"rope_original_length": original}
    for key, name in (("short_factor", "rope_short"), ("long_factor", "rope_long")):
        stretches = rope.get(key)
        if not isinstance(stretches, list) or len(stretches) != rotated_dim // 2:
            raise rope.refused(key, f"must be a number for each of {rotated_dim // 2} pairs")
        fields[name] = tuple(Section({key: stretch}).number(key) for stretch in stretches)
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    return fields | {"rope_attention_factor": rope.number("attention_factor", default)}


def rope_section(hf: Section, family: Family) -> Section:
    """RoPE's object, completed by the keys that stand beside it. A value that the file holds twice must agree."""
    name = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
    local_theta = hf.get("rope_local_base_freq")
    if family.requires_rope and not hf.get(name):
        raise ValueError(f"config.json: rope_scaling is missing; {hf['model_type']} needs it")
    if family.default_rope and hf.get("rope_parameters") is None and not hf.get("rope_scaling"):
        hf, name = Section({**hf, "rope_parameters": family.default_rope}), "rope_parameters"
    if family.sliding_rope_type and isinstance(hf.get(name), dict) and "full_attention" in hf[name]:
        full, local_theta = full_rope_and_local_theta(hf, name)
        hf = Section({**hf, name: full})
    if not isinstance(hf.get(name) or {}, dict):
        raise hf.refused(name, "must be an object")
    if hf.get("rope_parameters") and hf.get("rope_scaling") and hf["rope_parameters"] != hf["rope_scaling"]:
        raise ValueError(f"config.json: rope_parameters and rope_scaling = {hf['rope_scaling']!r} disagree; keep one")
    rope = Section(hf.get(name) or {})
    rope.prefix = f"{name}."
    rope_type, v4_type = rope.get("rope_type"), rope.get("type")
    if None not in (rope_type, v4_type) and rope_type != v4_type:
        raise rope.refused("rope_type", f"and {rope.prefix}type = {v4_type!r} disagree; keep one")
    is_plain = not set(rope) - {"rope_theta", "partial_rotary_factor"}
    rope_type = rope_type or v4_type or ("default" if is_plain else None)
    if isinstance(rope_type, str):
        rope_type = family.rope_aliases.get(rope_type, rope_type)
    rope["rope_type"] = rope_type
    if not isinstance(rope_type, str) or rope_type not in ROPE_KEYS:
        raise rope.refused("rope_type", f"is not supported; supported: {', '.join(ROPE_KEYS)}")
    readable = {"rope_type", "type", "rope_theta", *family.own_keys, *ROPE_KEYS[rope_type].split()}
    for key, value in rope.items():
        is_neutral = value is None or (key == "partial_rotary_factor" and value == 1)
        if key not in readable and not is_neutral:
            raise rope.refused(key, f"is not supported with rope_type {rope_type!r}")
    # These keys may stand beside the object. v4 keeps rope_theta there.
    for key in ("original_max_position_embeddings", "rope_theta"):
        if hf.get(key) is not None and rope.get(key) not in (None, hf[key]):
            raise hf.refused(key, f"and {rope.prefix}{key} = {rope[key]!r} disagree; keep one")
        rope[key] = hf.get(key) if rope.get(key) is None else rope[key]
    rope["local_theta"] = local_theta
    return rope


def full_rope_and_local_theta(hf: Section, name: str) -> tuple[dict, object]:
    """(RoPE's object of layers that attend to all tokens, theta of sliding layers). ValueError where sliding layers
    have other settings than a theta."""
    full, sliding = (hf[name].get(f"{kind}_attention") or {} for kind in ("full", "sliding"))
    if not isinstance(full, dict) or not isinstance(sliding, dict):
        raise hf.refused(name, "must hold objects")
    is_plain = not set(sliding) - {"rope_type", "rope_theta"} and sliding.get("rope_type") in (None, "default")
    if not is_plain or set(hf[name]) - {"full_attention", "sliding_attention"}:
        raise hf.refused(name, "is not supported; sliding_attention must have a theta and no scaling")
    return full, sliding.get("rope_theta")


def yarn_attention_factor(rope: Section, factor: float) -> float:
    """YaRN (arXiv:2309.00071 eq. 22): sqrt(1/t) = 0.1 ln(s) + 1, or DeepSeek's ratio of two such terms."""
    if rope.get("attention_factor") is not None:
        return rope.number("attention_factor")
    stretch = math.log(max(factor, 1.0))
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        top, bottom = rope.number("mscale"), rope.number("mscale_all_dim")
        return (0.1 * top * stretch + 1.0) / (0.1 * bottom * stretch + 1.0)
    return 0.1 * stretch + 1.0
