"""The form that a folder's matrices are stored in, according to its config.json.

StoredForm          schemes, of all matrices or of single ones, and notes for the user
read_stored_form    the form that our own config.json names
stored_scheme       the scheme, or the other program's method
resolve_schemes     the schemes of the loaded model
max_group           the largest number of inputs that share a scale
"""

import reprlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from loading.files import read_json
from weights.formats import FORMATS
from weights.schemes import head_scheme

# For folders that only we read. Without a quant_method other programs refuse them; for an unknown quant_method
# transformers warns and loads random weights.
QUICKDRAFT_CONFIG = {"format": "quickdraft"}


class StoredForm(NamedTuple):
    """The schemes that a folder's matrices are stored in; None for full precision."""

    scheme: str | None = None  # of all matrices but the head
    head: str | None = None
    overrides: Mapping[str, str | None] = MappingProxyType({})  # our name of a matrix -> its scheme, where it differs
    requantize_to: str | None = None  # the scheme of weights that no scheme keeps exactly
    notes: tuple[str, ...] = ()  # for the user
    tie_embeddings: bool = False


def read_stored_form(file: Path) -> StoredForm:
    """The form that quantize.py or save_model wrote into this config.json."""
    entry = read_json(file).get("quantization")
    if entry is None:
        return StoredForm()
    is_valid = isinstance(entry, dict) and entry.keys() <= {"scheme", "head", "method", "kept"}
    unquantized = entry.get("kept") or [] if is_valid else None
    is_valid = is_valid and isinstance(unquantized, list) and all(isinstance(name, str) for name in unquantized)
    schemes = list(FORMATS)  # a list, because a value that is no string may not be hashable
    if isinstance(entry, dict) and {"bits", "group_size"} <= entry.keys():  # mlx-lm, mlx_lm/utils.py
        raise ValueError(
            f"{file}: quantization = {reprlib.repr(entry)} is MLX's form of quantized weights, which is not supported;"
            " use the original folder, or its GGUF file"
        )
    if not is_valid or entry.get("scheme") not in schemes or entry.get("head") not in (None, *schemes):
        raise ValueError(
            f"{file}: quantization = {reprlib.repr(entry)} is not supported; schemes: {', '.join(schemes)}"
        )
    return StoredForm(entry["scheme"], entry.get("head"), dict.fromkeys(unquantized))


def stored_scheme(file: Path) -> str | None:
    """The scheme, or the other program's quant_method, in a config.json; None for full precision."""
    other = read_json(file).get("quantization_config") or {}
    return read_stored_form(file).scheme or other.get("quant_method")


def resolve_schemes(
    form: StoredForm, folder: Path, quantize: str | None, head: str | None
) -> tuple[str | None, str | None, dict]:
    """(scheme, head, overrides) of the loaded model, for a folder in this form and the user's `quantize` and `head`.
    `head` may be a choice of head_scheme. ValueError if the folder is stored in another scheme."""
    stored = form.scheme
    head = head_scheme(None if stored else quantize, head)
    if stored and quantize not in (None, stored):
        raise ValueError(f"{folder}: is stored in {stored} and cannot be quantized to {quantize}; use the original")
    if stored and head not in (None, form.head):
        raise ValueError(f"{folder}: its head is stored in {form.head or 'full precision'}, not in {head}")
    scheme, head = stored or quantize or form.requantize_to, form.head or head
    requested = dict.fromkeys(form.overrides, quantize) | {"lm_head": head}
    overrides = {name: x for name, x in form.overrides.items() if x is None or requested[name] in (None, x)}
    return scheme, head, overrides


def max_group(scheme: str | None, overrides: Mapping[str, str | None] = MappingProxyType({})) -> int:
    """The largest number of inputs that share a scale, 0 for a scale per row. No rank may split a group."""
    return max((FORMATS[name].group for name in (scheme, *overrides.values()) if name in FORMATS), default=0)
