"""config.json -> model.Config. Files of transformers v4 and v5 give the same; every message names
key and value.

    config_from_hf    the Config of a parsed file;  text_part  the text model's file inside another
                      model's
    Section           an object of the file, whose values are checked as they are read

families.py holds the tables: the keys, and the differences between model_types.
"""

import math
from collections.abc import Mapping

from decoding.errors import UserError
from loading.families import (
    COUNT_NAMES,
    EXPERT_FIELDS,
    EXPERT_NAMES,
    FAMILIES,
    FIELDS,
    LAYER_KEYS,
    NEUTRAL,
    SLIDING,
    SPARSE_KEYS,
    Family,
    family_of,
)
from loading.plain_files import one_line, refused, short_repr
from model import Config

# Keys that turn on norms of queries and keys. A family that always has these norms has them
# whatever the keys say, as in transformers.
QK_NORM_KEYS = ("use_qk_norm", "qk_layernorm")
# Rope type -> the keys that it accepts, of which it may ignore some. Others are refused.
ROPE_KEYS = {
    "default": "",
    "linear": "factor",
    "llama3": "factor low_freq_factor high_freq_factor original_max_position_embeddings",
    "yarn": "factor original_max_position_embeddings beta_fast beta_slow truncate"
    # transformers ignores finetuned and attn_factor.
    " attention_factor mscale mscale_all_dim finetuned attn_factor",
    "longrope": "factor original_max_position_embeddings short_factor long_factor attention_factor",
    # Hunyuan's, which ignores all of these; it reads alpha, of its families' rope_keys.
    "dynamic": "factor beta_fast beta_slow mscale mscale_all_dim",
}
MIN_NUMBER = 1e-30  # float32 holds this and its reciprocal
MAX_SIZE = 2**24  # of a dimension, vocabulary or context; real ones stay far below


class Section(dict):
    """An object of config.json. `get` gives None for a key that is null or absent. A family's
    defaults fill keys that are absent (`config_from_hf`); for a key that is null, its reader
    decides."""

    prefix = ""  # stands before a key in messages: "rope_scaling."

    def refused(self, key: str, reason: str) -> UserError:
        return refused(f"config.json: {self.prefix}{one_line(key)}", self.get(key), reason)

    def read(self, key: str, kind: type, default: float | None = None) -> object:
        """A value of this kind: float, int or bool."""
        if kind is bool:
            return self.flag(key)
        return self.size(key, default) if kind is int else self.number(key, default)

    def number(self, key: str, default: float | None = None) -> float:
        value = default if self.get(key) is None else self[key]
        if value is None:
            raise UserError(f"config.json: {self.prefix}{key} is missing")
        if type(value) not in (int, float) or not MIN_NUMBER < value < 1 / MIN_NUMBER:
            raise self.refused(key, "must be a positive number, within float32's range")
        return float(value)

    def size(self, key: str, default: int | None = None, max_size: int = MAX_SIZE) -> int:
        value = self.number(key, default)
        if value != int(value) or value > max_size:
            raise self.refused(key, f"must be a whole number up to {max_size:,}")
        return int(value)

    def count(self, key: str) -> int:
        """A size that may be 0."""
        return self.size(key) if self.get(key) else 0

    def flag(self, key: str) -> bool:
        if self.get(key) not in (None, True, False):
            raise self.refused(key, "must be true or false")
        return bool(self.get(key))

    def entries(self, key: str, count: int, unit: str, allowed: tuple = ()) -> list:
        """The list at `key`: an entry for each of `count` units, such as layers, out of `allowed`;
        without `allowed` any entries, which the caller checks."""
        values = self.get(key)
        is_complete = isinstance(values, list) and len(values) == count
        if not is_complete or (allowed and not all(value in allowed for value in values)):
            choice = " or ".join(map(str, allowed)) or "a number"
            raise self.refused(key, f"must be {choice} for each of {count} {unit}")
        return values

    def agreed(self, key: str, other: "Section", other_key: str) -> object:
        """The value of a setting that a file may hold in two places. UserError where both have
        one, and the two differ."""
        value = self.get(key)
        other_value = other.get(other_key)
        if None not in (value, other_value) and value != other_value:
            name = other.prefix + other_key
            raise self.refused(key, f"and {name} = {short_repr(other_value)} disagree; keep one")
        return other_value if value is None else value


# --------------------------------------------------------------------------------------- the Config


