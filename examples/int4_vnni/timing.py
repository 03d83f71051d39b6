"""The kernel's speed vs. that of aten's int4: `python -m examples.int4_vnni.timing`.

The two are measured in turn, next to the read bandwidth. The copies of a matrix exceed the caches
together, as a model's layers do. GB/s are stored bytes over the median time.
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
from cli.errors import exit_on_error
from cli.flags import positive
from examples.int4_vnni.kernel import VnniLinear, library
from weights.linears import Int4Linear, QuantizedLinear

SHAPES = ((11264, 2048), (2048, 5632))  # (out, in) of a 1.1B model's feed-forward
COPIES = 6  # of a matrix
CALLS = 5  # products of each copy in a round


def make_linears(
    linear_class: type[QuantizedLinear], outputs: int, inputs: int
) -> list[QuantizedLinear]:
    """Copies of a random matrix, packed for their kernel."""
    linears = []
    for _ in range(COPIES):
        plain = torch.nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16)
        linear = linear_class(plain, "int4-g32")
        for name, part in linear.parts().items():
            if name == "codes":
                part.random_(256)
            else:
                part.uniform_()
        linear.pack()
        linears.append(linear)
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
    parser.add_argument(
        "--read_bytes", type=positive, default=2**30, help="of the buffer for the read bandwidth"
    )
    args = parser.parse_args()
    library()
    buffer = torch.ones(args.read_bytes // 4)
    print(
        f"{torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}; medians of"
        f" {args.rounds} rounds"
    )
    for outputs, inputs in SHAPES:
        linears = {
            "kernel": make_linears(VnniLinear, outputs, inputs),
            "aten": make_linears(Int4Linear, outputs, inputs),
        }
        for rows in (1, 6):
            x = torch.randn(rows, inputs, dtype=torch.bfloat16)
            compare(linears, x, buffer, args.rounds)


def compare(
    linears: dict[str, list[QuantizedLinear]], x: torch.Tensor, buffer: torch.Tensor, rounds: int
) -> None:
    """Print the median time of each kind of Linears on x (rows, inputs)."""
    seconds = {name: [] for name in linears}
    bandwidths = []
    for _ in range(rounds):
        bandwidths.append(read_bandwidth(buffer))
        for name, copies in linears.items():
            seconds[name].append(seconds_of(copies, x))
    bandwidth = statistics.median(bandwidths)
    for name, copies in linears.items():
        num_bytes = sum(part.nbytes for part in copies[0].parts().values())
        median_s = statistics.median(seconds[name])
        rate = num_bytes / median_s
        print(
            f"{len(x)} x {copies[0].out_features} x {x.size(1)} {name:6} {1e3 * median_s:7.3f} ms"
            f" {rate / 1e9:5.1f} GB/s, {rate / bandwidth:.2f} of the read bandwidth"
            f" {bandwidth / 1e9:.1f}"
        )


if __name__ == "__main__":
    with exit_on_error():
        main()
