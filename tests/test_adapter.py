"""LoRA adapters against peft's own merge.

peft takes seconds to import, so functions import it: the fast tests leave this file out.
"""

import contextlib
import importlib.util
import json
import shutil

import pytest
import torch
from conftest import BASE, FAMILIES, ROOT, WRAPPERS
from safetensors.torch import load_file, save_file

import cli.quantize as quantize_command
from cli.flags import parse_args
from loading.checkpoint import Checkpoint, load_model
from loading.target import load_target
from weights.walker import quantize_model

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.attack,
    pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed"),
]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Untied, with qkv biases."""
    folder = tmp_path_factory.mktemp("base")
    config = transformers.AutoConfig.for_model(
        "qwen2",
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=131,
        max_position_embeddings=96,
        dtype="float32",
        tie_word_embeddings=False,
    )
    torch.manual_seed(3)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(
        folder
    )
    return folder


def adapter(base, folder, **options):
    """(folder, the merged model of peft) of an adapter with random weights."""
    import peft

    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options))
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            parameter.data.normal_(0, 0.1)
    model.save_pretrained(folder)
    return folder, model.merge_and_unload()


@pytest.mark.parametrize(
    "options",
    [
        {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION},
        {"r": 3, "lora_alpha": 7, "target_modules": ALL, "use_rslora": True},
        {
            "r": 4,
            "target_modules": ALL,
            "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 7},
            "alpha_pattern": {"k_proj": 3, "layers.2.mlp.down_proj": 64},
        },
        {
            "r": 2,
            "lora_alpha": 4,
            "target_modules": ["q_proj"],
            "modules_to_save": ["lm_head", "norm"],
        },
        {"r": 2, "lora_alpha": 4, "target_modules": ["embed_tokens", "lm_head", "v_proj"]},
        {"r": 1, "target_modules": ["down_proj"], "layers_to_transform": [1]},
        {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": "mica"},
    ],
)
def test_merged_weights_are_pefts(base, tmp_path, options):
    """Logits in float32; without the adapter they differ."""
    folder, theirs = adapter(base, tmp_path / "adapter", **options)
    tokens = torch.arange(5, 35)[None]
    ours = load_model(Checkpoint(base, folder), dtype=torch.float32)
    with torch.no_grad():
        want = theirs(tokens).logits
    assert torch.allclose(ours(tokens, torch.arange(30)), want, atol=2e-5)
    assert not torch.allclose(
        load_model(base, dtype=torch.float32)(tokens, torch.arange(30)), want, atol=1e-2
    )


VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "image_size": 16}
VISION |= {"patch_size": 4, "num_attention_heads": 2}
ALL_WRAPPERS = {
    **{family: (family, wrapper) for family, wrapper in WRAPPERS.items()},
    "gemma-3": (
        "gemma-3",
        {
            "model_type": "gemma3",
            "tie_word_embeddings": False,
            "mm_tokens_per_image": 4,
            "vision_config": {"model_type": "siglip_vision_model", **VISION},
        },
    ),
    "mistral-small-3": (
        "mistral-v0.2",
        {
            "model_type": "mistral3",
            "tie_word_embeddings": False,
            "vision_config": {"model_type": "pixtral", "head_dim": 16, **VISION},
        },
    ),
    "ministral-3": (
        "ministral-3",
        {
            "model_type": "mistral3",
            "tie_word_embeddings": False,
            "vision_config": {"model_type": "pixtral", "head_dim": 16, **VISION},
        },
    ),
}


@pytest.mark.parametrize("family", ALL_WRAPPERS)
@pytest.mark.parametrize(
    "options",
    [
        {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION},
        {
            "r": 4,
            "target_modules": ["q_proj", "v_proj"],
            "alpha_pattern": {"model.language_model.layers.1.self_attn.v_proj": 64},
            "modules_to_save": ["norm"],
        },
    ],
)
def test_an_adapter_of_a_wrapper_changes_its_text_model(family, options, tmp_path):
    """Trained on the whole model as transformers 5 loads it, its vision tower too where a matrix
    there has the same name."""
    import peft

    text, wrapper = ALL_WRAPPERS[family]
    config = transformers.AutoConfig.for_model(**wrapper, text_config={**BASE, **FAMILIES[text]})
    torch.manual_seed(3)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(model, peft.LoraConfig(**options))
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            parameter.data.normal_(0, 0.1)
    model.save_pretrained(tmp_path / "adapter")
    theirs = model.merge_and_unload().eval()
    tokens = torch.arange(5, 35)[None]
    with torch.no_grad():
        want = theirs(tokens).logits
    checkpoint = Checkpoint(tmp_path / "base", tmp_path / "adapter")
    ours = load_model(checkpoint, dtype=torch.float32)(tokens, torch.arange(30))
    assert torch.allclose(ours, want, atol=2e-5)
    bare = load_model(tmp_path / "base", dtype=torch.float32)(tokens, torch.arange(30))
    assert not torch.allclose(bare, want, atol=1e-2)


def test_without_lora_alpha_it_is_pefts_default(base, tmp_path):
    import peft

    folder, theirs = adapter(base, tmp_path / "adapter", r=4, target_modules=["q_proj"])
    file = folder / "adapter_config.json"
    settings = json.loads(file.read_text())
    assert settings.pop("lora_alpha") == peft.LoraConfig().lora_alpha
    file.write_text(json.dumps(settings))
    tokens = torch.arange(5, 35)[None]
    ours = load_model(Checkpoint(base, folder), dtype=torch.float32)
    with torch.no_grad():
        assert torch.allclose(ours(tokens, torch.arange(30)), theirs(tokens).logits, atol=2e-5)


def test_an_adapter_is_merged_before_quantizing(base, tmp_path):
    """In memory and by quantize.py, whose folder needs no adapter any more."""
    folder, theirs = adapter(base, tmp_path / "adapter", r=4, target_modules=ALL)
    theirs.save_pretrained(tmp_path / "merged")
    want = quantize_model(load_model(tmp_path / "merged", dtype=torch.float32), "int8")
    ours = load_model(Checkpoint(base, folder), dtype=torch.float32, quantize="int8", pack=False)
    arguments = [
        "--checkpoint",
        str(base),
        "--adapter",
        str(folder),
        "--scheme",
        "int8",
        "--output",
    ]
    with contextlib.suppress(SystemExit):
        quantize_command.main([*arguments, str(tmp_path / "q")])
    written = load_model(tmp_path / "q", dtype=torch.float32, pack=False)
    for model in (ours, written):
        for (name, a), (_, b) in zip(
            model.named_parameters(), want.named_parameters(), strict=True
        ):
            # Two float32 sums of r products may differ in the last bit, and so may a code.
            assert torch.allclose(
                a.float(), b.float(), atol=1.01 if a.dtype == torch.int8 else 1e-6
            ), name
    with pytest.raises(ValueError, match="is stored quantized; merge into the original weights"):
        load_model(Checkpoint(tmp_path / "q", folder))


def test_the_flag(tmp_path):
    """On the demo, whose embedding is tied; an adapter that would change it is refused."""
    demo = ROOT / "checkpoints" / "demo"
    folder, theirs = adapter(demo, tmp_path / "adapter", r=4, target_modules=ATTENTION)
    args = parse_args(["--checkpoint", str(demo), "--adapter", str(folder), "--dtype", "float32"])
    model, _ = load_target(args.model, torch.device("cpu"))
    tokens = torch.arange(5, 35)[None]
    with torch.no_grad():
        assert torch.allclose(model(tokens, torch.arange(30)), theirs(tokens).logits, atol=2e-5)
    tied, _ = adapter(demo, tmp_path / "tied", r=4, target_modules=["embed_tokens"])
    with pytest.raises(ValueError, match="an embedding that is also the head"):
        load_model(Checkpoint(demo, tied))
    with pytest.raises(ValueError, match="--adapter and --chat_template need the weights"):
        parse_args(["--adapter", str(folder), "--random_weights", str(demo / "config.json")])


def changed(folder, target, **keys):
    shutil.copytree(folder, target, dirs_exist_ok=True)
    file = target / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))
    return target


def test_other_adapters_are_refused_by_name(base, tmp_path):
    import peft

    folder, _ = adapter(base, tmp_path / "adapter", r=4, target_modules=ATTENTION)
    for number, (key, value) in enumerate(
        {
            "use_dora": True,
            "peft_type": "IA3",
            "bias": "all",
            "fan_in_fan_out": True,
            "layer_replication": [[0, 2]],
            "trainable_token_indices": [1, 2],
            "target_parameters": ["experts"],
            "init_lora_weights": "olora",
            "lora_alpha": None,
        }.items()
    ):
        with pytest.raises(ValueError, match=rf"adapter_config.json: {key}( or alpha_pattern)? = "):
            load_model(Checkpoint(base, changed(folder, tmp_path / str(number), **{key: value})))
    for key, value in {
        "kasa_config": peft.KasaConfig(),
        "use_bdlora": peft.BdLoraConfig(target_modules_bd_b=["q_proj"], nblocks=2),
        "monteclora_config": peft.MontecloraConfig(),
    }.items():
        model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        options = {"task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj"], key: value}
        peft.get_peft_model(model, peft.LoraConfig(**options)).save_pretrained(tmp_path / key)
        with pytest.raises(
            ValueError, match=rf"adapter_config.json: {key} = .* something else than a plain LoRA's"
        ):
            load_model(Checkpoint(base, tmp_path / key))
    dora, _ = adapter(base, tmp_path / "dora", r=4, target_modules=["q_proj"], use_dora=True)
    with pytest.raises(ValueError, match="use_dora"):
        load_model(Checkpoint(base, dora))
    pissa, _ = adapter(
        base, tmp_path / "pissa", r=4, target_modules=["q_proj"], init_lora_weights="pissa"
    )
    # PEFT also changes q_proj itself
    with pytest.raises(ValueError, match="init_lora_weights = 'pissa'"):
        load_model(Checkpoint(base, pissa))
    with pytest.raises(ValueError, match="use the model that it was trained on"):
        far, _ = adapter(base, tmp_path / "far", r=2, target_modules=["q_proj"])
        load_model(Checkpoint(ROOT / "checkpoints" / "demo-draft", far))
    file = folder / "adapter_model.safetensors"
    alone = shutil.copytree(folder, tmp_path / "alone")
    tensors = load_file(file)
    del tensors[next(name for name in tensors if "q_proj.lora_B" in name)]
    save_file(tensors, alone / file.name)
    with pytest.raises(ValueError, match=r"q_proj\.weight has lora_A alone"):
        load_model(Checkpoint(base, alone))
    tensors = load_file(file)
    name = next(name for name in tensors if "q_proj.lora_A" in name)
    for change, message in (
        (
            {name: tensors[name][:, :-1].contiguous()},
            r"has the shape \[64, 63\], the model's \[64, 64\]",
        ),
        (
            {name.replace("lora_A", "lora_magnitude_vector"): tensors[name].clone()},
            "fits no tensor",
        ),
        (
            {name: tensors[name][:-1].clone()},
            r"q_proj\.weight has an A of shape .* which are no matrices of one rank",
        ),
    ):
        save_file({n: x for n, x in (tensors | change).items() if x is not None}, file)
        with pytest.raises(ValueError, match=message):
            load_model(Checkpoint(base, folder))
    file.unlink()
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors"):
        load_model(Checkpoint(base, folder))
