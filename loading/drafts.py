"""A draft folder or a spec of --draft -> Drafter, for a given target.

    load_drafter      the public door;  check_draft  everything that can be refused before weights are read
    FOLDERS, SPECS    kind -> the function that checks it and returns its loader, imported on use: another kind is one
                      file and one row
    load_translated   a draft model, which reads and answers in the target's ids where its tokenizer differs
    kind_of           the kind of a draft folder, by the keys of its config.json

This file does not know how a drafter drafts.
"""

import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from loading.checkpoint import fingerprints, load_config, load_model
from loading.config import Section
from loading.files import open_shards, read_json, shards
from loading.plain_files import error_prefix
from loading.tokenizer import Tokenizer, load_tokenizer
from model import Config, Transformer
from tp import ranks_of
from weights.rooms import resolve
from weights.walker import pack_model

# The kind of a folder -> check(folder, its config.json, the target's Config), which raises ValueError or returns
# load(target, tokenizer, **options of load_drafter) -> Drafter.
FOLDERS = {"model": "loading.drafts:check_model", "pard": "drafts.pard:check", "eagle3": "drafts.eagle:check",
           "dflash": "drafts.dflash:check"}  # fmt: skip
# The name of a spec -> parse(its value, the target's Config), which returns make(target) -> Drafter.
SPECS = {"suffix": "drafts.suffix:from_spec", "ngram": "drafts.ngram:from_spec",
         "layers": "speculative:layers_from_spec", "quantized": "speculative:quantized_from_spec"}  # fmt: skip
# A key of config.json -> the kind of its folder. The first key that is there decides; a kind not in FOLDERS is refused.
KIND_BY_KEY = {
    "medusa_num_heads": "Medusa", "markov_rank": "DSpark", "dflash_config": "dflash", "ptd_token_id": "P-EAGLE",
    "draft_vocab_size": "eagle3", "pard_token": "pard",
}  # fmt: skip
MIN_SHARED = 0.5  # share of the target's probability that the tokens of a draft with another tokenizer must have
SAMPLE_TEXT = "On Monday the shop opened at 9, and Anna bought three books.\n\ndef area(r):\n    return 3.14 * r * r\n"


def load_drafter(
    folder_or_spec: str | Path, model: Transformer, tokenizer: Tokenizer, *, dtype: str | None = None,
    quantize: str | None = None, sharded: bool = False, pack: bool = True, progress: bool = False,
):  # fmt: skip
    """The Drafter for this target. A Path is a folder of any kind in FOLDERS. Text is a spec,
    suffix[:N], ngram[:N], layers:0-7,24-31 or quantized:SCHEME, or else the name of a folder.

    `dtype` and `quantize` are those of a draft model; `sharded` divides it over the ranks. With `pack` the target and
    the draft are packed for their kernels; a target that is packed already has no quantized draft. ValueError names
    file, key and number of a draft that does not fit the target.
    """
    if is_folder(folder_or_spec):
        folder, ranks = Path(folder_or_spec), ranks_of(model)
        load = parse_folder(folder, model.config)
        ranks.check_same(lambda: fingerprints(folder, open_shards(shards(folder))))
        drafter = load(model, tokenizer, dtype=dtype, quantize=quantize, sharded=sharded, progress=progress)
    else:
        with error_prefix(f"--draft {folder_or_spec}"):
            drafter = parse_spec(folder_or_spec, model.config)(model)
    if pack:
        pack_model(model, *([drafter.model] if drafter.model is not None else []))
    return drafter


def check_draft(folder_or_spec: str | Path, config: Config) -> None:
    """ValueError for a draft that cannot fit a target of this config. Reads no weights."""
    if is_folder(folder_or_spec):
        parse_folder(Path(folder_or_spec), config)
    else:
        with error_prefix(f"--draft {folder_or_spec}"):
            parse_spec(folder_or_spec, config)


def is_folder(folder_or_spec: str | Path) -> bool:
    """Is this a folder? The name of a spec is none, even beside a folder of that name."""
    if isinstance(folder_or_spec, Path):
        return True
    return folder_or_spec.partition(":")[0] not in SPECS and Path(folder_or_spec).exists()


def parse_spec(spec: str, config: Config) -> Callable:
    """make(target) -> Drafter of a spec. ValueError for anything else."""
    kind, _, value = spec.partition(":")
    if kind not in SPECS:
        raise ValueError("expected suffix, suffix:N, ngram, ngram:N, layers:0-7,24-31 or quantized:SCHEME")
    return resolve(SPECS[kind])(value, config)


