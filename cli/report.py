"""Rates, bytes and the speed-up of speculation, computed from the records of
decoding/statistics.py.

decoding/costs.py has the formulas. This file decodes nothing.
"""

import functools
import math
import resource
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from decoding.costs import Costs, expected_tokens, weighted_mean
from decoding.engine import Engine
from decoding.scheduler import Request
from decoding.statistics import Timing, TokenRecord
from model import KVCache, SparseMoE, Transformer
from tp import ranks_of
from weights.walker import quantized_linears

# Where a token came from.
PLAIN_TOKEN = "plain"
ACCEPTED = "accepted"
CORRECTED = "corrected"
BONUS = "bonus"

MIN_ROUNDS = 48  # before a draft is judged by its acceptance


def weight_bytes(model: Transformer, rows: int = 1) -> int:
    """Bytes of weights that a step of `rows` rows reads: all, except the embedding table (a tied
    head reads it) and the experts that no row chooses. Their share is exact for one row. For more
    it is that of independent, uniform choices; similar rows choose fewer experts."""
    parameters = model.named_parameters(remove_duplicate=False)
    read = sum(x.nbytes for name, x in parameters if not name.startswith("embed."))
    read += expanded(model)
    unchosen = 0.0
    for module in model.modules():
        if isinstance(module, SparseMoE):
            share = (1 - module.top_k / module.n_experts) ** rows
            unchosen += share * stored_bytes(module.experts)
    return read - int(unchosen)


def stored_bytes(module: torch.nn.Module) -> int:
    """Bytes of weights that a product reads."""
    return sum(parameter.nbytes for parameter in module.parameters()) + expanded(module)


def expanded(module: torch.nn.Module) -> int:
    return sum(linear.expanded_bytes for linear in quantized_linears(module))


def position_bytes(model: Transformer, cache_type: type[KVCache] = KVCache) -> Counter:
    """{window or None: bytes of the keys and values of one position, summed over the layers with
    this window}."""
    _, kv_heads = model.layers[0].attention.heads()
    size = cache_type.position_bytes(kv_heads, model.config.head_dim, model.norm.weight.dtype)
    layers_by_window = Counter(getattr(model, "read_windows", model.windows))
    return Counter({window: layers * size for window, layers in layers_by_window.items()})


def cached_bytes(models: Iterable[Transformer], cache_type: type[KVCache]) -> int:
    """Bytes of one position in the caches of several models."""
    return sum(position_bytes(model, cache_type).total() for model in models)


def attended_bytes(per_position: Counter, length: int) -> int:
    """Bytes of keys and values that a query reads with `length` positions filled; a window bounds
    its layers'."""
    return sum(min(length, window or length) * size for window, size in per_position.items())


def bytes_read(engine: Engine, timing: Timing) -> int:
    """Bytes that the steps after the prompt read, of target and draft: weights as held, keys and
    values attended."""
    weights = functools.cache(weight_bytes)
    per_position = functools.cache(position_bytes)
    drafter = engine.drafter
    has_draft_model = drafter is not None and drafter.model is not None
    read = 0
    for step in timing.records:
        rows = len(step.positions)
        passes = [(engine.runner, rows * (step.k + 1), step.k)]  # (runner, rows, positions ahead)
        if has_draft_model and step.runs_drafter:
            passes += [(drafter.runner, rows, ahead) for ahead in range(drafter.passes(step.k))]
        for runner, width, ahead in passes:
            sizes = per_position(runner.model, runner.cache_type)
            read += weights(runner.model, width)
            read += sum(attended_bytes(sizes, n + ahead) for n in step.positions)
    return read


