"""A draft folder's model, which reads and answers in the target's ids where its tokenizer differs.

ModelSource       a smaller model as a draft
load_translated   the model
shared_tokens     the ids that both tokenizers have, or a refusal that names their share
"""

import sys
from pathlib import Path

import torch
from torch import Tensor

from decoding.errors import UserError
from drafts.base import DraftSource, LoadOptions, ModelDraft
from drafts.vocabulary import ids_by_string, translate
from loading.checkpoint import Checkpoint, load_config, load_model
from loading.models import pick_dtype
from loading.tokenizer import Tokenizer, load_tokenizer
from model import Config, Transformer
from tp import ranks_of

# The tokens that the draft shares with the target must have this share of its probability.
MIN_SHARED = 0.5
SAMPLE_TEXT = (
    "On Monday the shop opened at 9, and Anna bought three books.\n\ndef area(r):\n   "
    " return 3.14 * r * r\n"
)


class ModelSource(DraftSource):
    """The folder of a smaller model."""

    def check(self, config: Config) -> None:
        load_config(self.origin)

    def load(self, target: Transformer, tokenizer: Tokenizer) -> ModelDraft:
        return ModelDraft(load_translated(self.origin, target, tokenizer, self.options))


def load_translated(
    checkpoint: Checkpoint,
    target: Transformer,
    tokenizer: Tokenizer,
    options: LoadOptions,
    mask: int | None = None,
) -> Transformer:
    """A draft folder's model on the target's device, not packed. If its tokenizer differs from the
    target's, it takes and gives the target's ids, and its mask token gets the first free id, V."""
    device = target.norm.weight.device
    dtype = pick_dtype(options.dtype, checkpoint.config.dtype, device)
    draft_tokenizer = load_tokenizer(checkpoint, known={"config.json": checkpoint.hf})
    ids = shared_tokens(tokenizer, draft_tokenizer, target, checkpoint.path)
    ranks = ranks_of(target) if options.sharded else None
    model = load_model(
        checkpoint,
        device=device,
        dtype=dtype,
        quantize=options.quantize,
        tp=ranks,
        progress=options.progress,
        pack=False,
    )
    if ids is not None:
        translate(model, ids, draft_tokenizer.bos_id or 0, mask)
    return model


@torch.no_grad()
def shared_tokens(
    tokenizer: Tokenizer,
    draft_tokenizer: Tokenizer,
    target: Transformer,
    folder: Path,
) -> Tensor | None:
    """The draft's id of each of the target's V ids (V,), -1 for none; None where both read every id
    as the same string. UserError where the shared tokens have too small a share of the target's
    probability, the mean over a short text. Equal tokenizers may still have vocabularies of unequal
    padding."""
    pieces = tokenizer.pieces()
    draft_pieces = draft_tokenizer.pieces()
    if pieces == draft_pieces:
        return None
    ids = ids_by_string(pieces, draft_pieces, target.config.vocab_size)
    text = torch.tensor([tokenizer.encode(SAMPLE_TEXT)], device=target.norm.weight.device)
    pos = torch.arange(text.size(1), device=text.device)  # (T,)
    p = target(text, pos).softmax(-1)  # (1, T, V)
    share = p[..., ids.to(p.device) >= 0].sum(-1).mean().item()
    message = f"its tokenizer has {int((ids >= 0).sum())} of the target's {len(pieces)} tokens"
    message += f", {share:.1%} of the target's probability"
    if share < MIN_SHARED:
        raise UserError(f"{folder}: {message}; a draft needs at least {MIN_SHARED:.0%}")
    print(f"{folder}: {message}, and drafts over these alone", file=sys.stderr)
    return ids
