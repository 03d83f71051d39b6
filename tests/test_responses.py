"""/v1/responses, /tokenize, /detokenize and /metrics, as OpenAI's client, pydantic-ai and a
reader of Prometheus' format see them.

The `openai` package is the oracle of forms: its types check every object, and its accumulator reads
every stream. The oracle of texts is /v1/chat/completions.
"""

import asyncio
import concurrent.futures
import itertools
import json
import re
import shutil
import time
import typing
import urllib.request

import openai
import pytest
import test_serve
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, Field
from test_serve import DEMO, PROMPTS, Running

from decoding.sampling import Sampling
from loading.tokenizer import load_tokenizer
from scripts.serve.metrics import METRICS, Metrics
from scripts.serve.openai_form import Refusal, read_request
from scripts.serve.responses import (
    CHAT_KEYS,
    ResponseEvents,
    ResponseStore,
    chat_messages,
    read_response_request,
    with_own_param,
)
from scripts.serve.serve import parse_body

server = test_serve.server  # fixtures
serving = test_serve.serving

EVENT_TYPES = {
    typing.get_args(event_type.model_fields["type"].annotation)[0]: event_type
    for event_type in typing.get_args(typing.get_args(ResponseStreamEvent)[0])
}
TIMINGS = {"tokens": 3, "cached_tokens": 1}
USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 3,
    "total_tokens": 8,
    "prompt_tokens_details": {"cached_tokens": 1},
    "completion_tokens_details": {"reasoning_tokens": 2},
}


# ------------------------------------------------------------------- chunks of a chat and its items


def chunk(finish_reason: str | None = None, **delta) -> dict:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    if finish_reason:
        choice["timings"] = TIMINGS
    return {"choices": [choice]}


def call_delta(index: int, **function) -> dict:
    call = {"index": index, "function": function}
    return {"id": f"call_{index}", "type": "function", **call} if "name" in function else call


def response_events(chunks: list[dict], responses: ResponseStore, **keys) -> list[dict]:
    """The events as a client reads them: each is JSON before the next is made."""
    request = read_response_request({"input": "a", **keys})
    conversation = responses.conversation(request)
    chat = read_request(request.chat_body(conversation), True, "m", Sampling())

    async def events() -> list[dict]:
        async def given_chunks():
            for chunk in [*chunks, {"choices": [], "usage": USAGE}]:
                yield chunk

        made = ResponseEvents(request.response(chat, "m"), conversation, responses)
        return [json.loads(json.dumps(event)) async for event in made.of_chat(given_chunks())]

    return asyncio.run(events())


# A chat's answer: thoughts, then text, then calls of functions, each of them in pieces.
PIECES = st.lists(st.text(min_size=1, max_size=4), max_size=4)
ARGUMENTS = st.dictionaries(st.text(max_size=3), st.integers(), max_size=2).map(json.dumps)
CALLS = st.lists(ARGUMENTS, max_size=3)


def chat_chunks(thoughts: list[str], texts: list[str], calls: list[str], reason: str) -> list[dict]:
    chunks = [chunk(role="assistant", content="")]
    chunks += [chunk(reasoning_content=text) for text in thoughts]
    chunks += [chunk(content=text) for text in texts]
    for index, arguments in enumerate(calls):
        chunks.append(chunk(tool_calls=[call_delta(index, name=f"f{index}", arguments="")]))
        for begin in range(0, len(arguments), 3):
            part = arguments[begin : begin + 3]
            chunks.append(chunk(tool_calls=[call_delta(index, arguments=part)]))
    return [*chunks, chunk(reason)]


LETTERS = {
    "response.created": "C",
    "response.in_progress": "I",
    "response.output_item.added": "+",
    "response.content_part.added": "[",
    "response.output_text.delta": "t",
    "response.output_text.done": "T",
    "response.reasoning_text.delta": "r",
    "response.reasoning_text.done": "R",
    "response.function_call_arguments.delta": "a",
    "response.function_call_arguments.done": "A",
    "response.content_part.done": "]",
    "response.output_item.done": "-",
    "response.completed": ".",
    "response.incomplete": "!",
    "response.failed": "?",
}
GRAMMAR = re.compile(r"CI((\+\[(t*T|r*R)\]-)|(\+a*A-))+[.!]")


def check_order(events: list[dict]) -> None:
    """The events obey OpenAI's grammar, count up from 0, and fit the types of its client."""
    assert GRAMMAR.fullmatch("".join(LETTERS[event["type"]] for event in events))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    indices = [event["output_index"] for event in events if "output_index" in event]
    assert indices == sorted(indices) and {*indices} == {*range(indices[-1] + 1)}
    for event in events:
        EVENT_TYPES[event["type"]].model_validate(event)


