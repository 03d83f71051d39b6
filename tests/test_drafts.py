"""drafts/: PARD, EAGLE-3 in both layouts, and vocabularies that overlap, from folders that the
tests write.

A float64 twin of each draft, written from the published schemas alone, must give the distributions
that tokens were drawn from, in rounds of any length with any number accepted. Wrong folders, and
caches that keep masks, must not.
"""

import dataclasses
import json
import math
import re
import shutil
import types

import pytest
import torch
from conftest import config_json
from reference import angles, logits, norm, rotate
from safetensors.torch import load_file, save_file
from steps import plan_k, prefill_all
from test_speculative import LONG_PROMPT, TAIL, joint_law, p_value, rows_of, sequences

import decoding.runner as runner
import drafts.pard as pard
import drafts.registry as registry
from cli.flags import parse_args
from cli.main import main as run_args
from cli.report import attended_bytes, outgrown, position_bytes
from decoding.engine import Engine
from decoding.errors import UserError
from decoding.planner import Step
from decoding.sampling import Sampling
from decoding.statistics import Timing
from drafts.base import DraftSource, ModelDraft
from drafts.dflash import DFlash, DFlashDraft, DFlashModel
from drafts.eagle import Eagle, EagleModel, eagle_of
from drafts.hidden_states import PairDraft
from drafts.mtp import HEADS, MtpDraft, MtpModel
from drafts.ngram import NgramDraft
from drafts.pard import PardDraft, pard_token
from drafts.registry import check_draft, draft_source, load_drafter
from drafts.target_layers import NUM_SINKS, WindowedTarget, layer_subset
from drafts.translated import SAMPLE_TEXT
from drafts.vocabulary import ids_by_string, translate
from loading.checkpoint import load_model
from loading.config import config_from_hf
from loading.draft_types import TYPE_BY_KEY, draft_type_of
from loading.options import SPECS, DraftOptions, ModelOptions
from loading.target import Target
from loading.tokenizer import load_tokenizer
from model import Config, Transformer
from tests.attacks.law import IgnoresIds, WrongPosition
from tests.conformance.drafters import recorded
from tests.conformance.targets import BASE, PROMPTS, pair, tiny

D, V, DRAFT_V = 64, 131, 90  # of conftest's families; ids that the EAGLE-3 drafts have
# ----------------------------------------------------------------------------------------- folders


