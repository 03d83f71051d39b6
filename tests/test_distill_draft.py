"""scripts/distill_draft.py: what it reports is true of the folder that it writes, and no stop changes that folder."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import BASE, FAMILIES, ROOT, config_json
from safetensors.torch import load_file

from cli.main import main as decode
from decoding.sampling import Sampling
from generate import generate
from loading.checkpoint import load_config, load_model, random_model, save_model
from loading.config import config_from_hf
from loading.tokenizer import load_tokenizer
from model import Transformer
from scripts import distill_draft, draft_kinds
from scripts.distill_draft import (
    Windows,
    add_gradients,
    best_and_over,
    blocks,
    distill,
    draft_config,
    hold_out,
    init_weights,
    learning_rate,
    main,
    parse_args,
    predict,
    project_embedding,
)  # fmt: skip
from speculative import Costs

DEMO, CONTEXT = ROOT / "checkpoints" / "demo", 64
SHAPE = ("--layers", 1, "--dim", 64, "--context", CONTEXT, "--batch", 4, "--heldout", 1000, "--device", "cpu")
COSTS = Costs(1.0, {k: 0.1 * k for k in (1, 2, 3, 5, 8)}, {k: 1 + 0.05 * k for k in (1, 2, 3, 5, 8)})


@pytest.fixture(scope="module")
def stories() -> str:
    """Forty-eight stories of the demo target, some 6000 tokens, apart by blank lines."""
    model, tokenizer = load_model(DEMO), load_tokenizer(DEMO)
    prompts, rows = [tokenizer.encode("Once")] * 48, [[] for _ in range(48)]
    for row, id in generate(model, prompts, sampling=Sampling(), max_new_tokens=130, seed=list(range(48))):
        rows[row].append(id)
    texts = [tokenizer.decode([id for id in ids if id not in tokenizer.stop_ids]) for ids in rows]
    return "\n\n".join("\n".join(line for line in text.splitlines() if line.strip()) for text in texts)


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
    """Of a short run on the demo target; names with None are left out."""
    given = {"target": DEMO, "text": text, "output": tmp_path / name, "work": tmp_path / f"{name}-work"} | others
    pairs = [(f"--{key}", value) for key, value in given.items() if value is not None]
    return [str(part) for part in (*SHAPE, *(part for pair in pairs for part in pair))]


def run_main(monkeypatch, capsys, arguments: list[str]) -> tuple[int, list[str]]:
    """(exit status, error lines) of the script in this process."""
    monkeypatch.setattr(sys, "argv", ["distill_draft", *arguments])
    status = 0
    try:
        main()
    except SystemExit as exit:
        status = exit.code
    err = capsys.readouterr().err
    assert "Traceback" not in err
    return status, [line for line in err.splitlines() if line.startswith("error: ")]


def alpha_by_transformers(draft, heldout: torch.Tensor, temperature: float) -> float:
    """Mean sum of min(p, q), by another implementation of both models, in float32, a row at a time."""
    import transformers

    load = transformers.AutoModelForCausalLM.from_pretrained
    models = [load(folder, dtype=torch.float32) for folder in (DEMO, draft)]
    found = []
    for row in heldout:
        with torch.no_grad():
            p, q = ((model(row[None, :-1]).logits[0].double() / temperature).softmax(-1) for model in models)
        found.append(torch.minimum(p, q).sum(-1).mean())
    return torch.stack(found).mean().item()


# -------------------------------------------------------------------------------------- what it learns


def test_it_learns_and_what_it_reports_is_so(text, tmp_path, monkeypatch, capsys):
    """Three things about one run.

    Alpha grows: an untrained draft's q is nearly uniform over 2048 tokens, and the sum of min(p, 1/2048) is at most
    the number of tokens with p > 1/2048, some tens, over 2048: some hundredths. Sixty steps teach at least how frequent
    tokens are, and the dozen most frequent make up three tenths of these stories: 0.05 more is asked for.

    Alpha is right: transformers computes it from the two folders, on documents that are split, encoded and cut here.
    Logits of two float32 implementations agree within 1e-4 (tests/test_model.py), so that p, q and their minimum are
    off by a factor of exp(2e-4 / temperature) at most.

    The prediction is L's formula, of the reported alpha, c and v.
    """
    options = {"steps": 60, "eval_every": 30, "dim": 128, "lr": 0.01, "dtype": "float32", "temperature": 0.7}
    monkeypatch.setattr(sys, "argv", ["x", *flags(text, tmp_path, **options)])
    main()
    out, err = capsys.readouterr()
    found = json.loads(out)
    made = json.loads((tmp_path / "draft" / "distill.json").read_text())
    first, last = made["evaluations"][0], made["evaluations"][-1]
    assert first["step"] == 0 and last["step"] == 60 and found["best_step"] in (30, 60)
    assert found["alpha"] > first["alpha"] + 0.05 and first["alpha"] < 0.1
    assert sum(line.startswith("step ") for line in err.splitlines()) == 3

    tokenizer, documents = load_tokenizer(DEMO), text.read_text().split("\n\n")
    ids = [[*tokenizer.encode(document, bos=False), 2] for document in documents]
    wanted, apart = min(1000, sum(map(len, ids)) // 10), []
    while len(apart) < wanted:
        apart = ids.pop() + apart
    heldout = torch.tensor([[1, *apart[i : i + CONTEXT]] for i in range(0, len(apart) - CONTEXT + 1, CONTEXT)])
    assert found["heldout_tokens"] == heldout[:, 1:].numel() >= 512
    for name, temperature in (("alpha", 0.7), ("alpha_temperature_1", 1.0)):
        other = alpha_by_transformers(tmp_path / "draft", heldout, temperature)
        assert found[name] == pytest.approx(other, rel=2e-4 / temperature), name
    assert abs(found["alpha"] - found["alpha_temperature_1"]) > 1e-3  # or the comparison would not tell them apart

    a, k, c, v = (found[name] for name in ("alpha", "best_k", "c", "v"))
    assert found["predicted_speedup"] == pytest.approx((1 - a ** (k + 1)) / (1 - a) / (k * c + v))
    assert c > 0 and v > 0


def test_the_folder_drafts_and_greedy_text_stays(text, tmp_path, monkeypatch, capsys, fixed_costs):
    """generate.py takes it; the tokenizer is the target's byte for byte; weights are bfloat16."""
    distill(parse_args(flags(text, tmp_path, steps=8, eval_every=8)))
    for name in ("tokenizer.model", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "draft" / name).read_bytes() == (DEMO / name).read_bytes()
    tensors = load_file(tmp_path / "draft" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16} and "lm_head.weight" not in tensors
    assert not (tmp_path / "draft.partial").exists() and not (tmp_path / "draft-work" / "state.pt").exists()
    found = []
    for drafter in ([], ["--draft_checkpoint", str(tmp_path / "draft"), "--speculate_k", "3"]):
        common = ["--checkpoint", str(DEMO), "--temperature", "0", "--dtype", "float32", "--max_new_tokens", "40"]
        monkeypatch.setattr(sys, "argv", ["generate.py", *common, "--device", "cpu", "--json", *drafter])
        decode()
        found.append(json.loads(capsys.readouterr().out))
    plain, drafted = found
    assert drafted["tokens"] == plain["tokens"] and len(plain["tokens"]) == 40
    assert drafted["speculative"]["drafted"] > 0


