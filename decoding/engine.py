"""An engine: up to B requests at a time on one model, each of which gets the tokens that it would
get alone.

    Engine                  slots for requests: add_request, step, abort; warm_up, calibrate

generate.decode is the same loop for one prompt and nothing else; read it first. `Engine.step` is
this file's center: it runs the prompts that wait, plans one step for the requests that decode,
launches it, and reads what earlier steps decided. speculative.decode_round is the step on the
device. state.py has the tensors that it changes, scheduler.py the requests and slots, runner.py a
model with its caches, readback.py how decisions reach the host.
"""

import functools
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

import decoding.validation as validation
from decoding.costs import Costs, costs_at
from decoding.draft_length import DraftLength
from decoding.errors import UserError
from decoding.logits import top_logprobs
from decoding.memory import DraftPlan, Memory
from decoding.meter import Decided, Meter
from decoding.options import EngineOptions
from decoding.readback import Readback, StepResult, timestamp
from decoding.runner import PREFILL_CHUNK, ModelRunner, Rows, clear_positions, copy_positions
from decoding.sampling import Sampling
from decoding.scheduler import Request, Scheduler, Slot, Status
from decoding.state import MAX_STOP_IDS, State
from decoding.statistics import Timing
from decoding.warmup import calibrate, lengths_to_calibrate, warm_up
from drafts.base import CustomDraft, Draft, Drafter
from model import KVCache, Transformer, row_view
from speculative import Plan, decide, decode_round
from tp import lost_contact, ranks_of
from weights.compiling import StepCompiler, compiled
from weights.walker import batch_invariant_rows

# The least that a prefill chunk costs, in tokens: reading the weights dominates a shorter one. By
# device type; other devices take the default in `prefill`.
PREFILL_COST = {"cpu": 16}
PROMPT_LOGITS = 2**24  # of a prompt, computed at once for log-probabilities: 64 MB

# ----------------------------------------------------------------------------------------- engine


def cache_class(cache_type: str | type[KVCache]) -> type[KVCache]:
    """The class of caches for the `cache_type` of EngineOptions."""
    if cache_type == "model":
        return KVCache
    if isinstance(cache_type, str):
        from decoding.kv_8bit import CACHE_TYPES

        return CACHE_TYPES[cache_type]
    return cache_type


def as_drafter(drafter) -> Drafter:
    """A drafter in the engine's own form; one that proposes nothing in place of none."""
    if drafter is None:
        return Drafter()
    return drafter if isinstance(drafter, Drafter) else CustomDraft(drafter)


class Step(NamedTuple):
    """One decode step or round, or the end of a prompt, which decides a first token."""

    requests: list[tuple[int, Request]]  # (row, request) of those that it advances
    rows: Rows  # the slots that run
    length: int  # a bound on the decided positions of a row before the step
    k: int = 0  # drafted tokens; 0: a plain step
    begin_s: float = 0.0  # time.perf_counter as the host began to plan it
    draft_s: float = 0.0  # seconds that the host then drafted
    plans: Sequence[DraftPlan] = ()  # one for each memory of its requests
    runs_model: bool = True  # does the drafter's model run?
    costs: Costs | None = None  # of all its rows

    @property
    def suffix_requests(self) -> frozenset[Request]:
        """The requests that take a suffix draft instead of the model's."""
        return frozenset().union(*(plan.suffix_requests for plan in self.plans))


