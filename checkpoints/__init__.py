"""How the demo was made: `python -m checkpoints.train_demo`."""

import cli  # noqa: F401, until `main` Ctrl-C ends the process without a word
