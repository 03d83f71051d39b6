"""A draft folder or a spec of --draft -> Drafter, for a given target.

    load_drafter    the public door
    load_models     a target and its drafter, packed for their kernels
    find_draft      what LLM's `draft` names
    draft_loader    DraftOptions -> what loads their drafter
    check_draft     refuses what it can before weights are read, and returns what loads the drafter:
                    the others call it, so a config.json is parsed once
    folder_check    finds the check of a kind of folder; a new kind takes a file and a case here
    spec_parser     finds the parser of a kind of spec; a new one also takes an entry in
                    loading.options.SPECS, which --help lists

This file does not know how a drafter drafts. It imports a drafter's file when a draft of its kind
is asked for, so a fork may delete the files of drafters that it does not need.
"""

import functools
import os
from collections.abc import Callable
from pathlib import Path

import torch

from decoding.errors import UserError
from drafts.base import Drafter
from loading.checkpoint import Checkpoint
from loading.draft_types import draft_type_of
from loading.hub import checkpoint_path
from loading.options import (
    MTP_SPEC,
    SPEC_HELP,
    SPECS,
    DraftOptions,
    ModelOptions,
    split_folder,
    split_spec,
)
from loading.plain_files import error_prefix
from loading.target import Target, load_target
from loading.tokenizer import Tokenizer
from model import Config, Transformer
from tp import ALONE, Ranks, ranks_of
from weights.walker import pack_model


def load_drafter(
    folder_or_spec: str | Path | Checkpoint,
    model: Transformer,
    tokenizer: Tokenizer,
    *,
    dtype: str | None = None,
    quantize: str | None = None,
    sharded: bool = False,
    pack: bool = True,
    progress: bool = False,
) -> Drafter:
    """The Drafter for this target. A Path or Checkpoint is a folder of any kind in `folder_check`.
    Text is a spec (loading.options.SPECS; "mtp" with its folder) or else the name of a folder.
    suffix[:N],DIR and ngram[:N],DIR are such a draft and a folder's together.

    `dtype` and `quantize` are those of a draft model; `sharded` divides it over the ranks. With
    `pack` the target and the draft are packed for their kernels; a target that is packed already
    has no quantized draft. UserError names file, key and number of a draft that does not fit the
    target.
    """
    load = check_draft(folder_or_spec, model.config)
    drafter = load(
        model, tokenizer, dtype=dtype, quantize=quantize, sharded=sharded, progress=progress
    )
    if pack:
        pack_with(model, drafter)
    return drafter


def find_draft(draft) -> object:
    """What load_models takes for a folder, a name on the hub, a spec, or a drafter of one's own."""
    if draft is None:
        return DraftOptions()
    if not isinstance(draft, str | os.PathLike):
        if not hasattr(draft, "propose"):
            raise UserError(f"draft = {draft!r:.99} must be a folder, a spec or a drafter")
        return draft
    spec, folder = split_folder(draft) if isinstance(draft, str) else (None, os.fspath(draft))
    if folder is None:
        folder = checkpoint_path(spec)
        if folder == spec and not is_folder(spec):
            return DraftOptions(spec=spec)
        spec = None
    return DraftOptions(checkpoint=checkpoint_path(folder), spec=spec)


def load_models(
    options: ModelOptions | Target,
    draft: object,
    device: torch.device,
    ranks: Ranks = ALONE,
    progress: bool = False,
) -> tuple[Transformer, Tokenizer, Drafter | None]:
    """Target, tokenizer and drafter. `draft`: DraftOptions, or a drafter as it is. A draft that
    cannot fit is refused before weights are read. Packs last: a draft made from its target needs
    unpacked weights."""
    target = Target.of(options)
    is_object = not isinstance(draft, DraftOptions)
    load = None if is_object else draft_loader(draft, target.options, target.config, progress)
    model, tokenizer = load_target(target, device, ranks, progress)
    drafter = draft if is_object else load(model, tokenizer)
    pack_with(model, drafter)
    return model, tokenizer, drafter


def draft_loader(
    options: DraftOptions,
    target: ModelOptions,
    config: Config,
    progress: bool = False,
) -> Callable[..., Drafter | None]:
    """`check_draft` of these options, for a target of this config. It returns load(target,
    tokenizer), which gives None where they name no draft."""
    source = options.source_for(target.source)
    if source is None:
        return lambda target, tokenizer: None
    if options.spec and is_folder(options.spec):
        raise UserError(f"--draft {options.spec}: a folder belongs to --draft_checkpoint")
    return functools.partial(
        check_draft(source, config),
        dtype=target.dtype,
        quantize=options.quantize,
        sharded=options.sharded,
        progress=progress,
    )


