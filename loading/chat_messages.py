"""Messages as clients send them -> messages as chat templates read them.

    message_forms    a conversation in the forms that a template may expect, the commonest first
    first_text       its text in the first form that the template takes
    Watched          a message that knows which of its keys a template has read
    join_parts       a message's content as one text; split_parts: as a list of parts;  keep_parts
                     as it is, if it can be read

No function here knows a tokenizer or jinja.
"""

import functools
import itertools
import json
from collections.abc import Callable, Iterable, Iterator

from decoding.errors import UserError
from loading.plain_files import short_repr


class ContentError(UserError):
    """The error of a message with a part that is not text."""


class LossError(UserError):
    """The error of a message that the template leaves out."""


def join_parts(content: object) -> object:
    """A message's content as one text, for templates. ContentError for a part that is not text."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case _:
                expected = '{"type": "text", "text": …} can be read'
                raise ContentError(f"content holds {short_repr(part)}; {expected}")
    return "".join(texts)


def keep_parts(content: object) -> object:
    """A message's content as it is. ContentError as of `join_parts`."""
    join_parts(content)
    return content


def split_parts(content: object) -> object:
    """A message's content as a list of parts. ContentError as of `join_parts`."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else keep_parts(content)


def parse_arguments(arguments: object) -> object:
    """A tool call's arguments as an object: nothing and "" are {}, and OpenAI's clients send JSON
    in a string. Any other string stays as it is."""
    if arguments in (None, ""):
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def write_arguments(arguments: object) -> str:
    """A tool call's arguments as JSON in a string: the client's own string where there is one."""
    if isinstance(arguments, str) and arguments:
        return arguments
    return json.dumps(parse_arguments(arguments), ensure_ascii=False)


def wrap_arguments(arguments: object) -> object:
    """A tool call's arguments as an object, in which text that is no JSON of one is a member: what
    a model wrote up to a limit of tokens."""
    value = parse_arguments(arguments)
    return value if isinstance(value, dict) else {"arguments": value}


def are_calls(calls: object) -> bool:
    return isinstance(calls, list) and all(isinstance(call, dict) for call in calls)


def map_calls(message: dict, change: Callable[[dict], dict]) -> dict:
    """The message with every function of its tool_calls changed. A call holds one, or is one
    itself."""
    calls = message.get("tool_calls")
    if not are_calls(calls):
        return message
    changed = []
    for call in calls:
        match call:
            case {"function": dict(function)}:
                changed.append(call | {"function": change(function)})
            case _:
                changed.append(change(call))
    return message | {"tool_calls": changed}


def message_forms(
    messages: list[dict], developer: str, content_form: Callable[[object], object]
) -> Iterator[list[dict]]:
    """The conversation in the forms that a template may expect, the commonest first; none comes
    twice, and without tool calls and kept parts there is one. `developer`: the role that developers
    have there. A template that keeps parts may loop over those of some roles, and read a text of
    others.

    DeepSeek's templates join a call's arguments as text, others write them by tojson or read their
    members. Beside calls some read a null content and refuse the missing one that transformers
    gives them, others join an empty one.
    """
    earlier = []
    content_forms = (keep_parts, join_parts) if content_form is keep_parts else (content_form,)
    for choice in itertools.product(
        content_forms,
        ({}, {"content": None}, {"content": ""}),
        (parse_arguments, write_arguments, wrap_arguments),
    ):
        write = functools.partial(write_message, developer, *choice)
        form = list(map(write, messages))
        if form not in earlier:
            earlier.append(form)
            yield form


def write_message(
    developer: str,
    content_form: Callable[[object], object],
    no_text: dict,
    arguments: Callable[[object], object],
    message: dict,
) -> dict:
    """A message without null keys in one form. `no_text` stands beside calls where no text does."""
    message = {key: value for key, value in message.items() if value is not None}
    if message.get("role") == "developer":
        message["role"] = developer
    if "content" in message:
        message["content"] = content_form(message["content"])
    if message.get("tool_calls") and not message.get("content"):
        message |= no_text

    def write_call(function: dict) -> dict:
        return function | {"arguments": arguments(function.get("arguments"))}

    return map_calls(message, write_call)


def first_text(render: Callable[[list[dict]], str], forms: Iterable[list[dict]]) -> str:
    """The text of the first form that the template takes. Without one, UserError: what it leaves
    out, or why it refuses the last form."""
    refusal = None
    for messages in forms:
        try:
            return render(messages)
        except UserError as error:
            if not isinstance(refusal, LossError):
                refusal = error
    raise refusal


# --------------------------------------------------------------------- what a template leaves out


class Watched(dict):
    """A message, or the function of a call, that knows which of its keys a template has read."""

    def __init__(self, values: dict):
        super().__init__(map_calls(values, Watched))
        self.keys_read = set()

    def __getitem__(self, key: str) -> object:
        self.keys_read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: object = None) -> object:
        self.keys_read.add(key)
        return super().get(key, default)

    def items(self) -> Iterable:  # as tojson writes it
        self.keys_read.update(self)
        return super().items()

    def __repr__(self) -> str:
        return repr(dict(self.items()))


def check_read(messages: Iterable[Watched], roles: Iterable[str]) -> None:
    """UserError for a message of which the template has not read the content, or a tool call.
    Thoughts need not be read: templates drop those of earlier turns by design. `roles`: those that
    the template mentions."""
    for number, message in enumerate(messages):
        values = dict(message)
        lost = None
        if not all(map(is_call_read, values.get("tool_calls") or [])):
            lost = "tool_calls"
        elif has_text(values.get("content")) and "content" not in message.keys_read:
            lost = f"content; the roles that it knows: {', '.join(roles)}"
        if lost is not None:
            raise LossError(
                f"messages[{number}], role {short_repr(values.get('role'))}: the chat template"
                f" leaves out its {lost}"
            )


def has_text(content: object) -> bool:
    return bool(content.strip() if isinstance(content, str) else content)


def is_shown(message: dict, text: str) -> bool:
    """Does its content stand in the text of a conversation, as far as it is a text? Templates may
    strip it."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return all(part.strip() in text for part in texts if isinstance(part, str))


def with_more(content: str | list) -> str | list:
    """The content with another text behind it."""
    if isinstance(content, list):
        return [*content, {"type": "text", "text": " more"}]
    return f"{content} more"


def is_call_read(call: object) -> bool:
    """Was anything of its function read? A call holds one, or is one itself."""
    function = dict(call).get("function", call) if isinstance(call, dict) else call
    return not isinstance(function, Watched) or bool(function.keys_read)
