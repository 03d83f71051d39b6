"""That greedy drafting does not drift: it gives the text of plain greedy decoding, bit for bit, in 16 bits too.

    python -m tests.attacks.drift [--formats float16 int4-g32] [--speculate_k 5 auto] [--write benchmarks/drift.json]

    load        one pair of models, in one of the formats, with every drafter
    greedy      the text of every prompt, plain or drafted
    in_passes   logits over known texts, by cached passes over so many positions, as decoding runs them
    settings    a row for each setting: tokens compared, texts that part, positions whose logits differ in a bit
    UNDONE      the measures that make it so, one of which --control undoes
    main        a table and a total, or JSON, written after every setting; the status is 1 if anything differs

A pass over K + 1 positions could add up in another order than one over 1, and in a dtype of few digits two logits that
nearly tie would change places. Texts show that rarely, so logits are compared too, bit for bit: `bits` counts positions
where passes over 1 and over K + 1 differ. All texts are compared with plain ones at the first of the batch sizes, also
plain ones at the others ("none"). What comes after a row's first difference is not compared.

This file measures one pair of models on one machine. It does not show what other kernels or sizes would do.
"""

import contextlib
import itertools
import json
import sys
import time
from argparse import BooleanOptionalAction, Namespace
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor
from tqdm import tqdm

import decoding.runner as runner
from benchmarks.record import record
from cli.errors import ending_plainly
from cli.flags import DTYPES, Parser, positive
from decoding.exactness import invariant_multiples
from decoding.sampling import GREEDY, Sampling
from drafts.ngram import NgramDraft
from generate import Engine, generate
from loading.checkpoint import load_model
from loading.tokenizer import load_tokenizer
from model import Transformer
from quantize import quantized_copy
from speculative import Drafter, ModelDraft, layer_subset
from weights import cpu, linears
from weights.walker import pack_model

ROOT = Path(__file__).parents[2]
FORMATS = (*DTYPES, "int8", "int4-g32")  # the last two of bfloat16 activations
DRAFTERS = ("model", "ngram", "layers", "quantized:int4-g32")
PROMPT = 12  # ids of every prompt


def prompts_of(args: Namespace) -> Tensor:
    """The beginnings of the text's paragraphs (N, PROMPT). ValueError for too few that are long enough."""
    tokenizer = load_tokenizer(args.draft_checkpoint)
    rows = [tokenizer.encode(text)[:PROMPT] for text in args.text.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if len(row) == PROMPT]
    if len(rows) < args.prompts:
        raise ValueError(f"{args.text}: {len(rows)} paragraphs of {PROMPT} tokens, fewer than --prompts {args.prompts}")
    return torch.tensor(rows[: args.prompts])


