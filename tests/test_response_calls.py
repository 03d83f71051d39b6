"""Calls and thoughts in /v1/responses, from the text that a model writes to the items of the next
turn.

Oracles: the chat endpoint for the same conversation, the same text in other pieces, and the types
of the `openai` package, which validate strictly. A scripted model writes the texts, as in
tests/test_tool_calls.py; noise writes the forced calls. The engine has two slots and a draft.
"""

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response
from test_responses import check_order, chunk, response_events
from test_tool_calls import (  # noqa: F401, the server is a fixture
    FAMILIES,
    TOOLS,
    call_text,
    form_of,
    server,
)

from scripts.serve.responses import ResponseStore

TEXT_TOOLS = [tool["function"] | {"type": "function"} for tool in TOOLS]
HERMES = "Hermes and Qwen"


def respond(server, **keys) -> list[dict]:  # noqa: F811
    """The events of a streamed response."""

    async def run():
        usual = {"model": "demo", "tools": TEXT_TOOLS, "temperature": 0, "max_output_tokens": 200}
        stream = await server.client().responses.create(stream=True, **usual | keys)
        return [event.to_dict() async for event in stream]

    return asyncio.run(run())


def whole(server, **keys) -> dict:  # noqa: F811
    async def run():
        usual = {"model": "demo", "tools": TEXT_TOOLS, "temperature": 0, "max_output_tokens": 200}
        return (await server.client().responses.create(**usual | keys)).to_dict()

    return asyncio.run(run())


def contents(response: dict) -> list[tuple]:
    """The items without ids."""
    items = []
    for item in response["output"]:
        text = (item["name"], item["arguments"]) if "name" in item else item["content"][0]["text"]
        items.append((item["type"], item["status"], text))
    return items


# ------------------------------------------------------------------------------------- items


PARTS = st.lists(
    st.sampled_from(
        [
            "One day",
            " ",
            "}",
            "<tool",
            '<tool_call>{"name": "f", "arguments": {"a": "}"}}</tool_call>',
            '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>\n',
        ]
    ),
    min_size=1,
    max_size=6,
)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(["", "<think>Hm.</think>"]), PARTS, st.data())
def test_the_items_depend_on_the_text_alone(thoughts, parts, data):
    """And not on the steps that decided it: text after a call stays outside of its arguments."""
    text = thoughts + "".join(parts)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)])]

    def events(pieces: list[str]) -> list[dict]:
        parser = form_of(HERMES, "</think>").parser()
        chunks = []
        for number, piece in enumerate(pieces):
            deltas = parser.feed([piece], is_last=number == len(pieces) - 1)
            chunks += [chunk(**delta) for delta in deltas]
        return response_events([*chunks, chunk("stop")], ResponseStore())

    split = events(pieces)
    check_order(split)
    assert contents(split[-1]["response"]) == contents(events([text])[-1]["response"])


# ------------------------------------------------------------------------------------- the server


