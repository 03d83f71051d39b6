"""The command line of generate.py, which other programs share. Only programs import this package.

main: parse, check, load, warm up, decode, report. The other files are named after these steps; errors.py holds
signals, pipes, full disks and launchers.
"""

import os
import signal
import sys

# Until `main`, Ctrl-C ends the process without a word: imports answer an exception with a traceback, or swallow it.
if "torch" not in sys.modules and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

# Where a stream is closed (2>&-) there is none, and progress bars, which write to one, would fail.
sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115

# Threads that wait at the end of a parallel region spin so often, then sleep. By default they spin for milliseconds, on
# a processor that another process may be waiting for; benchmarks/NOTES.md has what this costs and saves.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
