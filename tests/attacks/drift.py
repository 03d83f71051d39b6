"""That greedy text does not drift: with a drafter, and beside other requests, it is the plain text,
bit for bit.

    python -m tests.attacks.drift [--formats float16 int4-g32] [--speculate_k 5 auto] [--write
    benchmarks/drift.json]

    load        one pair of models, in one of the formats, with every drafter
    greedy      a request of every prompt, plain or drafted, in full batches
    mixed       the same among sampled requests, as a server runs them
    in_passes   logits over known texts, by cached passes over so many positions, as decoding runs
                them
    settings    a row for each setting: tokens compared, texts that part, positions whose logits
                differ in a bit
    UNDONE      the measures that make it so, one of which --control undoes
    main        a table and a total, or JSON, written after every setting; the status is 1 if a
                promise is broken

A pass over K + 1 positions could add up in another order than one over 1, and in a dtype of few
digits two logits that nearly tie would change places. Texts show that rarely, so logits are
compared too. What comes after a row's first difference is not compared. A setting whose engines do
not say `identical` has no promise: it neither passes nor fails.

Requests "alike" have prompts of one length in full batches. All texts are compared with plain ones
at the first of the batch sizes, also plain ones at the others ("none"). `bits` counts positions
where passes over 1 and over K + 1 differ.

Requests "mixed" have prompts of 1 to MAX_PROMPT ids, in chunks, that share beginnings; each comes
twice, greedy and sampled. They arrive at random steps into fewer slots, some refuse drafts, some
are aborted. A greedy text is compared with its prompt's alone, plain, in a fresh engine of one
slot, whose passes have no more rows than the model's kernels round alike (int4: 128). `bits` counts
tokens whose log-probabilities differ.

This file measures one pair of models on one machine, and EAGLE-3 and DFlash with random weights,
which guess few tokens right. It does not show what other kernels or sizes would do.
"""

import contextlib
import itertools
import json
import random
import sys
import time
from argparse import BooleanOptionalAction, Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor
from tqdm import tqdm

import decoding.prefill as prompt_room
import decoding.runner as runner
from benchmarks.record import record
from cli.errors import exit_on_error
from cli.flags import DTYPES, Parser, positive
from decoding.engine import Engine
from decoding.errors import UserError
from decoding.kv_8bit import CACHE_TYPES
from decoding.options import CACHE_NAMES
from decoding.sampling import GREEDY, Sampling
from decoding.scheduler import Request, common_prefix
from drafts.base import Drafter
from drafts.dflash import DFlash, DFlashDraft, DFlashModel
from drafts.eagle import Eagle, EagleModel
from drafts.hidden_states import PairDraft
from drafts.registry import load_drafter
from exact.attention import invariant_multiples
from exact.products import RowSplit
from loading.checkpoint import load_model
from loading.tokenizer import load_tokenizer
from model import Transformer
from scripts.distill.draft_kinds import default_layer_ids
from scripts.distill.draft_start import init_weights
from weights.schemes import SCHEMES
from weights.walker import batch_invariant_rows, pack_model

ROOT = Path(__file__).parents[2]
FORMATS = (*DTYPES, *SCHEMES)  # the schemes with bfloat16 activations
RANDOM = ("eagle3", "dflash")  # drafts with random weights
DRAFTERS = ("model", "pard", *RANDOM, "ngram", "suffix", "hybrid", "layers", "quantized:int4-g32")
PROMPT = 12  # ids of the prompts of requests "alike"
MAX_PROMPT = 250  # ids of the longest prompt of requests "mixed"
CHUNK = 48  # ids of their prompts in a pass
GREEDILY = Sampling(0)
NEIGHBOURS = (
    Sampling(0.8),
    Sampling(1.0, top_k=20, top_p=0.9),
    Sampling(0.9, presence_penalty=0.5),
)


