"""Measure quickdraft on one GPU, check every number's step against float32, and write what was measured.

    python -m benchmarks.bench_gpu decode --formats bf16,int8 --write benchmarks/h200.json --minutes 9

Weights are random, at the real shapes, made on the device. Rows are those of benchmarks/bench.py: {"id", "value",
"min", "max", "unit", "note"}, merged by id into --write after every item: a run that is stopped keeps what it has.

    bandwidth     a read and a copy of 4 GiB
    decode        one compiled step by format, 100 tokens filled: rate, share of the read bandwidth, ratio to bf16; six
                  rows over one; kernels; memory; seconds to compile
    verify        six rows over one alone, and over 2, 4, 8 and 16 rows
    variants      the same step with other settings, products and attention (VARIANTS, by expected gain): its time over
                  the plain one's in the same rounds
    speculation   8B and 1B in int4, acceptance set by construction: speed-up, and measured over predicted
    context       a step with 100 to 32,000 positions filled
    batch         1 to 16 rows
    compile       seconds to compile, with an empty and with a filled cache on disk
    peers         gpt-fast (--gptfast) and transformers, compiled, in turn with this project's step

`Subject` is a model with its float32 answer, `Contender` a subject compiled in one way. Before a Contender is timed its
logits are compared with those that the same stored weights give in float32, eagerly, a block at a time; one that is
wrong is reported as wrong ("….correct" 0, with the reason), not as fast. Steps run back to back with an event between
them, under CUDA graphs, while waiting for the device and compiling anew are errors; whatever is compared runs in turn,
A B A B …, with the read bandwidth measured in every round. What fails is recorded, and the rest goes on; a run ends
when the next item might not fit into --minutes.

`--device cpu --tiny` runs the same code on tiny shapes with a clock in place of events, `--eager` without compiling.

On a machine with a GPU that is there for half an hour, in this order, each under ten minutes ($OUT: where files are
kept; the commit is given where git does not know it):

    python -m pytest -m gpu tests; python -m benchmarks.bench_gpu decode --formats bf16,int8,int4-g32,fp8,mxfp6 \\
        --write $OUT/h200.json --minutes 7 --commit COMMIT
    for f in bf16 int8 int4-g32 mxfp6 fp8; do
        python -m benchmarks.bench_gpu variants --formats $f --write $OUT/h200.json --minutes 1.8; done
    python -m benchmarks.bench_gpu peers speculation --formats bf16,int8 --gptfast DIR --write $OUT/h200.json \\
        --minutes 7
    python -m benchmarks.bench_gpu decode --shapes 1b --formats bf16 --write $OUT/h200.json --minutes 2

Where every row of the first says that a CUDA graph was skipped, repeat it with --lenient. One process a format in the
second: what breaks the GPU's context breaks one format's run. What is left over goes to `context`, `batch`, `compile`.
"""

import argparse
import contextlib
import functools
import gc
import inspect
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import model as model_py
from benchmarks.bench import ROOT, Worker, counting_model, mislead, row, write_results
from benchmarks.candidates import add_words, by_flex, by_library, by_rows, by_sums, in_chunks, in_words, int8pack
from cli.errors import ending_plainly
from cli.flags import Parser, positive
from cli.load import pick_device
from cli.report import attended_bytes, position_bytes, speculative, weight_bytes
from decoding.sampling import Sampling
from decoding.timing import mark, spent, synchronize
from generate import Engine, Timing, decode_step, generate
from loading.checkpoint import random_model
from loading.config import config_from_hf
from model import Block, Caches, Config, Transformer
from speculative import Costs, Drafter, ModelDraft
from weights import compiling, formats
from weights.linears import QuantizedLinear
from weights.walker import pack_model, quantized_linears

Rows = list[dict]
K = 5  # drafted tokens that a verification takes
POSITIONS = 1024  # of a cache, where nothing else is said
SHAPES = {"8b": "llama-3.1-8b", "1b": "llama-3.2-1b", "7b": "llama-2-7b", "70b": "llama-3.1-70b"}
TINY = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 4096,
}  # fmt: skip


def shape(args: argparse.Namespace, name: str) -> dict:
    """The config.json of a shape; under --tiny a small one of its kind."""
    hf = json.loads((ROOT / "benchmarks" / "shapes" / f"{SHAPES[name]}.json").read_text())
    return hf | TINY if args.tiny else hf


# ----------------------------------------------------------------------------------------------- timing


UNCOUNTED = 2  # calls before those that are timed


def timed(device: torch.device, call: Callable[[], object], count: int) -> list[float]:
    """Seconds of each of `count` calls, back to back."""
    for _ in range(UNCOUNTED):
        call()
    synchronize(device)
    with no_surprises(device):
        marks = [mark(device)]
        for _ in range(count):
            call()
            marks.append(mark(device))
    synchronize(device)
    return [b - a if isinstance(a, float) else a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]


@functools.cache
def buffers(device: torch.device, numbers: int) -> tuple[Tensor, Tensor]:
    """float32, far larger than the caches; not zeros, which may move faster."""
    return torch.empty(numbers, device=device).normal_(), torch.empty(numbers, device=device)


