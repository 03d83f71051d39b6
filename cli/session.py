"""An engine, and how one run of the program decodes with it. This file prints nothing and knows no flag."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from cli.answers import Answer, Printer
from cli.errors import defer_interrupts
from decoding.sampling import Sampling
from generate import Engine
from loading.tokenizer import Tokenizer

END = object()  # closes an iterator of answers


@dataclass
class Session:
    """An engine, and how one run of the program decodes with it."""

    engine: Engine
    tokenizer: Tokenizer
    sampling: Sampling
    stop_ids: frozenset[int]
    coloured: bool = False
    after_step: Callable[[], object] = lambda: None

    def printer(self, stops: Sequence[str], streaming: bool = False) -> Printer:
        return Printer(self.tokenizer, self.stop_ids, stops, streaming, self.coloured)

    def decode(self, answers: Iterable[Answer | None]) -> Iterator[Answer]:
        """Decode answers, as many at a time as the engine has slots, and yield those that finish. The request of a
        failed one has an `error`. A None in `answers` means that no further answer is there yet: the others go on.
        Ctrl-C ends all between two tokens; printed text stays."""
        engine, answers, running = self.engine, iter(answers), {}
        try:
            with defer_interrupts() as interrupts:
                while not interrupts:
                    answer = None
                    while len(engine.requests) < engine.batch_size and isinstance(answer := next(answers, END), Answer):
                        running[self.start(answer)] = answer
                    if not running:
                        if answer is END:
                            return
                        continue
                    engine.step()
                    self.after_step()
                    for id in [id for id, answer in running.items() if answer.feed()]:
                        answer = running.pop(id)
                        answer.discard_extra_tokens()
                        engine.abort(id)  # for an answer that ended at a stop string
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