def peak_memory_gb(device: torch.device) -> float:
    """Peak of the device's allocations, or of the process's resident memory on a CPU, in 1e9
    bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0


def token_origin(token: TokenRecord | None) -> str:
    """Where a token came from; None is a token of a run without a draft."""
    if token is None or token.first or not token.k:
        return PLAIN_TOKEN
    if token.index < token.accepted:
        return ACCEPTED
    return CORRECTED if token.index < token.k else BONUS


def decided(requests: Iterable[Request]) -> int:
    """The number of tokens that steps decided: all but those that the pass of a prompt decided."""
    return sum(number > 0 for request in requests for number in request.token_steps)


class RowStatistics:
    """Counts of speculation over the tokens of one row or of several."""

    def __init__(self, records: Iterable[TokenRecord]):
        self.tokens = 0
        self.rounds = Counter()  # by K; K = 0 is a plain step
        self.reached = Counter()  # by position in the draft
        self.accepted = Counter()
        overlaps = []
        for token in records:
            if token.first:
                continue
            self.tokens += 1
            if token.index == 0:
                self.rounds[token.k] += 1
            if token.index < token.k and math.isfinite(token.overlap):
                overlaps.append(token.overlap)
                self.reached[token.index] += 1
                self.accepted[token.index] += token.index < token.accepted
        self.num_drafted = sum(k * n for k, n in self.rounds.items())
        # Mean of sum min(p, q) over the positions reached: the acceptance rate (L corollary 3.6).
        self.alpha = statistics.fmean(overlaps) if overlaps else None


def speculative(engine: Engine, timing: Timing) -> dict | None:
    """The "speculative" object of the JSON contract, for all of these rows; None without a drafter.
    draft_s and verify_s are sums over steps, which rows share. Everything else is averaged per row.
    Values that need calibrated costs or a drafted token are None if there are none."""
    if engine.drafter is None:
        return None
    requests = timing.requests
    records = [record for request in requests for record in request.token_records]
    counts = RowStatistics(records)
    rounds = counts.rounds.total()
    positions = range(max(counts.rounds, default=0))
    return {
        "greedy_text": greedy_text(engine),
        "k": engine.planner.speculate_k,
        "rounds": rounds,
        "rounds_by_k": dict(sorted(counts.rounds.items())),
        "drafted": counts.num_drafted,
        "accepted": counts.accepted.total(),
        "accepted_by_position": [counts.accepted[i] for i in positions],
        "reached_by_position": [counts.reached[i] for i in positions],
        "tokens_per_round": counts.tokens / rounds if rounds else None,
        "alpha": counts.alpha,
        **iid_model(counts, requests),
        **speed_ups(counts, requests),
        "draft_s": timing.draft_s,
        "verify_s": timing.verify_s,
    }


def greedy_text(engine: Engine) -> str:
    """How greedy text with drafts compares with plain greedy text."""
    rule = engine.options.verification
    if not (isinstance(rule, str) or getattr(rule, "is_lossless", False)):
        return "lossy"
    return "identical" if engine.identical else "up to rounding"


def iid_model(counts: RowStatistics, requests: Sequence[Request]) -> dict:
    """What the papers' formulas say, with the acceptance alpha at each position, and with the mean
    of the costs that the steps were planned by."""
    names = ("tokens_per_round_iid", "c", "v", "predicted_speedup_iid", "best_k", "best_k_speedup")
    figures = dict.fromkeys(names)
    alpha = counts.alpha
    if alpha is None:
        return figures
    # Includes steps that ran as rounds only because another row had a draft.
    steps = [step for request in requests for step in request.steps]
    num_steps = Counter(step.k for step in steps)
    usual_k = max(filter(None, num_steps), key=num_steps.get)  # the K that most rounds had
    num_rounds = counts.rounds.total()
    draft_share = 1 - counts.rounds[0] / num_rounds
    round_share = 1 - num_steps[0] / num_rounds
    figures["tokens_per_round_iid"] = 1 + draft_share * (expected_tokens(alpha, usual_k) - 1)
    if all(covers(step.costs, num_steps) for step in steps):
        costs = weighted_mean([step.costs for step in steps], [1 / len(steps)] * len(steps))
        figures["c"] = costs.c(usual_k)
        figures["v"] = costs.v(usual_k)
        figures["predicted_speedup_iid"] = costs.speedup(usual_k, alpha, draft_share, round_share)
        figures["best_k"], figures["best_k_speedup"] = costs.best(alpha, draft_share, round_share)
    return figures


def covers(costs: Costs | None, ks: Iterable[int]) -> bool:
    """Were steps that draft so many tokens calibrated?"""
    return costs is not None and {*ks} <= {0, *costs.verify_s}


def speed_ups(counts: RowStatistics, requests: Sequence[Request]) -> dict:
    """The measured speed-up, and the one that the calibrated costs of each step promise."""
    figures = {"measured_speedup": None, "predicted_speedup": None}
    steps = []  # (tokens that it decided, the step) of each row
    for request in requests:
        num_tokens = Counter(filter(None, request.token_steps))  # by the number of the step
        steps += [(n, request.steps[number - 1]) for number, n in num_tokens.items()]
    if not all(covers(step.costs, [step.k]) for _, step in steps):
        return figures
    seconds = sum(request.decode_s for request in requests)
    if counts.num_drafted and seconds > 0:
        plain_s = sum(n * step.costs.decode_s for n, step in steps)  # for these tokens
        figures["measured_speedup"] = plain_s / seconds
    if any(step.k for _, step in steps):  # a round of this row, or of another one that shared it
        plain_steps = sum(step.costs.round(step.k, step.runs_drafter) for _, step in steps)
        figures["predicted_speedup"] = counts.tokens / plain_steps
    return figures


def text_of(value: object) -> str:
    """A value of the "speculative" object for people."""
    if value is None:
        return "–"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


SUMMARY = (
    "speculation, K = {k}: {rounds} rounds, {tokens_per_round} tokens a round"
    " (i.i.d. {tokens_per_round_iid}), accepted {accepted} of {drafted} drafted,"
    " by position {by_position}",
    "  alpha {alpha}, c {c}, v {v}; drafting took {draft_s} s, verifying {verify_s} s",
    "  speed-up {measured_speedup} measured, {predicted_speedup} predicted"
    " (i.i.d. {predicted_speedup_iid}); K = {best_k} would be the best, with {best_k_speedup}",
    "  greedy text as without drafting, by construction: {greedy_text}",
)


def summary(figures: dict) -> list[str]:
    """The "speculative" object as lines of text."""
    pairs = zip(figures["accepted_by_position"], figures["reached_by_position"])
    shares = [text_of(accepted / reached) for accepted, reached in pairs if reached]
    values = {name: text_of(value) for name, value in figures.items()}
    values["by_position"] = " ".join(shares) or "–"
    return [line.format(**values) for line in SUMMARY]


def median_and_range(values: list[float]) -> str:
    """The median, with min and max of several."""
    text = f"{statistics.median(values):.1f}"
    if len(values) == 1:
        return text
    return f"{text} ({min(values):.1f}–{max(values):.1f})"


def prefill_line(timings: Sequence[Timing], total: Timing) -> str:
    ttft = median_and_range([1e3 * request.ttft_s for request in total.requests])
    rates = [rate(timing.prompt_tokens, timing.prefill_s) for timing in timings]
    line = f"prefill {median_and_range(rates)} tok/s, first token after {ttft} ms"
    num_reused = sum(total.cached)
    if num_reused:
        line += f", {num_reused} of {num_reused + total.prompt_tokens} tokens reused"
    return line


def decode_line(timings: Sequence[Timing], engine: Engine) -> str:
    """Rates of the steps after the prompt."""
    tokens = [rate(decided(timing.requests), timing.decode_s) for timing in timings]
    gigabytes = [rate(bytes_read(engine, timing), timing.decode_s) / 1e9 for timing in timings]
    per_rank = " by each rank" if ranks_of(engine.model).world > 1 else ""
    return (
        f"decode {median_and_range(tokens)} tok/s, {median_and_range(gigabytes)} GB/s"
        f" read{per_rank}"
    )


def outgrown(timing: Timing, limit: float) -> list[str]:
    """A line if a text has gone beyond a draft's context of `limit` positions."""
    if all(request.num_positions <= limit for request in timing.requests):
        return []
    return [f"  the draft model's context ends at {limit} positions; it drafts nothing beyond"]


