"""A room can be deleted: the demo still tells its story, and an option that needs the room names the missing file."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

DEMO = ["--max_new_tokens", "4", "--device", "cpu"]
# Files to delete, flags that need them, the file that the error names.
ROOMS = {
    "drafts": (["drafts"], ["--draft", "ngram"], "drafts/ngram.py"),
    "formats": (
        ["loading/quantized", "loading/gguf.py", "loading/gguf_metadata.py"], ["--checkpoint", "a.gguf"],
        "loading/gguf_metadata.py",
    ),
    "caches": (["decoding/kv_8bit.py"], ["--kv_cache_dtype", "int8"], "decoding/kv_8bit.py"),
    "gpu": (["weights/gpu.py"], ["--quantize", "mxfp4"], "weights/gpu.py"),
    "programs": (["scripts", "benchmarks", "docs", "examples", "tests"], [], ""),
}  # fmt: skip
# Several runs in one process, because a start takes seconds. On a CPU a GPU's kernels are never packed: pretend.
DRIVER = """
import json, runpy, sys
import cli
import weights.linears as linears
for flags in json.loads(sys.argv.pop()):
    linears.FUSING_DEVICE = "cpu" if "--quantize" in flags else "cuda"
    sys.argv = ["generate.py", *flags]
    try:
        runpy.run_path("generate.py", run_name="__main__")
        print("\\nstatus 0", flush=True)
    except SystemExit as end:
        print(f"\\nstatus {end.code or 0}", flush=True)
"""


def copy_without(copy: Path, files: list[str]) -> None:
    """The project as git has it, without these files and folders."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if not any(Path(name).is_relative_to(file) for file in files) and (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, copy / name)


def run_generate(folder: Path, *runs: list[str]) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", DRIVER, json.dumps(runs)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def story() -> str:
    text, status = run_generate(ROOT, DEMO).stdout.split("\nstatus ")
    assert text and status == "0\n"
    return text


@pytest.mark.attack
@pytest.mark.parametrize("room", ROOMS)
def test_the_demo_runs_without(room, story, tmp_path):
    files, flags, file = ROOMS[room]
    copy_without(tmp_path, files)
    (tmp_path / "a.gguf").write_bytes(b"GGUF and no more")
    quantized = tmp_path / "quantized"
    quantized.mkdir()
    config = json.loads((tmp_path / "checkpoints/demo/config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    (quantized / "config.json").write_text(json.dumps(config))
    runs = [[*DEMO, *flags]] if flags else []
    runs += [[*DEMO, "--checkpoint", "quantized"]] if room == "formats" else []
    done = run_generate(tmp_path, DEMO, *runs)
    texts = re.split(r"\nstatus (\d+)\n", done.stdout)
    assert texts[:2] == [story, "0"], done.stderr
    assert texts[3::2] == ["2"] * len(runs), done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == len(runs) and "Traceback" not in done.stderr, done.stderr
    for error, missing in zip(errors, (file, "loading/quantized/reader.py")):
        assert f"{missing} is missing" in error


@pytest.mark.attack
@pytest.mark.parametrize("scheme", ["int8", "fp8", "int4-g32"])
def test_without_the_other_formats_quantize_fails_before_it_writes(scheme, tmp_path):
    """int8 and fp8 are saved in a format of other programs; int4 is not, and needs no room."""
    copy_without(tmp_path, ["loading/quantized"])
    command = [sys.executable, "quantize.py", "--checkpoint", "checkpoints/demo", "--scheme", scheme, "--output", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    if scheme == "int4-g32":
        assert done.returncode == 0 and (tmp_path / "out/config.json").exists(), done.stderr
        return
    error = "error: loading/quantized/reader.py is missing: this copy was made without it\n"
    assert (done.returncode, done.stderr) == (2, error)
    assert not list(tmp_path.glob("out*"))
