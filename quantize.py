"""The choice of int4 codes, layer by layer: searched ranges, and GPTQ.

    quantize_tensor  a matrix -> its stored parts, and back: dequantize_tensor; FORMATS has the
                     schemes
    search_range     int4 ranges with the least squared error
    gptq             int4 codes that keep the products with calibration inputs
    quantize_block   a block's Linears, in the order in which they compute

This file knows matrices and no folder. weights/formats.py rounds to the nearest codes, and
cli/quantized_folder.py reads and writes folders. Run as a program, this file hands over to
cli/quantize.py.
"""

if __name__ == "__main__":
    # Before torch is imported: cli/ handles Ctrl-C and flags from the first moment on.
    from cli.process import prepare

    prepare()
    from cli.quantize import main

    raise SystemExit(main())

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from model import Block
from weights import formats
from weights.formats import FORMATS, Asymmetric, Format, dequantize_tensor, quantize_tensor
from weights.linears import QuantizedLinear
from weights.walker import replace_linears

# What a program of one's own imports from here.
__all__ = [
    "FORMATS",
    "Format",
    "dequantize_tensor",
    "gptq",
    "quantize_block",
    "quantize_tensor",
    "search_range",
]

DAMPING = 0.01  # fraction of the mean diagonal that is added to the diagonal
BLOCK_COLUMNS = 128  # after so many columns, their errors are spread over all later ones


def search_range(
    w: Tensor,
    format: Asymmetric,
    importance: Tensor | float = 1.0,
) -> tuple[Tensor, Tensor]:
    """(low, high) of each group (out, in / g), scaled by the factor of 1, 0.975, … 0.525 with the
    least squared error.

    w (out, in / g, g); importance (in / g, g): the factor of each input's error, such as its mean
    square.
    """
    low = w.amin(-1)
    high = w.amax(-1)
    min_error = torch.full_like(low, math.inf)
    best_factor = torch.ones_like(low)
    for step in range(20):
        factor = 1 - step / 40
        parts = format.with_range(w, low * factor, high * factor)
        rounded = format.dequantize(parts).view_as(w)
        difference = rounded - w
        squares = difference**2 * importance
        error = squares.sum(-1)  # (out, in / g)
        is_better = error < min_error
        min_error = torch.where(is_better, error, min_error)
        best_factor = torch.where(is_better, factor, best_factor)
    return low * best_factor, high * best_factor


@torch.no_grad()
def gptq(
    w: Tensor,
    hessian: Tensor,
    format: Asymmetric,
) -> dict[str, Tensor]:
    """Parts of w (out, in) that keep w @ x for inputs x with the sum of x x^T = `hessian` (in, in).

    Frantar et al., arXiv:2210.17323: columns are rounded one after the other, and the error of each
    is spread over the remaining ones by the inverse Hessian's Cholesky factor. The columns with the
    largest diagonal go first. The groups' ranges are fixed before ("static groups"), so that the
    stored layout stays the usual one. In float64.
    """
    w = w.double().clone()
    hessian = hessian.double().clone()
    diagonal = hessian.diagonal()  # a view: what is written to it changes the hessian
    is_unused = diagonal == 0  # inputs that are always 0, for which any weight will do
    importance = diagonal.float().unflatten(0, (-1, format.group))
    used = diagonal[~is_unused]
    diagonal[is_unused] = used.mean() if len(used) else 1  # keeps the mean, which sets the damping
    w[:, is_unused] = 0
    grouped = format.grouped(w.float())
    low, high = search_range(grouped, format, importance)
    parts = format.with_range(grouped, low, high)
    scale = formats.divisor(parts["scale"]).double()
    scale = scale.repeat_interleave(format.group, 1)  # (out, in / g) -> (out, in)
    zero = parts["zero"].double()
    zero = zero.repeat_interleave(format.group, 1)
    diagonal += DAMPING * diagonal.mean()
    order = diagonal.argsort(descending=True)
    ordered = hessian[order][:, order]
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(ordered))
    factor = torch.linalg.cholesky(inverse, upper=True)  # (in, in)
    max_code = 2**format.bits - 1
    # From here on, columns stand in this order.
    w = w[:, order]
    scale = scale.T[order]  # (in, out)
    zero = zero.T[order]
    codes = []
    for begin in range(0, len(order), BLOCK_COLUMNS):
        end = min(begin + BLOCK_COLUMNS, len(order))
        errors = []
        for i in range(begin, end):
            weights = w[:, i]  # (out,)
            step = scale[i]
            offset = zero[i]
            code = ((weights - offset) / step).round()  # less the center
            code = code.clamp(-format.center, max_code - format.center)
            codes.append(code + format.center)
            error = (weights - code * step - offset) / factor[i, i]
            errors.append(error)
            w[:, i + 1 : end] -= error[:, None] * factor[i, i + 1 : end]
        block_errors = torch.stack(errors, 1)  # (out, size)
        w[:, end:] -= block_errors @ factor[begin:end, end:]
    codes = torch.stack(codes, 1)  # (out, in)
    codes = codes[:, order.argsort()]
    return parts | {"codes": formats.pack_bits(codes, format.bits)}


def input_hessian(linear: nn.Linear, run: Callable[[], object]) -> Tensor:
    """The sum of x x^T (in, in), float64, over every input x of `linear` while `run` runs; the unit
    matrix where there is none."""
    n = linear.in_features
    total = torch.zeros(n, n, dtype=torch.float64, device=linear.weight.device)

    def add_input(_, inputs) -> None:
        x = inputs[0]
        x = x.reshape(-1, n)  # (rows, in)
        product = x.T @ x
        total.add_(product.double())

    hook = linear.register_forward_pre_hook(add_input)
    try:
        run()
    finally:
        hook.remove()
    if not total.any():  # no token chose this expert: its inputs count alike
        return torch.eye(n, dtype=total.dtype, device=total.device)
    return total


def quantize_block(
    block: Block,
    scheme: str,
    method: str,
    run: Callable[[], object],
) -> float:
    """Quantize a block's Linears in the order in which they compute; return the relative error of
    the weights.

    `method`: "rtn" rounds to the nearest codes, "search" first searches ranges, "gptq" looks at
    inputs. `run` runs the block on the calibration text, so that a Linear's inputs come from the
    quantized Linears before it.
    """
    format = FORMATS[scheme]
    errors = []  # norm of w' - w of each Linear
    norms = []  # of w

    def quantize(name: str, linear: nn.Linear) -> QuantizedLinear:
        w = linear.weight.detach().float()
        parts = None
        if method == "gptq":
            parts = gptq(w, input_hessian(linear, run), format)
        if method == "search":
            grouped = format.grouped(w)
            parts = format.with_range(grouped, *search_range(grouped, format))
        quantized = QuantizedLinear.from_float(linear, scheme, parts)
        error = quantized.dequantized(torch.float32).sub_(w)
        errors.append(torch.linalg.vector_norm(error).item())
        norms.append(torch.linalg.vector_norm(w).item())
        return quantized

    replace_linears(block, quantize)
    return math.hypot(*errors) / max(math.hypot(*norms), 1e-15)
