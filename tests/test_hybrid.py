"""drafts/hybrid.py: which draft a step takes, the law of sampled text in batches of mixed rows, and
the cache of a model that sits rounds out.

A false alarm of a chi-square test here has probability below 1e-6; its control, broken on purpose,
must be caught with p < 1e-12.
"""

import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from conftest import generate
from test_drafts import any_drafter, recorded, tiny_drafter, with_context
from test_speculative import (
    BASE,
    LONG_PROMPT,
    PROMPTS,
    joint_law,
    p_value,
    pair,
    rows_of,
    tiny,
)

import decoding.readback as clock
from cli.flags import parse_args
from cli.main import main as run_args
from decoding.costs import Costs, expected_tokens
from decoding.draft_length import MIN_GAIN, DraftLength, Gains
from decoding.engine import Engine
from decoding.memory import Memory
from decoding.options import EngineOptions
from decoding.planner import Planner, draft_lengths
from decoding.runner import ModelRunner, padded_length
from decoding.sampling import Sampling
from decoding.scheduler import Request, Slot
from decoding.statistics import Timing
from drafts.base import Draft, Drafter, ModelDraft
from drafts.hybrid import Choice, HybridDraft
from drafts.registry import check_draft, load_drafter
from drafts.suffix import SuffixDraft
from loading.options import DraftOptions, split_spec
from speculative import Plan

KS = (1, 2, 3, 5, 8)


class Spy:
    """Records what an engine plans: K, and the rows whose draft is the model's."""

    def __init__(self, engine: Engine):
        self.steps: list[tuple[int, list[int], int]] = []
        plan = engine.prepare_step

        def planned(requests, *args):
            step = plan(requests, *args)
            drawing = {r for each in step.plans if each.runs_drafter for r in each.requests}
            rows = [row for row, request in step.requests if request in drawing]
            self.steps.append((step.k, rows, len(requests)))
            assert step.runs_drafter == bool(rows)
            return step

        engine.prepare_step = planned

    @property
    def rounds(self) -> dict[str, int]:
        """How many rounds had rows of one draft alone, and of both."""
        counts = {"suffix": 0, "model": 0, "mixed": 0}
        for k, rows, num_rows in self.steps:
            if k:
                some = "model" if len(rows) == num_rows else "mixed"
                counts[some if rows else "suffix"] += 1
        return counts


def hybrid_of(kind: str, target, draft) -> HybridDraft:
    second = ModelDraft(draft) if kind == "model" else any_drafter(kind, target, draft)
    return HybridDraft(SuffixDraft(), second)


# -------------------------------------------------------------------------------------- the choice


class Stub(Drafter):
    """A drafter that expects what the test says."""

    def __init__(self, expected: list[list[float] | None]):
        super().__init__()
        self.expected = expected

    def expect(self, requests, unread):
        return self.expected


class Choosing:
    """A hybrid of stubs, planned for by costs and acceptance of a test's own."""

    def __init__(self, guesses: list[list[float] | None], can_run: list[bool], length: DraftLength):
        second = Stub([None if can else [] for can in can_run])
        second.num_first_inputs = 2
        drafter = HybridDraft(Stub(guesses), second)
        options = EngineOptions(speculate_k=length.k)
        ks = draft_lengths(options, drafter)
        self.planner = Planner(options, ks, drafter, runner=SimpleNamespace(B=len(guesses)))
        self.planner.costs = length.costs
        self.memory = drafter.memories.shared
        self.memory.draft_length = length
        self.first = drafter.first
        self.requests = [
            Request(i, [1], Sampling(0), 99, slot=Slot(i), memory=self.memory)
            for i in range(len(guesses))
        ]

    def plan(self) -> tuple[int, str]:
        """K, and whose draft is taken."""
        self.planned = plan = self.planner.plan_memory(self.memory, self.requests, [])
        takes_first = self.memory.of(Choice).takes_first
        assert plan.fills_cache == (plan.k > 0 and not takes_first)
        return plan.k, "first" if takes_first else "second"

    def decide(self, num_tokens: int) -> None:
        """The step that was planned gave each row so many tokens."""
        for request in self.requests:
            request.tokens += [1] * num_tokens
        self.memory.of(Gains).observe(self.planned, num_tokens)


