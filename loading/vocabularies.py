"""Tokenizer files of three libraries -> functions between text, ids and bytes.

    token_fields    the fields of tokenizer.Tokenizer, without its template
    added_tokens    the tokens that the settings add, and which of them are special

Hostile files end in a ValueError, not in a library's panic or a full memory.
"""

import base64
import contextlib
import functools
import json
import math
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from loading.chat_templates import one_line
from loading.plain_files import file_exists, plain_file, read_json

# Tokens that end a turn or a text. A chat model stops at each, although its config often lists only one.
END_NAMES = (
    "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|endoftext|>", "<|end|>", "<|end_of_turn|>",
    "<end_of_turn>", "<｜end▁of▁sentence｜>",
)  # fmt: skip
# In gpt-oss's vocabulary <|end|> ends a message, such as the analysis, and the answer follows.
HARMONY_NAMES, HARMONY_END_NAMES = {"<|call|>", "<|return|>"}, ("<|return|>", "<|call|>", "<|endoftext|>")

# Two noncharacters, put inside a name, keep it from becoming a token.
APART = "\ufdd1\ufdd0"

# Llama 3's split pattern and special tokens, as published with its reference code. The ids follow the ranks.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA30_NAMES = {0: "begin_of_text", 1: "end_of_text", 6: "start_header_id", 7: "end_header_id", 9: "eot_id"}
LLAMA31_NAMES = {**LLAMA30_NAMES, 4: "finetune_right_pad_id", 5: "step_id", 8: "eom_id", 10: "python_tag"}

# Mistral's split pattern, the same in every tekken.json, and the special tokens of files before version 11, which have
# no names for them.
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

# GPT-2's printable characters for bytes: printable Latin-1 for itself, characters from 256 on for the other 68.
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTE_OF_CHAR = {chr(byte): byte for byte in PRINTABLE}
BYTE_OF_CHAR |= {chr(256 + i): byte for i, byte in enumerate(sorted({*range(256)} - {*PRINTABLE}))}
PRINTED = {byte: char for char, byte in BYTE_OF_CHAR.items()}

# Real folders stay far below these.
MAX_VOCAB_BYTES = 2**26
MAX_ID = 2**24
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")  # keys of the settings
SPECIAL_KEYS = (*NAMED_TOKENS, "sep_token", "cls_token", "mask_token")  # whose tokens transformers makes special
FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")  # of an added token
LLAMA_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer", "CodeLlamaTokenizerFast")
MAX_GROWTH = 64  # factor by which a normalizer may lengthen a text


def token_fields(folder: Path, settings: dict) -> dict:
    """Tokenizer's fields from tokenizer.model (sentencepiece or tiktoken, by content), tokenizer.json or tekken.json.

    With both of the first two, tokenizer.json wins over sentencepiece unless transformers would build a Llama tokenizer
    anew from its vocabulary; and if it has tokens that the other lacks, as transformers adds new tokens to it alone.
    """
    model, fast, tekken = (folder / name for name in ("tokenizer.model", "tokenizer.json", "tekken.json"))
    if not file_exists(model) and not file_exists(fast):
        if file_exists(tekken):
            return read_tekken(tekken, settings)
        raise ValueError(f"{folder}: neither tokenizer.model nor tokenizer.json, nor tekken.json")
    if not model.exists():
        return read_tokenizers(plain_file(fast, MAX_VOCAB_BYTES), settings)
    is_tiktoken = has_tiktoken_ranks(plain_file(model, MAX_VOCAB_BYTES))
    if file_exists(fast) and not is_tiktoken and not is_rebuilt(folder, settings):
        return read_tokenizers(plain_file(fast, MAX_VOCAB_BYTES), settings)
    fields = (read_tiktoken if is_tiktoken else read_sentencepiece)(model, settings)
    get_ids, stored_tokens = fields.pop("get_ids"), []
    if file_exists(fast):
        fast_json = read_json(fast, MAX_VOCAB_BYTES)
        if not ids_by_name(fast_json).items() <= get_ids().items():
            return read_tokenizers(fast, settings)
        if settings.get("add_bos_token") is None:  # transformers writes its policy to tokenizer.json alone
            fields["add_bos"] = leads_with_special(fast_json.get("post_processor"))
        if is_tiktoken or settings.get("added_tokens_decoder") is None:  # one built anew has those of the settings
            stored_tokens = fast_json["added_tokens"]
    return fields | {"spacing": token_spacing(settings, stored_tokens)}


