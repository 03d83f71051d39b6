"""Do two configurations say the same, and which one is faster? Two strings of generate.py's flags, one prompt set.

    python -m scripts.compare --a "--temperature 0" --b "--temperature 0 --draft ngram" --prompt_file prompts.txt

    side_args, load_sides, Side    a string of flags as something that decodes
    load_all                       models of several sets of flags, equal weights held once
    compare                        each prompt by a, b, b, a: a steady drift of the machine falls on both alike
    difference, top_gap            where rows of ids part, and how close a's two best tokens stood there
    summarize, print_found         rates as medians, ratios taken pair by pair

Tokens are always compared, those of every run with a's first. They are judged, by exit status 1 where any differ, only
where both temperatures are 0. Sampled ones are not: with a drafter only their distribution is promised. But the same
seed gives the same tokens where neither side drafts (in another batch, compiled), so differences are shown.

This file measures and compares; it knows nothing of how anything is loaded or decoded.
"""

import argparse
import json
import math
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from cli.answers import Answer
from cli.errors import cpu_share, ending_plainly
from cli.flags import Parser, check_options, positive, speculate_k
from cli.flags import parse_args as generate_args
from cli.load import compiles, drafter_of, load_target, pick_device, warm_up
from cli.prompts import Request, new_tokens, requests, sampling_of
from cli.report import rate
from cli.session import Session
from decoding.scheduler import common_prefix
from decoding.timing import Timing
from decoding.validation import check_lengths
from generate import Engine
from loading.drafts import check_same_tokens
from loading.tokenizer import Tokenizer
from model import Transformer
from speculative import Drafter, ModelDraft
from tp import ALONE
from weights.walker import pack_model

REFUSED = ("interactive", "system", "json", "prompt", "prompt_file", "num_samples", "profile", "show_drafts",
           "prompt_cache")  # fmt: skip
WEIGHTS = ("checkpoint", "random_weights", "quantize", "quantize_head", "dtype", "device")  # flags that name a target
DRAFTS = ("draft_checkpoint", "draft_quantize", "dtype", "device")  # and a draft of its own
REHEARSED = 8  # tokens that each side decodes first, uncounted
AROUND = 8  # tokens of text before a difference, and half as many behind it


# ---------------------------------------------------------------------------------------------- sides


class Run(NamedTuple):
    """Some prompts decoded once."""

    rows: list[list[int]]  # new ids of each
    tokens: int  # decoded in `seconds`: all but each row's first
    seconds: float


@dataclass
class Side:
    """One configuration, with its prompts and how many new tokens each gets."""

    args: argparse.Namespace
    session: Session
    threads: int
    prompts: list[list[int]]
    budgets: list[int]

    def decode(self, begin: int, end: int, most: int | None = None) -> Run:
        """Prompts `begin` to `end`, as many at a time as the side's engine has slots, `most` new tokens each."""
        torch.set_num_threads(self.threads)
        self.session.engine.clear()  # every run from nothing
        pairs = zip(self.prompts[begin:end], self.budgets[begin:end])
        answers = [
            Answer(
                Request("", ids=prompt, max_new_tokens=min(budget, most or budget), seed=self.args.seed),
                self.session.printer(self.args.stop),
            )
            for prompt, budget in pairs
        ]  # fmt: skip
        for answer in self.session.decode(answers):
            if answer.request.error is not None:
                raise ValueError(answer.request.error)
        timing = Timing([answer.request for answer in answers])
        return Run([answer.printer.ids for answer in answers], sum(timing.decoded) - len(answers), timing.decode_s)


def side_args(name: str, flags: str) -> argparse.Namespace:
    """generate.py's flags from a string. ValueError for those that mean nothing here."""
    try:
        words = shlex.split(flags)
    except ValueError as error:
        raise ValueError(f"--{name} {flags}: {error}") from None
    said = {word.partition("=")[0] for word in words}
    if "-h" in said or "--help" in said:
        raise ValueError(f"--{name}: --help stands alone: python generate.py --help")
    args, usual = generate_args(words), generate_args([])
    for option in REFUSED:
        if f"--{option}" in said or getattr(args, option, None) != getattr(usual, option, None):
            raise ValueError(f"--{name}: --{option} has no meaning here; give prompts to this program itself")
    check_options(args)
    return args


