"""Rows that wait, and the thread that decodes them: what scripts/serve.py's connections hand their requests to.

    Job         one request, whose answers' events reach its connection in order
    Row         one answer to decode: a prompt with settings of its own, then its tokens
    Decoder     which rows run together, on which engine; what the caches hold; who has left
    engines_of  one engine of one row and, where there may be more, one of so many

Rows that wait when a batch starts are decoded together if their samplings are of one kind (greedy, plain or filtered),
up to the last engine's rows. A batch is fixed once it has started: who comes later waits until it has ended. Each row
equals its prompt alone; a row alone runs on the first engine, of one row. What an engine's caches hold of all its
prompts is not computed again. This file knows no HTTP, and no flag.
"""

import asyncio
import contextlib
import copy
import threading
import time
import traceback
from collections.abc import AsyncIterator, Sequence

import torch

from generate import Engine, generate
from kept import Kept
from program.edge import print_error
from program.loading import warm_up
from program.printing import Printer, Session
from program.report import PLAIN_TOKEN, origin, rate, speculative
from sampling import FILTERED, GREEDY, PLAIN
from scripts.openai_form import MOST_LIKELIEST, Ask, Event, Refusal, Token
from timing import Timing

HEAD_ROWS = 512  # positions of an echoed prompt that the head scores at once
FRAME_S = 1 / 30  # tokens that come within it travel together: each event costs the decoding thread time
LOWEST = -9999.0  # stands for a log-probability of minus infinity, which JSON has not


