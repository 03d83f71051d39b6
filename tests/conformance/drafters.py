"""check_drafter: is the text the target's, whatever a drafter does, and is each token that it
proposes drawn from the distribution that it reports?

    recorded, Round     what a drafter was asked, and what it proposed
    with_other_states   a drafter that is asked twice, with another state of the target
    OneRow              a drafter as speculative.speculate asks it
    round_law           the exact law of a round's tokens, by enumeration
    fresh_q             q of a drafter that has read a text as a prompt alone
"""

import collections
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor

import speculative
from decoding.draft_length import DraftLength
from decoding.engine import Engine
from decoding.memory import MemoryPlan
from decoding.meter import Decided
from decoding.prefill import count_draft_positions, next_prompt, prefill_draft
from decoding.sampling import ACCEPT, PLAIN_DRAW, Sampling
from drafts.base import Draft, Drafter
from model import Transformer
from speculative import speculate
from tests.conformance.targets import PROMPTS, one_thread, pair, plain_text, texts_of, tiny
from tests.joint_laws import joint_law, martingale, p_value

FALSE_ALARM = 1e-7  # of each statistical check
MAX_LENGTH = 64  # positions of a text
NEAR_TIE = 1e-3  # two logits that rounding may exchange
Q_ERROR = 1e-3  # of a probability computed in two ways, as a share of the largest
NUM_TEXTS = 256  # sampled
NUM_TOKENS = 12  # of each
TAIL = 3  # its first tokens, whose joint law is known
NUM_RECOMPUTED = 24  # rows of rounds
MAX_OUTCOMES = 128  # that are enumerated
FAR = 8  # positions from a text's beginning
MAX_VALUES = 8  # of a token, after which the next ones are counted: its most frequent

# ---------------------------------------------------------------------------------------- records


class Round(NamedTuple):
    """One call of `propose`."""

    texts: list[list[int]]  # of each row up to its last decided token; [] where it is done
    tokens: list[list[int]]  # (B, K)
    q: Tensor  # (B, K, V)
    purposes: frozenset[int]  # of the noise that it took


