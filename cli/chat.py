"""--interactive: turns from stdin, answers on stdout. This file knows no model and no sampling.

chat            answer turn after turn
Conversation    the messages so far; it drops the oldest turns when the context is full
read_message    a message of one or more lines
line_history    line editing, with the messages of earlier runs
"""

import argparse
import contextlib
import io
import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from cli.answers import DIM, END_COLOUR, Answer
from cli.errors import print_error
from cli.prompts import DEFAULT_NEW_TOKENS, Request, conversation_ids, template_kwargs
from cli.report import RowStatistics, decided, rate
from cli.session import Session

HELP = """/reset      start a new conversation
/undo       forget the last message and its answer
/retry      answer the last message again
/save FILE  append the conversation to FILE, a line of JSON
/help       this list
/exit       end the chat, as end of file does
//TEXT      a message that begins with /
Blank lines are skipped. A line that ends in \\ continues in the next one; a paste of several lines is one message.
Ctrl-C ends an answer, not the chat. At the prompt it clears the line; twice at an empty line ends the chat.
When the context is full, the oldest turns are dropped."""
HISTORY = "~/.quickdraft_history"
MAX_HISTORY = 1000  # messages


def on_terminal() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def has_colours(stream) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR")


def line_editor() -> ModuleType | None:
    """The module behind input(), with which a terminal takes more than 4,095 bytes a line; a Python may lack it."""
    try:
        import readline
    except ImportError:
        return None
    return readline


@contextlib.contextmanager
def line_history() -> Iterator[None]:
    """Line editing on a terminal, with a history that the next run reads. The variable QUICKDRAFT_HISTORY names its
    file instead of HISTORY; an empty one stores no line."""
    file = os.path.expanduser(os.environ.get("QUICKDRAFT_HISTORY", HISTORY))
    editor = line_editor()
    if editor is None or not on_terminal():
        yield
        return
    editor.parse_and_bind("set enable-bracketed-paste on")
    editor.set_auto_history(False)  # it would add a message of several lines line by line: see `remember`
    for message in read_history(file):
        editor.add_history(message)
    try:
        yield
    finally:
        count = editor.get_current_history_length()
        messages = [editor.get_history_item(number) for number in range(1, count + 1)]
        if file:
            write_history(file, messages[-MAX_HISTORY:])


def read_history(file: str) -> list[str]:
    """The messages of a file of history, which writes a message of several lines as it may be typed: each line but the
    last ends in a backslash. The first run has no file."""
    try:
        text = Path(file).read_text(encoding="utf-8", errors="surrogateescape") if file else ""
    except OSError:
        return []
    lines = text.replace("\0", "").replace("\\\n", "\0").split("\n")  # no message holds a NUL
    return [line.replace("\0", "\n") for line in lines if line]


def write_history(file: str, messages: list[str]) -> None:
    lines = [message.replace("\n", "\\\n") + "\n" for message in messages]
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w", encoding="utf-8", errors="surrogateescape") as stream:
            stream.writelines(lines)
    except OSError as error:
        print_error(f"QUICKDRAFT_HISTORY {file}: the lines of this chat are not stored: {error.strerror}")


def remember(message: str) -> None:
    """Add a message to those that the arrow keys bring back."""
    editor = line_editor()
    if editor is None or not on_terminal() or not message.strip():
        return
    count = editor.get_current_history_length()
    if count == 0 or editor.get_history_item(count) != message:
        editor.add_history(message)


def read_line(prompt: str = "> ") -> str | None:
    """The next line without its end; None at the end of stdin. The prompt goes to stderr."""
    if not on_terminal():
        print(prompt, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        return line.strip("\ufeff\r\n") if line else None
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)  # readline writes to file descriptor 1, which is for answers alone
    try:
        return input(prompt)
    except EOFError:
        print(file=sys.stderr)
        return None
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def read_lines(lines: list[str]) -> str | None:
    """A line, and on a terminal the lines that follow a \\ at its end; None at the end of stdin. `lines` receives those
    that are complete."""
    line = read_line()
    while line is not None and on_terminal() and line.endswith("\\"):
        lines.append(line[:-1])
        line = read_line("… ")
    if line is None and not lines:
        return None
    return "\n".join([*lines, line or ""])