def test_blocks_of_logits_add_up_to_the_whole(monkeypatch):
    """KL and its gradients in blocks of 7 positions equal one autograd pass over all logits. In float32 throughout:
    sums of a few hundred terms agree within 1e-5."""
    monkeypatch.setattr(draft_kinds, "learning", lambda _: contextlib.nullcontext())
    shape = {**BASE, **FAMILIES["llama-3.2"]}
    target = random_model(config_from_hf({**BASE, **FAMILIES["qwen3"]}), dtype=torch.float32, seed=1)
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.mul_(4)  # far from uniform
    whole, parts = (Transformer(config_from_hf(shape)) for _ in range(2))
    rows, pos = torch.randint(131, (3, 20), generator=torch.Generator().manual_seed(2)), torch.arange(19)
    for draft in (whole, parts):
        init_weights(draft, 3)
    log_p, log_q = (model(rows[:, :-1], pos).log_softmax(-1) for model in (target, whole))
    loss = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    loss.backward()
    monkeypatch.setattr(distill_draft, "LOGITS", 7 * 3 * 131)
    at = torch.arange(19)
    assert [len(chosen) for _, chosen, _ in blocks(target, torch.zeros(3, 19, 64), at)] == [7, 7, 5]
    kind = draft_kinds.Model(shape, target.config, 5)
    assert add_gradients(kind, parts, target, rows) == pytest.approx(loss.item(), rel=1e-5)
    for (name, one), other in zip(whole.named_parameters(), parts.parameters()):
        assert one.grad.abs().max() > 0, name
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-5, atol=1e-5 * one.grad.abs().max().item())


