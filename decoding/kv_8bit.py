"""Keys and values in 8 bits: half of the bytes, and on a CPU attention in integers.

    CodedCache              codes, and a scale for each head and position
    Int8Cache, Fp8Cache     integers; E4M3
    attend_codes            attention over an Int8Cache on a CPU, without dequantizing
    CACHE_TYPES             caches by the names of --kv_cache_dtype

With int8, a Hadamard matrix first rotates keys and queries. This leaves q k^T unchanged and spreads
outlier channels over all channels (QuaRot, arXiv:2404.00456), which matters because all channels of
a key share one scale. With fp8 each value has its own exponent, so an outlier does not hurt the
other channels and there is no rotation.
"""

import functools
import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from model import AttentionMask, KVCache, attend
from weights.compiling import LIBRARY

INNER_CACHE_SCORES = 2**18  # scores that stay in a processor's inner caches
LANES = 16  # torch's product with int8 codes reads positions in groups of 16, past the end too
MIN_SCALE = 1e-30  # the scale of zeros

# ------------------------------------------------------------------------------------------- codes


def to_codes(
    x: Tensor,
    dtype: torch.dtype = torch.int8,
) -> tuple[Tensor, Tensor]:
    """x (..., E) as codes of an 8-bit dtype, stored as int8, and their scales (..., 1) float32."""
    is_float = dtype.is_floating_point
    max_code = torch.finfo(dtype).max if is_float else torch.iinfo(dtype).max
    x = x.float()
    max_size = x.abs().amax(-1, keepdim=True)
    scale = (max_size / max_code).clamp(min=MIN_SCALE)
    numbers = x / scale
    if not is_float:
        numbers = numbers.round()
    return numbers.to(dtype).view(torch.int8), scale


