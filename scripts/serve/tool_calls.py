"""How models write tool calls and thoughts: a record for each family, which is chosen by the text
of its chat template.

    CallFormat      a family's calls: `marks` to read them, `head`, `tail` and others to force them
    Thoughts        the texts around a family's thoughts
    compile_marks   marks -> a regular expression, for message_parser.py
    parameter_types, value_json
                    the text of a parameter's value -> JSON, for message_parser.py
    calls_rule, answer_grammar
                    functions -> the grammar of an answer, for decoding/grammar.py

Sources: the chat templates of Qwen 2.5 and 3, Qwen3-Coder, Hermes 2 Pro, Llama 3.1, Mistral Nemo,
Devstral, gpt-oss, GLM-4.5 and MiniMax-M2, and vLLM's tool and reasoning parsers.
"""

import contextlib
import functools
import itertools
import json
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from decoding.errors import UserError
from decoding.grammar import OPTIONS

NAME = r"[\w.:/-]{1,128}"  # a longer one is text, which nobody holds back
KEY = r"[^<>\"\n]{1,128}"
# More white space than a space of a pattern stands for is text. A new line may be missing, which
# the next character shows.
ATOMS = {
    "NAME": f"({NAME})",
    "KEY": f"({KEY})",
    "WORD": NAME,
    " ": r"\s{0,9}",
    "\n": r"(?:\n|(?=[^\n]))",
}


