"""speculative.py: the law of the output is the target's, whatever drafts; greedy output is plain
greedy output.

A false alarm of a chi-square test here has probability below 1e-6 (each asks for p > 1e-6, on fixed
seeds); each has controls, broken on purpose, that the same test must catch with p < 1e-12.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from conftest import STEADY_S, generate, in_context
from steps import plan_k, prefill_all, start_all_alike, token_records
from torch import Tensor

import cli.report as report
import decoding.batch
import decoding.readback as clock
import speculative
from cli.report import RowStatistics
from decoding.costs import Costs, costs_at, expected_tokens
from decoding.draft_length import DraftLength
from decoding.engine import Engine
from decoding.errors import UserError
from decoding.options import VERIFICATIONS, EngineOptions
from decoding.planner import Step
from decoding.rule import Rule
from decoding.sampling import (
    ACCEPT,
    DRAFT_DRAW,
    INVALID,
    Sampling,
    draw,
    round_uniform,
    uniform,
)
from decoding.statistics import Timing
from drafts.base import Drafter, ModelDraft
from drafts.ngram import NgramDraft
from drafts.suffix import IndexedText, SuffixDraft
from drafts.target_layers import WindowedTarget, layer_subset, parse_layers
from loading.models import random_model
from model import Transformer
from speculative import accept, acceptance, residual
from tests.conformance.drafters import round_law
from tests.conformance.targets import BASE, PROMPTS, TINY, V, pair, tiny
from tests.joint_laws import joint_law, p_value

SAMPLINGS = [
    Sampling(0),
    Sampling(0.3),
    Sampling(1),
    Sampling(2),
    Sampling(1, top_k=3),
    Sampling(1, top_p=0.8),
    Sampling(2, min_p=0.2),
    Sampling(0.7, top_k=4, top_p=0.9, min_p=0.05),
]


def name(sampling: Sampling) -> str:
    return " ".join(
        f"{key}={value}" for key, value in dataclasses.asdict(sampling).items() if value is not None
    )


# --------------------------------------------------------------------- the step, without sampling


@pytest.mark.one_in(7)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=name)
@pytest.mark.parametrize("V", [2, 1000, 50_000])
def test_identity_of_distributions(V, sampling):
    """What a token is after one decision: q a + (1 - sum q a) residual = p, for every token, to
    1e-6."""
    generator = torch.Generator().manual_seed(V)
    p, q = (sampling.probs(3 * torch.randn(64, V, generator=generator)) for _ in range(2))
    q[:8], p[8:16] = p[:8], q[8:16].roll(1, 0)
    # A float32 softmax of 50,000 logits sums to 1 within 3e-6 only; that error is not the step's.
    p, q = ((x.double() / x.double().sum(-1, keepdim=True)).float() for x in (p, q))
    kept = q * acceptance(p, q)
    law = kept + (1 - kept.sum(-1, keepdim=True)) * residual(p, q)
    assert (law - p).abs().max() < 1e-6
    unclamped = (p - q) / (p - q).sum(-1, keepdim=True).clamp(min=1e-6)
    broken = kept + (1 - kept.sum(-1, keepdim=True)) * unclamped
    assert (broken - p).abs().max() > 1e-3, (
        "the identity holds for a wrong residual: nothing is shown"
    )


def exact_next(p: Tensor, q: Tensor) -> Tensor:
    """The law of the token that accept() puts first, for one drafted token: through accept()
    itself, by giving it every drafted token and every decision on a grid of noise."""
    V, n = p.numel(), 4096
    grid = (torch.arange(n) + 0.5) / n
    law = torch.zeros(V)
    for x in range(V):
        drafted = torch.full((n, 1), x)
        target = p.expand(n, 2, V)
        # Decision noise sweeps the grid; the replacement's noise sweeps it in another order.
        noise = grid[:, None], grid[torch.arange(n) * 1021 % n][:, None].expand(-1, 2)
        kept, token = accept(drafted, q.expand(n, 1, V), target, noise=noise)
        first = torch.where(kept > 0, x, token)
        law += q[x] * first.bincount(minlength=V) / n
    return law


def test_accept_has_the_law_of_the_target():
    """Through the function itself; grid error below 2 / sqrt(4096) per replaced mass, controls far
    above."""
    generator = torch.Generator().manual_seed(0)
    for num_ids in (2, 5, 9):
        p, q = (torch.randn(num_ids, generator=generator).mul(2).softmax(-1) for _ in range(2))
        assert (exact_next(p, q) - p).abs().max() < 5e-3 < (q - p).abs().max()


def kept_and_law(p: Tensor, q: Tensor, K: int, block: bool, scaled=True) -> tuple[float, Tensor]:
    """`round_law` of laws p and q (V, V) of a token given the one before it, float64; token 0 comes
    before the first."""

    def after(laws: Tensor) -> Callable[[tuple], Tensor]:
        return lambda path: laws[path[-1] if path else 0]

    return round_law(after(p), after(q), K, block, scaled)


def random_laws(V: int, seed: int) -> Tensor:
    logits = torch.randn(V, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return logits.mul(1.5).softmax(-1)


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("V, K", [(2, 1), (2, 4), (3, 2), (4, 3)])
def test_a_round_has_the_law_of_the_target(V, K, block):
    """Both rules, to float64's rounding, with the wrong residual as a control."""
    p, q = random_laws(V, 4), random_laws(V, 5)
    want = torch.zeros((V,) * (K + 1), dtype=torch.float64)
    for text in itertools.product(range(V), repeat=K + 1):
        want[text] = math.prod(p[a, b] for a, b in itertools.pairwise((0, *text)))
    mean, law = kept_and_law(p, q, K, block)
    assert (law - want).abs().max() < 1e-12
    token_mean, _ = kept_and_law(p, q, K, block=False)
    assert mean >= token_mean - 1e-12 and (mean > token_mean + 1e-3) == (block and K > 1)
    if block and V > 2:  # of two tokens, a residual is one of them whatever the factor
        _, wrong = kept_and_law(p, q, K, block, scaled=False)
        assert (wrong - want).abs().max() > 1e-3


def test_blocks_keep_more_tokens():
    """Figures of S, section 3: 10/9 tokens one by one, 11/9 in blocks of two."""
    p = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64).expand(2, 2)
    q = p.flip(1)
    assert kept_and_law(p, q, 2, block=False)[0] == pytest.approx(10 / 9)
    assert kept_and_law(p, q, 2, block=True)[0] == pytest.approx(11 / 9)


@pytest.mark.parametrize("num_drafted", [2, 3])
@pytest.mark.parametrize("block", [False, True])
def test_a_text_ends_where_the_targets_law_is_no_number(block, num_drafted):
    """Tokens before it are kept by their own ratios, also those of a block."""
    K, n = num_drafted, 40_000
    p = torch.full((n, K + 1, 2), 0.5)
    p[:, 0] = torch.tensor([0.3, 0.7])
    p[:, 1] = float("nan")
    q = torch.full((n, K, 2), 0.5)
    drafted = torch.zeros(n, K, dtype=torch.int64)
    noise = numbers_for(drafted, torch.Generator().manual_seed(0))
    kept, token = accept(drafted, q, p, noise=noise, block=block)
    assert ((kept == 1) == (token == INVALID)).all() and kept.max() == 1
    assert (token[kept == 0] == 1).all()  # the residual's only token
    share = (kept == 1).double().mean()
    assert abs(share - 0.6) < 5 * (0.6 * 0.4 / n) ** 0.5


