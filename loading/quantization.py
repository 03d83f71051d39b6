"""The scheme of every matrix of a loaded model.

choose_schemes  by what is stored and what the user asks for
plain_note      what loads as plain weights though it is stored quantized
"""

import collections
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from decoding.errors import UserError
from loading.stored import Source, Stored
from weights.schemes import check_head, choose_head_scheme

# For folders that only we read. Without a quant_method other programs refuse them; for an unknown
# quant_method transformers warns and loads random weights.
QUICKDRAFT_CONFIG = {"format": "quickdraft"}


def choose_schemes(
    source: Source, path: Path, quantize: str | None = None, head_choice: str | None = None
) -> dict[str, str | None]:
    """The scheme of each Linear, for the user's `quantize`, and `head_choice` as in
    choose_head_scheme. A fused one whose sources get different schemes has an entry for each
    ("layers.0.attention.qkv.2"). UserError names a `path` that is stored in another scheme."""
    near, _ = source.nearest
    # "auto" follows `quantize`; a folder with a scheme keeps the head that it has.
    head_scheme = choose_head_scheme(None if source.scheme else quantize, head_choice)
    if source.scheme:
        refuse_other_schemes(source, path, quantize, head_scheme)
        quantize = head_scheme = None  # both are what is stored
    else:
        check_head(head_scheme, quantize or near)
    schemes = {}
    for name in source.linears:
        stored = source.of(name)
        if name == "lm_head":
            schemes |= choose_parts(name, stored, head_scheme, None)
        elif source.keeps_plain and all(tensor.is_float for tensor in stored):
            schemes[name] = None
        else:
            schemes |= choose_parts(name, stored, quantize, near)
    return schemes


def plain_note(source: Source, schemes: Mapping[str, str | None]) -> str:
    """What a user should know of tensors that are stored quantized and load, with these schemes, as
    plain weights: no scheme holds them or what they are fused with, or they are an embedding."""
    # By identity: one Stored may stand behind both the embedding and the head.
    quantized_ids = {
        id(tensor) for name, scheme in schemes.items() if scheme for tensor in source.of(name)
    }
    expanded = [
        tensor
        for tensor in source.tensors.values()
        if not (tensor.is_float or id(tensor) in quantized_ids)
    ]
    if not expanded:
        return ""
    num_bytes = 2 * sum(math.prod(tensor.shape) for tensor in expanded)
    counts = collections.Counter(tensor.stored_type or tensor.scheme for tensor in expanded)
    types = ", ".join(f"{count} in {name}" for name, count in sorted(counts.items()))
    return (
        f"tensors that are stored quantized load as plain weights, {num_bytes / 1e9:.3g} GB in 16"
        f" bits: {types}"
    )


def choose_parts(
    name: str, stored: Sequence[Stored], requested: str | None, near: str | None
) -> dict[str, str | None]:
    """The scheme of one Linear, or those of its sources: the requested one, the stored one, or
    `near` for what no scheme holds."""
    schemes = [requested or tensor.scheme or (near if tensor.near else None) for tensor in stored]
    if len({*schemes}) == 1:
        return {name: schemes[0]}
    if "experts" in name:  # a Stack needs one scheme: int8, which loses little, or plain weights
        return {name: near if near == "int8" else None}
    return {f"{name}.{i}": scheme for i, scheme in enumerate(schemes)}


def refuse_other_schemes(
    source: Source, path: Path, quantize: str | None, head_scheme: str | None
) -> None:
    """UserError for schemes other than those in which the folder is stored."""
    if quantize not in (None, source.scheme):
        raise UserError(
            f"{path}: is stored in {source.scheme} and cannot be quantized to {quantize}; use the"
            " original"
        )
    (head,) = source.of("lm_head")
    if head_scheme not in (None, head.scheme):
        raise UserError(
            f"{path}: its head is stored in {head.scheme or head.stored_type or 'full precision'},"
            f" not in {head_scheme}; use the original to change it"
        )
