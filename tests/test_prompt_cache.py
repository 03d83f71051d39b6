"""What caches hold is not computed again, within a batch, from batch to batch and from run to run;
and nobody can tell but by the time: tokens, keys and values are those of prompts alone and of fresh
runs."""

import contextlib
import copy
import dataclasses
import io
import json
import os
import re
import shutil
import signal
import sys
from collections import Counter

import pytest
import torch
from conftest import in_context
from safetensors.torch import load_file, save_file
from test_dflash import dflash_beside
from test_drafts import SAFEAI, any_drafter, eagle_tensors, pard_folder, written
from test_rounding import SHAPE, bits, large_numbers
from test_speculative import pair, rows_of
from test_tp import launch

import cli.answers
import cli.flags
import cli.options
from cli.flags import parse_args
from cli.main import main as run
from cli.prompt_cache import PromptCache
from decoding.engine import Engine
from decoding.runner import slot_tensors
from decoding.sampling import Sampling
from decoding.scheduler import MIN_REUSED, common_prefix
from decoding.statistics import Timing
from decoding.stored_positions import find_longest_prefix
from drafts.base import ModelDraft
from drafts.ngram import NgramDraft
from generate import LLM
from loading.checkpoint import Checkpoint, load_model
from model import Block, KVCache
from scripts.serve.serve_flags import parse_args as server_flags

COMMON = torch.randint(3, 60, (40,), generator=torch.Generator().manual_seed(2)).tolist()
PROMPTS = [[*COMMON, 7], [*COMMON, 9, 8, 5, 21, 33, 4, 17, 50, 3, 11], [*COMMON, 9, 8, 6]]


@contextlib.contextmanager
def positions_run():
    """{id of a block: positions that passed through it}."""
    seen = Counter()

    def count(module, args) -> None:
        if isinstance(module, Block):
            seen[id(module)] += args[0].size(0) * args[0].size(1)

    handle = torch.nn.modules.module.register_module_forward_pre_hook(count)
    try:
        yield seen
    finally:
        handle.remove()


def drafter_of(kind: str, target, draft):
    if kind in ("plain", "ngram"):
        return NgramDraft(2) if kind == "ngram" else None
    return ModelDraft(draft) if kind == "model" else any_drafter(kind, target, draft)


def engine_of(kind: str, windows=(), rows: int = 3) -> Engine:
    target, draft = pair(windows)
    return Engine(target, rows, 96, drafter=drafter_of(kind, target, draft), speculate_k=3)


def stands(engine: Engine, row: int, n: int) -> dict[str, torch.Tensor]:
    """The keys, values and hidden states of n positions of a row, in all caches."""
    return {name: x.clone() for name, x in slot_tensors(engine.runners, row, 0, n).items()}


KINDS = ["plain", "ngram", "model", "pard", "eagle", "dflash", "shared"]
# ---------------------------------------------------------------------------------- within a batch


@pytest.mark.one_in(7)
@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(Sampling(0), id="greedy"),
        pytest.param(Sampling(0.8, top_k=20), id="sampled", marks=pytest.mark.attack),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_begin_alike_are_the_prompts_alone(kind, sampling):
    options, single, timing = {"sampling": sampling, "seed": 4}, engine_of(kind, rows=1), Timing()
    alone = [rows_of(single.model, [prompt], engine=single, **options)[0] for prompt in PROMPTS]
    engine = engine_of(kind)
    assert rows_of(engine.model, PROMPTS, engine=engine, timing=timing, **options) == alone
    assert timing.cached == [0, 40, 42] and timing.prompt_tokens == 41 + 10 + 1
    engine.clear()
    with positions_run() as seen:
        rows_of(engine.model, PROMPTS, engine=engine, max_new_tokens=1)
    # All of the first, then the rests, each padded to a multiple of 8. EAGLE-3 and DFlash call
    # parts of a block.
    runners = engine.runners[: 1 if kind in ("eagle", "dflash") else 2]
    assert (
        len(seen) == sum(len(runner.model.layers) for runner in runners)
        and seen[id(engine.model.layers[0])] == 72
    )


