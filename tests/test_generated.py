"""What Inductor, Triton and ptxas make of a GPU's steps, where there is no GPU: each bound fails
when a rewrite for GPUs is lost. Needs a CUDA build of torch; a format takes a minute or two."""

import pytest
import torch

from benchmarks import generated

pytestmark = [
    pytest.mark.generated,
    pytest.mark.skipif(torch.version.cuda is None, reason="needs a CUDA build of torch"),
]

# Launches of a block in a step, and in the verification of five drafted tokens.
LAUNCHES = {"bf16": (8, 10), "int8": (8, 10), "mxfp6": (9, 11), "int4-g32": (11, 11)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generated")
    generated.generate(folder, list(LAUNCHES), [0, 5])
    return folder


@pytest.mark.parametrize("format", LAUNCHES)
def test_a_block_launches_few_kernels(folder, format):
    """A mask that is copied for each layer, keys and values that are written one after the other,
    an activation by itself, or a reduction in two parts would each add one or more."""
    counts = []
    for k in (0, 5):
        code = (folder / f"{format}.k{k}.py").read_text()
        counts.append(len(generated.launches(code).block))
    step, verification = LAUNCHES[format]
    assert counts[0] <= step and counts[1] <= verification, counts


def test_triton_takes_every_kernel(folder):
    """It refuses constants beyond 32 bits times an index, as the hash of uniform numbers once had
    in a verification."""
    for k in (0, 5):
        code = (folder / f"int8.k{k}.py").read_text()
        counts = generated.launches(code)
        kernels = generated.kernels_of(code, counts.block + counts.outside, "8b", "cuda:90")
        assert [str(kernel) for kernel in kernels if kernel.machine is None] == []


def test_no_thread_block_looks_through_a_vocabulary_alone(folder):
    """In two stages the first has 128 blocks a row. A prefix sum of the vocabulary has an
    algorithm of its own, for many blocks."""
    for k in (0, 5):
        sources = generated.kernel_sources((folder / f"int8.k{k}.py").read_text())
        reductions = [source for name, source in sources.items() if "triton_spl" not in name]
        alone = [s for s in reductions if "    xnumel = 1\n" in s and "r0_numel = 128256\n" in s]
        assert reductions and not alone, alone


@pytest.mark.parametrize("format", ["int8", "mxfp6"])
def test_six_rows_spill_no_register(folder, format):
    code = (folder / f"{format}.k5.py").read_text()
    names = generated.launches(code).block
    kernels = generated.kernels_of(code, names, "8b", "cuda:90")
    assert kernels and all(kernel.machine.stack == 0 for kernel in kernels), kernels


def test_six_rows_are_multiplied_on_tensor_cores(folder):
    """Sums of single products take 24 instructions a weight (gate_up)."""
    code = (folder / "int8.k5.py").read_text()
    kernels = generated.kernels_of(code, generated.launches(code).block, "8b", "cuda:90")
    counts = {kernel.product: kernel.instructions_per_weight for kernel in kernels}
    assert all(kernel.machine.num_products for kernel in kernels if kernel.product), counts
    assert counts["gate_up"] <= 8, counts


def test_fp8_compiles_for_a_gpu_without_the_type(tmp_path):
    """Triton refuses fp8e4nv below capability 8.9."""
    generated.generate(tmp_path, ["fp8"], [0, 5], capability=80)
    for k in (0, 5):
        code = (tmp_path / f"fp8.k{k}.py").read_text()
        kernels = generated.kernels_of(code, generated.launches(code).block, "8b", "cuda:80")
        assert kernels and all(kernel.machine for kernel in kernels), kernels


def test_a_block_is_what_is_launched_for_each_layer():
    code = """
def subgraph_0(args):
    triton_red_fused_a.run(x, stream=stream0)
    y = torch.ops.aten._scaled_dot_product_efficient_attention.default(q, k, v, None, False)
    extern_kernels.mm(y, w, out=z)

def partition_0(args):
    triton_poi_fused_b.run(x, stream=stream0)
    subgraph_0(args)
    subgraph_0(args)
"""
    counts = generated.launches(code)
    assert len(counts.block) == 3 and counts.outside == ["triton_poi_fused_b"], counts