def has_tiktoken_ranks(file: Path) -> bool:
    """Is a line of this file a token in base64 and its rank? A sentencepiece protobuf never starts like that."""
    with file.open("rb") as stream:
        return re.fullmatch(rb"[A-Za-z0-9+/]+={0,2} \d+\s*", stream.readline(4096)) is not None


def is_rebuilt(folder: Path, settings: dict) -> bool:
    """Would transformers build a Llama tokenizer anew from the vocabulary of a tokenizer.json?"""
    model_type = read_json(folder / "config.json").get("model_type")
    class_name = settings.get("tokenizer_class") or model_type or "LlamaTokenizer"
    return model_type in (None, "llama") and class_name in LLAMA_CLASSES


def token_spacing(settings: dict, stored_tokens: list[dict]) -> dict[str, tuple[bool, bool, bool]]:
    """Tokenizer.spacing: the added tokens of the settings, which override those stored in a tokenizer.json."""
    flags = dict(settings.get("named_flags", {}))
    flags |= {token["content"]: token for token in stored_tokens}
    flags |= {token["content"]: token for token in (settings.get("added_tokens_decoder") or {}).values()}
    keys = ("lstrip", "rstrip", "single_word")
    return {name: tuple(bool(token.get(key)) for key in keys) for name, token in flags.items()}


def leads_with_special(post_processor: dict | None) -> bool:
    """Does a tokenizer.json's post-processor put a special token in front of a text?"""
    processors = (post_processor or {}).get("processors") or [post_processor or {}]
    return any("SpecialToken" in (processor.get("single") or [{}])[0] for processor in processors)


def ids_by_name(fast_json: dict) -> dict[str, int]:
    """The ids of all tokens in a tokenizer.json, by name."""
    vocab = fast_json["model"]["vocab"]  # a Unigram model has a list of pairs
    ids = vocab if isinstance(vocab, dict) else {name: id for id, (name, _) in enumerate(vocab)}
    return ids | {token["content"]: token["id"] for token in fast_json["added_tokens"]}


@contextlib.contextmanager
def library_errors(file: Path, message: str):
    """Turn every exception of a library into a ValueError. Rust's panics are BaseExceptions."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise ValueError(f"{file}: {message}: {one_line(error)}") from None


def added_tokens(folder: Path, settings: dict) -> dict[int, tuple[str, bool]]:
    """Tokens that the settings or added_tokens.json add to the model's: id -> (name, is_special).

    Of those in added_tokens.json, the ones that the settings name are special, as in transformers. So are those named
    <|…|>, which divide a conversation, and those that the model lacks: a prompt that spells them is text.
    """
    decoder, special_names = settings.get("added_tokens_decoder") or {}, named_specials(settings)
    size = vocab_size(folder)

    def is_special(name: str, id: int) -> bool:
        return name in special_names or id >= size or (name.startswith("<|") and name.endswith("|>"))

    try:
        ids = {name: int(id) for name, id in read_json(folder / "added_tokens.json").items()}
        added = {id: (name, is_special(name, id)) for name, id in ids.items()}
        added |= {int(id): (token["content"], bool(token.get("special"))) for id, token in decoder.items()}
    except ValueError as error:
        raise ValueError(f"{folder}: added tokens need whole numbers as ids: {one_line(error)}") from None
    for id, (name, _) in added.items():
        if not 0 <= id < MAX_ID or not isinstance(name, str) or not name:
            raise ValueError(f"{folder}: added token {id} = {name!r:.99} needs a name and an id below {MAX_ID:,}")
    return added


def vocab_size(folder: Path) -> int:
    """The vocab_size of config.json; MAX_ID without a valid one, which config.py refuses."""
    size = read_json(folder / "config.json").get("vocab_size")
    return size if type(size) is int and size > 0 else MAX_ID


def named_specials(settings: dict) -> set[str]:
    """The names of special tokens in the settings: of keys such as eos_token, and in the lists of others."""
    values = [value for key, value in settings.items() if key.endswith("_token")]
    return {*flags_by_name(values), *flags_by_name(listed_specials(settings))}


def listed_specials(settings: dict) -> list:
    """The values of the settings' lists of special tokens."""
    lists = (settings.get(key) for key in ("additional_special_tokens", "extra_special_tokens"))
    return [value for values in lists if isinstance(values, list) for value in values]


