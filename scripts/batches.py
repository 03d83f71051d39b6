"""Answers that wait and answers that decode; the connections of scripts/serve.py hand their requests to this file.

    Job         one HTTP request: the events of its answers reach its connection in order
    Row         one answer: a prompt with settings, then its tokens
    Decoder     the queue and the slots; the thread that calls `step` decodes

A row takes a slot of the engine as soon as one is free, while others decode. Waiting jobs take turns, so a request for
many answers delays another one by a single answer. Each row gets the answer that its prompt alone would get. This file
knows no HTTP and no flag.
"""

import asyncio
import contextlib
import threading
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator, Sequence

from cli.answers import Printer
from cli.errors import print_error
from cli.page import MIN_LOGPROB, Token, token_of
from cli.report import decided, rate, speculative
from cli.session import Session
from decoding.grammar import Grammar
from decoding.scheduler import Request
from decoding.timing import Timing
from scripts.openai_form import Event, Refusal, TextRequest

FRAME_S = 1 / 30  # tokens of one frame are sent together, because an event costs the decoding thread time


class Job:
    """One HTTP request. The decoding thread sends events to the loop of its connection."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop, self.queue, self.created = loop, asyncio.Queue(), time.perf_counter()
        self.is_abandoned = False  # the client has left, or has its answer
        self.grammar: Grammar | None = None  # of every answer
        self.stop_ids: frozenset[int] = frozenset()  # of every answer
        self.recording: dict[int, Request] = {}  # prompt -> the request that records of it

    def send(self, event: Event | Refusal) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server is shutting down
            self.loop.call_soon_threadsafe(self.queue.put_nowait, event)

    async def events(self, num_rows: int) -> AsyncIterator[Event]:
        """The events of so many rows, until all have finished. Raises a Refusal that arrives among them."""
        while num_rows:
            event = await self.queue.get()
            if isinstance(event, Refusal):
                raise event
            num_rows -= event.ending is not None
            yield event


class Row:
    """Answer `index` of a job. `stops`: the server's stop strings, for a request without its own. `max_new_tokens` is 0
    for an echo alone, which decodes one token and discards it."""

    def __init__(self, job: Job, text_request: TextRequest, index: int, ids: list[int], max_new_tokens: int, seed: int,
        session: Session, stops: Sequence[str] = (),
    ):  # fmt: skip
        self.job, self.text_request, self.index, self.ids = job, text_request, index, ids
        self.tokenizer = session.tokenizer
        self.max_new_tokens, self.seed = max_new_tokens, seed
        self.grammar = job.grammar and job.grammar.copy()
        stops = stops if text_request.stop is None else text_request.stop
        self.printer = Printer(session.tokenizer, job.stop_ids, stops)
        self.request: Request | None = None  # the engine's, once the row has a slot
        self.pending: list[Token] = []  # not sent yet
        self.num_rounds, self.is_finished, self.sent = 0, False, 0.0
        self.prompt_number = index // text_request.n
        self.num_prompt_logprobs = text_request.num_logprobs if text_request.echo else None
        # The engine may record log-probabilities for another row.
        self.returns_logprobs = text_request.tokens or text_request.num_logprobs is not None

    def feed(self, number: int) -> None:
        """Add token `number` of the answer. Send pending tokens when a frame is over, never within a step."""
        if number == 0 and self.text_request.echo:
            self.pending = self.echo()
        request, printer, num_pieces = self.request, self.printer, len(self.printer.pieces)
        record = request.token_records[number] if request.token_records else None
        printer.feed(request.tokens[number])
        is_last = request.finish_reason is not None and number + 1 == len(request.tokens)
        self.is_finished = printer.at_stop_string or is_last
        if self.is_finished:
            printer.close()
        self.num_rounds += record is None or record.index == 0
        text, at = "".join(printer.pieces[num_pieces:]), request.prefill_s + request.decode_s
        num_logprobs = (self.text_request.num_logprobs or 0) if self.returns_logprobs else None
        token = token_of(request, number, text, self.num_rounds, at, num_logprobs)
        self.pending += [token] if self.max_new_tokens else []
        ends_step = record is None or record.index >= record.accepted
        if not self.is_finished and ends_step and time.perf_counter() > self.sent + FRAME_S:
            self.send()

    def echo(self) -> list[Token]:
        """The prompt as tokens of the answer, with log-probabilities on request; the first token has
        none."""
        stream = self.tokenizer.stream()
        tokens = [Token(id, stream.feed(id)) for id in self.ids]
        if self.num_prompt_logprobs is not None:
            records = self.job.recording[self.prompt_number].prompt_logprobs
            for number, record in enumerate(records, 1):
                pairs = [(int(id), max(x, MIN_LOGPROB)) for id, x in record]
                tokens[number] = tokens[number]._replace(top_logprobs=pairs)
        if self.max_new_tokens:
            self.printer.stream = stream  # the answer may complete the last character of the prompt
        else:
            tokens[-1] = tokens[-1]._replace(text=tokens[-1].text + stream.flush())
        return tokens

    def send(self, ending: dict | None = None) -> None:
        self.job.send(Event(self.index, self.pending, ending))
        self.pending, self.sent = [], time.perf_counter()


class Decoder:
    """Decodes in the thread that calls `step`; the connections' thread calls `add` and `drop`."""

    def __init__(self, session: Session, max_waiting: int):
        self.session, self.engine, self.max_waiting = session, session.engine, max_waiting
        self.waiting: deque[deque[Row]] = deque()  # the rows of each job; the first job is served next
        self.rows: dict[int, Row] = {}  # with a slot, by request id
        self.wakeup = threading.Condition()  # guards `waiting`
        self.is_stopped = False  # running answers are given up

    def add(self, rows: list[Row]) -> None:
        """Refusal where the queue has no room for the rows of this job."""
        with self.wakeup:
            num_waiting = sum(map(len, self.waiting))
            if num_waiting + len(rows) > self.max_waiting:
                raise Refusal(f"{num_waiting} answers wait already: try again later", None, 429, "queue_full")
            self.waiting.append(deque(rows))
            self.wakeup.notify()

    def drop(self, job: Job) -> None:
        """Abandon a job: its waiting rows go now, its running rows at the next step."""
        with self.wakeup:
            job.is_abandoned = True
            self.waiting = deque(rows for rows in self.waiting if rows[0].job is not job)
            self.wakeup.notify()

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
        """Give free slots to waiting rows and decode one step. Without any row, wait up to `timeout_s` for one. If the
        step fails, its clients get one line and stderr the traceback."""
        with self.wakeup:
            self.wakeup.wait_for(lambda: self.waiting or self.rows, timeout_s)
        for id in [id for id, row in self.rows.items() if row.job.is_abandoned]:
            self.engine.abort(id)
            del self.rows[id]
        while len(self.engine.requests) < self.engine.batch_size and (row := self.next_row()) is not None:
            self.start(row)
        try:
            self.feed(self.engine.step() if self.rows else [])
        except Exception as error:
            traceback.print_exc()
            for row in self.rows.values():
                row.job.send(Refusal(f"decoding failed: {type(error).__name__}", status=500))
            self.rows.clear()
            self.engine.reset()
            return

    def start(self, row: Row) -> None:
        recording = row.job.recording
        # A prompt runs once, however many answers it has.
        is_recorded = row.prompt_number in recording
        prompt_logprobs = None if is_recorded else row.num_prompt_logprobs
        try:
            id = self.engine.add_request(
                row.ids, sampling=row.text_request.sampling, max_new_tokens=max(1, row.max_new_tokens),
                stop_ids=row.job.stop_ids, seed=row.seed, draft=row.text_request.draft,
                grammar=row.grammar, prompt_logprobs=prompt_logprobs,
            )  # fmt: skip
            row.request = self.engine.requests[id]
            self.rows[id] = row
            recording.setdefault(row.prompt_number, row.request)
        except (RuntimeError, ValueError) as error:
            self.fail(row, error)
        # Steps were compiled with recording; without it they would be compiled again.
        returns_logprobs = any(row.returns_logprobs for row in self.rows.values())
        self.engine.state.return_logprobs = self.engine.compile or returns_logprobs

    def feed(self, tokens: list[tuple[int, int]]) -> None:
        """Give (request id, token) pairs of a step to their rows, and free the slots of finished and failed rows."""
        next_numbers = {id: len(row.printer.ids) for id, row in self.rows.items()}
        for id, _ in tokens:
            if id in self.rows and not self.rows[id].is_finished:
                self.rows[id].feed(next_numbers[id])
                next_numbers[id] += 1
        for id, row in list(self.rows.items()):
            if row.request.error is not None:
                self.fail(row, row.request.error)
            elif row.is_finished:
                num_tokens = len(row.printer.ids)  # a round may decide others behind a stop string
                del row.request.tokens[num_tokens:], row.request.token_records[num_tokens:]
                self.engine.abort(id)  # at a stop string the engine's request still runs
                row.send(self.ending(row))
            else:
                continue
            del self.rows[id]

    def fail(self, row: Row, error: Exception) -> None:
        print_error(error)
        row.job.send(Refusal(f"decoding failed: {error}", status=500))

    def ending(self, row: Row) -> dict:
        """`Event.ending` of a row: finish_reason and timings."""
        request, num_tokens = row.request, len(row.printer.ids)
        queue_s = request.started - row.job.created
        return {"finish_reason": row.printer.finish_reason() if row.max_new_tokens else "length", "timings": {
            "queue_s": queue_s, "ttft_s": queue_s + request.ttft_s, "tokens": num_tokens if row.max_new_tokens else 0,
            "seed": row.seed, "cached_tokens": request.num_reused,
            "rows": max((len(step.positions) for step in request.steps), default=1),
            "prefill_tok_s": rate(len(request.prompt) - request.num_reused, request.prefill_s),
            "decode_tok_s": rate(decided([request]), request.decode_s),
            "speculative": speculative(self.engine, [Timing([request])], 0) if row.text_request.draft else None,
        }}  # fmt: skip
