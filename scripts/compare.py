r"""Compare two configurations of generate.py on the same prompts: their tokens, and their rates.

    python -m scripts.compare --a "--temperature 0" --b "--temperature 0 --draft ngram" \
        --prompt_file prompts.txt

    side_options, load_sides, Side    two strings of flags as two engines; equal weights are loaded
                                      once
    compare                           every prompt by a, b, b, a: a steady drift of the machine's
                                      speed cancels
    describe, top_gap                 the first token that differs, and how close a's two largest
                                      logits are there
    run, print_report                 the results as one JSON object, or as text
    run_variants                      --variants: a alone, with its draft's files read in every way
                                      that they leave open; draft_variants.py has the results

Exit status 1 says that greedy tokens differ. Sampled tokens may differ, because a drafter promises
only their distribution.
"""

if __name__ == "__main__":  # before torch is imported
    from cli.process import prepare

    prepare()

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
from typing import NamedTuple

import torch

from cli.answers import RowAnswer
from cli.errors import cpu_share, exit_on_error
from cli.flags import FLAGS, Parser, given, positive, with_chosen_seed
from cli.flags import parse_args as generate_options
from cli.opening import context_limit, print_sampling, sampling_paths
from cli.options import Options, PromptOptions
from cli.prompts import Prompt, Row, encode_all, read_prompts
from cli.report import decided, rate, speculative, summary
from cli.running import run_interruptibly, warm_up
from decoding.engine import Engine
from decoding.errors import UserError
from decoding.scheduler import common_prefix
from decoding.settings import random_seed
from decoding.statistics import Timing
from drafts.base import Drafter
from drafts.registry import draft_source, pack_with
from generate import LLM
from loading.options import ModelOptions
from loading.target import Target, load_target, pick_device
from loading.tokenizer import Tokenizer
from model import Transformer
from scripts import draft_variants
from scripts.perplexity import check_same_tokens
from weights.walker import pack_model

