"""drafts/dflash.py against a float64 twin, written from the paper and the keys of the published
folders.

The twin keeps no cache: for every round it computes context and block anew from the text. It must
give the distributions that tokens were drawn from, in rounds of any length with any number
accepted; broken drafters must not.
"""

import copy
import json
import math

import pytest
import torch
from conftest import config_json, in_context
from reference import angles, logits, norm, rotate, swiglu
from safetensors.torch import load_file
from test_drafts import (
    PROMPTS,
    D,
    V,
    distance,
    load_draft_model,
    neighbours_first,
    recorded,
    tiny_dflash,
    written,
)
from test_speculative import rows_of, tiny

from cli.flags import parse_args
from cli.main import main as run_args
from decoding.draft_length import DraftLength
from decoding.engine import Engine
from decoding.sampling import Sampling
from drafts.dflash import DFlashDraft, DFlashModel, dflash_of
from drafts.registry import check_draft, load_drafter
from loading.checkpoint import load_model
from loading.draft_types import draft_type_of
from model import Transformer

BLOCK, MASK, HEADS, KV_HEADS, E = 6, V - 1, 4, 2, 24
# ------------------------------------------------------------------------------------ folder, twin

PUBLISHED = {
    "architectures": ["DFlashDraftModel"],
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
    "num_target_layers": 3,
    "block_size": BLOCK,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 1]},
    "attention_bias": False,
    "layer_types": ["full_attention"] * 2,
    "use_sliding_window": False,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
}
SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 7,
}
VARIANTS = {
    "published": {},
    "one layer": {
        "num_hidden_layers": 1,
        "layer_types": None,
        "block_size": None,
        "dflash_config": {
            "mask_token_id": MASK,
            "block_size": BLOCK,
            "target_layer_ids": [1],
        },
    },
    "windows": SLIDING,
}


def dflash_tensors(
    num_layers: int, num_hidden_states: int, scale: float = 0.15
) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(11)
    matrix = lambda *shape: scale * torch.randn(*shape, generator=g)  # noqa: E731
    vector = lambda n: 1 + 0.2 * torch.randn(n, generator=g)  # noqa: E731
    tensors = {
        "fc.weight": matrix(D, num_hidden_states * D),
        "hidden_norm.weight": vector(D),
        "norm.weight": vector(D),
    }
    for i in range(num_layers):
        tensors |= {
            f"layers.{i}.{name}.weight": x
            for name, x in {
                "input_layernorm": vector(D),
                "post_attention_layernorm": vector(D),
                "self_attn.q_proj": matrix(HEADS * E, D),
                "self_attn.k_proj": matrix(KV_HEADS * E, D),
                "self_attn.v_proj": matrix(KV_HEADS * E, D),
                "self_attn.o_proj": matrix(D, HEADS * E),
                "self_attn.q_norm": vector(E),
                "self_attn.k_norm": vector(E),
                "mlp.gate_proj": matrix(96, D),
                "mlp.up_proj": matrix(96, D),
                "mlp.down_proj": matrix(D, 96),
            }.items()
        }
    return tensors


def dflash_folder(variant: str, folder):
    hf = {key: value for key, value in (PUBLISHED | VARIANTS[variant]).items() if value is not None}
    return written(
        folder, hf, dflash_tensors(hf["num_hidden_layers"], 1 if variant == "one layer" else 2)
    )


