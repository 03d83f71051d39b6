"""Logits -> distribution -> token: the settings of a request and the filters, each defined once.

    Sampling            the user's settings, checked; `.probs(logits)` and `.sample(logits, noise)`
    FILTERS, PENALTIES  the functions behind the settings of decoding/settings.py
    sample              logits and noise -> token id: `distribution`, then `draw`
    distribution        logits -> float32 probabilities
    draw                probabilities and one uniform number a row -> token id
    uniform             the uniform numbers: a hash of (seed, position, purpose)

Plain decoding, drafting and verification all go through these functions, so speculation is
lossless. decoding/logits.py applies the penalties.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from decoding.errors import UserError
from decoding.settings import SETTINGS, check_numbers

# In order of generality: the code of a path also serves rows of the paths before it.
PATHS = ("greedy", "plain", "filtered", "penalized")
GREEDY, PLAIN, FILTERED, PENALIZED = PATHS
INVALID = -1  # drawn where the logits hold a NaN or +inf, or nothing but -inf
MAX_BIASES = 300  # ids of a logit_bias

# Purposes of a uniform number: one position may need several independent ones.
PLAIN_DRAW, DRAFT_DRAW, ACCEPT = range(3)
NUM_PURPOSES = 3
MASK = 0xFFFFFFFF  # the low 32 bits
MAX_PARTS = 128  # of a vocabulary, each for a thread block of a GPU
# ---------------------------------------------------------------------------------------- filters


def top_k_filter(p: Tensor, top_k: Tensor) -> Tensor:
    # The tokens that are at least as likely as the k-th.
    bits = _bits(p)
    return bits >= _threshold(bits, torch.ones_like(bits), top_k.long())


def top_p_filter(p: Tensor, top_p: Tensor) -> Tensor:
    # The most likely tokens that together reach top_p, and those as likely as the last of them.
    bits = _bits(p)
    mass = (p * 2.0**40).long()  # integers: a GPU adds in any order
    total = mass.sum(dim=-1, keepdim=True)
    target = (top_p * total).ceil().long().clamp(min=1)
    return bits >= _threshold(bits, mass, target)


def min_p_filter(p: Tensor, min_p: Tensor) -> Tensor:
    return p >= min_p * p.amax(dim=-1, keepdim=True)


# -------------------------------------------------------------------------------------- penalties


def repetition(
    logits: Tensor,
    penalty: Tensor,
    prompt_counts: Tensor,
    output_counts: Tensor,
) -> Tensor:
    """Keskar et al., arXiv:1909.05858, section 4.1, with the sign that transformers gives it."""
    penalized = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(prompt_counts + output_counts > 0, penalized, logits)


def presence(
    logits: Tensor,
    penalty: Tensor,
    prompt_counts: Tensor,
    output_counts: Tensor,
) -> Tensor:
    return logits - penalty * (output_counts > 0)


def frequency(
    logits: Tensor,
    penalty: Tensor,
    prompt_counts: Tensor,
    output_counts: Tensor,
) -> Tensor:
    return logits - penalty * output_counts


# --------------------------------------------------------------------------------------- settings

# Each filter maps p (..., V) and its value to a bool mask (..., V), True where a token stays.
FILTERS: dict[str, Callable] = {"top_k": top_k_filter, "top_p": top_p_filter, "min_p": min_p_filter}
# Each penalty maps logits, its value, and the counts in prompt and output to new logits.
PENALTIES: dict[str, Callable] = {
    "repetition_penalty": repetition,
    "presence_penalty": presence,
    "frequency_penalty": frequency,
}


@dataclass(frozen=True)
class Sampling:
    """Settings, applied in this order: logit_bias, the penalties, temperature, then the filters in
    the order of their fields, each on the result of the one before. None is neutral. UserError for
    a number out of range.

    The path is a static choice of code; the values are a tensor, so that changing them compiles
    nothing.
    """

    temperature: float = SETTINGS["temperature"].default
    top_k: int | None = SETTINGS["top_k"].default
    top_p: float | None = SETTINGS["top_p"].default
    min_p: float | None = SETTINGS["min_p"].default
    repetition_penalty: float = SETTINGS["repetition_penalty"].default
    presence_penalty: float = SETTINGS["presence_penalty"].default
    frequency_penalty: float = SETTINGS["frequency_penalty"].default
    logit_bias: tuple[tuple[int, float], ...] = ()  # (id, added to its logit), up to MAX_BIASES ids

    def __post_init__(self):
        check_numbers(vars(self))
        if not isinstance(self.logit_bias, tuple):
            raise UserError(f"logit_bias = {self.logit_bias!r:.99} must be a tuple of pairs")
        if len(self.logit_bias) > MAX_BIASES:
            raise UserError(
                f"logit_bias: {len(self.logit_bias)} tokens are more than the {MAX_BIASES} that"
                f" fit",
            )
        for id, bias in self.logit_bias:
            if not -100 <= bias <= 100:
                raise UserError(f"logit_bias: {bias} for token {id} must lie in [-100, 100]")

    @property
    def is_greedy(self) -> bool:
        """Is each token the most likely one? `distribution` has the same rule for tensors."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def path(self) -> str:
        if self.logit_bias or self._changes(PENALTIES):
            return PENALIZED
        if self.is_greedy:
            return GREEDY
        return FILTERED if self._changes(FILTERS) else PLAIN

    def _changes(self, settings: Iterable[str]) -> bool:
        return any(getattr(self, name) not in (None, SETTINGS[name].neutral) for name in settings)

    @cached_property
    def values(self) -> Tensor:
        """(n,) float32: one number for each of SETTINGS."""
        values = []
        for name, setting in SETTINGS.items():
            value = getattr(self, name)
            values.append(float(setting.neutral if value is None else value))
        return torch.tensor(values, dtype=torch.float32)

    @cached_property
    def biases(self) -> Tensor:
        """(2, MAX_BIASES) float32: ids, exact below 2^24, and their biases; zeros add nothing."""
        biases = torch.zeros(2, MAX_BIASES, dtype=torch.float32)
        if self.logit_bias:
            biases[:, : len(self.logit_bias)] = torch.tensor(self.logit_bias, dtype=torch.float32).T
        return biases

    def probs(self, logits: Tensor) -> Tensor:
        """logits (..., V), penalized already -> probabilities (..., V) float32."""
        return distribution(logits, self.path, self.values.to(logits.device))

    def sample(self, logits: Tensor, noise: Tensor) -> Tensor:
        """logits (..., V), noise (...) uniform in [0, 1) -> token ids (...) int64; INVALID for
        logits not finite."""
        return sample(logits, self.path, self.values.to(logits.device), noise)


