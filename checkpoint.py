"""A Hugging Face folder -> Transformer, and back.

    load_config         config.json -> Config
    load_model          config.json + *.safetensors -> Transformer, filled tensor by tensor, quantized on the way
    random_model        the same shapes with random weights, to measure without a download
    save_model          Transformer -> config.json + safetensors, the inverse of load_model, quantized or not

The model is built on the meta device and every weight is copied once, from the mapped file to its place inside
its (fused) matrix, so that loading needs the weights' own memory and no more. Everything is checked against the
files' headers before the first byte is copied. A folder whose config.json has "quantization" holds the parts of
quantize.py's formats in place of weights; one with "quantization_config" is another program's, and foreign.py reads it.
This file does not know tokenizers, decoding or devices' habits.
"""

import contextlib
import hashlib
import json
import math
import os
import reprlib
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

import foreign
from model import Config, Shapes, Transformer
from quantize import (
    FORMATS,
    QuantizedLinear,
    dequantize_tensor,
    quantize_model,
    quantize_tensor,
    quantized_linears,
    release,
    replace_linears,
)
from tp import ALONE, Ranks, check, connect, cut_of, shrink, stack, take

# Our module -> the Hugging Face modules whose rows, one after the other, make its matrix.
OUTER = {"embed": ["model.embed_tokens"], "norm": ["model.norm"], "lm_head": ["lm_head"]}
INNER = {
    "attention_norm": ["input_layernorm"],
    "attention.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "attention.q_norm": ["self_attn.q_norm"],
    "attention.k_norm": ["self_attn.k_norm"],
    "attention.out": ["self_attn.o_proj"],
    "ffn_norm": ["post_attention_layernorm"],
    "ffn.gate_up": ["mlp.gate_proj", "mlp.up_proj"],
    "ffn.down": ["mlp.down_proj"],
}

DTYPES = ("BF16", "F16", "F32", "F64")  # stored types that weights can be read from
PART_DTYPES = {
    torch.uint8: "U8", torch.int8: "I8", torch.bfloat16: "BF16", torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3",
}  # fmt: skip
MOST_NAMES = 8  # an error lists so many tensors and counts the rest
LARGEST_JSON = 2**24  # bytes; no config.json or index is larger


def sources(name: str) -> list[str]:
    """Hugging Face tensor names behind one parameter: 'layers.3.ffn.gate_up.weight' -> gate's and up's."""
    module, kind = name.rsplit(".", 1)
    if module in OUTER:
        return [f"{source}.{kind}" for source in OUTER[module]]
    _, layer, module = module.split(".", 2)
    return [f"model.layers.{layer}.{source}.{kind}" for source in INNER[module]]


def pieces(config: Config, name: str, parameter: Tensor, ranks: Ranks = ALONE) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, the rows of `parameter` that it fills), views of the parameter's memory. `parameter` holds
    what belongs to one of the ranks."""
    parts = parameter.split(stack(cut_of(name.rsplit(".", 1)[0]), len(parameter), config, ranks))
    yield from zip(sources(name), parts, strict=True)


# --------------------------------------------------------------------------------------------- reading


def read_json(file: Path) -> dict:
    """A JSON object from a file; ValueError names the file."""
    if not file.exists():
        raise ValueError(f"{file}: no such file")
    if not file.is_file() or file.stat().st_size > LARGEST_JSON:  # a pipe would be waited for, a device never end
        raise ValueError(f"{file}: not a plain file of up to {LARGEST_JSON:,} bytes")
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not readable as JSON: {one_line(error)}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file}: expected a JSON object, found {type(value).__name__}")
    return value


def load_config(checkpoint_dir: str | Path) -> Config:
    """The Config of a folder. ValueError names the file, the key and the value that cannot be used."""
    return config_of(Path(checkpoint_dir) / "config.json")


def config_of(file: Path) -> Config:
    """Config.from_hf of one file, its errors led by the file's folder."""
    if not file.parent.is_dir():
        raise ValueError(f"{file.parent}: no such folder")
    hf = read_json(file)
    try:
        foreign.layout_of(hf)  # refuses what cannot be read
        return Config.from_hf({**hf, "quantization_config": None})
    except (ValueError, RecursionError) as error:
        # Config speaks of "config.json: …"; put the path that the user gave in its place.
        raise ValueError(f"{file}: {one_line(error).removeprefix('config.json: ')}") from None