def shape(dim: int, *others: str):
    return parse_args(["--target", "x", "--output", "y", "--layers", "2", "--dim", str(dim), *others])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_draft_of_every_family_agrees_where_it_must(family):
    hf = {**BASE, **FAMILIES[family]}
    target = config_from_hf(hf)
    draft = config_from_hf(draft_config(hf, shape(48)))
    ropes = [
        name for name in vars(target) if name.startswith("rope_") and name not in ("rope_interleaved", "rope_types")
    ]
    if hf["model_type"] in ("phi3", "olmo3", "hunyuan_v1_dense", "ministral3"):  # no Llama rotates so
        ropes, plain = ["rope_theta"], config_from_hf({**BASE, "model_type": "llama"})
        assert (draft.rope_type, draft.rope_attention_factor, draft.rope_long) == (plain.rope_type, 1.0, ())
    same = ("vocab_size", "max_seq_length", "norm_eps", *ropes)
    assert {name: getattr(draft, name) for name in same} == {name: getattr(target, name) for name in same}
    assert (draft.dim, draft.n_heads, draft.n_kv_heads, draft.head_dim, draft.ffn_dim) == (48, 1, 1, 48, 128)
    assert not (draft.qkv_bias or draft.ffn_bias or draft.qk_norm or any(draft.windows))


def test_rope_of_older_folders_is_kept():
    hf = {**BASE, "model_type": "llama", "rope_theta": 5e5, "original_max_position_embeddings": 24}
    hf["rope_scaling"] = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    draft = draft_config(hf, shape(320, "--kv_heads", "1"))
    assert config_from_hf(draft).rope_theta == 5e5 and config_from_hf(draft).rope_original_length == 24
    assert (draft["num_attention_heads"], draft["head_dim"], draft["intermediate_size"]) == (5, 64, 864)