def load(args: Namespace, format: str) -> tuple[Transformer, dict[str, Callable[[], Drafter]]]:
    """The target and the grid's drafters, made and packed as generate.py does."""
    dtype, scheme = (format, None) if format in DTYPES else ("bfloat16", format)
    dtype = getattr(torch, dtype)
    model = load_model(args.checkpoint, dtype=dtype, quantize=scheme, pack=False)
    n = model.config.n_layers
    kept = [*range(n // 2), n - 1]
    drafts = {}
    for name in args.drafters:
        if name == "model":
            drafts[name] = load_model(args.draft_checkpoint, dtype=dtype, pack=False), None
        elif name == "layers":
            drafts[name] = layer_subset(model, kept), kept
        elif name != "ngram":
            drafts[name] = quantized_copy(model, name.partition(":")[2]), range(n)
    pack_model(model, *(draft for draft, _ in drafts.values()))
    made = {name: lambda draft=draft: ModelDraft(*draft) for name, draft in drafts.items()}
    return model, {name: made.get(name, NgramDraft) for name in args.drafters}


def greedy(engine: Engine, prompts: Tensor, n: int) -> Tensor:
    """(N, n) ids, batch by batch. End-of-text does not end them, so that all rows are as long."""
    if engine.compile:
        engine.warm_up(GREEDY)
    if engine.speculate_k == "auto":
        engine.calibrate(Sampling(0), PROMPT + n // 2)
    rows = []
    for batch in prompts.split(engine.batch_size):
        out = [[] for _ in batch]
        for row, id in generate(engine.model, batch.tolist(), sampling=Sampling(0), max_new_tokens=n, engine=engine):
            out[row].append(id)
        rows += out
    return torch.tensor(rows)


@torch.inference_mode()
def in_passes(engine: Engine, prompts: Tensor, ids: Tensor, width: int) -> Tensor:
    """Logits (B, n, V) from which ids (B, n) after prompts (B, PROMPT) are decided: a prefill, then passes over `width`
    positions of the engine's caches."""
    tokens, model, found = torch.cat((prompts, ids[:, :-1]), dim=1), engine.model, []
    T = tokens.size(1)
    for start, end in itertools.pairwise([0, *range(PROMPT, T, width), T]):
        h = model.hidden(tokens[:, start:end], torch.arange(start, end), engine.runner.slice_to(end))
        found.append(model.head(h if start else h[:, -1:]))
    return torch.cat(found, dim=1)


def differing(engine: Engine, prompts: Tensor, plain: Tensor, ks: list[int]) -> dict[int, int]:
    """Positions of the plain texts at which passes over 1 and over K + 1 positions give other logits, or the former do
    not decide what plain decoding did, by K."""
    found = dict.fromkeys(ks, 0)
    for batch in zip(prompts.split(engine.batch_size), plain.split(engine.batch_size), strict=True):
        one = in_passes(engine, *batch, 1)
        decided = one.argmax(-1) != batch[1]  # otherwise
        for k in ks:
            other = in_passes(engine, *batch, k + 1)
            found[k] += (decided | (one.view(torch.int32) != other.view(torch.int32)).any(-1)).sum().item()
    return found


def settings(args: Namespace, done: list[dict]) -> Iterator[dict]:
    """A row for each setting that is not among those done."""
    prompts, n, most = prompts_of(args), args.new_tokens, PROMPT + args.new_tokens
    first, numbers = args.batch_sizes[0], [k for k in args.speculate_k if k != "auto"]
    known = [row.items() for row in done]
    for format in args.formats:
        about = {"model": Path(args.checkpoint).name, "format": format, "compiled": args.compile}
        about["threads"] = torch.get_num_threads()
        drafted = list(itertools.product(args.drafters, args.speculate_k))
        todo = [
            about | {"batch_size": size, "drafter": name, "k": k}
            for size in args.batch_sizes
            for name, k in (drafted if size == first else [("none", 0), *drafted])
        ]
        todo = [row for row in todo if not any(row.items() <= other for other in known)]
        model, drafters = load(args, format) if todo else (None, {})
        plain, bits = {}, {}  # plain texts and bits by batch size
        for row in todo:
            start, size = time.perf_counter(), row["batch_size"]
            for each in (first, size):
                if each not in plain:
                    engine = Engine(model, each, most, compile=args.compile)
                    plain[each] = greedy(engine, prompts, n)
                    bits[each] = {} if args.compile else differing(engine, prompts, plain[each], numbers)
            text = plain[size]
            if row["k"] != 0:
                drafter = drafters[row["drafter"]]()
                engine = Engine(model, size, most, compile=args.compile, drafter=drafter, speculate_k=row["k"])
                text = greedy(engine, prompts, n)
            same = (plain[first] == text).long().cumprod(1).sum(1)  # (N,) tokens before the first difference
            yield row | {
                "identical": engine.identical, "rows": len(same), "tokens": (same + 1).clamp(max=n).sum().item(),
                "flips": (same < n).sum().item(), "bits": bits[size].get(row["k"]),
                "seconds": round(time.perf_counter() - start, 2),
            }  # fmt: skip


# ---------------------------------------------------------------------------------------------- controls


def patched(*places: tuple[object, str], new: Callable) -> AbstractContextManager:
    with contextlib.ExitStack() as stack:
        for place in places:
            stack.enter_context(mock.patch.object(*place, new))
        return stack.pop_all()


def tiled(change: Callable[[int, int], tuple[int, int]]) -> AbstractContextManager:
    """Engines whose tile of attention (rows, keys) is another."""
    probe = invariant_multiples
    return patched((runner, "invariant_multiples"), new=lambda *args: change(*(probe(*args) or (1, 16))))


UNDONE = {
    "lengths": lambda: tiled(lambda rows, keys: (rows, 1)),  # attention over the exact length
    "queries": lambda: tiled(lambda rows, keys: (1, keys)),  # as many query rows as there are
    "rows": lambda: patched(
        (cpu, "multiply_in_parts"), (linears, "multiply_in_parts"), new=lambda product, x, *_: product(x)
    ),
}


# -------------------------------------------------------------------------------------------------- main


def total(rows: list[dict]) -> str:
    flips, tokens = (sum(row[name] for row in rows) for name in ("flips", "tokens"))
    return f"{flips} flips in {tokens:,} tokens, {len(rows)} settings; bits differ in {sum(map(differs, rows))}"


def differs(row: dict) -> bool:
    return row["flips"] > 0 or bool(row["bits"])


def show(rows: list[dict]) -> None:
    print(
        f"{'model':10} {'format':9} {'steps':8} {'drafter':19} {'K':>4} batch  texts parted  tokens  bits  vouched for"
    )
    for row in rows:
        bits = "–" if row["bits"] is None else row["bits"]
        print(
            f"{row['model']:10} {row['format']:9} {'compiled' if row['compiled'] else 'eager':8} {row['drafter']:19}"
            f" {row['k']:>4} {row['batch_size']:5}  {row['flips']:4} of {row['rows']:<5}  {row['tokens']:6}  {bits:>4}"
            f"  {'yes' if row['identical'] else 'no'}"
        )
    print(total(rows))


def measure(args: Namespace) -> list[dict]:
    """Rows of --keep, then the others."""
    rows = [row for file in args.keep for row in json.loads(file.read_text(encoding="utf-8"))["settings"]]
    with UNDONE[args.control]() if args.control else contextlib.nullcontext():
        for row in tqdm(settings(args, list(rows)), desc="drift"):
            rows.append(row)
            if args.write:
                record(args.write, {"total": total(rows), "settings": rows})
    return rows


def draft_length(text: str) -> int | str:
    return text if text == "auto" else positive(text)


def parse_args(argv: list[str] | None = None) -> Namespace:
    parser = Parser(description="Greedy drafting against plain greedy decoding, token by token and bit by bit.")
    add, demo = parser.add_argument, ROOT / "checkpoints"
    add("--checkpoint", default=str(demo / "demo"), metavar="DIR", help="default: the demo")
    add("--draft_checkpoint", default=str(demo / "demo-draft"), metavar="DIR", help="drafts, and has the tokenizer")
    add("--text", type=Path, default=demo / "stories.txt", metavar="FILE", help="paragraphs to begin")
    add("--prompts", type=positive, default=20, metavar="N", help="of the text's paragraphs; default: 20")
    add("--new_tokens", type=positive, default=120, metavar="N", help="of every prompt; default: 120")
    add("--formats", nargs="+", choices=FORMATS, default=DTYPES, help="default: the first three")
    add("--drafters", nargs="+", choices=DRAFTERS, default=DRAFTERS[:3], help="default: the first three")
    add("--speculate_k", nargs="+", type=draft_length, default=[1, 5, 8], metavar="K", help="or auto; default: 1 5 8")
    add("--batch_sizes", nargs="+", type=positive, default=[20], metavar="N", help="default: 20")
    add("--compile", action=BooleanOptionalAction, default=False, help="steps")
    add("--control", choices=UNDONE, help="undo this measure: something must differ")
    add("--write", type=Path, metavar="FILE", help="results as JSON")
    add("--keep", type=Path, nargs="+", default=[], metavar="FILE", help="what runs wrote: not run again, but counted")
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args()
    with ending_plainly():
        rows = measure(args)
        show(rows)
    sys.exit(any(map(differs, rows)))


if __name__ == "__main__":
    main()
