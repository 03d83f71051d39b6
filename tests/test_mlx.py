"""quantized/floats.py: folders of mlx_lm.convert hold the weights that MLX computes with.

`quantize` below is MLX's definition (python/src/ops.cpp): w = code * scale + bias in groups, codes
packed bit by bit from the lowest bit of a row's words on. Weights are compared with the same
formula in float64. MLX itself is the witness in the last test, where it is installed.
"""

import functools
import json
import re
from pathlib import Path

import pytest
import torch
from conftest import BASE, config_json, rope
from safetensors.torch import load_file, save_file
from test_quantized_folders import bit_stream

import cli.quantize as quantize_command
import loading.checkpoint as checkpoint
import loading.models as models
from loading.files import open_tensors
from loading.folder import Matrix
from loading.quantization import choose_schemes
from loading.quantized.detection import mlx_layout
from loading.saving import save_model
from loading.stored import in_floats
from loading.weight_names import stored_names
from tp import Ranks
from weights.formats import FORMATS, dequantize_tensor
from weights.walker import named_linears, pack_model

load_model = functools.partial(checkpoint.load_model, pack=False)
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# Every group of 128 divides over two ranks.
DENSE = {
    **BASE,
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "vocab_size": 96,
    "dtype": "bfloat16",
    **rope(10000.0),
}
EXPERT = re.compile(r"(.*\.)experts\.(\d+)\.(\w+)\.weight")
SIZES = [(4, 32), (4, 64), (4, 128), (2, 64), (3, 32), (6, 64), (8, 64)]
PARTS = ("weight", "scales", "biases")
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def quantize(w: torch.Tensor, dtype, bits=4, group_size=64, mode="affine"):
    """({part: stored tensor}, the weights that it stands for) of w (out, in)."""
    groups = w.unflatten(1, (-1, group_size))
    if mode == "mxfp4":
        exponent = groups.abs().amax(-1).log2().floor() - 2
        steps = torch.ldexp(groups, -exponent[..., None])
        codes = (steps.abs()[..., None] - E2M1).abs().argmin(-1) + 8 * (steps < 0)
        elements = torch.cat((E2M1, -E2M1))[codes]
        parts = {"scales": (exponent + 127).to(torch.uint8)}
        weight = torch.ldexp(elements.double(), exponent[..., None])
    else:
        low, high = groups.aminmax(dim=-1)
        is_low = low.abs() > high.abs()  # MLX begins at the end of larger size
        scale = (torch.where(is_low, high - low, low - high) / (2**bits - 1)).to(dtype)
        bias = torch.where(is_low, low, high).to(dtype)
        codes = ((groups - bias[..., None].float()) / scale[..., None].float()).round()
        codes = codes.clamp(0, 2**bits - 1)
        parts = {"scales": scale, "biases": bias}
        weight = codes.double() * scale.double()[..., None] + bias.double()[..., None]
    words = bit_stream(codes.flatten(1).T.int(), bits).T
    parts["weight"] = words.contiguous().view(torch.uint32)
    return parts, weight.flatten(1).float()


def drawn(hf: dict) -> dict[str, torch.Tensor]:
    """Random tensors for a dense config.json, by Hugging Face names."""
    config = checkpoint.config_from_hf(hf)
    generator = torch.Generator().manual_seed(1)
    shapes = models.expected_tensors(config, models.empty_model(config, F32))
    return {
        name: 0.1 * torch.randn(shape, generator=generator) for name, (shape, _) in shapes.items()
    }


