"""How far greedy drafting drifts from plain greedy decoding in 16 bits, and that the drift is rounding, not an error.

    python -m tests.attacks.drift [--prompts 20] [--new_tokens 120] [--batch_size 20] [--write benchmarks/drift.json]

    Setting     one dtype: the models, and what plain greedy decoding says after every prompt
    in_passes   logits over known texts, by cached passes over so many positions
    widths      of passes over 1 position and over K + 1: largest difference of a logit, and decisions that differ
    parted      drafted greedy rows against plain ones: where each first differs, and how close the choice was
    main        the demo pair in every dtype, with every drafter and K: a table, or JSON

In exact arithmetic both say the same. A pass over K + 1 positions adds up in another order than one over 1, so in a
dtype of few digits two logits that nearly tie may change places; from there on a row is another text. What comes after
the first difference cannot be compared, so `widths` decides every token of the plain texts both ways.

The claim: let d be the largest difference of any logit at any position between the passes, in this dtype, over the
plain texts. Two logits change places only if they are no more than 2 d apart. So wherever a drafted row first differs,
the token that it chose must be within 2 d of plain decoding's. An error (a wrong mask, a stale key) would choose at any
distance: "close" is the share of all decisions that are as close as 2 d, which is how often it would pass for rounding.
Distances are told in units of the dtype's spacing at the larger logit (ulps). "As float32" is the share of tokens that
a pass in float32 with the same weights decides the same: neither way of 16 bits should be nearer to it.

This file measures one pair of models on one machine. It does not show what other kernels or sizes would do.
"""

import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.record import record
from checkpoint import load_model
from generate import Engine, generate
from model import Transformer
from program.edge import ending_plainly
from program.flags import Parser, positive
from sampling import Sampling
from speculative import Drafter, ModelDraft, NgramDraft, layer_subset
from tokenizer import load_tokenizer
from weights.linears import pack_model

ROOT = Path(__file__).parents[2]
DTYPES = ("bfloat16", "float16", "float32")
DRAFTERS = ("model", "ngram", "layers")
KS = (1, 5, 8)
KEPT = (0, 1, 2, 5)  # layers of the demo model that draft as `layers`
PROMPT = 12  # ids of every prompt


class Setting(NamedTuple):
    dtype: str
    model: Transformer
    draft: Transformer
    prompts: Tensor  # (N, PROMPT)
    plain: Tensor  # (N, n)
    batch_size: int


def prompts_of(file: Path, n_prompts: int) -> Tensor:
    """The beginnings of the text's paragraphs (n_prompts, PROMPT). ValueError for too few that are long enough."""
    tokenizer = load_tokenizer(ROOT / "checkpoints" / "demo")
    rows = [tokenizer.encode(text)[:PROMPT] for text in file.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if len(row) == PROMPT]
    if len(rows) < n_prompts:
        raise ValueError(f"{file}: {len(rows)} paragraphs of {PROMPT} tokens, fewer than --prompts {n_prompts}")
    return torch.tensor(rows[:n_prompts])


def load(name: str, dtype: str) -> Transformer:
    """As generate.py does, packed for the kernels that it uses."""
    return pack_model(load_model(ROOT / "checkpoints" / name, dtype=getattr(torch, dtype)))


def greedy(
    model: Transformer, prompts: Tensor, n: int, batch_size: int, drafter: Drafter | None = None, k: int = 0
) -> Tensor:
    """(N, n) ids, batch by batch. End-of-text does not end them, so that all rows are as long."""
    rows = []
    for batch in prompts.split(batch_size):
        out = [[] for _ in batch]
        engine = Engine(model, len(batch), PROMPT + n, drafter=drafter, speculate_k=k)
        for row, id in generate(model, batch.tolist(), sampling=Sampling(0), max_new_tokens=n, engine=engine):
            out[row].append(id)
        rows += out
    return torch.tensor(rows)


def setting(dtype: str, prompts: Tensor, n: int, batch_size: int) -> Setting:
    model, draft = load("demo", dtype), load("demo-draft", dtype)
    return Setting(dtype, model, draft, prompts, greedy(model, prompts, n, batch_size), batch_size)


def drafter_of(name: str, here: Setting) -> Drafter:
    if name == "model":
        return ModelDraft(here.draft)
    return NgramDraft() if name == "ngram" else ModelDraft(layer_subset(here.model, KEPT), on_layers=KEPT)


@torch.inference_mode()
def in_passes(model: Transformer, prompts: Tensor, ids: Tensor, width: int) -> Tensor:
    """Logits (B, n, V) from which ids (B, n) after prompts (B, PROMPT) are decided: a prefill, then passes over `width`
    positions; 0: no cache, one pass over all."""
    tokens = torch.cat((prompts, ids[:, :-1]), dim=1)
    B, T = tokens.shape
    if width == 0:
        return model(tokens, torch.arange(T))[:, PROMPT - 1 :]
    caches, found = model.make_caches(B, T + 1), []
    for start, end in itertools.pairwise([0, *range(PROMPT, T, width), T]):
        h = model.hidden(tokens[:, start:end], torch.arange(start, end), caches.upto(end))
        found.append(model.head(h if start else h[:, -1:]))
    return torch.cat(found, dim=1)


def batches(here: Setting) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(here.prompts.split(here.batch_size), here.plain.split(here.batch_size))


def spacing(x: Tensor, dtype: str) -> Tensor:
    """Between neighbouring numbers of the dtype at |x|."""
    return torch.finfo(getattr(torch, dtype)).eps * 2.0 ** x.abs().log2().floor()


