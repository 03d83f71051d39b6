"""OpenAI's Responses API, translated to and from streamed chats.

    ResponseRequest     the body of /v1/responses; `chat_body` is the chat that answers it
    chat_messages       items, of an input or an output -> messages of a chat
    ResponseEvents      chunks of the chat -> events of the response; the last has it complete
    ResponseStore       the latest responses, for previous_response_id and item_reference

There is no second way to text here: serve.py streams the chat, whether the response is
streamed or not, so that a response says what the chat would, and a stream what its response says.
Keys that are not named in this file go to the chat's request, which reads them or refuses them.
"""

import json
import re
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from scripts.serve.openai_form import Chat, FirstError, Refusal, refusal_of
from scripts.serve.other_servers import EMPTY, is_among

MAX_STORED = 512  # responses
MAX_STORED_BYTES = 2**26
# Values of OpenAI's keys at which a request is as without them. At others they are refused.
DEFAULTS = {
    "background": EMPTY,
    # Stateless clients ask for it; here an item of reasoning has its thoughts in the clear.
    "include": (*EMPTY, ["reasoning.encrypted_content"]),
    "top_logprobs": EMPTY,
    "truncation": ("disabled",),
}
# Ignored: names of a program and its session, a number of tools that run on OpenAI's servers, and
# include_obfuscation, which this server's streams do without.
LABELS = {"client_metadata", "max_tool_calls", "stream_options"}
# Keys of chats that /v1/responses has in another form, or has no room for.
CHAT_KEYS = {
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "response_format",
    "logprobs",
    "n",
    "n_predict",
    "reasoning_effort",
    "tokens",
    "verbosity",
}
TEXT_PARTS = ("text", "input_text", "output_text", "reasoning_text", "summary_text")
PARAMS = {  # a chat's key -> the one here
    "messages": "input",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
    "reasoning_effort": "reasoning.effort",
}


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


# --------------------------------------------------------------------------------------- requests


class TextOptions(BaseModel, extra="forbid", strict=True):
    format: dict = {"type": "text"}
    verbosity: str | None = None


class Reasoning(BaseModel, extra="forbid", strict=True):
    effort: str | None = None
    # Of "auto" a model makes none: the thoughts themselves are there, where a template marks them.
    summary: Literal["auto", "none"] | None = None


