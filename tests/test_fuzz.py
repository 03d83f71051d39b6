"""A folder of strangers is data: it loads, or it is refused with one line that names it; it runs
nothing, reads and writes nothing elsewhere, and ends in bounded time and memory. Each case here was
found by tests/attacks/fuzz.py."""

import base64
import json
import os
import shutil
import struct

import pytest
import torch

import loading.files as files
from loading.chat_templates import ChatTemplate
from loading.checkpoint import load_config, load_model
from loading.tokenizer import load_tokenizer
from tests.attacks import fuzz


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    (root := tmp_path_factory.mktemp("fuzz") / "good").mkdir()
    return fuzz.build(root)


@pytest.fixture
def folder(good, tmp_path):
    """A copy of one of the good folders."""
    return lambda name: shutil.copytree(good[name], tmp_path / name)


def edit(file, **changes) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def refusal(load, folder) -> str:
    """The one line with which a folder is refused."""
    with pytest.raises(ValueError) as error:
        load(folder)
    message = str(error.value)
    assert str(folder) in message and "\n" not in message and len(message) < fuzz.LONGEST_LINE
    return message


def test_good_folders_load(good):
    for folder in good.values():
        assert not any(fuzz.attempt(folder).values())


# ---------------------------------------------------------------------------- configs and weights

CONFIGS = {
    "a number beyond floats": ({"rms_norm_eps": 10**400}, "within float32's range"),
    "a number that float32 has not": ({"rope_theta": 1e308}, "within float32's range"),
    "heads of 2^48 rows": (
        {"num_attention_heads": 2**24, "num_key_value_heads": 1, "head_dim": 2**24},
        "do not fit",
    ),
    "a long list for a number": ({"hidden_size": [1] * 50_000}, "hidden_size = [1, 1"),
    "a scheme that is a list": (
        {"quantization": {"scheme": ["int8"]}},
        "quantization = {'scheme': ['int8']}",
    ),
    "a head that is an object": (
        {"quantization": {"scheme": "int8", "head": {}}},
        "quantization = ",
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configs(case, folder):
    changes, named = CONFIGS[case]
    broken = folder("sentencepiece")
    edit(broken / "config.json", **changes)
    assert named in refusal(load_model, broken)


def weights_of(folder) -> dict[str, torch.Tensor]:
    return {
        name: value for name, value in load_model(folder).state_dict().items() if not value.is_meta
    }


def test_a_block_of_more_rows_than_a_matrix_has(folder):
    """It costs no memory, and means what a block of 128 rows means to matrices of 128 rows at
    most."""
    blocks = folder("blocks")
    want = weights_of(blocks)
    settings = json.loads((blocks / "config.json").read_text())["quantization_config"]
    assert settings["weight_block_size"] == [128, 128]
    assert all(value.size(0) <= 128 for name, value in want.items() if ".layers." in name)
    edit(blocks / "config.json", quantization_config=settings | {"weight_block_size": [2**40, 128]})
    got = weights_of(blocks)
    assert want.keys() == got.keys() and all(torch.equal(want[name], got[name]) for name in want)


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "generation_config.json",
        "model.safetensors",
        "chat_template.jinja",
    ],
)
@pytest.mark.parametrize("how", ["pipe", "device", "4 GiB", "folder"])
def test_files_that_are_no_files(name, how, folder):
    """A pipe would be waited for, a device and a sparse file of 4 GiB fill the memory."""
    broken = folder("sentencepiece")
    file = broken / name
    file.unlink(missing_ok=True)
    if how == "pipe":
        os.mkfifo(file)
    elif how == "device":
        file.symlink_to("/dev/zero")
    elif how == "folder":
        file.mkdir()
    else:
        file.write_text("{}")
        os.truncate(file, 2**32)
    refusal(load_model if name in ("config.json", "model.safetensors") else load_tokenizer, broken)


@pytest.mark.parametrize(
    "name",
    [
        "a" * 300 + ".safetensors",
        "a" * 9000,
        "\0.safetensors",
        "\ud800.safetensors",
        "../x",
        {"a": [1] * 9000},
    ],
)
def test_names_in_the_index(name, folder):
    broken = folder("sharded")
    (broken / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"model.norm.weight": name}})
    )
    refusal(load_model, broken)


def test_a_tensors_name_may_be_anything(folder):
    broken = folder("sentencepiece")
    header, data = fuzz.read_safetensors(broken / "model.safetensors")
    for name in ("a\nb\x1b[31m", "y" * 10**6):
        header[name] = header.pop(sorted(header)[0])
    fuzz.write_safetensors(broken / "model.safetensors", json.dumps(header).encode(), data)
    assert "\x1b" not in refusal(load_model, broken)


def test_the_tied_name_of_a_file_that_cannot_be_mapped(folder, monkeypatch):
    def refuse(*_, **__):
        raise MemoryError("Cannot allocate memory (os error 12)")

    monkeypatch.setattr(files, "safe_open", refuse)
    assert "Cannot allocate memory" in refusal(load_model, folder("sentencepiece"))


SETTINGS = {
    "names that are numbers": {"added_tokens_decoder": {"9": {"content": 7, "special": True}}},
    "names that are no text": {"added_tokens_decoder": {"9": {"content": "\ud800"}}},
    "a template that nests too deeply": {
        "chat_template": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"
    },
}


