"""OpenAI's protocol as data: the body of a request -> `Ask`; tokens as they are decided -> the objects of an answer.

    Refusal         an error in OpenAI's form, with its HTTP status
    Ask, ask_of     a checked request for text: what the model cannot honour is refused by name
    Token, Event    what one step decided for one answer
    Answer          one request's objects: chunks of a stream, or the whole

Keys of this project's own: `top_k`, `min_p` and `chat_template_kwargs`; `draft` false decodes plainly; `tokens` true
lists in every choice what each token was: its text, origin, round, p, q and the second at which it came. This file
knows no HTTP, queue or model.
"""

import json
import time
import uuid
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cli.prompts import SAMPLED, check_names
from decoding.sampling import Sampling
from loading.tokenizer import join_parts

ORIGINS = ("plain", "accepted", "corrected", "bonus")  # in cli/report.py's order
MOST_STOPS, MOST_LIKELIEST = 16, 20
MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1  # int64, as OpenAI has it
# Keys that change no text here, and those that would, with the values that ask for nothing.
UNREAD = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls")
NEUTRAL = {
    "presence_penalty": [0], "frequency_penalty": [0], "logit_bias": [{}], "suffix": [""], "best_of": [1],
    "tools": [[]], "tool_choice": ["none", "auto"], "functions": [[]], "function_call": ["none", "auto"],
    "modalities": [["text"]], "response_format": [{"type": "text"}], "audio": [], "prediction": [],
    "reasoning_effort": [], "verbosity": [], "web_search_options": [],
}  # fmt: skip
KINDS = {401: "authentication_error", 429: "rate_limit_error"}


