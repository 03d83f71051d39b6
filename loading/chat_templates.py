"""Chat templates: untrusted jinja programs, rendered in a child process.

    ChatTemplate   a folder's template; `render` returns a conversation's text
    TemplateLimit  the error of a template that exceeds its time or memory
    reads_parts    whether a template reads a message's content as a list
    variables_of   the variables that a template reads, for a message
    serve          the child process: `python loading/chat_templates.py`

jinja's sandbox restricts a template's access. Only a separate process can limit its time and memory, because a single
expression can exhaust either within one call to C. This file imports no other of the project, so that it starts fast.
"""

import contextlib
import datetime
import functools
import json
import sys
import threading
from collections.abc import Iterator
from subprocess import DEVNULL, PIPE, Popen

import jinja2
import jinja2.debug  # now, because at a template's first error no file can be opened any more
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_SECONDS, MAX_MB = 5, 512
MAX_ADDED_CHARS = 2**22  # a rendered text has at most 16 times the characters of its request, and these
THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # keys of a message, as in transformers, which has this order
ALWAYS_GIVEN = ("messages", "tools", "add_generation_prompt")
ROLES = ("system", "developer", "user", "assistant", "tool", "ipython", "function")


class Generation(Extension):
    """{% generation %} … {% endgeneration %}, which marks text to train on. Rendering keeps the body, whose variables
    end with it, as in transformers."""

    tags = {"generation"}  # noqa: RUF012, jinja's protocol

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.Scope(body, lineno=line)


def raise_exception(message: str):
    raise jinja2.TemplateError(message)


# The sandbox, with transformers' extensions, filters and functions.
ENVIRONMENT = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
ENVIRONMENT.filters["tojson"] = lambda value, ensure_ascii=False, indent=None, separators=None, sort_keys=False: (
    json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
)
ENVIRONMENT.globals["raise_exception"] = raise_exception
ENVIRONMENT.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)


class TemplateLimit(ValueError):
    """The error of a template that exceeds its time or memory."""


class ChatTemplate:
    """A folder's chat template.

    `variables`: texts for it, such as bos_token. `tool_source`: a template for conversations with tools.
    """

    def __init__(self, source: str, variables: dict[str, str], tool_source: str | None = None):
        self.source = source
        self.variables = variables
        self.tool_source = tool_source
        self.part_readers: set[str] = set()  # those of the sources that read a content as a list
        self.words: dict[str, set[str]] = {}  # source -> its texts in quotation marks
        self.names: dict[str, set[str]] = {}  # source -> the variables that it reads
        try:
            for part in (source, tool_source):
                if not part:
                    continue
                tree = ENVIRONMENT.parse(part)
                self.words[part] = {node.value for node in walk(tree) if is_text(node)}
                self.names[part] = variables_of(tree)
                if reads_parts(tree):
                    self.part_readers.add(part)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ValueError(f"the chat template is broken: {one_line(error)}") from None

    def source_for(self, tools: list | None) -> str:
        return self.source if tools is None or self.tool_source is None else self.tool_source

    def roles(self, tools: list | None = None) -> list[str]:
        """The roles that the template mentions."""
        words = self.words.get(self.source_for(tools), ())
        return [role for role in ROLES if role in words]

    def check_request(self, tools: list | None, variables: dict) -> None:
        """ValueError for tools and for variables that the template does not read."""
        source = self.source_for(tools)
        if tools and "tools" not in source:
            raise ValueError("the chat template does not mention tools")
        unread = sorted(variables.keys() - self.names[source])
        if unread:
            others = sorted(self.names[source] - self.variables.keys() - set(ALWAYS_GIVEN))
            raise ValueError(
                f"chat_template_kwargs: the chat template does not read {', '.join(unread):.200}; it reads"
                f" {', '.join(others) or 'none':.500}"
            )

    def render(self, messages: list[dict], add_generation_prompt: bool, tools: list | None = None, **variables) -> str:
        """A conversation's text. `variables`: more of the template's, such as enable_thinking. ValueError if the
        template raises an error, TemplateLimit if it exceeds its time or memory."""
        with_thoughts = [fill_thoughts(message) for message in messages]
        arguments = {"messages": with_thoughts, "tools": tools, "add_generation_prompt": add_generation_prompt}
        request = json.dumps([self.source_for(tools), {"documents": None, **self.variables, **variables, **arguments}])
        process, answer = renderer(), None
        timer = threading.Timer(MAX_SECONDS, process.kill)
        timer.start()
        try:
            process.stdin.write(request.encode() + b"\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError):
            raise TemplateLimit(f"the chat template took more than {MAX_SECONDS} s or {MAX_MB} MB") from None
        finally:
            timer.cancel()
            if answer is None:  # after a kill or Ctrl-C: the next request must not read a late answer
                process.kill()
                process.wait()
                renderer.cache_clear()
        if "error" in answer:
            raise ValueError(f"the chat template refused the messages: {answer['error']}")
        return answer["text"]


def reads_parts(tree: nodes.Template) -> bool:
    """Whether a template loops over a message's content, which may then be a list of parts."""

    def is_content(node: nodes.Node) -> bool:
        while isinstance(node, nodes.Filter):  # such as content | selectattr("type", "equalto", "text")
            node = node.node
        name = node.arg.value if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) else None
        return "content" in (name, getattr(node, "attr", None), getattr(node, "name", None))

    return any(isinstance(node, nodes.For) and is_content(node.iter) for node in walk(tree))


