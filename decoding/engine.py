"""An engine: up to B requests at a time on one model, each of which gets the tokens that it would
get alone.

    Engine          slots for requests: add_request, step, abort; warm_up, calibrate

generate.decode is the same loop for one prompt and nothing else; read it first. `Engine.step` is
this file's center: it runs the prompts that wait, plans one step for the requests that decode
(planner.py), launches it, and reads what earlier steps decided (readback.py).
speculative.decode_round is the step on the device. batch.py has the tensors that it changes,
scheduler.py the requests and slots, runner.py a model with its caches, meter.py all records.
prefill.py and warmup.py hold what an engine does besides: prompts, and compiling.
"""

import functools
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch

import decoding.validation as validation
from decoding.batch import MAX_STOP_IDS, Batch
from decoding.costs import Costs, costs_at
from decoding.errors import UserError
from decoding.memory import MemoryPlan
from decoding.meter import Decided, Meter
from decoding.options import EngineOptions
from decoding.planner import Planner, Step, draft_lengths
from decoding.prefill import (
    count_draft_positions,
    lacks_positions,
    next_prompt,
    prefill,
    prefill_draft,
)
from decoding.readback import Readback, StepResult, timestamp
from decoding.runner import PREFILL_CHUNK, Rows, target_runner
from decoding.sampling import Sampling
from decoding.scheduler import Request, Scheduler, Status
from decoding.statistics import Timing
from decoding.warmup import calibrate, lengths_to_calibrate, warm_up
from drafts.base import CustomDraft, Draft, Drafter, propose
from model import Transformer
from speculative import Plan, decode_round
from tp import ranks_of
from weights.compiling import StepCompiler
from weights.walker import batch_invariant_rows