class DFlashTwin:
    """The paper's draft in float64, one head and one query at a time."""

    def __init__(self, folder, target):
        self.hf, self.target_hf = config_json(folder), config_json(target)
        self.w = {name: x.double() for name, x in load_file(folder / "model.safetensors").items()}
        self.target_w = {
            name: x.double() for name, x in load_file(target / "model.safetensors").items()
        }
        self.options = self.hf.get("dflash_config", self.hf)
        self.ids = self.options["target_layer_ids"]
        embed = self.target_w["model.embed_tokens.weight"]
        self.embed = self.w.get("embed_tokens.weight", embed)
        self.lm_head = self.w.get("lm_head.weight", self.target_w.get("lm_head.weight", embed))
        self.first = 1  # the block's position that draws the first token

    def __call__(
        self, folder, tokens: list[int], drafted: list[int], sampling: Sampling
    ) -> torch.Tensor:
        """(K, V)"""
        return sampling.probs(self.logits(tokens)[: len(drafted)])

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """(block_size - first, V): what a block after these decided tokens predicts."""
        w, entering, n = self.w, [], len(tokens) - 1
        H, G, E, eps = (
            self.hf[f"{key}"]
            for key in ("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
        )
        W, mask = (
            self.hf.get("block_size") or self.options["block_size"],
            self.options["mask_token_id"],
        )
        logits(self.target_hf, self.target_w, tokens, entering)
        # what leaves layer i
        fused = torch.cat([entering[i + 1][:n] for i in self.ids], -1) @ w["fc.weight"].T
        context = norm(fused, w["hidden_norm.weight"], eps)
        x = self.embed[[tokens[-1], *[mask] * (W - 1)]]
        angle, scale = angles(self.hf, E, n + W)
        for layer in range(self.hf["num_hidden_layers"]):
            p = f"layers.{layer}."
            slides = (self.hf.get("layer_types") or [""] * 9)[layer] == "sliding_attention"
            h = norm(x, w[p + "input_layernorm.weight"], eps)
            inputs, heads = torch.cat((context, h)), []
            q = h @ w[p + "self_attn.q_proj.weight"].T
            k, v = (inputs @ w[f"{p}self_attn.{c}_proj.weight"].T for c in "kv")
            for head in range(H):
                group = head // (H // G)
                qh = norm(q[:, head * E :][:, :E], w[p + "self_attn.q_norm.weight"], eps)
                kh = norm(k[:, group * E :][:, :E], w[p + "self_attn.k_norm.weight"], eps)
                qh, kh, vh = (
                    rotate(qh, angle[n:], scale),
                    rotate(kh, angle, scale),
                    v[:, group * E :][:, :E],
                )
                rows = []
                for i in range(W):
                    seen = (
                        slice(max(0, n + i + 1 - self.hf["sliding_window"]), n + i + 1)
                        if slides
                        else slice(None)
                    )
                    rows.append((kh[seen] @ qh[i] / math.sqrt(E)).softmax(0) @ vh[seen])
                heads.append(torch.stack(rows))
            x = x + torch.cat(heads, -1) @ w[p + "self_attn.o_proj.weight"].T
            h = norm(x, w[p + "post_attention_layernorm.weight"], eps)
            gate, up = (h @ w[f"{p}mlp.{c}_proj.weight"].T for c in ("gate", "up"))
            x = x + swiglu(gate, up) @ w[p + "mlp.down_proj.weight"].T
        return norm(x, w["norm.weight"], eps)[self.first :] @ self.lm_head.T


@pytest.fixture(scope="module")
def target_folder(folder_of):
    return folder_of("llama-3.1")


@pytest.fixture(scope="module")
def target(target_folder):
    return load_model(target_folder, dtype=torch.float32)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("plain", [0, 34])
@pytest.mark.parametrize("variant", VARIANTS)
def test_dflash_is_its_twin(variant, plain, target, target_folder, tmp_path):
    folder = dflash_folder(variant, tmp_path / "draft")
    drafter = recorded(DFlashDraft)(load_draft_model(folder, target))
    worst, accepted = distance(target, drafter, DFlashTwin(folder, target_folder), folder, plain)
    assert worst < 1e-4 and len(accepted) > 2


def drawn(*shape: int) -> torch.Tensor:
    return 0.4 * torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("names", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]])
def test_an_embedding_and_a_head_of_its_own(names, target, target_folder, tmp_path):
    """Such as z-lab/MiniMax-M2.5-DFlash's embedding; what is not stored is the target's."""
    own = {f"{name}.weight": drawn(V, D) for name in names}
    folder = written(tmp_path / "draft", PUBLISHED, dflash_tensors(2, 2) | own)
    drafter = recorded(DFlashDraft)(load_draft_model(folder, target))
    worst, _ = distance(target, drafter, DFlashTwin(folder, target_folder), folder, 0)
    assert worst < 1e-4


