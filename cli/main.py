"""`python generate.py`: parse, check, load, warm up, decode, report. What each step does stands in the other files.

`run` is `main` without its edge: errors are exceptions.
"""

import argparse
import contextlib
import functools
import json
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import torch

from cli.chat import chat
from cli.errors import end_with_launcher, ending_plainly, print_error, silent, use_threads
from cli.flags import check_options, parse_args, processor_of, speculate_k
from cli.load import compiles, costs_by_threads, load, pick_device, target_config, unused_settings, warm_up
from cli.output import Answer, Session
from cli.prompt_cache import PromptCache
from cli.prompts import Request, encoded, requests, sampling_of
from cli.report import report
from decoding.kv_8bit import KINDS
from decoding.sampling import KINDS as KINDS_OF_SAMPLING
from decoding.scheduler import common_prefix
from decoding.timing import Timing
from decoding.validation import check_lengths
from generate import Engine
from loading.files import write_atomically
from tp import Ranks, join, local_device

COMPILED_PROMPTS = (
    8192  # tokens of prompts from which on compiling saves a CPU more than it takes (benchmarks/NOTES.md)
)
CHAT_LENGTH = 4096  # positions of an interactive session, where --max_seq_length does not say


@ending_plainly(reader_may_leave=True, joins_ranks=True)
def main(args: argparse.Namespace | None = None) -> None:
    args = parse_args() if args is None else args
    check_options(args)
    device = pick_device(local_device(args.device))
    end_with_launcher()
    ranks = join(device, args.timeout)
    threads = use_threads(args.threads)
    with silent(ranks.rank > 0):
        ranks.check_same(lambda: settings(args))
        asked, broken = ranks.broadcast_object(requests(args) if ranks.rank == 0 and not args.interactive else ([], []))
        skip(broken, asked)
        cache = PromptCache(args)
        session, rows, refused = open_session(args, asked, device, ranks)
        if device.type == "cpu" and ranks.world == 1 and args.threads is None:
            session.choose_threads(threads)
        prefixes = cache.around(session.engine, [row.ids for row in rows])
        with prefixes, profiled(args.profile if ranks.rank == 0 else None):
            if args.interactive:
                chat(session, args)
            output = Output(session, rows, args)
            for answer in session.decode(output.answers):
                output.add(answer)
        if rows:
            report(output.timings(), session.engine)
        if broken or refused or output.has_errors:
            sys.exit(2)


run = main.__wrapped__


def settings(args: argparse.Namespace) -> dict[str, object]:
    """What all ranks must have been told alike. Folders and files may lie elsewhere on another machine."""
    files = ("checkpoint", "draft_checkpoint", "random_weights", "prompt_file", "profile", "tools")
    given = {f"--{name}": value is None if name in files else value for name, value in vars(args).items()}
    shape = Path(args.random_weights).read_bytes() if args.random_weights else None
    return {"its torch": torch.__version__, "the file of --random_weights": shape, **given}


class Output:
    """Ended answers on stdout. A single text streams. With --json a line appears as soon as its row ends, or with
    --ordered in the rows' order; texts appear in that order, each under its prompt."""

    def __init__(self, session: Session, rows: list[Request], args: argparse.Namespace):
        self.engine, self.as_json, self.in_order = session.engine, args.json, args.ordered or not args.json
        streaming = len(rows) == 1 and not args.json
        if streaming:
            # On a terminal the answer continues the prompt's line; in a log each has its own.
            print(rows[0].text, end="" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)
        self.answers = [Answer(row, session.printer(row.stop, streaming)) for row in rows]
        self.waiting, self.ended, self.has_errors = deque(self.answers), set(), False

    def add(self, answer: Answer) -> None:
        """Show an answer that has ended, once its turn has come. ValueError for the error of a prompt of no file."""
        if error := answer.request.error:
            if isinstance(error, ValueError) and self.engine.model.norm.weight.dtype == torch.float16:
                error = ValueError(f"{error}; float16 may have overflowed: try --dtype bfloat16 or float32")
            if answer.row.place is None:
                raise error
            print_error(f"{answer.row.place}: {error}")
            self.has_errors = True
        self.ended.add(answer)
        if not self.in_order:
            self.show(answer)
        while self.in_order and self.waiting and self.waiting[0] in self.ended:
            self.show(self.waiting.popleft())

    def show(self, answer: Answer) -> None:
        if answer.request.error is not None or answer.printer.streaming:
            return
        if self.as_json:
            print(json.dumps(answer.result(self.engine)), flush=True)
        else:
            print(answer.row.text, end="", file=sys.stderr, flush=True)
            print("".join(answer.printer.coloured_pieces), flush=True)

    def timings(self) -> list[Timing]:
        """Of rows one after the other, or of all that ran together."""
        requests = [answer.request for answer in self.answers]
        return [Timing([request]) for request in requests] if self.engine.batch_size == 1 else [Timing(requests)]


