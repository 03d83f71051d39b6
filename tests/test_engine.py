"""The engine: fixed state, steps compiled once, a host that may read late. Compiled code must give what eager gives,
and nothing may compile after warm-up."""

import json

import pytest
import torch
from test_generate import PROMPTS, SAMPLED, rows_of
from test_interrupts import interrupt_often

import generate as program
import quantize
from checkpoint import load_model
from generate import FROZEN, Engine, Inbox, State, decide, generate, verify_step
from sampling import GREEDY, Sampling

KINDS = [Sampling(0), Sampling(0.9), Sampling(0.7, top_k=20, top_p=0.9)]


def compiled_engine(folder, batch_size: int, length: int, samplings=KINDS) -> Engine:
    engine = Engine(load_model(folder, dtype=torch.float32), batch_size, length, compile=True)
    for sampling in samplings:
        engine.warm_up(sampling.kind)
    return engine


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [pytest.param(1, marks=pytest.mark.long), 3])
def test_nothing_compiles_after_warm_up(folder_of, batch_size, monkeypatch):
    """20 prompt lengths, every kind with changing values, full and partly filled batches: a recompile raises."""
    monkeypatch.setattr(program, "PREFILL_CHUNK", 16)  # prompts of one chunk and of several
    engine = compiled_engine(folder_of("mistral-v0.1"), batch_size, 100)  # a window of 9 and more than it filled
    eager = load_model(folder_of("mistral-v0.1"), dtype=torch.float32)
    other = Engine(engine.model, 1, 20)  # shares the model: its caches and the compiled engine's change places
    generator = torch.Generator().manual_seed(0)
    with torch.compiler.set_stance("fail_on_recompile"):
        for n in range(1, 21):
            lengths = [n, *range(30, 30 + n % batch_size)]
            prompts = [torch.randint(3, 131, (length,), generator=generator).tolist() for length in lengths]
            for sampling in (Sampling(0), Sampling(0.5 + n / 10), Sampling(1.0, top_k=n + 1, top_p=0.9, min_p=n / 100)):
                got = rows_of(engine.model, prompts, sampling=sampling, engine=engine, max_new_tokens=9)
                assert got == rows_of(eager, prompts, sampling=sampling, max_new_tokens=9)
            rows_of(engine.model, [[n]], engine=other, max_new_tokens=2)
        for length, cached in ((20, 0), (40, 20), (41, 40), (3, 1)):  # turns of a chat
            prompt = list(range(length))
            rows_of(engine.model, [prompt], engine=engine, max_new_tokens=3, cached=cached)
        interrupt_often(engine)
        with pytest.raises(RuntimeError, match="recompile"):  # control: the stance does bite
            engine.steps["decode", GREEDY] = torch.compile(lambda: engine.state.pos + n, fullgraph=True, dynamic=False)
            rows_of(engine.model, [[5]], engine=engine)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int8", pytest.param("int4-g32", marks=pytest.mark.long)])
def test_prompts_of_quantized_weights_compile_in_warm_up(folder_of, scheme, monkeypatch):
    """A CPU's kernels of few rows and of many are others: prompts on both sides of the border are compiled."""
    monkeypatch.setattr(quantize, "CPU_INT4_ROWS", 16)
    engine = Engine(load_model(folder_of("llama-3"), dtype=torch.float32, quantize=scheme), 1, 60, compile=True)
    engine.warm_up(GREEDY)
    eager = load_model(folder_of("llama-3"), dtype=torch.float32, quantize=scheme)
    with torch.compiler.set_stance("fail_on_recompile"):
        for n in (2, 15, 16, 17, 40):
            prompt = list(range(3, 3 + n))
            assert rows_of(engine.model, [prompt], engine=engine) == rows_of(eager, [prompt]), n


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling", [pytest.param(Sampling(0), marks=pytest.mark.long), SAMPLED], ids=["greedy", "sampled"]
)
def test_compiled_rows_equal_their_prompts_alone(folder_of, sampling):
    """Ragged and compiled against alone and eager, with a stop id, up to the last position of the context."""
    engine = compiled_engine(folder_of("qwen3-biased"), 4, 160, [sampling])
    model = load_model(folder_of("qwen3-biased"), dtype=torch.float32)
    alone = [rows_of(model, [prompt], sampling=sampling, max_new_tokens=150)[0] for prompt in PROMPTS]
    stop = {alone[0][4]}
    cut = [row[: 1 + next((i for i, id in enumerate(row) if id in stop), len(row))] for row in alone]
    options = {"sampling": sampling, "max_new_tokens": 150, "engine": engine}
    assert rows_of(engine.model, PROMPTS, **options) == alone
    assert rows_of(engine.model, PROMPTS, stop_ids=stop, **options) == cut
    edge = [[7] * 159, [8] * 3]
    assert rows_of(engine.model, edge, **options | {"max_new_tokens": 1}) == rows_of(
        model, edge, sampling=sampling, max_new_tokens=1
    )
    with pytest.raises(ValueError, match="over the limit of 160"):
        rows_of(engine.model, edge, **options | {"max_new_tokens": 2})


