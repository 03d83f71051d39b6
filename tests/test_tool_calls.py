"""Tool calls and thoughts: what a model wrote in its template's form becomes OpenAI's objects.

Oracles: the templates, which write calls themselves; the text in one piece; JSON; the same request
without a draft; the client's own types, strictly validated; pydantic-ai. A scripted model, whose
logits allow one text alone, decodes the texts of the server's tests.
"""

import asyncio
import contextlib
import json
import re
import threading
import time
from types import SimpleNamespace

import httpx2
import openai
import pytest
import torch
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding.engine import Engine
from decoding.errors import UserError
from decoding.options import EngineOptions
from decoding.sampling import Sampling
from drafts.ngram import NgramDraft
from generate import LLM
from loading.chat_messages import first_text, message_forms
from loading.chat_templates import ChatTemplate
from loading.checkpoint import load_model
from loading.tokenizer import load_tokenizer
from scripts.serve.batches import Decoder
from scripts.serve.message_form import MessageForm
from scripts.serve.message_parser import MessageParser
from scripts.serve.openai_form import Refusal, read_request
from scripts.serve.serve import Api
from scripts.serve.serve_flags import parse_args
from scripts.serve.tool_calls import (
    CALL_FORMATS,
    THOUGHTS,
    answer_grammar,
    calls_rule,
    schema_types,
)

DEMO = ROOT / "checkpoints" / "demo"
TURN = "<|turn|>"  # begins every answer
SPECIALS = [
    "<|begin|>",
    "<|end_of_text|>",
    TURN,
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "[THINK]",
    "[/THINK]",
    "<|python_tag|>",
    "<|channel|>",
    "<|message|>",
    "<|start|>",
    "<|end|>",
    "<|constrain|>",
    "<|call|>",
    "<|return|>",
    "<minimax:tool_call>",
    "</arg_value>",
]
LITERALS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]  # as in Qwen's vocabulary

# The calls of each family's template, inside one frame.
FRAME = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{{ INTRODUCTION }}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|turn|>' + (m.content or '') }}"
    "{% if m.tool_calls %}CALLS{% endif %}{{ '<|end_of_text|>' }}"
    "{% else %}{{ m.role + ': ' + m.content + ' ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>' }}PROMPT{% endif %}"
)
EACH = "{% for c in m.tool_calls %}{% set f = c.function %}CALL{% endfor %}"
ONE = "{% set f = m.tool_calls[0].function %}CALL"
CALLS = {
    "Hermes and Qwen": EACH.replace(
        "CALL",
        '{{ \'<tool_call>\\n{"name": "\' + f.name + \'", "arguments": \' }}'
        "{{ f.arguments | tojson + '}\\n</tool_call>' + ('' if loop.last else '\\n') }}",
    ),
    "Llama 3": ONE.replace(
        "CALL", '{{ \'{"name": "\' + f.name + \'", "parameters": \' + f.arguments | tojson + "}" }}'
    ),
    "Mistral": "{{ '[TOOL_CALLS][' }}"
    + EACH.replace(
        "CALL",
        "{{ ({'name': f.name, 'arguments': f.arguments} | tojson) + ('' if loop.last else ', ') }}",
    )
    + "{{ ']' }}",
    "Mistral since 2025": EACH.replace(
        "CALL", "{{ '[TOOL_CALLS]' + f.name + '[ARGS]' + f.arguments | tojson }}"
    ),
    "gpt-oss": ONE.replace(
        "CALL",
        "{{ ' to=functions.' + f.name + '<|channel|>commentary json<|message|>' }}"
        "{{ f.arguments | tojson + '<|call|>' }}{# <|channel|>analysis<|message|> #}",
    ),
}
# Families that write one parameter after the other. Qwen's values are Python's words.
ITEMS = "{% for k, v in f.arguments.items() %}PARAMETER{% endfor %}"
VALUE = "v | tojson if v is not string else v"
PYTHON_VALUE = "v | tojson if v is mapping or (v is sequence and v is not string) else v | string"
TAGGED = {
    "Qwen3-Coder": EACH.replace(
        "CALL",
        "{{ '\\n<tool_call>\\n<function=' + f.name + '>\\n' }}"
        + ITEMS.replace(
            "PARAMETER",
            "{{ '<parameter=' + k + '>\\n' }}"
            f"{{{{ {PYTHON_VALUE} }}}}{{{{ '\\n</parameter>\\n' }}}}",
        )
        + "{{ '</function>\\n</tool_call>' }}",
    ),
    "GLM-4.5": EACH.replace(
        "CALL",
        "{{ '\\n<tool_call>' + f.name + '\\n' }}"
        + ITEMS.replace(
            "PARAMETER",
            "{{ '<arg_key>' + k + '</arg_key>\\n' }}"
            f"<arg_value>{{{{ {VALUE} }}}}</arg_value>{{{{ '\\n' }}}}",
        )
        + "</tool_call>",
    ),
    "MiniMax-M2": "{{ '\\n<minimax:tool_call>\\n' }}"
    + EACH.replace(
        "CALL",
        "{{ '<invoke name=\"' + f.name + '\">\\n' }}"
        + ITEMS.replace(
            "PARAMETER",
            "{{ '<parameter name=\"' + k + '\">' }}"
            f"{{{{ {VALUE} }}}}</parameter>{{{{ '\\n' }}}}",
        )
        + "{{ '</invoke>\\n' }}",
    )
    + "</minimax:tool_call>",
}
CALLS |= TAGGED
INTRODUCTIONS = {"Llama 3": '\'{"name": function name, "parameters": values}\''}
FAMILIES = list(CALLS)
FORM_BY_FAMILY = {form.family: form for form in CALL_FORMATS}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
USER = [{"role": "user", "content": "Hi"}]


