"""Flags -> device, dtype, target, tokenizer, drafter, all packed for their kernels.

Other programs hand in their own flags under the same names. This file decodes and prints no text.
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from checkpoint import config_of, fingerprints, load_config, load_model, random_model
from drafts.eagle import EagleDraft, load_eagle
from drafts.pard import PardDraft
from drafts.vocabulary import ids_by_string, translate
from generate import Engine
from model import Config, Transformer
from program.edge import interrupts_held
from quantize import quantized_copy
from reading import files
from reading.drafts import kind_of, pard_token
from reading.vocabularies import led_by, read_json
from sampling import Sampling
from speculative import Costs, Drafter, ModelDraft, NgramDraft, layer_subset, parse_layers
from tokenizer import Tokenizer, load_tokenizer
from tp import Ranks, ranks_of
from weights.formats import format_of
from weights.linears import pack_model

LEAST_SHARED = 0.5  # of the target's probability, that a draft with other tokens must have tokens for
SAMPLE_TEXT = "On Monday the shop opened at 9, and Anna bought three books.\n\ndef area(r):\n    return 3.14 * r * r\n"

# Keys of generation_config.json that change no text, or that the tokenizer reads.
NO_SETTINGS = {
    "eos_token_id", "bos_token_id", "pad_token_id", "use_cache", "transformers_version", "_from_model_config",
}  # fmt: skip


def number_tokenizer(vocab_size: int) -> Tokenizer:
    """For --random_weights, where no folder brings a tokenizer: a prompt is its bytes, text is the ids as numbers."""
    return Tokenizer(
        lambda text: [byte % vocab_size for byte in text.encode()], lambda id: f" {id}".encode(),
        vocab_size=vocab_size, bos_id=None, add_bos=False, stop_ids=(), strip_first_space=True,
    )  # fmt: skip


def pick_device(name: str | None) -> torch.device:
    """--device, or a GPU when there is one. ValueError when it cannot be used here."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"--device {name}: not available here: {str(error).splitlines()[0]}") from None
    if device.type not in ("cpu", "cuda", "mps"):
        raise ValueError(f"--device {name}: only cpu, cuda and mps compute")
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
        # cuDNN's attention plans anew for every length, some 42 ms on the host (measured in pytorch/pytorch#191576).
        torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def pick_dtype(asked: str | None, stored: str | None, device: torch.device) -> torch.dtype:
    """--dtype, or the checkpoint's own where it is one that we compute in, else bfloat16. ValueError where the device
    cannot multiply in it."""
    name = asked or (stored if stored in ("bfloat16", "float16", "float32") else "bfloat16")
    dtype = getattr(torch, name)
    try:
        torch.mm(*torch.ones(2, 1, 1, dtype=dtype, device=device))
    except (RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--dtype {name}: {device} cannot compute in it ({reason}); try --dtype float32") from None
    return dtype


def compiles(asked: bool | None, device: torch.device) -> bool:
    """--compile or --no-compile, or by device: on a GPU launching kernels one by one costs more than they do."""
    return device.type == "cuda" if asked is None else asked


def load(args: argparse.Namespace, device: torch.device, ranks: Ranks) -> tuple[Transformer, Tokenizer, Drafter | None]:
    """Models are packed last: a draft that is made of its target cannot be made of packed weights."""
    model, tokenizer = load_target(args, device, ranks)
    drafter = load_drafter(args, model, tokenizer)
    pack_model(model, *([drafter.model] if drafter and drafter.model else []))
    return model, tokenizer, drafter


def unused_settings(args: argparse.Namespace) -> None:
    """Say what generation_config.json asks for that these flags do not do. What is false or 0 asks for nothing."""
    asked = {} if args.random_weights else read_json(Path(args.checkpoint) / "generation_config.json")
    given = {**vars(args), "do_sample": args.temperature > 0}
    other = {key: x for key, x in asked.items() if x and x != given.get(key) and key not in NO_SETTINGS}
    if other:
        print(f"not used of generation_config.json: {json.dumps(other):.400}", file=sys.stderr)


def target_config(args: argparse.Namespace) -> Config:
    return config_of(Path(args.random_weights)) if args.random_weights else load_config(args.checkpoint)


def check_draft(args: argparse.Namespace, config: Config) -> None:
    """ValueError for a draft that cannot fit a target with this config, before any weights are read."""
    if args.draft_checkpoint:
        draft_kind(Path(args.draft_checkpoint))
    elif args.draft is not None:
        kind, value = draft_spec(args.draft)
        if kind == "layers" and max(value) >= config.n_layers:
            raise ValueError(f"--draft {args.draft}: layers {value} must be some of 0 to {config.n_layers - 1}")


def draft_spec(text: str) -> tuple[str, int | list[int] | str]:
    """--draft as (ngram, tokens to match), (layers, their numbers) or (quantized, scheme). ValueError for anything
    else."""
    kind, _, rest = text.partition(":")
    with led_by(f"--draft {text}"):
        if kind == "ngram":
            if rest and not rest.isdigit():
                raise ValueError(f"{rest!r} is no number of tokens to match")
            return kind, (NgramDraft(int(rest)) if rest else NgramDraft()).n
        if kind == "layers":
            return kind, parse_layers(rest)
        if kind == "quantized":
            format_of(rest)
            return kind, rest
        raise ValueError("expected ngram, ngram:N, layers:0-7,24-31 or quantized:SCHEME")


def draft_kind(folder: Path) -> tuple[str, int | None]:
    """(kind, PARD's mask token) of --draft_checkpoint's config.json."""
    hf = files.read_json(folder / "config.json") if folder.exists() else {}  # which load_config will name
    with led_by(folder / "config.json"):
        kind = kind_of(hf)
        mask = pard_token(hf) if kind == "pard" else None
    if kind != "eagle3":
        load_config(folder)
    return kind, mask


def load_target(args: argparse.Namespace, device: torch.device, ranks: Ranks) -> tuple[Transformer, Tokenizer]:
    """This rank's part of --checkpoint, or of random weights of a shape, not packed; and the tokenizer."""
    options = {"device": device, "quantize": args.quantize, "head": args.quantize_head, "tp": ranks, "pack": False}
    config = target_config(args)
    check_draft(args, config)
    if args.random_weights:
        model = random_model(config, dtype=pick_dtype(args.dtype, config.dtype, device), **options)
        return model, number_tokenizer(config.vocab_size)
    dtype = pick_dtype(args.dtype, config.dtype, device)
    tokenizer = load_tokenizer(args.checkpoint)
    ranks.check_same(lambda: {"its tokenizer": hashlib.sha256(b"\0".join(tokenizer.pieces())).hexdigest()})
    model = load_model(args.checkpoint, dtype=dtype, progress=True, **options)
    return model, tokenizer


def load_drafter(args: argparse.Namespace, model: Transformer, tokenizer: Tokenizer) -> Drafter | None:
    """What --draft_checkpoint or --draft asks for, its model not packed. ValueError where it does not fit the target,
    which is not packed either."""
    if args.draft_checkpoint:
        return folder_drafter(args, Path(args.draft_checkpoint), model, tokenizer)
    if args.draft is None:
        return None
    kind, value = draft_spec(args.draft)
    with led_by(f"--draft {args.draft}"):
        if kind == "ngram":
            return NgramDraft(value)
        if kind == "layers":
            return ModelDraft(layer_subset(model, value), on_layers=value)
        return ModelDraft(quantized_copy(model, value), on_layers=range(model.config.n_layers))


def folder_drafter(args: argparse.Namespace, folder: Path, model: Transformer, tokenizer: Tokenizer) -> Drafter:
    """The drafter of --draft_checkpoint: its config.json says whether it is a model, a PARD or an EAGLE-3 draft."""
    device, ranks = model.norm.weight.device, ranks_of(model)
    kind, mask = draft_kind(folder)
    ranks.check_same(lambda: fingerprints(folder, files.open_shards(files.shards(folder))))
    if kind == "eagle3":
        if args.draft_tp == "sharded":
            raise ValueError(f"--draft_tp sharded: {folder} is an EAGLE-3 draft, which every rank holds whole")
        draft = load_eagle(folder, model)
        return EagleDraft(quantized_copy(draft, args.draft_quantize) if args.draft_quantize else draft)
    dtype = pick_dtype(args.dtype, load_config(folder).dtype, device)
    own = load_tokenizer(folder)
    ids = shared_tokens(tokenizer, own, model, folder)
    options = {"quantize": args.draft_quantize, "tp": ranks if args.draft_tp == "sharded" else None}
    draft = load_model(folder, device=device, dtype=dtype, progress=True, pack=False, **options)
    if ids is not None:
        translate(draft, ids, own.bos_id or 0, mask)
        mask = None if mask is None else model.config.vocab_size
    return ModelDraft(draft) if mask is None else PardDraft(draft, mask)


def check_same_tokens(tokenizer: Tokenizer, other: Tokenizer, folder: str) -> None:
    """ValueError unless both read every id as the same string. Models may still have padded vocabularies."""
    for id, pieces in enumerate(itertools.zip_longest(tokenizer.pieces(), other.pieces())):
        if pieces[0] != pieces[1]:
            first, second = ("no token" if p is None else repr(p.decode(errors="replace")) for p in pieces)
            raise ValueError(f"{folder}: its tokenizer differs from the first's: token {id} is {second}, there {first}")


@torch.no_grad()
def shared_tokens(tokenizer: Tokenizer, other: Tokenizer, model: Transformer, folder: Path) -> Tensor | None:
    """None where both read every id as the same string; models may still have padded vocabularies. Otherwise the
    draft's id for each of the target's V (V,), -1 where it has none. ValueError where the tokens that both have are too
    small a share of the target's probability, the mean over the positions of a short text."""
    pieces, own = tokenizer.pieces(), other.pieces()
    if pieces == own:
        return None
    ids = ids_by_string(pieces, own, model.config.vocab_size)
    text = torch.tensor([tokenizer.encode(SAMPLE_TEXT)], device=model.norm.weight.device)  # (1, T)
    p = model(text, torch.arange(text.size(1), device=text.device)).softmax(-1)  # (1, T, V)
    share = p[..., ids.to(p.device) >= 0].sum(-1).mean().item()
    said = f"its tokenizer has {int((ids >= 0).sum())} of the target's {len(pieces)} tokens"
    said += f", {share:.1%} of the target's probability"
    if share < LEAST_SHARED:
        raise ValueError(f"{folder}: {said}; a draft needs at least {LEAST_SHARED:.0%}")
    print(f"{folder}: {said}, and drafts over these alone", file=sys.stderr)
    return ids


def warm_up(engine: Engine, sampling: Sampling, filled: int, kinds: Iterable[str] = ()) -> None:
    """Compile, where asked for; with a drafter, measure what steps cost when so many positions are filled."""
    if engine.compile:
        for kind in kinds or [sampling.kind]:
            seconds, rows = engine.warm_up(kind), engine.state.pos.size(0)
            print(f"compiled the {kind} step for batch {rows} in {seconds:.1f} s", file=sys.stderr)
    if engine.drafter is not None:
        with interrupts_held() if engine.compile else contextlib.nullcontext():
            engine.calibrate(sampling, filled)


def costs_by_threads(engine: Engine, sampling: Sampling, filled: int) -> dict[int, dict[int, Costs]]:
    """Costs by the number of threads that decoding may choose, one or all, then by rows; {} without a drafter."""
    num_threads = torch.get_num_threads()
    if engine.drafter is None or num_threads == 1:
        return {}
    costs = {num_threads: engine.costs_by_rows}
    try:
        torch.set_num_threads(1)
        engine.calibrate(sampling, filled, rounds=3)
        costs[1] = engine.costs_by_rows
    finally:
        torch.set_num_threads(num_threads)
    engine.use_costs(costs[num_threads])
    return costs
