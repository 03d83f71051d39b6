"""How one request's answers are read and forced: its tools, in the format of the model's chat
template.

    MessageForm         the marks to read an answer by, and its grammar
"""

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from decoding.errors import UserError
from decoding.grammar import Grammar, JsonGrammars
from loading.tokenizer import Tokenizer
from scripts.serve.message_parser import MessageParser
from scripts.serve.openai_form import Refusal, TextRequest, Tool
from scripts.serve.tool_calls import CALL_FORMATS, THOUGHTS, answer_grammar, calls_rule, json_rule

PROMPT_END = 16  # tokens, in which a template may begin thoughts

NO_CALLS = (
    "tools: this server reads no calls of the model's chat template. It reads those of"
    f" {', '.join(form.family for form in CALL_FORMATS)}; JSON of a schema works with every model"
    " (response_format, or text.format of /v1/responses), and tool_choice none leaves tools out"
)


def schemas_by_name(tools: Iterable[Tool]) -> dict[str, dict]:
    """The schemas of functions' arguments."""
    return {tool.function.name: tool.function.schema for tool in tools}


class MessageForm:
    """Refusal for tools whose calls could not be read. `visible`: special tokens that are part of
    the answers' text, because marks hold them."""

    def __init__(self, request: TextRequest, tokenizer: Tokenizer):
        self.request = request
        self.tokenizer = tokenizer
        template = tokenizer.template if request.chat else None
        source = "" if template is None else template.select(request.tools).source
        self.calls = None
        if request.tools:
            self.calls = next((form for form in CALL_FORMATS if re.search(form.key, source)), None)
            if self.calls is None:
                raise Refusal(NO_CALLS, "tools")
        self.thoughts = None
        if request.separate_reasoning:
            self.thoughts = next((form for form in THOUGHTS if form.key in source), None)
        self.marks = defaultdict(dict)
        for form in (self.calls, self.thoughts):
            for mode, marks in form.marks.items() if form else ():
                self.marks[mode].update(marks)
        patterns = " ".join(itertools.chain(*self.marks.values()))
        self.visible = [name for name in tokenizer.specials if name in patterns]
        self.is_thinking = False  # has the prompt begun the answer's thoughts?

    def read_prompt(self, ids: Sequence[int]) -> None:
        """Set is_thinking."""
        stream = self.tokenizer.stream(visible=self.visible)
        end = "".join(map(stream.feed, ids[-PROMPT_END:])).rstrip()
        self.is_thinking = self.thoughts is not None and end.endswith(self.thoughts.begin)

    def parser(self) -> MessageParser:
        """A parser of one answer."""
        max_calls = math.inf if self.request.parallel_tool_calls else 1
        is_forced = bool(self.request.forced_tools)
        schemas = schemas_by_name(self.request.tools or ())
        return MessageParser(self.marks, self.is_thinking, max_calls, is_forced, schemas)

    def grammar(self, grammars: JsonGrammars) -> Grammar:
        """The grammar of the calls that tool_choice forces, or of a response_format, in place of
        which the tools may be called. UserError for a schema that cannot be obeyed."""
        request = self.request
        tools = request.forced_tools
        rules = []
        if not tools:
            schema = request.response_format
            tools = request.tools
            if not tools and not self.is_thinking:
                return grammars.compile(schema)
            rules.append(json_rule(schema))
        specials = self.tokenizer.specials
        if tools:
            schemas = schemas_by_name(tools)
            try:
                rules.append(calls_rule(self.calls, schemas, request.is_parallel, specials))
            except UserError as error:
                logged = "tools: the schema cannot be obeyed"
                raise Refusal(f"tools: {error}", "tools", logged=logged) from None
        value_end = self.calls.value_end if tools else ""
        rule = " | ".join(rules)
        source = answer_grammar(self.thoughts, rule, self.is_thinking, specials, value_end)
        return grammars.compile_lark(source)