def eagle_tensors(
    layer: str, inputs: int, D: int = D, own_embed: int = 0, heads: int = 4
) -> dict[str, torch.Tensor]:
    """Random tensors of an EAGLE-3 folder; `layer` is the layout's name for its block."""
    g = torch.Generator().manual_seed(7)
    matrix = lambda *shape: 0.15 * torch.randn(*shape, generator=g)  # noqa: E731
    vector = lambda n: 1 + 0.2 * torch.randn(n, generator=g)  # noqa: E731
    kept = torch.randperm(V, generator=g)[:DRAFT_V].sort().values
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[kept] = True
    tensors = {
        "fc.weight": matrix(D, inputs),
        f"{layer}.hidden_norm.weight": vector(D),
        f"{layer}.input_layernorm.weight": vector(D),
        f"{layer}.post_attention_layernorm.weight": vector(D),
        f"{layer}.self_attn.q_proj.weight": matrix(D, 2 * D),
        f"{layer}.self_attn.o_proj.weight": matrix(D, D),
        f"{layer}.self_attn.k_proj.weight": matrix(D // 2, 2 * D),
        f"{layer}.mlp.gate_proj.weight": matrix(96, D),
        f"{layer}.self_attn.v_proj.weight": matrix(D // 2, 2 * D),
        f"{layer}.mlp.up_proj.weight": matrix(96, D),
        f"{layer}.mlp.down_proj.weight": matrix(D, 96),
        "norm.weight": vector(D),
        "lm_head.weight": matrix(DRAFT_V, D),
        "d2t": kept - torch.arange(DRAFT_V),
        "t2d": t2d,
    }
    if own_embed:
        tensors["embed_tokens.weight"] = matrix(own_embed, D)
    return tensors


LAYER = {
    "model_type": "llama",
    "hidden_size": D,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": V,
    "max_position_embeddings": 160,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
SAFEAI = {**LAYER, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_V}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "draft_vocab_size": DRAFT_V,
    "norm_before_residual": True,
    "transformer_layer_config": {**LAYER, "rope_theta": 500000.0},
    "speculators_config": {"algorithm": "eagle3", "proposal_methods": [], "verifier": {}},
    "target_hidden_size": None,
}
SWITCHES = {
    "norm_before_residual": True,
    "norm_before_fc": True,
    "fc_norm": True,
    "norm_output": True,
    "target_hidden_states": [1, 3],  # the last one leaves the last layer
}


def written(folder, hf: dict, tensors: dict):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(hf))
    save_file(tensors, folder / "model.safetensors")
    return folder


def eagle_folder(kind: str, folder):
    """SafeAILab's layout, speculators', and the latter with every switch, two aux layers and its
    own embedding."""
    if kind == "safeai":
        return written(folder, SAFEAI, eagle_tensors("midlayer", 3 * D))
    if kind == "speculators":
        return written(folder, SPECULATORS, eagle_tensors("layers.0", 3 * D))
    tensors = eagle_tensors("layers.0", 2 * D, own_embed=V)
    norms = {"input_norm.weight": torch.linspace(0.5, 1.5, 2 * D)}
    norms |= {f"fc_norm.{i}.weight": torch.linspace(1.5, 0.5 + i, D) for i in range(2)}
    return written(folder, SPECULATORS | SWITCHES, tensors | norms)


def pard_folder(source, folder):
    """A family's folder, with a mask."""
    shutil.copytree(source, folder)
    (folder / "config.json").write_text(json.dumps(config_json(folder) | {"pard_token": V - 1}))
    return folder


# ------------------------------------------------------------------------------------------ twins


def pard_twin(folder, tokens: list[int], drafted: list[int], sampling: Sampling) -> torch.Tensor:
    """(K, V): of a whole sequence, decided tokens and K - 1 masks. What was drafted does not
    enter."""
    hf = config_json(folder)
    masked = tokens + [hf["pard_token"]] * (len(drafted) - 1)
    return sampling.probs(
        logits(hf, load_file(folder / "model.safetensors"), masked)[-len(drafted) :]
    )


class EagleTwin:
    """EAGLE-3 as cnets.py and speculators define it, in float64: no cache, everything anew for each
    drafted token."""

    def __init__(self, folder, target, aux_layer_ids: tuple[int, ...] = (2, 1, 0)):
        self.hf, self.aux_layer_ids = config_json(folder), aux_layer_ids
        self.w = {name: x.double() for name, x in load_file(folder / "model.safetensors").items()}
        self.target_hf = config_json(target)
        self.target_w = load_file(target / "model.safetensors")
        self.layer_hf = self.hf.get("transformer_layer_config") or self.hf
        self.p = "layers.0." if "layers.0.hidden_norm.weight" in self.w else "midlayer."

    def states(self, tokens: list[int]) -> torch.Tensor:
        """(n, D): what the target knew at each token."""
        entering = []
        logits(self.target_hf, self.target_w, tokens, entering)
        tapped = [entering[i] for i in self.aux_layer_ids]
        if self.hf.get("fc_norm"):
            tapped = [norm(x, self.w[f"fc_norm.{i}.weight"], 1e-5) for i, x in enumerate(tapped)]
        x = torch.cat(tapped, -1)
        if self.hf.get("norm_before_fc"):
            x = norm(x, self.w["input_norm.weight"], 1e-5)
        return x @ self.w["fc.weight"].T

    def run(self, tokens: list[int], states: torch.Tensor) -> torch.Tensor:
        """The residual stream (n, D) of pairs: each token beside the state of the position before
        it."""
        w, p, n, E = self.w, self.p, len(tokens), D // 4
        table = w.get("embed_tokens.weight", self.target_w["model.embed_tokens.weight"].double())
        normed = norm(states, w[p + "hidden_norm.weight"], 1e-5)
        # (n, 2D)
        x = torch.cat((norm(table[tokens], w[p + "input_layernorm.weight"], 1e-5), normed), -1)
        q, k, v = (x @ w[f"{p}self_attn.{c}_proj.weight"].T for c in "qkv")
        angle, scale = angles(self.layer_hf, E, n)
        heads = []
        for head in range(4):
            qh, kh = (
                rotate(q[:, head * E :][:, :E], angle, scale),
                rotate(k[:, head // 2 * E :][:, :E], angle, scale),
            )
            mask = torch.full((n, n), -math.inf, dtype=torch.float64).triu(1)
            heads.append(
                (qh @ kh.T / math.sqrt(E) + mask).softmax(-1) @ v[:, head // 2 * E :][:, :E]
            )
        y = normed if self.hf.get("norm_before_residual") else states
        y = y + torch.cat(heads, -1) @ w[p + "self_attn.o_proj.weight"].T
        h = norm(y, w[p + "post_attention_layernorm.weight"], 1e-5)
        gate, up = (h @ w[f"{p}mlp.{c}_proj.weight"].T for c in ("gate", "up"))
        return y + (gate * gate.sigmoid() * up) @ w[p + "mlp.down_proj.weight"].T

    def __call__(
        self, folder, tokens: list[int], drafted: list[int], sampling: Sampling
    ) -> torch.Tensor:
        """(K, V)"""
        states, pairs, found = self.states(tokens)[:-1], tokens[1:], []
        for id in drafted:
            out = self.run(pairs, states)[-1:]
            normed = norm(out, self.w["norm.weight"], 1e-5)
            few = (normed @ self.w["lm_head.weight"].T)[0]
            full = torch.full((V,), -math.inf, dtype=torch.float64)
            for draft_id, difference in enumerate(self.w["d2t"].long().tolist()):
                full[draft_id + difference] = few[draft_id]
            found.append(sampling.probs(full))
            pairs, states = (
                [*pairs, id],
                torch.cat((states, normed if self.hf.get("norm_output") else out)),
            )
        return torch.stack(found)


class LentHeadTwin(EagleTwin):
    """An EAGLE-3 draft of all the target's tokens that uses its head."""

    def __init__(self, folder, target):
        super().__init__(folder, target)
        head = self.target_w["lm_head.weight"].double()
        self.w |= {"lm_head.weight": head, "d2t": torch.zeros(V)}


def neighbours_first(tensors: dict, layer: str, head_dim: int) -> dict:
    """A layer whose RoPE's pairs are neighbours, as one whose pairs are half a head apart: the rows
    of q, k and their norms change places."""

    def reorder(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2).contiguous()

    names = [
        f"{layer}.self_attn.{part}.weight" for part in ("q_proj", "k_proj", "q_norm", "k_norm")
    ]
    return tensors | {name: reorder(tensors[name]) for name in names if name in tensors}


def load_draft_model(folder, target: Transformer) -> Transformer:
    """The model of a draft folder, not packed."""
    return load_drafter(folder, target, None, pack=False).model


def distance(target: Transformer, drafter, twin, folder, plain: int = 0) -> tuple[float, set[int]]:
    """The largest difference to the twin's distributions over rounds of changing length, ragged,
    with plain steps in between; and which numbers of accepted tokens there were."""
    sampling, accepted = Sampling(1.3), set()
    engine = Engine(target, 4, 100, drafter=drafter, speculate_k=4)
    with torch.inference_mode():
        prefill_all(engine, PROMPTS, 85, sampling, seeds=[11, 12, 13, 14])
        for k in (4, 3, 4, *([0] * plain), 1, 4, 2, 4, 4, 0, 4):
            plan_k(engine, lambda requests, k=k: k)
            engine.step()
            accepted |= set(engine.batch.accepted.tolist()) if k else set()
    worst = 0.0
    for before, tokens, probs, _ in drafter.seen:
        for row in range(4):
            want = twin(folder, before[row], tokens[row], sampling)
            worst = max(worst, (probs[row].double() - want).abs().max().item())
    return worst, accepted


USUAL = (2, 1, 0)  # of a target with three layers


@pytest.fixture(scope="module")
def target_folder(folder_of):
    return folder_of("llama-3.1")


@pytest.fixture(scope="module")
def target(target_folder):
    return load_model(target_folder, dtype=torch.float32)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("plain", [0, 32])
@pytest.mark.parametrize("kind", ["safeai", "speculators", "switches"])
def test_eagle_is_its_twin(kind, plain, target, target_folder, tmp_path):
    folder = eagle_folder(kind, tmp_path / kind)
    twin = EagleTwin(folder, target_folder, (1, 3) if kind == "switches" else USUAL)
    drafter = recorded(PairDraft)(load_draft_model(folder, target))
    worst, accepted = distance(target, drafter, twin, folder, plain)
    assert worst < 1e-4 and len(accepted) > 2


def test_a_draft_whose_cache_is_longer_reads_no_state_of_a_free_slot(monkeypatch):
    """As where the probe gives two head sizes other lengths. The request between two others ends
    first."""
    monkeypatch.setattr(
        runner, "invariant_multiples", lambda _, heads, *rest: (1, 192 if heads.E == 16 else 16)
    )
    target, _ = pair()
    plain = rows_of(target, PROMPTS[:3])
    engine = Engine(
        target,
        3,
        60,
        drafter=PairDraft(tiny_eagle(target, list(range(61)), head_dim=16)),
        speculate_k=3,
    )
    assert engine.runner.S + engine.runner.slack < engine.drafter.runner.S
    ids = [
        engine.add_request(prompt, sampling=Sampling(0), max_new_tokens=n)
        for prompt, n in zip(PROMPTS[:3], (30, 4, 30))
    ]
    requests = [engine.requests[id] for id in ids]
    while engine.has_unfinished():
        engine.step()
    assert [request.tokens for request in requests] == [plain[0], plain[1][:4], plain[2]]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("plain", [0, 32])
@pytest.mark.parametrize("family", ["llama-3.1", "qwen3", "mistral-v0.1"])
def test_pard_is_its_twin(family, plain, target, folder_of, tmp_path):
    folder = pard_folder(folder_of(family), tmp_path / family)
    drafter = recorded(PardDraft)(load_model(folder, dtype=torch.float32), V - 1)
    worst, accepted = distance(target, drafter, pard_twin, folder, plain)
    assert worst < 1e-4 and len(accepted) > 2


@pytest.mark.parametrize("has_other_ids", [False, True])
def test_a_pard_mask_is_an_id_of_the_draft(has_other_ids, target, tmp_path, monkeypatch):
    """Translated embeddings put it behind the target's ids."""
    draft = tiny(7, n_layers=1, vocab_size=7)
    if has_other_ids:
        translate(draft, torch.tensor([5, -1, 0, 3]), 1, 6)
    monkeypatch.setattr(pard, "load_translated", lambda *args, **options: draft)
    target = types.SimpleNamespace(config=types.SimpleNamespace(vocab_size=4))
    monkeypatch.setattr(pard, "load_config", lambda checkpoint: None)
    checkpoint = types.SimpleNamespace(hf={"pard_token": 6, "vocab_size": 7})
    source = pard.PardSource(checkpoint, None, None)
    assert source.load(target, None).mask == (4 if has_other_ids else 6)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("broken", ["masks stay", "masks stay, plain steps", "another mask"])
def test_a_broken_pard_is_caught(broken, target, target_folder, tmp_path):
    class Forgets(PardDraft):
        def setup(self, state, k_max, target, prepare):
            super().setup(state, k_max, target, prepare)
            self.num_first_inputs = 2 if "stay" in broken else self.num_first_inputs

    folder = pard_folder(target_folder, tmp_path / "pard")
    mask = V - 2 if broken == "another mask" else V - 1
    drafter = recorded(Forgets)(load_model(folder, dtype=torch.float32), mask)
    assert distance(target, drafter, pard_twin, folder, 32 if "plain" in broken else 0)[0] > 1e-3


@pytest.mark.one_in(3)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("own_embed", [None, V])
def test_without_a_head_it_uses_the_targets(own_embed, tied, target, target_folder, tmp_path):
    """As vLLM and SGLang do for drafts of all tokens, such as nvidia/Kimi-K2.6-Eagle3, whatever
    tie_word_embeddings says."""
    tensors = eagle_tensors("midlayer", 3 * D, own_embed=own_embed)
    for name in ("lm_head.weight", "d2t", "t2d"):
        del tensors[name]
    hf = SAFEAI | {"draft_vocab_size": V, "tie_word_embeddings": tied}
    folder = written(tmp_path / "draft", hf, tensors)
    drafter = recorded(PairDraft)(load_draft_model(folder, target))
    twin = LentHeadTwin(folder, target_folder)
    worst, accepted = distance(target, drafter, twin, folder, 0)
    assert worst < 1e-5 and len(accepted) > 1


def test_a_head_of_few_tokens_cannot_be_the_targets(target, tmp_path):
    tensors = eagle_tensors("midlayer", 3 * D)
    del tensors["lm_head.weight"]
    folder = written(tmp_path / "draft", SAFEAI, tensors)
    with pytest.raises(ValueError, match=r"lm_head.weight is missing, and the target's") as error:
        load_draft_model(folder, target)
    assert "tie_word_embeddings" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["outer", "inner"])
def test_interleaved_rope_of_an_eagle_is_computed(place, target, target_folder, tmp_path):
    tensors = eagle_tensors("layers.0", 3 * D)
    twin_tensors = neighbours_first(tensors, "layers.0", D // 4)
    twin_folder = written(tmp_path / "twin", SPECULATORS, twin_tensors)
    hf = json.loads(json.dumps(SPECULATORS))
    (hf if place == "outer" else hf["transformer_layer_config"])["is_neox_style"] = False
    folder = written(tmp_path / "draft", hf, tensors)
    drafter = recorded(PairDraft)(load_draft_model(folder, target))
    worst, _ = distance(target, drafter, EagleTwin(twin_folder, target_folder), folder, 0)
    assert worst < 1e-5
    wrong = EagleTwin(folder, target_folder)  # the control: the other pairs
    assert distance(target, drafter, wrong, folder, 0)[0] > 1e-3


@pytest.mark.parametrize("key", ["is_neox_style", "rope_is_neox_style"])
def test_other_models_with_interleaved_rope_are_refused_by_the_key(key, target_folder, tmp_path):
    hf = config_json(target_folder)
    with pytest.raises(ValueError, match=f"{key} = False is not supported"):
        config_from_hf(hf | {key: False})
    assert config_from_hf(hf | {key: True}) == config_from_hf(hf)


def test_two_tokens_of_one_id_are_refused(target, tmp_path):
    tensors = eagle_tensors("midlayer", 3 * D)
    tensors["d2t"][5] = tensors["d2t"][4] - 1
    folder = written(tmp_path / "draft", SAFEAI, tensors)
    with pytest.raises(ValueError, match="d2t gives tokens 4 and 5 the same id of the target's"):
        load_draft_model(folder, target)


@pytest.mark.attack
@pytest.mark.parametrize("kind", ["safeai", "speculators"])
@pytest.mark.parametrize(
    "broken", ["d2t", "rope_theta", "layer ids", "residual", "stale states", "own state"]
)
def test_a_broken_eagle_is_caught(kind, broken, target, target_folder, tmp_path, monkeypatch):
    """The folder that the drafter loads says something else than the one that the twin reads."""
    right = eagle_folder(kind, tmp_path / "right")
    hf, tensors = config_json(right), load_file(right / "model.safetensors")
    layer = hf.get("transformer_layer_config") or hf
    if broken == "d2t":
        tensors["d2t"] = torch.arange(DRAFT_V) * 0  # as if it held nothing
    elif broken == "rope_theta":
        layer["rope_theta"] = 500000.0 if kind == "safeai" else 10000.0
    elif broken == "layer ids":
        hf["eagle_aux_hidden_state_layer_ids"] = [2, 1, 1]
    elif broken == "residual":
        hf["norm_before_residual"] = not hf.get("norm_before_residual")
    wrong = written(tmp_path / "wrong", hf, tensors)
    drafter = recorded(PairDraft)(load_draft_model(wrong, target))
    if broken == "stale states":  # the draft's own states stay where the target's belong
        setup = PairDraft.setup
        monkeypatch.setattr(
            PairDraft,
            "setup",
            lambda self, *a: (setup(self, *a), vars(self).update(num_first_inputs=2)),
        )
    elif broken == "own state":
        monkeypatch.setattr(drafter.model, "recycles_normed", True)
    twin = EagleTwin(right, target_folder, USUAL)
    assert distance(target, drafter, twin, right)[0] > 1e-3


# ---------------------------------------------------------------------------------------- the law


def tiny_eagle(target: Transformer, ids: list[int], scale: float = 0.5, **changes) -> EagleModel:
    """A random EAGLE-3 draft for a tiny target, with these ids of the target's."""
    eagle = Eagle({}, len(ids), (1, 0, 1), target.config.dim, False, False, False, False)
    config = Config(**{**vars(target.config), "n_layers": 1, "windows": (), **changes})
    model = EagleModel(config, eagle, False)
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, scale, generator=generator)
    table = torch.full((target.config.vocab_size,), -1)
    table[ids] = torch.arange(len(ids))
    model.register_buffer("ids", table, persistent=False)
    return model.requires_grad_(False).eval()


def tiny_dflash(
    target: Transformer, scale: float = 0.5, windows: tuple = (None, None)
) -> DFlashModel:
    """A random DFlash draft of two layers and blocks of 6 for a tiny target; its mask is the
    target's last token."""
    fields = {"n_layers": 2, "windows": windows, "qk_norm": "heads", "tie_embeddings": False}
    model = DFlashModel(
        Config(**{**vars(target.config), **fields}), DFlash(6, target.config.vocab_size - 1, (1, 1))
    )
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, scale, generator=generator)
    return model.requires_grad_(False).eval()


def tiny_mtp(target: Transformer, scale: float = 0.5, window: int | None = None) -> MtpModel:
    """A random dense MTP head for a tiny target, of MiMo's kind."""
    fields = {"n_layers": 1, "windows": (window,), "tie_embeddings": False}
    config = Config(**{**vars(target.config), **fields})
    model = MtpModel(config, HEADS["mimo"], target.config.n_layers)
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, scale, generator=generator)
    return model.requires_grad_(False).eval()


def tiny_drafter(kind: str, target: Transformer):
    if kind == "dflash":
        return DFlashDraft(tiny_dflash(target))
    if kind == "mtp":
        return MtpDraft(tiny_mtp(target))
    if kind == "pard":
        return PardDraft(tiny(7, vocab_size=target.config.vocab_size + 1), target.config.vocab_size)
    if kind == "eagle":
        return PairDraft(tiny_eagle(target, [0, 1, 2, 3]))
    if kind == "eagle, fewer ids":
        return PairDraft(tiny_eagle(target, [0, 2, 3]))
    # "shared", "shared pard": three of four tokens, under other ids
    other = tiny(7, n_layers=1, vocab_size=7)
    mask = 6 if "pard" in kind else None
    translate(other, torch.tensor([5, -1, 0, 3]), 1, mask)
    return ModelDraft(other) if mask is None else PardDraft(other, 4)


LAWS = ["pard", "eagle, fewer ids", "mtp", "dflash", "shared"]


@pytest.mark.parametrize(
    "kind, sampling, k",
    [
        # each some 10 s
        *(pytest.param(kind, Sampling(1), 3, marks=pytest.mark.attack) for kind in LAWS[:3]),
        *(pytest.param(kind, Sampling(1), 3, marks=pytest.mark.long) for kind in LAWS[3:]),
        *(
            pytest.param(kind, sampling, k, marks=pytest.mark.long)
            for kind in (*LAWS, "eagle", "shared pard")
            for sampling, k in (
                (Sampling(1.5, top_k=3, top_p=0.9), 2),
                (Sampling(0.7, min_p=0.1), 4),
                (Sampling(2), 1),
            )
        ),
    ],
    ids=str,
)
def test_sequences_have_the_targets_joint_law(kind, sampling, k):
    model = tiny(3)
    counts = sequences(
        model, tiny_drafter(kind, model), sampling, k, runs=4 if sampling.path == "plain" else 1
    )
    assert p_value(counts, joint_law(model, LONG_PROMPT, TAIL, sampling)) > 1e-6


@pytest.mark.attack
@pytest.mark.one_in(2, 2)
@pytest.mark.parametrize("broken", [WrongPosition, IgnoresIds])
def test_a_broken_law_is_caught(broken):
    model = tiny(3)
    kind = "pard" if broken is WrongPosition else "eagle, fewer ids"
    right = tiny_drafter(kind, model)
    drafter = broken(right.model, right.mask) if broken is WrongPosition else broken(right.model)
    counts = sequences(model, drafter, Sampling(1), 3)
    assert p_value(counts, joint_law(model, LONG_PROMPT, TAIL, Sampling(1))) < 1e-12


# ------------------------------------------------------------------------ greedy, chats, compiled


def any_drafter(kind: str, target: Transformer, draft: Transformer):
    if kind == "dflash":
        return DFlashDraft(tiny_dflash(target, 0.3))
    if kind == "mtp":
        return MtpDraft(tiny_mtp(target, 0.3, 9))
    if kind == "pard":
        return PardDraft(draft, 60)
    if kind == "eagle":
        return PairDraft(tiny_eagle(target, list(range(0, 61, 2)), 0.3))
    table = torch.arange(61)
    table[::5] = -1
    copy = Transformer(draft.config).eval().requires_grad_(False)
    copy.load_state_dict(draft.state_dict())
    translate(copy, table, 0)
    return ModelDraft(copy)


KINDS = ["pard", "eagle", "dflash", "mtp", "shared"]


@pytest.mark.slow
@pytest.mark.one_in(2, 2)
@pytest.mark.parametrize(
    "kind",
    ["eagle", *(pytest.param(kind, marks=pytest.mark.attack) for kind in KINDS if kind != "eagle")],
)
def test_turns_keep_both_caches(kind):
    """A second turn drafts from what an engine without a first one would: caches are behind by a
    round's tokens."""
    target, draft = pair()
    engine = Engine(
        target,
        1,
        96,
        drafter=recorded(type(any_drafter(kind, target, draft)))(
            *((draft, 60) if kind == "pard" else (any_drafter(kind, target, draft).model,))
        ),
        speculate_k=3,
    )
    hot, full = {"sampling": Sampling(5), "engine": engine}, 0  # so hot that much is accepted
    for n in range(8, 20):
        engine.clear()
        for cache in (*engine.runner.caches.layers, *engine.drafter.runner.caches.layers):
            cache.k.fill_(9.0), cache.v.fill_(-9.0)  # so that a position that was skipped shows
        first = PROMPTS[1] + rows_of(target, [PROMPTS[1]], max_new_tokens=n, seed=n, **hot)[0]
        full += int(engine.batch.accepted[0]) == 3
        second = [*first, 3, 5, 8]
        engine.drafter.seen.clear()
        got = rows_of(target, [second], max_new_tokens=20, **hot)
        kept = engine.drafter.seen.copy()
        engine.clear()
        engine.drafter.seen.clear()
        assert rows_of(target, [second], max_new_tokens=20, **hot) == got
        for (_, a, p, _), (_, b, q, _) in zip(kept, engine.drafter.seen, strict=True):
            assert a == b and (p - q).abs().max() < 1e-4
    assert full, "no first turn ended with a round that was accepted whole: nothing is shown"


# --------------------------------------------------------------------- beyond the draft's context


def with_context(drafter, num_positions: int):
    """The drafter, whose model was trained for so many positions."""
    drafter.model.config = dataclasses.replace(drafter.model.config, max_seq_length=num_positions)
    drafter.max_positions = num_positions
    return drafter


@pytest.mark.one_in(5)
@pytest.mark.parametrize("kind", [*KINDS, "model"])
def test_texts_decode_plainly_beyond_the_drafts_context(kind, capsys):
    """Rows that begin far below, shortly below and beyond 12 positions, side by side: greedy text
    is plain text, rounds that reach further draft nothing, and one line says so. Then a short
    prompt, which drafts again."""
    target, draft = pair()
    prompts = [*PROMPTS, [*range(3, 33)], [*range(3, 14)]]
    want = rows_of(target, prompts, max_new_tokens=40)
    make = ModelDraft if kind == "model" else None
    drafter = (
        recorded(type(any_drafter(kind, target, draft)))(
            *((draft, 60) if kind == "pard" else (any_drafter(kind, target, draft).model,))
        )
        if make is None
        else recorded(ModelDraft)(draft)
    )
    engine = Engine(target, 6, 80, drafter=with_context(drafter, 12), speculate_k=3)
    for _ in range(2):
        timing = Timing()
        assert rows_of(target, prompts, engine=engine, max_new_tokens=40, timing=timing) == want
        for prompt, request in zip(prompts, timing.requests):
            position = len(prompt)  # of the token that follows
            for token in request.token_records:
                if not token.first and token.index == 0:
                    assert (token.k > 0) == (position - 1 + 3 < 12), (position, token)
                position += 1
    assert outgrown(timing, drafter.max_positions) and capsys.readouterr().err == ""
    assert rows_of(target, [prompts[4]], engine=engine, max_new_tokens=20) == [want[4][:20]]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", KINDS)
def test_a_sampled_row_equals_its_prompt_alone_beyond_the_drafts_context(kind):
    target, draft = pair()
    drafter = with_context(any_drafter(kind, target, draft), 16)
    options = {"sampling": Sampling(0.7), "seed": 5, "speculate_k": 4, "drafter": drafter}
    alone = [rows_of(target, [prompt], **options)[0] for prompt in PROMPTS]
    assert rows_of(target, PROMPTS, **options) == alone


@pytest.mark.attack
@pytest.mark.parametrize("limit", [1, 2])
def test_the_law_holds_across_the_end_of_the_drafts_context(limit):
    """It ends so many tokens behind the prompt, within the tail whose law is counted."""
    model = tiny(3)
    drafter = with_context(tiny_drafter("pard", model), len(LONG_PROMPT) + limit)
    counts = sequences(model, drafter, Sampling(1), 1, runs=2)
    assert p_value(counts, joint_law(model, LONG_PROMPT, TAIL, Sampling(1))) > 1e-6


def test_a_prefix_is_reused_up_to_the_end_of_the_drafts_context():
    """A draft that is the target is accepted whole if no position of its cache is missing or stale:
    after texts that outgrew its context, in turns of one slot and in copies between two."""
    target, _ = pair()
    draft = Transformer(target.config).eval().requires_grad_(False)
    draft.load_state_dict(target.state_dict())
    engine = Engine(target, 2, 96, drafter=with_context(ModelDraft(draft), 48), speculate_k=3)
    long = [*range(3, 33)]
    answer = rows_of(target, [long], engine=engine, max_new_tokens=50)[0]
    for prompts in (
        [long + answer[:5]],
        [long + answer[:14]],
        [long[:25], long + answer[:9] + [7]],
    ):
        timing = Timing()
        got = rows_of(target, prompts, engine=engine, max_new_tokens=40, timing=timing)
        assert got == rows_of(target, prompts, max_new_tokens=40)
        records = [
            token
            for request in timing.requests
            for token in request.token_records
            if token.k and token.index == 0
        ]
        assert records and all(token.accepted == token.k for token in records[:-1])
        assert any(request.num_reused for request in timing.requests)


@pytest.mark.compiled
@pytest.mark.parametrize(
    "kind, compile_prompts",
    [
        ("eagle", False),
        pytest.param("eagle", True, marks=pytest.mark.long),
        *(pytest.param(kind, False, marks=pytest.mark.long) for kind in ("pard", "dflash")),
    ],
)
def test_compiled_rounds(kind, compile_prompts):
    """Greedy is plain greedy. Nothing compiles after warm-up, plain steps included."""
    target, draft = pair()
    want = rows_of(target, PROMPTS, max_new_tokens=40)
    drafter = any_drafter(kind, target, draft)
    options = {"compile": True, "compile_prompts": compile_prompts}
    engine = Engine(target, 4, 96, drafter=drafter, speculate_k=3, **options)
    engine.warm_up("greedy")
    with torch.compiler.set_stance("fail_on_recompile"):
        assert rows_of(target, PROMPTS, engine=engine, max_new_tokens=40) == want
        assert rows_of(target, PROMPTS[:2], engine=engine, max_new_tokens=40) == want[:2]
        with torch.inference_mode():
            prefill_all(engine, PROMPTS, 60, Sampling(0))
            for number in range(20):
                engine.run(Step(engine.rows(0, 4), 10 + 4 * number, (3, 0, 0, 3)[number % 4]))


# ------------------------------------------------------------------------------ folders and flags


def test_a_config_says_what_its_folder_is(monkeypatch):
    assert draft_type_of(LAYER) == "model" and draft_type_of({**LAYER, "pard_token": 5}) == "pard"
    assert draft_type_of(SAFEAI) == draft_type_of(SPECULATORS) == "eagle3"
    assert (
        draft_type_of({**LAYER, "architectures": ["LlamaForCausalLM"], "draft_vocab_size": 50})
        == "eagle3"
    )
    assert draft_type_of({**LAYER, "dflash_config": {}}) == "dflash"
    monkeypatch.setitem(TYPE_BY_KEY, "nobodys_key", "Nobody's")
    for key, value in (("speculators_model_type", "nobodys"), ("nobodys_key", 4)):
        with pytest.raises(ValueError, match=f"{key} = .* makes it a .* draft; supported: model"):
            draft_type_of({**LAYER, key: value})
    for mask in (V, -1, True, "x", 1.5):
        with pytest.raises(ValueError, match="pard_token"):
            pard_token({**LAYER, "pard_token": mask})


class OtherSource(DraftSource):
    def check(self, config):
        if self.origin.hf["dflash_config"].get("layers", 0) > config.n_layers:
            raise UserError("too many layers")

    def load(self, target, tokenizer):
        return NgramDraft(2)


def test_another_kind_of_folder_is_a_class_and_a_row(target, tmp_path, monkeypatch):
    """It refuses a config.json before weights are read, and makes the drafter."""
    monkeypatch.setitem(registry.SOURCES, "dflash", f"{__name__}.OtherSource")
    good, bad = (
        written(tmp_path / str(n), LAYER | {"dflash_config": {"layers": n}}, {}) for n in (1, 99)
    )
    check_draft(good, target.config)
    assert isinstance(load_drafter(good, target, None), NgramDraft)
    with pytest.raises(ValueError, match="too many layers"):
        check_draft(bad, target.config)
    with pytest.raises(ValueError, match="target_hidden_size"):
        check_draft(
            written(tmp_path / "eagle", SPECULATORS | {"target_hidden_size": 1}, {}), target.config
        )


def test_a_spec_gets_the_targets_checkpoint(target_folder, monkeypatch):
    """The opened one, whose files are read once; a model of random weights has none."""

    class Heads(DraftSource):
        """A draft in the target's own files."""

    monkeypatch.setitem(SPECS, "heads", "heads:N")
    monkeypatch.setattr(registry, "source_class", {"heads": Heads}.__getitem__)
    file = str(target_folder / "config.json")
    for options in (ModelOptions(str(target_folder)), ModelOptions(random_weights=file)):
        target = Target(options)
        source = draft_source(DraftOptions(spec="heads:3"), target)
        assert type(source) is Heads and source.origin == "3"
        assert source.options.target is (None if options.random_weights else target.checkpoint)


@pytest.mark.parametrize("prefix", ["", "suffix,"])
def test_a_folder_is_checked_once_and_loaded_by_what_was_checked(
    prefix, target, tmp_path, monkeypatch
):
    calls = []

    def counted(hf, config):
        calls.append(hf)
        return eagle_of(hf, config)

    monkeypatch.setattr("drafts.eagle.eagle_of", counted)
    folder = eagle_folder("safeai", tmp_path / "eagle")
    load_drafter(f"{prefix}{folder}", target, None, pack=False)
    assert len(calls) == 1


@pytest.mark.parametrize("prefix", ["", "suffix,"])
def test_ranks_compare_a_folder_before_they_load_it(prefix, target, tmp_path, monkeypatch):
    def check_same(get_values):
        raise ValueError(f"differs in {sorted(get_values())}")

    ranks = types.SimpleNamespace(check_same=check_same)
    monkeypatch.setattr(registry, "ranks_of", lambda model: ranks if model is target else None)
    folder = written(tmp_path / "eagle", SAFEAI, {"fc.weight": torch.zeros(1)})  # not loadable
    with pytest.raises(ValueError, match=r"differs in .*tensors"):
        load_drafter(f"{prefix}{folder}", target, None, pack=False)


@pytest.mark.parametrize(
    "change, named",
    [
        ({"target_hidden_size": 32}, "target_hidden_size = 32"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 4]}, "0 to 3"),
        ({"target_hidden_states": [0, 1, 4]}, "target_hidden_states = .* 0 to 3"),
        (
            {"eagle_aux_hidden_state_layer_ids": [1, 3]},
            "eagle_aux_hidden_state_layer_ids = .* 0 to 2",
        ),
        ({"eagle_config": {"norm_output": "no"}}, "norm_output = 'no'"),
        ({"eagle_aux_hidden_state_layer_ids": "all"}, "eagle_aux_hidden_state_layer_ids = 'all'"),
        ({"norm_before_residual": "yes"}, "norm_before_residual = 'yes'"),
        (
            {"transformer_layer_config": {**LAYER, "num_hidden_layers": 2}},
            "transformer_layer_config.num_hidden_layers = 2 is not supported",
        ),
        ({"transformer_layer_config": "x"}, "transformer_layer_config = 'x' must be an object"),
        ({"eagle_config": "x"}, "eagle_config = 'x' must be an object"),
        (
            {"transformer_layer_config": {**LAYER, "model_type": "gpt2"}},
            "transformer_layer_config.model_type",
        ),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ({"draft_vocab_size": 0}, "draft_vocab_size"),
    ],
)
def test_what_an_eagle_folder_cannot_mean_is_refused(change, named, target, tmp_path):
    folder = written(tmp_path / "eagle", SPECULATORS | change, eagle_tensors("layers.0", 3 * D))
    with pytest.raises(ValueError, match=named) as error:
        load_draft_model(folder, target)
    assert str(folder) in str(error.value)


