"""Memory and bytes of loading, in one process and over two ranks, for `python -m benchmarks.bench
load tp`.

    measure_load    peak of anonymous memory over the weights, and seconds
    measure_8b_load the same for 16 GB of weights, quantized while they load
    measure_tp      bytes and memory of each of two gloo ranks, time per step
    tp_rank         one rank of a launch

Every run is a fresh process, so none inherits another's heap. Files lie in the page cache. Linux
only.
"""

import json
import math
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

import cli.quantize as quantize_command
import tp
from benchmarks.pipes import ROOT
from benchmarks.record import ratios, row, write_json
from benchmarks.shapes import TINYLLAMA, config_json
from benchmarks.workers import read_bandwidth
from cli.errors import silent
from cli.report import stored_bytes
from decoding.engine import Engine
from decoding.errors import UserError
from decoding.sampling import Sampling
from loading.checkpoint import load_model
from loading.config import config_from_hf
from loading.models import empty_model, expected_tensors, random_model
from loading.saving import save_model


class PeakMemory:
    """Samples anonymous memory every millisecond while a block runs; `bytes` is the peak minus the
    start. Mapped pages of files do not count."""

    def __enter__(self):
        self.start = self.peak = anonymous_bytes()
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.sample)
        self.thread.start()
        return self

    def sample(self) -> None:
        while not self.stopped.wait(0.001):
            self.peak = max(self.peak, anonymous_bytes())

    def __exit__(self, *_) -> None:
        self.stopped.set()
        self.thread.join()
        self.bytes = max(self.peak, anonymous_bytes()) - self.start


