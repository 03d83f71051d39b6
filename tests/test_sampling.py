"""sampling.py: the distribution against naive and transformers' filters, the draw and the hash
against their laws.

Statistical tests use fixed seeds and a chi-square bound that a correct implementation exceeds with
probability 1e-6; each one's sensitivity is shown by a distorted law that it catches.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import BASE, generate
from hypothesis import given, settings
from hypothesis import strategies as st

import decoding.sampling as program
import decoding.settings as limits
from decoding.sampling import FILTERS, INVALID, PENALTIES, Sampling, draw, uniform
from drafts.base import ModelDraft
from drafts.target_layers import layer_subset
from loading.config import config_from_hf
from loading.models import random_model

Z = 4.75  # standard normal quantile of 1 - 1e-6


def chi_square_too_large(counts: torch.Tensor, p: torch.Tensor) -> bool:
    """Pearson's statistic of counts against p beyond its 1 - 1e-6 quantile (Wilson-Hilferty
    approximation)."""
    expected = p.double() * counts.sum()
    if counts[expected == 0].any():
        return True
    counts, expected = counts[expected > 0], expected[expected > 0]
    assert expected.min() >= 5, "too few draws for the approximation"
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    k = len(counts) - 1
    return statistic > k * (1 - 2 / (9 * k) + Z * math.sqrt(2 / (9 * k))) ** 3


def naive_probs(logits: list[float], temperature: float, top_k, top_p, min_p) -> list[float]:
    """The definition, token by token in float64: temperature, top-k, top-p, min-p."""
    weights = [math.exp((x - max(logits)) / temperature) for x in logits]
    kept = sorted(range(len(weights)), key=lambda i: -weights[i])[: top_k or None]
    mass, total, short = 0.0, sum(weights[i] for i in kept), []
    for i in kept:
        short.append(i)
        mass += weights[i]
        if mass >= (top_p or 1) * total:
            break
    kept = [i for i in short if weights[i] >= (min_p or 0) * max(weights)]
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(weights))]


def test_settings_are_the_fields_of_sampling():
    """Tensors and requests follow the order of the one, and arguments by position that of the
    other."""
    defaults = {name: setting.default for name, setting in limits.SETTINGS.items()}
    assert [*vars(Sampling()).items()] == [*defaults.items(), ("logit_bias", ())]
    assert [*defaults][1:] == [*FILTERS, *PENALTIES]
    float32 = torch.finfo(torch.float32)
    assert (float32.tiny, float32.max) == (limits.FLOAT32_TINY, limits.FLOAT32_MAX)


SETTINGS = st.tuples(
    st.floats(0.05, 4),
    st.none() | st.integers(1, 40),
    st.none() | st.floats(0.01, 1),
    st.none() | st.floats(0, 1),
)


@given(SETTINGS, st.integers(0, 10**6), st.integers(2, 30), st.booleans())
@settings(deadline=None, max_examples=300)
def test_probs_equal_the_definition(values, seed, V, wide):
    """Logits half a unit apart, so that float32 cannot round one filter's edge across a token...
    except top-p's mass, where the kept sets may differ only if the mass at the edge is within
    rounding of top_p. `wide`: among 2^15 tokens that cannot occur, where thresholds are searched in
    larger steps."""
    temperature, top_k, top_p, min_p = values
    logits = torch.randperm(V, generator=torch.Generator().manual_seed(seed)).float() / 2
    want = torch.tensor(naive_probs(logits.tolist(), temperature, top_k, top_p, min_p))
    got = Sampling(temperature, top_k, top_p, min_p).probs(
        F.pad(logits, (0, 2**15 * wide), value=-math.inf)
    )
    assert not got[V:].any()
    got = got[:V]
    if (got - want).abs().max() > 1e-5:
        edges = []
        for d in (1 - 1e-5, 1 + 1e-5):
            near_p, near_min = top_p and min(1, top_p * d), min_p and min(1, min_p * d)
            edges.append(
                torch.tensor(naive_probs(logits.tolist(), temperature, top_k, near_p, near_min))
            )
        assert min((got - edge).abs().max() for edge in edges) < 1e-4
    assert got.dtype == torch.float32 and abs(got.sum() - 1) < 1e-5


def test_top_k_of_zero_has_no_limit():
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1))
    assert torch.equal(Sampling(0.7, top_k=0).probs(logits), Sampling(0.7).probs(logits))


@pytest.mark.parametrize("V", [5000, 40_000])
def test_probs_equal_transformers_warpers(V):
    from transformers import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    logits = torch.randn(8, V, generator=torch.Generator().manual_seed(0)) * 4
    for temperature, top_k, top_p, min_p in [
        (0.7, 50, 0.9, 0.05),
        (1.3, 400, 0.5, 0.01),
        (1.0, 7, 0.99, 0.2),
    ]:
        scores = logits
        for warp in (
            TemperatureLogitsWarper(temperature),
            TopKLogitsWarper(top_k),
            TopPLogitsWarper(top_p),
            MinPLogitsWarper(min_p),
        ):
            scores = warp(None, scores)
        got = Sampling(temperature, top_k, top_p, min_p).probs(logits)
        assert torch.equal(got > 0, scores.isfinite())
        assert torch.allclose(got, scores.softmax(-1), atol=1e-6)


def test_greedy_is_the_lowest_argmax_as_a_one_hot():
    """Trap: temperature 0 as softmax(logits / 1e-5) breaks ties at random."""
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, -1.0, 0.0, 0.0]])
    sampling = Sampling(temperature=0, top_k=3, top_p=0.5)
    assert sampling.probs(logits).tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]
    for u in (0.0, 0.5, 1 - 2**-24):
        noise = torch.full((2,), u)
        assert (
            sampling.sample(logits, noise).tolist()
            == [1, 0]
            == draw(sampling.probs(logits), noise).tolist()
        )


TIES = [
    [1.0, 3.0, 3.0, 2.0, 3.0],
    [5.0, 5.0, 5.0, 5.0, 5.0],
    [0.0, 1.0, 1.0, 2.0, 2.0],
    [-1.0, 4.0, 0.0, 4.0, 1.0],
]
ONE = [
    Sampling(temperature, top_k=1, **others)
    for temperature in (1e-6, 0.8, 1.0, 30.0)
    for others in (
        {},
        {"top_p": 0.3},
        {"min_p": 0.9},
        {"top_p": 0.9, "min_p": 1.0},
        {"repetition_penalty": 1.3},
    )
]


@pytest.mark.parametrize("num_parts", [2, 8, 64])
def test_a_maximum_by_parts_is_the_maximum(num_parts):
    """As a GPU's compiled code finds it: the first of equal logits, in one part or in two; NaN and
    infinity as torch.max has them."""
    logits = torch.randn(9, 128, generator=torch.Generator().manual_seed(2)).round()
    logits[1, 70] = logits[1, 3] = logits[1, 2] = 9.0
    logits[2] = 0.0
    logits[3, 100] = math.inf
    logits[4, 90] = logits[4, 127] = math.nan
    logits[5] = -math.inf
    logits[6, 5:] = -math.inf
    for x in (logits, logits.view(3, 3, 128)):  # (B, V), (B, T, V)
        top, index = program.max_by_parts(x, num_parts)
        want = x.max(dim=-1)
        assert torch.equal(index, want.indices)
        assert torch.equal(top.nan_to_num(7.5), want.values.nan_to_num(7.5))


def test_a_top_k_of_one_is_greedy_and_larger_ones_keep_ties():
    """Greedy's rule, the lowest id of those that tie, with other filters, in one batch with rows of
    every kind, and drawn with any noise. A larger top_k keeps ties with its last token:
    transformers' warper is the oracle."""
    from transformers import TopKLogitsWarper

    logits = torch.tensor(TIES)
    greedy = Sampling(0).probs(logits)
    assert greedy.argmax(-1).tolist() == [1, 0, 3, 1]
    for sampling in ONE:
        assert sampling.is_greedy and torch.equal(sampling.probs(logits), greedy), sampling
        for u in (0.0, 0.5, 1 - 2**-24):
            assert sampling.sample(logits, torch.full((4,), u)).tolist() == [1, 0, 3, 1]
    assert Sampling(0.8, top_k=1).path == program.GREEDY
    others = [Sampling(0), Sampling(1.0), Sampling(0.7, top_k=2), Sampling(1.0, top_k=0, top_p=0.5)]
    samplings = [sampling for pair in zip(ONE, others * 5) for sampling in pair]
    for kind in (program.FILTERED, program.PENALIZED):
        for row in logits:
            rows = row.expand(len(samplings), -1)
            together = program.distribution(
                rows, kind, torch.stack([sampling.values for sampling in samplings])
            )
            for p, sampling in zip(together, samplings):
                assert torch.equal(p, sampling.probs(row)), sampling
    plain = [sampling for sampling in samplings if sampling.path in (program.GREEDY, program.PLAIN)]
    together = program.distribution(
        logits[0].expand(len(plain), -1),
        program.PLAIN,
        torch.stack([sampling.values for sampling in plain]),
    )
    assert all(torch.equal(p, sampling.probs(logits[0])) for p, sampling in zip(together, plain))
    for k in (2, 3, 4):
        scores = TopKLogitsWarper(k)(None, logits)
        assert torch.allclose(Sampling(1.0, top_k=k).probs(logits), scores.softmax(-1), atol=1e-6)


