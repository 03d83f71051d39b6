"""Suffix decoding (arXiv:2411.04975): a draft without a model, from the texts of this and earlier
requests.

    IndexedText     tokens with an index, which finds the tokens that followed the longest suffix of
                    a context
    SuffixDraft     drafts from the request's text and from earlier answers, and their expected
                    acceptance;  SuffixSource  its spec

The index is a set of dicts on the host, and the host also chooses K. A look-up takes 50 to 100 us
whatever the pool's size, and needs only tokens that the host receives anyway. A request's first
look-up also indexes its prompt, at 2 to 10 us a token: 0.2 to 1.3 s for 131,072. On a GPU tokens
arrive a few steps late, so a draft is used only if it agrees with the tokens decided in the
meantime. This file knows token ids alone.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from decoding import readback
from decoding.draft_length import DECAY
from decoding.scheduler import Request, common_prefix
from drafts.base import Draft, Drafter, DraftSource, read_count
from model import Config, Transformer

GRAMS = (6, 3, 1)  # lengths of the indexed n-grams; a look-up takes the longest that occurred
MAX_OCCURRENCES = 32  # of an n-gram; a look-up visits the latest
MIN_SHARE = 0.1  # a draft ends before the product of its shares falls below this
FACTOR = 2  # a draft has at most FACTOR * match length tokens
POOL_TOKENS = 1 << 17  # tokens of earlier answers, some 400 bytes each
END = -1  # behind each text of the pool, and behind a draft


class DraftToken(NamedTuple):
    """A drafted token, its share of the continuations, and the length of the match before it."""

    id: int
    share: float
    match_length: int

    @property
    def length_bits(self) -> int:
        """The index in Acceptance: 1 for a match of one token, 2 for two or three, and so on."""
        return self.match_length.bit_length()


class IndexedText:
    """Tokens, and the positions where each of their n-grams of these lengths ends."""

    def __init__(self, grams: Sequence[int] = GRAMS):
        self.grams = grams
        self.ids: list[int] = []
        self.ends: dict[tuple[int, ...], list[int]] = defaultdict(list)
        # The draft that `SuffixDraft.expect` made last; it continues `ids`. Unused in the pool.
        self.draft_tokens: list[DraftToken] = []

    def extend(self, ids: Sequence[int]) -> None:
        for id in ids:
            end = len(self.ids)
            self.ids.append(id)
            for n in self.grams:
                if n <= end + 1:
                    self.ends[tuple(self.ids[-n:])].append(end)

    def longest_matches(self, context: Sequence[int]) -> tuple[int, list[int]]:
        """(length, positions): how many tokens of the end of `context` the longest matches have,
        and the positions after these matches, the latest first. Compared are the latest occurrences
        of the longest indexed n-gram that `context` ends with, without one at the text's end, which
        nothing follows."""
        ends = []
        for n in self.grams:
            latest = self.ends.get(tuple(context[-n:]), [])[-MAX_OCCURRENCES:][::-1]
            ends = [end for end in latest if end < len(self.ids) - 1]
            if ends:
                break
        lengths = []
        for end in ends:
            begin = max(0, end + 1 - len(context))
            before = self.ids[begin : end + 1]
            lengths.append(common_prefix(context[::-1], before[::-1]))
        longest = max(lengths, default=0)
        return longest, [end + 1 for end, length in zip(ends, lengths) if length == longest]

    def continuation(
        self,
        context: Sequence[int],
        depth: int,
        max_length: int,
    ) -> list[DraftToken]:
        """The tokens that most often followed the longest suffix of `context`, of at most `depth`
        tokens. A continuation that reaches the end of the text repeats."""
        longest, positions = self.longest_matches(context[-depth:])
        num_ids = len(self.ids)
        product = 1.0
        draft_tokens = []
        for i in range(min(FACTOR * longest, max_length)):
            counts = Counter(self.ids[position] for position in positions)
            token, count = counts.most_common(1)[0]  # of equally frequent ones the latest
            share = count / len(positions)
            product *= share
            if token == END or product < MIN_SHARE:
                break
            draft_tokens.append(DraftToken(token, share, longest + i))
            positions = [position + 1 for position in positions if self.ids[position] == token]
            # Until the loop ends, the draft counts as text that a continuation may run into.
            self.ids.append(token)
        del self.ids[num_ids:]
        return draft_tokens


class Acceptance:
    """Turns a token's share into a probability, share * accepted / shares. These are running sums
    by length_bits: of accepted tokens, and of the shares of drafted ones. They start with four
    tokens at 0.25 behind a match of one token, 0.63 behind two or three, 0.81 behind four to seven,
    near what texts of SmolLM2 showed. A match has at least one token, so the first number is
    unused."""

    def __init__(self):
        self.accepted = [4 * (1 - 1.5 / 2**bits) for bits in range(32)]
        self.shares = [4.0] * 32

    def observe(self, drafted: DraftToken, is_accepted: bool) -> None:
        bits = drafted.length_bits
        self.accepted[bits] = self.accepted[bits] * DECAY + is_accepted
        self.shares[bits] = self.shares[bits] * DECAY + drafted.share

    def probabilities(self, draft_tokens: Sequence[DraftToken]) -> list[float]:
        """For each token the probability that it and all before it are accepted."""
        product = 1.0
        products = []
        for token in draft_tokens:
            bits = token.length_bits
            product *= min(1.0, token.share * (self.accepted[bits] / self.shares[bits]))
            products.append(product)
        return products


class SuffixDraft(Drafter):
    """Drafts of all requests, made on the host before each step and aligned on the device.

    Only requests that share a memory read earlier answers (decoding/memory.py has the rule);
    others draft from their own text. `depth`: the longest match; `pool_tokens`: the pool's size."""

    auto_k = (*Drafter.auto_k, 16)  # copied text has long accepted drafts

    def __init__(self, depth: int = 24, pool_tokens: int = POOL_TOKENS):
        super().__init__()
        self.depth = depth
        self.pool_tokens = pool_tokens
        self.grams = GRAMS
        self.texts: dict[Request, IndexedText] = {}
        # The latest answers, and those before them; each holds up to half of pool_tokens.
        self.pool = [IndexedText(), IndexedText()]

    def setup(self, *args) -> None:
        super().setup(*args)
        self.texts = {}
        B, k_max = self.tokens.shape
        device = self.tokens.device
        # Tokens of a draft: those of a round, after those that the host may have yet to read.
        self.max_length = readback.host_lag(device) * (k_max + 1) + k_max
        # A row holds the last position that the host knew, the tokens drafted after it, and at
        # least one END.
        draft_rows = torch.full((B, self.max_length + 2), END, device=device)
        self.register_buffer("draft_rows", draft_rows, persistent=False)
        self.register_buffer("host_rows", draft_rows.cpu().clone(), persistent=False)

    def expect(self, requests: Sequence[Request], unread: int) -> list[list[float]]:
        for request in list(self.texts):
            if request.finish_reason is not None:
                self.remember(request)
        expected = []
        for request in requests:
            text = self.read(request)
            text.draft_tokens = self.best_continuation(text, request) if request.may_draft else []
            row = [len(text.ids) - 1, *(token.id for token in text.draft_tokens)]
            host_row = self.host_rows[request.slot.index]
            host_row.fill_(END)
            host_row[: len(row)] = torch.tensor(row)
            acceptance = request.memory.of(Acceptance)
            # Steps in flight may decide the first `unread` of these tokens.
            expected.append(acceptance.probabilities(text.draft_tokens)[unread:])
        return expected

    def best_continuation(self, text: IndexedText, request: Request) -> list[DraftToken]:
        """The continuation, from the text itself or the pool, with the most tokens expected."""
        memory = request.memory
        sources = (text, *self.pool) if memory.is_shared else (text,)
        continuations = [
            source.continuation(text.ids, self.depth, self.max_length) for source in sources
        ]
        acceptance = memory.of(Acceptance)
        return max(continuations, key=lambda tokens: sum(acceptance.probabilities(tokens)))

    def read(self, request: Request) -> IndexedText:
        """The request's text with its newest tokens. These also update the acceptance of its
        draft."""
        if request not in self.texts:
            self.texts[request] = IndexedText(self.grams)
            self.texts[request].extend(request.prompt)
        text = self.texts[request]
        tokens = request.tokens[len(text.ids) - len(request.prompt) :]
        for drafted, token in zip(text.draft_tokens, tokens):
            is_accepted = drafted.id == token
            request.memory.of(Acceptance).observe(drafted, is_accepted)
            if not is_accepted:
                break
        text.extend(tokens)
        return text

    def remember(self, request: Request) -> None:
        """Move an answer and the end of its prompt to the newer half of the pool. If that is full,
        drop the older half."""
        del self.texts[request]
        ids = [*request.prompt[-self.depth :], *request.tokens, END]
        size = self.pool_tokens // 2
        if not request.tokens or len(ids) > size:
            return
        if len(self.pool[0].ids) + len(ids) > size:
            self.pool = [IndexedText(), self.pool[0]]
        self.pool[0].extend(ids)

    def propose(self, batch: nn.Module, plan) -> Draft:
        # A pinned copy, because the next step is planned before the device has read this one.
        rows = self.host_rows.pin_memory() if self.draft_rows.is_cuda else self.host_rows
        self.draft_rows.copy_(rows, non_blocking=self.draft_rows.is_cuda)
        self.maybe_compile(self.align, batch, plan.k)(batch, plan.k)
        return Draft(self.tokens, self.probs).cut(plan.k)

    def align(self, batch: nn.Module, k: int) -> None:
        """Propose the next k tokens of each row's draft, if it agrees with the tokens decided since
        it was made. An example: the host knew positions up to 7 and drafted a, b, c, so that the
        row is 7, a, b, c, END. If the device has decided a since, b and c are proposed; if it was
        another token, nothing."""
        begin = self.draft_rows[:, :1] + 1  # (B, 1) position of the first drafted token
        drafted = self.draft_rows[:, 1:]  # (B, W), END at last
        W = drafted.size(1)
        pos = batch.pos[:, None]  # (B, 1)
        ahead = torch.arange(W, device=pos.device)
        drafted_pos = begin + ahead  # (B, W)
        last_pos = batch.tokens.size(1) - 1
        decided = batch.tokens.gather(1, drafted_pos.clamp(max=last_pos))  # (B, W)
        agrees = (decided == drafted) | (drafted_pos > pos)  # (B, W)
        may_draft = agrees.all(dim=1, keepdim=True) & ~batch.done[:, None]  # (B, 1)
        index = pos + 1 - begin + ahead[:k]  # (B, k)
        tokens = drafted.gather(1, index.clamp(0, W - 1))
        is_drafted = may_draft & (tokens != END)
        # Verification runs the positions without a draft too; the last token's states are known to
        # be finite.
        tokens = torch.where(is_drafted, tokens, batch.tokens.gather(1, pos))
        self.tokens[:, :k] = tokens
        self.probs[:, :k] = 0.0
        self.probs.scatter_(2, tokens[..., None], is_drafted.float()[..., None])


class SuffixSource(DraftSource):
    """`--draft suffix[:N]`: matches have up to N tokens, by default as many as the class says."""

    draft_class = SuffixDraft

    def check(self, config: Config) -> None:
        value = self.origin
        self.args = [read_count(value, "tokens to match")] if value else []

    def load(self, target: Transformer, tokenizer) -> SuffixDraft:
        return self.draft_class(*self.args)
