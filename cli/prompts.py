"""--prompt, or the lines of a file -> rows of token ids.

LINE_KEYS       what a line may say, and the check of each value
read_prompts    --prompt, or the lines of --prompt_file -> Prompt
encode_all      Prompt -> Rows, which have token ids and every setting, one a sample
"""

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from cli.exits import print_status
from cli.options import TEMPLATE_KEYS, Options, PromptOptions, check_template_kwargs
from decoding.errors import UserError
from decoding.sampling import Sampling
from decoding.settings import (
    LARGEST_SEED,
    RANDOM_SEED,
    SETTINGS,
    is_random,
    new_tokens,
    random_seed,
)
from decoding.validation import check_lengths, reason_of, stop_strings
from loading.chat_messages import join_parts
from loading.plain_files import utf8_text
from loading.tokenizer import Tokenizer, conversation_ids

EXPECTED = (
    'expected a JSON object with a string "prompt", or with "messages", a list of {"role",'
    ' "content"}'
)


class Prompt(NamedTuple):
    """A text, or a conversation whose last message is `text`, with what its line says beside it."""

    text: str
    messages: list[dict] | None = None
    id: object = None  # of the line; its results repeat it
    location: str | None = None  # file and line
    settings: Mapping = {}  # the line's own values, in place of the flags'
    # The line's number, if it has no `id` or repeats an earlier one.
    line: int | None = None


class Row(NamedTuple):
    """One sample of a prompt, encoded, with every setting."""

    prompt: Prompt
    ids: list[int]
    sampling: Sampling
    max_new_tokens: int
    seed: int
    stop: list[str]
    sample: int = 0

    def labels(self) -> dict:
        """Keys that identify a result."""
        names = {"id": self.prompt.id, "line": self.prompt.line}
        labels = {key: value for key, value in names.items() if value is not None}
        return labels | {"seed": self.seed, "sample": self.sample}


# ----------------------------------------------------------------------------- what a line may say


class LineKey(NamedTuple):
    is_valid: Callable[[object], bool]
    expected: str  # ends the sentence '"KEY": VALUE must be …'


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < LARGEST_SEED


def is_text(value: object) -> bool:
    return isinstance(value, str)


def is_stop(value: object) -> bool:
    return is_text(value) or (isinstance(value, list) and all(map(is_text, value)))


def is_conversation(value: object) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(map(is_message, value))


def is_message(value: object) -> bool:
    return isinstance(value, dict) and is_text(value.get("role")) and is_text(message_text(value))


def message_text(message: dict) -> object:
    """A message's text, "" if it calls tools instead. ContentError for a part that is no text."""
    content = join_parts(message.get("content"))
    return "" if content is None and message.get("tool_calls") else content


LARGEST = f"{LARGEST_SEED - 1:,}"
LINE_KEYS = {
    "prompt": LineKey(lambda x: is_text(x) and x, "a text of at least one character"),
    "messages": LineKey(is_conversation, 'a list of {"role", "content"}, at least one'),
    "id": LineKey(lambda x: True, "any value"),
    "max_new_tokens": LineKey(lambda x: is_count(x) and x, f"a whole number from 1 to {LARGEST}"),
    "seed": LineKey(
        lambda x: is_count(x) or is_random(x),
        f"a whole number from 0 to {LARGEST}, or {RANDOM_SEED} for a random one",
    ),
    "stop": LineKey(is_stop, "a string or a list of them"),
    "parse_special": LineKey(lambda x: isinstance(x, bool), "true or false"),
    "chat_template_kwargs": LineKey(lambda x: isinstance(x, dict), "an object"),
    "tools": LineKey(lambda x: isinstance(x, list), "a list"),
    "prefill": LineKey(is_text, "a string"),
    **dict.fromkeys(SETTINGS, LineKey(is_number, "a number")),
}


def check_line(fields: dict) -> None:
    """UserError for a line's object with a key or a value that cannot be used. Null stands for an
    absent key."""
    for key, value in fields.items():
        if key not in LINE_KEYS:
            raise UserError(f"{key!r}: no such key; there are {', '.join(sorted(LINE_KEYS))}")
        is_valid, expected = LINE_KEYS[key]
        if value is not None and not is_valid(value):
            raise UserError(f'"{key}": {value!r:.99} must be {expected}')


def prompt_of(fields: dict, location: str) -> Prompt:
    """The Prompt of a line's object: a "prompt" or "messages", and keys that replace flags.
    UserError for anything else."""
    check_line(fields)
    settings = {key: value for key, value in fields.items() if value is not None}
    text = settings.pop("prompt", None)
    messages = settings.pop("messages", None)
    if (text is None) == (messages is None):
        raise UserError(EXPECTED)
    if messages is None and (unused := [key for key in TEMPLATE_KEYS if key in settings]):
        raise UserError(
            f'{", ".join(unused)}: only conversations have a template; give "messages" instead'
        )
    if messages and "parse_special" in settings:
        raise UserError('"parse_special" needs a "prompt": a template writes special tokens alone')
    check_template_kwargs(settings.get("chat_template_kwargs", {}))
    Sampling(**{name: settings[name] for name in SETTINGS if name in settings})  # checks them
    if is_random(settings.get("seed")):
        settings["seed"] = random_seed()
    id = settings.pop("id", None)
    return Prompt(
        message_text(messages[-1]) if messages else text, messages, id, location, settings
    )


