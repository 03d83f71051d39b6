"""LoRA adapters in PEFT's layout, merged into the weights of a folder while they are read.

    merge_adapter   stored tensors -> merged ones
    read_adapter    an adapter's tensors by the names of the text model's
    scale_of        alpha / r of a matrix, from adapter_config.json

Merged is W + alpha / r * B A (arXiv:2106.09685), computed in float32 and rounded once, to the
model's dtype or scheme.
"""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from decoding.errors import UserError
from loading.families import Family
from loading.files import open_tensors, require_json, text_model_tensors
from loading.models import empty_model, expected_tensors
from loading.plain_files import error_prefix, refused, short_repr
from loading.stored import Stored
from model import Config

EMBEDDING = "model.embed_tokens.weight"
# Keys of adapter_config.json -> the values that a plain LoRA has.
PLAIN_KEYS = [
    (("LORA",), "peft_type"),
    (("none",), "bias"),
    ((False,), "use_dora fan_in_fan_out lora_bias use_qalora use_bdlora"),
    (
        (),
        "layer_replication trainable_token_indices target_parameters alora_invocation_tokens"
        " kasa_config monteclora_config arrow_config",
    ),
    # The others, such as "pissa" and "olora", also change the weights that the adapter is added to.
    ((True, False, "gaussian", "orthogonal", "eva", "mica"), "init_lora_weights"),
]
PLAIN = {key: values for values, keys in PLAIN_KEYS for key in keys.split()}


class Adapter(NamedTuple):
    """An adapter's tensors by the names of the text model's tensors that they change."""

    pairs: dict[str, dict[str, object]]  # a matrix -> its "A" and "B"
    modules: dict[str, str]  # a matrix -> PEFT's name of the module, which alpha_pattern matches
    saved: dict[str, object]  # a tensor -> the one that replaces it


def merge_adapter(
    folder: Path, family: Family, config: Config, tensors: Mapping[str, Stored]
) -> dict[str, Stored]:
    """`tensors` with the adapter merged. `family`: of the folder's config.json, a wrapper's where
    it is one. UserError names the key or tensor that is no plain LoRA of this model."""
    adapter_config = read_adapter_config(folder / "adapter_config.json")
    pairs, modules, saved = read_adapter(folder, family, config)
    with error_prefix(folder / "adapter_config.json"):
        scales = {
            name: scale_of(adapter_config, modules[name], pair["A"].get_shape()[0])
            for name, pair in pairs.items()
        }

    def read_merged(name: str) -> Tensor:
        weight = saved[name][...] if name in saved else tensors[name].weight()
        if name not in pairs:
            return weight
        a = pairs[name]["A"][...].float()  # (r, in)
        b = pairs[name]["B"][...].float()  # (out, r)
        delta = b @ a  # (out, in); an embedding's is (D, V)
        if name == EMBEDDING:
            delta = delta.T
        return torch.add(weight.float(), delta, alpha=scales[name])

    merged = {
        name: replace(tensors[name], floats=partial(read_merged, name)) for name in (*pairs, *saved)
    }
    return {**tensors, **merged}


def read_adapter(folder: Path, family: Family, config: Config) -> Adapter:
    """The adapter's tensors, of which those of a wrapper's other parts are left out. UserError
    names one that fits no tensor of the text model."""
    stored = {}  # by the names of the model with its wrapper, which PEFT's patterns match
    for name, tensor in open_tensors([folder / "adapter_model.safetensors"]).items():
        name = name.removeprefix("base_model.model.")
        stored[name] = (name, tensor)
    adapter = Adapter({}, {}, {})
    text_tensors = text_model_tensors(stored, family, config.n_layers)
    for name, (original, tensor) in text_tensors.items():
        target, letter = target_of(name)
        if letter is None:
            adapter.saved[target] = tensor
        else:
            adapter.pairs.setdefault(target, {})[letter] = tensor
            adapter.modules[target] = target_of(original)[0].removesuffix(".weight")
    with error_prefix(folder):
        check_tensors(config, adapter.pairs, adapter.saved)
    return adapter


