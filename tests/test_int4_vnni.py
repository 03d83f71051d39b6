"""examples/int4_vnni/: products by the C kernel are exact to the rounding of activations to two
8-bit digits."""

import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, generate

from decoding.engine import Engine
from decoding.sampling import Sampling
from drafts.ngram import NgramDraft
from examples.int4_vnni import kernel
from loading.checkpoint import load_model
from weights.formats import FORMATS, unpack_bits
from weights.linears import KERNELS, QuantizedLinear
from weights.walker import batch_invariant_rows, pack_model

has_compiler = any(map(shutil.which, ("g++", "clang++")))
pytestmark = [
    pytest.mark.skipif(not has_compiler, reason="no C compiler: g++ or clang++"),
    pytest.mark.skipif(
        not torch.cpu._is_vnni_supported(), reason="this processor has no AVX-512 VNNI"
    ),
]
SCHEMES = [scheme for scheme, format in FORMATS.items() if format.kernel == "int4"]


@pytest.fixture(autouse=True)
def plugged_in(monkeypatch, tmp_path):
    monkeypatch.setitem(KERNELS, "int4", KERNELS["int4"])
    kernel.plug_in()


def make_linear(scheme: str, outputs: int, inputs: int = 256) -> QuantizedLinear:
    generator = torch.Generator().manual_seed(outputs)
    linear = torch.nn.Linear(inputs, outputs, bias=False).requires_grad_(False)
    linear.weight.copy_(torch.randn(outputs, inputs, generator=generator) + 0.3)
    return QuantizedLinear.from_float(linear, scheme)


def make_inputs(rows: int, dtype: torch.dtype, inputs: int = 256) -> torch.Tensor:
    """Rows of other sizes, groups of other sizes, one group of zeros."""
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows))
    x *= torch.logspace(-1, 1, rows)[:, None] * torch.logspace(
        -1, 1, inputs // 32
    ).repeat_interleave(32)
    x[:, :128] = 0
    return x.to(dtype)


def product_and_bound(
    linear: QuantizedLinear, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The float64 product (M, out), and the bound of the kernel's error.

    An activation is off by half a step, max|x| / 32638 of its row's group, and by 2^-23 |x| for the
    float32 division. A float32 sum of n terms is off by up to n 2^-24 times the sum of their sizes;
    a group adds four operations, and its terms are |code - center| scale |x| and |zero| |x|. The
    result is rounded to x's dtype, by half of its eps.
    """
    format, parts = linear.format, linear.parts()
    weight, x64 = linear.dequantized(torch.float32).double(), x.double()  # (out, in), (M, in)
    max_x = x64.view(len(x), -1, format.group).abs().amax(-1).repeat_interleave(format.group, 1)
    digits = (max_x / 32638 / 2 + 2**-22 * max_x) @ weight.abs().T
    codes = (unpack_bits(parts["codes"], 4) - format.center).abs().double()
    scale, zero = (
        parts[name].double().abs().repeat_interleave(format.group, 1) for name in ("scale", "zero")
    )
    sums = 4 * (x.size(1) // format.group + 1) * 2**-24 * max_x @ (codes * scale + zero).T
    y = x64 @ weight.T
    return y, digits + sums + (y.abs() + digits + sums) * torch.finfo(x.dtype).eps / 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_products_are_exact_to_the_digits(scheme, dtype):
    for outputs in (1, 16, 77):
        linear = make_linear(scheme, outputs)
        bounds = {
            rows: product_and_bound(linear, make_inputs(rows, dtype)) for rows in (1, 2, 6, 8, 70)
        }
        linear.pack()
        assert isinstance(linear, kernel.VnniLinear) and linear.codes.is_meta, (
            "the stored parts are freed"
        )
        for rows, (expected, bound) in bounds.items():
            y = linear(make_inputs(rows, dtype))
            assert y.dtype == dtype and ((y.double() - expected).abs() <= bound).all(), (
                outputs,
                rows,
            )


@pytest.mark.parametrize("column", [128, 131, 133, 255])
def test_a_flipped_nibble_is_caught(column):
    linear = make_linear("int4-g32", 32)
    x = make_inputs(1, torch.float32)
    expected, bound = product_and_bound(linear, x)
    linear.codes[5, column // 2] ^= 8 << 4 * (column % 2)
    linear.pack()
    is_wrong = (linear(x).double() - expected).abs() > bound
    assert is_wrong.nonzero().tolist() == [[0, 5]]


def test_a_row_has_the_bits_that_it_has_alone():
    linear, x = make_linear("int4-g32", 77), make_inputs(70, torch.bfloat16)
    linear.pack()
    together = linear(x)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 11):
        assert torch.equal(torch.cat([linear(part) for part in x.split(rows)]), together), rows
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(linear(x), together)
    finally:
        torch.set_num_threads(num_threads)


def test_a_row_of_nan_or_infinity_is_not_finite_alone():
    linear, x = make_linear("int4-g32", 16), make_inputs(3, torch.bfloat16)
    linear.pack()
    expected = linear(x)
    x[0, 200], x[2, 7] = torch.nan, torch.inf
    y = linear(x)
    assert not y[[0, 2]].isfinite().any() and torch.equal(y[1], expected[1])


def decode(compile: bool) -> None:
    """Greedy texts of three prompts: alone, in a batch, drafted."""
    model = pack_model(
        load_model(ROOT / "checkpoints" / "demo", quantize="int4-g32", head_scheme="int4-g32")
    )
    assert batch_invariant_rows(model) > 1000
    prompts = [[1, 9, 40, 7], [1, 300, 22, 300, 22], [1, 77]]

    def texts(prompts: list, drafter=None) -> list[list[int]]:
        engine = Engine(model, len(prompts), 64, compile=compile, drafter=drafter, speculate_k=3)
        assert engine.identical
        rows = [[] for _ in prompts]
        for row, id in generate(
            model, prompts, sampling=Sampling(0), max_new_tokens=24, engine=engine
        ):
            rows[row].append(id)
        return rows

    together = texts(prompts)
    assert together == texts(prompts, NgramDraft()) and len(set(map(tuple, together))) == 3
    if not compile:
        assert together == [texts([prompt])[0] for prompt in prompts]


@pytest.mark.slow
def test_plain_text_is_drafted_text():
    decode(compile=False)


@pytest.mark.compiled
def test_compiled_plain_text_is_drafted_text():
    decode(compile=True)


def test_without_compiler_or_instructions_it_says_so(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "")
        patch.delenv("CXX", raising=False)
        with pytest.raises(ValueError, match=r"no compiler; install g\+\+"):
            kernel.library.__wrapped__()
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    with pytest.raises(ValueError, match="no AVX-512 VNNI"):
        kernel.library.__wrapped__()


@pytest.mark.readme
@pytest.mark.parametrize("command", ["run", "timing"])
def test_commands_of_its_page(command):
    page = (ROOT / "examples" / "int4_vnni" / "README.md").read_text()
    (line,) = [
        line
        for line in page.splitlines()
        if line.startswith(f"python -m examples.int4_vnni.{command}")
    ]
    if command == "timing":
        line += " --rounds 1 --read_bytes 1000000"
    done = subprocess.run(
        [sys.executable, *line.split()[1:]], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
