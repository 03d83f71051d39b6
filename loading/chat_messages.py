"""Messages as clients send them -> messages as chat templates read them.

    message_forms    a conversation in every form that a template may expect, the commonest first
    render_complete  its text in the first form whose messages the template reads, all of them
    Marker           puts a number into every text, to see which of them a template leaves out
    join_parts       a message's content as one text

No function here knows a tokenizer or an instance of a template: `render` is a function of messages.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from loading.chat_templates import TemplateLimit

CONTENT = "content"
MARK_PREFIX = "71839265"  # no text holds it; digits survive upper, tojson and the other filters of templates
MARKS = re.compile(rf"{MARK_PREFIX}\d{{6}}")


class ContentError(ValueError):
    """The error of a message with a part that is not text."""


def join_parts(content: object) -> object:
    """A message's content as one text, for templates. ContentError for a part that is not text."""
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ContentError(f'content holds {part!r:.99}; {{"type": "text", "text": …}} can be read')
    return "".join(part["text"] for part in content)


def split_parts(content: object) -> object:
    """A message's text as a list of parts."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def unchanged(value: object) -> object:
    return value


def parse_arguments(arguments: object) -> object:
    """A tool call's arguments as an object: nothing and "" are {}, and OpenAI's clients send JSON in a string. Any
    other string stays as it is."""
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


def map_calls(message: dict, change: Callable[[dict], dict]) -> dict:
    """The message with every function of its tool_calls changed. A call holds one, or is one itself."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        return message
    changed = []
    for call in calls:
        function = call.get("function")
        if isinstance(function, dict):
            changed.append(call | {"function": change(function)})
        else:
            changed.append(change(call))
    return message | {"tool_calls": changed}


class MessageForm(NamedTuple):
    """How a template wants messages: functions of a content and of a call's arguments, the role of a developer, and the
    content of a message that has tool calls and no text. `absent`: its key is left out, as transformers does."""

    content: Callable[[object], object]
    arguments: Callable[[object], object]
    developer: str
    empty_content: str | None

    def write(self, message: dict) -> dict:
        written = {key: value for key, value in message.items() if value is not None}
        if written.get("role") == "developer":
            written["role"] = self.developer
        if "content" in written:
            written["content"] = self.content(written["content"])
        if written.get("tool_calls"):
            written = map_calls(written, self.with_arguments)
            if self.empty_content != "absent" and not written.get("content"):
                written["content"] = self.empty_content
        return written

    def with_arguments(self, function: dict) -> dict:
        return function | {"arguments": self.arguments(function.get("arguments"))}


def message_forms(messages: list[dict], reads_parts: bool, has_developer: bool) -> Iterator[list[dict]]:
    """The conversation in every form that a template may expect, the commonest first; none comes twice.

    DeepSeek's templates join a call's arguments as text, others write them by tojson; some read a null content beside
    tool calls and refuse a missing one. A template without the role developer gets it as system, as in llama.cpp.
    """
    contents = [unchanged, join_parts, split_parts] if reads_parts else [join_parts]
    developers = ["developer"] if has_developer else []
    developers.append("system")
    options = itertools.product(developers, contents, ("absent", None, ""), (parse_arguments, write_arguments))
    earlier = []
    for developer, content, empty_content, arguments in options:
        form = MessageForm(content, arguments, developer, empty_content)
        try:
            written = [form.write(message) for message in messages]
        except ContentError:  # an image, which some templates read as a part
            if not earlier:
                raise
            continue
        if written not in earlier:
            earlier.append(written)
            yield written


class Mark(NamedTuple):
    """A number in a text of message `index`; `part` says in which."""

    text: str
    index: int
    part: str


