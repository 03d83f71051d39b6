"""Attention over shapes that give a query the same bits in every step and round.

    ExactKernel             pads the query rows of a pass, and gathers whole blocks of keys
    round_up_length         a length of cache, rounded up within its last block of keys
    invariant_multiples     the multiples of query rows and of lengths for which passes agree

`exact` explains the method.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from exact.probes import at_one_and_all_threads, cancelling
from model import AttentionKernel, AttentionMask, visible_keys

KEY_BLOCK = 512  # keys that a CPU's attention kernel adds up at once (torch 2.11 to 2.13)
# Lengths at the borders of a kernel's blocks and inside them: some kernels halve a block of fewer
# than 384 keys, and split a longer one at 192.
NUM_KEYS = (904, 812, 512, 300, 40)
LENGTH_MULTIPLES = (16, 32, 192, KEY_BLOCK)
ROW_MULTIPLES = (1, 2, 8, 32)
# Positions of a pass: few, and so many that a kernel takes other blocks (from 192 query rows on).
# Several threads run few passes: where another process runs, they wait for each other at each.
SIZES = (9, 6, 3, 2, 17, 64)
LONGER = (200, 768)  # positions that another row of the batch may be ahead


class ExactKernel(AttentionKernel):
    """Attention over a multiple of `row_multiple` query rows."""

    key_block = KEY_BLOCK

    def __init__(self, row_multiple: int):
        self.row_multiple = row_multiple

    def prepare(self, keys: AttentionMask, R: int, dtype: torch.dtype) -> AttentionMask:
        keys = super().prepare(keys, R, dtype)
        num_padding = -keys.mask.size(2) % self.row_multiple
        if not num_padding:
            return keys
        return keys._replace(mask=F.pad(keys.mask, (0, 0, 0, num_padding)))


def round_up_length(length: int, length_multiple: int) -> int:
    """Round `length` up so that its last block of KEY_BLOCK holds a multiple of `length_multiple`,
    or is full."""
    before = (length - 1) // KEY_BLOCK * KEY_BLOCK
    last_block = math.ceil((length - before) / length_multiple) * length_multiple
    return before + min(last_block, KEY_BLOCK)


class Heads(NamedTuple):
    """What else a kernel's order may depend on: B rows of a batch, G KV heads, R query heads each,
    E channels."""

    B: int
    G: int
    R: int
    E: int
    dtype: torch.dtype
    has_sinks: bool = False


@functools.cache
def invariant_multiples(
    attend: Callable[..., Tensor], heads: Heads, device: torch.device, threads: int
) -> tuple[int, int] | None:
    """(row_multiple, length_multiple) for which a query's attention has the same bits in every
    step and round: the R * T query rows are padded to a multiple of row_multiple, and
    `round_up_length` rounds the cache's length up. None if no pair passes the probe, and on other
    devices than a CPU. `attend` has the signature of model.attend; a torch of another number of
    threads may round otherwise.
    """
    if device.type != "cpu":
        return None
    for length_multiple, row_multiple in itertools.product(LENGTH_MULTIPLES, ROW_MULTIPLES):
        if attends_alike(attend, heads, row_multiple, length_multiple):
            return row_multiple, length_multiple
    return None


def attends_alike(attend: Callable, heads: Heads, row_multiple: int, length_multiple: int) -> bool:
    """Do these multiples pass the probe of `invariant_multiples`? The compared query, first or last
    of one or several, for one row of a batch and for B, beside longer rows or not, sees keys over
    which rounding alone is left of sums that cancel. Its results are to be equal over rows and
    heads too."""
    kernel = ExactKernel(row_multiple)
    for num_keys, cancels in itertools.product(NUM_KEYS, ("values", "scores")):
        inputs = probe_inputs(heads, num_keys, cancels)
        expected = None  # (E,)
        for B, T, query, num_longer in passes_of(heads.B):
            begin = num_keys - 1 - query
            if begin < 0:
                continue
            pos = torch.arange(begin, begin + T)[None]  # (1, T)
            S = round_up_length(begin + T + num_longer, length_multiple)
            keys = visible_keys(pos, torch.arange(S), None, 1)
            bias = kernel.prepare(keys, heads.R, heads.dtype).mask.expand(B, -1, -1, -1)
            q, k, v, sinks = inputs
            q = q[:B].expand(-1, -1, T, -1).contiguous()
            y = attend(q, k[:B, :, :S], v[:B, :, :S], bias, sinks)[:, :, query]  # (B, H, E)
            if expected is None:
                expected = y[0, 0]
            if not torch.equal(y, expected.expand_as(y)):
                return False
    return True


def passes_of(B: int) -> Iterator[tuple[int, int, int, int]]:
    """The passes to compare, (rows, positions, place of the compared query, LONGER or 0), at one
    thread and at all."""
    for threads in at_one_and_all_threads():
        yield from ((1, 1, 0, 0), (B, 1, 0, 0), (B, 9, 0, 0))
        yield from ((1, T, 0, num_longer) for T in (1, 9) for num_longer in LONGER)
        for T in SIZES if threads == 1 else SIZES[:1]:
            yield from ((1, T, 0, 0), (1, T, T - 1, 0))


def probe_inputs(
    heads: Heads, num_keys: int, cancels: str
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """q (B, H, 1, E), k and v (B, G, S, E), and sinks of 0 if there are any. What cancels: the
    "values" over the keys, with scores of 0; or the products inside each score ("scores"), with
    values that tell the scores apart."""
    B, G, R, E, dtype, has_sinks = heads
    S = num_keys + max(LONGER) + KEY_BLOCK
    k = cancelling(S, E, dtype)  # (S, E)
    v = torch.zeros(S, E, dtype=dtype)
    if cancels == "values":
        q_value = 0.0
        v[:num_keys] = cancelling(E, num_keys, dtype).T
    else:
        q_value = 2.0**10 if dtype == torch.float16 else 1.0  # float16's keys are smaller
        v[:num_keys] = torch.eye(E, dtype=dtype).repeat(math.ceil(num_keys / E), 1)[:num_keys]
    q = torch.full((B, G * R, 1, E), q_value, dtype=dtype)
    sinks = torch.zeros(G * R) if has_sinks else None
    return q, k.expand(B, G, S, E), v.expand(B, G, S, E), sinks