def bandwidths(args: argparse.Namespace) -> tuple[float, float]:
    """Bytes/s of reading (the faster of a sum and a dot product of halves), and of copying, read and written."""
    data, other = buffers(args.device, 2**20 if args.tiny else 2**30)
    half = data.numel() // 2
    reads = (data.sum, lambda: torch.dot(data[:half], data[half:]))
    read = min(statistics.median(timed(args.device, call, 5)) for call in reads)
    return data.nbytes / read, 2 * data.nbytes / statistics.median(timed(args.device, lambda: other.copy_(data), 5))


@contextlib.contextmanager
def no_surprises(device: torch.device) -> Iterator[None]:
    """Inside, waiting for the GPU is an error, and so is compiling what had been compiled."""
    with torch._dynamo.config.patch(error_on_recompile=True):
        if device.type != "cuda":
            yield
            return
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


# --------------------------------------------------------------------------------- models and their truth


class Subject:
    """Random weights of a shape in a format, the head's too, and what they answer in float32."""

    def __init__(self, args: argparse.Namespace, name: str, format: str, head: bool = True):
        self.args, self.name, self.format = args, name, format
        scheme = None if format == "bf16" else format
        config = config_from_hf(shape(args, name))
        options = {"device": args.device, "quantize": scheme, "head": scheme if head else None}
        with larger_chunks(args.device):
            self.model = random_model(config, **options, pack=False)
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(0, config.vocab_size, (1, args.filled + 15), generator=generator).to(args.device)
        self.prompt, self.drafted = ids.split((args.filled, 15), dim=1)  # (1, filled), (1, 15)
        self.truth = float32_logits(self.model, ids, 16)  # (16, V) at the prompt's last token and the drafted ones
        for linear in quantized_linears(self.model) if args.device.type != "cpu" else ():
            linear.pack()  # on a CPU, where this file is only tried out, candidates read the parts as they are stored


def larger_chunks(device: torch.device):
    """More weights at a time than suit a CPU's caches."""
    return mock.patch.object(formats, "CHUNK_WEIGHTS", formats.CHUNK_WEIGHTS if device.type == "cpu" else 2**26)


@torch.inference_mode()
def float32_logits(model: Transformer, tokens: Tensor, last: int) -> Tensor:
    """Logits (last, V) of tokens (1, T) without cache or kernel: each block as the model's own code computes it in
    float32, with the weights that its stored parts stand for."""
    pos = torch.arange(tokens.size(1), device=tokens.device)[None]  # (1, T)
    x, rope, keys = model.embed(tokens).float(), model.rope(pos), model.visible_by_window(pos, None, torch.float32)
    for layer, window in zip(model.layers, model.windows):
        x = float32_block(model.config, layer)(x, pos, rope, keys[window], None)
    x = F.rms_norm(x[0, -last:], x.shape[-1:], model.norm.weight.float(), model.config.norm_eps)  # (last, D)
    return F.linear(x, float32_weight(model.lm_head))


def float32_block(config: Config, layer: Block) -> Block:
    with torch.device("meta"):
        block = Block(config)
    for name, module in list(block.named_modules()):
        source = layer.get_submodule(name)
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(float32_weight(source), False)
            module.bias = None if source.bias is None else nn.Parameter(source.bias.float(), False)
        elif hasattr(module, "eps"):
            module.weight = nn.Parameter(source.weight.float(), False)
    return block


def float32_weight(linear: nn.Module) -> Tensor:
    if isinstance(linear, QuantizedLinear):
        return linear.dequantized(torch.float32)
    return linear.weight.detach().float()


def allowed_error(n_layers: int) -> float:
    """Of ||logits - truth|| / ||truth||: twelve roundings to bfloat16 a layer and two behind, each of 2^-9 at most,
    independent, none of which grows on its way. Leaving out one group of 32 in 4096 inputs changes a product by 9 %."""
    return 2**-9 * math.sqrt(12 * n_layers + 2)


def verdict(found: Tensor, truth: Tensor, n_layers: int) -> str | None:
    """None, or what is wrong with logits."""
    error = relative_error(found, truth)
    bound = allowed_error(n_layers)
    return None if error <= bound else f"wrong: logits are off by {error:.3g} of their size, {bound:.3g} is allowed"


def relative_error(found: Tensor, truth: Tensor) -> float:
    return (torch.linalg.vector_norm(found.float() - truth) / torch.linalg.vector_norm(truth)).item()


# ------------------------------------------------------------------------------------------- contenders


class Variant(NamedTuple):
    """A way to compile and compute a step. `product` replaces the blocks' and the head's, `attend` model.attend."""

    name: str
    config: Mapping = MappingProxyType({})  # Inductor's settings
    product: Callable | None = None
    prepare: Callable[[QuantizedLinear], None] | None = None  # of every quantized Linear, before
    attend: Callable | None = None
    context: Callable = contextlib.nullcontext
    steps: int = 1  # that one replay runs
    sampling: Sampling = Sampling(0)
    head: bool = True  # is the head quantized like the rest?
    whole: bool = False  # all layers in one graph, in place of one block compiled for all
    formats: tuple[str, ...] = ("bf16", "int8", "int4", "fp8", "mx")  # how their names begin
    gpu: bool = False  # is there nothing of it on a CPU?


