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


class MergedExperts(NamedTuple):
    """A folder's tensors that hold all experts of a layer; merged_experts.py splits them."""

    gate_up: str = "mlp.experts.gate_up_proj"  # (experts, 2 F, D)
    down: str = "mlp.experts.down_proj"  # (experts, D, F)
    # gpt-oss's: the rows of gate and up in turn, and matrices transposed. Others are transposed if
    # their shape says so.
    is_gpt_oss: bool = False


class Gguf(NamedTuple):
    """llama.cpp's files of a family."""

    architecture: str
    key: str = ""  # among families of one architecture, the key that only this family's files hold
    permutes_heads: bool = False  # are the rows of q and k stored with RoPE's pairs as neighbours?
    names: Mapping[str, list[str]] = {}  # in place of gguf.INNER
    norm_topk_prob: bool = True  # llama.cpp's value where a file has none
    # Keys of experts in gguf_metadata.EXPERTS -> the family's own.
    expert_names: Mapping[str, str] = {}
    # The architecture's own keys -> their supported values; None: any, which hf_keys reads.
    keys: Mapping[str, tuple | None] = {}
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
    default_rope: Mapping[str, object] = {}  # RoPE's object where config.json has none
    rope_aliases: Mapping[str, str] = {}  # older names of rope types
    # The keys of experts that it reads, with transformers' values where a file leaves them out
    # (None: the file must have it, or it says nothing). Other such keys are ignored.
    experts: Mapping[str, object] | None = None
    # Its tensors:
    names: Mapping[str, list[str]] = {}  # in place of weight_names.INNER
    prefixes: Mapping[str, str] = {}  # of names in the file -> of names in a text model
    unused: tuple[str, ...] = ()  # prefixes of tensors that are not the text model's
    merged_experts: MergedExperts | None = None  # None: every expert has tensors of its own
    gguf: Gguf | None = None


def window_period(hf) -> int:
    """sliding_window_pattern, which EXAONE writes as a word: "LLLG" is 4."""
    pattern = hf.get("sliding_window_pattern")
    is_word = isinstance(pattern, str) and re.fullmatch("L*G", pattern)
    return len(pattern) if is_word else hf.size("sliding_window_pattern")


# Family.sliding -> does layer i have a sliding window, where config.json has no layer_types?
SLIDING = {
    "every": lambda i, hf: True,
    "even": lambda i, hf: i % 2 == 0,
    "listed": lambda i, hf: False,
    "three of four": lambda i, hf: i % 4 > 0,
    "later": lambda i, hf: i >= hf.count("max_window_layers"),
    "early even": lambda i, hf: i % 2 == 0 and i < hf.count("max_window_layers"),
    "by period": lambda i, hf: (i + 1) % window_period(hf) > 0,
}


def granite_fields(hf, head_dim: int) -> dict:
    return {
        "embed_scale": hf.number("embedding_multiplier", 1.0),
        "residual_scale": hf.number("residual_multiplier", 1.0),
        "score_scale": hf.number("attention_multiplier", 1.0) * math.sqrt(head_dim),
        "logit_scale": 1 / hf.number("logits_scaling", 1.0),
    }


def granite_keys(get: Callable, hf: dict) -> dict:
    """llama.cpp takes a 0 for a key that the file lacks."""
    return {
        "attention_multiplier": get("attention.scale") or 1 / math.sqrt(hf["head_dim"]),
        "embedding_multiplier": get("embedding_scale") or 1.0,
        "residual_multiplier": get("residual_scale") or 1.0,
        "logits_scaling": get("logit_scale") or 1.0,
    }


def ministral3_keys(get: Callable, hf: dict) -> dict:
    """Mistral Small 3 has the same architecture, without the queries' scale."""
    scaling = hf["rope_scaling"] or {}
    log_multiplier = get("rope.scaling.yarn_log_multiplier")
    if log_multiplier:
        scaling = {**scaling, "mscale": 1.0, "mscale_all_dim": log_multiplier}
    beta = get("attention.temperature_scale")
    if beta:
        return {"rope_scaling": {**scaling, "llama_4_scaling_beta": beta}}
    return {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "rope_scaling": scaling,
    }


def gemma3_fields(hf, head_dim: int) -> dict:
    return {
        "embed_scale": math.sqrt(hf.size("hidden_size")),
        "score_scale": math.sqrt(head_dim / hf.number("query_pre_attn_scalar")),
    }


