"""gpt-oss's experts: a layer's experts in one tensor <-> a tensor for each expert.

    split_experts   stored tensors -> those of every expert, under weight_names.py's names
    tensor_reader   the tensor of a name, or the weight of an expert in MXFP4
    is_mxfp4        is this the config.json of such a folder?
    merge_experts   the tensors of experts in full precision -> those of a published folder

Published in MXFP4 (E experts, 2I rows of gate and up in turn): gate_up_proj_blocks (E, 2I, D / 32,
16) uint8, two elements a byte, low half first; gate_up_proj_scales (E, 2I, D / 32) uint8; the same
of down_proj. These are the codes and scales of our mxfp4, bit for bit. In full precision
gate_up_proj is (E, D, 2I). Source: transformers 5.23, models/gpt_oss/modeling_gpt_oss.py and
integrations/mxfp4.py.
"""

import re
from collections.abc import Callable

import torch
from torch import Tensor

from loading.families import family_of
from weights.formats import dequantize_tensor

MERGED = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)(|_blocks|_scales|_bias)")
EXPERT = re.compile(r"(.*\.mlp\.experts)\.\d+\.(gate|up|down)_proj\.(weight|bias)")
PART_BY_SUFFIX = {"": "weight", "_blocks": "codes", "_scales": "scale", "_bias": "bias"}
ROWS_BY_MODULE = {
    "gate_up_proj": {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)},
    "down_proj": {"down_proj": slice(None)},
}


def is_mxfp4(hf: dict) -> bool:
    """Is this config.json that of gpt-oss as published? Its experts are then in MXFP4."""
    family = family_of(hf)
    if family is None or not family.merges_experts:
        return False
    settings = hf.get("quantization_config")
    return isinstance(settings, dict) and settings.get("quant_method") == "mxfp4"


class StoredExpert:
    """One expert's rows of a merged tensor, with the methods of a stored tensor."""

    def __init__(self, merged, part_name: str, number: int, rows: slice):
        self.merged = merged
        self.part_name = part_name
        self.number = number
        self.rows = rows

    def get_shape(self) -> list[int]:
        _, *shape = self.merged.get_shape()
        if self.part_name == "weight":
            shape.reverse()
        if self.part_name == "codes":
            shape = [shape[0], shape[1] * shape[2]]
        shape[0] = len(range(shape[0])[self.rows])
        return shape

    def get_dtype(self) -> str:
        return self.merged.get_dtype()

    def __getitem__(self, index) -> Tensor:
        tensor = self.merged[self.number : self.number + 1][0]  # reads one expert alone
        if self.part_name == "weight":
            tensor = tensor.T  # (D, rows) -> (rows, D)
        tensor = tensor[self.rows]
        if self.part_name == "codes":
            tensor = tensor.flatten(1)  # (rows, D / 32, 16) -> (rows, D / 2)
        return tensor[index]


def split_experts(tensors: dict[str, object]) -> dict[str, object]:
    """Name -> stored tensor, with every expert's tensors in place of a layer's."""
    split = {}
    for name, stored in tensors.items():
        match = MERGED.fullmatch(name)
        if match is None:
            split[name] = stored
            continue
        experts, merged_module, suffix = match.groups()
        part_name = PART_BY_SUFFIX[suffix]
        for number in range(stored.get_shape()[0]):
            for module, rows in ROWS_BY_MODULE[merged_module].items():
                expert = StoredExpert(stored, part_name, number, rows)
                split[f"{experts}.{number}.{module}.{part_name}"] = expert
    return split


def tensor_reader(tensors: dict[str, object]) -> Callable[[str], Tensor]:
    """The tensor of a name, or the weight of an expert that is stored in MXFP4."""

    def read(name: str) -> Tensor:
        if name in tensors:
            return tensors[name][...]
        module = name.removesuffix(".weight")
        parts = {part: read(f"{module}.{part}") for part in ("codes", "scale")}
        return dequantize_tensor(parts, "mxfp4")

    return read


def merge_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a published folder. Layers with quantized experts stay as they are, for our
    own use."""
    merged = {}
    layers = {}  # (layer, part) -> {module: its tensors, expert by expert}
    for name, tensor in tensors.items():
        match = EXPERT.fullmatch(name)
        if match is None or f"{match[1]}.0.gate_proj.weight" not in tensors:
            merged[name] = tensor
            continue
        layer, module, part_name = match.groups()
        layers.setdefault((layer, part_name), {}).setdefault(module, []).append(tensor)
    for (layer, part_name), tensors_by_module in layers.items():
        stacks = {module: torch.stack(parts) for module, parts in tensors_by_module.items()}
        gate_up = torch.stack((stacks["gate"], stacks["up"]), dim=2)  # (E, I, 2, …)
        gate_up = gate_up.flatten(1, 2)  # (E, 2I, …), rows in turn
        for module, tensor in (("gate_up_proj", gate_up), ("down_proj", stacks["down"])):
            if part_name == "bias":
                merged[f"{layer}.{module}_bias"] = tensor
            else:
                merged[f"{layer}.{module}"] = tensor.mT.contiguous()
    return merged