def choice(guesses, can_run, length: DraftLength) -> tuple[int, str]:
    return Choosing(guesses, can_run, length).plan()


def length_of(k: int | str, alpha: float, draft_s: float = 0.4) -> DraftLength:
    """A draft that costs 0.4 of a plain step a token, and whose tokens were accepted so often."""
    costs = Costs(1.0, {k: draft_s * k for k in KS}, {k: 1 + 0.05 * k for k in KS})
    length = DraftLength(k, costs)
    length.overlap = alpha * length.weight
    length.num_steps_to_probe = 64  # it was tried
    return length


def test_a_step_takes_the_draft_that_promises_more_tokens():
    """With K = 3 and an acceptance of 0.6 the model promises 0.6 + 0.36 + 0.216 = 1.176 tokens a
    row."""
    length = length_of(3, 0.6)
    assert expected_tokens(0.6, 3) - 1 == pytest.approx(1.176)
    assert choice([[0.9, 0.277]], [True], length) == (3, "first")
    assert choice([[0.9, 0.275]], [True], length) == (3, "second")
    assert choice([[0.9, 0.277], []], [True, True], length) == (3, "second"), "of both rows"
    assert choice([[0.9, 0.277], []], [True, False], length) == (3, "first"), "it cannot draft"
    assert choice([[0.5, 0.4, 0.2, 0.2, 0.2]], [True], length) == (3, "second"), "three count"
    assert choice([[0.1], []], [False, False], length) == (3, "first")
    assert choice([[], []], [False, False], length)[0] == 0, "nothing to draft: a plain step"
    assert choice([[0.999] * 3], [True], length_of(3, 0.9995)) == (3, "second")


def test_auto_also_weighs_what_a_round_costs():
    """1.9 tokens for 1.05 are more than a model gives that costs 0.4 a token; without a guess, or
    beyond the reach of the model, there is one draft left."""
    assert choice([[0.9]], [True], length_of("auto", 0.8)) == (1, "first")
    assert choice([[0.9, 0.8, 0.8]], [True], length_of("auto", 0.8)) == (3, "first")
    cheap = length_of("auto", 0.95, draft_s=0.01)
    assert choice([[0.9]], [True], cheap) == (8, "second"), "one token is less than eight"
    assert choice([[]], [True], cheap) == (8, "second")
    assert choice([[0.9]], [False], cheap) == (1, "first")
    assert choice([[0.01]], [False], cheap)[0] == 0, "a poor guess is not worth a round"
    assert choice([[]], [True], length_of("auto", 0.1))[0] == 0, "and neither is a poor model"
    waiting = length_of("auto", 0.5, draft_s=0.5)
    assert choice([[0.15]], [True], waiting) == (1, "first"), (
        "while a model waits that does not pay"
    )


def test_a_model_rests_where_the_first_draft_alone_is_faster():
    """The model gains 2.3. Rounds of copies give 9 tokens for 1.4 plain steps. Between them the
    model would delay the next one, so the engine waits, until the text has gone on for a while
    without a copy. The model's own rounds say nothing of copies, and count as plain steps."""
    length = length_of("auto", 0.9, draft_s=0.15)
    model_gain = length.best()[1] / MIN_GAIN
    assert model_gain == pytest.approx(2.29, abs=0.01)
    choosing = Choosing([[]], [True], length)
    assert choosing.plan() == (8, "second")
    choosing.first.expected = [[1.0] * 8]
    for _ in range(10):
        assert choosing.plan() == (8, "first")
        choosing.decide(9)
    choosing.first.expected = [[]]
    steps = 0
    while choosing.plan() == (0, "first"):
        choosing.decide(1)
        steps += 1
    gains = choosing.memory.of(Gains)
    assert 5 < steps < 64 and gains.rate == pytest.approx(model_gain, rel=0.05)
    assert choosing.plan() == (8, "second")
    for _ in range(100):
        choosing.decide(9)
    assert gains.rate == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("lag", [0, 2])
