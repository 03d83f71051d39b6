"""OpenAI's protocol as data: a request's JSON body -> `TextRequest`; decided tokens -> the objects
of an answer.

    Refusal             an error as OpenAI's clients expect it, with its HTTP status
    TextRequest         the keys of a request, with every field of Sampling; Completion and Chat add
                        their own
    read_request        a checked request; a key that this server cannot honour is refused by name,
                        unless its value asks for nothing (other_servers.py)
    Event               the tokens that one step decided for one answer
    Answer              the objects of one request's answers: chunks of a stream, or complete
                        choices

This project adds the keys top_k, min_p, chat_template_kwargs, parse_special, `draft` (false: decode
without the draft) and `tokens` (true: list each token's text, origin, round, p, q and second), and
has ignore_eos and stop_token_ids from vLLM.
"""

import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Annotated, ClassVar, Literal, NamedTuple, get_origin, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
)

from cli.options import check_template_kwargs
from cli.page import Token
from decoding.errors import UserError
from decoding.sampling import Sampling
from loading.chat_messages import ContentError, join_parts
from loading.chat_templates import THOUGHTS
from scripts.serve.message_parser import MessageParser
from scripts.serve.other_servers import translated
from scripts.serve.tool_calls import NAME

MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
# The keys of a message that templates read.
MESSAGE_KEYS = {"role", "name", "content", "tool_calls", "tool_call_id", *THOUGHTS}
# Seeds are int64, as in OpenAI's schema.
MIN_SEED = -(2**63)
MAX_SEED = 2**63 - 1
ERROR_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class Refusal(Exception):
    """An error with a status; `body` is the JSON that the client reads. `logged` is its line for
    the server's log: the message, or in its place one without what the request said."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        status: int = 400,
        code: str | None = None,
        logged: str | None = None,
    ):
        super().__init__(message)
        default_type = "server_error" if status >= 500 else "invalid_request_error"
        error_type = ERROR_TYPES.get(status, default_type)
        self.status = status
        self.body = {
            "error": {"message": message, "type": error_type, "param": param, "code": code}
        }
        self.logged = message if logged is None else logged


# --------------------------------------------------------------------------------------- requests


def as_list(x: object) -> object:
    """A single stop string, text or list of token ids, in a list; a list of these as it is."""
    is_ids = isinstance(x, list) and len(x) > 0 and all(type(part) is int for part in x)
    return [x] if isinstance(x, str) or is_ids else x


def without_empty(x: object) -> object:
    """Stop strings in a list without the empty ones, which some clients send in place of none."""
    texts = as_list(x)
    return [text for text in texts if text != ""] if isinstance(texts, list) else texts


def id_pairs(number_by_id: dict[str, float]) -> tuple[tuple[int, float], ...]:
    """Numbers by token id, as Sampling has them. Of "1" and "01" the last one counts."""
    return tuple({int(id): number for id, number in number_by_id.items()}.items())


def setting_type(hint: object) -> object:
    """The type of a Sampling field in a request, where (token id, number) pairs are an object."""
    if get_origin(hint) is not tuple:
        return hint | None
    token_id = Annotated[str, Field(pattern="^[0-9]{1,8}$")]
    return Annotated[dict[token_id, float], AfterValidator(id_pairs)] | None


def answer_schema(x: object) -> dict:
    """The JSON schema of a response_format."""
    match x:
        case {"type": "json_object", **others} if not others:
            return {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": dict() as schema}}:
            return schema
    raise UserError('give {"type": "json_object"}, or the type "json_schema" with a "schema"')


HINTS = get_type_hints(Sampling)
SETTINGS = {field.name: (setting_type(HINTS[field.name]), None) for field in fields(Sampling)}
NonEmpty = Field(min_length=1)
FirstError = Field(fail_fast=True)  # of a list, which may have a million
MaxTokens = Annotated[int, Field(ge=0, le=2**31)]
Stops = Annotated[list[str] | None, BeforeValidator(without_empty), Field(max_length=MAX_STOPS)]
StreamOption = Literal["include_usage", "include_obfuscation", "continuous_usage_stats"]


class SharedKeys(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    n: int = Field(1, ge=1, le=128)
    stop: Stops = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], FirstError] = []
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
        except UserError as error:  # whose first word is the field
            raise Refusal(str(error), str(error).split()[0].rstrip(":")) from None
        if any(self.stream_options.values()) and not self.stream:
            raise Refusal("stream_options needs stream = true", "stream_options")
        if self.max_completion_tokens not in (None, self.max_new_tokens):
            raise Refusal(
                "max_tokens and max_completion_tokens differ: give one of them", "max_tokens"
            )
        if self.max_new_tokens == 0 and not self.echo:
            raise Refusal(
                "max_tokens = 0 must be at least 1: only an echo needs no token", "max_tokens"
            )
        if self.chat and self.top_logprobs and not self.logprobs:
            raise Refusal(
                f"top_logprobs = {self.top_logprobs} needs logprobs = true", "top_logprobs"
            )


class Completion(TextRequest):
    chat: ClassVar = False
    tools: ClassVar = None
    forced_tools: ClassVar = ()
    parallel_tool_calls: ClassVar = True
    separate_reasoning: ClassVar = False
    prompts: Annotated[
        list[str | Annotated[list[int], FirstError, NonEmpty]],
        FirstError,
        BeforeValidator(as_list),
        NonEmpty,
    ] = Field(alias="prompt")
    # The number of top tokens to list besides the chosen one.
    num_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS, alias="logprobs")
    echo: bool = False
    parse_special: bool | None = None  # as the server's --parse_special


def check_arguments(x: object) -> object:
    """A call's arguments: an object, or text, which OpenAI's clients send. The text is JSON of an
    object where the model finished it, and may be any other where a limit cut it."""
    if not isinstance(x, dict | str | None):
        raise UserError("the arguments must be a JSON object, or a string")
    return {} if x is None else x


def check_parts(content: object) -> object:
    """A message's content. UserError for a part that is not text."""
    join_parts(content)
    return content


