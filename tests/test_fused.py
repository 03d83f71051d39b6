"""weights/gpu.py, and the Linears that use it on a GPU, on a CPU: bits in their places, sums
against float64."""

import math

import pytest
import torch
from test_quantize import MX as SPECIFIED
from test_quantize import spec_value

from weights import linears
from weights.formats import FORMATS, dequantize_tensor, power_of_two, quantize_tensor, unpack_bits
from weights.gpu import in_order, pack_words, unpack_words
from weights.linears import QuantizedLinear

GROUPED = ["int4-g32", "int4-g128", "int4-g32-float32", "mxfp8", "mxfp6", "mxfp4"]
MX = ["mxfp8", "mxfp6", "mxfp4"]


def linear_of(scheme: str) -> tuple[QuantizedLinear, torch.Tensor]:
    """Rows of very different size, one of zeros; and the weights that are stored, in float64."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(24, 256, generator=generator) * torch.logspace(-3, 3, 24)[:, None]
    weight[5] = 0
    linear = QuantizedLinear.empty_like(torch.nn.Linear(256, 24, bias=False), scheme)
    linear.copy_parts(slice(None), quantize_tensor(weight, scheme))
    return linear, dequantize_tensor(linear.parts(), scheme, torch.float64)


@pytest.mark.parametrize("scheme", GROUPED)
def test_words_hold_every_code_where_its_input_is(scheme):
    """Of a group, the i-th codes of its words stand for inputs i * n to (i + 1) * n - 1."""
    linear, _ = linear_of(scheme)
    format = FORMATS[scheme]
    want = unpack_bits(linear.codes, format.bits)
    words = pack_words(linear.codes, format.bits, format.group)
    assert words.dtype == torch.int32 and words.nbytes == linear.codes.nbytes
    assert torch.equal(in_order(unpack_words(words, format.bits), format.group), want)
    # the first one's words, of each plane
    planes = words.unflatten(1, (math.lcm(format.bits, 32) // 32, -1))
    first = planes[..., : planes.size(-1) * format.group // 256].flatten(1)
    group = unpack_words(first, format.bits)
    n = format.group // len(group)
    assert all(torch.equal(code, want[:, i * n : (i + 1) * n]) for i, code in enumerate(group))


@pytest.mark.parametrize("scheme", MX)
def test_minifloats_without_a_table(scheme):
    """Every code, subnormal numbers and negative zero included, bit for bit; and every scale."""
    format, layout = FORMATS[scheme], SPECIFIED[scheme][:3]
    codes = torch.arange(2**format.bits, dtype=torch.int32)
    want = torch.tensor([spec_value(code, *layout) for code in codes.tolist()])
    found = format.elements(codes) * format.factor
    assert torch.equal(found, want) and torch.equal(found.signbit(), want.signbit())
    scales = torch.arange(255, dtype=torch.uint8)
    assert torch.equal(power_of_two(scales), torch.ldexp(torch.ones(255), torch.arange(255) - 127))


@pytest.fixture
def as_if_on_a_gpu(monkeypatch):
    """Packed for the device whose compiler fuses."""
    monkeypatch.setattr(linears, "FUSING_DEVICE", "cpu")


@pytest.mark.parametrize("scheme", MX)
def test_words_are_unpacked_for_prompts(scheme, as_if_on_a_gpu):
    """The weights, bit for bit, and the rows that a tied embedding looks up in them."""
    linear, weight = linear_of(scheme)
    embedding = linears.QuantizedEmbedding(linear)
    num_bytes = sum(part.nbytes for part in linear.parts().values())
    linear.pack()
    assert sum(part.nbytes for part in linear.parameters()) == num_bytes
    assert torch.equal(linear.dequantized(torch.float64), weight)
    tokens = torch.tensor([[3, 5], [23, 3]])
    assert torch.equal(embedding(tokens), weight[tokens].float())
    x = torch.randn(40, 256)
    assert torch.equal(linear(x), torch.nn.functional.linear(x, weight.float()))


@pytest.mark.parametrize("rows", [1, 6, 16])
@pytest.mark.parametrize("scheme", ["int8", "fp8", "int8-float32", "int4-g32", *MX])
def test_fused_products_multiply_with_the_stored_weights(scheme, rows, as_if_on_a_gpu):
    """Against float64. float32 sums of 256 products: within 256 * 2^-24 of the sum of their
    sizes."""
    linear, weight = linear_of(scheme)
    if scheme in MX:
        linear.pack()
    x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(4))
    want, size = x.double() @ weight.T, x.abs().double() @ weight.abs().T
    found = linear.fused_products(x, [slice(None)])[0].double()
    assert found.shape == want.shape and ((found - want).abs() <= 256 * 2**-24 * size + 1e-30).all()


@pytest.mark.parametrize("scheme", ["int8", "fp8", pytest.param("mxfp6", marks=pytest.mark.attack)])
def test_few_rows_are_fused_and_prompts_are_not(scheme, monkeypatch, as_if_on_a_gpu):
    """Compiled products of up to 16 rows take the fused form, sums of one row or for MX codes, and
    otherwise a product with the codes that is scaled afterwards; more rows, rows whose number is
    left open, and eager code do not. One compilation serves all open numbers."""
    linear, weight = linear_of(scheme)
    if scheme == "mxfp6":  # other formats have nothing to pack there
        linear.pack()
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph.code)
        return graph

    def product(rows: int, open: bool = False) -> str:
        x = torch.randn(rows, 256)
        if open:
            torch._dynamo.mark_dynamic(x, 0)
        assert torch.allclose(
            step(x).double(), x.double() @ weight.T, rtol=1e-3, atol=1e-3 * weight.abs().max()
        )
        _, has_library_product, scaling = graphs[-1].partition("linear(")
        if not has_library_product:
            return "sums"
        return "codes" if " * " in scaling else "library"

    for rows, open, form in (
        (1, False, "sums"),
        (16, False, "sums" if scheme in MX else "codes"),
        (17, False, "library"),
        (5, True, "library"),
    ):
        torch._dynamo.reset()
        step = torch.compile(linear, backend=keep, fullgraph=True, dynamic=False)
        assert product(rows, open) == form, (rows, open)
    compiled = len(graphs)
    for rows in (9, 33):
        product(rows, open=True)
    assert len(graphs) == compiled, "a prompt of another length compiled anew"
    linear, _ = linear_of("mxfp6")
    assert not linear.is_fused(torch.ones(1, 256)), "eager code would write every term"
