"""Token ids in, token ids out: `python generate.py --checkpoint DIR --prompt "Once upon a time"`.

    decode_step             the step that advances a batch, state.py's fixed tensors, in place
    compiled                the one place where code is compiled
    CachedModel             a model with caches of its own, and how its prompts run
    Engine                  models, State and steps, eager or compiled: prefill, step, warm_up, calibrate
    generate, stream        the loop over a batch of independent prompts: ids as they are decided; one prompt as text

`generate` knows token ids and nothing of text. Sampling is sampling.py's, the arithmetic model.py's, the weights
checkpoint.py's; what is drafted and accepted is speculative.py's, what steps cost timing.py's. Run as a program, this
file hands over to program/.
"""

if __name__ == "__main__":  # before torch is imported: program/ decides what Ctrl-C does from the first moment on
    import runpy

    runpy.run_module("program.main", run_name="__main__")
    raise SystemExit

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from kept import copy_rows, parts, shared_prefix
from limits import check_draft_length, check_engine, check_lengths, rounded_up, whole_numbers
from model import Caches, KVCache, Transformer
from rounding import in_blocks, same_attention
from sampling import INVALID, Sampling, sample, uniform
from speculative import AUTO_K, Costs, CustomDraft, Drafter, DraftLength, run_round
from state import NO_TOKEN, State
from timing import Readback, StepResult, Timing, mark, spent, synchronize
from tp import ranks_of
from weights.compiling import compile_options, leave_open, own_entries
from weights.linears import same_rows

PREFILL_CHUNK = 512  # tokens of a prompt that go through the model at once: bounds what activations take
DEFAULT_K = 5  # tokens drafted a round


def decide(state: State, logits: Tensor) -> None:
    """Draw the next token of every row from logits (B, V) and advance; finished rows stay as they are."""
    own = state.processed(logits[:, None], state.pos[:, None])  # (B, 1, V)
    token = sample(own[:, 0], state.kind, state.values, uniform(state.seed, state.pos + 1))  # (B,)
    state.accepted.fill_(-1)
    token = state.broadcast(token)[:, None]  # (B, 1)
    state.note(logits[:, None], own, token)
    state.commit(token)


def decode_step(model: Transformer, caches: Caches, state: State) -> None:
    """One token for every row that is not done. A finished row runs its last position again."""
    pos = state.pos[:, None]  # (B, 1)
    h = model.hidden(state.tokens.gather(1, pos), pos, caches)  # (B, 1, D)
    decide(state, model.head(h[:, 0]))


# ----------------------------------------------------------------------------------------------- engine


def compiled(function: Callable, device: torch.device, prompts: bool = False) -> Callable:
    """`function` as one graph with static shapes, but for the dimensions that `leave_open` names, replayed as a CUDA
    graph on a GPU. Prompts have too many lengths to be replayed."""
    options = compile_options(device, prompts)
    return torch.compile(function, fullgraph=True, dynamic=False, options=options, **own_entries())


