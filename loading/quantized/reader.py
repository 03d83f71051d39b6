"""Folders that other programs quantized: their stored tensors -> the parts of one of our formats.

    find, needed        which matrices of a folder are quantized, and what it must hold of them
    scheme_of           the scheme of ours that holds them exactly, or is nearest
    reading             our parts of a matrix, or its weights, by the names under which we would have stored them
    config_for, plain   the way back: how a folder of ours tells others to read it, and parts as they call them

What config.json says stands in quantization.py, where each program keeps codes, scales and zero points in layouts.py
and floats.py. Nothing is converted ahead: a part is made when it is read, whole, one matrix at a time. This file does
not know models, ranks or decoding.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

import loading.quantized.floats as floats
from loading.quantized.detection import OWN, layout_of  # noqa: F401 (loading/checkpoint.py takes them from here)
from loading.quantized.layouts import Gptq, Layout, Matrix
from weights.formats import Fp8, Int8

# Scales of activations, keys and values, which are not quantized here. config.json's notes say so.
UNUSED = (
    ".input_scale", ".activation_scale", ".output_scale", ".input_global_scale", ".input_zero_point",
    ".self_attn.q_scale", ".self_attn.k_scale", ".self_attn.v_scale", ".k_proj.k_scale", ".v_proj.v_scale",
)  # fmt: skip


class Found(NamedTuple):
    """The quantized matrices of a folder, and our names of those in blocks that are not."""

    layout: Layout
    matrices: dict[str, Matrix]
    kept: tuple[str, ...]


def find(layout: Layout, readers: dict, shapes: dict[str, dict[str, tuple[int, int]]]) -> Found:
    """shapes: our name of a matrix -> {Hugging Face module stacked in it: (out, in)}. ValueError names a matrix that is
    quantized in part."""
    matrices, kept = {}, []
    if isinstance(layout, floats.Fp8) and not any(name.endswith(f".{layout.key}") for name in readers):
        layout = replace(layout, scale_key="weight_scale")  # AutoFP8's name
    for ours, sources in shapes.items():
        here = [name for name in sources if f"{name}.{layout.key}" in readers]
        if here and len(here) < len(sources) and not layout.mixes:
            other = next(name for name in sources if name not in here)
            raise ValueError(f"{here[0]} is quantized and {other} is not; they are one matrix here")
        matrices |= {name: Matrix(name, *sources[name], readers) for name in here}
        kept += [ours] if not here and ours.startswith("layers.") else []
    if not matrices:
        raise ValueError(f"config.json says that it is quantized, but none of its tensors is called *.{layout.key}")
    return Found(layout, matrices, () if layout.mixes else tuple(kept))


def needed(found: Found, plain: dict[str, tuple], readers: dict) -> dict[str, tuple]:
    """Tensor -> (shape, stored types) of the folder, from those of the same model in full precision. Tensors of zeros
    that some writers add are taken out of `readers`, and scales of what is not quantized here."""
    for name in [name for name in readers if name.endswith(UNUSED)]:
        del readers[name]
    wanted = {name: how for name, how in plain.items() if name.removesuffix(".weight") not in found.matrices}
    for name, m in found.matrices.items():
        wanted |= {f"{name}.{kind}": how for kind, how in found.layout.tensors(m).items()}
        for extra in (f"{name}.{kind}" for kind in found.layout.zeros_only):
            if extra in readers and extra not in wanted and not readers[extra][1].get_tensor(extra).float().any():
                del readers[extra]
    return wanted


def checked(found: Found) -> Found:
    """To be called once all tensors are there in their shapes. ValueError names a tensor with senseless values."""
    layout, matrices = found.layout, found.matrices.values()
    for m in matrices:
        layout.check(m)
    if isinstance(layout, Gptq) and layout.version == 1 and layout.symmetric:
        # Some writers say version 1 and store version 2 (vllm-project/vllm pull request 38966). Symmetric codes tell.
        second = replace(layout, version=2, notes=("it says version 1, but holds the zero points of version 2",))
        if all(map(second.centred, matrices)):
            return found._replace(layout=second)
    return found


def scheme_of(found: Found) -> tuple[str | None, str | None]:
    """(scheme, None): it holds every matrix exactly. (scheme, why not): it is the nearest. (None, why not): weights
    are held as plain ones."""
    return found.layout.scheme(found.matrices.values())


def reading(found: Found, scheme: str, read: Callable[[str], Tensor]) -> Callable[[str], Tensor]:
    """A folder's `read` (name -> tensor), to which quantized matrices have the scheme's parts, or a weight."""

    def made(name: str) -> Tensor:
        module, _, kind = name.rpartition(".")
        if module not in found.matrices or kind == "bias":
            return read(name)
        m = found.matrices[module]
        return found.layout.weight(m) if kind == "weight" else found.layout.part(m, scheme, kind)

    return made


def config_for(format: Int8 | Fp8, head: bool) -> dict:
    """The quantization_config under which compressed-tensors reads a folder in `format`, with its head or without."""
    kind = "float" if format.code_dtype.is_floating_point else "int"
    weights = {"num_bits": 8, "type": kind, "strategy": "channel", "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "format": f"{kind}-quantized", "weights": weights}
    about = {"quant_method": "compressed-tensors", "format": group["format"], "quantization_status": "compressed"}
    return {**about, "config_groups": {"group_0": group}, "ignore": [] if head else ["lm_head"]}


def plain(name: str, part: Tensor) -> tuple[str, Tensor]:
    """Name and shape of such a format's part there."""
    module, _, kind = name.rpartition(".")
    return (f"{module}.weight", part) if kind == "codes" else (f"{module}.weight_scale", part[:, None])