PLAIN = Variant("plain")


def backend(name: str) -> Callable:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return lambda: sdpa_kernel(getattr(SDPBackend, name))


UNTUNED = {"coordinate_descent_tuning": False}
AUTOTUNED = {"max_autotune": True, "prologue_fusion": True}
UNPACKED = ("int8", "fp8", "mx")  # formats whose products of few rows are weights/gpu.py's

VARIANTS = (  # by expected gain; why: benchmarks/NOTES.md
    Variant("words", product=in_words, prepare=add_words, formats=("int4",)),
    Variant("rows", product=by_rows, formats=("bf16",)),
    Variant("pdl", {"triton.enable_pdl": True}, gpu=True),
    Variant("words+pdl", {"triton.enable_pdl": True}, in_words, add_words, formats=("int4",), gpu=True),
    Variant("whole", whole=True),
    Variant("4steps", steps=4, formats=("bf16", "int8", "int4")),
    Variant("autotuned", AUTOTUNED, gpu=True, formats=("bf16",)),
    Variant("autotuned library", AUTOTUNED, by_library, gpu=True, formats=UNPACKED),
    Variant("int8pack", product=int8pack, formats=("int8",), gpu=True),
    Variant("library", product=by_library, formats=UNPACKED),
    Variant("untuned", UNTUNED, gpu=True),
    Variant("sums", attend=by_sums),
    Variant("head16", head=False, formats=("int8", "int4", "fp8", "mx")),
    Variant("chunks", attend=in_chunks, formats=("bf16",)),
    Variant("flex", attend=by_flex, formats=("bf16",), gpu=True),
    Variant("cudnn", context=backend("CUDNN_ATTENTION"), formats=("bf16",), gpu=True),
    Variant("efficient", context=backend("EFFICIENT_ATTENTION"), formats=("bf16",), gpu=True),
    Variant("math", context=backend("MATH"), formats=("bf16",)),
    Variant("sampled", sampling=Sampling(0.8), formats=("bf16", "int4")),
    Variant("multi-kernel", {"triton.multi_kernel": 1}, gpu=True, formats=("bf16", "int8")),
)


def code_of(kind: type) -> str:
    """The name of the function that multiplies."""
    return "product" if issubclass(kind, QuantizedLinear) else "forward"


class Fixed(Drafter):
    """Proposes the same tokens in every round: verification alone costs something."""

    def __init__(self, tokens: Tensor):
        super().__init__()
        self.proposed = tokens  # (1, K)

    def setup(self, state, k_max: int, target, prepare: Callable) -> None:
        self.state, B, V = state, state.pos.size(0), target.model.config.vocab_size
        self.register_buffer("tokens", self.proposed[:, :k_max].expand(B, -1).clone(), persistent=False)
        self.register_buffer("probs", F.one_hot(self.tokens, V).float(), persistent=False)  # (B, K, V)

    def propose(self, state):
        return self.tokens[:, : state.k], self.probs[:, : state.k]


def several_steps(model: Transformer, caches: Caches, state: nn.Module, count: int) -> None:
    for _ in range(count):
        decode_step(model, caches, state)


