"""What a request may ask for beside its text: settings of a line's own, names for the template,
log-probabilities and a penalty. Oracles are the same request alone, transformers' renderer and
generator, and a pass over the whole text."""

import dataclasses
import functools
import json
import math
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, generate, oracle
from reference import naive_penalties
from safetensors.torch import load_file, save_file

import decoding.prefill as prompt_room
from cli.flags import parse_args
from cli.main import main as run_args
from cli.prompts import encode_all, read_prompts
from decoding.answers import Answer
from decoding.engine import Engine
from decoding.logits import penalize, top_logprobs
from decoding.sampling import Sampling
from decoding.statistics import Timing
from drafts.base import ModelDraft
from drafts.ngram import NgramDraft
from drafts.target_layers import layer_subset
from loading.chat_templates import ChatTemplate
from loading.checkpoint import load_model
from loading.tokenizer import load_tokenizer


def run(capsys, *arguments) -> list[dict]:
    run_args(parse_args([*map(str, arguments), "--json", "--device", "cpu"]))
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def jsonl(file, *lines: dict):
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


# -------------------------------------------------------------------------------- lines' settings

ASKED = [  # a line's own keys, and the flags that mean the same
    ({"temperature": 0.5}, ["--temperature", 0.5]),
    ({"temperature": 1.5, "seed": 9}, ["--temperature", 1.5, "--seed", 9]),
    ({"top_k": 3}, ["--top_k", 3]),
    ({"top_p": 0.5, "temperature": 2.0}, ["--top_p", 0.5, "--temperature", 2.0]),
    ({"min_p": 0.2, "max_new_tokens": 5}, ["--min_p", 0.2, "--max_new_tokens", 5]),
    ({"temperature": 0}, ["--temperature", 0]),
    ({"repetition_penalty": 1.8}, ["--repetition_penalty", 1.8]),
    (
        {"presence_penalty": -2, "frequency_penalty": 1.5},
        ["--presence_penalty", -2, "--frequency_penalty", 1.5],
    ),
    ({}, []),
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("draft", [[], ["--draft", "ngram:1"]], ids=["plain", "drafted"])
def test_a_line_gets_what_its_settings_get_alone(draft, text_folder, capsys, tmp_path):
    """In one batch where kinds agree, and in the file's order where they do not."""
    common = [
        "--checkpoint",
        text_folder,
        "--dtype",
        "float32",
        "--seed",
        4,
        "--ignore_eos",
        *draft,
    ]
    file = jsonl(
        tmp_path / "f.jsonl",
        *({"id": i, "prompt": "the cat", **own} for i, (own, _) in enumerate(ASKED)),
    )
    rows = run(capsys, *common, "--max_new_tokens", 12, "--prompt_file", file, "--batch_size", 4)
    assert [row["id"] for row in rows] == [*range(len(ASKED))]
    for row, (_, flags) in zip(rows, ASKED, strict=True):
        (alone,) = run(capsys, *common, "--max_new_tokens", 12, "--prompt", "the cat", *flags)
        assert row["tokens"] == alone["tokens"], flags
    assert len({tuple(row["tokens"]) for row in rows}) > 5, "the settings make no difference"


def test_stop_strings_of_a_lines_own(text_folder, capsys, tmp_path):
    common = ["--checkpoint", text_folder, "--dtype", "float32", "--temperature", 0, "--ignore_eos"]
    (whole,) = run(capsys, *common, "--prompt", "the cat", "--max_new_tokens", 30)
    text = whole["text"]
    first, second = text[4], text[9:12]
    lines = [
        {"prompt": "the cat", "stop": first},
        {"prompt": "the cat", "stop": [second]},
        {"prompt": "the cat"},
    ]
    file = jsonl(tmp_path / "f.jsonl", *lines)
    rows = run(
        capsys,
        *common,
        "--max_new_tokens",
        30,
        "--prompt_file",
        file,
        "--batch_size",
        3,
        "--stop",
        "\0",
    )
    assert [row["text"] for row in rows] == [text.split(first)[0], text.split(second)[0], text]
    assert [row["finish_reason"] for row in rows] == ["stop", "stop", "length"]


def test_empty_stop_strings_are_ignored(text_folder, capsys, tmp_path):
    """Of a line, in place of the flag's, and of the flag."""
    common = ["--checkpoint", text_folder, "--dtype", "float32", "--temperature", 0, "--ignore_eos"]
    common += ["--max_new_tokens", 20]
    (full,) = run(capsys, *common, "--prompt", "the cat")
    end = full["text"][4]
    lines = [
        {"prompt": "the cat", "stop": ""},
        {"prompt": "the cat", "stop": [end, ""]},
        {"prompt": "the cat"},
    ]
    file = jsonl(tmp_path / "f.jsonl", *lines)
    rows = run(
        capsys, *common, "--prompt_file", file, "--batch_size", 3, "--ordered", "--stop", end, ""
    )
    assert [row["text"] for row in rows] == [full["text"], *[full["text"].partition(end)[0]] * 2]


def test_a_seed_of_minus_one_is_random_and_told(text_folder, capsys, tmp_path):
    """Of the flag and of a line, for every sample; the number that results tell gives the same text
    again."""
    common = ["--checkpoint", text_folder, "--dtype", "float32", "--temperature", 2, "--ignore_eos"]
    common += ["--max_new_tokens", 8]
    first = run(capsys, *common, "--prompt", "the cat", "--seed", -1, "--num_samples", 2)
    second = run(capsys, *common, "--prompt", "the cat", "--seed", -1)
    seeds = [row["seed"] for row in (*first, *second)]
    assert (
        len(set(seeds)) == 3
        and seeds[1] == seeds[0] + 1
        and all(0 <= seed < 2**53 + 2 for seed in seeds)
    )
    (again,) = run(capsys, *common, "--prompt", "the cat", "--seed", seeds[0])
    assert again["tokens"] == first[0]["tokens"]
    lines = [
        {"id": 1, "prompt": "the cat", "seed": -1},
        {"id": 2, "prompt": "the cat", "seed": -1},
        {"id": 3, "prompt": "the cat"},
    ]
    file, output = jsonl(tmp_path / "f.jsonl", *lines), tmp_path / "out.jsonl"
    options = [*common, "--prompt_file", file, "--batch_size", 3, "--output", output]
    run(capsys, *options, "--seed", -1)
    rows = {row["id"]: row for row in map(json.loads, output.read_text().splitlines())}
    assert len({row["seed"] for row in rows.values()}) == 3
    (again,) = run(capsys, *common, "--prompt", "the cat", "--seed", rows[1]["seed"])
    assert again["tokens"] == rows[1]["tokens"]
    run_args(
        parse_args([*map(str, common), "--prompt", "the cat", "--seed", "-1", "--device", "cpu"])
    )
    out, err = capsys.readouterr()
    (again,) = run(
        capsys, *common, "--prompt", "the cat", "--seed", err.partition("--seed ")[2].split()[0]
    )
    assert again["text"] == out.rstrip("\n")


def test_special_tokens_of_prompts_and_stop_strings(text_folder, capsys, tmp_path):
    """--parse_special, replaced by a line's own key; a stop string that names the token that the
    model writes."""
    tokenizer = load_tokenizer(text_folder)
    common = [
        "--checkpoint",
        text_folder,
        "--dtype",
        "float32",
        "--temperature",
        0,
        "--max_new_tokens",
        2,
    ]
    text = "the</s> cat"
    lines = [{"prompt": text, "parse_special": value} for value in (True, False)] + [
        {"prompt": text}
    ]
    file = jsonl(tmp_path / "f.jsonl", *lines)
    parsed, plain = ([1, *tokenizer.parse(text)], tokenizer.encode(text))
    assert parsed.count(2) == 1 and 2 not in plain
    for flags, last in (([], plain), (["--parse_special"], parsed)):
        rows = run(capsys, *common, "--prompt_file", file, "--ordered", *flags)
        assert [row["prompt_tokens"] for row in rows] == [parsed, plain, last]
        (row,) = run(capsys, *common, "--prompt", text, *flags)
        assert row["prompt_tokens"] == last
    answer = Answer(tokenizer, [], ["<s>"])
    answer.request = SimpleNamespace(
        tokens=[], token_steps=[], token_records=[], finish_reason=None
    )
    for id in (*tokenizer.encode("the cat", bos=False), 1):
        assert not answer.at_stop_string
        answer.request.tokens.append(id)
        answer.feed()
    answer.close()
    assert (answer.at_stop_string, answer.finish_reason, answer.text) == (True, "stop", " the cat")


def encoded_by(prompts, args, tokenizer):
    """In a context of 100 positions."""
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=2**20))
    return encode_all(prompts, args, tokenizer, model, 100)


