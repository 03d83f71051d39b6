"""Files of prompts: --output and what a rerun skips, open pipes, how many rows decode together, the
bar, and Ctrl-C. Oracles are each row alone, and the same file on one process."""

import fcntl
import io
import json
import os
import pty
import signal
import stat
import struct
import subprocess
import sys
import termios
from types import SimpleNamespace

import pytest
import torch
from conftest import BASE, FAMILIES, ROOT

import cli.opening
from cli.errors import free_memory
from cli.flags import parse_args
from cli.main import main as run_args
from decoding.engine import Engine
from loading.files import save_tensors, write_atomically

TEXTS = ("the little cat", "a big dog went", "the park", "red ball; it was fun.", "to play")
SHORT = (
    "--max_new_tokens",
    6,
    "--temperature",
    0,
    "--dtype",
    "float32",
    "--ignore_eos",
    "--device",
    "cpu",
)


def jsonl(file, *lines: dict):
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def run(capsys, *arguments) -> tuple[list[dict], str]:
    """(JSON lines on stdout, stderr)."""
    run_args(parse_args([*map(str, arguments)]))
    out, err = capsys.readouterr()
    return [json.loads(line) for line in out.splitlines()], err


def command(*arguments) -> list[str]:
    return [sys.executable, str(ROOT / "generate.py"), *map(str, arguments)]


# --------------------------------------------------------------------------------------- --output


@pytest.fixture
def prompts(tmp_path):
    """Five lines: ids, one of them twice, and lines without."""
    ids = ("a", None, 7, 7, None)
    return jsonl(
        tmp_path / "p.jsonl",
        *({"prompt": t} | ({} if i is None else {"id": i}) for t, i in zip(TEXTS, ids)),
    )


def test_output_adds_lines_to_a_file(text_folder, prompts, capsys, tmp_path):
    """Those of --json, with the numbers of lines that have no id of their own."""
    flags = ("--checkpoint", text_folder, "--prompt_file", prompts, *SHORT, "--num_samples", 2)
    expected, _ = run(capsys, *flags, "--json", "--ordered")
    assert not any("line" in row for row in expected)
    file = tmp_path / "out.jsonl"
    file.write_text("before\n")
    assert run(capsys, *flags, "--output", file, "--ordered")[0] == []
    first, *lines = file.read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert first == "before" and [row["text"] for row in rows] == [row["text"] for row in expected]
    labels = [(row.get("id"), row.get("line"), row["sample"]) for row in rows]
    assert labels[::2] == [("a", None, 0), (None, 2, 0), (7, None, 0), (7, 4, 0), (None, 5, 0)]
    with pytest.raises(ValueError, match=r"--output .*/none/out: No such file or directory"):
        run(capsys, *flags, "--output", tmp_path / "none" / "out")


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16", "latin-1"])
def test_text_in_another_encoding_is_no_prompt(encoding, text_folder, tmp_path, capsys):
    """The line is named, whatever the others hold."""
    file = tmp_path / "prompts.txt"
    file.write_bytes("Ein Bär\nnoch ein Bär\n".encode(encoding))
    with pytest.raises(SystemExit) as exit_info:
        run_args(parse_args(["--checkpoint", str(text_folder), "--prompt_file", str(file)]))
    captured = capsys.readouterr()
    assert exit_info.value.code == 2 and captured.out == ""
    assert f"{file}, line 1: " in captured.err and "UTF-8" in captured.err


def test_an_empty_stdin_is_an_error(text_folder, monkeypatch):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"\n\n")))
    with pytest.raises(ValueError, match="stdin: holds no prompt"):
        run_args(parse_args(["--checkpoint", str(text_folder), "--prompt_file", "-"]))


# ------------------------------------------------------------------------------------- batch size