@settings(deadline=None, max_examples=60)
@given(PIECES, PIECES, CALLS, st.sampled_from(["stop", "length", "tool_calls"]))
def test_events_obey_a_grammar_and_their_deltas_are_the_items(thoughts, texts, calls, reason):
    events = response_events(chat_chunks(thoughts, texts, calls, reason), ResponseStore())
    check_order(events)
    response = events[-1]["response"]
    Response.model_validate(response)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert response["output"] == done
    for index, item in enumerate(done):
        own = [event for event in events if event.get("output_index") == index]
        deltas = "".join(event["delta"] for event in own if "delta" in event)
        assert deltas == (item["content"][0]["text"] if "content" in item else item["arguments"])
        assert {event.get("item_id", item["id"]) for event in own} == {item["id"]}
    kinds = ["reasoning"] * bool(thoughts) + ["message"] * bool(texts)
    assert [item["type"] for item in done] == (
        kinds + ["function_call"] * len(calls) or ["message"]
    )
    is_cut = reason == "length"
    assert response["status"] == ("incomplete" if is_cut else "completed")
    assert response["incomplete_details"] == ({"reason": "max_output_tokens"} if is_cut else None)
    assert [item["status"] for item in done] == ["completed"] * (len(done) - 1) + [
        response["status"]
    ]
    usage = response["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (5, 3, 8)
    assert usage["input_tokens_details"]["cached_tokens"] == 1
    assert usage["output_tokens_details"] == {"reasoning_tokens": 2}


@settings(deadline=None, max_examples=60)
@given(PIECES, PIECES, CALLS)
def test_openais_client_accumulates_what_the_last_event_has(thoughts, texts, calls):
    events = response_events(chat_chunks(thoughts, texts, calls, "stop"), ResponseStore())
    state = ResponseStreamState(text_format=openai.omit, input_tools=openai.omit)
    snapshots = []
    for event in events:
        parsed = EVENT_TYPES[event["type"]].model_validate(event)
        snapshots += [
            fired.snapshot
            for fired in state.handle_event(parsed)
            if "delta" in event and hasattr(fired, "snapshot")
        ]
    final = state._completed_response
    assert final.output_text == "".join(texts)
    found = [item.arguments for item in final.output if item.type == "function_call"]
    assert found == calls
    assert not texts or "".join(texts) in snapshots


@settings(deadline=None, max_examples=60)
@given(PIECES, PIECES, CALLS)
def test_a_stored_response_goes_back_as_the_chats_own_message(thoughts, texts, calls):
    """What a client of chats would send back after this answer."""
    store = ResponseStore()
    events = response_events(chat_chunks(thoughts, texts, calls, "stop"), store)
    response = events[-1]["response"]
    message = {"role": "assistant"}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if texts or not calls:
        message["content"] = "".join(texts)
    if calls:
        message["tool_calls"] = [
            {
                "id": f"call_{index}",
                "type": "function",
                "function": {"name": f"f{index}", "arguments": arguments},
            }
            for index, arguments in enumerate(calls)
        ]
    user = {"role": "user", "content": "a"}
    following = read_response_request({"input": "b", "previous_response_id": response["id"]})
    expected = [user, message, {"role": "user", "content": "b"}]
    assert chat_messages(store.conversation(following)) == expected
    references = [{"type": "item_reference", "id": item["id"]} for item in response["output"]]
    referring = read_response_request({"input": [user, *references, expected[2]]})
    assert chat_messages(store.conversation(referring)) == expected


def test_a_stream_that_breaks_off_ends_in_a_failed_response():
    events = ResponseEvents(
        {
            "id": "resp_1",
            "created_at": 1,
            "model": "m",
            "object": "response",
            "output": [],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
        },
        [],
        ResponseStore(),
    )
    list(events.feed(chunk(content="One")))
    event = events.failure(Refusal("not done after 9 s", None, 504, "timeout"))
    parsed = EVENT_TYPES["response.failed"].model_validate(event)
    assert parsed.response.status == "failed" and parsed.response.error.code == "server_error"
    assert "9 s" in parsed.response.error.message and parsed.sequence_number == 3


# --------------------------------------------------------------------------------------- requests


def chat_of(**keys):
    request = read_response_request({"input": "a", **keys})
    body = request.chat_body(ResponseStore().conversation(request))
    return read_request(body, True, "m", Sampling(0.5))


def test_keys_become_the_chats():
    plain = chat_of()
    assert plain.prompts == [[{"role": "user", "content": "a"}]]
    assert plain.stream and plain.stream_options == {"include_usage": True}
    assert plain.response_format is None and plain.tools is None and plain.max_new_tokens is None
    assert plain.sampling == Sampling(0.5)
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    text = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    full = chat_of(
        instructions="Be brief.",
        temperature=0.25,
        top_p=0.5,
        max_output_tokens=7,
        text=text,
        seed=3,
        stop=["x"],
        top_k=4,
        draft=False,
    )
    system = {"role": "system", "content": "Be brief."}
    assert full.prompts == [[system, *plain.prompts[0]]]
    assert full.sampling == Sampling(0.25, top_k=4, top_p=0.5) and full.max_new_tokens == 7
    assert full.response_format == schema and (full.seed, full.stop) == (3, ["x"])
    assert full.draft is False
    assert chat_of(text={"format": {"type": "json_object"}}).response_format == {"type": "object"}
    tool = {"type": "function", "name": "f", "parameters": {}, "strict": True}
    function = {"name": "f", "parameters": {}, "strict": True}
    named = read_response_request(
        {"input": "a", "tools": [tool], "tool_choice": {"type": "function", "name": "f"}}
    )
    body = named.chat_body([])
    assert body["tools"] == [{"type": "function", "function": function}]
    assert body["tool_choice"] == {"type": "function", "function": {"name": "f"}}


# What clients send when nobody has set anything, and values that ask for nothing.
NEUTRAL_KEYS = {
    "background": False,
    "truncation": "disabled",
    "include": [],
    "max_tool_calls": 3,
    "stream_options": {"include_obfuscation": False},
    "top_logprobs": 0,
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "user": "me",
    "service_tier": "auto",
    "safety_identifier": "x",
    "prompt_cache_key": "x",
    "metadata": {"a": "b"},
    "conversation": None,
    "prompt": None,
    "max_tokens": None,
    "n": None,
    "reasoning": {"effort": None},
    "text": {"format": {"type": "text"}, "verbosity": "medium"},
}


def test_a_body_of_codex_is_read():
    """The keys of its requests that ask for nothing else than a chat does."""
    tool = {"type": "function", "name": "shell", "strict": False, "parameters": {"type": "object"}}
    request = chat_of(
        instructions="You are a coding agent.",
        input=[
            {"type": "message", "role": "developer", "content": "b"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        ],
        tools=[tool],
        tool_choice="auto",
        parallel_tool_calls=False,
        reasoning={"effort": None, "summary": "auto"},
        store=False,
        stream=True,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="x",
        client_metadata={"x-codex-installation-id": "x"},
    )
    assert [message["role"] for message in request.prompts[0]] == ["system", "developer", "user"]
    assert request.template_tools[0]["function"]["name"] == "shell"


def test_neutral_keys_change_nothing():
    """Encrypted thoughts are asked for by clients that store nothing, such as inspect-ai: the items
    have their thoughts in the clear."""
    assert chat_of(**NEUTRAL_KEYS) == chat_of()
    assert chat_of(include=["reasoning.encrypted_content"]) == chat_of()


@pytest.mark.parametrize(
    "keys, param",
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"include": ["reasoning.encrypted_content", "file_search_call.results"]}, "include"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools"),
        ({"tools": [{"type": "custom", "name": "apply_patch", "format": {}}]}, "tools"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": []}]}, "tools"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": "9"}, "max_output_tokens"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"input": 3}, "input"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input"),
        ({"input": [{"role": "user", "content": {"text": "a"}}]}, "input"),
        ({"input": [{"role": 3, "content": "a"}]}, "input"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"mirostat": 2}, "mirostat"),
        ({"n_predict": 3}, "n_predict"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"verbosity": "low"}, "verbosity"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_what_is_not_there_is_refused_by_name(keys, param):
    with pytest.raises(Refusal) as caught:
        request = read_response_request({"input": "a", **keys})
        conversation = ResponseStore().conversation(request)
        try:
            read_request(request.chat_body(conversation), True, "m", Sampling())
        except Refusal as refusal:
            raise with_own_param(refusal) from None
    error = caught.value.body["error"]
    assert error["param"] == param
    words = set(re.findall(r"[\w.]+", error["message"])) - keys.keys()
    assert not words & CHAT_KEYS
    for name in ("input_image", "input_file", "computer_call", "function_call", "encrypted"):
        assert name not in str(keys.get("input")) or name in error["message"]
    for tool in keys.get("tools") or ():
        assert tool["type"] in error["message"]


