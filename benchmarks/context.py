"""Steps and prompts of the 1.1B shape, for `python -m benchmarks.bench context prefill8k
identical`.

    measure_context     a step with 1,000 to 16,000 tokens filled, in 16-bit caches and in 8-bit
                        ones
    measure_prefill8k   a prompt of 8,192 tokens, beside transformers and llama.cpp
    measure_identical   the price of bit-identical drafting for plain steps

Compared engines share the packed weights of this process and run in turn. Prompts run in worker
processes.
"""

import contextlib
import json
import statistics
from collections.abc import Iterator
from unittest import mock

from benchmarks.pipes import Worker, close
from benchmarks.record import failed_row, ratios, row
from benchmarks.shapes import TINYLLAMA, K, scheme_of
from benchmarks.workers import interleave, median_step, quickdraft, seconds_of
from cli.report import attended_bytes, position_bytes, weight_bytes
from decoding.costs import Costs, costs_at
from decoding.engine import Engine
from decoding.kv_8bit import CACHE_TYPES
from decoding.runner import ModelRunner
from decoding.sampling import Sampling
from drafts.ngram import NgramDraft
from exact.attention import ExactKernel
from exact.products import FAST_ROWS, RowSplit
from loading.config import config_from_hf
from loading.models import random_model
from model import Transformer
from weights import cpu
from weights.walker import pack_model

PROMPT = 8192  # tokens
CACHE_NAMES = {"model": "bf16", "int8": "kv_int8"}  # kind of cache -> its name in ids
LENGTHS = (100, 1000, 4000, 16_000)


def long_model(format: str, length: int) -> Transformer:
    hf = TINYLLAMA | {"max_position_embeddings": length}
    return pack_model(random_model(config_from_hf(hf), quantize=scheme_of(format), pack=False))


def measure_context(args) -> list[dict]:
    """Steps of one query and of six, with bf16 weights, then with int8 ones, where a cache is more
    of the bytes."""
    rows = []
    for format, shape in (("bf16", "1b"), ("int8", "1b.int8")):
        model, options = long_model(format, 16_200), {"speculate_k": K}
        engines = {
            kind: Engine(
                model, 1, 16_100, drafter=NgramDraft(), cache_type=CACHE_TYPES[kind], **options
            )
            for kind in CACHE_NAMES
        }
        # of one query and of six
        seconds = {(kind, filled): ([], []) for kind in engines for filled in LENGTHS}
        for number in range(args.rounds + 1):
            for (kind, filled), (decode_s, verify_s) in seconds.items():
                costs = engines[kind].calibrate(Sampling(0), filled, rounds=5)
                if number:  # the first round warms up
                    decode_s.append(costs.decode_s)
                    verify_s.append(costs.verify_s[K])
        for filled in LENGTHS[1:]:
            rows += context_rows(model, seconds, shape, filled)
    return rows


def context_rows(model: Transformer, seconds: dict, shape: str, filled: int) -> list[dict]:
    """Rows of one number of filled positions; seconds: (kind of cache, filled) -> (of one query, of
    six), by round."""
    rows, context = [], f"ctx{filled // 1000}k"
    for kind, name in CACHE_NAMES.items():
        (decode_s, verify_s), (base_s, _) = seconds[kind, filled], seconds[kind, LENGTHS[0]]
        kv_bytes = position_bytes(model, CACHE_TYPES[kind])
        num_bytes, base_bytes = (
            weight_bytes(model) + attended_bytes(kv_bytes, n) for n in (filled, LENGTHS[0])
        )
        medians = [f"{statistics.median(values) * 1e3:.1f}" for values in (decode_s, verify_s)]
        note = (
            f"{filled} tokens filled; medians {medians[0]} and {medians[1]} ms for one query"
            f" and six"
        )
        price = [ratio * base_bytes / num_bytes for ratio in ratios(decode_s, base_s)]
        rows.append(
            row(
                f"{shape}.{name}.{context}_over_bytes",
                price,
                "ratio",
                f"step over its bytes' time; {note}",
            )
        )
        rows.append(
            row(
                f"{shape}.{name}.{context}.verify6_over_1",
                ratios(verify_s, decode_s),
                "ratio",
                note,
            )
        )
        if filled < LENGTHS[-1]:
            predicted = ratios(v_between(seconds, kind, filled), ratios(verify_s, decode_s))
            between = f"v at {filled} tokens, linear between {LENGTHS[0]} and {LENGTHS[-1]}"
            id = f"{shape}.{name}.{context}.predicted_v_over_measured"
            rows.append(row(id, predicted, "ratio", f"{between}, as auto has it; {note}"))
    speedup, verify_speedup = map(ratios, seconds["model", filled], seconds["int8", filled])
    id, note = f"{shape}.kv_int8.{context}", f"over a bf16 cache, {filled} filled"
    return [
        *rows,
        row(f"{id}.speedup", speedup, "ratio", note),
        row(f"{id}.verify6_speedup", verify_speedup, "ratio", "the same of six queries"),
    ]


