"""ModelOptions -> the model that a run decodes with, and its tokenizer.

pick_device         --device, or a GPU where there is one
Target              the model of a run, opened: each of its files is read once
load_target         the model, not packed for its kernels yet, and the tokenizer
"""

import hashlib
from functools import cached_property
from pathlib import Path

import torch

from decoding.errors import UserError
from loading.checkpoint import Checkpoint, load_model, read_config
from loading.models import pick_dtype, random_model
from loading.options import GENERATION_CONFIG, ModelOptions
from loading.tokenizer import Tokenizer, load_tokenizer
from loading.tokenizers.numbers import NumberRuntime
from model import Config, Transformer
from tp import ALONE, Ranks
from weights.schemes import choose_head_scheme


def pick_device(name: str | None) -> torch.device:
    """The device of this name, by default a GPU if there is one. UserError for one that this
    machine lacks."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--device {name}: not available here: {reason}") from None
    if device.type not in ("cpu", "cuda", "mps"):
        raise UserError(f"--device {name}: only cpu, cuda and mps compute")
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
        # cuDNN's attention plans every new length for some 42 ms on the host (measured in
        # pytorch/pytorch#191576).
        torch.backends.cuda.enable_cudnn_sdp(False)
    return device


class Target:
    """The model of a run, opened. Nothing is read before it is asked for, and each file once."""

    def __init__(self, options: ModelOptions):
        self.options = options

    @classmethod
    def of(cls, options: "ModelOptions | Target") -> "Target":
        """An opened target as it is; options are opened."""
        return options if isinstance(options, cls) else cls(options)

    @cached_property
    def checkpoint(self) -> Checkpoint:
        return Checkpoint(self.options.checkpoint, self.options.adapter)

    @cached_property
    def config(self) -> Config:
        """The Config, before any weight is read."""
        if self.options.random_weights:
            return read_config(Path(self.options.random_weights))
        return self.checkpoint.config

    def close(self) -> None:
        """Let go of the checkpoint, whose mapped pages would count as memory while weights are
        packed. It is opened anew if it is asked for again."""
        self.__dict__.pop("checkpoint", None)


def load_target(
    options: ModelOptions | Target,
    device: torch.device,
    ranks: Ranks = ALONE,
    progress: bool = False,
) -> tuple[Transformer, Tokenizer]:
    """This rank's shard of the model, and the tokenizer. The model is not packed yet, so that a
    draft can still be made from it. Random weights come with a tokenizer that reads bytes and
    writes numbers."""
    target = Target.of(options)
    options = target.options
    config = target.config
    dtype = pick_dtype(options.dtype, config.dtype, device)
    load_options = {
        "device": device,
        "dtype": dtype,
        "quantize": options.quantize,
        "tp": ranks,
        "pack": False,
    }
    if options.random_weights:
        head_scheme = choose_head_scheme(options.quantize, options.quantize_head)
        model = random_model(config, head_scheme=head_scheme, **load_options)
        return model, Tokenizer(NumberRuntime(config.vocab_size), config.vocab_size)
    checkpoint = target.checkpoint
    known = {"config.json": checkpoint.hf, GENERATION_CONFIG: options.generation_config}
    tokenizer = load_tokenizer(checkpoint, options.chat_template, known)
    ranks.check_same(
        lambda: {"its tokenizer": hashlib.sha256(b"\0".join(tokenizer.pieces())).hexdigest()}
    )
    model = load_model(
        checkpoint, head_scheme=options.quantize_head, progress=progress, **load_options
    )
    return model, tokenizer