@pytest.mark.parametrize(
    "keys",
    [
        {"instructions": "Be brief.", "input": [{"role": "user", "content": 3}]},
        {
            "input": [
                {"type": "reasoning", "summary": []},
                {"role": "assistant", "content": "a"},
                {"role": "user", "content": 3},
            ]
        },
    ],
)
def test_a_refused_item_has_no_number_of_the_chats(keys):
    """Instructions are a message before it, and items in a row are one message."""
    request = read_response_request(keys)
    body = request.chat_body(ResponseStore().conversation(request))
    with pytest.raises(Refusal) as caught:
        read_request(body, True, "m", Sampling())
    error = with_own_param(caught.value).body["error"]
    assert error["message"].startswith("input = 3: ") and error["param"] == "input"


def test_a_tool_without_a_name_is_refused_as_it_was_sent():
    request = read_response_request({"input": "a", "tools": [{"type": "function"}]})
    body = request.chat_body(ResponseStore().conversation(request))
    with pytest.raises(Refusal) as caught:
        read_request(body, True, "m", Sampling())
    assert str(with_own_param(caught.value)) == "tools.0.name is missing"


def test_a_refusal_quotes_the_request_as_it_is():
    part = {"type": "x", "text": "messages"}
    request = read_response_request({"input": [{"role": "user", "content": [part]}]})
    body = request.chat_body(ResponseStore().conversation(request))
    with pytest.raises(Refusal) as caught:
        read_request(body, True, "m", Sampling())
    assert str(part) in str(with_own_param(caught.value))


