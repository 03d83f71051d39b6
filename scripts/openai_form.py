"""OpenAI's protocol as data: a request's JSON body -> `TextRequest`; decided tokens -> the objects of an answer.

    Refusal             an error as OpenAI's clients expect it, with its HTTP status
    TextRequest         the keys of a request, with every field of Sampling; Completion and Chat add their own
    read_request        a checked request; a key that this server cannot honour is refused by name,
                        unless scripts/other_servers.py knows that its value changes nothing
    Event               the tokens that one step decided for one answer
    Answer              the objects of one request's answers: chunks of a stream, or complete choices

This project adds the keys top_k, min_p, chat_template_kwargs, parse_special, `draft` (false: decode without the draft)
and `tokens` (true: list each token's text, origin, round, p, q and second), and has ignore_eos and stop_token_ids from
vLLM. This file knows no HTTP and no model.
"""

import time
import uuid
from collections.abc import Sequence
from dataclasses import fields
from typing import Annotated, ClassVar, Literal, NamedTuple, get_origin, get_type_hints

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model

from cli.page import Token
from cli.prompts import check_template_kwargs
from decoding.sampling import Sampling
from loading.chat_messages import ContentError, join_parts, parse_arguments
from loading.chat_templates import THOUGHTS
from scripts.other_servers import translated

MAX_STOPS, MAX_TOP_LOGPROBS = 16, 20
MESSAGE_KEYS = {"role", "name", "content", "tool_calls", "tool_call_id", *THOUGHTS}  # as templates read them
MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1  # int64, as in OpenAI's schema
ERROR_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class Refusal(Exception):
    """An error with a status; `body` is the JSON that the client reads. `logged` is its line for the
    server's log: the message, or in its place one without what the request said."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        status: int = 400,
        code: str | None = None,
        logged: str | None = None,
    ):
        super().__init__(message)
        kind = ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.status, self.body = status, {"error": {"message": message, "type": kind, "param": param, "code": code}}
        self.logged = message if logged is None else logged


# --------------------------------------------------------------------------------------------- requests


def as_list(x: object) -> object:
    """A single stop string, text or list of token ids, in a list; a list of these as it is."""
    is_ids = isinstance(x, list) and len(x) > 0 and all(type(part) is int for part in x)
    return [x] if isinstance(x, str) or is_ids else x


def without_empty(x: object) -> object:
    """Stop strings in a list without the empty ones, which some clients send in place of none."""
    texts = as_list(x)
    return [text for text in texts if text != ""] if isinstance(texts, list) else texts


def setting_type(hint: object) -> object:
    """The type of a Sampling field in a request, where (token id, number) pairs are an object."""
    if get_origin(hint) is not tuple:
        return hint | None
    ids = Annotated[str, Field(pattern="^[0-9]{1,8}$")]
    return Annotated[dict[ids, float], AfterValidator(lambda x: tuple({int(id): x[id] for id in x}.items()))] | None


def answer_schema(x: object) -> dict:
    """The JSON schema of a response_format."""
    match x:
        case {"type": "json_object", **others} if not others:
            return {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": dict() as schema}}:
            return schema
    raise ValueError('give {"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": {…}}}')


HINTS = get_type_hints(Sampling)
SETTINGS = {field.name: (setting_type(HINTS[field.name]), None) for field in fields(Sampling)}
NonEmpty = Field(min_length=1)
MaxTokens = Annotated[int, Field(ge=0, le=2**31)]
Stops = Annotated[list[str] | None, BeforeValidator(without_empty), Field(max_length=MAX_STOPS)]
StreamOption = Literal["include_usage", "include_obfuscation", "continuous_usage_stats"]


class SharedKeys(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    n: int = Field(1, ge=1, le=128)
    stop: Stops = None
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = []
    ignore_eos: bool | None = None  # None: as --ignore_eos says
    seed: int | None = Field(None, ge=MIN_SEED, le=MAX_SEED)
    stream: bool = False
    stream_options: dict[StreamOption, bool | None] = {}
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    response_format: Annotated[dict | None, BeforeValidator(answer_schema)] = None
    tokens: bool = False
    draft: bool = True


class TextRequest(create_model("Settings", __base__=SharedKeys, **SETTINGS)):
    @property
    def sampling(self) -> Sampling:
        settings = {name: getattr(self, name) for name in SETTINGS}
        return Sampling(**{name: value for name, value in settings.items() if value is not None})

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    def model_post_init(self, context: object) -> None:
        try:
            _ = self.sampling
        except ValueError as error:  # it names the field first
            raise Refusal(str(error), str(error).split()[0].rstrip(":")) from None
        if any(self.stream_options.values()) and not self.stream:
            raise Refusal("stream_options needs stream = true", "stream_options")
        if self.max_completion_tokens not in (None, self.max_new_tokens):
            raise Refusal("max_tokens and max_completion_tokens differ: give one of them", "max_tokens")
        if self.max_new_tokens == 0 and not self.echo:
            raise Refusal("max_tokens = 0 must be at least 1: only an echo needs no token", "max_tokens")
        if self.chat and self.top_logprobs and not self.logprobs:
            raise Refusal(f"top_logprobs = {self.top_logprobs} needs logprobs = true", "top_logprobs")


class Completion(TextRequest):
    chat: ClassVar = False
    prompts: Annotated[list[str | Annotated[list[int], NonEmpty]], BeforeValidator(as_list), NonEmpty] = Field(
        alias="prompt"
    )
    num_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS, alias="logprobs")  # besides the token's own
    echo: bool = False
    parse_special: bool | None = None  # as the server's --parse_special


def check_arguments(x: object) -> object:
    """A call's arguments: an object, or JSON of one in a string, as OpenAI's clients send it."""
    if not isinstance(parse_arguments(x), dict):
        raise ValueError("the arguments must be a JSON object, or a string with one")
    return {} if x is None else x


def check_parts(content: object) -> object:
    """A message's content. ValueError for a part that is not text."""
    join_parts(content)
    return content


