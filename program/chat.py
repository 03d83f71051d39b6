"""--interactive: turns from stdin, answers on stdout. This file knows no model and no sampling."""

import argparse
import itertools
import sys

from program.printing import Printer, Session
from program.prompts import conversation_ids, template_names
from program.report import RowStatistics, rate


def chat(session: Session, args: argparse.Namespace) -> None:
    """Answer turn after turn until stdin ends. Ctrl-C ends an answer, not the program. What the caches hold of the
    conversation is not computed again, as far as ids agree: templates rewrite history."""
    tokenizer, limit, ranks = session.tokenizer, session.engine.max_seq_length, session.engine.ranks
    if tokenizer.template is None:
        print("this folder has no chat template: chatting as plain text", file=sys.stderr)
    opening = [{"role": "system", "content": args.system}] if args.system else []
    messages = list(opening)
    print(f"context of {limit} positions; /reset starts anew, an empty line or end of file ends", file=sys.stderr)
    for turn in itertools.count():
        print("> ", end="", file=sys.stderr, flush=True)
        text = ranks.tell(sys.stdin.readline().strip("\ufeff\r\n") if ranks.rank == 0 else "")
        if not text:
            return
        if text == "/reset":
            messages = list(opening)
            continue
        turns = [*messages, {"role": "user", "content": text}]
        prompt = ranks.tell(conversation_ids(tokenizer, turns, **template_names(args)))
        if len(prompt) + (args.max_new_tokens or 1) > limit:
            needed = f"{len(prompt)} tokens and {args.max_new_tokens or 1} new ones"
            print(f"the context is full: {needed} do not fit in {limit} positions; /reset starts anew", file=sys.stderr)
            continue
        printer = Printer(tokenizer, [""], session.stop_ids, args.stop, coloured=session.coloured)
        budget = limit - len(prompt) if args.max_new_tokens is None else args.max_new_tokens
        try:
            timing = session.decode(printer, [prompt], [budget], args.seed + turn)
            rates = f"{rate(timing.decoded[0] - 1, timing.decode_s):.1f} tok/s"
            if timing.tokens:
                rates += f", {rate(RowStatistics(timing.tokens[0]).tokens, timing.steps):.2f} tokens a round"
            by = "--max_new_tokens" if args.max_new_tokens else "the context's end"
            if printer.finish_reason(0) == "stop":
                by = "--stop" if printer.ended else "the model"
            read = f"{timing.prompt_tokens} tokens read, {timing.cached[0]} kept"
            print(f"[{read}, ended by {by}, {rates}]", file=sys.stderr)
        except KeyboardInterrupt:
            if ranks.world > 1:  # each was interrupted somewhere else, and torchrun ends them all
                raise
            print("[interrupted]", file=sys.stderr)
        answer = args.prefill + "".join(printer.pieces[0])
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
