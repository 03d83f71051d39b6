"""weights/ and quantize.py: every code means what its specification says, errors stay within their
derived bounds. A quantized Linear computes with exactly the weights that its parts stand for,
packed for a kernel or not."""

import contextlib
import io
import json
import math
import os
import shutil
import subprocess
import sys
import types

import pytest
import safetensors.torch as safetensors_types
import torch
from conftest import ROOT, config_json, generate
from steps import token_records
from torch.utils._python_dispatch import TorchDispatchMode

import cli.quantize as quantize_command
import cli.quantized_folder as quantized_folder
import cli.start as program
import loading.models as load_models
import weights.schemes as schemes
from benchmarks.tables import bits_per_weight
from cli.flags import parse_args
from cli.options import QuantizeOptions
from decoding.engine import Engine
from decoding.sampling import Sampling
from decoding.statistics import Timing
from drafts.base import ModelDraft
from loading.checkpoint import load_config, load_model
from loading.files import stored_dtype
from loading.models import random_model
from loading.quantization import QUICKDRAFT_CONFIG
from loading.saving import save_model
from loading.target import load_target
from loading.tokenizer import copy_files, load_tokenizer
from quantize import gptq, search_range
from scripts import perplexity
from scripts.perplexity import measure, windows
from tests.conformance.formats import biased_linear, check_products, weights
from weights import cpu, formats, linears
from weights.formats import (
    FORMATS,
    Format,
    dequantize_tensor,
    format_of,
    pack_bits,
    quantize_tensor,
    round_scale,
    unpack_bits,
)
from weights.linears import QuantizedLinear
from weights.walker import (
    named_linears,
    pack_model,
    quantize_model,
    quantized_copy,
    quantized_linears,
    replace_linears,
)

# Of MLX's many: codes across bytes, those of the kernels, and the widest.
MLX = ("mlx3-g32", "mlx4-g64", "mlx8-g128")
SCHEMES = [scheme for scheme in FORMATS if not scheme.startswith("mlx") or scheme in MLX]
# exponent, mantissa, bias, largest
MX = {"mxfp8": (4, 3, 7, 448.0), "mxfp6": (2, 3, 1, 7.5), "mxfp4": (2, 1, 1, 6.0)}


# --------------------------------------------------------------------------------- specifications


def spec_value(code: int, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    """OCP Microscaling v1.0, section 5.3: (-1)^s * 2^(e - bias) * 1.m, or 2^(1 - bias) * 0.m where
    e = 0."""
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) & 1 else 1.0
    e, m = code >> mantissa_bits & (2**exponent_bits - 1), code & (2**mantissa_bits - 1)
    if e == 0:
        return sign * 2.0 ** (1 - bias) * m / 2**mantissa_bits
    return sign * 2.0 ** (e - bias) * (1 + m / 2**mantissa_bits)