def test_interleaved_rope_is_computed(target, target_folder, tmp_path):
    tensors = dflash_tensors(2, 2)
    twin_tensors = tensors
    for layer in ("layers.0", "layers.1"):
        twin_tensors = neighbours_first(twin_tensors, layer, E)
    twin_folder = written(tmp_path / "twin", PUBLISHED, twin_tensors)
    folder = written(tmp_path / "draft", PUBLISHED | {"is_neox_style": False}, tensors)
    drafter = recorded(DFlashDraft)(load_draft_model(folder, target))
    worst, _ = distance(target, drafter, DFlashTwin(twin_folder, target_folder), folder, 0)
    assert worst < 1e-4
    wrong = DFlashTwin(folder, target_folder)  # the control: the other pairs
    assert distance(target, drafter, wrong, folder, 0)[0] > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma-3", "granite"])
def test_a_lent_embedding_and_head_bring_their_scales(family, folder_of, tmp_path):
    """Gemma 3 multiplies embeddings by the root of its size, Granite embeddings and logits by
    numbers of config.json."""
    source = folder_of(family)
    hf = config_json(source)
    target = load_model(source, dtype=torch.float32)
    changes = {"num_target_layers": target.config.n_layers}
    folder = written(tmp_path / "draft", PUBLISHED | changes, dflash_tensors(2, 2))
    drafter = recorded(DFlashDraft)(load_draft_model(folder, target))
    twin = DFlashTwin(folder, source)
    wrong = DFlashTwin(folder, source)
    twin.embed = twin.embed * (math.sqrt(D) if "gemma" in family else hf["embedding_multiplier"])
    twin.lm_head = twin.lm_head / hf.get("logits_scaling", 1)
    assert distance(target, drafter, twin, folder, 0)[0] < 1e-4
    assert distance(target, drafter, wrong, folder, 0)[0] > 1e-3  # the control: no scales


LAYER_KEYS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "hidden_act",
    "rope_theta",
    "layer_types",
)
# github.com/vllm-project/speculators: ids of hidden states, of which 0 is the embedding.
SPECULATORS = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "transformer_layer_config": {key: PUBLISHED[key] for key in LAYER_KEYS},
    "draft_vocab_size": V,
    "block_size": BLOCK,
    "target_hidden_size": None,
    "aux_hidden_state_layer_ids": [1, 2],
    "mask_token_id": MASK,
    "sliding_window_non_causal": False,
    "projector_type": "dflash",
    "sample_from_anchor": False,
    "speculators_config": {"algorithm": "dflash", "proposal_methods": [], "verifier": {}},
}


class FewTokensTwin(DFlashTwin):
    """With a head of some of the target's tokens."""

    def logits(self, tokens: list[int]) -> torch.Tensor:
        few = super().logits(tokens)
        logits = torch.full((len(few), V), -math.inf, dtype=torch.float64)
        logits[:, self.w["d2t"].long() + torch.arange(few.size(-1))] = few
        return logits


@pytest.mark.one_in(3)
@pytest.mark.parametrize("anchor", [False, True])
@pytest.mark.parametrize("draft_vocab", [V, 40])
def test_speculators_layout_is_its_twin(draft_vocab, anchor, target, target_folder, tmp_path):
    """The same draft as in z-lab's layout, with a head of its own for few tokens; with
    sample_from_anchor the last decided token draws too."""
    tensors = dflash_tensors(2, 2)
    twin_class = DFlashTwin
    if draft_vocab < V:
        ids = 3 * torch.arange(draft_vocab) + 1
        tensors |= {
            "lm_head.weight": drawn(draft_vocab, D),
            "d2t": ids - torch.arange(draft_vocab),
            "t2d": torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True),
        }
        twin_class = FewTokensTwin
    hf = SPECULATORS | {"draft_vocab_size": draft_vocab, "sample_from_anchor": anchor}
    assert draft_type_of(hf) == "dflash"
    folder = written(tmp_path / "draft", hf, tensors)
    twin = twin_class(written(tmp_path / "twin", PUBLISHED, tensors), target_folder)
    twin.first = int(not anchor)
    drafter = recorded(DFlashDraft)(load_draft_model(folder, target))
    assert drafter.max_k == BLOCK - twin.first
    worst, _ = distance(target, drafter, twin, folder, 0)
    assert worst < 1e-4


