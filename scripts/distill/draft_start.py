"""The config.json and the first weights of a draft that scripts.distill_draft trains.

check_sizes             checks the flags of sizes against each other and the target
draft_config            config.json: sizes from the flags, or some of the target's layers
init_weights            random weights
weights_of_layers       the weights of some of the target's layers
project_embedding       the target's embedding in fewer columns
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from decoding.errors import UserError
from drafts.target_layers import layer_subset, parse_layers
from loading.config import config_from_hf, text_part
from loading.families import FAMILIES
from model import Config, Transformer
from weights.linears import QuantizedLinear, check_unpacked

# Keys of config.json that a draft must share with its target.
SHARED = (
    "vocab_size",
    "max_position_embeddings",
    "original_max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
# Flags whose values follow from the target, because a kind reads its states; an MTP head has all of
# its sizes.
TARGET_SIZES = {
    "eagle3": ("layers", "dim", "project"),
    "mtp": ("layers", "dim", "project", "heads", "kv_heads", "ffn"),
    "dflash": ("dim", "project"),
    "dspark": ("dim", "project"),
}
# Model types whose RoPE a Llama's config.json cannot express.
OWN_ROPES = (
    "gemma3_text",
    "phi3",
    "olmo3",
    "hunyuan",
    "hunyuan_v1_dense",
    "ministral3",
    "glm",
    "glm4",
    "glm4_moe",
    "hunyuan_v1_moe",
    "minimax_m2",
    "mellum",
    "qwen2_5_vl_text",
    "qwen3_vl_text",
    "qwen3_vl_moe_text",
)


def check_sizes(args, config: Config) -> None:
    """Check sizes against --kind and --from_layers, and set args.layers and args.dim. UserError
    for wrong flags."""
    vocab_size = config.vocab_size if args.kind == "eagle3" else 0
    if (args.draft_vocab or 0) > vocab_size:
        raise UserError(
            f"--draft_vocab {args.draft_vocab} is for --kind eagle3, up to the target's"
            f" {config.vocab_size} tokens"
        )
    if args.kind in TARGET_SIZES:
        sizes = {"layers": 1, "dim": config.dim}
        for name in TARGET_SIZES[args.kind]:
            value = getattr(args, name)
            if value and value != sizes.get(name):
                raise UserError(f"--kind {args.kind} sets --{name} itself: leave it out")
        args.layers = args.layers or 1
        args.dim = config.dim
    if args.from_layers:
        set_sizes_of_layers(args, config)
    if args.layers is None or args.dim is None:
        raise UserError(f"--kind {args.kind} needs --layers and --dim")
    if args.project and args.dim > config.dim:
        raise UserError(f"--project: --dim {args.dim} is more than the target's {config.dim}")


def set_sizes_of_layers(args, config: Config) -> None:
    if args.kind in TARGET_SIZES:
        raise UserError(f"--kind {args.kind} takes no --from_layers")
    if any(config.sparse):
        raise UserError(
            "--from_layers: layers of experts make no quick draft; give --layers and --dim"
        )
    args.from_layers = parse_layers(args.from_layers, config.n_layers)
    sizes = (args.layers, args.dim, args.heads, args.kv_heads, args.ffn)
    if any(sizes) or args.project:
        raise UserError(
            "--from_layers takes sizes and embedding from the target: give no sizes, and no"
            " --project"
        )
    args.layers = len(args.from_layers)
    args.dim = config.dim


def draft_config(hf: dict, args) -> dict:
    """config.json of a Llama with the target's RoPE; targets in OWN_ROPES pass on only theta. An
    MTP head has the target's own. UserError for sizes that do not divide."""
    if args.from_layers:
        return layers_config(hf, args.from_layers)
    hf = text_part(hf)
    if args.kind == "mtp":
        return {key: value for key, value in hf.items() if key != "quantization_config"}
    hf = {**FAMILIES[hf["model_type"]].defaults, **hf}
    if hf["model_type"] in OWN_ROPES:
        theta = config_from_hf({**hf, "quantization_config": None}).rope_theta
        ropes = ("rope_scaling", "rope_parameters", "original_max_position_embeddings")
        hf = {**hf, **dict.fromkeys(ropes), "rope_theta": theta}
    D = args.dim
    if D % 2:
        raise UserError(f"--dim {D} is odd, and RoPE rotates pairs: {D + 1} would work")
    heads = args.heads or default_heads(D)
    kv_heads = args.kv_heads or heads
    check_heads(D, heads, kv_heads)
    shared = {key: hf[key] for key in SHARED if hf.get(key) is not None}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": D,
        # 8/3 D as in Llama, rounded up to a multiple of 32 for group-wise quantization
        "intermediate_size": args.ffn or math.ceil(8 * D / 3 / 32) * 32,
        "num_hidden_layers": args.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": D // heads,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "bfloat16",
        **shared,
    }
    config_from_hf(config)
    return config