def config_from_hf(hf: dict) -> Config:
    """The Config of a parsed config.json, in the spelling of transformers v4 or v5. UserError
    names key and value of an unknown family, a senseless size, or arithmetic that model.py does not
    compute."""
    if not isinstance(hf, dict):
        raise UserError(f"config.json: expected a JSON object, found {type(hf).__name__}")
    hf = text_part(hf)
    family = family_of(hf)
    if family is None:
        supported = ", ".join(FAMILIES)
        raise Section(hf).refused("model_type", f"is not supported; supported: {supported}")
    hf = Section({**family.defaults, **hf})
    n_layers = hf.size("num_hidden_layers", max_size=4096)
    check_supported(hf, family, n_layers)
    fields = scalar_fields(hf, family)
    layer_windows = windows(hf, family, n_layers)
    head_dim = fields["head_dim"]
    fields |= rope_fields(hf, family, head_dim, fields["max_seq_length"])
    fields |= expert_fields(hf, family, n_layers)
    dtype = hf.get("dtype") or hf.get("torch_dtype")  # v5, v4
    fields |= {
        "windows": layer_windows,
        "rope_types": rope_types(hf, family, layer_windows, fields["rope_theta"]),
        "dtype": str(dtype).removeprefix("torch.") if dtype else None,
        "family": hf["model_type"],
    }
    return Config(**(fields | family.fields | family.own_fields(hf)))


def scalar_fields(hf: Section, family: Family) -> dict:
    """Config's fields of FIELDS that the family reads, and those of biases."""
    dim = hf.size("hidden_size")
    n_heads = hf.size("num_attention_heads")
    if hf.get("head_dim") is None and dim % n_heads:
        raise hf.refused("hidden_size", f"is not a multiple of num_attention_heads = {n_heads}")
    head_dim = hf.size("head_dim", dim // n_heads)
    if head_dim % 2:
        raise UserError(f"config.json: head_dim = {head_dim} is odd; RoPE rotates pairs")
    # For keys that are null, or absent without a default of the family's.
    defaults = family.defaults | {"num_key_value_heads": n_heads, "head_dim": head_dim}
    fields = {}
    for key, field in FIELDS.items():
        # Fields without neutral values are every family's; others are of those with a default.
        if field.name and (field.neutral is None or key in family.defaults):
            value = hf.read(key, field.kind, defaults.get(key))
            fields[field.name] = field.convert(value, head_dim)
    n_kv_heads = fields["n_kv_heads"]
    if n_heads % n_kv_heads:
        raise hf.refused(
            "num_attention_heads", f"is not a multiple of num_key_value_heads = {n_kv_heads}"
        )
    for name in ("qkv_bias", "out_bias", "ffn_bias"):
        key = getattr(family, f"has_{name}")
        fields[name] = hf.flag(key) if isinstance(key, str) else key
    return fields


def text_part(hf: dict) -> dict:
    """The text model's config.json, where `hf` wraps one; otherwise `hf`."""
    family = family_of(hf)
    if family is None or not family.text_models:
        return hf
    # Qwen2.5-VL was published without text_config: its keys stand next to the wrapper's.
    text = hf.get("text_config", hf | {"model_type": f"{hf['model_type']}_text"})
    if not isinstance(text, dict) or text.get("model_type") not in family.text_models:
        supported = " or ".join(family.text_models)
        raise Section(hf).refused("text_config", f"must be an object with model_type {supported}")
    inherited = ("dtype", "torch_dtype", "quantization", "quantization_config", "eos_token_id")
    text = text | {key: hf[key] for key in inherited if text.get(key) is None and key in hf}
    # The wrapper has the head, which it ties unless it says otherwise.
    return text | {"tie_word_embeddings": hf.get("tie_word_embeddings", True)}


def check_supported(hf: Section, family: Family, n_layers: int) -> None:
    """UserError for a key whose value would change the arithmetic."""
    for key, values in supported_values(family, n_layers).items():
        if hf.get(key) not in (None, *values):
            alternatives = f"supported: {' or '.join(map(repr, values))}"
            absent = "only a config.json without it, or with null, is"
            raise hf.refused(key, f"is not supported; {alternatives if values else absent}")


def supported_values(family: Family, n_layers: int) -> dict[str, tuple]:
    """Keys -> the values that are accepted besides null: those under which a key that the family
    does not read changes nothing, and those of the family's `supported`."""
    supported = NEUTRAL | {
        "no_rope_layers": ([], [1] * n_layers),
        "moe_layer_end_index": (-1, n_layers - 1),
    }
    if family.fields.get("qk_norm"):
        supported |= dict.fromkeys(QK_NORM_KEYS, (True, False))
    if family.fields.get("router_sigmoid"):
        supported["scoring_func"] = ("sigmoid", "noaux_tc")  # the latter is dots.llm1's name
    read_keys = {*family.defaults, family.has_qkv_bias, family.has_out_bias, family.has_ffn_bias}
    if family.experts:
        read_keys.update(family.experts, SPARSE_KEYS)
    return {key: supported[key] for key in supported if key not in read_keys} | family.supported


def expert_fields(hf: Section, family: Family, n_layers: int) -> dict:
    """Config's fields of experts; none for a dense family."""
    if not family.experts:
        return {}
    experts = read_experts(hf, family.experts, n_layers)
    fields = {
        field.name: experts.read(key, field.kind)
        for key, field in EXPERT_FIELDS.items()
        if field.name and key in experts
    }
    if fields["experts_per_token"] > fields["n_experts"]:
        raise experts.refused(
            "num_experts_per_tok", f"is more than the number of experts, {fields['n_experts']}"
        )
    fields.setdefault("expert_dim", hf.size("intermediate_size"))
    fields.setdefault("shared_dim", fields["expert_dim"] * experts.count("n_shared_experts"))
    return fields | {"sparse": sparse_layers(experts, n_layers)}


def read_experts(hf: Section, defaults: Mapping[str, object], n_layers: int) -> Section:
    """The keys of experts that the family reads, by their names in EXPERT_FIELDS or LAYER_KEYS."""
    experts = Section()
    for own_key, default in defaults.items():
        key = EXPERT_NAMES.get(own_key, own_key)
        for name in COUNT_NAMES.get(key, own_key).split():
            value = hf.get(name)
            if isinstance(value, list) and key not in LAYER_KEYS:
                # Hunyuan repeats a value for each layer; all must be equal.
                value = hf.entries(name, n_layers, "layers", tuple(value[:1]))[0]
            # A Section of its own, so that messages have the file's own name.
            entry = Section({name: value})
            field = EXPERT_FIELDS.get(key)
            if value is not None and field and field.name:
                entry.read(name, field.kind)  # for its UserError
            # Several names may hold it, if their values are equal.
            experts[key] = experts.agreed(key, entry, name)
        if experts[key] is None:
            experts[key] = default
    return experts


def sparse_layers(experts: Section, n_layers: int) -> tuple[bool, ...]:
    """For each layer: is its feed-forward made of experts? `experts`: as of read_experts."""
    if experts.get("mlp_layer_types") is not None:
        types = experts.entries("mlp_layer_types", n_layers, "layers", ("dense", "sparse"))
        return tuple(layer_type == "sparse" for layer_type in types)
    dense = experts.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise experts.refused("mlp_only_layers", "must be null, or the numbers of layers")
    dense = {*dense, *range(experts.count("first_k_dense_replace"))}
    step = experts.size("decoder_sparse_step", 1)
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(n_layers))