@pytest.mark.parametrize("lag", [1, 2, 5])
def test_a_late_host_reads_the_same(folder_of, monkeypatch, lag):
    """What a GPU does, on a CPU: steps run ahead of the reading; what they decide for finished rows is not seen."""
    model = load_model(folder_of("llama-3"), dtype=torch.float32)
    want = rows_of(model, PROMPTS, sampling=SAMPLED)
    stop = {want[0][3], want[2][9]}
    cut = rows_of(model, PROMPTS, sampling=SAMPLED, stop_ids=stop)
    prompt_inbox = Inbox.__init__
    monkeypatch.setattr(
        Inbox, "__init__", lambda self, *args: (prompt_inbox(self, *args), setattr(self, "lag", lag))[0]
    )
    assert rows_of(model, PROMPTS, sampling=SAMPLED) == want
    assert rows_of(model, PROMPTS, sampling=SAMPLED, stop_ids=stop) == cut
    for budget in (1, 2, lag, lag + 1, lag + 2):
        assert [len(row) for row in rows_of(model, PROMPTS, max_new_tokens=budget)] == [budget] * 4


def test_finished_rows_freeze():
    """decide() on a done row: position, tokens and flags stay, whatever the logits say."""
    state = State(3, 8, torch.device("cpu"))
    state.start([[1, 2], [3, 4, 5], [6]], [2, 2, 2], {9}, 0, Sampling(0))
    logits = torch.zeros(3, 10)
    logits[0, 9] = logits[1, 4] = logits[2, 7] = 1.0
    decide(state, logits)
    assert state.out.flatten().tolist() == [9, 4, 7] and state.done.tolist() == [True, False, False]
    decide(state, logits)
    assert state.out.flatten().tolist() == [FROZEN, 4, 7] and state.done.tolist() == [True, True, True]
    before = {name: tensor.clone() for name, tensor in state.named_buffers() if name not in ("out", "tokens")}
    decide(state, logits + torch.randn(3, 10))
    assert state.out.flatten().tolist() == [FROZEN] * 3
    assert all(torch.equal(getattr(state, name), tensor) for name, tensor in before.items())
    assert state.pos.tolist() == [2, 4, 2]  # beyond it is scratch space
    assert [state.tokens[row, : pos + 1].tolist() for row, pos in enumerate(state.pos)] == [
        [1, 2, 9], [3, 4, 5, 4, 4], [6, 7, 7],
    ]  # fmt: skip


def test_what_ranks_agree_on_is_what_counts():
    """Not what this rank drew: a plain token; the drafted tokens that are verified; acceptances, and what follows."""
    state = State(2, 8, torch.device("cpu"), K=2)
    state.start([[1, 2], [3]], [5, 5], (), 0, Sampling(0))
    state.agree = lambda x: torch.full_like(x, 7)
    decide(state, torch.zeros(2, 10))
    assert state.out.tolist() == [[7, FROZEN, FROZEN]] * 2
    agreed = {torch.int64: torch.tensor([[4, 5], [5, 4]]), torch.float32: torch.tensor([[1, 9, 0.5, 0], [0, 8, 0, 0]])}
    state.agree, seen = lambda x: agreed[x.dtype], []

    def model(tokens, pos):
        seen.append(tokens)
        return torch.zeros(2, 3, 10)

    verify_step(model, state, torch.ones(2, 2, dtype=torch.int64), torch.zeros(2, 2, 10))
    assert seen[0].tolist() == [[7, 4, 5], [7, 5, 4]]
    assert state.out.tolist() == [[4, 9, FROZEN], [8, FROZEN, FROZEN]] and state.accepted.tolist() == [1, 0]
    assert state.overlap.tolist() == [[0.5, 0], [0, 0]]