def test_json_of_many_levels_is_refused_before_it_is_too_deep_to_be_written():
    """A response nests its request's tools deeper; with 954 levels the answer was status 500."""
    for depth in (1, 150):
        assert parse_body(b'{"a":' * depth + b"1" + b"}" * depth)
    for depth in (250, 954, 100_000):
        with pytest.raises((ValueError, RecursionError)):
            parse_body(b'{"a":' * depth + b"1" + b"}" * depth)


def test_items_in_a_row_are_one_message_of_the_assistant():
    def call(name: str) -> dict:
        return {"type": "function_call", "call_id": name, "name": name, "arguments": "{}"}

    def chat_call(name: str) -> dict:
        return {"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}}

    output = {"type": "function_call_output", "call_id": "f", "output": "4"}
    parts = [{"type": "input_text", "text": "4"}, {"type": "input_text", "text": "2"}]
    thoughts = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}
    items = [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": parts},
        thoughts,
        {"type": "message", "role": "assistant", "content": "I call."},
        call("f"),
        call("g"),
        output,
        output | {"call_id": "g", "output": parts},
        call("f"),
        {"role": "assistant", "content": "Done."},
        {"role": "assistant", "content": "Really."},
    ]
    assert chat_messages(items) == [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": "42"},
        {
            "role": "assistant",
            "reasoning_content": "Hm.",
            "content": "I call.",
            "tool_calls": [chat_call("f"), chat_call("g")],
        },
        {"role": "tool", "tool_call_id": "f", "content": "4"},
        {"role": "tool", "tool_call_id": "g", "content": "42"},
        {"role": "assistant", "tool_calls": [chat_call("f")], "content": "Done."},
        {"role": "assistant", "content": "Really."},
    ]


def test_the_oldest_responses_go_and_the_others_keep_their_conversations():
    store = ResponseStore(max_responses=3)
    ids = []
    previous = {}
    for number in range(5):
        chunks = [chunk(content=f"t{number}"), chunk("stop")]
        response = response_events(chunks, store, input=f"i{number}", **previous)[-1]["response"]
        ids.append(response["id"])
        previous = {"previous_response_id": response["id"]}
    response_events([chunk("stop")], store, store=False)
    assert list(store.responses) == ids[2:]
    following = read_response_request({"input": "end", **previous})
    texts = [message["content"] for message in chat_messages(store.conversation(following))]
    turns = [(f"i{number}", f"t{number}") for number in range(5)]
    assert texts == [*itertools.chain(*turns), "end"]
    for id in (ids[1], "resp_x"):
        with pytest.raises(Refusal, match=f"Response with id '{id}' not found") as caught:
            store.get(id)
        assert caught.value.status == 404
        request = read_response_request({"input": "a", "previous_response_id": id})
        with pytest.raises(Refusal, match="Previous response") as caught:
            store.conversation(request)
        assert caught.value.body["error"]["code"] == "previous_response_not_found"
    store.remove(ids[3])
    assert list(store.responses) == [ids[2], ids[4]]