USER, WANTED = [{"role": "user", "content": "a"}], "expected a JSON object"
BAD = [
    ({"topp": 0.5}, "'topp': no such key; there are chat_template_kwargs, frequency_penalty"),
    ({"temperature": "0.5"}, "\"temperature\": '0.5' must be a number"),
    ({"temperature": True}, '"temperature": True must be a number'),
    ({"temperature": -1}, "temperature = -1"),
    ({"top_p": 2}, "top_p = 2"),
    ({"stop": [1]}, '"stop"'),
    ({"parse_special": 1}, '"parse_special": 1 must be true or false'),
    ({"messages": USER, "parse_special": True}, '"parse_special" needs a "prompt"'),
    ({"prefill": "x"}, "prefill: only conversations have a template"),
    ({"messages": USER, "prompt": "a"}, WANTED),
    ({"id": 5, "prompt": None}, WANTED),
    ({"messages": USER, "prefill": 3}, '"prefill": 3 must be a string'),
    ({"messages": USER, "tools": {}}, '"tools": {} must be a list'),
    ({"messages": USER, "chat_template_kwargs": []}, "must be an object"),
    (
        {"messages": USER, "chat_template_kwargs": {"messages": []}},
        "chat_template_kwargs: messages cannot be given there",
    ),
    (
        {"messages": USER, "chat_template_kwargs": {"self": 1, "tokenizer": 1}},
        "self, tokenizer cannot be given there",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]},
        "content holds {'type': 'image'",
    ),
    ({"messages": [{"role": "user", "content": 3}]}, 'must be a list of {"role", "content"}'),
    ({"messages": [{"role": "user", "content": None}]}, 'must be a list of {"role", "content"}'),
    ({"prompt": ""}, "must be a text of at least one character"),
    (
        {"seed": -2},
        '"seed": -2 must be a whole number from 0 to 4,611,686,018,427,387,903, or -1 for a random'
        " one",
    ),
    ({"seed": -1.0}, '"seed": -1.0 must be a whole number from 0'),
    ({"max_new_tokens": -1}, '"max_new_tokens": -1 must be a whole number from 1'),
    ({"max_new_tokens": 1.5}, '"max_new_tokens": 1.5 must be a whole number from 1'),
    ({"id": float("nan")}, "NaN or Infinity"),
    ({"id": [float("-inf")]}, "NaN or Infinity"),
]


@pytest.mark.parametrize("own, named", BAD, ids=[str(own)[:60] for own, _ in BAD])
def test_a_line_that_cannot_be_meant_is_named(own, named, tmp_path):
    line = own if "messages" in own else {"prompt": "a", **own}
    file = jsonl(tmp_path / "f.jsonl", {"prompt": "b"}, line)
    asked, broken = read_prompts(parse_args(["--prompt_file", str(file)]).prompts)
    assert [request.text for request in asked] == ["b"]
    assert len(broken) == 1 and ", line 2" in broken[0] and named in broken[0], broken


def test_a_number_beyond_float64_is_no_json_number(tmp_path):
    """Python's parser makes Infinity of it, which the result would repeat in its id."""
    file = tmp_path / "f.jsonl"
    file.write_text('{"prompt": "a", "id": 1e400}\n{"prompt": "b", "id": 1e300}\n')
    asked, broken = read_prompts(parse_args(["--prompt_file", str(file)]).prompts)
    assert [request.text for request in asked] == ["b"]
    assert ", line 1" in broken[0] and "it holds 1e400; JSON has no NaN or Infinity" in broken[0]


def test_a_folder_without_a_template_is_said_once(tmp_path, capsys):
    file = jsonl(tmp_path / "f.jsonl", {"messages": USER}, {"messages": USER}, {"prompt": "a"})
    args = parse_args(["--prompt_file", str(file)])
    requests, _ = read_prompts(args.prompts)
    rows, refused = encoded_by(requests, args, load_tokenizer(ROOT / "checkpoints" / "demo"))
    assert len(rows) == 3 and not refused
    assert capsys.readouterr().err.count("messages become plain text") == 1


