"""gpt-fast's model.pth -> a Hugging Face folder: `python -m scripts.convert_gptfast --checkpoint FILE --output DIR`.

gpt-fast (github.com/pytorch-labs/gpt-fast, scripts/convert_hf_checkpoint.py) stores tensors alone: queries, keys and
values of a layer in one matrix, the rows of queries and keys in the order of rotary pairs (2i, 2i + 1), and nothing
that says what the model is. That comes from --config or from the config.json beside the file, never from a name. What
its quantize.py made of it in int8 becomes a folder stored in int8, number for number; its int4 is packed for one kernel
and refused. The pickle is mapped and loaded with weights_only=True (it can run no code), a layer is held at a time, and
the tokenizer's files beside it come along.
"""

import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

import loading.quantized.reader as foreign
from cli.errors import ending_plainly
from cli.flags import Parser
from loading.checkpoint import read_config
from loading.files import complete_folder, read_json, save_tensors, shard_name, write_index
from loading.tokenizer import copy_files, load_tokenizer
from model import Config

# gpt-fast's module -> the Hugging Face ones whose rows, one after the other, make its matrix
LAYER = {
    "attention.wqkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.wo": ("self_attn.o_proj",),
    "feed_forward.w1": ("mlp.gate_proj",),
    "feed_forward.w3": ("mlp.up_proj",),
    "feed_forward.w2": ("mlp.down_proj",),
    "attention_norm": ("input_layernorm",),
    "ffn_norm": ("post_attention_layernorm",),
}
OUTER = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def half_split(rows: Tensor, heads: int) -> Tensor:
    """Reorder rows (heads * E, …) from rotary pairs (2i, 2i + 1) to the pairs (i, i + E/2) of model.py."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)  # (heads, E/2, 2, …) -> (heads, 2, E/2, …)


def shapes(config: Config, int8: bool) -> dict[str, tuple[int, ...]]:
    """What gpt-fast's file of this model holds: name -> shape. In int8 every Linear has scales, one a row."""
    D, F, V = config.dim, config.ffn_dim, config.vocab_size
    q, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    layer = dict(zip(LAYER, ((q + 2 * kv, D), (D, q), (F, D), (F, D), (D, F), (D,), (D,)), strict=True))
    found = {"tok_embeddings": (V, D), "norm": (D,), "output": (V, D)}
    found |= {f"layers.{i}.{name}": shape for i in range(config.n_layers) for name, shape in layer.items()}
    scales = {name: shape[:1] for name, shape in found.items() if len(shape) == 2 and name != "tok_embeddings"}
    return {f"{name}.weight": shape for name, shape in found.items()} | {
        f"{name}.scales": shape for name, shape in scales.items() if int8
    }


def check(file: Path, tensors: dict[str, Tensor], config: Config) -> None:
    """ValueError unless the file holds the tensors of this model, in their shapes and types, and no other."""
    int8 = is_int8(tensors)
    expected = shapes(config, int8)
    if config.tie_embeddings and "output.weight" not in tensors:
        expected = {name: shape for name, shape in expected.items() if _module(name) != "output"}
    problems = {
        "missing": [name for name in expected if name not in tensors],
        "unexpected": [name for name in tensors if name not in expected],
        "misshapen": [
            f"{name} is {list(tensors[name].shape)} instead of {list(shape)}"
            for name, shape in expected.items()
            if name in tensors and tensors[name].shape != shape
        ],
        "of another type": [
            wrong
            for name in expected
            if name in tensors and (wrong := wrong_type(name, tensors[name], f"{_module(name)}.scales" in expected))
        ],
    }
    found = [f"{what}: {_some(names)}" for what, names in problems.items() if names]
    if found:
        raise ValueError(f"{file}: its tensors do not fit config.json; {'; '.join(found)}")
    head = tensors.get("output.weight")
    table = tensors["tok_embeddings.weight"]
    if config.tie_embeddings and head is not None and not (head.dtype == table.dtype and torch.equal(head, table)):
        raise ValueError(
            f"{file}: output.weight is not tok_embeddings.weight, but config.json has tie_word_embeddings = true: pass"
            " --config with one that says false"
        )


def is_int8(tensors: dict[str, Tensor]) -> bool:
    return any(name.endswith(".scales") for name in tensors)


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def wrong_type(name: str, tensor: Tensor, quantized: bool) -> str | None:
    """What keeps a tensor from being taken over as it is."""
    if name.endswith(".scales"):
        exact = tensor.dtype in FLOATS and torch.equal(tensor.bfloat16().to(tensor.dtype), tensor)
        return None if exact else f"{name} holds numbers that bfloat16, in which scales are stored, would round"
    fits = tensor.dtype == torch.int8 if quantized else tensor.dtype in FLOATS
    return None if fits else f"{name} is {str(tensor.dtype).removeprefix('torch.')}"


