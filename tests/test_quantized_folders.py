"""folder.py and quantized/layouts.py: folders as AutoGPTQ, AutoAWQ and compressed-tensors write
them hold the published weights.

The writers here pack bit by bit, from the published layouts alone, and share no code with the
reader. Weights are compared in float64 with (code - zero point) * scale of the random numbers that
were packed.
"""

import functools
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import BASE, config_json, rope
from safetensors.torch import load_file, save_file

import cli.quantize as quantize_command
import cli.start as program
import loading.checkpoint as checkpoint
import loading.models as models
import loading.quantization as quantization
import loading.quantized.detection as detection
from loading.config import config_from_hf
from loading.saving import save_model
from loading.stored import Source, Stored
from tp import Ranks
from weights.formats import dequantize_tensor
from weights.linears import QuantizedLinear
from weights.walker import pack_model

# what is stored is what these tests look at
load_model = functools.partial(checkpoint.load_model, pack=False)
# every group of 128 inputs divides over two ranks; no matrix but q and o is square
D, F, H, G = (256, 512, 4, 2)
HF = {
    **BASE,
    "model_type": "llama",
    "hidden_size": D,
    "intermediate_size": F,
    "num_hidden_layers": 2,
    "num_attention_heads": H,
    "num_key_value_heads": G,
    "vocab_size": 96,
    "dtype": "float16",
    **rope(10000.0),
}