def template(family: str, thoughts: str = "", prompt: str = "") -> ChatTemplate:
    """`thoughts`: a comment that mentions them; `prompt`: what the template writes after TURN."""
    source = FRAME.replace("CALLS", CALLS[family]) + f"{{# {thoughts} #}}"
    source = source.replace("PROMPT", f"{{{{ {prompt!r} }}}}" if prompt else "")
    return ChatTemplate(source.replace("INTRODUCTION", INTRODUCTIONS.get(family, "''")), {})


# ------------------------------------------------------------------------------------- the messages

BROKEN_ARGUMENTS = ['{"a": 1', '{"a": "x', "{", "not JSON", "[1]", "5", '"text"', "null", "[" * 500]


@pytest.mark.parametrize("arguments", BROKEN_ARGUMENTS)
@pytest.mark.parametrize(
    "call, expected",
    [
        ("{{ f.arguments }}", "TEXT"),
        ("{{ f.arguments | tojson }}", "JSON"),
        ("{% if f.arguments is string %}{{ f.arguments }}{% else %}object{% endif %}", "TEXT"),
        ("{% for k, v in f.arguments | items %}{{ k }}={{ v }}{% endfor %}", "arguments=TEXT"),
        ("{% for k, v in f.arguments.items() %}{{ k }}={{ v }}{% endfor %}", "arguments=TEXT"),
    ],
)
def test_arguments_that_are_no_object_reach_every_template_as_text(arguments, call, expected):
    """As in OpenAI's API, they may be what a model wrote up to a limit of tokens. A template that
    reads the members of an object gets the text as the only one."""
    call_object = {"function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "tool_calls": [call_object]}
    (written,) = read_request({"messages": [message]}, True, "m", Sampling()).prompts
    source = FRAME.replace("CALLS", ONE.replace("CALL", "{{ f.name }}" + call)).replace(
        "INTRODUCTION", "''"
    )
    template = ChatTemplate(source.replace("PROMPT", ""), {})
    forms = message_forms(written, template.developer, template.content_form)
    text = first_text(lambda form: template.render(form, False), forms)
    expected = expected.replace("JSON", json.dumps(arguments)).replace("TEXT", arguments)
    assert text.removeprefix(f"{TURN}f").removesuffix("<|end_of_text|>") == expected


# --------------------------------------------------------------------------------------- the parser


def form_of(family: str, thoughts: str = "", **keys) -> MessageForm:
    request = read_request({"messages": USER, "tools": TOOLS, **keys}, True, "m", Sampling())
    tokenizer = SimpleNamespace(template=template(family, thoughts), specials={})
    return MessageForm(request, tokenizer)


def joined(deltas: list[dict]) -> dict:
    """The message that a stream of deltas makes."""
    message = {"content": "", "reasoning_content": "", "calls": []}
    for delta in deltas:
        for key in ("content", "reasoning_content"):
            message[key] += delta.get(key, "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:  # the first delta of a call, with all that is no arguments
                assert call["index"] == len(message["calls"]) and call["type"] == "function"
                message["calls"].append([call["function"]["name"], ""])
            message["calls"][call["index"]][1] += call["function"]["arguments"]
    return message


def parsed(parser: MessageParser, *pieces: str) -> dict:
    deltas = []
    for piece in pieces:
        deltas += parser.feed([piece])
    return joined(deltas + parser.feed([], is_last=True))


NAMES = st.from_regex(r"[A-Za-z0-9_-]{1,12}", fullmatch=True)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9) | st.sampled_from(LITERALS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.text(max_size=5), VALUES, max_size=3)
TAGGED_OBJECTS = st.dictionaries(NAMES, VALUES, max_size=3)
JSON_TYPES = {
    str: "string",
    bool: "boolean",
    int: "integer",
    type(None): "null",
    list: "array",
    dict: "object",
}


def tool_of(name: str, arguments: dict) -> dict:
    """A function with these parameters, each of the type that its value has."""
    properties = {key: {"type": JSON_TYPES[type(value)]} for key, value in arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def call_as_forced(form, name: str, arguments: dict) -> str:
    """A call in the parts that a grammar is made of."""
    if not form.parameter:
        return form.head.replace("NAME", name) + json.dumps(arguments) + form.tail
    texts = [form.head.replace("NAME", name)]
    for key, value in arguments.items():
        text = value if isinstance(value, str) else json.dumps(value)
        texts.append(form.parameter.replace("KEY", key).replace("VALUE", text))
    return "".join(texts) + form.tail


@pytest.mark.one_in(5)
@pytest.mark.parametrize("family", FAMILIES)
@given(name=NAMES, data=st.data())
@settings(max_examples=25, deadline=None)
def test_calls_come_back_as_the_template_and_the_grammar_write_them(family, name, data):
    """With text before them, in any pieces."""
    form = FORM_BY_FAMILY[family]
    objects = TAGGED_OBJECTS if family in TAGGED else OBJECTS
    max_calls = 1 if form.separator is None else 3
    arguments = data.draw(st.lists(objects, min_size=1, max_size=max_calls))
    names = [f"{name}{number}" for number in range(len(arguments))]
    tools = list(map(tool_of, names, arguments))
    calls = [
        {"function": {"name": called, "arguments": each}} for called, each in zip(names, arguments)
    ]
    message = {"role": "assistant", "tool_calls": calls}
    rendered = template(family).render([message], False).split(TURN)[1]
    rendered = rendered.removesuffix("<|end_of_text|>")
    parts = [call_as_forced(form, called, each) for called, each in zip(names, arguments)]
    forced = form.begin + (form.separator or "").join(parts) + form.end
    for text in (rendered, forced):
        before = "" if family in ("Llama 3", "gpt-oss") else data.draw(st.sampled_from(["", "Oh!"]))
        text = before + text
        cuts = sorted(data.draw(st.sets(st.integers(1, len(text) - 1))))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)])]
        result = parsed(form_of(family, tools=tools).parser(), *pieces)
        assert result["content"] == before and result["reasoning_content"] == ""
        assert [called for called, _ in result["calls"]] == names
        assert [json.loads(written) for _, written in result["calls"]] == arguments


