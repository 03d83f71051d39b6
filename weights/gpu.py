"""Products of a few rows as multiplications and sums, which a GPU's compiler fuses into one kernel.

    as_compilable   a stored part in a type that the compiler knows
    stored          rows that a compiler writes to memory
    row_sums        terms (out, in) and rows (M, in) -> (M, out)
    in_word_order   rows in the order of packed words
    grouped_sums    the same for groups of codes that share a scale
    paired_sums     the same with a matrix per row, its expert's
    pack_words      stored codes -> 32-bit words, the unit that a thread unpacks
    unpack_words    words -> codes
    in_order        codes of unpack_words -> the order of the inputs
    decode_words    words and scales -> weights

The kernel reads the weights in their stored form. A library's product would need them unpacked to
16 bits, written and read again. benchmarks/NOTES.md compares the kernels that Inductor generates.
"""

import math

import torch
from torch import Tensor

from weights.formats import Packed, pack_bits, unpack_bits


def word_sizes(bits: int) -> tuple[int, int]:
    """(number of 32-bit words W, of codes P that fill them)"""
    size = math.lcm(bits, 32)
    return size // 32, size // bits


def pack_words(packed: Tensor, bits: int, group: int) -> Tensor:
    """Bytes of pack_bits (out, in * bits / 8) -> the same codes as int32 words (out, in * bits /
    32): W planes, of which P codes fill one word each.

    The i-th codes of neighbouring words in a group belong to neighbouring inputs, which one load
    then brings, as it does neighbouring words of a plane.
    """
    W, P = word_sizes(bits)
    codes = unpack_bits(packed, bits)
    codes = codes.unflatten(1, (-1, P, group // P))  # (out, in) -> (out, in / g, P, n)
    codes = codes.transpose(2, 3).flatten(1)
    words = pack_bits(codes, bits).view(torch.int32)
    planes = words.unflatten(1, (-1, W)).transpose(1, 2)  # (out, W, in / P)
    return planes.flatten(1)


def unpack_words(words: Tensor, bits: int) -> list[Tensor]:
    """words (out, W * n) int32, P codes in a word of each plane -> P tensors (out, n) int32: codes
    i, i + P, i + 2 P, …"""
    W, P = word_sizes(bits)
    word = words.unflatten(1, (W, -1)).unbind(1)  # W tensors (out, n)
    mask = 2**bits - 1
    codes = []
    for i in range(P):
        index, shift = divmod(i * bits, 32)
        code = word[index] >> shift  # a negative word shifts in ones, which the mask below clears
        rest = 32 - shift
        if bits > rest:
            low = code & ((1 << rest) - 1)
            code = low | (word[index + 1] << rest)
        codes.append(code & mask)
    return codes


def in_order(codes: list[Tensor], group: int) -> Tensor:
    """Interleave the tensors of `unpack_words`, P x (out, in / P), back into the order of the
    inputs (out, in)."""
    n = group // len(codes)
    parts = [part.unflatten(1, (-1, n)) for part in codes]
    return torch.stack(parts, dim=2).flatten(1)  # (out, in / g, P, n) -> (out, in)


def decode_words(format: Packed, parts: dict[str, Tensor]) -> Tensor:
    """Parts of n rows, with codes in words -> float32 (n, in)."""
    codes = unpack_words(parts["codes"], format.bits)
    return format.weights(in_order(codes, format.group), parts)


def as_compilable(part: Tensor) -> Tensor:
    """A stored part in a type that this GPU's compiler knows: bytes for E4M3 below capability
    8.9."""
    if part.dtype != torch.float8_e4m3fn or not part.is_cuda or torch.version.hip is not None:
        return part
    has_e4m3 = torch.cuda.get_device_capability(part.device) >= (8, 9)
    return part if has_e4m3 else part.view(torch.uint8)


def stored(x: Tensor) -> Tensor:
    """x, contiguous, as a tensor in memory: the view asks for that. A compiler would otherwise
    compute it anew for every output of a product."""
    return x.as_strided(x.size(), x.stride())


def row_sums(terms: Tensor, x: Tensor, scale: Tensor | None = None) -> Tensor:
    """terms (out, in) float32, x (M, in), scale (out,) -> (M, out). Each row is one reduction in
    float32; all rows read the same terms."""
    sums = []
    for row in x.unbind():
        y = (terms * row.float()).sum(1)
        if scale is not None:
            y = y * scale
        sums.append(y.to(x.dtype))
    return stacked(sums)


def stacked(sums: list[Tensor]) -> Tensor:
    """M tensors (out,) -> (M, out), without a copy of a single one."""
    if len(sums) == 1:
        return sums[0][None]
    return torch.stack(sums)


def in_word_order(x: Tensor, P: int, group: int) -> Tensor:
    """x (M, in) -> (M, P, in / g, n), in memory: the inputs of the i-th codes of all words are
    neighbours, so that each load is contiguous."""
    rows = x.view(x.size(0), -1, P, group // P)  # (M, in) -> (M, in / g, P, n)
    return stored(rows.transpose(1, 2).contiguous())


def grouped_sums(
    values: list[Tensor],
    x: Tensor,
    scale: Tensor,
    factor: float = 1.0,
) -> Tensor:
    """x (M, P, in / g, n) of `in_word_order` -> (M, out) with the weights values * factor * scale.
    values: P x (out, in / P) float32 in the order of `unpack_words`; scale (out, in / g) applies to
    the sum over a group."""
    values = [value.unflatten(1, x.shape[2:]) for value in values]  # (out, in / g, n)
    sums = []
    for row in x.unbind():
        parts = row.float().unbind()
        y = sum(value * part for value, part in zip(values, parts))  # (out, in / g, n)
        y = y * factor * scale[..., None]
        sums.append(y.sum((1, 2)).to(x.dtype))
    return stacked(sums)


def paired_sums(
    values: list[Tensor],
    x: Tensor,
    group: int,
    scale: Tensor | None = None,
    *,
    factor: float = 1.0,
    zero: Tensor | None = None,
) -> Tensor:
    """x (N, in) -> (N, out), row i times matrix i of values * factor * scale + zero. values: P x
    (N, out, in / P) float32 in the order of `unpack_words`; scale and zero (N, out, in / g) apply
    to the sum over a group."""
    P = len(values)
    n = group // P
    parts = x.float().view(x.size(0), 1, -1, P, n).unbind(3)  # P x (N, 1, in / g, n)
    values = [value.unflatten(2, (-1, n)) for value in values]  # P x (N, out, in / g, n)
    y = sum(value * part for value, part in zip(values, parts))
    if scale is not None:
        y = y * (factor * scale[..., None])
    if zero is not None:
        y = y + sum(parts) * zero[..., None]
    return y.sum((2, 3)).to(x.dtype)
