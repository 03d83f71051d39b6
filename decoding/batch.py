"""The slots of a batch as fixed tensors, which every step reads and writes in place.

    Batch       tokens, positions, ends and samplings of each slot; `fill` gives a slot a request,
                `commit` appends the tokens of a step, `park` takes a slot out

speculative.decode_round is the step that changes a Batch.
"""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decoding.logits import apply_masks, penalize, process, top_logprobs
from decoding.options import EngineOptions
from decoding.sampling import (
    GREEDY,
    INVALID,
    MAX_BIASES,
    PENALIZED,
    PLAIN_DRAW,
    SETTINGS,
    common_path,
    distribution,
    row_noise,
)
from tp import ALONE, Ranks

MAX_STOP_IDS = 64


class Batch(nn.Module):
    """B slots of S positions in fixed tensors. Steps read and write them in place, so a replayed
    step needs nothing from the host. A row_view of a Batch is a Batch of a range of slots.

    `sampling_path` selects the code that serves the samplings of all rows; everything else may
    change without compiling. With several ranks, rank 0's decisions enter every rank's batch.

    Of the engine's `options` a Batch follows three. logits_processor(logits (B, T, V), tokens (B,
    S), pos (B, T)) returns the logits that tokens are drawn from; columns of `tokens` past a
    position in `pos` are scratch space, not text there. `logprobs` is the number of top tokens that
    steps may record for each token; None: they record nothing. `verification`: by which rule a step
    keeps drafted tokens.
    """

    def __init__(
        self,
        B: int,
        S: int,
        device: torch.device,
        K: int = 0,
        ranks: Ranks = ALONE,
        options: EngineOptions = EngineOptions(),  # noqa: B008, frozen
        vocab_size: int = 0,
    ):
        super().__init__()
        self.logits_processor = options.logits_processor
        self.verification = options.verification
        self.vocab_size = vocab_size
        self.num_top_logprobs = options.logprobs
        self.sampling_path = GREEDY
        self.broadcast = ranks.broadcast
        self.parked_pos = S

        def fixed(name: str, *shape: int, value=0, dtype: torch.dtype = torch.int64) -> None:
            tensor = torch.full(shape, value, dtype=dtype, device=device)
            self.register_buffer(name, tensor)

        f32 = torch.float32

        # The prompt, then the decided tokens; positions after `pos` are a round's scratch space. A
        # parked row has pos = S and writes up to S + K + 1.
        fixed("tokens", B, S + K + 2)
        # The index of the last decided token. No layer has seen this token yet: it is the next
        # step's input, and its keys and values are in no cache.
        fixed("pos", B, value=S)
        fixed("prompt_length", B)
        fixed("end", B)  # the index of the last token that a step may decide
        fixed("done", B, value=True, dtype=torch.bool)
        fixed("seed", B)
        fixed("stop_ids", B, MAX_STOP_IDS, value=-1)
        fixed("draft_limit", B, value=K)  # tokens that a round may draft for the row
        fixed("values", B, len(SETTINGS), dtype=f32)  # of the rows' samplings
        fixed("biases", B, 2, MAX_BIASES, dtype=f32)
        num_words = math.ceil(vocab_size / 32)
        # One bit for each token, set where a grammar allows it.
        fixed("masks", B, K + 1, num_words, value=-1, dtype=torch.int32)
        # What the last step decided, for the host: the first num_decided tokens of `out`. The
        # first num_drafted tokens of `drafted` were the draft, and the first `accepted` of these
        # were kept. `overlap` is, at each of them, the sum over the vocabulary of min(p, q), or
        # what a decoding.rule.Rule returns as `expected`.
        fixed("out", B, K + 1)
        fixed("num_decided", B)
        fixed("num_drafted", B)
        fixed("accepted", B)
        fixed("overlap", B, K, dtype=f32)
        fixed("drafted", B, K)
        if options.logprobs is not None:
            num_logprobs = 1 + options.logprobs
            fixed("top_logprobs", B, K + 1, num_logprobs, 2, dtype=f32)  # of decoding/logits.py
            # p (target) and q (draft; 0 without one) of the decided token, then both of the drafted
            # one. The two tokens differ where the draft was rejected.
            fixed("token_probs", B, K + 1, 4, dtype=f32)

    def fill(self, slot: int, request) -> None:
        """Write a request (scheduler.Request) into a slot, which stays parked until `activate`."""
        ids = request.prompt
        self.tokens[slot, : len(ids)] = torch.tensor(ids)
        stop_ids = sorted(request.stop_ids)
        no_stop_ids = [-1] * (MAX_STOP_IDS - len(stop_ids))
        values = {
            "stop_ids": torch.tensor(stop_ids + no_stop_ids),
            "prompt_length": len(request.prompt),
            "end": request.end,
            "seed": request.seed,
            "values": request.sampling.values,
            "biases": request.sampling.biases,
            "masks": -1,
        }
        for name, value in values.items():
            getattr(self, name)[slot] = value

    def prepare(
        self,
        requests: Sequence[tuple[int, object]],
        limits: Mapping[object, int] | None = None,
    ) -> None:
        """Choose the code for a step of these (row, scheduler.Request) pairs; sampling_path changes
        in this view of rows alone. `limits`: how many tokens each request drafts, None in a plain
        step."""
        self.sampling_path = common_path(request for _, request in requests)
        if limits:
            limit_by_row = [0] * len(self.pos)
            for row, request in requests:
                limit_by_row[row] = limits[request]
            limit = torch.tensor(limit_by_row, pin_memory=self.pos.is_cuda)
            self.draft_limit.copy_(limit, non_blocking=self.pos.is_cuda)

    def write_masks(
        self, requests: Sequence[tuple[int, object]], draft_tokens: Tensor | None = None
    ) -> None:
        """Write the masks of these rows' grammars: for the next token, and for the token after each
        of draft_tokens (B, K). After a drafted token that is forbidden or ends the answer, nothing
        is masked: no token there is ever decided."""
        for row, request in requests:
            if request.grammar is None:
                continue
            drafted = [] if draft_tokens is None else draft_tokens[row].tolist()
            allowed = request.grammar.masks(request.tokens, drafted)  # (up to K + 1, words)
            masks = self.masks[row]  # (K + 1, words)
            num_missing = masks.size(1) - allowed.size(1)
            allowed = F.pad(allowed, (0, num_missing))  # zeros forbid ids that only the model has
            masks.fill_(-1)
            masks[: len(allowed)] = allowed

    def activate(self, slot: int, num_tokens: int) -> None:
        """Let steps decide this slot's tokens after its prompt of num_tokens."""
        self.pos[slot].fill_(num_tokens - 1)
        self.done[slot].fill_(False)

    def park(self, slot: int) -> None:
        """Let steps skip this slot. They still run its row, and write keys and values to scratch
        positions that no query attends to."""
        self.pos[slot].fill_(self.parked_pos)
        self.done[slot].fill_(True)

    def process_logits(
        self,
        logits: Tensor,
        pos: Tensor,
    ) -> Tensor:
        """logits (B, T, V) at pos (B, T) as tokens are drawn from them: masked, penalized, then
        processed."""
        if self.sampling_path == PENALIZED:  # a request with a grammar has this path too
            logits = apply_masks(logits, self.masks[:, : logits.size(1)])
        return self.process_draft_logits(logits, pos)

    def process_draft_logits(
        self,
        logits: Tensor,
        pos: Tensor,
    ) -> Tensor:
        """A draft's logits (B, T, V) at pos (B, T) as its tokens are drawn from them: penalized,
        and processed where the draft has the target's vocabulary, so that it proposes what the
        target may accept."""
        if self.sampling_path == PENALIZED:
            logits = penalize(
                logits, self.tokens, pos, self.prompt_length, self.values, self.biases
            )
        if self.logits_processor is None or logits.size(-1) != self.vocab_size:
            return logits
        return process(self.logits_processor, logits, self.tokens, pos)

    def noise(self, pos: Tensor, purpose: int = PLAIN_DRAW) -> Tensor:
        """Uniform numbers (B, T) for tokens at pos (B, T): zeros where all rows are greedy, which
        needs none, unless a Rule decides, which may use them."""
        if self.sampling_path == GREEDY and isinstance(self.verification, str):
            return torch.zeros(pos.shape, dtype=torch.float32, device=pos.device)
        return row_noise(self.seed, self.pos, pos, purpose)

    def record_logprobs(
        self, logits: Tensor, processed: Tensor, tokens: Tensor, q: Tensor | None = None
    ) -> None:
        """Record for tokens (B, T): in top_logprobs, log-probabilities by the unmodified logits
        (B, T, V); in token_probs, p by the processed logits (B, T, V) and the draft's q (B, T - 1,
        V), each of these tokens and of the drafted ones."""
        T = tokens.size(1)
        index = tokens.clamp(min=0)[..., None]  # (B, T, 1)
        p = distribution(processed, self.sampling_path, self.values)  # (B, T, V)
        self.top_logprobs[:, :T] = top_logprobs(logits, tokens, self.num_top_logprobs)
        self.token_probs.zero_()
        self.token_probs[:, :T, :1] = p.gather(2, index)
        if q is not None:
            drafted = self.drafted[:, : T - 1, None]  # (B, T - 1, 1)
            probs = (q.gather(2, index[:, :-1]), p[:, :-1].gather(2, drafted), q.gather(2, drafted))
            self.token_probs[:, : T - 1, 1:] = torch.cat(probs, dim=-1)  # (B, T - 1, 3)

    def commit(
        self,
        tokens: Tensor,
        n_accepted: Tensor | None = None,
    ) -> None:
        """Append the first n_accepted (B,) + 1 of tokens (B, T) to every row that is not done, up
        to its first stop id or its end. None: plain decoding, T = 1."""
        T = tokens.size(1)
        index = torch.arange(T, device=tokens.device)
        position = self.pos[:, None] + 1 + index  # (B, T)
        stop_ids = self.stop_ids[:, None]  # (B, 1, MAX_STOP_IDS)
        is_stop = (tokens[..., None] == stop_ids).any(dim=-1)  # (B, T)
        is_full = position >= self.end[:, None]  # (B, T)
        is_last = is_stop | is_full | (tokens == INVALID)
        num_last_before = is_last.cumsum(dim=1) - is_last.long()  # (B, T)
        is_decided = ~(self.done[:, None] | (num_last_before > 0))  # (B, T)
        if n_accepted is not None:
            is_decided = is_decided & (index <= n_accepted[:, None])
        self.out[:, :T] = tokens
        self.num_decided.copy_(is_decided.sum(dim=1))
        # Rejected tokens land beyond `pos`, where nothing reads them. INVALID is for the host
        # alone: a step that runs before the host has read it must not embed INVALID.
        self.tokens.scatter_(1, position, tokens.clamp(min=0))
        self.pos.add_(self.num_decided)
        has_ended = (is_decided & is_last).any(dim=1)  # (B,)
        self.done.logical_or_(has_ended)
