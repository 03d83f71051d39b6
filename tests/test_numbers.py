"""Numbers at the ends of bfloat16 and float16: no NaN, no impossible token, no silent wrong one.

Oracles: the definitions of sampling.py and speculative.py in float64, and the naive float64 twin of
reference.py. What a model of 16 bits must decide as the twin does are the clear decisions: those
that stay as they are when every weight of the twin is off by two roundings of the dtype. Beyond the
range there is one right answer, the error that says so.
"""

import dataclasses
import functools
import math

import pytest
import reference
import torch
from conftest import generate
from torch import Tensor

from decoding.engine import Engine
from decoding.sampling import GREEDY, INVALID, Sampling, draw
from drafts.base import Drafter, ModelDraft
from drafts.ngram import NgramDraft
from drafts.suffix import SuffixDraft
from drafts.target_layers import layer_subset
from loading.config import config_from_hf
from loading.models import random_model
from loading.weight_names import pieces
from model import RMSNorm, Rope, Transformer, apply_rope, attend
from speculative import accept, acceptance, residual

HALVES = [torch.float16, torch.bfloat16]
SAMPLINGS = [
    Sampling(0),
    Sampling(1),
    Sampling(1e-30),
    Sampling(0.01),
    Sampling(1e30),
    Sampling(1, top_k=1),
    Sampling(0.7, top_k=3),
    Sampling(1, top_p=0.5),
    Sampling(2, top_p=1e-6),
    Sampling(1, min_p=0.3),
    Sampling(1, min_p=1),
    Sampling(1.5, 4, 0.9, 0.05),
]
NOISE = [0.0, 2**-24, 0.25, 0.5, 0.75, 1 - 2**-24]
# ----------------------------------------------------------------------------------- distributions


def extreme_logits(dtype: torch.dtype) -> Tensor:
    """(n, 9) in the dtype. -inf is a masked token; some token of every row is finite."""
    big, normal, least = (
        torch.finfo(dtype).max,
        torch.finfo(dtype).tiny,
        torch.finfo(dtype).smallest_normal / 4,
    )
    no = -math.inf
    rows = [
        [big, -big, big, 0, 1, no, -big, big, no],  # ties at the maximum; differences that overflow
        [big, no, no, no, no, no, no, no, no],
        [no, no, no, no, -big, no, no, no, no],
        [-big] * 9,
        [big] * 9,
        [0.0] * 9,
        [no, -big, -big, no, -big, no, no, -big, no],
        [-least, 0, least, normal, -normal, 2 * least, -0.0, least, 0],  # subnormals
        [big, big / 2, big / 4, 1, 0, -1, -big / 4, -big / 2, -big],
        [1, 2, 3, 3, 2, 1, no, 3, 0],
        [least, -big, no, big, normal, 0, 1, -1, 10],
    ]
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.rand(20, 9, generator=generator) * 2 - 1) * big
    drawn[torch.rand(20, 9, generator=generator) < 0.2] = no
    drawn[:, 4] = 0
    near = torch.randn(20, 9, generator=generator) * 3
    return torch.cat((torch.tensor(rows), drawn, near)).to(dtype)


def defined(logits: Tensor, sampling: Sampling) -> Tensor:
    """The definition, row by row in float64. Weights count as equal where float32 cannot tell them
    apart."""
    out = []
    for row in logits.double().tolist():
        top = max(row)
        if sampling.path == GREEDY:
            out.append([float(i == row.index(top)) for i in range(len(row))])
            continue
        weights = [math.exp(max((x - top) / sampling.temperature, -1e3)) for x in row]
        weights = torch.tensor(weights).float().tolist()
        bar = sorted(weights)[-min(sampling.top_k or len(row), len(row))]
        weights = [w if w >= bar else 0.0 for w in weights]
        if (sampling.top_p or 1) < 1:
            mass = [sum(v for v in weights if v > w) for w in weights]  # of what is likelier
            weights = [
                w if m < sampling.top_p * sum(weights) else 0.0 for w, m in zip(weights, mass)
            ]
        weights = [w if w >= (sampling.min_p or 0) * max(weights) else 0.0 for w in weights]
        out.append([w / sum(weights) for w in weights])
    return torch.tensor(out, dtype=torch.float64)


