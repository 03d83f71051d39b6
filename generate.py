"""Prompt in, streamed text out: `python generate.py --checkpoint DIR --prompt "Once upon a time"`.

    State, decode_step, verify_step a batch as fixed tensors, and the steps that advance it in place
    Engine, compile_step            steps with their models and caches, eager or compiled, attending to what is filled
    generate, prefill               the loop over a batch of independent prompts; yields ids as they are decided
    Timing                          what a run cost; rates and bytes are computed from it
    requests, Printer, chat, run, main  the command line: prompts in, text or JSON out

`generate` knows token ids and nothing of text; text lives at the edge, in Printer. Sampling is sampling.py's, the
arithmetic model.py's, the weights checkpoint.py's, and what is drafted, accepted and reported speculative.py's.
"""

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until `raise_interrupts`

import argparse
import contextlib
import functools
import hashlib
import itertools
import json
import math
import os
import re
import resource
import statistics
import sys
import threading
import time
import types
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from checkpoint import config_of, fingerprints, load_config, load_model, open_shards, random_model, shards, write_whole
from fused import ONE_KERNEL
from model import Block, Transformer
from packed import pack_linears
from quantize import SCHEMES, format_of, quantized_copy, quantized_linears
from sampling import ACCEPT, GREEDY, INVALID, Sampling, distribution, sample, uniform
from speculative import (
    ACCEPTED,
    AUTO_K,
    CORRECTED,
    PLAIN_TOKEN,
    Costs,
    CustomDraft,
    Drafter,
    DraftLength,
    ModelDraft,
    NgramDraft,
    RowStatistics,
    accept,
    layer_subset,
    parse_layers,
    speculation,
    summary,
)  # fmt: skip
from tokenizer import StopStrings, Tokenizer, load_tokenizer
from tp import (
    ALONE,
    Ranks,
    direct_sums,
    join,
    launched,
    leave,
    let_others_speak,
    local_device,
    lost_contact,
    only_top,
    ranks_of,
)  # fmt: skip

PREFILL_CHUNK = 512  # tokens of a prompt that go through the model at once: bounds what activations take
DEFAULT_NEW_TOKENS = 200
DEFAULT_K = 5  # tokens drafted a round
CHAT_LENGTH = 4096  # positions of an interactive session, where --max_seq_length does not say
OLDEST_TORCH = (2, 11)

# ------------------------------------------------------------------------------------------------ state

FROZEN = -2  # stands in `out` for a row that had already finished
STOP_SLOTS = 64


class State(nn.Module):
    """A batch in fixed tensors, which steps read and write in place: replaying a step needs nothing from the host.

    `kind` is the sampling's, a choice of code; everything else may change without compiling. With several ranks, what
    rank 0 decides goes into every rank's state.
    """

    def __init__(self, B: int, S: int, device: torch.device, K: int = 0, ranks: Ranks = ALONE):
        super().__init__()
        self.kind, self.agree = GREEDY, ranks.agree

        def fixed(name: str, *shape: int, fill=0, dtype=torch.int64) -> None:
            self.register_buffer(name, torch.full(shape, fill, dtype=dtype, device=device))

        fixed("tokens", B, S + K + 1)  # prompt, then what was decided; beyond `pos` a round's scratch space
        fixed("pos", B)  # index of the last decided token, which no layer has seen yet
        fixed("end", B)  # index at which the row is full
        fixed("done", B, fill=True, dtype=torch.bool)
        fixed("seed", B)
        fixed("stop_ids", STOP_SLOTS, fill=-1)
        fixed("values", 4, dtype=torch.float32)  # of the sampling
        # What the last step decided, for the host: tokens, then FROZEN; of how many drafted tokens (-1: of none), and
        # how well the draft fitted: sum of min(p, q) at each drafted position.
        fixed("out", B, K + 1, fill=FROZEN)
        fixed("accepted", B, fill=-1)
        fixed("overlap", B, K, dtype=torch.float32)

    def start(self, prompts, budgets: Sequence[int], stop_ids: Iterable[int], seed, sampling: Sampling) -> None:
        """Fill in a batch; budgets are new tokens per row, seed is one number or one a row. Rows beyond the prompts are
        done from the start."""
        stop_ids = sorted(stop_ids)
        if len(stop_ids) > STOP_SLOTS:
            raise ValueError(f"{len(stop_ids)} stop ids are more than the {STOP_SLOTS} that fit")
        B = self.tokens.size(0)
        lengths = [len(prompt) for prompt in prompts] + [1] * (B - len(prompts))
        seeds = [seed] * B if isinstance(seed, int) else [*seed, *[0] * (B - len(prompts))]
        self.tokens.zero_()
        for row, prompt in enumerate(prompts):
            # Padded with a token of its own: another might overflow in the model, and its NaN reach this row.
            self.tokens[row] = prompt[-1]
            self.tokens[row, : len(prompt)] = torch.tensor(prompt)
        self.pos.copy_(torch.tensor(lengths) - 1)
        self.end.copy_(torch.tensor(lengths) - 1 + torch.tensor([*budgets, *[0] * (B - len(prompts))]))
        self.done.copy_(torch.arange(B) >= len(prompts))
        self.seed.copy_(torch.tensor(seeds))
        self.stop_ids.copy_(torch.tensor(stop_ids + [-1] * (STOP_SLOTS - len(stop_ids))))
        self.values.copy_(sampling.values)
        self.kind = sampling.kind


def commit(state: State, tokens: Tensor, n_accepted: Tensor | None) -> None:
    """Append tokens (B, T), as many as were accepted (B,) and one more, to the rows that are not done, each up to its
    first stop id or its end. None: plain decoding, T = 1."""
    T = tokens.size(1)
    index = torch.arange(T, device=tokens.device)
    position = state.pos[:, None] + 1 + index  # (B, T)
    last = torch.isin(tokens, state.stop_ids) | (position >= state.end[:, None]) | (tokens == INVALID)
    ended_before = last.cumsum(dim=1) - last.long() > 0  # (B, T)
    keep = ~(state.done[:, None] | ended_before)
    if n_accepted is not None:
        keep = keep & (index <= n_accepted[:, None])
    state.out.copy_(F.pad(torch.where(keep, tokens, FROZEN), (0, state.out.size(1) - T), value=FROZEN))
    # What is not kept lands beyond `pos`, where nothing counts. INVALID is for the host alone: a step that runs before
    # the host knows must not embed it.
    state.tokens.scatter_(1, position, tokens.clamp(min=0))
    state.pos.add_(keep.sum(dim=1))
    state.done.logical_or_((keep & last).any(dim=1))


def decide(state: State, logits: Tensor) -> None:
    """Draw the next token of every row from logits (B, V) and advance; finished rows stay as they are."""
    token = sample(logits, state.kind, state.values, uniform(state.seed, state.pos + 1))  # (B,)
    state.accepted.fill_(-1)
    commit(state, state.agree(token)[:, None], None)


def decode_step(model: Transformer, state: State) -> None:
    """One token for every row that is not done. A frozen row runs its last position again."""
    pos = state.pos[:, None]  # (B, 1)
    decide(state, model(state.tokens.gather(1, pos), pos)[:, 0])


def verify_step(model: Transformer, state: State, draft_tokens: Tensor, draft_probs: Tensor) -> None:
    """One pass over the last token and K drafted ones (B, K) decides 1 to K + 1 tokens of every row.

    It writes keys and values of all K + 1 positions in every layer, so whatever a drafter left there is gone.
    """
    K = draft_tokens.size(1)
    draft_tokens = state.agree(draft_tokens)
    pos = state.pos[:, None] + torch.arange(K + 1, device=state.pos.device)  # (B, K + 1)
    tokens = torch.cat((state.tokens.gather(1, pos[:, :1]), draft_tokens), dim=1)  # (B, K + 1)
    p = distribution(model(tokens, pos), state.kind, state.values)  # (B, K + 1, V)
    seed = state.seed[:, None]
    u = uniform(seed.expand(-1, K), pos[:, 1:], ACCEPT)
    # The token after the accepted ones takes the number that plain decoding would use at its position.
    next_noise = uniform(seed.expand(-1, K + 1), pos + 1)
    n, token = accept(draft_tokens, draft_probs, p, noise=(u, next_noise))  # (B,), (B,)
    overlap = torch.minimum(p[:, :K], draft_probs).sum(dim=-1)  # (B, K)
    n = torch.where(draft_probs[:, 0].amax(dim=-1) != 0, n, -1)  # of a row for which nothing was drafted
    decision = torch.cat((n[:, None], token[:, None], overlap), dim=1)  # (B, K + 2) float32, ids are below 2^24
    decision = state.agree(decision)
    n, token, state.overlap[:, :K] = decision[:, 0].long(), decision[:, 1].long(), decision[:, 2:]
    state.accepted.copy_(n)
    n = n.clamp(min=0)
    decided = torch.cat((draft_tokens, draft_tokens[:, :1]), dim=1).scatter(1, n[:, None], token[:, None])
    commit(state, decided, n)


