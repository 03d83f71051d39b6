"""Draft K tokens cheaply, verify them in one pass of the target, keep those that leave its law as it is.

    acceptance, residual, accept    rejection sampling: the two formulas, and the decision that every round takes
    run_round, verify_step          one round: SPECULATE, VERIFY, ACCEPT
    Drafter                         what a drafter offers: propose and advance
    ModelDraft                      a second model with its own cache, or part of the target on the target's cache
    NgramDraft                      what followed the last N tokens when they stood there before
    expected_tokens, speedup, operations    the papers' formulas
    Costs, DraftLength              what steps cost, and how many tokens the next round drafts

This file knows logits, distributions and token ids. It does not know text, checkpoints, ranks or compilation: through
`maybe_compile` the engine decides how a drafter's functions run.

Sources: Leviathan et al., arXiv:2211.17192 (below: L); Chen et al., arXiv:2302.01318. K is their gamma.
"""

import copy
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

import sampling
from model import Caches, Transformer
from sampling import ACCEPT, DRAFT_DRAW, draw, uniform
from timing import mark

# ---------------------------------------------------------------------------------------------- accept


def acceptance(p: Tensor, q: Tensor) -> Tensor:
    """The probability min(1, p / q) with which a drafted token is kept (L, section 2.3); 0 where q is 0, because what
    the drafter cannot draw was not drawn from q. p target, q draft, any shape."""
    return torch.where(q > 0, (p / q).clamp(max=1), 0)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm(max(0, p - q)) (..., V): what a rejected token is replaced from (L, algorithm 1). It falls back to p where
    nothing is left, which happens by rounding alone: p = q is never rejected."""
    rest = (p - q).clamp(min=0)
    total = rest.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, rest / total, p)


def accept(
    draft_tokens: Tensor, draft_probs: Tensor, target_probs: Tensor, generator: torch.Generator | None = None, *,
    noise: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Algorithm 1 of L for every row: how many drafted tokens to keep, and the token that follows them.

    draft_tokens (B, K) int, drawn from draft_probs (B, K, V) float32; target_probs (B, K + 1, V) float32
    -> n_accepted (B,), next_token (B,), int64. `noise` = uniform numbers in [0, 1) for the K decisions (B, K), and for
    the next token after each possible number of acceptances (B, K + 1), in place of the generator's. Nothing here waits
    for the device. next_token is sampling.INVALID where the target's probabilities are NaN; NaN in the draft's is a
    rejection.
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
    q_next = torch.cat((q, torch.zeros_like(p[:, :1])), dim=1).gather(1, at)[:, 0]  # after K acceptances nothing is q's
    return n, draw(residual(p_next, q_next), noise[1].gather(1, n[:, None])[:, 0])


# --------------------------------------------------------------------------------------------- a round


def run_round(
    drafter: "Drafter", model: Transformer, caches: Caches, state: nn.Module, lag: int, maybe_compile: Callable,
    other: Tensor | None = None, all_draft: bool = True,
) -> object:  # fmt: skip
    """Decide 1 to K + 1 tokens of every row, K = state.k; the time between drafting and verifying. `lag`: tokens a row
    may have got since the last round; `other` (B, K) is verified in place of the drafted tokens. Unless `all_draft`,
    rows that state.drafts excludes are decided as if nobody had drafted."""
    # SPECULATE: the drafter proposes K tokens of every row, and the distributions that it drew them from.
    if lag:
        drafter.catch_up(state, lag)
    draft_tokens, draft_probs = drafter.propose(state)  # (B, K), (B, K, V)
    assert (n := draft_tokens.size(1)) == state.k, f"the drafter proposed {n} tokens where {state.k} were asked for"
    draft_probs = draft_probs if all_draft else draft_probs * state.drafts[:, None, None]
    drafted, verified = mark(draft_tokens.device), draft_tokens if other is None else other
    maybe_compile(verify_step, state, state.k)(model, caches, state, verified, draft_probs)
    drafter.advance(state.accepted.clamp(min=0))
    return drafted


def verify_step(
    model: Transformer, caches: Caches, state: nn.Module, draft_tokens: Tensor, draft_probs: Tensor
) -> None:
    """One pass over the last token and K drafted ones (B, K), drawn from draft_probs (B, K, V), decides 1 to K + 1
    tokens of every row. A row of zeros in draft_probs says that nothing was drafted for that row.

    The pass writes keys and values of all K + 1 positions in every layer, so whatever a drafter left there is gone.
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
    n = torch.where(state.done | (draft_probs[:, 0].amax(dim=-1) == 0), -1, n)  # -1: nothing was drafted for the row
    # Rank 0's word for all: (B, K + 2) float32, which holds ids below 2^24.
    decision = state.broadcast(torch.cat((n[:, None], token[:, None], overlap), dim=1))
    n, token, state.overlap[:, :K] = decision[:, 0].long(), decision[:, 1:2].long(), decision[:, 2:]
    n = state.accepted.copy_(n).clamp(min=0)
    decided = torch.cat((draft_tokens, token), dim=1).scatter(1, n[:, None], token)  # (B, K + 1)
    state.record_logprobs(logits, processed, decided, draft_probs)
    state.commit(decided, n)


