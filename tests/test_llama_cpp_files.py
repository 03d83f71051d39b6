"""llama.cpp's golden tokenizers, and the chat templates that it collects, with the calls in them.

Both lie in the source package of llama_cpp_python (never committed): vocabularies as GGUF files
beside texts (.inp) and llama.cpp's ids of them (.out), and the templates of 70 models. What a
template writes is decided by transformers.
"""

import json
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT

from loading.chat_templates import ChatTemplate
from loading.gguf_vocabulary import ADDS_BOS, IGNORES_MERGES, SPLITS
from loading.tokenizer import load_tokenizer

PACKAGE = "llama_cpp_python-0.3.36"
FILE = ROOT / "build" / f"{PACKAGE}.tar.gz"
DOWNLOAD = (
    "pip download --no-deps --no-binary llama_cpp_python --dest build llama_cpp_python==0.3.36"
)
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not FILE.exists(), reason=f"no files of llama.cpp here: {DOWNLOAD}"),
]

VOCABULARIES = [
    "command-r",
    "deepseek-coder",
    "deepseek-llm",
    "gpt-2",
    "llama-bpe",
    "llama-spm",
    "mpt",
    "phi-3",
    "qwen2",
    "refact",
    "starcoder",
]
# What the other vocabularies name, and whose it is. No model of these architectures runs here.
REFUSED = {
    "bert-bge": "tokenizer.ggml.model = 'bert'",  # WordPiece of an encoder
    "falcon": "tokenizer.ggml.pre = 'falcon'",
    "gemma-4": "tokenizer.ggml.model = 'gemma4'",  # BPE over sentencepiece's marks
    "qwen35": "tokenizer.ggml.pre = 'qwen35'",  # linear attention
}
SEPARATOR = b"\n__ggml_vocab_test__\n"


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def system(text: str) -> dict:
    return {"role": "system", "content": text}


def assistant(text: str, **others) -> dict:
    return {"role": "assistant", "content": text, **others}


def call(id: str, name: str, **arguments) -> dict:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(id: str, name: str, text: str) -> dict:
    return {"role": "tool", "tool_call_id": id, "name": name, "content": text}


def tool(name: str, description: str, **types: str) -> dict:
    properties = {
        key: {"type": value, "description": f"{key} of it"} for key, value in types.items()
    }
    schema = {"type": "object", "properties": properties, "required": list(types)}
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


WEATHER = tool("weather", "The weather of a city.", city="string", days="integer")
ADD = tool("add", "Adds two numbers.", a="number", b="number")
IN_ZURICH = call("abcdefgh1", "weather", city="Zürich", days=2)
SUM = call("abcdefgh2", "add", a=1, b=2.5)

CONVERSATIONS = {
    "one message": {"messages": [user("Hi!")]},
    "a system message": {"messages": [system("You are terse."), user("Hi!")]},
    "spaces and marks": {
        "messages": [
            system("  Be\n\nkind. "),
            user("\n  def f(x):\n\treturn {{ x }}\n"),
            assistant(" été 日本 🎉 "),
            user('<what> is "12345"? {% raw %}\n\n'),
        ],
    },
    "a thought in the text": {
        "messages": [user("2+2?"), assistant("<think>\nIt is four.\n</think>\n\n4"), user("3+3?")],
    },
    "a thought beside it": {
        "messages": [user("2+2?"), assistant("4", reasoning_content="It is four."), user("3+3?")],
    },
    "tools": {"messages": [system("Use tools."), user("Weather?")], "tools": [WEATHER, ADD]},
    "a call": {
        "messages": [
            user("Weather in Zürich & <Rome>?"),
            assistant("", tool_calls=[IN_ZURICH]),
            result("abcdefgh1", "weather", '{"sky": "blue"}'),
        ],
        "tools": [WEATHER],
    },
    "two calls": {
        "messages": [
            system("Use tools."),
            user("Weather, and a sum?"),
            assistant("Both.", tool_calls=[IN_ZURICH, SUM]),
            result("abcdefgh1", "weather", "blue"),
            result("abcdefgh2", "add", "3.5"),
            assistant("Blue, and 3.5."),
            user("Thanks"),
        ],
        "tools": [WEATHER, ADD],
    },
    "variables": {"messages": [user("Hi!")], "enable_thinking": False, "reasoning_effort": "low"},
    "an answer at the end": {
        "messages": [user("Hi!"), assistant("Hello.")],
        "add_generation_prompt": False,
    },
}
# Templates that raise an error, of 70: four serve conversations with tools alone, one knows no
# system message.
REFUSALS = {"a system message": 5, "spaces and marks": 5, "tools": 3, "a call": 6, "two calls": 9}
# Templates that leave out a part of the conversation, which transformers does not notice and we
# refuse.
LOSSES = {"tools": 6, "a call": 9, "two calls": 20, "variables": 1}
VARIABLES = ("tools", "enable_thinking", "reasoning_effort")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """llama.cpp's folder of vocabularies and templates."""
    folder = tmp_path_factory.mktemp("llama.cpp")
    inside = f"{PACKAGE}/vendor/llama.cpp/models/"
    with tarfile.open(FILE) as archive:
        members = [member for member in archive if member.name.startswith(inside)]
        archive.extractall(folder, members, filter="data")
    return folder / inside