class Function(BaseModel):
    name: str
    arguments: Annotated[dict | str, BeforeValidator(check_arguments)] = {}


class ToolCall(BaseModel):
    id: str | None = None
    type: Literal["function"] = "function"
    function: Function


class Message(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)
    role: str
    content: Annotated[str | list[dict] | None, BeforeValidator(check_parts)] = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None  # an answer of OpenAI's has it in place of content
    reasoning_content: str | None = None  # the thoughts under three names, of which templates read one or two
    reasoning: str | None = None
    thinking: str | None = None

    def model_post_init(self, context: object) -> None:
        self.content = self.refusal if self.content is None else self.content
        if self.content is None and not self.tool_calls:
            raise ValueError("content is missing")
        if keys := [key for key, value in self.model_extra.items() if value]:
            raise ValueError(f"{keys[0]:.99} is not supported")


class Chat(TextRequest):
    chat: ClassVar = True
    echo: ClassVar = False
    messages: Annotated[list[Message], NonEmpty]
    tools: list[dict] | None = None
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)
    chat_template_kwargs: Annotated[dict, AfterValidator(lambda x: check_template_kwargs(x) or x)] = Field({})

    @property
    def prompts(self) -> list[list[dict]]:
        return [[message.model_dump(include=MESSAGE_KEYS, exclude_none=True) for message in self.messages]]

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


def read_request(body: object, chat: bool, model: str, sampling: Sampling) -> TextRequest:
    """The checked body of /v1/chat/completions or /v1/completions. `sampling` has the defaults of its settings."""
    if not isinstance(body, dict):
        raise Refusal("the body must be a JSON object")
    defaults = {f.name: value for f in fields(sampling) if (value := getattr(sampling, f.name)) != f.default}
    body = defaults | translated(body, chat, defaults)
    if (name := body.pop("model", model)) != model:
        raise Refusal(f"no model {name!r:.99}: this server has {model!r}", "model", 404, "model_not_found")
    try:
        return (Chat if chat else Completion).model_validate(body)
    except ValidationError as error:
        problem = error.errors()[0]
        key, *indices = problem["loc"] or ("body",)
        path = f"messages[{indices[0]}]" if key == "messages" and indices else key[:99]
        if problem["type"] == "extra_forbidden":
            raise Refusal(f"{path!r} is not supported by this server", path, 400, "unknown_parameter") from None
        if problem["type"] == "missing":
            raise Refusal(f"{'.'.join(map(str, problem['loc']))} is missing", path) from None
        message = f"{path} = {problem['input']!r:.99}: {problem['msg']}"
        quotes_content = isinstance(problem.get("ctx", {}).get("error"), ContentError)
        reason = "a part that is not text" if quotes_content else problem["msg"]
        raise Refusal(message, path, logged=f"{path}: {reason}") from None


