"""A Hugging Face folder or a GGUF file -> Transformer, and back to a folder.

    load_config         config.json -> Config
    load_model          config.json + *.safetensors -> Transformer, filled tensor by tensor, quantized on the way
    random_model        the same shapes with random weights, to measure without a download
    save_model          Transformer -> config.json + safetensors, the inverse of load_model, quantized or not

The model is built on the meta device and every weight is copied once, from the mapped file into its (fused) matrix, so
that loading needs the weights' own memory and no more. All headers are checked before the first byte is copied. Other
programs' quantized folders are read by quantized/reader.py, GGUF files by gguf.py.
"""

import json
import math
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from loading.adapter import adapter_hash, merging_reader
from loading.config import config_from_hf, text_part
from loading.families import FAMILIES, family_of
from loading.files import (
    check_headers,
    fingerprints,
    has_separate_head,
    one_line,
    open_shards,
    read_json,
    save_tensors,
    select_text_model,
    shard_name,
    shards,
    tensor_reader,
    write_atomically,
    write_index,
)  # fmt: skip
from loading.plain_files import error_prefix, is_gguf, plain_file
from loading.quantization import QUICKDRAFT_CONFIG, StoredForm, max_group, read_stored_form, resolve_schemes
from loading.weight_names import pieces, sources
from model import Config, Transformer
from tp import ALONE, Ranks, check_divisible, connect, fill_shard, shard, shard_spec, shrink_to_shard, source_rows
from weights import formats, linears, walker
from weights.formats import FORMATS
from weights.linears import QuantizedLinear
from weights.walker import named_linears, quantized_linears

DTYPES = ("BF16", "F16", "F32", "F64")  # stored types that weights can be read from
PART_DTYPES = {
    torch.uint8: "U8", torch.int8: "I8", torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32",
    torch.float8_e4m3fn: "F8_E4M3",
}  # fmt: skip

# ---------------------------------------------------------------------------------------------- config


def load_config(checkpoint_dir: str | Path) -> Config:
    """The Config of a folder or GGUF file. ValueError names the file, the key and the value that cannot be used."""
    return read_config(Path(checkpoint_dir) / "config.json")


def read_config(file: Path) -> Config:
    """The Config of one config.json. ValueError begins with the path that the user gave."""
    folder = file.parent
    if not folder.is_dir() and not is_gguf(folder):
        if folder.is_file():
            raise ValueError(f"{plain_file(folder, sys.maxsize)}: neither a folder nor a GGUF file")
        raise ValueError(f"{folder}: no such folder or GGUF file")
    hf = read_json(file)
    try:
        find_layout(hf)  # refuses unsupported quantization
        return config_from_hf({**hf, "quantization_config": None})
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: {one_line(error).removeprefix('config.json: ')}") from None


def expected_tensors(config: Config, model: Transformer) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Hugging Face name -> (shape, supported stored types) of every tensor that the model needs."""
    return {
        source: (tuple(part.shape), DTYPES if is_plain(name) else (PART_DTYPES[part.dtype],))
        for name, parameter in model.named_parameters()
        for source, part in pieces(config, name, parameter)
    }


def is_plain(name: str) -> bool:
    """Is this parameter in full precision? Parts of quantized matrices are read and written in their own dtype."""
    return name.endswith((".weight", ".bias", ".sinks"))


# -------------------------------------------------------------------------------------------- building


def empty_model(
    config: Config, dtype: torch.dtype, scheme: str | None = None, head: str | None = None, ranks: Ranks = ALONE,
    overrides: Mapping[str, str | None] = MappingProxyType({}),
) -> Transformer:  # fmt: skip
    """A Transformer, or one rank's shard of it, on the meta device: shapes without memory.

    `scheme` is that of the blocks' Linears, `head` that of lm_head; `overrides` has the schemes of Linears that differ
    ({"layers.3.ffn.down": None}). ValueError for a head without a scheme, and for inputs that do not divide.
    """
    if head and not scheme:
        raise ValueError(f"head {head} (--quantize_head) needs a scheme of the other matrices (--quantize)")
    with torch.device("meta"):
        model = Transformer(config).to(dtype)
    shrink_to_shard(model, ranks)

    def empty(name: str, linear: nn.Module) -> QuantizedLinear | None:
        target_scheme = overrides.get(name, head if name == "lm_head" else scheme)
        if target_scheme is None:
            return None
        formats.check_columns(target_scheme, linear.in_features, name.replace(".attention", "").replace(".ffn", ""))
        return QuantizedLinear.empty_like(linear, target_scheme)

    return walker.replace_linears(model, empty) if scheme or overrides else model


def allocate(module: nn.Module, device: str | torch.device) -> nn.Module:
    """Give a meta module uninitialised memory on a device. A model's tied head stays tied."""
    # Not to_empty: its empty_like imports sympy for a meta tensor, a fifth of the start-up time.
    module._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
    if isinstance(module, Transformer) and module.config.tie_embeddings and isinstance(module.lm_head, nn.Linear):
        module.lm_head.weight = module.embed.weight
    return module.requires_grad_(False).eval()