def split_by_name(values: Tensor, dims: int) -> dict[str, Tensor]:
    """values (n,) of a row, or (B, n) of rows -> value by setting: (), or (B, 1, ...) of `dims`
    dimensions."""
    shape = ()
    if values.dim() > 1:
        shape = (values.size(0),) + (1,) * (dims - 1)
    return {name: value.view(shape) for name, value in zip(SETTINGS, values.unbind(-1))}


# ----------------------------------------------------------------------------------- distribution


def sample(logits: Tensor, path: str, values: Tensor, noise: Tensor) -> Tensor:
    """Draw from `distribution(logits, path, values)`. Greedy takes the argmax, which the one-hot
    marks."""
    if path == GREEDY:
        top, token = max_and_index(logits.float())
        return torch.where(top.isfinite(), token, INVALID)
    return draw(distribution(logits, path, values), noise)


def distribution(
    logits: Tensor,
    path: str,
    values: Tensor,
) -> Tensor:
    """Probabilities (..., V) float32 of logits (..., V). path is static; values (n,) as in
    Sampling, or (B, n) for logits (B, ..., V). Rows of several paths share the code of the most
    general of them (`common_path`), which gives each row the same bits as its own path's code.
    Penalties are in the logits already.

    Greedy, which temperature 0 and top_k 1 ask for, is the one-hot of the argmax, the lowest id on
    ties. A larger top_k keeps all tokens that tie with its last one, as in transformers and vLLM. A
    row that holds a NaN or +inf, or nothing but -inf, becomes all NaN.
    """
    logits = logits.float()
    top, token = (x[..., None] for x in max_and_index(logits))  # (..., 1)
    one_hot = torch.zeros_like(logits).scatter(-1, token, 1.0)
    one_hot = torch.where(top.isfinite(), one_hot, math.nan)
    if path == GREEDY:
        return one_hot
    value_by_name = split_by_name(values, logits.dim())
    temperature = value_by_name["temperature"]
    is_greedy = (temperature == 0) | (value_by_name["top_k"] == 1)
    scaled = (logits - top) / torch.where(is_greedy, 1.0, temperature)
    # The largest term is exp(0), so nothing overflows.
    p = torch.where(is_greedy, one_hot, scaled.softmax(dim=-1))
    if path == PLAIN:
        return p
    filtered = p
    is_filtered = torch.zeros_like(is_greedy)
    for name, filter in FILTERS.items():
        value = value_by_name[name]
        is_neutral = value == SETTINGS[name].neutral
        stays = is_neutral | filter(filtered, value)
        filtered = filtered * stays
        is_filtered = is_filtered | ~is_neutral
    total = filtered.sum(dim=-1, keepdim=True)
    # Rows without a filter keep p's bits, and greedy ones their argmax, whatever a filter drops.
    return torch.where(is_filtered & ~is_greedy, filtered / total, p)


