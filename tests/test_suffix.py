"""Suffix decoding (drafts/suffix.py): look-ups against a search by brute force, drafts that come
late or end early, the law of sampled text with earlier answers, and the pool's file. Other files
try it as one drafter of many."""

import collections
import functools
import random
import time

import pytest
import torch
from conftest import generate, in_context
from steps import token_records
from test_speculative import BASE, PROMPTS, NoSync, rows_of, tiny

import decoding.readback as clock
import drafts.suffix as suffix
from cli.flags import parse_args
from cli.main import main as run_args
from decoding.costs import Costs
from decoding.draft_length import DraftLength
from decoding.engine import Engine
from decoding.prefill import next_prompt
from decoding.sampling import Sampling
from decoding.statistics import Timing
from drafts.suffix import END, Acceptance, DraftToken, IndexedText, SuffixDraft


def text_of(ids: list[int]) -> IndexedText:
    text = IndexedText()
    text.extend(ids)
    return text


def tokens_of(ids: list[int], depth: int = 24, longest: int = 9) -> list[int]:
    return [token.id for token in text_of(ids).continuation(ids, depth, longest)]


def test_continuations_by_hand():
    assert tokens_of([1, 2, 3, 4]) == [], "nothing stood before"
    assert tokens_of([1, 2, 7, 8, 1, 2]) == [7, 8, 1, 2], "twice the length of the match"
    assert tokens_of([1, 2, 7, 8, 1, 2], longest=3) == [7, 8, 1]
    assert tokens_of([5, 5, 5]) == [5] * 4, "a continuation repeats at the end of the text"
    assert tokens_of([1, 2, 7, 9, 2, 8, 1, 2]) == [7, 9, 2, 8], "the longest suffix decides"
    assert tokens_of([1, 2, 7, 9, 2, 8, 1, 2], depth=1) == [8, 1], "of at most `depth` tokens"
    assert tokens_of([2, 7, 3, 2, 8, 3, 2, 7, 4, 2], depth=1)[0] == 7, "the most frequent one"
    assert tokens_of([2, 7, 3, 2, 8, 4, 2], depth=1)[0] == 8, "of equal ones the latest"
    draft = text_of([2, 7, 3, 2, 8, 3, 2, 7, 4]).continuation([2], 24, 9)
    assert draft == [DraftToken(7, 2 / 3, 1), DraftToken(4, 1 / 2, 2)], (
        "its share, and the length of the match before it"
    )
    unsure = [n for i in range(20) for n in (1, 10 + i)]
    assert text_of(unsure).continuation([1], 24, 9) == [], "a draft ends below a product of 0.1"
    answers = text_of([1, 2, -1, 2, 5, -1, 3, -1])
    assert [token.id for token in answers.continuation([1, 2], 24, 9)] == [], (
        "an answer that ended has no continuation"
    )
    assert [token.id for token in answers.continuation([9, 2], 24, 9)] == [5], (
        "and none leads into the next"
    )


@pytest.mark.parametrize("symbols", [2, 4, 30])
def test_the_longest_suffix_as_brute_force_finds_it(symbols, monkeypatch):
    monkeypatch.setattr(suffix, "MAX_OCCURRENCES", 1000)
    rng = random.Random(symbols)
    for _ in range(150):
        ids, depth = (
            [rng.randrange(symbols) for _ in range(rng.randrange(1, 60))],
            rng.randrange(1, 12),
        )
        lengths = {}
        for end in range(len(ids) - 1):
            lengths[end] = next(
                n for n in range(99) if n == min(depth, end + 1) or ids[end - n] != ids[-1 - n]
            )
        longest = max(lengths.values(), default=0)
        counts = collections.Counter(ids[end + 1] for end, n in lengths.items() if n == longest > 0)
        draft = text_of(ids).continuation(ids, depth, 9)
        share = max(counts.values(), default=0) / max(1, counts.total())
        if share < suffix.MIN_SHARE:
            assert draft == []
        else:
            assert (draft[0].share, draft[0].match_length) == (share, longest)
            assert counts[draft[0].id] == max(counts.values())


# ----------------------------------------------------------------------------------------- rounds


def options_of(drafter: SuffixDraft, **more) -> dict:
    return {"drafter": drafter, "sampling": Sampling(0), "max_new_tokens": 60, **more}


@pytest.fixture(scope="module")
def model():
    return tiny(0, 14, **BASE)


