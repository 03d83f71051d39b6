"""Products of a few rows as multiplications and sums, which a GPU's compiler fuses into one kernel.

    row_sums        terms (out, in) and rows (M, in) -> (M, out)
    grouped_sums    the same for groups of codes that share a scale
    paired_sums     the same with a matrix per row, its expert's
    pack_words      stored codes -> 32-bit words, the unit that a thread unpacks
    unpack_words    words -> codes
    in_order        codes of unpack_words -> the order of the inputs

The kernel reads the weights in their stored form. A library's product would need them unpacked to 16 bits, written and
read again. benchmarks/NOTES.md compares the kernels that Inductor generates.
"""

import torch
from torch import Tensor

from weights.formats import pack_bits, unpack_bits

WORDS = {4: (1, 8), 6: (3, 16), 8: (1, 4)}  # bits of a code -> (number of 32-bit words W, of codes P that fill them)


def pack_words(packed: Tensor, bits: int, group: int) -> Tensor:
    """Bytes of pack_bits (out, in * bits / 8) -> the same codes as int32 words (out, in * bits / 32).

    The i-th codes of neighbouring words in a group belong to neighbouring inputs, which one load then brings.
    """
    P = WORDS[bits][1]
    codes = unpack_bits(packed, bits).unflatten(1, (-1, P, group // P))  # (out, in) -> (out, in / g, P, n)
    return pack_bits(codes.transpose(2, 3).flatten(1), bits).view(torch.int32)


def unpack_words(words: Tensor, bits: int) -> list[Tensor]:
    """words (out, n * W) int32, P codes in every W -> P tensors (out, n) int32: codes i, i + P, i + 2 P, …"""
    W, P = WORDS[bits]
    word, codes = words.unflatten(1, (-1, W)).unbind(-1), []  # word: W tensors (out, n)
    for i in range(P):
        index, shift = divmod(i * bits, 32)
        code = word[index] >> shift  # a negative word shifts in ones, which the mask below clears
        if shift + bits > 32:
            code = (code & ((1 << (32 - shift)) - 1)) | (word[index + 1] << (32 - shift))
        codes.append(code & (2**bits - 1))
    return codes


def in_order(codes: list[Tensor], group: int) -> Tensor:
    """Interleave the tensors of `unpack_words`, P x (out, in / P), back into the order of the inputs (out, in)."""
    n = group // len(codes)
    return torch.stack([part.unflatten(1, (-1, n)) for part in codes], dim=2).flatten(1)  # from (out, in / g, P, n)


def row_sums(terms: Tensor, x: Tensor, scale: Tensor | None = None) -> Tensor:
    """terms (out, in) float32, x (M, in), scale (out,) -> (M, out). Each row is one reduction in float32; all rows read
    the same terms."""
    sums = [(terms * row.float()).sum(1) for row in x.unbind()]
    sums = [(y if scale is None else y * scale).to(x.dtype) for y in sums]
    return torch.stack(sums) if len(sums) > 1 else sums[0][None]


def grouped_sums(values: list[Tensor], x: Tensor, group: int, scale: Tensor, factor: float = 1.0) -> Tensor:
    """x (M, in) -> (M, out) with the weights values * factor * scale. values: P x (out, in / P) float32 in the order of
    `unpack_words`; scale (out, in / g) applies to the sum over a group."""
    P = len(values)
    n = group // P
    values, sums = [value.unflatten(1, (-1, n)) for value in values], []  # (out, in / g, n)
    for row in x.float().view(x.size(0), -1, P, n).unbind():  # (in / g, P, n)
        parts = row.unbind(1)
        y = sum(value * part for value, part in zip(values, parts)) * factor * scale[..., None]  # (out, in / g, n)
        sums.append(y.sum((1, 2)).to(x.dtype))
    return torch.stack(sums) if len(sums) > 1 else sums[0][None]


def paired_sums(
    values: list[Tensor], x: Tensor, group: int, scale: Tensor | None = None, *, factor: float = 1.0,
    zero: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """x (N, in) -> (N, out), row i times matrix i of values * factor * scale + zero. values: P x (N, out, in / P)
    float32 in the order of `unpack_words`; scale and zero (N, out, in / g) apply to the sum over a group."""
    P = len(values)
    n = group // P
    parts = x.float().view(x.size(0), 1, -1, P, n).unbind(3)  # P x (N, 1, in / g, n)
    y = sum(value.unflatten(2, (-1, n)) * part for value, part in zip(values, parts))  # (N, out, in / g, n)
    y = y if scale is None else y * (factor * scale[..., None])
    if zero is not None:
        y = y + sum(parts) * zero[..., None]
    return y.sum((2, 3)).to(x.dtype)
