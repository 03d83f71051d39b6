"""A machine with a GPU has pytest and hypothesis, and few packages besides."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT

# Everything of requirements-dev.txt but pytest and hypothesis, and what comes with it.
HIDE = """
from importlib.machinery import PathFinder

HIDDEN = {
    "accelerate", "bitsandbytes", "compressed_tensors", "datasets", "fastapi", "gguf", "google",
    "httpx", "httpx2", "llama_cpp", "llguidance", "lm_eval", "matplotlib", "openai", "peft",
    "playwright", "pydantic", "pydantic_ai", "rich", "starlette", "tenacity", "transformers",
    "uvicorn", "xdist",
}

find_spec = PathFinder.find_spec

def find_unless_hidden(cls, name, path=None, target=None):
    return None if name.partition(".")[0] in HIDDEN else find_spec(name, path, target)

PathFinder.find_spec = classmethod(find_unless_hidden)
"""


@pytest.mark.attack
def test_the_tests_of_a_gpu_need_few_packages(tmp_path):
    """The command of benchmarks/README.md: one file that cannot be imported would end it."""
    (tmp_path / "sitecustomize.py").write_text(HIDE)
    command = ["-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "-m", "gpu", "tests"]
    result = subprocess.run(
        [sys.executable, *command, "-v"],
        env=os.environ | {"PYTHONPATH": str(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-3000:]
    assert "left out without llguidance, lm_eval, openai, rich: " in result.stdout
    assert result.stdout.count("test_compiled_steps_on_a_gpu") == 5
