"""loading/checkpoint.py: the tensors of a folder are the weights that compute; a tensor that does
not fit is named."""

import json
import math
import os
import shutil

import pytest
import torch
from conftest import BASE, FAMILIES, config_json, oracle
from safetensors.torch import load_file, save_file
from test_families import NEW

import cli.quantize as quantize_command
import loading.plain_files as plain_files
import scripts.tp_plan as tp_plan
from cli.flags import parse_args
from decoding.errors import UserError
from loading.checkpoint import Checkpoint, load_config, load_model
from loading.config import config_from_hf
from loading.models import empty_model, random_model
from loading.saving import save_model, write_tensors
from loading.target import load_target
from loading.tokenizer import Tokenizer
from loading.weight_names import pieces, stored_names
from weights.walker import quantize_model


def same_weights(a, b) -> bool:
    a, b = dict(a.named_parameters()), dict(b.named_parameters())
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def rewrite(folder, change) -> None:
    """Load model.safetensors, let `change` edit the dict, save it again."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )


@pytest.fixture
def folder(folder_of, tmp_path):
    """A copy of a llama-3 folder that a test may break."""
    return shutil.copytree(folder_of("llama-3"), tmp_path / "model")


def test_sharded_equals_single(folder_of, tmp_path):
    oracle("qwen2").save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
    assert len(Checkpoint(tmp_path / "sharded").files) > 3
    single = load_model(folder_of("qwen2"), dtype=torch.float32)
    assert same_weights(single, load_model(tmp_path / "sharded", dtype=torch.float32))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", ["llama-3", "llama-3.2", "qwen2", "qwen3", "llama-biased", *NEW])
def test_save_is_the_inverse_of_load(family, folder_of, tmp_path):
    """Tensor for tensor what transformers wrote, and transformers reads it back to the same
    logits."""
    from transformers import AutoModelForCausalLM

    save_model(
        load_model(folder_of(family), dtype=torch.float32),
        tmp_path / "m",
        config_json(folder_of(family)),
    )
    want, got = (
        load_file(path / "model.safetensors") for path in (folder_of(family), tmp_path / "m")
    )
    assert want.keys() == got.keys() and all(torch.equal(want[name], got[name]) for name in want)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    tokens = torch.arange(5, 25)[None]
    with torch.no_grad():
        assert torch.allclose(again(tokens).logits, oracle(family)(tokens).logits, atol=1e-5)


def test_what_a_model_holds_in_float32_is_written_so(tmp_path):
    """A router among it, as save_model writes it."""
    config = config_from_hf({**BASE, **FAMILIES["ernie-4.5-moe"]})
    model = random_model(config, dtype=torch.float32, pack=False)
    names = [name for name, _ in model.named_parameters()]
    write_tensors(tmp_path / "m.safetensors", model, names, torch.bfloat16)
    dtypes = {name: tensor.dtype for name, tensor in load_file(tmp_path / "m.safetensors").items()}
    in_float32 = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    want = empty_model(config, torch.bfloat16)
    assert in_float32 == {
        source
        for name, parameter in want.named_parameters()
        if parameter.dtype == torch.float32
        for source in stored_names(config, name)
    }
    assert any(name.endswith("mlp.gate.weight") for name in in_float32)


def test_no_file_of_an_earlier_model_stays(folder_of, tmp_path):
    """Programs that read every safetensors file of a folder would read those too."""
    hf = config_json(folder_of("llama-3"))
    model = load_model(folder_of("llama-3"), pack=False)
    save_model(quantize_model(model, "int8"), tmp_path, hf)
    assert len([*tmp_path.glob("*.safetensors")]) > 1
    save_model(load_model(folder_of("llama-3"), pack=False), tmp_path, hf)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]


def test_a_module_without_names_says_where_they_belong(folder):
    with pytest.raises(LookupError, match=r"ffn\.gate2: no row of MODULES"):
        list(pieces(load_config(folder), "layers.0.ffn.gate2.weight", torch.empty(2, 2)))


def test_one_process_does_not_decode_the_vocabulary(text_folder, monkeypatch):
    """Only ranks compare it, and a large one takes a third of a second."""
    monkeypatch.setattr(Tokenizer, "pieces", None)
    args = parse_args(["--checkpoint", str(text_folder), "--device", "cpu"])
    _, tokenizer = load_target(args.model, torch.device("cpu"))
    assert tokenizer.encode("the cat")


def test_a_head_that_is_quantized_alone_cannot_be_saved(folder_of, tmp_path):
    model = quantize_model(load_model(folder_of("llama-2")), None, "int8")
    with pytest.raises(ValueError, match="its blocks are in full precision, its head in int8"):
        save_model(model, tmp_path / "q", config_json(folder_of("llama-2")))


def test_tied_head_is_one_memory(folder_of):
    model = load_model(folder_of("llama-3.2"), dtype=torch.float32)
    assert model.lm_head.weight.data_ptr() == model.embed.weight.data_ptr()
    model = load_model(folder_of("llama-3"), dtype=torch.float32)
    assert model.lm_head.weight.data_ptr() != model.embed.weight.data_ptr()


def test_dtype_is_cast_on_the_way(folder_of):
    model = load_model(folder_of("llama-3"))
    want = load_model(folder_of("llama-3"), dtype=torch.float32)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model(torch.tensor([[5]]), torch.arange(1)).dtype == torch.float32  # logits in any case
    assert torch.equal(
        model.layers[1].attention.qkv.weight, want.layers[1].attention.qkv.weight.bfloat16()
    )


def test_stored_frequencies_and_a_stored_tied_head_are_ignored(folder_of, tmp_path, capsys):
    folder = shutil.copytree(folder_of("llama-3.2"), tmp_path / "m")
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    extra["lm_head.weight"] = load_file(folder / "model.safetensors")[
        "model.embed_tokens.weight"
    ].clone()
    rewrite(folder, lambda tensors: tensors.update(extra))
    assert same_weights(load_model(folder), load_model(folder_of("llama-3.2")))
    assert not capsys.readouterr().err


@pytest.mark.parametrize("quantized", [False, True])
def test_a_stored_head_that_differs_from_the_embedding_is_the_head(
    quantized, folder_of, tmp_path, capsys
):
    """transformers does not tie them then, and warns; nor is the head lost where the folder is
    quantized."""
    from transformers import AutoModelForCausalLM

    folder = shutil.copytree(folder_of("llama-3.2"), tmp_path / "m")
    rewrite(
        folder,
        put(
            "lm_head.weight", 0.1 * torch.randn(131, 64, generator=torch.Generator().manual_seed(0))
        ),
    )
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if quantized:
        quantize_command.main(
            [
                "--checkpoint",
                str(folder),
                "--scheme",
                "int8-float32",
                "--output",
                str(tmp_path / "q"),
            ]
        )
        folder = tmp_path / "q"
    model, tokens = load_model(folder, dtype=torch.float32), torch.arange(5, 25)[None]
    assert "lm_head.weight differs from the embedding" in capsys.readouterr().err
    with torch.no_grad():
        want = theirs(tokens).logits
    assert (model(tokens, torch.arange(20)) - want).abs().max() < (
        0.05 * want.abs().max() if quantized else 1e-4
    )
    assert torch.equal(model.lm_head.weight, theirs.lm_head.weight)
    save_model(
        load_model(folder, dtype=torch.float32, pack=False), tmp_path / "again", config_json(folder)
    )
    assert torch.equal(
        load_model(tmp_path / "again", dtype=torch.float32).lm_head.weight, theirs.lm_head.weight
    )


def drop(name):
    return lambda tensors: tensors.pop(name)


def put(name, tensor):
    return lambda tensors: tensors.__setitem__(name, tensor)


@pytest.mark.parametrize(
    "change, names",
    [
        (drop("model.layers.1.mlp.up_proj.weight"), "missing: model.layers.1.mlp.up_proj.weight"),
        (drop("lm_head.weight"), "tie_word_embeddings"),
        (
            put("model.layers.0.self_attn.q_proj.bias", torch.zeros(64)),
            "unexpected: model.layers.0.self_attn.q_proj.bias",
        ),
        (
            put("model.layers.3.mlp.up_proj.weight", torch.zeros(96, 64)),
            "unexpected: model.layers.3.mlp.up_proj.weight",
        ),
        (
            put("model.layers.1.mlp.up_proj.weight", torch.zeros(64, 96)),
            "model.layers.1.mlp.up_proj.weight is [64, 96]",
        ),
        (
            put("model.norm.weight", torch.zeros(64, dtype=torch.int8)),
            "model.norm.weight is of type I8",
        ),
        (lambda tensors: [tensors.pop(name) for name in list(tensors)[:15]], "and 7 more"),
    ],
)
def test_tensors_that_do_not_fit_are_listed(folder, change, names):
    rewrite(folder, change)
    with pytest.raises(ValueError) as error:
        load_model(folder)
    assert names in str(error.value) and str(folder) in str(error.value)


def index_of(folder, weight_map) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def without_prefix(tensors) -> None:
    """As transformers saves a model without its head."""
    stored = dict(tensors)
    tensors.clear()
    tensors.update({name.removeprefix("model."): tensor for name, tensor in stored.items()})


def two_shards(folder, weight_map, first, second) -> None:
    """Two files of these tensors; `weight_map` need not name them all."""
    (folder / "model.safetensors").unlink()
    for name, tensors in (("a.safetensors", first), ("sub/b.safetensors", second)):
        (folder / name).parent.mkdir(exist_ok=True)
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


EMBED = "model.embed_tokens.weight"


@pytest.mark.parametrize("case", ["sub-folder", "overlay", "base first", "twice", "unnamed"])
def test_an_index_is_read_as_in_transformers(folder, case):
    from transformers import AutoModelForCausalLM

    stored = load_file(folder / "model.safetensors")
    embedding = {EMBED: stored[EMBED].flip(0)}
    norm = {"model.norm.weight": stored.pop("model.norm.weight") + 1}
    first = dict(stored)
    second = norm | (embedding if case in ("overlay", "unnamed") else {})
    index = dict.fromkeys(first, "a.safetensors") | dict.fromkeys(second, "sub/b.safetensors")
    if case == "base first":  # the index names the file over which another lies
        second |= embedding
    if case == "twice":
        second |= {EMBED: stored[EMBED]}
    if case == "unnamed":  # needed, or left over from another model
        del first[EMBED]
        del index[EMBED]
        second["left.over"] = torch.ones(2)
    two_shards(folder, index, first, second)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    ours = load_model(folder, dtype=torch.float32)
    assert torch.equal(ours.embed.weight, theirs[EMBED])
    assert torch.equal(ours.norm.weight, theirs["model.norm.weight"])
    assert torch.equal(
        ours.layers[1].ffn.down.weight, theirs["model.layers.1.mlp.down_proj.weight"]
    )


def test_a_tensor_that_the_index_names_must_fit(folder):
    stored = load_file(folder / "model.safetensors")
    second = {"left.over": torch.ones(2)}
    index = dict.fromkeys(stored, "a.safetensors") | dict.fromkeys(second, "sub/b.safetensors")
    two_shards(folder, index, stored, second)
    with pytest.raises(ValueError, match=r"unexpected: left\.over"):
        load_model(folder)


def linked_to_nowhere(file):
    """As the hub's cache leaves a file whose blob was deleted."""
    file.unlink(missing_ok=True)
    file.symlink_to("blobs/gone")


