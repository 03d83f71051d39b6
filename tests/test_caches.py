"""decoding/kv_8bit.py: what 8-bit caches hold, what attention makes of it, and that drafting stays
lossless on them.

The oracle is written here, in float64, from the formats' definitions: a code is a number of its
type times its position's scale, and attention is a softmax over rotated keys.
"""

import functools
import itertools
import json
import math
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from conftest import ROOT
from test_generate import PROMPTS, rows_of

import decoding.kv_8bit as caches
from cli.flags import parse_args
from cli.main import main as run
from cli.report import position_bytes
from decoding.engine import Engine
from decoding.kv_8bit import (
    CACHE_TYPES,
    Fp8Cache,
    Int8Cache,
    attend_codes,
    hadamard,
)
from decoding.options import EngineOptions
from decoding.runner import clear_positions
from decoding.sampling import Sampling
from decoding.statistics import Timing
from drafts.base import ModelDraft
from drafts.ngram import NgramDraft
from drafts.target_layers import layer_subset
from exact.attention import Heads, attends_alike, invariant_multiples
from exact.probes import cancelling
from loading.checkpoint import load_model
from loading.config import config_from_hf
from model import (
    AttentionKernel,
    AttentionMask,
    Caches,
    KVCache,
    Transformer,
    attend,
    attention_mask,
)
from weights.walker import pack_model

CODED = [Int8Cache, Fp8Cache]
CPU = torch.device("cpu")
# Half a step of 127 to the largest number; of E4M3, three bits behind the first one, or half of the
# smallest, 2^-9.
ERROR = {
    Int8Cache: lambda x, top: top / 254,
    Fp8Cache: lambda x, top: torch.maximum(x.abs() / 16, top / 448 / 1024),
}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def filled(kind: type[KVCache], B: int, G: int, S: int, E: int, dtype=torch.float32):
    """(a cache of so many positions and one more, its keys and values (B, G, S, E))."""
    cache = kind(B, G, S + 1, E, dtype, CPU)
    k, v = (normal(B, G, S, E, seed=seed).to(dtype) for seed in (1, 2))
    k[..., 3] *= 40  # a channel of large keys
    cache.update(k, v, torch.arange(S).expand(B, S))
    return cache, k, v


def every(S: int, B: int = 1, rows: int = 1, dtype=torch.float32) -> AttentionMask:
    return AttentionMask(torch.zeros(B, 1, rows, S, dtype=dtype), None)


@pytest.mark.parametrize("E", [1, 2, 12, 64, 80, 96, 128])
def test_a_rotation_changes_no_product(E):
    matrix = hadamard(E, CPU)
    norm = matrix[0].square().sum()
    assert torch.equal(matrix @ matrix, norm * torch.eye(E, dtype=matrix.dtype))
    q, k = normal(5, E, seed=3).double(), normal(7, E, seed=4).double()
    assert torch.allclose((q @ matrix) @ (k @ matrix).T / norm, q @ k.T, rtol=1e-12)


def test_a_rotation_rounds_alike_in_any_order():
    """Sums of bfloat16 numbers that a float32 sum cannot hold: channels in another order leave the
    same bits."""
    x, matrix = cancelling(8, 64, torch.bfloat16), hadamard(64, CPU)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    for exact in (True, False):
        kind = matrix.dtype if exact else torch.float32
        one, other = x.to(kind) @ matrix.to(kind), x[:, order].to(kind) @ matrix[order].to(kind)
        assert torch.equal(one, other) == exact


