"""Break folders in every way that comes to mind, and see that each loads rightly or is refused in
one line.

    python -m tests.attacks.fuzz --cases 20000 --seed 1 [--kind safetensors] [--workers 2] [--write
    findings.json]
    python -m tests.attacks.fuzz --seed 1 --case 137    one case again, in this process, with what
                                                        was done to it

    build               tiny valid folders: every tokenizer, one file or several, quantized by us or
                        by others
    ATTACKS             kind -> what is done to one of them: bytes, JSON values, headers, paths,
                        templates
    attempt             load_config, load_tokenizer, load_model, encode, chat, two tokens; what each
                        came to
    one_case            a case under watch; Worker  case after case in a process of its own, under
                        limits

A case is a number: with the seed it decides everything. It fails on an exception that is no
UserError, on a message that is not one line with the folder's name, on loaded weights that are not
the file's, after 10 s, with 512 MB more than before, and when Python opens, renames, starts or runs
anything that the folder does not hold (an audit hook) or a file beside the folder changes; but for
the folder that a GGUF file's vocabulary is read from. This file knows nothing of how folders are
read, but for the format of safetensors.
"""

import base64
import collections
import contextlib
import json
import multiprocessing.connection
import os
import random
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from benchmarks.record import record
from cli.errors import exit_on_error
from cli.flags import Parser, positive
from decoding.engine import Engine
from decoding.errors import UserError
from decoding.sampling import Sampling
from loading.checkpoint import load_config, load_model
from loading.config import config_from_hf
from loading.families import NEUTRAL
from loading.models import random_model
from loading.saving import save_model
from loading.tokenizer import load_tokenizer
from loading.weight_names import pieces
from model import Transformer

ROOT = Path(__file__).resolve().parents[2]
CASE_S, CASE_BYTES, LONGEST_LINE = 10.0, 512 * 2**20, 2000
# to backtrack over
TEXT = "Once upon a time, <s> \u65e5\u672c e\u0301 \U0001f389 <|eot_id|>" + "a" * 40 + "x" * 40
MESSAGES = [
    {"role": "user", "content": TEXT},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "x"},
]
# --------------------------------------------------------------------------- folders to start from

D, F, V = 64, 96, 448
HF = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": F,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-5,
    "dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 48},
}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content | trim }}"
    " [/INST]"
    "{% else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}"
)
SETTINGS = {
    "add_bos_token": True,
    "bos_token": "<s>",
    "eos_token": {"content": "</s>"},
    "chat_template": TEMPLATE,
    "added_tokens_decoder": {str(V - 1): {"content": "<tool>", "special": False}},
}


def build(root: Path) -> dict[str, Path]:
    """Name -> folder."""
    makers = {"sentencepiece": _sentencepiece, "tokenizers": _tokenizers, "tiktoken": _tiktoken}
    folders = {name: root / name for name in [*makers, "sharded", *QUANTIZED]}
    for name, folder in folders.items():
        hf = HF | ({"quantization_config": QUANTIZED[name][0]} if name in QUANTIZED else {})
        scheme = "int8" if name == "sharded" else None
        model = random_model(config_from_hf(HF), dtype=torch.float32, quantize=scheme, pack=False)
        save_model(model, folder, hf)
        if name in QUANTIZED:
            _requantize(folder, hf, QUANTIZED[name][1])
        makers.get(name, _sentencepiece)(folder)
        # it has all tokens
        settings = SETTINGS if name != "tokenizers" else SETTINGS | {"added_tokens_decoder": {}}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        (folder / "generation_config.json").write_text(
            json.dumps({"eos_token_id": [2, 7], "do_sample": True})
        )
    for name in ("gguf-sentencepiece", "gguf-bpe"):
        folders[name] = root / name
        folders[name].mkdir()
        _gguf(
            folders[name] / "m.gguf", folders["sentencepiece" if "sent" in name else "tokenizers"]
        )
    return folders


