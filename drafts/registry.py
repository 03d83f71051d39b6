"""A draft folder or a spec of --draft -> Drafter, for a given target.

    load_drafter      the public door;  check_draft  everything that can be refused before weights are read
    FOLDERS, SPECS    kind -> the function that checks it and returns its loader: another kind is one file and one row

This file does not know how a drafter drafts. Each row imports its drafter's file when it is used, so a fork may delete
the files of drafters that it does not need.
"""

from collections.abc import Callable
from pathlib import Path

from loading.checkpoint import fingerprints, load_config
from loading.draft_kinds import kind_of
from loading.files import open_shards, read_json, shards
from loading.plain_files import error_prefix
from loading.tokenizer import Tokenizer
from model import Config, Transformer
from tp import ranks_of
from weights.walker import pack_model


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
    return SPECS[kind](value, config)


def parse_folder(folder: Path, config: Config) -> Callable:
    """load(target, tokenizer, **options) -> Drafter of a folder. ValueError names the file and the key of a draft that
    does not fit a target of this config."""
    hf = read_json(folder / "config.json") if folder.exists() else {}  # load_config names a missing folder
    with error_prefix(folder / "config.json"):
        kind = kind_of(hf)
    return FOLDERS[kind](folder, hf, config)


# --------------------------------------------------------------------------------------------- folders


def check_model(folder: Path, hf: dict, config: Config) -> Callable:
    """A smaller model as a draft."""
    from drafts.translated import load_translated
    from speculative import ModelDraft

    load_config(folder)
    return lambda *target, **options: ModelDraft(load_translated(folder, *target, **options))


def check_pard(folder: Path, hf: dict, config: Config) -> Callable:
    from drafts.pard import check

    return check(folder, hf, config)


def check_eagle3(folder: Path, hf: dict, config: Config) -> Callable:
    from drafts.eagle import check

    return check(folder, hf, config)


def check_dflash(folder: Path, hf: dict, config: Config) -> Callable:
    from drafts.dflash import check

    return check(folder, hf, config)


# The kind of a folder -> check(folder, its config.json, the target's Config), which raises ValueError or returns
# load(target, tokenizer, **options of load_drafter) -> Drafter.
FOLDERS = {"model": check_model, "pard": check_pard, "eagle3": check_eagle3, "dflash": check_dflash}


# ----------------------------------------------------------------------------------------------- specs


def parse_suffix(value: str, config: Config) -> Callable:
    from drafts.suffix import from_spec

    return from_spec(value, config)


def parse_ngram(value: str, config: Config) -> Callable:
    from drafts.ngram import from_spec

    return from_spec(value, config)


def parse_layers(value: str, config: Config) -> Callable:
    from speculative import layers_from_spec

    return layers_from_spec(value, config)


def parse_quantized(value: str, config: Config) -> Callable:
    from speculative import quantized_from_spec

    return quantized_from_spec(value, config)


# The name of a spec -> parse(its value, the target's Config), which returns make(target) -> Drafter.
SPECS = {"suffix": parse_suffix, "ngram": parse_ngram, "layers": parse_layers, "quantized": parse_quantized}
