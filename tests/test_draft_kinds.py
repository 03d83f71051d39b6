"""scripts/draft_kinds.py: a kind learns the distributions that its drafter draws from, by the
float64 twins; the twins and the program read the folders that it writes."""

import argparse
import json
import math
import warnings

import pytest
import torch
from conftest import ROOT, config_json
from reference import logits
from safetensors.torch import load_file
from test_dflash import DFlashTwin
from test_drafts import D, EagleTwin, pard_twin

from cli.flags import parse_args
from cli.main import run as run_args
from cli.quantize import main as quantize
from decoding.sampling import Sampling
from loading.checkpoint import load_model
from loading.files import read_json
from scripts import distill_draft
from scripts.distill_draft import add_gradients, distill, draft_config, init_weights
from scripts.distill_draft import parse_args as distill_args
from scripts.draft_kinds import KINDS, tokens_per_round
from scripts.flags import DRAFT_KINDS
from speculative import Costs

T, DEPTH = 16, 4


def test_the_flag_names_every_kind():
    assert tuple(KINDS) == DRAFT_KINDS


@pytest.mark.parametrize(
    "name, vocab", [("pard", None), ("eagle3", None), ("eagle3", 40), ("dflash", None)]
)
def test_what_is_learned_is_what_is_drafted(name, vocab, folder_of, tmp_path):
    """Every state that a row gives, at every position of a draft, against the twin's distribution
    there."""
    source = folder_of("llama-3.1")
    target = load_model(source, dtype=torch.float32)
    flags = argparse.Namespace(
        dim=D, heads=4, kv_heads=2, ffn=96, layers=2 if name == "dflash" else 1, from_layers=None
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
    twin = {"pard": lambda *_: pard_twin, "dflash": DFlashTwin}.get(name, EagleTwin)(
        tmp_path / "draft", source
    )
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
        if name == "dflash":
            last_tokens = torch.linspace(1, T - DEPTH, T // (DEPTH + 1)).long().tolist()
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


def test_training_gives_norms_one_dtype(folder_of):
    """torch warns of a norm whose input and weight differ: autocast's bfloat16 meets float32
    weights in a block."""
    source = folder_of("llama-3.1")
    target = load_model(source, dtype=torch.bfloat16)
    flags = argparse.Namespace(dim=D, heads=4, kv_heads=2, ffn=96, layers=1, from_layers=None)
    kind = KINDS["dflash"](draft_config(config_json(source), flags), target.config, DEPTH)
    draft = kind.new_model()
    kind.bind(draft, target)
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            add_gradients(kind, draft, target, torch.arange(T + 1)[None])
    finally:
        torch.set_warn_always(False)


def test_the_first_tokens_of_a_block_count_most(folder_of):
    """The loss of a window, by hand: KL of each block's tokens, weighted exp(-(k - 1) / gamma),
    gamma half a block."""
    source = folder_of("llama-3.1")
    target = load_model(source, dtype=torch.float32)
    flags = argparse.Namespace(dim=D, heads=4, kv_heads=2, ffn=96, layers=1, from_layers=None)
    kind = KINDS["dflash"](draft_config(config_json(source), flags), target.config, 7)
    kind.choose_ids(torch.cat((torch.arange(3, 131), torch.tensor([0, 2]))))
    assert kind.hf["dflash_config"]["mask_token_id"] == 1 == kind.dflash.mask, (
        "the one token that the text lacks"
    )
    draft = kind.new_model()
    init_weights(draft, 3)
    kind.bind(draft, target)
    rows = torch.randint(0, 131, (2, 41), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        h, learned = kind.states(draft, target, rows[:, :-1], 5)
        log_p, log_q = (
            target.head(h).log_softmax(-1),
            kind.logits(draft, learned.states).log_softmax(-1),
        )
    losses, weights = [], []
    for n, (at, k) in enumerate(zip(learned.at.tolist(), learned.position.tolist())):
        losses += [(log_p[:, at].exp() * (log_p[:, at] - log_q[:, n])).sum(-1).mean().item()]
        weights += [math.exp(-k / 4)]
    expected = sum(w * x for w, x in zip(weights, losses)) / sum(weights)
    assert len({*learned.at.tolist()}) > 10 and sum(losses) / len(losses) != pytest.approx(
        expected, rel=1e-4
    )
    assert add_gradients(kind, draft, target, rows, 5) == pytest.approx(expected, rel=1e-4)
    assert all(parameter.grad.abs().max() > 0 for parameter in draft.parameters())


@pytest.mark.attack
@pytest.mark.parametrize("name", ["pard", "eagle3", "dflash"])
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
        "eagle3": ["--draft_vocab", 300],
        "dflash": ["--layers", 2],
    }[name]
    result = distill(distill_args([str(flag) for flag in flags]))
    evaluations = read_json(tmp_path / "d" / "distill.json")["evaluations"]
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
    for draft in ([], ["--draft_checkpoint", str(tmp_path / "d"), "--speculate_k", "3"]):
        capsys.readouterr()
        run_args(parse_args(common + draft))
        rows.append(json.loads(capsys.readouterr().out))
    assert rows[0]["tokens"] == rows[1]["tokens"] and rows[1]["speculative"]["drafted"] > 0


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
    first = read_json(tmp_path / "d" / "distill.json")["evaluations"][0]
    assert first["step"] == 0 and first.get("alpha_by_position", [first["alpha"]])[0] > 0.95
    other = [*flags[:-3], tmp_path / "d2", "--work", tmp_path / "w2", "--from_layers"]
    for wrong, message in (("0-6", "0 to 5"), ("0-5", "--from_layers takes")):
        extra = [] if wrong == "0-6" else ["--dim", "64"]
        with pytest.raises(ValueError, match=message):
            distill(distill_args([str(flag) for flag in (*other, wrong, *extra)]))


def test_tokens_of_a_round_by_hand():
    assert tokens_per_round([0.5, 0.2], 3) == pytest.approx(1 + 0.5 + 0.1 + 0.02)
    assert tokens_per_round([0.8], 2) == pytest.approx(1 + 0.8 + 0.64)
