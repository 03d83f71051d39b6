"""Prompt in, streamed text out: `python generate.py --checkpoint DIR --prompt "Once upon a time"`.

    State, decide, decode_step      a batch as fixed tensors, and the step that advances it in place
    Engine, compile_step            steps with their model and caches, eager or compiled, attending to what is filled
    generate, prefill               the loop over a batch of independent prompts; yields ids as they are decided
    Timing                          what a run cost; rates and bytes are computed from it
    requests, Printer, chat, run, main  the command line: prompts in, text or JSON out

`generate` knows token ids and nothing of text; text lives at the edge, in Printer. Sampling is sampling.py's, the
arithmetic model.py's, the weights checkpoint.py's.
"""

import argparse
import contextlib
import functools
import itertools
import json
import os
import re
import resource
import statistics
import sys
import time
import types
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from checkpoint import config_of, load_config, load_model, random_model
from model import Block, Transformer
from sampling import INVALID, Sampling, sample, uniform
from tokenizer import StopStrings, Tokenizer, load_tokenizer

PREFILL_CHUNK = 512  # tokens of a prompt that go through the model at once: bounds what activations take
DEFAULT_NEW_TOKENS = 200
CHAT_LENGTH = 4096  # positions of an interactive session, where --max_seq_length does not say
OLDEST_TORCH = (2, 11)

# ------------------------------------------------------------------------------------------------ state

FROZEN = -2  # stands in `out` for a row that had already finished
STOP_SLOTS = 64


class State(nn.Module):
    """A batch in fixed tensors, which steps read and write in place: replaying a step needs nothing from the host."""

    def __init__(self, B: int, S: int, device: torch.device):
        super().__init__()

        def fixed(name: str, *shape: int, fill=0, dtype=torch.int64) -> None:
            self.register_buffer(name, torch.full(shape, fill, dtype=dtype, device=device))

        fixed("tokens", B, S)  # prompt, then what was decided
        fixed("pos", B)  # index of the last decided token, which no layer has seen yet
        fixed("end", B)  # index at which the row is full
        fixed("done", B, fill=True, dtype=torch.bool)
        fixed("seed", B)
        fixed("out", B, fill=FROZEN)  # what the last step decided, for the host
        fixed("stop_ids", STOP_SLOTS, fill=-1)
        fixed("values", 4, dtype=torch.float32)  # of the sampling

    def start(self, prompts, budgets: Sequence[int], stop_ids: Iterable[int], seed: int, sampling: Sampling) -> None:
        """Fill in a batch; budgets are new tokens per row. Rows beyond the prompts are done from the start."""
        stop_ids = sorted(stop_ids)
        if len(stop_ids) > STOP_SLOTS:
            raise ValueError(f"{len(stop_ids)} stop ids are more than the {STOP_SLOTS} that fit")
        B = self.tokens.size(0)
        lengths = [len(prompt) for prompt in prompts] + [1] * (B - len(prompts))
        self.tokens.zero_()
        for row, prompt in enumerate(prompts):
            self.tokens[row, : len(prompt)] = torch.tensor(prompt)
        self.pos.copy_(torch.tensor(lengths) - 1)
        self.end.copy_(torch.tensor(lengths) - 1 + torch.tensor([*budgets, *[0] * (B - len(prompts))]))
        self.done.copy_(torch.arange(B) >= len(prompts))
        self.seed.fill_(seed)
        self.stop_ids.copy_(torch.tensor(stop_ids + [-1] * (STOP_SLOTS - len(stop_ids))))
        self.values.copy_(sampling.values)


def decide(state: State, logits: Tensor, kind: str) -> None:
    """Draw the next token of every row from logits (B, V) and advance; finished rows stay as they are."""
    position = state.pos + 1
    token = sample(logits, kind, state.values, uniform(state.seed, position))  # (B,)
    state.out.copy_(torch.where(state.done, FROZEN, token))
    here = torch.where(state.done, state.pos, position)[:, None]  # (B, 1)
    token = torch.where(state.done, state.tokens.gather(1, here)[:, 0], token)
    # INVALID is for the host alone: a step that runs before the host knows must not embed it.
    state.tokens.scatter_(1, here, token[:, None].clamp(min=0))
    state.pos.copy_(here[:, 0])
    ended = torch.isin(token, state.stop_ids) | (state.pos >= state.end) | (token == INVALID)
    state.done.logical_or_(ended)


