"""A server under load: `python -m tests.attacks.serve_load --minutes 60 [--write FILE]`;
`--overhead` for its cost.

Clients of many kinds ask the demo pair at once: completions and chats, whole and streamed, greedy
and sampled, with stop strings, several answers a request; some are wrong, some leave in the middle.
What each should be told was decoded by `python generate.py` before, with the same flags, one row at
a time. The run fails when an answer is lost or another's, or when the server's memory grows: the
median of its last quarter against that of its second. `--overhead` sets the rate at which one
client receives tokens, and the server's own, against generate.py's, in turn, by rounds.
"""

import argparse
import collections
import functools
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import openai

from benchmarks.record import record

ROOT = Path(__file__).parent.parent.parent
ALONE = ["--device", "cpu", "--no-compile"]
PAIR = ["--draft_checkpoint", "checkpoints/demo-draft", "--speculate_k", "3", *ALONE]
WHO = (
    "Once upon a time",
    "One day, Tom",
    "The little dog",
    "Lily and Sam",
    "A bird",
    "In the park,",
)
DID = (" saw a", " went home.", ", who was very sad,", "", " had a big red ball and")
NEW, SEEDS, WARM = 48, 3, {"temperature": 0.9, "top_p": 0.95}
GROWTH = 1.05  # of resident memory that passes for none
SERVER = ("-m", "scripts.serve")
# Lines of a server's log that report no fault: its start and end, requests but those of status 5xx,
# and refusals.
EXPECTED_LINE = r"\s*(load |listening|INFO:(?!.*\" 5\d\d )|WARNING:  POST \S+: 4\d\d,|$)"


def decoded(flags: list[str], rows: list[dict], models: list[str] = PAIR) -> list[dict]:
    """What generate.py makes of JSONL rows, one at a time."""
    # more rows would end in another order
    alone = ["--json", "--batch_size", "1", "--prompt_file", "-"]
    command = [sys.executable, "generate.py", *models, *alone, *flags]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    done = subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


class Server:
    """A running server, and its log."""

    def __init__(self, *flags: str, models: list[str] = PAIR):
        command = [sys.executable, *SERVER, *models, "--port", "0", *flags]
        self.process, self.log = (
            subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True),
            [],
        )
        self.ready = threading.Event()
        threading.Thread(target=self.read, daemon=True).start()
        assert self.ready.wait(300), self.log
        self.url = next(line for line in self.log if "listening on" in line).split()[-1] + "/v1"

    def read(self) -> None:
        for line in self.process.stderr:
            self.log.append(line)
            if "listening on" in line:
                self.ready.set()
        self.ready.set()

    def resident_mb(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)


