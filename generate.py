"""Token ids in, token ids out: `python generate.py --checkpoint DIR --prompt "Once upon a time"`.

    decode                  the whole idea: prefill, then one token a step, for one prompt
    decode_step             advances a batch, a few fixed tensors, by one token in place
    compiled                the only call of torch.compile
    Engine                  slots for requests: add_request, step, abort; warm_up, calibrate
    generate, stream        independent prompts -> ids as they are decided; one prompt -> text

Read `decode` first; Engine gives the same tokens, for many requests at a time, drafted or compiled, and without waiting
for each token. This file knows token ids and nothing of text. decoding/ has slots, sampling and timing; model.py the
arithmetic; loading/ reads weights; speculative.py drafts. Run as a program, this file hands over to cli/.
"""

if __name__ == "__main__":  # before torch is imported: cli/ handles Ctrl-C and flags from the first moment on
    from cli.process import prepare

    prepare()
    from cli.start import main

    raise SystemExit(main())

import functools
import math
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor

import decoding.validation as validation
from decoding.logits import penalize_text, top_logprobs
from decoding.runner import ModelRunner, Rows, clear_positions, copy_positions
from decoding.sampling import INVALID, Sampling, sample, uniform
from decoding.scheduler import Launch, Request, Scheduler
from decoding.settings import DEFAULT_K
from decoding.slots import MAX_STOP_IDS, State
from decoding.timing import Readback, StepRecord, StepResult, Timing, mark, step_times
from decoding.warmup import calibrate, warm_up
from model import Caches, KVCache, Transformer, row_view
from speculative import Costs, CustomDraft, Drafter, DraftLength, run_round
from tp import lost_contact, ranks_of
from weights.compiling import compile_options, recompile_options
from weights.walker import batch_invariant_rows

PREFILL_CHUNK = 512  # tokens of a prompt per pass; bounds the memory of activations
PREFILL_COST = {"cpu": 16}  # tokens whose arithmetic takes as long as reading the weights; see `step` for a GPU
PROMPT_LOGITS = 2**24  # of a prompt, computed at once for log-probabilities: 64 MB


@torch.inference_mode()
def decode(
    model: Transformer,
    prompt: Sequence[int],
    *,
    sampling: Sampling,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    seed: int = 0,
    cache_type: type[KVCache] = KVCache,
) -> Iterator[int]:
    """Prefill the prompt, then decode one token a step: yields new ids up to a stop id, which comes last, or up to
    max_new_tokens. ValueError for a prompt that is empty or does not fit into the model's context."""
    prompt = [int(id) for id in prompt]
    stop_ids = frozenset(stop_ids)
    validation.check_lengths(model, [prompt], [max_new_tokens], model.config.max_seq_length)
    validation.check_settings(model, sampling, seed, stop_ids, max_stop_ids=math.inf)
    device = model.norm.weight.device
    max_length = len(prompt) + max_new_tokens
    caches = model.make_caches(1, max_length, cache_type)
    seeds = torch.tensor([seed], device=device)  # (1,)
    text = torch.tensor([prompt], device=device)  # (1, S) all tokens so far
    pos = torch.arange(len(prompt), device=device)  # (T,) those that no layer has seen: the prompt, then one token
    for length in range(len(prompt), max_length):
        caches.max_positions.fill_(length - 1)  # longrope rotates by the length of the text so far
        if model.config.rope_long and length == model.config.rope_original_length + 1:
            pos = torch.arange(length, device=device)  # and so all keys anew, once the text is a long one
        h = model.hidden(text[:, pos], pos, caches.slice_to(length))  # (1, T, D)
        logits = model.head(h[:, -1])  # (1, V)
        logits = penalize_text(logits, text, len(prompt), sampling)  # (1, V)
        pos = pos[-1:] + 1  # (1,)
        token = sampling.sample(logits, uniform(seeds, pos))  # (1,)
        if token.item() == INVALID:
            raise ValueError(f"position {length}: the model's logits are not finite")
        yield token.item()
        if token.item() in stop_ids:
            return
        text = torch.cat((text, token[:, None]), dim=1)  # (1, S + 1)


# ------------------------------------------------------------------------------------------ decode step