FRAGMENTS = [
    *(atom for form in CALL_FORMATS for marks in form.marks.values() for atom in marks),
    *(text for thoughts in THOUGHTS for text in thoughts[:2]),
    *("{", "}", '"', "\\", "\n", " " * 12, "<", "[", "a", '"id": "x"', ";", ", ", "{}", "é"),
]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("family", FAMILIES)
@given(fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=9), data=st.data())
@settings(max_examples=50, deadline=None)
def test_a_message_does_not_depend_on_the_pieces_of_its_text(family, fragments, data):
    """Whole and broken marks in any order."""
    cut_at = data.draw(st.lists(st.integers(0, 40), min_size=len(fragments)))
    texts = [text if cut > 20 else text[:cut] for text, cut in zip(fragments, cut_at)]
    text = "".join(texts).replace("NAME", "add").replace("WORD", "w").replace("KEY", "a")
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)])]
    form = form_of(family, "</think>")
    assert parsed(form.parser(), *pieces) == parsed(form.parser(), text)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_no_call_stays_as_the_model_wrote_it(family):
    """Every beginning of a call's mark, alone and before other text; calls without tools; the name
    of an ordinary word. Text that can become no mark is not held back."""
    form = FORM_BY_FAMILY[family]
    head = form.begin + form.head.replace("NAME", "f") + ("<" if family in TAGGED else "{")
    for length in range(1, len(head)):
        for text in (head[:length], head[:length] + "~ and more"):
            assert parsed(form_of(family).parser(), text)["content"] == text
    text = form.begin + call_as_forced(form, "f", {"a": 1}) + form.end
    assert parsed(form_of(family).parser(), text)["calls"] == [["f", '{"a": 1}']]
    parser = form_of(family, tools=None).parser()
    assert parsed(parser, text) == {"content": text, "reasoning_content": "", "calls": []}
    parser = form_of(family).parser()
    assert parser.feed(["One day"]) == [{"content": "One day"}]
    assert parser.feed([", Tom<"]) in ([{"content": ", Tom<"}], [{"content": ", Tom"}])


