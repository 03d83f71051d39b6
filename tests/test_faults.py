"""Writers that are stopped half way: nothing that is left can be taken for a whole folder or file,
what was there before is still there, and what is said is one line.

A writer is stopped by signals at a chosen call, by a small tmpfs where one may be mounted, by a
file size limit, which to it is a full disk too, and by permissions. tests/attacks/faults.py does
such things to whole programs, at random moments.
"""

import contextlib
import ctypes
import importlib
import itertools
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import BASE, ROOT, forked
from safetensors.torch import save_file

import loading.files as files
from loading.checkpoint import load_model
from loading.config import config_from_hf
from loading.models import random_model
from loading.saving import save_model
from tests.attacks import faults

HF = {**BASE, "model_type": "llama", "vocab_size": 384}


def stop(number: int, where: int) -> None:
    """Send this process a signal at one of the calls that change files; a tensor file is then half
    there."""
    calls = itertools.count(1)

    def stopping(change):
        def stand_in(*arguments, **options):
            if next(calls) == where:
                if change is save_file:
                    Path(arguments[1]).write_bytes(b"half")
                os.kill(os.getpid(), number)
            return change(*arguments, **options)

        return stand_in

    files.save_file = stopping(save_file)
    os.replace, os.rename = stopping(os.replace), stopping(os.rename)
    Path.write_text = stopping(Path.write_text)


@contextlib.contextmanager
def full_disk(size: int = 20_000):
    """The kernel refuses to write beyond this size of a file: EFBIG, where a full disk gives
    ENOSPC."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def main_of(monkeypatch, capsys, module: str, *arguments) -> str:
    """What a program that fails in this process says after "error: "."""
    monkeypatch.setattr(sys, "argv", [module, *map(str, arguments)])
    with pytest.raises(SystemExit) as exit:
        importlib.import_module(module).main()
    out, err = capsys.readouterr()
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert exit.value.code == 2 and out == "" and len(errors) == 1 and "Traceback" not in err, err
    return errors[0]


@pytest.fixture
def quantize_flags(text_folder):
    """Of a command that writes a folder; --output is left to the test."""
    return ["--checkpoint", str(text_folder), "--scheme", "int8"]


def refused(folder) -> bool:
    try:
        load_model(folder)
    except ValueError:
        return True
    return False


SIGNALS = {"SIGINT": 130, "SIGTERM": -signal.SIGTERM, "SIGKILL": -signal.SIGKILL}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", SIGNALS)
def test_a_stopped_writer_leaves_nothing_that_loads(name, quantize_flags, tmp_path, monkeypatch):
    """Stopped at every third of the calls that change files: the output's name does not exist
    before it is whole; what has another name does not load, or is the whole; the next run is not
    disturbed by it."""
    monkeypatch.setattr(sys, "argv", ["quantize", *quantize_flags, "--output", str(tmp_path / "q")])
    main, partial = importlib.import_module("cli.quantize").main, tmp_path / "q.partial"
    for where in range(3, 100, 3):
        status = forked(
            lambda where=where: (stop(getattr(signal, name), where), main()), tmp_path / "stderr"
        )
        if status == 0:
            break
        said, early = (tmp_path / "stderr").read_text(), refused(partial)
        assert (status, "Traceback" in said) == (SIGNALS[name], False), (where, said)
        assert not (tmp_path / "q").exists() and (early or where > 3), where
        weights = None if early else load_model(partial).embed.weight
    assert where > 6 and load_model(tmp_path / "q") and not partial.exists()
    assert weights is None or torch.equal(weights, load_model(tmp_path / "q").embed.weight)


PROGRAMS = {  # the module that defines a program's work, its name, and flags of the program
    "cli.quantize": (
        "cli.quantized_folder",
        "run",
        "--checkpoint",
        "x",
        "--scheme",
        "int8",
        "--output",
        "y",
    ),
    "benchmarks.bench": ("benchmarks.bench", "run"),
}


@pytest.mark.parametrize("module", PROGRAMS)
def test_ctrl_c_says_nothing_and_exits_130(module, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    owner, step, *given = PROGRAMS[module]
    monkeypatch.setattr(sys, "argv", [module, *given])
    monkeypatch.setattr(importlib.import_module(owner), step, interrupted)
    with pytest.raises(SystemExit) as exit:
        importlib.import_module(module).main()
    assert exit.value.code == 130


def test_a_full_disk_is_one_line(quantize_flags, tmp_path, monkeypatch, capsys):
    with full_disk():
        line = main_of(
            monkeypatch, capsys, "cli.quantize", *quantize_flags, "--output", tmp_path / "q"
        )
    assert (
        "safetensors" in line and f"lies in {tmp_path / 'q'}.partial, which may be deleted" in line
    )
    assert not (tmp_path / "q").exists() and refused(tmp_path / "q.partial")


class Stopped(BaseException):
    """What nothing catches or cleans up after, as a process that is killed does not."""


def stop_at(monkeypatch, where: int) -> None:
    """Of the calls that change files, number `where` leaves half of what it should and ends
    everything."""
    calls = itertools.count(1)

    def stopping(change, half):
        def stand_in(*arguments, **options):
            if next(calls) == where:
                half(*arguments)
                raise Stopped
            return change(*arguments, **options)

        return stand_in

    def half_tensors(tensors, file, *_):
        file.write_bytes(b"\x08\0\0\0\0\0\0\0half")

    half_text = lambda file, text: file.write_bytes(text.encode()[: len(text) // 2])  # noqa: E731
    monkeypatch.setattr(files, "save_file", stopping(save_file, half_tensors))
    monkeypatch.setattr(Path, "write_text", stopping(Path.write_text, half_text))
    monkeypatch.setattr(Path, "unlink", stopping(Path.unlink, lambda *_: None))
    monkeypatch.setattr(os, "replace", stopping(os.replace, lambda *_: None))


@pytest.mark.parametrize("scheme, before", [(None, "int8"), ("int8", None)])
def test_saving_over_another_model_never_mixes_them(scheme, before, tmp_path, monkeypatch):
    """save_model over a folder of the same or the other form (one file; a file a layer), stopped at
    each step: it does not load, or it is the old model (nothing happened yet) or the new one,
    whole."""
    config, loaded = config_from_hf(HF), []
    old, new = (
        random_model(config, dtype=torch.float32, seed=n, quantize=q, pack=False)
        for n, q in ((1, before), (2, scheme))
    )
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
        loaded += [
            name for name, weight in wanted.items() if torch.equal(found.embed.weight, weight)
        ]
        if loaded[-2:] == ["done", "new"]:
            break
    assert loaded[0] == "old" and loaded[-2:] == ["done", "new"]
    assert len(loaded) > 7 and set(loaded[1:-2]) == {"refused"}, loaded


def test_saving_to_a_full_disk_is_an_oserror(tmp_path):
    model = random_model(config_from_hf(HF))
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


def test_read_only_folders_are_read_and_not_written(
    text_folder, quantize_flags, tmp_path, monkeypatch
):
    """A checkpoint that nobody may write to is all that a writer needs, and its files' modes are
    not those of the output; where the output may not be written it is one line. For root too,
    without root's rights."""
    main, folder, said = (
        importlib.import_module("cli.quantize").main,
        text_folder,
        tmp_path / "stderr",
    )
    before = {file: (file.stat().st_mtime_ns, file.stat().st_size) for file in folder.iterdir()}
    monkeypatch.setattr(
        sys, "argv", ["quantize", *quantize_flags, "--output", str(tmp_path / "out" / "q")]
    )
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
    assert before == {
        file: (file.stat().st_mtime_ns, file.stat().st_size) for file in folder.iterdir()
    }


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


