"""check_format: do the parts of a quantized matrix mean the same wherever they are stored, cut,
loaded and multiplied?"""

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from decoding.errors import UserError
from loading.checkpoint import load_model
from loading.config import config_from_hf
from loading.models import random_model
from loading.saving import save_model
from tests.conformance.drafters import check
from weights.experts import Stack
from weights.formats import FORMATS, Asymmetric, Format, dequantize_tensor, quantize_tensor
from weights.linears import KERNELS, QuantizedLinear
from weights.walker import named_linears

ROWS = 48
WORLDS = (2, 4)  # ranks that shards are cut for
ODD_COLUMNS = (160, 320, 640)  # whose cuts are 40, 80, 160 and 320 inputs: no multiples of 64 or 32
NUM_ROWS = 9  # of a batch whose rows are compared with each alone


def check_format(fmt: Format) -> None:
    """Check a format of weights on a CPU, as `--quantize` would use it.

    - `shapes` says what `quantize` returns, quantizing twice gives the same bits, and dequantized
      weights are nearer to the weights than zeros are.
    - Parts cut by rows, and by full groups of inputs, dequantize to the same cut of the matrix, at
      any input where `group` is 0. `scope` is true: quantizing what it names gives the same parts.
    - A model in this format, saved and loaded, has the same bits.
    - Products of 1 to 300 rows in float32 and bfloat16, packed and not, are those of the
      dequantized weights up to rounding. A row has the same bits in as many rows as the kernel says
      (`batch_invariant_rows`).
    - So are products with the matrices of chosen experts, as a GPU's step multiplies them.
    """
    with registered(fmt) as scheme:
        w = weights(ROWS, num_columns(fmt))
        check_parts(fmt, w)
        parts = quantize_tensor(w, scheme)
        check_round_trip(fmt, w, parts)
        for world in WORLDS:
            check_shards(fmt, parts, world)
        check_odd_cuts(fmt, scheme)
        check_scope(fmt, w, parts)
        check_files(fmt, scheme)
        for dtype in (torch.float32, torch.bfloat16):
            check_kernel(scheme, dtype)
        check_experts(fmt, scheme)


@contextlib.contextmanager
def registered(fmt: Format) -> Iterator[str]:
    """The format's name in FORMATS, for as long as it is checked where it has none."""
    name = next((name for name, known in FORMATS.items() if known is fmt), None)
    if name is not None:
        yield name
        return
    name = f"checked {type(fmt).__name__}"
    FORMATS[name] = fmt
    try:
        yield name
    finally:
        del FORMATS[name]


def num_columns(fmt: Format) -> int:
    """Inputs of which each of the ranks has full groups."""
    return math.lcm(max(WORLDS) * max(1, fmt.group), 256)


def weights(rows: int = 48, columns: int = 256, seed: int = 0) -> Tensor:
    """Rows of different sizes, one of zeros, one with an outlier, one shifted away from zero."""
    w = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02
    w *= torch.logspace(-2, 2, rows)[:, None]
    w[3], w[4, 7], w[5] = 0, 50.0, w[5] + 3 * w[5].abs().max()
    w[6, :32] = 0
    return w


def same_bits(x: Tensor, y: Tensor) -> bool:
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    x, y = (part.contiguous().view(torch.uint8) for part in (x, y))
    return torch.equal(x, y)


# -------------------------------------------------------------------------------------- one matrix


def check_parts(fmt: Format, w: Tensor) -> None:
    shapes = fmt.shapes(*w.shape)
    check("codes" in shapes, f"shapes names {sorted(shapes)}: one part is called 'codes'")
    found, again = (fmt.quantize(w.clone()) for _ in range(2))
    check(
        found.keys() == shapes.keys(),
        f"quantize returns the parts {sorted(found)}, and shapes names {sorted(shapes)}",
    )
    for name, (shape, dtype) in shapes.items():
        part = found[name]
        check(
            tuple(part.shape) == tuple(shape) and part.dtype == dtype and shape[0] == len(w),
            f"part {name!r}: quantize returns {part.dtype} {tuple(part.shape)}, and shapes says"
            f" {dtype} {tuple(shape)}; the first dimension is that of the {len(w)} rows",
        )
        check(
            same_bits(part, again[name]),
            f"part {name!r} has other bits when the same weights are quantized again",
        )


def check_round_trip(fmt: Format, w: Tensor, parts: dict[str, Tensor]) -> None:
    back = fmt.dequantize(parts)
    check(
        back.dtype == torch.float32 and back.shape == w.shape,
        f"dequantize returns {back.dtype} {tuple(back.shape)} instead of float32 {tuple(w.shape)}",
    )
    error = (back - w).norm(dim=1)
    size = w.norm(dim=1)
    for row in range(len(w)):
        check(
            bool(error[row] < size[row] or error[row] == size[row] == 0),
            f"row {row} of size {size[row]:.3g} comes back with an error of {error[row]:.3g}, as"
            f" much as zeros would: dequantize does not invert quantize. Row 3 is zeros, 4 has an"
            f" outlier, 5 is far from zero",
        )


