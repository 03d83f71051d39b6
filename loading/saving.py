"""Transformer -> a Hugging Face folder, the inverse of loading it, quantized or not.

save_model      config.json and safetensors of a whole model
write_tensors, write_config     the same in steps, for quantize.py, which holds a layer at a time
"""

import json
from pathlib import Path

import torch

from decoding.errors import UserError
from loading.config import text_part
from loading.families import FAMILIES
from loading.files import (
    INDEX_FILE,
    SINGLE_FILE,
    save_tensors,
    shard_name,
    write_atomically,
    write_index,
)
from loading.models import expected_tensors, is_float32, is_plain
from loading.quantization import QUICKDRAFT_CONFIG
from loading.weight_names import pieces
from model import Transformer
from weights import linears
from weights.formats import FORMATS
from weights.walker import named_linears, quantized_linears


def save_model(model: Transformer, checkpoint_dir: str | Path, hf: dict) -> None:
    """Write config.json (`hf` with the current schemes) and safetensors under Hugging Face names:
    model.safetensors, or for a quantized model a file per layer and an index, so that saving takes
    a layer's memory.

    config.json is deleted first and written last, so that an interrupted write leaves nothing that
    load_model would load. UserError for a packed model.
    """
    linears.check_unpacked(model, "saved")
    quantization_entry(model)
    expected_tensors(model.config, model)  # refuses dtypes that no file can hold
    folder = Path(checkpoint_dir)
    folder.mkdir(parents=True, exist_ok=True)
    # An earlier model's files. Some programs read every shard of a folder, whatever its index
    # says.
    earlier = [folder / name for name in ("config.json", SINGLE_FILE, INDEX_FILE)]
    earlier += folder.glob("model-?????-of-?????.safetensors")
    for file in earlier:
        file.unlink(missing_ok=True)
    if quantized_linears(model):
        shards = names_by_shard(model)
        files = {}
        for number, names in enumerate(shards, 1):
            files |= write_tensors(folder / shard_name(number, len(shards)), model, names)
        write_index(folder, files)
    else:
        write_tensors(folder / SINGLE_FILE, model, [name for name, _ in model.named_parameters()])
    write_config(folder, model, hf)


def names_by_shard(model: Transformer) -> list[list[str]]:
    """The parameters in each file of a quantized folder: those of each layer, and last all
    others."""
    shards = [[] for _ in range(len(model.layers) + 1)]
    for name, _ in model.named_parameters():
        module, number = name.split(".")[:2]
        shards[int(number) if module == "layers" else -1].append(name)
    return shards


def quantization_entry(model: Transformer) -> dict:
    """The entry "quantization" of a model's config.json; empty in full precision. UserError for
    several schemes."""
    scheme_by_name = {
        name: getattr(linear, "scheme", None) for name, linear in named_linears(model)
    }
    head_scheme = scheme_by_name.pop("lm_head")
    unquantized = [name for name, scheme in scheme_by_name.items() if not scheme]
    schemes = sorted({*scheme_by_name.values()} - {None})
    if not schemes and not head_scheme:
        return {}
    if len(schemes) != 1:
        blocks = " and ".join(schemes) or "full precision"
        raise UserError(
            f"no folder holds such a model: its blocks are in {blocks}, its head in"
            f" {head_scheme or 'full precision'}; quantize all blocks to one scheme"
        )
    entry = {"scheme": schemes[0], "head": head_scheme}
    if unquantized:
        entry["kept"] = unquantized
    return entry


def write_config(folder: Path, model: Transformer, hf: dict, is_portable: bool = False) -> None:
    """Write a config.json with the schemes of this model. With `is_portable`, other programs read
    the folder as compressed-tensors; otherwise they refuse it."""
    method = (hf.get("quantization") or {}).get("method")
    hf = {**text_part(hf), "tie_word_embeddings": model.config.tie_embeddings}
    # auto_map names code that is not copied.
    for key in ("quantization", "quantization_config", "auto_map"):
        hf.pop(key, None)
    entry = quantization_entry(model)
    if entry:
        hf["quantization"] = {"method": method, **entry} if method else entry
        hf["quantization_config"] = QUICKDRAFT_CONFIG
        if is_portable:
            from loading.quantized.compressed_tensors import compressed_tensors_config

            format = FORMATS[entry["scheme"]]
            hf["quantization_config"] = compressed_tensors_config(
                format, has_head=bool(entry["head"])
            )
    text = json.dumps(hf, indent=2) + "\n"
    write_atomically(folder / "config.json", lambda partial: partial.write_text(text))


def write_tensors(
    file: Path,
    model: Transformer,
    names: list[str],
    dtype: torch.dtype | None = None,
    is_portable: bool = False,
) -> dict[str, str]:
    """Write these parameters under their Hugging Face names, float32 weights as `dtype` but for
    those that a model of any dtype has in float32, parts under compressed-tensors' names with
    `is_portable`. Return {tensor name: file name}."""
    tensors = {}
    for name in names:
        for source, part in pieces(model.config, name, model.get_parameter(name).detach()):
            if is_portable and not is_plain(name):
                from loading.quantized.compressed_tensors import compressed_tensors_part

                source, part = compressed_tensors_part(source, part)
            has_dtype = is_plain(name) and not is_float32(model.config, name)
            is_cast = dtype and has_dtype and part.dtype == torch.float32
            new_dtype = dtype if is_cast else part.dtype
            tensors[source] = part.to(new_dtype, copy=True, memory_format=torch.contiguous_format)
            if is_cast and not tensors[source].isfinite().all() and part.isfinite().all():
                raise UserError(
                    f"{source}: its weights overflow {dtype}; --dtype bfloat16 has float32's range"
                )
    if FAMILIES[model.config.family].merged_experts is not None:
        from loading.quantized.merged_experts import merge_experts

        tensors = merge_experts(tensors, model.config)
    save_tensors(file, tensors)
    return dict.fromkeys(tensors, file.name)
