"""floats.py: folders of fp8 blocks, static fp8, MX, NVFP4 and bitsandbytes' 4 bits hold the
published weights.

Every matrix is drawn as random codes and scales and dequantized here a second time, block by block
in float64 or in the published order of float32 operations, without the reader's code. Sizes are no
multiples of a block: q has 192 rows and k, v 96, so that blocks of 128 begin anew inside the fused
matrix and end cut off. Where a real program's package is installed, its writer is a second witness.
"""

import functools
import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import BASE, config_json, rope
from safetensors.torch import load_file, save_file
from test_quantized_folders import FUSED, shapes

import loading.checkpoint as checkpoint
import loading.models as models
from loading.quantization import choose_schemes
from loading.saving import save_model
from tests.test_quantized_folders import TOKENS, compressed
from tp import Ranks
from weights.formats import dequantize_tensor
from weights.linears import QuantizedLinear
from weights.walker import pack_model

load_model = functools.partial(checkpoint.load_model, pack=False)
D, F, H, G = 192, 320, 4, 2
HF = {
    **BASE,
    "model_type": "llama",
    "hidden_size": D,
    "intermediate_size": F,
    "num_hidden_layers": 1,
    "num_attention_heads": H,
    "num_key_value_heads": G,
    "vocab_size": 96,
    "dtype": "bfloat16",
    **rope(10000.0),
}
SHAPES = shapes(D, F)
BF16, F32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
# --------------------------------------------------------------- matrices, and what they stand for


def fp8_codes(shape, generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator).mul(100).clamp(-448, 448).to(E4M3)


def blocks(shape, generator, dtype=F32, name="weight_scale_inv", extra=()):
    """A scale for each 128 x 128; the last ones over what is there."""
    codes, (rows, columns) = fp8_codes(shape, generator), (-(-n // 128) for n in shape)
    scale = (0.0004 + 0.0012 * torch.rand(rows, columns, generator=generator)).to(dtype)
    weight = torch.empty(shape)
    for i in range(rows):
        for j in range(columns):
            block = slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1))
            weight[block] = (codes[block].double() * scale[i, j].double()).float()
    return {"weight": codes, name: scale, **dict.fromkeys(extra, torch.tensor(0.7))}, weight


