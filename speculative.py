"""Draft K tokens cheaply, verify them in one pass of the target, keep those that preserve its distribution.

    acceptance, residual, accept    rejection sampling: two formulas, and the decision of every round
    run_round, verify_step          one round: SPECULATE, VERIFY, ACCEPT
    Drafter                         the interface of a drafter: propose, advance, update
    ModelDraft                      a second model with its own cache, or part of the target on the target's cache
    DraftLength                     how many tokens the next round drafts

This file knows logits, distributions and token ids. It does not know text, checkpoints, ranks or compilation: the
engine decides by `maybe_compile` how a drafter's functions run. The papers' formulas stand in decoding/costs.py.

Sources: Leviathan et al., arXiv:2211.17192 (below: L); Chen et al., arXiv:2302.01318. K is L's gamma.
"""

import copy
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

import decoding.sampling as sampling
from decoding.costs import Costs, expected_tokens, operations, speedup  # noqa: F401
from decoding.sampling import ACCEPT, DRAFT_DRAW, draw, uniform
from decoding.timing import mark
from model import Caches, Config, Transformer
from weights.formats import format_of
from weights.walker import quantized_copy

# ---------------------------------------------------------------------------------------------- accept


def acceptance(p: Tensor, q: Tensor) -> Tensor:
    """The probability min(1, p / q) of keeping a drafted token (L, section 2.3); 0 where q is 0, because such a token
    was not drawn from q. p target, q draft, any shape."""
    return torch.where(q > 0, (p / q).clamp(max=1), 0)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm(max(0, p - q)) (..., V), the distribution that replaces a rejected token (L, algorithm 1). It is p
    where rounding makes the sum 0: p = q is never rejected."""
    rest = (p - q).clamp(min=0)
    total = rest.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, rest / total, p)


def accept(
    draft_tokens: Tensor, draft_probs: Tensor, target_probs: Tensor, generator: torch.Generator | None = None, *,
    noise: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Algorithm 1 of L for every row: the number of drafted tokens to keep, and the token that follows them.

    draft_tokens (B, K) int, drawn from draft_probs (B, K, V) float32; target_probs (B, K + 1, V) float32
    -> n_accepted (B,), next_token (B,), int64. `noise` replaces the generator: uniform numbers in [0, 1) for the K
    decisions (B, K), and for the next token after each number of acceptances (B, K + 1). Nothing here waits for the
    device. next_token is sampling.INVALID where the target's probabilities are NaN; NaN in the draft's is a rejection.
    """
    B, K = draft_tokens.shape
    p, q = target_probs.float(), draft_probs.float()
    if noise is None:
        noise = torch.rand(B, 2 * K + 1, generator=generator, device=p.device).split((K, K + 1), dim=1)
    drafted = draft_tokens[..., None]  # (B, K, 1)
    a = acceptance(p[:, :K].gather(2, drafted), q.gather(2, drafted))[..., 0]  # (B, K)
    n = (noise[0] < a).long().cumprod(dim=1).sum(dim=1)  # (B,) leading acceptances; u < 0 never holds
    at = n[:, None, None].expand(-1, 1, p.size(2))  # (B, 1, V)
    p_next = p.gather(1, at)[:, 0]  # (B, V)
    q_next = torch.cat((q, torch.zeros_like(p[:, :1])), dim=1).gather(1, at)[:, 0]  # q is 0 after K acceptances
    return n, draw(residual(p_next, q_next), noise[1].gather(1, n[:, None])[:, 0])


# --------------------------------------------------------------------------------------------- a round


def run_round(
    drafter: "Drafter", model: Transformer, caches: Caches, state: nn.Module, lag: int, maybe_compile: Callable,
    other: Tensor | None = None,
) -> object:  # fmt: skip
    """Decide 1 to K + 1 tokens of every row, K = state.k; returns the time between drafting and verifying.

    `lag`: tokens that a row may have received since the last round. `other` (B, K) replaces the drafted tokens. Rows
    outside drafter.rows_to_draft are decided as in plain decoding.
    """
    # SPECULATE: the drafter proposes K tokens of every row, and the distributions that it drew from.
    if lag:
        drafter.catch_up(state, lag)
    draft_tokens, draft_probs = drafter.propose(state)  # (B, K), (B, K, V)
    assert (n := draft_tokens.size(1)) == state.k, f"the drafter proposed {n} tokens instead of {state.k}"
    if not state.all_draft or drafter.max_positions < state.parking:
        draft_probs = torch.where(drafter.rows_to_draft(state)[:, None, None], draft_probs, 0)
    drafted_at, draft_tokens = mark(draft_tokens.device), draft_tokens if other is None else other
    state.write_masks(draft_tokens)
    maybe_compile(verify_step, state, state.k)(model, caches, state, draft_tokens, draft_probs)
    drafter.advance(state.accepted.clamp(min=0))
    return drafted_at