@pytest.mark.one_in(6)
@pytest.mark.parametrize("windows", [(None, None), (None, 24)], ids=["all", "window"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shared_positions_are_the_same_bits(dtype, windows):
    """Where the engine says that greedy text is identical, keys, values and tokens of a row are the
    prompt's alone."""
    model = large_numbers(dataclasses.replace(SHAPE, windows=windows), dtype=dtype)
    options = {"max_new_tokens": 20, "seed": 1}
    engine = Engine(model, 3, 96)
    assert engine.identical
    got = rows_of(model, PROMPTS, engine=engine, **options)
    for row, prompt in enumerate(PROMPTS):
        single = Engine(model, 1, 96)
        assert rows_of(model, [prompt], engine=single, **options) == [got[row]]
        here, there = stands(engine, row, len(prompt) + 19), stands(single, 0, len(prompt) + 19)
        assert len(here) == 4 and all(
            torch.equal(bits(here[name]), bits(there[name])) for name in here
        )


def test_samples_of_one_prompt_run_it_once():
    engine, prompt, options = (
        engine_of("model"),
        PROMPTS[1],
        {"sampling": Sampling(0.9), "seed": [5, 6, 7]},
    )
    with positions_run() as seen:
        rows_of(engine.model, [prompt] * 3, engine=engine, max_new_tokens=1)
    got = rows_of(engine.model, [prompt] * 3, engine=engine, **options)
    assert set(seen.values()) == {56 + 2 * 8}, (
        "50 positions padded to 56, and the last token of the others"
    )
    assert len({tuple(row) for row in got}) == 3
    single = engine_of("model", rows=1)
    assert got == [
        rows_of(single.model, [prompt], engine=single, sampling=Sampling(0.9), seed=n)[0]
        for n in (5, 6, 7)
    ]


def test_a_few_shared_positions_are_not_copied():
    """A beginning such as BOS alone is in every slot; to copy it would save nothing."""
    for n, reused in ((15, 0), (17, 17)):
        engine, timing = engine_of("plain"), Timing()
        prompts = [[*COMMON[:n], number, *COMMON] for number in (1, 2, 1)]
        rows_of(engine.model, prompts, engine=engine, max_new_tokens=1, timing=timing)
        assert timing.cached == [0, reused, len(prompts[0]) - 1]


@pytest.mark.compiled
def test_compiled_prompts():
    engine = engine_of("plain")
    want = rows_of(engine.model, PROMPTS, engine=engine)
    compiled, timing = Engine(engine.model, 3, 96, compile=True), Timing()
    compiled.warm_up("greedy")
    with torch.compiler.set_stance("fail_on_recompile"):
        assert rows_of(engine.model, PROMPTS, engine=compiled, timing=timing) == want
    assert timing.cached == [0, 40, 42]


# ---------------------------------------------------------------------------- from batch to batch


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "kind",
    [
        "plain",
        "model",
        "eagle",
        *(pytest.param(kind, marks=pytest.mark.attack) for kind in ("ngram", "pard", "dflash")),
        pytest.param("shared", marks=pytest.mark.attack),
    ],
)
def test_newcomers_take_what_other_slots_hold(kind):
    """Each prompt takes its beginning from whichever slot has it, in a later batch of other rows
    and other numbers."""
    engine = engine_of(kind)
    batches = [
        PROMPTS,
        [PROMPTS[2] + [3, 4], PROMPTS[0]],
        [PROMPTS[2] + [3], PROMPTS[1], PROMPTS[2]],
    ]
    for prompts, reused in zip(batches, ([0, 40, 42], [43, 40], [40, 49, 40])):
        timing = Timing()
        got = rows_of(engine.model, prompts, engine=engine, max_new_tokens=20, timing=timing)
        assert all(number >= expected for number, expected in zip(timing.cached, reused)), (
            timing.cached
        )
        single = engine_of(kind, rows=1)
        for prompt, row in zip(prompts, got):
            single.clear()
            assert row == rows_of(single.model, [prompt], engine=single, max_new_tokens=20)[0]
        held = [slot.ids for slot in engine.scheduler.slots]
        assert all((prompt + row)[:-1] in held for prompt, row in zip(prompts, got))


@pytest.mark.one_in(7)
@pytest.mark.parametrize("kind", KINDS)
def test_a_busy_slot_lends_its_beginning(kind):
    """A request that comes while another decodes takes the positions that they share, decided
    tokens included."""
    engine = engine_of(kind)
    options = {"sampling": Sampling(0), "max_new_tokens": 30}
    first = engine.requests[engine.add_request(PROMPTS[0], **options)]
    while len(first.tokens) < 12:
        engine.step()
    prompt = [*PROMPTS[0], *first.tokens[:10], 5]
    second = engine.requests[engine.add_request(prompt, **options)]
    while engine.has_unfinished():
        engine.step()
    assert second.num_reused == len(prompt) - 1
    single = engine_of(kind, rows=1)
    for request in (first, second):
        single.clear()
        assert (
            request.tokens
            == rows_of(single.model, [request.prompt], engine=single, max_new_tokens=30)[0]
        )


def test_a_busy_slot_does_not_pass_its_last_text_off_as_its_own():
    """The longest beginning of a prompt is sought in what a running request has computed, not in
    what the slot held before."""
    engine = engine_of("plain", rows=1)
    options = {"sampling": Sampling(0), "max_new_tokens": 8}
    rows_of(engine.model, PROMPTS[:1], engine=engine, **options)
    held = engine.scheduler.slots[0].ids
    assert find_longest_prefix(engine, [held]).ids == held
    other = [id + 1 for id in PROMPTS[1]]
    request = engine.requests[engine.add_request(other, **options)]
    while len(request.tokens) < 4:
        engine.step()
    assert find_longest_prefix(engine, [held]).ids == []
    assert find_longest_prefix(engine, [other]).ids == other
    assert find_longest_prefix(engine, []).ids == request.cached_ids()


class Forgetful(KVCache):
    """Stands for a fork's cache that drops positions, such as a ring."""

    keeps_prefixes = False


def test_a_cache_may_keep_its_beginnings_to_itself():
    """Neither a free slot nor a busy one lends positions, and no file takes them."""
    target, _ = pair()
    num_reused = {}
    for cache_type in (KVCache, Forgetful):
        engine = Engine(target, 2, 96, cache_type=cache_type)
        timings = [Timing(), Timing()]
        prompts = [PROMPTS[2], [*PROMPTS[2], 5]]
        texts = [
            rows_of(target, prompts, engine=engine, max_new_tokens=20, timing=timing)
            for timing in timings
        ]
        assert texts[0] == texts[1]
        num_reused[cache_type] = [sum(timing.cached) for timing in timings]
        assert bool(find_longest_prefix(engine, []).ids) == cache_type.keeps_prefixes
    assert min(num_reused[KVCache]) > 8 and num_reused[Forgetful] == [0, 0]


# -------------------------------------------------------------------------------- from run to run

TEXT = "the little dog went to play with a big red ball and the little cat"
MORE = f"{TEXT} that was happy"


@pytest.fixture
def ran(text_folder, capsys, monkeypatch):
    """run(flags) -> (JSON objects, stderr); `ran.engines` are those of all runs."""
    engines, run_all = [], LLM.run
    monkeypatch.setattr(
        LLM, "run", lambda self, *args: (engines.append(self.engine), run_all(self, *args))[1]
    )

    def decode(*flags) -> tuple[list[dict], str]:
        usual = (
            "--checkpoint",
            text_folder,
            "--dtype",
            "float32",
            "--max_new_tokens",
            24,
            "--ignore_eos",
        )
        run(parse_args([str(flag) for flag in (*usual, "--json", "--device", "cpu", *flags)]))
        out, err = capsys.readouterr()
        return [json.loads(line) for line in out.splitlines()], err

    decode.engines = engines
    return decode


def draft_folder(kind: str, target, folder):
    if kind == "pard":
        return pard_folder(target, folder)
    if kind == "model":
        return shutil.copytree(target, folder)
    if kind == "dflash":
        return dflash_beside(target, folder)
    tensors = eagle_tensors("midlayer", 3 * 64)
    tensors["t2d"] = torch.zeros(384, dtype=torch.bool)
    return written(folder, {**SAFEAI, "vocab_size": 384}, tensors)


def test_longropes_factors_are_named_and_stored(ran, text_folder, tmp_path):
    """A text up to the original context, then one that may outgrow it: the start says which factors
    it takes, and positions that were rotated by the others are refused."""
    folder = shutil.copytree(text_folder, tmp_path / "longrope")
    config = json.loads((folder / "config.json").read_text())
    num_pairs = config["hidden_size"] // config["num_attention_heads"] // 2
    rope = {"rope_type": "longrope", "rope_theta": 10000.0}
    rope["original_max_position_embeddings"] = 64
    rope["short_factor"] = [1.0] * num_pairs
    rope["long_factor"] = [5.0] * num_pairs
    config["rope_parameters"] = rope
    (folder / "config.json").write_text(json.dumps(config))
    file = tmp_path / "cache"
    flags = ("--checkpoint", folder, "--prompt", TEXT, "--prompt_cache", file)
    _, err = ran(*flags, "--max_seq_length", 64)
    assert "long factors" not in err
    _, err = ran(*flags, "--max_seq_length", 64)
    assert "tokens read in" in err
    with pytest.raises(ValueError, match="longrope's long factors: False there, True here"):
        ran(*flags, "--max_seq_length", 65)
    _, err = ran(*flags[:4], "--max_seq_length", 65)
    assert "longrope takes its long factors, since texts may have 65 tokens" in err


@pytest.mark.one_in(5)
@pytest.mark.parametrize("temperature", [0, pytest.param(0.8, marks=pytest.mark.attack)])
@pytest.mark.parametrize("kind", ["plain", "model", "pard", "eagle", "dflash"])
def test_a_resumed_run_is_a_fresh_one(kind, temperature, ran, text_folder, tmp_path):
    file, flags = tmp_path / "cache", ["--temperature", temperature]
    if kind != "plain":
        flags += [
            "--draft_checkpoint",
            draft_folder(kind, text_folder, tmp_path / "draft"),
            "--speculate_k",
            3,
        ]
    (first,), _ = ran("--prompt", TEXT, "--prompt_cache", file, *flags)
    n = len(first["prompt_tokens"])
    assert first["cached_tokens"] == 0 and load_file(file)["ids"].tolist() == first["prompt_tokens"]
    (fresh,), _ = ran("--prompt", MORE, *flags)
    written_at = file.stat().st_mtime_ns
    (resumed,), err = ran("--prompt", MORE, "--prompt_cache", file, *flags)
    # the last may be another with more behind it
    same = n - (fresh["prompt_tokens"][:n] != first["prompt_tokens"])
    assert resumed["tokens"] == fresh["tokens"] and resumed["cached_tokens"] == same > 15
    assert f"{same} of {len(fresh['prompt_tokens'])} tokens reused" in err
    if kind != "plain":
        assert (
            resumed["speculative"]["accepted_by_position"]
            == fresh["speculative"]["accepted_by_position"]
        )
    here, there = (stands(engine, 0, len(fresh["prompt_tokens"])) for engine in ran.engines[-2:])
    assert (
        here.keys() == there.keys()
        and len(here) == {"plain": 6, "model": 12, "pard": 12, "eagle": 11, "dflash": 12}[kind]
    )
    assert all(torch.allclose(here[name], there[name], atol=1e-4) for name in here)
    assert file.stat().st_mtime_ns > written_at and len(load_file(file)["ids"]) == len(
        fresh["prompt_tokens"]
    )


def test_lines_that_begin_alike_compute_that_once_for_all_batches(ran, tmp_path):
    """Five lines by twos, then by ones; then from a file, which holds what all of them have in
    common."""
    texts = [
        f"{TEXT} and {word}"
        for word in ("the little cat went", "went", "was happy", "a", "big red")
    ]
    lines, file = tmp_path / "lines.jsonl", tmp_path / "cache"
    lines.write_text(
        "".join(json.dumps({"prompt": text, "seed": n}) + "\n" for n, text in enumerate(texts))
    )
    alone = [ran("--prompt", text, "--seed", n)[0][0] for n, text in enumerate(texts)]
    prompts = [row["prompt_tokens"] for row in alone]
    common = common_prefix(*prompts)
    assert 15 < common < min(map(len, prompts))
    common_run = common + -common % 8  # padded
    for size, flags in (
        (2, ()),
        (1, ("--prompt_cache", file)),
        (2, ("--prompt_cache", file)),
        (5, ()),
    ):
        with positions_run() as seen:
            found, err = ran(
                "--prompt_file",
                lines,
                "--batch_size",
                size,
                "--ordered",
                "--max_new_tokens",
                1,
                *flags,
            )
        # rests take one or two eights
        most = 8 * 6 * 2 + (0 if file.exists() and size == 2 and flags else common_run)
        assert max(seen.values()) <= most < sum(map(len, prompts)), (
            "what they begin with ran more than once"
        )
        assert all(a["cached_tokens"] >= common for a in found[1:]) and [
            a["tokens"] for a in found
        ] == [a["tokens"][:1] for a in alone]
        kept_tokens = sum(a["cached_tokens"] for a in found)
        assert f"{kept_tokens} of {sum(map(len, prompts))} tokens reused" in err
    assert len(load_file(file)["ids"]) == common, "of several prompts what all have in common"
    found, _ = ran("--prompt_file", lines, "--batch_size", 2, "--prompt_cache", file)
    assert [a["tokens"] for a in found] == [a["tokens"] for a in alone] and found[0][
        "cached_tokens"
    ] == common


@pytest.mark.ranks
def test_ranks_share_and_keep_the_same(ran, text_folder, tmp_path):
    """Two of them, the target divided and the draft too: what one process computes once, they
    do."""
    lines = tmp_path / "lines.jsonl"
    lines.write_text(
        "".join(
            json.dumps({"prompt": f"{TEXT} {TEXT} and {word}"}) + "\n"
            for word in ["the", "a", "went", "play"]
        )
    )
    flags = [
        "--prompt_file",
        lines,
        "--batch_size",
        3,
        "--draft_checkpoint",
        text_folder,
        "--speculate_k",
        2,
    ]
    flags += ["--temperature", 0]
    one, _ = ran(*flags)
    usual = [
        "--checkpoint",
        text_folder,
        "--dtype",
        "float32",
        "--max_new_tokens",
        24,
        "--ignore_eos",
        "--json",
    ]
    done = launch("generate.py", *usual, "--device", "cpu", "--draft_tp", *flags)
    two = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["tokens"] for row in two] == [row["tokens"] for row in one], done.stderr
    cached = [row["cached_tokens"] for row in two]
    assert cached == [row["cached_tokens"] for row in one] and cached[0] == 0 < min(cached[1:])