@pytest.mark.parametrize("scheme", MX)
def test_every_mx_code_decodes_to_the_specifications_value(scheme):
    """All codes times all scales, through the packed form; and every value encodes to its own
    code."""
    e, m, bias, largest = MX[scheme]
    bits = 1 + e + m
    # E4M3's NaN is never written
    codes = [c for c in range(2**bits) if not (scheme == "mxfp8" and c & 0x7F == 0x7F)]
    want = torch.tensor([spec_value(c, e, m, bias) for c in codes])
    assert want.abs().max() == largest
    if scheme == "mxfp4":
        assert sorted(set(want.abs().tolist())) == [0, 0.5, 1, 1.5, 2, 3, 4, 6]  # table 5
    if scheme == "mxfp6":
        assert sorted(set(want.abs().tolist()))[:10] == [
            0,
            0.125,
            0.25,
            0.375,
            0.5,
            0.625,
            0.75,
            0.875,
            1,
            1.125,
        ]
    padded = torch.tensor(codes + [0] * (-len(codes) % 32), dtype=torch.int32)[None]
    for scale in (0, 1, 100, 127, 130, 254):
        parts = {
            "codes": pack_bits(padded, bits),
            "scale": torch.full((1, padded.size(1) // 32), scale, dtype=torch.uint8),
        }
        got = dequantize_tensor(parts, scheme)[0, : len(codes)]
        assert torch.equal(got, (want.double() * 2.0 ** (scale - 127)).float())
    assert FORMATS[scheme].encode(want).tolist() == codes


@pytest.mark.parametrize("scheme", MX)
def test_mx_blocks_by_definition(scheme):
    """Shared exponent floor(log2 max) - emax, nearest element with ties to even, saturation:
    against a search over all elements, block by block."""
    e, m, bias, largest = MX[scheme]
    elements = torch.tensor(
        [spec_value(c, e, m, bias) for c in range(2 ** (e + m))], dtype=torch.float64
    )
    elements = elements[elements <= largest]
    w = weights()
    got = dequantize_tensor(quantize_tensor(w, scheme), scheme).double()
    blocks = w.double().unflatten(1, (-1, 32))
    top = blocks.abs().amax(-1, keepdim=True)
    exponent = torch.where(
        top > 0, top.clamp(min=2.0**-149).log2().floor() - math.floor(math.log2(largest)), -127
    )
    x = (blocks / 2.0**exponent).clamp(-largest, largest)
    distance = (x.abs()[..., None] - elements).abs()
    best = distance.amin(-1, keepdim=True)
    # of two nearest, the even code
    even = torch.where(distance == best, torch.arange(len(elements)) % 2, 2).argmin(-1)
    want = (elements[even] * x.sign() * 2.0**exponent).flatten(1)
    assert torch.equal(got, want)


def test_bits_pack_as_documented():
    """4 codes of 6 bits in 3 bytes, 2 of 4 in one, first code lowest; and back, for every code."""
    assert pack_bits(torch.tensor([[1, 2]]), 4).tolist() == [[0x21]]
    assert pack_bits(torch.tensor([[1, 2, 3, 63]]), 6).tolist() == [[0x81, 0x30, 0xFC]]
    for bits in (4, 5, 6, 8):
        codes = torch.randint(0, 2**bits, (3, 96))
        packed = pack_bits(codes, bits)
        assert packed.shape == (3, 96 * bits // 8) and torch.equal(
            unpack_bits(packed, bits), codes.int()
        )
    assert [bits_per_weight(s) for s in ("mxfp8", "mxfp6", "mxfp4", "int4-g32")] == [
        8.25,
        6.25,
        4.25,
        5.0,
    ]
    # llama.cpp's own 6.5625; its 5.5, of which 6 of the 8 bits of an integer
    assert [bits_per_weight(s) for s in ("q6_k", "q5_k")] == [6.5625, 5.625]


def test_scales_round_up():
    x = torch.tensor([1.0, 1.001, 0.3, 0.0, 2.0**-126])
    up = round_scale(x, torch.bfloat16)
    assert (
        up.dtype == torch.bfloat16
        and (up.float() >= x).all()
        and (up.float() <= x * (1 + 2**-7)).all()
    )


def bound(format: Format, w: torch.Tensor, parts: dict) -> torch.Tensor | None:
    """The largest error each format's docstring allows, (out, in), plus float32's own rounding. A
    format of one's own may state it as a method `bound(w, parts)`, and otherwise has None."""
    if hasattr(format, "bound"):
        return format.bound(w, parts)
    kind = type(format)
    if kind is formats.Int8:
        limit = parts["scale"].float()[:, None] / 2
        assert (limit * 2 <= w.abs().amax(1, keepdim=True) / 127 * (1 + 2**-7)).all()
    elif format.group and parts["scale"].dtype == torch.float16:
        # It rounds to nearest, and is 2^-24 apart below 6e-5.
        scale, zero = parts["scale"].float(), parts.get("zero", torch.zeros(1)).float()
        largest = 15 if kind is formats.Asymmetric else format.max_code
        limit = scale / 2 + zero.abs() * 2**-11 + largest * (scale * 2**-11 + 2**-25) + 2**-25
        limit = limit.repeat_interleave(format.group, 1)
    elif kind is formats.Asymmetric and format.center == 0:  # float32 rounds by 2^-24
        limit = parts["scale"] / 2 * (1 + 2**-20) + parts["zero"].abs() * 2**-22
        limit = limit.repeat_interleave(format.group, 1)
    elif kind is formats.Asymmetric:
        scale, zero = parts["scale"].float(), parts["zero"].float()
        limit = (scale / 2 + zero.abs() * 2**-8).repeat_interleave(format.group, 1)
    elif kind is formats.Symmetric and format.code_dtype == torch.float8_e4m3fn:
        scale = parts["scale"].float().repeat_interleave(format.group, 1)[:, : w.size(1)]
        limit = torch.maximum(w.abs() * 2**-4, scale * 2**-10)
    elif kind is formats.KQuant:
        # Codes round by half a scale; with a center the last positive one is missing. Integers
        # round by half a unit, and end at the largest, which float16 may round below what it
        # should reach.
        limit = format.group_scale(parts).repeat_interleave(format.run, 1)
        limit = limit if format.center else limit / 2
        for name, codes in (("scale", 33), ("zero", 1)):
            if name in parts:
                unit = parts[f"{name}_unit"].float().repeat_interleave(format.group, 1)
                largest = format.scale_format.max_code
                limit = limit + codes * (unit / 2 + largest * (unit * 2**-11 + 2**-25))
    elif kind is formats.NvFp4:
        # an element's half step, and what lies beyond 6 where the scale was rounded down
        scale = parts["scale"].float() / parts["global_scale"][:, None]
        top = w.unflatten(1, (-1, 16)).abs().amax(-1)
        assert (scale <= top / 6 * (1 + 2**-4) + 2**-9 / parts["global_scale"][:, None]).all()
        limit = torch.maximum(w.abs() * 2**-2, scale.repeat_interleave(16, 1) / 4)
        return limit + (top * 2**-4).repeat_interleave(16, 1) + 1e-30
    elif kind is formats.Fp8:
        limit = torch.maximum(w.abs() * 2**-4, parts["scale"].float()[:, None] * 2**-10)
    elif kind is not formats.Mx:
        return None
    else:
        m, bias, largest = format.mantissa, format.bias, format.max_element
        top = w.unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True)
        step = torch.ldexp(torch.ones(1), parts["scale"].int()[..., None] - 127) * 2.0 ** (
            1 - bias - m
        )
        saturated = top * (1 - largest / 2.0 ** (math.floor(math.log2(largest)) + 1))
        each = torch.maximum(w.unflatten(1, (-1, 32)).abs() * 2.0 ** -(m + 1), step / 2)
        return (
            torch.maximum(each, torch.where(each > 0, saturated, saturated)).flatten(1) * (1 + 1e-6)
            + 1e-30
        )
    return limit * (1 + 1e-5) + w.abs() * 2**-22 + 1e-30


@pytest.mark.parametrize("scheme", SCHEMES)
def test_errors_stay_within_the_derived_bound(scheme):
    """And the bound is no wild one: something comes within a factor of three of it."""
    w = weights()
    parts = quantize_tensor(w, scheme)
    error = (dequantize_tensor(parts, scheme) - w).abs()
    limit = bound(FORMATS[scheme], w, parts)
    if limit is not None:
        assert (error <= limit).all()
        assert (error / limit)[w.any(1)].max() > 0.33
    assert not dequantize_tensor(parts, scheme)[3].any(), "zeros must stay zeros"
    for name, (shape, dtype) in FORMATS[scheme].shapes(*w.shape).items():
        assert parts[name].shape == shape and parts[name].dtype == dtype
    again = quantize_tensor(dequantize_tensor(parts, scheme), scheme)
    if scheme in MX:  # what is stored is a fixed point
        assert torch.equal(dequantize_tensor(again, scheme), dequantize_tensor(parts, scheme))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_cannot_be_quantized_is_refused(scheme):
    for bad in (math.nan, math.inf, -math.inf):
        w = weights()
        w[2, 9] = bad
        with pytest.raises(ValueError, match="NaN or infinity"):
            quantize_tensor(w, scheme)
    if FORMATS[scheme].group and not FORMATS[scheme].ragged:
        with pytest.raises(ValueError, match=r"\(48, 250\): 250 inputs are no multiple of"):
            quantize_tensor(weights()[:, :250], scheme)
    assert (
        dequantize_tensor(
            quantize_tensor(weights()[:5].half(), scheme), scheme, torch.float16
        ).dtype
        == torch.float16
    )


def test_unknown_schemes_are_named():
    with pytest.raises(ValueError, match=r"'int3' does not exist; there are int8, int4-g32"):
        format_of("int3")
    assert [*FORMATS] == [*schemes.SCHEMES, *schemes.STORED_SCHEMES], (
        "flags are checked by the names alone"
    )


# ---------------------------------------------------------------------------------------- Linears


class Largest(TorchDispatchMode):
    """The largest floating tensor that any operation makes, in elements."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                self.elements = max(self.elements, tensor.numel())
        return out


def packed(linear: torch.nn.Linear, scheme: str) -> QuantizedLinear:
    found = QuantizedLinear.from_float(linear, scheme)
    found.pack()
    return found


@pytest.mark.compiled
@pytest.mark.parametrize("scheme", SCHEMES)
def test_compiled_products_too(scheme):
    """All sizes in one graph, in the dtype that models run in."""
    torch._dynamo.reset()  # more schemes than one function may be compiled for
    linear = biased_linear(48, torch.bfloat16)
    quantized = packed(linear, scheme)

    def products(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [quantized(x) for x in inputs]

    with torch.inference_mode():
        check_products(linear, scheme, torch.compile(products, fullgraph=True, dynamic=False))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "backend", [None, "eager", pytest.param("inductor", marks=pytest.mark.compiled)]
)
@pytest.mark.parametrize("scheme", ["int8", "int8-float32", "fp8"])
def test_float16_reaches_as_far_as_results_and_as_low_as_weights(scheme, backend, monkeypatch):
    """Sums with codes alone would end at 65,504, which an activation of 1,500 reaches; scales of
    8e-7 alone would be off by 3.5 %. Weights and results are rounded to float16, by 2^-11 or 2^-25:
    that is all. For one row, for those of verification and of a prompt; compiled as for a GPU
    too."""
    torch._dynamo.reset()
    if backend == "eager":
        monkeypatch.setattr(linears, "FUSING_DEVICE", "cpu")
    linear = torch.nn.Linear(256, 48, bias=False, dtype=torch.float16).requires_grad_(False)
    linear.weight.uniform_(-0.9, 0.9, generator=torch.Generator().manual_seed(0))
    linear.weight[0, 0], linear.weight[24:] = 0.9, linear.weight[24:] * 1.1e-4
    found = packed(linear, scheme)
    exact = dequantize_tensor(quantize_tensor(linear.weight, scheme), scheme).double()
    product = (
        torch.compile(found, backend=backend, fullgraph=True, dynamic=False) if backend else found
    )
    for M in (1, 6, 40):
        x = torch.randn(M, 256, generator=torch.Generator().manual_seed(M)).half()
        x[:, 0] = 1500
        size = x.double().abs()
        bound = (
            size @ exact.abs().T * (256 * 2**-24 + 2**-10)
            + (size.sum(1, keepdim=True) + 1) * 2**-25
        )
        with torch.inference_mode():
            assert ((product(x).double() - x.double() @ exact.T).abs() <= bound).all(), M


@pytest.mark.parametrize("scheme", SCHEMES)
def test_chunks_change_nothing(scheme, monkeypatch):
    """Large matrices go through a chunk of rows at a time, the last one smaller; packed int4
    through whole blocks. A prompt's product of int8 codes equals that of other chunks up to
    rounding."""
    linear, x, many = biased_linear(40, torch.float32), torch.randn(3, 256), torch.randn(300, 256)
    full = QuantizedLinear.from_float(linear, scheme)
    want = packed(linear, scheme)(x), packed(linear, scheme)(many), full.dequantized(torch.float32)
    monkeypatch.setattr(formats, "CHUNK_WEIGHTS", 256 * 7)
    chunked = QuantizedLinear.from_float(linear, scheme)
    for name, part in full.parts().items():
        assert torch.equal(part.view(torch.uint8), chunked.parts()[name].view(torch.uint8)), name
    got = (
        packed(linear, scheme)(x),
        packed(linear, scheme)(many),
        chunked.dequantized(torch.float32),
    )
    assert torch.equal(got[0], want[0]) and torch.equal(got[2], want[2])
    if full.format.kernel == "int8":
        assert torch.allclose(got[1], want[1], rtol=1e-4, atol=1e-4)
    else:
        assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("scheme", ["int8", "int4-g32", "int4-g64", "int4-g128"])
def test_a_kernel_never_unpacks_all_weights(scheme):
    """For one row and for verification's, no operation makes a float tensor of the weights' size; a
    format without a kernel does: the control. Small weights and large ones, which have kernels of
    their own."""
    for rows in (512, cpu.LARGE_BYTES // 256):
        linear = torch.nn.Linear(256, rows, bias=False, dtype=torch.bfloat16)
        unpacked = QuantizedLinear.from_float(linear, "mxfp6")  # as where oneDNN is missing
        for quantized, reads_codes in ((packed(linear, scheme), True), (unpacked, False)):
            for M in (1, 6):
                with Largest() as seen, torch.inference_mode():
                    quantized(torch.randn(M, 256, dtype=torch.bfloat16))
                assert (seen.elements < 256 * rows / 2) == reads_codes


@pytest.mark.skipif(
    not torch.cpu._is_vnni_supported(), reason="this processor may add 8-bit products inexactly"
)
def test_a_processor_that_adds_exactly_is_found_to():
    """tests/test_cpu_products.py is skipped where products of integers are not exact: a mistake in
    them must not hide so. A processor with VNNI has such products, unless oneDNN is held to older
    instructions."""
    if torch.cpu._is_vnni_supported() and "ONEDNN_MAX_CPU_ISA" not in os.environ:
        assert cpu.sums_exactly(cpu.PackedInt8)
    if not cpu.sums_exactly(cpu.PackedInt8):
        codes, x = (
            torch.full((32, 64), 127, dtype=torch.int8),
            torch.full((1, 64), 255, dtype=torch.uint8),
        )
        wrong = cpu.PackedInt8(codes, torch.ones(32)).run_kernel(x) != 127 * 127 * 64
        assert wrong.any(), "products that are exact are not taken"


def test_a_processor_without_such_products_takes_others(monkeypatch):
    """As on ARM, where oneDNN is there and its products of integers are not."""

    def missing(*_):
        raise RuntimeError(
            "Could not run 'onednn::qlinear_prepack' with arguments from the 'CPU' backend"
        )

    monkeypatch.setattr(cpu, "has_tiles", lambda: False)
    monkeypatch.setattr(cpu, "sums_exactly", cpu.sums_exactly.__wrapped__)
    for form in (cpu.PackedInt8, cpu.FbgemmInt8):
        monkeypatch.setattr(form, "prepack", missing)
    assert cpu.int8_form(torch.zeros(cpu.LARGE_BYTES // 256, 256, dtype=torch.int8)) is None


# ----------------------------------------------------------------------------------------- models


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory):
    """A tiny folder whose inputs divide by every group: qkv biases, untied."""
    import transformers

    folder = tmp_path_factory.mktemp("wide")
    config = transformers.AutoConfig.for_model(
        "qwen2",
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=131,
        max_position_embeddings=96,
        dtype="float32",
    )
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


def greedy(model, n: int = 8, **options) -> list[int]:
    return [
        id
        for _, id in generate(
            model, [[5, 9, 40]], sampling=Sampling(0), max_new_tokens=n, **options
        )
    ]


@pytest.mark.one_in(10, 3)
@pytest.mark.parametrize("head", [None, "int8"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantized_on_the_way_in_from_disk_and_in_memory_agree(scheme, head, wide_folder, tmp_path):
    """Bit for bit: loading with a scheme, quantizing a loaded model, and loading what was
    stored."""
    on_the_way = load_model(
        wide_folder, dtype=torch.float32, quantize=scheme, head_scheme=head, pack=False
    )
    in_memory = quantize_model(load_model(wide_folder, dtype=torch.float32), scheme, head)
    hf = json.loads((wide_folder / "config.json").read_text()) | {
        "quantization": {"scheme": scheme, "head": head}
    }
    save_model(on_the_way, tmp_path / "stored", hf)
    stored = load_model(tmp_path / "stored", dtype=torch.float32, pack=False)
    linears = [quantized_linears(model) for model in (on_the_way, in_memory, stored)]
    assert len(linears[0]) == 2 * 4 + bool(head) == len(linears[1]) == len(linears[2])
    for a, *others in zip(*linears):
        for other in others:
            assert all(torch.equal(part, other.parts()[name]) for name, part in a.parts().items())
    assert (
        greedy(pack_model(on_the_way))
        == greedy(pack_model(in_memory))
        == greedy(pack_model(stored))
    )
    if scheme != "int8":
        with pytest.raises(
            ValueError, match=f"is stored in {scheme} and cannot be quantized to int8"
        ):
            load_model(tmp_path / "stored", quantize="int8")


@pytest.mark.parametrize("head", ["int8", "nonsense"])
def test_a_head_alone_is_refused_not_ignored(head, wide_folder):
    for build in (
        load_model,
        lambda folder, **options: random_model(load_config(folder), **options),
    ):
        with pytest.raises(
            ValueError, match=rf"head {head} \(--quantize_head\) needs .*--quantize"
        ):
            build(wide_folder, head_scheme=head)


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("flags", "scheme"),
    [
        ("--quantize int4-g32", "int8"),
        ("--quantize int4-g32 --quantize_head none", None),
        ("--quantize int8", None),
        ("--quantize int4-g32 --quantize_head int4-g32", "int4-g32"),
        ("", None),
    ],
)
def test_int4_brings_an_int8_head(flags, scheme, tmp_path):
    """Unless told otherwise. A folder that is stored with another head loads, with the flag that
    made it too."""
    args = parse_args(["--checkpoint", "checkpoints/demo", *flags.split()])
    model, _ = load_target(args.model, torch.device("cpu"))
    assert getattr(model.lm_head, "scheme", None) == scheme
    if args.model.quantize:
        command = [
            "--checkpoint",
            "checkpoints/demo",
            "--output",
            str(tmp_path / "q"),
            "--scheme",
            args.model.quantize,
        ]
        quantize_command.main(command + (["--head", scheme] if scheme else []))
        for again in ([], ["--quantize", args.model.quantize]):
            args = parse_args(["--checkpoint", str(tmp_path / "q"), *again])
            assert (
                getattr(load_target(args.model, torch.device("cpu"))[0].lm_head, "scheme", None)
                == scheme
            )


def test_a_tied_head_is_quantized_once(folder_of):
    """One copy serves lookup and logits; float32 logits are those of the dequantized table."""
    folder = folder_of("qwen2")
    model = load_model(folder, dtype=torch.float32, quantize="int8", head_scheme="int8", pack=False)
    codes = [p for _, p in model.named_parameters() if p.shape == (131, 64)]
    assert len(codes) == 1 and not hasattr(model.embed, "weight")
    table = model.lm_head.dequantized(torch.float32)
    tokens = torch.tensor([[3, 130, 7]])
    assert torch.equal(model.embed(tokens), table[tokens])
    hidden = model.hidden(tokens, torch.arange(3))
    assert torch.allclose(model.head(hidden), hidden @ table.T, atol=1e-4)


def test_weights_that_are_not_finite_are_named(wide_folder, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(wide_folder, tmp_path / "broken")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][5, 5] = math.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight: weights hold NaN"
    ):
        load_model(folder, quantize="int8")


@pytest.mark.parametrize(
    "value", ["int8", {"scheme": "int3"}, {"scheme": "int8", "head": "x"}, {}, {"bits": 4}]
)
def test_a_quantization_entry_that_means_nothing_is_refused(value, wide_folder, tmp_path):
    folder = shutil.copytree(wide_folder, tmp_path / "odd")
    hf = json.loads((folder / "config.json").read_text()) | {"quantization": value}
    (folder / "config.json").write_text(json.dumps(hf))
    with pytest.raises(ValueError, match=r"config\.json: quantization = .* is not supported"):
        load_model(folder)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("head", [None, "int8"])
@pytest.mark.parametrize("scheme", ["int8", "int4-g32", "mxfp6"])
def test_drafting_with_the_quantized_self(scheme, head, folder_of):
    """On the target's own cache: greedy output is the target's. Norms, embedding, head and
    rotations are the target's own modules, before packing and after, and only blocks' Linears are
    new."""
    folder = folder_of("llama-3")
    target = load_model(
        folder, dtype=torch.float32, quantize="int8" if head else None, head_scheme=head, pack=False
    )
    draft = quantized_copy(target, scheme)
    pos = torch.arange(9)
    again = quantize_model(load_model(folder, dtype=torch.float32), scheme, head)
    if head is None:
        assert torch.equal(draft(pos[None], pos), again(pos[None], pos))
    linears = dict(named_linears(draft))
    assert all(linear.scheme == scheme for name, linear in linears.items() if name != "lm_head")
    assert pack_model(target, draft) is target
    new = {
        id(parameter)
        for linear in quantized_linears(draft.layers)
        for parameter in linear.parameters()
    }
    own = {id(parameter) for parameter in target.parameters()}
    assert {id(parameter) for parameter in draft.parameters()} - new <= own and not new & own
    assert (
        draft.lm_head is target.lm_head
        and draft.embed is target.embed
        and draft.rope is target.rope
    )
    timing = Timing()
    drafter = ModelDraft(draft, on_layers=range(3))
    assert greedy(target, 60, drafter=drafter, timing=timing) == greedy(target, 60)
    assert sum(token.index < token.accepted for token in token_records(timing)[0]) > 20


@pytest.mark.parametrize("plain", [True, False])
def test_a_packed_model_is_neither_saved_nor_copied(plain, folder_of, tmp_path, monkeypatch):
    """Only kernels can read its weights. The message says what works, and it does."""
    monkeypatch.setattr(cpu, "LARGE_BYTES", 0)
    options = {"dtype": torch.float32, "quantize": None if plain else "int8"}
    model = pack_model(load_model(folder_of("llama-3"), **options))
    with pytest.raises(
        ValueError, match=r"packed model cannot be saved.*; load it with pack=False"
    ):
        save_model(model, tmp_path / "q", {})
    assert not (tmp_path / "q").exists()
    with pytest.raises(
        ValueError, match=r"packed model cannot be copied.*; load it with pack=False"
    ):
        quantized_copy(model, "int4-g32")
    model = load_model(folder_of("llama-3"), pack=False, **options)
    save_model(model, tmp_path / "q", config_json(folder_of("llama-3")))
    assert load_model(tmp_path / "q") and quantized_copy(model, "int4-g32")


def test_the_walker_visits_every_linear_in_the_order_of_computing(folder_of):
    model = load_model(folder_of("llama-3"))
    inner = ["attention.qkv", "attention.out", "ffn.gate_up", "ffn.down"]
    names = [f"layers.{i}.{name}" for i in range(3) for name in inner] + ["lm_head"]
    assert [name for name, _ in named_linears(model)] == names
    met = []
    for layer in model.layers:
        for name, linear in named_linears(layer):
            linear.register_forward_hook(lambda *_, name=name: met.append(name))
    model(torch.arange(4)[None], torch.arange(4))
    assert met == inner * 3
    seen = []
    replaced = replace_linears(model, lambda name, linear: seen.append(name))
    assert replaced is model and seen == names and not quantized_linears(model)


def test_another_format_loads_saves_and_drafts(folder_of, tmp_path, monkeypatch):
    """The example of docs/fork.md, which no file of ours knows."""

    class Ternary(Format):
        def shapes(self, rows, columns):
            return {"codes": ((rows, columns), torch.int8), "scale": ((rows,), torch.bfloat16)}

        def quantize(self, w):
            scale = w.abs().mean(1).to(torch.bfloat16)
            codes = (w / scale.float()[:, None]).round().clamp(-1, 1)
            return {"codes": codes.to(torch.int8), "scale": scale}

        def dequantize(self, parts):
            return parts["codes"].float() * parts["scale"].float()[:, None]

    monkeypatch.setitem(FORMATS, "ternary", Ternary(bits=8))
    model = load_model(folder_of("llama-3"), dtype=torch.float32, quantize="ternary", pack=False)
    save_model(model, tmp_path / "q", config_json(folder_of("llama-3")))
    again = load_model(tmp_path / "q", dtype=torch.float32)
    target = load_model(folder_of("llama-3"), dtype=torch.float32)
    assert (
        greedy(pack_model(model))
        == greedy(again)
        == greedy(pack_model(quantized_copy(target, "ternary")))
    )
    assert greedy(again) != greedy(target)


@pytest.mark.compiled
@pytest.mark.parametrize("scheme", ["int8", pytest.param("int4-g64", marks=pytest.mark.long)])
def test_compiled_equals_eager(scheme, wide_folder):
    model = load_model(wide_folder, dtype=torch.float32, quantize=scheme)
    want = greedy(model, 30)
    engine = Engine(model, 1, 60, compile=True)
    engine.warm_up("greedy")
    with torch.compiler.set_stance("fail_on_recompile"):
        assert greedy(model, 30, engine=engine) == want


def test_command_line(wide_folder, text_folder, capsys, monkeypatch):
    for arguments, names in [
        (["--quantize", "int3"], "'int3' does not exist"),
        (["--quantize_head", "int8"], "head int8 (--quantize_head) needs a scheme"),
        (["--quantize", "int4-g128"], "layers.0.qkv: 64 inputs are no multiple of the 128"),
        (
            ["--draft", "quantized:int3"],
            "--draft quantized:int3: quantization scheme 'int3' does not exist",
        ),
    ]:
        monkeypatch.setattr(
            sys, "argv", ["generate.py", "--checkpoint", str(text_folder), *arguments]
        )
        with pytest.raises(SystemExit) as exit:
            program.main()
        out, err = capsys.readouterr()
        assert exit.value.code == 2 and out == "" and names in err and "Traceback" not in err
    common = f"--checkpoint {text_folder} --json --max_new_tokens 9 --quantize int8 --device cpu"
    for options in ("", " --quantize_head int8", " --draft quantized:int4-g32"):
        program.main((common + options).split())
        assert len(json.loads(capsys.readouterr().out)["tokens"]) == 9


# ------------------------------------------------------------------------ calibration and command


def correlated(rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    mix = torch.randn(columns // 4, columns, generator=generator)
    noise = 0.3 * torch.randn(rows, columns, generator=generator)
    return torch.randn(rows, columns // 4, generator=generator) @ mix + noise


def test_gptq_without_correlations_is_rounding():
    """A diagonal Hessian spreads nothing: the codes are those of rounding within the same
    ranges."""
    w, format = weights(16, 128), FORMATS["int4-g32"]
    grouped = w.unflatten(1, (-1, 32))
    diagonal = torch.rand(128, generator=torch.Generator().manual_seed(0)) + 0.1
    parts = gptq(w, torch.diag(diagonal), format)
    want = format.with_range(
        grouped, *search_range(grouped, format, diagonal.unflatten(0, (-1, 32)))
    )
    assert all(torch.equal(parts[name], part) for name, part in want.items())


def test_gptq_equals_its_definition():
    """arXiv:2210.17323 eq. (2) and (3), a column at a time with the inverse Hessian of those still
    to come, no factor, no blocks; and it keeps outputs far better than rounding does."""
    w, x, format = weights(8, 192)[:, :192], correlated(600, 192), FORMATS["int4-g64"]
    hessian = (x.T @ x).double()
    parts = gptq(w, hessian, format)
    scale = parts["scale"].double().repeat_interleave(64, 1)
    zero = parts["zero"].double().repeat_interleave(64, 1)
    scale = torch.where(scale > 0, scale, 1.0)
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(192)
    left, rest, codes = (
        hessian.diagonal().argsort(descending=True).tolist(),
        w.double().clone(),
        torch.zeros(8, 192),
    )
    while left:
        column, inverse = left[0], torch.linalg.inv(damped[left][:, left])
        code = ((rest[:, column] - zero[:, column]) / scale[:, column]).round().clamp(-8, 7)
        error = rest[:, column] - code * scale[:, column] - zero[:, column]
        rest[:, left] -= error[:, None] / inverse[0, 0] * inverse[0]
        codes[:, column] = code + 8
        left = left[1:]
    got = unpack_bits(parts["codes"], 4)
    assert (got != codes).float().mean() < 0.002  # a tie of rounding may fall the other way
    grouped = w.unflatten(1, (-1, 64))
    rounded = format.with_range(grouped, *search_range(grouped, format))
    loss = [((format.dequantize(p) - w) @ x.T).square().sum() for p in (parts, rounded)]
    assert loss[0] < 0.5 * loss[1]


def test_gptq_of_other_bits():
    x, w = correlated(600, 64), weights(8, 64)
    format = FORMATS["mlx3-g64"]
    parts = gptq(w, x.T @ x, format)
    loss = [
        ((format.dequantize(p) - w) @ x.T).square().sum()
        for p in (parts, quantize_tensor(w, "mlx3-g64"))
    ]
    assert loss[0] < 0.7 * loss[1]


def test_gptq_with_inputs_that_never_occur():
    x = correlated(100, 64)
    x[:, [3, 40]] = 0
    parts = gptq(weights(8, 64), x.T @ x, FORMATS["int4-g32"])
    assert dequantize_tensor(parts, "int4-g32").isfinite().all()


@pytest.mark.parametrize("size", [2.0**-14, 1.0, 2.0**14])
def test_gptq_does_not_depend_on_the_size_of_inputs(size):
    """Codes follow from what inputs are to each other, with ones that never occur too; and beat
    rounding on them."""
    x, w = correlated(600, 192), weights(8, 192)[:, :192]
    x[:, [3, 40, 41]] = 0
    format = FORMATS["int4-g64"]
    parts, want = (gptq(w, hessian, format) for hessian in ((x * size).T @ (x * size), x.T @ x))
    assert all(torch.equal(parts[name], want[name]) for name in want)
    loss = [
        ((format.dequantize(p) - w) @ x.T).square().sum()
        for p in (parts, quantize_tensor(w, "int4-g64"))
    ]
    assert loss[0] < 0.5 * loss[1]


def test_a_searched_range_never_loses():
    w, format = weights().unflatten(1, (-1, 32)), FORMATS["int4-g32"]

    def loss(low, high):
        return (format.dequantize(format.with_range(w, low, high)).view_as(w) - w).square().sum(-1)

    plain, searched = loss(w.amin(-1), w.amax(-1)), loss(*search_range(w, format))
    assert (searched <= plain).all() and searched.sum() < 0.99 * plain.sum()


def quantize(*arguments) -> types.SimpleNamespace:
    """python quantize.py, in this process: exit status and stderr."""
    err, status = io.StringIO(), 0
    with contextlib.redirect_stderr(err):
        try:
            quantize_command.main([str(argument) for argument in arguments])
        except SystemExit as exit:
            status = exit.code
    return types.SimpleNamespace(returncode=status, stderr=err.getvalue())


@pytest.mark.parametrize("head", [[], ["--head", "int8"]])
def test_a_folder_written_layer_by_layer_is_what_loading_would_make(text_folder, tmp_path, head):
    done = quantize(
        "--checkpoint", text_folder, "--scheme", "int4-g32", "--output", tmp_path / "q", *head
    )
    assert done.returncode == 0 and "; other programs refuse it" in done.stderr, done.stderr
    stored = load_model(tmp_path / "q", dtype=torch.float32, pack=False)
    options = {"quantize": "int4-g32", "head_scheme": "int8" if head else None, "pack": False}
    way = load_model(text_folder, dtype=torch.float32, **options)
    names = [name for name, _ in stored.named_parameters()]
    assert names == [name for name, _ in way.named_parameters()]
    assert all(torch.equal(stored.get_parameter(name), way.get_parameter(name)) for name in names)
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    assert config["quantization"]["scheme"] == "int4-g32" and not (tmp_path / "q.partial").exists()
    arguments = ["--checkpoint", str(tmp_path / "q"), "--max_new_tokens", "3", "--device", "cpu"]
    program.main(arguments)  # its tokenizer came along


def test_gptq_on_the_command_line(text_folder, tmp_path):
    """More faithful than rounding on text like the calibration's, measured as KL from the
    original."""
    text = tmp_path / "text.txt"
    text.write_text(
        "the little cat and a big dog went to play in the park with their red ball; it was fun. "
        * 60
    )
    original, kl = load_model(text_folder, dtype=torch.float32), {}
    rows = windows(load_tokenizer(text_folder).encode(text.read_text(), bos=False), 64, 1)
    for method in ("rtn", "gptq"):
        extra = (
            ["--calibration", text, "--samples", 16, "--context", 64] if method == "gptq" else []
        )
        flags = ["--checkpoint", text_folder, "--scheme", "int4-g32", "--method", method]
        done = quantize(*flags, "--output", tmp_path / method, *extra)
        assert done.returncode == 0, done.stderr
        kl[method] = measure(load_model(tmp_path / method, dtype=torch.float32), rows, 4, original)[
            "kl"
        ]
    assert kl["gptq"] < 0.7 * kl["rtn"]


def test_a_run_that_is_killed_leaves_nothing_that_loads(text_folder, tmp_path):
    code = (
        "import os, cli.quantize, loading.saving as saving\n"
        "write = saving.write_tensors\n"
        "saving.write_tensors = lambda *a: (write(*a), os._exit(9) if '00002' in a[0].name else"
        " None)[0]\n"
        f"cli.quantize.main(['--checkpoint', {str(text_folder)!r}, '--scheme', 'int8',"
        f" '--output', {str(tmp_path / 'q')!r}])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (
        done.returncode == 9 and (tmp_path / "q.partial").exists() and not (tmp_path / "q").exists()
    )
    with pytest.raises(ValueError):
        load_model(tmp_path / "q.partial")
    assert (
        quantize(
            "--checkpoint", text_folder, "--scheme", "int8", "--output", tmp_path / "q"
        ).returncode
        == 0
    )
    assert not (tmp_path / "q.partial").exists() and load_model(tmp_path / "q")


def test_command_errors(text_folder, tmp_path):
    output = ["--output", tmp_path / "q"]
    gptq = [
        "--scheme",
        "int4-g32",
        "--method",
        "gptq",
        "--calibration",
        text_folder / "config.json",
    ]
    for arguments, names in [
        (["--scheme", "int3"], "'int3' does not exist"),
        (["--scheme", "int4-g128"], "layers.0.qkv: 64 inputs are no multiple of the 128"),
        (
            ["--scheme", "int8", "--method", "gptq", "--calibration", "x"],
            "chooses int4 codes; int8 takes --method rtn",
        ),
        (
            ["--scheme", "int4-g32", "--method", "gptq"],
            "--method gptq and --calibration FILE need each other",
        ),
        (
            ["--scheme", "int4-g32", "--method", "gptq", "--calibration", "nowhere.txt"],
            "nowhere.txt",
        ),
        (["--scheme", "int8", "--output", tmp_path], "exists already"),
        (["--scheme", "int8", "--device", "foo"], "--device foo: not available here"),
        (["--scheme", "int8", "--device", "meta"], "--device meta: only cpu, cuda and mps compute"),
        (["--scheme", "int8", "--device", "cuda:99"], "--device cuda:99: not available here"),
        (
            [*gptq, "--context", 0],
            "--context: 0 must be at least 1",
        ),
        ([*gptq, "--context", 160], "--context 160 must lie between 1 and 159"),
        (
            [*gptq, "--samples", -1],
            "--samples: -1 must be at least 1",
        ),
        (["--scheme", "int8", "--context", "x"], "invalid positive value: 'x'"),
    ]:
        done = quantize("--checkpoint", text_folder, *output, *arguments)
        assert done.returncode == 2 and names in done.stderr and done.stderr.count("\n") == 1, (
            done.stderr
        )
        assert done.stderr.startswith("error: ") and not [*tmp_path.glob("q*")]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_wrapped_models_config_has_the_dtype_of_its_tensors(dtype, folder_of, tmp_path):
    """transformers 5 writes a dtype into the text model's object too."""
    folder = shutil.copytree(folder_of("llama-3"), tmp_path / "wrapped")
    inner = json.loads((folder / "config.json").read_text())
    inner |= {"model_type": "mistral", "dtype": "bfloat16"}
    wrapper = {"model_type": "mistral3", "dtype": "bfloat16", "text_config": inner}
    (folder / "config.json").write_text(json.dumps(wrapper))
    output = tmp_path / "q"
    done = quantize(
        "--checkpoint", folder, "--output", output, "--scheme", "int8", "--dtype", dtype
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((output / "config.json").read_text())["dtype"] == dtype


# ------------------------------------------------------------------------------------- perplexity


def test_perplexity_by_hand(wide_folder):
    """Against transformers' own loss, window by window; KL and agreement by their definitions."""
    import transformers

    ids = torch.randint(0, 131, (75,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = windows(ids, 20, bos=7)
    assert (
        rows.shape == (3, 21)
        and rows[:, 0].tolist() == [7] * 3
        and rows[1, 1:].tolist() == ids[20:40]
    )
    assert windows(ids, 20, bos=None).shape == (3, 20)
    with pytest.raises(ValueError, match="75 tokens, fewer than one window of --context 80"):
        windows(ids, 80, None)
    model, other = (
        load_model(wide_folder, dtype=torch.float32, quantize=s) for s in ("int4-g32", None)
    )
    found = measure(model, rows, 2, other)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(wide_folder, dtype=torch.float32)
    with torch.no_grad():
        plain = measure(other, rows, 2)
        losses = [oracle(row[None], labels=row[None]).loss.item() for row in rows]
        p, q = (m(rows[:, :-1], torch.arange(20)).softmax(-1).double() for m in (other, model))
    assert plain["nll"] == pytest.approx(sum(losses) / 3, abs=1e-4) and "kl" not in plain
    assert plain["perplexity"] == pytest.approx(math.exp(plain["nll"])) and plain["tokens"] == 60
    assert plain["context"] == 20 and plain["bos"] is True
    assert (
        found["kl"] == pytest.approx((p * (p / q).log()).sum(-1).mean().item(), rel=1e-3)
        and found["kl"] > 1e-5
    )
    assert found["top1"] == pytest.approx((p.argmax(-1) == q.argmax(-1)).double().mean().item())
    assert measure(other, rows, 3, other)["kl"] == pytest.approx(0, abs=1e-9)


def test_perplexity_never_makes_all_logits(text_folder, monkeypatch):
    """Of the largest vocabularies they would be gigabytes. What is found stays the same, but for
    the order of sums."""
    rows = torch.randint(0, 384, (5, 21), generator=torch.Generator().manual_seed(0))
    model, other = (
        load_model(text_folder, dtype=torch.float32, quantize=s) for s in ("int4-g32", None)
    )
    want = perplexity.score(model, rows, other)
    monkeypatch.setattr(perplexity, "MAX_LOGITS", 384 * 7)
    with Largest() as seen:
        got = perplexity.score(model, rows, other)
    assert seen.elements < 5 * 20 * 384
    assert all(a.shape == (5, 20) and torch.allclose(a, b, atol=1e-5) for a, b in zip(got, want))


def test_perplexity_of_long_windows_runs_in_chunks(folder_of, monkeypatch):
    """The same figures as in one pass, with windows of attention too, and no tensor that grows as
    the window's square: here two windows of 140 tokens in chunks of 8."""
    rows = torch.randint(3, 131, (2, 141), generator=torch.Generator().manual_seed(0))
    for family in ("llama-2", "mistral-v0.1"):
        model = load_model(folder_of(family), dtype=torch.float32)
        want = perplexity.score(model, rows, model)
        with pytest.MonkeyPatch.context() as patch, Largest() as seen:
            patch.setattr(perplexity, "CHUNK", 8)
            got = perplexity.score(model, rows, model)
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, want)), family
        # a cache; scores of all pairs would be 4 * 140 times 140
        assert seen.elements <= 2 * 140 * 64, family
    num_rows = []

    def score(model, rows, other):
        num_rows.append(len(rows))
        return (torch.ones(len(rows), 3),) * 3

    monkeypatch.setattr(perplexity, "score", score)
    monkeypatch.setattr(perplexity, "MAX_POSITIONS", 300)
    measure(model, rows.repeat(3, 1), 8)
    assert num_rows == [2, 2, 2]


@pytest.mark.parametrize("adds", [True, False])
def test_bos_leads_windows_only_where_encoding_a_text_adds_one(
    adds, text_folder, tmp_path, monkeypatch
):
    """In perplexity and in GPTQ's calibration, whatever token the folder names."""
    folder, text = shutil.copytree(text_folder, tmp_path / "model"), tmp_path / "text.txt"
    text.write_text("the little cat and a big dog went to play in the park. " * 9)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"add_bos_token": adds, "bos_token": "<s>"})
    )
    command = [
        "perplexity",
        "--checkpoint",
        folder,
        "--text",
        text,
        "--context",
        20,
        "--json",
        "--device",
        "cpu",
    ]
    monkeypatch.setattr(sys, "argv", [str(argument) for argument in command])
    found = perplexity.run(perplexity.parse_args())
    assert found["bos"] is adds and found["context"] == 20 and (found["tokens"] % 20 == 0) == adds
    model = load_model(folder, dtype=torch.float32)
    asked = types.SimpleNamespace(
        checkpoint=folder, calibration=text, context=20, samples=3, device="cpu"
    )
    (states,) = quantized_folder.calibration_states(asked, model)
    assert states.shape[1] == 20 + adds and adds == torch.equal(
        states[:, 0], model.embed.weight[[1] * 3]
    )