class Contender:
    """A subject whose steps are compiled in one way, standing at a position: each step decides the same token again.

    Raises ValueError where its logits are wrong."""

    def __init__(
        self, subject: Subject, variant: Variant = PLAIN, *, batch: int = 1, k: int = K, filled: int | None = None,
        check: bool = True,
    ):  # fmt: skip
        self.subject, self.variant, self.args = subject, variant, subject.args
        self.filled, self.k = filled or self.args.filled, k
        self.device, model = self.args.device, subject.model
        for linear in quantized_linears(model) if variant.prepare else ():
            if not hasattr(linear, "words_codes"):
                variant.prepare(linear)
        options = {"compile": not self.args.eager, "drafter": Fixed(subject.drafted[:, :k]), "speculate_k": k}
        self.patches = list(self.chosen_code())
        with self.active():
            self.engine = Engine(model, batch, max(POSITIONS, self.filled + 64), **options)
        self.rows = self.engine.rows(0, batch)
        self.keep_logits(batch, k)
        self.compile_s = self.warm_up()
        self.error = self.check() if check else math.nan

    def chosen_code(self) -> Iterator[tuple]:
        """(owner, name, function) of what the variant puts in place; made once, for torch compiles by identity."""
        variant, model = self.variant, self.subject.model
        block, head = type(model.layers[0].ffn.down), type(model.lm_head)
        if variant.product:
            yield block, code_of(block), variant.product
        if variant.product and head is not block:  # a head that stayed as it is
            yield head, code_of(head), by_rows
        if variant.attend:
            yield model_py, "attend", variant.attend
        if variant.whole:
            yield Block, "forward", inspect.getclosurevars(Block.forward).nonlocals["func"]

    def keep_logits(self, batch: int, k: int) -> None:
        """While this contender runs, what the head gives for each row (B, T, V) stays in the state: one write of V
        numbers a step."""
        model, state = self.subject.model, self.engine.state
        state.register_buffer("logits", torch.zeros(batch, k + 1, model.config.vocab_size, device=self.device))

        def head(h: Tensor) -> Tensor:
            logits = Transformer.head(model, h)
            state.logits[:, : logits.size(1)].copy_(logits)
            return logits

        self.patches.append((model, "head", head))

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Everything that traces or runs this contender's steps happens in here."""
        from torch._inductor import config as inductor

        strict = {"triton.cudagraph_or_error": True} if self.device.type == "cuda" and not self.args.lenient else {}
        options = compiling.GPU_OPTIONS | dict(self.variant.config)
        with contextlib.ExitStack() as stack:
            stack.enter_context(inductor.patch({**strict, **self.variant.config}))
            stack.enter_context(mock.patch.object(compiling, "GPU_OPTIONS", options))  # which would undo the variant's
            stack.enter_context(self.variant.context())
            for owner, name, function in self.patches:
                stack.enter_context(mock.patch.object(owner, name, function))
            yield

    def advance(self, k: int = 0) -> None:
        """One decode step, one replay of several, or one verification of k drafted tokens."""
        if self.variant.steps == 1 or k:
            self.engine.run(self.rows, self.filled, k)
            return
        state, target, _ = self.rows
        step = self.engine.maybe_compile(several_steps, state, self.variant.steps)
        step(self.subject.model, target.slice_to(self.filled), state, self.variant.steps)

    @torch.inference_mode()
    def place(self) -> None:
        """Fill the caches: with the prompt where that is short, else with noise; then stand behind it."""
        state, n = self.rows.state, self.filled
        caches, tokens = self.rows.target.caches, self.subject.prompt[:, :n]
        state.tokens[:, : tokens.size(1)] = tokens
        state.pos.fill_(n - 1)
        state.done.fill_(True)
        state.kind = self.variant.sampling.kind
        state.values.copy_(self.variant.sampling.values)
        if tokens.size(1) < n:
            for cache in caches.layers:
                cache.k.normal_()
                cache.v.normal_()
            return
        rows = tokens.expand(state.pos.size(0), -1)
        self.subject.model.hidden(rows, torch.arange(n, device=self.device), caches.slice_to(n))

    def warm_up(self) -> float:
        """Seconds until every step that will be timed has been compiled, recorded and replayed."""
        self.place()
        start = time.perf_counter()
        with self.active(), torch.inference_mode():
            for _ in range(3):
                for k in {0, self.k}:
                    self.advance(k)
        synchronize(self.device)
        return time.perf_counter() - start

    def check(self) -> float:
        """The larger relative error of a step's and of a verification's logits. ValueError where they are wrong."""
        layers, errors = self.subject.model.config.n_layers, []
        for k in sorted({0, self.k}):
            self.run(1, k)
            found = self.engine.state.logits[:, : k + 1]
            truth = self.subject.truth[: k + 1].expand_as(found)
            wrong = verdict(found, truth, layers)
            if wrong:
                raise ValueError(f"{wrong} ({k + 1} rows)")
            errors.append(relative_error(found, truth))
        return max(errors)

    @torch.inference_mode()
    def run(self, count: int, k: int = 0) -> list[float]:
        """Seconds of each of `count` steps, back to back."""
        with self.active():
            found = timed(self.device, lambda: self.advance(k), count)
        return found if k else [s / self.variant.steps for s in found]

    def bytes(self) -> int:
        """That one step reads."""
        model, batch = self.subject.model, self.engine.state.pos.size(0)
        return weight_bytes(model) + batch * attended_bytes(position_bytes(model), self.filled)

    def kernels(self, count: int = 4) -> tuple[float, float, str]:
        """(kernels a step, their seconds a step, the longest by name), from the profiler; on a CPU operators."""
        from torch.profiler import ProfilerActivity, profile

        on_gpu = self.device.type == "cuda"
        with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as trace:
            self.run(count)
        steps = (count + UNCOUNTED) * self.variant.steps
        name = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        events = [event for event in trace.key_averages() if getattr(event, name) > 0]
        events.sort(key=lambda event: -getattr(event, name))
        longest = ", ".join(
            f"{event.key[:60]} {getattr(event, name) / steps / 1e3:.3f} ms in {event.count / steps:.0f}"
            for event in events[:6]
        )
        total = sum(getattr(event, name) for event in events) / steps / 1e6
        return sum(event.count for event in events) / steps, total, longest


# ------------------------------------------------------------------------------------------- measurements


def rounds_of(args: argparse.Namespace, contenders: dict[str, Contender], k: int = 0) -> tuple[dict, list[float]]:
    """Every contender in turn, after a read of the device's memory: name -> median seconds by round; bandwidths."""
    found, reads = {name: [] for name in contenders}, []
    for _ in range(args.rounds):
        reads.append(bandwidths(args)[0])
        for name, contender in contenders.items():
            found[name].append(statistics.median(contender.run(args.steps, k)))
    return found, reads


def shares(read: int, times: list[float], bandwidth: list[float]) -> list[float]:
    """Of each round's read bandwidth that a step of so many bytes reached."""
    return [read / s / b for s, b in zip(times, bandwidth, strict=True)]


