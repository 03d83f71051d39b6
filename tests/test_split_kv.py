"""decoding/split_kv.py: attention by chunks of keys is attention.

The oracle is softmax attention in float64 without chunks. The operator that stands for a GPU's
kernel here gives -inf and NaN for a query that sees no key of a chunk: the latter must not spread.
On a GPU, or emulated as one (tests.attacks.emulate), the kernel itself runs inside compiled steps.
"""

import functools
import math

import pytest
import torch
from test_generate import rows_of

from decoding.engine import Engine
from decoding.split_kv import CHUNK, MIN_KEYS, GraphKernel, has_efficient_kernel, split_attend
from drafts.ngram import NgramDraft
from model import Config, Transformer, attend

S = MIN_KEYS + 2 * CHUNK


def random_model() -> Transformer:
    """float32, with sinks, whose second layer has a window."""
    config = Config(
        dim=32,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=16,
        ffn_dim=48,
        vocab_size=100,
        max_seq_length=2 * S,
        norm_eps=1e-5,
        sinks=True,
        windows=(None, 300),
    )
    model = Transformer(config)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if not name.endswith("norm.weight"):
            parameter.data.normal_(std=0.3, generator=generator)
    return model.requires_grad_(False)


class Operator:
    """Attention and log-sum-exp by their definition; records the shapes of its queries and keys."""

    def __init__(self):
        self.shapes = []

    def __call__(self, q, k, v, bias):
        self.shapes.append((q.shape, k.shape))
        assert bias.shape == (*q.shape[:3], k.size(2))
        scores = (q @ k.mT).float() / math.sqrt(q.size(-1)) + bias  # (n, B*G, rows, CHUNK)
        return (scores.softmax(-1) @ v.float()).to(q.dtype), scores.logsumexp(-1)


def visible_bias(pos: torch.Tensor, window: int | None, R: int) -> torch.Tensor:
    """0 and -inf (B, 1, R * T, S) float32 for queries at pos (B, T)."""
    distance = pos[:, :, None] - torch.arange(S)  # (B, T, S)
    is_visible = (distance >= 0) & (distance < (window or math.inf))
    bias = torch.zeros(is_visible.shape).masked_fill(~is_visible, -math.inf)
    return bias[:, None].repeat(1, 1, R, 1)