def test_answers_are_drafted_from_earlier_ones(model):
    """The second time every token of an answer is known; a row's draft may be shorter than its
    round."""
    want, drafter = rows_of(model, PROMPTS, max_new_tokens=60), SuffixDraft()
    engine = Engine(model, 4, 96, drafter=drafter, speculate_k=5)
    timings = [Timing(), Timing()]
    for timing in timings:
        assert rows_of(model, PROMPTS, engine=engine, timing=timing, max_new_tokens=60) == want
    steps = [timing.steps for timing in timings]
    assert steps[1] <= 20 < steps[0], (
        "some ten rounds of six tokens, and a few until the match is long"
    )
    records = [
        token
        for timing in timings
        for row in token_records(timing)
        for token in row
        if not token.first
    ]
    assert {0, 2, 5} < {token.k for token in records} <= set(range(6))
    assert all(token.accepted <= token.k for token in records)
    assert all(token.overlap == 0 for token in records if token.index >= token.k)
    assert any(step.k == 0 for step in timings[0].records), "without a draft a step is plain"
    off = SuffixDraft(pool_tokens=0)
    engine = Engine(model, 4, 96, drafter=off, speculate_k=5)
    again = [Timing(), Timing()]
    for timing in again:
        rows_of(model, PROMPTS, engine=engine, timing=timing, max_new_tokens=60)
    assert again[0].steps == again[1].steps, "nothing is remembered without a pool"


def test_a_length_that_was_not_calibrated(model):
    """Costs of other lengths, as a run has that calibrated before it chose its K."""
    want = rows_of(model, PROMPTS, max_new_tokens=20)
    engine = Engine(model, 4, 96, drafter=SuffixDraft(), speculate_k=4)
    engine.planner.costs = Costs(1.0, {2: 0.0, 5: 0.0}, {2: 1.2, 5: 1.5})
    for _ in range(2):
        assert rows_of(model, PROMPTS, engine=engine, max_new_tokens=20) == want


@pytest.mark.one_in(3)
@pytest.mark.parametrize("lag", [1, 2, 5])
def test_drafts_of_late_tokens(model, monkeypatch, lag):
    """Rounds run ahead of the reading, as on a GPU. Drafts still count where they agree with the
    tokens since."""
    want = rows_of(model, PROMPTS, max_new_tokens=60)
    monkeypatch.setattr(clock, "host_lag", lambda device: lag)
    engine = Engine(model, 4, 96, drafter=SuffixDraft(), speculate_k=3)
    timings = [Timing(), Timing()]
    for timing in timings:
        assert rows_of(model, PROMPTS, engine=engine, timing=timing, max_new_tokens=60) == want
    accepted = [
        record.index < record.accepted
        for request in timings[1].requests
        for record in request.token_records
    ]
    assert sum(accepted) > 60, "a known answer is accepted in spite of the lag"


def test_a_draft_that_disagrees_with_later_tokens_is_none(model, monkeypatch):
    """The negative control: without the comparison wrong drafts are verified, and still no token is
    wrong."""
    want = rows_of(model, PROMPTS, max_new_tokens=60)
    monkeypatch.setattr(clock, "host_lag", lambda device: 2)
    alphas = []
    for broken in (False, True):
        if broken:
            monkeypatch.setattr(
                SuffixDraft, "align", functools.partialmethod(unaligned, SuffixDraft.align)
            )
        engine = Engine(model, 4, 96, drafter=SuffixDraft(), speculate_k=3)
        for timing in (Timing(), Timing()):
            assert rows_of(model, PROMPTS, engine=engine, timing=timing, max_new_tokens=60) == want
        drafted = [t for row in token_records(timing) for t in row if t.index < t.k]
        alphas.append(sum(t.index < t.accepted for t in drafted) / len(drafted))
    assert alphas[0] > alphas[1] + 0.05


def unaligned(self, align, state, k):
    """As if the text had no later tokens: the draft begins at its first one."""
    self.draft_rows[:, 0] = state.pos
    align(self, state, k)


@pytest.mark.parametrize("last_guess, is_drafted", [(4, True), (9, False)])
def test_a_draft_is_compared_up_to_the_last_decided_token(last_guess, is_drafted, model):
    """The host knew the text up to position 1 and drafted three tokens; two more were decided."""
    drafter = SuffixDraft()
    state = Engine(model, 1, 96, drafter=drafter, speculate_k=3).batch
    state.tokens[0, :4] = torch.tensor([1, 2, 3, 4])
    state.pos[0] = 3
    state.done[0] = False
    drafter.draft_rows[0] = torch.tensor([1, 3, last_guess, 5, END])
    drafter.align(state, 2)
    tokens, probs = drafter.tokens[:, :2], drafter.probs[:, :2]
    assert tokens.tolist() == [[5, 4] if is_drafted else [4, 4]]
    assert probs.sum(dim=-1).tolist() == [[float(is_drafted), 0.0]]
    assert probs[0, 0, 5] == is_drafted