class CachedModel:
    """A model with caches of B rows and S positions; or, with `layers`, with some layers of another model's caches."""

    def __init__(
        self, model: Transformer, B: int, S: int, compile: bool, compile_prompts: bool = False,
        layers: Sequence[nn.Module] | None = None, ends: Tensor | None = None, kind: type[KVCache] = KVCache,
    ):  # fmt: skip
        self.model, self.B, self.compile, self.compile_prompts, self.kind = model, B, compile, compile_prompts, kind
        (H, G), E = model.layers[0].attention.heads(), model.config.head_dim
        kernel = kind.kernel(model.config.sinks, E, model.norm.weight)
        self.tile = same_attention(kernel, B, H, G, E, model.norm.weight)
        rows, self.unit = self.tile or (1, 16)
        self.S = in_blocks(S, self.unit)
        # One position of slack: attending to the whole cache would be a special case that compiles once more.
        self.caches = model.make_caches(B if layers is None else 0, self.S + 1, kind)._replace(rows=rows)
        if layers is not None:
            self.caches = self.caches._replace(layers=tuple(layers))
        if ends is not None:
            self.caches = self.caches._replace(ends=ends)
        self.device = self.caches.key_pos.device
        self.replayed = compile and self.device.type == "cuda"  # as CUDA graphs, one for each length attended
        self.hidden = compiled(model.hidden, self.device, prompts=True) if compile_prompts else model.hidden

    def beside(self, model: Transformer, on_layers: Sequence[int] | None = None) -> "CachedModel":
        """A draft for this model: with caches of its own, or on the caches of some of this model's layers."""
        layers = None if on_layers is None else [self.caches.layers[i] for i in on_layers]
        return CachedModel(
            model, self.B, self.S, self.compile, self.compile_prompts, layers, self.caches.ends, self.kind
        )

    def attended(self, length: int) -> int:
        """How far attention runs when `length` positions are filled: to the next of a few lengths, or of those that
        round alike."""
        if self.replayed:
            length = max(256, 1 << (length - 1).bit_length())
        return min(in_blocks(length, self.unit), self.S)

    def upto(self, length: int) -> Caches:
        """The caches, for steps after which `length` positions are filled."""
        caches = self.caches.upto(self.attended(length))
        if self.compile:
            leave_open(caches.key_pos, 0)
        return caches

    def chunk(self, state: State, rows: int, begin: int, end: int) -> tuple[Tensor, Tensor, Caches]:
        """Positions begin to end of the prompts in the state, as `hidden` takes them: tokens (rows, T), pos (T,)."""
        # A draft may know fewer ids than its target.
        tokens = state.tokens[:rows, begin:end].clamp(max=self.model.config.vocab_size - 1)
        pos = torch.arange(begin, end, device=self.device)
        if self.compile_prompts:
            leave_open(tokens, 1), leave_open(pos, 0)
        return tokens, pos, self.upto(end)

    def run_prompts(self, state: State, lengths: Sequence[int], cached: int, shared: int = 0) -> Tensor:
        """Run the prompts of these lengths from position `cached` on, in chunks; hidden states (B, D) at each row's
        last token. Up to position `shared` all rows are the same: there row 0 runs for all, eagerly.

        Rows are padded on the right. Padding writes keys and values beyond its row's end, where decoding overwrites
        each position before any query may see it. Compiled code takes all rows, and never one position alone, which
        torch would compile apart.
        """
        B, longest = state.pos.size(0), max(lengths)
        rows = B if self.compile_prompts else len(lengths)
        last = torch.zeros(B, self.model.config.dim, dtype=self.model.norm.weight.dtype, device=self.device)  # (B, D)
        for begin in range(cached, shared, PREFILL_CHUNK):
            end = begin + rounded_up(min(PREFILL_CHUNK, shared - begin))
            self.model.hidden(*self.chunk(state, 1, begin, min(end, self.S)))
        if shared > cached:
            copy_rows(parts(self.caches), len(lengths), [0], cached, shared)
        for begin in range(max(cached, shared), longest, PREFILL_CHUNK):
            end = min(begin + PREFILL_CHUNK, longest)
            padded = min(begin + rounded_up(end - begin), self.S)
            h = self.hidden(*self.chunk(state, rows, begin, padded))  # (rows, T, D)
            for row, length in enumerate(lengths):
                if begin < length <= end:
                    last[row] = h[row, length - 1 - begin]
        return last


