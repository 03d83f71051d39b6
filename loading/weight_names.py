"""The names of tensors: a parameter of ours <-> the Hugging Face tensors that fill it.

    OUTER, INNER    our module -> the modules whose rows, one after the other, make its matrix
    sources         the tensors behind one parameter;  pieces  and the rows of it that each fills

A Family's `names` replace entries of INNER, or add to them. This file does not know files; tp.py
knows the rows of a rank.
"""

from collections.abc import Iterator

from torch import Tensor

from loading.families import FAMILIES
from model import Config
from tp import ALONE, Ranks, shard_spec, source_rows

OUTER = {"embed": ["model.embed_tokens"], "norm": ["model.norm"], "lm_head": ["lm_head"]}
INNER = {
    "attention_norm": ["input_layernorm"],
    "attention": ["self_attn"],  # its sinks
    "attention.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "attention.q_norm": ["self_attn.q_norm"],
    "attention.k_norm": ["self_attn.k_norm"],
    "attention.out": ["self_attn.o_proj"],
    "ffn_norm": ["post_attention_layernorm"],
    "ffn.gate_up": ["mlp.gate_proj", "mlp.up_proj"],
    "ffn.down": ["mlp.down_proj"],
    "ffn.router": ["mlp.gate"],
    "ffn.experts": ["mlp.gate.e_score_correction_bias"],  # their selection bias
    # {}: the expert's number
    "ffn.experts.gate_up": ["mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"],
    "ffn.experts.down": ["mlp.experts.{}.down_proj"],
    "ffn.shared.gate_up": ["mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"],
    "ffn.shared.down": ["mlp.shared_experts.down_proj"],
}


def sources(config: Config, name: str) -> list[str]:
    """Hugging Face tensor names behind one parameter: 'layers.3.ffn.gate_up.weight' -> gate's and
    up's. 'layers.3.ffn.gate_up.1.weight', of a fused matrix in parts, -> up's. The weights of a
    tied head are the embedding's."""
    module, part = name.rsplit(".", 1)
    fused, _, number = module.rpartition(".")
    if number.isdigit():
        return [sources(config, f"{fused}.{part}")[int(number)]]
    if config.tie_embeddings and name == "lm_head.weight":
        module = "embed"
    if module in OUTER:
        return [f"{source}.{part}" for source in OUTER[module]]
    _, layer, module = module.split(".", 2)
    expert = ""
    if module.startswith("ffn.experts."):
        _, _, expert, matrix = module.split(".")
        module = f"ffn.experts.{matrix}"
    names = FAMILIES[config.family].names.get(module) or INNER[module]
    suffix = "" if part == "selection_bias" else f".{part}"
    return [f"model.layers.{layer}.{source.format(expert)}{suffix}" for source in names]


def pieces(
    config: Config, name: str, parameter: Tensor, ranks: Ranks = ALONE
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, the rows of `parameter` that it fills), views of the parameter's memory.
    `parameter` holds the share of one of the ranks."""
    module, _ = name.rsplit(".", 1)
    names = sources(config, name)
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
