"""Vocabularies of tiktoken: bytes with ranks, and a pattern that splits a text.

RanksRuntime        the runtime of both formats
read_tiktoken       Llama 3's tokenizer.model or Hunyuan's hy.tiktoken, a token in base64 and its
                    rank a line
read_tekken         Mistral's tekken.json
has_ranks           whether a file is such a tokenizer.model
"""

import base64
import itertools
import re
import unicodedata
from pathlib import Path
from typing import NamedTuple

import tiktoken

from decoding.errors import UserError
from loading.plain_files import read_json, short_repr
from loading.tokenizers.base import APART, Runtime, library_errors
from loading.tokenizers.settings import LLAMA_CLASSES, TokenizerSettings

# Llama 3's split pattern and special tokens, as published with the reference code of 3.1. The ids
# follow the ranks. Llama 3.0 has reserved names for four of them, which it never writes.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_NAMES = {
    0: "begin_of_text",
    1: "end_of_text",
    4: "finetune_right_pad_id",
    5: "step_id",
    6: "start_header_id",
    7: "end_header_id",
    8: "eom_id",
    9: "eot_id",
    10: "python_tag",
}

# Hunyuan's split pattern and special tokens, as in the tokenization_hy.py of its folders: single
# digits, and other names behind the ranks.
HUNYUAN_PATTERN = LLAMA3_PATTERN.replace("{1,3}", "")
HUNYUAN_NAMES = ["endoftext", "startoftext", "bos", "eos", "pad"]
HUNYUAN_NAMES += [f"extra_{number}" for number in range(205)]
HUNYUAN_FILE = "hy.tiktoken"
FAST_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")  # of any model

# Mistral's split pattern, the same in every tekken.json, and the special tokens of files before
# version 11, which have no names for them.
TEKKEN_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN_NAMES = """
<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS]
[TOOL_CALLS] [IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT]
[/SYSTEM_PROMPT] [TOOL_CONTENT]
"""


class Ranks(NamedTuple):
    """A vocabulary as a file has it."""

    pattern: str  # splits a text
    pairs: list[tuple[bytes, int]]  # tokens and their ranks
    first_id: int  # of rank 0
    specials: dict[str, int]
    bos_name: str
    eos_name: str
    adds_bos: bool = True  # where the settings do not say it
    normal_form: str | None = None  # of Unicode, that a text is brought into


class RanksRuntime(Runtime):
    """tiktoken, which finds special and added tokens itself."""

    def __init__(self, file: Path, ranks: Ranks, settings: TokenizerSettings):
        self._file = file
        specials = ranks.specials | settings.added_ids(special=True)
        literals = settings.added_ids(special=False)
        ids = {token: ranks.first_id + rank for token, rank in ranks.pairs}
        vocab_size = 1 + max(*ids.values(), *specials.values(), *literals.values())
        super().__init__(
            vocab_size,
            specials,
            literals,
            specials.get(settings.name_by_key.get("bos_token") or ranks.bos_name),
            specials.get(settings.name_by_key.get("eos_token") or ranks.eos_name),
            literals_are_raw=True,
        )
        self.add_bos = settings.adds_bos(ranks.adds_bos)
        self._normal_form = ranks.normal_form
        self._bytes = {id: token for token, id in ids.items()}
        self._apart_id = vocab_size
        self._encoding = tiktoken.Encoding(
            file.name,
            pat_str=ranks.pattern,
            mergeable_ranks=ids,
            special_tokens={**specials, **literals, APART: self._apart_id},
        )

    def encode(self, text: str, parse_special: bool = False) -> list[int]:
        names = {*self.literals}
        if parse_special:
            names.update(self.specials, [APART])
        if self._normal_form:
            text = unicodedata.normalize(self._normal_form, text)
        # tiktoken's regular expression overflows on a million spaces, so long runs are split first.
        parts = re.split(r"(\s{50000})", text)
        ids = []
        with library_errors(self._file, "tiktoken cannot encode the text"):
            for part in parts:
                ids += self._encoding.encode(part, allowed_special=names, disallowed_special=())
        return [id for id in ids if id != self._apart_id]

    def token_bytes(self, id: int) -> bytes:
        return self._bytes.get(id, b"")


# ------------------------------------------------------------------------------------------ files


def has_ranks(file: Path) -> bool:
    """Is a line of this file a token in base64 and its rank? A sentencepiece protobuf never starts
    like that."""
    with file.open("rb") as stream:
        return re.fullmatch(rb"[A-Za-z0-9+/]+={0,2} \d+\s*", stream.readline(4096)) is not None


def is_hunyuan(file: Path, settings: TokenizerSettings) -> bool:
    """Are these ranks Hunyuan's, and not Llama 3's? UserError for settings of another model: the
    file does not say how its texts are split."""
    tokenizer_class = settings.get("tokenizer_class")
    model_type = settings.config.get("model_type")
    classes = (None, *LLAMA_CLASSES, *FAST_CLASSES)
    is_named = tokenizer_class == "HYTokenizer" or str(model_type).startswith("hunyuan")
    if is_named or file.name == HUNYUAN_FILE:
        return True
    if model_type not in (None, "llama") or tokenizer_class not in classes:
        raise UserError(
            f"{file}: ranks of tiktoken, which do not say how a text is split, for tokenizer_class"
            f" = {short_repr(tokenizer_class)} and model_type = {short_repr(model_type)};"
            " supported: those of Llama 3 and Hunyuan; add the model's tokenizer.json"
        )
    return False


def read_tiktoken(file: Path, settings: TokenizerSettings) -> Ranks:
    has_hunyuan_names = is_hunyuan(file, settings)
    with library_errors(file, "not a list of tiktoken ranks"):
        lines = [line.split() for line in file.read_bytes().splitlines() if line]
        pairs = [(base64.b64decode(token, validate=True), int(rank)) for token, rank in lines]
    if has_hunyuan_names:
        specials = {f"<|{name}|>": id for id, name in enumerate(HUNYUAN_NAMES, len(pairs))}
        return Ranks(HUNYUAN_PATTERN, pairs, 0, specials, "", "<|eos|>", False, "NFC")
    reserved = (f"reserved_special_token_{number}" for number in itertools.count())
    names = [f"<|{LLAMA3_NAMES.get(index) or next(reserved)}|>" for index in range(256)]
    specials = {name: id for id, name in enumerate(names, len(pairs))}
    return Ranks(LLAMA3_PATTERN, pairs, 0, specials, "<|begin_of_text|>", "<|end_of_text|>")


def read_tekken(file: Path) -> Ranks:
    """Special tokens have the first ids; those without a name have one by number. Source:
    mistral-common, tokens/tokenizers/tekken.py (Tekkenizer)."""
    with library_errors(file, "not a tekken vocabulary"):
        tekken = read_json(file)
        config = tekken["config"]
        size = config["default_vocab_size"]
        first_id = config["default_num_special_tokens"]
        names = dict(enumerate(TEKKEN_NAMES.split()))
        if tekken.get("special_tokens") is not None:
            names = {token["rank"]: token["token_str"] for token in tekken["special_tokens"]}
        entries = tekken["vocab"][: size - first_id]
        pairs = [
            (base64.b64decode(entry["token_bytes"], validate=True), entry["rank"])
            for entry in entries
        ]
        specials = {names.get(id, f"<SPECIAL_{id}>"): id for id in range(first_id)}
        return Ranks(config["pattern"], pairs, first_id, specials, "<s>", "</s>")