def write(folder: Path, hf: dict, tensors: dict, settings: dict, dtype=BF16) -> dict:
    """A folder of MLX with these settings; {Hugging Face name: the weight that it stands for}."""
    shared = {key: value for key, value in settings.items() if not isinstance(value, dict | bool)}
    stored, weights, stacks = {}, {}, {}
    for name, tensor in tensors.items():
        path = name.removesuffix(".weight")
        if match := EXPERT.fullmatch(name):
            path = f"{match[1]}switch_mlp.{match[3]}"
        own = settings.get(path, True)
        is_matrix = tensor.dim() == 2 and name.endswith(".weight")
        parts, weights[name] = {"weight": tensor.to(dtype)}, tensor.to(dtype).float()
        if is_matrix and own is not False:
            parts, weights[name] = quantize(tensor, dtype, **(shared if own is True else own))
        for part, value in parts.items():
            if match:
                stacks.setdefault(f"{path}.{part}", []).append(value)
            else:
                stored[f"{path}.{part}" if is_matrix else name] = value
    # MLX's unsigned words cannot be stacked by torch.
    for name, values in stacks.items():
        words = [
            value.view(torch.int32) if value.dtype == torch.uint32 else value for value in values
        ]
        stack = torch.stack(words)
        stored[name] = stack.view(torch.uint32) if values[0].dtype == torch.uint32 else stack
    folder.mkdir(parents=True, exist_ok=True)
    save_file(stored, folder / "model.safetensors")
    both = {"quantization": settings, "quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(hf | both))
    return weights


def oracle(config, weights: dict) -> torch.nn.Module:
    """A plain model of these weights in float32."""
    model = models.allocate(models.empty_model(config, F32), "cpu")
    headers = {name: (tuple(w.shape), ()) for name, w in weights.items()}
    tensors = in_floats(headers, weights.__getitem__)
    models.load_parameters(model, [name for name, _ in model.named_parameters()], tensors)
    return model


def assert_holds(model, weights: dict) -> None:
    """Every Linear and the embedding, bit for bit."""
    config = model.config
    for name, linear in named_linears(model):
        want = torch.cat([weights[source] for source in stored_names(config, f"{name}.weight")])
        quantized = hasattr(linear, "scheme")
        got = linear.dequantized(F32) if quantized else linear.weight
        assert torch.equal(got, want), name
    tokens = torch.arange(20)[None]
    assert torch.equal(model.embed(tokens)[0], weights["model.embed_tokens.weight"][:20])


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """(settings, whether tied, type of scales) -> (folder, weights) of a dense model"""

    @functools.cache
    def make(tied: bool = False, dtype=BF16, **settings):
        folder = tmp_path_factory.mktemp("mlx") / "model"
        hf = DENSE | {"tie_word_embeddings": tied}
        return folder, write(folder, hf, drawn(hf), settings, dtype)

    return make


# ------------------------------------------------------------------------------------ whole folders


@pytest.mark.one_in(5)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("bits, group", SIZES)
def test_weights_are_those_that_mlx_computes_with(bits, group, dtype, tied, written):
    """In our mlx formats, which have its form: w = code * scale + bias."""
    folder, weights = written(tied, dtype, group_size=group, bits=bits)
    model = load_model(folder, dtype=F32)
    assert {linear.scheme for _, linear in named_linears(model)} == {f"mlx{bits}-g{group}"}
    assert_holds(model, weights)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_mxfp4_is_ours(tied, written):
    folder, weights = written(tied, group_size=32, bits=4, mode="mxfp4")
    model = load_model(folder, dtype=F32)
    assert {linear.scheme for _, linear in named_linears(model)} == {"mxfp4"}
    assert_holds(model, weights)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_logits_are_those_of_the_weights(tied, written):
    """In float32 only the order of sums differs, as in test_quantized_folders.py: at most 512 terms
    in nine products that follow each other. A bias off by a step changes far more."""
    folder, weights = written(tied, group_size=64, bits=4)
    tokens, pos = torch.arange(40)[None], torch.arange(40)
    model = pack_model(load_model(folder, dtype=F32))
    plain = oracle(model.config, weights)
    want = plain(tokens, pos)
    limit = 9 * 512 * 2**-24 * want.abs().max()
    assert (model(tokens, pos) - want).abs().max() <= limit
    plain.layers[0].ffn.down.weight[:, :64] += 0.01
    assert (model(tokens, pos) - plain(tokens, pos)).abs().max() > limit


def test_an_older_folder_names_its_settings_once(written, tmp_path):
    """mlx-lm before 0.20 wrote `quantization` alone."""
    folder, weights = written(group_size=64, bits=4)
    hf = config_json(folder)
    del hf["quantization_config"]
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(hf))
    assert_holds(load_model(tmp_path, dtype=F32), weights)


@pytest.mark.parametrize("settings", [{"bits": 4}, {"bits": 8}, {"bits": 4, "mode": "mxfp4"}])
def test_pieces_of_two_ranks_are_slices(settings, written):
    """A rank's rows of q, k, v, gate, up, embedding and head, and its columns of o and down."""
    group = 32 if "mode" in settings else 64
    folder, weights = written(True, group_size=group, **settings)
    source = checkpoint.Checkpoint(folder).source
    schemes = choose_schemes(source, folder)
    for rank in range(2):
        ranks = Ranks(rank, 2)
        model = models.allocate(models.empty_model(source.config, F32, schemes, ranks), "cpu")
        parameters = [name for name, _ in model.named_parameters()]
        models.load_parameters(model, parameters, source.tensors, ranks)
        for name, linear in named_linears(model):
            names = stored_names(source.config, f"{name}.weight")
            dim = 1 if name.endswith(("out", "down")) else 0
            want = torch.cat([weights[source].chunk(2, dim)[rank] for source in names])
            assert torch.equal(dequantize_tensor(linear.parts(), linear.scheme), want), name


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_saved_again_it_is_the_same_model(tied, written, tmp_path):
    folder, weights = written(tied, group_size=64, bits=4)
    model = load_model(folder, dtype=F32)
    save_model(model, tmp_path / "again", config_json(folder))
    entry = config_json(tmp_path / "again")["quantization"]
    assert entry == {"scheme": "mlx4-g64", "head": "mlx4-g64"}
    assert_holds(load_model(tmp_path / "again", dtype=F32), weights)


