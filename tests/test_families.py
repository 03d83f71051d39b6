"""Families whose arithmetic is Llama's but for a field: what their folders hold beside it. Logits
and greedy texts of all of them are compared in test_model.py and test_generate.py; here are names,
nested configs, ranks and compiled code.
"""

import copy
import json
import types

import pytest
import torch
from conftest import BASE, FAMILIES, changed_family, config_json, generate, oracle
from safetensors.torch import load_file, save_file

import cli.quantize as quantize_command
import cli.quantized_folder as quantized_folder
import loading.checkpoint as checkpoint
import loading.models as models
from decoding.engine import Engine
from decoding.sampling import Sampling
from drafts.base import ModelDraft
from drafts.ngram import NgramDraft
from drafts.target_layers import layer_subset
from loading.checkpoint import Checkpoint, load_config, load_model
from loading.config import config_from_hf
from loading.saving import save_model
from model import gelu
from tp import Ranks, check_divisible

NEW = [
    "smollm3",
    "phi-4",
    "phi-3",
    "phi-4-mini",
    "granite",
    "olmo2",
    "olmo3",
    "seed-oss",
    "ernie-4.5",
    "hunyuan",
    "exaone-4",
    "exaone-4-small",
    "ministral-3",
]


@pytest.mark.parametrize("family", ["phi-4", "granite", "olmo3", "gemma-3"])
def test_calibration_sees_what_decoding_computes(family, folder_of, tmp_path):
    """GPTQ runs layer by layer: with another embedding's scale, rotation or order of norms its
    inputs would be others, and its error in the last layer's sums larger than rounding's."""
    folder = folder_of(family)
    model, tokens = load_model(folder, dtype=torch.float32, pack=False), torch.arange(5, 45)[None]
    pos, states = torch.arange(40)[None], [model.embedded(tokens)]
    for number in range(len(model.layers)):
        states = quantized_folder.run_block(model, number, states)
    assert torch.equal(model.norm(states[0]), model.hidden(tokens, pos))


def test_calibration_begins_with_scaled_embeddings(folder_of, tmp_path, monkeypatch):
    model = load_model(folder_of("granite"), dtype=torch.float32, pack=False)
    (tmp_path / "text").write_text("x" * 60)
    stub = types.SimpleNamespace(encode=lambda text, bos=None: [ord(char) % 131 for char in text])
    monkeypatch.setattr(quantized_folder, "load_tokenizer", lambda folder: stub)
    args = types.SimpleNamespace(
        checkpoint="", calibration=tmp_path / "text", context=30, samples=2, device="cpu"
    )
    states = quantized_folder.calibration_states(args, model)
    assert torch.equal(states[0], model.embed(torch.full((2, 30), ord("x"))) * 3.0)


def test_some_of_the_layers_rotate_as_they_did(folder_of):
    """A draft of layers 1 and 3, which do not rotate: block by block, on their own."""
    model, tokens, pos = (
        load_model(folder_of("smollm3"), dtype=torch.float32),
        torch.arange(9)[None],
        torch.arange(9),
    )
    x, keys = model.embed(tokens), model.visible_by_window(pos[None], None, torch.float32)[None]
    for number in (1, 3):
        x = model.layers[number](x, pos[None], None, keys, None)
    assert torch.equal(layer_subset(model, [1, 3]).hidden(tokens, pos), model.norm(x))