class Function(BaseModel):
    name: str
    arguments: Annotated[dict | str, BeforeValidator(check_arguments)] = {}


class ToolCall(BaseModel):
    id: str | None = None
    type: Literal["function"] = "function"
    function: Function


def check_parameters(schema: dict) -> dict:
    if schema.get("type", "object") != "object":
        raise UserError("the parameters must be an object's schema")
    return schema


class ToolFunction(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)
    name: Annotated[str, Field(pattern=f"^{NAME}$")]
    description: str | None = None
    parameters: Annotated[dict, AfterValidator(check_parameters)] | None = None

    @property
    def schema(self) -> dict:
        """The schema of its arguments. As in OpenAI's API, a function without parameters has
        none."""
        parameters = {"additionalProperties": False} if self.parameters is None else self.parameters
        return {"type": "object", **parameters}


class Tool(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)
    type: Literal["function"]
    function: ToolFunction


class NamedTool(BaseModel):
    type: Literal["function"]
    function: Function


class Message(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)
    role: str
    content: Annotated[str | list[dict] | None, BeforeValidator(check_parts)] = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], FirstError] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None  # an answer of OpenAI's has it in place of content
    # Clients send thoughts under three names; templates read one or two of them.
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None

    def model_post_init(self, context: object) -> None:
        if self.content is None:
            self.content = self.refusal
        if self.content is None and not self.tool_calls:
            raise UserError("content is missing")
        for key, value in self.model_extra.items():
            if value:
                raise UserError(f"{key:.99} is not supported")


def check_template_keys(kwargs: dict) -> dict:
    check_template_kwargs(kwargs)
    return kwargs


