"""The form that a folder's matrices are stored in, according to its config.json.

StoredForm          schemes, of all matrices or of single ones, and notes for the user
read_stored_form    the form that our own config.json names
resolve_schemes     the schemes of the loaded model
split_schemes       one scheme of a fused matrix, or one for each of its sources
max_group           the largest number of inputs that share a scale
"""

import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from decoding.errors import UserError
from weights.formats import FORMATS
from weights.schemes import choose_head_scheme

# For folders that only we read. Without a quant_method other programs refuse them; for an unknown
# quant_method transformers warns and loads random weights.
QUICKDRAFT_CONFIG = {"format": "quickdraft"}


class StoredForm(NamedTuple):
    """The schemes that a folder's matrices are stored in; None for full precision."""

    scheme: str | None = None  # of all matrices but the head
    head_scheme: str | None = None
    # The schemes of single matrices, by our names, where they differ from `scheme`.
    overrides: Mapping[str, str | None] = MappingProxyType({})
    requantize_to: str | None = None  # the scheme of weights that no scheme keeps exactly
    notes: tuple[str, ...] = ()  # for the user

    @property
    def is_quantized(self) -> bool:
        return bool(self.scheme or self.overrides or self.requantize_to)


def read_stored_form(hf: dict, file: Path) -> StoredForm:
    """The form that quantize.py or save_model wrote into config.json. UserError names its
    `file`."""
    entry = hf.get("quantization")
    if entry is None:
        return StoredForm()
    schemes = list(FORMATS)  # a list, because values of other programs may not be hashable
    keys = set(entry) if isinstance(entry, dict) else set()
    if "scheme" in keys <= {"scheme", "head", "method", "kept"}:
        head_scheme = entry.get("head")
        if entry["scheme"] in schemes and head_scheme in (None, *schemes):
            return StoredForm(entry["scheme"], head_scheme, dict.fromkeys(entry.get("kept") or []))
    raise UserError(
        f"{file}: quantization = {reprlib.repr(entry)} is not supported; schemes:"
        f" {', '.join(schemes)}"
    )


def resolve_schemes(
    form: StoredForm, folder: Path, quantize: str | None, head_choice: str | None
) -> tuple[str | None, str | None, dict]:
    """(scheme, head scheme, overrides) of the loaded model, for a folder in this form, the user's
    `quantize`, and `head_choice` as in choose_head_scheme. UserError if the folder is stored
    in another scheme."""
    stored = form.scheme
    head_scheme = choose_head_scheme(None if stored else quantize, head_choice)
    if stored and quantize not in (None, stored):
        raise UserError(
            f"{folder}: is stored in {stored} and cannot be quantized to {quantize}; use the"
            f" original"
        )
    if stored and head_scheme not in (None, form.head_scheme):
        raise UserError(
            f"{folder}: its head is stored in {form.head_scheme or 'full precision'}, not in"
            f" {head_scheme}; use the original to change it"
        )
    scheme = stored or quantize or form.requantize_to
    head_scheme = form.head_scheme or head_scheme
    requested = dict.fromkeys(form.overrides, quantize) | {"lm_head": head_scheme}
    overrides = {
        name: x for name, x in form.overrides.items() if x is None or requested[name] in (None, x)
    }
    return scheme, head_scheme, overrides


def split_schemes(name: str, source_schemes: Sequence[str | None]) -> dict[str, str]:
    """The overrides of a matrix, by the schemes of the sources that are fused in it (None: plain):
    one scheme, or one for each source where they differ. Experts, whose kernels take all of them
    at once, have none then."""
    if len({*source_schemes}) == 1:
        scheme_by_part = {name: source_schemes[0]}
    elif "experts" in name:
        scheme_by_part = {}
    else:
        scheme_by_part = {f"{name}.{i}": scheme for i, scheme in enumerate(source_schemes)}
    return {part: scheme for part, scheme in scheme_by_part.items() if scheme}


def max_group(
    scheme: str | None, overrides: Mapping[str, str | None] = MappingProxyType({})
) -> int:
    """The largest number of inputs that share a scale, 0 for a scale per row. No rank may split a
    group."""
    return max(
        (FORMATS[name].group for name in (scheme, *overrides.values()) if name in FORMATS),
        default=0,
    )
