"""Does drafting keep the target's law over a million tokens of long sequences, whatever came
before?

    python -m tests.attacks.law [--tokens 1000000] [--controls] [--seed 0] [--write
    benchmarks/law.json]

    CASES, CONTROLS     drafters, lengths of drafts and samplings; the same code, broken on purpose
    decode              rows with a drafter: tokens, and where in its round each was decided;
                        in_batches by Engine.generate, come_and_go by an Engine
    score               the law p of every token given those before it, from one plain pass over the
                        finished row
    chi_square, too_many    tests that know nothing of models, as joint_laws.martingale
    examine             a case, decoded and tested; pooled   all cases as one
    repeat              a case where prompts and seeds repeat

The null hypothesis is that, given everything before it, every token has the target's law p. It is
tested three ways:

    PIT     u = P(tokens before x) + V p(x), V uniform from a generator of its own, is uniform and
            independent (the probability integral transform), whatever order of the tokens the past
            gives: that of ids, and that of q - p, q the drafter's law. Histograms of both; for ids
            also of pairs of neighbours in a row, and of neighbouring rows at the same position (of
            one slot, where requests come and go)
    sums    of f(x) - E f over all tokens, for f = [x in A], A the tokens that the drafter likes
            better than the target does (q > p: where accepting too much must show), and for f = log
            p; sharpest where contexts differ
    zeros   tokens to which p gives nothing

each over all tokens, and by the token's index in its round, which shows a slip at one position (the
bonus token is the one with index K). The index is how many tokens of the round were accepted
before: it depends on the past alone, so that the law is still p given it. Where the token came
from, accepted, corrected or bonus, is no such thing: that is known only together with the token,
and the law given it is not p.

Most cases verify token by token. Those that verify whole blocks have the law too, but a token's
place in its round is then no matter of the past alone: how many tokens a round keeps depends on
drafts behind them. So their tokens are not told apart by index, and no request of theirs is aborted
after some number of steps, which is some number of rounds. tests/test_speculative.py has their
controls, numbers that a later round uses again among them, on a chain whose exact law is known: a
bias of that kind is small in a long text.

In some cases requests come and go in a few slots of an Engine. They wait, replace each other, are
aborted, and continue earlier texts, whose positions slots lend. Samplings are mixed, and some
requests are not drafted. The law of a token is p given its past, so its past alone may decide
whether it counts. Arrivals, aborts, budgets and samplings come from a generator that sees no token,
and an abort takes back no token: all that were decided before it count. Without the aborted rows
the test would see more of the rows whose drafts were accepted, and be biased. Seeds differ, for a
draft that knows an answer of the same noise knows the draws.

In the cases REPEATED prompts and seeds repeat, after others have quoted the answers. The model has
four tokens there, so that the exact joint law of an answer is known. Each answer is also compared
with that of an engine that saw nothing, which finds what a law of some hundred seeds does not.

False alarms: the whole run rejects a correct program with probability at most 1e-6, as Bonferroni's
sum over all tests. For sums that needs no approximation: exp(l M - (e^l - 1 - l) V) is a
supermartingale for every l (Freedman 1975; M the sum of differences of at most 1, V that of their
variances), so is its mean over a fixed list of l, and it exceeds 1/a with probability at most a.
Histograms use the chi-square law, with 100 expected in every bin or more (5 where seeds repeat,
which makes a small p there less exact). Zeros: p here and p when a token was decided differ by
rounding. On a text drawn beforehand, cached passes and one in float64 differ by some d in a logit;
4 d is allowed. A token within it of a filter's cut may be drawn though p says 0; the expected
number of such draws is at most the summed mass of tokens that close, and what is seen is held
against a Poisson law. One token of p = 0 that is further away rejects.

What this cannot show: that the target itself computes what its file says (tests/test_model.py
does), a wrong law whose tests here are blind to it, deviations below what is printed as "seen
from", or other hardware: it runs on a CPU in float32. The noise has 24 bits, which moves no
probability by more than 2^-24.
"""

import collections
import contextlib
import copy
import dataclasses
import functools
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor
from tqdm import tqdm

import speculative
from benchmarks.record import record
from cli.errors import exit_on_error
from cli.flags import Parser, positive
from decoding.batch import Batch
from decoding.costs import Costs
from decoding.engine import Engine
from decoding.memory import Memories
from decoding.sampling import DRAFT_DRAW, FILTERED, PLAIN, Sampling
from decoding.scheduler import Request
from decoding.statistics import Timing, TokenRecord
from drafts.base import Drafter, ModelDraft
from drafts.dflash import DFlash, DFlashDraft, DFlashModel
from drafts.eagle import Eagle, EagleModel
from drafts.hidden_states import PairDraft
from drafts.hybrid import HybridDraft
from drafts.ngram import NgramDraft
from drafts.pard import PardDraft, pard_token
from drafts.suffix import IndexedText, SuffixDraft
from drafts.target_layers import layer_subset
from drafts.vocabulary import translate
from loading.checkpoint import load_model
from loading.files import require_json
from loading.models import random_model
from model import Config, Transformer
from speculative import accept
from tests.joint_laws import joint_law, martingale, p_value
from weights.walker import pack_model, quantized_copy

ROOT = Path(__file__).parents[2]
FALSE_ALARM = 1e-6  # of the whole run
CAUGHT = 1e-12  # a broken program must fail some test with a p-value below
CONTROL_TOKENS = 40_000
BATCH = 32  # rows decoded together
LONGEST = 1600  # positions of a row, within the context
# at most, of a histogram and of one side of a square one; expected in every bin
BINS, PAIR_BINS, FEWEST = (64, 16, 100)
LOWEST = -12.0  # log p is cut here, so that a difference is bounded

