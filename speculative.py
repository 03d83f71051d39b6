"""Draft K tokens cheaply, verify them in one pass of the target, keep those that preserve its
distribution.

    acceptance, residual, accept    rejection sampling: two formulas, and the decision of every
                                    round, token by token or for the whole block
    speculate                       the whole idea, for one prompt: read it first
    run_round, verify_step          the same round for the rows of an engine
    Drafter                         the interface of a drafter: propose, advance, update
    ModelDraft                      a second model with its own cache, or part of the target on the
                                    target's cache;  ParallelDraft  one that drafts in one pass
    DraftLength                     how many tokens the next round drafts

This file works on logits, distributions and token ids, and parses the two specs of --draft that use
the target itself. Ranks appear only as `state.broadcast`, and the engine's `maybe_compile` decides
whether a function is compiled. The papers' cost formulas are in decoding/costs.py.

Sources: Leviathan et al., arXiv:2211.17192 (below: L); Chen et al., arXiv:2302.01318; Sun et al.,
arXiv:2403.10444 (below: S), for whole blocks. K is L's and S's gamma.
"""

import copy
import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import decoding.sampling as sampling
from decoding.costs import Costs
from decoding.memory import Memories
from decoding.readback import NO_DRAFT, timestamp
from decoding.runner import ModelRunner
from decoding.sampling import (
    ACCEPT,
    DRAFT_DRAW,
    INVALID,
    PENALIZED,
    PLAIN_DRAW,
    Sampling,
    draw,
    round_uniform,
    uniform,
)
from model import Caches, Config, Transformer, row_view
from weights.formats import format_of
from weights.walker import quantized_copy

# ------------------------------------------------------------------------------------------ accept


def acceptance(p: Tensor, q: Tensor) -> Tensor:
    """The probability min(1, p / q) of keeping a drafted token (L, section 2.3); 0 where q is 0,
    because such a token was not drawn from q. p target, q draft, any shape."""
    return torch.where(q > 0, (p / q).clamp(max=1), 0)


def residual(p: Tensor, q: Tensor, factor: Tensor | float = 1.0) -> Tensor:
    """norm(max(0, factor * p - q)) (..., V), the distribution that replaces a rejected token (L,
    algorithm 1). It is p itself, with p's bits, in rows where q is 0: their token is drawn as in
    plain decoding. It is p too where rounding makes the sum 0: p = q is never rejected."""
    rest = (factor * p - q).clamp(min=0)
    total = rest.sum(dim=-1, keepdim=True)
    has_draft = q.amax(dim=-1, keepdim=True) > 0
    return torch.where(has_draft & (total > 0), rest / total, p)


def block_acceptance(
    p_drafted: Tensor,
    q_drafted: Tensor,
    p: Tensor,
    q: Tensor,
) -> tuple[Tensor, Tensor]:
    """Algorithm 2 of S, for K drafted tokens: the probabilities h (B, K), and factors (B, K + 1).

    Whether to keep the first i tokens is tested for each i, with probability h[:, i - 1], and the
    largest i that passes is kept. The factor after i tokens is their joint p / q, cut off at 1 on
    the way: the next token is drawn from norm(max(0, factor * p - q)).

    p_drafted, q_drafted (B, K) are the probabilities of the drafted tokens; p (B, K + 1, V), q (B,
    K, V). With K = 1 this is `acceptance`. An example with K = 2: the first token has p / q = 0.5,
    the second p / q = 2, so that the factors are 1, 0.5, 1. One by one the first token is lost half
    of the time; as a block both are always kept, because the second makes up for the first. A row
    may have fewer than K drafted tokens, and q is 0 after them: there h is the factor itself.
    """
    K = q.size(1)
    ratio = p_drafted / q_drafted  # (B, K)
    ratio = torch.where(q_drafted > 0, ratio, 0)
    factors = [torch.ones_like(ratio[:, 0])]  # of i tokens: their joint p / q, cut off at 1
    for i in range(K):
        factor = factors[i] * ratio[:, i]
        factors.append(factor.clamp(max=1))
    factor = torch.stack(factors, dim=1)  # (B, K + 1)
    inner = factor[:, 1:K]  # (B, K - 1)
    p_rest = inner[..., None] * p[:, 1:K]  # (B, K - 1, V)
    q_rest = q[:, 1:].nan_to_num()
    excess = (p_rest - q_rest).clamp(min=0)
    rest = excess.sum(dim=-1)  # (B, K - 1)
    total_mass = rest + 1 - inner
    h = torch.where(total_mass == 0, 1, rest / total_mass)
    last = factor[:, K:]  # (B, 1)
    h = torch.cat((h, last), dim=1)  # (B, K)
    return h, factor


