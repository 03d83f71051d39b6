"""scripts/distill/distill_draft.py: its report is true of the folder that it writes, and no stop
changes that folder."""

import contextlib
import functools
import json
import re
import shutil
import signal
import sys

import pytest
import torch
from conftest import BASE, FAMILIES, ROOT, changed_family, config_json, generate
from safetensors.torch import load_file

from benchmarks import self_prompts
from cli.start import main as decode
from decoding.costs import Costs
from decoding.sampling import Sampling
from loading.checkpoint import load_config, load_model
from loading.config import config_from_hf
from loading.models import random_model
from loading.saving import save_model
from loading.tokenizer import load_tokenizer
from model import Transformer
from scripts.distill import distill_draft, draft_kinds, draft_text
from scripts.distill.distill_draft import (
    Prediction,
    acceptance,
    add_gradients,
    best_evaluation,
    blocks,
    distill,
    has_converged,
    learning_rate,
    parse_args,
    predict,
)
from scripts.distill.draft_start import OWN_ROPES, draft_config, init_weights, project_embedding
from scripts.distill.draft_text import Windows, hide, hold_out, ids_of, read_documents

DEMO, CONTEXT = ROOT / "checkpoints" / "demo", 64
STORIES = ROOT / "checkpoints" / "stories.txt"
SHAPE = (
    "--layers",
    1,
    "--dim",
    64,
    "--context",
    CONTEXT,
    "--batch",
    4,
    "--heldout",
    1000,
    "--device",
    "cpu",
)
COSTS = Costs(
    1.0, {k: 0.1 * k for k in (1, 2, 3, 5, 8)}, {k: 1 + 0.05 * k for k in (1, 2, 3, 5, 8)}
)


@pytest.fixture(scope="module")
def stories() -> str:
    """Forty-eight stories of the demo target, some 6000 tokens, separated by blank lines."""
    model, tokenizer = load_model(DEMO), load_tokenizer(DEMO)
    prompts, rows = [tokenizer.encode("Once")] * 48, [[] for _ in range(48)]
    for row, id in generate(
        model, prompts, sampling=Sampling(), max_new_tokens=130, seed=list(range(48))
    ):
        rows[row].append(id)
    texts = [tokenizer.decode([id for id in ids if id not in tokenizer.stop_ids]) for ids in rows]
    return "\n\n".join(
        "\n".join(line for line in text.splitlines() if line.strip()) for text in texts
    )


@pytest.fixture
def text(tmp_path, stories):
    file = tmp_path / "stories.txt"
    file.write_text(stories)
    return file


@pytest.fixture
def fixed_costs(monkeypatch):
    """Costs that do not have to be measured."""
    monkeypatch.setattr(distill_draft, "measure_costs", lambda *_: COSTS)


def flags(text, tmp_path, name: str = "draft", /, **others) -> list[str]:
    """Of a short run on the demo target; options that are None are left out."""
    options = {
        "target": DEMO,
        "text": text,
        "output": tmp_path / name,
        "work": tmp_path / f"{name}-work",
    } | others
    pairs = [(f"--{key}", value) for key, value in options.items() if value is not None]
    return [str(part) for part in (*SHAPE, *(part for pair in pairs for part in pair))]


@pytest.fixture
def run_main(monkeypatch, capsys):
    """Runs the script in this process: arguments -> (exit status, error lines)."""

    def run(arguments: list[str]) -> tuple[int, list[str]]:
        monkeypatch.setattr(sys, "argv", ["distill_draft", *arguments])
        status = 0
        try:
            distill_draft.main()
        except SystemExit as exit:
            status = exit.code
        err = capsys.readouterr().err
        assert "Traceback" not in err
        return status, [line for line in err.splitlines() if line.startswith("error: ")]

    return run


def weights_of(folder) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def samples_of(folder) -> list[list[int]]:
    return [
        json.loads(line)["tokens"]
        for line in (folder / "sampled.jsonl").read_text().splitlines()[1:]
    ]