@pytest.mark.parametrize("lacking", ["embed_tokens.weight", "lm_head.weight"])
def test_a_draft_of_another_size_cannot_borrow(lacking, target, tmp_path):
    tensors = eagle_tensors("midlayer", 3 * D, D=32, own_embed=V)
    hf = SAFEAI | {"hidden_size": 32, "target_hidden_size": D}
    check_draft(written(tmp_path / "whole", hf, tensors), target.config)
    del tensors[lacking]
    folder = written(tmp_path / "eagle", hf, tensors)
    with pytest.raises(UserError, match="hidden_size = 32 is of another target: this one has 64"):
        check_draft(folder, target.config)


def test_an_eagles_model_type_may_be_null(target):
    hf = SPECULATORS | {"transformer_layer_config": {**LAYER, "model_type": None}}
    assert eagle_of(hf, target.config) == eagle_of(SPECULATORS | {"x": 1}, target.config)._replace(
        layer={**LAYER, "tie_word_embeddings": False}
    )


@pytest.mark.parametrize("L", [1, 2])
def test_a_target_of_few_layers_has_no_usual_states(L, target, tmp_path):
    config = dataclasses.replace(target.config, n_layers=L)
    with pytest.raises(UserError, match=f"target_hidden_states = None must be .* 0 to {L}"):
        eagle_of(SAFEAI, config)
    hf = SAFEAI | {"target_hidden_states": [0, 1, 1]}
    variants = check_draft(written(tmp_path / "eagle", hf, {}), config).variants()
    assert all(min(source.eagle.state_ids) >= 0 for _, source in variants)