def shards(folder: Path) -> list[Path]:
    """The safetensors files of a folder: model.safetensors, or those that the index names."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.is_file():
        return [single]
    if not index.exists():
        pickles = [*folder.glob("*.bin"), *folder.glob("*.pth")]
        hint = f"; {pickles[0].name} is a pickle: convert the folder to safetensors first" if pickles else ""
        raise ValueError(f"{folder}: neither model.safetensors nor model.safetensors.index.json{hint}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: weight_map is missing or empty")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ValueError(f"{index}: {one_line(ascii(name))} is not the name of a safetensors file beside it")
        if not os.path.isfile(folder / name):  # which a name that no file can have does not trouble
            raise ValueError(f"{folder / name}: no such file, but {index.name} lists it")
    return [folder / name for name in names]


def open_shards(files: list[Path]) -> dict[str, tuple[Path, object]]:
    """Tensor name -> (file, open reader). Only headers are read."""
    readers = {}
    for file in files:
        try:
            reader = safe_open(file, framework="pt", device="cpu")
        except (SafetensorError, OSError, MemoryError) as error:  # the last: too large to be mapped
            raise ValueError(f"{file}: not a readable safetensors file: {one_line(error)}") from None
        for name in reader.keys():  # noqa: SIM118, a reader is no dict
            if name in readers:
                raise ValueError(f"{file}: {_some([name])} stands in {readers[name][0].name} too")
            readers[name] = (file, reader)
    return readers


def reading(readers: dict) -> Callable[[str], Tensor]:
    """Hugging Face name -> its tensor in the mapped file."""
    return lambda name: readers[name][1].get_tensor(name)


def needed(config: Config, model: Transformer) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Hugging Face name -> (shape, stored types it can be read from) of every tensor that the model needs."""
    parts = {  # of a quantized weight are what they are, and nothing to cast
        f"{name}.{part}"
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLinear)
        for part in module.parts()
    }
    return {
        source: (tuple(part.shape), (PART_DTYPES[part.dtype],) if name in parts else DTYPES)
        for name, parameter in model.named_parameters()
        for source, part in pieces(config, name, parameter)
    }


def check_headers(folder: Path, config: Config, expected: dict[str, tuple], readers: dict) -> None:
    """Every tensor that is expected is there, with the right shape and type, and no other."""
    missing = [name for name in expected if name not in readers]
    # Old checkpoints store RoPE's frequencies; a tied head may be stored although the embedding stands for it.
    extra = [
        name
        for name in readers
        if name not in expected
        and not name.endswith("rotary_emb.inv_freq")
        and not (config.tie_embeddings and name == "lm_head.weight")
    ]
    wrong = []
    for name in expected.keys() & readers.keys():
        header = readers[name][1].get_slice(name)
        shape, types = expected[name]
        if tuple(header.get_shape()) != shape:
            wrong.append(f"{name} is {header.get_shape()} instead of {list(shape)}")
        elif header.get_dtype() not in types:
            wrong.append(f"{name} is of type {header.get_dtype()}; {', '.join(types)} can be read")
    problems = [("missing", missing), ("unexpected", extra), ("misshapen", wrong)]
    found = [f"{what}: {_some(names)}" for what, names in problems if names]
    if missing == ["lm_head.weight"]:
        found.append("if the head shares the embedding's weights, config.json should say tie_word_embeddings: true")
    if found:
        raise ValueError(f"{folder}: the tensors do not fit config.json; {'; '.join(found)}")


