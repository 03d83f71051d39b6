"""How weights are stored, and how few rows are multiplied with them.

    formats     what is stored: int8, int4, fp8 and MX; weights -> parts, parts -> weights
    linears     Linears that own their parts; the walker that puts them in place of a model's Linears; packing
    cpu         products on a CPU with weights in oneDNN's layout, int8 activations as digits, aten's int4 layout
    gpu         products that a GPU's compiler turns into one kernel: unpack, multiply, sum
    compiling   every workaround for the compiler

Nothing here knows checkpoints, ranks, sampling or decoding.
"""