def fp8_groups(shape, generator):
    """A scale for each row and 128 inputs."""
    codes, columns = fp8_codes(shape, generator), -(-shape[1] // 128)
    scale = (0.0004 + 0.0012 * torch.rand(shape[0], columns, generator=generator)).bfloat16()
    wide = scale.double().repeat_interleave(128, 1)[:, : shape[1]]
    return {"weight": codes, "weight_scale": scale}, (codes.double() * wide).float()


def one_scale(shape, generator, name="weight_scale", extra=(), scalar=()):
    codes, scale = fp8_codes(shape, generator), 0.0004 + 0.0012 * torch.rand(1, generator=generator)
    weight = (codes.double() * scale.double()).float()
    return {
        "weight": codes,
        name: scale.reshape(scalar),
        **dict.fromkeys(extra, torch.tensor([0.7])),
    }, weight


WEIGHTS_ONLY = "here only its weights are"
E2M1 = torch.tensor(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
)


def nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Low nibble first."""
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)


def mxfp4(shape, generator):
    codes = torch.randint(0, 16, shape, generator=generator)
    scale = torch.randint(110, 122, (shape[0], shape[1] // 32), generator=generator)
    weight = E2M1[codes] * torch.exp2(scale - 127.0).repeat_interleave(32, 1)
    return {"weight_packed": nibbles(codes), "weight_scale": scale.to(torch.uint8)}, weight


def mxfp8(shape, generator):
    codes = fp8_codes(shape, generator)
    scale = torch.randint(112, 118, (shape[0], shape[1] // 32), generator=generator)
    weight = codes.float() * torch.exp2(scale - 127.0).repeat_interleave(32, 1)
    return {"weight": codes, "weight_scale": scale.to(torch.uint8)}, weight


def nvfp4(shape, generator, extra=("input_global_scale",)):
    """compressed-tensors divides: element * (scale / whole), each rounded to float32."""
    codes = torch.randint(0, 16, shape, generator=generator)
    scale = (1 + 440 * torch.rand(shape[0], shape[1] // 16, generator=generator)).to(E4M3)
    whole = 20000 + 9000 * torch.rand(1, generator=generator)
    weight = E2M1[codes] * (scale.float() / whole).repeat_interleave(16, 1)
    found = {"weight_packed": nibbles(codes), "weight_scale": scale, "weight_global_scale": whole}
    return {**found, **dict.fromkeys(extra, torch.tensor([3.0]))}, weight


def modelopt_nvfp4(shape, generator):
    """ModelOpt multiplies: element * scale * weight_scale_2."""
    codes = torch.randint(0, 16, shape, generator=generator)
    scale = (1 + 440 * torch.rand(shape[0], shape[1] // 16, generator=generator)).to(E4M3)
    whole = (1 + torch.rand((), generator=generator)) / 40000
    weight = (
        E2M1[codes].double() * scale.double().repeat_interleave(16, 1) * whole.double()
    ).float()
    found = {"weight": nibbles(codes), "weight_scale": scale, "weight_scale_2": whole}
    return found | {"input_scale": torch.tensor(0.7)}, weight


NF4_STATE = "weight.quant_state.bitsandbytes__nf4"
NF4 = torch.linspace(-1, 1, 16)  # any table: the file brings its own


def as_state(**numbers) -> torch.Tensor:
    return torch.tensor(list(json.dumps(numbers).encode()), dtype=torch.uint8)


def bitsandbytes(shape, generator, nested=False, kind="nf4"):
    """Blocks of 64 over all weights in a row; their factors themselves in blocks of 256, if
    nested."""
    n = shape[0] * shape[1]
    codes = torch.randint(0, 16, (n,), generator=generator)
    state = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": shape}
    found = {
        "weight": (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None],
        "weight.quant_map": NF4,
    }
    absmax = 0.05 + 0.1 * torch.rand(-(-n // 64), generator=generator)
    found["weight.absmax"] = absmax
    if nested:
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.0825}
        small, table = (
            torch.randint(0, 256, absmax.shape, generator=generator),
            torch.linspace(-1, 1, 256),
        )
        outer = 0.01 + 0.05 * torch.rand(-(-len(absmax) // 256), generator=generator)
        absmax = torch.stack(
            [table[c] * outer[i // 256] + torch.tensor(0.0825) for i, c in enumerate(small)]
        )
        found |= {"weight.absmax": small.to(torch.uint8), "weight.nested_absmax": outer}
        found["weight.nested_quant_map"] = table
    found[f"weight.quant_state.bitsandbytes__{kind}"] = as_state(**state)
    weight = torch.cat([NF4[part] * absmax[i] for i, part in enumerate(codes.split(64))]).view(
        shape
    )
    return found, weight


def draw(make, **options):
    return functools.partial(make, **options)


def build(folder: Path, config: dict, make, kept=(), hf=HF, more=()) -> dict[str, torch.Tensor]:
    """Write the folder, and beside it "plain" with the published weights in float32; {module:
    weights (out, in)}."""
    generator = torch.Generator().manual_seed(len(str(config)))
    both = {"model.norm.weight": 1 + 0.1 * torch.randn(D, generator=generator)}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        both[name] = 0.1 * torch.randn(96, D, generator=generator)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        both[f"model.layers.0.{norm}.weight"] = 1 + 0.1 * torch.randn(D, generator=generator)
    both = {name: tensor.bfloat16().float() for name, tensor in both.items()}
    stored, weights = {}, {}
    for name, shape in SHAPES.items():
        name = f"model.layers.0.{name}"
        if name in kept:
            both[f"{name}.weight"] = (
                (0.05 * torch.randn(shape, generator=generator)).bfloat16().float()
            )
            continue
        tensors, weights[name] = make(shape, generator)
        stored |= {
            f"{name}.{kind}": tensor.contiguous().clone() for kind, tensor in tensors.items()
        }
    stored |= {name: torch.tensor([0.3]) for name in more}
    for path, tensors, extra in (
        (
            folder,
            {name: tensor.bfloat16() for name, tensor in both.items()} | stored,
            {"quantization_config": config},
        ),
        (folder / "plain", both | {f"{name}.weight": w for name, w in weights.items()}, {}),
    ):
        path.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps({**hf, **extra}))
    return weights


MODELOPT = {
    "quant_algo": "NVFP4",
    "kv_cache_quant_algo": "FP8",
    "group_size": 16,
    "exclude_modules": ["lm_head"],
}
FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
}
BLOCK = {"type": "float", "num_bits": 8, "strategy": "block", "block_structure": [128, 128]}
STATIC = TOKENS | {"type": "float", "strategy": "tensor", "dynamic": False}
NV = {
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "scale_dtype": "torch.float8_e4m3fn",
}
MX = {"type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
BNB = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "load_in_8bit": False,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_quant_storage": "uint8",
    "_load_in_4bit": True,
    "_load_in_8bit": False,
    "llm_int8_skip_modules": ["lm_head"],
}
# name: (the scheme that must hold it, config, what is drawn, a part of what must be said)
FOLDERS = {
    "qwen fp8": ("fp8-g128", FP8, draw(blocks, dtype=BF16), WEIGHTS_ONLY),
    "deepseek fp8": (
        "fp8-g128-float32",
        {**FP8, "scale_fmt": "ue8m0"},
        blocks,
        WEIGHTS_ONLY,
    ),
    "power of two scales": (
        "fp8-g128-float32",
        {**FP8, "scale_fmt": "ue8m0"},
        lambda s, g: powers(*blocks(s, g)),
        WEIGHTS_ONLY,
    ),
    "llm-compressor fp8 block": (
        "fp8-g128-float32",
        compressed("float-quantized", STATIC | {"dynamic": True}, **BLOCK),
        draw(blocks, name="weight_scale"),
        WEIGHTS_ONLY,
    ),
    "fp8 groups": (
        "fp8-g128",
        compressed("float-quantized", type="float", num_bits=8, strategy="group", group_size=128),
        fp8_groups,
        None,
    ),
    "ministral fp8": (
        "fp8-float32",
        {**FP8, "activation_scheme": "static", "weight_block_size": None},
        draw(one_scale, name="weight_scale_inv", extra=("activation_scale",)),
        WEIGHTS_ONLY,
    ),
    "autofp8": (
        "fp8-float32",
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        draw(one_scale, extra=("input_scale",)),
        WEIGHTS_ONLY,
    ),
    "static fp8": (
        "fp8-float32",
        compressed("float-quantized", STATIC, type="float", num_bits=8, strategy="tensor")
        | {"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}},
        draw(one_scale, extra=("input_scale",), scalar=(1,)),
        WEIGHTS_ONLY,
    ),
    "mxfp4": ("mxfp4", compressed("mxfp4-pack-quantized", **MX), mxfp4, None),
    "mxfp8": ("mxfp8", compressed("mxfp8-quantized", **{**MX, "num_bits": 8}), mxfp8, None),
    "modelopt fp8": (
        "fp8-float32",
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
        draw(one_scale, extra=("input_scale",)),
        WEIGHTS_ONLY,
    ),
    "nvfp4": (
        "nvfp4",
        compressed("nvfp4-pack-quantized", TOKENS | {"dynamic": "local"}, **NV),
        nvfp4,
        WEIGHTS_ONLY,
    ),
}
PLAIN = {
    "nf4": (BNB, bitsandbytes),
    "nf4 nested": (BNB, draw(bitsandbytes, nested=True)),
    "fp4": ({**BNB, "bnb_4bit_quant_type": "fp4"}, draw(bitsandbytes, kind="fp4")),
}


def powers(tensors, weight):
    """The same codes with scales that are powers of two, in E8M0."""
    name, codes = "weight_scale_inv", tensors["weight"]
    exponent = torch.arange(tensors[name].numel()).view(tensors[name].shape) % 5 - 12
    wide = exponent.repeat_interleave(128, 0)[: len(codes)].repeat_interleave(128, 1)[
        :, : codes.size(1)
    ]
    scale = torch.exp2(exponent.float()).to(torch.float8_e8m0fnu)
    return {"weight": codes, name: scale}, torch.ldexp(codes.float(), wide)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """name of FOLDERS or PLAIN -> (folder, weights)"""

    @functools.cache
    def make(name: str):
        folder = tmp_path_factory.mktemp("floats") / "model"
        config, drawn = FOLDERS[name][1:3] if name in FOLDERS else PLAIN[name]
        caches = (
            [f"model.layers.0.self_attn.{x}_scale" for x in "kv"]
            if config.get("kv_cache_scheme")
            else []
        )
        return folder, build(folder, config, drawn, more=caches)

    return make


@pytest.fixture
def copied(written, tmp_path):
    """name -> a copy that a test may break."""
    return lambda name: shutil.copytree(written(name)[0], tmp_path / "model")


def published(weights: dict, ours: str) -> torch.Tensor:
    return torch.cat([weights[f"model.layers.0.{source}"] for source in FUSED[ours]])


def edit(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


# -------------------------------------------------------------------------------- our own witness


@pytest.mark.parametrize("name", FOLDERS)
def test_weights_are_the_published_ones(name, written, capsys):
    """Bit for bit in float32, whatever the activations' type; what is not done is said."""
    folder, weights = written(name)
    scheme, _, _, said = FOLDERS[name]
    for dtype in (F32, BF16):
        layer = load_model(folder, dtype=dtype).layers[0]
        for ours in FUSED:
            linear = layer.get_submodule(ours)
            assert linear.scheme == scheme
            assert torch.equal(linear.dequantized(F32), published(weights, ours)), ours
    err = capsys.readouterr().err
    assert said in err if said else not err


PRODUCER = {"name": "modelopt", "version": "0.31.0"}
# what config.json's quantization_config holds, in the versions of ModelOpt and of its users
MODELOPT_FORMS = {
    "hf_quant_config.json": None,
    "quant_method": {"quant_method": "modelopt", **MODELOPT},
    "quant_library": {"quant_library": "modelopt", **MODELOPT},
    "producer": {"producer": PRODUCER, **MODELOPT},
    "nested": {"producer": PRODUCER, "quantization": MODELOPT},
    "nested beside quant_method": {"quant_method": "modelopt", "quantization": MODELOPT},
    "nested alone": {"quantization": MODELOPT},
}


@pytest.mark.parametrize("where", MODELOPT_FORMS)
def test_modelopts_nvfp4_is_read(where, tmp_path, capsys):
    """Its factor is a reciprocal here: three roundings of float32, and the same bits in bfloat16.
    Scales of keys and values lie within the projections."""
    caches = [f"model.layers.0.self_attn.{x}_proj.{x}_scale" for x in "kv"]
    weights = build(tmp_path, MODELOPT_FORMS[where], modelopt_nvfp4, more=caches)
    if where == "hf_quant_config.json":
        hf = config_json(tmp_path)
        del hf["quantization_config"]
        (tmp_path / "config.json").write_text(json.dumps(hf))
        about = {"producer": PRODUCER, "quantization": MODELOPT}
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(about))
    layer = load_model(tmp_path, dtype=BF16).layers[0]
    err = capsys.readouterr().err
    assert WEIGHTS_ONLY in err
    for ours in FUSED:
        linear, want = layer.get_submodule(ours), published(weights, ours)
        assert linear.scheme == "nvfp4"
        assert ((linear.dequantized(F32) - want).abs() <= 3 * 2**-24 * want.abs()).all(), ours
    assert checkpoint.Checkpoint(tmp_path).stored_scheme == "modelopt"


