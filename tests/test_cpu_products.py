"""weights/cpu.py: a layout changes nothing but the time, digits lose less than a bfloat16, their
sums are exact."""

import math
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, generate
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cli.report import weight_bytes
from decoding.sampling import Sampling
from drafts.ngram import NgramDraft
from drafts.target_layers import layer_subset
from loading.checkpoint import load_model
from weights import cpu
from weights.cpu import PackedInt8, PackedWeights, from_digits, to_digits
from weights.formats import dequantize_tensor, quantize_tensor
from weights.linears import PackedLinear, QuantizedLinear
from weights.walker import pack_model

needs_onednn = pytest.mark.skipif(
    not PackedWeights.is_faster(torch.empty(1, 1, dtype=torch.bfloat16))
    or not cpu.sums_exactly(PackedInt8),
    reason="oneDNN does not multiply in bfloat16, or not exactly in 8 bits, here",
)


@pytest.fixture
def small_is_large(monkeypatch):
    """What is done beyond the caches is done at any size."""
    monkeypatch.setattr(cpu, "LARGE_BYTES", 0)


@pytest.fixture(params=[PackedInt8, cpu.FbgemmInt8])
def int8_form(request, monkeypatch):
    """Each form of int8 codes that adds exactly here, whichever is the faster."""
    if not cpu.sums_exactly(request.param):
        pytest.skip("this processor has no exact sums in this form")
    monkeypatch.setattr(cpu, "int8_form", lambda codes: request.param)
    return request.param


@pytest.fixture
def with_fbgemm(monkeypatch):
    """What an x86 processor with AVX2 alone does. Newer ones multiply this way too."""
    others = (cpu.TransposedWeights, PackedWeights)
    forms = tuple((suits, form) for suits, form in cpu.FORMS if form not in others)
    monkeypatch.setattr(cpu, "FORMS", forms)
    monkeypatch.setattr(cpu, "int8_form", lambda codes: cpu.FbgemmInt8)


def integers(
    *shape: int, low: int = -127, high: int = 128, seed: int = 0, dtype=torch.int8
) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ---------------------------------------------------------------------------------------- layouts

SHAPES = [(7, 33), (96, 256), (1100, 1024)]  # odd; small; beyond LARGE_BYTES in bfloat16


def packed(linear: nn.Linear, scheme: str) -> QuantizedLinear:
    found = QuantizedLinear.from_float(linear.requires_grad_(False), scheme)
    found.pack()
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_packed_linear_is_the_linear(shape, dtype):
    """Against float64, for one row, for a few, for many, with more than one dimension in front.
    Rounding: sums of n terms in float32, n u = n 2^-24, then of the result and of the sum with the
    bias, u = 2^-8 in bfloat16."""
    linear = nn.Linear(shape[1], shape[0], dtype=dtype).requires_grad_(False)
    weight, found = linear.weight.clone(), PackedLinear(linear)
    assert (
        found.weight.is_meta
        and found.weight.shape == shape
        and found.weight.nbytes == weight.nbytes
    )
    epsilon = 2 * shape[1] * 2**-24 + (2 * 2**-8 if dtype == torch.bfloat16 else 0)
    for front in ((1,), (2,), (5,), (6,), (1, 1), (2, 3), (40,)):
        x = torch.randn(*front, shape[1]).to(dtype)
        want = x.double() @ weight.double().T + linear.bias.double()
        size = x.double().abs() @ weight.double().abs().T + linear.bias.double().abs()
        got = found(x)
        assert got.shape == want.shape and got.dtype == dtype
        assert ((got.double() - want).abs() <= epsilon * size).all(), front


@needs_onednn
def test_padding_rows_reach_no_result(monkeypatch):
    """A row of NaN must not be there, and one row alone is what it is among others."""
    monkeypatch.setattr(cpu, "has_tiles", lambda: False)  # which needs no padding
    weight = torch.randn(1100, 1024, dtype=torch.bfloat16)
    linear = nn.Linear(1024, 1100, bias=False, dtype=torch.bfloat16)
    linear.weight.data.copy_(weight)
    found = PackedLinear(linear.requires_grad_(False))
    assert found.packed.row_split.row_counts[0] > 1
    x = torch.randn(4, 1024, dtype=torch.bfloat16)
    for M in range(1, 5):
        got = found(x[:M])
        assert got.shape == (M, 1100) and got.isfinite().all()
        assert torch.allclose(got.float(), x[:M].float() @ weight.float().T, atol=0.5, rtol=2**-7)


