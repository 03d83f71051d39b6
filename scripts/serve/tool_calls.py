"""How models write tool calls and thoughts: a record for each family, which is chosen by the text
of its chat template.

    CallFormat      a family's calls: `marks` to read them, `head`, `tail` and others to force them
    Thoughts        the texts around a family's thoughts
    compile_marks   marks -> a regular expression, for message_parser.py
    calls_rule, answer_grammar
                    functions -> the grammar of an answer, for decoding/grammar.py

Sources: the chat templates of Qwen 2.5 and 3, Hermes 2 Pro, Llama 3.1, Mistral Nemo, Devstral and
gpt-oss, and vLLM's tool and reasoning parsers.
"""

import functools
import json
import re
from collections.abc import Mapping
from typing import NamedTuple

from decoding.grammar import OPTIONS

NAME = r"[\w.:/-]{1,128}"  # a longer one is text, which nobody holds back
# More white space than a space of a pattern stands for is text.
ATOMS = {"NAME": f"({NAME})", "WORD": NAME, " ": r"\s{0,9}"}


class CallFormat(NamedTuple):
    """A family's calls.

    `marks` are the texts that are no part of a message, by mode. A mode says what the text before a
    mark is: a key of the message; "arguments" of a call; "begin" of a message, "tail" of a call or
    the place "after" one, where nothing but a mark can stand. Each pattern has the mode that
    follows it. In it a space stands for optional white space, NAME for a function's name, WORD for
    any word, and the brace at its end belongs to the arguments.

    A forced answer is `begin`; head, arguments and tail of every call, with separators between
    them; `end`.
    """

    family: str
    key: str  # a regular expression, which the chat template matches
    marks: dict[str, dict[str, str]]
    head: str
    tail: str = ""
    begin: str = ""
    separator: str | None = None  # None: an answer has one call
    end: str = ""


CALL_FORMATS = (
    CallFormat(
        "Hermes and Qwen",
        r"<tool_call>(\\n|[\s\"'{}-])*\{\\?\"name",
        {
            "content": {' <tool_call> { "name" : "NAME" , "arguments" : {': "arguments"},
            "tail": {" } </tool_call>": "content"},
        },
        head='<tool_call>\n{"name": "NAME", "arguments": ',
        tail="}\n</tool_call>",
        separator="\n",
    ),
    CallFormat(
        "Llama 3",
        r'\{"name": function name, "parameters"',
        {
            "begin": {
                ' { "name" : "NAME" , "parameters" : {': "arguments",
                ' { "type" : "function" , "name" : "NAME" , "parameters" : {': "arguments",
            },
            "content": {' <|python_tag|> { "name" : "NAME" , "parameters" : {': "arguments"},
            "tail": {" }": "after"},
            "after": {' ; { "name" : "NAME" , "parameters" : {': "arguments"},
        },
        head='{"name": "NAME", "parameters": ',
        tail="}",
    ),
    CallFormat(
        "Mistral",
        r"\[TOOL_CALLS\] ?\[",
        {
            "content": {' [TOOL_CALLS] [ { "name" : "NAME" , "arguments" : {': "arguments"},
            "tail": {" }": "after", ' , "id" : "WORD" }': "after"},
            "after": {' , { "name" : "NAME" , "arguments" : {': "arguments", " ]": "content"},
        },
        head='{"name": "NAME", "arguments": ',
        tail="}",
        begin="[TOOL_CALLS][",
        separator=", ",
        end="]",
    ),
    CallFormat(
        "Mistral since 2025",
        r"\[ARGS\]",
        {
            "content": {
                " [TOOL_CALLS]NAME[ARGS] {": "arguments",
                " [TOOL_CALLS]NAME[CALL_ID]WORD[ARGS] {": "arguments",
            }
        },
        head="[TOOL_CALLS]NAME[ARGS]",
        separator="",
    ),
    CallFormat(
        "gpt-oss",
        r"<\|call\|>",
        {
            # A header names the channel, and the recipient before or after it.
            "begin": {
                " <|channel|>commentary to=functions.NAME <|constrain|>json<|message|> {": (
                    "arguments"
                ),
                " <|channel|>commentary to=functions.NAME json<|message|> {": "arguments",
                " <|channel|>commentary to=functions.NAME<|message|> {": "arguments",
                " to=functions.NAME<|channel|>commentary <|constrain|>json<|message|> {": (
                    "arguments"
                ),
                " to=functions.NAME<|channel|>commentary json<|message|> {": "arguments",
                " to=functions.NAME<|channel|>commentary<|message|> {": "arguments",
            },
            "content": {" <|end|><|start|>assistant": "begin"},
            "tail": {" <|call|>": "after"},
        },
        head="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
    ),
)