def _some(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def open_pickle(file: Path) -> dict[str, Tensor]:
    """Mapped tensors by name; ValueError when it is no pickle of tensors alone, or of gpt-fast's int4."""
    try:
        tensors = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"{file}: no such file") from None
    except pickle.UnpicklingError:  # torch's own text advises to open it nevertheless
        raise ValueError(f"{file}: cannot be read as tensors alone: it holds what could run code when opened") from None
    except (RuntimeError, OSError, EOFError):
        raise ValueError(f"{file}: cannot be read as tensors alone: not a whole file of torch.save's format") from None
    whole = isinstance(tensors, dict) and all(isinstance(name, str) for name in tensors)
    if not whole or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ValueError(f"{file}: not a file of tensors by name, as gpt-fast writes it")
    packed = [name for name in tensors if name.endswith(".scales_and_zeros")]
    if packed:
        raise ValueError(
            f"{file}: {packed[0]} says that this is gpt-fast's int4, packed for one CUDA kernel: convert the model.pth"
            " that it was made from, then quantize the folder with quantize.py --scheme int4-g32"
        )
    return tensors


def groups(tensors: dict[str, Tensor], config: Config) -> Iterator[dict[str, Tensor]]:
    """Hugging Face tensors, a layer at a time, then what stands around the layers."""
    kv = config.n_kv_heads
    heads = {"self_attn.q_proj": config.n_heads, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
    for layer in range(config.n_layers):
        found = {}
        for module, targets in LAYER.items():
            for kind, tensor in parts(tensors, f"layers.{layer}.{module}"):
                sizes = [heads[target] * config.head_dim for target in targets] if len(targets) > 1 else len(tensor)
                for target, rows in zip(targets, tensor.split(sizes), strict=True):
                    turned = target in ("self_attn.q_proj", "self_attn.k_proj")
                    found[f"model.layers.{layer}.{target}.{kind}"] = half_split(rows, heads[target]) if turned else rows
        yield found
    outer = [name for name in OUTER if name != "output" or not config.tie_embeddings]
    yield {f"{OUTER[name]}.{kind}": tensor for name in outer for kind, tensor in parts(tensors, name)}


def parts(tensors: dict[str, Tensor], module: str) -> Iterator[tuple[str, Tensor]]:
    """What a module stores, under the names of quantize.py's int8 where it is quantized."""
    weight, scales = tensors[f"{module}.weight"], tensors.get(f"{module}.scales")
    yield "weight" if scales is None else "codes", weight
    if scales is not None:
        yield "scale", scales.bfloat16()


def find_config(file: Path, given: Path | None) -> tuple[dict, Config]:
    """The model's config.json, read and checked. ValueError where there is none, and for what gpt-fast cannot hold."""
    beside = file.parent / "config.json"
    if given is None and not beside.exists():
        raise ValueError(
            f"{file}: gpt-fast stores no configuration, and there is no config.json beside it: pass --config with the"
            " config.json of the Hugging Face model that it was made from"
        )
    config = read_config(given or beside)
    if config.qkv_bias or config.out_bias or config.ffn_bias or config.qk_norm:
        raise ValueError(f"{given or beside}: this model has biases or norms of queries, which gpt-fast's files lack")
    if config.family not in ("llama", "mistral"):
        raise ValueError(f"{given or beside}: gpt-fast computes no model of model_type {config.family!r}")
    return read_json(given or beside), config


def convert(file: Path, output: Path, config_file: Path | None = None) -> None:
    """Write the folder `output`; ValueError names what is missing or does not fit. Works in a temporary folder beside
    it, whose config.json comes last, so that an interrupted conversion leaves nothing that loads."""
    if output.exists():
        raise ValueError(f"{output}: exists already; remove it or choose another --output")
    tensors = open_pickle(file)
    hf, config = find_config(file, config_file)
    check(file, tensors, config)
    load_tokenizer(file.parent)  # is there one, and can it be read
    hf = {key: value for key, value in hf.items() if key not in ("torch_dtype", "quantization")}
    hf["dtype"] = str(tensors["tok_embeddings.weight"].dtype).removeprefix("torch.")
    if is_int8(tensors):
        hf["quantization"] = {"scheme": "int8", "head": "int8" if "output.scales" in tensors else None, "method": "rtn"}
        hf["quantization_config"] = foreign.QUICKDRAFT_CONFIG
    files, count = {}, config.n_layers + 1
    with complete_folder(output) as partial:
        for number, group in enumerate(tqdm(groups(tensors, config), total=count, desc="convert", unit="file"), 1):
            name = shard_name(number, count)
            # Views of the mapped file, some of one matrix: each gets memory of its own.
            own = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in group.items()}
            save_tensors(partial / name, own)
            files |= dict.fromkeys(own, name)
        write_index(partial, files)
        copy_files(file.parent, partial)
        (partial / "config.json").write_text(json.dumps(hf, indent=2) + "\n")


def main() -> None:
    parser = Parser(description="Convert gpt-fast's model.pth to a Hugging Face folder.")
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, metavar="FILE", help="model.pth, or model_int8.pth")
    add("--output", type=Path, required=True, metavar="DIR", help="folder to create")
    add("--config", type=Path, metavar="FILE", help="the model's config.json; default: the one beside the checkpoint")
    args = parser.parse_args()
    with ending_plainly():
        convert(args.checkpoint, args.output, args.config)


if __name__ == "__main__":
    main()