def test_perplexity_on_the_command_line(capsys, monkeypatch):
    common = ["perplexity", "--checkpoint", str(ROOT / "checkpoints" / "demo"), "--context", "64"]
    stories = ["--text", str(ROOT / "checkpoints" / "stories.txt")]

    def main(*flags: str) -> tuple[int | str | None, str, str]:
        monkeypatch.setattr(sys, "argv", [*common, *flags])
        status = 0
        try:
            perplexity.main()
        except SystemExit as exit:
            status = exit.code
        return status, *capsys.readouterr()

    _, out, _ = main(
        *stories, "--quantize", "int8", "--json", "--reference", str(ROOT / "checkpoints" / "demo")
    )
    found = json.loads(out)
    assert (
        found.keys() >= {"perplexity", "nll", "tokens", "context", "bos", "kl", "top1"}
        and found["kl"] < 0.01
    )
    status, out, err = main(*stories, "--quantize_head", "nonsense")
    assert status == 2 and "head nonsense (--quantize_head) needs" in err and not out
    status, out, err = main("--text", "nowhere.txt")
    assert status == 2 and "nowhere.txt" in err and "Traceback" not in err


class Peaked(torch.nn.Module):
    """Thinks one token likeliest, by so much."""

    def __init__(self, logit: float):
        super().__init__()
        self.config = types.SimpleNamespace(vocab_size=8)
        self.norm, self.logit = torch.nn.LayerNorm(1), logit

    def hidden(self, tokens, pos, caches=None):
        return torch.zeros(*tokens.shape, 1)

    def head(self, h):
        return torch.tensor([self.logit] + [0.0] * 7).expand(len(h), 8)


