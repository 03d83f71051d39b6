"""The engine: fixed batch, steps compiled once, a host that may read late. Compiled code must give
what eager gives, and nothing may compile after warm-up."""

import gzip
import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import generate, in_context
from test_generate import PROMPTS, SAMPLED, rows_of

import cli.opening as opening
import decoding.readback as timing
import weights.compiling as compiling
from cli.flags import parse_args
from cli.main import main as run
from decoding.batch import Batch
from decoding.engine import Engine
from decoding.planner import Step
from decoding.runner import ModelRunner
from decoding.sampling import (
    ACCEPT,
    DRAFT_DRAW,
    GREEDY,
    PATHS,
    Sampling,
    round_uniform,
    uniform,
)
from decoding.scheduler import Request
from drafts.base import ModelDraft
from drafts.ngram import NgramDraft
from drafts.suffix import SuffixDraft
from drafts.target_layers import layer_subset
from exact.attention import KEY_BLOCK, round_up_length
from loading.checkpoint import load_model
from model import visible_keys
from speculative import decide, decode_round

KINDS = [Sampling(0), Sampling(0.9), Sampling(0.7, top_k=20, top_p=0.9)]


def start(batch: Batch, prompts: list[list[int]], max_new_tokens: int, stop_ids=()) -> None:
    """Fill the slots as if the prompts had run."""
    for slot, prompt in enumerate(prompts):
        batch.fill(slot, Request(slot, prompt, Sampling(0), max_new_tokens, stop_ids))
        batch.activate(slot, len(prompt))


def compiled_engine(folder, batch_size: int, length: int, samplings=KINDS) -> Engine:
    engine = Engine(load_model(folder, dtype=torch.float32), batch_size, length, compile=True)
    for sampling in samplings:
        engine.warm_up(sampling.path)
    return engine


@pytest.mark.compiled
@pytest.mark.parametrize("batch_size", [1, pytest.param(3, marks=pytest.mark.long)])
def test_nothing_compiles_after_warm_up(folder_of, batch_size, monkeypatch):
    """20 prompt lengths, every kind with changing values and all at once, full and partly filled
    batches, turns of a chat: a recompile raises."""
    monkeypatch.setattr("decoding.runner.PREFILL_CHUNK", 16)  # prompts of one chunk and of several
    # a window of 9 and more than it filled
    engine = compiled_engine(folder_of("mistral-v0.1"), batch_size, 100)
    eager = load_model(folder_of("mistral-v0.1"), dtype=torch.float32)
    other = Engine(engine.model, 1, 20)  # shares the model
    generator = torch.Generator().manual_seed(0)
    with torch.compiler.set_stance("fail_on_recompile"):
        for n in range(1, 21):
            lengths = [n, *range(30, 30 + n % batch_size)]
            prompts = [
                torch.randint(3, 131, (length,), generator=generator).tolist() for length in lengths
            ]
            for sampling in (
                Sampling(0),
                Sampling(0.5 + n / 10),
                Sampling(1.0, top_k=n + 1, top_p=0.9, min_p=n / 100),
            ):
                got = rows_of(
                    engine.model, prompts, sampling=sampling, engine=engine, max_new_tokens=9
                )
                assert got == rows_of(eager, prompts, sampling=sampling, max_new_tokens=9)
            rows_of(engine.model, [[n]], engine=other, max_new_tokens=2)
            mixed = {
                "sampling": [Sampling(0.9, top_k=1), Sampling(1.0, top_k=5), Sampling(0.5)]
                * len(prompts)
            }
            got = rows_of(engine.model, prompts * 3, **mixed, engine=engine, max_new_tokens=9)
            assert got == rows_of(eager, prompts * 3, **mixed, max_new_tokens=9)
        for length in (20, 40, 41, 3):  # turns of a chat
            rows_of(engine.model, [list(range(length))], engine=engine, max_new_tokens=3)
        with pytest.raises(Exception, match="recompile"):  # control: the stance does bite
            rows_of(engine.model, [[5]], engine=Engine(engine.model, 1, 40, compile=True))


