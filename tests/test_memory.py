"""Memory is added up before weights are read. The oracle is the free memory at which a session
just fits."""

import json
import re

import pytest
import torch
from conftest import ROOT

import cli.memory
import cli.opening
import cli.start
from cli.flags import parse_args
from cli.main import main as run
from cli.memory import check_memory, session_bytes
from cli.opening import open_llm
from loading.checkpoint import load_model
from loading.models import empty_model, same_schemes
from loading.target import Target
from tp import ALONE
from weights.linears import QuantizedLinear
from weights.walker import pack_model, quantized_linears

CPU = torch.device("cpu")
CHAT = ("--interactive", "--device", "cpu")


def flags(*arguments):
    return parse_args([*map(str, arguments)])


@pytest.fixture
def free(monkeypatch):
    """Sets the free memory. Nothing may be loaded while it is refused."""

    def set_free(num_bytes: float) -> None:
        monkeypatch.setattr(cli.memory, "free_memory", lambda device: num_bytes)

    return set_free


def bytes_of(args) -> tuple[int, int, int]:
    return session_bytes(args, Target(args.model), CPU, ALONE)


def needed(args, rows: int, length: int) -> int:
    weights, per_position, _ = bytes_of(args)
    return weights + rows * length * per_position


def refusal(args, rows: int, length: int) -> str:
    with pytest.raises(ValueError) as error:
        check_memory(args, Target(args.model), CPU, ALONE, rows, length)
    return str(error.value)


@pytest.mark.parametrize(
    "rows, length, options",
    [
        (1, 1, ()),
        (64, 512, ()),
        (4, 512, ("--quantize", "int8")),
        (9, 300, ("--kv_cache_dtype", "int8")),
        (8, 512, ("--draft_checkpoint", ROOT / "checkpoints/demo-draft")),
    ],
)
def test_nothing_is_refused_that_fits_to_the_byte(free, rows, length, options):
    args = flags(*options)
    total = needed(args, rows, length)
    free(total)
    check_memory(args, Target(args.model), CPU, ALONE, rows, length)
    free(total - 1)
    assert refusal(args, rows, length).partition(": ")[2].startswith("needs ")
    free(float("inf"))
    check_memory(args, Target(args.model), CPU, ALONE, rows, length)


