"""--interactive: turns from stdin, answers on stdout.

chat            answer turn after turn
Conversation    the messages so far; it drops the oldest turns when the context is full
read_message    a message, which a terminal may take in several lines
"""

import io
import itertools
import json
import shutil
import sys
from pathlib import Path

from cli.answers import RowAnswer
from cli.draft_marks import draft_marks, print_legend
from cli.exits import print_status
from cli.options import Options
from cli.prompts import Prompt, Row, parse_lines, template_kwargs
from cli.report import RowStatistics, decided, low_acceptance, rate
from cli.running import run_interruptibly
from cli.word_wrap import WordWrap
from decoding.errors import UserError
from decoding.sampling import Sampling
from decoding.settings import DEFAULT_NEW_TOKENS
from generate import LLM
from loading.tokenizer import conversation_ids
from tp import ranks_of

HELP = """/reset      start a new conversation
/undo       forget the last message and its answer
/retry      answer the last message again
/save FILE  append the conversation to FILE, as a line of JSON
/load FILE  continue the last conversation that /save wrote to FILE
/help       this list
//TEXT      send /TEXT
/exit       end the chat, as end of file does
A line that ends in \\ continues in the next one. Ctrl-C ends an answer, and at the prompt the chat.
When the context is full, the oldest turns are dropped."""


