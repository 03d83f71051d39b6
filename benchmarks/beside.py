"""Two checkouts of this project side by side, in one run: `python -m benchmarks.beside ../before --rounds 7`.

Each case starts one process a checkout, which loads, compiles if asked to, and then waits; they decode in turn,
A B B A, and ratios are taken within a round. Compiling starts with empty caches. A line of JSON a case: tokens a
second, the prompt's seconds, seconds to compile, peak of resident memory, as median (min–max). The other checkout may
be older than weights/, whose place packed.py had.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from loading.config import config_from_hf

HERE = Path(__file__).resolve().parent.parent
CASES = [
    *({"quantize": scheme, "compile": compile} for compile in (False, True) for scheme in (None, "int8", "int4-g32")),
    *({"demo": True, "draft": draft, "compile": compile} for compile in (False, True) for draft in (False, True)),
]
SHAPE = {  # TinyLlama, 1.1B
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
    "num_attention_heads": 32, "num_key_value_heads": 4, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "torch_dtype": "bfloat16",
}  # fmt: skip


def work(root: str, case: dict) -> None:
    """The process of one checkout: a line of JSON when it is ready, and one for each line that it reads."""
    sys.path.insert(0, root)
    from decoding.sampling import Sampling
    from generate import Engine, Timing, generate
    from loading.checkpoint import load_model, random_model
    from speculative import ModelDraft

    out, drafter = os.fdopen(os.dup(1), "w"), None
    os.dup2(2, 1)
    if case.get("demo"):
        model = load_model(f"{root}/checkpoints/demo")
        drafter = ModelDraft(load_model(f"{root}/checkpoints/demo-draft")) if case["draft"] else None
    else:
        model = random_model(config_from_hf(SHAPE), quantize=case["quantize"])
    pack = __import__("weights.linears").linears.pack_model if Path(root, "weights").exists() else None
    for each in (model, *([drafter.model] if drafter else [])):
        (pack or __import__("packed").pack_linears)(each)
    new, filled = (120, 20) if case.get("demo") else (24, 100)
    engine = Engine(model, 1, filled + new + 8, compile=bool(case["compile"]), drafter=drafter, speculate_k=3)
    compile_s = engine.warm_up("greedy") if case["compile"] else 0.0
    print(json.dumps(compile_s), file=out, flush=True)
    for number, _ in enumerate(sys.stdin):
        # Another prompt each time: an engine keeps what it has computed of the last one.
        timing, prompt = Timing(), [(i * 7 + number) % 1000 + 3 for i in range(filled)]
        for _ in generate(model, [prompt], sampling=Sampling(0), max_new_tokens=new, engine=engine, timing=timing):
            pass
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        print(json.dumps([(timing.decoded[0] - 1) / timing.decode_s, timing.prefill_s, peak]), file=out, flush=True)


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3g} ({min(values):.3g}–{max(values):.3g})"


def measure(case: dict, roots: dict[str, Path], rounds: int) -> dict:
    workers, found = {}, {"case": case}
    for name, root in roots.items():
        command = [sys.executable, __file__, "--work", str(root), json.dumps(case)]
        env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": tempfile.mkdtemp()}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        workers[name] = subprocess.Popen(command, cwd=root, env=env, **pipes)
        found[f"{name}.compile_s"] = json.loads(workers[name].stdout.readline())
    answers = {name: [] for name in workers}
    for number in range(rounds + 1):  # the first round does not count
        for name, worker in sorted(workers.items(), reverse=number % 2 == 1):
            worker.stdin.write("\n")
            worker.stdin.flush()
            answers[name] += [json.loads(worker.stdout.readline())][: number > 0]
    for name, worker in workers.items():
        worker.communicate()
        for part, what in enumerate(("tok_s", "prefill_s", "peak_gb")):
            found[f"{name}.{what}"] = spread([answer[part] for answer in answers[name]])
    found["after_over_before"] = spread([a[0] / b[0] for a, b in zip(answers["after"], answers["before"])])
    return found


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        return work(sys.argv[2], json.loads(sys.argv[3]))
    parser = argparse.ArgumentParser(description="Two checkouts side by side.")
    parser.add_argument("before", type=Path, metavar="CHECKOUT")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    for case in CASES:
        print(json.dumps(measure(case, {"before": args.before, "after": HERE}, args.rounds)), flush=True)


if __name__ == "__main__":
    main()
