"""config.json's quantization_config -> the Layouts of another program's weights.

    find_layouts    the Layouts of a folder, by the quant_method of its quantization_config
    ForeignLayouts  asked for a module, it says in which Layout its matrix is stored
    METHODS         the table of all methods, at the end of this file

A method has up to two functions. One turns settings into a Layout. The other is for programs that
can store some modules otherwise: it returns the settings of one module.

    quant_method         settings of one module in    Layout
    gptq                 dynamic                      Gptq
    awq                                               Awq
    auto-round           extra_config                 by packing_format: Gptq or Awq
    mlx                  the module's path            Renamed: a format of ours, mlx… or mxfp4
    compressed-tensors   config_groups, by targets    by format: PackQuantized, Int8Rows, Fp8, or
                                                      Renamed
    fp8                                               Fp8
    bitsandbytes                                      Table4
    modelopt                                          by quant_algo: Fp8 or ModelOptNvFp4
    mxfp4                                             Renamed, for gpt-oss alone

Whether a module is quantized at all, its tensors say: folder.py looks for the one that marks its
Layout. So settings are checked here only as far as the tensors cannot reveal them; loading compares
the shapes and types of all tensors with the Layout. An unsupported setting raises a UserError that
names key and value.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from decoding.errors import UserError
from loading.families import family_of
from loading.folder import Layout
from loading.plain_files import one_line, refused, short_repr
from loading.quantized import floats
from loading.quantized.floats import (
    Fp8,
    Int8Rows,
    ModelOptNvFp4,
    Renamed,
    Table4,
)
from loading.quantized.layouts import Awq, Gptq, PackQuantized
from weights.schemes import MLX_BITS, MLX_GROUPS

ENTRY = "quantization_config"

# A note on settings that are ignored.
WEIGHTS_ONLY = (
    "its activations, or keys and values, would be quantized too; here only its weights are"
)


class Method(NamedTuple):
    """How a program writes its settings."""

    layout: Callable[[dict], Layout]  # of matrices with these settings
    # The settings of one module, by its names: those of the folder, unless others are found.
    of_module: Callable[[dict, list[str]], dict] = lambda settings, names: settings


class ForeignLayouts(NamedTuple):
    """folder.Layouts of another program."""

    settings: dict
    method: Method
    prefixes: Mapping[str, str]  # families.Family's

    # Scales of activations, keys and values, which are not quantized here.
    unused = (
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
    # Older AutoGPTQ added biases to every matrix.
    zeros = ("bias", "weight_zero_point")

    @property
    def keeps_plain(self) -> bool:
        """Not gpt-oss's, whose experts are always quantized."""
        return self.settings["quant_method"] != "mxfp4"

    def of(self, module: str) -> Layout:
        """UserError for unsupported settings."""
        try:
            return self.method.layout(self.method.of_module(self.settings, self.names(module)))
        except re.error as error:
            raise UserError(
                f"config.json: {ENTRY}: {short_repr(error.pattern)} is no pattern of Python's re:"
                f" {error}"
            ) from None

    def names(self, module: str) -> list[str]:
        """A module's name in a text model, and its names in a model that wraps one: writers use
        those of the model that they loaded."""
        dotted = f"{module}."
        names = [module]
        for outer, inner in self.prefixes.items():
            if dotted.startswith(inner):
                name = outer + dotted.removeprefix(inner)
                names.append(name.removesuffix("."))
        return names


def find_layouts(hf: dict) -> ForeignLayouts:
    """The Layouts of a config.json's quantization_config. UserError for unsupported settings."""
    settings = hf.get(ENTRY)
    if not isinstance(settings, dict):
        raise refused(f"config.json: {ENTRY}", settings, "is not supported")
    method = settings.get("quant_method")
    is_gpt_oss = hf.get("model_type") == "gpt_oss"
    check(settings, quant_method=tuple(name for name in METHODS if name != "mxfp4" or is_gpt_oss))
    family = family_of(hf)
    layouts = ForeignLayouts(settings, METHODS[method], family.prefixes if family else {})
    layouts.of("")  # refuses the settings of modules that have none of their own
    return layouts