@pytest.mark.parametrize(
    "change, message",
    [
        ({"projector_type": "domino"}, "projector_type = 'domino' is not supported"),
        ({"sliding_window_non_causal": True}, "sliding_window_non_causal = True is not supported"),
        ({"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids = None must be layers"),
        ({"aux_hidden_state_layer_ids": [3]}, r"aux_hidden_state_layer_ids = \[3\] must be layers"),
        ({"target_hidden_size": 32}, "target_hidden_size = 32 is of another target"),
        ({"mask_token_id": None}, "mask_token_id = None must be a token's id"),
        (
            {"transformer_layer_config": {"model_type": "llama"}},
            "transformer_layer_config.model_type = 'llama' is not supported; supported: 'qwen3'",
        ),
        ({"speculators_model_type": "dspark"}, "speculators_model_type = 'dspark' makes it"),
        ({"transformer_layer_config": "x"}, "transformer_layer_config = 'x' must be an object"),
    ],
)
def test_what_speculators_config_cannot_mean_is_refused(change, message, target, tmp_path):
    folder = written(tmp_path / "draft", SPECULATORS | change, dflash_tensors(2, 2))
    with pytest.raises(ValueError, match=message):
        check_draft(folder, target.config)


def test_a_model_type_may_be_null(target):
    layer = SPECULATORS["transformer_layer_config"]
    hf = SPECULATORS | {"transformer_layer_config": layer | {"model_type": None}}
    assert dflash_of(hf, target.config) == dflash_of(SPECULATORS, target.config)


@pytest.mark.attack
def test_blocks_at_the_end_of_the_context(target, target_folder, tmp_path):
    """A block reaches beyond the last position of its engine, and beside it stands a row that has
    ended."""
    folder = written(
        tmp_path / "draft", PUBLISHED | {"max_position_embeddings": 600}, dflash_tensors(2, 2)
    )
    drafter, twin = (
        recorded(DFlashDraft)(load_draft_model(folder, target)),
        DFlashTwin(folder, target_folder),
    )
    S = Engine(target, 2, 31).runner.S  # rounded up
    target = in_context(copy.copy(target), S)
    engine, new = Engine(target, 2, S - 1, drafter=drafter, speculate_k=1), S - 1 - len(PROMPTS[0])
    rows = rows_of(
        target, PROMPTS[:2], engine=engine, max_new_tokens=[new, 2], sampling=Sampling(1.3)
    )
    assert engine.runner.S == S and [len(row) for row in rows] == [new, 2]
    late_rounds = [round for round in drafter.seen if S - BLOCK + 1 < len(round[0][0]) < S]
    assert late_rounds
    for before, tokens, probs, _ in late_rounds:
        assert (
            probs[0].double() - twin(folder, before[0], tokens[0], Sampling(1.3))
        ).abs().max() < 1e-4


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "broken", ["causal", "layer ids", "context normed", "masks", "stale context"]
)
def test_a_broken_dflash_is_caught(broken, target, target_folder, tmp_path, monkeypatch):
    right = dflash_folder("published", tmp_path / "right")
    model = load_draft_model(right, target)
    drafter = recorded(DFlashDraft)(model)
    if broken == "causal":
        monkeypatch.setattr(DFlashModel, "visible_by_window", Transformer.visible_by_window)
    elif broken == "layer ids":  # what enters a layer instead of what leaves it
        model.state_ids = (2, 1)
    elif broken == "context normed":
        keys_values = DFlashModel.keys_values
        monkeypatch.setattr(
            DFlashModel,
            "keys_values",
            lambda self, context, *rest: keys_values(
                self, self.layers[0].attention_norm(context), *rest
            ),
        )
    elif broken == "masks":
        model.dflash = model.dflash._replace(mask=MASK - 1)
    else:  # too few positions are written, so that blocks' keys stay
        setup = DFlashDraft.setup
        monkeypatch.setattr(
            DFlashDraft,
            "setup",
            lambda self, *a: (setup(self, *a), vars(self).update(num_first_inputs=2)),
        )
    assert distance(target, drafter, DFlashTwin(right, target_folder), right)[0] > 1e-3