def _gguf(file: Path, folder: Path) -> None:
    """The shapes of HF with a folder's vocabulary, in llama.cpp's format, of several types."""
    import gguf
    import numpy
    import sentencepiece

    writer, rng = gguf.GGUFWriter(file, "llama"), numpy.random.default_rng(0)
    writer.add_block_count(2)
    writer.add_context_length(96)
    writer.add_embedding_length(D)
    writer.add_feed_forward_length(F)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(2.0)
    writer.add_rope_scaling_orig_ctx_len(48)
    if (folder / "tokenizer.model").exists():
        model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
        ids = range(model.get_piece_size())
        writer.add_tokenizer_model("llama")
        writer.add_token_list([model.id_to_piece(id) for id in ids])
        writer.add_token_scores([model.get_score(id) for id in ids])
        writer.add_token_types(
            [(2, 3, 3)[id] if id < 3 else 6 if model.is_byte(id) else 1 for id in ids]
        )
    else:
        stored = json.loads((folder / "tokenizer.json").read_text())["model"]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(sorted(stored["vocab"], key=stored["vocab"].get))
        writer.add_token_types([3, 3] + [1] * (len(stored["vocab"]) - 2))
        writer.add_token_merges([" ".join(pair) for pair in stored["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    kinds, shapes = (
        gguf.GGMLQuantizationType,
        {"token_embd": ("F16", V, D), "output": ("Q8_0", V, D)},
    )
    for n in range(2):
        block = {
            "attn_q": (D, D),
            "attn_k": (D // 2, D),
            "attn_v": (D // 2, D),
            "attn_output": (D, D),
        }
        block |= {"ffn_gate": (F, D), "ffn_up": (F, D), "ffn_down": (D, F)}
        shapes |= {
            f"blk.{n}.{name}": (("Q4_0", "Q5_1")[n], *shape) for name, shape in block.items()
        }
    for name, (kind, *shape) in shapes.items():
        data = gguf.quants.quantize(rng.normal(0, 0.05, shape).astype("float32"), kinds[kind])
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kinds[kind])
    for name in (
        "output_norm",
        *(f"blk.{n}.{norm}" for n in range(2) for norm in ("attn_norm", "ffn_norm")),
    ):
        writer.add_tensor(f"{name}.weight", numpy.ones(D, dtype="float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _sentencepiece(folder: Path) -> None:
    import sentencepiece

    with open(folder / "tokenizer.model", "wb") as model:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter((ROOT / "checkpoints" / "stories.txt").read_text().splitlines()),
            model_writer=model,
            vocab_size=V - 8,
            model_type="bpe",
            byte_fallback=True,
            hard_vocab_limit=False,
            minloglevel=2,
        )


def _tokenizers(folder: Path) -> None:
    from tokenizers import (
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )

    model = Tokenizer(models.BPE())
    model.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("\u00a0", " ")])
    split = pre_tokenizers.Split(r" ?[A-Za-z]+|\s+", "isolated")
    model.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=V - 8,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    model.train_from_iterator(
        (ROOT / "checkpoints" / "stories.txt").read_text().splitlines(), trainer
    )
    model.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    model.save(str(folder / "tokenizer.json"))


def _tiktoken(folder: Path) -> None:
    tokens = [bytes([byte]) for byte in range(256)] + [b"on", b"ce", b" a", b"once"]
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    (folder / "tokenizer.model").write_text("".join(lines))


def _gptq(name: str, rows: int, columns: int) -> dict:
    groups = columns // 32
    return {
        f"{name}.qweight": ("I32", (columns // 8, rows)),
        f"{name}.qzeros": ("I32", (groups, rows // 8)),
        f"{name}.scales": ("F16", (groups, rows)),
        f"{name}.g_idx": ("I32", (columns,)),
    }


def _awq(name: str, rows: int, columns: int) -> dict:
    return {
        f"{name}.qweight": ("I32", (columns, rows // 8)),
        f"{name}.qzeros": ("I32", (columns // 32, rows // 8)),
        f"{name}.scales": ("F16", (columns // 32, rows)),
    }


def _packed(name: str, rows: int, columns: int) -> dict:
    return {
        f"{name}.weight_packed": ("I32", (rows, columns // 8)),
        f"{name}.weight_scale": ("BF16", (rows, columns // 32)),
        f"{name}.weight_shape": ("I64", (2,)),
    }


def _blocks(name: str, rows: int, columns: int) -> dict:
    return {
        f"{name}.weight": ("F8_E4M3", (rows, columns)),
        f"{name}.weight_scale_inv": ("F32", (1, 1)),
        f"{name}.activation_scale": ("F32", ()),
    }


def _nvfp4(name: str, rows: int, columns: int) -> dict:
    return {
        f"{name}.weight_packed": ("U8", (rows, columns // 2)),
        f"{name}.weight_global_scale": ("F32", (1,)),
        f"{name}.weight_scale": ("F8_E4M3", (rows, columns // 16)),
    }


def _mxfp4(name: str, rows: int, columns: int) -> dict:
    return {
        f"{name}.weight_packed": ("U8", (rows, columns // 2)),
        f"{name}.weight_scale": ("U8", (rows, columns // 32)),
    }


def _nf4(name: str, rows: int, columns: int) -> dict:
    n = rows * columns
    return {
        f"{name}.weight": ("U8", (n // 2, 1)),
        f"{name}.weight.absmax": ("U8", (n // 64,)),
        f"{name}.weight.quant_map": ("F32", (16,)),
        f"{name}.weight.nested_absmax": ("F32", (-(-n // 64 // 256),)),
        f"{name}.weight.nested_quant_map": ("F32", (256,)),
        f"{name}.weight.quant_state.bitsandbytes__nf4": ("U8", (len(_state(rows, columns)),)),
    }


def _state(rows: int, columns: int) -> bytes:
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [rows, columns]}
    return json.dumps(
        {**state, "nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.1}
    ).encode()


def _int8(name: str, rows: int, columns: int) -> dict:
    return {f"{name}.weight": ("I8", (rows, columns)), f"{name}.weight_scale": ("BF16", (rows, 1))}


def _compressed(format: str, **weights) -> dict:
    group = {
        "targets": ["Linear"],
        "weights": {"type": "int", "symmetric": True, **weights},
        "input_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
    }


QUANTIZED: dict[str, tuple[dict, Callable]] = {
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False},
        _gptq,
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, _awq),
    "packed": (_compressed("pack-quantized", num_bits=4, group_size=32), _packed),
    "int8": (_compressed("int-quantized", num_bits=8, strategy="channel"), _int8),
    "blocks": (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"},
        _blocks,
    ),
    "nvfp4": (
        _compressed(
            "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16
        ),
        _nvfp4,
    ),
    "mxfp4": (
        _compressed(
            "mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32
        ),
        _mxfp4,
    ),
    "nf4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        _nf4,
    ),
}
SIZES = {
    "F8_E4M3": 1,
    "F64": 8,
    "I64": 8,
    "F32": 4,
    "I32": 4,
    "F16": 2,
    "BF16": 2,
    "I8": 1,
    "U8": 1,
}


def _requantize(folder: Path, hf: dict, parts: Callable) -> None:
    """In place of the matrices of the blocks, tensors of that layout with arbitrary words."""
    header, data = read_safetensors(folder / "model.safetensors")
    tensors = {
        name: (how["dtype"], how["shape"], data[slice(*how["data_offsets"])])
        for name, how in header.items()
    }
    rng = random.Random(0)
    for name in [name for name in tensors if "_proj.weight" in name]:
        rows, columns = tensors.pop(name)[1]
        for part, (dtype, shape) in parts(name.removesuffix(".weight"), rows, columns).items():
            tensors[part] = (dtype, shape, _values(part, dtype, shape, rows, columns, rng))
    header, offset = {}, 0
    for name, (dtype, shape, values) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [offset, offset := offset + len(values)],
        }
    data = b"".join(values for _, _, values in tensors.values())
    write_safetensors(folder / "model.safetensors", json.dumps(header).encode(), data)
    (folder / "config.json").write_text(json.dumps(hf))


def _values(
    part: str, dtype: str, shape: tuple, rows: int, columns: int, rng: random.Random
) -> bytes:
    count = 1
    for size in shape:
        count *= size
    if part.endswith("g_idx"):
        return struct.pack(f"<{count}i", *(i // 32 for i in range(columns)))
    if part.endswith("weight_shape"):
        return struct.pack("<2q", rows, columns)
    if part.endswith("bitsandbytes__nf4"):
        return _state(rows, columns)
    if dtype == "F32":
        return struct.pack(f"<{count}f", *(rng.uniform(0.01, 0.02) for _ in range(count)))
    if dtype == "F8_E4M3":
        return bytes(rng.randrange(0x30, 0x38) for _ in range(count))  # 0.5 to 0.9
    if dtype == "U8" and part.endswith("weight_scale"):
        return bytes([120]) * count  # E8M0's 2^-7
    if part.endswith(("scales", "weight_scale")):
        return (b"\x00\x20" if dtype == "F16" else b"\x00\x3c") * count  # 2^-7
    return rng.randbytes(count * SIZES[dtype])


def read_safetensors(file: Path) -> tuple[dict, bytes]:
    """(header without metadata, data); the format is a length in 8 bytes, a JSON header, the
    tensors' bytes."""
    stored = file.read_bytes()
    length = struct.unpack("<Q", stored[:8])[0]
    header = json.loads(stored[8 : 8 + length])
    header.pop("__metadata__", None)
    return header, stored[8 + length :]


def write_safetensors(file: Path, header: bytes, data: bytes, length: int | None = None) -> None:
    file.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)


# --------------------------------------------------------------------------------- how they break

NUMBERS = [
    "0",
    "-1",
    "1",
    "2",
    "3",
    "7",
    "1.5",
    "-0.0",
    "64.0",
    "1e-320",
    "1e308",
    "1e999",
    "-1e999",
    "NaN",
    "Infinity",
    "-Infinity",
    "16777216",
    "16777217",
    "2147483648",
    "4294967296",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551616",
    "1e15",
    "1" + "0" * 400,
    "-1" + "0" * 400,
    "1" * 5000,
]
VALUES = [
    *NUMBERS,
    "null",
    "true",
    "false",
    '""',
    '"x"',
    '"\\ud800"',
    '"\\u0000"',
    '"a\\nb"',
    "[]",
    "{}",
    "[null]",
    '[""]',
    "[[]]",
    '{"a": 1}',
    '["int8"]',
    '{"content": []}',
    '"' + "y" * 100_000 + '"',
    "[" * 300 + "]" * 300,
    "[" * 990 + "]" * 990,
    '{"a":' * 400 + "1" + "}" * 400,
    "[" + "1," * 30_000 + "1]",
    '"../x"',
    '"silu"',
    '"linear"',
    '"llama3"',
    '"yarn"',
    '"default"',
    '"mistral"',
    '"qwen2"',
    '"qwen3"',
    '"sliding_attention"',
    '"int8"',
    '"gptq"',
    '"fp8"',
    '"bitsandbytes"',
    '"nf4"',
    "[128, 128]",
    '"mxfp8-quantized"',
]
MARK = "\u2603"  # where a raw value goes, once json has written the rest

KEYS = [
    *NEUTRAL,
    "quantization",
    "quantization_config",
    "scheme",
    "head",
    "kept",
    "head_dim",
    "sliding_window",
    "layer_types",
    "max_window_layers",
    "use_sliding_window",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "attention_bias",
    "mlp_bias",
    "no_rope_layers",
    "torch_dtype",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
    "truncate",
    "low_freq_factor",
    "high_freq_factor",
    "type",
    "added_tokens",
    "chat_template",
    "additional_special_tokens",
    "legacy",
    "decoder",
    "normalizer",
    "post_processor",
    "bos_token",
]


def nodes(value: object, path: tuple = ()) -> list[tuple]:
    """The path of every value inside a JSON value; at most a hundred of one list or object."""
    inside = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [
        found
        for key, part in list(inside)[:100]
        for found in [(*path, key), *nodes(part, (*path, key))]
    ]


def holder(value, path: tuple):
    for key in path[:-1]:
        value = value[key]
    return value


def break_json(rng: random.Random, file: Path, under: tuple = ()) -> str:
    """One to three values replaced, removed, renamed, moved or added; perhaps a key twice."""
    value, done, raw = json.loads(file.read_text()), [], {}
    for number in range(rng.choice((1, 1, 1, 2, 3))):
        paths = [path for path in nodes(value) if path[: len(under)] == under]
        if not paths:
            break
        path, how = (
            rng.choice(paths),
            rng.choice(("set", "set", "set", "number", "remove", "add", "copy", "rename")),
        )
        inside = holder(value, path)
        if how == "remove":
            del inside[path[-1]]
        elif how == "copy":
            other = rng.choice(paths)
            inside[path[-1]] = json.loads(json.dumps(holder(value, other)[other[-1]]))
        elif how == "rename" and isinstance(inside, dict):
            inside[rng.choice((str(path[-1]) + "_", "", "\0", "\ud800"))] = inside.pop(path[-1])
        else:
            key = rng.choice(KEYS) if how == "add" and isinstance(inside, dict) else path[-1]
            raw[f"{MARK}{number}{MARK}"] = text = rng.choice(NUMBERS if how == "number" else VALUES)
            inside[key], path = f"{MARK}{number}{MARK}", (*path[:-1], key)
            how += f" {text[:60]}"
        done.append(f"{'.'.join(map(str, path))}: {how}")
    text = json.dumps(value)
    for mark, of in raw.items():
        text = text.replace(json.dumps(mark), of)
    if rng.random() < 0.05 and text.startswith("{"):
        key = rng.choice(sorted(value) or ["a"])
        text = f"{text[:-1]}{', ' if value else ''}{json.dumps(key)}: {rng.choice(VALUES)}}}"
        done.append(f"{key} twice")
    file.write_text(text)
    return f"{file.name}: {'; '.join(done)}"


def break_bytes(rng: random.Random, file: Path) -> str:
    """Bytes changed, cut, repeated, cut off or appended."""
    data, done = bytearray(file.read_bytes()), []
    near = rng.choice((40, 400, len(data)))  # headers are in front
    for _ in range(rng.choice((1, 1, 2, 8))):
        at, how = (
            rng.randrange(min(near, len(data)) or 1),
            rng.choice(("flip", "set", "cut", "repeat", "end", "append")),
        )
        if how == "flip" and data:
            data[at] ^= 1 << rng.randrange(8)
        elif how == "set":
            data[at : at + 4] = rng.choice(
                (b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x80", b'"', b"{", b"\n", b"\xed\xa0\x80")
            )
        elif how == "cut":
            del data[at : at + rng.choice((1, 8, 100))]
        elif how == "repeat":
            data[at:at] = data[at : at + rng.choice((1, 8, 100))]
        elif how == "end":
            del data[rng.randrange(len(data) + 1) :]
        else:
            data += rng.choice((b"\0", b"}", b" ", rng.randbytes(50)))
        done.append(f"{how} at {at}")
    file.write_bytes(data)
    return f"{file.name}: bytes: {', '.join(done)}"


def break_file(rng: random.Random, file: Path) -> str:
    """Another kind of thing under the file's name."""
    how = rng.choice(
        (
            "missing",
            "empty",
            "folder",
            "fifo",
            "loop",
            "nowhere",
            "device",
            "huge",
            "link",
            "unreadable",
        )
    )
    if how == "huge":
        os.truncate(file, 4 * 2**30)  # sparse: zeros behind what there was
        return f"{file.name}: 4 GiB long"
    content = file.read_bytes()
    file.unlink()
    if how == "empty":
        file.write_bytes(b"")
    elif how == "folder":
        file.mkdir()
    elif how == "fifo":
        os.mkfifo(file)
    elif how in ("loop", "nowhere", "device"):
        file.symlink_to(
            {"loop": file, "nowhere": file.parent / "none", "device": Path("/dev/zero")}[how]
        )
    elif how == "link":  # as in Hugging Face's cache: nothing is wrong with it
        (file.parent.parent / "blobs").mkdir()
        (file.parent.parent / "blobs" / "0").write_bytes(content)
        file.symlink_to("../blobs/0")
    elif how == "unreadable":
        file.write_bytes(content)
        file.chmod(0)
    return f"{file.name}: {how}"


def any_break(rng: random.Random, file: Path, under: tuple = ()) -> str:
    chosen = rng.random()
    if chosen < 0.7 and file.suffix == ".json":
        return break_json(rng, file, under)
    return break_file(rng, file) if chosen > 0.97 else break_bytes(rng, file)


def break_config(rng: random.Random, folder: Path) -> str:
    hf = json.loads((folder / "config.json").read_text())
    if rng.random() < 0.5:  # other families and stretchings, before it breaks
        hf["model_type"] = rng.choice(("mistral", "qwen2", "qwen3", "llama"))
        hf["rope_scaling"] = rng.choice(
            (
                None,
                {"type": "linear", "factor": 2.0},
                hf["rope_scaling"],
                {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 24,
                },
            )
        )
        (folder / "config.json").write_text(json.dumps(hf))
    return any_break(rng, folder / "config.json", () if rng.random() < 0.7 else ("rope_scaling",))


FIELDS = (0, 1, 2, 7, 31, 32, 33, 255, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1)


def break_gguf(rng: random.Random, folder: Path) -> str:
    """Numbers of the header, above all those behind a name: types, counts, lengths, sizes, values,
    offsets."""
    file = folder / "m.gguf"
    if rng.random() < 0.2:
        return any_break(rng, file)
    data, done = bytearray(file.read_bytes()), []
    names = [
        found
        for found in re.finditer(rb"[a-z0-9_]+(?:\.[a-z0-9_]+)+", data[:60_000])
        if len(found[0]) > 8
    ]
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        name, how = (
            rng.choice(names),
            rng.choice(("number", "number", "wide", "name", "swap", "length", "begin", "text")),
        )
        at = name.end() + rng.choice((0, 4, 4, 8, 12, 16, 20))
        if how == "begin":
            at = rng.choice((4, 8, 16))
        if how in ("number", "begin"):
            struct.pack_into(
                "<I", data, at, rng.choice((*FIELDS, rng.getrandbits(32), rng.randrange(40)))
            )
        elif how == "wide":
            struct.pack_into(
                "<Q",
                data,
                at,
                rng.choice((*FIELDS, 2**40, 2**62, 2**63, 2**64 - 1, rng.getrandbits(64))),
            )
        elif how == "length":
            struct.pack_into(
                "<Q", data, name.start() - 8, rng.choice((*FIELDS, len(name[0]) + 1, 2**40, 2**63))
            )
        elif how == "name":
            data[rng.randrange(*name.span())] = rng.randrange(256)
        elif how == "swap":
            other = rng.choice(names)[0]
            data[name.start() : name.start() + len(other)] = other
        else:  # a token, a merge, a score
            data[rng.randrange(len(data) // 2)] = rng.randrange(256)
        done.append(f"{name[0].decode()} {how} at {at}")
    file.write_bytes(data)
    return ", ".join(done)


def break_safetensors(rng: random.Random, folder: Path) -> str:
    file = rng.choice(sorted(folder.glob("*.safetensors")))
    if rng.random() < 0.3:
        return any_break(rng, file)
    header, data = read_safetensors(file)
    if rng.random() < 0.2:
        length = rng.choice((0, 1, 7, 2**31, 2**40, 2**63, 2**64 - 1, len(data), len(data) * 2))
        write_safetensors(file, json.dumps(header).encode(), data, length)
        return f"{file.name}: header length {length}"
    name, other = rng.choice(sorted(header)), rng.choice(sorted(header))
    how, done = (
        header[name],
        rng.choice(("dtype", "shape", "offsets", "swap", "name", "twice", "json", "data")),
    )
    begin, end = how["data_offsets"]
    if done == "dtype":
        how["dtype"] = rng.choice(
            ("F64", "F32", "BF16", "F16", "I64", "I8", "U8", "BOOL", "F8_E4M3", "F4", "C64", "", 7)
        )
    elif done == "shape":
        n = max(how["shape"], default=1)
        how["shape"] = rng.choice(
            (
                [],
                [0],
                how["shape"][::-1],
                [n, -1],
                [2**32, 2**32],
                [2**63, 2],
                [n] * 9,
                [1, n],
                [0, 2**62],
                [1.5],
                ["1"],
                None,
                [*how["shape"], 1],
            )
        )
    elif done == "offsets":
        how["data_offsets"] = rng.choice(
            (
                [begin, end + 8],
                [end, begin],
                [begin - 4, end - 4],
                [0, len(data) * 2],
                [2**63, 2**64 - 1],
                [begin],
                [begin + 4, end],
                [-8, end],
                [0, end],
                header[other]["data_offsets"],
                [0, 0],
                [begin, 2**64],
            )
        )
    elif done == "swap":
        header[name], header[other] = header[other], header[name]
    elif done == "name":
        header[rng.choice(("", "\0", "\ud800", "a" * 10**6, "../x", name + "_", "x.inv_freq"))] = (
            header.pop(name)
        )
    elif done == "data":  # weights that are no numbers, or all different ones
        values = rng.choice(
            (b"\xff\xff\xc0\x7f", b"\0\0\x80\x7f", b"\xff" * 4, rng.randbytes(4))
        ) * (end - begin)
        data = data[:begin] + values[: end - begin] + data[end:]
    text = json.dumps(header)
    if done == "twice":
        text = f"{text[:-1]}, {json.dumps(name)}: {json.dumps(header[other])}}}"
    elif done == "json":
        write_safetensors(file, text.encode(), data)
        (folder / "header.json").write_text(text)
        done = break_json(rng, folder / "header.json")
        text = (folder / "header.json").read_text()
        (folder / "header.json").unlink()
    write_safetensors(file, text.encode("utf-8", "surrogatepass") + b" " * rng.randrange(3), data)
    return f"{file.name}: {name}: {done} {how}"[:300]


ESCAPES = [
    "../x.safetensors",
    "../../x.safetensors",
    "sub/../../x.safetensors",
    "/tmp/x.safetensors",
    "./../x.safetensors",
    "..",
    ".",
    "",
    "/",
    "..\\x.safetensors",
    "file:///tmp/x.safetensors",
    "~/x.safetensors",
    "x.bin",
    "\0.safetensors",
    "a" * 300 + ".safetensors",
    "\ud800.safetensors",
    "model-00001-of-00003.safetensors/../../x.safetensors",
    "*.safetensors",
]


def break_index(rng: random.Random, folder: Path) -> str:
    file = folder / "model.safetensors.index.json"
    if rng.random() < 0.5:
        return any_break(rng, file)
    index = json.loads(file.read_text())
    name = rng.choice(sorted(index["weight_map"]))
    # what an escape would find
    shutil.copy(folder / index["weight_map"][name], folder.parent / "x.safetensors")
    escape = rng.choice(ESCAPES)
    index["weight_map"] = {
        key: escape if key == name or value == index["weight_map"][name] else value
        for key, value in index["weight_map"].items()
    }
    file.write_text(json.dumps(index))
    return f"{file.name}: {name} in {escape[:60]!r}; must be refused"


def fields(data: bytes) -> list[bytes]:
    """A protobuf message's fields, each with its tag: of sentencepiece's, the pieces and the
    settings."""

    def varint(at: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            value |= (data[at] & 127) << shift
            at, shift = at + 1, shift + 7
            if data[at - 1] < 128:
                return value, at

    found, at = [], 0
    while at < len(data):
        tag, after = varint(at)
        if tag & 7 == 2:
            length, after = varint(after)
            after += length
        elif tag & 7 == 0:
            _, after = varint(after)
        else:
            after += 8 if tag & 7 == 1 else 4
        found.append(data[at:after])
        at = after
    return found


def break_sentencepiece(rng: random.Random, file: Path) -> str:
    parts = fields(file.read_bytes())
    settings = [i for i, part in enumerate(parts) if part[0] != 0x0A]  # all but the pieces
    done = []
    for _ in range(rng.choice((1, 1, 3))):
        at = rng.choice(settings) if settings and rng.random() < 0.4 else rng.randrange(len(parts))
        how = rng.choice(("drop", "twice", "byte", "byte", "swap", "kind"))
        part = bytearray(parts[at])
        if how == "byte" and len(part) > 2:
            part[rng.randrange(2, len(part))] = rng.choice(
                (0, 1, 2, 3, 6, 127, 128, 255, rng.randrange(256))
            )
        elif how == "kind" and len(part) < 100 and part[:1] == b"\n":
            part = bytearray(
                bytes([0x0A, part[1] + 2]) + part[2:] + bytes([0x18, rng.randrange(8)])
            )
        elif how == "swap":
            other = rng.randrange(len(parts))
            part, parts[other] = bytearray(parts[other]), bytes(part)
        parts[at] = b"" if how == "drop" else bytes(part) * (1 + (how == "twice"))
        done.append(f"field {at}: {how}")
    file.write_bytes(b"".join(parts))
    return f"{file.name}: {', '.join(done)}"


def break_ranks(rng: random.Random, file: Path) -> str:
    lines = file.read_text().splitlines()
    at, how = (
        rng.randrange(len(lines)),
        rng.choice(("drop", "rank", "token", "twice", "line", "renumber", "drop one")),
    )
    token, rank = lines[at].split()
    lines[at] = {
        "drop": "",
        "rank": f"{token} {rng.choice((-1, 0, 10**30, 2**32, 2**31, 'x', 1.5))}",
        "token": f"{rng.choice(('', '=', 'AAAA', 'YQ', 'é', 'YQ=='))} {rank}",
        "twice": f"{lines[at]}\n{lines[at]}",
        "line": rng.choice(("\0", "a b c", " ", "\ud7ff", "x" * 10**6)),
        "renumber": lines[at],
        "drop one": lines[at],
    }[how]
    if how in ("renumber", "drop one"):
        tokens = [line.split()[0] for line in lines]
        del tokens[rng.choice((at, len(tokens) - 1))]
        if how == "renumber":
            rng.shuffle(tokens)
        lines = [f"{token} {rank}" for rank, token in enumerate(tokens)]
    file.write_text("\n".join(lines))
    return f"{file.name}: line {at}: {how}"


def rich_tokenizer(rng: random.Random, file: Path) -> str:
    """A tokenizer.json with parts of the library that few folders use, some of them hostile."""
    value = json.loads(file.read_text())
    one_of = rng.choice
    times, content = one_of((1, 5)), "a" * one_of((1, 3))
    replace = {"type": "Replace", "pattern": {"String": "a"}, "content": content}
    hard = (
        "",
        "(x+x+)+y",
        "(",
        "\\b",
        "(?=a)*",
        "(a*)*b",
        "(?:(?:a+)+)+$",
        ".",
        "(.*)*z",
        "(x|xx)+y",
    )
    pattern = {"Regex": one_of(hard)}
    unigram, words = (
        one_of(([], [["a", -1.0]], [["", 0.0]])),
        one_of(({}, {"a": 2**32 - 1}, {"<s>": 7})),
    )
    begin = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    beyond = {"<s>": {"id": "<s>", "ids": [10**6], "tokens": ["<s>"]}}
    part, given = one_of(
        [
            ("normalizer", {"type": "Sequence", "normalizers": [replace] * times}),
            ("normalizer", {"type": "Replace", "pattern": pattern, "content": "a"}),
            ("normalizer", {"type": "Precompiled", "precompiled_charsmap": ""}),
            ("normalizer", {"type": "Prepend", "prepend": "x" * one_of((0, 1, 9))}),
            (
                "pre_tokenizer",
                {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": times == 1},
            ),
            (
                "pre_tokenizer",
                {
                    "type": "Metaspace",
                    "replacement": one_of(("_", "", "__")),
                    "prepend_scheme": "always",
                },
            ),
            ("pre_tokenizer", None),
            ("decoder", None),
            ("decoder", {"type": "Fuse"}),
            ("decoder", {"type": "ByteFallback"}),
            ("model", {"type": "Unigram", "unk_id": one_of((None, 0, 99)), "vocab": unigram}),
            (
                "model",
                {
                    "type": "WordPiece",
                    "unk_token": "[UNK]",
                    "vocab": {"a": 0},
                    "continuing_subword_prefix": "##",
                    "max_input_chars_per_word": 100,
                },
            ),
            ("model", {"type": "WordLevel", "unk_token": "<s>", "vocab": words}),
            (
                "post_processor",
                {
                    "type": "TemplateProcessing",
                    "single": one_of(([], [begin])),
                    "pair": [],
                    "special_tokens": one_of(({}, beyond)),
                },
            ),
            (
                "truncation",
                {"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 5},
            ),
            (
                "padding",
                {
                    "strategy": {"Fixed": 2**40},
                    "direction": "Left",
                    "pad_to_multiple_of": None,
                    "pad_id": 0,
                    "pad_type_id": 0,
                    "pad_token": "x",
                },
            ),
        ]
    )
    value[part] = given
    file.write_text(json.dumps(value))
    return f"{file.name}: {part} = {json.dumps(given)[:150]}"


def break_tokenizer(rng: random.Random, folder: Path) -> str:
    file = folder / rng.choice(
        ("tokenizer_config.json", "generation_config.json", *("tokenizer",) * 3)
    )
    if file.name == "tokenizer":
        file = next(
            file for file in folder.iterdir() if file.name in ("tokenizer.model", "tokenizer.json")
        )
    if rng.random() < 0.1:
        names = {
            "added_tokens.json": {"<tool>": 500},
            "special_tokens_map.json": {"bos_token": "<s>"},
        }
        file = folder / rng.choice(sorted(names))
        file.write_text(json.dumps(names[file.name]))
    if file.name == "tokenizer.json" and rng.random() < 0.3:
        return rich_tokenizer(rng, file)
    if file.suffix == ".model" and rng.random() < 0.6:
        return (break_ranks if folder.name == "tiktoken" else break_sentencepiece)(rng, file)
    return any_break(rng, file)


TEMPLATES = [
    "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{{ " + "-" * 5000 + "1 }}",
    "{% if 1 %}" * 300 + "{% endif %}" * 300,
    "{% for a in messages %}" * 25 + "{% endfor %}" * 25,
    "{{ raise_exception('a\nb' * 5000) }}",
    "{{ strftime_now('\ud800\0') }}",
    "{{ messages[99].content.x }}",
    "{{ 1 // 0 }}",
    "{{ messages | groupby('a.b.c.d') }}",
    "{{ bos_token() }}",
    "{{ x is divisibleby 0 }}",
    "{% break %}",
    "{% generation %}",
    "{% set messages = messages + messages %}{{ messages }}",
    "{{ '\\ud800' }}",
    "{{ '\ufdd00\ufdd1' }}",
    "{{ '\\0' }}",
    "{{ bos_token * 5000 }}",
    "{{ debug() }}",
    "{{ messages | map('attr', '__class__') | list }}",
    "{{ [].__class__.__base__.__subclasses__()[80] }}",
    "{{ messages.append(1) }}",
    "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{{ 'a' | wordwrap(0) }}",
    "{{ ' ' | title | xmlattr }}",
    "{{ 'x' | filesizeformat }}",
    "{{ dict(a=1).items() | sum }}",
    '{{ "%s" | format(1, 2) }}',
]
SNIPPETS = [
    "{%",
    "%}",
    "{{",
    "}}",
    "{#",
    "|",
    "(",
    ")",
    "[",
    "~",
    " for ",
    " if ",
    "loop",
    "''",
    "endfor",
    "set",
    "\0",
    "messages",
    "namespace",
    "range(9)",
    ".content",
    "{% endfor %}",
    "is not",
    "tojson",
    "\ud7ff",
    "not ",
    "{%- raw %}",
]


def break_template(rng: random.Random, folder: Path) -> str:
    source = rng.choice(TEMPLATES)
    if rng.random() < 0.6:
        source = TEMPLATE if rng.random() < 0.5 else source
        for _ in range(rng.choice((1, 2, 5))):
            at = rng.randrange(len(source))
            source = source[:at] + rng.choice(SNIPPETS) + source[at + rng.choice((0, 0, 1, 5)) :]
    if rng.random() < 0.5:
        (folder / "chat_template.jinja").write_bytes(source.encode("utf-8", "surrogatepass"))
    else:
        (folder / "tokenizer_config.json").write_text(
            json.dumps(SETTINGS | {"chat_template": source})
        )
    return f"template: {source[:200]!r}"


def break_quantized(rng: random.Random, folder: Path) -> str:
    if rng.random() < 0.65:
        return break_json(rng, folder / "config.json", ("quantization_config",))
    return break_safetensors(rng, folder)


WHOLE = ("sentencepiece", "tokenizers", "tiktoken")
ATTACKS: dict[str, tuple[Callable, tuple[str, ...]]] = {  # kind -> (what is done, to which folders)
    "config": (break_config, (*WHOLE, "sharded")),
    "safetensors": (break_safetensors, (*WHOLE, "sharded")),
    "index": (break_index, ("sharded",)),
    "tokenizer": (break_tokenizer, WHOLE),
    "template": (break_template, WHOLE),
    "quantization_config": (break_quantized, tuple(QUANTIZED)),
    "gguf": (break_gguf, ("gguf-sentencepiece", "gguf-bpe")),
}


def kind_of(seed: int, number: int, kind: str | None) -> str:
    return kind or random.Random(f"{seed}:{number}").choice(sorted(ATTACKS))


def make_case(
    seed: int, number: int, kind: str | None, folders: dict[str, Path], root: Path
) -> tuple[Path, str, str]:
    """(the broken folder, its kind, what was done), in an empty `root`."""
    rng, kind = random.Random(f"{seed}:{number}:"), kind_of(seed, number, kind)
    attack, names = ATTACKS[kind]
    name = rng.choice(names)
    folder = shutil.copytree(folders[name], root / name)
    return folder, kind, f"{name}: {attack(rng, folder)}"


# ------------------------------------------------------------------------------- what comes of it


def attempt(folder: Path) -> dict[str, str]:
    """Step -> "", or the message with which it was refused. Whatever else is raised goes
    through."""
    found: dict[str, str] = {}
    folder = folder / "m.gguf" if (folder / "m.gguf").exists() else folder

    def step(name: str, run: Callable):
        try:
            result = run()
        except UserError as error:
            found[name] = str(error)
            named = str(folder) in found[name] or name in ("chat", "generate")
            if "\n" in found[name] or len(found[name]) > LONGEST_LINE or not named:
                raise AssertionError(
                    f"{name}: a message that is not one line with a name: {error!r:.300}"
                ) from error
            return None
        found[name] = ""
        return result

    step("config", lambda: load_config(folder))
    tokenizer = step("tokenizer", lambda: load_tokenizer(folder))
    model = step("model", lambda: load_model(folder, dtype=torch.float32))
    if tokenizer is not None:
        ids = step("encode", lambda: tokenizer.encode(TEXT))
        if ids is not None:
            step("decode", lambda: tokenizer.decode([*ids, V]))
        step("chat", lambda: tokenizer.chat(MESSAGES))
    if model is not None:
        check_weights(model, folder)
        stop_ids = tokenizer.stop_ids if tokenizer else ()

        def run():
            return list(
                Engine(model, 1, 4).generate(
                    [[1, 5]], sampling=Sampling(0), max_new_tokens=2, stop_ids=stop_ids
                )
            )

        step("generate", run)
    return found


def check_weights(model: Transformer, folder: Path) -> None:
    """Every matrix in full precision holds the bytes of the file, which is read here without any
    library."""
    tensors = {}
    for file in folder.glob("*.safetensors"):
        header, data = read_safetensors(file)
        for name, how in header.items():
            tensors[name] = how["dtype"], data[slice(*how["data_offsets"])]
    for name, parameter in model.named_parameters():
        if not name.endswith((".weight", ".bias")):
            continue
        for source, part in pieces(model.config, name, parameter):
            dtype, stored = tensors.get(source, (None, b""))
            if dtype == "F32" and part.contiguous().numpy().tobytes() != stored:
                raise AssertionError(f"{source} is not what the file holds")


# ------------------------------------------------------------------------------------ under watch

inside: Path | None = None  # the folder under attack, while one is
breaches: list[str] = []
FORBIDDEN = (
    "os.rename",
    "os.remove",
    "os.mkdir",
    "os.link",
    "os.symlink",
    "os.system",
    "os.exec",
    "os.spawn",
    "os.posix_spawn",
    "os.truncate",
    "os.chmod",
    "socket.connect",
    "pickle.find_class",
    "shutil.",
)
OWN = (str(ROOT), sys.prefix, sys.base_prefix)  # code lies here; it may still be imported


def made(path: str) -> bool:
    """Is this where the vocabulary of a GGUF file is written, to be read by its library?"""
    return path.startswith(os.path.join(tempfile.gettempdir(), "quickdraft-")) and ".." not in path


def watch(event: str, args: tuple) -> None:
    """An audit hook: what Python does to files, processes and code while a folder is loaded."""
    if inside is None:
        return
    if event == "open" and isinstance(args[0], str | bytes):
        path = os.path.abspath(os.fsdecode(args[0]))
        code = path.startswith(OWN) and path.endswith((".py", ".pyc", ".so"))
        reading = not (args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        shown = path.endswith("<template>")  # Python looks for the line of a SyntaxError
        inner = path.startswith(f"{inside}{os.sep}")
        if not (reading and (inner or code or shown)) and path != os.devnull and not made(path):
            breaches.append(f"open {path} {args[1]}")
    elif event == "exec":
        jinja = ("<template>", "<unknown>")
        if not args[0].co_filename.startswith((*OWN, "<frozen", "<string>", *jinja)):
            breaches.append(f"exec {args[0].co_filename}")
    elif (
        event.startswith(FORBIDDEN)
        and not made(str(args[0]))
        and not (event == "os.remove" and args[1] != -1)
    ):
        breaches.append(f"{event} {args}"[:200])


def listing(root: Path) -> list:
    return sorted(
        (str(file), os.lstat(file).st_size, os.lstat(file).st_mtime_ns) for file in root.rglob("*")
    )


def one_case(seed: int, number: int, kind: str | None, folders: dict[str, Path]) -> dict:
    """{"kind", "done", "refused": step -> message, "failure": what went wrong or None}"""
    global inside
    root = Path(tempfile.mkdtemp(dir=folders["gptq"].parent.parent))
    folder, kind, done = make_case(seed, number, kind, folders, root)
    before, peak, failure, found = (
        listing(root),
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        None,
        {},
    )
    breaches.clear()
    inside, start = folder, time.perf_counter()
    try:
        found = attempt(folder)
    except BaseException as error:  # a panic of a library in Rust is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        failure = f"{type(error).__name__}: {str(error)[:300]}"
    seconds, inside = time.perf_counter() - start, None
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024
    if "must be refused" in done and not failure and not found.get("model"):
        failure = "a file outside the folder was loaded"
    failure = (
        failure
        or (breaches[0] if breaches else None)
        or ("files changed" if listing(root) != before else None)
    )
    failure = failure or ("code was run" if (root.parent / "pwned").exists() else None)
    failure = failure or (f"{seconds:.1f} s" if seconds > CASE_S else None)
    failure = failure or (f"{grown / 2**20:.0f} MB" if grown > CASE_BYTES else None)
    shutil.rmtree(root)
    refused = {step: message for step, message in found.items() if message}
    return {
        "number": number,
        "kind": kind,
        "done": done,
        "refused": refused,
        "failure": failure,
        "seconds": seconds,
    }


class Worker:
    """A process that runs case after case under limits. A case that ends it costs only that one."""

    def __init__(self, numbers: Iterable[int], run: Callable[[int], dict]):
        self.waiting, self.run = collections.deque(numbers), run
        self.start()

    def start(self) -> None:
        reader, writer = os.pipe()
        self.pid, self.answers = os.fork(), os.fdopen(reader)
        if not self.pid:
            try:
                self.work(os.fdopen(writer, "w"))
            finally:
                os._exit(1)
        os.close(writer)

    def work(self, answers) -> None:
        """Within 1 GB beyond what is there."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        size = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (size + 2**30,) * 2)
        sys.addaudithook(watch)
        for number in self.waiting:
            signal.alarm(int(CASE_S) + 5)  # which no library holds back
            print(json.dumps(self.run(number)), file=answers, flush=True)
        os._exit(0)

    def result(self) -> dict:
        """What came of the next case. A worker that died or hangs is replaced."""
        answer, number = self.answers.readline(), self.waiting.popleft()
        if answer:
            return json.loads(answer)
        # -14: a hang
        how = f"the process ended with {os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])}"
        self.start()
        return {
            "number": number,
            "kind": "?",
            "done": "?",
            "refused": {},
            "failure": how,
            "seconds": CASE_S,
        }


def fuzz(cases: Sequence[int], seed: int, kind: str | None = None, workers: int = 2) -> dict:
    """The summary that is printed."""
    start, results = time.monotonic(), []
    torch.set_num_threads(1)  # a pool's threads are not copied
    # where a hostile one would write
    with tempfile.TemporaryDirectory(prefix="fuzz-") as root, contextlib.chdir(root):
        (Path(root) / "good").mkdir()
        folders = build(Path(root) / "good")
        for folder in folders.values():
            assert not any(attempt(folder).values()), attempt(folder)
        run = lambda number: one_case(seed, number, kind, folders)  # noqa: E731
        running = [Worker(cases[part::workers], run) for part in range(min(workers, len(cases)))]
        while running := [worker for worker in running if worker.waiting]:
            for ready in multiprocessing.connection.wait([worker.answers for worker in running]):
                results.append(
                    next(worker for worker in running if worker.answers is ready).result()
                )
    failed = sorted(
        (found for found in results if found["failure"]), key=lambda found: found["number"]
    )
    fine = [found for found in results if not found["failure"]]
    refused = collections.Counter(found["kind"] for found in fine if found["refused"])
    return {
        "seed": seed,
        "cases": len(results),
        "loaded": sum(not found["refused"] for found in fine),
        "refused": dict(sorted(refused.items())),
        "seconds": round(time.monotonic() - start, 1),
        "slowest_s": round(max((found["seconds"] for found in results), default=0), 2),
        "failures": failed,
    }


def replay(seed: int, number: int, kind: str | None) -> dict:
    """One case in this process: a crash or a hang is there to be seen."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as root:
        (Path(root) / "good").mkdir()
        return one_case(seed, number, kind, build(Path(root) / "good"))


def main() -> None:
    parser = Parser(
        description="Break folders, and see that each loads rightly or is refused in one line."
    )
    add = parser.add_argument
    add("--cases", type=positive, default=1000)
    add("--first", type=int, default=0, metavar="N", help="the number of the first case")
    add("--seed", type=int, default=0)
    add("--kind", choices=sorted(ATTACKS), help="only this kind")
    add("--workers", type=positive, default=2, help="processes")
    add(
        "--case",
        type=int,
        metavar="N",
        help="only this one, in this process, and all that is known of it",
    )
    add("--write", type=Path, metavar="FILE", help="results as JSON")
    args = parser.parse_args()
    with exit_on_error():
        if args.case is not None:
            found = replay(args.seed, args.case, args.kind)
        else:
            found = fuzz(
                range(args.first, args.first + args.cases), args.seed, args.kind, args.workers
            )
        print(json.dumps(found))
        if args.write:
            record(args.write, found)
    sys.exit(1 if found.get("failures") or found.get("failure") else 0)


if __name__ == "__main__":
    main()
