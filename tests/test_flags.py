"""cli/flags.py: each flag fills the options that it names, and each program takes its own."""

from dataclasses import fields

import pytest
from conftest import ROOT

from cli.flags import FLAGS, given, parse_args
from cli.main import values_to_compare
from cli.options import Options
from scripts.compare import side_options
from scripts.serve.serve_flags import parse_args as server_options

DEMO = str(ROOT / "checkpoints" / "demo-draft")
# What many flags need beside them, and what those have that it would exclude.
MODELS = ["--quantize", "int4-g32", "--draft_checkpoint", DEMO]
BESIDE = [*MODELS, "--logprobs", "1", "--json", "--prompt_file", "-"]
OTHERS = ("PROMPT", "prompt", "prompt_file", "interactive", "json", "draft", "draft_checkpoint")
BESIDE_OTHERS = {"system": ["--interactive"], **{key: [] for key in OTHERS}}
VALUES = {  # by a flag's key, or by its metavar
    "tools": "[{}]",
    "chat_template_kwargs": '{"a": 1}',
    "device": "cpu",
    "CONFIG.json": "config.json",
    "FILE": "file",
    "N|auto": "2",
    "S": "2",
    "SCHEME": "int8",
    "SPEC": "ngram",
    "TEXT": "x",
}

# What is about generate.py's own prompts and output, and what else a request to a server brings.
OWN = "PROMPT prompt prompt_file interactive system prompt_cache num_samples"
OWN += " json output ordered report profile show_drafts"
OF_REQUEST = "logprobs tools prefill chat_template_kwargs"


def words_of(key: str) -> list[str]:
    """The flag with another value than its default."""
    flag = FLAGS[key]
    settings = flag.settings
    if settings.get("action") not in (None, "extend"):
        return [flag.name]
    value = VALUES.get(key) or VALUES.get(settings.get("metavar"), DEMO)
    if "choices" in settings:
        value = next(name for name in settings["choices"] if name != settings.get("default"))
    if settings.get("metavar") == "N":
        value = "0.5" if settings["type"] is float else "2"
    return [value] if key == "PROMPT" else [flag.name, value]


def groups(words: list[str]) -> dict[str, object]:
    options = parse_args(words)
    return {field.name: getattr(options, field.name) for field in fields(Options)}


@pytest.fixture(autouse=True)
def in_a_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("key", FLAGS)
def test_a_flag_fills_the_options_that_it_names(key):
    beside = ["--batch_size", "1", *BESIDE_OTHERS.get(key, BESIDE)]
    before = groups(beside)
    after = groups([*beside, *words_of(key)])
    changed = {type(value) for name, value in after.items() if value != before[name]} - {dict}
    assert changed == {FLAGS[key].fills}


@pytest.mark.parametrize("key", FLAGS)
def test_a_program_refuses_the_flags_that_it_does_not_take(key, capsys):
    words = words_of(key)
    beside = [] if key in ("draft", "draft_checkpoint") else MODELS
    side = " ".join(repr(word) for word in [*beside, *words])
    if key in (*OWN.split(), "logprobs"):
        with pytest.raises(Exception, match=rf"--a: {FLAGS[key].name} has no meaning here"):
            side_options("a", side, "prompts.txt")
    else:
        side_options("a", side, "prompts.txt")
    if key == "system":  # the server has its own
        assert server_options([*beside, *words]).system == words[1]
    elif key in (OWN + " " + OF_REQUEST).split():
        with pytest.raises(SystemExit):
            server_options([*beside, *words])
        assert f"{FLAGS[key].name} is about generate.py's own" in capsys.readouterr().err
    else:
        server_options([*beside, *words])


def test_a_flag_with_its_default_value_is_given():
    words = [
        "--num",
        "1",
        "--prompt",
        "Once upon a time",
        "--seed=0",
        "--prefill",
        "",
        "--stop",
        "x",
    ]
    found = [flag.key for flag in given(words)]
    assert sorted(found) == ["num_samples", "prefill", "prompt", "seed", "stop"]
    assert given([]) == [] and given(["x", "--no-compile"]) == [FLAGS["PROMPT"], FLAGS["compile"]]


def test_ranks_compare_no_paths(tmp_path):
    """On another machine the same folder may have another name; all else must be the same."""
    paths = []
    for name in ("a", "b"):
        (tmp_path / name).symlink_to(DEMO)
        words = ["--draft_checkpoint", name, "--checkpoint", name, "--output", f"{name}.jsonl"]
        paths.append(values_to_compare(parse_args([*words, "--prompt_file", f"{name}.txt"])))
    assert paths[0] == paths[1]
    for key in ("tools", "draft_quantize", "seed", "quantize_head"):
        beside = [*MODELS, "--prompt_file", "-"]
        before, after = (
            values_to_compare(parse_args(words)) for words in (beside, [*beside, *words_of(key)])
        )
        assert {name for name in before if before[name] != after[name]} == {f"--{key}"}
