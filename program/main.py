"""`python generate.py`: parse, check, load, warm up, decode, report. What each step does stands in the other files.

`run` is `main` without its edge: errors are exceptions.
"""

import argparse
import contextlib
import functools
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from caches import KINDS
from generate import Engine
from kept import common_prefix
from limits import check_lengths
from program.chat import chat
from program.edge import end_with_launcher, ending_plainly, print_error, silent, use_threads
from program.flags import check_options, parse_args, processor_of, speculate_k
from program.loading import compiles, load, pick_device, unused_settings, warm_up
from program.printing import Printer, Session
from program.prompt_cache import PromptCache
from program.prompts import Request, encoded, requests, sampling_of
from program.report import report
from program.threads import Threads
from reading.files import write_whole
from tp import Ranks, join, local_device

COMPILED_PROMPTS = (
    8192  # tokens of prompts from which on compiling saves a CPU more than it takes (benchmarks/NOTES.md)
)
CHAT_LENGTH = 4096  # positions of an interactive session, where --max_seq_length does not say


@ending_plainly(reader_may_leave=True)
def main(args: argparse.Namespace | None = None) -> None:
    args = parse_args() if args is None else args
    check_options(args)
    device = pick_device(local_device(args.device))
    end_with_launcher()
    ranks = join(device, args.timeout)
    threads = use_threads(args.threads)
    with silent(ranks.rank > 0):
        ranks.check_same(lambda: settings(args))
        asked, broken = ranks.tell(requests(args) if ranks.rank == 0 and not args.interactive else ([], []))
        skip(broken, asked)
        cache = PromptCache(args)
        session, rows, refused = open_session(args, asked, device, ranks)
        if device.type == "cpu" and ranks.world == 1 and args.threads is None:
            session.threads = Threads(threads)
        kept = cache.around(session.kept, [row.ids for row in rows])
        with kept, profiled(args.profile if ranks.rank == 0 else None):
            if args.interactive:
                chat(session, args)
            timings = []
            for batch in batches(rows, args.batch_size):
                texts, prompts = [row.text for row in batch], [row.ids for row in batch]
                stops = [row.stop for row in batch]
                printer = Printer(
                    session.tokenizer, texts, session.stop_ids, args.stop, args.json, session.coloured, stops
                )  # fmt: skip
                budgets, seeds = [row.max_new_tokens for row in batch], [row.seed for row in batch]
                samplings = [row.sampling for row in batch]
                timings.append(session.decode(printer, prompts, budgets, seeds, sampling=samplings))
                if args.json:
                    for row, found in zip(batch, printer.rows(prompts, timings[-1], session.engine), strict=True):
                        print(json.dumps(row.labels() | found), flush=True)
        if timings:
            report(timings, session.engine)
        if broken or refused:
            sys.exit(2)


run = main.__wrapped__


def settings(args: argparse.Namespace) -> dict[str, object]:
    """What all ranks must have been told alike. Folders and files may lie elsewhere on another machine."""
    files = ("checkpoint", "draft_checkpoint", "random_weights", "prompt_file", "profile", "tools")
    given = {f"--{name}": value is None if name in files else value for name, value in vars(args).items()}
    shape = Path(args.random_weights).read_bytes() if args.random_weights else None
    return {"its torch": torch.__version__, "the file of --random_weights": shape, **given}


def batches(rows: list[Request], size: int) -> Iterator[list[Request]]:
    """Neighbours whose samplings are of one kind, which steps are made for, up to `size` together."""
    for _, group in itertools.groupby(rows, lambda row: row.sampling.kind):
        alike = list(group)
        yield from (alike[begin : begin + size] for begin in range(0, len(alike), size))


def skip(broken: list[str], left: list) -> None:
    """Name what cannot be decoded. Without anything left to decode, end."""
    for message in broken:
        print_error(message)
    if broken and not left:
        sys.exit(2)


def open_session(
    args: argparse.Namespace, asked: list[Request], device: torch.device, ranks: Ranks
) -> tuple[Session, list[Request], list[str]]:
    """Load, and make and warm up an engine that these requests fit in. Also their samples, and an error for each line
    that does not fit."""
    model, tokenizer, drafter = load(args, device, ranks)
    longest = model.config.max_seq_length
    limit = longest if args.max_seq_length is None else args.max_seq_length
    if not 1 <= limit <= longest:
        raise ValueError(f"--max_seq_length {limit} must lie between 1 and the model's {longest}")
    if drafter is not None and drafter.owns_cache and (args.interactive or args.max_new_tokens is None):
        limit = min(limit, drafter.model.config.max_seq_length)
    unused_settings(args)
    check = functools.partial(check_lengths, model, limit=limit, drafter=drafter)
    rows, refused = ranks.tell(encoded(asked, args, tokenizer, limit, check))
    skip(refused, rows)
    length = max((len(row.ids) + row.max_new_tokens for row in rows), default=min(limit, CHAT_LENGTH))
    prompted = sum(len(row.ids) for row in rows)
    prompted -= (len(rows) - 1) * common_prefix(*(row.ids for row in rows)) if rows else 0  # computed once
    engine = Engine(
        model, min(args.batch_size, len(rows) or 1), limit if args.max_seq_length else length,
        compile=compiles(args.compile, device), drafter=drafter, speculate_k=speculate_k(args),
        compile_prompts=None if device.type == "cuda" or prompted >= COMPILED_PROMPTS else False,
        one_width=args.one_width, process=processor_of(args), logprobs=args.logprobs,
        kind=KINDS[args.kv_cache_dtype],
    )  # fmt: skip
    sampling, stop_ids = sampling_of(args), ranks.tell(frozenset() if args.ignore_eos else tokenizer.stop_ids)
    if (args.logprobs or 0) > model.config.vocab_size:
        raise ValueError(f"--logprobs {args.logprobs} is more than the {model.config.vocab_size} tokens that there are")
    kinds = dict.fromkeys(row.sampling.kind for row in rows)
    warm_up(engine, rows[0].sampling if rows else sampling, length // 2, kinds)
    coloured = args.show_drafts and not args.json and sys.stdout.isatty()
    return Session(engine, tokenizer, sampling, stop_ids, coloured), rows, refused


@contextlib.contextmanager
def profiled(file: str | None) -> Iterator[None]:
    """Write a Chrome trace of what runs inside to `file`, if there is one."""
    with torch.profiler.profile() if file else contextlib.nullcontext() as trace:
        yield
    if file:
        write_whole(Path(file), lambda partial: trace.export_chrome_trace(str(partial)))


if __name__ == "__main__":
    main()