class Job:
    """One request: events from the decoding thread to its connection's loop. `left`: nobody waits for it any more."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop, self.told, self.begun, self.left = loop, asyncio.Queue(), time.perf_counter(), False

    def tell(self, event: Event | Refusal) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed: the server ends
            self.loop.call_soon_threadsafe(self.told.put_nowait, event)

    async def events(self, rows: int) -> AsyncIterator[Event]:
        """What is told until so many rows have ended. Raises the Refusal that is told."""
        while rows:
            event = await self.told.get()
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
        self.printer = Printer(session.tokenizer, [""], session.stop_ids, [*ask.stops, *stops], as_json=True)
        self.pending: list[Token] = []  # not sent yet
        self.rounds, self.over, self.sent = 0, False, 0.0

    def kind(self) -> tuple:
        """What rows of one batch share."""
        return self.ask.sampling.kind, self.ask.draft

    def feed(self, id: int, timing: Timing, i: int) -> bool:
        """Token `id` of row i was decided. Is it time to send what is pending? Not within a step of the row."""
        printer, fact = self.printer, timing.tokens[i][-1] if timing.tokens else None
        shown = len(printer.pieces[0])
        printer.feed(0, id)
        self.over = bool(printer.ended) or id in printer.stop_ids or timing.decoded[i] >= self.new
        if self.over:
            printer.close()
        self.rounds += fact is None or fact.index == 0
        token = Token(
            id, "".join(printer.pieces[0][shown:]), origin(fact) if fact else PLAIN_TOKEN, self.rounds,
            timing.prefill_s + timing.decode_s,
        )  # fmt: skip
        if timing.likeliest[i]:
            likeliest = [
                (int(id), max(x, LOWEST)) for id, x in timing.likeliest[i][-1][: 1 + (self.ask.likeliest or 0)]
            ]
            (p, q), drafted = timing.weighed[i][-1], fact is not None and fact.index < fact.k
            token = token._replace(p=p, q=q if drafted else None, likeliest=likeliest)
            token = token._replace(overlap=fact.overlap) if drafted else token
        self.pending += [token] if self.new else []
        whole = fact is None or fact.index >= fact.accepted
        return self.over or (whole and time.perf_counter() > self.sent + FRAME_S)

    def send(self, ending: dict | None = None) -> None:
        self.job.tell(Event(self.index, self.pending, ending))
        self.pending, self.sent = [], time.perf_counter()


class Decoder:
    """Decodes what waits, in the thread that calls `run`. Of the engines, the first has one row and the last most."""

    def __init__(self, session: Session, engines: Sequence[Engine], most_waiting: int):
        self.session, self.engines, self.most_waiting = session, engines, most_waiting
        self.speculate_k, self.waiting, self.news = session.engine.speculate_k, [], threading.Condition()
        self.stopped = False  # answers are given up
        self.kept = {engine: Kept(engine) for engine in engines}

    def put(self, rows: list[Row]) -> None:
        with self.news:
            if len(rows) > self.most_waiting:
                raise Refusal(f"{len(rows)} answers are more than the {self.most_waiting} that may wait", "n")
            if len(self.waiting) + len(rows) > self.most_waiting:
                raise Refusal(f"{len(self.waiting)} answers wait already: try again later", None, 429, "queue_full")
            self.waiting += rows
            self.news.notify()

    def drop(self, job: Job) -> None:
        """Nobody waits for this request any more: rows that wait go now, rows that run at the next step."""
        job.left = True
        with self.news:
            self.waiting = [row for row in self.waiting if row.job is not job]

    def take(self, seconds: float) -> list[Row]:
        """The next batch: who has waited longest, and who may run beside. Empty where nobody comes in that time."""
        with self.news:
            self.news.wait_for(lambda: self.waiting, seconds)
            alike = [row for row in self.waiting if row.kind() == self.waiting[0].kind()]
            batch = alike[: self.engines[-1].batch_size]
            self.waiting = [row for row in self.waiting if row not in batch]
            return batch

    def run(self, batch: list[Row]) -> None:
        """Decode a batch. What goes wrong is told to its clients in a line; a bug keeps its traceback, on stderr."""
        engine = self.engines[0 if len(batch) == 1 else -1]
        try:
            self.decode(engine, batch)
        except Exception as error:
            expected = isinstance(error, ValueError)
            print_error(error) if expected else traceback.print_exc()
            for row in batch:
                row.job.tell(Refusal(f"decoding failed: {error}" if expected else "decoding failed", status=500))

    def decode(self, engine: Engine, batch: list[Row]) -> None:
        session, ask, begun, seen = self.session, batch[0].ask, time.perf_counter(), 0
        for row in batch:
            if row.ask.echo:
                row.pending = echoed(engine, session, row)
                row.send()
        # Compiled steps are compiled noting: not to do so would compile them anew.
        engine.state.noting = engine.compile or any(row.ask.tokens or row.ask.likeliest is not None for row in batch)
        prompts, budgets = [row.ids for row in batch], [max(1, row.new) for row in batch]
        timing, ended = Timing(), set()
        engine.speculate_k = self.speculate_k if ask.draft else 0
        for i, id in generate(
            engine.model, prompts, stop_ids=session.stop_ids, engine=engine, max_new_tokens=budgets, timing=timing,
            seed=[row.seed for row in batch], cached=self.kept[engine].take(prompts, budgets), ended=ended,
            sampling=[row.ask.sampling for row in batch],
        ):  # fmt: skip
            row = batch[i]
            if row.feed(id, timing, i):
                row.send()
            if row.over:
                row.send(self.ending(engine, timing, i, row, begun))
            ended |= {j for j, row in enumerate(batch) if row.over or row.job.left}
            if session.threads and timing.steps > seen:
                seen = timing.steps
                session.threads.observe((engine.batch_size, timing.records[-1].k), timing.records[-1].seconds)
            if self.stopped:
                break
        self.kept[engine].hold([row.printer.ids[0] for row in batch])

    def ending(self, engine: Engine, timing: Timing, i: int, row: Row, begun: float) -> dict:
        """What the last event of row i tells."""
        waited = begun - row.job.begun
        return {"finish_reason": row.printer.finish_reason(0), "timings": {
            "queue_s": waited, "ttft_s": waited + timing.prefill_s, "tokens": timing.decoded[i] if row.new else 0,
            "rows": len(timing.decoded), "seed": row.seed, "cached_tokens": timing.cached[i],
            "prefill_tok_s": rate(timing.prompt_tokens, timing.prefill_s),
            "decode_tok_s": rate(timing.decoded[i] - 1, timing.row_s[i]),
            "speculative": speculative(engine, [timing], i) if row.ask.draft else None,
        }}  # fmt: skip


@torch.inference_mode()
def echoed(engine: Engine, session: Session, row: Row) -> list[Token]:
    """The prompt as tokens of the answer, with log-probabilities where they are asked for: none of the first."""
    stream, ids = session.tokenizer.stream(), torch.tensor([row.ids], device=engine.device)  # (1, T)
    likeliest = [None] * len(row.ids)
    if row.ask.likeliest is not None:
        h = engine.model.hidden(ids, torch.arange(ids.size(1), device=engine.device))[0]  # (T, D)
        for begin in range(0, len(row.ids) - 1, HEAD_ROWS):
            log_p = engine.model.head(h[begin : begin + HEAD_ROWS]).log_softmax(-1)  # (n, V)
            top = log_p.topk(row.ask.likeliest)
            for n, id in enumerate(row.ids[begin + 1 : begin + 1 + HEAD_ROWS]):
                pairs = [(id, log_p[n, id].item()), *zip(top.indices[n].tolist(), top.values[n].tolist())]
                likeliest[begin + 1 + n] = [(id, max(x, LOWEST)) for id, x in pairs]
    return [Token(id, stream.feed(id), likeliest=found) for id, found in zip(row.ids, likeliest)]


def engines_of(session: Session, rows: int) -> Sequence[Engine]:
    """The session's engine of one row, and one of `rows` where they are more: a row alone need not pay for others."""
    first, engines = session.engine, [session.engine]
    if rows > 1:
        drafter = None
        if first.drafts:  # the same model with tensors of its own
            drafter = copy.copy(first.drafter)
            drafter._buffers, drafter._modules = dict(drafter._buffers), dict(drafter._modules)
        engines.append(Engine(
            first.model, rows, first.max_seq_length, compile=first.compile, drafter=drafter,
            speculate_k=first.speculate_k, compile_prompts=first.cached.compile_prompts, one_width=first.one_width,
            process=first.state.process, logprobs=MOST_LIKELIEST, kind=first.cached.kind,
        ))  # fmt: skip
    for engine in engines if rows > 1 or first.compile else ():
        warm_up(engine, session.sampling, first.max_seq_length // 2, (GREEDY, PLAIN, FILTERED))
    return engines
