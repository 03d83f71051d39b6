"""Tokenizer files of three libraries -> how text becomes ids there, and ids text.

    token_fields   the fields of tokenizer.Tokenizer, but for its template
    read_json      a JSON object from a file, empty where there is none
    file_exists       does a file exist? A link that leads nowhere is an error
    plain_file     a file that is safe to read whole

Hostile files end in a ValueError, not in a library's panic or a full memory. This file knows no prompts or templates.
"""

import base64
import contextlib
import functools
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from loading.chat_templates import one_line

# Names that end a turn or a text. A chat model stops there although its config often lists only one of them.
END_NAMES = (
    "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|endoftext|>", "<|end|>", "<|end_of_turn|>",
    "<end_of_turn>", "<｜end▁of▁sentence｜>",
)  # fmt: skip
# gpt-oss's vocabulary, in which <|end|> ends a message, such as that of the analysis, and the answer follows.
HARMONY_NAMES, HARMONY_END_NAMES = {"<|channel|>", "<|return|>"}, ("<|return|>", "<|call|>", "<|endoftext|>")

# Two noncharacters that stand inside a name keep it from being read as a token.
APART = "\ufdd1\ufdd0"

# Llama 3's split pattern and special tokens, as published with its reference code. The ids follow the ranks.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA30_NAMES = {0: "begin_of_text", 1: "end_of_text", 6: "start_header_id", 7: "end_header_id", 9: "eot_id"}
LLAMA31_NAMES = {**LLAMA30_NAMES, 4: "finetune_right_pad_id", 5: "step_id", 8: "eom_id", 10: "python_tag"}

# Mistral's split pattern, as all its tekken.json have it, and its special tokens where a file of before version 11 does
# not name them.
TEKKEN_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN_NAMES = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip

# GPT-2's printable stand-ins for bytes. Printable Latin-1 stands for itself, the other 68 follow from 256 on.
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTE_OF_CHAR = {chr(byte): byte for byte in PRINTABLE}
BYTE_OF_CHAR |= {chr(256 + i): byte for i, byte in enumerate(sorted({*range(256)} - {*PRINTABLE}))}
PRINTED = {byte: char for char, byte in BYTE_OF_CHAR.items()}

# Real folders stay far below these.
LARGEST_FILE, LARGEST_SETTINGS = 2**26, 2**24  # bytes of a vocabulary, of other JSON
LARGEST_ID = 2**24
LFS_POINTER = b"version https://git-lfs."  # how a file begins that git cloned without Git LFS
MOST_GROWTH = 64  # times a normalizer may lengthen a text


def token_fields(folder: Path, settings: dict) -> dict:
    """Tokenizer's fields from tokenizer.model (sentencepiece or tiktoken, told apart by content) or tokenizer.json.
    Where both are there, tokenizer.json is taken if it has tokens that the other has not: transformers adds tokens to
    it and leaves tokenizer.model as it was."""
    model, fast, tekken = (folder / name for name in ("tokenizer.model", "tokenizer.json", "tekken.json"))
    if not file_exists(model) and not file_exists(fast):
        if file_exists(tekken):
            return read_tekken(tekken, settings)
        raise ValueError(f"{folder}: neither tokenizer.model nor tokenizer.json, nor tekken.json")
    if not model.exists():
        return read_tokenizers(plain_file(fast, LARGEST_FILE), settings)
    with plain_file(model, LARGEST_FILE).open("rb") as stream:
        # tiktoken's lines are a token in base64 and its rank. A sentencepiece protobuf never starts like that.
        ranks = re.fullmatch(rb"[A-Za-z0-9+/]+={0,2} \d+\s*", stream.readline(4096))
    fields = (read_tiktoken if ranks else read_sentencepiece)(model, settings)
    known, added = fields.pop("ids"), [*(settings.get("added_tokens_decoder") or {}).values()]
    if file_exists(fast):
        stored = read_json(fast, LARGEST_FILE)
        if not ids_in(stored).items() <= known().items():
            return read_tokenizers(fast, settings)
        added += stored["added_tokens"]
    keys = ("lstrip", "rstrip", "single_word")
    return fields | {"spacing": {token["content"]: tuple(bool(token.get(key)) for key in keys) for token in added}}


def ids_in(stored: dict) -> dict[str, int]:
    """The ids of all tokens in a tokenizer.json, by name."""
    vocab = stored["model"]["vocab"]  # of a Unigram model a list of pairs
    ids = vocab if isinstance(vocab, dict) else {name: id for id, (name, _) in enumerate(vocab)}
    return ids | {token["content"]: token["id"] for token in stored["added_tokens"]}