def test_fused_matrices_are_quantized_and_cut_as_three(folder_of):
    """Phi-3 stores q, k and v as one: a rank holds its heads of each, quantized on the way or
    not."""
    folder, config = folder_of("phi-4"), load_config(folder_of("phi-4"))
    stored = load_file(folder / "model.safetensors")
    tensors = checkpoint.Checkpoint(folder).source.tensors
    E, H, G = config.head_dim, config.n_heads, config.n_kv_heads
    for scheme in (None, "int8"):
        whole = load_model(folder, dtype=torch.float32, quantize=scheme, pack=False)
        for rank in range(2):
            ranks = Ranks(rank, 2)
            schemes = models.same_schemes(config, scheme)
            model = models.allocate(
                models.empty_model(config, torch.float32, schemes, ranks), "cpu"
            )
            for name in ("self_attn.qkv_proj", "mlp.gate_up_proj"):
                ours = {"self_attn.qkv_proj": "attention.qkv", "mlp.gate_up_proj": "ffn.gate_up"}[
                    name
                ]
                sizes = (H * E, G * E, G * E) if "qkv" in name else (config.ffn_dim, config.ffn_dim)
                want = stored[f"model.layers.1.{name}.weight"]
                if scheme:
                    want = whole.layers[1].get_submodule(ours).dequantized(torch.float32)
                want = torch.cat([part.chunk(2)[rank] for part in want.split(sizes)])
                linear = model.layers[1].get_submodule(ours)
                part = "codes" if scheme else "weight"
                models.load_parameters(model, [f"layers.1.{ours}.{part}"], tensors, ranks)
                assert torch.equal(
                    linear.dequantized(torch.float32) if scheme else linear.weight, want
                ), (name, scheme)


@pytest.mark.parametrize("scheme, name", [("int8", "weight_scale"), ("int4-g32", "codes")])
def test_a_quantized_folder_keeps_the_familys_names(scheme, name, folder_of, tmp_path):
    quantize_command.main(
        [
            "--checkpoint",
            str(folder_of("phi-4")),
            "--scheme",
            scheme,
            "--output",
            str(tmp_path / "q"),
        ]
    )
    names = json.loads((tmp_path / "q" / "model.safetensors.index.json").read_text())["weight_map"]
    assert f"model.layers.2.self_attn.qkv_proj.{name}" in names
    got = load_model(tmp_path / "q", dtype=torch.float32, pack=False)
    want = load_model(folder_of("phi-4"), dtype=torch.float32, quantize=scheme, pack=False)
    assert all(torch.equal(*pair) for pair in zip(got.parameters(), want.parameters(), strict=True))


@pytest.mark.parametrize("family", ["llama-3.2", "phi-4", "olmo2", "granite"])
def test_transformers_reads_dense_families_in_8_bits(family, folder_of, tmp_path, capsys):
    """As quantize.py says; tied heads, fused matrices and other names of norms among them."""
    from transformers import AutoModelForCausalLM

    pytest.importorskip("compressed_tensors")
    quantize_command.main(
        [
            "--checkpoint",
            str(folder_of(family)),
            "--scheme",
            "int8",
            "--output",
            str(tmp_path / "q"),
        ]
    )
    assert "; transformers reads it as compressed-tensors" in capsys.readouterr().err
    tokens = torch.arange(5, 25)[None]
    want = load_model(tmp_path / "q", dtype=torch.float32)(tokens, torch.arange(20))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.float32)
    with torch.no_grad():
        assert (theirs(tokens).logits - want).abs().max() <= 1e-4 * want.abs().max()


def test_norms_over_all_heads_are_not_divided(folder_of):
    with pytest.raises(
        ValueError, match="normed over all heads at once and cannot be divided over 2 ranks"
    ):
        check_divisible(load_config(folder_of("olmo2")), 2)


# ----------------------------------------------------------------------- text models among others


def edited(folder, to, names, hf) -> None:
    """A copy with tensors and config.json changed."""
    to.mkdir()
    save_file(names(load_file(folder / "model.safetensors")), to / "model.safetensors")
    (to / "config.json").write_text(json.dumps(hf(config_json(folder))))


