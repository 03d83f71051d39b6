"""What a drafter is: it proposes K tokens for every row, and says what it drew them from.

    Draft               K tokens of every row, and what they were drawn from
    Drafter             the interface of a drafter; this class drafts nothing
    ModelDraft          a second model with its own cache, or part of the target on the target's
                        cache;  ParallelDraft  one that drafts in one pass
    CustomDraft         any object with `propose`

speculative.py verifies what drafters propose, and decoding/engine.py asks for it.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

import decoding.sampling as sampling
from decoding.draft_length import DraftLength
from decoding.memory import Memories
from decoding.sampling import DRAFT_DRAW, draw
from model import Caches, Transformer, row_view


class Draft(NamedTuple):
    """Drafted tokens (B, K) of the positions after a row's last decided one, and the distributions
    q (B, K, V) float32 that they were drawn from. A row has no draft from where q is zero."""

    tokens: Tensor
    q: Tensor


class Drafter(nn.Module):
    """The interface of a drafter; this class drafts nothing. `batch` is decoding/state.py's State:
    tokens (B, S), pos (B,) the index of the last decided token, done, seed, the sampling's values
    and sampling_path, and broadcast(x), rank 0's x. Positions beyond `pos` are the round's scratch
    space. `plan` is a speculative.Plan: k tokens to draft, and the length.

    A subclass overrides `propose`, and other methods as needed. It must hand over every token that
    it draws. It may end a draft early, but never because of the token that it has just drawn: to
    look at a token and drop it would change the output's distribution."""

    auto_k = (1, 2, 3, 5, 8)  # the choices of `auto`, besides 0
    owns_cache = False  # does its model have a cache of its own, and so need every prompt?
    # Set by `choose_k` for the requests that it plans: those that take a suffix draft instead of
    # the model's, and whether the model runs at all.
    suffix_requests = frozenset()
    runs_model = True
    runner = None  # the ModelRunner of its model
    owner = None  # a weak reference to the Engine that was made with it last
    # How many of the latest decided tokens the first pass of a round reads: the newest, which no
    # cache holds yet, and those before it that the draft's own cache may lack after a round.
    num_input_tokens = 2
    # Positions from the last decided token on that its cache needs beyond the target's.
    num_scratch = 0
    # The class of its own running figures, which `choose_k` finds in `memory.figures` of the
    # requests, all of one memory.
    figures_type: type = object
    max_draft_tokens = math.inf  # of a round
    max_positions = math.inf  # it drafts up to this length of a text, and beyond it nothing

    def __init__(self, model: Transformer | None = None):
        super().__init__()
        self.model = model  # `propose` runs it; None: no model
        self.memories = Memories(self.figures_type)

    def setup(
        self,
        state: nn.Module,
        k_max: int,
        target,
        maybe_compile: Callable,
    ) -> None:
        """Make fixed tensors for this batch and up to k_max drafted tokens. `target` is the
        target's ModelRunner; maybe_compile(function, state, *static) returns the function, compiled
        or not."""
        self.maybe_compile = maybe_compile
        B = state.pos.size(0)
        V = target.model.config.vocab_size
        device = state.pos.device
        tokens = torch.zeros(B, k_max, dtype=torch.int64, device=device)
        probs = torch.zeros(B, k_max, V, device=device)
        self.register_buffer("tokens", tokens, persistent=False)
        self.register_buffer("probs", probs, persistent=False)

    def propose(self, batch: nn.Module, plan) -> Draft:
        """plan.k tokens for every row. This class drafts none. Verification still runs tokens: here
        the row's last one, whose states are known to be finite."""
        last = batch.tokens.gather(1, batch.pos[:, None])  # (B, 1)
        return Draft(last.expand(-1, plan.k), self.probs[:, : plan.k])

    def proposal(self, k: int) -> Draft:
        """The first k tokens that were written to `tokens` and `probs`."""
        return Draft(self.tokens[:, :k], self.probs[:, :k])

    def draft_lengths(self, k: int | str) -> tuple[int, ...]:
        """The numbers of tokens that a round may draft: `k`, or the choices of "auto"."""
        choices = self.auto_k if k == "auto" else (k,)
        return tuple(choice for choice in choices if 0 < choice <= self.max_draft_tokens)

    def choose_k(
        self,
        requests: Sequence,
        unread: int,
        draft_length: DraftLength,
    ) -> int:
        """Called before each step, on the host, for the scheduler.Requests of each memory: the
        number of tokens that the step drafts for them, 0 for none. `unread`: as of `expect`."""
        expected = self.expect(requests, unread)
        has_draft = any(row != [] for row in expected)
        return draft_length.choose(expected) if has_draft else 0

    def expect(self, requests: Sequence, unread: int) -> list[list[float] | None]:
        """For each scheduler.Request a list with one number for each token of its draft: the
        probability that it and all tokens before it are accepted. []: no draft; None: the drafter
        cannot tell. Up to `unread` decided tokens of a row have not reached the host yet."""
        return [
            None if request.can_draft and request.may_draft and self.fits(request) else []
            for request in requests
        ]

    def row_view(self, begin: int, end: int) -> "Drafter":
        """The drafter of rows [begin, end)."""
        view = row_view(self, begin, end)
        view._modules = dict(self._modules)
        if self.runner is not None:
            view.runner = self.runner.row_view(begin, end)
        return view

    def fits(self, request) -> bool:
        """Can the next token of a scheduler.Request be drafted within `max_positions`, by what the
        host has read?"""
        return request.num_positions < self.max_positions

    def rows_to_draft(self, batch: nn.Module, k: int) -> Tensor:
        """(B, k) whether the row's tokens may be drafted there, and whether all of them lie within
        `max_positions`."""
        limit = batch.draft_limit.clamp(max=k)
        is_within = batch.pos + limit < self.max_positions  # (B,)
        return batch.positions_to_draft(k) & is_within[:, None]

    def observe(self, overlap: float) -> None:
        """Called on the host for each drafted row of a round, with the sum of min(p, q) at its
        first drafted token."""

    def observe_step(self, plan, num_tokens: float) -> None:
        """Called on the host for each decoding.memory.DraftPlan of a step or round, with the number
        of tokens that a row of it received on average."""

    def passes(self, k: int) -> int:
        """How many passes the drafter's model makes to draft k tokens."""
        return k

    def update(self, state: nn.Module) -> None:
        """Called after every step, drafted or plain. Writes to state.can_draft (B,) whether a row
        has a draft."""


