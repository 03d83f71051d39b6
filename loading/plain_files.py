"""A folder's files before they are read: does each exist, is it a plain file of bounded size, is it JSON?

    file_exists     whether a file exists; a dangling link is an error
    plain_file      refuses pipes, devices, oversized files and Git LFS pointers
    read_json       a JSON object from a file; empty without the file
    is_gguf         whether a file begins like one of llama.cpp's
    error_prefix    puts a file's name in front of a ValueError

This file knows no model, tensor or tokenizer.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from loading.chat_templates import one_line

MAX_JSON_BYTES = 2**24  # real files stay far below
GGUF_MAGIC = b"GGUF"
LFS_POINTER = b"version https://git-lfs."  # the beginning of a file that git cloned without Git LFS


def file_exists(file: Path) -> bool:
    """Does a file exist? ValueError for a dangling link, such as those that a cleaned cache leaves."""
    if file.is_symlink() and not file.exists():
        raise ValueError(f"{file}: a link to {os.readlink(file)}, which does not exist; fetch the file again")
    return file.exists()


def plain_file(file: Path, max_bytes: int) -> Path:
    """The same file. ValueError for a pipe or device, for more than `max_bytes`, and for a Git LFS pointer."""
    if not file.is_file():
        raise ValueError(f"{file}: not a plain file")
    if file.stat().st_size > max_bytes:
        raise ValueError(f"{file}: {file.stat().st_size:,} bytes are more than the limit of {max_bytes:,}")
    with file.open("rb") as stream:
        if stream.read(len(LFS_POINTER)) == LFS_POINTER:
            raise ValueError(f"{file}: a Git LFS pointer instead of the file; fetch it with `git lfs pull`")
    return file


def read_json(file: Path, max_bytes: int = MAX_JSON_BYTES) -> dict:
    """A JSON object; {} if the file does not exist."""
    if not file_exists(file):
        return {}
    try:
        value = json.loads(plain_file(file, max_bytes).read_text(encoding="utf-8-sig"))  # with or without a BOM
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not readable as JSON: {one_line(error)}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file}: expected a JSON object, found {type(value).__name__}")
    return value


def is_gguf(file: Path) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as stream:
        return stream.read(len(GGUF_MAGIC)) == GGUF_MAGIC


@contextlib.contextmanager
def error_prefix(prefix: object) -> Iterator[None]:
    """Put a prefix, such as a file's path, in front of a ValueError's message that lacks it or has its name alone."""
    try:
        yield
    except ValueError as error:
        message = str(error).removeprefix(f"{prefix}: ").removeprefix(f"{Path(str(prefix)).name}: ")
        raise ValueError(f"{prefix}: {message}") from None