# ---------------------------------------------------------------------------------------------- answers


class Event(NamedTuple):
    """New tokens of answer `index` of a request; `ending`, once: its finish_reason and timings."""

    index: int
    tokens: list[Token]
    ending: dict | None = None


def token_counts(prompt_tokens: int, decoded: int) -> dict:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": decoded,
        "total_tokens": prompt_tokens + decoded,
    }


class Answer:
    """The objects of one request's answers. `pieces`: the bytes of every token id."""

    def __init__(self, request: TextRequest, model: str, pieces: Sequence[bytes]):
        self.request, self.pieces = request, pieces
        kind = "chat.completion" if request.chat else "text_completion"
        self.head = {
            "id": f"{'chatcmpl' if request.chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": kind + ".chunk" * (request.chat and request.stream), "created": int(time.time()), "model": model,
        }  # fmt: skip
        self.num_characters: dict[int, int] = {}  # of each answer so far, for text_offset

    def usage(self, prompt_tokens: int, events: Sequence[Event]) -> dict:
        """A prompt counts once, however many answers it has."""
        timings = {event.index: event.ending["timings"] for event in events if event.ending}
        decoded = sum(timing["tokens"] for timing in timings.values())
        cached = sum(timing["cached_tokens"] for index, timing in timings.items() if index % self.request.n == 0)
        details = {"prompt_tokens_details": {"cached_tokens": cached}}
        return token_counts(prompt_tokens, decoded) | details

    def opening(self, index: int, usage: dict | None = None) -> dict:
        """The chunk in front of a chat's first token."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self.chunk(choice, usage=usage)

    def chunk(self, *choices: dict, usage: dict | None = None) -> dict:
        has_usage = usage is not None or self.request.stream_options.get("include_usage")
        return {**self.head, "choices": list(choices)} | ({"usage": usage} if has_usage else {})

    def choice(self, event: Event) -> dict:
        """One choice, of a chunk or of a complete answer."""
        request, ending, text = self.request, event.ending or {}, "".join(token.text for token in event.tokens)
        content = {"text": text}
        if request.chat and request.stream:
            content = {"delta": {"content": text} if text else {}}
        elif request.chat:
            content = {"message": {"role": "assistant", "content": text, "refusal": None}}
        logprobs = None
        if request.num_logprobs is not None and event.tokens:
            logprobs = self.chat_logprobs(event.tokens) if request.chat else self.completion_logprobs(event)
        choice = {"index": event.index, **content, "logprobs": logprobs, "finish_reason": ending.get("finish_reason")}
        if request.tokens and event.tokens:
            choice["tokens"] = [token.as_json() for token in event.tokens]
        return choice | ({"timings": ending["timings"]} if ending else {})

    def chat_logprobs(self, tokens: list[Token]) -> dict:
        entries = [[
            {"token": self.pieces[id].decode(errors="replace"), "logprob": logprob, "bytes": list(self.pieces[id])}
            for id, logprob in token.top_logprobs
        ] for token in tokens]  # fmt: skip
        return {"content": [chosen | {"top_logprobs": others} for chosen, *others in entries], "refusal": None}

    def completion_logprobs(self, event: Event) -> dict:
        """Four lists of an entry a token. `tokens` has the characters that a token adds to the text, none for BOS or
        part of a character; text_offset is their place. Of top tokens with the same text only the first is listed."""
        texts, offsets, offset = [token.text for token in event.tokens], [], self.num_characters.get(event.index, 0)
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        self.num_characters[event.index] = offset
        pairs = [token.top_logprobs for token in event.tokens]
        top = [
            p and {text if id == p[0][0] else self.pieces[id].decode(errors="replace"): x for id, x in reversed(p[1:])}
            for text, p in zip(texts, pairs)
        ]  # a chosen token has the text that `tokens` has
        return {
            "tokens": texts, "token_logprobs": [p[0][1] if p else None for p in pairs],
            "top_logprobs": top if self.request.num_logprobs else None, "text_offset": offsets,
        }  # fmt: skip
