"""Perplexity of a model on a text, and its distance to a reference model.

    python -m scripts.perplexity --checkpoint DIR --text FILE [--quantize int4-g32] [--reference DIR]

The text is encoded once, without BOS, and cut into consecutive windows of --context tokens; a shorter last one is
dropped. If encoding a text adds BOS, BOS leads each window and all its tokens are scored; otherwise all but the first.
The standard error is that of the mean over windows. --reference, a model with the same tokens, adds the mean
KL(reference || model) in nats a token, and the share of positions where both have the same most likely token.
"""

if __name__ == "__main__":  # before torch is imported: --help and wrong flags are answered at once
    from cli.start import answer_flags
    from scripts.flags import perplexity_args

    answer_flags(perplexity_args)

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from cli.errors import ending_plainly
from cli.load import pick_device
from loading.checkpoint import load_config, load_model, pick_dtype
from loading.tokenizer import check_same_tokens, load_tokenizer
from model import Transformer
from scripts.flags import MAX_POSITIONS
from scripts.flags import perplexity_args as parse_args

CHUNK = 512  # positions of a pass; longer windows run in chunks, on caches
MAX_LOGITS = 2**25  # computed at once: 128 MB, and as much for every intermediate tensor of a divergence
MAX_NLL = math.log(sys.float_info.max)  # beyond it the perplexity overflows: None


def windows(ids: list[int], context: int, bos: int | None) -> Tensor:
    """Consecutive windows (n, context), or (n, context + 1) led by BOS. ValueError if the text has no full window."""
    n = len(ids) // context
    if n == 0:
        raise ValueError(f"the text has {len(ids)} tokens, fewer than one window of --context {context}")
    rows = torch.tensor(ids[: n * context]).view(n, context)
    return rows if bos is None else torch.cat((torch.full((n, 1), bos), rows), dim=1)


@torch.inference_mode()
def score(model: Transformer, rows: Tensor, reference: Transformer | None) -> tuple[Tensor, Tensor, Tensor]:
    """For all tokens of `rows` (n, T + 1) but the first: negative log-likelihood, KL divergence to the reference, and 1
    where both models have the same most likely token. Three tensors (n, T)."""
    rows = rows.to(model.norm.weight.device)
    models = [model] if reference is None else [model, reference]
    targets = rows[:, 1:].split(CHUNK, dim=1)  # (n, t) each
    parts = []
    for ids, *hidden in zip(targets, *(hidden_states(m, rows[:, :-1]) for m in models)):
        scores = score_chunk(model, hidden[0], ids, reference, hidden[-1])
        parts.append(scores)
    return tuple(torch.cat(values, dim=1) for values in zip(*parts))


def hidden_states(model: Transformer, tokens: Tensor) -> Iterator[Tensor]:
    """Normed hidden states (n, t, D) of tokens (n, T), CHUNK positions at a time: memory grows by a
    window's keys and values alone, not by its activations and masks."""
    T = tokens.size(1)
    caches = model.make_caches(tokens.size(0), T) if T > CHUNK else None
    pos = torch.arange(T, device=tokens.device)
    for part, part_pos in zip(tokens.split(CHUNK, dim=1), pos.split(CHUNK)):
        filled = None if caches is None else caches.slice_to(int(part_pos[-1]) + 1)
        yield model.hidden(part, part_pos, filled)


