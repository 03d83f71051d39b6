"""Programs around the core, run as `python -m scripts.NAME`: a file each, or a folder."""
