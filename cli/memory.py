"""The memory of a session, added up before its weights are read: a lower bound, without activations
and kernels."""

from pathlib import Path

import torch

from cli.errors import free_memory
from cli.options import Options
from cli.report import cached_bytes
from decoding.errors import UserError
from decoding.runner import cache_class
from loading.checkpoint import Checkpoint
from loading.draft_types import draft_type_of
from loading.models import empty_model, pick_dtype, same_schemes
from loading.quantization import choose_schemes
from loading.target import Target
from model import Config
from tp import ALONE, Ranks
from weights.linears import QuantizedLinear
from weights.schemes import choose_head_scheme
from weights.walker import named_linears


def check_memory(
    options: Options, target: Target, device: torch.device, ranks: Ranks, rows: int, length: int
) -> None:
    """UserError for `rows` rows of `length` positions that cannot fit in the free memory."""
    free = ranks.broadcast_object(free_memory(device))  # measured before any rank loads
    try:
        weights, per_position, max_length = session_bytes(options, target, device, ranks)
    except UserError:
        return  # loading reports the faults of files, with their names
    caches = rows * min(length, max_length) * per_position
    if weights + caches <= free:
        return
    sizes = f"weights {weights / 1e9:.4g}, caches {caches / 1e9:.4g}"
    raise UserError(
        f"{options.model.source}: needs {(weights + caches) / 1e9:.4g} GB or more ({sizes}),"
        f" but {free / 1e9:.4g} GB of memory are free; smaller weights need less, such as"
        f" --quantize int4-g32, and so do fewer rows or a smaller --max_seq_length"
    )


def session_bytes(
    options: Options, target: Target, device: torch.device, ranks: Ranks
) -> tuple[int, int, int]:
    """(bytes of the weights of target and draft, bytes of one position's keys and values, the
    target's positions). A draft of a few layers, such as EAGLE-3, counts with its files."""
    chosen = options.model
    draft = options.draft
    models = []
    weights = 0

    def add(config: Config, schemes: dict[str, str | None], ranks: Ranks) -> None:
        dtype = pick_dtype(chosen.dtype, config.dtype, device)
        models.append(empty_model(config, dtype, schemes, ranks))

    if chosen.random_weights:
        head_scheme = choose_head_scheme(chosen.quantize, chosen.quantize_head)
        add(target.config, same_schemes(target.config, chosen.quantize, head_scheme), ranks)
    else:
        source = target.checkpoint.source
        schemes = choose_schemes(source, Path(), chosen.quantize, chosen.quantize_head)
        add(source.config, schemes, ranks)
    if draft.checkpoint:
        checkpoint = Checkpoint.of(draft.checkpoint)
        if draft_type_of(checkpoint.hf) in ("model", "pard"):
            source = checkpoint.source
            schemes = choose_schemes(source, Path(), draft.quantize)
            add(source.config, schemes, ranks if draft.sharded else ALONE)
        else:
            weights = sum(file.stat().st_size for file in checkpoint.files)
    for model in models:
        weights += sum(parameter.nbytes for parameter in model.parameters())
        for name, linear in named_linears(model):
            # On a GPU pack_experts stacks the stored parts, which then stay as they are.
            is_stacked = "experts" in name and device.type != "cpu"
            if isinstance(linear, QuantizedLinear) and not is_stacked:
                weights += linear.held_bytes(device.type) - linear.stored_bytes
    per_position = cached_bytes(models, cache_class(options.engine.cache_type))
    return weights, per_position, models[0].config.max_seq_length