# -------------------------------------------------------------------------------------------- cuts


def shard_of(
    fmt: Format,
    parts: dict[str, Tensor],
    shape: tuple[int, int],
    rank: int,
    world: int,
) -> dict[str, Tensor]:
    """The parts of a rank's shard (rows, columns), as tp.py cuts them: a part whose shape is the
    same for the shard is not cut."""
    shard = {}
    for name, (target, _) in fmt.shapes(*shape).items():
        part = parts[name]
        for dim, size in enumerate(target):
            if part.size(dim) != size:
                part = part.chunk(world, dim)[rank]
        shard[name] = part
    return shard


def check_shards(fmt: Format, parts: dict[str, Tensor], world: int) -> None:
    whole = fmt.dequantize(parts)
    rows, columns = whole.shape
    for dim, shape in enumerate([(rows // world, columns), (rows, columns // world)]):
        cut_by = ("rows", "columns")[dim]
        for rank in range(world):
            shard = shard_of(fmt, parts, shape, rank, world)
            for name, (target, _) in fmt.shapes(*shape).items():
                check(
                    tuple(shard[name].shape) == tuple(target),
                    f"part {name!r} of shard {rank} of {world} by {cut_by} is"
                    f" {tuple(shard[name].shape)}, and shapes{shape} says {tuple(target)}",
                )
            got = fmt.dequantize(shard)
            want = whole.chunk(world, dim)[rank]
            check(
                torch.equal(got, want),
                f"shard {rank} of {world} by {cut_by} dequantizes to other weights than its cut of"
                f" the matrix does, by up to {(got - want).abs().max():.3g}: each part is cut where"
                f" its shape changes, so it must hold the same rows and groups as the codes",
            )


def check_odd_cuts(fmt: Format, scheme: str) -> None:
    """Cuts that tp.py allows, because they split no group that the format states. UserError of
    `shapes` or `quantize` refuses a size."""
    for columns in ODD_COLUMNS:
        for world in WORLDS:
            if fmt.group and columns // world % fmt.group:
                continue
            case = f"{columns} inputs over {world} ranks, {columns // world} each"
            try:
                parts = quantize_tensor(weights(ROWS, columns), scheme)
                check_shards(fmt, parts, world)
            except UserError:
                continue
            except (AssertionError, RuntimeError, ValueError, IndexError) as error:
                raise AssertionError(
                    f"{case}, with group = {fmt.group}: {error}. If neighbouring inputs share a"
                    f" scale, `group` says how many, and tp.py refuses to divide them"
                ) from error


def check_scope(fmt: Format, w: Tensor, parts: dict[str, Tensor]) -> None:
    """Quantizing a piece of the scope's size gives the parts of the whole."""
    rows, columns = w.shape
    pieces = []  # of what is quantized alone: (shape, world, dim)
    if fmt.scope != "matrix":
        pieces.append(((rows // 2, columns), 0))
    if fmt.scope in ("groups", "row_max"):
        pieces.append(((rows, columns // 2), 1))
    if fmt.scope == "groups" and not fmt.group:
        pieces = pieces[:1]  # a row is one group
    for shape, dim in pieces:
        for rank in range(2):
            piece = w.chunk(2, dim)[rank]
            needs_limits = fmt.scope == "row_max" and dim == 1
            limits = [w.abs().amax(1)] if needs_limits else []
            found = fmt.quantize(piece.clone(), *limits)
            shard = shard_of(fmt, parts, shape, rank, 2)
            for name, part in found.items():
                check(
                    same_bits(part, shard[name]),
                    f"scope = {fmt.scope!r} says that half of the {('rows', 'columns')[dim]} can be"
                    f" quantized alone, but part {name!r} then has other bits: state the smallest"
                    f" piece that its numbers depend on",
                )


# ------------------------------------------------------------------------------------------ models


def check_files(fmt: Format, scheme: str) -> None:
    dim = num_columns(fmt)
    hf = {
        "model_type": "llama",
        "hidden_size": dim,
        "intermediate_size": dim,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 40,
        "max_position_embeddings": 32,
        "rms_norm_eps": 1e-5,
    }
    config = config_from_hf(hf)
    model = random_model(config, dtype=torch.float32, quantize=scheme, pack=False)
    with tempfile.TemporaryDirectory() as folder:
        save_model(model, Path(folder), hf)
        loaded = load_model(folder, dtype=torch.float32, pack=False)
    for name, linear in named_linears(model):
        if not isinstance(linear, QuantizedLinear):
            continue
        other = loaded.get_submodule(name)
        for part_name, part in linear.parts().items():
            check(
                same_bits(part, other.parts()[part_name]),
                f"{name}, part {part_name!r}: saved and loaded, it has other bits",
            )


def check_kernel(scheme: str, dtype: torch.dtype) -> None:
    kernel = FORMATS[scheme].kernel
    check(
        kernel in ("", "codes", *KERNELS),
        f"kernel = {kernel!r} is not in weights.linears.KERNELS, which has {', '.join(KERNELS)}",
    )
    for rows in (ROWS, 40):  # 40: no multiple of what a kernel wants
        linear = biased_linear(rows, dtype, num_columns(FORMATS[scheme]))
        plain = QuantizedLinear.from_float(linear, scheme)
        packed = QuantizedLinear.from_float(linear, scheme)
        packed.pack()
        check_equal_rows(packed, dtype)
        for found in (plain, packed):
            check_products(linear, scheme, lambda xs, found=found: [found(x[None])[0] for x in xs])


def check_equal_rows(linear: QuantizedLinear, dtype: torch.dtype) -> None:
    """A row has the same bits alone and among others, up to the number of rows that the kernel
    claims, so that drafted text is called identical."""
    num_rows = min(linear.batch_invariant_rows, NUM_ROWS)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_rows, linear.in_features, generator=generator).to(dtype)
    alone = [linear(row[None]) for row in x]
    for n in range(2, num_rows + 1):
        for row, got in enumerate(linear(x[:n])):
            check(
                same_bits(got, alone[row][0]),
                f"{linear.scheme}, {dtype}: row {row} of {n} has other bits than alone, and"
                f" batch_invariant_rows = {linear.batch_invariant_rows}. `use_kernel` takes the"
                f" RowSplit that exact.products.find_row_split has found for this kernel",
            )


def check_experts(fmt: Format, scheme: str) -> None:
    """Products of a row each with its expert's matrix (weights/experts.py), eagerly, by what
    `Format.kernel` says of the codes."""
    linears = [biased_linear(ROWS, torch.float32, num_columns(fmt)) for _ in range(3)]
    for number, linear in enumerate(linears):
        linear.weight.mul_(number + 1)
    stack = Stack([QuantizedLinear.from_float(linear, scheme) for linear in linears])
    for number, linear in enumerate(linears):

        def products(inputs, number=number):
            chosen = [torch.full((len(x),), number) for x in inputs]
            return [stack.multiply_gathered(x, e) for x, e in zip(inputs, chosen, strict=True)]

        try:
            check_products(linear, scheme, products)
        except (RuntimeError, AttributeError, KeyError) as error:
            raise AssertionError(
                f"experts in {scheme}, whose kernel is {fmt.kernel!r}: {error}. weights/experts.py"
                f" reads codes by the name of a kernel; one of its own is dequantized"
            ) from error


def biased_linear(rows: int, dtype: torch.dtype, columns: int = 256) -> nn.Linear:
    linear = nn.Linear(columns, rows, dtype=dtype).requires_grad_(False)
    linear.weight.copy_(weights(max(rows, 8), columns)[:rows] + 0.01)
    return linear


def check_products(
    linear: nn.Linear,
    scheme: str,
    products: Callable[[Sequence[Tensor]], Sequence[Tensor]],
) -> None:
    """products(inputs) are the quantized products for one row, verification's few, and a prompt's
    many. Rounding: sums of 256 terms in float32, n u = 2^-16; in bfloat16 (u = 2^-8) of weight or
    product, scale, sum with the bias. What a kernel rounds of int4's float32 scale and zero counts
    by their sizes, not by that of their sum, the weight."""
    columns = linear.in_features
    parts = quantize_tensor(linear.weight, scheme)
    exact = dequantize_tensor(parts, scheme).double()
    zero = torch.zeros(1, 1)
    fmt = FORMATS[scheme]
    has_kernel = isinstance(fmt, Asymmetric) and fmt.kernel
    if has_kernel and fmt.center == 0:  # its zero is moved to where the kernel wants it
        parts["zero"] = parts["zero"].float() + 8 * parts["scale"].float()
    if "zero" in parts and parts["zero"].dtype == torch.float32:
        zero = parts["zero"].double().repeat_interleave(fmt.group or 1, 1)
    dtype = linear.weight.dtype
    inputs = [
        torch.randn(M, columns, generator=torch.Generator().manual_seed(M)).to(dtype)
        for M in (1, 2, 6, 9, 300)
    ]
    epsilon = 2**-16 * columns / 256 + (0 if dtype == torch.float32 else 3 * 2**-8)
    for x, got in zip(inputs, products(inputs), strict=True):
        want = x.double() @ exact.T + linear.bias.double()
        size = x.double().abs() @ ((exact - zero).abs() + zero.abs()).T + linear.bias.abs()
        error = (got.double() - want).abs() / (epsilon * size)
        row, output = divmod(error.argmax().item(), error.size(1))
        check(
            bool((error <= 1).all()),
            f"{scheme}, {dtype}, {len(x)} rows: output {output} of row {row} is"
            f" {got[row, output].item():.6g}, and by the dequantized weights"
            f" {want[row, output].item():.6g}, {error.max():.3g} times what rounding may do. Look"
            f" at the kernel's order of codes, and at a scale or a group that it takes from"
            f" elsewhere",
        )
        unquantized = x.double() @ linear.weight.double().T + linear.bias
        check(
            bool((got.double() - unquantized).abs().max() > 0),
            f"{scheme}, {len(x)} rows: the product is that of the weights before quantization",
        )