def test_tokens_are_credited_to_the_draft_that_made_them(lag, models, monkeypatch):
    """A GPU's results are read late: tokens of a copy may come while the model drafts already."""
    target, draft = models
    monkeypatch.setattr(clock, "host_lag", lambda device: lag)
    credited = []
    turns = itertools.cycle([True, True, True, False, False])
    monkeypatch.setattr(HybridDraft, "prefers_first", lambda *args: next(turns))
    monkeypatch.setattr(Gains, "observe", lambda self, *args: credited.append(args))
    engine = Engine(target, 1, 96, drafter=hybrid_of("model", target, draft), speculate_k=3)
    known(engine)
    credited.clear()
    timing = Timing()
    rows_of(target, PROMPTS[:1], engine=engine, max_new_tokens=60, timing=timing)
    (request,) = timing.requests
    steps = [(step.k, step.runs_drafter) for step in request.steps]
    assert [(plan.k, plan.runs_drafter) for plan, _ in credited] == steps[:-1]
    tokens = [request.token_steps.count(number + 1) for number in range(len(steps))]
    assert [num_tokens for _, num_tokens in credited] == tokens[:-1]
    switches = sum(before[1] != after[1] for before, after in itertools.pairwise(steps))
    assert switches > 3, steps


class SmallVocabulary(Stub):
    """Draws id 0 of its three ids, and writes no others, like a model of fewer ids."""

    vocab_size = 3

    def __init__(self):
        super().__init__([None])
        self.tokens = torch.zeros(2, 2, dtype=torch.int64)
        self.probs = torch.zeros(2, 2, 5)

    def propose(self, batch, plan):
        self.tokens.zero_()
        self.probs[..., : self.vocab_size] = torch.tensor([1.0, 0.0, 0.0])
        return Draft(self.tokens, self.probs).cut(plan.k)


class CopiesFour(Stub):
    def propose(self, batch, plan):
        tokens = torch.full((2, 2), 4)
        return Draft(tokens, torch.nn.functional.one_hot(tokens, 5).float()).cut(plan.k)


def test_the_first_drafts_ids_do_not_stay_in_the_seconds_distribution():
    """Rows of two memories in one step, then of the second draft alone."""
    drafter = HybridDraft(CopiesFour([]), SmallVocabulary())
    requests = []
    for takes_first in (True, False):
        memory = Memory(is_shared=False)
        memory.of(Choice).takes_first = takes_first
        requests.append(Request(0, [1], Sampling(0), 9, memory=memory))
    mixed = drafter.propose(None, Plan(2, 9, list(enumerate(requests))))
    assert mixed.tokens.tolist() == [[4, 4], [0, 0]]
    assert mixed.q.argmax(-1).tolist() == [[4, 4], [0, 0]]
    second = drafter.propose(None, Plan(2, 9, [(0, requests[1]), (1, requests[1])]))
    assert second.q.sum(-1).tolist() == [[1.0, 1.0]] * 2


# ---------------------------------------------------------------------------------------- batches


@pytest.fixture(scope="module")
def models():
    return pair()


def known(engine: Engine, num_tokens: int = 60) -> None:
    """Answer two prompts of four, so that their text is in the suffix drafter's pool."""
    rows_of(engine.model, PROMPTS[:2], engine=engine, max_new_tokens=num_tokens)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "kind",
    [
        "model",
        "eagle",
        *(pytest.param(kind, marks=pytest.mark.attack) for kind in ("pard", "dflash", "shared")),
    ],
)
def test_greedy_text_is_plain_text_by_either_draft(kind, models):
    """Two rows whose text was seen before, and two new ones, together and alone."""
    target, draft = models
    want = rows_of(target, PROMPTS, max_new_tokens=60)
    engine = Engine(target, 4, 96, drafter=hybrid_of(kind, target, draft), speculate_k=3)
    known(engine)
    spy = Spy(engine)
    memory = engine.planner.memories.shared
    memory.draft_length = None  # forget that a random model is never right
    assert rows_of(target, PROMPTS, engine=engine, max_new_tokens=60) == want
    alone = []
    for prompt in PROMPTS:
        memory.draft_length = None
        alone += rows_of(target, [prompt], engine=engine, max_new_tokens=60)
    assert alone == want
    assert min(spy.rounds["suffix"], spy.rounds["model"]) > 3, spy.rounds