def test_the_last_documents_are_kept_apart():
    texts = [torch.full((n,), i) for i, n in enumerate((50, 10, 20, 5, 15))]
    for tokens, kept in ((1, 1), (5, 1), (10, 1), (10_000, 1)):  # a tenth of 100 is 10, which the last one has
        assert len(hold_out(texts, tokens)[1]) == kept
    learned, apart = hold_out([*texts, torch.full((4,), 5)], 10_000)  # 10 of 104: the last two
    assert [int(t[0]) for t in learned] == [0, 1, 2, 3] and [int(t[0]) for t in apart] == [4, 5]
    windows = Windows(learned, 8, 99, "training")
    rows = windows.random(seed=1, step=2, rows=200)
    assert rows.shape == (200, 9) and (rows[:, 0] == 99).all() and not torch.isin(rows, torch.tensor([4, 5])).any()
    assert torch.equal(rows, windows.random(1, 2, 200)) and not torch.equal(rows, windows.random(1, 3, 200))
    assert torch.equal(windows.consecutive()[:, 1:].flatten(), torch.cat(learned)[: 85 // 8 * 8])
    without = Windows(learned, 8, None, "training").consecutive()  # the last id of a window is only learned from
    assert torch.equal(without[1:, 0], without[:-1, -1])


# ------------------------------------------------------------------------------------------- stopping


def test_patience_by_hand():
    assert best_and_over([1.0], 1) == (0, False)
    assert best_and_over([1.0, 1.0], 1) == (0, True)
    assert best_and_over([1.0, 1.1, 1.0, 1.09], 3) == (1, False)
    assert best_and_over([1.0, 1.1, 1.0, 1.09, 1.1], 3) == (1, True)  # as good is not better
    assert best_and_over([1.0, 1.1, 1.0, 1.09, 1.2], 3) == (4, False)


def test_a_flat_prediction_ends_the_run_and_the_best_weights_stay(text, tmp_path, monkeypatch, fixed_costs):
    """Predictions 1.0, 1.2, 1.1, 1.2, 1.2: two evaluations after the second would not do for a patience of 3. What is
    written are the weights of step 2, which a run of two steps at the same learning rates ends with."""
    script = iter([1.0, 1.2, 1.1, 1.2, 1.2, 9.9])
    monkeypatch.setattr(distill_draft, "predict", lambda *_: (1, next(script)))
    monkeypatch.setattr(distill_draft, "learning_rate", lambda step, *_: 1e-3)
    found = distill(parse_args(flags(text, tmp_path, steps=40, eval_every=2, patience=3)))
    assert (found["steps"], found["best_step"], found["predicted_speedup"]) == (8, 2, 1.2)
    script = iter([1.0, 1.2])
    distill(parse_args(flags(text, tmp_path, "short", steps=2, eval_every=2)))
    written, short = (tmp_path / name / "model.safetensors" for name in ("draft", "short"))
    assert written.read_bytes() == short.read_bytes()


def test_prediction_grows_where_nothing_pays():
    """Also below 1, where Costs.best would choose not to draft whatever alpha is."""
    dear = Costs(1.0, {k: 0.9 * k for k in (1, 2, 3)}, {k: 1.5 for k in (1, 2, 3)})
    found = [predict(dear, alpha) for alpha in (0.1, 0.2, 0.4)]
    assert [k for k, _ in found] == [1, 1, 1] and found[0][1] == pytest.approx(1.1 / 2.4)
    assert found[0][1] < found[1][1] < found[2][1] < 1 == dear.best(0.4)[1]
    assert predict(COSTS, 0.9)[0] == COSTS.best(0.9)[0] == 8


@pytest.fixture(scope="module")
def uninterrupted(stories, tmp_path_factory):
    """The folder of a run that nothing stops."""
    tmp_path = tmp_path_factory.mktemp("whole")
    (tmp_path / "stories.txt").write_text(stories)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distill_draft, "measure_costs", lambda *_: COSTS)
        distill(parse_args(flags(tmp_path / "stories.txt", tmp_path, "whole", steps=9, eval_every=4)))
    return tmp_path / "whole"


def test_interrupted_runs_end_with_the_same_bits(text, tmp_path, monkeypatch, capsys, fixed_costs, uninterrupted):
    """Ctrl-C inside step 6, between two evaluations: the step ends, is saved, exit status 130; the same command ends
    with the weights of a run that nothing stopped, and notes the same losses."""
    arguments, updates = flags(text, tmp_path, steps=9, eval_every=4), []

    def interrupting(*given):
        updates.append(given)
        if len(updates) == 6:
            signal.raise_signal(signal.SIGINT)
        real(*given)

    real = distill_draft.update
    monkeypatch.setattr(distill_draft, "update", interrupting)
    assert run_main(monkeypatch, capsys, arguments) == (130, [])
    state = torch.load(tmp_path / "draft-work" / "state.pt", weights_only=True)
    assert state["step"] == 6 and len(state["losses"]) == 2 and not (tmp_path / "draft").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert run_main(monkeypatch, capsys, arguments) == (0, []) and len(updates) == 9
    folders = tmp_path / "draft", uninterrupted
    weights = [(folder / "model.safetensors").read_bytes() for folder in folders]
    assert weights[0] == weights[1]
    draft, whole = (json.loads((folder / "distill.json").read_text()) for folder in folders)
    assert draft["evaluations"] == whole["evaluations"]


@pytest.mark.attack
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_killed_run_leaves_no_folder_and_goes_on(number, text, tmp_path, monkeypatch, capsys, uninterrupted):
    """SIGTERM ends a run at once, between two evaluations too: what is kept is the last one's state."""
    arguments = flags(text, tmp_path, steps=9, eval_every=4)
    command = [sys.executable, "-m", "scripts.distill_draft", *arguments]
    env = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    child = subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while not (tmp_path / "draft-work" / "state.pt").exists() and child.poll() is None and time.monotonic() < end:
        time.sleep(0.002)
    child.send_signal(number)
    assert child.wait() == -number and not (tmp_path / "draft").exists()
    assert run_main(monkeypatch, capsys, arguments) == (0, [])
    weights = [(folder / "model.safetensors").read_bytes() for folder in (tmp_path / "draft", uninterrupted)]
    assert weights[0] == weights[1]


# ---------------------------------------------------------------------------------- the target's text


@pytest.fixture
def small_target(tmp_path, story_tokenizer):
    """A random Qwen3, its vocabulary of 384 padded beyond the tokenizer's."""
    folder, hf = tmp_path / "target", {**BASE, **FAMILIES["qwen3"], "vocab_size": 384, "dtype": "bfloat16"}
    save_model(random_model(config_from_hf(hf), seed=4), folder, hf)
    (folder / "tokenizer.model").write_bytes(story_tokenizer.read_bytes())
    return folder


def test_what_the_target_writes_is_written_once(small_target, tmp_path, monkeypatch, capsys, fixed_costs):
    """Every document is what the target generates by itself from BOS with its own seed; a line that a kill cut off is
    written again, the same; other settings are refused. The draft keeps the padded vocabulary."""
    arguments = flags(None, tmp_path, target=small_target, sampled=1500, steps=2, temperature=0.9, context=32)
    assert run_main(monkeypatch, capsys, arguments) == (0, [])
    assert config_json(tmp_path / "draft")["vocab_size"] == 384
    assert load_model(tmp_path / "draft").config.vocab_size > load_tokenizer(tmp_path / "draft").vocab_size
    file = tmp_path / "draft-work" / "sampled.jsonl"
    content = file.read_text()
    written = [json.loads(line)["tokens"] for line in content.splitlines()[1:]]
    assert 1500 <= sum(map(len, written)) < 1500 + 16 * 32 and len(written) % 16 == 0
    model, tokenizer = load_model(small_target), load_tokenizer(small_target)
    options = {"sampling": Sampling(0.9), "max_new_tokens": 31, "stop_ids": tokenizer.stop_ids}
    for number in (0, 17):
        alone = generate(model, [[tokenizer.bos_id]], seed=number, **options)
        assert [id for _, id in alone] == written[number]

    file.write_text("\n".join(content.splitlines()[: 1 + 16 + 5])[:-9])
    other = flags(None, tmp_path, "other", target=small_target, sampled=1500, steps=2, temperature=0.9, context=32)
    other[other.index(str(tmp_path / "other-work"))] = str(tmp_path / "draft-work")
    assert run_main(monkeypatch, capsys, other) == (0, []) and file.read_text() == content
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("draft", "other")]
    assert weights[0] == weights[1]

    again = flags(None, tmp_path, "third", target=small_target, sampled=1500, work=file.parent, context=32)
    status, (message,) = run_main(monkeypatch, capsys, again)
    assert status == 2 and "--temperature 0.9, now it is 1.0" in message and file.read_text() == content


