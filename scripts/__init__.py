"""Programs around the core, run as `python -m scripts.NAME`."""

import signal
import sys

# While Python looks for the program, argv[0] is "-m". What generate.py does at its top, for all of them: see its
# `raise_interrupts`.
if sys.argv[0] == "-m" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
