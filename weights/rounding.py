"""Probes that find the numbers of rows for which a product gives the same bits, row by row.

    invariant_row_counts    numbers of rows whose products have the same bits
    cancelling              probe inputs: each row sums to 0, so that only rounding errors remain
    group_by_bits           shapes grouped by bitwise equal output

Greedy text with and without drafts is equal if a pass over K + 1 positions rounds as K + 1 passes over one position.
Kernels choose their order of summation by shape, processor and number of threads, without documenting it. The probes
run before decoding and take tenths of a second.
"""

import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

NUM_PROBES = 4  # sums to compare: two orders of summation agree in about one sum of a hundred


def cancelling(rows: int, n: int, dtype: torch.dtype) -> Tensor:
    """(rows, n) numbers whose rows sum to 0, so that a float32 sum shows its order of summation by its rounding error
    alone. The magnitudes of a row span more than the digits of a float32. For odd n one number is 0."""
    generator = torch.Generator().manual_seed(0)
    low, high = (-8, 8) if dtype == torch.float16 else (0, 18)  # float16 ends at 2^16
    magnitude = 2.0 ** torch.randint(low, high, (rows, n // 2), generator=generator)
    half = (torch.randn(rows, n // 2, generator=generator) * magnitude).to(dtype)
    values = torch.cat((half, -half, half.new_zeros(rows, n % 2)), dim=1)  # (rows, n)
    return values.gather(1, torch.rand(rows, n, generator=generator).argsort(dim=1))


def at_one_and_all_threads() -> Iterator[int]:
    """Set torch to 1 thread, then to all of its threads, and yield the number each time."""
    max_threads = torch.get_num_threads()
    try:
        for threads in sorted({1, max_threads}):
            torch.set_num_threads(threads)
            yield threads
    finally:
        torch.set_num_threads(max_threads)


def group_by_bits(run: Callable[..., Tensor], shapes: Iterable) -> list[list]:
    """Group shapes by bitwise equal output of `run`; drop those whose output depends on the number of threads."""
    shapes, groups = list(shapes), []
    outputs_by_threads = [[run(shape) for shape in shapes] for _ in at_one_and_all_threads()]
    for shape, first, *others in zip(shapes, *outputs_by_threads, strict=True):
        if all(torch.equal(first, other) for other in others):
            group = next((group for output, group in groups if torch.equal(output, first)), None)
            group.append(shape) if group else groups.append((first, [shape]))
    return [group for _, group in groups]


def invariant_row_counts(
    product: Callable[[Tensor], Tensor], n: int, dtype: torch.dtype, row_counts: Iterable[int], max_first: int
) -> list[int]:
    """The numbers of rows for which product(x (M, n)) gives a row the same bits, for any other rows and any number
    of them. If several sets qualify, the one with the largest number wins, among those that begin at `max_first` or
    less. Empty if none qualifies.

    The weights must be equal in each row, so that the rows of `cancelling` sum to 0.
    """
    x = cancelling(NUM_PROBES, n, dtype)

    def run(M: int) -> Tensor:
        rows = torch.arange(math.ceil(NUM_PROBES / M) * M) % NUM_PROBES  # each row at many positions
        y = torch.cat([product(part) for part in x[rows].split(M)])
        is_same = all(torch.equal(part, y[: len(part)]) for part in y.split(NUM_PROBES))
        return y[:NUM_PROBES] if is_same else y[:NUM_PROBES] * math.nan  # NaN equals nothing

    groups = [group for group in group_by_bits(run, row_counts) if group[0] <= max_first]
    return max(groups, key=lambda group: (group[-1], len(group)), default=[])
