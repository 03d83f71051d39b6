"""Logits -> distribution -> token: the one place where temperature, top-k, top-p and min-p are applied.

    Sampling            the user's settings, checked; `.probs(logits)` and `.sample(logits, noise)`
    sample              logits and noise -> token id, which is
    distribution        logits -> float32 probabilities, and
    draw                probabilities and one uniform number a row -> token id
    uniform             the uniform numbers: a hash of (seed, position, purpose)

Plain decoding, drafting and verification all go through these functions; that identity is what makes speculation
lossless. This file does not know models, positions' meaning or text. V is the vocabulary.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

GREEDY, PLAIN, FILTERED = KINDS = "greedy", "plain", "filtered"  # each kind's code serves the rows of those before it
INVALID = -1  # drawn instead of a token where the logits hold a NaN or +inf

# Purposes of a uniform number: one position may need several independent ones.
PLAIN_DRAW, DRAFT_DRAW, ACCEPT = range(3)


@dataclass(frozen=True)
class Sampling:
    """temperature >= 0 (0: argmax); top_k >= 1, top_p in (0, 1] and min_p in [0, 1], or None for no such filter.

    Applied in this order: temperature, top-k, top-p on what top-k left, min-p relative to the most likely token.
    The kind is a static choice of code; the values are a tensor, so that changing them compiles nothing.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self):
        smallest = torch.finfo(torch.float32).tiny
        if not (math.isfinite(self.temperature) and (self.temperature == 0 or self.temperature >= smallest)):
            raise ValueError(f"temperature = {self.temperature} must be 0 (greedy) or a number from {smallest:.0e} on")
        if self.top_k is not None and (self.top_k < 0 or self.top_k != int(self.top_k)):
            raise ValueError(f"top_k = {self.top_k} must be a whole number of tokens; 0 for no limit")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p = {self.top_p} must lie in (0, 1]; 1 for no limit")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p = {self.min_p} must lie in [0, 1]; 0 for no limit")

    @property
    def kind(self) -> str:
        if self.temperature == 0:
            return GREEDY
        return FILTERED if self.top_k or (self.top_p or 1) < 1 or self.min_p else PLAIN

    @cached_property
    def values(self) -> Tensor:
        """(4,) float32: temperature, top_k, top_p, min_p, with numbers that filter nothing in place of None."""
        return torch.tensor([self.temperature, self.top_k or math.inf, self.top_p or 1.0, self.min_p or 0.0])

    def probs(self, logits: Tensor) -> Tensor:
        """logits (..., V) -> probabilities (..., V) float32."""
        return distribution(logits, self.kind, self.values.to(logits.device))

    def sample(self, logits: Tensor, noise: Tensor) -> Tensor:
        """logits (..., V), noise (...) uniform in [0, 1) -> token ids (...) int64; INVALID for logits not finite."""
        return sample(logits, self.kind, self.values.to(logits.device), noise)


def sample(logits: Tensor, kind: str, values: Tensor, noise: Tensor) -> Tensor:
    """Draw from `distribution(logits, kind, values)`. Greedy takes the argmax directly: what its one-hot would give."""
    if kind == GREEDY:
        top, token = logits.float().max(dim=-1)
        return torch.where(top.isfinite(), token, INVALID)
    return draw(distribution(logits, kind, values), noise)


def distribution(logits: Tensor, kind: str, values: Tensor) -> Tensor:
    """Probabilities (..., V) float32 of logits (..., V). kind is static; values (4,) as in Sampling, or (B, 4) for
    logits (B, ..., V). Rows of several kinds share the code of the last of them (`common_kind`), and each row has the
    bits that its own kind's code would give.

    Greedy is the one-hot of the argmax, the lowest id on ties. A row that holds a NaN or +inf becomes all NaN.
    """
    logits = logits.float()
    top = logits.max(dim=-1, keepdim=True)
    one_hot = torch.zeros_like(logits).scatter(-1, top.indices, 1.0)
    one_hot = torch.where(top.values.isfinite(), one_hot, math.nan)
    if kind == GREEDY:
        return one_hot
    shape = values.shape[:-1] + (1,) * (logits.dim() - 1) if values.dim() > 1 else ()
    temperature, top_k, top_p, min_p = (value.view(shape) for value in values.unbind(-1))  # () or (B, 1, ...)
    is_greedy = temperature == 0
    scaled = (logits - top.values) / torch.where(is_greedy, 1.0, temperature)
    p = torch.where(is_greedy, one_hot, scaled.softmax(dim=-1))  # the largest is exp(0): no overflow
    if kind == PLAIN:
        return p
    is_filtered = ~is_greedy & ((top_k < math.inf) | (top_p < 1) | (min_p > 0))
    return torch.where(is_filtered, _filtered(p, top_k, top_p, min_p), p)