def numbers_for(drafted: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The `noise` of `accept` for drafted tokens (B, K)."""
    B, K = drafted.shape
    return torch.rand(B, 2 * K + 1, generator=generator).split((K, K + 1), dim=1)


@pytest.mark.parametrize("block", [False, True])
def test_accept_follows_its_formulas(block):
    """The function against the exact mean and law of the next token, 10^5 draws: within 5 standard
    errors."""
    V, K, n = 3, 3, 100_000
    generator = torch.Generator().manual_seed(0)
    p, q = random_laws(V, 4), random_laws(V, 5)
    tokens = [torch.zeros(n, dtype=torch.int64)]
    for _ in range(K):
        tokens.append(torch.multinomial(q[tokens[-1]], 1, generator=generator)[:, 0])
    before = torch.stack(tokens, dim=1)  # (n, K + 1)
    drafted = before[:, 1:]
    noise = numbers_for(drafted, generator)
    kept, token = accept(drafted, q[before[:, :-1]], p[before], noise=noise, block=block)
    mean, law = kept_and_law(p, q, K, block)
    assert abs(kept.double().mean() - mean) < 5 * kept.double().std() / n**0.5
    first = torch.where(kept > 0, before[:, 1], token)
    share = first.bincount(minlength=V) / n
    assert (share - law.sum((1, 2, 3))).abs().max() < 5 * 0.5 / n**0.5


def chain(rows: int, length: int, numbers: Callable) -> Tensor:
    """Texts (rows, length) of two tokens, decoded in rounds of 3 drafted ones, in blocks."""
    K = 3
    p, q = random_laws(2, 4).float(), random_laws(2, 5).float()
    seed = torch.arange(rows)[:, None]
    tokens = torch.zeros(rows, length + K + 2, dtype=torch.int64)
    pos = torch.zeros(rows, 1, dtype=torch.int64)  # of the last decided token
    while pos.min() < length:
        start = pos.clamp(max=length)
        for i in range(1, K + 1):
            last = tokens.gather(1, start + i - 1)
            u = numbers(seed, start, torch.tensor([i]), DRAFT_DRAW)
            tokens.scatter_(1, start + i, (u >= q[last[:, 0], :1]).long())
        ahead = torch.arange(K + 1)
        before = tokens.gather(1, start + ahead)  # (rows, K + 1)
        to_accept = numbers(seed.expand(-1, K), start, ahead[1:], ACCEPT)
        to_draw = uniform(seed.expand(-1, K + 1), start + ahead + 1)
        n, token = accept(
            before[:, 1:], q[before[:, :-1]], p[before], noise=(to_accept, to_draw), block=True
        )
        tokens.scatter_(1, start + n[:, None] + 1, token[:, None])
        pos = start + n[:, None] + 1
    return tokens[:, 1 : length + 1]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("keyed_by_position", [False, True])
def test_numbers_of_a_round_are_used_in_no_other(keyed_by_position):
    """Over several rounds: numbers that belong to positions are read by a decision before theirs,
    and bias it the second time. p-value of a correct program below 1e-6 with that probability."""

    def at_position(seed, start, offset, purpose):
        return uniform(seed, start.expand_as(seed) + offset, purpose)

    length = 6
    texts = chain(200_000, length, at_position if keyed_by_position else round_uniform)
    counts = (texts @ 2 ** torch.arange(length - 1, -1, -1)).bincount(minlength=2**length)
    p = random_laws(2, 4)
    law = [
        math.prod(p[a, b] for a, b in itertools.pairwise((0, *text)))
        for text in itertools.product(range(2), repeat=length)
    ]
    value = p_value(counts, torch.tensor(law, dtype=torch.float64))
    assert value < 1e-12 if keyed_by_position else value > 1e-6


def test_accept_by_hand():
    """Rows: all kept; first rejected; second rejected; q(x) = 0; p(x) = 0 at u = 0; p = q rejected
    by nothing."""
    one = lambda i: torch.eye(4)[i]  # noqa: E731
    half = torch.tensor([0.5, 0.5, 0.0, 0.0])
    quarter = torch.full((4,), 0.25)
    q = torch.stack(
        [torch.stack(row) for row in [(half, half)] * 3 + [(one(1), half)] + [(half, half)] * 2]
    )
    drafted = torch.tensor([[0, 1], [0, 1], [0, 1], [0, 1], [0, 1], [1, 0]])
    p = torch.stack(
        [
            torch.stack(row)
            for row in [
                (half, half, one(3)),
                (one(2), half, one(3)),
                (half, quarter, one(3)),
                (quarter, half, one(3)),
                (one(1), half, one(3)),
                (half, half, half),
            ]
        ]
    )
    u = torch.tensor(
        [[0.99, 0.99], [0.0, 0.0], [0.0, 0.6], [0.0, 0.0], [0.0, 0.0], [1 - 2**-24] * 2]
    )
    n, token = accept(drafted, q, p, noise=(u, torch.full((6, 3), 0.7)))
    assert n.tolist() == [2, 0, 1, 0, 0, 2]
    # residuals: row 1 one(2); row 2 quarter - half -> ids 2, 3; row 3 quarter - one(1) -> 0, 2, 3;
    # row 4 one(1)
    assert token.tolist() == [3, 2, 3, 3, 1, 1]


def test_the_next_token_takes_its_own_positions_number():
    """0, 1 and 2 acceptances of id 0 drawn for sure, against a target that likes four ids equally:
    the replacement is one of three by the first or second number, the token after both one of four
    by the third."""
    q, p = torch.eye(4)[0].expand(3, 2, 4), torch.full((3, 3, 4), 0.25)
    u = torch.tensor([[0.9, 0.1], [0.1, 0.9], [0.1, 0.1]])
    n, token = accept(
        torch.zeros(3, 2, dtype=torch.int64), q, p, noise=(u, torch.tensor([[0.1, 0.4, 0.9]] * 3))
    )
    assert n.tolist() == [0, 1, 2] and token.tolist() == [1, 2, 3]


def test_a_token_beside_drafts_has_the_bits_of_plain_decoding():
    """Rows without a draft, at numbers on the edges between two tokens of a flat law: what is drawn
    is `draw(p)`. Divided by its sum, which is 1 up to rounding, p gives other bits and tokens."""
    V, B = 50_000, 32
    generator = torch.Generator().manual_seed(0)
    logits = 0.01 * torch.randn(V, generator=generator)
    p = Sampling(1).probs(logits).expand(B, 2, V)
    q = torch.zeros(B, 1, V)
    q[0, 0] = Sampling(1).probs(-logits)
    assert torch.equal(residual(p[:, 0], q[:, 0])[1:], p[1:, 0])
    edges = p[0, 0].cumsum(0)[torch.randint(V, (B, 2), generator=generator)]
    noise = torch.ones(B, 1), edges / p[0, 0].sum()
    for block in (False, True):
        n, token = accept(torch.zeros(B, 1, dtype=torch.int64), q, p, noise=noise, block=block)
        assert not n.any() and torch.equal(token[1:], draw(p[1:, 0], noise[1][1:, 0]))


@pytest.mark.slow
def test_a_row_beside_a_drafted_one_equals_its_prompt_alone():
    """Above a flat law of 100,000 tokens; the twelfth token of this seed is one that dividing p by
    its sum changes (75,784 to 75,783)."""
    changed = dataclasses.replace(TINY, vocab_size=100_000, max_seq_length=64)
    model = random_model(changed, dtype=torch.float32, seed=0)
    drafter = ModelDraft(layer_subset(model, [0]), on_layers=[0])
    beside = Engine(model, 2, 40, drafter=drafter, speculate_k=1)
    texts = []
    for engine, seeds in ((beside, (1004, 4)), (Engine(model, 1, 40), (4,))):
        for seed in seeds:
            id = engine.add_request(
                [1, 2, 3], sampling=Sampling(1), max_new_tokens=24, seed=seed, draft=seed != 4
            )
        request = engine.requests[id]
        while engine.has_unfinished():
            engine.step()
        texts.append(request.tokens)
    assert texts[0] == texts[1]


def test_accept_at_temperature_0_is_comparison():
    generator = torch.Generator().manual_seed(2)
    logits = torch.randint(0, 3, (500, 5, 6), generator=generator).float()  # ties on purpose
    p = Sampling(0).probs(logits)
    drafted = torch.randint(0, 6, (500, 4), generator=generator)
    q = torch.nn.functional.one_hot(drafted, 6).float()
    n, token = accept(drafted, q, p, noise=numbers_for(drafted, generator))
    best = logits.argmax(-1)
    want = (drafted == best[:, :4]).long().cumprod(1).sum(1)
    assert torch.equal(n, want) and torch.equal(token, best.gather(1, want[:, None])[:, 0])


def test_what_is_not_a_number():
    """NaN in q is a rejection and the token p's; NaN in p is INVALID, for the host to name. 16 bits
    are no trap."""
    p, q = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]]), torch.full((1, 1, 2), math.nan)
    noise = numbers_for(torch.tensor([[0]]), torch.Generator().manual_seed(0))
    n, token = accept(torch.tensor([[0]]), q, p, noise=noise)
    assert (n.item(), token.item()) == (0, 1)
    one_hot = torch.tensor([[[1.0, 0.0]]])
    n, token = accept(torch.tensor([[0]]), one_hot, p * math.nan, noise=noise)
    assert (n.item(), token.item()) == (0, INVALID)
    near = torch.tensor([0.5, 0.5 + 2**-20]).half()  # trap: a residual that sums to 0 in 16 bits
    assert residual(near.float(), near.float()).sum() == pytest.approx(1, abs=1e-3)
    q, p = near.expand(1, 1, 2), near.expand(1, 2, 2)
    n, token = accept(torch.tensor([[1]]), q, p, noise=noise)
    assert n.item() == 1 and token.item() in (0, 1)


def test_a_round_of_no_drafted_tokens_decides_one():
    p, q = torch.rand(3, 6, 11).softmax(-1), torch.rand(3, 5, 11).softmax(-1)
    drafted = torch.randint(0, 11, (3, 5))
    to_draw = torch.rand(3, 1)
    n, token = accept(drafted[:, :0], q[:, :0], p[:, :1], noise=(to_draw[:, :0], to_draw))
    assert n.tolist() == [0, 0, 0] and torch.equal(token, draw(p[:, 0], to_draw[:, 0]))


# -------------------------------------------------------------------------------- whole sequences

TAIL, ROWS = 5, 4096
# at a time: a filter's histogram has 1,024 bins for each of four tokens, and must fit a cache
FILTERED_ROWS = 128
LONG_PROMPT = [1, 2, 3, 1, 2, 0, 3, 1, 2]  # has n-grams to look up


def sequences(model, drafter, sampling: Sampling, k, runs: int = 4, **options) -> Tensor:
    """Counts (V^TAIL,) of what ROWS x runs speculative generations gave, each row with a seed of
    its own."""
    V, counts = model.config.vocab_size, 0
    begin, end = len(LONG_PROMPT), len(LONG_PROMPT) + TAIL
    rows = ROWS if sampling.path == "plain" else FILTERED_ROWS
    engine = Engine(model, rows, end, drafter=drafter, speculate_k=k, **options)
    for seed in range(0, ROWS * runs, rows):
        start_all_alike(engine, LONG_PROMPT, TAIL, sampling, seeds=list(range(seed, seed + rows)))
        with torch.inference_mode():
            for _ in range(TAIL - 1):  # each round decides one token at least
                engine.run(Step(engine.rows(0, rows), end, k))
        assert engine.batch.done.all()
        index = engine.batch.tokens[:, begin:end] @ V ** torch.arange(TAIL - 1, -1, -1)
        counts = counts + index.bincount(minlength=V**TAIL)
    return counts


def drafter_of(kind: str, model: Transformer) -> Drafter:
    if kind == "model":
        return ModelDraft(tiny(7, n_layers=1))
    if kind == "layers":
        return ModelDraft(layer_subset(model, [0]), on_layers=[0])
    return NgramDraft(2)


@pytest.mark.parametrize(
    "kind, sampling, k",
    [
        pytest.param("model", Sampling(1.5, top_k=3, top_p=0.9), 2, marks=pytest.mark.slow),
        *(
            pytest.param(*case, marks=pytest.mark.attack)
            for case in [
                ("model", Sampling(1), 3),
                ("layers", Sampling(0.8, top_p=0.8), 2),
                ("ngram", Sampling(1), 3),
                ("model", Sampling(0.3), 8),
            ]
        ),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [
                ("model", Sampling(2), 1),
                ("model", Sampling(1, min_p=0.3), 4),
                ("layers", Sampling(1), 3),
                ("ngram", Sampling(0.8, top_k=3), 2),
            ]
        ),
    ],
    ids=str,
)
def test_sequences_have_the_targets_joint_law(kind, sampling, k):
    """Five tokens over several rounds of different lengths, 16,384 sequences (4,096 where filters
    leave fewer outcomes) against all 1,024 probabilities."""
    model = tiny(3)
    counts = sequences(
        model, drafter_of(kind, model), sampling, k, runs=4 if sampling.path == "plain" else 1
    )
    law = joint_law(model, LONG_PROMPT, TAIL, sampling)
    assert p_value(counts, law) > 1e-6


@pytest.mark.attack
def test_drafting_keeps_the_law_of_a_logits_processor():
    """Halved logits at temperature 1 are the law of temperature 2, and not that of 1."""
    model = tiny(3)
    counts = sequences(
        model,
        drafter_of("model", model),
        Sampling(1),
        3,
        runs=1,
        logits_processor=lambda logits, tokens, pos: logits / 2,
    )
    assert p_value(counts, joint_law(model, LONG_PROMPT, TAIL, Sampling(2))) > 1e-6
    assert p_value(counts, joint_law(model, LONG_PROMPT, TAIL, Sampling(1))) < 1e-12


PENALTIES = Sampling(1, None, 0.9, None, 1.6, 0.5, 0.8, ((2, 1.0),))


@pytest.mark.attack
@pytest.mark.parametrize("kind", ["model", pytest.param("ngram", marks=pytest.mark.long)])
def test_penalised_sequences_have_the_targets_joint_law(kind):
    model = tiny(3)
    law = joint_law(model, LONG_PROMPT, TAIL, PENALTIES)
    assert p_value(sequences(model, drafter_of(kind, model), PENALTIES, 3, runs=1), law) > 1e-6


@pytest.mark.attack
def test_penalties_blind_to_drafted_tokens_are_caught(monkeypatch):
    """All positions of a round see the tokens that were decided before it."""
    model, penalize = tiny(3), decoding.batch.penalize
    monkeypatch.setattr(
        decoding.batch,
        "penalize",
        lambda logits, tokens, pos, *rest: penalize(
            logits, tokens, pos[:, :1].expand_as(pos), *rest
        ),
    )
    law = joint_law(model, LONG_PROMPT, TAIL, PENALTIES)
    assert p_value(sequences(model, drafter_of("model", model), PENALTIES, 3, runs=1), law) < 1e-12


def accept_everything(tokens, q, p, *, noise, block, **others):
    return accept(tokens, q, p, noise=(noise[0] - 1, noise[1]), **others)


class DropsTheUnlikely(ModelDraft):
    """After the draw, a token of low q is thrown away and another drawn in its place: looks
    harmless, is not."""

    def propose(self, state, plan):
        tokens, probs = super().propose(state, plan)
        q = probs.gather(2, tokens[..., None])[..., 0]
        again = torch.where(q < 0.3, probs.argmax(-1), tokens)
        state.tokens.scatter_(1, state.pos[:, None] + 1 + torch.arange(plan.k), again)
        return again, probs


BROKEN = ["accepts everything", "residual", "q(x) = 0", "drops the unlikely"]


@pytest.mark.attack
@pytest.mark.one_in(3, 3)
@pytest.mark.parametrize("broken", ["same noise", *BROKEN])
def test_a_broken_law_is_caught(broken, monkeypatch):
    model, drafter, sampling = tiny(3), ModelDraft(tiny(7, n_layers=1)), Sampling(1)
    options = {}
    if broken == "accepts everything":
        monkeypatch.setattr(speculative, "accept", accept_everything)
    elif broken == "residual":  # not clamped: the absolute difference stands for it
        monkeypatch.setattr(
            speculative,
            "residual",
            lambda p, q, factor, **others: F.normalize((factor * p - q).abs(), p=1, dim=-1),
        )
    elif broken == "q(x) = 0":
        monkeypatch.setattr(
            speculative, "acceptance", lambda p, q: (p / q).nan_to_num(1).clamp(max=1)
        )
        drafter = NgramDraft(2)  # proposes zeros where nothing matches
        options = {"verification": "token"}
    elif broken == "drops the unlikely":
        drafter = DropsTheUnlikely(tiny(7, n_layers=1))
    else:  # the decision to accept and the draft's draw must be independent
        monkeypatch.setattr(speculative, "ACCEPT", DRAFT_DRAW)
    counts = sequences(model, drafter, sampling, 3, **options)
    assert p_value(counts, joint_law(model, LONG_PROMPT, TAIL, sampling)) < 1e-12


# -------------------------------------------------------------------------- greedy = plain greedy


class Noise(Drafter):
    """Worse than random: proposes what it knows nothing about, and says so with a confident q."""

    def propose(self, state, plan):
        num_ids = self.probs.size(-1)
        last = state.tokens.gather(1, state.pos[:, None])
        tokens = (last * 7 + torch.arange(plan.k) * 13 + 5) % num_ids
        return tokens, torch.nn.functional.one_hot(tokens, num_ids).float()


class Poison(Noise):
    """And writes rubbish where the round is about to be, in the target's own cache."""

    def setup(self, state, k_max, target, prepare):
        super().setup(state, k_max, target, prepare)
        self.target = target

    def propose(self, state, plan):
        for cache in self.target.caches.layers:
            for row in range(state.pos.size(0)):
                begin = int(state.pos[row])
                cache.k[row, :, begin : begin + plan.k + 1] = 1e4
                cache.v[row, :, begin : begin + plan.k + 1] = -1e4
        return super().propose(state, plan)


def any_drafter(kind: str, target: Transformer, draft: Transformer) -> Drafter:
    return {
        "model": lambda: ModelDraft(draft),
        "itself": lambda: ModelDraft(target_copy(target)),
        "layers": lambda: ModelDraft(layer_subset(target, [0, 1, 3]), on_layers=[0, 1, 3]),
        "window": lambda: ModelDraft(WindowedTarget(target, 7), on_layers=range(4)),
        "early exit": lambda: ModelDraft(layer_subset(target, [0]), on_layers=[0]),
        "ngram": lambda: NgramDraft(2),
        "ngram1": lambda: NgramDraft(1),
        # a pool would make sampled text depend on earlier answers
        "suffix": lambda: SuffixDraft(pool_tokens=0),
        "suffix, pool": SuffixDraft,
        "noise": Noise,
        "poison": Poison,
        "custom": lambda: PlainObject(),
    }[kind]()


def target_copy(target: Transformer) -> Transformer:
    copy = Transformer(target.config).eval().requires_grad_(False)
    copy.load_state_dict(target.state_dict())
    return copy


class PlainObject:
    """The interface and nothing else: no base class."""

    def propose(self, batch, plan):
        tokens = batch.tokens.gather(1, batch.pos[:, None]).expand(-1, plan.k)
        return tokens, torch.nn.functional.one_hot(tokens, V).float()


class FourTokens(PlainObject):
    def propose(self, batch, plan):
        tokens, q = super().propose(batch, plan)
        return tokens[:, :4], q[:, :4]


class FewIds(PlainObject):
    def propose(self, batch, plan):
        tokens, q = super().propose(batch, plan)
        return tokens, q[..., :-1]


def test_an_object_of_ones_own_says_how_much_it_drafts():
    model = pair()[0]
    drafter = FourTokens()
    drafter.max_k = 4
    drafter.auto_k = (2, 4, 8)
    drafter.max_positions = 20
    with pytest.raises(UserError, match="speculate_k = 5: this draft has at most 4 tokens"):
        Engine(model, 1, 40, drafter=drafter, speculate_k=5)
    engine = Engine(model, 1, 40, drafter=drafter, speculate_k="auto")
    assert engine.planner.ks == (2, 4) and engine.drafter.max_positions == 20


@pytest.mark.parametrize("drafter", [FourTokens, FewIds])
def test_a_draft_of_another_shape_is_refused(drafter):
    model = pair()[0]
    with pytest.raises(UserError, match=r"tokens \(B, K\) and q \(B, K, V\), of \(1, 5, 61\)"):
        rows_of(model, PROMPTS[:1], drafter=drafter(), speculate_k=5)


DRAFTERS = [
    "model",
    "itself",
    "layers",
    "window",
    "early exit",
    "ngram",
    "ngram1",
    "suffix",
    "noise",
    "poison",
]


def rows_of(model, prompts, **options) -> list[list[int]]:
    out = [[] for _ in prompts]
    for row, id in generate(
        model, prompts, **{"sampling": Sampling(0), "max_new_tokens": 30, **options}
    ):
        out[row].append(id)
    return out


@pytest.fixture(scope="module")
def margins():
    """The pair's greedy output; and that no decision hangs on rounding: M = 1 and M = K + 1
    products of float32 differ by some 1e-5 for these logits (of size 10), so the two top logits of
    every decision must be further apart."""
    target, draft = pair()
    want = rows_of(target, PROMPTS, max_new_tokens=40)
    gaps = []
    for prompt, tail in zip(PROMPTS, want):
        tokens = torch.tensor([prompt + tail])
        with torch.inference_mode():
            top = (
                target(tokens, torch.arange(tokens.size(1)))[0, len(prompt) - 1 : -1].topk(2).values
            )
        gaps.append((top[:, 0] - top[:, 1]).min().item())
        assert len(set(tail)) > 10, "the target repeats itself: nothing is shown"
    print(f"smallest gap between the two top logits: {min(gaps):.4f}")
    assert min(gaps) > 1e-3
    return target, draft, want


@pytest.mark.one_in(5)
@pytest.mark.parametrize("k", [pytest.param(1, marks=pytest.mark.attack), 5])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_greedy_equals_plain_greedy(margins, kind, k):
    target, draft, want = margins
    drafter = any_drafter(kind, target, draft)
    timing = Timing()
    assert (
        rows_of(target, PROMPTS, drafter=drafter, speculate_k=k, timing=timing, max_new_tokens=40)
        == want
    )
    for row, prompt in enumerate(PROMPTS):
        alone = Timing()
        options = {"drafter": drafter, "speculate_k": k, "timing": alone, "max_new_tokens": 40}
        assert rows_of(target, [prompt], **options) == [want[row]]
        counted = [
            [token._replace(overlap=0.0) for token in tokens]
            for tokens in (*token_records(alone), token_records(timing)[row])
        ]
        assert counted[0] == counted[1], "a row's statistics are its own, too"
    rows = [RowStatistics(tokens) for tokens in token_records(timing)]
    accepted = sum(sum(row.accepted.values()) for row in rows)
    if kind == "itself":
        assert timing.steps == math.ceil(39 / (k + 1)), (
            "every token of a model that drafts for itself is accepted"
        )
        assert [row.alpha for row in rows] == pytest.approx([1.0] * 4), (
            "and drafted from the target's own law"
        )
    elif kind not in ("noise", "poison"):
        assert accepted > 0, "nothing was accepted: nothing is shown"


def test_a_drafter_that_serves_another_engine_by_now_is_refused(margins):
    """Its buffers and caches are the other engine's: its drafts would be read from them without a
    word."""
    target, draft, _ = margins
    drafter = ModelDraft(draft)
    first = Engine(target, 4, 60, drafter=drafter, speculate_k=3)
    Engine(target, 1, 60, drafter=drafter, speculate_k=3)
    with pytest.raises(ValueError, match="give each engine its own"):
        rows_of(target, PROMPTS, engine=first)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("kind", ["itself", "model", "ngram", "layers", "suffix, pool"])
def test_every_length_and_stop_inside_a_round(margins, kind):
    """Lengths around the ends of rounds; and with stop ids nothing behind them is yielded, counted
    or kept."""
    target, draft, want = margins
    drafter = any_drafter(kind, target, draft)
    for n in (1, 2, 5, 6, 7, 11, 12, 13, 14):
        assert rows_of(target, PROMPTS, drafter=drafter, max_new_tokens=n) == [
            row[:n] for row in want
        ]
    for at in (0, 1, 4, 5, 6, 8):
        stop = {want[0][at], want[3][at + 2]}
        cut = [
            row[:30][: 1 + next((i for i, id in enumerate(row) if id in stop), 29)] for row in want
        ]
        engine, timing = Engine(target, 4, 60, drafter=drafter, speculate_k=5), Timing()
        got = rows_of(target, PROMPTS, engine=engine, stop_ids=stop, timing=timing)
        assert got == cut == [request.tokens for request in timing.requests]
        assert [len(tokens) for tokens in token_records(timing)] == [len(row) for row in cut]
        for row, tokens in enumerate(token_records(timing)):
            assert [token.first for token in tokens] == [True] + [False] * (len(cut[row]) - 1)


def test_a_request_that_is_aborted_ends_its_statistics(margins):
    target, _, want = margins
    engine = Engine(target, 4, 60, drafter=ModelDraft(target_copy(target)))
    ids = [
        engine.add_request(prompt, sampling=Sampling(0), max_new_tokens=30) for prompt in PROMPTS
    ]
    requests = [engine.requests[id] for id in ids]
    while len(requests[1].tokens) < 7:
        engine.step()
    engine.abort(ids[1])
    while engine.has_unfinished():
        engine.step()
    got = [request.tokens for request in requests]
    assert [len(row) for row in got] == [30, 7, 30, 30], "the prompt's token, and a round of six"
    assert all(row == expected[: len(row)] for row, expected in zip(got, want))
    counted = RowStatistics(requests[1].token_records)
    assert counted.tokens == 6 and dict(counted.accepted) == dict.fromkeys(range(5), 1)


def test_a_shared_cache_keeps_no_trace(margins):
    """Rubbish written by the drafter where the round is: the same tokens, and bit for bit the same
    cache."""
    target, _, _ = margins
    caches = []
    for drafter in (Noise(), Poison()):
        engine = Engine(target, 4, 60, drafter=drafter, speculate_k=5)
        rows_of(target, PROMPTS, engine=engine)
        caches.append(
            [
                [
                    cache.k[slot.index, :, : len(slot.ids)].clone()
                    for cache in engine.runner.caches.layers
                ]
                for slot in engine.scheduler.slots
            ]
        )
    assert all(torch.equal(a, b) for rows in zip(*caches) for a, b in zip(*rows))
    assert max(layer.abs().max() for row in caches[1] for layer in row) < 1e4


def test_a_draft_that_is_not_a_number_changes_nothing(margins):
    target, draft, want = margins
    draft = target_copy(draft)
    draft.norm.weight.fill_(math.nan)
    assert rows_of(target, PROMPTS, drafter=ModelDraft(draft), max_new_tokens=40) == want


def test_a_draft_model_keeps_nothing_of_a_call(margins):
    """After a call without an engine both models answer a direct call as before, longer than any
    cache was."""
    target, draft, _ = margins
    tokens, pos = torch.tensor([PROMPTS[1] * 10]), torch.arange(90)
    with torch.inference_mode():
        before = [model(tokens, pos) for model in (target, draft)]
        rows_of(target, PROMPTS, drafter=ModelDraft(draft), max_new_tokens=5)
        assert all(
            torch.equal(model(tokens, pos), want) for model, want in zip((target, draft), before)
        )


@pytest.mark.parametrize("draft_v", [V - 9, V + 7])
def test_padded_vocabularies_may_differ(margins, draft_v):
    """Ids that only one side has: the draft never sees or proposes one it should not, and the
    target's law is whole (its greedy output holds ids that a shorter draft lacks)."""
    target, _, want = margins
    other = tiny(0, 14, **{**BASE, "n_layers": 1, "vocab_size": draft_v})
    assert max(map(max, want)) >= V - 9
    assert rows_of(target, PROMPTS, drafter=ModelDraft(other), max_new_tokens=40) == want


@pytest.mark.slow
def test_a_sliding_window_and_qk_norm():
    target, draft = pair(windows=(None, 7, 7, None), qk_norm="heads")
    want = rows_of(target, PROMPTS, max_new_tokens=50)
    for drafter in (
        ModelDraft(draft),
        ModelDraft(layer_subset(target, [0, 1]), on_layers=[0, 1]),
        NgramDraft(1),
    ):
        assert rows_of(target, PROMPTS, max_new_tokens=50, drafter=drafter, speculate_k=4) == want


@pytest.mark.attack
def test_a_late_host_reads_the_same(margins, monkeypatch):
    """What a GPU does: rounds run ahead of the reading."""
    target, draft, want = margins
    stop = {want[0][6], want[2][11]}
    cut = [row[: 1 + next((i for i, id in enumerate(row) if id in stop), 39)] for row in want]
    for lag in (1, 5):
        monkeypatch.setattr(clock, "host_lag", lambda device, lag=lag: lag)
        for kind in ("model", "layers", "ngram", "suffix", "suffix, pool"):
            drafter = any_drafter(kind, target, draft)
            assert rows_of(target, PROMPTS, drafter=drafter, max_new_tokens=40) == want
            assert (
                rows_of(target, PROMPTS, drafter=drafter, max_new_tokens=40, stop_ids=stop) == cut
            )


def test_turns_keep_both_caches(margins):
    """A second turn on the same engine: what both caches are said to hold, they hold, after a full
    acceptance too."""
    target, draft, _ = margins
    for drafter in (ModelDraft(target_copy(target)), ModelDraft(draft)):
        engine = Engine(target, 1, 96, drafter=drafter, speculate_k=3)
        for n in (8, 9, 10, 11):  # rounds that end at every phase
            engine.clear()
            for cache in (*engine.runner.caches.layers, *engine.drafter.runner.caches.layers):
                cache.k.fill_(9.0), cache.v.fill_(-9.0)  # so that a position that was skipped shows
            first = PROMPTS[1] + rows_of(target, [PROMPTS[1]], engine=engine, max_new_tokens=n)[0]
            second = [*first, 3, 5, 8]
            timing = Timing()
            got = rows_of(target, [second], engine=engine, timing=timing, max_new_tokens=20)
            fresh, other = Timing(), ModelDraft(drafter.model)
            assert got == rows_of(
                target, [second], drafter=other, speculate_k=3, timing=fresh, max_new_tokens=20
            )
            same = [
                [
                    token._replace(overlap=round(token.overlap, 3))
                    for token in t.requests[0].token_records
                ]
                for t in (timing, fresh)
            ]
            assert same[0] == same[1] and timing.prompt_tokens == 4


# --------------------------------------------------------- compiled, without syncs, of any length


class NoSync(torch.utils._python_dispatch.TorchDispatchMode):
    """Fails when the host asks the device for a value."""

    FORBIDDEN = (
        "_local_scalar_dense",
        "nonzero",
        "item",
        "equal",
        "is_nonzero",
        "masked_select",
        "unique",
    )

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        assert name not in self.FORBIDDEN and not by_mask, f"the host waits for the device: {name}"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["model", "layers", "ngram"])
@pytest.mark.parametrize(
    "sampling", [Sampling(0), Sampling(1), Sampling(1, top_k=5, top_p=0.9)], ids=name
)
def test_no_host_sync_inside_a_round(margins, kind, sampling):
    target, draft, _ = margins
    engine = Engine(target, 4, 60, drafter=any_drafter(kind, target, draft), speculate_k=3)
    with torch.inference_mode(), NoSync():
        prefill_all(engine, PROMPTS, 30, sampling, stop_ids={3})
        for k in (3, 1, 0, 0, 3):  # after plain steps the drafter catches up
            engine.run(Step(engine.rows(0, 4), 30, k))
        for control in (lambda t: t[0].item(), lambda t: t[t > 3], lambda t: bool(t[0] > 3)):
            with pytest.raises(AssertionError, match="waits for the device"):
                control(engine.batch.pos)


