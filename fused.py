"""Products of a few rows as multiplications and sums, of which a GPU's compiler makes one kernel: it reads the weights
once, in their stored form, and writes none. Multiplied by a library, they would be written in 16 bits and read again.

    row_sums              terms (out, in) and rows (M, in) -> (M, out)
    grouped_sums          the same for groups of codes that share a scale
    word_order            codes as they fill 32-bit words, of which a thread unpacks whole ones
    unpack_words          the words' codes;  in_order  those, as the inputs come
    minifloat             element codes and E8M0 scales -> float32 by shifts, where a table would be loads
    power_of_two
    ONE_KERNEL            the compiler's settings under which such a product stays one kernel

What Inductor makes of each, and what of a library's product, stands in benchmarks/NOTES.md. This file knows bits; it
does not know formats, Linears or when a product is computed like this.
"""

import torch
from torch import Tensor

# What more than one kernel needs is written once it has more than so many reads: low, so that a product finds its rows
# normed and does not norm them for each of its outputs. A kernel that unpacks sixteen codes at once reads more values
# than Inductor likes to see in one, and would write half of the sums to memory in between: so the other two are high.
ONE_KERNEL = {"realize_reads_threshold": 2, "realize_acc_reads_threshold": 200, "realize_opcount_threshold": 400}


def row_sums(terms: Tensor, x: Tensor, scale: Tensor | None = None) -> Tensor:
    """terms (out, in) float32, x (M, in), scale (out,) -> (M, out): each row's sum is one reduction in float32, over
    the same terms for all of them."""
    found = [(terms * row.float()).sum(1) for row in x.unbind()]
    found = [(y if scale is None else y * scale).to(x.dtype) for y in found]
    return torch.stack(found) if len(found) > 1 else found[0][None]


WORDS = {4: (1, 8), 6: (3, 16), 8: (1, 4)}  # bits of a code -> whole 32-bit words W, and the codes P that fill them


def word_order(codes: Tensor, bits: int, group: int) -> Tensor:
    """codes (out, in) in the order in which they fill words: of a group, the i-th codes of neighbouring words belong
    to neighbouring inputs, which one load then brings."""
    P = WORDS[bits][1]
    return codes.unflatten(1, (-1, P, group // P)).transpose(2, 3).flatten(1)  # (out, in / g, P, n) -> (…, n, P) ->


def unpack_words(words: Tensor, bits: int) -> list[Tensor]:
    """words (out, n * W) int32, P codes in every W -> P tensors (out, n) int32: codes i, i + P, i + 2 P, …"""
    W, P = WORDS[bits]
    word, codes = words.unflatten(1, (-1, W)).unbind(-1), []  # W tensors (out, n)
    for i in range(P):
        index, shift = divmod(i * bits, 32)
        code = word[index] >> shift  # copies of the highest bit are masked
        if shift + bits > 32:
            code = (code & ((1 << (32 - shift)) - 1)) | (word[index + 1] << (32 - shift))
        codes.append(code & (2**bits - 1))
    return codes


def in_order(parts: list[Tensor], group: int) -> Tensor:
    """What `unpack_words` gives, or is made of it, P x (out, in / P) -> (out, in) in the order of the inputs."""
    n = group // len(parts)
    return torch.stack([part.unflatten(1, (-1, n)) for part in parts], dim=2).flatten(1)  # (out, in / g, P, n) ->


def minifloat(code: Tensor, bits: int, mantissa: int) -> Tensor:
    """int32 codes of sign, exponent and mantissa -> float32, times 2^(bias - 15): moved to where a float16 has them,
    whose subnormal numbers are then the element's own."""
    sign = 2 ** (bits - 1)
    half = (code & sign) << (16 - bits) | (code & (sign - 1)) << (10 - mantissa)
    return half.to(torch.int16).view(torch.float16).float()


def power_of_two(code: Tensor) -> Tensor:
    """E8M0 uint8 -> float32 2^(code - 127), by placing the exponent; 0 is 2^-127, a subnormal number."""
    code = code.to(torch.int32)
    return (code << 23 | (code == 0).to(torch.int32) << 22).view(torch.float32)


def grouped_sums(
    values: list[Tensor], x: Tensor, group: int, scale: Tensor, *, factor: float = 1.0, zero: Tensor | None = None
) -> Tensor:
    """x (M, in) -> (M, out) with the weights values * factor * scale + zero. values: P x (out, in / P) float32 in the
    order of `unpack_words`; scale and zero (out, in / g) apply to the sum over a group."""
    P = len(values)
    n = group // P  # words' worth of codes that share a scale
    values, found = [value.unflatten(1, (-1, n)) for value in values], []  # (out, in / g, n)
    for row in x.float().view(x.size(0), -1, P, n).unbind():  # (in / g, P, n)
        parts = row.unbind(1)
        y = sum(value * part for value, part in zip(values, parts)) * factor * scale[..., None]  # (out, in / g, n)
        if zero is not None:
            y = y + sum(parts) * zero[..., None]
        found.append(y.sum((1, 2)).to(x.dtype))
    return torch.stack(found) if len(found) > 1 else found[0][None]