def test_samples_are_kept_too(ran, tmp_path):
    flags = ("--prompt", TEXT, "--num_samples", 3, "--prompt_cache", tmp_path / "cache")
    first, _ = ran(*flags)
    again, _ = ran(*flags, "--batch_size", 1)
    n = len(first[0]["prompt_tokens"]) - 1
    assert [row["cached_tokens"] for row in first] == [0, n, n] and [
        row["cached_tokens"] for row in again
    ] == [n] * 3
    assert [row["tokens"] for row in first] == [row["tokens"] for row in again]
    assert len({tuple(row["tokens"]) for row in first}) == 3


def test_the_file_grows_and_does_not_shrink(ran, tmp_path):
    file = tmp_path / "cache"
    for prompt, grows in (
        (TEXT, True),
        (TEXT[:30], False),
        (MORE, True),
        (MORE, False),
        ("a big dog", False),
    ):
        before = file.read_bytes() if file.exists() else None
        # less room than it holds
        (row,), err = ran("--prompt", prompt, "--prompt_cache", file, "--max_new_tokens", 2)
        assert (file.read_bytes() != before) == grows == ("tokens written" in err)
        assert not grows or load_file(file)["ids"].tolist() == row["prompt_tokens"]
    assert [each.name for each in tmp_path.iterdir()] == ["cache"]