# ------------------------------------------------------------------------- weights on the left


@pytest.fixture
def with_tiles(monkeypatch):
    """What a processor with AMX does. Others multiply this way too, only slowly."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)


@needs_onednn
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [*SHAPES, (1, 5), (577, 3)])
def test_weights_on_the_left_give_the_product(with_tiles, shape, dtype):
    """Against float64, in every number of rows up to a tile's and beyond. The weights are a view
    into others, and the activations every second of a row's numbers. Rounding: n sums in float32,
    n 2^-24, and that of the result, 2^-9 in bfloat16 and 2^-12 in float16, doubled."""
    out, n = shape
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out + 4, n, generator=generator).to(dtype)[2:-2]
    packed = cpu.prepack_weight(weight)
    assert type(packed) is cpu.TransposedWeights and packed.data.data_ptr() == weight.data_ptr()
    epsilon = n * 2**-24 + 2 * (2**-9 if dtype == torch.bfloat16 else 2**-12)
    for M in (*range(1, 20), 40, 130):
        x = torch.randn(M, 2 * n, generator=generator).to(dtype)[:, ::2]
        got = packed(x)
        size = x.double().abs() @ weight.double().abs().T
        assert got.shape == (M, out) and got.dtype == dtype and got.is_contiguous()
        assert ((got.double() - x.double() @ weight.double().T).abs() <= epsilon * size).all(), M


@needs_onednn
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_bits_it_has_alone(with_tiles, shape):
    """Where the probe says so, for any number of rows, and for any neighbours."""
    packed = cpu.prepack_weight(torch.randn(*shape).bfloat16())
    if not packed.batch_invariant_rows:
        pytest.skip("this processor's rows depend on their number")
    x = torch.randn(140, shape[1]).bfloat16()
    alone = torch.cat([packed(row[None]) for row in x])
    for M in (2, 5, 6, 8, 16, 17, 33, 140):
        together = torch.cat([packed(batch) for batch in x.split(M)])
        assert torch.equal(together, alone), M


@needs_onednn
@pytest.mark.parametrize("M", [1, 2, 6, 40])
def test_sums_of_digits_on_the_left_are_exact(with_tiles, M):
    """Digits and codes at both ends of their range, among random ones. The sums are integers, and
    float32 rounds them once; the scale rounds once more."""
    codes = integers(301, 4097)
    codes[0], codes[1] = 127, -127
    x = integers(M, 4097, low=0, high=256, seed=1, dtype=torch.uint8)
    x[0] = 255
    scale = torch.rand(301) + 0.5
    packed = cpu.TransposedInt8(codes, scale)
    assert cpu.sums_exactly.__wrapped__(cpu.TransposedInt8)
    want = ((x.long() - 128) @ codes.T.long()).double() * scale
    got = packed.run_kernel(x)
    assert got.shape == (M, 301) and got.is_contiguous()
    assert torch.allclose(got.double(), want, rtol=2**-22, atol=0)


@needs_onednn
@pytest.mark.one_in(3)
@pytest.mark.parametrize("scheme", [None, "int8"])
def test_drafted_text_is_plain_text_with_weights_on_the_left(with_tiles, small_is_large, scheme):
    settings = {"sampling": Sampling(0), "max_new_tokens": 40}
    model = pack_model(load_model(ROOT / "checkpoints/demo", quantize=scheme))
    kinds = {type(module.packed) for module in model.modules() if hasattr(module, "packed")}
    assert kinds == {cpu.TransposedInt8 if scheme else cpu.TransposedWeights} or scheme
    plain = list(generate(model, [[1, 5, 9]], **settings))
    drafted = list(generate(model, [[1, 5, 9]], **settings, drafter=NgramDraft(), speculate_k=5))
    assert [token for _, token in drafted] == [token for _, token in plain]


@needs_onednn
@pytest.mark.long
@pytest.mark.parametrize("scheme", [None, "int8"])
def test_compiled_text_with_weights_on_the_left(with_tiles, small_is_large, scheme):
    settings = {"sampling": Sampling(0), "max_new_tokens": 20, "compile": True}
    model = pack_model(load_model(ROOT / "checkpoints/demo", quantize=scheme))
    plain = list(generate(model, [[1, 5, 9]], **settings))
    drafted = list(generate(model, [[1, 5, 9]], **settings, drafter=NgramDraft(), speculate_k=3))
    assert [token for _, token in drafted] == [token for _, token in plain]


# ---------------------------------------------------------------------------------------- fbgemm

needs_fbgemm = pytest.mark.skipif(not cpu.has_fbgemm(), reason="fbgemm is for x86 with AVX2")


def spread_rows(out: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Weights whose rows differ by 2^60 (16 octaves in float16), one of them zero, some numbers 32
    octaves below their row's largest, which is all that a row may span."""
    generator = torch.Generator().manual_seed(0)
    octaves = 60 if dtype == torch.bfloat16 else 16
    size = 2.0 ** -torch.linspace(0, octaves, out)[:, None]
    weight = torch.randn(out, n, generator=generator).clamp(-3.9, 3.9) * size
    if dtype == torch.bfloat16:
        weight[:, 0] = 2.0 * size[:, 0].log2().round().exp2()
        weight[:, 1] = weight[:, 0] * 2.0**-30
    weight[out // 2] = 0
    return weight.to(dtype)


@needs_fbgemm
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [*SHAPES, (1, 5), (577, 3)])
def test_float16_numbers_give_the_product(shape, dtype, monkeypatch):
    """Against float64, in few rows and many, whole and in parts. Rounding: n sums in float32, n
    2^-24, and that of the result, 2^-9 in bfloat16 and 2^-12 in float16 (2^-25 below its normal
    numbers), doubled."""
    weight = spread_rows(*shape, dtype)
    assert cpu.fits_float16(weight)
    epsilon = shape[1] * 2**-24 + 2 * (2**-9 if dtype == torch.bfloat16 else 2**-12)
    for part_weights in (cpu.MAX_PART_WEIGHTS, 3 * shape[1]):
        monkeypatch.setattr(cpu, "MAX_PART_WEIGHTS", part_weights)
        packed = cpu.FbgemmWeights(weight)
        for M in (1, 2, 3, 7, 130):
            x = torch.randn(M, 2 * shape[1]).to(dtype)[:, ::2]
            got = packed(x)
            size = x.double().abs() @ weight.double().abs().T
            error = (got.double() - x.double() @ weight.double().T).abs()
            assert got.shape == (M, shape[0]) and got.dtype == dtype
            assert (error <= epsilon * size + 2**-25).all(), M


