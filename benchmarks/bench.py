"""Measure quickdraft on a CPU, and write what was measured where its readers expect it.

    python -m benchmarks.bench decode --peers --gptfast ../gpt-fast --write benchmarks/cpu.json

Each measurement is a function that returns rows {"id", "value", "min", "max", "unit", "note"}. `--write` puts them
into a results file with the commit, the hardware and the command; a later run of the same id replaces its row.

    decode        tokens/s and bytes/s of the 1.1B shape by format, batch and compilation; with --peers against
                  llama.cpp, gpt-fast and transformers
    verify        a pass over 6 rows against a step of one, by format
    prefill       prompts of 32, 128 and 512 tokens; with --peers against transformers
    cache         one step with 100 tokens filled in a cache of 256 and of 32,768; with 100 to 16,000 filled; windowed
    compile       seconds to compile 22 layers, with an empty and with a filled cache on disk
    breakdown     where the milliseconds of one step go, from the profiler
    speculation   a memory-bound pair whose acceptance is set by construction: speed-up, and measured over predicted
    drafts        the same for the demo pair and for prompt lookup
    quality       the demo model by scheme, in perplexity, KL divergence and agreement with itself in bf16, on --text
    load          peak of anonymous memory while a 1.1B model loads, over the size of its weights
    tp            the 1.1B shape over two gloo ranks: bytes and memory of each while loading, time per step
    moe           decode and verify of a sparse 1B shape (moe-1b.json: 4 of 32 experts), with --peers against llama.cpp;
                  bytes are those of the experts that a token takes
    first_token   start of `python generate.py` on the demo until its first byte of text

`--plot` draws every results file in benchmarks/, a PNG beside each, and makes the tables of the READMEs anew; by itself
it measures nothing.

Whatever is compared runs in turn, A B A B …, each in a process of its own that waits while the others run, with the
device's read bandwidth measured in every round; ratios are taken within a round. Greedy throughout.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

import tp
from benchmarks.plots import draw
from benchmarks.record import commit as git_commit
from benchmarks.tables import fill
from cli.errors import ending_plainly
from cli.report import attended_bytes, position_bytes, speculative, weight_bytes
from decoding.runner import Rows
from decoding.sampling import GREEDY, Sampling
from decoding.scheduler import Request
from drafts.ngram import NgramDraft
from generate import Engine, Timing, generate
from loading.checkpoint import load_model, random_model, save_model, write_atomically
from loading.config import config_from_hf
from loading.tokenizer import load_tokenizer
from model import Transformer
from quantize import SCHEMES, quantize_model
from speculative import ModelDraft
from weights.walker import pack_model

ROOT = Path(__file__).parent.parent

TINYLLAMA = {  # the 1.1B shape that CPU figures are quoted for
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "vocab_size": 32000,
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
    "num_key_value_heads": 4, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}  # fmt: skip
SMALL = {**TINYLLAMA, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 16}
MOE = json.loads((ROOT / "benchmarks" / "shapes" / "moe-1b.json").read_text())
SHORT_NAME = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
WAIT_S = 1200  # for a worker to load and compile


def row(id: str, values: list[float], unit: str, note: str = "") -> dict:
    """One result: the median of `values` with their range."""
    value, low, high = (float(f"{f(values):.4g}") for f in (statistics.median, min, max))
    return {"id": id, "value": value, "min": low, "max": high, "unit": unit, "note": note}


# ------------------------------------------------------------------------------------------------ workers


class Worker:
    """A process that loads one contender, then answers one JSON line with another; idle in between."""

    def __init__(self, *command: str, env: dict[str, str] | None = None):
        self.process = subprocess.Popen(
            [sys.executable, "-m", *command], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            stderr=subprocess.DEVNULL, env={**os.environ, **(env or {})},
        )  # fmt: skip
        self.command = command

    def ask(self, **request) -> dict:
        """ValueError when the worker has died: its stderr is thrown away, so run its command by hand to see why."""
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            return json.loads(self.process.stdout.readline())
        except (OSError, ValueError):
            raise ValueError(f"the worker died; see why with: python -m {' '.join(self.command)}") from None

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=60)


def ours(**spec) -> Worker:
    """A quickdraft worker: see `Contender` for the keys of spec."""
    env = spec.pop("env", None)
    return Worker("benchmarks.bench", "--worker", json.dumps(spec), env=env)


class Contender:
    """quickdraft with random weights, inside a worker. Answers {"steps", "filled"} and {"prefill"} with seconds."""

    def __init__(
        self, hf: dict, dtype: str = "bfloat16", compile: bool = False, batch: int = 1, cache: int = 1024,
        quantize: str | None = None,
    ):  # fmt: skip
        """`quantize`: of every matrix, the head's too, as the other programs do it."""
        options = {"dtype": getattr(torch, dtype), "quantize": quantize, "head": quantize}
        self.model = pack_model(random_model(config_from_hf(hf), **options))
        self.engine = Engine(self.model, batch, cache, compile=compile)
        self.compile_s = self.engine.warm_up(GREEDY) if compile else 0.0
        self.batch = batch
        self.verifying: Engine | None = None

    @torch.inference_mode()
    def decode(self, steps: int, filled: int) -> dict:
        """Median seconds of a step whose first has `filled` positions in every row, its own included; and its bytes."""
        seconds, rows = [], fill_slots(self.engine, filled, steps)
        for step in range(steps):
            start = time.perf_counter()
            self.engine.run(rows, filled + step)
            seconds.append(time.perf_counter() - start)
        read = weight_bytes(self.model) + self.batch * attended_bytes(position_bytes(self.model), filled + steps // 2)
        return {"seconds": statistics.median(seconds), "bytes": read, "compile_s": self.compile_s}

    def verify(self, filled: int, k: int = 5) -> dict:
        """Median seconds of verifying k drafted tokens, and of a plain step, in turn."""
        if self.verifying is None:
            options = {"compile": self.engine.compile, "drafter": NgramDraft(), "speculate_k": k}
            self.verifying = Engine(self.model, 1, self.engine.max_seq_length, **options)
            if self.verifying.compile:
                self.verifying.warm_up(GREEDY)
        costs = self.verifying.calibrate(Sampling(0), filled)
        return {"seconds": costs.verify_s[k], "plain": costs.decode_s}

    @torch.inference_mode()
    def prefill(self, length: int) -> dict:
        """Seconds until the logits after `length` tokens are there."""
        timing, prompts = Timing(), [[7 + row] * length for row in range(self.batch)]  # with nothing in common
        self.engine.clear()
        list(generate(self.model, prompts, sampling=Sampling(0), max_new_tokens=1, engine=self.engine, timing=timing))
        return {"seconds": timing.prefill_s}

    def breakdown(self, steps: int, filled: int) -> dict:
        """Milliseconds a step spends by kind of operation, from the profiler's own times; the rest is overhead."""
        from torch.profiler import ProfilerActivity, profile

        plain = self.decode(steps, filled)["seconds"] * 1e3
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            self.decode(steps, filled)
        kinds = {
            "matmul": ("mm", "linear", "matmul", "packed"),
            "attention": ("scaled_dot_product",),
            "norm": ("rms_norm",),
        }
        spent = dict.fromkeys([*kinds, "other"], 0.0)
        for event in trace.key_averages():
            kind = next((kind for kind, words in kinds.items() if any(word in event.key for word in words)), "other")
            spent[kind] += event.self_cpu_time_total / 1e3 / steps
        return {"step": plain, **spent}


def fill_slots(engine: Engine, filled: int, steps: int) -> Rows:
    """All slots, each with room for so many greedy steps behind `filled` positions, which no pass has computed."""
    for slot in range(engine.batch_size):
        engine.state.fill(slot, Request(slot, [7] * filled, Sampling(0), steps + 1))
        engine.state.activate(slot, filled)
    return engine.rows(0, engine.batch_size)


class Pair:
    """A target with a drafter, inside a worker: races plain decoding against speculation, in turn, on one engine."""

    def __init__(
        self, pair: str, temperature: float = 0.0, k: int | str = 5, alpha: float = 0.8, compile: bool = False,
        positions: int = 400,
    ):  # fmt: skip
        """pair: 'counting' (1.1B and 0.1B, accepted with probability alpha), 'count' and 'cycle' (1.1B whose output
        never repeats, or copies its prompt, with prompt lookup), 'demo' (the shipped pair) or 'story' (its target with
        prompt lookup)."""
        self.sampling, self.k, self.tokenizer = Sampling(temperature), k, None
        if pair in ("counting", "count", "cycle"):
            self.model = pack_model(counting_model(TINYLLAMA, 0.0, period=100 if pair == "cycle" else None))
            draft = pack_model(counting_model(SMALL, 1 - alpha)) if pair == "counting" else None
            drafter = NgramDraft() if draft is None else ModelDraft(draft)
        else:
            folder = ROOT / "checkpoints"
            self.model, self.tokenizer = pack_model(load_model(folder / "demo")), load_tokenizer(folder / "demo")
            drafter = NgramDraft() if pair == "story" else ModelDraft(pack_model(load_model(folder / "demo-draft")))
        self.engine = Engine(self.model, 1, positions, compile=compile, drafter=drafter, speculate_k=k)
        self.compile_s = self.engine.warm_up(self.sampling.kind) if compile else 0.0

    def race(self, prompt: list[int] | str, new: int, seed: int = 0) -> dict:
        """Seconds of decoding plainly and with the drafter, tokens of each, and what speculation reports."""
        if isinstance(prompt, str):
            prompt = self.tokenizer.encode(prompt)
        self.engine.calibrate(self.sampling, min(len(prompt) + new // 2, self.engine.max_seq_length - 1), rounds=5)
        answer = {}
        for name, k in (("plain", 0), ("drafted", self.k)):
            self.engine.clear()
            self.engine.speculate_k, timing = k, Timing()
            list(
                generate(
                    self.model, [prompt], sampling=self.sampling, max_new_tokens=new, seed=seed, engine=self.engine,
                    timing=timing,
                )
            )  # fmt: skip
            answer[name] = {"seconds": timing.decode_s, "tokens": timing.decoded[0] - 1, "steps": timing.steps}
        return answer | {"report": speculative(self.engine, [timing])}


def counting_model(
    hf: dict, wrong: float, period: int | None = None, device="cpu", quantize: str | None = None
) -> Transformer:
    """Random weights that say i + 1 after token i with certainty, but for a fraction `wrong` of all tokens.

    The head's row j is the embedding of j - 1, and the blocks, run in full, add a thousandth of what random ones do. So
    a draft of this kind, wrong about each token with probability 1 - alpha, is accepted with probability alpha,
    independently. With a `period` counting starts again after so many tokens. `quantize`: of every matrix, the head's
    too; not of a tied head, which cannot say what follows.
    """
    model = random_model(config_from_hf(hf), device=device)
    for layer in model.layers:
        layer.attention.out.weight.mul_(1e-3)
        layer.ffn.down.weight.mul_(1e-3)
    V = model.config.vocab_size
    after = torch.arange(V).roll(1)  # the token that row j of the head follows
    if period:
        after[0], after[period] = period - 1, V - 1
    model.lm_head.weight.copy_(model.embed.weight[after.to(device)])
    mislead(model, wrong)
    return quantize_model(model, quantize, quantize) if quantize else model


def mislead(model: Transformer, wrong: float) -> None:
    """Let a fraction of all tokens look like others."""
    weight = model.embed.weight
    mistaken = torch.rand(len(weight), generator=torch.Generator().manual_seed(1)) < wrong
    mistaken = mistaken.to(weight.device)
    weight[mistaken] = weight.roll(len(weight) // 2, 0)[mistaken]


def serve(spec: dict) -> None:
    """Answer requests from stdin until it closes."""
    contender = (Pair if "pair" in spec else Contender)(**spec)
    for line in sys.stdin:
        request = json.loads(line)
        what = request.pop("what")
        print(json.dumps(getattr(contender, what)(**request)), flush=True)


READ_BYTES = 2**31


READ = "faster of a sum and a dot product over 2 GiB of float32"


def read_bandwidth(buffer: torch.Tensor) -> float:
    """Bytes/s of the faster of a sum and a dot product of a buffer's halves, which is far larger than the caches: what
    reading weights once could reach. Which one is faster differs between processors, by a fifth on an Intel Xeon and
    by half, the other way round, on an AMD EPYC."""
    half, seconds = buffer.numel() // 2, []
    for read in (buffer.sum, lambda: torch.dot(buffer[:half], buffer[half:])):
        start = time.perf_counter()
        read()
        seconds.append(time.perf_counter() - start)
    return buffer.nbytes / min(seconds)


def interleave(workers: dict[str, Worker], rounds: int, request: dict) -> tuple[dict[str, list[dict]], list[float]]:
    """Ask every worker in turn, `rounds` times after one uncounted round: (name -> answers, bandwidths)."""
    buffer = torch.ones(READ_BYTES // 4)
    answers, bandwidths = {name: [] for name in workers}, []
    for number in range(rounds + 1):
        measured = max(read_bandwidth(buffer) for _ in range(2))
        for name, worker in workers.items():
            answer = worker.ask(**request)
            if number:
                answers[name].append(answer)
        if number:
            bandwidths.append(measured)
    return answers, bandwidths


def seconds_of(answers: list[dict]) -> list[float]:
    return [answer["seconds"] for answer in answers]


# ------------------------------------------------------------------------------------------- measurements


LLAMACPP_KIND = {"bf16": "BF16", "int8": "Q8_0", "int4-g32": "Q4_0"}


def peers(args, what: str, format: str = "bf16") -> dict[str, Worker]:
    """The other programs, as far as they are installed (llama_cpp, transformers), given (a gpt-fast checkout) and able
    to decode in this format."""
    import importlib.util

    shape, found = json.dumps(TINYLLAMA), {}
    if not args.peers:
        return found
    if importlib.util.find_spec("transformers") and format == "bf16":
        found["transformers"] = Worker("benchmarks.peers", "transformers", shape)
        if what == "decode":
            found["transformers.compiled"] = Worker("benchmarks.peers", "transformers_compiled", shape)
    if what == "decode" and importlib.util.find_spec("llama_cpp"):
        found["llamacpp"] = Worker("benchmarks.peers", "llamacpp", shape, LLAMACPP_KIND[format])
    if what == "decode" and args.gptfast and format != "int4-g32":
        found["gptfast"] = Worker("benchmarks.peers", "gptfast", shape, str(args.gptfast.resolve()), format)
    return found


def measure_decode(args) -> list[dict]:
    """100 tokens filled. Ours by format, eager and compiled, each beside the peers that have such a format; then
    batch 4 and float32."""
    rows = []
    for format in LLAMACPP_KIND:
        quantize = None if format == "bf16" else format
        workers = {
            format: ours(hf=TINYLLAMA, quantize=quantize),
            f"{format}.compiled": ours(hf=TINYLLAMA, quantize=quantize, compile=True),
        }
        rows += compare_decode(args, workers, peers(args, "decode", format), format)
    workers = {"bf16.batch4": ours(hf=TINYLLAMA, batch=4), "fp32": ours(hf=TINYLLAMA, dtype="float32")}
    return rows + compare_decode(args, workers, {}, "others")


def compare_decode(
    args, workers: dict[str, Worker], others: dict[str, Worker], group: str, shape: str = "1b"
) -> list[dict]:
    """Rates of our workers and shares of the read bandwidth; ratios of the faster one to the others."""
    request = {"what": "decode", "steps": args.steps, "filled": 100}
    answers, bandwidth = interleave(workers | others, args.rounds, request)
    close(workers | others)
    times = {name: seconds_of(found) for name, found in answers.items()}
    note = f"read bandwidth {statistics.median(bandwidth) / 1e9:.1f} GB/s in the same run"
    rows = [row(f"{shape}.{group}.run.read_bandwidth_gb_s", [value / 1e9 for value in bandwidth], "GB/s", READ)]
    for name, seconds in times.items():
        batch, id = 4 if name.endswith("batch4") else 1, name if name in workers else f"{group}.{name}"
        rows.append(row(f"{shape}.{id}.tok_s", [batch / s for s in seconds], "tok/s", note))
    best = min(workers, key=lambda name: statistics.median(times[name]))
    for name in workers:
        share = [a["bytes"] / a["seconds"] / b for a, b in zip(answers[name], bandwidth, strict=True)]
        rows.append(row(f"{shape}.{name}.of_read_bandwidth", share, "ratio", note))
        if name == best and group in workers:
            rows.append(row(f"{shape}.{group}.of_read_bandwidth", share, "ratio", f"{best}; {note}"))
    for peer in others:
        ratio = [other / own for own, other in zip(times[best], times[peer], strict=True)]
        rows.append(row(f"{shape}.{group}.vs_{peer}", ratio, "ratio", f"{best} against {peer}; {note}"))
    return list({r["id"]: r for r in rows}.values())


def measure_verify(args) -> list[dict]:
    """What verifying 5 drafted tokens costs, over a plain step, by format; 100 tokens filled."""
    return [found for format in LLAMACPP_KIND for found in compare_verify(args, TINYLLAMA, format, f"1b.{format}")]


def compare_verify(args, hf: dict, format: str, id: str) -> list[dict]:
    """Eager, compiled, and the better of both under the bare id."""
    rows, quantize = [], None if format == "bf16" else format
    workers = {kind: ours(hf=hf, quantize=quantize, compile=bool(kind)) for kind in ("", ".compiled")}
    answers, bandwidth = interleave(workers, args.rounds, {"what": "verify", "filled": 100})
    close(workers)
    best = min(answers, key=lambda kind: statistics.median(a["seconds"] for a in answers[kind]))
    note = f"6 rows over 1, 100 filled; read bandwidth {statistics.median(bandwidth) / 1e9:.1f} GB/s"
    for kind, found in answers.items():
        ratio = [answer["seconds"] / answer["plain"] for answer in found]
        rows.append(row(f"{id}{kind}.verify6_over_1", ratio, "ratio", note))
        if kind == best:
            rows.append(row(f"{id}.verify6_over_1", ratio, "ratio", f"{kind.strip('.') or 'eager'}: {note}"))
    return list({r["id"]: r for r in rows}.values())


def measure_moe(args) -> list[dict]:
    """A sparse shape: 0.92 billion weights, of which a token takes 0.18 (moe-1b.json). 100 tokens filled."""
    rows = []
    for format in ("bf16", "int8"):
        quantize = None if format == "bf16" else format
        workers = {
            name: ours(hf=MOE, quantize=quantize, compile=name != format) for name in (format, f"{format}.compiled")
        }
        peer = ("benchmarks.peers", "llamacpp", json.dumps(MOE), LLAMACPP_KIND[format])
        rows += compare_decode(args, workers, {"llamacpp": Worker(*peer)} if args.peers else {}, format, "moe")
    for format in ("bf16", "int8"):
        rows += compare_verify(args, MOE, format, f"moe.{format}")
    usual = next(found for found in rows if found["id"] == "moe.bf16.verify6_over_1")
    return [*rows, {**usual, "id": "moe.verify6_over_1"}]


def measure_prefill(args) -> list[dict]:
    """Prompts of three lengths in bf16; the ratio against transformers at 512."""
    workers = {"ours": ours(hf=TINYLLAMA), "compiled": ours(hf=TINYLLAMA, compile=True), **peers(args, "prefill")}
    rows = []
    for length in (32, 128, 512):
        answers, _ = interleave(workers, args.rounds, {"what": "prefill", "length": length})
        for name, found in answers.items():
            prefix = {"ours": "1b.bf16", "compiled": "1b.bf16.compiled"}.get(name, f"1b.{name}")
            rows.append(row(f"{prefix}.prefill{length}.tok_s", [length / s for s in seconds_of(found)], "tok/s"))
    if "transformers" in workers:
        times = {name: seconds_of(found) for name, found in answers.items()}
        best = min(("ours", "compiled"), key=lambda name: statistics.median(times[name]))
        ratio = [b / a for a, b in zip(times[best], times["transformers"], strict=True)]
        rows.append(row("1b.prefill512.vs_transformers", ratio, "ratio", f"bf16, 512 tokens, {best} against eager"))
    close(workers)
    return rows


OPENINGS = (
    "Once upon a time", "One day, a little girl named Lily", "Tom had a red ball", "The big dog was sad because",
    "There was a bird who", "Ben and Mia went to the park", "It was a cold day and", "Mom said",
)  # fmt: skip


def measure_speculation(args) -> list[dict]:
    """A memory-bound pair: speed-up against plain decoding on the same engine, and that over what acceptance and step
    times predict; by acceptance, compiled, by draft length."""
    rows = []
    for alpha, compile in ((0.5, False), (0.8, False), (0.95, False), (0.8, True)):
        name = f"spec.1b.alpha{round(100 * alpha)}{'.compiled' * compile}"
        prompts = [[1000 * (n + 1)] for n in range(args.rounds)]
        note = "1.1B and 0.1B random bf16 weights, K = 5, greedy, acceptance set by construction"
        rows += race(name, prompts, 64, note, pair="counting", alpha=alpha, compile=compile)
    ratios = [r["value"] for r in rows if r["id"].endswith("measured_over_predicted")]
    rows.append(row("spec.measured_over_predicted", ratios, "ratio", "over the four medians of the 1.1B pair"))
    for k in (1, 2, 3, 5, 8):
        prompts = [[1000 * (n + 1)] for n in range(args.rounds)]
        note = "1.1B and 0.1B random bf16 weights, greedy, acceptance 0.8 by construction, eager"
        rows += race(f"spec.1b.alpha80.k{k}", prompts, 64, note, pair="counting", alpha=0.8, k=k)
    return rows


def measure_drafts(args) -> list[dict]:
    """The same for the demo pair, where launches count and not bytes, and for prompt lookup."""
    rows = []
    for kind, temperature in (("greedy", 0.0), ("t08", 0.8)):
        for k, compile in ((2, False), (3, False), (5, False), ("auto", False), (5, True), ("auto", True)):
            name = f"spec.demo.{kind}.k{k}{'.compiled' * compile}"
            note = "demo pair, bf16, 200 tokens from each of eight openings"
            rows += race(name, OPENINGS, 200, note, pair="demo", temperature=temperature, k=k, compile=compile)
    note = "1.1B random bf16 weights that repeat a prompt of 100 tokens, ngram:3, K = 5"
    rows += race("spec.ngram.copy", [list(range(100))] * args.rounds, 64, note, pair="cycle")
    note = "1.1B random bf16 weights whose output never repeats, ngram:3: nothing matches"
    rows += race("spec.ngram.nothing", [[1000]] * args.rounds, 48, note, pair="count")
    for kind, temperature in (("greedy", 0.0), ("t08", 0.8)):
        note = "demo model, eight openings, ngram:3, K = 5"
        rows += race(f"spec.ngram.story.{kind}", OPENINGS, 200, note, pair="story", temperature=temperature)
    return rows


def race(name: str, prompts, new: int, note: str, **pair) -> list[dict]:
    """Rows of one drafter from a race for each prompt: acceptance, costs, tokens a round, speed-up, and that over the
    prediction."""
    worker = ours(**pair)
    runs = [worker.ask(what="race", prompt=prompt, new=new, seed=n) for n, prompt in enumerate(prompts)]
    worker.close()
    gained = [
        r["plain"]["seconds"] / r["plain"]["tokens"] / (r["drafted"]["seconds"] / r["drafted"]["tokens"]) for r in runs
    ]
    reports = [r["report"] for r in runs]
    rows = [row(f"{name}.speedup", gained, "ratio", note)]
    rows.append(row(f"{name}.tokens_per_round", [r["tokens_per_round"] for r in reports], "tokens", note))
    drafted = [(g, r) for g, r in zip(gained, reports, strict=True) if r["predicted_speedup"]]
    if drafted:
        ratio = [g / r["predicted_speedup"] for g, r in drafted]
        rows.append(row(f"{name}.measured_over_predicted", ratio, "ratio", note))
        for key in ("alpha", "c", "v"):
            rows.append(row(f"{name}.{key}", [r[key] for _, r in drafted], "ratio", note))
    return rows


def measure_quality(args) -> list[dict]:
    """The demo model quantized to every scheme, and int4-g128 by every method (gptq calibrated on --calibration)."""
    if args.text is None or args.calibration is None:
        raise SystemExit("quality needs --text FILE and --calibration FILE")
    demo = str(ROOT / "checkpoints" / "demo")
    common = ["-m", "scripts.perplexity", "--text", str(args.text.resolve()), "--reference", demo, "--json"]
    wanted = {"bf16": ["--checkpoint", demo]}
    wanted |= {scheme: ["--checkpoint", demo, "--quantize", scheme] for scheme in SCHEMES}
    for scheme in ("int8", "int4-g128"):
        wanted[f"{scheme}.head-int8"] = ["--checkpoint", demo, "--quantize", scheme, "--quantize_head", "int8"]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for method in ("search", "gptq"):
            output = f"{folder}/{method}"
            extra = ["--calibration", str(args.calibration.resolve())] if method == "gptq" else []
            command = ["quantize.py", "--checkpoint", demo, "--scheme", "int4-g128", "--method", method, *extra]
            subprocess.run([sys.executable, *command, "--output", output], cwd=ROOT, check=True, capture_output=True)
            wanted[f"int4-g128.{method}"] = ["--checkpoint", output]
        for name, options in wanted.items():
            done = subprocess.run([sys.executable, *common, *options], cwd=ROOT, check=True, capture_output=True)
            found = json.loads(done.stdout)
            note = f"{found['tokens']} tokens, windows of {found['context']}"
            error = found["nll_standard_error"] * found["perplexity"]
            ppl, kl, kl_error = found["perplexity"], found["kl"], found["kl_standard_error"]
            rows.append(row(f"demo.{name}.ppl", [ppl - error, ppl, ppl + error], "ppl", f"± standard error; {note}"))
            rows.append(row(f"demo.{name}.kl", [kl - kl_error, kl, kl + kl_error], "nats", f"± standard error; {note}"))
            rows.append(row(f"demo.{name}.top1", [found["top1"]], "ratio", note))
    return rows


def measure_cache(args) -> list[dict]:
    """What a step costs must follow what is filled, not what is allocated, eager and compiled, windowed too."""
    long = {**TINYLLAMA, "max_position_embeddings": 40_000}
    sliding = {**long, "model_type": "mistral", "sliding_window": 1024}
    rows = []
    for kind, compile in (("", False), (".compiled", True)):
        workers = {size: ours(hf=long, cache=size, compile=compile) for size in (256, 32_768)}
        request = {"what": "decode", "steps": args.steps, "filled": 100}
        answers, _ = interleave(workers, args.rounds, request)
        ratio = [b / a for a, b in zip(seconds_of(answers[256]), seconds_of(answers[32_768]), strict=True)]
        rows.append(row(f"1b.bf16{kind}.cache32k_over_256", ratio, "ratio", "one step, 100 tokens filled"))
        workers["window"] = ours(hf=sliding, cache=32_768, compile=compile)
        workers.pop(256).close()
        for filled in (100, 1000, 4000, 16_000):
            answers, bandwidth = interleave(workers, args.rounds, request | {"filled": filled})
            for size, name in ((32_768, "full"), ("window", "window1024")):
                found = answers[size]
                rate = statistics.median(a["bytes"] / a["seconds"] / b for a, b in zip(found, bandwidth, strict=True))
                note = f"{found[0]['bytes'] / 1e9:.3f} GB read a step, {rate:.2f} of read bandwidth"
                ms = [1e3 * s for s in seconds_of(found)]
                rows.append(row(f"1b.bf16{kind}.{name}.filled{filled}.ms", ms, "ms", note))
                rows.append(row(f"1b.bf16{kind}.{name}.filled{filled}.gb", [found[0]["bytes"] / 1e9], "GB", "a step"))
        close(workers)
    return rows


def measure_compile(args) -> list[dict]:
    """Fresh processes: with an empty cache folder, then again with what the first one left there."""
    cold, warm = [], []
    for _ in range(2):
        with tempfile.TemporaryDirectory() as folder:
            for found in (cold, warm):
                worker = ours(hf=TINYLLAMA, compile=True, env={"TORCHINDUCTOR_CACHE_DIR": folder})
                found.append(worker.ask(what="decode", steps=1, filled=10)["compile_s"])
                worker.close()
    note = "prompt and greedy decode step of the 1.1B shape, batch 1, with warm-up"
    return [row(f"compile.22layers.{n}_s", v, "s", note) for n, v in (("cold", cold), ("warm", warm))]


def measure_breakdown(args) -> list[dict]:
    """One step of the 1.1B shape by kind of operation, by format, eager and compiled."""
    rows = []
    for format in LLAMACPP_KIND:
        for kind in ("", ".compiled"):
            worker = ours(hf=TINYLLAMA, quantize=None if format == "bf16" else format, compile=bool(kind))
            found = [worker.ask(what="breakdown", steps=args.steps, filled=100) for _ in range(args.rounds)]
            worker.close()
            note = "from the profiler, which adds to what is not a product; step_ms: without it; 100 filled"
            for name in found[0]:
                rows.append(row(f"1b.{format}{kind}.step.{name}_ms", [answer[name] for answer in found], "ms", note))
    return rows


def close(workers: dict) -> None:
    for worker in workers.values():
        worker.close()


def anonymous_bytes() -> int:
    """Resident memory of this process that no file backs (Linux): mapped checkpoint pages do not count."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise ValueError("/proc/self/status has no RssAnon: this measurement needs Linux")


class PeakAnonymous:
    """Samples anonymous memory every millisecond while a block runs; `.bytes` is peak minus before."""

    def __enter__(self):
        self.before = self.peak = anonymous_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._stop.wait(0.001):
            self.peak = max(self.peak, anonymous_bytes())

    def __exit__(self, *_) -> None:
        self._stop.set()
        self._thread.join()
        self.peak = max(self.peak, anonymous_bytes())
        self.bytes = self.peak - self.before


def load_once(folder: str, **options) -> tuple[float, float]:
    """(peak over the loaded weights, seconds) of one load in this process."""
    start = time.perf_counter()
    with PeakAnonymous() as peak:
        model = load_model(folder, **options)
    seconds = time.perf_counter() - start
    return peak.bytes / sum(parameter.nbytes for parameter in model.parameters()), seconds


def quantize_once(folder: str, output: str, scheme: str) -> tuple[float, float]:
    """(peak in GB, seconds) of one run of quantize.py in this process."""
    import quantize

    start = time.perf_counter()
    with PeakAnonymous() as peak:
        quantize.main(["--checkpoint", folder, "--scheme", scheme, "--output", output])
    return peak.bytes / 1e9, time.perf_counter() - start


def measure_load(args) -> list[dict]:
    """A fresh process a run, on a folder of the 1.1B shape in bfloat16, so that no run inherits another's heap."""

    def fresh(call: str) -> tuple[float, float]:
        code = f"from benchmarks.bench import *; print(json.dumps({call}))"
        return json.loads(
            subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True).stdout
        )

    note, rows = "1.1B shape, files in the page cache", []
    with tempfile.TemporaryDirectory() as folder:
        original, quantized = f"{folder}/original", f"{folder}/quantized"
        save_model(random_model(config_from_hf(TINYLLAMA)), original, TINYLLAMA)
        peak, seconds = fresh(f"quantize_once({original!r}, {quantized!r}, 'int4-g32')")
        rows.append(row("quantize.1b.int4-g32.peak_gb", [peak], "GB", f"python quantize.py; {note}"))
        rows.append(row("quantize.1b.int4-g32.s", [seconds], "s", f"python quantize.py; {note}"))
        for name, call in (
            ("load", f"load_once({original!r})"),
            ("load.int8", f"load_once({original!r}, quantize='int8')"),
            ("load.int4-g32", f"load_once({original!r}, quantize='int4-g32')"),
            ("load.stored-int4-g32", f"load_once({quantized!r})"),
        ):
            ratios, seconds = zip(*(fresh(call) for _ in range(args.rounds)))
            rows.append(row(f"{name}.peak_over_weights", ratios, "ratio", note))
            rows.append(row(f"{name}.1b_s", seconds, "s", note))
    return rows


def mapped_bytes(folder: str) -> int:
    """Of files in `folder`, what this process has touched through its mappings."""
    found, counting = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:  # the head of a mapping
            counting = folder in line
        elif counting and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


def tp_rank(folder: str, steps: int, threads: int = 1) -> None:
    """One rank of a launch, or a process alone: load its part, run some steps with 100 tokens filled; prints JSON."""
    ranks, copied, shard = tp.join(torch.device("cpu"), 300), [], tp.shard
    torch.set_num_threads(threads)

    def counted(*args, **others) -> torch.Tensor:
        copied.append(shard(*args, **others))
        return copied[-1]

    tp.shard = counted
    start = time.perf_counter()
    with PeakAnonymous() as peak:
        model = load_model(folder, tp=ranks)
    load_s = time.perf_counter() - start
    mapped, copied = mapped_bytes(folder), sum(part.nbytes for part in copied)
    engine = Engine(model, 1, 256)
    engine.calibrate(Sampling(0), 100, rounds=2)
    step_s = engine.calibrate(Sampling(0), 100, rounds=steps).decode_s
    weights = sum(parameter.nbytes for parameter in model.parameters())
    found = {"rank": ranks.rank, "peak": peak.bytes, "copied": copied, "mapped": mapped, "weights": weights}
    every = [found | {"load_s": load_s, "step_s": step_s, "bytes": weight_bytes(model)}] * ranks.world
    if ranks.world > 1:  # rank 0 speaks for all: lines of two processes can run into each other
        torch.distributed.all_gather_object(every, every[0])
    for part in every if ranks.rank == 0 else []:
        print(json.dumps(part), flush=True)
    tp.leave()


def measure_tp(args) -> list[dict]:
    """1.1B in bfloat16 over 1 and 2 gloo ranks, eager: what each reads and holds while loading, and time per step. Two
    cores share one memory bus, so two ranks have no more bandwidth than one process with two threads; what one thread
    alone reaches stands beside."""

    def launch(code: str, n: int) -> list[dict]:
        ranks = ["-m", "torch.distributed.run", f"--nproc_per_node={n}", "--no-python", sys.executable] if n > 1 else []
        done = subprocess.run([sys.executable, *ranks, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, check=True)
        return [json.loads(line) for line in done.stdout.splitlines()]

    buffer, bandwidth, note = torch.ones(2**28), [], "1.1B shape in bf16, gloo, eager"
    found: dict[str, list[list[dict]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        save_model(random_model(config_from_hf(TINYLLAMA)), folder, TINYLLAMA)
        for _ in range(args.rounds):
            bandwidth.append(read_bandwidth(buffer) / 1e9)
            for name, n, threads in (("1thread", 1, 1), ("1rank", 1, 2), ("2ranks", 2, 1)):
                code = f"from benchmarks.bench import *; tp_rank({folder!r}, {args.steps}, {threads})"
                found.setdefault(name, []).append(launch(code, n))
    rows = [row("tp.1b.read_bandwidth", bandwidth, "GB/s", "plain read, two threads, in the same rounds")]
    for name, rounds in found.items():
        rows.append(row(f"tp.1b.step_ms.{name}", [1e3 * one[0]["step_s"] for one in rounds], "ms", note))
        for key, what in (
            ("peak", "peak of anonymous memory while loading"),
            ("copied", "bytes taken from the files"),
            ("mapped", "pages of the files that were touched: whole pages, and what the system maps around them"),
        ):
            n, weights = len(rounds[0]), found["1rank"][0][0]["weights"]
            shares = [part[key] / (weights / n) for one in rounds for part in one]
            rows.append(row(f"tp.1b.{key}_over_share.{name}", shares, "ratio", f"{what}, over weights / {n}; {note}"))
    pairs = zip(found["1rank"], found["2ranks"], strict=True)
    speedups = [alone[0]["step_s"] / both[0]["step_s"] for alone, both in pairs]
    note = "time per step: one process with two threads, over two ranks with one each"
    return [*rows, row("tp.1b.2ranks_over_1", speedups, "ratio", note)]


def measure_first_token(args) -> list[dict]:
    """Whole processes: interpreter, imports, load, prefill, first byte on stdout. One uncounted run first."""
    command, seconds = [sys.executable, "generate.py", "--max_new_tokens", "1", "--device", "cpu"], []
    for _ in range(args.rounds + 1):
        start = time.perf_counter()
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            process.stdout.read(1)
            seconds.append(time.perf_counter() - start)
    return [row("demo.first_token_s", seconds[1:], "s", "python generate.py to its first byte of text, CPU")]


MEASUREMENTS = {
    "decode": measure_decode,
    "verify": measure_verify,
    "prefill": measure_prefill,
    "cache": measure_cache,
    "compile": measure_compile,
    "breakdown": measure_breakdown,
    "speculation": measure_speculation,
    "drafts": measure_drafts,
    "quality": measure_quality,
    "load": measure_load,
    "tp": measure_tp,
    "moe": measure_moe,
    "first_token": measure_first_token,
}

# ------------------------------------------------------------------------------------------- results file


def hardware() -> str:
    """Processor and core count: every measurement here runs on the CPU."""
    info = Path("/proc/cpuinfo")
    models = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return f"{models[0] if models else platform.processor()}, {os.cpu_count()} cores"


def write_results(
    file: Path, rows: list[dict], command: str, machine: str | None = None, commit: str | None = None
) -> None:
    """Merge rows into a results file by id. `machine`: what measured them, by default the CPU; `commit`: where git does
    not know it."""
    machine, commit = machine or hardware(), commit or git_commit()
    old = json.loads(file.read_text()) if file.exists() else {"rows": []}
    before = {"hardware": old.get("hardware"), "date": old.get("date")}  # of rows that do not say it themselves
    # Rows of one file come from several runs, and may come from several machines.
    source = {"commit": commit, "command": command, "hardware": machine, "date": str(datetime.date.today())}
    new = {row["id"]: before | row for row in old["rows"]} | {row["id"]: row | source for row in rows}
    result = {
        "commit": commit, "date": datetime.date.today().isoformat(), "hardware": machine,
        "torch": torch.__version__, "command": command, "rows": sorted(new.values(), key=lambda row: row["id"]),
    }  # fmt: skip
    text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
    write_atomically(file, lambda partial: partial.write_text(text))  # a full disk must not take older measurements


def show(root: Path) -> None:
    """Make the pictures of benchmarks/*.json, and the tables of both READMEs, anew."""
    rows = []
    for file in sorted((root / "benchmarks").glob("*.json")):
        results = json.loads(file.read_text())
        if "rows" not in results:  # another script's
            continue
        draw(results["rows"], file.with_suffix(".png"), f"{results['hardware']}, torch {results['torch']}")
        rows += results["rows"]
    for file in (root / "README.md", root / "benchmarks" / "README.md"):
        file.write_text(fill(file.read_text(), rows))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure quickdraft.")
    parser.add_argument("what", nargs="*", metavar="MEASUREMENT", help=f"of {', '.join(MEASUREMENTS)}; default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16, help="decode steps a round")
    parser.add_argument("--peers", action="store_true", help="also run the other programs that are installed")
    parser.add_argument("--gptfast", type=Path, metavar="DIR", help="a gpt-fast checkout, for --peers")
    parser.add_argument("--text", type=Path, metavar="FILE", help="held-out text, for quality")
    parser.add_argument("--calibration", type=Path, metavar="FILE", help="other text, for quality")
    parser.add_argument("--write", type=Path, metavar="FILE", help="merge the rows into this results file")
    parser.add_argument("--plot", action="store_true", help="make the pictures and tables of benchmarks/ anew")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        serve(args.worker)
        return
    with ending_plainly():
        run(args, parser)


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Measure, print, write."""
    unknown = set(args.what) - MEASUREMENTS.keys()
    if unknown:
        parser.error(f"unknown measurement {', '.join(sorted(unknown))}; there are {', '.join(MEASUREMENTS)}")
    rows, default = [], [] if args.plot else [name for name in MEASUREMENTS if name != "quality"]
    for name in args.what or default:
        found = MEASUREMENTS[name](args)
        for r in found:
            print(f"{r['id']:40} {r['value']:>9} ({r['min']}–{r['max']}) {r['unit']}  {r['note']}", file=sys.stderr)
        if args.write:  # after each measurement: an interrupted run keeps what it has
            command = f"python -m benchmarks.bench {' '.join(sys.argv[1:])}"
            for path, name in ((args.gptfast, "DIR"), (args.text, "FILE"), (args.calibration, "FILE")):
                command = command.replace(str(path), name) if path else command  # no path of this machine
            write_results(args.write, found, command)
        rows += found
    if args.plot:
        show(ROOT)
    if rows:
        print(json.dumps(rows), flush=True)


if __name__ == "__main__":
    main()