@pytest.mark.compiled
def test_compiled_rounds_of_a_model():
    """Compiled and ragged: greedy is plain greedy, and nothing compiles after warm-up. The target
    is that of test_drafts.py's compiled rounds, which leave it much of their code; -m long has
    windows."""
    target, draft = pair()
    want = rows_of(target, PROMPTS, max_new_tokens=40)
    options = {"compile": True, "compile_prompts": False}
    engine = Engine(
        target, 4, 96, drafter=any_drafter("model", target, draft), speculate_k=3, **options
    )
    engine.warm_up("greedy")
    with torch.compiler.set_stance("fail_on_recompile"):
        assert rows_of(target, PROMPTS, engine=engine, max_new_tokens=40) == want
        assert rows_of(target, PROMPTS[:2], engine=engine, max_new_tokens=40) == want[:2]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["model", "layers", "ngram", "suffix"])
def test_compiled_rounds(kind):
    """Compiled, ragged, with a window: greedy is plain greedy; 200 rounds of changing K, length and
    temperature compile nothing after warm-up; sampled rows are what eager code gives."""
    target, draft = pair(windows=(None, 9, 9, None))
    want = rows_of(target, PROMPTS, max_new_tokens=40)
    sampled = {"sampling": Sampling(0.7), "seed": 3, "max_new_tokens": 40}
    drafter = any_drafter(kind, target, draft)
    eager = rows_of(target, PROMPTS, drafter=drafter, speculate_k=3, **sampled)
    engine = Engine(target, 4, 96, drafter=drafter, speculate_k=3, compile=True)
    engine.planner.ks = (1, 3)  # as auto would choose from
    for sampling in ("greedy", "plain"):
        engine.warm_up(sampling)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert rows_of(target, PROMPTS, engine=engine, max_new_tokens=40) == want
        assert rows_of(target, PROMPTS[:2], engine=engine, max_new_tokens=40) == want[:2]
        engine.calibrate(Sampling(0), 40, rounds=2)
        assert rows_of(target, PROMPTS, engine=engine, **sampled) == eager
        for temperature in (0.5, 1.3):
            engine.reset()
            with torch.inference_mode():
                prefill_all(engine, PROMPTS, 80, Sampling(temperature))
                for number in range(100):
                    k = (3, 0, 1, 1, 0, 0, 3)[number % 7]
                    engine.run(Step(engine.rows(0, 4), 10 + number % 80, k))