def low_acceptance(engine: Engine) -> list[str]:
    """Once for an engine, lines about a draft whose first tokens are accepted far less often than
    is usual for its kind: what may be wrong."""
    meter = engine.meter
    drafter = engine.drafter
    if meter.has_warned or meter.num_rounds < MIN_ROUNDS:
        return []
    mean = meter.total_overlap / meter.num_rounds
    if mean >= drafter.min_acceptance:
        return []
    meter.has_warned = True
    causes = drafter.causes()
    if quantized_linears(engine.model):
        causes.append(
            "The target is quantized, and the draft may have learned from its full weights"
        )
    causes.append("The text may be unlike those that the draft learned from")
    line = f"the first drafted token was accepted with probability {mean:.2f} in {meter.num_rounds}"
    line += f" rounds, and such drafts have {drafter.min_acceptance} or more. What may be wrong:"
    return [line, *[f"  {cause}" for cause in causes]]


def report(timings: Sequence[Timing], engine: Engine) -> None:
    """Print rates on stderr, medians over batches with min and max, then speculation."""
    total = Timing([request for timing in timings for request in timing.requests])
    lines = [prefill_line(timings, total)]
    stepped = [timing for timing in timings if timing.steps]
    if stepped:
        lines.append(decode_line(stepped, engine))
    if stepped and engine.drafter is not None:
        lines += summary(speculative(engine, total))
        lines += outgrown(total, engine.drafter.max_positions)
        lines += low_acceptance(engine)
    lines.append(f"peak memory {peak_memory_gb(engine.runner.device):.2f} GB")
    print(*lines, sep="\n", file=sys.stderr)
