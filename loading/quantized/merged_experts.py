"""gpt-oss's experts: a layer's experts in one tensor <-> a tensor for each expert.

    split_experts   open readers -> readers with every expert's tensors, under weight_names.py's names
    tensor_reader   the tensor of a name, or the weight of an expert in MXFP4
    is_mxfp4        is this the config.json of such a folder?
    merge_experts   the tensors of experts in full precision -> those of a published folder

Published in MXFP4 (E experts, 2I rows of gate and up in turn): gate_up_proj_blocks (E, 2I, D / 32, 16) uint8, two
elements a byte, low half first; gate_up_proj_scales (E, 2I, D / 32) uint8; the same of down_proj. These are the codes
and scales of our mxfp4, bit for bit. In full precision gate_up_proj is (E, D, 2I). Source: transformers 5.23,
models/gpt_oss/modeling_gpt_oss.py and integrations/mxfp4.py.
"""

import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from loading.families import family_of
from weights.formats import dequantize_tensor

MERGED = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)(|_blocks|_scales|_bias)")
PART_BY_SUFFIX = {"": "weight", "_blocks": "codes", "_scales": "scale", "_bias": "bias"}
ROWS_BY_MODULE = {
    "gate_up_proj": {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)},
    "down_proj": {"down_proj": slice(None)},
}
NUM_DIMS = {"weight": 3, "codes": 4, "scale": 3, "bias": 2}  # of a merged tensor


def is_mxfp4(hf: dict) -> bool:
    """Is this config.json that of gpt-oss as published? Its experts are then in MXFP4."""
    quantization, family = hf.get("quantization_config"), family_of(hf)
    if family is None or not family.merges_experts:
        return False
    return isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4"


class ExpertSlice:
    """One expert's rows of a merged tensor, with the methods of an open file's slice."""

    def __init__(self, reader, name: str, part_name: str, number: int, rows: slice):
        self.header, self.part_name, self.number, self.rows = reader.get_slice(name), part_name, number, rows

    def get_shape(self) -> list[int]:
        shape = self.header.get_shape()[1:]
        shape = shape[::-1] if self.part_name == "weight" else shape
        rows = len(range(shape[0])[self.rows])
        return [rows, shape[1] * shape[2] if self.part_name == "codes" else shape[1]] if len(shape) > 1 else [rows]

    def get_dtype(self) -> str:
        return self.header.get_dtype()

    def get(self) -> Tensor:
        tensor = self.header[self.number : self.number + 1][0]  # reads one expert alone
        tensor = tensor.T if self.part_name == "weight" else tensor  # (D, rows) -> (rows, D)
        tensor = tensor[self.rows]
        return tensor.flatten(1) if self.part_name == "codes" else tensor  # (rows, D / 32, 16) -> (rows, D / 2)

    def __getitem__(self, index: slice) -> Tensor:
        return self.get()[index]


class ExpertReader:
    """The experts of one file, with the methods of an open file."""

    def __init__(self):
        self.slices: dict[str, ExpertSlice] = {}

    def get_slice(self, name: str) -> ExpertSlice:
        return self.slices[name]

    def get_tensor(self, name: str) -> Tensor:
        return self.slices[name].get()


def split_experts(readers: dict[str, tuple[Path, object]]) -> dict[str, tuple[Path, object]]:
    """Tensor name -> (file, open reader)."""
    split, experts = {}, ExpertReader()
    for name, (file, reader) in readers.items():
        match = MERGED.fullmatch(name)
        shape = reader.get_slice(name).get_shape() if match else []
        if not match or len(shape) != NUM_DIMS[PART_BY_SUFFIX[match[3]]]:
            split[name] = (file, reader)
            continue
        for number in range(shape[0]):
            for module, rows in ROWS_BY_MODULE[match[2]].items():
                part_name = PART_BY_SUFFIX[match[3]]
                expert_name = f"{match[1]}.{number}.{module}.{part_name}"
                experts.slices[expert_name] = ExpertSlice(reader, name, part_name, number, rows)
                split[expert_name] = (file, experts)
    return split


def tensor_reader(readers: dict[str, tuple[Path, object]]) -> Callable[[str], Tensor]:
    """The tensor of a name, or the weight of an expert that is stored in MXFP4."""

    def read(name: str) -> Tensor:
        if name in readers:
            return readers[name][1].get_tensor(name)
        module = name.removesuffix(".weight")
        return dequantize_tensor({part: read(f"{module}.{part}") for part in ("codes", "scale")}, "mxfp4")

    return read


def merge_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a published folder. Layers with quantized experts stay as they are, for our own use."""
    merged, layers = {}, {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)", name)
        if match and f"{match[1]}.0.gate_proj.weight" in tensors:
            layers.setdefault((match[1], match[4]), {}).setdefault(match[3], []).append(tensor)
        else:
            merged[name] = tensor
    for (layer, part_name), parts in layers.items():
        gate, up, down = (torch.stack(parts[module]) for module in ("gate", "up", "down"))  # (E, rows, …)
        gate_up = torch.stack((gate, up), dim=2).flatten(1, 2)  # (E, 2I, …), in turn
        for module, tensor in (("gate_up_proj", gate_up), ("down_proj", down)):
            suffix = "_bias" if part_name == "bias" else ""
            merged[f"{layer}.{module}{suffix}"] = (tensor.mT if part_name == "weight" else tensor).contiguous()
    return merged
