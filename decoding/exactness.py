"""Sizes for attention over a cache, so that a query's result does not depend on the pass that computes it.

    round_up_length         a length of cache, rounded up within its last block of keys
    invariant_multiples     the multiples of query rows and of lengths for which every pass rounds alike, by a probe

weights/rounding.py does the same for products. This file knows no model: kernels come as functions.
"""

import functools
import itertools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from model import KEY_BLOCK
from weights.rounding import at_one_and_all_threads, cancelling


def round_up_length(length: int, length_multiple: int) -> int:
    """Round `length` up so that its last block of KEY_BLOCK holds a multiple of `length_multiple`, or is full."""
    before = (length - 1) // KEY_BLOCK * KEY_BLOCK
    return before + min(math.ceil((length - before) / length_multiple) * length_multiple, KEY_BLOCK)


def invariant_multiples(
    attend: Callable[..., Tensor], B: int, H: int, G: int, E: int, like: Tensor
) -> tuple[int, int] | None:
    """(row_multiple, length_multiple) for which a query's attention has the same bits in every pass: the R * T query
    rows are padded to a multiple of row_multiple, and `round_up_length` rounds the cache's length up. None if no pair
    passes the probe, and on other devices than a CPU.

    attend(q (B, H, T, E), k and v (B, G, S, E), bias (B, 1, rows, S)) -> (B, H, T, E), in the dtype and on the device
    of `like`. The probe runs passes over few and many positions, for one row of a batch and for B, with the query first
    and last in the pass. The query sees keys up to the borders of a CPU kernel's blocks and inside:
    some kernels halve a block of fewer than 384 keys, and split a longer one at 192.
    """
    if like.device.type != "cpu":
        return None
    return probe_multiples(attend, B, G, H // G, E, like.dtype, torch.get_num_threads())


@functools.cache
def probe_multiples(
    attend: Callable[..., Tensor], B: int, G: int, R: int, E: int, dtype: torch.dtype, threads: int
) -> tuple[int, int] | None:
    for length_multiple, row_multiple in itertools.product((16, 32, 192, KEY_BLOCK), (1, 2, 8, 32)):
        if attends_alike(attend, B, G, R, E, dtype, row_multiple, length_multiple):
            return row_multiple, length_multiple
    return None


def attends_alike(
    attend: Callable[..., Tensor], B: int, G: int, R: int, E: int, dtype: torch.dtype, row_multiple: int,
    length_multiple: int,
) -> bool:  # fmt: skip
    """Do these multiples pass the probe of `invariant_multiples`? Rounding alone is left of sums that
    cancel: of values over the keys, with scores of 0 ("v"), and of products inside each score ("k")."""
    max_T = math.ceil(768 / R)  # from 192 and 768 query rows on a CPU's kernel takes other blocks
    # (rows, KV heads, T, the query's index in the pass)
    passes = [(1, G, T, T - 1) for T in (1, 9)] + [(B, G, T, 0) for T in (1, 9)] + [(1, 1, max_T, 0)]
    more_passes = [(1, G, T, at) for T in (9, 6, 3, 2) for at in (0, T - 1)]
    more_passes += [(1, 1, T, at) for T in (17, 64, max_T) for at in (0, T - 1)]
    for num_keys, cancels in itertools.product((904, 812, 512, 300, 40), "vk"):
        max_S = round_up_length(num_keys + max(T for _, _, T, _ in more_passes), length_multiple)
        q_value = 2.0 ** (10 if dtype == torch.float16 else 0) if cancels == "k" else 0  # float16's keys are smaller
        q = torch.full((B, G * R, 1, E), q_value, dtype=dtype)
        k = cancelling(max_S, E, dtype).expand(B, G, max_S, E)
        v = torch.zeros(1, 1, max_S, E, dtype=dtype)
        one_hot = torch.eye(E, dtype=dtype).repeat(math.ceil(num_keys / E), 1)[:num_keys]  # (num_keys, E)
        v[..., :num_keys, :] = cancelling(E, num_keys, dtype).T if cancels == "v" else one_hot
        v, expected = v.expand(B, G, max_S, E), None
        # More with one thread only: where another process runs, several threads wait for each other at every pass.
        runs = (run for threads in at_one_and_all_threads() for run in passes + more_passes * (threads == 1))
        for b, g, T, at in runs:
            begin = num_keys - 1 - at
            if begin >= 0:
                S = round_up_length(begin + T, length_multiple)
                visible = torch.arange(begin, begin + T)[:, None] >= torch.arange(S)  # (T, S)
                bias = torch.zeros((), dtype=dtype).where(visible, -math.inf).repeat(R, 1)  # (R * T, S)
                bias = F.pad(bias, (0, 0, 0, -R * T % row_multiple)).expand(b, 1, -1, -1)
                part = q[:b, : g * R].expand(-1, -1, T, -1).contiguous()
                y = attend(part, k[:b, :g, :S], v[:b, :g, :S], bias)[:, :, at]  # (b, g * R, E)
                expected = y[0, 0] if expected is None else expected
                if not torch.equal(y, expected.expand_as(y)):
                    return False
    return True
