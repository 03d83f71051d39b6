"""Quantized weights of other programs: formats that they define, read here and nowhere else.

detection.py        the layout that a config.json announces
layouts.py, floats.py    where each layout keeps codes and scales
compressed_tensors.py    our formats -> a folder that other programs read
merged_experts.py   experts that stand in one tensor, as gpt-oss's do; in plain weights too
"""