def prompts_of(args: Namespace) -> dict[str, list[list[int]]]:
    """Prompts from the text by kind of requests. UserError for too few paragraphs that are long
    enough.

    "alike" are the beginnings of paragraphs, of PROMPT ids. "mixed" begin at a few places; a third
    is long."""
    tokenizer, text = load_tokenizer(args.draft_checkpoint), args.text.read_text(encoding="utf-8")
    rows = (tokenizer.encode(paragraph)[:PROMPT] for paragraph in text.splitlines())
    alike = list(itertools.islice((row for row in rows if len(row) == PROMPT), args.prompts))
    if len(alike) < args.prompts:
        raise UserError(
            f"{args.text}: {len(alike)} paragraphs of {PROMPT} tokens, fewer than --prompts asks"
            f" for"
        )
    ids, draw = tokenizer.encode(text[:100_000]), random.Random(0)
    begins = [draw.randrange(max(1, len(ids) - MAX_PROMPT)) for _ in alike[::4]]
    lengths = [
        draw.randint(1, limit) for limit, _ in zip(itertools.cycle((MAX_PROMPT, 16, 64)), alike)
    ]
    return {
        "alike": alike,
        "mixed": [ids[begin : begin + n] for begin, n in zip(itertools.cycle(begins), lengths)],
    }


def load(args: Namespace, format: str, ids: list[int]) -> tuple[Transformer, dict[str, Drafter]]:
    """The target and the grid's drafters, made and packed as generate.py does. `ids`: the text's
    most frequent."""
    dtype, scheme = (format, None) if format in DTYPES else ("bfloat16", format)
    model = load_model(
        args.checkpoint,
        dtype=getattr(torch, dtype),
        quantize=scheme,
        head_scheme="auto",
        pack=False,
    )
    n, tokenizer = model.config.n_layers, load_tokenizer(args.draft_checkpoint)
    sources = {"model": Path(args.draft_checkpoint), "pard": Path(args.pard_checkpoint)}
    sources["layers"] = f"layers:0-{n // 2 - 1},{n - 1}"
    sources["hybrid"] = f"suffix,{args.draft_checkpoint}"
    drafters = {
        name: random_drafter(name, model, ids)
        if name in RANDOM
        else load_drafter(sources.get(name, name), model, tokenizer, dtype=dtype, pack=False)
        for name in args.drafters
    }
    pack_model(
        model, *(drafter.model for drafter in drafters.values() if drafter.model is not None)
    )
    return model, drafters


def random_drafter(name: str, model: Transformer, ids: list[int]) -> Drafter:
    """EAGLE-3 drafts these ids alone; DFlash's mask is their first. So some of their guesses are
    right."""
    config = replace(model.config, n_layers=1, windows=(), tie_embeddings=False)
    state_ids = tuple(i + 1 for i in default_layer_ids(model.config.n_layers, 3))
    if name == "eagle3":
        draft = EagleModel(config, Eagle({}, len(ids), state_ids, config.dim, *[False] * 4), False)
        table = torch.full((config.vocab_size,), -1)  # the draft's ids by the target's
        table[ids] = torch.arange(len(ids))
        draft.register_buffer("ids", table, persistent=False)
    else:
        draft = DFlashModel(replace(config, qk_norm="heads"), DFlash(9, ids[0], state_ids))
    init_weights(draft, seed=0)
    draft.to(model.norm.weight.dtype).requires_grad_(False).eval()
    return PairDraft(draft) if name == "eagle3" else DFlashDraft(draft)


def set_up(engine: Engine, length: int) -> None:
    if engine.runner.compile:
        engine.warm_up(GREEDY)
    if engine.planner.speculate_k == "auto":
        engine.calibrate(GREEDILY, length)


def add(
    engine: Engine, prompt: list[int], n: int, sampling: Sampling = GREEDILY, **options
) -> Request:
    """End-of-text does not end a request."""
    return engine.requests[
        engine.add_request(prompt, sampling=sampling, max_new_tokens=n, **options)
    ]


