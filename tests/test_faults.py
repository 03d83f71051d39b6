"""Writers that are stopped half way: nothing that is left can be taken for a whole folder or file, what was there
before is still there, and what is said is one line.

A writer is stopped by signals at a chosen call, or by a file size limit, which to it is a full disk.
"""

import contextlib
import importlib
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import BASE, ROOT, config_json
from safetensors.torch import save_file

import checkpoint
from checkpoint import load_model, random_model, save_model
from model import Config

HF = {**BASE, "model_type": "llama", "vocab_size": 384}

# Stand-ins that stop the process inside the second tensor file, or before one of the last steps.
STOP = (
    "import os, signal, sys, pathlib, safetensors.torch as st\n"
    "count, where, what = 0, int(sys.argv[1]), getattr(signal, sys.argv[2])\n"
    "def stopping(f):\n"
    "    def run(*a, **k):\n"
    "        global count\n"
    "        count += 1\n"
    "        if count == where:\n"
    "            if f is saved: open(a[1], 'wb').write(b'half')\n"
    "            os.kill(os.getpid(), what)\n"
    "        return f(*a, **k)\n"
    "    return run\n"
    "saved = st.save_file; st.save_file = stopping(saved)\n"
    "os.replace = stopping(os.replace); os.rename = stopping(os.rename)\n"
    "pathlib.Path.write_text = stopping(pathlib.Path.write_text)\n"
)


@contextlib.contextmanager
def full_disk(size: int = 20_000):
    """The kernel refuses to write beyond this size of a file: EFBIG, where a full disk gives ENOSPC."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def run(code: str, *arguments, **options) -> subprocess.CompletedProcess:
    options = {"capture_output": True, "text": True} | options
    return subprocess.run([sys.executable, "-c", code, *map(str, arguments)], cwd=ROOT, timeout=60, **options)


def main_of(monkeypatch, capsys, module: str, *arguments) -> str:
    """What a program that fails in this process says after "error: "."""
    monkeypatch.setattr(sys, "argv", [module, *map(str, arguments)])
    with pytest.raises(SystemExit) as exit:
        importlib.import_module(module).main()
    out, err = capsys.readouterr()
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert exit.value.code == 2 and out == "" and len(errors) == 1 and "Traceback" not in err, err
    return errors[0]


def program(module: str, *arguments) -> str:
    """Code that runs a program with these arguments."""
    argv = [module, *map(str, arguments)]
    return f"import sys; sys.argv = {argv!r}\nimport {module} as program; program.main()\n"


def refused(folder) -> bool:
    try:
        load_model(folder)
    except ValueError:
        return True
    return False


def one_line(done) -> bool:
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    return len(errors) == 1 and "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


@pytest.fixture(scope="module")
def sources(tmp_path_factory, text_folder, story_tokenizer):
    """Program -> (module, arguments but for the output) of every one that writes a folder."""
    folder = tmp_path_factory.mktemp("sources")
    meta, fast = folder / "meta", folder / "fast"
    model = random_model(Config.from_hf(HF), dtype=torch.float32)
    tensors = {"tok_embeddings.weight": model.embed.weight, "norm.weight": model.norm.weight,
               "output.weight": model.lm_head.weight}  # fmt: skip
    parts = {}
    for n, block in enumerate(model.layers):
        both = {
            f"layers.{n}.attention.wo.weight": block.attention.out.weight,
            f"layers.{n}.feed_forward.w2.weight": block.ffn.down.weight,
            f"layers.{n}.attention_norm.weight": block.attention_norm.weight,
            f"layers.{n}.ffn_norm.weight": block.ffn_norm.weight,
        }
        gate, up = block.ffn.gate_up.weight.chunk(2)
        tensors |= both | {f"layers.{n}.feed_forward.w1.weight": gate, f"layers.{n}.feed_forward.w3.weight": up}
        tensors[f"layers.{n}.attention.wqkv.weight"] = block.attention.qkv.weight
        q, k, v = block.attention.qkv.weight.split([64, 32, 32])
        parts |= {f"layers.{n}.attention.w{name}.weight": part for name, part in zip("qkv", (q, k, v))}
    for where, found, name in ((meta, parts | tensors, "consolidated.00.pth"), (fast, tensors, "model.pth")):
        where.mkdir()
        found = {key: value.detach().clone() for key, value in found.items() if where == fast or "wqkv" not in key}
        torch.save(found, where / name)
        (where / "tokenizer.model").write_bytes(story_tokenizer.read_bytes())
    params = {"dim": 64, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "norm_eps": 1e-5, "vocab_size": 384}
    (meta / "params.json").write_text(json.dumps(params))
    (fast / "config.json").write_text(json.dumps(HF))
    return {
        "quantize": ("quantize", "--checkpoint", text_folder, "--scheme", "int8"),
        "convert_meta": ("scripts.convert_meta", "--input", meta),
        "convert_gptfast": ("scripts.convert_gptfast", "--checkpoint", fast / "model.pth"),
    }


WRITERS = ["quantize", "convert_meta", "convert_gptfast"]


SIGNALS = {"quantize": (3, "SIGKILL"), "convert_meta": (6, "SIGTERM"), "convert_gptfast": (4, "SIGINT")}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_stopped_writer_leaves_nothing_that_loads(writer, sources, tmp_path):
    """The output's name does not exist before it is whole; the next run is not disturbed by what was left."""
    module, *arguments = sources[writer]
    where, name = SIGNALS[writer]
    output = tmp_path / "q"
    done = run(STOP + program(module, *arguments, "--output", output), where, name)
    assert done.returncode == (130 if name == "SIGINT" else -getattr(signal, name)), done.stderr
    assert not output.exists() and "Traceback" not in done.stderr
    assert (tmp_path / "q.partial").exists() and refused(tmp_path / "q.partial")
    done = run(program(module, *arguments, "--output", output))
    assert done.returncode == 0 and load_model(output) and not (tmp_path / "q.partial").exists(), done.stderr