@pytest.fixture(scope="module")
def tokenizer(models):
    """A byte-level vocabulary: its ids of a text always decode to that text."""
    return load_tokenizer(models / "ggml-vocab-gpt-2.gguf")


@pytest.mark.parametrize("name", VOCABULARIES)
def test_ids_of_golden_texts(name, models):
    file = models / f"ggml-vocab-{name}.gguf"
    texts = file.with_suffix(".gguf.inp").read_bytes().split(SEPARATOR)
    lines = file.with_suffix(".gguf.out").read_text().split("\n")
    expected = [[int(id) for id in line.split()] for line in lines]
    tokenizer = load_tokenizer(file)
    assert len(texts) == 47
    assert [tokenizer.encode(text.decode(), bos=False) for text in texts] == expected


def test_other_golden_vocabularies_are_refused_by_what_they_name(models):
    """A vocabulary that came with a later package would be named here."""
    known = {*REFUSED, *(getattr(entry, "values", [entry])[0] for entry in VOCABULARIES)}
    names = {file.name.removesuffix(".gguf.inp") for file in models.glob("*.gguf.inp")}
    assert names == {f"ggml-vocab-{name}" for name in known}
    for name, setting in REFUSED.items():
        with pytest.raises(ValueError) as refusal:
            load_tokenizer(models / f"ggml-vocab-{name}.gguf")
        assert setting in str(refusal.value), name


def table_of_splits() -> dict[str, tuple[tuple[str, ...], bool, bool]]:
    """llama-vocab.cpp's tokenizer.ggml.pre -> (patterns, puts BOS first, leaves words that are
    tokens unmerged)."""
    with tarfile.open(FILE) as archive:
        name = f"{PACKAGE}/vendor/llama.cpp/src/llama-vocab.cpp"
        code = re.sub(r"^ *//.*", "", archive.extractfile(name).read().decode(), flags=re.M)
    patterns = {}
    begin = code.index("switch (vocab.get_pre_type())")
    for cases in code[begin : code.index("byte_encode = true")].split("break;"):
        literals = re.findall(r'^ *"((?:[^"\\]|\\.)*)"', cases, flags=re.M)
        values = tuple(literal.replace("\\\\", "\\") for literal in literals)
        if "byte_encode = false" not in cases:
            patterns |= dict.fromkeys(
                re.findall(r"case LLAMA_VOCAB_PRE_TYPE_(\w+):", cases), values
            )
    table = {}
    begin = code.index('tokenizer_pre == "default"')
    for branch in code[begin : code.index("unknown pre-tokenizer type")].split("else if"):
        pre_type = re.search(r"pre_type = LLAMA_VOCAB_PRE_TYPE_(\w+)", branch)
        row = (
            patterns.get(pre_type[1]) if pre_type else None,
            "add_bos = true" in branch,
            "ignore_merges = true" in branch,
        )
        table |= dict.fromkeys(re.findall(r'tokenizer_pre == "([^"]+)"', branch), row)
    return table


def test_vocabularies_have_every_name_that_llama_cpp_has_for_their_split():
    table = table_of_splits()
    assert len(table) > 80
    assert SPLITS.keys() <= table.keys()
    here = {table[name][0] for name in SPLITS}
    assert {name for name, (patterns, *_) in table.items() if patterns in here} == SPLITS.keys()
    assert set(ADDS_BOS) == {name for name in SPLITS if table[name][1]}
    assert set(IGNORES_MERGES) == {name for name in SPLITS if table[name][2]}
    for split in set(SPLITS.values()):  # one split of ours is one of theirs
        assert len({table[name][0] for name in SPLITS if SPLITS[name] == split}) == 1


def rendered(source: str, messages: list[dict], **conversation) -> str | None:
    """What transformers makes of a template; None where the template raises an error."""
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        texts, _ = render_jinja_template([messages], chat_template=source, **conversation)
    except Exception:  # whatever its jinja code raises
        return None
    return texts[0]