class OwnDraft(Drafter):
    """Any object with `propose`, as a Drafter."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def propose(self, batch, plan) -> Draft:
        return Draft(*self.inner.propose(batch, plan))


def recorded(drafter_class: type[Drafter]) -> type[Drafter]:
    """The class, noting each Round in `seen`, which views of its rows share."""

    class Recorded(drafter_class):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.seen = []

        def propose(self, batch, plan):
            lengths = (batch.pos + 1).masked_fill(batch.done, 0).tolist()
            texts = [row[:n].tolist() for row, n in zip(batch.tokens, lengths)]
            noise = batch.noise
            purposes = set()

            def noted(pos, purpose=PLAIN_DRAW):
                purposes.add(purpose)
                return noise(pos, purpose)

            with mock.patch.object(batch, "noise", noted):
                tokens, q = super().propose(batch, plan)
            self.seen.append(Round(texts, tokens.tolist(), q.clone(), frozenset(purposes)))
            return Draft(tokens, q)

    return Recorded


def made(make: Callable, target: Transformer) -> Drafter:
    """A new drafter that records its rounds."""
    drafter = make(target)
    if not isinstance(drafter, Drafter):
        drafter = OwnDraft(drafter)
    drafter.__class__ = recorded(type(drafter))
    drafter.seen = []
    return drafter


class OneRow:
    """A drafter of the engine, as `speculate` asks it. It runs the passes of an engine's rounds, so
    that q has the same bits. With other bits, a near tie could decide another token."""

    def __init__(self, target, drafter, prompt, k: int, S: int):
        self.engine = Engine(target, 1, S, drafter=drafter, speculate_k=k)
        self.engine.add_request(prompt, sampling=Sampling(0), max_new_tokens=S - len(prompt))
        self.request = next_prompt(self.engine)
        self.request.memory.draft_length = DraftLength(k)

    def propose(self, text, plan):
        engine, request = self.engine, self.request
        batch, target, drafter = engine.rows(0, 1)
        length = text.length
        num_before = len(request.tokens)
        request.tokens = text.tokens[0, len(request.prompt) : length].tolist()
        if num_before:  # a round has come before, whose passes the draft's cache has
            plan_of_round = MemoryPlan(
                request.memory, (request,), num_first_inputs=drafter.num_first_inputs
            )
            decided = Decided(0, request, request.tokens[num_before:])
            count_draft_positions(plan_of_round, [decided])
        request.sampling = text.sampling
        batch.tokens[:, :length] = text.tokens[:, :length]
        batch.pos.copy_(text.pos)
        batch.seed.copy_(text.seed)
        batch.values[:] = text.values
        batch.done.fill_(False)
        batch.draft_limit.fill_(plan.k)
        batch.sampling_path = text.sampling_path
        if not num_before:
            target.prefill(batch.tokens, 0, length - 1)
            prefill_draft(engine, request.slot, length - 1)
        drafter.expect([request], 0)
        draft = drafter.propose(batch, plan._replace(requests=[(0, request)]))
        # The engine's own verification, for a draft that reads the target's states or caches.
        pos = text.pos[:, None] + torch.arange(plan.k + 1)  # (1, K + 1)
        last = text.tokens.gather(1, pos[:, :1])  # (1, 1)
        tokens = torch.cat((last, draft.tokens), dim=1)  # (1, K + 1)
        target.model.hidden(tokens, pos, target.slice_to(length + plan.k))
        return draft


def check(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)


# -------------------------------------------------------------------------------------- the check


def check_drafter(
    make: Callable[[Transformer], object],
    target: Transformer | None = None,
    *,
    twin: Callable | None = None,
    k: int = 3,
) -> None:
    """Check a drafter on a CPU: make(target) returns a new one for a float32 Transformer. Without
    `target`, it gets two tiny random ones, of 61 and of 4 tokens.

    - Greedy text is that of generate.decode: in batches of unequal prompts, in slots that several
      requests use in turn while others are parked, with stop tokens inside a round, and up to the
      context's end.
    - At a fixed K, the text of one prompt is that of speculative.speculate, sampled too.
    - A sampled row is what its prompt alone gives.
    - What `propose` returns has the right shapes, and each token is drawn from its q, whatever was
      drawn before it: by the sums of what is drawn, against Bernstein's inequality. The numbers for
      it are not the target's.
    - The text has the target's law: exactly, by enumerating a round, and in a sample, by a
      chi-square test. This takes a target of at most 5 tokens.
    - q is what the drafter reports for the same text without anything in its caches; with
      `twin(tokens, drafted, sampling) -> (K, V)`, what this function computes in float64.
    - A drafter that reads hidden states of the target drafts otherwise when the newest is another.

    Without `twin`, q is compared with that of the same drafter, so that what it does wrong in every
    round is not seen: a last norm left out, heads or layers in another order, no temperature. A
    drafter that reads hidden states needs one. `tokens` ends with the last decided token; q row i
    is the law of drafted[i], given those before it. The kit's own target is targets.pair()[0], the
    same at each call, and targets.hidden_states has its states.

    The statistical checks refuse a correct drafter with a probability below 1e-6 in all. A drafter
    that learns from one request for the next is checked without that.
    """
    large = target or pair()[0]
    small = target or tiny(3)
    with one_thread():
        check_greedy(make, large, k)
        check_rows_alone(make, large, k)
        texts, rounds = sampled_rounds(make, small, k)
        check_proposals(rounds, small.config.vocab_size)
        check_draws(rounds)
        check_law(texts, rounds, small, k)
        check_caches(make, large, k, twin)
        check_newest_state(make, large, k, twin)
        check_one_prompt(make, large, k)


# ----------------------------------------------------------------------------------------- greedy


def fitting(prompts: Sequence[Sequence[int]], model: Transformer) -> list[list[int]]:
    """The prompts in ids of this model."""
    return [[id % model.config.vocab_size for id in prompt] for prompt in prompts]


def check_greedy(make: Callable, model: Transformer, k: int) -> None:
    S = min(MAX_LENGTH, model.config.max_seq_length)
    longest = fitting([(PROMPTS[1] * S)[: S // 2]], model)[0]
    prompts = fitting(PROMPTS, model)
    n = min(S - max(map(len, prompts)), 24)
    plain = [plain_text(model, prompt, n) for prompt in prompts]

    for depth in (1, k):
        engine = Engine(model, len(prompts), S, drafter=made(make, model), speculate_k=depth)
        compare(f"a batch of {len(prompts)} rows, K = {depth}", engine, prompts, plain)

    budgets = [n, n // 4, n // 2, 1, n // 3, n - 1, 2]
    requests = [prompts[i % len(prompts)] for i in range(len(budgets))]
    cut = [plain[i % len(prompts)][:budget] for i, budget in enumerate(budgets)]
    engine = Engine(model, 2, S, drafter=made(make, model), speculate_k=k)
    compare("seven requests in two slots, some of them parked", engine, requests, cut)

    stop_ids = {plain[0][n // 3], plain[1][n // 4]}
    cut = [until_stop(text, stop_ids) for text in plain]
    compare(f"stop tokens {sorted(stop_ids)}", engine, prompts, cut, stop_ids, n)

    ends = [prompts[1], longest]
    whole = [plain_text(model, prompt, S - len(prompt)) for prompt in ends]
    compare(f"texts up to the context's end, {S} positions", engine, ends, whole)


def until_stop(text: list[int], stop_ids: set[int]) -> list[int]:
    """Up to the first stop token, which comes last."""
    lengths = (i + 1 for i, id in enumerate(text) if id in stop_ids)
    return text[: next(lengths, len(text))]


def compare(
    case: str,
    engine: Engine,
    prompts: list[list[int]],
    want: list[list[int]],
    stop_ids=(),
    max_new_tokens: int | None = None,
) -> None:
    """AssertionError names the first token in which greedy text is not plain text, unless the
    target's two best logits are closer than rounding can tell."""
    budgets = max_new_tokens or [len(text) for text in want]
    got = texts_of(engine, prompts, sampling=Sampling(0), max_new_tokens=budgets, stop_ids=stop_ids)
    for row, (mine, plain) in enumerate(zip(got, want, strict=True)):
        if mine == plain:
            continue
        pairs = itertools.zip_longest(mine, plain)
        i = next(i for i, (a, b) in enumerate(pairs) if a != b)
        drafted, decoded = (dict(enumerate(text)).get(i, "nothing") for text in (mine, plain))
        gap = logit_gap(engine.model, prompts[row] + plain[:i])
        check(
            gap < NEAR_TIE and "nothing" not in (drafted, decoded),
            f"{case}: row {row} differs from plain decoding at its token {i}, position"
            f" {len(prompts[row]) + i}: drafted {drafted}, plain {decoded} (the two best logits are"
            f" {gap:.3g} apart). Verification never lets a draft change greedy text: look for what"
            f" `propose` writes to batch.tokens up to batch.pos, or to the target's caches before"
            f" it, and at speculative.accept if that has changed",
        )