def decode_step(model: Transformer, state: State, kind: str) -> None:
    """One token for every row that is not done. A frozen row rewrites its last position with what stands there."""
    pos = state.pos[:, None]  # (B, 1)
    logits = model(state.tokens.gather(1, pos), pos)  # (B, 1, V)
    decide(state, logits[:, 0], kind)


class Engine:
    """A model with caches, a State and its decode steps, eager or compiled, for up to B rows of up to S positions.

    Keep one for as long as shapes stay the same: what is compiled is compiled once, by `warm_up`.
    """

    def __init__(self, model: Transformer, batch_size: int, max_seq_length: int, *, compile: bool = False):
        # One position of slack: attending to the whole cache would be a special case that compiles once more.
        with torch.inference_mode(False):  # plain tensors, which any later code may write to
            model.setup_caches(batch_size, max_seq_length + 1)
        self.caches = [layer.attention.cache for layer in model.layers]
        self.model, self.compile = model, compile
        self.device = model.embed.weight.device
        self.state = State(batch_size, max_seq_length, self.device)
        self.steps: dict[str, Callable[[], None]] = {}
        self.compiled_prompt = compile_prompt(model) if compile else None

    def attach(self) -> None:
        """Give the model this engine's caches, if another engine's are in place."""
        if self.model.layers[0].attention.cache is not self.caches[0]:
            self.model.use_caches(self.caches)

    def attended(self, length: int) -> int:
        """How far attention runs when `length` positions are filled: that far; under CUDA graphs, which are recorded
        for each length, to the next of a few."""
        S = self.state.tokens.size(1)
        if not (self.compile and self.device.type == "cuda"):
            return min(length, S)
        return min(S, max(256, 1 << (length - 1).bit_length()))

    def step(self, kind: str, length: int) -> None:
        """Run one decode step whose rows have at most `length` positions filled, its own included."""
        if kind not in self.steps:

            def step() -> None:
                decode_step(self.model, self.state, kind)

            self.steps[kind] = compile_step(self.model, step) if self.compile else step
        self.model.attend_to(self.attended(length))
        if self.compile:
            torch._dynamo.mark_dynamic(self.model.key_pos, 0)
        self.steps[kind]()

    def prompt_chunk(self, rows: int, begin: int, end: int) -> Tensor:
        """Run positions begin to end of the prompts in the state; hidden states (rows, end - begin, D)."""
        tokens, pos = self.state.tokens[:rows, begin:end], torch.arange(begin, end, device=self.device)
        self.model.attend_to(end)
        if self.compiled_prompt is None:
            return self.model.hidden(tokens, pos)
        for tensor, dim in ((tokens, 1), (pos, 0), (self.model.key_pos, 0)):
            torch._dynamo.mark_dynamic(tensor, dim)
        return self.compiled_prompt(tokens, pos)

    @torch.inference_mode()
    def warm_up(self, kind: str) -> float:
        """Compile the step for `kind` and run it at every length that will be recorded; compile prompts at the start,
        later on, and beyond a sliding window; seconds. What this writes to the caches, a prefill overwrites."""
        start = time.perf_counter()
        self.state.pos.zero_()
        self.state.done.fill_(True)
        B, S = self.state.tokens.shape
        self.attach()
        for begin in sorted({0, min(1, S - 2), S - 2}):
            self.prompt_chunk(B, begin, begin + 2)
        for length in sorted({self.attended(min(1 << i, S)) for i in range(1, S.bit_length() + 1)}):
            for _ in range(3 if self.device.type == "cuda" else 1):  # CUDA graphs: warm up, record, replay
                self.step(kind, length)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - start


def compile_step(model: Transformer, step: Callable[[], None]) -> Callable[[], None]:
    """A decode step: static shapes but for the attended length, so that one compilation serves every length. On a GPU
    it is replayed as a CUDA graph."""
    return _compile(model, step, mode="reduce-overhead")