def verify_step(
    model: Transformer, caches: Caches, state: nn.Module, draft_tokens: Tensor, draft_probs: Tensor
) -> None:
    """One pass over the last token and K drafted ones (B, K), drawn from draft_probs (B, K, V), decides 1 to K + 1
    tokens of every row. A row of zeros in draft_probs has no draft.

    The pass overwrites keys and values of all K + 1 positions in every layer, including those of a drafter.
    """
    K, draft_tokens = draft_tokens.size(1), state.broadcast(draft_tokens)

    # VERIFY: the target's distribution at K + 1 positions.
    pos = state.pos[:, None] + torch.arange(K + 1, device=state.pos.device)  # (B, K + 1)
    state.tokens.scatter_(1, pos[:, 1:], draft_tokens)  # scratch space, where penalties see them
    tokens = state.tokens.gather(1, pos)  # (B, K + 1)
    logits = model(tokens, pos, caches)  # (B, K + 1, V)
    processed = state.process_logits(logits, pos)  # (B, K + 1, V)
    p = sampling.distribution(processed, state.kind, state.values)

    # ACCEPT: n drafted tokens, and the one that follows them.
    seed = state.seed[:, None].expand(-1, K + 1)  # (B, K + 1)
    u = uniform(seed[:, 1:], pos[:, 1:], ACCEPT)
    # The token after the accepted ones takes the number that plain decoding would use at its position.
    n, token = accept(draft_tokens, draft_probs, p, noise=(u, uniform(seed, pos + 1)))  # (B,), (B,)
    overlap = torch.minimum(p[:, :K], draft_probs).sum(dim=-1)  # (B, K)
    is_drafted = draft_probs.amax(dim=-1) != 0  # (B, K)
    overlap = torch.where(is_drafted, overlap, -1)
    n = torch.where(state.done | ~is_drafted[:, 0], -1, n)  # -1: nothing was drafted for the row
    # All ranks take rank 0's decision: (B, K + 2) float32, which holds ids below 2^24.
    decision = state.broadcast(torch.cat((n[:, None], token[:, None], overlap), dim=1))
    n, token, state.overlap[:, :K] = decision[:, 0].long(), decision[:, 1:2].long(), decision[:, 2:]
    n = state.accepted.copy_(n).clamp(min=0)
    decided = torch.cat((draft_tokens, token), dim=1).scatter(1, n[:, None], token)  # (B, K + 1)
    state.record_logprobs(logits, processed, decided, draft_probs)
    state.commit(decided, n)


# -------------------------------------------------------------------------------------------- drafters