class Engine:
    """A model with caches and a State for up to B requests at a time, each of up to S positions.
    `add_request` adds one, `step` advances all; a request gets the tokens that it would get alone.

    With a drafter the engine runs rounds: the drafter proposes K tokens, one pass of the model
    verifies them. Keep an engine while its shapes stay the same: `warm_up` compiles once. Engines
    can share a model. A drafter is owned by the last engine that was made with it. `changes`
    override fields of `options`.
    """

    def __init__(
        self,
        model: Transformer,
        batch_size: int,
        max_seq_length: int,
        options: EngineOptions = EngineOptions(),  # noqa: B008, frozen
        drafter=None,
        **changes,
    ):
        self.options = options = replace(options, **changes)
        validation.check_count("batch_size", batch_size, 1)
        validation.check_count("max_seq_length", max_seq_length, 1)
        self.model = model
        self.batch_size = batch_size
        self.max_seq_length = max_seq_length
        self.device = model.norm.weight.device
        self.ranks = ranks_of(model)
        self.compile = self.device.type == "cuda" if options.compile is None else options.compile
        self.compile_prompts = (
            self.compile if options.compile_prompts is None else options.compile_prompts
        )
        self.has_drafter = drafter is not None
        self.runs_rounds = self.has_drafter or options.fixed_width_steps
        self.drafter = as_drafter(drafter)
        self.speculate_k = options.speculate_k if self.runs_rounds else 0
        self.ks = self.drafter.draft_lengths(self.speculate_k)
        if self.speculate_k and not self.ks:
            limit = self.drafter.max_draft_tokens
            raise UserError(
                f"speculate_k = {self.speculate_k}: this draft has at most {limit} tokens a round"
            )
        self.max_k = max(self.ks, default=0)
        # Of steps that `warm_up` compiles and `calibrate` measures. Others compile when needed, and
        # their costs are taken to lie between, in proportion.
        self.row_counts = sorted({1, batch_size})
        validation.check_logprobs(options.logprobs, model.config.vocab_size)
        self.maybe_compile = StepCompiler(self.device, self.compile)
        self._make_caches()
        self.chunk = self.runner.chunk
        self.runners = [self.runner]  # models with separate caches; prompts run through each
        self.drafter.owner = weakref.ref(self)  # a cycle would keep both until a collection
        self.memories = self.drafter.memories
        self.memories.shared.draft_length = None  # costs are this engine's
        self.drafter.setup(self.state, self.max_k, self.runner, self.maybe_compile)
        if self.drafter.owns_cache:
            self.runners.append(self.drafter.runner)
        self.views: dict[tuple[int, int], Rows] = {}
        cache = cache_class(options.cache_type)
        self.scheduler = Scheduler(batch_size, cache.keeps_prefixes)
        self.next_id = 0
        self.requests: dict[int, Request] = {}  # by id, until they end
        # Of the step planned last, once `calibrate` has measured the costs of steps and rounds, by
        # their number of rows and attended length.
        self.costs: Costs | None = None
        self.measured_costs: dict[int, dict[int, Costs]] = {}
        self.has_outgrown_draft = False  # has a text gone beyond the draft's context?
        self.readback = Readback(self.device, self.ranks.timeout_s)
        self.meter = Meter(self.drafter, self.runs_rounds)

    def _make_caches(self) -> None:
        """The runner with the model's caches, and the State. The caches hold K extra
        positions, because a round may run past the context's end."""
        options = self.options
        compile_prompts = None
        if self.compile_prompts:
            compile_prompts = functools.partial(compiled, device=self.device, prompts=True)
        self.runner = ModelRunner(
            self.model,
            self.batch_size,
            self.max_seq_length,
            slack=self.max_k + 1,
            compile=self.compile,
            compile_prompts=compile_prompts,
            cache_type=cache_class(options.cache_type),
        )
        self.runner.draft_cache_type = cache_class(options.cache_type_for_drafts())
        with torch.inference_mode(False):
            self.state = State(
                self.batch_size,
                self.runner.S,
                self.device,
                self.max_k,
                self.ranks,
                options,
                self.model.config.vocab_size,
            )
        # Is greedy output bitwise equal regardless of the drafter and of what else is in the batch?
        num_rows = self.batch_size * (self.max_k + 1)
        has_invariant_rows = num_rows <= batch_invariant_rows(self.model)
        is_alone = self.ranks.world == 1
        self.identical = self.runner.attends_alike and is_alone and has_invariant_rows

    @property
    def models(self) -> list[Transformer]:
        """The target, and the drafter's model, if it has one."""
        draft = self.drafter.model
        return [self.model] if draft is None else [self.model, draft]

    def rows(self, begin: int, end: int) -> Rows:
        """Slots [begin, end) as a batch: views of the engine's tensors."""
        if (begin, end) not in self.views:
            with torch.inference_mode(False):
                drafter = self.drafter.row_view(begin, end)
                state = row_view(self.state, begin, end)
                self.views[begin, end] = Rows(state, self.runner.row_view(begin, end), drafter)
        rows = self.views[begin, end]
        rows.state.return_logprobs = self.state.return_logprobs
        return rows

    # ------------------------------------------------------------------------------------ requests

    def add_request(
        self,
        prompt: Sequence[int],
        *,
        sampling: Sampling,
        max_new_tokens: int,
        stop_ids: Iterable[int] = (),
        seed: int = 0,
        draft: bool = True,
        grammar=None,
        prompt_logprobs: int | None = None,
    ) -> int:
        """Add a prompt, which waits while all slots are busy; returns its id.
        `draft`: whether its tokens may be drafted.
        `grammar`: an object of its own that masks tokens (decoding/grammar.py), or None.
        `prompt_logprobs`: record in Request.prompt_logprobs the log-probability of each prompt
        token and of this many top tokens.

        UserError for an empty prompt, an unknown id, a prompt that does not fit, and too many stop
        ids."""
        if self.drafter.owner() is not self:
            raise UserError(
                "the drafter belongs to an engine that was made later: give each engine its own"
            )
        prompt = list(prompt)
        stop_ids = frozenset(stop_ids)
        validation.check_lengths(self.model, [prompt], [max_new_tokens], self.max_seq_length)
        validation.check_settings(self.model, sampling, seed, stop_ids, MAX_STOP_IDS)
        validation.check_logprobs(prompt_logprobs, self.model.config.vocab_size)
        request = Request(
            self.next_id,
            prompt,
            sampling,
            max_new_tokens,
            stop_ids,
            seed,
            draft,
            grammar,
            prompt_logprobs,
        )
        self.next_id += 1
        # The acceptance so far stays valid, unless another K was set since.
        shared = self.memories.shared
        learned = shared.draft_length
        if learned is None or (learned.k != self.speculate_k and not self.requests):
            shared.draft_length = DraftLength(self.speculate_k, self.costs)
        self.memories.assign(request, self.requests.values())
        self.requests[request.id] = request
        self.scheduler.add(request)
        return request.id

    def abort(self, id: int) -> None:
        """End a request in any state; a finished one does not change."""
        try:
            if id in self.requests:
                self.finish(self.requests[id], "abort")
        except BaseException:
            self.reset()
            raise

    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        sampling: Sampling | Sequence[Sampling],
        max_new_tokens: int | Sequence[int],
        stop_ids: Iterable[int] = (),
        seed: int | Sequence[int] = 0,
        timing: Timing | None = None,
    ) -> Iterator[tuple[int, int]]:
        """Decode independent prompts; yields (row, token id) as tokens are decided. Sampling,
        max_new_tokens and seed are one value, or one per row.

        Row i gets the tokens that its prompt alone would get, up to a stop id, which comes last.
        Prompts wait while all slots are busy, and other requests may run beside them. All ranks of
        a sharded model call this with the same arguments. `timing` receives the rows' requests.
        UserError before anything runs for a prompt that `add_request` refuses, and while running
        for a row whose logits are not finite."""
        samplings = validation.value_per_row("sampling", sampling, len(prompts))
        budgets = validation.value_per_row("max_new_tokens", max_new_tokens, len(prompts))
        seeds = validation.value_per_row("seed", seed, len(prompts))
        validation.check_lengths(self.model, prompts, budgets, self.max_seq_length)
        stop_ids = frozenset(stop_ids)
        ids = range(self.next_id, self.next_id + len(prompts))
        try:
            for prompt, sampling, budget, seed in zip(prompts, samplings, budgets, seeds):
                self.add_request(
                    prompt, sampling=sampling, max_new_tokens=budget, stop_ids=stop_ids, seed=seed
                )
            requests = [self.requests[id] for id in ids]
            if timing is not None:
                timing.requests += requests
            num_yielded = [0] * len(requests)
            is_finished = False
            while not is_finished:
                is_finished = all(request.finish_reason is not None for request in requests)
                for row, request in enumerate(requests):
                    for id in request.tokens[num_yielded[row] :]:
                        num_yielded[row] += 1
                        yield row, id
                    if isinstance(request.error, UserError):
                        raise UserError(f"row {row}, {request.error}")
                    if request.error is not None:
                        raise request.error
                if not is_finished:
                    self.step()
        finally:
            for id in ids:
                self.abort(id)

    def finish(self, request: Request, reason: str) -> None:
        """End a request and free its slot at once. Steps in flight no longer advance the slot, but
        may still write positions past its text."""
        request.finish_reason = reason
        request.status = Status.FINISHED
        if request.slot is None:
            self.scheduler.waiting.remove(request)
        else:
            self.state.park(request.slot.index)
            # At least what `padded_length` adds to a chunk.
            num_padding = max(PREFILL_CHUNK, self.chunk) // 8
            # Positions past the text that steps in flight may write, and the step that decided its
            # end; one more step to spare.
            num_written = (self.readback.host_lag + 2) * (self.max_k + 1)
            self.scheduler.release(request, num_written + num_padding)
        del self.requests[request.id]

    @torch.inference_mode()
    def step(self) -> list[tuple[int, int]]:
        """Run prompts until they have taken about one chunk, then one decode step or round. Returns
        (request id, token) of the tokens decided since the last call; a GPU's are read a few steps
        late. A request whose prompt cannot run, or whose logits are not finite, ends alone, with
        the exception as its `error`."""
        try:
            was_idle = not self.scheduler.decoding()
            events = []
            budget = self.chunk
            while budget > 0 and (request := self.next_prompt()) is not None:
                budget -= self.prefill(request)
                events += self.read(self.max_waiting())
            if events and was_idle:
                return events  # first tokens should not wait for a step
            requests = self.scheduler.decoding()
            if not requests:
                return events + self.read(0)
            begin_s = time.perf_counter()
            plans = self.plan_drafts(requests)
            if any(plan.k for plan in plans) and self.lacks_positions(requests):
                events += self.read(0)
                requests = self.scheduler.decoding()
                if not requests:
                    return events
                for request in requests:
                    self.prefill_draft(request.slot, request.num_positions - 1)
            step = self.plan(requests, plans, begin_s)
            result = self.run(step.rows, step.length, step.k, step.runs_model)
            self.readback.send(result, step)
            return events + self.read(self.max_waiting())
        except Exception as error:
            self.reset(error)
            raise
        except BaseException:
            self.reset()
            raise

    def max_waiting(self) -> int:
        """How many launched steps may still be unread when the next one is launched; none with a
        grammar, whose masks depend on every token so far."""
        has_grammar = any(request.grammar for request in self.requests.values())
        return 0 if has_grammar else self.readback.host_lag

    def reset(self, error: Exception | None = None) -> None:
        """End all requests after an interrupted step, whose decisions are unknown, with the error
        that interrupted it. Slots keep their cached prefixes for reuse, except in the draft's own
        cache."""
        self.readback.clear()
        self.scheduler.waiting.clear()
        for request in self.requests.values():
            request.finish_reason = request.finish_reason or "abort"
            request.status = Status.FINISHED
            request.error = request.error or error
        self.requests.clear()
        for slot in self.scheduler.slots:
            self.state.park(slot.index)
            slot.num_draft = 0
            slot.store(slot.cached_ids(), num_written=self.runner.S)

    def next_prompt(self) -> Request | None:
        """The request whose prompt runs next. A new one first gets its prefix from a slot that has
        it."""
        request = self.scheduler.prefilling()
        if request is not None:
            return request
        admitted = self.scheduler.admit()
        if admitted is None:
            return None
        request, source, num_shared = admitted
        slot = request.slot
        request.started = time.perf_counter()
        self.state.fill(slot.index, request)
        if source is not slot:
            copy_positions(self.runners, source.index, slot.index, num_shared)
        clear_positions(self.runners, slot.index, num_shared, slot.num_written)
        request.num_computed = num_shared
        request.num_finite = num_shared
        request.num_reused = num_shared
        return request

    def prefill(self, request: Request) -> int:
        """Run the next chunk of a prompt through all models; returns its cost in tokens. The last
        chunk decides the first token. If a prefix was reused and only the prompt's last token is
        left, it joins the next decode step, provided that there are other requests. An engine that
        runs rounds does not do this: a round may take the first token from a draft instead."""
        begin = timestamp(self.device)
        slot = request.slot
        end = min(request.num_computed + self.chunk, request.num_positions)
        min_cost = PREFILL_COST.get(self.device.type, PREFILL_CHUNK // 2)
        cost = max(end - request.num_computed, min_cost)
        is_last_chunk = end == request.num_positions
        if is_last_chunk:
            request.status = Status.DECODING
            self.state.activate(slot.index, end)
            lacks_one = request.num_computed == end - 1
            if lacks_one and end > 1 and len(self.requests) > 1 and not self.runs_rounds:
                return 0  # nothing ran
        plans = [DraftPlan(request.memory, (request,))]
        step = Step([(0, request)], self.rows(slot.index, slot.index + 1), end, plans=plans)
        state, target, _ = step.rows
        try:
            h = target.prefill(state.tokens, request.num_computed, end, self.chunk)  # (1, T, D)
            self.prefill_draft(slot, end)
            self.record_prompt(request, h)
            request.num_computed = end
            if is_last_chunk:
                state.length = end
                state.prepare_step(step.requests)
                decide(state, self.model.head(h[:, -1:]))
        except (RuntimeError, ValueError) as error:
            if lost_contact(error):
                raise
            request.error = error
            self.finish(request, "error")
            return cost
        request.prefill_times.append((begin, timestamp(self.device)))
        if is_last_chunk:
            request.num_launched = len(request.tokens) + 1
            self.readback.send(self.result(step.rows, k=0), step)
        return cost

    def prefill_draft(self, slot: Slot, end: int) -> None:
        """Run the positions up to `end` that the draft's own cache lacks, as far as the draft's
        context reaches."""
        if len(self.runners) == 1:
            return
        draft_end = min(end, self.drafter.max_positions)
        if slot.num_draft < draft_end:
            state, _, drafter = self.rows(slot.index, slot.index + 1)
            drafter.runner.prefill(state.tokens, slot.num_draft, draft_end, self.chunk)
        slot.num_draft = max(slot.num_draft, end)

    def lacks_positions(self, requests: list[Request]) -> bool:
        """Does the draft's own cache lack positions that a round of these requests reads?"""
        if len(self.runners) == 1 or not self.drafter.runs_model:
            return False
        return any(request.is_draft_behind and self.drafter.fits(request) for request in requests)

    def record_prompt(self, request: Request, h: Tensor) -> None:
        """Record, on request, log-probabilities of the prompt's tokens that follow h (1, T, D)."""
        begin = request.num_computed + 1
        ids = request.prompt[begin : begin + h.size(1)]  # one fewer at the prompt's end
        if request.num_prompt_logprobs is None or not ids:
            return
        h = h[:, : len(ids)]
        ids = torch.tensor([ids], device=self.device)  # (1, T)
        size = max(1, PROMPT_LOGITS // self.model.config.vocab_size)
        for part, next_ids in zip(h.split(size, dim=1), ids.split(size, dim=1)):
            logits = self.model.head(part)  # (1, size, V)
            records = top_logprobs(logits, next_ids, request.num_prompt_logprobs)
            request.prompt_logprobs += records[0].tolist()

    def costs_of(self, num_rows: int, length: int) -> Costs | None:
        """Costs of steps of so many rows at this length; those that were set if none were
        measured."""
        if not self.measured_costs:
            return self.costs
        attended = self.runner.bucket_length(length)
        costs_by_rows = {
            measured_rows: costs_at(costs_by_length, attended)
            for measured_rows, costs_by_length in self.measured_costs.items()
        }
        return costs_at(costs_by_rows, num_rows)

    def plan_drafts(self, requests: list[Request]) -> list[DraftPlan]:
        """What the requests of each memory draft in the next step, as if those of others were not
        there. Which other rows run, and how far they are, may depend on numbers that a request
        shares with them: one that learns alone counts the costs of a full batch at its own
        length."""
        begin, end = self.row_range([request.slot.index for request in requests])
        self.costs = self.costs_of(end - begin, self.max_length(requests))
        by_memory: dict[Memory, list[Request]] = {}
        for request in requests:
            by_memory.setdefault(request.memory, []).append(request)
        if self.options.fixed_width_steps or not self.ks:
            return [DraftPlan(*group, self.max_k, self.costs) for group in by_memory.items()]
        plans = [self.plan_draft(*group) for group in by_memory.items()]
        drafting = [plan for plan in plans if plan.k]
        self.drafter.runs_model = not drafting or any(plan.runs_model for plan in drafting)
        self.drafter.suffix_requests = frozenset().union(*(plan.suffix_requests for plan in plans))
        return plans

    def plan_draft(self, memory: Memory, requests: list[Request]) -> DraftPlan:
        """What the requests of one memory draft."""
        unread = sum(
            plan.k + 1
            for *_, step in self.readback.waiting
            for plan in step.plans
            if plan.memory is memory
        )
        costs = self.costs
        if not memory.is_shared:
            length = min(requests[0].num_positions + unread, self.max_seq_length)
            costs = self.costs_of(self.batch_size, length)
        if memory.draft_length is None:
            memory.draft_length = DraftLength(self.speculate_k, costs)
        memory.draft_length.costs = costs
        k = self.drafter.choose_k(requests, unread, memory.draft_length)
        drafter = self.drafter
        return DraftPlan(memory, requests, k, costs, drafter.suffix_requests, drafter.runs_model)

    def max_length(self, requests: list[Request]) -> int:
        """An upper bound on the decided positions of these requests."""
        length = max(request.num_positions for request in requests) + self.readback.unread
        return min(length, self.max_seq_length)

    def plan(self, requests: list[Request], plans: list[DraftPlan], begin_s: float) -> Step:
        """The next step of these requests, which drafts as planned. The host began to plan drafts
        at `begin_s`."""
        begin, end = self.row_range([request.slot.index for request in requests])
        draft_s = time.perf_counter() - begin_s
        k = max(plan.k for plan in plans)
        for request in requests:
            request.num_launched += 1
            has_run = k > 0 and self.drafter.runs_model
            request.is_draft_behind = not has_run or request in self.drafter.suffix_requests
            if self.drafter.owns_cache and not self.drafter.fits(request):
                self.has_outgrown_draft = True
        rows = self.rows(begin, end)
        running = [(request.slot.index - begin, request) for request in requests]
        limits = {request: plan.k for plan in plans for request in plan.requests}
        rows.state.prepare_step(running, limits)
        return Step(
            running,
            rows,
            self.max_length(requests),
            k,
            begin_s,
            draft_s,
            plans,
            self.drafter.runs_model,
            self.costs,
        )

    def row_range(self, slots: Sequence[int]) -> tuple[int, int]:
        """The range of rows that a step for these slots runs. A compiled step runs one row or the
        full batch. A CUDA graph has fixed addresses, so its single row is always row 0."""
        begin = min(slots)
        end = max(slots) + 1
        if self.compile and (end - begin > 1 or (begin and self.runner.uses_cuda_graphs)):
            return 0, self.batch_size
        return begin, end

    def run(
        self,
        rows: Rows,
        length: int,
        k: int = 0,
        runs_model: bool = True,
        forced_tokens: Tensor | None = None,
    ) -> StepResult:
        """Run one step on rows of at most `length` decided positions. It drafts k tokens, by the
        drafter's model or without; `forced_tokens` (B, k) replaces them."""
        state, target, _ = rows
        start = drafted = timestamp(self.device)
        state.length = length + k
        draft = ()
        if k > 0:
            tokens, probs = self.propose(rows, Plan(k, length, runs_model))
            drafted = timestamp(self.device)
            draft = (tokens if forced_tokens is None else forced_tokens, probs)
            state.write_masks(draft[0])
        step = self.maybe_compile(decode_round, state, k)
        step(self.model, target.slice_to(length + k), state, *draft)
        return self.result(rows, k, (start, drafted, timestamp(self.device)))

    def propose(self, rows: Rows, plan: Plan) -> Draft:
        """The drafter's proposal, cut off in each row where its draft ends."""
        state, _, drafter = rows
        tokens, q = drafter.propose(state, plan)
        num_drafted = tokens.size(1)
        assert num_drafted == plan.k, f"{num_drafted} tokens were drafted instead of {plan.k}"
        if not state.all_draft or drafter.max_positions < state.parked_pos:
            may_draft = drafter.rows_to_draft(state, plan.k)  # (B, K)
            q = torch.where(may_draft[..., None], q, 0)
        return Draft(tokens, q)

    def result(self, rows: Rows, k: int, times: tuple = ()) -> StepResult:
        """Update the drafter, and collect the tensors that the host reads."""
        state = rows.state
        rows.drafter.update(state)
        if times:
            times = (*times, timestamp(self.device))
        logprobs = (state.top_logprobs, state.token_probs) if state.return_logprobs else ()
        drafting = (state.accepted, state.overlap, state.drafted, state.can_draft)
        return StepResult(k, times, state.out, *drafting, *logprobs)

    # ------------------------------------------------------------------------------------- results

    def read(self, max_waiting: int) -> list[tuple[int, int]]:
        """(request id, token) of all launched steps except the last `max_waiting`."""
        events = []
        while len(self.readback) > max_waiting:
            step, result = self.readback.receive()
            events += self.receive(step, result)
        return events

    def receive(self, step: Step, result: StepResult) -> list[tuple[int, int]]:
        """Give each request the tokens that a step decided, and end those whose text ends. Returns
        (request id, token) of each."""
        decided = [
            Decided(row, request, request.receive(result, row))
            for row, request in step.requests
            if request.status is not Status.FINISHED
        ]
        self.meter.record(step, result, decided)
        events = []
        for _, request, ids in decided:
            if step.k and step.runs_model:
                self.count_draft_positions(step, request, len(ids))
            events += [(request.id, id) for id in ids]
            if request.ending is not None:
                self.finish(request, request.ending)
        return events

    def count_draft_positions(self, step: Step, request: Request, num_tokens: int) -> None:
        """Note what the draft's own cache holds after a round that gave a request so many tokens:
        all positions before the newest that the round began with, and, where the model's draft was
        verified, all but those that the first pass of the next round computes."""
        num_positions = request.num_positions - num_tokens - 1
        if request not in step.suffix_requests:
            num_covered = request.num_positions - self.drafter.num_input_tokens
            num_positions = max(num_positions, num_covered)
        request.slot.num_draft = num_positions

    # ------------------------------------------------------------------------ before requests come

    def warm_up(self, path: str) -> float:
        """Compile prompts, and the steps for a sampling path; returns seconds. Call it before the
        first request."""
        return warm_up(self, path)

    def calibrate(self, sampling: Sampling, length: int | None = None, rounds: int = 7) -> Costs:
        """Measure the cost of steps with `length` positions filled, by default in short texts and,
        if the context is long, at its end too; returns that of the shortest. Call it before the
        first request."""
        lengths = lengths_to_calibrate(self.max_seq_length) if length is None else [length]
        self.measured_costs = calibrate(self, sampling, lengths, rounds)
        self.costs = costs_at(self.measured_costs[max(self.row_counts)], 0)
        return self.costs

    def __reduce__(self):
        raise TypeError("an Engine cannot be pickled or copied: make one in each process")

    def clear(self) -> None:
        """End all requests, and empty all slots."""
        self.reset()
        for slot in self.scheduler.slots:
            slot.ids = []
