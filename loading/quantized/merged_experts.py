"""A layer's experts in one tensor <-> a tensor for each expert: gpt-oss, GraniteMoE, Qwen3-VL-MoE.

    split_experts   stored tensors -> those of every expert, under weight_names.py's names
    merge_experts   the tensors of experts in full precision -> those of a published folder

families.MergedExperts says how they lie in full precision. gpt-oss is published in MXFP4 (E
experts, 2I rows of gate and up in turn): gate_up_proj_blocks (E, 2I, D / 32, 16) uint8, two
elements a byte, low half first; gate_up_proj_scales (E, 2I, D / 32) uint8; the same of down_proj.
These are the codes and scales of our mxfp4, bit for bit. Source: transformers 5.23,
models/gpt_oss/modeling_gpt_oss.py, integrations/mxfp4.py and conversion_mapping.py.
"""

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from loading.families import FAMILIES
from model import Config

MERGED = r"(.*\.layers\.\d+\.)({}|{})(|_blocks|_scales|_bias)"
# Suffix of a merged tensor -> (an expert's part, the merged tensor's number of dimensions).
PARTS = {"": ("weight", 3), "_blocks": ("codes", 4), "_scales": ("scale", 3), "_bias": ("bias", 2)}


@dataclass(frozen=True)
class StoredExpert:
    """One expert's rows of a merged tensor, with the methods of a stored tensor."""

    merged: object
    number: int
    rows: slice
    is_transposed: bool

    def cut(self, tensor: Tensor) -> Tensor:
        """The expert's tensor without the rows of others."""
        if self.is_transposed:
            tensor = tensor.T  # (D, rows) -> (rows, D)
        tensor = tensor[self.rows]
        return tensor.flatten(1) if tensor.dim() == 3 else tensor  # codes (rows, D / 32, 16)

    def get_shape(self) -> list[int]:
        _, *shape = self.merged.get_shape()
        return list(self.cut(torch.empty(shape, device="meta")).shape)

    def get_dtype(self) -> str:
        return self.merged.get_dtype()

    def __getitem__(self, index) -> Tensor:
        tensor = self.merged[self.number : self.number + 1][0]  # reads one expert alone
        return self.cut(tensor)[index]


def split_experts(tensors: dict[str, object], config: Config) -> dict[str, object]:
    """Name -> stored tensor, with every expert's tensors in place of a layer's."""
    layout = FAMILIES[config.family].merged_experts
    pattern = re.compile(MERGED.format(re.escape(layout.gate_up), re.escape(layout.down)))
    rows_of_gate = slice(config.expert_dim)
    rows_of_up = slice(config.expert_dim, None)
    if layout.is_gpt_oss:
        rows_of_gate = slice(0, None, 2)
        rows_of_up = slice(1, None, 2)
    # Merged module -> an expert's modules, and the rows of each.
    rows_by_name = {
        layout.gate_up: {"gate_proj": rows_of_gate, "up_proj": rows_of_up},
        layout.down: {"down_proj": slice(None)},
    }
    # Of down, because gate_up is square where D = 2 F, as in Granite 3.0 1B.
    is_transposed = layout.is_gpt_oss or any(
        name.endswith(layout.down) and stored.get_shape()[-1:] != [config.expert_dim]
        for name, stored in tensors.items()
    )
    split = {}
    for name, stored in tensors.items():
        match = pattern.fullmatch(name)
        shape = stored.get_shape()
        part, dimensions = PARTS[match[3]] if match else ("", None)
        if len(shape) != dimensions:
            split[name] = stored  # check_headers refuses those that no model has
            continue
        for number in range(shape[0]):
            for module, rows in rows_by_name[match[2]].items():
                split[f"{match[1]}mlp.experts.{number}.{module}.{part}"] = StoredExpert(
                    stored, number, rows, is_transposed and part == "weight"
                )
    return split


def merge_experts(tensors: dict[str, Tensor], config: Config) -> dict[str, Tensor]:
    """The tensors of a published folder. Layers with quantized experts stay as they are, for our
    own use."""
    layout = FAMILIES[config.family].merged_experts
    merged = dict(tensors)

    def stack(layer: str, projection: str) -> Tensor:
        """Those of all experts of a layer, one expert after the other."""
        names = (f"{layer}mlp.experts.{number}.{projection}" for number in range(config.n_experts))
        return torch.stack([merged.pop(name) for name in names])

    for name in tensors:
        layer, first_expert, part = name.partition("mlp.experts.0.gate_proj.")
        if not first_expert or f"{layer}{first_expert}weight" not in tensors:
            continue
        gate = stack(layer, f"gate_proj.{part}")
        up = stack(layer, f"up_proj.{part}")
        down = stack(layer, f"down_proj.{part}")
        # (E, I, 2, …) has the rows of gate and up in turn, (E, 2, I, …) those of gate first.
        dim = 2 if layout.is_gpt_oss else 1
        gate_up = torch.stack((gate, up), dim).flatten(1, 2)
        for module, tensor in ((layout.gate_up, gate_up), (layout.down, down)):
            if part == "bias":
                merged[f"{layer}{module}_bias"] = tensor
            else:
                tensor = tensor.mT if layout.is_gpt_oss else tensor
                merged[f"{layer}{module}"] = tensor.contiguous()
    return merged
