"""RowAnswer: the answer to a row of prompts, as text on a terminal and as --json's object."""

import math

from cli.draft_marks import DraftMarks
from cli.prompts import Row
from cli.report import (
    bytes_read,
    decided,
    peak_memory_gb,
    rate,
    speculative,
    token_origin,
)
from cli.word_wrap import WordWrap
from decoding.answers import Answer
from decoding.engine import Engine
from decoding.statistics import Timing, TokenRecord
from generate import LLM


class RowAnswer(Answer):
    """With `streaming`, the text appears on stdout as it comes, broken at words by `wrap`. `marks`
    show which tokens were drafted. `number`: in the order of the rows."""

    def __init__(
        self,
        llm: LLM,
        row: Row,
        streaming: bool = False,
        marks: DraftMarks | None = None,
        number: int = 0,
        wrap: WordWrap | None = None,
    ):
        super().__init__(
            llm.tokenizer,
            row.ids,
            row.stop,
            sampling=row.sampling,
            max_new_tokens=row.max_new_tokens,
            stop_ids=llm.stop_ids,
            seed=row.seed,
        )
        self.row = row
        self.streaming = streaming
        self.marks = marks
        self.number = number
        self.wrap = wrap
        self.marked_pieces: list[str] = []  # the pieces of the text with their marks

    def add(self, text: str, record: TokenRecord | None = None) -> None:
        super().add(text, record)
        if self.marks is not None and record is not None:
            text = self.marks.marked(text, token_origin(record), self.rejected_texts(record))
        self.marked_pieces.append(text)
        if self.streaming:
            self.write(text if self.wrap is None else self.wrap.feed(text))

    def write(self, text: str) -> None:
        print(text, end="", flush=True)

    def close(self) -> None:
        super().close()
        if self.streaming and self.wrap is not None:
            self.write(self.wrap.flush())
        if self.streaming and self.ids:
            print(flush=True)

    def result(self, engine: Engine) -> dict:
        """The JSON object of --json."""
        request = self.request
        timing = Timing([request])
        result = {
            "prompt_tokens": request.prompt,
            "tokens": self.ids,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "cached_tokens": request.num_reused,
            "decode_tok_s": rate(decided([request]), request.decode_s),
            "ttft_s": request.ttft_s,
            "prefill_tok_s": rate(timing.prompt_tokens, request.prefill_s),
            "bandwidth_gb_s": rate(bytes_read(engine, timing), timing.decode_s) / 1e9,
            "peak_memory_gb": peak_memory_gb(engine.runner.device),
            "speculative": speculative(engine, timing),
        }
        if request.top_logprobs:
            logprobs = request.top_logprobs[: len(self.ids)]
            result["logprobs"] = [as_objects(token) for token in logprobs]
        return self.row.labels() | result


def as_objects(pairs: list) -> list[dict]:
    """A token's pairs (id, log-probability) for JSON, in which null stands for minus infinity."""
    return [{"id": int(id), "logprob": log_p if log_p > -math.inf else None} for id, log_p in pairs]
