"""The work of `python quantize.py`: a folder or a GGUF file in, a quantized folder out.

    run                  reads, quantizes and writes, one layer at a time
    calibration_states   the windows of a text that GPTQ reads

One layer at a time is in full precision. quantize.py chooses the codes, and loading/saving.py
writes the files.
"""

import functools
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

import loading.models as models
import loading.saving as saving
from cli.exits import print_status
from cli.options import QuantizeOptions
from decoding.errors import UserError
from loading.checkpoint import Checkpoint
from loading.config import text_part
from loading.files import complete_folder, shard_name, stored_dtype, write_index
from loading.plain_files import error_prefix, utf8_text
from loading.stored import Stored
from loading.target import pick_device
from loading.tokenizer import copy_files, load_tokenizer
from model import Config, Transformer
from quantize import quantize_block
from weights.formats import FORMATS, check_finite, release_memory
from weights.walker import quantize_model

BATCH = 8  # windows of the calibration text that run at once


@torch.no_grad()
def run(options: QuantizeOptions) -> None:
    """Write the quantized folder, under another name until it is complete."""
    checkpoint = Checkpoint(options.checkpoint, options.adapter)
    options = replace(options, context=window_length(options, checkpoint))
    source = checkpoint.source
    config = source.config
    dtype = models.plain_dtype(options.dtype, config.dtype)
    print_notes(checkpoint, source.notes, dtype)
    # Refuse early if inputs do not divide into groups, or if no file can hold the parts.
    schemes = models.same_schemes(config, options.scheme, options.head_scheme)
    quantized = models.empty_model(config, torch.float32, schemes)
    models.expected_tensors(config, quantized)
    is_portable = transformers_can_read(options, config)
    if is_portable:  # now, and not when the first layer has been quantized
        import loading.quantized.compressed_tensors  # noqa: F401
    needs_float32 = options.method == "gptq" or has_long_weights(checkpoint, dtype)
    model = models.empty_model(config, torch.float32 if needs_float32 else dtype)
    load_ends(model, source.tensors, pick_device(options.device), options.checkpoint)
    states = calibration_states(options, model) if options.method == "gptq" else []
    megabytes = folder_megabytes(options.checkpoint)
    with complete_folder(Path(options.output)) as partial:
        # First: weights that are mapped can be read when their folder is gone.
        copy_files(checkpoint.path, partial)
        files = write_shards(partial, model, source.tensors, options, dtype, is_portable, states)
        hf = text_part(checkpoint.hf) | {"quantization": {"method": options.method}}
        if options.dtype or checkpoint.is_gguf:
            hf["dtype"] = models.dtype_name(dtype)
        saving.write_config(partial, model, hf, is_portable)
        write_index(partial, files)
    print_sizes(options, megabytes, is_portable)


def window_length(options: QuantizeOptions, checkpoint: Checkpoint) -> int:
    """Tokens of a calibration window. UserError for a checkpoint or a --context that cannot
    work."""
    if checkpoint.stored_scheme:
        stored = checkpoint.stored_scheme
        raise UserError(f"{checkpoint.path}: is stored in {stored} already; use the original")
    limit = max(1, checkpoint.config.max_seq_length - 1)  # BOS may lead a window
    context = options.context or min(512, limit)
    if context > limit:
        raise UserError(f"--context {context} must lie between 1 and {limit}")
    return context


def print_notes(checkpoint: Checkpoint, notes: tuple[str, ...], dtype: torch.dtype) -> None:
    """What a user should know of the weights that are read."""
    if not checkpoint.is_gguf:
        for message in notes:
            print_status(f"{checkpoint.path}: {message}")
    elif dtype != torch.float32:
        print_status(
            f"{checkpoint.path}: weights of other types are rounded to {models.dtype_name(dtype)};"
            " --dtype float32 keeps them as they are"
        )


def has_long_weights(checkpoint: Checkpoint, dtype: torch.dtype) -> bool:
    """Do weights need float32 before quantization? Those of a GGUF file and merged LoRA weights
    have more precision than `dtype`, and should be rounded only once, to their codes."""
    if checkpoint.is_gguf or checkpoint.adapter:
        return True
    types = {tensor.get_dtype() for tensor in checkpoint.tensors.values()}
    return types != {stored_dtype(dtype)}