def test_such_a_folder_is_not_quantized_again(written, tmp_path, capsys):
    folder, _ = written(group_size=64, bits=4)
    with pytest.raises(ValueError, match="is stored in mlx4-g64 and cannot be quantized to int8"):
        load_model(folder, quantize="int8")
    arguments = ["--scheme", "int8", "--output", str(tmp_path / "out")]
    with pytest.raises(SystemExit):
        quantize_command.main(["--checkpoint", str(folder), *arguments])
    assert "is stored in mlx already; use the original" in capsys.readouterr().err


# ---------------------------------------------------------------------------------- single modules


def test_modules_may_have_settings_of_their_own(tmp_path, capsys):
    """As in mlx-lm's mixed recipes. An object does not inherit the folder's settings."""
    layer = "model.layers.{}.{}"
    settings = {
        "group_size": 128,
        "bits": 4,
        layer.format(0, "self_attn.v_proj"): {"group_size": 64, "bits": 6},
        layer.format(0, "self_attn.o_proj"): False,
        layer.format(0, "mlp.down_proj"): {"group_size": 64, "bits": 8},
        layer.format(1, "mlp.down_proj"): {"group_size": 32, "bits": 4},
        layer.format(1, "self_attn.o_proj"): {"bits": 4},
        layer.format(1, "mlp.up_proj"): True,
        layer.format(1, "self_attn.q_proj"): {"group_size": 32, "bits": 4, "mode": "mxfp4"},
        "lm_head": {"group_size": 64, "bits": 4},
    }
    full = {
        path: {"group_size": 64} | entry if isinstance(entry, dict) else entry
        for path, entry in settings.items()
    }
    weights = write(tmp_path, DENSE, drawn(DENSE), full)
    hf = config_json(tmp_path) | {"quantization": settings, "quantization_config": settings}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    model = load_model(tmp_path, dtype=F32)
    assert_holds(model, weights)
    schemes = {name: getattr(linear, "scheme", None) for name, linear in named_linears(model)}
    assert schemes == {
        "layers.0.attention.qkv.0": "mlx4-g128",
        "layers.0.attention.qkv.1": "mlx4-g128",
        "layers.0.attention.qkv.2": "mlx6-g64",
        "layers.0.attention.out": None,
        "layers.0.ffn.gate_up": "mlx4-g128",
        "layers.0.ffn.down": "mlx8-g64",
        "layers.1.attention.qkv.0": "mxfp4",
        "layers.1.attention.qkv.1": "mlx4-g128",
        "layers.1.attention.qkv.2": "mlx4-g128",
        "layers.1.attention.out": "mlx4-g64",
        "layers.1.ffn.gate_up": "mlx4-g128",
        "layers.1.ffn.down": "mlx4-g32",
        "lm_head": "mlx4-g64",
    }
    # The embedding alone is looked up, not multiplied.
    assert capsys.readouterr().err.endswith(" GB in 16 bits: 1 in mlx4-g128\n")