TINY = Config(
    dim=32,
    n_layers=3,
    n_heads=2,
    n_kv_heads=1,
    head_dim=16,
    ffn_dim=64,
    vocab_size=48,
    max_seq_length=2048,
    norm_eps=1e-5,
)
WINDOWED = dataclasses.replace(TINY, windows=(None, 200, 50))
FOUR = dataclasses.replace(TINY, vocab_size=4, max_seq_length=32)


class Case(NamedTuple):
    name: str
    drafter: str
    k: int | str
    sampling: Sampling | tuple[Sampling, ...]  # a tuple: requests draw theirs from it
    target: str = "tiny"
    share: float = 1.0  # of an even part of the tokens
    slots: int = 0  # in which requests come and go; 0: batches of rows
    verification: str = "token"


FILTERS, MIN_P, HOT = Sampling(0.7, top_k=12, top_p=0.9), Sampling(1.0, min_p=0.08), Sampling(1.5)
# only neighbours, for `score` knows no penalty
UNSCORED = (Sampling(0), Sampling(1, presence_penalty=0.5))
MIXED = (Sampling(1), FILTERS, MIN_P, HOT) * 2 + UNSCORED
COOL = (Sampling(0.5), FILTERS) * 2 + UNSCORED
CASES = (
    Case("model, K 1", "model", 1, Sampling(1)),
    Case("model, K 3, T 0.7 top-k top-p", "model", 3, FILTERS),
    Case("model, K 5", "model", 5, Sampling(1)),
    Case("model, K 8, T 1.5", "model", 8, HOT),
    Case("model, K auto", "model", "auto", Sampling(1)),
    Case("model, K 5, sliding windows", "model", 5, Sampling(1), "windowed"),
    Case("layers 0-1, K 3", "layers:0,1", 3, Sampling(1)),
    Case("layers 0 and 2, K 8, min-p", "layers:0,2", 8, MIN_P),
    Case("ngram 1, K 3, T 0.7", "ngram:1", 3, Sampling(0.7)),
    Case("ngram 2, K 5, top-p", "ngram:2", 5, Sampling(1, top_p=0.8)),
    Case("suffix, K 3", "suffix", 3, Sampling(1)),
    Case("suffix, K auto, T 0.7", "suffix", "auto", Sampling(0.7)),
    Case("int8 copy, K 8", "int8", 8, Sampling(1)),
    Case("int4 copy, K 1, T 1.5 min-p", "int4-g32", 1, Sampling(1.5, min_p=0.05)),
    Case("int4 copy, K 5, T 0.7 top-k top-p", "int4-g32", 5, FILTERS),
    Case("PARD, K 5", "pard", 5, Sampling(1)),
    Case("PARD, K 3, T 0.7 top-k top-p", "pard", 3, FILTERS),
    Case("PARD with other tokens, K 2, T 1.5", "pard-shared", 2, HOT),
    Case("EAGLE-3, K 3", "eagle", 3, Sampling(1)),
    Case("EAGLE-3 of 40 tokens, K 5, T 1.5", "eagle:40", 5, HOT),
    Case("DFlash, K 5, T 3", "dflash", 5, Sampling(3)),  # so hot that a random draft is often right
    Case("DFlash, K 3, T 3 top-k", "dflash", 3, Sampling(3, top_k=30)),
    Case("DSpark, K 4, T 3", "dspark", 4, Sampling(3)),
    Case("suffix or model, K 3", "hybrid", 3, Sampling(1)),
    Case("model with other tokens, K 5, min-p", "shared", 5, MIN_P),
    Case("demo with its PARD draft, K 5, T 0.8", "demo-pard", 5, Sampling(0.8), "demo", 0.5),
    Case("demo with suffix drafts, K 5, T 0.6", "suffix", 5, Sampling(0.6), "demo", 0.5),
    Case("demo pair, K 5, T 0.8", "demo-draft", 5, Sampling(0.8), "demo", 0.5),
    Case(
        "demo pair, K 3, top-k top-p",
        "demo-draft",
        3,
        Sampling(1, top_k=50, top_p=0.9),
        "demo",
        0.5,
    ),
    Case("come and go: model, K 3", "model", 3, MIXED, share=0.5, slots=3),
    Case("come and go: model, K auto, sliding windows", "model", "auto", MIXED, "windowed", 0.5, 3),
    Case("come and go: ngram 1, K 5", "ngram:1", 5, COOL, share=0.5, slots=4),
    Case("come and go: suffix, K 5", "suffix", 5, COOL, share=0.5, slots=4),
    Case("come and go: demo with suffix drafts, K 3", "suffix", 3, COOL, "demo", 0.2, 4),
    Case("come and go: suffix or model, K 3", "hybrid", 3, COOL, share=0.5, slots=4),
    Case(
        "come and go: DFlash, K 3",
        "dflash",
        3,
        (Sampling(3), Sampling(3, top_k=30), HOT, *UNSCORED),
        "tiny",
        0.5,
        4,
    ),
)
BLOCKS = (
    "model, K 3, T 0.7 top-k top-p",
    "model, K 5",
    "model, K 8, T 1.5",
    "model, K auto",
    "layers 0 and 2, K 8, min-p",
    "ngram 1, K 3, T 0.7",
    "suffix, K 3",
    "int4 copy, K 5, T 0.7 top-k top-p",
    "PARD, K 5",
    "EAGLE-3 of 40 tokens, K 5, T 1.5",
    "DFlash, K 5, T 3",
    "DSpark, K 4, T 3",
    "suffix or model, K 3",
    "model with other tokens, K 5, min-p",
    "demo pair, K 5, T 0.8",
)
CASES += tuple(
    case._replace(name=f"{case.name}, in blocks", verification="block")
    for case in CASES
    if case.name in BLOCKS
)

# ------------------------------------------------------------------------------------------ models


def tiny(config: Config, seed: int = 3) -> Transformer:
    """A random model with about two nats of entropy, whose logits hang on the whole context."""
    model = random_model(config, dtype=torch.float32, seed=seed)
    for layer in model.layers:
        layer.attention.qkv.weight.mul_(14)
        for matrix in (layer.attention.out, layer.ffn.gate_up, layer.ffn.down):
            matrix.weight.mul_(8)
    model.embed.weight.mul_(50)
    model.lm_head.weight.mul_(20)
    return model


