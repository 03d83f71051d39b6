"""What is wrong with a folder or a request is said in one line: `error: …` with the culprit's name,
exit status 2, no traceback, in bounded time and memory, with nothing on stdout. A bug, also one
that is a plain ValueError, keeps its traceback."""

import json
import os
import resource
import shutil
import struct
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT, config_json
from safetensors.torch import load_file, save_file

import loading.target as target_room
from cli.flags import parse_args
from cli.start import answer_flags, main
from decoding.errors import UserError
from generate import LLM
from loading.checkpoint import load_model
from loading.models import pick_dtype


def edit_config(folder, **changes) -> None:
    (folder / "config.json").write_text(json.dumps(config_json(folder) | changes))


def edit_tokenizer_config(folder, **changes) -> None:
    file = folder / "tokenizer_config.json"
    values = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(values | changes))


def edit_tensors(folder, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def raw_safetensors(header: bytes, length: int | None = None, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def one_tensor(shape, end) -> bytes:
    return json.dumps(
        {"model.norm.weight": {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}}
    ).encode()


def write_index(folder, names) -> None:
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 14500438\n"


def weights(folder, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)


FOLDERS = {  # what is done to a good folder; what the line must name
    "folder is missing": (shutil.rmtree, "no such folder"),
    "config is missing": (lambda f: (f / "config.json").unlink(), "config.json: no such file"),
    "config is cut off": (
        lambda f: os.truncate(f / "config.json", 40),
        "config.json: not readable as JSON",
    ),
    "config is not text": (
        lambda f: (f / "config.json").write_bytes(b"\xff\xfe{}"),
        "config.json: not readable",
    ),
    "config nests deeply": (
        lambda f: (f / "config.json").write_text("[" * 100_000),
        "config.json: not readable",
    ),
    "architecture": (lambda f: edit_config(f, model_type="mamba"), "model_type = 'mamba'"),
    "rope type": (
        lambda f: edit_config(f, rope_parameters={"rope_type": "dynamic", "factor": 2}),
        "'dynamic'",
    ),
    "activation": (lambda f: edit_config(f, hidden_act="relu"), "hidden_act = 'relu'"),
    "vocabulary of 2^40": (
        lambda f: edit_config(f, vocab_size=2**40),
        "vocab_size = 1099511627776",
    ),
    "4096 layers": (lambda f: edit_config(f, num_hidden_layers=4096), "missing: model.layers.1"),
    "wide layers": (lambda f: edit_config(f, intermediate_size=2**24), "instead of [16777216, 64]"),
    "weights are missing": (
        lambda f: (f / "model.safetensors").unlink(),
        "neither model.safetensors nor",
    ),
    "weights are a pickle": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        "is a pickle",
    ),
    "weights are cut off": (
        lambda f: os.truncate(f / "model.safetensors", 50_000),
        "not a readable safetensors",
    ),
    "weights are empty": (lambda f: weights(f, b""), "not a readable safetensors"),
    "header is garbage": (
        lambda f: weights(f, raw_safetensors(b"{]")),
        "not a readable safetensors",
    ),
    "header claims 2^60 bytes": (
        lambda f: weights(f, raw_safetensors(b"{}", 2**60)),
        "not a readable safetensors",
    ),
    "tensor claims more than there is": (
        lambda f: weights(f, raw_safetensors(one_tensor([10**9], 4 * 10**9), data=b"\0" * 8)),
        "not a readable safetensors",
    ),
    "tensor's shape and bytes differ": (
        lambda f: weights(f, raw_safetensors(one_tensor([64], 8), data=b"\0" * 8)),
        "not a readable safetensors",
    ),
    "weights are a Git LFS pointer": (
        lambda f: weights(f, LFS_POINTER),
        "model.safetensors: not a readable safetensors file: a Git LFS pointer",
    ),
    "tokenizer is a Git LFS pointer": (
        lambda f: (f / "tokenizer.model").write_bytes(LFS_POINTER),
        "tokenizer.model: a Git LFS pointer",
    ),
    "shard is missing": (
        lambda f: write_index(f, {"a": "x.safetensors"}),
        "x.safetensors: not a readable safetensors file: No such file",
    ),
    "index names a pickle": (
        lambda f: write_index(f, {"a": "x.bin"}),
        "x.bin: not a readable safetensors",
    ),
    "index is no object": (lambda f: write_index(f, ["x.safetensors"]), "weight_map"),
    "tensor is missing": (
        lambda f: edit_tensors(f, lambda t: t.pop("model.norm.weight")),
        "missing: model.norm",
    ),
    "tensor is extra": (
        lambda f: edit_tensors(f, lambda t: t.update(x=torch.ones(1))),
        "unexpected: x",
    ),
    "tensor is misshapen": (
        lambda f: edit_tensors(f, lambda t: t.update({"model.norm.weight": torch.ones(65)})),
        "misshapen: model.norm.weight",
    ),
    "tokenizer is missing": (
        lambda f: (f / "tokenizer.model").unlink(),
        "neither tokenizer.model nor tokenizer.json",
    ),
    "tokenizer is cut off": (
        lambda f: os.truncate(f / "tokenizer.model", 100),
        "not a sentencepiece model",
    ),
    "tokenizer is too large": (
        lambda f: edit_tensors(f, shrink_vocabulary) or edit_config(f, vocab_size=300),
        "300",
    ),
    "tokenizer_config is broken": (
        lambda f: (f / "tokenizer_config.json").write_text("{"),
        "tokenizer_config.json",
    ),
    "an added token without an id": (
        lambda f: edit_tokenizer_config(f, added_tokens_decoder={"x": {"content": "a"}}),
        "tokenizer_config.json: added_tokens_decoder must have",
    ),
    "an added token without a name": (
        lambda f: edit_tokenizer_config(f, bos_token={"content": 5}),
        "tokenizer_config.json or special_tokens_map.json: {'content': 5} is no token",
    ),
    "an older added token without an id": (
        lambda f: (f / "added_tokens.json").write_text('{"<a>": "1"}'),
        "added_tokens.json: '<a>' = '1' is no token's id",
    ),
    "template is no text": (
        lambda f: edit_tokenizer_config(f, chat_template=5),
        "tokenizer_config.json: the chat template is no text, but 5",
    ),
    "templates have no names": (
        lambda f: edit_tokenizer_config(f, chat_template=["a"]),
        "tokenizer_config.json: chat_template must be a text, or named templates",
    ),
    "template is not UTF-8": (
        lambda f: (f / "chat_template.jinja").write_bytes(b"\xff"),
        "chat_template.jinja: not UTF-8 text",
    ),
    "template is not jinja": (
        lambda f: (f / "chat_template.jinja").write_text("{{ " + 5000 * "9" + " }}"),
        "chat_template.jinja: the chat template is broken",
    ),
    "logits are NaN": (
        lambda f: edit_tensors(f, lambda t: t["model.norm.weight"].fill_(torch.nan)),
        "not finite",
    ),
}


def shrink_vocabulary(tensors) -> None:
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:300].contiguous()


