"""Long contexts on a CPU: what a step costs when much is filled, in 16-bit caches and in 8-bit ones; long prompts; and
what 8 bits change of a trained model's distributions.

    python -m benchmarks.context steps prefill [--rounds N] [--write benchmarks/cpu.json]
    python -m benchmarks.context quality --checkpoint DIR --text FILE [--write benchmarks/quality.json]

`steps` runs the 1.1B shape, engines of both caches in turn on the same packed weights; a step's time is set against its
bytes. `prefill` sets 8,192 tokens against transformers and llama.cpp. This file knows no caches but this project's.
"""

import json
import statistics
import sys
from pathlib import Path

import torch

from benchmarks.bench import TINYLLAMA, Worker, close, interleave, ours, row, seconds_of, write_results
from cli.errors import ending_plainly
from cli.flags import Parser, positive
from cli.report import attended_bytes, position_bytes, weight_bytes
from decoding.kv_8bit import KINDS
from decoding.sampling import Sampling
from drafts.ngram import NgramDraft
from generate import Engine
from loading.checkpoint import load_model, random_model
from loading.config import config_from_hf
from loading.tokenizer import load_tokenizer
from model import Transformer
from weights.walker import pack_model

K = 5  # tokens that a verification has besides the first
PROMPT = 8192
NAMES = {"model": "bf16", "int8": "kv_int8"}


def steps(args) -> list[dict]:
    """One query and six over 1,000, 4,000 and 16,000 positions; bf16 weights, then int8 ones: caches weigh more."""
    hf, rows = TINYLLAMA | {"max_position_embeddings": 16_200}, []
    for weights in (None, "int8"):
        model = pack_model(
            random_model(config_from_hf(hf), dtype=torch.bfloat16, device="cpu", quantize=weights, pack=False)
        )
        engines = {
            kind: Engine(model, 1, 16_100, drafter=NgramDraft(), speculate_k=K, kind=KINDS[kind]) for kind in NAMES
        }
        shape = "1b" if weights is None else f"1b.{weights}"
        rows += compare(args, model, engines, shape)
    return rows


def compare(args, model: Transformer, engines: dict[str, Engine], shape: str) -> list[dict]:
    rows, found = [], {}
    for number in range(args.rounds + 1):
        for filled in (100, 1000, 4000, 16_000):
            for kind, engine in engines.items():
                costs = engine.calibrate(Sampling(0), filled, rounds=5)
                if number:  # the first round warms up
                    found.setdefault((kind, filled), []).append((costs.decode_s, costs.verify_s[K]))
    for filled in (1000, 4000, 16_000):
        where = f"ctx{filled // 1000}k"
        for kind, name in NAMES.items():
            one, six = zip(*found[kind, filled], strict=True)
            few, _ = zip(*found[kind, 100], strict=True)
            per = position_bytes(model, KINDS[kind])
            read = [weight_bytes(model) + attended_bytes(per, n) for n in (filled, 100)]
            note = f"{filled} tokens filled; medians {statistics.median(one) * 1e3:.1f} and"
            note += f" {statistics.median(six) * 1e3:.1f} ms for one query and six"
            over = [a / b * read[1] / read[0] for a, b in zip(one, few, strict=True)]
            rows.append(row(f"{shape}.{name}.{where}_over_bytes", over, "ratio", f"step over its bytes' time; {note}"))
            ratio = [b / a for a, b in zip(one, six, strict=True)]
            rows.append(row(f"{shape}.{name}.{where}.verify6_over_1", ratio, "ratio", note))
        ratio = [a[0] / b[0] for a, b in zip(found["model", filled], found["int8", filled], strict=True)]
        rows.append(row(f"{shape}.kv_int8.{where}.speedup", ratio, "ratio", f"over a bf16 cache, {filled} filled"))
        ratio = [a[1] / b[1] for a, b in zip(found["model", filled], found["int8", filled], strict=True)]
        rows.append(row(f"{shape}.kv_int8.{where}.verify6_speedup", ratio, "ratio", "the same of six queries"))
    return rows


