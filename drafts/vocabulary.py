"""Drafts whose tokenizer is not the target's: they draft the tokens that both tokenizers have.

q is 0 outside the shared tokens, and tokens are drawn from q, so the output keeps the target's
distribution.
"""

import math
from collections import defaultdict, deque
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loading.config import Section


def read_token_id(section: Section, key: str, V: int) -> int:
    """A token's id of config.json. UserError for one outside the vocabulary."""
    id = section.get(key)
    if type(id) is not int or not 0 <= id < V:
        raise section.refused(key, f"must be a token's id below vocab_size = {V}")
    return id


def ids_by_string(pieces: list[bytes], draft_pieces: list[bytes], V: int) -> Tensor:
    """The draft's id of each of the target's V ids (V,), -1 where the draft has no token of these
    bytes. Of several tokens with the same bytes the first maps to the first, the second to the
    second."""
    draft_ids = defaultdict(deque)  # by bytes, in order
    for id, piece in enumerate(draft_pieces):
        if piece:
            draft_ids[piece].append(id)
    ids = [-1] * V
    for id, piece in enumerate(pieces[:V]):
        if draft_ids[piece]:
            ids[id] = draft_ids[piece].popleft()
    return torch.tensor(ids)


def gather_logits(logits: Tensor, ids: Tensor) -> Tensor:
    """Logits (..., V of the draft) at the target's ids (..., V): -inf where the draft has none."""
    target_logits = logits.index_select(-1, ids.clamp(min=0))
    return target_logits.masked_fill(ids < 0, -math.inf)


class Translated(nn.Module):
    """An embedding or a head of the draft, indexed by the target's ids through `ids` (V,)."""

    def __init__(
        self,
        part: nn.Module,
        ids: Tensor,
        reads: bool,
    ):
        super().__init__()
        self.part = part
        self.reads = reads
        self.register_buffer("ids", ids, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.reads:
            return self.part(self.ids[x])
        return gather_logits(self.part(x), self.ids)


def translate(
    model: nn.Module,
    ids: Tensor,
    unknown: int,
    mask: int | None = None,
) -> None:
    """Change a draft model, in place, to take and give the target's ids. `ids` (V,): the draft's id
    of each target's token. The draft reads `unknown` for a token that it lacks, and `mask`, one of
    its own ids, for the id V."""
    ids = ids.to(model.norm.weight.device)
    input_ids = torch.where(ids < 0, unknown, ids)
    if mask is not None:
        input_ids = F.pad(input_ids, (0, 1), value=mask)
    model.embed = Translated(model.embed, input_ids, reads=True)
    model.lm_head = Translated(model.lm_head, ids, reads=False)
    model.config = replace(model.config, vocab_size=len(ids))
