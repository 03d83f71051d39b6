"""What is asked: --prompt, a file of prompts or of conversations -> requests and their token ids.

This file knows text and tokenizers, and nothing of models.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import NamedTuple

from tokenizer import Tokenizer

DEFAULT_NEW_TOKENS = 200


class Request(NamedTuple):
    """A text, or a conversation whose last message is `text`. Results carry the `id`."""

    text: str
    messages: list[dict[str, str]] | None = None
    id: object = None

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        return tokenizer.encode(self.text) if self.messages is None else conversation_ids(tokenizer, self.messages)


def requests(args: argparse.Namespace) -> tuple[list[Request], list[str]]:
    """(requests, an error for each line that holds none) of --prompt, or of the lines of --prompt_file ('-' is stdin):
    plain text, or JSONL where the first line begins an object. Empty lines are skipped."""
    if args.prompt_file is None:
        if not args.prompt:
            raise ValueError("--prompt is empty: give it at least one character")
        return [Request(args.prompt)], []
    name = "stdin" if args.prompt_file == "-" else args.prompt_file
    try:
        text = sys.stdin.read() if args.prompt_file == "-" else Path(args.prompt_file).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{name}: {error}") from None
    lines = [(number, line) for number, line in enumerate(re.split("\r?\n", text), 1) if line.strip()]
    if not lines:
        raise ValueError(f"{name}: holds no prompt")
    jsonl = lines[0][1].lstrip().startswith("{")
    found = [(number, jsonl_request(line) if jsonl else Request(line)) for number, line in lines]
    wanted = 'expected a JSON object with a string "prompt", or with "messages", a list of {"role", "content"}'
    broken = [f"{name}, line {number}: {wanted}" for number, request in found if request is None]
    return [request for _, request in found if request is not None], broken


def jsonl_request(line: str) -> Request | None:
    """{"prompt": TEXT} or {"messages": [{"role":, "content":}, …]}, with or without "id"; None for anything else."""
    try:
        found = json.loads(line)
        messages = found.get("messages")
        text = found["prompt"] if messages is None else messages[-1]["content"]
        parts = [text, *(message[key] for message in messages or () for key in ("role", "content"))]
    except (ValueError, RecursionError, AttributeError, TypeError, LookupError):
        return None
    both = "prompt" in found and "messages" in found
    if both or not all(isinstance(part, str) for part in parts) or not (text or messages):
        return None
    return Request(text, messages, found.get("id"))


def conversation_ids(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> list[int]:
    """In the folder's chat format; without one, the messages' texts, a line each."""
    if tokenizer.template is not None:
        return tokenizer.chat(messages)
    return tokenizer.encode("\n".join(message["content"] for message in messages))


def new_tokens(asked: int | None, prompt: list[int], limit: int) -> int:
    """--max_new_tokens as it stands (whether it fits is checked later), or as many as fit up to DEFAULT_NEW_TOKENS."""
    return asked if asked is not None else max(1, min(DEFAULT_NEW_TOKENS, limit - len(prompt)))