def gemma3_keys(get: Callable, hf: dict) -> dict:
    """llama.cpp tells the 27B model, which scales its queries by another number, by its layers."""
    is_27b = hf["num_hidden_layers"] == 62
    scalar = hf["hidden_size"] // hf["num_attention_heads"] if is_27b else hf["head_dim"]
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_act": None,
        "query_pre_attn_scalar": scalar,
        "rope_local_base_freq": get("rope.freq_base_swa", 10000.0),
    }


def experts(
    num_experts: int | None,
    num_chosen: int | None,
    dim: int | None = None,
    **others: object,
) -> dict:
    """Family.experts. Without a `dim`, experts have that of a dense feed-forward."""
    dim_key = "moe_intermediate_size" if dim else "intermediate_size"
    sizes = {"num_experts": num_experts, "num_experts_per_tok": num_chosen, dim_key: dim}
    return sizes | others


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
# Names in wrappers, as published by their makers and by MLX, and as transformers 5 saves them.
LANGUAGE_MODEL = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
QWEN_VL = Family(
    text_models=("qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"),
    prefixes=LANGUAGE_MODEL,
    unused=("model.visual.", "visual.", "vision_tower."),
)
VISION_TOWER = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)
GRANITE_KEYS = (
    "attention_multiplier",
    "embedding_multiplier",
    "logits_scaling",
    "residual_multiplier",
)
GRANITE_GGUF = {
    "permutes_heads": True,
    "keys": {
        "attention.scale": None,
        "embedding_scale": None,
        "logit_scale": None,
        "residual_scale": None,
        "rope.scaling.finetuned": (True,),  # llama.cpp does not rotate otherwise
    },
    "hf_keys": granite_keys,
}
OFF = (False,)
NO_MLP_BIAS = {"mlp_bias": OFF}
WEIGHTED = {"norm_topk_prob": True, "routed_scaling_factor": 1.0}
SOME_SPARSE = {"decoder_sparse_step": 1, "mlp_only_layers": None, "norm_topk_prob": None}
NO_BIAS = {"attention_bias": OFF, "mlp_bias": OFF}
NUM_EXPERTS = {"num_local_experts": "num_experts"}
ALWAYS_SPARSE = {
    "decoder_sparse_step": (1,),
    "norm_topk_prob": (True,),
    "moe_intermediate_size": (),
    "mlp_only_layers": ([],),
}
# A router as DeepSeek-V3's with one group of experts.
SIGMOID_ROUTER = {"router_sigmoid": True, "selection_bias": True}
SIGMOID = {"scoring_func": ("sigmoid", "noaux_tc")}  # the latter is dots.llm1's name
MTP_LAYER = ("model.layers.{n_layers}.",)  # it predicts further ahead
MIXTRAL_NAMES = {
    "ffn.router": ["block_sparse_moe.gate"],
    "ffn.experts": ["block_sparse_moe.e_score_correction_bias"],
    "ffn.experts.gate_up": [
        "block_sparse_moe.experts.{}.w1",
        "block_sparse_moe.experts.{}.w3",
    ],
    "ffn.experts.down": ["block_sparse_moe.experts.{}.w2"],
}
SHARED_MLP = {
    "ffn.shared.gate_up": ["mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"],
    "ffn.shared.down": ["mlp.shared_mlp.down_proj"],
}
HUNYUAN_NAMES = {
    **SHARED_MLP,
    "attention.q_norm": ["self_attn.query_layernorm"],
    "attention.k_norm": ["self_attn.key_layernorm"],
    "ffn.router": ["mlp.gate.wg"],
}
NORMS_AFTER = {
    "attention_after": ["post_attention_layernorm"],
    "ffn_after": ["post_feedforward_layernorm"],
}
ONLY_AFTER = {"norms_before": False, "norms_after": True}
GLM = {
    "defaults": {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    },
    "max_length": 131072,
    "norm_eps": 1.5625e-07,
    "own_keys": ("partial_rotary_factor",),
    "fields": {"rope_interleaved": True},
    "out_bias": False,
}
MERGED_FFN = {"ffn.gate_up": ["mlp.gate_up_proj"]}
GGUF_MERGED_FFN = {"ffn.gate_up": ["ffn_up"]}
GGUF_FFN_NORM = {"ffn_norm": ["post_attention_norm"]}

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
        supported={"attention_bias": OFF, **ALWAYS_SPARSE},
        fields={"router_norm": True},
        sliding="every",
        rope_theta=1e6,
        experts=experts(8, 2),
        names=MIXTRAL_NAMES,
        gguf=Gguf("llama", "expert_count", permutes_heads=True),
    ),
    "qwen2_moe": Family(
        {**QWEN, "num_key_value_heads": 16, "qkv_bias": True},
        max_length=32768,
        supported={"attention_bias": OFF},
        fields={"shared_gate": True},
        qkv_bias="qkv_bias",
        out_bias=False,
        sliding="early even",
        use_sliding_window="decides",
        experts=experts(60, 4, 1408, shared_expert_intermediate_size=5632, **SOME_SPARSE),
        names={
            "ffn.router": ["mlp.gate", "mlp.shared_expert_gate"],
            "ffn.shared.gate_up": ["mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"],
            "ffn.shared.down": ["mlp.shared_expert.down_proj"],
        },
        gguf=Gguf("qwen2moe", norm_topk_prob=False, expert_names=NUM_EXPERTS),
    ),
    "qwen3_moe": Family(
        {"num_key_value_heads": 4, "sliding_window": 4096},
        max_length=32768,
        fields={"qk_norm": "heads"},
        sliding="every",
        use_sliding_window="decides",
        experts=experts(128, 8, 768, **SOME_SPARSE),
        gguf=Gguf("qwen3moe", expert_names=NUM_EXPERTS),
    ),
    "gpt_oss": Family(
        {"head_dim": 64, "num_key_value_heads": 8, "attention_bias": True, "sliding_window": 128},
        max_length=131072,
        norm_eps=1e-5,
        own_keys=("swiglu_limit",),
        supported=ALWAYS_SPARSE,
        own_fields=lambda hf, head_dim: {
            "gate_limit": hf.number("swiglu_limit", 7.0),
            "gate_alpha": hf.number("swiglu_alpha", 1.702),
        },
        fields={"sinks": True, "expert_bias": True, "router_bias": True, "router_norm": True},
        sliding="even",
        rope_theta=150000.0,
        default_rope={
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        experts=experts(128, 4),
        names={"ffn.router": ["mlp.router"]},
        merged_experts=MergedExperts(is_gpt_oss=True),
        gguf=Gguf(
            "gpt-oss",
            names=GGUF_FFN_NORM,
            hf_keys=lambda get, hf: {
                "rope_scaling": hf["rope_scaling"] and hf["rope_scaling"] | {"truncate": False},
                "rope_parameters": None if hf["rope_scaling"] else {},
            },
        ),
    ),
    "smollm3": Family(
        {"num_key_value_heads": 4, "no_rope_layer_interval": 4, "tie_word_embeddings": True},
        max_length=32768,
        own_keys=("no_rope_layer_interval", "no_rope_layers"),
        rope_theta=2e6,
        gguf=Gguf(
            "smollm3",
            permutes_heads=True,
            hf_keys=lambda get, hf: {"no_rope_layer_interval": 4},
        ),
    ),
    "phi3": Family(
        max_length=4096,
        norm_eps=1e-5,
        own_keys=("partial_rotary_factor",),
        supported=NO_BIAS,
        sliding="every",
        rope_aliases={"su": "longrope", "yarn": "longrope"},
        names={"attention.qkv": ["self_attn.qkv_proj"], **MERGED_FFN},
        gguf=Gguf(
            "phi3",
            names={"attention.qkv": ["attn_qkv"], **GGUF_MERGED_FFN},
            hf_keys=lambda get, hf: {
                "original_max_position_embeddings": get("rope.scaling.original_context_length")
            },
        ),
    ),
    "granite": Family(
        own_keys=GRANITE_KEYS,
        own_fields=granite_fields,
        gguf=Gguf("granite", **GRANITE_GGUF),
    ),
    "granitemoe": Family(
        own_keys=GRANITE_KEYS,
        own_fields=granite_fields,
        fields={"router_norm": True},
        experts=experts(8, 2),
        names={"ffn.router": ["block_sparse_moe.router.layer"]},
        merged_experts=MergedExperts(
            "block_sparse_moe.input_linear.weight",
            "block_sparse_moe.output_linear.weight",
        ),
        gguf=Gguf("granitemoe", **GRANITE_GGUF),
    ),
    "granite_swa": Family(
        {"num_key_value_heads": 4, "sliding_window": 128, "tie_word_embeddings": True},
        max_length=8192,
        norm_eps=1e-5,
        own_keys=GRANITE_KEYS,
        own_fields=granite_fields,
        fields={"sinks": True},
        sliding="three of four",
    ),
    "olmo2": Family(
        norm_eps=1e-5,
        supported=NO_MLP_BIAS,
        fields={"qk_norm": "full", **ONLY_AFTER},
        names=NORMS_AFTER,
        gguf=Gguf("olmo2"),
    ),
    "olmo3": Family(
        {"sliding_window": 4096, "sliding_window_pattern": 4},
        norm_eps=1e-5,
        # transformers reads no other value from the file.
        supported={**NO_MLP_BIAS, "sliding_window_pattern": (4,)},
        fields={"qk_norm": "full", **ONLY_AFTER},
        sliding="by period",
        rope_theta=5e5,
        sliding_rope_type=1,
        names=NORMS_AFTER,
        gguf=Gguf("olmo2", "attention.sliding_window"),
    ),
    "seed_oss": Family(
        {"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
        max_length=524288,
        own_keys=("attention_out_bias",),
        out_bias="attention_out_bias",
        gguf=Gguf("seed_oss", names=GGUF_FFN_NORM),
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
        gguf=Gguf("ernie4_5"),
    ),
    "hunyuan_v1_dense": Family(
        norm_eps=1e-5,
        own_keys=("alpha",),
        supported={"use_qk_norm": (True,)},
        fields={"qk_norm": "rotated"},
        names=HUNYUAN_NAMES,
        gguf=Gguf("hunyuan-dense"),
    ),
    "hunyuan_v1_moe": Family(
        norm_eps=1e-5,
        own_keys=("alpha",),
        fields={"qk_norm": "rotated", "router_norm": True},
        experts=experts(1, 1, num_shared_expert=1),
        names=HUNYUAN_NAMES,
        gguf=Gguf(
            "hunyuan-moe",
            expert_names={
                **NUM_EXPERTS,
                "num_experts_per_tok": "moe_topk",
                "n_shared_experts": "num_shared_expert",
            },
        ),
    ),
    "ernie4_5_moe": Family(
        {"num_key_value_heads": 4, "tie_word_embeddings": True},
        max_length=131072,
        norm_eps=1e-5,
        supported={"use_bias": OFF},
        fields={"rope_interleaved": True, "selection_bias": True, "router_norm": True},
        rope_theta=5e5,
        experts=experts(
            64, 6, 1536, moe_num_shared_experts=2, moe_layer_start_index=1, moe_layer_interval=1
        ),
        names={"ffn.experts": ["mlp.moe_statics.e_score_correction_bias"]},
        unused=("model.mtp_",),
        gguf=Gguf(
            "ernie4_5-moe",
            expert_names={
                "num_local_experts": "moe_num_experts",
                "num_experts_per_tok": "moe_k",
                "n_shared_experts": "moe_num_shared_experts",
                "first_k_dense_replace": "moe_layer_start_index",
                "decoder_sparse_step": "moe_layer_interval",
            },
        ),
    ),
    "exaone4": Family(
        {"num_key_value_heads": 32, "sliding_window": 4096, "sliding_window_pattern": 4},
        norm_eps=1e-5,
        supported=NO_BIAS,
        fields={"qk_norm": "heads", **ONLY_AFTER},
        sliding="by period",
        full_rope_type=None,
        names=NORMS_AFTER,
        gguf=Gguf("exaone4"),
    ),
    "exaone_moe": Family(
        {"num_key_value_heads": 32, "sliding_window": 4096, "sliding_window_pattern": 4},
        norm_eps=1e-5,
        supported=SIGMOID,
        fields={**SIGMOID_ROUTER, "qk_norm": "heads"},
        sliding="by period",
        full_rope_type=None,
        experts=experts(
            64,
            8,
            1024,
            num_shared_experts=1,
            first_k_dense_replace=1,
            mlp_layer_types=None,
            **{**WEIGHTED, "routed_scaling_factor": 2.5},
        ),
        names={"ffn.experts": ["mlp.e_score_correction_bias"]},
        unused=("mtp.",),
    ),
    "glm4_moe": Family(
        {"num_key_value_heads": 8, "partial_rotary_factor": 0.5},
        max_length=131072,
        norm_eps=1e-5,
        own_keys=("partial_rotary_factor", "use_qk_norm"),
        supported=SIGMOID,
        fields=SIGMOID_ROUTER,
        own_fields=lambda hf, head_dim: {"qk_norm": "heads" if hf.flag("use_qk_norm") else None},
        out_bias=False,
        experts=experts(128, 8, 1408, n_shared_experts=1, first_k_dense_replace=1, **WEIGHTED),
        unused=MTP_LAYER,
        gguf=Gguf(
            "glm4moe",
            names=GGUF_FFN_NORM,
            norm_topk_prob=False,
            expert_names={"num_local_experts": "n_routed_experts"},
            keys={"expert_gating_func": (2, 0)},  # sigmoid, or unsaid
        ),
    ),
    "glm": Family(**GLM, names=MERGED_FFN),
    "glm4": Family(
        **{**GLM, "fields": {"rope_interleaved": True, "norms_after": True}},
        names={
            **MERGED_FFN,
            "attention_after": ["post_self_attn_layernorm"],
            "ffn_after": ["post_mlp_layernorm"],
        },
        # GLM-4V's files have sections, and the pairs of q and k in another order.
        gguf=Gguf("glm4", names=GGUF_MERGED_FFN, keys={"rope.dimension_sections": ()}),
    ),
    "solar_open": Family(
        {
            "intermediate_size": 10240,  # of no layer: all have experts
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
        max_length=131072,
        norm_eps=1e-5,
        supported=SIGMOID,
        fields=SIGMOID_ROUTER,
        out_bias=False,
        rope_theta=1e6,
        experts=experts(128, 8, 1280, n_shared_experts=1, **WEIGHTED),
    ),
    "dots1": Family(
        {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 62},
        supported=SIGMOID,
        fields={**SIGMOID_ROUTER, "qk_norm": "heads"},
        sliding="later",
        experts=experts(
            None,
            None,
            1408,
            n_shared_experts=None,
            first_k_dense_replace=0,
            **{**WEIGHTED, "norm_topk_prob": False},
        ),
    ),
    "hy_v3": Family(
        {"num_key_value_heads": 8, "head_dim": 128},
        max_length=131072,
        norm_eps=1e-5,
        supported=SIGMOID,
        fields={**SIGMOID_ROUTER, "qk_norm": "heads", "router_norm": True},
        rope_theta=11158840.0,
        experts=experts(
            192,
            8,
            1536,
            num_shared_experts=1,
            first_k_dense_replace=1,
            mlp_layer_types=None,
            router_scaling_factor=2.826,
        ),
        names={
            **SHARED_MLP,
            "ffn.router": ["mlp.router.gate"],
            "ffn.experts": ["mlp.expert_bias"],
        },
        unused=MTP_LAYER,
    ),
    "minimax_m2": Family(
        {"num_key_value_heads": 8, "head_dim": 128},
        max_length=196608,
        own_keys=("partial_rotary_factor",),
        supported=SIGMOID,
        fields={**SIGMOID_ROUTER, "qk_norm": "full", "router_norm": True},
        rope_theta=5e6,
        experts=experts(256, 8),
        names=MIXTRAL_NAMES,
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
        gguf=Gguf(
            "mistral3",
            permutes_heads=True,
            keys={"attention.temperature_scale": None, "rope.scaling.yarn_log_multiplier": None},
            hf_keys=ministral3_keys,
        ),
    ),
    "ministral": Family(
        {"num_key_value_heads": 8, "sliding_window": 4096},
        max_length=131072,
        sliding="later",  # than no layer: all slide that layer_types does not list as full
    ),
    "cwm": Family(
        {"num_key_value_heads": 8, "head_dim": 128, "sliding_window": 8192},
        max_length=131072,
        norm_eps=1e-5,
        sliding="three of four",
        rope_theta=1e6,
        default_rope={
            "rope_type": "llama3",
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "iquestcoder": Family(
        {"num_key_value_heads": 8, "head_dim": 128},
        max_length=131072,
        norm_eps=1e-5,
    ),
    "olmoe": Family(
        max_length=4096,
        norm_eps=1e-5,
        fields={"qk_norm": "full"},
        experts=experts(64, 8, norm_topk_prob=None),
        gguf=Gguf("olmoe", norm_topk_prob=False, expert_names=NUM_EXPERTS),
    ),
    "mellum": Family(
        {"num_key_value_heads": 4, "head_dim": 128, "sliding_window": 1024},
        max_length=131072,
        fields={"qk_norm": "heads"},
        sliding="listed",
        sliding_rope_type=1,
        default_rope={
            "full_attention": {"rope_theta": 500000.0},
            "sliding_attention": {"rope_theta": 10000.0},
        },
        experts=experts(64, 8, 896, mlp_layer_types=None, norm_topk_prob=True),
        unused=("mtp.",),
    ),
    "qwen2_5_vl_text": Family(
        {**QWEN, "num_key_value_heads": 8, "max_window_layers": 80},
        **QWEN2,
        norm_eps=1e-5,
        own_keys=MROPE,
        rope_theta=1e6,
        rope_aliases={"mrope": "default"},
        gguf=Gguf("qwen2vl"),
    ),
    "qwen3_vl_text": Family(
        {"num_key_value_heads": 32, "head_dim": 128},
        max_length=128000,
        own_keys=MROPE,
        fields={"qk_norm": "heads"},
        rope_theta=5e5,
        gguf=Gguf("qwen3vl"),
    ),
    "qwen3_vl_moe_text": Family(
        {"num_key_value_heads": 16, "tie_word_embeddings": True},
        max_length=128000,
        own_keys=MROPE,
        fields={"qk_norm": "heads", "router_norm": True},
        rope_theta=5e5,
        experts=experts(60, 4, 1408, decoder_sparse_step=1, mlp_only_layers=None),
        merged_experts=MergedExperts(),
        gguf=Gguf("qwen3vlmoe", expert_names=NUM_EXPERTS),
    ),
    **dict.fromkeys(("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), QWEN_VL),
    "gemma3_text": Family(
        {
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "rope_local_base_freq": 10000.0,
            "tie_word_embeddings": True,
        },
        max_length=131072,
        own_keys=("query_pre_attn_scalar", "rope_local_base_freq"),
        supported={
            "hidden_activation": ("gelu_pytorch_tanh",),
            "mlp_bias": OFF,
            "use_bidirectional_attention": OFF,
        },
        fields={"qk_norm": "heads", "norm_offset": 1.0, "norms_after": True, "gelu": True},
        own_fields=gemma3_fields,
        sliding="by period",
        rope_theta=1e6,
        sliding_rope_type=1,
        names={
            "attention_after": ["post_attention_layernorm"],
            "ffn_norm": ["pre_feedforward_layernorm"],
            "ffn_after": ["post_feedforward_layernorm"],
        },
        gguf=Gguf("gemma3", keys={"rope.freq_base_swa": None}, hf_keys=gemma3_keys),
    ),
    "gemma3": Family(text_models=("gemma3_text",), prefixes=LANGUAGE_MODEL, unused=VISION_TOWER),
    "mimo": Family(QWEN, **QWEN2, unused=("model.mtp_layers.",)),
    "mistral3": Family(
        text_models=("mistral", "ministral3"),
        prefixes=LANGUAGE_MODEL,
        unused=VISION_TOWER,
    ),
}


# Hunyuan-A13B as Tencent publishes it, with the keys of its own code.
FAMILIES["hunyuan"] = FAMILIES["hunyuan_v1_moe"]._replace(
    supported={
        "group_limited_greedy": OFF,
        "moe_layer_num_skipped": (0,),
        "norm_topk_prob": (True,),
        "norm_type": ("rms",),
        "position_embedding_xdrope": OFF,
        "use_cla": OFF,
        "use_mixed_mlp_moe": (True,),
        "use_mla": OFF,
        "use_rotary_pos_emb": (True,),
    },
    gguf=None,
)


def family_of(hf: Mapping) -> Family | None:
    """The record of a config.json's model_type; None where there is none."""
    model_type = hf.get("model_type")
    return FAMILIES.get(model_type) if isinstance(model_type, str) else None