def skip(broken: list[str], left: list) -> None:
    """Name what cannot be decoded. Without anything left to decode, end."""
    for message in broken:
        print_error(message)
    if broken and not left:
        sys.exit(2)


def open_session(
    args: argparse.Namespace, asked: list[Request], device: torch.device, ranks: Ranks, num_slots: int | None = None
) -> tuple[Session, list[Request], list[str]]:
    """Load, and make and warm up an engine that these requests fit in, or of `num_slots` for requests of all kinds that
    come later. Also the requests' samples, and an error for each line that does not fit."""
    config = target_config(args)
    longest = config.max_seq_length
    limit = longest if args.max_seq_length is None else args.max_seq_length
    if not 1 <= limit <= longest:
        raise ValueError(f"--max_seq_length {limit} must lie between 1 and the model's {longest}")
    if (args.logprobs or 0) > config.vocab_size:
        raise ValueError(f"--logprobs {args.logprobs} is more than the {config.vocab_size} tokens that there are")
    model, tokenizer, drafter = load(args, device, ranks)
    if drafter is not None and drafter.owns_cache and (args.interactive or args.max_new_tokens is None):
        limit = min(limit, drafter.model.config.max_seq_length)
    unused_settings(args)
    check = functools.partial(check_lengths, model, limit=limit, drafter=drafter)
    rows, refused = ranks.broadcast_object(encoded(asked, args, tokenizer, limit, check))
    skip(refused, rows)
    length = max((len(row.ids) + row.max_new_tokens for row in rows), default=min(limit, CHAT_LENGTH))
    prompted = sum(len(row.ids) for row in rows)
    prompted -= (len(rows) - 1) * common_prefix(*(row.ids for row in rows)) if rows else 0  # computed once
    engine = Engine(
        model, num_slots or min(args.batch_size, len(rows) or 1), limit if args.max_seq_length else length,
        compile=compiles(args.compile, device), drafter=drafter, speculate_k=speculate_k(args),
        compile_prompts=None if device.type == "cuda" or prompted >= COMPILED_PROMPTS else False,
        one_width=args.one_width, process=processor_of(args), logprobs=args.logprobs,
        kind=KINDS[args.kv_cache_dtype],
    )  # fmt: skip
    stop_ids = ranks.broadcast_object(frozenset() if args.ignore_eos else tokenizer.stop_ids)
    sampling = sampling_of(args)
    kinds = KINDS_OF_SAMPLING if num_slots else kinds_of(rows)
    warm_up(engine, rows[0].sampling if rows else sampling, length // 2, kinds)
    chooses_threads = device.type == "cpu" and ranks.world == 1 and args.threads is None
    costs = costs_by_threads(engine, rows[0].sampling if rows else sampling, length // 2) if chooses_threads else {}
    coloured = args.show_drafts and not args.json and sys.stdout.isatty()
    return Session(engine, tokenizer, sampling, stop_ids, coloured, costs=costs), rows, refused


def kinds_of(rows: list[Request]) -> list[str]:
    """The kinds of steps that these rows need: alone, and beside each other."""
    kinds = {row.sampling.kind for row in rows}
    return [kind for kind in KINDS_OF_SAMPLING if kind in kinds]


@contextlib.contextmanager
def profiled(file: str | None) -> Iterator[None]:
    """Write a Chrome trace of what runs inside to `file`, if there is one."""
    with torch.profiler.profile() if file else contextlib.nullcontext() as trace:
        yield
    if file:
        write_atomically(Path(file), lambda partial: trace.export_chrome_trace(str(partial)))


if __name__ == "__main__":
    main()
