"""What the server has done since its start, in Prometheus' text format.

    METRICS     every metric with its type and its help
    Metrics     the totals; the decoder adds every answer, serve.py every refused request

The format: https://prometheus.io/docs/instrumenting/exposition_formats
"""

import threading
from collections import Counter
from collections.abc import Mapping

from cli.report import RowStatistics

PREFIX = "quickdraft_"
OUTCOMES = ("stop", "length", "abort", "error")
# A metric's name -> its type, its help, and what follows the name in its samples.
METRICS = {
    "slots": ("gauge", "Slots for answers.", ("",)),
    "busy_slots": ("gauge", "Slots that an answer has.", ("",)),
    "waiting_answers": ("gauge", "Answers that wait for a slot.", ("",)),
    "answers_total": (
        "counter",
        "Answers by how they ended; abort: the client left, or its time was over.",
        tuple(f'{{outcome="{outcome}"}}' for outcome in OUTCOMES),
    ),
    "refused_requests_total": ("counter", "Requests that ended in an HTTP error.", ("",)),
    "prompt_tokens_total": ("counter", "Tokens of prompts, once for all answers to one.", ("",)),
    "cached_tokens_total": ("counter", "Tokens of prompts that a slot held already.", ("",)),
    "generated_tokens_total": ("counter", "Tokens of answers.", ("",)),
    "drafted_tokens_total": ("counter", "Tokens that the draft proposed.", ("",)),
    "accepted_tokens_total": ("counter", "Drafted tokens that the model accepted.", ("",)),
    "time_to_first_token_seconds": ("summary", "From requests on.", ("_sum", "_count")),
    "decode_seconds_total": ("counter", "Seconds of answers after their first tokens.", ("",)),
}


class Metrics:
    """Totals by sample, which is a metric's name and what follows it."""

    def __init__(self):
        self.lock = threading.Lock()
        self.totals = Counter()

    def add(self, amounts: Mapping[str, float]) -> None:
        with self.lock:
            self.totals.update(amounts)

    def add_answer(self, row, outcome: str) -> None:
        """Count a row of batches.py that has ended."""
        self.add({f'answers_total{{outcome="{outcome}"}}': 1})
        if row.request is not None:  # it had a slot
            self.add(amounts_of(row))

    def text(self, gauges: Mapping[str, int]) -> str:
        """All metrics. `gauges`: the values of those that are no totals."""
        samples = Counter(gauges)
        with self.lock:
            samples.update(self.totals)
        lines = []
        for metric, (metric_type, description, suffixes) in METRICS.items():
            name = PREFIX + metric
            lines.append(f"# HELP {name} {description}\n# TYPE {name} {metric_type}")
            lines += [f"{name}{suffix} {samples[metric + suffix]}" for suffix in suffixes]
        return "\n".join([*lines, ""])


def amounts_of(row) -> dict[str, float]:
    """What an answer adds to the totals."""
    request = row.request
    drafting = RowStatistics(request.token_records)
    amounts = {
        "generated_tokens_total": row.num_tokens,
        "drafted_tokens_total": drafting.num_drafted,
        "accepted_tokens_total": drafting.accepted.total(),
        "decode_seconds_total": request.decode_s,
    }
    if row.index % row.text_request.n == 0:
        amounts["prompt_tokens_total"] = len(request.prompt)
        amounts["cached_tokens_total"] = request.num_reused
    if row.ids:
        amounts["time_to_first_token_seconds_sum"] = row.ttft_s
        amounts["time_to_first_token_seconds_count"] = 1
    return amounts
