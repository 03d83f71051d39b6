"""cli/report.py: what a run is said to have cost and gained, from records made by hand."""

import itertools
import json
import math
import resource
import sys
from types import SimpleNamespace

import pytest
import torch
from test_speculative import tiny

from cli.chat import status_line
from cli.report import (
    ACCEPTED,
    BONUS,
    CORRECTED,
    PLAIN_TOKEN,
    RowStatistics,
    bytes_read,
    decided,
    peak_memory_gb,
    speculative,
    token_origin,
)
from cli.report import summary as lines_of
from decoding.costs import Costs, expected_tokens
from decoding.draft_length import DraftLength
from decoding.options import EngineOptions
from decoding.sampling import Sampling
from decoding.scheduler import Request
from decoding.statistics import StepRecord, Timing, TokenRecord
from drafts.pard import PardDraft
from model import KVCache

COSTS = Costs(0.1, {3: 0.06}, {3: 0.12})  # c = 0.2, v = 1.2
FIRST = TokenRecord(0, 0, -1, 0.0, first=True)
# a plain step, or a round that had nothing to draft for the row
PLAIN = TokenRecord(0, 0, -1, 0.0, first=False)


def tokens(accepted: int, shown: int, overlap: float = 0.5) -> list[TokenRecord]:
    """A round that drafted 3."""
    return [
        TokenRecord(i, 3, accepted, overlap if i < 3 else 0.0, first=False) for i in range(shown)
    ]


def batch(rows: list[list[TokenRecord]], ks: list[int], seconds: float) -> Timing:
    """Rows that all take part in all steps, which draft so many tokens."""
    positions = (1,) * len(rows)
    records = [StepRecord(k, seconds / len(ks), 0.1, 0.2, positions, COSTS) for k in ks]
    timing = Timing()
    for i, row in enumerate(rows):
        request = Request(i, [1], Sampling(0), 99, tokens=[1] * len(row), token_records=row)
        begins = (token.index == 0 and not token.first for token in row)
        request.token_steps = list(itertools.accumulate(begins))
        request.steps = records
        request.decode_s = seconds
        timing.requests.append(request)
    return timing


def alone(timing: Timing, row: int) -> Timing:
    return Timing([timing.requests[row]])


def engine(k: int = 3) -> SimpleNamespace:
    return SimpleNamespace(
        identical=True,
        drafter=True,
        models=[torch.nn.Linear(2, 2)],
        planner=SimpleNamespace(speculate_k=k, costs=COSTS),
        options=EngineOptions(),
    )


def test_statistics_by_hand():
    """Three rounds of K = 3: two accepted and corrected; all accepted and a bonus; first rejected,
    at the end. Then a plain step."""
    row = [FIRST, *tokens(2, 3), *tokens(3, 4), *tokens(0, 1), PLAIN]
    A, C, B, P = ACCEPTED, CORRECTED, BONUS, PLAIN_TOKEN
    assert [token_origin(token) for token in row] == [P, A, A, C, A, A, A, B, C, P]
    found = speculative(engine(), batch([row], [3, 3, 3, 0], seconds=0.6))
    assert found["draft_s"] == pytest.approx(0.4) and found["verify_s"] == pytest.approx(0.6)
    assert found["rounds"] == 4 and found["rounds_by_k"] == {0: 1, 3: 3}
    assert found["drafted"] == 9 and found["accepted"] == 5
    assert found["accepted_by_position"] == [2, 2, 1] and found["reached_by_position"] == [3, 2, 2]
    assert found["alpha"] == 0.5 and found["tokens_per_round"] == 9 / 4
    assert found["c"] == pytest.approx(0.2) and found["v"] == pytest.approx(1.2)
    assert found["measured_speedup"] == pytest.approx(9 * 0.1 / 0.6)
    assert found["predicted_speedup"] == pytest.approx(9 / (3 * (0.6 + 1.2) + 1))
    assert found["tokens_per_round_iid"] == pytest.approx((3 * 1.875 + 1) / 4)
    assert found["predicted_speedup_iid"] == pytest.approx((3 * 1.875 + 1) / (3 * 1.8 + 1))
    twice = RowStatistics(row + row)
    assert twice.tokens == 18 and twice.accepted[0] == 4 and twice.rounds[3] == 6
    empty = speculative(engine(), batch([[]], [], seconds=0.0))
    assert empty["alpha"] is None and empty["rounds"] == 0 and len(lines_of(empty)) == 4