def logit_gap(model: Transformer, text: list[int]) -> float:
    with torch.inference_mode():
        logits = model(torch.tensor([text]), torch.arange(len(text)))[0, -1]
    best, second = logits.topk(2).values.tolist()
    return best - second


def check_one_prompt(make: Callable, model: Transformer, k: int) -> None:
    prompt = fitting(PROMPTS, model)[0]
    S = min(MAX_LENGTH, model.config.max_seq_length)
    drafter = made(make, model)
    samplings = [Sampling(0), Sampling(1)]
    if any(isinstance(part, Drafter) for part in drafter.children()):
        del samplings[1]  # which draft it takes may depend on how many tokens were accepted
    for sampling in samplings:
        settings = {"sampling": sampling, "seed": 5, "max_new_tokens": 24}
        drafter = OneRow(model, made(make, model), prompt, k, S)
        want = list(speculate(model, drafter, prompt, k=k, **settings))
        engine = Engine(model, 1, S, drafter=made(make, model), speculate_k=k)
        (got,) = texts_of(engine, [prompt], **settings)
        check(
            got == want,
            f"temperature {sampling.temperature}, K = {k}: the engine decodes {got}, and"
            f" speculative.speculate {want}. Look at what `propose` and `prefill` keep between"
            f" rounds besides the text",
        )


def check_rows_alone(make: Callable, model: Transformer, k: int) -> None:
    settings = {"sampling": Sampling(0.7), "seed": 5, "max_new_tokens": 12}
    prompts = fitting(PROMPTS, model)
    together = Engine(model, len(prompts), MAX_LENGTH, drafter=made(make, model), speculate_k=k)
    rows = texts_of(together, prompts, **settings)
    for row, prompt in enumerate(prompts):
        alone = Engine(model, 1, MAX_LENGTH, drafter=made(make, model), speculate_k=k)
        text = texts_of(alone, [prompt], **settings)[0]
        check(
            rows[row] == text,
            f"sampled at a fixed K, row {row} of a batch is {rows[row]}, and its prompt alone gives"
            f" {text}: its draft depends on other rows. Look at buffers without a row for each"
            f" slot, at `shared`, and at what is kept between requests",
        )


