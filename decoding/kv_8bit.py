"""Keys and values in 8 bits: half of the bytes, and on a CPU attention in integers.

    CodedCache              codes, and a scale for each head and position
    Int8Cache, Fp8Cache     integers; E4M3
    attend_codes            attention over an Int8Cache on a CPU, without dequantizing
    KINDS                   caches by the names of --kv_cache_dtype

For integers, keys and queries are first rotated by a Hadamard matrix, which spreads a channel of large keys over all
and leaves q k^T unchanged (QuaRot, arXiv:2404.00456): all channels share one step, which the largest decides. Floats
have their own exponents, so that a large channel costs the others nothing, and a rotation would only spread its
rounding over them.
This file does not know layers, steps, ranks or flags.
"""

import functools
import itertools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import AttentionMask, KVCache
from weights.compiling import LIBRARY

INNER_CACHE_SCORES = 2**18  # scores that stay in a processor's inner caches
MAX_CHANNELS = 2**24 // 127**2  # of a head with exact float32 sums: float32 holds integers up to 2^24
LANES = 16  # positions that torch's product with int8 codes reads at once, even beyond the last
MIN_SCALE = 1e-30  # the scale of zeros

LIBRARY.define("attend_codes(Tensor q, Tensor k, Tensor k_scale, Tensor v, Tensor v_scale, Tensor bias) -> Tensor")