def test_a_message_that_calls_tools_has_no_content_of_its_own(tmp_path, capsys):
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}],
    }
    folder = shutil.copytree(
        ROOT / "checkpoints" / "demo", tmp_path / "m", ignore=shutil.ignore_patterns("model.*")
    )
    args = parse_args(
        ["--prompt_file", str(jsonl(tmp_path / "f.jsonl", {"messages": [*USER, call]}))]
    )
    (request,), broken = read_prompts(args.prompts)
    assert not broken and request.text == ""
    args_b = parse_args(
        [
            "--prompt_file",
            str(jsonl(tmp_path / "b.jsonl", {"messages": [call | {"content": "I ask"}]})),
        ]
    )
    assert read_prompts(args_b.prompts)[0][0].text == "I ask"
    rows, refused = encoded_by([request], args, load_tokenizer(folder))
    assert not rows and "line 1: this model has no chat template for tool_calls" in refused[0]
    tools = {"messages": USER, "tools": [{"type": "function"}]}
    file = jsonl(tmp_path / "g.jsonl", tools)
    others, _ = read_prompts(parse_args(["--prompt_file", str(file)]).prompts)
    assert "no chat template for tools" in encoded_by(others, args, load_tokenizer(folder))[1][0]
    (folder / "chat_template.jinja").write_text(
        "{{ messages[1].content is undefined }}{{ messages[1].tool_calls | tojson }}{{"
        " messages[0].content }}"
    )
    rows, refused = encoded_by([request], args, load_tokenizer(folder))
    text = load_tokenizer(folder).decode(rows[0].ids)
    assert not refused and text.startswith("True") and '"arguments": {"x": 1}' in text


@pytest.mark.parametrize(
    "source, lost",
    [
        ("", "the chat template does not mention tools"),
        (
            "{# tools #}",
            "messages[1], role 'assistant': the chat template leaves out its tool_calls",
        ),
        (
            "{% for m in messages %}{{ m.tool_calls }}{% endfor %}",
            "the chat template does not mention tools",
        ),
    ],
)
def test_tools_that_the_template_does_not_mention_are_refused(source, lost, tmp_path):
    folder = shutil.copytree(
        ROOT / "checkpoints" / "demo", tmp_path / "m", ignore=shutil.ignore_patterns("model.*")
    )
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}" + source
    )
    call = {
        "role": "assistant",
        "content": "b",
        "tool_calls": [{"function": {"name": "f", "arguments": {}}}],
    }
    line = {"messages": [*USER, call, *USER], "tools": [{"type": "function"}]}
    args = parse_args(["--prompt_file", str(jsonl(tmp_path / "f.jsonl", line, {"messages": USER}))])
    rows, refused = encoded_by(
        read_prompts(args.prompts)[0],
        args,
        load_tokenizer(folder),
    )
    assert len(rows) == len(refused) == 1 and f"line 1: {lost}" in refused[0]


def test_roles_without_a_template_are_not_dropped_in_silence(tmp_path, capsys):
    folder = shutil.copytree(
        ROOT / "checkpoints" / "demo", tmp_path / "m", ignore=shutil.ignore_patterns("model.*")
    )
    for line, notice in (({"messages": USER}, True), ({"prompt": "a"}, False)):
        args = parse_args(["--prompt_file", str(jsonl(tmp_path / "f.jsonl", line))])
        encoded_by(read_prompts(args.prompts)[0], args, load_tokenizer(folder))
        assert (
            "messages become plain text without their roles" in capsys.readouterr().err
        ) == notice


FLAGS = [
    (["--logprobs", "2"], "--logprobs 2 needs --json"),
    (["--logprobs", "-1", "--json"], "logprobs = -1 must be"),
    (["--prefill", "x"], "need a conversation"),
    (["--repetition_penalty", "0"], "repetition_penalty = 0.0"),
    (["--interactive", "--chat_template_kwargs", '{"tools": []}'], "tools cannot be given there"),
]


@pytest.mark.parametrize("flags, named", FLAGS, ids=[named for _, named in FLAGS])
def test_flags_that_cannot_be_meant(flags, named):
    with pytest.raises(ValueError, match=named.replace("(", r"\(")):
        parse_args(flags)


def test_flags_of_templates_are_refused_for_the_lines_without_one(text_folder, tmp_path):
    file = jsonl(tmp_path / "f.jsonl", {"prompt": "the cat"}, {"messages": USER})
    args = parse_args(
        ["--prompt_file", str(file), "--prefill", "x", "--chat_template_kwargs", '{"a": 1}']
    )
    rows, refused = encoded_by(
        read_prompts(args.prompts)[0],
        args,
        load_tokenizer(text_folder),
    )
    assert (
        "line 1: --chat_template_kwargs, --prefill: only conversations have a template"
        in refused[0]
    )
    args = parse_args(["--prompt_file", str(file), "--prefill", "x"])
    rows, refused = encoded_by(
        read_prompts(args.prompts)[0],
        args,
        load_tokenizer(text_folder),
    )
    assert len(rows) == len(refused) == 1


@pytest.mark.parametrize(
    "flags", [["--chat_template_kwargs", "[]"], ["--tools", "{}"], ["--tools", "no/such/file"]]
)
def test_flags_that_are_no_json(flags, capsys):
    with pytest.raises(SystemExit):
        parse_args(flags)
    assert "in JSON" in capsys.readouterr().err


# -------------------------------------------------------------------------------------- templates

SOURCE = (
    "{{ bos_token }}{% if tools %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}{% for m in"
    " messages %}"
    "[{{ m.role }}]{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{{"
    " eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% if enable_thinking is defined and not"
    " enable_thinking %}"
    "<think></think>{% endif %}{% endif %}{{ other or '' }}"
)
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
TALK = [
    {"role": "user", "content": "hi"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"name": "weather", "arguments": {"in": "Oslo"}}],
    },
    {"role": "tool", "content": "rain", "tool_call_id": "1"},
]
GIVEN = [
    {},
    {"enable_thinking": False},
    {"enable_thinking": True},
    {"tools": TOOLS},
    {"tools": TOOLS, "other": 3},
]


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_templates_are_given_what_transformers_gives_them(given):
    from transformers.utils.chat_template_utils import render_jinja_template

    (want,), _ = render_jinja_template(
        [TALK],
        chat_template=SOURCE,
        add_generation_prompt=True,
        bos_token="<s>",
        eos_token="</s>",
        **given,
    )
    got = ChatTemplate(SOURCE, {"bos_token": "<s>", "eos_token": "</s>"}).render(
        TALK, True, **given
    )
    assert got == want


