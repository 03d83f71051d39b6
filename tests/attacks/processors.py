"""The same proof on every processor: tests under each level of instructions that this machine can
be held to.

    python -m tests.attacks.processors [--levels AVX2/avx2 DEFAULT/default] [--all] [--write FILE]

    run_level   pytest in a process of its own under one level of benchmarks/levels.py
    main        a table, or JSON; the status is 1 if a test failed

Without --all it runs the tests of texts and bits. A level that the processor lacks is reported as
such and not as passed: oneDNN and aten would silently use less. What it cannot show: the timing and
the memory order of real machines.
"""

import re
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

from benchmarks.levels import LEVELS, cpu_flags, environment_of
from benchmarks.record import hardware, record
from cli.flags import Parser

ROOT = Path(__file__).parents[2]
TESTS = (
    "test_rows_alone.py",
    "test_slots.py",
    "test_rounding.py",
    "test_caches.py",
    "test_quantize.py",
    "test_cpu_products.py",
)

# all fast and slow tests
NOTHING_COMPILED = (
    "not (compiled or ranks or readme or attack or browser or house or long or real or generated)"
)


def run_level(name: str, args: list[str]) -> dict:
    """pytest under one level: its status, the number of tests that passed, the names of those that
    failed."""
    start = time.perf_counter()
    options = ["-rf", "-o", "console_output_style=classic", "-m", NOTHING_COMPILED]
    command = [sys.executable, "-m", "pytest", *options, *args]
    done = subprocess.run(
        command, cwd=ROOT, env=environment_of(name), capture_output=True, text=True
    )
    failed = re.findall(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
    crashed = done.returncode not in (0, 1) or (done.returncode == 1 and not failed)
    passed = re.search(r"(\d+) passed", done.stdout)
    return {
        "status": "crashed" if crashed else "failed" if failed else "passed",
        "passed": int(passed[1]) if passed else 0,
        "failed": failed,
        "output": done.stdout[-2000:] if crashed else "",
        "seconds": round(time.perf_counter() - start),
    }


def parse_args(argv: list[str] | None = None) -> Namespace:
    parser = Parser(
        description="Tests under each level of instructions that this machine can be held to."
    )
    parser.add_argument(
        "--levels", nargs="+", choices=LEVELS, default=list(LEVELS), metavar="ISA/CAPABILITY"
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="all fast and slow tests, not those of texts and bits alone",
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="results as JSON")
    parser.add_argument(
        "pytest_args", nargs="*", help="behind --: for pytest, such as -k EXPRESSION"
    )
    return parser.parse_args(argv)


def main() -> None:
    args, flags, rows = parse_args(), cpu_flags(), []
    tests = [] if args.all else [f"tests/{name}" for name in TESTS]
    for name in args.levels:
        row = {"level": name}
        missing = sorted(LEVELS[name].flags - flags)
        row |= {"status": "not this processor", "missing": missing} if missing else {}
        row |= {} if missing else run_level(name, [*tests, *args.pytest_args])
        rows.append(row)
        print(f"{row['level']:26} {row['status']:20} {row.get('seconds', 0):5} s", file=sys.stderr)
    print(f"{'ONEDNN_MAX_CPU_ISA/ATEN':26} status")
    for row in rows:
        print(f"{row['level']:26} {row['status']} {' '.join(row.get('missing', []))}".rstrip())
        print(
            "".join(f"    {name}\n" for name in row.get("failed", [])),
            row.get("output", ""),
            end="",
            sep="",
        )
    if args.write:
        record(
            args.write,
            {"hardware": hardware(), "tests": "all" if args.all else list(TESTS), "levels": rows},
        )
    sys.exit(any(row["status"] in ("failed", "crashed") for row in rows))


if __name__ == "__main__":
    main()
