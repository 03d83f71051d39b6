"""Products of a few rows as multiplications and sums, which a GPU's compiler fuses into one kernel.

    row_sums        terms (out, in) and rows (M, in) -> (M, out)
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
    32).

    The i-th codes of neighbouring words in a group belong to neighbouring inputs, which one load
    then brings.
    """
    _, P = word_sizes(bits)
    codes = unpack_bits(packed, bits)
    codes = codes.unflatten(1, (-1, P, group // P))  # (out, in) -> (out, in / g, P, n)
    codes = codes.transpose(2, 3).flatten(1)
    return pack_bits(codes, bits).view(torch.int32)


def unpack_words(words: Tensor, bits: int) -> list[Tensor]:
    """words (out, n * W) int32, P codes in every W -> P tensors (out, n) int32: codes i, i + P, i +
    2 P, …"""
    W, P = word_sizes(bits)
    word = words.unflatten(1, (-1, W)).unbind(-1)  # W tensors (out, n)
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


def grouped_sums(
    values: list[Tensor],
    x: Tensor,
    group: int,
    scale: Tensor,
    factor: float = 1.0,
) -> Tensor:
    """x (M, in) -> (M, out) with the weights values * factor * scale. values: P x (out, in / P)
    float32 in the order of `unpack_words`; scale (out, in / g) applies to the sum over a group."""
    P = len(values)
    n = group // P
    values = [value.unflatten(1, (-1, n)) for value in values]  # (out, in / g, n)
    rows = x.float().view(x.size(0), -1, P, n)  # (M, in) -> (M, in / g, P, n)
    sums = []
    for row in rows.unbind():
        parts = row.unbind(1)
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
