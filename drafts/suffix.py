"""Suffix decoding (arXiv:2411.04975): a draft without a model, from the texts of this and earlier requests.

    Text            tokens with an index, which finds the tokens that followed the longest suffix of a context
    SuffixDraft     drafts from the request's text and from earlier answers, and their expected acceptance

The index is dicts on the host, which also chooses K: one look-up takes some 50 microseconds in a pool of any size. It
reads tokens that the host receives anyway. On a GPU these arrive late, and a draft is used only if it agrees with the
tokens decided since. This file knows token ids alone.
"""

import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

import decoding.timing as timing
from decoding.scheduler import Request, common_prefix
from model import Config, Transformer
from speculative import DECAY, Drafter

DEPTH = 24  # the longest match
GRAMS = (6, 3, 1)  # lengths of the indexed n-grams; a look-up takes the longest with an earlier occurrence
MAX_OCCURRENCES = 16  # of an n-gram; the latest are counted
MAX_VISITED = 64  # of an n-gram; a pool may hold thousands of the request's own seed
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
    """Tokens and an index by n-gram length: the last position of each n-gram, and for each position the one before of
    the same n-gram."""

    def __init__(self):
        self.ids: list[int] = []
        self.seeds: list[int | None] = []  # seed of the noise that drew a token; None for greedy text
        self.index: dict[int, tuple[dict, list]] = {n: ({}, []) for n in GRAMS}

    def extend(self, ids: Sequence[int], seeds: Sequence[int | None]) -> None:
        self.seeds += seeds
        for id in ids:
            self.ids.append(id)
            for n, (last, before) in self.index.items():
                gram = tuple(self.ids[-n:])
                before.append(last.get(gram))
                last[gram] = len(before) - 1

    def occurrences(self, context: Sequence[int], n: int, seed: int | None) -> Iterator[int]:
        """Positions where the last n tokens of `context` end, the latest first, without tokens of this seed."""
        last, before = self.index[n]
        end, num_visited = last.get(tuple(context[-n:])), 0
        while end is not None and num_visited < MAX_VISITED:
            num_visited += 1
            if end + 1 < len(self.ids) and (seed is None or self.seeds[end] != seed):
                yield end
            end = before[end]

    def continuation(self, context: Sequence[int], depth: int, max_length: int, seed: int | None = None) -> list[Guess]:
        """The tokens that most often followed the longest suffix of `context`, of at most `depth` tokens. A
        continuation that reaches the end of the text repeats."""
        by_gram = (self.occurrences(context, n, seed) for n in GRAMS if n <= min(depth, len(context)))
        positions = next(filter(None, ([*itertools.islice(some, MAX_OCCURRENCES)] for some in by_gram)), [])
        suffix, num_ids = context[: -depth - 1 : -1], len(self.ids)
        lengths = [common_prefix(suffix, self.ids[max(0, end + 1 - depth) : end + 1][::-1]) for end in positions]
        longest, product, guesses = max(lengths, default=0), 1.0, []
        ahead = [end + 1 for end, length in zip(positions, lengths) if length == longest]
        while len(guesses) < min(FACTOR * longest, max_length):
            token, count = Counter(self.ids[at] for at in ahead).most_common(1)[0]  # the latest of several
            product *= (share := count / len(ahead))
            if token == END or product < MIN_SHARE:
                break
            guesses.append(Guess(token, share, longest + len(guesses)))
            ahead = [at + 1 for at in ahead if self.ids[at] == token]
            self.ids.append(token)
        del self.ids[num_ids:]
        return guesses