def accept(
    draft_tokens: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    generator: torch.Generator | None = None,
    *,
    noise: tuple[Tensor, Tensor] | None = None,
    block: bool = False,
) -> tuple[Tensor, Tensor]:
    """Algorithm 1 of L for every row: the number of drafted tokens to keep, and the token that
    follows them. With `block`, algorithm 2 of S: the same distribution, and more tokens kept.

    draft_tokens (B, K) int, drawn from draft_probs (B, K, V) float32; target_probs (B, K + 1, V)
    float32
    -> n_accepted (B,), next_token (B,), int64. `noise` replaces the generator: uniform numbers in
    [0, 1) for the K decisions (B, K), and for the next token after each number of acceptances (B, K
    + 1). What a block decides also depends on the tokens that it discards and on their numbers, so
    the next round must draft these positions again with fresh numbers: `round_uniform` therefore
    hashes the round's start. Nothing here waits for the device. Where the target's probabilities
    are NaN, next_token is sampling.INVALID; where the draft's are, its token is rejected.
    """
    B, K = draft_tokens.shape
    p = target_probs.float()
    q = draft_probs.float()
    if noise is None:
        numbers = torch.rand(B, 2 * K + 1, generator=generator, device=p.device)
        noise = numbers.split((K, K + 1), dim=1)
    to_accept, to_draw = noise
    drafted = draft_tokens[..., None]  # (B, K, 1)
    p_drafted = p[:, :K].gather(2, drafted)[..., 0]  # (B, K)
    q_drafted = q.gather(2, drafted)[..., 0]
    row = torch.arange(B, device=p.device)
    if block and K > 0:
        h, factor = block_acceptance(p_drafted, q_drafted, p, q)
        count = torch.arange(1, K + 1, device=p.device)
        passing = torch.where(to_accept < h, count, 0)  # (B, K)
        n = passing.amax(dim=1)  # (B,) the longest block
        factor = factor[row, n, None]  # (B, 1)
    else:
        is_accepted = to_accept < acceptance(p_drafted, q_drafted)  # (B, K); u < 0 never holds
        leading = is_accepted.long().cumprod(dim=1)  # (B, K) 1 up to the first rejection
        n = leading.sum(dim=1)  # (B,)
        factor = 1.0
    q = F.pad(q, (0, 0, 0, 1))  # (B, K + 1, V): q is 0 after K acceptances
    p_next = residual(p[row, n], q[row, n], factor)  # (B, V)
    return n, draw(p_next, to_draw[row, n])


# -------------------------------------------------------------------------------------- speculate


class Text:
    """A batch of one row, for `speculate` and its drafter. The names are those of
    decoding.state.State, so that a drafter serves both."""

    def __init__(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        seed: int,
        k: int,
        S: int,
        device: torch.device,
    ):
        """A prompt, with room for S tokens in all; a round drafts k of them."""
        self.tokens = torch.zeros(1, S, dtype=torch.int64, device=device)  # (1, S)
        self.tokens[0, : len(prompt)] = torch.tensor(prompt)
        self.pos = torch.tensor([len(prompt) - 1], device=device)  # (1,) of the last decided token
        self.seed = torch.tensor([seed], device=device)  # (1,)
        self.k = k
        self.sampling = sampling
        self.sampling_path = sampling.path
        self.values = sampling.values.to(device)  # (n,)
        if sampling.path == PENALIZED:
            raise ValueError("logit_bias and penalties need an Engine (decoding/engine.py)")

    @property
    def length(self) -> int:
        """The number of decided tokens."""
        return self.pos.item() + 1

    @property
    def last(self) -> Tensor:
        """The last decided token (1, 1)."""
        return self.tokens.gather(1, self.pos[:, None])

    def noise(self, pos: Tensor, purpose: int = PLAIN_DRAW) -> Tensor:
        """Uniform numbers (1, T) for tokens at pos (1, T): those of plain decoding, or for another
        purpose this round's own."""
        seed = self.seed[:, None].expand_as(pos)
        if purpose == PLAIN_DRAW:
            return uniform(seed, pos)
        start = self.pos[:, None]
        return round_uniform(seed, start, pos - start, purpose)

    def append(self, token: int) -> None:
        if token == INVALID:
            raise ValueError(f"position {self.length}: the model's logits are not finite")
        self.tokens[0, self.length] = token
        self.pos += 1