def test_a_top_k_of_one_is_greedy_in_steps_and_rounds():
    """A model whose every token has a twin as likely: whatever the seed, temperature and draft, the
    text is greedy."""
    config = config_from_hf({**BASE, "model_type": "llama", "tie_word_embeddings": False})
    model = random_model(config, dtype=torch.float32)
    head = model.lm_head.weight.data
    head[65:130] = head[:65]
    prompts, options = [[5, 9, 17], [40, 3, 99, 12]], {"max_new_tokens": 24}

    def by_row(pairs) -> list[list[int]]:
        rows = [[], []]
        for row, id in pairs:
            rows[row].append(id)
        return rows

    text = list(generate(model, prompts, sampling=Sampling(0), **options))
    for seed in range(3):
        rows = [Sampling(1.5, top_k=1), Sampling(0.8, top_k=1, top_p=0.5)]
        assert by_row(generate(model, prompts, sampling=rows, seed=seed, **options)) == by_row(text)
        draft = ModelDraft(layer_subset(model, [0, 1]), on_layers=[0, 1])
        drafted = generate(
            model, prompts, sampling=rows, seed=seed, drafter=draft, speculate_k=3, **options
        )
        assert by_row(drafted) == by_row(text)


def test_no_limit_keeps_the_whole_tail():
    """Trap: a cumulative sum that rounds to just under 1 drops the tail at top_p = 1."""
    logits = torch.linspace(0, 15, 4096).flip(0)
    for sampling in (
        Sampling(1.0, top_p=1.0, min_p=1e-9),
        Sampling(1.0, top_k=4096, min_p=1e-9),
        Sampling(1.0, top_k=10**6),
    ):
        assert torch.allclose(sampling.probs(logits), logits.softmax(-1), rtol=1e-4, atol=0)


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e6])
def test_extreme_temperatures_stay_finite(temperature):
    p = Sampling(temperature).probs(torch.tensor([60000.0, 59999.0, -60000.0]).half())
    assert p.isfinite().all() and abs(p.sum() - 1) < 1e-6