@pytest.mark.compiled
@pytest.mark.parametrize("isolated", [True, False], ids=["as it is", "control"])
def test_engines_keep_their_own_code_on_older_torch(folder_of, isolated, monkeypatch):
    """As before torch 2.13, where two engines of the same kind share a function. The control shows
    that they would share its code too."""
    monkeypatch.setattr(compiling, "CAN_ISOLATE", False)
    if not isolated:
        monkeypatch.setattr(compiling, "_call_numbers", itertools.repeat(0))
    texts, folder = [], folder_of("llama-3")
    for scheme in (None, "int8"):
        model = load_model(folder, dtype=torch.float32, quantize=scheme)
        engine = Engine(model, 1, 60, compile=True, compile_prompts=False)
        with (
            nullcontext()
            if isolated or scheme is None
            else pytest.raises(Exception, match="weight")
        ):
            texts.append(rows_of(model, PROMPTS[:1], engine=engine))
            assert texts[-1] == rows_of(
                load_model(folder, dtype=torch.float32, quantize=scheme), PROMPTS[:1]
            )
    assert len(texts) == 1 + isolated


@pytest.mark.compiled
@pytest.mark.parametrize("scheme", ["int8", pytest.param("int4-g32", marks=pytest.mark.long)])
def test_no_prompt_and_no_number_of_threads_compiles_anew(folder_of, scheme):
    """Prompts of more and fewer rows than the kernels take at once, embedded by a quantized head. A
    program may change the number of threads between two requests."""
    options = {"dtype": torch.float32, "quantize": scheme, "head_scheme": scheme}
    engine = Engine(load_model(folder_of("llama-3.2"), **options), 1, 60, compile=True)
    engine.warm_up(GREEDY)
    eager, usual = load_model(folder_of("llama-3.2"), **options), torch.get_num_threads()
    try:
        with torch.compiler.set_stance("fail_on_recompile"):
            for n, threads in ((2, 1), (15, 2), (16, 1), (17, 2), (40, 1)):
                torch.set_num_threads(threads)
                prompt = list(range(3, 3 + n))
                assert rows_of(engine.model, [prompt], engine=engine) == rows_of(eager, [prompt]), n
    finally:
        torch.set_num_threads(usual)


@pytest.mark.long
@pytest.mark.parametrize("sampling", [Sampling(0), Sampling(0.9)], ids=["greedy", "sampled"])
def test_compiled_rows_equal_their_prompts_alone(folder_of, sampling):
    """Ragged and compiled against alone and eager, with a stop id, up to the last position of the
    context."""
    engine = compiled_engine(folder_of("qwen3-biased"), 4, 160, [sampling])
    model = load_model(folder_of("qwen3-biased"), dtype=torch.float32)
    alone = [
        rows_of(model, [prompt], sampling=sampling, max_new_tokens=150)[0] for prompt in PROMPTS
    ]
    stop = {alone[0][4]}
    cut = [
        row[: 1 + next((i for i, id in enumerate(row) if id in stop), len(row))] for row in alone
    ]
    options = {"sampling": sampling, "max_new_tokens": 150, "engine": engine}
    assert rows_of(engine.model, PROMPTS, **options) == alone
    assert rows_of(engine.model, PROMPTS, stop_ids=stop, **options) == cut
    edge = [[7] * 159, [8] * 3]
    assert rows_of(engine.model, edge, **options | {"max_new_tokens": 1}) == rows_of(
        model, edge, sampling=sampling, max_new_tokens=1
    )
    with pytest.raises(ValueError, match="over the limit of 160"):
        rows_of(engine.model, edge, **options | {"max_new_tokens": 2})