def common_kind(samplings: Iterable[Sampling]) -> str:
    """The kind whose code serves all of these."""
    return max((sampling.kind for sampling in samplings), key=KINDS.index)


def _filtered(p: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Top-k, then top-p, then min-p of p (..., V); the filters' values broadcast against p."""
    bits = _bits(p)
    p = p * (bits >= _cut(bits, torch.ones_like(bits), _whole(top_k)))
    # A rounded total just under top_p = 1 must not drop the tail, so 1 means no limit, not a mass to reach.
    mass = (p * 2.0**40).long()  # whole numbers add up to the same in any order, which a GPU leaves open
    reach = torch.where(top_p < 1, top_p * mass.sum(dim=-1, keepdim=True), math.inf)
    bits = _bits(p)
    p = p * (bits >= _cut(bits, mass, _whole(reach)))
    p = p * (p >= min_p * p.amax(dim=-1, keepdim=True))
    return p / p.sum(dim=-1, keepdim=True)


def _bits(p: Tensor) -> Tensor:
    """Float32 in [0, 1] as int64 in [0, 2^30), in the same order; NaN becomes the largest."""
    return p.view(torch.int32).clamp(0, 2**30 - 1).long()


def _whole(x: Tensor) -> Tensor:
    """x as int64, infinity as more than anything adds up to."""
    return x.clamp(max=2.0**62).ceil().long()


def _cut(bits: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The largest threshold t (..., 1) such that the weight of {bits >= t} reaches `target`; 0 if none does. int64 all.

    A radix search: each digit is found in a histogram of the entries that share the digits so far, two of 15 bits over
    a large vocabulary, three of ten where histograms of 2^15 would cost more than passes over the entries. No sort:
    sorting 128k entries takes 12 ms on a CPU. Equal entries stay or go together.
    """
    size = 15 if bits.size(-1) >= 2**15 else 10
    cut = torch.zeros_like(bits[..., :1])
    left = target.expand(cut.shape).clone()  # still to be reached by entries that share the digits of `cut`
    for shift in range(30 - size, -1, -size):
        digit = bits >> shift if shift else bits
        digit = digit & (2**size - 1) if shift < 30 - size else digit
        histogram = weight.new_zeros(*weight.shape[:-1], 2**size).scatter_add(-1, digit, weight)  # (..., 2^size)
        reached = histogram.flip(-1).cumsum(-1).flip(-1)  # weight of this digit and all above
        found = ((reached >= left).sum(dim=-1, keepdim=True) - 1).clamp(min=0)  # (..., 1)
        left = left - (reached - histogram).gather(-1, found)
        weight = weight * (digit == found)
        cut = cut | (found << shift)
    return cut


def draw(p: Tensor, noise: Tensor, kind: str = PLAIN) -> Tensor:
    """Inverse-CDF draw: p (..., V), noise (...) uniform in [0, 1) -> ids (...) int64; INVALID where p is NaN.

    The first id whose cumulative mass exceeds noise times the total. Only ids of positive probability count, for the
    total too: a parallel scan may round two equal sums differently, and must neither draw an impossible token nor none.
    Of a greedy `distribution` there is one id to draw, found without adding anything up.
    """
    if kind == GREEDY:
        top, token = p.max(dim=-1)
        return torch.where(top > 0, token, INVALID)
    cumulative = torch.where(p > 0, p.cumsum(dim=-1), p)  # 0 stays 0, NaN stays NaN
    reached = cumulative > noise[..., None] * cumulative.amax(dim=-1, keepdim=True)  # (..., V)
    return torch.where(reached.any(dim=-1), reached.byte().argmax(dim=-1), INVALID)


def uniform(seed: Tensor, pos: Tensor, purpose: int = PLAIN_DRAW) -> Tensor:
    """Uniform float32 in [0, 1), one for each (seed, pos, purpose): seed and pos int64 of one shape.

    A counter-based hash instead of a generator: it traces, needs no state, and gives a row the same numbers in any
    batch. Each input goes through Wellons' 32-bit mixer (github.com/skeeto/hash-prospector, "lowbias32"), written in
    int64 with a negative constant so that no product leaves 63 bits.
    """
    state = _mix(seed & 0xFFFFFFFF) ^ ((seed >> 32) & 0xFFFFFFFF)
    state = _mix(_mix(state) ^ (pos & 0xFFFFFFFF))
    state = _mix(state ^ (0x9E3779B9 * (purpose + 1) & 0xFFFFFFFF))
    return (state >> 8).float() * 2.0**-24


def _mix(x: Tensor) -> Tensor:
    """A bijection of [0, 2^32) that flips each output bit with probability close to a half when an input bit flips."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & 0xFFFFFFFF
    x = x ^ (x >> 15)
    x = (x * (0x846CA68B - 2**32)) & 0xFFFFFFFF
    return x ^ (x >> 16)
