"""Programs around the core, run as `python -m scripts.NAME`."""

import cli  # noqa: F401  before torch, to handle Ctrl-C from the first moment on