class Drafter(nn.Module):
    """The interface of a drafter; this class drafts nothing. `state` is decoding/slots.py's: tokens (B, S), pos (B,)
    the index of the last decided token, done, seed, values and kind of the sampling, k the number of tokens to draft,
    and broadcast(x), rank 0's x. Positions beyond `pos` are the round's scratch space.

    A subclass overrides `propose`, and other methods as needed. Every drawn token is verified. A drafter may stop
    early, but not because of the token it drew: that would change the output's distribution."""

    auto_k = (1, 2, 3, 5, 8)  # the choices of `auto`, besides 0
    owns_cache = False  # must prompts go through the drafter's model too?
    runner = owner = None  # the ModelRunner of its model; the Engine that was made with it last
    num_input_tokens = 2  # the first pass of a round; its cache lags by at most one token less
    num_scratch = 0  # positions from the last decided token on that its cache needs beyond the target's
    max_draft_tokens = math.inf  # of a round
    max_positions = math.inf  # of a text that it drafts for; a longer one is decoded plainly

    def __init__(self, model: Transformer | None = None):
        super().__init__()
        self.model = model  # `propose` runs it; None: no model

    def setup(self, state: nn.Module, k_max: int, target, maybe_compile: Callable) -> None:
        """Make fixed tensors for this batch and up to k_max drafted tokens. `target` is the target's ModelRunner;
        maybe_compile(function, state, *static) returns the function, compiled or not."""
        self.maybe_compile = maybe_compile
        B, V, device = state.pos.size(0), target.model.config.vocab_size, state.pos.device
        self.register_buffer("tokens", torch.zeros(B, k_max, dtype=torch.int64, device=device), persistent=False)
        self.register_buffer("probs", torch.zeros(B, k_max, V, device=device), persistent=False)

    def propose(self, state: nn.Module) -> tuple[Tensor, Tensor]:
        """Tokens (B, K) for the positions after `pos`, and the distributions (B, K, V) that they were drawn from. A row
        of zeros has no draft; this class returns zeros for every row. Verification still runs the tokens: here the
        row's last one, whose states are known to be finite."""
        last = state.tokens.gather(1, state.pos[:, None])  # (B, 1)
        return last.expand(-1, state.k), self.probs[:, : state.k]

    def draft_lengths(self, k: int | str) -> tuple[int, ...]:
        """The numbers of tokens that a round may draft: `k`, or the choices of "auto"."""
        choices = self.auto_k if k == "auto" else (k,) if k else ()
        return tuple(choice for choice in choices if choice <= self.max_draft_tokens)

    def expect(self, requests: Sequence, unread: int) -> list[list[float] | None]:
        """Called before each step, on the host: for each scheduler.Request the probability that each token of its draft
        and all before it are accepted; [] without a draft, None where only the rounds will show it. The host has yet to
        read up to `unread` tokens of a row."""
        return [None if request.can_draft and request.draft and self.fits(request) else [] for request in requests]

    def fits(self, request) -> bool:
        """Can the next token of a scheduler.Request be drafted within `max_positions`, by what the host has read?"""
        return request.num_positions < self.max_positions

    def rows_to_draft(self, state: nn.Module) -> Tensor:
        """(B,) whether the row's tokens may be drafted, and whether all k of them lie within `max_positions`."""
        return state.drafts & (state.pos + state.k < self.max_positions)

    def advance(self, n_accepted: Tensor) -> None:
        """The state holds the decision: n_accepted (B,) of the proposal, and one token more."""

    def observe(self, overlap: float) -> None:
        """Called on the host for each drafted row of a round, with the sum of min(p, q) at its first drafted token."""

    def passes(self, k: int) -> int:
        """The number of passes of the drafter's model that draft k tokens."""
        return k

    def update(self, state: nn.Module) -> None:
        """Called after every step, drafted or plain. Writes to state.can_draft (B,) whether a row has a draft."""

    def catch_up(self, state: nn.Module, lag: int) -> None:
        """Called before a round when up to `lag` tokens of a row were decided without this drafter."""