@needs_fbgemm
@pytest.mark.parametrize(
    "row, fits",
    [
        ([1.0, 2.0**-32], True),
        ([1.0, 2.0**-40], False),
        ([2.0**100, 2.0**70], True),
        ([2.0**-120, 0], True),
        ([0, 0], True),
        ([1.9921875, 1.9921875 * 2.0**-32], True),
        ([1.9921875, 1.9921875 * 2.0**-33], False),
        ([math.nan, 1], False),
        ([math.inf, 1], False),
    ],
)
def test_weights_that_float16_cannot_hold_stay_as_they_are(with_fbgemm, row, fits):
    """The numbers as bfloat16; a scale that puts the largest into float16's highest octave, 2^15,
    leaves the bit 2^-24, the lowest of a bfloat16 of 2^-17. By exact arithmetic of fractions."""
    weight = torch.tensor([[0.5, 0.25], row]).bfloat16()
    assert (type(cpu.prepack_weight(weight)) is cpu.FbgemmWeights) == fits


@needs_fbgemm
def test_packing_leaves_the_engine_as_it_was():
    """torch.backends.quantized.engine is a setting of the whole process."""
    before = torch.backends.quantized.engine
    cpu.FbgemmWeights(torch.ones(8, 8).bfloat16())
    cpu.FbgemmInt8(integers(8, 8), torch.ones(8))
    assert torch.backends.quantized.engine == before


