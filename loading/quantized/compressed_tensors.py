"""Our int8 and fp8 as compressed-tensors, which other programs read.

compressed_tensors_config   a format -> the folder's quantization_config
compressed_tensors_part     a part -> its name and tensor
"""

from torch import Tensor

from weights.formats import Fp8, Int8


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