def one_line(error: Exception | str) -> str:
    """What a message says, on one line of bounded length: a file may have put anything into it."""
    return " ".join("".join(char if char.isprintable() else " " for char in str(error)[:2000]).split())[:1000]


def _some(names: list[str]) -> str:
    names = [one_line(name)[:160] for name in sorted(names)]
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


# -------------------------------------------------------------------------------------------- building


def empty_model(
    config: Config, dtype: torch.dtype, scheme: str | None = None, head: str | None = None, ranks: Ranks = ALONE,
    kept: Iterable[str] = (),
) -> Transformer:  # fmt: skip
    """A Transformer, or one rank's part of it, on the meta device: shapes without memory."""
    with Shapes():
        model = Transformer(config).to(dtype)
    shrink(model, ranks)
    return replace_linears(model, scheme, head, kept) if scheme else model


def fill(model: Transformer, names: list[str], read: Callable[[str], Tensor], ranks: Ranks = ALONE) -> None:
    """Copy the stored tensors behind these parameters, or what of them belongs to this rank, into place. `read` gives
    the tensor of a Hugging Face name."""
    for name in names:
        cut = cut_of(name.rsplit(".", 1)[0])
        for number, (source, part) in enumerate(pieces(model.config, name, model.get_parameter(name), ranks)):
            stored = take(read(source), cut, number, model.config, ranks)
            part[: len(stored)].copy_(stored)  # casts and moves on the way, no copy between
            part[len(stored) :].zero_()  # a vocabulary's padding


def allocate(model: Transformer, device: str | torch.device) -> Transformer:
    """Give a meta model uninitialised memory on a device; the tied head stays tied."""
    # Not to_empty, whose empty_like imports sympy for a meta tensor: a fifth of a start's time.
    model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
    if model.config.tie_embeddings and hasattr(model.embed, "weight"):
        model.lm_head.weight = model.embed.weight
    return model.requires_grad_(False).eval()


class Stored(NamedTuple):
    """What a folder's matrices are stored in: a scheme, and that of the head; None for full precision. Matrices of
    blocks that are `kept` are in full precision in any case."""

    scheme: str | None = None
    head: str | None = None
    kept: tuple[str, ...] = ()
    again: str | None = None  # what another program's weights, which no scheme holds, are to be quantized to
    notes: tuple[str, ...] = ()  # what a user should hear


def stored_quantization(file: Path) -> Stored:
    """What config.json says that quantize.py or save_model made of its folder."""
    found = read_json(file).get("quantization")
    if found is None:
        return Stored()
    known = isinstance(found, dict) and found.keys() <= {"scheme", "head", "method", "kept"}
    kept = found.get("kept") or [] if known else None
    known = known and isinstance(kept, list) and all(isinstance(name, str) for name in kept)
    schemes = list(FORMATS)  # no dictionary: what is no string may not be hashable
    if not known or found.get("scheme") not in schemes or found.get("head") not in (None, *schemes):
        raise ValueError(
            f"{file}: quantization = {reprlib.repr(found)} is not supported; schemes: {', '.join(schemes)}"
        )
    return Stored(found["scheme"], found.get("head"), tuple(kept))


def stored_in(file: Path) -> str | None:
    """The scheme or the other program's method that config.json says its folder is stored in."""
    other = read_json(file).get("quantization_config")
    return other["quant_method"] if other else stored_quantization(file).scheme