def test_an_item_is_found_by_its_id_without_a_search():
    """50,000 references in a request would each search all responses."""

    class Unsearchable(dict):
        def values(self):
            raise AssertionError("searched")

    responses = ResponseStore(max_responses=3)
    for number in range(5):
        item = {"id": f"msg_{number}", "role": "assistant", "content": "a"}
        responses.add({"id": f"resp_{number}", "output": [item]}, [])
    responses.responses = Unsearchable(responses.responses)
    reference = {"type": "item_reference", "id": "msg_4"}
    assert responses.resolve(reference)["id"] == "msg_4"
    responses.remove("resp_3")
    for id in ("msg_0", "msg_3", None, [], {}):
        with pytest.raises(Refusal, match="not found"):
            responses.resolve(reference | {"id": id})


def test_stored_responses_have_a_limit_of_bytes():
    """Whatever they are made of: keys that no template reads, too."""
    store = ResponseStore(max_bytes=100_000)
    for number, long in enumerate(["metadata", "input", "tools", "junk"] * 3):
        text = "x" * 20_000
        tool = {"type": "function", "name": "f", "description": text}
        item = {"role": "user", "content": "a", "junk": text}
        keys = {"metadata": {"a": text}, "input": text, "tools": [tool]}
        keys = {"input": [item]} if long == "junk" else {long: keys[long]}
        events = response_events([chunk(content=f"t{number}"), chunk("stop")], store, **keys)
        num_bytes = sum(
            len(json.dumps([stored.response, stored.conversation]))
            for stored in store.responses.values()
        )
        assert num_bytes <= 100_000 and events[-1]["response"]["id"] in store.responses
    assert len(store.responses) > 2
    response_events([chunk("stop")], store, metadata={"a": "x" * 200_000})
    assert store.responses == {}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
ITEM = {
    "type": st.sampled_from(
        ["message", "function_call", "function_call_output", "reasoning", "item_reference"]
    ),
    "role": st.sampled_from(["user", "assistant", "system", "tool", 3]),
    "content": st.lists(st.fixed_dictionaries({"type": JSON, "text": JSON}), max_size=2),
    "summary": JSON,
    "call_id": JSON,
    "name": JSON,
    "arguments": JSON,
    "output": JSON,
    "id": JSON,
}
ITEM = {key: JSON | values for key, values in ITEM.items()}
TOOL = {"type": st.just("function"), "name": st.just("f"), "parameters": JSON, "strict": JSON}
BODY = {
    "instructions": JSON,
    "tools": st.lists(st.fixed_dictionaries({}, optional=TOOL), max_size=2),
    "tool_choice": st.sampled_from(["auto", "none", "required"]),
    "text": st.fixed_dictionaries({}, optional={"format": JSON, "verbosity": JSON}),
    "metadata": JSON,
    "reasoning": JSON,
    "previous_response_id": JSON,
    "max_output_tokens": JSON,
    "stop": JSON,
    "include": JSON,
}
BODY = {key: JSON | values for key, values in BODY.items()}


@settings(deadline=None, max_examples=300)
@given(
    st.text(max_size=3) | st.lists(st.fixed_dictionaries({}, optional=ITEM), max_size=4) | JSON,
    st.fixed_dictionaries({}, optional=BODY),
)
def test_any_json_is_a_chat_or_a_refusal(body_input, keys):
    """No other exception, which would be status 500."""
    try:
        request = read_response_request({"input": body_input, **keys})
        body = request.chat_body(ResponseStore().conversation(request))
        json.dumps(request.response(read_request(body, True, "m", Sampling()), "m"))
    except Refusal as refusal:
        assert 400 <= refusal.status < 500


SAMPLE = re.compile(r'quickdraft_(\w+)(\{\w+="\w+"(,\w+="\w+")*\})? (\d+(\.\d+)?(e-?\d+)?)')


def samples_of(text: str) -> dict[str, float]:
    """Prometheus' text format: every sample after the TYPE of its family, and no family twice."""
    assert text.endswith("\n")
    samples = {}
    types = {}
    family = None
    for line in text.splitlines():
        if line.startswith("# "):
            _, keyword, family, value = line.split(" ", 3)
            if keyword == "TYPE":
                assert family not in types and value in ("gauge", "counter", "summary")
                types[family] = value
            else:
                assert keyword == "HELP" and value
            continue
        match = SAMPLE.fullmatch(line)
        assert match and f"quickdraft_{match[1]}".startswith(family) and family in types, line
        sample = line.rpartition(" ")[0].removeprefix("quickdraft_")
        assert sample not in samples
        samples[sample] = float(match[4])
    return samples