def test_the_target_continues_the_text(small_target, text, tmp_path, monkeypatch, capsys, fixed_costs):
    """With both, what the target writes starts as documents of the training text do, and both are learned."""
    text.write_text(text.read_text().replace("\n\n", "\n").replace(". ", ".\n\n"))  # stories all start alike
    arguments = flags(text, tmp_path, target=small_target, sampled=400, steps=2, context=32)
    assert run_main(monkeypatch, capsys, arguments) == (0, [])
    tokenizer = load_tokenizer(small_target)
    parts = re.split(r"\n[ \t\n]*\n", text.read_text())
    starts = [tokenizer.encode(document, bos=False)[:8] for document in parts if document.strip()]
    lines = (tmp_path / "draft-work" / "sampled.jsonl").read_text().splitlines()[1:]
    written = [json.loads(line)["tokens"] for line in lines]
    assert all(len(ids) <= 31 and any(ids[: len(start)] == start for start in starts) for ids in written)
    assert len({tuple(ids[:8]) for ids in written}) > 4


def test_a_gguf_target_answers_prompts(story_tokenizer, tmp_path, monkeypatch, capsys, fixed_costs):
    """Each document begins with a line of the file in the target's chat format, in turn, and nothing else leads it or a
    window. The draft's folder has the tokenizer that the file stands for. Other prompts are not mixed with what was
    written."""
    pytest.importorskip("gguf")
    from test_gguf import TEMPLATE, changed, from_sentencepiece, write

    def keys(writer) -> None:
        from_sentencepiece(writer, story_tokenizer)
        writer.add_chat_template(TEMPLATE)

    with changed("llama-3.2", vocab_size=384) as family:
        target = write(tmp_path / "m.gguf", family, "Q8_0", keys=keys)
    (tmp_path / "asked.txt").write_text("the cat\n\n  the dog  \na ball\n")
    options = {"target": target, "prompts": tmp_path / "asked.txt", "sampled": 700, "steps": 2, "context": 32}
    arguments = [*flags(None, tmp_path, **options), "--project"]
    seen, cut = [], distill_draft.cut
    monkeypatch.setattr(distill_draft, "cut", lambda *given: seen.append(cut(*given)) or seen[-1])
    assert run_main(monkeypatch, capsys, arguments) == (0, [])
    draft, tokenizer = load_tokenizer(tmp_path / "draft"), load_tokenizer(target)
    assert draft.pieces() == tokenizer.pieces() and draft.template is not None
    asked = [tokenizer.chat([{"role": "user", "content": text}]) for text in ("the cat", "the dog", "a ball")]
    lines = (tmp_path / "draft-work" / "sampled.jsonl").read_text().splitlines()[1:]
    written = [json.loads(line)["tokens"] for line in lines]
    assert len(written) >= 16
    for number, ids in enumerate(written):
        prompt = asked[number % 3]
        assert ids[: len(prompt)] == prompt and len(prompt) < len(ids) <= 32
    given = {"sampling": Sampling(), "max_new_tokens": 32 - len(asked[1]), "stop_ids": tokenizer.stop_ids}
    model = load_model(target, dtype=getattr(torch, load_config(target).dtype or "bfloat16"))
    answer = [id for _, id in generate(model, [asked[1]], seed=1, **given)]
    assert written[1] == asked[1] + answer  # after the prompt alone
    windows, _ = seen[-1]
    assert windows.row(0).tolist() == (written[0] + written[1])[:33]

    (tmp_path / "asked.txt").write_text("the cat\n")
    again = flags(None, tmp_path, "again", **options | {"work": tmp_path / "draft-work"})
    status, (message,) = run_main(monkeypatch, capsys, again)
    assert status == 2 and "texts to continue" in message


