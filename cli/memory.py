"""The memory of a session, added up before its weights are read. Sums are lower bounds, without activations."""

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from cli.errors import free_memory
from cli.load import cache_type, target_config
from cli.report import position_bytes
from loading.checkpoint import empty_model, load_config, open_folder, pick_dtype
from loading.draft_kinds import kind_of
from loading.files import read_json, shards
from loading.quantization import StoredForm, resolve_schemes
from tp import ALONE, Ranks
from weights.cpu import PackedInt8, PackedWeights
from weights.linears import KERNEL_LANES, Int4Linear, Int8Linear
from weights.walker import named_linears


def check_memory(
    args: argparse.Namespace, device: torch.device, ranks: Ranks, rows: int, length: int, min_length: float
):
    """ValueError for `rows` rows of `length` positions that cannot fit in the free memory. It names flags that make
    them fit, with `min_length` positions or more. Loading reports the faults of files."""
    free, fitting = ranks.broadcast_object(free_memory(device)), []  # measured before any rank loads
    for scheme in dict.fromkeys((args.quantize, "int8", "int4-g32")):
        try:
            weights, peak, per_position, max_length = session_bytes(args, scheme, device, ranks)
        except ValueError:  # also for a folder in another scheme, and inputs that do not divide
            if scheme == args.quantize:
                return
            continue
        length, flags = min(length, max_length), f"--quantize {scheme} " if scheme != args.quantize else ""
        caches = rows * length * per_position
        if not flags:
            sizes = [f"{size / 1e9:.4g}" for size in (max(peak, weights + caches), free, weights, peak, caches)]
        if max(peak, weights + caches) <= free:
            if not flags:
                return
            fitting.append(flags.strip())
        elif peak <= free:
            max_positions = int(free - weights) // per_position
            fitting += [f"{flags}--batch_size {max_positions // length}"] * (max_positions >= length)
            fitting += [f"{flags}--max_seq_length {max_positions // rows}"] * (max_positions // rows >= min_length)
    message = "needs {} GB or more, but {} GB of memory are free: weights {}, packing them {}, caches {}".format(*sizes)
    advice = f"this fits: {' or '.join(fitting)}" if fitting else "neither quantized weights nor smaller caches fit"
    raise ValueError(f"{args.random_weights or args.checkpoint}: {message}; {advice}")


def session_bytes(args: argparse.Namespace, quantize: str | None, device: torch.device, ranks: Ranks) -> tuple:
    """(bytes of the packed weights of target and draft, the peak of packing them, bytes of one position's keys and
    values, positions that both models have)."""
    sources = [(target_config(args), args.checkpoint, quantize, args.quantize_head, ranks, args.adapter)]
    draft, models, file_bytes = args.draft_checkpoint, [], 0
    if draft and kind_of(read_json(Path(draft) / "config.json")) not in ("model", "pard"):
        file_bytes = sum(file.stat().st_size for file in shards(Path(draft)))  # their caches are small
    elif draft:
        draft_ranks = ranks if args.draft_tp == "sharded" else ALONE
        sources.append((load_config(draft), draft, args.draft_quantize, None, draft_ranks, None))
    for config, folder, scheme, head, ranks_of_model, adapter in sources:
        dtype, form = pick_dtype(args.dtype, config.dtype, device), StoredForm(tie_embeddings=config.tie_embeddings)
        if models or not args.random_weights:
            form, _ = open_folder(Path(folder), config, adapter)
        scheme, head, overrides = resolve_schemes(form, Path(folder), scheme, head)
        config = replace(config, tie_embeddings=form.tie_embeddings)
        models.append(empty_model(config, dtype, scheme, head, ranks_of_model, overrides))
    per_position = sum(position_bytes(model, cache_type(args)).total() for model in models)
    max_length = models[0].config.max_seq_length
    if (args.draft or "").startswith("quantized:"):
        models.append(empty_model(models[0].config, dtype, args.draft.partition(":")[2], ranks=ranks).layers)
    weights = peak = file_bytes + sum(parameter.nbytes for model in models for parameter in model.parameters())
    for model in models if device.type == "cpu" else ():
        for name, linear in named_linears(model, routers=True):
            gained, extra = packing_bytes(linear, name == "lm_head" and model.config.tie_embeddings)
            weights += gained
            peak = max(peak, weights + extra)
    return weights, peak, per_position, max_length


def packing_bytes(linear: torch.nn.Module, is_tied: bool) -> tuple[int, int]:
    """(bytes that a Linear gains when it is packed for a CPU, bytes in use meanwhile beyond these). An embedding that
    is tied to it reads the stored parts. Otherwise they are freed."""
    shape = linear.out_features, linear.in_features
    parts = [part for name, part in linear.named_parameters() if name != "bias"]
    dtype = getattr(linear, "dtype", parts[0].dtype)  # of activations
    freed = 0 if is_tied else sum(part.nbytes for part in parts)
    codes, weight = (torch.empty(1, dtype=x).expand(shape) for x in (torch.int8, dtype))  # shapes without memory
    if isinstance(linear, Int4Linear):
        return codes.nbytes // 2 + 2 * dtype.itemsize * linear.scale.numel() - freed, 4 * codes.nbytes  # as int32
    if isinstance(linear, Int8Linear) and (PackedInt8.is_faster(codes) or shape[1] % KERNEL_LANES == 0):
        return is_tied * PackedInt8.is_faster(codes) * codes.nbytes, 0
    is_packed, is_plain = PackedWeights.is_faster(weight), parts[0].dtype == dtype
    gained = weight.nbytes - freed if is_packed or not is_plain else 0
    extra = weight.nbytes if is_plain else freed  # a plain one: of the probe of kernels for this shape
    return gained, extra + is_packed * weight.nbytes