USER_TURN = {"role": "user", "content": "Who?"}
ANSWER = {"role": "assistant", "content": "Tom."}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "find", "arguments": {"name": "Tom", "n": [1, None]}},
}
CALLING = {"role": "assistant", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "a dog"}
DEVELOPER = {"role": "developer", "content": "Be brief."}
# In the constructs of published templates: which roles they read, where, and how a call's arguments
# are written.
LOOP = "{% for m in messages %}"
CHATML = LOOP + (
    "{% if m.role in ['user', 'system'] %}[{{ m.role }}]{{ m.content | trim }}{% elif m.role =="
    " 'assistant' %}"
    "[assistant]{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content"
    " }}</think>{% endif %}"
    "{{ m.content.split('</think>')[-1] | trim if m.content is string else '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{%"
    " endfor %}"
    "{% elif m.role == 'tool' %}[tool]{{ m.content | tojson }}{% endif %}{% endfor %}"
)
FIRST_SYSTEM = (
    "{% if messages[0].role == 'system' %}[system]{{ messages[0].content }}{% endif %}"
    + LOOP
    + "{% if m.role != 'system' %}[{{ m.role }}]{% if m.tool_calls %}{{ (m.tool_calls |"
    " first).function }}"
    "{% else %}{{ m.content }}{% endif %}{% endif %}{% endfor %}"
)
HARMONY = LOOP + (
    "{% if m.role in ['developer', 'user', 'tool'] %}[{{ m.role }}]{{ m.content }}{% elif m.role"
    " == 'assistant' %}"
    "{% set later = messages[loop.index:] | selectattr('role', 'equalto', 'assistant') | list %}"
    "{% if m.tool_calls %}{% set thought = m.thinking or m.content %}"
    "{% if not later %}[analysis]{{ thought }}{% endif %}"
    "{{ m.tool_calls[0].function }}{% else %}{{ m.content }}{% endif %}{% endif %}{% endfor %}"
)
JOINED = LOOP + (
    "{% if m.role == 'assistant' and m['content'] is none %}"
    "{% for c in m.tool_calls %}{{ c.function.name + ':' + c.function.arguments }}{% endfor %}"
    "{% elif m.role != 'developer' %}{{ '[' + m.role + ']' + m['content'] }}{% endif %}{% endfor %}"
)
IN_PARTS = LOOP + "[{{ m.role }}]{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"


@functools.cache
def tokenizer_of(source: str):
    """The demo's tokenizer with this template."""
    return dataclasses.replace(
        load_tokenizer(ROOT / "checkpoints" / "demo"), template=ChatTemplate(source, {})
    )


def chat_text(source: str, messages: list[dict], **options) -> str:
    """What a conversation becomes in a template."""
    tokenizer = tokenizer_of(source)
    return tokenizer.decode(tokenizer.chat(messages, **options))


def test_a_message_is_in_the_prompt_or_refused_with_role_and_reason():
    """Neither trimmed texts, nor thoughts that a template drops by design, nor empty contents are
    refused."""
    beside = CALLING | {"content": "Let me look."}
    function = {"role": "function", "name": "find", "content": "a dog"}
    late = {"role": "system", "content": "Who"}  # the text of another message
    misspelt = {"role": "usr", "content": "a"}
    thinking = ANSWER | {"content": "<think>\nhm</think>\n\nTom.\n", "reasoning": "hm"}
    two_calls = CALLING | {"tool_calls": [CALL, CALL]}
    for source, messages, reason in (
        (CHATML, [late, USER_TURN, thinking, USER_TURN], None),
        (CHATML, [late, USER_TURN | {"content": "  a\n"}, ANSWER | {"content": ""}], None),
        (CHATML, [USER_TURN, two_calls, RESULT, ANSWER, late], None),
        (
            CHATML,
            [
                USER_TURN
                | {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
            ],
            None,
        ),
        (
            CHATML,
            [USER_TURN, CALLING, function],
            "messages[2], role 'function': the chat template leaves out its"
            " content; the roles that it knows: system, user, assistant, tool",
        ),
        (CHATML, [misspelt, USER_TURN], "messages[0], role 'usr'"),
        (FIRST_SYSTEM, [late, USER_TURN, CALLING, RESULT, ANSWER], None),
        (
            FIRST_SYSTEM,
            [USER_TURN, ANSWER, late],
            "messages[2], role 'system': the chat template leaves out its content",
        ),
        (
            FIRST_SYSTEM,
            [USER_TURN, beside, RESULT],
            "messages[1], role 'assistant': the chat template leaves out its content",
        ),
        (
            FIRST_SYSTEM,
            [USER_TURN, two_calls],
            "messages[1], role 'assistant': the chat template leaves out its tool_calls",
        ),
        (HARMONY, [DEVELOPER, USER_TURN, beside, RESULT], None),
        (HARMONY, [DEVELOPER, USER_TURN, beside, RESULT, ANSWER, USER_TURN], None),
        (HARMONY, [DEVELOPER, USER_TURN, CALLING | {"reasoning": "hm"}, RESULT, ANSWER], None),
        (HARMONY, [late, USER_TURN], "messages[0], role 'system'"),
        (IN_PARTS, [late, USER_TURN, ANSWER], None),
        (
            IN_PARTS,
            [USER_TURN, CALLING],
            "messages[1], role 'assistant': the chat template leaves out its tool_calls",
        ),
        ("{{ messages[-1].content }}", [USER_TURN], None),
        ("{{ messages[-1].content }}", [DEVELOPER, USER_TURN], "messages[0], role 'system'"),
    ):
        if reason is None:
            assert "hm</think>" not in chat_text(source, messages)
            continue
        with pytest.raises(ValueError, match=re.escape(reason)):
            chat_text(source, messages)
    assert chat_text(CHATML, [DEVELOPER, USER_TURN]) == "[system]Be brief.[user]Who?"
    assert chat_text(HARMONY, [DEVELOPER, USER_TURN]) == "[developer]Be brief.[user]Who?"
    assert chat_text(IN_PARTS, [USER_TURN, ANSWER]) == "[user]Who?[assistant]Tom."


def test_arguments_of_a_call_come_as_the_template_writes_them():
    """An object, JSON in a string, nothing; a content that is null, empty or missing; for tojson
    and for joined text. Where the template joins, the client's own string stands; special tokens
    that it spells by escapes stay text."""
    given = [{"name": "Tom"}, '{"name":"Tom"}', None, "", "missing"]
    for content in ({}, {"content": None}, {"content": ""}):
        texts = {CHATML: [], JOINED: []}
        for arguments in given:
            function = (
                {"name": "find"}
                if arguments == "missing"
                else {"name": "find", "arguments": arguments}
            )
            calling = CALLING | content | {"tool_calls": [CALL | {"function": function}]}
            for source, results in texts.items():
                results.append(chat_text(source, [USER_TURN, calling, RESULT]))
        bodies = ['{"name": "Tom"}', '{"name": "Tom"}', "{}", "{}", "{}"]
        assert texts[CHATML] == [f'[user]Who?[assistant]find{body}[tool]"a dog"' for body in bodies]
        bodies[1] = '{"name":"Tom"}'
        assert texts[JOINED] == [f"[user]Who?find:{body}[tool]a dog" for body in bodies]
    name, end = next(iter(tokenizer_of(CHATML).specials.items()))
    spelled = json.dumps({"a": name}).replace("<", "\\u003c")
    calling = CALLING | {
        "tool_calls": [CALL | {"function": {"name": "find", "arguments": spelled}}]
    }
    for source in (CHATML, JOINED):
        ids = tokenizer_of(source).chat([USER_TURN, calling])
        assert end not in ids and "find" in tokenizer_of(source).decode(ids)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_come_under_the_name_that_a_template_reads(key):
    from transformers.utils.chat_template_utils import render_jinja_template

    source = (
        LOOP
        + "{{ m.content }}{{ m.reasoning_content }}|{{ m.reasoning }}|{{ m.thinking }};{% endfor %}"
    )
    messages = [
        ANSWER | {key: "hm"},
        ANSWER | {key: "", "thinking": "b"},
        ANSWER | {key: None},
        ANSWER,
    ]
    filled = [
        {name: value for name, value in message.items() if value is not None}
        for message in messages
    ]
    (want,), _ = render_jinja_template([filled], chat_template=source)
    assert chat_text(source, messages) == want and want.count("hm") > 1


def test_variables_that_a_template_does_not_read_are_refused():
    source = (
        "{% set on = enable_thinking | default(true) %}{% if not date is defined %}{% set date ="
        " 'today' %}{% endif %}"
        "{% macro show(x) %}{{ x }}{{ ' ' + effort if effort is defined }}{% endmacro %}"
        "{{ show(messages[0].content) }} {{ date }} {{ on }}"
    )
    assert (
        chat_text(source, [USER_TURN], enable_thinking=False, date="now", effort="low")
        == "Who? low now False"
    )
    reason = (
        "chat_template_kwargs: the chat template does not read enable_thinkin; it reads date,"
        " effort, enable_thinking"
    )
    with pytest.raises(ValueError, match=reason):
        chat_text(source, [USER_TURN], enable_thinkin=False)
    with pytest.raises(ValueError, match="does not read x; it reads none"):
        chat_text("{{ messages[0].content }}", [USER_TURN], x=None)


@pytest.fixture(scope="module")
def chat_folder(text_folder, tmp_path_factory):
    import shutil

    folder = shutil.copytree(text_folder, tmp_path_factory.mktemp("chat") / "m")
    (folder / "chat_template.jinja").write_text(SOURCE)
    settings = {"add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_special_tokens_in_a_users_json_stay_text(chat_folder):
    """Nothing that a request brings may end a turn; neither may a prefill, nor a part of a list."""
    tokenizer = load_tokenizer(chat_folder)
    end = tokenizer.specials["</s>"]
    talk = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "a</s>"}, {"type": "text", "text": "b"}],
        }
    ]
    plain = tokenizer.chat([{"role": "user", "content": "x"}], tools=TOOLS)
    spelled = json.loads(json.dumps(TOOLS).replace("weather", "</s>"))
    ids = tokenizer.chat(talk, tools=spelled, prefill="</s>", other="</s>")
    assert ids.count(end) == plain.count(end) == 1
    assert tokenizer.decode(ids).endswith(
        "[assistant]</s></s>"
    ) and "[user]a</s>b" in tokenizer.decode(ids)


