"""What a program sets for its process before it imports torch. Importing a file of the library
changes none of it."""

import importlib.metadata
import os
import signal
import sys

# Packages of requirements.txt that every run imports.
PACKAGES = ("torch", "numpy", "safetensors", "tokenizers", "jinja2", "tqdm")
INSTALL = "python3 -m venv .venv && . .venv/bin/activate && pip install -r requirements.txt"


def prepare() -> None:
    """Set streams, Ctrl-C and the spinning of idle threads, and look for packages. Each program
    calls this first."""
    open_streams()
    check_packages()
    # Until `exit_on_error`, Ctrl-C ends the process silently: an exception during imports would be
    # a traceback, or be swallowed.
    if "torch" not in sys.modules and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Threads at the end of a parallel region spin this many times, then sleep. By default they spin
    # for milliseconds on a processor that another process may need; benchmarks/NOTES.md has the
    # times with and without.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def open_streams() -> None:
    """Let a closed stdin be empty, and a closed stdout or stderr take anything, as under cron.
    Otherwise the next file that is opened would have their number."""
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def check_packages() -> None:
    """End the program with one line where a package is missing."""
    for name in PACKAGES:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            print(f"error: no {name} in this Python's environment: {INSTALL}", file=sys.stderr)
            sys.exit(2)