def test_zero_probability_is_never_drawn():
    """Trap: races and scans at noise exactly 0, or just below 1, must not land on a masked
    token."""
    p = torch.zeros(6, 100_003)
    p[:, 7], p[:, 50_000], p[:, 99_000] = 0.25, 0.5, 0.25
    noise = torch.tensor([0.0, 2**-24, 0.25, 0.5, 0.75, 1 - 2**-24])
    assert draw(p, noise).tolist() == [7, 7, 50_000, 50_000, 99_000, 99_000]


def test_a_total_below_one_loses_nothing():
    """Rounding leaves totals just off 1: noise just below 1 still finds the last token, not
    none."""
    p = torch.tensor([[0.5, 0.25, 0.25, 0.0]]) * torch.tensor([[1 - 2**-20], [1.0], [1 + 2**-20]])
    assert draw(p, torch.full((3,), 1 - 2**-24)).tolist() == [2, 2, 2]


def test_not_finite_logits_are_named_not_sampled():
    """Trap: NaN probabilities silently become token 0."""
    for bad in (math.nan, math.inf):
        logits = torch.tensor([[0.0, bad, 1.0], [0.0, 1.0, 2.0]])
        for sampling in (Sampling(0), Sampling(1.0), Sampling(0.5, top_k=2)):
            ids = sampling.sample(logits, torch.tensor([0.3, 0.9]))
            assert ids.tolist() == [INVALID, 2]
            assert draw(sampling.probs(logits), torch.tensor([0.3, 0.9])).tolist() == [INVALID, 2]


@pytest.mark.parametrize(
    "values",
    [
        (-1, None, None, None),
        (math.nan, None, None, None),
        (1, -1, None, None),
        (1, None, 0, None),
        (1, None, 1.1, None),
        (1, None, None, -0.1),
        (1, None, None, 2),
    ],
)
def test_settings_out_of_range_are_refused(values):
    with pytest.raises(ValueError, match="must"):
        Sampling(*values)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "sampling", [Sampling(1.5, top_p=0.8, min_p=0.02), Sampling(1.0), Sampling(0.7, top_k=12)]
)
def test_draws_follow_the_distribution(sampling):
    """30,000 draws; false alarm 1e-6. The control moves 2 % of the mass from one token to
    another."""
    logits = torch.randn(40, generator=torch.Generator().manual_seed(3))
    n = 30_000
    noise = uniform(torch.full((n,), 11), torch.arange(n))
    draws = [sampling.sample(logits.expand(len(part), -1), part) for part in noise.split(1000)]
    counts = torch.cat(draws).bincount(minlength=40).double()
    p = sampling.probs(logits)
    assert not chi_square_too_large(counts, p)
    distorted = p.clone()
    order = p.argsort(descending=True)
    distorted[order[0]] -= 0.02
    distorted[order[1]] += 0.02
    assert chi_square_too_large(counts, distorted)