def max_and_index(x: Tensor) -> tuple[Tensor, Tensor]:
    """The maximum of x (..., V) and its first index; a NaN counts as the maximum. Compiled for a
    GPU, one thread block would search all of V: there parts of V come first, then their maxima."""
    num_parts = math.gcd(x.size(-1), MAX_PARTS)
    if num_parts == 1 or not x.is_cuda or not torch.compiler.is_compiling():
        return x.max(dim=-1)
    return max_by_parts(x, num_parts)


def max_by_parts(x: Tensor, num_parts: int) -> tuple[Tensor, Tensor]:
    """x.max(dim=-1), by way of the maxima of equal parts."""
    parts = x.unflatten(-1, (num_parts, -1))
    part_max, part_index = parts.max(dim=-1)  # (..., num_parts)
    top, part = part_max.max(dim=-1, keepdim=True)  # (..., 1)
    index = part_index.gather(-1, part) + part * parts.size(-1)
    return top[..., 0], index[..., 0]


def common_path(owners: Iterable) -> str:
    """The path whose code serves all of these samplings or requests."""
    return max((owner.path for owner in owners), key=PATHS.index)


def _bits(p: Tensor) -> Tensor:
    """Float32 in [0, 1] as int64 in [0, 2^30), in the same order. NaN may become any of them: its
    row stays NaN under every mask."""
    return p.view(torch.int32).clamp(0, 2**30 - 1).long()


