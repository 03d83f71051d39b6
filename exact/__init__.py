"""Exactness: greedy text that does not depend, in any bit, on how the work was divided.

    probes       sums that cancel, so that they show in which order a kernel adds
    products     numbers of rows for which a product gives each row the same bits, and RowSplit,
                 which keeps to them
    attention    multiples of query rows and of lengths for which attention does the same, and
                 ExactKernel, which keeps to them

What is promised. "Bit-exact" here compares two runs of one model on one machine, and speaks of
steps and rounds: the logits of a token are the same bits whether it is decoded alone or among other
requests, in a step of its own or in a pass that verifies K drafts. Greedy text then cannot differ,
because the same logits have the same maximum. A prompt runs alone and in the same chunks wherever
it runs, so it leaves the same bits too, in whatever shape is fastest. A beginning that an earlier
request computed, in other chunks or token by token, equals a recomputed one up to rounding. Nothing
is promised between machines, versions of torch, numbers of ranks, or eager and compiled code.

Why it needs work. A float sum depends on its order, because every addition rounds. A kernel is free
to choose the order: for one row of a product it may add the inputs one after another, for eight
rows it may cut them into blocks that fit its registers and add the blocks' sums, and with more
threads it may cut elsewhere. Attention also sums over the keys, so that its order may change with
the number of query rows and with the length of the cache. No document lists these choices; they
differ between processors, dtypes and releases. Each changes the last bits only, but where two
tokens are almost equally likely, the last bits decide which of them is written.

How a probe finds the order. Random inputs are poor at it: after rounding to bfloat16, two orders
often agree. The probes use sums whose terms cancel. The exact result is 0, so all that a kernel
returns is its own rounding error, and two orders hardly ever make the same one. A worked example in
float32, which has 24 bits of precision:

    terms                   16777216, 1, -16777216, -1      (2^24 and 1; the exact sum is 0)
    one after another       16777216 + 1 = 16777216         the 1 is lost in rounding
                            16777216 - 16777216 = 0
                            0 - 1 = -1                      result: -1
    by two accumulators     16777216 - 16777216 = 0         terms 1 and 3
                            1 - 1 = 0                       terms 2 and 4
                            0 + 0 = 0                       result: 0

One product of ones with these terms as activations thus tells the two kernels apart. A probe runs
the real kernel on such rows for many shapes, at many places within the batch, with one thread and
with all, and groups the shapes by the bits of the results. For a bfloat16 matrix (2048, 5632) on a
Xeon with AMX, among 5, 6, 9, 12, 16, 32, 64 and 128 rows,

    5, 6, 9 and 64 rows         give each row the same bits
    12, 16, 32 and 128 rows     give each row the same bits, which are others than those above

and the second group wins, since it holds the largest number. The attention of that machine gives a
query the same bits wherever the query rows are a multiple of 2 and the length is a multiple of 32.

What decoding does with it. It runs no other shapes. A step of 6 rows is padded with zeros to 12,
and one of 140 rows runs as 128, and 12. More than 256 rows are a prompt's, and one product. A query
at position 700 attends over 704 positions, the last of them masked. Where no group of shapes
passes, decoding takes the fastest shapes instead and `Engine.identical` is false: the report then
says `up to rounding` in place of `identical`. docs/internals.md has the prices and the
measurements.
"""