@pytest.mark.parametrize("where", ["flat", "nested"])
def test_modelopts_fp8_of_version_0_31_is_read(where, written, copied):
    folder, settings = copied("modelopt fp8"), {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    settings = (
        settings
        if where == "flat"
        else {"quantization": {**settings, "exclude_modules": ["lm_head"]}}
    )
    hf = {**config_json(folder), "quantization_config": {"producer": PRODUCER, **settings}}
    (folder / "config.json").write_text(json.dumps(hf))
    layer = load_model(folder, dtype=BF16).layers[0]
    for ours in FUSED:
        linear = layer.get_submodule(ours)
        assert linear.scheme == "fp8-float32"
        assert torch.equal(linear.dequantized(F32), published(written("modelopt fp8")[1], ours)), (
            ours
        )


def test_what_else_modelopt_writes_is_refused_with_its_name(tmp_path):
    build(tmp_path, {}, modelopt_nvfp4)
    about = {"quantization": {**MODELOPT, "quant_algo": "W4A8_AWQ"}}
    (tmp_path / "config.json").write_text(json.dumps(HF))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(about))
    with pytest.raises(
        ValueError, match=r"hf_quant_config\.json: quant_algo = 'W4A8_AWQ' is not supported"
    ):
        load_model(tmp_path)


