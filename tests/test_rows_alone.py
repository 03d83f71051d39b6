"""Row i of a batch gets what its prompt gets alone, bit for bit, wherever an engine says
`identical`.

Over weights, caches, drafted and plain decoding, batches of 1 to 8, and prompts on both sides of
every length at which a kernel was ever chosen: 16, 64 and 256 rows. A control breaks the rule and
must be seen.
"""

import functools
import random

import pytest
import torch
from conftest import generate
from test_rounding import SHAPE, large_numbers

import decoding.kv_8bit as caches
from decoding.engine import Engine
from decoding.kv_8bit import CACHE_TYPES
from decoding.sampling import Sampling
from drafts.ngram import NgramDraft
from weights import linears

WEIGHTS = ("bfloat16", "float32", "int8", "int4-g32")
LENGTHS = (1, 3, 9, 15, 16, 17, 40, 63, 64, 66, 130, 250, 300)
N_NEW, S = 16, 330


@functools.cache
def model_of(weights: str):
    dtype, quantize = (
        (getattr(torch, weights), None) if "float" in weights else (torch.bfloat16, weights)
    )
    return large_numbers(SHAPE, dtype=dtype, quantize=quantize)


@functools.cache
def prompts() -> list[list[int]]:
    """Of each length, with repetitions that an n-gram draft finds."""
    generator = random.Random(0)
    return [[generator.choice(range(3, 30)) for _ in range(n)] for n in LENGTHS]


def rows_of(engine: Engine, numbers: list[int], sampling: Sampling) -> list[list[int]]:
    rows = [[] for _ in numbers]
    options = {"sampling": sampling, "max_new_tokens": N_NEW, "seed": numbers, "engine": engine}
    for row, id in generate(engine.model, [prompts()[number] for number in numbers], **options):
        rows[row].append(id)
    return rows


def drafter_of(k: int) -> NgramDraft | None:
    return NgramDraft(1) if k else None


@functools.cache
def alone(
    weights: str, kind: str, number: int, sampling: Sampling
) -> tuple[list[int], list[torch.Tensor]]:
    """A prompt's text, plain, and what its positions left in the caches."""
    engine = Engine(model_of(weights), 1, S, cache_type=CACHE_TYPES[kind])
    (text,) = rows_of(engine, [number], sampling)
    return text, left_behind(engine, 0, number)


def left_behind(engine: Engine, row: int, number: int) -> list[torch.Tensor]:
    end = LENGTHS[number] + N_NEW - 1
    return [
        x.clone()
        for layer in engine.runner.caches.layers
        for x in layer.views(slice(row, row + 1), 0, end).values()
    ]


def check_batch(weights: str, kind: str, k: int, numbers: list[int], sampling: Sampling) -> None:
    """AssertionError if the text of a row, or its keys and values, are not those that it has
    alone."""
    engine = Engine(
        model_of(weights),
        len(numbers),
        S,
        cache_type=CACHE_TYPES[kind],
        drafter=drafter_of(k),
        speculate_k=k,
    )
    assert engine.identical
    texts = rows_of(engine, numbers, sampling)
    for row, number in enumerate(numbers):
        text, parts = alone(weights, kind, number, sampling)
        assert texts[row] == text, f"prompt of {LENGTHS[number]} tokens in row {row} of {numbers}"
        for x, y in zip(left_behind(engine, row, number), parts, strict=True):
            assert torch.equal(x, y), (
                f"keys or values of {LENGTHS[number]} tokens in row {row} of {numbers}"
            )


def batches(count: int, seed: int) -> list[list[int]]:
    generator = random.Random(seed)
    return [generator.sample(range(len(LENGTHS)), generator.randint(1, 8)) for _ in range(count)]


MIXED = [[1, 12], [11, 3, 0, 8, 5, 2, 10, 7]]  # 3 tokens beside 300; eight of all lengths
CASES = [(weights, kind, k) for weights in WEIGHTS for kind in ("model", "int8") for k in (0, 4)]


@pytest.mark.parametrize("weights, kind, k", CASES)
@pytest.mark.attack
def test_a_row_is_what_it_is_alone(weights, kind, k):
    """Greedily, in two batches: the widest mixture of lengths for two rows, and eight rows."""
    for numbers in MIXED:
        check_batch(weights, kind, k, numbers, Sampling(0))


@pytest.mark.long
@pytest.mark.parametrize("weights, kind, k", CASES)
def test_a_row_is_what_it_is_alone_in_any_batch(weights, kind, k):
    """Random batches; sampled plain texts too: drafted ones follow the law alone, not the noise."""
    for numbers in batches(12, seed=k):
        check_batch(weights, kind, k, numbers, Sampling(0))
        if k == 0:
            check_batch(weights, kind, k, numbers, Sampling(1.0, top_k=20))


def by_number_of_rows(product, limit: int):
    """The product, but rounded otherwise for more than so many rows: the neighbours' rows count."""

    def multiply(self, x):
        if x.size(0) <= limit:
            return product(self, x)
        return product(self, x * 1.5) / 1.5

    return multiply


@pytest.fixture
def broken_rule():
    """Nothing that was computed under a broken rule is compared with later."""
    alone.cache_clear()
    yield
    alone.cache_clear()


@pytest.mark.parametrize("scheme", ["int8", "int4-g32"])
def test_a_product_chosen_by_the_number_of_rows_is_seen(scheme, monkeypatch, broken_rule):
    """Negative control: one row takes the kernel, and two that decode together take another
    product."""
    kind = {"int8": linears.Int8Linear, "int4-g32": linears.Int4Linear}[scheme]
    monkeypatch.setattr(kind, "product", by_number_of_rows(kind.product, limit=1))
    with pytest.raises(AssertionError, match="in row"):
        check_batch(scheme, "model", 0, [1, 11], Sampling(0))


def test_attention_chosen_by_the_number_of_queries_is_seen(monkeypatch, broken_rule):
    """Negative control: one query in whole numbers, and those of a round or a prompt
    dequantized."""
    in_codes = caches.Int8Cache.attend

    def attend(self, q, keys, sinks=None):
        run = in_codes if q.size(2) == 1 else super(caches.Int8Cache, self).attend
        return run(self, q, keys, sinks) if run is in_codes else run(q, keys, sinks)

    monkeypatch.setattr(caches.Int8Cache, "attend", attend)
    with pytest.raises(AssertionError, match="in row"):
        check_batch("bfloat16", "int8", 4, [2, 11], Sampling(0))
