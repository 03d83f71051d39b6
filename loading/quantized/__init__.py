"""Quantized weights of other programs: formats that they define, read here and nowhere else.

reader.py           which matrices of a folder are quantized, and the format of ours that holds each
detection.py        the layout that a config.json announces
layouts.py, floats.py    where each layout keeps codes and scales
merged_experts.py   gpt-oss's experts, which stand in one tensor
"""
