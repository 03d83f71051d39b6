"""GGUF files, llama.cpp's: keys and tensors, all checked before the first weight is copied.

    is_gguf       does a file begin like one?
    open_file     its keys and tensors;  parts_of  the files of a model that is split
    Blocks        one tensor in the mapped file: its weights, or the parts of our format that holds them bit for bit
    Tensors       a file's tensors by Hugging Face names;  find, reading  as loading/checkpoint.py asks for them

The header is read here: the gguf package's reader believes what a file says of its own sizes, and makes arrays of each
string of a vocabulary, 2 s for SmolLM2. That package does the arithmetic of types that no format of ours holds. In
files of the architecture "llama" the rows of q and k stand in llama.cpp's order, in which the two numbers that RoPE
rotates are neighbours; rows move whole, so quantized ones keep their bits. Format: ggml, docs/gguf.md. What the keys
mean is read in gguf_folder.py.
"""

import collections
import functools
import math
import os
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from loading.chat_templates import one_line
from loading.vocabularies import error_prefix, plain_file
from weights.formats import dequantize_tensor, row_chunks

MAGIC, STRING, ARRAY = b"GGUF", 8, 9
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
MOST_ENTRIES, MOST_STRINGS, LONGEST_NAME, LARGEST_SIZE = 2**16, 2**22, 2**10, 2**32  # real files stay far below

OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
INNER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate",
    "post_attention_norm": "post_attention_layernorm", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj", "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}  # fmt: skip
# All experts of a layer in one tensor, (E, out, in).
EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
OWN = {  # an architecture's own names, in place of these
    "llama": {
        "ffn_gate_inp": "block_sparse_moe.gate", "mlp.experts": "block_sparse_moe.experts", "gate_proj": "w1",
        "up_proj": "w3", "down_proj": "w2",
    },
    "gpt-oss": {"ffn_gate_inp": "mlp.router"},
}  # fmt: skip


class Kind(NamedTuple):
    """A stored type: blocks of so many weights in so many bytes."""

    name: str
    weights: int
    bytes: int
    dtype: torch.dtype | None = None  # of plain floats
    scheme: str | None = None  # of ours that holds it bit for bit


KINDS = {
    0: Kind("F32", 1, 4, torch.float32), 1: Kind("F16", 1, 2, torch.float16), 30: Kind("BF16", 1, 2, torch.bfloat16),
    28: Kind("F64", 1, 8, torch.float64), 2: Kind("Q4_0", 32, 18, None, "q4_1"), 3: Kind("Q4_1", 32, 20, None, "q4_1"),
    8: Kind("Q8_0", 32, 34, None, "q8_0"), 39: Kind("MXFP4", 32, 17, None, "mxfp4"),
}  # fmt: skip


@functools.cache
def kind_of(number: int) -> Kind:
    """ValueError for a type that has no weights, or needs the gguf package where that is missing."""
    if number in KINDS:
        return KINDS[number]
    try:
        import gguf

        kind = gguf.GGMLQuantizationType(number)
        found = Kind(kind.name, *gguf.GGML_QUANT_SIZES[kind])
        gguf.quants.dequantize(numpy.zeros((1, found.bytes), numpy.uint8), kind)
    except ImportError:
        raise ValueError(f"type {number} is read by the gguf package, which is missing: pip install gguf") from None
    except (ValueError, KeyError, NotImplementedError):
        raise ValueError(f"type {number} is not one that weights are read from") from None
    return found


def is_gguf(file: Path) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as stream:
        return stream.read(len(MAGIC)) == MAGIC


# ---------------------------------------------------------------------------------------------- header


class Strings(NamedTuple):
    """An array of strings whose lengths have been checked. A vocabulary is decoded when it is asked for."""

    data: memoryview
    begin: int
    count: int

    def __iter__(self) -> Iterator[str]:
        at = self.begin
        for _ in range(self.count):
            size = int.from_bytes(self.data[at : at + 8], "little")
            yield str(self.data[at + 8 : at + 8 + size], "utf-8")
            at += 8 + size


