"""config.json -> model.Config. Files of transformers v4 and v5 give the same; every message names key and value.

    FAMILIES        supported architectures, each with transformers' values for keys that a file leaves out
    NEUTRAL         keys that would change the arithmetic, with the values under which they do not; null never does
"""

import math
import re

from model import Config

FAMILIES = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
    "mixtral": {"num_key_value_heads": 8},
    "qwen2_moe": {"num_key_value_heads": 16, "qkv_bias": True, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3_moe": {"num_key_value_heads": 4, "sliding_window": 4096},
    "gpt_oss": {"head_dim": 64, "num_key_value_heads": 8, "attention_bias": True, "sliding_window": 128},
    "smollm3": {"num_key_value_heads": 4, "no_rope_layer_interval": 4, "tie_word_embeddings": True},
    "phi3": {},
    "granite": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "seed_oss": {"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
    "ernie4_5": {"num_key_value_heads": 2, "head_dim": 128, "tie_word_embeddings": True},
    "hunyuan_v1_dense": {},
    "exaone4": {"num_key_value_heads": 32, "sliding_window": 4096, "sliding_window_pattern": 4},
    "ministral3": {"num_key_value_heads": 8, "head_dim": 128},
    "mimo": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},  # Qwen2's, with other tensors
}
# Where a file has none; 10000 elsewhere.
THETAS = {"mixtral": 1e6, "gpt_oss": 150000.0, "smollm3": 2e6, "olmo3": 5e5, "ernie4_5": 5e5}
MINISTRAL3_ROPE = {  # of a file that says nothing about RoPE
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
ALTERNATING = ("olmo3", "exaone4")  # of sliding_window_pattern layers the last one attends to all
TWO_ROPES = ("olmo3",)  # the sliding layers rotate by a theta of their own, and are not stretched
NESTED = ("mistral3",)  # families whose text model has a config.json inside theirs, and another model's model_type

# Sparse families: transformers' values for experts, chosen ones, their size (None: intermediate_size) and the shared.
EXPERTS = {
    "mixtral": (8, 2, None, 0),
    "qwen2_moe": (60, 4, 1408, 5632),
    "qwen3_moe": (128, 8, 768, 0),
    "gpt_oss": (128, 4, None, 0),
}
QK_NORMS = {"olmo2": "full", "olmo3": "full", "hunyuan_v1_dense": "rotated"}  # as in Config
QK_NORMS |= dict.fromkeys(("qwen3", "qwen3_moe", "exaone4"), "heads")
QWEN2 = ("qwen2", "mimo")  # whose q, k and v always have a bias, and no key for it
ALWAYS_SPARSE = ("mixtral", "gpt_oss")  # every layer; weights of chosen experts always sum to 1

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
        (("softmax",), "moe_router_activation_func scoring_func"),
        (([],), "cross_attention_layers"),
        (({},), "pruned_heads quantization_config"),
        (("silu", "swish"), "hidden_act hidden_activation"),
        (("rope", "rotary"), "position_embedding_type"),
    ]
    for key in keys.split()
}
HONOURED = {  # NEUTRAL's keys that a family computes with
    "mixtral": ("num_local_experts",),
    "qwen2_moe": ("num_experts", "num_local_experts", "shared_expert_intermediate_size"),
    "qwen3_moe": ("num_experts", "num_local_experts"),
    "gpt_oss": ("num_local_experts", "swiglu_limit"),
    "smollm3": ("no_rope_layer_interval", "no_rope_layers"),
    "phi3": ("partial_rotary_factor",),
    "granite": ("attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"),
    "seed_oss": ("attention_out_bias",),
    "hunyuan_v1_dense": ("use_qk_norm",),
}

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


def config_from_hf(hf: dict) -> Config:
    """The Config of a parsed config.json, in the spelling of transformers v4 or v5. ValueError names key and value of
    arithmetic that model.py does not compute."""
    return Config(**config_fields(hf))