def test_requests_reach_the_template(chat_folder, capsys, tmp_path):
    """Flags for every line, and a line's own in their place."""
    talk, tokenizer = [{"role": "user", "content": "hi"}], load_tokenizer(chat_folder)
    lines = [
        {"messages": talk},
        {"messages": talk, "chat_template_kwargs": {"enable_thinking": True}},
        {"messages": talk, "tools": TOOLS, "prefill": "No"},
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            "prefill": "",
        },
    ]
    flags = [
        "--chat_template_kwargs",
        '{"enable_thinking": false}',
        "--prefill",
        "Yes",
        "--max_new_tokens",
        2,
    ]
    file = jsonl(tmp_path / "f.jsonl", *lines)
    rows = run(capsys, "--checkpoint", chat_folder, "--prompt_file", file, *flags)
    want = [
        tokenizer.chat(talk, prefill="Yes", enable_thinking=False),
        tokenizer.chat(talk, prefill="Yes", enable_thinking=True),
        tokenizer.chat(talk, prefill="No", tools=TOOLS, enable_thinking=False),
        tokenizer.chat(talk, enable_thinking=False),
    ]
    assert [row["prompt_tokens"] for row in rows] == want
    assert "<think></think>Yes" in tokenizer.decode(want[0]) and "<think>" not in tokenizer.decode(
        want[1]
    )


# ------------------------------------------------------------------------------ log-probabilities

PROMPTS = [[5, 9, 17], [40, 3, 99, 12, 7, 61, 20]]
DRAFTS = {
    "none": lambda model: None,
    "ngram": lambda model: NgramDraft(1),
    "layers": lambda model: ModelDraft(layer_subset(model, [0, 1]), on_layers=[0, 1]),
}


def decoded(model, sampling, **options):
    """Tokens of each row, and what was noted beside them."""
    engine, timing = Engine(model, 2, 80, speculate_k=3, **options), Timing()
    rows = [[], []]
    for row, id in generate(
        model,
        PROMPTS,
        sampling=sampling,
        max_new_tokens=[40, 25],
        seed=[3, 4],
        engine=engine,
        timing=timing,
    ):
        rows[row].append(id)
    return rows, [request.top_logprobs for request in timing.requests]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "sampling", [Sampling(0), Sampling(1.7, top_k=20, min_p=0.01)], ids=["greedy", "filtered"]
)
@pytest.mark.parametrize("draft", DRAFTS)
def test_log_probabilities_are_those_of_one_pass_over_the_text(draft, sampling, folder_of):
    """Before temperature, penalty and filters, at every token of every row: the first, drafted ones
    and the rest."""
    model = load_model(folder_of("llama-3"), dtype=torch.float32)
    sampling = dataclasses.replace(sampling, repetition_penalty=1.3, presence_penalty=0.5)
    rows, noted = decoded(model, sampling, logprobs=4, drafter=DRAFTS[draft](model))
    for prompt, row, found in zip(PROMPTS, rows, noted, strict=True):
        text = torch.tensor([prompt + row])
        log_p = (
            model(text, torch.arange(text.size(1)))[0, len(prompt) - 1 : -1]
            .double()
            .log_softmax(-1)
        )
        assert len(found) == len(row)
        for token, (chosen, *likeliest), want in zip(row, found, log_p, strict=True):
            assert chosen[0] == token and abs(chosen[1] - want[token]) < 1e-4
            top = want.topk(4)
            assert [id for id, _ in likeliest] == top.indices.tolist()
            assert all(
                abs(value - exact) < 1e-4 for (_, value), exact in zip(likeliest, top.values)
            )


