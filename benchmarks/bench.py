"""Measure quickdraft on a CPU: `python -m benchmarks.bench decode --peers --write
benchmarks/cpu.json`.

    decode        tokens/s and bytes/s of the 1.1B shape by format, eager and compiled; with --peers
                  against llama.cpp, gpt-fast and transformers
    verify        a pass over 6 rows against a step of one, by format
    prefill       prompts of 32, 128 and 512 tokens in bf16, of 512 in the other formats and in
                  float32; with --peers against llama.cpp and transformers
    cache         one step in caches of 256 and of 32,768 positions, 100 filled; with 100 to 16,000
                  filled, with a sliding window and without
    compile       seconds to compile 22 layers, with an empty and with a filled cache on disk
    speculation   a memory-bound pair whose acceptance is set by construction: speed-up, and
                  measured over predicted
    both          such a pair in int8 over the plain target in bf16
    drafts        the same for the demo pair and for prompt lookup
    quality       the demo model by scheme, in perplexity, KL divergence and agreement with itself
                  in bf16, on --text
    load          peak of anonymous memory while a 1.1B model loads, over the size of its weights
                  (memory.py)
    tp            the 1.1B shape over two gloo ranks: bytes and memory of each rank, time per step
                  (memory.py)
    moe           decode and verify of a sparse 1B shape (moe-1b.json: 4 of 32 experts)
    8b            the 8B shape in int8 and int4-g32, compiled; with --peers against llama.cpp on as
                  many bytes; 20 GB
    load8b        memory while 16 GB of weights load and are quantized (memory.py); 18 GB of
                  temporary files
    context       steps with up to 16,000 tokens filled, in 16-bit caches and in 8-bit ones
                  (context.py)
    prefill8k     a prompt of 8,192 tokens beside transformers and llama.cpp (context.py)
    identical     the price of bit-identical drafting for plain steps (context.py)
    first_token   start of `python generate.py` on the demo until its first byte of text

`--write` merges the rows into a results file after each measurement; `--plot` alone measures
nothing and draws the pictures and tables of all results files. Compared programs run in turn, A B A
B …, each in a process of its own, with the read bandwidth measured in every round. Ratios are taken
within a round. `--level avx2` holds all of them to AVX2 (levels.py).
"""

import argparse
import importlib.util
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import levels
from benchmarks.context import measure_context, measure_identical, measure_prefill8k
from benchmarks.memory import measure_8b_load, measure_load, measure_tp
from benchmarks.pipes import ROOT, Worker, close, first_byte_s
from benchmarks.plots import draw
from benchmarks.record import failed_row, list_of, one_of, publish, ratios, row
from benchmarks.shapes import MOE, TINYLLAMA, config_json
from benchmarks.tables import PAGES, fill
from benchmarks.workers import READ_NOTE, interleave, quickdraft, race_rows, seconds_of
from cli.errors import exit_on_error
from cli.flags import Parser, positive
from decoding.errors import UserError
from weights.schemes import SCHEMES

# format -> the GGUF type beside it
LLAMACPP_TYPES = {"bf16": "BF16", "int8": "Q8_0", "int4-g32": "Q4_0"}
PROGRAMS = (
    "eager",
    "compiled",
    "float32",
    "llamacpp",
    "llamacpp.q4_1",
    "transformers",
    "transformers.compiled",
    "gptfast",
)
FILLED = 100  # default number of filled positions


def peers(args, method: str, format: str = "bf16") -> dict[str, Worker]:
    """Name -> worker of every other program that can run this method in this format: installed ones
    (llama_cpp, transformers) and gpt-fast with --gptfast. Empty without --peers."""
    shape, workers = json.dumps(TINYLLAMA), {}
    if not args.peers:
        return workers
    if importlib.util.find_spec("transformers") and format == "bf16":
        workers["transformers"] = Worker("benchmarks.peers", "transformers", shape)
        if method == "decode":
            workers["transformers.compiled"] = Worker(
                "benchmarks.peers", "transformers_compiled", shape
            )
    if importlib.util.find_spec("llama_cpp"):
        workers["llamacpp"] = Worker("benchmarks.peers", "llamacpp", shape, LLAMACPP_TYPES[format])
        if format == "int4-g32":  # as many bytes
            workers["llamacpp.q4_1"] = Worker("benchmarks.peers", "llamacpp", shape, "Q4_1")
    if method == "decode" and args.gptfast and format != "int4-g32":
        workers["gptfast"] = Worker(
            "benchmarks.peers", "gptfast", shape, str(args.gptfast.resolve()), format
        )
    return workers