@pytest.mark.parametrize("deep", [False, True])
def test_coming_back_from_plain_steps_fills_the_drafts_cache(margins, deep):
    """After 70 plain steps of a ragged batch the draft's cache must be what drafting all along
    would have left. A deep draft's keys hang on what stands before them: what was missed is filled
    in from the oldest on."""
    target, draft, _ = margins
    draft = target_copy(target) if deep else draft
    prompts = [PROMPTS[1] * 2, PROMPTS[2]]
    drafter = ModelDraft(draft)
    engine = Engine(target, 2, 96, drafter=drafter, speculate_k=3)
    filled = [len(prompt) + 71 for prompt in prompts]  # the first token of the prompt, and 70 steps
    with torch.inference_mode():
        prefill_all(engine, prompts, 78, Sampling(0))
        plan_k(engine, lambda requests: 0)
        for _ in range(70):
            engine.step()
        caches = engine.drafter.runner.caches.layers
        before = [cache.k.clone() for cache in caches]
        plan_k(engine, lambda requests: 1)
        engine.step()
    after = [cache.k for cache in caches]
    for row, prompt in enumerate(prompts):
        n = filled[row] - 1  # positions before the last decided token
        tokens, alone = engine.batch.tokens[row : row + 1, :n], draft.make_caches(1, n)
        with torch.inference_mode():
            draft.hidden(tokens, torch.arange(n), alone)
        for layer, cache in enumerate(after):
            assert torch.allclose(cache[row, :, :n], alone.layers[layer].k[0], atol=1e-4)
            assert not torch.allclose(
                before[layer][row, :, len(prompt) : n], cache[row, :, len(prompt) : n], atol=1e-4
            )


