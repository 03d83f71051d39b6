"""The families of models that can be loaded: one record for every model_type, which holds its
differences from Llama.

    Family      the fields that may differ, with Llama's values as defaults
    Gguf        the same for the family's GGUF files
    SLIDING     the layers with a sliding window
    FAMILIES    model_type -> Family;  family_of  the record of a config.json

A new family is one record here, and arithmetic in model.py where it needs any. Sources:
transformers, models/*/ configuration_*.py and modeling_*.py; llama.cpp, conversion/ and
src/models/.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple


class ExpertDefaults(NamedTuple):
    """transformers' values for a config.json that leaves them out."""

    num_experts: int
    num_chosen: int
    dim: int | None = None  # None: the experts have the size `intermediate_size`
    shared_dim: int = 0  # 0: there is no shared expert


class MergedExperts(NamedTuple):
    """A folder's tensors that hold all experts of a layer; merged_experts.py splits them."""

    gate_up: str = "mlp.experts.gate_up_proj"  # (experts, 2 F, D)
    down: str = "mlp.experts.down_proj"  # (experts, D, F)
    # gpt-oss's: the rows of gate and up in turn, and all matrices transposed. Others are transposed
    # where their shape says so.
    is_interleaved: bool = False


class Gguf(NamedTuple):
    """llama.cpp's files of a family."""

    architecture: str
    key: str = ""  # among families of one architecture, the key that only this family's files hold
    permutes_heads: bool = False  # are the rows of q and k stored with RoPE's pairs as neighbours?
    names: Mapping[str, list[str]] = {}  # in place of gguf.INNER
    norm_topk_prob: bool = True  # llama.cpp fixes this per architecture
    # Returns the keys that the file lacks, from a reader of its keys and the config.json so far.
    hf_keys: Callable = lambda get, hf: {}


class Family(NamedTuple):
    """A model_type's differences from Llama. `hf` in the functions is config.json, a
    config.Section."""

    # What config.json leaves out, or may say:
    defaults: Mapping[str, object] = {}  # transformers' values of keys that a file leaves out
    max_length: int = 2048  # transformers' max_position_embeddings where a file leaves it out
    norm_eps: float = 1e-6  # and its rms_norm_eps
    # Keys of config.NEUTRAL and of RoPE's object that this family computes with.
    own_keys: tuple[str, ...] = ()
    supported: Mapping[str, tuple] = {}  # key -> its supported values, beside null
    fields: Mapping[str, object] = {}  # of model.Config, the same for all its models
    # Fields of model.Config that this family alone derives from the file.
    own_fields: Callable = lambda hf, head_dim: {}
    text_models: tuple[str, ...] = ()  # of a wrapper: the model_types of its "text_config"
    # The key that turns a bias on, or whether there always is one.
    qkv_bias: str | bool = "attention_bias"
    out_bias: str | bool = "attention_bias"
    ffn_bias: str | bool = "mlp_bias"
    # Windows. use_sliding_window "decides" whether layers slide, or must agree with sliding_window.
    sliding: str | None = None  # the layers that slide, a key of SLIDING; None: no layer ever does
    use_sliding_window: str = "agrees"
    # RoPE. The types are Config.rope_types'.
    rope_theta: float = 10000.0
    full_rope_type: int | None = 0  # of layers that attend to all tokens
    sliding_rope_type: int | None = 0  # of layers with a window
    # RoPE's object where config.json has none; None refuses such a file.
    default_rope: Mapping[str, object] | None = {}
    rope_aliases: Mapping[str, str] = {}  # older names of rope types
    experts: ExpertDefaults | None = None
    # Its tensors:
    names: Mapping[str, list[str]] = {}  # in place of weight_names.INNER
    prefixes: Mapping[str, str] = {}  # of names in the file -> of names in a text model
    unused: tuple[str, ...] = ()  # prefixes of tensors that are not the text model's
    merged_experts: MergedExperts | None = None  # None: every expert has tensors of its own
    gguf: Gguf | None = None


def first_window_layer(hf) -> int:
    return hf.size("max_window_layers") if hf.get("max_window_layers") else 0


def window_period(hf) -> int:
    """sliding_window_pattern, which EXAONE writes as a word: "LLLG" is 4."""
    pattern = hf.get("sliding_window_pattern")
    is_word = isinstance(pattern, str) and re.fullmatch("L*G", pattern)
    return len(pattern) if is_word else hf.size("sliding_window_pattern")


