"""Programs in comparison: each is a process of its own that answers a line of JSON with another
line.

    Worker          the process, which waits at its pipe while the others run
    answer_lines    the loop inside it: a line names a method of an object, and has its arguments
    in_turn         the answers of several workers, A B A B …, after one uncounted round
    first_byte_s    seconds from starting a program to its first byte of output

This file imports no torch: llama.cpp and torch in one process may crash.
"""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent


class Worker:
    """`python -m COMMAND`, started from the project's root."""

    def __init__(self, *command: str, env: dict[str, str] | None = None):
        self.command = command
        self.process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **(env or {})},
        )

    def call(self, **request) -> dict:
        """The answer to one request. ValueError if the worker has ended. Its stderr is lost, so the
        message has the command to run by hand."""
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            return json.loads(self.process.stdout.readline())
        except (OSError, ValueError):
            command = shlex.join(["python", "-m", *self.command])
            raise ValueError(
                f"a worker ended without an answer; this shows its error: {command}"
            ) from None

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=60)


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
) -> tuple[dict[str, list[dict]], list]:
    """(name of a worker -> its answers, one a round; the result of `start_round` in each round).
    The requests take turns. The first one also runs in an uncounted round before all others."""
    answers, results = {name: [] for name in workers}, []
    for number in range(-1, rounds):
        result = start_round()
        request = requests[max(number, 0) % len(requests)]
        for name, worker in workers.items():
            answer = worker.call(**request)
            if number >= 0:
                answers[name].append(answer)
        if number >= 0:
            results.append(result)
    return answers, results


def first_byte_s(command: list[str], rounds: int) -> list[float]:
    """Seconds from the start of a program to its first byte on stdout, in processes that end there;
    one more run, which does not count, comes first. ValueError if the program writes nothing."""
    seconds = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        with subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            if not process.stdout.read(1):
                raise ValueError(
                    f"a program ended before its first token; this shows its error:"
                    f" {shlex.join(command)}"
                )
            seconds.append(time.perf_counter() - start)
            process.kill()
    return seconds[1:]
