"""RowAnswer: the answer to a row of prompts, as text on a terminal and as --json's object."""

import math
import os
import sys

from cli.options import Options
from cli.prompts import Row
from cli.report import (
    ACCEPTED,
    CORRECTED,
    bytes_read,
    decided,
    peak_memory_gb,
    rate,
    speculative,
    token_origin,
)
from decoding.answers import Answer
from decoding.engine import Engine
from decoding.statistics import Timing, TokenRecord
from generate import LLM

END_COLOUR = "\033[0m"
# Blue marks accepted draft tokens, red the token that replaced a rejected one.
COLOURS = {ACCEPTED: "\033[34m", CORRECTED: "\033[31m"}


def shows_drafts(options: Options) -> bool:
    """Do answers on this stdout show which tokens were drafted?"""
    has_colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    return options.output.show_drafts and has_colours


class RowAnswer(Answer):
    """With `streaming`, the text appears on stdout as it comes. With `coloured`, colours show which
    tokens were drafted. `number`: in the order of the rows."""

    def __init__(
        self, llm: LLM, row: Row, streaming: bool = False, coloured: bool = False, number=0
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
        self.coloured = coloured
        self.number = number
        self.coloured_pieces: list[str] = []  # the pieces of the text with their colours

    def add(self, text: str, record: TokenRecord | None = None) -> None:
        super().add(text, record)
        if self.coloured and text and record is not None and token_origin(record) in COLOURS:
            text = f"{COLOURS[token_origin(record)]}{text}{END_COLOUR}"
        self.coloured_pieces.append(text)
        if self.streaming:
            print(text, end="", flush=True)

    def close(self) -> None:
        super().close()
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
            "peak_memory_gb": peak_memory_gb(engine.device),
            "speculative": speculative(engine, [timing], 0),
        }
        if request.top_logprobs:
            logprobs = request.top_logprobs[: len(self.ids)]
            result["logprobs"] = [as_objects(token) for token in logprobs]
        return self.row.labels() | result


def as_objects(pairs: list) -> list[dict]:
    """A token's pairs (id, log-probability) for JSON, in which null stands for minus infinity."""
    return [{"id": int(id), "logprob": log_p if log_p > -math.inf else None} for id, log_p in pairs]