@pytest.mark.parametrize("B", [1, 3])
@pytest.mark.parametrize("kind", CODED)
def test_what_is_held_is_within_half_a_step(kind, B):
    """Written at once, or token by token in rows that stand elsewhere: the same codes."""
    G, S, E = 2, 24, 64
    cache, k, v = filled(kind, B, G, S, E)
    rotation = (
        hadamard(E, CPU) / math.sqrt(E) if kind is Int8Cache else torch.eye(E, dtype=torch.float64)
    )
    for got, want in zip(
        cache.read(B, every(S)), ((k.double() @ rotation), v.double()), strict=True
    ):
        bound = ERROR[kind](want, want.abs().amax(-1, keepdim=True))
        assert (got - want).abs().div(bound).max() < 1 + 1e-4
        assert (got - want).abs().div(bound).max() > 0.5, (
            "the bound is far from what is seen: nothing is shown"
        )
    apart = kind(B, G, S + 1, E, torch.float32, CPU)
    # row b stands b positions behind, and begins at its position 0 again and again
    for step in range(S + B - 1):
        pos = torch.tensor([max(0, min(step - b, S - 1)) for b in range(B)])
        at = torch.arange(B), slice(None), pos
        apart.update(k[at][:, :, None], v[at][:, :, None], pos[:, None])
    for mine, other in zip(cache.read(B, every(S)), apart.read(B, every(S)), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("kind", CODED)
def test_a_window_gathers_what_its_positions_hold(kind):
    """Far behind the window's start only its keys are read, other ones in every row: bit for bit
    those of the cache."""
    cache, *_ = filled(kind, 2, 3, 24, 16)
    index = torch.stack([torch.arange(5), torch.arange(17, 22)])  # (B, S)
    window = every(5, B=2)._replace(index=index)
    for got, want in zip(cache.read(2, window), cache.read(2, every(24)), strict=True):
        assert torch.equal(
            got, torch.stack([row[:, at] for row, at in zip(want, index, strict=True)])
        )


@pytest.mark.parametrize("kind", CODED)
def test_clearing_reaches_its_positions_alone(kind):
    """A NaN that an earlier batch left behind is gone; what stands before stays, bit for bit."""
    cache, _, _ = filled(kind, 2, 2, 20, 16)
    before = cache.read(2, every(20))
    cache.update(
        torch.full((2, 2, 4, 16), math.nan),
        torch.full((2, 2, 4, 16), math.inf),
        torch.arange(12, 16).expand(2, 4),
    )
    assert not all(x.isfinite().all() for x in cache.read(2, every(20))), (
        "no NaN was left: nothing is shown"
    )
    for row in (0, 1):
        clear_positions([SimpleNamespace(caches=Caches((cache,), torch.arange(21)))], row, 12, 21)
    for got, want in zip(cache.read(2, every(20)), before, strict=True):
        assert torch.equal(got[:, :, :12], want[:, :, :12]) and not got[:, :, 12:].any()


# ---------------------------------------------------------------------------------- whole numbers


def attention(q, k, v, bias):
    """Float64. q (B, H, T, E), k and v (B, G, S, E), bias (B, 1, R*T, S) -> (B, H, T, E)."""
    B, H, T, E = q.shape
    x = q.double().view(B, k.size(1), -1, E)
    p = (x @ k.double().mT / math.sqrt(E) + bias.double()).softmax(-1)
    return (p @ v.double()).view(B, H, T, E)


def held_codes(B: int, G: int, S: int, E: int):
    cache, *_ = filled(Int8Cache, B, G, S, E, torch.bfloat16)
    keys = every(S)
    k, k_scale, v, v_scale = cache.read_codes(B, keys)
    decoded = cache.read(B, AttentionMask(keys.mask.double(), None))
    return (k, k_scale, v.mT, v_scale), decoded


needs_exact_products = pytest.mark.skipif(
    not caches.has_exact_int_mm(), reason="8-bit products are inexact here, so no cache uses them"
)


@needs_exact_products
@pytest.mark.parametrize(
    "B, T, S, E", [(1, 1, 48, 64), (1, 6, 407, 64), (3, 4, 65, 80), (1, 6, 9000, 32)]
)
def test_attention_over_codes_is_attention(B, T, S, E):
    """Against float64 attention of the queries' own codes over the dequantized keys and values, of
    any number of positions. What is left: weights and results rounded to bfloat16, 2^-9 of sum p
    |v| and of the result. All heads at once, head by head, rows apart."""
    G, R = 2, 4
    codes, (k, v) = held_codes(B, G, S, E)
    q = normal(B, G * R, T, E, seed=5).bfloat16()
    step = q.float().abs().amax(-1, keepdim=True) / 127
    whole = (q.float() / step).round() * step
    seen = torch.arange(S - T, S)[:, None] >= torch.arange(S)
    # (B, 1, R*T, S)
    bias = torch.zeros(()).where(seen, -math.inf).bfloat16().repeat(R, 1).expand(B, 1, -1, -1)
    want = attention(whole, k, v, bias)
    mass = attention(whole, k, v.abs(), bias)  # sum of p |v|
    for cached in (caches.INNER_CACHE_SCORES, 1, S * 5):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(caches, "INNER_CACHE_SCORES", cached)
            got = attend_codes(q, *codes, bias)
        assert ((got.double() - want).abs() <= 2**-8 * (mass + want.abs()) + 1e-6).all(), cached
    wrong = attention(whole, k.roll(1, 2), v, bias)
    assert ((wrong - want).abs() > 2**-8 * (mass + want.abs())).any(), "the bound passes everything"


@needs_exact_products
def test_scores_are_exact_sums():
    """Any order of the products of a query and a key has the same bits: channels permuted alike
    change nothing."""
    (k, k_scale, v, v_scale), _ = held_codes(1, 2, 64, 64)
    q, order = (
        normal(1, 8, 3, 64, seed=6).bfloat16(),
        torch.randperm(64, generator=torch.Generator().manual_seed(0)),
    )
    bias = torch.zeros(1, 1, 12, 64)
    one = attend_codes(q, k, k_scale, v, v_scale, bias)
    assert torch.equal(
        one,
        attend_codes(
            q[..., order].contiguous(), k[..., order].contiguous(), k_scale, v, v_scale, bias
        ),
    )


def test_without_exact_sums_attention_dequantizes(monkeypatch):
    """Where torch has no exact product of codes, a cache says so to its kernel and to its probe."""
    q, k, v = (normal(1, 1, n, 16, seed=n).bfloat16() for n in (1, 32, 33))
    bias = torch.zeros(1, 1, 1, 32, dtype=torch.bfloat16)
    for is_exact in (True, False):
        monkeypatch.setattr(caches, "has_exact_int_mm", lambda is_exact=is_exact: is_exact)
        cache = Int8Cache(1, 1, 8, 16, torch.bfloat16, CPU)
        assert cache.uses_integers == is_exact
        y = Int8Cache.kernel(q, k, v[:, :, :32], bias)
        assert torch.equal(y, attend(q, k, v[:, :, :32], bias)) != is_exact


def test_the_self_check_sees_how_codes_are_added(monkeypatch):
    """Whole passes round alike here; a product over positions in halves, where there are several
    queries, is seen."""
    heads = Heads(1, 2, 4, 32, torch.bfloat16)
    # Processors without bf16 instructions attend in floats.
    monkeypatch.setattr("decoding.kv_8bit.attends_in_codes", lambda dtype, device: True)
    assert invariant_multiples(Int8Cache.kernel, heads, CPU, torch.get_num_threads())
    product = torch._weight_int8pack_mm

    def in_halves(p, codes, ones):
        if len(p) <= 4 or p.size(1) < 32:
            return product(p, codes, ones)
        n = p.size(1) // 32 * 16
        halves = (
            product(p[:, part].contiguous(), codes[:, part].contiguous(), ones)
            for part in (slice(n), slice(n, None))
        )
        return sum(halves)

    monkeypatch.setattr(torch, "_weight_int8pack_mm", in_halves)
    for rows, unit in ((1, 16), (8, 512)):
        assert not attends_alike(Int8Cache.kernel, heads, rows, unit)


# ----------------------------------------------------------------------------------------- models


@functools.cache
def demo():
    return pack_model(load_model(ROOT / "checkpoints" / "demo", device="cpu"))


def drafters() -> dict:
    draft = load_model(ROOT / "checkpoints" / "demo-draft", device="cpu")
    return {
        "ngram": NgramDraft,
        "layers": lambda: ModelDraft(layer_subset(demo(), [0, 1, 5]), on_layers=[0, 1, 5]),
        "model": lambda: ModelDraft(draft),
    }


@pytest.mark.attack
@pytest.mark.parametrize("kind", CODED)
def test_drafted_greedy_text_is_plain_greedy_text(kind):
    """On caches of the target's kind, every drafter, one row and three, up to the draft length that
    the check spans."""
    prompts = [[1, 428, 437, 261, 399], [1, 540, 261, 300], [1, 333] * 9]
    for rows in (1, 3):
        plain = rows_of(
            demo(),
            prompts[:rows],
            max_new_tokens=40,
            engine=Engine(demo(), rows, 100, cache_type=kind),
        )
        for name, make in drafters().items():
            k = 5 if rows == 3 else 15
            options = {"cache_type": kind, "draft_cache_type": kind}
            engine = Engine(demo(), rows, 100, drafter=make(), speculate_k=k, **options)
            assert engine.identical
            assert rows_of(demo(), prompts[:rows], max_new_tokens=40, engine=engine) == plain, (
                name,
                k,
            )
            assert {type(layer) for layer in engine.runners[-1].caches.layers} == {kind}
    assert (
        plain[0]
        == rows_of(
            demo(), prompts[:1], max_new_tokens=40, engine=Engine(demo(), 1, 100, cache_type=kind)
        )[0]
    )


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", CODED)
def test_any_number_of_queries_leaves_the_same_codes(kind):
    """A prompt at once, in pieces of 5, and token by token: what later passes read is the same, bit
    for bit, so it does not matter how long a batch's longest prompt is, nor which part of a text
    was kept."""
    tokens, found = torch.randint(3, 2048, (1, 70), generator=torch.Generator().manual_seed(0)), []
    for n in (70, 17, 5, 1):
        engine = Engine(demo(), 1, 100, cache_type=kind)
        assert engine.identical
        with torch.inference_mode():
            for begin in range(0, 70, n):
                end = min(begin + n, 70)
                demo().hidden(
                    tokens[:, begin:end], torch.arange(begin, end), engine.runner.slice_to(end)
                )
        found.append(
            [
                x.clone()
                for layer in engine.runner.caches.layers
                for x in layer.views(slice(1), 0, 70).values()
            ]
        )
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True))


