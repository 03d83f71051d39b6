"""What a drafter is: it proposes K tokens for every row, and says what it drew them from.

    Draft               K tokens of every row, and what they were drawn from
    Drafter             the interface of a drafter
    propose             what an engine calls: a checked draft, or fillers without a drafter
    ModelDraft          a second model with its own cache, or part of the target on the target's
    ParallelDraft       a ModelDraft that drafts in one pass
    CustomDraft         any object with `propose`
    DraftSource         a draft that was checked and is not loaded yet
    LoadOptions         how it will be loaded

speculative.py verifies what drafters propose, and decoding/engine.py asks for it.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from decoding.errors import UserError
from decoding.memory import Memories
from decoding.sampling import DRAFT_DRAW, distribution, draw
from model import Caches, Config, Transformer, row_view


class Draft(NamedTuple):
    """Drafted tokens (B, K) of the positions after a row's last decided one, and the distributions
    q (B, K, V) float32 that they were drawn from. A row's draft ends where q is zero. Its tokens
    from there on are never kept, but run through the target too, and must be ids."""

    tokens: Tensor
    q: Tensor

    def cut(self, k: int) -> "Draft":
        """Its first k tokens."""
        return Draft(self.tokens[:, :k], self.q[:, :k])

    def limited(self, limits: Tensor) -> "Draft":
        """The draft without a row's tokens beyond its limit, of limits (B,)."""
        ahead = torch.arange(self.tokens.size(1), device=limits.device)  # (K,)
        is_within = ahead < limits[:, None]  # (B, K)
        return self._replace(q=torch.where(is_within[..., None], self.q, 0))


class Drafter(nn.Module):
    """The interface of a drafter. `batch` is decoding/batch.py's Batch: tokens (B, S), pos (B,) the
    index of the last decided token, done, seed, the sampling's values and sampling_path, and
    broadcast(x), rank 0's x. Positions beyond `pos` are the round's scratch space. `plan` is a
    speculative.Plan: k tokens to draft, and the length.

    A subclass overrides `propose`, `prefill` if it has a cache of its own, and `expect` if it can
    tell how good its draft is. It must hand over every token that it draws. It may end a draft
    early, but never because of the token that it has just drawn: to look at a token and drop it
    would change the output's distribution."""

    auto_k = (1, 2, 3, 5, 8)  # the choices of `auto`, besides 0
    max_k = math.inf  # tokens of a round
    # Requests whose texts have this many tokens or more do not take its draft.
    max_positions = math.inf
    # The drafter's own cache may lack the latest decided tokens, or hold them computed from other
    # inputs: from masks, or from the draft's own states. So a round's first pass runs this many of
    # them, the newest included. 0: no cache of its own, and prompts do not run through it.
    num_first_inputs = 0

    def __init__(self, model: Transformer | None = None):
        super().__init__()
        self.model = model  # `propose` runs it; None: no model
        self.runner = None  # the ModelRunner of its model
        self.memories = Memories()
        # Acceptance of a round's first token below which something is wrong with such a draft.
        self.min_acceptance = 0.0
        self.owner = None  # a weak reference to the Engine that was made with it last

    def setup(
        self,
        batch: nn.Module,
        k_max: int,
        target,
        maybe_compile: Callable,
    ) -> None:
        """Make fixed tensors for this batch and up to k_max drafted tokens. `target` is the
        target's ModelRunner; maybe_compile(function, batch, *static) returns the function, compiled
        or not."""
        self.maybe_compile = maybe_compile
        B = len(batch.pos)
        self.vocab_size = V = target.model.config.vocab_size  # it may draft ids below this number
        device = batch.pos.device
        tokens = torch.zeros(B, k_max, dtype=torch.int64, device=device)
        probs = torch.zeros(B, k_max, V, dtype=torch.float32, device=device)
        self.register_buffer("tokens", tokens, persistent=False)
        self.register_buffer("probs", probs, persistent=False)

    def propose(self, batch: nn.Module, plan) -> Draft:
        """plan.k tokens for every row."""
        raise NotImplementedError

    def prefill(self, batch: nn.Module, begin: int, end: int) -> None:
        """Compute positions [begin, end) of the text of a batch of one row in its own cache."""

    def passes(self, k: int) -> int:
        """How many passes its model makes to draft k tokens, for reports."""
        return k

    def causes(self) -> list[str]:
        """What may be wrong with this draft if hardly any token is accepted."""
        return []

    def expect(self, requests: Sequence, unread: int) -> list[list[float] | None]:
        """What is expected of the next drafts: called on the host before each step, once for the
        scheduler.Requests that share a memory. A request's entry is [] without a draft, None if the
        drafter cannot tell, and else has for each token of the draft the probability that it and
        all tokens before it are accepted. Up to `unread` decided tokens of a row have not reached
        the host yet."""
        return [
            None if request.may_draft and request.num_positions < self.max_positions else []
            for request in requests
        ]

    def row_view(self, begin: int, end: int) -> "Drafter":
        """The drafter for rows [begin, end), with the drafters that it holds cut likewise."""
        view = row_view(self, begin, end)
        view._modules = {
            name: module.row_view(begin, end) if isinstance(module, Drafter) else module
            for name, module in self._modules.items()
        }
        if self.runner is not None:
            view.runner = self.runner.row_view(begin, end)
        return view


