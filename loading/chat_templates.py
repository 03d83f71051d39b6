"""Chat templates: jinja programs of a model's folder, rendered in jinja's sandbox as in
transformers.

load_chat_template   the template of a folder
ChatTemplate         `render` returns a conversation's text; what a template reads: roles, parts,
                     variables
ENVIRONMENT          the sandbox with transformers' extensions, filters and functions
"""

import datetime
import json
from collections.abc import Callable
from pathlib import Path

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from decoding.errors import UserError
from loading.chat_messages import (
    LossError,
    Watched,
    check_read,
    is_shown,
    join_parts,
    keep_parts,
    split_parts,
    with_more,
)
from loading.plain_files import (
    error_prefix,
    file_exists,
    one_line,
    read_json,
    read_plain,
    short_repr,
    utf8_text,
)

# Keys of a message that hold thoughts, in transformers' order.
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
ALWAYS_GIVEN = ("messages", "tools", "add_generation_prompt")
ROLES = ("system", "developer", "user", "assistant", "tool", "ipython", "function")


class Generation(Extension):
    """{% generation %} … {% endgeneration %}, which marks text to train on. Rendering keeps the
    body, whose variables end with it, as in transformers."""

    tags = {"generation"}  # noqa: RUF012, jinja's protocol

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.Scope(body, lineno=line)


def raise_exception(message: str):
    raise jinja2.TemplateError(message)


def strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
)
ENVIRONMENT.filters["tojson"] = tojson
ENVIRONMENT.globals["raise_exception"] = raise_exception
ENVIRONMENT.globals["strftime_now"] = strftime_now


