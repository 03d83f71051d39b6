"""GGUF files, llama.cpp's: keys and tensors, all checked before the first weight is copied.

    open_file     its keys and tensors;  parts_of  the files of a model that is split
    Blocks        one tensor in the mapped file: its weights, or the parts of our format that holds them bit for bit
    model_type_of, Tensors, find_schemes, tensor_reader  the file as checkpoint.py reads a folder, by HF names

The header is read here, because the gguf package's reader trusts the sizes in a file and takes seconds for a
vocabulary; the package dequantizes the types that no format of ours holds. Rows of llama.cpp's q and k move whole, so
quantized ones keep their bits. Format: ggml, docs/gguf.md.
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

import loading.weight_names as weight_names
from loading.chat_templates import one_line
from loading.families import FAMILIES
from loading.plain_files import GGUF_MAGIC, error_prefix, is_gguf, plain_file
from weights.formats import dequantize_tensor, row_chunks

STRING, ARRAY = 8, 9
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
MAX_ENTRIES, MAX_STRINGS, MAX_NAME_BYTES, MAX_DIM = 2**16, 2**22, 2**10, 2**32  # real files stay far below

# The file's modules, by ours and in the order of weight_names.INNER. One tensor (experts, out, in) holds all experts.
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
INNER = {
    "attention_norm": ["attn_norm"], "attention": ["attn_sinks"], "attention.qkv": ["attn_q", "attn_k", "attn_v"],
    "attention.q_norm": ["attn_q_norm"], "attention.k_norm": ["attn_k_norm"], "attention.out": ["attn_output"],
    "ffn_norm": ["ffn_norm"], "ffn.gate_up": ["ffn_gate", "ffn_up"], "ffn.down": ["ffn_down"],
    "ffn.router": ["ffn_gate_inp", "ffn_gate_inp_shexp"], "ffn.experts.gate_up": ["ffn_gate_exps", "ffn_up_exps"],
    "ffn.experts.down": ["ffn_down_exps"], "ffn.shared.gate_up": ["ffn_gate_shexp", "ffn_up_shexp"],
    "ffn.shared.down": ["ffn_down_shexp"],
}  # fmt: skip


class Kind(NamedTuple):
    """A stored type. A block has `weights` weights in `bytes` bytes."""

    name: str
    weights: int
    bytes: int
    dtype: torch.dtype | None = None  # of plain floats
    scheme: str | None = None  # our scheme that keeps its values exactly


KINDS = {
    0: Kind("F32", 1, 4, torch.float32), 1: Kind("F16", 1, 2, torch.float16), 30: Kind("BF16", 1, 2, torch.bfloat16),
    28: Kind("F64", 1, 8, torch.float64), 2: Kind("Q4_0", 32, 18, None, "q4_1"), 3: Kind("Q4_1", 32, 20, None, "q4_1"),
    8: Kind("Q8_0", 32, 34, None, "q8_0"), 12: Kind("Q4_K", 256, 144, None, "q4_k"),
    39: Kind("MXFP4", 32, 17, None, "mxfp4"),
}  # fmt: skip


@functools.cache
def kind_of(number: int) -> Kind:
    """ValueError for a type without weights, or one that needs the gguf package where that is missing."""
    if number in KINDS:
        return KINDS[number]
    try:
        import gguf

        kind = gguf.GGMLQuantizationType(number)
        name, (weights, size) = kind.name, gguf.GGML_QUANT_SIZES[kind]
        gguf.quants.dequantize(numpy.zeros((1, size), numpy.uint8), kind)
    except ImportError:
        raise ValueError(f"type {number} is read by the gguf package, which is missing: pip install gguf") from None
    except (ValueError, KeyError, NotImplementedError):
        raise ValueError(f"type {number} is not one that weights are read from") from None
    return Kind(name, weights, size)


# ---------------------------------------------------------------------------------------------- header


class Strings(NamedTuple):
    """An array of strings, whose lengths are checked. Iteration decodes them."""

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
    """Reads a header from its beginning on. ValueError where the file ends inside it."""

    def __init__(self, data: memoryview):
        self.data, self.at = data, 0

    def read(self, size: int) -> memoryview:
        begin, self.at = self.at, self.at + size
        if self.at > len(self.data):
            raise ValueError(f"the file ends inside its header, after {len(self.data):,} bytes: fetch it again")
        return self.data[begin : self.at]

    def number(self, form: str) -> int | float | bool:
        value = struct.unpack(f"<{form}", self.read(struct.calcsize(f"<{form}")))[0]
        return float(str(numpy.float32(value))) if form == "f" else value  # 1e-05, not 9.99999974…e-06

    def count(self, noun: str, max_count: int) -> int:
        value = self.number("Q")
        if value > max_count:
            raise ValueError(f"its header announces {value:,} {noun}; up to {max_count:,} are read")
        return value

    def string(self, max_bytes: int) -> str:
        return str(self.read(self.count("bytes of a string", max_bytes)), "utf-8")

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
            return self.read(count * struct.calcsize(NUMBERS[kind])).cast(NUMBERS[kind])
        if kind != STRING or count > MAX_STRINGS:
            raise ValueError(f"an array of {count:,} values of type {kind} is not read")
        data, begin = self.data, self.at
        at, end = begin, len(data) - 8
        for _ in range(count):
            if at > end:
                break
            at += 8 + int.from_bytes(data[at : at + 8], "little")
        self.read(at - begin if at <= end + 8 else len(data))
        return Strings(data, begin, count)


@dataclass(frozen=True)
class Blocks:
    """One tensor: its bytes in the mapped file, (rows, bytes of a row). A vector has a row for every block."""

    kind: Kind
    shape: tuple[int, ...]
    bytes: Tensor
    heads: int = 0  # number of heads whose rows stand in llama.cpp's order; 0: all rows stand in ours

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        """The dtype's name; F32 for quantized tensors, which dequantize to float32."""
        return self.kind.name if self.kind.dtype else "F32"

    def rows(self) -> Tensor:
        """The bytes, rows in our order."""
        if not self.heads:
            return self.bytes
        pairs = torch.arange(len(self.bytes)).view(self.heads, -1, 2)  # (H, E / 2, 2)
        return self.bytes[pairs.transpose(1, 2).flatten()]

    def __getitem__(self, index: slice) -> Tensor:
        """The weights of some rows."""
        rows = self.rows()[index]
        if self.kind.dtype:
            weights = rows.view(self.kind.dtype)
        elif self.kind.scheme:
            names = ("codes", "scale", "zero") if self.kind.scheme in ("q4_1", "q4_k") else ("codes", "scale")
            weights = dequantize_tensor({name: self.part(name, rows) for name in names}, self.kind.scheme)
        else:
            import gguf

            kind = gguf.GGMLQuantizationType[self.kind.name]
            weights = torch.empty(len(rows), rows.size(1) // self.kind.bytes * self.kind.weights)
            for chunk in row_chunks(*weights.shape):
                weights[chunk] = torch.from_numpy(gguf.quants.dequantize(rows[chunk].numpy(), kind))
        return weights.view(-1, *self.shape[1:])

    def part(self, name: str, rows: Tensor | None = None) -> Tensor:
        """A part of the scheme that holds the weights, for all rows or for `rows`."""
        blocks = (self.rows() if rows is None else rows).unflatten(1, (-1, self.kind.bytes))  # (out, in / 32, bytes)
        if self.kind.name == "MXFP4" and name == "scale":
            return blocks[..., 0]
        if self.kind.name == "Q4_K":
            return q4_k_part(name, blocks)
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


def q4_k_part(name: str, blocks: Tensor) -> Tensor:
    """A part of q4_k, of blocks (out, in / 256, 144): two float16 d, 8 pairs of 6 bits s in 12 bytes, and 4 times 32
    bytes of codes, the first 32 in the low halves. A group of 32 has scale d[0] * s[0] and zero -d[1] * s[1], exact in
    float32."""
    if name == "codes":
        codes = blocks[..., 16:].unflatten(-1, (4, 1, 32))  # (out, n, 4, 1, 32)
        codes = torch.cat((codes & 15, codes >> 4), dim=-2).flatten(1)  # (out, in)
        return codes[:, ::2] | codes[:, 1::2] << 4
    is_zero = int(name == "zero")
    d = blocks[..., :4].contiguous().view(torch.float16)[..., is_zero].float()  # (out, n)
    if not d.isfinite().all():
        raise ValueError("its scales hold NaN or infinity")
    packed = blocks[..., 4:16].unflatten(-1, (3, 4))  # (out, n, 3, 4): six bits of each s, and two bits more
    low, high = packed[..., is_zero, :], packed[..., 2, :] >> 4 if is_zero else packed[..., 2, :] & 15
    s = torch.cat((low & 63, high | low >> 6 << 4), dim=-1)  # (out, n, 8)
    return (d[..., None] * (-s.float() if is_zero else s.float())).flatten(1)  # (out, in / 32)


class File(NamedTuple):
    keys: dict[str, object]
    tensors: dict[str, Blocks]


def open_file(path: Path) -> File:
    """ValueError names the file, where it is no GGUF file or cannot be one."""
    status = os.stat(plain_file(path, 2**63))
    return _open(path, status.st_mtime_ns, status.st_size)


@functools.lru_cache(16)  # config, tokenizer and tensors are read one after the other
def _open(path: Path, mtime: int, size: int) -> File:
    with error_prefix(f"{path}: not a readable GGUF file"):
        try:
            data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)  # mapped: nothing is read
        except RuntimeError as error:
            raise ValueError(one_line(error)) from None
        cursor, keys = Cursor(memoryview(data.numpy())), {}
        cursor.read(len(GGUF_MAGIC))
        version = cursor.number("I")
        if version not in (2, 3):
            swapped = " (a big-endian file)" if not version & 0xFFFF else ""
            raise ValueError(f"version {version}{swapped} is not supported; supported: 2 and 3, little-endian")
        n_tensors = cursor.count("tensors", MAX_ENTRIES)
        for _ in range(cursor.count("keys", MAX_ENTRIES)):
            name = cursor.string(MAX_NAME_BYTES)
            with error_prefix(f"key {one_line(name)}"):
                if name in keys:
                    raise ValueError("occurs twice")
                keys[name] = cursor.value()
        return File(keys, _tensors(cursor, n_tensors, keys.get("general.alignment", 32), data))


