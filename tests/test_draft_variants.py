"""scripts.compare --variants, and the report's lines about low acceptance.

The oracle: heads that are constructed, so that they know the next tokens with one reading of their
files and, with any other, nothing. Whatever their config.json says, that reading is named.
"""

import json
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import changed_family, config_json
from test_dflash import dflash_folder
from test_mtp import head_folder
from test_speculative import rows_of, tiny

from cli.report import low_acceptance
from decoding.engine import Engine
from decoding.errors import UserError
from decoding.sampling import Sampling
from decoding.statistics import Timing
from drafts.base import Drafter
from drafts.registry import check_draft, load_drafter
from loading.checkpoint import load_model
from scripts import draft_variants
from scripts.compare import main
from scripts.distill.distill_draft import init_weights
from scripts.distill.draft_kinds import KINDS
from weights.walker import quantized_copy

V, D, L, K = 8, 32, 6, 3
PROMPTS = [[id] for id in range(V)]
SIGNS = torch.where(torch.arange(D) % 3 > 0, 1.0, -1.0)


def counting_target():
    """After each token comes the next id, and a layer's states depend on the token alone."""
    target = tiny(
        3,
        n_layers=L,
        dim=D,
        ffn_dim=48,
        windows=(1,) * L,
        vocab_size=V,
        max_seq_length=96,
        tie_embeddings=False,
    )
    for i, layer in enumerate(target.layers):  # each drowns what it reads
        layer.attention.out.weight.mul_(8**i)
        layer.ffn.down.weight.mul_(8**i)
    target.norm.weight.mul_(SIGNS)
    last = states_of(target)[-1]
    target.lm_head.weight.copy_(target.norm(last).roll(1, 0))
    return target


@torch.no_grad()
def states_of(target) -> list[torch.Tensor]:
    """The states 0 to L (V, D) of each token."""
    kind = SimpleNamespace(aux_layer_ids=range(L + 1))
    _, states = KINDS["eagle3"].target_states(kind, target, torch.arange(V)[:, None])
    return [x[:, 0] for x in states]


def settings_of(target, **keys) -> dict:
    config = target.config
    return {
        "model_type": config.family,
        "hidden_size": D,
        "intermediate_size": 48,
        "num_hidden_layers": L,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": V,
        "max_position_embeddings": 96,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        **keys,
    }


def without_a_block(kind):
    """A model of this kind whose attention and feed-forward add nothing."""
    draft = kind.new_model().requires_grad_(False)
    init_weights(draft, 3)
    draft.layers[0].attention.out.weight.zero_()
    draft.layers[0].ffn.down.weight.zero_()
    draft.norm.weight.copy_(SIGNS)
    return draft