def run_main(monkeypatch, capsys, *arguments: str) -> tuple[int, str, list[str]]:
    """(exit status, stdout, the error lines) of the program in this process."""
    monkeypatch.setattr(sys, "argv", ["generate.py", "--device", "cpu", *arguments])
    with pytest.raises(SystemExit) as exit:
        main()
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return exit.value.code, out, [line for line in err.splitlines() if line.startswith("error: ")]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.attack) if case == "4096 layers" else case
        for case in FOLDERS
    ],
)
def test_a_broken_folder_is_one_line(text_folder, tmp_path, monkeypatch, capsys, case):
    break_it, names = FOLDERS[case]
    folder = shutil.copytree(text_folder, tmp_path / "model")
    break_it(folder)
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    status, out, lines = run_main(
        monkeypatch, capsys, "--checkpoint", str(folder), "--max_new_tokens", "4"
    )
    assert status == 2 and out.strip() == "" and len(lines) == 1 and names in lines[0], lines
    assert time.perf_counter() - start < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # kilobytes


def test_symlinks_inside_the_folder_are_followed(text_folder, tmp_path):
    """A hub cache is made of them."""
    for file in text_folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    assert load_model(tmp_path).config == load_model(text_folder).config


def test_a_dtype_that_the_device_lacks_is_said(text_folder, monkeypatch, capsys):
    def refuse(*_):
        raise RuntimeError("no bfloat16 here\nmore")

    monkeypatch.setattr(torch, "mm", refuse)
    status, _, lines = run_main(
        monkeypatch, capsys, "--checkpoint", str(text_folder), "--dtype", "bfloat16"
    )
    assert status == 2 and lines == [
        "error: --dtype bfloat16: cpu cannot compute in it (no bfloat16 here); try --dtype float32"
    ]


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16", "float64", None])
def test_without_the_flag_the_dtype_is_the_stored_one(stored):
    """Where we compute in it. Types that config.json names and we do not compute in become
    bfloat16."""
    want = torch.bfloat16 if stored in ("float64", None) else getattr(torch, stored)
    assert pick_dtype(None, stored, torch.device("cpu")) == want
    assert pick_dtype("float16", stored, torch.device("cpu")) == torch.float16