def file_exists(file: Path) -> bool:
    """ValueError for a link to a file that is not there, such as a cache that was cleaned leaves."""
    if file.is_symlink() and not file.exists():
        raise ValueError(f"{file}: a link to {os.readlink(file)}, which is not there; fetch the file again")
    return file.exists()


def plain_file(file: Path, largest: int) -> Path:
    """The same file. ValueError for a pipe, which would be waited for, a device, what is larger than real files, and
    what only points to the file."""
    if not file.is_file():
        raise ValueError(f"{file}: not a plain file")
    if file.stat().st_size > largest:
        raise ValueError(f"{file}: {file.stat().st_size:,} bytes are more than the {largest:,} that are read of it")
    with file.open("rb") as stream:
        if stream.read(len(LFS_POINTER)) == LFS_POINTER:
            raise ValueError(f"{file}: a Git LFS pointer stands in the file's place; `git lfs pull` there fetches it")
    return file


def read_json(file: Path, largest: int = LARGEST_SETTINGS) -> dict:
    if not file_exists(file):
        return {}
    try:
        value = json.loads(plain_file(file, largest).read_text(encoding="utf-8-sig"))  # Windows' editors write a mark
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not readable as JSON: {one_line(error)}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file}: expected a JSON object, found {type(value).__name__}")
    return value


@contextlib.contextmanager
def error_prefix(what: object) -> Iterator[None]:
    """Let a ValueError begin with what it is about, such as the file's name."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{what}: {str(error).removeprefix(f'{what}: ')}") from None


@contextlib.contextmanager
def library(file: Path, what: str):
    """Whatever a library raises becomes a ValueError. Panics of Rust are BaseExceptions."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise ValueError(f"{file}: {what}: {one_line(error)}") from None


def added_tokens(folder: Path, settings: dict) -> dict[int, tuple[str, bool]]:
    """Tokens that the settings or added_tokens.json put beside the model's own: id -> (name, special)."""
    decoder = settings.get("added_tokens_decoder") or {}
    try:
        added = {int(id): (name, True) for name, id in read_json(folder / "added_tokens.json").items()}
        added |= {int(id): (token["content"], bool(token.get("special"))) for id, token in decoder.items()}
    except ValueError as error:
        raise ValueError(f"{folder}: added tokens need whole numbers as ids: {one_line(error)}") from None
    for id, (name, _) in added.items():
        if not 0 <= id < LARGEST_ID or not isinstance(name, str) or not name:
            raise ValueError(f"{folder}: added token {id} = {name!r:.99} needs a name and an id below {LARGEST_ID:,}")
    return added


def stop_ids(ids: dict[str, int], eos_id: int | None) -> set[int]:
    names = HARMONY_END_NAMES if ids.keys() >= HARMONY_NAMES else END_NAMES
    return {ids[name] for name in names if name in ids} | ({eos_id} - {None})


def byte_of(piece: str) -> bytes | None:
    """The byte that a piece such as <0x0A> stands for."""
    found = re.fullmatch("<0x([0-9A-Fa-f]{2})>", piece)
    return bytes.fromhex(found[1]) if found else None


def read_sentencepiece(file: Path, settings: dict) -> dict:
    import sentencepiece

    with library(file, "not a sentencepiece model"):
        model = sentencepiece.SentencePieceProcessor(model_file=str(file))
    texts, ids, specials, literals = {}, {}, {}, {}
    for id in range(model.get_piece_size()):
        with library(file, f"piece {id} is no text"):
            piece = model.id_to_piece(id)
        texts[id] = (byte_of(piece) if model.is_byte(id) else None) or piece.replace("▁", " ").encode()
        ids[piece] = id
        if model.is_control(id) or model.is_unknown(id):
            specials[piece] = id
    for id, (name, special) in added_tokens(file.parent, settings).items():
        texts[id], ids[name] = name.encode(), id
        (specials if special else literals)[name] = id
    found = {"bos_token": model.bos_id(), "eos_token": model.eos_id()}  # -1: the model has none
    found = {key: id for key in found if (id := ids.get(settings.get(key), found[key])) >= 0}
    names = {key: texts[id].decode() for key, id in found.items()}
    specials |= {name: found[key] for key, name in names.items()}
    texts |= dict.fromkeys(specials.values(), b"")

    # sentencepiece puts a space before every text. transformers does not do so after a special token (unless `legacy`),
    # nor before a space. A noncharacter in front, cut off again, keeps the space away.
    mark, prefix = "\ufffe", len(model.encode("\ufffe"))

    def after_special(text: str) -> list[int]:
        if settings.get("legacy") and not text.startswith(" "):
            return model.encode(text)
        fused = model.unk_id() in model.encode(text[:1])  # without byte fallback, unknown neighbours are one token
        return model.encode(mark + text)[prefix - fused :]

    return {
        "ids": lambda: ids,
        "to_ids": model.encode,
        "to_ids_after_special": after_special,
        "to_bytes": lambda id: texts.get(id, b""),
        "vocab_size": max(texts) + 1,
        "bos_id": found.get("bos_token"),
        "add_bos": bool(settings.get("add_bos_token", True)),
        "stop_ids": stop_ids(ids, found.get("eos_token")),
        "strip_first_space": "".join(model.encode("a", out_type=str)).startswith("▁"),  # not Yi
        "specials": specials,
        "literals": literals,
        "names": names,
    }