def ratios(slower: list[float], faster: list[float]) -> list[float]:
    """Round by round."""
    return [a / b for a, b in zip(slower, faster, strict=True)]


CHECKED = "within the allowed error of float32"


def attempt(id: str, make: Callable[[], Rows], said: str = CHECKED) -> Rows:
    """The rows that `make` gives, and "id.correct" 1; or that row alone with 0 and what went wrong."""
    try:
        return [*make(), row(f"{id}.correct", [1.0], "", said)]
    except Exception as error:
        return [failure(id, error)]


def failure(id: str, error: Exception) -> dict:
    return row(f"{id}.correct", [0.0], "", " ".join(f"{type(error).__name__}: {error}".split())[:400])


def measure_bandwidth(args: argparse.Namespace) -> Iterator[Rows]:
    found = [bandwidths(args) for _ in range(args.rounds)]
    note = f"of {buffers(args.device, 2**20 if args.tiny else 2**30)[0].nbytes / 2**30:.3g} GiB of float32"
    for name, values in zip(("read", "copy"), zip(*found)):
        what = "faster of a sum and a dot product" if name == "read" else "copy, bytes read and written,"
        yield [row(f"{name}_bandwidth_gb_s", [value / 1e9 for value in values], "GB/s", f"{what} {note}")]


def measure_decode(args: argparse.Namespace) -> Iterator[Rows]:
    """Each format beside bf16, in turn."""
    for name in args.shapes:
        base = None
        if len(args.formats) > 1:
            with contextlib.suppress(Exception):  # its own rows say why
                base = Contender(Subject(args, name, "bf16"))
        for format in args.formats:
            make = functools.partial(decode_rows, args, name, format, base)
            yield attempt(f"{name}.{format}", make)
            free()


def decode_rows(args: argparse.Namespace, name: str, format: str, base: Contender | None) -> Rows:
    contender = base if base and format == "bf16" else Contender(Subject(args, name, format))
    id, together = f"{name}.{format}", {format: contender} | ({"bf16": base} if base else {})
    times, reads = rounds_of(args, together)
    six, _ = rounds_of(args, {format: contender}, K)
    count, busy, longest = contender.kernels()
    read, here = contender.bytes(), times[format]
    note = f"{read / 1e9:.3f} GB a step, {args.filled} filled; read bandwidth {statistics.median(reads) / 1e9:.0f} GB/s"
    checked = f"logits off by {contender.error:.2g} of their size, {allowed_error(layers(contender)):.2g} allowed"
    return [
        row(f"{id}.tok_s", [1 / s for s in here], "tok/s", note),
        row(f"{id}.step_ms", [1e3 * s for s in here], "ms", checked),
        row(f"{id}.of_read_bandwidth", shares(read, here, reads), "ratio", note),
        row(f"{id}.verify6_over_1", ratios(six[format], here), "ratio", "6 rows over 1: the price of --one_width"),
        row(f"{id}.kernels", [count], "a step", longest),
        row(f"{id}.kernel_ms", [1e3 * busy], "ms", "sum over a step's kernels; the rest of a step is between them"),
        row(f"{id}.compile_s", [contender.compile_s], "s", "a decode step and a verification, with tuning"),
        row(f"{id}.memory_gb", [memory(args.device)], "GB", "allocated now, with bf16's model where it is beside"),
        *([row(f"{id}.vs_bf16", ratios(times["bf16"], here), "ratio", note)] if base else []),
    ]


def layers(contender: Contender) -> int:
    return contender.subject.model.config.n_layers


def memory(device: torch.device) -> float:
    return torch.cuda.memory_allocated(device) / 1e9 if device.type == "cuda" else 0.0


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure_verify(args: argparse.Namespace) -> Iterator[Rows]:
    """What more rows cost."""
    for name, format in itertools.product(args.shapes, args.formats):
        subject = functools.cache(functools.partial(Subject, args, name, format))
        for rows in (6, 2, 4, 8, 16):
            id = f"{name}.{format}.verify{rows}_over_1"
            yield attempt(id, functools.partial(verify_rows, args, subject, rows, id))
        free()


def verify_rows(args: argparse.Namespace, subject: Callable[[], Subject], rows: int, id: str) -> Rows:
    contender = Contender(subject(), k=rows - 1)
    one, _ = rounds_of(args, {"": contender})
    many, _ = rounds_of(args, {"": contender}, rows - 1)
    return [row(id, ratios(many[""], one[""]), "ratio", f"{1e3 * statistics.median(one['']):.3f} ms for one row")]


def measure_variants(args: argparse.Namespace) -> Iterator[Rows]:
    """Each variant beside the plain step, in turn; both are taken at one row and at six."""
    for name, format in itertools.product(args.shapes, args.formats):
        subject, plain = Subject(args, name, format), []
        yield attempt(f"{name}.{format}.plain", functools.partial(plain_rows, args, subject, plain))
        for variant in chosen(args, format):
            id = f"{name}.{format}.{variant.name}"
            yield attempt(id, functools.partial(variant_rows, args, subject, plain, variant, id))
            free()