def test_arguments_stream_as_they_come():
    parser = form_of("Hermes and Qwen").parser()
    assert parser.feed(["Wait.", "\n<tool_call>\n{"]) == [{"content": "Wait."}]
    assert parser.feed(['"name": "add", "arguments": ']) == []
    ((call,),) = [delta["tool_calls"] for delta in parser.feed(['{"a"'])]
    assert call["function"] == {"name": "add", "arguments": '{"a"'} and len(call["id"]) == 9
    assert parser.feed([": 1"]) == [
        {"tool_calls": [{"index": 0, "function": {"arguments": ": 1"}}]}
    ]
    rest = [{"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}, {"content": "Done."}]
    assert parser.feed(["}", "}\n</tool_call>\nDone."]) == rest
    assert parser.feed(["}\n</tool"]) == [{"content": "}\n</tool"}]
    assert parser.feed([], is_last=True) == []


def test_long_arguments_are_read_once():
    """Twice the text takes twice the time. If every piece were read with those before it, this
    would take minutes; the server's other connections would wait."""
    parser = form_of("Hermes and Qwen").parser()
    parser.feed(['<tool_call>{"name": "add", "arguments": {"a": "'])
    began = time.perf_counter()
    deltas = parser.feed(["if (x) { }"] * 20_000)
    assert time.perf_counter() - began < 5
    ((call,),) = [delta["tool_calls"] for delta in deltas]
    assert call["function"]["arguments"] == "if (x) { }" * 20_000


def test_a_backslash_and_what_it_escapes_may_come_apart():
    arguments = json.dumps({"a": 'x"}', "b": "\\", "c": {"d": '\\"'}})
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>Done.'
    expected = {"content": "Done.", "reasoning_content": "", "calls": [["f", arguments]]}
    for cut in range(len(text)):
        assert parsed(form_of("Hermes and Qwen").parser(), text[:cut], text[cut:]) == expected
    assert parsed(form_of("Hermes and Qwen").parser(), *text) == expected


# Two calls between texts, as models write them, with and without white space.
TAGGED_TEXTS = {
    "Qwen3-Coder": (
        "Let me.\n\n<tool_call>\n<function=f>\n<parameter=text>\n\nx\n</p<\n\n</parameter>\n"
        "<parameter=n>\n-12\n</parameter>\n</function>\n</tool_call>\n"
        "<function=g></function>\nDone."
    ),
    "GLM-4.5": (
        "Let me.\n<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>\nx\n</p<\n</arg_value>\n"
        "<arg_key>n</arg_key><arg_value>-12</arg_value>\n</tool_call><tool_call>g</tool_call>Done."
    ),
    "MiniMax-M2": (
        'Let me.\n<minimax:tool_call>\n<invoke name="f">\n<parameter name="text">\nx\n</p<\n'
        '</parameter> and\n<parameter name="n">-12</parameter></invoke>\n'
        '<invoke name="g"></invoke>\n</minimax:tool_call>\nDone.'
    ),
}


@pytest.mark.parametrize("family", TAGGED)
def test_parameters_do_not_depend_on_the_pieces(family):
    """Every two pieces, and characters. A value has new lines of its own at both ends."""
    tools = [tool_of("f", {"text": "", "n": 1}), tool_of("g", {})]
    text = TAGGED_TEXTS[family]
    form = form_of(family, tools=tools)
    result = parsed(form.parser(), text)
    assert result["content"] == "Let me.Done."
    assert [name for name, _ in result["calls"]] == ["f", "g"]
    arguments = [json.loads(arguments) for _, arguments in result["calls"]]
    assert arguments == [{"text": "\nx\n</p<\n", "n": -12}, {}]
    for cut in range(len(text)):
        assert parsed(form.parser(), text[:cut], text[cut:]) == result, cut
    assert parsed(form.parser(), *text) == result


def test_a_string_streams_as_it_comes_and_other_values_when_they_end():
    tools = [tool_of("f", {"text": "", "n": 1})]
    parser = form_of("Qwen3-Coder", tools=tools).parser()
    parser.feed(["<tool_call>\n<function=f>\n<parameter=text>\n"])
    texts = []
    for piece in (
        "One",
        ' "day',
        '"\n',
        "\n</para",
        "meter>\n<parameter=n>",
        "\n1",
        "2\n</parameter>",
    ):
        deltas = parser.feed([piece])
        calls = [call for delta in deltas for call in delta["tool_calls"]]
        texts.append("".join(call["function"]["arguments"] for call in calls))
    assert texts == ["One", ' \\"day', '\\"', "\\n", '"', ', "n": ', "12"]
    (delta,) = parser.feed(["</function>", "</tool_call>"], is_last=True)
    assert delta["tool_calls"][0]["function"]["arguments"] == "}"


NULLABLE = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, "null", "null"),
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, "five", "five"),
        ({"type": "integer"}, "123456789012345678901234567890", 123456789012345678901234567890),
        ({"type": "number"}, " 0.5 ", 0.5),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "True", True),
        ({"type": "null"}, "None", None),
        ({"type": "object"}, '{"a": [1]}', {"a": [1]}),
        ({"type": "object"}, '{"a": 1', '{"a": 1'),
        ({"type": "array"}, "[" * 100_000, "[" * 100_000),
        ({}, "[1, true]", [1, True]),
        ({}, "One day", "One day"),
        ("broken", "1", 1),
        (None, "1", 1),
        (NULLABLE, "null", None),
        (NULLABLE, "5", "5"),
        (NULLABLE, '"5"', "5"),
        ({"type": ["integer", "string"]}, "5", 5),
        ({"type": ["integer", "string"]}, "true", "true"),
        ({"type": [[]]}, "5", 5),
        ({"anyOf": [1, {"type": 2}]}, "5", 5),
    ],
)
def test_values_are_of_the_types_that_the_schema_names(schema, text, value):
    schemas = {"f": {"type": "object", "properties": {"a": schema}}}
    for family, form in FORM_BY_FAMILY.items():
        if family in TAGGED:
            call = call_as_forced(form, "f", {"a": text})
            parser = MessageParser(form.marks, schemas=schemas)
            ((_, arguments),) = parsed(parser, form.begin + call + form.end)["calls"]
            assert json.loads(arguments) == {"a": value}


PARAMETERS = {
    "type": "object",
    "$defs": {"count": {"type": "integer", "minimum": 3}},
    "properties": {
        "text": {"type": "string", "description": "Any."},
        "unit": {"type": "string", "enum": ["m", "sea mile"]},
        "n": {"$ref": "#/$defs/count"},
        "note": NULLABLE,
    },
    "required": ["text", "n"],
}


