"""--prompt, or lines with prompts or conversations from a file or an open pipe -> requests with token ids.

This file knows text and tokenizers, and nothing of models.
"""

import argparse
import codecs
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from cli.flags import check_template_kwargs, sampling_settings
from decoding.sampling import Sampling
from decoding.settings import DEFAULT_NEW_TOKENS, LARGEST_SEED, RANDOM_SEED, SETTINGS, is_random, random_seed
from loading.chat_messages import ContentError, join_parts
from loading.tokenizer import Tokenizer

TEMPLATE_KEYS = ("chat_template_kwargs", "tools", "prefill")  # of a line with a conversation; they replace flags
KEYS = {"prompt", "messages", "id", "max_new_tokens", "seed", "stop", "parse_special", *SETTINGS, *TEMPLATE_KEYS}
EXPECTED = 'expected a JSON object with a string "prompt", or with "messages", a list of {"role", "content"}'


class Request(NamedTuple):
    """A text, or a conversation whose last message is `text`."""

    text: str
    messages: list[dict] | None = None
    id: object = None  # of the line; its results repeat it
    location: str | None = None  # file and line
    max_new_tokens: int | None = None  # None: as the flags say
    seed: int | None = None
    has_random_seed: bool = False  # did RANDOM_SEED ask for it?
    sample: int = 0
    ids: list[int] | None = None  # of the prompt, once it is encoded
    sampling: Sampling | None = None  # once it is encoded
    stop: list[str] | None = None  # None: as the flags say
    settings: dict | None = None  # of the line's own, of sampling and of the template; they replace flags
    line: int | None = None  # its number in the file, for a line without an `id` or with one that an earlier line has

    def labels(self) -> dict:
        """Keys that identify a result."""
        line = {} if self.line is None else {"line": self.line}
        return ({} if self.id is None else {"id": self.id}) | line | {"seed": self.seed, "sample": self.sample}


def row_key(labels: dict) -> str:
    """(id, sample), or (number of the line, sample), of a request's labels or of its result."""
    return json.dumps([labels.get("line"), None if "line" in labels else labels.get("id"), labels.get("sample")])


def requests(args: argparse.Namespace) -> tuple[list[Request], list[str]]:
    """(requests, an error for each line without one) of --prompt, or of the lines of --prompt_file ('-' is stdin). The
    lines are JSONL if the first one begins with a brace, else plain text. Empty lines are skipped."""
    if args.prompt_file is None:
        if not args.prompt:
            raise ValueError("--prompt is empty: give it at least one character")
        return [Request(args.prompt, line=1)], []
    name = "stdin" if args.prompt_file == "-" else args.prompt_file
    try:
        data = sys.stdin.buffer.read() if args.prompt_file == "-" else Path(args.prompt_file).read_bytes()
    except OSError as error:
        raise ValueError(f"{name}: {error}") from None
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError(f"{name}: UTF-16 text; convert it to UTF-8")
    items = list(parsed_lines(data.split(b"\n"), name))
    return [item for item in items if isinstance(item, Request)], [item for item in items if isinstance(item, str)]


def parsed_lines(lines: Iterable[str | bytes | None], name: str) -> Iterator:
    """For each line that is not empty its Request, or its error as a string. A None (no line yet) is passed on.
    ValueError if no line has text."""
    number, jsonl, ids = 0, None, set()
    for line in lines:
        if line is None:
            yield None
            continue
        number += 1
        location = f"{name}, line {number}"
        try:
            line = line.decode() if isinstance(line, bytes) else line
            line = line.removesuffix("\r").removeprefix("\ufeff" if number == 1 else "")  # a byte order mark
            if not line.strip():
                continue
            jsonl = line.lstrip().startswith("{") if jsonl is None else jsonl
            request = jsonl_request(line, location) if jsonl else Request(line, location=location)
        except ValueError as error:
            yield f"{with_id(location, id_of(line)) if jsonl else location}: {error}"
            continue
        id = None if request.id is None else json.dumps(request.id)
        yield request._replace(line=number if id is None or id in ids else None)
        ids.add(id)
    if jsonl is None:
        raise ValueError(f"{name}: holds no prompt")