def anonymous_bytes() -> int:
    """Resident memory of this process without pages of files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise UserError("/proc/self/status has no RssAnon: this measurement needs Linux")


def run_here(call: str, num_ranks: int = 1) -> list:
    """The JSON lines that fresh processes print when they evaluate `call` of this module."""
    ranks = [
        "-m",
        "torch.distributed.run",
        f"--nproc_per_node={num_ranks}",
        "--no-python",
        sys.executable,
    ]
    command = [
        sys.executable,
        *(ranks if num_ranks > 1 else []),
        "-c",
        f"from benchmarks.memory import *; {call}",
    ]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


# ------------------------------------------------------------------------------------------- load


def load_once(folder: str, **options) -> None:
    """Print (peak over the loaded weights, seconds) of one load."""
    start = time.perf_counter()
    with PeakMemory() as peak:
        model = load_model(folder, **options)
    print(json.dumps([peak.bytes / stored_bytes(model), time.perf_counter() - start]))


def measure_load(args) -> list[dict]:
    """A folder of the 1.1B shape in bfloat16: as it is, quantized while loading, and stored
    quantized."""
    note, rows = "1.1B shape, files in the page cache", []
    with tempfile.TemporaryDirectory() as folder:
        original, quantized = f"{folder}/original", f"{folder}/quantized"
        save_model(random_model(config_from_hf(TINYLLAMA)), original, TINYLLAMA)
        with silent(True):
            quantize_command.main(
                ["--checkpoint", original, "--scheme", "int4-g32", "--output", quantized]
            )
        for name, call in (
            ("load", f"load_once({original!r})"),
            ("load.int8", f"load_once({original!r}, quantize='int8')"),
            ("load.int4-g32", f"load_once({original!r}, quantize='int4-g32')"),
            ("load.stored-int4-g32", f"load_once({quantized!r})"),
        ):
            peaks, seconds = zip(*(run_here(call)[-1] for _ in range(args.rounds)))
            rows.append(row(f"{name}.peak_over_weights", peaks, "ratio", note))
            rows.append(row(f"{name}.1b_s", seconds, "s", note))
    return rows


def write_random_folder(hf: dict, folder: Path) -> None:
    """config.json and bfloat16 weights, a file for each layer: writing takes the memory of one. One
    block of random numbers is repeated in all matrices."""
    config = config_from_hf(hf)
    shapes = expected_tensors(config, empty_model(config, torch.bfloat16))
    numbers = torch.randn(2**22, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    names_by_file: dict[str, list[str]] = {}
    for name in shapes:
        layer = re.search(r"layers\.(\d+)\.", name)
        names_by_file.setdefault(f"model-{layer[1] if layer else 'rest'}.safetensors", []).append(
            name
        )
    folder.mkdir()
    for file, names in names_by_file.items():
        tensors = {}
        for name in names:
            shape, _ = shapes[name]
            num_repeats = -(-math.prod(shape) // len(numbers))
            tensors[name] = numbers.repeat(num_repeats)[: math.prod(shape)].view(shape).clone()
        save_file(tensors, folder / file)
    file_by_name = {name: file for file, names in names_by_file.items() for name in names}
    write_json(folder / "model.safetensors.index.json", {"weight_map": file_by_name})
    write_json(folder / "config.json", hf)


def measure_8b_load(args) -> list[dict]:
    """A bfloat16 folder of the 8B shape, which is larger than the memory left beside it, in int8
    and in int4-g32."""
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        write_random_folder(config_json("llama-3.1-8b"), folder)
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        note = f"a bf16 folder of {size / 1e9:.1f} GB, quantized while it loads"
        for format in ("int8", "int4-g32"):
            calls = [f"load_once({str(folder)!r}, quantize={format!r})"] * args.rounds
            peaks, seconds = zip(*(run_here(call)[-1] for call in calls))
            rows.append(row(f"8b.load.{format}.peak_over_weights", peaks, "ratio", note))
            rows.append(row(f"8b.load.{format}.s", seconds, "s", note))
    largest = max((r for r in rows if r["unit"] == "ratio"), key=lambda r: r["value"])
    return [
        *rows,
        largest
        | {"id": "8b.load.peak_over_weights", "note": f"{largest['id'].split('.')[2]}: {note}"},
    ]


# ----------------------------------------------------------------------------- tensor parallelism


def tp_rank(folder: str, steps: int, threads: int = 1) -> None:
    """One rank of a launch, or the only process: load its part, and run steps with 100 tokens
    filled. Rank 0 prints a line of JSON for every rank, because lines of two processes could
    mix."""
    ranks, shards, shard = tp.join(torch.device("cpu"), 300), [], tp.shard
    torch.set_num_threads(threads)

    def recording_shard(*args, **kwargs) -> torch.Tensor:
        shards.append(shard(*args, **kwargs))
        return shards[-1]

    tp.shard = recording_shard
    with PeakMemory() as peak:
        model = load_model(folder, tp=ranks)
    facts = {"rank": ranks.rank, "peak": peak.bytes}
    facts["copied"] = sum(part.nbytes for part in shards)
    shards.clear()
    engine = Engine(model, 1, min(256, model.config.max_seq_length))
    engine.calibrate(Sampling(0), 100, rounds=2)
    facts["step_s"] = engine.calibrate(Sampling(0), 100, rounds=steps).decode_s
    all_facts = [facts | {"weights": stored_bytes(model)}] * ranks.world
    if ranks.world > 1:
        torch.distributed.all_gather_object(all_facts, all_facts[0])
    for rank_facts in all_facts if ranks.rank == 0 else ():
        print(json.dumps(rank_facts), flush=True)
    tp.leave()


def measure_tp(args) -> list[dict]:
    """1.1B in bfloat16 over 1 and 2 gloo ranks, eager. Two cores share one memory bus: two ranks
    have no more bandwidth than one process with two threads, so one thread alone is measured
    too."""
    buffer, bandwidths, note = torch.ones(2**28), [], "1.1B shape in bf16, gloo, eager"
    # name -> (ranks, threads of each)
    launches = {"1thread": (1, 1), "1rank": (1, 2), "2ranks": (2, 1)}
    results: dict[str, list[list[dict]]] = {name: [] for name in launches}  # by round, by rank
    with tempfile.TemporaryDirectory() as folder:
        save_model(random_model(config_from_hf(TINYLLAMA)), folder, TINYLLAMA)
        for _ in range(args.rounds):
            bandwidths.append(read_bandwidth(buffer) / 1e9)
            for name, (num_ranks, threads) in launches.items():
                results[name].append(
                    run_here(f"tp_rank({folder!r}, {args.steps}, {threads})", num_ranks)
                )
    rows = [
        row(
            "tp.1b.read_bandwidth",
            bandwidths,
            "GB/s",
            "plain read, two threads, in the same rounds",
        )
    ]
    num_bytes = results["1rank"][0][0]["weights"]
    meanings = {
        "peak": "peak of anonymous memory while loading",
        "copied": "bytes taken from the files",
    }
    step_s = {
        name: [ranks[0]["step_s"] for ranks in launch_results]
        for name, launch_results in results.items()
    }
    for name, (n, _) in launches.items():
        rows.append(row(f"tp.1b.step_ms.{name}", [1e3 * s for s in step_s[name]], "ms", note))
        for key, meaning in meanings.items():
            shares = [rank[key] / (num_bytes / n) for ranks in results[name] for rank in ranks]
            rows.append(
                row(
                    f"tp.1b.{key}_over_share.{name}",
                    shares,
                    "ratio",
                    f"{meaning}, over weights / {n}; {note}",
                )
            )
    note = "time per step: one process with two threads, over two ranks with one each"
    return [
        *rows,
        row("tp.1b.2ranks_over_1", ratios(step_s["1rank"], step_s["2ranks"]), "ratio", note),
    ]