# ---------------------------------------------------------------------------------------- engines


def a_pair(windows: tuple = (None, None)) -> tuple[Transformer, DFlashModel]:
    target = tiny(5, vocab_size=61, n_layers=3, max_seq_length=96)
    return target, tiny_dflash(target, 0.3, windows)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("windows", [(9, None), (9, 9)])
def test_greedy_equals_plain_greedy_with_windows(windows):
    target, draft = a_pair(windows)
    want = rows_of(target, PROMPTS, max_new_tokens=40)
    assert rows_of(target, PROMPTS, drafter=DFlashDraft(draft), max_new_tokens=40) == want
    full = rows_of(target, [PROMPTS[1]], max_new_tokens=87)  # to the context's end
    assert rows_of(target, [PROMPTS[1]], drafter=DFlashDraft(draft), max_new_tokens=87) == full


@pytest.mark.compiled
@pytest.mark.long
def test_compiled_rounds_with_windows():
    target, draft = a_pair((9, None))
    want = rows_of(target, PROMPTS, max_new_tokens=40)
    engine = Engine(target, 4, 96, drafter=DFlashDraft(draft), speculate_k=3, compile=True)
    engine.warm_up("greedy")
    with torch.compiler.set_stance("fail_on_recompile"):
        assert rows_of(target, PROMPTS, engine=engine, max_new_tokens=40) == want


def test_auto_stays_within_the_block():
    """K above the block's width is refused with both numbers; `auto` chooses among those that
    fit."""
    target, draft = a_pair()
    with pytest.raises(ValueError, match="speculate_k = 6: this draft has at most 5 tokens"):
        Engine(target, 1, 96, drafter=DFlashDraft(draft), speculate_k=6)
    engine = Engine(target, 1, 96, drafter=DFlashDraft(draft), speculate_k="auto")
    engine.calibrate(Sampling(0), 20, rounds=1)
    costs = engine.planner.costs
    assert DraftLength("auto", costs).choose() <= 5 and set(costs.verify_s) == {
        1,
        2,
        3,
        5,
    }
    want = rows_of(target, PROMPTS[:1], max_new_tokens=40)
    assert rows_of(target, PROMPTS[:1], engine=engine, max_new_tokens=40) == want


# ---------------------------------------------------------------------------------------- folders


def test_a_folder_is_a_drafter(target, tmp_path):
    folder = dflash_folder("published", tmp_path / "draft")
    assert draft_type_of(PUBLISHED) == "dflash"
    check_draft(folder, target.config)
    for quantize in (None, "int8"):
        drafter = load_drafter(folder, target, None, quantize=quantize, pack=False)
        assert isinstance(drafter, DFlashDraft) and drafter.max_k == BLOCK - 1
    with pytest.raises(ValueError, match="--draft_tp sharded"):
        load_drafter(folder, target, None, sharded=True, pack=False)


def dflash_beside(target_folder, folder):
    """A folder for a target of D dimensions, three layers and any vocabulary."""
    sizes = {"vocab_size": config_json(target_folder)["vocab_size"]}
    return written(
        folder,
        {key: x for key, x in (PUBLISHED | sizes).items() if x is not None},
        dflash_tensors(2, 2),
    )


