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
from collections.abc import Callable
from pathlib import Path

from loading.chat_templates import one_line
from loading.plain_files import file_exists, plain_file, read_json

# Tokens that end a turn or a text. A chat model stops at each, although its config often lists only one.
END_NAMES = (
    "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|endoftext|>", "<|end|>", "<|end_of_turn|>",
    "<end_of_turn>", "<｜end▁of▁sentence｜>",
)  # fmt: skip
# In gpt-oss's vocabulary <|end|> ends a message, such as the analysis, and the answer follows.
HARMONY_NAMES, HARMONY_END_NAMES = {"<|channel|>", "<|return|>"}, ("<|return|>", "<|call|>", "<|endoftext|>")

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
    with plain_file(model, MAX_VOCAB_BYTES).open("rb") as stream:
        # A tiktoken line is a token in base64 and its rank. A sentencepiece protobuf never starts like that.
        is_tiktoken = re.fullmatch(rb"[A-Za-z0-9+/]+={0,2} \d+\s*", stream.readline(4096))
    model_type = read_json(folder / "config.json").get("model_type")
    class_name = settings.get("tokenizer_class") or model_type or "LlamaTokenizer"
    is_rebuilt = model_type in (None, "llama") and class_name in LLAMA_CLASSES
    if file_exists(fast) and not is_tiktoken and not is_rebuilt:
        return read_tokenizers(plain_file(fast, MAX_VOCAB_BYTES), settings)
    fields = (read_tiktoken if is_tiktoken else read_sentencepiece)(model, settings)
    get_ids, added = fields.pop("get_ids"), [*(settings.get("added_tokens_decoder") or {}).values()]
    if file_exists(fast):
        fast_json = read_json(fast, MAX_VOCAB_BYTES)
        if settings.get("add_bos_token") is None:  # transformers writes its policy to tokenizer.json alone
            fields["add_bos"] = leads_with_special(fast_json.get("post_processor"))
        if not ids_by_name(fast_json).items() <= get_ids().items():
            return read_tokenizers(fast, settings)
        added += fast_json["added_tokens"]
    keys = ("lstrip", "rstrip", "single_word")
    return fields | {"spacing": {token["content"]: tuple(bool(token.get(key)) for key in keys) for token in added}}


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
    lists = (settings.get(key) for key in ("additional_special_tokens", "extra_special_tokens"))
    values = [value for key, value in settings.items() if key.endswith("_token")]
    values += [value for names in lists if isinstance(names, list) for value in names]
    names = (value.get("content") if isinstance(value, dict) else value for value in values)
    return {name for name in names if isinstance(name, str)}


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
        texts[id], ids[name] = name.encode(), id
        (specials if special else literals)[name] = id
    defaults = {"bos_token": model.bos_id(), "eos_token": model.eos_id()}  # -1 without one
    id_by_key = {key: id for key in defaults if (id := ids.get(settings.get(key), defaults[key])) >= 0}
    names = {key: texts[id].decode() for key, id in id_by_key.items()}
    specials |= {name: id_by_key[key] for key, name in names.items()}
    texts |= dict.fromkeys(specials.values(), b"")

    # sentencepiece puts a space before every text. transformers does not after a special token (unless `legacy`), nor
    # before a space; llama.cpp does after each. Encoding a noncharacter in front, whose ids are dropped, avoids it.
    mark, mark_length = "\ufffe", len(model.encode("\ufffe"))
    puts_space, doubles_space = settings.get("add_prefix_space") is not False, settings.get("space_after_special")

    def without_space(text: str) -> list[int]:
        is_fused = model.unk_id() in model.encode(text[:1])  # without byte fallback, unknown neighbours are one token
        return model.encode(mark + text)[mark_length - is_fused :]

    def after_special(text: str) -> list[int]:
        has_space = puts_space and (doubles_space or (settings.get("legacy") and not text.startswith(" ")))
        return model.encode(text) if has_space else without_space(text)

    return {
        "get_ids": lambda: ids,
        "to_ids": model.encode if puts_space else without_space,
        "to_ids_after_special": after_special,
        "to_ids_after_text": without_space,
        "to_bytes": lambda id: texts.get(id, b""),
        "vocab_size": max(texts) + 1,
        "bos_id": id_by_key.get("bos_token"),
        "add_bos": bool(settings.get("add_bos_token", True)),
        "stop_ids": stop_ids(ids, id_by_key.get("eos_token")),
        "strip_first_space": puts_space and "".join(model.encode("a", out_type=str)).startswith("▁"),  # not Yi
        "specials": specials,
        "literals": literals,
        "names": names,
    }


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
    import tokenizers

    with library_errors(file, "not a tokenizer of the tokenizers library"):
        text = file.read_text(encoding="utf-8-sig")
        tokenizer_json = json.loads(text)
        if max_growth(tokenizer_json.get("normalizer")) > MAX_GROWTH:
            raise ValueError(f"its normalizer can make a text more than {MAX_GROWTH} times longer")
        model = tokenizers.Tokenizer.from_str(text)
    add_configured_tokens(model, file, settings)
    tokens = {id: token for token, id in model.get_vocab().items()}
    vocab_size = max(tokens, default=-1) + 1
    if vocab_size > MAX_ID:
        raise ValueError(f"{file}: a token has the id {vocab_size - 1}; ids below {MAX_ID:,} are read")
    model.no_padding()
    model.no_truncation()
    added = model.get_added_tokens_decoder()
    specials = {token.content: id for id, token in added.items() if token.special}
    # A special token of our own, matched after the normalizer, which therefore puts no space after it.
    model.add_special_tokens([tokenizers.AddedToken(APART, normalized=True)])
    apart = model.normalizer.normalize_str(APART) if model.normalizer else APART

    def to_ids(text: str, with_specials: bool = False) -> list[int]:
        model.encode_special_tokens = not with_specials  # True encodes their names as text
        with library_errors(file, "this tokenizer cannot encode the text"):
            encoding = model.encode(text, add_special_tokens=False)
        if not with_specials:
            return encoding.ids
        return [id for id, token in zip(encoding.ids, encoding.tokens) if token != apart]

    # The post-processor has the BOS policy. Its tokens belong to no sequence; those before the text lead every text.
    with library_errors(file, "this tokenizer cannot encode a text"):
        probe = model.encode("a")
    leading_ids = probe.ids[: probe.sequence_ids.index(0)] if 0 in probe.sequence_ids else []
    bos, eos = (model.token_to_id(settings.get(key) or "") for key in ("bos_token", "eos_token"))
    bos = leading_ids[0] if bos is None and leading_ids else bos
    if settings.get("add_bos_token") is not None:  # overrides the post-processor
        leading_ids = [bos] if settings["add_bos_token"] and bos is not None else []
    byte_level = BYTE_OF_CHAR if "ByteLevel" in str(tokenizer_json.get("decoder")) else {}
    with library_errors(file, "its decoder cannot decode a token"):
        decoded = model.decoder.decode(["Ġa" if byte_level else "▁a"]) if model.decoder else ""

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
        "add_bos": bool(leading_ids),
        "leading_ids": tuple(leading_ids),
        "stop_ids": stop_ids({token.content: id for id, token in added.items()}, eos),
        "strip_first_space": decoded == "a",
        "specials": specials,
        "literals": {token.content: id for id, token in added.items() if not token.special},
        "apart": apart,
    }


def add_configured_tokens(model, file: Path, settings: dict) -> None:
    """Add to a tokenizers.Tokenizer the tokens that only the settings have, and make those that the settings name
    special, as transformers does. ValueError for an id that the library does not give."""
    from tokenizers import AddedToken

    flags, decoder = ("lstrip", "rstrip", "single_word", "normalized", "special"), settings.get("added_tokens_decoder")
    decoder = decoder or {
        id: {"content": name, "special": special, "normalized": not special}
        for id, (name, special) in added_tokens(file.parent, settings).items()
    }
    for id, token in sorted(decoder.items(), key=lambda item: int(item[0])):
        if model.token_to_id(name := token["content"]) is None:
            model.add_tokens([AddedToken(name, **{key: bool(token[key]) for key in flags if key in token})])
            if model.token_to_id(name) != int(id):
                message = f"gets the id {model.token_to_id(name)}; correct added_tokens_decoder, or {file.name}"
                raise ValueError(f"{file}: token {id} = {name!r:.99} of tokenizer_config.json {message}")
    names = (settings.get(key) for key in NAMED_TOKENS)
    model.add_special_tokens([name for name in names if name and model.token_to_id(name) is not None])


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
