"""How attention over a cache is cut so that a query's result does not depend on its pass.

    in_blocks           a length of cache as whole blocks of keys
    same_attention      (rows, length_multiple) under which every pass rounds alike, found by trying

The sister of weights/rounding.py, for attention. This file knows no model: kernels come as functions.
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


def in_blocks(length: int, length_multiple: int) -> int:
    """Round `length` up so that its last block of KEY_BLOCK holds a multiple of `length_multiple`, or is full."""
    before = (length - 1) // KEY_BLOCK * KEY_BLOCK
    return before + min(math.ceil((length - before) / length_multiple) * length_multiple, KEY_BLOCK)


def same_attention(
    attend: Callable[..., Tensor], B: int, H: int, G: int, E: int, like: Tensor
) -> tuple[int, int] | None:
    """(row_multiple, length_multiple) under which a query's attention has the same bits in every pass: its R * T query
    rows are padded to a multiple of row_multiple, and the cache's length is rounded up by `in_blocks`. None if no such
    pair is known.

    attend(q (B, H, T, E), k and v (B, G, S, E), bias (B, 1, rows, S)) -> (B, H, T, E), in the dtype and on the device
    of `like`. The probe runs passes over few and many positions, for one row of a batch and for B, with the query first
    and last in them, at the borders of a CPU kernel's blocks of keys and inside: some kernels halve a block of fewer
    than 384 keys, and cut a longer one at 192.
    """
    if like.device.type != "cpu":
        return None
    return first_multiples(attend, B, G, H // G, E, like.dtype, torch.get_num_threads())


@functools.cache
def first_multiples(
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
    """Do these multiples pass the probe of `same_attention`? The sums over keys cancel where scores are 0; the sums
    inside scores cancel by themselves."""
    long = math.ceil(768 / R)  # from 192 and 768 query rows on a CPU's kernel takes other blocks
    passes = [(1, G, T, T - 1) for T in (1, 9)] + [(B, G, T, 0) for T in (1, 9)] + [(1, 1, long, 0)]
    more = [(1, G, T, at) for T in (9, 6, 3, 2) for at in (0, T - 1)]
    more += [(1, 1, T, at) for T in (17, 64, long) for at in (0, T - 1)]
    for filled, cancels in itertools.product((904, 812, 512, 300, 40), "vk"):
        end = in_blocks(filled + long, length_multiple)
        size = 2.0 ** (10 if dtype == torch.float16 else 0)  # of q: float16's keys are smaller
        q = torch.full((B, G * R, 1, E), size * (cancels == "k"), dtype=dtype)
        k = cancelling(end, E, dtype).expand(B, G, end, E)
        v = torch.zeros(1, 1, end, E, dtype=dtype)
        one_hot = torch.eye(E, dtype=dtype).repeat(math.ceil(filled / E), 1)[:filled]  # (filled, E)
        v[..., :filled, :] = cancelling(E, filled, dtype).T if cancels == "v" else one_hot
        v, first = v.expand(B, G, end, E), None
        # All with one thread: where another process holds a processor, several wait for each other at every pass.
        tried = ((where, threads) for threads in at_one_and_all_threads() for where in passes + more * (threads == 1))
        for (b, g, T, at), _ in tried:
            begin = filled - 1 - at
            if begin >= 0:
                S = in_blocks(begin + T, length_multiple)
                visible = torch.arange(begin, begin + T)[:, None] >= torch.arange(S)  # (T, S)
                bias = torch.zeros((), dtype=dtype).where(visible, -math.inf).repeat(R, 1)  # (R * T, S)
                bias = F.pad(bias, (0, 0, 0, -R * T % row_multiple)).expand(b, 1, -1, -1)
                part = q[:b, : g * R].expand(-1, -1, T, -1).contiguous()
                y = attend(part, k[:b, :g, :S], v[:b, :g, :S], bias)[:, :, at]  # (b, g * R, E)
                first = y[0, 0] if first is None else first
                if not torch.equal(y, first.expand_as(y)):
                    return False
    return True