@pytest.mark.parametrize("family", TAGGED)
def test_a_grammar_of_parameters_allows_what_the_schema_does(family):
    """And the calls that it allows are read with their arguments."""
    from llguidance import LLMatcher, LLTokenizer

    form = FORM_BY_FAMILY[family]
    rule = calls_rule(form, {"f": PARAMETERS, "g": {"type": "object"}}, True, {})
    source = answer_grammar(None, rule, False, {}, form.value_end)
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(source))
    assert not matcher.get_error()

    def is_allowed(*calls: tuple[str, dict]) -> bool:
        parts = [call_as_forced(form, name, arguments) for name, arguments in calls]
        text = form.begin + form.separator.join(parts) + form.end
        ids = tokenizer.tokenize_str(text)
        copy = matcher.deep_copy()
        is_accepted = copy.validate_tokens(ids) == len(ids) and copy.try_consume_tokens(ids)
        is_allowed = bool(is_accepted) and copy.is_accepting()
        if is_allowed:
            parser = MessageParser(form.marks, schemas={"f": PARAMETERS})
            read = [(name, json.loads(given)) for name, given in parsed(parser, text)["calls"]]
            assert read == [*calls]
        return is_allowed

    full = {"text": " <\n\n", "unit": "sea mile", "n": 3, "note": None}
    assert is_allowed(("f", full)) and is_allowed(("g", {}), ("f", {"text": "", "n": 4}))
    assert not is_allowed(("f", {"text": ""})) and not is_allowed(("f", {"n": 3}))
    assert not is_allowed(("f", {**full, "n": 2})) and not is_allowed(("f", {**full, "n": "3!"}))
    assert not is_allowed(("f", {**full, "unit": "km"})) and not is_allowed(("f", {**full, "x": 1}))
    assert not is_allowed(("h", {}))


def test_a_parameters_name_may_be_a_word_of_the_form():
    """Forms have the words KEY and VALUE where names and values stand."""
    schema = {
        "properties": {name: {"enum": ["ab"], "type": "string"} for name in ("VALUE", "MAX_KEY")}
    }
    for form in CALL_FORMATS:
        if form.parameter:
            rule = calls_rule(form, {"f": schema}, True, {})
            head, _ = form.parameter.split("VALUE")
            text = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', rule))  # of the rule's quoted parts
            for name in ("VALUE", "MAX_KEY"):
                assert json.dumps(head.replace("KEY", name))[1:-1] in text, rule


def test_types_of_alternatives_are_all_of_theirs():
    """One of any type is any."""
    nested = [{"type": ["string", "null"]}, {"oneOf": [{"type": "integer"}]}]
    assert schema_types({"anyOf": nested}) == ["string", "null", "integer"]
    assert schema_types({"anyOf": [*nested, {"$ref": "#/$defs/P"}]}) == []


@pytest.mark.parametrize(
    ("schema", "name"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "^x"}}}, "'pattern'"),
        ({"properties": {"a": {"type": "string", "maxLength": 3}}}, "'maxLength'"),
        ({"anyOf": [{"required": ["a"]}]}, "'anyOf'"),
        ({"properties": {"a>": {"type": "string"}}}, "'a>'"),
        ({"properties": [1]}, "properties = "),
        ({"properties": {"a": True}}, "a = True"),
        ({"properties": {"a": {"type": "string", "enum": 1}}}, "enum = 1"),
        ({"required": "a"}, "required = 'a'"),
    ],
)
def test_a_forced_call_refuses_what_its_form_cannot_be_held_to(schema, name):
    """A JSON object can be, by llguidance."""
    for form in CALL_FORMATS:
        if form.family in TAGGED:
            with pytest.raises(UserError, match=re.escape(name)):
                calls_rule(form, {"f": schema}, True, {})
        else:
            assert "%json" in calls_rule(form, {"f": schema}, True, {})


def test_no_more_than_a_mark_is_held_back():
    """A name that never ends is text, so that what waits stays short."""
    for head in ('<tool_call>{"name": "', "<tool_call>" + " " * 9):
        parser = form_of("Hermes and Qwen").parser()
        parser.feed([head])
        for _ in range(300):
            parser.feed(["a"])
            assert len(parser.pending) < 200
        assert parser.mode == "content"


def test_parallel_tool_calls_false_gives_the_first_call_alone():
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    parser = form_of("Hermes and Qwen", parallel_tool_calls=False).parser()
    assert parsed(parser, text + text) == {**parsed(form_of("Hermes and Qwen").parser(), text)}
    assert len(parsed(form_of("Hermes and Qwen").parser(), text + text)["calls"]) == 2


@pytest.mark.parametrize(
    ("thoughts", "text"),
    [
        ("</think>", "<think>\nHm.\n</think>\n\nYes."),
        ("[/THINK]", "[THINK]Hm.[/THINK]Yes."),
        ("</seed:think>", "<seed:think>Hm.</seed:think>Yes."),
        (
            "<|channel|>analysis<|message|>",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"
            "Yes.",
        ),
    ],
)
def test_thoughts_are_no_content(thoughts, text):
    family = "gpt-oss" if "channel" in thoughts else "Hermes and Qwen"
    expected = {"content": "Yes.", "reasoning_content": "Hm.", "calls": []}
    for keys in ({}, {"tools": None}):
        form = form_of(family, thoughts, **keys)
        assert parsed(form.parser(), *text) == parsed(form.parser(), text) == expected
        form.is_thinking = True
        rest = text.removeprefix(form.thoughts.begin)
        assert parsed(form.parser(), *rest) == expected
        assert parsed(form.parser(), rest[:2])["reasoning_content"] == rest[:2].strip()
    if family != "gpt-oss":
        parser = form_of(family, thoughts, separate_reasoning=False).parser()
        assert parsed(parser, text)["content"] == text


