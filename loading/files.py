"""A folder's files, JSON and safetensors: read, and written completely or not at all.

    require_json, read_config_json          a JSON object of a file that must exist
    open_tensors                            the stored tensors of files, by name
    read_index                              which file holds a tensor
    check_headers                           compares names, shapes and types with the expected ones
    stored_dtype                            safetensors' name of a dtype
    fingerprint                             a hash that identifies a folder's tensors
    write_atomically, complete_folder       a file, or a folder, under another name until it is
                                            complete

Every UserError about a file names it.
"""

import contextlib
import functools
import hashlib
import json
import math
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, deserialize, safe_open
from safetensors.torch import save, save_file
from torch import Tensor

import loading.plain_files as plain_files
from decoding.errors import UserError
from loading.families import Family
from loading.plain_files import file_exists, one_line, short_repr
from weights.formats import row_chunks

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_NAMES = 8  # tensors that an error lists; it counts the rest
MAX_FILE_NAME = 255  # bytes, on the usual file systems
Expected = tuple[tuple[int, ...], tuple[str, ...]]  # a tensor's shape, and the types it may have


def require_json(file: Path) -> dict:
    """A JSON object from a file that must exist."""
    if file_exists(file):
        return plain_files.read_json(file)
    gguf_files = sorted(file.parent.glob("*.gguf"))
    hint = f"; pass the path of {gguf_files[0].name}" if gguf_files else ""
    raise UserError(f"{file}: no such file{hint}")


def read_config_json(file: Path) -> dict:
    """A config.json in which other programs' settings of quantization are its quantization_config
    and name a quant_method.

    MLX writes a key "quantization", which older versions did not repeat. ModelOpt writes a file of
    its own, or puts the settings below such a key, and some versions leave quant_method out.
    compressed-tensors called the key compression_config at first.
    """
    hf = require_json(file)
    match hf:
        case {"compression_config": dict(older)}:
            del hf["compression_config"]
            hf.setdefault("quantization_config", {"quant_method": "compressed-tensors", **older})
        case {"quantization": {"bits": _, "group_size": _} as mlx}:
            del hf["quantization"]
            return hf | {"quantization_config": {**mlx, "quant_method": "mlx"}}
    entry = hf.get("quantization_config")
    if entry is None:
        entry = plain_files.read_json(file.with_name("hf_quant_config.json"))
    match entry:
        case {"quantization": {"quant_algo": _} as modelopt} | ({"quant_algo": _} as modelopt):
            hf["quantization_config"] = {**modelopt, "quant_method": "modelopt"}
    return hf


def read_index(folder: Path) -> dict[str, str]:
    """Tensor -> file, by the index of a folder; empty for a folder with model.safetensors, whose
    index other programs do not read either. UserError for a file outside the folder."""
    if file_exists(folder / SINGLE_FILE):
        return {}
    index = folder / INDEX_FILE
    if not file_exists(index):
        hint = convert_hint(folder)
        raise UserError(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE}{hint}")
    weight_map = require_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index}: weight_map is missing or empty; fetch the file again")
    for value in weight_map.values():
        if not is_inner_file(value):
            raise UserError(
                f"{index}: weight_map has {short_repr(value)} where a file of the folder must stand"
            )
    return weight_map


def convert_hint(folder: Path) -> str:
    """What to do with the weights of a folder that has neither of the usual files."""
    shards = sorted(folder.glob("*.safetensors"))
    if len(shards) == 1:
        return f"; rename {shards[0].name} to {SINGLE_FILE} if it is complete"
    if shards:
        return f"; fetch the index, without which {shards[0].name} and the others are not read"
    pickles = sorted([*folder.glob("*.bin"), *folder.glob("*.pth")])
    if pickles:
        return f"; {pickles[0].name} is a pickle: convert the folder to safetensors first"
    return ""


def is_inner_file(value: object) -> bool:
    """Is it the name of a file in the folder, or in a folder inside it?"""
    if not isinstance(value, str) or not value.isprintable():
        return False
    path = Path(value)
    sizes = [len(part.encode()) for part in path.parts]
    is_inside = not path.is_absolute() and ".." not in path.parts
    return is_inside and 0 < max(sizes, default=0) <= MAX_FILE_NAME