def config_fields(hf: dict) -> dict:
    """Config's fields. ValueError for an unknown family, a senseless size, and arithmetic that we do not compute."""
    if not isinstance(hf, dict):
        raise ValueError(f"config.json: expected a JSON object, found {type(hf).__name__}")
    family = hf.get("model_type")
    if family in NESTED:
        hf = text_part(hf)
        family = hf.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(f"config.json: model_type {family!r} is not supported; supported: {', '.join(FAMILIES)}")
    hf = Section({**FAMILIES[family], **hf})
    check_neutral(hf, HONOURED.get(family, ()))

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
    if bias and family in ("mistral", "mixtral", "qwen2_moe", "phi3", "exaone4", "ministral3"):
        raise hf.refused("attention_bias", f"is not supported for model_type {family!r}")
    if family in ("phi3", "olmo2", "olmo3", "exaone4", "ministral3", "ernie4_5") and hf.flag("mlp_bias"):
        raise hf.refused("mlp_bias", f"is not supported for model_type {family!r}")
    if hf.get("use_qk_norm") not in (None, False, family == "hunyuan_v1_dense") or (
        family == "hunyuan_v1_dense" and hf.get("use_qk_norm") is False
    ):
        raise hf.refused("use_qk_norm", f"is not supported for model_type {family!r}")
    everywhere = family == "ernie4_5" and hf.flag("use_bias")
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
        "qkv_bias": bias or everywhere or family in QWEN2 or (family == "qwen2_moe" and hf.flag("qkv_bias")),
        "out_bias": hf.flag("attention_out_bias")
        if family == "seed_oss"
        else everywhere or (bias and family not in QWEN2),
        "ffn_bias": everywhere or hf.flag("mlp_bias"),
        "qk_norm": QK_NORMS.get(family),
        "norms_after": family in ("olmo2", "olmo3", "exaone4"),
        "rope_interleaved": family == "ernie4_5",
        "rope_types": rope_types(hf, family, n_layers),
        "sinks": family == "gpt_oss",
        "windows": windows(hf, family, n_layers),
        "dtype": dtype.removeprefix("torch.") if isinstance(dtype, str) else None,
        "family": family,
        **expert_fields(hf, family, n_layers),
        **rope_fields(hf, family, head_dim),
        **(multipliers(hf, head_dim) if family == "granite" else {}),
    }


def text_part(hf: dict) -> dict:
    """The config.json of the text model alone, of one that holds it in another."""
    if hf.get("model_type") not in NESTED:
        return hf
    text, outer = hf.get("text_config"), Section(hf)
    if not isinstance(text, dict) or text.get("model_type") not in ("mistral", "ministral3"):
        raise outer.refused("text_config", "must be an object with model_type mistral or ministral3")
    beside = ("dtype", "torch_dtype", "quantization", "quantization_config")
    kept = {key: hf[key] for key in beside if hf.get(key) is not None and text.get(key) is None}
    ties = hf.get("tie_word_embeddings")  # the outer model has the head, and ties it unless it says otherwise
    kept["tie_word_embeddings"] = True if ties is None else ties
    return {**text, **kept, "eos_token_id": text.get("eos_token_id", hf.get("eos_token_id"))}


def multipliers(hf: Section, head_dim: int) -> dict:
    """Granite's four; transformers' default of each is 1."""
    return {
        "embed_scale": hf.number("embedding_multiplier", 1.0),
        "residual_scale": hf.number("residual_multiplier", 1.0),
        "score_scale": hf.number("attention_multiplier", 1.0) * math.sqrt(head_dim),
        "logit_scale": 1 / hf.number("logits_scaling", 1.0),
    }


def rope_types(hf: Section, family: str, n_layers: int) -> tuple[int | None, ...]:
    """How each layer rotates queries and keys, as in Config; () where all do so alike."""
    if family == "smollm3":
        interval = hf.size("no_rope_layer_interval")
        use = hf.get("no_rope_layers")
        use = [int((i + 1) % interval != 0) for i in range(n_layers)] if use is None else use
        if not isinstance(use, list) or len(use) != n_layers or not all(each in (0, 1) for each in use):
            raise hf.refused("no_rope_layers", f"must be 1 or 0 for each of {n_layers} layers")
        return tuple(0 if each else None for each in use)
    slides = windows(hf, family, n_layers)
    if family == "exaone4" and hf.get("sliding_window") is not None:
        return tuple(0 if window else None for window in slides)
    if family in TWO_ROPES:
        return tuple(1 if window else 0 for window in slides)
    return ()