@pytest.mark.parametrize(
    ("wrapper", "text"),
    [("mistral3", "mistral-v0.2"), ("mistral3", "ministral-3"), ("gemma3", "gemma-3")],
)
@pytest.mark.parametrize("lead", ["language_model.model.", "model.language_model."])
def test_a_wrapper_is_its_text_model(wrapper, text, lead, folder_of, tmp_path, capsys):
    """As the hub has it, and as transformers 5 saves it; vision tensors are left out by name, and
    saved again it is a plain text model, which transformers reads."""
    from transformers import AutoModelForCausalLM

    def names(tensors):
        head = "language_model.lm_head." if lead.startswith("lang") else "lm_head."
        tower = "vision_tower." if lead.startswith("lang") else "model.vision_tower."
        found = {
            n.replace("model.", lead, 1).replace("lm_head.", head): t for n, t in tensors.items()
        }
        return found | {f"{tower}patch_conv.weight": torch.ones(2, 2)}

    def outer(hf):
        return {
            "model_type": wrapper,
            "text_config": hf,
            "vision_config": {"model_type": "pixtral"},
            "tie_word_embeddings": False,
            "dtype": "float32",
        }

    edited(folder_of(text), tmp_path / "m", names, outer)
    model = load_model(tmp_path / "m", dtype=torch.float32)
    assert "1 tensors are not the text model's" in capsys.readouterr().err
    want = load_model(folder_of(text), dtype=torch.float32)
    assert model.config == want.config
    assert all(
        torch.equal(*pair) for pair in zip(model.parameters(), want.parameters(), strict=True)
    )
    save_model(model, tmp_path / "again", config_json(tmp_path / "m"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32)
    tokens = torch.arange(5, 25)[None]
    with torch.no_grad():
        assert torch.allclose(again(tokens).logits, oracle(text)(tokens).logits, atol=1e-5)


@pytest.mark.parametrize("lead", ["language_model.model.", "model.language_model."])
def test_an_adapter_of_a_wrapper_is_its_text_models(lead, folder_of, tmp_path):
    """Names in PEFT's layout, with one matrix of the vision tower; test_adapter.py has PEFT's own
    files."""
    text = folder_of("gemma-3")

    def adapter(path, lead, vision):
        module = "layers.1.self_attn.q_proj"
        pair = {"A": torch.full((2, 64), 0.1), "B": torch.full((128, 2), 0.1)}
        names = [f"{lead}{module}", *vision]
        tensors = {
            f"base_model.model.{name}.lora_{letter}.weight": part.clone()
            for name in names
            for letter, part in pair.items()
        }
        path.mkdir()
        save_file(tensors, path / "adapter_model.safetensors")
        settings = {"peft_type": "LORA", "lora_alpha": 2, "alpha_pattern": {f"{lead}{module}": 6}}
        (path / "adapter_config.json").write_text(json.dumps(settings))
        return path

    edited(
        text,
        tmp_path / "m",
        lambda tensors: {name.replace("model.", lead, 1): t for name, t in tensors.items()},
        lambda hf: {"model_type": "gemma3", "text_config": hf, "tie_word_embeddings": False},
    )
    tower = ["model.vision_tower.layers.0.self_attn.q_proj", "vision_tower.layers.0.q_proj"]
    wrapped = Checkpoint(tmp_path / "m", adapter(tmp_path / "a", lead, tower))
    plain = Checkpoint(text, adapter(tmp_path / "b", "model.", []))
    models = [load_model(checkpoint, dtype=torch.float32) for checkpoint in (wrapped, plain)]
    changed, want = (model.layers[1].attention.qkv.weight for model in models)
    assert torch.equal(changed, want)
    bare = load_model(text, dtype=torch.float32).layers[1].attention.qkv.weight
    assert torch.allclose(want[:128] - bare[:128], torch.full((128, 64), 6 / 2 * 0.02), atol=1e-6)


def test_mistral_3_with_a_tensor_of_no_known_part(folder_of, tmp_path):
    edited(
        folder_of("mistral-v0.2"),
        tmp_path / "m",
        lambda t: t | {"audio_tower.x": torch.ones(1)},
        lambda hf: {"model_type": "mistral3", "text_config": hf},
    )
    with pytest.raises(ValueError, match=r"unexpected: audio_tower\.x"):
        load_model(tmp_path / "m")


def test_gemma_3_as_published():
    """The hub's wrappers leave out what transformers has as defaults; earlier text models have one
    key for each of RoPE's bases, and a period of windows."""
    from transformers import AutoConfig

    text = {
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }
    config = config_from_hf({"model_type": "gemma3", "text_config": text})
    theirs = AutoConfig.for_model(**text)
    assert config == config_from_hf(theirs.to_dict()) and config.tie_embeddings
    assert config.windows == (1024,) * 5 + (None, 1024)
    assert config.rope_types == (1, 1, 1, 1, 1, 0, 1)
    assert (config.rope_theta, config.rope_factor, config.rope_local_theta) == (1e6, 8.0, 1e4)
    older = {"rope_local_base_freq": 5e3, "rope_theta": 2e6, "sliding_window_pattern": 2}
    config = config_from_hf({**text, **older})
    assert config == config_from_hf(AutoConfig.for_model(**{**text, **older}).to_dict())
    assert (config.rope_theta, config.rope_local_theta) == (2e6, 5e3)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_activation", "gelu"),
        ("use_bidirectional_attention", True),
        ("final_logit_softcapping", 30.0),
        ("attn_logit_softcapping", 50.0),
    ],
)
def test_what_changes_gemmas_arithmetic_is_refused(key, value):
    with pytest.raises(ValueError, match=f"{key} = {value!r} is not supported"):
        config_from_hf({"model_type": "gemma3_text", key: value})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gemmas_embeddings_are_scaled_in_their_dtype(dtype, tmp_path):
    """The root of 72 is 8.4853, and 8.5 in bfloat16."""
    with changed_family("gemma-3", hidden_size=72) as family:
        theirs = oracle(family)
        theirs.save_pretrained(tmp_path)
        model = load_model(tmp_path, dtype=dtype)
        tokens = torch.arange(3, 40)[None]
        with torch.no_grad():
            embed = copy.deepcopy(theirs.model.embed_tokens).to(dtype)
            assert torch.equal(model.embedded(tokens), embed(tokens))


