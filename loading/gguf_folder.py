"""A GGUF file as a Hugging Face folder: its config.json and its tensors. All that is read from a
folder is then read from it in the same way.

    GgufModel    a file, with the interface of folder.Folder
    hf_config    its config.json: the keys of its architecture by config.json's names, RoPE's
                 scaling, and flags of what its tensors show that it has
    hf_tensors   its tensors by Hugging Face names, a stack of experts one by one

The tables of families.py say what a key is called on both sides and which values a family accepts,
weight_names.py what a tensor is called; gguf_vocabulary.py reads the keys of the tokenizer. Source:
llama.cpp, conversion/.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

import torch

from decoding.errors import UserError
from loading.config import supported_values
from loading.families import EXPERT_FIELDS, EXPERT_NAMES, FAMILIES, FIELDS, Family
from loading.gguf import (
    Blocks,
    Entries,
    GgufFile,
    common_value,
    open_model,
    parts_of,
)
from loading.gguf_vocabulary import special_ids
from loading.models import dtype_name
from loading.plain_files import error_prefix, refused
from loading.stored import Stored
from loading.weight_names import hf_by_gguf

# Keys that every file must have, besides those from which hf_config finds the size of a head.
REQUIRED = """
block_count feed_forward_length context_length attention.layer_norm_rms_epsilon
"""
# Integers that llama.cpp takes as absent at 0, as it does every float.
UNSET_AT_0 = ("expert_group_count", "attention.key_length")
YARN = {
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
# Keys in neither table of families.py that are read below, or that no arithmetic of a text depends
# on.
ANY_VALUE_KEYS = """
rope.dimension_count rope.scaling.type rope.scaling.factor rope.scaling.yarn_beta_fast
rope.scaling.yarn_beta_slow nextn_predict_layers attention.layer_norm_epsilon
attention.sliding_window_pattern attention.value_length decoder_start_token_id
embedding_length_out expert_group_used_count expert_shared_feed_forward_length
n_deepstack_layers pooling_type rope.dimension_sections rope.scaling.finetuned
tensor_data_layout vocab_size
"""
# Others that would change the arithmetic, with the values under which they do not.
HARMLESS = {
    "rope.scale_linear": (0, 1),  # the factor in files from 2023
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (1, -1),
}
# Tensors that config.json holds as a RoPE scaling.
ROPE_TENSORS = ("rope_freqs", "rope_factors_long", "rope_factors_short")


class GgufModel:
    """The files of a model, of which `path` is the first, with the interface of folder.Folder."""

    index = MappingProxyType({})  # none: Checkpoint.spare_tensors is then empty

    def __init__(self, path: Path):
        self.path = path

    @cached_property
    def model(self) -> GgufFile:
        return open_model(self.path)

    @cached_property
    def hf(self) -> dict:
        with error_prefix(self.path):
            return hf_config(self.model)

    @property
    def files(self) -> list[Path]:
        return parts_of(self.path, self.model.keys)

    @cached_property
    def tensors(self) -> dict[str, Blocks]:
        with error_prefix(self.path):
            return hf_tensors(self.model)

    def as_stored(self, tensor: Blocks) -> Stored:
        return tensor.as_stored()


# ------------------------------------------------------------------------------------ config.json


def model_type_of(keys: dict[str, object]) -> str:
    """The model_type of a file. Of families that share an architecture, the last one in FAMILIES
    that has no `arch_key`, or one that the file holds."""
    architecture = keys.get("general.architecture")
    for model_type, family in reversed(FAMILIES.items()):
        has_key = not family.arch_key or keys.get(f"{architecture}.{family.arch_key}")
        if architecture and family.arch == architecture and has_key:
            return model_type
    supported = ", ".join(sorted({family.arch for family in FAMILIES.values()} - {""}))
    reason = f"is not supported; supported: {supported}"
    raise refused("general.architecture", architecture, reason)


def hf_config(model: GgufFile) -> dict:
    """config.json of a model. UserError names a key that is missing, or one whose value would
    change the arithmetic."""
    file_type = model.keys.get("general.type", "model")
    if file_type != "model":
        raise refused(
            "general.type",
            file_type,
            "is not supported; supported: model (--adapter takes a LoRA adapter in PEFT's folder)",
        )
    model_type = model_type_of(model.keys)
    family = FAMILIES[model_type]
    tensors = model.tensors
    if not tensors:
        raise UserError("the file has a vocabulary and no tensors; give the model's file")
    prefix = f"{family.arch}."
    values_by_key = {
        key.removeprefix(prefix): common_value(key, value)
        for key, value in model.keys.items()
        if key.startswith(prefix)
    }
    values = Entries(f"key {prefix}", values_by_key)
    hidden_size = values.number("embedding_length")
    num_heads = values.number("attention.head_count")
    head_dim = values.number("attention.key_length", max(1, hidden_size // num_heads))
    # Of a matrix that every model has; a quantized one says nothing, and bfloat16 is taken.
    dtype = tensors["blk.0.attn_output.weight"].block_type.dtype or torch.bfloat16
    # Defaults are llama.cpp's, which are not those of config.py.
    hf = {
        "model_type": model_type,
        "head_dim": head_dim,
        "partial_rotary_factor": values.number("rope.dimension_count", head_dim) / head_dim,
        "num_key_value_heads": num_heads,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "rope_theta": values.number("rope.freq_base", 10000.0),
        "dtype": dtype_name(dtype),
    }
    hf |= translate_keys(values, tensors, family)
    hf["num_hidden_layers"] -= values.number("nextn_predict_layers", 0)
    hf["sliding_window"] = hf.get("sliding_window") or None
    hf["rope_scaling"] = rope_scaling(values, tensors, hf)
    pattern = values.get("attention.sliding_window_pattern")
    if isinstance(pattern, tuple):  # for each layer: does it have a window?
        hf["layer_types"] = ["sliding_attention" if x else "full_attention" for x in pattern]
    elif pattern is not None:  # the layers of a period
        hf["sliding_window_pattern"] = pattern
    ids = special_ids(model.keys, "bos", "eos")
    # An id beyond the vocabulary means that there is none.
    hf |= {f"{role}_token_id": id for role, id in ids.items() if 0 <= id < hf["vocab_size"]}
    hf |= presence_flags(tensors, family)
    return hf | family.hf_keys(values.get, hf)


def translate_keys(values: Entries, tensors: Mapping[str, Blocks], family: Family) -> dict:
    """The keys that the family reads, under config.json's names. UserError for a key that is
    missing, that would change the arithmetic, or that is unknown."""
    own_names = {EXPERT_NAMES.get(key, key): key for key in family.experts}
    hf_key_by_gguf = {
        field.gguf: own_names.get(key, key)
        for key, field in (FIELDS | EXPERT_FIELDS).items()
        if field.gguf
    }
    supported_by_key = supported_keys(values, tensors, family, hf_key_by_gguf)
    hf = {}
    for key, value in values.items():
        is_unset = value == 0 and (type(value) is float or key in UNSET_AT_0)
        if key in hf_key_by_gguf and is_unset:
            continue  # llama.cpp reads this 0 as if the file did not have the key
        supported = supported_by_key.get(key, ())
        if supported is not None and value not in supported:
            choice = supported[0] if supported else "only files without it"
            reason = f"is not supported; supported: {choice}"
            raise refused(f"{family.arch}.{key}", value, reason)
        if supported is None and key in hf_key_by_gguf:
            hf[hf_key_by_gguf[key]] = value
    for key in REQUIRED.split():
        values.number(key)  # for its UserError
    return hf


def supported_keys(
    values: Entries,
    tensors: Mapping[str, Blocks],
    family: Family,
    hf_key_by_gguf: Mapping[str, str],
) -> dict[str, tuple | None]:
    """The architecture's keys -> their supported values; None: any."""
    # The keys of config.json that are not in `supported` may have any value.
    supported = supported_values(family, n_layers=0)
    supported_by_key = {
        **{key: supported.get(hf_key) for key, hf_key in hf_key_by_gguf.items()},
        **dict.fromkeys(ANY_VALUE_KEYS.split()),
        **HARMLESS,
        # A theta of windows, where the family has none, must be that of all layers.
        "rope.freq_base_swa": (values.get("rope.freq_base", 10000.0),),
        # llama.cpp's numbers of sigmoid and softmax; 0: not set.
        "expert_gating_func": (2 if family.fields.get("router_sigmoid") else 1, 0),
    }
    # Where rope_scaling reads these, any value will do.
    if "rope_factors_long.weight" in tensors:
        supported_by_key["rope.scaling.attn_factor"] = None
    if values.get("rope.scaling.type") == "yarn":
        supported_by_key["rope.scaling.yarn_attn_factor"] = None
    return supported_by_key | family.gguf_keys