def check_neutral(hf: Section, honoured: tuple[str, ...]) -> None:
    for key, neutral in NEUTRAL.items():
        if key not in honoured and hf.get(key) is not None and hf[key] not in neutral:
            values = " or ".join(map(repr, neutral))
            works = f"supported: {values}" if neutral else "only a config.json without it, or with null, is"
            raise hf.refused(key, f"is not supported; {works}")
    if "no_rope_layers" in honoured:
        return
    no_rope = hf.get("no_rope_layers") or []
    if not isinstance(no_rope, list) or not all(use == 1 for use in no_rope):
        raise hf.refused("no_rope_layers", "is not supported; every layer must use RoPE")


def expert_fields(hf: Section, family: str, n_layers: int) -> dict:
    """Config's fields of experts, which dense families leave as they are."""
    if family not in EXPERTS:
        return {}
    count, n_chosen, dim, shared = EXPERTS[family]
    if (
        None not in (hf.get("num_experts"), hf.get("num_local_experts"))
        and hf["num_experts"] != hf["num_local_experts"]
    ):
        raise hf.refused("num_experts", f"and num_local_experts = {hf['num_local_experts']!r} disagree; keep one")
    count = hf.size("num_experts" if hf.get("num_experts") is not None else "num_local_experts", count)  # v4, v5
    n_chosen = hf.size("num_experts_per_tok", n_chosen)
    if n_chosen > count:
        raise hf.refused("num_experts_per_tok", f"is more than there are experts, {count}")
    fixed = family in ALWAYS_SPARSE
    dense, step = hf.get("mlp_only_layers") or [], hf.size("decoder_sparse_step", 1)
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense) or (fixed and dense):
        raise hf.refused("mlp_only_layers", f"must be null{'' if fixed else ', or the numbers of layers'}")
    for key, value in {"decoder_sparse_step": 1, "norm_topk_prob": True, "moe_intermediate_size": None}.items():
        if fixed and hf.get(key) not in (None, value):
            raise hf.refused(key, f"is not supported for model_type {family!r}")
    fields = {
        "sparse": tuple(i not in dense and (i + 1) % step == 0 for i in range(n_layers)),
        "n_experts": count,
        "n_chosen": n_chosen,
        "expert_dim": hf.size("intermediate_size") if fixed else hf.size("moe_intermediate_size", dim),
        "router_norm": fixed or hf.flag("norm_topk_prob"),
        "shared_dim": hf.size("shared_expert_intermediate_size", shared) if shared else 0,
    }
    if family == "gpt_oss":
        limits = {"gate_limit": hf.number("swiglu_limit", 7.0), "gate_alpha": hf.number("swiglu_alpha", 1.702)}
        fields |= {"expert_bias": True, "router_bias": True, **limits}
    return fields


