"""Compiled steps on disk: a later engine loads them and decides the same bits; whatever differs compiles anew."""

import copy
import functools
import sys
import types

import pytest
import torch
from test_generate import PROMPTS, rows_of

import decoding.sampling
import weights.stored_code as stored_code
from cli.flags import parse_args
from cli.main import run
from decoding.sampling import Sampling
from drafts.ngram import NgramDraft
from drafts.suffix import SuffixDraft
from generate import Engine, compiled, decode_step
from loading.checkpoint import load_model
from speculative import ModelDraft, layer_subset
from weights.stored_code import StoredFunction, can_store, describe
from weights.walker import pack_model

KINDS = {
    "plain": lambda model: None,
    "ngram": lambda model: NgramDraft(),
    "suffix": lambda model: SuffixDraft(),
    "layers": lambda model: ModelDraft(layer_subset(model, [0]), on_layers=[0]),
}

STORES = pytest.mark.skipif(not can_store(torch.device("cpu")), reason="this version of torch stores nothing")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty folder of stored functions. The main program has a file, which a worker of pytest lacks."""
    monkeypatch.setattr(stored_code, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)
    return tmp_path


@pytest.fixture
def compilations(monkeypatch):
    """The functions whose code was compiled and stored."""
    names, store = [], stored_code.store

    def recording_store(variant, folder, key):
        names.append(key)
        store(variant, folder, key)

    monkeypatch.setattr(stored_code, "store", recording_store)
    return names


def text_and_probs(folder_of, kind: str, scheme: str | None, sampling: Sampling, stored: bool) -> tuple:
    """A row of a new engine, and the bits of its last probabilities."""
    model = pack_model(load_model(folder_of("llama-3"), quantize=scheme))
    options = {"compile": True, "compile_prompts": False, "stored": stored, "logprobs": 3}
    engine = Engine(model, 1, 120, drafter=KINDS[kind](model), speculate_k=3, **options)
    engine.warm_up(sampling.kind)
    row = rows_of(model, PROMPTS[:1], sampling=sampling, engine=engine, max_new_tokens=24, seed=3)
    return row, engine.state.top_logprobs.clone(), engine.state.token_probs.clone(), engine


@STORES
@pytest.mark.compiled
@pytest.mark.parametrize(
    "kind, scheme, sampling",
    [
        ("plain", "int8", Sampling(0)),
        pytest.param("ngram", "int4-g32", Sampling(0.9), marks=pytest.mark.long),
        pytest.param("suffix", None, Sampling(0.9, top_k=20), marks=pytest.mark.long),
        pytest.param("layers", None, Sampling(0.9), marks=pytest.mark.long),
    ],
)
def test_a_later_engine_loads_the_same_bits(folder_of, folder, compilations, kind, scheme, sampling):
    usual = text_and_probs(folder_of, kind, scheme, sampling, False)
    assert not list(folder.iterdir())
    first = text_and_probs(folder_of, kind, scheme, sampling, True)
    num_stored = len(compilations)
    assert num_stored > 0 and not any(step.unstored for step in first[3].steps.values())
    second = text_and_probs(folder_of, kind, scheme, sampling, True)
    assert len(compilations) == num_stored == len(list(folder.iterdir()))  # all was loaded
    for other in (first, second):
        assert other[0] == usual[0]
        assert torch.equal(other[1], usual[1]) and torch.equal(other[2], usual[2])


@STORES
@pytest.mark.compiled
def test_runs_with_prompts_of_other_lengths_load_the_step(compilations, capsys):
    answers = []
    for prompt in ("Once", "Once upon a time there was a little dog. " * 28):
        for flags in ([], ["--compile"]):
            run(parse_args(["--prompt", prompt, "--max_new_tokens", "20", "--device", "cpu", *flags]))
            answers.append(capsys.readouterr().out)
    assert len(compilations) == 1
    assert answers[0] == answers[1] and answers[2] == answers[3]


def step_arguments(folder_of, length: int = 120, **options) -> tuple:
    model = load_model(folder_of("llama-3"), **options)
    rows = Engine(model, 1, length).rows(0, 1)
    return model, rows.target.slice_to(5), rows.state


def key(*args, function=decode_step, options=None) -> str:
    return StoredFunction(function, None, options or {}).key(args)


PROGRAM = """
import functools
def scale(logits, tokens, pos): return logits * SCALE
def scale_by(logits, tokens, pos, number): return logits * number
partial = functools.partial(scale_by, number=SCALE)
class Scale:
    def __call__(self, logits, tokens, pos): return logits * SCALE
    def near(self, logits, kind, values): return distribution(logits * SCALE, kind, values)
def near(logits, kind, values): return distribution(logits * SCALE, kind, values)
def make_near():
    return lambda logits, kind, values: distribution(logits * SCALE, kind, values)
