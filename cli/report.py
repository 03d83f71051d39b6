"""Rates, bytes and the speed-up of speculation, computed from the records of decoding/timing.py.

speculative.py has the formulas. This file decodes nothing.
"""

import functools
import itertools
import math
import resource
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from decoding.scheduler import Request
from decoding.timing import Timing, TokenRecord
from generate import Engine
from model import Experts, KVCache, Transformer
from speculative import Costs, expected_tokens
from weights.walker import quantized_linears

PLAIN_TOKEN, ACCEPTED, CORRECTED, BONUS = range(4)  # where a token came from


def weight_bytes(model: Transformer, rows: int = 1) -> int:
    """Bytes of weights that a step of `rows` rows reads: all, except the embedding table (a tied head reads it) and the
    experts that no row chose."""
    weights = model.named_parameters(remove_duplicate=False)
    stored = sum(weight.nbytes for name, weight in weights if not name.startswith("embed."))
    unread_bytes = sum(unread_share(layer, rows) * stored_bytes(layer.experts) for layer in expert_layers(model))
    return stored + expanded(model) - int(unread_bytes)


def expert_layers(model: Transformer) -> list[Experts]:
    """The feed-forwards that consist of experts."""
    return [module for module in model.modules() if isinstance(module, Experts)]


def unread_share(layer: Experts, rows: int) -> float:
    """The share of a layer's experts that none of `rows` rows chooses. Exact for one row; for more, the expectation of
    independent, uniform choices. Similar rows leave more unread."""
    return (1 - layer.n_chosen / layer.n_experts) ** rows


def stored_bytes(module: torch.nn.Module) -> int:
    """Bytes of weights that a product reads."""
    return sum(parameter.nbytes for parameter in module.parameters()) + expanded(module)


def expanded(module: torch.nn.Module) -> int:
    return sum(linear.expanded_bytes for linear in quantized_linears(module))


def position_bytes(model: Transformer, kind: type[KVCache] = KVCache) -> Counter:
    """{window or None: bytes of the keys and values of one position, summed over the layers with this window}."""
    size = kind.position_bytes(model.layers[0].attention.heads()[1], model.config.head_dim, model.norm.weight.dtype)
    return Counter({window: layers * size for window, layers in Counter(model.windows).items()})


def attended_bytes(per_position: Counter, length: int) -> int:
    """Bytes of keys and values that a query reads with `length` positions filled; a window bounds its layers'."""
    return sum(min(length, window or length) * size for window, size in per_position.items())


def bytes_read(engine: Engine, timing: Timing) -> int:
    """Bytes that the steps after the prompt read, of target and draft: weights as held, keys and values attended."""
    weights, read = functools.cache(weight_bytes), 0
    (target, per), *draft = [(model, position_bytes(model, engine.runner.kind)) for model in engine.models]
    for step in timing.records:
        rows = len(step.positions)
        read += weights(target, rows * (step.k + 1)) + sum(attended_bytes(per, n + step.k) for n in step.positions)
        for draft_model, draft_per in draft:
            for i in range(engine.drafter.passes(step.k)):
                read += weights(draft_model, rows) + sum(attended_bytes(draft_per, n + i) for n in step.positions)
    return read