def greedy(engine: Engine, prompts: list[list[int]], n: int) -> list[Request]:
    """A request of each prompt, all of n tokens."""
    set_up(engine, PROMPT + n // 2)
    requests = [add(engine, prompt, n) for prompt in prompts]
    while engine.has_unfinished():
        engine.step()
    return requests


def mixed(engine: Engine, prompts: list[list[int]], n: int, seed: str) -> list[Request]:
    """A greedy request of each prompt, among as many sampled ones. `seed`: of arrivals, refused
    drafts and aborts."""
    set_up(engine, MAX_PROMPT)
    engine.runner.chunk, draw, requests, lengths = CHUNK, random.Random(seed), {}, {}
    waiting = [(number, is_greedy) for number in range(len(prompts)) for is_greedy in (True, False)]
    draw.shuffle(waiting)
    while waiting or engine.has_unfinished():
        if waiting and draw.random() < 0.2:
            number, is_greedy = waiting.pop()
            sampling = GREEDILY if is_greedy else draw.choice(NEIGHBOURS)
            request = add(
                engine, prompts[number], n, sampling, seed=number, draft=draw.random() < 0.75
            )
            lengths[request] = draw.randrange(n) if draw.random() < 0.25 else n
            if is_greedy:
                requests[number] = request
        for request, length in lengths.items():
            if len(request.tokens) >= length:
                engine.abort(request.id)
        engine.step()
    return [requests[number] for number in range(len(prompts))]


@torch.inference_mode()
def in_passes(engine: Engine, prompts: Tensor, ids: Tensor, width: int) -> Tensor:
    """Logits (B, n, V) from which ids (B, n) after prompts (B, PROMPT) are decided: a prefill, then
    passes over `width` positions of the engine's caches."""
    tokens, model, logits = torch.cat((prompts, ids[:, :-1]), dim=1), engine.model, []
    T = tokens.size(1)
    for start, end in itertools.pairwise([0, *range(PROMPT, T, width), T]):
        h = model.hidden(
            tokens[:, start:end], torch.arange(start, end), engine.runner.slice_to(end)
        )
        logits.append(model.head(h if start else h[:, -1:]))
    return torch.cat(logits, dim=1)


def differing(engine: Engine, plain: list[Request], ks: list[int]) -> dict[int, int]:
    """Positions of the plain texts at which passes over 1 and over K + 1 positions give other
    logits, or the former do not decide what plain decoding did, by K."""
    counts = dict.fromkeys(ks, 0)
    prompts, texts = (
        torch.tensor([getattr(request, name) for request in plain]) for name in ("prompt", "tokens")
    )
    for batch in zip(prompts.split(engine.batch_size), texts.split(engine.batch_size), strict=True):
        one = in_passes(engine, *batch, 1)
        is_other = one.argmax(-1) != batch[1]
        for k in ks:
            other = in_passes(engine, *batch, k + 1)
            counts[k] += (
                (is_other | (one.view(torch.int32) != other.view(torch.int32)).any(-1)).sum().item()
            )
    return counts


def comparison(plain: list[Request], requests: list[Request]) -> dict[str, int]:
    """`tokens` up to the first difference of each pair, `flips` of texts, `bits` where both record
    log-probabilities, and `accepted` drafted tokens."""
    counts = Counter(rows=len(plain), tokens=0, flips=0, bits=0, accepted=0)
    for expected, request in zip(plain, requests, strict=True):
        num_same = common_prefix(expected.tokens, request.tokens)
        logprobs = zip(expected.top_logprobs[:num_same], request.top_logprobs[:num_same])
        counts["tokens"] += min(num_same + 1, len(request.tokens))
        counts["flips"] += num_same < len(request.tokens) or request.finish_reason == "error"
        counts["bits"] += sum(x != y for x, y in logprobs)
        counts["accepted"] += sum(token.index < token.accepted for token in request.token_records)
    return dict(counts)


def engine_of(
    args: Namespace, model: Transformer, row: dict, size: int, drafter: Drafter | None = None
) -> Engine:
    """An engine of `size` slots for a setting. Mixed requests record log-probabilities."""
    is_mixed = row["requests"] == "mixed"
    return Engine(
        model,
        size,
        (MAX_PROMPT if is_mixed else PROMPT) + args.new_tokens,
        compile=args.compile,
        drafter=drafter,
        speculate_k=row["k"],
        cache_type=CACHE_TYPES[row["kv_cache"]],
        logprobs=4 if is_mixed else None,
    )


def plain_texts(
    args: Namespace, model: Transformer, row: dict, size: int, prompts: list[list[int]]
) -> tuple[list[Request], dict[int, int], bool]:
    """(plain requests of a setting's prompts, their bits by K, is this promised). Mixed prompts run
    alone, each in a fresh engine."""
    engine, n = engine_of(args, model, row, size), args.new_tokens
    if row["requests"] == "mixed":
        alone = []
        for prompt in prompts:
            fresh = engine_of(args, model, row, size)
            fresh.runner.chunk = min(fresh.runner.chunk, batch_invariant_rows(model) or CHUNK)
            alone += greedy(fresh, [prompt], n)
        return alone, {}, engine.identical
    requests, numbers = greedy(engine, prompts, n), [k for k in args.speculate_k if k != "auto"]
    return requests, {} if args.compile else differing(engine, requests, numbers), engine.identical


def settings(args: Namespace, done: list[dict]) -> Iterator[dict]:
    """A row for each setting that is not among those done."""
    prompts, n, finished = prompts_of(args), args.new_tokens, [row.items() for row in done]
    ids = [id for id, _ in Counter(itertools.chain(*prompts["mixed"])).most_common(2)]
    kinds = ["alike"] if args.compile else args.requests  # mixed ones compile steps of many kinds
    first, drafted = args.batch_sizes[0], list(itertools.product(args.drafters, args.speculate_k))
    for format in args.formats:
        about = {"model": Path(args.checkpoint).name, "format": format, "compiled": args.compile}
        about["threads"] = torch.get_num_threads()
        todo = [
            about
            | {"kv_cache": cache, "requests": kind, "batch_size": size, "drafter": name, "k": k}
            for cache, kind in itertools.product(args.kv_cache_dtype, kinds)
            for size in (args.batch_sizes if kind == "alike" else args.slots)
            for name, k in (
                drafted if (kind, size) == ("alike", first) else [("none", 0), *drafted]
            )
        ]
        todo = [row for row in todo if not any(row.items() <= other for other in finished)]
        model, drafters = load(args, format, ids) if todo else (None, {})
        plain = {}  # what plain_texts returns, by kind of cache, kind of requests and batch size
        for row in todo:
            start, kind, size = time.perf_counter(), row["requests"], row["batch_size"]
            keys = [
                (row["kv_cache"], kind, rows)
                for rows in ((1, 1) if kind == "mixed" else (first, size))
            ]
            for key in keys:
                if key not in plain:
                    plain[key] = plain_texts(args, model, row, key[-1], prompts[kind])
            engine = engine_of(args, model, row, size, drafters.get(row["drafter"]))
            if kind == "mixed":
                requests = mixed(
                    engine,
                    prompts[kind],
                    n,
                    seed=f"{row['kv_cache']} {row['drafter']} {row['k']} {size}",
                )
            else:
                requests = greedy(engine, prompts[kind], n)
            (texts, _, is_promised), (_, bits, _) = (plain[key] for key in keys)
            row |= comparison(texts, requests) | {"identical": is_promised and engine.identical}
            row |= {} if kind == "mixed" else {"bits": bits.get(row["k"])}
            yield row | {"seconds": round(time.perf_counter() - start, 2)}


# --------------------------------------------------------------------------------------- controls


def patched(*places: tuple[object, str], new: Callable) -> AbstractContextManager:
    with contextlib.ExitStack() as stack:
        for place in places:
            stack.enter_context(mock.patch.object(*place, new))
        return stack.pop_all()


def tiled(change: Callable[[int, int], tuple[int, int]]) -> AbstractContextManager:
    """Engines whose tile of attention (rows, keys) is another."""
    probe = invariant_multiples
    return patched(
        (runner, "invariant_multiples"), new=lambda *args: change(*(probe(*args) or (1, 16)))
    )


UNDONE = {
    "lengths": lambda: tiled(lambda rows, keys: (rows, 1)),  # attention over the exact length
    "queries": lambda: tiled(lambda rows, keys: (1, keys)),  # as many query rows as there are
    "rows": lambda: patched((RowSplit, "run"), new=lambda self, product, x: product(x)),
    # of a neighbour's prompt
    "prefixes": lambda: patched((prompt_room, "copy_positions"), new=lambda *args: None),
}
# ------------------------------------------------------------------------------------------- main


def total(rows: list[dict]) -> str:
    promised_rows = [row for row in rows if row["identical"]]
    flips, tokens = (sum(row[name] for row in promised_rows) for name in ("flips", "tokens"))
    num_others = len(rows) - len(promised_rows)
    others = f" ({num_others} more are not promised)" if num_others else ""
    bits = f"bits differ in {sum(map(differs, rows))}"
    return f"{flips} flips in {tokens:,} tokens, {len(promised_rows)} settings{others}; {bits}"


def differs(row: dict) -> bool:
    return row["identical"] and (row["flips"] > 0 or bool(row["bits"]))


def show(rows: list[dict]) -> None:
    print(
        f"{'model':10} {'format':9} {'cache':5} {'steps':8} {'requests':8} {'drafter':19} {'K':>4}"
        f" batch  texts parted"
        "  tokens  accepted  bits  promise"
    )
    for row in rows:
        bits = "–" if row["bits"] is None else row["bits"]
        promise = ("broken" if differs(row) else "holds") if row["identical"] else "none"
        print(
            f"{row['model']:10} {row['format']:9} {row['kv_cache']:5}"
            f" {'compiled' if row['compiled'] else 'eager':8}"
            f" {row['requests']:8} {row['drafter']:19} {row['k']:>4} {row['batch_size']:5} "
            f" {row['flips']:4} of"
            f" {row['rows']:<5}  {row['tokens']:6}  {row.get('accepted', '–'):>8}  {bits:>4} "
            f" {promise}"
        )
    print(total(rows))


def measure(args: Namespace) -> list[dict]:
    """Rows of --keep, then the others."""
    rows = [
        row
        for file in args.keep
        for row in json.loads(file.read_text(encoding="utf-8"))["settings"]
    ]
    # old files lack these
    rows = [{"kv_cache": "model", "requests": "alike"} | row for row in rows]
    with UNDONE[args.control]() if args.control else contextlib.nullcontext():
        for row in tqdm(settings(args, list(rows)), desc="drift"):
            rows.append(row)
            save(args.write, rows)
    save(args.write, rows)  # those of --keep, if there are no others
    return rows


def save(file: Path | None, rows: list[dict]) -> None:
    if file:
        record(file, {"total": total(rows), "settings": rows})


def draft_length(text: str) -> int | str:
    return text if text == "auto" else positive(text)


def parse_args(argv: list[str] | None = None) -> Namespace:
    parser = Parser(
        description="Greedy text with drafts and beside other requests against plain text, bit by"
        " bit."
    )
    add, demo = parser.add_argument, ROOT / "checkpoints"
    add("--checkpoint", default=str(demo / "demo"), metavar="DIR", help="default: the demo")
    add(
        "--draft_checkpoint",
        default=str(demo / "demo-draft"),
        metavar="DIR",
        help="drafts, and has the tokenizer",
    )
    add(
        "--pard_checkpoint",
        default=str(demo / "demo-pard"),
        metavar="DIR",
        help="default: the demo's PARD draft",
    )
    add(
        "--text",
        type=Path,
        default=demo / "stories.txt",
        metavar="FILE",
        help="paragraphs to begin",
    )
    add("--prompts", type=positive, default=8, metavar="N", help="of either kind; default: 8")
    add("--new_tokens", type=positive, default=32, metavar="N", help="of every prompt; default: 32")
    add("--formats", nargs="+", choices=FORMATS, default=FORMATS, help="default: all")
    add(
        "--kv_cache_dtype", nargs="+", choices=CACHE_NAMES, default=CACHE_NAMES, help="default: all"
    )
    add(
        "--requests",
        nargs="+",
        choices=("alike", "mixed"),
        default=("alike", "mixed"),
        help="default: both",
    )
    add(
        "--drafters",
        nargs="+",
        default=DRAFTERS,
        metavar="NAME",
        help="or specs and folders; default: every kind",
    )
    add(
        "--speculate_k",
        nargs="+",
        type=draft_length,
        default=[1, 5, 8],
        metavar="K",
        help="or auto; default: 1 5 8",
    )
    add("--batch_sizes", nargs="+", type=positive, default=[8], metavar="N", help="default: 8")
    add(
        "--slots",
        nargs="+",
        type=positive,
        default=[3],
        metavar="N",
        help="of mixed requests; default: 3",
    )
    add(
        "--compile",
        action=BooleanOptionalAction,
        default=False,
        help="steps, of requests alike only",
    )
    add("--control", choices=UNDONE, help="undo this measure: something must differ")
    add("--write", type=Path, metavar="FILE", help="results as JSON")
    add(
        "--keep",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="what runs wrote: not run again, but counted",
    )
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args()
    with exit_on_error():
        rows = measure(args)
        show(rows)
    sys.exit(any(map(differs, rows)))


if __name__ == "__main__":
    main()
