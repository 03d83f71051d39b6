"""Other ways to compute parts of a step, for `python -m benchmarks.bench_gpu variants`: nothing uses one before it won.

    by_rows, in_words, int8pack     products of a few rows, in place of a Linear's `product`, a plain one's `forward`
    by_library                      what few rows would be without weights/gpu.py: unpacked, then multiplied
    add_words                       what in_words reads: the codes as 32-bit words
    by_sums, by_flex, in_chunks     attention, in place of model.attend

What Inductor makes of each stands in benchmarks/NOTES.md. This file does not know models, steps or time.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weights.formats import FORMATS, PerRow, dequantize_tensor
from weights.gpu import grouped_sums, pack_words, row_sums, unpack_words
from weights.linears import QuantizedLinear

# -------------------------------------------------------------------------------------------- products


def by_rows(linear: nn.Module, x: Tensor) -> Tensor:
    """x (..., in) -> (..., out), without bias: the weights as their format decodes them, multiplied and summed."""
    rows, scale = x.reshape(-1, x.size(-1)), None
    if not isinstance(linear, QuantizedLinear):
        terms = linear.weight.float()
    elif isinstance(FORMATS[linear.scheme], PerRow):
        terms, scale = linear.codes.float(), linear.scale.float()
    else:
        terms = dequantize_tensor(linear.parts(), linear.scheme)
    return row_sums(terms, rows, scale).view(*x.shape[:-1], -1)


def by_library(linear: QuantizedLinear, x: Tensor) -> Tensor:
    """x (M, in) -> (M, out): the weights in the activations' type, and one product with them."""
    return F.linear(x, linear.dequantized(x.dtype))


def int8pack(linear: QuantizedLinear, x: Tensor) -> Tensor:
    """aten's int8 kernel."""
    return torch._weight_int8pack_mm(x, linear.codes, linear.kernel_scale)


def add_words(linear: QuantizedLinear) -> None:
    """What in_words reads."""
    format, parts = FORMATS[linear.scheme], linear.parts()
    words = pack_words(parts["codes"], format.bits, format.group)
    for name, part in (parts | {"codes": words}).items():
        linear.register_buffer(f"words_{name}", part.detach(), persistent=False)


def nibble(code: Tensor) -> Tensor:
    """int32 codes 0 to 15 -> float32 code - 8, as 2^23 + code less 2^23 + 8, exactly: a conversion takes longer."""
    return (code | 0x4B000000).view(torch.float32) - (2**23 + 8)


def in_words(linear: QuantizedLinear, x: Tensor) -> Tensor:
    """x (M, in) -> (M, out) of an int4 Linear after `add_words`: each thread unpacks whole words."""
    values = [nibble(code) for code in unpack_words(linear.words_codes, 4)]
    scale, zero = linear.words_scale.float(), linear.words_zero.float()  # (out, in / g)
    return grouped_sums(values, x, FORMATS[linear.scheme].group, scale, zero=zero)


# ------------------------------------------------------------------------------------------- attention
# Each: q (B, H, T, E), k and v (B, G, S, E), mask (B, 1, R*T, S) to add, or (B, 1, 1, S) where T = 1 -> (B, H, T, E).


def by_sums(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Scores, softmax and values as sums in float32, which Inductor divides over the GPU as it likes."""
    B, H, T, E = q.shape
    q = q.view(B, k.size(1), -1, T, 1, E)  # (B, G, R, T, 1, E)
    scores = (q.float() * k[:, :, None, None].float()).sum(-1) / math.sqrt(E)  # (B, G, R, T, S)
    p = (scores + mask.unflatten(2, (-1, T))).softmax(-1)
    y = (p[..., None] * v[:, :, None, None].float()).sum(-2)  # (B, G, R, T, E)
    return y.to(q.dtype).view(B, H, T, E)


def by_flex(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """torch's flex attention, whose kernel for few queries divides the keys over the GPU."""
    from torch.nn.attention.flex_attention import flex_attention

    T, R = q.size(2), q.size(1) // k.size(1)

    def visible(score, b, h, t, s):
        return score + mask[b, 0, h % R * T + t if T > 1 else 0, s]

    return flex_attention(q, k, v, score_mod=visible, enable_gqa=True)


CHUNK = 256  # keys that `in_chunks` gives one thread block; every length that is attended to is a multiple


def in_chunks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention over chunks of keys as if they were a batch, put together by their sums: as many thread blocks as
    chunks, where scaled_dot_product_attention has one for each KV head. Scores leave their product in float32."""
    (B, H, T, E), (G, S) = q.shape, k.shape[1:3]
    C = max(1, S // CHUNK)
    q = q.reshape(B, G, 1, -1, E)  # (B, G, 1, R * T, E)
    k, v = (part.unflatten(2, (C, -1)) for part in (k, v))  # (B, G, C, S / C, E)
    mask = mask.unflatten(3, (C, -1)).transpose(2, 3)  # (B, 1, C, R * T, S / C)
    scores = q.float() @ k.transpose(-1, -2).float() / math.sqrt(E) + mask
    top = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)  # of a chunk without a visible key
    p = (scores - top).exp()  # (B, G, C, R * T, S / C)
    weight = p.sum(-1, keepdim=True) * (top - top.amax(2, keepdim=True)).exp()  # (B, G, C, R * T, 1)
    y = (p.to(v.dtype) @ v).float() / p.sum(-1, keepdim=True).clamp(min=1e-30)  # (B, G, C, R * T, E)
    return ((y * weight).sum(2) / weight.sum(2)).to(q.dtype).view(B, H, T, E)