class CallFormat(NamedTuple):
    """A family's calls.

    `marks` are the texts that are no part of a message, by mode. A mode says what the text before a
    mark is: a key of the message; "arguments" of a call; "begin" of a message, "tail" of a call or
    the place "after" one, where nothing but a mark can stand. Some families write no JSON object
    but one parameter after the other: there "value" is the text of a parameter's value, and what
    stands between "parameters" is dropped. Each pattern has the mode that follows it. In it a space
    stands for optional white space, a new line for one or none, NAME for a function's name, KEY for
    a parameter's, WORD for any word, and the brace or bracket at its end belongs to the arguments.

    A forced answer is `begin`; head, arguments and tail of every call, with separators between
    them; `end`. The arguments are JSON, or `parameter` with VALUE for every one.
    """

    family: str
    key: str  # a regular expression, which the chat template matches
    marks: dict[str, dict[str, str]]
    head: str
    tail: str = ""
    begin: str = ""
    separator: str | None = None  # None: an answer has one call
    end: str = ""
    parameter: str = ""

    @property
    def value_end(self) -> str:
        """What ends the text of a parameter's value."""
        return self.parameter.partition("VALUE")[2].strip()


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
    CallFormat(
        "Qwen3-Coder",
        "<parameter=",
        {
            # The model at times forgets the first tag.
            "content": {
                " <tool_call> <function=NAME> <": "parameters",
                " <function=NAME> <": "parameters",
            },
            "parameters": {" <parameter=KEY>\n": "value", " </function>": "after"},
            "value": {"\n</parameter>": "parameters"},
            "after": {" </tool_call>": "content"},
        },
        head="<tool_call>\n<function=NAME>\n",
        parameter="<parameter=KEY>\nVALUE\n</parameter>\n",
        tail="</function>\n</tool_call>",
        separator="\n",
    ),
    CallFormat(
        "GLM-4.5",
        "<arg_key>",
        {
            "content": {" <tool_call> NAME <": "parameters"},
            "parameters": {
                " <arg_key>KEY</arg_key> <arg_value>": "value",
                " </tool_call>": "content",
            },
            "value": {"</arg_value>": "parameters"},
        },
        head="<tool_call>NAME\n",
        parameter="<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n",
        tail="</tool_call>",
        separator="\n",
    ),
    CallFormat(
        "MiniMax-M2",
        "<minimax:tool_call>",
        {
            "content": {' <minimax:tool_call> <invoke name="NAME"> <': "parameters"},
            "parameters": {' <parameter name="KEY">': "value", " </invoke>": "after"},
            "value": {"</parameter>": "parameters"},
            "after": {
                ' <invoke name="NAME"> <': "parameters",
                " </minimax:tool_call>": "content",
            },
        },
        begin="<minimax:tool_call>\n",
        head='<invoke name="NAME">\n',
        parameter='<parameter name="KEY">VALUE</parameter>\n',
        tail="</invoke>",
        separator="\n",
        end="\n</minimax:tool_call>",
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


JSON_TYPES = {
    str: ("string",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}  # Qwen3-Coder's template has them


def schema_types(schema: object) -> list:
    """The JSON types of a value; []: any."""
    match schema:
        case {"type": str(name)}:
            return [name]
        case {"type": list(names)}:
            return names
        case {"anyOf": list(parts)} | {"oneOf": list(parts)}:
            types = [*map(schema_types, parts)]
            return [*itertools.chain(*types)] if all(types) else []
    return []


def parameter_types(schema: object, key: str) -> list:
    """The same of a function's parameter, by the schema of the arguments."""
    match schema:
        case {"properties": {**properties}}:
            return schema_types(properties.get(key))
    return []


def value_json(text: str, types: list) -> str:
    """A value's text as JSON: as it stands if it parses, and where a string may stand, if it is of
    one of the types; else as a string."""
    source = PYTHON_WORDS.get(text.strip(), text)
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(source, parse_constant=int)  # no NaN, which JSON lacks
        if "string" not in types or any(name in types for name in JSON_TYPES[type(value)]):
            return source.strip()
    return json.dumps(text, ensure_ascii=False)


# --------------------------------------------------------------------------------------- to force


def quoted(text: str, specials: Mapping[str, int]) -> str:
    """A text in llguidance's grammar: strings, and special tokens by their ids."""
    parts = re.split(f"({'|'.join(map(re.escape, specials))})", text)
    return " ".join(
        f"<[{specials[part]}]>" if part in specials else json.dumps(part) for part in parts
    )


def json_rule(schema: dict) -> str:
    return "%json " + json.dumps({"x-guidance": OPTIONS, **schema})


DEFINITIONS = ("$defs", "definitions")
NOTES = {"title", "description", "default", "examples", "$schema"}


def read_part(schema: dict, key: str, part_type: type) -> object:
    """A dict or list of a schema, or an empty one."""
    value = schema.get(key, part_type())
    if not isinstance(value, part_type):
        raise UserError(f"the schema: {key} = {value!r:.99} must be a {part_type.__name__}")
    return value


def check_keys(name: str, schema: dict, *keys: str) -> None:
    for key in schema.keys() - NOTES.union(keys):
        raise UserError(
            f"the schema: {name} has {key!r}, which calls in this model's form cannot be held to;"
            " tool_choice auto leaves it to the model"
        )


def parameter_rule(
    form: CallFormat, key: str, schema: dict, definitions: dict, quote: Callable
) -> str:
    """A parameter and its value: the text of a string, or JSON."""
    if not re.fullmatch(KEY, key):
        raise UserError(f"the schema: {key!r:.99} is no parameter's name in this model's form")
    head, tail = (part.replace("KEY", key) for part in form.parameter.split("VALUE"))
    if schema_types(schema) != ["string"]:
        return f"{quote(head)} {json_rule({**definitions, **schema})} {quote(tail)}"
    check_keys(key, schema, "type", "enum")
    texts = [text for text in read_part(schema, "enum", list) if isinstance(text, str)]
    if texts:
        return f"{quote(head)} ({' | '.join(map(quote, texts))}) {quote(tail)}"
    return f"{quote(head)} value {quote(tail.partition(form.value_end)[2])}"


def arguments_rule(form: CallFormat, name: str, schema: dict, quote: Callable) -> str:
    """A function's arguments, or its parameters in their order."""
    if not form.parameter:
        return json_rule(schema)
    check_keys(name, schema, "type", "properties", "required", "additionalProperties", *DEFINITIONS)
    definitions = {key: schema[key] for key in DEFINITIONS if key in schema}
    properties = read_part(schema, "properties", dict)
    required = read_part(schema, "required", list)
    rules = []
    for key in dict.fromkeys([*properties, *map(str, required)]):
        parameter = read_part(properties, key, dict)
        rule = parameter_rule(form, key, parameter, definitions, quote)
        rules.append(rule if key in required else f"({rule})?")
    return " ".join(rules)


def calls_rule(
    form: CallFormat, schemas: Mapping[str, dict], is_parallel: bool, specials: Mapping[str, int]
) -> str:
    """An answer that calls one function, or several if is_parallel. `schemas`: of the functions'
    arguments, by name."""
    quote = functools.partial(quoted, specials=specials)
    alternatives = []
    for name, schema in schemas.items():
        head = form.head.replace("NAME", name)
        arguments = arguments_rule(form, name, schema, quote)
        alternatives.append(f"{quote(head)} {arguments} {quote(form.tail)}")
    calls = call = f"({' | '.join(alternatives)})"
    if is_parallel and form.separator is not None:
        calls = f"{call} ({quote(form.separator)} {call})*"
    return f"{quote(form.begin)} {calls} {quote(form.end)}"


def text_rule(name: str, end: str, specials: Mapping[str, int]) -> str:
    """A rule of this name: text up to its end, which the text does not hold."""
    text = "/(.|\\n)*/"
    quoted_end = quoted(end, specials)
    if "<[" in quoted_end:  # text holds no special token
        return f"{name}: {name}_text {quoted_end}\n{name}_text: {text}"
    return f"{name}[suffix={json.dumps(end)}]: {text}"


def answer_grammar(
    thoughts: Thoughts | None,
    rule: str,
    is_thinking: bool,
    specials: Mapping[str, int],
    value_end: str = "",
) -> str:
    """The grammar of an answer that obeys a rule, after thoughts if it has any. is_thinking: the
    prompt has begun them; value_end: what ends a parameter's text."""
    values = text_rule("value", value_end, specials) if value_end else ""
    if thoughts is None:
        return f"start: {rule}\n{values}"
    opening = "thought gap" if is_thinking else f"({quoted(thoughts.begin, specials)} thought gap)?"
    thought = text_rule("thought", thoughts.end, specials)
    return f"start: {opening} ({rule})\n{thought}\ngap: /\\s{{0,2}}/\n{values}"
