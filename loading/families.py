"""The families of models that can be loaded: one record for every model_type, which holds its
differences from Llama.

    Field         a scalar's names in config.json, GGUF and model.Config
    FIELDS, EXPERT_FIELDS
                  a Field for each key of config.json, of all models and of experts
    NEUTRAL       key -> the values, besides null, that change nothing: a family that does not read
                  the key accepts these alone
    Family        what may differ, with Llama's values as defaults;  llama_like  makes a record
    SLIDING       the layers with a sliding window
    FAMILIES      model_type -> Family;  family_of  the record of a config.json

A new family is one record here, one row for a key that no other family has, and arithmetic in
model.py where it needs any. Sources: transformers, models/*/configuration_*.py and modeling_*.py;
llama.cpp, conversion/ and src/models/.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from model import Config

# ------------------------------------------------------------------------------------------- keys


class Field(NamedTuple):
    """A scalar of config.json, which becomes a field of model.Config where a family reads it."""

    gguf: str = ""  # llama.cpp's key, behind the architecture's name
    name: str = ""  # Config's field
    kind: type = float  # int, float or bool, where it has a name
    # What a family that does not read the key accepts besides null; (): nothing. None: any value,
    # because all families read it, or a dense one may ignore it.
    neutral: tuple | None = None
    convert: Callable = lambda value, head_dim: value


# config.json's key -> Field(gguf, name, kind, neutral, convert), of models without experts or with.
FIELDS = {
    "hidden_size": Field("embedding_length", "dim", int),
    "intermediate_size": Field("feed_forward_length", "ffn_dim", int),
    "num_hidden_layers": Field("block_count", "n_layers", int),
    "num_attention_heads": Field("attention.head_count", "n_heads", int),
    "num_key_value_heads": Field("attention.head_count_kv", "n_kv_heads", int),
    "head_dim": Field("attention.key_length", "head_dim", int),
    "vocab_size": Field(name="vocab_size", kind=int),
    "max_position_embeddings": Field("context_length", "max_seq_length", int),
    "rms_norm_eps": Field("attention.layer_norm_rms_epsilon", "norm_eps"),
    "tie_word_embeddings": Field(name="tie_embeddings", kind=bool),
    # Without a name: config.py reads these for RoPE and for windows.
    "rope_theta": Field("rope.freq_base"),
    "original_max_position_embeddings": Field("rope.scaling.original_context_length"),
    "sliding_window": Field("attention.sliding_window"),
    # Read by the families that have a default for the key.
    "embedding_multiplier": Field("embedding_scale", "embed_scale", float, (1,)),
    "residual_multiplier": Field("residual_scale", "residual_scale", float, (1,)),
    "logits_scaling": Field("logit_scale", "logit_scale", float, (1,), lambda x, E: 1 / x),
    "attention_multiplier": Field(
        "attention.scale", "score_scale", float, (), lambda x, E: x * math.sqrt(E)
    ),
    "query_pre_attn_scalar": Field("", "score_scale", float, (), lambda x, E: math.sqrt(E / x)),
    "swiglu_limit": Field("", "gate_limit", float, ()),
    "swiglu_alpha": Field("", "gate_alpha", float, ()),
    "use_qk_norm": Field(
        "", "qk_norm", bool, (False,), lambda is_normed, E: "heads" if is_normed else None
    ),
    "rope_local_base_freq": Field(neutral=()),
    "qkv_bias": Field(neutral=(False,)),
    # What no family reads yet.
    "alibi": Field("attention.max_alibi_bias", neutral=(False,)),
    "attn_logit_softcapping": Field("attn_logit_softcapping", neutral=()),
    "clip_qkv": Field("attention.clamp_kqv", neutral=()),
    "final_logit_softcapping": Field("final_logit_softcapping", neutral=()),
    "is_causal": Field("attention.causal", neutral=(True,)),
    "n_group": Field("expert_group_count", neutral=(1,)),
    "use_parallel_residual": Field("use_parallel_residual", neutral=(False,)),
}
# The same for models with experts, which read those keys that their family names.
EXPERT_FIELDS = {
    "num_experts": Field("expert_count", "n_experts", int, (0,)),
    "num_experts_per_tok": Field("expert_used_count", "experts_per_token", int),
    "moe_intermediate_size": Field("expert_feed_forward_length", "expert_dim", int),
    "n_shared_experts": Field("expert_shared_count", neutral=(0,)),
    "shared_expert_intermediate_size": Field(name="shared_dim", kind=int, neutral=(0,)),
    "first_k_dense_replace": Field("leading_dense_block_count", neutral=(0,)),
    "decoder_sparse_step": Field("interleave_moe_layer_step"),
    "routed_scaling_factor": Field("expert_weights_scale", "routed_scale", float, (1,)),
    "norm_topk_prob": Field("expert_weights_norm", "router_norm", bool),
}
# A family's own name of a key -> the key of EXPERT_FIELDS.
EXPERT_NAMES = {
    "num_local_experts": "num_experts",
    "n_routed_experts": "num_experts",
    "num_shared_expert": "n_shared_experts",
    "num_shared_experts": "n_shared_experts",
    "moe_num_shared_experts": "n_shared_experts",
    "router_scaling_factor": "routed_scaling_factor",
    "moe_layer_start_index": "first_k_dense_replace",
    "moe_layer_interval": "decoder_sparse_step",
}
# A count -> its names in all families, each of which is read, as in transformers.
COUNT_NAMES = {
    "num_experts": "num_experts num_local_experts n_routed_experts moe_num_experts",
    "num_experts_per_tok": "num_experts_per_tok moe_k moe_topk",
}
LAYER_KEYS = ("mlp_layer_types", "mlp_only_layers")  # which layers have experts
# Keys of NEUTRAL that are not checked in families with experts: the three counts of experts are
# read (COUNT_NAMES), and a wrong value of the other two shows in the tensors.
SPARSE_KEYS = (
    "first_k_dense_replace",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts",
    "num_local_experts",
)
# Rows of NEUTRAL for keys without a Field: (values, keys). (): the key must be absent or null.
NEUTRAL_KEYS = [
    (
        (),
        "attention_chunk_size dim_model_base kv_lora_rank q_lora_rank scale_depth",
    ),
    (
        (False,),
        "add_cross_attention attention_bias attention_out_bias attn_output_gate bias"
        " group_limited_greedy is_encoder_decoder mlp_bias position_embedding_xdrope qk_layernorm"
        " rope_interleaved rope_traditional use_bias use_bidirectional_attention use_cla use_mla",
    ),
    ((False, 0), "attn_temperature_tuning"),
    ((0,), "moe_layer_num_skipped n_routed_experts no_rope_layer_interval"),
    ((0, 1), "num_local_experts"),
    (
        (1,),
        "embedding_scale logit_scale moe_layer_freq partial_rotary_factor rotary_pct scale_emb"
        " topk_group",
    ),
    ((True,), "is_neox_style rope_is_neox_style"),
    (("softmax",), "moe_router_activation_func scoring_func"),
    (([],), "cross_attention_layers"),
    (({},), "pruned_heads quantization_config"),
    (("silu", "swish"), "hidden_act hidden_activation"),
    (("rope", "rotary"), "position_embedding_type"),
]
NEUTRAL = {key: values for values, keys in NEUTRAL_KEYS for key in keys.split()} | {
    key: field.neutral
    for key, field in (FIELDS | EXPERT_FIELDS).items()
    if field.neutral is not None
}

# Keys that some families read and that are in neither FIELDS nor NEUTRAL.
OTHER_KEYS = ("max_window_layers", "no_rope_layers", "sliding_window_pattern")

# --------------------------------------------------------------------------------------- families


class MergedExperts(NamedTuple):
    """A folder's tensors that hold all experts of a layer; merged_experts.py splits them."""

    gate_up: str = "mlp.experts.gate_up_proj"  # (experts, 2 F, D)
    down: str = "mlp.experts.down_proj"  # (experts, D, F)
    # gpt-oss's: the rows of gate and up in turn, and matrices transposed. Others are transposed if
    # their shape says so.
    is_gpt_oss: bool = False


