"""Writers that are stopped half way: nothing that is left can be taken for a whole folder or file, what was there
before is still there, and what is said is one line.

A writer is stopped by signals at a chosen call, by a small tmpfs where one may be mounted, by a file size limit, which
to it is a full disk too, and by permissions. `python -m scripts.faults` does such things to all programs, at random
moments; here its own checks are tested, on writers that are known to be wrong.
"""

import contextlib
import ctypes
import importlib
import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import BASE, ROOT, config_json, forked
from safetensors.torch import save_file

import checkpoint
import generate as program_of_text
import tp
from checkpoint import load_model, random_model, save_model
from model import Config
from scripts import faults

HF = {**BASE, "model_type": "llama", "vocab_size": 384}


def stop(number: int, where: int) -> None:
    """Send this process a signal at one of the calls that change files; a tensor file is then half there."""
    calls = itertools.count(1)

    def stopping(change):
        def stand_in(*arguments, **options):
            if next(calls) == where:
                if change is save_file:
                    Path(arguments[1]).write_bytes(b"half")
                os.kill(os.getpid(), number)
            return change(*arguments, **options)

        return stand_in

    checkpoint.save_file = stopping(save_file)
    os.replace, os.rename = stopping(os.replace), stopping(os.rename)
    Path.write_text = stopping(Path.write_text)


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


SIGNALS = {"SIGINT": 130, "SIGTERM": -signal.SIGTERM, "SIGKILL": -signal.SIGKILL}
LAST = 12  # call that changes files, of every writer: it gives the folder its name


@pytest.mark.parametrize("name", SIGNALS)
@pytest.mark.parametrize("writer", WRITERS)
def test_a_stopped_writer_leaves_nothing_that_loads(writer, name, sources, tmp_path, monkeypatch):
    """Signals in the middle and before the last steps: the output's name does not exist before it is whole; what has
    another name does not load without its last file; the next run is not disturbed by it."""
    module, *arguments = sources[writer]
    monkeypatch.setattr(sys, "argv", [module, *map(str, arguments), "--output", str(tmp_path / "q")])
    main, number = importlib.import_module(module).main, getattr(signal, name)
    for where in (3, LAST - 1, LAST):
        status = forked(lambda where=where: (stop(number, where), main()), tmp_path / "stderr")
        said = (tmp_path / "stderr").read_text()
        assert (status, "Traceback" in said) == (SIGNALS[name], False), (where, said)
        assert not (tmp_path / "q").exists() and (tmp_path / "q.partial").exists(), where
        assert where == LAST or refused(tmp_path / "q.partial"), where
    assert forked(lambda: (stop(number, LAST + 1), main()), tmp_path / "stderr") == 0
    assert load_model(tmp_path / "q") and not (tmp_path / "q.partial").exists()


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


def without_rights() -> None:
    """Of this process, all that root may do beyond what permissions say. Files stay its own."""
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None).capset(header, sets) == 0


@contextlib.contextmanager
def read_only(folder: Path):
    """A folder and what it holds, for as long as the block lasts."""
    every = [folder, *folder.rglob("*")]
    for path in every:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        yield
    finally:
        for path in every:
            path.chmod(0o755 if path.is_dir() else 0o644)


@pytest.mark.parametrize("writer", WRITERS)
def test_read_only_folders_are_read_and_not_written(writer, sources, tmp_path, monkeypatch):
    """A checkpoint that nobody may write to is all that a writer needs, and its files' modes are not those of the
    output; where the output may not be written it is one line. For root too, without root's rights."""
    module, *arguments = sources[writer]
    main, given, said = importlib.import_module(module).main, Path(arguments[1]), tmp_path / "stderr"
    folder = given if given.is_dir() else given.parent
    before = {file: (file.stat().st_mtime_ns, file.stat().st_size) for file in folder.iterdir()}
    monkeypatch.setattr(sys, "argv", [module, *map(str, arguments), "--output", str(tmp_path / "out" / "q")])
    (tmp_path / "out").mkdir()
    with read_only(folder):
        with read_only(tmp_path / "out"):
            assert forked(lambda: (without_rights(), main()), said) == 2
            errors = [line for line in said.read_text().splitlines() if line.startswith("error: ")]
            assert len(errors) == 1 and "out/q" in errors[0] and "Traceback" not in said.read_text()
        assert not list((tmp_path / "out").iterdir())
        assert forked(lambda: (without_rights(), main()), said) == 0, said.read_text()
    assert load_model(tmp_path / "out" / "q")
    assert all(file.stat().st_mode & 0o200 for file in (tmp_path / "out" / "q").iterdir())
    assert before == {file: (file.stat().st_mtime_ns, file.stat().st_size) for file in folder.iterdir()}