def decide(state: State, logits: Tensor) -> None:
    """Draw the next token of every row from logits (B, V) and advance; finished rows do not change."""
    processed = state.process_logits(logits[:, None], state.pos[:, None])  # (B, 1, V)
    token = sample(processed[:, 0], state.kind, state.values, uniform(state.seed, state.pos + 1))  # (B,)
    state.accepted.fill_(-1)
    token = state.broadcast(token)[:, None]  # (B, 1)
    state.record_logprobs(logits[:, None], processed, token)
    state.commit(token)


def decode_step(model: Transformer, caches: Caches, state: State) -> None:
    """One token for every row that is not done. A parked row runs behind all attended positions."""
    pos = state.pos[:, None]  # (B, 1)
    h = model.hidden(state.tokens.gather(1, pos), pos, caches)  # (B, 1, D)
    decide(state, model.head(h[:, 0]))


# ----------------------------------------------------------------------------------------------- engine


def compiled(function: Callable, device: torch.device, prompts: bool = False) -> Callable:
    """`function` as one graph with static shapes, except for dimensions marked dynamic. On a GPU steps are replayed as
    CUDA graphs; prompts have too many lengths for that."""
    options = compile_options(device, prompts)
    return torch.compile(function, fullgraph=True, dynamic=False, options=options, **recompile_options())


