"""Token ids in, token ids out: `python generate.py --checkpoint DIR --prompt "Once upon a time"`.

    State, decode_step      a batch as fixed tensors, and the step that advances the batch in place
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
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from limits import check_draft_length, check_engine, check_lengths, rounded_up, whole_numbers
from model import Caches, Transformer, attend
from rounding import same_attention
from sampling import GREEDY, INVALID, Sampling, describe, sample, uniform
from speculative import AUTO_K, Costs, CustomDraft, Drafter, DraftLength, run_round
from timing import Readback, StepResult, Timing, mark, spent, synchronize
from tp import ALONE, Ranks, ranks_of
from weights.compiling import compile_options, leave_open, own_entries
from weights.linears import same_rows

PREFILL_CHUNK = 512  # tokens of a prompt that go through the model at once: bounds what activations take
DEFAULT_K = 5  # tokens drafted a round
NO_TOKEN = -2  # stands in `out` where a step decided nothing: behind what it decided, and in finished rows
STOP_SLOTS = 64


class State(nn.Module):
    """A batch in fixed tensors, which steps read and write in place: replaying a step needs nothing from the host.

    `kind` is the sampling's, a choice of code; everything else may change without compiling. With several ranks, what
    rank 0 decides goes into every rank's state.
    """

    def __init__(self, B: int, S: int, device: torch.device, K: int = 0, ranks: Ranks = ALONE):
        super().__init__()
        self.kind, self.broadcast = GREEDY, ranks.broadcast
        self.k = self.length = 0  # of a round, for drafters: tokens to draft, and positions filled after the round

        def fixed(name: str, *shape: int, fill=0, dtype=torch.int64) -> None:
            self.register_buffer(name, torch.full(shape, fill, dtype=dtype, device=device))

        fixed("tokens", B, S + K + 1)  # prompt, then what was decided; beyond `pos` a round's scratch space
        fixed("pos", B)  # index of the last decided token, which no layer has seen yet
        fixed("end", B)  # index at which the row is full
        fixed("done", B, fill=True, dtype=torch.bool)
        fixed("seed", B)
        fixed("stop_ids", STOP_SLOTS, fill=-1)
        fixed("values", 4, dtype=torch.float32)  # of the sampling
        # What the last step decided, for the host: tokens, then NO_TOKEN; of how many drafted tokens (-1: of none);
        # how well the draft fitted, as the sum of min(p, q) at each drafted position; and whether drafting can go on.
        fixed("out", B, K + 1, fill=NO_TOKEN)
        fixed("accepted", B, fill=-1)
        fixed("overlap", B, K, dtype=torch.float32)
        fixed("has_match", B, fill=True, dtype=torch.bool)

    def start(
        self, prompts, budgets: Sequence[int], stop_ids: Iterable[int], seeds: Sequence[int], sampling: Sampling
    ) -> None:
        """Fill in a batch: new tokens and a seed for each row. Rows beyond the prompts are done from the start."""
        stop_ids = sorted(stop_ids)
        if len(stop_ids) > STOP_SLOTS:
            raise ValueError(f"{len(stop_ids)} stop ids are more than the {STOP_SLOTS} that fit")
        B = self.tokens.size(0)
        empty = B - len(prompts)
        lengths = torch.tensor([len(prompt) for prompt in prompts] + [1] * empty)
        self.tokens.zero_()
        for row, prompt in enumerate(prompts):
            # Padded with a token of its own: another might overflow in the model, and its NaN reach this row.
            self.tokens[row] = prompt[-1]
            self.tokens[row, : len(prompt)] = torch.tensor(prompt)
        self.pos.copy_(lengths - 1)
        self.end.copy_(lengths - 1 + torch.tensor([*budgets, *[0] * empty]))
        self.done.copy_(torch.arange(B) >= len(prompts))
        self.seed.copy_(torch.tensor([*seeds, *[0] * empty]))
        self.stop_ids.copy_(torch.tensor(stop_ids + [-1] * (STOP_SLOTS - len(stop_ids))))
        self.values.copy_(sampling.values)
        self.kind = sampling.kind

    def commit(self, tokens: Tensor, n_accepted: Tensor | None = None) -> None:
        """Append tokens (B, T), as many as were accepted (B,) and one more, to the rows that are not done, each up to
        its first stop id or its end. None: plain decoding, T = 1."""
        T = tokens.size(1)
        index = torch.arange(T, device=tokens.device)
        position = self.pos[:, None] + 1 + index  # (B, T)
        last = torch.isin(tokens, self.stop_ids) | (position >= self.end[:, None]) | (tokens == INVALID)
        ended_before = last.cumsum(dim=1) - last.long() > 0  # (B, T)
        keep = ~(self.done[:, None] | ended_before)
        if n_accepted is not None:
            keep = keep & (index <= n_accepted[:, None])
        self.out.copy_(F.pad(torch.where(keep, tokens, NO_TOKEN), (0, self.out.size(1) - T), value=NO_TOKEN))
        # What is not kept lands beyond `pos`, where nothing counts. INVALID is for the host alone: a step that runs
        # before the host knows must not embed INVALID.
        self.tokens.scatter_(1, position, tokens.clamp(min=0))
        self.pos.add_(keep.sum(dim=1))
        self.done.logical_or_((keep & last).any(dim=1))


def decide(state: State, logits: Tensor) -> None:
    """Draw the next token of every row from logits (B, V) and advance; finished rows stay as they are."""
    token = sample(logits, state.kind, state.values, uniform(state.seed, state.pos + 1))  # (B,)
    state.accepted.fill_(-1)
    state.commit(state.broadcast(token)[:, None])


def decode_step(model: Transformer, caches: Caches, state: State) -> Tensor:
    """One token for every row that is not done, from logits (B, V). A finished row runs its last position again."""
    pos = state.pos[:, None]  # (B, 1)
    h = model.hidden(state.tokens.gather(1, pos), pos, caches)  # (B, 1, D)
    logits = model.head(h[:, 0])
    decide(state, logits)
    return logits


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
        layers: Sequence[nn.Module] | None = None,
    ):  # fmt: skip
        self.model, self.B, self.compile, self.compile_prompts = model, B, compile, compile_prompts
        (H, G), E = model.layers[0].attention.heads(), model.config.head_dim
        self.tile = same_attention(attend, B, H, G, E, model.norm.weight)
        rows, self.unit = self.tile or (1, 16)
        self.S = math.ceil(S / self.unit) * self.unit
        # One position of slack: attending to the whole cache would be a special case that compiles once more.
        self.caches = model.make_caches(B if layers is None else 0, self.S + 1)._replace(rows=rows)
        if layers is not None:
            self.caches = self.caches._replace(layers=tuple(layers))
        self.device = self.caches.key_pos.device
        self.replayed = compile and self.device.type == "cuda"  # as CUDA graphs, one for each length attended
        self.hidden = compiled(model.hidden, self.device, prompts=True) if compile_prompts else model.hidden

    def beside(self, model: Transformer, on_layers: Sequence[int] | None = None) -> "CachedModel":
        """A draft for this model: with caches of its own, or on the caches of some of this model's layers."""
        layers = None if on_layers is None else [self.caches.layers[i] for i in on_layers]
        return CachedModel(model, self.B, self.S, self.compile, self.compile_prompts, layers)

    def attended(self, length: int) -> int:
        """How far attention runs when `length` positions are filled: to the next of a few lengths, or of those that
        round alike."""
        if self.replayed:
            length = max(256, 1 << (length - 1).bit_length())
        return min(math.ceil(length / self.unit) * self.unit, self.S)

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

    def run_prompts(self, state: State, lengths: Sequence[int], cached: int) -> Tensor:
        """Run the prompts of these lengths from position `cached` on, in chunks; hidden states (B, D) at each row's
        last token.

        Rows are padded on the right. Padding writes keys and values beyond its row's end, where decoding overwrites
        each position before any query may see it. Compiled code takes all rows, and never one position alone, which
        torch would compile apart.
        """
        B, longest = state.pos.size(0), max(lengths)
        rows = B if self.compile_prompts else len(lengths)
        last = torch.zeros(B, self.model.config.dim, dtype=self.model.norm.weight.dtype, device=self.device)  # (B, D)
        for begin in range(cached, longest, PREFILL_CHUNK):
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
    compiles once. Any number of engines may share a model; a drafter belongs to the engine that was made last.
    """

    def __init__(
        self, model: Transformer, batch_size: int, max_seq_length: int, *, compile: bool = False, drafter=None,
        speculate_k: int | str = DEFAULT_K, compile_prompts: bool | None = None, one_width: bool = False,
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
        self.cached = CachedModel(model, batch_size, max_seq_length + K, compile, compile_prompts)
        # Is greedy text the same with any drafter, bit for bit?
        self.identical = bool(self.cached.tile) and batch_size * (K + 1) <= same_rows(model) and self.ranks.world == 1
        with torch.inference_mode(False):
            self.state = State(batch_size, self.cached.S, self.device, K, self.ranks)
        self.drafter = drafter if drafter is None or isinstance(drafter, Drafter) else CustomDraft(drafter)
        self.steps: dict[tuple, Callable] = {}
        self.costs: Costs | None = None  # of steps and rounds, once `calibrate` has measured them
        self.missed = 0  # tokens a row may have been given since the drafter last ran
        self.likeliest: int | None = None  # tokens whose log-probabilities `generate` asks for beside the chosen one's
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

    def prefill(self, lengths: Sequence[int], cached: int = 0, longest: int | None = None) -> StepResult:
        """Run the prompts in the state, from position `cached` on, through all models, and decide the token after each.
        `longest`: positions that the batch may come to fill."""
        end = self.cached.attended((longest or self.max_seq_length) + max(self.ks, default=0))
        for prompted in self.prompted:
            prompted.caches.clear(cached, end)
        last = self.cached.run_prompts(self.state, lengths, cached)
        for draft in self.prompted[1:]:  # its cache may be behind: by the last round's tokens, and by plain steps
            draft.run_prompts(self.state, lengths, max(0, cached + 1 - self.drafter.fed - self.missed))
        self.missed = 0
        logits = self.model.head(last)
        decide(self.state, logits)
        return self.result(0, (), logits[:, None])

    def step(self, length: int, k: int = 0) -> StepResult:
        """Run one decode step, or a round that drafts k tokens, whose rows have at most `length` positions decided."""
        begun, draft_probs = mark(self.device), None
        self.state.k, self.state.length = k, length + k
        caches = self.cached.upto(length + k)
        if k == 0:
            self.missed += 1
            drafted, logits = begun, self.prepared(decode_step)(self.model, caches, self.state)[:, None]
        else:
            parts = self.drafter, self.model, caches, self.state, self.missed, self.prepared
            drafted, logits, draft_probs = run_round(*parts)
            self.missed = 0
        return self.result(k, (begun, drafted, mark(self.device)), logits, draft_probs)

    def result(self, k: int, times: tuple, logits: Tensor, draft_probs: Tensor | None = None) -> StepResult:
        """What the host should read, after the drafter has looked at the state too. logits (B, k + 1, V)."""
        state, described = self.state, torch.empty(0)
        if self.likeliest is not None:
            tokens = state.out[:, : k + 1]
            described = describe(tokens, logits, state.kind, state.values, draft_probs, self.likeliest)
        if self.drafter is not None:
            self.drafter.look(state)
        times += (mark(self.device),) if times else ()
        return StepResult(k, times, state.out, state.accepted, state.overlap, state.has_match, described)

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
        lengths = {self.cached.attended(1 << i) for i in range(self.cached.S.bit_length() + 1)} if replayed else {2, S}
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
        uncounted round: medians, also kept in `costs`. For before a prefill, like `warm_up`."""
        assert 1 <= length < self.max_seq_length, f"{length} positions filled leave no room in {self.max_seq_length}"
        state, found = self.state, {k: [] for k in (0, *self.ks)}
        state.pos.fill_(length - 1), state.done.fill_(True)
        state.kind = sampling.kind
        state.values.copy_(sampling.values)
        for _, k in itertools.product(range(rounds + 1), found):
            self.missed = 0
            synchronize(self.device)
            step = self.step(length, k)
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
    likeliest: int | None = None,
) -> Iterator[tuple[int, int]]:
    """Decode a batch of independent prompts; yields (row, token id) as tokens are decided.

    Row i gets what its prompt alone would get with this seed (one number, or one a row). A row ends after a stop id
    (which is yielded), after max_new_tokens (one number, or one a row), or when the consumer adds it to `ended`. Of
    every prompt, the first `cached` tokens are known to stand in the engine's caches already, from an earlier call. All
    ranks of a divided model call this with the same arguments, and each yields the same tokens. With `likeliest` = N,
    timing.described says of every token what sampling.describe does.

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
    timing.described, engine.likeliest = [[] for _ in prompts], likeliest
    live, can_draft = list(range(len(prompts))), True

    begun = time.perf_counter()
    state.start(prompts, budgets, stop_ids, seeds, sampling)
    readback.send(engine.prefill(lengths, cached, longest))
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
            timing.prompt_tokens, timing.prefill_s = sum(lengths) - cached * len(prompts), now - begun
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
