"""A GGUF file's keys -> the JSON and vocabulary files of a Hugging Face folder.

    read_json     config.json, generation_config.json or tokenizer_config.json, from the keys
    write_files   these and tokenizer.json or tokenizer.model, into a folder

Sources: llama.cpp, conversion/ for the keys and src/llama-vocab.cpp for the splitting of texts. This file knows neither
models nor the libraries of tokenizers.
"""

import contextlib
import json
import math
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from loading.chat_templates import one_line
from loading.families import FAMILIES, Family
from loading.gguf import Blocks, Strings, kv_heads, model_type_of, open_file, parts_of
from loading.plain_files import error_prefix
from loading.vocabularies import LLAMA3_PATTERN, TEKKEN_PATTERN

COPIED = {  # Hugging Face's key -> the architecture's key
    "hidden_size": "embedding_length", "num_hidden_layers": "block_count", "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count", "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}  # fmt: skip
# Keys of an architecture that would change the arithmetic, with the values under which they do not.
NEUTRAL = {
    "attention.causal": (True,), "attention.clamp_kqv": (0,), "attention.max_alibi_bias": (0,), "attention.scale": (0,),
    "attn_logit_softcapping": (0,), "embedding_scale": (0, 1), "expert_gating_func": (1, 0),
    "expert_group_count": (0, 1), "expert_shared_count": (0,), "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,), "logit_scale": (0, 1), "residual_scale": (0, 1), "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,), "rope.scaling.yarn_ext_factor": (1, -1), "use_parallel_residual": (False,),
}  # fmt: skip