class Cursor:
    """Reads a header from its beginning on. ValueError where the file ends before what it announces."""

    def __init__(self, data: memoryview):
        self.data, self.at = data, 0

    def take(self, size: int) -> memoryview:
        begin, self.at = self.at, self.at + size
        if self.at > len(self.data):
            raise ValueError(f"the file ends inside its header, after {len(self.data):,} bytes: fetch it again")
        return self.data[begin : self.at]

    def number(self, form: str) -> int | float | bool:
        value = struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))[0]
        return float(str(numpy.float32(value))) if form == "f" else value  # 1e-05, not 9.99999974…e-06

    def count(self, what: str, most: int) -> int:
        value = self.number("Q")
        if value > most:
            raise ValueError(f"its header announces {value:,} {what}; up to {most:,} are read")
        return value

    def string(self, longest: int) -> str:
        return str(self.take(self.count("bytes of a string", longest)), "utf-8")

    def value(self) -> object:
        kind = self.number("I")
        if kind in NUMBERS:
            return self.number(NUMBERS[kind])
        if kind == STRING:
            return self.string(len(self.data))
        if kind != ARRAY:
            raise ValueError(f"there are no values of type {kind}")
        kind, count = self.number("I"), self.count("values", len(self.data))
        if kind in NUMBERS:
            return self.take(count * struct.calcsize(NUMBERS[kind])).cast(NUMBERS[kind])
        if kind != STRING or count > MOST_STRINGS:
            raise ValueError(f"an array of {count:,} values of type {kind} is not read")
        data, begin = self.data, self.at
        at, end = begin, len(data) - 8
        for _ in range(count):
            if at > end:
                break
            at += 8 + int.from_bytes(data[at : at + 8], "little")
        self.take(at - begin if at <= end + 8 else len(data))
        return Strings(data, begin, count)


@dataclass(frozen=True)
class Blocks:
    """One tensor: its bytes in the mapped file, (rows, bytes of a row); of a vector every block is a row."""

    kind: Kind
    shape: tuple[int, ...]
    bytes: Tensor
    heads: int = 0  # whose rows stand in llama.cpp's order; 0: all rows stand in ours

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        """As what `weights` gives it."""
        return self.kind.name if self.kind.dtype else "F32"

    def rows(self) -> Tensor:
        """The bytes, rows in our order."""
        if not self.heads:
            return self.bytes
        pairs = torch.arange(len(self.bytes)).view(self.heads, -1, 2)  # (H, E / 2, 2)
        return self.bytes[pairs.transpose(1, 2).flatten()]

    def __getitem__(self, which: slice) -> Tensor:
        """The weights of some rows."""
        rows = self.rows()[which]
        if self.kind.dtype:
            found = rows.view(self.kind.dtype)
        elif self.kind.scheme:
            names = ("codes", "scale", "zero") if self.kind.scheme == "q4_1" else ("codes", "scale")
            found = dequantize_tensor({name: self.part(name, rows) for name in names}, self.kind.scheme)
        else:
            import gguf

            kind = gguf.GGMLQuantizationType[self.kind.name]
            found = torch.empty(len(rows), rows.size(1) // self.kind.bytes * self.kind.weights)
            for chunk in row_chunks(*found.shape):
                found[chunk] = torch.from_numpy(gguf.quants.dequantize(rows[chunk].numpy(), kind))
        return found.view(-1, *self.shape[1:])

    def part(self, name: str, rows: Tensor | None = None) -> Tensor:
        """A part of the scheme that holds the weights, of all rows or of these."""
        blocks = (self.rows() if rows is None else rows).unflatten(1, (-1, self.kind.bytes))  # (out, in / 32, bytes)
        if self.kind.name == "MXFP4" and name == "scale":
            return blocks[..., 0]
        scale, rest = blocks[..., :2].contiguous().view(torch.float16)[..., 0], blocks[..., 2:]
        if name == "scale":
            return scale
        if self.kind.name == "Q8_0":
            return rest.flatten(1).view(torch.int8)
        if name == "codes":  # the last 16 bytes hold the first 16 codes in their low halves
            codes = torch.cat((blocks[..., -16:] & 15, blocks[..., -16:] >> 4), -1).flatten(1)
            return codes[:, ::2] | codes[:, 1::2] << 4
        zero = rest[..., :2].contiguous().view(torch.float16)[..., 0] if self.kind.name == "Q4_1" else -8 * scale
        if not zero.isfinite().all():
            raise ValueError("its scales hold NaN or infinity, or are beyond what float16 holds 8 times")
        return zero


class File(NamedTuple):
    keys: dict[str, object]
    tensors: dict[str, Blocks]


def open_file(path: Path) -> File:
    """ValueError, led by the file's name, for what is no GGUF file or cannot be one."""
    status = os.stat(plain_file(path, 2**63))
    return _open(path, status.st_mtime_ns, status.st_size)


@functools.lru_cache(16)  # config, tokenizer and tensors are asked for one after the other
def _open(path: Path, changed: int, size: int) -> File:
    with error_prefix(f"{path}: not a readable GGUF file"):
        try:
            data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)  # mapped: nothing is read
        except RuntimeError as error:
            raise ValueError(one_line(error)) from None
        cursor, keys = Cursor(memoryview(data.numpy())), {}
        cursor.take(len(MAGIC))
        version = cursor.number("I")
        if version not in (2, 3):
            swapped = " (a big-endian file)" if not version & 0xFFFF else ""
            raise ValueError(f"version {version}{swapped} is not supported; supported: 2 and 3, little-endian")
        n_tensors = cursor.count("tensors", MOST_ENTRIES)
        for _ in range(cursor.count("keys", MOST_ENTRIES)):
            name = cursor.string(LONGEST_NAME)
            with error_prefix(f"key {one_line(name)}"):
                if name in keys:
                    raise ValueError("stands there twice")
                keys[name] = cursor.value()
        return File(keys, _tensors(cursor, n_tensors, keys.get("general.alignment", 32), data))


