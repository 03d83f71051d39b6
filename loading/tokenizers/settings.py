"""What the files beside a tokenizer's own say of it.

TokenizerSettings   tokenizer_config.json with special_tokens_map.json, added_tokens.json,
                    config.json and generation_config.json of a folder
added_token         a token's object in these files, for the tokenizers library
"""

from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken

from decoding.errors import UserError
from loading.plain_files import error_prefix, read_json, refused, short_repr
from loading.tokenizers.base import replace_surrogates

MAX_ID = 2**24  # real vocabularies stay far below
FLAGS = ("lstrip", "rstrip", "single_word", "normalized")  # of an added token
LLAMA_CLASSES = (
    "LlamaTokenizer",
    "LlamaTokenizerFast",
    "CodeLlamaTokenizer",
    "CodeLlamaTokenizerFast",
)


def added_token(value: str | dict, special: bool = True) -> AddedToken:
    """A token that is a name, or an object such as {"content": name, "lstrip": true}. UserError
    without a name."""
    token = value if isinstance(value, dict) else {"content": value}
    name = token.get("content")
    if not isinstance(name, str) or replace_surrogates(name) != name:
        raise UserError(
            f"{short_repr(value)} is no token: give its name, or an object with its content"
        )
    flags = {flag: bool(token[flag]) for flag in FLAGS if flag in token}
    return AddedToken(name, special=special, **flags)


class TokenizerSettings:
    """`token_by_key` has the special tokens with a key, such as eos_token, and `listed` those
    without; `added` has the tokens beside the vocabulary, special or not, by id."""

    def __init__(self, folder: Path, known: Mapping[str, dict]):
        """`known`: files of the folder that have been read already, by their names."""
        self.folder = folder
        settings = read_json(folder / "tokenizer_config.json")
        names = read_json(folder / "special_tokens_map.json")
        # As in transformers: beside settings of before 4.34, which have no added_tokens_decoder,
        # the map is the newer.
        self.values = names | settings if "added_tokens_decoder" in settings else settings | names
        self.config, self.generation_config = (
            known[name] if name in known else read_json(folder / name)
            for name in ("config.json", "generation_config.json")
        )
        text_config = self.config.get("text_config")  # of a config.json that wraps a text model
        self.text_config = text_config if isinstance(text_config, dict) else {}
        # An invalid size is refused where the model is read.
        size = (self.config | self.text_config).get("vocab_size")
        self.model_vocab_size = size if type(size) is int and size > 0 else MAX_ID
        extra_tokens = self.get("extra_special_tokens")  # of a model: by key, or a list
        own_tokens = extra_tokens if isinstance(extra_tokens, dict) else {}
        with error_prefix(f"{folder}/tokenizer_config.json or special_tokens_map.json"):
            self.token_by_key = {
                key: added_token(value)
                for key, value in {**self.values, **own_tokens}.items()
                if key.endswith("_token") and value not in (None, True, False)
            }
            self.listed = [
                added_token(value)
                for key in ("additional_special_tokens", "extra_special_tokens")
                if isinstance(self.get(key), list)
                for value in self.get(key)
            ]
        # The names, which are variables of a chat template too.
        self.name_by_key = {key: token.content for key, token in self.token_by_key.items()}
        self.added = self._added_tokens()

    def get(self, key: str) -> object:
        return self.values.get(key)

    def adds_bos(self, default: bool = True) -> bool:
        """Is BOS put in front of a text, where no other file decides it?"""
        return bool(self.values.get("add_bos_token", default))

    def added_ids(self, special: bool) -> dict[str, int]:
        """Name -> id of the added tokens that are special, or of the others."""
        return {token.content: id for id, token in self.added.items() if token.special == special}

    def _added_tokens(self) -> dict[int, AddedToken]:
        """The tokens of added_tokens_decoder, or else of the older added_tokens.json."""
        tokens_by_id = self.get("added_tokens_decoder")
        if tokens_by_id is None:
            tokens_by_id = self._older_tokens()
        special_names = self.name_by_key.values()
        added = {}
        with error_prefix(self.folder / "tokenizer_config.json"):
            is_valid = isinstance(tokens_by_id, dict) and all(
                str(id).isdecimal() and isinstance(token, dict)
                for id, token in tokens_by_id.items()
            )
            if not is_valid:
                raise UserError(
                    "added_tokens_decoder must have an object with a content for each id"
                )
            for id, token in tokens_by_id.items():
                is_special = bool(token.get("special")) or token.get("content") in special_names
                added[int(id)] = added_token(token, is_special)
        return added

    def _older_tokens(self) -> dict[int, dict]:
        """The tokens of added_tokens.json. Those that the settings name are special, as in
        transformers. So are those named <|…|>, which divide a conversation, and those that the
        model lacks: a prompt that spells them is text."""
        listed_names = {token.content for token in self.listed}
        tokens = {}
        file = self.folder / "added_tokens.json"
        for name, id in read_json(file).items():
            if type(id) is not int or id < 0:
                raise refused(f"{file}: {short_repr(name)}", id, "is no token's id")
            is_marker = name.startswith("<|") and name.endswith("|>")
            is_special = name in listed_names or is_marker or id >= self.model_vocab_size
            tokens[id] = {"content": name, "special": is_special}
        return tokens

    def rebuilds_llama(self) -> bool:
        """Would transformers build a Llama tokenizer anew from the vocabulary of a
        tokenizer.json?"""
        is_llama = self.config.get("model_type") in (None, "llama")
        return is_llama and self.get("tokenizer_class") in LLAMA_CLASSES

    def prepend_scheme(self) -> str:
        """Where a Llama tokenizer of transformers puts a space: "never", before the "first" part of
        a text alone, or "always", before every part between special tokens."""
        if self.get("add_prefix_space") is False:
            return "never"
        is_code_llama = "CodeLlama" in str(self.get("tokenizer_class"))
        return "always" if self.get("legacy") and not is_code_llama else "first"

    def eos_ids(self) -> set[int]:
        """The ids in eos_token_id of config.json and generation_config.json, a number or a list in
        each. A config.json that wraps a text model may hold them in its text_config."""
        not_null = {key: value for key, value in self.config.items() if value is not None}
        fields_by_file = {
            "config.json": self.text_config | not_null,
            "generation_config.json": self.generation_config,
        }
        eos_ids = set()
        for file, fields in fields_by_file.items():
            value = fields.get("eos_token_id")
            ids = value if isinstance(value, list) else [value] * (value is not None)
            if not all(type(id) is int and 0 <= id < MAX_ID for id in ids):
                key = f"{self.folder / file}: eos_token_id"
                raise refused(key, value, "must be a token's id or a list of them")
            eos_ids.update(ids)
        return eos_ids
