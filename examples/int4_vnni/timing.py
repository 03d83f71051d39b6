"""Times of the kernel beside aten's int4: `python -m examples.int4_vnni.timing`, in turn, with the read bandwidth.

The copies of a matrix exceed the caches together, as a model's layers do. GB/s: stored bytes over the median time.
"""

if __name__ == "__main__":  # before torch is imported: sets how long idle threads spin
    from cli.process import prepare

    prepare()

import argparse
import os
import statistics
import time

import torch

from benchmarks.workers import read_bandwidth
from cli.errors import ending_plainly
from cli.flags import positive
from examples.int4_vnni.kernel import VnniLinear, library
from weights.linears import Int4Linear, QuantizedLinear

SHAPES = ((11264, 2048), (2048, 5632))  # (out, in) of a 1.1B model's feed-forward
COPIES, CALLS = 6, 5  # matrices; products of each a round


def make_linears(linear_class: type[QuantizedLinear], outputs: int, inputs: int) -> list[QuantizedLinear]:
    linears = [linear_class(inputs, outputs, "int4-g32", dtype=torch.bfloat16) for _ in range(COPIES)]
    for linear in linears:
        for name, part in linear.parts().items():
            part.copy_(torch.randint(256, part.shape, dtype=torch.uint8) if name == "codes" else torch.rand(part.shape))
        linear.pack()
    return linears


def seconds_of(linears: list[QuantizedLinear], x: torch.Tensor) -> float:
    seconds = []
    for linear in linears * CALLS:
        start = time.perf_counter()
        linear(x)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--read_bytes", type=positive, default=2**30, help="of the buffer for the read bandwidth")
    args = parser.parse_args()
    library()
    buffer = torch.ones(args.read_bytes // 4)
    print(f"{torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}; medians of {args.rounds} rounds")
    for outputs, inputs in SHAPES:
        linears = {
            "kernel": make_linears(VnniLinear, outputs, inputs),
            "aten": make_linears(Int4Linear, outputs, inputs),
        }
        for rows in (1, 6):
            x = torch.randn(rows, inputs, dtype=torch.bfloat16)
            seconds, reads = {name: [] for name in linears}, []
            for _ in range(args.rounds):
                reads.append(read_bandwidth(buffer))
                for name, values in linears.items():
                    seconds[name].append(seconds_of(values, x))
            read = statistics.median(reads)
            for name, values in seconds.items():
                num_bytes = sum(part.nbytes for part in linears[name][0].parts().values())
                rate = num_bytes / statistics.median(values)
                share = f"{rate / 1e9:5.1f} GB/s, {rate / read:.2f} of the read bandwidth {read / 1e9:.1f}"
                print(f"{rows} x {outputs} x {inputs} {name:6} {1e3 * statistics.median(values):7.3f} ms {share}")


if __name__ == "__main__":
    with ending_plainly():
        main()