class ChatTemplate:
    """A folder's chat template.

    `variables`: texts for it, such as bos_token. `for_tools`: another template for conversations
    with tools.
    """

    def __init__(
        self, source: str, variables: dict[str, str], for_tools: "ChatTemplate | None" = None
    ):
        self.source = source
        self.variables = variables
        self.for_tools = for_tools
        if not isinstance(source, str):
            raise UserError(f"the chat template is no text, but {short_repr(source)}")
        try:
            tree = ENVIRONMENT.parse(source)
            constants = [constant.value for constant in tree.find_all(nodes.Const)]
            self.program = ENVIRONMENT.from_string(source)
            self.names_read = meta.find_undeclared_variables(tree)
        except Exception as error:  # of jinja's classes, or what Python raises for its code
            raise UserError(
                f"the chat template is broken: {one_line(error)}; --chat_template"
                " FILE gives another"
            ) from None
        self.roles = [role for role in ROLES if role in constants]
        self.developer = "developer" if "developer" in self.roles else "system"
        self.content_form = content_form(tree)

    def select(self, tools: list | None) -> "ChatTemplate":
        """The template for a conversation with these tools."""
        return self if tools is None or self.for_tools is None else self.for_tools

    def check_request(self, tools: list | None, variables: dict) -> None:
        """UserError for tools and for variables that the template does not read."""
        if tools and "tools" not in self.source:
            raise UserError(
                "the chat template does not mention tools; give one that does as --chat_template"
                " FILE"
            )
        unused = sorted(variables.keys() - self.names_read)
        if unused:
            readable = sorted(self.names_read - self.variables.keys() - set(ALWAYS_GIVEN))
            raise UserError(
                f"chat_template_kwargs: the chat template does not read {', '.join(unused):.200};"
                f" it reads {', '.join(readable) or 'none':.500}"
            )

    def render(
        self,
        messages: list[dict],
        add_generation_prompt: bool,
        tools: list | None = None,
        **variables,
    ) -> str:
        """A conversation's text. `variables`: more of the template's, such as enable_thinking.
        UserError if the template raises an error, or leaves out a message or a call."""
        watched = [Watched(fill_thoughts(message)) for message in messages]
        variables = {
            "documents": None,
            **self.variables,
            **variables,
            "messages": watched,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self.program.render(variables)
        except Exception as error:  # a template can raise any
            raise UserError(f"the chat template refused the messages: {one_line(error)}") from None
        check_read(watched, self.roles)
        for number, message in enumerate(messages):
            if message.get("role") != "assistant" and not is_shown(message, text):
                self.check_shown(number, text, variables)
            content = message.get("content")
            # Where only users' parts are kept, and the next form has text (`message_forms`).
            has_parts = self.content_form is keep_parts and isinstance(content, list)
            if has_parts and any(str(part) in text for part in content):
                raise LossError(f"messages[{number}]: the chat template takes text, no parts")
        return text

    def check_shown(self, number: int, text: str, variables: dict) -> None:
        """UserError if the conversation's text stays the same when this message has another
        content: the template reads it, and drops it."""
        messages = [dict(message) for message in variables["messages"]]
        messages[number]["content"] = with_more(messages[number]["content"])
        try:
            changed_text = self.program.render(variables | {"messages": messages})
        except Exception:
            return
        if changed_text == text:
            role = messages[number].get("role")
            raise LossError(
                f"messages[{number}], role {short_repr(role)}: the chat template leaves out its"
                f" content; the roles that it knows: {', '.join(self.roles)}"
            )


def content_form(tree: nodes.Template) -> Callable[[object], object]:
    """How a template reads a message's content, which may be a text or a list of parts: it loops
    over parts, and may take texts too where it asks whether the content is one."""
    if not any(is_content(loop.iter) for loop in tree.find_all(nodes.For)):
        return join_parts
    if any(test.name == "string" and is_content(test.node) for test in tree.find_all(nodes.Test)):
        return keep_parts
    return split_parts


def is_content(node: nodes.Node) -> bool:
    """Is this expression a message's content, perhaps filtered?"""
    while isinstance(node, nodes.Filter):  # such as content | selectattr("type", "equalto", "text")
        node = node.node
    match node:
        case nodes.Getitem(arg=nodes.Const(value="content")):
            return True
        case nodes.Getattr(attr="content") | nodes.Name(name="content"):
            return True
    return False


def fill_thoughts(message: dict) -> dict:
    """The message with its thoughts under the keys that templates read, as in transformers:
    reasoning_content, and thinking for gpt-oss."""
    thoughts = next((message[key] for key in THOUGHTS if message.get(key) is not None), None)
    if thoughts is None:
        return message
    return {"thinking": thoughts, **message, "reasoning_content": thoughts}


def load_chat_template(
    folder: Path, tokenizer_config: dict, variables: dict[str, str]
) -> ChatTemplate | None:
    """The template in chat_template.jinja, tokenizer_config.json or chat_template.json, with the
    one for tools called "tool_use", which serves for all if it is the only one, as in llama.cpp.
    UserError names a file that cannot be read."""
    file = folder / "chat_template.jinja"
    if file_exists(file):
        tool_file = folder / "additional_chat_templates" / "tool_use.jinja"
        sources = {"default": read_source(file), "tool_use": read_source(tool_file)}
    else:
        file = folder / "tokenizer_config.json"
        sources = tokenizer_config.get("chat_template")
        if sources is None:  # the older file of models with a processor, such as mistral3
            file = folder / "chat_template.json"
            sources = read_json(file).get("chat_template")
        if isinstance(sources, list):
            if not all(map(is_named_template, sources)):
                raise UserError(f"{file}: chat_template must be a text, or named templates")
            sources = {entry["name"]: entry["template"] for entry in sources}
        if not isinstance(sources, dict):
            sources = {"default": sources}
    tool_source = sources.get("tool_use")
    source = sources.get("default", tool_source)
    if source is None:
        return None
    with error_prefix(file):
        for_tools = ChatTemplate(tool_source, variables) if tool_source else None
        return ChatTemplate(source, variables, for_tools)


def is_named_template(entry: object) -> bool:
    match entry:
        case {"name": str(), "template": _}:
            return True
    return False


def read_chat_template(file: Path, variables: dict[str, str]) -> ChatTemplate:
    """The template of one file. UserError names a file that is missing or cannot be read."""
    source = read_source(file)
    if source is None:
        raise UserError(f"{file}: no such file")
    with error_prefix(file):
        return ChatTemplate(source, variables)


def read_source(file: Path) -> str | None:
    """A template's text; None without the file."""
    if not file_exists(file):
        return None
    content = read_plain(file)
    with error_prefix(file):
        return utf8_text(content).replace("\r\n", "\n")
