"""Weight-only quantization of a folder, layer by layer, and the choice of int4 codes.

    gptq            int4 codes that keep the products with calibration inputs
    search_range    int4 ranges with the least squared error
    run             a folder or GGUF file in, a quantized folder out

Programs also import from here: quantize_tensor, dequantize_tensor, Format and FORMATS (weights/formats.py), and
quantize_model and quantized_copy (weights/walker.py). Run as a program, this file hands over to cli/quantize.py.
"""

if __name__ == "__main__":  # before torch is imported: cli/ handles Ctrl-C and flags from the first moment on
    from cli.process import prepare

    prepare()
    from cli.quantize import main

    raise SystemExit(main())

import argparse
import functools
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

import loading.checkpoint as checkpoint
from loading.files import complete_folder
from loading.plain_files import is_gguf
from loading.quantization import stored_scheme
from loading.tokenizer import copy_files, load_tokenizer
from model import Block, Config, Transformer, scaled
from weights import formats
from weights.formats import FORMATS, SCHEMES, Format, Int4, dequantize_tensor, format_of, quantize_tensor  # noqa: F401
from weights.linears import QuantizedLinear
from weights.walker import quantize_model, quantized_copy, replace_linears  # noqa: F401

# ------------------------------------------------------------------------------------------ calibration

STORED_TYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
DAMPING = 0.01  # fraction of the mean diagonal that is added to the diagonal
BLOCK_COLUMNS = 128  # columns after whose errors all remaining columns are updated


def search_range(w: Tensor, format: Int4, importance: Tensor | None = None, steps: int = 20) -> tuple[Tensor, Tensor]:
    """(low, high) of each group (out, in / g), scaled by the factor of 1, 0.975, … 0.525 with the least squared error.

    w (out, in / g, g); importance (in / g, g): the factor of each input's error, such as its mean square.
    """
    low, high = w.amin(-1), w.amax(-1)
    min_error = torch.full_like(low, math.inf)
    best_range = low.clone(), high.clone()
    for step in range(steps):
        candidate = low * (1 - step / 40), high * (1 - step / 40)
        error = (format.dequantize(format.with_range(w, *candidate)).view_as(w) - w) ** 2
        error = (error if importance is None else error * importance).sum(-1)  # (out, in / g)
        is_better = error < min_error
        min_error = torch.where(is_better, error, min_error)
        best_range = tuple(torch.where(is_better, new, old) for new, old in zip(candidate, best_range))
    return best_range


@torch.no_grad()
def gptq(w: Tensor, hessian: Tensor, format: Int4) -> dict[str, Tensor]:
    """Int4 parts of w (out, in) that keep w @ x for inputs x with the sum of x x^T = `hessian` (in, in).

    Frantar et al., arXiv:2210.17323: columns are rounded one after the other, and the error of each is spread over the
    remaining ones by the inverse Hessian's Cholesky factor. The columns with the largest diagonal go first. The groups'
    ranges are fixed before ("static groups"), so that the stored layout stays the usual one. In float64.
    """
    w, hessian = w.double().clone(), hessian.double().clone()
    diagonal = hessian.diagonal()
    is_unused = diagonal == 0  # inputs that are always 0, for which any weight will do
    importance = diagonal.float().unflatten(0, (-1, format.group))
    diagonal[is_unused] = diagonal[~is_unused].mean() if diagonal.any() else 1  # keeps the mean, which sets the damping
    w[:, is_unused] = 0
    grouped = w.float().unflatten(1, (-1, format.group))
    parts = format.with_range(grouped, *search_range(grouped, format, importance))
    scale = formats.divisor(parts["scale"]).double().repeat_interleave(format.group, 1)  # (out, in)
    zero = parts["zero"].double().repeat_interleave(format.group, 1)
    diagonal += DAMPING * diagonal.mean()
    order = diagonal.argsort(descending=True)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian[order][:, order]))
    factor = torch.linalg.cholesky(inverse, upper=True)  # (in, in)
    codes = torch.zeros_like(w)
    for begin in range(0, w.size(1), BLOCK_COLUMNS):
        columns = order[begin : begin + BLOCK_COLUMNS]
        factor_rows, errors = factor[begin : begin + len(columns), begin:], []  # the block's, from its diagonal on
        for i, column in enumerate(columns):
            code = ((w[:, column] - zero[:, column]) / scale[:, column]).round()
            code = code.clamp(-format.center, 15 - format.center)
            error = (w[:, column] - code * scale[:, column] - zero[:, column]) / factor_rows[i, i]
            codes[:, column] = code + format.center
            w[:, columns[i + 1 :]] -= error[:, None] * factor_rows[i, i + 1 : len(columns)]
            errors.append(error)
        w[:, order[begin + len(columns) :]] -= torch.stack(errors, 1) @ factor_rows[:, len(columns) :]
    return parts | {"codes": formats.pack_bits(codes.to(torch.int32), 4)}