@pytest.mark.one_in(3)
@pytest.mark.parametrize("draft", DRAFTS)
def test_log_probabilities_of_prompts_are_those_of_one_pass(draft, folder_of, monkeypatch):
    """In chunks of 4, full and begun, after a request that leaves the same text in the slot, beside
    one that decodes, and with parts of a chunk in the head."""
    monkeypatch.setattr(prompt_room, "PROMPT_LOGITS", 3 * 131)
    model = load_model(folder_of("llama-3"), dtype=torch.float32)
    engine = Engine(model, 2, 80, drafter=DRAFTS[draft](model), speculate_k=3)
    engine.runner.chunk = 4
    text = torch.randint(3, 131, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    exact = model(torch.tensor([text]), torch.arange(40))[0].log_softmax(-1)
    options = {"sampling": Sampling(0), "max_new_tokens": 3}
    other = engine.requests[engine.add_request(PROMPTS[0], sampling=Sampling(0), max_new_tokens=60)]
    for length in (40, 37, 36, 5, 4, 2, 1):
        id = engine.add_request(text[:length], prompt_logprobs=2, **options)
        request = engine.requests[id]
        while request.finish_reason is None:
            engine.step()
        assert request.num_reused == 0 and len(request.prompt_logprobs) == length - 1
        for record, next_id, want in zip(request.prompt_logprobs, text[1:], exact):
            top = want.topk(2)
            ids, log_ps = zip(*record)
            assert ids == (next_id, *top.indices.tolist())
            assert log_ps == pytest.approx((want[next_id].item(), *top.values.tolist()), abs=1e-4)
    assert len(other.tokens) > 20
    while engine.has_unfinished():
        engine.step()
    again = engine.add_request(text, **options)
    request = engine.requests[again]
    engine.step()
    assert not request.prompt_logprobs


def test_nothing_is_noted_where_nobody_asks(folder_of):
    model = load_model(folder_of("llama-3"), dtype=torch.float32)
    rows, noted = decoded(model, Sampling(0))
    assert noted == [[], []] and not hasattr(Engine(model, 1, 8).batch, "top_logprobs")
    assert decoded(model, Sampling(0), logprobs=0)[0] == rows


def test_ids_are_exact_and_impossible_tokens_have_no_number(text_folder, capsys):
    logits = torch.full((1, 1, 2**17), -torch.inf)
    logits[..., 2**17 - 1] = 0
    found = top_logprobs(logits, torch.tensor([[2**17 - 1]]), 2)
    assert found[0, 0, :2].tolist() == [[2**17 - 1, 0.0]] * 2
    flags = ("--checkpoint", text_folder, "--prompt", "the cat", "--max_new_tokens", 3)
    (row,) = run(capsys, *flags, "--logprobs", 2)
    assert [token[0]["id"] for token in row["logprobs"]] == row["tokens"]
    assert all(len(token) == 3 for token in row["logprobs"])
    (row,) = run(capsys, *flags)
    assert "logprobs" not in row
    with pytest.raises(ValueError, match="logprobs = 9999 is more than the 384 tokens"):
        run(capsys, *flags, "--logprobs", 9999)


# ---------------------------------------------------------------------------------------- penalty


@pytest.mark.one_in(3)
@pytest.mark.parametrize("draft", DRAFTS)
def test_a_penalised_text_is_transformers(draft, folder_of):
    """64 greedy tokens: earlier tokens count position by position, drafted or not."""
    model = load_model(folder_of("llama-3"), dtype=torch.float32)
    prompt = torch.tensor([PROMPTS[1]])
    options = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        want = oracle("llama-3").generate(prompt, repetition_penalty=1.5, **options)[0, 7:].tolist()
        other = oracle("llama-3").generate(prompt, **options)[0, 7:].tolist()
    engine = Engine(model, 1, 80, drafter=DRAFTS[draft](model), speculate_k=4)
    sampling = Sampling(0, repetition_penalty=1.5)
    got = [
        id
        for _, id in generate(
            model, [PROMPTS[1]], sampling=sampling, max_new_tokens=64, engine=engine
        )
    ]
    assert got == want != other


PENALTIES = [
    Sampling(repetition_penalty=1.4),
    Sampling(presence_penalty=0.7),
    Sampling(frequency_penalty=-0.3),
    Sampling(logit_bias=((3, 2.5), (11, -100.0))),
    Sampling(1.0, 5, 0.9, 0.1),
    Sampling(0, None, None, None, 0.8, 1.5, 0.25, ((7, 1.0), (8, -1.0))),
]


def test_each_position_of_a_round_has_its_own_penalty():
    """Six rows, each with another Sampling; scratch behind a position, of an earlier round, does
    not count."""
    generator, rows = torch.Generator().manual_seed(0), len(PENALTIES)
    tokens = torch.randint(0, 12, (rows, 9), generator=generator)
    logits = torch.randn(rows, 3, 12, generator=generator)
    pos, lengths = torch.tensor([[2, 3, 4], [5, 6, 7]] * 3), torch.tensor([1, 3] * 3)
    parts = [
        torch.stack([getattr(sampling, name) for sampling in PENALTIES])
        for name in ("values", "biases")
    ]
    result = penalize(logits, tokens, pos, lengths, *parts)
    for row, sampling in enumerate(PENALTIES):
        for i in range(3):
            text = tokens[row, : pos[row, i] + 1].tolist()
            assert torch.equal(
                result[row, i], naive_penalties(logits[row, i], text, int(lengths[row]), sampling)
            ), row
    assert torch.equal(result[4], logits[4])  # neutral


def test_the_repetition_penalty_is_transformers_processor():
    from transformers import RepetitionPenaltyLogitsProcessor

    generator = torch.Generator().manual_seed(1)
    tokens, logits = (
        torch.randint(0, 50, (4, 30), generator=generator),
        torch.randn(4, 50, generator=generator),
    )
    for penalty in (0.5, 1.3, 7.0):
        sampling = Sampling(repetition_penalty=penalty)
        values, biases = sampling.values.expand(4, -1), sampling.biases.expand(4, -1, -1)
        pos, lengths = torch.full((4, 1), 29), torch.tensor([1, 9, 20, 30])
        result = penalize(logits[:, None], tokens, pos, lengths, values, biases)[:, 0]
        assert torch.equal(result, RepetitionPenaltyLogitsProcessor(penalty)(tokens, logits))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("draft", DRAFTS)
def test_a_penalised_text_is_the_naive_one(draft, folder_of):
    """Greedy: one pass over the whole text for each token. Only output counts for presence and
    frequency."""
    model = load_model(folder_of("llama-3"), dtype=torch.float32)
    for sampling in (
        Sampling(0, presence_penalty=1.5, frequency_penalty=0.5),
        Sampling(0, logit_bias=((5, 2.0),)),
    ):
        texts = [list(prompt) for prompt in PROMPTS]
        for text, prompt in zip(texts, PROMPTS):
            for _ in range(30):
                logits = model(torch.tensor([text]), torch.arange(len(text)))[0, -1]
                text.append(int(naive_penalties(logits, text, len(prompt), sampling).argmax()))
        rows = texts_of(
            model, PROMPTS, [sampling] * 2, drafter=DRAFTS[draft](model), max_new_tokens=30
        )
        assert [prompt + row for prompt, row in zip(PROMPTS, rows)] == texts


MIXED = [
    Sampling(0),
    Sampling(0.9),
    Sampling(0.8, top_k=20),
    Sampling(0, repetition_penalty=1.3),
    Sampling(0, frequency_penalty=0.8, presence_penalty=-0.5),
    Sampling(1.1, top_p=0.9, repetition_penalty=0.9),
    Sampling(0.7, logit_bias=((5, 4.0), (9, -100.0))),
]


def texts_of(
    model, prompts, samplings, max_new_tokens: int = 40, timing=None, **options
) -> list[list[int]]:
    engine = options.pop("engine", None) or Engine(
        model, len(prompts), 80, speculate_k=3, **options
    )
    rows = [[] for _ in prompts]
    settings = {
        "seed": [3 + sum(prompt) for prompt in prompts],
        "max_new_tokens": max_new_tokens,
        "timing": timing,
    }
    for row, id in generate(model, prompts, sampling=samplings, engine=engine, **settings):
        rows[row].append(id)
    return rows


def mixed_prompts(n: int) -> list[list[int]]:
    return [[5, 9, 17, 5, 9, 3 + i][: 1 + i % 6] or [4] for i in range(n)]


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.attack
def test_a_mixed_batch_is_each_row_alone(draft, folder_of):
    """Greedy, plain, filtered and penalised rows; drafted greedy rows are also the plain ones."""
    model, prompts = (
        load_model(folder_of("llama-3"), dtype=torch.float32),
        mixed_prompts(len(MIXED)),
    )
    together = texts_of(model, prompts, MIXED, drafter=DRAFTS[draft](model))
    for prompt, sampling, row in zip(prompts, MIXED, together, strict=True):
        assert texts_of(model, [prompt], [sampling], drafter=DRAFTS[draft](model)) == [row], (
            sampling
        )
        if sampling.temperature == 0:
            assert texts_of(model, [prompt], [sampling]) == [row], sampling
        if sampling.path == "penalized":
            neutral = Sampling(sampling.temperature, sampling.top_k, sampling.top_p)
            assert texts_of(model, [prompt], [neutral], drafter=DRAFTS[draft](model)) != [row], (
                sampling
            )


@pytest.mark.compiled
@pytest.mark.long
@pytest.mark.parametrize("draft, logprobs", [("none", None), ("layers", 2)])
def test_penalties_come_and_go_without_compiling(draft, logprobs, folder_of):
    """Rows in changing company, with other values each time: all as alone and eager, and the same
    log-probabilities are recorded. Filters alone are left out: their code is part of the penalised
    kind's, and takes long to compile."""
    model = load_model(folder_of("llama-3"), dtype=torch.float32)
    samplings = [sampling for sampling in MIXED if sampling.path != "filtered"]
    prompts, timings = mixed_prompts(len(samplings)), [Timing(), Timing()]
    drafted = {"drafter": DRAFTS[draft](model), "logprobs": logprobs}
    eager = texts_of(model, prompts, samplings, timing=timings[0], **drafted)
    plain = texts_of(model, prompts, samplings)
    engine = Engine(model, 3, 80, speculate_k=3, compile=True, compile_prompts=False, **drafted)
    for kind in {sampling.path for sampling in samplings}:
        engine.warm_up(kind)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert texts_of(model, prompts, samplings, engine=engine, timing=timings[1]) == eager
        assert texts_of(model, prompts[::-1], samplings[::-1], engine=engine) == eager[::-1]
        for prompt, sampling, text, alone in zip(prompts, samplings, eager, plain):
            assert texts_of(model, [prompt], [sampling], engine=engine) == [text]
            assert sampling.temperature or text == alone
    if logprobs:
        for requests in zip(*(timing.requests for timing in timings), strict=True):
            # (n, 1 + logprobs, 2) of a row: ids and numbers
            here, there = (torch.tensor(request.top_logprobs) for request in requests)
            assert torch.equal(here[..., 0], there[..., 0]) and torch.allclose(
                here, there, atol=1e-4
            )


@pytest.mark.parametrize(
    "values",
    [
        {"repetition_penalty": 0},
        {"repetition_penalty": math.inf},
        {"presence_penalty": 2.1},
        {"frequency_penalty": -2.1},
        {"presence_penalty": math.nan},
        {"logit_bias": ((1, 101),)},
        {"logit_bias": ((1, math.nan),)},
        {"logit_bias": tuple((i, 1.0) for i in range(301))},
        {"temperature": 10**400},
        {"top_k": 10**400},
    ],
    ids=lambda values: next(iter(values)),
)
def test_penalties_out_of_range_are_refused(values):
    with pytest.raises(ValueError, match=next(iter(values))):
        Sampling(**values)


def test_a_bias_of_no_token_is_refused(folder_of):
    model = load_model(folder_of("llama-3"), dtype=torch.float32)
    with pytest.raises(
        ValueError, match="logit_bias holds token id 131, outside the vocabulary of 131"
    ):
        Engine(model, 1, 20).add_request(
            [5], sampling=Sampling(logit_bias=((131, 1.0),)), max_new_tokens=2
        )


def test_any_function_may_process_logits(folder_of):
    """A ban of the token two places before: with drafts the same text as without, and never that
    token."""

    def ban(logits, tokens, pos):
        return logits.scatter(2, tokens.gather(1, (pos - 1).clamp(min=0))[..., None], -torch.inf)

    model = load_model(folder_of("llama-3"), dtype=torch.float32)
    texts = [
        decoded(model, Sampling(0), logits_processor=ban, drafter=DRAFTS[draft](model))[0]
        for draft in DRAFTS
    ]
    assert texts[0] == texts[1] == texts[2] != decoded(model, Sampling(0))[0]
    for prompt, row in zip(PROMPTS, texts[0], strict=True):
        text = prompt + row
        assert all(text[i] != text[i - 2] for i in range(len(prompt), len(text)))


# ------------------------------------------------------------------------------ several at a time


def test_two_live_generators_share_an_engine(folder_of):
    """Interleaved, each equals itself alone."""
    model = load_model(folder_of("llama-3"), dtype=torch.float32)
    prompts, options = ([5, 6, 7], [9, 8]), {"sampling": Sampling(1.0), "max_new_tokens": 12}
    alone = [
        [id for _, id in generate(model, [prompt], seed=i, **options)]
        for i, prompt in enumerate(prompts)
    ]
    engine = Engine(model, 2, 32)
    live = [
        generate(model, [prompt], seed=i, engine=engine, **options)
        for i, prompt in enumerate(prompts)
    ]
    texts = [[], []]
    for _ in range(12):
        for text, tokens in zip(texts, live):
            text.append(next(tokens)[1])
    assert texts == alone and [next(tokens, None) for tokens in live] == [None, None]


def test_a_drafter_of_two_engines_is_refused(folder_of):
    model, drafter = load_model(folder_of("llama-3"), dtype=torch.float32), NgramDraft()
    first, _ = Engine(model, 1, 32, drafter=drafter), Engine(model, 1, 32, drafter=drafter)
    with pytest.raises(ValueError, match="the drafter belongs to an engine that was made later"):
        list(generate(model, [[5] * 8], sampling=Sampling(0), max_new_tokens=8, engine=first))


def test_a_grammar_of_ones_own_allows_its_tokens_alone(folder_of):
    """Ids at the ends of the masks' words, and the last one of the vocabulary."""
    model, ids = load_model(folder_of("llama-3"), dtype=torch.float32), [31, 0, 32, 63, 64, 130]

    class OneText:
        def masks(self, tokens, draft_tokens=()):
            word, bit = divmod(ids[len(tokens)], 32)
            mask = torch.zeros(1, 5, dtype=torch.int32)
            mask[0, word] = -(2**31) if bit == 31 else 1 << bit
            return mask

    engine = Engine(model, 1, 20)
    engine.add_request([5], sampling=Sampling(0), max_new_tokens=len(ids), grammar=OneText())
    events = []
    while engine.has_unfinished():
        events += engine.step()
    assert [id for _, id in events] == ids


@pytest.mark.parametrize("seed", [2**63, 2**64, -(2**63) - 1])
def test_a_seed_has_64_bits(folder_of, seed):
    model = load_model(folder_of("llama-3"), dtype=torch.float32)
    with pytest.raises(ValueError, match=r"seed = -?\d+ must lie between -2\^63 and 2\^63 - 1"):
        list(generate(model, [[5]], sampling=Sampling(0), max_new_tokens=2, seed=seed))


@pytest.mark.parametrize("seed", [2**63 - 1, -(2**63)])
def test_the_first_and_last_seed_draw_their_own_tokens(folder_of, seed):
    model = load_model(folder_of("llama-3"), dtype=torch.float32)
    options = {"sampling": Sampling(1.0), "max_new_tokens": 20}
    texts = [list(generate(model, [[5]], seed=s, **options)) for s in (seed, seed, 0)]
    assert texts[0] == texts[1] != texts[2]


# --------------------------------------------------------------------------------- rows that fail


def test_a_line_that_overflows_ends_alone(text_folder, tmp_path, capsys, monkeypatch):
    """One token's embedding is NaN: its line is named, the others say the same as alone, and the
    status is 2."""
    folder, tokenizer = (
        shutil.copytree(text_folder, tmp_path / "broken"),
        load_tokenizer(text_folder),
    )
    lines = ["the little cat", "a big dog", "red ball; it was fun.", "the park"]
    ids = [tokenizer.encode(line) for line in lines]
    (bad, *_) = {*ids[2]} - {*ids[0], *ids[1], *ids[3]}
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][bad] = math.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    file = tmp_path / "lines.jsonl"
    file.write_text(
        "".join(json.dumps({"prompt": line, "id": f"r{i}"}) + "\n" for i, line in enumerate(lines))
    )
    common = (
        "--checkpoint",
        folder,
        "--temperature",
        0,
        "--max_new_tokens",
        6,
        "--dtype",
        "float32",
        "--ignore_eos",
    )
    alone = [run(capsys, *common, "--prompt", lines[i])[0]["tokens"] for i in (0, 1, 3)]
    for size in (1, 4):
        flags = [
            *common,
            "--prompt_file",
            file,
            "--batch_size",
            size,
            "--json",
            "--ordered",
            "--device",
            "cpu",
        ]
        with pytest.raises(SystemExit) as exit:
            run_args(parse_args([*map(str, flags)]))
        out, err = capsys.readouterr()
        rows = [json.loads(line) for line in out.splitlines()]
        assert exit.value.code == 2 and [row["id"] for row in rows] == ["r0", "r1", "r3"]
        assert [row["tokens"] for row in rows] == alone
        (error,) = [line for line in err.splitlines() if line.startswith("error: ")]
        assert "line 3" in error and "r2" in error and "row 1" not in error


