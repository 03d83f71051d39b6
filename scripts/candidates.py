"""Other ways to compute parts of a step, for `python -m scripts.bench_gpu variants`: nothing uses one before it won.

    by_rows, in_words, int8pack     products of a few rows, in place of a Linear's `product`, a plain one's `forward`
    add_words                       what in_words reads: the codes as 32-bit words
    by_sums, by_flex, in_chunks     attention, in place of model.attend

A product here is a multiplication and a sum, written out for each of M rows, so that Inductor makes one kernel of
unpacking, multiplying and summing: weights are read once, in their stored form, and never written. What Inductor makes
of each, and what of F.linear, stands in benchmarks/NOTES.md. This file does not know models, steps or time.
"""

import math

import torch
from torch import Tensor, nn

from quantize import FORMATS, Int4, Mx, PerRow, QuantizedLinear, dequantize_tensor, pack_bits, unpack_bits

# A kernel that unpacks sixteen codes at once reads more values than Inductor likes to see in one: it would write half
# of the sums to memory in between.
ONE_KERNEL = {"realize_reads_threshold": 100, "realize_acc_reads_threshold": 200, "realize_opcount_threshold": 4000}

# -------------------------------------------------------------------------------------------- products


def sums(terms: Tensor, rows: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """terms (out, in) float32, rows (M, in) -> (M, out): each row's sum is one reduction over the same terms."""
    found = [(terms * row.float()).sum(1) for row in rows.unbind()]
    found = [(y if scale is None else y * scale).to(dtype) for y in found]
    return torch.stack(found) if len(found) > 1 else found[0][None]


def by_rows(linear: nn.Module, x: Tensor) -> Tensor:
    """x (..., in) -> (..., out), without bias: the weights as quantize.py decodes them, multiplied and summed."""
    rows, scale = x.reshape(-1, x.size(-1)), None
    if not isinstance(linear, QuantizedLinear):
        terms = linear.weight.float()
    elif isinstance(FORMATS[linear.scheme], PerRow):
        terms, scale = linear.codes.float(), linear.scale.float()
    else:
        terms = dequantize_tensor(linear.parts(), linear.scheme)
    return sums(terms, rows, scale, x.dtype).view(*x.shape[:-1], -1)


def int8pack(linear: QuantizedLinear, x: Tensor) -> Tensor:
    """aten's int8 kernel."""
    return torch._weight_int8pack_mm(x, linear.codes, linear.kernel_scale)


WORDS = {4: (1, 8), 6: (3, 16), 8: (1, 4)}  # bits of a code -> whole 32-bit words, and the codes that fill them


def add_words(linear: QuantizedLinear) -> None:
    """What in_words reads: scales as they are stored, and codes as 32-bit words (out, in * bits / 32), in another order
    within a group. The i-th codes of neighbouring words belong to neighbouring inputs, which one load then brings."""
    format, parts = FORMATS[linear.scheme], linear.parts()
    _, P = WORDS[format.bits]
    codes = unpack_bits(parts["codes"], format.bits).view(linear.out_features, -1, P, format.group // P)
    words = pack_bits(codes.transpose(2, 3).flatten(1), format.bits).view(torch.int32)  # (out, in / g, g / P, P) ->
    for name, part in (parts | {"codes": words}).items():
        linear.register_buffer(f"words_{name}", part.detach(), persistent=False)


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


def nibble(code: Tensor) -> Tensor:
    """int32 codes 0 to 15 -> float32 code - 8, as 2^23 + code less 2^23 + 8, exactly: a conversion takes longer."""
    return (code | 0x4B000000).view(torch.float32) - (2**23 + 8)


def minifloat(code: Tensor, format: Mx) -> Tensor:
    """Element codes -> float32, times 2^(bias - 15): sign, exponent and mantissa moved to where a float16 has them,
    whose subnormal numbers are then the element's own. Shifts in place of a look-up in a table."""
    sign = 2 ** (format.bits - 1)
    half = (code & sign) << (16 - format.bits) | (code & (sign - 1)) << (10 - format.mantissa)
    return half.to(torch.int16).view(torch.float16).float()


def power_of_two(code: Tensor) -> Tensor:
    """E8M0 uint8 -> float32 2^(code - 127), by placing the exponent; 0 is 2^-127, a subnormal number."""
    code = code.to(torch.int32)
    return (code << 23 | (code == 0).to(torch.int32) << 22).view(torch.float32)


def in_words(linear: QuantizedLinear, x: Tensor) -> Tensor:
    """x (M, in) -> (M, out) of an int4 or MX Linear after `add_words`: each thread unpacks whole words, and a group's
    scale multiplies the sum of their products."""
    format, M = FORMATS[linear.scheme], x.size(0)
    codes = unpack_words(linear.words_codes, format.bits)
    n = format.group // len(codes)  # words' worth of codes that share a scale
    if isinstance(format, Int4):
        values, factor = [nibble(code) for code in codes], 1.0
        scale, zero = linear.words_scale.float(), linear.words_zero.float()  # (out, in / g)
    else:
        values, factor = [minifloat(code, format) for code in codes], 2.0 ** (15 - format.bias)
        scale, zero = power_of_two(linear.words_scale), None  # (out, in / g)
    values = [value.unflatten(1, (-1, n)) for value in values]  # (out, in / g, n)
    found = []
    for row in x.float().view(M, -1, len(codes), n).unbind():  # (in / g, P, n)
        parts = row.unbind(1)
        y = sum(value * part for value, part in zip(values, parts)) * factor * scale[..., None]  # (out, in / g, n)
        if zero is not None:
            y = y + sum(parts) * zero[..., None]
        found.append(y.sum((1, 2)).to(x.dtype))
    return torch.stack(found) if M > 1 else found[0][None]


# ------------------------------------------------------------------------------------------- attention
# Each: q (B, H, T, E), k and v (B, G, S, E), mask (B, 1, T, S) bool -> (B, H, T, E).


def by_sums(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Scores, softmax and values as sums in float32, which Inductor divides over the GPU as it likes."""
    B, H, T, E = q.shape
    q = q.view(B, k.size(1), -1, T, 1, E)  # (B, G, R, T, 1, E)
    scores = (q.float() * k[:, :, None, None].float()).sum(-1) / math.sqrt(E)  # (B, G, R, T, S)
    p = scores.masked_fill(~mask[:, :, None], -math.inf).softmax(-1)
    y = (p[..., None] * v[:, :, None, None].float()).sum(-2)  # (B, G, R, T, E)
    return y.to(q.dtype).view(B, H, T, E)


def by_flex(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """torch's flex attention, whose kernel for few queries divides the keys over the GPU."""
    from torch.nn.attention.flex_attention import flex_attention

    def visible(score, b, h, t, s):
        return torch.where(mask[b, 0, t, s], score, -math.inf)

    return flex_attention(q, k, v, score_mod=visible, enable_gqa=True)


CHUNK = 256  # keys that `in_chunks` gives one thread block; every length that is attended to is a multiple


def in_chunks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention over chunks of keys as if they were a batch, put together by their sums: as many thread blocks as
    chunks, where scaled_dot_product_attention has one for each KV head. Scores leave their product in float32."""
    (B, H, T, E), (G, S) = q.shape, k.shape[1:3]
    C = max(1, S // CHUNK)
    q = q.reshape(B, G, 1, -1, E)  # (B, G, 1, R * T, E)
    k, v = (part.unflatten(2, (C, -1)) for part in (k, v))  # (B, G, C, S / C, E)
    mask = mask.repeat(1, 1, H // G, 1).unflatten(3, (C, -1)).transpose(2, 3)  # (B, 1, C, R * T, S / C)
    scores = (q.float() @ k.transpose(-1, -2).float() / math.sqrt(E)).masked_fill(~mask, -math.inf)
    top = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)  # of a chunk without a visible key
    p = (scores - top).exp()  # (B, G, C, R * T, S / C)
    weight = p.sum(-1, keepdim=True) * (top - top.amax(2, keepdim=True)).exp()  # (B, G, C, R * T, 1)
    y = (p.to(v.dtype) @ v).float() / p.sum(-1, keepdim=True).clamp(min=1e-30)  # (B, G, C, R * T, E)
    return ((y * weight).sum(2) / weight.sum(2)).to(q.dtype).view(B, H, T, E)
