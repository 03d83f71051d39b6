"""Programs that measure, run as `python -m benchmarks.NAME`, and their results."""

from cli.process import prepare

prepare()  # before a program imports torch
