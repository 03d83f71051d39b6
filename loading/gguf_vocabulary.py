"""The vocabulary of a GGUF file -> the tokenizer's files of a Hugging Face folder.

    write_files   these files, into a folder, from which tokenizer.py then reads them
    Vocabulary    the keys below "tokenizer.", and the text of each file

Such a file has the same tokens as the original tokenizer's, but only a name for how texts are
split, tokenizer.ggml.pre, and a number for the type of each token. The tables below say what
llama.cpp makes of both. A "llama" vocabulary becomes a sentencepiece model, "gpt2", byte-level BPE,
a tokenizer.json; names of special tokens, the BOS policy and the chat template go to
tokenizer_config.json, the tokens that end a text to generation_config.json.

Source: llama.cpp, src/llama-vocab.cpp.
"""

import json
import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from decoding.errors import UserError
from loading.gguf import parse
from loading.plain_files import error_prefix, refused, short_repr
from loading.tokenizers.base import MESSAGE_ENDS
from loading.tokenizers.ranks import LLAMA3_PATTERN, TEKKEN_PATTERN

# ------------------------------------------------------------------------------ splits and types

# The patterns that split a text in turn before pieces are merged, and every tokenizer.ggml.pre that
# llama.cpp 0.3.36 has for them. Only splits that files of our families have are listed.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTION}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The letters with two cases, as code points: their characters would not survive a normalization of
# this file.
DEEPSEEK_RANGES = """
41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386
388-38A 38C 38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA
1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57
1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB
1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D
212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3
A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A
FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF
1E900-1E943
"""
DEEPSEEK_LETTERS = "".join(
    re.sub("[0-9A-F]+", lambda code: chr(int(code[0], 16)), DEEPSEEK_RANGES).split()
)
DEEPSEEK_PUNCTUATION = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{DEEPSEEK_LETTERS}]+",
    rf"\s?[{DEEPSEEK_PUNCTUATION}]+",
    r"\s+$",
    HAN,
    r"\p{N}+",
)
SEED = QWEN2.replace(r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+", r" ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+")
HUNYUAN_DENSE = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
NAMES_BY_SPLIT = {
    (LLAMA3_PATTERN,): """
        chatglm-bpe dbrx falcon-h1 falcon3 glm4 glm5 jina-v5-nano lfm2 llama-bpe llama-v3 llama3
        midm-2.0 pixtral smaug-bpe
    """,
    (QWEN2,): """
        deepseek-r1-qwen f2llmv2 grok-2 hunyuan kormo megrez qwen2 solar-open stablelm2
    """,
    (GPT2,): """
        a.x-4.0 exaone4 gigachat gpt-2 granite-docling jais jina-de jina-es jina-v1-en jina-v2-code
        jina-v2-de jina-v2-es mellum modern-bert mpt olmo phi-2 roberta-bpe trillion
    """,
    (r"\p{N}", GPT2): """
        codeshell command-r exaone mellum2 minerva-7b refact smollm starcoder
    """,
    (r"\p{N}{1,3}", LLAMA3_PATTERN): "minicpm5",
    (O200K,): "gpt-4o kanana2 llama4 minimax-m2 talkie",
    (TEKKEN_PATTERN,): "tekken",
    (SEED,): "seed-coder",
    HUNYUAN_DENSE: "deepseek-v3 hunyuan-dense hy_v4 joyai-llm",
    DEEPSEEK_LLM: "deepseek-llm",
    (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN, r"\p{N}"): "deepseek-coder",
}
SPLITS = {name: split for split, names in NAMES_BY_SPLIT.items() for name in names.split()}
# With these llama.cpp puts BOS first unless the file says otherwise.
BOS_NAMES = "falcon-h1 falcon3 jina-v5-nano lfm2 llama-bpe llama-v3 llama3 midm-2.0 pixtral tekken"
ADDS_BOS = BOS_NAMES.split()
# With these it does not merge a word that is a token.
IGNORES_MERGES = (*ADDS_BOS, "glm4", "glm5", "minicpm5")
# Types of tokens, as sentencepiece numbers them.
NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
LARGEST_FLOAT = torch.finfo(torch.float32).max
# Names that llama.cpp makes control tokens, whatever their type in the file: those that end a
# generation, and others of infilling.
END_LINES = """
<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|>
</s> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos>
<｜end▁of▁sentence｜> [e~[ <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|>
<fim-repo> <REPO> <reponame> <|file_sep|>
"""
INFILL_LINES = """
<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|>
<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|>
<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|>
"""
END_NAMES = frozenset(END_LINES.split())
CONTROL_NAMES = END_NAMES.union(INFILL_LINES.split())


# Our role of a special token -> its name in tokenizer_config.json.
ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def special_ids(keys: Mapping[str, object], *roles: str) -> dict[str, int]:
    """Role -> id, for the roles that have one."""
    ids = {role: keys.get(f"tokenizer.ggml.{role}_token_id") for role in roles}
    ids = {role: id for role, id in ids.items() if id is not None}
    for role, id in ids.items():
        if type(id) is not int:
            raise refused(f"tokenizer.ggml.{role}_token_id", id, "is no token's id")
    return ids


TEMPLATE_KEY = "tokenizer.chat_template"  # of the default one; others have their name behind it


class Vocabulary:
    """The keys below "tokenizer." of a file, and the tokenizer's files that say the same."""

    def __init__(self, keys: Mapping[str, object]):
        self.keys = keys
        self.model = keys.get("tokenizer.ggml.model")
        self.pre = keys.get("tokenizer.ggml.pre")
        tokens = keys["tokenizer.ggml.tokens"]
        if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
            raise UserError("tokenizer.ggml.tokens must be a list of texts")
        self.tokens = [token or f"[EMPTY_{id}]" for id, token in enumerate(tokens)]
        self.types = self._types()
        self.adds_space = bool(keys.get("tokenizer.ggml.add_space_prefix", True))
        adds_by_default = self.model == "llama" or self.pre in ADDS_BOS
        self.adds_bos = bool(keys.get("tokenizer.ggml.add_bos_token", adds_by_default))
        self.specials = {
            ROLES[role]: self.tokens[id]
            for role, id in special_ids(keys, *ROLES).items()
            if 0 <= id < len(self.tokens)  # llama.cpp ignores others, which some files have
        }

    def _types(self) -> list[int]:
        """The type of every token, as llama.cpp corrects those of the file: names that end a turn
        are control tokens. A sentencepiece vocabulary has one unknown token, so that others of this
        type, which fill a file up, are unused."""
        stored = self._numbers("token_type", NORMAL, lambda x: type(x) is int and 0 <= x < 256)
        names = CONTROL_NAMES
        other_unknown = UNUSED
        if self.model != "llama":
            names = CONTROL_NAMES - {"</s>"}  # in Qwen's vocabulary it is a tag of HTML
            other_unknown = CONTROL
        types = []
        for token, token_type in zip(self.tokens, stored):
            if token in names:
                token_type = CONTROL
            types.append(other_unknown if token_type == UNKNOWN else token_type)
        if self.model == "llama":
            first_unknown = stored.index(UNKNOWN) if UNKNOWN in stored else 0
            unknown_id = special_ids(self.keys, "unknown").get("unknown", first_unknown)
            if 0 <= unknown_id < len(types):  # other values say that there is none
                types[unknown_id] = UNKNOWN
        return types

    def _numbers(self, name: str, default: float, is_valid: Callable) -> Sequence[float]:
        """The numbers of all tokens below a key, or the default for each."""
        count = len(self.tokens)
        numbers = self.keys.get(f"tokenizer.ggml.{name}", (default,) * count)
        is_complete = isinstance(numbers, tuple | list) and len(numbers) == count
        if not is_complete or not all(map(is_valid, numbers)):
            raise UserError(
                f"tokenizer.ggml.{name} must be {count} numbers, one a token: make the file again"
            )
        return numbers

    def tokenizer_config(self) -> dict:
        """Names of special tokens, the BOS policy, the chat template."""
        config = {
            "add_bos_token": self.adds_bos,
            "added_tokens_are_text": True,  # llama.cpp, token_to_piece: these have no marks
            "clean_up_tokenization_spaces": False,
            "tokenizer_class": "PreTrainedTokenizerFast",
            **self.specials,
        }
        if self.model == "llama":
            config["tokenizer_class"] = "LlamaTokenizer"
            config["legacy"] = self.adds_space
            config["added_tokens_decoder"] = {
                id: {"content": self.tokens[id], "special": False}
                for id, token_type in enumerate(self.types)
                if token_type == USER_DEFINED
            }
            config["added_tokens_decoder"] |= self.stripping_tokens()
        templates = [
            {"name": key.removeprefix(TEMPLATE_KEY)[1:] or "default", "template": source}
            for key, source in self.keys.items()
            if f"{key}.".startswith(f"{TEMPLATE_KEY}.")
        ]
        return config | {"chat_template": templates or None}

    def stripping_tokens(self) -> dict[int, dict]:
        """Phi-3's special tokens, which take away white space after them. No key says so: as in
        llama.cpp (llama-vocab.cpp), the model's name does."""
        name = str(self.keys.get("general.name")).lower()
        if not ("phi-3" in name or "phi3" in name):
            return {}
        keeping = ("<unk>", "<s>", "<|endoftext|>")
        return {
            id: {"content": token, "special": True, "rstrip": True}
            for id, token in enumerate(self.tokens)
            if self.types[id] == CONTROL and token not in keeping
        }

    def generation_config(self) -> dict:
        """The ids that end a text, a turn or a message to a tool: those of the keys, and those with
        such names."""
        ids = {
            token: id
            for id, token in enumerate(self.tokens)
            if token in END_NAMES and self.types[id] == CONTROL
        }
        if any(ids.keys() >= ends for ends in MESSAGE_ENDS):
            ids.pop("<|end|>", None)
        stored = special_ids(self.keys, "eos", "eot", "eom").values()
        end_ids = {*ids.values(), *(id for id in stored if 0 <= id < len(self.tokens))}
        return {"eos_token_id": sorted(end_ids)} if end_ids else {}

    def tokenizer_json(self) -> bytes:
        """A byte-level BPE for the tokenizers library."""
        if str(self.pre) not in SPLITS:
            supported = ", ".join(SPLITS)
            raise refused(
                "tokenizer.ggml.pre", self.pre, f"is not supported; supported: {supported}"
            )
        splits = [
            {"type": "Split", "pattern": {"Regex": x}, "behavior": "Isolated", "invert": False}
            for x in SPLITS[self.pre]
        ]
        byte_level = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        }
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        vocab = {}
        added_tokens = []
        for id, (token, token_type) in enumerate(zip(self.tokens, self.types)):
            if vocab.get(token, id) != id:
                raise UserError(f"tokenizer.ggml.tokens holds {short_repr(token)} twice")
            if token_type != UNUSED:
                vocab[token] = id
            if token_type in (CONTROL, USER_DEFINED):
                is_special = token_type == CONTROL
                added_tokens.append({"id": id, "content": token, "special": is_special, **flags})
        model = {
            "type": "BPE",
            "ignore_merges": self.pre in IGNORES_MERGES,
            "vocab": vocab,
            "merges": self.keys["tokenizer.ggml.merges"],
        }
        tokenizer = {
            "version": "1.0",
            "added_tokens": added_tokens,
            "normalizer": {"type": "NFC"} if self.pre == "qwen2" else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
            "post_processor": self._bos_processor(vocab) if self.adds_bos else None,
            "decoder": byte_level,
            "model": model,
        }
        return json.dumps(tokenizer).encode()

    def _bos_processor(self, vocab: Mapping[str, int]) -> dict | None:
        """The step of tokenizer.json that puts BOS first."""
        bos = self.specials.get("bos_token")
        if bos is None:
            return None
        if bos not in vocab:
            raise UserError(
                f"tokenizer.ggml.bos_token_id is that of an unused token, {short_repr(bos)}"
            )
        sequence = {"Sequence": {"id": "A", "type_id": 0}}
        return {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, sequence],
            "pair": [sequence],
            "special_tokens": {bos: {"id": bos, "ids": [vocab[bos]], "tokens": [bos]}},
        }

    def sentencepiece_model(self) -> bytes:
        """A sentencepiece model: the fields of its protocol buffer that encoding and decoding
        read."""
        pieces = []
        scores = self._numbers("scores", 0.0, is_float32)
        for token, score, token_type in zip(self.tokens, scores, self.types):
            piece = field(1, token.encode()) + b"\x15" + struct.pack("<f", score)
            pieces.append(field(1, piece + number(3, token_type)))
        trainer = number(3, 2) + number(35, 1)  # BPE; characters without a piece become bytes
        for tag, name in enumerate(("unk_token", "bos_token", "eos_token", "pad_token"), 45):
            if name in self.specials:
                trainer += field(tag, self.specials[name].encode())
        # Spaces stay, as U+2581.
        normalizer = (
            field(1, b"identity") + number(3, self.adds_space) + number(4, 0) + number(5, 1)
        )
        return b"".join(pieces) + field(2, trainer) + field(3, normalizer)