@pytest.mark.one_in(3)
@pytest.mark.parametrize("lag", [1, 2, 5])
def test_a_late_host_reads_the_same(folder_of, monkeypatch, lag):
    """What a GPU does, on a CPU: steps run ahead of the reading; what they decide for finished rows
    is not seen."""
    model = load_model(folder_of("llama-3"), dtype=torch.float32)
    want = rows_of(model, PROMPTS, sampling=SAMPLED)
    stop = {want[0][3], want[2][9]}
    cut = rows_of(model, PROMPTS, sampling=SAMPLED, stop_ids=stop)
    monkeypatch.setattr(timing, "host_lag", lambda device: lag)
    assert rows_of(model, PROMPTS, sampling=SAMPLED) == want
    assert rows_of(model, PROMPTS, sampling=SAMPLED, stop_ids=stop) == cut
    for budget in (1, 2, lag, lag + 1, lag + 2):
        assert [len(row) for row in rows_of(model, PROMPTS, max_new_tokens=budget)] == [budget] * 4


def decided(batch: Batch) -> list[list[int]]:
    """The tokens that the last step gave to each row."""
    return [row[:n] for row, n in zip(batch.out.tolist(), batch.num_decided.tolist())]


def test_finished_rows_freeze():
    """decide() on a done row: position, tokens and flags stay, whatever the logits say."""
    batch = Batch(3, 8, torch.device("cpu"))
    start(batch, [[1, 2], [3, 4, 5], [6]], 2, {9})
    logits = torch.zeros(3, 10)
    logits[0, 9] = logits[1, 4] = logits[2, 7] = 1.0
    decide(batch, logits[:, None])
    assert decided(batch) == [[9], [4], [7]] and batch.done.tolist() == [True, False, False]
    decide(batch, logits[:, None])
    assert decided(batch) == [[], [4], [7]] and batch.done.all()
    before = {
        name: tensor.clone()
        for name, tensor in batch.named_buffers()
        if name not in ("out", "tokens", "num_decided")
    }
    decide(batch, (logits + torch.randn(3, 10))[:, None])
    assert decided(batch) == [[], [], []]
    assert all(torch.equal(getattr(batch, name), tensor) for name, tensor in before.items())
    assert batch.pos.tolist() == [2, 4, 2]  # beyond it is scratch space
    assert [batch.tokens[row, : pos + 1].tolist() for row, pos in enumerate(batch.pos)] == [
        [1, 2, 9],
        [3, 4, 5, 4, 4],
        [6, 7, 7],
    ]


def test_what_ranks_agree_on_is_what_counts():
    """Not what this rank drew: a plain token; the drafted tokens that are verified; acceptances,
    and what follows."""
    batch = Batch(2, 8, torch.device("cpu"), K=2)
    start(batch, [[1, 2], [3]], 5)
    batch.broadcast = lambda x: torch.full_like(x, 7)
    decide(batch, torch.zeros(2, 1, 10))
    assert decided(batch) == [[7], [7]]
    agreed = {
        torch.int64: torch.tensor([[4, 5], [5, 4]]),
        torch.float32: torch.tensor([[1, 2, 9, 0.5, 0], [0, 0, 8, 0, 0]]),
    }
    batch.broadcast, seen = lambda x: agreed[x.dtype], []

    def hidden(tokens, pos, caches):
        seen.append(tokens)
        return torch.zeros(2, 3, 10)

    model = SimpleNamespace(hidden=hidden, head=lambda h: h)

    decode_round(model, None, batch, torch.ones(2, 2, dtype=torch.int64), torch.zeros(2, 2, 10))
    assert seen[0].tolist() == [[7, 4, 5], [7, 5, 4]]
    assert decided(batch) == [[4, 9], [8]] and batch.accepted.tolist() == [1, 0]
    assert batch.overlap.tolist() == [[0.5, 0], [0, 0]] and batch.num_drafted.tolist() == [2, 0]


def test_an_unused_row_stays_silent(folder_of):
    model = load_model(folder_of("llama-3"), dtype=torch.float32)
    engine = Engine(model, 4, 60)
    assert rows_of(model, PROMPTS[:2], engine=engine) == rows_of(model, PROMPTS[:2])