def presence_flags(tensors: Mapping[str, Blocks], family: Family) -> dict[str, bool]:
    """config.json's flags of what a model has, which the first layer's tensors answer."""
    answers = [  # where biases share a key, the last row decides: q's
        (family.has_out_bias, "attn_output.bias"),
        (family.has_ffn_bias, "ffn_gate.bias"),
        (family.has_qkv_bias, "attn_q.bias"),
        ("use_qk_norm", "attn_q_norm.weight"),
    ]
    # A flag that is no key is the same for all models of the family.
    return {key: f"blk.0.{name}" in tensors for key, name in answers if isinstance(key, str)}


def rope_scaling(values: Mapping[str, object], tensors: Mapping[str, Blocks], hf: dict) -> dict:
    """RoPE's object as transformers writes it. config.py refuses unsupported types."""
    if "rope_factors_long.weight" in tensors:
        return {
            "rope_type": "longrope",
            "original_max_position_embeddings": values["rope.scaling.original_context_length"],
            "attention_factor": values.get("rope.scaling.attn_factor"),
            "short_factor": tensors["rope_factors_short.weight"][:].tolist(),
            "long_factor": tensors["rope_factors_long.weight"][:].tolist(),
        }
    rope_type = values.get("rope.scaling.type", "linear")  # llama.cpp's default
    factor = values.get("rope.scaling.factor", 0)
    if rope_type == "none" or (rope_type == "linear" and factor in (0, 1)):
        if "rope_freqs.weight" not in tensors:
            return {"rope_type": "default"}
        return llama3_scaling(tensors["rope_freqs.weight"], hf["head_dim"], hf["rope_theta"])
    if "rope_freqs.weight" in tensors:
        raise refused("rope.scaling.type", rope_type, "next to rope_freqs.weight")
    scaling = {"rope_type": rope_type, "factor": factor}
    if rope_type == "yarn":
        scaling |= {name: values[key] for name, key in YARN.items() if key in values}
        family = FAMILIES[hf["model_type"]]
        scaling["truncate"] = family.default_rope.get("truncate", True)
        attention_factor = values.get("rope.scaling.yarn_attn_factor", 1)
        if attention_factor != 1:  # 1 says nothing
            scaling["attention_factor"] = attention_factor
    return scaling


