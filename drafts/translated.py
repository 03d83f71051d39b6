"""A draft folder's model, which reads and answers in the target's ids where its tokenizer differs.

load_translated     the model;  shared_tokens  the ids that both tokenizers have, or a refusal that names their share
"""

import sys
from pathlib import Path

import torch
from torch import Tensor

from drafts.vocabulary import ids_by_string, translate
from loading.checkpoint import load_config, load_model, pick_dtype
from loading.tokenizer import Tokenizer, load_tokenizer
from model import Transformer
from tp import ranks_of

MIN_SHARED = 0.5  # share of the target's probability that the tokens of a draft with another tokenizer must have
SAMPLE_TEXT = "On Monday the shop opened at 9, and Anna bought three books.\n\ndef area(r):\n    return 3.14 * r * r\n"


def load_translated(
    folder: Path, target: Transformer, tokenizer: Tokenizer, mask: int | None = None, *, dtype: str | None,
    quantize: str | None, sharded: bool, progress: bool,
) -> Transformer:  # fmt: skip
    """A draft folder's model on the target's device, not packed. Where its tokenizer differs, it reads and answers in
    the target's ids, and reads its own id `mask` as the id V."""
    device = target.norm.weight.device
    dtype = pick_dtype(dtype, load_config(folder).dtype, device)
    draft_tokenizer = load_tokenizer(folder)
    ids = shared_tokens(tokenizer, draft_tokenizer, target, folder)
    ranks = ranks_of(target) if sharded else None
    draft = load_model(folder, device=device, dtype=dtype, progress=progress, pack=False, quantize=quantize, tp=ranks)
    if ids is not None:
        translate(draft, ids, draft_tokenizer.bos_id or 0, mask)
    return draft


@torch.no_grad()
def shared_tokens(tokenizer: Tokenizer, other: Tokenizer, model: Transformer, folder: Path) -> Tensor | None:
    """The draft's id of each of the target's V ids (V,), -1 for none; None where both read every id as the same string.
    ValueError where the shared tokens have too small a share of the target's probability, the mean over a short text.
    Equal tokenizers may still have vocabularies of unequal padding."""
    pieces, draft_pieces = tokenizer.pieces(), other.pieces()
    if pieces == draft_pieces:
        return None
    ids = ids_by_string(pieces, draft_pieces, model.config.vocab_size)
    text = torch.tensor([tokenizer.encode(SAMPLE_TEXT)], device=model.norm.weight.device)  # (1, T)
    p = model(text, torch.arange(text.size(1), device=text.device)).softmax(-1)  # (1, T, V)
    share = p[..., ids.to(p.device) >= 0].sum(-1).mean().item()
    message = f"its tokenizer has {int((ids >= 0).sum())} of the target's {len(pieces)} tokens"
    message += f", {share:.1%} of the target's probability"
    if share < MIN_SHARED:
        raise ValueError(f"{folder}: {message}; a draft needs at least {MIN_SHARED:.0%}")
    print(f"{folder}: {message}, and drafts over these alone", file=sys.stderr)
    return ids