# ------------------------------------------------------------------------ length, figures, theory


@pytest.mark.parametrize("short_s", [0.002, 0.1])
def test_short_steps_are_calibrated_behind_others_of_their_kind(monkeypatch, short_s):
    """Steps of 2 ms count only behind another of their kind, where they take half as long; long
    ones run once each."""
    engine = Engine(in_context(tiny(0), 64), 1, 64, drafter=NgramDraft(), speculate_k=3)
    kinds = []
    run = Engine.run

    def run_and_note(self, step):
        kinds.append(step.k)
        return run(self, step)

    def simulated_times(result) -> tuple[float, float]:
        k = kinds[-1]
        return 0.0, (1 + k) * short_s / (2 if kinds[-2:-1] == [k] else 1)

    monkeypatch.setattr(Engine, "run", run_and_note)
    monkeypatch.setattr("decoding.warmup.step_times", simulated_times)
    monkeypatch.setattr("decoding.warmup.STEADY_S", STEADY_S)
    costs = engine.calibrate(Sampling(0), 20, rounds=3)
    if short_s == 0.002:
        assert costs == Costs(0.001, {3: 0.0}, {3: 0.004})
        assert kinds.count(0) == 2 + 3 * (10 + 1) and kinds.count(3) == 2 + 3 * (2 + 1)
    else:
        assert kinds == [0, 0, 3, 3, *[0, 3] * 3]


