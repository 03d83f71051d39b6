"""A Hugging Face folder or a GGUF file -> Transformer, and back to a folder.

    load_config         config.json -> Config
    load_model          config.json + *.safetensors -> Transformer, filled tensor by tensor, quantized on the way
    random_model        the same shapes with random weights, to measure without a download
    save_model          Transformer -> config.json + safetensors, the inverse of load_model, quantized or not

The model is built on the meta device and every weight is copied once, from the mapped file to its place inside its
(fused) matrix, so that loading needs the weights' own memory and no more. Everything is checked against the files'
headers before the first byte is copied. A folder whose config.json has "quantization" holds the parts of a format in
place of weights; quantized/reader.py reads one whose "quantization_config" is another program's, gguf.py a GGUF file.
This file does not know tokenizers, decoding or devices' habits.
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

import loading.gguf as gguf
import loading.quantized.merged_experts as merged
import loading.quantized.reader as foreign
from loading.config import config_from_hf, text_part
from loading.files import (  # noqa: F401 (scripts take them from here)
    check_headers,
    complete_folder,
    fingerprints,
    has_own_head,
    one_line,
    open_shards,
    read_json,
    reading,
    save_tensors,
    shard_name,
    shards,
    text_only,
    write_atomically,
    write_index,
)  # fmt: skip
from loading.quantization import Stored, largest_group, schemes_of, stored_in, stored_quantization  # noqa: F401
from loading.vocabularies import led_by, plain_file
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

# --------------------------------------------------------------------------------------------- reading


def load_config(checkpoint_dir: str | Path) -> Config:
    """The Config of a folder or GGUF file. ValueError names the file, the key and the value that cannot be used."""
    return config_of(Path(checkpoint_dir) / "config.json")


def config_of(file: Path) -> Config:
    """Config.from_hf of one file, its errors led by the file's folder."""
    folder = file.parent
    if not folder.is_dir() and not gguf.is_gguf(folder):
        if folder.is_file():
            raise ValueError(f"{plain_file(folder, sys.maxsize)}: neither a folder nor a GGUF file")
        raise ValueError(f"{folder}: no such folder or GGUF file")
    hf = read_json(file)
    try:
        foreign.layout_of(hf)  # refuses what cannot be read
        return config_from_hf({**hf, "quantization_config": None})
    except (ValueError, RecursionError) as error:
        # Put the path that the user gave in place of Config's "config.json: …".
        raise ValueError(f"{file}: {one_line(error).removeprefix('config.json: ')}") from None


def needed(config: Config, model: Transformer) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Hugging Face name -> (shape, stored types it can be read from) of every tensor that the model needs."""
    return {
        source: (tuple(part.shape), DTYPES if is_whole(name) else (PART_DTYPES[part.dtype],))
        for name, parameter in model.named_parameters()
        for source, part in pieces(config, name, parameter)
    }


def is_whole(name: str) -> bool:
    """Is this parameter no part of a quantized matrix? Parts are read and written in their own type."""
    return name.endswith((".weight", ".bias", ".sinks"))


# -------------------------------------------------------------------------------------------- building


def empty_model(
    config: Config, dtype: torch.dtype, scheme: str | None = None, head: str | None = None, ranks: Ranks = ALONE,
    given: Mapping[str, str | None] = MappingProxyType({}),
) -> Transformer:  # fmt: skip
    """A Transformer, or one rank's part of it, on the meta device: shapes without memory. `scheme` is that of its
    blocks' Linears, `head` the head's; `given` are those of Linears that differ ({"layers.3.ffn.down": None}).
    ValueError names a matrix whose inputs do not divide, and refuses a head alone, which no folder is stored with."""
    if head and not scheme:
        raise ValueError(f"head {head} (--quantize_head) needs a scheme of the other matrices (--quantize)")
    with torch.device("meta"):
        model = Transformer(config).to(dtype)
    shrink_to_shard(model, ranks)

    def empty(name: str, linear: nn.Module) -> QuantizedLinear | None:
        wanted = given.get(name, head if name == "lm_head" else scheme)
        if wanted is None:
            return None
        formats.check_columns(wanted, linear.in_features, name.replace(".attention", "").replace(".ffn", ""))
        return QuantizedLinear.empty_like(linear, wanted)

    return walker.replace_linears(model, empty) if scheme or given else model


def allocate(module: nn.Module, device: str | torch.device) -> nn.Module:
    """Give a meta module uninitialised memory on a device. A model's tied head stays tied."""
    # Not to_empty, whose empty_like imports sympy for a meta tensor: a fifth of a start's time.
    module._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
    if isinstance(module, Transformer) and module.config.tie_embeddings and isinstance(module.lm_head, nn.Linear):
        module.lm_head.weight = module.embed.weight
    return module.requires_grad_(False).eval()


