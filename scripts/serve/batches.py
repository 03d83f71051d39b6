"""Continuous batching for serve.py: answers that wait for a slot, and answers that decode.

    Job         one HTTP request: the events of its answers reach its connection in order
    Row         one answer: a prompt with settings, then its tokens
    Decoder     the queue and the slots; the thread that calls `step` decodes

A row takes a slot of the engine as soon as one is free, while others decode. Waiting jobs take
turns, so a request for many answers delays another one by a single answer. Each row gets the answer
that its prompt alone would get.
"""

import asyncio
import contextlib
import threading
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence

from cli.errors import is_out_of_memory
from cli.exits import print_error, print_status
from cli.page import Token, logprob_pairs, token_of
from cli.report import decided, low_acceptance, rate, speculative
from decoding.answers import Answer
from decoding.errors import UserError
from decoding.grammar import Grammar
from decoding.scheduler import Request
from decoding.statistics import Timing
from generate import LLM
from loading.tokenizer import Tokenizer
from scripts.serve.metrics import Metrics
from scripts.serve.openai_form import Event, Refusal, TextRequest

# The tokens of one frame are sent together, because an event costs the decoding thread time.
FRAME_S = 1 / 30


class Job:
    """One HTTP request. The decoding thread sends events to the loop of its connection."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self.queue: asyncio.Queue[Event | Refusal] = asyncio.Queue()
        self.created = time.perf_counter()
        self.is_abandoned = False  # the client has left, or has its answer
        # All answers of the job share these.
        self.grammar: Grammar | None = None
        self.stop_ids: frozenset[int] = frozenset()
        self.visible: Sequence[str] = ()  # special tokens that are part of the answers' text
        # By prompt number, the request that records the prompt's log-probabilities.
        self.recording: dict[int, Request] = {}

    def send(self, event: Event | Refusal) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server is shutting down
            self.loop.call_soon_threadsafe(self.queue.put_nowait, event)

    async def events(self, num_rows: int) -> AsyncIterator[Event]:
        """The events of `num_rows` rows, until all have finished. Raises a Refusal that arrives
        among them."""
        while num_rows:
            event = await self.queue.get()
            if isinstance(event, Refusal):
                raise event
            num_rows -= event.ending is not None
            yield event


class Row(Answer):
    """Answer `index` of a job. `stops`: the server's stop strings, for a request without its own.
    `max_new_tokens` is 0 for an echo alone, which decodes one token and discards it."""

    def __init__(
        self,
        job: Job,
        text_request: TextRequest,
        index: int,
        ids: list[int],
        max_new_tokens: int,
        seed: int,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
    ):
        super().__init__(
            tokenizer,
            ids,
            stops if text_request.stop is None else text_request.stop,
            sampling=text_request.sampling,
            max_new_tokens=max(1, max_new_tokens),
            stop_ids=job.stop_ids,
            seed=seed,
            draft=text_request.draft,
            grammar=job.grammar and job.grammar.copy(),
        )
        self.stream = tokenizer.stream(continues=True, visible=job.visible)
        self.job = job
        self.text_request = text_request
        self.index = index
        self.max_new_tokens = max_new_tokens
        self.seed = seed
        self.prompt_number = index // text_request.n
        self.is_closing = False  # all tokens have come, and their last text may
        self.pending: list[Token] = []  # decided, but not sent yet
        self.last_send_s = 0.0
        self.echo_texts: list[str] = []
        self.num_prompt_logprobs = None
        if text_request.echo:
            self.echo_texts = self.read_prompt(tokenizer)
            self.num_prompt_logprobs = text_request.num_logprobs
        # Top tokens that this answer lists. None although the engine may record log-probabilities
        # for another row.
        self.num_logprobs = text_request.num_logprobs
        if self.num_logprobs is None and text_request.tokens:
            self.num_logprobs = 0

    def feed(self) -> bool:
        """Add the tokens that came since the last call, and send them when a frame is over."""
        has_ended = super().feed()
        is_due = time.perf_counter() > self.last_send_s + FRAME_S
        if self.pending and is_due and not has_ended:
            self.send()
        return has_ended

    def add(self, text: str, record=None) -> None:
        """Make the last token pending, with the text that it adds. The text that `close` releases
        belongs to the last token too, which is pending still."""
        super().add(text, record)
        if self.is_closing:
            if self.pending and self.max_new_tokens:
                last = self.pending[-1]
                self.pending[-1] = last._replace(text=last.text + text)
            return
        number = len(self.ids) - 1
        if number == 0 and self.text_request.echo:
            self.pending = self.echo()
        if self.max_new_tokens:
            seconds = self.request.prefill_s + self.request.decode_s
            token = token_of(self, number, text, seconds, self.num_logprobs)
            self.pending.append(token)

    def close(self) -> None:
        self.is_closing = True
        super().close()

    def read_prompt(self, tokenizer: Tokenizer) -> list[str]:
        """The texts of the prompt's tokens. The answer may complete the last character of the
        prompt."""
        stream = tokenizer.stream()
        texts = [stream.feed(id) for id in self.prompt]
        if self.max_new_tokens:
            self.stream = stream
        else:
            texts[-1] += stream.flush()
        return texts

    def echo(self) -> list[Token]:
        """The prompt as tokens of the answer, with log-probabilities on request; the first token
        has none."""
        tokens = [Token(id, text) for id, text in zip(self.prompt, self.echo_texts)]
        if self.num_prompt_logprobs is None:
            return tokens
        records = self.job.recording[self.prompt_number].prompt_logprobs
        for number, record in enumerate(records, 1):
            tokens[number] = tokens[number]._replace(top_logprobs=logprob_pairs(record))
        return tokens

    @property
    def finish_reason(self) -> str:
        return super().finish_reason if self.max_new_tokens else "length"

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer; none of an echo, whose one token nobody asked for."""
        return len(self.ids) if self.max_new_tokens else 0

    @property
    def queue_s(self) -> float:
        return self.request.started - self.job.created

    @property
    def ttft_s(self) -> float:
        """Seconds from the HTTP request to the first token."""
        return self.queue_s + self.request.ttft_s

    def send(self, ending: dict | None = None) -> None:
        self.job.send(Event(self.index, self.pending, ending))
        self.pending = []
        self.last_send_s = time.perf_counter()