# ------------------------------------------------------------------------------ checks of settings


def check(settings: dict, entry: str = ENTRY, **supported_by_key: tuple) -> None:
    """UserError for a setting that is none of the supported values; types count, so 4.0 is not 4.
    None is a missing key."""
    for key, supported in supported_by_key.items():
        value = settings.get(key)
        if not any(value == option and type(value) is type(option) for option in supported):
            names = ["none" if option is None else repr(option) for option in supported]
            raise unsupported(settings, key, f"supported: {' or '.join(names)}", entry)


def unsupported(settings: dict, key: str, reason: str, entry: str = ENTRY) -> UserError:
    name = f"config.json: {entry}: {one_line(key)}"
    return refused(name, settings.get(key), f"is not supported; {reason}")


def read_object(settings: dict, key: str) -> dict:
    value = settings.get(key)
    if not isinstance(value, dict):
        raise unsupported(settings, key, "it must be an object")
    return value


def read_optional(settings: dict, key: str) -> dict:
    return read_object(settings, key) if settings.get(key) else {}


def read_group_size(settings: dict) -> int:
    size = settings.get("group_size")
    if type(size) is not int or (size < 1 and size != -1):
        raise unsupported(settings, "group_size", "use a positive one, or -1 for rows")
    return size


def read_block(settings: dict, key: str) -> tuple[int, int]:
    """(rows, columns) that share a scale. Our fp8-g128 holds blocks of 128 columns."""
    size = settings.get(key)
    is_block = isinstance(size, list) and size[1:] == [128]
    if not is_block or type(size[0]) is not int or size[0] < 1:
        raise unsupported(settings, key, "supported: [rows, 128]")
    return size[0], 128


def read_names(settings: dict, key: str) -> list[str]:
    names = settings.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise unsupported(settings, key, "it must be a list of names")
    return names


# ------------------------------------------------------------------------------------ the methods


def gptq_override(settings: dict, names: list[str]) -> dict:
    """GPTQModel's `dynamic` has other settings for modules, by the first "+:pattern" that matches a
    name. Those that a "-:pattern" matches are stored in full precision. Source: GPTQModel,
    gptqmodel/quantization/config.py (_resolve_dynamic_override)."""
    dynamic = read_optional(settings, "dynamic")
    for key in dynamic:
        pattern = key.removeprefix("+:")
        if not key.startswith("-:") and any(re.match(pattern, name) for name in names):
            return settings | read_object(dynamic, key)
    return settings


def gptq_layout(settings: dict) -> Gptq:
    versions = (None, "gptq", "gptq_v2")
    check(
        settings,
        bits=(4, 8),
        checkpoint_format=versions,
        format=versions,
        rotation=(None,),
        adapter=(None,),
    )
    name = settings.get("checkpoint_format") or settings.get("format")
    version = 2 if name == "gptq_v2" else 1
    symmetric = settings.get("sym") is not False  # as in transformers' GPTQConfig
    return Gptq(settings["bits"], read_group_size(settings), version=version, symmetric=symmetric)


# AutoRound's packing_format -> GPTQ's checkpoint_format.
GPTQ_PACKINGS = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptq": "gptq",
    "auto_round": "gptq_v2",
    "auto_round:gptqmodel": "gptq_v2",
}
AWQ_PACKINGS = ("auto_round:auto_awq", "auto_round:awq")