def compile_prompt(model: Transformer) -> Callable[[Tensor, Tensor], Tensor]:
    """`model.hidden` for prompts, dynamic in their length (the caller marks it). Not replayed: lengths are too many."""

    def run_prompt(tokens: Tensor, pos: Tensor) -> Tensor:
        return model.hidden(tokens, pos)

    return _compile(model, run_prompt, mode="default")


def _compile(model: Transformer, function: Callable, mode: str) -> Callable:
    """Compile into one graph whose shapes are static but for the dimensions marked otherwise.

    All blocks have the same code, so that one is compiled for all of them. And the function gets a code object of its
    own: torch keeps compiled code by code object, and stops compiling at eight versions of one.
    """
    for block in model.layers:
        if "forward" not in vars(block):
            block.forward = functools.partial(block_region(), block)
    own = types.FunctionType(function.__code__.replace(), function.__globals__, closure=function.__closure__)
    return torch.compile(own, mode=mode, fullgraph=True, dynamic=False)


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
    steps: int = 0
    decoded: list[int] = field(default_factory=list)  # tokens per row, the first one included
    bytes_read: int = 0  # by the decode steps: weights as stored, and the keys and values attended


class Inbox:
    """Results of steps on their way to the host. On a GPU they are read a few steps late, from pinned copies, so that
    the device never waits for the host."""

    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"
        self.lag = HOST_LAG if self.on_gpu else 0
        self.waiting: deque[tuple[Tensor, object]] = deque()

    def send(self, out: Tensor) -> None:
        if not self.on_gpu:
            self.waiting.append((out.clone(), None))
            return
        copy = torch.empty(out.shape, dtype=out.dtype, pin_memory=True).copy_(out, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(out.device))
        self.waiting.append((copy, event))

    def receive(self) -> list[int]:
        copy, event = self.waiting.popleft()
        if event is not None:
            event.synchronize()
        return copy.tolist()


@torch.inference_mode()
def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    *,
    sampling: Sampling,
    max_new_tokens: int | Sequence[int],
    stop_ids: Iterable[int] = (),
    seed: int = 0,
    max_seq_length: int | None = None,
    drafter=None,
    engine: Engine | None = None,
    timing: Timing | None = None,
    cached: int = 0,
    ended: set[int] | None = None,
) -> Iterator[tuple[int, int]]:
    """Decode a batch of independent prompts; yields (row, token id) as tokens are decided.

    Row i gets what its prompt alone would get with this seed. A row ends after a stop id (which is yielded), after
    max_new_tokens (one number, or one a row), or when the consumer adds it to `ended`. Of every prompt, the first
    `cached` tokens are known to stand in the engine's caches already, from an earlier call.

    Raises ValueError before anything runs when a prompt is empty or holds an id outside the
    vocabulary, or when prompt and new tokens exceed max_seq_length (default: the engine's, or the model's context); and
    while running when the model's logits are not finite. Without an `engine`, an eager one is made for this call.
    `drafter` takes only None so far.
    """
    if drafter is not None:
        raise ValueError("drafter: speculative decoding is not available yet; use None")
    if max_seq_length is None:
        max_seq_length = engine.state.tokens.size(1) if engine else model.config.max_seq_length
    budgets = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    check_lengths(model, prompts, budgets, max_seq_length)
    assert 0 <= cached < min(map(len, prompts)), f"{cached} cached tokens leave no token of some prompt to run"
    timing, ended = Timing() if timing is None else timing, set() if ended is None else ended
    with attached(engine, model, prompts, budgets) as engine:
        yield from _decode(engine, prompts, budgets, sampling, frozenset(stop_ids), seed, cached, timing, ended)


@contextlib.contextmanager
def attached(engine: Engine | None, model: Transformer, prompts, budgets: list[int]) -> Iterator[Engine]:
    """The caller's engine with its caches in the model; or an eager one that fits, whose caches are gone afterwards."""
    if engine is not None:
        engine.attach()
        yield engine
        return
    try:
        yield Engine(model, len(prompts), max(len(prompt) + n for prompt, n in zip(prompts, budgets)))
    finally:
        model.use_caches(None)


