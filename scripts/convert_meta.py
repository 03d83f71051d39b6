"""Meta's own release files -> a Hugging Face folder: `python -m scripts.convert_meta --input DIR --output DIR`.

Reads params.json, consolidated.*.pth and tokenizer.model, and writes config.json, one safetensors file a layer with
their index, and the tokenizer. The pickles are mapped, not read, and loaded with weights_only=True (they can run no
code), so that one layer is held at a time. Pickles are opened here and in convert_gptfast alone.
"""

import json
import pickle
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from cli.errors import ending_plainly
from cli.flags import Parser
from loading.files import complete_folder, read_json, save_tensors, shard_name, write_index
from loading.tokenizer import load_tokenizer

# Meta's module -> (Hugging Face's, the dimension that model-parallel shards split: None is replicated)
LAYER = {
    "attention.wq": ("self_attn.q_proj", 0),
    "attention.wk": ("self_attn.k_proj", 0),
    "attention.wv": ("self_attn.v_proj", 0),
    "attention.wo": ("self_attn.o_proj", 1),
    "feed_forward.w1": ("mlp.gate_proj", 0),
    "feed_forward.w2": ("mlp.down_proj", 1),
    "feed_forward.w3": ("mlp.up_proj", 0),
    "attention_norm": ("input_layernorm", None),
    "ffn_norm": ("post_attention_layernorm", None),
}


def half_split(weight: Tensor, heads: int) -> Tensor:
    """Reorder rows (heads * E, D) from Meta's rotary pairs (2i, 2i + 1) to the pairs (i, i + E/2) of model.py."""
    rows, D = weight.shape
    pairs = weight.view(heads, rows // heads // 2, 2, D)  # (heads, E/2, 2, D)
    return pairs.transpose(1, 2).reshape(rows, D)


def join(shards: list[dict[str, Tensor]], name: str, dim: int | None) -> Tensor:
    """One whole tensor from its model-parallel slices."""
    parts = [shard[name] for shard in shards]
    return parts[0] if dim is None or len(parts) == 1 else torch.cat(parts, dim=dim)


def embedding(shards: list[dict[str, Tensor]], dim: int) -> Tensor:
    """Llama 2 splits the embedding over its columns, Llama 3 over the vocabulary: the shape tells."""
    columns = shards[0]["tok_embeddings.weight"].size(1)
    return join(shards, "tok_embeddings.weight", 0 if columns == dim else 1)


def groups(shards: list[dict[str, Tensor]], params: dict) -> Iterator[dict[str, Tensor]]:
    """Hugging Face tensors, a layer at a time, then what stands around the layers."""
    heads = params["n_heads"]
    rotated = {"attention.wq": heads, "attention.wk": params.get("n_kv_heads") or heads}
    for layer in range(params["n_layers"]):
        tensors = {}
        for meta, (hf, dim) in LAYER.items():
            weight = join(shards, f"layers.{layer}.{meta}.weight", dim)
            weight = half_split(weight, rotated[meta]) if meta in rotated else weight
            tensors[f"model.layers.{layer}.{hf}.weight"] = weight.contiguous()
        yield tensors
    yield {
        "model.embed_tokens.weight": embedding(shards, params["dim"]).contiguous(),
        "model.norm.weight": shards[0]["norm.weight"],
        "lm_head.weight": join(shards, "output.weight", 0).contiguous(),
    }


def open_pickle(file: Path) -> dict[str, Tensor]:
    """Mapped tensors of one file; ValueError when it is no pickle of tensors alone."""
    try:
        return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{file}: cannot be read as tensors alone: {str(error).splitlines()[0]}") from None


def config_json(params: dict, shards: list[dict[str, Tensor]], rope_factor: float | None, context: int | None) -> dict:
    """config.json from params.json. What params.json does not say is asked for or announced, never guessed silently."""
    rope = {"rope_type": "default", "rope_theta": params.get("rope_theta") or 10000.0}
    if params.get("use_scaled_rope"):
        factor = rope_factor or params.get("rope_scaling_factor")
        if factor is None:
            raise ValueError(
                "params.json: use_scaled_rope is set without a factor; pass --rope_factor 8 for Llama 3.1 and 3.3,"
                " 32 for Llama 3.2"
            )
        rope |= {
            "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }  # fmt: skip
    vocab_size = embedding(shards, params["dim"]).size(0)
    if context is None:
        context = 131072 if params.get("use_scaled_rope") else 8192 if vocab_size > 100_000 else 4096
        print(f"params.json does not say the context length: assuming {context} (--context N)", file=sys.stderr)
    first = shards[0]["layers.0.feed_forward.w1.weight"]
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "vocab_size": vocab_size, "hidden_size": params["dim"], "intermediate_size": first.size(0) * len(shards),
        "num_hidden_layers": params["n_layers"], "num_attention_heads": params["n_heads"],
        "num_key_value_heads": params.get("n_kv_heads") or params["n_heads"], "rms_norm_eps": params["norm_eps"],
        "max_position_embeddings": context, "rope_parameters": rope, "tie_word_embeddings": False,
        "dtype": str(first.dtype).removeprefix("torch."),
    }  # fmt: skip


def convert(source: Path, output: Path, rope_factor: float | None = None, context: int | None = None) -> None:
    """Write the folder `output`; ValueError names what is missing. Works in a temporary folder beside it, whose
    config.json comes last, so that an interrupted conversion leaves nothing that loads."""
    params = read_json(source / "params.json")
    files = sorted(source.glob("consolidated.*.pth"))
    if not files:
        raise ValueError(f"{source}: no consolidated.*.pth")
    if not (source / "tokenizer.model").exists():
        raise ValueError(f"{source}: no tokenizer.model; Meta keeps it beside the model's folder: copy it here")
    if output.exists():
        raise ValueError(f"{output}: exists already; remove it or choose another --output")
    shards = [open_pickle(file) for file in files]
    tokenizer = load_tokenizer(source)
    config = config_json(params, shards, rope_factor, context)
    config |= {"bos_token_id": tokenizer.bos_id, "eos_token_id": min(tokenizer.stop_ids, default=None)}
    files, count = {}, params["n_layers"] + 1
    with complete_folder(output) as partial:
        for number, tensors in enumerate(tqdm(groups(shards, params), total=count, desc="convert", unit="file"), 1):
            save_tensors(partial / shard_name(number, count), tensors)
            files |= dict.fromkeys(tensors, shard_name(number, count))
        write_index(partial, files)
        shutil.copyfile(source / "tokenizer.model", partial / "tokenizer.model")
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = Parser(description="Convert Meta's release files to a Hugging Face folder.")
    parser.add_argument("--input", type=Path, required=True, help="folder with params.json and consolidated.*.pth")
    parser.add_argument("--output", type=Path, required=True, help="folder to create")
    parser.add_argument("--rope_factor", type=float, help="for scaled RoPE: 8 for Llama 3.1 and 3.3, 32 for 3.2")
    parser.add_argument("--context", type=int, help="positions that the model was trained for")
    args = parser.parse_args()
    with ending_plainly():
        try:
            convert(args.input, args.output, args.rope_factor, args.context)
        except KeyError as error:
            parser.error(f"{args.input}: {error} is missing from params.json or consolidated.*.pth")


if __name__ == "__main__":
    main()