def test_auto_is_lossless_and_finds_what_pays(margins):
    """Costs are given, not measured: a perfect cheap draft goes to the longest K, a hopeless one to
    plain steps."""
    target, draft, want = margins
    cheap = Costs(1.0, {k: 0.05 * k for k in (1, 2, 3, 5, 8)}, dict.fromkeys((1, 2, 3, 5, 8), 1.1))
    used = {}
    for kind in ("itself", "noise", "model"):
        engine = Engine(target, 4, 96, drafter=any_drafter(kind, target, draft), speculate_k="auto")
        with pytest.raises(ValueError, match="calibrate"):
            rows_of(target, PROMPTS, engine=engine)
        engine.planner.costs, timing = cheap, Timing()
        assert rows_of(target, PROMPTS, engine=engine, timing=timing, max_new_tokens=40) == want
        used[kind] = RowStatistics(
            token for tokens in token_records(timing) for token in tokens
        ).rounds
    assert used["itself"].keys() == {8}
    assert used["noise"][0] > 0.8 * used["noise"].total()


def test_costs_between_two_lengths_lie_on_a_line():
    """Six rows over 16,000 positions cost 2.1 plain steps, over 100 they cost 1.04."""
    short = Costs(0.1, {5: 0.02}, {5: 0.104})
    long = Costs(0.3, {5: 0.09}, {5: 0.63})
    by_length = {100: short, 16_000: long}
    for length in (1, 99, 100):
        assert costs_at(by_length, length) == short
    for length in (16_000, 16_001, 99_999):
        assert costs_at(by_length, length) == long
    middle = costs_at(by_length, 8050)
    assert middle.decode_s == pytest.approx(0.2) and middle.verify_s[5] == pytest.approx(0.367)
    assert middle.draft_s == pytest.approx({5: 0.055})
    growing = [costs_at(by_length, length) for length in range(100, 16_001, 100)]
    for before, after in itertools.pairwise(growing):
        assert before.decode_s < after.decode_s and before.v(5) < after.v(5)
        assert before.draft_s[5] < after.draft_s[5] and before.c(5) < after.c(5)
    assert costs_at({100: short}, 1) == costs_at({100: short}, 16_000) == short


