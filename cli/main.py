"""`python generate.py`: parse, check, load, warm up, decode, report. The other files are named after these steps.

`run` is `main` without the handling of errors: it raises them.
"""

import argparse
import contextlib
import functools
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from cli.chat import chat, has_colours
from cli.errors import end_with_launcher, ending_plainly, free_memory, print_error, silent, use_threads
from cli.flags import check_options, choose_seed, parse_args, speculate_k
from cli.load import cache_type, compiles, load, pick_device, print_unused, target_config, warm_up
from cli.memory import check_memory
from cli.output import Output, ResultFile, print_skipped, unanswered
from cli.page import write_report
from cli.pipe import is_open_pipe, piped_answers
from cli.prompt_cache import PromptCache
from cli.prompts import Request, encoded, requests, sampling_of
from cli.replicas import Replicas
from cli.report import position_bytes, report
from cli.session import Session
from decoding.sampling import KINDS as KINDS_OF_SAMPLING
from decoding.scheduler import common_prefix
from decoding.validation import check_lengths
from generate import Engine
from loading.checkpoint import fingerprints
from loading.files import open_shards, shards, write_atomically
from model import Config, Transformer
from speculative import Drafter
from tp import Ranks, join, local_device
from weights.walker import batch_invariant_rows

COMPILED_PROMPTS = 8192  # with so many prompt tokens, compiling their pass pays on a CPU (benchmarks/NOTES.md)
COMPILED_LENGTHS = 512  # an engine's positions are a multiple: prompts of many lengths load the same compiled step
CHAT_LENGTH = 4096  # positions of a chat or a pipe without --max_seq_length
MAX_ROWS, MAX_PIPED_ROWS = 32, 8  # decoded at a time, of a file and of a pipe, without --batch_size


@ending_plainly(reader_may_leave=True, joins_ranks=True)
def main(args: argparse.Namespace | None = None) -> None:
    args = parse_args() if args is None else args
    check_options(args)
    device = pick_device(local_device(args.device))
    end_with_launcher()
    everyone = join(device, args.timeout)
    ranks = everyone.replica(args.tp or everyone.world)
    use_threads(args.threads)
    with silent(everyone.rank > 0):
        everyone.check_same(lambda: settings(args))
        choose_seed(args, everyone.broadcast_object)
        replicas, piped = Replicas(everyone, ranks), is_open_pipe(args)
        file = ResultFile(args.output) if args.output and replicas.is_root else None
        reads = replicas.is_root and not args.interactive and not piped
        lines, broken = everyone.broadcast_object(requests(args) if reads else ([], []))
        answered = everyone.broadcast_object(file.answered if file else {})
        print_broken(broken, lines)
        if replicas.count > 1 and not args.random_weights:
            checkpoint = Path(args.checkpoint)  # ranks of a replica compare theirs while loading
            everyone.check_same(lambda: fingerprints(checkpoint, open_shards(shards(checkpoint))))
        cache = PromptCache(args)
        session, rows, refused = open_session(
            args, lines, device, ranks, piped=piped, answered=answered, num_replicas=replicas.count
        )
        prompts = [row.ids for row in rows]
        with cache.around(session.engine, prompts), profiled(args.profile if replicas.is_root else None):
            if args.interactive:
                chat(session, args)
            with Output(session, rows, args, replicas, file, piped) as output:
                if piped:
                    answers = piped_answers(session, args, output, answered, prompts)
                else:
                    answers = (output.answer(rows[number], number) for number in replicas.numbers(len(rows)))
                session.after_step = output.poll
                for answer in session.decode(answers):
                    output.add(answer)
                output.wait_for_others(len(rows))
        if output.answers:
            report(output.timings(), session.engine)
        if args.report and replicas.is_root:
            write_report(args, output.answers, session.engine)
        output.print_total()
        has_errors = bool(broken or refused or output.has_errors)
        if everyone.broadcast_object(has_errors):  # no rank may end before the others by its exit status
            sys.exit(2)


run = main.__wrapped__


def settings(args: argparse.Namespace) -> dict[str, object]:
    """Settings that must be equal on all ranks. Paths may differ between machines, so only their presence counts."""
    files = ("adapter", "checkpoint", "draft_checkpoint", "random_weights", "prompt_file", "output",
             "profile", "report", "tools")  # fmt: skip
    flag_values = {f"--{name}": value is None if name in files else value for name, value in vars(args).items()}
    shape = Path(args.random_weights).read_bytes() if args.random_weights else None
    return {"its torch": torch.__version__, "the file of --random_weights": shape, **flag_values}


def print_broken(broken: list[str], remaining: list) -> None:
    """Print the errors of lines that cannot be decoded. End if no other line is left."""
    for message in broken:
        print_error(message)
    if broken and not remaining:
        sys.exit(2)