@pytest.mark.parametrize("name", [*FOLDERS, *PLAIN])
def test_logits_are_those_of_the_published_weights(name, written):
    """Against a plain folder of them, in float32 and packed: the bound is that of
    test_quantized_folders, for 320 terms. One scale that is off by a step changes more, which the
    last line shows."""
    folder, _ = written(name)
    tokens, pos = torch.arange(40)[None] % 96, torch.arange(40)
    got, want = (load_model(path, dtype=F32) for path in (folder, folder / "plain"))
    pack_model(got)
    largest = want(tokens, pos).abs().max()
    assert (got(tokens, pos) - want(tokens, pos)).abs().max() <= 5 * 320 * 2**-24 * largest
    want.layers[0].ffn.down.weight[:, -1] *= 1.5
    assert (got(tokens, pos) - want(tokens, pos)).abs().max() > 5 * 320 * 2**-24 * largest


@pytest.mark.parametrize("name", PLAIN)
def test_tables_become_plain_weights_and_say_so(name, written, capsys):
    folder, weights = written(name)
    layer = load_model(folder, dtype=F32).layers[0]
    for ours in FUSED:
        assert torch.equal(layer.get_submodule(ours).weight, published(weights, ours)), ours
    kind = f"in bitsandbytes' {name[:3]}"
    err = capsys.readouterr().err
    assert "stored quantized load as plain weights" in err and kind in err
    again = load_model(folder, quantize="int8").layers[0].ffn.down
    assert kind not in capsys.readouterr().err
    assert isinstance(again, QuantizedLinear) and again.scheme == "int8"


