"""The text of an answer, as its tokens are decided.

    Answer          a prompt with its request's arguments, then its request, its tokens and its text
    Completion      a finished answer, as LLM.generate returns it

Text is made here and nowhere else: characters are complete, stop strings end it, and a stop id adds
no text. generate.LLM fills answers; command line, server and scripts show them.
"""

from collections.abc import Sequence
from typing import NamedTuple

from decoding.stop_strings import StopStrings


class Completion(NamedTuple):
    """A finished answer. `logprobs`: for each token the pairs (id, log-probability), its own first,
    where the engine records them. `drafting`: the statistics.TokenRecord of each token, with a
    drafter."""

    text: str
    tokens: list[int]
    finish_reason: str  # "stop" or "length"
    logprobs: list
    drafting: list


class Answer:
    """An answer to a prompt of token ids. `request_args` are the arguments of
    Engine.add_request. `finish_reason` is "stop" or "length", and "length" also for a request that
    was aborted or failed; `check` raises the error of one that failed."""

    def __init__(
        self,
        tokenizer,
        prompt: list[int],
        stops: Sequence[str] = (),
        **request_args,
    ):
        self.tokenizer = tokenizer
        self.prompt = prompt
        self.request_args = request_args
        self.stop_ids = request_args.get("stop_ids", frozenset())
        self.stops = StopStrings(stops, tokenizer.specials if stops else {})
        self.stream = tokenizer.stream(continues=True)
        self.request = None  # the engine's, once it has been added
        self.engine = None  # the engine that its prompt was made for; None: any
        self.ids: list[int] = []  # those of the request's tokens that `feed` has read
        self.pieces: list[str] = []  # one a token, and the rest of the text at the end
        self.is_finished = False

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def at_stop_string(self) -> bool:
        return self.stops.stopped

    @property
    def finish_reason(self) -> str:
        at_stop_id = self.ids and self.ids[-1] in self.stop_ids
        return "stop" if self.at_stop_string or at_stop_id else "length"

    def feed(self) -> bool:
        """Add the text of the tokens that the request got since the last call. Returns whether the
        answer has ended: with its request, or at a stop string, after which the request may have
        more tokens."""
        tokens = self.request.tokens
        while len(self.ids) < len(tokens) and not self.at_stop_string:
            number = len(self.ids)
            id = tokens[number]
            self.ids.append(id)
            text = self.stops.feed_token(id, self.stream, is_last=id in self.stop_ids)
            self.add(text, self.token_record(number))
        return self.at_stop_string or self.request.finish_reason is not None

    def token_record(self, number: int):
        """The TokenRecord of a token; None without a drafter."""
        records = self.request.token_records
        return records[number] if records else None

    def rejected_texts(self, record) -> list[str]:
        """The texts of the drafted tokens in whose place a TokenRecord's token stands."""
        return self.tokenizer.token_texts(record.rejected) if record else []

    def add(self, text: str, record=None) -> None:
        self.pieces.append(text)

    def close(self) -> None:
        """Add the text that waited for more bytes or for the rest of a stop string, and drop the
        request's tokens after the stop string that ended it."""
        self.add(self.stops.feed(self.stream.flush()) + self.stops.flush())
        if self.request is not None:
            num_tokens = len(self.ids)
            del self.request.tokens[num_tokens:]
            del self.request.token_steps[num_tokens:]
            del self.request.token_records[num_tokens:]
        self.engine = None  # an answer that is kept does not keep a model
        self.is_finished = True  # last: another thread may wait for it

    def check(self) -> None:
        """Raise the error that ended the request, if one did."""
        if self.request.error is not None:
            raise self.request.error

    def completion(self) -> Completion:
        """The finished answer. Raises the error that ended its request."""
        self.check()
        logprobs = self.request.top_logprobs[: len(self.ids)]
        return Completion(
            self.text, self.ids, self.finish_reason, logprobs, self.request.token_records
        )
