"""Two checkouts of this project in turn: `python -m benchmarks.beside ../before [--only CASE …]`.

Each measurement is a process of its own, `generate.py --json` with the same flags in either
checkout, so that any commit which has these flags can be measured. A process decodes greedily from
several prompts, of which the first does not count. The checkouts run A B B A in every round, and
ratios are taken within a round. A case is a line of JSON: rates as median (min–max).

    CASES       name -> flags, and whether the rate of steps or that of prompts is measured
    measure     the rate of one process
    compare     the line of one case
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from benchmarks.pipes import ROOT
from benchmarks.real import packaged
from cli.flags import Parser, positive

TINYLLAMA = ("--random_weights", "benchmarks/shapes/tinyllama-1.1b.json")
DEMO_DRAFT = ("--draft_checkpoint", "checkpoints/demo-draft")
PROMPT_LENGTH = 512  # of cases that measure prompts


class Case(NamedTuple):
    flags: tuple[str, ...] = ()
    num_tokens: int = 60  # decoded from each prompt
    measures_prompts: bool = False


CASES = {
    "demo": Case(num_tokens=200),
    "demo.draft": Case((*DEMO_DRAFT, "--speculate_k", "3"), 200),
    "demo.draft.auto": Case((*DEMO_DRAFT, "--speculate_k", "auto"), 200),
    "demo.suffix.auto": Case(("--draft", "suffix", "--speculate_k", "auto"), 200),
    "smollm2": Case(("--checkpoint", "SMOLLM2")),
    "smollm2.suffix.auto": Case(
        ("--checkpoint", "SMOLLM2", "--draft", "suffix", "--speculate_k", "auto")
    ),
    "smollm2.prompt": Case(("--checkpoint", "SMOLLM2"), 2, True),
    "1b": Case(TINYLLAMA, 24),
    "1b.int8": Case((*TINYLLAMA, "--quantize", "int8"), 24),
    "1b.int4-g32": Case((*TINYLLAMA, "--quantize", "int4-g32"), 24),
    "1b.suffix.auto": Case((*TINYLLAMA, "--draft", "suffix", "--speculate_k", "auto"), 24),
    "1b.prompt": Case(TINYLLAMA, 2, True),
    "1b.int8.prompt": Case((*TINYLLAMA, "--quantize", "int8"), 2, True),
    "1b.int4-g32.prompt": Case((*TINYLLAMA, "--quantize", "int4-g32"), 2, True),
}


def prompts_of(case: Case, number: int) -> list[str]:
    """Of one process: `number` prompts, which begin differently, so that none reuses another's
    positions. A model with random weights is given token ids."""
    length = PROMPT_LENGTH if case.measures_prompts else 40
    if TINYLLAMA[0] in case.flags:
        ids = [[(7 * i + 31 * n) % 1000 + 3 for i in range(length)] for n in range(number)]
        return [" ".join(map(str, row)) for row in ids]
    stories = (ROOT / "checkpoints" / "stories.txt").read_text().split()
    starts = range(0, length * number, length)
    return [" ".join(stories[start : start + length * 3 // 4]) for start in starts]


def measure(checkout: Path, case: Case, prompts: list[str], compile: bool, caches: Path) -> float:
    """The median rate of a process over its prompts but the first."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(prompts) + "\n")
        file.flush()
        flags = [str(packaged()) if flag == "SMOLLM2" else flag for flag in case.flags]
        command = [
            *(sys.executable, "generate.py", "--json", "--temperature", "0", "--ignore_eos"),
            *("--batch_size", "1", "--max_new_tokens", str(case.num_tokens)),
            *("--prompt_file", file.name, "--compile" if compile else "--no-compile", *flags),
        ]
        env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(caches / checkout.name)}
        done = subprocess.run(
            command, cwd=checkout, env=env, text=True, capture_output=True, check=True
        )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    key = "prefill_tok_s" if case.measures_prompts else "decode_tok_s"
    return statistics.median(answer[key] for answer in answers[1:])


def compare(name: str, before: Path, rounds: int, num_prompts: int, compile: bool) -> dict:
    """Both checkouts' rates and the ratios of `rounds` rounds. Compiled code is cached before."""
    case = CASES[name]
    prompts = prompts_of(case, num_prompts)
    rates = {"before": [], "after": []}
    folders = {"before": before, "after": ROOT}
    ratios = []
    with tempfile.TemporaryDirectory() as caches:
        if compile:
            for folder in folders.values():
                measure(folder, case, prompts, compile, Path(caches))
        for _ in range(rounds):
            pair = {"before": 0.0, "after": 0.0}
            for side in ("before", "after", "after", "before"):
                value = measure(folders[side], case, prompts, compile, Path(caches))
                rates[side].append(value)
                pair[side] += value
            ratios.append(pair["after"] / pair["before"])
    texts = {side: spread(values) for side, values in rates.items()}
    return {"case": name, "compiled": compile, **texts, "after_over_before": spread(ratios)}


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3g} ({min(values):.3g}–{max(values):.3g})"


def main() -> None:
    parser = Parser(description="Two checkouts of this project in turn.")
    add = parser.add_argument
    add("before", type=Path, metavar="CHECKOUT")
    add("--only", nargs="+", choices=CASES, default=[*CASES], metavar="CASE", help="default: all")
    add("--rounds", type=positive, default=3)
    add("--prompts", type=positive, default=4, help="of a process; the first does not count")
    add("--compile", action=argparse.BooleanOptionalAction, default=False)
    args = parser.parse_args()
    for name in args.only:
        result = compare(name, args.before.resolve(), args.rounds, args.prompts, args.compile)
        print(json.dumps(result, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main()