@functools.cache
def target_of(name: str) -> Transformer:
    if name == "demo":
        return load_model(ROOT / "checkpoints" / "demo", dtype=torch.float32)
    return tiny({"tiny": TINY, "windowed": WINDOWED, "four": FOUR}[name])


def disturbed(model: Transformer, noise: float, seed: int = 9) -> Transformer:
    """A copy whose every matrix is off by `noise` of its own spread."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    for parameter in other.parameters():
        if parameter.dim() > 1:
            parameter.add_(
                noise * parameter.std() * torch.randn(parameter.shape, generator=generator)
            )
    return other


def one_more_token(model: Transformer) -> Transformer:
    """The model with a token more, a mask, whose row is the mean of all."""
    other = Transformer(dataclasses.replace(model.config, vocab_size=model.config.vocab_size + 1))
    state = {
        name: torch.cat((weight, weight.mean(0, keepdim=True)))
        if name in ("embed.weight", "lm_head.weight")
        else weight
        for name, weight in model.state_dict().items()
    }
    other.load_state_dict(state)
    return other.requires_grad_(False).eval()


def random_eagle(target: Transformer, tokens: int, seed: int = 5) -> EagleModel:
    """An EAGLE-3 draft for the target's last `tokens` tokens. What it fuses is mostly what enters
    the last layer, so that it is no stranger to its target."""
    V, n = target.config.vocab_size, target.config.n_layers
    eagle = Eagle({}, tokens, (0, 1, n - 1), target.config.dim, False, False, False, False)
    model = EagleModel(dataclasses.replace(target.config, n_layers=1, windows=()), eagle, False)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.1 if name.startswith("layers") else 0.02, generator=generator)
    model.fc.weight.data[:, -target.config.dim :] += torch.eye(target.config.dim)
    model.lm_head.weight.data.add_(target.lm_head.weight[V - tokens :])
    model.register_buffer("ids", torch.arange(V) - (V - tokens), persistent=False)
    model.ids.clamp_(min=-1)
    return model.requires_grad_(False).eval()


def random_dflash(target: Transformer, seed: int = 5, **changes) -> DFlashModel:
    """A DFlash draft of two layers and blocks of 6, whose mask is the target's last token."""
    fields = {"n_layers": 2, "windows": (), "qk_norm": "heads"}
    config = dataclasses.replace(target.config, **fields)
    dflash = DFlash(6, config.vocab_size - 1, (1, target.config.n_layers - 1), **changes)
    model = DFlashModel(config, dflash)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.1 if name.startswith("layers") else 0.02, generator=generator)
    return model.requires_grad_(False).eval()


def drafter_of(name: str, model: Transformer) -> Drafter:
    kind, _, rest = name.partition(":")
    if kind == "model":
        return ModelDraft(disturbed(model, 0.1))
    if kind == "demo-draft":
        return ModelDraft(load_model(ROOT / "checkpoints" / kind, dtype=torch.float32))
    if kind == "demo-pard":
        folder = ROOT / "checkpoints" / kind
        return PardDraft(
            load_model(folder, dtype=torch.float32),
            pard_token(require_json(folder / "config.json")),
        )
    if kind == "pard":
        return PardDraft(one_more_token(disturbed(model, 0.1)), model.config.vocab_size)
    if kind == "eagle":
        return PairDraft(random_eagle(model, int(rest or model.config.vocab_size)))
    if kind == "dflash":
        return DFlashDraft(random_dflash(model))
    if kind == "dspark":
        return DFlashDraft(random_dflash(model, has_anchor=True, markov_rank=4))
    if kind == "hybrid":
        return HybridDraft(SuffixDraft(), ModelDraft(disturbed(model, 0.1)))
    if kind.endswith("shared"):  # under other ids, and some of the target's tokens are missing
        V = model.config.vocab_size
        draft, ids = one_more_token(disturbed(model, 0.1)), torch.arange(V).roll(5)
        for part in (draft.embed, draft.lm_head):
            part.weight[ids] = part.weight[:V].clone()
        ids[::7] = -1
        translate(draft, ids, 0, V if "pard" in kind else None)
        return PardDraft(draft, V) if "pard" in kind else ModelDraft(draft)
    if kind == "ngram":
        return NgramDraft(int(rest))
    if kind == "suffix":
        return SuffixDraft()
    kept = (
        [int(i) for i in rest.split(",")]
        if kind == "layers"
        else list(range(model.config.n_layers))
    )
    part = (
        layer_subset(model, kept) if kind == "layers" else pack_model(quantized_copy(model, kind))
    )
    return ModelDraft(part, on_layers=kept)


# ----------------------------------------------------------------------------------------- decode


class Row(NamedTuple):
    prompt: list[int]
    tokens: list[int]
    index: list[int]  # of each token in its round: how many drafted ones were accepted before it
    sampling: Sampling