def test_a_projected_embedding_is_the_nearest():
    """Products of rows of a table of 24 columns are nearest to the target's own where the difference is what the
    singular values beyond the 24th leave (Eckart and Young); with all columns they are the target's."""
    target = random_model(config_from_hf({**BASE, **FAMILIES["llama-3.2"]}), dtype=torch.float32, seed=1)
    E = target.embed.weight.double()
    E.mul_(torch.linspace(0.1, 3, E.size(1)))  # a random table has no leading directions
    target.embed.weight.data.copy_(E)
    singular = torch.linalg.svdvals(E)
    for columns in (24, 64):
        hf = draft_config({**BASE, **FAMILIES["llama-3.2"]}, shape(columns))
        draft = Transformer(config_from_hf(hf))
        project_embedding(draft, target)
        X = draft.embed.weight.detach().double()
        gram, other = E @ E.T, X @ X.T
        scale = (gram * other).sum() / (other * other).sum()
        left = (gram - scale * other).norm()
        expected = (singular[columns:] ** 4).sum().sqrt()
        assert left.item() == pytest.approx(expected.item(), rel=1e-3, abs=1e-3 * gram.norm().item())
        assert X.std().item() == pytest.approx(0.02, rel=1e-2) and (columns == 64) == (expected == 0)