def test_tensors_that_do_not_fit_are_refused_by_name(target, tmp_path):
    tensors = eagle_tensors("midlayer", 3 * D)
    for number, (change, named) in enumerate(
        [
            ({"fc.weight": torch.zeros(D, 2 * D)}, "fc.weight is"),
            ({"other": torch.zeros(2)}, "unexpected: other"),
            ({"d2t": None}, "missing: d2t"),
        ]
    ):
        changed = {name: x for name, x in (tensors | change).items() if x is not None}
        with pytest.raises(ValueError, match=named):
            load_draft_model(written(tmp_path / str(number), SAFEAI, changed), target)
    for name, d2t, named in (
        ("beyond", tensors["d2t"] + V, rf"beyond: d2t gives token 0 .* the target has {V}"),
        ("below", tensors["d2t"] - V, "below: d2t gives token 0 the target's id -"),
    ):
        with pytest.raises(ValueError, match=named):
            folder = written(tmp_path / name, SAFEAI, tensors | {"d2t": d2t})
            load_draft_model(folder, target)


# family and layers of the target; keys of config.json; the hidden states that are read; is that a
# guess?
LAYER_IDS = [
    ("llama", 32, {}, (2, 16, 29), True),
    # outputs, as in SGLang
    ("llama", 32, {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}, (2, 16, 29), True),
    ("llama", 94, {"eagle_aux_hidden_state_layer_ids": [1, 46, 90]}, (2, 47, 91), True),
    ("llama", 32, {"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}, (2, 16, 29), False),
    ("llama", 32, {"eagle_aux_hidden_state_layer_ids": [3, 9]}, (3, 9), False),
    ("llama", 32, {"aux_hidden_state_layer_ids": [3, 9, 32]}, (3, 9, 32), False),
    (
        "llama",
        32,
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [4, 5, 6]}},
        (4, 5, 6),
        False,
    ),
    ("llama", 32, {"target_hidden_states": [1, 15, 28]}, (1, 15, 28), False),
    (
        "llama",
        32,
        {"target_hidden_states": [3], "eagle_aux_hidden_state_layer_ids": [1]},
        (3,),
        False,
    ),
    # gpt-oss-120b-Eagle3-v3
    ("gpt_oss", 36, {"eagle_aux_hidden_state_layer_ids": [24, 30, 36]}, (24, 30, 36), False),
    # its long-context one
    ("gpt_oss", 36, {"eagle_aux_hidden_state_layer_ids": [1, 17, 32]}, (1, 17, 32), True),
]