class Family(NamedTuple):
    """A model_type's differences from Llama."""

    # Keys that config.json may leave out -> transformers' values of them. Of the keys of NEUTRAL
    # the family reads those that are here.
    defaults: Mapping[str, object] = {}
    # The same for keys of experts, all of which it reads. None: no default. The file must then have
    # the key if it is a number of Config's; otherwise the key may be absent.
    experts: Mapping[str, object] = {}
    fields: Mapping[str, object] = {}  # of model.Config, the same for all its models
    supported: Mapping[str, tuple] = {}  # key -> its supported values, besides null
    # config.Section -> fields of model.Config that no table has.
    own_fields: Callable = lambda hf: {}
    text_models: tuple[str, ...] = ()  # of a wrapper: the model_types of its "text_config"
    # The key that turns a bias on, or whether there always is one.
    has_qkv_bias: str | bool = "attention_bias"
    has_out_bias: str | bool = "attention_bias"
    has_ffn_bias: str | bool = "mlp_bias"
    # Windows.
    sliding: str | None = None  # the layers that slide, a key of SLIDING; None: no layer ever does
    # Does the key use_sliding_window turn them on? Otherwise it must agree with sliding_window.
    switches_windows: bool = False
    # RoPE. The types are Config.rope_types'.
    rope_theta: float = 10000.0
    full_rope_type: int | None = 0  # of layers that attend to all tokens
    sliding_rope_type: int | None = 0  # of layers with a window
    default_rope: Mapping[str, object] = {}  # RoPE's object where config.json has none
    rope_aliases: Mapping[str, str] = {}  # older names of rope types
    rope_keys: tuple[str, ...] = ()  # of RoPE's object, beside those of the type
    # Its tensors. `names` replaces rows of weight_names.MODULES, or adds to them; a single text
    # replaces Hugging Face's names alone.
    names: Mapping[str, str | tuple[str, str]] = {}
    prefixes: Mapping[str, str] = {}  # of names in the file -> of names in a text model
    # Prefixes of tensors that are not the text model's; {n_layers} is filled in.
    unused: tuple[str, ...] = ()
    merged_experts: MergedExperts | None = None  # None: every expert has tensors of its own
    # llama.cpp's files:
    arch: str = ""  # "": there are none
    arch_key: str = ""  # among families of one architecture, what only this family's files hold
    permutes_heads: bool = False  # are the rows of q and k stored with RoPE's pairs as neighbours?
    # The architecture's keys -> their supported values, before those of gguf_folder.supported_keys;
    # None: any.
    gguf_keys: Mapping[str, tuple | None] = {}
    # (get, hf) -> further keys of config.json, which win. `get` reads the file's keys, and `hf` is
    # config.json as the tables make it.
    hf_keys: Callable = lambda get, hf: {}


