"""config.json's quantization_config -> the Layout of another program's weights.

    find_layout     the Layout of a folder; None without quantization_config
    METHODS         quant_method -> the function that reads its other keys

Unsupported keys raise a ValueError that names key and value.
"""

from collections.abc import Callable

from loading.quantization import QUICKDRAFT_CONFIG
from loading.quantized.floats import Fp8, Int8Rows, ModelOptNvFp4, Mx, NvFp4, Table4
from loading.quantized.layouts import Awq, Gptq, Layout, PackQuantized
from loading.quantized.merged_experts import is_mxfp4

# Notes on settings that are ignored: only weights are quantized here.
DYNAMIC = "its activations would be quantized as they come; here only its weights are"
STATIC = "its activations would be quantized by stored scales (input_scale); here only its weights are"
CACHE = "its kv_cache_scheme is not used: keys and values keep their type"


def require(settings: dict, prefix: str, key: str, *values):
    """settings[key], which must be one of the values; None stands for a missing key."""
    value = settings.get(key)
    if not any(type(value) is type(supported) and value == supported for supported in values):
        supported = " or ".join("none" if value is None else repr(value) for value in values)
        raise ValueError(f"config.json: {prefix}{key} = {value!r} is not supported; supported: {supported}")
    return value


def require_object(settings: dict, prefix: str, key: str) -> dict:
    value = settings.get(key)
    if not isinstance(value, dict):
        raise ValueError(f"config.json: {prefix}{key} = {value!r} is not supported; it must be an object")
    return value


def read_group_size(settings: dict, prefix: str, key: str = "group_size") -> int:
    size = settings.get(key)
    if type(size) is not int or (size < 1 and size != -1):
        raise ValueError(f"config.json: {prefix}{key} = {size!r} is not supported; use a positive one, or -1 for rows")
    return size


def find_layout(hf: dict) -> Layout | None:
    """The Layout of a config.json's quantization_config, None without one. ValueError for unsupported settings."""
    if hf.get("quantization_config") in (None, {}, QUICKDRAFT_CONFIG) or is_mxfp4(hf):
        return None
    prefix, settings = "quantization_config: ", require_object(hf, "", "quantization_config")
    refuse_mlx(settings)
    method = require(settings, prefix, "quant_method", *METHODS)
    if hf.get("quantization") is not None and method != "compressed-tensors":  # quantize.py writes it too
        raise ValueError("config.json: it has both quantization and quantization_config; remove the wrong one")
    return METHODS[method](settings, prefix)


def refuse_mlx(settings: dict) -> None:
    """ValueError for the settings of an MLX folder, which name no quant_method (mlx-lm, mlx_lm/utils.py)."""
    if settings.get("quant_method") is None and {"bits", "group_size"} <= settings.keys():
        numbers = {key: settings[key] for key in ("bits", "group_size", "mode") if key in settings}
        raise ValueError(
            f"config.json: quantization_config: quant_method = None with {numbers} is MLX's form of quantized weights,"
            " which is not supported; use the original folder, or its GGUF file"
        )


def gptq_layout(settings: dict, prefix: str) -> Layout:
    bits = require(settings, prefix, "bits", 4, 8)
    key = "checkpoint_format" if settings.get("checkpoint_format") is not None else "format"
    format = require(settings, prefix, key, None, "gptq", "gptq_v2")
    require(settings, prefix, "is_marlin_format", None, False)
    require(settings, prefix, "pack_dtype", None, "int32")
    require(settings, prefix, "rotation", None)
    require(settings, prefix, "adapter", None)
    symmetric, version = settings.get("sym") is True, 2 if format == "gptq_v2" else 1
    group_size = read_group_size(settings, prefix)
    check_dynamic(settings, prefix, {"bits": bits, "group_size": group_size})
    return Gptq(bits, group_size, symmetric=symmetric, version=version)


