r"""Perplexity of a model on a text, and its distance to a reference model.

    python -m scripts.perplexity --checkpoint DIR --text FILE [--quantize int4-g32] \
        [--reference DIR]

The text is encoded once, without BOS, and cut into consecutive windows of --context tokens; a
shorter last one is dropped. If encoding a text adds BOS, BOS leads each window and all its tokens
are scored; otherwise all but the first. The standard error is that of the mean over windows.
--reference, a model with the same tokens, adds the mean KL(reference || model) in nats a token, and
the share of positions where both have the same most likely token.
"""

if __name__ == "__main__":  # before torch is imported
    from cli.process import prepare

    prepare()

import argparse
import itertools
import json
import math
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from cli.errors import exit_on_error
from cli.flags import Parser, add_model, model_options, positive
from decoding.errors import UserError
from loading.checkpoint import load_config, load_model
from loading.hub import PATH_HELP, checkpoint_path
from loading.models import pick_dtype
from loading.plain_files import error_prefix, utf8_text
from loading.target import pick_device
from loading.tokenizer import Tokenizer, load_tokenizer
from model import Transformer

# Scored at once at most; longer windows run in smaller batches.
MAX_POSITIONS = 2**13
CHUNK = 512  # positions of a pass; longer windows run in chunks, on caches
# Logits that are computed at once: 128 MB, and as much for each intermediate tensor of a divergence
MAX_LOGITS = 2**25
MAX_NLL = math.log(sys.float_info.max)  # the perplexity of a larger one overflows