class Engine:
    """A model with caches, a State and its steps, eager or compiled, for up to B rows of up to S positions.

    With a drafter it runs rounds: the drafter proposes K tokens, one pass of the model verifies them. speculate_k is K,
    or "auto", which needs `calibrate`. `compile_prompts` is as `compile` unless it says otherwise. With `one_width`
    every step is a pass over K + 1 positions, drafted or not. Keep an engine while shapes stay the same: `warm_up`
    compiles once. Any number of engines may share a model; a drafter belongs to the engine that was made last. `kind`:
    of its caches, KVCache or one of caches.py.
    """

    def __init__(
        self, model: Transformer, batch_size: int, max_seq_length: int, *, compile: bool = False, drafter=None,
        speculate_k: int | str = DEFAULT_K, compile_prompts: bool | None = None, one_width: bool = False,
        process: Callable | None = None, logprobs: int | None = None, kind: type[KVCache] = KVCache,
    ):  # fmt: skip
        self.drafts, self.one_width = drafter is not None, one_width
        drafter = Drafter() if one_width and drafter is None else drafter
        check_draft_length(speculate_k)
        self.speculate_k = speculate_k if drafter is not None else 0
        self.ks = AUTO_K if self.speculate_k == "auto" else (self.speculate_k,) if self.speculate_k else ()
        self.model, self.compile = model, compile
        self.batch_size, self.max_seq_length = batch_size, max_seq_length
        self.device, self.ranks = model.norm.weight.device, ranks_of(model)
        K = max(self.ks, default=0)  # a round at the context's end writes K positions too many
        compile_prompts = compile if compile_prompts is None else compile_prompts
        self.cached = CachedModel(model, batch_size, max_seq_length + K, compile, compile_prompts, kind=kind)
        # Is greedy text the same with any drafter, bit for bit?
        self.identical = bool(self.cached.tile) and self.ranks.world == 1
        self.identical = self.identical and batch_size * (K + 1) <= same_rows(model)
        with torch.inference_mode(False):
            self.state = State(batch_size, self.cached.S, self.device, K, self.ranks, process, logprobs)
        self.cached.caches = self.cached.caches._replace(ends=self.state.end)
        self.drafter = drafter if drafter is None or isinstance(drafter, Drafter) else CustomDraft(drafter)
        self.steps: dict[tuple, Callable] = {}
        self.costs: Costs | None = None  # of steps and rounds, once `calibrate` has measured them
        self.missed = 0  # tokens a row may have been given since the drafter last ran
        self.prompted = [self.cached]  # models with caches of their own, which prompts must go through
        if self.drafter is not None:
            self.drafter.setup(self.state, K, self.cached, self.prepared)
            self.prompted += [self.drafter.cached] if self.drafter.owns_cache else []

    @property
    def models(self) -> list[Transformer]:
        """The target, and the model that drafts, if one does."""
        return [self.model] + ([self.drafter.model] if self.drafter and self.drafter.model else [])

    def prepared(self, function: Callable, *static) -> Callable:
        """The function, or its compiled form for the sampling's kind; `static` names what else tells forms apart."""
        if not self.compile:
            return function
        key = (function, self.state.kind, *static)
        if key not in self.steps:
            self.steps[key] = compiled(function, self.device)
        return self.steps[key]

    def prefill(self, lengths: Sequence[int], cached: int = 0, longest: int = 0, shared: int = 0) -> StepResult:
        """Run the prompts in the state, from position `cached` on, through all models, and decide the token after each.
        `longest`: positions that the batch may come to fill. `shared`: as run_prompts has it."""
        end = self.cached.attended((longest or self.max_seq_length) + max(self.ks, default=0))
        for prompted in self.prompted:
            prompted.caches.clear(cached, end)
        last = self.cached.run_prompts(self.state, lengths, cached, shared)
        for draft in self.prompted[1:]:  # its cache may be behind: by the last round's tokens, and by plain steps
            draft.run_prompts(self.state, lengths, max(0, cached + 1 - self.drafter.fed - self.missed), shared)
        self.missed = 0
        decide(self.state, self.model.head(last))
        return self.result(0, ())

    def step(self, length: int, k: int = 0, other: Tensor | None = None) -> StepResult:
        """Run one decode step, or a round that drafts k tokens, whose rows have at most `length` positions decided.
        `other` (B, k) are verified in place of the drafted ones."""
        begun = drafted = mark(self.device)
        self.state.k, self.state.length = k, length + k
        caches = self.cached.upto(length + k)
        if k == 0:
            self.missed += 1
            self.prepared(decode_step)(self.model, caches, self.state)
        else:
            drafted = run_round(self.drafter, self.model, caches, self.state, self.missed, self.prepared, other)
            self.missed = 0
        return self.result(k, (begun, drafted, mark(self.device)))

    def result(self, k: int, times: tuple) -> StepResult:
        """What the host should read, after the drafter has looked at the state too."""
        if self.drafter is not None:
            self.drafter.look(self.state)
        state, end = self.state, (mark(self.device),) if times else ()
        told = (state.likeliest, state.weighed) if state.noting else ()
        return StepResult(k, times + end, state.out, state.accepted, state.overlap, state.has_match, *told)

    @torch.inference_mode()
    def warm_up(self, kind: str) -> float:
        """Compile the steps for `kind` and run them at every length that will be recorded; compile prompts, short and
        long, at the start, later on, and beyond a sliding window; seconds. What this writes to the caches, a prefill
        overwrites."""
        start = time.perf_counter()
        S, state, replayed = self.max_seq_length, self.state, self.cached.replayed
        state.pos.zero_(), state.done.fill_(True)
        state.kind = kind
        for cached in self.prompted if self.cached.compile_prompts else ():
            # A CPU's kernels of a few quantized rows and of many are others.
            for T in sorted({2, 2 if replayed else min(PREFILL_CHUNK, S)}):
                for begin in sorted({0, min(1, S - T), S - T}):
                    cached.hidden(*cached.chunk(state, state.pos.size(0), begin, begin + T))
        lengths = {min(1 << i, self.cached.S) for i in range(8, self.cached.S.bit_length() + 8)} if replayed else {2, S}
        for length, k in itertools.product(sorted(lengths), (0, *self.ks)):
            for _ in range(3 if replayed else 1):  # CUDA graphs: warm up, record, replay
                self.missed = 1
                self.step(max(1, length - k), k)
        synchronize(self.device)
        self.missed = 0
        return time.perf_counter() - start

    @torch.inference_mode()
    def calibrate(self, sampling: Sampling, length: int, rounds: int = 7) -> Costs:
        """Measure a plain step, drafting and verifying with `length` positions filled, interleaved, after one
        uncounted round: medians, also kept in `costs`. Tokens are drawn anew for each: what experts cost depends on
        them. For before a prefill, like `warm_up`."""
        assert 1 <= length < self.max_seq_length, f"{length} positions filled leave no room in {self.max_seq_length}"
        state, found = self.state, {k: [] for k in (0, *self.ks)}
        state.pos.fill_(length - 1), state.done.fill_(True)
        state.kind = sampling.kind
        state.values.copy_(sampling.values)
        V, random = self.model.config.vocab_size, torch.Generator().manual_seed(0)
        for _, k in itertools.product(range(rounds + 1), found):
            self.missed = 0
            state.tokens.copy_(torch.randint(V, state.tokens.shape, generator=random))
            other = torch.randint(V, (len(state.pos), k), generator=random).to(self.device)
            synchronize(self.device)
            step = self.step(length, k, other)
            synchronize(self.device)
            found[k].append(spent(step))
        draft, verify = ({k: statistics.median(s[part] for s in found[k][1:]) for k in found} for part in (0, 1))
        # A plain step stands as "verified" in the times of K = 0. Draft lengths follow from costs: ranks share them.
        self.costs = self.ranks.tell(Costs(verify.pop(0), {k: draft[k] for k in self.ks}, verify))
        self.missed = 0
        return self.costs


