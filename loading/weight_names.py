"""What tensors are called: a parameter of ours <-> the Hugging Face tensors that fill it.

    OUTER, INNER    our module -> the modules whose rows, one after the other, make its matrix
    FAMILIES        what differs in some; EXPERTS  the same of the sparse ones
    sources         the tensors behind one parameter;  pieces  and the rows of it that each fills

This file does not know files. What a rank holds of a parameter, tp.py says.
"""

from collections.abc import Iterator

from torch import Tensor

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
    "ffn.shared.gate_up": ["mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"],
    "ffn.shared.down": ["mlp.shared_expert.down_proj"],
}
AFTER = {"attention_norm": ["post_attention_layernorm"], "ffn_norm": ["post_feedforward_layernorm"]}
FAMILIES = {  # what differs from INNER
    "phi3": {"attention.qkv": ["self_attn.qkv_proj"], "ffn.gate_up": ["mlp.gate_up_proj"]},
    "olmo2": AFTER,
    "olmo3": AFTER,
    "exaone4": AFTER,
    "hunyuan_v1_dense": {
        "attention.q_norm": ["self_attn.query_layernorm"],
        "attention.k_norm": ["self_attn.key_layernorm"],
    },
}
EXPERT = {"gate_up": ["mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"], "down": ["mlp.experts.{}.down_proj"]}
# Families with names of their own. gpt-oss stores all experts in one tensor, which merged_experts.py takes apart.
ROUTERS = {
    "mixtral": ["block_sparse_moe.gate"],
    "gpt_oss": ["mlp.router"],
    "qwen2_moe": ["mlp.gate", "mlp.shared_expert_gate"],
}
EXPERTS = {
    "mixtral": {
        "gate_up": ["block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"],
        "down": ["block_sparse_moe.experts.{}.w2"],
    }
}


def sources(family: str, name: str) -> list[str]:
    """Hugging Face tensor names behind one parameter: 'layers.3.ffn.gate_up.weight' -> gate's and up's."""
    module, kind = name.rsplit(".", 1)
    if module in OUTER:
        return [f"{source}.{kind}" for source in OUTER[module]]
    _, layer, module = module.split(".", 2)
    if module.startswith("ffn.experts."):
        _, _, number, module = module.split(".")
        found = [source.format(number) for source in EXPERTS.get(family, EXPERT)[module]]
    else:
        inner = {**INNER, **FAMILIES.get(family, {})}[module]
        found = ROUTERS.get(family, inner) if module == "ffn.router" else inner
    return [f"model.layers.{layer}.{source}.{kind}" for source in found]


def pieces(config, name: str, parameter: Tensor, ranks: Ranks = ALONE) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, the rows of `parameter` that it fills), views of the parameter's memory. `parameter` holds
    what belongs to one of the ranks."""
    module, names, parts = name.rsplit(".", 1)[0], sources(config.family, name), [parameter]
    if len(names) > 1:
        sizes = source_rows(shard_spec(module), len(parameter), config, ranks)
        if module.endswith("ffn.router") and config.shared_dim:
            sizes = [config.n_experts, 1]
        parts = parameter.split(sizes)
    yield from zip(names, parts, strict=True)