def test_metrics_are_in_prometheus_form_and_begin_at_zero():
    metrics = Metrics()
    samples = samples_of(metrics.text({"slots": 4, "busy_slots": 0, "waiting_answers": 0}))
    assert {sample: value for sample, value in samples.items() if value} == {"slots": 4}
    assert len(samples) == sum(len(suffixes) for _, _, suffixes in METRICS.values())
    metrics.add({"generated_tokens_total": 3, 'answers_total{outcome="stop"}': 1})
    metrics.add({"generated_tokens_total": 2, "decode_seconds_total": 1e-7})
    samples = samples_of(metrics.text({}))
    assert samples["generated_tokens_total"] == 5 and samples["decode_seconds_total"] == 1e-7
    assert samples['answers_total{outcome="stop"}'] == 1


# ---------------------------------------------------------------------------------- a real server


def respond(running: Running, **keys) -> Response:
    usual = {"model": "demo", "max_output_tokens": 30, "temperature": 0}
    return running.client.responses.create(**usual | keys)


def chat_answer(running: Running, messages: list[dict], **keys):
    usual = {"model": "demo", "max_tokens": 30, "temperature": 0}
    return running.client.chat.completions.create(messages=messages, **usual | keys)


def metrics_of(running: Running) -> dict[str, float]:
    with urllib.request.urlopen(f"{running.url}/metrics") as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return samples_of(answer.read().decode())


@pytest.mark.attack
@pytest.mark.parametrize(
    "keys", [{}, {"temperature": 1, "extra_body": {"seed": 5}}, {"extra_body": {"draft": False}}]
)
def test_a_response_says_what_the_chat_says_streamed_or_not(server, keys):
    messages = [
        {"role": "system", "content": "A story."},
        {"role": "user", "content": PROMPTS[0]},
    ]
    expected = chat_answer(server, messages, **keys)
    keys = {"instructions": "A story.", "input": PROMPTS[0], **keys}
    response = respond(server, **keys)
    Response.model_validate(response.to_dict(), strict=False)
    assert response.output_text == expected.choices[0].message.content
    assert response.usage.input_tokens == expected.usage.prompt_tokens
    assert response.usage.output_tokens == expected.usage.completion_tokens
    assert response.usage.total_tokens == expected.usage.total_tokens
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.temperature == keys.get("temperature", 0)
    events = [event.to_dict() for event in respond(server, stream=True, **keys)]
    check_order(events)
    streamed = events[-1]["response"]
    changing = ("id", "created_at", "output", "timings", "usage")
    plain = response.to_dict()
    assert {key: streamed[key] for key in streamed if key not in changing} == {
        key: plain[key] for key in plain if key not in changing
    }
    assert streamed["output"][0]["content"] == plain["output"][0]["content"]
    assert "".join(event.get("delta", "") for event in events) == response.output_text


@pytest.mark.attack
def test_openais_client_streams_parses_and_goes_on(server):
    class Pet(BaseModel, extra="forbid"):
        kind: typing.Literal["cat", "dog"]
        age: int = Field(ge=0, le=9)

    ending = {"model": "demo", "input": "One day", "temperature": 0, "max_output_tokens": 480}
    with server.client.responses.stream(**ending) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert final.status == "completed" and final.completed_at >= final.created_at
    assert final.output_text == "".join(deltas) and len(deltas) > 2
    parsed = server.client.responses.parse(
        model="demo", input="Tom has a", text_format=Pet, max_output_tokens=120, temperature=0
    )
    assert isinstance(parsed.output_parsed, Pet)
    # with previous_response_id as with the whole conversation
    first = respond(server, input=PROMPTS[1])
    second = respond(server, input="Then", previous_response_id=first.id)
    messages = [
        {"role": "user", "content": PROMPTS[1]},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "Then"},
    ]
    text = chat_answer(server, messages).choices[0].message.content
    assert second.output_text == text and second.previous_response_id == first.id
    items = [messages[0], *[item.to_dict() for item in first.output], messages[2]]
    assert respond(server, input=items, store=False).output_text == text
    assert server.client.responses.retrieve(second.id) == second
    with pytest.raises(openai.BadRequestError, match="'stream' is not supported"):
        server.client.responses.retrieve(second.id, stream=True)
    server.client.responses.delete(first.id)
    for id in (first.id, respond(server, input="a", store=False).id):
        with pytest.raises(openai.NotFoundError) as caught:
            respond(server, input="Then", previous_response_id=id)
        assert caught.value.code == "previous_response_not_found"
        with pytest.raises(openai.NotFoundError):
            server.client.responses.retrieve(id)
    # an older response's end may go on although the first one is gone
    assert respond(server, input="And", previous_response_id=second.id).output_text


