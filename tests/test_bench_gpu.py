"""scripts/bench_gpu.py on a CPU: its ids, its arithmetic, and that it calls what is wrong wrong; scripts/candidates.py
against weights that quantize.py dequantizes."""

import json
import math

import pytest
import torch
from conftest import oracle
from test_fused import GROUPED, linear_of

import scripts.bench_gpu as bench_gpu
from checkpoint import load_model
from model import Keys, attend, attention_mask
from scripts.bench_gpu import Contender, Subject, Variant, float32_logits, parse_args, ratios, shares, until
from scripts.candidates import add_words, by_rows, by_sums, in_chunks, in_words

DRY = ["--device", "cpu", "--tiny", "--eager", "--rounds", "1", "--steps", "2"]


def rows_of(arguments: list[str], tmp_path) -> dict[str, dict]:
    file = tmp_path / "h200.json"
    bench_gpu.run(parse_args([*arguments, *DRY, "--write", str(file)]))
    return {row["id"]: row for row in json.loads(file.read_text())["rows"]}


def test_decode_and_verify_write_the_ids_that_others_read(tmp_path):
    rows = rows_of(["bandwidth", "decode", "verify", "--formats", "bf16,int8,int4-g32"], tmp_path)
    for format in ("bf16", "int8", "int4-g32"):
        for what in ("of_read_bandwidth", "tok_s", "vs_bf16", "verify6_over_1", "correct"):
            assert rows[f"8b.{format}.{what}"]["value"] > 0, (format, what, rows)
        step = rows[f"8b.{format}.step_ms"]["value"]
        assert math.isclose(rows[f"8b.{format}.tok_s"]["value"], 1e3 / step, rel_tol=1e-3)
    assert rows["read_bandwidth_gb_s"]["value"] > 0 and rows["copy_bandwidth_gb_s"]["value"] > 0


def test_speculation_meets_the_acceptance_that_was_set(tmp_path):
    """Which tokens the draft is wrong about is fixed, so what 24 of them meet does not vary. Rounds that decide other
    tokens than plain steps would not be correct."""
    rows = rows_of(["speculation"], tmp_path)
    alpha = [rows[f"spec.8b_int4_1b_int4.alpha{a}.alpha"]["value"] for a in (50, 80, 95)]
    assert alpha == sorted(alpha) and alpha[0] < alpha[-1]
    assert rows["spec.8b_int4_1b_int4.alpha80.speedup"]["value"] > 0
    assert rows["spec.measured_over_predicted"]["value"] > 0
    assert all(rows[f"spec.8b_int4_1b_int4.alpha{a}.correct"]["value"] == 1 for a in (50, 80, 95))


def test_shares_and_ratios_of_made_up_numbers():
    assert shares(8_000, [2.0, 4.0], [8_000.0, 4_000.0]) == [0.5, 0.5]  # 8 kB in 2 s at 8 kB/s; in 4 s at 4 kB/s
    assert ratios([3.0, 8.0], [1.0, 2.0]) == [3.0, 4.0]


def tiny(format: str = "bf16") -> Subject:
    return Subject(parse_args(DRY), "8b", format)


def test_bytes_of_a_step_by_hand():
    """TINY: 2 layers, D 128, F 256, V 512, 4 heads and 2 KV heads of 32; 100 positions; bfloat16 all through."""
    layer = 128 * (128 + 2 * 64) + 128 * 128 + 3 * 128 * 256 + 2 * 128
    assert Contender(tiny()).bytes() == 2 * (2 * layer + 128 + 512 * 128) + 100 * 2 * 2 * 2 * 64


@pytest.mark.parametrize("family", ["llama-3.1", "qwen3"])
def test_the_truth_is_what_transformers_computes(folder_of, family):
    tokens = torch.arange(3, 43)[None]
    found = float32_logits(load_model(folder_of(family), dtype=torch.float32), tokens, 5)
    with torch.no_grad():
        want = oracle(family)(tokens).logits[0, -5:]
    assert (found - want).norm() / want.norm() < 1e-5


@pytest.mark.parametrize("format", ["bf16", "int8", "mxfp6"])
def test_a_wrong_product_is_called_wrong(format):
    """Rows of weights in reverse order: as fast, and wrong. Right ones pass."""

    def reverse(linear, x):
        return by_rows(linear, x).flip(-1)

    def nearly(linear, x):  # forgets the last 8 of 128 inputs: a quarter of a group
        return by_rows(linear, torch.cat((x[..., :-8], torch.zeros_like(x[..., -8:])), -1))

    subject = tiny(format)
    assert Contender(subject, Variant("rows", product=by_rows)).error < bench_gpu.allowed_error(2)
    for product in (reverse, nearly):
        with pytest.raises(ValueError, match="wrong: logits are off by"):
            Contender(subject, Variant("wrong", product=product))