@torch.inference_mode()
def speculate(
    target: Transformer,
    drafter,
    prompt: Sequence[int],
    *,
    k: int,
    sampling: Sampling,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    seed: int = 0,
) -> Iterator[int]:
    """The whole idea, for one prompt: draft k tokens, verify them in one pass of the target, keep n
    of them, and draw one more. Yields what generate.decode yields: the same greedy tokens, and
    sampled ones of the same distribution.

    drafter.propose(text) returns k tokens (1, k) for the positions after text.pos, and the
    distributions (1, k, V) that it drew them from, or zeros for no draft.
    """
    end = len(prompt) + max_new_tokens
    text = Text(prompt, sampling, seed, k, end + k, target.norm.weight.device)
    runner = ModelRunner(target, 1, end, slack=k + 1)
    # The prompt decides the first token, as in `decode`.
    h = runner.prefill(text.tokens, 0, len(prompt))  # (1, T, D)
    p = sampling.probs(target.head(h[:, -1:]))  # (1, 1, V)
    decided = draw(p, text.noise(text.pos[:, None] + 1))  # (1, 1)
    while True:
        for token in decided[0].tolist():
            text.append(token)
            yield token
            if token in stop_ids or text.length == end:
                return
        # DRAFT k tokens, and VERIFY them: what would the target have drawn after each?
        draft_tokens, q = drafter.propose(text)  # (1, K), (1, K, V)
        tokens = torch.cat((text.last, draft_tokens), dim=1)  # (1, K + 1)
        pos = text.pos[:, None] + torch.arange(k + 1, device=text.pos.device)  # (1, K + 1)
        p = sampling.probs(target(tokens, pos, runner.slice_to(text.length + k)))  # (1, K + 1, V)
        # ACCEPT n of them, and the token that follows.
        noise = (text.noise(pos[:, 1:], ACCEPT), text.noise(pos + 1))  # (1, K), (1, K + 1)
        n, token = accept(draft_tokens, q, p, noise=noise, block=True)  # (1,), (1,)
        decided = torch.cat((draft_tokens[:, :n], token[:, None]), dim=1)  # (1, n + 1)


# ---------------------------------------------------------------------------------------- a round


def run_round(
    rows,
    caches: Caches,
    maybe_compile: Callable,
    forced_tokens: Tensor | None = None,
) -> object:
    """Decide 1 to K + 1 tokens of every one of the `rows` (decoding/runner.py), K = state.k.
    Returns a timestamp, taken when drafting has ended and verification begins.

    `forced_tokens` (B, K) replace the drafted ones. A row's draft ends where drafter.rows_to_draft
    does; without any it is decided as in plain decoding.
    """
    state, target, drafter = rows
    # SPECULATE: K tokens for every row, and the distributions that the drafter drew them from.
    draft_tokens, draft_probs = drafter.propose(state)  # (B, K), (B, K, V)
    num_drafted = draft_tokens.size(1)
    assert num_drafted == state.k, f"{num_drafted} tokens were drafted instead of {state.k}"
    if not state.all_draft or drafter.max_positions < state.parked_pos:
        may_draft = drafter.rows_to_draft(state)  # (B, K)
        draft_probs = torch.where(may_draft[..., None], draft_probs, 0)
    drafted_at = timestamp(draft_tokens.device)
    if forced_tokens is not None:
        draft_tokens = forced_tokens
    state.write_masks(draft_tokens)
    verify = maybe_compile(verify_step, state, state.k)
    verify(target.model, caches, state, draft_tokens, draft_probs)
    drafter.advance(state.accepted.clamp(min=0))
    return drafted_at