class Engine:
    """A model with caches and a State for up to B requests at a time, each of up to S positions. `add_request` adds
    one, `step` advances all; a request gets the tokens that it would get alone.

    With a drafter the engine runs rounds: the drafter proposes K tokens, one pass of the model verifies them.
    speculate_k is K, or "auto", which needs `calibrate`. `compile_prompts` defaults to `compile`. With `one_width`
    every step is a pass over K + 1 positions, drafted or not. Reuse an engine while shapes stay the same: `warm_up`
    compiles once. Engines may share a model; a drafter belongs to the engine made last. `kind`: KVCache or one of
    kv_8bit.py. `logits_processor` changes logits before sampling: see
    State.
    """

    def __init__(
        self, model: Transformer, batch_size: int, max_seq_length: int, *, compile: bool = False, drafter=None,
        speculate_k: int | str = DEFAULT_K, compile_prompts: bool | None = None, one_width: bool = False,
        logits_processor: Callable | None = None, logprobs: int | None = None, kind: type[KVCache] = KVCache,
    ):  # fmt: skip
        self.drafts, self.one_width = drafter is not None, one_width
        drafter = Drafter() if one_width and drafter is None else drafter
        self.drafter = drafter = CustomDraft(drafter) if drafter and not isinstance(drafter, Drafter) else drafter
        validation.check_draft_length(speculate_k, math.inf if drafter is None else drafter.max_draft_tokens, one_width)
        validation.check_logprobs(logprobs, model.config.vocab_size)
        self.speculate_k = speculate_k if drafter is not None else 0
        self.ks = () if drafter is None else drafter.draft_lengths(speculate_k)
        self.model, self.compile = model, compile
        self.batch_size, self.max_seq_length = batch_size, max_seq_length
        self.device, self.ranks = model.norm.weight.device, ranks_of(model)
        V, K = model.config.vocab_size, max(self.ks, default=0)  # a round at the context's end writes K positions more
        self.compile_prompts = compile if compile_prompts is None else compile_prompts
        prompts = functools.partial(compiled, device=self.device, prompts=True) if self.compile_prompts else None
        self.runner = ModelRunner(model, batch_size, max_seq_length + K, K + 1, compile, prompts, kind=kind)
        # Greedy text has the same bits with any drafter and beside any other request.
        num_rows = batch_size * (K + 1)
        self.identical = self.runner.attends_alike and self.ranks.world == 1 and num_rows <= batch_invariant_rows(model)
        self.chunk = PREFILL_CHUNK
        with torch.inference_mode(False):
            self.state = State(batch_size, self.runner.S, self.device, K, self.ranks, logits_processor, logprobs, V)
        self.runner.caches = self.runner.caches._replace(max_positions=self.state.max_positions)
        self.steps: dict[tuple, Callable] = {}  # compiled
        self.costs: Costs | None = None  # of steps and rounds, once `calibrate` has measured them
        self.costs_by_rows: dict[int, Costs] = {}
        self.draft_lag = 0  # tokens that a row may have received since the drafter last ran
        self.has_outgrown_draft = False  # has a text gone beyond the draft's context?
        self.runners = [self.runner]  # models with separate caches; prompts run through each
        if self.drafter is not None:
            self.drafter.owner = self
            self.drafter.setup(self.state, K, self.runner, self.maybe_compile)
            self.runners += [self.drafter.runner] if self.drafter.owns_cache else []
        self.views: dict[tuple[int, int], Rows] = {}
        self.scheduler, self.next_id = Scheduler(batch_size), 0
        self.requests: dict[int, Request] = {}  # by id, until they end
        self.draft_length: DraftLength | None = None
        self.readback = Readback(self.device, self.ranks.timeout_s)
        self.read_at = 0.0  # time of the last read

    @property
    def models(self) -> list[Transformer]:
        """The target, and the drafter's model, if it has one."""
        return [self.model] + ([self.drafter.model] if self.drafter and self.drafter.model else [])

    def maybe_compile(self, function: Callable, state: State, *static) -> Callable:
        """The function, or its compiled form for the state's kind and number of rows, and for `static`. A method is
        compiled once for all row views of its object."""
        if not self.compile:
            return function
        unbound, instance = getattr(function, "__func__", function), getattr(function, "__self__", None)
        key = (unbound, state.kind, len(state.pos), *static)
        if key not in self.steps:
            self.steps[key] = compiled(unbound, self.device)
        return self.steps[key] if instance is None else functools.partial(self.steps[key], instance)

    def rows(self, begin: int, end: int) -> Rows:
        """Slots [begin, end) as a batch: views of the engine's tensors."""
        if (begin, end) not in self.views:
            with torch.inference_mode(False):
                if (drafter := self.drafter) is not None:
                    drafter = row_view(drafter, begin, end)
                    drafter.runner = drafter.runner and drafter.runner.row_view(begin, end)
                rows = Rows(row_view(self.state, begin, end), self.runner.row_view(begin, end), drafter)
            self.views[begin, end] = rows
        self.views[begin, end].state.return_logprobs = self.state.return_logprobs
        return self.views[begin, end]

    # ---------------------------------------------------------------------------------------- requests

    def add_request(
        self, prompt: Sequence[int], *, sampling: Sampling, max_new_tokens: int, stop_ids: Iterable[int] = (),
        seed: int = 0, draft: bool = True, grammar=None, prompt_logprobs: int | None = None,
    ) -> int:  # fmt: skip
        """Add a prompt, which waits while all slots are busy; returns its id. `draft`: may its tokens be drafted?
        `grammar`: an object of its own that masks tokens (decoding/grammar.py), or None.
        `prompt_logprobs`: record in Request.prompt_logprobs the log-probabilities of the prompt's
        tokens and of so many likeliest ones.

        ValueError for an empty prompt, an unknown id, a prompt that does not fit, and too many stop
        ids."""
        prompt, stop_ids = list(prompt), frozenset(stop_ids)
        if self.drafter is not None and self.drafter.owner is not self:
            raise ValueError("the drafter belongs to an engine that was made later: give each engine its own")
        validation.check_lengths(self.model, [prompt], [max_new_tokens], self.max_seq_length)
        validation.check_settings(self.model, sampling, seed, stop_ids, MAX_STOP_IDS)
        validation.check_logprobs(prompt_logprobs, self.model.config.vocab_size)
        id, self.next_id = self.next_id, self.next_id + 1
        request = Request(id, prompt, sampling, max_new_tokens, stop_ids, seed, draft, grammar=grammar)
        request.num_prompt_logprobs = prompt_logprobs
        config = self.model.config
        if config.rope_long and len(prompt) <= config.rope_original_length:
            request.short_length = config.rope_original_length
        request.is_long = self.are_long(request)
        if self.drafter is not None and not self.requests:
            self.draft_length = DraftLength(self.speculate_k, self.costs)
        self.requests[request.id] = request
        self.scheduler.waiting.append(request)
        return request.id

    def are_long(self, request: Request) -> tuple[bool, ...]:
        """For each model with caches: does longrope take the request for a long text?"""
        configs = [runner.model.config for runner in self.runners]
        return tuple(bool(c.rope_long) and request.max_position >= c.rope_original_length for c in configs)

    def recompute(self, request: Request) -> None:
        """Compute a text anew that has outgrown longrope's short one, as transformers does (models/phi3/modeling_phi3,
        prepare_inputs_for_generation): all its positions rotate by the long factors. It costs a pass over the text."""
        slot = request.slot
        self.state.park(slot.index)
        request.short_length = None
        request.is_long = slot.is_long = self.are_long(request)
        request.is_active, request.is_recomputing = False, True
        request.num_computed = request.draft_lag = slot.num_draft = 0
        request.num_launched = len(request.tokens)  # steps launched since then decided nothing
        self.state.fill(slot.index, request)

    def abort(self, id: int) -> None:
        """End a request in any state; a finished one does not change."""
        try:
            if (request := self.requests.get(id)) is not None:
                self.finish(request, "abort")
        except BaseException:
            self.reset()
            raise

    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def finish(self, request: Request, reason: str, error: Exception | None = None) -> None:
        """Free the request's slot at once. Steps already launched do not change it any more."""
        request.finish_reason, request.error = reason, error
        if request.slot is not None:
            self.state.park(request.slot.index)
            num_scratch = (self.readback.lag + 2) * (max(self.ks, default=0) + 1) + PREFILL_CHUNK // 8
            self.scheduler.release(request, num_scratch)
        elif request in self.scheduler.waiting:
            self.scheduler.waiting.remove(request)
        self.requests.pop(request.id, None)

    @torch.inference_mode()
    def step(self) -> list[tuple[int, int]]:
        """Run prompts for at most the time of one chunk, then one decode step or round. Returns (request id, token) of
        the tokens decided since the last call; a GPU's are read a few steps late. A request whose prompt cannot run, or
        whose logits are not finite, ends alone, with the exception as its `error`."""
        try:
            events, budget, was_idle = [], self.chunk, not self.scheduler.decoding()
            lag = 0 if any(request.grammar for request in self.requests.values()) else self.readback.lag
            while budget > 0 and (request := self.next_prompt()) is not None:
                budget -= max(self.prefill(request), PREFILL_COST.get(self.device.type, PREFILL_CHUNK // 2))
                events += self.read(lag)
            if events and was_idle:
                return events  # first tokens should not wait for a step
            if requests := self.scheduler.decoding():
                step, launch = self.plan(requests)
                self.readback.send(self.run(*step), launch)
            return events + self.read(lag if requests else 0)
        except BaseException:
            self.reset()
            raise

    def reset(self) -> None:
        """End all requests after an interrupted step, whose decisions are unknown. Slots keep their positions, but not
        those of a draft's caches."""
        self.readback.waiting.clear(), self.scheduler.waiting.clear()
        for request in self.requests.values():
            request.finish_reason = request.finish_reason or "abort"
        self.requests.clear()
        for slot in self.scheduler.slots:
            self.state.park(slot.index)
            slot.ids, slot.num_draft, slot.num_written, slot.request = slot.cached_ids(), 0, self.runner.S, None
        self.draft_lag = 0

    def next_prompt(self) -> Request | None:
        """The request whose prompt runs next. A new one first gets its prefix from a slot that has it."""
        if (request := self.scheduler.prefilling()) is not None:
            return request
        if (admitted := self.scheduler.admit()) is None:
            return None
        request, source, num_shared = admitted
        request.started = time.perf_counter()
        self.state.fill(request.slot.index, request)
        slot = request.slot
        if source is not slot:
            copy_positions(self.runners, source.index, slot.index, num_shared)
        clear_positions(self.runners, slot.index, num_shared, slot.num_written)
        request.num_computed = request.num_reused = num_shared
        return request

    def prefill(self, request: Request) -> int:
        """Run the next chunk of a prompt through all models; returns its length. The last chunk decides the first
        token. A last token alone runs in the next step, beside other requests; but a round would draw it otherwise."""
        begin, slot = mark(self.device), request.slot
        num_tokens = min(self.chunk, request.num_positions - request.num_computed)
        end = request.num_computed + num_tokens
        request.is_active = end == request.num_positions
        if request.is_active:
            self.state.activate(slot.index, end)
            if 0 < request.num_computed == end - 1 and len(self.requests) > 1 and self.drafter is None:
                return 0
        state, target, drafter = self.rows(slot.index, slot.index + 1)
        try:
            h = target.prefill(state, request.num_computed, end, self.chunk)  # (1, T, D)
            if len(self.runners) > 1:
                draft_end = min(end, self.drafter.max_positions)
                if slot.num_draft < draft_end:
                    drafter.runner.prefill(state, slot.num_draft, draft_end, self.chunk)
                slot.num_draft = end  # nothing reads the draft's positions beyond its context
            self.record_prompt(request, h)
            request.num_computed = end
            if request.is_active:
                state.serve([(0, request)])
                decide(state, self.model.head(h[:, -1]))
        except (RuntimeError, ValueError) as error:
            if lost_contact(error):
                raise
            self.finish(request, "error", error)
            return num_tokens
        request.prefill_marks.append((begin, mark(self.device)))
        if request.is_active:
            request.num_launched = len(request.tokens) + 1
            self.readback.send(self.result(state, drafter, 0, ()), Launch([(0, request)]))
        return num_tokens

    def record_prompt(self, request: Request, h: Tensor) -> None:
        """Record, on request, log-probabilities of the prompt's tokens that follow h (1, T, D)."""
        begin = request.num_computed + 1
        ids = request.prompt[begin : begin + h.size(1)]
        if request.num_prompt_logprobs is None or request.is_recomputing or not ids:
            return
        ids = torch.tensor([ids], device=self.device)  # (1, T), or one fewer
        size = max(1, PROMPT_LOGITS // self.model.config.vocab_size)
        for part, next_ids in zip(h.split(size, dim=1), ids.split(size, dim=1)):
            logits = self.model.head(part[:, : next_ids.size(1)])
            records = top_logprobs(logits, next_ids, request.num_prompt_logprobs)
            request.prompt_logprobs += records[0].tolist()

    def plan(self, requests: list[Request]) -> tuple[tuple, Launch]:
        """(arguments of `run` for the next step of these requests, its Launch)."""
        at = time.perf_counter()
        begin, end = self.row_range([request.slot.index for request in requests])
        self.costs = self.costs_by_rows.get(1 if end - begin == 1 else self.batch_size, self.costs)
        if self.draft_length is not None:
            self.draft_length.costs = self.costs
        expected = self.drafter.expect(requests, self.readback.unread) if self.drafter else []
        draft_s = time.perf_counter() - at
        k = self.draft_length.choose(expected) if self.one_width or any(row != [] for row in expected) else 0
        length = max(request.num_positions for request in requests) + self.readback.unread
        self.update_draft_lags(requests, k)
        rows = self.rows(begin, end)
        for request in requests:
            request.num_launched += 1
        launch = Launch([(request.slot.index - begin, request) for request in requests], at, draft_s)
        rows.state.serve(launch.requests)
        return (rows, min(length, self.max_seq_length), k), launch

    def update_draft_lags(self, requests: list[Request], k: int) -> None:
        """Bound the decided positions that the draft's cache lacks before a step that drafts k tokens, and after it."""
        fitting = [request for request in requests if self.drafter is None or self.drafter.fits(request)]
        # A drafter lacks at most the tokens since the prompt. A row beyond its context needs none of them.
        longest = max((len(request.tokens) for request in fitting), default=0)
        self.draft_lag = min(self.draft_lag, longest + self.readback.unread)
        num_behind = self.drafter.num_input_tokens - 1 if len(self.runners) > 1 else 0  # after a round
        for request in requests:
            request.draft_lag += 1
        for request in fitting:
            request.draft_lag = num_behind + (0 if k else self.draft_lag + 1)
        if len(fitting) < len(requests) and not self.has_outgrown_draft:
            self.has_outgrown_draft = True
            limit = self.drafter.max_positions
            print(f"the draft's context ends at {limit} positions; texts decode plainly beyond it", file=sys.stderr)

    def row_range(self, slots: Sequence[int]) -> tuple[int, int]:
        """The range of rows for these slots. Compiled steps have one row or all; a CUDA graph has fixed addresses."""
        begin, end = min(slots), max(slots) + 1
        if self.compile and (end - begin > 1 or (begin and self.runner.uses_cuda_graphs)):
            return 0, self.batch_size
        return begin, end

    def run(self, rows: Rows, length: int, k: int = 0, other: Tensor | None = None) -> StepResult:
        """Run one decode step, or a round that drafts k tokens, on rows of at most `length` decided positions. `other`
        (B, k) replaces the drafted tokens."""
        state, target, drafter = rows
        start = draft_end = mark(self.device)
        state.k, state.length = k, length + k
        caches = target.slice_to(length + k)
        if k == 0:
            self.draft_lag += 1
            self.maybe_compile(decode_step, state)(self.model, caches, state)
        else:
            draft_end = run_round(drafter, self.model, caches, state, self.draft_lag, self.maybe_compile, other)
            self.draft_lag = 0
        return self.result(state, drafter, k, (start, draft_end, mark(self.device)))

    def result(self, state: State, drafter: Drafter | None, k: int, times: tuple) -> StepResult:
        """Update the drafter, and collect the tensors that the host reads."""
        if drafter is not None:
            drafter.update(state)
        logprobs = (state.top_logprobs, state.token_probs) if state.return_logprobs else ()
        times = (*times, mark(self.device)) if times else ()
        return StepResult(k, times, state.out, state.accepted, state.overlap, state.can_draft, *logprobs)

    # ----------------------------------------------------------------------------------------- results

    def read(self, max_waiting: int) -> list[tuple[int, int]]:
        """(request id, token) of all launched steps except the last `max_waiting`."""
        events = []
        while len(self.readback.waiting) > max_waiting:
            launch, step = self.readback.receive()
            now = time.perf_counter()
            running = [(row, request) for row, request in launch.requests if request.finish_reason is None]
            record = None
            if step.times:
                seconds = now - max(launch.at, self.read_at)
                positions = tuple(request.num_positions for _, request in running)
                draft_s, verify_s = step_times(step)
                draft_s += launch.draft_s
                record = StepRecord(step.k, seconds, draft_s, verify_s, positions, self.costs)
            if step.k:
                drafted_rows = [row for row, _ in running if step.accepted[row] >= 0]
                self.draft_length.drafted(len(drafted_rows), max(1, len(running)))
                for row in drafted_rows:
                    self.drafter.observe(step.overlap[row][0])
            for row, request in running:
                request.record(record, now)
                events += [(request.id, id) for id in request.receive(step, row, self.draft_length)]
                if request.ending is not None:
                    self.finish(request, *request.ending)
                elif request.outgrows_short_text:
                    self.recompute(request)
            self.read_at = now
        return events

    # --------------------------------------------------------------------------- before requests come

    def warm_up(self, kind: str) -> float:
        """Compile the steps for `kind`, and prompts; returns seconds. Call it before the first request."""
        return warm_up(self, kind)

    def calibrate(self, sampling: Sampling, length: int, rounds: int = 7) -> Costs:
        """Measure the cost of steps with `length` positions filled. Call it before the first request."""
        self.costs_by_rows = calibrate(self, sampling, length, rounds)
        self.costs = self.costs_by_rows[self.batch_size]
        return self.costs

    def clear(self) -> None:
        """Park all rows, and empty all slots."""
        self.state.pos.fill_(self.state.parking), self.state.done.fill_(True)
        self.draft_lag, self.draft_length = 0, None
        for slot in self.scheduler.slots:
            slot.ids, slot.num_draft, slot.num_written = [], 0, self.runner.S


# ------------------------------------------------------------------------------------------------- loop


def generate(
    model: Transformer, prompts: Sequence[Sequence[int]], *, sampling: Sampling | Sequence[Sampling],
    max_new_tokens: int | Sequence[int], stop_ids: Iterable[int] = (), seed: int | Sequence[int] = 0,
    max_seq_length: int | None = None, drafter=None, speculate_k: int | str = DEFAULT_K, engine: Engine | None = None,
    timing: Timing | None = None, logits_processor: Callable | None = None,
) -> Iterator[tuple[int, int]]:  # fmt: skip
    """Decode independent prompts; yields (row, token id) as tokens are decided.

    Row i gets the tokens that its prompt alone would get with this seed and sampling (one value, or one per row). It
    ends after a stop id, which is yielded, or after max_new_tokens (one number, or one per row). Prompts wait if there
    are more than slots. All ranks of a sharded model call this with the same arguments and yield the same tokens.

    With a `drafter` (speculative.py), rounds of speculate_k drafted tokens keep the output: greedy tokens are equal,
    sampled tokens have the same distribution. An `engine` has its own drafter, and may run other requests at the same
    time; without one, an eager engine is made. `timing` receives the rows' requests. A seed (one
    number, or one per row) is any int64; -1 is a seed like the others, because only cli/ and
    scripts/ draw random ones.

    logits_processor(logits (B, T, V), tokens (B, S), pos (B, T)) returns the logits that the tokens after `pos` are
    drawn from, for plain decoding, drafts and verification alike. Its result for a position may depend on the tokens up
    to there, and not on T.

    Raises ValueError before anything runs if a prompt is empty or holds an id outside the vocabulary, or if prompt and
    new tokens exceed max_seq_length (default: the engine's, or the model's context); and while running if the model's
    logits are not finite. Beyond the context of a drafter's model a row decodes plainly.
    """
    has_options = drafter is not None or logits_processor is not None
    assert engine is None or not has_options, "the engine was made with its own drafter and logits_processor"
    max_seq_length = (engine or model.config).max_seq_length if max_seq_length is None else max_seq_length
    budgets = validation.integer_per_row("max_new_tokens", max_new_tokens, len(prompts))
    seeds = validation.integer_per_row("seed", seed, len(prompts))
    samplings = validation.value_per_row("sampling", sampling, len(prompts))
    validation.check_lengths(model, prompts, budgets, max_seq_length)
    if engine is None:
        max_length = max(len(prompt) + budget for prompt, budget in zip(prompts, budgets))
        options = {"speculate_k": speculate_k, "logits_processor": logits_processor}
        engine = Engine(model, len(prompts), max_length, drafter=drafter, **options)
    else:
        validation.check_engine(engine, model, max_seq_length)
    stop_ids = frozenset(stop_ids)
    num_yielded, ids = [0] * len(prompts), range(engine.next_id, engine.next_id + len(prompts))
    try:
        for prompt, sampling, budget, seed in zip(prompts, samplings, budgets, seeds):
            engine.add_request(prompt, sampling=sampling, max_new_tokens=budget, stop_ids=stop_ids, seed=seed)
        requests = [engine.requests[id] for id in ids]
        if timing is not None:
            timing.requests += requests
        while any(r.finish_reason is None or n < len(r.tokens) for r, n in zip(requests, num_yielded)):
            if [len(request.tokens) for request in requests] == num_yielded:  # else another caller's step decided some
                engine.step()
            for row, request in enumerate(requests):
                while num_yielded[row] < len(request.tokens):
                    num_yielded[row] += 1
                    yield row, request.tokens[num_yielded[row] - 1]
                if (error := request.error) is not None:
                    raise ValueError(f"row {row}, {error}") if isinstance(error, ValueError) else error
    finally:
        for id in ids:
            engine.abort(id)


def stream(model: Transformer, tokenizer, prompt: str, *, sampling: Sampling | None = None, **options) -> Iterator[str]:
    """Decode one prompt as text, in pieces of complete characters, without the stop token. `options` are those of
    `generate`, with defaults of 200 new tokens and temperature 0.8."""
    options = {"max_new_tokens": 200, **options, "stop_ids": frozenset(options.get("stop_ids", tokenizer.stop_ids))}
    decoder = tokenizer.stream(continues=True)
    for _, id in generate(model, [tokenizer.encode(prompt)], sampling=sampling or Sampling(0.8), **options):
        yield "" if id in options["stop_ids"] else decoder.feed(id)
    yield decoder.flush()