@functools.cache
def hadamard(E: int, device: torch.device) -> Tensor:
    """An unnormalized rotation (E, E): blocks of Sylvester's matrix of 1 and -1, whose size is the
    largest power of two that divides E. float64 on a CPU, where sums of 16-bit numbers are then
    exact, and so bitwise equal in every pass."""
    dtype = torch.float64 if device.type == "cpu" else torch.float32
    with torch.inference_mode(False):
        double = torch.tensor([[1, 1], [1, -1]], dtype=dtype)
        matrix = torch.ones(1, 1, dtype=dtype)
        while E % (2 * len(matrix)) == 0:
            matrix = torch.kron(double, matrix)
        blocks = [matrix] * (E // len(matrix))
        return torch.block_diag(*blocks).to(device)


# ------------------------------------------------------------------------------ attention in codes


LIBRARY.define(
    "attend_codes(Tensor q, Tensor k, Tensor k_scale, Tensor v, Tensor v_scale, Tensor bias) ->"
    " Tensor",
)


@torch.library.impl(LIBRARY, "attend_codes", "CPU")
def attend_codes(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor,
    v: Tensor,
    v_scale: Tensor,
    bias: Tensor,
) -> Tensor:
    """Softmax attention of rotated q (B, H, T, E) bfloat16 over int8 codes k (B, G, S, E) and v (B,
    G, E, S) with scales (B, G, S), bias (B, 1, R * T or more, S) -> (B, H, T, E).

    q is quantized as keys are, so that scores are exact sums in any order. Scores and softmax are
    float32. The probabilities times the scales of v are rounded to bfloat16, as in
    scaled_dot_product_attention, before they multiply the codes.
    """
    num_missing = -k.size(2) % LANES
    if num_missing:  # masked positions fill the last lanes
        last = (0, num_missing)
        k = F.pad(k, (0, 0, *last))
        k_scale, v, v_scale = (F.pad(x, last) for x in (k_scale, v, v_scale))
        bias = F.pad(bias, last, value=-math.inf)
    B, H, T, E = q.shape
    G, S = k.shape[1:3]
    rows = H // G * T
    q_codes, q_scale = to_codes(q.reshape(B, G, rows, E))  # (B, H, T, E) -> (B, G, R*T, E)
    q_scale = q_scale / math.sqrt(E)
    bias = bias[:, 0, :rows].float()  # (B, R*T, S)
    y = q.new_empty(B, G, rows, E)
    ones = q.new_ones(E)
    # All heads at once if their scores stay in the inner caches, else as many rows of one as do.
    num_heads = G if G * rows * S <= INNER_CACHE_SCORES else 1
    num_rows = max(1, INNER_CACHE_SCORES // S)
    for b, g, r in itertools.product(range(B), range(0, G, num_heads), range(0, rows, num_rows)):
        heads = (b, slice(g, g + num_heads))
        query_rows = slice(r, r + num_rows)
        part = (*heads, query_rows)
        codes = q_codes[part]
        products = torch.empty(*codes.shape[:2], S, dtype=torch.int32)
        for out, queries, keys in zip(products, codes, k[heads]):
            torch._int_mm(queries, keys.T, out=out)
        scores = products.float()  # (heads, num_rows, S)
        scores.mul_(k_scale[heads][:, None])
        scores = torch.addcmul(bias[b, query_rows], scores, q_scale[part])
        p = scores.softmax(-1)
        p.mul_(v_scale[heads][:, None])
        p = p.to(q.dtype)
        for out, weights, values in zip(y[part], p, v[heads]):
            out.copy_(torch._weight_int8pack_mm(weights, values.contiguous(), ones))
    return y.view(B, H, T, E)


@torch.library.register_fake("quickdraft::attend_codes")
def _like_q(q: Tensor, *others: Tensor) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


@functools.cache
def has_exact_int_mm() -> bool:
    """Is torch._int_mm exact? Some processors add pairs of products in 16 bits, or have no such
    kernel."""
    column = torch.tensor([[127], [-128], [-128]], dtype=torch.int8)
    codes = column.repeat(8, 64)  # (24, 64)
    exact = codes.long() @ codes.T.long()
    try:
        return torch.equal(torch._int_mm(codes, codes.T), exact.to(torch.int32))
    except RuntimeError:
        return False


def attends_in_codes(dtype: torch.dtype, device: torch.device) -> bool:
    """Are products of codes exact sums here, and fast with this dtype?"""
    return device.type == "cpu" and dtype == torch.bfloat16 and has_exact_int_mm()


# ------------------------------------------------------------------------------------------ caches


class CodedCache(KVCache):
    """A KVCache of 8-bit codes, and a scale per head and position (B, G, S). In memory the values
    are (B, G, E, S), whose rows `attend_codes` multiplies."""

    by_position = ("k", "v", "k_scale", "v_scale")
    code_dtype: torch.dtype

    def __init__(
        self,
        B: int,
        G: int,
        S: int,
        E: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        super().__init__(B, G, S, E, torch.int8, device)
        self.v = self.v.mT.contiguous().mT  # (B, G, S, E)
        for name in ("k_scale", "v_scale"):
            scales = torch.zeros(B, G, S, dtype=torch.float32, device=device)
            self.register_buffer(name, scales, persistent=False)

    @staticmethod
    def position_bytes(G: int, E: int, dtype: torch.dtype) -> int:
        return 2 * G * (E + torch.float32.itemsize)

    def rotate(self, x: Tensor) -> Tensor:
        """Keys (B, heads, T, E) as they are coded, float32: here unchanged."""
        return x.float()

    def update(self, k: Tensor, v: Tensor, pos: Tensor) -> None:
        keys_values = torch.stack((self.rotate(k), v.float()))  # (2, B, G, T, E)
        codes, scale = to_codes(keys_values, self.code_dtype)
        k, v = codes  # (B, G, T, E)
        k_scale, v_scale = scale[..., 0]  # (B, G, T)
        self.write(pos, k=k, k_scale=k_scale, v=v, v_scale=v_scale)

    def read_codes(self, B: int, visible: AttentionMask) -> list[Tensor]:
        """k (B, G, S, E), k_scale (B, G, S), v (B, G, S, E) and v_scale (B, G, S) of the first B
        rows."""
        return super().read(B, visible, ("k", "k_scale", "v", "v_scale"))

    def read(self, B: int, visible: AttentionMask) -> list[Tensor]:
        """Keys as they are coded, and values, both (B, G, S, E) in the mask's dtype."""
        k, k_scale, v, v_scale = self.read_codes(B, visible)
        pairs = ((k, k_scale), (v.contiguous(), v_scale))  # kernels read rows of E
        dtype = visible.mask.dtype
        return [
            (codes.view(self.code_dtype).float() * scale[..., None]).to(dtype)
            for codes, scale in pairs
        ]


class Int8Cache(CodedCache):
    """Codes of rotated keys, which rotated queries attend to."""

    code_dtype = torch.int8
    shared = ("rotation",)

    def __init__(self, B: int, G: int, S: int, E: int, dtype: torch.dtype, device: torch.device):
        super().__init__(B, G, S, E, dtype, device)
        self.register_buffer("rotation", hadamard(E, device), persistent=False)
        self.uses_integers = attends_in_codes(dtype, device)

    @staticmethod
    def kernel(
        q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """`attend` of keys and values (B, G, S, E), for the probe. Its values are built to cancel;
        here every channel of v repeats the first, so that their int8 codes cancel too."""
        if sinks is not None or not attends_in_codes(q.dtype, q.device):
            return attend(q, k, v, bias, sinks)
        k, k_scale = to_codes(k)
        v, v_scale = to_codes(v[..., :1].expand_as(v))
        return attend_codes(q, k, k_scale[..., 0], v.mT, v_scale[..., 0], bias)

    def rotate(self, x: Tensor) -> Tensor:
        """x (B, heads, T, E) -> the same shape, rotated, float32."""
        norm = math.sqrt(x.size(-1) & -x.size(-1))  # of a block's columns
        return (x.to(self.rotation.dtype) @ self.rotation).float() / norm

    def attend(
        self,
        q: Tensor,
        visible: AttentionMask,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend to the codes if `uses_integers`. The number of queries must not enter the choice:
        a position's result may not depend on other positions in its pass."""
        q = self.rotate(q).to(q.dtype)
        if sinks is not None or not self.uses_integers:
            return super().attend(q, visible, sinks)
        run = torch.ops.quickdraft.attend_codes if torch.compiler.is_compiling() else attend_codes
        k, k_scale, v, v_scale = self.read_codes(q.size(0), visible)
        return run(q, k, k_scale, v.mT, v_scale, visible.mask)


class Fp8Cache(CodedCache):
    code_dtype = torch.float8_e4m3fn


CACHE_TYPES = {"model": KVCache, "int8": Int8Cache, "fp8": Fp8Cache}
