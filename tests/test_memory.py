"""Memory is added up before weights are read. Oracles are the measured peak of a process, and the free memory at which
a session just fits."""

import json
import re
import subprocess
import sys

import pytest
import torch
from conftest import BASE, ROOT

import cli.main
import cli.memory
from cli.flags import check_options, parse_args
from cli.main import open_session, run
from cli.memory import check_memory, session_bytes
from cli.prompts import Request
from tp import ALONE

CPU = torch.device("cpu")
CHAT = ("--interactive", "--device", "cpu")
PEAK = """
import sys, torch
from cli.flags import parse_args
from cli.main import run
from cli.memory import session_bytes
from tp import ALONE
args = parse_args(sys.argv[2:])
weights, peak, per_position, _ = session_bytes(args, args.quantize, torch.device("cpu"), ALONE)
if sys.argv[1] == "load":
    run(args)
status = open("/proc/self/status").read().split()  # ru_maxrss would begin with the parent's, at the fork
num_bytes = 1024 * int(status[status.index("VmHWM:") + 1])
print(f"\\n{max(peak, weights + args.max_new_tokens * per_position)} {num_bytes}")
"""


def flags(*arguments):
    return parse_args([*map(str, arguments)])


@pytest.fixture
def shape(tmp_path):
    """99 million weights, without a tied head, 200 MB."""
    file = tmp_path / "shape.json"
    sizes = {"vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8,
             "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64, "dtype": "bfloat16",
             "max_position_embeddings": 4096, "tie_word_embeddings": False}  # fmt: skip
    file.write_text(json.dumps(BASE | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]} | sizes))
    return file


@pytest.fixture
def free(monkeypatch):
    """Sets the free memory. Nothing may be loaded while it is refused."""

    def set_free(num_bytes: float) -> None:
        monkeypatch.setattr(cli.memory, "free_memory", lambda device: num_bytes)

    return set_free


def needed(args, rows: int, length: int) -> int:
    weights, peak, per_position, _ = session_bytes(args, args.quantize, CPU, ALONE)
    return max(peak, weights + rows * length * per_position)


def refusal(args, rows: int, length: int, min_length: float = 1) -> str:
    with pytest.raises(ValueError) as error:
        check_memory(args, CPU, ALONE, rows, length, min_length)
    return str(error.value)


def peak_of(mode: str, *arguments) -> tuple[int, int]:
    """(estimate, peak of resident memory) of a process, in bytes."""
    command = [sys.executable, "-c", PEAK, mode, *map(str, arguments), "--max_new_tokens", "4", "--device", "cpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return tuple(map(int, done.stdout.splitlines()[-1].split()))


@pytest.mark.attack
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--quantize", "int4-g32"),
        *(pytest.param(("--quantize", scheme), marks=pytest.mark.long) for scheme in ("int8", "fp8")),
    ],
)
def test_the_estimate_is_below_the_measured_peak_and_near_it(shape, options):
    """Bounds: at most the measured growth, which is at most 1.3 times the estimate and 150 MB of kernels, tokenizers
    and activations."""
    estimate, nothing = peak_of("nothing", "--random_weights", shape, *options)
    added_bytes = peak_of("load", "--random_weights", shape, *options)[1] - nothing
    assert estimate <= added_bytes <= 1.3 * estimate + 150e6, (estimate, added_bytes)


@pytest.mark.attack
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_estimate_of_the_demo_is_below_its_peak():
    """A mapped file counts once: the measured growth has its pages too, the estimate has the copy alone."""
    estimate, nothing = peak_of("nothing")
    added_bytes = peak_of("load")[1] - nothing
    stored = (ROOT / "checkpoints/demo/model.safetensors").stat().st_size
    assert stored <= estimate <= 2 * stored and estimate <= added_bytes <= 1.3 * estimate + stored + 150e6, (
        estimate,
        added_bytes,
    )


@pytest.mark.parametrize("rows, length, options", [
    (1, 1, ()), (64, 512, ()), (4, 512, ("--quantize", "int8")), (9, 300, ("--kv_cache_dtype", "int8")),
    (8, 512, ("--draft_checkpoint", ROOT / "checkpoints/demo-draft")),
])  # fmt: skip
def test_nothing_is_refused_that_fits_to_the_byte(free, rows, length, options):
    args = flags(*options)
    total = needed(args, rows, length)
    free(total)
    check_memory(args, CPU, ALONE, rows, length, 1)
    free(total - 1)
    assert refusal(args, rows, length).partition(": ")[2].startswith("needs ")
    free(float("inf"))
    check_memory(args, CPU, ALONE, rows, length, 1)


def test_an_eagle_draft_counts_with_its_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"]}))
    (tmp_path / "model.safetensors").write_bytes(bytes(12345))
    plain, peak, *others = session_bytes(flags(), None, CPU, ALONE)
    drafted = session_bytes(flags("--draft_checkpoint", tmp_path), None, CPU, ALONE)
    assert drafted == (plain + 12345, peak + 12345, *others)


