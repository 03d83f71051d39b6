"""An answer's text in pieces -> what a message gains: thoughts, content and tool calls.

The marks of tool_calls.py split the text. Text that may become a mark is held back only as
long as it may; if it becomes none, it is content, as the model wrote it. The message depends on the
text alone and not on its pieces.
"""

import json
import math
import re
import uuid
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from scripts.serve.tool_calls import compile_marks, parameter_types, value_json

MARKS_ALONE = ("begin", "tail", "after")  # modes without text of their own
JSON_TOKEN = re.compile(r'\\.?|["{}]', re.DOTALL)
DEPTHS = {"{": 1, "}": -1}
CALL_ID_LENGTH = 9  # Mistral's templates refuse others


class MessageParser:
    """The parser of one answer. `marks`: patterns and the modes that follow them, by mode; without
    them all text is content. is_thinking: the prompt has begun the thoughts; max_calls: further
    calls are dropped; is_forced: a grammar lets the answer be calls alone, so that what looks like
    content is a part of one that a limit cut off. `schemas`: of functions' arguments, by name."""

    def __init__(
        self,
        marks: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
        is_thinking: bool = False,
        max_calls: float = math.inf,
        is_forced: bool = False,
        schemas: Mapping[str, object] = MappingProxyType({}),
    ):
        self.marks = marks
        self.schemas = schemas
        self.is_forced = is_forced
        self.mode = "reasoning_content" if is_thinking else "begin"
        self.max_calls = max_calls
        self.pending = ""
        self.strips = is_thinking  # white space after a mark is no part of the message
        self.num_calls = 0
        self.num_thought_tokens = 0
        # Of the last call's arguments, so far:
        self.depth = 0  # braces that are open
        self.is_string = False  # does the text end inside a string?
        self.escape = ""  # the backslash that it ends with
        self.schema: object = None  # of all of them
        self.separator = ""  # what comes before the next parameter
        self.types: list = []  # of the last parameter
        self.value: list[str] = []  # its text, unless it must be a string
        self.deltas: list[dict] = []

    def feed(self, texts: Iterable[str], is_last: bool = False) -> list[dict]:
        """What the message gains from the texts of tokens, in their order: dicts of content, of
        reasoning_content or of tool_calls, as OpenAI streams them. The last text brings what was
        held back."""
        self.deltas = []
        for text in texts:
            self.num_thought_tokens += self.mode == "reasoning_content"
            self.pending += text
            self.read(False)
        if is_last:
            self.read(True)
        return self.deltas

    def read(self, is_last: bool) -> None:
        while self.pending:
            if self.mode == "arguments":
                self.read_arguments()
            elif not self.read_mark(is_last):
                return

    def take(self, length: int) -> str:
        text = self.pending[:length]
        self.pending = self.pending[length:]
        return text

    def read_mark(self, is_last: bool) -> bool:
        """Read the text up to the next mark, and the mark. False if more text must come first."""
        # Of a call's tail nothing is left, even if it was cut off.
        has_beginnings = not is_last or self.mode == "tail"
        marks = tuple(self.marks.get(self.mode, {}).items())
        match = compile_marks(marks, has_beginnings).search(self.pending)
        begin = len(self.pending) if match is None else match.start()
        if begin > 0 and self.mode in MARKS_ALONE:
            self.mode = "content"
            return True
        self.add_text(self.take(begin))
        if match is None or match.lastgroup is None:
            return False
        self.strips = True
        mode = match.lastgroup.rpartition("_")[0]
        groups = (*match.groups(), "")  # a mark without a name may be the last group
        is_head = self.set_mode(mode, groups[match.lastindex])
        self.take(len(match[0]) - is_head)
        return True

    def set_mode(self, mode: str, name: str) -> bool:
        """After a mark, which may have the name of a function or of a parameter. Is it the head of
        a call?"""
        is_head = mode in ("arguments", "parameters") and self.mode != "value"
        if is_head:
            self.add_call(name)
        elif mode == "value":
            self.begin_value(name)
        elif self.mode == "value":
            self.end_value()
        elif self.mode == "parameters":
            self.add_arguments("{}" if self.separator == "{" else "}")
        self.mode = mode
        return is_head

    def last_delta(self, key: str, empty: object) -> dict:
        """The last delta if it has this key, or else a new one."""
        if not self.deltas or key not in self.deltas[-1]:
            self.deltas.append({key: empty})
        return self.deltas[-1]

    def add_text(self, text: str) -> None:
        if self.mode == "value":
            self.add_value(text)
            return
        if self.mode == "parameters" or (self.is_forced and self.mode == "content"):
            return
        if self.strips:
            text = text.lstrip()
        if text:
            self.strips = False
            self.last_delta(self.mode, "")[self.mode] += text

    def add_call(self, name: str) -> None:
        self.schema = self.schemas.get(name)
        self.separator = "{"
        self.num_calls += 1
        call = {
            "index": self.num_calls - 1,
            "id": uuid.uuid4().hex[:CALL_ID_LENGTH],
            "type": "function",
            "function": {"name": name, "arguments": ""},
        }
        if self.num_calls <= self.max_calls:
            self.deltas.append({"tool_calls": [call]})

    def read_arguments(self) -> None:
        """Read the last call's arguments, as far as they go."""
        end = self.arguments_end()
        text = self.take(len(self.pending) if end is None else end)
        if end is not None:
            self.mode = "tail"
            self.strips = True
        self.add_arguments(text)

    def add_arguments(self, text: str) -> None:
        if text and self.num_calls <= self.max_calls:
            more = {"index": self.num_calls - 1, "function": {"arguments": ""}}
            (call,) = self.last_delta("tool_calls", [more])["tool_calls"]
            call["function"]["arguments"] += text

    def begin_value(self, key: str) -> None:
        self.types = parameter_types(self.schema, key)
        self.value = []
        quote = '"' if self.types == ["string"] else ""
        self.add_arguments(f"{self.separator}{json.dumps(key, ensure_ascii=False)}: {quote}")
        self.separator = ", "

    def add_value(self, text: str) -> None:
        """Add to the last parameter's value: at once if it must be a string, else when it is
        complete."""
        if self.types == ["string"]:
            self.add_arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self.value.append(text)

    def end_value(self) -> None:
        is_string = self.types == ["string"]
        self.add_arguments('"' if is_string else value_json("".join(self.value), self.types))

    def arguments_end(self) -> int | None:
        """Where in the pending text the arguments' object ends; None: later. Every character is
        read once, however long the arguments are."""
        text = self.escape + self.pending
        num_before = len(self.escape)
        self.escape = ""
        for token in JSON_TOKEN.finditer(text):
            if token[0] == '"':
                self.is_string = not self.is_string
            elif token[0] == "\\":
                self.escape = "\\"
            elif not self.is_string:
                self.depth += DEPTHS.get(token[0], 0)
                if self.depth == 0:
                    return token.end() - num_before
        return None