def widths(here: Setting, exact: Transformer) -> tuple[dict, Tensor]:
    """What passes of different widths say of the same texts, by K; and plain decoding's logits (N, n, V)."""
    by_width = {
        width: torch.cat([in_passes(here.model, *batch, width) for batch in batches(here)])
        for width in (1, *(k + 1 for k in KS))
    }
    plain, said = by_width[1], here.plain
    if not torch.equal(plain.argmax(-1), said):
        raise ValueError(f"{here.dtype}: passes over one position decide otherwise than plain decoding did")
    truth = torch.cat([in_passes(exact, *batch, 0).argmax(-1) for batch in batches(here)])
    by_k = {}
    for k in KS:
        decided = by_width[k + 1].argmax(-1)
        by_k[k] = {
            "largest_difference": (by_width[k + 1] - plain).abs().max().item(),
            "decided_otherwise": (decided != said).sum().item(),
            "as_float32": (decided == truth).double().mean().item(),
        }
    best = plain.topk(2).values  # (N, n, 2)
    d = max(said["largest_difference"] for said in by_k.values())
    return {
        "dtype": here.dtype, "tokens": said.numel(), "d": d, "by_k": by_k,
        "d_in_ulps": d / spacing(best[..., 0], here.dtype).median().item(),
        "as_float32": (said == truth).double().mean().item(),
        "close": (best[..., 0] - best[..., 1] <= 2 * d).double().mean().item(),
    }, plain  # fmt: skip


def parted(here: Setting, plain: Tensor, name: str, k: int, d: float) -> dict:
    """Drafted rows against plain ones. `distances`: at each first difference, how far below the token of plain decoding
    the drafted one stood in plain decoding's logits."""
    n = here.plain.size(1)
    drafted = greedy(here.model, here.prompts, n, here.batch_size, drafter_of(name, here), k)
    firsts = (here.plain == drafted).long().cumprod(1).sum(1).tolist()  # tokens before the first difference
    distances, ulps = [], []
    for row, at in enumerate(firsts):
        if at < n:
            logits = plain[row, at]  # (V,)
            best = logits[here.plain[row, at]]
            distances.append((best - logits[drafted[row, at]]).item())
            ulps.append(distances[-1] / spacing(best, here.dtype).item())
    compared = sum(min(at + 1, n) for at in firsts)
    return {
        "dtype": here.dtype, "drafter": name, "k": k, "rows": len(firsts), "same": firsts.count(n),
        "compared": compared, "flips_per_1000": 1000 * len(distances) / compared,
        "first_differences": [at for at in firsts if at < n], "distances": distances, "ulps": ulps,
        "within_2d": all(distance <= 2 * d for distance in distances),
    }  # fmt: skip


def measure(text: Path, n_prompts: int, new_tokens: int, batch_size: int) -> dict:
    prompts, exact = prompts_of(text, n_prompts), load("demo", "float32")
    found = {"batch_size": batch_size, "widths": [], "drafted": []}
    with tqdm(total=len(DTYPES) * len(DRAFTERS) * len(KS), desc="drift") as bar:
        for dtype in DTYPES:
            here = setting(dtype, prompts, new_tokens, batch_size)
            said, plain = widths(here, exact)
            found["widths"].append(said)
            for name, k in itertools.product(DRAFTERS, KS):
                found["drafted"].append(parted(here, plain, name, k, said["d"]))
                bar.update()
    return found


def show(found: dict) -> None:
    print("every token of the plain texts, by passes over 1 and over K + 1 positions")
    print("dtype     K  decided otherwise      d  in ulps  as float32: 1 | K + 1  close")
    for said, k in itertools.product(found["widths"], KS):
        one = said["by_k"][k]
        print(
            f"{said['dtype']:8}  {k}  {one['decided_otherwise']:4} of {said['tokens']:<9}"
            f"  {one['largest_difference']:7.2g}  {one['largest_difference'] / said['d'] * said['d_in_ulps']:5.1f}"
            f"       {said['as_float32']:.4f} | {one['as_float32']:.4f}  {said['close']:.4f}"
        )
    print("\ndrafted rows against plain ones")
    print("dtype     drafter  K  rows the same  flips per 1,000  largest distance, ulps  within 2 d")
    for row in found["drafted"]:
        largest = f"{max(row['ulps']):.1f}" if row["ulps"] else "–"
        print(
            f"{row['dtype']:8}  {row['drafter']:7}  {row['k']}  {row['same']:5} of {row['rows']:<4}"
            f"  {row['flips_per_1000']:14.2f}  {largest:>22}  {'yes' if row['within_2d'] else 'NO':>10}"
        )


def main() -> None:
    parser = Parser(description="Greedy drafting against plain greedy decoding, token by token, in every dtype.")
    add = parser.add_argument
    add("--text", type=Path, default=ROOT / "checkpoints" / "stories.txt", metavar="FILE", help="paragraphs to begin")
    add("--prompts", type=positive, default=20, metavar="N", help="of the text's paragraphs; default: 20")
    add("--new_tokens", type=positive, default=120, metavar="N", help="of every prompt; default: 120")
    add("--batch_size", type=positive, default=20, metavar="N", help="rows decoded together; default: 20")
    add("--write", type=Path, metavar="FILE", help="results as JSON")
    args = parser.parse_args()
    with ending_plainly():
        start = time.perf_counter()
        found = measure(args.text, args.prompts, args.new_tokens, args.batch_size)
        found["seconds"] = round(time.perf_counter() - start, 1)
        show(found)
        if args.write:
            record(args.write, found)
    sys.exit(0 if all(row["within_2d"] for row in found["drafted"]) else 1)


if __name__ == "__main__":
    main()