class ModelDraft(Drafter):
    """A model drafts token by token, from the sampling's own distribution.

    Its own cache lags by at most one token, so a round's first pass takes the last two tokens. On the target's cache
    one is enough: verification rewrites all K + 1 positions of every layer before any read."""

    CHUNK = 32  # tokens that `catch_up` runs at once

    def __init__(self, model: Transformer, on_layers: Sequence[int] | None = None):
        """`on_layers`: the target's layers whose caches the draft's layers use; None for separate caches."""
        super().__init__(model)
        self.on_layers, self.owns_cache = on_layers, on_layers is None
        self.num_input_tokens = 2 if self.owns_cache else 1
        self.max_positions = model.config.max_seq_length if self.owns_cache else math.inf

    def setup(self, state: nn.Module, k_max: int, target, maybe_compile: Callable) -> None:
        super().setup(state, k_max, target, maybe_compile)
        self.runner = target.for_draft(self.model, self.on_layers, self.num_scratch)
        # Ids that only the target has get probability 0; verification still draws them.
        self.vocab = min(target.model.config.vocab_size, self.model.config.vocab_size)
        for name in ("drawn", "num_behind"):
            self.register_buffer(name, torch.zeros((), dtype=torch.int64, device=state.pos.device), persistent=False)

    def propose(self, state: nn.Module) -> tuple[Tensor, Tensor]:
        caches = self.runner.slice_to(state.length)
        self.drawn.zero_()
        for step in range(state.k):
            num_input_tokens = self.num_input_tokens if step == 0 else 1
            self.maybe_compile(self.draw_next, state, num_input_tokens)(caches, state, num_input_tokens)
        return self.tokens[:, : state.k], self.probs[:, : state.k]

    def draw_next(self, caches: Caches, state: nn.Module, num_input_tokens: int) -> None:
        """Run the last `num_input_tokens` tokens and draw the one after them."""
        last = state.pos + self.drawn  # (B,)
        self.draw(state, self.hidden(caches, state, last, num_input_tokens)[:, -1:], last[:, None] + 1)

    def draw(self, state: nn.Module, h: Tensor, pos: Tensor) -> None:
        """Draw the tokens at pos (B, T) from hidden states h (B, T, D), and append them to the proposal."""
        logits = self.model.head(h)[..., : self.vocab]  # (B, T, V) of the shorter vocabulary
        # All T draws see the tokens before the first of them: PARD draws them at once.
        logits = state.process_draft_logits(logits, (pos[:, :1] - 1).expand_as(pos))
        q = sampling.distribution(logits, state.kind, state.values)
        noise = uniform(state.seed[:, None].expand_as(pos), pos, DRAFT_DRAW)  # (B, T)
        token = state.broadcast(draw(q, noise, state.kind).clamp(min=0))
        state.tokens.scatter_(1, pos, token)
        at = self.drawn + torch.arange(pos.size(1), device=pos.device)  # (T,)
        self.tokens.index_copy_(1, at, token)
        self.probs[..., : self.vocab].index_copy_(1, at, q)
        self.drawn.add_(pos.size(1))

    def hidden(self, caches: Caches, state: nn.Module, last: Tensor, T: int) -> Tensor:
        """Hidden states (B, T, D) of the T positions up to `last` (B,)."""
        tokens, pos = self.inputs(state, last, T)
        return self.model.hidden(tokens, pos, caches)

    def inputs(self, state: nn.Module, last: Tensor, T: int) -> tuple[Tensor, Tensor]:
        """(tokens, pos), both (B, T), of the T positions up to `last` (B,). Positions before 0 become 0. Those of a
        parked row go behind all that it may still hold for another request."""
        pos = (last[:, None] + torch.arange(1 - T, 1, device=last.device)).clamp(min=0)  # (B, T)
        tokens = state.tokens.gather(1, pos).clamp(max=self.model.config.vocab_size - 1)
        return tokens, torch.where(state.pos[:, None] < state.parking, pos, self.runner.S)

    def catch_up(self, state: nn.Module, lag: int) -> None:
        if self.owns_cache:
            for chunk in reversed(range(math.ceil(lag / self.CHUNK))):  # the oldest first
                self.num_behind.fill_(self.num_input_tokens + chunk * self.CHUNK)  # `draw_next` writes the later ones
                self.maybe_compile(self.fill, state)(self.runner.slice_to(state.length), state)

    def fill(self, caches: Caches, state: nn.Module) -> None:
        """Write keys and values of CHUNK positions, the last one `num_behind` before `pos`."""
        self.hidden(caches, state, (state.pos - self.num_behind).clamp(min=0), self.CHUNK)


def layer_subset(model: Transformer, layer_ids: Sequence[int]) -> Transformer:
    """A Transformer of some of `model`'s layers, which shares its modules. ValueError for layers that are not there."""
    n_layers = model.config.n_layers
    in_range = len(layer_ids) > 0 and 0 <= min(layer_ids) <= max(layer_ids) < n_layers
    if not in_range or sorted(set(layer_ids)) != list(layer_ids):
        raise ValueError(f"layers {list(layer_ids)} must be some of 0 to {n_layers - 1}, in order")
    shared = [module for module in model.children() if module is not model.layers]
    other = copy.deepcopy(model, {id(module): module for module in [*shared, *model.layers]})
    other.layers = nn.ModuleList(model.layers[i] for i in layer_ids)
    other.config = replace(model.config, n_layers=len(layer_ids))
    other.windows = tuple(model.windows[i] for i in layer_ids)
    other.rope_types = tuple(model.rope_types[i] for i in layer_ids)
    return other


