"""What takes hours, run as `python -m tests.attacks.NAME`."""

import cli  # noqa: F401, until `main` Ctrl-C ends the process without a word
