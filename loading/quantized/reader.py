"""Folders that other programs quantized: their stored tensors -> the parts of one of our formats.

    find_matrices, check_values     the quantized matrices of a folder
    expected_tensors                the tensors that the folder must hold for them
    choose_scheme                   our scheme that holds them exactly, or the nearest one
    tensor_reader                   Hugging Face name -> our part or weight
    compressed_tensors_config, compressed_tensors_part      our format -> the one that other programs read

A part is converted when it is read, one matrix at a time. detection.py reads config.json; layouts.py and floats.py know
where each program keeps codes, scales and zero points.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

import loading.quantized.floats as floats
from loading.quantized.detection import QUICKDRAFT_CONFIG, find_layout  # noqa: F401 (for loading/checkpoint.py)
from loading.quantized.layouts import FLOATS, Gptq, Layout, Matrix
from weights.formats import Fp8, Int8

PLAIN_TYPES = (*FLOATS, "F64")  # stored types of matrices in full precision
# Scales of activations, keys and values, which are not quantized here (detection.py's notes).
UNUSED = (
    ".input_scale", ".activation_scale", ".output_scale", ".input_global_scale", ".input_zero_point",
    ".self_attn.q_scale", ".self_attn.k_scale", ".self_attn.v_scale", ".k_proj.k_scale", ".v_proj.v_scale",
)  # fmt: skip


class QuantizedMatrices(NamedTuple):
    """The quantized matrices of a folder."""

    layout: Layout
    matrices: dict[str, Matrix]  # by Hugging Face name
    unquantized: tuple[str, ...]  # our names of the blocks' other matrices


def find_matrices(layout: Layout, readers: dict, shapes: dict[str, dict[str, tuple[int, int]]]) -> QuantizedMatrices:
    """The quantized ones among `shapes`: our name of a matrix -> {Hugging Face module stacked in it: (out, in)}.
    ValueError names a matrix that is quantized in part."""
    matrices, unquantized = {}, []
    if isinstance(layout, floats.Fp8) and not any(name.endswith(f".{layout.key}") for name in readers):
        layout = replace(layout, scale_key="weight_scale")  # AutoFP8's name
    check_keys(layout, readers, [name for sources in shapes.values() for name in sources])
    for ours, sources in shapes.items():
        names = [name for name in sources if f"{name}.{layout.key}" in readers]
        if names and len(names) < len(sources) and not layout.stacks_with_plain:
            other = next(name for name in sources if name not in names)
            raise ValueError(f"{names[0]} is quantized and {other} is not, but both are one matrix here: quantize both")
        matrices |= {name: Matrix(name, *sources[name], readers) for name in names}
        unquantized += [ours] if not names and ours.startswith("layers.") else []
    if not matrices:
        raise ValueError(f"config.json says that it is quantized, but none of its tensors is called *.{layout.key}")
    return QuantizedMatrices(layout, matrices, () if layout.stacks_with_plain else tuple(unquantized))


def check_keys(layout: Layout, readers: dict, names: list[str]) -> None:
    """ValueError for a matrix that is stored in codes, but whose marking tensor is missing."""
    for name in names:
        weight = f"{name}.weight"
        if weight not in readers or f"{name}.{layout.key}" in readers:
            continue
        stored_type = readers[weight][1].get_slice(weight).get_dtype()
        if stored_type not in PLAIN_TYPES:
            raise ValueError(f"missing: {name}.{layout.key}, which its weight, stored in {stored_type}, needs")


def expected_tensors(quantized: QuantizedMatrices, plain: dict[str, tuple], readers: dict) -> dict[str, tuple]:
    """Tensor -> (shape, supported stored types) of the folder; `plain` has those of the model in full precision.

    Deletes unused scales from `readers`, and tensors of zeros that some writers add.
    """
    for name in [name for name in readers if name.endswith(UNUSED)]:
        del readers[name]
    expected = {
        name: header for name, header in plain.items() if name.removesuffix(".weight") not in quantized.matrices
    }
    for name, m in quantized.matrices.items():
        expected |= {f"{name}.{part}": header for part, header in quantized.layout.tensors(m).items()}
        for extra in (f"{name}.{part}" for part in quantized.layout.zeros_only):
            if extra in readers and extra not in expected and not readers[extra][1].get_tensor(extra).float().any():
                del readers[extra]
    return expected


def check_values(quantized: QuantizedMatrices) -> QuantizedMatrices:
    """The same matrices, with GPTQ's version corrected. All tensors must have passed check_headers. ValueError names a
    tensor with invalid values."""
    layout, matrices = quantized.layout, quantized.matrices.values()
    for m in matrices:
        layout.check(m)
    if isinstance(layout, Gptq) and layout.version == 1 and layout.symmetric:
        # Some writers say version 1 and store version 2 (vllm-project/vllm pull request 38966). Their zero points tell.
        second = replace(layout, version=2, notes=("it says version 1, but holds the zero points of version 2",))
        if all(map(second.is_centred, matrices)):
            return quantized._replace(layout=second)
    return quantized


def choose_scheme(quantized: QuantizedMatrices) -> tuple[str | None, str | None]:
    """(scheme, None) if a scheme holds every matrix exactly; else (nearest scheme, reason), or (None, reason) if none
    is near and the weights stay plain."""
    return quantized.layout.scheme(quantized.matrices.values())


def tensor_reader(quantized: QuantizedMatrices, scheme: str, read: Callable[[str], Tensor]) -> Callable[[str], Tensor]:
    """`read` (name -> stored tensor), extended by the scheme's parts, or the weights, of quantized matrices."""

    def read_converted(name: str) -> Tensor:
        module, _, part = name.rpartition(".")
        if module not in quantized.matrices or part == "bias":
            return read(name)
        m = quantized.matrices[module]
        return quantized.layout.weight(m) if part == "weight" else quantized.layout.part(m, scheme, part)

    return read_converted


def compressed_tensors_config(format: Int8 | Fp8, has_head: bool) -> dict:
    """The quantization_config with which compressed-tensors reads a folder in `format`."""
    kind = "float" if format.code_dtype.is_floating_point else "int"
    weights = {"num_bits": 8, "type": kind, "strategy": "channel", "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "format": f"{kind}-quantized", "weights": weights}
    header = {"quant_method": "compressed-tensors", "format": group["format"], "quantization_status": "compressed"}
    return {**header, "config_groups": {"group_0": group}, "ignore": [] if has_head else ["lm_head"]}


def compressed_tensors_part(name: str, part: Tensor) -> tuple[str, Tensor]:
    """compressed-tensors' (name, tensor) of a part of our int8 or fp8."""
    module, _, kind = name.rpartition(".")
    return (f"{module}.weight", part) if kind == "codes" else (f"{module}.weight_scale", part[:, None])