def open_folder(folder: Path, config: Config) -> tuple[Stored, Callable[[str], Tensor]]:
    """What a folder is stored in, and what gives its tensors, all checked, by the names that we would have used."""
    readers, file = open_shards(shards(folder)), folder / "config.json"
    layout = foreign.layout_of(read_json(file))
    if layout is None:
        stored = stored_quantization(file)
        model = empty_model(config, torch.float32, stored.scheme, stored.head, kept=stored.kept)
        check_headers(folder, config, needed(config, model), readers)
        return stored, reading(readers)
    plain = empty_model(config, torch.float32)
    shapes = {
        name.removesuffix(".weight"): {source.removesuffix(".weight"): tuple(part.shape) for source, part in parts}
        for name, parameter in plain.named_parameters()
        if parameter.dim() == 2 and name != "embed.weight" and (parts := list(pieces(config, name, parameter)))
    }
    try:
        found = foreign.find(layout, readers, shapes)
        check_headers(folder, config, foreign.needed(found, needed(config, plain), readers), readers)
        found = foreign.checked(found)
    except ValueError as error:
        raise ValueError(f"{folder}: {str(error).removeprefix(f'{folder}: ')}") from None
    scheme, reason = foreign.scheme_of(found)
    notes = tuple(note for note in (found.layout.note, reason) if note)
    head = scheme if "lm_head" in found.matrices else None
    stored = Stored(None, None, found.kept, scheme, notes) if reason else Stored(scheme, head, found.kept, None, notes)
    return stored, foreign.reading(found, scheme, reading(readers))


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
) -> Transformer:
    """Read a Hugging Face folder of the Llama family (config.json and safetensors; no tokenizer is needed).

    `quantize` names a scheme of quantize.py: every matrix is quantized as it arrives, so that the model is never
    held in full precision; `head` names one for lm_head (and a tied embedding), which otherwise stays as it is. A
    folder that was stored quantized is loaded as such; one that another program quantized too, where one of our schemes
    holds it exactly, and otherwise it is quantized again, which is said on stderr. `tp` are the Ranks over which the
    model is divided: this process reads and holds its part alone, and all of them must call this with the same folder.
    `progress` shows a bar on stderr. Raises ValueError, naming file and tensor, before any weight is copied, and for
    weights that a scheme cannot hold.
    """
    folder, ranks = Path(checkpoint_dir), tp or ALONE
    config = load_config(folder)
    form, read = open_folder(folder, config)
    stored = form.scheme
    if stored and quantize not in (None, stored):
        raise ValueError(f"{folder}: is stored in {stored} and cannot be quantized to {quantize}; take the original")
    if stored and head not in (None, form.head):
        raise ValueError(f"{folder}: its head is stored in {form.head or 'full precision'}, not in {head}")
    scheme, head = stored or quantize or form.again, form.head or head
    try:
        check(config, ranks.world, FORMATS[scheme].group if scheme in FORMATS else 0)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    squares = [0.0, 0.0] if form.again else None
    ranks.check_same(lambda: fingerprints(folder, open_shards(shards(folder))))
    model = allocate(empty_model(config, dtype, scheme, head, ranks, form.kept), device)
    total = sum(parameter.nbytes for parameter in model.parameters())
    with tqdm(total=total, unit="B", unit_scale=True, desc=f"load {folder.name}", disable=not progress) as bar:
        for name, parameter in model.named_parameters():
            module = model.get_submodule(name.rsplit(".", 1)[0])
            if not stored and isinstance(module, QuantizedLinear) and not name.endswith(".bias"):
                if name.endswith(".codes"):
                    try:
                        _quantize_into(module, name.removesuffix(".codes"), config, read, ranks, squares)
                    except ValueError as error:
                        raise ValueError(f"{folder}: {error}") from None
            else:
                fill(model, [name], read, ranks)
            bar.update(parameter.nbytes)
    for linear in quantized_linears(model):
        linear.pack(dtype)
        release()
    notes = list(form.notes)
    if squares:
        notes[-1] += (
            f"; quantized again to {scheme}, relative error {math.sqrt(squares[0] / max(squares[1], 1e-30)):.4f}"
        )
    for note in notes if ranks.rank == 0 else ():
        print(f"{folder}: {note}", file=sys.stderr)
    return connect(model, ranks)


