"""--interactive: turns from stdin, answers on stdout. This file knows no model and no sampling."""

import argparse
import contextlib
import itertools
import os
import sys

from cli.answers import Answer
from cli.prompts import DEFAULT_NEW_TOKENS, Request, conversation_ids, template_names
from cli.report import RowStatistics, rate
from cli.session import Session

HELP = """/reset  start a new conversation
/drop   when the context is full: drop the oldest turns and send the message again
/help   this list
/exit   end, as end of file does
Blank lines are skipped. A paste of several lines is one message."""


def read_line() -> str | None:
    """The next line without its end; None at the end of stdin. On a terminal with line editing and pastes of several
    lines; the prompt goes to stderr."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        return line.strip("\ufeff\r\n") if line else None
    with contextlib.suppress(ImportError):  # a Python without it reads plain lines
        import readline  # input() uses it, beyond the 4,095 bytes that a terminal keeps of a line

        readline.parse_and_bind("set enable-bracketed-paste on")
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)  # readline writes to file descriptor 1, which is the answers'
    try:
        return input("> ")
    except EOFError:
        print(file=sys.stderr)
        return None
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def chat(session: Session, args: argparse.Namespace) -> None:
    """Answer turn after turn until stdin ends. Ctrl-C ends an answer, not the program. Cached positions are reused as
    far as ids agree, because templates rewrite history."""
    tokenizer, limit, ranks = session.tokenizer, session.engine.max_seq_length, session.engine.ranks
    if tokenizer.template is None:
        print("this folder has no chat template: chatting as plain text", file=sys.stderr)
    opening = [{"role": "system", "content": args.system}] if args.system else []
    messages = list(opening)

    def encode(text: str) -> list[int]:
        conversation = [*messages, {"role": "user", "content": text}]
        return ranks.broadcast_object(conversation_ids(tokenizer, conversation, **template_names(args)))

    print(f"context of {limit} positions; /help lists the commands, end of file ends", file=sys.stderr)
    unsent = None  # a message that the context had no room for
    for turn_number in itertools.count():
        text = ranks.broadcast_object(read_line() if ranks.rank == 0 else None)
        if text is None or text.strip() == "/exit":
            return
        command = text.strip()
        if command == "/reset":
            messages, unsent = list(opening), None
        if command == "/help":
            print(HELP, file=sys.stderr)
        if command in ("", "/reset", "/help"):
            continue
        if command == "/drop":
            if unsent is None:
                print("nothing to drop: the context is not full", file=sys.stderr)
                continue
            room, text, num_dropped = args.max_new_tokens or min(DEFAULT_NEW_TOKENS, limit // 4), unsent, 0
            while len(messages) > len(opening) and len(encode(text)) + room > limit:
                del messages[len(opening) : len(opening) + 2]  # a question and its answer
                num_dropped += 1
            print(f"[{num_dropped} turns dropped]", file=sys.stderr)
        prompt = encode(text)
        if len(prompt) + (args.max_new_tokens or 1) > limit:
            needed = f"{len(prompt)} tokens and {args.max_new_tokens or 1} new ones"
            print(f"the context is full: {needed} do not fit in {limit} positions; "
                  "/drop drops the oldest turns, /reset starts anew", file=sys.stderr)  # fmt: skip
            unsent = text
            continue
        unsent = None
        budget = limit - len(prompt) if args.max_new_tokens is None else args.max_new_tokens
        request = Request(text, ids=prompt, max_new_tokens=budget, seed=args.seed + turn_number)
        answer = Answer(request, session.printer(args.stop, streaming=True))
        try:
            list(session.decode([answer]))
            printer, request = answer.printer, answer.request
            if request.error is not None:
                raise ValueError(request.error)
            rates = f"{rate(len(printer.ids) - 1, request.decode_s):.1f} tok/s"
            if request.token_records:
                rates += f", {rate(RowStatistics(request.token_records).tokens, len(request.steps)):.2f} tokens a round"
            by = "--max_new_tokens" if args.max_new_tokens else "the context's end"
            if printer.finish_reason() == "stop":
                by = "--stop" if printer.at_stop_string else "the model"
            read = f"{len(prompt) - request.num_reused} tokens read, {request.num_reused} kept"
            print(f"[{read}, ended by {by}, {rates}]", file=sys.stderr)
        except KeyboardInterrupt:
            if ranks.world > 1:  # each was interrupted somewhere else, and torchrun ends them all
                raise
            print("[interrupted]", file=sys.stderr)
        answered = {"role": "assistant", "content": args.prefill + answer.printer.text}
        messages += [{"role": "user", "content": text}, answered]
