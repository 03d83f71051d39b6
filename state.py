"""A batch as fixed tensors: what every step reads and writes in place.

    State       tokens, positions, ends, samplings; `start` fills in a batch, `commit` appends what a step decided

This file knows no model, no step and no text.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from limits import one_kind
from processors import log_likeliest
from sampling import GREEDY, INVALID, Sampling, distribution
from tp import ALONE, Ranks

NO_TOKEN = -2  # stands in `out` where a step decided nothing: behind what it decided, and in finished rows
STOP_SLOTS = 64


class State(nn.Module):
    """A batch in fixed tensors, which steps read and write in place: replaying a step needs nothing from the host.

    `kind` is the sampling's, a choice of code; everything else may change without compiling. With several ranks, what
    rank 0 decides goes into every rank's state. `process`: what logits (B, T, V) go through, as
    processors.RepetitionPenalty. `logprobs`: so many of the likeliest tokens are noted beside each decided one while
    `noting`, a choice of code as `kind` is.
    """

    def __init__(
        self, B: int, S: int, device: torch.device, K: int = 0, ranks: Ranks = ALONE,
        process: Callable | None = None, logprobs: int | None = None,
    ):  # fmt: skip
        super().__init__()
        self.process, self.n_likeliest, self.noting = process, logprobs, logprobs is not None
        self.likeliest = self.weighed = None
        self.kind, self.broadcast = GREEDY, ranks.broadcast
        self.k = self.length = 0  # of a round, for drafters: tokens to draft, and positions filled after the round

        def fixed(name: str, *shape: int, fill=0, dtype=torch.int64) -> None:
            self.register_buffer(name, torch.full(shape, fill, dtype=dtype, device=device))

        fixed("tokens", B, S + K + 1)  # prompt, then what was decided; beyond `pos` a round's scratch space
        fixed("pos", B)  # index of the last decided token, which no layer has seen yet
        fixed("end", B)  # index at which the row is full
        fixed("done", B, fill=True, dtype=torch.bool)
        fixed("seed", B)
        fixed("stop_ids", STOP_SLOTS, fill=-1)
        fixed("values", B, 4, dtype=torch.float32)  # of the rows' samplings
        # What the last step decided, for the host: tokens, then NO_TOKEN; of how many drafted tokens (-1: of none);
        # how well the draft fitted, as the sum of min(p, q) at each drafted position; and whether drafting can go on.
        fixed("out", B, K + 1, fill=NO_TOKEN)
        fixed("accepted", B, fill=-1)
        fixed("overlap", B, K, dtype=torch.float32)
        fixed("has_match", B, fill=True, dtype=torch.bool)
        if self.noting:
            self.likeliest = torch.zeros(B, K + 1, 1 + logprobs, 2, device=device)  # as processors.log_likeliest
            self.weighed = torch.zeros(B, K + 1, 2, device=device)  # p of the target, q of the draft or 0

    def start(
        self, prompts, budgets: Sequence[int], stop_ids: Iterable[int], seeds: Sequence[int],
        sampling: Sampling | Sequence[Sampling],
    ) -> None:  # fmt: skip
        """Fill in a batch: new tokens, a seed and a sampling for each row (or one for all, of one kind). Rows beyond
        the prompts are done from the start."""
        samplings, stop_ids = one_kind(sampling, len(prompts)), sorted(stop_ids)
        if len(stop_ids) > STOP_SLOTS:
            raise ValueError(f"{len(stop_ids)} stop ids are more than the {STOP_SLOTS} that fit")
        B = self.tokens.size(0)
        empty = B - len(prompts)
        lengths = torch.tensor([len(prompt) for prompt in prompts] + [1] * empty)
        self.tokens.zero_()
        for row, prompt in enumerate(prompts):
            # Padded with a token of its own: another might overflow in the model, and its NaN reach this row.
            self.tokens[row] = prompt[-1]
            self.tokens[row, : len(prompt)] = torch.tensor(prompt)
        self.pos.copy_(lengths - 1)
        self.end.copy_(lengths - 1 + torch.tensor([*budgets, *[0] * empty]))
        self.done.copy_(torch.arange(B) >= len(prompts))
        self.seed.copy_(torch.tensor([*seeds, *[0] * empty]))
        self.stop_ids.copy_(torch.tensor(stop_ids + [-1] * (STOP_SLOTS - len(stop_ids))))
        self.values.copy_(torch.stack([each.values for each in samplings] + [samplings[0].values] * empty))
        self.kind = samplings[0].kind

    def processed(self, logits: Tensor, pos: Tensor, tokens: Tensor | None = None) -> Tensor:
        """logits (B, T, V) behind pos (B, T), as they are drawn from. tokens (B, T): which stand there, if drafted."""
        if self.process is None:
            return logits
        return self.process(logits, self.tokens if tokens is None else self.tokens.scatter(1, pos, tokens), pos)

    def note(self, logits: Tensor, own: Tensor, tokens: Tensor, q: Tensor | None = None) -> None:
        """What the model alone thought of these tokens (B, T); and the probabilities that decided: the target's, of the
        logits as they are drawn from, own (B, T, V), and the draft's, q (B, T - 1, V)."""
        if not self.noting:
            return
        T, at = tokens.size(1), tokens.clamp(min=0)[..., None]  # (B, T, 1)
        self.likeliest[:, :T] = log_likeliest(logits, tokens, self.n_likeliest)
        self.weighed.zero_()
        self.weighed[:, :T, 0] = distribution(own, self.kind, self.values).gather(2, at)[..., 0]
        if q is not None:
            self.weighed[:, : T - 1, 1] = q.gather(2, at[:, :-1])[..., 0]

    def commit(self, tokens: Tensor, n_accepted: Tensor | None = None) -> None:
        """Append tokens (B, T), as many as were accepted (B,) and one more, to the rows that are not done, each up to
        its first stop id or its end. None: plain decoding, T = 1."""
        T = tokens.size(1)
        index = torch.arange(T, device=tokens.device)
        position = self.pos[:, None] + 1 + index  # (B, T)
        last = torch.isin(tokens, self.stop_ids) | (position >= self.end[:, None]) | (tokens == INVALID)
        ended_before = last.cumsum(dim=1) - last.long() > 0  # (B, T)
        keep = ~(self.done[:, None] | ended_before)
        if n_accepted is not None:
            keep = keep & (index <= n_accepted[:, None])
        self.out.copy_(F.pad(torch.where(keep, tokens, NO_TOKEN), (0, self.out.size(1) - T), value=NO_TOKEN))
        # What is not kept lands beyond `pos`, where nothing counts. INVALID is for the host alone: a step that runs
        # before the host knows must not embed INVALID.
        self.tokens.scatter_(1, position, tokens.clamp(min=0))
        self.pos.add_(keep.sum(dim=1))
        self.done.logical_or_((keep & last).any(dim=1))