def test_what_fails_or_is_interrupted_leaves_nothing_half_known(
    ran, text_folder, tmp_path, monkeypatch
):
    """Ctrl-C between two tokens keeps the prompt; an error keeps nothing."""
    file, feed, count = tmp_path / "cache", cli.answers.RowAnswer.add, []

    def interrupting(self, *given):
        feed(self, *given)
        count.append(given)
        if len(count) == 3:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(cli.answers.RowAnswer, "add", interrupting)
        with pytest.raises(KeyboardInterrupt):
            ran("--prompt", TEXT, "--prompt_cache", file)
    assert len(count) == 4  # three tokens, then the end of the text
    stored = file.read_bytes()
    assert (
        ran("--prompt", TEXT, "--prompt_cache", file)[0][0]["tokens"]
        == ran("--prompt", TEXT)[0][0]["tokens"]
    )

    def failing(self, *given):
        raise ValueError("no room")

    monkeypatch.setattr(cli.answers.RowAnswer, "add", failing)
    with pytest.raises(ValueError, match="no room"):
        ran("--prompt", MORE, "--prompt_cache", file)
    assert file.read_bytes() == stored and ran.engines
    with pytest.raises(ValueError, match="no room"):
        ran("--prompt", MORE, "--prompt_cache", tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("draft", [False, True])
def test_a_chat_goes_into_the_file(draft, text_folder, tmp_path, capsys, monkeypatch):
    """What was said so far, at its end; the next chat with the same system message and first
    question begins there."""
    file, turns = tmp_path / "cache", ["the little cat", "a big dog"]
    flags = [
        "--interactive",
        "--checkpoint",
        text_folder,
        "--temperature",
        0,
        "--dtype",
        "float32",
        "--device",
        "cpu",
    ]
    flags += ["--max_new_tokens", 10, "--ignore_eos", "--system", "the big red ball"]
    flags += ["--draft_checkpoint", text_folder, "--speculate_k", 3] * draft
    said = []
    for cache in ([], ["--prompt_cache", file], ["--prompt_cache", file]):
        monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(turns) + "\n"))
        run(parse_args([str(flag) for flag in (*flags, *cache)]))
        said.append(capsys.readouterr())
    assert said[0].out == said[1].out == said[2].out and said[0].out.strip()
    reads = [
        [int(n) for n in re.findall(r"(\d+) tokens read, (\d+) reused", err)[0]] for _, err in said
    ]
    assert reads[0][1] == reads[1][1] == 0 and reads[2][0] == 1 and sum(reads[2]) == reads[0][0]
    assert len(load_file(file)["ids"]) > reads[0][0] + 10