def read_message() -> str | None:
    """The next message; None at the end of stdin. On a terminal Ctrl-C clears what has been typed, as in Python; a
    second one at an empty line is raised."""
    was_empty = False
    while True:
        lines: list[str] = []
        try:
            message = read_lines(lines)
            remember(message or "")
            return message
        except KeyboardInterrupt:
            editor = line_editor() if on_terminal() else None
            is_empty = not lines and (editor is None or not editor.get_line_buffer())
            if not sys.stdin.isatty():
                raise
            print(file=sys.stderr)
            if is_empty and was_empty:
                raise
            if is_empty:
                print("Ctrl-C again, or /exit, ends the chat", file=sys.stderr)
            was_empty = is_empty


class Conversation:
    """The messages of a chat. `prompt` encodes them for a context of `limit` positions."""

    def __init__(self, session: Session, args: argparse.Namespace):
        self.args, self.tokenizer, self.ranks = args, session.tokenizer, session.engine.ranks
        self.limit = session.engine.max_seq_length
        self.opening = [{"role": "system", "content": args.system}] if args.system else []
        self.reset()
        # Now, not at the first message: ValueError for a --system, tools or variables that the template does not read.
        self.encode(self.opening, "Hello")

    def reset(self) -> None:
        self.messages = list(self.opening)
        self.has_dropped = False

    def num_questions(self) -> int:
        return (len(self.messages) - len(self.opening)) // 2

    def take_back(self) -> str | None:
        """Remove the last message and its answer. Returns the message, or None if there is none."""
        if not self.num_questions():
            print("there is no message before this one", file=sys.stderr)
            return None
        question, _ = self.messages[-2:]
        del self.messages[-2:]
        return question["content"]

    def save(self, file: str) -> None:
        if self.ranks.rank:
            return
        if not file:
            print_error("/save needs the name of a file: /save FILE appends the conversation to it")
            return
        if not self.num_questions():
            print("there is no message to save yet", file=sys.stderr)
            return
        try:
            with Path(file).expanduser().open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({"messages": self.messages}, ensure_ascii=False) + "\n")
            print(f"saved to {file}", file=sys.stderr)
        except OSError as error:
            print_error(f"/save {file}: {error.strerror}")
        except (ValueError, RuntimeError) as error:  # of names that no file can have
            print_error(f"/save {file!r}: {error}")

    def encode(self, messages: list[dict], text: str) -> list[int]:
        conversation = [*messages, {"role": "user", "content": text}]
        return self.ranks.broadcast_object(conversation_ids(self.tokenizer, conversation, **template_kwargs(self.args)))

    def prompt(self, text: str) -> list[int] | None:
        """Ids of the conversation with this message. Drops the oldest turns until an answer fits. None, and no turn is
        dropped, if it does not fit behind this message alone."""
        requested, messages = self.args.max_new_tokens, [*self.messages]
        prompt, room = self.encode(messages, text), requested or min(DEFAULT_NEW_TOKENS, self.limit // 4)
        while len(prompt) + room > self.limit and len(messages) > len(self.opening):
            del messages[len(self.opening) : len(self.opening) + 2]  # a message and its answer
            prompt = self.encode(messages, text)
        if len(prompt) + (requested or 1) > self.limit:
            needed = f"{len(prompt)} tokens and {requested or 1} new ones do not fit in {self.limit} positions"
            print(f"this message is too long: {needed}; --max_seq_length sets another number", file=sys.stderr)
            return None
        if len(messages) < len(self.messages) and not self.has_dropped:
            print(f"the context of {self.limit} positions is full: the oldest turns leave it", file=sys.stderr)
            self.has_dropped = True
        self.messages = messages
        return prompt

    def add(self, text: str, answer: str) -> None:
        reply = {"role": "assistant", "content": self.args.prefill + answer}
        self.messages += [{"role": "user", "content": text}, reply]


def chat(session: Session, args: argparse.Namespace) -> None:
    """Answer turn after turn until stdin ends. Ctrl-C ends an answer, not the program. A turn reuses cached positions
    up to the first id that differs: a template may rewrite earlier turns. ValueError for a --max_new_tokens that leaves
    no room for a message."""
    if (args.max_new_tokens or 0) >= session.engine.max_seq_length:
        limit = session.engine.max_seq_length
        raise ValueError(f"--max_new_tokens {args.max_new_tokens} must be less than the context's {limit} positions")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a byte that is no UTF-8 ends no chat
    conversation, ranks = Conversation(session, args), session.engine.ranks
    if session.tokenizer.template is None:
        print("this folder has no chat template: chatting as plain text", file=sys.stderr)
    print(f"context of {conversation.limit} positions; /help lists the commands, /exit ends the chat", file=sys.stderr)
    if session.engine.device.type == "cpu" and not session.engine.compile:
        print("--compile makes answers faster; its first start takes longer", file=sys.stderr)
    with line_history():
        for turn_number in itertools.count():
            text = ranks.broadcast_object(read_message() if ranks.rank == 0 else None)
            command, argument = command_of(text or "")
            if text is None or command == "/exit":
                return
            try:
                message = obey(conversation, command, argument, text)
                if message is not None:
                    answer_message(session, args, conversation, message, args.seed + turn_number)
            except KeyboardInterrupt:
                if ranks.world > 1:  # ranks stop at different tokens, and torchrun ends them
                    raise
                print("[interrupted]", file=sys.stderr)


def command_of(text: str) -> tuple[str, str]:
    """(the first word, the rest) of a line."""
    command, argument, *_ = [*text.split(maxsplit=1), "", ""]
    return command, argument.strip()


def obey(conversation: Conversation, command: str, argument: str, text: str) -> str | None:
    """Run a line's command, if it begins with one. Returns the message to answer, if the line brings one."""
    num_questions = conversation.num_questions()
    if command == "/reset":
        conversation.reset()
        print(f"a new conversation; {counted(num_questions)} forgotten", file=sys.stderr)
    elif command == "/help":
        print(HELP, file=sys.stderr)
    elif command == "/save":
        conversation.save(argument)
    elif command == "/undo":
        question = conversation.take_back()
        if question is not None:
            rest = counted(conversation.num_questions())
            print(f"forgot {shortened(question)!r} and its answer; {rest} left", file=sys.stderr)
    elif command == "/retry":
        return conversation.take_back()
    elif command.startswith("//"):
        return text.replace("/", "", 1)
    elif command.startswith("/"):
        print(f"there is no command {command}: see /help; // begins a message with a slash", file=sys.stderr)
    elif command:
        return text
    return None


def counted(num_questions: int) -> str:
    return "1 message" if num_questions == 1 else f"{num_questions or 'no'} messages"


def shortened(text: str, max_chars: int = 40) -> str:
    text = " ".join(text.split())
    return text if len(text) <= max_chars else f"{text[: max_chars - 1]}…"


def answer_message(
    session: Session, args: argparse.Namespace, conversation: Conversation, text: str, seed: int
) -> None:
    """Print the answer to a message. The conversation gets both, also where Ctrl-C ends the answer."""
    prompt = conversation.prompt(text)
    if prompt is None:
        return
    budget = conversation.limit - len(prompt) if args.max_new_tokens is None else args.max_new_tokens
    request = Request(text, ids=prompt, max_new_tokens=budget, seed=seed)
    answer = Answer(request, session.printer(args.stop, streaming=True))
    if has_colours(sys.stdout):
        answer.printer.dim_thinking(args.prefill or session.tokenizer.decode(prompt[-16:]))
    try:
        list(session.decode([answer]))
        if answer.request.error is not None:
            raise ValueError(answer.request.error)
        dim, end = (DIM, END_COLOUR) if has_colours(sys.stderr) else ("", "")
        print(f"{dim}[{statistics(answer, args)}]{end}", file=sys.stderr)
    finally:
        conversation.add(text, answer.printer.text)


def statistics(answer: Answer, args: argparse.Namespace) -> str:
    """One line: tokens read, why the answer ended, the rate; with drafts, tokens a round and the share accepted."""
    printer, request = answer.printer, answer.request
    reason = "--max_new_tokens" if args.max_new_tokens else "the context's end"
    if printer.finish_reason() == "stop":
        reason = "--stop" if printer.at_stop_string else "the model"
    read = f"{len(answer.row.ids) - request.num_reused} tokens read, {request.num_reused} kept"
    rates = f"{rate(decided([request]), request.decode_s):.1f} tok/s"
    if request.token_records:
        counts = RowStatistics(request.token_records)
        rates += f", {rate(counts.tokens, len(request.steps)):.2f} tokens a round"
        if counts.num_drafted:
            rates += f", {counts.accepted.total() / counts.num_drafted:.0%} accepted"
    return f"{read}, ended by {reason}, {rates}"