# -------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "changes, names",
    [
        ({"dim": 95}, "--dim 95 is odd, and RoPE rotates pairs: 96 would work"),
        ({"dim": 96, "heads": 5}, "--heads 5 of an even size; heads that would work: 1, 2, 3, 4, 6, 8, 12, 16, 24, 48"),
        ({"dim": 96, "heads": 6, "kv_heads": 4}, "multiple of --kv_heads 4; kv_heads that would work: 1, 2, 3, 6"),
        ({"layers": 5000}, "num_hidden_layers = 5000"),
        ({"layers": 0}, "--layers"),
        ({"context": 513}, "--context 513 must lie between 16 and the target's 512"),
        ({"context": 8}, "--context 8"),
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
        ({"text": None, "sampled": 100, "prompts": DEMO / "config.json", "context": 16}, "the longest of"),
    ],
)
def test_refusals(text, tmp_path, monkeypatch, capsys, changes, names):
    status, lines = run_main(monkeypatch, capsys, flags(text, tmp_path, **changes))
    assert status == 2 and len(lines) == 1 and names in lines[0], lines
    assert not (tmp_path / "draft").exists() and not (tmp_path / "draft.partial").exists()


def test_too_little_text_and_what_is_no_text(text, tmp_path, monkeypatch, capsys):
    for content, names in (
        (b"One day.\n\nTwo days.", "the training documents have"),
        (b"", "the training documents have 0 tokens, fewer than the 64 of one window"),
        (b"\xff\xfe\x00", "stories.txt: not UTF-8 text"),
    ):
        text.write_bytes(content)
        status, lines = run_main(monkeypatch, capsys, flags(text, tmp_path))
        assert status == 2 and len(lines) == 1 and names in lines[0], lines


def test_other_flags_than_the_saved_run_s_are_refused(text, tmp_path, monkeypatch, capsys, fixed_costs):
    """By the name of the flag, before anything is loaded; the saved run stays, and still ends."""
    arguments = flags(text, tmp_path, steps=6, eval_every=4)
    with monkeypatch.context() as once:
        once.setattr(distill_draft, "update", lambda *_: signal.raise_signal(signal.SIGINT))
        assert run_main(monkeypatch, capsys, arguments)[0] == 130
    state = tmp_path / "draft-work" / "state.pt"
    before, story = state.read_bytes(), text.read_text()
    for changes, names in (
        ({"steps": 7}, "--steps 6, now it is 7"),
        ({"lr": 0.001}, "--lr 0.004, now it is 0.001"),
        ({"ffn": 64}, "--ffn None, now it is 64"),
        ({"seed": 1}, "--seed 0, now it is 1"),
    ):
        status, lines = run_main(monkeypatch, capsys, flags(text, tmp_path, **{"steps": 6, "eval_every": 4} | changes))
        assert status == 2 and len(lines) == 1 and names in lines[0], lines
    text.write_text(story + "The end.")
    status, lines = run_main(monkeypatch, capsys, arguments)
    assert status == 2 and len(lines) == 1 and "the held-out tokens" in lines[0], lines
    text.write_text(story)
    assert state.read_bytes() == before and not (tmp_path / "draft").exists()
    state.write_bytes(before[:1000])
    status, lines = run_main(monkeypatch, capsys, arguments)
    assert status == 2 and len(lines) == 1 and "not a training state" in lines[0], lines
    state.write_bytes(before)
    assert run_main(monkeypatch, capsys, arguments) == (0, [])


def test_learning_rate_rises_and_falls():
    rates = [learning_rate(step, 100, 1.0, warmup=10) for step in range(100)]
    assert rates[0] == 0.1 and rates[10] == max(rates) == 1.0 and rates[99] == pytest.approx(0.02, abs=1e-3)
