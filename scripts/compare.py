"""Compare two configurations of generate.py on the same prompts: their tokens, and their rates.

    python -m scripts.compare --a "--temperature 0" --b "--temperature 0 --draft ngram" --prompt_file prompts.txt

    side_args, load_sides, Side    two strings of flags as two engines; equal weights are loaded once
    compare                        every prompt by a, b, b, a: a steady drift of the machine's speed cancels
    describe, top_gap              the first token that differs, and how close a's two largest logits are there
    run, print_report              the results as one JSON object, or as text

Exit status 1 says that greedy tokens differ. Sampled tokens may differ, because a drafter promises only their
distribution. With `--live` both sides first decode the first prompt on the screen (live.py); that run does not count.
"""

if __name__ == "__main__":  # before torch is imported: --help and wrong flags are answered at once
    from cli.start import answer_flags
    from scripts.flags import compare_args

    answer_flags(compare_args)

import argparse
import functools
import json
import math
import shlex
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from cli.answers import Answer
from cli.errors import cpu_share, ending_plainly
from cli.flags import check_options, choose_seed, speculate_k
from cli.flags import parse_args as generate_args
from cli.load import cache_type, compiles, drafter_of, load_target, pick_device, warm_up
from cli.main import kinds_of
from cli.prompts import Request, encoded, requests, sampling_of
from cli.report import decided, rate, speculative, summary
from cli.session import Session
from decoding.scheduler import common_prefix
from decoding.settings import is_random, random_seed
from decoding.timing import Timing
from decoding.validation import check_lengths
from generate import Engine
from loading.tokenizer import Tokenizer, check_same_tokens
from scripts.flags import compare_args as parse_args
from tp import ALONE
from weights.walker import pack_model

# Flags that have no meaning in --a and --b.
REFUSED = ("interactive", "system", "output", "ordered", "json", "prompt", "prompt_file", "num_samples", "profile",
           "show_drafts", "prompt_cache", "report")  # fmt: skip
TARGET_FLAGS = ("checkpoint", "adapter", "random_weights", "quantize", "quantize_head", "dtype", "device")
WARM_UP_TOKENS = 8  # new tokens a prompt in each side's first batch, which does not count
CONTEXT_TOKENS = 8  # tokens printed before a difference, and half as many behind it


@dataclass
class Side:
    """One configuration with its rows: the encoded prompts and their settings."""

    args: argparse.Namespace
    session: Session
    num_threads: int
    rows: list[Request]
    timings: list[Timing] = field(default_factory=list)  # one for every `decode`

    def decode(self, rows: Sequence[Request]) -> list[list[int]]:
        """New ids of each row, decoded from an empty cache, as many rows at a time as the engine has slots."""
        torch.set_num_threads(self.num_threads)
        self.session.engine.clear()
        answers = [Answer(row, self.session.printer(row.stop)) for row in rows]
        for answer in self.session.decode(answers):
            if answer.request.error is not None:
                raise ValueError(answer.request.error)
        self.timings.append(Timing([answer.request for answer in answers]))
        return [answer.printer.ids for answer in answers]


def side_args(name: str, flags: str, prompt_file: str | None = None) -> argparse.Namespace:
    """generate.py's flags from a string, for these prompts. ValueError for flags that mean nothing here."""
    try:
        words = shlex.split(flags)
    except ValueError as error:
        raise ValueError(f"--{name} {flags}: {error}") from None
    options = {word.partition("=")[0] for word in words}
    if options & {"-h", "--help"}:
        raise ValueError(f"--{name}: --help stands alone; run python generate.py --help for the flags")
    args, defaults = generate_args(words), generate_args([])
    for option in REFUSED:
        if f"--{option}" in options or getattr(args, option) != getattr(defaults, option):
            raise ValueError(f"--{name}: --{option} has no meaning here; this program has its own --prompt and --json")
    check_options(argparse.Namespace(**vars(args) | {"prompt_file": prompt_file}))
    return args


def share_random_seeds(a: argparse.Namespace, b: argparse.Namespace, prompts: list[Request]) -> list[Request]:
    """Draw the seeds that nobody chose, one for both sides: their texts are compared. Returns the prompts with
    theirs."""
    choose_seed(a)
    if a.has_random_seed and b.has_random_seed:
        b.seed = a.seed
    else:
        choose_seed(b)
    return [prompt._replace(seed=random_seed()) if is_random(prompt.seed) else prompt for prompt in prompts]