def test_perplexity_of_weights_that_say_nothing(capsys):
    """NaN is refused by the folder that has it; a loss whose exponential is no float is still a
    loss."""
    rows = torch.ones(3, 5, dtype=torch.long)
    for pair, name in (((math.nan, None), "the model"), ((1.0, math.nan), "the reference")):
        model, other = (Peaked(logit) if logit is not None else None for logit in pair)
        with pytest.raises(
            ValueError, match=f"the logits of {name} are not finite in 3 of 3 windows"
        ):
            measure(model, rows, 2, other)
    result = measure(Peaked(800.0), rows, 2)
    assert result["nll"] == pytest.approx(800) and result["perplexity"] is None
    assert measure(Peaked(700.0), rows, 2)["perplexity"] == pytest.approx(math.exp(700), rel=1e-3)


def test_perplexity_compares_models_of_the_same_tokens_alone(text_folder, tmp_path, monkeypatch):
    """A vocabulary of the same size in another order is another one. One token without BOS has
    nothing to score."""
    other, text = shutil.copytree(text_folder, tmp_path / "other"), tmp_path / "text.txt"
    text.write_text("the little cat and a big dog went to play in the park. " * 9)
    file = other / "tokenizer.model"
    # the pieces "a" and "b", a length before each
    a, b, c = (b"\x01a\x15", b"\x01b\x15", b"\x01\0\x15")
    data = file.read_bytes()
    assert data.count(a) == data.count(b) == 1
    file.write_bytes(data.replace(a, c).replace(b, a).replace(c, b))

    def run(*flags):
        command = [
            "perplexity",
            "--checkpoint",
            text_folder,
            "--text",
            text,
            "--device",
            "cpu",
            *flags,
        ]
        monkeypatch.setattr(sys, "argv", [str(argument) for argument in command])
        return perplexity.run(perplexity.parse_args())

    assert run("--context", 20, "--reference", text_folder)["kl"] == pytest.approx(0, abs=1e-9)
    with pytest.raises(ValueError, match="its tokenizer differs"):
        run("--context", 20, "--reference", other)
    bare = shutil.copytree(text_folder, tmp_path / "bare")
    (bare / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False}))
    with pytest.raises(ValueError, match="--context 1 leaves nothing to score"):
        run("--context", 1, "--checkpoint", bare)