def fingerprints(folder: Path, readers: dict) -> dict[str, str]:
    """What tells one folder from another at little cost: config.json, and of every tensor its name, shape, type and
    first values."""
    tensors = hashlib.sha256()
    for name in sorted(readers):
        tensor = reading(readers)(name)
        tensors.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        tensors.update(bytes(tensor.flatten()[:64].view(torch.uint8).tolist()))
    config = hashlib.sha256((folder / "config.json").read_bytes())
    return {"its config.json": config.hexdigest(), "its tensors": tensors.hexdigest()}


def _quantize_into(
    module: QuantizedLinear, name: str, config: Config, read: Callable[[str], Tensor], ranks: Ranks,
    squares: list[float] | None = None,
) -> None:  # fmt: skip
    """Read the weights behind one QuantizedLinear, one tensor at a time, and fill in what they quantize to. Those
    of the change and of the weights are added to `squares`."""
    tied, cut = name == "lm_head" and config.tie_embeddings, cut_of(name)
    rows = module.codes.split(stack(cut, module.out_features, config, ranks))
    begin = 0
    for number, source in enumerate(sources("embed.weight" if tied else f"{name}.weight")):
        weight = take(read(source), cut, number, config, ranks).to(module.codes.device)
        if len(weight) < len(rows[number]):  # a vocabulary's padding
            weight = F.pad(weight, (0, 0, 0, len(rows[number]) - len(weight)))
        row_max = None
        if cut.dim == 1 and ranks.world > 1 and not FORMATS[module.scheme].group:
            row_max = ranks.largest(weight.abs().amax(1).float())  # a row's scale is that of the whole row
        try:
            parts = quantize_tensor(weight, module.scheme, row_max)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None
        module.fill(slice(begin, begin + len(weight)), parts)
        begin += len(weight)
        if squares:
            change = dequantize_tensor(parts, module.scheme).sub_(weight)
            squares[0] += torch.linalg.vector_norm(change).item() ** 2
            squares[1] += torch.linalg.vector_norm(weight).item() ** 2
        release()