def differences(found: Tensor, want: Tensor) -> float:
    return (found.double() - want).abs().max().item()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_distributions_and_draws_at_the_ends(sampling, dtype):
    logits = extreme_logits(dtype)
    p = sampling.probs(logits)
    assert p.dtype == torch.float32 and p.isfinite().all()
    assert (
        differences(p, defined(logits, sampling)) < 1e-6
        and differences(p.sum(-1), torch.ones(len(p))) < 1e-6
    )
    assert not p[logits == -math.inf].any()
    for u in NOISE:
        noise = torch.full((len(p),), u)
        token = sampling.sample(logits, noise)
        assert (
            torch.equal(token, draw(p, noise, sampling.path))
            and (p.gather(1, token[:, None]) > 0).all()
        )
        if sampling.path == GREEDY:
            assert token.tolist() == [row.index(max(row)) for row in logits.tolist()]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_a_step_of_speculation_at_the_ends(sampling, dtype):
    """Every row against every other as its draft: kept and replaced together give p, and nothing
    impossible is told."""
    p = sampling.probs(extreme_logits(dtype))
    n, V = p.shape
    p, q = p[:, None].expand(n, n, V).reshape(-1, V), p[None].expand(n, n, V).reshape(-1, V)
    a, rest = acceptance(p, q), residual(p, q)
    assert a.isfinite().all() and a.min() >= 0 and a.max() <= 1
    assert (
        rest.isfinite().all()
        and rest.min() >= 0
        and differences(rest.sum(-1), torch.ones(len(rest))) < 1e-6
    )
    kept = (q * a).double()
    law = kept + (1 - kept.sum(-1, keepdim=True)).clamp(min=0) * rest
    assert differences(law, p.double()) < 1e-6
    for stored in (torch.float32, dtype):  # 16 bits may round a probability to 0, and no more
        pp, qq = p.to(stored), q.to(stored)
        for u in NOISE:
            drafted = draw(qq.float(), torch.full((len(p),), u))[:, None]  # (n^2, 1)
            noise = torch.full((len(p), 1), u), torch.full((len(p), 2), 1 - u if u else 0.0)
            count, token = accept(drafted, qq[:, None], torch.stack((pp, pp), dim=1), noise=noise)
            exact = accept(
                drafted, qq[:, None].float(), torch.stack((pp, pp), dim=1).float(), noise=noise
            )
            assert torch.equal(count, exact[0]) and torch.equal(token, exact[1])
            first = torch.where(count > 0, drafted[:, 0], token)
            assert (token >= 0).all() and (pp.gather(1, first[:, None]) > 0).all()
            assert (pp.gather(1, token[:, None]) > 0).all()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_no_finite_logit_is_no_distribution(dtype):
    logits = torch.tensor([[-math.inf] * 3, [0, math.nan, 1], [math.inf, 0, 0]]).to(dtype)
    for sampling in SAMPLINGS:
        assert sampling.sample(logits, torch.full((3,), 0.5)).tolist() == [INVALID] * 3
        assert (
            draw(sampling.probs(logits), torch.full((3,), 0.5), sampling.path).tolist()
            == [INVALID] * 3
        )