def walk(tree: nodes.Template) -> Iterator[nodes.Node]:
    """Every node of a template, without recursion: it may nest deeply."""
    remaining = [tree]
    while remaining:
        node = remaining.pop()
        yield node
        remaining += node.iter_child_nodes()


def is_text(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Const) and isinstance(node.value, str)


def is_name(node: nodes.Node, *contexts: str) -> bool:
    """Is this a variable that is loaded, stored or a parameter?"""
    return isinstance(node, nodes.Name) and node.ctx in contexts


def variables_of(tree: nodes.Template) -> set[str]:
    """The variables that a template reads and does not set, or sets unless they are given.

    jinja2.meta knows them better, but generates code for that, which computes every constant expression: a template
    could exhaust this process's time or memory."""
    names = set()
    local = {"loop", "caller", "varargs", "kwargs"}
    optional = set()
    for node in walk(tree):
        if is_name(node, "load"):
            names.add(node.name)
        elif is_name(node, "store", "param") or isinstance(node, nodes.Macro):
            local.add(node.name)
        elif is_optional(node):
            optional.add(node.node.name)
    return (names - local | optional) - ENVIRONMENT.globals.keys()


def is_optional(node: nodes.Node) -> bool:
    """Is this a variable's default, or a test whether it is given?"""
    is_test = isinstance(node, nodes.Test) and node.name in ("defined", "undefined")
    is_default = isinstance(node, nodes.Filter) and node.name in ("default", "d")
    return (is_test or is_default) and is_name(node.node, "load")


def fill_thoughts(message: dict) -> dict:
    """The message with its thoughts under the keys that templates read, as in transformers: reasoning_content, and
    thinking for gpt-oss."""
    thoughts = next((message[key] for key in THOUGHTS if message.get(key) is not None), None)
    if thoughts is None:
        return message
    return {"thinking": thoughts, **message, "reasoning_content": thoughts}


@functools.cache
def renderer() -> Popen:
    """The child process, started for the first conversation. Ctrl-C does not reach it."""
    return Popen([sys.executable, "-P", __file__], stdin=PIPE, stdout=PIPE, stderr=DEVNULL, start_new_session=True)


def serve() -> None:
    """Answer requests [template, variables] on stdin by {"text"} or {"error"} on stdout, a line of JSON each."""
    compile_template = functools.lru_cache(8)(ENVIRONMENT.from_string)
    compile_template("{{ strftime_now('%Y') }}").render()  # jinja and the clock open their files now
    with contextlib.suppress(ImportError, ValueError, OSError):  # some systems lack these limits; the time's stays
        import resource

        for name, limit in (("FSIZE", 0), ("NOFILE", 3), ("AS", MAX_MB * 2**20)):
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    for line in sys.stdin:
        try:
            source, variables = json.loads(line)
            answer = {"text": compile_template(source).render(variables)}
            if len(answer["text"]) > MAX_ADDED_CHARS + 16 * len(line):
                answer = {"error": f"it writes {len(answer['text'])} characters"}
        except Exception as error:  # a template can raise any
            answer = {"error": one_line(error)}
        print(json.dumps(answer), flush=True)


def one_line(error: Exception) -> str:
    """An error's message, or its class if it has none, on one line of up to 500 characters."""
    text = "".join(char if char.isprintable() else " " for char in str(error)[:1000])
    return " ".join(text.split())[:500] or type(error).__name__


if __name__ == "__main__":
    serve()