@pytest.mark.one_in(5)
@pytest.mark.parametrize("plain", [0, 7])
@pytest.mark.parametrize("kind", ["plain", "model", "pard", "eagle", "dflash"])
def test_a_conversation_is_written_as_far_as_all_models_know_it(kind, plain, text_folder, tmp_path):
    """A draft's caches are behind by a round, and by steps that nobody drafted."""
    engine = engine_of(kind, rows=1)
    args = parse_args(["--checkpoint", str(text_folder), "--prompt_cache", str(tmp_path / "cache")])
    with PromptCache(args).around(engine, []):
        prompt = COMMON
        for draft, new in ((True, 20), (False, plain)):
            if new:
                id = engine.add_request(
                    prompt, sampling=Sampling(0), max_new_tokens=new, draft=draft
                )
                request = engine.requests[id]
                while engine.has_unfinished():
                    engine.step()
                prompt = prompt + request.tokens
    ids, fresh, later = (
        load_file(tmp_path / "cache")["ids"].tolist(),
        engine_of(kind, rows=1),
        engine_of(kind, rows=1),
    )
    # DFlash has no context of the last decided token before its round
    num_behind = 5 if kind == "dflash" else 4
    assert ids == prompt[: len(ids)] and len(prompt) - num_behind - plain <= len(ids) < len(prompt)
    rows_of(fresh.model, [ids], engine=fresh, max_new_tokens=1)
    with PromptCache(args).around(later, []):
        here, there = stands(later, 0, len(ids)), stands(fresh, 0, len(ids))
    assert all(torch.allclose(here[name], there[name], atol=1e-4) for name in there)


# --------------------------------------------------------------------------------------- refusals


@pytest.fixture(scope="module")
def stored(text_folder, tmp_path_factory):
    """A file of TEXT with a draft, and the flags that made it."""
    folder = tmp_path_factory.mktemp("stored")
    draft = shutil.copytree(text_folder, folder / "draft")
    flags = [
        "--checkpoint",
        text_folder,
        "--draft_checkpoint",
        draft,
        "--device",
        "cpu",
        "--max_new_tokens",
        3,
    ]
    flags = [
        str(flag)
        for flag in (
            *flags,
            "--prompt",
            TEXT,
            "--speculate_k",
            2,
            "--prompt_cache",
            folder / "cache",
        )
    ]
    run(parse_args(flags))
    return folder / "cache", flags