def fill(model: Transformer, names: Iterable[str], read: Callable[[str], Tensor], ranks: Ranks = ALONE) -> None:
    """Copy the stored tensors behind these parameters, or what of them belongs to this rank, into place. `read` gives
    the tensor of a Hugging Face name."""
    for name in names:
        spec = shard_spec(name.rsplit(".", 1)[0])
        found = list(pieces(model.config, name, model.get_parameter(name), ranks))
        for number, (source, part) in enumerate(found):
            stored = read(source)
            if not is_whole(name):
                model.get_submodule(name.rpartition(".")[0]).check_part(source, stored)
            fill_shard(part, stored, spec, number, model.config, ranks, len(found) == 1)


def open_folder(folder: Path, config: Config) -> tuple[Stored, Callable[[str], Tensor]]:
    """What a folder is stored in, and what gives its tensors, all checked, by the names that we would have used. A head
    that differs from the embedding is not tied to it, whatever config.json says: as in transformers."""
    hf = read_json(folder / "config.json")
    readers, notes = text_only(merged.unmerged(open_shards(shards(folder))), hf.get("model_type"))
    if config.tie_embeddings and has_own_head(readers, [config.vocab_size, config.dim]):
        config = replace(config, tie_embeddings=False)
        notes += ("tie_word_embeddings is true, but lm_head.weight differs from the embedding: it is the head",)
    stored, read = open_tensors(folder, config, readers)
    return stored._replace(notes=notes + stored.notes, tied=config.tie_embeddings), read


def open_tensors(folder: Path, config: Config, readers: dict) -> tuple[Stored, Callable[[str], Tensor]]:
    file = folder / "config.json"
    if gguf.is_gguf(folder):
        return open_gguf(folder, config, readers)
    layout = foreign.layout_of(read_json(file))
    if layout is None:
        stored, read = stored_quantization(file), reading(readers)
        if merged.is_mxfp4(read_json(file)):
            stored, read = Stored(given=experts_given(config, readers)), merged.reading(readers)
        model = empty_model(config, torch.float32, stored.scheme, stored.head, given=stored.given)
        check_headers(folder, needed(config, model), readers, config.tie_embeddings)
        return stored, read
    plain = empty_model(config, torch.float32)
    shapes = {
        name: {
            source.removesuffix(".weight"): tuple(part.shape)
            for source, part in pieces(config, f"{name}.weight", linear.weight)
        }
        for name, linear in named_linears(plain)
        if name != "lm_head" or not config.tie_embeddings
    }
    with led_by(folder):
        found = foreign.find(layout, readers, shapes)
        check_headers(folder, foreign.needed(found, needed(config, plain), readers), readers, config.tie_embeddings)
        found = foreign.checked(found)
    scheme, reason = foreign.scheme_of(found)
    notes = found.layout.notes + ((reason,) if reason else ())
    head, kept = scheme if "lm_head" in found.matrices else None, dict.fromkeys(found.kept)
    stored = Stored(None, None, kept, scheme, notes) if reason else Stored(scheme, head, kept, None, notes)
    return stored, foreign.reading(found, scheme, reading(readers))


def experts_given(config: Config, readers: dict) -> dict[str, str]:
    """The scheme of those experts that gpt-oss's folder holds in it."""
    names = (name for name, _ in named_linears(empty_model(config, torch.float32)))
    return {name: "mxfp4" for name in names if sources(config.family, f"{name}.codes")[0] in readers}


def open_gguf(file: Path, config: Config, readers: dict) -> tuple[Stored, Callable[[str], Tensor]]:
    """`open_folder` of a GGUF file, whose matrices have a type each."""
    model = empty_model(config, torch.float32)
    check_headers(file, needed(config, model), readers, config.tie_embeddings)
    stacked = {
        name.removesuffix(".weight"): sources(config.family, name)
        for name, x in model.named_parameters()
        if x.dim() > 1
    }
    if config.tie_embeddings:
        stacked["lm_head"] = stacked.pop("embed")
    schemes, loose = gguf.find(readers, stacked)
    notes = (f"tensors that no scheme here holds are held as plain weights: {loose}",) if loose else ()
    return Stored(given=schemes, notes=notes), gguf.reading(readers)