def llama_like(**differences: object) -> Family:
    """A family by its differences from Llama: fields of Family, the keys of config.json that it
    reads, with what transformers takes where a file leaves them out, and fields of model.Config
    that are the same for all its models. TypeError for a name that is none of these."""
    record = {}
    defaults = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6}
    experts = {}
    fields = {}
    for name, value in differences.items():
        # A name that is a key and a field of Config is a key where FIELDS has it (head_dim), and a
        # field otherwise (rope_interleaved).
        if name in Family._fields:
            group = record
        elif name in {*EXPERT_FIELDS, *EXPERT_NAMES, *LAYER_KEYS}:
            group = experts
        elif name in Config.__dataclass_fields__ and name not in FIELDS:
            group = fields
        elif name in {*FIELDS, *NEUTRAL, *OTHER_KEYS}:
            group = defaults
        else:
            raise TypeError(f"{name} is in no table of keys")
        group[name] = value
    return Family(defaults, experts, fields, **record)


def window_period(hf) -> int:
    """sliding_window_pattern, which EXAONE writes as a word: "LLLG" is 4."""
    pattern = hf.get("sliding_window_pattern")
    is_word = isinstance(pattern, str) and re.fullmatch("L*G", pattern)
    return len(pattern) if is_word else hf.size("sliding_window_pattern")