def refused(flags: list[str], file, match: str, capsys) -> None:
    """By name and with what helps, before anything is decoded; the file stays as it was, and
    nothing lies beside it."""
    before = file.read_bytes() if file.is_file() else None
    beside = sorted(file.parent.iterdir())
    with pytest.raises(ValueError, match=match) as error:
        run(parse_args([*flags, "--prompt_cache", str(file)]))
    assert str(file) in str(error.value) and "delete it, or name another file" in str(error.value)
    assert not capsys.readouterr().out
    assert sorted(file.parent.iterdir()) == beside and (
        before is None or file.read_bytes() == before
    )


@pytest.mark.parametrize(
    "changes, match",
    [
        (["--quantize", "int8"], "--quantize: None there, int8 here"),
        (["--quantize", "int8", "--quantize_head", "int8"], "--quantize: None there"),
        (["--draft_quantize", "int8"], "--draft_quantize: None there, int8 here"),
        (
            ["--dtype", "bfloat16"],
            "--dtype: torch.float32, torch.float32 there, torch.bfloat16, torch.bfloat16 here",
        ),
        (["--checkpoint", "OTHER"], "--checkpoint: another one there than here"),
        (["--draft_checkpoint", "OTHER"], "--draft_checkpoint: another one there than here"),
        (["--random_weights", "OTHER/config.json"], "--checkpoint: another one"),
    ],
)
def test_what_another_run_computed_otherwise_is_refused(
    changes, match, stored, text_folder, tmp_path, capsys
):
    file, flags = stored
    other = shutil.copytree(text_folder, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 5] += 1  # of a few numbers one is another
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    changes = [change.replace("OTHER", str(other)) for change in changes]
    refused([*flags, *changes], file, match, capsys)


@pytest.mark.parametrize("keep_date", [True, False], ids=["date kept", "date changed"])
def test_a_change_deep_inside_a_large_tensor_is_refused(keep_date, text_folder, tmp_path, capsys):
    """Samples of a tensor reach its last row, whatever the file's date; the date shows a change
    between the samples."""
    folder = shutil.copytree(text_folder, tmp_path / "wide")
    hf = json.loads((folder / "config.json").read_text())
    vocab, dim = 2048, hf["hidden_size"]
    (folder / "config.json").write_text(
        json.dumps({**hf, "vocab_size": vocab, "tie_word_embeddings": True})
    )
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    tensors["model.embed_tokens.weight"] = torch.randn(
        vocab, dim, generator=torch.Generator().manual_seed(0)
    )
    save_file(tensors, folder / "model.safetensors")
    flags = [
        "--checkpoint",
        str(folder),
        "--device",
        "cpu",
        "--max_new_tokens",
        "2",
        "--prompt",
        TEXT,
    ]
    run(parse_args([*flags, "--prompt_cache", str(tmp_path / "cache")]))
    capsys.readouterr()
    before = (folder / "model.safetensors").stat()
    tensors["model.embed_tokens.weight"][-1 if keep_date else 100, 7] += 1
    save_file(tensors, folder / "model.safetensors")
    date = before.st_mtime_ns + (0 if keep_date else 10**9)
    os.utime(folder / "model.safetensors", ns=(date, date))
    refused(flags, tmp_path / "cache", "--checkpoint: another one there than here", capsys)


def test_weights_are_their_content_wherever_they_lie(text_folder, tmp_path, capsys):
    """A copy has other dates, as `cp -r` gives them; what was read from there is extended here."""
    copy = shutil.copytree(text_folder, tmp_path / "copy")
    os.utime(copy / "model.safetensors", (1, 1))
    cache = tmp_path / "cache"
    flags = ["--device", "cpu", "--max_new_tokens", "2", "--json", "--prompt_cache", str(cache)]
    run(parse_args([*flags, "--checkpoint", str(text_folder), "--prompt", TEXT]))
    for folder, text in ((copy, f"{TEXT} and a dog"), (text_folder, f"{TEXT} and a dog")):
        capsys.readouterr()
        run(parse_args([*flags, "--checkpoint", str(folder), "--prompt", text]))
        assert json.loads(capsys.readouterr().out)["cached_tokens"] > 15


def test_an_adapter_is_its_content_wherever_it_lies(text_folder, tmp_path, capsys):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {
        f"{name}.lora_A.weight": torch.randn(2, 64, generator=generator),
        f"{name}.lora_B.weight": torch.randn(64, 2, generator=generator),
    }
    file = adapter / "adapter_model.safetensors"
    save_file(tensors, file)
    flags = ["--checkpoint", str(text_folder), "--device", "cpu", "--max_new_tokens", "2"]
    flags += ["--prompt", TEXT]
    cache = tmp_path / "cache"
    run(parse_args([*flags, "--adapter", str(adapter), "--prompt_cache", str(cache)]))
    capsys.readouterr()
    copy = shutil.copytree(adapter, tmp_path / "copy")
    again = ["--adapter", str(copy), "--prompt_cache", str(cache), "--json"]
    run(parse_args([*flags, *again]))
    assert json.loads(capsys.readouterr().out)["cached_tokens"] > 15
    tensors[f"{name}.lora_B.weight"][5, 1] += 1
    save_file(tensors, file)
    refused([*flags, "--adapter", str(adapter)], cache, "--adapter: another one there", capsys)


