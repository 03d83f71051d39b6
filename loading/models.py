"""Config -> Transformer: built on the meta device, given memory, filled tensor by tensor and
quantized on the way.

    empty_model         the model, or one rank's shard of it, as shapes without memory
    expected_tensors    the names, shapes and types of the tensors that fill it
    same_schemes        a scheme for every Linear
    load_weights        fills an allocated model with what is stored
    random_model        the same shapes with random weights, to measure without a download

A weight that is not quantized here is copied once, from the mapped file into its (fused) matrix, so
that loading needs the memory of the weights and no more.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decoding.errors import UserError
from loading.files import Expected, stored_dtype
from loading.options import DTYPES
from loading.plain_files import error_prefix
from loading.stored import Stored, in_floats
from loading.weight_names import pieces, stored_names
from model import Config, Transformer
from tp import (
    ALONE,
    Ranks,
    check_divisible,
    connect,
    fill_shard,
    shard,
    shard_spec,
    shrink_to_shard,
    source_rows,
)
from weights import formats, walker
from weights.linears import LinearParts, QuantizedLinear
from weights.schemes import check_head

FLOAT_TYPES = ("BF16", "F16", "F32", "F64")  # stored types that weights can be read from


def expected_tensors(config: Config, model: Transformer) -> dict[str, Expected]:
    """Hugging Face name -> shape and supported types of every tensor that the model needs."""
    return {
        source: (tuple(part.shape), FLOAT_TYPES if is_plain(name) else (stored_dtype(part.dtype),))
        for name, parameter in model.named_parameters()
        for source, part in pieces(config, name, parameter)
    }


def is_plain(name: str) -> bool:
    """Is this parameter in full precision? Parts of quantized matrices are read and written in
    their own dtype."""
    return name.endswith((".weight", ".bias", ".sinks", ".selection_bias"))


def empty_model(
    config: Config,
    dtype: torch.dtype,
    schemes: Mapping[str, str | None] = MappingProxyType({}),
    ranks: Ranks = ALONE,
) -> Transformer:
    """A Transformer, or one rank's shard of it, on the meta device: shapes without memory.

    `schemes`: those of Linears ({"layers.3.ffn.down": "int8"}), or of single sources of a fused one
    ({"layers.3.attention.qkv.0": "q4_k"}); None, or no entry: full precision. UserError for inputs
    that do not divide.
    """
    with torch.device("meta"):
        model = to_dtype(Transformer(config), dtype)
    shrink_to_shard(model, ranks)
    for name in sorted({name.rpartition(".")[0] for name in schemes if name[-1].isdigit()}):
        linear = model.get_submodule(name)
        rows = source_rows(shard_spec(name), linear.out_features, config, ranks)
        model.set_submodule(name, LinearParts.empty_like(linear, rows))

    def empty(name: str, linear: nn.Module) -> QuantizedLinear | None:
        scheme = schemes.get(name)
        if scheme is None:
            return None
        location = name.replace(".attention", "").replace(".ffn", "")  # as "layers.3.down"
        formats.check_columns(scheme, linear.in_features, location)
        return QuantizedLinear.empty_like(linear, scheme)

    return walker.replace_linears(model, empty) if schemes else model


def check_shards(config: Config, schemes: Mapping[str, str | None], world: int) -> None:
    """UserError for sizes that do not divide over the ranks, and for inputs (dimension 1) that
    divide within a group that shares a scale."""
    groups = [
        formats.format_of(scheme).group
        for name, scheme in schemes.items()
        if scheme and (spec := shard_spec(name)) is not None and spec.dim == 1
    ]
    check_divisible(config, world, max(groups, default=0))


def same_schemes(
    config: Config, scheme: str | None, head_scheme: str | None = None
) -> dict[str, str | None]:
    """One scheme for the blocks, one for the head. UserError for a head's scheme alone."""
    check_head(head_scheme, scheme)
    names = [name for name, _ in walker.named_linears(empty_model(config, torch.float32))]
    return dict.fromkeys(names, scheme) | {"lm_head": head_scheme}


def to_dtype(model: Transformer, dtype: torch.dtype) -> Transformer:
    """The model in this dtype, except for routers and selection biases that stay float32."""
    model.to(dtype)
    for name, parameter in model.named_parameters():
        if is_float32(model.config, name):
            parameter.data = parameter.data.float()
    return model


def is_float32(config: Config, name: str) -> bool:
    """Is this parameter float32 in a model and a folder of any dtype?"""
    return ".selection_bias" in name or (".router." in name and config.router_float32)


def allocate(module: nn.Module, device: str | torch.device) -> nn.Module:
    """Give a meta module uninitialised memory on a device. A model's tied head stays tied."""
    # Not to_empty: its empty_like imports sympy for a meta tensor, a fifth of the start-up time.
    module._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
    if (
        isinstance(module, Transformer)
        and module.config.tie_embeddings
        and isinstance(module.lm_head, nn.Linear)
    ):
        module.lm_head.weight = module.embed.weight
    return module.requires_grad_(False).eval()


