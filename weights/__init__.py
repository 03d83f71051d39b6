"""Stored forms of weights, and their products with a few rows.

    formats     int8, int4, fp8 and MX: weights -> parts, parts -> weights
    schemes     the names of formats, without torch
    linears     Linears that own their parts
    walker      replaces, quantizes and packs the Linears of a model
    experts     a layer's experts, packed for a device
    cpu         products on a CPU: oneDNN's layout, activations as 8-bit digits
    gpu         products that a GPU's compiler fuses into one kernel: unpack, multiply, sum
    compiling   settings of the compiler and workarounds for it

Nothing here imports what reads checkpoints, divides a model over ranks, samples or decodes.
"""