def id_of(line: str | bytes) -> object:
    """The id of a JSONL line that may be broken; None without one."""
    try:
        return json.loads(line).get("id")
    except (ValueError, RecursionError, AttributeError):
        return None


def with_id(location: str, id: object) -> str:
    return location if id is None else f"{location}, id {id!s:.99}"


def jsonl_request(line: str, location: str) -> Request:
    """{"prompt": TEXT} or {"messages": [{"role":, "content":}, …]}. Optional are "id", and keys that replace flags:
    "max_new_tokens", "seed", "stop", settings of sampling, "parse_special" for a prompt, and for the template
    "chat_template_kwargs", "tools" and "prefill". ValueError for anything else."""
    try:
        fields = json.loads(line)
        messages = fields.get("messages")
        contents = [content_of(message) for message in messages or ()]
        text = fields["prompt"] if messages is None else contents[-1]
        parts = [text, *contents, *(message["role"] for message in messages or ())]
        has_both = "prompt" in fields and "messages" in fields
        valid = not has_both and all(isinstance(part, str) for part in parts)
    except ContentError:
        raise
    except (ValueError, RecursionError, AttributeError, TypeError, LookupError):
        valid = False
    if not valid:
        raise ValueError(EXPECTED)
    check_finite(fields)
    if not text and messages is None:
        raise ValueError('"prompt" is empty: give it at least one character')
    new = whole_number(fields, "max_new_tokens")
    seed = RANDOM_SEED if is_random(fields.get("seed")) else whole_number(fields, "seed")
    if unknown := sorted(fields.keys() - KEYS):
        raise ValueError(f"{', '.join(map(repr, unknown))}: no such key; there are {', '.join(sorted(KEYS))}")
    settings = {key: fields[key] for key in SETTINGS if fields.get(key) is not None}
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in settings.values()):
        raise ValueError(f"{settings}: settings of sampling are numbers")
    Sampling(**settings)  # ValueError for a number out of range
    stop = [fields["stop"]] if isinstance(fields.get("stop"), str) else fields.get("stop")
    is_list = isinstance(stop, list) and all(isinstance(text, str) for text in stop)
    if stop is not None and not is_list:
        raise ValueError(f'"stop": {stop!r:.99} must be a string or a list of them')
    settings |= template_settings(fields) | prompt_settings(fields)
    id = fields.get("id")
    return Request(text, messages, id, with_id(location, id), new, seed, stop=stop, settings=settings)


def whole_number(fields: dict, key: str) -> int | None:
    """The number of a line's key; None without one. ValueError for anything but a whole number in
    range."""
    number = fields.get(key)
    if number is not None and not (type(number) is int and 0 <= number < LARGEST_SEED):
        numbers = f"a whole number from 0 to {LARGEST_SEED - 1:,}"
        others = f", or {RANDOM_SEED} for a random one" if key == "seed" else ""
        raise ValueError(f'"{key}": {number!r:.99} must be {numbers}{others}')
    return number


def content_of(message: dict) -> object:
    """A message's text, "" if it calls tools instead. ContentError, LookupError or TypeError for anything else."""
    if message.get("tool_calls") and message.get("content") is None:
        return ""
    return join_parts(message["content"])


def check_finite(line: dict) -> None:
    """ValueError for NaN and infinite numbers, which JSON lacks: results repeat the line's id."""
    try:
        json.dumps(line, allow_nan=False)
    except ValueError:
        raise ValueError("it holds NaN or Infinity, or a number as large, which JSON cannot hold") from None


def template_settings(fields: dict) -> dict:
    """The TEMPLATE_KEYS of a line. ValueError for a wrong type, and for a line without a conversation."""
    if "messages" not in fields and (unused := [key for key in TEMPLATE_KEYS if key in fields]):
        raise ValueError(f"{', '.join(unused)}: only conversations have a template")
    types = {"chat_template_kwargs": (dict, "objects"), "tools": (list, "lists"), "prefill": (str, "strings")}
    for key, (type, type_name) in types.items():
        if fields.get(key) is not None and not isinstance(fields[key], type):
            raise ValueError(f'"{key}": {fields[key]!r:.99} must be of JSON\'s {type_name}')
    check_template_kwargs(fields.get("chat_template_kwargs") or {})
    return {key: fields[key] for key in TEMPLATE_KEYS if fields.get(key) is not None}


