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

from decoding.errors import UserError

CONTENT = "content"
# No text holds it, and digits survive upper, tojson and the other filters of templates.
MARK_PREFIX = "71839265"
MARK = re.compile(rf"(?=({MARK_PREFIX}\d{{6}}))")  # also one that begins inside of other digits


class ContentError(UserError):
    """The error of a message with a part that is not text."""


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
                raise ContentError(f"content holds {part!r:.99}; {expected}")
    return "".join(texts)


def split_parts(content: object) -> object:
    """A message's text as a list of parts."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def unchanged(value: object) -> object:
    return value


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


def map_calls(message: dict, change: Callable[[dict], dict]) -> dict:
    """The message with every function of its tool_calls changed. A call holds one, or is one
    itself."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        return message
    changed = []
    for call in calls:
        has_function = isinstance(call.get("function"), dict)
        changed.append(
            call | {"function": change(call["function"])} if has_function else change(call)
        )
    return message | {"tool_calls": changed}


class MessageForm(NamedTuple):
    """How a template wants messages."""

    developer: str  # the role of a developer
    content: Callable[[object], object]  # content -> content
    # The content of a message that has tool calls and no text. "absent": its key is left out, as
    # transformers does.
    empty_content: str | None
    arguments: Callable[[object], object]  # of a call -> of a call

    def write(self, message: dict) -> dict:
        written = {key: value for key, value in message.items() if value is not None}
        if written.get("role") == "developer":
            written["role"] = self.developer
        if "content" in written:
            written["content"] = self.content(written["content"])
        has_calls = bool(written.get("tool_calls"))
        if has_calls and not written.get("content") and self.empty_content != "absent":
            written["content"] = self.empty_content
        return map_calls(written, self.write_call)

    def write_call(self, function: dict) -> dict:
        return function | {"arguments": self.arguments(function.get("arguments"))}


def message_forms(
    messages: list[dict], reads_parts: bool, has_developer: bool
) -> Iterator[list[dict]]:
    """The conversation in every form that a template may expect, the commonest first; none comes
    twice.

    DeepSeek's templates join a call's arguments as text, others write them by tojson or read their
    members; some read a null content beside tool calls and refuse a missing one. A template without
    the role developer gets it as system, as in llama.cpp.
    """
    contents = [unchanged, split_parts] if reads_parts else [join_parts]
    developers = ["developer", "system"] if has_developer else ["system"]
    earlier = []
    for options in itertools.product(
        developers,
        contents,
        ("absent", None, ""),
        (parse_arguments, write_arguments, wrap_arguments),
    ):
        written = [MessageForm(*options).write(message) for message in messages]
        if written not in earlier:
            earlier.append(written)
            yield written


# --------------------------------------------------------------------- what a template leaves out


class Mark(NamedTuple):
    """A number in a text of message `index`; `part` says in which."""

    text: str
    index: int
    part: str


class Marker:
    """Puts a number of its own after every text of a content, and after the name of every tool
    call. Thoughts have none: templates drop those of earlier turns by design."""

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
        if "content" in message:
            marked = marked | {"content": self.mark_content(message["content"])}
        return marked

    def mark_content(self, content: object) -> object:
        match content:
            case list():
                return [self.mark_content(part) for part in content]
            case {"text": text}:
                return content | {"text": self.mark_content(text)}
            case str() if content.strip():
                return content + self.new_mark(CONTENT)
        return content

    def mark_call(self, function: dict) -> dict:
        return function | {"name": f"{function.get('name', '')}{self.new_mark('tool_calls')}"}


def render_complete(
    render: Callable[[list[dict]], str], forms: Iterable[list[dict]], roles: Sequence[str] = ()
) -> str:
    """The text of the first form that the template renders and of which it leaves nothing out.
    Without one, UserError: what it leaves out of the last form that it renders, or why it refuses
    the last form of all. `roles`: those that the template mentions, for the message."""
    loss = None
    for messages in forms:
        try:
            text = render(messages)
        except UserError as error:
            refusal = error
            continue
        loss = find_loss(render, messages, roles)
        if loss is None:
            return text
    raise refusal if loss is None else UserError(loss)


def find_loss(
    render: Callable[[list[dict]], str], messages: list[dict], roles: Sequence[str]
) -> str | None:
    """The first part of the conversation that the template leaves out, described; None for a
    template that refuses the marks. If it drops content from an earlier answer and keeps it in a
    last one, the content is taken for a thought: gpt-oss's template does so with the content beside
    tool calls."""

    def render_or_none(messages: list[dict]) -> str | None:
        try:
            return render(messages)
        except UserError:
            return None

    marker = Marker()
    marked = [marker.mark_message(index, message) for index, message in enumerate(messages)]
    text = render_or_none(marked)
    if text is None:
        return None
    written = set(MARK.findall(text))  # one look at the text, however many marks there are
    are_thoughts: dict[bool, bool] = {}  # by whether the answers have tool calls
    for mark in marker.marks:
        if mark.text in written:
            continue
        message = messages[mark.index]
        has_calls = bool(message.get("tool_calls"))
        if has_calls not in are_thoughts:
            last_text = render_or_none(marked[: mark.index + 1]) or ""
            are_thoughts[has_calls] = mark.text in last_text
        is_answer = mark.part == CONTENT and message.get("role") == "assistant"
        if not is_answer or not are_thoughts[has_calls]:
            return describe_loss(mark, message, roles)
    return None


def describe_loss(mark: Mark, message: dict, roles: Sequence[str]) -> str:
    """What the template leaves out, and why as far as one can tell."""
    role = message.get("role")
    text = (
        f"messages[{mark.index}], role {role!r:.99}: the chat template leaves out its {mark.part}"
    )
    if mark.part != CONTENT:
        return text
    if message.get("tool_calls"):
        return f"{text}, because it has tool_calls beside it"
    if "user" in roles and role not in roles:
        return f"{text}; the roles that it knows: {', '.join(roles)}"
    return f"{text} at this place of the conversation"