def test_a_disk_that_is_really_full(quantize_flags, small_disk, monkeypatch, capsys):
    """As above, where space runs out inside a file and not at a limit on one, and is given back."""
    output = small_disk / "q"
    said = main_of(monkeypatch, capsys, "cli.quantize", *quantize_flags, "--output", output)
    assert "safetensors" in said and ("No space" in said or "os error 28" in said)
    assert not output.exists() and refused(small_disk / "q.partial")
    (small_disk / "filler").unlink()
    faults.remount(small_disk, "size=8m")
    importlib.import_module("cli.quantize").main()
    assert load_model(output) and sorted(os.listdir(small_disk)) == ["q"]


def test_a_file_on_a_full_disk_is_as_it_was(tmp_path):
    file = tmp_path / "results.json"
    file.write_text("before")
    for write in (
        lambda partial: partial.write_text("x" * 50_000),
        lambda partial: torch.save(torch.ones(9999), partial),
    ):
        # RuntimeError to torch
        with full_disk(), pytest.raises(OSError, match=r"results\.json|too large"):
            files.write_atomically(file, write)
        assert file.read_text() == "before"


# -------------------------------------------------------------------- the start, and the launcher


STARTS = (  # with flags that are right as far as one can tell without torch
    ["generate.py"],
    ["quantize.py", "--checkpoint", "x", "--scheme", "int8", "--output", "y"],
    ["-m", "scripts.perplexity", "--checkpoint", "x", "--text", "y"],
)


@pytest.mark.attack
@pytest.mark.skipif(sys.platform != "linux", reason="reads from /proc how far a start is")
@pytest.mark.parametrize("program", STARTS)
def test_ctrl_c_while_torch_is_imported_says_nothing(program):
    """By itself, Python prints a traceback of what was being imported, or an import swallows the
    exception."""
    for seconds in (0, 0.1):
        child = subprocess.Popen(
            [sys.executable, *program],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
        )
        while "libtorch_python" not in Path(f"/proc/{child.pid}/maps").read_text():
            assert child.poll() is None
            time.sleep(0.01)
        time.sleep(seconds)
        child.send_signal(signal.SIGINT)
        assert child.communicate(timeout=30) == (b"", b"") and child.returncode == -signal.SIGINT


@pytest.mark.attack
def test_under_nohup_ctrl_c_is_ignored():
    """A signal that is ignored from the start stays so: while importing, and later."""
    code = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN);"
        " os.execv(sys.executable, sys.argv[1:])"
    )
    command = [
        sys.executable,
        "-c",
        code,
        sys.executable,
        "generate.py",
        "--device",
        "cpu",
        "--max_new_tokens",
        "2",
    ]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    while child.poll() is None:
        child.send_signal(signal.SIGINT) if time.sleep(0.3) is None else None
    assert child.returncode == 0 and child.stdout.read().strip()