# ------------------------------------------------------------------------------- parts of a model


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_norm_of_what_cannot_be_squared(dtype):
    """Squares over the range of float16; of bfloat16 up to 2^63, beyond which no norm in float32
    can go."""
    largest = min(torch.finfo(dtype).max, 2.0**60)
    for scale in (largest, largest / 8, 1.0, torch.finfo(dtype).tiny, 2.0**-24):
        x = (torch.linspace(-1, 1, 64) * scale).to(dtype)
        want = reference.norm(x.double(), torch.ones(64).double(), 1e-5)
        assert (
            differences(RMSNorm(64, 1e-5).to(dtype)(x), want)
            <= 2 * torch.finfo(dtype).eps * want.abs().max()
        )


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("T", [1, 6])
def test_scores_beyond_float16(T, dtype):
    """Products of 32 times 500 x 500: the key that fits best takes all. One that does not fit
    scores minus that."""
    E, S = 32, 40
    sign = torch.randint(0, 2, (S, E), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    k = (500 * sign)[None, None].to(dtype)  # (1, 1, S, E)
    v = torch.arange(S)[None, None, :, None].expand(1, 1, S, E).to(dtype)
    asked = torch.arange(S - T, S)
    assert (k[0, 0, -1].double() ** 2).sum() / E**0.5 > 65504
    mask = (torch.arange(S) <= asked[:, None])[None, None]  # (1, 1, T, S)
    y = attend(k[:, :, asked], k, v, mask)
    assert torch.equal(y[0, 0].double(), asked[:, None].expand(T, E).double())


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_rotations_at_the_last_position(dtype):
    """Of a context of 2^17. An angle in float32 is off by 2^-24 of itself, and as much by its
    frequency: by 2^-6 at most; in 16 bits it would be off by whole turns."""
    config = dataclasses.replace(CONFIG, max_seq_length=2**17, head_dim=64, rope_theta=500_000.0)
    pos = torch.tensor([[2**17 - 2, 2**17 - 1]])
    cos, sin = Rope(config).to(dtype)(pos)
    x = torch.randn(1, 1, 2, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    angle, _ = reference.angles({"rope_theta": 500_000.0}, 64, 2**17)
    want = reference.rotate(x[0, 0].double(), angle[pos[0]], 1.0)
    largest = torch.finfo(dtype).max / 2
    assert differences(apply_rope(x, cos, sin)[0, 0], want) < x.abs().max() * (
        2**-6 + torch.finfo(dtype).eps
    )
    assert apply_rope(x.sign() * largest, cos, sin).isfinite().all(), (
        "half the range times sqrt(2) still fits"
    )


# ----------------------------------------------------------------------------------------- models

HF = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 29,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
}
CONFIG = config_from_hf(HF)
PROMPTS = [[5, 9, 17, 5, 9, 11], [20, 3, 28]]
N = 16


def tiny(dtype: torch.dtype, **scales: float) -> Transformer:
    """A random model; the scales multiply its embeddings, queries and keys, values, and
    matrices."""
    model = random_model(CONFIG, dtype=torch.float32, seed=1).double()
    kv = CONFIG.n_kv_heads * CONFIG.head_dim
    for layer in model.layers:
        qkv = layer.attention.qkv.weight
        qkv[:-kv] *= 14 * scales.get("qk", 1)
        qkv[-kv:] *= 14 * scales.get("v", 1)
        layer.attention.out.weight *= 14 * scales.get("out", 1)
        layer.ffn.gate_up.weight *= 14 * scales.get("gate_up", 1)
        layer.ffn.down.weight *= 14 * scales.get("down", 1)
    model.embed.weight *= 50 * scales.get("embed", 1)
    model.lm_head.weight *= 20 * scales.get("head", 1)
    model.to(dtype)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    return model


# What reaches the ends: (float16, bfloat16). The largest number of a row is some three times its
# spread.
ENDS = {
    "as it is": ({}, {}),
    "activations": (
        {"embed": 8e3, "out": 2e3, "down": 2e3},
        {"embed": 1e17, "out": 1e17, "down": 1e17},
    ),
    "scores": ({"qk": 200}, {"qk": 1e9}),
    "values": ({"v": 7e3, "out": 1e-4}, {"v": 1e30, "out": 1e-30}),
    "gate and up": ({"gate_up": 40, "down": 1e-3}, {"gate_up": 1e15, "down": 1e-30}),
    "logits": ({"head": 5e3}, {"head": 2e37}),
}
BEYOND = {
    "logits": ({"head": 2e4}, {"head": 1.5e38}),
    "gate and up": ({"gate_up": 500}, {"gate_up": 1e20}),
    "activations": ({"down": 2e4}, {"down": 1e38}),
    "values": ({"v": 2e4}, {"v": 1e38}),
}


def streams(model: Transformer, **options) -> dict[str, list[list[int]]]:
    """Each prompt's ids by every way to decode: alone, together, and drafted."""
    one_layer = layer_subset(model, [0])
    ways = {
        "alone": None,
        "together": None,
        "ngram": NgramDraft(1),
        "layers": ModelDraft(one_layer, on_layers=[0]),
        "model": ModelDraft(tiny(model.norm.weight.dtype)),
    }
    found = {}
    for way, drafter in ways.items():
        out = [[] for _ in PROMPTS]
        for prompts, first in (
            [([p], i) for i, p in enumerate(PROMPTS)] if way == "alone" else [(PROMPTS, 0)]
        ):
            given = {
                "sampling": Sampling(0),
                "max_new_tokens": N,
                "drafter": drafter,
                "speculate_k": 4,
                **options,
            }
            for row, id in generate(model, prompts, **given):
                out[first + row].append(id)
        found[way] = out
    return found


def twin_weights(model: Transformer) -> dict[str, Tensor]:
    return {
        source: part.double()
        for name, parameter in model.named_parameters()
        for source, part in pieces(CONFIG, name, parameter)
    }


def clear_decisions(model: Transformer, tokens: list[int]) -> list[int]:
    """What the twin would say after each token; -1 where twins with weights off by two roundings
    disagree."""
    weights, generator = twin_weights(model), torch.Generator().manual_seed(0)
    eps = torch.finfo(model.norm.weight.dtype).eps
    said = [reference.logits(HF, weights, tokens).argmax(-1)]
    for _ in range(4):
        off = {
            name: w * (1 + 2 * eps * (2 * torch.rand(w.shape, generator=generator) - 1))
            for name, w in weights.items()
        }
        said.append(reference.logits(HF, off, tokens).argmax(-1))
    said = torch.stack(said)  # (5, n)
    return torch.where((said == said[0]).all(0), said[0], -1).tolist()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("where", ENDS)
@pytest.mark.attack
def test_models_at_the_ends_decide_as_the_twin_does(where, dtype):
    model = tiny(dtype, **ENDS[where][HALVES.index(dtype)])
    found, clear = streams(model), functools.cache(lambda ids: clear_decisions(model, list(ids)))
    checked = 0
    for way, rows in found.items():
        for prompt, ids in zip(PROMPTS, rows):
            assert len(ids) == N
            want = clear(tuple(prompt + ids[:-1]))[len(prompt) - 1 :]
            wrong = [(at, id, w) for at, (id, w) in enumerate(zip(ids, want)) if w not in (-1, id)]
            assert not wrong, f"{way}: {wrong}"
            checked += sum(w != -1 for w in want)
    assert checked > 0.3 * len(found) * len(PROMPTS) * N, (
        f"only {checked} decisions were clear: little is shown"
    )
    assert len({id for row in found["alone"] for id in row}) > 3, (
        "the model repeats itself: nothing is shown"
    )


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("where", BEYOND)
@pytest.mark.parametrize("sampling", [Sampling(0), Sampling(1), Sampling(0.7, top_k=5)], ids=str)
def test_models_beyond_the_range_say_so(where, sampling, dtype):
    model = tiny(dtype, **BEYOND[where][HALVES.index(dtype)])
    for way in ("alone", "ngram", "layers"):
        drafter = {
            "ngram": lambda: NgramDraft(1),
            "layers": lambda: ModelDraft(layer_subset(model, [0]), [0]),
        }.get(way)
        with pytest.raises(ValueError, match="the model's logits are not finite"):
            for _ in generate(
                model,
                PROMPTS,
                sampling=sampling,
                max_new_tokens=N,
                drafter=drafter and drafter(),
                speculate_k=4,
            ):
                pass


class Always(Drafter):
    """Proposes one id, again and again, and says so."""

    def __init__(self, id: int):
        super().__init__()
        self.id = id

    def propose(self, state, plan):
        tokens = torch.full((state.pos.size(0), plan.k), self.id)
        return tokens, torch.nn.functional.one_hot(tokens, CONFIG.vocab_size).float()


def rows_of(
    model: Transformer, drafter: Drafter | None, seed: int, **options
) -> list[list[int]] | None:
    """None: the error that the logits are not finite."""
    out = [[] for _ in PROMPTS]
    try:
        for row, id in generate(
            model, PROMPTS, max_new_tokens=N, drafter=drafter, speculate_k=4, seed=seed, **options
        ):
            out[row].append(id)
    except ValueError as error:
        assert "the model's logits are not finite" in str(error)
        return None
    return out


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_draft_model_of_nan_changes_nothing(dtype):
    """Nothing of it is accepted, and what replaces its tokens has the target's law: greedy rows are
    plain rows."""
    model, broken = tiny(dtype), tiny(dtype)
    broken.lm_head.weight.fill_(math.nan)
    assert rows_of(model, ModelDraft(broken), 0, sampling=Sampling(0)) == rows_of(
        model, None, 0, sampling=Sampling(0)
    )
    for seed in range(3):
        assert rows_of(model, ModelDraft(broken), seed, sampling=Sampling(1)) is not None


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_an_id_that_no_row_holds_may_be_anything(dtype):
    """Rows are padded; with an id whose embedding is NaN that would reach them through masked keys
    (0 times NaN)."""
    model = tiny(dtype)
    want = rows_of(model, None, 0, sampling=Sampling(0))
    spare = sorted(set(range(CONFIG.vocab_size)) - set(PROMPTS[0] + PROMPTS[1] + want[0] + want[1]))
    assert 0 in spare, "id 0 is the one that fixed tensors are full of"
    model.embed.weight[spare] = math.nan
    assert rows_of(model, None, 0, sampling=Sampling(0)) == want
    for drafter in (NgramDraft(1), SuffixDraft()):
        assert rows_of(model, drafter, 0, sampling=Sampling(0)) == want


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_after_an_error_an_engine_is_as_before(dtype):
    """What is not finite stays in no cache, where a shorter row of a later batch would meet it."""
    model = tiny(dtype)
    want = rows_of(model, None, 0, sampling=Sampling(0))
    poison = min(set(range(CONFIG.vocab_size)) - set(PROMPTS[0] + PROMPTS[1] + want[0] + want[1]))
    model.embed.weight[poison] = math.nan
    for drafter in (None, NgramDraft(1), ModelDraft(tiny(dtype))):
        engine = Engine(model, 2, 32, drafter=drafter, speculate_k=4)
        with pytest.raises(ValueError, match="not finite"):
            list(
                generate(
                    model,
                    [[poison] * 20] * 2,
                    max_new_tokens=3,
                    engine=engine,
                    sampling=Sampling(0),
                )
            )
        out = [[] for _ in PROMPTS]
        for row, id in generate(
            model, PROMPTS, max_new_tokens=N, engine=engine, sampling=Sampling(0)
        ):
            out[row].append(id)
        assert out == want


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_drafted_token_beyond_the_range_is_an_error_or_nothing(dtype):
    """An id whose own embedding is NaN, which plain decoding never feeds: proposed always, it fills
    the caches with NaN that masked attention may still see (0 times NaN). Then the run must say so,
    and tell no token that plain decoding would not."""
    model = tiny(dtype)
    plain = rows_of(model, None, 0, sampling=Sampling(0))
    poison = min(set(range(CONFIG.vocab_size)) - set(PROMPTS[0] + PROMPTS[1] + plain[0] + plain[1]))
    model.embed.weight[poison] = math.nan
    assert rows_of(model, None, 0, sampling=Sampling(0)) == plain
    assert rows_of(model, Always(poison), 0, sampling=Sampling(0)) in (None, plain)