def decode(
    case: Case, drafter: Drafter, n_tokens: int, seed: int
) -> tuple[list[Row], list[TokenRecord]]:
    """At least n_tokens in rows of different lengths, each with a seed of its own."""
    model = target_of(case.target)
    longest = min(model.config.max_seq_length, LONGEST, max(64, n_tokens // 8))
    n_rows = math.ceil(n_tokens / (0.8 * longest))
    n_batches = math.ceil(n_rows / BATCH)
    size = case.slots or math.ceil(n_rows / n_batches)
    engine = Engine(
        model,
        size,
        longest,
        drafter=drafter,
        speculate_k=case.k,
        verification=case.verification,
    )
    if case.k == "auto":  # costs that make every K pay at times, and the same ones in every run
        ks = Drafter.auto_k
        engine.planner.costs = Costs(1.0, {k: 0.15 * k for k in ks}, {k: 1 + 0.1 * k for k in ks})
    if case.slots:
        requests = come_and_go(engine, case.sampling, n_tokens, seed)
    else:
        requests = in_batches(engine, case.sampling, n_batches, seed)
    has_index = case.verification == "token"
    rows = []
    for r in requests:
        index = [token.index if has_index else 0 for token in r.token_records]
        rows.append(Row(r.prompt, r.tokens, index, r.sampling))
    return rows, [
        token for request in requests for token in request.token_records if not token.first
    ]


def in_batches(engine: Engine, sampling: Sampling, n_batches: int, seed: int) -> list[Request]:
    """Rows of Engine.generate, in batches of one size."""
    V, size, longest = engine.model.config.vocab_size, engine.batch_size, engine.max_seq_length
    generator, timing = torch.Generator().manual_seed(seed), Timing()
    for batch in range(n_batches):
        lengths = torch.randint(1, longest // 20 + 2, (size,), generator=generator).tolist()
        ends = torch.randint(
            int(0.72 * longest), longest + 1, (size,), generator=generator
        ).tolist()
        prompts = [torch.randint(V, (n,), generator=generator).tolist() for n in lengths]
        budgets, out = [end - n for end, n in zip(ends, lengths)], [[] for _ in prompts]
        seeds = [(seed << 20) + batch * size + row for row in range(size)]
        options = {"sampling": sampling, "max_new_tokens": budgets, "seed": seeds}
        for row, id in engine.generate(prompts, timing=timing, **options):
            out[row].append(id)
        assert out == [request.tokens for request in timing.requests[-size:]]
    return timing.requests


def come_and_go(
    engine: Engine, samplings: Sequence[Sampling], n_tokens: int, seed: int
) -> list[Request]:
    """Requests that arrive at random steps, one in five without a draft, one in four to be aborted.
    Returns the scored ones, sorted by slot and prompt length: a row's neighbour then has its slot,
    and tokens at the same positions."""
    generator, V, longest = (
        torch.Generator().manual_seed(seed),
        engine.model.config.vocab_size,
        engine.max_seq_length,
    )
    engine.runner.chunk = 16  # other requests decode between the chunks of a prompt

    def draw(n: int) -> int:
        return int(torch.randint(n, (), generator=generator))

    requests, slots, aborts = [], {}, collections.defaultdict(list)
    num_decided = arrival = 0
    for step in itertools.count():
        while arrival <= step and num_decided < n_tokens:
            sources = requests[-1 - draw(8) :][:1]  # one of the last eight
            text = [id for request in sources for id in request.prompt + request.tokens]
            # another text, a fork, or a chat's next turn
            length = (0, draw(longest // 8), longest // 2)[draw(3)]
            prompt = text[:length] + [draw(V) for _ in range(1 + draw(longest // 20))]
            options = {
                "sampling": samplings[draw(len(samplings))],
                "max_new_tokens": 1 + draw(longest // 4),
            }
            id = engine.add_request(
                prompt, seed=(seed << 20) + len(requests), draft=draw(5) > 0, **options
            )
            requests.append(engine.requests[id])
            if draw(4) == 0:
                aborts[step + draw(longest // 8)].append(id)
            # at times slots are free, at others requests wait
            arrival += draw(longest // 4 // engine.batch_size)
        for id in aborts[step]:
            engine.abort(id)
        num_decided += sum(is_scored(requests[id]) for id, _ in engine.step())
        slots |= {id: request.slot.index for id, request in engine.requests.items() if request.slot}
        if num_decided >= n_tokens and not engine.has_unfinished():
            break
    scored = [request for request in requests if request.tokens and is_scored(request)]
    # -1: came and went in one step
    return sorted(scored, key=lambda request: (slots.get(request.id, -1), len(request.prompt)))


def is_scored(request: Request) -> bool:
    return request.sampling.path in (PLAIN, FILTERED)


# ------------------------------------------------------------------------------------------ score


class Scores(NamedTuple):
    """Of one row's tokens (n,): float64, and index and pos int64. The first, which no round
    decides, has index 0."""

    u: Tensor  # PIT by id
    by_draft: Tensor  # PIT in the order of q - p
    side: tuple[Tensor, Tensor, Tensor]  # f, its mean and its variance under p, for f = [q > p]
    log_p: tuple[Tensor, Tensor, Tensor]  # for f = log p, moved into [0, 1]
    zero: Tensor  # p = 0, and not by rounding
    near: Tensor  # p = 0 within rounding of a cut
    near_mass: Tensor  # at most the probability of drawing such a one
    index: Tensor
    pos: Tensor  # from the prompt's first token on
    entropy: Tensor


@functools.cache
def exact(name: str) -> Transformer:
    """The target in float64, but for rotations and logits, which model.py rounds to float32."""
    return copy.deepcopy(target_of(name)).double()


@functools.cache
def rounding(name: str) -> float:
    """The largest difference of a logit between cached passes over 6 positions and `exact`, over a
    random text."""
    model = target_of(name)
    V, T = model.config.vocab_size, min(model.config.max_seq_length, LONGEST) - 6
    tokens = torch.randint(V, (2, T), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        whole, largest = exact(name)(tokens, torch.arange(T)), 0.0
        caches = model.make_caches(2, T)
        for begin in range(0, T - 5, 6):
            pos = torch.arange(begin, begin + 6)
            logits = model(tokens[:, begin : begin + 6], pos, caches.slice_to(begin + 6))
            largest = max(largest, (logits - whole[:, begin : begin + 6]).abs().max().item())
    return largest


def looked_up(tokens: Sequence[int], n: int) -> list[int]:
    """What followed the last n tokens when they stood there last, after each position; -1 if they
    never did."""
    seen, found = {}, []
    for i in range(len(tokens)):
        gram = tuple(tokens[max(0, i + 1 - n) : i + 1])
        found.append(tokens[seen[gram] + 1] if gram in seen else -1)
        seen[gram] = i
    return found


def draft_law(case: Case, drafter: Drafter) -> Callable[[Tensor, Sampling], Tensor]:
    """tokens (R, T) and their sampling -> q (R, T, V) after each position. On the target's caches
    the drafter saw the target's keys, here its own: A is then another set than the drafter's, which
    any function of the past may be."""
    if isinstance(drafter, PairDraft | DFlashDraft):  # whose states only its target's caches hold
        drafter = ModelDraft(disturbed(target_of(case.target), 0.1))
    if isinstance(drafter, ModelDraft):
        V = target_of(case.target).config.vocab_size
        return lambda tokens, sampling: sampling.probs(
            drafter.model(tokens, torch.arange(tokens.size(1)))[..., :V]
        )
    V = target_of(case.target).config.vocab_size

    def one_hot(tokens: Tensor, _) -> Tensor:
        # (R, T)
        ids = torch.tensor([looked_up(row, getattr(drafter, "n", 1)) for row in tokens.tolist()])
        return torch.nn.functional.one_hot(ids.clamp(min=0), V) * (ids >= 0)[..., None]

    return one_hot


@torch.inference_mode()
def score(
    case: Case, rows: Sequence[Row], q_of: Callable[[Tensor, Sampling], Tensor], seed: int
) -> Iterator[Scores]:
    """Each row's tokens under p: one pass over the whole row, no cache, no drafter."""
    generator, slack = torch.Generator().manual_seed(seed), 4 * rounding(case.target)
    for row in rows:
        tokens = torch.tensor([row.prompt + row.tokens[:-1]])  # (1, T)
        pos = len(row.prompt) + torch.arange(len(row.tokens))  # (n,)
        # (1, T, V)
        logits, q = (
            exact(case.target)(tokens, torch.arange(tokens.size(1))),
            q_of(tokens, row.sampling),
        )
        noise = torch.rand(len(pos), generator=generator, dtype=torch.float64)
        yield score_tokens(row, logits[0, pos - 1], q[0, pos - 1], pos, noise, slack)


def score_tokens(
    row: Row, logits: Tensor, q: Tensor, pos: Tensor, noise: Tensor, slack: float
) -> Scores:
    """logits and q (n, V), pos (n,) of the tokens drawn, noise (n,) uniform -> Scores."""
    x, sampling = torch.tensor(row.tokens), row.sampling
    p = sampling.probs(logits).double()
    p = p / p.sum(-1, keepdim=True)
    at = x[:, None]  # (n, 1)
    mine = p.gather(1, at)  # (n, 1)
    order = (q - p).argsort(-1, descending=True)
    place = order.argsort(-1).gather(1, at)
    reached = p.cumsum(-1).gather(1, at), p.gather(1, order).cumsum(-1).gather(1, place)
    u, by_draft = (
        (up_to - (1 - noise[:, None]) * mine)[:, 0].clamp(0, 1 - 2**-53) for up_to in reached
    )
    log_p = p.clamp(min=math.exp(LOWEST)).log()
    near, mass = within_rounding(logits, p, sampling, slack)
    missed, close = mine[:, 0] == 0, near.gather(1, at)[:, 0]
    entropy = -(p * log_p).sum(-1)
    return Scores(
        u,
        by_draft,
        moments((q > p).double(), p, at),
        moments(1 - log_p / LOWEST, p, at),
        missed & ~close,
        missed & close,
        mass,
        torch.tensor(row.index),
        pos,
        entropy,
    )


def moments(f: Tensor, p: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """f (n, V) in [0, 1] at the tokens drawn, its mean and its variance under p, each (n,)."""
    mean = (f * p).sum(-1)
    return f.gather(1, at)[:, 0], mean, ((f - mean[:, None]) ** 2 * p).sum(-1)


def within_rounding(
    logits: Tensor, p: Tensor, sampling: Sampling, slack: float
) -> tuple[Tensor, Tensor]:
    """Tokens of p = 0 (n, V) that a filter might keep if every logit were off by `slack`, and at
    most what probability they would have together (n,). Logits off by s move a mass below a cut by
    less than 2 s / temperature."""
    if sampling.path != FILTERED:
        return torch.zeros_like(p, dtype=torch.bool), torch.zeros_like(p[:, 0])
    moved = 2 * slack / sampling.temperature
    wide = dataclasses.replace(sampling, top_p=sampling.top_p and min(1.0, sampling.top_p + moved))
    lowest = logits.where(wide.probs(logits) > 0, math.inf).amin(-1, keepdim=True)
    near = (p == 0) & (logits >= lowest - 2 * slack)
    whole = (logits.double() / sampling.temperature).softmax(-1)
    return near, (whole * near).sum(-1) / (whole * (p > 0)).sum(-1)


# ------------------------------------------------------------------------------------------ tests


def chi_square(counts: Tensor) -> tuple[float, float]:
    """Counts (n,) that should be equal -> (statistic over its degrees of freedom, p-value)."""
    counts = counts.double()
    expected = counts.sum() / len(counts)
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = len(counts) - 1
    return (statistic / freedom).item(), torch.special.gammaincc(
        torch.tensor(freedom / 2).double(), statistic / 2
    ).item()


def too_many(zero: Tensor, near: Tensor, mass: Tensor) -> tuple[float, float]:
    """(tokens of p = 0, p-value): none may be far from a cut; near one, by Chernoff's bound for a
    Poisson law."""
    count, expected = near.sum().item(), mass.sum().item()
    if zero.any() or (count and not expected):
        return float(count + zero.sum().item()), 0.0
    if count <= expected:
        return float(count), 1.0
    return float(count), math.exp(count - expected - count * math.log(count / expected))


def square(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Counts (n^2,) of pairs of numbers in [0, 1)."""
    n = min(PAIR_BINS, math.isqrt(sum(len(a) for a, _ in pairs) // FEWEST))
    counts = (((a * n).long() * n + (b * n).long()).bincount(minlength=n * n) for a, b in pairs)
    return sum(counts, torch.zeros(n * n, dtype=torch.int64))


def joined(parts: Sequence[Scores]) -> Scores:
    """Rows as one."""

    def cat(values):
        return tuple(map(cat, zip(*values))) if isinstance(values[0], tuple) else torch.cat(values)

    return Scores(*map(cat, zip(*parts)))


def histograms(rows: Sequence[Scores]) -> dict[str, tuple[float, float]]:
    """u with the next one in its row, and with the one of the row beside at the same position. A
    number stands in one pair of a kind, for overlapping pairs are not independent."""
    in_row = [(row.u[: len(row.u) // 2 * 2 : 2], row.u[1::2]) for row in rows]
    in_two = [
        (a.u[torch.isin(a.pos, b.pos)], b.u[torch.isin(b.pos, a.pos)])
        for a, b in zip(rows[::2], rows[1::2])
    ]
    counts = {"PIT, next": square(in_row), "PIT, other row": square(in_two)}
    return {name: chi_square(cells) for name, cells in counts.items() if len(cells) >= 9}


def by_group(scores: Scores, chosen: Tensor, name: str) -> dict[str, tuple[float, float]]:
    """The tests of the tokens chosen (n,) bool by what came before them."""
    n = int(chosen.sum())
    if n < 2 * FEWEST:
        return {}
    bins = min(BINS, n // FEWEST)
    counts = [
        (u[chosen] * bins).long().bincount(minlength=bins) for u in (scores.u, scores.by_draft)
    ]
    return {
        f"PIT{name}": chi_square(counts[0]),
        f"PIT by q - p{name}": chi_square(counts[1]),
        f"draft's side{name}": martingale(*(part[chosen] for part in scores.side)),
        f"log p{name}": martingale(*(part[chosen] for part in scores.log_p)),
    }


def all_tests(rows: Sequence[Scores]) -> dict[str, tuple[float, float]]:
    """{name: (statistic, p-value)} of what a case decoded."""
    scores = joined(rows)
    everything = by_group(scores, torch.ones_like(scores.index, dtype=torch.bool), "")
    found = {**everything, **histograms(rows)}
    found["zeros"] = too_many(scores.zero, scores.near, scores.near_mass)
    for i in range(int(scores.index.max()) + 1):
        found |= by_group(scores, scores.index == i, f" at {i}")
    return found


def examine(
    case: Case, n_tokens: int, seed: int, drafter: Drafter | None = None
) -> tuple[dict, list[Scores]]:
    """Decode a case and test it: what is to be told of it, and every row's scores."""
    start = time.perf_counter()
    drafter = drafter or drafter_of(case.drafter, target_of(case.target))
    rows, records = decode(case, drafter, n_tokens, seed)
    decoded_s = time.perf_counter() - start
    scores = list(score(case, rows, draft_law(case, drafter), seed + 1))
    whole = joined(scores)
    rounds = collections.Counter(token.k for token in records if token.index == 0)
    overlaps = [token.overlap for token in records if token.index < token.k]
    # the standard error of a shift of mass to the draft's side
    side = whole.side[2].sum().sqrt() / len(whole.u)
    said = {
        "tokens": len(whole.u),
        "rows": len(rows),
        "longest": max(len(row.prompt) + len(row.tokens) for row in rows),
        "alpha": sum(overlaps) / len(overlaps),
        "tokens_per_round": len(records) / rounds.total(),
        "rounds_by_k": dict(sorted(rounds.items())),
        "entropy": whole.entropy.mean().item(),
        "seen_from": 7 * side.item(),
        "rounding": rounding(case.target),
        "zeros_expected_at_most": whole.near_mass.sum().item(),
        "decode_s": decoded_s,
        "seconds": time.perf_counter() - start,
        "tests": all_tests(scores),
    }
    return said, scores


def pooled(rows: Sequence[tuple[Case, list[Scores]]]) -> dict:
    """All cases together: their sums are one martingale, as their rows are one list. And the bonus
    tokens of all."""
    scores = joined([row for _, found in rows for row in found])
    # Where K changes, no index is always the bonus's.
    last = torch.cat(
        [row.index == (-1 if case.k == "auto" else case.k) for case, found in rows for row in found]
    )
    tests = all_tests([row for _, found in rows for row in found]) | by_group(
        scores, last, " of the bonus"
    )
    side = scores.side[2].sum().sqrt() / len(scores.u)
    return {"tokens": len(scores.u), "seen_from": 7 * side.item(), "tests": tests}


# --------------------------------------------------------------------------------------- controls


def accept_everything(tokens, q, p, *, noise, block, **others):
    return accept(tokens, q, p, noise=(noise[0] - 1, noise[1]), **others)


def accept_the_last(tokens, q, p, *, noise, block, **others):
    """Right but for one position of the draft."""
    last = torch.arange(tokens.size(1)) == tokens.size(1) - 1
    return accept(tokens, q, p, noise=(noise[0] - last.float(), noise[1]), **others)


def stale_bonus(tokens, q, p, *, noise, block, **others):
    """The bonus token by the law of the position before."""
    stale = torch.cat((p[:, :-1], p[:, -2:-1]), dim=1)
    return accept(tokens, q, stale, noise=noise, **others)


class Stale(ModelDraft):
    """Never sees the last token of a round that was accepted whole: a worse drafter, and no wrong
    law."""

    def hidden_up_to(self, caches, state, last, T):
        return super().hidden_up_to(caches, state, last, 1)


class WrongPosition(PardDraft):
    """q of the position before."""

    def propose(self, state, plan):
        tokens, probs = super().propose(state, plan)
        return tokens, probs.roll(1, dims=1)


class IgnoresIds(PairDraft):
    """Tokens by the target's ids, q by the draft's."""

    def propose(self, state, plan):
        tokens, probs = super().propose(state, plan)
        return tokens, torch.cat(
            (probs[..., self.model.ids >= 0], probs[..., self.model.ids < 0]), dim=-1
        )


def patched(owner, name: str, value) -> Callable:
    return functools.partial(mock.patch.object, owner, name, value)


def keeping(name: str) -> Callable:
    """Batch.fill, but for one tensor, where a slot keeps what its first request wrote."""
    fill = Batch.fill

    def fill_the_rest(state, slot, request):
        is_used, values = state.prompt_length[slot] > 0, getattr(state, name)[slot].clone()
        fill(state, slot, request)
        if is_used:
            getattr(state, name)[slot] = values

    return fill_the_rest


CONTROLS = {  # name -> what is put in place of the code
    "everything is accepted": patched(speculative, "accept", accept_everything),
    "the last of a draft is accepted always": patched(speculative, "accept", accept_the_last),
    "the residual is p": patched(speculative, "residual", lambda p, *others: p),
    "the draft's noise accepts": patched(speculative, "ACCEPT", DRAFT_DRAW),
    "the bonus by the law before": patched(speculative, "accept", stale_bonus),
}
IN_SLOTS = {  # of these, those that are right until another request takes the slot
    "a slot keeps its first seed": patched(Batch, "fill", keeping("seed")),
    "a slot keeps its first sampling": patched(Batch, "fill", keeping("values")),
    "a slot lends its last token": patched(
        Request, "cached_ids", lambda request: request.prompt + request.tokens
    ),
}
CONTROLS |= IN_SLOTS
KEEPS_THE_LAW = "the draft's cache is stale"


def broken_drafter(name: str, model: Transformer) -> Drafter | None:
    """The drafters that are wrong by themselves; None for a name of CONTROLS."""
    pard, eagle = (drafter_of(kind, model) for kind in ("pard", "eagle:40"))
    made = {
        KEEPS_THE_LAW: lambda: Stale(disturbed(model, 0.1)),
        "PARD's q of the position before": lambda: WrongPosition(pard.model, pard.mask),
        "EAGLE-3's d2t is ignored": lambda: IgnoresIds(eagle.model),
    }
    return made[name]() if name in made else None


BROKEN = (*CONTROLS, "PARD's q of the position before", "EAGLE-3's d2t is ignored")


def control(name: str, n_tokens: int = CONTROL_TOKENS, seed: int = 77) -> dict:
    """A case decoded by a broken program: its smallest p-value, by which test, and whether it is as
    it should be."""
    case = Case(name, "model", 3, Sampling(1))
    if name in IN_SLOTS:
        case = case._replace(sampling=MIXED, slots=8)
    breaks = CONTROLS.get(name, contextlib.nullcontext)
    drafter = broken_drafter(name, target_of(case.target))
    with breaks():
        said, _ = examine(case, n_tokens, seed, drafter)
    by, (_, p) = min(said["tests"].items(), key=lambda item: item[1][1])
    right = p > FALSE_ALARM / len(said["tests"]) if name == KEEPS_THE_LAW else p < CAUGHT
    return {
        "tokens": said["tokens"],
        "alpha": said["alpha"],
        "test": by,
        "p": p,
        "as_it_should_be": right,
    }


# ---------------------------------------------------------------------- repeated prompts and seeds

LEARNING = ("suffix", "hybrid")  # from other requests, with any K; all others with "auto" alone
OTHERS = ("model", "layers:0", "ngram:1", "int8", "pard", "eagle", "dflash", "dspark", "shared")
REPEATED = tuple(
    Case(f"repeated: {kind}, K {k}", kind, k, Sampling(1), "four")
    for kind in (*LEARNING, *OTHERS)
    for k in (3, "auto")
)
SEEDS = 600  # of a case
PROMPT, ANSWER = ([1, 2, 3, 1, 2], 4)  # ids, and the number of tokens
# A round of a draft pays above an acceptance of about a half, so that `auto` leaves and comes back.
NEAR_COSTS = Costs(
    1.0,
    {k: 0.1 * k for k in Drafter.auto_k},
    {k: 1.3 + 0.1 * k for k in Drafter.auto_k},
)


class SharedByAll(Memories):
    """The rule before decoding/memory.py: every request learns from all, and reads the pool."""

    def assign(self, request, others):
        request.memory = self.shared


def learns(case: Case) -> bool:
    return case.k == "auto" or case.drafter in LEARNING


def ask(engine: Engine, prompt: list[int], seed: int) -> tuple[list[int], list]:
    """An answer, and each token's index in its round and the round's K."""
    id = engine.add_request(prompt, sampling=Sampling(1), max_new_tokens=ANSWER, seed=seed)
    request = engine.requests[id]
    while engine.has_unfinished():
        engine.step()
    return request.tokens, [(token.index, token.k) for token in request.token_records]


def forget(engine: Engine, rule: type[Memories], seeds: Sequence[int] = ()) -> None:
    """As a new engine, which knows of `seeds` only that they were used."""
    drafter = engine.drafter
    engine.planner.memories = drafter.memories = rule()
    engine.planner.memories.seeds.update(dict.fromkeys(seeds))
    if isinstance(drafter, SuffixDraft):
        drafter.texts, drafter.pool = {}, [IndexedText(), IndexedText()]


def repeat(case: Case, n_seeds: int, seed: int, rule: type[Memories] = Memories) -> dict:
    """Each seed answers the prompt, another one's prompt quotes the answer, and the first answers
    again. The last answers have the exact joint law, and each equals, round by round, that of an
    engine that saw nothing. Our engine keeps all that it learns from all seeds; a broken one starts
    anew with each, because the answers of others would hide the one that it must not use."""
    model = target_of(case.target)
    kept, new = (
        Engine(model, 1, 32, drafter=drafter_of(case.drafter, model), speculate_k=case.k)
        for _ in range(2)
    )
    kept.planner.costs = new.planner.costs = NEAR_COSTS
    V, differing = model.config.vocab_size, 0
    counts = torch.zeros((V,) * ANSWER)
    forget(kept, rule)
    for first in range(seed << 20, (seed << 20) + n_seeds):
        if rule is not Memories:
            forget(kept, rule)
        answer, _ = ask(kept, PROMPT, first)
        ask(kept, PROMPT + answer, first + (1 << 19))
        again = ask(kept, PROMPT, first)
        forget(new, rule, [first])
        differing += again != ask(new, PROMPT, first)
        counts[tuple(again[0])] += 1
    p = p_value(counts.flatten(), joint_law(model, PROMPT, ANSWER, Sampling(1)))
    tests = {"joint law": (None, p), "as in a new engine": (differing, float(not differing))}
    return {"seeds": n_seeds, "tests": tests}


def repeat_control(case: Case) -> dict:
    """`case` by the rule before, which must be caught: where all drafts come from the pool, by the
    law. Where K alone is learned, or a model drafts most of the time, the law of some hundred seeds
    hardly moves, and what shows is that the last answers, or their rounds, are not those of an
    engine that saw nothing."""
    reads_pool = case.drafter == "suffix"
    by = "joint law" if reads_pool else "as in a new engine"
    n_seeds = SEEDS if reads_pool else 60
    _, p = repeat(case, n_seeds, 77, SharedByAll)["tests"][by]
    return {"seeds": n_seeds, "test": by, "p": p, "as_it_should_be": p < CAUGHT}


# ----------------------------------------------------------------------------------- command line


def verdict(cases: dict[str, dict]) -> dict:
    """Of all tests of all cases: how many, the smallest p-value, and whether Bonferroni's bound
    rejects."""
    found = {
        (case, test): p for case, said in cases.items() for test, (_, p) in said["tests"].items()
    }
    (case, test), p = min(found.items(), key=lambda item: item[1])
    threshold = FALSE_ALARM / len(found)
    return {
        "false_alarm": FALSE_ALARM,
        "tests": len(found),
        "threshold": threshold,
        "smallest_p": p,
        "where": f"{case}: {test}",
        "rejected": p < threshold,
    }


def line(name: str, said: dict) -> str:
    """One case for people."""
    test, (_, p) = min(said["tests"].items(), key=lambda item: item[1][1])
    about = (
        f"alpha {said['alpha']:.2f}, {said['tokens_per_round']:.2f} a round, "
        if "alpha" in said
        else ""
    )
    zeros = f"{said['tests']['zeros'][0]:.0f} zeros"
    least = f"smallest p of {len(said['tests'])} tests {p:.1e} ({test})"
    return (
        f"{name}: {said['tokens']:,} tokens, {about}{zeros}, seen from {said['seen_from']:.4f},"
        f" {least}"
    )


def run_cases(n_tokens: int, seed: int) -> dict[str, dict]:
    share = n_tokens / sum(case.share for case in CASES)
    cases, rows = {}, []
    for number, case in enumerate(tqdm(CASES, desc="cases")):
        cases[case.name], scores = examine(
            case, math.ceil(1.01 * share * case.share), 1000 * seed + 2 * number
        )
        rows.append((case, scores))
        tqdm.write(line(case.name, cases[case.name]))
    cases["all cases"] = pooled(rows)
    print(line("all cases", cases["all cases"]))
    return cases


def run_controls() -> dict[str, dict]:
    found = {}
    for name in (*BROKEN, KEEPS_THE_LAW):
        found[name] = said = control(
            name, CONTROL_TOKENS // 4 if name in IN_SLOTS else CONTROL_TOKENS
        )
        seen = "as it should be" if said["as_it_should_be"] else "NOT AS IT SHOULD BE"
        print(
            f"broken: {name}: {said['tokens']:,} tokens, p = {said['p']:.1e} ({said['test']}):"
            f" {seen}"
        )
    for case in filter(learns, REPEATED):
        name = f"every request learns from all, {case.name}"
        found[name] = said = repeat_control(case)
        seen = "as it should be" if said["as_it_should_be"] else "NOT AS IT SHOULD BE"
        print(f"broken: {name}: p = {said['p']:.1e} ({said['test']}): {seen}")
    return found


def run_repeated(seed: int) -> dict[str, dict]:
    cases = {}
    for case in tqdm(REPEATED, desc="repeated"):
        cases[case.name] = said = repeat(case, SEEDS, seed)
        tqdm.write(f"{case.name}: {SEEDS} seeds, p = {said['tests']['joint law'][1]:.1e}")
    return cases


def main() -> None:
    parser = Parser(
        description="Does drafting keep the target's law over long sequences? Tests with a stated"
        " bound."
    )
    add = parser.add_argument
    add(
        "--tokens",
        type=positive,
        default=1_000_000,
        metavar="N",
        help="at least so many; default: 1,000,000",
    )
    add("--controls", action="store_true", help="only the broken programs, which must be caught")
    add("--seed", type=int, default=0, help="default: 0")
    add("--write", type=Path, metavar="FILE", help="results as JSON")
    args = parser.parse_args()
    with exit_on_error():
        start, found = time.perf_counter(), {}
        if not args.controls:
            cases = run_cases(args.tokens, args.seed)
            repeated = run_repeated(args.seed)
            found = {
                **verdict(cases | repeated),
                "tokens": cases["all cases"]["tokens"],
                "cases": cases,
                "repeated": repeated,
            }
            print(
                f"{found['tests']} tests, smallest p {found['smallest_p']:.1e}, threshold"
                f" {found['threshold']:.1e}"
            )
        found["controls"] = run_controls()
        found["seconds"] = round(time.perf_counter() - start, 1)
        if args.write:
            record(args.write, found)
    kept = not found.get("rejected") and all(
        said["as_it_should_be"] for said in found["controls"].values()
    )
    print("the law holds" if kept else "the law does NOT hold, or a control went unseen")
    sys.exit(0 if kept else 1)


if __name__ == "__main__":
    main()