def read_line(prompt: str) -> str | None:
    """The next line without its end; None at the end of stdin. On a terminal it can be edited,
    earlier ones come back by the arrow keys, and a paste of several lines is one."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        print(prompt, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        return line.strip("\ufeff\r\n") if line else None
    import readline  # input() edits lines by it

    readline.parse_and_bind("set enable-bracketed-paste on")
    try:
        return input(prompt)
    except EOFError:
        return None


def read_message() -> str | None:
    """A line, with those that follow a \\ at its end; None at the end of stdin."""
    message = read_line("> ")
    while message is not None and message.endswith("\\"):
        message = message[:-1] + "\n" + (read_line("… ") or "")
    return message


# What a name causes that no file can have: a NUL, half of a surrogate pair, the home of nobody.
NAME_ERRORS = (OSError, ValueError, RuntimeError)


def messages_of(lines: bytes, file: str) -> list[dict]:
    """The messages of the last line of JSON. UserError for a line that holds no conversation."""
    all_lines = lines.rstrip().split(b"\n")
    all_lines[:-1] = [b""] * (len(all_lines) - 1)  # an error counts the lines before it
    prompts, errors = parse_lines(all_lines, file)
    if errors:
        raise UserError(errors[0])
    messages = prompts[0].messages or []
    roles = [message["role"] for message in messages]
    if roles[:1] == ["system"]:
        del roles[0]
    if not roles or roles != ["user", "assistant"] * (len(roles) // 2):
        raise UserError("its last line is no conversation that an assistant has answered")
    return messages


class Conversation:
    """The messages of a chat. `prompt` encodes them for the engine's context."""

    def __init__(self, llm: LLM, options: Options):
        self.defaults = options.requests
        self.tokenizer = llm.tokenizer
        self.ranks = ranks_of(llm.engine.model)
        self.limit = llm.engine.max_seq_length
        system = options.prompts.system
        self.first_opening = [{"role": "system", "content": system}] if system else []
        self.opening = self.first_opening
        self.turns = []  # messages: the user's and the assistant's, alternating
        self.has_dropped = False
        # Now, not at the first message: UserError for a --system, tools or variables that the
        # template does not read.
        self.encode([], "Hello")

    def undo(self) -> str | None:
        """Forget the last message and its answer. Returns the message; None if there is none."""
        if not self.turns:
            print_status("there is no message yet")
            return None
        message = self.turns[-2]
        del self.turns[-2:]
        return message["content"]

    def save(self, file: str) -> None:
        """Append the conversation to a file, in the form of a line of --prompt_file."""
        if self.ranks.rank != 0:
            return
        if not file or not self.turns:
            print_status("/save FILE needs a name, and a message to save")
            return
        try:
            with Path(file).expanduser().open("a", encoding="utf-8") as lines:
                conversation = {"messages": self.opening + self.turns}
                lines.write(json.dumps(conversation, ensure_ascii=False) + "\n")
            print_status(f"saved to {file}")
        except NAME_ERRORS as error:
            print_status(f"error: /save {file!r}: {error}")

    def load(self, file: str) -> None:
        """Continue the conversation in the last line of a file, such as `save` writes."""
        messages = []
        if self.ranks.rank == 0:
            try:
                messages = messages_of(Path(file).expanduser().read_bytes(), file)
            except NAME_ERRORS as error:  # UserError is a ValueError
                print_status(f"error: /load {file!r}: {error}")
        messages = self.ranks.broadcast_object(messages)
        if not messages:
            return
        before = (self.opening, self.turns)
        num_opening = len(messages) % 2  # a system message
        self.opening = messages[:num_opening]
        self.turns = messages[num_opening:]
        try:
            self.encode(self.turns, "Hello")
        except UserError as error:  # of the template; every rank has it
            self.opening, self.turns = before
            print_status(f"error: /load {file!r}: {error}")

    def encode(self, turns: list[dict], text: str) -> list[int]:
        conversation = [*self.opening, *turns, {"role": "user", "content": text}]
        ids = conversation_ids(self.tokenizer, conversation, **template_kwargs(vars(self.defaults)))
        return self.ranks.broadcast_object(ids)

    def prompt(self, text: str) -> list[int] | None:
        """Ids of the conversation with this message appended. Drops the oldest turns until the
        answer fits. Returns None, and drops nothing, if the message alone leaves no room for an
        answer."""
        requested = self.defaults.max_new_tokens
        turns = list(self.turns)
        prompt = self.encode(turns, text)
        room = requested or min(DEFAULT_NEW_TOKENS, self.limit // 4)
        while len(prompt) + room > self.limit and turns:
            del turns[:2]
            prompt = self.encode(turns, text)
        if len(prompt) + (requested or 1) > self.limit:
            print_status(
                f"this message is too long: {len(prompt)} tokens and {requested or 1} new ones do"
                f" not fit in {self.limit} positions; --max_seq_length sets another number"
            )
            return None
        if len(turns) < len(self.turns) and not self.has_dropped:
            self.has_dropped = True
            print_status(
                f"the context of {self.limit} positions is full: the oldest turns leave it"
            )
        self.turns = turns
        return prompt

    def add(self, text: str, answer: str) -> None:
        reply = {"role": "assistant", "content": self.defaults.prefill + answer}
        self.turns += [{"role": "user", "content": text}, reply]


def chat(llm: LLM, options: Options) -> None:
    """Answer turn after turn until stdin ends. Ctrl-C ends an answer, not the program. A turn
    reuses cached positions up to the first id that differs: a template may rewrite earlier turns.
    UserError for a --max_new_tokens that leaves no room for a message."""
    limit = llm.engine.max_seq_length
    requested = options.requests.max_new_tokens or 0
    if requested >= limit:
        raise UserError(
            f"--max_new_tokens {requested} must be less than the context's {limit} positions"
        )
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a byte that is no UTF-8 ends no chat
    conversation = Conversation(llm, options)
    ranks = ranks_of(llm.engine.model)
    if llm.tokenizer.template is None:
        print_status("this folder has no chat template: chatting as plain text")
    print_status(f"context of {limit} positions; /help lists the commands")
    marks = draft_marks(options)
    if marks is not None:
        print_legend(marks)
    for turn_number in itertools.count():
        text = ranks.broadcast_object(read_message() if ranks.rank == 0 else None)
        if text is None or text.split()[:1] == ["/exit"]:
            return say_what_compiling_gains(llm)
        text = run_command(conversation, text)
        if text is None:
            continue
        try:
            answer_message(llm, conversation, text, options, turn_number)
        except KeyboardInterrupt:
            if ranks.world > 1:  # ranks stop at different tokens, and torchrun ends them
                raise
            print_status("[interrupted]")


def say_what_compiling_gains(llm: LLM) -> None:
    """On a terminal, after answers in eager steps on a CPU (docs/measured.md has the figures)."""
    engine = llm.engine
    is_eager = engine.runner.device.type == "cpu" and not engine.runner.compile
    if is_eager and engine.scheduler.next_id and sys.stderr.isatty():
        print_status("steps ran eagerly; --compile makes them faster, and its first start longer")


def run_command(conversation: Conversation, text: str) -> str | None:
    """Run a line's command. Returns the message to answer, if there is one."""
    command, _, argument = text.strip().partition(" ")
    match command:
        case "/reset":
            conversation.opening = conversation.first_opening
            conversation.turns = []
        case "/undo":
            conversation.undo()
        case "/retry":
            return conversation.undo()
        case "/save":
            conversation.save(argument.strip())
        case "/load":
            conversation.load(argument.strip())
        case "/help":
            print_status(HELP)
        case _ if command.startswith("//"):
            return text.replace("//", "/", 1)
        case _ if command.startswith("/"):
            print_status(f"there is no command {command}: see /help")
        case _ if command:
            return text
    return None


def answer_message(
    llm: LLM, conversation: Conversation, text: str, options: Options, turn_number: int
) -> None:
    """Print the answer to a message. The conversation gets both, also where Ctrl-C ends the
    answer."""
    try:
        prompt = conversation.prompt(text)
    except UserError as error:  # such as a token that the model does not have
        print_status(f"error: {error}")
        return
    if prompt is None:
        return
    defaults = options.requests
    row = Row(
        Prompt(text),
        ids=prompt,
        max_new_tokens=defaults.max_new_tokens or conversation.limit - len(prompt),
        seed=defaults.seed + turn_number,
        stop=defaults.stop,
        sampling=Sampling(**defaults.sampling),
    )
    wrap = None
    if sys.stdout.isatty():  # a pipe gets the text as the model wrote it
        wrap = WordWrap(shutil.get_terminal_size().columns)
    answer = RowAnswer(llm, row, streaming=True, marks=draft_marks(options), wrap=wrap)
    try:
        for _ in run_interruptibly(llm, [answer]):
            answer.check()
            print_status(f"[{status_line(answer)}]")
            for line in low_acceptance(llm.engine):
                print_status(line)
    finally:
        conversation.add(text, answer.text)


def status_line(answer: RowAnswer) -> str:
    """One line: tokens read, why the answer ended, the rate; with drafts, tokens a round and the
    share accepted."""
    request = answer.request
    num_read = len(answer.prompt) - request.num_reused
    line = f"{num_read} tokens read, {request.num_reused} reused, {answer.finish_reason},"
    line += f" {rate(decided([request]), request.decode_s):.1f} tok/s"
    if request.token_records:
        counts = RowStatistics(request.token_records)
        line += f", {rate(counts.tokens, len(request.steps)):.2f} tokens a round"
        line += f", {rate(counts.accepted.total(), counts.num_drafted):.0%} accepted"
    return line
