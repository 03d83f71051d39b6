"""gpt-oss keeps the experts of a layer in one tensor, gate's and up's rows in turn: here they are one by one.

    unmerged    open readers -> the same with the tensors of every expert, under weight_names.py's names
    reading     the tensor of a name, or the weight that a part in MXFP4 stands for
    is_mxfp4    does a config.json announce them?
    merged      the way back: the tensors of experts in full precision -> those of a published folder

As published (MXFP4; E experts, 2I rows of gate and up): gate_up_proj_blocks (E, 2I, D / 32, 16) uint8, two elements a
byte, low half first, gate_up_proj_scales (E, 2I, D / 32) uint8, and the same of down_proj: bit for bit the codes and
scales of this project's mxfp4. In full precision gate_up_proj is (E, D, 2I). Source: transformers 5.23,
models/gpt_oss/modeling_gpt_oss.py and integrations/mxfp4.py. This file knows no Linear and no rank.
"""

import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from loading.families import family_of
from weights.formats import dequantize_tensor

MERGED = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)(|_blocks|_scales|_bias)")
KINDS = {"": "weight", "_blocks": "codes", "_scales": "scale", "_bias": "bias"}
PARTS = {
    "gate_up_proj": {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)},
    "down_proj": {"down_proj": slice(None)},
}
LAID_OUT = {"weight": 3, "codes": 4, "scale": 3, "bias": 2}  # dimensions


def is_mxfp4(hf: dict) -> bool:
    """Is this config.json that of gpt-oss as published? Its experts are then in MXFP4."""
    quantization, family = hf.get("quantization_config"), family_of(hf)
    if family is None or not family.merges_experts:
        return False
    return isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4"


class Expert:
    """One expert's part of a merged tensor, with the methods of an open file's slice."""

    def __init__(self, reader, name: str, kind: str, number: int, rows: slice):
        self.header, self.kind, self.number, self.rows = reader.get_slice(name), kind, number, rows

    def get_shape(self) -> list[int]:
        shape = self.header.get_shape()[1:]
        shape = shape[::-1] if self.kind == "weight" else shape
        rows = len(range(shape[0])[self.rows])
        return [rows, shape[1] * shape[2] if self.kind == "codes" else shape[1]] if len(shape) > 1 else [rows]

    def get_dtype(self) -> str:
        return self.header.get_dtype()

    def get(self) -> Tensor:
        found = self.header[self.number : self.number + 1][0]  # which is all that is read
        found = found.T if self.kind == "weight" else found  # (D, rows) -> (rows, D)
        found = found[self.rows]
        return found.flatten(1) if self.kind == "codes" else found  # (rows, D / 32, 16) -> (rows, D / 2)

    def __getitem__(self, which: slice) -> Tensor:
        return self.get()[which]


class Reader:
    """The experts of one file, with the methods of an open file."""

    def __init__(self):
        self.found: dict[str, Expert] = {}

    def get_slice(self, name: str) -> Expert:
        return self.found[name]

    def get_tensor(self, name: str) -> Tensor:
        return self.found[name].get()


def unmerged(readers: dict[str, tuple[Path, object]]) -> dict[str, tuple[Path, object]]:
    """Tensor name -> (file, open reader)."""
    found, experts = {}, Reader()
    for name, (file, reader) in readers.items():
        match = MERGED.fullmatch(name)
        shape = reader.get_slice(name).get_shape() if match else []
        if not match or len(shape) != LAID_OUT[KINDS[match[3]]]:
            found[name] = (file, reader)
            continue
        for number in range(shape[0]):
            for part, rows in PARTS[match[2]].items():
                own = f"{match[1]}.{number}.{part}.{KINDS[match[3]]}"
                experts.found[own] = Expert(reader, name, KINDS[match[3]], number, rows)
                found[own] = (file, experts)
    return found


def reading(readers: dict[str, tuple[Path, object]]) -> Callable[[str], Tensor]:
    """The tensor of a name, or the weight of an expert that is stored in MXFP4."""

    def read(name: str) -> Tensor:
        if name in readers:
            return readers[name][1].get_tensor(name)
        module = name.removesuffix(".weight")
        parts = {kind: readers[f"{module}.{kind}"][1].get_tensor(f"{module}.{kind}") for kind in ("codes", "scale")}
        return dequantize_tensor(parts, "mxfp4")

    return read


def merged(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As a folder of gpt-oss holds them. Layers whose experts are quantized stay as they are: only we read them."""
    found, layers = {}, {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)", name)
        if match and f"{match[1]}.0.gate_proj.weight" in tensors:
            layers.setdefault((match[1], match[4]), {}).setdefault(match[3], []).append(tensor)
        else:
            found[name] = tensor
    for (layer, kind), parts in layers.items():
        gate, up, down = (torch.stack(parts[part]) for part in ("gate", "up", "down"))  # (E, rows, …)
        both = torch.stack((gate, up), dim=2).flatten(1, 2)  # (E, 2I, …), in turn
        for part, tensor in (("gate_up_proj", both), ("down_proj", down)):
            found[f"{layer}.{part}{'_bias' * (kind == 'bias')}"] = (
                tensor.mT if kind == "weight" else tensor
            ).contiguous()
    return found