# ------------------------------------------------------------------------------------------------- loop


@torch.inference_mode()
def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    *,
    sampling: Sampling | Sequence[Sampling],
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

    Row i gets what its prompt alone would get with this seed and sampling (one, or one a row: of one kind). It ends
    after a stop id (which is yielded), after max_new_tokens (one number, or one a row), or when the consumer adds it to
    `ended`. Of every prompt, the first `cached` tokens are known to stand in the engine's caches already, from an
    earlier call; what all prompts begin with is computed once. All ranks of a divided model call this with the same
    arguments, and each yields the same tokens.

    With a `drafter` (speculative.py), rounds of speculate_k drafted tokens keep the law of every row: greedy output is
    the same, sampled output is distributed the same. An `engine` brings its own; without one, an eager one is made.

    Raises ValueError before anything runs when a prompt is empty or holds an id outside the vocabulary, or when prompt
    and new tokens exceed max_seq_length (default: the engine's, or the model's context) or the drafter's context; and
    while running when the model's logits are not finite.
    """
    assert engine is None or drafter is None, "the engine was made with its own drafter"
    if max_seq_length is None:
        max_seq_length = engine.max_seq_length if engine else model.config.max_seq_length
    budgets = whole_numbers("max_new_tokens", max_new_tokens, len(prompts))
    seeds = whole_numbers("seed", seed, len(prompts))
    check_lengths(model, prompts, budgets, max_seq_length, engine.drafter if engine else drafter)
    lengths = [len(prompt) for prompt in prompts]
    assert 0 <= cached < min(lengths), f"{cached} cached tokens leave no token of some prompt to run"
    longest = max(n + budget for n, budget in zip(lengths, budgets))
    if engine is None:
        engine = Engine(model, len(prompts), longest, drafter=drafter, speculate_k=speculate_k)
    else:
        check_engine(engine, model, len(prompts), max_seq_length)
    state, readback = engine.state, Readback(engine.device, engine.ranks.timeout_s)
    draft_length = DraftLength(engine.speculate_k, engine.costs)
    timing, ended, stop_ids = timing or Timing(), set() if ended is None else ended, frozenset(stop_ids)
    timing.decoded, timing.row_s = [0] * len(prompts), [0.0] * len(prompts)
    timing.tokens = [[] for _ in prompts] if engine.drafter is not None else []
    timing.likeliest, timing.weighed = ([[] for _ in prompts] for _ in range(2))
    live, can_draft = list(range(len(prompts))), True

    begun = time.perf_counter()
    shared = shared_prefix(engine, prompts, budgets, cached)
    timing.cached = [cached] + [max(cached, shared)] * (len(prompts) - 1)
    state.start(prompts, budgets, stop_ids, seeds, sampling)
    readback.send(engine.prefill(lengths, cached, longest, shared))
    while live:
        decided = [lengths[row] + timing.decoded[row] for row in live]
        # Launch steps while some row would still want their tokens; on a GPU a few before the first is read.
        wanted = max(budgets[row] - timing.decoded[row] for row in live)
        while len(readback.waiting) < min(wanted, readback.lag + 1):
            k = draft_length.choose() if can_draft or engine.one_width else 0
            readback.send(engine.step(min(max(decided) + readback.unread, engine.max_seq_length), k))
        step, now = readback.receive(), time.perf_counter()
        if step.times:
            timing.add_step(now - begun, step, decided)
        else:
            timing.prompt_tokens, timing.prefill_s = sum(lengths) - sum(timing.cached), now - begun
        begun, can_draft = now, any(step.has_match)
        if step.k:
            draft_length.drafted(sum(step.accepted[row] >= 0 for row in live), len(live))
        for row in tuple(live):
            for index, id in enumerate(itertools.takewhile(NO_TOKEN.__ne__, step.tokens[row])):
                if id == INVALID:
                    position = lengths[row] + timing.decoded[row]
                    raise ValueError(f"row {row}, position {position}: the model's logits are not finite")
                timing.add_token(row, index, step)
                if index < step.k and step.accepted[row] >= 0:
                    draft_length.observe(step.overlap[row][index])
                full = id in stop_ids or timing.decoded[row] == budgets[row]
                yield row, id
                if full or row in ended:
                    live.remove(row), state.done[row].fill_(True)
                    break
        if not readback.lag:
            begun = time.perf_counter()  # nothing ran while the consumer had the token


def stream(model: Transformer, tokenizer, prompt: str, *, sampling: Sampling | None = None, **options) -> Iterator[str]:
    """Decode one prompt as text, in pieces as they are decided: whole characters, without the stop token. `options` are
    those of `generate`; 200 new tokens and temperature 0.8 unless they say otherwise."""
    options = {"max_new_tokens": 200, "stop_ids": tokenizer.stop_ids, **options}
    decoder = tokenizer.stream(continues=True)
    for _, id in generate(model, [tokenizer.encode(prompt)], sampling=sampling or Sampling(0.8), **options):
        yield "" if id in options["stop_ids"] else decoder.feed(id)
    yield decoder.flush()
