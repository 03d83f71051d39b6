"""Which numbers of rows of a product round alike, found by trying.

    same_widths     numbers of rows whose products have the same bits, row by row
    cancelling      the inputs of every check: sums that leave nothing but rounding
    classes         shapes by bitwise equal output

Drafted greedy text equals plain text, bit for bit, if a pass over K + 1 positions rounds as K + 1 passes over one do.
Kernels choose an order of adding by shape, processor and number of threads, and do not document it, so it is tried
before decoding, in tenths of a second. This file knows no model: kernels come as functions.
"""

import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

TRIES = 4  # sums that are compared: two orders of adding leave the same bits in about one of a hundred
Classes = list[tuple[Tensor, list]]


def cancelling(rows: int, n: int, dtype: torch.dtype) -> Tensor:
    """(rows, n) numbers, n even or with one 0, of which each row sums to 0: a sum in float32 leaves nothing but what
    its order of adding rounded away. Their sizes differ by more than the digits of a float32."""
    generator = torch.Generator().manual_seed(0)
    low, high = (-8, 8) if dtype == torch.float16 else (0, 18)  # float16 ends at 2^16
    size = 2.0 ** torch.randint(low, high, (rows, n // 2), generator=generator)
    half = (torch.randn(rows, n // 2, generator=generator) * size).to(dtype)
    both = torch.cat((half, -half, half.new_zeros(rows, n % 2)), dim=1)  # (rows, n)
    return both.gather(1, torch.rand(rows, n, generator=generator).argsort(dim=1))


def at_one_and_all_threads() -> Iterator[int]:
    """Numbers of threads that decoding may use, set one after the other."""
    most = torch.get_num_threads()
    try:
        for threads in sorted({1, most}):
            torch.set_num_threads(threads)
            yield threads
    finally:
        torch.set_num_threads(most)


def classes(run: Callable[..., Tensor], shapes: Iterable) -> Classes:
    """The shapes, those together for which `run` has the same bits with one and with all threads; those whose bits
    depend on the number of threads are left out."""
    shapes, found = list(shapes), []
    results = [[run(shape) for shape in shapes] for _ in at_one_and_all_threads()]
    for shape, *same in zip(shapes, *results, strict=True):
        if all(torch.equal(same[0], other) for other in same):
            mine = next((members for result, members in found if torch.equal(result, same[0])), None)
            mine.append(shape) if mine else found.append((same[0], [shape]))
    return found


def same_widths(
    product: Callable[[Tensor], Tensor], n: int, dtype: torch.dtype, widths: Iterable[int], fewest: int
) -> list[int]:
    """Those numbers of rows for which product(x (M, n)) has the same bits in each row, whatever the other rows and
    their number: of several such sets, one that reaches far and begins with at most `fewest` rows; none without one.

    The weights must be equal in each row, so that x of `cancelling` cancels.
    """
    x = cancelling(TRIES, n, dtype)

    def run(M: int) -> Tensor:
        rows = torch.arange(math.ceil(TRIES / M) * M) % TRIES  # each row at many places
        y = torch.cat([product(part) for part in x[rows].split(M)])
        same = all(torch.equal(part, y[:TRIES]) for part in y.split(TRIES) if len(part) == TRIES)
        same = same and torch.equal(y[len(y) // TRIES * TRIES :], y[: len(y) % TRIES])
        return y[:TRIES] if same else y[:TRIES] * math.nan  # equal to nothing

    found = [members for _, members in classes(run, widths) if members[0] <= fewest]
    return max(found, key=lambda members: (members[-1], len(members)), default=[])