def windows(hf: Section, family: str, n_layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer. None: the layer attends to all tokens."""
    qwen, oss = family.startswith("qwen") or family == "mimo", family == "gpt_oss"
    everywhere = family in ("mistral", "mixtral", "qwen3_moe", "phi3", "ministral3")  # or nowhere
    size, turned_off = hf.get("sliding_window"), hf.get("use_sliding_window") is False
    never = not qwen and not oss and not everywhere and family not in ALTERNATING
    if never and size is not None and not turned_off:
        raise hf.refused("sliding_window", f"is not supported for model_type {family!r}")
    if (family in ("mistral", "mixtral") or oss) and size is not None and turned_off:
        raise hf.refused("use_sliding_window", "contradicts sliding_window; set that to null")
    # Qwen slides only if use_sliding_window says so. Mistral slides wherever there is a size.
    sliding = hf.flag("use_sliding_window") if qwen else not never and size is not None
    window = hf.size("sliding_window") if sliding else None
    kinds = hf.get("layer_types")
    if kinds is None:
        # Qwen slides from layer max_window_layers on. Mistral has no such key and slides everywhere. gpt-oss slides in
        # every other layer; so does Qwen2-MoE, in transformers, and before that layer.
        first = hf.get("max_window_layers") or 0 if qwen and not everywhere else 0
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise hf.refused("max_window_layers", "must be a whole number")
        if family in ALTERNATING:
            every = pattern(hf) if window else 1
            return tuple(window if (i + 1) % every else None for i in range(n_layers))
        if oss or family == "qwen2_moe":
            return tuple(window if i % 2 == 0 and (oss or i < first) else None for i in range(n_layers))
        return tuple(window if i >= first else None for i in range(n_layers))
    known = {"full_attention": None, "sliding_attention": window}
    if not isinstance(kinds, list) or len(kinds) != n_layers or any(str(kind) not in known for kind in kinds):
        raise hf.refused("layer_types", f"must name full_attention or sliding_attention for each of {n_layers} layers")
    if "sliding_attention" in kinds and window is None:
        raise ValueError("config.json: layer_types asks for sliding_attention, but no sliding_window is in use")
    if everywhere and window is not None and "full_attention" in kinds:
        raise ValueError(f"config.json: layer_types mixes full and sliding attention, which {family!r} does not define")
    return tuple(known[kind] for kind in kinds)


def pattern(hf: Section) -> int:
    """sliding_window_pattern as a number; EXAONE's "LLLG" says 4."""
    found = hf.get("sliding_window_pattern")
    return len(found) if isinstance(found, str) and re.fullmatch("L*G", found) else hf.size("sliding_window_pattern")


def rope_fields(hf: Section, family: str, head_dim: int) -> dict:
    """Config's RoPE fields from `rope_theta` + `rope_scaling` (transformers v4) or `rope_parameters` (v5)."""
    if family == "gpt_oss" and not (hf.get("rope_parameters") or hf.get("rope_scaling")):
        raise ValueError("config.json: rope_scaling is missing, which gpt_oss does not do without")
    rope = rope_section(hf, family)
    kind, theta = rope["rope_type"], rope.number("rope_theta", THETAS.get(family, 10000.0))
    if theta <= 1:
        raise ValueError(f"config.json: rope_theta = {theta} must be larger than 1")
    fields = {"rope_type": kind, "rope_theta": theta, "rope_local_theta": rope.number("local_theta", theta)}
    if kind == "dynamic":
        if family != "hunyuan_v1_dense" or rope.get("alpha") is None:
            raise rope.refused("rope_type", "is supported for hunyuan_v1_dense with alpha alone")
        stretched = theta * rope.number("alpha") ** (head_dim / (head_dim - 2))
        return fields | {"rope_type": "default", "rope_theta": stretched}
    if family == "phi3":
        share = rope.number("partial_rotary_factor", hf.number("partial_rotary_factor", 1.0))
        turned = int(head_dim * share)
        if share > 1 or turned % 2 or not turned:
            raise hf.refused("partial_rotary_factor", f"rotates {turned} of {head_dim} dimensions")
        fields["rope_dim"] = turned if turned < head_dim else 0
    if kind == "longrope":
        return fields | longrope_fields(hf, rope, fields.get("rope_dim") or head_dim)
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
        fields["rope_truncate"] = "truncate" not in rope or rope.flag("truncate")  # transformers takes null for false
        fields["rope_original_length"] = rope.size("original_max_position_embeddings", hf["max_position_embeddings"])
        fields["rope_attention_factor"] = yarn_attention_factor(rope, fields["rope_factor"])
        if family == "ministral3" and rope.get("llama_4_scaling_beta") not in (None, 0):  # 0: no growth
            fields["query_scale"] = rope.number("llama_4_scaling_beta")
    return fields


def longrope_fields(hf: Section, rope: Section, rotated: int) -> dict:
    """LongRoPE (arXiv:2402.13753): a stretch for each pair, in short texts and in long ones."""
    original = rope.size("original_max_position_embeddings")
    factor = rope.number("factor", hf.size("max_position_embeddings") / original)
    fields = {"rope_original_length": original}
    for key, name in (("short_factor", "rope_short"), ("long_factor", "rope_long")):
        found = rope.get(key)
        if not isinstance(found, list) or len(found) != rotated // 2:
            raise rope.refused(key, f"must be a number for each of {rotated // 2} pairs")
        fields[name] = tuple(Section({key: each}).number(key) for each in found)
    usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    return fields | {"rope_attention_factor": rope.number("attention_factor", usual)}


def rope_section(hf: Section, family: str) -> Section:
    """The object with RoPE's keys, completed by what stands beside it. What a file says twice must agree."""
    name = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
    local = hf.get("rope_local_base_freq")
    if family == "ministral3" and hf.get("rope_parameters") is None and not hf.get("rope_scaling"):
        hf = Section({**hf, "rope_parameters": MINISTRAL3_ROPE})
        name = "rope_parameters"
    if family in TWO_ROPES and isinstance(hf.get(name), dict) and "full_attention" in hf[name]:
        full, local = two_ropes(hf, name)
        hf = Section({**hf, name: full})
    if not isinstance(hf.get(name) or {}, dict):
        raise hf.refused(name, "must be an object")
    if hf.get("rope_parameters") and hf.get("rope_scaling") and hf["rope_parameters"] != hf["rope_scaling"]:
        raise ValueError(f"config.json: rope_parameters and rope_scaling = {hf['rope_scaling']!r} disagree; keep one")
    rope = Section(hf.get(name) or {})
    rope.where = f"{name}."
    if family == "phi3" and rope.get("type", rope.get("rope_type")) in ("su", "yarn"):  # its older names of longrope
        rope.pop("type", None)
        rope["rope_type"] = "longrope"
    kind, old_kind = rope.get("rope_type"), rope.get("type")
    if None not in (kind, old_kind) and kind != old_kind:
        raise rope.refused("rope_type", f"and {rope.where}type = {old_kind!r} disagree; keep one")
    said_nothing = not set(rope) - {"rope_theta", "partial_rotary_factor"}
    kind = rope["rope_type"] = kind or old_kind or ("default" if said_nothing else None)
    if not isinstance(kind, str) or kind not in ROPE_KEYS:
        raise rope.refused("rope_type", f"is not supported; supported: {', '.join(ROPE_KEYS)}")
    for key, value in rope.items():
        harmless = key in ("rope_type", "type", "rope_theta") or (key == "partial_rotary_factor" and value in (None, 1))
        harmless |= family == "phi3" and key == "partial_rotary_factor"
        harmless |= family == "ministral3" and key in ("llama_4_scaling_beta", "max_position_embeddings")
        if not harmless and key not in ROPE_KEYS[kind].split() and value is not None:
            raise rope.refused(key, f"is not supported with rope_type {kind!r}")
    # These keys may stand beside the object. v4 keeps rope_theta there.
    for key in ("original_max_position_embeddings", "rope_theta"):
        if hf.get(key) is not None and rope.get(key) not in (None, hf[key]):
            raise hf.refused(key, f"and {rope.where}{key} = {rope[key]!r} disagree; keep one")
        rope[key] = hf.get(key) if rope.get(key) is None else rope[key]
    rope["local_theta"] = local
    return rope


def two_ropes(hf: Section, name: str) -> tuple[dict, object]:
    """(what layers that attend to all tokens rotate by, theta of the sliding ones), which must not be stretched."""
    full, sliding = (hf[name].get(f"{kind}_attention") or {} for kind in ("full", "sliding"))
    if not isinstance(full, dict) or not isinstance(sliding, dict):
        raise hf.refused(name, "must hold objects")
    plain = not set(sliding) - {"rope_type", "rope_theta"} and sliding.get("rope_type") in (None, "default")
    if not plain or set(hf[name]) - {"full_attention", "sliding_attention"}:
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