def parse_args() -> argparse.Namespace:
    parser = Parser(description="Perplexity of a model on a text, and its distance to a reference.")
    add = parser.add_argument
    add_model(parser)
    add("--text", required=True, metavar="FILE", help="UTF-8 text to score")
    add("--context", type=positive, default=512, help="tokens of a window; default: %(default)s")
    batch_help = f"windows scored together, up to {MAX_POSITIONS:,} tokens; default: %(default)s"
    add("--batch_size", type=positive, default=8, help=batch_help)
    help = f"to compare with, by KL divergence and agreement: {PATH_HELP}"
    add("--reference", metavar="PATH", help=help)
    add("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    args.reference = checkpoint_path(args.reference)
    args.model = model_options(args)
    return args


def check_same_tokens(tokenizer: Tokenizer, other: Tokenizer, folder: str) -> None:
    """UserError unless both read every id as the same string. Models may still have padded
    vocabularies."""
    for id, pieces in enumerate(itertools.zip_longest(tokenizer.pieces(), other.pieces())):
        if pieces[0] != pieces[1]:
            first, second = (
                "no token" if p is None else repr(p.decode(errors="replace")) for p in pieces
            )
            raise UserError(
                f"{folder}: its tokenizer differs from the first's: token {id} is {second}, there"
                f" {first}"
            )


def windows(ids: list[int], context: int, bos: int | None) -> Tensor:
    """Consecutive windows (n, context), or (n, context + 1) led by BOS. UserError if the text has
    no full window."""
    n = len(ids) // context
    if n == 0:
        raise UserError(
            f"the text has {len(ids)} tokens, fewer than one window of --context {context}"
        )
    rows = torch.tensor(ids[: n * context]).view(n, context)
    if bos is None:
        return rows
    return torch.cat((torch.full((n, 1), bos), rows), dim=1)


@torch.inference_mode()
def score(
    model: Transformer, rows: Tensor, reference: Transformer | None
) -> tuple[Tensor, Tensor, Tensor]:
    """For all tokens of `rows` (n, T + 1) but the first: negative log-likelihood, KL divergence to
    the reference, and 1 where both models have the same most likely token. Three tensors (n, T)."""
    rows = rows.to(model.norm.weight.device)
    inputs = rows[:, :-1]
    numbers = torch.arange(inputs.numel(), device=rows.device).view_as(inputs)
    order = torch.cat([part.flatten() for part in numbers.split(CHUNK, dim=1)])  # of log_probs
    targets = rows[:, 1:].flatten()[order]
    reference_log_probs = itertools.repeat(None)
    if reference is not None:
        reference_log_probs = log_probs(reference, inputs)
    values = torch.zeros(3, len(order), device=rows.device)
    start = 0
    for log_p, log_r in zip(log_probs(model, inputs), reference_log_probs):
        end = start + len(log_p)
        nll = -log_p.gather(1, targets[start:end, None])[:, 0]
        kl = torch.zeros_like(nll)
        agrees = torch.ones_like(nll)
        if log_r is not None:
            kl = (log_r.exp() * (log_r - log_p)).sum(-1)
            agrees = (log_r.argmax(-1) == log_p.argmax(-1)).float()
        values[:, order[start:end]] = torch.stack((nll, kl, agrees))
        start = end
    return values.view(3, *inputs.shape).unbind()


def log_probs(model: Transformer, tokens: Tensor) -> Iterator[Tensor]:
    """Log-probabilities (m, V) of what follows each of tokens (n, T), CHUNK positions of all rows
    at a time: memory grows by a window's keys and values alone, not by its activations, masks and
    logits."""
    T = tokens.size(1)
    caches = model.make_caches(tokens.size(0), T) if T > CHUNK else None
    pos = torch.arange(T, device=tokens.device)
    size = max(1, MAX_LOGITS // model.config.vocab_size)
    for part, part_pos in zip(tokens.split(CHUNK, dim=1), pos.split(CHUNK)):
        filled = None if caches is None else caches.slice_to(int(part_pos[-1]) + 1)
        h = model.hidden(part, part_pos, filled)  # (n, t, D)
        for states in h.flatten(0, 1).split(size):
            yield model.head(states).log_softmax(-1)


def measure(
    model: Transformer,
    rows: Tensor,
    batch_size: int,
    reference: Transformer | None = None,
    bos: bool = True,
) -> dict:
    """The object that --json prints, for rows of `windows`. UserError for logits that are not
    finite."""
    # One mean per window; all windows have the same length.
    nlls: list[float] = []
    kls: list[float] = []
    agreements: list[float] = []
    batch_size = max(1, min(batch_size, MAX_POSITIONS // rows.size(1)))
    for batch in tqdm(rows.split(batch_size), desc="score", leave=False):
        scores = score(model, batch, reference)
        for means, values in zip((nlls, kls, agreements), scores):
            means.extend(values.double().mean(1).tolist())
    check_finite(nlls, "the model")
    check_finite(kls, "the reference")
    nll = statistics.fmean(nlls)
    result = {
        "perplexity": math.exp(nll) if nll < MAX_NLL else None,
        "nll": nll,
        "nll_standard_error": standard_error(nlls),
        "tokens": rows.size(0) * (rows.size(1) - 1),
        "context": rows.size(1) - bos,
        "bos": bos,
    }
    if reference is not None:
        result |= {
            "kl": statistics.fmean(kls),
            "kl_standard_error": standard_error(kls),
            "top1": statistics.fmean(agreements),
        }
    return result


def check_finite(means: list[float], name: str) -> None:
    num_windows = sum(not math.isfinite(mean) for mean in means)
    if num_windows:
        raise UserError(
            f"the logits of {name} are not finite in {num_windows} of {len(means)} windows"
        )


def standard_error(values: list[float]) -> float | None:
    """Of their mean."""
    if len(values) < 2:
        return None
    return statistics.stdev(values) / math.sqrt(len(values))


def run(args: argparse.Namespace) -> dict:
    options = args.model
    device = pick_device(options.device)
    tokenizer = load_tokenizer(options.checkpoint)
    limit = load_config(options.checkpoint).max_seq_length
    if args.context > limit:
        raise UserError(f"--context {args.context} is over the model's {limit} positions")
    if args.reference:
        check_reference(args.reference, options.checkpoint, tokenizer)
    with error_prefix(args.text):
        text = utf8_text(Path(args.text).read_bytes())
    bos = next(iter(tokenizer.encode("")), None)  # where encoding a text adds it
    if args.context == 1 and bos is None:
        raise UserError(
            "--context 1 leaves nothing to score, as no BOS leads its windows: take 2 or more"
        )
    rows = windows(tokenizer.encode(text, bos=False), args.context, bos)

    def load(folder: str, **schemes) -> Transformer:
        dtype = pick_dtype(options.dtype, load_config(folder).dtype, device)
        return load_model(folder, device=device, dtype=dtype, progress=True, **schemes)

    model = load(options.checkpoint, quantize=options.quantize, head_scheme=options.quantize_head)
    reference = load(args.reference) if args.reference else None
    return measure(model, rows, args.batch_size, reference, bos=bos is not None)


def check_reference(reference: str, checkpoint: str, tokenizer: Tokenizer) -> None:
    """UserError for a reference with other tokens."""
    size = load_config(reference).vocab_size
    model_size = load_config(checkpoint).vocab_size
    if size != model_size:
        raise UserError(
            f"{reference}: vocabularies of {size} and {model_size} tokens cannot be compared"
        )
    check_same_tokens(tokenizer, load_tokenizer(reference), reference)


def main() -> None:
    with exit_on_error():
        args = parse_args()
        result = run(args)
        if args.json:
            print(json.dumps(result))
            return
        width = max(map(len, result))
        for name, value in result.items():
            text = f"{value:.5g}" if isinstance(value, float) else value
            print(f"{name:{width}}  {text}")


if __name__ == "__main__":
    main()