def prompt_settings(fields: dict) -> dict:
    """The "parse_special" of a line. ValueError for a wrong type, and for a conversation."""
    value = fields.get("parse_special")
    if value is None:
        return {}
    if not isinstance(value, bool):
        raise ValueError(f'"parse_special": {value!r:.99} must be true or false')
    if "messages" in fields:
        raise ValueError('"parse_special" needs a "prompt": in a conversation the template alone writes special tokens')
    return {"parse_special": value}


def template_kwargs(args: argparse.Namespace) -> dict:
    """tools, prefill and the template's variables: keyword arguments of Tokenizer.chat."""
    return {"tools": args.tools, "prefill": args.prefill or "", **(args.chat_template_kwargs or {})}


def conversation_ids(
    tokenizer: Tokenizer, messages: list[dict], tools: list | None = None, prefill: str = "", **names
) -> list[int]:
    """Ids of the messages in the model's chat format, or without one as texts, a line each, the prefill last.
    ValueError for what the template does not read, and without one for variables, tools and calls of them."""
    if tokenizer.template is not None:
        return tokenizer.chat(messages, tools=tools, prefill=prefill, **names)
    has_calls = any(message.get("tool_calls") for message in messages)
    unread = {"tools": tools, "tool_calls": has_calls, **dict.fromkeys(names, True)}
    if any(unread.values()):
        keys = ", ".join(key for key, value in unread.items() if value)
        raise ValueError(f"this model has no chat template for {keys}")
    return tokenizer.encode(
        "\n".join([*(join_parts(message["content"]) for message in messages), *[prefill] * bool(prefill)])
    )


def new_tokens(requested: int | None, prompt: list[int], limit: int) -> int:
    """--max_new_tokens unchecked, by default as many as fit, up to DEFAULT_NEW_TOKENS."""
    return requested if requested is not None else max(1, min(DEFAULT_NEW_TOKENS, limit - len(prompt)))


def sampling_of(args: argparse.Namespace) -> Sampling:
    return Sampling(**sampling_settings(args))


def encoded(
    requested: list[Request], args: argparse.Namespace, tokenizer: Tokenizer, limit: int, check: Callable,
    warns: bool = True,
) -> tuple[list[Request], list[str]]:  # fmt: skip
    """(all samples of the requests, with every field set; an error for each line that cannot be decoded).
    check([ids], [max_new_tokens]) raises ValueError for a prompt that does not fit. `warns`: of roles that are lost."""
    rows, refused = [], []
    if warns and tokenizer.template is None and any(request.messages for request in requested):
        print("this folder has no chat template: messages become plain text without their roles", file=sys.stderr)
    for request in requested:
        new = args.max_new_tokens if request.max_new_tokens is None else request.max_new_tokens
        seed = args.seed if request.seed is None else request.seed
        has_random_seed = args.has_random_seed if request.seed is None else is_random(seed)
        seed = random_seed() if is_random(seed) else seed
        try:
            unused = [f"--{key}" for key in TEMPLATE_KEYS if request.messages is None and getattr(args, key)]
            if unused:
                raise ValueError(f"{', '.join(unused)}: only conversations have a template")
            settings = argparse.Namespace(**vars(args) | (request.settings or {}))
            if request.messages is None:
                ids = tokenizer.encode(request.text, parse_special=settings.parse_special)
            else:
                ids = conversation_ids(tokenizer, request.messages, **template_kwargs(settings))
            row = request._replace(ids=ids, max_new_tokens=new_tokens(new, ids, limit))
            row = row._replace(sampling=sampling_of(settings), stop=args.stop if row.stop is None else row.stop)
            check([ids], [row.max_new_tokens])
            row = row._replace(line=row.line if args.output else None)
            row = row._replace(has_random_seed=has_random_seed)
            rows += [row._replace(seed=seed + n, sample=n) for n in range(args.num_samples)]
            if is_random(request.seed) and not args.json:  # results in JSON have it
                print(f"{request.location}: seed {seed}", file=sys.stderr)
        except ValueError as error:
            if request.location is None:
                raise
            refused.append(f"{request.location}: {str(error).removeprefix('prompt 0 ')}")
    return rows, refused