BROKEN = {  # what is done to the folder, what the message must name
    "no folder": (lambda f: shutil.rmtree(f), "no such folder"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json: no such file"),
    "config is no JSON": (
        lambda f: (f / "config.json").write_text("{"),
        "config.json: not readable as JSON",
    ),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "expected a JSON object"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "neither model.safetensors nor"),
    "only a pickle": (lambda f: (f / "model.safetensors").rename(f / "x.bin"), "x.bin is a pickle"),
    "truncated": (
        lambda f: os.truncate(f / "model.safetensors", 9999),
        "not a readable safetensors",
    ),
    "garbage": (
        lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 64),
        "not a readable safetensors",
    ),
    "empty": (lambda f: (f / "model.safetensors").write_bytes(b""), "not a readable safetensors"),
    "a link to nowhere": (
        lambda f: linked_to_nowhere(f / "model.safetensors"),
        "model.safetensors: a link to blobs/gone, which does not exist; fetch the file again",
    ),
    "config links to nowhere": (
        lambda f: linked_to_nowhere(f / "config.json"),
        "config.json: a link to blobs/gone, which does not exist",
    ),
    "index links to nowhere": (
        lambda f: [
            (f / "model.safetensors").unlink(),
            linked_to_nowhere(f / "model.safetensors.index.json"),
        ],
        "index.json: a link to blobs/gone, which does not exist",
    ),
    "shard links to nowhere": (
        lambda f: [
            index_of(f, {"x": "b.safetensors"}),
            linked_to_nowhere(f / "b.safetensors"),
        ],
        "b.safetensors: not a readable safetensors file: a link to blobs/gone, which does not",
    ),
    "shard missing": (lambda f: index_of(f, {"x": "b.safetensors"}), "b.safetensors: not a"),
    "index is absolute": (
        lambda f: index_of(f, {"x": "/etc/passwd"}),
        "index.json: weight_map has '/etc/passwd' where a file of the folder must stand",
    ),
    "index leads out": (
        lambda f: index_of(f, {"x": "a/../../x.safetensors"}),
        "weight_map has 'a/../../x.safetensors'",
    ),
    "one shard, no index": (
        lambda f: (f / "model.safetensors").rename(f / "model-00001-of-00001.safetensors"),
        "; rename model-00001-of-00001.safetensors to model.safetensors if",
    ),
    "shards, no index": (
        lambda f: [
            shutil.copy(f / "model.safetensors", f / "model-00001-of-00002.safetensors"),
            (f / "model.safetensors").rename(f / "model-00002-of-00002.safetensors"),
        ],
        "; fetch the index, without which model-00001-of-00002.safetensors and the others",
    ),
    "names without a prefix": (
        lambda f: rewrite(f, without_prefix),
        " of the missing ones are there without the prefix model.",
    ),
    "index is empty": (lambda f: index_of(f, {}), "weight_map"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_folders_are_named(folder, case):
    break_it, names = BROKEN[case]
    break_it(folder)
    with pytest.raises(ValueError) as error:
        load_model(folder)
    assert names in str(error.value) and "\n" not in str(error.value)


def test_each_file_is_read_once(folder_of, tmp_path, monkeypatch):
    oracle("qwen2").save_pretrained(tmp_path, max_shard_size="40KB")
    reads = []
    read_plain = plain_files.read_plain

    def counted(file):
        reads.append(file.name)
        return read_plain(file)

    monkeypatch.setattr(plain_files, "read_plain", counted)
    load_model(tmp_path)
    assert sorted(reads) == ["config.json", "model.safetensors.index.json"]


@pytest.mark.parametrize("kept", [5, "abc", [["layers.0.ffn.down"]], ["layers.9.ffn.down"]])
def test_what_is_kept_is_seen_in_the_tensors(folder, tmp_path, kept):
    """Only a plan that reads config.json alone needs the names."""
    save_model(load_model(folder, quantize="int8", pack=False), tmp_path / "q", config_json(folder))
    file = tmp_path / "q" / "config.json"
    hf = json.loads(file.read_text())
    hf["quantization"]["kept"] = kept
    file.write_text(json.dumps(hf))
    want = load_model(folder, quantize="int8")
    assert same_weights(load_model(tmp_path / "q"), want)
    with pytest.raises(UserError, match=rf"^{file}: quantization: kept = .* must list matrices"):
        tp_plan.storage(file, None)


UP = "base_model.model.model.layers.0.mlp.up_proj"


def lora(folder, rank: int = 2, **entries):
    """A LoRA folder of one matrix, which PEFT's merge is not needed for."""
    folder.mkdir()
    parts = {"A": torch.ones(rank, 64), "B": torch.ones(96, rank)}
    tensors = {f"{UP}.lora_{part}.weight": tensor for part, tensor in parts.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **entries}))
    return folder


