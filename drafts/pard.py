"""PARD (arXiv:2504.18583): a model trained with mask tokens draws all K tokens of a round in one
pass.

q_i depends on the decided tokens and i - 1 masks, not on drafted tokens, so rejection sampling
applies unchanged.
"""

import torch
from torch import nn

from drafts.base import DraftSource, ParallelDraft
from drafts.translated import load_translated
from drafts.vocabulary import read_token_id
from loading.checkpoint import load_config
from loading.config import Section
from loading.tokenizer import Tokenizer
from model import Caches, Config, Transformer


class PardDraft(ParallelDraft):
    """A ParallelDraft over the newest decided tokens and K - 1 masks."""

    def __init__(self, model: Transformer, mask: int):
        """`mask`: the id that the model reads as its mask."""
        super().__init__(model)
        self.mask = mask

    def draw_all(
        self,
        caches: Caches,
        batch: nn.Module,
        K: int,
    ) -> None:
        n = self.num_first_inputs + K - 1
        # Tokens after batch.pos are scratch, and masks take their places.
        tokens, pos = self.inputs_up_to(batch, batch.pos + K - 1, n)  # (B, n) each
        is_mask = torch.arange(n, device=pos.device) >= self.num_first_inputs  # (n,)
        tokens = torch.where(is_mask, self.mask, tokens)
        h = self.model.hidden(tokens, pos, caches)  # (B, n, D)
        ahead = torch.arange(1, K + 1, device=pos.device)
        self.draw(batch, self.model.head(h[:, -K:]), batch.pos[:, None] + ahead)


def pard_token(hf: dict) -> int:
    """The mask's id. UserError for an id outside the vocabulary."""
    hf = Section(hf)
    return read_token_id(hf, "pard_token", hf.size("vocab_size"))


class PardSource(DraftSource):
    """A PARD folder. UserError for a wrong mask."""

    def check(self, config: Config) -> None:
        self.mask = pard_token(self.origin.hf)
        load_config(self.origin)  # UserError for a model that cannot run

    def load(self, target: Transformer, tokenizer: Tokenizer) -> PardDraft:
        model = load_translated(self.origin, target, tokenizer, self.options, self.mask)
        # A translated model reads the target's ids, and its mask at the first free one.
        is_translated = hasattr(model.embed, "ids")
        return PardDraft(model, model.config.vocab_size if is_translated else self.mask)