def test_nan_is_wrong():
    truth = torch.ones(2, 4)
    assert bench_gpu.verdict(truth.clone(), truth, 2) is None
    assert "wrong" in bench_gpu.verdict(torch.tensor([[1, 1, 1, math.nan]] * 2), truth, 2)


def test_a_failing_variant_is_recorded_and_the_rest_goes_on(monkeypatch, tmp_path):
    def broken(linear, x):
        raise RuntimeError("no such kernel")

    variants = (Variant("broken", product=broken), Variant("rows", product=by_rows), Variant("other", gpu=True))
    monkeypatch.setattr(bench_gpu, "VARIANTS", variants)
    rows = rows_of(["variants", "--formats", "int8"], tmp_path)
    assert rows["8b.int8.broken.correct"]["value"] == 0
    assert "RuntimeError: no such kernel" in rows["8b.int8.broken.correct"]["note"]
    assert rows["8b.int8.rows.correct"]["value"] == 1 and rows["8b.int8.rows.gain"]["value"] > 0
    assert "8b.int8.broken.step_ms" not in rows and not any("other" in id for id in rows)


def test_the_budget_ends_a_run_before_an_item_that_may_not_fit():
    """Items of 10 s with 35 s to go: the fourth might end at 40."""
    now = iter(range(0, 1000, 10))
    assert list(until(iter("abcdef"), 35, clock=lambda: next(now))) == list("abc")
    assert list(until(iter("abc"), 1e9)) == list("abc")


def test_names_are_checked():
    for arguments, words in (
        (["nothing"], "measurement nothing does not exist"),
        (["decode", "--formats", "int3"], "format int3 does not exist"),
        (["decode", "--shapes", "9b"], "shape 9b does not exist"),
        (["variants", "--only", "fastest"], "variant fastest does not exist"),
    ):
        with pytest.raises(ValueError, match=words):
            parse_args([*arguments, *DRY])


# ------------------------------------------------------------------------------------------- candidates


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("scheme", ["int8", "fp8", *GROUPED])
def test_candidates_multiply_with_the_stored_weights(scheme, rows):
    """Against float64. float32 sums of 256 products: within 256 * 2^-24 of the sum of their sizes."""
    linear, weight = linear_of(scheme)
    add_words(linear) if scheme.startswith("int4") else None
    x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(4))
    want, size = x.double() @ weight.T, x.abs().double() @ weight.abs().T
    for product in (by_rows, in_words) if scheme.startswith("int4") else (by_rows,):
        found = product(linear, x).double()
        # in_words adds what int4's code and zero give apart, whose sizes may exceed the weight's
        slack = 16 if scheme.startswith("int4") else 1
        assert found.shape == want.shape and ((found - want).abs() <= slack * 256 * 2**-24 * size + 1e-30).all()


@pytest.mark.parametrize("T", [1, 6])
@pytest.mark.parametrize("candidate", [by_sums, in_chunks])
def test_attention_candidates(candidate, T):
    """As scaled_dot_product_attention, with rows at different positions and keys that must not be seen."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, n, s, 16, generator=generator) for n, s in ((8, T), (2, 512), (2, 512)))
    pos = torch.tensor([[3], [400]]) + torch.arange(T)
    seen = attention_mask(pos, torch.arange(512), None)
    mask = Keys(seen, None).added(4, torch.float32).mask
    v[0, :, 300:] = 1e4  # beyond the first row's positions
    want = attend(q, k, v, seen)
    assert torch.allclose(attend(q, k, v, mask), want, atol=1e-4)
    assert torch.allclose(candidate(q, k, v, mask), want, atol=1e-4)
    assert not torch.allclose(candidate(q, k, v, torch.zeros_like(mask)), want, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("format", ["bf16", "int8", "int4-g32", "fp8", "mxfp6"])
def test_compiled_steps_on_a_gpu(format):
    """The decoder's own step, and other products, at a tiny shape: wrong ones raise."""
    args = parse_args(["--tiny", "--rounds", "1", "--steps", "4"])
    subject = Subject(args, "8b", format)
    fit = [v for v in bench_gpu.VARIANTS if v.name in ("words", "rows", "library") and format.startswith(v.formats)]
    for variant in (bench_gpu.PLAIN, *fit):
        assert min(Contender(subject, variant).run(4)) > 0
