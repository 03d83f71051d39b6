"""The command line of generate.py, which other programs share. Only programs import this package.

start: flags, before torch; main: check, load, warm up, decode, report. The other files are named
after these steps; process.py and errors.py hold signals, streams, pipes, full disks and launchers.
"""