class Dequantized(KVCache):
    """What 8-bit caches mean, written down in float64: numbers of a type times a position's scale,
    keys rotated where the numbers are integers."""

    kind: type[KVCache]

    def update(self, k, v, pos):
        E = k.size(-1)
        rotation = functools.reduce(
            torch.kron, [torch.tensor([[1.0, 1], [1, -1]])] * int(math.log2(E)), torch.ones(1, 1)
        )
        rotation = (
            rotation.double() / math.sqrt(E)
            if self.kind is Int8Cache
            else torch.eye(E, dtype=torch.float64)
        )

        def rounded(x):
            top = x.abs().amax(-1, keepdim=True)
            if self.kind is Int8Cache:
                return (x / top * 127).round() * top / 127
            # in float32, as there: a quotient may fall to either of two codes
            scale = top.float() / 448
            return (x.float() / scale).to(torch.float8_e4m3fn).double() * scale

        super().update(
            (rounded(k.double() @ rotation) @ rotation.T).to(k.dtype),
            rounded(v.double()).to(v.dtype),
            pos,
        )


@pytest.mark.one_in(5)
@pytest.mark.parametrize("kind", CODED)
@pytest.mark.parametrize("family", ["llama-3", "mistral-v0.1", "gpt-oss", "gemma-3"])
def test_logits_are_those_of_dequantized_caches(family, kind, folder_of):
    """Windows, sinks and norms, a prompt at once and then token by token, in float32. Half of the
    logits within 1e-5; a number between two codes may fall to either side, which moves later ones,
    but all are nearer than whole caches'."""
    model = load_model(folder_of(family), dtype=torch.float32)
    oracle = type("Oracle", (Dequantized,), {"kind": kind})
    tokens, found = torch.tensor([[*range(3, 43)]] * 2), []
    for each in (oracle, kind, KVCache):
        held = model.make_caches(2, 41, each)
        parts = [range(30), *([i] for i in range(30, 40))]
        with torch.no_grad():
            parts = [
                model(tokens[:, [*part]], torch.tensor(part), held.slice_to(part[-1] + 1))
                for part in parts
            ]
        found.append(torch.cat(parts, dim=1))
    want, got, whole = found
    assert (got - want).abs().median() < 1e-5 < (whole - want).abs().median() / 10
    assert (got - want).abs().max() < (whole - want).abs().max() / 3


