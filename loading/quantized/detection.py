"""config.json's quantization_config -> where that program keeps its weights.

    layout_of           the Layout of a folder, None without one; what cannot be read is refused by key and value
    METHODS             quant_method -> what reads its other keys

This file does not know tensors, folders or models.
"""

from collections.abc import Callable

from loading.quantized.floats import Fp8, Int8Rows, ModelOptNvFp4, Mx, NvFp4, Table4
from loading.quantized.layouts import Awq, Gptq, Layout, PackQuantized
from loading.quantized.merged_experts import is_mxfp4

# Of a folder that only we read. Other programs refuse it for want of a quant_method; at an unknown one transformers
# warns and loads random weights.
OWN = {"format": "quickdraft"}

# What is not done that a folder asks for beside its weights.
DYNAMIC = "its activations would be quantized as they come; here they are not, only its weights"
STATIC = "its activations would be quantized by stored scales (input_scale); here they are not, only its weights"
CACHE = "its kv_cache_scheme is not used: keys and values keep their type"


def only(found: dict, where: str, key: str, *values):
    """found[key], which must be one of the values; None stands for a key that is missing."""
    value = found.get(key)
    if not any(type(value) is type(known) and value == known for known in values):
        works = " or ".join("none" if known is None else repr(known) for known in values)
        raise ValueError(f"config.json: {where}{key} = {value!r} is not supported; supported: {works}")
    return value


def a_dict(found: dict, where: str, key: str) -> dict:
    value = found.get(key)
    if not isinstance(value, dict):
        raise ValueError(f"config.json: {where}{key} = {value!r} is not supported; it must be an object")
    return value


def group_size(found: dict, where: str, key: str = "group_size") -> int:
    size = found.get(key)
    if type(size) is not int or (size < 1 and size != -1):
        raise ValueError(f"config.json: {where}{key} = {size!r} is not supported; it must be positive, or -1 for rows")
    return size


def layout_of(hf: dict) -> Layout | None:
    """The layout that a config.json's quantization_config names, None without one. ValueError names key and value of
    what is not read here."""
    if hf.get("quantization_config") in (None, {}, OWN) or is_mxfp4(hf):
        return None
    where, found = "quantization_config: ", a_dict(hf, "", "quantization_config")
    method = only(found, where, "quant_method", *METHODS)
    if hf.get("quantization") is not None and method != "compressed-tensors":  # which we write too
        raise ValueError("config.json: it has both quantization and quantization_config; one of them must be wrong")
    return METHODS[method](found, where)


def gptq_layout(found: dict, where: str) -> Layout:
    bits = only(found, where, "bits", 4, 8)
    key = "checkpoint_format" if found.get("checkpoint_format") is not None else "format"
    format = only(found, where, key, None, "gptq", "gptq_v2")
    only(found, where, "is_marlin_format", None, False)
    only(found, where, "pack_dtype", None, "int32")
    only(found, where, "rotation", None)
    only(found, where, "adapter", None)
    symmetric, version = found.get("sym") is True, 2 if format == "gptq_v2" else 1
    return Gptq(bits, group_size(found, where), symmetric=symmetric, version=version)


def awq_layout(found: dict, where: str) -> Layout:
    bits = only(found, where, "w_bit" if "w_bit" in found else "bits", 4)
    key = next((key for key in ("version", "checkpoint_format", "format") if found.get(key) is not None), "version")
    only(found, where, key, None, "gemm", "GEMM")
    return Awq(bits, group_size(found, where, "q_group_size" if "q_group_size" in found else "group_size"))


def fp8_layout(found: dict, where: str) -> Layout:
    """transformers' own fp8 (Qwen3-FP8, DeepSeek, Ministral 3), and AutoFP8's, which calls scales otherwise."""
    only(found, where, "fmt", None, "e4m3")
    only(found, where, "scale_fmt", None, "float", "ue8m0")
    only(found, where, "expert_dtype", None, "fp8")
    how = only(found, where, "activation_scheme", None, "dynamic", "static")
    only(found, where, "kv_cache_quant_method", None)
    notes = () if how is None else (STATIC if how == "static" else DYNAMIC,)
    rows, columns = block_size(found, where, "weight_block_size") if found.get("weight_block_size") else (1, -1)
    one = found.get("weight_block_size") is None
    return Fp8(8, columns, notes, one_scale=one, rows=rows, scale_key="weight_scale_inv")


def bitsandbytes_layout(found: dict, where: str) -> Layout:
    only(found, where, "load_in_8bit" if found.get("load_in_8bit") else "_load_in_8bit", None, False)
    only(found, where, "load_in_4bit", True)
    kind = only(found, where, "bnb_4bit_quant_type", "nf4", "fp4")
    only(found, where, "bnb_4bit_quant_storage", None, "uint8")
    return Table4(4, -1, kind=kind)