class SuffixDraft(Drafter):
    """Drafts of all requests, made on the host before each step and aligned on the device.

    A sampled request reads no earlier answer of its seed. The same noise drew that answer, and the token after a
    rejection would not follow the target's distribution. `depth`: the longest match; `pool_tokens`: the pool's size."""

    auto_k = (*Drafter.auto_k, 16)  # copied text has long accepted drafts

    def __init__(self, depth: int = DEPTH, pool_tokens: int = POOL_TOKENS):
        super().__init__()
        if depth < 1:
            raise ValueError(f"suffix:{depth} must match at least 1 token")
        self.depth, self.pool_tokens = depth, pool_tokens
        self.texts: dict[Request, Text] = {}
        self.guesses: dict[Request, list[Guess]] = {}  # made before the request's newest tokens
        self.pool = [Text(), Text()]  # the latest answers; those before them; each up to half of pool_tokens
        # Running sums by the bits of the match's length. They start near the acceptance measured on SmolLM2.
        self.accepted, self.shares = [4 * (1 - 1.5 / 2**bits) for bits in range(32)], [4.0] * 32

    def setup(self, state: nn.Module, k_max: int, target, maybe_compile: Callable) -> None:
        super().setup(state, k_max, target, maybe_compile)
        self.texts, self.guesses = {}, {}
        G = timing.host_lag(state.pos.device) * (k_max + 1) + k_max
        # For each row the last position of the text that the host knew, and G tokens drafted after it.
        drafts = torch.full((state.pos.size(0), 1 + G), END, device=state.pos.device)
        self.register_buffer("drafts", drafts, persistent=False)

    def expect(self, requests: Sequence[Request], unread: int) -> list[list[float]]:
        for request in [request for request in self.texts if request.finish_reason is not None]:
            self.remember(request)
        B, G = self.drafts.size(0), self.drafts.size(1) - 1
        rows, expected = [[END] * (1 + G) for _ in range(B)], []
        for request in requests:
            text, seed = self.read(request), noise_seed(request)
            drafts = [other.continuation(text.ids, self.depth, G, seed) for other in (text, *self.pool)]
            guesses = max(drafts, key=lambda guesses: sum(self.acceptances(guesses)))
            self.guesses[request] = guesses
            if request.draft:
                row = [len(text.ids) - 1, *(guess.token for guess in guesses)]
                rows[request.slot.index][: len(row)] = row
            expected.append(self.acceptances(guesses)[unread:] if request.draft else [])
        on_host = torch.tensor(rows, pin_memory=self.drafts.device.type == "cuda")
        self.drafts.copy_(on_host, non_blocking=True)
        return expected

    def read(self, request: Request) -> Text:
        """The request's text with its newest tokens. These also update the acceptance of its draft."""
        if request not in self.texts:
            self.texts[request], self.guesses[request] = Text(), []
            self.texts[request].extend(request.prompt, [None] * len(request.prompt))
        text = self.texts[request]
        tokens = request.tokens[len(text.ids) - len(request.prompt) :]
        for guess, token in zip(self.guesses[request], tokens):
            bits, is_accepted = guess.length.bit_length(), guess.token == token
            self.accepted[bits] = self.accepted[bits] * DECAY + is_accepted
            self.shares[bits] = self.shares[bits] * DECAY + guess.share
            if not is_accepted:
                break
        text.extend(tokens, [None] * len(tokens))
        return text

    def acceptances(self, guesses: Sequence[Guess]) -> list[float]:
        """For each token the probability that it and all before it are accepted."""
        rates = [accepted / shares for accepted, shares in zip(self.accepted, self.shares)]
        accepted = (min(1.0, guess.share * rates[guess.length.bit_length()]) for guess in guesses)
        return list(itertools.accumulate(accepted, operator.mul))

    def remember(self, request: Request) -> None:
        """Move an answer and the end of its prompt to the pool. If its newer half is full, drop the older half."""
        ids = [*request.prompt[-self.depth :], *request.tokens, END]
        if request.tokens:
            self.add_to_pool(ids, [noise_seed(request)] * len(ids))
        del self.texts[request], self.guesses[request]

    def add_to_pool(self, ids: Sequence[int], seeds: Sequence[int | None]) -> None:
        """Add a text to the newer half of the pool; nothing if it is longer than a half."""
        if len(self.pool[0].ids) + len(ids) > self.pool_tokens // 2:
            self.pool = [Text(), self.pool[0]]
        if len(ids) <= self.pool_tokens // 2:
            self.pool[0].extend(ids, seeds)

    def propose(self, state: nn.Module) -> tuple[Tensor, Tensor]:
        self.maybe_compile(self.align, state, state.k)(state, state.k)
        return self.tokens[:, : state.k], self.probs[:, : state.k]

    def align(self, state: nn.Module, k: int) -> None:
        """Propose the next k tokens of each row's draft, if it agrees with the tokens decided since it was made."""
        begin, draft = self.drafts[:, :1] + 1, self.drafts[:, 1:]  # (B, 1), (B, G)
        G, ahead = draft.size(1), torch.arange(draft.size(1), device=draft.device)
        num_since = state.pos[:, None] + 1 - begin  # (B, 1)
        since = state.tokens.gather(1, (begin + ahead).clamp(max=state.tokens.size(1) - 1))  # (B, G)
        agrees = ((since == draft) | (ahead >= num_since)).all(dim=1, keepdim=True) & ~state.done[:, None]  # (B, 1)
        index = num_since + ahead[:k]  # (B, k)
        tokens = draft.gather(1, index.clamp(0, G - 1))
        is_drafted = agrees & (index >= 0) & (index < G) & (tokens != END)
        # Verification runs the positions without a draft too; the last token's states are known to be finite.
        self.tokens[:, :k] = torch.where(is_drafted, tokens, state.tokens.gather(1, state.pos[:, None]))
        self.probs[:, :k] = 0.0
        self.probs.scatter_(2, self.tokens[:, :k, None], is_drafted.float()[..., None])


def noise_seed(request: Request) -> int | None:
    """The seed of the noise that draws the request's tokens; None for greedy ones, which need no noise."""
    return None if request.sampling.is_greedy else request.seed


def from_spec(value: str, config: Config) -> Callable[[Transformer], SuffixDraft]:
    """`--draft suffix` or `suffix:N`. ValueError for an N that is no number of tokens."""
    if value and not value.isdigit():
        raise ValueError(f"{value!r} is no number of tokens to match")
    drafter = SuffixDraft(int(value or DEPTH))
    return lambda model: drafter