@pytest.mark.parametrize("options", [[], ["--draft_quantize", "int8"]], ids=["plain", "int8"])
def test_the_command_line_drafts_with_it(options, text_folder, tmp_path, capsys):
    draft = dflash_beside(text_folder, tmp_path / "draft")
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
    for flags in ([], ["--draft_checkpoint", draft, "--speculate_k", 3, *options]):
        run_args(parse_args([str(flag) for flag in (*common, *flags)]))
        rows.append(json.loads(capsys.readouterr().out))
    assert rows[0]["tokens"] == rows[1]["tokens"] and rows[1]["speculative"]["drafted"] > 0
    with pytest.raises(ValueError, match="speculate_k = 6: this draft has at most 5 tokens"):
        run_args(
            parse_args(
                [str(flag) for flag in (*common, "--draft_checkpoint", draft, "--speculate_k", 6)]
            )
        )


OPTIONS = PUBLISHED["dflash_config"]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hidden_size": 32}, "hidden_size = 32 is of another target: this one has 64"),
        ({"num_target_layers": 36}, "num_target_layers = 36 is of another target: this one has 3"),
        ({"vocab_size": 200}, "vocab_size = 200 is of another target: this one has 131"),
        ({"block_size": 65}, "block_size = 65 must be a whole number up to 64"),
        ({"block_size": None}, "block_size is missing"),
        ({"model_type": "llama"}, "model_type = 'llama' is not supported as a DFlash draft"),
        ({"dflash_config": 3}, "dflash_config = 3 must be an object"),
        (
            {"dflash_config": {}},
            "dflash_config.mask_token_id = None must be a token's id below vocab_size = 131",
        ),
        ({"dflash_config": OPTIONS | {"mask_token_id": 131}}, "dflash_config.mask_token_id = 131"),
        ({"dflash_config": OPTIONS | {"target_layer_ids": [0, 2]}}, "target_layer_ids = .* 0 to 1"),
        ({"dflash_config": OPTIONS | {"target_layer_ids": []}}, "target_layer_ids"),
        ({"dflash_config": OPTIONS | {"target_layer_ids": None}}, "target_layer_ids = None"),
        (
            {"dflash_config": OPTIONS | {"projector_type": "domino"}},
            "dflash_config.projector_type = 'domino'",
        ),
        (
            {"dflash_config": OPTIONS | {"causal": True}},
            "dflash_config.causal = True is not supported",
        ),
        ({"is_causal": True}, "is_causal = True is not supported"),
        (
            {"is_causal": False, **SLIDING},
            "is_causal = False is not supported: only layers with a window are causal",
        ),
        (
            {"dflash_config": OPTIONS | {"causal": False}, **SLIDING},
            "causal = False is not supported",
        ),
        ({"sample_from_anchor": True}, "sample_from_anchor = True"),
        ({"draft_vocab_size": 90}, "draft_vocab_size = 90"),
        ({"speculators_model_type": "dflash"}, "speculators_model_type = 'dflash'"),
        ({"markov_rank": 4}, "markov_rank = 4 makes it a DSpark draft"),
    ],
)
def test_a_config_that_cannot_be_honoured_is_refused(change, message, target, tmp_path):
    folder = written(tmp_path / "draft", PUBLISHED | change, dflash_tensors(2, 2))
    with pytest.raises(ValueError, match=message) as error:
        check_draft(folder, target.config)
    assert str(folder) in str(error.value)


def test_weights_for_another_target_are_not_read(target, tmp_path):
    folder = written(tmp_path / "draft", PUBLISHED | {"hidden_size": 32}, {})
    with pytest.raises(
        ValueError, match=f"^{folder / 'config.json'}: hidden_size = 32 is of another target"
    ):
        load_draft_model(folder, target)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"fc.weight": torch.zeros(D, D)}, "fc.weight is"),
        ({"embed_tokens.weight": torch.zeros(V, 3)}, "embed_tokens.weight is"),
        ({"d2t": torch.zeros(V)}, "unexpected: d2t"),
        ({"markov_head.weight": torch.zeros(2)}, "unexpected: markov_head.weight"),
        ({"layers.1.self_attn.k_norm.weight": None}, "missing: layers.1.self_attn.k_norm.weight"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(change, message, target, tmp_path):
    tensors = {name: x for name, x in (dflash_tensors(2, 2) | change).items() if x is not None}
    with pytest.raises(ValueError, match=message):
        load_draft_model(written(tmp_path / "draft", PUBLISHED, tensors), target)
