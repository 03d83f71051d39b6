"""Files of prompts: --output and what a rerun skips, open pipes, how many rows decode together, the
bar, and Ctrl-C. Oracles are each row alone, and the same file on one process."""

import fcntl
import json
import os
import pty
import signal
import stat
import struct
import subprocess
import sys
import termios
import time

import pytest
import torch
from conftest import BASE, FAMILIES, ROOT

import cli.opening
from cli.errors import free_memory
from cli.flags import parse_args
from cli.main import run as run_args
from cli.output import POLL_S
from decoding.engine import Engine
from loading.files import write_atomically

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


def test_a_rerun_adds_to_a_file_what_it_lacks(text_folder, prompts, capsys, tmp_path, monkeypatch):
    """After a crash at any line, in the middle of it, the file comes to hold each row once; nothing
    else runs."""
    flags = ("--checkpoint", text_folder, "--prompt_file", prompts, *SHORT, "--num_samples", 2)
    expected, _ = run(capsys, *flags, "--json", "--ordered")
    assert not any("line" in row for row in expected)
    file, started, add = tmp_path / "out.jsonl", [], Engine.add_request
    monkeypatch.setattr(
        Engine, "add_request", lambda *args, **more: started.append(1) or add(*args, **more)
    )
    rows, err = run(capsys, *flags, "--output", file, "--ordered")
    lines = file.read_text().splitlines(keepends=True)
    assert rows == [] and len(lines) == len(started) == 10 and "skipped" not in err
    labels = [(row.get("id"), row.get("line"), row["sample"]) for row in map(json.loads, lines)]
    assert labels[::2] == [("a", None, 0), (None, 2, 0), (7, None, 0), (7, 4, 0), (None, 5, 0)]
    for remains in (
        [],
        lines[3:4],
        [*lines[:5], lines[5][:40]],
        [*lines[2:9], "{"],
        [*lines[:3], lines[3][:-1]],
        lines,
    ):
        file.write_text("".join(remains))
        started.clear()
        _, err = run(capsys, *flags, "--output", file)
        num_answered = sum(line.endswith("\n") for line in remains)
        assert len(started) == 10 - num_answered
        assert (f"answers {num_answered} rows already: skipped" in err) == bool(num_answered)
        results = sorted(
            map(json.loads, file.read_text().splitlines()), key=lambda row: row["prompt_tokens"]
        )
        by_prompt = sorted(expected, key=lambda row: row["prompt_tokens"])
        assert sorted((r["text"], r["sample"]) for r in results) == sorted(
            (r["text"], r["sample"]) for r in by_prompt
        )


def test_a_file_of_something_else_is_left_as_it_is(text_folder, prompts, capsys, tmp_path):
    file, flags = (
        tmp_path / "notes",
        ("--checkpoint", text_folder, "--prompt_file", prompts, *SHORT),
    )
    for text, message in (
        ("my notes\n", "line 1 is no result"),
        ("{}\n", "line 1 is no result"),
        ("my notes", "its last line is no"),
        ('{"prompt": "One day"}', "its last line is no"),
        ("5", "its last line is no"),
        ('{"model_type": "llama", "a', "its last line is no"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=f"--output {file}: {message}"):
            run(capsys, *flags, "--output", file)
        assert file.read_text() == text
    cut = '{"id": "a", "seed": 0, "sam'  # the end of a crash stays until a result follows it
    file.write_text(cut)
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="holds no prompt"):
        run(capsys, *flags[:2], "--prompt_file", tmp_path / "empty", "--output", file)
    assert file.read_text() == cut
    with pytest.raises(ValueError, match=r"--output .*/none/out: No such file or directory"):
        run(capsys, *flags, "--output", tmp_path / "none" / "out")


def test_answers_to_other_prompts_are_no_answers(text_folder, prompts, capsys, tmp_path):
    """Ids and numbers of lines are trusted as far as the prompt and the seed agree."""
    flags = (
        "--checkpoint",
        text_folder,
        "--prompt_file",
        prompts,
        *SHORT,
        "--output",
        tmp_path / "out",
    )
    run(capsys, *flags)
    with pytest.raises(
        ValueError, match=r"'id': 'a'.* is answered there for another prompt or seed"
    ):
        run(capsys, *flags, "--seed", 5)
    jsonl(prompts, {"prompt": TEXTS[0], "id": "a"}, {"prompt": "a dog"})
    with pytest.raises(
        ValueError, match=r"'line': 2.* is answered there for another prompt or seed"
    ):
        run(capsys, *flags)


# ----------------------------------------------------------------------------------------- a pipe


def pipe(*arguments) -> subprocess.Popen:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(
        command(*arguments, "--prompt_file", "-"), text=True, bufsize=1, **pipes
    )


@pytest.mark.attack
def test_a_pipes_line_is_answered_before_the_next_is_written(text_folder, capsys, tmp_path):
    """JSONL and text; what does not fit is named with its line, and the status is 2."""
    flags = ("--checkpoint", text_folder, *SHORT, "--max_seq_length", 60)
    alone = [run(capsys, *flags, "--json", "--prompt", text)[0][0] for text in TEXTS[:3]]
    with pipe(*flags, "--json") as process:
        for number, row in enumerate(alone):
            process.stdin.write(json.dumps({"prompt": TEXTS[number], "id": number}) + "\n")
            answer = json.loads(process.stdout.readline())
            assert answer["tokens"] == row["tokens"] and answer["id"] == number
            time.sleep(3 * POLL_S)  # idle for a while
            if number == 0:
                process.stdin.write(
                    "\n" + json.dumps({"prompt": "cat " * 99, "id": "long"}) + '\n{"text": 1}\n'
                )
        rest, err = process.communicate(timeout=60)
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert process.returncode == 2 and rest == "" and len(errors) == 2
    assert (
        "stdin, line 3, id long: has" in errors[0]
        and "60 positions" in errors[0]
        and "stdin, line 4:" in errors[1]
    )
    with pipe(*flags, "--output", tmp_path / "out") as process:
        # the last line without an end
        out, _ = process.communicate("\n".join(TEXTS[:3]), timeout=60)
    results = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert out == "" and sorted((r["line"], r["tokens"]) for r in results) == [
        (n, row["tokens"]) for n, row in enumerate(alone, 1)
    ]
    with pipe(*flags, "--output", tmp_path / "out") as process:
        process.communicate("\n".join([*TEXTS[:3], "a"]), timeout=60)
    assert len((tmp_path / "out").read_text().splitlines()) == 4


@pytest.mark.attack
def test_slots_stay_busy_while_no_line_comes(tmp_path):
    """A short row that comes later than a long one ends before it. Ctrl-C ends both, and a wait for
    lines."""
    flags = (
        *shape(tmp_path),
        "--max_new_tokens",
        90_000,
        "--max_seq_length",
        100_000,
        "--batch_size",
        2,
        "--json",
    )
    for waits in (False, True):
        with pipe(*flags) as process:
            if not waits:
                process.stdin.write('{"prompt": "ab", "id": "endless"}\n')
            process.stdin.write('{"prompt": "abc", "id": "short", "max_new_tokens": 3}\n')
            assert json.loads(process.stdout.readline())["id"] == "short"
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130 and process.stdout.read() == ""
            assert "Traceback" not in process.stderr.read()


@pytest.mark.attack
def test_an_empty_pipe_is_an_error(text_folder):
    with pipe("--checkpoint", text_folder) as process:
        _, err = process.communicate("\n\n", timeout=60)
    assert process.returncode == 2 and "error: stdin: holds no prompt" in err


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
