"""One compiled step on a GPU: its time, and whether its logits are right.

    time_calls, read_bandwidth   seconds of calls back to back; bytes/s
    Subject                      random weights of a shape in a format, and their logits in float32
    Contender                    a subject's steps and verifications, as generate.py compiles them

Steps run back to back with an event between them. While they are timed, waiting for the device and
compiling anew are errors. A Contender compares its logits with those that the same stored weights
give in float32, eagerly, before anything is timed. On a CPU the same code runs with a clock in
place of events.
"""

import argparse
import contextlib
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.shapes import GPU_SHAPES, TINY, K, config_json, scheme_of
from cli.report import attended_bytes, position_bytes, weight_bytes
from decoding.engine import Engine
from decoding.planner import Step
from decoding.readback import seconds_between, synchronize, timestamp
from decoding.sampling import Sampling
from drafts.base import Draft, Drafter
from loading.config import config_from_hf
from loading.models import random_model
from model import Block, Config, Transformer
from weights import formats
from weights.linears import QuantizedLinear
from weights.walker import pack_model

POSITIONS = 1024  # of a cache
UNCOUNTED = 2  # calls before those that are timed


def shape_config(args: argparse.Namespace, name: str) -> dict:
    """The config.json of a shape, with tiny sizes under --tiny, and `layers` if there is a number
    of them."""
    hf = config_json(GPU_SHAPES[name])
    if args.tiny:
        hf |= TINY
    return hf | {"num_hidden_layers": args.layers} if args.layers else hf


# ----------------------------------------------------------------------------------------- timing


def time_calls(device: torch.device, call: Callable[[], object], count: int) -> list[float]:
    """Seconds of each of `count` calls, back to back."""
    for _ in range(UNCOUNTED):
        call()
    synchronize(device)
    with forbid_sync_and_recompile(device):
        marks = [timestamp(device)]
        for _ in range(count):
            call()
            marks.append(timestamp(device))
    synchronize(device)
    return [seconds_between(begin, end) for begin, end in itertools.pairwise(marks)]


@functools.cache
def buffer_of(device: torch.device, num_elements: int) -> Tensor:
    """float32, far larger than the caches; random, because zeros may move faster."""
    return torch.empty(num_elements, device=device).normal_()


def read_bandwidth(args: argparse.Namespace) -> float:
    """Bytes/s of reading, by the faster of a sum and a dot product of halves."""
    data = buffer_of(args.device, 2**20 if args.tiny else 2**30)
    halves = data.chunk(2)
    reads = (data.sum, lambda: torch.dot(*halves))
    return data.nbytes / min(statistics.median(time_calls(args.device, call, 5)) for call in reads)


@contextlib.contextmanager
def forbid_sync_and_recompile(device: torch.device) -> Iterator[None]:
    """Inside, waiting for the GPU is an error, and so is compiling a function again."""
    with torch._dynamo.config.patch(error_on_recompile=True):
        if device.type != "cuda":
            yield
            return
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


# -------------------------------------------------------------------------------- expected logits


class Subject:
    """Random weights of a shape in a format, the head's too, with the logits that they give in
    float32."""

    def __init__(self, args: argparse.Namespace, name: str, format: str):
        self.args = args
        scheme = scheme_of(format)
        config = config_from_hf(shape_config(args, name))
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(0, config.vocab_size, (1, args.filled + K), generator=generator)
        ids = ids.to(args.device)
        self.prompt, self.drafted = ids.split((args.filled, K), dim=1)  # (1, filled), (1, K)
        with larger_chunks(args.device):
            self.model = random_model(
                config, device=args.device, quantize=scheme, head_scheme=scheme, pack=False
            )
            # (K + 1, V) from the prompt's last token on
            self.expected = float32_logits(self.model, ids, K + 1)
            if args.device.type != "cpu":
                pack_model(self.model)


def larger_chunks(device: torch.device):
    """Inside, a GPU quantizes more weights at a time; the default suits a CPU's caches."""
    return mock.patch.object(
        formats, "CHUNK_WEIGHTS", formats.CHUNK_WEIGHTS if device.type == "cpu" else 2**26
    )


@torch.inference_mode()
def float32_logits(model: Transformer, tokens: Tensor, num_last: int) -> Tensor:
    """Logits (num_last, V) of the last of tokens (1, T), without cache or kernel: the model's own
    blocks in float32, with dequantized weights."""
    pos = torch.arange(tokens.size(1), device=tokens.device)[None]  # (1, T)
    x, rope, keys = (
        model.embed(tokens).float(),
        model.rope(pos),
        model.visible_by_window(pos, None, torch.float32),
    )
    for layer, window in zip(model.layers, model.windows):
        x = float32_block(model.config, layer)(x, pos, rope, keys[window], None)
    # (num_last, D)
    x = F.rms_norm(x[0, -num_last:], x.shape[-1:], model.norm.weight.float(), model.config.norm_eps)
    return F.linear(x, float32_weight(model.lm_head))