class Decoder:
    """Decodes in the thread that calls `step`; the connections' thread calls `add` and `drop`."""

    def __init__(self, llm: LLM, max_waiting: int):
        self.llm = llm
        self.engine = llm.engine
        self.max_waiting = max_waiting
        self.metrics = Metrics()
        # The waiting rows of each job; the first job is served next.
        self.waiting: deque[deque[Row]] = deque()
        self.wakeup = threading.Condition()  # guards `waiting`
        self.is_stopped = False  # running answers are given up

    def add(self, rows: list[Row]) -> None:
        """Refusal where the queue has no room for the rows of this job."""
        with self.wakeup:
            if self.num_waiting + len(rows) > self.max_waiting:
                raise Refusal(
                    f"{self.num_waiting} answers wait already: try again later",
                    None,
                    429,
                    "queue_full",
                )
            self.waiting.append(deque(rows))
            self.wakeup.notify()

    def drop(self, job: Job) -> None:
        """Abandon a job: its waiting rows go now, its running rows at the next step."""
        with self.wakeup:
            job.is_abandoned = True
            for rows in self.waiting:
                if rows[0].job is job:
                    self.count(rows, "abort")
            self.waiting = deque(rows for rows in self.waiting if rows[0].job is not job)
            self.wakeup.notify()

    def count(self, rows: Iterable[Row], outcome: str) -> None:
        for row in rows:
            self.metrics.add_answer(row, outcome)

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self.waiting))

    def gauges(self) -> dict[str, int]:
        """How busy the slots and the queue are, for the metrics."""
        with self.wakeup:
            return {
                "slots": self.engine.batch_size,
                "busy_slots": len(self.llm.running),
                "waiting_answers": self.num_waiting,
            }

    def next_row(self) -> Row | None:
        """The next row of the first job, which moves to the end of the queue."""
        with self.wakeup:
            if not self.waiting:
                return None
            rows = self.waiting.popleft()
            row = rows.popleft()
            if rows:
                self.waiting.append(rows)
            return row

    def step(self, timeout_s: float) -> None:
        """Give free slots to waiting rows and decode one step. Without any row, wait up to
        `timeout_s` for one. If the step fails, its clients get one line and stderr the
        traceback."""
        with self.wakeup:
            self.wakeup.wait_for(lambda: self.waiting or self.llm.running, timeout_s)
        for row in list(self.llm.running.values()):
            if row.job.is_abandoned:
                self.llm.abort(row)
                self.count([row], "abort")
        self.fill_slots()
        if not self.llm.running:
            return
        try:
            for row in self.llm.step():
                self.end(row)
            for line in low_acceptance(self.engine):
                print_status(line)
        except Exception as error:
            traceback.print_exc()
            self.count(self.llm.running.values(), "error")
            for row in self.llm.running.values():
                row.job.send(Refusal(f"decoding failed: {type(error).__name__}", status=500))
            self.llm.running.clear()
            self.engine.reset()

    def fill_slots(self) -> None:
        while len(self.llm.running) < self.engine.batch_size:
            row = self.next_row()
            if row is None:
                return
            self.start(row)

    def start(self, row: Row) -> None:
        recording = row.job.recording
        # A prompt runs once, however many answers it has.
        if row.prompt_number not in recording:
            row.request_args["prompt_logprobs"] = row.num_prompt_logprobs
        try:
            self.llm.start(row)
            recording.setdefault(row.prompt_number, row.request)
        except (RuntimeError, ValueError) as error:
            self.fail(row, error, 400 if isinstance(error, UserError) else 500)
        # Steps were compiled with recording; without it they would be compiled again.
        has_logprobs = any(row.num_logprobs is not None for row in self.llm.running.values())
        self.engine.planner.records_logprobs = self.engine.runner.compile or has_logprobs

    def end(self, row: Row) -> None:
        error = row.request.error
        if error is not None:
            is_of_grammar = row.job.grammar and row.request.grammar.error
            self.fail(row, error, 400 if is_of_grammar else 500)  # no fault of the model
        else:
            self.count([row], row.finish_reason)
            row.send(self.ending(row))

    def fail(self, row: Row, error: Exception, status: int = 500) -> None:
        """End a row with an error; that of a bug stands on stderr with its traceback."""
        if isinstance(error, UserError) or is_out_of_memory(error):
            print_error(error)
        else:
            traceback.print_exception(error)
        self.count([row], "error")
        row.job.send(Refusal(f"decoding failed: {error}", status=status))

    def ending(self, row: Row) -> dict:
        """`Event.ending` of a row: finish_reason and timings."""
        request = row.request
        num_prefilled = len(request.prompt) - request.num_reused
        drafting = None
        if row.text_request.draft:
            drafting = speculative(self.engine, Timing([request]))
        timings = {
            "queue_s": row.queue_s,
            "ttft_s": row.ttft_s,
            "tokens": row.num_tokens,
            "seed": row.seed,
            "cached_tokens": request.num_reused,
            "rows": max((len(step.positions) for step in request.steps), default=1),
            "prefill_tok_s": rate(num_prefilled, request.prefill_s),
            "decode_tok_s": rate(decided([request]), request.decode_s),
            "speculative": drafting,
        }
        return {"finish_reason": row.finish_reason, "timings": timings}