def splitter(file: Path, pairs: list[tuple[bytes, int]], pattern: str) -> Callable[[str], list[int]]:
    """What gives tiktoken's ranks of a text. ValueError for ranks that it would panic over."""
    import tiktoken

    ranks = dict(pairs)
    if sorted(ranks.values()) != list(range(len(pairs))):
        raise ValueError(f"{file}: its ranks are not the numbers from 0 to {len(pairs) - 1}, each once")
    lacking = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if lacking:
        raise ValueError(f"{file}: no rank for the byte {lacking[0]}; every byte needs one for all text to have ids")
    encoding = tiktoken.Encoding(file.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})

    def to_ranks(text: str) -> list[int]:
        parts = re.split(r"(\s{50000})", text)  # tiktoken's regular expression overflows on a million spaces
        return [id for part in parts for id in encoding.encode_ordinary(part)]

    return to_ranks


def read_tekken(file: Path, settings: dict) -> dict:
    """Mistral's tekken.json: ranks in base64 and a pattern for tiktoken; special tokens take the first ids. Source:
    mistral-common, tokens/tokenizers/tekken.py (Tekkenizer)."""
    with library(file, "not a tekken vocabulary"):
        stored = read_json(file, LARGEST_FILE)
        config, named = stored["config"], stored.get("special_tokens")
        size, n = config["default_vocab_size"], config["default_num_special_tokens"]
        if config["pattern"] != TEKKEN_PATTERN:  # a stranger's could take for ever
            raise ValueError("its pattern is not the one that Mistral publishes")
        if not (type(size) is type(n) is int and 3 <= n < size < LARGEST_ID):
            raise ValueError(f"{n} special tokens of {size}")
        pairs = [(base64.b64decode(e["token_bytes"], validate=True), e["rank"]) for e in stored["vocab"][: size - n]]
        specials = {f"<SPECIAL_{id}>": id for id in range(n)}
        if named is None:
            named = [{"rank": id, "token_str": name} for id, name in enumerate(TEKKEN_NAMES)]
        ids = {token["token_str"]: token["rank"] for token in named}
        if not all(isinstance(name, str) and type(id) is int and name and 0 <= id < n for name, id in ids.items()):
            raise ValueError("a special token without a name, or beyond their number")
        specials = {name: id for name, id in specials.items() if id not in ids.values()} | ids
    to_ranks, texts = splitter(file, pairs, TEKKEN_PATTERN), {rank + n: token for token, rank in pairs}
    names = {key: name for key, name in (("bos_token", "<s>"), ("eos_token", "</s>")) if name in specials}
    return {
        "to_ids": lambda text: [rank + n for rank in to_ranks(text)],
        "to_bytes": lambda id: texts.get(id, b""),
        "vocab_size": n + len(pairs),
        "bos_id": specials.get("<s>"),
        "add_bos": bool(settings.get("add_bos_token", True)),
        "stop_ids": stop_ids(specials, specials.get("</s>")),
        "specials": specials,
        "names": names,
    }


def read_tiktoken(file: Path, settings: dict) -> dict:
    with library(file, "not a list of tiktoken ranks"):
        stored = [line.split() for line in file.read_bytes().splitlines() if line]
        pairs = [(base64.b64decode(token, validate=True), int(rank)) for token, rank in stored]
    to_ids, ranks = splitter(file, pairs, LLAMA3_PATTERN), dict(pairs)
    specials = {name: len(ranks) + i for i, name in enumerate(llama3_specials(file.parent))}
    literals = {}
    for id, (name, special) in added_tokens(file.parent, settings).items():
        (specials if special else literals)[name] = id
    names = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    bos, eos = (specials.get(settings.get(key) or name) for key, name in names.items())
    texts = {rank: token for token, rank in ranks.items()} | {id: name.encode() for name, id in literals.items()}
    return {
        "ids": lambda: (
            {token.decode("latin-1").translate(PRINTED): id for token, id in ranks.items()} | specials | literals
        ),
        "to_ids": to_ids,
        "to_bytes": lambda id: texts.get(id, b""),
        "vocab_size": max({**specials, **literals}.values()) + 1,
        "bos_id": bos,
        "add_bos": bool(settings.get("add_bos_token", True)),
        "stop_ids": stop_ids({**specials, **literals}, eos),
        "specials": specials,
        "literals": literals,
        "names": names,
    }