def load_parameters(
    model: Transformer,
    names: Iterable[str],
    tensors: Mapping[str, Stored],
    ranks: Ranks = ALONE,
    report_bytes: Callable[[int], object] = lambda num_bytes: None,
) -> None:
    """Fill these parameters, or this rank's shards of them. Matrices that are not stored in their
    Linear's scheme are quantized here."""
    config = model.config
    for name in names:
        parameter = model.get_parameter(name)
        module, _, part = name.rpartition(".")
        spec = shard_spec(module)
        linear = model.get_submodule(module)
        has_floats = is_plain(name)
        stored_name = name if has_floats else f"{module}.weight"
        stored = [tensors[source] for source in stored_names(config, stored_name)]
        is_stacked = len(stored) == 1  # all sources in one tensor, or a single source
        if has_floats or all(tensor.scheme == linear.scheme for tensor in stored):
            # Floats, or parts as they are stored.
            targets = pieces(config, name, parameter, ranks)
            for number, (tensor, (_, rows)) in enumerate(zip(stored, targets, strict=True)):
                values = tensor.weight(rows.dtype) if has_floats else tensor.part(part)
                fill_shard(rows, values, spec, number, config, ranks, is_stacked)
        elif part == "codes":  # once for a matrix: this fills its other parts too
            quantize_into(linear, module, config, stored, ranks)
        report_bytes(parameter.nbytes)


def plain_dtype(requested: str | None, stored: str | None) -> torch.dtype:
    """The dtype of weights that are not quantized: the requested one, or the checkpoint's own where
    it is one of those to choose from, else bfloat16."""
    default = stored if stored in DTYPES else "bfloat16"
    return getattr(torch, requested or default)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def pick_dtype(requested: str | None, stored: str | None, device: torch.device) -> torch.dtype:
    """The dtype to compute in. UserError where the device cannot multiply in it."""
    dtype = plain_dtype(requested, stored)
    try:
        torch.mm(*torch.ones(2, 1, 1, dtype=dtype, device=device))
    except (RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"--dtype {dtype_name(dtype)}: {device} cannot compute in it ({reason}); try --dtype"
            " float32"
        ) from None
    return dtype


def load_weights(
    model: Transformer,
    tensors: Mapping[str, Stored],
    ranks: Ranks,
    pack: bool,
    report_bytes: Callable[[int], object] = lambda num_bytes: None,
) -> Transformer:
    """Fill an allocated model tensor by tensor, pack and connect it."""
    names = [name for name, _ in model.named_parameters()]
    load_parameters(model, names, tensors, ranks, report_bytes)
    if pack:
        walker.pack_quantized(model)
    return connect(model, ranks)


def quantize_into(
    linear: QuantizedLinear,
    name: str,
    config: Config,
    stored: Sequence[Stored],
    ranks: Ranks,
) -> None:
    """Read the weights of one QuantizedLinear, one tensor at a time, quantize them and fill in the
    parts."""
    names = stored_names(config, f"{name}.weight")
    spec = shard_spec(name)
    format = linear.format
    device = linear.codes.device
    has_split_rows = spec.dim == 1 and ranks.world > 1
    if format.scope == "matrix" or (has_split_rows and format.scope == "rows"):
        # `quantize` needs more than this rank's shard of one source: quantize all, keep the shard.
        weight = torch.cat([tensor.weight() for tensor in stored]).to(device)  # (out, in)
        parts = quantized_parts(names[0], weight, linear.scheme)
        for part_name, part in parts.items():
            fill_shard(getattr(linear, part_name), part, spec, 0, config, ranks, is_stacked=True)
        return
    begin = 0
    is_stacked = len(names) == 1  # all sources in one tensor, or a single source
    for number, (source, tensor) in enumerate(zip(names, stored, strict=True)):
        weight = shard(tensor.weight(), spec, number, config, ranks, is_stacked).to(device)
        if is_stacked and len(weight) < linear.out_features:  # a vocabulary's padding
            weight = F.pad(weight, (0, 0, 0, linear.out_features - len(weight)))
        row_max = None
        if has_split_rows and format.scope == "row_max":
            row_max = ranks.max(weight.abs().amax(1).float())
        linear.copy_parts(
            slice(begin, begin + len(weight)),
            quantized_parts(source, weight, linear.scheme, row_max),
        )
        begin += len(weight)


def quantized_parts(
    source: str, weight: Tensor, scheme: str, row_max: Tensor | None = None
) -> dict[str, Tensor]:
    """The parts of a weight (out, in). UserError names its `source` where it holds NaN or
    infinity."""
    with error_prefix(source):
        parts = formats.quantize_tensor(weight, scheme, row_max)
    formats.release_memory()
    return parts


@torch.no_grad()
def random_model(
    config: Config,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    quantize: str | None = None,
    head_scheme: str | None = None,
    tp: Ranks | None = None,
    pack: bool = True,
) -> Transformer:
    """A model of random weights: normal(0, 0.02) matrices, vectors of ones (to which Gemma 3 adds
    its norms' offset) and zero biases, drawn on the device and quantized one by one. Every rank
    draws all numbers and keeps its shard."""
    ranks = tp or ALONE
    schemes = same_schemes(config, quantize, head_scheme)
    check_shards(config, schemes, ranks.world)
    model = empty_model(config, dtype, schemes, ranks)
    headers = expected_tensors(config, empty_model(config, dtype))
    generator = torch.Generator(device=device).manual_seed(seed)

    def draw(name: str) -> Tensor:
        shape, _ = headers[name]
        if name.endswith("bias"):
            return torch.zeros(shape)
        if len(shape) == 1:
            return torch.ones(shape)
        return torch.empty(shape, dtype=dtype, device=device).normal_(0, 0.02, generator=generator)

    return load_weights(allocate(model, device), in_floats(headers, draw), ranks, pack)