@torch.library.impl(LIBRARY, "attend_codes", "CPU")
def attend_codes(q: Tensor, k: Tensor, k_scale: Tensor, v: Tensor, v_scale: Tensor, bias: Tensor) -> Tensor:
    """Softmax attention of rotated q (B, H, T, E) bfloat16 over int8 codes k (B, G, S, E) and v (B, G, E, S) with
    scales (B, G, S), bias (B, 1, R * T or more, S) -> (B, H, T, E).

    q is quantized as keys are, so that scores are exact sums in any order. Scores and softmax are float32. The
    probabilities times the scales of v are rounded to bfloat16, as in scaled_dot_product_attention, before they
    multiply the codes.
    """
    if extra := -k.size(2) % LANES:
        k, v = F.pad(k, (0, 0, 0, extra)), F.pad(v, (0, extra))
        k_scale, v_scale = F.pad(k_scale, (0, extra)), F.pad(v_scale, (0, extra))
        bias = F.pad(bias, (0, extra), value=-math.inf)
    B, H, T, E = q.shape
    G, S, rows = k.size(1), k.size(2), H // k.size(1) * T
    q_codes, q_scale = to_codes(q.reshape(B, G, rows, E))  # (B, H, T, E) -> (B, G, R*T, E)
    q_scale = q_scale / math.sqrt(E)
    y, ones, bias = q.new_empty(B, G, rows, E), q.new_ones(E), bias[:, :, :rows].float()
    # Operate on all heads at once if their scores stay in the inner caches, else on as many rows of one head as do.
    all_fit = G * rows * S <= INNER_CACHE_SCORES
    num_heads, num_rows = (G, rows) if all_fit else (1, max(1, INNER_CACHE_SCORES // S))
    for b, head, row in itertools.product(range(B), range(0, G, num_heads), range(0, rows, num_rows)):
        heads, part = slice(head, head + num_heads), slice(row, row + num_rows)
        queries = q_codes[b, heads, part]  # (num_heads, num_rows, E)
        sums = torch.empty(*queries.shape[:2], S, dtype=torch.int32 if has_exact_int_mm() else torch.float32)
        for codes, keys, out in zip(queries, k[b, heads], sums):
            multiply_codes(codes, keys, out)
        scores = sums.float().mul_(k_scale[b, heads, None])
        scores = torch.addcmul(bias[b, :, part], scores, q_scale[b, heads, part])
        p = scores.softmax(-1).mul_(v_scale[b, heads, None]).to(q.dtype)
        for weights, values, out in zip(p, v[b, heads], y[b, heads, part]):
            out.copy_(torch._weight_int8pack_mm(weights, values.contiguous(), ones))  # (num_rows, E)
    return y.view(B, H, T, E)


@torch.library.register_fake("quickdraft::attend_codes")
def _like_q(q: Tensor, k: Tensor, k_scale: Tensor, v: Tensor, v_scale: Tensor, bias: Tensor) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def quantize_and_attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """`attend_codes` with the signature of `attend`, for the probe of how kernels round. All channels repeat the values
    of the first, so that the codes of cancelling values cancel."""
    (k, k_scale), (v, v_scale) = to_codes(k), to_codes(v[..., :1].expand_as(v))
    return attend_codes(q, k, k_scale[..., 0], v.mT, v_scale[..., 0], bias.expand(q.size(0), -1, -1, -1))


def multiply_codes(x: Tensor, keys: Tensor, out: Tensor) -> None:
    """out (rows, S) = x (rows, E) @ keys (S, E).T of codes, exactly: int32, or float32 for E up to MAX_CHANNELS."""
    if out.dtype == torch.int32:
        torch._int_mm(x, keys.T, out=out)
    else:
        torch.mm(x.float(), keys.float().T, out=out)


def uses_integer_scores(E: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Are scores of E channels exact sums, and is torch's product of this dtype with int8 codes fast here?"""
    return device.type == "cpu" and dtype == torch.bfloat16 and E <= MAX_CHANNELS


@functools.cache
def has_exact_int_mm() -> bool:
    """Is torch._int_mm exact? Some processors add pairs of products in 16 bits, or have no such kernel."""
    codes = torch.tensor([[127], [-128], [-128]], dtype=torch.int8).repeat(8, 64)  # (24, 64)
    try:
        return torch.equal(torch._int_mm(codes, codes.T), (codes.long() @ codes.T.long()).to(torch.int32))
    except (RuntimeError, NotImplementedError):
        return False


def to_codes(x: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """x (..., E) as codes of an 8-bit dtype, stored as int8, and their scales (..., 1) float32."""
    is_integer = not dtype.is_floating_point
    max_code = (torch.iinfo if is_integer else torch.finfo)(dtype).max
    x = x.float()
    scale = (x.abs().amax(-1, keepdim=True) / max_code).clamp(min=MIN_SCALE)
    numbers = (x / scale).round() if is_integer else x / scale
    return numbers.to(dtype).view(torch.int8), scale


@functools.cache
def hadamard(E: int, device: torch.device) -> Tensor:
    """A rotation (E, E) times its norm: blocks of Sylvester's matrix of 1 and -1. The block's size is the largest power
    of two that divides E. On a CPU in float64: sums of 16-bit numbers are then exact and alike in any pass."""
    with torch.inference_mode(False):
        matrix = torch.ones(1, 1, dtype=torch.float64 if device.type == "cpu" else torch.float32)
        while E % (2 * len(matrix)) == 0:
            matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
        return torch.block_diag(*[matrix] * (E // len(matrix))).to(device)


class CodedCache(KVCache):
    """A KVCache of 8-bit codes: keys (B, G, S, E), values (B, G, E, S), and a scale per head and position (B, G, S)."""

    code_dtype: torch.dtype

    def __init__(self, B: int, G: int, S: int, E: int, dtype: torch.dtype, device: torch.device):
        nn.Module.__init__(self)
        shapes = {"k": (B, G, S, E), "v": (B, G, E, S), "k_scale": (B, G, S), "v_scale": (B, G, S)}
        for name, shape in shapes.items():
            part_dtype = torch.float32 if name.endswith("scale") else torch.int8
            self.register_buffer(name, torch.zeros(shape, dtype=part_dtype, device=device), persistent=False)

    @staticmethod
    def position_bytes(G: int, E: int, dtype: torch.dtype) -> int:
        return 2 * G * (E + torch.float32.itemsize)

    def rotate(self, x: Tensor) -> Tensor:
        """Keys (B, heads, T, E) as they are coded, float32: here unchanged."""
        return x.float()

    def update(self, k: Tensor, v: Tensor, pos: Tensor) -> None:
        codes, scale = to_codes(torch.stack((self.rotate(k), v.float())), self.code_dtype)  # (2, B, G, T, E or 1)
        (k, v), (k_scale, v_scale) = codes, scale[..., 0]  # (B, G, T, E), (B, G, T)
        if pos.size(0) == self.k.size(0) == 1:
            self.k.index_copy_(2, pos[0], k), self.v.index_copy_(3, pos[0], v.transpose(2, 3))
            self.k_scale.index_copy_(2, pos[0], k_scale), self.v_scale.index_copy_(2, pos[0], v_scale)
            return
        row = torch.arange(pos.size(0), device=pos.device)[:, None]  # (B, 1)
        self.k[row, :, pos], self.v[row, :, :, pos] = k.transpose(1, 2), v.transpose(1, 2)  # (B, T, G, E)
        self.k_scale[row, :, pos] = k_scale.transpose(1, 2)  # (B, G, T) -> (B, T, G)
        self.v_scale[row, :, pos] = v_scale.transpose(1, 2)

    def codes_at(self, B: int, visible: AttentionMask) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(k (B, G, S, E), k_scale (B, G, S), v (B, G, E, S), v_scale (B, G, S)) of the first B rows."""
        if visible.index is None:
            S = visible.mask.size(-1)
            return self.k[:B, :, :S], self.k_scale[:B, :, :S], self.v[:B, ..., :S], self.v_scale[:B, :, :S]
        row, pos = torch.arange(B, device=self.k.device)[:, None], visible.index  # (B, 1), (B, S)
        k, k_scale = (x[row, :, pos].transpose(1, 2) for x in (self.k, self.k_scale))  # (B, S, G, …) -> (B, G, S, …)
        v, v_scale = self.v[row, :, :, pos].permute(0, 2, 3, 1), self.v_scale[row, :, pos].transpose(1, 2)
        return k, k_scale, v, v_scale

    def read(self, B: int, visible: AttentionMask) -> tuple[Tensor, Tensor]:
        """Keys as they are coded, and values, both (B, G, S, E) in the mask's dtype."""
        k, k_scale, v, v_scale = self.codes_at(B, visible)
        k = k.view(self.code_dtype).float() * k_scale[..., None]
        v = v.transpose(2, 3).contiguous().view(self.code_dtype).float() * v_scale[..., None]  # kernels read rows
        return k.to(visible.mask.dtype), v.to(visible.mask.dtype)

    def at(self, rows: int | slice | list[int], begin: int, end: int) -> dict[str, Tensor]:
        views = {name: getattr(self, name)[rows, :, begin:end] for name in ("k", "k_scale", "v_scale")}
        return views | {"v": self.v[rows, :, :, begin:end]}


class Int8Cache(CodedCache):
    """Codes of rotated keys, which rotated queries attend to."""

    code_dtype = torch.int8
    shared = ("rotation",)  # buffers that all rows share

    def __init__(self, B: int, G: int, S: int, E: int, dtype: torch.dtype, device: torch.device):
        super().__init__(B, G, S, E, dtype, device)
        self.register_buffer("rotation", hadamard(E, device), persistent=False)
        self.uses_integers = uses_integer_scores(E, dtype, device)

    @classmethod
    def kernel(cls, sinks: bool, E: int, like: Tensor) -> Callable:
        uses_integers = not sinks and uses_integer_scores(E, like.dtype, like.device)
        return quantize_and_attend if uses_integers else super().kernel(sinks, E, like)

    def rotate(self, x: Tensor) -> Tensor:
        """x (B, heads, T, E) -> the same shape, rotated, float32."""
        norm = math.sqrt(x.size(-1) & -x.size(-1))  # of a block's columns
        return (x.to(self.rotation.dtype) @ self.rotation).float() / norm

    def attend(self, q: Tensor, visible: AttentionMask, sinks: Tensor | None = None) -> Tensor:
        """Attend to the codes if `uses_integers`. The number of queries must not enter the choice: a position's result
        may not depend on other positions in its pass."""
        q = self.rotate(q).to(q.dtype)
        if sinks is not None or not self.uses_integers:
            return super().attend(q, visible, sinks)
        run = torch.ops.quickdraft.attend_codes if torch.compiler.is_compiling() else attend_codes
        return run(q, *self.codes_at(q.size(0), visible), visible.mask)


class Fp8Cache(CodedCache):
    code_dtype = torch.float8_e4m3fn


KINDS = {"model": KVCache, "int8": Int8Cache, "fp8": Fp8Cache}