def fill(model: Transformer, names: Iterable[str], read: Callable[[str], Tensor], ranks: Ranks = ALONE) -> None:
    """Copy the stored tensors of these parameters, or this rank's shards of them, into the parameters. `read` returns
    the tensor of a Hugging Face name."""
    for name in names:
        spec = shard_spec(name.rsplit(".", 1)[0])
        targets = list(pieces(model.config, name, model.get_parameter(name), ranks))
        for number, (source, part) in enumerate(targets):
            stored = read(source)
            if not is_plain(name):
                model.get_submodule(name.rpartition(".")[0]).check_part(source, stored)
            fill_shard(part, stored, spec, number, model.config, ranks, len(targets) == 1)


def open_folder(
    folder: Path, config: Config, adapter: str | Path | None = None
) -> tuple[StoredForm, Callable[[str], Tensor]]:
    """(form, read) of a folder whose headers are checked; `read` returns the tensor of a Hugging Face name, with the
    LoRA folder `adapter` merged.

    A head that differs from the embedding is not tied to it, whatever config.json says, as in transformers.
    """
    hf = read_json(folder / "config.json")
    readers = open_shards(shards(folder))
    if FAMILIES[config.family].merges_experts:
        from loading.quantized.merged_experts import split_experts

        readers = split_experts(readers)
    readers, notes = select_text_model(readers, family_of(hf))
    if config.tie_embeddings and has_separate_head(readers, [config.vocab_size, config.dim]):
        config = replace(config, tie_embeddings=False)
        notes += ("tie_word_embeddings is true, but lm_head.weight differs from the embedding and is used as the head",)
    form, read = open_tensors(folder, config, readers)
    if adapter is not None:
        if form.scheme or form.overrides or form.requantize_to:
            raise ValueError(f"--adapter {adapter}: {folder} is stored quantized; merge into the original weights")
        expected = expected_tensors(config, empty_model(config, torch.float32))
        shapes = {name: shape for name, (shape, _) in expected.items()}
        read = merging_reader(Path(adapter), shapes, config.tie_embeddings, read)
    return form._replace(notes=notes + form.notes, tie_embeddings=config.tie_embeddings), read


def find_layout(hf: dict):
    """The Layout of another program's weights, by config.json; None for plain weights and ours."""
    if hf.get("quantization_config") in (None, {}, QUICKDRAFT_CONFIG):
        return None
    from loading.quantized import detection

    return detection.find_layout(hf)


def open_tensors(folder: Path, config: Config, readers: dict) -> tuple[StoredForm, Callable[[str], Tensor]]:
    file = folder / "config.json"
    if is_gguf(folder):
        return open_gguf(folder, config, readers)
    hf = read_json(file)
    layout = find_layout(hf)
    if layout is not None:
        return open_other_format(folder, config, readers, layout)
    form = read_stored_form(file)
    read = tensor_reader(readers)
    if FAMILIES[config.family].merges_experts:
        from loading.quantized import merged_experts

        if merged_experts.is_mxfp4(hf):
            form = StoredForm(overrides=expert_schemes(config, readers))
            read = merged_experts.tensor_reader(readers)
    model = empty_model(config, torch.float32, form.scheme, form.head, overrides=form.overrides)
    check_headers(folder, expected_tensors(config, model), readers, config.tie_embeddings)
    return form, read


def open_other_format(folder: Path, config: Config, readers: dict, layout) -> tuple[StoredForm, Callable]:
    """`open_tensors` of a folder that another program quantized, in this Layout."""
    from loading.quantized import reader

    plain = empty_model(config, torch.float32)
    shapes = {
        name: {
            source.removesuffix(".weight"): tuple(part.shape)
            for source, part in pieces(config, f"{name}.weight", linear.weight)
        }
        for name, linear in named_linears(plain)
        if name != "lm_head" or not config.tie_embeddings
    }
    with error_prefix(folder):
        quantized = reader.find_matrices(layout, readers, shapes)
        expected = reader.expected_tensors(quantized, expected_tensors(config, plain), readers)
        check_headers(folder, expected, readers, config.tie_embeddings)
        quantized = reader.check_values(quantized)
    scheme, reason = reader.choose_scheme(quantized)
    notes = quantized.layout.notes + ((reason,) if reason else ())
    head, overrides = scheme if "lm_head" in quantized.matrices else None, dict.fromkeys(quantized.unquantized)
    form = StoredForm(scheme, head, overrides, notes=notes)
    if reason:
        form = StoredForm(overrides=overrides, requantize_to=scheme, notes=notes)
    return form, reader.tensor_reader(quantized, scheme, tensor_reader(readers))