# -------------------------------------------------------------------------------------------- drafters


class Drafter(nn.Module):
    """What the loop asks of a drafter. `state` is generate.py's: tokens (B, S), pos (B,) the index of the last decided
    token, done, seed, values and kind of the sampling; k, how many tokens to draft; broadcast(x), the x that all ranks
    go on with. Positions beyond `pos` are the round's scratch space.

    Subclass it with `propose`, and whatever else the drafter needs. Every drawn token is verified. You may stop
    drafting early, but never after looking at the drawn token: that would change the law.
    """

    owns_cache = False  # whether prompts must go through the drafter's model too
    runner = owner = None  # runner.ModelRunner: its model with caches; the generate.Engine that was made with it last
    fed = 2  # tokens that a round feeds it first: its own cache may be behind by one less

    def __init__(self, model: Transformer | None = None):
        super().__init__()
        self.model = model  # what `propose` runs

    def setup(self, state: nn.Module, k_max: int, target, maybe_compile: Callable) -> None:
        """Make fixed tensors for this batch and up to k_max drafted tokens. `target` is a runner.ModelRunner;
        maybe_compile(function, state, *static) is the function as the engine runs it."""
        self.maybe_compile = maybe_compile
        B, V, device = state.pos.size(0), target.model.config.vocab_size, state.pos.device
        self.register_buffer("tokens", torch.zeros(B, k_max, dtype=torch.int64, device=device), persistent=False)
        self.register_buffer("probs", torch.zeros(B, k_max, V, device=device), persistent=False)

    def propose(self, state: nn.Module) -> tuple[Tensor, Tensor]:
        """tokens (B, K) for the positions after `pos`, and the distributions (B, K, V) that they were drawn from. A row
        of zeros says that nothing was drawn for that row: so does this class, of any."""
        return self.tokens[:, : state.k], self.probs[:, : state.k]

    def advance(self, n_accepted: Tensor) -> None:
        """The target has decided: n_accepted (B,) of the proposal and one token more stand in the state."""

    def passes(self, k: int) -> int:
        """How often its model runs to draft k tokens."""
        return k

    def look(self, state: nn.Module) -> None:
        """A step has ended, a round or a plain one: say in state.can_draft (B,) which rows have something to draft."""

    def catch_up(self, state: nn.Module, lag: int) -> None:
        """`lag` tokens or fewer of every row were decided without this drafter."""