def test_some_of_stacked_matrices_may_be_plain(tmp_path):
    """unsloth's dynamic folders keep single matrices in full precision."""
    kept = [f"model.layers.0.{name}" for name in ("self_attn.k_proj", "mlp.down_proj")]
    weights = build(tmp_path, BNB, bitsandbytes, kept=kept)
    stored = load_file(tmp_path / "plain" / "model.safetensors")
    weights |= {name: stored[f"{name}.weight"] for name in kept}
    layer = load_model(tmp_path, dtype=F32).layers[0]
    assert all(
        torch.equal(layer.get_submodule(ours).weight, published(weights, ours)) for ours in FUSED
    )


@pytest.mark.parametrize("name", ["qwen fp8", "static fp8", "mxfp4", "nvfp4"])
def test_saved_folders_load_as_they_were(name, written, tmp_path):
    folder, weights = written(name)
    save_model(load_model(folder), tmp_path / "again", config_json(folder))
    layer = load_model(tmp_path / "again").layers[0]
    assert all(
        torch.equal(layer.get_submodule(ours).dequantized(F32), published(weights, ours))
        for ours in FUSED
    )


def test_ranks_hold_rows_of_any_block_and_whole_groups_of_inputs(tmp_path):
    """Heads begin inside blocks of rows; the inputs of o and down are cut between blocks, or
    refused by number."""
    hf = {**HF, "hidden_size": 256, "intermediate_size": 512}
    global D, F
    sizes = dict(SHAPES)
    try:
        D, F = 256, 512
        SHAPES.update(
            {
                name: tuple({192: 256, 96: 128, 320: 512}[n] for n in shape)
                for name, shape in sizes.items()
            }
        )
        weights = build(tmp_path, FP8, blocks, hf=hf)
    finally:
        D, F = 192, 320
        SHAPES.update(sizes)
    source = checkpoint.Checkpoint(tmp_path).source
    schemes = choose_schemes(source, tmp_path)
    for rank in range(2):
        ranks = Ranks(rank, 2)
        model = models.allocate(models.empty_model(source.config, F32, schemes, ranks), "cpu")
        model = models.load_weights(model, source.tensors, ranks, pack=False)
        layer = model.layers[0]
        rows = [
            w.chunk(2)[rank]
            for w in (weights[f"model.layers.0.{name}"] for name in FUSED["attention.qkv"])
        ]
        assert torch.equal(layer.attention.qkv.dequantized(F32), torch.cat(rows))
        down = weights["model.layers.0.mlp.down_proj"].chunk(2, 1)[rank]
        assert torch.equal(layer.ffn.down.dequantized(F32), down)