"""


@pytest.mark.attack
def test_a_key_names_all_that_code_depends_on(folder_of, tmp_path, monkeypatch):
    """Equal for objects made anew, other for anything that a trace could read."""
    model, caches, state = args = step_arguments(folder_of)
    usual = key(*args)
    assert key(*step_arguments(folder_of)) == usual
    keys = [usual, key(*step_arguments(folder_of, length=200)), key(*step_arguments(folder_of, dtype=torch.float32))]
    keys.append(key(*step_arguments(folder_of, quantize="int8")))
    keys.append(key(*args, options={"size_asserts": True}))
    other = copy.copy(state)
    other.kind = Sampling(0.5, top_k=3).kind
    keys.append(key(model, caches, other))
    for code in ("logits * 2", "logits * 3"):  # as the project's own functions, which a test's are not
        other = copy.copy(state)
        other.process = eval(f"lambda logits, tokens, pos: {code}", {"__name__": "decoding.sampling"})
        keys.append(key(model, caches, other))
    for target, name, value in (
        (decoding.sampling, "INVALID", -7),
        (decoding.sampling, "uniform", eval("lambda seed: seed * 0.5", {"__name__": "decoding.sampling"})),
        (type(model.norm), "forward", eval("lambda self, x: x", {"__name__": "model"})),
        (model.norm, "eps", 0.5),
        (stored_code.torch, "get_num_threads", lambda: 77),
        (stored_code.torch, "__version__", "2.99"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, value, raising=False)
            keys.append(key(*args))
    with monkeypatch.context() as patch:
        patch.setenv("ATEN_CPU_CAPABILITY", "another level")
        keys.append(key(*args))
    for text in ("SHIFT = 1", "SHIFT = 2"):  # a user's own module, whose functions a trace may call
        (tmp_path / "own.py").write_text(text)
        monkeypatch.setitem(sys.modules, "own", types.SimpleNamespace(__file__=str(tmp_path / "own.py")))
        keys.append(key(*args))
    monkeypatch.delitem(sys.modules, "own")
    assert key(*args) == usual
    assert len(set(keys)) == len(keys)


def test_code_of_a_program_is_not_stored(folder_of, tmp_path, monkeypatch):
    """It may read anything that the program computes, which no key could name."""
    model, caches, state = args = step_arguments(folder_of)
    program = types.ModuleType("program")
    program.__file__, program.distribution, program.SCALE = str(tmp_path), decoding.sampling.distribution, 2.0
    exec(PROGRAM, vars(program))
    monkeypatch.setitem(sys.modules, "program", program)
    for process in (program.scale, program.Scale(), program.partial, program.Scale):
        other = copy.copy(state)
        other.process = process
        with pytest.raises(stored_code.Undescribed):
            key(model, caches, other)
    partial = functools.partial(program.near, values=None)
    for patched in (program.near, program.make_near(), program.Scale().near, program.Scale(), program.Scale, partial):
        with monkeypatch.context() as patch, pytest.raises(stored_code.Undescribed):
            patch.setattr(decoding.sampling, "distribution", patched)
            key(*args)
    assert key(*args)


def test_objects_that_cannot_be_described(monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))  # a notebook's
    with pytest.raises(stored_code.Undescribed):
        key()

    class Slots(types.SimpleNamespace):
        __slots__ = ("hidden",)

    for value in (iter([1]), object(), Slots(), (n for n in [1]), types.SimpleNamespace(inner=memoryview(b"1"))):
        with pytest.raises(stored_code.Undescribed):
            list(describe([value], {}))
    recursive: list = [1]
    recursive.append(recursive)
    assert list(describe(recursive, {}))[-2:] == ["object 0", ")"]


def double(x, settings):
    return x * 2 + settings.shift


class Settings:
    def __init__(self, shift: float, hidden: object = None):
        self.shift, self.hidden = shift, hidden


double.__module__ = Settings.__module__ = "model"  # code of the project: other code is not stored


@STORES
@pytest.mark.compiled
def test_broken_files_other_settings_and_unknown_objects_compile_anew(folder, compilations, monkeypatch):
    def run(settings) -> torch.Tensor:
        step = compiled(double, torch.device("cpu"), stored=True)
        x = torch.arange(24.0)
        torch._dynamo.mark_dynamic(x, 0)
        for numbers in (x, x[:7].clone()):  # a dynamic dimension needs one variant
            assert torch.equal(step(numbers, settings), double(numbers, settings))
        assert len(step.variants) <= 1
        return step

    run(Settings(1.0)), run(Settings(1.0))
    (file,), stored = folder.iterdir(), len(compilations)
    assert stored == 1
    run(Settings(2.0))  # another constant in the code
    assert len(compilations) == 2
    content = file.read_bytes()
    for broken in (b"", content[:-20], bytes([content[0] ^ 1]) + content[1:], content[:900] + b"\0" + content[901:]):
        for other in set(folder.iterdir()) - {file}:
            other.unlink()
        file.write_bytes(broken)
        run(Settings(1.0))
    assert len(compilations) == 6
    unknown = run(Settings(1.0, hidden=iter([1])))
    assert unknown.unstored is not None and len(compilations) == 6
    monkeypatch.setattr(stored_code, "cache_folder", lambda: None)  # where nothing can be written
    assert run(Settings(1.0)).unstored is None and len(compilations) == 6


@STORES
@pytest.mark.compiled
def test_the_oldest_files_go(folder, monkeypatch):
    monkeypatch.setattr(stored_code, "MAX_FILES", 2)
    step = compiled(double, torch.device("cpu"), stored=True)
    for number in range(4):
        step.variants.clear()
        step(torch.ones(3), Settings(number))
    assert len(list(folder.iterdir())) == 2
    with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError, match="another variant"):
        step.variants[0].guard_check = lambda *args: False
        step(torch.ones(3), Settings(9))