def test_running_out_of_memory_is_said(text_folder, monkeypatch, capsys):
    def refuse(*_, **__):
        raise torch.OutOfMemoryError("tried to allocate 3 TiB")

    monkeypatch.setattr(target_room, "load_model", refuse)
    status, _, lines = run_main(monkeypatch, capsys, "--checkpoint", str(text_folder))
    assert status == 2 and lines == ["error: tried to allocate 3 TiB"]


FLAGS = {  # what is wrong without a look at any weight; what the line must name
    "kind of draft": (
        ["--draft", "foo"],
        "--draft foo: expected suffix[:N], ngram[:N], layers:0-7,24-31, window:N,",
    ),
    "tokens to match": (
        ["--draft", "ngram:0"],
        "--draft ngram:0: '0' is no number of tokens to match; it must be at least 1",
    ),
    "scheme of a draft": (["--draft", "quantized:int3"], "int3"),
    "keys of a draft": (["--draft", "window:0"], "--draft window:0: '0' is no number of keys"),
    "keys of a quantized draft": (["--draft", "quantized:int8,window:"], "'' is no number of keys"),
    "a draft's tokens to match that are no number": (["--draft", "ngram:x"], "--draft ngram:x"),
    "empty layers of a draft": (["--draft", "layers:2-1"], "layers:2-1: '2-1' is no layer"),
    "two drafts": (["--draft", "ngram", "--draft_checkpoint", "x"], "not allowed with"),
    "a negative K": (
        ["--draft", "ngram", "--speculate_k", "-1"],
        "--speculate_k: -1 must be a number",
    ),
    "K": (["--draft", "ngram", "--speculate_k", "many"], "--speculate_k: many"),
    "K without a draft": (["--speculate_k", "3"], "--speculate_k and --show_drafts need"),
    "marks without a draft": (["--show_drafts"], "--speculate_k and --show_drafts need"),
    "a scheme without a draft": (
        ["--draft_quantize", "int8"],
        "--draft_quantize needs --draft_checkpoint",
    ),
    "layers of a draft": (
        ["--draft", "layers:0-7"],
        "--draft layers:0-7: '0-7' is no layer or range of layers of 0 to",
    ),
    "folder of a draft": (["--draft_checkpoint", "nowhere"], "nowhere: no such folder"),
    "new tokens": (["--max_new_tokens", "0"], "--max_new_tokens 0 must be at least 1"),
    "positions": (
        ["--max_seq_length", "161"],
        "--max_seq_length 161 must lie between 2 and the model's 160",
    ),
    "no positions": (["--max_seq_length", "-1"], "--max_seq_length -1 must lie between 2"),
    "one position": (["--max_seq_length", "1"], "--max_seq_length 1 must lie between 2"),
    "more tokens to match than a number holds": (
        ["--draft", f"suffix:{5000 * '9'}"],
        "is no number of tokens to match",
    ),
    "a misspelt folder": (["--draft", "./modle"], "a folder belongs to --draft_checkpoint"),
    "tokens to match in another script": (
        ["--draft", "suffix:\u00b2"],
        "'\u00b2' is no number of tokens to match",
    ),
    "seed": (["--seed", "-5"], "--seed -5 must lie between 0 and 2^62, or be -1"),
    "a long seed": (["--seed", 20 * "9"], f"--seed {20 * '9'}"),
    "temperature": (["--temperature", "-1"], "temperature = -1.0"),
    "a small temperature": (["--temperature", "1e-50"], "temperature = 1e-50"),
    "no mass": (["--top_p", "0"], "top_p = 0.0"),
    "checkpoint": (["--checkpoint", "nowhere"], "nowhere: no such folder"),
    "a shape": (["--random_weights", "nowhere.json"], "nowhere.json: no such file"),
    "dtype": (["--dtype", "int3"], "--dtype"),
    "rows": (["--batch_size", "0"], "--batch_size"),
    "threads": (["--threads", "40000"], "--threads 40000: at most 1024"),
    "an unknown flag": (["--no_such_flag"], "--no_such_flag"),
    "two prompts": (["--prompt", "a", "--prompt_file", "b"], "not allowed with"),
    "an empty file of prompts": (["--prompt_file", "/dev/null"], "/dev/null: holds no prompt"),
    "a trace": (["--profile", "/nowhere/trace.json"], "--profile /nowhere/trace.json"),
    "a chat in JSON": (["--interactive", "--json"], "--interactive"),
    "a system message": (["--system", "x"], "--system needs --interactive"),
    "a GPU": (["--device", "cuda:77"], "--device cuda:77"),
    "meta": (["--device", "meta"], "--device meta"),
    "sampling": (["--top_p", "2"], "top_p = 2.0 must lie in (0, 1]"),
    "scheme": (["--quantize", "int3"], "quantization scheme 'int3' does not exist"),
    "device": (["--device", "tpu9"], "--device tpu9: not available here"),
    "prompt": (["--prompt", ""], "--prompt is empty"),
    "file of prompts": (["--prompt_file", "nowhere"], "nowhere: [Errno 2] No such file"),
    "log-probabilities": (
        ["--json", "--logprobs", "385"],
        "logprobs = 385 is more than the 384 tokens",
    ),
}


