"""GGUF files, llama.cpp's: keys and tensors. Format: ggml, docs/gguf.md.

    parse            one file -> its keys and tensors
    open_model       the same for a model, whose file may be split
    Blocks           one tensor in the mapped file: its weights, or the parts of our scheme that
                     holds them bit for bit

gguf_folder.py and gguf_vocabulary.py translate both to what a Hugging Face folder says. The header
is read here, because the gguf package takes seconds for a vocabulary. The package dequantizes the
types that no scheme of ours holds.
"""

import functools
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from decoding.errors import UserError
from loading.plain_files import GGUF_MAGIC, error_prefix, one_line, refused
from loading.stored import Stored
from weights.formats import dequantize_tensor, pack_bits, row_chunks

# Types of values, with struct's letters for the numbers.
STRING = 8
ARRAY = 9
NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}

LISTS = ("sliding_window_pattern", "dimension_sections")  # keys of several values

# What a damaged header causes: its counts and lengths are used as they are.
DAMAGES = (OSError, OverflowError, RuntimeError, UnicodeDecodeError, struct.error)
DAMAGED = "not a readable GGUF file, damaged or not completely fetched"


# ------------------------------------------------------------------------------- types of tensors


def half(blocks: Tensor, begin: int = 0) -> Tensor:
    """The float16 numbers at byte `begin` of each block."""
    return blocks[..., begin : begin + 2].contiguous().view(torch.float16)[..., 0]


def pairs(packed: Tensor) -> Tensor:
    """Bytes with llama.cpp's 4-bit codes -> our order (out, in / 2), two neighbours in a byte."""
    codes = bit_fields(packed, 4).flatten(1)  # (out, in)
    return codes[:, ::2] | codes[:, 1::2] << 4


def k_integers(blocks: Tensor) -> Tensor:
    """The integers of scales and of minima (2, out, in / 32) of Q4_K's and Q5_K's blocks (out, in /
    256, …), which have 8 pairs of 6 bits in 12 bytes."""
    *first, last = blocks[..., 4:16].split(4, dim=-1)  # (out, n, 4) each
    first = torch.stack(first, dim=-2)  # (out, n, 2, 4)
    last = torch.stack((last & 15, last >> 4), dim=-2)
    # `first` holds integers 0 to 3 in six bits, and above them the upper two bits of integers 4 to
    # 7, whose lower four bits are in `last`.
    integers = torch.cat((first & 63, last | first >> 6 << 4), dim=-1)  # (out, n, 2, 8)
    integers = integers.view(torch.int8)
    return integers.movedim(-2, 0).flatten(2)  # (2, out, n, 8) -> (2, out, in / 32)


def k_numbers(blocks: Tensor, index: int) -> Tensor:
    """Q4_K's scales (index 0) or minima (1), (out, in / 32): integers times a block's number."""
    unit = half(blocks, 2 * index).float()  # (out, in / 256)
    return unit.repeat_interleave(8, 1) * k_integers(blocks)[index]


def bit_fields(packed: Tensor, bits: int) -> Tensor:
    """Bytes (…, n) -> numbers of `bits` bits (…, 8 / bits * n) in llama.cpp's order: the lowest
    bits of all bytes come first."""
    return torch.cat([packed >> shift & 2**bits - 1 for shift in range(0, 8, bits)], dim=-1)


def k_codes(low: Tensor, high: Tensor, high_bits: int) -> Tensor:
    """Packed codes (out, …) from their low four bits and their high ones, (out, n, …) each."""
    low = bit_fields(low, 4).flatten(2)  # (out, n, 256)
    high = bit_fields(high, high_bits).flatten(2)
    return pack_bits((low | high << 4).flatten(1), 4 + high_bits)


class BlockType(NamedTuple):
    """A block has `num_weights` weights in `num_bytes` bytes."""

    name: str
    num_weights: int
    num_bytes: int
    dtype: torch.dtype | None = None  # of plain floats
    scheme: str | None = None  # our scheme that keeps its values exactly
    # That scheme's parts: name -> function of the blocks (out, in / num_weights, num_bytes).
    parts: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType({})