class Chat(TextRequest):
    chat: ClassVar = True
    echo: ClassVar = False
    messages: Annotated[list[Message], FirstError, NonEmpty]
    tools: Annotated[list[Tool], FirstError] | None = None
    tool_choice: Literal["required"] | NamedTool | None = None
    parallel_tool_calls: bool = True
    separate_reasoning: bool = True  # SGLang's; false leaves thoughts in the content
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)
    chat_template_kwargs: Annotated[dict, AfterValidator(check_template_keys)] = Field({})
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def forced_tools(self) -> list[Tool]:
        """The tools one of which the answer must call; none: it need not call any."""
        tools = self.tools or []
        if isinstance(self.tool_choice, NamedTool):
            return [tool for tool in tools if tool.function.name == self.tool_choice.function.name]
        return tools if self.tool_choice else []

    @property
    def is_parallel(self) -> bool:
        """May the answer have several calls? A named function is called once."""
        return self.parallel_tool_calls and not isinstance(self.tool_choice, NamedTool)

    @property
    def template_tools(self) -> list[dict] | None:
        """The tools as the client wrote them."""
        return self.tools and [tool.model_dump(exclude_unset=True) for tool in self.tools]

    def model_post_init(self, context: object) -> None:
        super().model_post_init(context)
        if self.tool_choice and not self.forced_tools:
            raise Refusal("tool_choice asks for a function that tools lacks", "tool_choice")

    @property
    def prompts(self) -> list[list[dict]]:
        """One prompt: the messages, with the keys that templates read."""
        messages = [
            message.model_dump(include=MESSAGE_KEYS, exclude_none=True) for message in self.messages
        ]
        return [messages]

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


def read_request(body: dict, chat: bool, model: str, sampling: Sampling) -> TextRequest:
    """The checked body of /v1/chat/completions or /v1/completions. `sampling` has the defaults of
    its settings."""
    defaults = {}
    for field in fields(sampling):
        value = getattr(sampling, field.name)
        if value != field.default:
            defaults[field.name] = value
    request_type = Chat if chat else Completion
    own_keys = {"model", *(item.alias or name for name, item in request_type.model_fields.items())}
    body = defaults | translated(body, chat, own_keys)
    name = body.pop("model", model)
    if name != model:
        raise Refusal(
            f"no model {name!r:.99}: this server has {model!r}", "model", 404, "model_not_found"
        )
    try:
        return request_type.model_validate(body)
    except ValidationError as error:
        raise refusal_of(error.errors()[0]) from None


def refusal_of(problem: dict) -> Refusal:
    """What a client reads of the first problem that pydantic names in a body."""
    location = problem["loc"] or ("body",)
    key = location[0]
    path = key[:99]
    if key == "messages" and len(location) > 1:
        path = f"messages[{location[1]}]"
    if problem["type"] == "extra_forbidden":
        message = f"{path!r} is not supported by this server"
        return Refusal(message, path, 400, "unknown_parameter")
    if problem["type"] == "missing":
        return Refusal(f"{'.'.join(map(str, location))} is missing", path)
    message = f"{path} = {problem['input']!r:.99}: {problem['msg']}"
    reason = problem["msg"]
    if isinstance(problem.get("ctx", {}).get("error"), ContentError):
        reason = "a part that is not text"  # the message quotes the content
    return Refusal(message, path, logged=f"{path}: {reason}")