@pytest.mark.slow
@needs_fbgemm
def test_a_forked_process_packs_too():
    """It inherits the object of the threads that pack, and none of the threads."""
    code = """
import os, signal, torch
from weights import cpu
torch.set_num_threads(1)
weight = torch.ones(8, 8).bfloat16()
x = torch.ones(3, 8).bfloat16()
cpu.FbgemmWeights(weight)(x)
child = os.fork()
if child == 0:
    signal.alarm(30)
    y = cpu.FbgemmWeights(weight)(x)
    os._exit(int(not torch.equal(y, torch.full((3, 8), 8.0).bfloat16())))
raise SystemExit(os.waitpid(child, 0)[1])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@needs_fbgemm
@pytest.mark.parametrize("M", [1, 3, 40])
def test_sums_of_7_bit_digits_are_exact(M):
    """The largest digits against the largest codes, and random ones. Sums up to 2^24 are whole
    numbers in float32, larger ones are rounded once."""
    codes = integers(300, 8191)
    codes[0], codes[1] = 127, -127
    x = integers(M, 8191, low=0, high=128, seed=1, dtype=torch.uint8)
    x[0] = 127
    got = cpu.FbgemmInt8(codes, torch.ones(300)).run_kernel(x)
    want = (x.long() - 64) @ codes.T.long()
    assert want.abs().max() > 2**24
    assert ((got.double() - want).abs() <= 2**-24 * want.abs()).all()


@needs_fbgemm
@pytest.mark.one_in(3)
@pytest.mark.parametrize("scheme", [None, "int8"])
@pytest.mark.parametrize(
    "compile", [False, pytest.param(True, marks=(pytest.mark.compiled, pytest.mark.long))]
)
def test_drafted_text_is_plain_text_with_fbgemm(with_fbgemm, small_is_large, scheme, compile):
    settings = {"sampling": Sampling(0), "max_new_tokens": 30, "compile": compile}
    model = pack_model(load_model(ROOT / "checkpoints/demo", quantize=scheme))
    kinds = {type(module.packed) for module in model.modules() if hasattr(module, "packed")}
    assert (cpu.FbgemmInt8 if scheme else cpu.FbgemmWeights) in kinds
    plain = list(generate(model, [[1, 5, 9]], **settings))
    drafted = list(generate(model, [[1, 5, 9]], **settings, drafter=NgramDraft(), speculate_k=3))
    assert [token for _, token in drafted] == [token for _, token in plain]


# ----------------------------------------------------------------------------------------- digits


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    st.floats(-6, 6),
    st.sampled_from([7, 8]),
)
def test_digits_stand_for_the_nearest_step(seed, dtype, spread, bits):
    """|x - step * whole| <= step / 2, with float32's own rounding of x / step (24 bits) beside it,
    for rows of any size, with outliers; no digit overflows."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, 64, generator=generator) * 10.0 ** (
        spread * torch.rand(5, 1, generator=generator)
    )
    x[1, 3], x[2] = 1e4 * x[1].abs().max(), 0
    x = x.clamp(-6e4, 6e4).to(dtype)
    digits, step = to_digits(x, bits)
    n = 2 if dtype == torch.bfloat16 else 3
    assert digits.dtype == torch.uint8 and digits.shape == (n * 5, 64)
    assert digits.max().item() < 2**bits
    center = 2 ** (bits - 1)
    whole = sum(
        2 ** (bits * i) * (part.double() - center) for i, part in enumerate(digits.view(n, 5, 64))
    )
    error = (x.double() - step.double() * whole).abs()
    assert (error <= step.double() * (0.5 + whole.abs() * 2**-23)).all()
    assert (whole[2] == 0).all()