def fastest(seconds: dict[str, list[float]]) -> str:
    """The name with the smallest median."""
    return min(seconds, key=lambda name: statistics.median(seconds[name]))


# --------------------------------------------------------------------------------- steps, prompts


def measure_decode(args) -> list[dict]:
    """Each format eager and compiled, beside the peers that have such a format."""
    rows = []
    for format in args.formats:
        workers = chosen(both_modes(TINYLLAMA, format), args.only, format)
        peer_workers = chosen(peers(args, "decode", format), args.only, format)
        rows += compare_decode(args, workers, peer_workers, format)
    return rows


def both_modes(hf: dict, format: str, eager_prompts: bool = True) -> dict[str, Worker]:
    """{FORMAT: eager, FORMAT.compiled: compiled} workers. Prompts, which most measurements leave
    out, take the longest to compile."""
    spec = {"hf": hf, "format": format, "eager_prompts": eager_prompts}
    return {
        f"{format}{'.compiled' * compile}": quickdraft(compile=compile, **spec)
        for compile in (False, True)
    }


def chosen(workers: dict[str, Worker], only: list[str] | None, format: str) -> dict[str, Worker]:
    """The workers that --only names, or all."""
    programs = {
        name: "eager" if name == format else name.removeprefix(f"{format}.") for name in workers
    }
    return {
        name: worker for name, worker in workers.items() if only is None or programs[name] in only
    }


def compare_decode(
    args,
    workers: dict[str, Worker],
    peer_workers: dict[str, Worker],
    format: str,
    shape: str = "1b",
) -> list[dict]:
    """Rates of quickdraft's workers and their shares of the read bandwidth; ratios of the fastest
    one to every peer."""
    request = {"method": "decode", "steps": args.steps, "filled": FILLED}
    both = workers | peer_workers
    answers, bandwidths = interleave(both, args.rounds, request, optional=peer_workers)
    close(both)
    seconds = {name: seconds_of(worker_answers) for name, worker_answers in answers.items()}
    note = f"read bandwidth {statistics.median(bandwidths) / 1e9:.1f} GB/s in the same run"
    rows = [
        row(
            f"{shape}.{format}.run.read_bandwidth_gb_s",
            [value / 1e9 for value in bandwidths],
            "GB/s",
            READ_NOTE,
        )
    ]
    for name, values in seconds.items():
        id = name if name in workers else f"{format}.{name}"
        rates = [1 / s for s in values]
        rows.append(row(f"{shape}.{id}.tok_s", rates, "tok/s", note, same_work=True))
    best_name = fastest({name: seconds[name] for name in workers})
    shares = {name: shares_of(answers[name], bandwidths) for name in workers}
    rows += [
        row(f"{shape}.{name}.of_read_bandwidth", values, "ratio", note)
        for name, values in shares.items()
    ]
    rows.append(
        row(
            f"{shape}.{format}.of_read_bandwidth",
            shares[best_name],
            "ratio",
            f"{best_name}; {note}",
        )
    )
    for peer, worker in peer_workers.items():
        id = f"{shape}.{format}.vs_{peer}"
        if worker.failure is not None:
            rows.append(failed_row(id, worker.failure))
            continue
        settings = answers[peer][0].get("settings", peer)
        ratio = ratios(seconds[peer], seconds[best_name])
        comparison = f"{best_name} against {settings}; {note}"
        rows.append(row(id, ratio, "ratio", comparison, same_work=True))
    return list({r["id"]: r for r in rows}.values())


def shares_of(answers: list[dict], bandwidths: list[float]) -> list[float]:
    """The share of each round's read bandwidth that a step reached."""
    return ratios([answer["bytes"] / answer["seconds"] for answer in answers], bandwidths)


def measure_verify(args) -> list[dict]:
    """Verifying 5 drafted tokens over a plain step, by format."""
    return [r for format in args.formats for r in compare_verify(args, TINYLLAMA, format, "1b")]