class Marker:
    """Puts a number of its own behind every text of a content, and in the name and the arguments of every tool call.
    Thoughts have none: templates drop those of earlier turns by design."""

    def __init__(self):
        self.marks: list[Mark] = []
        self.index = 0

    def new_mark(self, part: str) -> str:
        text = f"{MARK_PREFIX}{len(self.marks):06}"
        self.marks.append(Mark(text, self.index, part))
        return text

    def mark_message(self, index: int, message: dict) -> dict:
        self.index = index
        marked = map_calls(message, self.mark_call)
        content = message.get("content")
        if isinstance(content, str):
            marked = marked | {"content": self.mark_text(content)}
        elif isinstance(content, list):
            marked = marked | {"content": [self.mark_part(part) for part in content]}
        return marked

    def mark_text(self, text: str) -> str:
        return text + self.new_mark(CONTENT) if text.strip() else text

    def mark_part(self, part: object) -> object:
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            return part | {"text": self.mark_text(part["text"])}
        return part

    def mark_call(self, function: dict) -> dict:
        mark = self.new_mark("tool_calls")
        name = function.get("name")
        named = function | {"name": name + mark} if isinstance(name, str) else function
        return named | {"arguments": marked_arguments(function.get("arguments"), mark)}


def marked_arguments(arguments: object, mark: str) -> object:
    """The arguments with one more, in the same form."""
    fields = parse_arguments(arguments)
    if not isinstance(fields, dict):
        return f"{arguments}{mark}"
    fields = fields | {mark: mark}
    return json.dumps(fields, ensure_ascii=False) if isinstance(arguments, str) else fields


def render_complete(render: Callable[[list[dict]], str], forms: Iterable[list[dict]], roles: Sequence[str] = ()) -> str:
    """The text of the first form that the template renders and of which it leaves nothing out. Without one, the
    ValueError of the form that gets furthest. `roles`: those that the template mentions, for the message."""
    furthest_error = None
    furthest_index = -1
    for messages in forms:
        index = -1
        try:
            text = render(messages)
            mark = first_lost(render, messages)
            if mark is None:
                return text
            index = mark.index
            error = ValueError(describe_loss(mark, messages[index], roles))
        except TemplateLimit:
            raise
        except ValueError as refusal:
            error = refusal
        if furthest_error is None or index > furthest_index:
            furthest_error = error
            furthest_index = index
    raise furthest_error


def first_lost(render: Callable[[list[dict]], str], messages: list[dict]) -> Mark | None:
    """The first part of the conversation that the template leaves out; None too for a template that refuses the marks.
    Content that it leaves out of earlier answers, but not of a last one, is a thought by its design: gpt-oss's template
    does so with the content beside tool calls."""
    marker = Marker()
    marked_messages = [marker.mark_message(index, message) for index, message in enumerate(messages)]
    if not marker.marks:
        return None
    text = render_or_none(render, marked_messages)
    if text is None:
        return None
    present = set(MARKS.findall(text))
    are_thoughts: dict[bool, bool] = {}  # by whether the answers have tool calls
    for mark in marker.marks:
        if mark.text in present:
            continue
        message = messages[mark.index]
        is_last = mark.index == len(messages) - 1
        if mark.part != CONTENT or message.get("role") != "assistant" or is_last:
            return mark
        has_calls = bool(message.get("tool_calls"))
        if has_calls not in are_thoughts:
            text = render_or_none(render, marked_messages[: mark.index + 1])
            are_thoughts[has_calls] = text is not None and mark.text in text
        if not are_thoughts[has_calls]:
            return mark
    return None


def render_or_none(render: Callable[[list[dict]], str], messages: list[dict]) -> str | None:
    """The text; None if the template refuses the messages."""
    try:
        return render(messages)
    except TemplateLimit:
        raise
    except ValueError:
        return None


def describe_loss(mark: Mark, message: dict, roles: Sequence[str]) -> str:
    """What the template leaves out, and why as far as one can tell."""
    role = message.get("role")
    text = f"messages[{mark.index}], role {role!r:.99}: the chat template leaves out its {mark.part}"
    if mark.part != CONTENT:
        return text
    if message.get("tool_calls"):
        return f"{text}, because it has tool_calls beside it"
    if "user" in roles and role not in roles:
        return f"{text}; the roles that it knows: {', '.join(roles)}"
    return f"{text} at this place of the conversation"
