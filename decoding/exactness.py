"""Which shapes of a kernel round alike.

    same_widths         numbers of rows whose products have the same bits, row by row
    same_attention      how attention over a cache must be cut so that a query's result does not depend on its pass
    cancelling          what every check multiplies: sums of which rounding alone is left

Greedy drafting gives the text of plain decoding, bit for bit, if a pass over K + 1 positions rounds as K + 1 passes
over one do. Kernels add in an order that they choose by shape, processor and number of threads, and nothing documents
it. So it is tried out before decoding, in tenths of a second. This file knows no model: kernels come as functions.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

KEY_BLOCK = 512  # that a CPU's attention kernel adds up at once (torch 2.11 to 2.13)
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


def in_blocks(length: int, unit: int) -> int:
    """`length` positions or a few more: whole blocks of KEY_BLOCK, and of the last one a multiple of `unit` or all."""
    before = (length - 1) // KEY_BLOCK * KEY_BLOCK
    return before + min(math.ceil((length - before) / unit) * unit, KEY_BLOCK)


def same_attention(
    attend: Callable[..., Tensor], B: int, H: int, G: int, E: int, like: Tensor
) -> tuple[int, int] | None:
    """(rows, unit): attention whose R * T query rows are padded to a multiple of `rows`, over as many positions of a
    cache as `in_blocks` says, gives each query the same bits in every pass; None where no such numbers are known.

    attend(q (B, H, T, E), k and v (B, G, S, E), bias (B, 1, rows, S)) -> (B, H, T, E), in the dtype and on the device
    of `like`. Passes over few positions and many are tried, for one row of a batch and for B, with the query
    first and last in them, around the blocks of keys in which a CPU's kernel works, and inside: some halve a
    block of less than 384 keys, and cut a longer one at 192.
    """
    if like.device.type != "cpu":
        return None
    return first_tile(attend, B, G, H // G, E, like.dtype, torch.get_num_threads())


@functools.cache
def first_tile(
    attend: Callable[..., Tensor], B: int, G: int, R: int, E: int, dtype: torch.dtype, threads: int
) -> tuple[int, int] | None:
    tiles = itertools.product((16, 32, 192, KEY_BLOCK), (1, 2, 8, 32))
    return next(((rows, unit) for unit, rows in tiles if attends_alike(attend, B, G, R, E, dtype, rows, unit)), None)


def attends_alike(
    attend: Callable[..., Tensor], B: int, G: int, R: int, E: int, dtype: torch.dtype, rows: int, unit: int
) -> bool:
    """Does a tile do what `same_attention` asks of it? The sums over keys cancel where scores are 0; the sums that make
    scores cancel by themselves."""
    long = math.ceil(768 / R)  # from 192 and 768 query rows on a CPU's kernel takes other blocks
    passes = [(1, G, T, T - 1) for T in (1, 9)] + [(B, G, T, 0) for T in (1, 9)] + [(1, 1, long, 0)]
    more = [(1, G, T, at) for T in (9, 6, 3, 2) for at in (0, T - 1)]
    more += [(1, 1, T, at) for T in (17, 64, long) for at in (0, T - 1)]
    for filled, cancels in itertools.product((904, 812, 512, 300, 40), "vk"):
        end = in_blocks(filled + long, unit)
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
                S = in_blocks(begin + T, unit)
                seen = torch.arange(begin, begin + T)[:, None] >= torch.arange(S)  # (T, S)
                bias = torch.zeros((), dtype=dtype).where(seen, -math.inf).repeat(R, 1)  # (R * T, S)
                bias = F.pad(bias, (0, 0, 0, -R * T % rows)).expand(b, 1, -1, -1)
                part = q[:b, : g * R].expand(-1, -1, T, -1).contiguous()
                y = attend(part, k[:b, :g, :S], v[:b, :g, :S], bias)[:, :, at]  # (b, g * R, E)
                first = y[0, 0] if first is None else first
                if not torch.equal(y, first.expand_as(y)):
                    return False
    return True