class Seat:
    """A model with caches for B rows of S positions, and its prompts, eager or compiled."""

    def __init__(self, model: Transformer, B: int, S: int, compile: bool):
        # One position of slack: attending to the whole cache would be a special case that compiles once more.
        with torch.inference_mode(False):  # plain tensors, which any later code may write to
            model.setup_caches(B, S + 1)
        self.model, self.compile = model, compile
        self.caches = [layer.attention.cache for layer in model.layers]
        self.compiled_prompt = compile_prompt(model) if compile else None

    def attach(self) -> None:
        """Give the model these caches, if others are in place; in some layers, where that was interrupted."""
        if [layer.attention.cache for layer in self.model.layers] != self.caches:
            with torch.inference_mode(False):
                self.model.use_caches(self.caches)

    def prompt_chunk(self, state: State, rows: int, begin: int, end: int) -> Tensor:
        """Run positions begin to end of the prompts in the state; hidden states (rows, end - begin, D)."""
        tokens, pos = state.tokens[:rows, begin:end], torch.arange(begin, end, device=state.pos.device)
        attend(self.model, end, self.compile)
        tokens = tokens.clamp(max=self.model.config.vocab_size - 1)  # a draft may know fewer ids than its target
        if self.compile:
            for tensor, dim in ((tokens, 1), (pos, 0)):
                torch._dynamo.mark_dynamic(tensor, dim)
        with any_length(pos.device):
            return (self.compiled_prompt or self.model.hidden)(tokens, pos)


def attend(model: Transformer, length: int, compiled: bool) -> None:
    """Model.attend_to, open for compiled code."""
    model.attend_to(length)
    if compiled:
        torch._dynamo.mark_dynamic(model.key_pos, 0)


class Launch(NamedTuple):
    """A step on its way: how many tokens it drafts, and the points in time that it passes: before it, after drafting,
    after verifying, at its end. The step that a prompt ends with has none."""

    k: int
    times: list = ()


class Engine:
    """Models with caches, a State and its steps, eager or compiled, for up to B rows of up to S positions.

    With a drafter it runs rounds: the drafter proposes K tokens, one pass of the model verifies them. speculate_k is K,
    or "auto", which needs `calibrate`. Keep an engine for as long as shapes stay the same: what is compiled is compiled
    once, by `warm_up`.
    """

    def __init__(
        self, model: Transformer, batch_size: int, max_seq_length: int, *, compile: bool = False, drafter=None,
        speculate_k: int | str = DEFAULT_K,
    ):  # fmt: skip
        if speculate_k != "auto" and not (isinstance(speculate_k, int) and speculate_k >= 0):
            raise ValueError(f"speculate_k = {speculate_k!r} must be a number of tokens from 0 on, or 'auto'")
        self.speculate_k = speculate_k if drafter is not None else 0
        self.ks = AUTO_K if self.speculate_k == "auto" else (self.speculate_k,) if self.speculate_k else ()
        self.model, self.compile, self.max_seq_length = model, compile, max_seq_length
        self.ranks = ranks_of(model)
        self.device = model.norm.weight.device
        K = max(self.ks, default=0)
        self.positions = max_seq_length + K  # a round at the context's end writes K tokens too many
        self.drafter = drafter if drafter is None or isinstance(drafter, Drafter) else CustomDraft(drafter)
        self.seats = [Seat(model, batch_size, self.positions, compile)]
        if self.drafter is not None and self.drafter.owns_cache:
            self.seats.append(Seat(self.drafter.model, batch_size, self.positions, compile))
        self.state = State(batch_size, max_seq_length, self.device, K, self.ranks)
        self.steps: dict[tuple, Callable] = {}
        self.costs: Costs | None = None  # of steps and rounds, once `calibrate` has measured them
        self.missed = 0  # tokens a row may have been given since the drafter last ran
        self.attach()

    @property
    def models(self) -> list[Transformer]:
        """The target, and the model that drafts, if one does."""
        return [self.model] + ([self.drafter.model] if self.drafter and self.drafter.model else [])

    @property
    def caches(self) -> list:
        return self.seats[0].caches

    def attach(self) -> None:
        """Put this engine's caches and tensors in place, if another engine's are."""
        for seat in self.seats:
            seat.attach()
        if self.drafter is not None and getattr(self.drafter, "user", None) is not self.state:
            with torch.inference_mode(False):
                self.drafter.setup(self.state, max(self.ks, default=0), self.model)
            for name in self.drafter.steps:
                method = types.MethodType(getattr(type(self.drafter), name), self.drafter)
                setattr(self.drafter, name, lambda state, name=name, method=method: self._run(name, method))
            object.__setattr__(self.drafter, "user", self.state)  # not a submodule

    def clear(self) -> None:
        """Empty the caches: a masked value counts 0 times, which is NaN for a NaN, in later batches too."""
        for cache in itertools.chain.from_iterable(seat.caches for seat in self.seats):
            cache.k.zero_(), cache.v.zero_()

    def attended(self, length: int) -> int:
        """How far attention runs when `length` positions are filled: that far; under CUDA graphs, which are recorded
        for each length, to the next of a few."""
        if not (self.compile and self.device.type == "cuda"):
            return min(length, self.positions)
        return min(self.positions, max(256, 1 << (length - 1).bit_length()))

    def decide_first(self, logits: Tensor) -> list[Tensor]:
        """The token after each prompt, from logits (B, V). This and `step` give what the host should read."""
        decide(self.state, logits)
        return self.outcome()

    def step(self, length: int, k: int = 0) -> tuple[list[Tensor], Launch]:
        """Run one decode step, or a round that drafts k tokens, whose rows have at most `length` positions decided."""
        attend(self.model, self.attended(length + k), self.compile)
        times = [mark(self.device)]
        if k == 0:
            self.missed += 1
            times.append(times[0])
            self._run("decode", functools.partial(decode_step, self.model))
        else:
            draft = self.propose(length, k)
            assert draft[0].size(1) == k, f"the drafter proposed {draft[0].size(1)} tokens where {k} were asked for"
            times.append(mark(self.device))
            self._run(("verify", k), functools.partial(verify_step, self.model), *draft)
        times.append(mark(self.device))
        outcome = self.outcome()
        return outcome, Launch(k, [*times, mark(self.device)])

    def outcome(self) -> list[Tensor]:
        """The tensors of an Outcome, after the drafter has seen it too."""
        state, drafter = self.state, self.drafter
        if drafter is None:
            return [state.out]
        drafter.advance(state.accepted)
        matches = [] if drafter.has_match is None else [self.ranks.agree(drafter.has_match)]
        return [state.out, state.accepted, state.overlap, *matches]

    def propose(self, length: int, k: int) -> tuple[Tensor, Tensor]:
        """k drafted tokens of every row and their distributions."""
        drafter = self.drafter
        if drafter.model is not None:
            attend(drafter.model, self.attended(length + k), self.compile)
        if self.missed:
            drafter.catch_up(self.missed)
        self.missed, drafter.k = 0, k
        return drafter.propose(self.state)

    def _run(self, name, function: Callable[..., None], *tensors) -> None:
        """function(state, *tensors), compiled apart for each name and kind of sampling."""

        def step(*tensors) -> None:
            function(self.state, *tensors)

        key = (name, self.state.kind)
        if self.compile and key not in self.steps:
            self.steps[key] = compile_step(self.models, step)
        # A draft with more ids than the target is cut to the target's, and must not have lost what remains.
        tops = [model for model in self.models if model.config.vocab_size <= self.model.config.vocab_size]
        lengths = contextlib.nullcontext() if self.compile else any_length(self.device)
        with only_top(tops, self.state.kind == GREEDY), direct_sums(self.ranks.one_shot), lengths:
            self.steps.get(key, step)(*tensors)

    @torch.inference_mode()
    def warm_up(self, kind: str) -> float:
        """Compile the steps for `kind` and run them at every length that will be recorded; compile prompts, short and
        long, at the start, later on, and beyond a sliding window; seconds. What this writes to the caches, a prefill
        overwrites."""
        start = time.perf_counter()
        S, state = self.max_seq_length, self.state
        state.pos.zero_()
        state.done.fill_(True)
        state.kind = kind
        self.attach()
        on_gpu = self.device.type == "cuda"
        for seat in self.seats:
            # A CPU's kernels of a few rows and of many are others.
            long = min(PREFILL_CHUNK, S) if quantized_linears(seat.model) and not on_gpu else 2
            for length, begin in sorted((n, begin) for n in {2, long} for begin in {0, min(1, S - n), S - n}):
                seat.prompt_chunk(state, state.pos.size(0), begin, begin + length)
        lengths = {self.attended(min(1 << i, S)) for i in range(1, S.bit_length() + 1)} if on_gpu else {2, S}
        for length in sorted(lengths):
            for k in (0, *self.ks):
                for _ in range(3 if on_gpu else 1):  # CUDA graphs: warm up, record, replay
                    self.step(length, k)
        synchronize(self.device)
        self.missed = 0
        return time.perf_counter() - start

    @torch.inference_mode()
    def calibrate(self, sampling: Sampling, length: int, rounds: int = 7) -> Costs:
        """Measure a plain step, drafting and verifying with `length` positions filled, interleaved, after one
        uncounted round: medians, also kept in `costs`. For before a prefill, like `warm_up`."""
        assert 1 <= length < self.max_seq_length, f"{length} positions filled leave no room in {self.max_seq_length}"
        state = self.state
        state.pos.fill_(length - 1)
        state.done.fill_(True)
        state.kind = sampling.kind
        state.values.copy_(sampling.values)
        self.attach()
        found = {}
        for number in range(rounds + 1):
            for k in (0, *self.ks):
                self.missed = 0
                synchronize(self.device)
                _, launch = self.step(length, k)
                synchronize(self.device)
                draft_s, verify_s, advance_s = (seconds(a, b) for a, b in itertools.pairwise(launch.times))
                if number:
                    found.setdefault(k, []).append((draft_s + advance_s, verify_s))
        draft, verify = ({k: statistics.median(c[part] for c in found[k]) for k in self.ks} for part in (0, 1))
        # A plain step stands as "verified" in the times of K = 0.
        costs = Costs(statistics.median(verified for _, verified in found[0]), draft, verify)
        self.costs = self.ranks.tell(costs)  # draft lengths follow from it
        self.missed = 0
        return self.costs


