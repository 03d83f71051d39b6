"""Chat templates: jinja programs that strangers wrote, rendered in a process of their own.

    ChatTemplate   a folder's template; `render` gives a conversation's text
    serve          what the process does: `python loading/chat_templates.py`

jinja's sandbox bounds what a template may touch. The process bounds what it may spend: time, memory and files.
This file knows no tokens, and no other file of the project, so that the process starts quickly.
"""

import contextlib
import datetime
import functools
import json
import sys
import threading
from subprocess import DEVNULL, PIPE, Popen

import jinja2
import jinja2.debug  # imported with a template's first error otherwise, when no file can be opened any more
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

TEMPLATE_S, TEMPLATE_MB = 5, 512
LONGEST_ADDITION = 2**22  # characters that a template writes besides its request, which it may write 16 times


class Generation(Extension):  # {% generation %} marks what training learns. Decoding takes its body as it is.
    tags = {"generation"}  # noqa: RUF012, jinja's protocol

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


def raise_exception(message: str):
    raise jinja2.TemplateError(message)


# The sandbox, with the names that transformers gives templates.
ENVIRONMENT = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
ENVIRONMENT.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
ENVIRONMENT.globals["raise_exception"] = raise_exception
ENVIRONMENT.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)


class ChatTemplate:
    """tool_source: the template of conversations with tools, where a folder has one of its own."""

    def __init__(self, source: str, names: dict[str, str], tool_source: str | None = None):
        self.source, self.names, self.tool_source = source, names, tool_source  # names: bos_token and such, as texts
        try:
            for part in filter(None, (source, tool_source)):
                ENVIRONMENT.parse(part)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ValueError(f"the chat template is broken: {one_line(error)}") from None

    def source_for(self, tools: list | None) -> str:
        return self.source if tools is None or self.tool_source is None else self.tool_source

    def render(self, messages: list[dict], add_generation_prompt: bool, tools: list | None = None, **names) -> str:
        """A conversation's text. `names`: what else the template may ask for, such as enable_thinking."""
        flags = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        request = json.dumps([self.source_for(tools), {"documents": None, **self.names, **names, **flags}])
        server, answer = process(), None
        watch = threading.Timer(TEMPLATE_S, server.kill)
        watch.start()
        try:
            server.stdin.write(request.encode() + b"\n")
            server.stdin.flush()
            answer = json.loads(server.stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError):
            raise ValueError(f"the chat template took more than {TEMPLATE_S} s or {TEMPLATE_MB} MB") from None
        finally:
            watch.cancel()
            if answer is None:  # killed, or Ctrl-C: a late answer must not meet the next request
                server.kill()
                server.wait()
                process.cache_clear()
        if "error" in answer:
            raise ValueError(f"the chat template refused the messages: {answer['error']}")
        return answer["text"]


@functools.cache
def process() -> Popen:
    """Where templates run, from the first conversation on. Ctrl-C does not reach it."""
    return Popen([sys.executable, "-P", __file__], stdin=PIPE, stdout=PIPE, stderr=DEVNULL, start_new_session=True)


def serve() -> None:
    """Answer requests on stdin, [template, names], by {"text"} or {"error"}: a line of JSON each."""
    template_of = functools.lru_cache(8)(ENVIRONMENT.from_string)
    template_of("{{ strftime_now('%Y') }}").render()  # jinja and the clock open their files now
    with contextlib.suppress(ImportError, ValueError, OSError):  # a system without these limits has the time's
        import resource

        for kind, most in (("FSIZE", 0), ("NOFILE", 3), ("AS", TEMPLATE_MB * 2**20)):
            resource.setrlimit(getattr(resource, f"RLIMIT_{kind}"), (most, most))
    for line in sys.stdin:
        try:
            source, names = json.loads(line)
            answer = {"text": template_of(source).render(names)}
            if len(answer["text"]) > LONGEST_ADDITION + 16 * len(line):
                answer = {"error": f"it writes {len(answer['text'])} characters"}
        except Exception as error:  # a template can cause any
            answer = {"error": one_line(error)}
        print(json.dumps(answer), flush=True)


def one_line(error: Exception) -> str:
    """An error's message, or else its kind, on one line of bounded length."""
    text = "".join(char if char.isprintable() else " " for char in str(error)[:1000])
    return " ".join(text.split())[:500] or type(error).__name__


if __name__ == "__main__":
    serve()
