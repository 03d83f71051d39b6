"""OpenAI's Responses API, translated to and from streamed chats.

    ResponseRequest     the body of /v1/responses; `chat_body` is the chat that answers it
    chat_messages       items, of an input or an output -> messages of a chat
    ResponseEvents      chunks of the chat -> events of the response; the last has it complete
    ResponseStore       the latest responses, for previous_response_id and item_reference

There is no second way to text here: scripts/serve.py streams the chat, whether the response is
streamed or not, so that a response says what the chat would, and a stream what its response says.
Keys that are not named in this file go to the chat's request, which reads them or refuses them.
"""

import itertools
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from scripts.openai_form import Chat, Refusal, refusal_of
from scripts.other_servers import ANY, OFF, is_among

MAX_STORED = 512  # responses; each one's conversation fits in the model's context
# Values of OpenAI's keys at which a request is as without them. At others they are refused.
NEUTRAL = {
    "background": OFF,
    # Stateless clients ask for it; here an item of reasoning has its thoughts in the clear.
    "include": (*OFF, ["reasoning.encrypted_content"]),
    "max_tool_calls": ANY,  # of tools that run on OpenAI's servers
    "stream_options": ANY,  # include_obfuscation, which this server's streams do without
    "top_logprobs": OFF,
    "truncation": ("disabled",),
}
# Keys of chats that /v1/responses has in another form, or has no room for.
CHAT_KEYS = {
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "response_format",
    "logprobs",
    "n",
    "tokens",
}
TEXT_PARTS = ("text", "input_text", "output_text", "reasoning_text", "summary_text")
PARAMS = {"messages": "input", "response_format": "text"}  # a chat's key -> the one here


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


# --------------------------------------------------------------------------------------- requests


class TextOptions(BaseModel, extra="forbid", strict=True):
    format: dict = {"type": "text"}
    verbosity: str | None = None


class Reasoning(BaseModel, extra="forbid", strict=True):
    effort: str | None = None
    summary: None = None  # the thoughts themselves are there, where a template marks them


class ResponseRequest(BaseModel):
    """The keys that a chat lacks or has in another form. All others are the chat's."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    input: str | list[dict]
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
        if key in CHAT_KEYS:
            message = f"{key!r} is a key of chats, which /v1/responses does not have"
            raise Refusal(message, key, 400, "unknown_parameter")
        if value is not None and not is_among(value, NEUTRAL.get(key, ())):
            keys[key] = value
    try:
        return ResponseRequest.model_validate(keys)
    except ValidationError as error:
        raise refusal_of(error.errors()[0]) from None


def with_own_param(refusal: Refusal) -> Refusal:
    """A chat's refusal, which names the key that the response has."""
    error = refusal.body["error"]
    key = str(error["param"]).partition("[")[0]
    error["param"] = PARAMS.get(key, error["param"])
    return refusal


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
            case {"type": "message", "role": "assistant", "content": content}:
                message = answer_without(messages, "content", "tool_calls")
                message["content"] = text_of(content)
            case {"type": "message", "role": role, "content": content}:
                messages.append({"role": role, "content": text_of(content)})
            case {"type": "reasoning", "encrypted_content": str()}:
                raise Refusal("input: reasoning.encrypted_content cannot be read here", "input")
            case {"type": "reasoning"}:
                message = answer_without(messages, "reasoning_content", "content", "tool_calls")
                message["reasoning_content"] = text_of(item.get("content") or item.get("summary"))
            case {"type": "function_call", "call_id": id, "name": name, "arguments": arguments}:
                function = {"name": name, "arguments": arguments}
                calls = answer_without(messages).setdefault("tool_calls", [])
                calls.append({"id": id, "type": "function", "function": function})
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


def answer_without(messages: list[dict], *keys: str) -> dict:
    """The last message, if it is the assistant's and has none of these keys; otherwise a new
    one."""
    if not messages or messages[-1]["role"] != "assistant" or messages[-1].keys() & {*keys}:
        messages.append({"role": "assistant"})
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


def text_item(item_type: str, part_type: str, **part_fields) -> dict:
    part = {"type": part_type, "text": "", **part_fields}
    return {"type": item_type, "status": "in_progress", "content": [part]}


def message_item() -> dict:
    item = text_item("message", "output_text", annotations=[], logprobs=[])
    return {"id": new_id("msg"), "role": "assistant", **item}


def reasoning_item() -> dict:
    return {"id": new_id("rs"), "summary": [], **text_item("reasoning", "reasoning_text")}