@contextlib.contextmanager
def any_length(device: torch.device) -> Iterator[None]:
    """Inside, attention does without cuDNN's, which torch prefers on some GPUs: it plans anew for every number of
    queries and keys, some 42 ms on the host (measured in pytorch/pytorch#191576), for which each new length of a prompt
    and each eager step would wait. Where it is all that is allowed it stays."""
    cuda = torch.backends.cuda
    before = device.type == "cuda" and cuda.cudnn_sdp_enabled()
    others = cuda.flash_sdp_enabled() or cuda.mem_efficient_sdp_enabled() or cuda.math_sdp_enabled()
    if not (before and others):
        yield
        return
    cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        cuda.enable_cudnn_sdp(True)


def mark(device: torch.device):
    """A point in time on the device: seconds, or an event that it will pass."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds(begin, end) -> float:
    """Between two points in time that have passed."""
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# Of steps on a GPU. Tuning also makes a product of one row a multiplication and a sum, in one kernel with what stands
# around it. What each changes: benchmarks/NOTES.md.
GPU_OPTIONS = {"coordinate_descent_tuning": True, **ONE_KERNEL}


def compile_step(models: Sequence[Transformer], step: Callable[..., None]) -> Callable[..., None]:
    """A step: static shapes but for the attended length, so that one compilation serves every length. On a GPU it is
    replayed as a CUDA graph."""
    if models[0].norm.weight.device.type != "cuda":
        return _compile(models, step, mode="reduce-overhead")
    return _compile(models, step, options=torch._inductor.list_mode_options("reduce-overhead") | GPU_OPTIONS)


def compile_prompt(model: Transformer) -> Callable[[Tensor, Tensor], Tensor]:
    """`model.hidden` for prompts, dynamic in their length (the caller marks it). Not replayed: lengths are too many."""

    def run_prompt(tokens: Tensor, pos: Tensor) -> Tensor:
        return model.hidden(tokens, pos)

    return _compile([model], run_prompt, mode="default")


def _compile(models: Sequence[Transformer], function: Callable, **how) -> Callable:
    """Compile into one graph whose shapes are static but for the dimensions marked otherwise.

    All blocks have the same code, so that one is compiled for all of them. And the function gets a code object of its
    own: torch keeps compiled code by code object, and stops compiling at eight versions of one.
    """
    for block in itertools.chain.from_iterable(model.layers for model in models):
        if "forward" not in vars(block):
            block.forward = functools.partial(block_region(), block)
            for linear in block.modules():
                if isinstance(linear, nn.Linear) and linear.bias is not None:
                    linear.forward = functools.partial(biased_rows, linear)
    own = types.FunctionType(function.__code__.replace(), function.__globals__, closure=function.__closure__)
    return uninterrupted(torch.compile(own, fullgraph=True, dynamic=False, **how))


def uninterrupted(compiled: Callable) -> Callable:
    """A compiled function in which Ctrl-C acts at once only while the first call compiles, and otherwise after the
    call. torch takes an interrupt inside one of its guards for a guard that fails: it would be lost, and everything
    compiled anew."""
    ready = False

    def call(*arguments):
        nonlocal ready
        with interrupts_afterwards() if ready else contextlib.nullcontext():
            found = compiled(*arguments)
        ready = True
        return found

    return call


@contextlib.contextmanager
def interrupts_afterwards() -> Iterator[None]:
    """Hold back SIGINT, which Python gives to the main thread alone, until the end."""
    usual = signal.getsignal(signal.SIGINT)
    if usual is None or threading.current_thread() is not threading.main_thread():  # None: not Python's to handle
        yield
        return
    came = []
    signal.signal(signal.SIGINT, lambda *_: came.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
    if came:
        signal.raise_signal(signal.SIGINT)


def biased_rows(linear: nn.Linear, x: Tensor) -> Tensor:
    """A Linear with a bias, of x (B, T, in) as (B * T, in): what torch 2.13 makes of three dimensions inside a region
    that writes to a cache is bound to the T that it was traced with."""
    return nn.Linear.forward(linear, x.flatten(0, 1)).view(*x.shape[:-1], -1)


@functools.cache
def block_region() -> Callable:
    """A block's forward as a region that is compiled once for all blocks; one object, or it would be compiled anew."""

    def one_block(block: Block, *args) -> Tensor:
        return Block.forward(block, *args)

    return torch.compiler.nested_compile_region(one_block)


# ------------------------------------------------------------------------------------------------ loop

HOST_LAG = 2  # steps that a GPU may run ahead of the host's reading


@dataclass
class Timing:
    """Seconds, steps and bytes of one batch, filled in by `generate`."""

    prompt_tokens: int = 0
    prefill_s: float = 0.0  # until the first tokens are decided
    decode_s: float = 0.0  # from then until the last ones are; on a CPU without the consumer's time
    row_s: list[float] = field(default_factory=list)  # decode_s when each row ended
    steps: int = 0  # of the target: plain ones and rounds
    decoded: list[int] = field(default_factory=list)  # tokens per row, the first one included
    bytes_read: int = 0  # by the decode steps: weights as stored, and the keys and values attended
    rows: list[RowStatistics] = field(default_factory=list)  # with a drafter: what it did for each row
    draft_s: float = 0.0  # of decode_s
    verify_s: float = 0.0

    def add_step(self, spent_s: float, bytes_read: int, launch: Launch) -> None:
        self.decode_s, self.bytes_read = self.decode_s + spent_s, self.bytes_read + bytes_read
        self.steps += 1
        draft_s, verify_s, advance_s = (seconds(a, b) for a, b in itertools.pairwise(launch.times))
        self.draft_s += draft_s + advance_s
        self.verify_s += verify_s if launch.k else 0.0

    def add_token(self, row: int) -> None:
        self.decoded[row] += 1
        self.row_s[row] = self.decode_s


def together(timings: Sequence[Timing]) -> Timing:
    """What `speculative` needs of several batches, as if they had been one."""
    seconds = {name: sum(getattr(timing, name) for timing in timings) for name in ("decode_s", "draft_s", "verify_s")}
    return Timing(rows=[row for timing in timings for row in timing.rows], **seconds)


class Outcome(NamedTuple):
    """What a step decided, on the host: State's out, accepted and overlap, and the drafter's has_match."""

    tokens: list[list[int]]
    accepted: list[int] = ()
    overlap: list[list[float]] = ()
    has_match: list[bool] = (True,)


