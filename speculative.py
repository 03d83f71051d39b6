"""Draft K tokens cheaply, verify them in one pass of the target, keep those that preserve its
distribution.

    speculate                       the whole idea, for one prompt, which is a Text
    acceptance, residual, accept    rejection sampling: two formulas, and the decision of every
                                    round, token by token or for the whole block
    decode_round                    the step of an engine's batch, of which plain decoding is the
                                    case K = 0

This file works on logits, distributions and token ids. Drafters are in drafts/, the draft length in
decoding/draft_length.py, and what a decision of your own in place of `accept` has to say in
decoding/rule.py. Ranks appear only as `batch.broadcast`.

Sources: Leviathan et al., arXiv:2211.17192 (below: L); Chen et al., arXiv:2302.01318; Sun et al.,
arXiv:2403.10444 (below: S), for whole blocks. K is L's and S's gamma.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decoding.errors import UserError
from decoding.sampling import (
    ACCEPT,
    GREEDY,
    INVALID,
    PENALIZED,
    PLAIN_DRAW,
    Sampling,
    distribution,
    draw,
    row_noise,
    sample,
)
from model import Caches, Transformer

# -------------------------------------------------------------------------------------- speculate


@torch.inference_mode()
def speculate(
    target,
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

    drafter.propose(text, plan) returns k tokens (1, k) for the positions after text.pos, and the
    distributions (1, k, V) that it drew them from, or zeros for no draft. Those of drafts/ need an
    engine; examples/notebook.py has one for this function. `target`: a Transformer, whose passes
    round as an engine's do, or in its place a runner with `model`, `prefill` and `slice_to` as
    ModelRunner has them, and caches of a row of len(prompt) + max_new_tokens + k positions.
    UserError for penalties and, of a Transformer, for what `decode` refuses.
    """
    if isinstance(target, Transformer):
        # Imported here, so that a notebook can take this file without them (examples/notebook.py).
        import decoding.validation as validation
        from decoding.runner import ModelRunner

        stop_ids = validation.check_request(
            target, prompt, max_new_tokens, sampling, seed, stop_ids
        )
        validation.check_count("k", k, 1)
        target = ModelRunner(target, 1, len(prompt) + int(max_new_tokens), slack=k + 1)
    model = target.model
    end = len(prompt) + int(max_new_tokens)
    text = Text(prompt, sampling, int(seed), end + k, model.norm.weight.device)
    # The prompt decides the first token, as in `decode`.
    h = target.prefill(text.tokens, 0, len(prompt))  # (1, T, D)
    p = sampling.probs(model.head(h[:, -1:]))  # (1, 1, V)
    decided = draw(p, text.noise(text.pos[:, None] + 1))  # (1, 1)
    while True:
        for token in decided[0].tolist():
            text.append(token)
            yield token
            if token in stop_ids or text.length == end:
                return
        # DRAFT k tokens, and VERIFY them: what would the target have drawn after each?
        draft_tokens, q = drafter.propose(text, Plan(k, text.length))  # (1, K), (1, K, V)
        pos = text.pos[:, None] + torch.arange(k + 1, device=text.pos.device)  # (1, K + 1)
        last = text.tokens.gather(1, pos[:, :1])  # (1, 1)
        tokens = torch.cat((last, draft_tokens), dim=1)  # (1, K + 1)
        p = sampling.probs(model(tokens, pos, target.slice_to(text.length + k)))  # (1, K + 1, V)
        # ACCEPT the first n, and draw the token that follows. `block` decides about all k at once.
        noise = (text.noise(pos[:, 1:], ACCEPT), text.noise(pos + 1))  # (1, K), (1, K + 1)
        n, token = accept(draft_tokens, q, p, noise=noise, block=True)  # (1,), (1,)
        decided = torch.cat((draft_tokens[:, :n], token[:, None]), dim=1)  # (1, n + 1)


class Plan(NamedTuple):
    """What a step asks of a drafter: k tokens for every row. `length`: no row has more decided
    tokens. `requests`: the (row, scheduler.Request) pairs that draft; none in `speculate`, and
    while an engine warms up or calibrates."""

    k: int
    length: int
    requests: Sequence = ()