def test_rows_of_a_file_decode_together_as_memory_and_rounding_allow(
    text_folder, prompts, capsys, tmp_path, monkeypatch
):
    """Each row as it is alone."""
    flags = ("--checkpoint", text_folder, "--prompt_file", prompts, *SHORT, "--json", "--ordered")
    sizes, step = [], Engine.step
    monkeypatch.setattr(
        Engine, "step", lambda engine: sizes.append(len(engine.requests)) or step(engine)
    )
    alone, err = run(capsys, *flags, "--batch_size", 1)
    assert max(sizes) == 1 and "at a time" not in err
    position = 3 * 2 * 2 * 16 * 4  # layers, keys and values, heads, channels, bytes
    longest = max(len(row["prompt_tokens"]) for row in alone) + 6
    draft = ("--draft", "ngram", "--speculate_k", 3)
    for options, memory, num_rows, size in (
        ((), 1e9, 2**31, 5),
        ((), 2 * 3 * position * longest, 2**31, 3),
        ((), 0, 2**31, 1),
        (draft, 1e9, 8, 2),
        (draft, 1e9, 2**31, 5),
        (("--batch_size", 4), 0, 2, 4),
    ):
        sizes.clear()
        monkeypatch.setattr(cli.opening, "free_memory", lambda device, memory=memory: memory)
        monkeypatch.setattr(
            cli.opening, "batch_invariant_rows", lambda model, num_rows=num_rows: num_rows
        )
        rows, err = run(capsys, *flags, *options)
        assert max(sizes) == size and [row["tokens"] for row in rows] == [
            row["tokens"] for row in alone
        ]
        assert (f"{size} rows are decoded at a time; --batch_size" in err) == (
            "--batch_size" not in options
        )
    many = jsonl(tmp_path / "many.jsonl", *[{"prompt": "a"}] * 40)
    sizes.clear()
    monkeypatch.setattr(cli.opening, "free_memory", lambda device: 1e9)
    monkeypatch.setattr(cli.opening, "batch_invariant_rows", lambda model: 2**31)
    run(capsys, *flags, "--prompt_file", many)
    assert max(sizes) == cli.opening.MAX_ROWS
    two = jsonl(tmp_path / "two.jsonl", {"prompt": "a"}, {"prompt": "b"})
    _, err = run(capsys, *flags, "--prompt_file", two)
    assert "2 rows are decoded at a time" in err
    _, err = run(capsys, *flags, "--prompt_file", jsonl(tmp_path / "one.jsonl", {"prompt": "a"}))
    assert "at a time" not in err


def test_free_memory_is_that_of_the_container(tmp_path, monkeypatch):
    cpu = torch.device("cpu")
    machine = free_memory(cpu, str(tmp_path))
    assert 1e6 < machine < 1e15
    for limit, expected in ((7_000_000, 5_000_000), (1_000_000, 0)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text("6000000\n")
        (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 4000000\n")
        assert free_memory(cpu, str(tmp_path)) == expected
        with monkeypatch.context() as patch:  # ranks of one machine share it
            for name, value in (
                ("LOCAL_RANK", "1"),
                ("WORLD_SIZE", "4"),
                ("LOCAL_WORLD_SIZE", "4"),
            ):
                patch.setenv(name, value)
            assert free_memory(cpu, str(tmp_path)) == expected / 4
    (tmp_path / "memory.max").write_text("max\n")
    assert abs(free_memory(cpu, str(tmp_path)) / machine - 1) < 0.5


# ------------------------------------------------------------------------------------ bar, Ctrl-C


@pytest.mark.attack
def test_a_terminal_sees_how_many_rows_are_done(text_folder, prompts):
    flags = ("--checkpoint", text_folder, "--prompt_file", prompts, *SHORT, "--json")
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))
    with subprocess.Popen(
        command(*flags), stdout=subprocess.PIPE, stderr=theirs, text=True
    ) as process:
        os.close(theirs)
        shown = b""
        while block := read(ours):
            shown += block
        assert len(process.stdout.read().splitlines()) == 5
    os.close(ours)
    assert b"| 1/5 " in shown and b"tok/s" in shown.split(b"| 1/5 ")[1].split(b"\r")[0], shown
    done = subprocess.run(command(*flags), capture_output=True, text=True)
    assert "/5 " not in done.stderr