def config_json(path: Path) -> dict:
    """ValueError names the key and value that cannot be used."""
    keys = open_file(path).keys
    tensors = {name: blocks for file in parts_of(path) for name, blocks in open_file(file).tensors.items()}
    model_type = model_type_of(keys)
    family = FAMILIES[model_type]
    architecture = family.gguf.architecture

    def get(key: str, default: object = None) -> object:
        value = keys.get(f"{architecture}.{key}", default)
        if isinstance(value, memoryview | Strings):
            raise ValueError(f"{architecture}.{key} is an array, which is not supported")
        return value

    for key, neutral in NEUTRAL.items():
        if get(key) not in (None, *neutral):
            raise ValueError(f"{architecture}.{key} = {get(key)!r:.60} is not supported; supported: {neutral[0]}")
    absent = [f"{architecture}.{key}" for key in COPIED.values() if get(key) is None]
    absent += [] if "token_embd.weight" in tensors else ["token_embd.weight"]
    if absent:
        raise ValueError(f"it lacks {', '.join(absent)}")
    rows, tokens = tensors["token_embd.weight"].shape[0], keys.get("tokenizer.ggml.tokens")
    if isinstance(tokens, Strings) and tokens.count > rows:
        raise ValueError(f"tokenizer.ggml.tokens has {tokens.count:,}; token_embd.weight has only {rows:,} rows")
    hf = {key: get(gguf_key) for key, gguf_key in COPIED.items()}
    head_dim = get("attention.key_length", hf["hidden_size"] // max(hf["num_attention_heads"], 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if get(key, head_dim) != head_dim:
            raise ValueError(f"{architecture}.{key} = {get(key)!r:.60} is not the size of a head, {head_dim!r:.60}")
    dtypes = {blocks.kind.dtype for blocks in tensors.values() if len(blocks.shape) > 1}
    class_name = "".join(word.capitalize() for word in model_type.split("_"))
    hf |= {
        "model_type": model_type, "architectures": [f"{class_name}ForCausalLM"], "hidden_act": "silu",
        "head_dim": head_dim, "num_key_value_heads": kv_heads(keys), "vocab_size": rows,
        "tie_word_embeddings": "output.weight" not in tensors, "rope_theta": get("rope.freq_base", 10000.0),
        "dtype": str((len(dtypes) == 1 and dtypes.pop()) or torch.bfloat16).removeprefix("torch."),
        "rope_scaling": rope_scaling(get, tensors, head_dim),
        **{f"{role}_token_id": id for role, id in special_ids(keys, "bos", "eos").items()},
    }  # fmt: skip
    for key, tensor in ((family.qkv_bias, "attn_q"), (family.ffn_bias, "ffn_gate")):
        hf |= {key: f"blk.0.{tensor}.bias" in tensors} if isinstance(key, str) else {}
    hf |= expert_keys(get, family)
    window = get("attention.sliding_window", 0)
    hf |= {"sliding_window": window or None} if family.sliding else {}
    if window and family.use_sliding_window == "decides":
        hf |= {"use_sliding_window": True, "max_window_layers": 0}
    return hf | family.gguf.hf_keys(get, hf)


def expert_keys(get: Callable, family: Family) -> dict:
    """config.json's keys of experts. llama.cpp fixes per architecture whether the chosen ones' weights sum to 1."""
    architecture, norm, count = family.gguf.architecture, family.gguf.norm_topk_prob, get("expert_count", 0)
    if (count > 0) != (family.experts is not None):
        raise ValueError(f"{architecture}.expert_count = {count!r:.60} is not supported for this architecture")
    if get("expert_weights_norm", norm) != norm:
        raise ValueError(f"{architecture}.expert_weights_norm = {not norm} is not supported; supported: {norm}")
    if family.experts is None:
        return {}
    sizes = {"moe_intermediate_size": "expert_feed_forward_length"} if family.experts.dim else {}
    if family.experts.shared_dim:
        sizes["shared_expert_intermediate_size"] = "expert_shared_feed_forward_length"
    absent = [f"{architecture}.{key}" for key in sizes.values() if get(key) is None]
    if absent:
        raise ValueError(f"it lacks {', '.join(absent)}")
    sizes |= {} if family.experts.dim else {"intermediate_size": "expert_feed_forward_length"}
    key = "num_experts" if "num_experts" in family.own_keys else "num_local_experts"
    counts = {key: count, "num_experts_per_tok": get("expert_used_count"), "norm_topk_prob": norm}
    return counts | {name: get(key) for name, key in sizes.items() if get(key) is not None}


def rope_scaling(get: Callable, tensors: dict[str, Blocks], head_dim: int) -> dict | None:
    """transformers' object. ValueError for a scaling that it does not have."""
    factor = get("rope.scaling.factor", get("rope.scale_linear"))  # the second is the key of files from 2023
    kind = get("rope.scaling.type", "linear")  # llama.cpp's default
    kind = "none" if kind == "linear" and factor in (None, 0, 1) else kind
    if kind not in ("none", "linear", "yarn") or (kind != "none" and "rope_freqs.weight" in tensors):
        raise ValueError(f"rope.scaling.type = {kind!r:.60} is not supported; supported: none, linear, yarn")
    if "rope_freqs.weight" in tensors:
        return llama3_scaling(tensors["rope_freqs.weight"], head_dim, get("rope.freq_base", 10000.0))
    if kind == "none":
        return None
    names = {"original_max_position_embeddings": "original_context_length"} if kind == "yarn" else {}
    names |= {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"} if kind == "yarn" else {}
    values = {name: get(f"rope.scaling.{key}") for name, key in names.items()}
    return {"rope_type": kind, "factor": factor} | {name: value for name, value in values.items() if value is not None}


def llama3_scaling(stored: Blocks, head_dim: int, theta: float) -> dict | None:
    """The llama3 scaling with these divisors of RoPE's frequencies; its low and high factors are the published ones."""
    low, high, length = 1.0, 4.0, 8192
    if stored.shape != (head_dim // 2,):
        raise ValueError(f"rope_freqs.weight has the shape {stored.get_shape()} with heads of {head_dim}")
    divisors = stored[:].double()  # (E / 2,): 1 / divisor = (1 - smooth) / factor + smooth
    if (divisors == 1).all():
        return None
    factor, wavelengths = divisors.max(), 2 * math.pi * theta ** (torch.arange(0, head_dim, 2).double() / head_dim)
    partial = (divisors > 1) & (divisors < factor)
    if partial.any():  # smooth = (length / wavelength - low) / (high - low)
        smooth = (1 / divisors[partial][0] - 1 / factor) / (1 - 1 / factor)
        length = round(float((smooth * (high - low) + low) * wavelengths[partial][0]))
    smooth = ((length / wavelengths - low) / (high - low)).clamp(0, 1)
    if not torch.allclose(1 / ((1 - smooth) / factor + smooth), divisors, rtol=1e-3):
        raise ValueError("rope_freqs.weight holds other numbers than Llama 3's scaling makes, which is not supported")
    return {
        "rope_type": "llama3", "factor": float(factor), "low_freq_factor": low, "high_freq_factor": high,
        "original_max_position_embeddings": length,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------ vocabularies

# tokenizer.ggml.pre -> the patterns that split a text, one after the other, before pieces are merged.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{CONTRACTION}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The letters with two cases, as code points: their characters would not survive a normalization of this file.
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
DEEPSEEK_LETTERS = "".join(re.sub("[0-9A-F]+", lambda code: chr(int(code[0], 16)), DEEPSEEK_RANGES).split())
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
LLAMA3_PRES = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0")
SPLITS = {
    **dict.fromkeys(("default", None), (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys((*LLAMA3_PRES, "smaug-bpe"), (LLAMA3_PATTERN,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "minerva-7b", "exaone"), (r"\p{N}", GPT2)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "kormo"), (QWEN2,)),
    **dict.fromkeys(("gpt-2", "mellum", "trillion", "a.x-4.0", "gigachat", "exaone4", "granite-docling"), (GPT2,)),
    **dict.fromkeys(("gpt-4o", "kanana2"), (O200K,)),
    "deepseek-llm": DEEPSEEK_LLM,
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN, r"\p{N}"),
    "minicpm5": (r"\p{N}{1,3}", LLAMA3_PATTERN.replace("{1,3}", "+")),
    "seed-coder": (QWEN2.replace(r"[\r\n]*|", "|").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{N}\r\n]"),),
    "tekken": (TEKKEN_PATTERN,),
    "ufakzeka": (QWEN2.removeprefix(CONTRACTION.removesuffix("?") + "|"),),
    "viking": (r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}"),
}
ADDS_BOS = (*LLAMA3_PRES, "tekken")  # where the file does not say so
IGNORES_MERGES = (*ADDS_BOS, "minicpm5")  # a word that is a token is not merged
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5  # types of tokens, as sentencepiece numbers them
# Names that llama.cpp makes control tokens, whatever their type in the file: those that end a generation, and others of
# infilling.
END_LINES = """
<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|>
<EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <｜end▁of▁sentence｜> [e~[
<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>
"""
INFILL_LINES = """
<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|>
<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|>
<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|>
"""
END_NAMES = frozenset(END_LINES.split())
CONTROL_NAMES = END_NAMES.union(INFILL_LINES.split())


def vocabulary(keys: dict[str, object]) -> list[str]:
    tokens = keys.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, Strings):
        raise ValueError("tokenizer.ggml.tokens is missing, or no array of strings")
    return [token or f"[EMPTY_{id}]" for id, token in enumerate(tokens)]


def token_types(keys: dict[str, object], tokens: list[str]) -> list[int]:
    """The type of every token, as llama.cpp corrects those of the file: names that end a turn are control tokens. A
    sentencepiece vocabulary has one unknown token, so that others of this type, which fill a file up, are unused."""
    types = numbers(keys, "token_type", NORMAL, len(tokens))
    is_byte_level = keys.get("tokenizer.ggml.model") != "llama"
    names = CONTROL_NAMES - {"</s>"} if is_byte_level else CONTROL_NAMES  # in Qwen's vocabulary it is a tag of HTML
    types = [CONTROL if token in names else type for token, type in zip(tokens, types)]
    if is_byte_level:
        return [CONTROL if type == UNKNOWN else type for type in types]
    unknown_id = special_ids(keys, "unknown").get("unknown", types.index(UNKNOWN) if UNKNOWN in types else 0)
    types = [UNUSED if type == UNKNOWN else type for type in types]
    if 0 <= unknown_id < len(types):
        types[unknown_id] = UNKNOWN
    return types


def numbers(keys: dict[str, object], key: str, default: float, count: int) -> list:
    """A number for each token."""
    values = keys.get(f"tokenizer.ggml.{key}")
    if values is not None and (not isinstance(values, memoryview) or len(values) != count):
        raise ValueError(f"tokenizer.ggml.{key} must have a number for each of {count:,} tokens")
    return [default] * count if values is None else values.tolist()


def special_ids(keys: dict[str, object], *roles: str) -> dict[str, int]:
    """Role -> id, for the roles that have one."""
    ids = {role: keys.get(f"tokenizer.ggml.{role}_token_id") for role in roles}
    return {role: id for role, id in ids.items() if type(id) is int}


def tokenizer_config(keys: dict[str, object]) -> dict:
    """Names of special tokens, the BOS policy, the chat template."""
    tokens, model = vocabulary(keys), keys.get("tokenizer.ggml.model")
    adds_by_default = model == "llama" or keys.get("tokenizer.ggml.pre") in ADDS_BOS
    adds_bos = keys.get("tokenizer.ggml.add_bos_token", adds_by_default)
    config = {"add_bos_token": bool(adds_bos), "clean_up_tokenization_spaces": False}
    config["added_tokens_are_text"] = True  # llama.cpp, token_to_piece: user-defined tokens have no marks
    config["tokenizer_class"] = "LlamaTokenizer" if model == "llama" else "PreTrainedTokenizerFast"
    if model == "llama":  # llama.cpp puts a space behind every special and user-defined token
        types = token_types(keys, tokens)
        added = {id: {"content": tokens[id], "special": False} for id, type in enumerate(types) if type == USER_DEFINED}
        prefix = keys.get("tokenizer.ggml.add_space_prefix", True)
        config |= {"added_tokens_decoder": added, **dict.fromkeys(("legacy", "space_after_special"), bool(prefix))}
    roles = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}  # transformers' names for these
    ids = special_ids(keys, *roles)
    config |= {f"{roles[role]}_token": tokens[id] for role, id in ids.items() if 0 <= id < len(tokens)}
    template = keys.get("tokenizer.chat_template")
    return config | ({"chat_template": template} if isinstance(template, str) else {})


def generation_config(keys: dict[str, object]) -> dict:
    """The ids that end a text, a turn or a message to a tool: those of the keys, and those with such names."""
    tokens = vocabulary(keys)
    types = token_types(keys, tokens)
    ids = {token: id for id, token in enumerate(tokens) if token in END_NAMES and types[id] == CONTROL}
    if ids.keys() >= {"<|return|>", "<|call|>"} or ids.keys() >= {"<|call|>", "<|flush|>"}:
        ids.pop("<|end|>", None)  # it ends a message there, and the answer follows
    end_ids = {*special_ids(keys, "eos", "eot", "eom").values(), *ids.values()}
    return {"eos_token_id": sorted(end_ids)} if end_ids else {}


def tokenizer_json(keys: dict[str, object]) -> bytes:
    """A byte-level BPE for the tokenizers library."""
    pre, merges = keys.get("tokenizer.ggml.pre"), keys.get("tokenizer.ggml.merges")
    if pre not in SPLITS:
        supported = ", ".join(filter(None, SPLITS))
        raise ValueError(f"tokenizer.ggml.pre = {pre!r:.60} is not supported; supported: {supported}")
    if not isinstance(merges, Strings):
        raise ValueError("tokenizer.ggml.merges is missing or no array of strings")
    tokens, settings = vocabulary(keys), tokenizer_config(keys)
    types = token_types(keys, tokens)
    vocab = {token: id for id, (token, type) in enumerate(zip(tokens, types)) if type != UNUSED}
    if len(vocab) + types.count(UNUSED) != len(tokens):
        raise ValueError("tokenizer.ggml.tokens holds a token twice")
    splits = [{"type": "Split", "pattern": {"Regex": x}, "behavior": "Isolated", "invert": False} for x in SPLITS[pre]]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    bos, post_processor = settings.get("bos_token"), None
    if settings["add_bos_token"] and bos in vocab:
        sequence = {"Sequence": {"id": "A", "type_id": 0}}
        post_processor = {
            "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, sequence],
            "pair": [sequence], "special_tokens": {bos: {"id": bos, "ids": [vocab[bos]], "tokens": [bos]}},
        }  # fmt: skip
    return json.dumps({
        "version": "1.0",
        "added_tokens": [
            {"id": id, "content": token, "special": type == CONTROL, **flags}
            for id, (token, type) in enumerate(zip(tokens, types)) if type in (CONTROL, USER_DEFINED)
        ],
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "post_processor": post_processor,
        "decoder": byte_level,
        "model": {"type": "BPE", "ignore_merges": pre in IGNORES_MERGES, "vocab": vocab, "merges": [*merges]},
    }).encode()  # fmt: skip


def tokenizer_model(keys: dict[str, object]) -> bytes:
    """A sentencepiece model: the fields of its protocol buffer that encoding and decoding read."""
    tokens = vocabulary(keys)
    scores = numbers(keys, "scores", 0.0, len(tokens))
    types = token_types(keys, tokens)
    pieces = (
        field(1, field(1, token.encode()) + b"\x15" + struct.pack("<f", score) + number(3, type))
        for token, score, type in zip(tokens, scores, types)
    )
    settings, prefix = tokenizer_config(keys), keys.get("tokenizer.ggml.add_space_prefix", True)
    names = {45: "unk_token", 46: "bos_token", 47: "eos_token", 48: "pad_token"}
    trainer = number(3, 2) + number(35, 1)  # BPE; characters without a piece become bytes
    trainer += b"".join(field(tag, settings[name].encode()) for tag, name in names.items() if name in settings)
    normalizer = field(1, b"identity") + number(3, bool(prefix)) + number(4, 0) + number(5, 1)  # spaces kept, as U+2581
    return b"".join(pieces) + field(2, trainer) + field(3, normalizer)


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


# ----------------------------------------------------------------------------------------------- files

MAKERS = {"generation_config.json": generation_config, "tokenizer_config.json": tokenizer_config}
VOCABULARIES = {"gpt2": ("tokenizer.json", tokenizer_json), "llama": ("tokenizer.model", tokenizer_model)}


@contextlib.contextmanager
def key_errors(path: Path) -> Iterator[None]:
    """Turn errors into a ValueError that begins with the file, because keys may hold values of any type."""
    with error_prefix(path):
        try:
            yield
        except (TypeError, OverflowError, ZeroDivisionError, struct.error) as error:
            raise ValueError(f"some of its keys have a wrong type or size: {one_line(error)}") from None


def read_json(path: Path, name: str) -> dict:
    with key_errors(path):
        return config_json(path) if name == "config.json" else MAKERS[name](open_file(path).keys)


def write_files(path: Path, folder: Path) -> None:
    """All but config.json and the tensors, into a folder."""
    keys = open_file(path).keys
    model = keys.get("tokenizer.ggml.model")
    with key_errors(path):
        if model not in VOCABULARIES:
            supported = ", ".join(VOCABULARIES)
            raise ValueError(f"tokenizer.ggml.model = {model!r:.60} is not supported; supported: {supported}")
        name, make = VOCABULARIES[model]
        (folder / name).write_bytes(make(keys))
        for name, make in MAKERS.items():
            (folder / name).write_text(json.dumps(make(keys), indent=2) + "\n")