def input_hessian(linear: nn.Linear, run: Callable[[], object]) -> Tensor:
    """The sum of x x^T (in, in), float64, over every input x of `linear` while `run` runs."""
    total = torch.zeros(linear.in_features, linear.in_features, dtype=torch.float64, device=linear.weight.device)

    def add_input(_, inputs) -> None:
        x = inputs[0].reshape(-1, linear.in_features)  # (rows, in)
        total.add_((x.T @ x).double())

    hook = linear.register_forward_pre_hook(add_input)
    try:
        run()
    finally:
        hook.remove()
    return total


def quantize_block(block: Block, scheme: str, method: str, run: Callable[[], object]) -> float:
    """Quantize a block's Linears in the order in which they compute; return the relative error of the weights.

    `run` runs the block on the calibration text, so that a Linear's inputs come from the quantized Linears before it.
    """
    format, squares = FORMATS[scheme], [0.0, 0.0]

    def quantize(name: str, linear: nn.Linear) -> QuantizedLinear:
        w, parts = linear.weight.detach().float(), None
        if method == "gptq":
            hessian = input_hessian(linear, run)  # zeros if no token chose this expert: round its weights
            parts = gptq(w, hessian if hessian.any() else torch.eye(len(hessian), device=w.device), format)
        elif method == "search":
            grouped = w.unflatten(1, (-1, format.group))  # (out, in) -> (out, in / g, g)
            parts = format.with_range(grouped, *search_range(grouped, format))
        quantized = QuantizedLinear.from_float(linear, scheme, parts)
        formats.add_squares(squares, quantized.dequantized(torch.float32), w)
        return quantized

    replace_linears(block, quantize)
    return math.sqrt(squares[0] / max(squares[1], 1e-30))


# ---------------------------------------------------------------------------------------- command line


def check_request(args: argparse.Namespace, config: Config, stored: str | None) -> None:
    """ValueError for arguments that cannot work, before any weight is read. Sets the default of --context."""
    output = Path(args.output)
    if stored:
        raise ValueError(f"{args.checkpoint}: is stored in {stored} already; use the original")
    if args.scheme is None and (args.head or args.method != "rtn" or not is_gguf(Path(args.checkpoint))):
        raise ValueError("--scheme is missing; only a .gguf file becomes a folder of plain weights without it")
    for scheme in filter(None, (args.scheme, args.head)):
        format_of(scheme)
    if args.method != "rtn" and not isinstance(FORMATS[args.scheme], Int4):
        raise ValueError(f"--method {args.method} chooses int4 codes; {args.scheme} takes --method rtn")
    if (args.method == "gptq") != (args.calibration is not None):
        raise ValueError("--method gptq and --calibration FILE need each other")
    limit = max(1, config.max_seq_length - 1)  # BOS may lead a window
    args.context = min(512, limit) if args.context is None else args.context
    if args.samples < 1 or not 1 <= args.context <= limit:
        raise ValueError(f"--samples {args.samples} must be at least 1, --context {args.context} between 1 and {limit}")
    try:
        torch.zeros(1, device=args.device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"--device {args.device}: not available here: {str(error).splitlines()[0]}") from None
    if output.exists():
        raise ValueError(f"{output}: exists already; remove it or choose another --output")