class Text:
    """A batch of one row, for `speculate` and its drafter. `tokens`, `pos`, `seed`, `values`,
    `sampling_path` and `noise` are named as in decoding.batch.Batch, so a drafter that reads
    nothing else serves both."""

    def __init__(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        seed: int,
        S: int,
        device: torch.device,
    ):
        """A prompt, with room for S tokens in all."""
        self.tokens = torch.zeros(1, S, dtype=torch.int64, device=device)  # (1, S)
        self.tokens[0, : len(prompt)] = torch.as_tensor(prompt)
        self.pos = torch.tensor([len(prompt) - 1], device=device)  # (1,) of the last decided token
        self.seed = torch.tensor([seed], device=device)  # (1,)
        self.sampling = sampling
        self.sampling_path = sampling.path
        self.values = sampling.values.to(device)  # (n,)
        if sampling.path == PENALIZED:
            raise UserError("logit_bias and penalties need an Engine (decoding/engine.py)")

    @property
    def length(self) -> int:
        """The number of decided tokens."""
        return self.pos.item() + 1

    def noise(self, pos: Tensor, purpose: int = PLAIN_DRAW) -> Tensor:
        """Uniform numbers (1, T) for tokens at pos (1, T)."""
        return row_noise(self.seed, self.pos, pos, purpose)

    def append(self, token: int) -> None:
        if token == INVALID:
            raise UserError(f"position {self.length}: the model's logits are not finite")
        self.tokens[0, self.length] = token
        self.pos += 1


# ------------------------------------------------------------------------------------------ accept


def likelihood_ratio(p: Tensor, q: Tensor) -> Tensor:
    """p / q of a drafted token; 0 where q is 0, because such a token was not drawn from q."""
    return torch.where(q > 0, p / q, 0)


def acceptance(p: Tensor, q: Tensor) -> Tensor:
    """The probability min(1, p / q) of keeping a drafted token (L, section 2.3). p target, q draft,
    any shape."""
    return likelihood_ratio(p, q).clamp(max=1)


def residual(
    p: Tensor,
    q: Tensor,
    factor: Tensor | float = 1.0,
) -> Tensor:
    """norm(max(0, factor * p - q)) (..., V), the distribution that replaces a rejected token (L,
    algorithm 1). It is p itself, with p's bits, in rows where q is 0: their token is drawn as in
    plain decoding. It is p too where rounding makes the sum 0: p = q is never rejected."""
    rest = (factor * p - q).clamp(min=0)
    total = rest.sum(dim=-1, keepdim=True)
    has_draft = q.amax(dim=-1, keepdim=True) > 0
    has_rest = has_draft & (total > 0)
    return torch.where(has_rest, rest / total, p)


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
    ratio = likelihood_ratio(p_drafted, q_drafted)  # (B, K)
    factors = [torch.ones_like(ratio[:, 0])]  # of i tokens: their joint p / q, cut off at 1
    for ratio_of_token in ratio.unbind(dim=1):
        factor = factors[-1] * ratio_of_token
        factors.append(factor.clamp(max=1))
    factors = torch.stack(factors, dim=1)  # (B, K + 1)
    # h of i < K tokens, with f their factor: rest / (rest + 1 - f), where rest is the sum of
    # max(0, f * p - q) over the next token. Nothing is drafted after all K, and h is f.
    f = factors[:, 1:K]  # (B, K - 1) for i = 1 to K - 1
    excess = f[..., None] * p[:, 1:K] - q[:, 1:].nan_to_num()  # (B, K - 1, V)
    rest = excess.clamp(min=0).sum(dim=-1)  # (B, K - 1)
    rest = torch.where(rest.isnan(), f, rest)  # p is NaN there: tokens before it may be kept
    total_mass = rest + 1 - f
    h = torch.where(total_mass == 0, 1, rest / total_mass)
    h = torch.cat((h, factors[:, K:]), dim=1)  # (B, K)
    return h, factors