class ModelDraft(Drafter):
    """A model drafts token by token, from the sampling's own distribution.

    With its own cache it is always fed the last two tokens first: after K acceptances it has not seen the last one.
    On the target's cache it is fed one: verification rewrites all K + 1 positions of every layer before any read.
    """

    CHUNK = 32  # tokens that `catch_up` runs at once

    def __init__(self, model: Transformer, on_layers: Sequence[int] | None = None):
        """`on_layers`: the target's layers whose caches this model's layers use; None for caches of its own."""
        super().__init__(model)
        self.on_layers, self.owns_cache, self.fed = on_layers, on_layers is None, 2 if on_layers is None else 1

    def setup(self, state: nn.Module, k_max: int, target, maybe_compile: Callable) -> None:
        super().setup(state, k_max, target, maybe_compile)
        self.runner = target.for_draft(self.model, self.on_layers)
        # Ids that only the target has keep probability 0, so that the target's law stays whole.
        self.vocab = min(target.model.config.vocab_size, self.model.config.vocab_size)
        for name in ("drawn", "missing"):
            self.register_buffer(name, torch.zeros((), dtype=torch.int64, device=state.pos.device), persistent=False)

    def propose(self, state: nn.Module) -> tuple[Tensor, Tensor]:
        caches = self.runner.slice_to(state.length)
        self.drawn.zero_()
        for step in range(state.k):
            fed = self.fed if step == 0 else 1
            self.maybe_compile(self.draw_next, state, fed)(caches, state, fed)
        return self.tokens[:, : state.k], self.probs[:, : state.k]

    def draw_next(self, caches: Caches, state: nn.Module, fed: int) -> None:
        """Run the last `fed` tokens and draw the one after them."""
        last = state.pos + self.drawn  # (B,)
        self.draw(state, self.hidden(caches, state, last, fed)[:, -1:], last[:, None] + 1)

    def draw(self, state: nn.Module, h: Tensor, pos: Tensor) -> None:
        """Draw the tokens at pos (B, T), each from its own h (B, T, D), and note them behind those drawn before."""
        logits = self.model.head(h)[..., : self.vocab]  # (B, T, V) of the shorter vocabulary
        # All T draws see the tokens before the first of them: PARD draws them at once.
        logits = state.penalize(logits, (pos[:, :1] - 1).expand_as(pos))
        q = sampling.distribution(logits, state.kind, state.values)
        noise = uniform(state.seed[:, None].expand_as(pos), pos, DRAFT_DRAW)  # (B, T)
        token = state.broadcast(draw(q, noise, state.kind).clamp(min=0))
        state.tokens.scatter_(1, pos, token)
        at = self.drawn + torch.arange(pos.size(1), device=pos.device)  # (T,)
        self.tokens.index_copy_(1, at, token)
        self.probs[..., : self.vocab].index_copy_(1, at, q)
        self.drawn.add_(pos.size(1))

    def hidden(self, caches: Caches, state: nn.Module, last: Tensor, T: int) -> Tensor:
        """Hidden states (B, T, D) of the T positions up to `last` (B,); what would stand before 0 is position 0."""
        pos = (last[:, None] + torch.arange(1 - T, 1, device=last.device)).clamp(min=0)  # (B, T)
        tokens = state.tokens.gather(1, pos).clamp(max=self.model.config.vocab_size - 1)
        return self.model.hidden(tokens, pos, caches)

    def catch_up(self, state: nn.Module, lag: int) -> None:
        if self.owns_cache:
            for chunk in reversed(range(math.ceil(lag / self.CHUNK))):  # the oldest first
                self.missing.fill_(self.fed + chunk * self.CHUNK)  # `draw_next` writes the last
                self.maybe_compile(self.fill, state)(self.runner.slice_to(state.length), state)

    def fill(self, caches: Caches, state: nn.Module) -> None:
        """Write the keys and values of CHUNK positions, the last of which is `missing` before `pos`."""
        self.hidden(caches, state, (state.pos - self.missing).clamp(min=0), self.CHUNK)


def layer_subset(model: Transformer, kept: Sequence[int]) -> Transformer:
    """A Transformer of some of `model`'s layers, which shares its modules. ValueError for layers that are not there."""
    n_layers = model.config.n_layers
    if not kept or not 0 <= min(kept) <= max(kept) < n_layers or sorted(set(kept)) != list(kept):
        raise ValueError(f"layers {list(kept)} must be some of 0 to {n_layers - 1}, in order")
    shared = [module for module in model.children() if module is not model.layers]
    other = copy.deepcopy(model, {id(module): module for module in [*shared, *model.layers]})
    other.layers = nn.ModuleList(model.layers[i] for i in kept)
    other.config = replace(model.config, n_layers=len(kept))
    other.windows, other.turns = (tuple(each[i] for i in kept) for each in (model.windows, model.turns))
    return other


def parse_layers(text: str) -> list[int]:
    """ "0-7,24-31" -> the layers in these ranges, both ends included. ValueError for anything else."""
    layers = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if not found or int(found[2] or found[1]) < int(found[1]):
            raise ValueError(f"{part!r} is no layer or range of layers; give ranges like 0-7,24-31")
        layers += range(int(found[1]), int(found[2] or found[1]) + 1)
    return layers


class NgramDraft(Drafter):
    """Prompt lookup (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding): where the last N tokens stood before
    in prompt or output, most recently, what followed them then is proposed. What reaches the end repeats itself."""

    def __init__(self, n: int = 3):
        super().__init__()
        if n < 1:
            raise ValueError(f"ngram:{n} must match at least 1 token")
        self.n = n

    def look(self, state: nn.Module) -> None:
        self.maybe_compile(self.find, state)(state)

    def find(self, state: nn.Module) -> None:
        """Find the match, and make the proposal that a next round would take."""
        pos, tokens, N = state.pos[:, None], state.tokens, min(self.n, state.tokens.size(1))  # (B, 1), (B, S)
        last = (pos + torch.arange(1 - N, 1, device=pos.device)).clamp(min=0)  # (B, N)
        grams = tokens.unfold(1, N, 1)  # (B, S - N + 1, N)
        end = torch.arange(N - 1, tokens.size(1), device=pos.device)  # (S - N + 1,) where each n-gram ends
        match = (grams == tokens.gather(1, last)[:, None]).all(dim=-1) & (end < pos) & ~state.done[:, None]
        found = torch.where(match, end, -1).amax(dim=1, keepdim=True)  # (B, 1)
        matched = found >= 0
        state.can_draft.copy_(matched[:, 0])
        period = torch.where(matched, pos - found, 1)
        ahead = torch.arange(self.tokens.size(1), device=pos.device)
        self.tokens.copy_(tokens.gather(1, pos - period + 1 + ahead % period))  # (B, K)
        # Zeros where nothing matched: such a row is decided as if nobody had drafted.
        drawn = matched.float()[..., None].expand(-1, self.tokens.size(1), 1)  # (B, K, 1)
        self.probs.zero_().scatter_(2, self.tokens[..., None], drawn)


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