@pytest.mark.attack
def test_errors_have_openais_classes(server):
    for keys, code in (
        ({"background": True}, "unknown_parameter"),
        ({"input": "a dog " * 600}, "context_length_exceeded"),
        ({"tools": [{"type": "web_search"}]}, None),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            respond(server, **{"input": "a"} | keys)
        assert caught.value.code == code
    with pytest.raises(openai.NotFoundError, match="this server has 'demo'"):
        respond(server, input="a", model="gpt-4")
    for path in ("/v1/embeddings", "/v1/images/generations", "/v1/audio/speech"):
        status, body = server.raw(path, b'{"input": "a"}')
        assert status == 404 and "/v1/responses" in body["error"]["message"]
    for path in ("/v1/responses", "/tokenize", "/detokenize"):
        assert server.raw(path, b"[]")[0] == 400


@pytest.mark.attack
def test_an_agent_framework_speaks_responses(server):
    """pydantic-ai: text, a stream, an answer of a type, and a second turn."""
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Pet(BaseModel, extra="forbid"):
        age: int = Field(ge=0, le=9)

    provider = OpenAIProvider(base_url=f"{server.url}/v1", api_key="none")
    model = OpenAIResponsesModel("demo", provider=provider)
    options = {"model_settings": {"temperature": 0, "max_tokens": 120}}
    agent = Agent(model, instructions="Be brief.")
    first = agent.run_sync("Tom has a", **options)
    system = {"role": "system", "content": "Be brief."}
    user = {"role": "user", "content": "Tom has a"}
    expected = chat_answer(server, [system, user], max_tokens=120).choices[0].message.content
    assert first.output == expected

    async def stream() -> str:
        async with agent.run_stream("Tom has a", **options) as result:
            return "".join([part async for part in result.stream_text(delta=True)])

    assert asyncio.run(stream()) == expected
    second = agent.run_sync("Then", message_history=first.all_messages(), **options)
    assert second.output
    typed = Agent(model, output_type=NativeOutput(Pet))
    assert isinstance(typed.run_sync("Tom has a", **options).output, Pet)


@pytest.mark.attack
def test_metrics_add_up(server):
    before = metrics_of(server)
    answers = [
        server.ask(PROMPTS[0], n=2, temperature=1),
        server.ask(PROMPTS[1]),
        server.ask("One day", max_tokens=0, echo=True),
        chat_answer(server, [{"role": "user", "content": PROMPTS[2]}]),
        respond(server, input=PROMPTS[3]),
        respond(server, input="One day", max_output_tokens=480),
    ]
    with pytest.raises(openai.BadRequestError):
        server.ask("a", temperature=-1)
    stream = server.ask("Once there was a", max_tokens=400, temperature=30, stream=True)
    next(iter(stream))
    assert metrics_of(server)["busy_slots"] == 1
    stream.close()
    aborted = {}
    while aborted.get('answers_total{outcome="abort"}') != (
        before['answers_total{outcome="abort"}'] + 1
    ):
        time.sleep(0.05)
        aborted = metrics_of(server)
    difference = {sample: aborted[sample] - before[sample] for sample in before}
    usages = [answer.usage.to_dict() for answer in answers]
    choices = [choice for answer in answers[:4] for choice in answer.choices]
    timings = [choice.timings for choice in choices] + [answer.timings for answer in answers[4:]]
    num_prompt = sum(
        usage.get("prompt_tokens", 0) + usage.get("input_tokens", 0) for usage in usages
    )
    stream_prompt = len(load_tokenizer(DEMO).encode("Once there was a"))
    assert difference["prompt_tokens_total"] == num_prompt + stream_prompt
    num_generated = sum(timing["tokens"] for timing in timings)
    assert num_generated <= difference["generated_tokens_total"] <= num_generated + 399
    drafting = [timing["speculative"] for timing in timings]
    for name in ("drafted", "accepted"):
        own = sum(figures[name] for figures in drafting)
        assert own <= difference[f"{name}_tokens_total"] <= own + 1200
    assert difference['answers_total{outcome="stop"}'] == 1
    assert difference['answers_total{outcome="length"}'] == 6
    # The stream that broke off may have been refused too, before its connection's end was seen.
    assert difference["refused_requests_total"] in (1, 2)
    assert difference["time_to_first_token_seconds_count"] == len(timings) + 1
    ttft_s = sum(timing["ttft_s"] for timing in timings)
    assert ttft_s <= difference["time_to_first_token_seconds_sum"] < ttft_s + 5
    assert (aborted["busy_slots"], aborted["waiting_answers"], aborted["slots"]) == (0, 0, 4)


@pytest.mark.attack
def test_waiting_answers_are_counted_and_so_are_those_that_nobody_waits_for(serving):
    running = serving("--batch_size", "1")
    streams = []
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        for _ in range(3):
            ask = pool.submit(running.ask, "One", max_tokens=400, temperature=30, stream=True)
            streams.append(ask.result())
    next(iter(streams[0]))
    samples = metrics_of(running)
    assert (samples["busy_slots"], samples["waiting_answers"]) == (1, 2)
    for stream in reversed(streams):
        stream.close()
    while samples['answers_total{outcome="abort"}'] < 3:
        time.sleep(0.05)
        samples = metrics_of(running)
    assert (samples["busy_slots"], samples["waiting_answers"]) == (0, 0)
    assert running.end() == 0


@pytest.mark.attack
def test_tokens_are_the_servers_own(server):
    tokenizer = load_tokenizer(DEMO)

    def post(path: str, **body) -> dict:
        status, answer = server.raw(path, json.dumps(body).encode())
        assert status == 200, answer
        return answer

    text = "Once upon a time, é 😀"
    ids = tokenizer.encode(text)
    expected = {"count": len(ids), "max_model_len": 512, "tokens": ids}
    assert post("/tokenize", prompt=text) == expected
    assert post("/tokenize", prompt=text, add_special_tokens=True) == expected
    bare = post("/tokenize", model="demo", prompt=text, add_special_tokens=False)["tokens"]
    assert bare == tokenizer.encode(text, bos=False) == ids[1:]
    for tokens in (ids, bare):
        assert post("/detokenize", tokens=tokens) == {"prompt": text}
    assert post("/tokenize", prompt="a dog " * 600)["count"] > 512
    messages = [{"role": "user", "content": PROMPTS[0]}]
    count = post("/tokenize", messages=messages)["count"]
    assert count == chat_answer(server, messages, max_tokens=1).usage.prompt_tokens
    for path, body in (
        ("/tokenize", {"prompt": 3}),
        ("/tokenize", {}),
        ("/tokenize", {"messages": []}),
        ("/tokenize", {"prompt": ["a", "b"]}),
        ("/tokenize", {"messages": messages, "add_special_tokens": True}),
        ("/detokenize", {"tokens": [2048]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [True]}),
        ("/detokenize", {"tokens": "a"}),
        ("/detokenize", {}),
    ):
        assert server.raw(path, json.dumps(body).encode())[0] == 400, (path, body)


CHATML = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@pytest.mark.attack
def test_a_default_system_message_and_a_final_message_that_goes_on(serving, tmp_path):
    """transformers renders what the model should read."""
    from transformers.utils.chat_template_utils import render_jinja_template

    folder = shutil.copytree(DEMO, tmp_path / "folder")
    (folder / "chat_template.jinja").write_text(CHATML)
    running = serving("--checkpoint", str(folder), "--system", "Be kind.")
    tokenizer = load_tokenizer(folder)

    def ids(messages: list[dict], **keys) -> list[int]:
        body = json.dumps({"messages": messages, **keys}).encode()
        status, answer = running.raw("/tokenize", body)
        assert status == 200, answer
        return answer["tokens"]

    def expected(messages: list[dict], **keys) -> list[int]:
        (text,), _ = render_jinja_template([messages], chat_template=CHATML, **keys)
        return tokenizer.parse(text)

    kind = {"role": "system", "content": "Be kind."}
    brief = {"role": "system", "content": "Be brief."}
    user = {"role": "user", "content": "One day"}
    begun = {"role": "assistant", "content": "Lily saw a"}
    full = {"add_generation_prompt": True}
    assert ids([user]) == expected([kind, user], **full)
    assert ids([brief, user]) == expected([brief, user], **full)
    developer = {"role": "developer", "content": "Be brief."}
    assert ids([developer, user]) == expected([brief, user], **full)
    assert ids([user], add_generation_prompt=False) == expected([kind, user])
    continued = expected([kind, user, begun], continue_final_message=True)
    for keys in ({}, {"add_generation_prompt": False}):
        assert ids([user, begun], continue_final_message=True, **keys) == continued
    options = {"max_tokens": 12, "model": "folder"}
    going_on = {"extra_body": {"continue_final_message": True}}
    answer = chat_answer(running, [user, begun], **options, **going_on)
    text = answer.choices[0].message.content
    assert text == running.ask(continued, **options).choices[0].text
    assert answer.usage.prompt_tokens == len(continued)
    response = respond(
        running, model="folder", input=[user, begun], max_output_tokens=12, **going_on
    )
    assert response.output_text == text
    assert chat_answer(running, [user, begun], **options).choices[0].message.content != text
    for messages in ([user], [user, begun | {"reasoning_content": "Hm."}]):
        with pytest.raises(openai.BadRequestError, match="continue_final_message needs"):
            chat_answer(running, messages, **options, **going_on)
    assert running.end() == 0
