"""What measures, run as `python -m benchmarks.NAME`, beside what was measured."""

import cli  # noqa: F401, until `main` Ctrl-C ends the process without a word