class ResponseRequest(BaseModel):
    """The keys that a chat lacks or has in another form. All others are the chat's."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    input: str | Annotated[list[dict], FirstError]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=2**31)
    text: TextOptions = TextOptions()
    reasoning: Reasoning = Reasoning()
    tools: list[dict] = []
    tool_choice: str | dict = "auto"
    parallel_tool_calls: bool = True
    metadata: dict[str, str] = {}
    store: bool = True
    stream: bool = False

    def chat_body(self, items: list[dict]) -> dict:
        """The body of the chat whose streamed answer is the response to these items."""
        messages = chat_messages(items)
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        return self.model_extra | {
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "response_format": nested(self.text.format, "json_schema"),
            "verbosity": self.text.verbosity,
            "reasoning_effort": self.reasoning.effort,
            "tools": [function_tool(tool) for tool in self.tools],
            "tool_choice": nested(self.tool_choice, "function"),
            "parallel_tool_calls": self.parallel_tool_calls,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def response(self, chat: Chat, model: str) -> dict:
        """The response before its first token; `chat` has the settings that count."""
        own_keys = ResponseRequest.model_fields.keys() - {"input", "stream"}
        return {
            "id": new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "in_progress",
            "model": model,
            "output": [],
            "usage": None,
            "error": None,
            "incomplete_details": None,
            "background": False,
            "truncation": "disabled",
            "temperature": chat.sampling.temperature,
            "top_p": chat.sampling.top_p,
            **self.model_dump(include=own_keys),
        }


def read_response_request(body: dict) -> ResponseRequest:
    """The checked body of /v1/responses, in which null is an absent key."""
    keys = {}
    for key, value in body.items():
        if value is None or key in LABELS or is_among(value, DEFAULTS.get(key, ())):
            continue
        if key in CHAT_KEYS:
            message = f"{key!r} is a key of chats, which /v1/responses does not have"
            raise Refusal(message, key, 400, "unknown_parameter")
        if key == "top_logprobs":
            message = f"{key!r} is not supported by this server: answers come without them"
            raise Refusal(message, key, 400, "unknown_parameter")
        keys[key] = value
    try:
        return ResponseRequest.model_validate(keys)
    except ValidationError as error:
        raise refusal_of(error.errors()[0]) from None


def with_own_param(refusal: Refusal) -> Refusal:
    """A chat's refusal, which names the key that the response has, in its message too. An input has
    no number: items in a row are one message, after those of instructions and earlier responses.
    What a message quotes of the request, after the key, stays as it is."""
    error = refusal.body["error"]
    key = str(error["param"]).partition("[")[0]
    own_key = PARAMS.get(key, key)

    def own_text(text: str) -> str:
        text = re.sub(rf"{re.escape(key)}(\[\d+\])?", own_key, text, count=1)
        return re.sub(r"^(tools\.\d+)\.function\b", r"\1", text)

    message = own_text(error["message"])
    logged = own_text(refusal.logged)
    param = error["param"] and own_key
    return Refusal(message, param, refusal.status, error["code"], logged=logged)


def nested(value: object, object_type: str) -> object:
    """The chats' form of {"type": TYPE, …}: {"type": TYPE, TYPE: {…}}. Other values stay."""
    match value:
        case {"type": str(name), **fields} if name == object_type:
            return {"type": name, name: fields}
    return value


def function_tool(tool: dict) -> dict:
    if tool.get("type") != "function":
        message = f"tools: {tool.get('type')!r:.99} is not supported, only functions are"
        raise Refusal(message, "tools")
    return nested(tool, "function")


# ------------------------------------------------------------------------------------------ items


def chat_messages(items: Iterable[dict]) -> list[dict]:
    """The messages of a chat. Thoughts, text and calls in a row are one message of the
    assistant. Refusal for an item of another type."""
    messages: list[dict] = []
    for item in items:
        match {"type": "message", **item}:
            case {"type": "message", "role": role, "content": content}:
                message_without(messages, role, "content")["content"] = text_of(content)
            case {"type": "reasoning", "encrypted_content": str()}:
                raise Refusal("input: reasoning.encrypted_content cannot be read here", "input")
            case {"type": "reasoning"}:
                others = ("reasoning_content", "content", "tool_calls")
                message = message_without(messages, "assistant", *others)
                message["reasoning_content"] = text_of(item.get("content") or item.get("summary"))
            case {"type": "function_call", "call_id": id, "name": name, "arguments": arguments}:
                function = {"name": name, "arguments": arguments}
                message = message_without(messages, "assistant")
                message.setdefault("tool_calls", []).append(
                    {"id": id, "type": "function", "function": function}
                )
            case {"type": "function_call_output", "call_id": id, "output": output}:
                content = text_of(output)
                messages.append({"role": "tool", "tool_call_id": id, "content": content})
            case {"type": item_type}:
                message = f"input: a {item_type!r:.99} is not supported, or lacks a key"
                raise Refusal(message, "input")
    for message in messages:
        if "tool_calls" not in message:
            message.setdefault("content", "")  # of an answer that ended among its thoughts
    return messages


def message_without(messages: list[dict], role: str, *keys: str) -> dict:
    """The last message, if it has this role and none of these keys; otherwise a new one."""
    if not messages or messages[-1]["role"] != role or messages[-1].keys() & {*keys}:
        messages.append({"role": role})
    return messages[-1]