def _decode(
    engine: Engine, prompts, budgets: list[int], sampling: Sampling, stop_ids: frozenset[int], seed: int, cached: int,
    timing: Timing, ended: set[int],
) -> Iterator[tuple[int, int]]:  # fmt: skip
    """The loop of `generate`: launch steps, read what they decided, a few late on a GPU, and yield it."""
    model, state, inbox, kind = engine.model, engine.state, Inbox(engine.device), sampling.kind
    lengths = [len(prompt) for prompt in prompts]
    alive = [True] * len(prompts)
    timing.decoded, timing.row_s = [0] * len(prompts), [0.0] * len(prompts)
    weights, per_position = weight_bytes(model), position_bytes(model)
    launched, read = 0, 0  # decode steps begun; results received, the prompt's included

    start = time.perf_counter()
    state.start(prompts, budgets, stop_ids, seed, sampling)
    decide(state, prefill(engine, lengths, cached), kind)
    inbox.send(state.out)
    while any(alive):
        while launched < max(budgets) - 1 and launched + 1 - read <= inbox.lag:
            launched += 1
            engine.step(kind, launched + max(n for n, going in zip(lengths, alive) if going))
            inbox.send(state.out)
        ids = inbox.receive()
        now = time.perf_counter()
        if read == 0:
            timing.prompt_tokens, timing.prefill_s = sum(lengths) - cached * len(prompts), now - start
        else:
            timing.decode_s, timing.steps = timing.decode_s + now - start, timing.steps + 1
            filled = [n + read for n, going in zip(lengths, alive) if going]
            timing.bytes_read += weights + sum(attended_bytes(per_position, n) for n in filled)
        start, read = now, read + 1
        for row, id in enumerate(ids[: len(prompts)]):
            if not alive[row]:
                continue
            if id == INVALID:
                raise ValueError(f"row {row}, position {lengths[row] + read - 1}: the model's logits are not finite")
            timing.decoded[row] += 1
            timing.row_s[row] = timing.decode_s
            alive[row] = id not in stop_ids and timing.decoded[row] < budgets[row]
            yield row, id
            if row in ended and alive[row]:
                alive[row] = False
                state.done[row] = True
        if not inbox.lag:
            start = time.perf_counter()  # nothing ran while the consumer had the token


def prefill(engine: Engine, lengths: list[int], cached: int = 0) -> Tensor:
    """Run the prompts in the engine's state, from position `cached` on, through the model in chunks; logits (B, V)
    after each row's last token.

    Shorter rows are padded on the right. Padding writes keys and values beyond its row's end, where decoding
    overwrites each position before any query may see it. Compiled code takes all rows, and never one position alone,
    which torch would compile apart.
    """
    model, B, longest = engine.model, engine.state.tokens.size(0), max(lengths)
    rows = B if engine.compile else len(lengths)
    last = torch.zeros(B, model.config.dim, dtype=model.embed.weight.dtype, device=engine.device)  # (B, D)
    for begin in range(cached, longest, PREFILL_CHUNK):
        end = min(begin + PREFILL_CHUNK, longest)
        h = engine.prompt_chunk(rows, begin, max(end, begin + 2) if engine.compile else end)  # (rows, T, D)
        for row, length in enumerate(lengths):
            if begin < length <= end:
                last[row] = h[row, length - 1 - begin]
    return model.head(last)


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
        if len(prompt) + max_new_tokens > limit:
            raise ValueError(
                f"prompt {row} has {len(prompt)} tokens; with {max_new_tokens} new ones that is"
                f" {len(prompt) + max_new_tokens}, over the limit of {limit} positions: shorten the prompt, or lower"
                " --max_new_tokens"
            )
        V = model.config.vocab_size
        if not 0 <= min(prompt) <= max(prompt) < V:
            wrong = next(id for id in prompt if not 0 <= id < V)
            raise ValueError(f"prompt {row} holds token id {wrong}, outside the vocabulary of {V}")


# -------------------------------------------------------------------------------------------- accounting


def weight_bytes(model: Transformer) -> int:
    """Bytes of weights that one decode step reads: all but the embedding table, of which it takes a few rows. A tied
    head is that table, read in full as the head."""
    table = 0 if model.config.tie_embeddings else model.embed.weight.nbytes
    return sum(parameter.nbytes for parameter in model.parameters()) - table


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


