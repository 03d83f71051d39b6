"""The names of tensors: a parameter of ours <-> the Hugging Face tensors that fill it, and
llama.cpp's.

    MODULES         our module -> the modules whose rows, one after the other, make its matrix
    module_names    a family's row of it;  hf_by_gguf  all of them
    stored_names    the tensors behind one parameter;  pieces  and the rows of it that each fills

A Family's `names` replace rows of MODULES, or add to them. This file does not know files; tp.py
knows the rows of a rank.
"""

from collections.abc import Iterator

from torch import Tensor

from loading.families import FAMILIES, Family
from model import Config
from tp import ALONE, Ranks, shard_spec, source_rows

# Our module -> the names of Hugging Face's, and of llama.cpp's.
MODULES = {
    "embed": ("model.embed_tokens", "token_embd"),
    "norm": ("model.norm", "output_norm"),
    "lm_head": ("lm_head", "output"),
    # Those of a layer.
    "attention_norm": ("input_layernorm", "attn_norm"),
    "attention_after": ("post_attention_layernorm", "post_attention_norm"),
    "attention": ("self_attn", "attn_sinks"),  # its sinks
    "attention.qkv": (
        "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
        "attn_q attn_k attn_v",
    ),
    "attention.q_norm": ("self_attn.q_norm", "attn_q_norm"),
    "attention.k_norm": ("self_attn.k_norm", "attn_k_norm"),
    "attention.out": ("self_attn.o_proj", "attn_output"),
    "ffn_norm": ("post_attention_layernorm", "ffn_norm"),
    "ffn_after": ("post_feedforward_layernorm", "post_ffw_norm"),
    "ffn.gate_up": ("mlp.gate_proj mlp.up_proj", "ffn_gate ffn_up"),
    "ffn.down": ("mlp.down_proj", "ffn_down"),
    "ffn.router": ("mlp.gate", "ffn_gate_inp ffn_gate_inp_shexp"),
    # The experts' selection bias.
    "ffn.experts": ("mlp.gate.e_score_correction_bias", "exp_probs_b"),
    # {}: the expert's number. llama.cpp's tensors are (experts, out, in).
    "ffn.experts.gate_up": (
        "mlp.experts.{}.gate_proj mlp.experts.{}.up_proj",
        "ffn_gate_exps ffn_up_exps",
    ),
    "ffn.experts.down": ("mlp.experts.{}.down_proj", "ffn_down_exps"),
    "ffn.shared.gate_up": (
        "mlp.shared_experts.gate_proj mlp.shared_experts.up_proj",
        "ffn_gate_shexp ffn_up_shexp",
    ),
    "ffn.shared.down": ("mlp.shared_experts.down_proj", "ffn_down_shexp"),
}


def module_names(family: Family, module: str) -> tuple[list[str], list[str]]:
    """The names of a module's sources: Hugging Face's and llama.cpp's."""
    names = MODULES.get(module, ("", ""))
    row = family.names.get(module) or names
    hf_names, gguf_names = (row, names[1]) if isinstance(row, str) else row
    return hf_names.split(), gguf_names.split()


def hf_by_gguf(family: Family) -> dict[str, str]:
    """llama.cpp's module -> Hugging Face's."""
    names = {}
    for module in {**MODULES, **family.names}:
        hf_names, gguf_names = module_names(family, module)
        names |= dict(zip(gguf_names, hf_names))  # a router has a second name in Qwen2-MoE alone
    return names


def stored_names(config: Config, name: str) -> list[str]:
    """Hugging Face tensor names behind one parameter: 'layers.3.ffn.gate_up.weight' -> gate's and
    up's. 'layers.3.ffn.gate_up.1.weight', of a fused matrix in parts, -> up's. The weights of a
    tied head are the embedding's."""
    module, part = name.rsplit(".", 1)
    fused, _, part_number = module.rpartition(".")
    if part_number.isdecimal():
        return [stored_names(config, f"{fused}.{part}")[int(part_number)]]
    if config.tie_embeddings and name == "lm_head.weight":
        module = "embed"
    prefix = ""
    expert = ""
    if module.startswith("layers."):
        _, layer, module = module.split(".", 2)
        prefix = f"model.layers.{layer}."
    if module.startswith("ffn.experts."):
        _, _, expert, matrix = module.split(".")
        module = f"ffn.experts.{matrix}"
    names, _ = module_names(FAMILIES[config.family], module)
    if not names:
        raise LookupError(
            f"{module}: no row of MODULES, nor of its Family's names, has its tensors"
        )
    suffix = "" if part == "selection_bias" else f".{part}"
    return [f"{prefix}{source.format(expert)}{suffix}" for source in names]


def pieces(
    config: Config, name: str, parameter: Tensor, ranks: Ranks = ALONE
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, the rows of `parameter` that it fills), views of the parameter's memory.
    `parameter` holds the share of one of the ranks."""
    module, _ = name.rsplit(".", 1)
    names = stored_names(config, name)
    parts = [parameter]
    # ERNIE's bias has a row for each group of experts, of which there is one.
    if "moe_statics" in names[0]:
        parts = [parameter[None]]  # (experts,) -> (1, experts)
    if len(names) > 1:
        sizes = source_rows(shard_spec(module), len(parameter), config, ranks)
        if module.endswith("ffn.router"):  # its last row is the shared expert's gate
            sizes = [config.n_experts, 1]
        parts = parameter.split(sizes)
    yield from zip(names, parts, strict=True)
