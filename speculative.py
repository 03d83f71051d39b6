"""Draft K tokens cheaply, verify them in one pass of the target, keep those that leave its law as it is.

    acceptance, residual, accept    rejection sampling: the two formulas, and the step that every round takes
    Drafter                         what a drafter offers: propose and advance
    ModelDraft                      a second model with its own cache, or part of the target on the target's cache
    NgramDraft                      what followed the last N tokens when they stood there before
    DraftLength                     how many tokens the next round drafts: a number, or what pays best
    RowStatistics, Costs, speculation    what was accepted, what steps cost, and whether the two explain the speed
    expected_tokens, speedup, operations    the papers' formulas

This file knows logits, distributions and token ids. It does not know text, checkpoints, ranks or compilation: the
methods that a drafter lists in `steps` trace, and generate.py decides what becomes of them.

Sources: Leviathan et al., arXiv:2211.17192 (below: L); Chen et al., arXiv:2302.01318. K is their gamma.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from model import Transformer
from sampling import DRAFT_DRAW, distribution, draw, uniform

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
    draft_tokens: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    generator: torch.Generator | None = None,
    *,
    noise: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
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


# -------------------------------------------------------------------------------------------- drafters


class Drafter(nn.Module):
    """What the loop asks of a drafter. `state` is generate.py's: tokens (B, S), pos (B,) the index of the last decided
    token, done, seed, values and kind of the sampling; agree(x), the x that all ranks go on with. Positions beyond
    `pos` are the round's scratch space.

    Subclass it with `propose`, and whatever else the drafter needs. Every drawn token is verified; whether another is
    drawn may depend only on what stands before it, or the law is lost.
    """

    steps: Sequence[str] = ()  # names of methods (state) -> None that whoever runs the loop may compile

    def __init__(self):
        super().__init__()
        self.k = 0  # tokens of the next proposal: the loop sets it
        self.model: Transformer | None = None  # what `propose` runs: the loop tells it how far to attend
        self.owns_cache = False  # whether prompts must go through that model too
        # (B,) bool: has a row something to propose? None: every row, always
        self.register_buffer("has_match", None, persistent=False)

    def setup(self, state: nn.Module, k_max: int, target: Transformer) -> None:
        """Make fixed tensors for this batch and up to k_max drafted tokens; the target has its caches."""

    def propose(self, state: nn.Module) -> tuple[Tensor, Tensor]:
        """tokens (B, K) for the positions after `pos`, and the distributions (B, K, V) that they were drawn from. A row
        of zeros says that nothing was drawn for that row."""
        raise NotImplementedError

    def advance(self, n_accepted: Tensor) -> None:
        """The target has decided: n_accepted (B,) of the proposal and one token more stand in the state."""

    def catch_up(self, missed: int) -> None:
        """`missed` tokens or fewer of every row were decided without this drafter."""


class ModelDraft(Drafter):
    """A model drafts token by token, from the sampling's own distribution.

    With its own cache it is always fed the last two tokens first: after K acceptances it has not seen the last one.
    On the target's cache it is fed one: verification writes every layer of all K + 1 positions, before anything reads
    them.
    """

    CHUNK = 32  # tokens that `catch_up` runs at once

    def __init__(self, model: Transformer, on_layers: Sequence[int] | None = None):
        """`on_layers`: the target's layers whose caches this model's layers use; None for caches of its own."""
        super().__init__()
        self.model, self.on_layers, self.owns_cache = model, on_layers, on_layers is None
        self.steps = ("first", "next", "fill") if self.owns_cache else ("next",)

    def setup(self, state: nn.Module, k_max: int, target: Transformer) -> None:
        self.state, V = state, target.config.vocab_size
        self.vocab = min(V, self.model.config.vocab_size)
        if not self.owns_cache:
            self.model.use_caches([target.layers[i].attention.cache for i in self.on_layers])
        # Ids that only the target has keep probability 0, so that the target's law stays whole.
        _proposal(self, state, k_max, V)
        for name in ("drawn", "missing"):
            self.register_buffer(name, torch.zeros((), dtype=torch.int64, device=state.pos.device), persistent=False)

    def propose(self, state: nn.Module) -> tuple[Tensor, Tensor]:
        self.drawn.zero_()
        for step in range(self.k):
            self.first(state) if step == 0 and self.owns_cache else self.next(state)
        return self.tokens[:, : self.k], self.probs[:, : self.k]

    def first(self, state: nn.Module) -> None:
        self._draw(state, fed=2)

    def next(self, state: nn.Module) -> None:
        self._draw(state, fed=1)

    def _draw(self, state: nn.Module, fed: int) -> None:
        """Run the last `fed` tokens and draw the one after them."""
        last = state.pos + self.drawn  # (B,)
        h = self._hidden(state, last, fed)[:, -1]  # (B, D)
        logits = self.model.head(h)[:, : self.vocab]  # (B, V) of the shorter vocabulary
        q = distribution(logits, state.kind, state.values)
        token = draw(q, uniform(state.seed, last + 1, DRAFT_DRAW), state.kind).clamp(min=0)  # (B,)
        token = state.agree(token)
        state.tokens.scatter_(1, last[:, None] + 1, token[:, None])
        self.tokens.index_copy_(1, self.drawn[None], token[:, None])
        self.probs[..., : self.vocab].index_copy_(1, self.drawn[None], q[:, None])
        self.drawn.add_(1)

    def _hidden(self, state: nn.Module, last: Tensor, T: int) -> Tensor:
        """Hidden states (B, T, D) of the T positions up to `last` (B,); what would stand before 0 is position 0."""
        pos = (last[:, None] + torch.arange(1 - T, 1, device=last.device)).clamp(min=0)  # (B, T)
        tokens = state.tokens.gather(1, pos).clamp(max=self.model.config.vocab_size - 1)
        return self.model.hidden(tokens, pos)

    def fill(self, state: nn.Module) -> None:
        """Write the keys and values of CHUNK positions, the last of which is `missing` before `pos`."""
        self._hidden(state, (state.pos - self.missing).clamp(min=0), self.CHUNK)

    def catch_up(self, missed: int) -> None:
        if self.owns_cache:
            for chunk in reversed(range(math.ceil(missed / self.CHUNK))):  # the oldest first
                self.missing.fill_(2 + chunk * self.CHUNK)  # `first` writes the last two
                self.fill(self.state)


def _proposal(drafter: Drafter, state: nn.Module, k_max: int, V: int) -> None:
    """Buffers `tokens` (B, K) and `probs` (B, K, V), at fixed addresses."""
    B, device = state.pos.size(0), state.pos.device
    drafter.register_buffer("tokens", torch.zeros(B, k_max, dtype=torch.int64, device=device), persistent=False)
    drafter.register_buffer("probs", torch.zeros(B, k_max, V, device=device), persistent=False)


def layer_subset(model: Transformer, kept: Sequence[int]) -> Transformer:
    """A Transformer of some of `model`'s layers, the same modules with the same caches. ValueError for layers that
    the model does not have."""
    n_layers = model.config.n_layers
    if not kept or not 0 <= min(kept) <= max(kept) < n_layers or sorted(set(kept)) != list(kept):
        raise ValueError(f"layers {list(kept)} must be some of 0 to {n_layers - 1}, in order")
    return model.with_layers([model.layers[i] for i in kept], tuple(model.windows[i] for i in kept))


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

    steps = ("look",)

    def __init__(self, n: int = 3):
        super().__init__()
        if n < 1:
            raise ValueError(f"ngram:{n} must match at least 1 token")
        self.n = n

    def setup(self, state: nn.Module, k_max: int, target: Transformer) -> None:
        self.state = state
        _proposal(self, state, k_max, target.config.vocab_size)
        self.has_match = torch.zeros_like(state.done)

    def propose(self, state: nn.Module) -> tuple[Tensor, Tensor]:
        return self.tokens[:, : self.k], self.probs[:, : self.k]

    def advance(self, n_accepted: Tensor) -> None:
        self.look(self.state)

    def look(self, state: nn.Module) -> None:
        """Find the match, and make the proposal that a next round would take."""
        pos, tokens, N = state.pos[:, None], state.tokens, min(self.n, state.tokens.size(1))  # (B, 1), (B, S)
        last = (pos + torch.arange(1 - N, 1, device=pos.device)).clamp(min=0)  # (B, N)
        grams = tokens.unfold(1, N, 1)  # (B, S - N + 1, N)
        end = torch.arange(N - 1, tokens.size(1), device=pos.device)  # (S - N + 1,) where each n-gram ends
        match = (grams == tokens.gather(1, last)[:, None]).all(dim=-1) & (end < pos) & ~state.done[:, None]
        found = torch.where(match, end, -1).amax(dim=1, keepdim=True)  # (B, 1)
        matched = found >= 0
        self.has_match.copy_(matched[:, 0])
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
        self.propose, self.advance = drafter.propose, drafter.advance


# ------------------------------------------------------------------------------------------- theory


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


# -------------------------------------------------------------------------------------- draft length


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

    def best(self, alpha: float) -> tuple[int, float]:
        """(K, expected speed-up) that pays best among the calibrated K at this acceptance; K = 0 when none pays."""
        choices = {0: 1.0, **{k: expected_tokens(alpha, k) / self.round(k) for k in self.verify_s}}
        k = max(choices, key=choices.get)
        return k, choices[k]


AUTO_K = (1, 2, 3, 5, 8)  # what `auto` chooses from, besides 0
MEMORY = 64  # drafted positions that a running acceptance remembers
PROBE_ROUNDS = 4
PROBE_AFTER = 64  # plain steps before drafting is tried again; doubles while it does not pay


class DraftLength:
    """K of the next round, from what earlier rounds showed. Nothing drawn in the round itself enters."""

    def __init__(self, k: int | str, costs: Costs | None = None):
        if k == "auto" and costs is None:
            raise ValueError("speculate_k = 'auto' needs calibrated costs: call engine.calibrate first")
        self.fixed, self.costs = None if k == "auto" else k, costs
        # A running mean that starts as if it had seen a few acceptances of 0.7.
        self.overlap, self.weight = 0.7 * 8, 8.0
        self.plain, self.patience, self.probing = 0, PROBE_AFTER, 0

    @property
    def alpha(self) -> float:
        return self.overlap / self.weight

    def observe(self, overlap: float) -> None:
        """Sum of min(p, q) at one drafted position that was reached."""
        keep = 1 - 1 / MEMORY
        self.overlap, self.weight = self.overlap * keep + overlap, self.weight * keep + 1

    def choose(self) -> int:
        if self.fixed is not None:
            return self.fixed
        k, _ = self.costs.best(self.alpha)
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


# ---------------------------------------------------------------------------------------- statistics

PLAIN_TOKEN, ACCEPTED, CORRECTED, BONUS = range(4)  # where a token came from


@dataclass
class RowStatistics:
    """What speculation did for one row, up to its last token and no further."""

    rounds: Counter = field(default_factory=Counter)  # by K; K = 0 is a plain step
    tokens: int = 0  # decided by the rounds
    reached: Counter = field(default_factory=Counter)  # by position in the draft: how often it was decided there
    accepted: Counter = field(default_factory=Counter)
    overlap: float = 0.0  # sum of min(p, q) over positions reached
    origins: list[int] = field(default_factory=list)  # of each token, the prompt's first included

    def count(self, index: int, k: int, n_accepted: int, overlap: float, first: bool = False) -> None:
        """Token `index` of a round that drafted k tokens (for this row: 0 where nothing matched) and accepted n of them
        is part of the output. `first`: the prompt's own next token, which no round decided."""
        if first:
            self.origins.append(PLAIN_TOKEN)
            return
        self.tokens += 1
        self.rounds[k] += index == 0
        if index < k:
            self.reached[index] += 1
            self.overlap += overlap
            self.accepted[index] += index < n_accepted
        decided = ACCEPTED if index < n_accepted else CORRECTED if index < k else BONUS
        self.origins.append(decided if k else PLAIN_TOKEN)

    def __add__(self, other: "RowStatistics") -> "RowStatistics":
        sums = {name: getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__}
        return RowStatistics(**sums)

    @property
    def alpha(self) -> float | None:
        """Mean sum of min(p, q) over positions reached: the acceptance rate (L corollary 3.6); None without any."""
        reached = sum(self.reached.values())
        return self.overlap / reached if reached else None


