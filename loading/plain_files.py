"""Files before they are read: is a file there, is it JSON, is it llama.cpp's?

file_exists         whether a file exists; a dangling link is an error
plain_file          refuses pipes, huge files and Git LFS pointers, what git leaves in place of a
                    large file without Git LFS
read_plain          the bytes of such a file
utf8_text           a text from bytes
read_json           a JSON object from a file; empty without the file
parse_json          a JSON object from bytes
is_gguf             whether a file begins like one of llama.cpp's
error_prefix        puts a file's name in front of a UserError
one_line            an error's message on one line
short_repr          a value of a file as errors show it
refused             a UserError that names a key and its value
"""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from decoding.errors import UserError

MAX_TEXT_BYTES = 2**26  # real files of text and vocabularies stay far below
GGUF_MAGIC = b"GGUF"
LFS_POINTER = b"version https://git-lfs."


def file_exists(file: Path) -> bool:
    """Does a file exist? UserError for a dangling link, such as those that a cleaned cache
    leaves."""
    if file.is_symlink() and not file.exists():
        raise UserError(
            f"{file}: a link to {os.readlink(file)}, which does not exist; fetch the file again"
        )
    return file.exists()


def plain_file(file: Path, max_bytes: float = MAX_TEXT_BYTES) -> Path:
    """The same file. UserError for a pipe or device, for more bytes, and for a Git LFS pointer."""
    check_plain(file, max_bytes)
    refuse_lfs_pointer(file, first_bytes(file, len(LFS_POINTER)))
    return file


def read_plain(file: Path) -> bytes:
    """The bytes of a file of text, which `plain_file` would not refuse."""
    check_plain(file, MAX_TEXT_BYTES)
    content = file.read_bytes()
    refuse_lfs_pointer(file, content)
    return content


def check_plain(file: Path, max_bytes: float) -> None:
    if not file.is_file():
        raise UserError(f"{file}: a pipe, a device or a folder; give a plain file")
    if file.stat().st_size > max_bytes:
        raise UserError(f"{file}: its {file.stat().st_size:,} bytes are more than {max_bytes:,}")


def refuse_lfs_pointer(file: Path, content: bytes) -> None:
    if content.startswith(LFS_POINTER):
        raise UserError(
            f"{file}: a Git LFS pointer instead of the file; fetch it with `git lfs pull`"
        )


def utf8_text(content: bytes) -> str:
    """A text, with or without a BOM. UserError for another encoding."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8 text: {error}; save it as UTF-8") from None


def read_json(file: Path) -> dict:
    """A JSON object; {} if the file does not exist."""
    if not file_exists(file):
        return {}
    try:
        content = read_plain(file)
    except OSError as error:
        raise UserError(f"{file}: not readable as JSON: {one_line(error)}") from None
    return parse_json(content, file)


def parse_json(content: bytes, source: object) -> dict:
    """A JSON object from bytes, with or without a BOM. UserError names their source."""
    try:
        value = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{source}: not readable as JSON: {one_line(error)}") from None
    if not isinstance(value, dict):
        raise UserError(f"{source}: expected a JSON object, found {type(value).__name__}")
    return value


def is_gguf(file: Path) -> bool:
    return file.is_file() and first_bytes(file, len(GGUF_MAGIC)) == GGUF_MAGIC


def first_bytes(file: Path, count: int) -> bytes:
    with file.open("rb") as stream:
        return stream.read(count)


@contextlib.contextmanager
def error_prefix(prefix: object) -> Iterator[None]:
    """Put a prefix, such as a file's path, in front of a UserError's message that lacks it or has
    its name alone."""
    try:
        yield
    except UserError as error:
        message = str(error).removeprefix(f"{prefix}: ").removeprefix(f"{Path(str(prefix)).name}: ")
        raise UserError(f"{prefix}: {message}") from None


def one_line(text: object) -> str:
    """An error's message, or its class if it has none, on one line of up to 500 characters. So is a
    name of a file's."""
    line = "".join(char if char.isprintable() else " " for char in str(text)[:1000])
    return " ".join(line.split())[:500] or type(text).__name__


def short_repr(value: object) -> str:
    """Its repr, of up to 160 characters."""
    text = repr(value)
    return text if len(text) <= 160 else f"{text[:159]}…"


def refused(key: str, value: object, reason: str) -> UserError:
    """The error of a key's value in a file."""
    return UserError(f"{one_line(key)} = {short_repr(value)} {reason}")
