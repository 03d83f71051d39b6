"""check_cache: does a class of caches give the attention of the keys and values that it was given?

Pair        a cache beside what it should hold, in float64, by position
"""

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from model import AttentionKernel, KVCache, row_view, visible_keys
from tests.conformance.targets import one_thread, tiny

B, G, H, E = 3, 2, 4, 16
S = 64  # positions of a text
K = 4
SLACK = K + 1  # positions for rows without a text
ROUNDING = 1e-5  # of an output in passes of other lengths, as a share of the largest value


def check_cache(
    cls: type[KVCache],
    *,
    windows: Sequence[int | None] = (None, 6),
    sees: Callable[[int, int], bool] | None = None,
    chunk: int = 16,
    tolerance: float = 1e-5,
) -> None:
    """Check a class like model.KVCache against attention in float64, on a CPU in float32.

    windows: those that its layers may have, which `of` finds in spec.config.windows[spec.layer]; a
    cache that keeps the last n positions alone has one. sees(query, key): does the query at one
    position see the key at another, up to its own? By default all of them, or those of the window.
    chunk: the most positions that a pass writes, at least 8. tolerance: what an output may be off,
    as a share of the largest |value|: codes of 8 bits need about 0.03, and 0.1 as floats.

    Prompts in chunks, decoding steps and rounds of 1 and K + 1 rows that stand elsewhere, a round
    that rejected its drafts, writes out of order, padding, slots that are cleared and used again,
    beginnings that are copied from another slot, rows without a text, some of the rows alone, and
    learned sinks. What a query reads depends on decided positions alone: not on the drafts behind
    it, so that drafted text is plain text, whatever the tolerance.

    A class with keeps_prefixes = False is refused if it has dropped nothing of the kit's short
    texts: give it a subclass with a shorter ring."""
    has_dropped = cls.keeps_prefixes
    with one_thread():
        for window in windows:
            for scenario in SCENARIOS:
                case = f"{scenario.__doc__} window {window}"
                pair = Pair(cls, sees or in_window(window), window, tolerance, case)
                scenario(pair, chunk)
                has_dropped |= pair.has_dropped
    if not has_dropped:
        raise AssertionError(
            f"{cls.__name__} says keeps_prefixes = False, and no place of it was written by two"
            f" positions, so what it drops was not checked. Give the kit a subclass with a shorter"
            f" ring: its texts have up to {S} positions, and its passes {chunk}"
        )


def in_window(window: int | None) -> Callable[[int, int], bool]:
    """Which key a query sees, both by position."""
    return lambda query, key: window is None or query - key < window