class ModelDraft(Drafter):
    """A model drafts token by token, from the sampling's own distribution.

    Its own cache lags by at most one token, so a round's first pass takes the last two tokens. On
    the target's cache one is enough: verification rewrites all K + 1 positions of every layer
    before any read."""

    # A subclass whose first pass reads all tokens that the last round may have decided, k_max + 1,
    # gives the number of tokens that this pass reads besides; None: the first pass reads 1 or 2.
    num_extra_inputs: int | None = None

    def __init__(self, model: Transformer, on_layers: Sequence[int] | None = None):
        """`on_layers`: the target's layers whose caches the draft's layers use; None for separate
        caches."""
        super().__init__(model)
        self.on_layers = on_layers
        self.owns_cache = on_layers is None
        self.num_input_tokens = 1
        if self.owns_cache:
            self.num_input_tokens = 2
            self.max_positions = model.config.max_seq_length

    def setup(
        self,
        state: nn.Module,
        k_max: int,
        target,
        maybe_compile: Callable,
    ) -> None:
        super().setup(state, k_max, target, maybe_compile)
        if self.num_extra_inputs is not None:
            self.num_input_tokens = k_max + 1 + self.num_extra_inputs
        self.runner = target.for_draft(self.model, self.on_layers, self.num_scratch)
        # Ids that only the target has get probability 0; verification still draws them.
        self.vocab = min(target.model.config.vocab_size, self.model.config.vocab_size)
        zero = torch.zeros((), dtype=torch.int64, device=state.pos.device)
        self.register_buffer("drawn", zero, persistent=False)

    def propose(self, batch: nn.Module, plan) -> Draft:
        caches = self.runner.slice_to(plan.length + plan.k)
        self.drawn.zero_()
        for num_input_tokens in (self.num_input_tokens, *[1] * (plan.k - 1)):
            draw_next = self.maybe_compile(self.draw_next, batch, num_input_tokens)
            draw_next(caches, batch, num_input_tokens)
        return self.proposal(plan.k)

    def draw_next(
        self,
        caches: Caches,
        state: nn.Module,
        num_input_tokens: int,
    ) -> None:
        """Run the last `num_input_tokens` tokens and draw the one after them."""
        last = state.pos + self.drawn  # (B,)
        h = self.hidden(caches, state, last, num_input_tokens)
        self.draw(state, h[:, -1:], last[:, None] + 1)

    def draw(
        self,
        state: nn.Module,
        h: Tensor,
        pos: Tensor,
        bias: Tensor | float = 0.0,
    ) -> None:
        """Draw the tokens at pos (B, T) from hidden states h (B, T, D), and append them to the
        proposal. `bias` (B, T, V) is added to their logits."""
        logits = self.model.head(h) + bias  # (B, T, V)
        logits = logits[..., : self.vocab]  # of the shorter vocabulary
        # All T draws see the tokens before the first of them: PARD draws them at once.
        last = (pos[:, :1] - 1).expand_as(pos)
        logits = state.process_draft_logits(logits, last)
        q = sampling.distribution(logits, state.sampling_path, state.values)
        noise = state.noise(pos, DRAFT_DRAW)  # (B, T)
        token = draw(q, noise, state.sampling_path)
        token = state.broadcast(token.clamp(min=0))
        state.tokens.scatter_(1, pos, token)
        T = pos.size(1)
        index = self.drawn + torch.arange(T, device=pos.device)  # (T,)
        self.tokens.index_copy_(1, index, token)
        self.probs[..., : self.vocab].index_copy_(1, index, q)
        self.drawn.add_(T)

    def hidden(
        self,
        caches: Caches,
        state: nn.Module,
        last: Tensor,
        T: int,
    ) -> Tensor:
        """Hidden states (B, T, D) of the T positions up to `last` (B,)."""
        tokens, pos = self.inputs(state, last, T)
        return self.model.hidden(tokens, pos, caches)

    def inputs(
        self,
        state: nn.Module,
        last: Tensor,
        T: int,
    ) -> tuple[Tensor, Tensor]:
        """(tokens, pos), both (B, T), of the T positions up to `last` (B,). Positions before 0
        become 0. Those of a parked row go behind all that it may still hold for another request."""
        offset = torch.arange(1 - T, 1, device=last.device)  # (T,)
        pos = last[:, None] + offset  # (B, T)
        pos = pos.clamp(min=0)
        max_id = self.model.config.vocab_size - 1
        tokens = state.tokens.gather(1, pos)  # (B, T)
        tokens = tokens.clamp(max=max_id)
        is_parked = state.pos[:, None] >= state.parked_pos  # (B, 1)
        return tokens, torch.where(is_parked, self.runner.S, pos)


class ParallelDraft(ModelDraft):
    """A ModelDraft that drafts all K tokens of a round in one pass, `draw_all`. It reads as many
    decided tokens as a round can decide, and so overwrites what the last round wrote beyond
    them."""

    num_extra_inputs = 0

    def passes(self, k: int) -> int:
        return min(k, 1)

    def propose(self, batch: nn.Module, plan) -> Draft:
        num_written = max(plan.k, self.num_scratch)
        caches = self.runner.slice_to(plan.length + num_written)
        self.drawn.zero_()
        draw_all = self.maybe_compile(self.draw_all, batch, plan.k)
        draw_all(caches, batch, plan.k)
        return self.proposal(plan.k)

    def draw_all(
        self,
        caches: Caches,
        state: nn.Module,
        K: int,
    ) -> None:
        """Run the `num_input_tokens` latest tokens, and `draw` the K tokens after them."""
        raise NotImplementedError


class CustomDraft(Drafter):
    """Any object with `propose(batch, plan)`, as a Drafter."""

    def __init__(self, drafter):
        super().__init__()
        self.propose = drafter.propose
