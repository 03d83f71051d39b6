"""Token ids as they are decided -> text on stdout, or JSON lines. This file knows no flag, file or prompt format."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from generate import Engine, Timing, generate
from kept import Kept
from program.edge import interrupts_held
from program.report import ACCEPTED, CORRECTED, PLAIN_TOKEN, bytes_read, origin, peak_memory_gb, rate, speculative
from program.threads import Threads
from sampling import Sampling
from tokenizer import StopStrings, Tokenizer

COLOURS = {ACCEPTED: "\033[34m", CORRECTED: "\033[31m"}  # blue: drafted and accepted; red: in a rejected one's place


class Printer:
    """Prints a batch. A single row streams; several rows are printed whole at the end, each under its prompt. With
    `as_json` nothing is printed. `own_stops` are the rows' own. `coloured`: text shows the origin of its tokens."""

    def __init__(
        self, tokenizer: Tokenizer, texts: list[str], stop_ids: frozenset[int], stops: Sequence[str] = (),
        as_json: bool = False, coloured: bool = False, own_stops: Sequence[Sequence[str]] | None = None,
    ):  # fmt: skip
        self.texts, self.stop_ids, self.as_json, self.coloured = texts, stop_ids, as_json, coloured
        self.stops = [StopStrings(own) for own in own_stops or [stops] * len(texts)]
        self.ended: set[int] = set()  # rows whose text has met a stop string
        self.ids: list[list[int]] = [[] for _ in texts]
        self.pieces: list[list[str]] = [[] for _ in texts]
        self.shown: list[list[str]] = [[] for _ in texts]  # the same with colours
        self.streams = [tokenizer.stream(continues=True) for _ in texts]
        self.streaming = len(texts) == 1 and not as_json
        if self.streaming and texts[0]:
            # On a terminal the answer continues the prompt's line; in a log each has its own.
            print(texts[0], end="" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)

    def feed(self, row: int, id: int, origin: int = PLAIN_TOKEN) -> None:
        self.ids[row].append(id)
        if id not in self.stop_ids:
            self._text(row, self.stops[row].feed(self.streams[row].feed(id)), origin)
            if self.stops[row].stopped:
                self.ended.add(row)

    def _text(self, row: int, text: str, origin: int = PLAIN_TOKEN) -> None:
        colour = COLOURS.get(origin) if self.coloured and text else None
        self.pieces[row].append(text)
        self.shown[row].append(f"{colour}{text}\033[0m" if colour else text)
        if self.streaming and text:
            print(self.shown[row][-1], end="", flush=True)

    def close(self) -> None:
        """Release held-back bytes and end the line."""
        for row, stream in enumerate(self.streams):
            self._text(row, self.stops[row].feed(stream.flush()) + self.stops[row].flush())
            if self.stops[row].stopped:
                self.ended.add(row)
        if self.streaming:
            print(end="\n" if self.ids[0] else "", flush=True)
        elif not self.as_json and any(self.ids):
            for text, shown in zip(self.texts, self.shown, strict=True):
                print(text, end="", file=sys.stderr, flush=True)
                print("".join(shown), flush=True)

    def finish_reason(self, row: int) -> str:
        at_stop = self.ids[row] and self.ids[row][-1] in self.stop_ids
        return "stop" if row in self.ended or at_stop else "length"

    def rows(self, prompts: list[list[int]], timing: Timing, engine: Engine) -> list[dict]:
        """The JSON objects of DESIGN's contract, one per row."""
        common = {
            "ttft_s": timing.prefill_s, "prefill_tok_s": rate(timing.prompt_tokens, timing.prefill_s),
            "bandwidth_gb_s": rate(bytes_read(engine, timing), timing.decode_s) / 1e9,
            "peak_memory_gb": peak_memory_gb(engine.device),
        }  # fmt: skip
        return [
            {
                "prompt_tokens": prompt, "tokens": ids, "text": "".join(pieces),
                "finish_reason": self.finish_reason(row),
                "cached_tokens": timing.cached[row], "decode_tok_s": rate(len(ids) - 1, timing.row_s[row]), **common,
                "speculative": speculative(engine, [timing], row), **logprobs(timing, row),
            }
            for row, (prompt, ids, pieces) in enumerate(zip(prompts, self.ids, self.pieces, strict=True))
        ]  # fmt: skip


def logprobs(timing: Timing, row: int) -> dict:
    """The "logprobs" of the JSON contract, where they were asked for; null stands for minus infinity."""
    if not timing.likeliest or not timing.likeliest[row]:
        return {}
    return {
        "logprobs": [
            [{"id": int(id), "logprob": log_p if log_p > -math.inf else None} for id, log_p in token]
            for token in timing.likeliest[row]
        ]
    }


@dataclass
class Session:
    """What one run of the program keeps: an engine, and how to decode with it."""

    engine: Engine
    tokenizer: Tokenizer
    sampling: Sampling
    stop_ids: frozenset[int]
    coloured: bool = False
    threads: Threads | None = None  # to be chosen while decoding

    def __post_init__(self):
        self.kept = Kept(self.engine)

    def decode(self, printer: Printer, prompts, budgets: list[int], seed, sampling=None) -> Timing:
        """One batch, printed as it is decided; seed and sampling are one or one a row. What earlier batches left of its
        prompts is not computed again. Ctrl-C ends it between two tokens; what was printed stays."""
        timing, seen, cached = Timing(), 0, self.kept.take(prompts, budgets)
        try:
            with interrupts_held() as interrupts:
                for row, id in generate(
                    self.engine.model, prompts, sampling=sampling or self.sampling, stop_ids=self.stop_ids, seed=seed,
                    max_new_tokens=budgets, engine=self.engine, timing=timing, cached=cached, ended=printer.ended,
                ):  # fmt: skip
                    printer.feed(row, id, origin(timing.tokens[row][-1]) if timing.tokens else PLAIN_TOKEN)
                    if self.threads and timing.steps > seen:
                        seen = timing.steps
                        self.threads.observe(timing.records[-1].k, timing.records[-1].seconds)
                    if interrupts:
                        break
                self.kept.hold(printer.ids)
        finally:
            printer.close()
        return timing