def test_an_overflow_in_float16_names_what_would_work(text_folder, tmp_path, capsys):
    folder = shutil.copytree(text_folder, tmp_path / "large")
    tensors = load_file(folder / "model.safetensors")
    for name in (
        "embed_tokens",
        "layers.0.mlp.gate_proj",
        "layers.0.mlp.up_proj",
        "layers.0.mlp.down_proj",
    ):
        tensors[f"model.{name}.weight"] *= 1000
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    common = ("--checkpoint", folder, "--prompt", "the", "--max_new_tokens", 2, "--temperature", 0)
    with pytest.raises(
        ValueError, match="not finite; float16 may have overflowed: try --dtype bfloat16 or float32"
    ):
        run(capsys, *common, "--dtype", "float16")
    assert len(run(capsys, *common, "--dtype", "float32")[0]["tokens"]) in (1, 2)


def test_json_lines_come_as_rows_end_or_in_order(text_folder, tmp_path, capsys):
    file = tmp_path / "lines.jsonl"
    asked = [("long", 30), ("short", 2), ("middle", 12)]
    file.write_text(
        "".join(
            json.dumps({"prompt": "the", "id": id, "max_new_tokens": n}) + "\n" for id, n in asked
        )
    )
    common = ("--checkpoint", text_folder, "--prompt_file", file, "--batch_size", 3, "--ignore_eos")
    assert [row["id"] for row in run(capsys, *common)] == ["short", "middle", "long"]
    assert [row["id"] for row in run(capsys, *common, "--ordered")] == ["long", "short", "middle"]