@needs_onednn
@pytest.mark.parametrize("M", [1, 3, 6])
def test_sums_of_digits_are_exact(M):
    """Largest digits against largest codes, and random ones: what an overflow would change. Sums
    are rounded once, to float32; some processors (AMX) round them before they subtract the digits'
    offset, and again."""
    codes = integers(300, 8192)
    codes[0], codes[1] = 127, -127
    x = integers(M, 8192, low=0, high=256, seed=1, dtype=torch.uint8)
    x[0, :] = 255
    got = PackedInt8(codes, torch.ones(300)).run_kernel(x)
    want = (x.long() - 128) @ codes.T.long()
    before = x.long() @ codes.T.long()
    assert ((got.double() - want).abs() <= 2**-24 * (want.abs() + before.abs())).all()
    assert want.abs().max() > 2**24  # beyond what sums in float32 would hold


@pytest.mark.attack
def test_a_processor_that_overflows_is_found_out(small_is_large):
    """oneDNN held to AVX2 adds pairs of products in 16 bits: then fbgemm multiplies digits of 7
    bits, and products stay right."""
    code = """
import torch
from weights import cpu
from weights.linears import QuantizedLinear
cpu.LARGE_BYTES = 0
linear = torch.nn.Linear(256, 96, bias=False).requires_grad_(False)
linear.weight.fill_(0.02)
found = QuantizedLinear.from_float(linear, "int8")
found.pack()
y = found(torch.full((1, 256), 1.0))
assert (y - 5.12).abs().max() < 0.05, y
print(cpu.sums_exactly(cpu.PackedInt8), type(found.packed).__name__)
"""
    env = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    if done.stdout.split()[0] == "True":
        pytest.skip("this processor's AVX2 adds 8-bit products exactly")
    assert done.stdout.split() == ["False", "FbgemmInt8"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_int8_products_are_those_of_the_stored_weights(small_is_large, int8_form, dtype):
    """|error| <= step / 2 * sum |w| a row, and roundings: n u of float32 for what combines and
    scales, u of the result type. In the worst row there is, one outlier and nothing else, too."""
    linear = nn.Linear(512, 96, bias=False, dtype=dtype).requires_grad_(False)
    parts = quantize_tensor(linear.weight, "int8")
    w = dequantize_tensor(parts, "int8").double()
    found = packed(linear, "int8")
    assert type(found.packed) is int8_form and found.codes.is_meta
    for M in (1, 2, 6, 40):
        x = torch.randn(M, 512).to(dtype)
        x[0], x[0, 9] = x[0] * 1e-3, 50.0
        _, step = to_digits(x, found.packed.digit_bits)
        bound = step.double() / 2 * w.abs().sum(1) + x.double().abs() @ w.abs().T * (
            4 * 2**-24 + torch.finfo(dtype).eps
        )
        assert ((found(x).double() - x.double() @ w.T).abs() <= bound).all()


@needs_onednn
def test_digits_lose_less_than_a_bfloat16_result(small_is_large):
    """The worst row of 16384 inputs, max |x| = sqrt(in) rms(x): root mean square of the digits'
    error over that of the results, against 2^-9 / sqrt(3), what rounding the result to bfloat16
    takes. Measured over 96 outputs: the root of a mean of 96 squares is within 25 % of its
    expectation but for one in 10^4, and the bound has that much room."""
    x = torch.randn(1, 16384, generator=torch.Generator().manual_seed(0)) * 1e-3
    x[0, 5] = 1.0
    x = x.bfloat16()
    assert x.float().abs().max() / x.float().square().mean().sqrt() > 0.98 * 128
    codes, scale = integers(96, 16384, seed=3), torch.ones(96)
    digits, step = to_digits(x)
    got = from_digits(PackedInt8(codes, scale).run_kernel(digits), step).double()
    want = x.double() @ codes.double().T
    error = (got - want).square().mean().sqrt() / want.square().mean().sqrt()
    assert error < 2**-9 / 3**0.5, error


def test_a_row_alone_is_bit_for_bit_the_row_among_others(small_is_large, int8_form):
    """Integers add up the same in any company: a step, its verification and a prompt see one
    model."""
    found = packed(nn.Linear(512, 96, dtype=torch.bfloat16), "int8")
    x = torch.randn(40, 512).bfloat16()
    together = found(x)
    for row in range(len(x)):
        assert torch.equal(found(x[row : row + 1])[0], together[row])
    assert torch.equal(found(x[:6]), together[:6])


@pytest.mark.parametrize("rows", [16, 40, 192, 250])
@pytest.mark.parametrize("scheme", ["int4-g32", "int4-g128-float32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_int4_products_of_long_prompts_are_those_of_the_stored_weights(
    rows, scheme, dtype, monkeypatch
):
    """Outputs that are no multiple of 16 are padded for the kernel, which takes scale and zero in
    the activations' type and rounds its sums to it. The stored parts are freed. Long prompts
    unpack a few blocks of outputs at a time, where these come out even."""
    monkeypatch.setattr(cpu, "SLICE_WEIGHTS", 256 * 100)
    linear = nn.Linear(256, rows, bias=False, dtype=dtype)
    parts = quantize_tensor(linear.weight, scheme)
    found = packed(linear, scheme)
    assert all(part.is_meta for part in found.parts().values())
    want = dequantize_tensor(
        parts | {name: parts[name].to(dtype) for name in ("scale", "zero")}, scheme
    )
    x = torch.randn(300, 256).to(dtype)
    error, size = (
        (found(x).double() - x.double() @ want.double().T).abs(),
        x.double().abs() @ want.double().abs().T,
    )
    assert (error <= (torch.finfo(dtype).eps + 512 * 2**-24) * size).all()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_visible(small_is_large, int8_form, wrong):
    found = packed(nn.Linear(64, 32, dtype=torch.bfloat16), "int8")
    x = torch.randn(3, 64).bfloat16()
    want = found(x)
    x[1, 7] = wrong
    got = found(x)
    assert not got[1].isfinite().any() and torch.equal(got[[0, 2]], want[[0, 2]])


# ----------------------------------------------------------------------------------------- models


@pytest.mark.one_in(5)
@pytest.mark.parametrize("family", ["llama-3.2", "qwen2", "qwen3-biased", "mistral-v0.1"])
def test_a_packed_model_says_the_same(folder_of, small_is_large, family):
    """Greedy ids in float32, memory let go, bytes of a step counted alike; a tied embedding keeps
    its rows."""
    prompts, options = [[1, 5, 9, 30], [7] * 12], {"sampling": Sampling(0), "max_new_tokens": 24}
    plain = load_model(folder_of(family), dtype=torch.float32)
    want, read = list(generate(plain, prompts, **options)), weight_bytes(plain)
    model = pack_model(load_model(folder_of(family), dtype=torch.float32))
    assert all(
        parameter.is_meta
        for name, parameter in model.named_parameters()
        if "layers" in name and parameter.dim() > 1
    )
    assert model.lm_head.weight.is_meta and not model.embed.weight.is_meta
    assert list(generate(model, prompts, **options)) == want
    assert weight_bytes(model) == read


@pytest.mark.parametrize("scheme", ["int8", "int4-g32", "mxfp6"])
def test_what_a_kernel_holds_is_all_that_is_held_and_counted(folder_of, small_is_large, scheme):
    """Stored parts are let go, whatever the kernel; a form without a kernel counts the weights that
    are read."""
    folder, dtype = folder_of("llama-2"), torch.bfloat16
    full = weight_bytes(load_model(folder, dtype=dtype))
    stored = load_model(folder, dtype=dtype, quantize=scheme, pack=False)
    sizes = [weight_bytes(stored), weight_bytes(pack_model(stored))]
    linear = stored.layers[0].ffn.down
    assert linear.codes.is_meta and linear.codes.nbytes == linear.format.bits * 64 * 96 // 8
    assert (sizes[1] == full) == (scheme == "mxfp6") and (sizes[0] == sizes[1]) == (
        scheme != "mxfp6"
    )


@needs_onednn
def test_weights_on_the_left_are_counted_once(with_tiles, folder_of, small_is_large):
    """On processors without AMX too: int8 codes stay as they are, and so do their bytes."""
    stored = load_model(folder_of("llama-2"), dtype=torch.bfloat16, quantize="int8", pack=False)
    num_bytes = weight_bytes(stored)
    assert weight_bytes(pack_model(stored)) == num_bytes
    assert isinstance(stored.layers[0].ffn.down.packed, cpu.TransposedInt8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(96, 256), (1100, 1024), (2560, 2048)])
def test_a_product_on_the_left_sees_values_and_not_strides(shape, dtype):
    """Inductor chooses the strides of what it hands over; in float16 kernels follow them."""
    product = torch.ops.quickdraft.transposed_product
    weight = torch.randn(shape).to(dtype)
    for M in (1, 2, 6, 9, 16, 17):
        x = torch.randn(shape[1], M).to(dtype).t()  # (M, in), its rows interleaved
        row_major = x.clone(memory_format=torch.contiguous_format)
        assert torch.equal(product(x, weight), product(row_major, weight)), M


@pytest.mark.parametrize("family", ["llama-3", "llama-3.2"])
def test_what_models_share_is_packed_once(folder_of, small_is_large, family):
    """A draft that is a part of the model reads the same memory; a tied embedding keeps the table,
    for both."""
    model = load_model(folder_of(family), dtype=torch.float32)
    part, tokens = layer_subset(model, [0, 2]), torch.arange(5)
    want = model(tokens[None], tokens), part(tokens[None], tokens)
    assert pack_model(model, part) is model and isinstance(part.lm_head, PackedLinear)
    assert part.lm_head is model.lm_head and part.layers[1] is model.layers[2]
    got = model(tokens[None], tokens), part(tokens[None], tokens)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, want))
    before = model.lm_head.packed
    assert pack_model(model).lm_head.packed is before, "packed again"


