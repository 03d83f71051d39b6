"""Steps and prompts of the 1.1B shape in this process: for `python -m benchmarks.bench context prefill8k identical`.

    measure_context     a step with 1,000 to 16,000 tokens filled, in 16-bit caches and in 8-bit ones
    measure_prefill8k   8,192 tokens beside transformers and llama.cpp
    measure_identical   the price of bit-identical drafting for plain steps

Whatever is compared runs in turn on the same packed weights.
"""

import contextlib
import json
import statistics
from collections.abc import Iterator
from unittest import mock

from benchmarks.pipes import Worker, close
from benchmarks.record import ratios, row
from benchmarks.shapes import TINYLLAMA, scheme_of
from benchmarks.workers import interleave, median_step, quickdraft, seconds_of
from cli.report import attended_bytes, position_bytes, weight_bytes
from decoding.kv_8bit import KINDS
from decoding.runner import ModelRunner
from decoding.sampling import Sampling
from drafts.ngram import NgramDraft
from generate import Engine
from loading.checkpoint import random_model
from loading.config import config_from_hf
from model import Transformer
from weights import cpu
from weights.walker import pack_model

K = 5  # tokens that a verification has besides the first
PROMPT = 8192
CACHE_NAMES = {"model": "bf16", "int8": "kv_int8"}  # kinds of caches, as ids have them
LENGTHS = (100, 1000, 4000, 16_000)


def long_model(format: str, length: int) -> Transformer:
    hf = TINYLLAMA | {"max_position_embeddings": length}
    return pack_model(random_model(config_from_hf(hf), quantize=scheme_of(format), pack=False))


def measure_context(args) -> list[dict]:
    """One query and six; bf16 weights, then int8 ones, beside which caches weigh more."""
    rows = []
    for format, shape in (("bf16", "1b"), ("int8", "1b.int8")):
        model, options = long_model(format, 16_200), {"speculate_k": K}
        engines = {k: Engine(model, 1, 16_100, drafter=NgramDraft(), kind=KINDS[k], **options) for k in CACHE_NAMES}
        seconds = {(kind, filled): ([], []) for kind in engines for filled in LENGTHS}  # of one query and six
        for number in range(args.rounds + 1):
            for (kind, filled), (one, six) in seconds.items():
                costs = engines[kind].calibrate(Sampling(0), filled, rounds=5)
                if number:  # the first round warms up
                    one.append(costs.decode_s)
                    six.append(costs.verify_s[K])
        for filled in LENGTHS[1:]:
            rows += context_rows(model, seconds, shape, filled)
    return rows


def context_rows(model: Transformer, seconds: dict, shape: str, filled: int) -> list[dict]:
    rows, context = [], f"ctx{filled // 1000}k"
    for kind, name in CACHE_NAMES.items():
        (one, six), (short, _) = seconds[kind, filled], seconds[kind, LENGTHS[0]]
        per_position = position_bytes(model, KINDS[kind])
        read, short_read = (weight_bytes(model) + attended_bytes(per_position, n) for n in (filled, LENGTHS[0]))
        medians = [f"{statistics.median(values) * 1e3:.1f}" for values in (one, six)]
        note = f"{filled} tokens filled; medians {medians[0]} and {medians[1]} ms for one query and six"
        over = [ratio * short_read / read for ratio in ratios(one, short)]
        rows.append(row(f"{shape}.{name}.{context}_over_bytes", over, "ratio", f"step over its bytes' time; {note}"))
        rows.append(row(f"{shape}.{name}.{context}.verify6_over_1", ratios(six, one), "ratio", note))
    speedup, verify_speedup = map(ratios, seconds["model", filled], seconds["int8", filled])
    id, note = f"{shape}.kv_int8.{context}", f"over a bf16 cache, {filled} filled"
    return [
        *rows,
        row(f"{id}.speedup", speedup, "ratio", note),
        row(f"{id}.verify6_speedup", verify_speedup, "ratio", "the same of six queries"),
    ]


def measure_prefill8k(args) -> list[dict]:
    hf = TINYLLAMA | {"max_position_embeddings": PROMPT + 8}
    shape = json.dumps(hf)
    workers = {
        "ours": quickdraft(hf=hf, cache=PROMPT + 8),
        "transformers": Worker("benchmarks.peers", "transformers", shape),
        "llamacpp": Worker("benchmarks.peers", "llamacpp", shape, "BF16", str(PROMPT + 8)),
    }
    answers, _ = interleave(workers, min(args.rounds, 3), {"method": "prefill", "length": PROMPT})
    close(workers)
    seconds = {name: seconds_of(worker_answers) for name, worker_answers in answers.items()}
    rows = [row(f"1b.bf16.prefill8k.{name}_tok_s", [PROMPT / s for s in seconds[name]], "tok/s") for name in workers]
    note = f"bf16, {PROMPT} tokens of the 1.1B shape, eager"
    for peer in ("transformers", "llamacpp"):
        rows.append(row(f"prefill8k.vs_{peer}", ratios(seconds[peer], seconds["ours"]), "ratio", note))
    return rows


# ---------------------------------------------------------------------------------------------- identical


@contextlib.contextmanager
def without_measures(model: Transformer, engine: Engine) -> Iterator[None]:
    """Plain products and attention, without decoding/exactness.py's measures: products of the exact number of rows, but
    for the padding that makes large ones faster; attention over the exact length, for the exact number of query
    rows."""

    def exact_length(self: ModelRunner, length: int) -> int:
        return min(length, self.S)

    target = engine.rows(0, 1).target
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(ModelRunner, "bucket_length", exact_length))
        stack.enter_context(mock.patch.object(target, "caches", target.caches._replace(row_multiple=1)))
        for module in model.modules():
            if type(module) is cpu.PackedWeights:
                for name, value in (("row_counts", (min(module.row_counts[0], cpu.FAST_ROWS),)), ("max_split", 0)):
                    stack.enter_context(mock.patch.object(module, name, value))
        yield


def measure_identical(args) -> list[dict]:
    """Seconds of a step as it is, over one without the measures."""
    rows = []
    for format in ("bf16", "int8", "int4-g32"):
        length = LENGTHS[-1] + args.steps + 1
        model = long_model(format, length)
        engine = Engine(model, 1, length)
        for filled in (LENGTHS[0], LENGTHS[-1]):
            price = []
            for number in range(args.rounds + 1):
                seconds = {}
                for is_plain in (False, True) if number % 2 else (True, False):
                    with without_measures(model, engine) if is_plain else contextlib.nullcontext():
                        seconds[is_plain] = median_step(engine, filled, args.steps)
                if number:  # the first round warms up
                    price.append(seconds[False] / seconds[True])
            id = f"1b.{format}{f'.ctx{filled // 1000}k' * (filled >= 1000)}.identical_price"
            note = f"time of a step over one without the measures, {filled} tokens filled"
            rows.append(row(id, price, "ratio", note))
    return rows