def load_sides(a: argparse.Namespace, b: argparse.Namespace, asked: list[Request]) -> tuple[Side, Side]:
    """Both sides, warmed up; equal weights are held once. ValueError for different tokenizers, and for what does not
    fit. New tokens that no flag limits are as many on both sides."""
    parts = load_all((a, b))
    check_same_tokens(parts[0][1], parts[1][1], b.random_weights or b.checkpoint)
    shared = min(context(args, model, drafter) for args, (model, _, drafter) in zip((a, b), parts, strict=True))
    threads = min(torch.get_num_threads(), cpu_share())
    left, right = (new_side(args, *part, asked, shared, threads) for args, part in zip((a, b), parts, strict=True))
    return left, right


def load_all(settings: Sequence[argparse.Namespace]) -> list[tuple[Transformer, Tokenizer, Drafter | None]]:
    """What cli.load.load gives for each set of flags, with equal weights held once."""
    targets, drafts, found = {}, {}, []
    for args in settings:
        key, draft = (tuple(getattr(args, name) for name in names) for names in (WEIGHTS, DRAFTS))
        if key not in targets:
            targets[key] = load_target(args, pick_device(args.device), ALONE)
        drafter = ModelDraft(drafts[draft]) if draft in drafts else drafter_of(args, *targets[key])
        if args.draft_checkpoint:
            drafts[draft] = drafter.model
        found.append((*targets[key], drafter))
    for model, _ in targets.values():  # last: a draft that is made of its target cannot be made of packed weights
        drafters = [drafter for target, _, drafter in found if target is model and drafter is not None]
        pack_model(model, *[drafter.model for drafter in drafters if drafter.model is not None])
    return found


def context(args: argparse.Namespace, model: Transformer, drafter: Drafter | None) -> int:
    """Positions that this side has."""
    limit = model.config.max_seq_length if args.max_seq_length is None else args.max_seq_length
    if not 1 <= limit <= model.config.max_seq_length:
        raise ValueError(f"--max_seq_length {limit} must lie between 1 and the model's {model.config.max_seq_length}")
    return min(limit, drafter.model.config.max_seq_length) if drafter is not None and drafter.owns_cache else limit