def check_dynamic(settings: dict, prefix: str, common: dict[str, int]) -> None:
    """ValueError where GPTQModel's `dynamic` stores some modules with other bits or groups than the `common` ones.
    Its patterns that begin with "-:" leave modules in full precision (GPTQModel, quantization/config.py)."""
    dynamic = settings.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise ValueError(f"config.json: {prefix}dynamic = {dynamic!r:.99} is not supported; it must be an object")
    for pattern, overrides in dynamic.items():
        overrides = overrides if isinstance(overrides, dict) and not pattern.startswith("-:") else {}
        for key, value in common.items():
            if overrides.get(key, value) != value:
                raise ValueError(
                    f"config.json: {prefix}dynamic: {pattern}: {key} = {overrides[key]!r} is not supported beside"
                    f" {key} = {value} of the other modules; all quantized modules must have the same"
                )


def awq_layout(settings: dict, prefix: str) -> Layout:
    bits = require(settings, prefix, "w_bit" if "w_bit" in settings else "bits", 4)
    key = next((key for key in ("version", "checkpoint_format", "format") if settings.get(key) is not None), "version")
    require(settings, prefix, key, None, "gemm", "GEMM")
    return Awq(bits, read_group_size(settings, prefix, "q_group_size" if "q_group_size" in settings else "group_size"))


def fp8_layout(settings: dict, prefix: str) -> Layout:
    """transformers' own fp8 (Qwen3-FP8, DeepSeek, Ministral 3), and AutoFP8's, which has another name for scales."""
    require(settings, prefix, "fmt", None, "e4m3")
    require(settings, prefix, "scale_fmt", None, "float", "ue8m0")
    require(settings, prefix, "expert_dtype", None, "fp8")
    activations = require(settings, prefix, "activation_scheme", None, "dynamic", "static")
    require(settings, prefix, "kv_cache_quant_method", None)
    notes = () if activations is None else (STATIC if activations == "static" else DYNAMIC,)
    has_blocks = bool(settings.get("weight_block_size"))
    rows, columns = read_block_size(settings, prefix, "weight_block_size") if has_blocks else (1, -1)
    one_scale = settings.get("weight_block_size") is None
    return Fp8(8, columns, notes, one_scale=one_scale, rows=rows, scale_key="weight_scale_inv")


def bitsandbytes_layout(settings: dict, prefix: str) -> Layout:
    require(settings, prefix, "load_in_8bit" if settings.get("load_in_8bit") else "_load_in_8bit", None, False)
    require(settings, prefix, "load_in_4bit", True)
    kind = require(settings, prefix, "bnb_4bit_quant_type", "nf4", "fp4")
    require(settings, prefix, "bnb_4bit_quant_storage", None, "uint8")
    return Table4(4, -1, kind=kind)


def modelopt_layout(settings: dict, prefix: str) -> Layout:
    """NVIDIA's Model Optimizer, modelopt/torch/export/{convert_hf_config,quant_utils}.py"""
    prefix = prefix.replace(":", " or hf_quant_config.json:")
    kind = require(settings, prefix, "quant_algo", "NVFP4", "FP8")
    cache = settings.get("kv_cache_quant_algo") or settings.get("kv_cache_scheme")
    notes = ((CACHE,) if cache else ()) + (STATIC,)
    if kind == "FP8":
        return Fp8(8, -1, notes, one_scale=True)
    require(settings, prefix, "group_size", None, 16)
    return ModelOptNvFp4(4, 16, notes)


def read_block_size(settings: dict, prefix: str, key: str) -> tuple[int, int]:
    size = settings.get(key)
    if not (isinstance(size, list) and len(size) == 2 and type(size[0]) is int and size[0] > 0 and size[1] == 128):
        raise ValueError(f"config.json: {prefix}{key} = {size!r} is not supported; supported: [rows, 128]")
    return size[0], 128