def solve(inputs: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    """The weight (D, n) of a Linear from inputs (V, n) to outputs (V, D)."""
    weight = torch.linalg.lstsq(inputs.double(), outputs.double(), driver="gelsd").solution.T
    return weight.float()


def counting_eagle(target, folder, **keys):
    """Reads the states 2, 3 and 3, as its kind does for a target of six layers."""
    kind = KINDS["eagle3"](settings_of(target, num_hidden_layers=1), target.config, K)
    draft = without_a_block(kind)
    kind.bind(draft, target)
    draft.lm_head.weight.copy_(target.lm_head.weight)
    draft.layers[0].hidden_norm.weight.copy_(SIGNS)
    # The state before a token knows the token before it, and so the one after it.
    outputs = target.lm_head.weight.roll(-2, 0) * SIGNS
    states = states_of(target)
    draft.fc.weight.copy_(solve(torch.cat([states[i] for i in (2, 3, 3)], -1), outputs))
    return saved(kind, draft, folder, **keys)


def counting_mtp(target, folder, **keys):
    """Reads normed states of the target, and continues its own normed ones."""
    kind = KINDS["mtp"](settings_of(target), target.config, K)
    draft = without_a_block(kind)
    kind.bind(draft, target)
    rows = target.lm_head.weight
    inputs = torch.cat((draft.hnorm(target.norm(states_of(target)[L])), draft.hnorm(rows)))
    outputs = torch.cat((rows.roll(-2, 0), rows.roll(-1, 0))) * SIGNS
    draft.eh_proj.weight.zero_()
    draft.eh_proj.weight[:, D:] = solve(inputs, outputs)
    return f"mtp:{saved(kind, draft, folder, **keys)}"


def saved(kind, draft, folder, **keys):
    """`keys` replace those of config.json; None removes one."""
    folder.mkdir()
    kind.save(draft, folder)
    hf = {key: x for key, x in (config_json(folder) | keys).items() if x is not None}
    (folder / "config.json").write_text(json.dumps(hf))
    return folder


def measured(spec, target) -> dict:
    """What --variants gives for `target`, which has no tokenizer."""
    results = []
    variants = check_draft(spec, target.config).variants()
    draft_variants.check(variants, K)
    for settings, source in variants:
        engine = Engine(target, V, 60, drafter=source.load(target, None), speculate_k=K)
        timing = Timing()
        list(engine.generate(PROMPTS, timing=timing, sampling=Sampling(0), max_new_tokens=50))
        results.append(draft_variants.result_of(settings, timing))
    return draft_variants.judged(results)


@pytest.fixture(scope="module")
def target():
    with torch.no_grad():
        return counting_target()


STATES = '"target_hidden_states": [2, 3, 3]'
OUTER = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    "keys, is_read",
    [
        ({}, True),
        ({"target_hidden_states": [3, 4, 4]}, False),
        ({"target_hidden_states": None, OUTER: [1, 2, 2], "norm_before_residual": None}, True),
        ({"target_hidden_states": None, OUTER: [3, 4, 4]}, False),
        ({"target_hidden_states": None}, True),
        ({"target_hidden_states": [0, 5, 6]}, False),
    ],
)
def test_an_eagle_heads_own_states_are_named(keys, is_read, target, tmp_path):
    """Also without any hint, where the usual states are tried."""
    result = measured(counting_eagle(target, tmp_path / "d", norm_output=False, **keys), target)
    best = result["variants"][0]
    want = f'{STATES}, "norm_before_residual": false'
    assert result["trained_with"] == best["settings"] == want
    assert (result["as_read"] == want) == is_read
    assert best["first_acceptance"] == 1 > 2 * result["variants"][1]["first_acceptance"]


def test_a_suffix_draft_leaves_the_variants_of_the_other(target, tmp_path):
    spec = counting_eagle(target, tmp_path / "d")
    settings = [name for name, _ in check_draft(spec, target.config).variants()]
    both = check_draft(f"suffix,{spec}", target.config).variants()
    draft_variants.check(both, K)
    assert [name for name, _ in both] == settings


def test_a_switch_that_is_set_has_no_variants(target, tmp_path):
    keys = {"eagle_config": {"norm_before_residual": True}, "norm_output": False}
    spec = counting_eagle(target, tmp_path / "d", **keys)
    names = [settings for settings, _ in check_draft(spec, target.config).variants()]
    assert names == [f'"target_hidden_states": {ids}' for ids in ([2, 3, 3], [1, 2, 2], [3, 4, 4])]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("wrong", ["state_first", None, "reads_normed", "recycles_normed"])
def test_the_feeding_of_a_head_is_named(wrong, target, tmp_path):
    right = {"mtp_state_first": False, "mtp_reads_normed": True, "mtp_recycles_normed": True}
    keys = {} if wrong is None else {f"mtp_{wrong}": not right[f"mtp_{wrong}"]}
    result = measured(counting_mtp(target, tmp_path / "d", **keys), target)
    assert result["trained_with"] == json.dumps(right)[1:-1]
    assert result["as_read"] == json.dumps(right | keys)[1:-1]
    assert len(result["variants"]) == 8 and result["variants"][0]["tokens_per_round"] > K