class Engine:
    """A model with caches and a Batch for up to B requests at a time, each of up to S positions.
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
        validation.check_logprobs(options.logprobs, model.config.vocab_size)
        context = model.config.max_seq_length
        if max_seq_length > context:
            raise UserError(f"max_seq_length = {max_seq_length} is more than the model's {context}")
        self.model = model
        self.batch_size = batch_size
        self.max_seq_length = max_seq_length
        if not (drafter is None or isinstance(drafter, Drafter)):
            drafter = CustomDraft(drafter)
        self.drafter = drafter
        ks = draft_lengths(options, drafter)
        max_k = max(ks, default=0)
        # K + 1 positions of slack, because a round may run past the context's end.
        self.runner = target_runner(model, batch_size, max_seq_length, max_k + 1, options)
        self.runners = [self.runner]  # models with separate caches; prompts run through each
        device = self.runner.device
        ranks = ranks_of(model)
        with torch.inference_mode(False):
            self.batch = Batch(
                batch_size,
                self.runner.S,
                device,
                max_k,
                ranks,
                options,
                model.config.vocab_size,
            )
        self.maybe_compile = StepCompiler(device, self.runner.compile)
        if drafter is not None:
            # Weak: a cycle would keep engine and drafter until a collection.
            drafter.owner = weakref.ref(self)
            drafter.setup(self.batch, max_k, self.runner, self.maybe_compile)
            if drafter.num_first_inputs:  # it has a cache of its own
                self.runners.append(drafter.runner)
        # rows(begin, end): these slots as a batch. Views are made once.
        self.rows = functools.cache(Rows(self.batch, self.runner, drafter).view)
        # Is greedy output bitwise equal regardless of the drafter and of what else is in the batch?
        has_invariant_rows = batch_size * (max_k + 1) <= batch_invariant_rows(model)
        is_alone = ranks.world == 1
        self.identical = self.runner.attends_alike and is_alone and has_invariant_rows
        self.planner = Planner(options, ks, drafter, self.runner)
        self.scheduler = Scheduler(batch_size, self.runner.cache_type.keeps_prefixes)
        self.requests: dict[int, Request] = {}  # by id, until they end
        self.readback = Readback(device, ranks.timeout_s)
        self.meter = Meter(drafter is not None or max_k > 0)

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
        `grammar`: an object that masks tokens for this request alone (decoding/grammar.py), or
        None.
        `prompt_logprobs`: record in Request.prompt_logprobs the log-probability of each prompt
        token and of this many top tokens.

        UserError for an empty prompt, an unknown id, a prompt that does not fit, and too many stop
        ids."""
        if self.drafter is not None and self.drafter.owner() is not self:
            raise UserError(
                "the drafter belongs to an engine that was made later: give each engine its own"
            )
        prompt = list(prompt)
        stop_ids = validation.check_stop_ids(stop_ids)
        validation.check_lengths(self.model, [prompt], [max_new_tokens], self.max_seq_length)
        validation.check_settings(self.model, sampling, seed, stop_ids, MAX_STOP_IDS)
        validation.check_logprobs(prompt_logprobs, self.model.config.vocab_size)
        request = Request(
            self.scheduler.next_id,
            [int(id) for id in prompt],
            sampling,
            max_new_tokens,
            stop_ids,
            seed,
            draft,
            grammar,
            prompt_logprobs,
        )
        self.planner.assign_memory(request, self.requests.values())
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
        stop_ids = validation.check_stop_ids(stop_ids)
        ids = range(self.scheduler.next_id, self.scheduler.next_id + len(prompts))
        try:
            for prompt, row_sampling, budget, row_seed in zip(prompts, samplings, budgets, seeds):
                self.add_request(
                    prompt,
                    sampling=row_sampling,
                    max_new_tokens=budget,
                    stop_ids=stop_ids,
                    seed=row_seed,
                )
            requests = [self.requests[id] for id in ids]
            if timing is not None:
                timing.requests += requests
            num_yielded = [0] * len(requests)
            while True:
                is_finished = all(request.finish_reason is not None for request in requests)
                for row, request in enumerate(requests):
                    for id in request.tokens[num_yielded[row] :]:
                        num_yielded[row] += 1
                        yield row, id
                    if isinstance(request.error, UserError):
                        raise UserError(f"row {row}, {request.error}")
                    if request.error is not None:
                        raise request.error
                if is_finished:
                    return
                self.step()
        finally:
            for id in ids:
                self.abort(id)

    def finish(self, request: Request, reason: str) -> None:
        """End a request and free its slot at once. Steps in flight no longer advance the slot, but
        may still write positions past its text."""
        request.finish_reason = reason
        request.status = Status.FINISHED
        if request.slot is not None:
            self.batch.park(request.slot.index)
            # At least what `padded_length` adds to a chunk.
            num_padding = max(PREFILL_CHUNK, self.runner.chunk) // 8
            # The step that decided the end and those in flight may write this many positions past
            # the text; one more step to spare.
            num_in_flight = (self.readback.host_lag + 2) * (self.planner.max_k + 1)
            self.scheduler.release(request, num_in_flight + num_padding)
        elif request in self.scheduler.waiting:  # an interrupt may have kept it out of the line
            self.scheduler.waiting.remove(request)
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
            budget = self.runner.chunk
            while budget > 0 and (request := next_prompt(self)) is not None:
                budget -= prefill(self, request)
                events += self.read()
            if events and was_idle:
                return events  # first tokens should not wait for a step
            requests = self.scheduler.decoding()
            if not requests:
                return events + self.read(max_in_flight=0)
            begin_s = time.perf_counter()
            plans = self.planner.plan(requests, self.readback.steps)
            # `plan` calls Drafter.expect, which makes n-gram and suffix drafts: time of drafting.
            draft_s = time.perf_counter() - begin_s
            if lacks_positions(self, plans):
                # A model drafts, and after plain steps its own cache lacks their positions. Which
                # ones is known once all launched steps are read. A request that ends in this read
                # stays in `plans`, but not in `requests`.
                events += self.read(max_in_flight=0)
                requests = self.scheduler.decoding()
                if not requests:
                    return events
                for request in requests:
                    prefill_draft(self, request.slot, request.num_positions - 1)
            step = self.prepare_step(requests, plans)._replace(begin_s=begin_s, draft_s=draft_s)
            self.readback.send(self.run(step), step)
            return events + self.read()
        except BaseException as error:
            self.reset(error if isinstance(error, Exception) else None)
            raise

    def reset(self, error: Exception | None = None) -> None:
        """End all requests after an interrupted step, whose decisions are unknown, with the error
        that interrupted it, or one that says so. Slots keep their cached prefixes for reuse, except
        in the draft's own cache."""
        cause = error or UserError("a step was interrupted, which ended all requests")
        self.readback.clear()
        self.scheduler.waiting.clear()
        for request in self.requests.values():
            request.finish_reason = "abort" if error is None else "error"
            request.status = Status.FINISHED
            request.error = request.error or cause
        self.requests.clear()
        for slot in self.scheduler.slots:
            self.batch.park(slot.index)
            slot.num_draft = 0
            slot.store(slot.cached_ids(), num_written=self.runner.S)

    def prepare_step(self, requests: list[Request], plans: list[MemoryPlan]) -> Step:
        """The next step of these requests, which drafts as planned; some that were planned for may
        have ended since. Marks them as launched, and writes path and draft limits to the batch."""
        begin, end = self.planner.row_range(requests)
        k = max(plan.k for plan in plans)
        limits = {}
        for plan in plans:
            for request in plan.requests:
                limits[request] = plan.k * request.may_draft
                request.is_draft_behind = not plan.fills_cache
        for request in requests:
            request.num_launched += 1
        rows = self.rows(begin, end)
        running = [(request.slot.index - begin, request) for request in requests]
        rows.batch.prepare(running, limits if k else None)
        return Step(
            rows,
            self.planner.max_length(requests, self.readback.steps),
            k,
            running,
            drafts_unevenly=any(limits[request] < k for request in requests),
            records_logprobs=self.planner.records_logprobs,
            plans=plans,
            costs=self.planner.costs,
        )

    def run(self, step: Step) -> StepResult:
        """Launch a step: in a round the drafter proposes K tokens, and one pass of the model
        decides."""
        batch, target, drafter = step.rows
        k = step.k
        start = draft_end = timestamp(target.device)
        draft = Draft(None, None)
        if k > 0:
            draft = propose(drafter, batch, Plan(k, step.length, step.drafting))
            if step.drafts_unevenly:
                draft = draft.limited(batch.draft_limit)
            draft_end = timestamp(target.device)
        batch.write_masks(step.requests, draft.tokens)
        records_logprobs = step.records_logprobs
        run_round = self.maybe_compile(decode_round, batch, k, records_logprobs)
        run_round(self.model, target.slice_to(step.length + k), batch, *draft, records_logprobs)
        times = (start, draft_end, timestamp(target.device))
        return StepResult.of(batch, times, records_logprobs)

    # ------------------------------------------------------------------------------------- results

    def read(self, max_in_flight: int | None = None) -> list[tuple[int, int]]:
        """Read all launched steps but the last `max_in_flight`; returns (request id, token) of what
        they decided. By default `max_in_flight` is the device's host_lag, and 0 while a request has
        a grammar, whose masks depend on every token so far."""
        if max_in_flight is None:
            has_grammar = any(request.grammar is not None for request in self.requests.values())
            max_in_flight = 0 if has_grammar else self.readback.host_lag
        events = []
        while len(self.readback) > max_in_flight:
            step, result = self.readback.receive()
            events += self.deliver(step, result)
        return events

    def deliver(self, step: Step, result: StepResult) -> list[tuple[int, int]]:
        """Give each request the tokens that a step decided, and end those whose text ends. Returns
        (request id, token) of each."""
        decided = []
        for row, request in step.requests:
            if request.status is not Status.FINISHED:  # as it may be since the step was launched
                ids = request.append_tokens(result, row)
                decided.append(Decided(row, request, ids))
        self.meter.record(step, result, decided)
        for plan in step.plans:  # before `finish` takes their slots
            if plan.fills_cache:
                count_draft_positions(plan, decided)
        events = []
        for _, request, ids in decided:
            events += [(request.id, id) for id in ids]
            if request.ending is not None:
                self.finish(request, request.ending)
        return events

    # ------------------------------------------------------------------------ before requests come

    def warm_up(self, path: str) -> float:
        """Compile prompts, and the steps for a sampling path; returns seconds. Call it before the
        first request."""
        return warm_up(self, path)

    def calibrate(self, sampling: Sampling, length: int | None = None, rounds: int = 7) -> Costs:
        """Measure the cost of steps with `length` positions filled: by default half of a short
        context, or both ends of a long one. Returns that of a full batch at the shortest length.
        Call it before the first request."""
        lengths = lengths_to_calibrate(self.max_seq_length) if length is None else [length]
        planner = self.planner
        planner.measured_costs = calibrate(self, sampling, lengths, rounds)
        planner.costs = costs_at(planner.measured_costs[max(planner.row_counts)], 0)
        return planner.costs

    def __reduce__(self):
        raise TypeError("an Engine cannot be pickled or copied: make one in each process")

    def clear(self) -> None:
        """End all requests, and empty all slots."""
        self.reset()
        for slot in self.scheduler.slots:
            slot.ids = []
