"""Quantized weights of other programs."""