def test_the_speed_up_of_a_batch_is_that_of_its_rows():
    """Eight rows that each decode as fast as they would plainly have a speed-up of 1, not of 8. A
    row that ends early is not charged for what the others then take."""
    row = [FIRST, *tokens(2, 3), *tokens(2, 3)]
    for rows in (1, 8):
        found = speculative(engine(), batch([row] * rows, [3, 3], seconds=0.6))
        assert found["measured_speedup"] == pytest.approx(1.0)
        assert found["predicted_speedup"] == pytest.approx(6 / 3.6)
    timing = batch([row, row[:4]], [3, 3], seconds=0.6)
    timing.requests[1].decode_s = 0.2
    assert speculative(engine(), alone(timing, 1))["measured_speedup"] == pytest.approx(
        3 * 0.1 / 0.2
    )
    assert speculative(engine(), timing)["measured_speedup"] == pytest.approx(9 * 0.1 / 0.8)


def test_a_round_costs_a_row_the_same_where_only_another_row_matched():
    """Two rows, four rounds: the second row matched in one of them. Acceptance is that of matches,
    so what it promises holds for that share of the rounds alone."""
    always, once = [FIRST, *4 * tokens(2, 3)], [FIRST, PLAIN, PLAIN, *tokens(2, 3), PLAIN]
    timing = batch([always, once], [3, 3, 3, 3], seconds=1.0)
    found = speculative(engine(), alone(timing, 1))
    assert found["rounds_by_k"] == {0: 3, 3: 1} and found["drafted"] == 3
    assert found["predicted_speedup"] == pytest.approx(6 / (4 * 1.8))
    assert found["tokens_per_round_iid"] == pytest.approx(1 + 0.25 * 0.875)
    assert found["predicted_speedup_iid"] == pytest.approx((1 + 0.25 * 0.875) / 1.8)
    assert found["best_k"] == 0 and found["best_k_speedup"] == 1.0
    both = speculative(engine(), timing)
    assert both["predicted_speedup"] == pytest.approx((12 + 6) / (8 * 1.8))
    assert both["predicted_speedup_iid"] == pytest.approx((1 + 5 / 8 * 0.875) / 1.8)


def test_without_a_round_there_is_no_speed_up_and_no_draft_pass():
    timing = batch([[FIRST, PLAIN, PLAIN]], [0, 0], seconds=0.3)
    found = speculative(engine(), timing)
    assert found["predicted_speedup"] is found["measured_speedup"] is found["alpha"] is None
    target, draft = tiny(0), tiny(1)
    drafter = PardDraft(draft, mask=1)  # one pass for any K but 0
    drafter.runner = SimpleNamespace(model=draft, cache_type=KVCache)
    runner = SimpleNamespace(model=target, cache_type=KVCache)
    read = [
        bytes_read(SimpleNamespace(runner=runner, drafter=each), timing) for each in (None, drafter)
    ]
    assert read[0] == read[1] > 0


def test_a_chat_tells_the_share_of_all_drafted_tokens():
    """Three tokens were drafted, the first was rejected: none of three, not none of one. Then two
    of three."""
    records = [FIRST, *tokens(0, 1), *tokens(2, 3)]
    request = Request(0, [1], Sampling(0), 99, tokens=[1] * 5, token_records=records, steps=[1, 2])
    answer = SimpleNamespace(prompt=[1], finish_reason="length", request=request)
    assert status_line(answer).endswith("2.00 tokens a round, 33% accepted")


def test_a_row_without_any_match_is_charged_for_the_rounds_of_others():
    timing = batch([[FIRST, *tokens(3, 4)], [FIRST, PLAIN]], [3], seconds=0.36)
    found = speculative(engine(), alone(timing, 1))
    assert found["predicted_speedup"] == pytest.approx(1 / 1.8) and found["alpha"] is None
    assert found["measured_speedup"] is None, (
        "nothing was drafted for it: drafting has no speed-up to measure"
    )


def test_steps_count_by_the_costs_of_their_own_threads():
    """Three plain tokens with one thread at 0.3 s, then a round of four with two threads at 0.1 s a
    plain step."""
    slow, fast = Costs(0.3, {3: 0.1}, {3: 0.4}), Costs(0.1, {3: 0.03}, {3: 0.15})
    timing = batch([[FIRST, PLAIN, PLAIN, PLAIN, *tokens(3, 4)]], [0, 0, 0, 3], seconds=1.0)
    request = timing.requests[0]
    costs = [slow if step.k == 0 else fast for step in request.steps]
    request.steps = [step._replace(costs=c) for step, c in zip(request.steps, costs)]
    found = speculative(engine(), timing)
    assert found["measured_speedup"] == pytest.approx((3 * 0.3 + 4 * 0.1) / request.decode_s)
    assert found["predicted_speedup"] == pytest.approx(7 / (3 + 0.18 / 0.1))