def open_tensors(files: list[Path]) -> dict[str, object]:
    """Name -> stored tensor of safetensors files, which has get_shape(), get_dtype(), and [...] or
    [a:b] to read all of it or rows. Only headers are read. A tensor in two files is the last
    one's, as in transformers, so that a file can lie over others."""
    tensors = {}
    for file in files:
        reader = open_safetensors(file)
        tensors |= {name: reader.get_slice(name) for name in reader.keys()}  # noqa: SIM118, no dict
    return tensors


def open_safetensors(file: Path):
    """The reader of a safetensors file. UserError names a file that is missing or cut off."""
    try:
        if file_exists(file):
            plain_files.plain_file(file, max_bytes=math.inf)  # a pipe would wait for ever
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError, UserError, MemoryError) as error:
        reason = one_line(error).removeprefix(f"{file}: ")
        raise UserError(f"{file}: not a readable safetensors file: {reason}") from None


def text_model_tensors(
    tensors: Mapping[str, object], family: Family, n_layers: int
) -> dict[str, object]:
    """The text model's tensors alone, by a text model's names."""
    unused = tuple(prefix.format(n_layers=n_layers) for prefix in family.unused)
    selected = {}
    for name, stored in tensors.items():
        if name.startswith(unused):
            continue
        for prefix, replacement in family.prefixes.items():
            if name.startswith(prefix):
                name = replacement + name.removeprefix(prefix)
                break
        selected[name] = stored
    return selected


