"""Programs around the core, run as `python -m scripts.NAME`."""