def requests(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """(prompts, what is wrong with lines that hold none): --prompt, or the lines of --prompt_file ('-' is stdin), plain
    text, or JSONL objects with a "prompt" when the first line is one. Empty lines are skipped."""
    if args.prompt_file is None:
        if not args.prompt:
            raise ValueError("--prompt is empty: give it at least one character")
        return [args.prompt], []
    name = "stdin" if args.prompt_file == "-" else args.prompt_file
    try:
        text = sys.stdin.read() if args.prompt_file == "-" else Path(args.prompt_file).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{name}: {error}") from None
    lines = [(number, line) for number, line in enumerate(re.split("\r?\n", text), 1) if line.strip()]
    if not lines:
        raise ValueError(f"{name}: holds no prompt")
    if not lines[0][1].lstrip().startswith("{"):
        return [line for _, line in lines], []
    found = [(number, _jsonl_prompt(line)) for number, line in lines]
    wrong = [
        f'{name}, line {number}: expected a JSON object with a string "prompt"' for number, text in found if not text
    ]
    return [text for _, text in found if text], wrong


def _jsonl_prompt(line: str) -> str | None:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return prompt if isinstance(prompt, str) else None


class NumberTokenizer(Tokenizer):
    """For --random_weights, where no folder brings a tokenizer: a prompt is its bytes, text is the ids as numbers."""

    def __init__(self, vocab_size: int):
        super().__init__(
            lambda text: [byte % vocab_size for byte in text.encode()], lambda id: f" {id}".encode(),
            vocab_size=vocab_size, bos_id=None, add_bos=False, stop_ids=(), strip_first_space=True,
        )  # fmt: skip


class Printer:
    """One batch's ids as they come: text on stdout, or JSON lines at the end. Only one row can stream; the rows of a
    batch are printed whole, in order, each under its prompt."""

    def __init__(
        self, tokenizer: Tokenizer, texts: list[str], stop_ids: frozenset[int], stops=(), as_json: bool = False
    ):
        self.texts, self.stop_ids, self.as_json = texts, stop_ids, as_json
        self.stops = [StopStrings(stops) for _ in texts]
        self.ended: set[int] = set()  # rows whose text has met a stop string
        self.ids: list[list[int]] = [[] for _ in texts]
        self.pieces: list[list[str]] = [[] for _ in texts]
        self.streams = [tokenizer.stream(continues=True) for _ in texts]
        self.streaming = len(texts) == 1 and not as_json
        if self.streaming and texts[0]:
            # On a terminal the answer continues the prompt's line; in a log each has its own.
            print(texts[0], end="" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)

    def feed(self, row: int, id: int) -> None:
        self.ids[row].append(id)
        if id not in self.stop_ids:
            self._text(row, self.stops[row].feed(self.streams[row].feed(id)))
            if self.stops[row].stopped:
                self.ended.add(row)

    def _text(self, row: int, text: str) -> None:
        self.pieces[row].append(text)
        if self.streaming and text:
            print(text, end="", flush=True)

    def close(self) -> None:
        """Release held-back bytes and end the line."""
        for row, stream in enumerate(self.streams):
            self._text(row, self.stops[row].feed(stream.flush()) + self.stops[row].flush())
        if self.streaming:
            print(end="\n" if self.ids[0] else "", flush=True)
        elif not self.as_json and any(self.ids):
            for text, pieces in zip(self.texts, self.pieces, strict=True):
                print(text, end="", file=sys.stderr, flush=True)
                print("".join(pieces), flush=True)

    def rows(self, prompts: list[list[int]], timing: Timing, device: torch.device) -> list[dict]:
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
                "peak_memory_gb": peak_memory_gb(device),
                "speculative": None,
            }
            for row, (prompt, ids, pieces) in enumerate(zip(prompts, self.ids, self.pieces, strict=True))
        ]


def report(timings: list[Timing], device: torch.device) -> None:
    """Rates on stderr: medians over batches, with min and max where there are several."""

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
        print(f"decode {spread(tokens)} tok/s, {spread(bandwidth)} GB/s read", file=sys.stderr)
    print(f"peak memory {peak_memory_gb(device):.2f} GB", file=sys.stderr)


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

    def decode(self, printer: Printer, prompts, budgets: list[int], seed: int, cached: int = 0) -> Timing:
        """One batch, printed as it goes; an interrupted one keeps what it printed."""
        timing = Timing()
        try:
            for row, id in generate(
                self.engine.model, prompts, sampling=self.sampling, stop_ids=self.stop_ids, seed=seed,
                max_new_tokens=budgets, engine=self.engine, timing=timing, cached=cached, ended=printer.ended,
            ):  # fmt: skip
                printer.feed(row, id)
        finally:
            printer.close()
        return timing