def _tensors(cursor: Cursor, count: int, alignment: object, data: Tensor) -> dict[str, Blocks]:
    """Each lies inside the file, and behind the one before it."""
    headers = {}
    for _ in range(count):
        name = cursor.string(LONGEST_NAME)
        with error_prefix(f"tensor {one_line(name)}"):
            n_dims = cursor.number("I")
            if name in headers or not 1 <= n_dims <= 4:
                raise ValueError("stands there twice" if name in headers else f"has {n_dims} dimensions")
            shape = tuple(cursor.count("elements of a dimension", LARGEST_SIZE) for _ in range(n_dims))[::-1]
            kind = kind_of(cursor.number("I"))
            if 0 in shape or shape[-1] % kind.weights:
                raise ValueError(f"its shape {list(shape)} does not divide into {kind.name}'s blocks of {kind.weights}")
            headers[name] = (cursor.number("Q"), kind, shape)
    if type(alignment) is not int or alignment % 8 or not 0 < alignment <= 2**16:
        raise ValueError(f"general.alignment = {alignment!r:.40} is no multiple of 8")
    begin, end, found = math.ceil(cursor.at / alignment) * alignment, 0, {}
    for name, (offset, kind, shape) in sorted(headers.items(), key=lambda header: header[1][0]):
        size = math.prod(shape) // kind.weights * kind.bytes
        with error_prefix(f"tensor {one_line(name)}"):
            if offset % alignment or offset < end:
                raise ValueError(f"its offset {offset} is no multiple of {alignment}, or inside the tensor before it")
            if begin + offset + size > len(data):
                raise ValueError(f"the file ends inside it, after {len(data):,} bytes: fetch it again")
        end, rows = offset + size, shape[0] if len(shape) > 1 else math.prod(shape) // kind.weights
        found[name] = Blocks(kind, shape, data[begin + offset : begin + end].view(rows, -1))
    return found


def parts_of(path: Path) -> list[Path]:
    """The files of a model. Those of a split one are named NAME-00001-of-00003.gguf; the first stands for all."""
    keys = open_file(path).keys
    count = keys.get("split.count", 0)
    if count in (0, 1):
        return [path]
    named = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", path.name)
    if not named or int(named[2]) != count:
        raise ValueError(f"{path}: split.count is {count!r:.20}, but its name does not end in -00001-of-N.gguf for it")
    files = [path.with_name(f"{named[1]}-{i:05d}-of-{named[2]}.gguf") for i in range(1, count + 1)]
    if keys.get("split.no") != 0:
        raise ValueError(f"{path}: is one of {count} files; give the first, {files[0].name}")
    for number, file in enumerate(files):
        if not is_gguf(file):
            raise ValueError(f"{file}: no GGUF file, but {path.name} is the first of {count}")
        if [open_file(file).keys.get(key) for key in ("split.count", "split.no")] != [count, number]:
            raise ValueError(f"{file}: its split.no and split.count are not those of its name")
    return files