@pytest.mark.parametrize("family, num_layers, keys, states, is_guess", LAYER_IDS)
def test_layers_of_the_target_are_those_of_other_programs(
    family, num_layers, keys, states, is_guess, target
):
    config = dataclasses.replace(target.config, family=family, n_layers=num_layers)
    eagle = eagle_of({**SAFEAI, **keys}, config)
    assert eagle.state_ids == states and bool(eagle.assumption) == is_guess


def test_modelopts_switches_may_stand_in_eagle_config(target):
    nested = {"norm_before_fc": True, "norm_before_residual": True}
    eagle = eagle_of(
        {**SAFEAI, "eagle_config": nested, "norm_before_residual": False}, target.config
    )
    assert eagle.norm_before_fc and not eagle.norm_before_residual and not eagle.norm_output


def test_a_guess_is_said_once(target, tmp_path, capsys):
    """A config.json that names no layers."""
    folder = eagle_folder("safeai", tmp_path / "eagle")
    check_draft(folder, target.config)
    assert not capsys.readouterr().err
    drafter = load_drafter(folder, target, None, pack=False)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(str(folder)) and "hidden states [2, 1, 0]" in line
    assert "target_hidden_states" in line
    rows_of(target, PROMPTS[:1], drafter=drafter, speculate_k=2, max_new_tokens=130)
    assert not capsys.readouterr().err