def accept(
    draft_tokens: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    *,
    noise: tuple[Tensor, Tensor],
    block: bool = False,
) -> tuple[Tensor, Tensor]:
    """Algorithm 1 of L for every row: the number of drafted tokens to keep, and the token that
    follows them. With `block`, algorithm 2 of S: the same distribution, and more tokens kept.

    draft_tokens (B, K) int, drawn from draft_probs (B, K, V) float32; target_probs (B, K + 1, V)
    float32
    -> n_accepted (B,), next_token (B,), int64. `noise`: uniform numbers in [0, 1) for the K
    decisions (B, K), and for the next token after each number of acceptances (B, K + 1). A block's
    decision also depends on the tokens that it discards and on their numbers, so the next round
    drafts these positions with fresh ones: all noise but PLAIN_DRAW hashes the round's start. Where
    the target's probabilities are NaN, next_token is INVALID; where the draft's are, its token is
    rejected.
    """
    K = draft_tokens.size(1)
    p = target_probs.float()
    q = draft_probs.float()
    to_accept, to_draw = noise
    drafted = draft_tokens[..., None]  # (B, K, 1)
    p_drafted = p[:, :K].gather(2, drafted)[..., 0]  # (B, K)
    q_drafted = q.gather(2, drafted)[..., 0]  # (B, K)
    if block and K > 0:
        h, factors = block_acceptance(p_drafted, q_drafted, p, q)
        length = torch.arange(1, K + 1, device=p.device)
        passing = torch.where(to_accept < h, length, 0)  # (B, K)
        n = passing.amax(dim=1)  # (B,) the longest block
        factor = factors.gather(1, n[:, None])  # (B, 1)
    else:
        # `<` and not `<=`: noise may be 0, and a token of acceptance 0 must never be kept.
        n = count_kept(to_accept < acceptance(p_drafted, q_drafted))  # (B,)
        factor = 1.0
    p, q, to_draw = after_kept(n, p, q, to_draw)  # (B, V), (B, V), (B,)
    return n, draw(residual(p, q, factor), to_draw)


def count_kept(may_keep: Tensor) -> Tensor:
    """How many drafted tokens (B,) stand before the first that may not be kept (B, K)."""
    leading = may_keep.long().cumprod(dim=1)  # (B, K)
    return leading.sum(dim=1)