def test_gemmas_norms_add_their_offset_in_float32(folder_of):
    """In bfloat16, 1 + w would lose w's last digits."""
    norm = load_model(folder_of("gemma-3"), dtype=torch.bfloat16).layers[0].attention_norm
    theirs = copy.deepcopy(oracle("gemma-3").model.layers[0].input_layernorm).bfloat16()
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        assert torch.equal(norm(x), theirs(x))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("scheme", [None, "int8", "int4-g32"])
def test_gemma_3_drafted_is_plain(scheme, folder_of):
    """Rows of unequal lengths, which leave the windows, by lookup and by some of the layers."""
    model = load_model(folder_of("gemma-3"), dtype=torch.float32, quantize=scheme)
    layers = [0, 1, 2]
    prompts = [[40, 3, 99, 12, 7], [*range(5, 30)]]
    texts = []
    for drafter in (None, NgramDraft(1), ModelDraft(layer_subset(model, layers), on_layers=layers)):
        drafting = {"drafter": drafter, "speculate_k": 3} if drafter else {}
        rows = [[], []]
        options = {"sampling": Sampling(0), "max_new_tokens": 40, **drafting}
        for row, id in generate(model, prompts, **options):
            rows[row].append(id)
        texts.append(rows)
    assert texts == [texts[0]] * 3 and len({*texts[0][0], *texts[0][1]}) > 4


