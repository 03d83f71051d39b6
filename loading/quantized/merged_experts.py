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

from loading.families import FAMILIES, MergedExperts
from model import Config

MERGED = r"(.*\.layers\.\d+\.)({}|{})(|_blocks|_scales|_bias)"
EXPERT = re.compile(r"(.*\.)mlp\.experts\.\d+\.(gate|up|down)_proj\.(weight|bias)")
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
    # Merged module -> an expert's modules, and the rows of each.
    modules_by_name = {
        layout.gate_up: (("gate_proj", "up_proj"), config.expert_dim),
        layout.down: (("down_proj",), config.dim),
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
        modules, num_rows = modules_by_name[match[2]]
        for number in range(shape[0]):
            for i, module in enumerate(modules):
                rows = slice(i * num_rows, (i + 1) * num_rows)
                if layout.is_gpt_oss:
                    rows = slice(i, None, len(modules))
                split[f"{match[1]}mlp.experts.{number}.{module}.{part}"] = StoredExpert(
                    stored, number, rows, is_transposed and part == "weight"
                )
    return split


def merge_experts(tensors: dict[str, Tensor], layout: MergedExperts) -> dict[str, Tensor]:
    """The tensors of a published folder. Layers with quantized experts stay as they are, for our
    own use."""
    merged = {}
    layers = {}  # (layer, part) -> {module: its tensors, expert by expert}
    for name, tensor in tensors.items():
        match = EXPERT.fullmatch(name)
        if match is None or f"{match[1]}mlp.experts.0.gate_proj.weight" not in tensors:
            merged[name] = tensor
            continue
        layer, module, part_name = match.groups()
        layers.setdefault((layer, part_name), {}).setdefault(module, []).append(tensor)
    for (layer, part_name), tensors_by_module in layers.items():
        stacks = {module: torch.stack(parts) for module, parts in tensors_by_module.items()}
        # (E, I, 2, …) has the rows of gate and up in turn, (E, 2, I, …) those of gate first.
        dim = 2 if layout.is_gpt_oss else 1
        gate_up = torch.stack((stacks["gate"], stacks["up"]), dim)
        gate_up = gate_up.flatten(1, 2)  # (E, 2I, …)
        for module, tensor in ((layout.gate_up, gate_up), (layout.down, stacks["down"])):
            if part_name == "bias":
                merged[f"{layer}{module}_bias"] = tensor
            else:
                tensor = tensor.mT if layout.is_gpt_oss else tensor
                merged[f"{layer}{module}"] = tensor.contiguous()
    return merged
