"""`python generate.py`: parse, check, load, warm up, decode, report. What each step does stands in the other files.

`run` is `main` without its edge: errors are exceptions.
"""

import argparse
import contextlib
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from generate import Engine, check_lengths
from program.chat import chat
from program.edge import end_with_launcher, ending_plainly, print_error, silent, use_threads
from program.flags import check_options, parse_args, sampling_of, speculate_k
from program.loading import compiles, load, pick_device, warm_up
from program.printing import Printer, Session
from program.prompts import Request, new_tokens, requests
from program.report import report
from reading.files import write_whole
from tp import Ranks, join, local_device

CHAT_LENGTH = 4096  # positions of an interactive session, where --max_seq_length does not say


@ending_plainly(reader_may_leave=True)
def main(args: argparse.Namespace | None = None) -> None:
    args = parse_args() if args is None else args
    check_options(args)
    device = pick_device(local_device(args.device))
    end_with_launcher()
    ranks = join(device, args.timeout)
    use_threads(args.threads)
    with silent(ranks.rank > 0):
        ranks.check_same(lambda: settings(args))
        asked, broken = ranks.tell(requests(args) if ranks.rank == 0 and not args.interactive else ([], []))
        for message in broken:
            print_error(message)
        if broken and not asked:
            sys.exit(2)
        session, prompts, budgets = open_session(args, asked, device, ranks)
        with profiled(args.profile if ranks.rank == 0 else None):
            if args.interactive:
                chat(session, args)
            seeds, timings = range(args.seed, args.seed + args.num_samples), []
            for seed, begin in itertools.product(seeds, range(0, len(asked), args.batch_size)):
                part = slice(begin, begin + args.batch_size)
                texts = [request.text for request in asked[part]]
                printer = Printer(session.tokenizer, texts, session.stop_ids, args.stop, args.json, session.coloured)
                timings.append(session.decode(printer, prompts[part], budgets[part], seed))
                if args.json:
                    for request, row in zip(asked[part], printer.rows(prompts[part], timings[-1], session.engine)):
                        print(json.dumps(({} if request.id is None else {"id": request.id}) | row), flush=True)
        if timings:
            report(timings, session.engine)
        if broken:
            sys.exit(2)


run = main.__wrapped__


def settings(args: argparse.Namespace) -> dict[str, object]:
    """What all ranks must have been told alike. Folders and files may lie elsewhere on another machine."""
    files = ("checkpoint", "draft_checkpoint", "random_weights", "prompt_file", "profile")
    given = {f"--{name}": value is None if name in files else value for name, value in vars(args).items()}
    shape = Path(args.random_weights).read_bytes() if args.random_weights else None
    return {"its torch": torch.__version__, "the file of --random_weights": shape, **given}


def open_session(
    args: argparse.Namespace, asked: list[Request], device: torch.device, ranks: Ranks
) -> tuple[Session, list[list[int]], list[int]]:
    """Load, and make and warm up an engine that these requests fit in. Also their token ids and numbers of new tokens.
    ValueError for what does not fit."""
    model, tokenizer, drafter = load(args, device, ranks)
    longest = model.config.max_seq_length
    limit = longest if args.max_seq_length is None else args.max_seq_length
    if not 1 <= limit <= longest:
        raise ValueError(f"--max_seq_length {limit} must lie between 1 and the model's {longest}")
    if drafter is not None and drafter.owns_cache and (args.interactive or args.max_new_tokens is None):
        limit = min(limit, drafter.model.config.max_seq_length)
    prompts = ranks.tell([request.encode(tokenizer) for request in asked])
    budgets = [new_tokens(args.max_new_tokens, prompt, limit) for prompt in prompts]
    if not args.interactive:
        check_lengths(model, prompts, budgets, limit, drafter)
    length = max((len(prompt) + n for prompt, n in zip(prompts, budgets)), default=min(limit, CHAT_LENGTH))
    engine = Engine(
        model, min(args.batch_size, len(asked) or 1), limit if args.max_seq_length else length,
        compile=compiles(args.compile, device), drafter=drafter, speculate_k=speculate_k(args),
    )  # fmt: skip
    sampling, stop_ids = sampling_of(args), ranks.tell(frozenset() if args.ignore_eos else tokenizer.stop_ids)
    warm_up(engine, sampling, filled=length // 2)
    coloured = args.show_drafts and not args.json and sys.stdout.isatty()
    return Session(engine, tokenizer, sampling, stop_ids, coloured), prompts, budgets


@contextlib.contextmanager
def profiled(file: str | None) -> Iterator[None]:
    """Write a Chrome trace of what runs inside to `file`, if there is one."""
    with torch.profiler.profile() if file else contextlib.nullcontext() as trace:
        yield
    if file:
        write_whole(Path(file), lambda partial: trace.export_chrome_trace(str(partial)))