def peak_memory_gb(device: torch.device) -> float:
    """Peak of the device's allocations, or of the process's resident memory on a CPU, in 1e9 bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9


def rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0


def origin(token: TokenRecord) -> int:
    if token.first or not token.k:
        return PLAIN_TOKEN
    return ACCEPTED if token.index < token.accepted else CORRECTED if token.index < token.k else BONUS


def step_numbers(request: Request) -> list[int]:
    """For each token the number of the step that decided it; 0 is the end of the prompt."""
    if request.token_records:
        return list(itertools.accumulate(record.index == 0 and not record.first for record in request.token_records))
    first = min(1, max(0, 1 + len(request.steps) - len(request.tokens)))  # a prompt's last token may run in a step
    return list(range(first, first + len(request.tokens)))


def decided(requests: Iterable[Request]) -> int:
    """The number of tokens that steps decided: all but those that the pass of a prompt decided."""
    return sum(number > 0 for request in requests for number in step_numbers(request))


class RowStatistics:
    """Counts of speculation over the tokens of one row or of several."""

    def __init__(self, tokens: Iterable[TokenRecord]):
        decided = [token for token in tokens if not token.first]
        verified = [token for token in decided if token.index < token.k and math.isfinite(token.overlap)]
        self.tokens = len(decided)
        self.rounds = Counter(token.k for token in decided if token.index == 0)  # by K; K = 0 is a plain step
        self.num_drafted = sum(k * n for k, n in self.rounds.items())
        self.reached = Counter(token.index for token in verified)  # by position in the draft
        self.accepted = Counter(token.index for token in verified if token.index < token.accepted)
        # Mean of sum min(p, q) over the positions reached: the acceptance rate (L corollary 3.6).
        self.alpha = sum(token.overlap for token in verified) / len(verified) if verified else None


def speculative(engine: Engine, timings: Sequence[Timing], row: int | None = None) -> dict | None:
    """Speculation in these batches, or of one row of a batch; None without a drafter. draft_s and verify_s are sums
    over steps, which the rows share. All else is a mean over rows, as if each had its time to itself."""
    if not engine.drafts:
        return None
    rows = [(timing, i) for timing in timings for i in range(len(timing.tokens)) if row in (None, i)]
    draft_s, verify_s = (sum((getattr(timing, name) for timing in timings), 0.0) for name in ("draft_s", "verify_s"))
    target, *draft = [multiplications(model) for model in engine.models]
    plain_steps = in_plain_steps([timing.requests[i] for timing, i in rows])
    return {"greedy_text": greedy_text(engine)} | speculation(
        RowStatistics(token for timing, i in rows for token in timing.tokens[i]),
        Counter(step.k for timing, i in rows for step in timing.requests[i].steps),
        engine.speculate_k, engine.costs, sum(timing.row_s[i] for timing, i in rows), draft_s, verify_s,
        c_ops=draft[0] / target if draft else 0.0, in_plain_steps=plain_steps,
    )  # fmt: skip


def in_plain_steps(requests: Sequence[Request]) -> tuple[float, float] | None:
    """(seconds that plain decoding would have taken for the tokens of these requests, the cost of their steps in units
    of a plain step), by the costs for each step's rows and threads; None if a step was not calibrated."""
    plain_s = num_plain = 0.0
    for request in requests:
        begins = (token.index == 0 for token in request.token_records if not token.first)
        num_tokens = Counter(itertools.accumulate(begins))  # by the number of the step
        for step, n in zip(request.steps, num_tokens.values()):
            if step.costs is None or not {step.k} <= {0, *step.costs.verify_s}:
                return None
            plain_s, num_plain = plain_s + n * step.costs.decode_s, num_plain + step.costs.round(step.k)
    return plain_s, num_plain


def greedy_text(engine: Engine) -> str:
    """How greedy text with drafts compares with plain greedy text."""
    return "identical" if engine.identical else "up to rounding"


def multiplications(model: Transformer) -> int:
    """Multiplications of one token with the model's matrices, without the embedding and the experts not chosen."""

    def size(module: torch.nn.Module) -> int:
        linears = [part for part in module.modules() if hasattr(part, "in_features")]
        return sum(linear.in_features * linear.out_features for linear in linears)

    return size(model) - round(sum(unread_share(layer, 1) * size(layer.experts) for layer in expert_layers(model)))