def test_an_output_below_a_file_is_refused(text_folder, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("x")
    output = tmp_path / "file" / "q"
    assert str(output) in main_of(
        monkeypatch, capsys, "quantize", "--checkpoint", text_folder, "--scheme", "int8", "--output", output
    )


@pytest.mark.parametrize("writer", WRITERS)
def test_a_writer_whose_reader_has_gone(writer, sources, tmp_path, monkeypatch):
    """`program 2>&1 | head -1`: it may end or go on, but what it leaves is missing or whole."""
    module, *arguments = sources[writer]
    monkeypatch.setattr(sys, "argv", [module, *map(str, arguments), "--output", str(tmp_path / "q")])
    main = importlib.import_module(module).main
    reader, closed = os.pipe()
    os.close(reader)
    forked(main, closed)
    os.close(closed)
    assert not (tmp_path / "q").exists() or load_model(tmp_path / "q")
    shutil.rmtree(tmp_path / "q", ignore_errors=True)
    assert forked(main, tmp_path / "stderr") == 0 and load_model(tmp_path / "q")


@pytest.fixture
def small_disk(tmp_path):
    """A tmpfs of 256 KB, of which 40 are free; skipped without the right to mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        around = faults.disk(folder, 256 * 1024)
        around.__enter__()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no right to mount a tmpfs")
    try:
        (folder / "filler").write_bytes(bytes(216 * 1024))
        yield folder
    finally:
        around.__exit__(None, None, None)


@pytest.mark.parametrize("writer", WRITERS)
def test_a_disk_that_is_really_full(writer, sources, small_disk, monkeypatch, capsys):
    """As above, where space runs out inside a file and not at a limit on one, and is given back."""
    module, *arguments = sources[writer]
    output = small_disk / "q"
    said = main_of(monkeypatch, capsys, module, *arguments, "--output", output)
    assert "safetensors" in said and ("No space" in said or "os error 28" in said)
    assert not output.exists() and refused(small_disk / "q.partial")
    (small_disk / "filler").unlink()
    faults.remount(small_disk, "size=8m")
    importlib.import_module(module).main()
    assert load_model(output) and sorted(os.listdir(small_disk)) == ["q"]


def test_results_states_and_profiles_survive_a_disk_that_is_really_full(text_folder, small_disk, monkeypatch, capsys):
    from scripts import bench

    monkeypatch.setattr(bench, "MEASUREMENTS", {"row": row_of_the_benchmarks})
    results, trace = small_disk / "results.json", small_disk / "trace.json"
    results.write_text(json.dumps({"rows": [{"id": "old", "value": 1}]}))
    trace.write_text("{}")
    with contextlib.suppress(OSError), (small_disk / "more").open("wb", buffering=0) as filler:
        while filler.write(bytes(4096)):
            pass
    main_of(monkeypatch, capsys, "scripts.bench", "row", "--write", results)
    with pytest.raises(OSError, match=r"state\.pt: cannot be written"):  # RuntimeError to torch
        checkpoint.write_whole(small_disk / "state.pt", lambda partial: torch.save(torch.ones(9999), partial))
    given = ["--checkpoint", str(text_folder), "--max_new_tokens", "2", "--profile", str(trace), "--json"]
    monkeypatch.setattr(sys, "argv", ["generate.py", "--device", "cpu", *given])
    with pytest.raises(SystemExit) as exit:
        program_of_text.main()
    assert exit.value.code == 2 and capsys.readouterr().err.count("error: ") == 1
    assert trace.read_text() == "{}" and [row["id"] for row in json.loads(results.read_text())["rows"]] == ["old"]


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


# ----------------------------------------------------------------------------- the start, and the launcher


@pytest.mark.parametrize("given", [["generate.py"], ["quantize.py"], ["-m", "scripts.perplexity"]])
def test_ctrl_c_while_torch_is_imported_says_nothing(given):
    """By itself, Python prints a traceback of what was being imported, or an import swallows the exception."""
    for seconds in (0.3, 0.6):
        child = subprocess.Popen(
            [sys.executable, *given], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
        )
        time.sleep(seconds)
        child.send_signal(signal.SIGINT)
        assert child.communicate(timeout=30) == (b"", b"") and child.returncode == -signal.SIGINT


def test_ctrl_c_is_an_exception_from_then_on_and_nohup_stays():
    found = signal.getsignal(signal.SIGINT)
    try:
        for before, after in ((signal.SIG_DFL, signal.default_int_handler), (signal.SIG_IGN, signal.SIG_IGN)):
            signal.signal(signal.SIGINT, before)
            program_of_text.raise_interrupts()
            assert signal.getsignal(signal.SIGINT) is after
    finally:
        signal.signal(signal.SIGINT, found)


@pytest.mark.skipif(sys.platform != "linux", reason="it is Linux that tells a child of its parent's death")
def test_a_rank_ends_with_its_launcher(tmp_path, monkeypatch):
    """A process that starts a rank is killed, which leaves it no time to end the rank."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    file = tmp_path / "pid"

    def waits(*_, **__):
        file.write_text(str(os.getpid()))
        time.sleep(60)

    monkeypatch.setattr(tp.dist, "init_process_group", waits)

    def launcher():
        if os.fork() == 0:
            tp.join(torch.device("cpu"), 60)
        while not file.exists() or not file.read_text():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    assert forked(launcher, tmp_path / "stderr") == -signal.SIGKILL
    rank, end = Path("/proc") / file.read_text(), time.monotonic() + 10
    while (alive := rank.exists() and ") Z " not in (rank / "stat").read_text()) and time.monotonic() < end:
        time.sleep(0.02)
    assert not alive


# --------------------------------------------------------------------------------- scripts/faults.py itself

# The first run says so and waits, for a signal, where it says `half`; the next one does not wait.
WRITER = """
import json, os, signal, subprocess, sys, time
file, first = sys.argv[1], not os.path.exists(sys.argv[1] + ".struck")
signal.signal(signal.SIGINT, signal.SIG_DFL)
def half():
    open(file + ".struck", "w").close()
    time.sleep(20 * first)
def write(name):
    with open(name, "w") as stream:
        stream.write("[1, "); stream.flush(); half(); stream.write("2]")
def whole():
    write(file + ".partial")
    os.replace(file + ".partial", file)
"""
KINDS = {  # what a writer does, and what is to be said of it
    "right": ("whole()", None),
    "in place": ("write(file)", "NEITHER OLD NOR WHOLE"),
    "removes what was there": ("first and os.remove(file); whole()", "output: nothing"),
    "traceback": ("signal.signal(signal.SIGINT, signal.default_int_handler); whole()", "on stderr: Traceback"),
    "says all is well": (
        "signal.signal(signal.SIGINT, lambda *_: sys.exit(0)); whole()",
        "status 0, output: as before",
    ),
    "does not end": ("signal.signal(signal.SIGINT, signal.SIG_IGN); whole()", "still ran"),
    "leaves a child": ("subprocess.Popen(['sleep', '9'], start_new_session=True); whole()", "left behind"),
    "trips over its own": ("assert not os.path.exists(file + '.partial'); whole()", "the next run: status 1"),
    "makes something else": ("whole(); first or open(file, 'a').write(' ')", "differs from the undisturbed one"),
    "leaves another name": (
        "whole(); first or open(file + '.partial', 'w')",
        "the next run leaves made",
    ),
    "starts from zero": ("print('step 1: ', file=sys.stderr); whole()", "step 3 was saved, the next run did steps [1]"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_matrix_finds_a_wrong_writer(kind, tmp_path, monkeypatch):
    code, said = KINDS[kind]
    (tmp_path / "writer.py").write_text(WRITER + code)
    (tmp_path / "right.json").write_text("[1, 2]")
    torch.save({"step": 3}, tmp_path / "state.pt")
    command, state = (str(tmp_path / "writer.py"), "OUT/made.json"), "../../state.pt" if "zero" in kind else None
    program = faults.Program(kind, command, "made.json", before={"made.json": "{}"}, state=state)
    whole = faults.Whole(0.1, "", faults.contents(tmp_path / "right.json"))

    def strike(case):
        while not (case.out / "made.json.struck").exists():
            time.sleep(0.005)
        faults.FAULTS["SIGINT"].strike(case)

    monkeypatch.setattr(faults, "PATIENCE_S", 0.2)
    monkeypatch.setattr(faults, "DEADLINE_S", 0.5 if kind == "does not end" else 20)
    fault = faults.FAULTS["SIGINT"]._replace(strike=strike)
    found = faults.attempt(program, fault, 0, whole, tmp_path, tmp_path / "case")["problems"]
    assert found == [] if said is None else any(said in problem for problem in found), found