def float32_block(config: Config, layer: Block) -> Block:
    with torch.device("meta"):
        block = type(layer)(config)
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
    """The largest ||logits - expected|| / ||expected|| of a right step. It assumes twelve roundings
    to bfloat16 a layer and two behind the layers, independent, of 2^-9 at most, which do not grow.
    For comparison, a product without one group of 32 of its 4096 inputs differs by 9 %."""
    return 2**-9 * math.sqrt(12 * n_layers + 2)


def relative_error(logits: Tensor, expected: Tensor) -> float:
    return (
        torch.linalg.vector_norm(logits.float() - expected) / torch.linalg.vector_norm(expected)
    ).item()


# ------------------------------------------------------------------------------------- contenders


class FixedDraft(Drafter):
    """Proposes the same tokens in every round at no cost."""

    def __init__(self, tokens: Tensor):
        super().__init__()
        self.proposed = tokens  # (1, K)

    def setup(self, state, k_max: int, target, maybe_compile: Callable) -> None:
        self.state, B, V = state, state.pos.size(0), target.model.config.vocab_size
        self.register_buffer(
            "tokens", self.proposed[:, :k_max].expand(B, -1).clone(), persistent=False
        )
        # (B, K, V)
        self.register_buffer("probs", F.one_hot(self.tokens, V).float(), persistent=False)

    def propose(self, batch, plan) -> Draft:
        return Draft(self.tokens, self.probs).cut(plan.k)


class Contender:
    """A subject's compiled steps at one position, where every step decides the same token.
    ValueError if its logits are wrong. `ks`: 0 for a plain step, or drafted tokens to verify."""

    def __init__(self, subject: Subject, ks: Sequence[int] = (0, K)):
        self.subject, self.args, self.device = subject, subject.args, subject.args.device
        self.ks = ks
        options = {
            "compile": not self.args.eager,
            "drafter": FixedDraft(subject.drafted),
            "speculate_k": K,
        }
        self.engine = Engine(subject.model, 1, max(POSITIONS, self.args.filled + 64), **options)
        self.rows = self.engine.rows(0, 1)
        # A step writes its logits here: V numbers more than usual.
        logits = torch.zeros(1, K + 1, subject.model.config.vocab_size, device=self.device)
        self.engine.batch.register_buffer("logits", logits)
        self.head = functools.partial(head_with_copy, subject.model, self.engine.batch)
        self.compile_s = self.warm_up()
        self.error = self.check()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """All tracing and running of this contender's steps happens inside."""
        from torch._inductor import config as inductor

        is_strict = self.device.type == "cuda" and not self.args.lenient
        with (
            inductor.patch({"triton.cudagraph_or_error": True} if is_strict else {}),
            mock.patch.object(self.subject.model, "head", self.head),
        ):
            yield

    @torch.inference_mode()
    def warm_up(self) -> float:
        """Fill the caches with the prompt, then compile, record and replay every step that will be
        timed, and return the seconds of that."""
        state, n, tokens = self.rows.batch, self.args.filled, self.subject.prompt
        state.tokens[:, :n] = tokens
        state.pos.fill_(n - 1)
        state.done.fill_(True)
        state.sampling_path = Sampling(0).path
        state.values.copy_(Sampling(0).values)
        caches = self.rows.target.caches
        self.subject.model.hidden(tokens, torch.arange(n, device=self.device), caches.slice_to(n))
        start = time.perf_counter()
        with self.active():
            for k in (*self.ks, *self.ks, *self.ks):  # compile, record, replay
                self.engine.run(Step(self.rows, n, k))
        synchronize(self.device)
        return time.perf_counter() - start

    def check(self) -> float:
        """The largest relative error of the logits of a step or verification. ValueError where they
        are wrong."""
        bound, errors = allowed_error(self.subject.model.config.n_layers), []
        for k in self.ks:
            self.run(1, k)
            logits = self.engine.batch.logits[0, : k + 1]
            errors.append(relative_error(logits, self.subject.expected[: k + 1]))
            if not errors[-1] <= bound:
                difference = (
                    f"logits are off by {errors[-1]:.3g} of their size, {bound:.3g} is allowed"
                )
                raise ValueError(f"wrong: {difference} ({k + 1} rows)")
        return max(errors)

    @torch.inference_mode()
    def run(self, count: int, k: int = 0) -> list[float]:
        """Seconds of each of `count` steps, or verifications of k drafted tokens, back to back."""
        with self.active():
            step = Step(self.rows, self.args.filled, k)
            return time_calls(self.device, lambda: self.engine.run(step), count)

    def bytes(self) -> int:
        """Bytes that one step reads."""
        model = self.subject.model
        return weight_bytes(model) + attended_bytes(position_bytes(model), self.args.filled)


def head_with_copy(model: Transformer, state: nn.Module, h: Tensor) -> Tensor:
    """Transformer.head, whose logits (B, T, V) stay in the state too."""
    logits = Transformer.head(model, h)
    state.logits[:, : logits.size(1)].copy_(logits)
    return logits
