"""The results of a script as a JSON file that says where they come from: `record`. Knows nothing of any result."""

import datetime
import json
import shlex
import subprocess
import sys
from pathlib import Path

import torch

from loading.checkpoint import write_atomically

ROOT = Path(__file__).parent.parent


def commit() -> str:
    """Of the checkout, with "-dirty" for one that was changed."""
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def record(file: Path, found: dict) -> None:
    """`found` after the command that runs, the commit, the date and torch's version; whole or not at all."""
    about = {
        "command": shlex.join(["python", "-m", sys.modules["__main__"].__spec__.name, *sys.argv[1:]]),
        "commit": commit(), "date": str(datetime.date.today()), "torch": torch.__version__,
    }  # fmt: skip
    text = json.dumps(about | found, indent=1, ensure_ascii=False) + "\n"
    write_atomically(file, lambda partial: partial.write_text(text, encoding="utf-8"))
