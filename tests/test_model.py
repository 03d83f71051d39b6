"""model.py against transformers, in float32, for every family; test_conformance.py has the float64
twin.

Each can fail: a wrong frequency, head order, window, bias, norm or mask moves logits by far more
than 1e-4, because every parameter of the tiny models is random and their logits are of order 1 to
10.
"""

import pytest
import torch
from conftest import FAMILIES, oracle

from loading.checkpoint import load_model
from loading.config import config_from_hf
from model import Config, RMSNorm, Rope, Transformer, attend

LIMIT = 1e-4  # the bound promised for float32


def tokens_for(family: str, B: int, T: int) -> torch.Tensor:
    return torch.randint(3, 131, (B, T), generator=torch.Generator().manual_seed(len(family) + T))


@torch.no_grad()
def expected(family: str, tokens: torch.Tensor) -> torch.Tensor:
    return oracle(family)(tokens).logits


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture
def model(family, folder_of):
    return load_model(folder_of(family), dtype=torch.float32)


@pytest.mark.one_in(6, 2)
@torch.no_grad()
def test_whole_chunked_and_token_by_token_equal_transformers(family, model):
    tokens = tokens_for(family, 2, 60)
    want = expected(family, tokens)
    pos = torch.arange(60)
    assert want.abs().max() > 1, "the oracle's logits are too small to show an error"
    assert (model(tokens, pos) - want).abs().max() <= LIMIT  # without a cache
    for cuts in ([60], [7, 1, 30, 2, 20], [1] * 60):
        caches, parts, begin = model.make_caches(2, 64), [], 0
        for n in cuts:
            parts.append(model(tokens[:, begin : begin + n], pos[begin : begin + n], caches))
            begin += n
        assert (torch.cat(parts, dim=1) - want).abs().max() <= LIMIT, cuts


@pytest.mark.one_in(2)
@torch.no_grad()
def test_rows_at_different_positions_equal_transformers(family, model):
    """Row 0 stands at 45, row 1 at 20; both then take three tokens in one call with pos (B, T)."""
    tokens = tokens_for(family, 2, 48)
    want = expected(family, tokens)
    caches = model.make_caches(2, 50)
    starts = torch.tensor([45, 20])
    # row 1 wrote ahead to 44: what it sees must stop at its own position
    model(tokens[:, :45], torch.arange(45), caches)
    pos = starts[:, None] + torch.arange(3)
    got = model(tokens.gather(1, pos), pos, caches)
    for row in range(2):
        assert (got[row] - want[row, pos[row]]).abs().max() <= LIMIT


@pytest.mark.one_in(2)
@torch.no_grad()
def test_large_finite_values_beyond_pos_change_nothing(family, model):
    tokens = tokens_for(family, 2, 20)
    results = []
    for poison in (0.0, 1e4):
        caches = model.make_caches(2, 64)
        for cache in caches.layers:
            cache.k.fill_(poison)
            cache.v.fill_(-poison)
        model(tokens[:, :12], torch.arange(12), caches)
        pos = torch.stack([torch.arange(12, 15), torch.arange(5, 8)])
        results.append(model(tokens.gather(1, pos), pos, caches))
    assert torch.equal(*results)


@pytest.mark.one_in(2)
@torch.no_grad()
def test_bounding_the_attended_length_changes_nothing(model):
    tokens = torch.arange(20)[None]
    caches = model.make_caches(1, 64)
    want = model(tokens, torch.arange(20), caches)
    assert (model(tokens, torch.arange(20), caches.slice_to(20)) - want).abs().max() <= LIMIT


@torch.no_grad()
def test_two_sets_of_caches_never_meet(folder_of):
    """Two sequences decoded in turn on one model, each in caches of its own, equal the same
    sequences alone."""
    model = load_model(folder_of("mistral-v0.1"), dtype=torch.float32)
    tokens = tokens_for("mistral-v0.1", 2, 30)
    want = model(tokens, torch.arange(30))
    pair = [model.make_caches(1, 32), model.make_caches(1, 40)]
    for i in range(30):
        for row, caches in enumerate(pair):
            got = model(tokens[row : row + 1, i : i + 1], torch.tensor([i]), caches)
            assert (got[0, 0] - want[row, i]).abs().max() <= LIMIT


@torch.no_grad()
def test_a_smaller_batch_uses_the_first_rows_of_the_cache(folder_of):
    model = load_model(folder_of("llama-3"), dtype=torch.float32)
    tokens = tokens_for("llama-3", 1, 10)
    want = model(tokens, torch.arange(10))
    caches = model.make_caches(4, 16)
    assert (model(tokens, torch.arange(10), caches) - want).abs().max() <= LIMIT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rope_stays_float32_through_casts_and_moves(dtype):
    """A bfloat16 table is off by 2e-3 at position 1 and by whole turns at position 1000."""
    config = config_from_hf({"model_type": "llama", **_sizes()})
    want = Rope(config).inv_freq.clone()
    model = Transformer(config).to(dtype)
    assert model.rope.inv_freq.dtype == torch.float32 and torch.equal(model.rope.inv_freq, want)
    with torch.device("meta"):
        model = Transformer(config).to(dtype)
    model.to_empty(device="cpu")
    assert model.rope.inv_freq.dtype == torch.float32 and torch.equal(model.rope.inv_freq, want)
    cos, _ = model.rope(torch.tensor([[100_000]]))
    exact = torch.cos(100_000 * 10000.0 ** (-torch.arange(0, 16, 2).double() / 16))
    # float32 angles: 1e5 * 2^-24 plus the product's own rounding
    assert (cos.flatten() - exact).abs().max() < 0.02


