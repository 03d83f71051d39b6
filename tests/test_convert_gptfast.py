"""scripts/convert_gptfast.py: a model that went into gpt-fast's layout and back is the same model, bit for bit.

The way there is written here from the published layout (gpt-fast's convert_hf_checkpoint.py and quantize.py), row by
row, so a wrong order of rows, parts or names on the way back cannot cancel out.
"""

import json
import os
import pickle
import shutil
import sys

import pytest
import torch
from conftest import BASE, LLAMA3_ROPE, config_json, rope
from safetensors.torch import load_file

from loading.checkpoint import load_config, load_model, random_model, save_model
from loading.config import config_from_hf
from loading.tokenizer import load_tokenizer
from scripts import convert_gptfast
from weights.walker import quantized_linears

SHAPES = {
    "grouped heads": {"model_type": "llama", **LLAMA3_ROPE},
    "one head each, tied": {"model_type": "llama", "num_key_value_heads": 4, "tie_word_embeddings": True, **rope(1e4)},
    "mistral": {"model_type": "mistral", "sliding_window": None, **rope(1e6)},
}
MODULES = {
    "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Row 2i of a head is the half-split layout's row i, row 2i + 1 its row i + E/2."""
    E = len(weight) // heads
    return weight[[head * E + (row % 2) * (E // 2) + row // 2 for head in range(heads) for row in range(E)]]


def to_gptfast(tensors: dict, H: int, G: int) -> dict:
    """Hugging Face tensors under gpt-fast's names."""
    found = {
        "tok_embeddings.weight": tensors["model.embed_tokens.weight"], "norm.weight": tensors["model.norm.weight"],
    }  # fmt: skip
    if "lm_head.weight" in tensors:
        found["output.weight"] = tensors["lm_head.weight"]
    for layer in range(3):
        old, new = f"model.layers.{layer}", f"layers.{layer}"
        q, k, v = (tensors[f"{old}.self_attn.{name}_proj.weight"] for name in "qkv")
        found[f"{new}.attention.wqkv.weight"] = torch.cat([interleaved(q, H), interleaved(k, G), v])
        for theirs, ours in MODULES.items():
            found[f"{new}.{ours}.weight"] = tensors[f"{old}.{theirs}.weight"]
    return found


def to_int8(tensors: dict) -> dict:
    """As gpt-fast's quantize.py: every Linear by rows, step max|w| / 127.5, codes from -128 on."""
    found = dict(tensors)
    for name, weight in tensors.items():
        if weight.dim() == 2 and name != "tok_embeddings.weight":
            scale = weight.float().abs().amax(1) / 127.5
            found[name] = (weight.float() / scale[:, None]).round().clamp(-128, 127).to(torch.int8)
            found[name.replace(".weight", ".scales")] = scale.bfloat16()
    return found


@pytest.fixture
def source(tmp_path, story_tokenizer):
    """shape -> (a folder that we saved, gpt-fast's file of it in another folder, without a config.json)."""

    def make(shape: str = "grouped heads", dtype: torch.dtype = torch.bfloat16):
        hf = {**BASE, "vocab_size": 384, **SHAPES[shape], "dtype": str(dtype).removeprefix("torch.")}
        model = random_model(config_from_hf(hf), dtype=dtype)
        for parameter in model.parameters():
            parameter.data.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.1)
        save_model(model, tmp_path / "original", hf)
        folder = tmp_path / "Llama-2-7b-chat-hf"  # a name that says something else
        folder.mkdir()
        shutil.copy(story_tokenizer, folder)
        (folder / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True, "eos_token": "</s>"}))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
        tensors = load_file(tmp_path / "original" / "model.safetensors")
        torch.save(to_gptfast(tensors, 4, hf["num_key_value_heads"]), folder / "model.pth")
        return tmp_path / "original", folder / "model.pth"

    return make


def run_main(monkeypatch, capsys, *arguments) -> tuple[int, list[str]]:
    """(exit status, the lines that are no progress) of the script in this process."""
    monkeypatch.setattr(sys, "argv", ["convert_gptfast", *map(str, arguments)])
    try:
        convert_gptfast.main()
        status = 0
    except SystemExit as exit:
        status = exit.code
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    return status, [line for line in err.splitlines() if line.startswith("error: ")]


def stored(folder) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_there_and_back_is_the_same_model(source, tmp_path, monkeypatch, capsys, shape, dtype):
    original, file = source(shape, dtype)
    output, config = tmp_path / "out", original / "config.json"
    assert run_main(monkeypatch, capsys, "--checkpoint", file, "--output", output, "--config", config) == (0, [])
    want, got = stored(original), stored(output)
    assert want.keys() == got.keys() and not list(tmp_path.glob("*.partial"))
    assert all(got[name].dtype == dtype and torch.equal(got[name], want[name]) for name in want)
    assert load_config(output) == load_config(original)
    tokens = torch.arange(40)[None]
    ours, theirs = (load_model(folder, dtype=dtype)(tokens, torch.arange(40)) for folder in (output, original))
    assert torch.equal(ours, theirs)
    tokenizer = load_tokenizer(output)
    assert tokenizer.encode("the little cat") == load_tokenizer(file.parent).encode("the little cat")
    assert {2, 7} <= tokenizer.stop_ids  # generation_config.json came along


def test_a_config_beside_the_file_is_taken_and_its_dtype_follows_the_file(source, tmp_path):
    original, file = source()
    hf = config_json(original)
    del hf["dtype"]
    (file.parent / "config.json").write_text(json.dumps(hf | {"torch_dtype": "float16"}))
    convert_gptfast.convert(file, tmp_path / "out")
    assert load_config(tmp_path / "out") == load_config(original)


def test_int8_is_taken_over_number_for_number(source, tmp_path):
    original, file = source()
    tensors = to_int8(torch.load(file, weights_only=True))
    tensors["layers.1.feed_forward.w2.weight"][0, 0] = -128  # which our own rounding never chooses
    torch.save(tensors, file.with_name("model_int8.pth"))
    convert_gptfast.convert(file.with_name("model_int8.pth"), tmp_path / "out", original / "config.json")
    model = load_model(tmp_path / "out", dtype=torch.float32)
    assert len(quantized_linears(model)) == 3 * 4 + 1  # the head is one of them
    for number, layer in enumerate(model.layers):
        for place, name in enumerate(("weight", "scales")):
            found = layer.attention.qkv.parts()[("codes", "scale")[place]].split([64, 32, 32])
            fused = torch.cat([interleaved(found[0], 4), interleaved(found[1], 2), found[2]])
            assert torch.equal(fused, tensors[f"layers.{number}.attention.wqkv.{name}"])
        linears = {"w1": (layer.ffn.gate_up, slice(0, 96)), "w3": (layer.ffn.gate_up, slice(96, None)),
                   "w2": (layer.ffn.down, slice(None))}  # fmt: skip
        for name, (linear, rows) in linears.items():
            parts, prefix = linear.parts(), f"layers.{number}.feed_forward.{name}"
            assert torch.equal(parts["codes"][rows], tensors[f"{prefix}.weight"])
            assert torch.equal(parts["scale"][rows], tensors[f"{prefix}.scales"])
    # And it computes with what gpt-fast's numbers stand for, -128 included.
    x = torch.randn(5, 96)
    weight = tensors["layers.1.feed_forward.w2.weight"].double()
    want = (x.double() @ weight.T) * tensors["layers.1.feed_forward.w2.scales"].double()
    assert torch.allclose(model.layers[1].ffn.down(x).double(), want, rtol=1e-4, atol=1e-4)


class Code:
    """A pickle that makes a folder when it is opened."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def edit(file, change) -> None:
    tensors = torch.load(file, weights_only=True)
    change(tensors)
    torch.save(tensors, file)


def edit_config(file, **changes) -> None:
    path = file.parent / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


WQKV = "layers.1.attention.wqkv.weight"
REFUSED = {  # what is done to a good file; what the one line must say
    "file is missing": (lambda f: f.unlink(), "model.pth: no such file"),
    "config is missing": (lambda f: (f.parent / "config.json").unlink(), "pass --config"),
    "config is another's": (lambda f: edit_config(f, num_key_value_heads=4), f"{WQKV} is [128, 64] instead of [192,"),
    "more layers": (lambda f: edit_config(f, num_hidden_layers=4), "missing: layers.3.attention.wqkv.weight"),
    "fewer layers": (lambda f: edit_config(f, num_hidden_layers=2), "unexpected: layers.2.attention"),
    "biases": (lambda f: edit_config(f, attention_bias=True), "biases"),
    "architecture": (lambda f: edit_config(f, model_type="mamba"), "model_type 'mamba'"),
    "tied, but not equal": (lambda f: edit_config(f, tie_word_embeddings=True), "tie_word_embeddings"),
    "key is missing": (lambda f: edit(f, lambda t: t.pop(WQKV)), f"missing: {WQKV}"),
    "key is extra": (lambda f: edit(f, lambda t: t.update(x=torch.ones(1))), "unexpected: x"),
    "rows are missing": (lambda f: edit(f, lambda t: t.update({WQKV: t[WQKV][:64]})), f"{WQKV} is [64, 64]"),
    "broadcastable": (lambda f: edit(f, lambda t: t.update({"norm.weight": torch.ones(1)})), "norm.weight is [1]"),
    "integers": (lambda f: edit(f, lambda t: t.update({"norm.weight": torch.ones(64).long()})), "norm.weight is int64"),
    "int8 without scales": (lambda f: edit(f, lambda t: t.update({WQKV: t[WQKV].char()})), f"type: {WQKV} is int8"),
    "half of it int8": (
        lambda f: edit(f, lambda t: t.update(to_int8(t) | {WQKV: t[WQKV]})), f"of another type: {WQKV} is bfloat16"
    ),
    "scales beyond bfloat16": (
        lambda f: edit(f, lambda t: t.update({
            name: part.float() * 1.001 if name.endswith("scales") else part for name, part in to_int8(t).items()
        })),
        "attention.wqkv.scales holds numbers that bfloat16",
    ),
    "int4": (
        lambda f: edit(f, lambda t: t.update({WQKV.replace("weight", "scales_and_zeros"): torch.ones(2, 128, 2)})),
        "int4",
    ),
    "code": (lambda f: torch.save({"norm.weight": Code(f.parent / "ran")}, f), "could run code"),
    "code alone": (lambda f: f.write_bytes(pickle.dumps(Code(f.parent / "ran"))), "cannot be read as tensors alone"),
    "no pickle": (lambda f: f.write_bytes(b"GGUF" * 100), "cannot be read as tensors alone"),
    "cut off": (lambda f: os.truncate(f, 5000), "cannot be read as tensors alone"),
    "empty": (lambda f: os.truncate(f, 0), "cannot be read as tensors alone"),
    "a list": (lambda f: torch.save([torch.ones(1)], f), "not a file of tensors by name"),
    "a whole training state": (lambda f: torch.save({"model": {"a": torch.ones(1)}}, f), "not a file of tensors"),
    "no tokenizer": (lambda f: (f.parent / "tokenizer.model").unlink(), "neither tokenizer.model nor tokenizer.json"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_one_line(source, tmp_path, monkeypatch, capsys, case):
    original, file = source()
    shutil.copy(original / "config.json", file.parent)
    break_it, says = REFUSED[case]
    break_it(file)
    status, lines = run_main(monkeypatch, capsys, "--checkpoint", file, "--output", tmp_path / "out")
    assert status == 2 and len(lines) == 1 and says in lines[0], lines
    assert not list(tmp_path.glob("out*")) and not (file.parent / "ran").exists()


def test_a_folder_that_exists_is_left_alone(source, tmp_path, monkeypatch, capsys):
    original, file = source()
    status, lines = run_main(monkeypatch, capsys, "--checkpoint", file, "--output", original)
    assert status == 2 and "exists already" in lines[0] and (original / "model.safetensors").exists()
