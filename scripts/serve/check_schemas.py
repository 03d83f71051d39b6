"""Can llguidance follow a grammar to its end? Its words on stdout if it cannot, else nothing.

`python -m scripts.serve.check_schemas <GRAMMAR`: a process of its own, which serve.py ends when
it takes too long, since the library cannot be interrupted. GRAMMAR is as JsonGrammars.from_source
has it. A limit of the library that an answer would reach inside of an object or an array is found
by beginning an answer with each large one. The tokens are bytes, because limits do not depend on
them. This file needs no torch, whose import takes seconds.
"""

import json
import re
import sys
from collections.abc import Iterator

from llguidance import LLMatcher, LLTokenizer

MIN_LARGE = 100  # members; the library's limits allow some hundred
# Where a schema has schemas: by name, in a list, or one alone.
SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
SCHEMA_KEYS = ("items", "additionalProperties")


def schemas_of(source: str) -> list[dict]:
    """The JSON schemas of a grammar."""
    try:
        return [grammar["json_schema"] for grammar in json.loads(source)["grammars"]]
    except ValueError:  # a text with %json in it
        decoder = json.JSONDecoder()
        return [
            decoder.raw_decode(source, match.end())[0] for match in re.finditer("%json ", source)
        ]


def large_parts(schema: object, pointer: str = "") -> Iterator[str]:
    """JSON pointers to the schemas inside of this one that have many members."""
    if not isinstance(schema, dict):
        return
    is_large = False
    for key, value in schema.items():
        children = {}
        if key in SCHEMAS_BY_NAME and isinstance(value, dict):
            children = value
        elif key in SCHEMA_LISTS and isinstance(value, list):
            children = dict(enumerate(value))
        elif key in SCHEMA_KEYS:
            yield from large_parts(value, f"{pointer}/{key}")
        is_large |= len(children) >= MIN_LARGE
        for name, child in children.items():
            escaped = str(name).replace("~", "~0").replace("/", "~1")
            yield from large_parts(child, f"{pointer}/{key}/{escaped}")
    if is_large:
        yield pointer


def rooted(schema: object, pointer: str) -> object:
    """A schema whose references begin at `pointer`."""
    if isinstance(schema, list):
        return [rooted(item, pointer) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: rooted(value, pointer) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = f"#{pointer}{reference[1:]}"
    return moved


def first_error(matcher: LLMatcher, tokenizer: LLTokenizer) -> str:
    """The error at the beginning of an answer, of an object's or of an array's members."""
    matcher.compute_bitmask()
    for text in ("", "{", "["):
        begun = matcher.deep_copy()
        begun.try_consume_tokens(tokenizer.tokenize_str(text))
        begun.compute_bitmask()
        if begun.is_error():
            return begun.get_error()
    return ""


def check(source: str) -> str:
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, source, log_level=0)
    error = matcher.get_error() or first_error(matcher, tokenizer)
    for schema in schemas_of(source):
        moved = rooted(schema, "/$defs/all")
        for pointer in large_parts(schema):
            if error:
                return error
            part = {"$defs": {"all": moved}, "$ref": f"#/$defs/all{pointer}"}
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(part))
            matcher = LLMatcher(tokenizer, grammar, log_level=0)
            if not matcher.is_error():  # one of this part alone is none of the whole
                error = first_error(matcher, tokenizer)
    return error


if __name__ == "__main__":
    print(check(sys.stdin.read()), end="")
