"""The same proof on every processor: tests under each level of instructions that this machine can
be held to.

    python -m tests.attacks.processors [--levels AVX2/avx2 DEFAULT/default] [--all] [--write FILE]

    LEVELS      pairs of ONEDNN_MAX_CPU_ISA and ATEN_CPU_CAPABILITY, oldest first
    cpu_flags   what this processor has
    run_level   pytest in a process of its own under one level
    main        a table, or JSON; the status is 1 if a test failed

Without --all it runs the tests of texts and bits. A level that the processor lacks is reported as
such and not as passed: oneDNN and aten would silently use less. What it cannot show: the timing and
the memory order of real machines.
"""

import os
import re
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

from benchmarks.record import hardware, record
from cli.flags import Parser

ROOT = Path(__file__).parents[2]
# oneDNN's name, aten's name, and the flags of /proc/cpuinfo that a processor needs for both
LEVELS = (
    ("AVX2", "avx2", {"avx2"}),
    ("AVX512_CORE", "avx2", {"avx512bw", "avx512vl", "avx512dq"}),
    ("AVX512_CORE", "default", {"avx512bw", "avx512vl", "avx512dq"}),
    ("AVX512_CORE_VNNI", "default", {"avx512_vnni"}),
    ("AVX512_CORE_BF16", "default", {"avx512_bf16"}),
    ("AVX512_CORE_AMX", "default", {"amx_bf16", "amx_int8"}),
    ("DEFAULT", "default", set()),
)
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
    "not (compiled or ranks or readme or attack or browser or long or real or generated)"
)


def cpu_flags() -> set[str]:
    """Of this machine's first processor; none where the system does not say."""
    path = Path("/proc/cpuinfo")
    match = re.search(r"^flags\s*:(.*)$", path.read_text(), re.MULTILINE) if path.exists() else None
    return set(match[1].split()) if match else set()


def run_level(isa: str, capability: str, args: list[str]) -> dict:
    """pytest under one level: its status, the number of tests that passed, the names of those that
    failed."""
    settings = {"ONEDNN_MAX_CPU_ISA": isa, "ATEN_CPU_CAPABILITY": capability}
    env = {name: value for name, value in os.environ.items() if name not in settings}
    env |= {name: value for name, value in settings.items() if value.lower() != "default"}
    start = time.perf_counter()
    options = ["-rf", "-o", "console_output_style=classic", "-m", NOTHING_COMPILED]
    command = [sys.executable, "-m", "pytest", *options, *args]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
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
    names = [f"{isa}/{capability}" for isa, capability, _ in LEVELS]
    parser.add_argument(
        "--levels", nargs="+", choices=names, default=names, metavar="ISA/CAPABILITY"
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
    for isa, capability, required in LEVELS:
        row = {"level": f"{isa}/{capability}"}
        if row["level"] not in args.levels:
            continue
        missing = sorted(required - flags)
        row |= {"status": "not this processor", "missing": missing} if missing else {}
        row |= {} if missing else run_level(isa, capability, [*tests, *args.pytest_args])
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