class RotatedFp8(Int8Cache):
    """What Fp8Cache was: floats of rotated keys."""

    code_dtype = torch.float8_e4m3fn


class PlainInt8(Int8Cache):
    """Integers of keys that are not rotated."""

    def rotate(self, x):
        return x.float()


def test_integers_need_a_rotation_and_floats_are_worse_for_it():
    """Keys with a few channels as large as Qwen2.5-7B's biases: the divergence from a float32
    cache, mean over positions in float64. Rotated and not: 6.1e-4 and 4.0e-3 in integers, 1.8e-2
    and 9.8e-3 in floats."""
    hf = {
        "model_type": "qwen2",
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "vocab_size": 300,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_theta": 1e6,
    }
    torch.manual_seed(0)
    model = Transformer(config_from_hf(hf)).requires_grad_(False)
    model.lm_head.weight.mul_(4)
    for layer in model.layers:
        layer.attention.qkv.weight.mul_(2)
        keys = layer.attention.qkv.bias[256:384].view(2, 64)
        keys.normal_(0, 2)
        for head, channels in enumerate(((5, 30, 61), (11, 43))):
            keys[head, list(channels)] = 40 * torch.randn(len(channels)).sign()
    tokens, pos = torch.randint(0, 300, (1, 150)), torch.arange(150)

    def log_probs(cache_type) -> torch.Tensor:
        caches = model.make_caches(1, 151, cache_type)
        return model(tokens, pos, caches.slice_to(150)).double().log_softmax(-1)

    exact, divergence = log_probs(KVCache), {}
    for cache_type in (Int8Cache, PlainInt8, Fp8Cache, RotatedFp8):
        divergence[cache_type] = (exact.exp() * (exact - log_probs(cache_type))).sum(-1).mean()
    assert divergence[Int8Cache] < divergence[PlainInt8] / 4
    assert divergence[Fp8Cache] < divergence[RotatedFp8] / 1.5
    assert divergence[Int8Cache] < divergence[Fp8Cache] / 10