def text_of(content: object) -> object:
    """The text of a content's parts. A part that is not text stays, and the chat refuses it."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        match part:
            case {"type": name, "text": str(text)} if name in TEXT_PARTS:
                texts.append(text)
            case _:
                return [part]
    return "".join(texts)


# ----------------------------------------------------------------------------------------- events


class ItemForm(NamedTuple):
    """How an item of the output begins, and the fields of its text in events."""

    prefix: str  # of its id
    item: dict
    part: dict | None = None  # of the part that holds its text; None: a call, which has arguments


# By the name that events have for the text of an item.
ITEM_FORMS = {
    "output_text": ItemForm(
        "msg",
        {"type": "message", "role": "assistant", "content": []},
        {"annotations": [], "logprobs": []},
    ),
    "reasoning_text": ItemForm("rs", {"type": "reasoning", "summary": [], "content": []}, {}),
    "function_call_arguments": ItemForm("fc", {"type": "function_call", "arguments": ""}),
}
TEXT_NAMES = {"reasoning_content": "reasoning_text", "content": "output_text"}


@dataclass
class ResponseEvents:
    """The events of one response. `response`: as it begins; `store` gets it, if it may be stored,
    with the items of its conversation, when it has ended."""

    response: dict
    conversation: list[dict]
    store: "ResponseStore"
    num_events: int = 0
    output: list[dict] = field(default_factory=list)
    item: dict | None = None  # grows, and comes after those of the output
    text_name: str = ""  # the key of its ITEM_FORMS
    text: str = ""
    ending: dict = field(default_factory=dict)  # the choice with finish_reason and timings
    usage: dict | None = None

    def event(self, name: str, **fields) -> dict:
        event = {"type": f"response.{name}", "sequence_number": self.num_events, **fields}
        self.num_events += 1
        return event

    def item_event(self, name: str, **fields) -> dict:
        """An event of the item that grows."""
        return self.event(f"output_item.{name}", output_index=len(self.output), **fields)

    def text_event(self, name: str, **fields) -> dict:
        """An event of the text of the item that grows, or of the part that holds the text."""
        place = {"item_id": self.item["id"], "output_index": len(self.output)}
        if "content" in self.item:
            place["content_index"] = 0
        if self.text_name == "output_text" and "part" not in fields:
            place["logprobs"] = []
        return self.event(name, **place, **fields)

    def part(self) -> dict:
        return {"type": self.text_name, "text": self.text, **ITEM_FORMS[self.text_name].part}

    def open(self, text_name: str, **fields) -> Iterator[dict]:
        yield from self.close("completed")
        form = ITEM_FORMS[text_name]
        self.text_name = text_name
        self.text = ""
        self.item = {"id": new_id(form.prefix), "status": "in_progress", **form.item, **fields}
        yield self.item_event("added", item=dict(self.item))
        if form.part is not None:
            yield self.text_event("content_part.added", part=self.part())

    def add(self, text: str) -> Iterator[dict]:
        self.text += text
        yield self.text_event(f"{self.text_name}.delta", delta=text)

    def close(self, status: str) -> Iterator[dict]:
        if self.item is None:
            return
        key = "text" if "content" in self.item else "arguments"
        yield self.text_event(f"{self.text_name}.done", **{key: self.text})
        if key == "text":
            self.item["content"] = [self.part()]
            yield self.text_event("content_part.done", part=self.part())
        else:
            self.item["arguments"] = self.text
        self.item["status"] = status
        yield self.item_event("done", item=self.item)
        self.output.append(self.item)
        self.item = None

    def feed(self, chunk: dict) -> Iterator[dict]:
        """The events of one chunk of the chat, whose choice has thoughts, text or a call."""
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk["choices"]:
            if choice["finish_reason"] is not None:
                self.ending = choice
            delta = choice["delta"]
            for key, text_name in TEXT_NAMES.items():
                if delta.get(key):
                    if self.item is None or self.text_name != text_name:
                        yield from self.open(text_name)
                    yield from self.add(delta[key])
            for call in delta.get("tool_calls", ()):
                function = call["function"]
                if "id" in call:
                    names = {"call_id": call["id"], "name": function["name"]}
                    yield from self.open("function_call_arguments", **names)
                yield from self.add(function["arguments"])

    def end(self) -> Iterator[dict]:
        """The last events. An answer without text and calls is an empty message."""
        if self.item is None:
            yield from self.open("output_text")
        is_cut = self.ending["finish_reason"] == "length"
        status = "incomplete" if is_cut else "completed"
        yield from self.close(status)
        response = self.response | {
            "status": status,
            "output": self.output,
            "usage": response_usage(self.usage),
            "timings": self.ending["timings"],
            "completed_at": None if is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        }
        if response["store"]:
            self.store.add(response, self.conversation)
        yield self.event(status, response=response)

    def failure(self, refusal: Refusal) -> dict:
        """The event that ends a stream in place of an error."""
        error = {"code": "server_error", "message": str(refusal)}
        failed = {"status": "failed", "error": error, "output": self.output}
        return self.event("failed", response=self.response | failed)

    async def of_chat(self, chunks: AsyncIterator[dict]) -> AsyncIterator[dict]:
        """All events, from the chunks of the chat."""
        for name in ("created", "in_progress"):
            yield self.event(name, response=self.response)
        async for chunk in chunks:
            for event in self.feed(chunk):
                yield event
        for event in self.end():
            yield event


def response_usage(usage: dict) -> dict:
    """A chat's usage in the words of responses. The slots keep every token of a prompt."""
    num_cached = usage["prompt_tokens_details"]["cached_tokens"]
    num_new = usage["prompt_tokens"] - num_cached
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": num_cached, "cache_write_tokens": num_new},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }


# ------------------------------------------------------------------------------------------ store


class Stored(NamedTuple):
    response: dict
    conversation: list[dict]  # the items before it, its input and its output
    num_bytes: int  # of both as JSON


class ResponseStore:
    """Responses in memory, by id. Beyond `max_responses` or `max_bytes` the oldest go."""

    def __init__(self, max_responses: int = MAX_STORED, max_bytes: int = MAX_STORED_BYTES):
        self.max_responses = max_responses
        self.max_bytes = max_bytes
        self.responses: dict[str, Stored] = {}
        self.output_items: dict[str, dict] = {}  # of all responses, by id

    def get(self, id: str, name: str = "Response", **error) -> Stored:
        if id not in self.responses:
            raise Refusal(f"{name} with id '{id:.99}' not found.", status=404, **error)
        return self.responses[id]

    def conversation(self, request: ResponseRequest) -> list[dict]:
        """The items that a request continues, then its own."""
        id = request.previous_response_id
        items: list[dict] = []
        if id is not None:
            error = {"param": "previous_response_id", "code": "previous_response_not_found"}
            items += self.get(id, "Previous response", **error).conversation
        if isinstance(request.input, str):
            return [*items, {"role": "user", "content": request.input}]
        return items + [self.resolve(item) for item in request.input]

    def resolve(self, item: dict) -> dict:
        """The item itself, or the one of an output that an item_reference names."""
        if item.get("type") != "item_reference":
            return item
        id = item.get("id")
        if not isinstance(id, str) or id not in self.output_items:
            raise Refusal(f"Item with id '{id!s:.99}' not found.", "input", 404)
        return self.output_items[id]

    def add(self, response: dict, conversation: list[dict]) -> None:
        conversation = conversation + response["output"]
        num_bytes = len(json.dumps([response, conversation]))
        self.responses[response["id"]] = Stored(response, conversation, num_bytes)
        self.output_items |= {item["id"]: item for item in response["output"]}
        num_bytes = sum(stored.num_bytes for stored in self.responses.values())
        while len(self.responses) > self.max_responses or num_bytes > self.max_bytes:
            oldest = next(iter(self.responses))
            num_bytes -= self.responses[oldest].num_bytes
            self.remove(oldest)

    def remove(self, id: str) -> None:
        for item in self.get(id).response["output"]:
            del self.output_items[item["id"]]
        del self.responses[id]