def auto_round_layout(settings: dict) -> Gptq | Awq:
    """AutoRound packs as GPTQ or AWQ do, without the groups of inputs. Sources: AutoRound,
    auto_round/inference/{convert_model,backend}.py, export/export_to_autoround/export.py and
    auto_round_extension/torch/qlinear_torch{,_zp}.py."""
    check(
        settings,
        packing_format=(*GPTQ_PACKINGS, *AWQ_PACKINGS),
        data_type=(None, "int"),
        act_bits=(None, 16),
        super_bits=(None,),
        rotation_config=(None, {}),
    )
    packing = settings["packing_format"]
    if packing in AWQ_PACKINGS:
        return awq_layout(settings)
    layout = gptq_layout(settings | {"checkpoint_format": GPTQ_PACKINGS[packing]})
    return replace(layout, has_order=packing == "auto_round:gptqmodel")


def auto_round_override(settings: dict, names: list[str]) -> dict:
    """AutoRound's extra_config has other settings for a module's name, or for a pattern that occurs
    in it; those of 16 bits are stored in full precision. Source: AutoRound,
    auto_round/inference/utils.py (_expand_regex_config)."""
    extra = read_optional(settings, "extra_config")
    for key in (*names, *extra):
        if key in extra and any(re.search(key, name) for name in names):
            changes = read_object(extra, key)
            return settings if changes.get("bits") == 16 else settings | changes
    return settings


def mlx_override(settings: dict, names: list[str]) -> dict:
    """MLX has an object of other settings under a module's path, true, or false for full precision.
    Source: mlx-lm, mlx_lm/utils.py (_quantize)."""
    for name in names:
        if isinstance(settings.get(name), dict):
            return {"bits": 4, "group_size": 64, **settings[name]}
    return settings


def mlx_layout(settings: dict) -> Renamed:
    """Sources: floats.MLX_AFFINE's."""
    entry = "quantization"
    check(settings, entry, mode=(None, "affine", "mxfp4"), quantize_input=(None, False))
    if settings.get("mode") == "mxfp4":
        check(settings, entry, bits=(4,), group_size=(32,))
        return Renamed("mxfp4", names=floats.MLX_MXFP4)
    check(settings, entry, bits=MLX_BITS, group_size=MLX_GROUPS)
    return Renamed(f"mlx{settings['bits']}-g{settings['group_size']}", names=floats.MLX_AFFINE)


def awq_layout(settings: dict) -> Awq:
    older_names = {"bits": settings.get("w_bit"), "group_size": settings.get("q_group_size")}
    settings = older_names | settings
    versions = (None, "gemm", "GEMM")
    check(
        settings,
        bits=(4,),
        version=versions,
        checkpoint_format=versions,
        format=versions,
    )
    return Awq(4, read_group_size(settings))


def fp8_layout(settings: dict) -> Fp8:
    """transformers' own fp8 (Qwen3-FP8, DeepSeek, Ministral 3), and AutoFP8's, which has another
    name for scales and no weight_block_size."""
    note = WEIGHTS_ONLY if settings.get("activation_scheme") else ""
    rows = columns = -1
    if settings.get("weight_block_size"):
        rows, columns = read_block(settings, "weight_block_size")
    scale_key = "weight_scale_inv" if "weight_block_size" in settings else "weight_scale"
    return Fp8(8, columns, note, rows=rows, scale_key=scale_key)


def bitsandbytes_layout(settings: dict) -> Table4:
    check(settings, load_in_4bit=(True,), bnb_4bit_quant_type=("nf4", "fp4"))
    return Table4(settings["bnb_4bit_quant_type"])


def modelopt_layout(settings: dict) -> Fp8 | Renamed:
    """NVIDIA's Model Optimizer, modelopt/torch/export/{convert_hf_config,quant_utils}.py"""
    check(settings, f"{ENTRY} or hf_quant_config.json", quant_algo=("NVFP4", "FP8"))
    if settings["quant_algo"] == "FP8":
        return Fp8(8, -1, WEIGHTS_ONLY, rows=-1)
    return ModelOptNvFp4("nvfp4", WEIGHTS_ONLY, names=floats.MODELOPT_NVFP4)