@torch.no_grad()
def load_model(
    checkpoint_dir: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    quantize: str | None = None,
    tp: Ranks | None = None,
    progress: bool = False,
    head: str | None = None,
    pack: bool = True,
) -> Transformer:
    """Read a Hugging Face folder of the Llama family (config.json and safetensors; no tokenizer is needed), or a GGUF
    file, whose blocks of 4 and 8 bits keep their bits unless `quantize` asks for something else.

    `quantize` names a scheme of quantize.py: every matrix is quantized as it arrives, so that the model is never held
    in full precision. `head` names one for lm_head and a tied embedding, which otherwise stay as they are. A folder
    that was stored quantized is loaded as such. So is another program's, where one of our schemes holds it exactly;
    otherwise it is quantized again, which is said on stderr. `tp` are the Ranks over which the model is divided: this
    process reads and holds its part alone, and all of them load the same folder. `progress` shows a bar on stderr.
    `pack=False` leaves quantized matrices as they are stored, to be saved, copied or packed later. ValueError names
    file and tensor, before any weight is copied, and weights that a scheme cannot hold.
    """
    folder, ranks = Path(checkpoint_dir), tp or ALONE
    config = load_config(folder)
    form, read = open_folder(folder, config)
    config = replace(config, tie_embeddings=form.tied)
    scheme, head, given = schemes_of(form, folder, quantize, head)
    lost = len(form.given) - len(given)  # matrices of a GGUF file that another scheme is asked for
    with led_by(folder):
        check_divisible(config, ranks.world, largest_group(scheme, given))
    ranks.check_same(lambda: fingerprints(folder, open_shards(shards(folder))))
    model = allocate(empty_model(config, dtype, scheme, head, ranks, given), device)
    held = {name for name, _ in named_linears(model)} if form.scheme else given
    squares, total = [0.0, 0.0], sum(parameter.nbytes for parameter in model.parameters())
    bar = tqdm(total=total, unit="B", unit_scale=True, desc=f"load {folder.name}", disable=not progress)
    with bar, led_by(folder):
        model = filled(model, read, ranks, pack, held, bar.update, squares if form.again or lost else None)
    notes, error = list(form.notes), math.sqrt(squares[0] / max(squares[1], 1e-30))
    if form.again:
        notes[-1] += f"; quantized again to {scheme}, relative error {error:.4f}"
    if lost:
        notes.append(f"{lost} matrices of 4 and 8 bits are quantized again, as asked, relative error {error:.4f}")
    for note in notes if ranks.rank == 0 else ():
        print(f"{folder}: {note}", file=sys.stderr)
    return model


def filled(
    model: Transformer, read: Callable[[str], Tensor], ranks: Ranks, pack: bool, held: Collection[str] = (),
    done: Callable[[int], object] = int, squares: list[float] | None = None,
) -> Transformer:  # fmt: skip
    """A model of allocated memory, filled tensor by tensor, packed and connected. Quantized matrices are `held` as such
    by what `read` reads; others are quantized as they arrive. `done` is told bytes."""
    for name, parameter in model.named_parameters():
        module, _, kind = name.rpartition(".")
        if module in held or is_whole(name):
            fill(model, [name], read, ranks)
        elif kind == "codes":
            quantize_into(model.get_submodule(module), module, model.config, read, ranks, squares)
        done(parameter.nbytes)
    if pack:
        walker.pack_quantized(model)
    return connect(model, ranks)


def quantize_into(
    linear: QuantizedLinear, name: str, config: Config, read: Callable[[str], Tensor], ranks: Ranks,
    squares: list[float] | None,
) -> None:  # fmt: skip
    """Read the weights behind one QuantizedLinear, one tensor at a time, and fill in what they quantize to. `squares`
    sums up the change's and the weights' squares."""
    tied, spec = name == "lm_head" and config.tie_embeddings, shard_spec(name)
    rows, format = source_rows(spec, linear.out_features, config, ranks), linear.format
    begin, names = 0, sources(config.family, "embed.weight" if tied else f"{name}.weight")
    divides_rows = spec.dim == 1 and ranks.world > 1
    if format.scope == "matrix" or (divides_rows and format.scope == "rows" and not format.takes_row_max):
        weight = torch.cat([read(source) for source in names]).to(linear.codes.device)  # (out, in) of all ranks
        with led_by(names[0]):
            parts = formats.quantize_tensor(weight, linear.scheme)
        for kind, part in parts.items():
            fill_shard(getattr(linear, kind), part, spec, 0, config, ranks, is_stacked=True)
        if squares:
            formats.add_squares(squares, formats.dequantize_tensor(parts, linear.scheme), weight)
        return formats.release_memory()
    for number, source in enumerate(names):
        weight = shard(read(source), spec, number, config, ranks, is_stacked=len(names) == 1).to(linear.codes.device)
        if len(weight) < rows[number]:  # a vocabulary's padding
            weight = F.pad(weight, (0, 0, 0, rows[number] - len(weight)))
        row_max = None
        if divides_rows and format.takes_row_max:
            row_max = ranks.max(weight.abs().amax(1).float())  # a row's scale is that of the whole row
        with led_by(source):
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
    """The shapes of `config` with normal(0, 0.02) matrices, unit norms and zero biases, drawn on the device, quantized
    one by one. Every rank draws all numbers and keeps its own."""
    ranks = tp or ALONE
    check_divisible(config, ranks.world, largest_group(quantize))
    shapes, generator = needed(config, empty_model(config, dtype)), torch.Generator(device=device).manual_seed(seed)

    def draw(name: str) -> Tensor:
        shape, _ = shapes[name]
        if len(shape) == 1:
            return torch.full(shape, 0.0 if name.endswith("bias") else 1.0)
        return torch.empty(shape, dtype=dtype, device=device).normal_(0, 0.02, generator=generator)

    model = allocate(empty_model(config, dtype, quantize, head, ranks), device)
    return filled(model, draw, ranks, pack)


