"""Products in numbers of rows that give each row of a step or round the same bits.

    RowSplit                    a product padded to, or split into, such numbers of rows
    find_row_split              the RowSplit of a kernel, by a probe
    invariant_row_counts        the probe

`exact` explains the method. The probes run once for each shape and take tenths of a second.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from exact.probes import at_one_and_all_threads, cancelling

ANY_ROWS = 2**31  # as a bound: no bound
# A larger batch is a prompt's: it promises no bits, and runs in one product.
STEP_ROWS = 256
NUM_PROBES = 4  # sums to compare: two orders of summation agree in about one sum of a hundred
# The least that batches are padded to where padding is free: oneDNN reads 16- and 8-bit weights up
# to 25 % faster for 4 to 6 rows.
FAST_ROWS = 5
# Numbers of rows to probe; fewer of them for large weights, whose probe takes milliseconds.
ROW_COUNTS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 24, 32, 48, 64, 128)
LARGE_ROW_COUNTS = (FAST_ROWS, 6, 9, 12, 16, 32, 64, 128)
UNPADDED_ROW_COUNTS = tuple(range(1, 9))  # for kernels whose cost is per row
# fbgemm's kernel takes 120 rows at once, by tiles of 6 or 14 rows.
FBGEMM_ROW_COUNTS = (*range(1, 31), *range(36, 121, 6))


class RowSplit(NamedTuple):
    """How a product divides its rows. The default takes them as they come and promises nothing."""

    row_counts: tuple[int, ...] = ()  # a smaller batch is padded to the next of these, which ascend
    # The largest number of rows for which a row's result depends on the row alone. Sums of ANY_ROWS
    # are exact in any order; of less, a batch larger than all counts is split into the largest.
    batch_invariant_rows: int = 0

    def run(self, product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """product(x (M, in)) -> (M, out), padded with zero rows or in parts."""
        M = x.size(0)
        for count in self.row_counts:
            if count == M:
                return product(x)
            if count > M:
                return product(F.pad(x, (0, 0, 0, count - M)))[:M]
        can_split = self.batch_invariant_rows != ANY_ROWS and self.batch_invariant_rows >= M
        if not can_split:
            return product(x)
        parts = x.split(self.row_counts[-1])
        return torch.cat([self.run(product, part) for part in parts])


# Integer sums are exact in any order, so every number of rows will do, and only speed asks for
# padding.
INTEGER_SPLIT = RowSplit((FAST_ROWS,), ANY_ROWS)


@functools.cache
def find_row_split(
    kernel_on_ones: Callable,
    dtype: torch.dtype,
    candidates: Sequence[int],
    threads: int,
    max_first: int = 1,
    shape: tuple[int, int] = (64, 512),
) -> RowSplit:
    """The split of a kernel for `threads` threads, by a probe of kernel_on_ones(out, n, dtype), the
    product of x (M, n) with weights that are 1. `shape` is (out, n) where the kernel may choose its
    order by them. Without numbers that qualify, batches are only padded. The other arguments are
    `invariant_row_counts`'s."""
    kernel = kernel_on_ones(*shape, dtype)
    row_counts = invariant_row_counts(kernel, shape[1], dtype, candidates, max_first)
    if not row_counts:
        return RowSplit(tuple(candidates[:1]))
    return RowSplit(tuple(row_counts), STEP_ROWS)


def invariant_row_counts(
    product: Callable[[Tensor], Tensor],
    n: int,
    dtype: torch.dtype,
    candidates: Sequence[int],
    max_first: int,
) -> list[int]:
    """Batch sizes M for which a row of product(x (M, n)) is bitwise independent of the other rows.
    Of several compatible sets return the one with the largest M that starts at or below
    `max_first`; [] if there is none.

    The weights must be equal in each row, so that the rows of `cancelling` sum to 0.
    """
    x = cancelling(NUM_PROBES, n, dtype)
    bits_by_threads = []
    for _ in at_one_and_all_threads():
        bits_by_threads.append([probe_bits(product, x, M) for M in candidates])
    row_counts_by_bits = {}
    for M, *bits in zip(candidates, *bits_by_threads, strict=True):
        if len(set(bits)) == 1 and None not in bits:
            row_counts_by_bits.setdefault(bits[0], []).append(M)
    allowed = [counts for counts in row_counts_by_bits.values() if counts[0] <= max_first]
    return max(allowed, key=lambda row_counts: (row_counts[-1], len(row_counts)), default=[])


def probe_bits(product: Callable[[Tensor], Tensor], x: Tensor, M: int) -> bytes | None:
    """The bits of product(x) -> (NUM_PROBES, out) in batches of M rows, with each row of x at many
    places of a batch; None if a row's result depends on its place."""
    num_rows = math.ceil(NUM_PROBES / M) * M
    rows = x[torch.arange(num_rows) % NUM_PROBES]  # (num_rows, n)
    y = torch.cat([product(batch) for batch in rows.split(M)])  # (num_rows, out)
    first = y[:NUM_PROBES]
    is_same = all(torch.equal(again, first[: len(again)]) for again in y.split(NUM_PROBES))
    return first.view(torch.uint8).numpy().tobytes() if is_same else None