def test_live_generators_never_meet(folder_of):
    """Two engines, and two calls without one, take turns on one model; one of them is dropped half
    way."""
    model = load_model(folder_of("llama-3"), dtype=torch.float32)
    want = rows_of(model, PROMPTS)
    options = {"sampling": Sampling(0), "max_new_tokens": 20}
    engines = [Engine(model, 4, 64), Engine(model, 1, 30), None, None]
    live = [
        generate(model, prompts, engine=engine, **options)
        for prompts, engine in zip((PROMPTS, PROMPTS[:1], PROMPTS, PROMPTS[2:3]), engines)
    ]
    got = [[[] for _ in PROMPTS] for _ in live]
    for turn in range(80):
        for number, generator in enumerate(live):
            if number == 2 and turn == 9:
                generator.close()
            for row, id in itertools.islice(generator, 1):
                got[number][row].append(id)
    assert got[0] == want and got[1][0] == want[0] and got[3][0] == want[2]
    assert 0 < len(got[2][0]) < 20 and all(
        row == whole[: len(row)] for row, whole in zip(got[2], want)
    )
    assert model(torch.tensor([PROMPTS[1] * 5]), torch.arange(35)).isfinite().all(), (
        "nothing stays on the model"
    )


def test_threads_decode_on_one_model(folder_of):
    model = load_model(folder_of("llama-3"), dtype=torch.float32)
    want = [rows_of(model, [prompt])[0] for prompt in PROMPTS]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            assert list(pool.map(lambda prompt: rows_of(model, [prompt])[0], PROMPTS)) == want


def test_attention_runs_over_what_is_filled(folder_of):
    """Not over what is allocated: 3 tokens in a cache of 2,000, of which the prompt runs as 8; in
    whole blocks."""
    model, seen = load_model(folder_of("llama-3"), dtype=torch.bfloat16), []
    hidden = model.hidden

    def watched(tokens, pos, caches):
        seen.append(caches.key_pos.numel())
        return hidden(tokens, pos, caches)

    model.hidden = watched
    engine = Engine(in_context(model, 2000), 1, 2000)
    rows_of(model, [[5, 6, 7]], engine=engine, max_new_tokens=4)
    rows_of(model, [[6] * 700], engine=engine, max_new_tokens=2)
    unit = engine.runner.length_multiple
    assert unit <= 512
    assert seen == [round_up_length(n, unit) for n in (8, 4, 5, 6, 512, 704, 701)]


def test_a_window_bounds_what_is_read(folder_of):
    """Beyond the window the gathered keys stop growing, and rows shorter than the window see no
    invented key."""
    for pos, filled in (
        (torch.tensor([[1290], [4]]), 1291),
        (torch.tensor([[9535, 9536], [0, 1]]), 9537),
    ):
        keys = visible_keys(pos, torch.arange(filled), 9, KEY_BLOCK)
        T = pos.size(1)
        assert keys.mask.size(-1) == 1024 and keys.index.min() >= 0 and keys.index.max() < filled
        for row in range(2):
            for t in range(T):
                seen = keys.index[row][keys.mask[row, 0, t]].tolist()
                assert seen == list(range(max(0, pos[row, t] - 8), pos[row, t] + 1))


def unzipped(file: Path) -> bytes:
    return gzip.decompress(file.read_bytes())


@pytest.mark.parametrize(("name", "read"), [("t.json", Path.read_bytes), ("t.json.gz", unzipped)])
def test_profile_writes_a_chrome_trace(name, read, text_folder, tmp_path, capsys):
    trace = tmp_path / name
    arguments = [
        "--checkpoint",
        str(text_folder),
        "--max_new_tokens",
        "3",
        "--profile",
        str(trace),
        "--device",
        "cpu",
    ]
    run(parse_args(arguments))
    names = {event.get("name") for event in json.loads(read(trace))["traceEvents"]}
    assert "aten::scaled_dot_product_attention" in names