def test_uniform_is_uniform_and_independent_in_every_argument():
    """Pairs of numbers on a 16 x 16 grid: neighbours in position, seed and purpose; 2^18 pairs,
    false alarm 1e-6."""
    n = 2**18
    index, zero = torch.arange(n), torch.zeros(n, dtype=torch.int64)
    pairs = {
        "positions": (uniform(zero, index), uniform(zero, index + 1)),
        "seeds": (uniform(index, zero), uniform(index + 1, zero)),
        "purposes": (uniform(zero, index, 0), uniform(zero, index, 1)),
        "seed and position": (uniform(index, index), uniform(index, index + 1)),
        "large seeds": (uniform(index + 2**40, zero), uniform(-index, zero)),
    }
    flat = torch.full((256,), 1 / 256)
    for name, (a, b) in pairs.items():
        assert a.dtype == torch.float32 and a.min() >= 0 and a.max() < 1
        cell = (a * 16).long() * 16 + (b * 16).long()
        assert not chi_square_too_large(cell.bincount(minlength=256).double(), flat), name
    same = (pairs["positions"][0] * 16).long()
    # control: no independence
    assert chi_square_too_large((same * 16 + same).bincount(minlength=256).double(), flat)


def test_every_bit_of_seed_and_position_counts():
    """64 numbers of 24 bits that differ in one bit of an argument: by chance two are equal once in
    8,000 choices."""
    one_bit, zero = (
        torch.tensor([0, *(1 << bit for bit in range(62))]),
        torch.zeros(63, dtype=torch.int64),
    )
    assert len(set(uniform(one_bit, zero).tolist())) == 63
    assert len(set(uniform(zero[:32], one_bit[:32]).tolist())) == 32


def test_the_largest_number_is_below_one(monkeypatch):
    """Once in 2^32 the hash is all ones, which float32 would round up to 2^32."""
    monkeypatch.setattr(program, "_mix", lambda x: torch.full_like(x, 2**32 - 1))
    assert uniform(torch.tensor([3]), torch.tensor([5])).item() == 1 - 2**-24


def test_uniform_is_the_same_whatever_the_batch():
    alone = uniform(torch.tensor([5]), torch.tensor([9]))
    batch = uniform(torch.tensor([1, 5, 5]), torch.tensor([9, 9, 8]))
    assert batch[1] == alone[0] and batch[0] != alone[0] and batch[2] != alone[0]


@pytest.mark.attack
def test_top_p_keeps_the_same_tokens_in_whatever_order_sums_are_added(monkeypatch):
    """A GPU adds a histogram in the order in which its threads arrive. Here each call adds in
    another order, over 30,000 tokens so alike that float32's rounding of their sum is a fraction of
    one of them."""
    scatter_add, generator = torch.Tensor.scatter_add, torch.Generator().manual_seed(0)

    def unordered(self, dim, index, src):
        order = torch.randperm(index.size(-1), generator=generator)
        return scatter_add(self, dim, index[..., order], src[..., order])

    monkeypatch.setattr(torch.Tensor, "scatter_add", unordered)
    logits = 0.2 * torch.rand(1, 30_000, generator=generator)
    for top_p in torch.linspace(0.4, 0.93, 300).tolist():
        kept = [Sampling(1.0, top_p=top_p).probs(logits) for _ in range(4)]
        assert all(torch.equal(other, kept[0]) for other in kept)


def test_the_smallest_top_p_leaves_the_most_likely_token():
    """1e-50 is 0 in float32."""
    for top_p in (1e-50, 1e-38, 1e-9):
        p = Sampling(1.0, top_p=top_p).probs(torch.tensor([1.0, 3.0, 2.0]))
        assert p.tolist() == [0.0, 1.0, 0.0]


def test_a_penalty_that_would_overflow_is_refused():
    for value in (1e-50, 1e30, 0):
        with pytest.raises(ValueError, match=r"repetition_penalty = .* must lie in \[0.01, 100\]"):
            Sampling(0, repetition_penalty=value)
