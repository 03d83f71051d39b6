"""--version: one line that a bug report needs. This file knows no flag and no model."""

import argparse
import platform
import sys
from pathlib import Path

VERSION = "0.3.0.dev0"


def processor() -> str:
    """The processor's name where the system tells (Linux), and the instruction set that torch uses."""
    import torch  # here and below: every flag's parser needs this file, and only --version needs torch

    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = facts.get("flags", "").split()
    extras = [name for name in ("avx_vnni", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8") if name in flags]
    name = facts.get("model name") or platform.processor() or platform.machine()
    return f"{name} ({', '.join([torch.backends.cpu.get_cpu_capability(), *extras])})"


def version_line() -> str:
    import torch

    devices = [processor()]
    if torch.cuda.is_available():
        devices.append(f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}")
    return f"quickdraft {VERSION}, torch {torch.__version__}, Python {platform.python_version()}; {'; '.join(devices)}"


class Version(argparse.Action):
    def __init__(self, option_strings, dest, **_):
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help="print versions and processor, and end")

    def __call__(self, parser, *_) -> None:
        print(version_line())
        sys.exit()