def model_difference(models, num_rows: int, seeds=(2, 3, 4)) -> float:
    """The largest difference of the distributions of a draft in rows that took it to those that the
    same model computes from the text alone, without a cache."""
    target, draft = models
    sampling = Sampling(0.3)
    prompts = [PROMPTS[0] * 3, PROMPTS[1], PROMPTS[3] * 2, PROMPTS[2]][:num_rows]
    worst, num_judged, num_guessing = 0.0, 0, 0
    for seed in seeds:
        drafter = HybridDraft(SuffixDraft(), recorded(ModelDraft)(draft))
        engine = Engine(target, num_rows, 96, drafter=drafter, speculate_k=3)
        options = {"engine": engine, "max_new_tokens": 60, "sampling": sampling}
        rows_of(target, prompts, seed=1, **options)  # more to look up
        engine.clear()
        drafter.second.seen.clear()
        for cache in (*engine.runner.caches.layers, *engine.drafter.runner.caches.layers):
            cache.k.fill_(9.0), cache.v.fill_(-9.0)  # so that a position that was skipped shows
        spy = Spy(engine)
        rows_of(target, prompts, seed=seed, **options)
        num_guessing += spy.rounds["mixed" if num_rows > 1 else "suffix"]
        model_rows = [rows for k, rows, _ in spy.steps if k and rows]
        for rows, seen in zip(model_rows, drafter.second.seen, strict=True):
            for row, (before, tokens, probs) in enumerate(zip(*seen[:3])):
                if row not in rows or not before or len(before) > 90:  # or it has ended
                    continue
                text = torch.tensor([before + tokens])
                logits = draft(text, torch.arange(text.size(1)))[0, len(before) - 1 : -1]
                worst = max(worst, (sampling.probs(logits) - probs).abs().max().item())
                num_judged += 1
    assert num_judged > 9 and num_guessing > 3, (num_judged, num_guessing)
    return worst


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("num_rows", [pytest.param(1, marks=pytest.mark.attack), 4])
def test_the_model_keeps_its_cache_while_it_sits_rounds_out(models, num_rows, lag, monkeypatch):
    """And while its row of a mixed batch takes the suffix draft: four rows of one seed learn, and
    choose, each alone. Rows take that draft as often as they can, to make gaps."""
    monkeypatch.setattr(DraftLength, "alpha", 0.001)
    monkeypatch.setattr(clock, "host_lag", lambda device: lag)
    assert model_difference(models, num_rows) < 1e-4
    if num_rows > 1 and lag:
        return
    # The negative control: a suffix draft leaves no gap, it says.
    monkeypatch.setattr("decoding.engine.lacks_positions", lambda engine, plans: False)
    assert model_difference(models, num_rows) > 1e-2


def test_a_draft_computes_no_position_that_it_has(models, monkeypatch):
    """After m plain tokens its cache lacks m positions, and the one or two that the first pass of a
    round computes."""
    target, draft = models
    drafter = ModelDraft(draft)
    engine = Engine(target, 1, 96, drafter=drafter, speculate_k=3)
    engine.add_request(PROMPTS[0], sampling=Sampling(0.7), max_new_tokens=80)
    (request,) = engine.requests.values()
    engine.step()
    spans = []
    monkeypatch.setattr(
        ModelRunner,
        "prefill",
        lambda self, state, begin, end, chunk=None: spans.append((begin, end, self.model)),
    )
    planned = []
    monkeypatch.setattr(DraftLength, "choose", lambda self, expected: planned[-1])
    for num_plain in (1, 2, 5, 9, 1, 3):
        for k in (*[0] * num_plain, 3, 2):
            num_positions = request.num_positions
            planned.append(k)
            engine.step()
            if spans:
                ((begin, end, model),) = spans
                assert model is draft and k == 3 and end == num_positions - 1
                assert num_plain <= end - begin <= num_plain + 1
                spans.clear()
                num_plain = None
        assert num_plain is None, "no position was computed before the round"


