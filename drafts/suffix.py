"""Suffix decoding (arXiv:2411.04975): a draft without a model, from the texts of this and earlier
requests.

    Text            tokens with an index, which finds the tokens that followed the longest suffix of
                    a context
    SuffixDraft     drafts from the request's text and from earlier answers, and their expected
                    acceptance

The index is a set of dicts on the host, and the host also chooses K. A lookup takes about 50 us
whatever the pool's size, and needs only tokens that the host receives anyway. On a GPU those arrive
a few steps late, so a draft is used only if it agrees with the tokens decided in the meantime. This
file knows token ids alone.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

import decoding.readback as timing
from decoding.scheduler import Request, common_prefix
from speculative import DECAY, Drafter

GRAMS = (6, 3, 1)  # lengths of the indexed n-grams; a look-up takes the longest that occurred
MAX_OCCURRENCES = 32  # of an n-gram; a look-up visits the latest
MIN_SHARE = 0.1  # a draft ends where the product of its shares falls below
FACTOR = 2  # a draft has at most FACTOR * match length tokens
POOL_TOKENS = 1 << 17  # tokens of earlier answers, some 400 bytes each
END = -1  # behind each text of the pool, and behind a draft


class Guess(NamedTuple):
    """A drafted token, its share of the continuations, and the length of the match before it."""

    token: int
    share: float
    length: int


class Text:
    """Tokens, and the positions where each of their n-grams ends."""

    def __init__(self):
        self.ids: list[int] = []
        self.seeds: list[int | None] = []  # of the noise that drew a token; None for greedy text
        self.ends: dict[tuple[int, ...], list[int]] = defaultdict(list)
        self.guesses: list[Guess] = []  # how it goes on, made before its newest tokens

    def extend(self, ids: Sequence[int], seed: int | None = None) -> None:
        for id in ids:
            end = len(self.ids)
            self.ids.append(id)
            self.seeds.append(seed)
            for n in GRAMS:
                if n <= end + 1:
                    self.ends[tuple(self.ids[-n:])].append(end)

    def occurrences(
        self,
        context: Sequence[int],
        n: int,
        seed: int | None,
    ) -> list[int]:
        """Positions where the last n tokens of `context` end, the latest first, without tokens of
        this seed."""
        ends = self.ends.get(tuple(context[-n:]), [])
        latest = ends[: -MAX_OCCURRENCES - 1 : -1]
        if seed is not None:
            latest = [end for end in latest if self.seeds[end] != seed]
        last = len(self.ids) - 1
        return [end for end in latest if end < last]  # the last token has no continuation

    def longest_matches(
        self,
        context: Sequence[int],
        depth: int,
        seed: int | None,
    ) -> tuple[int, list[int]]:
        """The length of the longest suffix of `context`, of at most `depth` tokens, that ends among
        the occurrences of its longest indexed n-gram; and the positions after it."""
        suffix = context[: -depth - 1 : -1]
        for n in GRAMS:
            ends = self.occurrences(context, n, seed) if n <= len(suffix) else []
            if ends:
                break
        lengths = []
        for end in ends:
            begin = max(0, end + 1 - depth)
            lengths.append(common_prefix(suffix, self.ids[begin : end + 1][::-1]))
        longest = max(lengths, default=0)
        return longest, [end + 1 for end, length in zip(ends, lengths) if length == longest]

    def continuation(
        self,
        context: Sequence[int],
        depth: int,
        max_length: int,
        seed: int | None = None,
    ) -> list[Guess]:
        """The tokens that most often followed the longest suffix of `context`, of at most `depth`
        tokens. A continuation that reaches the end of the text repeats."""
        longest, ahead = self.longest_matches(context, depth, seed)
        num_ids = len(self.ids)
        product = 1.0
        guesses = []
        for length in range(longest, longest + min(FACTOR * longest, max_length)):
            counts = Counter(self.ids[position] for position in ahead)
            token, count = counts.most_common(1)[0]  # the latest of several
            share = count / len(ahead)
            product *= share
            if token == END or product < MIN_SHARE:
                break
            guesses.append(Guess(token, share, length))
            ahead = [position + 1 for position in ahead if self.ids[position] == token]
            self.ids.append(token)
        del self.ids[num_ids:]
        return guesses


class SuffixDraft(Drafter):
    """Drafts of all requests, made on the host before each step and aligned on the device.

    A sampled request never reads an earlier answer with its own seed: that answer was drawn with
    the same noise, so the draft would be correlated with it, and the token after a rejection would
    no longer follow the target's distribution. `depth`: the longest match; `pool_tokens`: the
    pool's size."""

    auto_k = (*Drafter.auto_k, 16)  # copied text has long accepted drafts

    def __init__(self, depth: int = 24, pool_tokens: int = POOL_TOKENS):
        super().__init__()
        self.depth = depth
        self.pool_tokens = pool_tokens
        self.texts: dict[Request, Text] = {}
        # The latest answers, and those before them; each holds up to half of pool_tokens.
        self.pool = [Text(), Text()]
        # Running sums by the bits of the match's length. They start near the acceptance measured on
        # SmolLM2.
        self.accepted = [4 * (1 - 1.5 / 2**bits) for bits in range(32)]
        self.shares = [4.0] * 32

    def setup(
        self,
        state: nn.Module,
        k_max: int,
        target,
        maybe_compile: Callable,
    ) -> None:
        super().setup(state, k_max, target, maybe_compile)
        self.texts = {}
        device = state.pos.device
        G = timing.host_lag(device) * (k_max + 1) + k_max
        # Of each row the last position that the host knew, up to G tokens drafted after it, and at
        # least one END.
        drafts = torch.full((state.pos.size(0), G + 2), END, device=device)
        self.register_buffer("draft_rows", drafts, persistent=False)

    def expect(self, requests: Sequence[Request], unread: int) -> list[list[float]]:
        for request in list(self.texts):
            if request.finish_reason is not None:
                self.remember(request)
        B, width = self.draft_rows.shape
        rows = [[END] * width for _ in range(B)]
        expected = []
        for request in requests:
            text = self.read(request)
            text.guesses = []
            if request.may_draft:
                text.guesses = self.best_guesses(text, noise_seed(request), width - 2)
            row = [len(text.ids) - 1, *(guess.token for guess in text.guesses)]
            rows[request.slot.index][: len(row)] = row
            expected.append(self.acceptances(text.guesses)[unread:])
        on_host = torch.tensor(rows, pin_memory=self.draft_rows.device.type == "cuda")
        self.draft_rows.copy_(on_host, non_blocking=True)
        return expected

    def best_guesses(
        self,
        text: Text,
        seed: int | None,
        max_length: int,
    ) -> list[Guess]:
        """The continuation, from the text itself or the pool, with the most tokens expected."""
        drafts = [
            source.continuation(text.ids, self.depth, max_length, seed)
            for source in (text, *self.pool)
        ]
        return max(drafts, key=lambda guesses: sum(self.acceptances(guesses)))

    def read(self, request: Request) -> Text:
        """The request's text with its newest tokens. These also update the acceptance of its
        draft."""
        if request not in self.texts:
            self.texts[request] = Text()
            self.texts[request].extend(request.prompt)
        text = self.texts[request]
        tokens = request.tokens[len(text.ids) - len(request.prompt) :]
        for guess, token in zip(text.guesses, tokens):
            bits = guess.length.bit_length()
            is_accepted = guess.token == token
            self.accepted[bits] = self.accepted[bits] * DECAY + is_accepted
            self.shares[bits] = self.shares[bits] * DECAY + guess.share
            if not is_accepted:
                break
        text.extend(tokens)
        return text

    def acceptances(self, guesses: Sequence[Guess]) -> list[float]:
        """For each token the probability that it and all before it are accepted."""
        product = 1.0
        products = []
        for guess in guesses:
            bits = guess.length.bit_length()
            product *= min(1.0, guess.share * (self.accepted[bits] / self.shares[bits]))
            products.append(product)
        return products

    def remember(self, request: Request) -> None:
        """Move an answer and the end of its prompt to the newer half of the pool. If that is full,
        drop the older half."""
        del self.texts[request]
        ids = [*request.prompt[-self.depth :], *request.tokens, END]
        size = self.pool_tokens // 2
        if not request.tokens or len(ids) > size:
            return
        if len(self.pool[0].ids) + len(ids) > size:
            self.pool = [Text(), self.pool[0]]
        self.pool[0].extend(ids, noise_seed(request))

    def propose(self, state: nn.Module) -> tuple[Tensor, Tensor]:
        self.maybe_compile(self.align, state, state.k)(state, state.k)
        return self.proposal(state.k)

    def align(self, state: nn.Module, k: int) -> None:
        """Propose the next k tokens of each row's draft, if it agrees with the tokens decided since
        it was made."""
        begin = self.draft_rows[:, :1] + 1  # (B, 1) position of the first drafted token
        draft = self.draft_rows[:, 1:]  # (B, G + 1), END at last
        num_columns = draft.size(1)
        pos = state.pos[:, None]  # (B, 1)
        num_since = pos + 1 - begin  # (B, 1)
        ahead = torch.arange(num_columns, device=pos.device)
        position = (begin + ahead).clamp(max=state.tokens.size(1) - 1)
        since = state.tokens.gather(1, position)  # (B, G + 1)
        agrees = (since == draft) | (ahead >= num_since)
        may_draft = agrees.all(dim=1, keepdim=True) & ~state.done[:, None]  # (B, 1)
        index = num_since + ahead[:k]  # (B, k)
        tokens = draft.gather(1, index.clamp(0, num_columns - 1))
        is_drafted = may_draft & (tokens != END)
        # Verification runs the positions without a draft too; the last token's states are known to
        # be finite.
        tokens = torch.where(is_drafted, tokens, state.tokens.gather(1, pos))
        self.tokens[:, :k] = tokens
        self.probs[:, :k] = 0.0
        self.probs.scatter_(2, tokens[..., None], is_drafted.float()[..., None])


def noise_seed(request: Request) -> int | None:
    """The seed of the noise that draws the request's tokens; None for greedy ones, which need no
    noise."""
    return None if request.sampling.is_greedy else request.seed