def test_a_draft_is_shorter_in_a_longer_text():
    """At the same acceptance, with a token verified for 0.02 of a plain step and then for 0.9."""
    ks = Drafter.auto_k
    by_length = {
        length: Costs(1.0, dict.fromkeys(ks, 0.05), {k: 1 + token_s * k for k in ks})
        for length, token_s in ((200, 0.02), (16_000, 0.9))
    }
    chosen = []
    for length in range(0, 17_000, 100):
        draft_length = DraftLength("auto", costs_at(by_length, length))
        draft_length.num_steps_to_probe = 64  # drafting was tried
        chosen.append(draft_length.choose())
    assert chosen == sorted(chosen, reverse=True) and set(chosen) == {0, *ks}


def test_rows_between_one_and_all_cost_in_proportion(margins):
    """An eager engine runs the rows from the first request's slot to the last one's."""
    target, draft, _ = margins
    engine = Engine(target, 5, 64, drafter=any_drafter("itself", target, draft), speculate_k=1)
    one = Costs(1.0, {1: 0.25}, {1: 1.25})
    all_rows = Costs(3.0, {1: 0.75}, {1: 6.25})
    engine.planner.measured_costs = {1: {64: one}, 5: {64: all_rows}}
    planned = []
    for _ in range(5):
        engine.add_request(PROMPTS[0], sampling=Sampling(0), max_new_tokens=40)
        engine.step()
        requests = engine.scheduler.decoding()
        engine.planner.plan(requests, [])
        planned.append(engine.planner.costs)
    assert [costs.decode_s for costs in planned] == [1.0, 1.5, 2.0, 2.5, 3.0]
    assert [costs.verify_s[1] for costs in planned] == [1.25, 2.5, 3.75, 5.0, 6.25]


def test_auto_remembers_a_draft_from_one_answer_to_the_next(margins):
    """A poor draft is tried in the first answer, and again only after 64 plain steps, in whatever
    answer they are. Another K starts anew."""
    target, _, want = margins
    drafter = ModelDraft(tiny(99, n_layers=1, vocab_size=target.config.vocab_size))
    engine = Engine(target, 1, 64, drafter=drafter, speculate_k="auto")
    ks = engine.planner.ks
    costs = Costs(1.0, {k: 0.9 * k for k in (0, *ks)}, {k: 1.1 for k in ks})
    engine.planner.measured_costs = {1: {64: costs}}
    engine.planner.costs = costs

    def ks_of_answer() -> list[int]:
        timing = Timing()
        options = {"engine": engine, "max_new_tokens": 30, "timing": timing}
        assert rows_of(target, PROMPTS[:1], **options) == [want[0][:30]]
        return [record.k for record in timing.records]

    first = ks_of_answer()
    assert first == [1] * 4 + [0] * (len(first) - 4)
    assert set(ks_of_answer()) == {0}
    engine.planner.speculate_k = 2
    assert ks_of_answer()[:9] == [2] * 9
    engine.planner.speculate_k = "auto"
    assert ks_of_answer() == first


@pytest.mark.one_in(4)
@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("num_rows", [1, 2])
def test_auto_stops_drafting_as_a_text_grows(margins, num_rows, lag, monkeypatch):
    """By a simulated clock a verified token costs 0.05 of a plain step in a short text and 3 at the
    context's end, and the draft is perfect. A GPU's results are read two steps late, yet each step
    is reported at the costs that it was planned by."""
    target, draft, want = margins
    monkeypatch.setattr("decoding.warmup.LONG_CONTEXT", 63)
    monkeypatch.setattr("decoding.warmup.SHORT_LENGTH", 16)
    drafter = any_drafter("itself", target, draft)
    engine = Engine(target, num_rows, 64, drafter=drafter, speculate_k="auto")
    engine.readback.host_lag = lag
    engine.runner.length_multiple = 16  # attend to as few positions as the text has
    run = engine.run
    plan = engine.prepare_step
    planned = []

    def run_by_clock(step):
        seconds = 1 + step.k * (0.05 if step.length == 16 else 3.0)
        return run(step)._replace(times=(0.0, 0.0, seconds))

    def plan_and_record(*args):
        planned.append(plan(*args))
        return planned[-1]

    monkeypatch.setattr(engine, "run", run_by_clock)
    monkeypatch.setattr(engine, "prepare_step", plan_and_record)
    costs = engine.calibrate(Sampling(0), rounds=1)
    ks = engine.planner.ks
    assert (
        costs
        == engine.planner.costs
        == Costs(1.0, dict.fromkeys(ks, 0.0), {k: 1 + 0.05 * k for k in ks})
    )
    timing = Timing()
    options = {"engine": engine, "max_new_tokens": 40, "timing": timing}
    assert rows_of(target, PROMPTS[:num_rows], **options) == want[:num_rows]
    assert planned[0].k == 8 and planned[-1].k == 0
    for step, record in zip(planned, timing.records):
        assert record.costs is step.costs and record.k == step.k
        share = (engine.runner.bucket_length(step.length) - 16) / (64 - 16)
        assert step.costs.v(1) == pytest.approx(1.05 + share * 2.95)


def test_draft_length_leaves_and_comes_back():
    costs = Costs(1.0, {k: 0.2 * k for k in (1, 2, 5)}, {1: 1.1, 2: 1.2, 5: 1.5})
    length = DraftLength("auto", costs)
    assert length.choose() == 2
    for _ in range(300):
        length.observe(0.05)
    chosen = [length.choose() for _ in range(400)]
    probes = [i for i, k in enumerate(chosen) if k]
    assert set(chosen) == {0, 1} and probes[:4] == [64, 65, 66, 67] and probes[4] == 68 + 128
    for _ in range(300):
        length.observe(0.95)
    assert length.choose() == 5
    assert DraftLength(3).choose() == 3 == DraftLength(3, costs).choose()
    # Costs are measured to a few percent: 1.8 tokens for 1.77 plain steps are not worth it, for 1.7
    # they are. Before that is known, four rounds are drafted in any case.
    for v, want in ((1.27, [1, 1, 1, 1, 0, 0]), (1.2, [1] * 6)):
        length = DraftLength("auto", Costs(1.0, {1: 0.5}, {1: v}))
        assert [length.choose() for _ in range(6)] == want


@pytest.mark.parametrize("verification", VERIFICATIONS)
def test_the_engines_option_decides_how_sampled_tokens_are_verified(
    margins, verification, monkeypatch
):
    target, draft, _ = margins
    blocks = set()

    def spy(*args, block, **options):
        blocks.add(block)
        return accept(*args, block=block, **options)

    monkeypatch.setattr(speculative, "accept", spy)
    engine = Engine(
        target, 1, 60, drafter=ModelDraft(draft), speculate_k=3, verification=verification
    )
    rows_of(target, PROMPTS[:1], engine=engine, sampling=Sampling(1), max_new_tokens=12)
    assert blocks == {verification == "block"}


class KeepsAll(Rule):
    """Not lossless: keeps whatever was drafted."""

    def keep(self, draft_tokens, q, p, u):
        return torch.ones_like(draft_tokens, dtype=torch.bool)

    def expected(self, p, q):
        return q.sum(dim=-1)