def read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 2**16)
    except OSError:  # Linux's end of a terminal
        return b""


def shape(tmp_path) -> tuple:
    config = tmp_path / "long.json"
    config.write_text(
        json.dumps({**BASE, **FAMILIES["llama-3"], "max_position_embeddings": 100_000})
    )
    return "--random_weights", config, "--device", "cpu"


@pytest.mark.attack
@pytest.mark.parametrize(
    "options", [[], ["--json"], ["--json", "--ordered"]], ids=["text", "json", "ordered"]
)
def test_ctrl_c_keeps_the_lines_that_have_ended(options, tmp_path):
    """The last line has ended long before the first; the one between them would take minutes."""
    asked = [("first", 60), ("endless", 90_000), ("last", 2)]
    file = jsonl(
        tmp_path / "p.jsonl", *({"prompt": "ab", "id": id, "max_new_tokens": n} for id, n in asked)
    )
    flags = command(*shape(tmp_path), "--prompt_file", file, "--batch_size", 3, *options)
    with subprocess.Popen(
        flags, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        lines = [process.stdout.readline() for _ in range(2 if options == ["--json"] else 1)]
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "Traceback" not in err
    lines += rest.splitlines()
    if options:
        ids = [json.loads(line)["id"] for line in lines]
        assert ids == (["first", "last"] if "--ordered" in options else ["last", "first"])
    else:
        assert [len(line.split()) for line in lines] == [60, 2]


@pytest.mark.parametrize("umask, mode", [(0o077, 0o600), (0o022, 0o644), (0o002, 0o664)])
def test_the_umask_decides_who_reads_a_new_file(umask, mode, tmp_path):
    """A file that is there keeps its mode, as under a shell's `>`."""
    old = tmp_path / "old"
    old.touch()
    old.chmod(0o640)
    umask_before = os.umask(umask)
    try:
        save_tensors(tmp_path / "new", {"x": torch.ones(1)})
        save_tensors(old, {"x": torch.ones(1)})
        assert os.umask(umask) == umask
    finally:
        os.umask(umask_before)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("new", "old")] == [
        mode,
        0o640,
    ]


def test_a_link_is_followed_and_a_device_stays_one(tmp_path, text_folder):
    """As a shell's `>` does it. What os.replace puts in their place would be a plain file."""
    link = tmp_path / "link"
    link.symlink_to("folder/file")
    (tmp_path / "folder").mkdir()
    for text in ("first", "second"):
        write_atomically(link, lambda partial, text=text: partial.write_text(text))
        assert link.is_symlink() and (tmp_path / "folder" / "file").read_text() == text
    assert os.listdir(tmp_path / "folder") == ["file"]
    master, slave = pty.openpty()
    terminal = tmp_path / "terminal"
    terminal.symlink_to(os.ttyname(slave))
    write_atomically(terminal, lambda partial: partial.write_text("text"))
    assert os.read(master, 99) == b"text" and terminal.is_symlink()
    assert not stat.S_ISREG(os.stat(os.ttyname(slave)).st_mode)
    flags = ["--checkpoint", text_folder, "--max_new_tokens", "2", "--device", "cpu"]
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for flag in ("--report", "--profile"):
        with (tmp_path / "folder" / "copy").open("wb") as copy:
            reader = subprocess.Popen(["cat", pipe], stdout=copy)
            run_args(parse_args([*map(str, flags), flag, str(pipe)]))
            assert reader.wait(60) == 0 and pipe.is_fifo() and copy.tell() > 1000
    assert sorted(os.listdir(tmp_path)) == ["folder", "link", "pipe", "terminal"]