def v_between(seconds: dict, kind: str, filled: int) -> list[float]:
    """The cost of verifying six rows, in steps, as `auto` has it: by the costs at the shortest and
    the longest of LENGTHS, round by round."""
    ends = [zip(*seconds[kind, length]) for length in (LENGTHS[0], LENGTHS[-1])]
    values = []
    for pairs in zip(*ends):
        costs = [Costs(decode_s, verify_s={K: verify_s}) for decode_s, verify_s in pairs]
        by_length = dict(zip((LENGTHS[0], LENGTHS[-1]), costs))
        values.append(costs_at(by_length, filled).v(K))
    return values


def measure_prefill8k(args) -> list[dict]:
    hf = TINYLLAMA | {"max_position_embeddings": PROMPT + 8}
    shape = json.dumps(hf)
    workers = {
        "ours": quickdraft(hf=hf, cache=PROMPT + 8),
        "transformers": Worker("benchmarks.peers", "transformers", shape),
        "llamacpp": Worker("benchmarks.peers", "llamacpp", shape, "BF16", str(PROMPT + 8)),
    }
    request = {"method": "prefill", "length": PROMPT}
    peers = ("transformers", "llamacpp")
    answers, _ = interleave(workers, min(args.rounds, 3), request, optional=peers)
    close(workers)
    seconds = {name: seconds_of(worker_answers) for name, worker_answers in answers.items()}
    rows = [
        row(f"1b.bf16.prefill8k.{name}_tok_s", [PROMPT / s for s in seconds[name]], "tok/s")
        for name in seconds
    ]
    note = f"bf16, {PROMPT} tokens of the 1.1B shape, eager"
    for peer in peers:
        id = f"prefill8k.vs_{peer}"
        if workers[peer].failure is not None:
            rows.append(failed_row(id, workers[peer].failure))
            continue
        ratio = ratios(seconds[peer], seconds["ours"])
        rows.append(row(id, ratio, "ratio", note, same_work=True))
    return rows


# -------------------------------------------------------------------------------------- identical


@contextlib.contextmanager
def without_exactness(model: Transformer, engine: Engine) -> Iterator[None]:
    """Inside, attention takes the exact length and number of query rows, and products take the
    exact number of rows; large products stay padded, because that is faster. Results may depend on
    these numbers."""

    def exact_length(self: ModelRunner, length: int) -> int:
        return min(length, self.S)

    target = engine.rows(0, 1).target
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(ModelRunner, "bucket_length", exact_length))
        stack.enter_context(
            mock.patch.object(target, "caches", target.caches._replace(kernel=ExactKernel(1)))
        )
        for module in model.modules():
            if type(module) is cpu.PackedWeights:
                row_split = RowSplit((min(module.row_split.row_counts[0], FAST_ROWS),))
                stack.enter_context(mock.patch.object(module, "row_split", row_split))
        yield


def measure_identical(args) -> list[dict]:
    """Seconds of a step, over those of a step that may round differently in another batch."""
    rows = []
    for format in ("bf16", "int8", "int4-g32"):
        length = LENGTHS[-1] + args.steps + 1
        model = long_model(format, length)
        engine = Engine(model, 1, length)
        for filled in (LENGTHS[0], LENGTHS[-1]):
            price = []
            for number in range(args.rounds + 1):
                seconds = {}
                for is_exact in (True, False) if number % 2 else (False, True):
                    with contextlib.nullcontext() if is_exact else without_exactness(model, engine):
                        seconds[is_exact] = median_step(engine, filled, args.steps)
                if number:  # the first round warms up
                    price.append(seconds[True] / seconds[False])
            id = f"1b.{format}{f'.ctx{filled // 1000}k' * (filled >= 1000)}.identical_price"
            note = f"time of a step over one without exactness, {filled} tokens filled"
            rows.append(row(id, price, "ratio", note))
    return rows