class Refusal(Exception):
    """An error as a client sees it."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None):
        super().__init__(message)
        kind = KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.status, self.body = status, {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Ask(NamedTuple):
    """What one request asks for."""

    prompts: list[str | list[int]] | list[list[dict]]  # texts or ids; of a chat one conversation
    chat: bool
    n: int
    new: int | None
    stops: list[str]
    seed: int | None
    sampling: Sampling
    likeliest: int | None  # so many log-probabilities a token besides its own; None: not even that
    echo: bool
    stream: bool
    usage: bool  # in a stream
    tokens: bool
    draft: bool
    names: dict  # of the chat template's own, such as enable_thinking


class Fields:
    """A body whose keys are taken one by one, so that what nobody took can be named."""

    def __init__(self, body: dict):
        self.left = {key: value for key, value in body.items() if value is not None}

    def take(self, key: str, default, wanted: str, valid: Callable[[object], bool]):
        value = self.left.pop(key, default)
        if value is not default and not valid(value):
            raise Refusal(f"{key} = {json.dumps(value):.99} must be {wanted}", key)
        return value

    def whole(self, key: str, default: int | None, low: int, high: int) -> int | None:
        return self.take(key, default, f"a whole number from {low} to {high}",
                         lambda x: type(x) is int and low <= x <= high)  # fmt: skip

    def number(self, key: str, default: float | None) -> float | None:
        return self.take(key, default, "a number", lambda x: type(x) in (int, float))

    def flag(self, key: str, default: bool = False) -> bool:
        return self.take(key, default, "true or false", lambda x: type(x) is bool)


def ask_of(body: object, chat: bool, model: str, usual: Sampling, new: int | None) -> Ask:
    """The body of /v1/chat/completions or /v1/completions, checked. usual, new: where it says nothing. Refusal names
    what is wrong, or what this server cannot do."""
    if not isinstance(body, dict):
        raise Refusal("the body must be a JSON object")
    fields = Fields(body)
    asked = fields.take("model", model, "a string", lambda x: isinstance(x, str))
    if asked != model:
        raise Refusal(f"no model {asked!r:.99}: this server has {model!r}", "model", 404, "model_not_found")
    prompts = [messages_of(fields)] if chat else prompts_of(fields)
    for key in UNREAD:
        fields.left.pop(key, None)
    n = fields.whole("n", 1, 1, 128)
    for key, neutral in NEUTRAL.items():
        value = fields.left.pop(key, None)
        if value is not None and value not in (neutral if key != "best_of" else [n]):
            raise Refusal(f"{key} = {json.dumps(value):.99} is not supported: leave it away", key, 400, "unsupported")
    stops = fields.take("stop", [], f"a string or up to {MOST_STOPS} strings, none empty", is_stop)
    stream, echo = fields.flag("stream"), not chat and fields.flag("echo")
    wish = fields.take("stream_options", {}, '{"include_usage": true or false}, in a stream', lambda x: stream
                       and isinstance(x, dict) and set(x) <= {"include_usage", "include_obfuscation"}
                       and isinstance(x.get("include_usage", False), bool))  # fmt: skip
    longest = [fields.whole(key, None, 0 if echo else 1, 2**31) for key in ("max_tokens", "max_completion_tokens")]
    if None not in longest and longest[0] != longest[1]:
        raise Refusal("max_tokens and max_completion_tokens differ: give one of them", "max_tokens")
    likeliest = None if chat else fields.whole("logprobs", None, 0, MOST_LIKELIEST)
    if chat:
        logprobs, top_logprobs = fields.flag("logprobs"), fields.whole("top_logprobs", 0, 0, MOST_LIKELIEST)
        if top_logprobs and not logprobs:
            raise Refusal(f"top_logprobs = {top_logprobs} needs logprobs = true", "top_logprobs")
        likeliest = top_logprobs if logprobs else None
    values = {key: fields.number(key, getattr(usual, key)) for key in SAMPLED}
    try:
        sampling = Sampling(**values)
    except ValueError as error:
        raise Refusal(str(error), str(error).split()[0]) from None
    ask = Ask(
        prompts, chat, n, next((x for x in longest if x is not None), new),
        [stops] if isinstance(stops, str) else stops, fields.whole("seed", None, MIN_SEED, MAX_SEED), sampling,
        likeliest, echo, stream, wish.get("include_usage", False), fields.flag("tokens"), fields.flag("draft", True),
        names_of(fields) if chat else {},
    )  # fmt: skip
    if fields.left:
        key = min(fields.left)
        raise Refusal(f"{key!r:.99} is not supported by this server", key[:99], 400, "unknown_parameter")
    return ask


def is_stop(x: object) -> bool:
    return all(isinstance(s, str) and s for s in ([x] if isinstance(x, str) else x)) if isinstance(
        x, str | list) and len(x if isinstance(x, list) else [x]) <= MOST_STOPS else False  # fmt: skip


def prompts_of(fields: Fields) -> list[str | list[int]]:
    """A text, a list of token ids, or a list of either."""

    def is_ids(x: object) -> bool:
        return isinstance(x, list) and all(type(id) is int for id in x)

    def is_prompts(x: object) -> bool:
        return isinstance(x, str) or (isinstance(x, list) and bool(x) and (is_ids(x) or all(
            isinstance(part, str) or (is_ids(part) and bool(part)) for part in x)))  # fmt: skip

    prompt = fields.take("prompt", None, "a text, a list of token ids, or a list of texts or of such lists", is_prompts)
    if prompt is None:
        raise Refusal("prompt is missing", "prompt")
    return [prompt] if isinstance(prompt, str) or is_ids(prompt) else prompt


def names_of(fields: Fields) -> dict:
    names = fields.take("chat_template_kwargs", {}, "an object", lambda x: isinstance(x, dict))
    try:
        check_names(names)
    except ValueError as error:
        raise Refusal(str(error), "chat_template_kwargs") from None
    return names


def messages_of(fields: Fields) -> list[dict]:
    """{"role", "content"} objects whose content is a text, or a list of {"type": "text", "text"} parts."""
    messages = fields.take("messages", [], "a list of messages", lambda x: isinstance(x, list))
    if not messages:
        raise Refusal("messages is missing or empty", "messages")
    found = []
    for i, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        try:
            content = join_parts(content)
        except ValueError as error:
            raise Refusal(f"messages[{i}]: {error}", f"messages[{i}]") from None
        if not isinstance(content, str) or not isinstance(message.get("role"), str):
            raise Refusal(f'messages[{i}] must have a "role" and a "content" that is a text', f"messages[{i}]")
        if other := [key for key in message if key not in ("role", "content", "name", "refusal") and message[key]]:
            raise Refusal(f"messages[{i}].{other[0]:.99} is not supported: there are no tools", f"messages[{i}]")
        found.append({"role": message["role"], "content": content})
    return found


# ---------------------------------------------------------------------------------------------- answers


class Token(NamedTuple):
    """A token of an answer: what it adds to the text, where it came from, and of its round: the number, the
    probabilities p of the target and q of the draft. at: seconds of decoding until it was decided."""

    id: int
    text: str
    origin: int = 0
    round: int = 0
    at: float = 0.0
    p: float | None = None
    q: float | None = None
    overlap: float | None = None  # sum of min(p, q) over the vocabulary
    likeliest: Sequence[tuple[int, float]] | None = None  # (id, log-probability), its own first; none: unknown


class Event(NamedTuple):
    """What came for answer `index` of a request; `ending`: its finish_reason and timings, once."""

    index: int
    tokens: list[Token]
    ending: dict | None = None


class Answer:
    """The objects of one request's answers. `pieces`: the bytes of every token id."""

    def __init__(self, ask: Ask, model: str, pieces: Sequence[bytes]):
        self.ask, self.pieces, kind = ask, pieces, "chat.completion" if ask.chat else "text_completion"
        self.head = {
            "id": f"{'chatcmpl' if ask.chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": kind + ".chunk" * (ask.chat and ask.stream), "created": int(time.time()), "model": model,
        }  # fmt: skip
        self.offset: dict[int, int] = {}  # characters of each answer so far, where a completion's tokens are listed

    def usage(self, prompted: int, events: Sequence[Event]) -> dict:
        """So many tokens were read; what the caches held of them already is said by the endings, for every answer."""
        ended = [event.ending["timings"] for event in events if event.ending]
        decoded, kept = (sum(timings[key] for timings in ended) for key in ("tokens", "cached_tokens"))
        return {"prompt_tokens": prompted, "completion_tokens": decoded, "total_tokens": prompted + decoded,
                "prompt_tokens_details": {"cached_tokens": min(kept, prompted)}}  # fmt: skip

    def opening(self, index: int) -> dict:
        """A chat's first chunk."""
        delta = {"role": "assistant", "content": ""}
        return self.chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})

    def chunk(self, *choices: dict, usage: dict | None = None) -> dict:
        return {**self.head, "choices": list(choices)} | ({"usage": usage} if self.ask.usage else {})

    def choice(self, event: Event, whole: bool = False) -> dict:
        """One choice, of a chunk or of the whole answer."""
        text, ending = "".join(token.text for token in event.tokens), event.ending or {}
        shown = {"text": text}
        if self.ask.chat:
            content = {"content": text} if text or whole else {}
            shown = {"message": {"role": "assistant", **content, "refusal": None}} if whole else {"delta": content}
        logprobs = None
        if self.ask.likeliest is not None and event.tokens:
            logprobs = self.chat_logprobs(event.tokens) if self.ask.chat else self.logprobs(event)
        found = {"index": event.index, **shown, "logprobs": logprobs, "finish_reason": ending.get("finish_reason")}
        if self.ask.tokens and event.tokens:
            kept = ("text", "round", "at", "p", "q", "overlap")
            found["tokens"] = [
                {"origin": ORIGINS[token.origin], "logprob": token.likeliest and token.likeliest[0][1]}
                | {key: getattr(token, key) for key in kept}
                for token in event.tokens
            ]
        return found | ({"timings": ending["timings"]} if ending else {})

    def spelled(self, id: int) -> str:
        return self.pieces[id].decode(errors="replace")

    def chat_logprobs(self, tokens: list[Token]) -> dict:
        def entry(id: int, logprob: float) -> dict:
            return {"token": self.spelled(id), "logprob": logprob, "bytes": list(self.pieces[id])}

        return {
            "content": [
                entry(*token.likeliest[0]) | {"top_logprobs": [entry(*pair) for pair in token.likeliest[1:]]}
                for token in tokens
            ],
            "refusal": None,
        }  # fmt: skip

    def logprobs(self, event: Event) -> dict:
        """The older form: a list for each fact. A token is listed as the characters that it adds to the text, so that
        text_offset points at them: none for BOS or part of a character. Of equal strings the likelier one counts."""
        index, tokens = event.index, event.tokens
        texts, offsets, at = [token.text for token in tokens], [], self.offset.get(index, 0)
        for text in texts:
            offsets.append(at)
            at += len(text)
        self.offset[index] = at
        pairs = [token.likeliest for token in tokens]
        top = [found and {self.spelled(id): x for id, x in reversed(found[1:])} for found in pairs]
        return {
            "tokens": texts, "token_logprobs": [found[0][1] if found else None for found in pairs],
            "top_logprobs": top if self.ask.likeliest else None, "text_offset": offsets,
        }  # fmt: skip