Q4_0 = {
    "codes": lambda blocks: pairs(blocks[..., 2:]),
    "scale": half,
    "zero": lambda blocks: -8 * half(blocks),
}
Q4_1 = {
    "codes": lambda blocks: pairs(blocks[..., 4:]),
    "scale": half,
    "zero": lambda blocks: half(blocks, 2),
}
Q8_0 = {"codes": lambda blocks: blocks[..., 2:].flatten(1).view(torch.int8), "scale": half}
Q4_K = {
    "codes": lambda blocks: pairs(blocks[..., 16:].unflatten(-1, (4, 32))),
    "scale": lambda blocks: k_numbers(blocks, 0),
    "zero": lambda blocks: -k_numbers(blocks, 1),
}
Q5_K = {
    "codes": lambda blocks: k_codes(blocks[..., 48:].unflatten(-1, (4, 32)), blocks[..., 16:48], 1),
    "scale": lambda blocks: k_integers(blocks)[0],
    "scale_unit": half,
    "zero": lambda blocks: k_integers(blocks)[1],
    "zero_unit": lambda blocks: half(blocks, 2),
}
Q6_K = {
    "codes": lambda blocks: k_codes(
        blocks[..., :128].unflatten(-1, (2, 64)), blocks[..., 128:192].unflatten(-1, (2, 32)), 2
    ),
    "scale": lambda blocks: blocks[..., 192:208].flatten(1).view(torch.int8),
    "scale_unit": lambda blocks: half(blocks, 208),
}
MXFP4 = {"codes": lambda blocks: pairs(blocks[..., 1:]), "scale": lambda blocks: blocks[..., 0]}
BLOCK_TYPES = {
    0: BlockType("F32", 1, 4, torch.float32),
    1: BlockType("F16", 1, 2, torch.float16),
    30: BlockType("BF16", 1, 2, torch.bfloat16),
    28: BlockType("F64", 1, 8, torch.float64),
    2: BlockType("Q4_0", 32, 18, scheme="q4_1", parts=Q4_0),
    3: BlockType("Q4_1", 32, 20, scheme="q4_1", parts=Q4_1),
    8: BlockType("Q8_0", 32, 34, scheme="q8_0", parts=Q8_0),
    12: BlockType("Q4_K", 256, 144, scheme="q4_k", parts=Q4_K),
    13: BlockType("Q5_K", 256, 176, scheme="q5_k", parts=Q5_K),
    14: BlockType("Q6_K", 256, 210, scheme="q6_k", parts=Q6_K),
    39: BlockType("MXFP4", 32, 17, scheme="mxfp4", parts=MXFP4),
}


@functools.cache
def block_type(number: int) -> BlockType:
    """UserError for a type whose weights cannot be read."""
    if number in BLOCK_TYPES:
        return BLOCK_TYPES[number]
    try:
        import gguf

        ggml_type = gguf.GGMLQuantizationType(number)
        num_weights, num_bytes = gguf.GGML_QUANT_SIZES[ggml_type]
        gguf.quants.dequantize(numpy.zeros((1, num_bytes), numpy.uint8), ggml_type)
    except ImportError:
        raise UserError(
            f"type {number} is read by the gguf package, which is missing: pip install gguf"
        ) from None
    except (ValueError, LookupError, NotImplementedError) as error:  # the package's own words
        raise UserError(one_line(error)) from None
    return BlockType(ggml_type.name, num_weights, num_bytes)


@dataclass(frozen=True)
class Blocks:
    """One tensor: its bytes in the mapped file, (rows, bytes of a row). A vector has a row for
    every block."""

    block_type: BlockType
    shape: tuple[int, ...]
    bytes: Tensor
    offset: float = 0.0  # the weights in the file are larger by this: llama.cpp adds it to norms
    heads: int = 0  # number of heads whose rows are in llama.cpp's order; 0: all rows are in ours

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        """The dtype's name; F32 for quantized tensors, which dequantize to float32."""
        return self.block_type.name if self.block_type.dtype else "F32"

    def rows(self, index) -> Tensor:
        """The bytes of some rows, in our order. llama.cpp has RoPE's pairs as neighbours."""
        if not self.heads:
            return self.bytes[index]
        order = torch.arange(len(self.bytes)).view(self.heads, -1, 2)  # (H, E / 2, 2)
        return self.bytes[order.transpose(1, 2).flatten()[index]]

    def part(self, name: str, index=...) -> Tensor:
        """A part of the scheme that holds the weights, of some rows: in chunks, because packing
        bits takes several times the memory of the codes."""
        rows = self.rows(index)
        blocks = rows.unflatten(1, (-1, self.block_type.num_bytes))
        make = self.block_type.parts[name]
        return torch.cat([make(blocks[chunk]) for chunk in row_chunks(*rows.shape)])

    def __getitem__(self, index) -> Tensor:
        """The weights of some rows."""
        block_type = self.block_type
        if block_type.dtype:
            weights = self.rows(index).view(block_type.dtype)
        elif block_type.scheme:
            parts = {name: self.part(name, index) for name in block_type.parts}
            weights = dequantize_tensor(parts, block_type.scheme)
        else:
            weights = dequantize_by_package(block_type, self.rows(index))
        if self.offset:
            weights = weights.float() - self.offset
        return weights.view(-1, *self.shape[1:])

    def as_stored(self) -> Stored:
        """A matrix keeps the bits of its blocks where a scheme holds them."""
        scheme = self.block_type.scheme if len(self.shape) == 2 else None
        stored_type = "" if self.block_type.dtype else self.block_type.name
        read = partial(self.__getitem__, slice(None))
        return Stored(self.shape, scheme, self.part, read, stored_type)