BAD_ADAPTERS = [  # entries of adapter_config.json, what the message must name
    ({"alpha_pattern": ["x"]}, r"adapter_config.json: alpha_pattern = \['x'\] must be an object"),
    ({"alpha_pattern": {"(": 4}}, "adapter_config.json: alpha_pattern = {'\\(': 4}: "),
    ({"alpha_pattern": {"up_proj": "4"}}, "adapter_config.json: .*or alpha_pattern = '4' must be"),
    ({"lora_alpha": math.nan}, "adapter_config.json: lora_alpha or .* = nan must be a number"),
    ({"lora_alpha": math.inf}, "adapter_config.json: lora_alpha or .* = inf must be a number"),
    ({"lora_alpha": 10**400}, "adapter_config.json: lora_alpha or .* = 1000.*… must be a number"),
    ({"rank": 0}, ".* has an A of shape"),
]


@pytest.mark.parametrize("entries, message", BAD_ADAPTERS, ids=range(len(BAD_ADAPTERS)))
def test_an_adapters_settings_are_checked_before_a_weight_is_read(
    folder, tmp_path, entries, message
):
    adapter = lora(tmp_path / "adapter", **entries)
    with pytest.raises(UserError, match=rf"^{adapter}(/|: ){message}"):
        _ = Checkpoint(folder, adapter).source


