"""Programs in comparison: each is a process of its own that answers a line of JSON with another
line.

    Worker          the process, which waits at its pipe while the others run
    WorkerFailed    it ended without an answer: the last line of its stderr, and where the rest is
    answer_lines    the loop inside it: a line names a method of an object, and has its arguments
    in_turn         the answers of several workers, A B A B …, after one uncounted round
    first_byte_s    seconds from starting a program to its first byte of output

This file imports no torch: llama.cpp and torch in one process may crash.
"""

import contextlib
import json
import os
import re
import select
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NoReturn

from decoding.errors import UserError

ROOT = Path(__file__).parent.parent


class WorkerFailed(UserError):
    """A worker that ended without an answer."""


class Worker:
    """`python -m COMMAND`, run from the project's root. It starts with its first request: workers
    that answer in turn also load, compile and calibrate one after the other. Its stderr goes to a
    file, which is kept if the worker fails."""

    def __init__(self, *command: str, env: dict[str, str] | None = None):
        self.command = command
        self.env = {**os.environ, **(env or {})}
        self.failure: str | None = None  # why it ended without an answer
        self.stderr = tempfile.NamedTemporaryFile(  # noqa: SIM115
            "w+", prefix="worker-", suffix=".stderr", delete=False
        )
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", *self.command],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            stderr=self.stderr,
            env=self.env,
        )

    def call(self, **request) -> dict:
        """The answer to one request. WorkerFailed if the worker has ended."""
        self.send(**request)
        return self.receive()

    def send(self, **request) -> None:
        """Send a request, whose answer `receive` reads. One may be unanswered at a time."""
        if self.process is None:
            self.start()
        with contextlib.suppress(OSError):  # `receive` finds out why
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()

    def has_answer(self, timeout_s: float | None = None) -> bool:
        """Is there an answer within so many seconds, or has the worker ended? None: wait for it."""
        readable, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        return bool(readable)

    def receive(self, timeout_s: float | None = None) -> dict:
        """The answer to the last request. WorkerFailed if the worker has ended, or is too late: it
        is ended then."""
        if not self.has_answer(timeout_s):
            self.fail("no answer in time")
        try:
            return json.loads(self.process.stdout.readline())
        except (OSError, ValueError):
            self.fail()

    def fail(self, reason: str = "") -> NoReturn:
        """End the worker with WorkerFailed, for this reason or by its stderr: the last line with
        the name of an error, because some of torch's go on for pages, or else the last one."""
        self.process.kill()
        self.process.wait()
        lines = Path(self.stderr.name).read_text(errors="replace").split("\n")
        lines = [line.strip() for line in lines if line.strip()]
        errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception): ", line)]
        reasons = errors or lines or [f"exit status {self.process.returncode}"]
        self.failure = f"failed: {reason or reasons[-1]:.200}"
        command = shlex.join(["python", "-m", *self.command])
        raise WorkerFailed(
            f"a worker {self.failure}; all of its stderr is in {self.stderr.name}; it ran"
            f" {command:.300}"
        ) from None

    def close(self) -> None:
        if self.failure is None:
            if self.process is not None:
                self.process.stdin.close()
                self.process.wait(timeout=60)
            Path(self.stderr.name).unlink()
        self.stderr.close()


def answer_lines(program: object) -> None:
    """Answer requests {"method": NAME, …} from stdin until it closes."""
    for line in sys.stdin:
        request = json.loads(line)
        method = getattr(program, request.pop("method"))
        print(json.dumps(method(**request)), flush=True)


def close(workers: dict[str, Worker]) -> None:
    for worker in workers.values():
        worker.close()


def in_turn(
    workers: dict[str, Worker],
    rounds: int,
    requests: Sequence[dict],
    start_round: Callable[[], object] = lambda: None,
    optional: Collection[str] = (),
) -> tuple[dict[str, list[dict]], list]:
    """(name of a worker -> its answers, one a round; the result of `start_round` in each round).
    The requests take turns. The first one also runs in an uncounted round before all others. A
    worker among `optional` that fails is left out of the answers, and the others go on."""
    answers = {name: [] for name in workers}
    results = []
    for number in range(-1, rounds):
        result = start_round()
        request = requests[max(number, 0) % len(requests)]
        for name in list(answers):
            try:
                answer = workers[name].call(**request)
            except WorkerFailed as error:
                if name not in optional:
                    raise
                print(f"{name}: {error}", file=sys.stderr)
                del answers[name]
                continue
            if number >= 0:
                answers[name].append(answer)
        if number >= 0:
            results.append(result)
    return answers, results


def first_byte_s(command: list[str], rounds: int) -> list[float]:
    """Seconds from the start of a program to its first byte on stdout, in processes that end there;
    one more run, which does not count, comes first. UserError if the program writes nothing."""
    seconds = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        with subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            if not process.stdout.read(1):
                raise UserError(
                    f"a program ended before its first token; this shows its error:"
                    f" {shlex.join(command)}"
                )
            seconds.append(time.perf_counter() - start)
            process.kill()
    return seconds[1:]