# --------------------------------------------------------------------------------------- requests


JSON = VALUES | st.floats() | st.binary(max_size=2).map(lambda text: text.decode("latin-1"))


def mostly(strategy):
    return st.integers(0, 19).flatmap(lambda number: strategy if number else JSON)


def maybe(**shape):
    """An object with some of these keys; at times any JSON in its place or in theirs."""
    keys = {
        key: st.just(value) if isinstance(value, str) else value for key, value in shape.items()
    }
    return mostly(st.fixed_dictionaries({key: mostly(each) for key, each in keys.items()}))


PARAMETER = maybe(type="string", enum=st.lists(JSON), anyOf=st.lists(maybe(type=JSON)), x=JSON)
NAMED = maybe(
    name="f",
    arguments="{}",
    description="d",
    parameters=maybe(type="object", properties=maybe(a=PARAMETER), required=st.lists(JSON), x=JSON),
)
CHAT = {
    "messages": st.lists(
        maybe(
            role=st.sampled_from(["user", "assistant", "tool", "system"]),
            content=st.lists(maybe(type="text", text="a"), max_size=2) | st.just("a"),
            tool_calls=st.lists(maybe(id="x", type="function", function=NAMED), max_size=2),
            tool_call_id="x",
            reasoning_content="a",
        ),
        max_size=3,
    ),
    "tools": st.lists(maybe(type="function", function=NAMED), max_size=2),
    "tool_choice": st.sampled_from(["none", "required"]) | maybe(type="function", function=NAMED),
    "response_format": maybe(type="json_schema", json_schema=maybe(schema=maybe(type="object"))),
    "parallel_tool_calls": mostly(st.booleans()),
}


@pytest.mark.slow
@given(keys=st.fixed_dictionaries({}, optional=CHAT), family=st.sampled_from(FAMILIES))
@settings(max_examples=300, deadline=None)
def test_any_json_is_a_chat_or_a_refusal(keys, family):
    """ValueErrors are refusals where prompts are encoded; another exception would be status 500."""
    try:
        request = read_request(keys, True, "m", Sampling())
    except Refusal as refusal:
        assert 400 <= refusal.status < 500
        return
    form = MessageForm(request, SimpleNamespace(template=template(family), specials={}))
    # A grammar lets a forced answer be calls alone: what stands around them is no content.
    content = [] if request.forced_tools else [{"content": "a"}]
    assert form.parser().feed(["a"], is_last=True) == content
    (messages,) = request.prompts
    with contextlib.suppress(ValueError):
        form.tokenizer.template.render(messages, True, request.template_tools)
    if request.tools:
        call = call_as_forced(form.calls, "f", {"a": "1"})
        ((name, _),) = parsed(form.parser(), form.calls.begin + call + form.calls.end)["calls"]
        assert name == "f"
    if request.forced_tools:
        schemas = {tool.function.name: tool.function.schema for tool in request.forced_tools}
        with contextlib.suppress(UserError) if family in TAGGED else contextlib.nullcontext():
            calls_rule(form.calls, schemas, request.is_parallel, {})


# --------------------------------------------------------------------------------------- the server


class Script:
    """A logits processor that allows one answer a turn of the conversation; None: any."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.turns: list[list[int]] | None = None
        self.turn_id = tokenizer.specials[TURN]
        self.end_id = tokenizer.specials["<|end_of_text|>"]

    def write(self, *texts: str, prompt: str = "") -> None:
        """`prompt`: what the template writes of each answer."""
        parse = self.tokenizer.parse
        self.turns = [[*parse(prompt), *parse(text), self.end_id] for text in texts]

    def __call__(self, logits, tokens, pos):
        """logits (B, T, V), tokens (B, S), pos (B, T)"""
        if self.turns is None:
            return logits
        forced = torch.full_like(logits, -1e9)
        for b, t in torch.cartesian_prod(*map(torch.arange, pos.shape)).tolist():
            row = tokens[b, : pos[b, t] + 1].tolist()
            begins = [index for index, id in enumerate(row) if id == self.turn_id]
            answer = self.turns[min(len(begins), len(self.turns)) - 1]
            number = len(row) - 1 - begins[-1] if begins else 0
            forced[b, t, answer[min(number, len(answer) - 1)]] = 0
        return forced


class Server:
    """The server's app in this process; a thread decodes."""

    def __init__(self, folder):
        self.tokenizer = load_tokenizer(folder)
        self.script = Script(self.tokenizer)
        options = EngineOptions(speculate_k=3, logits_processor=self.script)
        engine = Engine(load_model(DEMO), 2, 500, options, NgramDraft())
        self.decoder = Decoder(LLM.from_engine(engine, self.tokenizer), 16)
        self.api = Api(parse_args(["--checkpoint", str(DEMO)]), self.decoder, None)
        self.app = self.api.app()
        self.is_done = False
        self.thread = threading.Thread(target=self.decode, daemon=True)
        self.thread.start()

    def decode(self) -> None:
        while not self.is_done:
            self.decoder.step(timeout_s=0.05)

    def client(self) -> openai.AsyncOpenAI:
        transport = httpx2.ASGITransport(app=self.app)
        return openai.AsyncOpenAI(
            base_url="http://server/v1",
            api_key="none",
            max_retries=0,
            http_client=httpx2.AsyncClient(transport=transport),
            _strict_response_validation=True,
        )

    def ask(self, **keys):
        """The answer, or with `stream` its chunks."""

        async def run():
            usual = {"model": "demo", "messages": USER, "temperature": 0, "max_tokens": 200}
            answer = await self.client().chat.completions.create(**usual | keys)
            return [chunk async for chunk in answer] if keys.get("stream") else answer

        return asyncio.run(run())

    def use(self, family: str, *texts: str, thoughts: str = "", prompt: str = "") -> None:
        self.tokenizer.template = template(family, thoughts, prompt)
        self.script.turns = None
        if texts:
            self.script.write(*texts, prompt=prompt)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("tools")
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIALS,
    )
    model.train_from_iterator(['{"name": "add", "arguments": {"a": 1}}'] * 9, trainer)
    model.add_tokens([tokenizers.AddedToken(name, normalized=False) for name in LITERALS])
    model.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<|begin|>", "eos_token": "<|end_of_text|>"})
    )
    server = Server(folder)
    yield server
    server.is_done = True
    server.thread.join(30)