def compare_verify(args, hf: dict, format: str, shape: str) -> list[dict]:
    """Rows of the eager and the compiled worker, and the faster one's as
    SHAPE.FORMAT.verify6_over_1."""
    workers = chosen(both_modes(hf, format), args.only, format)
    answers, bandwidths = interleave(workers, args.rounds, {"method": "verify", "filled": FILLED})
    close(workers)
    note = (
        f"6 rows over 1, {FILLED} filled; read bandwidth"
        f" {statistics.median(bandwidths) / 1e9:.1f} GB/s"
    )
    ratio = {
        name: [a["seconds"] / a["plain"] for a in worker_answers]
        for name, worker_answers in answers.items()
    }
    rows = [
        row(f"{shape}.{name}.verify6_over_1", values, "ratio", note)
        for name, values in ratio.items()
    ]
    best_name = fastest(
        {name: seconds_of(worker_answers) for name, worker_answers in answers.items()}
    )
    mode = "eager" if best_name == format else "compiled"
    rows.append(
        row(f"{shape}.{format}.verify6_over_1", ratio[best_name], "ratio", f"{mode}: {note}")
    )
    return list({r["id"]: r for r in rows}.values())


def measure_moe(args) -> list[dict]:
    """A sparse shape: 0.92 billion weights, of which a token takes 0.18 (moe-1b.json)."""
    rows = []
    for format in ("bf16", "int8"):
        command = ("benchmarks.peers", "llamacpp", json.dumps(MOE), LLAMACPP_TYPES[format])
        peer_workers = {"llamacpp": Worker(*command)} if args.peers else {}
        rows += compare_decode(args, both_modes(MOE, format), peer_workers, format, "moe")
    for format in ("bf16", "int8"):
        rows += compare_verify(args, MOE, format, "moe")
    bf16_row = next(r for r in rows if r["id"] == "moe.bf16.verify6_over_1")
    return [*rows, {**bf16_row, "id": "moe.verify6_over_1"}]


def measure_8b(args) -> list[dict]:
    """The 8B shape, a format at a time: two models of 8 GB and the buffer of the read bandwidth
    fill 20 GB."""
    shape, rows = config_json("llama-3.1-8b"), []
    for format, kind in {"int8": "Q8_0", "int4-g32": "Q4_1"}.items():
        peer_workers = (
            {"llamacpp": Worker("benchmarks.peers", "llamacpp", json.dumps(shape), kind)}
            if args.peers
            else {}
        )
        workers = {f"{format}.compiled": quickdraft(hf=shape, format=format, compile=True)}
        rows += compare_decode(args, workers, peer_workers, format, "8b")
    return rows


def measure_prefill(args) -> list[dict]:
    """Prompts of three lengths in bf16, and of 512 tokens in the other formats, beside the peers;
    the last also in float32."""
    rows = []
    for format in args.formats:
        lengths = (32, 128, 512) if format == "bf16" else (512,)
        rows += compare_prefill(args, format, args.lengths or lengths)
    return rows


def compare_prefill(args, format: str, lengths: Sequence[int]) -> list[dict]:
    """Rates of prompts; the ratios of the longest one to every peer and to itself in float32."""
    modes = chosen(both_modes(TINYLLAMA, format, eager_prompts=False), args.only, format)
    peer_workers = chosen(peers(args, "prefill", format), args.only, format)
    prefix = "1b." if format == "bf16" else f"1b.{format}."
    float32 = {"float32": quickdraft(hf=TINYLLAMA, format=format, dtype="float32")}
    workers = modes | chosen(float32, args.only, format)
    rows = []
    for length in lengths:
        request = {"method": "prefill", "length": length}
        both = workers | peer_workers
        answers, _ = interleave(both, args.rounds, request, optional=peer_workers)
        seconds = {name: seconds_of(worker_answers) for name, worker_answers in answers.items()}
        for name, values in seconds.items():
            id = f"1b.{name}" if name in modes else f"{prefix}{name}"
            rates = [length / s for s in values]
            rows.append(row(f"{id}.prefill{length}.tok_s", rates, "tok/s"))
    close(workers | peer_workers)
    best = fastest({name: seconds[name] for name in modes})
    for peer, worker in peer_workers.items():
        infix = "" if peer == "transformers" else f".{format}"  # it has one format
        id = f"1b.prefill{length}{infix}.vs_{peer}"
        if worker.failure is not None:
            rows.append(failed_row(id, worker.failure))
            continue
        settings = answers[peer][0].get("settings", peer)
        ratio = ratios(seconds[peer], seconds[best])
        note = f"{length} tokens, {best} against {settings}"
        rows.append(row(id, ratio, "ratio", note))
    if {"float32", format} <= workers.keys():
        ratio = ratios(seconds["float32"], seconds[format])
        note = f"{length} tokens, eager, seconds in float32 over seconds in bfloat16"
        rows.append(row(f"{prefix}prefill{length}.float32_over_bf16", ratio, "ratio", note))
    return rows