def test_strings_pair_once():
    ids = ids_by_string([b"", b"a", b"b", b"a", b"c", b"a"], [b"a", b"", b"c", b"a"], 8)
    assert ids.tolist() == [-1, 0, -1, 3, 2, -1, -1, -1]


@pytest.fixture(scope="module")
def shorter_tokenizer(tmp_path_factory):
    """Another tokenizer of the same text: fewer pieces, at other ids."""
    import sentencepiece

    folder = tmp_path_factory.mktemp("shorter")
    words = re.split(
        " ",
        "the little cat and a big dog went to play in the park with their red ball; it was fun.",
    )
    lines = [" ".join(words[(i * k) % len(words)] for k in range(1, 12)) for i in range(1, 80)]
    (folder / "text.txt").write_text("\n".join(lines))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=310,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        hard_vocab_limit=False,
        minloglevel=2,
        user_defined_symbols=["<x>"],
    )
    return folder / "tokenizer.model"


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", ["eagle", "pard", "shared", "shared pard"])
@pytest.mark.parametrize("options", [[], ["--draft_quantize", "int8"]], ids=["plain", "int8"])
def test_the_command_line_takes_every_kind(
    kind, options, text_folder, shorter_tokenizer, tmp_path, capsys
):
    folder, hf = tmp_path / "draft", config_json(text_folder)
    if kind == "eagle":
        layer = {**LAYER, "vocab_size": hf["vocab_size"]}
        tensors = eagle_tensors("midlayer", 3 * D)
        tensors["t2d"] = torch.zeros(hf["vocab_size"], dtype=torch.bool)
        written(folder, {**SAFEAI, **layer}, tensors)
    else:
        shutil.copytree(text_folder, folder)
        changes = {"pard_token": hf["vocab_size"] - 1} if "pard" in kind else {}
        (folder / "config.json").write_text(json.dumps(hf | changes))
    if "shared" in kind:
        shutil.copy(shorter_tokenizer, folder)
    common = [
        "--checkpoint",
        text_folder,
        "--prompt",
        "the little cat",
        "--temperature",
        0,
        "--dtype",
        "float32",
    ]
    common += ["--max_new_tokens", 30, "--ignore_eos", "--json", "--device", "cpu"]
    rows = []
    for draft in ([], ["--draft_checkpoint", folder, "--speculate_k", 3, *options]):
        run_args(parse_args([str(part) for part in common + draft]))
        out, err = capsys.readouterr()
        rows.append(json.loads(out))
    assert rows[0]["tokens"] == rows[1]["tokens"]
    assert rows[1]["speculative"]["drafted"] > 0
    said = re.search(
        r"its tokenizer has (\d+) of the target's (\d+) tokens, ([\d.]+)% of the .* these alone",
        err,
    )
    assert (said is not None) == ("shared" in kind)
    if said:
        theirs, tokenizer = set(load_tokenizer(folder).pieces()), load_tokenizer(text_folder)
        both = torch.tensor([piece in theirs for piece in tokenizer.pieces()])
        ids = torch.tensor([tokenizer.encode(SAMPLE_TEXT)])
        # (T, V)
        p = load_model(text_folder, dtype=torch.float32)(ids, torch.arange(ids.size(1)))[0].softmax(
            -1
        )
        assert int(said[1]) == both.sum() < int(said[2])
        assert float(said[3]) == pytest.approx(
            100 * p[:, : len(both)][:, both].sum(-1).mean().item(), abs=0.06
        )