# --------------------------------------------------------------------------------------------- theory


def expected_tokens(alpha: float, k: int) -> float:
    """Tokens that one round yields on average when each drafted token is accepted with probability alpha,
    independently: (1 - alpha^(K+1)) / (1 - alpha), L eq. (1)."""
    return float(sum(alpha**i for i in range(k + 1)))


def speedup(alpha: float, k: int, c: float, v: float = 1.0) -> float:
    """Factor by which wall time per token shrinks: expected_tokens / (K c + v). c: cost of drafting one token, v: of
    verifying K + 1 positions, both in plain decode steps. With v = 1 it is L theorem 3.8."""
    return expected_tokens(alpha, k) / (k * c + v)


def operations(alpha: float, k: int, c_ops: float) -> float:
    """Factor by which arithmetic per token grows: (K c_ops + K + 1) / expected_tokens, L theorem 3.11. c_ops: the
    drafter's operations for one token over the target's."""
    return (k * c_ops + k + 1) / expected_tokens(alpha, k)


@dataclass
class Costs:
    """Seconds, calibrated outside the rounds: of a plain decode step, and by K of drafting and of verifying."""

    decode_s: float
    draft_s: dict[int, float] = field(default_factory=dict)
    verify_s: dict[int, float] = field(default_factory=dict)

    def c(self, k: int) -> float:
        """Cost of drafting one token, in plain steps."""
        return self.draft_s[k] / k / self.decode_s

    def v(self, k: int) -> float:
        """Cost of verifying K + 1 positions, in plain steps."""
        return self.verify_s[k] / self.decode_s

    def round(self, k: int) -> float:
        """Cost of a round in plain steps."""
        return 1.0 if k == 0 else k * self.c(k) + self.v(k)

    def speedup(self, k: int, alpha: float, drafted: float = 1.0, paid: float = 1.0) -> float:
        """Expected, where a row finds something to draft in a share `drafted` of its steps, and in a share `paid` some
        row does, so that the step is a round."""
        return (1 + drafted * (expected_tokens(alpha, k) - 1)) / (1 + paid * (self.round(k) - 1))

    def best(self, alpha: float, *shares: float) -> tuple[int, float]:
        """(K, expected speed-up) that pays best among the calibrated K, as `speedup` has it; K = 0 when none pays."""
        return max(((k, self.speedup(k, alpha, *shares)) for k in (0, *self.verify_s)), key=lambda pair: pair[1])


AUTO_K = (1, 2, 3, 5, 8)  # what `auto` chooses from, besides 0
KEPT = 1 - 1 / 64  # of what a running acceptance remembers, with each drafted position
PROBE_ROUNDS = 4
PROBE_AFTER = 64  # plain steps before drafting is tried again; doubles while it does not pay


class DraftLength:
    """K of the next round, from what earlier rounds showed. Nothing drawn in the round itself enters."""

    def __init__(self, k: int | str, costs: Costs | None = None):
        if k == "auto" and costs is None:
            raise ValueError("speculate_k = 'auto' needs calibrated costs: call engine.calibrate first")
        self.fixed, self.costs = None if k == "auto" else k, costs
        # Acceptance, a running mean that starts as if it had seen a few of 0.7; share of a round's rows with a draft.
        self.overlap, self.weight, self.matched = 0.7 * 8, 8.0, 1.0
        self.plain, self.patience, self.probing = 0, PROBE_AFTER, 0

    def observe(self, overlap: float) -> None:
        """Sum of min(p, q) at one drafted position that was reached."""
        if math.isfinite(overlap):  # a draft's NaN would stay in the mean for good
            self.overlap, self.weight = self.overlap * KEPT + overlap, self.weight * KEPT + 1

    def drafted(self, matched: int, rows: int) -> None:
        """A round found something to draft for so many of its rows."""
        self.matched += (matched / rows - self.matched) / 16

    def choose(self) -> int:
        if self.fixed is not None:
            return self.fixed
        k, _ = self.costs.best(self.overlap / self.weight, self.matched)
        if k:
            self.plain, self.patience = 0, PROBE_AFTER
            return k
        if self.probing:
            self.probing -= 1
            return min(self.costs.verify_s)
        self.plain += 1
        if self.plain == self.patience:
            self.plain, self.patience, self.probing = 0, 2 * self.patience, PROBE_ROUNDS
        return 0
