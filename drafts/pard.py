"""PARD (arXiv:2504.18583): a model trained with mask tokens draws all K tokens of a round in one pass.

q_i depends on the decided tokens and i - 1 masks, not on drafted tokens, so rejection sampling applies unchanged.
This file does not know how the model was trained.
"""

import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from drafts.translated import load_translated
from loading.checkpoint import load_config
from loading.config import Section
from loading.plain_files import error_prefix
from loading.tokenizer import Tokenizer
from model import Caches, Config, Transformer
from speculative import ModelDraft


class PardDraft(ModelDraft):
    """A ModelDraft that runs once a round, over the newest decided tokens and K - 1 masks.

    It takes as many decided tokens as a round can decide, and so overwrites the keys of the last round's masks.
    """

    def __init__(self, model: Transformer, mask: int):
        """`mask`: the draft's id of the mask token."""
        super().__init__(model)
        self.mask = mask

    def setup(self, state: nn.Module, k_max: int, target, maybe_compile: Callable) -> None:
        super().setup(state, k_max, target, maybe_compile)
        self.num_input_tokens = k_max + 1

    def passes(self, k: int) -> int:
        return min(k, 1)

    def propose(self, state: nn.Module) -> tuple[Tensor, Tensor]:
        self.drawn.zero_()
        self.maybe_compile(self.draw_all, state, state.k)(self.runner.slice_to(state.length), state, state.k)
        return self.tokens[:, : state.k], self.probs[:, : state.k]

    def draw_all(self, caches: Caches, state: nn.Module, K: int) -> None:
        """Run `num_input_tokens` decided tokens and K - 1 masks, and draw the K tokens after the last decided one."""
        pos = state.pos[:, None] + torch.arange(1 - self.num_input_tokens, K, device=state.pos.device)  # (B, n)
        decided = state.tokens.gather(1, pos.clamp(min=0)).clamp(max=self.model.config.vocab_size - 1)
        tokens = torch.where(pos > state.pos[:, None], self.mask, decided)
        h = self.model.hidden(tokens, pos.clamp(min=0), caches)[:, -K:]  # (B, K, D)
        self.draw(state, h, pos[:, -K:] + 1)


def pard_token(hf: dict) -> int:
    """The mask's id. ValueError for an id outside the vocabulary."""
    mask, V = hf.get("pard_token"), Section(hf).size("vocab_size")
    if isinstance(mask, bool) or not isinstance(mask, int) or not 0 <= mask < V:
        raise Section(hf).refused("pard_token", f"must be a token's id below vocab_size = {V}")
    return mask


def check(folder: Path, hf: dict, config: Config) -> Callable[..., PardDraft]:
    """Check a PARD folder and return its loader (drafts.registry.FOLDERS). ValueError for a wrong mask."""
    with error_prefix(folder / "config.json"):
        mask = pard_token(hf)
    load_config(folder)
    return functools.partial(load, folder, mask)


def load(folder: Path, mask: int, target: Transformer, tokenizer: Tokenizer, **options) -> PardDraft:
    """A PARD folder for this target, not packed. `options` are those of drafts.translated.load_translated."""
    draft = load_translated(folder, target, tokenizer, mask, **options)
    is_translated = draft.config.vocab_size == target.config.vocab_size and hasattr(draft.embed, "ids")
    return PardDraft(draft, target.config.vocab_size if is_translated else mask)