@pytest.mark.parametrize("case", FLAGS)
def test_wrong_flags_are_refused_before_weights_are_read(text_folder, monkeypatch, capsys, case):
    """A large model takes a minute to load."""
    flags, message = FLAGS[case]
    monkeypatch.setattr(
        target_room, "load_model", lambda *_, **__: pytest.fail("weights were read")
    )
    status, out, lines = run_main(monkeypatch, capsys, "--checkpoint", str(text_folder), *flags)
    assert status == 2 and not out and len(lines) == 1 and message in lines[0], lines


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--max_new_tokens", "5000"], "5000 new ones"),
        (["--prompt", "cat " * 300], "over the limit of 160"),
    ],
)
def test_a_prompt_that_does_not_fit_is_one_line(text_folder, monkeypatch, capsys, flags, message):
    status, out, lines = run_main(monkeypatch, capsys, "--checkpoint", str(text_folder), *flags)
    assert status == 2 and not out and len(lines) == 1 and message in lines[0], lines


@pytest.mark.parametrize(
    "key", ["medusa_num_heads", "pard_token", "dflash_config", "draft_vocab_size"]
)
def test_the_refusal_of_a_draft_names_its_file_once(
    text_folder, tmp_path, monkeypatch, capsys, key
):
    """A loader puts the path in front of messages that begin with config.json."""
    folder = shutil.copytree(text_folder, tmp_path / "draft")
    edit_config(folder, **{key: -1})
    flags = ["--checkpoint", str(text_folder), "--draft_checkpoint", str(folder)]
    status, out, (line,) = run_main(monkeypatch, capsys, *flags)
    assert status == 2 and not out and line.startswith(f"error: {folder}/config.json: "), line
    assert line.count("config.json: ") == 1, line


LINES = {  # the only line of a --prompt_file; what the error must name
    "no JSON": ('{"prompt": ', "expected a JSON object with a string"),
    "no object": ("{}", "expected a JSON object with a string"),
    "unknown key": ('{"prompt": "a", "promt": 1}', "'promt': no such key; there are"),
    "wrong value": ('{"prompt": "a", "top_k": "x"}', "\"top_k\": 'x' must be a number"),
    "out of range": ('{"prompt": "a", "top_p": 7}', "top_p = 7 must lie in (0, 1]"),
    "infinity": ('{"prompt": "a", "seed": Infinity}', "it holds Infinity; JSON has no NaN"),
    "digits": ('{"prompt": "a", "seed": ' + 5000 * "9" + "}", "expected a JSON object"),
    "too long": (300 * "word ", "over the limit of 160 positions: shorten the prompt"),
    "too many tokens": ('{"prompt": "a", "max_new_tokens": 999}', "over the limit of 160"),
    "messages": ('{"messages": [{"role": "user"}]}', "\"messages\": [{'role': 'user'}] must be"),
}