def test_ranks_compare_copies_whatever_their_dates(text_folder, tmp_path):
    """Two machines have copies of other dates; another number in a tensor's last row is another
    model."""
    copy = shutil.copytree(text_folder, tmp_path / "copy")
    os.utime(copy / "model.safetensors", (1, 1))
    here, there = (Checkpoint(folder).fingerprints() for folder in (text_folder, copy))
    assert here == there
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][-1, -1] += 1
    save_file(tensors, copy / "model.safetensors")
    assert Checkpoint(copy).fingerprints() != here


def test_a_file_without_its_draft_is_refused(stored, text_folder, capsys):
    file, _ = stored
    refused(
        ["--checkpoint", str(text_folder), "--device", "cpu"],
        file,
        "--draft_checkpoint: another",
        capsys,
    )


def test_a_folder_may_have_moved(stored, text_folder, tmp_path, capsys):
    """Not the path counts, but what lies there; and other positions, lengths of drafts and
    samplings are the user's."""
    _, flags = stored
    moved = shutil.copytree(text_folder, tmp_path / "moved")
    run(
        parse_args(
            [
                *flags,
                "--checkpoint",
                str(moved),
                "--speculate_k",
                "4",
                "--max_seq_length",
                "90",
                "--json",
            ]
        )
    )
    assert json.loads(capsys.readouterr().out)["cached_tokens"] > 15


def rewritten(file, there, change) -> None:
    """The file with other tensors and metadata."""
    from safetensors import safe_open

    with safe_open(file, framework="pt") as reader:
        names = reader.keys()
        tensors = {name: reader.get_tensor(name).clone() for name in names}
        metadata = reader.metadata()
    change(tensors, metadata)
    save_file(tensors, there, metadata=metadata)


