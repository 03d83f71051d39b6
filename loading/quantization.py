"""The form that a folder's matrices are stored in.

    Stored                  schemes, of all matrices or of single ones, and notes for the user
    stored_quantization     the form that our own config.json names;  stored_in  its name
    schemes_of              the schemes that loading ends with;  largest_group  inputs that share a scale

This file reads config.json alone: no tensor, no model.
"""

import reprlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from loading.files import read_json
from weights.formats import FORMATS


class Stored(NamedTuple):
    """What a folder's matrices are stored in: a scheme, and that of the head; None for full precision. `given` are the
    schemes of single matrices in place of these, by our names: all that a GGUF file has."""

    scheme: str | None = None
    head: str | None = None
    given: Mapping[str, str | None] = MappingProxyType({})
    again: str | None = None  # the scheme to quantize to where no scheme holds another program's weights
    notes: tuple[str, ...] = ()  # what a user should hear
    tied: bool = False  # does the head share the embedding's weights?


def stored_quantization(file: Path) -> Stored:
    """What config.json says that quantize.py or save_model made of its folder."""
    found = read_json(file).get("quantization")
    if found is None:
        return Stored()
    known = isinstance(found, dict) and found.keys() <= {"scheme", "head", "method", "kept"}
    kept = found.get("kept") or [] if known else None
    known = known and isinstance(kept, list) and all(isinstance(name, str) for name in kept)
    schemes = list(FORMATS)  # no dictionary: what is no string may not be hashable
    if not known or found.get("scheme") not in schemes or found.get("head") not in (None, *schemes):
        raise ValueError(
            f"{file}: quantization = {reprlib.repr(found)} is not supported; schemes: {', '.join(schemes)}"
        )
    return Stored(found["scheme"], found.get("head"), dict.fromkeys(kept))


def stored_in(file: Path) -> str | None:
    """The scheme or the other program's method that config.json says its folder is stored in."""
    other = read_json(file).get("quantization_config") or {}
    return stored_quantization(file).scheme or other.get("quant_method")


def schemes_of(
    form: Stored, folder: Path, quantize: str | None, head: str | None
) -> tuple[str | None, str | None, dict]:
    """(scheme, head, given) as `empty_model` takes them, of a folder that is stored so and is to be quantized so.
    ValueError where it is stored in another scheme."""
    stored = form.scheme
    if stored and quantize not in (None, stored):
        raise ValueError(f"{folder}: is stored in {stored} and cannot be quantized to {quantize}; take the original")
    if stored and head not in (None, form.head):
        raise ValueError(f"{folder}: its head is stored in {form.head or 'full precision'}, not in {head}")
    scheme, head = stored or quantize or form.again, form.head or head
    asked = dict.fromkeys(form.given, quantize) | {"lm_head": head}
    return scheme, head, {name: own for name, own in form.given.items() if own is None or asked[name] in (None, own)}


def largest_group(scheme: str | None, given: Mapping[str, str | None] = MappingProxyType({})) -> int:
    """Inputs that share a scale, 0 where a row does: no rank may cut one."""
    return max((FORMATS[name].group for name in (scheme, *given.values()) if name in FORMATS), default=0)