@pytest.mark.one_in(4)
@pytest.mark.parametrize("family", ["llama-3", "mistral-v0.1", "gpt-oss", "qwen3-moe-mixed"])
def test_rows_and_drafts_have_their_own_text(family, folder_of):
    """Rows of a batch, drafted or not, are what they are alone, with windows, sinks and experts."""
    model = pack_model(load_model(folder_of(family), dtype=torch.bfloat16))
    alone = [
        rows_of(model, [p], engine=Engine(model, 1, 60, cache_type=Int8Cache))[0] for p in PROMPTS
    ]
    for drafter in (None, NgramDraft(1)):
        engine = Engine(model, 4, 60, cache_type=Int8Cache, drafter=drafter, speculate_k=3)
        assert engine.identical
        assert rows_of(model, PROMPTS, engine=engine) == alone


class Blocks(AttentionKernel):
    key_block = 16  # so that few positions are gathered


def test_16_bit_windows_meet_codes_too(folder_of, monkeypatch):
    """Gathered positions of a window, in bfloat16: attention over codes gives what dequantized ones
    do, up to the rounding of queries to 8 bits."""
    model = load_model(folder_of("mistral-v0.1"), dtype=torch.bfloat16)
    tokens, pos = torch.tensor([[*range(3, 63)]]), torch.arange(60)
    found = []
    for whole in (True, False):
        held = model.make_caches(1, 61, Int8Cache)._replace(kernel=Blocks())
        for layer in held.layers:
            assert layer.uses_integers == caches.attends_in_codes(torch.bfloat16, CPU)
            layer.uses_integers = layer.uses_integers and whole
        with torch.no_grad():
            parts = [
                model(tokens[:, i : i + 6], pos[i : i + 6], held.slice_to(i + 6))
                for i in range(0, 60, 6)
            ]
        found.append(torch.cat(parts, dim=1))
    assert (found[0] - found[1]).square().mean().sqrt() / found[1].std() < 0.05