def shapes(D: int, F: int) -> dict[str, tuple[int, int]]:
    """(out, in) of a block's matrices, with half as many KV heads as heads."""
    return {
        "self_attn.q_proj": (D, D),
        "self_attn.k_proj": (D // 2, D),
        "self_attn.v_proj": (D // 2, D),
        "self_attn.o_proj": (D, D),
        "mlp.gate_proj": (F, D),
        "mlp.up_proj": (F, D),
        "mlp.down_proj": (D, F),
    }


SHAPES = shapes(D, F)
FUSED = {
    "attention.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "attention.out": ["self_attn.o_proj"],
    "ffn.gate_up": ["mlp.gate_proj", "mlp.up_proj"],
    "ffn.down": ["mlp.down_proj"],
}
# --------------------------------------------------------------- the published layouts, bit by bit


def bit_stream(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """codes (n, m) -> int32 (ceil(n * bits / 32), m): bit b of code r is bit r * bits + b of its
    column."""
    words = np.zeros((-(-len(codes) * bits // 32), codes.size(1)), np.uint32)
    for r, row in enumerate(codes.numpy().astype(np.uint32)):
        for b in range(bits):
            words[(r * bits + b) // 32] |= ((row >> b) & 1) << np.uint32((r * bits + b) % 32)
    return torch.from_numpy(words.view(np.int32).copy())


def awq_words(codes: torch.Tensor, order=(0, 2, 4, 6, 1, 3, 5, 7)) -> torch.Tensor:
    """codes (n, m) -> int32 (n, m / 8): of eight columns, number order[i] in bits 4 i to 4 i +
    3."""
    words = np.zeros((len(codes), codes.size(1) // 8), np.uint32)
    for column in range(words.shape[1]):
        for i, k in enumerate(order):
            words[:, column] |= codes[:, 8 * column + k].numpy().astype(np.uint32) << np.uint32(
                4 * i
            )
    return torch.from_numpy(words.view(np.int32).copy())


def minus_one(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Version 1: one less in every code, subtracted from the whole word, modulo 2^32."""
    ones = sum(1 << shift for shift in range(0, 32, bits))
    return ((words.long() - ones + 2**31) % 2**32 - 2**31).to(torch.int32)


class Drawn:
    """A matrix's random codes, scales and zero points, and the group of every input."""

    def __init__(
        self, shape, bits: int, group: int, symmetric: bool, scale_dtype, g_idx, generator
    ):
        rows, columns = shape
        size = columns if group == -1 else group
        n = -(-columns // size)
        self.codes = torch.randint(0, 2**bits, shape, generator=generator)
        self.scale = (
            (0.004 + 0.012 * torch.rand(rows, n, generator=generator))
            .mul(2.0 ** (4 - bits))
            .to(scale_dtype)
        )
        self.zero = torch.full((rows, n), 2 ** (bits - 1))
        if not symmetric:
            self.zero = torch.randint(0, 2**bits, (rows, n), generator=generator)
        self.g_idx = torch.arange(columns) // size
        if g_idx == "act-order":
            self.g_idx = self.g_idx[torch.randperm(columns, generator=generator)]
        if g_idx == "groups permuted":
            self.g_idx = torch.randperm(n, generator=generator)[self.g_idx]
        steps = (self.codes - self.zero[:, self.g_idx]).double()
        self.weight = (steps * self.scale.double()[:, self.g_idx]).float()
        # 11 bits times 4 (8 with 8-bit codes): the float32 is the product itself
        if scale_dtype != torch.float32:
            assert torch.equal(self.weight.double(), steps * self.scale.double()[:, self.g_idx])


def gptq(d: Drawn, bits: int, version: int = 1) -> dict:
    zeros = bit_stream(d.zero, bits).T.contiguous()
    return {
        "qweight": bit_stream(d.codes.T, bits),
        "qzeros": minus_one(zeros, bits) if version == 1 else zeros,
        "scales": d.scale.T,
        "g_idx": d.g_idx.int(),
    }


def awq(d: Drawn, bits: int, **options) -> dict:
    zeros = awq_words(d.zero.T, **options)
    return {"qweight": awq_words(d.codes.T, **options), "qzeros": zeros, "scales": d.scale.T}


def packed(d: Drawn, bits: int, symmetric: bool, act_order: bool = False) -> dict:
    found = {
        "weight_packed": bit_stream(d.codes.T, bits).T,
        "weight_scale": d.scale,
        "weight_shape": torch.tensor(d.codes.shape),
    }
    if not symmetric:
        found["weight_zero_point"] = bit_stream(d.zero, bits)
    return found | ({"weight_g_idx": d.g_idx.int()} if act_order else {})


def plain_int8(d: Drawn, bits: int) -> dict:
    return {"weight": (d.codes - 128).to(torch.int8), "weight_scale": d.scale}


def gptq_config(**others) -> dict:
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "desc_act": False,
        "sym": False,
        **others,
    }


def awq_config(**others) -> dict:
    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 128,
        "zero_point": True,
        "version": "gemm",
    }
    return {**config, "modules_to_not_convert": None, **others}


def auto_round_config(packing: str, **others) -> dict:
    config = {
        "quant_method": "auto-round",
        "bits": 4,
        "group_size": 128,
        "sym": False,
        "data_type": "int",
        "packing_format": packing,
        "block_name_to_quantize": "model.layers",
    }
    return config | others


def without_order(d: Drawn, bits: int, version: int = 1) -> dict:
    """AutoRound's GPTQ, which has no g_idx."""
    tensors = gptq(d, bits, version)
    del tensors["g_idx"]
    return tensors


def compressed(format: str, activations: dict | None = None, **weights) -> dict:
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "dynamic": False,
        "actorder": None,
        **weights,
    }
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def build(
    folder: Path,
    config: dict,
    pack,
    bits=4,
    group=128,
    symmetric=False,
    scale_dtype=torch.float16,
    g_idx=None,
    head=False,
    float_modules=(),
    draw=Drawn,
    others=None,
    **hf,
) -> dict[str, torch.Tensor]:
    """Write the folder, and beside it "plain" with the published weights in float32; {module:
    weights (out, in)}. `others`: module -> (writer, what is drawn) where they differ."""
    generator = torch.Generator().manual_seed(len(str(config)) + bits + len(str(g_idx)))
    both: dict[str, torch.Tensor] = {
        "model.norm.weight": 1 + 0.1 * torch.randn(D, generator=generator)
    }
    both["model.embed_tokens.weight"] = torch.randn(96, D, generator=generator)
    modules = {
        f"model.layers.{n}.{name}": shape for n in range(2) for name, shape in SHAPES.items()
    }
    for n in range(2):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            both[f"model.layers.{n}.{norm}.weight"] = 1 + 0.1 * torch.randn(D, generator=generator)
    stored, weights = {}, {}
    for name, shape in (modules | {"lm_head": (96, D)}).items():
        if hf.get("attention_bias") and "self_attn" in name:
            both[f"{name}.bias"] = torch.randn(shape[0], generator=generator)
        if name in float_modules or (name == "lm_head" and not head):
            both[f"{name}.weight"] = 0.05 * torch.randn(shape, generator=generator)
            continue
        options = {"bits": bits, "group": group, "symmetric": symmetric, "draw": draw}
        writer, changes = (others or {}).get(name, (pack, {}))
        options |= {"scale_dtype": scale_dtype} | changes
        drawn = options.pop("draw")(shape, **options, g_idx=g_idx, generator=generator)
        weights[name] = drawn.weight
        stored |= {
            f"{name}.{kind}": tensor.contiguous().clone()
            for kind, tensor in writer(drawn, options["bits"]).items()
        }
    both = {name: tensor.half().float() for name, tensor in both.items()}
    for path, tensors, extra in (
        (
            folder,
            {name: tensor.half() for name, tensor in both.items()} | stored,
            {"quantization_config": config},
        ),
        (folder / "plain", both | {f"{name}.weight": w for name, w in weights.items()}, {}),
    ):
        path.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps({**HF, **hf, **extra}))
    return weights


class Float8(Drawn):
    """E4M3 codes; `group` -1: a scale a row, 0: one for the matrix."""

    def __init__(self, shape, bits, group, symmetric, scale_dtype, g_idx, generator):
        self.codes = (
            torch.randn(shape, generator=generator)
            .mul(100)
            .clamp(-448, 448)
            .to(torch.float8_e4m3fn)
        )
        n = 1 if group == 0 else shape[0]
        self.scale = (0.0004 + 0.0012 * torch.rand(n, 1, generator=generator)).to(scale_dtype)
        self.weight = (self.codes.double() * self.scale.double()).float()
        self.scale = self.scale[0] if group == 0 else self.scale


def plain_float8(d: Float8, bits: int) -> dict:
    return {"weight": d.codes, "weight_scale": d.scale}


def v2(d, bits):
    return gptq(d, bits, 2)


BF16, F32 = torch.bfloat16, torch.float32
TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
EXACT = {  # name: (the scheme that must hold it, config, writer, what is drawn)
    "gptq v1 g128": ("int4-g128-float32", gptq_config(), gptq, {}),
    "gptq v1 symmetric": (
        "int4-g128-float32",
        gptq_config(sym=True, static_groups=True, desc_act=True),
        gptq,
        {"symmetric": True},
    ),
    "gptq v2 g32": (
        "int4-g32-float32",
        gptq_config(group_size=32, checkpoint_format="gptq_v2"),
        v2,
        {"group": 32},
    ),
    "gptq v1 g64 biased": (
        "int4-g64-float32",
        gptq_config(group_size=64, checkpoint_format="gptq"),
        gptq,
        {"group": 64, "attention_bias": True},
    ),
    "gptq rows": ("int4-g128-float32", gptq_config(group_size=-1), gptq, {"group": -1}),
    "gptq g256": ("int4-g128-float32", gptq_config(group_size=256), gptq, {"group": 256}),
    "gptq whole groups permuted": (
        "int4-g64-float32",
        gptq_config(group_size=64, desc_act=True),
        gptq,
        {"group": 64, "g_idx": "groups permuted"},
    ),
    "gptq head": ("int4-g128-float32", gptq_config(lm_head=True), gptq, {"head": True}),
    "gptq 8 bits rows": (
        "int8-float32",
        gptq_config(bits=8, group_size=-1, sym=True),
        gptq,
        {"bits": 8, "group": -1, "symmetric": True},
    ),
    "awq g128": ("int4-g128-float32", awq_config(), awq, {}),
    "awq g64": (
        "int4-g64-float32",
        awq_config(group_size=64, attention_bias=True),
        awq,
        {"group": 64},
    ),
    "auto-round gptq": (
        "int4-g128-float32",
        auto_round_config("auto_round:auto_gptq"),
        without_order,
        {},
    ),
    "auto-round gptq symmetric": (
        "int4-g32-float32",
        auto_round_config("auto_round:auto_gptq", group_size=32, sym=True),
        without_order,
        {"group": 32, "symmetric": True},
    ),
    "auto-round": (
        "int4-g64-float32",
        auto_round_config("auto_round", group_size=64),
        lambda d, bits: without_order(d, bits, 2),
        {"group": 64},
    ),
    "auto-round gptqmodel": (
        "int4-g128-float32",
        auto_round_config("auto_round:gptqmodel"),
        v2,
        {},
    ),
    "auto-round awq": (
        "int4-g128-float32",
        auto_round_config("auto_round:auto_awq"),
        awq,
        {},
    ),
    "packed bf16": (
        "int4-g128",
        compressed("pack-quantized", strategy="group", group_size=128),
        lambda d, bits: packed(d, bits, True),
        {"symmetric": True, "scale_dtype": BF16},
    ),
    "packed fp16 rows": (
        "int4-g128-float32",
        compressed("pack-quantized", strategy="channel"),
        lambda d, bits: packed(d, bits, True),
        {"symmetric": True, "group": -1},
    ),
    "packed asymmetric": (
        "int4-g32-float32",
        compressed("pack-quantized", strategy="group", group_size=32, symmetric=False),
        lambda d, bits: packed(d, bits, False),
        {"group": 32, "scale_dtype": BF16},
    ),
    "packed static order": (
        "int4-g32-float32",
        compressed("pack-quantized", strategy="group", group_size=32, actorder="static"),
        lambda d, bits: packed(d, bits, True),
        {"symmetric": True, "group": 32},
    ),
    "packed 8 bits": (
        "int8",
        compressed("pack-quantized", strategy="channel", num_bits=8),
        lambda d, bits: packed(d, bits, True),
        {"symmetric": True, "group": -1, "bits": 8, "scale_dtype": BF16},
    ),
    "int8": (
        "int8-float32",
        compressed("int-quantized", TOKENS, strategy="channel", num_bits=8),
        plain_int8,
        {"symmetric": True, "group": -1, "bits": 8, "scale_dtype": F32},
    ),
    "fp8 rows": (
        "fp8",
        compressed(
            "float-quantized",
            TOKENS | {"type": "float"},
            strategy="channel",
            num_bits=8,
            type="float",
        ),
        plain_float8,
        {"draw": Float8, "group": -1, "scale_dtype": BF16},
    ),
    "fp8 matrix": (
        "fp8-float32",
        compressed("naive-quantized", strategy="tensor", num_bits=8, type="float"),
        plain_float8,
        {"draw": Float8, "group": 0, "scale_dtype": F32},
    ),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """name of EXACT -> (folder, weights)"""
    made = {}

    def make(name: str):
        if name not in made:
            folder = tmp_path_factory.mktemp("foreign") / "model"
            _, config, pack, drawn = EXACT[name]
            made[name] = folder, build(folder, config, pack, **drawn)
        return made[name]

    return make


@pytest.fixture
def folder(written, tmp_path):
    """A copy of a GPTQ folder that a test may break."""
    return shutil.copytree(written("gptq v1 g128")[0], tmp_path / "model")


def published(weights: dict, n: int, ours: str) -> torch.Tensor:
    return torch.cat([weights[f"model.layers.{n}.{source}"] for source in FUSED[ours]])


def linears(model):
    return {(n, ours): model.layers[n].get_submodule(ours) for n in range(2) for ours in FUSED}


def assert_holds(model, weights: dict) -> None:
    for (n, ours), linear in linears(model).items():
        assert torch.equal(linear.dequantized(torch.float32), published(weights, n, ours)), ours


# ---------------------------------------------------------------------------------- exact layouts


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", EXACT)
def test_weights_are_the_published_ones(name, written):
    """Bit for bit in float32, whatever the activations' type."""
    folder, weights = written(name)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = load_model(folder, dtype=dtype)
        assert all(linear.scheme == EXACT[name][0] for linear in linears(model).values())
        assert_holds(model, weights)
        if "lm_head" in weights:
            assert torch.equal(model.lm_head.dequantized(torch.float32), weights["lm_head"])
        else:
            assert not isinstance(model.lm_head, QuantizedLinear)


def test_a_quantized_head_is_not_tied(written, tmp_path):
    """Whatever config.json says, as it is not the embedding."""
    folder, weights = written("gptq head")
    folder = shutil.copytree(folder, tmp_path / "model")
    (folder / "config.json").write_text(
        json.dumps(config_json(folder) | {"tie_word_embeddings": True})
    )
    assert torch.equal(load_model(folder).lm_head.dequantized(torch.float32), weights["lm_head"])


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", EXACT)
def test_logits_are_those_of_the_published_weights(name, written):
    """Against a plain folder of them. In float32 only the order of sums differs: at most 512 terms,
    each rounded once, in the nine products that follow each other, give 9 * 512 * 2^-24 = 2.7e-4 of
    the largest logit. One scale, code or zero point that is off by a step changes far more, which
    the last line shows."""
    folder, _ = written(name)
    tokens, pos = torch.arange(40)[None] % 96, torch.arange(40)
    got, want = (load_model(path, dtype=torch.float32) for path in (folder, folder / "plain"))
    pack_model(got)
    largest = want(tokens, pos).abs().max()
    assert (got(tokens, pos) - want(tokens, pos)).abs().max() <= 9 * 512 * 2**-24 * largest
    for layer in want.layers:
        layer.ffn.down.weight[:, 0] += 0.01
    assert (got(tokens, pos) - want(tokens, pos)).abs().max() > 9 * 512 * 2**-24 * largest


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "name", ["gptq v1 g128", "awq g64", "packed bf16", "packed 8 bits", "int8", "fp8 rows"]
)
def test_what_bfloat16_kernels_lose(name, rows, written):
    """Sums are float32's. Beyond them: a scale and a zero rounded to bfloat16, 2^-9 of each term
    (of one that is not already bfloat16), weights rounded to it where there is no kernel, and the
    result."""
    folder, weights = written(name)
    model, stored = checkpoint.load_model(folder), load_model(folder)
    generator = torch.Generator().manual_seed(1)
    for (n, ours), linear in linears(model).items():
        x = torch.randn(rows, linear.in_features, generator=generator).bfloat16()
        w = published(weights, n, ours).double()
        parts = {kind: part.float() for kind, part in linears(stored)[n, ours].parts().items()}
        terms = w.abs()  # of one product: |x| times these
        if "zero" in parts:
            wide = {
                kind: parts[kind]
                .double()
                .repeat_interleave(linear.in_features // parts[kind].size(1), 1)
                for kind in ("scale", "zero")
            }
            terms = (w - wide["zero"]).abs() + wide["zero"].abs()
            assert (terms * 2**-9 <= wide["scale"] / 32 * (1 + 1e-6)).all(), (
                "what Int4Linear's docstring says"
            )
        want = x.double() @ w.T
        sums = x.double().abs() @ terms.T
        limit = 2**-9 * (sums + want.abs()) * 1.01 + linear.in_features * 2**-24 * sums
        bias = 0 if linear.bias is None else linear.bias.double()
        assert ((linear(x).double() - bias - want).abs() <= limit + 2**-8 * abs(bias)).all(), ours


@pytest.mark.parametrize(
    "name", ["gptq v1 g128", "gptq head", "awq g128", "packed asymmetric", "fp8 matrix"]
)
def test_pieces_of_two_ranks_are_slices(name, written):
    """By definition, from the published weights: a rank's rows of q, k, v, gate and up, its columns
    of o and down."""
    folder, weights = written(name)
    source = checkpoint.Checkpoint(folder).source
    schemes = quantization.choose_schemes(source, folder)
    for rank in range(2):
        ranks = Ranks(rank, 2)
        model = models.empty_model(source.config, torch.float32, schemes, ranks)
        model = models.allocate(model, "cpu")
        names = [n for n, _ in model.named_parameters()]
        models.load_parameters(model, names, source.tensors, ranks)
        for (n, ours), linear in linears(model).items():
            sources = [weights[f"model.layers.{n}.{source}"] for source in FUSED[ours]]
            want = torch.cat(
                [
                    w.chunk(2, 1 if ours in ("attention.out", "ffn.down") else 0)[rank]
                    for w in sources
                ]
            )
            assert torch.equal(dequantize_tensor(linear.parts(), linear.scheme), want), ours
        if schemes["lm_head"]:
            assert torch.equal(
                dequantize_tensor(model.lm_head.parts(), schemes["lm_head"]),
                weights["lm_head"].chunk(2)[rank],
            )


@pytest.mark.parametrize("name", ["gptq v1 g128", "packed bf16", "int8", "gptq head", "fp8 rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_again_it_is_the_same_model(name, dtype, written, tmp_path):
    folder, weights = written(name)
    save_model(load_model(folder, dtype=dtype), tmp_path / "again", config_json(folder))
    assert config_json(tmp_path / "again")["quantization_config"] == quantization.QUICKDRAFT_CONFIG
    again = load_model(tmp_path / "again", dtype=dtype)
    assert_holds(again, weights)
    tokens, pos = torch.arange(9)[None], torch.arange(9)
    first = load_model(folder, dtype=dtype)
    assert torch.equal(pack_model(again)(tokens, pos), pack_model(first)(tokens, pos))


# -------------------------------------------------------------------------------- quantized again


INEXACT = {
    "gptq act-order": ("int4-g32", gptq_config(desc_act=True), gptq, {"g_idx": "act-order"}),
    "packed act-order": (
        "int4-g32",
        compressed("pack-quantized", strategy="group", group_size=128, actorder="group"),
        lambda d, bits: packed(d, bits, True, True),
        {"symmetric": True, "g_idx": "act-order"},
    ),
    "gptq g16": ("int4-g32", gptq_config(group_size=16), gptq, {"group": 16}),
    "gptq 8 bits g128": ("int8", gptq_config(bits=8), gptq, {"bits": 8}),
    "packed 8 bits asymmetric": (
        "int8",
        compressed("pack-quantized", strategy="channel", num_bits=8, symmetric=False),
        lambda d, bits: packed(d, bits, False),
        {"bits": 8, "group": -1},
    ),
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", INEXACT)
def test_what_no_scheme_holds_is_quantized_again_and_said(name, tmp_path, capsys):
    """Within the bounds of the schemes' docstrings."""
    scheme, config, pack, drawn = INEXACT[name]
    weights = build(tmp_path, config, pack, **drawn)
    model = load_model(tmp_path, dtype=torch.float32)
    lines = [line for line in capsys.readouterr().err.splitlines() if "quantized again" in line]
    for (n, ours), linear in linears(model).items():
        parts, want = linear.parts(), published(weights, n, ours)
        error = dequantize_tensor(parts, scheme) - want
        limit = (
            parts["scale"].float()[:, None] / 2
            if scheme == "int8"
            else (
                parts["scale"].float() / 2 + parts["zero"].float().abs() * 2**-8
            ).repeat_interleave(32, 1)
        )
        assert (error.abs() <= limit * (1 + 1e-5)).all() and error.any(), ours
    (line,) = lines
    assert str(tmp_path) in line and f"quantized again to {scheme}" in line
    other = load_model(tmp_path, dtype=torch.float32, quantize="mxfp8")  # or to what the user wants
    assert linears(other)[0, "ffn.down"].scheme == "mxfp8"


def test_with_matrices_that_are_quantized_again_a_plain_head_may_be_quantized(tmp_path):
    scheme, config, pack, drawn = INEXACT["gptq act-order"]
    build(tmp_path, config, pack, **drawn)
    for head in (None, "int8"):
        model = load_model(tmp_path, dtype=torch.float32, head_scheme=head)
        assert (
            linears(model)[0, "ffn.down"].scheme == scheme
            and getattr(model.lm_head, "scheme", None) == head
        )


def test_an_adapter_is_not_merged_into_matrices_that_are_quantized_again(tmp_path):
    """Of a folder in which every matrix is quantized, so that nothing else tells that it is."""
    _, config, pack, drawn = INEXACT["gptq act-order"]
    build(tmp_path, config, pack, **drawn)
    with pytest.raises(ValueError, match="is stored quantized; merge into the original weights"):
        load_model(checkpoint.Checkpoint(tmp_path, tmp_path / "adapter"))


# ---------------------------------------------------------------------------- what could go wrong


def edit_config(folder: Path, **changes) -> None:
    config = config_json(folder)
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_the_versions_of_gptq_differ(folder, written):
    """Were the version ignored, or one added to each code apart from its word, the tests above
    would notice."""
    weights = written("gptq v1 g128")[1]
    edit_config(folder, checkpoint_format="gptq_v2")
    for (n, ours), linear in linears(load_model(folder, dtype=torch.float32)).items():
        differ = linear.dequantized(torch.float32) != published(weights, n, ours)
        assert differ.float().mean() > 0.9, ours


@pytest.mark.parametrize("group", [-1, 99])
def test_inputs_of_a_group_that_is_not_there_are_refused(group, folder):
    """An index of -1 would read the last group's scale."""

    def change(tensors):
        name = next(name for name in tensors if name.endswith("q_proj.g_idx"))
        tensors[name][5] = group

    edit_tensors(folder, change)
    edit_config(folder, desc_act=True)
    message = rf"{folder}: .*q_proj\.g_idx has groups outside 0 to "
    with pytest.raises(ValueError, match=message):
        load_model(folder, dtype=torch.float32)


def test_stored_eights_of_an_asymmetric_folder_are_nines_in_version_1(tmp_path):
    """Only where the folder says that it is symmetric do they tell that it is of version 2."""
    weights = build(tmp_path, gptq_config(sym=False), gptq, symmetric=True)
    eights = -0x77777778  # 0x88888888

    def change(tensors):
        for name in [name for name in tensors if name.endswith("qzeros")]:
            tensors[name] = torch.full_like(tensors[name], eights)

    edit_tensors(tmp_path, change)
    for (n, ours), linear in linears(load_model(tmp_path, dtype=torch.float32)).items():
        differ = linear.dequantized(torch.float32) != published(weights, n, ours)
        assert differ.all(), ours


def test_the_order_of_awq_matters(tmp_path):
    weights = build(tmp_path, awq_config(), lambda d, bits: awq(d, bits, order=range(8)))
    for (n, ours), linear in linears(load_model(tmp_path, dtype=torch.float32)).items():
        differ = linear.dequantized(torch.float32) != published(weights, n, ours)
        # two of eight outputs stand where they would without the order
        assert differ.float().mean() > 0.6, ours


@pytest.mark.parametrize("sym", [True, None])
def test_symmetric_zero_points_tell_the_version(sym, tmp_path):
    """Version 2 in a folder that says 1: with sym, transformers' default, a stored 8 cannot mean
    9."""
    weights = build(tmp_path, gptq_config(sym=sym), v2, symmetric=True)
    assert_holds(load_model(tmp_path, dtype=torch.float32), weights)


def test_dynamic_activations_are_said(written, capsys):
    load_model(written("int8")[0])
    assert "here only its weights are" in capsys.readouterr().err


def test_matrices_that_are_not_quantized_stay_as_they_are(tmp_path):
    kept = [
        f"model.layers.0.{name}" for name in ("mlp.gate_proj", "mlp.up_proj", "self_attn.o_proj")
    ]
    weights = build(
        tmp_path / "a", awq_config(modules_to_not_convert=kept), awq, float_modules=kept
    )
    stored = load_file(tmp_path / "a" / "plain" / "model.safetensors")
    for folder in (tmp_path / "a", tmp_path / "b"):
        model = load_model(folder, dtype=torch.float32)
        assert torch.equal(model.layers[0].attention.out.weight, stored[f"{kept[2]}.weight"])
        assert torch.equal(model.layers[0].ffn.gate_up.weight[:F], stored[f"{kept[0]}.weight"])
        for (n, ours), linear in linears(model).items():
            if (n, ours) not in ((0, "attention.out"), (0, "ffn.gate_up")):
                assert torch.equal(linear.dequantized(torch.float32), published(weights, n, ours))
        save_model(model, tmp_path / "b", config_json(folder))


def test_extra_biases_of_zeros_are_nothing(folder, written):
    name = "model.layers.1.mlp.down_proj"
    edit_tensors(folder, lambda t: t.update({f"{name}.bias": torch.zeros(D).half()}))
    assert_holds(load_model(folder, dtype=torch.float32), written("gptq v1 g128")[1])
    edit_tensors(folder, lambda t: t.update({f"{name}.bias": torch.full((D,), 0.1).half()}))
    with pytest.raises(ValueError, match=f"unexpected: {name}.bias"):
        load_model(folder)


GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "channel"}}
PACKED = compressed("pack-quantized", strategy="group", group_size=128)


def with_group(config: dict, **changes) -> dict:
    return {
        **config,
        "config_groups": {"group_0": {**config["config_groups"]["group_0"], **changes}},
    }


REFUSED = [  # (quantization_config, what the message must name)
    ([1], "quantization_config = [1]"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bnb_4bit_quant_type = None"),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "load_in_4bit = None"),
    ({"quant_method": "quanto"}, "quant_method = 'quanto'"),
    ({"quant_method": "fp8", "weight_block_size": [128, 64]}, "weight_block_size = [128, 64]"),
    ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size = 128"),
    ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size = [0, 128]"),
    ({"quant_method": "fp8", "weight_block_size": [{}, 128]}, "weight_block_size = [{}, 128]"),
    ({"quant_method": "fp8", "weight_block_size": [True, 128]}, "weight_block_size = [True, 128]"),
    ({"quant_method": "hqq"}, "quant_method = 'hqq'"),
    ({"quant_method": "aqlm"}, "quant_method = 'aqlm'"),
    ({"quant_method": "mxfp4"}, "quant_method = 'mxfp4'"),  # only gpt-oss has it
    ({"bits": 4}, "quant_method = None"),
    ({"bits": 4, "group_size": 64, "mode": "affine"}, "quant_method = None"),
    (auto_round_config("auto_round:marlin"), "packing_format = 'auto_round:marlin'"),
    (auto_round_config(None), "packing_format = None"),
    (auto_round_config("auto_round", bits=3), "bits = 3"),
    (auto_round_config("auto_round:auto_awq", bits=8), "bits = 8"),
    (auto_round_config("auto_round", data_type="mx_fp"), "data_type = 'mx_fp'"),
    (auto_round_config("auto_round", act_bits=8), "act_bits = 8"),
    (auto_round_config("auto_round", rotation_config={"a": 1}), "rotation_config = {'a': 1}"),
    (gptq_config(dynamic=["+:.*"]), "dynamic = ['+:.*']"),
    (gptq_config(dynamic={"+:(": {"bits": 8}}), "'(' is no pattern of Python's re"),
    (gptq_config(bits=3), "bits = 3"),
    (gptq_config(bits=2), "bits = 2"),
    (gptq_config(bits=True), "bits = True"),
    (gptq_config(bits=4.0), "bits = 4.0"),
    (gptq_config(group_size=0), "group_size = 0"),
    (gptq_config(group_size=None), "group_size = None"),
    (gptq_config(checkpoint_format="marlin"), "checkpoint_format = 'marlin'"),
    (gptq_config(rotation="hadamard"), "rotation = 'hadamard'"),
    (awq_config(version="gemv"), "version = 'gemv'"),
    (awq_config(version="marlin"), "version = 'marlin'"),
    (awq_config(bits=8), "bits = 8"),
    (compressed("marlin-24"), "format = 'marlin-24'"),
    (compressed("mxfp6-quantized", type="float"), "format = 'mxfp6-quantized'"),
    (compressed("pack-quantized", strategy="channel", num_bits=2), "num_bits = 2"),
    (compressed("pack-quantized", strategy="token"), "strategy = 'token'"),
    (
        compressed("float-quantized", type="float", num_bits=8, strategy="group", group_size=64),
        "group_size = 64",
    ),
    (compressed("pack-quantized", strategy="channel", type="float"), "type = 'float'"),
    (compressed("pack-quantized", strategy="group"), "group_size = None"),
    (compressed("pack-quantized", strategy=None, group_size=[[]]), "group_size = [[]]"),
    (
        compressed(
            "float-quantized", type="float", num_bits=8, strategy="block", block_structure=[128, 96]
        ),
        "block_structure = [128, 96]",
    ),
    (with_group(PACKED, output_activations=TOKENS), "output_activations"),
    (with_group(PACKED, weights=None), "weights = None"),
    ({**PACKED, "config_groups": {}}, "config_groups = {}"),
    ({**PACKED, "config_groups": {"a": {"targets": [True]}, "b": {}}}, "targets = [True]"),
    ({**PACKED, "config_groups": {"a": {"targets": 5}, "b": {}}}, "targets = 5"),
    ({**PACKED, "config_groups": {"W4A16": ["Linear"]}}, "W4A16 = ['Linear']"),
    ({**PACKED, "transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
]


@pytest.mark.parametrize(("config", "named"), REFUSED, ids=[named for _, named in REFUSED])
def test_what_is_not_read_is_refused_by_key_and_value(config, named, folder, capsys, monkeypatch):
    (folder / "config.json").write_text(json.dumps({**HF, "quantization_config": config}))
    monkeypatch.setattr(
        sys, "argv", ["generate.py", "--device", "cpu", "--checkpoint", str(folder)]
    )
    with pytest.raises(SystemExit) as status:
        program.main()
    out, err = capsys.readouterr()
    assert status.value.code == 2 and not out
    (line,) = err.splitlines()
    assert (
        line.startswith(f"error: {folder / 'config.json'}: ")
        and named in line
        and "quantization_config" in line
    )


Q = "model.layers.0.self_attn.q_proj"


def drop(*names):
    return lambda folder: edit_tensors(folder, lambda t: [t.pop(name) for name in names])


def put(name: str, change):
    return lambda folder: edit_tensors(folder, lambda t: t.update({name: change(t[name])}))


BROKEN = {  # what is done to the folder; what the line must name
    "no scales": (drop(f"{Q}.scales"), f"missing: {Q}.scales"),
    "no g_idx": (drop(f"{Q}.g_idx"), f"missing: {Q}.g_idx"),
    "no qzeros": (drop(f"{Q}.qzeros"), f"missing: {Q}.qzeros"),
    "no norm": (drop("model.norm.weight"), "missing: model.norm.weight"),
    "shape of codes": (
        put(f"{Q}.qweight", lambda t: t[:-1].clone()),
        f"{Q}.qweight is [31, 256] instead of [32, 256]",
    ),
    "groups of 64": (
        lambda f: edit_config(f, group_size=64),
        "k_proj.scales is [2, 128] instead of [4, 128]",
    ),
    "8 bits": (lambda f: edit_config(f, bits=8), "k_proj.qzeros is [2, 16] instead of [2, 32]"),
    "type of scales": (
        put(f"{Q}.scales", lambda t: t.to(torch.int16)),
        f"{Q}.scales is of type I16",
    ),
    "type of codes": (
        put(f"{Q}.qweight", lambda t: t.float()),
        f"{Q}.qweight is of type F32; I32 can be read",
    ),
    "q in full precision": (
        drop(f"{Q}.qweight", f"{Q}.qzeros", f"{Q}.scales", f"{Q}.g_idx"),
        f"k_proj is quantized and {Q} is not",
    ),
    "nothing quantized": (
        lambda f: shutil.copy(f / "plain" / "model.safetensors", f),
        "none of its tensors is called *.qweight",
    ),
    "another program's": (lambda f: edit_config(f, quant_method="awq"), "misshapen"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_folders_are_refused_before_a_weight_is_copied(what, folder, monkeypatch):
    breaks, named = BROKEN[what]
    breaks(folder)
    monkeypatch.setattr(
        checkpoint, "allocate", lambda *args: pytest.fail("weights were about to be copied")
    )
    with pytest.raises(ValueError) as error:
        load_model(folder)
    assert str(error.value).startswith(str(folder)) and named in str(error.value)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    "name, scale",
    [
        ("awq g128", "scales"),
        ("gptq v1 g128", "scales"),
        ("packed bf16", "weight_scale"),
        ("int8", "weight_scale"),
        ("fp8 rows", "weight_scale"),
        ("ours", "scale"),
    ],
)
def test_scales_that_are_no_numbers_reach_every_logit(name, scale, value, written, tmp_path):
    """Of every program's folder, and of ours: decoding reports them."""
    folder = tmp_path / "model"
    if name == "ours":
        quantize_command.main(
            [
                "--checkpoint",
                str(written("int8")[0] / "plain"),
                "--scheme",
                "int4-g32",
                "--output",
                str(folder),
            ]
        )
        # the layer that is broken
        (folder / "model-00001-of-00003.safetensors").rename(folder / "model.safetensors")
        tensors = load_file(folder / "model.safetensors")
        for file in folder.glob("model-*.safetensors"):
            tensors |= load_file(file)
        save_file(tensors, folder / "model.safetensors")
    else:
        shutil.copytree(written(name)[0], folder)

    def broken(stored: torch.Tensor) -> torch.Tensor:
        stored = stored.clone()
        stored.view(-1)[5] = value
        return stored

    put(f"{Q}.{scale}", broken)(folder)
    model = load_model(folder, dtype=torch.float32)
    assert not model(torch.arange(5)[None], torch.arange(5)).isfinite().any()


@pytest.mark.parametrize(
    "name",
    [
        "model.norm.weight",
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.1.input_layernorm.weight",
    ],
)
@pytest.mark.parametrize("method", [[], ["--method", "search"]])
def test_weights_that_are_no_numbers_are_not_written(name, method, full, tmp_path, capsys):
    put(name, lambda t: t * torch.nan)(full)
    arguments = ["--scheme", "int4-g32", "--output", str(tmp_path / "q"), *method]
    with pytest.raises(SystemExit):
        quantize_command.main(["--checkpoint", str(full), *arguments])
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith(f"error: {full}: ") and "NaN" in err and not (tmp_path / "q").exists()


def test_such_a_folder_is_not_quantized_to_something_else(folder, tmp_path, capsys):
    with pytest.raises(
        ValueError,
        match=r"is stored in int4-g128-float32 and cannot be quantized to int8; use the or",
    ):
        load_model(folder, quantize="int8")
    with pytest.raises(ValueError, match="its head is stored in full precision, not in int8"):
        load_model(folder, head_scheme="int8")
    with pytest.raises(SystemExit):
        quantize_command.main(
            ["--checkpoint", str(folder), "--scheme", "int8", "--output", str(tmp_path / "out")]
        )
    assert "is stored in gptq already; use the original" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_float32_scales_are_a_choice_too(written, tmp_path):
    """quantize.py writes weights in the folder's type, but parts as they are."""
    plain = written("gptq v1 g128")[0] / "plain"
    quantize_command.main(
        [
            "--checkpoint",
            str(plain),
            "--scheme",
            "int4-g32-float32",
            "--output",
            str(tmp_path / "q"),
        ]
    )
    assert load_model(tmp_path / "q").layers[0].ffn.down.parts()["zero"].dtype == torch.float32


def test_experts_in_unlike_schemes_are_counted(folder_of, tmp_path):
    """Gate and up of an expert are one matrix for its kernel, which has one scheme."""
    gate, up, down = (
        f"model.layers.0.mlp.experts.0.{name}_proj.weight" for name in ["gate", "up", "down"]
    )
    linears = ["layers.0.ffn.experts.0.gate_up", "layers.0.ffn.experts.0.down"]
    stored = {name: Stored((8, 8), "int8") for name in (gate, up, down)}
    config = checkpoint.load_config(folder_of("qwen3-moe"))
    source = Source(config, linears, stored)

    def note(quantize: str | None = None) -> str:
        schemes = quantization.choose_schemes(source, tmp_path, quantize)
        return quantization.plain_note(source, schemes)

    assert not note()
    stored[up] = Stored((8, 8), "fp8")
    assert note().endswith("load as plain weights, 2.56e-07 GB in 16 bits: 1 in fp8, 1 in int8")
    # 8 bits do not become 4 because others do.
    stored[up] = Stored((8, 8), floats=torch.zeros, near="int4-g32", reason="its order")
    assert note().endswith("1 in int8") and note("int8") == ""
    assert not note("int8")  # as which they load then


def test_config_alone_still_refuses():
    """Whoever reads a config.json without checkpoint.py must not take such a folder for one in full
    precision."""
    with pytest.raises(ValueError, match="quantization_config"):
        config_from_hf({**HF, "quantization_config": gptq_config()})
    assert checkpoint.foreign_layouts(HF) is None


# --------------------------------------------------------------- what other programs make of ours


def quantized(plain: Path, output: Path, *arguments: str, **hf) -> Path:
    (plain / "config.json").write_text(json.dumps(config_json(plain) | hf))
    quantize_command.main(["--checkpoint", str(plain), "--output", str(output), *arguments])
    return output


@pytest.fixture
def full(written, tmp_path):
    """A folder in full precision that a test may change."""
    return shutil.copytree(written("gptq v1 g64 biased")[0] / "plain", tmp_path / "full")


@pytest.mark.parametrize("head", [[], ["--head"]], ids=["head as it is", "head too"])
@pytest.mark.parametrize(
    "scheme, kind", [("int8", "int"), ("fp8", "float"), ("int8-float32", "int")]
)
def test_eight_bits_are_written_as_compressed_tensors_are(scheme, kind, head, full, tmp_path):
    """Exactly what its format wants, and read back as what loading with the scheme makes, bit for
    bit."""
    head = head + [scheme] * len(head)
    folder = quantized(full, tmp_path / "q", "--scheme", scheme, *head, dtype="float32")
    config = config_json(folder)["quantization_config"]
    assert config.pop("ignore") == ([] if head else ["lm_head"])
    weights = {
        "num_bits": 8,
        "type": kind,
        "strategy": "channel",
        "symmetric": True,
        "dynamic": False,
    }
    group = {"targets": ["Linear"], "format": f"{kind}-quantized", "weights": weights}
    assert config == {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
    }
    stored = load_file(next(folder.glob("model-00001-*")))
    weight, scale = (
        stored[f"model.layers.0.mlp.up_proj.{name}"] for name in ("weight", "weight_scale")
    )
    assert weight.dtype == (
        torch.int8 if kind == "int" else torch.float8_e4m3fn
    ) and scale.shape == (F, 1)
    got = load_model(folder, dtype=torch.float32)
    want = load_model(
        full, dtype=torch.float32, quantize=scheme, head_scheme=scheme if head else None
    )
    (names, ours), (others, theirs) = (zip(*model.named_parameters()) for model in (got, want))
    assert names == others and all(map(torch.equal, map(as_bits, ours), map(as_bits, theirs)))
    assert checkpoint.Checkpoint(folder).stored_scheme == scheme


def as_bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("scheme", ["int8", "fp8", "int8-float32"])
def test_transformers_reads_what_is_written_for_it(scheme, full, tmp_path, capsys):
    """Logits of the same weights, in float32: within the bound above."""
    pytest.importorskip("compressed_tensors")
    import transformers

    folder = quantized(full, tmp_path / "q", "--scheme", scheme, dtype="float32")
    assert "; transformers reads it as compressed-tensors" in capsys.readouterr().err
    tokens, pos = torch.arange(40)[None] % 96, torch.arange(40)
    want = load_model(folder, dtype=torch.float32)(tokens, pos)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        assert (theirs(tokens).logits - want).abs().max() <= 9 * 512 * 2**-24 * want.abs().max()


@pytest.mark.parametrize(
    "how", ["--scheme int4-g32", "--scheme mxfp6", "--scheme int8 --head int4-g32", "tied", "saved"]
)
def test_transformers_refuses_what_only_we_read(how, full, tmp_path):
    """It would load random weights, with a table of warnings."""
    import transformers

    folder = tmp_path / "q"
    if how == "saved":
        save_model(load_model(full, quantize="int8"), folder, config_json(full))
    else:
        tied = how == "tied"
        if tied:
            edit_tensors(full, lambda t: t.pop("lm_head.weight"))
        arguments = "--scheme int8 --head int8" if tied else how
        quantized(full, folder, *arguments.split(), tie_word_embeddings=tied)
    assert load_model(folder)
    with pytest.raises(ValueError, match="quant_method"):
        transformers.AutoModelForCausalLM.from_pretrained(folder)


def test_errors_name_a_tied_head_as_the_folder_does(full, tmp_path):
    """quantize.py writes the matrix that is embedding and head under the head's name."""
    edit_tensors(full, lambda t: t.pop("lm_head.weight"))
    folder = quantized(
        full, tmp_path / "q", "--scheme", "int8", "--head", "int8", tie_word_embeddings=True
    )
    assert load_model(folder).lm_head.scheme == "int8"
    *_, last = sorted(folder.glob("*.safetensors"))
    tensors = load_file(last)
    save_file(tensors | {"lm_head.codes": tensors["lm_head.codes"][1:]}, last)
    with pytest.raises(ValueError, match=r"misshapen: lm_head\.codes is \[") as misshapen:
        load_model(folder)
    del tensors["lm_head.scale"]
    save_file(tensors, last)
    with pytest.raises(ValueError, match=r"missing: lm_head\.scale$") as missing:
        load_model(folder)
    assert "embed_tokens" not in f"{misshapen.value} {missing.value}"


def test_modules_that_gptqs_dynamic_leaves_out_stay_plain(tmp_path):
    kept = ["model.layers.0.self_attn.o_proj"]
    dynamic = {
        "-:.*layers\\.0\\..*o_proj.*": {"bits": 8},
        "+:.*down_proj.*": {"bits": 4, "desc_act": False},
    }
    build(tmp_path, gptq_config(dynamic=dynamic), gptq, float_modules=kept)
    layer = load_model(tmp_path, dtype=torch.float32).layers[0]
    assert (
        layer.attention.out.weight.is_floating_point()
        and layer.ffn.down.scheme == "int4-g128-float32"
    )


# -------------------------------------------------------------------------------- several layouts


def layer(n: int, name: str) -> str:
    return f"model.layers.{n}.{name}"


EIGHT_ROWS = {"bits": 8, "group": -1, "symmetric": True}
INT8_GROUP = {
    "targets": ["re:.*self_attn\\.(q|k|v)_proj$"],
    "format": "int-quantized",
    "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
}
FP8_GROUP = {
    "targets": ["model.layers.1.mlp.down_proj"],
    "format": "float-quantized",
    "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
}
INT4_GROUP = {
    "targets": ["Linear"],
    "format": "pack-quantized",
    "weights": {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": 128,
        "symmetric": True,
    },
}
WIDER_GROUP = INT4_GROUP | {
    "targets": ["re:.*mlp\\.(gate|up)_proj", "re:.*layers.1.mlp.down_proj"],
    "weights": INT4_GROUP["weights"] | {"group_size": 32},
}
MIXED = {  # name: (config, writer, {module: (writer, what is drawn)}, plain modules, schemes)
    "gptq": (
        gptq_config(
            dynamic={
                "+:model\\.layers\\.0\\.mlp\\.down_proj": {"group_size": 32},
                "+:.*down_proj": {"bits": 8, "group_size": -1, "sym": True},
                "+:.*\\.o_proj": {"bits": 8, "group_size": -1, "sym": True},
                "-:.*\\.1\\.self_attn\\.o_proj": {},
            }
        ),
        gptq,
        {
            layer(0, "mlp.down_proj"): (gptq, {"group": 32}),
            layer(1, "mlp.down_proj"): (gptq, EIGHT_ROWS),
            layer(0, "self_attn.o_proj"): (gptq, EIGHT_ROWS),
        },
        [layer(1, "self_attn.o_proj")],
        {
            (0, "ffn.down"): "int4-g32-float32",
            (1, "ffn.down"): "int8-float32",
            (0, "attention.out"): "int8-float32",
            (1, "attention.out"): None,
        },
    ),
    "auto-round": (
        auto_round_config(
            "auto_round",
            extra_config={
                "mlp.*down_proj": {"bits": 8, "group_size": -1},
                layer(1, "mlp.down_proj"): {"group_size": 32},
                layer(0, "self_attn.o_proj"): {"bits": 16, "group_size": 3},
            },
        ),
        lambda d, bits: without_order(d, bits, 2),
        {
            layer(0, "mlp.down_proj"): (lambda d, bits: without_order(d, bits, 2), EIGHT_ROWS),
            layer(1, "mlp.down_proj"): (lambda d, bits: without_order(d, bits, 2), {"group": 32}),
        },
        [layer(0, "self_attn.o_proj")],
        {
            (0, "ffn.down"): "int8-float32",
            (1, "ffn.down"): "int4-g32-float32",
            (0, "attention.out"): None,
        },
    ),
    "compressed-tensors": (
        compressed("mixed-precision")
        | {
            "config_groups": {"a": INT4_GROUP, "b": INT8_GROUP, "c": FP8_GROUP, "d": WIDER_GROUP},
            "ignore": ["lm_head", layer(0, "self_attn.o_proj")],
        },
        lambda d, bits: packed(d, bits, True),
        {
            **{
                layer(n, f"self_attn.{x}_proj"): (plain_int8, EIGHT_ROWS)
                for n in range(2)
                for x in "qkv"
            },
            **{
                layer(n, f"mlp.{x}_proj"): (lambda d, bits: packed(d, bits, True), {"group": 32})
                for n in range(2)
                for x in ("gate", "up")
            },
            layer(1, "mlp.down_proj"): (plain_float8, {"draw": Float8, "group": -1}),
        },
        [layer(0, "self_attn.o_proj")],
        {
            (0, "attention.qkv"): "int8-float32",
            (1, "attention.qkv"): "int8-float32",
            (0, "ffn.gate_up"): "int4-g32-float32",
            (1, "ffn.gate_up"): "int4-g32-float32",
            (1, "ffn.down"): "fp8-float32",
            (0, "attention.out"): None,
        },
    ),
}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """name of MIXED -> (folder, its model of plain weights)"""

    @functools.cache
    def make(name: str):
        folder = tmp_path_factory.mktemp("mixed") / "model"
        config, writer, others, plain, _ = MIXED[name]
        symmetric = name == "compressed-tensors"
        build(folder, config, writer, symmetric=symmetric, others=others, float_modules=plain)
        return folder, load_model(folder / "plain", dtype=torch.float32)

    return make


def wrapped(settings: dict) -> dict:
    """The same settings for modules by their names in a model that wraps the text model."""
    text = json.dumps(settings)
    for name in ("model.layers.", "model\\\\.layers\\\\."):
        text = text.replace(name, f"language_model.{name}")
    return json.loads(text)


@pytest.mark.parametrize("name", ["int8", "fp8 rows", "packed bf16"])
@pytest.mark.parametrize("names_method", [True, False])
def test_compression_config_is_the_older_name_of_the_settings(
    name, names_method, written, tmp_path
):
    """Of compressed-tensors; vLLM reads it too."""
    folder = shutil.copytree(written(name)[0], tmp_path / "model")
    expected = load_model(folder, pack=False)
    hf = config_json(folder)
    hf["compression_config"] = hf.pop("quantization_config") | {"quantization_status": "frozen"}
    if not names_method:
        del hf["compression_config"]["quant_method"]
    (folder / "config.json").write_text(json.dumps(hf))
    opened = checkpoint.Checkpoint(folder)
    model = opened.load(pack=False)
    assert opened.stored_scheme == "compressed-tensors"
    for (key, linear), other in zip(linears(model).items(), linears(expected).values()):
        assert linear.scheme == other.scheme, key
        assert torch.equal(stored_weight(linear), stored_weight(other)), key


@pytest.mark.parametrize("name", MIXED)
def test_modules_of_a_wrapped_text_model_have_them_too(name, mixed, tmp_path):
    """Under the names of the model that the writer loaded, here Mistral 3's."""
    folder, plain = mixed(name)
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {f"language_model.{tensor}": value for tensor, value in tensors.items()},
        tmp_path / "model.safetensors",
    )
    hf = config_json(folder)
    settings = wrapped(hf.pop("quantization_config"))
    assert "language_model" in json.dumps(settings)
    text = hf | {"model_type": "mistral", "sliding_window": None}
    outer = {"model_type": "mistral3", "text_config": text, "quantization_config": settings}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    model = load_model(tmp_path, dtype=torch.float32)
    schemes = {key: getattr(linear, "scheme", None) for key, linear in linears(model).items()}
    assert schemes == dict.fromkeys(schemes, "int4-g128-float32") | MIXED[name][-1]
    for key, linear in linears(model).items():
        assert torch.equal(stored_weight(linear), linears(plain)[key].weight), key


def stored_weight(linear) -> torch.Tensor:
    is_quantized = isinstance(linear, QuantizedLinear)
    return linear.dequantized(torch.float32) if is_quantized else linear.weight


@pytest.mark.parametrize("name", MIXED)
def test_modules_have_layouts_of_their_own(name, mixed):
    folder, plain = mixed(name)
    model = load_model(folder, dtype=torch.float32)
    schemes = {key: getattr(linear, "scheme", None) for key, linear in linears(model).items()}
    assert schemes == dict.fromkeys(schemes, "int4-g128-float32") | MIXED[name][-1]
    for key, linear in linears(model).items():
        assert torch.equal(stored_weight(linear), linears(plain)[key].weight), key
    tokens, pos = torch.arange(40)[None] % 96, torch.arange(40)
    want = plain(tokens, pos)
    limit = 9 * 512 * 2**-24 * want.abs().max()
    assert (pack_model(model)(tokens, pos) - want).abs().max() <= limit


@pytest.mark.parametrize("name", MIXED)
def test_pieces_of_mixed_folders_are_slices(name, mixed):
    folder, _ = mixed(name)
    for rank in range(2):
        ranks = Ranks(rank, 2)
        shards = []
        for path in (folder, folder / "plain"):
            source = checkpoint.Checkpoint(path).source
            schemes = quantization.choose_schemes(source, path)
            model = models.empty_model(source.config, torch.float32, schemes, ranks)
            model = models.allocate(model, "cpu")
            names = [n for n, _ in model.named_parameters()]
            models.load_parameters(model, names, source.tensors, ranks)
            shards.append({key: stored_weight(linear) for key, linear in linears(model).items()})
        assert all(torch.equal(shards[0][key], shards[1][key]) for key in shards[1])


@pytest.mark.parametrize("name", MIXED)
def test_a_mixed_folder_may_be_quantized_to_one_scheme(name, mixed, tmp_path):
    """And saved then: a folder of ours has one scheme."""
    folder, _ = mixed(name)
    with pytest.raises(ValueError, match="no folder holds such a model: its blocks are in "):
        save_model(load_model(folder), tmp_path / "q", config_json(folder))
    model = load_model(folder, dtype=torch.float32, quantize="int8")
    want = load_model(folder / "plain", dtype=torch.float32, quantize="int8")
    for key, linear in linears(model).items():
        if MIXED[name][-1].get(key, "") is not None:
            assert torch.equal(stored_weight(linear), stored_weight(linears(want)[key])), key
    save_model(model, tmp_path / "q", config_json(folder))
    assert load_model(tmp_path / "q").layers[0].ffn.down.scheme == "int8"


def test_matrices_that_no_scheme_holds_exactly_are_quantized_again(tmp_path, capsys):
    """To int8 where their codes have 8 bits, next to those that are as published."""
    name = layer(0, "mlp.down_proj")
    config = gptq_config(dynamic={"+:.*0.mlp.down_proj": {"bits": 8}})
    weights = build(tmp_path, config, gptq, others={name: (gptq, {"bits": 8})})
    model = load_model(tmp_path, dtype=torch.float32)
    down = model.layers[0].ffn.down
    assert down.scheme == "int8" and model.layers[1].ffn.down.scheme == "int4-g128-float32"
    error = (down.dequantized(torch.float32) - weights[name]).abs()
    assert (error <= down.scale.float()[:, None] / 2 * (1 + 1e-5)).all() and error.any()
    assert "quantized again to int8" in capsys.readouterr().err


def test_a_head_that_no_scheme_holds_exactly_is_said_to_load_as_plain_weights(tmp_path, capsys):
    """And not to be quantized again, as matrices of blocks are."""
    config = gptq_config(lm_head=True, dynamic={"+:.*lm_head": {"bits": 8}})
    build(tmp_path, config, gptq, head=True, others={"lm_head": (gptq, {"bits": 8})})
    model = load_model(tmp_path, dtype=torch.float32)
    assert not isinstance(model.lm_head, QuantizedLinear)
    assert model.layers[0].ffn.down.scheme == "int4-g128-float32"
    said = capsys.readouterr().err
    assert "load as plain weights" in said and "quantized again" not in said
    with pytest.raises(ValueError, match="its head is stored in 8 bits, not in int8"):
        load_model(tmp_path, dtype=torch.float32, head_scheme="int8")


@pytest.mark.parametrize("key", ["dynamic", "extra_config"])
def test_settings_of_single_modules_are_refused_with_their_names(key, tmp_path):
    own = {".*mlp.up_proj": {"bits": 3}}
    config = auto_round_config("auto_round:gptqmodel") if key == "extra_config" else gptq_config()
    build(tmp_path, config | {key: own}, gptq)
    with pytest.raises(ValueError, match=r"0\.mlp\.up_proj: .*: bits = 3 is not supported"):
        load_model(tmp_path)


def test_groups_of_compressed_tensors_are_those_of_its_package(mixed):
    """Its own choice of a group for every module of transformers' model."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    import transformers

    settings, *_ = MIXED["compressed-tensors"]
    targets = [
        "model.layers.0.mlp.up_proj",
        "re:.*layers.*k_proj",
        "re:.*0.*gate_proj",
        "re:.*v_proj",
    ]
    groups = settings["config_groups"] | {
        str(i): INT4_GROUP | {"targets": [target]} for i, target in enumerate(targets)
    }
    settings = settings | {"config_groups": groups, "ignore": []}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.AutoConfig.for_model(**HF))
    config = quantization.QuantizationConfig.model_validate(settings)
    for i, scheme in enumerate(config.config_groups.values()):
        scheme.format = str(i)  # a name that its copies keep
    quantization.apply_quantization_config(model, config)
    chosen = set()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            (group,) = detection.compressed_override(settings, [name])["config_groups"]
            assert module.quantization_scheme.format == str([*groups].index(group)), name
            chosen.add(group)
    assert len(chosen) == 7  # all but "a pattern that another precedes"


def test_transformers_reads_several_groups_alike(mixed):
    pytest.importorskip("compressed_tensors")
    import transformers

    folder, plain = mixed("compressed-tensors")
    tokens, pos = torch.arange(40)[None] % 96, torch.arange(40)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    want = plain(tokens, pos)
    with torch.no_grad():
        assert (theirs(tokens).logits - want).abs().max() <= 9 * 512 * 2**-24 * want.abs().max()