def test_figures_of_a_growing_text_take_the_costs_that_each_step_was_planned_by():
    """Two rounds that keep all 3 tokens: one at 0.18 s for plain steps of 0.1 s, one at 0.6 s for
    plain steps of 0.2 s; what the engine goes by afterwards does not matter."""
    short, long = Costs(0.1, {3: 0.06}, {3: 0.12}), Costs(0.2, {3: 0.12}, {3: 0.48})
    timing = batch([[FIRST, *tokens(3, 4, 0.9), *tokens(3, 4, 0.9)]], [3, 3], seconds=1.0)
    request = timing.requests[0]
    request.steps = [step._replace(costs=c) for step, c in zip(request.steps, (short, long))]
    figures = speculative(engine(), timing)
    assert figures["measured_speedup"] == pytest.approx(4 * 0.1 + 4 * 0.2)
    assert figures["predicted_speedup"] == pytest.approx(8 / (1.8 + 3))
    assert figures["c"] == pytest.approx(0.06 / 3 / 0.1)
    assert figures["v"] == pytest.approx((0.12 + 0.48) / (0.1 + 0.2))
    assert figures["predicted_speedup_iid"] == pytest.approx(expected_tokens(0.9, 3) / (0.6 + 2))


def test_the_best_k_is_said_to_be_the_best_of_what_was_measured():
    found = speculative(engine(), batch([[FIRST, *tokens(3, 4, overlap=0.9)]], [3], seconds=0.2))
    assert found["best_k"] == 3
    assert lines_of(found)[2].endswith("K = 3 would be the best, with 1.91")


def test_auto_drafts_less_where_few_rows_match():
    """Acceptance is perfect where something matches: with all rows the longest K pays, with one in
    eight none does."""
    costs = Costs(1.0, {1: 0.0, 3: 0.0}, {1: 1.2, 3: 1.5})
    assert costs.best(1.0) == (3, 4 / 1.5) and costs.best(1.0, 1 / 8) == (0, 1.0)
    assert costs.best(1.0, 0.5)[1] == pytest.approx((1 + 0.5 * (expected_tokens(1.0, 3) - 1)) / 1.5)
    length = DraftLength("auto", costs)
    for _ in range(100):
        length.observe(1.0)
    assert length.choose() == 3
    for _ in range(100):
        length.observe(1.0), length.observe_share(1, 8)
    assert length.choose() == 0


def test_a_row_that_failed_before_its_first_token_takes_no_other_rows_figures():
    row = [FIRST, *tokens(2, 3), *tokens(2, 3)]
    timing = batch([[], row], [3, 3], seconds=0.6)
    timing.requests[0].steps = []
    timing.requests[0].decode_s = 0.0
    expected = speculative(engine(), batch([row], [3, 3], seconds=0.6))
    assert speculative(engine(), timing) == speculative(engine(), alone(timing, 1)) == expected
    assert speculative(engine(), alone(timing, 0))["alpha"] is None


def test_the_rate_of_a_row_counts_the_tokens_of_its_steps():
    """A prompt's last token may run in a step, which then decides the first token too. A failed row
    has no token."""
    request = Request(0, [1], Sampling(0), 9)
    for token_steps, count in (([0, 1, 2], 2), ([1, 2, 3], 3), ([0, 1, 1], 2)):
        request.token_steps = token_steps
        assert decided([request, Request(1, [1], Sampling(0), 9)]) == count


def test_a_broken_draft_leaves_numbers():
    """NaN is not JSON, and would stay in the mean that draft lengths follow from."""
    found = speculative(
        engine(), batch([[FIRST, *tokens(0, 1, math.nan), *tokens(2, 3)]], [3, 3], seconds=0.2)
    )
    assert found["alpha"] == 0.5
    json.dumps(found, allow_nan=False)
    length = DraftLength("auto", Costs(1.0, {1: 0.0, 3: 0.0}, {1: 1.2, 3: 1.5}))
    length.observe(math.nan)
    for _ in range(100):
        length.observe(1.0)
    assert length.choose() == 3


def test_no_speed_up_is_measured_where_nothing_was_drafted():
    """Plain steps are as long as plain steps: another number only says that the machine has changed
    since then."""
    found = speculative(engine(), batch([[FIRST, PLAIN, PLAIN]], [0, 0], seconds=0.1))
    assert found["measured_speedup"] is None and "speed-up – measured" in lines_of(found)[2]


@pytest.mark.parametrize("system, maxrss", [("linux", 2_000_000), ("darwin", 2_048_000_000)])
def test_peak_memory_is_in_the_units_of_its_system(system, maxrss, monkeypatch):
    """getrusage counts kilobytes of 1,024 bytes on Linux, and bytes on macOS."""
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=maxrss))
    assert peak_memory_gb(torch.device("cpu")) == 2.048
