"""LoRA adapters in PEFT's layout, merged into the weights of a folder while they are read.

    merging_reader  a function that reads tensors -> one that reads merged tensors
    scale_of        alpha / r of a matrix, from adapter_config.json

Merged is W + alpha / r * B A (arXiv:2106.09685), computed in float32 and rounded once, to the model's dtype or scheme.
"""

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from loading.files import open_shards, read_json

PREFIX = "base_model.model."
# Keys of adapter_config.json -> the values that a plain LoRA has.
PLAIN = {
    "peft_type": ("LORA",), "bias": ("none",), "use_dora": (False,), "fan_in_fan_out": (False,), "lora_bias": (False,),
    "use_qalora": (False,), "layer_replication": (), "trainable_token_indices": (), "target_parameters": (),
    "alora_invocation_tokens": (), "kasa_config": (), "use_bdlora": (False,), "monteclora_config": (),
    "arrow_config": (),
    # The others, such as "pissa" and "olora", also change the weights that the adapter is added to.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva", "mica"),
}  # fmt: skip


def merging_reader(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], is_tied: bool, read: Callable[[str], Tensor]
) -> Callable[[str], Tensor]:
    """`read` with the adapter merged. `shapes` has those of the model's tensors by Hugging Face name. ValueError names
    the key or tensor that is no plain LoRA of this model."""
    file = folder / "adapter_config.json"
    settings, pairs, saved = read_json(file), {}, {}
    for key, values in PLAIN.items():
        if settings.get(key) not in (None, [], {}, *values):
            supported = f"{' or '.join(map(repr, values))} would work" if values else "only adapters without it work"
            raise ValueError(
                f"{file}: {key} = {settings[key]!r:.99} is not supported: it adds something else than a plain LoRA's"
                f" alpha / r * B A to the weights; {supported}"
            )
    for name, (_, reader) in open_shards([folder / "adapter_model.safetensors"]).items():
        match = re.fullmatch(r"(.+)\.lora_(embedding_)?([AB])(\.weight)?", name.removeprefix(PREFIX))
        target = f"{match[1]}.weight" if match else name.removeprefix(PREFIX).replace(".base_layer.", ".")
        if target not in shapes:
            raise ValueError(f"{folder}: {name} fits no tensor of this model; use the model that it was trained on")
        if is_tied and target in ("model.embed_tokens.weight", "lm_head.weight"):
            raise ValueError(f"{folder}: {name} changes an embedding that is also the head, which would change both")
        if match:
            pairs.setdefault(target, {})[match[3]] = reader, name, bool(match[2])
        else:
            saved[target] = reader, name
    for target, parts in pairs.items():
        check_pair(folder, target, parts, shapes[target])
    for target, (reader, name) in saved.items():
        if tuple(reader.get_slice(name).get_shape()) != shapes[target]:
            shape = reader.get_slice(name).get_shape()
            raise ValueError(f"{folder}: {name} has shape {tuple(shape)}, the model's tensor {shapes[target]}")

    def read_merged(name: str) -> Tensor:
        reader, stored_name = saved.get(name, (None, None))
        weight = reader.get_tensor(stored_name) if reader else read(name)
        if name not in pairs:
            return weight
        a, b = (reader.get_tensor(stored_name).float() for reader, stored_name, _ in parts_of(pairs[name]))
        delta = b @ a  # (out, r) (r, in) -> (out, in); an embedding's is stored as (D, r) (r, V)
        delta = delta.T if pairs[name]["A"][2] else delta
        return torch.add(weight.float(), delta, alpha=scale_of(file, settings, name.removesuffix(".weight"), len(a)))

    return read_merged


def adapter_hash(folder: str | Path) -> str:
    """SHA-256 of both files, all bytes, because adapters are small."""
    names = "adapter_config.json", "adapter_model.safetensors"
    return hashlib.sha256(b"".join(Path(folder, name).read_bytes() for name in names)).hexdigest()


def parts_of(pair: dict) -> tuple:
    return pair["A"], pair["B"]


def check_pair(folder: Path, target: str, parts: dict, shape: tuple[int, ...]) -> None:
    """ValueError where A or B is missing, or their product has another shape than the matrix."""
    if parts.keys() != {"A", "B"}:
        raise ValueError(f"{folder}: {target} has lora_{next(iter(parts))} alone; an adapter has A and B")
    a, b = (tuple(reader.get_slice(name).get_shape()) for reader, name, _ in parts_of(parts))
    product = (a[1], b[0]) if parts["A"][2] else (b[0], a[1])
    if a[0] != b[1] or product != shape:
        raise ValueError(f"{folder}: lora_A {a} and lora_B {b} of {target} make no matrix of shape {shape}")


def scale_of(file: Path, settings: dict, module: str, rank: int) -> float:
    """alpha / r, or alpha / sqrt(r) with use_rslora; alpha_pattern has modules with an alpha of their own."""
    patterns = settings.get("alpha_pattern") or {}
    key = next((key for key in patterns if re.match(rf"(.*\.)?({key})$", module)), None)
    alpha = patterns[key] if key else settings.get("lora_alpha", 8)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ValueError(f"{file}: lora_alpha of {module} is {alpha!r:.99}, and must be a number")
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
