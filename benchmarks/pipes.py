"""Programs that are compared: each is a process of its own, which answers a line of JSON with another.

    Worker          the process, which waits at its pipe while the others run
    answer_lines    the loop inside it: a line names a method of an object, and has its arguments
    in_turn         the answers of several workers, A B A B …, after one uncounted round

This file imports no torch: llama.cpp and torch in one process may crash.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent


class Worker:
    """`python -m COMMAND`, started from the project's root."""

    def __init__(self, *command: str, env: dict[str, str] | None = None):
        self.command = command
        self.process = subprocess.Popen(
            [sys.executable, "-m", *command], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            stderr=subprocess.DEVNULL, env={**os.environ, **(env or {})},
        )  # fmt: skip

    def call(self, **request) -> dict:
        """The answer to one request. ValueError if the worker has died; its stderr is lost, so the message names the
        command that shows it."""
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            return json.loads(self.process.stdout.readline())
        except (OSError, ValueError):
            raise ValueError(f"the worker died; see why with: python -m {' '.join(self.command)}") from None

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
    workers: dict[str, Worker], rounds: int, requests: Sequence[dict], before: Callable[[], object] = lambda: None
) -> tuple[dict[str, list[dict]], list]:
    """Worker -> its answers, one a round, and the results of `before`, which runs at the start of each round. The
    requests take turns; the first one also runs in an uncounted round before all others."""
    answers, results = {name: [] for name in workers}, []
    for number in range(-1, rounds):
        result = before()
        request = requests[max(number, 0) % len(requests)]
        for name, worker in workers.items():
            answer = worker.call(**request)
            if number >= 0:
                answers[name].append(answer)
        if number >= 0:
            results.append(result)
    return answers, results