class Pair:
    """A cache of B rows, and its twin: keys and values by row and position."""

    def __init__(
        self,
        cls: type[KVCache],
        sees: Callable[[int, int], bool],
        window: int | None,
        tolerance: float,
        case: str,
    ):
        self.cls = cls
        self.sees = sees
        self.window = window
        self.tolerance = tolerance
        self.case = case
        self.cache = self.new_cache()
        self.held: list[dict[int, tuple[Tensor, Tensor]]] = [{} for _ in range(B)]
        self.generator = torch.Generator().manual_seed(0)
        self.has_dropped = False  # was a place written by two positions of a text?
        # What is stored by place, and the positions that all passes which changed a number have
        # written: from the first to the second (B, G, …).
        buffers = (x for x in self.cache.buffers() if x.dim() > 2 and len(x) == B)
        self.stored = [(x, torch.zeros(x.shape), torch.full(x.shape, math.inf)) for x in buffers]

    def new_cache(self) -> KVCache:
        sizes = {"n_heads": H, "n_kv_heads": G, "head_dim": E, "n_layers": 1}
        model = tiny(0, **sizes, windows=(self.window,))
        return model.make_caches(B, S + SLACK, self.cls, parked_pos=S).layers[0]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def write(self, pos: Tensor, rows: range) -> KVCache:
        """Random keys and values at pos (rows, T) of these rows; returns the cache of the rows."""
        T = pos.size(1)
        k = self.normal(len(rows), G, T, E)
        v = self.normal(len(rows), G, T, E)
        cache = self.cache
        if len(rows) < B:
            cache = row_view(self.cache, rows.start, rows.stop)
        before = [x.clone() for x, _, _ in self.stored]
        cache.update(k, v, pos)
        self.watch(before, pos, rows)
        for i, row in enumerate(rows):
            for t, position in enumerate(pos[i].tolist()):
                self.held[row][position] = (k[i, :, t].double(), v[i, :, t].double())
        return cache

    def watch(self, before: list[Tensor], pos: Tensor, rows: range) -> None:
        """See whether a pass over pos (rows, T) has changed what passes over other positions had
        written; `before` it the buffers were these."""
        for old, (x, first, last) in zip(before, self.stored, strict=True):
            for row, begin, end in zip(rows, pos[:, 0].tolist(), pos[:, -1].tolist()):
                if begin >= S:
                    continue
                is_changed = x[row].float() != old[row].float()
                first[row][is_changed] = first[row][is_changed].clamp(min=begin)
                last[row][is_changed] = last[row][is_changed].clamp(max=end)
                self.has_dropped |= bool((first[row] > last[row]).any())

    def step(
        self,
        starts: Sequence[int],
        T: int,
        rows: range = range(B),
        sinks: Tensor | None = None,
    ) -> None:
        """One pass: T positions from starts[i] on for each of these rows; S and beyond: a row
        without a text. The outputs of all others are compared."""
        pos = torch.tensor(starts)[:, None] + torch.arange(T)  # (rows, T)
        cache = self.write(pos, rows)
        q = 2 * self.normal(len(rows), H, T, E)
        length = max(start for start in starts if start < S) + T
        visible = visible_keys(pos, torch.arange(min(length, S)), self.window, 1)
        visible = AttentionKernel().prepare(visible, H // G, torch.float32)
        got = cache.attend(q, visible, sinks)
        for i, row in enumerate(rows):
            for t, position in enumerate(pos[i].tolist()):
                if position < S:
                    self.compare(row, position, T, q[i, :, t], got[i, :, t], sinks)

    def attended(self, q: Tensor, k: Tensor, v: Tensor, first: int, T: int) -> list[Tensor]:
        """The outputs (B, H, E) at positions from `first` on of a text with these queries (B, H, S,
        E), keys and values (B, G, S, E), in passes of T positions. All but the first of a pass are
        drafts, with other keys and values, and rejected."""
        cache = self.new_cache()
        outputs = []
        begins = [*range(0, first, 8), *range(first, S - T)]
        for begin in begins:
            is_prompt = begin < first
            end = min(begin + 8, first) if is_prompt else begin + T
            pos = torch.arange(begin, end).expand(B, -1)  # (B, T)
            keys = k[:, :, begin:end].clone()
            values = v[:, :, begin:end].clone()
            if not is_prompt:
                keys[:, :, 1:] = 3 * self.normal(B, G, T - 1, E)
                values[:, :, 1:] = 3 * self.normal(B, G, T - 1, E)
            cache.update(keys, values, pos)
            visible = visible_keys(pos, torch.arange(end), self.window, 1)
            visible = AttentionKernel().prepare(visible, H // G, torch.float32)
            got = cache.attend(q[:, :, begin:end], visible, None)
            if not is_prompt:
                outputs.append(got[:, :, 0])
        return outputs

    def compare(
        self,
        row: int,
        position: int,
        T: int,
        q: Tensor,
        got: Tensor,
        sinks: Tensor | None,
    ) -> None:
        seen = [key for key in range(position + 1) if self.sees(position, key)]
        error = self.error(row, seen, q, got, sinks)
        if error <= self.tolerance:
            return
        raise AssertionError(
            f"{self.cls.__name__}: {self.case}: in a pass of {T} positions, row {row} at position"
            f" {position}, which sees {ranges(seen)}: attention is off by {error:.2g} of the"
            f" largest value, more than {self.tolerance}. {self.reason(row, seen, q, got, sinks)}"
        )

    def reason(
        self,
        row: int,
        seen: list[int],
        q: Tensor,
        got: Tensor,
        sinks: Tensor | None,
    ) -> str:
        """What may be wrong, by what `got` would be right for."""
        if not got.isfinite().all():
            return "Masked places must be finite: 0 * NaN = NaN"
        for missing in seen if len(seen) > 1 else ():
            others = [p for p in seen if p != missing]
            if self.error(row, others, q, got, sinks) <= self.tolerance:
                return (
                    f"It is that without position {missing}: was its place written again before the"
                    f" last query that needs it, as in a ring that is too short?"
                )
        for extra in range(max(seen)):
            if extra in seen or extra not in self.held[row]:
                continue
            if self.error(row, [*seen, extra], q, got, sinks) <= self.tolerance:
                return f"It is that with position {extra}, which it must not see"
        for number in range(1, S):
            if self.error(row, seen, q, got, sinks, num_empty=number) <= self.tolerance:
                return (
                    f"It is that with {number} more keys and values of 0: empty places are seen."
                    f" `of` marks them in new buffers, and `cleared_to` says what `clear` writes"
                )
        return (
            "Look at `update`'s place of a position, at what `attend` reads for each row, and at"
            " what an earlier text or a rejected draft left there"
        )

    def error(
        self,
        row: int,
        seen: Sequence[int],
        q: Tensor,
        got: Tensor,
        sinks: Tensor | None,
        num_empty: int = 0,
    ) -> float:
        """The difference of got (H, E) from attention of q (H, E) over the positions seen and
        `num_empty` places of zeros, as a share of the largest value."""
        nothing = torch.zeros(G, E, dtype=torch.float64)
        held = [self.held[row][position] for position in seen]
        parts = zip(*held, *[(nothing, nothing)] * num_empty, strict=True)
        keys, values = (torch.stack(part, dim=1) for part in parts)  # (G, n, E)
        keys = keys.repeat_interleave(H // G, 0)  # (H, n, E)
        values = values.repeat_interleave(H // G, 0)
        scores = (keys @ q.double()[..., None])[..., 0] / math.sqrt(E)  # (H, n)
        if sinks is not None:
            scores = torch.cat((scores, sinks.double()[:, None]), dim=1)
        shares = scores.softmax(1)[:, : keys.size(1)]
        want = (shares[:, None] @ values)[:, 0]  # (H, E)
        error = (got.double() - want).abs().max() / values.abs().max()
        return error.nan_to_num(math.inf).item()

    def prompt(self, row: int, length: int, chunk: int, begin: int = 0) -> None:
        """A prompt's positions up to `length`, in chunks."""
        for first in range(begin, length, chunk):
            self.step([first], min(chunk, length - first), range(row, row + 1))

    def forget(self, row: int) -> None:
        """Clear a slot, as an engine does before its next text."""
        self.cache.clear(row, 0, S)
        self.held[row] = {}
        for _, first, last in self.stored:
            first[row] = 0
            last[row] = math.inf


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in words, such as 0 to 3 and 7 to 12."""
    runs = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ends = [[number for _, number in run] for _, run in runs]
    return " and ".join(f"{run[0]} to {run[-1]}" for run in ends)


def chunks_steps_and_rounds(pair: Pair, chunk: int) -> None:
    """Prompts in chunks, then steps and rounds of rows that stand elsewhere,"""
    lengths = (chunk + 5, 3, 2 * chunk)
    for row, length in enumerate(lengths):
        pair.prompt(row, length, chunk)
    starts = list(lengths)
    for T in (1, K + 1, 1, K + 1, K + 1):
        pair.step(starts, T)
        starts = [start + T for start in starts]


def rejected_drafts(pair: Pair, chunk: int) -> None:
    """Rounds of which a row keeps 0 to K drafts, so that the next one writes the rest again,"""
    starts = [5, chunk, 9]
    for row, length in enumerate(starts):
        pair.prompt(row, length, chunk)
    for kept in ((0, 4, 2), (0, 0, 4), (3, 1, 0), (4, 0, 1)):
        pair.step(starts, K + 1)
        starts = [start + 1 + n for start, n in zip(starts, kept)]
    pair.step(starts, 1)


def out_of_order(pair: Pair, chunk: int) -> None:
    """Positions that are written in another order, and padding that is written again,"""
    for row, length in enumerate((6, 7, 3)):
        pair.prompt(row, 8, chunk)  # of which so many are the text's
        pair.step([length], 1, range(row, row + 1))
    pair.step([7, 4, 8], 1)
    pair.step([8, 8, 9], 1)
    pair.step([8, 5, 4], K + 1)
    for begin in (11, 9):  # of row 2
        pair.write(torch.arange(begin, begin + 2)[None], range(2, 3))
    pair.step([13, 10, 13], 1)


def reused_slots(pair: Pair, chunk: int) -> None:
    """A slot that is cleared for another text, after one that was not finite,"""
    for row in range(B):
        pair.prompt(row, chunk + 10 * row, chunk)
    nothing = torch.full((1, G, 2, E), math.nan)
    own = row_view(pair.cache, 1, 2)
    own.update(nothing, nothing, torch.tensor([[chunk + 10, chunk + 11]]))
    pair.forget(1)
    pair.prompt(1, 4, chunk)
    starts = [chunk, 4, chunk + 20]
    for T in (1, K + 1, 1):
        pair.step(starts, T)
        starts = [start + T for start in starts]


def parked_rows(pair: Pair, chunk: int) -> None:
    """Rows without a text, which write from parked_pos on, beside others,"""
    starts = [37, 10, 5]
    for row, length in enumerate(starts):
        pair.prompt(row, length, chunk)
    for parked in (0, 1, 2):
        for T in (1, K + 1):
            pair.step([S if row == parked else start for row, start in enumerate(starts)], T)
            starts = [start + T * (row != parked) for row, start in enumerate(starts)]
    pair.step(starts, K + 1)


def copied_beginnings(pair: Pair, chunk: int) -> None:
    """A beginning that was copied from another slot,"""
    if not pair.cls.keeps_prefixes:
        return
    n = chunk + 2
    pair.prompt(0, n + 6, chunk)
    pair.prompt(2, 7, chunk)
    for source, target in ((0, 1), (0, 2)):
        stored = pair.cache.views(source, 0, n)
        pair.forget(target)
        for name, x in pair.cache.views(target, 0, n).items():
            x.copy_(stored[name])
        pair.held[target] = {p: pair.held[source][p] for p in range(n)}
    pair.step([n + 6, n, n], K + 1)
    pair.step([n + 7, n + 3, n + 5], 1)


def some_rows(pair: Pair, chunk: int) -> None:
    """Steps of some of the rows, with learned sinks,"""
    for row, length in enumerate((12, 5, chunk)):
        pair.prompt(row, length, chunk)
    sinks = torch.linspace(-1, 2, H)
    pair.step([5, chunk], K + 1, range(1, 3), sinks)
    pair.step([12, 10], 1, range(0, 2), sinks)
    pair.step([13, 11, chunk + 5], K + 1)


def drafts_behind(pair: Pair, chunk: int) -> None:
    """Rounds whose drafts are all rejected, against others and against steps over the same text,"""
    first = chunk + 3
    q, k, v = (pair.normal(B, heads, S, E) for heads in (H, G, G))
    rounds, others, steps = (pair.attended(2 * q, k, v, first, T) for T in (K + 1, K + 1, 1))

    def compare(expected: list[Tensor], reason: str) -> None:
        for position, (output, want) in enumerate(zip(rounds, expected), first):
            error = (output - want).abs().max() / v.abs().max()
            if not error <= ROUNDING:
                raise AssertionError(
                    f"{pair.cls.__name__}: {pair.case}: the output at position {position} is off by"
                    f" {error:.2g} of the largest value. {reason}"
                )

    compare(
        others,
        "Drafts that were rejected changed what it reads, so drafted text is not plain text: a"
        " scale that several positions share must not be read before all of them are decided",
    )
    compare(
        steps,
        "A round rounds otherwise than a step, so drafted text is plain text up to rounding alone:"
        " `attend` has to add in float32, and to call visible.run",
    )


SCENARIOS = (
    chunks_steps_and_rounds,
    rejected_drafts,
    out_of_order,
    reused_slots,
    parked_rows,
    copied_beginnings,
    some_rows,
    drafts_behind,
)
