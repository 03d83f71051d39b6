"""Other people's tests against our server: a plugin that openai_suites.py copies beside them for
their pytest.

    Server              `python -m scripts.serve` with given flags, one at a time, reused while the
                        flags stay
    RemoteOpenAIServer  in place of vLLM's, which starts vLLM
    pytest_…            hooks: tests that do not apply are skipped with the reason; results go to a
                        file, a line each

It imports nothing of this project, whose `tests` would hide theirs. Sockets reach this machine
alone.
"""

import importlib.abc
import importlib.machinery
import inspect
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import types
from pathlib import Path
from unittest import mock

import openai
import pytest

SETTINGS = json.loads(os.environ["QUICKDRAFT_SUITE"])
LOCAL = ("127.0.0.1", "localhost", "::1", "0.0.0.0", None, "")
TEST_S = 120
# ------------------------------------------------------------------------------------ the network


def local_only() -> None:
    """Let sockets connect to this machine alone: their fixtures would download models."""
    connect = socket.socket.connect
    getaddrinfo = socket.getaddrinfo

    def checked_connect(self, address):
        if isinstance(address, tuple) and address[0] not in LOCAL:
            raise OSError(f"this run talks to 127.0.0.1 alone, not to {address[0]}")
        return connect(self, address)

    def checked_getaddrinfo(host, *args, **kwargs):
        name = host.decode() if isinstance(host, bytes) else host
        if name not in LOCAL:
            raise socket.gaierror(f"this run talks to 127.0.0.1 alone, not to {name}")
        return getaddrinfo(host, *args, **kwargs)

    socket.socket.connect = checked_connect
    socket.getaddrinfo = checked_getaddrinfo


# ------------------------------------------------------------------------------------- our server


class Server:
    """Our server as it runs now. `at` restarts it only for other flags, because a start takes
    seconds."""

    flags: tuple[str, ...] | None = None
    process: subprocess.Popen | None = None
    url = ""

    @classmethod
    def at(cls, *flags: str) -> str:
        """The address of a server with these flags, without /v1."""
        if cls.process is None or cls.process.poll() is not None or flags != cls.flags:
            cls.end()
            cls.start(flags)
        return cls.url

    @classmethod
    def start(cls, flags: tuple[str, ...]) -> None:
        command = [*SETTINGS["server"], "--port", "0", *flags]
        cls.process = subprocess.Popen(
            command, cwd=SETTINGS["root"], stderr=subprocess.PIPE, text=True
        )
        lines = []
        for line in cls.process.stderr:
            lines.append(line)
            if "listening on" in line:
                break
        else:
            raise RuntimeError("the server did not start: " + "".join(lines)[-500:])
        cls.url = lines[-1].split("listening on")[1].split()[0]
        cls.flags = flags
        # or its pipe would fill
        threading.Thread(target=cls.process.stderr.read, daemon=True).start()

    @classmethod
    def end(cls) -> None:
        if cls.process is not None and cls.process.poll() is None:
            cls.process.kill()
            cls.process.wait()
        cls.process = None


# ----------------------------------------------------------------------------------------- vLLM's


class RemoteOpenAIServer:
    """What vLLM's tests ask of theirs."""

    DUMMY_API_KEY = "none"

    def __init__(self, model: str, vllm_serve_args: list[str], **_):
        self.root = Server.at()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def url_for(self, *parts: str) -> str:
        return "/".join([self.root, *parts])

    def get_client(self, **others) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url_for("v1"), api_key="none", max_retries=0, **others)

    def get_async_client(self, **others) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=self.url_for("v1"), api_key="none", max_retries=0, **others
        )


class Anything:
    """In place of what is not installed: any attribute, call, item or base class of it, as a
    condition false."""

    def __getattr__(self, name: str):
        return stand_in(name)

    def __call__(self, *args, **_):
        return args[0] if args and inspect.isfunction(args[0]) else Anything()

    def __getitem__(self, _):
        return Anything()

    def __or__(self, _):
        return Anything()

    __ror__ = __or__

    def __bool__(self):
        return False

    def __iter__(self):
        return iter(())

    def __mro_entries__(self, _):
        return ()