BROKEN = {
    "no safetensors": (lambda data: b"not a cache", "not a readable safetensors file"),
    "empty": (lambda data: b"", "not a readable safetensors file"),
    "header too long": (lambda data: b"\xff" * 8 + data[8:], "not a readable safetensors file"),
    "one byte short": (lambda data: data[:-1], "not a readable safetensors file"),
    "one byte more": (lambda data: data + b"x", "not a readable safetensors file"),
    "another last byte": (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "checksum: "),
    "another byte in the middle": (
        lambda data: (
            data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 64]) + data[len(data) // 2 + 1 :]
        ),
        "checksum: ",
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_file_is_refused(how, stored, tmp_path, capsys):
    file, flags = stored
    change, match = BROKEN[how]
    (tmp_path / "cache").write_bytes(change(file.read_bytes()))
    refused(flags, tmp_path / "cache", match, capsys)


def swap(tensors, metadata):
    tensors["0.0.k"], tensors["0.0.v"] = tensors["0.0.v"], tensors["0.0.k"]


WRONG = {
    "another version": (
        lambda t, m: m.update(format="a prompt cache of quickdraft, 99"),
        "format: .* 99 there, ",
    ),
    "no metadata of ours": (lambda t, m: m.clear(), "format: None there"),
    "no checksum": (lambda t, m: m.pop("checksum"), "checksum: None there"),
    "a layer less": (lambda t, m: t.pop("0.2.v"), "checksum: "),
    "a tensor more": (lambda t, m: t.update(more=torch.zeros(2)), "checksum: "),
    "fewer positions in one": (
        lambda t, m: t.update({"1.0.k": t["1.0.k"][:, 1:].clone()}),
        "checksum: ",
    ),
    "another type": (
        lambda t, m: t.update({"0.1.k": t["0.1.k"].half()}),
        "checksum: ",
    ),
    "no ids": (lambda t, m: t.pop("ids"), "checksum: "),
    "ids of another shape": (lambda t, m: t.update(ids=t["ids"][None].clone()), "checksum: "),
    "one number for ids": (lambda t, m: t.update(ids=t["ids"][0].clone()), "checksum: "),
    "other ids": (lambda t, m: t["ids"].add_(1), "checksum: "),
    "keys and values in each other's place": (swap, "checksum: "),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("how", WRONG)
def test_a_wrong_file_is_refused(how, stored, tmp_path, capsys):
    file, flags = stored
    change, match = WRONG[how]
    rewritten(file, tmp_path / "cache", change)
    refused(flags, tmp_path / "cache", match, capsys)


def test_any_cut_and_any_changed_byte_is_refused(stored, tmp_path, text_folder):
    """Of the file: metadata is JSON with names, where a changed letter may say the same to
    safetensors."""
    file, flags = stored
    data, generator = file.read_bytes(), torch.Generator().manual_seed(0)
    header = 8 + int.from_bytes(data[:8], "little")
    target, draft = (load_model(text_folder, dtype=torch.float32) for _ in range(2))
    engine = Engine(target, 1, 160, drafter=ModelDraft(draft), speculate_k=2)
    args, broken = (
        parse_args([*flags, "--prompt_cache", str(tmp_path / "cache")]),
        tmp_path / "cache",
    )

    def fate() -> str | None:
        engine.clear()
        try:
            PromptCache(args).load(engine)
        except ValueError as error:
            assert not any(slot.ids for slot in engine.scheduler.slots) and str(broken) in str(
                error
            )
            return str(error)
        return None

    broken.write_bytes(data)
    assert fate() is None
    for at in torch.randint(len(data), (40,), generator=generator).tolist():
        broken.write_bytes(data[:at])
        assert fate(), f"cut to {at} bytes of {len(data)}"
    for at in torch.randint(header, len(data), (40,), generator=generator).tolist():
        broken.write_bytes(data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])
        assert "checksum" in fate(), f"byte {at} of {len(data)}"
    for at in torch.randint(header, (40,), generator=generator).tolist():
        broken.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert fate() or engine, f"byte {at} of the header raises something else than ValueError"


def test_where_no_file_can_be(tmp_path, capsys, monkeypatch):
    (tmp_path / "folder").mkdir()
    with pytest.raises(
        ValueError, match=r"--prompt_cache .*/folder is a folder: name a file in it"
    ):
        parse_args(["--prompt_cache", str(tmp_path / "folder")])
    with pytest.raises(
        ValueError, match=r"--prompt_cache .*none/cache: its folder does not exist or cannot be"
    ):
        parse_args(["--prompt_cache", str(tmp_path / "none" / "cache")])
    monkeypatch.setattr(cli.options, "launched", lambda: True)
    with pytest.raises(
        ValueError, match="--prompt_cache is one process's: start it without torchrun"
    ):
        parse_args(["--prompt_cache", str(tmp_path / "cache")])
    with pytest.raises(SystemExit):
        server_flags(["--prompt_cache", "x"])
    assert "--prompt_cache is about generate.py's own prompts" in capsys.readouterr().err


def test_a_missing_checkpoint_is_named_as_without_the_flag(tmp_path):
    for flags in (
        ["--checkpoint", str(tmp_path / "none")],
        ["--random_weights", str(tmp_path / "none.json")],
    ):
        messages = []
        for cache in ([], ["--prompt_cache", str(tmp_path / "cache")]):
            with pytest.raises(ValueError, match=r"none\S*: no such") as error:
                run(parse_args([*flags, "--device", "cpu", "--prompt", TEXT, *cache]))
            messages.append(str(error.value))
        assert messages[0] == messages[1]


def test_an_interrupted_copy_of_a_prefix_lends_nothing(monkeypatch):
    """A request gets its slot before the prefix of another slot is copied to it. The slot of an
    aborted copy holds nothing that a later request could take."""
    model, prompt = copy.copy(engine_of("plain").model), PROMPTS[0] * 2
    in_context(model, len(prompt) + 20)

    def pair(engine: Engine) -> list[list[int]]:
        options = {"sampling": Sampling(0), "max_new_tokens": 10}
        requests = [engine.requests[engine.add_request(prompt, **options)] for _ in range(2)]
        while engine.has_unfinished():
            engine.step()
        return [request.tokens for request in requests]

    def interrupt(*arguments) -> None:
        raise KeyboardInterrupt

    engine, length = Engine(model, 2, len(prompt) + 20), len(prompt)
    assert length > MIN_REUSED
    engine.add_request(prompt, sampling=Sampling(0), max_new_tokens=10)
    engine.step()
    engine.add_request([*prompt, 5], sampling=Sampling(0), max_new_tokens=10)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("decoding.prefill.copy_positions", interrupt)
        engine.step()
    assert pair(engine) == pair(Engine(model, 2, length + 20))


@pytest.mark.parametrize("ends", ["abort", "reset", "runs"])
def test_a_prompt_that_is_not_finite_lends_nothing_before_its_first_token(ends):
    """In a chunk with a NaN all positions may hold one (0 times NaN), also those before it. What
    the first token has not shown to be finite is not reused: not after an abort or a reset within
    the prompt, and not while it runs."""
    model = in_context(copy.deepcopy(engine_of("plain").model), 200)
    common, poison = [*range(3, 43)], 60
    model.lm_head.weight = torch.nn.Parameter(
        model.lm_head.weight.detach().clone(), requires_grad=False
    )
    model.embed.weight = torch.nn.Parameter(
        model.embed.weight.detach().clone(), requires_grad=False
    )
    model.embed.weight.data[poison] = float("nan")

    def finished(engine: Engine, id: int) -> tuple:
        request = engine.requests[id]
        while request.finish_reason is None:
            engine.step()
        return request.tokens, request.error

    options, prompt = {"sampling": Sampling(0), "max_new_tokens": 5}, [*common, 7, 8]
    single = Engine(model, 1, 200)
    expected = finished(single, single.add_request(prompt, **options))
    engine = Engine(model, 2, 200)
    engine.runner.chunk = 64
    broken = engine.add_request([*common, poison, *[9] * 100], **options)
    engine.step()
    if ends == "abort":
        engine.abort(broken)
    elif ends == "reset":
        engine.reset()
    assert (
        finished(engine, engine.add_request(prompt, **options)) == expected and expected[1] is None
    )