def test_a_norm_is_its_definition():
    """x / sqrt(mean(x^2) + eps) * weight, for rows small enough that eps is most of the root:
    beside weights of order 1 a wrong eps, or one outside the root, would change a logit by no more
    than rounding does."""
    x = torch.randn(5, 64) * torch.logspace(-4, 0, 5)[:, None]
    for eps in (1e-6, 1e-3):
        norm = RMSNorm(64, eps)
        torch.nn.init.normal_(norm.weight)
        want = (
            x.double()
            / (x.double().square().mean(-1, keepdim=True) + eps).sqrt()
            * norm.weight.double()
        )
        assert torch.allclose(norm(x).double(), want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("rope_types", [(), (0, None)], ids=["all layers", "one without RoPE"])
@pytest.mark.parametrize("rope_dim", [0, 8])
@pytest.mark.parametrize("qk_norm", [None, "heads", "full", "rotated"])
def test_scores_are_scaled_whatever_is_rotated_and_normed(qk_norm, rope_dim, rope_types):
    """A scale of q k is that of the weights which make q: its last norm's, or its projection's. A
    scale of 4 is exact."""
    fields = {
        "dim": 32,
        "n_layers": 2,
        "n_heads": 2,
        "n_kv_heads": 1,
        "head_dim": 16,
        "ffn_dim": 48,
        "vocab_size": 61,
        "max_seq_length": 64,
        "norm_eps": 1e-5,
        "qk_norm": qk_norm,
        "rope_dim": rope_dim,
        "rope_types": rope_types,
    }
    torch.manual_seed(3)
    plain = Transformer(Config(**fields)).eval()
    scaled = Transformer(Config(**fields, score_scale=4.0)).eval()
    scaled.load_state_dict(plain.state_dict())
    tokens = torch.arange(12)[None] * 5 % 61  # (1, T)
    with torch.inference_mode():
        unscaled = plain(tokens, torch.arange(12))
        for layer in plain.layers:
            attention = layer.attention
            if qk_norm:
                attention.q_norm.weight.mul_(4)
            else:
                attention.qkv.weight[: 2 * 16].mul_(4)  # q's rows
        want = plain(tokens, torch.arange(12))
        got = scaled(tokens, torch.arange(12))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    assert (want - unscaled).abs().max() > 1e-3, "the scale changes something"


def test_attention_shares_kv_heads_without_repeating_them():
    """Each query head must meet its own group: compare with K and V repeated the long way."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 3, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    mask = torch.rand(2, 1, 3, 5) < 0.7
    mask[..., 0] = True
    scores = (q @ k.repeat_interleave(3, 1).mT / 8**0.5).masked_fill(~mask, -torch.inf)
    # (B, 1, R*T, S)
    bias = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf).repeat(1, 1, 3, 1)
    assert torch.allclose(
        attend(q, k, v, bias), scores.softmax(-1) @ v.repeat_interleave(3, 1), atol=1e-5
    )


def _sizes() -> dict:
    return {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
    }


def test_attention_takes_its_kernel_s_answer_in_any_layout(monkeypatch):
    """A GPU's memory-efficient kernel gives (B, n, T, E) laid out as (B, T, n, E), which no view
    turns into heads."""
    q, k, v = torch.randn(2, 8, 3, 4), torch.randn(2, 2, 5, 4), torch.randn(2, 2, 5, 4)
    mask, kernel = torch.zeros(2, 1, 12, 5), torch.nn.functional.scaled_dot_product_attention
    want = attend(q, k, v, mask)
    monkeypatch.setattr(
        "torch.nn.functional.scaled_dot_product_attention",
        lambda *args, **options: (
            kernel(*args, **options).transpose(1, 2).contiguous().transpose(1, 2)
        ),
    )
    assert torch.equal(attend(q, k, v, mask), want)


@pytest.mark.parametrize("E", [1, 2, 8])
@pytest.mark.parametrize("sinks", [False, True])
def test_attention_takes_any_strides(E, sinks):
    """Queries, keys and values whose last dimension is not the innermost one, as torch lays out (1,
    G, S, 2) by itself after some operations: a kernel that takes rows for granted read other
    numbers, and memory that is not theirs."""
    generator = torch.Generator().manual_seed(0)
    (q, k, v), sink = (
        (torch.randn(2, 2, 6, E, generator=generator) for _ in range(3)),
        torch.zeros(2),
    )
    bias = (
        torch.zeros(1, 1, 6, 6)
        .masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
        .expand(2, -1, -1, -1)
    )
    scores = (q.double() @ k.double().mT / E**0.5 + bias).exp()  # (2, 2, 6, 6)
    want = scores @ v.double() / (scores.sum(-1, keepdim=True) + sinks)
    for moved in range(8):
        parts = [
            x.contiguous(memory_format=torch.channels_last) if moved >> i & 1 else x
            for i, x in enumerate((q, k, v))
        ]
        y = attend(*parts, bias, sink if sinks else None)
        assert torch.allclose(y.double(), want, atol=1e-5), moved