def llama3_specials(folder: Path) -> list[str]:
    """The names behind the ranks. Llama 3.1 gave more places a name. 3.0 has a config.json without scaled RoPE."""
    config = read_json(folder / "config.json")
    scaled = config.get("rope_scaling") or (config.get("rope_parameters") or {}).get("factor")
    known = LLAMA30_NAMES if config and not scaled else LLAMA31_NAMES
    reserved = iter(range(256))
    return [f"<|{known.get(place) or f'reserved_special_token_{next(reserved)}'}|>" for place in range(256)]


def read_tokenizers(file: Path, settings: dict) -> dict:
    import tokenizers

    with library(file, "not a tokenizer of the tokenizers library"):
        text = file.read_text(encoding="utf-8-sig")
        stored = json.loads(text)
        if growth(stored.get("normalizer")) > MOST_GROWTH:
            raise ValueError(f"its normalizer can make a text more than {MOST_GROWTH} times longer")
        model = tokenizers.Tokenizer.from_str(text)
    tokens = {id: token for token, id in model.get_vocab().items()}
    vocab_size = max(tokens, default=-1) + 1
    if vocab_size > LARGEST_ID:
        raise ValueError(f"{file}: a token has the id {vocab_size - 1}; ids below {LARGEST_ID:,} are read")
    model.no_padding()
    model.no_truncation()
    added = model.get_added_tokens_decoder()
    specials = {token.content: id for id, token in added.items() if token.special}
    # A special token of our own. It is found behind the normalizer, which puts no space after it.
    model.add_special_tokens([tokenizers.AddedToken(APART, normalized=True)])
    apart = model.normalizer.normalize_str(APART) if model.normalizer else APART

    def to_ids(text: str, with_specials: bool = False) -> list[int]:
        model.encode_special_tokens = not with_specials  # the library's word for: as text
        with library(file, "this tokenizer cannot encode the text"):
            found = model.encode(text, add_special_tokens=False)
        return [id for id, token in zip(found.ids, found.tokens) if token != apart] if with_specials else found.ids

    # The library keeps the BOS policy in its post-processor, whose tokens are of no sequence. Some stand behind a text.
    with library(file, "this tokenizer cannot encode a text"):
        probe = model.encode("a")
    before = probe.ids[: probe.sequence_ids.index(0)] if 0 in probe.sequence_ids else []
    bos, eos = (model.token_to_id(settings.get(key) or "") for key in ("bos_token", "eos_token"))
    bos = before[0] if bos is None and before else bos
    if settings.get("add_bos_token") is not None:  # which takes the post-processor's place
        before = [bos] if settings["add_bos_token"] and bos is not None else []
    byte_level = BYTE_OF_CHAR if "ByteLevel" in str(stored.get("decoder")) else {}
    with library(file, "its decoder cannot decode a token"):
        spaced = model.decoder.decode(["Ġa" if byte_level else "▁a"]) if model.decoder else ""

    @functools.cache
    def to_bytes(id: int) -> bytes:
        token = tokens.get(id)
        if token is None or token in specials:
            return b""
        if id in added or (byte_level and not all(char in byte_level for char in token)):
            return token.encode()
        if byte_level:
            return bytes(byte_level[char] for char in token)
        return byte_of(token) or token.replace("▁", " ").encode()

    return {
        "to_ids": to_ids,
        "to_ids_with_specials": functools.partial(to_ids, with_specials=True),
        "to_bytes": to_bytes,
        "vocab_size": vocab_size,
        "bos_id": bos,
        "add_bos": bool(before),
        "leading_ids": tuple(before),
        "stop_ids": stop_ids({token.content: id for id, token in added.items()}, eos),
        "strip_first_space": spaced == "a",
        "specials": specials,
        "literals": {token.content: id for id, token in added.items() if not token.special},
        "apart": apart,
    }


def growth(normalizer: object) -> int:
    """How many times longer a normalizer of tokenizer.json can make a text. The library has no limit of its own."""
    if not isinstance(normalizer, dict):
        return 1
    if normalizer.get("type") == "Precompiled":
        table = base64.b64decode(normalizer["precompiled_charsmap"])
        if int.from_bytes(table[:4], "little") > len(table):  # the library would make room for it, and die
            raise ValueError("precompiled_charsmap is cut off")
    written = normalizer.get("content") or normalizer.get("prepend") or ""  # by Replace, by Prepend
    return max(1, len(written)) * math.prod(growth(part) for part in normalizer.get("normalizers") or [])