def measure_cache(args) -> list[dict]:
    """Steps by positions filled and allocated, eager and compiled, with a window and without."""
    full_shape = {**TINYLLAMA, "max_position_embeddings": 40_000}
    window_shape = {**full_shape, "model_type": "mistral", "sliding_window": 1024}
    request, rows = {"method": "decode", "steps": args.steps}, []
    for infix, compile in (("", False), (".compiled", True)):
        workers = {
            size: quickdraft(hf=full_shape, cache=size, compile=compile) for size in (256, 32_768)
        }
        answers, _ = interleave(workers, args.rounds, request | {"filled": FILLED})
        ratio = ratios(seconds_of(answers[32_768]), seconds_of(answers[256]))
        rows.append(
            row(
                f"1b.bf16{infix}.cache32k_over_256",
                ratio,
                "ratio",
                f"one step, {FILLED} tokens filled",
            )
        )
        workers["window"] = quickdraft(hf=window_shape, cache=32_768, compile=compile)
        workers.pop(256).close()
        for filled in (100, 1000, 4000, 16_000):
            answers, bandwidths = interleave(workers, args.rounds, request | {"filled": filled})
            for worker, name in ((32_768, "full"), ("window", "window1024")):
                id, gb = f"1b.bf16{infix}.{name}.filled{filled}", answers[worker][0]["bytes"] / 1e9
                share = statistics.median(shares_of(answers[worker], bandwidths))
                note = f"{gb:.3f} GB read a step, {share:.2f} of read bandwidth"
                rows.append(
                    row(f"{id}.ms", [1e3 * s for s in seconds_of(answers[worker])], "ms", note)
                )
                rows.append(row(f"{id}.gb", [gb], "GB", "a step"))
        close(workers)
    return rows


def measure_compile(args) -> list[dict]:
    """Fresh processes: with an empty cache folder, then with the first one's results in it."""
    seconds = {"cold": [], "warm": []}
    for _ in range(2):
        with tempfile.TemporaryDirectory() as folder:
            for values in seconds.values():
                env = {"TORCHINDUCTOR_CACHE_DIR": folder}
                worker = quickdraft(hf=TINYLLAMA, compile=True, eager_prompts=True, env=env)
                values.append(worker.call(method="decode", steps=1, filled=10)["compile_s"])
                worker.close()
    note = "the greedy step of the 1.1B shape, batch 1, prepared as by generate.py, with warm-up"
    return [
        row(f"compile.22layers.{name}_s", values, "s", note) for name, values in seconds.items()
    ]


def measure_first_token(args) -> list[dict]:
    """Complete processes: interpreter, imports, load, prompt, first byte on stdout."""
    seconds = first_byte_s(
        [sys.executable, "generate.py", "--max_new_tokens", "1", "--device", "cpu"], args.rounds
    )
    return [
        row("demo.first_token_s", seconds, "s", "python generate.py to its first byte of text, CPU")
    ]


# --------------------------------------------------------------------------------------- drafting

OPENINGS = (
    "Once upon a time",
    "One day, a little girl named Lily",
    "Tom had a red ball",
    "The big dog was sad because",
    "There was a bird who",
    "Ben and Mia went to the park",
    "It was a cold day and",
    "Mom said",
)


def measure_speculation(args) -> list[dict]:
    """A memory-bound pair by acceptance, compiled, and by draft length."""
    prompts, rows = [[1000 * (n + 1)] for n in range(args.rounds)], []
    note = "1.1B and 0.1B random bf16 weights, K = 5, greedy, acceptance set by construction"
    for alpha, compile in ((0.5, False), (0.8, False), (0.95, False), (0.8, True)):
        id = f"spec.1b.alpha{round(100 * alpha)}{'.compiled' * compile}"
        rows += measure_pair(id, prompts, 64, note, pair="counting", alpha=alpha, compile=compile)
    values = [r["value"] for r in rows if r["id"].endswith("measured_over_predicted")]
    rows.append(
        row(
            "spec.measured_over_predicted",
            values,
            "ratio",
            "over the four medians of the 1.1B pair",
        )
    )
    note = "1.1B and 0.1B random bf16 weights, greedy, acceptance 0.8 by construction, eager"
    for k in (1, 2, 3, 5, 8):
        rows += measure_pair(
            f"spec.1b.alpha80.k{k}", prompts, 64, note, pair="counting", alpha=0.8, k=k
        )
    return rows