WARM_UP_TOKENS = 8  # new tokens a prompt in each side's first batch, which does not count
CONTEXT_TOKENS = 8  # tokens printed before a difference, and half as many after it


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        description="Compare the tokens and the rates of two configurations of generate.py."
    )
    add = parser.add_argument
    add(
        "--a",
        required=True,
        metavar="FLAGS",
        help='flags of generate.py, such as "--temperature 0"',
    )
    other = parser.add_mutually_exclusive_group(required=True)
    other.add_argument("--b", metavar="FLAGS", help="the other configuration; ratios are b over a")
    other.add_argument(
        "--variants",
        action="store_true",
        help="say with which settings the weights of a's EAGLE-3, DFlash or MTP draft were trained",
    )
    source = parser.add_mutually_exclusive_group()
    FLAGS["prompt"].add_to(source)
    FLAGS["prompt_file"].add_to(source)
    add(
        "--rounds",
        type=positive,
        default=1,
        metavar="N",
        help="decode each prompt N times by a, b, b, a; default: 1",
    )
    add("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(join_flags_of_sides(sys.argv[1:] if argv is None else argv))
    args.prompts = PromptOptions(prompt=args.prompt, file=args.prompt_file)
    return args


def join_flags_of_sides(words: Sequence[str]) -> list[str]:
    """--a FLAGS as --a=FLAGS: argparse would take a --compile after --a for a flag of its own."""
    joined = []
    for word in words:
        if joined and joined[-1] in ("--a", "--b"):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


@functools.cache
def default_threads() -> int:
    """As generate.py takes them, whatever the first side takes."""
    return min(torch.get_num_threads(), cpu_share())


@dataclass
class Side:
    """One configuration with its rows: the encoded prompts and their settings."""

    options: Options
    llm: LLM
    num_threads: int
    rows: list[Row]
    timings: list[Timing] = field(default_factory=list)  # one for every `decode`

    @property
    def batch_size(self) -> int:
        return self.options.run.batch_size

    def total(self) -> Timing:
        return Timing([request for timing in self.timings for request in timing.requests])

    def decode(self, rows: Sequence[Row]) -> list[list[int]]:
        """New ids of each row, decoded from an empty cache, as many rows at a time as the engine
        has slots."""
        torch.set_num_threads(self.num_threads)
        self.llm.engine.clear()
        answers = [RowAnswer(self.llm, row) for row in rows]
        for answer in run_interruptibly(self.llm, answers):
            answer.check()
        self.timings.append(Timing([answer.request for answer in answers]))
        return [answer.ids for answer in answers]


def side_options(name: str, flags: str, prompt_file: str | None = None) -> Options:
    """generate.py's options from a string, for these prompts. UserError for flags that mean
    nothing here."""
    try:
        words = shlex.split(flags)
    except ValueError as error:
        raise UserError(f"--{name} {flags}: {error}") from None
    refused = [flag for flag in given(words) if flag.is_own or flag.key == "logprobs"]
    if refused:
        raise UserError(
            f"--{name}: {refused[0].name} has no meaning here; this program has its own --prompt"
            " and --json"
        )
    of_prompts = [] if prompt_file is None else [f"--prompt_file={prompt_file}"]
    return generate_options(["--batch_size=1", *words, *of_prompts])


def share_random_seeds(a: Options, b: Options) -> tuple[Options, Options]:
    """Draw the seed that no flag chose, one for both sides: their texts are compared."""
    seed = random_seed()
    return with_chosen_seed(a, lambda _: seed), with_chosen_seed(b, lambda _: seed)


class Parts(NamedTuple):
    """What a side is made of."""

    options: Options
    model: Transformer
    tokenizer: Tokenizer
    drafter: Drafter | None


def load_sides(a: Options, b: Options, prompts: list[Prompt]) -> tuple[Side, Side]:
    """Both sides, warmed up. Where no flag limits new tokens, both sides get as many as the shorter
    context holds. UserError for different tokenizers, and for prompts that do not fit."""
    targets: dict[ModelOptions, tuple[Transformer, Tokenizer]] = {}
    sides = []
    for options in (a, b):
        print_sampling(options)
        target = Target(options.model)
        draft = draft_source(options.draft, target, progress=True)
        if options.model not in targets:  # a model with the same options is loaded once
            device = pick_device(options.model.device)
            targets[options.model] = load_target(target, device, progress=True)
        model, tokenizer = targets[options.model]
        sides.append(Parts(options, model, tokenizer, draft.load(model, tokenizer)))
    first, second = sides
    check_same_tokens(first.tokenizer, second.tokenizer, b.model.source)
    # Pack only after both drafters are made: packed weights cannot be copied into a draft.
    for model, _ in targets.values():
        pack_with(model, *[parts.drafter for parts in sides if parts.model is model])
    limit = min(context_limit(parts.options, parts.model.config) for parts in sides)
    return load_side(first, prompts, limit), load_side(second, prompts, limit)


def load_side(parts: Parts, prompts: list[Prompt], limit: int) -> Side:
    """A warmed-up engine, as generate.py makes it for these prompts, in a context of `limit`
    positions."""
    options, model, tokenizer, drafter = parts
    max_length = options.run.max_seq_length
    rows, errors = encode_all(prompts, options, tokenizer, model, limit)
    if errors:
        raise UserError(errors[0])
    length = max(len(row.ids) + row.max_new_tokens for row in rows)
    batch_size = min(options.run.batch_size, len(rows))
    engine = Engine(model, batch_size, max_length or length, options.engine, drafter)
    num_threads = options.run.threads or default_threads()
    torch.set_num_threads(num_threads)
    warm_up(engine, rows[0].sampling, sampling_paths(rows))
    stop_ids = frozenset() if options.requests.ignore_eos else tokenizer.stop_ids
    side = Side(options, LLM.from_engine(engine, tokenizer, stop_ids), num_threads, rows)
    batch = rows[: engine.batch_size]
    side.decode(
        [row._replace(max_new_tokens=min(row.max_new_tokens, WARM_UP_TOKENS)) for row in batch]
    )
    side.timings.clear()
    return side


def compare(
    a: Side, b: Side, rounds: int
) -> tuple[list[tuple[float, float]], list[list[tuple[str, list[int]]]]]:
    """Decode all rows by a, b, b, a, as many at a time as fill both sides' batches. Returns (tok/s
    of a, tok/s of b) of every group and round, and for every row its runs as (name of the side, new
    ids)."""
    rates = []
    runs = [[] for _ in a.rows]
    group_size = math.lcm(a.batch_size, b.batch_size)
    for begin in range(0, len(a.rows), group_size):
        for _ in range(rounds):
            num_tokens = Counter()
            seconds = Counter()
            for name in "abba":
                side = a if name == "a" else b
                group = side.decode(side.rows[begin : begin + group_size])
                num_tokens[name] += decided(side.timings[-1].requests)
                seconds[name] += side.timings[-1].decode_s
                for row, ids in enumerate(group, begin):
                    runs[row].append((name, ids))
            a_rate = rate(num_tokens["a"], seconds["a"])
            b_rate = rate(num_tokens["b"], seconds["b"])
            rates.append((a_rate, b_rate))
    return rates, runs


def describe(
    number: int, text: str, runs: list[tuple[str, list[int]]], a: Side, greedy: bool
) -> dict:
    """One prompt of the report: equal, or the first token at which another run differs from a's
    first run. A run of b that differs is preferred to a later one of a."""
    (_, first_ids), *later_runs = runs
    name, ids = min(later_runs, key=lambda run: (run[1] == first_ids, run[0] == "a"))
    difference = None
    if ids != first_ids:
        position = common_prefix(first_ids, ids)
        difference = {"against": name, "position": position, "top_gap": None}
        if greedy:
            difference["top_gap"] = top_gap(a, a.rows[number].ids + first_ids[:position])
        difference |= describe_side("a", first_ids, position, a.llm.tokenizer)
        difference |= describe_side("b", ids, position, a.llm.tokenizer)
    return {
        "row": number,
        "prompt": text,
        "tokens": len(first_ids),
        "equal": difference is None,
        "difference": difference,
    }


def describe_side(side: str, ids: list[int], position: int, tokenizer: Tokenizer) -> dict:
    """The token of a side at a difference (None: its text has ended before), and the text
    around."""
    id = None
    text = None
    if position < len(ids):
        id = ids[position]
        text = continuation(tokenizer, [id])
    begin = max(0, position - CONTEXT_TOKENS)
    around = continuation(tokenizer, ids[begin : position + CONTEXT_TOKENS // 2])
    return {side: id, f"{side}_text": text, f"{side}_around": around}


def continuation(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of ids that follow other ids."""
    stream = tokenizer.stream(continues=True)
    return "".join(stream.feed(id) for id in ids) + stream.flush()


@torch.inference_mode()
def top_gap(side: Side, ids: list[int]) -> float:
    """The largest logit after `ids` minus the second largest, from one pass over `ids`. If the gap
    is as small as rounding, kernels that sum in another order may decide differently. If it is
    larger, one of the sides is wrong."""
    model = side.llm.engine.model
    device = model.norm.weight.device
    tokens = torch.tensor([ids], device=device)  # (1, T)
    h = model.hidden(tokens, torch.arange(len(ids), device=device))  # (1, T, D)
    largest, second = model.head(h[:, -1])[0].topk(2).values.tolist()
    return largest - second


def run(args: argparse.Namespace) -> dict:
    """Load, decode, compare: the object that --json prints."""
    options_a = side_options("a", args.a, args.prompts.file)
    options_b = side_options("b", args.b, args.prompts.file)
    prompts = prompts_of(args)
    options_a, options_b = share_random_seeds(options_a, options_b)
    a, b = load_sides(options_a, options_b, prompts)
    greedy = all(row.sampling.is_greedy for row in a.rows + b.rows)
    rates, runs = compare(a, b, args.rounds)
    reports = [describe(n, prompt.text, runs[n], a, greedy) for n, prompt in enumerate(prompts)]
    num_equal = sum(report["equal"] for report in reports)
    return {
        "a": args.a,
        "b": args.b,
        "dtype": str(a.llm.engine.model.norm.weight.dtype).removeprefix("torch."),
        "judged": greedy,
        "equal": num_equal,
        "different": len(prompts) - num_equal,
        "prompts": reports,
        **totals(rates),
        "speculative": [speculative(side.llm.engine, side.total()) for side in (a, b)],
    }


def prompts_of(args: argparse.Namespace) -> list[Prompt]:
    prompts, errors = read_prompts(args.prompts)
    if errors:
        raise UserError(errors[0])
    return prompts


def run_variants(args: argparse.Namespace) -> dict:
    """Decode with every variant of the draft: the object that --json prints."""
    options = with_chosen_seed(side_options("a", args.a, args.prompts.file))
    prompts = prompts_of(args)
    target = Target(options.model)
    variants = draft_source(options.draft, target, progress=True).variants()
    draft_variants.check(variants, options.engine.speculate_k)
    print_sampling(options)
    model, tokenizer = load_target(target, pick_device(options.model.device), progress=True)
    pack_model(model)
    limit = context_limit(options, model.config)
    results = []
    for settings, source in variants:
        drafter = source.load(model, tokenizer)
        pack_model(drafter.model)
        parts = Parts(options, model, tokenizer, drafter)
        side = load_side(parts, prompts, limit)
        side.decode(side.rows)
        results.append(draft_variants.result_of(settings, side.total()))
    return draft_variants.judged(results)


def totals(rates: list[tuple[float, float]]) -> dict:
    """Median, min and max of the rates and of b over a. Pairs in which a side decoded no second
    token do not count."""
    pairs = [(a, b) for a, b in rates if a and b]
    return {
        "pairs": len(pairs),
        "a_tok_s": summary_of([a for a, _ in pairs]),
        "b_tok_s": summary_of([b for _, b in pairs]),
        "ratio": summary_of([b / a for a, b in pairs]),
    }


def summary_of(values: list[float]) -> dict | None:
    if not values:
        return None
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def print_report(result: dict) -> None:
    print(f"a: {result['a'] or 'no flags'}\nb: {result['b'] or 'no flags'}")
    for prompt in result["prompts"]:
        text = prompt["prompt"]
        if len(text) > 40:
            text = text[:39] + "…"
        print(f"prompt {prompt['row']} {text!r}: {outcome(prompt, result['dtype'])}")
    sampled = "" if result["judged"] else "; sampled: differences are shown, not judged"
    print(f"{result['equal']} of {len(result['prompts'])} equal{sampled}")
    for side, speculation in zip("ab", result["speculative"], strict=True):
        if speculation is not None:
            print(f"{side}:", *summary(speculation), sep="\n  ")
    if result["ratio"]:
        a = range_text(result["a_tok_s"], ".1f")
        b = range_text(result["b_tok_s"], ".1f")
        ratio = range_text(result["ratio"], ".2f")
        plural = "s" if result["pairs"] > 1 else ""
        print(f"a {a} tok/s, b {b} tok/s, b/a {ratio} over {result['pairs']} pair{plural}")


def range_text(values: dict, digits: str) -> str:
    return f"{values['median']:{digits}} ({values['min']:{digits}}–{values['max']:{digits}})"


def outcome(prompt: dict, dtype: str) -> str:
    """One prompt's part of the report, after its text."""
    difference = prompt["difference"]
    if difference is None:
        return f"equal, {prompt['tokens']} tokens"
    name = "b" if difference["against"] == "b" else "a in another run"
    a = token_text(difference, "a")
    b = token_text(difference, "b")
    line = f"token {difference['position']} differs: a {a}, {name} {b}"
    if difference["top_gap"] is not None:
        line += f"; a's two best logits lie {difference['top_gap']:.2g} apart ({dtype})"
    for side in "ab":
        line += f"\n  {side} …{difference[f'{side}_around']!r}"
    return line


def token_text(difference: dict, side: str) -> str:
    if difference[side] is None:
        return "ends"
    return f"{difference[side]} {difference[f'{side}_text']!r}"


def main() -> None:
    with exit_on_error():
        args = parse_args()
        result = run_variants(args) if args.variants else run(args)
        if args.json:
            print(json.dumps(result))
        elif args.variants:
            draft_variants.print_table(result)
        else:
            print_report(result)
    sys.exit(1 if result.get("judged") and result["different"] else 0)


if __name__ == "__main__":
    main()