def dequantize_by_package(block_type: BlockType, rows: Tensor) -> Tensor:
    """In chunks, because the package takes several times the memory of the weights."""
    import gguf

    ggml_type = gguf.GGMLQuantizationType[block_type.name]
    num_columns = rows.size(1) // block_type.num_bytes * block_type.num_weights
    weights = torch.empty(len(rows), num_columns)
    for chunk in row_chunks(*weights.shape):
        dequantized = gguf.quants.dequantize(rows[chunk].numpy(), ggml_type)
        weights[chunk] = torch.from_numpy(dequantized)
    return weights


# ------------------------------------------------------------------------------------------ files


def common_value(key: str, value: object) -> object:
    """A key's value; of a value for each layer, the one that all layers have. UserError for layers
    that differ."""
    if not isinstance(value, tuple) or key.endswith(LISTS):
        return value
    if len(set(value)) != 1:
        raise refused(
            key, value, "differs from layer to layer; supported: one value for all layers"
        )
    return value[0]


class Entries(dict):
    """A file's keys or tensors by name. UserError for one that is missing; `noun`, such as "key
    llama.", stands before its name in the message."""

    def __init__(self, noun: str, entries: Mapping[str, object]):
        super().__init__(entries)
        self.noun = noun

    def __missing__(self, name: str):
        raise UserError(f"the file has no {self.noun}{name}: make it again, or fetch another")

    def number(self, name: str, default: float | None = None) -> float:
        """A key's value, the same for all layers, which must be a positive number; the default for
        a key that is missing or 0."""
        if default is not None and not self.get(name):
            return default
        value = common_value(name, self[name])
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise refused(f"{self.noun}{name}", value, "must be a positive number")
        return value


class GgufFile(NamedTuple):
    keys: Entries
    tensors: Entries  # of Blocks


class Header:
    """Reads the values of a header one after the other. struct.error where the file ends."""

    def __init__(self, data: memoryview):
        self.data = data
        self.position = len(GGUF_MAGIC)

    def numbers(self, letter: str, count: int) -> tuple:
        layout = f"<{count}{letter}"
        values = struct.unpack_from(layout, self.data, self.position)
        self.position += struct.calcsize(layout)
        return values

    def number(self, letter: str) -> int | float | bool:
        (value,) = self.numbers(letter, 1)
        # The shortest decimal that is this float32: 1e-05, not 9.99999974e-06.
        return float(str(numpy.float32(value))) if letter == "f" else value

    def string(self) -> str:
        (content,) = self.numbers("s", self.number("Q"))
        return content.decode()

    def value(self, value_type: int) -> object:
        if value_type == STRING:
            return self.string()
        if value_type in NUMBERS:
            return self.number(NUMBERS[value_type])
        if value_type != ARRAY:
            raise UserError(f"{DAMAGED}: a value of the type {value_type}")
        item_type = self.number("I")
        count = self.number("Q")
        if item_type in NUMBERS:
            return self.numbers(NUMBERS[item_type], count)
        return [self.value(item_type) for _ in range(count)]

    def keys(self, count: int) -> dict[str, object]:
        keys = {}
        for _ in range(count):
            name = self.string()
            if name in keys:
                raise UserError(f"key {one_line(name)} occurs twice: make the file again")
            keys[name] = self.value(self.number("I"))
        return keys

    def tensor(self) -> tuple[str, tuple[int, ...], BlockType, int]:
        """(name, shape, type, offset behind the header) of the next tensor."""
        name = self.string()
        shape = self.numbers("Q", self.number("I"))[::-1]  # the file has the last dimension first
        with error_prefix(f"tensor {one_line(name)}"):
            return name, shape, block_type(self.number("I")), self.number("Q")