class Inbox:
    """Outcomes of steps on their way to the host. On a GPU they are read a few steps late, from pinned copies, so that
    the device never waits for the host."""

    def __init__(self, device: torch.device, timeout_s: float | None = None):
        self.on_gpu, self.timeout_s = device.type == "cuda", timeout_s
        self.lag = HOST_LAG if self.on_gpu else 0
        self.waiting: deque[tuple[list[Tensor], object, object]] = deque()

    def send(self, outcome: Sequence[Tensor], note: object = None) -> None:
        if not self.on_gpu:
            self.waiting.append(([tensor.clone() for tensor in outcome], None, note))
            return
        copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in outcome]
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(outcome[0].device))
        self.waiting.append((copies, event, note))

    def receive(self) -> tuple[Outcome, object]:
        copies, event, note = self.waiting.popleft()
        if event is not None and self.timeout_s is None:
            event.synchronize()
        elif event is not None:  # a replayed graph waits for other ranks without end
            wait_for(event, self.timeout_s)
        return Outcome(*[copy.tolist() for copy in copies]), note


def wait_for(event, timeout_s: float) -> None:
    """Until the device has passed the event. DistError after `timeout_s`."""
    end = time.monotonic() + timeout_s
    while not event.query():
        if time.monotonic() > end:
            raise torch.distributed.DistError(f"nothing came in {timeout_s} s")


@torch.inference_mode()
def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    *,
    sampling: Sampling,
    max_new_tokens: int | Sequence[int],
    stop_ids: Iterable[int] = (),
    seed: int | Sequence[int] = 0,
    max_seq_length: int | None = None,
    drafter=None,
    speculate_k: int | str = DEFAULT_K,
    engine: Engine | None = None,
    timing: Timing | None = None,
    cached: int = 0,
    ended: set[int] | None = None,
) -> Iterator[tuple[int, int]]:
    """Decode a batch of independent prompts; yields (row, token id) as tokens are decided.

    Row i gets what its prompt alone would get with this seed (one number, or one a row). A row ends after a stop id
    (which is yielded), after max_new_tokens (one number, or one a row), or when the consumer adds it to `ended`. Of
    every prompt, the first `cached` tokens are known to stand in the engine's caches already, from an earlier call.

    A model that is divided over ranks is decoded by all of them together: each calls this with the same arguments, and
    each yields the same tokens.

    With a `drafter` (speculative.py), rounds of speculate_k drafted tokens keep the law of every row: greedy output is
    the same, sampled output is distributed the same. An `engine` brings its own.

    Raises ValueError before anything runs when a prompt is empty or holds an id outside the
    vocabulary, or when prompt and new tokens exceed max_seq_length (default: the engine's, or the model's context) or
    the drafter's context; and while running when the model's logits are not finite. Without an `engine`, an eager one
    is made for this call.
    """
    assert engine is None or drafter is None, "the engine was made with its own drafter"
    if max_seq_length is None:
        max_seq_length = engine.max_seq_length if engine else model.config.max_seq_length
    budgets = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    check_lengths(model, prompts, budgets, max_seq_length)
    check_draft_length(engine.drafter if engine else drafter, prompts, budgets)
    assert 0 <= cached < min(map(len, prompts)), f"{cached} cached tokens leave no token of some prompt to run"
    timing, ended = Timing() if timing is None else timing, set() if ended is None else ended
    longest = max(len(prompt) + n for prompt, n in zip(prompts, budgets))
    with attached(engine, model, len(prompts), longest, drafter, speculate_k) as engine:
        yield from _decode(engine, prompts, budgets, sampling, frozenset(stop_ids), seed, cached, timing, ended)


@contextlib.contextmanager
def attached(
    engine: Engine | None, model: Transformer, rows: int, length: int, drafter, speculate_k: int | str
) -> Iterator[Engine]:
    """The caller's engine with its caches in the model; or an eager one that fits, whose caches are gone afterwards."""
    if engine is not None:
        engine.attach()
        yield engine
        return
    try:
        yield Engine(model, rows, length, drafter=drafter, speculate_k=speculate_k)
    finally:
        model.use_caches(None)


def _decode(
    engine: Engine, prompts, budgets: list[int], sampling: Sampling, stop_ids: frozenset[int], seed, cached: int,
    timing: Timing, ended: set[int],
) -> Iterator[tuple[int, int]]:  # fmt: skip
    """The loop of `generate`: launch steps and rounds, read what they decided, a few late on a GPU, and yield it."""
    state, inbox, step_bytes = engine.state, Inbox(engine.device, engine.ranks.timeout_s), reads(engine)
    draft_length = DraftLength(engine.speculate_k, engine.costs)
    lengths, alive = [len(prompt) for prompt in prompts], [True] * len(prompts)
    timing.decoded, timing.row_s = [0] * len(prompts), [0.0] * len(prompts)
    timing.rows = [RowStatistics() for _ in prompts] if engine.drafter is not None else []
    launched, unread, propose = 0, 1, True  # steps begun; tokens a row may have got unread; is there a draft to be had

    def decided() -> list[int]:
        return [n + done for n, done, going in zip(lengths, timing.decoded, alive) if going]

    start = time.perf_counter()
    state.start(prompts, budgets, stop_ids, seed, sampling)
    inbox.send(engine.decide_first(prefill(engine, lengths, cached)), Launch(0))
    while any(alive):
        while launched < max(budgets) - 1 and len(inbox.waiting) <= inbox.lag:
            k = draft_length.choose() if propose else 0
            filled = min(max(decided()) + unread, engine.max_seq_length)
            launched, unread = launched + 1, unread + k + 1
            inbox.send(*engine.step(filled, k))
        outcome, launch = inbox.receive()
        now = time.perf_counter()
        if launch.times:
            timing.add_step(now - start, step_bytes(decided(), launch.k), launch)
        else:
            timing.prompt_tokens, timing.prefill_s = sum(lengths) - cached * len(prompts), now - start
        start, unread, propose = now, unread - launch.k - 1, any(outcome.has_match)
        for row, ids in enumerate(outcome.tokens[: len(prompts)]):
            for index, id in enumerate(ids):
                if id == FROZEN or not alive[row]:
                    break
                if id == INVALID:
                    engine.clear()
                    where = f"row {row}, position {lengths[row] + timing.decoded[row]}"
                    raise ValueError(f"{where}: the model's logits are not finite")
                timing.add_token(row)
                if timing.rows:
                    count(timing.rows[row], draft_length, outcome, launch, row, index)
                alive[row] = id not in stop_ids and timing.decoded[row] < budgets[row]
                yield row, id
                if row in ended and alive[row]:
                    alive[row] = False
                    state.done[row] = True
        if not inbox.lag:
            start = time.perf_counter()  # nothing ran while the consumer had the token


def count(
    statistics: RowStatistics, draft_length: DraftLength, outcome: Outcome, launch: Launch, row: int, index: int
) -> None:
    """Token `index` of a step's outcome for a row has become part of its output."""
    n = outcome.accepted[row]
    k = launch.k if n >= 0 else 0  # a row for which nothing was drafted
    overlap = outcome.overlap[row][index] if index < k else 0.0
    statistics.count(index, k, n, overlap, first=not launch.times)
    if index < k:
        draft_length.observe(overlap)


def prefill(engine: Engine, lengths: list[int], cached: int = 0) -> Tensor:
    """Run the prompts in the engine's state, from position `cached` on, through its models; logits (B, V) after each
    row's last token."""
    target, *others = engine.seats
    last = run_prompts(engine, target, lengths, cached)
    for seat in others:  # a draft's cache may be behind: by the last round's last token, and by plain steps since
        run_prompts(engine, seat, lengths, max(0, cached - 1 - engine.missed))
    engine.missed = 0
    with only_top([target.model], engine.state.kind == GREEDY):
        return target.model.head(last)


def run_prompts(engine: Engine, seat: Seat, lengths: list[int], cached: int) -> Tensor:
    """One model's hidden states (B, D) at each row's last token, computed in chunks.

    Rows are padded on the right, to one of a few lengths. Padding writes keys and values beyond its row's end, where
    decoding overwrites each position before any query may see it. Compiled code takes all rows, and never one position
    alone, which torch would compile apart.
    """
    model, B, longest = seat.model, engine.state.pos.size(0), max(lengths)
    rows = B if engine.compile else len(lengths)
    last = torch.zeros(B, model.config.dim, dtype=model.norm.weight.dtype, device=engine.device)  # (B, D)
    for begin in range(cached, longest, PREFILL_CHUNK):
        end = min(begin + PREFILL_CHUNK, longest)
        until = min(begin + rounded_up(end - begin), engine.positions)
        h = seat.prompt_chunk(engine.state, rows, begin, until)  # (rows, T, D)
        for row, length in enumerate(lengths):
            if begin < length <= end:
                last[row] = h[row, length - 1 - begin]
    return last