def load_sides(a: argparse.Namespace, b: argparse.Namespace, prompts: list[Request]) -> tuple[Side, Side]:
    """Both sides, warmed up. Where no flag limits new tokens, both sides get as many as the shorter context holds.
    ValueError for different tokenizers, and for prompts that do not fit."""
    targets, parts, contexts = {}, [], []  # parts: (model, tokenizer, drafter) of a side
    for args in (a, b):
        key = tuple(getattr(args, flag) for flag in TARGET_FLAGS)
        targets[key] = targets.get(key) or load_target(args, pick_device(args.device), ALONE)
        model, tokenizer = targets[key]
        drafter = drafter_of(args, model, tokenizer)
        parts.append((model, tokenizer, drafter))
        max_length, limit = model.config.max_seq_length, args.max_seq_length
        if limit is not None and not 2 <= limit <= max_length:
            raise ValueError(f"--max_seq_length {limit} must lie between 2 and the model's {max_length}")
        contexts.append(limit or max_length)
    check_same_tokens(parts[0][1], parts[1][1], b.random_weights or b.checkpoint)
    for target, _ in targets.values():  # after the drafters: packed weights cannot be copied into a draft
        drafts = [drafter.model for model, _, drafter in parts if model is target and drafter is not None]
        pack_model(target, *[draft for draft in drafts if draft is not None])
    num_threads = min(torch.get_num_threads(), cpu_share())
    side_a, side_b = (load_side(args, *part, prompts, min(contexts), num_threads) for args, part in zip((a, b), parts))
    return side_a, side_b