def read_adapter_config(file: Path) -> dict:
    """UserError for an adapter that is no plain LoRA."""
    adapter_config = require_json(file)
    for key, values in PLAIN.items():
        if adapter_config.get(key) not in (None, [], {}, *values):
            supported = " or ".join(map(repr, values)) or "an adapter without it"
            raise refused(
                f"{file}: {key}",
                adapter_config[key],
                "is not supported: it adds something else than a plain LoRA's alpha / r * B A to"
                f" the weights; supported: {supported}",
            )
    return adapter_config


def target_of(name: str) -> tuple[str, str | None]:
    """(the model's tensor that one of the adapter's belongs to, whether it is A, B or a new tensor
    itself)."""
    match = re.fullmatch(r"(.+)\.lora_(?:embedding_)?([AB])(?:\.weight)?", name)
    if match:
        return f"{match[1]}.weight", match[2]
    return name.replace(".base_layer.", "."), None


def check_tensors(config: Config, pairs: dict, saved: dict) -> None:
    """UserError for tensors that do not fit those of the model."""
    expected = expected_tensors(config, empty_model(config, torch.float32))
    shapes = {target: stored.get_shape() for target, stored in saved.items()}
    for target, parts in pairs.items():
        if parts.keys() != {"A", "B"}:
            raise UserError(f"{target} has lora_{''.join(parts)} alone; a LoRA has an A and a B")
        shape_of_a = parts["A"].get_shape()
        shape_of_b = parts["B"].get_shape()
        rank = shape_of_a[:1]
        if len(shape_of_a) != 2 or shape_of_b[1:] != rank or rank == [0]:
            raise UserError(
                f"{target} has an A of shape {shape_of_a} and a B of {shape_of_b}, which"
                " are no matrices of one rank: fetch the adapter again"
            )
        shape = [shape_of_b[0], shape_of_a[1]]
        shapes[target] = shape[::-1] if target == EMBEDDING else shape
    for target, shape in shapes.items():
        if config.tie_embeddings and target in (EMBEDDING, "lm_head.weight"):
            raise UserError(
                f"{target} is an embedding that is also the head, which"
                " cannot be merged; train the adapter without it"
            )
        if target not in expected:
            raise UserError(
                f"{target} fits no tensor of this model; use the model that it was trained on"
            )
        expected_shape = list(expected[target][0])
        if shape != expected_shape:
            raise UserError(
                f"{target} has the shape {shape}, the model's {expected_shape}; use the"
                " model that it was trained on"
            )


def adapter_hash(folder: str | Path) -> str:
    """SHA-256 of both files, all bytes, because adapters are small."""
    names = "adapter_config.json", "adapter_model.safetensors"
    return hashlib.sha256(b"".join(Path(folder, name).read_bytes() for name in names)).hexdigest()


def scale_of(adapter_config: dict, module: str, rank: int) -> float:
    """alpha / r, or alpha / sqrt(r) with use_rslora; alpha_pattern has modules with an alpha of
    their own. UserError names the key."""
    alphas = adapter_config.get("alpha_pattern") or {}
    if not isinstance(alphas, dict):
        raise refused("alpha_pattern", alphas, "must be an object")
    try:
        matches = (alphas[key] for key in alphas if re.match(rf"(.*\.)?({key})$", module))
        alpha = next(matches, adapter_config.get("lora_alpha", 8))
    except re.error as error:
        raise UserError(f"alpha_pattern = {short_repr(alphas)}: {error}") from None
    if type(alpha) not in (int, float) or not abs(alpha) < 1e30:
        raise refused("lora_alpha or alpha_pattern", alpha, "must be a number below 1e30")
    return alpha / (math.sqrt(rank) if adapter_config.get("use_rslora") else rank)