def transformers_can_read(options: QuantizeOptions, config: Config) -> bool:
    """Can the folder be stored as compressed-tensors? These have one format per folder, none for an
    embedding; transformers reads no quantized experts, no MiMo and no Qwen-VL without vision."""
    if config.n_experts or config.family in ("mimo", "qwen2_5_vl_text", "qwen3_vl_text"):
        return False
    heads = [None] if config.tie_embeddings else [None, options.scheme]
    return (
        options.scheme is not None
        and FORMATS[options.scheme].is_portable
        and options.head_scheme in heads
    )


def load_ends(
    model: Transformer, tensors: dict[str, Stored], device: torch.device, source: str
) -> None:
    """Read what lies before and behind the layers."""
    for module in (model.embed, model.norm, model.rope, model.lm_head):
        models.allocate(module, device)
    if model.config.tie_embeddings:
        model.lm_head.weight = model.embed.weight
    models.load_parameters(model, saving.names_by_shard(model)[-1], tensors)
    for name in ("embed", "norm", "lm_head"):
        check_parameters(getattr(model, name), f"{source}: {name}.")


def write_shards(
    folder: Path,
    model: Transformer,
    tensors: dict[str, Stored],
    options: QuantizeOptions,
    dtype: torch.dtype,
    is_portable: bool,
    states: list[Tensor],
) -> dict[str, str]:
    """Read, quantize and write the layers one by one, then the ends; returns the index of the
    files. `states`: the inputs of the first layer to calibrate with."""
    names = saving.names_by_shard(model)
    files = {}

    def write(number: int) -> None:
        file = folder / shard_name(number + 1, len(names))
        shard = saving.names_by_shard(model)[number]
        files.update(saving.write_tensors(file, model, shard, dtype, is_portable))

    title = f"{options.method} {options.scheme}" if options.scheme else "unpack"
    with tqdm(model.layers, unit="layer", desc=title, disable=None) as bar:
        for number, layer in enumerate(bar):
            models.allocate(layer, options.device)
            models.load_parameters(model, names[number], tensors)
            check_parameters(layer, f"{options.checkpoint}: layers.{number}.")
            forward = functools.partial(run_block, model, number, states)
            if options.scheme:
                error = quantize_block(layer, options.scheme, options.method, forward)
                bar.set_postfix(error=f"{error:.4f}")
            states = forward()
            write(number)
            layer.to("meta")
            release_memory()
    quantize_model(model, None, options.head_scheme)
    write(len(model.layers))
    return files


def folder_megabytes(path: str) -> float:
    return sum(file.stat().st_size for file in Checkpoint(path).files) / 1e6


def print_sizes(options: QuantizeOptions, before: float, is_portable: bool) -> None:
    """The folder's size, next to the original's, and who reads it."""
    after = folder_megabytes(options.output)
    readers = ""
    if is_portable:
        readers = "; transformers reads it as compressed-tensors"
    elif options.scheme:
        readers = "; other programs refuse it"
    print_status(f"{options.output}: {after:.1f} MB of {before:.1f} MB{readers}")


def check_parameters(module: nn.Module, prefix: str) -> None:
    for name, parameter in module.named_parameters():
        check_finite(parameter, f"{prefix}{name}: ")


def calibration_states(options: QuantizeOptions, model: Transformer) -> list[Tensor]:
    """Embedded windows, spread evenly over the calibration text, in batches (BATCH, T, D)."""
    tokenizer = load_tokenizer(options.checkpoint)
    with error_prefix(options.calibration):
        text = utf8_text(Path(options.calibration).read_bytes())
    ids = tokenizer.encode(text, bos=False)
    size = options.context
    count = min(options.samples, len(ids) // size)
    if count < 1:
        raise UserError(
            f"{options.calibration}: its {len(ids)} tokens are fewer than one window of {size};"
            " give a longer text, or a smaller --context"
        )
    stride = len(ids) // count
    bos = tokenizer.encode("")  # empty where encoding a text adds no BOS
    windows = [bos + ids[begin : begin + size] for begin in range(0, count * stride, stride)]
    rows = torch.tensor(windows, device=options.device)  # (count, T)
    return [model.embedded(batch) for batch in rows.split(BATCH)]


def run_block(model: Transformer, number: int, states: list[Tensor]) -> list[Tensor]:
    """The outputs of layer `number` for its inputs (B, T, D)."""
    if not states:
        return []
    T = states[0].size(1)
    pos = torch.arange(T, device=states[0].device)[None]  # (1, T)
    rope = model.rope.by_type(pos, T)[model.rope_types[number]]
    visible = model.visible_by_window(pos, None, states[0].dtype)[model.windows[number]]
    return [model.layers[number](x, pos, rope, visible, None) for x in states]