class Thoughts(NamedTuple):
    """A family's thoughts, with marks as those of CallFormat."""

    begin: str
    end: str
    key: str  # the chat template has it
    marks: dict[str, dict[str, str]]


def thoughts_between(begin: str, end: str) -> Thoughts:
    marks = {"begin": {f" {begin}": "reasoning_content"}, "reasoning_content": {f" {end}": "begin"}}
    return Thoughts(begin, end, end, marks)


THOUGHTS = (
    thoughts_between("<think>", "</think>"),
    thoughts_between("[THINK]", "[/THINK]"),
    thoughts_between("<seed:think>", "</seed:think>"),
    Thoughts(
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant",
        "<|channel|>analysis<|message|>",
        {
            "begin": {
                " <|channel|>analysis<|message|>": "reasoning_content",
                " <|channel|>final<|message|>": "content",
                " <|channel|>commentary<|message|>": "content",
            },
            "reasoning_content": {" <|end|><|start|>assistant": "begin"},
            "content": {" <|end|><|start|>assistant": "begin"},
        },
    ),
)


# ---------------------------------------------------------------------------------------- to read


@functools.cache
def compile_marks(marks: tuple[tuple[str, str], ...], has_beginnings: bool) -> re.Pattern:
    """Matches the first of the (pattern, mode), as a group named after mode and number; the next
    group is the name of a call. has_beginnings: at the end of the text, a beginning of a pattern
    matches too, as no group."""
    patterns = []
    beginnings = []
    for number, (pattern, mode) in enumerate(marks):
        atoms = []
        for part in re.split(f"({'|'.join(ATOMS)})", pattern):
            atoms += [ATOMS[part]] if part in ATOMS else map(re.escape, part)
        patterns.append(f"(?P<{mode}_{number}>{''.join(atoms)})")
        beginning = r"\Z"
        for atom in reversed(atoms[:-1]):
            beginning = rf"(?:\Z|{atom}{beginning})"
        beginnings.append(beginning)
    return re.compile("|".join(patterns + beginnings * has_beginnings) or "(?!)")


# --------------------------------------------------------------------------------------- to force


def quoted(text: str, specials: Mapping[str, int]) -> str:
    """A text in llguidance's grammar: strings, and special tokens by their ids."""
    parts = re.split(f"({'|'.join(map(re.escape, specials))})", text)
    return " ".join(
        f"<[{specials[part]}]>" if part in specials else json.dumps(part) for part in parts
    )


def json_rule(schema: dict) -> str:
    return "%json " + json.dumps({"x-guidance": OPTIONS, **schema})


def calls_rule(
    form: CallFormat, schemas: Mapping[str, dict], is_parallel: bool, specials: Mapping[str, int]
) -> str:
    """An answer that calls one function, or several if is_parallel. `schemas`: of the functions'
    arguments, by name."""
    quote = functools.partial(quoted, specials=specials)
    alternatives = []
    for name, schema in schemas.items():
        head = form.head.replace("NAME", name)
        alternatives.append(f"{quote(head)} {json_rule(schema)} {quote(form.tail)}")
    calls = call = f"({' | '.join(alternatives)})"
    if is_parallel and form.separator is not None:
        calls = f"{call} ({quote(form.separator)} {call})*"
    return f"{quote(form.begin)} {calls} {quote(form.end)}"


def answer_grammar(
    thoughts: Thoughts | None, rule: str, is_thinking: bool, specials: Mapping[str, int]
) -> str:
    """The grammar of an answer that obeys a rule, after thoughts if it has any. is_thinking: the
    prompt has begun them."""
    if thoughts is None:
        return f"start: {rule}"
    end = quoted(thoughts.end, specials)
    # Text holds no special token, but it may hold another end of thoughts.
    thought = f"thought: text {end}\ntext"
    if "<[" not in end:
        thought = f"thought[suffix={json.dumps(thoughts.end)}]"
    opening = "thought gap" if is_thinking else f"({quoted(thoughts.begin, specials)} thought gap)?"
    return f"start: {opening} ({rule})\n{thought}: /(.|\\n)*/\ngap: /\\s{{0,2}}/"