def plain_rows(args: argparse.Namespace, subject: Subject, plain: list[Contender]) -> Rows:
    """Of the step as generate.py compiles it, which is left in `plain`: without it a variant is timed alone."""
    plain.append(Contender(subject))
    return variant_rows(args, subject, [], PLAIN, f"{subject.name}.{subject.format}.plain", plain[0])


def chosen(args: argparse.Namespace, format: str) -> list[Variant]:
    """The variants of a format that run here; says which do not."""
    fit = [v for v in VARIANTS if format.startswith(v.formats) and (not args.only or v.name in args.only)]
    left = [v.name for v in fit if v.gpu and args.device.type != "cuda"]
    if left:
        print(f"only on a GPU: {', '.join(left)}", file=sys.stderr)
    return [v for v in fit if v.name not in left]


def variant_rows(
    args: argparse.Namespace, subject: Subject, plain: list[Contender], variant: Variant, id: str,
    contender: Contender | None = None,
) -> Rows:  # fmt: skip
    if contender is None:
        of = subject if variant.head else Subject(args, subject.name, subject.format, head=False)
        contender = Contender(of, variant)
    together = {"here": contender} | ({"plain": plain[0]} if plain else {})
    times, reads = rounds_of(args, together)
    six, _ = rounds_of(args, {"here": contender}, K)
    here, (count, busy, longest) = times["here"], contender.kernels()
    note = f"logits off by {contender.error:.2g}; {count:.0f} kernels a step, {1e3 * busy:.3f} ms; compiled in"
    gain = [row(f"{id}.gain", ratios(times["plain"], here), "ratio", "over plain")] if plain else []
    return [
        *gain,
        row(f"{id}.step_ms", [1e3 * s for s in here], "ms", f"{note} {contender.compile_s:.0f} s; {longest}"),
        row(f"{id}.of_read_bandwidth", shares(contender.bytes(), here, reads), "ratio"),
        row(f"{id}.verify6_over_1", ratios(six["here"], here), "ratio", "6 rows over 1"),
    ]


def measure_context(args: argparse.Namespace) -> Iterator[Rows]:
    for name, format in itertools.product(args.shapes, args.formats):
        subject = functools.cache(functools.partial(Subject, args, name, format))
        for filled in (100, 1000, 4000, 16_000, 32_000):
            filled = min(filled, 400) if args.tiny else filled
            id = f"{name}.{format}.filled{filled}"
            make = functools.partial(sized_rows, args, subject, id, filled=filled)
            yield attempt(id, make, "ran" if filled > args.filled else CHECKED)


def measure_batch(args: argparse.Namespace) -> Iterator[Rows]:
    for name, format in itertools.product(args.shapes, args.formats):
        subject = functools.cache(functools.partial(Subject, args, name, format))
        for batch in (1, 2, 4, 8, 16):
            id = f"{name}.{format}.batch{batch}"
            yield attempt(id, functools.partial(sized_rows, args, subject, id, batch=batch))


def sized_rows(args: argparse.Namespace, subject, id: str, batch: int = 1, filled: int | None = None) -> Rows:
    check = (filled or args.filled) == args.filled
    contender = Contender(subject(), batch=batch, k=1, filled=filled, check=check)
    times, reads = rounds_of(args, {"": contender})
    note = f"{contender.bytes() / 1e9:.3f} GB a step"
    return [
        row(f"{id}.tok_s", [batch / s for s in times[""]], "tok/s", note),
        row(f"{id}.ms", [1e3 * s for s in times[""]], "ms", note),
        row(f"{id}.of_read_bandwidth", shares(contender.bytes(), times[""], reads), "ratio", note),
    ]


# -------------------------------------------------------------------------------------------- speculation


def untied(hf: dict) -> dict:
    return hf | {"tie_word_embeddings": False}


def measure_speculation(args: argparse.Namespace) -> Iterator[Rows]:
    """Both models in int4; the 1B's head and embedding apart, because rows of the head say what follows."""
    scheme, note = "int4-g32", "random int4 weights, K = 5, greedy, acceptance set by construction"
    with larger_chunks(args.device):
        pair = [
            pack_model(counting_model(untied(shape(args, name)), 0.0, device=args.device, quantize=scheme))
            for name in ("8b", "1b")
        ]
    clean = pair[1].embed.weight.clone()
    engine = Engine(pair[0], 1, POSITIONS, compile=not args.eager, drafter=ModelDraft(pair[1]), speculate_k=K)
    if not args.eager:
        engine.warm_up(Sampling(0).kind)
    found = {}
    for alpha in (0.8, 0.5, 0.95):
        pair[1].embed.weight.copy_(clean)
        mislead(pair[1], 1 - alpha)
        id = f"spec.8b_int4_1b_int4.alpha{round(100 * alpha)}"
        make = functools.partial(race_rows, args, engine, id, note)
        rows = attempt(id, make, "rounds decided the tokens of plain steps")
        found |= {r["id"]: r["value"] for r in rows if r["id"].endswith("measured_over_predicted")}
        every = row("spec.measured_over_predicted", list(found.values()), "ratio", note) if found else None
        yield rows + ([every] if every else [])