def open_session(
    args: argparse.Namespace, lines: list[Request], device: torch.device, ranks: Ranks, num_slots: int | None = None,
    piped: bool = False, answered: dict | None = None, num_replicas: int = 1,
) -> tuple[Session, list[Request], list[str]]:  # fmt: skip
    """Load the models, and make and warm up an engine: one that these requests fit in; with `num_slots` or for a pipe,
    one for requests of all kinds. Returns it with the samples that --output's file has not `answered` yet, and an error
    for each line that does not fit."""
    limit = context_limit(args, target_config(args))
    max_new = max((line.max_new_tokens or args.max_new_tokens or 1 for line in lines), default=0)
    num_open = len(lines) * args.num_samples - len(answered or ())
    num_rows = num_slots or (args.batch_size or 1 if piped else max(1, min(args.batch_size or 1, num_open)))
    length = limit if args.max_seq_length else min(limit, max_new or CHAT_LENGTH)
    if num_replicas == 1 or device.type == "cuda":  # replicas on one CPU load at different times
        has_length, num_positions = args.max_seq_length or not lines, engine_length(args, device, length, limit)
        check_memory(args, device, ranks, num_rows, num_positions, max_new + 1 if has_length else math.inf)
    model, tokenizer, drafter = load(args, device, ranks)
    print_unused(args)
    check = functools.partial(check_lengths, model, limit=limit)
    samples, refused = ranks.broadcast_object(encoded(lines, args, tokenizer, limit, check))
    print_broken(refused, samples)
    rows = unanswered(samples, answered or {})
    print_skipped(args.output, len(samples) - len(rows))
    length = max((len(row.ids) + row.max_new_tokens for row in rows), default=min(limit, CHAT_LENGTH))
    num_prompt_tokens = sum(len(row.ids) for row in rows)
    num_prompt_tokens -= (len(rows) - 1) * common_prefix(*(row.ids for row in rows)) if rows else 0  # computed once
    length = engine_length(args, device, limit if args.max_seq_length else length, limit)
    has_known_rows = num_slots is None and not piped
    if num_slots is None and args.batch_size is None:
        max_rows = MAX_PIPED_ROWS if piped else min(MAX_ROWS, math.ceil(len(rows) / num_replicas))
        num_slots = ranks.broadcast_object(default_batch_size(args, max_rows, length, model, drafter))
        if max_rows > 1:
            print(f"{num_slots} rows are decoded at a time; --batch_size sets another number", file=sys.stderr)
    num_slots = num_slots or (args.batch_size if piped else min(args.batch_size, len(rows) or 1))
    engine = Engine(
        model, num_slots, length,
        compile=compiles(args.compile, device), drafter=drafter, speculate_k=speculate_k(args),
        compile_prompts=None if device.type == "cuda" or num_prompt_tokens >= COMPILED_PROMPTS else False,
        one_width=args.one_width, logprobs=args.logprobs, kind=cache_type(args),
    )  # fmt: skip
    sampling = sampling_of(args)
    stop_ids = ranks.broadcast_object(frozenset() if args.ignore_eos else tokenizer.stop_ids)
    kinds = kinds_of(rows) if has_known_rows else KINDS_OF_SAMPLING
    if rows or not samples:  # else all is answered
        warm_up(engine, rows[0].sampling if rows else sampling, length // 2, kinds)
    coloured = args.show_drafts and not args.json and has_colours(sys.stdout)
    return Session(engine, tokenizer, sampling, stop_ids, coloured), rows, refused


def context_limit(args: argparse.Namespace, config: Config) -> int:
    """Positions of a row. ValueError for flags that this model cannot serve."""
    longest = config.max_seq_length
    limit = longest if args.max_seq_length is None else args.max_seq_length
    if not 2 <= limit <= longest:  # a prompt and a new token
        raise ValueError(f"--max_seq_length {limit} must lie between 2 and the model's {longest}")
    if (args.logprobs or 0) > config.vocab_size:
        raise ValueError(f"--logprobs {args.logprobs} is more than the {config.vocab_size} tokens that there are")
    return limit


def engine_length(args: argparse.Namespace, device: torch.device, length: int, limit: int) -> int:
    """Positions of a row of an engine for requests of `length`."""
    return min(limit, -(-length // COMPILED_LENGTHS) * COMPILED_LENGTHS) if compiles(args.compile, device) else length


def default_batch_size(
    args: argparse.Namespace, max_rows: int, length: int, model: Transformer, drafter: Drafter | None
) -> int:
    """Up to `max_rows` rows: as many as have caches of `length` positions in half of the free memory, and as a step can
    have in which each row rounds as it does alone."""
    device, k = model.norm.weight.device, speculate_k(args)
    K = 0 if drafter is None and not args.one_width else max(drafter.auto_k) if k == "auto" else k
    models = [model] + ([drafter.model] if drafter is not None and drafter.owns_cache else [])
    kind = cache_type(args)
    row_bytes = (length + K) * sum(sum(position_bytes(cached, kind).values()) for cached in models)
    max_fitting = free_memory(device) / 2 // row_bytes
    return int(max(1, min(max_rows, max_fitting, batch_invariant_rows(model) // (K + 1) or max_rows)))


def kinds_of(rows: list[Request]) -> list[str]:
    """The kinds of sampling that these rows have."""
    kinds = {row.sampling.kind for row in rows}
    return [kind for kind in KINDS_OF_SAMPLING if kind in kinds]


@contextlib.contextmanager
def profiled(file: str | None) -> Iterator[None]:
    """Write a Chrome trace of the block to `file`, if there is one."""
    with torch.profiler.profile() if file else contextlib.nullcontext() as trace:
        yield
    if file:
        write_atomically(Path(file), lambda partial: trace.export_chrome_trace(str(partial)))