def new_side(
    args: argparse.Namespace, model: Transformer, tokenizer: Tokenizer, drafter: Drafter | None, asked: list[Request],
    shared: int, threads: int,
) -> Side:  # fmt: skip
    """An engine as generate.py would make it for these prompts; `shared`: the shorter of both sides' contexts."""
    prompts = [request.encode(tokenizer) for request in asked]
    budgets = [new_tokens(args.max_new_tokens, prompt, shared) for prompt in prompts]
    check_lengths(model, prompts, budgets, args.max_seq_length or model.config.max_seq_length, drafter)
    length = max(len(prompt) + n for prompt, n in zip(prompts, budgets, strict=True))
    engine = Engine(
        model, min(args.batch_size, len(asked)), args.max_seq_length or length, drafter=drafter,
        compile=compiles(args.compile, pick_device(args.device)), speculate_k=speculate_k(args),
    )  # fmt: skip
    sampling = sampling_of(args)
    torch.set_num_threads(args.threads or threads)
    warm_up(engine, sampling, filled=length // 2)
    session = Session(engine, tokenizer, sampling, frozenset() if args.ignore_eos else tokenizer.stop_ids)
    side = Side(args, session, args.threads or threads, prompts, budgets)
    side.decode(0, min(args.batch_size, len(asked)), most=REHEARSED)
    return side


# ------------------------------------------------------------------------------------------- comparing


class Difference(NamedTuple):
    """Where two rows part: index among the new tokens, and the token of each, None where a row has ended."""

    position: int
    a: int | None
    b: int | None


def difference(a: Sequence[int], b: Sequence[int]) -> Difference | None:
    n = common_prefix(a, b)
    if n == len(a) == len(b):
        return None
    return Difference(n, *(ids[n] if n < len(ids) else None for ids in (a, b)))


class Pair(NamedTuple):
    """Some prompts decoded by a, b, b, a."""

    prompts: range
    a: tuple[Run, Run]
    b: tuple[Run, Run]

    @property
    def rates(self) -> tuple[float, float]:
        """tok/s of a and of b, each over its two runs: what a steady drift adds is the same for both."""
        a, b = (rate(sum(run.tokens for run in runs), sum(run.seconds for run in runs)) for runs in (self.a, self.b))
        return a, b

    @property
    def ratio(self) -> float | None:
        """b / a; None where one token was all that a row got."""
        a, b = self.rates
        return b / a if a and b else None


def compare(a: Side, b: Side, rounds: int) -> list[Pair]:
    """All prompts, as many at a time as fill both sides' batches."""
    pairs, size = [], math.lcm(a.args.batch_size, b.args.batch_size)
    for begin in range(0, len(a.prompts), size):
        prompts = range(begin, min(begin + size, len(a.prompts)))
        for _ in range(rounds):
            first, second, third, fourth = (side.decode(begin, prompts.stop) for side in (a, b, b, a))
            pairs.append(Pair(prompts, (first, fourth), (second, third)))
    return pairs


def rows_of(pairs: Sequence[Pair], prompt: int) -> list[tuple[str, list[int]]]:
    """(side, new ids) of every run of a prompt, a's first run first, then b's."""
    own = [pair for pair in pairs if prompt in pair.prompts]
    found = [
        (name, run.rows[prompt - pair.prompts.start]) for name in "ab" for pair in own for run in getattr(pair, name)
    ]
    return [found[0], *[row for row in found if row[0] == "b"], *[row for row in found[1:] if row[0] == "a"]]


def describe(number: int, text: str, rows: list[tuple[str, list[int]]], a: Side, greedy: bool) -> dict:
    """One prompt's part of the report: equal, or the first difference of any run from a's first one."""
    _, first = rows[0]
    parted = ((name, row, difference(first, row)) for name, row in rows[1:])
    name, row, at = next(((name, row, at) for name, row, at in parted if at), (None, first, None))
    found = {"row": number, "prompt": text, "tokens": len(first), "equal": at is None, "difference": None}
    if at is None:
        return found
    tokenizer = a.session.tokenizer
    found["difference"] = {
        "against": name, "position": at.position, "a": at.a, "b": at.b,
        "a_text": None if at.a is None else plain_text(tokenizer, [at.a]),
        "b_text": None if at.b is None else plain_text(tokenizer, [at.b]),
        "a_around": around(tokenizer, first, at.position), "b_around": around(tokenizer, row, at.position),
        "top_gap": top_gap(a, a.prompts[number] + first[: at.position]) if greedy else None,
    }  # fmt: skip
    return found


def plain_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Of ids that follow others."""
    stream = tokenizer.stream(continues=True)
    return "".join(stream.feed(id) for id in ids) + stream.flush()


def around(tokenizer: Tokenizer, ids: Sequence[int], position: int) -> str:
    return plain_text(tokenizer, ids[max(0, position - AROUND) : position + AROUND // 2])


@torch.inference_mode()
def top_gap(side: Side, ids: list[int]) -> float:
    """How far the largest logit after `ids` lies above the second, computed anew in one pass over all of them. Two
    kernels that sum in another order may part where it is no larger than their rounding; elsewhere one is wrong."""
    model = side.session.engine.model
    device = model.norm.weight.device
    h = model.hidden(torch.tensor([ids], device=device), torch.arange(len(ids), device=device))  # (1, T, D)
    top = model.head(h[:, -1])[0].topk(2).values  # (2,)
    return (top[0] - top[1]).item()


# --------------------------------------------------------------------------------------------- report


def summarize(values: Sequence[float]) -> dict | None:
    if not values:
        return None
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def totals(pairs: Sequence[Pair]) -> dict:
    """Rates of both sides and their ratio, over all pairs."""
    ratios = [pair.ratio for pair in pairs if pair.ratio is not None]
    a, b = ([pair.rates[side] for pair in pairs if pair.ratio is not None] for side in (0, 1))
    return {"pairs": len(ratios), "a_tok_s": summarize(a), "b_tok_s": summarize(b), "ratio": summarize(ratios)}


def run(args: argparse.Namespace) -> dict:
    """Load, decode, compare: the object that --json prints."""
    flags_a, flags_b = side_args("a", args.a), side_args("b", args.b)
    asked, broken = requests(args)
    if own := next((request for request in asked if request.sampling or request.stop), None):
        raise ValueError(f"{own.place}: settings of its own; here both sides' flags say how to sample and stop")
    if broken:
        raise ValueError(broken[0])
    a, b = load_sides(flags_a, flags_b, asked)
    greedy = flags_a.temperature == flags_b.temperature == 0
    pairs = compare(a, b, args.rounds)
    prompts = [describe(n, request.text, rows_of(pairs, n), a, greedy) for n, request in enumerate(asked)]
    equal = sum(prompt["equal"] for prompt in prompts)
    return {
        "a": args.a, "b": args.b, "dtype": str(a.session.engine.model.norm.weight.dtype).removeprefix("torch."),
        "judged": greedy, "equal": equal, "different": len(asked) - equal, "prompts": prompts, **totals(pairs),
    }  # fmt: skip


def print_found(found: dict) -> None:
    print(f"a: {found['a'] or 'no flags'}\nb: {found['b'] or 'no flags'}")
    for prompt in found["prompts"]:
        print(f"prompt {prompt['row']} {shortened(prompt['prompt'])}: {outcome(prompt, found['dtype'])}")
        if prompt["difference"]:
            for side in "ab":
                print(f"  {side} …{prompt['difference'][f'{side}_around']!r}")
    sampled = "" if found["judged"] else "; sampled: differences are shown, not judged"
    print(f"{found['equal']} of {len(found['prompts'])} equal{sampled}")
    if found["ratio"]:
        rates = [f"{name} {spread(found[f'{name}_tok_s'], '.1f')} tok/s" for name in "ab"]
        pairs = "1 pair" if found["pairs"] == 1 else f"{found['pairs']} pairs"
        print(f"{', '.join(rates)}, b/a {spread(found['ratio'], '.2f')} over {pairs}")


def outcome(prompt: dict, dtype: str) -> str:
    at = prompt["difference"]
    if at is None:
        return f"equal, {prompt['tokens']} tokens"
    said = ["ends" if at[s] is None else f"{at[s]} {at[f'{s}_text']!r}" for s in "ab"]
    other = "b" if at["against"] == "b" else "a in another run"
    gap = "" if at["top_gap"] is None else f"; a's two best logits lie {at['top_gap']:.2g} apart ({dtype})"
    return f"token {at['position']} differs: a {said[0]}, {other} {said[1]}{gap}"


def shortened(text: str, most: int = 40) -> str:
    return repr(text if len(text) <= most else text[: most - 1] + "…")


def spread(found: dict, form: str) -> str:
    median, least, most = (format(found[name], form) for name in ("median", "min", "max"))
    return f"{median} ({least}–{most})"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(description="Two configurations of generate.py on the same prompts: equal? faster?")
    add = parser.add_argument
    add("--a", required=True, metavar="FLAGS", help='flags of generate.py, such as "--temperature 0"')
    add("--b", required=True, metavar="FLAGS", help="the other configuration; ratios are b over a")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", default="Once upon a time")
    source.add_argument("--prompt_file", metavar="FILE", help="as generate.py's")
    add("--rounds", type=positive, default=1, metavar="N", help="times that each prompt is decoded by a, b, b, a")
    add("--json", action="store_true", help="one object on stdout")
    return parser.parse_args(joined(sys.argv[1:] if argv is None else argv))


def joined(argv: Sequence[str]) -> list[str]:
    """--a FLAGS as --a=FLAGS: argparse would take "--compile", being one word, for a flag of this program."""
    words, rest = [], list(argv)
    while rest:
        word = rest.pop(0)
        words.append(f"{word}={rest.pop(0)}" if word in ("--a", "--b") and rest else word)
    return words


def main() -> None:
    args = parse_args()
    with ending_plainly():
        found = run(args)
        print(json.dumps(found)) if args.json else print_found(found)
    sys.exit(1 if found["judged"] and found["different"] else 0)


if __name__ == "__main__":
    main()