def keyed_specials(settings: dict) -> list:
    """The values of the keys whose tokens are special, a model's own among them."""
    extra = settings.get("extra_special_tokens")
    return [settings.get(key) for key in SPECIAL_KEYS] + [*(extra.values() if isinstance(extra, dict) else ())]


def flags_by_name(values: list) -> dict[str, dict[str, bool]]:
    """Name -> flags of tokens that are names, or objects such as {"content": name, "lstrip": true}."""
    objects = [value if isinstance(value, dict) else {"content": value} for value in values]
    return {
        token["content"]: {flag: bool(token[flag]) for flag in FLAGS if flag in token}
        for token in objects
        if isinstance(token.get("content"), str)
    }


def stop_ids(ids: dict[str, int], eos_id: int | None) -> set[int]:
    names = HARMONY_END_NAMES if ids.keys() >= HARMONY_NAMES else END_NAMES
    return {ids[name] for name in names if name in ids} | ({eos_id} - {None})


def byte_of(piece: str) -> bytes | None:
    """The byte of a piece such as <0x0A>; None for other pieces."""
    match = re.fullmatch("<0x([0-9A-Fa-f]{2})>", piece)
    return bytes.fromhex(match[1]) if match else None


def read_sentencepiece(file: Path, settings: dict) -> dict:
    import sentencepiece

    with library_errors(file, "not a sentencepiece model"):
        model = sentencepiece.SentencePieceProcessor(model_file=str(file))
    texts, ids, specials, literals = {}, {}, {}, {}
    for id in range(model.get_piece_size()):
        with library_errors(file, f"piece {id} is no text"):
            piece = model.id_to_piece(id)
        texts[id] = (byte_of(piece) if model.is_byte(id) else None) or piece.replace("▁", " ").encode()
        ids[piece] = id
        if model.is_control(id) or model.is_unknown(id):
            specials[piece] = id
    for id, (name, special) in added_tokens(file.parent, settings).items():
        is_text = settings.get("added_tokens_are_text")
        texts[id] = name.encode() if is_text else byte_of(name) or name.replace("▁", " ").encode()
        ids[name] = id
        (specials if special else literals)[name] = id
    defaults = {"bos_token": model.bos_id(), "eos_token": model.eos_id()}  # -1 without one
    id_by_key = {key: id for key in defaults if (id := ids.get(settings.get(key), defaults[key])) >= 0}
    names = {key: texts[id].decode() for key, id in id_by_key.items()}
    specials |= {name: id_by_key[key] for key, name in names.items()}
    texts |= dict.fromkeys(specials.values(), b"")

    return {
        "get_ids": lambda: ids,
        **piece_encoders(model, settings)._asdict(),
        "to_bytes": lambda id: texts.get(id, b""),
        "vocab_size": max(texts) + 1,
        "bos_id": id_by_key.get("bos_token"),
        "add_bos": bool(settings.get("add_bos_token", True)),
        "stop_ids": stop_ids(ids, id_by_key.get("eos_token")),
        "specials": specials,
        "literals": literals,
        "names": names,
    }


