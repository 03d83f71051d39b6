"""Which models a run loads, and how. This file needs no torch, so that flags are refused before it
is imported.

ModelOptions        a checkpoint, or a shape with random weights; its precision and its device
DraftOptions        what drafts for it
folder_sampling     the sampling that a checkpoint asks for
"""

import os
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from decoding.errors import UserError
from loading.hub import checkpoint_path
from loading.plain_files import error_prefix, is_gguf, read_json
from weights.schemes import check_head, check_scheme, choose_head_scheme

DTYPES = ("bfloat16", "float16", "float32")
GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True)
class ModelOptions:
    """The model of a run. UserError for a scheme that there is not.

    checkpoint          a Hugging Face folder or a GGUF file
    adapter             a LoRA folder, merged while loading
    random_weights      a config.json, whose shape gets random weights instead of a checkpoint's
    quantize            a scheme for the weights, quantized as they are read
    quantize_head       "auto", "none" or a scheme for lm_head
    dtype, device       by default the checkpoint's, and a GPU where there is one
    chat_template       a file in jinja that replaces the checkpoint's own template
    """

    checkpoint: str = ""
    adapter: str | None = None
    random_weights: str | None = None
    quantize: str | None = None
    quantize_head: str = "auto"
    dtype: str | None = None
    device: str | None = None
    chat_template: str | None = None

    def __post_init__(self):
        if self.dtype not in (None, *DTYPES):
            raise UserError(
                f"dtype = {self.dtype!r} must be one of {', '.join(DTYPES)}; quantize takes schemes"
            )
        head_scheme = choose_head_scheme(self.quantize, self.quantize_head)
        check_head(head_scheme, self.quantize)
        if self.random_weights and (self.adapter or self.chat_template):
            raise UserError(
                "--adapter and --chat_template need the weights and the tokenizer of a --checkpoint"
            )
        for scheme in (self.quantize, head_scheme):
            if scheme is not None:
                check_scheme(scheme)

    @property
    def source(self) -> str:
        """The path that the user gave."""
        return self.random_weights or self.checkpoint

    @cached_property
    def generation_config(self) -> dict:
        """The checkpoint's file of this name, read once. A GGUF file has none."""
        path = Path(self.checkpoint)
        return {} if is_gguf(path) else read_json(path / GENERATION_CONFIG)


# Keys of generation_config.json that have a field of Sampling.
SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def folder_sampling(
    options: ModelOptions, check: Callable[[dict], object], overrides: Collection[str] = ()
) -> dict[str, float]:
    """The settings of a folder's generation_config.json but for `overrides`, by Sampling's names,
    as transformers and vLLM take them: `do_sample: false` is temperature 0, and `do_sample: true`
    without a temperature is 1. UserError names the file, and what `check`
    (decoding.settings.default_sampling) refuses."""
    values = options.generation_config
    settings = {name: values[name] for name in SAMPLING_KEYS if values.get(name) is not None}
    if settings.get("top_k") == -1:  # vLLM's word for no limit
        del settings["top_k"]
    if values.get("do_sample") is not None:
        settings.setdefault("temperature", 1.0)
    if values.get("do_sample") is False:
        settings["temperature"] = 0.0
    for name in settings.keys() & {*overrides}:
        del settings[name]
    with error_prefix(Path(options.checkpoint, GENERATION_CONFIG)):
        check(settings)
    return settings


@dataclass(frozen=True)
class DraftOptions:
    """What drafts: a folder, or a spec such as "ngram", or the suffix draft and a folder together.
    UserError for options that need weights of the draft's own.

    checkpoint          a path, or an opened loading.checkpoint.Checkpoint
    quantize            a scheme for the folder's weights
    sharded             divide the folder's model over the ranks, instead of holding it on every one
    """

    checkpoint: str | os.PathLike | None = None
    spec: str | None = None
    quantize: str | None = None
    sharded: bool = False

    def __post_init__(self):
        if "" in (self.checkpoint, self.spec):
            raise UserError("the draft has an empty name: give a folder or a spec, or leave it out")
        has_weights = self.checkpoint or MTP_SPEC.fullmatch(self.spec or "")
        if self.quantize and not has_weights:
            raise UserError("--draft_quantize needs --draft_checkpoint or --draft mtp")
        if self.sharded and not has_weights:
            raise UserError(
                "--draft_tp needs --draft_checkpoint: other drafts are divided as the target is"
            )
        if self.quantize:
            check_scheme(self.quantize)

    @property
    def source(self) -> str | os.PathLike | None:
        """What drafts.registry.load_drafter takes; None without a draft."""
        if not self.checkpoint:
            return self.spec
        if self.spec:
            return f"{self.spec},{os.fspath(self.checkpoint)}"
        return Path(self.checkpoint) if isinstance(self.checkpoint, str) else self.checkpoint

    def head_folder(self, target: str) -> str | None:
        """The folder or file of an MTP head: that of the target of this path, unless the spec names
        another. None for other drafts."""
        match = MTP_SPEC.fullmatch(self.spec or "")
        return match and checkpoint_path(match[2] or target)

    def source_for(self, target: str) -> str | os.PathLike | None:
        """`source` for the target of this path, with the folder of an MTP head."""
        folder = self.head_folder(target)
        if folder is None:
            return self.source
        spec, _ = MTP_SPEC.fullmatch(self.spec).groups("")
        return f"{spec}mtp:{folder}"


# How users write the specs of --draft, by their names. drafts.registry has the DraftSource that
# reads each.
SPECS = {
    "suffix": "suffix[:N]",
    "ngram": "ngram[:N]",
    "layers": "layers:0-7,24-31",
    "window": "window:N",
    "quantized": "quantized:SCHEME[,window:N]",
    "mtp": "mtp[:DIR]",
}
SPEC_HELP = ", ".join((*SPECS.values(), "or suffix[:N],DIR with a draft folder"))
# An MTP head, alone or after a suffix draft, and its folder
MTP_SPEC = re.compile("((?:suffix|ngram)(?::[^,]*)?,)?mtp(?::(.*))?")


def split_spec(text: str | None) -> tuple[str | None, str | None]:
    """A spec of --draft -> the spec, and the draft that follows one without a model, or None:
    "suffix:8,DIR" -> ("suffix:8", "DIR")."""
    match = re.fullmatch("((?:suffix|ngram)(?::[^,]*)?),(.*)", text or "")
    return match.groups() if match else (text, None)


def split_folder(text: str | None) -> tuple[str | None, str | None]:
    """`split_spec` where a folder follows. An MTP head is part of the spec."""
    return (text, None) if MTP_SPEC.fullmatch(text or "") else split_spec(text)