def is_float32(value: object) -> bool:
    """Infinities and NaN are float32s too."""
    return isinstance(value, int | float) and not LARGEST_FLOAT < abs(value) < math.inf


def number(tag: int, value: int) -> bytes:
    return varint(tag << 3) + varint(value)


def field(tag: int, content: bytes) -> bytes:
    return varint(tag << 3 | 2) + varint(len(content)) + content


def varint(value: int) -> bytes:
    groups = []
    while value > 127:
        groups.append(value & 127 | 128)
        value >>= 7
    return bytes([*groups, value])


def write_files(path: Path, folder: Path) -> None:
    """Write the tokenizer's files of a GGUF file into a folder."""
    keys = parse(path).keys
    model = keys.get("tokenizer.ggml.model")
    with error_prefix(path):
        if model not in ("gpt2", "llama"):
            raise refused("tokenizer.ggml.model", model, "is not supported; supported: gpt2, llama")
        vocabulary = Vocabulary(keys)
        if model == "gpt2":
            (folder / "tokenizer.json").write_bytes(vocabulary.tokenizer_json())
        else:
            (folder / "tokenizer.model").write_bytes(vocabulary.sentencepiece_model())
        for name, values in (
            ("tokenizer_config.json", vocabulary.tokenizer_config()),
            ("generation_config.json", vocabulary.generation_config()),
        ):
            (folder / name).write_text(json.dumps(values, indent=2) + "\n")