def race_rows(args: argparse.Namespace, engine: Engine, id: str, note: str) -> Rows:
    """Plain decoding and rounds in turn, once for each of --rounds prompts."""
    engine.costs = costs(args, engine)
    runs = [race(args, engine, [(997 * (n + 1)) % engine.model.config.vocab_size]) for n in range(args.rounds)]
    speedups = [plain / drafted for plain, drafted, _ in runs]
    reports = [report for _, _, report in runs]
    predicted = [report["predicted_speedup"] for report in reports]
    rows = [
        row(f"{id}.speedup", speedups, "ratio", note),
        row(f"{id}.measured_over_predicted", ratios(speedups, predicted), "ratio", note),
        row(f"{id}.plain_tok_s", [1 / plain for plain, _, _ in runs], "tok/s", note),
        row(f"{id}.tok_s", [1 / drafted for _, drafted, _ in runs], "tok/s", note),
    ]
    keys = ("alpha", "c", "v", "tokens_per_round")
    return rows + [row(f"{id}.{key}", [report[key] for report in reports], "", note) for key in keys]


def race(args: argparse.Namespace, engine: Engine, prompt: list[int]) -> tuple[float, float, dict]:
    """Seconds a token of decoding plainly and with rounds, and what speculation reports. After the prompt nothing may
    wait for the device but the loop's own reading of events. ValueError where the two decide different tokens."""
    found, texts, new = [], [], 24 if args.tiny else 256
    for k in (0, K):
        engine.clear()
        engine.speculate_k, timing = k, Timing()
        options = {"sampling": Sampling(0), "max_new_tokens": new, "engine": engine, "timing": timing}
        stream = generate(engine.model, [prompt], **options)
        ids = [next(stream)[1]]
        with no_surprises(engine.device):
            ids += [id for _, id in stream]
        found.append(timing.decode_s / (timing.decoded[0] - 1))
        texts.append(ids)
    if texts[0] != texts[1]:
        raise ValueError(f"wrong: rounds decided {texts[1][:8]}…, plain steps {texts[0][:8]}…")
    return *found, speculative(engine, [timing])


@torch.inference_mode()
def costs(args: argparse.Namespace, engine: Engine) -> Costs:
    """As Engine.calibrate, but back to back: with a pause before each, a GPU's steps seem to cost what the host takes
    to launch them, and those of a small draft more than they do."""
    rows = engine.rows(0, 1)
    state = rows.state
    state.pos.fill_(args.filled - 1)
    state.done.fill_(True)
    found: dict[int, list] = {}
    for k in (0, K):
        for number in range(args.steps + UNCOUNTED):
            step = engine.run(rows, args.filled, k)
            engine.draft_lag = 0
            if number >= UNCOUNTED:
                found.setdefault(k, []).append(step)
        synchronize(engine.device)
    parts = {k: [spent(step) for step in steps] for k, steps in found.items()}  # (draft, verify) seconds
    draft = statistics.median(part[0] for part in parts[K])
    verify, plain = (statistics.median(part[1] for part in parts[k]) for k in (K, 0))
    return Costs(plain, {K: draft}, {K: verify})


# -------------------------------------------------------------------------------------- compiling, peers


def measure_compile(args: argparse.Namespace) -> Iterator[Rows]:
    """Fresh processes: with an empty cache folder, then again with what the first one left there."""
    for name, format in itertools.product(args.shapes, args.formats):
        with tempfile.TemporaryDirectory() as folder:
            for kind in ("cold", "warm"):
                id = f"{name}.{format}.compile.{kind}_s"
                yield attempt(id, functools.partial(compile_rows, args, name, format, id, folder), "ran")


def compile_rows(args: argparse.Namespace, name: str, format: str, id: str, folder: str) -> Rows:
    flags = ["--device", str(args.device), *["--tiny"] * args.tiny, *["--eager"] * args.eager]
    env = {"TORCHINDUCTOR_CACHE_DIR": folder}
    worker = Worker("benchmarks.bench_gpu", "--worker", "--shapes", name, "--formats", format, *flags, env=env)
    answer = worker.ask(what="compile")
    worker.close()
    return [row(id, [answer["compile_s"]], "s", "a decode step and a verification of six rows, with a check")]


def serve(args: argparse.Namespace) -> None:
    """What `compile` asks a fresh process: one contender's seconds."""
    for _ in sys.stdin:
        contender = Contender(Subject(args, args.shapes[0], args.formats[0]))
        print(json.dumps({"compile_s": contender.compile_s}), flush=True)


def measure_peers(args: argparse.Namespace) -> Iterator[Rows]:
    """Each in a process of its own that waits while the others run. `--best` names our variant by format."""
    for name, format in itertools.product(args.shapes, args.formats):
        hf, peers = json.dumps(shape(args, name)), {}
        device = str(args.device)
        if args.gptfast:
            peers["gptfast"] = ("gptfast", hf, str(args.gptfast.resolve()), format, device)
        if format == "bf16":
            peers["transformers"] = ("transformers_compiled", hf, device)
        for peer, command in peers.items():
            id = f"{name}.{format}.vs_{peer}"
            yield attempt(id, functools.partial(peer_rows, args, name, format, peer, command, id))
            free()