def load_side(args, model, tokenizer, drafter, prompts: list[Request], limit: int, num_threads: int) -> Side:
    """A warmed-up engine, as generate.py makes it for these prompts, in a context of `limit` positions."""
    max_length = args.max_seq_length or model.config.max_seq_length
    check = functools.partial(check_lengths, model, limit=max_length)
    rows, errors = encoded(prompts, args, tokenizer, limit, check)
    if errors:
        raise ValueError(errors[0])
    length = max(len(row.ids) + row.max_new_tokens for row in rows)
    engine = Engine(
        model, min(args.batch_size, len(rows)), args.max_seq_length or length, drafter=drafter,
        compile=compiles(args.compile, pick_device(args.device)), speculate_k=speculate_k(args),
        one_width=args.one_width, kind=cache_type(args),
    )  # fmt: skip
    torch.set_num_threads(args.threads or num_threads)
    warm_up(engine, rows[0].sampling, length // 2, kinds_of(rows))
    stop_ids = frozenset() if args.ignore_eos else tokenizer.stop_ids
    side = Side(args, Session(engine, tokenizer, sampling_of(args), stop_ids), args.threads or num_threads, rows)
    batch = rows[: engine.batch_size]
    side.decode([row._replace(max_new_tokens=min(row.max_new_tokens, WARM_UP_TOKENS)) for row in batch])
    side.timings.clear()
    return side


def compare(a: Side, b: Side, rounds: int) -> tuple[list[tuple[float, float]], list[list[tuple[str, list[int]]]]]:
    """Decode all rows by a, b, b, a, as many at a time as fill both sides' batches. Returns (tok/s of a, tok/s of b) of
    every group and round, and for every row its runs as (name of the side, new ids)."""
    rates, runs, group_size = [], [[] for _ in a.rows], math.lcm(a.args.batch_size, b.args.batch_size)
    for begin in range(0, len(a.rows), group_size):
        for _ in range(rounds):
            num_tokens, seconds = Counter(), Counter()
            for name in "abba":
                side = a if name == "a" else b
                group = side.decode(side.rows[begin : begin + group_size])
                num_tokens[name] += decided(side.timings[-1].requests)
                seconds[name] += side.timings[-1].decode_s
                for row, ids in enumerate(group, begin):
                    runs[row].append((name, ids))
            rates.append((rate(num_tokens["a"], seconds["a"]), rate(num_tokens["b"], seconds["b"])))
    return rates, runs


def describe(number: int, text: str, runs: list[tuple[str, list[int]]], a: Side, greedy: bool) -> dict:
    """One prompt of the report: equal, or the first token at which another run differs from a's first run. A run of b
    that differs is preferred to a later one of a."""
    (_, first_ids), *later_runs = runs
    name, ids = min(later_runs, key=lambda run: (run[1] == first_ids, run[0] == "a"))
    report = {"row": number, "prompt": text, "tokens": len(first_ids), "equal": ids == first_ids, "difference": None}
    if ids == first_ids:
        return report
    position, tokenizer = common_prefix(first_ids, ids), a.session.tokenizer
    context = slice(max(0, position - CONTEXT_TOKENS), position + CONTEXT_TOKENS // 2)
    report["difference"] = {
        "against": name, "position": position,
        "top_gap": top_gap(a, a.rows[number].ids + first_ids[:position]) if greedy else None,
    }  # fmt: skip
    for side, side_ids in (("a", first_ids), ("b", ids)):
        id = side_ids[position] if position < len(side_ids) else None  # None: the text has ended
        id_text = None if id is None else continuation(tokenizer, [id])
        texts = {f"{side}_text": id_text, f"{side}_around": continuation(tokenizer, side_ids[context])}
        report["difference"] |= {side: id, **texts}
    return report


def continuation(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of ids that follow other ids."""
    stream = tokenizer.stream(continues=True)
    return "".join(stream.feed(id) for id in ids) + stream.flush()


@torch.inference_mode()
def top_gap(side: Side, ids: list[int]) -> float:
    """The largest logit after `ids` minus the second largest, from one pass over `ids`. If the gap is as small as
    rounding, kernels that sum in another order may decide differently. If it is larger, one of the sides is wrong."""
    model = side.session.engine.model
    device = model.norm.weight.device
    h = model.hidden(torch.tensor([ids], device=device), torch.arange(len(ids), device=device))  # (1, T, D)
    top = model.head(h[:, -1])[0].topk(2).values  # (2,)
    return (top[0] - top[1]).item()


def run(args: argparse.Namespace) -> dict:
    """Load, decode, compare: the object that --json prints."""
    flags_a, flags_b = (side_args(*side, args.prompt_file) for side in (("a", args.a), ("b", args.b)))
    prompts, errors = requests(args)
    if errors:
        raise ValueError(errors[0])
    prompts = share_random_seeds(flags_a, flags_b, prompts)
    if args.live:
        from scripts.live import Column, watch  # before anything is loaded: it needs rich
    a, b = load_sides(flags_a, flags_b, prompts)
    if args.live:
        watch([Column(f"a: {args.a}", a), Column(f"b: {args.b}", b)])
    greedy = all(row.sampling.is_greedy for row in a.rows + b.rows)
    rates, runs = compare(a, b, args.rounds)
    reports = [describe(n, prompt.text, runs[n], a, greedy) for n, prompt in enumerate(prompts)]
    num_equal = sum(report["equal"] for report in reports)
    return {
        "a": args.a, "b": args.b, "dtype": str(a.session.engine.model.norm.weight.dtype).removeprefix("torch."),
        "judged": greedy, "equal": num_equal, "different": len(prompts) - num_equal, "prompts": reports,
        **totals(rates), "speculative": [speculative(side.session.engine, side.timings) for side in (a, b)],
    }  # fmt: skip


def totals(rates: list[tuple[float, float]]) -> dict:
    """Median, min and max of the rates and of b over a. Pairs in which a side decoded no second token do not count."""
    rates = [(a, b) for a, b in rates if a and b]
    values = {"a_tok_s": [a for a, _ in rates], "b_tok_s": [b for _, b in rates], "ratio": [b / a for a, b in rates]}
    summaries = {
        key: {"median": statistics.median(x), "min": min(x), "max": max(x)} if x else None for key, x in values.items()
    }
    return {"pairs": len(rates), **summaries}


def print_report(result: dict) -> None:
    print(f"a: {result['a'] or 'no flags'}\nb: {result['b'] or 'no flags'}")
    for prompt in result["prompts"]:
        text = prompt["prompt"] if len(prompt["prompt"]) <= 40 else prompt["prompt"][:39] + "…"
        print(f"prompt {prompt['row']} {text!r}: {outcome(prompt, result['dtype'])}")
    sampled = "" if result["judged"] else "; sampled: differences are shown, not judged"
    print(f"{result['equal']} of {len(result['prompts'])} equal{sampled}")
    for side, speculation in zip("ab", result["speculative"], strict=True):
        if speculation is not None:
            print(f"{side}:", *summary(speculation), sep="\n  ")
    if result["ratio"]:
        a, b, ratio = (
            f"{result[key]['median']:{digits}} ({result[key]['min']:{digits}}–{result[key]['max']:{digits}})"
            for key, digits in (("a_tok_s", ".1f"), ("b_tok_s", ".1f"), ("ratio", ".2f"))
        )
        print(f"a {a} tok/s, b {b} tok/s, b/a {ratio} over {result['pairs']} pair{'s' * (result['pairs'] > 1)}")


def outcome(prompt: dict, dtype: str) -> str:
    diff = prompt["difference"]
    if diff is None:
        return f"equal, {prompt['tokens']} tokens"
    a, b = ("ends" if diff[side] is None else f"{diff[side]} {diff[f'{side}_text']!r}" for side in "ab")
    name = "b" if diff["against"] == "b" else "a in another run"
    gap = "" if diff["top_gap"] is None else f"; a's two best logits lie {diff['top_gap']:.2g} apart ({dtype})"
    texts = "".join(f"\n  {side} …{diff[f'{side}_around']!r}" for side in "ab")
    return f"token {diff['position']} differs: a {a}, {name} {b}{gap}{texts}"


def main() -> None:
    args = parse_args()
    with ending_plainly():
        result = run(args)
        print(json.dumps(result)) if args.json else print_report(result)
    sys.exit(1 if result["judged"] and result["different"] else 0)


if __name__ == "__main__":
    main()
