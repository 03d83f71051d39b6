"""Levels of instructions that a processor can be held to by a process's environment.

    LEVELS       name -> its environment, and what a processor needs for it; oldest first
    cpu_flags    what this processor has
    add_flags    --level and --llamacpp of a program that measures
    hold         restart such a program at its level
    labelled     its rows, with the level in ids and notes

What honours which variable: README.md beside this file, "Levels". What no variable changes is
/proc/cpuinfo and cpuid: code that asks them is told of the whole processor.
"""

import argparse
import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

from decoding.errors import UserError


class Level(NamedTuple):
    environment: dict[str, str]
    flags: frozenset[str]  # of /proc/cpuinfo


# everything but oneDNN
AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "FBGEMM_ENABLE_INSTRUCTIONS": "AVX2",
    "TORCHINDUCTOR_CPP_MARCH": "x86-64-v3",
}
AVX512 = {"FBGEMM_ENABLE_INSTRUCTIONS": "AVX512"}  # without VNNI
AVX512_FLAGS = frozenset({"avx512bw", "avx512vl", "avx512dq"})
# named by oneDNN's and aten's words
LEVELS = {
    "AVX2/avx2": Level({"ONEDNN_MAX_CPU_ISA": "AVX2", **AVX2}, frozenset({"avx2"})),
    "AVX512_CORE/avx2": Level({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", **AVX2}, AVX512_FLAGS),
    "AVX512_CORE/default": Level({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", **AVX512}, AVX512_FLAGS),
    "AVX512_CORE_VNNI/default": Level(
        {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"}, frozenset({"avx512_vnni"})
    ),
    "AVX512_CORE_BF16/default": Level(
        {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, frozenset({"avx512_bf16"})
    ),
    "AVX512_CORE_AMX/default": Level(
        {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"}, frozenset({"amx_bf16", "amx_int8"})
    ),
    "DEFAULT/default": Level({}, frozenset()),
}
VARIABLES = frozenset().union(*(level.environment for level in LEVELS.values()))
MEASURED = {"avx2": "AVX2/avx2"}  # level of a measurement, as in ids -> its name above
# beginnings of llama.cpp's names for instructions that a build of this level must not have
NEWER = {"avx2": ("AVX512", "AVX_VNNI", "AMX")}


def cpu_flags() -> set[str]:
    """Of this machine's first processor; none where the system does not say."""
    path = Path("/proc/cpuinfo")
    match = re.search(r"^flags\s*:(.*)$", path.read_text(), re.MULTILINE) if path.exists() else None
    return set(match[1].split()) if match else set()


def environment_of(name: str) -> dict[str, str]:
    """This process's environment, held to the level and to no other."""
    inherited = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    return inherited | LEVELS[name].environment


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--level",
        choices=MEASURED,
        help="hold both programs to these instructions; default: the machine's own",
    )
    parser.add_argument(
        "--llamacpp",
        type=Path,
        metavar="DIR",
        help="the folder of llama.cpp's libraries, as built for --level; default: the installed"
        " binding's",
    )


def hold(args: argparse.Namespace) -> None:
    """Restart this program with the environment of --level and --llamacpp, unless it has that:
    libraries read it once, some when they are loaded. UserError if the processor lacks the
    level."""
    environment = dict(os.environ)
    if args.level is not None:
        name = MEASURED[args.level]
        if missing := LEVELS[name].flags - cpu_flags():
            raise UserError(f"--level {args.level}: this processor lacks {', '.join(missing)}")
        environment = environment_of(name)
    if args.llamacpp is not None:
        environment["LLAMA_CPP_LIB_PATH"] = str(args.llamacpp.resolve())
    if environment != dict(os.environ):
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def labelled(rows: list[dict], level: str | None) -> list[dict]:
    """The rows with the level before their ids, and in their notes which program was held to it and
    how. UserError if llama.cpp's own words, which such a row's note quotes, name newer
    instructions."""
    if level is None:
        return rows
    settings = LEVELS[MEASURED[level]].environment
    variables = " ".join(f"{name}={value}" for name, value in settings.items())
    conditions = f"quickdraft held by {variables}"
    labelled_rows = []
    for row in rows:
        note = f"{row['note']}; {conditions}".removeprefix("; ")
        if "llama.cpp" in row["note"]:
            words = row["note"].split()
            if newer := [word for word in words if word.startswith(NEWER[level])]:
                raise UserError(
                    f"--level {level}: this llama.cpp uses {', '.join(newer)}; give --llamacpp DIR"
                    " with a build for the level"
                )
            note += ", llama.cpp by its build"
        labelled_rows.append(row | {"id": f"{level}.{row['id']}", "note": note})
    return labelled_rows