@pytest.mark.compiled
def test_compile_on_the_command_line(text_folder, capsys):
    common = [
        "--checkpoint",
        str(text_folder),
        "--max_new_tokens",
        "12",
        "--device",
        "cpu",
        "--dtype",
        "float32",
    ]
    out = []
    for flag in ("--compile", "--no-compile"):
        run(parse_args([*common, flag]))
        captured = capsys.readouterr()
        out.append(captured.out)
        assert ("compiled the plain step for batch 1 in" in captured.err) == (flag == "--compile")
    assert out[0] == out[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_no_cuda_graph_is_skipped(folder_of):
    """cudagraph_or_error turns a graph that Inductor would skip in silence into an error."""
    import torch._inductor.config as inductor

    want = rows_of(load_model(folder_of("llama-3"), dtype=torch.float32), PROMPTS)
    with inductor.patch({"triton.cudagraph_or_error": True}):
        engine = Engine(
            load_model(folder_of("llama-3"), device="cuda", dtype=torch.float32),
            4,
            60,
            compile=True,
        )
        engine.warm_up(GREEDY)
        assert rows_of(engine.model, PROMPTS, engine=engine) == want


def test_a_stop_token_that_is_not_a_number_spoils_no_later_batch(folder_of):
    """Row 0 ends at an id whose embedding is NaN, and feeds it again and again while row 1 goes on:
    its keys and values are NaN where a shorter row of the next batch sees them, masked."""
    model = load_model(folder_of("llama-3"), dtype=torch.float32)
    want = rows_of(model, PROMPTS[:2])
    # Late enough that the next batch's prompts do not write over the position, early enough to be
    # attended there.
    at = next(i for i in range(6, 20) if want[0][i] not in {*PROMPTS[0], *PROMPTS[1], *want[0][:i]})
    stop, n = want[0][at], len(PROMPTS[0]) + at + 3
    batches = ([[first], [first + 1] * 5] for first in range(3, 120))
    found = ((prompts, rows_of(model, prompts, max_new_tokens=n)) for prompts in batches)
    healthy, expected = next(
        pair for pair in found if all(stop not in row for part in pair for row in part)
    )
    model.embed.weight.data[stop] = torch.nan
    for drafter in (None, ModelDraft(layer_subset(model, [0, 1])), NgramDraft(2)):
        engine = Engine(model, 2, 60, drafter=drafter, speculate_k=3)
        # a draft may propose the id earlier
        with nullcontext() if drafter is None else suppress(ValueError):
            got = rows_of(model, PROMPTS[:2], engine=engine, stop_ids={stop}, max_new_tokens=at + 5)
            assert got[0] == want[0][: at + 1]
        assert rows_of(model, healthy, engine=engine, max_new_tokens=n) == expected


def test_what_an_engine_cannot_do_is_refused_by_number(folder_of):
    model = load_model(folder_of("llama-3"), dtype=torch.float32)
    for options, message in [
        ({"engine": Engine(model, 4, 40), "max_new_tokens": 60}, "over the limit of 40 positions"),
        ({"seed": [1, 2]}, "seed: 2 for 4 prompts"),
        ({"max_new_tokens": [5, 5, 5]}, "max_new_tokens: 3 for 4 prompts"),
    ]:
        with pytest.raises(ValueError, match=message):
            rows_of(model, PROMPTS, **options)
    numpy = pytest.importorskip("numpy")
    prompts = [numpy.array(prompt) for prompt in PROMPTS]
    options = {"max_new_tokens": numpy.int64(5), "seed": numpy.arange(4), "sampling": SAMPLED}
    assert rows_of(model, prompts, **options) == rows_of(
        model, PROMPTS, max_new_tokens=5, seed=[0, 1, 2, 3], sampling=SAMPLED
    )


@pytest.mark.parametrize("k", [None, pytest.param(5, marks=pytest.mark.compiled)])
def test_warm_up_runs_every_length_that_will_be_recorded(folder_of, k, monkeypatch):
    """Under CUDA graphs each step is recorded for each length that it attends: a length that
    warm-up misses is recorded inside the first prompt's time. Lengths are multiples of 16, which a
    GPU's kernels want."""
    model, seen = load_model(folder_of("llama-3"), dtype=torch.float32), set()
    slice_to = ModelRunner.slice_to

    def watched(self, length):
        caches = slice_to(self, length)
        assert caches.key_pos.numel() >= length
        seen.add((caches.key_pos.numel(), self.model is model))
        return caches

    drafter = ModelDraft(layer_subset(model, [0])) if k else None
    engine = Engine(in_context(model, 700), 1, 700, drafter=drafter, speculate_k=k or 5)
    for runner in engine.runners:
        runner.uses_cuda_graphs = True  # as on a GPU
    monkeypatch.setattr(ModelRunner, "slice_to", watched)
    with torch.inference_mode():
        engine.warm_up(GREEDY)
        warmed, batch = set(seen), engine.batch
        start(batch, [[5]], 690)
        seen.clear()
        for length in range(1, 700, 5):  # lengths that are attended lie 16 apart or more
            for count in {0, k or 0}:
                engine.run(Step(engine.rows(0, 1), length, count))
    assert seen <= warmed and all(length % 16 == 0 for length, _ in seen)


@pytest.mark.parametrize("drafted", [False, True])
def test_greedy_steps_draw_no_numbers(folder_of, drafted, monkeypatch):
    """The hash takes a compiler long, and a greedy step decides alike with any numbers."""
    model = load_model(folder_of("llama-3"), dtype=torch.float32)
    drafter = ModelDraft(layer_subset(model, [0])) if drafted else None
    engine = Engine(model, 4, 60, drafter=drafter, speculate_k=3)
    want = rows_of(model, PROMPTS)

    def refuse(*_):
        raise AssertionError("a number was drawn")

    monkeypatch.setattr("decoding.batch.row_noise", refuse)
    assert rows_of(model, PROMPTS, engine=engine) == want
    with pytest.raises(AssertionError, match="a number was drawn"):
        rows_of(model, PROMPTS, engine=engine, sampling=SAMPLED)


def test_numbers_of_a_round(folder_of):
    """Row by row, also in a view of some rows: those of plain decoding belong to a position, the
    others to a position of this round."""
    engine = Engine(load_model(folder_of("llama-3"), dtype=torch.float32), 3, 60)
    batch = engine.batch
    batch.sampling_path = "plain"
    batch.seed.copy_(torch.tensor([5, 6, 2**40]))
    batch.pos.copy_(torch.tensor([7, 9, 3]))
    pos = batch.pos[:, None] + torch.arange(1, 5)  # (B, T)
    seed = batch.seed[:, None].expand_as(pos)
    assert torch.equal(batch.noise(pos), uniform(seed, pos))
    for purpose in (DRAFT_DRAW, ACCEPT):
        noise = batch.noise(pos, purpose)
        assert torch.equal(engine.rows(1, 3).batch.noise(pos[1:], purpose), noise[1:])
        offset = torch.arange(1, 5).expand_as(pos)
        assert torch.equal(noise, round_uniform(seed, batch.pos[:, None], offset, purpose))
        assert len({*noise.flatten().tolist()}) == noise.numel()


def test_warm_up_of_one_row_alone(folder_of, monkeypatch):
    """As a server on a GPU starts: steps of several rows compile when they are needed, and one
    row's costs stand for theirs. The texts are those of an engine that has warmed up everything."""
    model, row_counts = load_model(folder_of("llama-3"), dtype=torch.float32), []
    want = rows_of(model, PROMPTS)
    drafter = ModelDraft(layer_subset(model, [0]))
    engine = Engine(model, 4, 60, drafter=drafter, speculate_k="auto")
    run = engine.run

    def watched(step):
        row_counts.append(len(step.rows.batch.pos))
        return run(step)

    monkeypatch.setattr(engine, "run", watched)
    engine.planner.row_counts = [1]
    engine.warm_up(GREEDY)
    engine.calibrate(Sampling(0), rounds=1)
    assert {*row_counts} == {1} and engine.planner.costs.decode_s > 0
    assert rows_of(model, PROMPTS, engine=engine) == want
    assert 4 in row_counts


@pytest.mark.parametrize("uses_cuda_graphs", [False, True])
def test_a_server_s_first_steps(uses_cuda_graphs, monkeypatch, capsys):
    """A CPU stores what it compiles, and compiles everything at once. A GPU compiles at every
    start: one row with the default sampling, and a line says what compiles later."""
    calls = []
    monkeypatch.setattr(opening, "warm_up", lambda *args: calls.append(args))
    runner = SimpleNamespace(uses_cuda_graphs=uses_cuda_graphs)
    planner = SimpleNamespace(row_counts=[1, 4])
    engine = SimpleNamespace(runner=runner, planner=planner)
    opening.warm_up_for_later(engine, Sampling(0.8))
    ((_, _, paths),) = calls
    is_later = "compile when first needed" in capsys.readouterr().err
    expected = (["plain"], [1], True) if uses_cuda_graphs else (PATHS, [1, 4], False)
    assert (paths, planner.row_counts, is_later) == expected


@pytest.mark.parametrize("drafter", [None, NgramDraft], ids=["plain", "ngram"])
def test_steps_of_a_fixed_width(folder_of, drafter):
    """Where kernels round by width, as on a GPU: each step is a pass over K + 1 positions, drafted
    or not. The text is what it was, and nobody who did not ask for a draft is told of one."""
    model, widths = load_model(folder_of("llama-3"), dtype=torch.bfloat16), []
    want, hidden = rows_of(model, PROMPTS, max_new_tokens=9), model.hidden

    def watched(tokens, pos, caches):
        widths.append(tokens.size(1))
        return hidden(tokens, pos, caches)

    model.hidden = watched
    longest = max(map(len, PROMPTS)) + 9
    engine = Engine(
        model,
        len(PROMPTS),
        longest,
        drafter=drafter and drafter(),
        speculate_k=3,
        fixed_width_steps=True,
    )
    assert rows_of(model, PROMPTS, engine=engine, max_new_tokens=9) == want
    assert {*widths} - {8} == {4}


def test_an_engine_refuses_what_no_step_can_do(text_folder):
    model = load_model(text_folder, dtype=torch.float32)
    V = model.config.vocab_size
    with pytest.raises(
        ValueError, match=f"logprobs = {V + 1} is more than the {V} tokens that there are"
    ):
        Engine(model, 1, 40, logprobs=V + 1)
    with pytest.raises(ValueError, match="fixed_width_steps needs a speculate_k that is a number"):
        Engine(model, 1, 40, fixed_width_steps=True, speculate_k="auto")


def test_no_temperature_is_the_neutral_one_for_every_draft(text_folder):
    model, options = load_model(text_folder, dtype=torch.float32), {"max_new_tokens": 8, "seed": 3}
    for make in (lambda: None, NgramDraft, SuffixDraft):
        rows = [
            rows_of(model, PROMPTS, drafter=make(), sampling=Sampling(x), **options)
            for x in (None, 1.0)
        ]
        assert rows[0] == rows[1]


def test_prompt_lookup_proposes_what_followed_the_latest_match(text_folder):
    """By hand: verification refuses wrong proposals, so no text shows them."""
    model, proposals, N, K = load_model(text_folder, dtype=torch.float32), [], 2, 4

    class Recorded(NgramDraft):
        def propose(self, batch, plan):
            tokens, probs = super().propose(batch, plan)
            text = batch.tokens[0, : int(batch.pos[0]) + 1].tolist()
            proposals.append((text, tokens[0].tolist(), probs[0].clone()))
            return tokens, probs

    prompt = [5, 6, 7, 8, 5, 6]
    for _ in generate(
        model, [prompt], sampling=Sampling(0), max_new_tokens=90, drafter=Recorded(N), speculate_k=K
    ):
        pass
    num_matches = 0
    for text, tokens, probs in proposals:
        ends = [
            end for end in range(N - 1, len(text) - 1) if text[end - N + 1 : end + 1] == text[-N:]
        ]
        if not ends:
            assert not probs.any()
            continue
        continuation = text[ends[-1] + 1 :]
        expected = [continuation[i % len(continuation)] for i in range(K)]
        assert (
            tokens == expected and probs.argmax(-1).tolist() == expected and probs.sum().item() == K
        )
        num_matches += 1
    assert num_matches >= 3