def alpha_by_transformers(draft, heldout: torch.Tensor, temperature: float) -> float:
    """Mean sum of min(p, q), by another implementation of both models, in float32, a row at a
    time."""
    import transformers

    load = transformers.AutoModelForCausalLM.from_pretrained
    models = [load(folder, dtype=torch.float32) for folder in (DEMO, draft)]
    alphas = []
    for row in heldout:
        with torch.no_grad():
            p, q = (
                (model(row[None, :-1]).logits[0].double() / temperature).softmax(-1)
                for model in models
            )
        alphas.append(torch.minimum(p, q).sum(-1).mean())
    return torch.stack(alphas).mean().item()


# --------------------------------------------------------------------------------------- learning


@pytest.mark.attack
def test_it_learns_and_its_report_is_true(text, tmp_path, monkeypatch, capsys):
    """Alpha grows: an untrained draft's q is nearly uniform over 2048 tokens, and the sum of min(p,
    1/2048) is at most the number of tokens with p > 1/2048, some tens, over 2048. Sixty steps teach
    at least how frequent tokens are.

    Alpha is right: transformers computes it from the two folders, on documents that are split,
    encoded and cut here. Logits of two float32 implementations agree within 1e-4
    (tests/test_model.py), so that p, q and their minimum are off by a factor of exp(2e-4 /
    temperature) at most. The prediction is the formula of the reported alpha, c and v.

    The folder drafts: generate.py takes it, greedy text stays, and the tokenizer is the target's
    byte for byte.
    """
    options = {
        "steps": 60,
        "eval_every": 30,
        "dim": 128,
        "lr": 0.01,
        "dtype": "float32",
        "temperature": 0.7,
    }
    monkeypatch.setattr(sys, "argv", ["x", *flags(text, tmp_path, **options)])
    distill_draft.main()
    out, err = capsys.readouterr()
    result, draft = json.loads(out), tmp_path / "draft"
    evaluations = json.loads((draft / "distill.json").read_text())["evaluations"]
    assert (
        evaluations[0]["step"] == 0
        and evaluations[-1]["step"] == 60
        and result["best_step"] in (30, 60)
    )
    assert result["alpha"] > evaluations[0]["alpha"] + 0.05 and evaluations[0]["alpha"] < 0.1

    tokenizer, documents = load_tokenizer(DEMO), text.read_text().split("\n\n")
    ids = [[*tokenizer.encode(document, bos=False), 2] for document in documents]
    num_heldout, rest = min(1000, sum(map(len, ids)) // 10), []
    while len(rest) < num_heldout:
        rest = ids.pop() + rest
    heldout = torch.tensor(
        [[1, *rest[i : i + CONTEXT]] for i in range(0, len(rest) - CONTEXT + 1, CONTEXT)]
    )
    assert result["heldout_tokens"] == heldout[:, 1:].numel() >= 512
    for name, temperature in (("alpha", 0.7), ("alpha_temperature_1", 1.0)):
        assert result[name] == pytest.approx(
            alpha_by_transformers(draft, heldout, temperature), rel=2e-4 / temperature
        )
    # or the comparison would not tell them apart
    assert abs(result["alpha"] - result["alpha_temperature_1"]) > 1e-3

    a, k, c, v = (result[name] for name in ("alpha", "best_k", "c", "v"))
    tokens = (1 - a ** (k + 1)) / (1 - a)
    assert result["predicted_speedup"] == pytest.approx(tokens / (k * c + v)) and c > 0 and v > 0
    (best,) = (e for e in evaluations if e["step"] == result["best_step"])
    assert best["predicted_tokens_per_round"] == pytest.approx(tokens)
    lines = [line for line in err.splitlines() if line.startswith("step ")]
    speedup = f"{tokens:.2f} tokens a round, speed-up {result['predicted_speedup']:.3f}"
    assert len(lines) == 3 and any(
        line.endswith(f"predicted with K = {k}: {speedup}") for line in lines
    )

    for name in ("tokenizer.model", "tokenizer_config.json", "generation_config.json"):
        assert (draft / name).read_bytes() == (DEMO / name).read_bytes()
    tensors = load_file(draft / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {
        torch.bfloat16
    } and "lm_head.weight" not in tensors
    assert (
        not (tmp_path / "draft.partial").exists()
        and not (tmp_path / "draft-work" / "state.pt").exists()
    )
    rows = []
    for drafter in ([], ["--draft_checkpoint", str(draft), "--speculate_k", "3"]):
        common = [
            "--checkpoint",
            str(DEMO),
            "--temperature",
            "0",
            "--dtype",
            "float32",
            "--max_new_tokens",
            "40",
        ]
        monkeypatch.setattr(
            sys, "argv", ["generate.py", *common, "--device", "cpu", "--json", *drafter]
        )
        decode()
        rows.append(json.loads(capsys.readouterr().out))
    assert rows[0]["tokens"] == rows[1]["tokens"] and rows[1]["speculative"]["drafted"] > 0


@pytest.mark.parametrize("hidden", [0, 9])
def test_blocks_of_logits_add_up_to_one_pass(hidden, monkeypatch):
    """KL and its gradients in blocks of 7 positions equal one autograd pass over all logits, and so
    does alpha; hidden tokens are read, but not learned. In float32 throughout: sums of a few
    hundred terms agree within 1e-5."""
    monkeypatch.setattr(draft_kinds, "training_autocast", lambda _: contextlib.nullcontext())
    shape = {**BASE, **FAMILIES["llama-3.2"]}
    target = random_model(
        config_from_hf({**BASE, **FAMILIES["qwen3"]}), dtype=torch.float32, seed=1
    )
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.mul_(4)  # far from uniform
    full, blocked = (Transformer(config_from_hf(shape)) for _ in range(2))
    rows, pos = (
        torch.randint(131, (3, 20), generator=torch.Generator().manual_seed(2)),
        torch.arange(19),
    )
    for draft in (full, blocked):
        init_weights(draft, 3)
    log_p, log_q = (model(rows[:, :-1], pos).log_softmax(-1) for model in (target, full))
    # the last of them begins an answer
    loss = (log_p.exp() * (log_p - log_q)).sum(-1)[:, max(0, hidden - 1) :].mean()
    overlap = torch.minimum(log_p.exp(), log_q.exp()).sum(-1)[:, max(0, hidden - 1) :].mean().item()
    loss.backward()
    monkeypatch.setattr(distill_draft, "MAX_LOGITS", 7 * 3 * 131)
    at = torch.arange(19)
    assert [len(indices) for _, indices, _ in blocks(target, torch.zeros(3, 19, 64), at)] == [
        7,
        7,
        5,
    ]
    kind = draft_kinds.Kind(shape, target.config, 5)
    shown = torch.stack([hide(row, hidden) for row in rows])
    assert acceptance(kind, blocked, target, shown, [1.0])[1.0] == pytest.approx(
        [overlap], rel=1e-5
    )
    # nothing to count is no fault of the target
    assert acceptance(kind, blocked, target, ~rows, [1.0])[1.0] == [0.0]
    assert add_gradients(kind, blocked, target, shown) == pytest.approx(loss.item(), rel=1e-5)
    for (name, one), other in zip(full.named_parameters(), blocked.parameters()):
        assert one.grad.abs().max() > 0, name
        torch.testing.assert_close(
            other.grad, one.grad, rtol=1e-5, atol=1e-5 * one.grad.abs().max().item()
        )


def sizes(dim: int, *others: str):
    return parse_args(
        ["--target", "x", "--output", "y", "--layers", "2", "--dim", str(dim), *others]
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_draft_of_every_family_agrees_where_it_must(family):
    hf = {**BASE, **FAMILIES[family]}
    target, draft = config_from_hf(hf), config_from_hf(draft_config(hf, sizes(48)))
    ropes = [
        name
        for name in vars(target)
        if name.startswith("rope_") and name not in ("rope_interleaved", "rope_types")
    ]
    # no Llama rotates so
    if hf["model_type"] in OWN_ROPES:
        ropes, plain = ["rope_theta"], config_from_hf({**BASE, "model_type": "llama"})
        assert (draft.rope_type, draft.rope_attention_factor, draft.rope_long) == (
            plain.rope_type,
            1.0,
            (),
        )
    same = ("vocab_size", "max_seq_length", "norm_eps", *ropes)
    assert {name: getattr(draft, name) for name in same} == {
        name: getattr(target, name) for name in same
    }
    assert (draft.dim, draft.n_heads, draft.n_kv_heads, draft.head_dim, draft.ffn_dim) == (
        48,
        1,
        1,
        48,
        128,
    )
    assert not (draft.qkv_bias or draft.ffn_bias or draft.qk_norm or any(draft.windows))


def test_rope_of_older_folders_is_taken_over():
    hf = {**BASE, "model_type": "llama", "rope_theta": 5e5, "original_max_position_embeddings": 24}
    hf["rope_scaling"] = {
        "type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    draft = draft_config(hf, sizes(320, "--kv_heads", "1"))
    assert (
        config_from_hf(draft).rope_theta == 5e5 and config_from_hf(draft).rope_original_length == 24
    )
    assert (draft["num_attention_heads"], draft["head_dim"], draft["intermediate_size"]) == (
        5,
        64,
        864,
    )


def test_a_projected_embedding_is_the_nearest():
    """Products of rows of a table of 24 columns are nearest to the target's own where the
    difference is what the singular values beyond the 24th leave (Eckart and Young); with all
    columns they are the target's."""
    hf = {**BASE, **FAMILIES["llama-3.2"]}
    target = random_model(config_from_hf(hf), dtype=torch.float32, seed=1)
    E = target.embed.weight.double()
    E.mul_(torch.linspace(0.1, 3, E.size(1)))  # a random table has no leading directions
    target.embed.weight.data.copy_(E)
    singular = torch.linalg.svdvals(E)
    for columns in (24, 64):
        draft = Transformer(config_from_hf(draft_config(hf, sizes(columns))))
        project_embedding(draft, target)
        X = draft.embed.weight.detach().double()
        gram, other = E @ E.T, X @ X.T
        error = (gram - (gram * other).sum() / (other * other).sum() * other).norm()
        expected = (singular[columns:] ** 4).sum().sqrt()
        assert error.item() == pytest.approx(
            expected.item(), rel=1e-3, abs=1e-3 * gram.norm().item()
        )
        assert X.std().item() == pytest.approx(0.02, rel=1e-2) and (columns == 64) == (
            expected == 0
        )


def test_a_long_document_is_cut_to_be_held_out():
    """A text of one document, and one whose last is most of it, still train."""
    ids = torch.arange(1000)
    training, heldout = hold_out([ids], 10_000)
    assert torch.equal(torch.cat([*training, *heldout]), ids) and len(heldout[0]) == 100
    training, heldout = hold_out([ids[:20], ids, ids[:5]], 50)
    assert [len(t) for t in training] == [20, 955] and [len(t) for t in heldout] == [45, 5]


def test_windows_line_ends_separate_documents_too(tmp_path):
    tokenizer = load_tokenizer(DEMO)
    file = tmp_path / "text.txt"
    for content in (
        b"One.\r\n\r\nTwo.\r\n \r\nThree.",
        b"One.<|endoftext|>\r\nTwo.<|endoftext|>Three.",
    ):
        file.write_bytes(content)
        documents = read_documents(file, tokenizer, None)
        assert [tokenizer.decode(ids.tolist()).strip() for ids in documents] == [
            "One.",
            "Two.",
            "Three.",
        ]


def test_the_last_documents_are_held_out():
    texts = [torch.full((n,), i) for i, n in enumerate((50, 10, 20, 5, 15))]
    for num_tokens in (1, 5, 10, 10_000):  # a tenth of 100 is 10, which the last one has
        assert len(hold_out(texts, num_tokens)[1]) == 1
    training, heldout = hold_out([*texts, torch.full((4,), 5)], 10_000)  # 10 of 104: the last two
    assert [int(t[0]) for t in training] == [0, 1, 2, 3] and [int(t[0]) for t in heldout] == [4, 5]
    windows = Windows(training, 8, 99, "training")
    rows = windows.random(seed=1, step=2, rows=200)
    assert (
        rows.shape == (200, 9)
        and (rows[:, 0] == 99).all()
        and not torch.isin(rows, torch.tensor([4, 5])).any()
    )
    assert torch.equal(rows, windows.random(1, 2, 200)) and not torch.equal(
        rows, windows.random(1, 3, 200)
    )
    assert torch.equal(windows.consecutive()[:, 1:].flatten(), torch.cat(training)[: 85 // 8 * 8])
    # the last id of a window is only learned from
    without = Windows(training, 8, None, "training").consecutive()
    assert torch.equal(without[1:, 0], without[:-1, -1])


def test_a_prompt_ends_at_a_new_line_alone(tmp_path):
    file, tokenizer = tmp_path / "prompts.txt", load_tokenizer(ROOT / "checkpoints" / "demo")
    file.write_bytes("a\u2028b\r\n\nc\x0bd\n".encode())
    prompts = draft_text.read_prompts(file, tokenizer, 100)
    assert prompts == [tokenizer.encode(text) for text in ("a\u2028b", "c\x0bd")]


def test_learning_rate_and_patience_by_hand():
    rates = [learning_rate(step, 100, 1.0, warmup=10) for step in range(100)]
    assert (
        rates[0] == 0.1
        and rates[10] == max(rates) == 1.0
        and rates[99] == pytest.approx(0.02, abs=1e-3)
    )
    for speedups, patience, best, is_over in (
        ([1.0], 1, 0, False),
        ([1.0, 1.0], 1, 0, True),
        ([1.0, 1.1, 1.0, 1.09], 3, 1, False),
        ([1.0, 1.1, 1.0, 1.09, 1.1], 3, 1, True),  # as good is not better
        ([1.0, 1.1, 1.0, 1.09, 1.2], 3, 4, False),
    ):
        assert best_evaluation(speedups) == best
        assert has_converged(speedups, patience) == is_over


def test_prediction_grows_where_nothing_pays():
    """Also below 1, where Costs.best would choose not to draft, whatever alpha is."""
    dear = Costs(1.0, {k: 0.9 * k for k in (1, 2, 3)}, {k: 1.5 for k in (1, 2, 3)})
    ks, tokens, speedups = zip(*[predict(dear, [alpha]) for alpha in (0.1, 0.2, 0.4)])
    assert ks == (1, 1, 1) and tokens == (1.1, 1.2, 1.4) and speedups[0] == pytest.approx(1.1 / 2.4)
    assert speedups[0] < speedups[1] < speedups[2] < 1 == dear.best(0.4)[1]
    assert predict(COSTS, [0.9])[0] == COSTS.best(0.9)[0] == 8


# --------------------------------------------------------------------------------------- stopping


@pytest.mark.attack
def test_a_flat_prediction_ends_the_run_with_the_best_weights(
    text, tmp_path, monkeypatch, fixed_costs
):
    """Predictions 1.0, 1.2, 1.1, 1.2, 1.2: two evaluations after the second would not do for a
    patience of 3. The folder has the weights of step 2, with which a run of two steps at the same
    learning rates ends."""
    script = iter([1.0, 1.2, 1.1, 1.2, 1.2, 9.9])
    monkeypatch.setattr(distill_draft, "predict", lambda *_: Prediction(1, 1.5, next(script)))
    monkeypatch.setattr(distill_draft, "learning_rate", lambda step, *_: 1e-3)
    result = distill(parse_args(flags(text, tmp_path, steps=40, eval_every=2, patience=3)))
    assert (result["steps"], result["best_step"], result["predicted_speedup"]) == (8, 2, 1.2)
    script = iter([1.0, 1.2])
    distill(parse_args(flags(text, tmp_path, "short", steps=2, eval_every=2)))
    assert weights_of(tmp_path / "draft") == weights_of(tmp_path / "short")


@pytest.mark.attack
def test_a_stopped_run_continues_to_the_same_bits_with_the_same_flags_alone(
    text, tmp_path, monkeypatch, run_main, fixed_costs
):
    """Ctrl-C inside step 6, between two evaluations: the step ends and is saved, exit status 130.
    Other flags are refused by name before anything is loaded, and so is a damaged state. The same
    command ends with the weights and losses of a run that nothing stopped."""
    options = {"steps": 9, "eval_every": 4}
    distill(parse_args(flags(text, tmp_path, "full", **options)))
    arguments, updates, real = flags(text, tmp_path, **options), [], distill_draft.update

    def interrupting(*args):
        updates.append(args)
        if len(updates) == 6:
            signal.raise_signal(signal.SIGINT)
        real(*args)

    monkeypatch.setattr(distill_draft, "update", interrupting)
    assert run_main(arguments) == (130, [])
    file = tmp_path / "draft-work" / "state.pt"
    state, before, story = torch.load(file, weights_only=True), file.read_bytes(), text.read_text()
    assert state["step"] == 6 and len(state["losses"]) == 2 and not (tmp_path / "draft").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def check_refusal(arguments: list[str], message: str) -> None:
        status, lines = run_main(arguments)
        assert status == 2 and len(lines) == 1 and message in lines[0], lines

    for name, value, message in (
        ("steps", 7, "--steps 9, now it is 7"),
        ("lr", 0.001, "--lr 0.004, now it is 0.001"),
        ("ffn", 64, "--ffn None, now it is 64"),
        ("seed", 1, "--seed 0, now it is 1"),
    ):
        check_refusal(flags(text, tmp_path, **options | {name: value}), message)
    text.write_text(story + "The end.")
    check_refusal(arguments, "the held-out tokens")
    text.write_text(story)
    assert file.read_bytes() == before and not (tmp_path / "draft").exists()
    file.write_bytes(before[:1000])
    check_refusal(arguments, "not a training state")
    file.write_bytes(before)
    assert run_main(arguments) == (0, []) and len(updates) == 9
    folders = tmp_path / "draft", tmp_path / "full"
    assert weights_of(folders[0]) == weights_of(folders[1])
    draft, full = (
        json.loads((folder / "distill.json").read_text())["evaluations"] for folder in folders
    )
    assert draft == full


# ------------------------------------------------------------------------------ the target's text


@pytest.fixture
def small_target(tmp_path, story_tokenizer):
    """A random Qwen3, its vocabulary of 384 padded beyond the tokenizer's."""
    folder, hf = (
        tmp_path / "target",
        {**BASE, **FAMILIES["qwen3"], "vocab_size": 384, "dtype": "bfloat16"},
    )
    save_model(random_model(config_from_hf(hf), seed=4), folder, hf)
    (folder / "tokenizer.model").write_bytes(story_tokenizer.read_bytes())
    return folder


@pytest.mark.attack
def test_documents_of_the_target_are_written_once(
    small_target, tmp_path, run_main, fixed_costs, monkeypatch
):
    """Every document is what the target generates by itself from BOS with its own seed; a line that
    a kill cut off is written again, the same; other settings are refused. The draft keeps the
    padded vocabulary."""
    monkeypatch.setattr(draft_text, "SAMPLE_ROWS", 16)
    monkeypatch.setattr(draft_text, "SLOTS", 5)
    options = {
        "target": small_target,
        "sampled": 1500,
        "steps": 2,
        "temperature": 0.9,
        "context": 32,
    }
    assert run_main(flags(None, tmp_path, **options)) == (0, [])
    assert config_json(tmp_path / "draft")["vocab_size"] == 384
    assert (
        load_model(tmp_path / "draft").config.vocab_size
        > load_tokenizer(tmp_path / "draft").vocab_size
    )
    file = tmp_path / "draft-work" / "sampled.jsonl"
    content, documents = file.read_text(), samples_of(file.parent)
    assert 1500 <= sum(map(len, documents)) < 1500 + 16 * 32 and len(documents) % 16 == 0
    model, tokenizer = load_model(small_target), load_tokenizer(small_target)
    settings = {"sampling": Sampling(0.9), "max_new_tokens": 31, "stop_ids": tokenizer.stop_ids}
    for number in (0, 17):
        alone = generate(model, [[tokenizer.bos_id]], seed=number, **settings)
        assert [id for _, id in alone] == documents[number]

    file.write_text("\n".join(content.splitlines()[: 1 + 16 + 5])[:-9])
    assert run_main(flags(None, tmp_path, "other", **options, work=file.parent)) == (0, [])
    assert file.read_text() == content and weights_of(tmp_path / "draft") == weights_of(
        tmp_path / "other"
    )
    status, (message,) = run_main(
        flags(None, tmp_path, "third", **options | {"temperature": 1}, work=file.parent)
    )
    assert (
        status == 2
        and "--temperature 0.9, now it is 1.0" in message
        and file.read_text() == content
    )


@pytest.mark.attack
def test_the_target_continues_the_text(small_target, text, tmp_path, run_main, fixed_costs):
    """With both, the target's documents start as documents of the training text do, and both are
    learned."""
    # stories all start alike
    text.write_text(text.read_text().replace("\n\n", "\n").replace(". ", ".\n\n"))
    assert run_main(
        flags(text, tmp_path, target=small_target, sampled=400, steps=2, context=32)
    ) == (0, [])
    tokenizer, parts = load_tokenizer(small_target), re.split(r"\n[ \t\n]*\n", text.read_text())
    starts = [tokenizer.encode(document, bos=False)[:8] for document in parts if document.strip()]
    documents = samples_of(tmp_path / "draft-work")
    assert all(
        len(ids) <= 31 and any(ids[: len(start)] == start for start in starts) for ids in documents
    )
    assert len({tuple(ids[:8]) for ids in documents}) > 4


@pytest.mark.slow
def test_a_gguf_target_answers_prompts(
    story_tokenizer, tmp_path, monkeypatch, run_main, fixed_costs
):
    """Each document begins with a line of the file in the target's chat format, in turn, and no BOS
    leads it or a window. The draft's folder has the tokenizer that the file stands for. Other
    prompts are not mixed with the documents of these."""
    pytest.importorskip("gguf")
    from test_gguf import TEMPLATE, from_sentencepiece, write

    def keys(writer) -> None:
        from_sentencepiece(writer, story_tokenizer)
        writer.add_chat_template(TEMPLATE)

    with changed_family("llama-3.2", vocab_size=384) as family:
        target = write(tmp_path / "m.gguf", family, "Q8_0", keys=keys)
    file, work, windows = tmp_path / "prompts.txt", tmp_path / "draft-work", []
    file.write_text("the cat\n\n  the dog  \na ball\n")
    options = {
        "target": target,
        "prompts": file,
        "sampled": 700,
        "steps": 2,
        "context": 32,
        "work": work,
    }
    train = distill_draft.train
    monkeypatch.setattr(
        distill_draft,
        "train",
        lambda run, rows, *rest: windows.append(rows) or train(run, rows, *rest),
    )
    assert run_main([*flags(None, tmp_path, **options), "--project"]) == (0, [])
    draft, tokenizer = load_tokenizer(tmp_path / "draft"), load_tokenizer(target)
    assert draft.pieces() == tokenizer.pieces() and draft.template is not None
    prompts = [
        tokenizer.chat([{"role": "user", "content": text}])
        for text in ("the cat", "the dog", "a ball")
    ]
    documents = samples_of(work)
    assert len(documents) >= 16
    for number, ids in enumerate(documents):
        prompt = prompts[number % 3]
        assert ids[: len(prompt)] == prompt and len(prompt) < len(ids) <= 32
    settings = {
        "sampling": Sampling(),
        "max_new_tokens": 32 - len(prompts[1]),
        "stop_ids": tokenizer.stop_ids,
    }
    model = load_model(target, dtype=getattr(torch, load_config(target).dtype or "bfloat16"))
    assert documents[1] == prompts[1] + [
        id for _, id in generate(model, [prompts[1]], seed=1, **settings)
    ]
    row, (first, second) = windows[0].row(0), (len(prompts[0]), len(documents[0]))
    assert ids_of(row).tolist() == (documents[0] + documents[1])[:33]
    # prompts are hidden
    assert (row[:first] < 0).all() and (row[first:second] >= 0).all() and (row[second:] < 0).any()

    file.write_text("the cat\n")
    status, (message,) = run_main(flags(None, tmp_path, "again", **options))
    assert status == 2 and "texts to continue" in message


@pytest.mark.long
def test_a_chat_model_asks_itself_questions(tmp_path, monkeypatch):
    """Question n is what the model alone writes with seed n, where its template puts a user's
    message. In float32: some processors round bfloat16 otherwise with 24 rows than with one."""
    folder = shutil.copytree("checkpoints/demo", tmp_path / "chat")
    (folder / "chat_template.jinja").write_text("Tom said:\n{{ messages[0]['content'] }} The end.")
    monkeypatch.setattr(self_prompts, "BATCH", 24)
    monkeypatch.setattr(self_prompts, "MAX_TOKENS", 220)
    in_float32 = functools.partial(load_model, dtype=torch.float32)
    monkeypatch.setattr(self_prompts, "load_model", in_float32)
    questions = self_prompts.questions(folder, 2)
    assert len(set(questions)) == 2 and questions == self_prompts.questions(folder, 2)
    model, tokenizer = in_float32(folder), load_tokenizer(folder)
    settings = {"sampling": Sampling(1.0), "max_new_tokens": 220, "stop_ids": tokenizer.stop_ids}
    for seed in range(24):
        prompt = tokenizer.encode("Tom said:\n", bos=False)
        ids = [id for _, id in generate(model, [prompt], seed=seed, **settings)]
        line = tokenizer.decode(ids[:-1]).strip()
        if ids[-1] in tokenizer.stop_ids and line.isprintable() and len(line) > 10:
            assert line == questions[0]
            return
    raise AssertionError("no seed gives a question")


# --------------------------------------------------------------------------------------- refusals

REFUSED = [
    ({"dim": 95}, "--dim 95 is odd, and RoPE rotates pairs: 96 would work"),
    (
        {"dim": 96, "heads": 5},
        "--heads 5 of an even size; heads that would work: 1, 2, 3, 4, 6, 8, 12, 16, 24, 48",
    ),
    (
        {"dim": 96, "heads": 6, "kv_heads": 4},
        "multiple of --kv_heads 4; kv_heads that would work: 1, 2, 3, 6",
    ),
    ({"layers": 5000}, "num_hidden_layers = 5000"),
    ({"layers": 0}, "--layers"),
    ({"context": 513}, "--context 513 must lie between 16 and the target's 512"),
    ({"context": 8}, "--context 8"),
    ({"kind": "pard", "depth": 20, "context": 16}, "--depth 20 must be less than --context 16"),
    ({"seed": 10**20}, "seed = 100000000000000000000 must lie between"),
    ({"text": None}, "give --text FILE, --sampled TOKENS, or both"),
    ({"text": "nowhere.txt"}, "nowhere.txt"),
    ({"target": "nowhere"}, "nowhere: no such folder"),
    ({"output": DEMO}, f"{DEMO}: exists already"),
    ({"temperature": -1}, "temperature = -1"),
    ({"lr": 3}, "--lr 3.0"),
    ({"lr": 0}, "--lr 0.0"),
    ({"text": None, "sampled": 100, "temperature": 0}, "--temperature 0"),
    ({"context": 512, "heldout": 10}, "the held-out documents have"),
    ({"work": DEMO / "config.json"}, "config.json"),
    ({"prompts": DEMO / "config.json"}, "--prompts needs --sampled TOKENS"),
    ({"text": None, "sampled": 100, "prompts": "nowhere.txt"}, "nowhere.txt"),
    (
        {"text": None, "sampled": 100, "prompts": DEMO / "config.json", "context": 16},
        "the longest of",
    ),
    (b"One day.\n\nTwo days.", "the training documents have"),
    (b"", "the training documents have 0 tokens, fewer than the 64 of one window"),
    (b"\xff\xfe\x00", "stories.txt: not UTF-8 text"),
]


def test_a_block_has_its_limit(tmp_path, run_main):
    words = flags(STORIES, tmp_path, kind="dflash", depth=64, context=128)
    at = words.index("--dim")  # the target sets it
    status, lines = run_main(words[:at] + words[at + 2 :])
    assert (status, len(lines)) == (
        2,
        1,
    ) and "--depth 64: --kind dflash drafts at most 63" in lines[0]


@pytest.mark.parametrize("change, message", REFUSED)
def test_refusals(tmp_path, run_main, change, message):
    """Of flags, or of another content of the text."""
    text = tmp_path / "stories.txt"
    is_content = isinstance(change, bytes)
    text.write_bytes(change if is_content else STORIES.read_bytes())
    status, lines = run_main(flags(text, tmp_path, **({} if is_content else change)))
    assert status == 2 and len(lines) == 1 and message in lines[0], lines
    assert not (tmp_path / "draft").exists() and not (tmp_path / "draft.partial").exists()