def measure_both(args) -> list[dict]:
    """Drafted and quantized, over plain decoding of the same shape in bf16: two pairs, asked in
    turn, all compiled."""
    formats = {"bf16": None, "int8": "int8"}
    workers = {
        name: quickdraft(pair="counting", compile=True, quantize=format)
        for name, format in formats.items()
    }
    requests = [
        {"method": "race", "prompt": [1000 * (n + 1)], "new": 64, "seed": n}
        for n in range(args.rounds)
    ]
    answers, _ = interleave(workers, args.rounds, *requests)
    close(workers)
    note = (
        "1.1B and 0.1B random int8 weights, K = 5, greedy, acceptance 0.8 by construction, compiled"
    )
    rows = race_rows("spec.1b_int8.alpha80", answers["int8"], note)
    for key, name in (("drafted", ""), ("plain", ".undrafted")):
        speedups = [a["plain"] / b[key] for a, b in zip(answers["bf16"], answers["int8"])]
        rows.append(row(f"spec.1b_int8.alpha80{name}.vs_bf16_plain", speedups, "ratio", note))
    return rows


def measure_drafts(args) -> list[dict]:
    """The demo pair, bound by launches and not by bytes, and prompt lookup."""
    rows = []
    for name, temperature in (("greedy", 0.0), ("t08", 0.8)):
        note = "demo pair, bf16, 200 tokens from each of eight openings"
        for k, compile in itertools.product((2, 5, "auto"), (False, True)):
            id = f"spec.demo.{name}.k{k}{'.compiled' * compile}"
            rows += measure_pair(
                id, OPENINGS, 200, note, pair="demo", temperature=temperature, k=k, compile=compile
            )
    note = "1.1B random bf16 weights that repeat a prompt of 100 tokens, ngram:3, K = 5"
    rows += measure_pair(
        "spec.ngram.copy", [list(range(100))] * args.rounds, 64, note, pair="cycle"
    )
    note = "1.1B random bf16 weights whose output never repeats, ngram:3: nothing matches"
    rows += measure_pair("spec.ngram.nothing", [[1000]] * args.rounds, 48, note, pair="count")
    auto = {"draft": "suffix", "k": "auto", "compile": True}
    note = "1.1B random bf16 weights that repeat a prompt of 100 tokens, suffix, K = auto, compiled"
    rows += measure_pair(
        "spec.suffix.copy", [list(range(100))] * args.rounds, 200, note, pair="cycle", **auto
    )
    note = (
        "1.1B random bf16 weights whose output never repeats, suffix, K = auto, compiled:"
        " nothing matches"
    )
    return rows + measure_pair(
        "spec.suffix.nothing", [[1000]] * args.rounds, 48, note, pair="count", **auto
    )


def measure_pair(id: str, prompts, new: int, note: str, **pair) -> list[dict]:
    """A race for every prompt, with the next seed each, on one engine."""
    worker = quickdraft(**pair)
    races = [
        worker.call(method="race", prompt=prompt, new=new, seed=n)
        for n, prompt in enumerate(prompts)
    ]
    worker.close()
    return race_rows(id, races, note)


# ---------------------------------------------------------------------------------------- quality


def measure_quality(args) -> list[dict]:
    """The demo model in every scheme, int4-g128 by every method (GPTQ reads --calibration), and
    with an int8 head."""
    if args.text is None or args.calibration is None:
        raise UserError("quality needs --text FILE and --calibration FILE")
    demo, rows = str(ROOT / "checkpoints" / "demo"), []
    flags = {"bf16": ["--checkpoint", demo]}
    flags |= {
        name: ["--checkpoint", demo, "--quantize", name, "--quantize_head", "none"]
        for name in SCHEMES
    }
    for scheme in ("int8", "int4-g128"):
        flags[f"{scheme}.head-int8"] = [*flags[scheme][:-1], "int8"]
    with tempfile.TemporaryDirectory() as folder:
        for method in ("search", "gptq"):
            output = f"{folder}/{method}"
            calibration = (
                ["--calibration", str(args.calibration.resolve())] if method == "gptq" else []
            )
            command = [
                "quantize.py",
                "--checkpoint",
                demo,
                "--scheme",
                "int4-g128",
                "--method",
                method,
                *calibration,
            ]
            run_python(*command, "--output", output)
            flags[f"int4-g128.{method}"] = ["--checkpoint", output]
        for name, options in flags.items():
            common = ["--text", str(args.text.resolve()), "--reference", demo, "--json"]
            result = json.loads(run_python("-m", "scripts.perplexity", *common, *options))
            note = f"{result['tokens']} tokens, windows of {result['context']}"
            ppl, ppl_error = (
                result["perplexity"],
                result["nll_standard_error"] * result["perplexity"],
            )
            for key, unit, value, error in (
                ("ppl", "ppl", ppl, ppl_error),
                ("kl", "nats", result["kl"], result["kl_standard_error"]),
            ):
                values = [value - error, value, value + error]
                rows.append(row(f"demo.{name}.{key}", values, unit, f"± standard error; {note}"))
            rows.append(row(f"demo.{name}.top1", [result["top1"]], "ratio", note))
    return rows