def calls_of(message) -> list[tuple[str, dict]]:
    return [
        (call.function.name, json.loads(call.function.arguments))
        for call in message.tool_calls or []
    ]


def call_text(family: str, name: str, **arguments) -> str:
    call = {"function": {"name": name, "arguments": arguments}}
    message = {"role": "assistant", "tool_calls": [call]}
    return template(family).render([message], False).split(TURN)[1].split("<|end_of_text|>")[0]


@pytest.mark.attack
@pytest.mark.one_in(3, 3)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_reaches_the_client_whole_and_streamed(server, family):
    text = call_text(family, "add", a=5)
    if family == "gpt-oss":
        text = f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{text}"
    server.use(family, text)
    for keys in ({}, {"extra_body": {"draft": False}}):
        (choice,) = server.ask(tools=TOOLS, **keys).choices
        assert calls_of(choice.message) == [("add", {"a": 5})]
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        chunks = server.ask(tools=TOOLS, stream=True, **keys)
        deltas = [chunk.choices[0].delta.model_dump(exclude_none=True) for chunk in chunks]
        message = joined(deltas)
        assert [(name, json.loads(arguments)) for name, arguments in message["calls"]] == [
            ("add", {"a": 5})
        ]
        thought = "Hm." if family == "gpt-oss" else ""
        assert message["content"] == "" and message["reasoning_content"] == thought
        assert getattr(choice.message, "reasoning_content", "") == thought
        reasons = [chunk.choices[0].finish_reason for chunk in chunks]
        assert reasons == [None] * (len(chunks) - 1) + ["tool_calls"]


@pytest.mark.attack
def test_the_clients_own_stream_accumulates_calls(server):
    """The openai package's helper, which parses arguments too."""
    text = call_text("Hermes and Qwen", "add", a=5)
    server.use("Hermes and Qwen", f"First.\n{text}\n{text}")

    async def run():
        options = {"model": "demo", "messages": USER, "tools": TOOLS, "temperature": 0}
        async with server.client().chat.completions.stream(**options) as stream:
            return await stream.get_final_completion()

    (choice,) = asyncio.run(run()).choices
    assert calls_of(choice.message) == [("add", {"a": 5})] * 2
    assert choice.message.content == "First." and choice.finish_reason == "tool_calls"
    assert len({call.id for call in choice.message.tool_calls}) == 2


@pytest.mark.attack
@pytest.mark.one_in(3, 3)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_forced_call_obeys_its_schema_whatever_the_model_prefers(server, family):
    """The model is the demo's with another tokenizer: noise. Greedy answers are equal without a
    draft. Without forcing, the same model calls nothing."""
    server.use(family)
    named = {"type": "function", "function": {"name": "add"}}
    thoughtless = {"separate_reasoning": False}  # noise ends no thoughts
    assert not server.ask(tools=TOOLS, max_tokens=20).choices[0].message.tool_calls
    for choice in ("required", named):
        answers = []
        for keys in ({"temperature": 0}, {"temperature": 1, "seed": 3}, {"temperature": 2}):
            once = {"parallel_tool_calls": False, "tool_choice": choice, "tools": TOOLS}
            (answer,) = server.ask(**keys, **once, extra_body=thoughtless).choices
            answers.append(calls_of(answer.message))
            ((name, arguments),) = answers[-1]
            assert answer.finish_reason == "tool_calls" and answer.message.content is None
            if choice is named or name == "add":
                assert name == "add" and list(arguments) == ["a"] and 0 <= arguments["a"] <= 99
            else:
                assert (name, arguments) == ("now", {})
        plain = server.ask(**once, extra_body=thoughtless | {"draft": False}).choices[0]
        assert calls_of(plain.message) == answers[0]


@pytest.mark.attack
def test_tools_or_a_schema(server):
    """With both, the answer is a call or JSON of the schema, and nothing else."""
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    family = "Hermes and Qwen"
    server.use(family)
    message = server.ask(tools=TOOLS, response_format=form).choices[0].message
    assert message.tool_calls or json.loads(message.content).keys() == {"ok"}
    for text, is_call in ((call_text(family, "now"), True), ('{"ok": true}', False)):
        server.use(family, text)
        message = server.ask(tools=TOOLS, response_format=form).choices[0].message
        assert bool(message.tool_calls) == is_call
        assert message.content == (None if is_call else text)