def test_inputs_cut_inside_a_block_are_refused(written):
    with pytest.raises(
        ValueError, match=r"96 each, which splits a group of 128 that share a scale"
    ):
        load_model(written("qwen fp8")[0], tp=Ranks(0, 2))


Q, GATE, DOWN = (
    f"model.layers.0.{name}" for name in ("self_attn.q_proj", "mlp.gate_proj", "mlp.down_proj")
)


def put(name, change):
    return lambda tensors: tensors.update({name: change(tensors[name])})


BROKEN = {  # folder; what is done to it; what the line must name
    "scales of other blocks": (
        "qwen fp8",
        put(f"{Q}.weight_scale_inv", lambda t: t[:1].clone()),
        "is [1, 2] instead",
    ),
    "no scale": (
        "qwen fp8",
        lambda t: t.pop(f"{Q}.weight_scale_inv"),
        f"k_proj is quantized and {Q} is not",
    ),
    "no scale of gate": (
        "static fp8",
        lambda t: t.pop(f"{GATE}.weight_scale"),
        f"up_proj is quantized and {GATE} is not",
    ),
    "no scale of down": (
        "static fp8",
        lambda t: t.pop(f"{DOWN}.weight_scale"),
        f"{DOWN}.weight is of type F8_E4M3",
    ),
    "no table": (
        "nf4",
        lambda t: t.pop(f"{GATE}.weight.quant_map"),
        f"missing: {GATE}.weight.quant_map",
    ),
    "no global scale": (
        "nvfp4",
        lambda t: t.pop(f"{Q}.weight_global_scale"),
        f"missing: {Q}.weight_global_scale",
    ),
    "no state": (
        "nf4",
        lambda t: t.pop(f"{Q}.{NF4_STATE}"),
        f"{Q}.weight is [18432, 1] instead",
    ),
    "a state of another type": (
        "nf4",
        put(f"{Q}.{NF4_STATE}", lambda t: t.float()),
        f"{Q}.{NF4_STATE} must be bytes",
    ),
    "a state of two dimensions": (
        "nf4",
        put(f"{Q}.{NF4_STATE}", lambda t: t[None].clone()),
        f"{Q}.{NF4_STATE} must be bytes",
    ),
    "a state that is no JSON": (
        "nf4",
        put(f"{Q}.{NF4_STATE}", lambda t: t[1:].clone()),
        f"{Q}.{NF4_STATE}: not readable as JSON",
    ),
    "a state that is a list": (
        "nf4",
        put(f"{Q}.{NF4_STATE}", lambda t: torch.tensor([*b"[64]"], dtype=torch.uint8)),
        f"{Q}.{NF4_STATE}: expected a JSON object",
    ),
    "blocks of nothing": (
        "nf4",
        put(f"{Q}.{NF4_STATE}", lambda t: as_state(blocksize=0)),
        f"{Q}.{NF4_STATE}: blocksize = 0",
    ),
    "blocks of no size": (
        "nf4",
        put(f"{Q}.{NF4_STATE}", lambda t: as_state(quant_type="nf4")),
        f"{Q}.{NF4_STATE}: blocksize = None",
    ),
    "outer blocks of half a factor": (
        "nf4 nested",
        put(
            f"{Q}.{NF4_STATE}",
            lambda t: as_state(blocksize=64, nested_blocksize=0.5, nested_offset=0),
        ),
        f"{Q}.{NF4_STATE}: nested_blocksize = 0.5",
    ),
    "an offset that is a text": (
        "nf4 nested",
        put(
            f"{Q}.{NF4_STATE}",
            lambda t: as_state(blocksize=64, nested_blocksize=256, nested_offset="0"),
        ),
        f"{Q}.{NF4_STATE}: nested_offset = '0'",
    ),
    "no inner factors": ("nf4 nested", lambda t: t.pop(f"{Q}.weight.nested_absmax"), "missing: "),
    "too few factors": (
        "nf4",
        put(f"{Q}.weight.absmax", lambda t: t[:-1].clone()),
        "absmax is [575] instead",
    ),
    "codes of another size": (
        "nf4",
        put(f"{Q}.weight", lambda t: t.view(1, -1)),
        f"{Q}.weight is [1, 18432] instead",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_folders_are_refused_by_name(what, copied):
    name, change, named = BROKEN[what]
    folder = copied(name)
    edit(folder, change)
    with pytest.raises(ValueError) as error:
        load_model(folder)
    assert str(error.value).startswith(str(folder)) and named in str(error.value)


def test_scales_of_nothing_quantized_are_left_out_by_name_alone(copied):
    folder = copied("static fp8")
    edit(folder, lambda t: t.update({"model.layers.0.self_attn.prob_scale": torch.ones(1)}))
    with pytest.raises(ValueError, match=r"unexpected: model\.layers\.0\.self_attn\.prob_scale"):
        load_model(folder)


# ----------------------------------------------------------------------- what real programs write


def real_weights(names=SHAPES) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {name: 0.05 * torch.randn(shape, generator=generator) for name, shape in names.items()}


@pytest.mark.parametrize("preset", ["MXFP4A16", "NVFP4A16", "MXFP8A16", "FP8_BLOCK"])
def test_what_compressed_tensors_writes(preset, tmp_path):
    """Its compressor chooses the codes. Read here they are, to bfloat16's rounding of its
    decompressor's result, what that one makes of them."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme

    scheme: QuantizationScheme = preset_name_to_scheme(preset, ["Linear"])
    args = scheme.weights
    format = {
        "MXFP4A16": "mxfp4-pack-quantized",
        "NVFP4A16": "nvfp4-pack-quantized",
        "MXFP8A16": "mxfp8-quantized",
        "FP8_BLOCK": "float-quantized",
    }[preset]
    compressor = BaseCompressor.get_value_from_registry(format)
    back = {}

    def make(shape, generator):
        w = (0.05 * torch.randn(shape, generator=generator)).bfloat16()
        state = {"weight": w}
        if args.strategy == "block":
            padded = torch.nn.functional.pad(w.float(), (0, -shape[1] % 128, 0, -shape[0] % 128))
            tiles = padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
            state["weight_scale"] = tiles.abs().amax((1, 3)) / 448
        else:
            top = w.float().unflatten(1, (-1, args.group_size)).abs().amax(-1)
            if args.group_size == 16:
                state["weight_global_scale"] = (6.0 * 448 / w.float().abs().max()).reshape(1)
                state["weight_scale"] = (top / 6 * state["weight_global_scale"]).to(E4M3).float()
            else:
                largest = 6.0 if args.num_bits == 4 else 448.0
                state["weight_scale"] = torch.exp2(torch.ceil(torch.log2(top / largest)))
        stored = compressor.compress(dict(state), scheme)
        assert not {*stored} - {"weight", "weight_packed", "weight_scale", "weight_global_scale"}
        # some are views
        weight = compressor.decompress(dict(stored), scheme)["weight"].float().contiguous()
        back[tuple(shape), len(back)] = weight
        return stored, weight

    group = json.loads(scheme.model_dump_json())
    config = {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    weights = build(tmp_path, config, make)
    layer = load_model(tmp_path, dtype=BF16).layers[0]
    for ours in FUSED:
        linear, want = layer.get_submodule(ours), published(weights, ours)
        got = dequantize_tensor(linear.parts(), linear.scheme)
        assert linear.scheme == {"MXFP4A16": "mxfp4", "NVFP4A16": "nvfp4", "MXFP8A16": "mxfp8"}.get(
            preset, "fp8-g128-float32"
        )
        # three roundings to bfloat16 of 2^-9 at most
        assert ((got - want).abs() <= want.abs() * 2**-7).all()
        assert (got - 1.07 * want).abs().max() > want.abs().max() * 2**-7, (
            "the bound is no wild one"
        )


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_what_bitsandbytes_writes(kind, nested, tmp_path):
    """Its CPU build quantizes and dequantizes: the weights are its own, bit for bit, in float32."""
    functional = pytest.importorskip("bitsandbytes.functional")

    def make(shape, generator):
        w = 0.05 * torch.randn(shape, generator=generator)
        codes, state = functional.quantize_4bit(
            w, quant_type=kind, compress_statistics=nested, blocksize=64
        )
        found = {f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}
        return {"weight": codes, **found}, functional.dequantize_4bit(codes, state)

    weights = build(tmp_path, {**BNB, "bnb_4bit_quant_type": kind}, make)
    layer = load_model(tmp_path, dtype=F32).layers[0]
    for ours in FUSED:
        assert torch.equal(layer.get_submodule(ours).weight, published(weights, ours)), ours


def test_a_code_of_mxfp8_that_is_no_number_is_refused(copied):
    """Our elements have no NaN: its code would be read as 480."""

    def with_nan(stored):
        stored = stored.clone()
        stored.view(torch.uint8)[3, 0] = 0x7F
        return stored

    folder = copied("mxfp8")
    edit(folder, put(f"{Q}.weight", with_nan))
    with pytest.raises(ValueError, match=r"q_proj\.weight: weights hold NaN or infinity"):
        load_model(folder, dtype=F32)


@pytest.mark.parametrize(
    ("name", "part", "code"),
    [
        ("qwen fp8", "weight", 0x7F),
        ("mxfp4", "weight_scale", 0xFF),
        ("nvfp4", "weight_scale", 0x7F),
    ],
)
def test_a_value_that_is_no_number_reaches_every_logit(name, part, code, copied):
    """So that decoding reports it, and no text is wrong without a word."""

    def with_nan(stored):
        stored = stored.clone()
        stored.view(torch.uint8)[3, 0] = code
        return stored

    folder = copied(name)
    edit(folder, put(f"{Q}.{part}", with_nan))
    model = load_model(folder, dtype=F32)
    assert not model(torch.arange(5)[None], torch.arange(5)).isfinite().any()
