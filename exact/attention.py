"""Attention over shapes that give a query the same bits in every pass.

    invariant_multiples     multiples of query rows and of lengths for which all passes agree
    round_up_length         a length of cache, rounded up within its last block of keys
    kernel_of               the function that a class of caches attends by, for the probe

`exact` explains the method.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from exact.probes import at_one_and_all_threads, cancelling
from model import KVCache, attend

KEY_BLOCK = 512  # keys that a CPU's attention kernel adds up at once (torch 2.11 to 2.13)
# Lengths at the borders of a kernel's blocks and inside them: some kernels halve a block of fewer
# than 384 keys, and split a longer one at 192.
NUM_KEYS = (904, 812, 512, 300, 40)
LENGTH_MULTIPLES = (16, 32, 192, KEY_BLOCK)
ROW_MULTIPLES = (1, 2, 8, 32)
MANY_ROWS = 768  # from 192 and from 768 query rows on a CPU's kernel takes other blocks


class Heads(NamedTuple):
    """What else a kernel's order may depend on: B rows of a batch, G KV heads, R query heads each,
    E channels."""

    B: int
    G: int
    R: int
    E: int
    dtype: torch.dtype


class Pass(NamedTuple):
    """Queries at T consecutive positions, of which one, `query`, is compared with other passes."""

    B: int
    G: int
    T: int
    query: int


class Inputs(NamedTuple):
    """What the compared query sees: `num_keys` keys, over which rounding alone is left of sums that
    cancel."""

    q: Tensor  # (B, H, 1, E)
    k: Tensor  # (B, G, S, E)
    v: Tensor  # (B, G, S, E)
    num_keys: int


def round_up_length(length: int, length_multiple: int) -> int:
    """Round `length` up so that its last block of KEY_BLOCK holds a multiple of `length_multiple`,
    or is full."""
    before = (length - 1) // KEY_BLOCK * KEY_BLOCK
    last_block = math.ceil((length - before) / length_multiple) * length_multiple
    return before + min(last_block, KEY_BLOCK)


def attend_with_zero_sinks(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return attend(q, k, v, bias, q.new_zeros(q.size(1)))


def kernel_of(cache_type: type[KVCache], has_sinks: bool, like: Tensor) -> Callable:
    """The function, with the signature of `attend`, to probe in the dtype and on the device of
    `like`. A class of caches that attends by another one returns it from a class method
    `kernel(has_sinks, like)`."""
    if hasattr(cache_type, "kernel"):
        return cache_type.kernel(has_sinks, like)
    return attend_with_zero_sinks if has_sinks else attend


def invariant_multiples(
    attend: Callable[..., Tensor],
    B: int,
    H: int,
    G: int,
    E: int,
    like: Tensor,
) -> tuple[int, int] | None:
    """(row_multiple, length_multiple) for which a query's attention has the same bits in every
    pass: the R * T query rows are padded to a multiple of row_multiple, and `round_up_length`
    rounds the cache's length up. None if no pair passes the probe, and on other devices than a CPU.

    attend(q (B, H, T, E), k and v (B, G, S, E), bias (B, 1, rows, S)) -> (B, H, T, E), in the dtype
    and on the device of `like`. The probe runs passes over few and many positions, for one row of a
    batch and for B, with the query first and last in the pass.
    """
    if like.device.type != "cpu":
        return None
    return probe_multiples(attend, Heads(B, G, H // G, E, like.dtype), torch.get_num_threads())


@functools.cache
def probe_multiples(attend: Callable, heads: Heads, threads: int) -> tuple[int, int] | None:
    for length_multiple, row_multiple in itertools.product(LENGTH_MULTIPLES, ROW_MULTIPLES):
        if attends_alike(attend, heads, row_multiple, length_multiple):
            return row_multiple, length_multiple
    return None


def attends_alike(attend: Callable, heads: Heads, row_multiple: int, length_multiple: int) -> bool:
    """Do these multiples pass the probe of `invariant_multiples`?"""
    for num_keys, cancels in itertools.product(NUM_KEYS, ("values", "scores")):
        max_length = round_up_length(num_keys + MANY_ROWS, length_multiple)
        inputs = probe_inputs(heads, num_keys, max_length, cancels)
        expected = None  # (E,)
        passes = (p for threads in at_one_and_all_threads() for p in passes_of(heads, threads))
        for probe_pass in passes:
            if probe_pass.query >= num_keys:
                continue  # it would begin before the first position
            y = run_pass(attend, inputs, probe_pass, row_multiple, length_multiple)  # (b, g * R, E)
            if expected is None:
                expected = y[0, 0]
            if not torch.equal(y, expected.expand_as(y)):
                return False
    return True


def passes_of(heads: Heads, threads: int) -> list[Pass]:
    """The passes to compare, the first over one position. Several threads run few of them: where
    another process runs, they wait for each other at every pass."""
    B, G, R = heads[:3]
    max_T = math.ceil(MANY_ROWS / R)
    passes = [Pass(1, G, 1, 0), Pass(B, G, 1, 0), Pass(B, G, 9, 0)]
    sizes = [(G, 9), (1, max_T)]
    if threads == 1:
        sizes += [(G, 6), (G, 3), (G, 2), (1, 17), (1, 64)]
    for num_heads, T in sizes:
        passes += [Pass(1, num_heads, T, 0), Pass(1, num_heads, T, T - 1)]
    return passes


def probe_inputs(heads: Heads, num_keys: int, S: int, cancels: str) -> Inputs:
    """What cancels: the "values" over the keys, with scores of 0; or the products inside each score
    ("scores"), with values that tell the scores apart."""
    B, G, R, E, dtype = heads
    k = cancelling(S, E, dtype)  # (S, E)
    v = torch.zeros(S, E, dtype=dtype)
    if cancels == "values":
        q_value = 0.0
        v[:num_keys] = cancelling(E, num_keys, dtype).T
    else:
        q_value = 2.0**10 if dtype == torch.float16 else 1.0  # float16's keys are smaller
        v[:num_keys] = torch.eye(E, dtype=dtype).repeat(math.ceil(num_keys / E), 1)[:num_keys]
    q = torch.full((B, G * R, 1, E), q_value, dtype=dtype)
    return Inputs(q, k.expand(B, G, S, E), v.expand(B, G, S, E), num_keys)


def run_pass(
    attend: Callable[..., Tensor],
    inputs: Inputs,
    probe_pass: Pass,
    row_multiple: int,
    length_multiple: int,
) -> Tensor:
    """The compared query's results (b, g * R, E), which are to be equal over rows and heads too."""
    b, g, T, query = probe_pass
    R = inputs.q.size(1) // inputs.k.size(1)
    begin = inputs.num_keys - 1 - query
    S = round_up_length(begin + T, length_multiple)
    is_visible = torch.arange(begin, begin + T)[:, None] >= torch.arange(S)  # (T, S)
    bias = torch.zeros((), dtype=inputs.q.dtype).where(is_visible, -math.inf)
    bias = F.pad(bias.repeat(R, 1), (0, 0, 0, -R * T % row_multiple))  # (rows, S)
    bias = bias.expand(b, 1, -1, -1)
    q = inputs.q[:b, : g * R].expand(-1, -1, T, -1).contiguous()
    k = inputs.k[:b, :g, :S]
    v = inputs.v[:b, :g, :S]
    return attend(q, k, v, bias)[:, :, query]