@pytest.mark.parametrize(
    "wrapper, text", [("gemma3", "gemma-3"), ("qwen3_vl", "qwen3-vl"), ("qwen2_5_vl", "qwen2.5-vl")]
)
def test_a_wrapped_text_model_and_its_stored_head(wrapper, text, folder_of, tmp_path):
    """As MLX's programs write them: settings stand under the wrapper's names, which the tensors
    have too, and some store the tied head again."""
    hf = config_json(folder_of(text))
    hf = hf.get("text_config", hf) | {"tie_word_embeddings": True}
    lead = "language_model.model.layers.{}.{}"
    settings = {
        "group_size": 32,
        "bits": 4,
        lead.format(0, "mlp.down_proj"): {"group_size": 32, "bits": 8},
        lead.format(1, "self_attn.o_proj"): False,
        "language_model.model.embed_tokens": {"group_size": 32, "bits": 6},
    }
    tensors = {f"language_model.{name}": tensor for name, tensor in drawn(hf).items()}
    weights = write(tmp_path, hf, tensors, settings)
    stored = load_file(tmp_path / "model.safetensors")
    parts = {part: stored[f"language_model.model.embed_tokens.{part}"] for part in PARTS}
    head = {f"language_model.lm_head.{part}": value.clone() for part, value in parts.items()}
    tower = {"vision_tower.patch_embed.proj.weight": torch.ones(2, 2)}
    save_file(stored | head | tower, tmp_path / "model.safetensors")
    both = {"quantization": settings, "quantization_config": settings}
    settings["language_model.lm_head"] = settings["language_model.model.embed_tokens"]
    outer = {"model_type": wrapper, "text_config": hf} | both
    (tmp_path / "config.json").write_text(json.dumps(outer))
    model = load_model(tmp_path, dtype=F32)
    weights = {name.removeprefix("language_model."): weight for name, weight in weights.items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    assert_holds(model, weights)
    assert model.layers[0].ffn.down.scheme == "mlx8-g32"
    assert model.lm_head.scheme == "mlx6-g32" and not model.config.tie_embeddings


def test_stacked_experts_are_refused_by_name(folder_of, tmp_path):
    original = checkpoint.Checkpoint(folder_of("qwen3-moe"))
    tensors = {name: stored[...] for name, stored in original.model_tensors.items()}
    write(tmp_path, original.hf, tensors, {"group_size": 32, "bits": 4})
    with pytest.raises(ValueError, match=r"unexpected: model\.layers\.0\.mlp.*switch_mlp"):
        load_model(tmp_path)


# ---------------------------------------------------------------------------- what could go wrong

REFUSED = {
    "5 bits": ({"bits": 5, "group_size": 64}, "quantization: bits = 5"),
    "groups of 16": ({"bits": 4, "group_size": 16}, "quantization: group_size = 16"),
    "nvfp4": ({"bits": 4, "group_size": 16, "mode": "nvfp4"}, "quantization: mode = 'nvfp4'"),
    "mxfp4 in groups of 64": (
        {"bits": 4, "group_size": 64, "mode": "mxfp4"},
        "quantization: group_size = 64",
    ),
    "activations": (
        {"bits": 4, "group_size": 64, "quantize_input": True},
        "quantization: quantize_input = True",
    ),
}


def test_rope_of_neighbouring_pairs_is_refused(tmp_path):
    """A key of mlx-lm's own, which changes the arithmetic."""
    hf = DENSE | {"quantization": {"bits": 4, "group_size": 64}, "rope_traditional": True}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    with pytest.raises(ValueError, match=r"rope_traditional = True"):
        load_model(tmp_path)


@pytest.mark.parametrize("name", REFUSED)
def test_other_settings_are_refused_by_key(name, tmp_path):
    settings, message = REFUSED[name]
    (tmp_path / "config.json").write_text(json.dumps(DENSE | {"quantization": settings}))
    with pytest.raises(ValueError) as error:
        load_model(tmp_path)
    assert str(error.value).startswith(str(tmp_path / "config.json"))
    assert message in str(error.value)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"bits": 8}, r"embed_tokens\.weight is \[96, 32\] instead of \[96, 64\]"),
        ({"group_size": 32}, r"embed_tokens\.biases is \[96, 4\] instead of \[96, 8\]"),
        ({"mode": "mxfp4", "group_size": 32}, r"unexpected: .*biases"),
    ],
)
def test_settings_that_do_not_fit_the_tensors_are_refused(settings, message, written, tmp_path):
    folder, _ = written(group_size=64, bits=4)
    hf = config_json(folder)
    hf["quantization"] |= settings
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(hf))
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path)


def test_settings_of_a_module_are_refused_with_its_name(written, tmp_path):
    folder, _ = written(group_size=64, bits=4)
    hf = config_json(folder)
    hf["quantization"]["model.layers.1.mlp.up_proj"] = {"bits": 7}
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(hf))
    with pytest.raises(
        ValueError, match=r"layers\.1\.mlp\.up_proj: .*quantization: bits = 7 is not"
    ):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "mode, bits, group",
    [
        ("mxfp4", 4, 32),
        *(("affine", bits, group) for bits in (2, 3, 4, 6, 8) for group in (32, 64, 128)),
    ],
)
def test_mlx_itself_agrees(mode, bits, group, tmp_path):
    """Its writer, and its own dequantization in float32."""
    mx = pytest.importorskip("mlx.core")
    w = mx.random.normal((24, 256), key=mx.random.key(bits))
    theirs = mx.quantize(w, group, bits, mode)
    names = ("m.weight", "m.scales", "m.biases")
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(zip(names, theirs)))
    want = torch.tensor(mx.dequantize(*theirs, group_size=group, bits=bits, mode=mode).tolist())
    layout = mlx_layout({"mode": mode, "bits": bits, "group_size": group})
    m = Matrix("m", 24, 256, open_tensors([tmp_path / "model.safetensors"]), layout)
    scheme = layout.fit([m]).exact
    parts = {part: layout.part(m, scheme, part) for part in FORMATS[scheme].shapes(24, 256)}
    got = dequantize_tensor(parts, scheme)
    assert (got - want).abs().max() <= 2**-23 * want.abs().max()
    assert {name: shape for name, (shape, _) in layout.tensors(m).items()} == {
        name.removeprefix("m."): part.shape for name, part in zip(names, theirs)
    }