def run_python(*arguments: str) -> bytes:
    """A program's stdout."""
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, check=True, capture_output=True
    ).stdout


# ----------------------------------------------------------------------------------- command line

MEASUREMENTS: dict[str, Callable[[argparse.Namespace], list[dict]]] = {
    "decode": measure_decode,
    "verify": measure_verify,
    "prefill": measure_prefill,
    "cache": measure_cache,
    "compile": measure_compile,
    "speculation": measure_speculation,
    "both": measure_both,
    "drafts": measure_drafts,
    "quality": measure_quality,
    "load": measure_load,
    "tp": measure_tp,
    "moe": measure_moe,
    "8b": measure_8b,
    "load8b": measure_8b_load,
    "context": measure_context,
    "prefill8k": measure_prefill8k,
    "identical": measure_identical,
    "first_token": measure_first_token,
}


def write_pages(root: Path) -> None:
    """Draw a picture beside every benchmarks/*.json with rows, and fill the tables of the pages."""
    rows = []
    for file in sorted((root / "benchmarks").glob("*.json")):
        results = json.loads(file.read_text())
        if "rows" not in results:  # written by record()
            continue
        draw(
            results["rows"],
            file.with_suffix(".png"),
            f"{results['hardware']}, torch {results['torch']}",
        )
        rows += results["rows"]
    for file in (root / page for page in PAGES):
        file.write_text(fill(file.read_text(), rows))


def main() -> None:
    parser, names = Parser(description="Measure quickdraft."), ", ".join(MEASUREMENTS)
    add, measurement = parser.add_argument, one_of("measurement", MEASUREMENTS)
    default = "default: all but quality, 8b and load8b, or none with --plot"
    add(
        "measurements",
        nargs="*",
        type=measurement,
        metavar="MEASUREMENT",
        help=f"any of {names}; {default}",
    )
    add(
        "--rounds",
        type=positive,
        default=5,
        help="measurements of every program; default: %(default)s",
    )
    add("--steps", type=positive, default=16, help="decode steps a round; default: %(default)s")
    add("--peers", action="store_true", help="also run the other programs that are installed")
    add(
        "--formats",
        type=list_of("format", LLAMACPP_TYPES),
        default=list(LLAMACPP_TYPES),
        metavar="FORMAT,…",
        help="of decode, verify and prefill; default: all",
    )
    add(
        "--only",
        type=list_of("program", PROGRAMS),
        metavar="PROGRAM,…",
        help=f"of decode, verify and prefill, some of {', '.join(PROGRAMS)}; default: all",
    )
    add(
        "--lengths",
        type=positive,
        nargs="+",
        metavar="N",
        help="tokens of prefill's prompts; default: 32, 128 and 512 in bf16, else 512",
    )
    add("--gptfast", type=Path, metavar="DIR", help="a gpt-fast checkout, for --peers")
    add("--text", type=Path, metavar="FILE", help="held-out text, for quality")
    add("--calibration", type=Path, metavar="FILE", help="other text, for quality")
    add("--write", type=Path, metavar="FILE", help="merge the rows into this results file")
    add(
        "--plot",
        action="store_true",
        help="draw the pictures and fill the tables of all results files",
    )
    levels.add_flags(parser)
    args = parser.parse_args()
    with exit_on_error():
        levels.hold(args)
        run(args)


def run(args: argparse.Namespace) -> None:
    """Measure, print, write. Each measurement is written when it ends: an interrupted run keeps its
    rows."""
    default = (
        []
        if args.plot
        else [name for name in MEASUREMENTS if name not in ("quality", "8b", "load8b")]
    )
    rows = [
        r
        for name in args.measurements or default
        for r in publish(levels.labelled(MEASUREMENTS[name](args), args.level), args.write)
    ]
    if args.plot:
        write_pages(ROOT)
    if rows:
        print(json.dumps(rows), flush=True)


if __name__ == "__main__":
    main()