def propose(drafter: Drafter | None, batch: nn.Module, plan) -> Draft:
    """The tokens that a drafter proposes for a step. Without one a step of fixed width runs K
    tokens that are no draft: each row's last one, whose states are known to be finite."""
    if drafter is None:
        last = batch.tokens.gather(1, batch.pos[:, None])  # (B, 1)
        shape = (len(last), plan.k, batch.vocab_size)
        q = torch.zeros(shape, dtype=torch.float32, device=last.device)  # (B, K, V)
        return Draft(last.expand(-1, plan.k), q)
    draft = Draft(*drafter.propose(batch, plan))
    shape = (len(batch.pos), plan.k, batch.vocab_size)  # (B, K, V)
    if draft.q.shape != shape or draft.tokens.shape != shape[:2]:
        raise UserError(f"the drafter must give tokens (B, K) and q (B, K, V), of {shape}")
    return draft


class ModelDraft(Drafter):
    """A model drafts token by token, from the sampling's own distribution.

    After a round its own cache lacks at most one token that the target's has, so the next round's
    first pass takes the last two. On the target's cache it takes one: verification has overwritten
    what the draft wrote, at all K + 1 positions of every layer."""

    # For drafts that write other keys and values for drafted tokens than for decided ones. A number
    # n sets num_first_inputs to k_max + 1 + n: all tokens that the last round may have decided, and
    # n before them (EAGLE-3, MTP, PARD: 0, DFlash: 1). None keeps 2, or 0 on the target's cache.
    num_extra_inputs: int | None = None
    # Positions from the last decided token on that its cache needs beyond the target's.
    num_scratch = 0
    # `min_acceptance` of a trained draft: a published EAGLE-3 head had 0.75, with the states of
    # other layers 0.04 (vllm-project/vllm#50170); the weakest of our own had 0.34
    # (benchmarks/NOTES.md).
    trained_acceptance = 0.3

    def __init__(self, model: Transformer, on_layers: Sequence[int] | None = None):
        """`on_layers`: the target's layers whose caches the draft's layers use; None for separate
        caches."""
        super().__init__(model)
        self.on_layers = on_layers
        if on_layers is None:
            self.num_first_inputs = 2
            self.max_positions = model.config.max_seq_length
            self.min_acceptance = self.trained_acceptance

    def setup(
        self,
        batch: nn.Module,
        k_max: int,
        target,
        maybe_compile: Callable,
    ) -> None:
        super().setup(batch, k_max, target, maybe_compile)
        if self.num_extra_inputs is not None:
            self.num_first_inputs = k_max + 1 + self.num_extra_inputs
        self.runner = target.for_draft(self.model, self.on_layers, self.num_scratch)
        # Ids that only the target has get probability 0; verification still draws them.
        self.vocab_size = min(target.model.config.vocab_size, self.model.config.vocab_size)
        zero = batch.pos.new_zeros(())
        self.register_buffer("num_drawn", zero, persistent=False)

    def propose(self, batch: nn.Module, plan) -> Draft:
        num_written = max(plan.k, self.num_scratch)  # DFlash writes a whole block for any k
        caches = self.runner.slice_to(plan.length + num_written)
        self.num_drawn.zero_()
        self.run_passes(caches, batch, plan.k)
        return self.proposal(batch, plan.k)

    def run_passes(self, caches: Caches, batch: nn.Module, k: int) -> None:
        """Draw k tokens, each in a pass of its own."""
        num_inputs = max(1, self.num_first_inputs)  # on the target's caches the last token alone
        for _ in range(k):
            draw_next = self.maybe_compile(self.draw_next, batch, num_inputs)
            draw_next(caches, batch, num_inputs)
            num_inputs = 1  # the token just drawn

    def causes(self) -> list[str]:
        if hasattr(self.model.embed, "ids"):  # a vocabulary.Translated embedding
            return ["The draft has another tokenizer, and drafts only the tokens that both have"]
        return []

    def proposal(self, batch: nn.Module, k: int) -> Draft:
        """The first k tokens that were drawn, in rows where all lie within `max_positions`."""
        draft = Draft(self.tokens, self.probs).cut(k)
        if self.max_positions >= self.runner.caches.max_seq_length:
            return draft
        # The row's own limit: it may draft fewer than k tokens, and these may all lie within.
        limit = batch.draft_limit.clamp(max=k)  # (B,)
        is_within = batch.pos + limit < self.max_positions  # (B,)
        return draft._replace(q=torch.where(is_within[:, None, None], draft.q, 0))

    def prefill(self, batch: nn.Module, begin: int, end: int) -> None:
        end = min(end, self.max_positions)
        if begin < end:
            self.runner.prefill(batch.tokens, begin, end)

    def draw_next(
        self,
        caches: Caches,
        batch: nn.Module,
        num_inputs: int,
    ) -> None:
        """Run the last `num_inputs` tokens and draw the one after them."""
        last = batch.pos + self.num_drawn  # (B,)
        h = self.hidden_up_to(caches, batch, last, num_inputs)
        self.draw(batch, self.model.head(h[:, -1:]), last[:, None] + 1)

    def draw(
        self,
        batch: nn.Module,
        logits: Tensor,
        pos: Tensor,
    ) -> None:
        """Draw the tokens at pos (B, T) from logits (B, T, V), and append them to the proposal."""
        logits = logits[..., : self.vocab_size]  # of the shorter vocabulary
        # All T draws see the tokens before the first of them: PARD draws them at once.
        last = (pos[:, :1] - 1).expand_as(pos)
        logits = batch.process_draft_logits(logits, last)
        q = distribution(logits, batch.sampling_path, batch.values)
        noise = batch.noise(pos, DRAFT_DRAW)  # (B, T)
        tokens = draw(q, noise, batch.sampling_path)  # (B, T)
        # A NaN in q draws INVALID, which no model can embed; verification rejects the token.
        tokens = batch.broadcast(tokens.clamp(min=0))
        batch.tokens.scatter_(1, pos, tokens)
        T = pos.size(1)
        index = self.num_drawn + torch.arange(T, device=pos.device)  # (T,)
        self.tokens.index_copy_(1, index, tokens)
        self.probs[..., : self.vocab_size].index_copy_(1, index, q)
        self.num_drawn.add_(T)

    def hidden_up_to(
        self,
        caches: Caches,
        batch: nn.Module,
        last: Tensor,
        T: int,
    ) -> Tensor:
        """Hidden states (B, T, D) of the T positions up to `last` (B,)."""
        tokens, pos = self.inputs_up_to(batch, last, T)
        return self.model.hidden(tokens, pos, caches)

    def inputs_up_to(
        self,
        batch: nn.Module,
        last: Tensor,
        T: int,
    ) -> tuple[Tensor, Tensor]:
        """(tokens, pos), both (B, T), of the T positions up to `last` (B,). Positions before 0
        become 0. Those of a parked row become S, which no query sees: earlier ones may hold a
        prefix that another request reuses."""
        offset = torch.arange(1 - T, 1, device=last.device)  # (T,)
        pos = last[:, None] + offset  # (B, T)
        pos = pos.clamp(min=0)
        max_id = self.model.config.vocab_size - 1
        tokens = batch.tokens.gather(1, pos)  # (B, T)
        tokens = tokens.clamp(max=max_id)
        is_parked = batch.pos[:, None] >= batch.parked_pos  # (B, 1)
        return tokens, torch.where(is_parked, self.runner.S, pos)