def test_a_rule_of_ones_own_decides_what_is_kept(margins):
    """Three of four tokens are the draft's, and reports and `auto` go by what the rule expects."""
    target, draft, _ = margins
    k, n = 3, 24
    want = []
    while len(want) < n:
        model = draft if len(want) % (k + 1) else target
        text = torch.tensor([PROMPTS[0] + want])
        logits = model(text, torch.arange(text.size(1)))[0, -1]
        want.append(logits.argmax().item())
    engine = Engine(
        target, 1, 60, drafter=ModelDraft(draft), speculate_k=k, verification=KeepsAll()
    )
    timing = Timing()
    rows = rows_of(target, PROMPTS[:1], engine=engine, max_new_tokens=n, timing=timing)
    assert rows == [want]
    figures = report.speculative(engine, timing)
    assert figures["greedy_text"] == "lossy" and figures["alpha"] == pytest.approx(1.0)
    plain = Engine(target, 1, 60, drafter=ModelDraft(draft), speculate_k=k)
    assert rows_of(target, PROMPTS[:1], engine=plain, max_new_tokens=n) != [want]


class KeepsHalf(KeepsAll):
    def keep(self, draft_tokens, q, p, u):
        return u < 0.5


def test_a_rules_numbers_do_not_depend_on_other_requests(margins):
    """A greedy row's rule has the same numbers alone as beside a sampled row."""
    target, draft, _ = margins
    options = {"drafter": ModelDraft(draft), "speculate_k": 3, "verification": KeepsHalf()}
    engine = Engine(target, 2, 60, **options)
    alone = rows_of(target, PROMPTS[:1], engine=engine, max_new_tokens=30)
    samplings = [Sampling(0), Sampling(1)]
    beside = rows_of(target, PROMPTS[:1] * 2, engine=engine, max_new_tokens=30, sampling=samplings)
    assert beside[0] == alone[0]
    plain = rows_of(target, PROMPTS[:1], max_new_tokens=30)
    drafted = rows_of(draft, PROMPTS[:1], max_new_tokens=30)
    assert alone != plain and alone != drafted


class KeepsAllButTheUnlikely(KeepsAll):
    def keep(self, draft_tokens, q, p, u):
        return ~(p.gather(2, draft_tokens[..., None])[..., 0] < 1e-3)  # True where p is NaN


def test_a_rule_keeps_nothing_behind_logits_that_are_not_numbers():
    p = torch.full((1, 3, 5), 0.2)
    p[:, 1:] = math.nan
    q = torch.full((1, 2, 5), 0.2)
    noise = (torch.full((1, 2), 0.5), torch.full((1, 3), 0.5))
    n, token = KeepsAllButTheUnlikely().accept(torch.tensor([[1, 2]]), q, p, noise)
    assert n.tolist() == [1] and token.tolist() == [INVALID]


class DrawsTheRest(KeepsAll):
    def next_law(self, p, q):
        rest = (p - q).clamp(min=0)
        return rest / rest.sum(dim=-1, keepdim=True)


@pytest.mark.parametrize("wrong", [math.nan, 0.0])
def test_a_rule_draws_the_targets_token_where_a_draft_is_not_numbers(wrong):
    """As where there is no draft. A row may be NaN in part; zeros are the control."""
    p = torch.full((1, 3, 5), 0.2)
    q = torch.full((1, 2, 5), 0.25)
    q[:, 1, 1:] = wrong
    q[:, 1, 0] *= wrong != 0.0
    noise = (torch.full((1, 2), 0.5), torch.full((1, 3), 0.5))
    n, token = DrawsTheRest().accept(torch.tensor([[1, 2]]), q, p, noise)
    assert n.tolist() == [1] and 0 <= token.item() < 5


class NotNumbersAtFirst:
    """A draft of token 0."""

    def __init__(self):
        self.q = math.nan

    def propose(self, batch, plan):
        shape = (len(batch.pos), plan.k)
        q = torch.full((*shape, self.vocab_size), self.q)
        self.q = 1 / self.vocab_size
        return torch.zeros(shape, dtype=torch.int64), q


def test_a_draft_that_is_not_numbers_counts_as_rejected(margins):
    """In the mean that tells a draft of other weights."""
    target = margins[0]
    drafter = NotNumbersAtFirst()
    drafter.vocab_size = target.config.vocab_size
    engine = Engine(target, 1, 60, drafter=drafter, speculate_k=3)
    plain = rows_of(target, PROMPTS[:1], max_new_tokens=20)
    assert rows_of(target, PROMPTS[:1], engine=engine, max_new_tokens=20) == plain
    assert engine.meter.num_rounds > 1
    assert 0 <= engine.meter.total_overlap < engine.meter.num_rounds


@pytest.mark.parametrize("rule", ["typical", KeepsAll, None, ["block"]])
def test_what_is_no_rule_is_refused_in_one_line(rule):
    """A class too, whose first round would fail in a call of a method without an instance."""
    with pytest.raises(UserError, match=r"or an instance of a decoding.rule.Rule$") as refusal:
        EngineOptions(verification=rule)
    assert str(refusal.value).startswith(f"verification = {rule!r} must be block, token")


def test_theory_against_simulation_and_sums():
    """E[tokens] as the mean of a geometric variable capped at K + 1 (standard error below 0.01),
    and by hand."""
    generator = torch.Generator().manual_seed(0)
    for alpha, k in ((0.3, 1), (0.8, 5), (0.95, 8)):
        kept = (torch.rand(200_000, k, generator=generator) < alpha).long().cumprod(1).sum(1)
        assert expected_tokens(alpha, k) == pytest.approx(
            (kept + 1).double().mean().item(), abs=0.05
        )
        assert expected_tokens(alpha, k) == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha))
    assert expected_tokens(1.0, 4) == 5 and expected_tokens(0.0, 4) == 1
    for v in (1.0, 1.5):  # with v = 1, L theorem 3.8: c = 0.1
        by_hand = (1 - 0.8**6) / (0.2 * (5 * 0.1 + v))
        assert Costs(1.0, {5: 0.5}, {5: v}).speedup(5, 0.8) == pytest.approx(by_hand)
    costs = Costs(2.0, {2: 0.8, 5: 2.0}, {2: 2.4, 5: 3.0})
    assert (costs.c(2), costs.v(5), costs.round(2), costs.round(0)) == (0.2, 1.5, 0.4 + 1.2, 1.0)
    assert costs.best(0.0) == (0, 1.0) and costs.best(0.9) == (5, expected_tokens(0.9, 5) / 2.5)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 40])
def test_prompt_lookup_finds_what_a_naive_search_finds(n):
    """In texts of two and of many tokens, also where the continuation reaches the text's end."""
    generator = torch.Generator().manual_seed(n)
    drafter = NgramDraft(n)
    drafter.max_length = 5
    num_matches = 0
    for size, length in itertools.product((2, 3, 100_000), (1, 2, 30, 59)):
        begin = torch.randint(size, (length,), generator=generator).tolist()
        for end in (length, length + length // 2, 2 * length):  # which repeat the beginning
            ids = (begin + begin)[:end]
            text = IndexedText((n,))
            text.extend(ids)
            got = [token.id for token in drafter.best_continuation(text, None)]
            ends = [i for i in range(n, end) if ids[i - n : i] == ids[end - n :]]
            want = []
            if ends:
                period = end - ends[-1]
                want = [ids[ends[-1] + i % period] for i in range(5)]
                num_matches += 1
            assert got == want
    assert num_matches > 2


def test_layers_are_parsed_and_checked():
    assert parse_layers("0-2,5,7-8", 9) == [0, 1, 2, 5, 7, 8]
    # The last ones are refused before any list is made.
    too_long = ("0-9", "0-999999999", "0-99999999999", 5000 * "9")
    for text in ("", "3-1", "a", "1-", "-1", "1,,2", *too_long):
        with pytest.raises(UserError, match="no layer or range of layers of 0 to 8"):
            parse_layers(text, 9)
    model = tiny(0, n_layers=4)
    for kept in ([4], [0, 0], [2, 1], []):
        with pytest.raises(ValueError, match="0 to 3"):
            layer_subset(model, kept)
    view = layer_subset(model, [0, 3])
    assert (
        view.layers[1] is model.layers[3]
        and view.embed is model.embed
        and model.config.n_layers == 4
    )