def parse_folder(folder: Path, config: Config) -> Callable:
    """load(target, tokenizer, **options) -> Drafter of a folder. ValueError names the file and the key of a draft that
    does not fit a target of this config."""
    hf = read_json(folder / "config.json") if folder.exists() else {}  # load_config names a missing folder
    with error_prefix(folder / "config.json"):
        check = resolve(FOLDERS[kind_of(hf)])
    return check(folder, hf, config)


def kind_of(hf: dict) -> str:
    """A kind in FOLDERS. ValueError names the key and value that mark a draft of another kind."""
    hf = Section(hf)
    kind_by_key = {"speculators_model_type": str(hf.get("speculators_model_type")), **KIND_BY_KEY}
    marks = {key: kind for key, kind in kind_by_key.items() if hf.get(key) is not None}
    for key, kind in marks.items():
        if kind not in FOLDERS:
            raise hf.refused(key, f"makes it a {kind} draft; supported: {', '.join(FOLDERS)}")
    is_eagle = any("eagle3" in str(name).lower() for name in hf.get("architectures") or [])
    return "eagle3" if is_eagle else next(iter(marks.values()), "model")


def check_model(folder: Path, hf: dict, config: Config) -> Callable:
    """A smaller model as a draft."""
    load_config(folder)
    make = resolve("speculative:ModelDraft")
    return lambda *target, **options: make(load_translated(folder, *target, **options))


def load_translated(
    folder: Path, target: Transformer, tokenizer: Tokenizer, mask: int | None = None, *, dtype: str | None,
    quantize: str | None, sharded: bool, progress: bool,
) -> Transformer:  # fmt: skip
    """A draft folder's model on the target's device, not packed. Where its tokenizer differs, it reads and answers in
    the target's ids, and reads its own id `mask` as the id V."""
    device = target.norm.weight.device
    dtype = pick_dtype(dtype, load_config(folder).dtype, device)
    draft_tokenizer = load_tokenizer(folder)
    ids = shared_tokens(tokenizer, draft_tokenizer, target, folder)
    ranks = ranks_of(target) if sharded else None
    draft = load_model(folder, device=device, dtype=dtype, progress=progress, pack=False, quantize=quantize, tp=ranks)
    if ids is not None:
        resolve("drafts.vocabulary:translate")(draft, ids, draft_tokenizer.bos_id or 0, mask)
    return draft


def pick_dtype(requested: str | None, stored: str | None, device: torch.device) -> torch.dtype:
    """--dtype, or the checkpoint's own where it is one that we compute in, else bfloat16. ValueError where the device
    cannot multiply in it."""
    name = requested or (stored if stored in ("bfloat16", "float16", "float32") else "bfloat16")
    dtype = getattr(torch, name)
    try:
        torch.mm(*torch.ones(2, 1, 1, dtype=dtype, device=device))
    except (RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--dtype {name}: {device} cannot compute in it ({reason}); try --dtype float32") from None
    return dtype


def check_same_tokens(tokenizer: Tokenizer, other: Tokenizer, folder: str) -> None:
    """ValueError unless both read every id as the same string. Models may still have padded vocabularies."""
    for id, pieces in enumerate(itertools.zip_longest(tokenizer.pieces(), other.pieces())):
        if pieces[0] != pieces[1]:
            first, second = ("no token" if p is None else repr(p.decode(errors="replace")) for p in pieces)
            raise ValueError(f"{folder}: its tokenizer differs from the first's: token {id} is {second}, there {first}")


@torch.no_grad()
def shared_tokens(tokenizer: Tokenizer, other: Tokenizer, model: Transformer, folder: Path) -> Tensor | None:
    """The draft's id of each of the target's V ids (V,), -1 for none; None where both read every id as the same string.
    ValueError where the shared tokens have too small a share of the target's probability, the mean over a short text.
    Equal tokenizers may still have vocabularies of unequal padding."""
    pieces, draft_pieces = tokenizer.pieces(), other.pieces()
    if pieces == draft_pieces:
        return None
    ids = resolve("drafts.vocabulary:ids_by_string")(pieces, draft_pieces, model.config.vocab_size)
    text = torch.tensor([tokenizer.encode(SAMPLE_TEXT)], device=model.norm.weight.device)  # (1, T)
    p = model(text, torch.arange(text.size(1), device=text.device)).softmax(-1)  # (1, T, V)
    share = p[..., ids.to(p.device) >= 0].sum(-1).mean().item()
    message = f"its tokenizer has {int((ids >= 0).sum())} of the target's {len(pieces)} tokens"
    message += f", {share:.1%} of the target's probability"
    if share < MIN_SHARED:
        raise ValueError(f"{folder}: {message}; a draft needs at least {MIN_SHARED:.0%}")
    print(f"{folder}: {message}, and drafts over these alone", file=sys.stderr)
    return ids