def test_a_dflash_drafts_layers_are_shifted(folder_of, tmp_path):
    """The key of the variants goes before dflash_config's, which counts outputs."""
    target = load_model(folder_of("llama-3.1"), dtype=torch.float32)
    folder = dflash_folder("published", tmp_path / "d")
    variants = check_draft(folder, target.config).variants()
    ids = [i + 1 for i in config_json(folder)["dflash_config"]["target_layer_ids"]]
    read = [source.load(target, None).model.state_ids for _, source in variants]
    assert read == [
        tuple(json.loads(f"{{{name}}}")["target_hidden_states"]) for name, _ in variants
    ]
    assert read[0] == tuple(ids) and tuple(i - 1 for i in ids) in read and len(read) > 1


@pytest.mark.parametrize("spec", ["ngram", "layers:0-1", "suffix"])
def test_other_drafts_have_no_variants(spec, target):
    with pytest.raises(UserError, match="--a needs an EAGLE-3 or DFlash folder"):
        draft_variants.check(check_draft(spec, target.config).variants(), K)


def test_a_head_of_a_family_without_heads_says_how_it_is_fed(target, tmp_path):
    """Llama publishes none: a layout that happens to fit is no reason to read it."""
    spec = counting_mtp(target, tmp_path / "d", mtp_reads_normed=None)
    with pytest.raises(UserError, match=r"no MTP head of llama is known.* mtp_reads_normed"):
        check_draft(spec, target.config)
    spec = counting_mtp(target, tmp_path / "e", mtp_reads_normed="yes")
    with pytest.raises(UserError, match="mtp_reads_normed = 'yes' must be true or false"):
        check_draft(spec, target.config)


def results(*scores: float) -> list[dict]:
    names = ("settings", "rounds", "first_acceptance", "tokens_per_round", "standard_error")
    return [dict(zip(names, (name, 9, 0.5, score, 0.03))) for name, score in zip("abc", scores)]


def test_a_verdict_by_hand(capsys):
    """Three times the error of a difference, 0.03 * sqrt(2), is 0.127."""
    result = draft_variants.judged(results(1.2, 1.6, 1.4))
    assert (result["trained_with"], result["as_read"], result["possible"]) == ("b", "a", 1)
    assert result["ratio"] == pytest.approx(1.6 / 1.4)
    draft_variants.print_table(result)
    out = capsys.readouterr().out
    assert "as read: a\ntrained with: b; the first has 1.14 times" in out
    assert "equally good" not in out
    close = draft_variants.judged(results(1.5, 1.6, 1.4))
    assert close["trained_with"] is None and close["possible"] == 2
    draft_variants.print_table(close)
    assert "the first 2 may be equally good" in capsys.readouterr().out


@pytest.fixture(scope="module")
def story_folder(folder_of, text_folder, tmp_path_factory):
    """A tiny MiMo with a tokenizer and a random head."""
    with changed_family("r1-distill-qwen", vocab_size=384) as family:
        folder = head_folder("mimo", folder_of(family), tmp_path_factory.mktemp("mimo") / "m")
    for name in ("tokenizer.model", "tokenizer_config.json"):
        shutil.copy(text_folder / name, folder)
    return folder


def run_main(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["compare", *arguments])
    with pytest.raises(SystemExit) as exit:
        main()
    return exit.value.code, *capsys.readouterr()