def speculation(
    row: RowStatistics, k: int | str, costs: Costs | None, seconds: float, draft_s: float, verify_s: float,
    c_ops: float = 0.0,
) -> dict:  # fmt: skip
    """The "speculative" object of the JSON contract: `seconds` is what the rounds took altogether, draft_s and verify_s
    its parts; c_ops as in `operations`. Figures that need calibrated costs are None without them."""
    rounds, alpha = sum(row.rounds.values()), row.alpha
    longest = max(row.rounds, default=0)
    usual = max((k for k in row.rounds if k), key=row.rounds.get, default=0)  # the K that most rounds had
    known = costs is not None and usual in costs.verify_s
    cost = sum(n * costs.round(k) for k, n in row.rounds.items()) if known else None  # in plain steps
    found = {
        "k": k,
        "rounds": rounds,
        "drafted": sum(k * n for k, n in row.rounds.items()),
        "accepted": sum(row.accepted.values()),
        "accepted_by_position": [row.accepted[i] for i in range(longest)],
        "reached_by_position": [row.reached[i] for i in range(longest)],
        "alpha": alpha,
        "d_lk": None if alpha is None else 1 - alpha,
        "c": costs.c(usual) if known else None,
        "v": costs.v(usual) if known else None,
        "tokens_per_round": row.tokens / rounds if rounds else None,
        "tokens_per_round_iid": None if alpha is None else expected_tokens(alpha, usual),
        "c_ops": c_ops,
        "operations": None if alpha is None else operations(alpha, usual, c_ops),
        "measured_speedup": row.tokens * costs.decode_s / seconds if known and seconds > 0 else None,
        "predicted_speedup": row.tokens / cost if known else None,
        "predicted_speedup_iid": speedup(alpha, usual, costs.c(usual), costs.v(usual)) if known else None,
        "best_k": None,
        "best_k_speedup": None,
        "rounds_by_k": dict(sorted(row.rounds.items())),
        "draft_s": draft_s,
        "verify_s": verify_s,
    }
    if known and alpha is not None:
        found["best_k"], found["best_k_speedup"] = costs.best(alpha)
    return found


def summary(found: dict) -> list[str]:
    """What `speculation` found, as lines for people."""

    def show(name: str, form: str = ".2f") -> str:
        return "–" if found[name] is None else format(found[name], form)

    by_position = [
        f"{a / n:.2f}" for a, n in zip(found["accepted_by_position"], found["reached_by_position"], strict=True) if n
    ]
    return [
        f"speculation, K = {found['k']}: {found['rounds']} rounds, {show('tokens_per_round')} tokens a round"
        f" (i.i.d. {show('tokens_per_round_iid')}), accepted {found['accepted']} of {found['drafted']} drafted,"
        f" by position {' '.join(by_position) or '–'}",
        f"  alpha {show('alpha')}, D_LK {show('d_lk')}, c {show('c')}, v {show('v')}, operations x{show('operations')};"
        f" drafting took {found['draft_s']:.2f} s, verifying {found['verify_s']:.2f} s",
        f"  speed-up {show('measured_speedup')} measured, {show('predicted_speedup')} predicted (i.i.d."
        f" {show('predicted_speedup_iid')}); best would have been K = {show('best_k', 'd')} with"
        f" {show('best_k_speedup')}",
    ]