def run(args: argparse.Namespace) -> None:
    """Load, decode every batch of every sample, print; exit status 2 if lines of the prompt file were broken."""
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.min_p)
    check_options(args)
    texts, broken = ([], []) if args.interactive else requests(args)
    for message in broken:
        one_line_error(message)
    if broken and not texts:
        sys.exit(2)
    device = pick_device(args.device)
    model, tokenizer = load(args, device)
    limit = model.config.max_seq_length if args.max_seq_length is None else args.max_seq_length
    if not 1 <= limit <= model.config.max_seq_length:
        raise ValueError(f"--max_seq_length {limit} must lie between 1 and the model's {model.config.max_seq_length}")
    encoded = [tokenizer.encode(text) for text in texts]
    budgets = [new_tokens(args.max_new_tokens, prompt, limit) for prompt in encoded]
    if args.interactive:
        length = min(limit, CHAT_LENGTH)
    else:
        check_lengths(model, encoded, budgets, limit)
        length = max(len(prompt) + n for prompt, n in zip(encoded, budgets))
    rows, length = min(args.batch_size, len(texts) or 1), limit if args.max_seq_length else length
    engine = Engine(model, rows, length, compile=compiles(args.compile, device))
    warm_up(engine, sampling.kind)
    session = Session(engine, tokenizer, sampling, frozenset() if args.ignore_eos else tokenizer.stop_ids)
    with profiled(args.profile, device):
        chat(session, args) if args.interactive else decode_all(session, args, texts, encoded, budgets)
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
    if args.profile and not os.access(Path(args.profile).resolve().parent, os.W_OK):
        raise ValueError(f"--profile {args.profile}: its folder does not exist or cannot be written to")


def warm_up(engine: Engine, kind: str) -> None:
    if engine.compile:
        seconds = engine.warm_up(kind)
        rows = engine.state.tokens.size(0)
        print(f"compiled the {kind} step for batch {rows} in {seconds:.1f} s", file=sys.stderr)


def decode_all(session: Session, args: argparse.Namespace, texts: list[str], encoded, budgets: list[int]) -> None:
    """Every batch of every sample, then the rates."""
    timings, size = [], args.batch_size
    for seed in range(args.seed, args.seed + args.num_samples):
        for begin in range(0, len(texts), size):
            prompts = encoded[begin : begin + size]
            printer = Printer(session.tokenizer, texts[begin : begin + size], session.stop_ids, args.stop, args.json)
            timings.append(session.decode(printer, prompts, budgets[begin : begin + size], seed))
            if args.json:
                for row in printer.rows(prompts, timings[-1], session.engine.device):
                    print(json.dumps(row), flush=True)
    report(timings, session.engine.device)


def chat(session: Session, args: argparse.Namespace) -> None:
    """Turns from stdin until it ends. What the caches hold of the conversation is not computed again, as far as the ids
    agree: templates rewrite history. Ctrl-C ends an answer, not the program."""
    tokenizer, limit = session.tokenizer, session.engine.state.tokens.size(1)
    if tokenizer.template is None:
        print("this folder has no chat template: chatting as plain text", file=sys.stderr)
    opening = [{"role": "system", "content": args.system}] if args.system else []
    messages, cached = list(opening), []  # ids that the caches hold, one per position
    print(f"context of {limit} positions; /reset starts anew, an empty line or end of file ends", file=sys.stderr)
    for turn in itertools.count():
        print("> ", end="", file=sys.stderr, flush=True)
        text = sys.stdin.readline().rstrip("\n")
        if not text:
            return
        if text == "/reset":
            messages = list(opening)
            continue
        prompt = conversation_ids(tokenizer, [*messages, {"role": "user", "content": text}])
        if len(prompt) + (args.max_new_tokens or 1) > limit:
            needed = f"{len(prompt)} tokens and {args.max_new_tokens or 1} new ones"
            print(f"the context is full: {needed} do not fit in {limit} positions; /reset starts anew", file=sys.stderr)
            continue
        known = common_prefix(prompt[:-1], cached)
        printer = Printer(tokenizer, [""], session.stop_ids, args.stop)
        try:
            budget = new_tokens(args.max_new_tokens, prompt, limit)
            timing = session.decode(printer, [prompt], [budget], args.seed + turn, known)
            rates = f"{rate(timing.decoded[0] - 1, timing.decode_s):.1f} tok/s"
            print(f"[{timing.prompt_tokens} tokens read, {known} kept, {rates}]", file=sys.stderr)
        except KeyboardInterrupt:
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
    trace.export_chrome_trace(file)