@pytest.mark.parametrize("kind", CACHE_TYPES)
def test_bytes_are_those_held(kind, folder_of):
    model = load_model(folder_of("llama-3"), dtype=torch.bfloat16)

    def held(n: int) -> int:
        parts = [
            layer.named_buffers() for layer in model.make_caches(1, n, CACHE_TYPES[kind]).layers
        ]
        return sum(x.nbytes for name, x in itertools.chain(*parts) if name != "rotation")

    assert sum(position_bytes(model, CACHE_TYPES[kind]).values()) == held(8) - held(7)
    E = 64
    ratio = CACHE_TYPES[kind].position_bytes(4, E, torch.bfloat16) / KVCache.position_bytes(
        4, E, torch.bfloat16
    )
    if CACHE_TYPES[kind] in CODED:
        assert ratio == (E + 4) / (2 * E)


@pytest.mark.compiled
@pytest.mark.parametrize("kind", [Int8Cache, pytest.param(Fp8Cache, marks=pytest.mark.long)])
def test_compiled_steps(kind):
    """Compiled steps neither compile anew after warm-up nor draft another text than they decode
    plainly."""
    options = {"drafter": NgramDraft(), "speculate_k": 3, "compile_prompts": kind is Int8Cache}
    model = layer_subset(demo(), [0, 5])
    engine, texts = Engine(model, 2, 100, compile=True, cache_type=kind, **options), []
    engine.warm_up("greedy")
    with torch.compiler.set_stance("fail_on_recompile"):
        for draft in (False, True):
            prompts = ([1, 428, 437, 261, 399], [1, 333] * 9)
            numbers = [
                engine.add_request(p, sampling=Sampling(0), max_new_tokens=50, draft=draft)
                for p in prompts
            ]
            requests = [engine.requests[number] for number in numbers]
            while engine.has_unfinished():
                engine.step()
            texts.append([request.tokens for request in requests])
            engine.clear()
    assert texts[0] == texts[1] and [len(text) for text in texts[0]] == [50, 50]


@pytest.mark.slow
def test_sampling_is_lossless_on_its_own_caches():
    """A draft that is the target is always accepted only if both passes have the same bits."""
    options = {"cache_type": "int8", "speculate_k": 4}
    engine = Engine(demo(), 1, 160, drafter=ModelDraft(demo()), **options)
    timing = Timing()
    rows_of(
        demo(),
        [[1, 428, 437, 261, 399]],
        sampling=Sampling(1.0),
        max_new_tokens=120,
        engine=engine,
        timing=timing,
    )
    assert timing.steps <= 120 // 5 + 1


# ----------------------------------------------------------------------------- a cache of one's own


