"""Drafts whose tokenizer is not the target's: they draft the tokens that both tokenizers have.

q is 0 outside the shared tokens, and tokens are drawn from q, so the output keeps the target's distribution. This file
knows tokens as bytes and ids, and no tokenizer.
"""

import math
from collections import Counter
from dataclasses import replace

import torch
from torch import Tensor, nn


def ids_by_string(target: list[bytes], draft: list[bytes], V: int) -> Tensor:
    """The draft's id of each of the target's V ids (V,), -1 where the draft has no token of these bytes. Of
    several tokens with the same bytes the first maps to the first, the second to the second."""

    def numbered(pieces: list[bytes]) -> list[tuple[bytes, int]]:
        seen = Counter()
        return [(piece, seen.update([piece]) or seen[piece]) for piece in pieces]

    id_by_piece = {piece: id for id, piece in enumerate(numbered(draft)) if piece[0]}
    ids = [id_by_piece.get(piece, -1) for piece in numbered(target)][:V]
    return torch.tensor(ids + [-1] * (V - len(ids)))


def spread(logits: Tensor, ids: Tensor) -> Tensor:
    """Logits (..., V of the draft) at the target's ids (..., V): -inf where the draft has none."""
    return logits.index_select(-1, ids.clamp(min=0)).masked_fill(ids < 0, -math.inf)


class Translated(nn.Module):
    """An embedding or a head of the draft, indexed by the target's ids through `ids` (V,)."""

    def __init__(self, part: nn.Module, ids: Tensor, reads: bool):
        super().__init__()
        self.part, self.reads = part, reads
        self.register_buffer("ids", ids, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.ids[x]) if self.reads else spread(self.part(x), self.ids)


def translate(model: nn.Module, ids: Tensor, unknown: int, mask: int | None = None) -> None:
    """Change a draft model, in place, to take and give the target's ids. `ids` (V,): the draft's id of each. It reads
    `unknown` for a token that it lacks, and `mask`, one of its own ids, for the id V."""
    ids = ids.to(model.norm.weight.device)
    read = torch.where(ids < 0, unknown, ids)
    read = read if mask is None else torch.cat((read, read.new_tensor([mask])))
    model.embed, model.lm_head = Translated(model.embed, read, True), Translated(model.lm_head, ids, False)
    model.config = replace(model.config, vocab_size=len(ids))