def test_hooks_survive_packing(small_is_large):
    """Tensor parallelism's sums are forward hooks."""
    model, seen = nn.Sequential(nn.Linear(64, 64)).requires_grad_(False), []
    model[0].register_forward_hook(lambda module, args, y: seen.append(type(module)))
    pack_model(model)(torch.randn(1, 64))
    assert seen == [PackedLinear]


def test_small_float32_keeps_its_layout():
    """Only the numbers of rows are chosen: oneDNN's layout would make such products slower."""
    model = nn.Sequential(
        nn.Linear(64, 64), nn.Linear(64, 64, dtype=torch.float16), nn.Embedding(4, 4)
    )
    weight = model[0].weight.detach()
    pack_model(model.requires_grad_(False))
    assert [type(module) for module in model] == [PackedLinear, PackedLinear, nn.Embedding]
    assert model[0].packed.data.data_ptr() == weight.data_ptr()


@pytest.mark.compiled
def test_compiled_code_reads_packed_weights(small_is_large):
    """One compilation serves Linears that hold other weights: the handle is an input, not a
    constant."""
    layers = [nn.Linear(256, 256, dtype=torch.bfloat16).requires_grad_(False) for _ in range(4)]
    a, b = PackedLinear(layers[0]), packed(layers[1], "int8")
    c, d = PackedLinear(layers[2]), packed(layers[3], "int8")
    torch._dynamo.reset()
    with torch.inference_mode():
        pair = torch.compile(
            lambda first, second, x: second(first(x)), fullgraph=True, dynamic=False
        )
        for M in (1, 6):
            x = torch.randn(M, 256).bfloat16()
            for first, second in ((a, b), (c, d)):
                want, got = second(first(x)).float(), pair(first, second, x).float()
                assert torch.allclose(got, want, atol=2**-6, rtol=2**-6) and want.abs().max() > 0.1


COMPILED_SUM = """
import torch
from weights.compiling import compiled

x = torch.arange(500.0)
assert torch.equal(compiled(lambda x: 2 * x + 1, x.device)(x), 2 * x + 1)
"""


@pytest.mark.compiled
def test_code_that_is_kept_on_disk_is_read_at_its_own_level_alone(tmp_path):
    """Processors of two levels may share a folder of compiled code."""
    for level in ({}, {"ATEN_CPU_CAPABILITY": "avx2"}, {}):
        env = os.environ | level | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        subprocess.run([sys.executable, "-c", COMPILED_SUM], cwd=ROOT, env=env, check=True)