@torch.no_grad()
def run(args: argparse.Namespace) -> None:
    """Write the quantized folder, under another name until it is complete. One layer at a time is in full precision."""
    folder, output = Path(args.checkpoint), Path(args.output)
    config = checkpoint.load_config(folder)
    check_request(args, config, stored_scheme(folder / "config.json"))
    dtypes = {"bfloat16", "float16", "float32"}
    dtype = getattr(torch, args.dtype or (config.dtype if config.dtype in dtypes else "bfloat16"))
    stored, read = checkpoint.open_folder(folder, config, args.adapter)
    config = replace(config, tie_embeddings=stored.tie_embeddings)
    for message in () if is_gguf(folder) else stored.notes:
        print(f"{folder}: {message}", file=sys.stderr)
    checkpoint.empty_model(config, torch.float32, args.scheme, args.head)  # ValueError if inputs do not divide
    if is_gguf(folder) and dtype != torch.float32:
        rounding = f"weights of other types are rounded to {str(dtype).removeprefix('torch.')}"
        print(f"{folder}: {rounding}; --dtype float32 keeps them as they are", file=sys.stderr)
    # Quantized weights are rounded once, to their codes. GPTQ's, GGUF's and merged ones may have more than 16 bits.
    tensors = checkpoint.open_shards(checkpoint.shards(folder))
    types = {reader.get_slice(name).get_dtype() for name, (_, reader) in tensors.items()}
    needs_float32 = args.method == "gptq" or is_gguf(folder) or args.adapter or types != {STORED_TYPES.get(dtype)}
    model = checkpoint.empty_model(config, torch.float32 if needs_float32 else dtype)
    names = checkpoint.names_by_shard(model)
    # compressed-tensors has one format per folder, none for an embedding; transformers no quantized experts, no MiMo.
    heads = (None,) if config.tie_embeddings else (None, args.scheme)
    is_portable = isinstance(FORMATS.get(args.scheme), formats.Int8 | formats.Fp8) and args.head in heads
    is_portable = is_portable and not config.n_experts and config.family != "mimo"
    if is_portable:  # before anything is written: a copy without the converter's file ends here
        from loading.quantized.reader import compressed_tensors_config

        compressed_tensors_config(FORMATS[args.scheme], has_head=bool(args.head))
    for module in (model.embed, model.norm, model.rope, model.lm_head):
        checkpoint.allocate(module, args.device)
    if config.tie_embeddings:
        model.lm_head.weight = model.embed.weight
    checkpoint.fill(model, names[-1], read)
    for name in ("embed", "norm", "lm_head"):
        check_finite(model.get_submodule(name), f"{folder}: {name}.")
    states = calibration_states(args, model) if args.method == "gptq" else []
    files, desc = {}, f"{args.method} {args.scheme}" if args.scheme else "unpack"
    with complete_folder(output) as partial, tqdm(model.layers, unit="layer", desc=desc) as bar:

        def write(number: int) -> None:
            file = partial / checkpoint.shard_name(number + 1, len(names))
            shard = checkpoint.names_by_shard(model)[number]
            files.update(checkpoint.write_tensors(file, model, shard, dtype, is_portable))

        for number, layer in enumerate(bar):
            checkpoint.allocate(layer, args.device)
            checkpoint.fill(model, names[number], read)
            check_finite(layer, f"{folder}: layers.{number}.")
            forward = functools.partial(run_block, model, number, states)
            if args.scheme:
                bar.set_postfix(error=f"{quantize_block(layer, args.scheme, args.method, forward):.4f}")
            states = forward()
            write(number)
            layer.to("meta")
            formats.release_memory()
        quantize_model(model, None, args.head)
        write(len(model.layers))
        copy_files(folder, partial)
        hf = checkpoint.read_json(folder / "config.json") | {"quantization": {"method": args.method}}
        hf |= {"dtype": str(dtype).removeprefix("torch.")} if args.dtype or is_gguf(folder) else {}
        checkpoint.write_config(partial, model, hf, is_portable)
        checkpoint.write_index(partial, files)
    before, after = (sum(file.stat().st_size for file in checkpoint.shards(path)) for path in (folder, output))
    ratio = f"{before / after:.2f} times smaller" if after < before else f"{after / before:.2f} times larger"
    readers = "transformers reads it as compressed-tensors" if is_portable else "other programs refuse it"
    print(f"{output}: {after / 1e6:.1f} MB, {ratio}{f'; {readers}' if args.scheme else ''}", file=sys.stderr)


def check_finite(module: nn.Module, prefix: str) -> None:
    for name, parameter in module.named_parameters():
        if not parameter.isfinite().all():
            raise ValueError(f"{prefix}{name}: weights hold NaN or infinity; a scale cannot be taken over them")


def calibration_states(args: argparse.Namespace, model: Transformer) -> list[Tensor]:
    """Embedded windows, spread evenly over the calibration text, in batches (8, T, D)."""
    tokenizer = load_tokenizer(args.checkpoint)
    try:
        text = Path(args.calibration).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{args.calibration}: not UTF-8 text: {error}") from None
    ids = tokenizer.encode(text, bos=False)
    size = args.context
    count = min(args.samples, len(ids) // size)
    if count < 1:
        raise ValueError(f"{args.calibration}: {len(ids)} tokens are fewer than one window of {size}")
    stride = len(ids) // count
    bos = tokenizer.encode("")  # empty where encoding a text adds no BOS
    rows = torch.tensor([bos + ids[i * stride : i * stride + size] for i in range(count)], device=args.device)
    return [scaled(model.embed(batch), model.config.embed_scale) for batch in rows.split(8)]


def run_block(model: Transformer, number: int, states: list[Tensor]) -> list[Tensor]:
    """The outputs of layer `number` for its inputs (B, T, D)."""
    if not states:
        return []
    pos = torch.arange(states[0].size(1), device=states[0].device)[None]  # (1, T)
    rope = model.rope.by_type(pos)[model.rope_types[number]]
    visible = model.visible_by_window(pos, None, states[0].dtype)[model.windows[number]]
    return [model.layers[number](x, pos, rope, visible, None) for x in states]
