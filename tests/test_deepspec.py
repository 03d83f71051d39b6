"""Folders of DeepSpec: DSpark and its DFlash twin (drafts/dflash.py), and EAGLE-3
(drafts/eagle.py), against float64 twins written from arXiv:2607.05147 and the keys and tensors of
github.com/deepseek-ai/DeepSpec.

The twins keep no cache, and the logits of drafted tokens are conditional on the token drawn before.
A law's false alarm has probability below 1e-6; its controls must be caught with p < 1e-12.
"""

import math

import pytest
import torch
from reference import angles, logits, norm, rotate, swiglu
from test_dflash import BLOCK, HEADS, KV_HEADS, MASK, DFlashTwin, E, dflash_tensors
from test_drafts import (
    LAYER,
    PROMPTS,
    D,
    EagleTwin,
    V,
    distance,
    load_draft_model,
    recorded,
    written,
)
from test_speculative import LONG_PROMPT, TAIL, joint_law, p_value, rows_of, sequences, tiny

from decoding.engine import Engine
from decoding.sampling import Sampling
from drafts.dflash import DFlash, DFlashDraft, DFlashModel
from drafts.hidden_states import PairDraft
from drafts.registry import check_draft, load_drafter
from loading.checkpoint import load_model
from loading.draft_types import draft_type_of
from model import Config, Transformer

