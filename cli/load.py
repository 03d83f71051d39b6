"""Flags -> device, dtype, target, tokenizer, drafter, all packed for their kernels.

Other programs pass their own flags under the same names. This file decodes nothing.
"""

import argparse
import contextlib
import hashlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

from cli.errors import defer_interrupts
from cli.prompts import sampling_of
from decoding.sampling import Sampling
from drafts.registry import check_draft, is_folder, load_drafter
from generate import Engine
from loading.checkpoint import load_config, load_model, pick_dtype, random_model, read_config
from loading.plain_files import read_json
from loading.tokenizer import Tokenizer, load_tokenizer
from model import Config, KVCache, Transformer
from speculative import Drafter
from tp import Ranks
from weights.schemes import head_scheme
from weights.walker import pack_model

# Keys of generation_config.json that do not change the text, or that the tokenizer reads.
IGNORED_SETTINGS = {
    "eos_token_id", "bos_token_id", "pad_token_id", "use_cache", "transformers_version", "_from_model_config",
}  # fmt: skip


def number_tokenizer(vocab_size: int) -> Tokenizer:
    """For --random_weights, which brings no tokenizer: encodes text as bytes, decodes ids as numbers."""
    return Tokenizer(
        lambda text: [byte % vocab_size for byte in text.encode()], lambda id: f" {id}".encode(),
        vocab_size=vocab_size, bos_id=None, add_bos=False, stop_ids=(), strip_first_space=True,
    )  # fmt: skip


def pick_device(name: str | None) -> torch.device:
    """--device, by default a GPU if there is one. ValueError for a device that this machine lacks."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"--device {name}: not available here: {str(error).splitlines()[0]}") from None
    if device.type not in ("cpu", "cuda", "mps"):
        raise ValueError(f"--device {name}: only cpu, cuda and mps compute")
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
        # cuDNN's attention plans each length anew: some 42 ms on the host (measured in pytorch/pytorch#191576).
        torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def compiles(requested: bool | None, device: torch.device) -> bool:
    """--compile or --no-compile, by default only on a GPU: there launching kernels costs more than running them."""
    return device.type == "cuda" if requested is None else requested


def cache_type(args: argparse.Namespace) -> type[KVCache]:
    """The class of caches for --kv_cache_dtype."""
    if args.kv_cache_dtype == "model":
        return KVCache
    from decoding.kv_8bit import KINDS

    return KINDS[args.kv_cache_dtype]


def load(args: argparse.Namespace, device: torch.device, ranks: Ranks) -> tuple[Transformer, Tokenizer, Drafter | None]:
    """Target, tokenizer and drafter. Packs last: a draft made from its target needs unpacked weights."""
    model, tokenizer = load_target(args, device, ranks)
    drafter = drafter_of(args, model, tokenizer)
    pack_model(model, *([drafter.model] if drafter and drafter.model else []))
    return model, tokenizer, drafter


def print_unused(args: argparse.Namespace) -> None:
    """Print the settings of generation_config.json that differ from the flags. False and 0 count as absent."""
    settings = {} if args.random_weights else read_json(Path(args.checkpoint) / "generation_config.json")
    flags = {**vars(args), "do_sample": not sampling_of(args).is_greedy}
    other = {key: x for key, x in settings.items() if x and x != flags.get(key) and key not in IGNORED_SETTINGS}
    if other:
        print(f"not used of generation_config.json: {json.dumps(other):.400}", file=sys.stderr)


def target_config(args: argparse.Namespace) -> Config:
    return read_config(Path(args.random_weights)) if args.random_weights else load_config(args.checkpoint)


def load_target(args: argparse.Namespace, device: torch.device, ranks: Ranks) -> tuple[Transformer, Tokenizer]:
    """This rank's part of --checkpoint, or of random weights of a shape, not packed; and the tokenizer."""
    options = {"device": device, "quantize": args.quantize, "head": args.quantize_head, "tp": ranks, "pack": False}
    options["adapter"] = args.adapter
    config = target_config(args)
    if args.draft_checkpoint or args.draft:
        if args.draft and is_folder(args.draft):
            raise ValueError(f"--draft {args.draft}: a folder belongs to --draft_checkpoint")
        check_draft(Path(args.draft_checkpoint) if args.draft_checkpoint else args.draft, config)
    if args.random_weights:
        options["head"] = head_scheme(args.quantize, args.quantize_head)
        del options["adapter"]
        model = random_model(config, dtype=pick_dtype(args.dtype, config.dtype, device), **options)
        return model, number_tokenizer(config.vocab_size)
    dtype = pick_dtype(args.dtype, config.dtype, device)
    tokenizer = load_tokenizer(args.checkpoint)
    ranks.check_same(lambda: {"its tokenizer": hashlib.sha256(b"\0".join(tokenizer.pieces())).hexdigest()})
    model = load_model(args.checkpoint, dtype=dtype, progress=True, **options)
    return model, tokenizer


def drafter_of(args: argparse.Namespace, model: Transformer, tokenizer: Tokenizer) -> Drafter | None:
    """The drafter of --draft_checkpoint or --draft. Neither its model nor the target may be packed."""
    source = Path(args.draft_checkpoint) if args.draft_checkpoint else args.draft
    if source is None:
        return None
    return load_drafter(
        source, model, tokenizer, dtype=args.dtype, quantize=args.draft_quantize,
        sharded=args.draft_tp == "sharded", pack=False, progress=True,
    )  # fmt: skip


def warm_up(engine: Engine, sampling: Sampling, filled: int, kinds: Iterable[str] = ()) -> None:
    """Compile if the engine compiles; with a drafter, measure the costs of steps over `filled` positions."""
    if engine.compile:
        for kind in kinds or [sampling.kind]:
            seconds, rows = engine.warm_up(kind), engine.state.pos.size(0)
            print(f"compiled the {kind} step for batch {rows} in {seconds:.1f} s", file=sys.stderr)
    if engine.drafter is not None:
        with defer_interrupts() if engine.compile else contextlib.nullcontext():
            engine.calibrate(sampling, filled)