@pytest.mark.attack
@pytest.mark.one_in(3, len(FAMILIES))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_forced_call_is_an_item_and_its_result_a_turn(server, family):  # noqa: F811
    server.use(family)
    once = {"parallel_tool_calls": False, "extra_body": {"separate_reasoning": False}}
    for choice in ("required", {"type": "function", "name": "add"}):
        forced = {"input": "Hi", "tool_choice": choice, **once}
        events = respond(server, **forced)
        check_order(events)
        response = events[-1]["response"]
        Response.model_validate(response)
        assert contents(whole(server, **forced)) == contents(response)
        ((item_type, status, (name, arguments)),) = contents(response)
        assert (item_type, status, response["status"]) == ("function_call", *["completed"] * 2)
        assert name in ("add", "now") if choice == "required" else name == "add"
        assert 0 <= json.loads(arguments)["a"] <= 99 if name == "add" else arguments == "{}"
        (call,) = response["output"]
        chat_choice = choice
        if choice != "required":
            chat_choice = {"type": "function", "function": {"name": "add"}}
        chat = server.ask(tools=TOOLS, tool_choice=chat_choice, **once)
        function = chat.choices[0].message.tool_calls[0].function
        assert (name, arguments) == (function.name, function.arguments)
        assert response["usage"]["input_tokens"] == chat.usage.prompt_tokens
        assert response["usage"]["output_tokens"] == chat.usage.completion_tokens
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "6"}
    messages = [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": call["call_id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": call["arguments"]},
                }
            ],
        },
        {"role": "tool", "tool_call_id": call["call_id"], "content": "6"},
    ]
    last = {"max_output_tokens": 9}
    expected = server.ask(messages=messages, tools=TOOLS, max_tokens=9)
    text = expected.choices[0].message.content
    for keys in (
        {"input": [result], "previous_response_id": response["id"]},
        {"input": [{"role": "user", "content": "Hi"}, call, result]},
        {
            "input": [
                {"role": "user", "content": "Hi"},
                {"type": "item_reference", "id": call["id"]},
                result,
            ]
        },
    ):
        for answer in (
            whole(server, **keys, **last),
            respond(server, **keys, **last)[-1]["response"],
        ):
            said = [item for item in answer["output"] if item["type"] == "message"]
            assert "".join(item["content"][0]["text"] for item in said) == text
            assert answer["usage"]["input_tokens"] == expected.usage.prompt_tokens


@pytest.mark.attack
def test_thoughts_text_and_a_call_are_three_items(server):  # noqa: F811
    """A call that max_output_tokens cuts off is incomplete; reasoning_tokens are the thoughts'."""
    call = call_text(HERMES, "add", a=5)
    server.use(HERMES, f"<think>Hm, so.</think>I add.\n{call}", "Six.", thoughts="</think>")
    events = respond(server, input="Hi")
    check_order(events)
    response = events[-1]["response"]
    assert contents(response) == [
        ("reasoning", "completed", "Hm, so."),
        ("message", "completed", "I add."),
        ("function_call", "completed", ("add", '{"a": 5}')),
    ]
    assert contents(whole(server, input="Hi")) == contents(response)
    num_thoughts = response["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert num_thoughts == len(server.tokenizer.parse("Hm, so.</think>"))
    chat = server.ask(tools=TOOLS, max_tokens=200)
    assert chat.usage.completion_tokens_details.reasoning_tokens == num_thoughts
    result = {
        "type": "function_call_output",
        "call_id": response["output"][2]["call_id"],
        "output": "6",
    }
    following = whole(server, input=[result], previous_response_id=response["id"])
    assert contents(following) == [("message", "completed", "Six.")]
    assert following["usage"]["output_tokens_details"]["reasoning_tokens"] == 0
    num_tokens = response["usage"]["output_tokens"]
    for limit in range(1, num_tokens):
        events = respond(server, input="Hi", max_output_tokens=limit)
        check_order(events)
        cut = events[-1]["response"]
        assert cut["status"] == "incomplete"
        item_type, status, text = contents(cut)[-1]
        assert status == "incomplete"
        if item_type == "function_call":
            assert text[0] == "add" and '{"a": 5}'.startswith(text[1])


@pytest.mark.attack
def test_responses_with_calls_at_once_are_each_as_alone(server):  # noqa: F811
    """Six of them share two slots and a draft."""
    server.use(HERMES)
    keys = {"model": "demo", "tools": TEXT_TOOLS, "tool_choice": "required", "temperature": 1}
    keys |= {"parallel_tool_calls": False, "max_output_tokens": 60}
    alone = [whole(server, **keys, input=f"Hi {n}", extra_body={"seed": n}) for n in range(6)]

    async def run():
        client = server.client()
        created = [
            client.responses.create(**keys, input=f"Hi {n}", extra_body={"seed": n})
            for n in range(6)
        ]
        return [response.to_dict() for response in await asyncio.gather(*created)]

    assert [contents(response) for response in asyncio.run(run())] == [*map(contents, alone)]