def verify_step(
    model: Transformer,
    caches: Caches,
    state: nn.Module,
    draft_tokens: Tensor,
    draft_probs: Tensor,
) -> None:
    """One pass over the last token and K drafted ones (B, K), drawn from draft_probs (B, K, V),
    decides 1 to K + 1 tokens of every row. A row of zeros in draft_probs has no draft.

    The pass overwrites keys and values of all K + 1 positions in every layer, including those of a
    drafter.
    """
    K = draft_tokens.size(1)
    draft_tokens = state.broadcast(draft_tokens)
    state.drafted[:, :K] = draft_tokens

    # VERIFY: the target's distribution at K + 1 positions.
    ahead = torch.arange(K + 1, device=state.pos.device)
    pos = state.pos[:, None] + ahead  # (B, K + 1)
    drafted_pos = pos[:, 1:]
    state.tokens.scatter_(1, drafted_pos, draft_tokens)  # scratch space, where penalties see them
    tokens = state.tokens.gather(1, pos)  # (B, K + 1)
    logits = model(tokens, pos, caches)  # (B, K + 1, V)
    processed = state.process_logits(logits, pos)  # (B, K + 1, V)
    p = sampling.distribution(processed, state.sampling_path, state.values)

    # ACCEPT: n drafted tokens, and the one that follows them.
    # The token after the accepted ones is drawn with the number that plain decoding would use at
    # its position. The numbers that accept or reject are this round's own: those past the last
    # accepted token took part in the decision too, so using them again would bias the text.
    to_accept = state.noise(drafted_pos, ACCEPT)  # (B, K)
    noise = (to_accept, state.noise(pos + 1))
    # Greedy decoding gains nothing from deciding about a whole block.
    block = state.verifies_blocks and state.sampling_path != sampling.GREEDY
    n, token = accept(draft_tokens, draft_probs, p, noise=noise, block=block)  # (B,), (B,)
    overlap = torch.minimum(p[:, :K], draft_probs).sum(dim=-1)  # (B, K)
    is_drafted = draft_probs.amax(dim=-1) != 0  # (B, K)
    overlap = torch.where(is_drafted, overlap, NO_DRAFT)
    has_no_draft = state.done | ~is_drafted[:, 0]
    n = torch.where(has_no_draft, -1, n)
    # All ranks take rank 0's decision: (B, K + 2) float32, which holds ids below 2^24.
    decision = torch.cat((n[:, None], token[:, None], overlap), dim=1)
    decision = state.broadcast(decision)
    n, token, overlap = decision.split((1, 1, K), dim=1)
    state.overlap[:, :K] = overlap
    state.accepted.copy_(n[:, 0].long())
    n = n.long().clamp(min=0)  # (B, 1)
    token = token.long()  # (B, 1)
    decided = torch.cat((draft_tokens, token), dim=1)  # (B, K + 1)
    decided = decided.scatter(1, n, token)
    state.record_logprobs(logits, processed, decided, draft_probs)
    state.commit(decided, n[:, 0])


# --------------------------------------------------------------------------------------- drafters


