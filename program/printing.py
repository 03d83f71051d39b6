"""Token ids as they are decided -> text on stdout, or JSON lines. This file knows no flag, file or prompt format.

Printer         one answer: its ids, its text up to a stop string, and where each piece came from
Answer          a request of program/prompts.py on its way through an engine
Session         an engine, and how to decode with it
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

import scheduler
from generate import Engine
from program.edge import interrupts_held
from program.prompts import Request
from program.report import ACCEPTED, CORRECTED, PLAIN_TOKEN, bytes_read, origin, peak_memory_gb, rate, speculative
from program.threads import Threads
from sampling import Sampling
from timing import Timing
from tokenizer import StopStrings, Tokenizer

END = object()  # of an iterator
COLOURS = {ACCEPTED: "\033[34m", CORRECTED: "\033[31m"}  # blue: drafted and accepted; red: in a rejected one's place


class Printer:
    """One answer. With `streaming`, text appears on stdout as it is decided; with `coloured` it shows the origin of its
    tokens."""

    def __init__(
        self, tokenizer: Tokenizer, stop_ids: frozenset[int], stops: Sequence[str] = (), streaming: bool = False,
        coloured: bool = False,
    ):  # fmt: skip
        self.stop_ids, self.streaming, self.coloured = stop_ids, streaming, coloured
        self.stops, self.stream = StopStrings(stops), tokenizer.stream(continues=True)
        self.ids: list[int] = []
        self.pieces: list[str] = []
        self.coloured_pieces: list[str] = []

    @property
    def at_stop_string(self) -> bool:
        return self.stops.stopped

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def feed(self, id: int, origin: int = PLAIN_TOKEN) -> None:
        self.ids.append(id)
        if id not in self.stop_ids:
            self._add(self.stops.feed(self.stream.feed(id)), origin)

    def _add(self, text: str, origin: int = PLAIN_TOKEN) -> None:
        colour = COLOURS.get(origin) if self.coloured and text else None
        self.pieces.append(text)
        self.coloured_pieces.append(f"{colour}{text}\033[0m" if colour else text)
        if self.streaming and text:
            print(self.coloured_pieces[-1], end="", flush=True)

    def close(self) -> None:
        """Release held-back bytes and end the line."""
        self._add(self.stops.feed(self.stream.flush()) + self.stops.flush())
        if self.streaming:
            print(end="\n" if self.ids else "", flush=True)

    def finish_reason(self) -> str:
        at_stop = self.ids and self.ids[-1] in self.stop_ids
        return "stop" if self.at_stop_string or at_stop else "length"


@dataclass(eq=False)
class Answer:
    """A request with what becomes of it. `request` is the engine's, once it has been added."""

    row: Request
    printer: Printer
    request: scheduler.Request | None = None
    number: int = 0  # in the order of the rows

    def feed(self) -> bool:
        """Print the tokens that the request got since the last call. Has the answer ended?"""
        printer, request = self.printer, self.request
        while len(printer.ids) < len(request.tokens) and not printer.at_stop_string:
            number = len(printer.ids)
            record = request.token_records[number] if request.token_records else None
            printer.feed(request.tokens[number], origin(record) if record else PLAIN_TOKEN)
        return printer.at_stop_string or request.finish_reason is not None

    def cut(self) -> None:
        """Forget the tokens that a round decided behind a stop string."""
        request, num_tokens = self.request, len(self.printer.ids)
        del request.tokens[num_tokens:], request.token_records[num_tokens:]

    def result(self, engine: Engine) -> dict:
        """The JSON object of DESIGN's contract."""
        request, timing, ids = self.request, Timing([self.request]), self.printer.ids
        return self.row.labels() | {
            "prompt_tokens": request.prompt, "tokens": ids, "text": self.printer.text,
            "finish_reason": self.printer.finish_reason(), "cached_tokens": request.num_reused,
            "decode_tok_s": rate(len(ids) - 1, request.decode_s), "ttft_s": request.ttft_s,
            "prefill_tok_s": rate(timing.prompt_tokens, request.prefill_s),
            "bandwidth_gb_s": rate(bytes_read(engine, timing), timing.decode_s) / 1e9,
            "peak_memory_gb": peak_memory_gb(engine.device), "speculative": speculative(engine, [timing], 0),
            **logprobs(request, len(ids)),
        }  # fmt: skip


def logprobs(request: scheduler.Request, num_tokens: int) -> dict:
    """The "logprobs" of the JSON contract, where they were asked for; null stands for minus infinity."""
    if not request.top_logprobs:
        return {}
    return {
        "logprobs": [
            [{"id": int(id), "logprob": log_p if log_p > -math.inf else None} for id, log_p in token]
            for token in request.top_logprobs[:num_tokens]
        ]
    }


@dataclass
class Session:
    """An engine, and how one run of the program decodes with it."""

    engine: Engine
    tokenizer: Tokenizer
    sampling: Sampling
    stop_ids: frozenset[int]
    coloured: bool = False
    threads: Threads | None = None  # to be chosen while decoding
    costs: dict = field(default_factory=dict)  # number of threads -> Engine.costs_by_rows
    after_step: Callable[[], object] = lambda: None
    observed: object = None  # the step that `threads` has heard of last

    def printer(self, stops: Sequence[str], streaming: bool = False) -> Printer:
        return Printer(self.tokenizer, self.stop_ids, stops, streaming, self.coloured)

    def decode(self, answers: Iterable[Answer | None]) -> Iterator[Answer]:
        """Decode answers, as many at a time as the engine has slots; each is yielded when it has ended. One whose
        request failed has an `error`. Where `answers` has None, the next one has not come yet: busy slots go on. Ctrl-C
        ends all between two tokens; what was printed stays."""
        engine, answers, running = self.engine, iter(answers), {}
        try:
            with interrupts_held() as interrupts:
                while not interrupts:
                    answer = None
                    while len(engine.requests) < engine.batch_size and isinstance(answer := next(answers, END), Answer):
                        running[self.start(answer)] = answer
                    if not running:
                        if answer is END:
                            return
                        continue
                    engine.step()
                    self.observe_step()
                    self.after_step()
                    for id in [id for id, answer in running.items() if answer.feed()]:
                        answer = running.pop(id)
                        answer.cut()
                        engine.abort(id)  # a stop string has ended it, if it runs still
                        answer.printer.close()
                        yield answer
        finally:
            for id, answer in running.items():
                engine.abort(id)
                answer.printer.close()

    def start(self, answer: Answer) -> int:
        row = answer.row
        id = self.engine.add_request(
            row.ids, sampling=row.sampling or self.sampling, max_new_tokens=row.max_new_tokens,
            stop_ids=self.stop_ids, seed=row.seed,
        )  # fmt: skip
        answer.request = self.engine.requests[id]
        return id

    def choose_threads(self, num_threads: int) -> None:
        """Let the number of threads follow the steps' times, from now on and up to so many."""
        self.threads = Threads(num_threads, self.use_threads)

    def use_threads(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        if num_threads in self.costs:
            self.engine.use_costs(self.costs[num_threads])

    def observe_step(self) -> None:
        """Let the number of threads follow the steps' times."""
        step = self.engine.last_step
        if self.threads is not None and step is not self.observed:
            self.observed = step
            self.threads.observe((len(step.positions), step.k), step.seconds)