def _tensors(cursor: Cursor, count: int, alignment: object, data: Tensor) -> dict[str, Blocks]:
    """ValueError unless all tensors lie inside the file, one behind the other."""
    headers = {}
    for _ in range(count):
        name = cursor.string(MAX_NAME_BYTES)
        with error_prefix(f"tensor {one_line(name)}"):
            n_dims = cursor.number("I")
            if name in headers or not 1 <= n_dims <= 4:
                raise ValueError("occurs twice" if name in headers else f"has {n_dims} dimensions")
            shape = tuple(cursor.count("elements of a dimension", MAX_DIM) for _ in range(n_dims))[::-1]
            kind = kind_of(cursor.number("I"))
            if 0 in shape or shape[-1] % kind.weights:
                raise ValueError(f"its shape {list(shape)} does not divide into {kind.name}'s blocks of {kind.weights}")
            headers[name] = (cursor.number("Q"), kind, shape)
    if type(alignment) is not int or alignment <= 0 or alignment % 8:
        raise ValueError(f"general.alignment = {alignment!r:.40} is no positive multiple of 8")
    begin, end, tensors = math.ceil(cursor.at / alignment) * alignment, 0, {}
    for name, (offset, kind, shape) in sorted(headers.items(), key=lambda header: header[1][0]):
        size = math.prod(shape) // kind.weights * kind.bytes
        with error_prefix(f"tensor {one_line(name)}"):
            if offset % alignment or offset < end:
                raise ValueError(f"its offset {offset} is no multiple of {alignment}, or inside the tensor before it")
            if begin + offset + size > len(data):
                raise ValueError(f"the file ends inside it, after {len(data):,} bytes: fetch it again")
        end, rows = offset + size, shape[0] if len(shape) > 1 else math.prod(shape) // kind.weights
        tensors[name] = Blocks(kind, shape, data[begin + offset : begin + end].view(rows, -1))
    return tensors