@torch.no_grad()
def random_model(
    config: Config, *, device: str | torch.device = "cpu", dtype: torch.dtype = torch.bfloat16, seed: int = 0,
    quantize: str | None = None, head: str | None = None, tp: Ranks | None = None,
) -> Transformer:  # fmt: skip
    """The shapes of `config` with normal(0, 0.02) matrices, unit norms and zero biases, made on the device. Every rank
    draws all numbers and keeps its own; quantized, a row's scale is that of the rank's part."""
    ranks = tp or ALONE
    check(config, ranks.world, FORMATS[quantize].group if quantize in FORMATS else 0)
    model = allocate(empty_model(config, dtype, ranks=ranks), device)
    whole = dict(empty_model(config, dtype).named_parameters())
    generator = torch.Generator(device=device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(0 if name.endswith("bias") else 1)
        elif ranks.world == 1:
            parameter.normal_(0, 0.02, generator=generator)
        else:
            drawn = torch.empty_like(whole[name], device=device).normal_(0, 0.02, generator=generator)
            fill(model, [name], dict(pieces(config, name, drawn)).get, ranks)
    if quantize:
        quantize_model(model, quantize, head)
    return connect(model, ranks)


def save_model(model: Transformer, checkpoint_dir: str | Path, hf: dict) -> None:
    """Write config.json (`hf`, saying what the matrices are stored in now) and safetensors under Hugging Face names:
    model.safetensors, or for a quantized model a file a layer and an index, so that saving takes a layer's memory. An
    interrupted write leaves nothing that load_model would take, of this model or of one that was there before:
    config.json goes first and comes last."""
    folder = Path(checkpoint_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").unlink(missing_ok=True)
    names = [name for name, _ in model.named_parameters()]
    groups = [names]
    if quantized_linears(model):
        layers = [[name for name in names if name.startswith(f"layers.{i}.")] for i in range(len(model.layers))]
        groups = [*layers, [name for name in names if not name.startswith("layers.")]]
    files = {}
    for number, group in enumerate(groups, 1):
        file = "model.safetensors" if len(groups) == 1 else shard_name(number, len(groups))
        files |= write_tensors(folder / file, model, group)
    other = "model.safetensors.index.json" if len(groups) == 1 else "model.safetensors"
    (folder / other).unlink(missing_ok=True)  # of the model before
    if len(groups) > 1:
        write_index(folder, files)
    text = json.dumps(described(model, hf), indent=2) + "\n"
    write_whole(folder / "config.json", lambda partial: partial.write_text(text))


def described(model: Transformer, hf: dict) -> dict:
    """A config.json that says what this model's matrices are stored in, whatever folder it was of."""
    hf, before = dict(hf), hf.get("quantization") or {}
    for key in ("quantization", "quantization_config"):
        hf.pop(key, None)
    schemes = {
        name: getattr(model.get_submodule(name), "scheme", None)
        for name in (f"layers.{number}.{inner}" for number in range(len(model.layers)) for inner in INNER)
        if cut_of(name)
    }
    if not any(schemes.values()):
        return hf
    found = {"scheme": next(filter(None, schemes.values())), "head": getattr(model.lm_head, "scheme", None)}
    kept = {"kept": [name for name, scheme in schemes.items() if not scheme]} if not all(schemes.values()) else {}
    return hf | {"quantization": before | found | kept}


def shard_name(number: int, of: int) -> str:
    return f"model-{number:05d}-of-{of:05d}.safetensors"


def value_of(model: Transformer, name: str) -> Tensor:
    """A parameter's values, read back from where a kernel holds them if need be."""
    path, _, part = name.rpartition(".")
    module, parameter = model.get_submodule(path), model.get_parameter(name)
    return module.parts()[part] if parameter.is_meta and getattr(module, "freed", False) else parameter


def write_tensors(file: Path, model: Transformer, names: list[str], dtype: torch.dtype | None = None) -> dict[str, str]:
    """Write these parameters under their Hugging Face names, float32 weights as `dtype`; {name: file's name}."""

    def stored(name: str, part: Tensor) -> Tensor:
        whole = name.endswith((".weight", ".bias"))  # and no part of a quantized one
        return part.detach().to(dtype if dtype and whole and part.dtype == torch.float32 else part.dtype)

    tensors = {
        source: stored(name, part).contiguous().clone()
        for name in names
        for source, part in pieces(model.config, name, value_of(model, name))
    }
    save_tensors(file, tensors)
    return dict.fromkeys(tensors, file.name)


def save_tensors(file: Path, tensors: dict[str, Tensor]) -> None:
    """A safetensors file, whole or not at all."""
    write_whole(file, lambda partial: save_file(tensors, partial, metadata={"format": "pt"}))


def write_index(folder: Path, files: dict[str, str]) -> None:
    """The file that names all others: without it a folder of shards does not load."""
    index = json.dumps({"metadata": {}, "weight_map": files}, indent=1)
    write_whole(folder / "model.safetensors.index.json", lambda partial: partial.write_text(index))


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A new folder to be filled, which has another name, NAME.partial, until the block is done. What stops the block,
    an error, a signal or a kill, leaves it there under that name; the next attempt starts anew."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    os.rename(partial, folder)


def write_whole(file: Path, write: Callable[[Path], object]) -> None:
    """Under another name first, NAME.partial, to disk, then in place. OSError where the disk has no room for it."""
    partial = file.with_name(f"{file.name}.partial")
    try:
        write(partial)
    except (SafetensorError, RuntimeError) as error:  # what safetensors and torch.save make of an OSError
        raise OSError(f"{file}: cannot be written: {one_line(error)}") from None
    partial.chmod(0o644)  # safetensors creates files that only their owner can read
    with partial.open("rb") as stream:
        os.fsync(stream.fileno())
    os.replace(partial, file)