def pack_with(model: Transformer, *drafters: Drafter | None) -> None:
    """Pack a target and its drafts for their kernels."""
    models = [getattr(drafter, "model", None) for drafter in drafters]
    pack_model(model, *[model for model in models if isinstance(model, Transformer)])


def is_folder(folder_or_spec: str | Path | Checkpoint) -> bool:
    """Is this a folder rather than a spec? The name of a spec always means the spec, even if a
    folder of that name exists."""
    if not isinstance(folder_or_spec, str):
        return True
    kind = folder_or_spec.partition(":")[0]
    return kind not in SPECS and Path(folder_or_spec).exists()


def check_draft(folder_or_spec: str | Path | Checkpoint, config: Config) -> Callable:
    """Check a draft for a target of this config, and return load(target, tokenizer, *, dtype,
    quantize, sharded, progress) -> Drafter, not packed. UserError for one that cannot fit. Reads
    no weights."""
    if is_folder(folder_or_spec):
        return check_folder(Checkpoint.of(folder_or_spec), config)
    spec, other = split_spec(folder_or_spec)
    kind, _, value = spec.partition(":")
    with error_prefix(f"--draft {folder_or_spec}"):
        load = spec_parser(kind)(value, config)
    return load if other is None else hybrid_loader(load, other, config)


def check_folder(
    checkpoint: Checkpoint,
    config: Config,
    draft_type: str | None = None,
) -> Callable:
    """`check_draft` of a folder, which all ranks must read alike, of this draft_type or by default
    of the one that its config.json says."""
    with error_prefix(checkpoint.path / "config.json"):
        load = folder_check(draft_type or draft_type_of(checkpoint.hf))(checkpoint, config)

    def load_alike(target: Transformer, tokenizer: Tokenizer, **options) -> Drafter:
        ranks_of(target).check_same(checkpoint.fingerprints)
        return load(target, tokenizer, **options)

    return load_alike


def hybrid_loader(load_first: Callable, other: str, config: Config) -> Callable:
    """Check the draft of a folder or an MTP head, and return the loader of both as one drafter."""
    from drafts.hybrid import HybridDraft

    is_head = MTP_SPEC.fullmatch(other) is not None
    load_other = check_draft(other if is_head else Path(other), config)

    def load(target: Transformer, tokenizer: Tokenizer, **options) -> HybridDraft:
        first = load_first(target, tokenizer)
        return HybridDraft(first, load_other(target, tokenizer, **options))

    return load


def folder_check(kind: str) -> Callable:
    """check(checkpoint, the target's Config) of a kind of folder, which raises UserError or
    returns load(target, tokenizer, **options of load_drafter) -> Drafter."""
    match kind:
        case "model":
            from drafts.translated import check
        case "pard":
            from drafts.pard import check
        case "eagle3":
            from drafts.eagle import check
        case "dflash":
            from drafts.dflash import check
        case "mtp":
            from drafts.mtp import check
    return check


def spec_parser(kind: str) -> Callable:
    """parse(value, the target's Config) of one of SPECS, which raises UserError or returns
    load(target, tokenizer, **options)."""
    match kind:
        case "suffix":
            from drafts.suffix import SuffixDraft

            return matcher(SuffixDraft)
        case "ngram":
            from drafts.ngram import NgramDraft

            return matcher(NgramDraft)
        case "layers":
            from drafts.target_layers import layers_from_spec

            return layers_from_spec
        case "window":
            from drafts.target_layers import window_from_spec

            return window_from_spec
        case "quantized":
            from drafts.target_layers import quantized_from_spec

            return quantized_from_spec
        case "mtp":
            return mtp_head
    raise UserError(f"expected {SPEC_HELP}")


def mtp_head(value: str, config: Config) -> Callable:
    """The parser of the folder or GGUF file of an MTP head."""
    if not value:
        raise UserError("the folder with the head is missing: mtp:DIR")
    return check_folder(Checkpoint(value), config, "mtp")


def matcher(draft_class: type[Drafter]) -> Callable:
    """The parser of a number of tokens to match, "" for the class's own."""

    def parse(value: str, config: Config) -> Callable[..., Drafter]:
        if value and (not value.isdecimal() or int(value) < 1):
            raise UserError(f"{value!r} is no number of tokens to match; it must be at least 1")
        drafter = draft_class(int(value)) if value else draft_class()
        return lambda target, tokenizer, **options: drafter

    return parse