# ------------------------------------------------------------------------------- q without caches


def check_caches(make: Callable, model: Transformer, k: int, twin: Callable | None) -> None:
    """In ragged batches, so hot that rows accept different numbers of tokens."""
    hot = Sampling(3)
    prompts = fitting(PROMPTS, model)
    drafter = made(make, model)
    S = min(MAX_LENGTH, model.config.max_seq_length)
    engine = Engine(model, len(prompts), S, drafter=drafter, speculate_k=k)
    texts_of(engine, prompts, sampling=hot, seed=5, max_new_tokens=20)
    how = "by `twin`" if twin else "on the same text without anything in its caches"
    each_round = (
        ", for a norm that is left out, heads or layers in another order, the state of another"
        " layer, and a temperature that is not applied"
    )
    for number, row in after_most_tokens(drafter.seen):
        each = drafter.seen[number]
        text, drafted, q = each.texts[row], each.tokens[row], each.q[row].double()
        if twin:
            want = twin(text, drafted, hot)
        else:
            want = fresh_q(make, model, text, drafted, hot)
        if not len(want) or not q[0].any():
            continue
        error = (q[: len(want)] - want).abs().max() / want.max()
        check(
            bool(error < Q_ERROR),
            f"round {number}, row {row}: after {len(text)} tokens the reported q is"
            f" {error:.2g} from q {how}. Look for a hidden state or a key one position off, for"
            f" positions that no pass has written since their tokens were rejected, for what a"
            f" slot's last request left behind{each_round if twin else ''}",
        )


def check_newest_state(make: Callable, model: Transformer, k: int, twin: Callable | None) -> None:
    """The newest state that exists is that of the token before the last decided one."""
    prompts = fitting(PROMPTS, model)
    drafter = made(make, model)
    drafter.__class__ = with_other_states(type(drafter))
    drafter.differs = []
    S = min(MAX_LENGTH, model.config.max_seq_length)
    engine = Engine(model, len(prompts), S, drafter=drafter, speculate_k=k)
    states = engine.runner.caches.aux_hidden_states
    if not states:
        return
    drafter.other_states = (engine.batch, [recorder.x for recorder in states.values()])
    texts_of(engine, prompts, sampling=Sampling(3), seed=5, max_new_tokens=12)
    check(
        any(drafter.differs),
        f"the drafter has the target record its states {sorted(states)}, and q is the same whatever"
        f" the newest of them are, those at batch.pos - 1, from which the last decided token was"
        f" drawn. Look for a hidden state that is one position off",
    )
    if twin is None:
        warnings.warn(
            "check_drafter: without `twin` nobody has seen whether the target's hidden states are"
            " read as they should be: after the right norm and layer, in the right order",
            stacklevel=3,
        )


def with_other_states(drafter_class: type[Drafter]) -> type[Drafter]:
    """The class, noting in `differs` whether each q is another with random states in place of the
    newest ones. `other_states`: the engine's Batch, and what the target has recorded (B, S, D)."""

    class Asked(drafter_class):
        def propose(self, batch, plan):
            tokens, q = (x.clone() for x in super().propose(batch, plan))
            whole, recorded = self.other_states
            newest = (whole.pos - 1).clamp(0, recorded[0].size(1) - 1)  # (B,)
            row = torch.arange(len(newest))
            right = [x[row, newest] for x in recorded]
            for x in recorded:
                x[row, newest] = torch.randn(len(row), x.size(2))
            _, other = super().propose(batch, plan)
            # Near its beginning a text has no older state that could be meant.
            is_asked = ~batch.done & (batch.pos >= FAR)  # (B,)
            self.differs.append(bool((other != q)[is_asked].any()))
            for x, values in zip(recorded, right, strict=True):
                x[row, newest] = values
            return Draft(tokens, q)

    return Asked