@pytest.mark.parametrize("name", ["lm_head", "model.embed_tokens"])
def test_a_tied_head_has_no_adapter(name, folder_of, tmp_path):
    adapter = lora(tmp_path / "adapter")
    tensors = {f"base_model.model.{name}.weight": torch.ones(96, 64)}
    save_file(tensors, adapter / "adapter_model.safetensors")
    with pytest.raises(UserError, match=f"{name}.weight is an embedding that is also the head"):
        _ = Checkpoint(folder_of("llama-3.2"), adapter).source


def test_the_first_pattern_that_matches_has_the_alpha(folder, tmp_path):
    patterns = {"down_proj": 100, "mlp.up_proj": 6, "up_proj": 50}
    adapter = lora(tmp_path / "adapter", alpha_pattern=patterns)
    name = "model.layers.0.mlp.up_proj.weight"
    merged = Checkpoint(folder, adapter).source.tensors[name].weight()
    # 6 / 2 times the product of ones, whose numbers are 2
    assert torch.equal(merged, Checkpoint(folder).source.tensors[name].weight() + 6)


def test_random_model_is_seeded_and_finite(folder):
    config = load_config(folder)
    a, b, c = (random_model(config, dtype=torch.float32, seed=seed) for seed in (1, 1, 2))
    assert same_weights(a, b) and not same_weights(a, c)
    assert a(torch.arange(9)[None], torch.arange(9)).isfinite().all()


# ----------------------------------------------------------------------------------- Meta's files