def compressed_layout(settings: dict, prefix: str) -> Layout:
    """compressed-tensors, src/compressed_tensors/quantization/{quant_config,quant_args}.py"""
    groups = require_object(settings, prefix, "config_groups")
    if len(groups) != 1:
        raise ValueError(f"config.json: {prefix}config_groups = {sorted(groups)} is not supported; only one group is")
    notes = (CACHE,) if settings.get("kv_cache_scheme") else ()
    require(settings, prefix, "transform_config", None, {})
    sparsity = settings.get("sparsity_config")
    sparsity = sparsity if isinstance(sparsity, dict) else {"format": sparsity}
    require(sparsity, f"{prefix}sparsity_config: ", "format", None, "dense")
    prefix += "config_groups: "
    scheme = require_object(groups, prefix, next(iter(groups)))
    weights = require_object(scheme, prefix, "weights")
    require(scheme, prefix, "output_activations", None)
    if scheme.get("input_activations") is not None:
        activations = require_object(scheme, prefix, "input_activations")
        is_dynamic = require(activations, f"{prefix}input_activations: ", "dynamic", True, False, "local", None)
        notes += (DYNAMIC if is_dynamic is True else STATIC,)
    return format_layout(scheme if scheme.get("format") is not None else settings, weights, f"{prefix}weights: ", notes)


STRATEGIES = {  # compressed-tensors' format -> supported types of codes, bits, and strategies of sharing scales
    "pack-quantized": (("int",), (4, 8), ("channel", "group")),
    "int-quantized": (("int",), (8,), ("channel", "tensor", "group")),
    "float-quantized": (("float",), (8,), ("channel", "tensor", "block")),
    "naive-quantized": (("int", "float"), (8,), ("channel", "tensor", "group", "block")),
    "mxfp4-pack-quantized": (("float",), (4,), ("group",)),
    "mxfp8-quantized": (("float",), (8,), ("group",)),
    "nvfp4-pack-quantized": (("float",), (4,), ("tensor_group",)),
}


def format_layout(settings: dict, weights: dict, prefix: str, notes: tuple[str, ...]) -> Layout:
    """The layout of compressed-tensors' `weights` stored in settings["format"]."""
    format = require(settings, "quantization_config: ", "format", *STRATEGIES)
    kinds, num_bits, strategies = STRATEGIES[format]
    packed, kind = format == "pack-quantized", require(weights, prefix, "type", *kinds)
    if format == "naive-quantized":  # integers in groups, floats in blocks
        strategies = tuple(strategy for strategy in strategies if strategy != ("group", "block")[kind == "int"])
    bits = require(weights, prefix, "num_bits", *num_bits)
    require(weights, prefix, "dynamic", None, False)
    symmetric = require(weights, prefix, "symmetric", *((True, False) if packed else (True,)))
    size = weights.get("group_size")
    implied = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = require({"strategy": weights.get("strategy") or implied}, prefix, "strategy", *strategies)
    if strategy != "block":
        require(weights, prefix, "block_structure", None)
    orders = (None, False, "weight", "static") + (True, "group", "dynamic") * packed
    order = require(weights, prefix, "actorder", *orders)
    if "fp4" in format or "mxfp" in format:
        size = require(weights, prefix, "group_size", 16 if format.startswith("nv") else 32)
        return (NvFp4 if format.startswith("nv") else Mx)(bits, size, notes)
    rows, size = read_block_size(weights, prefix, "block_structure") if strategy == "block" else (1, size)
    size = read_group_size(weights, prefix) if strategy == "group" else size if strategy == "block" else -1
    if packed:
        return PackQuantized(bits, size, notes, symmetric, order in (True, "group", "dynamic"))
    one_scale = strategy == "tensor"
    if kind == "float":
        return Fp8(bits, size, notes, one_scale=one_scale, rows=rows)
    return Int8Rows(bits, size, notes, one_scale=one_scale)


METHODS: dict[str, Callable[[dict, str], Layout]] = {
    "gptq": gptq_layout, "awq": awq_layout, "compressed-tensors": compressed_layout, "fp8": fp8_layout,
    "bitsandbytes": bitsandbytes_layout, "modelopt": modelopt_layout,
}  # fmt: skip
