"""Token ids as they are decided -> text on stdout, or JSON lines. This file knows no flag, file or prompt format.

Printer         one answer: its ids, its text up to a stop string, and the origin of each piece
Answer          a request of cli/prompts.py, its engine's request and its printer
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import decoding.scheduler as scheduler
from cli.prompts import Request
from cli.report import ACCEPTED, CORRECTED, PLAIN_TOKEN, bytes_read, decided, origin, peak_memory_gb, rate, speculative
from decoding.timing import Timing
from generate import Engine
from loading.tokenizer import StopStrings, Tokenizer

DIM, END_COLOUR = "\033[2m", "\033[0m"
COLOURS = {ACCEPTED: "\033[34m", CORRECTED: "\033[31m"}  # blue: drafted and accepted; red: in place of a rejected one
PARTIAL_TAG = re.compile(r"(</?(t(h(i(nk?)?)?)?)?)?\Z")  # the beginning of <think> or </think>, or nothing


class Printer:
    """One answer. With `streaming`, text appears on stdout as it is decided. With `coloured`, colours show which tokens
    were drafted."""

    def __init__(
        self, tokenizer: Tokenizer, stop_ids: frozenset[int], stops: Sequence[str] = (), streaming: bool = False,
        coloured: bool = False,
    ):  # fmt: skip
        self.stop_ids, self.streaming, self.coloured = stop_ids, streaming, coloured
        self.stops = StopStrings(stops, tokenizer.specials if stops else {})
        self.stream = tokenizer.stream(continues=True)
        self.ids: list[int] = []
        self.pieces: list[str] = []
        self.coloured_pieces: list[str] = []
        self.dims_thinking, self.in_thinking, self.pending = False, False, ""

    @property
    def at_stop_string(self) -> bool:
        return self.stops.stopped

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def dim_thinking(self, prompt: str) -> None:
        """Dim text from <think> to </think> on the terminal. A prompt that ends in <think> opens it too."""
        self.dims_thinking, self.in_thinking = True, prompt.rstrip().endswith("<think>")

    def feed(self, id: int, origin: int = PLAIN_TOKEN) -> None:
        self.ids.append(id)
        self._add(self.stops.feed_token(id, self.stream, is_last=id in self.stop_ids), origin)

    def _add(self, text: str, origin: int = PLAIN_TOKEN, is_last: bool = False) -> None:
        colour = COLOURS.get(origin) if self.coloured else None
        self.pieces.append(text)
        if self.dims_thinking:
            text = self._dim(text, colour, is_last)
        elif colour and text:
            text = f"{colour}{text}{END_COLOUR}"
        self.coloured_pieces.append(text)
        if self.streaming and text:
            print(text, end="", flush=True)

    def _dim(self, text: str, colour: str | None, is_last: bool) -> str:
        """Text with its colours. The beginning of a tag waits for the rest of the tag."""
        text, coloured_text = self.pending + text, ""
        end = len(text) if is_last else PARTIAL_TAG.search(text).start()
        text, self.pending = text[:end], text[end:]
        for part in filter(None, re.split("(?=<think>)|(?<=</think>)", text)):
            self.in_thinking |= part.startswith("<think>")
            part_colour = DIM if self.in_thinking else colour
            coloured_text += f"{part_colour}{part}{END_COLOUR}" if part_colour else part
            self.in_thinking &= not part.endswith("</think>")
        return coloured_text

    def close(self) -> None:
        """Print the text that waited for more bytes, for a stop string or for a tag, and end the line."""
        self._add(self.stops.feed(self.stream.flush()) + self.stops.flush(), is_last=True)
        if self.streaming:
            print(end="\n" if self.ids else "", flush=True)

    def finish_reason(self) -> str:
        at_stop_id = self.ids and self.ids[-1] in self.stop_ids
        return "stop" if self.at_stop_string or at_stop_id else "length"


@dataclass(eq=False)
class Answer:
    """A request and its answer. `request` is the engine's, once it has been added."""

    row: Request
    printer: Printer
    request: scheduler.Request | None = None
    number: int = 0  # in the order of the rows

    def feed(self) -> bool:
        """Feed the tokens that the request got since the last call. Returns whether the answer has ended."""
        printer, request = self.printer, self.request
        while len(printer.ids) < len(request.tokens) and not printer.at_stop_string:
            number = len(printer.ids)
            record = request.token_records[number] if request.token_records else None
            printer.feed(request.tokens[number], origin(record) if record else PLAIN_TOKEN)
        return printer.at_stop_string or request.finish_reason is not None

    def discard_extra_tokens(self) -> None:
        """Remove the tokens that a round decided after a stop string."""
        request, num_tokens = self.request, len(self.printer.ids)
        del request.tokens[num_tokens:], request.token_records[num_tokens:]

    def result(self, engine: Engine) -> dict:
        """The JSON object of DESIGN's contract."""
        request, timing, ids = self.request, Timing([self.request]), self.printer.ids
        return self.row.labels() | {
            "prompt_tokens": request.prompt, "tokens": ids, "text": self.printer.text,
            "finish_reason": self.printer.finish_reason(), "cached_tokens": request.num_reused,
            "decode_tok_s": rate(decided([request]), request.decode_s), "ttft_s": request.ttft_s,
            "prefill_tok_s": rate(timing.prompt_tokens, request.prefill_s),
            "bandwidth_gb_s": rate(bytes_read(engine, timing), timing.decode_s) / 1e9,
            "peak_memory_gb": peak_memory_gb(engine.device), "speculative": speculative(engine, [timing], 0),
            **logprobs(request, len(ids)),
        }  # fmt: skip


def logprobs(request: scheduler.Request, num_tokens: int) -> dict:
    """The "logprobs" of the JSON contract; {} without --logprobs. null stands for minus infinity."""
    if not request.top_logprobs:
        return {}
    return {
        "logprobs": [
            [{"id": int(id), "logprob": log_p if log_p > -math.inf else None} for id, log_p in token]
            for token in request.top_logprobs[:num_tokens]
        ]
    }