def load(args: argparse.Namespace, device: torch.device) -> tuple[Transformer, Tokenizer]:
    """The model and tokenizer of --checkpoint, or random weights of the shape in --random_weights."""
    if args.random_weights:
        config = config_of(Path(args.random_weights))
        model = random_model(config, device=device, dtype=pick_dtype(args.dtype, config.dtype, device))
        return model, NumberTokenizer(config.vocab_size)
    dtype = pick_dtype(args.dtype, load_config(args.checkpoint).dtype, device)
    tokenizer = load_tokenizer(args.checkpoint)
    model = load_model(args.checkpoint, device=device, dtype=dtype, progress=True)
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
        torch.cuda.set_device(device)
    return device


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
        """One line, like every other error of this program."""
        sys.exit(one_line_error(message))


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(description="Decode text with a Llama-architecture model from a Hugging Face folder.")
    add = parser.add_argument
    add("--checkpoint", default=str(Path(__file__).parent / "checkpoints" / "demo"), help="a Hugging Face folder")
    add("--random_weights", metavar="CONFIG.json", help="this shape with random weights, instead of --checkpoint")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", default="Once upon a time")
    source.add_argument("--prompt_file", help='one prompt per line, or JSONL objects with "prompt"; - for stdin')
    source.add_argument("--interactive", action="store_true", help="chat, in the folder's own format if it has one")
    add("--system", metavar="TEXT", help="system message for --interactive")
    add("--batch_size", type=positive, default=1, help="prompts decoded together")
    add("--num_samples", type=positive, default=1, help="runs of every prompt, with seeds seed, seed + 1, …")
    add("--max_new_tokens", type=int, help=f"default: {DEFAULT_NEW_TOKENS}, or to the end of the context")
    add("--max_seq_length", type=int, help="positions for prompt and new tokens; default: the model's context")
    add("--temperature", type=float, default=0.8, help="0: always the most likely token")
    add("--top_k", type=int, help="keep the k most likely tokens")
    add("--top_p", type=float, help="keep the most likely tokens that together reach this mass")
    add("--min_p", type=float, help="keep tokens at least this likely relative to the most likely one")
    add("--seed", type=int, default=0)
    add("--stop", nargs="+", action="extend", default=[], metavar="TEXT", help="end before any of these strings")
    add("--ignore_eos", action="store_true", help="do not end at the model's stop tokens")
    add("--device", help="cpu, cuda, cuda:N or mps; default: cuda when there is one")
    add("--dtype", choices=("bfloat16", "float16", "float32"), help="default: the checkpoint's")
    add("--compile", action=argparse.BooleanOptionalAction, help="compile the decode step; default: on cuda")
    add("--profile", metavar="FILE", help="write a Chrome trace of everything after loading and compiling")
    add("--json", action="store_true", help="one JSON object per sample and row on stdout, nothing else")
    return parser.parse_args(argv)


def main() -> None:
    try:
        check_torch()
        run(parse_args())
    except (ValueError, MemoryError, torch.OutOfMemoryError) as error:
        sys.exit(one_line_error(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except RuntimeError as error:  # what torch raises on a CPU that has no more memory
        if "allocate memory" not in str(error):
            raise
        sys.exit(one_line_error(error))
    except BrokenPipeError:  # the reader of stdout left; nothing more can be printed, not even at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(one_line_error(error))


def one_line_error(error: Exception | str) -> int:
    """Print it; the exit status."""
    tqdm.write(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