def _threshold(bits: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The largest threshold t (..., 1) such that the entries >= t have a total weight of at least
    `target`; 0 if there is no such t. All int64.

    A radix search, because a sort of 128k entries takes 12 ms on a CPU: each digit of t comes from
    a histogram of the entries that share the higher digits. Large vocabularies take two digits of
    15 bits, small ones three of 10, because 2^15 bins would cost more than an extra pass. Tied
    entries are all kept or all dropped.
    """
    num_bits = 15 if bits.size(-1) >= 2**15 else 10  # of a digit
    base = 2**num_bits
    threshold = torch.zeros_like(bits[..., :1])
    # The weight that entries with the threshold's digits must reach.
    remaining = target.expand(threshold.shape).clone()
    for shift in range(30 - num_bits, -1, -num_bits):
        digits = bits >> shift & (base - 1)
        histogram = weight.new_zeros(*weight.shape[:-1], base)
        histogram = histogram.scatter_add(-1, digits, weight)
        reached = histogram.flip(-1).cumsum(-1).flip(-1)  # weight of this digit and all above
        num_reached = (reached >= remaining).sum(dim=-1, keepdim=True)  # (..., 1)
        digit = (num_reached - 1).clamp(min=0)
        above = (reached - histogram).gather(-1, digit)
        remaining = remaining - above
        weight = weight * (digits == digit)
        threshold = threshold | (digit << shift)
    return threshold


def draw(
    p: Tensor,
    noise: Tensor,
    path: str = PLAIN,
) -> Tensor:
    """Inverse-CDF draw: p (..., V), noise (...) uniform in [0, 1) -> ids (...) int64; INVALID where
    p is NaN.

    Returns the first id whose cumulative probability exceeds noise * total. The sums of ids of
    probability 0 are masked, because a parallel scan may round equal sums differently, and could
    then pick an impossible id or none. With path GREEDY, p is one-hot and needs no sum.
    """
    if path == GREEDY:
        top, token = max_and_index(p)
        return torch.where(top > 0, token, INVALID)
    cumulative = torch.where(p > 0, p.cumsum(dim=-1), p)  # 0 stays 0, NaN stays NaN
    total = cumulative.amax(dim=-1, keepdim=True)  # (..., 1)
    reached = cumulative > noise[..., None] * total  # (..., V)
    _, token = max_and_index(reached.byte())
    return torch.where(reached.any(dim=-1), token, INVALID)


def uniform(
    seed: Tensor,
    pos: Tensor,
    purpose: int | Tensor = PLAIN_DRAW,
) -> Tensor:
    """Uniform float32 in [0, 1), one for each (seed, pos, purpose): seed and pos int64 of one
    shape.

    A counter-based hash instead of a generator: it traces, needs no state, and gives a row the same
    numbers in any batch. Each input goes through Wellons' 32-bit mixer
    (github.com/skeeto/hash-prospector, "lowbias32"), written in int64 with a negative constant so
    that no product leaves 63 bits.
    """
    if not seed.is_cuda:
        return counter_hash(seed, pos, purpose)
    # A GPU's compiler, as weights/compiling.py sets it, would inline the hash into every kernel
    # that reads a number. A nested region is computed once and stored, if all its inputs are
    # tensors: so the purpose becomes one.
    purposes = torch.full_like(pos, 1) * purpose
    return hash_in_region(seed, pos, purposes)


def counter_hash(seed: Tensor, pos: Tensor, purpose: int | Tensor) -> Tensor:
    low = seed & MASK
    high = (seed >> 32) & MASK
    state = _mix(low) ^ high
    state = _mix(_mix(state) ^ (pos & MASK))
    step = 0x9E3779B9 * (purpose + 1) & MASK
    state = _mix(state ^ step)
    return (state >> 8).float() * 2.0**-24


hash_in_region = torch.compiler.nested_compile_region(counter_hash)


def round_uniform(seed: Tensor, start: Tensor, offset: Tensor, purpose: int) -> Tensor:
    """`uniform` numbers of one round: one for the token at position `start` + `offset`, where the
    last token before the round is at `start`. No other round has the same numbers."""
    start = start.expand_as(seed)
    purposes = purpose + NUM_PURPOSES * offset
    return uniform(seed, start, purposes)


def row_noise(seed: Tensor, start: Tensor, pos: Tensor, purpose: int) -> Tensor:
    """Uniform numbers (B, T) for tokens at pos (B, T) of rows with these seeds (B,): those of plain
    decoding for PLAIN_DRAW, or else those of the round whose last decided token is at start
    (B,)."""
    seed = seed[:, None].expand_as(pos)
    if purpose == PLAIN_DRAW:
        return uniform(seed, pos)
    start = start[:, None]
    return round_uniform(seed, start, pos - start, purpose)


def _mix(x: Tensor) -> Tensor:
    """A bijection of [0, 2^32) that flips each output bit with probability close to a half when an
    input bit flips."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & MASK
    x = x ^ (x >> 15)
    x = (x * (0x846CA68B - 2**32)) & MASK
    return x ^ (x >> 16)