# ------------------------------------------------------------------------------- windows of layers


def windows(hf: Section, family: Family, n_layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer. None: the layer attends to all tokens."""
    window = window_in_use(hf, family)
    if hf.get("layer_types") is not None:
        window_by_type = {}
        if window is None or family.sliding != "every":
            window_by_type["full_attention"] = None
        if window is not None:
            window_by_type["sliding_attention"] = window
        unit = f"layers with sliding_window = {window}"
        layer_types = hf.entries("layer_types", n_layers, unit, tuple(window_by_type))
        return tuple(window_by_type[layer_type] for layer_type in layer_types)
    if window is None:
        return (None,) * n_layers
    slides = SLIDING[family.sliding]
    return tuple(window if slides(layer, hf) else None for layer in range(n_layers))


def window_in_use(hf: Section, family: Family) -> int | None:
    """The size of sliding windows, None where no layer has one."""
    if family.switches_windows:
        return hf.size("sliding_window") if hf.flag("use_sliding_window") else None
    if hf.get("sliding_window") is None:
        return None
    is_off = hf.get("use_sliding_window") is False
    if family.sliding is None and not is_off:
        raise hf.refused("sliding_window", f"is not supported for model_type {hf['model_type']!r}")
    if family.sliding is not None and is_off:
        raise hf.refused("use_sliding_window", "contradicts sliding_window; set that to null")
    return None if is_off else hf.size("sliding_window")


def rope_types(
    hf: Section, family: Family, layer_windows: tuple, theta: float
) -> tuple[int | None, ...]:
    """How each layer rotates queries and keys, as in Config; () where all layers rotate alike."""
    n_layers = len(layer_windows)
    rotates = []
    if hf.get("layer_rope_theta"):
        rotates = hf.entries("layer_rope_theta", n_layers, "layers", (theta, 0))
    elif "no_rope_layers" in family.defaults:
        interval = hf.size("no_rope_layer_interval")
        rotates = [(i + 1) % interval > 0 for i in range(n_layers)]
        if hf.get("no_rope_layers") is not None:
            rotates = hf.entries("no_rope_layers", n_layers, "layers", (1, 0))
    if rotates:
        return tuple(0 if layer else None for layer in rotates)
    if family.full_rope_type == family.sliding_rope_type or hf.get("sliding_window") is None:
        return ()
    return tuple(
        family.sliding_rope_type if window else family.full_rope_type for window in layer_windows
    )


# -------------------------------------------------------------------------------------------- RoPE


def rope_fields(hf: Section, family: Family, head_dim: int, max_length: int) -> dict:
    """Config's RoPE fields from `rope_theta` + `rope_scaling` (transformers v4) or
    `rope_parameters` (v5)."""
    rope, local_rope = stored_rope(hf, family)
    rope_type = read_rope_type(rope, family)
    # These may stand beside the object, where v4 keeps rope_theta.
    for key in ("original_max_position_embeddings", "rope_theta"):
        rope[key] = hf.agreed(key, rope, key)
    theta = rope.number("rope_theta", family.rope_theta)
    if theta <= 1:
        raise UserError(f"config.json: rope_theta = {theta} must be larger than 1")
    fields = {
        "rope_type": rope_type,
        "rope_theta": theta,
        "rope_local_theta": local_rope.number("rope_theta", theta),
    }
    if rope_type == "dynamic":
        if rope.get("alpha") is None:
            raise rope.refused("rope_type", "is supported only for Hunyuan, with alpha")
        if head_dim < 4:
            raise rope.refused("rope_type", f"needs a head_dim of 4 or more, not {head_dim}")
        stretched = theta * rope.number("alpha") ** (head_dim / (head_dim - 2))
        return fields | {"rope_type": "default", "rope_theta": stretched}
    rope_dim = rotated_dim(hf, rope, family, head_dim)
    if rope_dim < head_dim:
        fields["rope_dim"] = rope_dim
    if rope_type == "longrope":
        return fields | longrope_fields(rope, rope_dim, max_length)
    if rope_type == "default":
        return fields
    factor = rope.number("factor")
    fields["rope_factor"] = factor
    if rope_type == "llama3":
        fields |= llama3_fields(rope)
    if rope_type == "yarn":
        fields |= yarn_fields(rope, factor, max_length)
    return fields


def rope_object(hf: Section, family: Family) -> tuple[str, dict]:
    """(name, RoPE's object): rope_scaling in v4, rope_parameters in v5, or the family's default."""
    # As in transformers, {} in v5 means no scaling, and {} in v4 is as good as absent.
    v5 = hf.get("rope_parameters")
    v4 = hf.get("rope_scaling") or None
    if v5 and v4:
        hf.agreed("rope_parameters", hf, "rope_scaling")  # refuses two that differ
    name = "rope_parameters" if v5 or v4 is None else "rope_scaling"
    stored = hf.get(name)
    if stored is None:
        stored = family.default_rope
    if not isinstance(stored, dict):
        raise hf.refused(name, "must be an object")
    return name, stored


def stored_rope(hf: Section, family: Family) -> tuple[Section, Section]:
    """RoPE's object, and that of layers with sliding windows, which has at most a theta of its
    own."""
    name, stored = rope_object(hf, family)
    local = Section({"rope_theta": hf.get("rope_local_base_freq")})
    # Two types of layers, neither None nor 0: v5 may have an object for each.
    if family.sliding_rope_type and "full_attention" in stored:
        sliding = stored.get("sliding_attention") or {}
        stored = stored["full_attention"]
        if not isinstance(stored, dict) or not isinstance(sliding, dict):
            raise hf.refused(name, "must hold objects")
        local.update(sliding)
        if read_rope_type(local, family) != "default":
            raise hf.refused(name, "is refused: sliding_attention must have a theta and no scaling")
    rope = Section(stored)
    rope.prefix = f"{name}."
    return rope, local


def read_rope_type(rope: Section, family: Family) -> str:
    """The type of RoPE's object, one of ROPE_KEYS, which `rope` then holds as rope_type. UserError
    for another type, and for a key that the type does not accept.

    The key is `type` in older files, and some have both, one with an alias ("su") of the other's
    value. An object with a theta alone scales nothing."""
    for key in ("rope_type", "type"):
        rope[key] = family.rope_aliases.get(str(rope.get(key)), rope.get(key))
    rope_type = rope.agreed("rope_type", rope, "type")
    stored_keys = {key for key, value in rope.items() if value is not None}
    if rope.get("partial_rotary_factor") == 1 or "partial_rotary_factor" in family.defaults:
        stored_keys.discard("partial_rotary_factor")
    if not rope_type and stored_keys <= {"rope_theta", "partial_rotary_factor"}:
        rope_type = "default"
    if str(rope_type) not in ROPE_KEYS:
        key = "rope_type" if rope["type"] is None else "type"
        raise rope.refused(key, f"is not supported; supported: {', '.join(ROPE_KEYS)}")
    rope["rope_type"] = rope_type  # for messages, where the file says `type` or has no type
    readable = {"rope_type", "type", "rope_theta", *family.rope_keys, *ROPE_KEYS[rope_type].split()}
    if rope_type != "yarn":
        readable.discard("llama_4_scaling_beta")  # only yarn_fields reads it
    if unread := sorted(stored_keys - readable):
        raise rope.refused(unread[0], f"is not supported with rope_type {rope_type!r}")
    return rope_type


def rotated_dim(hf: Section, rope: Section, family: Family, head_dim: int) -> int:
    """How many dimensions of a head rotate: all of them, or the share that partial_rotary_factor
    says."""
    if "partial_rotary_factor" not in family.defaults:
        return head_dim
    default = hf.size("rotary_dim", head_dim) / head_dim  # MiniMax's key
    default = hf.number("partial_rotary_factor", default)
    share = rope.number("partial_rotary_factor", default)
    dim = int(head_dim * share)
    if share > 1 or dim % 2 or not dim:
        raise hf.refused("partial_rotary_factor", f"rotates {dim} of {head_dim} dimensions")
    return dim


def llama3_fields(rope: Section) -> dict:
    low = rope.number("low_freq_factor")
    high = rope.number("high_freq_factor")
    if high <= low:
        raise rope.refused("high_freq_factor", f"must be larger than low_freq_factor = {low}")
    return {
        "rope_low_freq_factor": low,
        "rope_high_freq_factor": high,
        "rope_original_length": rope.size("original_max_position_embeddings"),
    }


def yarn_fields(rope: Section, factor: float, max_length: int) -> dict:
    original = rope.size("original_max_position_embeddings", max_length)
    fields = {
        "rope_beta_fast": rope.number("beta_fast", 32.0),
        "rope_beta_slow": rope.number("beta_slow", 1.0),
        # transformers reads null as false.
        "rope_truncate": "truncate" not in rope or rope.flag("truncate"),
        "rope_original_length": original,
        "rope_attention_factor": yarn_attention_factor(rope, factor),
    }
    if original <= max_length:
        # Qwen's model cards tell users to add YaRN without raising max_position_embeddings.
        fields["max_seq_length"] = max(max_length, round(original * factor))
    if rope.get("llama_4_scaling_beta"):
        fields["query_scale"] = rope.number("llama_4_scaling_beta")
    return fields


def yarn_attention_factor(rope: Section, factor: float) -> float:
    """YaRN (arXiv:2309.00071 eq. 22): sqrt(1/t) = 0.1 ln(s) + 1, or DeepSeek's ratio of two such
    terms."""
    log_factor = math.log(max(factor, 1.0))
    default = 0.1 * log_factor + 1.0
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        numerator = 0.1 * rope.number("mscale") * log_factor + 1.0
        default = numerator / (0.1 * rope.number("mscale_all_dim") * log_factor + 1.0)
    return rope.number("attention_factor", default)


def longrope_fields(rope: Section, rope_dim: int, max_length: int) -> dict:
    """LongRoPE (arXiv:2402.13753): every pair has one stretch for short texts and one for long
    texts."""
    original = rope.size("original_max_position_embeddings")
    if original < 2:
        raise rope.refused("original_max_position_embeddings", "must be at least 2")
    factor = rope.number("factor", max_length / original)
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return {
        "rope_original_length": original,
        "rope_short": read_stretches(rope, "short_factor", rope_dim // 2),
        "rope_long": read_stretches(rope, "long_factor", rope_dim // 2),
        "rope_attention_factor": rope.number("attention_factor", default),
    }


def read_stretches(rope: Section, key: str, num_pairs: int) -> tuple[float, ...]:
    values = rope.entries(key, num_pairs, "pairs")
    return tuple(Section({key: value}).number(key) for value in values)