def llama3_scaling(stored: Blocks, head_dim: int, theta: float) -> dict:
    """Llama 3's RoPE scaling from the divisors of its frequencies, which are all that a file has of
    it. The low and high factors are taken to be the published ones."""
    exponents = torch.arange(0, head_dim, 2).double() / head_dim
    divisors = stored[:].double()  # (E / 2,)
    if divisors.shape != exponents.shape or not (divisors > 0).all():
        raise UserError(f"rope_freqs.weight must hold {len(exponents)} positive numbers")
    factor = float(divisors.max())
    if (divisors == 1).all():
        return {"rope_type": "default"}
    low = 1.0
    high = 4.0
    length = 8192  # unless a pair below tells another
    wavelengths = 2 * math.pi * theta**exponents
    # 1 / divisor = (1 - smooth) / factor + smooth, where smooth is (length / wavelength - low) /
    # (high - low), clamped to 0 and 1. A pair that is not clamped tells the length.
    smooth = (1 / divisors - 1 / factor) / (1 - 1 / factor)
    is_between = (smooth > 0) & (smooth < 1)
    if is_between.any():
        lengths = (smooth * (high - low) + low) * wavelengths
        length = float(lengths[is_between][0])
    expected = ((length / wavelengths - low) / (high - low)).clamp(0, 1)
    if not torch.allclose(expected, smooth, atol=1e-4):
        raise UserError(
            "rope_freqs.weight holds other numbers than Llama 3's scaling makes, which is not"
            " supported"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": round(length),
    }


# ---------------------------------------------------------------------------------------- tensors


def hf_tensors(model: GgufFile) -> dict[str, Blocks]:
    """The tensors of a model by Hugging Face names."""
    family = FAMILIES[model_type_of(model.keys)]
    hf_modules = hf_by_gguf(family)
    norm_offset = family.fields.get("norm_offset", 0.0)
    heads = {}
    if family.permutes_heads:
        key = f"{family.arch}.attention.head_count"
        heads["attn_q"] = int(model.keys.number(key))
        heads["attn_k"] = int(model.keys.number(f"{key}_kv", heads["attn_q"]))
    tensors = {}
    for name, blocks in model.tensors.items():
        match = re.fullmatch(r"(?s)(blk\.\d+\.)?(.*?)(\.\w+)?", name)
        layer, module, part = match.groups("")
        if module in ROPE_TENSORS:
            continue
        # The sinks, and the selection bias of experts, are parameters of Hugging Face's modules.
        part = {"attn_sinks": ".sinks", "exp_probs_b": ""}.get(module, part)
        offset = norm_offset if module.endswith("norm") else 0.0
        blocks = replace(blocks, offset=offset, heads=heads.get(module, 0))
        layer = layer.replace("blk.", "model.layers.")
        hf_name = f"{layer}{hf_modules.get(module, module)}{part}"
        # Matrices of one row, stored as vectors; the second is ERNIE's bias.
        if module == "ffn_gate_inp_shexp" or "moe_statics" in hf_name:
            shape = (1, blocks.shape[-1])
            blocks = replace(blocks, shape=shape, bytes=blocks.bytes.view(1, -1))
        # ffn_norm and post_attention_norm may both be post_attention_layernorm; a file has one.
        if module.endswith("norm") and hf_name in tensors:
            raise UserError(f"tensor {name!r} stands for {hf_name}, as another does")
        has_experts = "{}" in hf_name and len(blocks.shape) == (3 if part == ".weight" else 2)
        tensors |= experts_of(hf_name, blocks) if has_experts else {hf_name: blocks}
    return tensors


def experts_of(hf_name: str, stack: Blocks) -> dict[str, Blocks]:
    """The tensors of a stack of experts, whose numbers replace {} in their names."""
    shape = stack.shape[1:]
    tensors = {}
    for number, rows in enumerate(stack.bytes):
        expert = replace(stack, shape=shape, bytes=rows.view(shape[0], -1))
        tensors[hf_name.replace("{}", str(number))] = expert
    return tensors
