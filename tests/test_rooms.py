"""A room can be deleted: the demo still tells its story, and an option that needs the room ends in
an ImportError."""

import functools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

KEPT = ("__init__.py", "base.py", "registry.py")
DRAFTERS = [
    f"drafts/{file.name}" for file in (ROOT / "drafts").glob("*.py") if file.name not in KEPT
]
DEMO = ["--max_new_tokens", "4", "--device", "cpu"]
# Files to delete, flags that need them, the module that the error names.
ROOMS = {
    "drafts": (DRAFTERS, ["--draft", "ngram"], "drafts.ngram"),
    "formats": (
        [
            "loading/quantized",
            "loading/gguf.py",
            "loading/gguf_folder.py",
            "loading/gguf_vocabulary.py",
        ],
        ["--checkpoint", "a.gguf"],
        "loading.gguf_folder",
    ),
    "caches": (["decoding/kv_8bit.py"], ["--kv_cache_dtype", "int8"], "decoding.kv_8bit"),
    "gpu": (["weights/gpu.py"], ["--quantize", "mxfp4"], "weights.gpu"),
    "programs": (["scripts", "benchmarks", "docs", "examples", "tests"], [], ""),
}
# Several runs in one process, because a start takes seconds. On a CPU a GPU's kernels are never
# packed: pretend.
DRIVER = """
import json, runpy, sys
from cli.process import prepare
prepare()
import weights.linears as linears
for flags in json.loads(sys.argv.pop()):
    linears.FUSING_DEVICE = "cpu" if "--quantize" in flags else "cuda"
    sys.argv = ["generate.py", *flags]
    try:
        runpy.run_path("generate.py", run_name="__main__")
        print("\\nstatus 0", flush=True)
    except SystemExit as end:
        print(f"\\nstatus {end.code or 0}", flush=True)
    except ImportError as error:
        print(f"\\nstatus {type(error).__name__}: {error}", flush=True)
"""


def copy_without(copy: Path, files: list[str]) -> None:
    """The project as git has it, without these files and folders."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
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
    files, flags, module = ROOMS[room]
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
    text, *ends = re.split(r"\nstatus (.*)\n", done.stdout)[:-1]
    assert (text, ends[0]) == (story, "0"), done.stderr
    for end, missing in zip(ends[2::2], (module, "loading.quantized")):
        assert re.match(r"(ModuleNotFound|Import)Error: ", end), done.stderr
        assert f"'{missing}'" in end or f"'{missing.rpartition('.')[2]}'" in end, done.stderr
    assert len(ends[2::2]) == len(runs)


# Folders that can be deleted alone, and a module that needs each.
FOLDERS = {
    "scripts/serve": "scripts.serve.serve",
    "scripts/distill": "scripts.distill.distill_draft",
    "benchmarks": "benchmarks.bench",
}


@pytest.mark.slow
@pytest.mark.parametrize("deleted", FOLDERS)
def test_a_folder_of_programs_is_needed_by_itself_alone(deleted, tmp_path):
    copy_without(tmp_path, [deleted])
    run_python = functools.partial(
        subprocess.run, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    done = run_python([sys.executable, "generate.py", "--max_new_tokens", "3"])
    assert (done.returncode, bool(done.stdout)) == (0, True), done.stderr
    others = [module for folder, module in FOLDERS.items() if folder != deleted]
    done = run_python([sys.executable, "-c", f"import {', '.join(others)}"])
    assert done.returncode == 0, done.stderr
    done = run_python([sys.executable, "-c", f"import {FOLDERS[deleted]}"])
    assert done.returncode == 1 and "No module named" in done.stderr


@pytest.mark.attack
@pytest.mark.parametrize("scheme", ["int8", "fp8", "int4-g32"])
def test_without_the_other_formats_quantize_fails_before_it_writes(scheme, tmp_path):
    """int8 and fp8 are saved in a format of other programs; int4 is not, and needs no room."""
    copy_without(tmp_path, ["loading/quantized"])
    command = [
        sys.executable,
        "quantize.py",
        "--checkpoint",
        "checkpoints/demo",
        "--scheme",
        scheme,
        "--output",
        "out",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    if scheme == "int4-g32":
        assert done.returncode == 0 and (tmp_path / "out/config.json").exists(), done.stderr
        return
    assert done.returncode == 1 and "No module named 'loading.quantized'" in done.stderr
    assert not list(tmp_path.glob("out*"))