class Drafter(nn.Module):
    """The interface of a drafter; this class drafts nothing. `state` is decoding/state.py's: tokens
    (B, S), pos (B,) the index of the last decided token, done, seed, the sampling's values and
    sampling_path, k the number of tokens to draft, and broadcast(x), rank 0's x. Positions beyond
    `pos` are the round's scratch space.

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
    max_draft_tokens = math.inf  # of a round
    max_positions = math.inf  # it drafts up to this length of a text, and beyond it nothing

    def __init__(self, model: Transformer | None = None):
        super().__init__()
        self.model = model  # `propose` runs it; None: no model
        self.memories = Memories(self.new_figures)

    def new_figures(self) -> object:
        """Running figures of its own, which `choose_k` finds in `memory.figures` of the requests,
        all of one memory."""

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

    def propose(self, state: nn.Module) -> tuple[Tensor, Tensor]:
        """Tokens (B, K) for the positions after `pos`, and the distributions (B, K, V) that they
        were drawn from. A row of zeros has no draft; this class returns zeros for every row.
        Verification still runs the tokens: here the row's last one, whose states are known to be
        finite."""
        last = state.tokens.gather(1, state.pos[:, None])  # (B, 1)
        return last.expand(-1, state.k), self.probs[:, : state.k]

    def proposal(self, k: int) -> tuple[Tensor, Tensor]:
        """The first k tokens that were written to `tokens` and `probs`."""
        return self.tokens[:, :k], self.probs[:, :k]

    def draft_lengths(self, k: int | str) -> tuple[int, ...]:
        """The numbers of tokens that a round may draft: `k`, or the choices of "auto"."""
        choices = self.auto_k if k == "auto" else (k,)
        return tuple(choice for choice in choices if 0 < choice <= self.max_draft_tokens)

    def choose_k(
        self,
        requests: Sequence,
        unread: int,
        draft_length: "DraftLength",
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

    def rows_to_draft(self, state: nn.Module) -> Tensor:
        """(B, K) whether the row's tokens may be drafted there, and whether all of them lie within
        `max_positions`."""
        limit = state.draft_limit.clamp(max=state.k)
        is_within = state.pos + limit < self.max_positions  # (B,)
        return state.positions_to_draft() & is_within[:, None]

    def advance(self, n_accepted: Tensor) -> None:
        """The state holds the decision: n_accepted (B,) of the proposal, and one token more."""

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

    def propose(self, state: nn.Module) -> tuple[Tensor, Tensor]:
        caches = self.runner.slice_to(state.length)
        self.drawn.zero_()
        for num_input_tokens in (self.num_input_tokens, *[1] * (state.k - 1)):
            draw_next = self.maybe_compile(self.draw_next, state, num_input_tokens)
            draw_next(caches, state, num_input_tokens)
        return self.proposal(state.k)

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

    def propose(self, state: nn.Module) -> tuple[Tensor, Tensor]:
        num_written = max(state.k, self.num_scratch)
        length = state.length - state.k + num_written
        caches = self.runner.slice_to(length)
        self.drawn.zero_()
        draw_all = self.maybe_compile(self.draw_all, state, state.k)
        draw_all(caches, state, state.k)
        return self.proposal(state.k)

    def draw_all(
        self,
        caches: Caches,
        state: nn.Module,
        K: int,
    ) -> None:
        """Run the `num_input_tokens` latest tokens, and `draw` the K tokens after them."""
        raise NotImplementedError


def layer_subset(model: Transformer, layer_ids: Sequence[int]) -> Transformer:
    """A Transformer of some of `model`'s layers, which shares its modules. ValueError for layers
    that are not there."""
    check_layers(layer_ids, model.config.n_layers)
    subset = copy.copy(model)
    subset._modules = dict(model._modules)
    subset.layers = nn.ModuleList(model.layers[i] for i in layer_ids)
    subset.config = replace(model.config, n_layers=len(layer_ids))
    subset.windows = tuple(model.windows[i] for i in layer_ids)
    subset.rope_types = tuple(model.rope_types[i] for i in layer_ids)
    return subset


def check_layers(layer_ids: Sequence[int], n_layers: int) -> None:
    in_order = [i for i in range(n_layers) if i in layer_ids]
    if not layer_ids or in_order != list(layer_ids):
        raise ValueError(f"layers {list(layer_ids)} must be some of 0 to {n_layers - 1}, in order")


def parse_layers(text: str) -> list[int]:
    """ "0-7,24-31" -> the layers in these ranges, both ends included. ValueError for anything
    else."""
    layers = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        layer_range = range(0)
        if match:
            first, last = match.groups()
            layer_range = range(int(first), int(last or first) + 1)
        if not layer_range:
            raise ValueError(f"{part!r} is no layer or range of layers; give ranges like 0-7,24-31")
        layers += layer_range
    return layers


def layers_from_spec(value: str, config: Config) -> Callable[..., ModelDraft]:
    """`--draft layers:0-7,24-31`: the target with some of its layers, on the target's caches."""
    layers = parse_layers(value)
    check_layers(layers, config.n_layers)
    return lambda target, *_, **options: ModelDraft(layer_subset(target, layers), layers)


