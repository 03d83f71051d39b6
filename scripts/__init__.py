"""Programs around the core, run as `python -m scripts.NAME`."""

import cli  # noqa: F401  before torch: it decides what Ctrl-C does from the first moment on