RANK = 5
DSPARK = {
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "hidden_size": D,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": E,
    "vocab_size": V,
    "max_position_embeddings": 160,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 5e4,
    "layer_types": ["full_attention"] * 2,
    "tie_word_embeddings": False,
    "num_target_layers": 3,
    "block_size": BLOCK,
    "mask_token_id": MASK,
    "target_layer_ids": [0, 1],
    "num_anchors": 512,
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
NO_HEAD = {"markov_rank": 0, "markov_head_type": None, "enable_confidence_head": False}


def dspark_tensors(rank: int = RANK) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(5)
    matrix = lambda *shape: 0.5 * torch.randn(*shape, generator=g)  # noqa: E731
    tensors = dflash_tensors(2, 2)
    tensors |= {"embed_tokens.weight": matrix(V, D), "lm_head.weight": 0.3 * matrix(V, D)}
    if rank:
        tensors |= {
            "markov_head.markov_w1.weight": matrix(V, rank),
            "markov_head.markov_w2.weight": 2 * matrix(V, rank),
            "confidence_head.proj.weight": matrix(1, D + rank),
            "confidence_head.proj.bias": matrix(1),
        }
    return tensors


def dspark_folder(folder, rank: int = RANK, **changes):
    hf = DSPARK | ({} if rank else NO_HEAD) | changes
    return written(folder, {k: v for k, v in hf.items() if v is not None}, dspark_tensors(rank))


class DSparkTwin(DFlashTwin):
    """The last decided token draws the first token, and every draw sees the one before it."""

    def __init__(self, folder, target):
        super().__init__(folder, target)
        self.embed, self.lm_head = self.w["embed_tokens.weight"], self.w["lm_head.weight"]
        self.first = 0

    def __call__(self, folder, tokens, drafted, sampling) -> torch.Tensor:
        logits = self.logits(tokens)[: len(drafted)]
        if self.hf["markov_rank"]:
            w1, w2 = (self.w[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
            before = [tokens[-1], *drafted[:-1]]
            best = logits.topk(self.hf.get("dspark_draft_topk") or V).indices
            others = torch.full_like(logits, -math.inf).scatter(-1, best, 0)
            logits = logits + w1[before] @ w2.T + others
        return sampling.probs(logits)


@pytest.fixture(scope="module")
def target_folder(folder_of):
    return folder_of("llama-3.1")


@pytest.fixture(scope="module")
def target(target_folder):
    return load_model(target_folder, dtype=torch.float32)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("plain", [0, 34])
@pytest.mark.parametrize("rank, topk", [(0, None), (RANK, None), (RANK, 1), (RANK, 9)])
def test_dspark_is_its_twin(rank, topk, plain, target, target_folder, tmp_path):
    """Rounds of fewer tokens than the block has, ragged, after plain steps too."""
    folder = dspark_folder(tmp_path / "draft", rank, dspark_draft_topk=topk)
    drafter = recorded(DFlashDraft)(load_draft_model(folder, target))
    worst, accepted = distance(target, drafter, DSparkTwin(folder, target_folder), folder, plain)
    assert worst < 1e-5 and len(accepted) > (0 if topk else 2)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("rank", [0, RANK])
def test_every_position_of_a_block_draws(rank, target, target_folder, tmp_path):
    folder = dspark_folder(tmp_path / "draft", rank)
    twin, sampling = DSparkTwin(folder, target_folder), Sampling(1.3)
    drafter = recorded(DFlashDraft)(load_draft_model(folder, target))
    options = {"drafter": drafter, "speculate_k": BLOCK, "sampling": sampling, "seed": 4}
    rows_of(target, PROMPTS[:2], max_new_tokens=12, **options)
    assert len(drafter.seen) > 1
    for before, tokens, probs, _ in drafter.seen:
        for row in range(2):
            if len(before[row]) > 30:  # parked
                continue
            want = twin(folder, before[row], tokens[row], sampling)
            assert want.shape == (BLOCK, V)
            assert (probs[row].double() - want).abs().max() < 1e-5
    with pytest.raises(ValueError, match=f"speculate_k = {BLOCK + 1}: .* at most {BLOCK} tokens"):
        Engine(target, 1, 60, drafter=drafter, speculate_k=BLOCK + 1)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "broken", ["z-lab's first", "no bias", "bias of another token", "all tokens"]
)
def test_a_broken_dspark_is_caught(broken, target, target_folder, tmp_path, monkeypatch):
    topk = 9 if broken == "all tokens" else None
    folder = dspark_folder(tmp_path / "draft", dspark_draft_topk=topk)
    model = load_draft_model(folder, target)
    drafter = recorded(DFlashDraft)(model)
    if topk:
        model.dflash = model.dflash._replace(draft_topk=0)
    elif broken == "z-lab's first":
        drafter.first_drawn = 1
    elif broken == "no bias":
        model.markov_head = torch.nn.Sequential()
    else:  # always of token 0
        model.markov_head.markov_w1.register_forward_pre_hook(lambda _, args: (args[0] * 0,))
    twin = DSparkTwin(folder, target_folder)
    assert distance(target, drafter, twin, folder)[0] > 1e-3


# ------------------------------------------------------------------------------------------- laws


def tiny_dspark(target: Transformer, topk: int = 0) -> DFlashModel:
    fields = {"n_layers": 2, "windows": (None, None), "qk_norm": "heads", "tie_embeddings": False}
    config = Config(**{**vars(target.config), **fields})
    mask = target.config.vocab_size - 1
    model = DFlashModel(config, DFlash(4, mask, (1, 1), True, 3, draft_topk=topk))
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.7, generator=generator)
    return model.requires_grad_(False).eval()


class ForgetsTheDraw(DFlashDraft):
    """Draws with the Markov head, and says that it drew without it."""

    def draw(self, state, logits, pos):
        index = int(self.num_drawn)
        before = state.tokens.gather(1, pos - 1)  # (B, 1)
        super().draw(state, logits - self.model.markov_head(before), pos)
        claimed = self.probs[:, index].clone()
        self.num_drawn.sub_(1)
        super().draw(state, logits, pos)
        self.probs[:, index] = claimed


@pytest.mark.slow
@pytest.mark.parametrize("topk", [0, 2])
@pytest.mark.parametrize("k", [3, *(pytest.param(k, marks=pytest.mark.long) for k in (1, 4))])
def test_sequences_have_the_targets_joint_law(k, topk):
    """q of a token depends on the one drawn before it, and may be 0 for most tokens."""
    model = tiny(3)
    counts = sequences(model, DFlashDraft(tiny_dspark(model, topk)), Sampling(1), k, runs=2)
    assert p_value(counts, joint_law(model, LONG_PROMPT, TAIL, Sampling(1))) > 1e-6


@pytest.mark.slow
def test_a_broken_law_is_caught():
    model = tiny(3)
    counts = sequences(model, ForgetsTheDraw(tiny_dspark(model)), Sampling(1), 3, runs=1)
    assert p_value(counts, joint_law(model, LONG_PROMPT, TAIL, Sampling(1))) < 1e-12


def test_greedy_text_is_plain_text():
    target = tiny(5, vocab_size=61, n_layers=3, max_seq_length=96)
    want = rows_of(target, PROMPTS, max_new_tokens=40)
    for k in (2, 4, "auto"):
        drafter = DFlashDraft(tiny_dspark(target))
        engine = Engine(target, 4, 96, drafter=drafter, speculate_k=k)
        if k == "auto":
            engine.calibrate(Sampling(0), 20, rounds=1)
        assert rows_of(target, PROMPTS, engine=engine, max_new_tokens=40) == want


@pytest.mark.compiled
@pytest.mark.long
def test_compiled_rounds():
    target = tiny(5, vocab_size=61, n_layers=3, max_seq_length=96)
    want = rows_of(target, PROMPTS, max_new_tokens=40)
    drafter = DFlashDraft(tiny_dspark(target, topk=5))
    engine = Engine(target, 4, 96, drafter=drafter, speculate_k=3, compile=True)
    engine.warm_up("greedy")
    with torch.compiler.set_stance("fail_on_recompile"):
        assert rows_of(target, PROMPTS, engine=engine, max_new_tokens=40) == want


# ------------------------------------------------------------------------------------------ EAGLE-3

EAGLE = {
    **LAYER,
    "architectures": ["Qwen3Eagle3Model"],
    "model_type": "qwen3",
    "head_dim": E,
    "rope_theta": 5e4,
    "num_target_layers": 3,
    "target_layer_ids": [0, 1],
    "ttt_length": 7,
    "layer_types": ["full_attention"],
    "tie_word_embeddings": False,
}


def qwen3_eagle_tensors() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(9)
    matrix = lambda *shape: 0.15 * torch.randn(*shape, generator=g)  # noqa: E731
    vector = lambda n: 1 + 0.2 * torch.randn(n, generator=g)  # noqa: E731
    p = "layers.0."
    return {
        "embed_tokens.weight": 3 * matrix(V, D),
        "fc.weight": matrix(D, 2 * D),
        p + "hidden_norm.weight": vector(D),
        p + "input_layernorm.weight": vector(D),
        p + "post_attention_layernorm.weight": vector(D),
        p + "self_attn.q_proj.weight": matrix(4 * E, 2 * D),
        p + "self_attn.k_proj.weight": matrix(2 * E, 2 * D),
        p + "self_attn.v_proj.weight": matrix(2 * E, 2 * D),
        p + "self_attn.o_proj.weight": matrix(D, 4 * E),
        p + "self_attn.q_norm.weight": vector(E),
        p + "self_attn.k_norm.weight": vector(E),
        p + "mlp.gate_proj.weight": matrix(96, D),
        p + "mlp.up_proj.weight": matrix(96, D),
        p + "mlp.down_proj.weight": matrix(D, 96),
        "norm.weight": vector(D),
        "lm_head.weight": matrix(V, D),
    }


class Qwen3EagleTwin(EagleTwin):
    """A layer of Qwen3 over (embedding, state), in float64."""

    def states(self, tokens):
        entering = []
        logits(self.target_hf, self.target_w, tokens, entering)
        leaving = [entering[i + 1] for i in self.hf["target_layer_ids"]]
        return torch.cat(leaving, -1) @ self.w["fc.weight"].T

    def run(self, tokens, states):
        w, p, n, eps = self.w, self.p, len(tokens), self.hf["rms_norm_eps"]
        weight = lambda name: w[p + name + ".weight"]  # noqa: E731
        embedded = norm(w["embed_tokens.weight"][tokens], weight("input_layernorm"), eps)
        x = torch.cat((embedded, norm(states, weight("hidden_norm"), eps)), -1)
        q, k, v = (
            (x @ weight(f"self_attn.{c}_proj").T).view(n, -1, E).transpose(0, 1) for c in "qkv"
        )
        q, k = norm(q, weight("self_attn.q_norm"), eps), norm(k, weight("self_attn.k_norm"), eps)
        angle, scale = angles(self.hf, E, n)
        heads = []
        for head in range(4):
            qh, kh = rotate(q[head], angle, scale), rotate(k[head // 2], angle, scale)
            mask = torch.full((n, n), -math.inf, dtype=torch.float64).triu(1)
            heads.append((qh @ kh.T / math.sqrt(E) + mask).softmax(-1) @ v[head // 2])
        y = states + torch.cat(heads, -1) @ weight("self_attn.o_proj").T
        h = norm(y, weight("post_attention_layernorm"), eps)
        gate, up = (h @ weight(f"mlp.{c}_proj").T for c in ("gate", "up"))
        return y + swiglu(gate, up) @ weight("mlp.down_proj").T

    def __call__(self, folder, tokens, drafted, sampling):
        states, pairs, probs = self.states(tokens)[:-1], tokens[1:], []
        for id in drafted:
            out = self.run(pairs, states)[-1:]
            last = norm(out, self.w["norm.weight"], self.hf["rms_norm_eps"])
            probs.append(sampling.probs(last @ self.w["lm_head.weight"].T)[0])
            pairs, states = [*pairs, id], torch.cat((states, out))
        return torch.stack(probs)


@pytest.mark.slow
@pytest.mark.parametrize("plain", [0, 34])
def test_eagle_is_its_twin(plain, target, target_folder, tmp_path):
    folder = written(tmp_path / "draft", EAGLE, qwen3_eagle_tensors())
    assert draft_type_of(EAGLE) == "eagle3"
    drafter = recorded(PairDraft)(load_draft_model(folder, target))
    assert drafter.model.state_ids == (1, 2)
    twin = Qwen3EagleTwin(folder, target_folder)
    worst, accepted = distance(target, drafter, twin, folder, plain)
    assert worst < 1e-5 and len(accepted) > 1
    drafter.model.state_ids = (0, 1)  # the control: what enters the layers
    assert distance(target, drafter, twin, folder, plain)[0] > 1e-3


# ---------------------------------------------------------------------------------------- folders


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_folder_is_a_drafter(quantize, target, tmp_path):
    folder = dspark_folder(tmp_path / "draft")
    assert draft_type_of(DSPARK) == "dflash" and draft_type_of(DSPARK | NO_HEAD) == "dflash"
    check_draft(folder, target.config)
    drafter = load_drafter(folder, target, None, quantize=quantize, pack=False)
    assert isinstance(drafter, DFlashDraft) and drafter.max_k == BLOCK
    want = rows_of(target, PROMPTS[:1], max_new_tokens=20)
    assert rows_of(target, PROMPTS[:1], drafter=drafter, max_new_tokens=20) == want


@pytest.mark.parametrize(
    "change, message",
    [
        ({"markov_head_type": "gated"}, "markov_head_type = 'gated' is not supported"),
        ({"markov_head_type": "rnn"}, "markov_head_type = 'rnn' .* supported: 'vanilla'"),
        ({"architectures": ["Gemma4DSparkModel"]}, "markov_rank = 5 makes it a DSpark draft"),
        ({"architectures": ["Qwen3DSparkModelV2"]}, "markov_rank = 5 makes it a DSpark draft"),
        ({"markov_head_type": None}, "markov_head_type = None"),
        ({"dspark_draft_topk": V + 1}, "dspark_draft_topk = .* must be a whole number up to"),
        ({"dspark_draft_topk": -1}, "dspark_draft_topk = -1 must be a positive number"),
        ({**NO_HEAD, "dspark_draft_topk": 4}, "dspark_draft_topk = 4 needs a Markov head"),
        ({"markov_rank": "256"}, "markov_rank = '256' must be a positive number"),
        ({"markov_rank": 2.5}, "markov_rank = 2.5 must be a whole number"),
        ({"mask_token_id": V}, f"mask_token_id = {V}"),
        ({"target_layer_ids": [-1, 1]}, r"target_layer_ids = \[-1, 1\] must be layers"),
        ({"target_layer_ids": [0, 2]}, "target_layer_ids = .* 0 to 1"),
        ({"num_target_layers": 36}, "num_target_layers = 36 is of another target"),
        ({"vocab_size": 200}, "vocab_size = 200 is of another target"),
        ({"block_size": None}, "block_size is missing"),
        ({"model_type": "gemma4_text"}, "model_type = 'gemma4_text' is not supported"),
    ],
)
def test_a_config_that_cannot_be_honoured_is_refused(change, message, target, tmp_path):
    hf = {key: value for key, value in (DSPARK | change).items() if value is not None}
    folder = written(tmp_path / "draft", hf, dspark_tensors())
    with pytest.raises(ValueError, match=message) as error:
        check_draft(folder, target.config)
    assert str(folder) in str(error.value)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"markov_head.markov_w2.weight": None}, "missing: markov_head.markov_w2.weight"),
        ({"markov_head.gate_proj.weight": torch.zeros(2)}, "unexpected: markov_head.gate_proj"),
        ({"lm_head.weight": torch.zeros(V, 3)}, "lm_head.weight is"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(change, message, target, tmp_path):
    tensors = {name: x for name, x in (dspark_tensors() | change).items() if x is not None}
    with pytest.raises(ValueError, match=message):
        load_draft_model(written(tmp_path / "draft", DSPARK, tensors), target)