def parts_of(path: Path) -> list[Path]:
    """The files of a model. A split model has NAME-00001-of-00003.gguf and so on; `path` is the first."""
    keys = open_file(path).keys
    count = keys.get("split.count", 0)
    if count in (0, 1):
        return [path]
    match = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", path.name)
    if not match or int(match[2]) != count:
        raise ValueError(f"{path}: split.count is {count!r:.20}, but its name does not end in -00001-of-N.gguf for it")
    files = [path.with_name(f"{match[1]}-{i:05d}-of-{match[2]}.gguf") for i in range(1, count + 1)]
    if keys.get("split.no") != 0:
        raise ValueError(f"{path}: is one of {count} files; give the first, {files[0].name}")
    for number, file in enumerate(files):
        if not is_gguf(file):
            raise ValueError(f"{file}: no GGUF file, but {path.name} is the first of {count}")
        if [open_file(file).keys.get(key) for key in ("split.count", "split.no")] != [count, number]:
            raise ValueError(f"{file}: its split.no and split.count are not those of its name")
    return files


# ------------------------------------------------------------------------- tensors by Hugging Face names


def model_type_of(keys: dict[str, object]) -> str:
    """The family of a file. Of those that share an architecture, a later record is that of a file with its `key`."""
    architecture = keys.get("general.architecture")
    for model_type, family in reversed(FAMILIES.items()):
        gguf = family.gguf
        if gguf and gguf.architecture == architecture and (not gguf.key or keys.get(f"{architecture}.{gguf.key}")):
            return model_type
    supported = ", ".join(dict.fromkeys(family.gguf.architecture for family in FAMILIES.values() if family.gguf))
    raise ValueError(f"general.architecture = {architecture!r:.60} is not supported; supported: {supported}")