def peer_rows(args: argparse.Namespace, name: str, format: str, peer: str, command: tuple, id: str) -> Rows:
    variant = next((v for v in VARIANTS if v.name == args.best), PLAIN)
    contender, worker = Contender(Subject(args, name, format), variant), Worker("benchmarks.peers", *command)
    ours, theirs = [], []
    for number in range(args.rounds + 1):
        answer = worker.ask(what="decode", steps=args.steps, filled=args.filled)
        if number:  # the first round compiles
            theirs.append(answer["seconds"])
            ours.append(statistics.median(contender.run(args.steps)))
    worker.close()
    note = f"{variant.name} against {peer}, {args.filled} filled"
    return [
        row(id, ratios(theirs, ours), "ratio", note),
        row(f"{name}.{format}.{peer}.tok_s", [1 / s for s in theirs], "tok/s", note),
    ]


MEASUREMENTS = {
    "bandwidth": measure_bandwidth,
    "decode": measure_decode,
    "verify": measure_verify,
    "variants": measure_variants,
    "speculation": measure_speculation,
    "context": measure_context,
    "batch": measure_batch,
    "compile": measure_compile,
    "peers": measure_peers,
}

# ------------------------------------------------------------------------------------------- command line


def guarded(name: str, items: Iterator[Rows]) -> Iterator[Rows]:
    """Items until one cannot even be begun; then what went wrong."""
    try:
        yield from items
    except Exception as error:
        yield [failure(name, error)]


def until(rows: Iterator[Rows], end: float, clock: Callable[[], float] = time.monotonic) -> Iterator[Rows]:
    """Items of `rows` for as long as another one that takes as long as the longest so far would end before `end`."""
    longest, start = 0.0, clock()
    for found in rows:
        yield found
        now = clock()
        longest, start = max(longest, now - start), now
        if now + longest > end:
            print("out of time: the rest is left out", file=sys.stderr)
            return


def machine(device: torch.device) -> str | None:
    """The GPU's name; None for the CPU's own."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def command_line(args: argparse.Namespace) -> str:
    """What was typed, without paths of this machine."""
    text = f"python -m benchmarks.bench_gpu {' '.join(sys.argv[1:])}"
    for path, name in ((args.gptfast, "DIR"), (args.write and args.write.parent, "benchmarks")):
        text = text.replace(str(path), name) if path else text
    return text


def run(args: argparse.Namespace) -> None:
    end = time.monotonic() + 60 * args.minutes
    for name in args.what:
        for rows in until(guarded(name, MEASUREMENTS[name](args)), end):
            for r in rows:
                print(f"{r['id']:48} {r['value']:>9} ({r['min']}–{r['max']}) {r['unit']}  {r['note']}", file=sys.stderr)
            if args.write:
                write_results(args.write, rows, command_line(args), machine(args.device), args.commit)
        if time.monotonic() > end:
            return


def listed(text: str) -> list[str]:
    return text.split(",")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(description="Measure quickdraft on one GPU.")
    add = parser.add_argument
    add("what", nargs="*", metavar="MEASUREMENT", help=f"of {', '.join(MEASUREMENTS)}")
    add("--formats", type=listed, default=["bf16", "int8", "int4-g32", "fp8", "mxfp6"], help="bf16 or a scheme, …")
    add("--shapes", type=listed, default=["8b"], help=f"of {', '.join(SHAPES)}; default: 8b")
    add("--minutes", type=float, default=1e9, metavar="M", help="begin nothing that may end later")
    add("--write", type=Path, metavar="FILE", help="merge the rows into this results file")
    add("--rounds", type=positive, default=5)
    add("--steps", type=positive, default=32, help="of each contender a round")
    add("--filled", type=positive, default=100, help="positions, the step's own included")
    add("--only", type=listed, metavar="NAMES", help="of VARIANTS")
    add("--best", metavar="NAME", help="the variant that runs against peers; default: plain")
    add("--gptfast", type=Path, metavar="DIR", help="a gpt-fast checkout, for peers")
    add("--commit", metavar="TEXT", help="where git does not know it")
    add("--device", type=pick_device, default=None, help="cuda; cpu to try the program out")
    add("--tiny", action="store_true", help="tiny shapes, to try the program out")
    add("--eager", action="store_true", help="without compiling")
    add("--lenient", action="store_true", help="steps of which torch makes no CUDA graph are measured too")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.device = args.device or pick_device(None)
    if args.device.type != "cuda" and not args.tiny:
        raise ValueError("needs a CUDA device; --device cpu --tiny tries the program out on a CPU")
    check_names("measurement", args.what, list(MEASUREMENTS))
    check_names("shape", args.shapes, list(SHAPES))
    check_names("format", args.formats, ["bf16", *formats.SCHEMES])
    check_names("variant", [*(args.only or []), *([args.best] if args.best else [])], [v.name for v in VARIANTS])
    return args


def check_names(what: str, names: list[str], known: list[str]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"{what} {', '.join(unknown)} does not exist; there are {', '.join(known)}")


def main() -> None:
    with ending_plainly():
        args = parse_args()
        if not args.what and not args.worker:
            raise ValueError(f"name what to measure: {', '.join(MEASUREMENTS)}")
        serve(args) if args.worker else run(args)


if __name__ == "__main__":
    main()