def quantized_from_spec(value: str, config: Config) -> Callable[..., ModelDraft]:
    """`--draft quantized:SCHEME`: the target's quantized self, on the target's caches."""
    format_of(value)
    layers = range(config.n_layers)
    return lambda target, *_, **options: ModelDraft(quantized_copy(target, value), layers)


class CustomDraft(Drafter):
    """Any object with `propose(state)` and `advance(n_accepted)`, as a Drafter."""

    def __init__(self, drafter):
        super().__init__()
        self.propose = drafter.propose
        self.advance = drafter.advance


# ----------------------------------------------------------------------------------- draft length

DECAY = 1 - 1 / 64  # of the running acceptance, per drafted position
MIN_GAIN = 1.03  # expected of a round: costs are measured to a few percent, and plain steps have 1
PROBE_ROUNDS = 4
PROBE_AFTER = 64  # plain steps before drafting is tried again; doubles while it does not pay


class DraftLength:
    """K of the next round, from earlier rounds. K must not depend on this round's tokens."""

    def __init__(self, k: int | str, costs: Costs | None = None):
        if k == "auto" and costs is None:
            raise ValueError(
                "speculate_k = 'auto' needs calibrated costs: call engine.calibrate first",
            )
        self.k = k
        self.costs = costs
        # overlap / weight is the mean acceptance. It starts at 0.8, with the weight of four
        # positions.
        self.overlap = 0.8 * 4
        self.weight = 4.0
        self.draft_share = 1.0  # the share of rows with a draft
        self.patience = PROBE_AFTER
        # Plain steps; below 0 while drafting is tried, as it is at first.
        self.num_steps_to_probe = 0

    @property
    def fixed(self) -> int | None:  # K, unless it is "auto"
        return None if self.k == "auto" else self.k

    @property
    def alpha(self) -> float:  # the mean acceptance
        return self.overlap / self.weight

    def observe(self, overlap: float) -> None:
        """`overlap`: sum of min(p, q) at one drafted position that was reached."""
        if math.isfinite(overlap):  # a draft's NaN would stay in the mean for good
            self.overlap = self.overlap * DECAY + overlap
            self.weight = self.weight * DECAY + 1

    def drafted(self, num_drafted: int, num_rows: int) -> None:
        """A round had a draft for some of its rows."""
        share = num_drafted / num_rows
        self.draft_share += (share - self.draft_share) / 16

    def choose(self, expected: Sequence[list[float] | None] = (None,)) -> int:
        """`expected`: of each row, as Drafter.expect has it."""
        if self.fixed is not None:
            return self.fixed
        if None not in expected:
            return self.best_for(expected)[0]
        k, gain = self.best()
        if gain >= MIN_GAIN * self.costs.speedup(0, 0.0):
            self.patience = PROBE_AFTER
            self.num_steps_to_probe = PROBE_AFTER
            return k
        self.num_steps_to_probe -= 1
        if self.num_steps_to_probe >= 0:
            return 0
        if self.num_steps_to_probe == -PROBE_ROUNDS:
            self.patience *= 2
            self.num_steps_to_probe = self.patience
        return min(self.costs.verify_s)

    def best(self, optimism: float = 0.0) -> tuple[int, float]:
        """K with the largest expected speed-up by the acceptance so far, and that speed-up.
        `optimism`: a number of accepted tokens to add to those that were observed."""
        alpha = (self.overlap + optimism) / (self.weight + optimism)
        return self.costs.best(alpha, self.draft_share)

    def best_for(
        self, expected: Sequence[list[float]], runs_model: bool = True
    ) -> tuple[int, float]:
        """K with the largest gain by what is expected of each row, and that gain. A round has to
        gain more than a plain step."""
        gains = []
        for k in (0, *self.costs.verify_s):
            num_drafted = sum(sum(row[:k]) for row in expected)
            cost = self.costs.round(k, runs_model) * (MIN_GAIN if k else 1.0)
            gain = (1 + num_drafted / len(expected)) / cost
            gains.append((gain, k))
        gain, k = max(gains)
        return k, gain