def rounded_up(n: int) -> int:
    """n positions, as one of 32 lengths up to 512, at most 7 or an eighth more: oneDNN keeps the machine code that it
    writes for each shape of a product in bfloat16, 0.8 MB, for more shapes than there are lengths of prompts."""
    step = max(8, (1 << n.bit_length()) // 16)
    return math.ceil(n / step) * step


def check_lengths(model: Transformer, prompts: Sequence[Sequence[int]], budgets: Sequence[int], limit: int) -> None:
    """ValueError unless every prompt and its new tokens fit in `limit` positions; host integers only."""
    if not prompts:
        raise ValueError("no prompt given")
    assert len(prompts) == len(budgets), f"{len(prompts)} prompts, but {len(budgets)} numbers of new tokens"
    for row, (prompt, max_new_tokens) in enumerate(zip(prompts, budgets)):
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens = {max_new_tokens} must be at least 1")
        if not prompt:
            raise ValueError(f"prompt {row} is empty: it has no token, and the model has no BOS to start from")
        check_fits(row, prompt, max_new_tokens, limit, "limit")
        V = model.config.vocab_size
        if not 0 <= min(prompt) <= max(prompt) < V:
            wrong = next(id for id in prompt if not 0 <= id < V)
            raise ValueError(f"prompt {row} holds token id {wrong}, outside the vocabulary of {V}")


def check_draft_length(drafter, prompts: Sequence[Sequence[int]], budgets: Sequence[int]) -> None:
    """ValueError unless every prompt and its new tokens fit in the drafter's own context."""
    if not isinstance(drafter, Drafter) or not drafter.owns_cache:
        return
    limit = drafter.model.config.max_seq_length
    for row, (prompt, n) in enumerate(zip(prompts, budgets)):
        check_fits(row, prompt, n, limit, "draft model's context")


def check_fits(row: int, prompt: Sequence[int], new: int, limit: int, name: str) -> None:
    if len(prompt) + new > limit:
        raise ValueError(
            f"prompt {row} has {len(prompt)} tokens; with {new} new ones that is {len(prompt) + new}, over the {name}"
            f" of {limit} positions: shorten the prompt, or lower --max_new_tokens"
        )


# -------------------------------------------------------------------------------------------- accounting


def reads(engine: Engine) -> Callable[[list[int], int], int]:
    """(positions decided per row, K) -> bytes that a plain step or a round reads, by target and draft model."""
    (weights, per_position), *draft = [(weight_bytes(model), position_bytes(model)) for model in engine.models]

    def step_bytes(decided: list[int], k: int) -> int:
        read = weights + sum(attended_bytes(per_position, n + k) for n in decided)
        for own, per in draft:
            read += k * own + sum(attended_bytes(per, n + i) for n in decided for i in range(k))
        return read

    return step_bytes


def weight_bytes(model: Transformer) -> int:
    """Bytes of weights that one decode step reads: all but the embedding table, of which it takes a few rows. A tied
    head is that table, read in full as the head."""
    table = getattr(model.embed, "weight", None)
    once = table is None or table is getattr(model.lm_head, "weight", None)
    stored = sum(parameter.nbytes for parameter in model.parameters()) - (0 if once else table.nbytes)
    return stored + sum(linear.expanded_bytes for linear in quantized_linears(model))


def position_bytes(model: Transformer) -> Counter:
    """Bytes of keys and values that one position takes in all layers with the same window: {window or None: bytes}."""
    found = Counter()
    for layer, window in zip(model.layers, model.windows, strict=True):
        k = layer.attention.cache.k
        found[window] += 2 * k.size(1) * k.size(3) * k.element_size()
    return found


def attended_bytes(per_position: Counter, length: int) -> int:
    """Bytes of keys and values that one query attends to when `length` positions are filled, windows respected."""
    return sum(min(length, window or length) * size for window, size in per_position.items())


def peak_memory_gb(device: torch.device) -> float:
    """Peak of the device's allocations, or of the process's resident memory on a CPU, in 1e9 bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9


def rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0


# ---------------------------------------------------------------------------------------- command line


class Request(NamedTuple):
    """A prompt: a text, or the messages of a conversation, of which `text` is the last. Its results carry its `id`."""

    text: str
    messages: list[dict[str, str]] | None = None
    id: object = None

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        if self.messages is None:
            return tokenizer.encode(self.text)
        return conversation_ids(tokenizer, self.messages)


def requests(args: argparse.Namespace) -> tuple[list[Request], list[str]]:
    """(prompts, what is wrong with lines that hold none): --prompt, or the lines of --prompt_file ('-' is stdin), plain
    text, or JSONL objects when the first line is one. Empty lines are skipped."""
    if args.prompt_file is None:
        if not args.prompt:
            raise ValueError("--prompt is empty: give it at least one character")
        return [Request(args.prompt)], []
    name = "stdin" if args.prompt_file == "-" else args.prompt_file
    try:
        text = sys.stdin.read() if args.prompt_file == "-" else Path(args.prompt_file).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{name}: {error}") from None
    lines = [(number, line) for number, line in enumerate(re.split("\r?\n", text), 1) if line.strip()]
    if not lines:
        raise ValueError(f"{name}: holds no prompt")
    if not lines[0][1].lstrip().startswith("{"):
        return [Request(line) for _, line in lines], []
    found = [(number, _jsonl_request(line)) for number, line in lines]
    wanted = 'expected a JSON object with a string "prompt", or with "messages", a list of {"role", "content"}'
    wrong = [f"{name}, line {number}: {wanted}" for number, request in found if request is None]
    return [request for _, request in found if request is not None], wrong


def _jsonl_request(line: str) -> Request | None:
    """{"prompt": TEXT} or {"messages": [{"role":, "content":}, …]}, with or without "id"; None for anything else."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or ("prompt" in found) == ("messages" in found):
        return None
    messages = found.get("messages")
    if messages is None:
        text = found.get("prompt")
        return Request(text, None, found.get("id")) if isinstance(text, str) and text else None
    if not isinstance(messages, list) or not messages:
        return None
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            return None
    return Request(messages[-1]["content"], messages, found.get("id"))


class NumberTokenizer(Tokenizer):
    """For --random_weights, where no folder brings a tokenizer: a prompt is its bytes, text is the ids as numbers."""

    def __init__(self, vocab_size: int):
        super().__init__(
            lambda text: [byte % vocab_size for byte in text.encode()], lambda id: f" {id}".encode(),
            vocab_size=vocab_size, bos_id=None, add_bos=False, stop_ids=(), strip_first_space=True,
        )  # fmt: skip


COLOURS = {ACCEPTED: "\033[34m", CORRECTED: "\033[31m"}  # blue: drafted and accepted; red: in a rejected one's place


class Printer:
    """One batch's ids as they come: text on stdout, or JSON lines at the end. Only one row can stream; the rows of a
    batch are printed whole, in order, each under its prompt. `coloured`: text by the origin of its tokens."""

    def __init__(
        self, tokenizer: Tokenizer, texts: list[str], stop_ids: frozenset[int], stops=(), as_json: bool = False,
        coloured: bool = False,
    ):  # fmt: skip
        self.coloured = coloured
        self.texts, self.stop_ids, self.as_json = texts, stop_ids, as_json
        self.stops = [StopStrings(stops) for _ in texts]
        self.ended: set[int] = set()  # rows whose text has met a stop string
        self.ids: list[list[int]] = [[] for _ in texts]
        self.pieces: list[list[str]] = [[] for _ in texts]
        self.shown: list[list[str]] = [[] for _ in texts]  # the same with colours
        self.streams = [tokenizer.stream(continues=True) for _ in texts]
        self.streaming = len(texts) == 1 and not as_json
        if self.streaming and texts[0]:
            # On a terminal the answer continues the prompt's line; in a log each has its own.
            print(texts[0], end="" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)

    def feed(self, row: int, id: int, origin: int = PLAIN_TOKEN) -> None:
        self.ids[row].append(id)
        if id not in self.stop_ids:
            self._text(row, self.stops[row].feed(self.streams[row].feed(id)), origin)
            if self.stops[row].stopped:
                self.ended.add(row)

    def _text(self, row: int, text: str, origin: int = PLAIN_TOKEN) -> None:
        self.pieces[row].append(text)
        colour = COLOURS.get(origin) if self.coloured and text else None
        self.shown[row].append(f"{colour}{text}\033[0m" if colour else text)
        if self.streaming and text:
            print(self.shown[row][-1], end="", flush=True)

    def close(self) -> None:
        """Release held-back bytes and end the line."""
        for row, stream in enumerate(self.streams):
            self._text(row, self.stops[row].feed(stream.flush()) + self.stops[row].flush())
        if self.streaming:
            print(end="\n" if self.ids[0] else "", flush=True)
        elif not self.as_json and any(self.ids):
            for text, pieces in zip(self.texts, self.shown, strict=True):
                print(text, end="", file=sys.stderr, flush=True)
                print("".join(pieces), flush=True)

    def rows(self, prompts: list[list[int]], timing: Timing, engine: Engine) -> list[dict]:
        """The JSON objects of DESIGN's contract, one per row."""
        return [
            {
                "prompt_tokens": prompt,
                "tokens": ids,
                "text": "".join(pieces),
                "finish_reason": "stop" if row in self.ended or (ids and ids[-1] in self.stop_ids) else "length",
                "ttft_s": timing.prefill_s,
                "prefill_tok_s": rate(timing.prompt_tokens, timing.prefill_s),
                "decode_tok_s": rate(len(ids) - 1, timing.row_s[row]),
                "bandwidth_gb_s": rate(timing.bytes_read, timing.decode_s) / 1e9,
                "peak_memory_gb": peak_memory_gb(engine.device),
                "speculative": speculative(engine, timing, row),
            }
            for row, (prompt, ids, pieces) in enumerate(zip(prompts, self.ids, self.pieces, strict=True))
        ]


def speculative(engine: Engine, timing: Timing, row: int | None = None) -> dict | None:
    """What speculation did for one row, or for all rows of a batch together; None without a drafter. Its draft_s and
    verify_s are the whole batch's: rows share every step."""
    if engine.drafter is None:
        return None
    counted = timing.rows[row] if row is not None else sum(timing.rows, RowStatistics())
    drafted = engine.drafter.model
    c_ops = multiplications(drafted) / multiplications(engine.model) if drafted else 0.0
    seconds = timing.decode_s if row is None else timing.row_s[row]
    return speculation(counted, engine.speculate_k, engine.costs, seconds, timing.draft_s, timing.verify_s, c_ops)


def multiplications(model: Transformer) -> int:
    """Of one token with the model's matrices: all but the embedding."""
    linears = [module for module in model.modules() if hasattr(module, "in_features")]
    return sum(linear.in_features * linear.out_features for linear in linears)


def report(timings: list[Timing], engine: Engine) -> None:
    """Rates on stderr: medians over batches, with min and max where there are several; then what speculation did."""

    def spread(values: list[float]) -> str:
        text = f"{statistics.median(values):.1f}"
        return text if len(values) == 1 else f"{text} ({min(values):.1f}–{max(values):.1f})"

    ttft = [1e3 * timing.prefill_s for timing in timings]
    prefill_rate = [rate(timing.prompt_tokens, timing.prefill_s) for timing in timings]
    print(f"prefill {spread(prefill_rate)} tok/s, first token after {spread(ttft)} ms", file=sys.stderr)
    stepped = [timing for timing in timings if timing.steps]
    if stepped:
        tokens = [rate(sum(timing.decoded) - len(timing.decoded), timing.decode_s) for timing in stepped]
        bandwidth = [rate(timing.bytes_read, timing.decode_s) / 1e9 for timing in stepped]
        each = " by each rank" if engine.ranks.world > 1 else ""
        print(f"decode {spread(tokens)} tok/s, {spread(bandwidth)} GB/s read{each}", file=sys.stderr)
    if stepped and engine.drafter is not None:
        for line in summary(speculative(engine, together(stepped))):
            print(line, file=sys.stderr)
    print(f"peak memory {peak_memory_gb(engine.device):.2f} GB", file=sys.stderr)


def new_tokens(asked: int | None, prompt: list[int], limit: int) -> int:
    """An explicit number stands (and is checked later); otherwise as many as fit, at most DEFAULT_NEW_TOKENS."""
    return asked if asked is not None else max(1, min(DEFAULT_NEW_TOKENS, limit - len(prompt)))


@dataclass
class Session:
    """What one run of the program keeps: the engine, and how to decode with it."""

    engine: Engine
    tokenizer: Tokenizer
    sampling: Sampling
    stop_ids: frozenset[int]
    coloured: bool = False

    def decode(self, printer: Printer, prompts, budgets: list[int], seed: int, cached: int = 0) -> Timing:
        """One batch, printed as it goes; an interrupted one keeps what it printed."""
        timing = Timing()
        try:
            for row, id in generate(
                self.engine.model, prompts, sampling=self.sampling, stop_ids=self.stop_ids, seed=seed,
                max_new_tokens=budgets, engine=self.engine, timing=timing, cached=cached, ended=printer.ended,
            ):  # fmt: skip
                printer.feed(row, id, timing.rows[row].origins[-1] if timing.rows else PLAIN_TOKEN)
        finally:
            printer.close()
        return timing


def run(args: argparse.Namespace) -> None:
    """Load, decode every batch of every sample, print; exit status 2 if lines of the prompt file were broken."""
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.min_p)
    check_options(args)
    k = speculate_k(args)
    device = pick_device(local_device(args.device))
    ranks = join(device, args.timeout, args.one_shot)
    torch.set_num_threads(args.threads or min(torch.get_num_threads(), cpu_share()))
    with speaking(ranks.rank == 0):
        ranks.check_same(lambda: settings(args))
        serve(args, ranks, device, sampling, k)