def modelopt_layout(found: dict, where: str) -> Layout:
    """NVIDIA's Model Optimizer, modelopt/torch/export/{convert_hf_config,quant_utils}.py"""
    where = where.replace(":", " or hf_quant_config.json:")
    kind = only(found, where, "quant_algo", "NVFP4", "FP8")
    cache = found.get("kv_cache_quant_algo") or found.get("kv_cache_scheme")
    notes = ((CACHE,) if cache else ()) + (STATIC,)
    if kind == "FP8":
        return Fp8(8, -1, notes, one_scale=True)
    only(found, where, "group_size", None, 16)
    return ModelOptNvFp4(4, 16, notes)


def block_size(found: dict, where: str, key: str) -> tuple[int, int]:
    size = found.get(key)
    if not (isinstance(size, list) and len(size) == 2 and type(size[0]) is int and size[0] > 0 and size[1] == 128):
        raise ValueError(f"config.json: {where}{key} = {size!r} is not supported; supported: [rows, 128]")
    return size[0], 128


def compressed_layout(found: dict, where: str) -> Layout:
    """compressed-tensors, src/compressed_tensors/quantization/{quant_config,quant_args}.py"""
    groups = a_dict(found, where, "config_groups")
    if len(groups) != 1:
        raise ValueError(f"config.json: {where}config_groups = {sorted(groups)} is not supported; one group is")
    notes = (CACHE,) if found.get("kv_cache_scheme") else ()
    only(found, where, "transform_config", None, {})
    sparsity = found.get("sparsity_config")
    only(sparsity if isinstance(sparsity, dict) else {"format": sparsity}, f"{where}sparsity_config: ", "format",
         None, "dense")  # fmt: skip
    inside = f"{where}config_groups: "
    scheme = a_dict(groups, inside, next(iter(groups)))
    weights, activations = a_dict(scheme, inside, "weights"), scheme.get("input_activations")
    only(scheme, inside, "output_activations", None)
    if activations is not None:
        how = only(a_dict(scheme, inside, "input_activations"), f"{inside}input_activations: ", "dynamic",
                   True, False, "local", None)  # fmt: skip
        notes += (DYNAMIC if how is True else STATIC,)
    return _by_format(scheme if scheme.get("format") is not None else found, weights, f"{inside}weights: ", notes)


STRATEGIES = {  # of compressed-tensors' formats: kinds of codes, bits, and how scales may be shared
    "pack-quantized": (("int",), (4, 8), ("channel", "group")),
    "int-quantized": (("int",), (8,), ("channel", "tensor", "group")),
    "float-quantized": (("float",), (8,), ("channel", "tensor", "block")),
    "naive-quantized": (("int", "float"), (8,), ("channel", "tensor", "group", "block")),
    "mxfp4-pack-quantized": (("float",), (4,), ("group",)),
    "mxfp8-quantized": (("float",), (8,), ("group",)),
    "nvfp4-pack-quantized": (("float",), (4,), ("tensor_group",)),
}


def _by_format(found: dict, weights: dict, where: str, notes: tuple[str, ...]) -> Layout:
    """The layout of compressed-tensors' `weights` stored in found["format"]."""
    format = only(found, "quantization_config: ", "format", *STRATEGIES)
    kinds, widths, strategies = STRATEGIES[format]
    packed, kind = format == "pack-quantized", only(weights, where, "type", *kinds)
    strategies = tuple(s for s in strategies if format != "naive-quantized" or s != ("group", "block")[kind == "int"])
    bits = only(weights, where, "num_bits", *widths)
    only(weights, where, "dynamic", None, False)
    symmetric = only(weights, where, "symmetric", *((True, False) if packed else (True,)))
    size = weights.get("group_size")
    implied = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = only({"strategy": weights.get("strategy") or implied}, where, "strategy", *strategies)
    if strategy != "block":
        only(weights, where, "block_structure", None)
    order = only(weights, where, "actorder", None, False, "weight", "static", *((True, "group", "dynamic") * packed))
    if "fp4" in format or "mxfp" in format:
        size = only(weights, where, "group_size", 16 if format.startswith("nv") else 32)
        return (NvFp4 if format.startswith("nv") else Mx)(bits, size, notes)
    rows, size = block_size(weights, where, "block_structure") if strategy == "block" else (1, size)
    size = group_size(weights, where) if strategy == "group" else size if strategy == "block" else -1
    if packed:
        return PackQuantized(bits, size, notes, symmetric, order in (True, "group", "dynamic"))
    one = strategy == "tensor"
    return Fp8(bits, size, notes, one_scale=one, rows=rows) if kind == "float" else Int8Rows(bits, size, notes,
                                                                                             one_scale=one)  # fmt: skip


METHODS: dict[str, Callable[[dict, str], Layout]] = {
    "gptq": gptq_layout, "awq": awq_layout, "compressed-tensors": compressed_layout, "fp8": fp8_layout,
    "bitsandbytes": bitsandbytes_layout, "modelopt": modelopt_layout,
}  # fmt: skip