@pytest.mark.slow
def test_the_command_measures_all_variants(monkeypatch, capsys, story_folder):
    flags = f"--checkpoint {story_folder} --draft mtp --temperature 0 --dtype float32"
    flags += " --max_new_tokens 20 --ignore_eos --device cpu --speculate_k 2"
    arguments = ("--variants", "--a", flags, "--prompt", "the cat")
    status, out, _ = run_main(monkeypatch, capsys, *arguments, "--json")
    result = json.loads(out)
    mimo = '"mtp_state_first": true, "mtp_reads_normed": false, "mtp_recycles_normed": false'
    assert status == 0 and result["as_read"] == mimo
    assert len({row["settings"] for row in result["variants"]}) == 8
    status, out, _ = run_main(monkeypatch, capsys, *arguments)
    lines = out.splitlines()
    assert status == 0 and len(lines) >= 11 and f"as read: {mimo}" in lines
    assert sum(line.endswith(f"  {mimo}") for line in lines) == 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--b", ""], "argument --variants: not allowed with argument --b"),
        ([], "--variants: --a needs an EAGLE-3 or DFlash folder"),
        (["--a=--draft ngram"], "--variants: --a needs an EAGLE-3 or DFlash folder"),
        (
            ["--a=--draft mtp --checkpoint {} --speculate_k auto"],
            "--variants: --speculate_k auto drafts less",
        ),
        (
            ["--a=--draft mtp --checkpoint {} --max_new_tokens 1"],
            "--variants: these prompts give no rounds",
        ),
    ],
)
def test_user_errors(monkeypatch, capsys, story_folder, arguments, message):
    arguments = [argument.format(story_folder) for argument in ["--a", "", *arguments]]
    status, out, err = run_main(monkeypatch, capsys, *arguments, "--variants")
    assert status == 2 and out == "" and f"error: {message}" in err


# ------------------------------------------------------------------------------------------ report


def engine_with(drafter, target, num_rounds: int, acceptance: float) -> SimpleNamespace:
    meter = SimpleNamespace(
        num_rounds=num_rounds, total_overlap=num_rounds * acceptance, has_warned=False
    )
    return SimpleNamespace(meter=meter, drafter=drafter, model=target)


def test_the_report_names_causes_below_what_the_kind_shows(target, tmp_path):
    """Once, after 48 rounds; an MTP head is to show more than an EAGLE-3 head."""
    eagle = load_drafter(counting_eagle(target, tmp_path / "e"), target, None, pack=False)
    head = load_drafter(counting_mtp(target, tmp_path / "m"), target, None, pack=False)
    assert low_acceptance(engine_with(eagle, target, 47, 0.0)) == []
    assert low_acceptance(engine_with(eagle, target, 48, 0.31)) == []
    engine = engine_with(eagle, target, 48, 0.29)
    first, states, text = low_acceptance(engine)
    assert "probability 0.29 in 48 rounds, and such drafts have 0.3" in first
    assert "hidden states [2, 3, 3]" in states and "scripts.compare --variants" in states
    assert "unlike" in text and low_acceptance(engine) == []
    assert low_acceptance(engine_with(head, target, 48, 0.51)) == []
    assert "other weights" in low_acceptance(engine_with(head, target, 48, 0.31))[1]
    quantized = quantized_copy(target, "int8")
    assert "target is quantized" in low_acceptance(engine_with(head, quantized, 48, 0.31))[2]
    assert low_acceptance(engine_with(Drafter(), target, 48, 0.0)) == []
    assert low_acceptance(engine_with(None, target, 0, 0.0)) == []


def test_a_right_head_is_not_accused(target, tmp_path):
    """And one that reads its neighbours' states is, by engines."""
    for states, is_accused in (([2, 3, 3], False), ([3, 4, 4], True)):
        folder = counting_eagle(target, tmp_path / str(states[0]), target_hidden_states=states)
        drafter = load_drafter(folder, target, None, pack=False)
        engine = Engine(target, 1, 90, drafter=drafter, speculate_k=1)
        rows_of(target, PROMPTS[:1], engine=engine, max_new_tokens=85)
        if not is_accused:  # its rounds are fewer
            rows_of(target, PROMPTS[:1], engine=engine, max_new_tokens=85)
        assert engine.meter.num_rounds >= 48
        assert bool(low_acceptance(engine)) == is_accused