# Family.sliding -> does layer i have a sliding window, where config.json has no layer_types?
SLIDING = {
    "every": lambda i, hf: True,
    "even": lambda i, hf: i % 2 == 0,
    "every but listed": lambda i, hf: True,  # layer_types may have others
    "listed": lambda i, hf: False,
    "three of four": lambda i, hf: i % 4 > 0,
    "later": lambda i, hf: i >= first_window_layer(hf),
    "early even": lambda i, hf: i % 2 == 0 and i < first_window_layer(hf),
    "by period": lambda i, hf: (i + 1) % window_period(hf) > 0,
}


def granite_fields(hf, head_dim: int) -> dict:
    return {
        "embed_scale": hf.number("embedding_multiplier", 1.0),
        "residual_scale": hf.number("residual_multiplier", 1.0),
        "score_scale": hf.number("attention_multiplier", 1.0) * math.sqrt(head_dim),
        "logit_scale": 1 / hf.number("logits_scaling", 1.0),
    }


def granite_swa_fields(hf, head_dim: int) -> dict:
    """A theta of 0 is a layer without RoPE. ValueError where the others differ."""
    fields = granite_fields(hf, head_dim)
    if hf.get("layer_rope_theta") is None:
        return fields
    n_layers = hf["num_hidden_layers"]
    thetas = hf.entries("layer_rope_theta", n_layers, "layers")
    theta = max(thetas)
    hf.entries("layer_rope_theta", n_layers, "layers", (0, theta))
    types = tuple(0 if layer_theta else None for layer_theta in thetas)
    return fields | {"rope_theta": theta, "rope_types": types}


QWEN = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
QWEN2 = {
    "max_length": 32768,
    "qkv_bias": True,
    "out_bias": False,
    "sliding": "later",
    "use_sliding_window": "decides",
}
# In a text alone, the three positions of a token are equal, and MRoPE is RoPE.
MROPE = ("mrope_section", "mrope_interleaved")
QWEN_VL = Family(
    {"tie_word_embeddings": False},
    text_models=("qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"),
    prefixes={"model.language_model.": "model."},
    unused=("model.visual.", "visual."),
)
GRANITE_KEYS = (
    "attention_multiplier",
    "embedding_multiplier",
    "logits_scaling",
    "residual_multiplier",
)
OFF = (False,)
NO_MLP_BIAS = {"mlp_bias": OFF}
NO_BIAS = {"attention_bias": OFF, "mlp_bias": OFF}
ALWAYS_SPARSE = {
    "decoder_sparse_step": (1,),
    "norm_topk_prob": (True,),
    "moe_intermediate_size": (),
    "mlp_only_layers": ([],),
}
NORMS_AFTER = {
    "attention_norm": ["post_attention_layernorm"],
    "ffn_norm": ["post_feedforward_layernorm"],
}