def test_tokenizers_that_share_too_little_are_refused_with_the_share(text_folder):
    # the demo's has 2048 tokens
    args = parse_args(["--draft_checkpoint", str(text_folder), "--device", "cpu"])
    with pytest.raises(
        ValueError, match=r"its tokenizer has 3\d\d of the target's 2048 tokens, 3\d\.\d% of .* 50%"
    ):
        run_args(args)


def find_draft_folder(path: str) -> None:
    check_draft(registry.find_draft(path).source, None)


def test_a_spec_stays_a_spec_beside_a_folder_of_its_name(
    target, target_folder, tmp_path, monkeypatch
):
    """Text names a folder only where no spec has this name; generate.py's --draft takes specs
    alone."""
    (tmp_path / "ngram").mkdir()
    monkeypatch.chdir(tmp_path)
    assert isinstance(load_drafter("ngram", target, None, pack=False), NgramDraft)
    with pytest.raises(ValueError, match="expected suffix"):
        load_drafter("nowhere", target, None)
    for load in (lambda path: load_drafter(path, target, None), find_draft_folder):
        with pytest.raises(UserError, match=r"^nowhere: no such folder or GGUF file"):
            load("./nowhere")
    args = parse_args(
        ["--checkpoint", str(target_folder), "--draft", str(target_folder), "--device", "cpu"]
    )
    with pytest.raises(ValueError, match="a folder belongs to --draft_checkpoint"):
        run_args(args)