# ---------------------------------------------------------------------------------------- answers


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
    """The objects of one request's answers. `pieces`: the bytes of every token id. new_parser:
    makes the parser of a message's text. `stop_ids`: the tokens that end an answer and are no part
    of it."""

    def __init__(
        self,
        request: TextRequest,
        model: str,
        pieces: Sequence[bytes],
        new_parser: Callable[[], MessageParser] = MessageParser,
        stop_ids: frozenset[int] = frozenset(),
    ):
        self.request = request
        self.pieces = pieces
        self.stop_ids = stop_ids
        self.parsers: dict[int, MessageParser] = defaultdict(new_parser)  # of each answer
        id_prefix = "chatcmpl" if request.chat else "cmpl"
        object_type = "text_completion"
        if request.chat:
            object_type = "chat.completion.chunk" if request.stream else "chat.completion"
        self.head = {
            "id": f"{id_prefix}-{uuid.uuid4().hex}",
            "object": object_type,
            "created": int(time.time()),
            "model": model,
        }
        self.num_characters: dict[int, int] = {}  # of each answer so far, for text_offset

    def usage(self, prompt_tokens: int, events: Sequence[Event]) -> dict:
        """A prompt counts once, however many answers it has."""
        timings = {event.index: event.ending["timings"] for event in events if event.ending}
        decoded = sum(timing["tokens"] for timing in timings.values())
        cached = sum(
            timing["cached_tokens"]
            for index, timing in timings.items()
            if index % self.request.n == 0
        )
        thoughts = sum(parser.num_thought_tokens for parser in self.parsers.values())
        details = {
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": thoughts},
        }
        return token_counts(prompt_tokens, decoded) | details

    def opening(self, index: int, usage: dict | None = None) -> dict:
        """The chunk in front of a chat's first token."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self.chunk(choice, usage=usage)

    def chunk(self, *choices: dict, usage: dict | None = None) -> dict:
        chunk = {**self.head, "choices": list(choices)}
        if usage is not None or self.request.stream_options.get("include_usage"):
            chunk["usage"] = usage
        return chunk

    def choices(self, event: Event) -> list[dict]:
        """One choice of a complete answer; of a stream one for each part of the message that the
        event brings, in the order of the text."""
        choices = [
            {"index": event.index, **content, "logprobs": None, "finish_reason": None}
            for content in self.contents(event)
        ]
        choices[0]["logprobs"] = self.logprobs(event)
        if self.request.tokens and event.tokens:
            choices[0]["tokens"] = [token.as_json() for token in event.tokens]
        if event.ending:
            choices[-1]["finish_reason"] = self.finish_reason(event)
            choices[-1]["timings"] = event.ending["timings"]
        return choices

    def contents(self, event: Event) -> list[dict]:
        """The key of each choice that has its text."""
        texts = [token.text for token in event.tokens]
        if not self.request.chat:
            return [{"text": "".join(texts)}]
        deltas = self.parsers[event.index].feed(texts, is_last=event.ending is not None)
        if self.request.stream:
            if event.ending or not deltas:
                deltas.append({})
            return [{"delta": delta} for delta in deltas]
        message = {"role": "assistant", "content": "", "refusal": None}
        for delta in deltas:
            for key, value in delta.items():
                message[key] = message[key] + value if key in message else value
        for call in message.get("tool_calls", ()):
            del call["index"]
        if "tool_calls" in message:
            message["content"] = message["content"] or None
        return [{"message": message}]

    def finish_reason(self, event: Event) -> str | None:
        reason = event.ending.get("finish_reason")
        has_calls = self.parsers[event.index].num_calls > 0
        return "tool_calls" if reason == "stop" and has_calls else reason

    def logprobs(self, event: Event) -> dict | None:
        if self.request.num_logprobs is None or not event.tokens:
            return None
        if self.request.chat:
            return self.chat_logprobs(event.tokens)
        return self.completion_logprobs(event)

    def token_text(self, id: int) -> str:
        return self.pieces[id].decode(errors="replace")

    def chat_logprobs(self, tokens: list[Token]) -> dict:
        """An entry a token. As in OpenAI's API, the token that ends an answer has none: clients
        join the entries to the text."""
        content = []
        for token in tokens:
            if token.id in self.stop_ids:
                continue
            chosen, *others = (
                {"token": self.token_text(id), "logprob": logprob, "bytes": list(self.pieces[id])}
                for id, logprob in token.top_logprobs
            )
            content.append(chosen | {"top_logprobs": others})
        return {"content": content, "refusal": None}

    def completion_logprobs(self, event: Event) -> dict:
        """Four lists of an entry a token. `tokens` has the characters that a token adds to the
        text, none for BOS or part of a character; text_offset is their place. Of top tokens with
        the same text only the first is listed."""
        texts = []
        offsets = []
        logprobs = []
        tops = []
        offset = self.num_characters.get(event.index, 0)
        for token in event.tokens:
            texts.append(token.text)
            offsets.append(offset)
            offset += len(token.text)
            pairs = token.top_logprobs
            logprobs.append(pairs[0][1] if pairs else None)
            tops.append(self.top_by_text(token) if pairs else None)
        self.num_characters[event.index] = offset
        return {
            "tokens": texts,
            "token_logprobs": logprobs,
            "top_logprobs": tops if self.request.num_logprobs else None,
            "text_offset": offsets,
        }

    def top_by_text(self, token: Token) -> dict[str, float]:
        """The log-probabilities of a token's top tokens. The chosen one among them has the text
        that it added."""
        (chosen, _), *others = token.top_logprobs
        logprob_by_text = {}
        for id, logprob in others:
            text = token.text if id == chosen else self.token_text(id)
            logprob_by_text.setdefault(text, logprob)
        return logprob_by_text
