"""A GGUF file's keys -> the JSON and vocabulary files of a Hugging Face folder.

    GgufModel     a file, read as a folder is: its config.json and its tensors
    write_files   the tokenizer's files, into a folder

Sources: llama.cpp, conversion/ for the keys and src/llama-vocab.cpp for the splitting of texts.
"""

import json
import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

import torch

from decoding.errors import UserError
from loading.config import supported_values
from loading.families import EXPERT_FIELDS, EXPERT_NAMES, FAMILIES, FIELDS, Family
from loading.gguf import (
    Blocks,
    Entries,
    GgufFile,
    common_value,
    hf_tensors,
    in_blocks,
    model_type_of,
    open_model,
    parse,
    parts_of,
)
from loading.models import dtype_name
from loading.plain_files import error_prefix, short_repr
from loading.stored import Source
from loading.tokenizers.ranks import LLAMA3_PATTERN, TEKKEN_PATTERN

# Keys that every file must have.
REQUIRED = """
block_count embedding_length feed_forward_length attention.head_count context_length
attention.layer_norm_rms_epsilon
"""
UNSET_AT_0 = ("expert_group_count", "attention.key_length")  # integers
YARN = {
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
# Keys in neither table of families.py that are read below, or that no arithmetic of a text depends
# on.
OTHER_KEYS = """
rope.dimension_count rope.scaling.type rope.scaling.factor rope.scaling.yarn_beta_fast
rope.scaling.yarn_beta_slow nextn_predict_layers attention.layer_norm_epsilon
attention.sliding_window_pattern attention.value_length decoder_start_token_id
embedding_length_out expert_group_used_count expert_shared_feed_forward_length
n_deepstack_layers pooling_type rope.dimension_sections rope.scaling.finetuned
tensor_data_layout vocab_size
"""
# Others that would change the arithmetic, with the values under which they do not.
HARMLESS = {
    "rope.scale_linear": (0, 1),  # the factor in files from 2023
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (1, -1),
}


class GgufModel:
    """The files of a model, of which `path` is the first, with the interface of folder.Folder."""

    index = MappingProxyType({})

    def __init__(self, path: Path):
        self.path = path

    @cached_property
    def model(self) -> GgufFile:
        return open_model(self.path)

    @cached_property
    def hf(self) -> dict:
        with error_prefix(self.path):
            return hf_config(self.model)

    @property
    def files(self) -> list[Path]:
        return parts_of(self.path, self.model.keys)

    @cached_property
    def tensors(self) -> dict[str, Blocks]:
        with error_prefix(self.path):
            return hf_tensors(self.model)

    def as_stored(self, source: Source) -> Source:
        return in_blocks(source, self.tensors)


def hf_config(model: GgufFile) -> dict:
    """config.json of a model. UserError names a key that is missing, or one whose value would
    change the arithmetic."""
    file_type = model.keys.get("general.type", "model")
    if file_type != "model":
        raise UserError(
            f"general.type = {short_repr(file_type)} is not supported; supported: model (--adapter"
            " takes a LoRA adapter in PEFT's folder)"
        )
    model_type = model_type_of(model.keys)
    family = FAMILIES[model_type]
    tensors = model.tensors
    if not tensors:
        raise UserError("the file has a vocabulary and no tensors; give the model's file")
    prefix = f"{family.arch}."
    own = {
        key.removeprefix(prefix): common_value(key, value)
        for key, value in model.keys.items()
        if key.startswith(prefix)
    }
    values = Entries(f"key {prefix}", own)
    hidden_size = values.number("embedding_length")
    num_heads = values.number("attention.head_count")
    head_dim = values.number("attention.key_length", max(1, hidden_size // num_heads))
    dtype = tensors["blk.0.attn_output.weight"].block_type.dtype
    # Defaults are llama.cpp's, which are not those of config.py.
    hf = {
        "model_type": model_type,
        "head_dim": head_dim,
        "partial_rotary_factor": values.number("rope.dimension_count", head_dim) / head_dim,
        "num_key_value_heads": num_heads,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "rope_theta": values.number("rope.freq_base", 10000.0),
        "dtype": dtype_name(dtype or torch.bfloat16),
    }
    hf |= translated(values, tensors, family)
    hf["num_hidden_layers"] -= values.number("nextn_predict_layers", 0)
    hf["sliding_window"] = hf.get("sliding_window") or None
    hf["rope_scaling"] = rope_scaling(values, tensors, hf)
    pattern = values.get("attention.sliding_window_pattern")
    if isinstance(pattern, tuple):  # for each layer: does it have a window?
        hf["layer_types"] = ["sliding_attention" if x else "full_attention" for x in pattern]
    elif pattern is not None:  # the layers of a period
        hf["sliding_window_pattern"] = pattern
    ids = special_ids(model.keys, "bos", "eos")
    hf |= {f"{role}_token_id": id for role, id in ids.items()}
    hf |= presence_flags(tensors, family)
    return hf | family.hf_keys(values.get, hf)


def translated(values: Entries, tensors: Mapping[str, Blocks], family: Family) -> dict:
    """The keys that the family reads, under config.json's names. UserError for a key that is
    missing, that would change the arithmetic, or that is unknown."""
    own_names = {EXPERT_NAMES.get(key, key): key for key in family.experts}
    hf_keys = {
        field.gguf: own_names.get(key, key)
        for key, field in (FIELDS | EXPERT_FIELDS).items()
        if field.gguf
    }
    supported_by_key = supported_keys(values, tensors, family, hf_keys)
    hf = {}
    for key, value in values.items():
        is_number = type(value) is float or key in UNSET_AT_0
        if key in hf_keys and is_number and value == 0:
            continue  # llama.cpp takes it for a number that the file does not have
        supported = supported_by_key.get(key, ())
        if supported is not None and value not in supported:
            choice = supported[0] if supported else "only files without it"
            raise UserError(
                f"{family.arch}.{key} = {short_repr(value)} is not supported; supported: {choice}"
            )
        if supported is None and key in hf_keys:
            hf[hf_keys[key]] = value
    for key in REQUIRED.split():
        values.number(key)
    return hf


def supported_keys(
    values: Entries, tensors: Mapping[str, Blocks], family: Family, hf_keys: Mapping[str, str]
) -> dict[str, tuple | None]:
    """The architecture's keys -> their supported values; None: any."""
    # A key of config.json that is not in it is read by the family, at any value.
    supported = supported_values(family, n_layers=0)
    supported_by_key = {
        **{key: supported.get(hf_key) for key, hf_key in hf_keys.items()},
        **dict.fromkeys(OTHER_KEYS.split()),
        **HARMLESS,
        "rope.freq_base_swa": (values.get("rope.freq_base", 10000.0),),
        "expert_gating_func": (2 if family.fields.get("router_sigmoid") else 1, 0),
    }
    if "rope_factors_long.weight" in tensors:
        supported_by_key["rope.scaling.attn_factor"] = None
    if values.get("rope.scaling.type") == "yarn":
        supported_by_key["rope.scaling.yarn_attn_factor"] = None
    return supported_by_key | family.gguf_keys


def presence_flags(tensors: Mapping[str, Blocks], family: Family) -> dict[str, bool]:
    """config.json's flags of what a model has, which the first layer's tensors answer."""
    answers = [
        (family.has_out_bias, "attn_output.bias"),
        (family.has_ffn_bias, "ffn_gate.bias"),
        (family.has_qkv_bias, "attn_q.bias"),
        ("use_qk_norm", "attn_q_norm.weight"),
    ]
    # A flag that is no key is the same for all models of the family.
    return {key: f"blk.0.{name}" in tensors for key, name in answers if isinstance(key, str)}


def rope_scaling(values: Mapping[str, object], tensors: Mapping[str, Blocks], hf: dict) -> dict:
    """transformers' object; config.py refuses types that it does not have."""
    if "rope_factors_long.weight" in tensors:
        return {
            "rope_type": "longrope",
            "original_max_position_embeddings": values["rope.scaling.original_context_length"],
            "attention_factor": values.get("rope.scaling.attn_factor"),
            "short_factor": tensors["rope_factors_short.weight"][:].tolist(),
            "long_factor": tensors["rope_factors_long.weight"][:].tolist(),
        }
    rope_type = values.get("rope.scaling.type", "linear")  # llama.cpp's default
    factor = values.get("rope.scaling.factor", 0)
    if rope_type == "none" or (rope_type == "linear" and factor in (0, 1)):
        if "rope_freqs.weight" not in tensors:
            return {"rope_type": "default"}
        return llama3_scaling(tensors["rope_freqs.weight"], hf["head_dim"], hf["rope_theta"])
    if "rope_freqs.weight" in tensors:
        raise UserError(f"rope.scaling.type = {short_repr(rope_type)} next to rope_freqs.weight")
    scaling = {"rope_type": rope_type, "factor": factor}
    if rope_type == "yarn":
        scaling |= {name: values[key] for name, key in YARN.items() if key in values}
        family = FAMILIES[hf["model_type"]]
        scaling["truncate"] = family.default_rope.get("truncate", True)
        attention_factor = values.get("rope.scaling.yarn_attn_factor", 1)
        if attention_factor != 1:  # which says nothing
            scaling["attention_factor"] = attention_factor
    return scaling


def llama3_scaling(stored: Blocks, head_dim: int, theta: float) -> dict:
    """Llama 3's RoPE scaling from the divisors of its frequencies, which are all that a file has of
    it. The low and high factors are taken to be the published ones."""
    exponents = torch.arange(0, head_dim, 2).double() / head_dim
    divisors = stored[:].double()  # (E / 2,)
    if divisors.shape != exponents.shape or not (divisors.isfinite() & (divisors > 0)).all():
        raise UserError(f"rope_freqs.weight must hold {len(exponents)} positive numbers")
    factor = float(divisors.max())
    if (divisors == 1).all():
        return {"rope_type": "default"}
    low = 1.0
    high = 4.0
    length = 8192
    wavelengths = 2 * math.pi * theta**exponents
    # 1 / divisor = (1 - smooth) / factor + smooth, with smooth from 0 to 1 as
    # (length / wavelength - low) / (high - low)
    smooth = (1 / divisors - 1 / factor) / (1 - 1 / factor)
    partial = (smooth > 0) & (smooth < 1)
    if partial.any():
        lengths = (smooth * (high - low) + low) * wavelengths
        length = round(float(lengths[partial][0]))
    expected = ((length / wavelengths - low) / (high - low)).clamp(0, 1)
    if not torch.allclose(expected, smooth, atol=1e-4):
        raise UserError(
            "rope_freqs.weight holds other numbers than Llama 3's scaling makes, which is not"
            " supported"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": length,
    }


# ----------------------------------------------------------------------------------- vocabularies

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
            raise UserError(f"tokenizer.ggml.{role}_token_id = {short_repr(id)} is no token's id")
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
        templates = [
            {"name": key.removeprefix(TEMPLATE_KEY)[1:] or "default", "template": source}
            for key, source in self.keys.items()
            if f"{key}.".startswith(f"{TEMPLATE_KEY}.")
        ]
        return config | {"chat_template": templates or None}

    def generation_config(self) -> dict:
        """The ids that end a text, a turn or a message to a tool: those of the keys, and those with
        such names."""
        ids = {
            token: id
            for id, token in enumerate(self.tokens)
            if token in END_NAMES and self.types[id] == CONTROL
        }
        if "<|call|>" in ids and ("<|return|>" in ids or "<|flush|>" in ids):
            ids.pop("<|end|>", None)  # it ends a message there, and the answer follows
        end_ids = {*special_ids(self.keys, "eos", "eot", "eom").values(), *ids.values()}
        return {"eos_token_id": sorted(end_ids)} if end_ids else {}

    def tokenizer_json(self) -> bytes:
        """A byte-level BPE for the tokenizers library."""
        if str(self.pre) not in SPLITS:
            raise UserError(
                f"tokenizer.ggml.pre = {short_repr(self.pre)} is not supported; supported:"
                f" {', '.join(SPLITS)}"
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
            raise UserError(
                f"tokenizer.ggml.model = {short_repr(model)} is not supported; supported: gpt2,"
                " llama"
            )
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