def prefill(args) -> list[dict]:
    hf = TINYLLAMA | {"max_position_embeddings": PROMPT + 8}
    shape = json.dumps(hf)
    workers = {
        "ours": ours(hf=hf, cache=PROMPT + 8),
        "transformers": Worker("benchmarks.peers", "transformers", shape),
        "llamacpp": Worker("benchmarks.peers", "llamacpp", shape, "BF16", str(PROMPT + 8)),
    }
    answers, _ = interleave(workers, min(args.rounds, 3), {"what": "prefill", "length": PROMPT})
    close(workers)
    times = {name: seconds_of(found) for name, found in answers.items()}
    rows = [
        row(f"1b.bf16.prefill8k.{name}_tok_s", [PROMPT / s for s in found], "tok/s") for name, found in times.items()
    ]
    for peer in ("transformers", "llamacpp"):
        ratio = [b / a for a, b in zip(times["ours"], times[peer], strict=True)]
        rows.append(row(f"prefill8k.vs_{peer}", ratio, "ratio", f"bf16, {PROMPT} tokens of the 1.1B shape, eager"))
    return rows


@torch.inference_mode()
def quality(args) -> list[dict]:
    """Divergence of a model on 8-bit caches from the same model on whole ones, in float32, and in bfloat16, 16 queries
    a pass, where the latter's own distance from float32 stands beside."""
    ids, found, rows = load_tokenizer(args.checkpoint).encode(Path(args.text).read_text())[: args.context], {}, []
    for dtype, chunk in (("float32", 512), ("bfloat16", 16)):
        model = pack_model(load_model(args.checkpoint, dtype=getattr(torch, dtype)))
        for kind in KINDS:
            found[dtype, kind] = log_probabilities(model, ids, kind, chunk)
    for dtype in ("float32", "bfloat16"):
        for kind in KINDS:
            if (dtype, kind) == ("float32", "model"):
                continue
            want, got = found["float32", "model"], found[dtype, kind]
            divergence = (want.exp() * (want - got)).sum(-1).mean().item()
            nll = -got[:-1].gather(1, torch.tensor(ids[1:])[:, None]).mean().item()
            note = f"nats from float32 with float32 caches, {len(ids)} tokens of held-out text; nll {nll:.4f}"
            rows.append(row(f"{args.name}.kv_{kind}.{dtype}.kl", [divergence], "nats", note))
    return rows


def log_probabilities(model: Transformer, ids: list[int], kind: str, chunk: int) -> torch.Tensor:
    """(T, V) after each token, read in chunks through caches of a kind."""
    held, parts = model.make_caches(1, len(ids) + chunk, KINDS[kind]), []
    for begin in range(0, len(ids), chunk):
        tokens = torch.tensor([ids[begin : begin + chunk]])
        pos = torch.arange(begin, begin + tokens.size(1))
        parts.append(model(tokens, pos, held.slice_to(begin + chunk))[0].log_softmax(-1))
    return torch.cat(parts)


MEASUREMENTS = {"steps": steps, "prefill": prefill, "quality": quality}


def main() -> None:
    parser = Parser(description="What long contexts cost on a CPU.")
    add = parser.add_argument
    add("what", nargs="+", choices=MEASUREMENTS)
    add("--rounds", type=positive, default=7, metavar="N", help="in turn; default: 7, prefill at most 3")
    add("--checkpoint", metavar="DIR", help="for quality")
    add("--text", metavar="FILE", help="for quality, held-out")
    add("--context", type=positive, default=4096, metavar="N", help="tokens of it; default: 4096")
    add("--name", default="smollm2", help="of the checkpoint, in results; default: smollm2")
    add("--write", metavar="FILE", help="merge the rows into this results file")
    args = parser.parse_args()
    with ending_plainly():
        if "quality" in args.what and not (args.checkpoint and args.text):
            raise ValueError("quality needs --checkpoint and --text")
        rows = [found for what in args.what for found in MEASUREMENTS[what](args)]
        if args.write:
            write_results(Path(args.write), rows, " ".join(["python -m benchmarks.context", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