class PieceEncoders(NamedTuple):
    """Functions from a text to ids, by what stands before it, and whether the first space belongs to the format."""

    to_ids: Callable[[str], list[int]]
    to_ids_after_special: Callable[[str], list[int]]
    to_ids_after_text: Callable[[str], list[int]]
    strip_first_space: bool


def piece_encoders(model, settings: dict) -> PieceEncoders:
    """The encoders of a SentencePieceProcessor, which differ in where they put a space.

    sentencepiece puts one before every text, if the file's add_dummy_prefix says so. llama.cpp does too, also after a
    special token. A Llama tokenizer of transformers does not look at the file: by add_prefix_space (true by default) it
    puts a space before a text that begins with none, and with `legacy` after a special token too
    (models/llama/tokenization_llama.py; Metaspace in the tokenizers library).
    """
    # The ids of a noncharacter in front, which are dropped, keep sentencepiece from putting a space there.
    mark = "\ufffe"
    mark_length = len(model.encode(mark))

    def without_space(text: str) -> list[int]:
        is_fused = model.unk_id() in model.encode(text[:1])  # without byte fallback, unknown neighbours are one token
        return model.encode(mark + text)[mark_length - is_fused :]

    has_dummy_prefix = "".join(model.encode("a", out_type=str)).startswith("▁")  # Yi has none

    def with_one_space(text: str) -> list[int]:
        if text.startswith((" ", "▁")):
            return without_space(text)
        return model.encode(text) if has_dummy_prefix else without_space(" " + text)

    class_name = settings.get("tokenizer_class")
    if "space_after_special" in settings:  # a GGUF file
        return PieceEncoders(model.encode, model.encode, without_space, has_dummy_prefix)
    if settings.get("add_prefix_space") is False:
        return PieceEncoders(without_space, without_space, without_space, False)
    if class_name in LLAMA_CLASSES or "legacy" in settings:
        is_legacy = settings.get("legacy") and "CodeLlama" not in str(class_name)
        return PieceEncoders(with_one_space, with_one_space if is_legacy else without_space, without_space, True)
    return PieceEncoders(model.encode, without_space, without_space, has_dummy_prefix)


def tiktoken_encoder(file: Path, pairs: list[tuple[bytes, int]], pattern: str) -> Callable[[str], list[int]]:
    """A function from a text to tiktoken's ranks. ValueError for ranks that would make tiktoken panic."""
    import tiktoken

    ranks = dict(pairs)
    if sorted(ranks.values()) != list(range(len(pairs))):
        raise ValueError(f"{file}: its ranks are not the numbers from 0 to {len(pairs) - 1}, each once")
    missing_bytes = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing_bytes:
        raise ValueError(f"{file}: no rank for the byte {missing_bytes[0]}; every byte needs one")
    encoding = tiktoken.Encoding(file.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})

    def to_ranks(text: str) -> list[int]:
        parts = re.split(r"(\s{50000})", text)  # tiktoken's regular expression overflows on a million spaces
        return [id for part in parts for id in encoding.encode_ordinary(part)]

    return to_ranks


