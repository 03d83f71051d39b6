"""scripts/distill/draft_kinds.py: a kind learns the distributions that its drafter draws from, by
the float64 twins; the twins and the program read the folders that it writes."""

import argparse
import json
import math
import warnings

import pytest
import torch
from conftest import ROOT, config_json
from reference import logits
from safetensors.torch import load_file, save_file
from test_deepspec import DSPARK, DSparkTwin, ForgetsTheDraw
from test_dflash import DFlashTwin
from test_drafts import D, EagleTwin, load_draft_model, pard_twin
from test_mtp import TABLE, HeadTwin
from test_speculative import LONG_PROMPT, TAIL, joint_law, p_value, rows_of, sequences, tiny

from cli.flags import parse_args
from cli.main import main as run_args
from cli.quantize import main as quantize
from decoding.costs import Costs
from decoding.sampling import Sampling
from drafts.dflash import DFlashDraft
from loading.checkpoint import load_model
from loading.files import require_json
from scripts.distill import distill_draft
from scripts.distill.distill_draft import (
    acceptance,
    adamw,
    add_gradients,
    distill,
    draft_config,
    init_weights,
    update,
)
from scripts.distill.distill_draft import parse_args as distill_args
from scripts.distill.distill_flags import DRAFT_KINDS
from scripts.distill.draft_kinds import KINDS, DSpark, tokens_per_round

T, DEPTH = 16, 4


def trained_head_twin(folder, source) -> HeadTwin:
    """Of a folder with nothing but a head, for a target at `source`."""
    tensors = load_file(source / "model.safetensors") | load_file(folder / "model.safetensors")
    save_file(tensors, folder / "model.safetensors")
    return HeadTwin(TABLE["glm4_moe"], folder)