def test_k_follows_the_expected_length():
    costs = Costs(
        1.0, dict.fromkeys((1, 2, 3, 5, 8), 0.0), {1: 1.1, 2: 1.3, 3: 1.5, 5: 1.7, 8: 2.5}
    )
    choose = DraftLength("auto", costs).choose
    assert choose([[]]) == 0 and choose([[0.05]]) == 0, "a poor guess is not worth a round"
    assert choose([[0.9]]) == 1 and choose([[0.9, 0.8]]) == 2 and choose([[0.9, 0.1]]) == 1
    assert choose([[0.99**i for i in range(1, 9)]]) == 8
    assert choose([[0.9], [], [], []]) == 1 and choose([[0.3], [], [], []]) == 0, (
        "all rows pay for one's draft"
    )
    assert DraftLength(5).choose([[0.1]]) == 5


def test_auto_learns_that_matches_lie(model):
    """Tokens show without a round whether a draft would have been accepted."""
    costs = Costs(
        1.0, dict.fromkeys((1, 2, 3, 5, 8), 0.0), {k: 1 + 0.3 * k for k in (1, 2, 3, 5, 8)}
    )
    drafter = SuffixDraft(pool_tokens=0)
    engine = Engine(model, 1, 96, drafter=drafter, speculate_k="auto")
    engine.planner.costs = costs
    prompt = [n for i in range(8) for n in (1, 2, 3 + i)]  # 1 2 is always followed by another token
    want = rows_of(model, [prompt], max_new_tokens=60)
    assert rows_of(model, [prompt], engine=engine, max_new_tokens=60) == want
    figures = drafter.memories.shared.of(Acceptance)
    before = figures.probabilities([DraftToken(5, 1.0, 2)])[0]
    lies = [1, 2, 3, 1, 2, 4, 1, 2, 5, 1, 2, 6, 1, 2, 7, 1, 2, 8]
    engine.add_request(lies[:2], sampling=Sampling(0), max_new_tokens=40)
    request = next_prompt(engine)
    for n in range(2, len(lies)):
        request.tokens = lies[2:n]
        drafter.expect([request], 0)
    assert figures.probabilities([DraftToken(5, 1.0, 2)])[0] < before


def test_the_host_waits_for_nothing(model):
    """Between reading and launching no value of the device is asked for."""
    engine = Engine(model, 4, 96, drafter=SuffixDraft(), speculate_k=3)
    for prompt in PROMPTS:
        engine.add_request(prompt, sampling=Sampling(0), max_new_tokens=30)
    while not engine.scheduler.decoding():
        engine.step()
    for _ in range(12):
        requests = engine.scheduler.decoding()
        with torch.inference_mode(), NoSync():
            step = engine.prepare_step(requests, engine.planner.plan(requests, []))
            result = engine.run(step)
        engine.readback.send(result, step)
        engine.read(0)
    assert any(request.token_records[-1].k for request in engine.requests.values())


# --------------------------------------------------------------------------------------- requests


class SlowLookUp(SuffixDraft):
    def expect(self, requests, unread):
        time.sleep(0.01)
        return super().expect(requests, unread)


def test_look_ups_are_time_of_the_steps_and_of_the_drafter():
    model = in_context(tiny(3), 40)
    timing, engine = Timing(), Engine(model, 1, 40, drafter=SlowLookUp(), speculate_k=2)
    options = {"engine": engine, "sampling": Sampling(0), "max_new_tokens": 20, "timing": timing}
    assert len([*generate(engine.model, [[1, 2, 3, 1, 2]], **options)]) == 20
    assert timing.decode_s >= timing.draft_s >= 0.01 * timing.steps > 0
    (request,) = timing.requests
    assert request.decode_s == pytest.approx(timing.decode_s)


def test_no_draft_of_the_slots_last_request_is_left():
    """With fixed_width_steps a round runs where nothing is drafted: it must not find the draft of
    another text."""
    # of the second prompt; one of them ends where the first request's draft began
    for length in range(19, 28):
        records = []
        for prompts in ([[9, 8, 7] * 6, [*range(20, 20 + length)]], [[*range(20, 20 + length)]]):
            model = tiny(3, vocab_size=60, max_seq_length=64)
            engine = Engine(
                model,
                1,
                60,
                drafter=SuffixDraft(pool_tokens=0),
                speculate_k=3,
                fixed_width_steps=True,
            )
            for prompt in prompts:
                favourite = (
                    Sampling(0, logit_bias=((9, 100.0),)) if prompt[0] == 9 else Sampling(1.5)
                )
                id = engine.add_request(prompt, sampling=favourite, seed=1, max_new_tokens=9)
                request = engine.requests[id]
                while engine.has_unfinished():
                    engine.step()
            records.append([(record.k, record.accepted) for record in request.token_records])
        assert records[0] == records[1]


# ------------------------------------------------------------------------------------------ flags


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--draft", "suffix:0"], "--draft suffix:0: '0' is no number of tokens to match"),
        (["--draft", "suffix:x"], "--draft suffix:x: 'x' is no number"),
    ],
)
def test_wrong_flags(flags, message):
    with pytest.raises(ValueError, match=message):
        run_args(parse_args(["--device", "cpu", *flags]))