def parse(path: Path) -> GgufFile:
    """A file's keys and tensors. UserError names a file that is damaged or cut off."""
    with error_prefix(path):
        try:
            keys, infos, alignment, begin = read_header(path, path.stat().st_mtime_ns)
        except DAMAGES as error:
            raise UserError(f"{DAMAGED}: {one_line(error)}") from None
        tensors = map_tensors(infos, map_file(path)[begin:], alignment)
        return GgufFile(Entries("key ", keys), Entries("tensor ", tensors))


def map_file(path: Path) -> Tensor:
    """Its bytes, which are read when they are used."""
    return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)


# Config, tokenizer and tensors are read one after the other. No mapping is kept: it would hold the
# file's memory when its model has gone.
@functools.lru_cache(16)
def read_header(path: Path, mtime_ns: int) -> tuple[dict, list[tuple], int, int]:
    """(keys, the tensors of Header.tensor, their alignment, where their data begins)."""
    header = Header(memoryview(map_file(path).numpy()))
    version = header.number("I")
    if version % 2**16 == 0:
        raise UserError("a big-endian file; gguf-convert-endian FILE little makes it readable")
    if version not in (2, 3):
        raise UserError(f"version {version} is not supported; supported: 2 and 3")
    num_tensors = header.number("Q")
    keys = header.keys(header.number("Q"))
    infos = [header.tensor() for _ in range(num_tensors)]
    alignment = keys.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 8 or alignment % 8:
        raise refused("general.alignment", alignment, "must be a multiple of 8")
    return keys, infos, alignment, -(-header.position // alignment) * alignment


def map_tensors(infos: list[tuple], data: Tensor, alignment: int) -> dict[str, Blocks]:
    """The tensors, which follow each other in the data without gaps but for the alignment, as
    llama.cpp demands it: so none overlap."""
    tensors = {}
    begin = 0
    for name, shape, block_type, offset in infos:
        label = f"tensor {one_line(name)}"
        if offset != begin:
            raise UserError(
                f"{label} has the offset {offset} instead of {begin}: fetch the file again"
            )
        if name in tensors:
            raise UserError(f"{label} occurs twice: make the file again")
        if not math.prod(shape or (0,)):
            raise UserError(f"{DAMAGED}: {label} of shape {list(shape)}")
        if shape[-1] % block_type.num_weights:
            raise UserError(
                f"{label} has rows of {shape[-1]} weights, which are no blocks of"
                f" {block_type.num_weights}: make the file again"
            )
        num_blocks = math.prod(shape) // block_type.num_weights
        end = begin + num_blocks * block_type.num_bytes
        if end > len(data):
            raise UserError(f"the file ends inside {label}: fetch it again")
        num_rows = shape[0] if len(shape) > 1 else num_blocks
        tensors[name] = Blocks(block_type, shape, data[begin:end].view(num_rows, -1))
        begin = -(-end // alignment) * alignment
    return tensors


def parts_of(path: Path, keys: Entries) -> list[Path]:
    """The files of a model, of which `path` is the first and has these keys: a split model has
    NAME-00001-of-00003.gguf and so on."""
    with error_prefix(path):
        count = int(keys.number("split.count", 1))
    suffix = f"-00001-of-{count:05d}.gguf"
    if count < 2:
        return [path]
    if not path.name.endswith(suffix):
        raise UserError(f"{path}: one of {count} files; give the first, which ends in {suffix}")
    stem = path.name.removesuffix(suffix)
    return [path.with_name(f"{stem}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count)]


def open_model(path: Path) -> GgufFile:
    """The keys of a model's first file, and the tensors of all."""
    model = parse(path)
    for file in parts_of(path, model.keys)[1:]:
        tensors = parse(file).tensors
        if duplicates := model.tensors.keys() & tensors.keys():
            raise UserError(
                f"{file}: tensor {min(duplicates)} is in another part too: make both again"
            )
        model.tensors.update(tensors)
    return model