def test_the_flag_names_every_kind():
    assert tuple(KINDS) == DRAFT_KINDS


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "name, vocab",
    [
        ("pard", None),
        ("eagle3", None),
        ("eagle3", 40),
        ("mtp", None),
        ("dflash", None),
        ("dspark", None),
    ],
)
def test_what_is_learned_is_what_is_drafted(name, vocab, folder_of, tmp_path):
    """Every state that a row gives, at every position of a draft, against the twin's distribution
    there."""
    source = folder_of("llama-3.1")
    target = load_model(source, dtype=torch.float32)
    flags = argparse.Namespace(
        kind=name,
        dim=D,
        heads=4,
        kv_heads=2,
        ffn=96,
        layers=1 + name.startswith("d"),
        from_layers=None,
    )
    chosen = {"vocab": vocab} if vocab else {}
    kind = KINDS[name](draft_config(config_json(source), flags), target.config, DEPTH, **chosen)
    if vocab:
        kind.choose_ids(torch.arange(30, 130, 3).repeat(2))
    draft = kind.new_model()
    init_weights(draft, 3)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    kind.bind(draft, target)
    (tmp_path / "draft").mkdir()
    kind.save(draft, tmp_path / "draft")
    if name == "pard":
        num_ids = target.config.vocab_size
        hf = config_json(tmp_path / "draft")
        assert (hf["vocab_size"], hf["pard_token"]) == (num_ids + 1, num_ids), (
            "the mask is the one token more"
        )
    twins = {
        "pard": lambda *_: pard_twin,
        "eagle3": EagleTwin,
        "mtp": trained_head_twin,
        "dflash": DFlashTwin,
        "dspark": DSparkTwin,
    }
    twin = twins[name](tmp_path / "draft", source)
    row = torch.randint(0, 131, (T,), generator=torch.Generator().manual_seed(1)).tolist()
    want_p = logits(config_json(source), load_file(source / "model.safetensors"), row).softmax(-1)
    draft.requires_grad_(False)
    h, learned = kind.states(draft, target, torch.tensor([row]), None)
    p_all = target.head(h)[0, :, :131].softmax(-1).double()
    q_all = torch.zeros(learned.states.size(1), 131, dtype=torch.float64)
    ids = kind.ids if name == "eagle3" else torch.arange(131)
    q_all[:, ids] = kind.logits(draft, learned.states)[0].softmax(-1).double()
    assert (kind.select(p_all) == p_all[:, ids]).all() and int(learned.position.max()) == DEPTH - 1
    at = torch.linspace(0, T - DEPTH, T // (DEPTH - 1)).long().tolist()
    for i in range(DEPTH):
        p, q = p_all[learned.at[learned.position == i]], q_all[learned.position == i]
        if name in ("dflash", "dspark"):
            width = DEPTH + (name == "dflash")
            last_tokens = torch.linspace(1, T - DEPTH, T // width).long().tolist()
        elif name == "pard":
            last_tokens = range(T) if i == 0 else at  # the last decided token of each state
        else:
            last_tokens = range(1, T - i)
        assert len(last_tokens) == len(q)
        for number, last in enumerate(last_tokens):
            assert (p[number] - want_p[last + i]).abs().max() < 1e-4
            drafted = [*row[last + 1 : last + 1 + i], 0]
            want = twin(tmp_path / "draft", row[: last + 1], drafted, Sampling(1))[i]
            want = want[:131] / want[:131].sum()  # a mask is never drafted
            assert (q[number] - want).abs().max() < 1e-4


@pytest.mark.parametrize("name, depth", [("dflash", DEPTH), ("dspark", DEPTH), ("dspark", 1)])
def test_training_gives_norms_one_dtype(name, depth, folder_of):
    """torch warns of a norm whose input and weight differ: autocast's bfloat16 meets float32
    weights in a block."""
    source = folder_of("llama-3.1")
    target = load_model(source, dtype=torch.bfloat16)
    flags = argparse.Namespace(
        kind=name, dim=D, heads=4, kv_heads=2, ffn=96, layers=1, from_layers=None
    )
    kind = KINDS[name](draft_config(config_json(source), flags), target.config, depth)
    draft = kind.new_model()
    kind.bind(draft, target)
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            add_gradients(kind, draft, target, torch.arange(T + 1)[None])
    finally:
        torch.set_warn_always(False)


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_the_first_tokens_of_a_block_count_most(name, folder_of):
    """The loss of a window, by hand: each block's tokens, weighted exp(-(k - 1) / gamma), gamma
    half a block. DFlash learns KL. DSpark learns 0.9 of the L1 distance, which is twice the
    probability of rejection, and 0.1 of KL; its embedding and its head stay the target's."""
    source = folder_of("llama-3.1")
    target = load_model(source, dtype=torch.float32)
    flags = argparse.Namespace(
        kind=name, dim=D, heads=4, kv_heads=2, ffn=96, layers=1, from_layers=None
    )
    kind = KINDS[name](draft_config(config_json(source), flags), target.config, 7)
    kind.choose_ids(torch.cat((torch.arange(3, 131), torch.tensor([0, 2]))))
    mask = kind.hf.get("dflash_config", kind.hf)["mask_token_id"]
    assert mask == 1 == kind.dflash.mask, "the one token that the text lacks"
    draft = kind.new_model()
    init_weights(draft, 3)
    kind.bind(draft, target)
    rows = torch.randint(0, 131, (2, 41), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        h, learned = kind.states(draft, target, rows[:, :-1], 5)
        p, q = (
            target.head(h).double().softmax(-1),
            kind.logits(draft, learned.states).double().softmax(-1),
        )
    losses, weights = [], []
    for n, (at, k) in enumerate(zip(learned.at.tolist(), learned.position.tolist())):
        loss = (p[:, at] * (p[:, at] / q[:, n]).log()).sum(-1)
        if name == "dspark":
            rejection = 1 - torch.minimum(p[:, at], q[:, n]).sum(-1)
            loss = 0.9 * 2 * rejection + 0.1 * loss
        losses += [loss.mean().item()]
        weights += [math.exp(-k / 4)]
    expected = sum(w * x for w, x in zip(weights, losses)) / sum(weights)
    assert len({*learned.at.tolist()}) > 10 and sum(losses) / len(losses) != pytest.approx(
        expected, rel=1e-4
    )
    assert add_gradients(kind, draft, target, rows, 5) == pytest.approx(expected, rel=1e-4)
    frozen = {parameter for parameter, x in draft.named_parameters() if x.grad is None}
    assert frozen == ({"embed.weight", "lm_head.weight"} if name == "dspark" else set())
    assert all(x.grad.abs().max() > 0 for x in draft.parameters() if x.grad is not None)
    if name == "dspark":
        assert kind.hf["target_layer_ids"] == [0, 1], "DeepSpec's model takes no layer twice"
        assert torch.equal(draft.embed.weight, target.embed.weight)
        assert (draft.lm_head.weight - target.lm_head.weight).abs().max() < 1e-6


MARKED = [pytest.param(name, marks=pytest.mark.attack) for name in KINDS if name != "mtp"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mtp", *MARKED[1:]])
def test_two_steps_end_in_a_folder_that_drafts(name, tmp_path, capsys):
    flags = [
        "--kind",
        name,
        "--target",
        ROOT / "checkpoints" / "demo",
        "--sampled",
        600,
        "--context",
        32,
    ]
    flags += [
        "--heldout",
        64,
        "--steps",
        2,
        "--eval_every",
        1,
        "--batch",
        2,
        "--depth",
        3,
        "--device",
        "cpu",
    ]
    flags += ["--output", tmp_path / "d", "--work", tmp_path / "work"]
    flags += {
        "pard": ["--layers", 1, "--dim", 64],
        "mtp": [],
        "eagle3": ["--draft_vocab", 300],
        "dflash": ["--layers", 2],
        "dspark": ["--layers", 2],
    }[name]
    result = distill(distill_args([str(flag) for flag in flags]))
    evaluations = require_json(tmp_path / "d" / "distill.json")["evaluations"]
    assert result["steps"] == 2 and all(
        len(point["alpha_by_position"]) == 3 for point in evaluations
    )
    common = [
        "--max_new_tokens",
        "30",
        "--temperature",
        "0",
        "--json",
        "--device",
        "cpu",
        "--dtype",
        "float32",
    ]
    rows = []
    draft_flags = ["--draft_checkpoint", str(tmp_path / "d")]
    if name == "mtp":
        draft_flags = ["--draft", f"mtp:{tmp_path / 'd'}"]
    for draft in ([], [*draft_flags, "--speculate_k", "3"]):
        capsys.readouterr()
        run_args(parse_args(common + draft))
        rows.append(json.loads(capsys.readouterr().out))
    assert rows[0]["tokens"] == rows[1]["tokens"] and rows[1]["speculative"]["drafted"] > 0


DEMO = ROOT / "checkpoints" / "demo"
OPENINGS = ["One day, the little dog", "Once upon a time", "Lily and Ben were", "The sun was"]


@pytest.fixture(scope="module")
def trained_dspark(tmp_path_factory):
    """A folder from a short training on what the demo writes."""
    folder = tmp_path_factory.mktemp("dspark")
    flags = {
        "kind": "dspark",
        "target": DEMO,
        "sampled": 12_000,
        "depth": 4,
        "context": 64,
        "heldout": 1000,
        "steps": 200,
        "lr": 0.006,
        "eval_every": 100,
        "device": "cpu",
        "output": folder / "draft",
        "work": folder / "work",
    }
    arguments = [str(part) for name, value in flags.items() for part in (f"--{name}", value)]
    distill(distill_args(arguments))
    return folder / "draft"


@pytest.mark.long
def test_a_dspark_folder_has_the_published_layout(trained_dspark):
    """The keys that DeepSpec's build_draft_config adds, and the tensors of its Qwen3DSparkModel."""
    hf = config_json(trained_dspark)
    added = set(DSPARK) - {"rope_theta", "confidence_head_with_markov"}
    assert added <= set(hf) and "dflash_config" not in hf
    assert hf["target_layer_ids"] == [1, 2, 3] and hf["block_size"] == 4
    layer = "layers.0."
    linears = [f"self_attn.{name}_proj" for name in "qkvo"]
    linears += [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    norms = ["input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"]
    names = ["embed_tokens", "lm_head", "fc", "hidden_norm", "norm"]
    names += ["markov_head.markov_w1", "markov_head.markov_w2"]
    names += [layer + name for name in linears + norms]
    tensors = load_file(trained_dspark / "model.safetensors")
    assert set(tensors) == {f"{name}.weight" for name in names}
    embedding = load_file(DEMO / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(tensors["embed_tokens.weight"], embedding)
    assert torch.equal(tensors["lm_head.weight"], embedding), "the demo's head is its embedding"


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_short_training_gives_more_than_one_token_in_three(temperature, trained_dspark, capsys):
    """On stories that the training did not see; greedy text is plain text."""
    common = f"--temperature {temperature} --seed 10000 --max_new_tokens 80 --device cpu"
    common += " --dtype float32 --json"
    drafting = ["--draft_checkpoint", str(trained_dspark), "--speculate_k", "4"]
    texts = []
    for draft in ([], drafting):
        answers = []
        for opening in OPENINGS:
            capsys.readouterr()
            run_args(parse_args([*common.split(), "--prompt", opening, *draft]))
            answers.append(json.loads(capsys.readouterr().out))
        texts.append([answer["tokens"] for answer in answers])
    reports = [answer["speculative"] for answer in answers]
    num_rounds = sum(report["rounds"] for report in reports)
    num_tokens = sum(report["rounds"] * report["tokens_per_round"] for report in reports)
    assert num_rounds > 100 and num_tokens / num_rounds > 1.3
    assert temperature == 1 or texts[0] == texts[1]


def tiny_dspark_kind(target) -> DSpark:
    """Of one layer, for a `tiny` target of three."""
    config = target.config
    hf = {
        "hidden_size": config.dim,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_length,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
    }
    return DSpark(hf, config, 4)


@pytest.mark.long
def test_a_trained_dspark_keeps_the_law(tmp_path):
    """Text drawn with a draft that has learned its target has the target's joint distribution; a
    draft that reports q without the token that it has drawn before is caught."""
    target = tiny(3, n_layers=3)
    kind = tiny_dspark_kind(target)
    draft = kind.new_model()
    init_weights(draft, 3)
    kind.bind(draft, target)
    prompts = [[first, second] for first in range(4) for second in range(4)] * 4
    rows = torch.tensor(rows_of(target, prompts, sampling=Sampling(1), max_new_tokens=17))
    untrained = acceptance(kind, draft, target, rows, [1.0])[1.0]
    optimizer = adamw(draft)
    for step in range(150):
        add_gradients(kind, draft, target, rows, step)
        update(draft, optimizer, 0.01)
    trained = acceptance(kind, draft, target, rows, [1.0])[1.0]
    assert all(after > before + 0.1 for before, after in zip(untrained, trained))
    kind.save(draft, tmp_path)
    model = load_draft_model(tmp_path, target)
    law = joint_law(target, LONG_PROMPT, TAIL, Sampling(1))
    counts = sequences(target, DFlashDraft(model), Sampling(1), 4, runs=2)
    assert p_value(counts, law) > 1e-6
    counts = sequences(target, ForgetsTheDraw(model), Sampling(1), 4, runs=1)
    assert p_value(counts, law) < 1e-12


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["model", "pard"])
def test_all_layers_of_a_target_begin_as_the_target(name, tmp_path, folder_of, monkeypatch):
    """Before the first step such a draft is the target, so that its first token is accepted always,
    as far as bfloat16 goes; and of a quantized target it has the weights that the codes stand
    for."""
    monkeypatch.setattr(
        distill_draft, "measure_costs", lambda *_: Costs(1.0, {1: 0.1, 2: 0.2}, {1: 1.1, 2: 1.2})
    )
    source, text = tmp_path / "target", tmp_path / "text"
    quantize(
        [
            "--checkpoint",
            str(ROOT / "checkpoints" / "demo"),
            "--output",
            str(source),
            "--scheme",
            "int8",
        ]
    )
    text.write_text((ROOT / "checkpoints" / "stories.txt").read_text())
    flags = [
        "--kind",
        name,
        "--target",
        source,
        "--text",
        text,
        "--context",
        32,
        "--heldout",
        64,
        "--depth",
        2,
    ]
    flags += [
        "--steps",
        1,
        "--batch",
        1,
        "--device",
        "cpu",
        "--output",
        tmp_path / "d",
        "--work",
        tmp_path / "w",
    ]
    distill(distill_args([str(flag) for flag in (*flags, "--from_layers", "0-5")]))
    first = require_json(tmp_path / "d" / "distill.json")["evaluations"][0]
    assert first["step"] == 0 and first.get("alpha_by_position", [first["alpha"]])[0] > 0.95
    other = [*flags[:-3], tmp_path / "d2", "--work", tmp_path / "w2", "--from_layers"]
    for wrong, message in (("0-6", "0 to 5"), ("0-5", "--from_layers takes")):
        extra = [] if wrong == "0-6" else ["--dim", "64"]
        with pytest.raises(ValueError, match=message):
            distill(distill_args([str(flag) for flag in (*other, wrong, *extra)]))


def test_tokens_of_a_round_by_hand():
    assert tokens_per_round([0.5, 0.2], 3) == pytest.approx(1 + 0.5 + 0.1 + 0.02)
    assert tokens_per_round([0.8], 2) == pytest.approx(1 + 0.8 + 0.64)
