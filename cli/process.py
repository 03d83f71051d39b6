"""What a program sets for its process before it imports torch. Importing a file of the library
changes none of it."""

import os
import signal
import sys


def prepare() -> None:
    """Set Ctrl-C and the spinning of idle threads. Each program calls this first."""
    # Until `exit_on_error`, Ctrl-C ends the process silently: an exception during imports would be
    # a traceback, or be swallowed.
    if "torch" not in sys.modules and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Threads at the end of a parallel region spin this many times, then sleep. By default they spin
    # for milliseconds on a processor that another process may need; benchmarks/NOTES.md has the
    # times with and without.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