def in_float64(q, k, v, bias, sinks):
    """Softmax attention (B, H, T, E), by its definition."""
    B, H, T, E = q.shape
    R = H // k.size(1)
    k, v = (x.double().repeat_interleave(R, 1) for x in (k, v))
    scores = q.double() @ k.mT / math.sqrt(E) + bias[:, :, :T]  # (B, H, T, S)
    if sinks is None:
        return scores.softmax(-1) @ v
    sinks = sinks.double()[None, :, None, None].expand(B, H, T, 1)
    return torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1] @ v


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("T", [1, 6])
@pytest.mark.parametrize("B, G, R", [(1, 2, 4), (3, 2, 3), (2, 1, 8), (2, 3, 1)])
def test_chunks_are_attention(B, G, R, T, window, has_sinks):
    """One row stands at the end, one in the second chunk, and a parked one beyond all keys: chunks
    of which a query sees nothing lie behind it, or before its window."""
    generator = torch.Generator().manual_seed(0)
    E = 16
    q = torch.randn(B, G * R, T, E, generator=generator)
    cache = torch.randn(2, B + 1, G, S + 40, E, generator=generator)  # longer, and of more rows
    k, v = cache[:, :B, :, :S]
    sinks = 4 * torch.randn(G * R, generator=generator) if has_sinks else None
    last = torch.tensor([S - 1, CHUNK + 20, S + 30])[:B]
    pos = last[:, None] - (T - 1) + torch.arange(T)  # (B, T)
    bias = visible_bias(pos, window, R)
    operator = Operator()
    y = split_attend(q, k, v, bias, sinks, operator)
    assert operator.shapes == [((S // CHUNK, B * G, R * T, E), (S // CHUNK, B * G, CHUNK, E))]
    assert (y - in_float64(q, k, v, bias, sinks)).abs().max() < 2e-6


@pytest.mark.parametrize("has_sinks", [False, True])
def test_a_query_that_sees_nothing_gets_zeros(has_sinks):
    q, k, v = torch.randn(1, 2, 3, 8), torch.randn(1, 1, S, 8), torch.randn(1, 1, S, 8)
    bias = visible_bias(torch.tensor([[-1, 0, S - 1]]), None, 2)
    sinks = torch.zeros(2) if has_sinks else None
    y = split_attend(q, k, v, bias, sinks, Operator())
    assert not y[:, :, 0].any()
    want = in_float64(q, k, v, bias, sinks)
    assert torch.allclose(y[:, :, 1:].double(), want[:, :, 1:], atol=1e-6)


def test_scores_may_be_large():
    """exp of these scores overflows float32, and so would their sum of exps."""
    q = torch.full((1, 1, 1, 8), 40.0)
    k = torch.randn(1, 1, S, 8, generator=torch.Generator().manual_seed(0))
    v = torch.randn(1, 1, S, 8, generator=torch.Generator().manual_seed(1))
    bias = visible_bias(torch.tensor([[S - 1]]), None, 1)
    y = split_attend(q, k, v, bias, operator=Operator())
    assert torch.allclose(y.double(), in_float64(q, k, v, bias, None), atol=1e-4)


@pytest.mark.parametrize(
    "B, T, num_keys",
    [(1, 1, MIN_KEYS - CHUNK), (1, 1, MIN_KEYS + 8), (1, 64 * 64, MIN_KEYS), (64, 1, MIN_KEYS)],
    ids=["few keys", "no full chunks", "many queries", "many rows"],
)
def test_where_chunks_win_nothing(B, T, num_keys):
    q = torch.randn(B, 4, T, 8)
    k, v = torch.randn(2, B, 2, num_keys, 8)
    bias = torch.zeros(B, 1, 2 * T, num_keys)
    operator = Operator()
    y = split_attend(q, k, v, bias, operator=operator)
    assert not operator.shapes
    assert torch.equal(y, attend(q, k, v, bias))


def test_a_model_attends_by_the_function_of_its_caches():
    """Rows at different positions, with large values where nothing is visible."""
    model = random_model()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(100, (2, 8), generator=generator)
    pos = torch.tensor([[700], [S - 10]]) + torch.arange(8)  # (B, T)
    operator = Operator()
    logits = []
    for run in (attend, functools.partial(split_attend, operator=operator)):
        kernel = GraphKernel(S + 8, is_split=False)
        kernel.run = run
        caches = model.make_caches(2, S + 8)._replace(kernel=kernel)
        for cache in caches.layers:
            cache.k.normal_(generator=generator.manual_seed(1))
            cache.v.normal_(generator=generator.manual_seed(2))
            cache.v[0, :, 708:] = 1e4
        model(tokens[:, :7], pos[:, :7], caches.slice_to(S))
        logits.append(model(tokens[:, 7:], pos[:, 7:], caches.slice_to(S)))
    num_keys = {keys[0] * keys[2] for _, keys in operator.shapes}
    assert num_keys == {S, 2 * GraphKernel.key_block}  # all, and the blocks around a window
    assert torch.allclose(*logits, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("drafter", [None, NgramDraft], ids=["plain", "ngram"])
def test_a_text_may_grow_long_on_a_gpu(drafter):
    """From attention in one part to chunks in one engine, next to a short row: the texts of a
    CPU."""
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(100, (2 * CHUNK - 3,), generator=generator).tolist()
    settings = {"prompts": [prompt, prompt[:9]], "max_new_tokens": 9}
    model = random_model()
    want = rows_of(model, **settings)
    model = model.to("cuda")
    assert has_efficient_kernel(model.config.head_dim, model.norm.weight)
    drafted = {"drafter": drafter(), "speculate_k": 3} if drafter else {}
    engine = Engine(model, 2, MIN_KEYS + 1, compile=True, compile_prompts=False, **drafted)
    assert engine.runner.caches.kernel.run is split_attend
    assert rows_of(model, engine=engine, **settings) == want