def speculation(
    row: RowStatistics, steps: Counter, k: int | str, costs: Costs | None, seconds: float, draft_s: float,
    verify_s: float, c_ops: float = 0.0, in_plain_steps: tuple[float, float] | None = None,
) -> dict:  # fmt: skip
    """The "speculative" object of the JSON contract. steps: the rows' steps by K, with those in which only another row
    drafted; seconds: their time, of it draft_s and verify_s; c_ops: as in speculative.operations; in_plain_steps: the
    pair of that function, by default from `costs`. Values that need costs, or a drafted token, are None without."""
    rounds, alpha, longest = sum(row.rounds.values()), row.alpha, max(row.rounds, default=0)
    usual = max((k for k in steps if k), key=steps.get, default=0)  # the K that most rounds had
    has_costs = costs is not None and steps.keys() <= {0, *costs.verify_s}
    modelled = has_costs and alpha is not None
    drafted, paid = (1 - n[0] / rounds if rounds else 0 for n in (row.rounds, steps))  # shares, as in Costs.speedup
    best_k, best_speedup = costs.best(alpha, drafted, paid) if modelled else (None, None)
    plain_s, cost = in_plain_steps or (
        (row.tokens * costs.decode_s, sum(n * costs.round(k) for k, n in steps.items())) if has_costs else (0, 0)
    )
    return {
        "k": k, "rounds": rounds, "rounds_by_k": dict(sorted(row.rounds.items())),
        "drafted": row.num_drafted,
        "accepted": sum(row.accepted.values()),
        "accepted_by_position": [row.accepted[i] for i in range(longest)],
        "reached_by_position": [row.reached[i] for i in range(longest)],
        "tokens_per_round": row.tokens / rounds if rounds else None,
        "tokens_per_round_iid": None if alpha is None else 1 + drafted * (expected_tokens(alpha, usual) - 1),
        "alpha": alpha, "d_lk": None if alpha is None else 1 - alpha,
        "c": costs.c(usual) if modelled else None, "v": costs.v(usual) if modelled else None, "c_ops": c_ops,
        "operations": sum(n * (k * c_ops + k + 1) for k, n in steps.items()) / row.tokens if rounds else None,
        "measured_speedup": plain_s / seconds if plain_s and seconds > 0 and any(row.rounds) else None,
        "predicted_speedup": row.tokens / cost if cost and any(steps) else None,
        "predicted_speedup_iid": costs.speedup(usual, alpha, drafted, paid) if modelled else None,
        "best_of": sorted({0, *costs.verify_s}) if modelled else [],
        "best_k": best_k, "best_k_speedup": best_speedup, "draft_s": draft_s, "verify_s": verify_s,
    }  # fmt: skip


def summary(facts: dict) -> list[str]:
    """The "speculative" object as lines of text."""
    pairs = zip(facts["accepted_by_position"], facts["reached_by_position"], strict=True)
    by_position = " ".join(f"{accepted / reached:.2f}" for accepted, reached in pairs if reached) or "–"
    formatted = {name: "–" if x is None else f"{x:.2f}" if isinstance(x, float) else x for name, x in facts.items()}
    of = ", ".join(map(str, facts["best_of"])) or "–"
    lines = (
        "speculation, K = {k}: {rounds} rounds, {tokens_per_round} tokens a round (i.i.d. {tokens_per_round_iid}),"
        " accepted {accepted} of {drafted} drafted, by position {by_position}",
        "  alpha {alpha}, D_LK {d_lk}, c {c}, v {v}, operations x{operations}; drafting took {draft_s} s, verifying"
        " {verify_s} s",
        "  speed-up {measured_speedup} measured, {predicted_speedup} predicted (i.i.d. {predicted_speedup_iid}); best"
        " of K = {of} would have been {best_k} with {best_k_speedup}",
    )
    return [line.format(**formatted, by_position=by_position, of=of) for line in lines]


def report(timings: Sequence[Timing], engine: Engine) -> None:
    """Print rates on stderr, medians over batches with min and max, then speculation."""

    def spread(values: list[float]) -> str:
        text = f"{statistics.median(values):.1f}"
        return text if len(values) == 1 else f"{text} ({min(values):.1f}–{max(values):.1f})"

    ttft = spread([1e3 * request.ttft_s for timing in timings for request in timing.requests])
    prefill = spread([rate(timing.prompt_tokens, timing.prefill_s) for timing in timings])
    num_reused = sum(sum(timing.cached) for timing in timings)
    num_prompt_tokens = num_reused + sum(timing.prompt_tokens for timing in timings)
    reused = f", {num_reused} of {num_prompt_tokens} tokens kept" if num_reused else ""
    lines = [f"prefill {prefill} tok/s, first token after {ttft} ms{reused}"]
    if stepped := [timing for timing in timings if timing.steps]:
        tokens = spread([rate(decided(timing.requests), timing.decode_s) for timing in stepped])
        bandwidth = spread([rate(bytes_read(engine, timing), timing.decode_s) / 1e9 for timing in stepped])
        per_rank = " by each rank" if engine.ranks.world > 1 else ""
        lines.append(f"decode {tokens} tok/s, {bandwidth} GB/s read{per_rank}")
        if engine.drafts:
            lines += summary(speculative(engine, stepped))
            lines.append(f"  greedy text as without drafting: {greedy_text(engine)}")
    print(*lines, f"peak memory {peak_memory_gb(engine.device):.2f} GB", sep="\n", file=sys.stderr)