def after_most_tokens(rounds: Sequence[Round]) -> list[tuple[int, int]]:
    """(round, row) of those that follow a round which decided many tokens, and so left many
    positions to be computed."""
    grown = []
    for number in range(1, len(rounds)):
        before, after = rounds[number - 1].texts, rounds[number].texts
        pairs = list(zip(before, after)) if len(before) == len(after) else []
        found = [(len(new) - len(old), number, i) for i, (old, new) in enumerate(pairs) if new]
        grown += found
    grown.sort(reverse=True)
    return [(number, row) for _, number, row in grown[:NUM_RECOMPUTED]]


def fresh_q(
    make: Callable,
    model: Transformer,
    text: list[int],
    drafted: list[int],
    sampling: Sampling,
) -> Tensor:
    """(K, V) of a new drafter, whose target has read all but the text's last token as a prompt; (1,
    V) where it drew another draft, and (0, V) where it drafts nothing."""
    num_prompt = len(text) - 1
    forced = torch.full((model.config.vocab_size,), -math.inf)
    forced[text[-1]] = 0

    def force(logits: Tensor, tokens: Tensor, pos: Tensor) -> Tensor:
        is_last = pos[..., None] == num_prompt - 1
        return torch.where(is_last, forced, logits)

    drafter = made(make, model)
    k = len(drafted)
    S = min(MAX_LENGTH, model.config.max_seq_length)
    engine = Engine(model, 1, S, drafter=drafter, speculate_k=k, logits_processor=force)
    budget = min(k + 2, S - num_prompt)
    texts_of(engine, [text[:-1]], sampling=sampling, seed=5, max_new_tokens=budget)
    for each in drafter.seen:
        q = each.q[0].double()
        if each.texts[0] == text and q[0].any():
            is_same = each.tokens[0] == drafted
            return q if is_same else q[:1]
    return torch.zeros(0, model.config.vocab_size)


# -------------------------------------------------------------------------------- what is proposed


def sampled_rounds(make: Callable, model: Transformer, k: int) -> tuple[list, list[Round]]:
    """NUM_TEXTS texts of NUM_TOKENS tokens after one prompt, with a seed each, and their rounds."""
    drafter = made(make, model)
    prompt = law_prompt(model)
    S = len(prompt) + NUM_TOKENS
    engine = Engine(model, 64, S, drafter=drafter, speculate_k=k)
    prompts = [prompt] * NUM_TEXTS
    seeds = list(range(NUM_TEXTS))
    texts = texts_of(engine, prompts, sampling=Sampling(1), seed=seeds, max_new_tokens=NUM_TOKENS)
    return texts, drafter.seen


def law_prompt(model: Transformer) -> list[int]:
    """It has n-grams to look up."""
    return fitting([[1, 2, 3, 1, 2, 0, 3, 1, 2]], model)[0]


class DraftedRow(NamedTuple):
    """A row of a Round; n of its tokens are drafted."""

    text: list[int]
    tokens: list[int]  # (K,)
    q: Tensor  # (K, V)
    n: int


def drafted_rows(rounds: Sequence[Round]) -> list[DraftedRow]:
    """The rows of all rounds that are not done."""
    rows = []
    for each in rounds:
        has_draft = each.q.amax(-1) != 0  # (B, K); NaN is a draft
        lengths = has_draft.long().cumprod(1).sum(1).tolist()
        found = map(DraftedRow, each.texts, each.tokens, each.q, lengths)
        rows += [row for row in found if row.text]
    return rows


def check_proposals(rounds: Sequence[Round], num_ids: int) -> None:
    for each in rounds:
        B, K = len(each.texts), len(each.tokens[0])
        shape = tuple(each.q.shape)
        check(
            shape == (B, K, num_ids) and each.q.is_floating_point(),
            f"propose returned q {each.q.dtype} {shape} instead of float ({B}, {K}, {num_ids}), for"
            f" B rows, K tokens and the target's vocabulary",
        )
        check(
            not each.purposes & {PLAIN_DRAW, ACCEPT},
            "`propose` takes numbers that draw the target's tokens, or keep the draft's, so that"
            " the draft and what becomes of it depend on each other: batch.noise(pos, DRAFT_DRAW)"
            " are its own",
        )
    for row in drafted_rows(rounds):
        for i, (token, law) in enumerate(zip(row.tokens[: row.n], row.q.tolist())):
            where = f"after {row.text}, drafted token {i} of {row.tokens}"
            total = sum(law)
            check(
                abs(total - 1) < Q_ERROR and min(law) >= 0,
                f"{where}: q sums to {total:.4g}, with a least probability of {min(law):.4g}; a"
                f" distribution sums to 1, and a row of zeros says that the draft has ended",
            )
            check(
                0 <= token < num_ids and law[token] > 0,
                f"{where}: token {token} has probability 0 in its own q, so it was not drawn from"
                f" it",
            )