def test_an_unused_row_stays_silent(folder_of):
    model = load_model(folder_of("llama-3"), dtype=torch.float32)
    engine = Engine(model, 4, 60)
    assert rows_of(model, PROMPTS[:2], engine=engine) == rows_of(model, PROMPTS[:2])


def test_engines_share_a_model(folder_of):
    """Caches hang on the model: each engine brings its own back, and a call without one leaves none behind."""
    model = load_model(folder_of("llama-3"), dtype=torch.float32)
    want = rows_of(model, PROMPTS)
    assert model.layers[0].attention.cache is None
    assert model(torch.tensor([PROMPTS[1] * 5]), torch.arange(35)).isfinite().all()
    large, small = Engine(model, 4, 64), Engine(model, 1, 30)
    assert rows_of(model, PROMPTS, engine=large) == want
    assert rows_of(model, PROMPTS[:1], engine=small) == want[:1]
    assert rows_of(model, PROMPTS, engine=large) == want
    large.caches[0].k.zero_()  # plain tensors, not inference ones


def test_attention_runs_over_what_is_filled(folder_of):
    """Not over what is allocated: 3 tokens in a cache of 150, of which the prompt runs as 8."""
    model = load_model(folder_of("llama-3"), dtype=torch.float32)
    engine, seen = Engine(model, 1, 150), []
    for _ in generate(model, [[5, 6, 7]], sampling=Sampling(0), max_new_tokens=4, engine=engine):
        seen.append(model.key_pos.numel())
    assert seen == [8, 4, 5, 6]


@pytest.mark.parametrize("allowed", ["all", "cudnn alone"])
def test_open_lengths_do_without_cudnn_s_attention(allowed):
    """And leave torch's choice as they found it, also after an error; where nothing else is allowed it stays."""
    cuda = torch.backends.cuda
    before = [cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()]
    switches = [cuda.enable_flash_sdp, cuda.enable_mem_efficient_sdp, cuda.enable_math_sdp]
    try:
        for switch in switches:
            switch(allowed == "all")
        cuda.enable_cudnn_sdp(True)
        with program.any_length(torch.device("cpu")):
            assert cuda.cudnn_sdp_enabled(), "a CPU has none of this"
        with pytest.raises(KeyError), program.any_length(torch.device("cuda")):
            assert cuda.cudnn_sdp_enabled() == (allowed != "all")
            raise KeyError
        assert cuda.cudnn_sdp_enabled()
    finally:
        for switch, state in zip(switches, before):
            switch(state)


def test_a_window_bounds_what_is_read(folder_of):
    """Beyond the window the gathered keys stop growing, and rows shorter than the window see no invented key."""
    from model import visible_keys

    for pos, filled in ((torch.tensor([[90], [4]]), 91), (torch.tensor([[90, 91], [0, 1]]), 92)):
        keys = visible_keys(pos, torch.arange(filled), 9, cached=True)
        T = pos.size(1)
        assert keys.mask.size(-1) == 9 + T - 1 and keys.index.min() >= 0
        for row in range(2):
            for t in range(T):
                seen = keys.index[row][keys.mask[row, 0, t]].tolist()
                assert seen == list(range(max(0, pos[row, t] - 8), pos[row, t] + 1))


def test_profile_writes_a_chrome_trace(text_folder, tmp_path, capsys):
    trace = tmp_path / "trace.json"
    arguments = ["--checkpoint", str(text_folder), "--max_new_tokens", "3", "--profile", str(trace), "--device", "cpu"]
    program.run(program.parse_args(arguments))
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert "aten::scaled_dot_product_attention" in names


@pytest.mark.slow
def test_compile_on_the_command_line(text_folder, capsys):
    common = ["--checkpoint", str(text_folder), "--max_new_tokens", "12", "--device", "cpu", "--dtype", "float32"]
    out = []
    for flag in ("--compile", "--no-compile"):
        program.run(program.parse_args([*common, flag]))
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
        engine = Engine(load_model(folder_of("llama-3"), device="cuda", dtype=torch.float32), 4, 60, compile=True)
        engine.warm_up(GREEDY)
        assert rows_of(engine.model, PROMPTS, engine=engine) == want