def compressed_layout(settings: dict) -> Layout:
    """compressed-tensors, src/compressed_tensors/quantization/{quant_config,quant_args}.py"""
    check(settings, transform_config=(None, {}))
    (scheme,) = settings["config_groups"].values()
    check(scheme, output_activations=(None,))
    unread = settings.get("kv_cache_scheme") or scheme.get("input_activations")
    note = WEIGHTS_ONLY if unread else ""
    format = scheme.get("format") or settings.get("format")
    check({"format": format}, format=("pack-quantized", *RENAMED, *UNPACKED))
    if format in RENAMED:
        return replace(RENAMED[format], note=note)
    weights = read_object(scheme, "weights")
    rows, columns = read_strategy(weights)
    if format not in UNPACKED:
        check(weights, type=("int",), num_bits=(4, 8))
        has_zeros = weights.get("symmetric") is False
        has_order = weights.get("actorder") in (True, "group", "dynamic")
        return PackQuantized(weights["num_bits"], columns, note, has_zeros, has_order)
    if weights.get("type") != "float":
        return Int8Rows(8, columns, note, rows=rows)
    check({"group_size": columns}, group_size=(-1, 128))  # our formats of fp8
    return Fp8(8, columns, note, rows=rows)


def compressed_override(settings: dict, names: list[str]) -> dict:
    """Keeps one of the config_groups, that with the most specific target: the module's name, a
    pattern (the first in the alphabet), then its class. Matrices that none targets, or that
    `ignore` names, are stored in full precision, so that any group will do. Sources:
    compressed-tensors, src/compressed_tensors/utils/match.py (match_targets) and
    quantization/lifecycle/apply.py (apply_quantization_config)."""
    groups = read_object(settings, "config_groups")
    if not groups:
        raise unsupported(settings, "config_groups", "it must hold a group")
    group_by_priority = {(2,): next(iter(groups))}  # after all targets
    for group in groups:
        for target in read_names(read_object(groups, group), "targets"):
            pattern = target.removeprefix("re:")
            is_match = pattern != target and any(re.match(pattern, name) for name in names)
            if is_match or target in (*names, "Linear"):
                group_by_priority[target not in names, target == "Linear", target] = group
    group = group_by_priority[min(group_by_priority)]
    return settings | {"config_groups": {group: groups[group]}}


# Formats of compressed-tensors that store one code per element.
UNPACKED = ("int-quantized", "float-quantized", "naive-quantized")
RENAMED = {  # as one of our schemes, by the names of its parts
    "mxfp4-pack-quantized": Renamed("mxfp4", names=floats.MXFP4),
    "mxfp8-quantized": Renamed("mxfp8", names=floats.MXFP8),
    "nvfp4-pack-quantized": Renamed("nvfp4", names=floats.NVFP4),
}


def read_strategy(weights: dict) -> tuple[int, int]:
    """(rows, columns) that share a scale, -1 for all; implied by the size of groups where the
    strategy is absent."""
    has_groups = weights.get("group_size") is not None  # of -1 for a channel
    strategy = weights.get("strategy") or ("group" if has_groups else "tensor")
    if strategy == "block":
        return read_block(weights, "block_structure")
    if strategy == "group":
        return 1, read_group_size(weights)
    check({"strategy": strategy}, strategy=("tensor", "channel", "group", "block"))
    return (-1 if strategy == "tensor" else 1), -1


METHODS = {
    "gptq": Method(gptq_layout, gptq_override),
    "awq": Method(awq_layout),
    "auto-round": Method(auto_round_layout, auto_round_override),
    "mlx": Method(mlx_layout, mlx_override),
    "compressed-tensors": Method(compressed_layout, compressed_override),
    "fp8": Method(fp8_layout),
    "bitsandbytes": Method(bitsandbytes_layout),
    "modelopt": Method(modelopt_layout),
    "mxfp4": Method(lambda settings: Renamed("mxfp4", names=floats.GPT_OSS)),
}