def default_heads(D: int) -> int:
    """Heads of 64, or of the largest even size below that divides D."""
    head_dims = [E for E in range(2, 65, 2) if D % E == 0]
    return D // max(head_dims)


def check_heads(D: int, heads: int, kv_heads: int) -> None:
    """UserError that names the numbers that would divide."""
    if D % (2 * heads):
        divisors = [H for H in range(1, D // 2 + 1) if D % (2 * H) == 0]
        raise UserError(
            f"--dim {D} does not divide into --heads {heads} of an even size; heads that would"
            f" work: {', '.join(map(str, divisors))}"
        )
    if heads % kv_heads:
        divisors = [G for G in range(1, heads + 1) if heads % G == 0]
        raise UserError(
            f"--heads {heads} is not a multiple of --kv_heads {kv_heads}; kv_heads that would"
            f" work: {', '.join(map(str, divisors))}"
        )


def layers_config(hf: dict, layer_ids: Sequence[int]) -> dict:
    """config.json of a model that consists of some of the target's layers."""
    max_layer = config_from_hf({**hf, "quantization_config": None}).n_layers - 1
    if not 0 <= min(layer_ids) <= max(layer_ids) <= max_layer:
        raise UserError(f"--from_layers {list(layer_ids)}: the target has layers 0 to {max_layer}")
    config = {key: value for key, value in hf.items() if key != "quantization_config"}
    if config.get("layer_types"):
        config["layer_types"] = [config["layer_types"][i] for i in layer_ids]
    if config.get("model_type") == "smollm3":
        rope_types = config_from_hf({**hf, "quantization_config": None}).rope_types
        config["no_rope_layers"] = [int(rope_types[i] is not None) for i in layer_ids]
    return config | {"num_hidden_layers": len(layer_ids), "dtype": "bfloat16"}


def init_weights(model: Transformer, seed: int) -> None:
    """GPT-2's scheme: normal(0, 0.02); the two matrices that write to the residual stream are
    scaled by depth."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            is_output = name.endswith(("attention.out.weight", "ffn.down.weight"))
            std = 0.02 / math.sqrt(2 * model.config.n_layers) if is_output else 0.02
            torch.nn.init.normal_(weight, std=std, generator=generator)


@torch.no_grad()
def weights_of_layers(
    draft: Transformer, target: Transformer, layer_ids: Sequence[int]
) -> dict[str, Tensor]:
    """First weights of a draft, in float32: some of the target's layers, its norm and its
    embedding. The mask's row of the embedding is the mean of the others. UserError for a packed
    target."""
    check_unpacked(target, "copied")
    subset = layer_subset(target, layer_ids)
    if (subset.windows, subset.rope_types) != (draft.windows, draft.rope_types):
        raise UserError(
            f"--from_layers {list(layer_ids)}: config.json cannot express the windows and RoPE of"
            " these"
        )
    source = dict(subset.named_modules())
    weights = {}
    for name, parameter in draft.named_parameters():
        module, _, part = name.rpartition(".")
        if module == "embed":
            stored = embedding_of(target)
        else:
            stored = plain_weight(source[module], part)
        num_extra = len(parameter) - len(stored)
        extra = stored.mean(0, keepdim=True).expand(num_extra, *stored.shape[1:])
        weights[name] = torch.cat((stored, extra))
    return weights


def plain_weight(module: torch.nn.Module, part: str) -> Tensor:
    """A module's parameter in floating point, where the module may be quantized."""
    if isinstance(module, QuantizedLinear) and part == "weight":
        return module.dequantized(torch.float32)
    return getattr(module, part).float()


def embedding_of(target: Transformer) -> Tensor:
    """The target's embedding (V, D) in float32. Its rows are looked up, quantized or not."""
    ids = torch.arange(target.config.vocab_size, device=target.norm.weight.device)
    return target.embed(ids).float()


@torch.no_grad()
def project_embedding(draft: Transformer, target: Transformer) -> None:
    """Set the draft's embedding to the target's, E, projected on its D leading directions. No other
    table of D columns has inner products of rows nearer to E's. It is scaled to the standard
    deviation of `init_weights`."""
    E = embedding_of(target)  # (V, D of the target)
    _, directions = torch.linalg.eigh(E.T @ E)  # in ascending order
    projected = E @ directions[:, -draft.config.dim :].flip(1)  # (V, D)
    # A mask's row, if there is one, comes last and keeps its random weights.
    draft.embed.weight[: len(projected)].copy_(projected * (0.02 / projected.std()))