def score_chunk(
    model: Transformer, h: Tensor, ids: Tensor, reference: Transformer | None, reference_h: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`score` of the tokens ids (n, t) that follow the hidden states h (n, t, D) of both models."""
    size = max(1, MAX_LOGITS // model.config.vocab_size)
    parts = []
    hidden = h.flatten(0, 1).split(size)  # (size, D) each
    reference_hidden = reference_h.flatten(0, 1).split(size)
    for part, reference_part, part_ids in zip(hidden, reference_hidden, ids.flatten().split(size)):
        log_p = model.head(part).log_softmax(-1)  # (size, V)
        nll = -log_p.gather(1, part_ids[:, None])[:, 0]
        kl = torch.zeros_like(nll)
        agrees = torch.ones_like(nll)
        if reference is not None:
            log_r = reference.head(reference_part).log_softmax(-1)
            kl = (log_r.exp() * (log_r - log_p)).sum(-1)
            agrees = (log_r.argmax(-1) == log_p.argmax(-1)).float()
        parts.append((nll, kl, agrees))
    return tuple(torch.cat(values).view_as(ids) for values in zip(*parts))  # (n * t,) -> (n, t)


def measure(
    model: Transformer, rows: Tensor, batch_size: int, reference: Transformer | None = None, bos: bool = True
) -> dict:
    """The object that --json prints, for rows of `windows`. ValueError for logits that are not finite."""
    nlls, kls, agreements = means = ([], [], [])  # one mean a window; all windows have the same length
    batch_size = max(1, min(batch_size, MAX_POSITIONS // rows.size(1)))
    for batch in tqdm(rows.split(batch_size), desc="score", leave=False):
        for values, scores in zip(means, score(model, batch, reference)):
            values += scores.double().mean(1).tolist()
    for name, values in (("the model", nlls), ("the reference", kls)):
        if num_windows := sum(not math.isfinite(value) for value in values):
            raise ValueError(f"the logits of {name} are not finite in {num_windows} of {len(rows)} windows")

    def standard_error(values: list[float]) -> float | None:
        return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None

    nll = statistics.fmean(nlls)
    result = {
        "perplexity": math.exp(nll) if nll < MAX_NLL else None, "nll": nll, "nll_standard_error": standard_error(nlls),
        "tokens": rows.size(0) * (rows.size(1) - 1), "context": rows.size(1) - bos, "bos": bos,
    }  # fmt: skip
    if reference is not None:
        result |= {
            "kl": statistics.fmean(kls), "kl_standard_error": standard_error(kls), "top1": statistics.fmean(agreements),
        }  # fmt: skip
    return result


def run(args: argparse.Namespace) -> dict:
    device = pick_device(args.device)
    tokenizer = load_tokenizer(args.checkpoint)
    limit = load_config(args.checkpoint).max_seq_length
    if args.context > limit:
        raise ValueError(f"--context {args.context} is over the model's {limit} positions")
    if args.reference:
        sizes = [load_config(folder).vocab_size for folder in (args.reference, args.checkpoint)]
        if sizes[0] != sizes[1]:
            raise ValueError(f"{args.reference}: vocabularies of {sizes[0]} and {sizes[1]} tokens cannot be compared")
        check_same_tokens(tokenizer, load_tokenizer(args.reference), args.reference)
    try:
        text = Path(args.text).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{args.text}: not UTF-8 text: {error}") from None
    bos = next(iter(tokenizer.encode("")), None)  # encoding a text adds it
    if args.context == 1 and bos is None:
        raise ValueError("--context 1 leaves nothing to score, as no BOS leads its windows: take 2 or more")
    rows = windows(tokenizer.encode(text, bos=False), args.context, bos)

    def load(folder: str, **options) -> Transformer:
        dtype = pick_dtype(args.dtype, load_config(folder).dtype, device)
        return load_model(folder, device=device, dtype=dtype, progress=True, **options)

    model = load(args.checkpoint, quantize=args.quantize, head=args.quantize_head)
    reference = load(args.reference) if args.reference else None
    return measure(model, rows, args.batch_size, reference, bos=bos is not None)


def main() -> None:
    args = parse_args()
    with ending_plainly():
        result = run(args)
        width = max(map(len, result))
        if args.json:
            print(json.dumps(result))
            return
        for name, value in result.items():
            print(f"{name:{width}}  {value:.5g}" if isinstance(value, float) else f"{name:{width}}  {value}")


if __name__ == "__main__":
    main()