def stand_in(name: str) -> Anything:
    """What a module that is imitated has for this name; the `__getattr__` of such a module."""
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything()


class Missing(types.ModuleType):
    """A package that is not installed, and any module in it."""

    __path__ = ()

    def __getattr__(self, name: str):
        return stand_in(name)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `names` and what lies in them as Missing, where nothing else finds them."""

    def __init__(self, names: list[str]):
        self.names = tuple(names)

    def find_spec(self, name, path=None, target=None):
        if name in self.names or name.startswith(tuple(f"{package}." for package in self.names)):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Missing(spec.name)

    def exec_module(self, module):
        return None


# ------------------------------------------------------------------------------------ llama.cpp's


def start_in_place_of_llama(self, timeout_seconds: float = 0) -> None:
    """`ServerProcess.start` of llama.cpp's utils.py, which starts llama-server. Its context is
    shared by its slots."""
    slots = self.n_slots or 1
    flags = ["--batch_size", str(slots), "--max_seq_length", str((self.n_ctx or 1024) // slots)]
    flags += ["--temperature", str(self.temperature), "--seed", str(self.seed)]
    flags += ["--served_model_name", "tinyllama-2"]
    if self.n_predict and self.n_predict > 0:
        flags += ["--max_new_tokens", str(self.n_predict)]
    if self.api_key:
        flags += ["--api_key", self.api_key]
    host, port = Server.at(*flags).removeprefix("http://").rsplit(":", 1)
    self.server_host = host
    self.server_port = int(port)
    self.ready = True


def adapt_llama_utils() -> None:
    """Our server in place of theirs, our paths, and no comparison with the texts of their model."""
    import utils

    make_url = utils.ServerProcess.make_url

    def with_version(self, path: str, host: str | None = None) -> str:
        return make_url(
            self, f"/v1{path}" if re.match(r"/(chat|models|completions)", path) else path, host
        )

    utils.ServerProcess.start = start_in_place_of_llama
    utils.ServerProcess.stop = lambda self: None
    utils.ServerProcess.make_url = with_version
    utils.match_regex = lambda regex, text: isinstance(text, str)


# ----------------------------------------------------------------------------------------- pytest


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Before their conftest.py reads the environment and imports what is missing."""
    local_only()
    sys.meta_path.append(Finder(SETTINGS["missing"]))
    if SETTINGS["name"] == "openai-python":
        os.environ["TEST_API_BASE_URL"] = f"{Server.at()}/v1"
    if SETTINGS["name"] == "llama.cpp":
        adapt_llama_utils()


def pytest_collection_modifyitems(items: list) -> None:
    for item in items:
        reason = reason_against(item)
        if reason:
            item.add_marker(pytest.mark.skip(reason=f"does not apply: {reason}"), append=False)
        elif hasattr(item, "callspec"):
            for name in SETTINGS["any_value"]:
                if item.callspec.params.get(name) is not None:
                    item.callspec.params[name] = mock.ANY


def reason_against(item) -> str | None:
    """Why a test does not apply to this server, by the first pattern that its id matches; None if
    it does."""
    for pattern, reason in SETTINGS["rules"]:
        if re.search(pattern, item.nodeid):
            return reason
    fixtures = SETTINGS["server_fixtures"]
    if fixtures and not set(fixtures) & set(item.fixturenames):
        return "it asks no server"
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    """A test has TEST_S seconds, fixtures included."""

    def interrupt(*_):
        raise TimeoutError(f"more than {TEST_S} s")

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(TEST_S)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def write(test: str, outcome: str, text: str) -> None:
    with Path(SETTINGS["results"]).open("a") as file:
        file.write(json.dumps({"test": test, "outcome": outcome, "text": text}) + "\n")


def pytest_collectreport(report) -> None:
    if report.failed:
        write(report.nodeid, "failed", "not collected: " + str(report.longrepr)[-300:])


def pytest_runtest_logreport(report) -> None:
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        write(report.nodeid, "skipped", reason.removeprefix("Skipped: "))
    elif report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        write(report.nodeid, "failed", crash.message if crash else str(report.longrepr)[-300:])
    elif report.when == "call":
        write(report.nodeid, "passed", "")


def pytest_unconfigure(config) -> None:
    Server.end()