@pytest.mark.one_in(3, 2)
@pytest.mark.parametrize("scheme", ["int8", "int4-g32", "fp8", "mxfp4"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weights_count_as_the_processor_holds_them(scheme, dtype):
    """Where a kernel reads codes, these; else the weights in the dtype of activations."""
    options = ("--quantize", scheme, "--quantize_head", "none", "--dtype", dtype)
    counted, *_ = bytes_of(flags(*options))
    model = load_model(
        ROOT / "checkpoints/demo", quantize=scheme, dtype=getattr(torch, dtype), pack=False
    )
    stored = sum(parameter.nbytes for parameter in model.parameters())
    linears = quantized_linears(pack_model(model))
    if scheme == "int8" or (scheme, dtype) == ("int4-g32", "bfloat16"):
        assert counted == stored
    else:
        expanded = sum(linear.expanded_bytes for linear in linears)
        assert counted == stored + expanded > stored


@pytest.mark.parametrize("inputs", [96, 100])
def test_int8_counts_as_held_where_no_kernel_reads_it(inputs):
    """aten's kernel takes a multiple of 16 inputs alone."""
    linear = torch.nn.Linear(inputs, 64, bias=False, dtype=torch.bfloat16)
    quantized = QuantizedLinear.from_float(linear, "int8")
    counted = quantized.held_bytes("cpu")
    quantized.pack()
    assert counted == quantized.stored_bytes + quantized.expanded_bytes


@pytest.mark.parametrize(
    "scheme, outputs, dtype, copied",
    [
        ("int4-g32", 64, "bfloat16", 64 * (96 // 2 + 3 * 4)),  # codes, scales and zeros in bfloat16
        ("q4_k", 64, "bfloat16", 64 * (96 // 2 + 3 * 4)),  # stored in float32, copied in bfloat16
        ("int4-g32", 64, "float16", 0),
        ("int4-g32", 60, "bfloat16", 0),
    ],
)
def test_int4_counts_with_the_copy_that_a_cuda_kernel_reads(scheme, outputs, dtype, copied):
    """Rows beyond the kernel's are multiplied with the stored parts."""
    linear = torch.nn.Linear(96, outputs, bias=False, dtype=getattr(torch, dtype))
    quantized = QuantizedLinear.from_float(linear, scheme)
    assert quantized.held_bytes("cuda") == quantized.stored_bytes + copied


def test_experts_count_once_on_a_gpu(tmp_path, monkeypatch):
    """They are stacked from their stored parts, which no kernel copies."""
    monkeypatch.setattr(cli.memory, "pick_dtype", lambda *_: torch.bfloat16)  # asks the GPU
    config = json.loads((ROOT / "checkpoints/demo/config.json").read_text())
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "architectures": None}
    config |= {"model_type": "mixtral", **experts}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    args = flags("--random_weights", file, "--quantize", "int4-g32", "--quantize_head", "none")
    target = Target(args.model)
    on_gpu, *_ = session_bytes(args, target, torch.device("cuda"), ALONE)
    schemes = same_schemes(target.config, "int4-g32")
    model = empty_model(target.config, torch.bfloat16, schemes)
    stored = sum(parameter.nbytes for parameter in model.parameters())
    attention = [linear for layer in model.layers for linear in quantized_linears(layer.attention)]
    assert on_gpu == stored + sum(linear.stored_bytes for linear in attention)


def test_an_eagle_draft_counts_with_its_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"]}))
    (tmp_path / "model.safetensors").write_bytes(bytes(12345))
    plain, *others = bytes_of(flags())
    drafted = bytes_of(flags("--draft_checkpoint", tmp_path))
    assert drafted == (plain + 12345, *others)


def test_weights_caches_and_drafts_count():
    plain, per_position, max_length = bytes_of(flags())
    # layers, keys and values, heads, channels, bytes
    assert (per_position, max_length) == (6 * 2 * 4 * 32 * 2, 512)
    stored = (ROOT / "checkpoints/demo/model.safetensors").stat().st_size
    assert 0.99 * stored < plain <= stored
    assert bytes_of(flags("--kv_cache_dtype", "int8"))[1] == 6 * 2 * 4 * (32 + 4)
    alone = bytes_of(flags("--checkpoint", ROOT / "checkpoints/demo-draft"))
    drafted = bytes_of(flags("--draft_checkpoint", ROOT / "checkpoints/demo-draft"))
    assert drafted == (plain + alone[0], per_position + alone[1], max_length)
    assert bytes_of(flags("--quantize", "int4-g32"))[0] < 0.6 * plain


def test_a_session_that_cannot_fit_ends_before_weights_are_read(free, monkeypatch, capsys):
    """One line and exit status 2, of the program and of a server's session; with the numbers in
    GB."""
    monkeypatch.setattr(cli.opening, "load_models", None)
    free(3e6)
    with pytest.raises(SystemExit) as exit_info:
        cli.start.main(["--device", "cpu"])
    err = capsys.readouterr().err
    weights = f"{bytes_of(flags())[0] / 1e9:.4g}"
    assert exit_info.value.code == 2 and re.fullmatch(
        rf"error: \S*checkpoints/demo: needs \S+ GB or more \(weights {weights}, caches \S+\), but"
        rf" 0\.003 GB of memory"
        r" are free; smaller weights need less, such as --quantize int4-g32, and so do fewer"
        r" rows or a smaller --max_seq_length\n",
        err,
    ), err
    free(needed(flags(), 4, 512) - 1)
    with pytest.raises(ValueError, match="GB of memory are free"):
        open_llm(flags("--batch_size", 4), CPU, num_slots=4)


@pytest.mark.slow
def test_an_automatic_batch_is_not_refused_beyond_one_row(free, tmp_path, capsys):
    file = tmp_path / "prompts.txt"
    file.write_text("One day\n" * 6)
    args = (
        "--prompt_file",
        file,
        "--max_new_tokens",
        8,
        "--max_seq_length",
        512,
        "--device",
        "cpu",
        "--json",
    )
    free(needed(flags(*args), 1, 512))
    run(flags(*args))
    assert len(capsys.readouterr().out.splitlines()) == 6
    with pytest.raises(ValueError, match="GB of memory are free"):
        run(flags(*args, "--batch_size", 6))
    # without --max_seq_length
    many = ("--prompt_file", file, "--max_new_tokens", 8, "--device", "cpu", "--json")
    run(flags(*many, "--batch_size", 6))


def test_faults_of_files_are_reported_by_loading(free, tmp_path):
    free(0)
    for words, message in (
        (("--checkpoint", tmp_path / "none"), "no such folder"),
        (("--draft_checkpoint", tmp_path), "config.json: no such file"),
        (("--quantize", "int4-g128", "--random_weights", "benchmarks/shapes/demo.json"), None),
    ):
        with pytest.raises(ValueError, match=message):
            run(flags(*words, "--device", "cpu"))