class ParallelDraft(ModelDraft):
    """A ModelDraft that drafts all K tokens of a round in one pass, `draw_all`. It reads as many
    decided tokens as a round can decide, and so overwrites what the last round's masks wrote at
    their positions."""

    num_extra_inputs = 0

    def passes(self, k: int) -> int:
        return min(k, 1)

    def run_passes(self, caches: Caches, batch: nn.Module, k: int) -> None:
        draw_all = self.maybe_compile(self.draw_all, batch, k)
        draw_all(caches, batch, k)

    def draw_all(
        self,
        caches: Caches,
        batch: nn.Module,
        K: int,
    ) -> None:
        """Run the latest decided tokens, and `draw` the K tokens after them."""
        raise NotImplementedError


class CustomDraft(Drafter):
    """Any object with `propose(batch, plan)`, and those of `expect`, `auto_k`, `max_k` and
    `max_positions` that it has, as a Drafter."""

    def __init__(self, drafter):
        super().__init__()
        self.propose = drafter.propose
        optional = ("expect", "auto_k", "max_k", "max_positions")
        self.__dict__.update(
            {name: getattr(drafter, name) for name in optional if hasattr(drafter, name)}
        )

    def setup(self, *args) -> None:
        """It brings its own tensors."""


@dataclass(frozen=True)
class LoadOptions:
    """How a draft is loaded."""

    dtype: str | None = None  # of its model
    quantize: str | None = None  # the scheme of its weights
    sharded: bool = False  # divided over the ranks
    progress: bool = False  # with a bar
    target: object = None  # the target's Checkpoint; None for a model with random weights


def read_count(value: str, what: str) -> int:
    """A whole number from 1 on, as a spec has it; UserError that names `what` it counts."""
    if not re.fullmatch(r"\d{1,18}", value) or int(value) < 1:
        raise UserError(f"{value!r} is no number of {what}; it must be at least 1")
    return int(value)


class DraftSource:
    """A draft for a target, which was checked and is not loaded yet: to make a source reads no
    weights, and raises UserError for a draft that cannot fit.

    `origin`: the Checkpoint of a folder, or the text behind a spec's colon; `config`: the
    target's."""

    def __init__(self, origin, config: Config, options: LoadOptions):
        self.origin = origin
        self.options = options
        self.target_config = config
        self.check(config)

    def check(self, config: Config) -> None:
        """Read from config.json or the spec what the draft is."""

    def load(self, target: Transformer, tokenizer) -> Drafter:
        """The drafter, not packed."""
        raise NotImplementedError

    def variants(self) -> list[tuple[str, "DraftSource"]]:
        """(settings, source) for each way in which its files may be meant, beginning with the one
        that this source takes; [] where they leave nothing open."""
        return []