# ----------------------------------------------------------------------------- as a folder would hold it


def kv_heads(keys: dict[str, object]) -> object:
    architecture = keys.get("general.architecture")
    found = keys.get(f"{architecture}.attention.head_count_kv", keys.get(f"{architecture}.attention.head_count"))
    found = {*found.tolist()} if isinstance(found, memoryview) else {found}  # one for each layer, or for all
    if len(found) != 1:
        raise ValueError(f"{architecture}.attention.head_count_kv differs from layer to layer, which is not supported")
    return found.pop()


class Tensors:
    """A file's tensors by Hugging Face names, with the methods of an open safetensors file."""

    def __init__(self, path: Path, first: Path):
        """`first`: the file with the model's keys, where it is split."""
        keys, self.found = open_file(first).keys, {}
        heads = {"attn_q": keys.get("llama.attention.head_count"), "attn_k": kv_heads(keys)}
        own = OWN.get(keys.get("general.architecture"), {})
        for name, blocks in open_file(path).tensors.items():
            module, _, kind = name.rpartition(".")
            inner = re.fullmatch(r"blk\.(\d{1,4})\.(\w+)", module)
            if inner and inner[2] in INNER:
                module = f"model.layers.{inner[1]}.{own.get(inner[2], INNER[inner[2]])}"
                n = heads.get(inner[2])
                if inner[2] == "ffn_gate_inp_shexp":  # a row, stored as a vector
                    blocks = replace(blocks, shape=(1, *blocks.shape[-1:]), bytes=blocks.bytes.view(1, -1))
                if keys.get("general.architecture") == "llama" and type(n) is int and n > 0:
                    blocks = replace(blocks, heads=0 if len(blocks.bytes) % (2 * n) else n)
            elif inner and inner[2] in EXPERTS and len(blocks.shape) > 1:
                room, part = own.get("mlp.experts", "mlp.experts"), EXPERTS[inner[2]]
                for number, bytes_ in enumerate(blocks.bytes):
                    one = replace(blocks, shape=blocks.shape[1:], bytes=bytes_.view(blocks.shape[1], -1))
                    self.found[f"model.layers.{inner[1]}.{room}.{number}.{own.get(part, part)}.{kind}"] = one
                continue
            elif inner and inner[2] == "attn_sinks":
                module, kind = f"model.layers.{inner[1]}.self_attn", "sinks"
            if name != "rope_freqs.weight":  # which config.json tells
                self.found[f"{OUTER.get(module, module)}.{kind}"] = blocks

    def keys(self) -> list[str]:
        return [*self.found]

    def get_slice(self, name: str) -> Blocks:
        return self.found[name]

    def get_tensor(self, name: str) -> Tensor:
        return self.found[name][:]


def find(readers: dict, stacked: dict[str, list[str]]) -> tuple[dict[str, str], str]:
    """The schemes that hold matrices, by our names, and in words what none holds. stacked: our name -> the Hugging Face
    tensors that make the matrix, which has a scheme only if all of them are held by it."""
    schemes, loose = {}, collections.Counter()
    for name, sources in stacked.items():
        kinds = [readers[source][1].get_slice(source).kind for source in sources]
        if name != "embed" and kinds[0].scheme and len({kind.scheme for kind in kinds}) == 1:
            schemes[name] = kinds[0].scheme
        else:
            loose.update(kind.name for kind in kinds if not kind.dtype)
    return schemes, ", ".join(f"{count} in {name}" for name, count in sorted(loose.items()))


def reading(readers: dict) -> Callable[[str], Tensor]:
    """A tensor, or a part of the scheme that holds it, by the name under which we would have stored it."""

    def read(name: str) -> Tensor:
        module, _, kind = name.rpartition(".")
        if name in readers:
            with error_prefix(name):
                return readers[name][1].get_tensor(name)
        stored = f"{module}.weight" if f"{module}.weight" in readers else "model.embed_tokens.weight"  # a tied head
        blocks = readers[stored][1].get_slice(stored)
        with error_prefix(stored):
            return blocks[:] if kind == "weight" else blocks.part(kind)

    return read