# --------------------------------------------------------------------------------------------- writing


def save_model(model: Transformer, checkpoint_dir: str | Path, hf: dict) -> None:
    """Write config.json (`hf`, saying what the matrices are stored in now) and safetensors under Hugging Face names:
    model.safetensors, or for a quantized model a file a layer and an index, so that saving takes a layer's memory. An
    interrupted write leaves nothing that load_model would take, of this model or of one that was there before:
    config.json goes first and comes last. ValueError for a packed model."""
    linears.check_unpacked(model, "saved")
    stored_as(model)
    folder = Path(checkpoint_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").unlink(missing_ok=True)
    groups = names_by_shard(model) if quantized_linears(model) else [[name for name, _ in model.named_parameters()]]
    files = {}
    for number, group in enumerate(groups, 1):
        file = "model.safetensors" if len(groups) == 1 else shard_name(number, len(groups))
        files |= write_tensors(folder / file, model, group)
    other = "model.safetensors.index.json" if len(groups) == 1 else "model.safetensors"
    (folder / other).unlink(missing_ok=True)  # of the model before
    if len(groups) > 1:
        write_index(folder, files)
    write_config(folder, model, hf)


def names_by_shard(model: Transformer) -> list[list[str]]:
    """The parameters of each layer, and last those of everything else: what a quantized folder has a file for."""
    names = [name for name, _ in model.named_parameters()]
    layers = [[name for name in names if name.startswith(f"layers.{i}.")] for i in range(len(model.layers))]
    return [*layers, [name for name in names if not name.startswith("layers.")]]


def stored_as(model: Transformer) -> dict:
    """What a config.json's "quantization" says of these matrices: nothing of plain ones. ValueError: it cannot say."""
    schemes = {name: getattr(linear, "scheme", None) for name, linear in named_linears(model)}
    head, kept = schemes.pop("lm_head"), [name for name, scheme in schemes.items() if not scheme]
    found = sorted({*schemes.values()} - {None})
    if len(found) > 1 or (head and not found):
        schemes = f"its blocks are in {' and '.join(found) or 'full precision'}, its head in {head or 'full precision'}"
        raise ValueError(f"no folder holds such a model: {schemes}; one scheme of all blocks is what can be said")
    return {"scheme": found[0], "head": head} | ({"kept": kept} if kept else {}) if found else {}


def write_config(folder: Path, model: Transformer, hf: dict, plain: bool = False) -> None:
    """A config.json that says what this model's matrices are stored in, whatever folder it was of. Other programs are
    told how to read them if they are stored `plain`, all in one scheme, and to refuse them if not."""
    hf, before = {**text_part(hf), "tie_word_embeddings": model.config.tie_embeddings}, hf.get("quantization") or {}
    for key in ("quantization", "quantization_config"):
        hf.pop(key, None)
    found = stored_as(model)
    if found:
        hf["quantization"] = before | found
        format, head = FORMATS[found["scheme"]], bool(found["head"])
        hf["quantization_config"] = foreign.config_for(format, head) if plain else foreign.OWN
    text = json.dumps(hf, indent=2) + "\n"
    write_atomically(folder / "config.json", lambda partial: partial.write_text(text))


def write_tensors(
    file: Path, model: Transformer, names: list[str], dtype: torch.dtype | None = None, plain: bool = False
) -> dict[str, str]:
    """Write these parameters under their Hugging Face names, float32 weights as `dtype`, quantized ones by other
    programs' names if `plain`; {name: file's name}."""
    tensors = {}
    for name in names:
        for source, part in pieces(model.config, name, model.get_parameter(name).detach()):
            if plain and not is_whole(name):
                source, part = foreign.plain(source, part)
            cast = dtype and is_whole(name) and part.dtype == torch.float32
            tensors[source] = part.to(dtype if cast else part.dtype).contiguous().clone()
    tensors = merged.merged(tensors) if model.config.family == "gpt_oss" else tensors
    save_tensors(file, tensors)
    return dict.fromkeys(tensors, file.name)