def test_a_draft_that_rested_computes_what_it_lacks(models, monkeypatch):
    """Plain steps leave the draft's cache behind. The next round first runs the missing positions
    like a prompt, and its distributions are those of the whole text."""
    target, draft = models
    widths = []
    hidden = draft.hidden

    def hidden_and_note(tokens, *args):
        widths.append(tokens.size(1))
        return hidden(tokens, *args)

    monkeypatch.setattr(draft, "hidden", hidden_and_note)
    for num_plain in (0, 1, 6, 7, 40):
        drafter = recorded(ModelDraft)(draft)
        engine = Engine(target, 2, 96, drafter=drafter, speculate_k=2)
        for prompt in ([8], PROMPTS[0]):
            engine.add_request(prompt, sampling=Sampling(0.5), max_new_tokens=60)
        engine.step()
        with monkeypatch.context() as context:
            context.setattr(DraftLength, "choose", lambda self, expected: 0)
            for _ in range(num_plain):
                engine.step()
        widths.clear()
        engine.step()
        num_rows = 2 if num_plain else 0
        assert widths == [*[padded_length(num_plain)] * num_rows, 2, 1]
        for before, tokens, probs in zip(*drafter.seen[-1][:3], strict=True):
            text = torch.tensor([before + tokens])  # (1, n + 2)
            logits = draft(text, torch.arange(text.size(1)))
            alone = Sampling(0.5).probs(logits[0, len(before) - 1 : -1])
            assert (alone - probs).abs().max() < 1e-4


def test_a_round_of_suffix_drafts_runs_no_model(models, monkeypatch):
    """And its cost is the verification's."""
    target, draft = models
    drafter = hybrid_of("model", target, draft)
    engine = Engine(target, 1, 96, drafter=drafter, speculate_k=3)
    known(engine)
    spy, passes = Spy(engine), []
    hidden = draft.hidden
    monkeypatch.setattr(
        draft, "hidden", lambda *args: (passes.append(len(spy.steps)), hidden(*args))[1]
    )
    timing = Timing()
    rows_of(target, PROMPTS[:1], engine=engine, max_new_tokens=60, timing=timing)
    ran = {number for number in passes if number}
    without = {i + 1 for i, (k, rows, _) in enumerate(spy.steps) if k and not rows}
    assert len(without) > 5 and not ran & without
    assert [step.runs_drafter for step in timing.records] == [
        bool(rows) for _, rows, _ in spy.steps
    ]


def test_suffix_drafts_go_on_beyond_the_models_context(models):
    target, draft = models
    want = rows_of(target, PROMPTS, max_new_tokens=80)
    drafter = hybrid_of("model", target, draft)
    with_context(drafter.second, 40)
    drafter.max_positions = 40
    engine = Engine(target, 4, 96, drafter=drafter, speculate_k=3)
    for _ in range(2):
        timing = Timing()
        assert rows_of(target, PROMPTS, engine=engine, max_new_tokens=80, timing=timing) == want
    late = [
        token.index < token.accepted
        for request in timing.requests
        for token in request.token_records[40 - len(request.prompt) :]
    ]
    assert sum(late) > 0.6 * len(late) > 60


def test_a_model_that_did_not_pay_is_tried_again():
    choosing = Choosing([[]], [True], length_of("auto", 0.01))
    chosen = [choosing.plan()[0] for _ in range(70)]
    assert chosen == [0] * 64 + [min(KS)] * 4 + [0] * 2