def after_kept(
    n: Tensor,
    p: Tensor,
    q: Tensor,
    to_draw: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of p (B, K + 1, V), q (B, K, V) and to_draw (B, K + 1) what belongs to the token after the
    first n (B,) drafted ones: p and q (B, V), and its random number (B,). q is 0 after all K."""
    row = torch.arange(len(n), device=p.device)
    q = F.pad(q, (0, 0, 0, 1))  # (B, K + 1, V)
    return p[row, n], q[row, n], to_draw[row, n]


# ------------------------------------------------------------------------------------ decode_round


def decode_round(
    model: Transformer,
    caches: Caches,
    batch: nn.Module,
    draft_tokens: Tensor | None = None,
    draft_probs: Tensor | None = None,
    records_logprobs: bool = False,
) -> None:
    """The step of a batch: one pass over the last token of every row and its K drafted ones (B, K),
    drawn from draft_probs (B, K, V), decides 1 to K + 1 tokens of every row that is not done.
    Without a draft K = 0, and this is plain decoding. `batch` is decoding/batch.py's; with
    `records_logprobs` it also records log-probabilities.

    A draft on the target's own caches (drafts/target_layers.py) has written there too: the pass
    overwrites its keys and values at all K + 1 positions of every layer. A parked row writes past
    all attended positions.
    """
    pos = batch.pos[:, None]  # (B, 1)
    if draft_tokens is not None:
        K = draft_tokens.size(1)
        pos = pos + torch.arange(K + 1, device=pos.device)  # (B, K + 1)
        draft_tokens = batch.broadcast(draft_tokens)
        # Scratch space, where penalties see them.
        batch.tokens.scatter_(1, pos[:, 1:], draft_tokens)
    tokens = batch.tokens.gather(1, pos)  # (B, K + 1)
    h = model.hidden(tokens, pos, caches)  # (B, K + 1, D)
    decide(batch, model.head(h), draft_tokens, draft_probs, records_logprobs)


def decide(
    batch: nn.Module,
    logits: Tensor,
    draft_tokens: Tensor | None = None,
    draft_probs: Tensor | None = None,
    records_logprobs: bool = False,
) -> None:
    """Draw from the logits (B, K + 1, V) of the last token and K drafted ones, as `decode_round`
    has them, and append what is decided to every row that is not done."""
    pos = batch.pos[:, None] + torch.arange(logits.size(1), device=logits.device)  # (B, K + 1)
    processed = batch.process_logits(logits, pos)  # (B, K + 1, V)
    # The token after the accepted ones is drawn with the number that plain decoding would use at
    # its position.
    to_draw = batch.noise(pos + 1)  # (B, K + 1)
    if draft_tokens is None:
        tokens = sample(processed, batch.sampling_path, batch.values, to_draw)  # (B, 1)
        tokens = batch.broadcast(tokens)
        n = None
        batch.num_drafted.zero_()
        batch.accepted.zero_()
    else:
        p = distribution(processed, batch.sampling_path, batch.values)  # (B, K + 1, V)
        # The numbers that accept or reject are this round's own: those past the last accepted token
        # took part in the decision too, so using them again would bias the text.
        noise = (batch.noise(pos[:, 1:], ACCEPT), to_draw)  # (B, K), (B, K + 1)
        n, tokens = verify(batch, p, noise, draft_tokens, draft_probs)  # (B,), (B, K + 1)
    if records_logprobs:
        batch.record_logprobs(logits, processed, tokens, draft_probs)
    batch.commit(tokens, n)


def verify(
    batch: nn.Module,
    p: Tensor,
    noise: tuple[Tensor, Tensor],
    draft_tokens: Tensor,
    draft_probs: Tensor,
) -> tuple[Tensor, Tensor]:
    """Keep or reject drafted tokens, as of `accept`, by the batch's rule and the target's p (B,
    K + 1, V): n (B,), and tokens (B, K + 1) of which the first n + 1 are decided."""
    K = draft_tokens.size(1)
    rule = batch.verification
    if isinstance(rule, str):
        # Deciding about whole blocks gains nothing where tokens are the likeliest ones.
        block = rule == "block" and batch.sampling_path != GREEDY
        n, token = accept(draft_tokens, draft_probs, p, noise=noise, block=block)  # (B,), (B,)
        overlap = torch.minimum(p[:, :K], draft_probs).sum(dim=-1)  # (B, K) L, corollary 3.6
    else:
        n, token = rule.accept(draft_tokens, draft_probs, p, noise)  # (B,), (B,)
        overlap = rule.expected(p[:, :K], draft_probs)  # (B, K)
    is_drafted = draft_probs.amax(dim=-1) != 0  # (B, K) NaN too: it counts as drafted and rejected
    num_drafted = (is_drafted & ~batch.done[:, None]).sum(dim=1)  # (B,)
    # All ranks take rank 0's decision, in one broadcast: (B, K + 3) float32 holds ids below 2^24.
    decision = torch.cat((n[:, None], num_drafted[:, None], token[:, None], overlap), dim=1)
    n, num_drafted, token, overlap = batch.broadcast(decision).split((1, 1, 1, K), dim=1)
    batch.drafted[:, :K] = draft_tokens
    batch.overlap[:, :K] = overlap
    batch.accepted.copy_(n[:, 0])
    batch.num_drafted.copy_(num_drafted[:, 0])
    n = n.long()  # (B, 1)
    token = token.long()  # (B, 1)
    tokens = torch.cat((draft_tokens, token), dim=1)  # (B, K + 1)
    # `token` takes the place of the first rejected one, or stands after all K, where it is already.
    return n[:, 0], tokens.scatter(1, n, token)