def settings(args: argparse.Namespace) -> dict[str, object]:
    """What all ranks must have been told alike; folders and files may lie elsewhere on another machine."""
    files = ("checkpoint", "draft_checkpoint", "random_weights", "prompt_file", "profile")
    given = {f"--{name}": value is None if name in files else value for name, value in vars(args).items()}
    shape = Path(args.random_weights).read_bytes() if args.random_weights else None
    return {"its torch": torch.__version__, "the file of --random_weights": shape, **given}


@contextlib.contextmanager
def speaking(allowed: bool) -> Iterator[None]:
    """Unless allowed, nothing that is printed within is seen."""
    if allowed:
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield


def serve(args: argparse.Namespace, ranks: Ranks, device: torch.device, sampling: Sampling, k: int | str) -> None:
    """Load, decode, print."""
    asked, broken = ranks.tell(requests(args) if ranks.rank == 0 and not args.interactive else ([], []))
    for message in broken:
        one_line_error(message)
    if broken and not asked:
        sys.exit(2)
    model, tokenizer = load(args, device, ranks)
    drafter = load_drafter(args, model, tokenizer, args.draft_tp == "sharded")
    limit = model.config.max_seq_length if args.max_seq_length is None else args.max_seq_length
    if not 1 <= limit <= model.config.max_seq_length:
        raise ValueError(f"--max_seq_length {limit} must lie between 1 and the model's {model.config.max_seq_length}")
    if drafter is not None and drafter.owns_cache and (args.interactive or args.max_new_tokens is None):
        limit = min(limit, drafter.model.config.max_seq_length)
    encoded = ranks.tell([request.encode(tokenizer) for request in asked])
    budgets = [new_tokens(args.max_new_tokens, prompt, limit) for prompt in encoded]
    if args.interactive:
        length = min(limit, CHAT_LENGTH)
    else:
        check_lengths(model, encoded, budgets, limit)
        check_draft_length(drafter, encoded, budgets)
        length = max(len(prompt) + n for prompt, n in zip(encoded, budgets))
    rows, positions = min(args.batch_size, len(asked) or 1), limit if args.max_seq_length else length
    if args.one_shot and not compiles(args.compile, device):
        raise ValueError("--one_shot is for compiled steps; leave --no-compile away")
    engine = Engine(model, rows, positions, compile=compiles(args.compile, device), drafter=drafter, speculate_k=k)
    warm_up(engine, sampling, filled=length // 2)
    stop_ids = ranks.tell(frozenset() if args.ignore_eos else tokenizer.stop_ids)
    session = Session(engine, tokenizer, sampling, stop_ids, args.show_drafts and sys.stdout.isatty())
    with profiled(args.profile if ranks.rank == 0 else None, device):
        chat(session, args) if args.interactive else decode_all(session, args, asked, encoded, budgets)
    if broken:
        sys.exit(2)


def check_options(args: argparse.Namespace) -> None:
    """ValueError for what would only fail later, or would be ignored without a word."""
    StopStrings(args.stop)
    if not 0 <= args.seed < 2**62:
        raise ValueError(f"--seed {args.seed} must lie between 0 and 2^62")
    if args.system and not args.interactive:
        raise ValueError("--system needs --interactive")
    if args.interactive and (args.json or args.num_samples > 1 or args.batch_size > 1):
        raise ValueError("--interactive is one conversation in text: not with --json, --num_samples or --batch_size")
    for scheme in (args.quantize, args.quantize_head, args.draft_quantize):
        if scheme is not None:
            format_of(scheme)
    if args.quantize_head and not args.quantize:
        raise ValueError("--quantize_head needs --quantize")
    if args.draft_quantize and not args.draft_checkpoint:
        raise ValueError("--draft_quantize needs --draft_checkpoint")
    if args.draft_tp == "sharded" and not args.draft_checkpoint:
        raise ValueError("--draft_tp needs --draft_checkpoint: other drafts are divided as the target is")
    if not 0 < args.timeout < 1e6:
        raise ValueError(f"--timeout {args.timeout} must be a positive number of seconds")
    if not (args.draft or args.draft_checkpoint) and (args.show_drafts or args.speculate_k is not None):
        raise ValueError("--speculate_k and --show_drafts need --draft_checkpoint or --draft")
    if args.profile and not os.access(Path(args.profile).resolve().parent, os.W_OK):
        raise ValueError(f"--profile {args.profile}: its folder does not exist or cannot be written to")


def speculate_k(args: argparse.Namespace) -> int | str:
    """--speculate_k: a number of tokens, or auto."""
    text = str(DEFAULT_K) if args.speculate_k is None else args.speculate_k
    if text != "auto" and not text.isdigit():
        raise ValueError(f"--speculate_k {text} must be a number of tokens from 0 on, or auto")
    return text if text == "auto" else int(text)


def load_drafter(
    args: argparse.Namespace, model: Transformer, tokenizer: Tokenizer, sharded: bool = False
) -> Drafter | None:
    """What --draft_checkpoint or --draft asks for; a checkpoint divided over the target's ranks, or whole on each.
    ValueError where it does not fit the target."""
    device = model.norm.weight.device
    if args.draft_checkpoint:
        folder = args.draft_checkpoint
        dtype = pick_dtype(args.dtype, load_config(folder).dtype, device)
        check_same_tokens(tokenizer, load_tokenizer(folder), folder)
        ranks = ranks_of(model)
        ranks.check_same(lambda: fingerprints(Path(folder), open_shards(shards(Path(folder)))))
        options = {"quantize": args.draft_quantize, "tp": ranks if sharded else None, "progress": True}
        return ModelDraft(pack_linears(load_model(folder, device=device, dtype=dtype, **options)))
    if args.draft is None:
        return None
    kind, _, rest = args.draft.partition(":")
    try:
        if kind == "ngram":
            if rest and not rest.isdigit():
                raise ValueError(f"{rest!r} is no number of tokens to match")
            return NgramDraft(int(rest)) if rest else NgramDraft()
        if kind == "layers":
            kept = parse_layers(rest)
            return ModelDraft(layer_subset(model, kept), on_layers=kept)
        if kind == "quantized":
            return ModelDraft(quantized_copy(model, rest), on_layers=range(model.config.n_layers))
    except ValueError as error:
        raise ValueError(f"--draft {args.draft}: {error}") from None
    raise ValueError(f"--draft {args.draft}: expected ngram, ngram:N, layers:0-7,24-31 or quantized:SCHEME")


def check_same_tokens(tokenizer: Tokenizer, other: Tokenizer, folder: str) -> None:
    """ValueError unless both read every id as the same string. Models may still have padded vocabularies."""
    pairs = itertools.zip_longest(tokenizer.pieces(), other.pieces())
    for id, (a, b) in enumerate(pairs):
        if a != b:
            shown = [repr(piece.decode(errors="replace")) if piece is not None else "no token" for piece in (a, b)]
            raise ValueError(
                f"{folder}: its tokenizer differs from the target's: token {id} is {shown[1]}, the target's {shown[0]};"
                " a draft model must have the same tokenizer"
            )


def warm_up(engine: Engine, sampling: Sampling, filled: int) -> None:
    """Compile, where asked for; with a drafter, measure what steps cost when so many positions are filled."""
    if engine.compile:
        seconds = engine.warm_up(sampling.kind)
        rows = engine.state.pos.size(0)
        print(f"compiled the {sampling.kind} step for batch {rows} in {seconds:.1f} s", file=sys.stderr)
    if engine.drafter is not None:
        engine.calibrate(sampling, filled)


def decode_all(session: Session, args: argparse.Namespace, asked: list[Request], encoded, budgets: list[int]) -> None:
    """Every batch of every sample, then the rates."""
    timings, size = [], args.batch_size
    for seed in range(args.seed, args.seed + args.num_samples):
        for begin in range(0, len(asked), size):
            prompts = encoded[begin : begin + size]
            here = asked[begin : begin + size]
            texts, coloured = [request.text for request in here], session.coloured and not args.json
            printer = Printer(session.tokenizer, texts, session.stop_ids, args.stop, args.json, coloured)
            timings.append(session.decode(printer, prompts, budgets[begin : begin + size], seed))
            if args.json:
                for request, row in zip(here, printer.rows(prompts, timings[-1], session.engine)):
                    carried = {} if request.id is None else {"id": request.id}
                    print(json.dumps(carried | row), flush=True)
    report(timings, session.engine)


def chat(session: Session, args: argparse.Namespace) -> None:
    """Turns from stdin until it ends. What the caches hold of the conversation is not computed again, as far as the ids
    agree: templates rewrite history. Ctrl-C ends an answer, not the program."""
    tokenizer, limit, ranks = session.tokenizer, session.engine.max_seq_length, session.engine.ranks
    if tokenizer.template is None:
        print("this folder has no chat template: chatting as plain text", file=sys.stderr)
    opening = [{"role": "system", "content": args.system}] if args.system else []
    messages, cached = list(opening), []  # ids that the caches hold, one per position
    print(f"context of {limit} positions; /reset starts anew, an empty line or end of file ends", file=sys.stderr)
    for turn in itertools.count():
        print("> ", end="", file=sys.stderr, flush=True)
        text = ranks.tell(sys.stdin.readline().rstrip("\n") if ranks.rank == 0 else "")
        if not text:
            return
        if text == "/reset":
            messages = list(opening)
            continue
        prompt = ranks.tell(conversation_ids(tokenizer, [*messages, {"role": "user", "content": text}]))
        if len(prompt) + (args.max_new_tokens or 1) > limit:
            needed = f"{len(prompt)} tokens and {args.max_new_tokens or 1} new ones"
            print(f"the context is full: {needed} do not fit in {limit} positions; /reset starts anew", file=sys.stderr)
            continue
        known = common_prefix(prompt[:-1], cached)
        printer = Printer(tokenizer, [""], session.stop_ids, args.stop, coloured=session.coloured)
        try:
            budget = new_tokens(args.max_new_tokens, prompt, limit)
            timing = session.decode(printer, [prompt], [budget], args.seed + turn, known)
            rates = f"{rate(timing.decoded[0] - 1, timing.decode_s):.1f} tok/s"
            if timing.rows:
                rates += f", {rate(timing.rows[0].tokens, timing.steps):.2f} tokens a round"
            print(f"[{timing.prompt_tokens} tokens read, {known} kept, {rates}]", file=sys.stderr)
        except KeyboardInterrupt:
            if ranks.world > 1:  # each was interrupted somewhere else, and torchrun ends them all
                raise
            print("[interrupted]", file=sys.stderr)
        answer = "".join(printer.pieces[0])
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
        cached = (prompt + printer.ids[0])[:-1] if printer.ids[0] else []  # the last id has not been fed


def conversation_ids(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> list[int]:
    """In the folder's chat format; without one, the messages' texts, a line each."""
    if tokenizer.template is not None:
        return tokenizer.chat(messages)
    return tokenizer.encode("\n".join(message["content"] for message in messages))


def common_prefix(a: list[int], b: list[int]) -> int:
    """How many leading ids agree."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


@contextlib.contextmanager
def profiled(file: str | None, device: torch.device) -> Iterator[None]:
    """Write a Chrome trace of what runs inside to `file`, if there is one."""
    if file is None:
        yield
        return
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities) as trace:
        yield
    write_whole(Path(file), lambda partial: trace.export_chrome_trace(str(partial)))


def load(args: argparse.Namespace, device: torch.device, ranks: Ranks) -> tuple[Transformer, Tokenizer]:
    """The model, or this rank's part of it, and the tokenizer of --checkpoint; or random weights of the shape in
    --random_weights."""
    options = {"device": device, "quantize": args.quantize, "head": args.quantize_head, "tp": ranks}
    if args.random_weights:
        config = config_of(Path(args.random_weights))
        model = random_model(config, dtype=pick_dtype(args.dtype, config.dtype, device), **options)
        return pack_linears(model), NumberTokenizer(config.vocab_size)
    dtype = pick_dtype(args.dtype, load_config(args.checkpoint).dtype, device)
    tokenizer = load_tokenizer(args.checkpoint)
    ranks.check_same(lambda: {"its tokenizer": hashlib.sha256(b"\0".join(tokenizer.pieces())).hexdigest()})
    model = pack_linears(load_model(args.checkpoint, dtype=dtype, progress=True, **options))
    if tokenizer.vocab_size > model.config.vocab_size:
        raise ValueError(
            f"{args.checkpoint}: the tokenizer has {tokenizer.vocab_size} tokens, the model's vocabulary only"
            f" {model.config.vocab_size}"
        )
    return model, tokenizer


def pick_device(name: str | None) -> torch.device:
    """--device, or a GPU when there is one. ValueError when it cannot be used here."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"--device {name}: not available here: {str(error).splitlines()[0]}") from None
    if device.type not in ("cpu", "cuda", "mps"):
        raise ValueError(f"--device {name}: only cpu, cuda and mps compute")
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
    return device


def cpu_share(file: str = "/sys/fs/cgroup/cpu.max") -> int:
    """Processors that this process may keep busy: those it may run on, or fewer where a container's quota (control
    groups, version 2, on Linux) says so. Threads beyond a quota all wait together once it is used up."""
    try:
        quota, period = Path(file).read_text().split()
        share = math.ceil(int(quota) / int(period))
    except (OSError, ValueError):  # another system, or "max": no quota
        share = os.cpu_count() or 1
    return max(1, min(share, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else share))


def compiles(asked: bool | None, device: torch.device) -> bool:
    """--compile or --no-compile, or by device: on a GPU launching kernels one by one costs more than they do."""
    return device.type == "cuda" if asked is None else asked


def pick_dtype(asked: str | None, stored: str | None, device: torch.device) -> torch.dtype:
    """--dtype, or the checkpoint's own where it is one that we compute in, else bfloat16. ValueError where the device
    cannot multiply in it."""
    name = asked or (stored if stored in ("bfloat16", "float16", "float32") else "bfloat16")
    dtype = getattr(torch, name)
    try:
        torch.mm(*torch.ones(2, 1, 1, dtype=dtype, device=device))
    except (RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--dtype {name}: {device} cannot compute in it ({reason}); try --dtype float32") from None
    return dtype


def check_torch() -> None:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < OLDEST_TORCH:
        raise ValueError(f"torch {torch.__version__} is too old: quickdraft is tested on 2.11 to 2.13")


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        fail(message)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        description="Decode text with a Llama-architecture model from a Hugging Face folder. Text streams to stdout,"
        " everything else to stderr.",
        epilog="On several devices: torchrun --nproc_per_node=N generate.py …",
    )
    add = parser.add_argument_group("model").add_argument
    add("--checkpoint", default=str(Path(__file__).parent / "checkpoints" / "demo"), metavar="DIR",
        help="a Hugging Face folder; default: checkpoints/demo")  # fmt: skip
    add("--random_weights", metavar="CONFIG.json", help="this shape with random weights, instead of --checkpoint")
    add("--quantize", metavar="SCHEME", help=f"weights on the way in: {', '.join(SCHEMES)}")
    add("--quantize_head", metavar="SCHEME", help="of the head, and of an embedding tied to it; default: as stored")
    add("--dtype", choices=("bfloat16", "float16", "float32"), help="default: the checkpoint's")

    group = parser.add_argument_group("prompt")
    source, add = group.add_mutually_exclusive_group(), group.add_argument
    source.add_argument("--prompt", metavar="TEXT", default="Once upon a time", help='default: "%(default)s"')
    jsonl = 'one a line, or JSONL objects with "prompt" or "messages", and "id"; - for stdin'
    source.add_argument("--prompt_file", metavar="FILE", help=jsonl)
    source.add_argument("--interactive", action="store_true", help="chat, in the folder's own format if it has one")
    add("--system", metavar="TEXT", help="system message for --interactive")
    add("--batch_size", type=positive, default=1, metavar="N", help="prompts decoded together; default: 1")
    add("--num_samples", type=positive, default=1, metavar="N", help="runs of every prompt, seeds seed, seed + 1, …")

    add = parser.add_argument_group("what is drawn").add_argument
    add("--temperature", type=float, default=0.8, metavar="T", help="0: the most likely token; default: 0.8")
    add("--top_k", type=int, metavar="N", help="keep the N most likely tokens")
    add("--top_p", type=float, metavar="P", help="keep the most likely tokens that together reach this mass")
    add("--min_p", type=float, metavar="P", help="keep tokens at least this likely relative to the most likely one")
    add("--seed", type=int, default=0, metavar="N", help="default: 0")

    add = parser.add_argument_group("when it ends").add_argument
    add("--max_new_tokens", type=int, metavar="N", help=f"default: {DEFAULT_NEW_TOKENS}, or to the context's end")
    add("--max_seq_length", type=int, metavar="N", help="positions for prompt and new tokens; default: the context")
    add("--stop", nargs="+", action="extend", default=[], metavar="TEXT", help="end before any of these strings")
    add("--ignore_eos", action="store_true", help="do not end at the model's stop tokens")

    group = parser.add_argument_group("drafting")
    draft, add = group.add_mutually_exclusive_group(), group.add_argument
    draft.add_argument("--draft_checkpoint", metavar="DIR", help="a smaller model with the same tokenizer drafts")
    draft.add_argument("--draft", metavar="SPEC", help="ngram[:N], layers:0-7,24-31 or quantized:SCHEME")
    add("--speculate_k", metavar="N|auto", help=f"tokens drafted a round; auto: what pays best; default: {DEFAULT_K}")
    add("--draft_quantize", metavar="SCHEME", help="weights of --draft_checkpoint")
    add("--show_drafts", action="store_true", help="colour accepted draft tokens blue and corrected ones red")

    add = parser.add_argument_group("where it runs").add_argument
    add("--device", help="cpu, cuda, cuda:N or mps; default: cuda when there is one")
    add("--threads", type=positive, metavar="N", help="of a CPU; default: torch's, within what this process may use")
    add("--compile", action=argparse.BooleanOptionalAction, help="compile the decode step; default: on cuda")

    add = parser.add_argument_group("under torchrun").add_argument
    add("--draft_tp", nargs="?", const="sharded", choices=("sharded", "replicated"), default="replicated",
        help="divide --draft_checkpoint over the ranks too; default: each holds all of it")  # fmt: skip
    add("--one_shot", action="store_true", help="on GPUs that reach each other's memory: sums by direct reads")
    add("--timeout", type=float, default=600, metavar="S", help="seconds to wait for another rank; default: 600")

    add = parser.add_argument_group("what is reported").add_argument
    add("--json", action="store_true", help="one JSON object per sample and row on stdout, nothing else")
    add("--profile", metavar="FILE", help="a Chrome trace of everything after loading and compiling")
    return parser.parse_args(argv)


def main() -> None:
    try:
        raise_interrupts()
        check_torch()
        run(parse_args())
    except (ValueError, MemoryError, torch.OutOfMemoryError) as error:
        fail(error)
    except KeyboardInterrupt:
        sys.exit(130)
    except RuntimeError as error:
        if lost_contact(error):
            fail(f"lost contact with another rank, whose own error, if it had one, tells why ({error})")
        if "allocate memory" not in str(error):  # what torch raises on a CPU that has no more
            raise
        fail(error)
    except BrokenPipeError:  # the reader of stdout left; nothing more can be printed, not even at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if launched():
            sys.exit(1)  # the other ranks must not wait for this one
    except OSError as error:
        fail(error)
    finally:
        leave()


def raise_interrupts() -> None:
    """Ctrl-C raises KeyboardInterrupt from here on. Before, while torch and others are imported, a program lets it end
    the process, which the system does without a word: imports answer an exception with a traceback, or swallow it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def ending_plainly() -> Iterator[None]:
    """What a script does in here ends well, with one line and exit status 2 for errors that a user can act on, a stdout
    that takes no more being one, or with status 130 at Ctrl-C. SIGTERM ends it at once; what was being written then
    lies under NAME.partial."""
    try:
        raise_interrupts()
        yield
        if sys.stdout is not None:
            sys.stdout.flush()  # an error here is one that can still be said
    except (ValueError, OSError, MemoryError, torch.OutOfMemoryError) as error:
        fail(error)
    except KeyboardInterrupt:
        sys.exit(130)


def fail(error: Exception | str) -> NoReturn:
    """What makes every error of this program one line, and its exit status 2."""
    if isinstance(error, OSError) and sys.stdout is sys.__stdout__:  # perhaps its own, and it is written to at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    rank = let_others_speak()
    one_line_error(f"rank {rank}: {error}" if rank else error)
    sys.exit(2)


def one_line_error(error: Exception | str) -> None:
    tqdm.write(f"error: {' '.join(str(error).split())}", file=sys.stderr)


if __name__ == "__main__":
    main()
