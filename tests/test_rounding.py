"""exact/ and what rests on it: a pass over K + 1 positions rounds as K + 1 passes over one, so that
drafted greedy text is plain greedy text, bit for bit.

Made-up kernels that add in another order for some shapes show that the self-checks see it; models
of random weights, that all logits are the same bits; the demo, that texts are.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import random
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, generate
from steps import token_records
from torch import Tensor

import decoding.engine as engines
import decoding.runner as runner
from decoding.costs import Costs
from decoding.draft_length import DraftLength
from decoding.engine import Engine
from decoding.sampling import Sampling
from decoding.statistics import Timing
from drafts.base import Drafter, ModelDraft
from drafts.ngram import NgramDraft
from drafts.target_layers import layer_subset
from exact import products
from exact.attention import Heads, invariant_multiples, round_up_length
from exact.probes import cancelling
from exact.products import STEP_ROWS, RowSplit, invariant_row_counts
from loading.checkpoint import load_model
from loading.models import random_model
from model import Config, FeedForward
from tests.attacks import drift
from weights import cpu, linears
from weights.cpu import prepack_weight
from weights.walker import batch_invariant_rows, pack_model

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def in_order(x: Tensor, backwards: bool) -> Tensor:
    """Sums (…, n) -> (…) in float32, one number after the other from one end. torch's own cumsum
    adds in float64."""
    return torch.from_numpy((x.flip(-1) if backwards else x).float().numpy().cumsum(-1)[..., -1])


@contextlib.contextmanager
def threads(n: int):
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ----------------------------------------------------------------------------- what is multiplied


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [64, 577, 2048])
def test_sums_that_cancel(n, dtype):
    """A check that multiplies numbers whose float32 sums are exact, in whatever order, sees
    nothing."""
    x = cancelling(16, n, dtype)
    assert x.shape == (16, n) and x.dtype == dtype and x.isfinite().all()
    assert (x.double().sum(1) == 0).all()
    assert (in_order(x, False) != in_order(x, True)).sum() >= 12


def test_the_example_of_the_essay():
    """The numbers in exact/__init__.py."""
    terms = torch.tensor([2.0**24, 1, -(2.0**24), -1])
    assert in_order(terms, backwards=False) == -1
    assert in_order(terms[::2], False) + in_order(terms[1::2], False) == 0
    sizes = []

    def product(x: Tensor) -> Tensor:
        sizes.append(len(x))
        return x

    split = RowSplit((12, 16, 32, 128), STEP_ROWS)
    assert len(split.run(product, torch.zeros(6, 1))) == 6 and sizes == [12]
    assert len(split.run(product, torch.zeros(140, 1))) == 140 and sizes[1:] == [128, 12]
    assert len(split.run(product, torch.zeros(300, 1))) == 300 and sizes[3:] == [300]
    assert round_up_length(701, 32) == 704


# ---------------------------------------------------------------------- products that round alike

ADDS_BACKWARDS = {  # rows of a product and their places -> which of them it adds up backwards
    "never": lambda M, row: False,
    "one row": lambda M, row: M == 1,
    "more than 12 rows": lambda M, row: M > 12,
    "odd numbers": lambda M, row: M % 2 == 1,
    "not the first row": lambda M, row: row > 0,
    "the last of a full tile": lambda M, row: row % 8 == 7,
    "many threads": lambda M, row: M > 4 and torch.get_num_threads() > 1,
}


@pytest.mark.parametrize(
    "name, max_first, row_counts",
    [
        ("never", 1, [*range(1, 17)]),
        ("one row", 2, [*range(2, 17)]),
        ("one row", 1, [1]),
        ("more than 12 rows", 1, [*range(1, 13)]),
        ("more than 12 rows", 16, [*range(13, 17)]),
        ("odd numbers", 1, [*range(1, 17, 2)]),
        ("odd numbers", 2, [*range(2, 17, 2)]),
        ("not the first row", 1, [1]),
        ("the last of a full tile", 1, [*range(1, 8)]),
        ("many threads", 1, [*range(1, 5)]),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_widths_of_made_up_kernels(name, max_first, row_counts, dtype):
    """Any order for all shapes is as good; a shape that a kernel adds up otherwise must not be let
    in."""

    def product(x: Tensor) -> Tensor:
        backwards = [ADDS_BACKWARDS[name](len(x), row) for row in range(len(x))]
        return torch.stack([in_order(row, back) for row, back in zip(x, backwards, strict=True)])[
            :, None
        ]

    with threads(2):
        found = invariant_row_counts(product, 192, dtype, range(1, 17), max_first)
        assert found == row_counts and torch.get_num_threads() == 2


def test_no_widths_where_results_depend_on_the_call():
    calls = itertools.count()
    with threads(2):
        assert (
            invariant_row_counts(
                lambda x: x[:, :1] + next(calls), 64, torch.float32, range(1, 5), max_first=1
            )
            == []
        )


# -------------------------------------------------------------------- attention that rounds alike


def made_up(where):
    """Attention that adds up the keys of query `at` of T one by one, backwards where(T, rows, S,
    at)."""

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: None) -> Tensor:
        (B, H, T, E), (rows, S) = q.shape, bias.shape[2:]
        picked = [0, T - 1]  # the others are not looked at, and all heads are alike
        scores = q[0, 0, picked].double() @ k[0, 0].double().T + bias[0, 0, picked]  # (2, S), exact
        # (2, E, S)
        weights = (scores - scores.amax(-1, keepdim=True)).exp()[:, None].float() * v[
            0, 0
        ].float().T
        first, last = (
            in_order(each, where(T, rows, S, at)) for each, at in zip(weights, picked, strict=True)
        )
        return torch.stack([first] * (T == 1) or [first, *[last] * (T - 1)]).expand(B, H, T, E)

    return attend


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "where, tile",
    [
        (lambda T, rows, S, at: False, (1, 16)),
        (lambda T, rows, S, at: S % 32 != 0, (1, 32)),
        (lambda T, rows, S, at: S % 512 > 256, (1, 512)),
        (lambda T, rows, S, at: rows == 1, (2, 16)),
        (lambda T, rows, S, at: rows % 8 != 0, (8, 16)),
        (lambda T, rows, S, at: rows % 8 != 0 or S % 32 != 0, (8, 32)),
        (lambda T, rows, S, at: T > 1 and S > 768, None),
        (lambda T, rows, S, at: T == 1 and S > 1024, None),
        (lambda T, rows, S, at: T >= 64, None),
        (lambda T, rows, S, at: T == 6, None),
        (lambda T, rows, S, at: T > 1 and at == 0, None),
        (lambda T, rows, S, at: torch.get_num_threads() > 1, None),
    ],
    ids=[
        "honest",
        "keys/32",
        "keys/512",
        "one row",
        "rows/8",
        "both",
        "far",
        "beside a longer row",
        "long rounds",
        "six",
        "first",
        "threads",
    ],
)
def test_tiles_of_made_up_attention(where, tile):
    """What a kernel adds up otherwise for some shape is either avoided by the tile or refused."""
    with threads(2):
        heads = Heads(1, 1, 1, 4, torch.bfloat16)
        assert invariant_multiples(made_up(where), heads, torch.device("cpu"), 2) == tile


def test_attention_elsewhere_is_not_vouched_for():
    def attend(*given):
        raise AssertionError("tried on another device")

    heads = Heads(1, 2, 2, 16, torch.float32)
    assert invariant_multiples(attend, heads, torch.device("meta"), 1) is None


# ------------------------------------------------------------------------------ products in parts


@pytest.mark.parametrize("row_counts", [(1, 2, 3, 8), (2, 5), (4,)])
def test_parts_and_padding_give_each_row_what_it_gets_alone(row_counts):
    """A part of a wrong size, zeros that stay, or rows that change places would show."""
    sizes, x = [], torch.arange(3.0 * row_counts[-1] * 2).view(-1, 2)
    x[1] = math.nan

    def product(x: Tensor) -> Tensor:
        sizes.append(len(x))
        return torch.stack([in_order(row * torch.tensor([3.0, 1.0]), False) for row in x])[:, None]

    alone = product(x)
    for M in range(1, len(x) + 1):
        sizes.clear()
        y = RowSplit(row_counts, STEP_ROWS).run(product, x[:M])
        assert y.shape == (M, 1) and torch.equal(y.nan_to_num(-1), alone[:M].nan_to_num(-1))
        assert set(sizes) <= set(row_counts) and len(sizes) == math.ceil(M / row_counts[-1])
    sizes.clear()
    RowSplit(row_counts).run(product, x)
    RowSplit().run(product, x[:3])
    assert sizes == [len(x), 3], "cut although there were too many rows, or no row_counts"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out, n", [(48, 576), (1088, 1024)], ids=["small", "large"])
def test_products_give_each_row_what_it_gets_alone(out, n, dtype):
    """The kernels themselves, with weights that do not cancel, and with a row of NaN between."""
    generator = torch.Generator().manual_seed(0)
    packed = prepack_weight(torch.randn(out, n, generator=generator).to(dtype))
    max_rows = packed.row_split.row_counts[-1]
    M = 3 * max_rows if max_rows < 64 else max_rows + 9
    x = torch.randn(M, n, generator=generator).to(dtype)
    alone = torch.cat([packed(row[None]) for row in x])
    for M in (*range(1, 34), len(x)):
        if packed.batch_invariant_rows >= M:
            assert torch.equal(bits(packed(x[:M])), bits(alone[:M])), M
    x[2] = math.nan
    for M in (3, 4, 9, 17):
        y = packed(x[:M])
        assert y[2].isnan().all()
        assert torch.equal(bits(y[3:]), bits(alone[3:M])), "a row's NaN reached another"


COUNT_ROWS = """
import torch
from weights import cpu

