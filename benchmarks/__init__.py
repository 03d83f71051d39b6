"""Programs that measure, run as `python -m benchmarks.NAME`, and their results."""

import cli  # noqa: F401, until `main` Ctrl-C ends the process without a word