# Family.sliding -> does layer i have a sliding window, where config.json has no layer_types?
# With "every", layer_types may not exempt a layer from the window either (config.windows).
SLIDING = {
    "every": lambda i, hf: True,
    "even": lambda i, hf: i % 2 == 0,
    "listed": lambda i, hf: False,
    "unless listed": lambda i, hf: True,
    "three of four": lambda i, hf: i % 4 > 0,
    "later": lambda i, hf: i >= hf.count("max_window_layers"),
    "early even": lambda i, hf: i % 2 == 0 and i < hf.count("max_window_layers"),
    "by period": lambda i, hf: (i + 1) % window_period(hf) > 0,
}


def granite_keys(get: Callable, hf: dict) -> dict:
    """Where a file has no scale, llama.cpp takes 1 / sqrt(head_dim), and transformers takes 1."""
    return {"attention_multiplier": get("attention.scale") or 1 / math.sqrt(hf["head_dim"])}


def ministral3_keys(get: Callable, hf: dict) -> dict:
    """Mistral Small 3 has the same architecture, without the queries' scale."""
    scaling = hf["rope_scaling"]
    log_multiplier = get("rope.scaling.yarn_log_multiplier")
    if log_multiplier:
        scaling = {**scaling, "mscale": 1.0, "mscale_all_dim": log_multiplier}
    beta = get("attention.temperature_scale")
    if beta:
        return {"rope_scaling": {**scaling, "llama_4_scaling_beta": beta}}
    return {"model_type": "mistral", "rope_scaling": scaling}


def gemma3_keys(get: Callable, hf: dict) -> dict:
    """llama.cpp tells the 27B model, which scales its queries by another number, by its layers."""
    is_27b = hf["num_hidden_layers"] == 62
    scalar = hf["hidden_size"] // hf["num_attention_heads"] if is_27b else hf["head_dim"]
    return {
        "query_pre_attn_scalar": scalar,
        "rope_local_base_freq": get("rope.freq_base_swa", 10000.0),
    }


def qwen3_moe_keys(get: Callable, hf: dict) -> dict:
    """Weights of experts sum to 1 in llama.cpp's model, unless the file says otherwise."""
    return {"norm_topk_prob": get("expert_weights_norm", True)}


QWEN = {"sliding_window": 4096, "max_window_layers": 28}
QWEN2 = {
    **QWEN,
    "max_position_embeddings": 32768,
    "has_qkv_bias": True,
    "has_out_bias": False,
    "attention_bias": None,  # ignored, as in transformers; MiMo's files have it
    "sliding": "later",
    "switches_windows": True,
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
GRANITE = {
    "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "permutes_heads": True,
    "gguf_keys": {"rope.scaling.finetuned": (True,)},  # llama.cpp does not rotate otherwise
    "hf_keys": granite_keys,
}
NO_BIAS = {"has_qkv_bias": False, "has_out_bias": False, "has_ffn_bias": False}
ROUTER_WEIGHTS = {"norm_topk_prob": True, "routed_scaling_factor": 1.0}
SOME_SPARSE = {"decoder_sparse_step": 1, "mlp_only_layers": None, "norm_topk_prob": None}
ALWAYS_SPARSE = {
    "decoder_sparse_step": (1,),
    "norm_topk_prob": (True,),
    "mlp_only_layers": ([],),
}
# A router as DeepSeek-V3's with one group of experts.
SIGMOID_ROUTER = {"router_sigmoid": True, "selection_bias": True, "router_float32": True}
MTP_LAYER = ("model.layers.{n_layers}.",)  # it predicts further ahead
MIXTRAL_NAMES = {
    "ffn.router": "block_sparse_moe.gate",
    "ffn.experts": "block_sparse_moe.e_score_correction_bias",
    "ffn.experts.gate_up": "block_sparse_moe.experts.{}.w1 block_sparse_moe.experts.{}.w3",
    "ffn.experts.down": "block_sparse_moe.experts.{}.w2",
}
SHARED_MLP = {
    "ffn.shared.gate_up": "mlp.shared_mlp.gate_proj mlp.shared_mlp.up_proj",
    "ffn.shared.down": "mlp.shared_mlp.down_proj",
}
HUNYUAN_NAMES = {
    **SHARED_MLP,
    "attention.q_norm": "self_attn.query_layernorm",
    "attention.k_norm": "self_attn.key_layernorm",
    "ffn.router": "mlp.gate.wg",
}
NORMS_AFTER_ONLY = {"norms_before": False, "norms_after": True}
GLM = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-07,
    "rope_interleaved": True,
    "has_out_bias": False,
}
MERGED_FFN = {"ffn.gate_up": ("mlp.gate_up_proj", "ffn_up")}