@pytest.mark.parametrize("kind", ["model", "dflash"])
def test_auto(kind, models):
    """K follows from costs, the model sits out where the text is known, and the acceptance that
    `auto` measures is the model's alone."""
    target, draft = models
    want = rows_of(target, PROMPTS, max_new_tokens=60)
    drafter = hybrid_of(kind, target, draft)
    engine = Engine(target, 4, 96, drafter=drafter, speculate_k="auto")
    costs = length_of("auto", 0.5, draft_s=0.1).costs
    costs.verify_s = {k: costs.verify_s[k] for k in engine.planner.ks if k in costs.verify_s}
    engine.planner.costs = costs
    spy = Spy(engine)
    for _ in range(2):
        assert rows_of(target, PROMPTS, engine=engine, max_new_tokens=60) == want
    assert spy.rounds["suffix"] > 5 and len({step[0] for step in spy.steps}) > 2
    ran = spy.rounds["model"] + spy.rounds["mixed"]
    assert (engine.planner.memories.shared.draft_length.weight != 4.0) == (ran > 0)


@pytest.mark.compiled
@pytest.mark.parametrize("k", [pytest.param(3, marks=pytest.mark.long), "auto"])
def test_compiled_rounds(k, models, monkeypatch):
    """Nothing compiles after warm-up and a calibration, whether the model runs or not, and
    calibrating steps of a longer text compiles nothing either."""
    monkeypatch.setattr("decoding.warmup.LONG_CONTEXT", 64)
    monkeypatch.setattr("decoding.warmup.SHORT_LENGTH", 20)
    target, draft = models
    want = rows_of(target, PROMPTS, max_new_tokens=40)
    drafter = hybrid_of("model", target, draft)
    drafter.auto_k = (1, 3)
    engine = Engine(target, 4, 96, drafter=drafter, speculate_k=k, compile=True)
    for runner in engine.runners:
        runner.length_multiple = 16  # attend to as few positions as the text has
    engine.warm_up("greedy")
    engine.calibrate(Sampling(0), 20, rounds=1)
    spy = Spy(engine)
    with torch.compiler.set_stance("fail_on_recompile"):
        engine.calibrate(Sampling(0), rounds=1)
        assert all(costs.keys() == {32, 96} for costs in engine.planner.measured_costs.values())
        for prompts in (PROMPTS, PROMPTS, PROMPTS[:1]):
            got = rows_of(target, prompts, engine=engine, max_new_tokens=40)
            assert got == want[: len(prompts)]
    assert spy.rounds["suffix"] and (k == "auto" or spy.rounds["model"])


# -------------------------------------------------------------------------------------------- laws


class ChoosesByTheDraw(HybridDraft):
    """Runs both in every round, looks at the model's first token, and takes the first draft where
    the model had found it unlikely: not lossless."""

    def expect(self, requests, unread):
        self.first.expect(requests, unread)
        return self.second.expect(requests, unread)

    def propose(self, batch, plan):
        tokens, probs = (x.clone() for x in self.first.propose(batch, plan))
        drawn, q = self.second.propose(batch, plan)
        is_unlikely = q[:, 0].gather(1, drawn[:, :1]) < 0.4  # (B, 1)
        takes = is_unlikely & (probs[:, :1].sum(-1) > 0)
        drawn.copy_(torch.where(takes, tokens, drawn))
        q.copy_(torch.where(takes[..., None], probs, q))
        return Draft(drawn, q)


@pytest.mark.attack
@pytest.mark.parametrize("k", [3])
@pytest.mark.parametrize("drafter_class", [HybridDraft, ChoosesByTheDraw])
def test_mixed_rounds_have_the_targets_joint_law(drafter_class, k, monkeypatch):
    """Sequences of five tokens in batches in which rows differ in what they take."""
    check_law(drafter_class, "model", k, monkeypatch)


@pytest.mark.attack
@pytest.mark.parametrize("kind", ["pard", "eagle", "dflash"])
def test_mixed_rounds_of_other_drafts_have_the_targets_joint_law(kind, monkeypatch):
    check_law(HybridDraft, kind, 3, monkeypatch)