@pytest.mark.attack
def test_thoughts_that_the_prompt_has_begun(server):
    """They end before a forced call and before JSON of a schema; both are content or call."""
    family = "Hermes and Qwen"
    prompt = "<think>\n"
    call = call_text(family, "now")
    for text, keys, content in (
        (f"Hm.\n</think>\n\n{call}", {"tools": TOOLS, "tool_choice": "required"}, None),
        ('Hm.</think>{"a": 1}', {"response_format": {"type": "json_object"}}, '{"a": 1}'),
        ("Hm.\n</think>\nYes.", {}, "Yes."),
    ):
        server.use(family, text, thoughts="</think>", prompt=prompt)
        message = server.ask(**keys).choices[0].message
        assert message.reasoning_content == "Hm." and message.content == content
        assert bool(message.tool_calls) == ("tools" in keys)
    server.use(family, "<think>a</think>b", thoughts="</think>")
    whole = server.ask(extra_body={"reasoning_format": "none"}).choices[0].message
    assert whole.content == "<think>a</think>b" and not hasattr(whole, "reasoning_content")


@pytest.mark.attack
def test_an_answer_that_ends_inside_a_call_says_so(server):
    server.use("Hermes and Qwen", call_text("Hermes and Qwen", "add", a=5))
    whole = server.ask(tools=TOOLS).choices[0].message.tool_calls[0].function.arguments
    for limit in range(1, 40):
        choice = server.ask(tools=TOOLS, max_tokens=limit).choices[0]
        if choice.message.tool_calls:
            assert whole.startswith(choice.message.tool_calls[0].function.arguments)
        if choice.finish_reason == "tool_calls":
            break
        assert choice.finish_reason == "length"
    assert choice.finish_reason == "tool_calls"


@pytest.mark.attack
@pytest.mark.one_in(3, 3)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_forced_call_that_the_limit_cuts_is_no_text_and_goes_back(server, family):
    """Whatever the limit, an answer that has to be a call has no other text, and its message goes
    back to the server with the next request, with arguments that end in the middle."""
    text = call_text(family, "add", a=5)
    num_broken = 0
    for limit in range(1, 100, 4):
        server.use(family, text)
        keys = {"tools": TOOLS, "tool_choice": "required", "max_tokens": limit}
        choice = server.ask(**keys).choices[0]
        assert not choice.message.content, limit
        chunks = server.ask(stream=True, **keys)
        assert not any(chunk.choices[0].delta.content for chunk in chunks), limit
        if choice.finish_reason == "tool_calls":
            break
        assert choice.finish_reason == "length"
        num_broken += bool(choice.message.tool_calls)
        history = [*USER, choice.message.model_dump(exclude_none=True)]
        if choice.message.tool_calls:
            server.script.write("x")
            assert server.ask(messages=history, tools=TOOLS, max_tokens=2).choices
    assert choice.finish_reason == "tool_calls" and num_broken


@pytest.mark.attack
@pytest.mark.one_in(3, 3)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_agent_calls_a_tool_and_reads_its_result(server, family):
    """pydantic-ai against a model that calls, and then answers; whole and streamed."""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    ending = "<|channel|>final<|message|>Six." if family == "gpt-oss" else "Six."
    server.use(family, call_text(family, "add", a=5), ending)
    received = []
    provider = OpenAIProvider(openai_client=server.client())
    agent = Agent(OpenAIChatModel("demo", provider=provider))

    @agent.tool_plain
    def add(a: int) -> int:
        received.append(a)
        return a + 1

    async def run() -> list[str]:
        whole = await agent.run("Hi")
        async with agent.run_stream("Hi") as result:
            return [whole.output, await result.get_output()]

    assert asyncio.run(run()) == ["Six.", "Six."] and received == [5, 5]


@pytest.mark.attack
def test_tools_that_cannot_work_are_refused_with_what_would(server):
    server.use("Hermes and Qwen")
    wrong = {
        "another name": {"tool_choice": {"type": "function", "function": {"name": "g"}}},
        "no tools": {"tools": openai.NOT_GIVEN, "tool_choice": "required"},
        "another type": {"tools": [{"type": "custom", "custom": {"name": "f"}}]},
        "a name with quotes": {"tools": [{"type": "function", "function": {"name": 'f"'}}]},
        "a broken schema": {
            "tools": [
                {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}
            ],
            "response_format": {"type": "json_object"},
        },
        "another choice": {"tool_choice": "sometimes"},
    }
    for name, keys in wrong.items():
        with pytest.raises(openai.BadRequestError) as error:
            server.ask(**{"tools": TOOLS, **keys})
        assert error.value.param in ("tools", "tool_choice"), name
    for source in ("{{ messages[0].content }}{{ tools }}", "{{ messages[0].content }}", None):
        server.tokenizer.template = source and ChatTemplate(source, {})
        for keys in ({}, {"tool_choice": "required"}):
            with pytest.raises(openai.BadRequestError, match="response_format") as error:
                server.ask(tools=TOOLS, **keys)
            assert error.value.param == "tools"
        server.script.write("x")
        assert server.ask(tools=TOOLS, tool_choice="none", max_tokens=2).choices