def check_draws(rounds: Sequence[Round]) -> None:
    """Each token is drawn from its q, whether or not the draft goes on."""
    rows = drafted_rows(rounds)
    depth = max((row.n for row in rows), default=0)
    for i in range(depth):
        reached = [row for row in rows if row.n > i]
        drawn = torch.tensor([row.tokens[i] for row in reached])
        law = torch.stack([row.q[i].double() for row in reached])  # (n, V)
        check_sums(f"drafted token {i}, {len(reached)} draws", drawn, law, "q", depth)
        check_draws_after(reached, i, drawn, law, depth)


def check_draws_after(
    reached: Sequence[DraftedRow], i: int, drawn: Tensor, law: Tensor, depth: int
) -> None:
    """Token i is drawn from its q after each value of each token before it too: of those of its
    draft, and of the last decided one. Noise that serves two tokens ties one to the other, and each
    of them alone still follows its q."""
    num_cases = depth * (depth + 1) // 2 * law.size(1)  # the values that are left out as well
    for j in range(-1, i):
        before = torch.tensor([row.tokens[j] if j >= 0 else row.text[-1] for row in reached])
        which = "the last decided token" if j < 0 else f"drafted token {j}"
        values, counts = before.unique(return_counts=True)
        for value in values[counts.argsort(descending=True)][:MAX_VALUES].tolist():
            rows = before == value
            case = f"drafted token {i} where {which} is {value}, {int(rows.sum())} draws"
            check_sums(case, drawn[rows], law[rows], "q", num_cases)


def check_sums(case: str, drawn: Tensor, law: Tensor, name: str, num_cases: int = 1) -> None:
    """Each id is drawn (n,) as often as its laws (n, V) say, and so is the likeliest of each. All
    `num_cases` checks of this kind together refuse a correct drafter with a probability of
    FALSE_ALARM."""
    V = law.size(1)
    cases = {f"id {id}": (drawn == id, law[:, id]) for id in range(V)}
    cases["the likeliest id"] = (drawn == law.argmax(1), law.amax(1))
    for which, (hits, p) in cases.items():
        z, value = martingale(hits.double(), p, p * (1 - p))
        check(
            value * len(cases) * num_cases > FALSE_ALARM,
            f"{case}: {which} came {int(hits.sum())} times, and its {name} says {p.sum():.1f}"
            f" ({z:+.1f} standard deviations; p-value {value:.1g}). Look for tokens that are drawn"
            f" and then replaced or dropped, for another temperature or filter than the sampling's,"
            f" and for noise that is used twice, as one number for several tokens of a row: each"
            f" takes that of its own position, batch.noise(pos, DRAFT_DRAW)",
        )


# ---------------------------------------------------------------------------------- the text's law


def check_law(texts: list[list[int]], rounds: Sequence[Round], model: Transformer, k: int) -> None:
    prompt = law_prompt(model)
    V = model.config.vocab_size
    tokens = torch.tensor(texts)  # (n, NUM_TOKENS)
    law = laws_of_texts(model, prompt, tokens)  # (n, NUM_TOKENS, V)
    check_sums("sampled text", tokens.flatten(), law.flatten(0, 1), "law by the target")
    if V**TAIL > MAX_OUTCOMES:
        return
    tokens = tokens[:, :TAIL]
    counts = (tokens @ V ** torch.arange(TAIL - 1, -1, -1)).bincount(minlength=V**TAIL)
    value = p_value(counts, joint_law(model, prompt, TAIL, Sampling(1)))
    check(
        value > FALSE_ALARM,
        f"{len(texts)} drafted texts of {TAIL} tokens do not have the target's law (p-value"
        f" {value:.1g}). If each draw follows its q, look at speculative.accept, and at noise that"
        f" is used twice",
    )
    check_round_law(rounds, model, k)


def laws_of_texts(model: Transformer, prompt: list[int], tokens: Tensor) -> Tensor:
    """(n, T, V): the target's law of each of tokens (n, T) after the prompt and those before it."""
    full = torch.cat((torch.tensor(prompt).expand(len(tokens), -1), tokens), dim=1)
    with torch.inference_mode():
        logits = model(full, torch.arange(full.size(1)))
    return Sampling(1).probs(logits[:, len(prompt) - 1 : -1]).double()