def without_a_part(messages: list[dict], conversation: dict) -> Iterator[tuple[list[dict], dict]]:
    """The conversation without one of its variables, its calls, or a text beside them."""
    for name in VARIABLES:
        yield messages, {key: value for key, value in conversation.items() if key != name}
    calls_left_out = [
        {key: x for key, x in message.items() if key != "tool_calls"} for message in messages
    ]
    yield calls_left_out, conversation
    yield (
        [message | {"content": ""} if "tool_calls" in message else message for message in messages],
        conversation,
    )


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_templates_write_what_they_write_in_transformers(name, models, tokenizer):
    """A template may refuse a conversation, such as one without tools; transformers raises an error
    then. We refuse one of which the template leaves out a part, such as a variable that it does not
    read; the oracle then writes the same without that part."""
    conversation = {"add_generation_prompt": True, "tools": None, **CONVERSATIONS[name]}
    messages = conversation.pop("messages")
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    files = sorted((models / "templates").glob("*.jinja"))
    texts = {}
    expected = {}
    num_losses = 0
    for file in files:
        source = file.read_text()
        unread = [name for name in VARIABLES if name != "tools" and name not in source]
        settings = {key: value for key, value in conversation.items() if key not in unread}
        text = rendered(source, messages, **settings, **names)
        if text is None:
            continue
        tokenizer.template = ChatTemplate(source, names)
        try:
            ids = tokenizer.chat(messages, **settings)
        except ValueError as refusal:
            assert re.search("leaves out|does not mention tools|does not read", str(refusal))
            shorter = without_a_part(messages, settings)
            assert any(rendered(source, part, **rest, **names) == text for part, rest in shorter), (
                refusal
            )
            num_losses += 1
            continue
        expected[file.stem] = text
        texts[file.stem] = tokenizer.decode(ids)
    assert texts == expected
    assert len(files) == 70
    assert num_losses == LOSSES.get(name, 0)
    assert len(expected) == 70 - REFUSALS.get(name, 4) - num_losses


# By a word of their names, the templates whose calls the server reads, and the family of these.
FAMILIES = {
    "Hermes and Qwen": (
        *("Bielik", "MiMo-VL", "Hermes-2-Pro", "Hermes-3", "QwQ", "Qwen2.5", "Qwen3-0.6B"),
        *("Reka", "granite-4.0", "granite-4.1"),
    ),
    "Llama 3": ("Llama-3.1-8B-Instruct", "Llama-3.2", "Llama-3.3"),
    "Mistral": ("Mistral-Nemo",),
    "Mistral since 2025": ("Mistral-Small-3.2", "Ministral-3", "Devstral"),
    "gpt-oss": ("gpt-oss",),
    "Qwen3-Coder": (
        *("ByteDance-Seed-OSS", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "Qwen3-Coder"),
        *("Qwen3.5-4B", "StepFun3.5-Flash"),
    ),
    "GLM-4.5": (
        *("GLM-4.6", "GLM-4.7-Flash", "Spark2.5", "inclusionai-ling-3.0-flash"),
        *("poolside-Laguna-S-2.1", "poolside-Laguna-XS-2.1", "poolside-Laguna-XS.2"),
    ),
    "MiniMax-M2": ("MiniMax-M2",),
}


def test_the_server_reads_the_calls_that_templates_write(models):
    """The call of an answer, as transformers renders it, comes back; the server refuses tools for
    all other templates."""
    from decoding.sampling import Sampling
    from scripts.serve.message_form import MessageForm
    from scripts.serve.openai_form import Refusal, read_request

    words = {word: family for family, words in FAMILIES.items() for word in words}
    body = {"messages": [user("Weather?")], "tools": [WEATHER]}
    request = read_request(body, True, "m", Sampling())
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    families = {}
    for file in sorted((models / "templates").glob("*.jinja")):
        source = file.read_text()
        try:
            tokenizer = SimpleNamespace(template=ChatTemplate(source, names), specials={})
            form = MessageForm(request, tokenizer)
        except Refusal:
            continue
        question = [user("Weather?")]
        conversation = [*question, assistant("", tool_calls=[IN_ZURICH | {"id": "abcdefgh1"}])]
        text = rendered(source, conversation, tools=[WEATHER], add_generation_prompt=False, **names)
        prompt = rendered(source, question, tools=[WEATHER], add_generation_prompt=True, **names)
        if not text.startswith(prompt):  # the prompt opens the thoughts, which the call is without
            prompt = prompt.removesuffix("<think>\n")
        deltas = form.parser().feed([text.removeprefix(prompt)], is_last=True)
        calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
        assert [call["name"] for call in calls if "name" in call] == ["weather"]
        arguments = "".join(call.get("arguments", "") for call in calls)
        assert json.loads(arguments) == {"city": "Zürich", "days": 2}
        word = max((word for word in words if word in file.stem), key=len, default=file.stem)
        families[word] = form.calls.family
    assert families == words