STEPS = [("quantize", "run"), ("scripts.convert_meta", "convert"), ("scripts.convert_gptfast", "convert"),
         ("scripts.bench", "run"), ("scripts.eval_lm", "run")]  # fmt: skip


@pytest.mark.parametrize("module, step", STEPS)
def test_ctrl_c_says_nothing_and_exits_130(module, step, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    given = {
        "quantize": ["--checkpoint", "x", "--scheme", "int8", "--output", "y"], "scripts.bench": [],
        "scripts.convert_meta": ["--input", "x", "--output", "y"],
        "scripts.eval_lm": ["--checkpoint", "x", "--tasks", "y"],
        "scripts.convert_gptfast": ["--checkpoint", "x", "--output", "y"],
    }  # fmt: skip
    monkeypatch.setattr(sys, "argv", [module, *given[module]])
    monkeypatch.setattr(importlib.import_module(module), step, interrupted)
    with pytest.raises(SystemExit) as exit:
        importlib.import_module(module).main()
    assert exit.value.code == 130


@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_is_one_line(writer, sources, tmp_path, monkeypatch, capsys):
    module, *arguments = sources[writer]
    with full_disk():
        assert "safetensors" in main_of(monkeypatch, capsys, module, *arguments, "--output", tmp_path / "q")
    assert not (tmp_path / "q").exists() and refused(tmp_path / "q.partial")


class Stopped(BaseException):
    """What nothing catches or cleans up after, as a process that is killed does not."""


def stop_at(monkeypatch, where: int) -> None:
    """Of the calls that change files, number `where` leaves half of what it should and ends everything."""
    calls = itertools.count(1)

    def stopping(change, half):
        def stand_in(*arguments, **options):
            if next(calls) == where:
                half(*arguments)
                raise Stopped
            return change(*arguments, **options)

        return stand_in

    half_tensors = lambda tensors, file, *_: file.write_bytes(b"\x08\0\0\0\0\0\0\0half")  # noqa: E731
    half_text = lambda file, text: file.write_bytes(text.encode()[: len(text) // 2])  # noqa: E731
    monkeypatch.setattr(checkpoint, "save_file", stopping(save_file, half_tensors))
    monkeypatch.setattr(Path, "write_text", stopping(Path.write_text, half_text))
    monkeypatch.setattr(Path, "unlink", stopping(Path.unlink, lambda *_: None))
    monkeypatch.setattr(os, "replace", stopping(os.replace, lambda *_: None))


@pytest.mark.parametrize("scheme, before", [(None, "int8"), ("int8", None), (None, None), ("int8", "int8")])
def test_saving_over_another_model_never_mixes_them(scheme, before, tmp_path, monkeypatch):
    """save_model over a folder of the same or the other form (one file; a file a layer), stopped at each step: it does
    not load, or it is the old model (nothing happened yet) or the new one, whole."""
    config, loaded = Config.from_hf(HF), []
    old, new = (random_model(config, dtype=torch.float32, seed=n, quantize=q) for n, q in ((1, before), (2, scheme)))
    wanted = {"old": old.embed.weight, "new": new.embed.weight}
    for where in range(1, 30):
        folder = tmp_path / str(where)
        save_model(old, folder, HF)
        with monkeypatch.context() as patched, contextlib.suppress(Stopped):
            stop_at(patched, where)
            save_model(new, folder, HF)
            loaded.append("done")
        if refused(folder):
            loaded.append("refused")
            continue
        found = load_model(folder, dtype=torch.float32)
        loaded += [name for name, weight in wanted.items() if torch.equal(found.embed.weight, weight)]
        if loaded[-2:] == ["done", "new"]:
            break
    assert loaded[0] == "old" and loaded[-2:] == ["done", "new"]
    assert len(loaded) > 7 and set(loaded[1:-2]) == {"refused"}, loaded


def test_saving_to_a_full_disk_is_an_oserror(tmp_path):
    model = random_model(Config.from_hf(HF))
    with full_disk(), pytest.raises(OSError, match=r"model\.safetensors: cannot be written"):
        save_model(model, tmp_path, HF)
    assert refused(tmp_path) and not (tmp_path / "model.safetensors").exists()


def test_loading_writes_nothing_and_an_output_below_a_file_is_refused(text_folder, tmp_path, monkeypatch, capsys):
    """(As root no folder is read-only; bytes and times that stay as they are say the same.)"""

    def seen():
        return {file: (file.stat().st_mtime_ns, file.stat().st_size) for file in text_folder.iterdir()}

    before = seen()
    assert load_model(text_folder) and before == seen()
    (tmp_path / "file").write_text("x")
    output = tmp_path / "file" / "q"
    assert str(output) in main_of(
        monkeypatch, capsys, "quantize", "--checkpoint", text_folder, "--scheme", "int8", "--output", output
    )


def row_of_the_benchmarks(args) -> list[dict]:
    return [{"id": "x", "value": 1, "min": 1, "max": 1, "unit": "", "note": "n" * 30_000}]


def test_results_survive_a_full_disk(tmp_path, monkeypatch, capsys):
    from scripts import bench

    monkeypatch.setattr(bench, "MEASUREMENTS", {"row": row_of_the_benchmarks})
    file, old = tmp_path / "results.json", json.dumps({"rows": [{"id": "old", "value": 1}]})
    file.write_text(old)
    with full_disk():
        main_of(monkeypatch, capsys, "scripts.bench", "row", "--write", file)
    assert file.read_text() == old
    main_of(monkeypatch, capsys, "scripts.bench", "row", "--write", tmp_path)  # a folder


@pytest.mark.parametrize("where", ["pipe", "/dev/full"])
def test_the_benchmarks_lose_their_reader_and_not_the_results(tmp_path, where):
    file = tmp_path / "results.json"
    code = (
        f"import sys; sys.argv = ['bench', 'row', '--write', {str(file)!r}]\nfrom scripts import bench\n"
        f"row = {row_of_the_benchmarks(None)[0] | {'note': 'short: it stays in a buffer until the end'}!r}\n"
        "bench.MEASUREMENTS = {'row': lambda args: [row]}\nbench.main()\n"
    )
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer if where == "pipe" else where, "w") as out:
        done = run(code, stdout=out, stderr=subprocess.PIPE, capture_output=False)
    assert done.returncode == 2 and one_line(done), done.stderr
    assert [row["id"] for row in json.loads(file.read_text())["rows"]] == ["x"]


def test_the_evaluations_output_is_whole_or_not_there(tmp_path, monkeypatch, capsys):
    eval_lm = pytest.importorskip("scripts.eval_lm")
    pytest.importorskip("lm_eval")
    monkeypatch.setattr(eval_lm, "run", lambda args: {"results": {}, "n": "x" * 50_000})
    file = tmp_path / "results.json"
    file.write_text("before")
    with full_disk():
        main_of(monkeypatch, capsys, "scripts.eval_lm", "--checkpoint", "x", "--tasks", "y", "--output", file)
    assert file.read_text() == "before"


def test_config_of_a_saved_model_is_what_was_given(tmp_path):
    save_model(random_model(Config.from_hf(HF)), tmp_path, HF)
    assert config_json(tmp_path) == HF and not list(tmp_path.glob("*.partial"))