def kv_heads(keys: dict[str, object]) -> object:
    architecture = keys.get("general.architecture")
    count = keys.get(f"{architecture}.attention.head_count_kv", keys.get(f"{architecture}.attention.head_count"))
    counts = {*count.tolist()} if isinstance(count, memoryview) else {count}  # one for each layer, or for all
    if len(counts) != 1:
        raise ValueError(f"{architecture}.attention.head_count_kv differs from layer to layer, which is not supported")
    return counts.pop()


class Tensors:
    """A file's tensors by Hugging Face names, with the methods of an open safetensors file."""

    def __init__(self, path: Path, first: Path):
        """`first`: the file with the model's keys, where it is split."""
        keys = open_file(first).keys
        family = FAMILIES[model_type_of(keys)]
        architecture, permuted = family.gguf.architecture, {}
        if family.gguf.permutes_heads:
            permuted = {"attn_q": keys.get(f"{architecture}.attention.head_count"), "attn_k": kv_heads(keys)}
        hf_inner, self.tensors = {**weight_names.INNER, **family.names}, {}
        hf_modules = {  # in a layer; {} stands for an expert's number
            stored: module
            for ours, group in {**INNER, **family.gguf.names}.items()
            for stored, module in zip(group, hf_inner[ours])
        }
        for name, blocks in open_file(path).tensors.items():
            module, _, kind = name.rpartition(".")
            inner = re.fullmatch(r"blk\.(\d{1,4})\.(\w+)", module)
            stored = inner[2] if inner else ""
            if stored in hf_modules:
                module = f"model.layers.{inner[1]}.{hf_modules[stored]}"
            if stored == "attn_sinks":
                kind = "sinks"
            if stored == "ffn_gate_inp_shexp":  # a row, stored as a vector
                blocks = replace(blocks, shape=(1, *blocks.shape[-1:]), bytes=blocks.bytes.view(1, -1))
            n = permuted.get(stored)
            if type(n) is int and n > 0:
                blocks = replace(blocks, heads=0 if len(blocks.bytes) % (2 * n) else n)
            if "{}" in module and len(blocks.shape) > 1:
                for number, expert_bytes in enumerate(blocks.bytes):
                    expert = replace(blocks, shape=blocks.shape[1:], bytes=expert_bytes.view(blocks.shape[1], -1))
                    self.tensors[f"{module.format(number)}.{kind}"] = expert
            elif name != "rope_freqs.weight":  # config.json holds these as a RoPE scaling
                self.tensors[f"{OUTER.get(module, module)}.{kind}"] = blocks

    def keys(self) -> list[str]:
        return [*self.tensors]

    def get_slice(self, name: str) -> Blocks:
        return self.tensors[name]

    def get_tensor(self, name: str) -> Tensor:
        return self.tensors[name][:]


def find_schemes(readers: dict, sources_by_name: dict[str, list[str]]) -> tuple[dict[str, str], str]:
    """(scheme by matrix, the types of the other quantized tensors, as text). sources_by_name: our name of a matrix ->
    the Hugging Face tensors that make it; it has a scheme only if that scheme holds all of them."""
    schemes, plain_types = {}, collections.Counter()
    for name, parts in sources_by_name.items():
        kinds = [readers[part][1].get_slice(part).kind for part in parts]
        if name != "embed" and kinds[0].scheme and len({kind.scheme for kind in kinds}) == 1:
            schemes[name] = kinds[0].scheme
        else:
            plain_types.update(kind.name for kind in kinds if not kind.dtype)
    return schemes, ", ".join(f"{count} in {name}" for name, count in sorted(plain_types.items()))


def tensor_reader(readers: dict) -> Callable[[str], Tensor]:
    """A function from a name in a folder of ours to the tensor, or to the part of its scheme."""

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