class Load:
    """Clients that ask until `end`, and what came of it."""

    def __init__(self, url: str, expected: dict[tuple, str], end: float):
        self.client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=300)
        self.expected, self.end, self.counts, self.wrong = expected, end, collections.Counter(), []

    def clients(self, number: int) -> None:
        for seed in range(number):
            threading.Thread(target=self.ask_on, args=(random.Random(seed),), daemon=True).start()

    def ask_on(self, draw: random.Random) -> None:
        while time.monotonic() < self.end:
            kind = draw.choice(
                (
                    "whole",
                    "whole",
                    "streamed",
                    "streamed",
                    "chat",
                    "several",
                    "stop",
                    "leaves",
                    "refused",
                )
            )
            self.counts["asked"] += 1
            try:
                self.check(kind, *getattr(self, kind)(draw, *draw.choice(list(self.expected))))
            except Exception as error:
                self.wrong.append(f"{kind}: {type(error).__name__}: {error}")

    def check(self, kind: str, found: object, wanted: object) -> None:
        self.counts["answered"] += 1
        self.counts[kind] += 1
        if found != wanted:
            self.wrong.append(f"{kind}: {found!r} where generate.py wrote {wanted!r}")

    def settings(self, seed: int | None, new: int) -> dict:
        """Greedy where there is no seed."""
        drawn = {"temperature": 0} if seed is None else {"seed": seed, **WARM}
        return {"model": "demo", "max_tokens": new, **drawn}

    def whole(self, draw, prompt, seed):
        new, text = draw.choice((NEW, NEW // 2)), self.expected[prompt, seed]
        found = (
            self.client.completions.create(prompt=prompt, **self.settings(seed, new))
            .choices[0]
            .text
        )
        return (
            (found, text)
            if new == NEW
            else (text.startswith(found.rstrip("\ufffd")) and bool(found), True)
        )

    def streamed(self, draw, prompt, seed):
        chunks = self.client.completions.create(
            prompt=prompt, stream=True, **self.settings(seed, NEW)
        )
        return "".join(chunk.choices[0].text for chunk in chunks), self.expected[prompt, seed]

    def chat(self, draw, prompt, seed):
        """The demo has no template: one message is its text."""
        messages = [{"role": "user", "content": prompt}]
        chunks = self.client.chat.completions.create(
            messages=messages, stream=True, **self.settings(seed, NEW)
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks), self.expected[
            prompt, seed
        ]

    def several(self, draw, prompt, seed):
        seeds = range(SEEDS)
        found = self.client.completions.create(
            prompt=prompt, n=SEEDS, **self.settings(0, NEW)
        ).choices
        return [choice.text for choice in found], [self.expected[prompt, seed] for seed in seeds]

    def stop(self, draw, prompt, seed):
        text = self.expected[prompt, seed]
        if len(text) < 7:  # nothing to stop at
            return self.whole(draw, prompt, seed)
        cut = draw.randrange(len(text) - 6)
        stop = text[cut : cut + 5]
        found = self.client.completions.create(
            prompt=prompt, stop=[stop], **self.settings(seed, NEW)
        ).choices[0]
        return (found.text, found.finish_reason), (text[: text.index(stop)], "stop")

    def leaves(self, draw, prompt, seed):
        chunks = self.client.completions.create(
            prompt=prompt, stream=True, **self.settings(seed, 400)
        )
        found = "".join(chunk.choices[0].text for _, chunk in zip(range(draw.randrange(8)), chunks))
        chunks.close()
        return self.expected[prompt, seed].startswith(
            found[: len(self.expected[prompt, seed])]
        ), True

    def refused(self, draw, prompt, seed):
        try:
            self.client.completions.create(
                prompt=prompt, presence_penalty=3, **self.settings(seed, NEW)
            )
        except openai.BadRequestError as error:
            return error.body["param"], "presence_penalty"
        return "nothing", "an error"


@functools.cache
def expected_texts() -> dict[tuple, str]:
    """(prompt, seed or None for greedy) -> generate.py's text."""
    prompts = [who + did for who in WHO for did in DID]
    greedy = decoded(
        ["--temperature", "0", "--max_new_tokens", str(NEW)],
        [{"prompt": prompt} for prompt in prompts],
    )
    drawn = decoded(
        [
            "--temperature",
            str(WARM["temperature"]),
            "--top_p",
            str(WARM["top_p"]),
            "--max_new_tokens",
            str(NEW),
        ],
        [{"prompt": prompt, "seed": seed} for prompt in prompts for seed in range(SEEDS)],
    )
    asked = [
        *((prompt, None) for prompt in prompts),
        *((prompt, seed) for prompt in prompts for seed in range(SEEDS)),
    ]
    return {key: row["text"] for key, row in zip(asked, [*greedy, *drawn], strict=True)}


def load(args: argparse.Namespace) -> dict:
    expected = expected_texts()
    server, memory = Server("--batch_size", str(args.batch_size)), []
    end = time.monotonic() + 60 * args.minutes
    found = Load(server.url, expected, end)
    found.clients(args.clients)
    while time.monotonic() < end:
        time.sleep(min(2.0, 60 * args.minutes / 40))
        memory.append(server.resident_mb())
    waited = time.monotonic() + 120
    while (
        found.counts["answered"] + len(found.wrong) < found.counts["asked"]
        and time.monotonic() < waited
    ):
        time.sleep(0.2)
    quarter = len(memory) // 4
    before, after = (
        statistics.median(memory[quarter : 2 * quarter]),
        statistics.median(memory[-quarter:]),
    )
    status, counts = server.end(), dict(found.counts)
    lost = counts["asked"] - counts["answered"]
    log = [line for line in server.log if not re.match(EXPECTED_LINE, line)]
    failed = bool(found.wrong or lost or after > GROWTH * before or status or log)
    return {
        "minutes": args.minutes,
        "counts": counts,
        "lost": lost,
        "wrong": found.wrong[:5],
        "resident_mb": [round(before, 1), round(after, 1)],
        "resident_mb_by_minute": [round(mb) for mb in memory[::30]],
        "exit": status,
        "log": log[:20],
        "failed": failed,
    }


def overhead(args: argparse.Namespace) -> dict:
    """Rates of greedy decoding of one row, by rounds of generate.py, the server's own clock, and
    one client's."""
    new, prompt, ratios = args.new, "Once upon a time", {"server's clock": [], "client's clock": []}
    models = ["--checkpoint", args.checkpoint, *ALONE] if args.checkpoint else PAIR
    server = Server("--ignore_eos", models=models)
    client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
    name = client.models.list().data[0].id
    greedy = ["--temperature", "0", "--ignore_eos", "--max_new_tokens", str(new)]
    samples = [*greedy, "--num_samples", "5", "--batch_size", "1"]
    for _ in range(args.rounds):
        alone = statistics.median(
            row["decode_tok_s"] for row in decoded(samples, [{"prompt": prompt}], models)
        )
        own, received = [], []
        for _ in range(5):
            usage = {"stream": True, "stream_options": {"include_usage": True}}
            chunks = client.completions.create(
                model=name, prompt=prompt, max_tokens=new, temperature=0, **usage
            )
            moments = [(time.perf_counter(), chunk) for chunk in chunks]
            texts = [
                moment
                for moment, chunk in moments
                if chunk.choices and not chunk.choices[0].finish_reason
            ]
            timings = next(
                c.choices[0].timings for _, c in moments if c.choices and c.choices[0].finish_reason
            )
            own.append(timings["decode_tok_s"])
            received.append((timings["tokens"] - 1) / (texts[-1] - texts[0]))
        ratios["server's clock"].append(statistics.median(own) / alone)
        ratios["client's clock"].append(statistics.median(received) / alone)
    status = server.end()
    over = {
        name: [round(f(values), 3) for f in (statistics.median, min, max)]
        for name, values in ratios.items()
    }
    return {
        "over generate.py, median min max": over,
        "exit": status,
        "failed": over["client's clock"][0] < 0.95,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="A server under load, and what serving costs.")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--overhead", action="store_true", help="rates of one row instead of load")
    parser.add_argument("--rounds", type=int, default=5, help="of --overhead")
    parser.add_argument(
        "--checkpoint", help="of --overhead, decoded without a draft; default: the demo pair"
    )
    parser.add_argument("--new", type=int, default=400, help="tokens of an answer, of --overhead")
    parser.add_argument("--write", type=Path, metavar="FILE", help="results as JSON")
    args = parser.parse_args()
    results = overhead(args) if args.overhead else load(args)
    print(json.dumps(results, indent=1))
    if args.write:
        record(args.write, results)
    sys.exit(results["failed"])


if __name__ == "__main__":
    main()