def check_round_law(rounds: Sequence[Round], model: Transformer, k: int) -> None:
    """Exactly, after each first token: a round of the drafts that were seen gives the target's
    law."""
    prompt = law_prompt(model)
    V = model.config.vocab_size
    k = min(k, TAIL - 1)
    tails = torch.tensor(list(itertools.product(range(V), repeat=k + 1)))
    for first in range(V):
        text = [*prompt, first]
        drafts = {
            tuple(row.tokens[:i]): row.q[i].double()
            for row in drafted_rows(rounds)
            if row.text == text
            for i in range(row.n)
        }
        laws = laws_of_texts(model, text, tails)  # (V^(k + 1), k + 1, V)
        target = {
            tuple(tail[:i].tolist()): laws[row, i]
            for row, tail in enumerate(tails)
            for i in range(k + 1)
        }
        want = laws.gather(2, tails[..., None])[..., 0].prod(1)
        none = torch.zeros(V, dtype=torch.float64)
        drafts = collections.defaultdict(lambda none=none: none, drafts)
        for block in (False, True):
            _, law = round_law(target.get, drafts.__getitem__, k, block)
            error = (law.flatten() - want).abs().max().item()
            rule = "a block" if block else "token by token"
            check(
                error < Q_ERROR,
                f"after {text}, a round of {k} tokens verified {rule}: by enumeration of all drafts"
                f" and decisions, the probability of a text is off by {error:.2g}. Look at"
                f" speculative.acceptance, residual and block_acceptance, and at rows without a"
                f" draft, whose q is 0 and whose tokens are never accepted",
            )


def round_law(
    p: Callable[[tuple], Tensor],
    q: Callable[[tuple], Tensor],
    K: int,
    block: bool,
    scaled: bool = True,
) -> tuple[float, Tensor]:
    """Exactly, by summing over all drafts and all outcomes of a decision: the mean number of kept
    tokens, and the law (V,) * (K + 1) of what a round and plain draws behind it give. p(path) and
    q(path) are the laws (V,) float64 of the token that follows these ids; q is 0 where a draft
    ends. Without `scaled` the residual is a wrong one: a block's factor is left out."""
    V = len(p(()))
    mean = 0.0
    law = torch.zeros((V,) * (K + 1), dtype=torch.float64)

    @functools.cache
    def plain(path: tuple, n: int) -> Tensor:
        """The law (V,) * n of n tokens after the path."""
        if n == 0:
            return torch.ones((), dtype=torch.float64)
        return torch.stack([p(path)[id] * plain((*path, id), n - 1) for id in range(V)])

    for draft in itertools.product(range(V), repeat=K):
        p_rows = torch.stack([p(draft[:i]) for i in range(K + 1)])[None]  # (1, K + 1, V)
        q_rows = torch.stack([q(draft[:i]) for i in range(K)])[None]  # (1, K, V)
        drafted = torch.tensor(draft)[None, :, None]
        p_drafted = p_rows[:, :K].gather(2, drafted)[..., 0]
        q_drafted = q_rows.gather(2, drafted)[..., 0]
        has_draft = q_rows.sum(-1) > 0
        # Behind the end of a draft stands id 0, whatever it is.
        drawn = torch.where(has_draft, q_drafted, (drafted[..., 0] == 0).double())
        if block:
            h, factor = speculative.block_acceptance(p_drafted, q_drafted, p_rows, q_rows)
        else:
            h = speculative.acceptance(p_drafted, q_drafted)
            factor = torch.ones(1, K + 1)
        for n in range(K + 1):
            if block:  # the largest kept
                prob = (h[0, n - 1] if n else 1) * (1 - h[0, n:]).prod()
            else:  # the first rejected
                prob = h[0, :n].prod() * (1 - h[0, n] if n < K else 1)
            prob = (prob * drawn.prod()).item()
            mean += prob * n
            q_next = q_rows[0, n] if n < K else torch.zeros(V)
            next_law = speculative.residual(p_rows[0, n], q_next, factor[0, n] if scaled else 1)
            for token in range(V):
                path = (*draft[:n], token)
                law[path] += prob * next_law[token] * plain(path, K - n)
    return mean, law