@pytest.mark.parametrize("scheme", ["int8", "int4-g32", "mxfp6"])
def test_a_tied_head_keeps_the_rows_that_are_looked_up(folder_of, scheme, monkeypatch):
    """However it was quantized: else every token would unpack the whole vocabulary."""
    monkeypatch.setattr(cpu, "LARGE_BYTES", 0)
    model = quantize_model(load_model(folder_of("llama-3.2")), scheme, head_scheme=scheme)
    tokens = torch.tensor([[3, 130, 7]])
    want = model.embed(tokens)
    pack_model(model)
    assert model.config.tie_embeddings and torch.equal(model.embed(tokens), want)
    assert not model.lm_head.codes.is_meta
    # aten's int8 kernel, for processors without exact sums of digits, reads the stored codes
    # themselves.
    down = model.layers[0].ffn.down
    has_form = cpu.int8_form(torch.zeros(down.codes.shape, dtype=torch.int8)) is not None
    assert down.codes.is_meta == (scheme != "int8" or has_form)


@pytest.mark.parametrize("scheme", ["int8", "int8-float32", "int4-g32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("columns", [1, 3, 12, 32, 172])
def test_a_packed_product_reads_its_rows_alone(columns, dtype, scheme):
    """Kernels read sixteen inputs at once. Of rows that are no multiple of that, one read beyond
    the end of the last row, of codes and of activations: what stands behind both here would show,
    and did crash. Against float64; rounding of the result and of float32 sums, and of int4's scales
    and zeros to the activations' type."""
    if scheme == "int4-g32":
        columns = 32 * columns  # whole groups, an odd number of them too
    generator = torch.Generator().manual_seed(0)
    linear = torch.nn.Linear(columns, 40, bias=False, dtype=dtype).requires_grad_(False)
    linear.weight.copy_(torch.randn(40, columns, generator=generator))
    packed = QuantizedLinear.from_float(linear, scheme)
    w = packed.dequantized(torch.float64)
    packed.pack()
    for rows in (1, 2, 5, 9, 70):
        buffer = torch.full((rows * columns + 64,), torch.finfo(dtype).max / 2, dtype=dtype)
        x = buffer[: rows * columns].view(rows, columns)
        x.copy_(torch.randn(rows, columns, generator=generator))
        size = x.double().abs() @ w.abs().T
        error = (packed(x).double() - x.double() @ w.T).abs()
        # a zero of int4 is up to 15 scales
        bound = (40 if scheme == "int4-g32" else 4) * torch.finfo(dtype).eps
        assert (error <= bound * size + 1e-3 * torch.finfo(dtype).eps).all(), rows


@pytest.mark.parametrize("step", ["load_ends", "write_shards"])
def test_a_folder_that_goes_while_it_is_quantized(step, monkeypatch, tmp_path):
    """Mapped weights are read all the same, so that the tokenizer's files might be left out."""
    folder = shutil.copytree(ROOT / "checkpoints" / "demo", tmp_path / "in")
    run_step = getattr(quantized_folder, step)

    def remove_folder(*given):
        if step == "write_shards":
            shutil.rmtree(folder)
        result = run_step(*given)
        shutil.rmtree(folder, ignore_errors=True)
        return result

    monkeypatch.setattr(quantized_folder, step, remove_folder)
    flags = ["--checkpoint", str(folder), "--scheme", "int8", "--output", str(tmp_path / "q")]
    options = quantize_command.parse_args(flags)
    if step == "load_ends":
        with pytest.raises(ValueError, match="in: no such folder"):
            quantized_folder.run(options)
        with pytest.raises(ValueError, match="in: no such folder"):
            copy_files(folder, tmp_path)
        assert not (tmp_path / "q").exists()
    else:
        quantized_folder.run(options)
        assert load_tokenizer(tmp_path / "q").vocab_size == 2048
        load_model(tmp_path / "q")


def test_plain_weights_that_overflow_float16_are_refused(text_folder, tmp_path):
    model = load_model(text_folder, dtype=torch.float32, pack=False)
    model.norm.weight.data[5] = 1e5
    save_model(model, tmp_path / "large", config_json(text_folder))
    flags = [
        "--checkpoint",
        str(tmp_path / "large"),
        "--scheme",
        "int8",
        "--output",
        str(tmp_path / "q"),
    ]
    with pytest.raises(
        ValueError, match=r"norm\.weight: its weights overflow torch\.float16; --dtype bfloat16"
    ):
        quantized_folder.run(quantize_command.parse_args([*flags, "--dtype", "float16"]))
    assert not (tmp_path / "q").exists()
    quantize_command.main([*flags, "--dtype", "bfloat16"])
    assert load_model(tmp_path / "q", pack=False).norm.weight[5] == torch.tensor(
        1e5, dtype=torch.bfloat16
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_plain_weights_dtype_changes_no_code(dtype, text_folder, tmp_path):
    """Weights of float32, and merged ones, are rounded once: to their codes, as while loading."""
    quantize_command.main(
        [
            "--checkpoint",
            str(text_folder),
            "--scheme",
            "int8",
            "--dtype",
            dtype,
            "--output",
            str(tmp_path / "q"),
        ]
    )
    got = load_model(tmp_path / "q", dtype=getattr(torch, dtype), pack=False)
    want = load_model(text_folder, dtype=getattr(torch, dtype), quantize="int8", pack=False)
    assert all(torch.equal(*pair) for pair in zip(got.parameters(), want.parameters(), strict=True))


# --------------------------------------------------------------------------- formats of one's own


class Mirrored:
    """Codes with the other sign."""

    scope = "rows"

    def quantize(self, w):
        return super().quantize(-w)

    def dequantize(self, parts):
        return -super().dequantize(parts)


class MirroredInt8(Mirrored, formats.Int8):
    pass


class MirroredFp8(Mirrored, formats.Fp8):
    pass


FORKED = {
    "int8": MirroredInt8(8),
    "fp8": MirroredFp8(8),
    "e5m2": formats.Fp8(8, code_dtype=torch.float8_e5m2, max_code=57344),
    "int16": formats.Symmetric(16, code_dtype=torch.int16, max_code=32767),
    "groups": formats.Symmetric(8, 32),
    "mxfp8": type("MirroredMx", (Mirrored, formats.Mx), {})(
        8, 32, mantissa=3, bias=7, max_element=448.0
    ),
    "int4": type("MirroredInt4", (Mirrored, formats.Asymmetric), {})(4, 32),
}


@pytest.mark.parametrize("name", FORKED)
def test_a_format_of_ones_own_is_read_as_it_was_written(name, text_folder, tmp_path, monkeypatch):
    """By its own methods, from both programs that write it, and no other program is told that it
    could read the folder. The oracle is the format itself."""
    format = FORKED[name]
    monkeypatch.setitem(FORMATS, "forked", format)
    monkeypatch.setattr("cli.options.check_scheme", lambda scheme: None)
    plain = load_model(text_folder, dtype=torch.float32)
    model = load_model(text_folder, dtype=torch.float32, quantize="forked", pack=False)
    save_model(model, tmp_path / "saved", config_json(text_folder))
    options = QuantizeOptions(
        checkpoint=str(text_folder),
        output=str(tmp_path / "written"),
        adapter=None,
        scheme="forked",
        method="rtn",
        head_scheme=None,
        dtype=None,
        calibration=None,
        samples=1,
        context=None,
        device="cpu",
    )
    quantized_folder.run(options)
    expected = {
        linear_name: format.dequantize(format.quantize(linear.weight.float()))
        for linear_name, linear in named_linears(plain)
        if linear_name != "lm_head"
    }
    for folder in (tmp_path / "saved", tmp_path / "written"):
        assert config_json(folder)["quantization_config"] == QUICKDRAFT_CONFIG
        loaded = load_model(folder, dtype=torch.float32, pack=False)
        for linear_name, weight in expected.items():
            assert torch.equal(loaded.get_submodule(linear_name).dequantized(torch.float32), weight)


@pytest.mark.parametrize("name", FORKED)
def test_a_product_for_a_gpu_reads_a_format_of_ones_own_by_its_methods(name, monkeypatch):
    """Its lines run on a CPU too: one row, and several."""
    monkeypatch.setitem(FORMATS, "forked", FORKED[name])
    w = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    plain = torch.nn.Linear(64, 48, bias=False)
    plain.weight.data.copy_(w)
    linear = QuantizedLinear.from_float(plain, "forked")
    for rows in (1, 3):
        x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows))
        expected = x @ linear.dequantized(torch.float32).T
        torch.testing.assert_close(linear.fused_part(x, slice(None)), expected)


# What the library's reader knows, and a type that its writer and its core have too.
STORED_TYPES = safetensors_types._TYPES | {"F8_E8M0": torch.float8_e8m0fnu}


class InDtype(Format):
    """Signs and zeros as numbers of any dtype that are 1 or more."""

    dtype = torch.int8

    def shapes(self, rows, columns):
        return {"codes": ((rows, columns), self.dtype), "scale": ((rows,), torch.float32)}

    def quantize(self, w):
        codes = torch.where(w > 0, 2.0, 1.0)
        return {"codes": codes.to(self.dtype), "scale": w.abs().mean(1)}

    def dequantize(self, parts):
        return parts["codes"].to(torch.float32) * parts["scale"][:, None]


@pytest.mark.parametrize("name", [name for name in STORED_TYPES if name != "C64"])
def test_parts_of_every_dtype_that_safetensors_writes_are_read(
    name, text_folder, tmp_path, monkeypatch
):
    dtype = STORED_TYPES[name]
    assert stored_dtype(dtype) == name
    monkeypatch.setitem(FORMATS, "own", type("Own", (InDtype,), {"dtype": dtype})(8))
    model = load_model(text_folder, dtype=torch.float32, quantize="own", pack=False)
    save_model(model, tmp_path, config_json(text_folder))
    loaded = load_model(tmp_path, dtype=torch.float32, pack=False)
    for name, linear in named_linears(model):
        if isinstance(linear, QuantizedLinear):
            other = loaded.get_submodule(name)
            assert other.codes.dtype == dtype
            assert torch.equal(other.dequantized(torch.float32), linear.dequantized(torch.float32))


@pytest.mark.parametrize("dtype", [torch.uint4, torch.int2, torch.complex128], ids=str)
def test_parts_that_no_file_holds_are_refused_before_anything_is_deleted(
    dtype, text_folder, tmp_path, monkeypatch
):
    monkeypatch.setitem(FORMATS, "own", type("Own", (InDtype,), {"dtype": dtype})(8))
    with torch.device("meta"):
        model = load_models.empty_model(
            load_config(text_folder), torch.float32, {"layers.0.ffn.down": "own"}
        )
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=f"safetensors stores no {dtype}; keep its bits"):
        save_model(model, tmp_path, config_json(text_folder))
    assert (tmp_path / "config.json").exists()