@pytest.mark.parametrize("own", [None, 5, 9, 12, 30])
@pytest.mark.parametrize("key_block", [1, 8])
@pytest.mark.parametrize("num_queries", [1, 3])
def test_a_window_shows_the_first_keys_and_the_last(num_queries, key_block, own):
    """Each of them once, from the text's beginning to far behind the window, and none that a
    layer's own window hides."""
    window, S = 9, 64
    model = tiny(0, 14, **BASE, windows=(None, own, None, 9))
    windowed = WindowedTarget(model, window)
    reach = own or S
    for first in (*range(20), 40, S - num_queries):
        pos = torch.arange(first, first + num_queries)[None]  # (1, T)
        keys = windowed.visible_keys(pos, torch.arange(S), own, key_block)
        index = torch.arange(S) if keys.index is None else keys.index[0]
        for query, mask in zip(pos[0].tolist(), keys.mask[0, 0], strict=True):
            seen = range(max(0, query - reach + 1), query + 1)
            wanted = [key for key in seen if key < NUM_SINKS or query - key < window]
            assert sorted(index[mask].tolist()) == wanted
    per_layer = position_bytes(model)[9] // model.windows.count(9)
    shortened = min(own or window, window)
    assert attended_bytes(position_bytes(windowed), S) == (3 * window + shortened) * per_layer


@pytest.mark.parametrize("spec", ["window:{}", "quantized:int8,window:{}"])
def test_a_window_that_shortens_no_layer_is_refused(spec, target):
    sliding = dataclasses.replace(target.config, windows=(5, 9, 9))
    mixed = dataclasses.replace(target.config, windows=(5, None, 9))
    check_draft(spec.format(8), sliding)
    check_draft(spec.format(9), mixed)
    check_draft(spec.format(9), target.config)
    with pytest.raises(UserError, match="9 keys shorten nothing"):
        check_draft(spec.format(9), sliding)


def test_a_windowed_model_gives_the_same_logits_in_one_pass_and_step_by_step():
    model = tiny(0, 14, **BASE)
    windowed = WindowedTarget(model, 9)
    text = torch.randint(BASE["vocab_size"], (1, 60), generator=torch.Generator().manual_seed(1))
    together = windowed(text, torch.arange(60))
    caches = windowed.make_caches(1, 96)
    for n in range(60):
        alone = windowed(text[:, n : n + 1], torch.tensor([n]), caches)
        torch.testing.assert_close(alone[0, 0], together[0, n], atol=1e-4, rtol=1e-4)
    # The control: without the first keys it is another model.
    assert (replace_windows(model, 9)(text, torch.arange(60)) - together).abs().max() > 1e-2


def replace_windows(model: Transformer, window: int) -> Transformer:
    """The model with sliding windows and nothing else."""
    other = layer_subset(model, range(model.config.n_layers))
    other.windows = (window,) * model.config.n_layers
    return other


@pytest.mark.parametrize("spec", ["layers:0-1", "window:64", "quantized:int8", "ngram", "suffix"])
@pytest.mark.parametrize("options", [{"quantize": "int8"}, {"sharded": True}])
def test_a_draft_without_a_folder_takes_no_options_of_one(spec, options, target):
    with pytest.raises(UserError, match=f"--draft {spec}: only a draft with a folder of its own"):
        load_drafter(spec, target, None, **options)
