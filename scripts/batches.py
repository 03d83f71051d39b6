"""Rows that wait and rows that decode: what scripts/serve.py's connections hand their requests to.

    Job         one request, whose answers' events reach its connection in order
    Row         one answer to decode: a prompt with settings of its own, then its tokens
    Decoder     whose turn it is, and who has left; the thread that decodes

A row takes a slot of the engine as soon as one is free, while others decode. Requests take turns: one that asks for
many answers delays another by one of them. Each row equals its prompt alone. This file knows no HTTP, and no flag.
"""

import asyncio
import contextlib
import threading
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator, Sequence

import torch

from cli.errors import print_error
from cli.report import PLAIN_TOKEN, origin, rate, speculative
from cli.session import Session
from decoding.scheduler import Request
from decoding.timing import Timing
from generate import Engine
from scripts.openai_form import Ask, Event, Refusal, Token

HEAD_ROWS = 512  # positions of an echoed prompt that the head scores at once
FRAME_S = 1 / 30  # tokens that come within it travel together: each event costs the decoding thread time
LOWEST = -9999.0  # stands for a log-probability of minus infinity, which JSON has not


class Job:
    """One request: events from the decoding thread to its connection's loop. `left`: nobody waits for it any more."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop, self.queue, self.begun, self.left = loop, asyncio.Queue(), time.perf_counter(), False

    def tell(self, event: Event | Refusal) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed: the server ends
            self.loop.call_soon_threadsafe(self.queue.put_nowait, event)

    async def events(self, rows: int) -> AsyncIterator[Event]:
        """The events of so many rows, until all have ended. Raises the Refusal that comes among them."""
        while rows:
            event = await self.queue.get()
            if isinstance(event, Refusal):
                raise event
            rows -= event.ending is not None
            yield event


class Row:
    """Answer `index` of a request: prompt ids, at most `new` tokens, a seed; then what was decoded."""

    def __init__(self, job: Job, ask: Ask, index: int, ids: list[int], new: int, seed: int, session: Session,
        stops: Sequence[str] = (),
    ):  # fmt: skip
        self.job, self.ask, self.index, self.ids, self.new, self.seed = job, ask, index, ids, new, seed
        self.printer = session.printer([*ask.stops, *stops])
        self.request: Request | None = None  # once it has a slot
        self.pending: list[Token] = []  # not sent yet
        self.rounds, self.over, self.sent = 0, False, 0.0
        self.wants_logprobs = ask.tokens or ask.num_logprobs is not None  # a neighbour's wish records them too

    def feed(self, number: int) -> None:
        """Token `number` of the answer was decided. Send what is pending if it is time, never within a step."""
        request, printer, shown = self.request, self.printer, len(self.printer.pieces)
        id, record = request.tokens[number], request.token_records[number] if request.token_records else None
        printer.feed(id)
        self.over = printer.at_stop_string or (request.finish_reason is not None and number + 1 == len(request.tokens))
        if self.over:
            printer.close()
        self.rounds += record is None or record.index == 0
        token = Token(
            id, "".join(printer.pieces[shown:]), origin(record) if record else PLAIN_TOKEN, self.rounds,
            request.prefill_s + request.decode_s,
        )  # fmt: skip
        if self.wants_logprobs:
            pairs = request.top_logprobs[number][: 1 + (self.ask.num_logprobs or 0)]
            (p, q), drafted = request.token_probs[number], record is not None and record.index < record.k
            token = token._replace(
                p=p, q=q if drafted else None, top_logprobs=[(int(id), max(x, LOWEST)) for id, x in pairs]
            )
            token = token._replace(overlap=record.overlap) if drafted else token
        self.pending += [token] if self.new else []
        ends_step = record is None or record.index >= record.accepted
        if not self.over and ends_step and time.perf_counter() > self.sent + FRAME_S:
            self.send()

    def send(self, ending: dict | None = None) -> None:
        self.job.tell(Event(self.index, self.pending, ending))
        self.pending, self.sent = [], time.perf_counter()


class Decoder:
    """Decodes in the thread that calls `turn`; connections' threads call `put` and `drop`."""

    def __init__(self, session: Session, max_waiting: int):
        self.session, self.engine, self.max_waiting = session, session.engine, max_waiting
        self.waiting: dict[Job, deque[Row]] = {}  # in the order in which requests have their turns
        self.rows: dict[int, Row] = {}  # that decode, by request id
        self.news = threading.Condition()
        self.stopped = False  # answers are given up

    def put(self, rows: list[Row]) -> None:
        with self.news:
            if len(rows) > self.max_waiting:
                raise Refusal(f"{len(rows)} answers are more than the {self.max_waiting} that may wait", "n")
            num_waiting = sum(map(len, self.waiting.values()))
            if num_waiting + len(rows) > self.max_waiting:
                raise Refusal(f"{num_waiting} answers wait already: try again later", None, 429, "queue_full")
            self.waiting[rows[0].job] = deque(rows)
            self.news.notify()

    def drop(self, job: Job) -> None:
        """Nobody waits for this request any more: rows that wait go now, rows that run at the next step."""
        with self.news:
            job.left = True
            self.waiting.pop(job, None)
            self.news.notify()

    def next_row(self) -> Row | None:
        """The next row of the request whose turn it is, which then goes to the end of the line."""
        with self.news:
            job = next(iter(self.waiting), None)
            if job is None:
                return None
            rows = self.waiting.pop(job)
            row = rows.popleft()
            if rows:
                self.waiting[job] = rows
            return row

    def turn(self, seconds: float) -> None:
        """Let rows in and decode one step; with nothing to do, wait so long for news. An error is told to the clients
        that it concerns, in a line; a bug keeps its traceback, on stderr."""
        with self.news:
            self.news.wait_for(lambda: self.waiting or self.rows, seconds)
        for id in [id for id, row in self.rows.items() if row.job.left]:
            self.engine.abort(id)
            del self.rows[id]
        while len(self.engine.requests) < self.engine.batch_size and (row := self.next_row()) is not None:
            self.start(row)
        try:
            self.feed(self.engine.step() if self.rows else [])
        except Exception as error:
            traceback.print_exc()
            for row in self.rows.values():
                row.job.tell(Refusal(f"decoding failed: {type(error).__name__}", status=500))
            self.rows.clear()
            self.engine.reset()
            return
        self.session.observe_step()

    def start(self, row: Row) -> None:
        try:
            if row.ask.echo:
                row.pending = echoed(self.engine, self.session, row)
                row.send()
            id = self.engine.add_request(
                row.ids, sampling=row.ask.sampling, max_new_tokens=max(1, row.new), stop_ids=self.session.stop_ids,
                seed=row.seed, draft=row.ask.draft,
            )  # fmt: skip
            row.request, self.rows[id] = self.engine.requests[id], row
        except (RuntimeError, ValueError) as error:
            print_error(error)
            row.job.tell(Refusal(f"decoding failed: {error}", status=500))
        wants_logprobs = any(row.wants_logprobs for row in self.rows.values())
        # Compiled steps are compiled recording: not to do so would compile them anew.
        self.engine.state.return_logprobs = self.engine.compile or wants_logprobs

    def feed(self, decided: list[tuple[int, int]]) -> None:
        numbers = {id: len(row.printer.ids) for id, row in self.rows.items()}
        for id, _ in decided:
            row = self.rows.get(id)
            if row is None or row.over:
                continue
            row.feed(numbers[id])
            numbers[id] += 1
        for id, row in list(self.rows.items()):
            error = row.request.error
            if error is not None:
                print_error(error)
                row.job.tell(Refusal(f"decoding failed: {error}", status=500))
            elif row.over:
                self.engine.abort(id)  # a stop string has ended it, if it runs still
                row.send(self.ending(row))
            if error is not None or row.over:
                del self.rows[id]

    def ending(self, row: Row) -> dict:
        """The facts that the last event of a row brings."""
        request, num_tokens = row.request, len(row.printer.ids)
        queue_s = request.started - row.job.begun
        return {"finish_reason": row.printer.finish_reason(), "timings": {
            "queue_s": queue_s, "ttft_s": queue_s + request.ttft_s, "tokens": num_tokens if row.new else 0,
            "seed": row.seed, "cached_tokens": request.num_reused,
            "rows": max((len(step.positions) for step in request.steps), default=1),
            "prefill_tok_s": rate(len(request.prompt) - request.num_reused, request.prefill_s),
            "decode_tok_s": rate(num_tokens - 1, request.decode_s),
            "speculative": speculative(self.engine, [Timing([request])], 0) if row.ask.draft else None,
        }}  # fmt: skip