FAMILIES = {
    "llama": llama_like(arch="llama", permutes_heads=True),
    "mistral": llama_like(
        num_key_value_heads=8,
        sliding_window=4096,
        max_position_embeddings=131072,
        has_qkv_bias=False,
        has_out_bias=False,
        sliding="every",
        arch="llama",
        arch_key="attention.sliding_window",
        permutes_heads=True,
    ),
    "qwen2": llama_like(num_key_value_heads=32, **QWEN2, arch="qwen2"),
    "qwen3": llama_like(
        num_key_value_heads=32,
        head_dim=128,
        **QWEN,
        max_position_embeddings=32768,
        qk_norm="heads",
        sliding="later",
        switches_windows=True,
        arch="qwen3",
    ),
    "mixtral": llama_like(
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        has_qkv_bias=False,
        has_out_bias=False,
        supported=ALWAYS_SPARSE,
        sliding="every",
        rope_theta=1e6,
        num_experts=8,
        num_experts_per_tok=2,
        router_norm=True,
        names=MIXTRAL_NAMES,
        arch="llama",
        arch_key="expert_count",
        permutes_heads=True,
    ),
    "qwen2_moe": llama_like(
        num_key_value_heads=16,
        qkv_bias=True,
        **QWEN,
        max_position_embeddings=32768,
        has_qkv_bias="qkv_bias",
        has_out_bias=False,
        sliding="early even",
        switches_windows=True,
        num_experts=60,
        num_experts_per_tok=4,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
        **SOME_SPARSE,
        shared_gate=True,
        names={
            "ffn.router": "mlp.gate mlp.shared_expert_gate",
            "ffn.shared.gate_up": "mlp.shared_expert.gate_proj mlp.shared_expert.up_proj",
            "ffn.shared.down": "mlp.shared_expert.down_proj",
        },
        arch="qwen2moe",
        hf_keys=lambda get, hf: {
            "shared_expert_intermediate_size": get("expert_shared_feed_forward_length")
        },
    ),
    "qwen3_moe": llama_like(
        num_key_value_heads=4,
        sliding_window=4096,
        max_position_embeddings=32768,
        qk_norm="heads",
        sliding="every",
        switches_windows=True,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        **SOME_SPARSE,
        arch="qwen3moe",
        hf_keys=qwen3_moe_keys,
    ),
    "gpt_oss": llama_like(
        head_dim=64,
        num_key_value_heads=8,
        attention_bias=True,
        sliding_window=128,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        swiglu_limit=7.0,
        swiglu_alpha=1.702,
        supported=ALWAYS_SPARSE,
        sinks=True,
        sliding="even",
        rope_theta=150000.0,
        default_rope={
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        num_experts=128,
        num_experts_per_tok=4,
        expert_bias=True,
        router_bias=True,
        router_norm=True,
        names={"ffn.router": "mlp.router"},
        merged_experts=MergedExperts(is_gpt_oss=True),
        arch="gpt-oss",
    ),
    "smollm3": llama_like(
        num_key_value_heads=4,
        no_rope_layer_interval=4,
        tie_word_embeddings=True,
        max_position_embeddings=32768,
        no_rope_layers=None,
        rope_theta=2e6,
        arch="smollm3",
        permutes_heads=True,
    ),
    "phi3": llama_like(
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        partial_rotary_factor=None,
        **NO_BIAS,
        sliding="every",
        rope_aliases={"su": "longrope", "yarn": "longrope"},
        names={"attention.qkv": ("self_attn.qkv_proj", "attn_qkv"), **MERGED_FFN},
        arch="phi3",
    ),
    "granite": llama_like(**GRANITE, arch="granite"),
    "granitemoe": llama_like(
        **GRANITE,
        num_local_experts=8,
        num_experts_per_tok=2,
        router_norm=True,
        names={"ffn.router": "block_sparse_moe.router.layer"},
        merged_experts=MergedExperts(
            "block_sparse_moe.input_linear.weight",
            "block_sparse_moe.output_linear.weight",
        ),
        arch="granitemoe",
    ),
    # Its names are transformers', without those of the older Granite MoE.
    "granitemoe_swa": llama_like(
        **GRANITE,
        sliding_window=128,
        sinks=True,
        sliding="three of four",
        num_local_experts=8,
        num_experts_per_tok=2,
        router_norm=True,
        own_fields=lambda hf: {"shared_dim": hf.count("shared_intermediate_size")},
        names={
            "ffn.router": "block_sparse_moe.router",
            "ffn.shared.gate_up": "shared_mlp.input_linear",
            "ffn.shared.down": "shared_mlp.output_linear",
        },
        merged_experts=MergedExperts(
            "block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"
        ),
    ),
    "granite_swa": llama_like(
        **GRANITE,
        num_key_value_heads=4,
        sliding_window=128,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        sinks=True,
        sliding="three of four",
    ),
    "olmo2": llama_like(
        rms_norm_eps=1e-5,
        has_ffn_bias=False,
        qk_norm="full",
        **NORMS_AFTER_ONLY,
        arch="olmo2",
    ),
    "olmo3": llama_like(
        sliding_window=4096,
        sliding_window_pattern=4,
        rms_norm_eps=1e-5,
        has_ffn_bias=False,
        supported={"sliding_window_pattern": (4,)},  # transformers reads no other value
        qk_norm="full",
        **NORMS_AFTER_ONLY,
        sliding="by period",
        rope_theta=5e5,
        sliding_rope_type=1,
        arch="olmo2",
        arch_key="attention.sliding_window",
    ),
    "seed_oss": llama_like(
        num_key_value_heads=8,
        head_dim=128,
        attention_bias=True,
        max_position_embeddings=524288,
        has_out_bias="attention_out_bias",
        arch="seed_oss",
    ),
    "ernie4_5": llama_like(
        num_key_value_heads=2,
        head_dim=128,
        tie_word_embeddings=True,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_interleaved=True,
        has_qkv_bias="use_bias",
        has_out_bias="use_bias",
        has_ffn_bias="use_bias",
        rope_theta=5e5,
        arch="ernie4_5",
    ),
    "hunyuan_v1_dense": llama_like(
        rms_norm_eps=1e-5,
        rope_keys=("alpha",),
        supported={"use_qk_norm": (True,)},
        qk_norm="rotated",
        names=HUNYUAN_NAMES,
        arch="hunyuan-dense",
    ),
    "hunyuan_v1_moe": llama_like(
        rms_norm_eps=1e-5,
        rope_keys=("alpha",),
        qk_norm="rotated",
        num_experts=1,
        num_experts_per_tok=1,
        num_shared_expert=1,
        router_norm=True,
        names=HUNYUAN_NAMES,
        arch="hunyuan-moe",
    ),
    "ernie4_5_moe": llama_like(
        num_key_value_heads=4,
        tie_word_embeddings=True,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_interleaved=True,
        rope_theta=5e5,
        num_experts=64,
        num_experts_per_tok=6,
        moe_intermediate_size=1536,
        moe_num_shared_experts=2,
        moe_layer_start_index=1,
        moe_layer_interval=1,
        selection_bias=True,
        router_float32=True,
        router_norm=True,
        names={"ffn.experts": "mlp.moe_statics.e_score_correction_bias"},
        unused=("model.mtp_",),
        arch="ernie4_5-moe",
    ),
    "exaone4": llama_like(
        num_key_value_heads=32,
        sliding_window=4096,
        sliding_window_pattern=4,
        rms_norm_eps=1e-5,
        **NO_BIAS,
        qk_norm="heads",
        **NORMS_AFTER_ONLY,
        sliding="by period",
        full_rope_type=None,
        arch="exaone4",
    ),
    "exaone_moe": llama_like(
        num_key_value_heads=32,
        sliding_window=4096,
        sliding_window_pattern=4,
        rms_norm_eps=1e-5,
        qk_norm="heads",
        sliding="by period",
        full_rope_type=None,
        num_experts=64,
        num_experts_per_tok=8,
        moe_intermediate_size=1024,
        num_shared_experts=1,
        first_k_dense_replace=1,
        mlp_layer_types=None,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        **SIGMOID_ROUTER,
        names={"ffn.experts": "mlp.e_score_correction_bias"},
        unused=("mtp.",),
    ),
    "glm4_moe": llama_like(
        num_key_value_heads=8,
        partial_rotary_factor=0.5,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        use_qk_norm=False,
        has_out_bias=False,
        n_routed_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=1408,
        n_shared_experts=1,
        first_k_dense_replace=1,
        **ROUTER_WEIGHTS,
        **SIGMOID_ROUTER,
        unused=MTP_LAYER,
        arch="glm4moe",
        hf_keys=lambda get, hf: {"norm_topk_prob": get("expert_weights_norm", False)},
    ),
    "glm": llama_like(**GLM, names=MERGED_FFN),
    "glm4": llama_like(
        **GLM,
        norms_after=True,
        names={
            **MERGED_FFN,
            "attention_after": "post_self_attn_layernorm",
            "ffn_after": "post_mlp_layernorm",
        },
        arch="glm4",
        # GLM-4V's files have sections, and the pairs of q and k in another order.
        gguf_keys={"rope.dimension_sections": ()},
    ),
    "solar_open": llama_like(
        intermediate_size=10240,  # of no layer: all have experts
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        has_out_bias=False,
        rope_theta=1e6,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=1280,
        n_shared_experts=1,
        **ROUTER_WEIGHTS,
        **SIGMOID_ROUTER,
    ),
    "dots1": llama_like(
        num_key_value_heads=32,
        sliding_window=4096,
        max_window_layers=62,
        qk_norm="heads",
        sliding="later",
        num_experts=None,
        num_experts_per_tok=None,
        moe_intermediate_size=1408,
        n_shared_experts=None,
        first_k_dense_replace=0,
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
        **SIGMOID_ROUTER,
    ),
    "hy_v3": llama_like(
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        qk_norm="heads",
        rope_theta=11158840.0,
        num_experts=192,
        num_experts_per_tok=8,
        moe_intermediate_size=1536,
        num_shared_experts=1,
        first_k_dense_replace=1,
        mlp_layer_types=None,
        router_scaling_factor=2.826,
        **SIGMOID_ROUTER,
        router_norm=True,
        names={
            **SHARED_MLP,
            "ffn.router": "mlp.router.gate",
            "ffn.experts": "mlp.expert_bias",
        },
        unused=MTP_LAYER,
    ),
    "minimax_m2": llama_like(
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=196608,
        partial_rotary_factor=None,
        qk_norm="full",
        rope_theta=5e6,
        num_experts=256,
        num_experts_per_tok=8,
        **SIGMOID_ROUTER,
        router_norm=True,
        names=MIXTRAL_NAMES,
    ),
    "ministral3": llama_like(
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=262144,
        rms_norm_eps=1e-5,
        rope_keys=("llama_4_scaling_beta", "max_position_embeddings"),
        **NO_BIAS,
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
        arch="mistral3",
        permutes_heads=True,
        gguf_keys={
            "attention.temperature_scale": None,
            "rope.scaling.yarn_log_multiplier": None,
        },
        hf_keys=ministral3_keys,
    ),
    "ministral": llama_like(
        num_key_value_heads=8,
        sliding_window=4096,
        max_position_embeddings=131072,
        sliding="unless listed",
    ),
    "cwm": llama_like(
        num_key_value_heads=8,
        head_dim=128,
        sliding_window=8192,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
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
    "iquestcoder": llama_like(
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
    ),
    "olmoe": llama_like(
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        qk_norm="full",
        num_experts=64,
        num_experts_per_tok=8,
        norm_topk_prob=None,
        arch="olmoe",
    ),
    "mellum": llama_like(
        num_key_value_heads=4,
        head_dim=128,
        sliding_window=1024,
        max_position_embeddings=131072,
        qk_norm="heads",
        sliding="listed",
        sliding_rope_type=1,
        default_rope={
            "full_attention": {"rope_theta": 500000.0},
            "sliding_attention": {"rope_theta": 10000.0},
        },
        num_experts=64,
        num_experts_per_tok=8,
        moe_intermediate_size=896,
        mlp_layer_types=None,
        norm_topk_prob=True,
        unused=("mtp.",),
    ),
    "qwen2_5_vl_text": llama_like(
        num_key_value_heads=8,
        **{**QWEN2, "max_window_layers": 80},
        rope_keys=MROPE,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        rope_aliases={"mrope": "default"},
        arch="qwen2vl",
    ),
    "qwen3_vl_text": llama_like(
        num_key_value_heads=32,
        head_dim=128,
        max_position_embeddings=128000,
        rope_keys=MROPE,
        qk_norm="heads",
        rope_theta=5e5,
        arch="qwen3vl",
    ),
    "qwen3_vl_moe_text": llama_like(
        num_key_value_heads=16,
        tie_word_embeddings=True,
        max_position_embeddings=128000,
        rope_keys=MROPE,
        qk_norm="heads",
        rope_theta=5e5,
        num_experts=60,
        num_experts_per_tok=4,
        moe_intermediate_size=1408,
        decoder_sparse_step=1,
        mlp_only_layers=None,
        router_norm=True,
        merged_experts=MergedExperts(),
        arch="qwen3vlmoe",
    ),
    **dict.fromkeys(("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), QWEN_VL),
    "gemma3_text": llama_like(
        vocab_size=262208,
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=26,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        query_pre_attn_scalar=256,
        sliding_window=4096,
        sliding_window_pattern=6,
        rope_local_base_freq=10000.0,
        tie_word_embeddings=True,
        max_position_embeddings=131072,
        has_ffn_bias=False,
        supported={"hidden_activation": ("gelu_pytorch_tanh",)},
        qk_norm="heads",
        norm_offset=1.0,
        norms_after=True,
        gelu=True,
        own_fields=lambda hf: {"embed_scale": math.sqrt(hf.size("hidden_size"))},
        sliding="by period",
        rope_theta=1e6,
        sliding_rope_type=1,
        names={"ffn_norm": "pre_feedforward_layernorm"},
        arch="gemma3",
        gguf_keys={"rope.freq_base_swa": None},
        hf_keys=gemma3_keys,
    ),
    "gemma3": Family(text_models=("gemma3_text",), prefixes=LANGUAGE_MODEL, unused=VISION_TOWER),
    "exaone4_5": Family(
        text_models=("exaone4", "exaone4_5_text"),
        prefixes=LANGUAGE_MODEL,
        unused=("model.visual.", "mtp."),
    ),
    "mimo": llama_like(num_key_value_heads=32, **QWEN2, unused=("model.mtp_layers.",)),
    "mistral3": Family(
        text_models=("mistral", "ministral3"),
        prefixes=LANGUAGE_MODEL,
        unused=VISION_TOWER,
    ),
}


# Hunyuan-A13B as Tencent publishes it, with the keys of its own code.
FAMILIES["hunyuan"] = FAMILIES["hunyuan_v1_moe"]._replace(
    supported={
        "norm_topk_prob": (True,),
        "norm_type": ("rms",),
        "use_mixed_mlp_moe": (True,),
        "use_rotary_pos_emb": (True,),
    },
    arch="",
)
# EXAONE 4.5's text model, by the name that it was published with.
FAMILIES["exaone4_5_text"] = FAMILIES["exaone4"]._replace(arch="")


def family_of(hf: Mapping) -> Family | None:
    """The record of a config.json's model_type; None where there is none."""
    model_type = hf.get("model_type")
    return FAMILIES.get(model_type) if isinstance(model_type, str) else None