def expert_schemes(config: Config, readers: dict) -> dict[str, str]:
    """The experts of gpt-oss's folder that are stored in MXFP4, by our names."""
    names = (name for name, _ in named_linears(empty_model(config, torch.float32)))
    return {name: "mxfp4" for name in names if sources(config.family, f"{name}.codes")[0] in readers}


def open_gguf(file: Path, config: Config, readers: dict) -> tuple[StoredForm, Callable[[str], Tensor]]:
    """`open_folder` of a GGUF file, in which every matrix has its own type."""
    model = empty_model(config, torch.float32)
    check_headers(file, expected_tensors(config, model), readers, config.tie_embeddings)
    sources_by_name = {
        name.removesuffix(".weight"): sources(config.family, name)
        for name, x in model.named_parameters()
        if x.dim() > 1
    }
    if config.tie_embeddings:
        sources_by_name["lm_head"] = sources_by_name.pop("embed")
    from loading import gguf

    schemes, plain_types = gguf.find_schemes(readers, sources_by_name)
    notes = (f"tensors that no scheme keeps exactly load as plain weights: {plain_types}",) if plain_types else ()
    return StoredForm(overrides=schemes, notes=notes), gguf.tensor_reader(readers)


@torch.no_grad()
def pick_dtype(requested: str | None, stored: str | None, device: torch.device) -> torch.dtype:
    """--dtype, or the checkpoint's own where it is one that we compute in, else bfloat16. ValueError where the device
    cannot multiply in it."""
    name = requested or (stored if stored in ("bfloat16", "float16", "float32") else "bfloat16")
    dtype = getattr(torch, name)
    try:
        torch.mm(*torch.ones(2, 1, 1, dtype=dtype, device=device))
    except (RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--dtype {name}: {device} cannot compute in it ({reason}); try --dtype float32") from None
    return dtype


def load_model(
    checkpoint_dir: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    quantize: str | None = None,
    tp: Ranks | None = None,
    progress: bool = False,
    head: str | None = None,
    adapter: str | Path | None = None,
    pack: bool = True,
) -> Transformer:
    """Load a Hugging Face folder (config.json and safetensors; no tokenizer is needed) or a GGUF file.

    `quantize`: a scheme of quantize.py. Every matrix is quantized as it is read, so that the model is never held in
        full precision. Without it a quantized folder loads as stored, and so do a GGUF file's blocks of 4 and 8 bits.
        Another program's folder that no scheme holds exactly is quantized again, with a note on stderr.
    `head`: a scheme for lm_head and a tied embedding, which otherwise stay as they are.
    `adapter`: a LoRA folder of PEFT, merged as the weights are read.
    `tp`: the Ranks over which the model is sharded. This process reads and holds its shard alone.
    `progress`: show a bar on stderr.
    `pack`: False leaves quantized matrices as stored, to be saved, copied or packed later.

    ValueError names file and tensor, before any weight is copied, or a tensor with NaN or infinity.
    """
    folder, ranks = Path(checkpoint_dir), tp or ALONE
    config = load_config(folder)
    form, read = open_folder(folder, config, adapter)
    config = replace(config, tie_embeddings=form.tie_embeddings)
    scheme, head, overrides = resolve_schemes(form, folder, quantize, head)
    num_requantized = len(form.overrides) - len(overrides)  # matrices stored in 4 and 8 bits, with `quantize`
    with error_prefix(folder):
        check_divisible(config, ranks.world, max_group(scheme, overrides))
    ranks.check_same(lambda: fingerprints(folder, open_shards(shards(folder))))
    ranks.check_same(lambda: {"its adapter": adapter and adapter_hash(adapter)})
    model = allocate(empty_model(config, dtype, scheme, head, ranks, overrides), device)
    stored_names = {name for name, _ in named_linears(model)} if form.scheme else overrides
    squares, total = [0.0, 0.0], sum(parameter.nbytes for parameter in model.parameters())
    bar = tqdm(total=total, unit="B", unit_scale=True, desc=f"load {folder.name}", disable=not progress)
    with bar, error_prefix(folder):
        is_requantized = form.requantize_to or num_requantized
        model = load_weights(model, read, ranks, pack, stored_names, bar.update, squares if is_requantized else None)
    notes, error = list(form.notes), math.sqrt(squares[0] / max(squares[1], 1e-30))
    if form.requantize_to:
        notes[-1] += f"; quantized again to {scheme}, relative error {error:.4f}"
    if num_requantized:
        count = f"{num_requantized} matrices of 4 and 8 bits"
        notes.append(f"{count} are quantized again, as requested, relative error {error:.4f}")
    for message in notes if ranks.rank == 0 else ():
        print(f"{folder}: {message}", file=sys.stderr)
    return model


def load_weights(
    model: Transformer, read: Callable[[str], Tensor], ranks: Ranks, pack: bool, stored_names: Collection[str] = (),
    report_bytes: Callable[[int], object] = int, squares: list[float] | None = None,
) -> Transformer:  # fmt: skip
    """Fill an allocated model tensor by tensor, pack and connect it. `read` returns parts of the quantized matrices
    `stored_names`, and weights of the others, which are quantized as they are read."""
    for name, parameter in model.named_parameters():
        module, _, part = name.rpartition(".")
        if module in stored_names or is_plain(name):
            fill(model, [name], read, ranks)
        elif part == "codes":
            quantize_into(model.get_submodule(module), module, model.config, read, ranks, squares)
        report_bytes(parameter.nbytes)
    if pack:
        walker.pack_quantized(model)
    return connect(model, ranks)


def quantize_into(
    linear: QuantizedLinear, name: str, config: Config, read: Callable[[str], Tensor], ranks: Ranks,
    squares: list[float] | None,
) -> None:  # fmt: skip
    """Read the weights of one QuantizedLinear, one tensor at a time, quantize them and fill in the parts. The sums of
    squares of the error and of the weights are added to `squares`."""
    is_tied, spec = name == "lm_head" and config.tie_embeddings, shard_spec(name)
    rows, format = source_rows(spec, linear.out_features, config, ranks), linear.format
    begin, names = 0, sources(config.family, "embed.weight" if is_tied else f"{name}.weight")
    shards_rows = spec.dim == 1 and ranks.world > 1
    if format.scope == "matrix" or (shards_rows and format.scope == "rows" and not format.takes_row_max):
        weight = torch.cat([read(source) for source in names]).to(linear.codes.device)  # (out, in) of all ranks
        with error_prefix(names[0]):
            parts = formats.quantize_tensor(weight, linear.scheme)
        for part_name, part in parts.items():
            fill_shard(getattr(linear, part_name), part, spec, 0, config, ranks, is_stacked=True)
        if squares:
            formats.add_squares(squares, formats.dequantize_tensor(parts, linear.scheme), weight)
        return formats.release_memory()
    for number, source in enumerate(names):
        weight = shard(read(source), spec, number, config, ranks, is_stacked=len(names) == 1).to(linear.codes.device)
        if len(weight) < rows[number]:  # a vocabulary's padding
            weight = F.pad(weight, (0, 0, 0, rows[number] - len(weight)))
        row_max = None
        if shards_rows and format.takes_row_max:
            row_max = ranks.max(weight.abs().amax(1).float())  # a row's scale is that of the full row
        with error_prefix(source):
            parts = formats.quantize_tensor(weight, linear.scheme, row_max)
        linear.fill(slice(begin, begin + len(weight)), parts)
        begin += len(weight)
        if squares:
            formats.add_squares(squares, formats.dequantize_tensor(parts, linear.scheme), weight)
        formats.release_memory()


@torch.no_grad()
def random_model(
    config: Config, *, device: str | torch.device = "cpu", dtype: torch.dtype = torch.bfloat16, seed: int = 0,
    quantize: str | None = None, head: str | None = None, tp: Ranks | None = None, pack: bool = True,
) -> Transformer:  # fmt: skip
    """A model of random weights: normal(0, 0.02) matrices, unit norms and zero biases, drawn on the device and
    quantized one by one. Every rank draws all numbers and keeps its shard."""
    ranks = tp or ALONE
    check_divisible(config, ranks.world, max_group(quantize))
    shapes = expected_tensors(config, empty_model(config, dtype))
    generator = torch.Generator(device=device).manual_seed(seed)

    def draw(name: str) -> Tensor:
        shape, _ = shapes[name]
        if len(shape) == 1:
            return torch.full(shape, 0.0 if name.endswith("bias") else 1.0)
        return torch.empty(shape, dtype=dtype, device=device).normal_(0, 0.02, generator=generator)

    model = allocate(empty_model(config, dtype, quantize, head, ranks), device)
    return load_weights(model, draw, ranks, pack)


# --------------------------------------------------------------------------------------------- writing


def save_model(model: Transformer, checkpoint_dir: str | Path, hf: dict) -> None:
    """Write config.json (`hf` with the current schemes) and safetensors under Hugging Face names: model.safetensors, or
    for a quantized model a file per layer and an index, so that saving takes a layer's memory.

    config.json is deleted first and written last, so that an interrupted write leaves nothing that load_model would
    load. ValueError for a packed model.
    """
    linears.check_unpacked(model, "saved")
    quantization_entry(model)
    folder = Path(checkpoint_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").unlink(missing_ok=True)
    groups = names_by_shard(model) if quantized_linears(model) else [[name for name, _ in model.named_parameters()]]
    files = {}
    for number, group in enumerate(groups, 1):
        file = "model.safetensors" if len(groups) == 1 else shard_name(number, len(groups))
        files |= write_tensors(folder / file, model, group)
    other = "model.safetensors.index.json" if len(groups) == 1 else "model.safetensors"
    (folder / other).unlink(missing_ok=True)  # an earlier model's
    if len(groups) > 1:
        write_index(folder, files)
    write_config(folder, model, hf)


def names_by_shard(model: Transformer) -> list[list[str]]:
    """The parameters in each file of a quantized folder: those of each layer, and last all others."""
    names = [name for name, _ in model.named_parameters()]
    layers = [[name for name in names if name.startswith(f"layers.{i}.")] for i in range(len(model.layers))]
    return [*layers, [name for name in names if not name.startswith("layers.")]]


def quantization_entry(model: Transformer) -> dict:
    """The entry "quantization" of a model's config.json; empty in full precision. ValueError for several schemes."""
    scheme_by_name = {name: getattr(linear, "scheme", None) for name, linear in named_linears(model)}
    head = scheme_by_name.pop("lm_head")
    unquantized = [name for name, scheme in scheme_by_name.items() if not scheme]
    schemes = sorted({*scheme_by_name.values()} - {None})
    if len(schemes) > 1 or (head and not schemes):
        forms = f"its blocks are in {' and '.join(schemes) or 'full precision'}, its head in {head or 'full precision'}"
        raise ValueError(f"no folder holds such a model: {forms}; quantize all blocks to one scheme")
    return {"scheme": schemes[0], "head": head} | ({"kept": unquantized} if unquantized else {}) if schemes else {}


def write_config(folder: Path, model: Transformer, hf: dict, is_portable: bool = False) -> None:
    """Write a config.json with the schemes of this model. With `is_portable`, other programs read the folder as
    compressed-tensors; otherwise they refuse it."""
    old_entry = hf.get("quantization") or {}
    hf = {**text_part(hf), "tie_word_embeddings": model.config.tie_embeddings}
    for key in ("quantization", "quantization_config", "auto_map"):  # the last names code, which stays behind
        hf.pop(key, None)
    entry = quantization_entry(model)
    if entry:
        hf["quantization"] = old_entry | entry
        hf["quantization_config"] = QUICKDRAFT_CONFIG
        if is_portable:
            from loading.quantized.reader import compressed_tensors_config

            format = FORMATS[entry["scheme"]]
            hf["quantization_config"] = compressed_tensors_config(format, has_head=bool(entry["head"]))
    text = json.dumps(hf, indent=2) + "\n"
    write_atomically(folder / "config.json", lambda partial: partial.write_text(text))


def write_tensors(
    file: Path, model: Transformer, names: list[str], dtype: torch.dtype | None = None, is_portable: bool = False
) -> dict[str, str]:
    """Write these parameters under their Hugging Face names, float32 weights as `dtype`, parts under
    compressed-tensors' names with `is_portable`. Return {tensor name: file name}."""
    tensors = {}
    for name in names:
        for source, part in pieces(model.config, name, model.get_parameter(name).detach()):
            if is_portable and not is_plain(name):
                from loading.quantized.reader import compressed_tensors_part

                source, part = compressed_tensors_part(source, part)
            is_cast = dtype and is_plain(name) and part.dtype == torch.float32
            tensors[source] = part.to(dtype if is_cast else part.dtype).contiguous().clone()
            if is_cast and not tensors[source].isfinite().all() and part.isfinite().all():
                raise ValueError(f"{source}: its weights overflow {dtype}; --dtype bfloat16 has float32's range")
    if FAMILIES[model.config.family].merges_experts:
        from loading.quantized.merged_experts import merge_experts

        tensors = merge_experts(tensors)
    save_tensors(file, tensors)
    return dict.fromkeys(tensors, file.name)