def parse_layers(text: str) -> list[int]:
    """ "0-7,24-31" -> the layers in these ranges, both ends included. ValueError for anything else."""
    layers = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"{part!r} is no layer or range of layers; give ranges like 0-7,24-31")
        layers += range(int(match[1]), int(match[2] or match[1]) + 1)
    return layers


def layers_from_spec(value: str, config: Config) -> Callable[[Transformer], ModelDraft]:
    """`--draft layers:0-7,24-31`: the target with some of its layers, on the target's caches. ValueError for missing
    layers."""
    layers = parse_layers(value)
    if max(layers) >= config.n_layers:
        raise ValueError(f"layers {layers} must be some of 0 to {config.n_layers - 1}")
    return lambda model: ModelDraft(layer_subset(model, layers), on_layers=layers)


def quantized_from_spec(value: str, config: Config) -> Callable[[Transformer], ModelDraft]:
    """`--draft quantized:SCHEME`: the target's quantized self, on the target's caches."""
    format_of(value)
    return lambda model: ModelDraft(quantized_copy(model, value), on_layers=range(config.n_layers))


class CustomDraft(Drafter):
    """Any object with `propose(state)` and `advance(n_accepted)`, as a Drafter."""

    def __init__(self, drafter):
        super().__init__()
        self.drafter = drafter

    def setup(self, state: nn.Module, k_max: int, target, maybe_compile: Callable) -> None:
        pass

    def propose(self, state: nn.Module) -> tuple[Tensor, Tensor]:
        return self.drafter.propose(state)

    def advance(self, n_accepted: Tensor) -> None:
        self.drafter.advance(n_accepted)


# ---------------------------------------------------------------------------------------- draft length

AUTO_K = Drafter.auto_k
DECAY = 1 - 1 / 64  # of the running acceptance, per drafted position
MIN_GAIN = 1.03  # expected of a round: costs are measured to a few percent, and plain steps have 1
PROBE_ROUNDS = 4
PROBE_AFTER = 64  # plain steps before drafting is tried again; doubles while it does not pay


class DraftLength:
    """K of the next round, from earlier rounds. K must not depend on this round's tokens."""

    def __init__(self, k: int | str, costs: Costs | None = None):
        if k == "auto" and costs is None:
            raise ValueError("speculate_k = 'auto' needs calibrated costs: call engine.calibrate first")
        self.fixed, self.costs = None if k == "auto" else k, costs
        # overlap / weight is the mean acceptance, first 0.8 with weight 4. matched: the share of rows with a draft.
        self.overlap, self.weight, self.matched = 0.8 * 4, 4.0, 1.0
        self.plain, self.patience, self.probing = 0, PROBE_AFTER, 0

    def observe(self, overlap: float) -> None:
        """`overlap`: sum of min(p, q) at one drafted position that was reached."""
        if math.isfinite(overlap):  # a draft's NaN would stay in the mean for good
            self.overlap, self.weight = self.overlap * DECAY + overlap, self.weight * DECAY + 1

    def drafted(self, matched: int, rows: int) -> None:
        """A round had a draft for `matched` of its rows."""
        self.matched += (matched / rows - self.matched) / 16

    def choose(self, expected: Sequence[list[float] | None] = (None,)) -> int:
        """`expected`: of each row, as Drafter.expect has it."""
        if self.fixed is not None:
            return self.fixed
        if None not in expected:
            tokens = {k: len(expected) + sum(sum(row[:k]) for row in expected) for k in (0, *self.costs.verify_s)}
            return max(tokens, key=lambda k: tokens[k] / self.costs.round(k) / (MIN_GAIN if k else 1))
        k, gain = self.costs.best(self.overlap / self.weight, self.matched)
        if gain >= MIN_GAIN * self.costs.speedup(0, 0.0):
            self.plain, self.patience = 0, PROBE_AFTER
            return k
        if self.probing:
            self.probing -= 1
            return min(self.costs.verify_s)
        self.plain += 1
        if self.plain == self.patience:
            self.plain, self.patience, self.probing = 0, 2 * self.patience, PROBE_ROUNDS
        return 0