def fingerprint(tensors: Mapping[str, object]) -> str:
    """A hash of every tensor's name, shape and type, and of its first and last row."""
    digest = hashlib.sha256()
    for name, stored in sorted(tensors.items()):
        shape = stored.get_shape()
        digest.update(f"{name} {shape} {stored.get_dtype()}".encode())
        rows = [stored[:1], stored[shape[0] - 1 :]] if shape else [stored[...]]
        for row in rows:
            digest.update(row.contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def has_separate_head(tensors: Mapping[str, object]) -> bool:
    """Is there a head that differs from the embedding?"""
    head = tensors.get("lm_head.weight")
    embedding = tensors.get("model.embed_tokens.weight")
    if embedding is None:
        return False  # a quantized head is the embedding too
    parts = [name for name in tensors if name.startswith("lm_head.")]
    if head is None or len(parts) > 1:
        return bool(parts)  # a quantized one
    shape = head.get_shape()
    if embedding.get_shape() != shape or len(shape) != 2 or 0 in shape:
        return True  # the last two are refused by `check_headers`
    return any(
        not torch.equal(head[rows].float(), embedding[rows].float()) for rows in row_chunks(*shape)
    )


def check_headers(
    folder: Path,
    expected: dict[str, Expected],
    tensors: dict,
    tied: bool,
    spare: Collection[str] = (),
) -> None:
    """UserError that lists missing and unexpected tensors, and those of another shape or type than
    expected. `spare`: tensors that the folder may hold, whatever is expected."""
    absent = [name for name in expected if name not in tensors]
    # Old checkpoints store RoPE's frequencies, DSpark drafts a head that may end a draft early, and
    # some store a tied head.
    ignored = ("rotary_emb.inv_freq", "confidence_head.proj.weight", "confidence_head.proj.bias")
    if tied:
        ignored += ("lm_head.weight",)
    extra = [
        name
        for name in tensors
        if name not in expected and name not in spare and not name.endswith(ignored)
    ]
    wrong = []
    for name in expected.keys() & tensors.keys():
        shape, dtypes = expected[name]
        stored_shape = [*tensors[name].get_shape()]
        dtype = tensors[name].get_dtype()
        if stored_shape != [*shape]:
            wrong.append(f"{name} is {stored_shape} instead of {[*shape]}")
        elif dtype not in dtypes:
            wrong.append(f"{name} is of type {dtype}; {', '.join(dtypes)} can be read")
    problems = {"missing": absent, "unexpected": extra, "misshapen": wrong}
    messages = [f"{problem}: {list_names(names)}" for problem, names in problems.items() if names]
    messages += remedies(absent, extra)
    if messages:
        raise UserError(f"{folder}: the tensors do not fit config.json; {'; '.join(messages)}")


def remedies(absent: list[str], extra: list[str]) -> list[str]:
    """What would make missing and unexpected tensors fit, where that is known."""
    messages = []
    prefixed = [name for name in absent if name.removeprefix("model.") in extra]
    if prefixed:
        messages.append(
            f"{len(prefixed)} of the missing ones are there without the prefix model., as a model"
            " without its head is saved: save it with its head, or rename them"
        )
    if absent == ["lm_head.weight"]:
        messages.append(
            "if the head shares the embedding's weights, config.json should say"
            " tie_word_embeddings: true"
        )
    return messages


def list_names(names: list[str]) -> str:
    listed = ", ".join(one_line(name)[:160] for name in sorted(names)[:MAX_NAMES])
    num_more = len(names) - MAX_NAMES
    return f"{listed} and {num_more} more" if num_more > 0 else listed


def shard_name(number: int, num_shards: int) -> str:
    return f"model-{number:05d}-of-{num_shards:05d}.safetensors"


@functools.cache
def stored_dtype(dtype: torch.dtype) -> str:
    """safetensors' name of a dtype, as it writes it. UserError for a dtype that it cannot
    write."""
    try:
        [(_, header)] = deserialize(save({"": torch.empty(0, dtype=dtype)}))
    except (KeyError, RuntimeError, SafetensorError):
        raise UserError(
            f"safetensors stores no {dtype}; keep its bits in a tensor of another dtype, such as"
            " torch.uint8"
        ) from None
    return header["dtype"]


def save_tensors(file: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file atomically."""
    write_atomically(file, lambda partial: save_file(tensors, partial, metadata={"format": "pt"}))


def write_index(folder: Path, files: dict[str, str]) -> None:
    """Write model.safetensors.index.json, without which a folder of shards does not load."""
    index = json.dumps({"metadata": {}, "weight_map": files}, indent=1)
    write_atomically(folder / INDEX_FILE, lambda partial: partial.write_text(index))


@contextlib.contextmanager
def complete_folder(folder: Path) -> Iterator[Path]:
    """A new folder named NAME.partial, renamed to NAME when the block ends. An error, a signal or a
    kill leaves NAME.partial behind; the next attempt deletes it."""
    folder = folder.resolve()  # a link stays
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        os.rename(partial, folder)
    except OSError as error:
        raise OSError(
            f"{error}; what was written lies in {partial}, which may be deleted"
        ) from None


def write_atomically(file: Path, write: Callable[[Path], object]) -> None:
    """write(NAME.partial), flush it to disk, then rename it to NAME. A link is followed, a
    device or a pipe is written to: no file takes the place of either. A file keeps its mode.
    OSError for a full disk."""
    if file.exists() and not file.is_file():
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder, file.name)
            write_atomically(copy, write)
            with copy.open("rb") as source, file.open("wb") as device:
                shutil.copyfileobj(source, device)
        return
    target = file.resolve()
    partial = target.with_name(f"{target.name}.partial")
    try:
        write(partial)
    except (
        SafetensorError,
        RuntimeError,
    ) as error:  # what safetensors and torch.save raise for an OSError
        raise OSError(f"{file}: cannot be written: {one_line(error)}") from None
    # safetensors creates files that only their owner can read, whatever the umask is, which a
    # process knows by setting another. The other is a strict one, in which no thread creates a file
    # that others can read.
    umask = os.umask(0o077)
    os.umask(umask)
    mode = target.stat().st_mode if target.exists() else 0o666 & ~umask
    partial.chmod(stat.S_IMODE(mode))
    with partial.open("rb") as stream:
        os.fsync(stream.fileno())
    os.replace(partial, target)