def check_law(drafter_class, kind: str, k: int, monkeypatch) -> None:
    model = tiny(3)
    V, n, num_rows = model.config.vocab_size, 5, 256
    is_broken = drafter_class is ChoosesByTheDraw
    monkeypatch.setattr(DraftLength, "alpha", 0.0 if is_broken else 0.45)
    draft = ModelDraft(tiny(7, n_layers=1)) if kind == "model" else tiny_drafter(kind, model)
    drafter = drafter_class(SuffixDraft(), draft)
    drafter.memories.seeds.update(dict.fromkeys(range(4096)))  # each row chooses alone
    engine = Engine(model, num_rows, len(LONG_PROMPT) + n, drafter=drafter, speculate_k=k)
    spy = Spy(engine)
    counts = torch.zeros(V**n)
    for seed in range(0, 4096, num_rows):
        rows = [[] for _ in range(num_rows)]
        seeds = [*range(seed, seed + num_rows)]
        options = {"engine": engine, "sampling": Sampling(1), "max_new_tokens": n, "seed": seeds}
        drafter.first.pool_tokens = 0
        for row, id in generate(model, [LONG_PROMPT] * num_rows, **options):
            rows[row].append(id)
        for row in rows:
            counts[sum(id * V**i for i, id in enumerate(reversed(row)))] += 1
    p = p_value(counts, joint_law(model, LONG_PROMPT, n, Sampling(1)))
    assert p < 1e-12 if is_broken else p > 1e-6
    assert is_broken or spy.rounds["mixed"] > 50


# ------------------------------------------------------------------------------------------- flags


def test_a_spec_names_both():
    assert split_spec("suffix,some/dir") == ("suffix", "some/dir")
    assert split_spec("suffix:8,a,b") == ("suffix:8", "a,b")
    assert split_spec("layers:0-3,5") == ("layers:0-3,5", None) and split_spec(None) == (None, None)
    options = DraftOptions("some/dir", "suffix:8", quantize="int8")
    assert options.source == "suffix:8,some/dir"


def test_the_command_line_drafts_with_both(text_folder, capsys):
    common = ["--checkpoint", text_folder, "--prompt", "the little cat", "--temperature", 0]
    common += ["--dtype", "float32", "--max_new_tokens", 30, "--ignore_eos", "--json"]
    rows = []
    both = ["--draft", f"suffix:8,{text_folder}", "--draft_quantize", "int8", "--speculate_k", 3]
    for draft in ([], both):
        args = [str(part) for part in (*common, "--device", "cpu", *draft)]
        run_args(parse_args(args))
        rows.append(json.loads(capsys.readouterr().out))
    assert rows[0]["tokens"] == rows[1]["tokens"]
    assert rows[1]["speculative"]["accepted"] > 10


def test_a_folder_that_cannot_be_a_draft_is_refused_by_name(text_folder, tmp_path):
    target = SimpleNamespace(**BASE)
    with pytest.raises(ValueError, match=r"--draft suffix:x,.*: 'x' is no number"):
        check_draft(f"suffix:x,{text_folder}", target)
    with pytest.raises(ValueError, match=f"{tmp_path / 'none'}"):
        check_draft(f"suffix,{tmp_path / 'none'}", target)
    with pytest.raises(ValueError, match=r"--draft suffix,: expected"):  # no folder, not this one
        check_draft("suffix,", target)
    for second in ("suffix,mtp:some/dir", "ngram,mtp", "suffix,some/dir"):  # one first draft alone
        with pytest.raises(ValueError, match=second):
            check_draft(f"suffix,{second}", target)
    (tmp_path / "config.json").write_text(json.dumps({"speculators_model_type": "nobodys"}))
    with pytest.raises(ValueError, match=f"{tmp_path}.*speculators_model_type = 'nobodys'"):
        check_draft(f"suffix,{tmp_path}", target)


def test_a_spec_of_both_is_a_drafter(target_of_folder):
    folder, model, tokenizer = target_of_folder
    drafter = load_drafter(f"suffix:5,{folder}", model, tokenizer, pack=False)
    assert isinstance(drafter, HybridDraft) and drafter.first.depth == 5
    assert drafter.model is drafter.second.model and drafter.num_first_inputs == 2
    drafter = load_drafter(f"ngram:4,{folder}", model, tokenizer, pack=False)
    assert drafter.first.n == 4


@pytest.fixture
def target_of_folder(text_folder):
    from loading.checkpoint import load_model
    from loading.tokenizer import load_tokenizer

    return text_folder, load_model(text_folder, dtype=torch.float32), load_tokenizer(text_folder)
