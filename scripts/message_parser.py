"""An answer's text in pieces -> what a message gains: thoughts, content and tool calls.

The marks of scripts/tool_calls.py split the text. Text that may become a mark is held back only as
long as it may; if it becomes none, it is content, as the model wrote it. The message depends on the
text alone and not on its pieces.
"""

import math
import re
import uuid
from collections.abc import Mapping

from scripts.tool_calls import compile_marks

MARKS_ALONE = ("begin", "tail", "after")  # modes without text of their own
# A string, which may hold braces, or a brace.
JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"?|[{}]', re.DOTALL)
DEPTHS = {"{": 1, "}": -1}
CALL_ID_LENGTH = 9  # Mistral's templates refuse others


def object_end(text: str) -> int | None:
    """Where the JSON object ends that the text begins with; None: not in this text."""
    depth = 0
    for token in JSON_TOKEN.finditer(text):
        depth += DEPTHS.get(token[0], 0)
        if depth == 0:
            return token.end()
    return None


class MessageParser:
    """The parser of one answer. `marks`: patterns and the modes that follow them, by mode;
    is_thinking: the prompt has begun the thoughts; max_calls: further calls are dropped."""

    def __init__(
        self,
        marks: Mapping[str, Mapping[str, str]],
        is_thinking: bool = False,
        max_calls: float = math.inf,
    ):
        self.marks = marks
        self.mode = "reasoning_content" if is_thinking else "begin"
        self.max_calls = max_calls
        self.pending = ""
        self.strips = is_thinking  # white space after a mark is no part of the message
        self.arguments = ""  # of the last call
        self.num_calls = 0
        self.delta = {}

    def feed(self, text: str, is_last: bool = False) -> dict:
        """What the message gains, as OpenAI streams it: content, reasoning_content, tool_calls. The
        last text brings what was held back."""
        self.pending += text
        self.delta = {}
        while self.pending:
            if self.mode == "arguments":
                self.read_arguments()
            elif not self.read_mark(is_last):
                break
        return self.delta

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
        self.mode = match.lastgroup.rpartition("_")[0]
        if self.mode == "arguments":
            self.add_call(match[match.lastindex + 1])
        self.take(len(match[0]) - (self.mode == "arguments"))
        return True

    def add_text(self, text: str) -> None:
        if self.strips:
            text = text.lstrip()
        if text:
            self.strips = False
            self.delta[self.mode] = self.delta.get(self.mode, "") + text

    def add_call(self, name: str) -> None:
        self.arguments = ""
        self.num_calls += 1
        if self.num_calls <= self.max_calls:
            self.delta.setdefault("tool_calls", []).append(
                {
                    "index": self.num_calls - 1,
                    "id": uuid.uuid4().hex[:CALL_ID_LENGTH],
                    "type": "function",
                    "function": {"name": name, "arguments": ""},
                }
            )

    def read_arguments(self) -> None:
        """Read the last call's arguments, as far as they go."""
        end = object_end(self.arguments + self.pending) if "}" in self.pending else None
        text = self.take(len(self.pending) if end is None else end - len(self.arguments))
        self.arguments += text
        if end is not None:
            self.mode = "tail"
            self.strips = True
        if self.num_calls <= self.max_calls:
            calls = self.delta.setdefault("tool_calls", [])
            if not calls:
                calls.append({"index": self.num_calls - 1, "function": {"arguments": ""}})
            calls[-1]["function"]["arguments"] += text