@pytest.mark.parametrize("case", SETTINGS)
@pytest.mark.parametrize("name", ["sentencepiece", "tiktoken"])
def test_tokenizer_settings(case, name, folder):
    broken = folder(name)
    edit(broken / "tokenizer_config.json", **SETTINGS[case])
    refusal(load_tokenizer, broken)


@pytest.mark.parametrize("name", ["sentencepiece", "tiktoken", "tokenizers"])
def test_text_with_tokens_that_the_model_has_not(name, folder):
    broken = folder(name)
    edit(broken / "config.json", vocab_size=3)
    assert "vocabulary of 3" in refusal(lambda _: load_tokenizer(broken).encode("On"), broken)


@pytest.mark.parametrize("size", [True, False, 0, -1, -(10**58), "448", 2.5, None])
def test_vocabularies_of_no_size(size, folder):
    """The config is refused. A tokenizer without a model reads text as if it had no such key."""
    broken = folder("sentencepiece")
    want = load_tokenizer(broken).encode("On a day")
    edit(broken / "config.json", vocab_size=size)
    assert "config.json: vocab_size" in refusal(load_config, broken)
    assert load_tokenizer(broken).encode("On a day") == want


@pytest.mark.parametrize("ids", [[2**63], 10**30, [-1], -5])
def test_stop_ids_that_no_token_has(ids, folder):
    broken = folder("sentencepiece")
    edit(broken / "generation_config.json", eos_token_id=ids)
    assert "generation_config.json: eos_token_id" in refusal(load_tokenizer, broken)


def test_ranks_without_every_byte(folder):
    """tiktoken panics on text with such a byte."""
    broken = folder("tiktoken")
    tokens = [bytes([byte]) for byte in range(256) if byte != 0x65]
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    (broken / "tokenizer.model").write_text("\n".join(lines))
    tokenizer = load_tokenizer(broken)
    assert tokenizer.decode(tokenizer.encode("On a day")) == "On a day"
    assert "tiktoken cannot encode the text" in refusal(lambda _: tokenizer.encode("the"), broken)


def test_pieces_that_are_no_bytes(folder):
    """A token outside the byte alphabet, and one that only looks like a byte, are their own
    text."""
    broken = folder("tokenizers")
    value = json.loads((broken / "tokenizer.json").read_text())
    token = {
        "special": False,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
    }
    value["model"]["vocab"] |= {"日本": 440, "<0xZZ>": 441}
    (broken / "tokenizer.json").write_text(
        json.dumps(value | {"added_tokens": [{"id": 0, "content": "<s>", **token}]})
    )
    assert load_tokenizer(broken).decode([440, 441]) == "日本<0xZZ>"
    edit(broken / "tokenizer.json", decoder=None)
    assert load_tokenizer(broken).decode([441]) == "<0xZZ>"


def test_text_that_a_tokenizer_has_no_token_for(folder):
    broken = folder("tokenizers")
    edit(
        broken / "tokenizer.json",
        model={"type": "WordLevel", "unk_token": "none", "vocab": {"a": 0}},
        post_processor=None,
    )
    tokenizer = load_tokenizer(broken)
    refusal(lambda _: tokenizer.encode("zebra"), broken)


# -------------------------------------------------------------------------------------- templates

MESSAGES = [{"role": "user", "content": "hi"}]


def test_errors_of_a_template_are_one_line():
    """The sandbox keeps a template from Python's own objects."""
    assert (
        ChatTemplate("{{ messages[0].content }}{{ x }}", {"x": "!"}).render(MESSAGES, True) == "hi!"
    )
    for source in (
        "{{ messages.x.y }}",
        "{{ raise_exception('no\nno') }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
        "{{ 1 // 0 }}",
    ):
        with pytest.raises(ValueError, match="the chat template refused the messages: ") as error:
            ChatTemplate(source, {}).render(MESSAGES, True)
        message = str(error.value)
        assert "\n" not in message
        assert len(message) < fuzz.LONGEST_LINE
    template = ChatTemplate("{{ messages[0].content }}{{ '\\ud800' }}", {})
    assert template.render(MESSAGES, True) == "hi\ud800"


def test_lone_surrogates_that_a_template_writes(folder):
    broken = folder("sentencepiece")
    edit(broken / "tokenizer_config.json", chat_template="{{ messages[0].content }}{{ '\\ud800' }}")
    tokenizer = load_tokenizer(broken)
    assert tokenizer.decode(tokenizer.chat(MESSAGES)) == "hi?"


def test_a_yarn_of_extremes_is_finite_or_refused(folder):
    broken = folder("sentencepiece")
    for key, value in (
        ("beta_fast", 1e-320),
        ("beta_slow", 1e-29),
        ("factor", 1e29),
        ("beta_fast", 1e29),
    ):
        edit(broken / "config.json", rope_scaling=fuzz.HF["rope_scaling"] | {key: value})
        if value < 1e-30:
            assert key in refusal(load_config, broken)
        else:
            assert load_model(broken, dtype=torch.float32)(
                torch.arange(9)[None], torch.arange(9)
            ).shape == (
                1,
                9,
                fuzz.V,
            )


def test_a_header_length_that_is_not_there(folder):
    broken = folder("sentencepiece")
    for length in (0, 7, 2**40, 2**63, 2**64 - 1):
        (broken / "model.safetensors").write_bytes(struct.pack("<Q", length) + b"{}" * 50)
        refusal(load_model, broken)