def call_item(call: dict) -> dict:
    """The item of a chat's tool call, from its first delta."""
    return {
        "id": new_id("fc"),
        "type": "function_call",
        "status": "in_progress",
        "call_id": call["id"],
        "name": call["function"]["name"],
        "arguments": "",
    }


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
    ending: dict = field(default_factory=dict)  # the choice with finish_reason and timings
    usage: dict | None = None

    def event(self, name: str, **fields) -> dict:
        event = {"type": f"response.{name}", "sequence_number": self.num_events, **fields}
        self.num_events += 1
        return event

    def item_event(self, name: str, **fields) -> dict:
        """An event of the item that grows. One of its part or of its text names the item."""
        place = {"output_index": len(self.output)}
        if "item" not in fields:
            place["item_id"] = self.item["id"]
            place |= {"content_index": 0} if "content" in self.item else {}
        return self.event(name, **place, **fields)

    def open(self, item: dict) -> Iterator[dict]:
        yield from self.close("completed")
        self.item = item
        if "content" not in item:
            yield self.item_event("output_item.added", item=dict(item))
            return
        yield self.item_event("output_item.added", item=item | {"content": []})
        yield self.item_event("content_part.added", part=dict(item["content"][0]))

    def add(self, text: str) -> Iterator[dict]:
        if "content" not in self.item:
            self.item["arguments"] += text
            yield self.item_event("function_call_arguments.delta", delta=text)
            return
        part = self.item["content"][0]
        part["text"] += text
        yield self.item_event(f"{part['type']}.delta", delta=text, logprobs=[])

    def close(self, status: str) -> Iterator[dict]:
        item = self.item
        if item is None:
            return
        item["status"] = status
        if "content" not in item:
            arguments = item["arguments"]
            yield self.item_event("function_call_arguments.done", arguments=arguments)
        else:
            part = item["content"][0]
            yield self.item_event(f"{part['type']}.done", text=part["text"], logprobs=[])
            yield self.item_event("content_part.done", part=part)
        yield self.item_event("output_item.done", item=item)
        self.output.append(item)
        self.item = None

    def feed(self, chunk: dict) -> Iterator[dict]:
        """The events of one chunk of the chat, whose choice has thoughts, text or calls."""
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk["choices"]:
            if choice["finish_reason"] is not None:
                self.ending = choice
            delta = choice["delta"]
            if delta.get("reasoning_content"):
                yield from self.continue_with(reasoning_item(), delta["reasoning_content"])
            if delta.get("content"):
                yield from self.continue_with(message_item(), delta["content"])
            for call in delta.get("tool_calls") or ():
                if call.get("id"):
                    yield from self.open(call_item(call))
                yield from self.add(call["function"].get("arguments") or "")

    def continue_with(self, item: dict, text: str) -> Iterator[dict]:
        """Text of the item that grows, or of a new one of another type."""
        if self.item is None or self.item["type"] != item["type"]:
            yield from self.open(item)
        yield from self.add(text)

    def end(self) -> Iterator[dict]:
        """The last events. An answer without text and calls is an empty message."""
        if self.item is None and not self.output:
            yield from self.open(message_item())
        status = "incomplete" if self.ending["finish_reason"] == "length" else "completed"
        yield from self.close(status)
        ended = {"status": status, "output": self.output, "timings": self.ending["timings"]}
        ended["usage"] = response_usage(self.usage)
        if status == "incomplete":
            ended["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            ended["completed_at"] = int(time.time())
        response = self.response | ended
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
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


# ------------------------------------------------------------------------------------------ store


class ResponseStore:
    """Responses in memory, by id, each with the items of its conversation: those before it, its
    input and its output. Beyond `max_responses` the oldest go."""

    def __init__(self, max_responses: int = MAX_STORED):
        self.max_responses = max_responses
        self.responses: dict[str, tuple[dict, list[dict]]] = {}

    def get(self, id: str, name: str = "Response", **error) -> tuple[dict, list[dict]]:
        if id not in self.responses:
            raise Refusal(f"{name} with id '{id:.99}' not found.", status=404, **error)
        return self.responses[id]

    def conversation(self, request: ResponseRequest) -> list[dict]:
        """The items that a request continues, then its own."""
        id = request.previous_response_id
        items: list[dict] = []
        if id is not None:
            error = {"param": "previous_response_id", "code": "previous_response_not_found"}
            items += self.get(id, "Previous response", **error)[1]
        if isinstance(request.input, str):
            return [*items, {"role": "user", "content": request.input}]
        return items + [self.resolve(item) for item in request.input]

    def resolve(self, item: dict) -> dict:
        """The item itself, or the one of an output that an item_reference names."""
        if item.get("type") != "item_reference":
            return item
        outputs = [response["output"] for response, _ in self.responses.values()]
        for output_item in itertools.chain(*outputs):
            if output_item["id"] == item.get("id"):
                return output_item
        raise Refusal(f"Item with id '{item.get('id')!s:.99}' not found.", "input", 404)

    def add(self, response: dict, conversation: list[dict]) -> None:
        self.responses[response["id"]] = (response, conversation + response["output"])
        if len(self.responses) > self.max_responses:
            del self.responses[next(iter(self.responses))]

    def remove(self, id: str) -> None:
        self.get(id)
        del self.responses[id]
