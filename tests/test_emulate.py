"""scripts/emulate.py: the program's GPU path gives a CPU's tokens, where torch is built for CUDA; elsewhere it says
what is missing."""

import json
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

GREEDY = ("--temperature", "0", "--dtype", "float32", "--max_new_tokens", "6", "--max_seq_length", "64", "--json")


def run(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built for CUDA")
def test_a_build_without_cuda_is_one_line():
    done = run("-m", "scripts.emulate", "generate.py")
    assert done.returncode == 2 and done.stdout == "", done.stderr
    assert done.stderr == "error: emulating a GPU needs a CUDA build of torch with its headers, and triton\n"


@pytest.mark.long
@pytest.mark.skipif(torch.version.cuda is None, reason="needs a CUDA build of torch")
@pytest.mark.parametrize(
    "options",
    [(), ("--no-compile",), ("--draft_checkpoint", "checkpoints/demo-draft"), ("--draft", "layers:0-2"),
     ("--quantize", "int8"), ("--quantize", "fp8"), ("--quantize", "mxfp6"),
     ("--prompt", "One day a small dog and a big cat ran to the park to play")],
    ids=" ".join,
)  # fmt: skip
def test_the_emulated_path_gives_a_cpu_s_tokens(options):
    """Wrong positions, masks, bits, static inputs or replays give others. One to three minutes each."""
    done = run("-m", "scripts.emulate", "generate.py", "--device", "cuda", *GREEDY, *options)
    assert done.returncode == 0, done.stderr
    assert "WRONG" not in done.stderr, done.stderr
    assert ("CUDA graphs of" in done.stderr) == ("--no-compile" not in options), done.stderr
    on_cpu = run("generate.py", "--device", "cpu", "--no-compile", *GREEDY, *options)
    assert json.loads(done.stdout)["tokens"] == json.loads(on_cpu.stdout)["tokens"]
