"""What is asked: --prompt, a file of prompts or of conversations -> requests with token ids.

This file knows text and tokenizers, and nothing of models.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tokenizer import Tokenizer

DEFAULT_NEW_TOKENS = 200
LARGEST_SEED = 2**62
WANTED = (
    'expected a JSON object with a string "prompt", or with "messages", a list of {"role", "content"};'
    ' "max_new_tokens" and "seed" are whole numbers'
)


class Request(NamedTuple):
    """A text, or a conversation whose last message is `text`. Results carry the `id`."""

    text: str
    messages: list[dict[str, str]] | None = None
    id: object = None
    place: str | None = None  # the line of a file that it stands in
    max_new_tokens: int | None = None  # None: as the flags say
    seed: int | None = None
    sample: int = 0
    ids: list[int] | None = None  # of the prompt, once it is encoded

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        return tokenizer.encode(self.text) if self.messages is None else conversation_ids(tokenizer, self.messages)

    def labels(self) -> dict:
        """What tells results apart."""
        return ({} if self.id is None else {"id": self.id}) | {"seed": self.seed, "sample": self.sample}


def requests(args: argparse.Namespace) -> tuple[list[Request], list[str]]:
    """(requests, an error for each line that holds none) of --prompt, or of the lines of --prompt_file ('-' is stdin):
    plain text, or JSONL where the first line begins an object. Empty lines are skipped."""
    if args.prompt_file is None:
        if not args.prompt:
            raise ValueError("--prompt is empty: give it at least one character")
        return [Request(args.prompt)], []
    name = "stdin" if args.prompt_file == "-" else args.prompt_file
    try:
        text = sys.stdin.read() if args.prompt_file == "-" else Path(args.prompt_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{name}: {error}") from None
    lines = re.split("\r?\n", text.removeprefix("\ufeff"))  # a byte order mark
    places = [(f"{name}, line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not places:
        raise ValueError(f"{name}: holds no prompt")
    jsonl, asked, broken = places[0][1].lstrip().startswith("{"), [], []
    for place, line in places:
        try:
            asked.append(jsonl_request(line, place, args) if jsonl else Request(line, place=place))
        except ValueError as error:
            broken.append(f"{place}: {error}")
    return asked, broken


def jsonl_request(line: str, place: str, args: argparse.Namespace) -> Request:
    """{"prompt": TEXT} or {"messages": [{"role":, "content":}, …]}, with or without "id", "max_new_tokens" and "seed".
    ValueError for anything else, and for what holds for all lines and differs here."""
    try:
        found = json.loads(line)
        messages, id, new, seed = (found.get(key) for key in ("messages", "id", "max_new_tokens", "seed"))
        text = found["prompt"] if messages is None else messages[-1]["content"]
        parts = [text, *(message[key] for message in messages or () for key in ("role", "content"))]
        numbers = all(n is None or (type(n) is int and 0 <= n < LARGEST_SEED) for n in (new, seed))
        both = "prompt" in found and "messages" in found
        valid = numbers and not both and all(isinstance(part, str) for part in parts) and (text or messages)
    except (ValueError, RecursionError, AttributeError, TypeError, LookupError):
        valid = False
    if not valid:
        raise ValueError(WANTED)
    for key in ("temperature", "stop"):
        if found.get(key) not in (None, getattr(args, key, None)):
            raise ValueError(f'"{key}" cannot be a line\'s own: give --{key}, for all lines')
    return Request(text, messages, id, place if id is None else f"{place}, id {id!s:.99}", new, seed)


def conversation_ids(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> list[int]:
    """In the folder's chat format; without one, the messages' texts, a line each."""
    if tokenizer.template is not None:
        return tokenizer.chat(messages)
    return tokenizer.encode("\n".join(message["content"] for message in messages))


def new_tokens(asked: int | None, prompt: list[int], limit: int) -> int:
    """--max_new_tokens as it stands (whether it fits is checked later), or as many as fit up to DEFAULT_NEW_TOKENS."""
    return asked if asked is not None else max(1, min(DEFAULT_NEW_TOKENS, limit - len(prompt)))


def encoded(
    asked: list[Request], args: argparse.Namespace, tokenizer: Tokenizer, limit: int, check: Callable
) -> tuple[list[Request], list[str]]:
    """(all samples of the requests with nothing left open, an error for each line that cannot be decoded).
    check([ids], [new]) raises ValueError for what does not fit."""
    rows, refused = [], []
    for request in asked:
        new = args.max_new_tokens if request.max_new_tokens is None else request.max_new_tokens
        seed = args.seed if request.seed is None else request.seed
        try:
            ids = request.encode(tokenizer)
            whole = request._replace(ids=ids, max_new_tokens=new_tokens(new, ids, limit))
            check([ids], [whole.max_new_tokens])
            rows += [whole._replace(seed=seed + n, sample=n) for n in range(args.num_samples)]
        except ValueError as error:
            if request.place is None:
                raise
            refused.append(f"{request.place}: {str(error).removeprefix('prompt 0 ')}")
    return rows, refused