def test_caches_drafts_and_kinds_count():
    plain, peak, per_position, max_length = session_bytes(flags(), None, CPU, ALONE)
    assert (per_position, max_length) == (6 * 2 * 4 * 32 * 2, 512)  # layers, keys and values, heads, channels, bytes
    assert session_bytes(flags("--kv_cache_dtype", "int8"), None, CPU, ALONE)[2] == 6 * 2 * 4 * (32 + 4)
    draft_flags = ("--draft_checkpoint", ROOT / "checkpoints/demo-draft")
    alone = session_bytes(flags("--checkpoint", ROOT / "checkpoints/demo-draft"), None, CPU, ALONE)
    with_draft = session_bytes(flags(*draft_flags), None, CPU, ALONE)
    assert (with_draft[0], with_draft[2]) == (plain + alone[0], per_position + alone[2]) and with_draft[
        1
    ] >= peak + alone[0] // 2
    assert plain < session_bytes(flags("--draft", "quantized:int4-g32"), None, CPU, ALONE)[0] < 2 * plain
    assert session_bytes(flags("--draft", "ngram"), None, CPU, ALONE)[0] == plain
    for scheme in ("fp8", "mxfp4"):  # without a kernel on a CPU
        assert session_bytes(flags(), scheme, CPU, ALONE)[0] == plain
    assert session_bytes(flags(), "int4-g32", CPU, ALONE)[0] < 0.6 * plain


def test_a_session_that_cannot_fit_ends_before_weights_are_read(free, monkeypatch, capsys):
    """One line and exit status 2, of the program and of a server's session; with the numbers in GB."""
    monkeypatch.setattr(cli.main, "load", None)
    free(3e6)
    with pytest.raises(SystemExit) as exit_info:
        cli.main.main(flags("--device", "cpu"))
    err = capsys.readouterr().err
    weights, peak = (f"{num_bytes / 1e9:.4g}" for num_bytes in session_bytes(flags(), None, CPU, ALONE)[:2])
    assert exit_info.value.code == 2 and re.fullmatch(
        rf"error: \S*checkpoints/demo: needs {peak} GB or more, but 0\.003 GB of memory are free: weights {weights},"
        rf" packing them {peak}, caches \S+; neither quantized weights nor smaller caches fit\n", err,
    ), err  # fmt: skip
    free(needed(flags(), 4, 512) - 1)
    with pytest.raises(ValueError, match="this fits: --batch_size 3 or --max_seq_length 511 or --quantize int8"):
        open_session(flags(*CHAT, "--batch_size", 4), [], CPU, ALONE, num_slots=4)


@pytest.mark.parametrize("num_answered, num_rows", [(0, 3), (4, 2), (5, 1), (6, 1)])
def test_memory_is_needed_for_rows_that_are_open(num_answered, num_rows, monkeypatch):
    """Of three lines with two samples each, a file answers some already."""

    def check(args, device, ranks, num_rows, *lengths):
        raise ValueError(f"{num_rows} rows")

    monkeypatch.setattr(cli.main, "check_memory", check)
    answered = dict.fromkeys(range(num_answered))
    with pytest.raises(ValueError, match=f"^{num_rows} rows"):
        args = flags("--batch_size", 3, "--num_samples", 2)
        open_session(args, [Request("a")] * 3, CPU, ALONE, answered=answered)


@pytest.mark.parametrize("share", [0.45, 0.6, 0.8, 0.95])
def test_following_the_advice_works(free, share):
    args = flags(*CHAT[1:], "--batch_size", 64, "--max_seq_length", 512)
    num_free = int(share * needed(args, 64, 512))
    free(num_free)
    message = refusal(args, 64, 512)
    advice = message.partition("this fits: ")[2].split(" or ")
    assert any(text.startswith("--batch_size") for text in advice) and any("--quantize" in text for text in advice)
    for text in advice:
        changed = flags(*CHAT[1:], "--batch_size", 64, "--max_seq_length", 512, *text.split())
        check_memory(changed, CPU, ALONE, changed.batch_size, changed.max_seq_length, 1)
        assert needed(changed, changed.batch_size, changed.max_seq_length) <= num_free
        for name in ("batch_size", "max_seq_length"):
            if f"--{name}" in text:
                setattr(changed, name, getattr(changed, name) + 1)
                assert needed(changed, changed.batch_size, changed.max_seq_length) > num_free, text


def test_a_batch_of_no_rows_is_no_advice(free):
    """Beside the weights the free memory holds 426 positions, and a row has 512."""
    free(session_bytes(flags(), "int4-g32", CPU, ALONE)[1])
    advice = refusal(flags(), 4, 512).partition("this fits: ")[2]
    assert advice == "--quantize int4-g32 --max_seq_length 106"


def test_the_advice_decodes(free, capsys):
    """Flags of the message, in the program itself."""
    words = ("--num_samples", 4, "--max_seq_length", 400, "--max_new_tokens", 4, "--device", "cpu")
    free(needed(flags(*words), 4, 300))
    with pytest.raises(ValueError, match="this fits: --batch_size 3 or --max_seq_length 300 or ") as error:
        run(flags(*words))
    for text in str(error.value).partition("this fits: ")[2].split(" or "):
        capsys.readouterr()
        changed = flags(*words, *text.split())
        check_options(changed)
        run(changed)
        assert len(capsys.readouterr().out.strip()) > 4, text


def test_an_automatic_batch_is_not_refused_beyond_one_row(free, tmp_path, capsys):
    file = tmp_path / "prompts.txt"
    file.write_text("One day\n" * 6)
    args = ("--prompt_file", file, "--max_new_tokens", 8, "--max_seq_length", 512, "--device", "cpu", "--json")
    free(needed(flags(*args), 1, 512))
    run(flags(*args))
    assert len(capsys.readouterr().out.splitlines()) == 6
    with pytest.raises(ValueError, match="--batch_size 1 or"):
        run(flags(*args, "--batch_size", 6))
    many = ("--prompt_file", file, "--max_new_tokens", 8, "--device", "cpu", "--json")  # without --max_seq_length
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
