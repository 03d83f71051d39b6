"""The slots of a batch as fixed tensors: what every step reads and writes in place.

    State       tokens, positions, ends, samplings of each slot; `fill` gives a slot a request, `commit` appends what a
                step decided, `park` takes a slot out

This file knows no model, no step and no text.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decoding.logits import log_likeliest
from decoding.sampling import GREEDY, INVALID, distribution
from tp import ALONE, Ranks

NO_TOKEN = -2  # stands in `out` where a step decided nothing: behind what it decided, and in slots that do not decode
STOP_SLOTS = 64


class State(nn.Module):
    """B slots of S positions in fixed tensors, which steps read and write in place: replaying a step needs nothing from
    the host. A row_view of it is a State of a few neighbouring slots.

    `kind` serves the samplings of all rows, a choice of code; everything else may change without compiling. With
    several ranks, rank 0's decisions go into every rank's state. `process` changes logits (B, T, V), as
    processors.RepetitionPenalty does. `logprobs`: so many top tokens are recorded beside each decided one while
    `noting`, a choice of code as `kind` is.
    """

    def __init__(
        self, B: int, S: int, device: torch.device, K: int = 0, ranks: Ranks = ALONE,
        process: Callable | None = None, logprobs: int | None = None,
    ):  # fmt: skip
        super().__init__()
        self.process, self.n_likeliest, self.noting = process, logprobs, logprobs is not None
        self.kind, self.broadcast, self.parking = GREEDY, ranks.broadcast, S
        self.k = self.length = 0  # of a round, for drafters: tokens to draft, and positions filled after the round

        def fixed(name: str, *shape: int, fill=0, dtype=torch.int64) -> None:
            self.register_buffer(name, torch.full(shape, fill, dtype=dtype, device=device))

        fixed("tokens", B, S + K + 2)  # prompt, then what was decided; beyond `pos` a round's scratch space
        fixed("pos", B, fill=S)  # index of the last decided token, which no layer has seen yet; S: parked
        fixed("end", B)  # index at which the row is full
        fixed("done", B, fill=True, dtype=torch.bool)
        fixed("seed", B)
        fixed("stop_ids", B, STOP_SLOTS, fill=-1)
        fixed("drafts", B, fill=True, dtype=torch.bool)  # whether drafted tokens may be proposed for the row
        fixed("values", B, 4, dtype=torch.float32)  # of the rows' samplings
        # What the last step decided, for the host: tokens, then NO_TOKEN; of how many drafted tokens (-1: of none);
        # how well the draft fitted, as the sum of min(p, q) at each drafted position; and whether drafting can go on.
        fixed("out", B, K + 1, fill=NO_TOKEN)
        fixed("accepted", B, fill=-1)
        fixed("overlap", B, K, dtype=torch.float32)
        fixed("has_match", B, fill=True, dtype=torch.bool)
        self.register_buffer("likeliest", None), self.register_buffer("weighed", None)
        if self.noting:
            fixed("likeliest", B, K + 1, 1 + logprobs, 2, fill=0.0, dtype=torch.float32)  # processors.log_likeliest
            fixed("weighed", B, K + 1, 2, fill=0.0, dtype=torch.float32)  # p of the target, q of the draft or 0

    def fill(self, slot: int, request) -> None:
        """Write a request (scheduler.Request) into a slot, which stays parked until `activate`. A prompt is padded with
        a token of its own: another might overflow in the model, and its NaN reach this slot."""
        prompt, stop_ids = request.prompt, sorted(request.stop_ids)
        row = torch.full_like(self.tokens[0], prompt[-1], device="cpu")
        row[: len(prompt)] = torch.tensor(prompt)
        self.tokens[slot] = row.to(self.tokens.device)
        self.end[slot].fill_(len(prompt) - 1 + request.max_new_tokens)
        self.seed[slot].fill_(request.seed)
        self.drafts[slot].fill_(request.draft)
        self.stop_ids[slot] = torch.tensor(stop_ids + [-1] * (STOP_SLOTS - len(stop_ids)))
        self.values[slot] = request.sampling.values

    def activate(self, slot: int, num_tokens: int) -> None:
        """The prompt, so many tokens, is in the caches: from now on steps decide this slot's tokens."""
        self.pos[slot].fill_(num_tokens - 1)
        self.done[slot].fill_(False)

    def park(self, slot: int) -> None:
        """Steps pass over this slot: they write its keys and values behind all that anybody attends to."""
        self.pos[slot].fill_(self.parking)
        self.done[slot].fill_(True)

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
        is_stop = (tokens[..., None] == self.stop_ids[:, None]).any(dim=-1)  # (B, T)
        last = is_stop | (position >= self.end[:, None]) | (tokens == INVALID)
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