for dtype in (torch.bfloat16, torch.float16):
    weight = torch.randn(1100, 1024).to(dtype)  # beyond LARGE_BYTES
    for packed in (cpu.prepack_weight(weight), cpu.PlainWeights(weight)):
        kernel = packed.kernel
        sizes = []
        packed.kernel = lambda x: (sizes.append(len(x)), kernel(x))[1]
        for M in range(1, 18):
            sizes.clear()
            assert packed(torch.randn(M, 1024).to(dtype)).shape == (M, 1100)
            padding = sum(sizes) - M
            assert padding < packed.tile_rows, (type(packed), dtype, M, sizes)
            assert type(packed) is not cpu.PlainWeights or padding == 0, (dtype, M, sizes)
"""


@pytest.mark.slow
@pytest.mark.parametrize("level", ["AVX2", None])
def test_no_row_is_padded_where_every_row_costs(level):
    """The rows that the kernel gets, on this processor and on one that has AVX2 alone: aten's
    product of plain 16-bit weights reads them anew for each row."""
    env = dict(os.environ)
    if level:
        env |= {"ONEDNN_MAX_CPU_ISA": level, "ATEN_CPU_CAPABILITY": level.lower()}
        env |= {"FBGEMM_ENABLE_INSTRUCTIONS": level}
    subprocess.run([sys.executable, "-c", COUNT_ROWS], cwd=ROOT, env=env, check=True)


# ---------------------------------------------------------------------------- the law of the bits

SHAPE = Config(
    dim=64,
    n_layers=2,
    n_heads=4,
    n_kv_heads=4,
    head_dim=16,
    ffn_dim=96,
    vocab_size=131,
    max_seq_length=2100,
    norm_eps=1e-5,
)
EXPERTS = {
    "sparse": (True, True),
    "n_experts": 6,
    "experts_per_token": 2,
    "expert_dim": 64,
    "expert_bias": True,
    "router_bias": True,
    "gate_limit": 7.0,
    "gate_alpha": 1.702,
    "sinks": True,
    "shared_dim": 32,
    "shared_gate": True,
    "family": "qwen2_moe",
}
WIDTHS = (1, 2, 3, 6, 9)
# Where passes begin: before a block of 512 keys ends; where a window is gathered by passes over one
# position and not over nine, and where those of both have more keys than the window's blocks; and
# in a window's own first block.
PLACES = {None: (500,), 510: (1012, 1525), 600: (590, 1525)}


def large_numbers(config: Config, **options):
    """Random weights, ten times as large as usual, so that attention looks at few keys and logits
    differ."""
    model = random_model(config, pack=False, **options)
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.dim() > 1 and not options.get("quantize"):
            parameter.data.mul_(10)
    return pack_model(model)


@torch.inference_mode()
def logits(engine: Engine, tokens: Tensor, begins: Tensor, n: int, width: int) -> Tensor:
    """(B, n, V) of n positions from begins (B,) on, by passes over `width`."""
    found = []
    for done in range(0, n, width):
        T = min(width, n - done)
        pos = begins[:, None] + done + torch.arange(T)  # (B, T)
        caches = engine.runner.slice_to(int(pos.max()) + 1)
        found.append(engine.model(tokens.gather(1, pos), pos, caches))
    return torch.cat(found, dim=1)


def filled(model, tokens: Tensor, upto: int) -> Engine:
    """An engine whose caches hold these tokens, up to a position. Prompts run one by one."""
    engine = Engine(model, len(tokens), tokens.size(1))
    with torch.inference_mode():
        for row in range(len(tokens)):
            engine.rows(row, row + 1).target.prefill(tokens[row : row + 1], 0, upto)
    return engine


SCHEMES = ("bfloat16", "float16", "float32", "int8", "int4-g32", "fp8")


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "scheme, window, R",
    [
        *((scheme, None, 1) for scheme in SCHEMES),
        *(pytest.param(scheme, 600, 4, marks=pytest.mark.attack) for scheme in SCHEMES),
        *(("bfloat16", *how) for how in ((None, 4), (510, 1), (510, 4), (600, 1), (None, 16))),
        ("float32", 600, 14),
        *(
            pytest.param(scheme, 600, "experts", marks=pytest.mark.attack)
            for scheme in ("bfloat16", "float32", "int8")
        ),
    ],
)
def test_logits_are_the_same_bits_in_every_pass_and_batch(scheme, window, R):
    """Whatever is summed in another order in a wider pass, a longer one, or beside other rows,
    would show."""
    dtype, quantize = (
        (getattr(torch, scheme), None) if "float" in scheme else (torch.bfloat16, scheme)
    )
    if R == "experts":  # rows of a pass go different ways, and meet others there
        config = dataclasses.replace(SHAPE, n_kv_heads=2, **EXPERTS)
    else:
        config = dataclasses.replace(SHAPE, n_heads=max(4, R), n_kv_heads=max(1, 4 // R))
    config = dataclasses.replace(config, windows=(None, window))
    model = large_numbers(config, dtype=dtype, quantize=quantize)
    tokens = torch.randint(0, 131, (3, 1600), generator=torch.Generator().manual_seed(1))
    n = 20
    upto = max(PLACES[window])
    engine, alone = filled(model, tokens, upto), filled(model, tokens[2:], upto)
    assert engine.identical and alone.identical
    for begin in PLACES[window]:
        begins = begin - torch.tensor([0, 1, 7])
        plain = logits(engine, tokens, begins, n, 1)
        assert plain.std() > 0.01 and plain.argmax(-1).unique().numel() > 5, "nothing to tell apart"
        for width in WIDTHS[1:]:
            assert torch.equal(bits(logits(engine, tokens, begins, n, width)), bits(plain)), (
                begin,
                width,
            )
        for width in WIDTHS:
            one = logits(alone, tokens[2:], begins[2:], n, width)
            assert torch.equal(bits(one), bits(plain[2:])), (
                f"position {begin}, width {width}: alone otherwise"
            )


@pytest.mark.parametrize("control, R", [("lengths", 4), ("queries", 1), ("rows", 4)])
def test_each_measure_is_needed(control, R):
    """Without it the same comparison finds other bits in float32, so that it could have found them
    above."""
    tokens = torch.randint(0, 131, (1, 200), generator=torch.Generator().manual_seed(1))
    with drift.UNDONE[control]():
        model = large_numbers(dataclasses.replace(SHAPE, n_kv_heads=4 // R), dtype=torch.float32)
        engine = filled(model, tokens, 80)
        plain, *others = (logits(engine, tokens, torch.tensor([80]), 60, width) for width in WIDTHS)
    if all(torch.equal(bits(plain), bits(other)) for other in others):
        pytest.skip("this processor rounds alike without it")


# ------------------------------------------------------------------------------- the law of texts

PROMPTS = ("Once upon a time", "Tom had a red ball. He did not like", "The")
LAYERS = (0, 1, 2, 5)
GREEDILY = Sampling(0)


@functools.cache
def demo(quantize: str | None = None):
    return pack_model(load_model(ROOT / "checkpoints" / "demo", quantize=quantize))


@functools.cache
def demo_draft():
    return pack_model(load_model(ROOT / "checkpoints" / "demo-draft"))


@functools.cache
def prompt_ids() -> list[list[int]]:
    from loading.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(ROOT / "checkpoints" / "demo")
    return [tokenizer.encode(text) for text in PROMPTS]


def texts(
    engine: Engine, prompts: list[list[int]], n: int, sampling: Sampling = GREEDILY, **options
) -> list[list]:
    rows = [[] for _ in prompts]
    for row, id in generate(
        engine.model, prompts, sampling=sampling, max_new_tokens=n, engine=engine, seed=5, **options
    ):
        rows[row].append(id)
    return rows


@pytest.fixture
def any_k(monkeypatch):
    """Where a draft length is "auto", any that it could choose, whatever the clock says."""
    generator = random.Random(0)
    monkeypatch.setattr(
        DraftLength,
        "choose",
        lambda self, *_: (
            self.fixed if self.fixed is not None else generator.choice((0, *Drafter.auto_k))
        ),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_gate_has_the_same_bits_in_any_row(dtype):
    """Four threads divide a large tensor inside a row, where vector code meets the remainder."""
    config = Config(
        dim=8,
        n_layers=1,
        n_heads=1,
        n_kv_heads=1,
        head_dim=8,
        ffn_dim=14336,
        vocab_size=9,
        max_seq_length=9,
        norm_eps=1e-5,
    )
    ffn, num_threads = FeedForward(config, config.ffn_dim, False), torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        for rows in (5, 6, 7, 10):
            x = (
                torch.randn(
                    rows, 2 * config.ffn_dim, generator=torch.Generator().manual_seed(rows)
                ).to(dtype)
                * 3
            )
            alone = torch.cat([ffn.gated(*row[None].chunk(2, dim=-1)) for row in x])
            assert torch.equal(ffn.gated(*x.chunk(2, dim=-1)), alone), rows
    finally:
        torch.set_num_threads(num_threads)


N_NEW = 40


@functools.cache
def plain_texts(quantize: str | None, rows: int) -> list[list]:
    model = demo(quantize)
    return texts(Engine(model, rows, 160), prompt_ids()[:rows], N_NEW)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("quantize", [None, "int4-g32"], ids=["bfloat16", "int4-g32"])
@pytest.mark.parametrize("drafter", ["ngram", "layers", "model"])
def test_drafted_greedy_text_is_plain_greedy_text(drafter, quantize, rows, any_k):
    """Any sum of another order somewhere would sooner or later choose the other of two near
    ties."""
    model = demo(quantize)
    made = {
        "ngram": NgramDraft,
        "layers": lambda: ModelDraft(layer_subset(model, LAYERS), on_layers=LAYERS),
        "model": lambda: ModelDraft(demo_draft()),
    }[drafter]
    for k in (1, 5, "auto") if rows == 3 and quantize is None else ("auto",):
        engine = Engine(model, rows, 160, drafter=made(), speculate_k=k)
        same = dict.fromkeys(Drafter.auto_k, 1.0)
        engine.planner.costs = Costs(1.0, same, same)
        assert engine.identical
        assert texts(engine, prompt_ids()[:rows], N_NEW) == plain_texts(quantize, rows), k


def test_a_row_of_a_batch_has_its_own_text():
    assert plain_texts(None, 3)[:1] == plain_texts(None, 1)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("rows", [1, 3])
def test_sampled_text_of_no_drafted_token_is_plain_text(rows):
    model, sampling = demo(), Sampling(1.0, top_k=40)
    engine = Engine(model, rows, 160, drafter=NgramDraft(), speculate_k=0)
    plain = texts(Engine(model, rows, 160), prompt_ids()[:rows], N_NEW, sampling)
    assert texts(engine, prompt_ids()[:rows], N_NEW, sampling) == plain
    assert len(set(map(tuple, plain))) == rows and plain != plain_texts(None, rows)


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 5])
def test_a_draft_that_is_the_target_is_always_accepted(k):
    """p / q is 1 only where both passes, over one or two positions and over K + 1, have the same
    bits: with other bits a drafted token is refused about once in a thousand."""
    model = demo()
    engine = Engine(model, 3, 260, drafter=ModelDraft(model), speculate_k=k)
    timing = Timing()
    texts(engine, prompt_ids(), 120, Sampling(1.0), timing=timing)
    for records in token_records(timing):
        drafted = [record for record in records if not record.first]
        assert all(record.accepted == record.k == k for record in drafted)
        assert min(record.overlap for record in drafted if record.index < k) > 1 - 1e-5
        assert sum(record.index == 0 for record in drafted) >= 119 // (k + 1)


# ------------------------------------------------------------------- chats, and prompts in chunks


def held(engine: Engine, length: int) -> list[Tensor]:
    """Keys and values up to a position, bits."""
    return [
        bits(x[:, :, :length]) for cache in engine.runner.caches.layers for x in (cache.k, cache.v)
    ]


def same_held(one: Engine, other: Engine, length: int) -> bool:
    pairs = zip(held(one, length), held(other, length), strict=True)
    return all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("quantize", [None, "int8", "int4-g32"])
@pytest.mark.parametrize("k", [0, 5])
@pytest.mark.attack
def test_a_kept_conversation_is_a_fresh_one(k, quantize):
    """What was decoded token by token, or drafted, stands in the caches as a prompt of the same ids
    would write it."""
    model, (prompt, more, _) = demo(quantize), prompt_ids()
    kept = Engine(model, 1, 400, drafter=NgramDraft() if k else None, speculate_k=k)
    (first,) = texts(kept, [prompt], 80)
    ids = [*prompt, *first, *more]
    timing = Timing()
    kept_text = texts(kept, [ids], 60, timing=timing)
    assert timing.cached == [len(prompt) + len(first) - 1], "no layer has seen the last token"
    fresh = Engine(model, 1, 400)
    assert kept_text == texts(fresh, [ids], 60)
    assert same_held(kept, fresh, len(ids) + 59)
    tokens, pos = torch.tensor([[*ids, *kept_text[0]]]), torch.tensor([len(ids) + 59])
    with torch.inference_mode():
        here, there = (
            model(tokens[:, -1:], pos, engine.runner.slice_to(len(ids) + 60))
            for engine in (kept, fresh)
        )
    assert torch.equal(bits(here), bits(there))


@pytest.mark.parametrize("quantize", [None, "int8", "int4-g32"])
@pytest.mark.attack
def test_short_prompts_in_chunks_are_prompts_in_one_pass(quantize):
    """Passes of as many rows as a round may have round alike, be they pieces of a prompt."""
    length = 110
    model = demo(quantize)
    assert batch_invariant_rows(model) >= length
    ids = torch.randint(3, 2048, (2, length), generator=torch.Generator().manual_seed(0))
    prompts = [ids[0].tolist(), ids[1, : length - 40].tolist()]
    whole, cut = Engine(model, 2, 400), Engine(model, 2, 400)
    text = texts(whole, prompts, 40)
    cut.runner.chunk = 64
    assert texts(cut, prompts, 40) == text
    assert same_held(whole, cut, length - 40 + 39)


@pytest.mark.parametrize("quantize", [None, "int8", "int4-g32"])
def test_a_long_prompt_in_chunks_is_one_in_one_pass_up_to_rounding(quantize):
    """A pass of more rows than STEP_ROWS takes another product, so a beginning that is reused is
    not the same bits. A beginning that is missing changes logits by more."""
    model = demo(quantize)
    tokens = torch.randint(3, 2048, (1, 330), generator=torch.Generator().manual_seed(0))
    found = []
    with torch.inference_mode():
        for chunk, begin in ((512, 0), (64, 0), (512, 64)):
            runner = Engine(model, 1, 400).runner
            runner.chunk = chunk
            h = runner.prefill(tokens, begin, 330)
            found.append(model.head(h[:, -1]))
    whole, cut, wrong = found
    assert (cut - whole).square().mean().sqrt() < 0.02 * whole.std()
    assert (wrong - whole).square().mean().sqrt() > 0.02 * whole.std()


# ---------------------------------------------------------------------------- what is vouched for


def test_an_engine_does_not_vouch_for_attention_that_depends_on_its_shape(monkeypatch):
    model = large_numbers(SHAPE)
    assert Engine(model, 2, 64).identical
    monkeypatch.setattr(runner, "invariant_multiples", lambda *given: None)
    assert not Engine(model, 2, 64).identical


@pytest.mark.parametrize("scheme", [None, "int8", "int4-g32", "fp8"])
def test_an_engine_does_not_vouch_for_products_that_depend_on_their_shape(scheme, monkeypatch):
    # they remember
    for module in (cpu, linears):
        monkeypatch.setattr(module, "find_row_split", products.find_row_split.__wrapped__)
    monkeypatch.setattr(products, "invariant_row_counts", lambda *given, **options: [])
    model = large_numbers(SHAPE, quantize=scheme)
    assert batch_invariant_rows(model) == 0 and not Engine(model, 1, 64).identical
    tokens = torch.arange(20)[None]
    assert model(tokens, torch.arange(20)).isfinite().all(), "and yet it decodes"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("scheme", ["float32", "int8", "int4-g32"])
def test_an_engine_vouches_for_no_more_rows_than_its_kernels_do(scheme, monkeypatch):
    dtype, quantize = (torch.float32, None) if scheme == "float32" else (torch.bfloat16, scheme)
    model = large_numbers(SHAPE, dtype=dtype, quantize=quantize)
    drafted = functools.partial(Engine, model, max_seq_length=32, drafter=NgramDraft())
    num_rows = 14 if scheme == "int4-g32" else 28  # times 9: up to MAX_INT4_ROWS, STEP_ROWS
    assert drafted(batch_size=num_rows, speculate_k=8).identical
    monkeypatch.setattr(engines, "batch_invariant_rows", lambda model: 64)
    assert drafted(batch_size=8, speculate_k=7).identical
    assert not drafted(batch_size=8, speculate_k=8).identical
    assert not drafted(batch_size=8, speculate_k="auto").identical, "8 is one of auto's"
    assert Engine(model, 64, 32).identical
