"""Eight clients of one server, beside llama.cpp on the same file: `python -m benchmarks.real
clients [--write FILE]`.

    smollm2.clients8.vs_llamacpp            tokens a second of all clients, compiled;
                                            `.eager.vs_llamacpp`: eager
    smollm2.clients8.PROGRAM.tok_s          the rates, prompts included
    smollm2.clients8.PROGRAM.ttft_s         seconds to the first token of a newcomer behind seven
                                            that decode

Each client sends a prompt of 30 to 300 tokens, reads 128 greedy tokens, and sends the next prompt.
No two prompts begin alike, so nothing is reused. quickdraft is an Engine of eight slots, whose
prompts run eagerly as in generate.py; llama.cpp is peers.LlamaCppClients.
"""

import argparse
import json
import random
import statistics
import sys

from benchmarks.peers import Clients
from benchmarks.pipes import ROOT, Worker, answer_lines, close
from benchmarks.record import ratios, row
from benchmarks.workers import interleave
from cli.errors import use_threads
from decoding.engine import Engine
from decoding.sampling import GREEDY, Sampling
from loading.checkpoint import load_model
from loading.tokenizer import load_tokenizer
from weights.walker import pack_model

CLIENTS = 8  # and slots
REQUESTS = 3  # of each client in a round
LENGTHS = (30, 300)  # tokens of the shortest and the longest prompt


class EngineClients(Clients):
    """This project's Engine."""

    def __init__(self, file: str, slots: int, context: int, compile: bool):
        use_threads(None)
        self.engine = Engine(
            pack_model(load_model(file)), slots, context, compile=compile, compile_prompts=False
        )
        if compile:
            self.engine.warm_up(GREEDY)

    def add(self, prompt: list[int], new: int) -> int:
        return self.engine.add_request(prompt, sampling=Sampling(0), max_new_tokens=new)

    def step(self) -> list[tuple[int, int]]:
        return self.engine.step()

    def clear(self) -> None:
        self.engine.clear()


def requests_of(args: argparse.Namespace) -> tuple[list[dict], list[dict]]:
    """Requests for `Clients.serve` and for `Clients.join`, one of each a round, with text of the
    demo's stories."""
    text, rng = (ROOT / "checkpoints" / "stories.txt").read_text(), random.Random(0)
    ids = load_tokenizer(args.checkpoint).encode(text)
    max_length = min(LENGTHS[1], len(ids) - 1)

    def prompt() -> list[int]:
        """A random first token, so that no two prompts begin alike, and a part of the text."""
        start = rng.randrange(len(ids) - max_length)
        return [
            rng.randrange(1000, 2000),
            *ids[start : start + rng.randrange(LENGTHS[0], max_length)],
        ]

    serve, join = [], []
    for _ in range(args.rounds):
        prompts = [[prompt() for _ in range(REQUESTS)] for _ in range(CLIENTS)]
        serve.append({"method": "serve", "prompts": prompts, "new": args.new})
        running = [prompt() for _ in range(CLIENTS - 1)]
        # of the same length in every round
        newcomer = (prompt() + ids[:max_length])[: sum(LENGTHS) // 2]
        join.append({"method": "join", "prompts": running, "newcomer": newcomer, "new": args.new})
    return serve, join


def measure_clients(args: argparse.Namespace) -> list[dict]:
    context = LENGTHS[1] + args.new + 8
    spec = [str(args.checkpoint), CLIENTS, context]
    workers = {
        kind: Worker("benchmarks.clients", json.dumps([*spec, kind == "compiled" and args.compile]))
        for kind in ("compiled", "eager")
    }
    workers["llamacpp"] = Worker(
        "benchmarks.peers", "llamacpp_clients", json.dumps(spec[0]), *map(str, spec[1:])
    )
    try:
        serve, join = requests_of(args)
        answers, bandwidths = interleave(workers, args.rounds, *serve)
        first_tokens, _ = interleave(workers, args.rounds, *join)
    finally:
        close(workers)
    llamacpp = answers["llamacpp"][0]
    note = (
        f"{CLIENTS} clients, {REQUESTS} requests each, {args.new} greedy tokens after {LENGTHS[0]}"
        f" to"
        f" {LENGTHS[1]}; read bandwidth {statistics.median(bandwidths) / 1e9:.1f} GB/s in the same"
        f" rounds;"
        f" llama.cpp {'with' if llamacpp['repacks'] else 'without'} its extra buffers, flash"
        f" attention on, one cache"
        f" for all; {llamacpp['system']}"
    )
    id, rates = f"smollm2.clients{CLIENTS}", {}
    rows = [
        row(f"{id}.run.read_bandwidth_gb_s", [value / 1e9 for value in bandwidths], "GB/s", note)
    ]
    newcomer_note = (
        f"a prompt of {len(join[0]['newcomer'])} tokens behind {CLIENTS - 1} that decode; {note}"
    )
    for name, worker_answers in answers.items():
        rates[name] = [answer["tokens"] / answer["seconds"] for answer in worker_answers]
        rows.append(row(f"{id}.{name}.tok_s", rates[name], "tok/s", note))
        seconds = [answer["ttft_s"] for answer in first_tokens[name]]
        rows.append(row(f"{id}.{name}.ttft_s", seconds, "s", newcomer_note))
    for name, infix in (("compiled", ""), ("eager", ".eager")):
        rows.append(
            row(
                f"{id}{infix}.vs_llamacpp",
                ratios(rates[name], rates["llamacpp"]),
                "ratio",
                f"{name}; {note}",
            )
        )
    return rows


if __name__ == "__main__":
    answer_lines(EngineClients(*json.loads(sys.argv[1])))
