"""Folders that other programs quantized: their stored tensors -> the parts of one of our formats.

    find_matrices       the quantized matrices of a folder
    expected_tensors    the tensors that the folder must hold for them
    tensor_reader       Hugging Face name -> our part or weight
    compressed_tensors_config, compressed_tensors_part      our format -> the one that other
    programs read

A part is converted when it is read, one matrix at a time. detection.py reads config.json;
layouts.py and floats.py know where each program keeps codes, scales and zero points.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from loading.quantized.floats import Renamed, Table4
from loading.quantized.layouts import Layout, Matrix
from weights.formats import Fp8, Int8

# Scales of activations, keys and values, which are not quantized here (detection.py's note).
UNUSED = (
    ".input_scale",
    ".activation_scale",
    ".output_scale",
    ".input_global_scale",
    ".input_zero_point",
    ".self_attn.q_scale",
    ".self_attn.k_scale",
    ".self_attn.v_scale",
    ".k_proj.k_scale",
    ".v_proj.v_scale",
)
# Tensors of zeros that some writers add to every matrix, as older AutoGPTQ did with biases.
ZEROS = ("bias", "weight_zero_point")


class QuantizedMatrices(NamedTuple):
    """The quantized matrices of a folder."""

    layout: Layout | Renamed | Table4
    matrices: dict[str, Matrix]  # by Hugging Face name
    unquantized: tuple[str, ...]  # our names of the blocks' other matrices


def find_matrices(
    layout: Layout | Renamed | Table4,
    tensors: dict,
    shapes: dict[str, dict[str, tuple[int, int]]],
) -> QuantizedMatrices:
    """The quantized ones among `shapes`: our name of a matrix -> {Hugging Face module stacked in
    it: (out, in)}. ValueError names a matrix that is quantized in part."""
    matrices = {}
    unquantized = []
    for ours, shape_by_name in shapes.items():
        names = [name for name in shape_by_name if f"{name}.{layout.key}" in tensors]
        plain_names = [name for name in shape_by_name if name not in names]
        for name in names:
            matrices[name] = Matrix(name, *shape_by_name[name], tensors)
        if layout.stacks_with_plain or not plain_names:
            continue
        if names:
            raise ValueError(
                f"{names[0]} is quantized and {plain_names[0]} is not, but both are one matrix"
                " here: quantize both"
            )
        if ours != "lm_head":
            unquantized.append(ours)
    if not matrices:
        raise ValueError(
            f"config.json says that it is quantized, but none of its tensors is called"
            f" *.{layout.key}"
        )
    return QuantizedMatrices(layout, matrices, tuple(unquantized))


def expected_tensors(
    quantized: QuantizedMatrices, plain: dict[str, tuple], tensors: dict
) -> dict[str, tuple]:
    """Tensor -> (shape, supported stored types) of the folder; `plain` has those of the model in
    full precision.

    Deletes from `tensors`, a copy, unused scales and tensors of zeros that some writers add.
    """
    for name in [name for name in tensors if name.endswith(UNUSED)]:
        del tensors[name]
    expected = dict(plain)
    for name, m in quantized.matrices.items():
        del expected[f"{name}.weight"]
        for part, header in quantized.layout.tensors(m).items():
            expected[f"{name}.{part}"] = header
        for extra in (f"{name}.{part}" for part in ZEROS):
            if extra in tensors and extra not in expected and not tensors[extra][...].float().any():
                del tensors[extra]
    return expected


def tensor_reader(
    quantized: QuantizedMatrices, scheme: str | None, read: Callable[[str], Tensor]
) -> Callable[[str], Tensor]:
    """`read` (name -> stored tensor), extended by the scheme's parts, or the weights, of quantized
    matrices."""

    def read_converted(name: str) -> Tensor:
        module, _, part = name.rpartition(".")
        if module not in quantized.matrices or part == "bias":
            return read(name)
        m = quantized.matrices[module]
        if part == "weight":
            return quantized.layout.weight(m)
        return quantized.layout.part(m, scheme, part)

    return read_converted


def compressed_tensors_config(format: Int8 | Fp8, has_head: bool) -> dict:
    """The quantization_config with which compressed-tensors reads a folder in `format`."""
    element_type = "float" if format.code_dtype.is_floating_point else "int"
    weights = {
        "num_bits": 8,
        "type": element_type,
        "strategy": "channel",
        "symmetric": True,
        "dynamic": False,
    }
    group = {"targets": ["Linear"], "format": f"{element_type}-quantized", "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{element_type}-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [] if has_head else ["lm_head"],
    }


def compressed_tensors_part(name: str, part: Tensor) -> tuple[str, Tensor]:
    """compressed-tensors' (name, tensor) of a part of our int8 or fp8."""
    module, _, part_name = name.rpartition(".")
    if part_name == "codes":
        return f"{module}.weight", part
    return f"{module}.weight_scale", part[:, None]
