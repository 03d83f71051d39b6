"""What takes hours, run as `python -m tests.attacks.NAME`."""

from cli.process import prepare

prepare()  # before a program imports torch
