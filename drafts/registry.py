"""A draft folder or a spec of --draft -> Drafter, for a given target.

    load_drafter    the public entry point
    load_models     a target and its drafter, packed for their kernels
    find_draft      what LLM's `draft` names: DraftOptions, or a drafter as it is
    draft_source    the drafts.base.DraftSource of either
    check_draft     a folder or a spec as a DraftSource
    SOURCES         the class of each kind of folder and spec

Each draft is first a DraftSource. Making one refuses what can be refused before weights are read,
and its `load` makes the Drafter, so each config.json is parsed once. This file does not know how a
drafter drafts. It imports a drafter's file when a draft of its kind is asked for, so a fork may
delete the files of drafters that it does not need.
"""

import importlib
import os
from pathlib import Path

import torch

from decoding.errors import UserError
from drafts.base import Drafter, DraftSource, LoadOptions
from loading.checkpoint import Checkpoint
from loading.draft_types import draft_type_of
from loading.hub import checkpoint_path
from loading.options import (
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

# Kind -> its DraftSource. A kind of folder is also one of DRAFT_TYPES in loading/draft_types.py,
# and a spec has an entry in loading.options.SPECS, which --help lists.
SOURCES = {
    "model": "drafts.translated.ModelSource",
    "pard": "drafts.pard.PardSource",
    "eagle3": "drafts.eagle.EagleSource",
    "dflash": "drafts.dflash.DFlashSource",
    "mtp": "drafts.mtp.MtpSource",
    "suffix": "drafts.suffix.SuffixSource",
    "ngram": "drafts.ngram.NgramSource",
    "layers": "drafts.target_layers.LayersSource",
    "window": "drafts.target_layers.WindowSource",
    "quantized": "drafts.target_layers.QuantizedSource",
    "hybrid": "drafts.hybrid.HybridSource",
}


def source_class(kind: str) -> type:
    """The class of a kind in SOURCES. ImportError if its file was deleted."""
    module, _, name = SOURCES[kind].rpartition(".")
    return getattr(importlib.import_module(module), name)


def load_drafter(
    folder_or_spec: str | Path | Checkpoint,
    model: Transformer,
    tokenizer: Tokenizer,
    *,
    pack: bool = True,
    **options,
) -> Drafter:
    """The Drafter for this target. A Path or Checkpoint is a folder of any kind. Text is a spec
    (loading.options.SPECS; "mtp" with its folder) or else the name of a folder. suffix[:N],DIR and
    ngram[:N],DIR are such a draft and a folder's together.

    `options` are fields of LoadOptions. With `pack` the target and the draft are packed for their
    kernels; a target that is packed already has no quantized draft. UserError names file, key and
    number of a draft that does not fit the target.
    """
    source = check_draft(folder_or_spec, model.config, LoadOptions(**options))
    drafter = source.load(model, tokenizer)
    if pack:
        pack_with(model, drafter)
    return drafter


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
    source = draft_source(draft, target, progress)
    model, tokenizer = load_target(target, device, ranks, progress)
    drafter = source.load(model, tokenizer)
    del source  # it may hold the target's checkpoint
    target.close()
    pack_with(model, drafter)
    return model, tokenizer, drafter


def find_draft(draft) -> object:
    """DraftOptions for a folder, a name on the hub or a spec; a drafter of one's own as it is."""
    if draft is None:
        return DraftOptions()
    if not isinstance(draft, str | os.PathLike):
        if isinstance(draft, type) or not hasattr(draft, "propose"):
            raise UserError(f"draft = {draft!r:.99} must be a folder, a spec or a drafter")
        return draft
    spec, folder = split_folder(draft) if isinstance(draft, str) else (None, os.fspath(draft))
    if folder is None:  # `spec` is all of the text: a folder, a name on the hub, or a spec
        folder = checkpoint_path(spec)
        if folder == spec and not is_folder(spec):
            return DraftOptions(spec=spec)
        spec = None
    return DraftOptions(checkpoint=checkpoint_path(folder), spec=spec)


def draft_source(draft: object, target: Target, progress: bool = False) -> DraftSource:
    """The source of DraftOptions, or of a drafter as it is, for a target that is opened. Without a
    draft, its `load` gives None."""
    if not isinstance(draft, DraftOptions):
        return ReadyDrafter(draft)
    model = target.options
    folder_or_spec = draft.source_for(model.source)
    if folder_or_spec is None:
        return ReadyDrafter(None)
    if draft.spec and is_folder(draft.spec):
        raise UserError(f"--draft {draft.spec}: a folder belongs to --draft_checkpoint")
    checkpoint = None if model.random_weights else target.checkpoint
    options = LoadOptions(model.dtype, draft.quantize, draft.sharded, progress, checkpoint)
    return check_draft(folder_or_spec, target.config, options)


def check_draft(
    folder_or_spec: str | Path | Checkpoint,
    config: Config,
    options: LoadOptions = LoadOptions(),  # noqa: B008, frozen
) -> DraftSource:
    """The source of a folder or a spec, for a target of this Config. UserError for a draft that
    cannot fit. Reads no weights."""
    if is_folder(folder_or_spec):
        return FolderSource(Checkpoint.of(folder_or_spec), config, options)
    spec, other = split_spec(folder_or_spec)
    kind, _, value = spec.partition(":")
    with error_prefix(f"--draft {folder_or_spec}"):
        if kind not in SPECS or other == "":
            raise UserError(f"expected {SPEC_HELP}")
        if kind == "mtp":
            if not value:
                raise UserError("the folder with the head is missing: mtp:DIR")
            return HeadSource(Checkpoint(value), config, options)
        source = source_class(kind)(value, config, options)
    if other is None:
        if options.quantize or options.sharded:
            raise UserError(
                f"--draft {folder_or_spec}: only a draft with a folder of its own is quantized or"
                f" divided apart from the target"
            )
        return source
    is_head = other.partition(":")[0] == "mtp"
    second = check_draft(other if is_head else Path(other), config, options)
    return source_class("hybrid")(source, second)


def is_folder(folder_or_spec: str | Path | Checkpoint) -> bool:
    """Is this a folder rather than a spec? The name of a spec always means the spec, even if a
    folder of that name exists; text that begins like a path always means a folder."""
    if not isinstance(folder_or_spec, str):
        return True
    kind = folder_or_spec.partition(":")[0]
    is_path = kind.startswith((".", os.sep))
    return kind not in SPECS and (is_path or Path(folder_or_spec).exists())


class ReadyDrafter(DraftSource):
    """A drafter of one's own, or None, which needs no loading."""

    def __init__(self, drafter: object):
        self.drafter = drafter

    def load(self, target: Transformer, tokenizer: Tokenizer) -> object:
        return self.drafter


class FolderSource(DraftSource):
    """A folder of any kind, which all ranks must read alike."""

    kind: str | None = None  # by default what its config.json says

    def check(self, config: Config) -> None:
        with error_prefix(self.origin.config_file):
            kind = self.kind or draft_type_of(self.origin.hf)
            self.source = source_class(kind)(self.origin, config, self.options)

    def load(self, target: Transformer, tokenizer: Tokenizer) -> Drafter:
        ranks_of(target).check_same(self.origin.fingerprints)
        return self.source.load(target, tokenizer)

    def variants(self) -> list[tuple[str, DraftSource]]:
        return self.source.variants()


class HeadSource(FolderSource):
    """A folder or a GGUF file with an MTP head."""

    kind = "mtp"


def pack_with(model: Transformer, *drafters: Drafter | None) -> None:
    """Pack a target and its drafts for their kernels."""
    draft_models = [getattr(drafter, "model", None) for drafter in drafters]
    pack_model(model, *[draft for draft in draft_models if isinstance(draft, Transformer)])