class Ring(KVCache):
    """The last positions alone, for layers that all have a window, and where each of them stands;
    the last place takes what rows without a text write."""

    WINDOW = 9
    LENGTH = 32  # at least a window, and what a pass writes ahead of it
    keeps_prefixes = False

    def __init__(self, B, G, S, E, dtype, device):
        super().__init__(B, G, self.LENGTH + 1, E, dtype, device)
        self.register_buffer("key_pos", torch.full((B, self.LENGTH + 1), -1), persistent=False)

    def update(self, k, v, pos):
        is_parked = pos >= self.parked_pos
        place = torch.where(is_parked, self.LENGTH, pos % self.LENGTH)
        self.write(place, k=k, v=v)
        self.key_pos.scatter_(1, place, torch.where(is_parked, -1, pos))
        self.pos = pos

    def attend(self, q, visible, sinks=None):
        B, H = q.shape[:2]
        mask = attention_mask(self.pos, self.key_pos[:B], self.WINDOW)  # (B, 1, T, LENGTH + 1)
        mask = mask & (self.key_pos[:B, None, None] >= 0)
        keys = AttentionKernel().prepare(AttentionMask(mask, None), H // self.k.size(1), q.dtype)
        return attend(q, self.k[:B], self.v[:B], keys.mask, sinks)


@pytest.mark.parametrize("drafter", [None, NgramDraft], ids=["plain", "drafted"])
def test_a_ring_of_ones_own_keeps_what_it_remembers(drafter, folder_of):
    """Seven texts in three slots, which are cleared in between: a place that is empty stays so, and
    a row without a text writes to no other's place. The oracle is the whole cache."""
    model = load_model(folder_of("mistral-v0.1"), dtype=torch.float32)
    assert set(model.windows) == {Ring.WINDOW}
    prompts = [*PROMPTS, *(prompt[:5] for prompt in reversed(PROMPTS[:3]))]
    budgets = [70, 20, 45, 25, 35, 50, 30]
    texts = []
    for cache_type in (KVCache, Ring):
        options = {"drafter": drafter and drafter(), "speculate_k": 3, "cache_type": cache_type}
        engine = Engine(model, 3, 100, **options)
        texts.append(rows_of(model, prompts, engine=engine, max_new_tokens=budgets))
        assert {type(layer) for layer in engine.runner.caches.layers} == {cache_type}
    assert texts[0] == texts[1]
    assert engine.runner.caches.layers[0].parked_pos == engine.batch.parked_pos >= 100


def test_a_draft_has_a_class_of_caches_of_its_own(folder_of):
    """A class fits the model that it was written for. A name holds for both, and so does a class
    that is asked for."""
    model = load_model(folder_of("mistral-v0.1"), dtype=torch.float32)
    draft = load_model(folder_of("llama-3"), dtype=torch.float32)
    cases = [
        ({"cache_type": Ring}, KVCache),
        ({"cache_type": "fp8"}, Fp8Cache),
        ({"cache_type": Ring, "draft_cache_type": "int8"}, Int8Cache),
        ({"cache_type": "fp8", "draft_cache_type": KVCache}, KVCache),
    ]
    for options, expected in cases:
        engine = Engine(model, 1, 60, drafter=ModelDraft(draft), speculate_k=2, **options)
        assert {type(layer) for layer in engine.drafter.runner.caches.layers} == {expected}
    engine = Engine(model, 1, 60, drafter=ModelDraft(draft), speculate_k=2, cache_type=Ring)
    plain = rows_of(model, PROMPTS[:1], max_new_tokens=40)
    assert rows_of(model, PROMPTS[:1], engine=engine, max_new_tokens=40) == plain
    shared = ModelDraft(layer_subset(model, [0, 2]), on_layers=[0, 2])
    engine = Engine(model, 1, 60, drafter=shared, speculate_k=2, cache_type=Ring)
    assert {type(layer) for layer in engine.drafter.runner.caches.layers} == {Ring}
    for value in ("int9", torch.int8, 8):
        with pytest.raises(ValueError, match=f"draft_cache_type = {value!r} must be one of"):
            EngineOptions(draft_cache_type=value)


class Marked(KVCache):
    """Marks the places that hold a position; -1 marks an empty one."""

    by_position = ("k", "v", "mark")
    cleared_to: ClassVar = {"mark": -1}

    @classmethod
    def of(cls, spec):
        cache = super().of(spec)
        cache.spec = spec
        mark = torch.full((spec.B, 1, spec.S), -1)
        cache.register_buffer("mark", mark, persistent=False)
        return cache

    def update(self, k, v, pos):
        self.write(pos, k=k, v=v, mark=pos[:, None])


def test_a_buffer_says_what_it_is_cleared_to(folder_of):
    """For each new text, behind what it takes over from another one; and so do prompt caches."""
    model = load_model(folder_of("llama-3"), dtype=torch.float32)
    caches = model.make_caches(2, 20, Marked)
    tokens = torch.arange(40).view(2, 20)
    model(tokens, torch.arange(20), caches)
    clear_positions([SimpleNamespace(caches=caches)], 1, 12, 20)
    for layer in caches.layers:
        assert layer.mark[0, 0].tolist() == [*range(20)]
        assert layer.mark[1, 0].tolist() == [*range(12)] + [-1] * 8
        assert layer.k[1, :, :12].all() and not layer.k[1, :, 12:].any()


def test_a_cache_is_made_for_its_layer(folder_of):
    """With the model's config and rope, its capacity, and where rows without a text write."""
    model = load_model(folder_of("mistral-v0.1"), dtype=torch.float32)
    engine = Engine(model, 3, 100, drafter=ModelDraft(model), speculate_k=2, cache_type=Marked)
    runner = engine.runner
    for number, layer in enumerate(runner.caches.layers):
        spec = layer.spec
        assert (spec.layer, spec.B, spec.S) == (number, 3, layer.k.size(2))
        assert spec.config is model.config and spec.rope is model.rope
        assert spec.parked_pos == layer.parked_pos == engine.batch.parked_pos < spec.S
    draft = engine.drafter.runner
    assert {type(layer) for layer in draft.caches.layers} == {KVCache}
    assert draft.caches.layers[0].parked_pos == draft.S
    alone = model.make_caches(1, 7, Marked).layers[0]
    assert alone.parked_pos == alone.spec.S == 7  # no row is parked


# ----------------------------------------------------------------------------------- what is kept


def test_rows_take_what_one_row_computed():
    """Codes and scales of a common prefix, every part of them, in the row that computed them and in
    the others."""
    common = [1, *range(300, 340)]
    engine = Engine(demo(), 3, 100, cache_type=Int8Cache)
    rows_of(demo(), [[*common, 7], [*common, 9, 8], [*common, 5]], engine=engine, max_new_tokens=3)
    for layer in engine.runner.caches.layers:
        first, *others = (layer.views(row, 0, len(common)) for row in range(3))
        assert set(first) == {"k", "v", "k_scale", "v_scale"} and all(
            x.any() for x in first.values()
        )
        assert all(torch.equal(first[name], other[name]) for other in others for name in first)


def test_a_prompt_is_kept_in_codes(tmp_path, capsys):
    flags = [
        "--prompt",
        "Once upon a time " * 12,
        "--prompt_cache",
        str(tmp_path / "kept"),
        "--json",
    ]
    flags += ["--device", "cpu", "--max_new_tokens", "8", "--temperature", "0"]
    found = []
    for _ in range(2):
        run(parse_args([*flags, "--kv_cache_dtype", "int8"]))
        found.append(json.loads(capsys.readouterr().out))
    assert (
        found[0]["cached_tokens"] == 0
        and found[1]["cached_tokens"] == len(found[0]["prompt_tokens"]) - 1
    )
    assert found[0]["tokens"] == found[1]["tokens"]
    held = len(found[0]["prompt_tokens"]) * position_bytes(demo(), Int8Cache)[None]
    assert held < (tmp_path / "kept").stat().st_size < 1.2 * held
    with pytest.raises(ValueError, match="kv_cache_dtype"):
        run(parse_args(flags))