# ------------------------------------------------------------------------------- lines of a file


def read_prompts(options: PromptOptions) -> tuple[list[Prompt], list[str]]:
    """(prompts, an error for each line without one) of --prompt, or of the lines of --prompt_file
    ('-' is stdin)."""
    if options.file is None:
        if not options.prompt:
            raise UserError("--prompt is empty: give it at least one character")
        return [Prompt(options.prompt, line=1)], []
    name = "stdin" if options.file == "-" else options.file
    try:
        data = sys.stdin.buffer.read() if options.file == "-" else Path(options.file).read_bytes()
    except OSError as error:
        raise UserError(f"{name}: {error}") from None
    return parse_lines(data.split(b"\n"), name)


def parse_lines(lines: Iterable[bytes], name: str) -> tuple[list[Prompt], list[str]]:
    """(prompts, an error for each line without one) of the lines that are not empty. They are JSONL
    if the first one begins with a brace, else plain text. UserError if no line has text."""
    prompts = []
    errors = []
    is_jsonl = None
    ids = set()
    for number, line in enumerate(lines, 1):
        location = f"{name}, line {number}"
        try:
            text = utf8_text(line).removesuffix("\r")
            if "\0" in text:
                raise UserError("it holds NUL characters, as UTF-16 has; save it as UTF-8")
            if not text.strip():
                continue
            if is_jsonl is None:
                is_jsonl = text.lstrip().startswith("{")
            fields = json_object(text) if is_jsonl else {"prompt": text}
            if "id" in fields:
                location += f", id {fields['id']!s:.99}"
            prompt = prompt_of(fields, location)
        except UserError as error:
            errors.append(f"{location}: {error}")
            continue
        id = json.dumps(prompt.id)
        needs_number = prompt.id is None or id in ids
        ids.add(id)
        prompts.append(prompt._replace(line=number if needs_number else None))
    if is_jsonl is None and not errors:
        raise UserError(f"{name}: holds no prompt; write one a line")
    return prompts, errors


def json_object(line: str) -> dict:
    """A line's object. UserError for anything else, and for NaN and Infinity, which JSON lacks:
    results repeat the line's id."""
    try:
        fields = json.loads(line, parse_constant=refuse_constant, parse_float=finite_number)
    except UserError:
        raise
    except (ValueError, RecursionError):  # the former also for a number of thousands of digits
        fields = None
    if not isinstance(fields, dict):
        raise UserError(EXPECTED)
    return fields


def refuse_constant(name: str) -> None:
    raise UserError(f"it holds {name}; JSON has no NaN or Infinity: write null or a number")


def finite_number(text: str) -> float:
    """A JSON number. UserError for one beyond float64, such as 1e400."""
    number = float(text)
    if not math.isfinite(number):
        refuse_constant(text)
    return number


# ----------------------------------------------------------------------------- rows of token ids


def template_kwargs(values: Mapping) -> dict:
    """tools, prefill and the template's variables: keyword arguments of conversation_ids."""
    names = values["chat_template_kwargs"]
    return {"tools": values["tools"], "prefill": values["prefill"], **names}


def encode_all(
    prompts: Sequence[Prompt], options: Options, tokenizer: Tokenizer, model, limit: int
) -> tuple[list[Row], list[str]]:
    """(rows with ids and every setting, an error for each line that cannot be decoded): all samples
    of the prompts, in a context of `limit` positions of `model`."""
    if tokenizer.template is None and any(prompt.messages for prompt in prompts):
        print_status(
            "this folder has no chat template: messages become plain text without their roles"
        )
    rows = []
    refused = []
    for prompt in prompts:
        try:
            row = encode(prompt, options, tokenizer, limit)
            check_lengths(model, [row.ids], [row.max_new_tokens], limit)
        except UserError as error:
            if prompt.location is None:
                raise
            refused.append(f"{prompt.location}: {reason_of(error)}")
            continue
        samples = range(options.prompts.num_samples)
        rows += [row._replace(seed=row.seed + n, sample=n) for n in samples]
    return rows, refused


def encode(prompt: Prompt, options: Options, tokenizer: Tokenizer, limit: int) -> Row:
    """The first row of a prompt. UserError for one that cannot be encoded."""
    values = {**vars(options.requests), **prompt.settings}
    if prompt.messages is not None:
        ids = conversation_ids(tokenizer, prompt.messages, **template_kwargs(values))
    elif unused := [f"--{key}" for key in TEMPLATE_KEYS if values[key]]:
        raise UserError(f'{", ".join(unused)}: only conversations have a template; give "messages"')
    else:
        ids = tokenizer.encode(prompt.text, parse_special=values["parse_special"])
    sampling = {name: values.get(name, x) for name, x in values["sampling"].items()}
    return Row(
        prompt if options.output.file else prompt._replace(line=None),
        ids,
        Sampling(**sampling),
        new_tokens(values["max_new_tokens"], ids, limit),
        values["seed"],
        stop_strings(values["stop"]),
    )