@torch.inference_mode()
def echoed(engine: Engine, session: Session, row: Row) -> list[Token]:
    """The prompt as tokens of the answer, with log-probabilities where they are asked for: none of the first."""
    stream, ids = session.tokenizer.stream(), torch.tensor([row.ids], device=engine.device)  # (1, T)
    top_logprobs = [None] * len(row.ids)
    if row.ask.num_logprobs is not None:
        h = engine.model.hidden(ids, torch.arange(ids.size(1), device=engine.device))[0]  # (T, D)
        for begin in range(0, len(row.ids) - 1, HEAD_ROWS):
            log_p = engine.model.head(h[begin : begin + HEAD_ROWS]).log_softmax(-1)  # (n, V)
            top = log_p.topk(row.ask.num_logprobs)
            for n, id in enumerate(row.ids[begin + 1 : begin + 1 + HEAD_ROWS]):
                pairs = [(id, log_p[n, id].item()), *zip(top.indices[n].tolist(), top.values[n].tolist())]
                top_logprobs[begin + 1 + n] = [(id, max(x, LOWEST)) for id, x in pairs]
    tokens = [Token(id, stream.feed(id), top_logprobs=pairs) for id, pairs in zip(row.ids, top_logprobs)]
    if row.new:
        row.printer.stream = stream  # bytes at the prompt's end may be completed by the answer
    elif tokens:
        tokens[-1] = tokens[-1]._replace(text=tokens[-1].text + stream.flush())
    return tokens