def test_gelu_is_torchs():
    """Also where its cube overflows, and element by element the same in any tensor."""
    x = torch.cat((torch.linspace(-20, 20, 4001), torch.tensor([-1e30, 1e30, -0.0])))
    expected = torch.nn.functional.gelu(x.double(), approximate="tanh")
    assert (gelu(x).double() - expected).abs().max() <= 2e-6
    assert torch.equal(gelu(x), torch.cat([gelu(part) for part in x.split(7)]))
    assert gelu(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("family", ["qwen2.5-vl", "qwen3-vl", "qwen3-vl-moe"])
def test_qwen_vl_is_its_text_model(family, folder_of, tmp_path, capsys):
    """Vision tensors are left out and counted; saved again it is a text model of its own."""
    model, tokens = load_model(folder_of(family), dtype=torch.float32), torch.arange(5, 25)[None]
    stored = load_file(folder_of(family) / "model.safetensors")
    num_vision = sum("visual." in name for name in stored)
    assert num_vision > 10 and f"{num_vision} tensors are not" in capsys.readouterr().err
    save_model(model, tmp_path / "again", config_json(folder_of(family)))
    again = load_model(tmp_path / "again", dtype=torch.float32)
    assert again.config == model.config and capsys.readouterr().err == ""
    assert torch.equal(again(tokens, torch.arange(20)), model(tokens, torch.arange(20)))


def test_qwen_2_5_vl_as_first_published(folder_of, tmp_path):
    """All keys side by side, and MRoPE named so."""

    def flat(hf):
        text = {**hf["text_config"], **hf, "torch_dtype": "float32"}
        for key in ("text_config", "rope_parameters", "layer_types"):
            text.pop(key, None)
        mrope = {"type": "mrope", "mrope_section": [2, 3, 3]}
        return text | {"rope_theta": 1e6, "rope_scaling": mrope}

    folder = folder_of("qwen2.5-vl")
    edited(folder, tmp_path / "m", lambda tensors: tensors, flat)
    got, want = (load_model(path, dtype=torch.float32) for path in (tmp_path / "m", folder))
    assert got.config == want.config and got.config.tie_embeddings
    assert all(torch.equal(*pair) for pair in zip(got.parameters(), want.parameters(), strict=True))


@pytest.mark.parametrize("size", [48, 32])
def test_qwen3_vl_moe_as_published(size, folder_of, tmp_path):
    """The hub's experts are transposed, those that transformers 5 saves are not. With a size of 32
    gate and up together are square."""

    def published(tensors):
        return {
            name: x.mT.contiguous() if name.endswith(("gate_up_proj", "down_proj")) else x
            for name, x in tensors.items()
        }

    with changed_family("qwen3-vl-moe", moe_intermediate_size=size) as family:
        oracle(family).save_pretrained(tmp_path / "saved")
        edited(tmp_path / "saved", tmp_path / "published", published, lambda hf: hf)
        models = [
            load_model(tmp_path / name, dtype=torch.float32) for name in ("saved", "published")
        ]
        tokens = torch.arange(5, 25)[None]
        got, again = (model(tokens, torch.arange(20)) for model in models)
        with torch.no_grad():
            assert (oracle(family)(tokens).logits - got).abs().max() <= 1e-4
        assert torch.equal(got, again)


def test_layers_without_rope_and_shared_experts_of_granite_swa():
    hf = {**BASE, **FAMILIES["granite-swa"]}
    config = config_from_hf(hf)
    assert config.rope_types == (None, 0, 0) and config.rope_theta == 10000.0
    assert config.windows == (None, 9, 9)  # without layer_types too
    plain = config_from_hf({**hf, "layer_rope_theta": None})
    assert plain.rope_types == ()
    moe = {**BASE, **FAMILIES["granite-moe-swa"]}
    assert config_from_hf(moe).shared_dim == 64
    assert config_from_hf({**moe, "shared_intermediate_size": 0}).shared_dim == 0
    for thetas in ([0, 10000.0, 5000.0], [0, 10000.0], ["x"] * 3):
        message = "layer_rope_theta = .* must be 10000.0 or 0 for each of 3 layers"
        with pytest.raises(ValueError, match=message):
            config_from_hf({**hf, "layer_rope_theta": thetas})


def test_glm_beside_a_layer_that_predicts_further_ahead(folder_of, tmp_path, capsys):
    """It has the number behind the last layer's, under which no other family has tensors."""
    extra = {"model.layers.3.eh_proj.weight": torch.ones(64, 128)}
    edited(folder_of("glm-4.5"), tmp_path / "m", lambda tensors: tensors | extra, lambda hf: hf)
    model, tokens = load_model(tmp_path / "m", dtype=torch.float32), torch.arange(5, 45)[None]
    assert "1 tensors are not the text model's" in capsys.readouterr().err
    with torch.no_grad():
        assert (
            model(tokens, torch.arange(40)) - oracle("glm-4.5")(tokens).logits
        ).abs().max() <= 1e-4
    edited(folder_of("llama-3"), tmp_path / "n", lambda tensors: tensors | extra, lambda hf: hf)
    with pytest.raises(ValueError, match=r"unexpected: model\.layers\.3\.eh_proj"):
        load_model(tmp_path / "n")


def test_mimo_is_qwen2_beside_layers_that_predict_further_ahead(folder_of, tmp_path, capsys):
    extra = {"model.mtp_layers.0.input_proj.weight": torch.ones(64, 128)}
    edited(
        folder_of("r1-distill-qwen"),
        tmp_path / "m",
        lambda tensors: tensors | extra,
        lambda hf: {
            **hf,
            "model_type": "mimo",
            "num_nextn_predict_layers": 1,
            "attention_bias": True,
            "auto_map": {"AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM"},
        },
    )
    model, tokens = load_model(tmp_path / "m", dtype=torch.float32), torch.arange(5, 45)[None]
    assert "1 tensors are not the text model's" in capsys.readouterr().err
    with torch.no_grad():
        assert (
            model(tokens, torch.arange(40)) - oracle("r1-distill-qwen")(tokens).logits
        ).abs().max() <= 1e-4
    quantize_command.main(
        ["--checkpoint", str(tmp_path / "m"), "--scheme", "int8", "--output", str(tmp_path / "q")]
    )
    assert "; other programs refuse it" in capsys.readouterr().err  # which have no MiMo
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    assert "auto_map" not in config and config["quantization_config"] == {"format": "quickdraft"}


def test_exaones_older_pattern_is_read():
    hf = {**BASE, **FAMILIES["exaone-4"], "sliding_window_pattern": "LLLG", "layer_types": None}
    config = config_from_hf(hf)
    assert config.windows == (9, 9, 9, None, 9) and config.rope_types == (0, 0, 0, None, 0)


def test_exaone_4_5_as_published(folder_of, tmp_path, capsys):
    """Its text model had a type of its own, and an MTP head beside it."""
    extra = {"mtp.fc.weight": torch.ones(64, 128)}
    edited(
        folder_of("exaone-4.5"),
        tmp_path / "m",
        lambda tensors: tensors | extra,
        lambda hf: hf | {"text_config": hf["text_config"] | {"model_type": "exaone4_5_text"}},
    )
    model, tokens = load_model(tmp_path / "m", dtype=torch.float32), torch.arange(5, 45)[None]
    assert "19 tensors are not the text model's" in capsys.readouterr().err
    with torch.no_grad():
        logits = oracle("exaone-4.5")(tokens).logits
        assert (model(tokens, torch.arange(40)) - logits).abs().max() <= 1e-4


@pytest.mark.parametrize("kind", ["su", "yarn"])
def test_phi_3s_older_names_of_longrope(kind):
    hf = {**BASE, **FAMILIES["phi-4-mini"]}
    found = dict(hf["rope_parameters"])
    found.pop("rope_type")
    theta = found.pop("rope_theta")
    found.pop("partial_rotary_factor")
    found.pop("original_max_position_embeddings")
    old = {
        **hf,
        "rope_parameters": None,
        "rope_scaling": {**found, "type": kind},
        "rope_theta": theta,
    }
    assert config_from_hf(old) == config_from_hf(hf)


# ---------------------------------------------------------------------------------- compiled code


@pytest.mark.compiled
@pytest.mark.parametrize(
    "family",
    [
        "smollm3",
        "olmo3",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("phi-4-mini", "ministral-3", "ernie-4.5", "hunyuan")
        ),
    ],
)
def test_compiled_steps_of_unlike_layers(family, folder_of):
    """A block is compiled once for all layers alike: those that do not rotate, or rotate otherwise,
    are others."""
    model = load_model(folder_of(family), dtype=torch.float32)
    prompt, texts = [[40, 3, 99, 12, 7, 61, 20]], []
    for compiled in (False, True):
        engine = Engine(model, 1, 64, compile=compiled)
        options = {"sampling": Sampling(0), "max_new_tokens": 40, "engine": engine}
        texts.append([id for _, id in generate(model, prompt, **options)])
    assert texts[0] == texts[1]