def read_tekken(file: Path, settings: dict) -> dict:
    """Mistral's tekken.json: base64 tokens with ranks, and a pattern for tiktoken; special tokens have the first ids.
    Source: mistral-common, tokens/tokenizers/tekken.py (Tekkenizer)."""
    with library_errors(file, "not a tekken vocabulary"):
        tekken = read_json(file, MAX_VOCAB_BYTES)
        config, special_tokens = tekken["config"], tekken.get("special_tokens")
        size, n = config["default_vocab_size"], config["default_num_special_tokens"]
        if config["pattern"] != TEKKEN_PATTERN:  # another one could take for ever
            raise ValueError("its pattern is not the one that Mistral publishes")
        if not (type(size) is type(n) is int and 3 <= n < size < MAX_ID):
            raise ValueError(f"default_num_special_tokens = {n} does not fit default_vocab_size = {size}")
        pairs = [(base64.b64decode(e["token_bytes"], validate=True), e["rank"]) for e in tekken["vocab"][: size - n]]
        specials = {f"<SPECIAL_{id}>": id for id in range(n)}
        if special_tokens is None:
            special_tokens = [{"rank": id, "token_str": name} for id, name in enumerate(TEKKEN_NAMES)]
        ids = {token["token_str"]: token["rank"] for token in special_tokens}
        if not all(isinstance(name, str) and type(id) is int and name and 0 <= id < n for name, id in ids.items()):
            raise ValueError(f"a special token has no name, or a rank outside 0 to {n - 1}")
        specials = {name: id for name, id in specials.items() if id not in ids.values()} | ids
    to_ranks, texts = tiktoken_encoder(file, pairs, TEKKEN_PATTERN), {rank + n: token for token, rank in pairs}
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
    with library_errors(file, "not a list of tiktoken ranks"):
        lines = [line.split() for line in file.read_bytes().splitlines() if line]
        pairs = [(base64.b64decode(token, validate=True), int(rank)) for token, rank in lines]
    to_ids, ranks = tiktoken_encoder(file, pairs, LLAMA3_PATTERN), dict(pairs)
    specials = {name: len(ranks) + i for i, name in enumerate(llama3_specials(file.parent))}
    literals = {}
    for id, (name, special) in added_tokens(file.parent, settings).items():
        (specials if special else literals)[name] = id
    names = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    bos, eos = (specials.get(settings.get(key) or name) for key, name in names.items())
    texts = {rank: token for token, rank in ranks.items()} | {id: name.encode() for name, id in literals.items()}
    return {
        "get_ids": lambda: (
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
    """The special tokens, whose ids follow the ranks. Llama 3.1 names more of them than 3.0, which has a config.json
    without scaled RoPE."""
    config = read_json(folder / "config.json")
    has_scaled_rope = config.get("rope_scaling") or (config.get("rope_parameters") or {}).get("factor")
    names = LLAMA30_NAMES if config and not has_scaled_rope else LLAMA31_NAMES
    reserved = iter(range(256))
    return [f"<|{names.get(index) or f'reserved_special_token_{next(reserved)}'}|>" for index in range(256)]


def read_tokenizers(file: Path, settings: dict) -> dict:
    tokenizer_json, model = open_tokenizers(file)
    stored_specials = {token.content: id for id, token in model.get_added_tokens_decoder().items() if token.special}
    add_configured_tokens(model, file, settings)
    tokens = {id: token for token, id in model.get_vocab().items()}
    vocab_size = max(tokens, default=-1) + 1
    if vocab_size > MAX_ID:
        raise ValueError(f"{file}: a token has the id {vocab_size - 1}; ids below {MAX_ID:,} are read")
    added = model.get_added_tokens_decoder()
    # The library skips a token that either file calls special.
    specials = stored_specials | {token.content: id for id, token in added.items() if token.special}
    literals = {token.content: id for id, token in added.items() if token.content not in specials}
    encoder = TokenizersEncoder(model, file)
    bos_id, leading_ids = leading_tokens(model, file, settings)
    eos_id = model.token_to_id(settings.get("eos_token") or "")
    decoder = tokenizer_json.get("decoder")
    mark = "Ġa" if "ByteLevel" in str(decoder) else "▁a"
    with library_errors(file, "its decoder cannot decode a token"):
        to_bytes = piece_decoder(decoder)
        first_text = model.decoder.decode([mark]) if model.decoder else ""
    tokens |= {id: model.id_to_token(id) for id in added}  # a normalized one has the text that it matches
    special_ids = {*specials.values()}
    raw_ids = {*literals.values()} if settings.get("added_tokens_are_text") else set()

    @functools.cache
    def bytes_of(id: int) -> bytes:
        token = tokens.get(id)
        if token is None or id in special_ids:
            return b""
        return token.encode() if id in raw_ids else to_bytes(token)

    return {
        "to_ids": encoder.encode,
        "to_ids_with_specials": encoder.encode_with_specials,
        "to_bytes": bytes_of,
        "vocab_size": vocab_size,
        "bos_id": bos_id,
        "add_bos": bool(leading_ids),
        "leading_ids": tuple(leading_ids),
        "stop_ids": stop_ids({token.content: id for id, token in added.items()}, eos_id),
        "strip_first_space": first_text == "a",
        "specials": specials,
        "literals": literals,
        "apart": encoder.apart,
    }


def open_tokenizers(file: Path) -> tuple[dict, object]:
    """A tokenizer.json's object, and the tokenizers.Tokenizer that the library makes of it."""
    import tokenizers

    with library_errors(file, "not a tokenizer of the tokenizers library"):
        text = file.read_text(encoding="utf-8-sig")
        tokenizer_json = json.loads(text)
        if max_growth(tokenizer_json.get("normalizer")) > MAX_GROWTH:
            raise ValueError(f"its normalizer can make a text more than {MAX_GROWTH} times longer")
        model = tokenizers.Tokenizer.from_str(text)
    model.no_padding()
    model.no_truncation()
    return tokenizer_json, model


class TokenizersEncoder:
    """A tokenizers.Tokenizer as functions from a text to ids."""

    def __init__(self, model, file: Path):
        from tokenizers import AddedToken

        self.model, self.file = model, file
        # A special token of our own, matched after the normalizer, which therefore puts no space after it.
        model.add_special_tokens([AddedToken(APART, normalized=True)])
        self.apart = model.normalizer.normalize_str(APART) if model.normalizer else APART

    def encode(self, text: str) -> list[int]:
        """Ids of text, in which the names of special tokens are text."""
        return self._encoding(text, special_names_are_text=True).ids

    def encode_with_specials(self, text: str) -> list[int]:
        encoding = self._encoding(text, special_names_are_text=False)
        return [id for id, token in zip(encoding.ids, encoding.tokens) if token != self.apart]

    def _encoding(self, text: str, special_names_are_text: bool):
        self.model.encode_special_tokens = special_names_are_text
        with library_errors(self.file, "this tokenizer cannot encode the text"):
            return self.model.encode(text, add_special_tokens=False)


def leading_tokens(model, file: Path, settings: dict) -> tuple[int | None, list[int]]:
    """(the id of BOS, the ids in front of every text) of a tokenizers.Tokenizer.

    Its post-processor has the BOS policy, which the settings' add_bos_token overrides. The post-processor's tokens
    belong to no sequence; those before the text lead every text.
    """
    with library_errors(file, "this tokenizer cannot encode a text"):
        probe = model.encode("a")
    leading_ids = probe.ids[: probe.sequence_ids.index(0)] if 0 in probe.sequence_ids else []
    bos_id = model.token_to_id(settings.get("bos_token") or "")
    if bos_id is None and leading_ids:
        bos_id = leading_ids[0]
    if settings.get("add_bos_token") is None:
        return bos_id, leading_ids
    has_bos = settings["add_bos_token"] and bos_id is not None
    return bos_id, [bos_id] if has_bos else []


def piece_decoder(decoder: dict | None) -> Callable[[str], bytes]:
    """A function from a token to its bytes amid others, by the decoder of a tokenizer.json. As in the library, added
    tokens go through it like all others. Without a decoder, U+2581 is a space and <0x0A> a byte."""
    steps = decoder_steps(decoder) if decoder else [{"type": "Metaspace"}, {"type": "ByteFallback"}]
    types = {step.get("type") for step in steps}
    has_byte_level, has_byte_fallback = "ByteLevel" in types, "ByteFallback" in types
    replacements = [replacement(step) for step in steps if step.get("type") in ("Replace", "Metaspace")]

    def to_bytes(token: str) -> bytes:
        for replace in replacements:
            token = replace(token)
        if has_byte_level and all(char in BYTE_OF_CHAR for char in token):
            return bytes(BYTE_OF_CHAR[char] for char in token)
        byte = byte_of(token) if has_byte_fallback else None
        return byte or token.encode()

    return to_bytes


def replacement(step: dict) -> Callable[[str], str]:
    """The function from a token to a token of a decoder's Replace or Metaspace."""
    if step["type"] == "Metaspace":
        step = {"pattern": {"String": step.get("replacement", "▁")}, "content": " "}
    pattern, content = step["pattern"], step["content"]
    if "Regex" in pattern:
        from tokenizers import Regex, decoders

        decoder = decoders.Replace(Regex(pattern["Regex"]), content)
        return lambda token: decoder.decode([token])
    return lambda token: token.replace(pattern["String"], content)


def decoder_steps(decoder: dict) -> list[dict]:
    """The parts of a tokenizer.json's decoder, in order."""
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in decoder_steps(part)]


def add_configured_tokens(model, file: Path, settings: dict) -> None:
    """Add the tokens of the settings to a tokenizers.Tokenizer. ValueError for an id that the library does not give.

    As in transformers (TokenizersBackend), a token that the file has too gets its flags from the settings, and those of
    keys such as eos_token are special. Those that neither file adds have the flags of their own objects.
    """
    from tokenizers import AddedToken

    keyed, listed = flags_by_name(keyed_specials(settings)), flags_by_name(listed_specials(settings))
    keyed |= {name: flags for name, flags in settings.get("named_flags", {}).items() if name in keyed}
    stored = {token.content: flags_of(token) for token in model.get_added_tokens_decoder().values()}
    configured = sorted(configured_tokens(file, settings, stored).items())
    new_ids = {token["content"]: id for id, token in configured if model.token_to_id(token["content"]) is None}
    tokens = []
    for _, token in configured:
        flags = {key: bool(token[key]) for key in FLAGS if key in token}
        flags["special"] = bool(token.get("special")) or token["content"] in keyed
        tokens.append(AddedToken(token["content"], **flags))
    model.add_tokens(tokens)
    for name, id in new_ids.items():
        if model.token_to_id(name) != id:
            message = f"gets the id {model.token_to_id(name)}; correct added_tokens_decoder, or {file.name}"
            raise ValueError(f"{file}: token {id} = {name!r:.99} of tokenizer_config.json {message}")
    stored = {token.content: flags_of(token) for token in model.get_added_tokens_decoder().values()}
    missing = {name: flags for name, flags in listed.items() if name not in stored}
    special = missing | {name: stored.get(name, flags) for name, flags in keyed.items()}
    model.add_tokens(
        [
            AddedToken(name, **flags | {"special": True})
            for name, flags in special.items()
            if model.token_to_id(name) is not None
        ]
    )


def flags_of(token) -> dict[str, bool]:
    """The flags of a tokenizers.AddedToken."""
    return {key: getattr(token, key) for key in FLAGS}


def configured_tokens(file: Path, settings: dict, stored: Collection[str]) -> dict[int, dict]:
    """Id -> token of the settings' added_tokens_decoder. Without it, added_tokens.json has those that are not stored in
    the tokenizer.json."""
    decoder = settings.get("added_tokens_decoder")
    if decoder is not None:
        return {int(id): token for id, token in decoder.items()}
    return {
        id: {"content": name, "special": special, "normalized": not special}
        for id, (name, special) in added_tokens(file.parent, settings).items()
        if name not in stored
    }


def max_growth(normalizer: object) -> int:
    """The largest factor by which a tokenizer.json's normalizer lengthens a text. The library has no limit."""
    if not isinstance(normalizer, dict):
        return 1
    if normalizer.get("type") == "Precompiled":
        table = base64.b64decode(normalizer["precompiled_charsmap"])
        if int.from_bytes(table[:4], "little") > len(table):  # the library would allocate it and die
            raise ValueError("precompiled_charsmap is cut off")
    inserted = normalizer.get("content") or normalizer.get("prepend") or ""  # by Replace, by Prepend
    return max(1, len(inserted)) * math.prod(max_growth(part) for part in normalizer.get("normalizers") or [])