@pytest.mark.parametrize("case", LINES)
def test_a_wrong_line_is_one_line(text_folder, tmp_path, monkeypatch, capsys, case):
    line, message = LINES[case]
    file = tmp_path / "lines"
    file.write_text(line)
    flags = ["--checkpoint", str(text_folder), "--prompt_file", str(file), "--max_new_tokens", "4"]
    status, out, lines = run_main(monkeypatch, capsys, *flags)
    assert status == 2 and not out and len(lines) == 1, lines
    assert lines[0].startswith(f"error: {file}, line 1: ") and message in lines[0], lines


def sabotage(*_, **__):
    first, second = 1, 2, 3
    return first, second


BUGS = {  # a function that a fork broke; the flags with which it runs
    "the command line": ("cli.main.read_prompts", []),
    "a model's loader": ("loading.target.load_model", []),
    "a config's reader": ("loading.checkpoint.config_from_hf", []),
    "a folder's reader": ("loading.folder.open_tensors", []),
    "weights": ("loading.checkpoint.load_weights", []),
    "a tokenizer's settings": ("loading.tokenizer.TokenizerSettings", []),
    "a chat template": ("loading.tokenizer.load_chat_template", []),
    "a draft's parser": ("drafts.ngram.NgramSource", ["--draft", "ngram"]),
    "a draft's folder": ("drafts.translated.ModelSource", ["--draft_checkpoint", "FOLDER"]),
    "a drafter": ("drafts.ngram.NgramDraft.propose", ["--draft", "ngram"]),
    "a first token": ("decoding.prefill.decide", []),
    "a line's check": ("cli.prompts.prompt_of", ["--prompt_file", "LINES"]),
    "a line's encoding": ("cli.prompts.check_lengths", ["--prompt_file", "LINES"]),
    "a line's first token": ("decoding.prefill.decide", ["--prompt_file", "LINES"]),
}


@pytest.mark.parametrize("case", BUGS)
def test_a_bug_keeps_its_traceback(text_folder, tmp_path, monkeypatch, capsys, case):
    """As it is: no error of another class, no prefix, no line of a file that it is blamed on."""
    function, flags = BUGS[case]
    (tmp_path / "lines").write_text("a\nb\n")
    values = {"FOLDER": str(text_folder), "LINES": str(tmp_path / "lines")}
    flags = ["--checkpoint", str(text_folder), *(values.get(flag, flag) for flag in flags)]
    monkeypatch.setattr(function, sabotage)
    monkeypatch.setattr(sys, "argv", ["generate.py", "--device", "cpu", *flags])
    with pytest.raises(ValueError, match=r"^too many values to unpack \(expected 2") as bug:
        main()
    assert type(bug.value) is ValueError and bug.traceback[-1].name == "sabotage"
    assert "error: " not in capsys.readouterr().err


def test_a_bug_in_a_flag_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr("cli.flags.options_of", sabotage)
    with pytest.raises(ValueError, match="too many values"):
        answer_flags(lambda: parse_args([]))


def test_a_bug_of_ones_own_keeps_its_traceback_in_an_llm(text_folder):
    """A processor's and a drafter's. An error of the user's names the prompt."""

    class Drafter:
        propose = advance = sabotage

    llm = LLM(text_folder, draft=Drafter(), device="cpu", dtype="float32")
    for settings in ({"logits_processor": sabotage}, {"logits_processor": None}):
        with pytest.raises(ValueError, match=r"^too many values") as bug:
            llm.generate(["a", "b"], max_new_tokens=4, **settings)
        assert type(bug.value) is ValueError and bug.traceback[-1].name == "sabotage"
        assert not llm.engine.has_unfinished()
    with pytest.raises(UserError, match=r"^prompt 1: has \d+ tokens; with"):
        llm.generate(["a", 400 * "word "])


@pytest.mark.attack
def test_a_program_ends_with_the_traceback_of_a_bug(text_folder):
    code = """
import drafts.ngram, cli.start
def propose(self, *_):
    first, second = 1, 2, 3
drafts.ngram.NgramDraft.propose = propose
cli.start.main()
"""
    flags = ["--checkpoint", str(text_folder), "--device", "cpu", "--draft", "ngram"]
    command = [sys.executable, "-c", code, *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback (most recent call last)" in done.stderr
    assert "in propose\n" in done.stderr and "too many values to unpack" in done.stderr
