"""Inputs and settings of the probes.

cancelling                  rows that sum to 0, so that a kernel returns its rounding error alone
at_one_and_all_threads      sets torch's number of threads to each number to probe
"""

from collections.abc import Iterator

import torch
from torch import Tensor


def cancelling(
    rows: int,
    n: int,
    dtype: torch.dtype,
) -> Tensor:
    """(rows, n) numbers whose rows sum to 0: every number stands beside its negative, in a random
    order. For odd n one number is 0.

    The magnitudes of a row span more than the digits of a float32, so that two orders of a float32
    sum rarely agree.
    """
    generator = torch.Generator().manual_seed(0)
    is_float16 = dtype == torch.float16
    exponents = (-8, 8) if is_float16 else (0, 18)  # float16 ends at 2^16
    magnitude = 2.0 ** torch.randint(*exponents, (rows, n // 2), generator=generator)
    half = (torch.randn(rows, n // 2, generator=generator) * magnitude).to(dtype)
    middle = half.new_zeros(rows, n % 2)
    values = torch.cat((half, -half, middle), dim=1)  # (rows, n)
    order = torch.rand(rows, n, generator=generator).argsort(dim=1)
    return values.gather(1, order)


def at_one_and_all_threads() -> Iterator[int]:
    """Set torch to 1 thread, then to all of its threads, and yield the number each time."""
    max_threads = torch.get_num_threads()
    try:
        for threads in sorted({1, max_threads}):
            torch.set_num_threads(threads)
            yield threads
    finally:
        torch.set_num_threads(max_threads)