FAMILIES = {
    "llama": Family(gguf=Gguf("llama", permutes_heads=True)),
    "mistral": Family(
        {"num_key_value_heads": 8, "sliding_window": 4096},
        max_length=131072,
        supported={"attention_bias": OFF},
        sliding="every",
        gguf=Gguf("llama", "attention.sliding_window", permutes_heads=True),
    ),
    "qwen2": Family(QWEN, **QWEN2, gguf=Gguf("qwen2")),
    "qwen3": Family(
        {**QWEN, "head_dim": 128},
        max_length=32768,
        fields={"qk_norm": "heads"},
        sliding="later",
        use_sliding_window="decides",
        gguf=Gguf("qwen3"),
    ),
    "mixtral": Family(
        {"num_key_value_heads": 8},
        max_length=131072,
        norm_eps=1e-5,
        own_keys=("num_local_experts",),
        supported={"attention_bias": OFF, **ALWAYS_SPARSE},
        fields={"router_norm": True},
        sliding="every",
        rope_theta=1e6,
        experts=ExpertDefaults(8, 2),
        names={
            "ffn.router": ["block_sparse_moe.gate"],
            "ffn.experts.gate_up": [
                "block_sparse_moe.experts.{}.w1",
                "block_sparse_moe.experts.{}.w3",
            ],
            "ffn.experts.down": ["block_sparse_moe.experts.{}.w2"],
        },
        gguf=Gguf("llama", "expert_count", permutes_heads=True),
    ),
    "qwen2_moe": Family(
        {**QWEN, "num_key_value_heads": 16, "qkv_bias": True},
        max_length=32768,
        own_keys=("num_experts", "num_local_experts", "shared_expert_intermediate_size"),
        supported={"attention_bias": OFF},
        qkv_bias="qkv_bias",
        out_bias=False,
        sliding="early even",
        use_sliding_window="decides",
        experts=ExpertDefaults(60, 4, 1408, 5632),
        names={"ffn.router": ["mlp.gate", "mlp.shared_expert_gate"]},
        gguf=Gguf("qwen2moe", norm_topk_prob=False),
    ),
    "qwen3_moe": Family(
        {"num_key_value_heads": 4, "sliding_window": 4096},
        max_length=32768,
        own_keys=("num_experts", "num_local_experts"),
        fields={"qk_norm": "heads"},
        sliding="every",
        use_sliding_window="decides",
        experts=ExpertDefaults(128, 8, 768),
        gguf=Gguf("qwen3moe"),
    ),
    "gpt_oss": Family(
        {"head_dim": 64, "num_key_value_heads": 8, "attention_bias": True, "sliding_window": 128},
        max_length=131072,
        norm_eps=1e-5,
        own_keys=("num_local_experts", "swiglu_limit"),
        supported=ALWAYS_SPARSE,
        own_fields=lambda hf, head_dim: {
            "gate_limit": hf.number("swiglu_limit", 7.0),
            "gate_alpha": hf.number("swiglu_alpha", 1.702),
        },
        fields={"sinks": True, "expert_bias": True, "router_bias": True, "router_norm": True},
        sliding="even",
        rope_theta=150000.0,
        default_rope=None,
        experts=ExpertDefaults(128, 4),
        names={"ffn.router": ["mlp.router"]},
        merged_experts=MergedExperts(is_interleaved=True),
        gguf=Gguf(
            "gpt-oss",
            names={"ffn_norm": ["post_attention_norm"]},
            hf_keys=lambda get, hf: {
                "rope_scaling": hf["rope_scaling"] and hf["rope_scaling"] | {"truncate": False}
            },
        ),
    ),
    "smollm3": Family(
        {"num_key_value_heads": 4, "no_rope_layer_interval": 4, "tie_word_embeddings": True},
        max_length=32768,
        own_keys=("no_rope_layer_interval", "no_rope_layers"),
        rope_theta=2e6,
    ),
    "phi3": Family(
        max_length=4096,
        norm_eps=1e-5,
        own_keys=("partial_rotary_factor",),
        supported=NO_BIAS,
        sliding="every",
        rope_aliases={"su": "longrope", "yarn": "longrope"},
        names={"attention.qkv": ["self_attn.qkv_proj"], "ffn.gate_up": ["mlp.gate_up_proj"]},
    ),
    "granite": Family(own_keys=GRANITE_KEYS, own_fields=granite_fields),
    "granitemoe": Family(
        own_keys=(*GRANITE_KEYS, "num_local_experts"),
        own_fields=granite_fields,
        supported=ALWAYS_SPARSE,
        fields={"router_norm": True},
        experts=ExpertDefaults(8, 2),
        names={"ffn.router": ["block_sparse_moe.router.layer"]},
        merged_experts=MergedExperts(
            "block_sparse_moe.input_linear.weight",
            "block_sparse_moe.output_linear.weight",
        ),
    ),
    "granite_swa": Family(
        {"sliding_window": 128, "tie_word_embeddings": True},
        max_length=8192,
        norm_eps=1e-5,
        own_keys=GRANITE_KEYS,
        own_fields=granite_swa_fields,
        fields={"sinks": True},
        sliding="three of four",
    ),
    "olmo2": Family(
        norm_eps=1e-5,
        supported=NO_MLP_BIAS,
        fields={"qk_norm": "full", "norms_after": True},
        names=NORMS_AFTER,
    ),
    "olmo3": Family(
        {"sliding_window": 4096, "sliding_window_pattern": 4},
        norm_eps=1e-5,
        # transformers reads no other value from the file.
        supported={**NO_MLP_BIAS, "sliding_window_pattern": (4,)},
        fields={"qk_norm": "full", "norms_after": True},
        sliding="by period",
        rope_theta=5e5,
        sliding_rope_type=1,
        names=NORMS_AFTER,
    ),
    "seed_oss": Family(
        {"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
        max_length=524288,
        own_keys=("attention_out_bias",),
        out_bias="attention_out_bias",
    ),
    "ernie4_5": Family(
        {"num_key_value_heads": 2, "head_dim": 128, "tie_word_embeddings": True},
        max_length=131072,
        norm_eps=1e-5,
        supported=NO_BIAS,
        fields={"rope_interleaved": True},
        qkv_bias="use_bias",
        out_bias="use_bias",
        ffn_bias="use_bias",
        rope_theta=5e5,
    ),
    "hunyuan_v1_dense": Family(
        norm_eps=1e-5,
        own_keys=("alpha",),
        supported={"use_qk_norm": (True,)},
        fields={"qk_norm": "rotated"},
        names={
            "attention.q_norm": ["self_attn.query_layernorm"],
            "attention.k_norm": ["self_attn.key_layernorm"],
        },
    ),
    "exaone4": Family(
        {"num_key_value_heads": 32, "sliding_window": 4096, "sliding_window_pattern": 4},
        norm_eps=1e-5,
        supported=NO_BIAS,
        fields={"qk_norm": "heads", "norms_after": True},
        sliding="by period",
        full_rope_type=None,
        names=NORMS_AFTER,
    ),
    "ministral3": Family(
        {"num_key_value_heads": 8, "head_dim": 128},
        max_length=262144,
        norm_eps=1e-5,
        own_keys=("llama_4_scaling_beta", "max_position_embeddings"),
        supported=NO_BIAS,
        sliding="every",
        default_rope={
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    ),
    "ministral": Family(
        {"sliding_window": 4096},
        max_length=131072,
        supported=NO_BIAS,
        sliding="every but listed",
    ),
    "cwm": Family(
        {"head_dim": 128, "sliding_window": 8192},
        max_length=131072,
        norm_eps=1e-5,
        supported={"attention_bias": OFF},
        sliding="three of four",
        rope_theta=1e6,
        default_rope=None,
    ),
    "iquestcoder": Family(
        {"head_dim": 128},
        max_length=131072,
        norm_eps=1e-5,
    ),
    "olmoe": Family(
        max_length=4096,
        norm_eps=1e-5,
        own_keys=("num_experts", "num_local_experts"),
        fields={"qk_norm": "full"},
        experts=ExpertDefaults(64, 8),
        gguf=Gguf("olmoe", norm_topk_prob=False),
    ),
    "mellum": Family(
        {"head_dim": 128, "sliding_window": 1024, "norm_topk_prob": True},
        max_length=131072,
        own_keys=("num_experts", "num_local_experts"),
        fields={"qk_norm": "heads"},
        sliding="listed",
        sliding_rope_type=1,
        default_rope=None,
        experts=ExpertDefaults(64, 8, 896),
        unused=("mtp.",),
    ),
    "qwen2_5_vl_text": Family(
        QWEN,
        **QWEN2,
        norm_eps=1e-5,
        own_keys=MROPE,
        rope_theta=1e6,
        rope_aliases={"mrope": "default"},
    ),
    "qwen3_vl_text": Family(
        {"head_dim": 128},
        max_length=128000,
        own_keys=MROPE,
        fields={"qk_norm": "heads"},
        rope_theta=5e5,
    ),
    "qwen3_vl_moe_text": Family(
        max_length=128000,
        own_keys=(*MROPE, "num_experts", "num_local_experts"),
        supported={"norm_topk_prob": (True,)},
        fields={"qk_norm": "heads", "router_norm": True},
        rope_theta=5e5,
        experts=ExpertDefaults(60, 4, 1408),
        merged_experts=MergedExperts(),
    ),
    **dict.fromkeys(("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), QWEN_VL),
    "mimo": Family(QWEN, **QWEN2, unused=("model.mtp_layers.",)),
    "mistral3": Family(
        text_models=("mistral", "ministral3"),
        prefixes={
            "language_model.model.": "model.",
            "language_model.lm_head.": "lm_head.",
            "model.language_model.": "model.",
        },
        unused=(
            "vision_tower.",
            "multi_modal_projector.",
            "model.vision_tower.",
            "model.multi_modal_projector.",
        ),
    ),
}


def family_of(hf: Mapping) -> Family | None:
    """The record of a config.json's model_type; None where there is none."""
    model_type = hf.get("model_type")
    return FAMILIES.get(model_type) if isinstance(model_type, str) else None
