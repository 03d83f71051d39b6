"""One product of a few rows, in every way that torch offers on a CPU: `python -m benchmarks.products`.

Before a decoder is built on a kernel, its candidates run side by side: weights of one shape in enough copies that no
cache holds them, activations of 1 and of 6 rows (a decode step, and verification of K = 5). What is printed, as a table
for benchmarks/NOTES.md, is GB/s of weights in their stored form and milliseconds a product, medians over rounds in
which every candidate ran once, beside the read bandwidth of the same rounds. Candidates that are not there or fail say
so. Activations are bfloat16, results are checked against float32 products of the dequantized weights.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.bench import READ_BYTES, read_bandwidth
from weights.cpu import FAST_ROWS, PackedInt8, PackedWeights, from_digits, to_digits
from weights.formats import dequantize_tensor, quantize_tensor

BYTES = 4e8  # of one format's weights, over all copies
ROUNDS = 5
linear_pointwise = torch.ops.mkldnn._linear_pointwise


def frozen(weights: list[Tensor], **options) -> list[Callable[[Tensor], Tensor]]:
    """Each weight in a Linear that Inductor compiles as a constant."""
    from torch._inductor import config as inductor

    def one(weight: Tensor) -> Callable:
        linear = nn.Linear(weight.size(1), weight.size(0), bias=False, device="meta")
        linear.weight = nn.Parameter(weight, False)
        return torch.compile(linear.eval(), dynamic=False, options={"freezing": True, **options})

    torch._dynamo.config.recompile_limit = 64
    inductor.freezing = True  # read while tracing, too
    return [one(weight) for weight in weights[:4]]  # each is compiled apart


def rows_of(weights: list[Tensor]) -> list[Callable[[Tensor], Tensor]]:
    """Multiply and sum, which Inductor fuses into one loop over the weights for each row."""
    product = torch.compile(
        lambda x, w: torch.stack([(w.float() * row.float()).sum(1) for row in x]).to(x.dtype), dynamic=False
    )
    return [lambda x, w=w: product(x, w) for w in weights]


def prepacked(weights: list[Tensor], rows: int) -> list[Callable[[Tensor], Tensor]]:
    packs = [PackedWeights(weight) for weight in weights]

    def run(pack: PackedWeights, x: Tensor) -> Tensor:
        return pack.multiply(F.pad(x, (0, 0, 0, max(0, rows - len(x)))))[: len(x)]

    return [lambda x, pack=pack: run(pack, x) for pack in packs]


def bfloat16(N: int, K: int) -> dict[str, tuple]:
    copies = max(4, int(BYTES / (2 * N * K)))
    weights = [(torch.randn(N, K) * 0.02).bfloat16() for _ in range(copies)]
    truth = [weight.float() for weight in weights[:1]]
    templates = {"max_autotune": True, "max_autotune_gemm_backends": "CPP"}
    return {
        "F.linear": ([lambda x, w=w: F.linear(x, w) for w in weights], truth),
        "torch.mv": ([lambda x, w=w: torch.mv(w, x[0])[None] for w in weights], truth, (1,)),
        "oneDNN, packed once": (prepacked(weights, 1), truth),
        f"oneDNN, packed once, at least {FAST_ROWS} rows": (prepacked(weights, FAST_ROWS), truth),
        "Inductor, multiply and sum": (rows_of(weights), truth),
        "Inductor, frozen": (frozen(weights), truth),
        "Inductor, frozen, CPP GEMM template": (frozen(weights, **templates), truth),
    }


def int8(N: int, K: int) -> dict[str, tuple]:
    copies = max(4, int(BYTES / (N * K)))
    parts = [quantize_tensor(torch.randn(N, K) * 0.02, "int8") for _ in range(copies)]
    truth = [dequantize_tensor(part, "int8") for part in parts[:1]]
    codes, scale = [part["codes"] for part in parts], parts[0]["scale"]
    packs = [PackedInt8(part, scale) for part in codes]

    def in_digits(x: Tensor, pack: PackedInt8, rows: int) -> Tensor:
        digits, step = to_digits(x)
        padded = F.pad(digits, (0, 0, 0, max(0, rows - len(digits))))
        return from_digits(pack.multiply(padded)[: len(digits)], step).to(x.dtype)

    def rounded(x: Tensor, pack: PackedInt8) -> Tensor:  # activations of 8 bits, a scale a row: what llama.cpp does
        step = x.float().abs().amax(1, keepdim=True) / 127
        digits = ((x / step).round() + 128).to(torch.uint8)
        return (pack.multiply(F.pad(digits, (0, 0, 0, max(0, FAST_ROWS - len(x)))))[: len(x)] * step).to(x.dtype)

    scale16 = scale.bfloat16()
    padded = f"oneDNN qlinear, two digits, at least {FAST_ROWS} rows"
    return {
        "_weight_int8pack_mm": ([lambda x, w=w: torch._weight_int8pack_mm(x, w, scale16) for w in codes], truth),
        "cast, F.linear": ([lambda x, w=w: F.linear(x, w.to(x.dtype)) * scale16 for w in codes[:4]], truth),
        "Inductor, multiply and sum": ([lambda x, f=f: f(x) * scale16 for f in rows_of(codes)], truth),
        "oneDNN qlinear, 8-bit activations": ([lambda x, p=p: rounded(x, p) for p in packs], truth),
        "oneDNN qlinear, two digits": ([lambda x, p=p: in_digits(x, p, 1) for p in packs], truth),
        padded: ([lambda x, p=p: in_digits(x, p, FAST_ROWS) for p in packs], truth),
    }  # fmt: skip


def nibble_lanes(parts: list[dict], N: int, K: int) -> list[Callable[[Tensor], Tensor]]:
    """Codes laid out so that a vector's lanes are output rows, 8 codes to a 32-bit word, masks in place of shifts."""
    G = K // 32

    @torch.compile(dynamic=False)
    def product(x: Tensor, words: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        x = x.float().view(-1, 1, G, 4, 8, 1)
        total = 0
        for i in range(8):
            mask = 15 << 4 * i if i < 7 else (15 << 28) - 2**32
            code = (words & mask).float() * 2.0 ** (-4 * i)
            total = total + (code if i < 7 else torch.where(code < 0, code + 16, code)) * x[:, :, :, :, i]
        y = (total * scale.float()[:, :, None]).sum((2, 3)) + (zero.float() * x.sum((3, 4))).sum(2)
        return y.flatten(1).bfloat16()

    def lay_out(part: dict) -> tuple[Tensor, Tensor, Tensor]:
        codes = torch.stack((part["codes"] & 15, part["codes"] >> 4), -1).flatten(1).long()  # (N, K)
        words = (codes.view(N // 16, 16, G, 4, 8) << 4 * torch.arange(8)).sum(-1)  # (N / 16, 16, G, 4)
        words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).permute(0, 2, 3, 1).contiguous()
        scale, zero = (part[name].view(N // 16, 16, G).transpose(1, 2).contiguous() for name in ("scale", "zero"))
        return words, scale, (zero.float() - 8 * scale.float()).bfloat16()

    return [lambda x, laid=laid: product(x, *laid) for laid in map(lay_out, parts)]


def int4(N: int, K: int) -> dict[str, tuple]:
    copies = max(4, int(BYTES / (0.625 * N * K)))
    parts = [quantize_tensor(torch.randn(N, K) * 0.02, "int4-g32") for _ in range(copies)]
    truth = [dequantize_tensor(part, "int4-g32") for part in parts[:1]]
    packs = []
    for part in parts:
        codes = torch.stack((part["codes"] & 15, part["codes"] >> 4), -1).flatten(1).int()
        both = torch.stack((part["scale"], part["zero"]), -1).transpose(0, 1).contiguous()
        packs.append((torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1), both))
    kernel = torch.ops.aten._weight_int4pack_mm_for_cpu
    unpack = [lambda x, p=p: F.linear(x, dequantize_tensor(p, "int4-g32", x.dtype)) for p in parts[:4]]
    return {
        "_weight_int4pack_mm_for_cpu": ([lambda x, p=p: kernel(x, p[0], 32, p[1]) for p in packs], truth),
        "unpack, F.linear": (unpack, truth),
        "Inductor, nibbles, rows in lanes": (nibble_lanes(parts, N, K), truth, (1, 2)),
    }


def mxfp6(N: int, K: int) -> dict[str, tuple]:
    parts = [quantize_tensor(torch.randn(N, K) * 0.02, "mxfp6") for _ in range(4)]
    truth = [dequantize_tensor(part, "mxfp6") for part in parts[:1]]
    unpack = [lambda x, p=p: F.linear(x, dequantize_tensor(p, "mxfp6", x.dtype)) for p in parts]
    compiled = torch.compile(lambda x, p: F.linear(x, dequantize_tensor(p, "mxfp6", torch.bfloat16)), dynamic=False)
    return {
        "unpack, F.linear": (unpack, truth),
        "unpack, F.linear, compiled": ([lambda x, p=p: compiled(x, p) for p in parts], truth),
    }


FORMATS = {"bf16": (bfloat16, 16), "int8": (int8, 8), "int4-g32": (int4, 5), "mxfp6": (mxfp6, 6.25)}


def check(function: Callable, weight: Tensor, rows: int) -> str | None:
    """What is wrong with a product, or None. Loose: rounding of 8-bit activations passes, a wrong layout does not."""
    x = torch.randn(rows, weight.size(1), generator=torch.Generator().manual_seed(0)).bfloat16()
    try:
        got, want = function(x).float(), x.float() @ weight.T
    except (RuntimeError, NotImplementedError) as error:
        return f"fails: {str(error).splitlines()[0][:60]}"
    error = ((got - want).norm() / want.norm()).item()
    return None if error < 0.03 else f"wrong by {error:.2f}"


def seconds(functions: list[Callable], x: Tensor) -> float:
    start = time.perf_counter()
    for function in functions:
        function(x)
    return (time.perf_counter() - start) / len(functions)


@torch.inference_mode()
def measure(format: str, N: int, K: int, buffer: Tensor) -> list[str]:
    """Lines of the table for one format."""
    make, bits = FORMATS[format]
    found, problems, bandwidth = {}, {}, []
    candidates = make(N, K)
    for name, (functions, truth, *only) in candidates.items():
        for rows in (1, 6):
            if not only or rows in only[0]:
                problem = check(functions[0], truth[0], rows)
                if problem:
                    problems[name, rows] = problem
                else:
                    found[name, rows] = []
    for number in range(ROUNDS + 1):
        bandwidth.append(read_bandwidth(buffer) / 1e9)
        for (name, rows), times in found.items():
            times.append(seconds(candidates[name][0], torch.randn(rows, K).bfloat16()))
            del times[: number == 0]  # the first round compiles and warms up
    lines = []
    for name in candidates:
        cells = []
        for rows in (1, 6):
            if (name, rows) in found:
                s = statistics.median(found[name, rows])
                cells.append(f"{N * K * bits / 8 / s / 1e9:.1f} ({1e3 * s:.2f} ms)")
            else:
                cells.append(problems.get((name, rows), "–"))
        lines.append(f"| {format} | {name} | {' | '.join(cells)} |")
    low, high = min(bandwidth), max(bandwidth)
    return [*lines, f"| {format} | plain read | {statistics.median(bandwidth):.1f} ({low:.1f}–{high:.1f}) | |"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare products of a few rows on this CPU.")
    parser.add_argument("formats", nargs="*", metavar="FORMAT", help=f"of {', '.join(FORMATS)}; default: all")
    parser.add_argument("--rows", type=int, default=11264, help="outputs of the matrix")
    parser.add_argument("--columns", type=int, default=2048, help="inputs")
    args = parser.parse_args()
    unknown = set(args.formats) - FORMATS.keys()
    if unknown:
        parser.error(f"unknown format {', '.join(sorted(unknown))}; there are {', '.join(FORMATS)}")
    buffer = torch.ones(READ_BYTES // 4)
    print("| weights | how | 1 row, GB/s | 6 rows, GB/s |\n| --- | --- | --- | --- |", flush=True)
    for format in args.formats or FORMATS:
        print("\n".join(measure(format, args.rows, args.columns, buffer)), flush=True)
        torch._dynamo.reset()


if __name__ == "__main__":
    sys.exit(main())
