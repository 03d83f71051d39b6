"""A folder's files, JSON and safetensors: checked when they are read, written completely or not at all.

    read_json                               a JSON object of bounded size
    shards, open_shards                     the tensor files of a folder, and open readers by tensor name
    check_headers                           compares names, shapes and types with the expected ones
    fingerprints                            hashes that identify a folder
    write_atomically, complete_folder       a file, or a folder, under another name until it is complete

A GGUF file is read like a folder: FILE.gguf/config.json is made of its keys. Every ValueError names the file.
"""

import contextlib
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

import loading.plain_files as plain_files
from loading.chat_templates import one_line
from loading.families import Family
from weights.formats import row_chunks

MAX_NAMES = 8  # tensors that an error lists; it counts the rest
# Fingerprints read evenly spread runs of each tensor's rows: their number, their bytes, and the folder's runs in all.
SAMPLE_RUNS, SAMPLE_BYTES, MAX_RUNS = 16, 4096, 2**14


def read_json(file: Path) -> dict:
    """A JSON object from a file that must exist, or from a GGUF file's keys. A config.json's quantization_config is in
    one form for all versions of ModelOpt, and is that of hf_quant_config.json where config.json has none."""
    if plain_files.is_gguf(file.parent):
        from loading import gguf_metadata

        return gguf_metadata.read_json(file.parent, file.name)
    if not plain_files.file_exists(file):
        others = sorted(file.parent.glob("*.gguf"))
        raise ValueError(f"{file}: no such file" + (f"; pass the path of {others[0].name}" if others else ""))
    hf = plain_files.read_json(file)
    if file.name == "config.json":
        settings = hf.get("quantization_config")
        if settings is None:
            settings = plain_files.read_json(file.with_name("hf_quant_config.json"))
            settings = settings if isinstance(settings.get("quantization"), dict) else None
        if settings is not None:
            hf["quantization_config"] = modelopt_form(settings)
    return hf


def modelopt_form(settings: object) -> object:
    """A quantization_config whose writer is ModelOpt, as its newest versions write it; any other one as it is.

    Version 0.29 says quant_library, 0.31 says producer alone, and hf_quant_config.json, which some writers copy into
    config.json, holds the settings in an object of their own (vLLM, vllm/config/model.py, reads all of them).
    """
    if not isinstance(settings, dict) or settings.get("quant_method") not in (None, "modelopt"):
        return settings
    producer = settings.get("producer")
    nested = settings.get("quantization")
    is_nested = isinstance(nested, dict) and "quant_algo" in nested
    has_producer = isinstance(producer, dict) and producer.get("name") == "modelopt"
    names_modelopt = "modelopt" in (settings.get("quant_method"), settings.get("quant_library"))
    if not (has_producer or names_modelopt or is_nested):
        return settings
    return {**(nested if is_nested else settings), "quant_method": "modelopt"}


def shards(folder: Path) -> list[Path]:
    """The safetensors files of a folder: model.safetensors, or those in the index. For a GGUF file, its parts."""
    if plain_files.is_gguf(folder):
        from loading.gguf import parts_of

        return parts_of(folder)
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if plain_files.file_exists(single):
        return [single]
    if not plain_files.file_exists(index):
        pickles, parts = [*folder.glob("*.bin"), *folder.glob("*.pth")], sorted(folder.glob("*-of-*.safetensors"))
        hint = f"; {pickles[0].name} is a pickle: convert the folder to safetensors first" if pickles else ""
        if parts:
            hint = f"; {parts[0].name} is a shard: fetch {index.name} too"
        raise ValueError(f"{folder}: neither model.safetensors nor model.safetensors.index.json{hint}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: weight_map is missing or empty")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ValueError(f"{index}: {one_line(ascii(name))} is not the name of a safetensors file beside it")
        if not os.path.isfile(folder / name):  # unlike Path.is_file, False for invalid names too
            raise ValueError(f"{folder / name}: no such file, but {index.name} lists it")
    return [folder / name for name in names]


def open_shard(file: Path, first: Path):
    """An open reader of one file; `first` is the first of its model's files."""
    if plain_files.is_gguf(file):
        from loading.gguf import Tensors

        return Tensors(file, first)
    return safe_open(file, framework="pt", device="cpu")


def open_shards(files: list[Path]) -> dict[str, tuple[Path, object]]:
    """Tensor name -> (file, open reader). Only headers are read."""
    readers = {}
    for file in files:
        try:
            plain_files.plain_file(file, sys.maxsize)
            reader = open_shard(file, files[0])
        except (SafetensorError, OSError, MemoryError) as error:  # MemoryError: too large to be mapped
            raise ValueError(f"{file}: not a readable safetensors file: {one_line(error)}") from None
        for name in reader.keys():  # noqa: SIM118, a reader is no dict
            if name in readers:
                raise ValueError(f"{file}: {_list_names([name])} is in {readers[name][0].name} too; delete either")
            readers[name] = (file, reader)
    return readers


class RenamedReader:
    """An open file that returns one of its tensors, for any name."""

    def __init__(self, reader, stored_name: str):
        self.reader, self.stored_name = reader, stored_name

    def get_slice(self, name: str):
        return self.reader.get_slice(self.stored_name)

    def get_tensor(self, name: str) -> Tensor:
        return self.reader.get_tensor(self.stored_name)


def select_text_model(readers: dict[str, tuple[Path, object]], family: Family | None) -> tuple[dict, tuple[str, ...]]:
    """`open_shards`' dictionary with the text model's tensors alone, by a text model's names, and a note on the
    others."""
    if family is None or not family.unused:
        return readers, ()
    new_prefixes, unused_prefixes = family.prefixes, family.unused
    selected, unused = {}, []
    for name, (file, reader) in readers.items():
        prefix = next((prefix for prefix in new_prefixes if name.startswith(prefix)), None)
        if prefix is None and name.startswith(unused_prefixes):
            unused.append(name)
        elif prefix is None:
            selected[name] = (file, reader)
        else:
            new_name = new_prefixes[prefix] + name.removeprefix(prefix)
            selected[new_name] = (file, RenamedReader(reader, name))
    message = f"{len(unused)} tensors are not the text model's and are not used: {_list_names(unused)}"
    return selected, (message,) if unused else ()


def tensor_reader(readers: dict) -> Callable[[str], Tensor]:
    """A function from a tensor's name to the tensor in the mapped file."""
    return lambda name: readers[name][1].get_tensor(name)


def fingerprints(folder: Path, readers: dict) -> dict[str, str]:
    """Hashes of config.json, and of every tensor's name, shape, type and a sample of its bytes (all bytes up to 64 KB).

    They take 18 ms for a GGUF file of 135 million parameters. Sizes and dates of files do not count, because ranks
    compare the hashes of copies on several machines.
    """
    tensors, num_runs = hashlib.sha256(), min(SAMPLE_RUNS, max(2, MAX_RUNS // max(1, len(readers))))
    for name in sorted(readers):
        header = readers[name][1].get_slice(name)
        tensors.update(f"{name} {header.get_shape()} {header.get_dtype()}".encode())
        for run in sample(header, num_runs):
            tensors.update(run.contiguous().view(torch.uint8).numpy())
    config = hashlib.sha256(json.dumps(read_json(folder / "config.json")).encode())
    return {"its config.json": config.hexdigest(), "its tensors": tensors.hexdigest()}


def sample(header, num_runs: int) -> Iterator[Tensor]:
    """Runs of a stored tensor's rows, flattened, the first and last rows among them. Long rows, such as matrices in a
    stack, are sampled in parts; a GGUF file's tensors as stored."""
    stored = getattr(header, "bytes", header)
    shape = header.get_shape() if stored is header else [*stored.shape]
    if not shape or 0 in shape:  # safetensors cannot slice it
        yield header[...].reshape(-1)
        return
    rows, columns = [*shape, 1][:2]
    num_bytes = stored[(slice(1), slice(1))[: len(shape)]].nbytes  # of one element of a row, with all deeper dimensions
    width = columns if columns * num_bytes <= SAMPLE_RUNS * SAMPLE_BYTES else max(1, SAMPLE_BYTES // num_bytes)
    height = min(rows, max(1, SAMPLE_BYTES // (width * num_bytes)))
    if width == columns and rows <= height * num_runs:
        yield stored[:].reshape(-1)
        return
    for i in range(num_runs):
        row, column = ((n - size) * i // (num_runs - 1) for n, size in ((rows, height), (columns, width)))
        yield stored[(slice(row, row + height), slice(column, column + width))[: len(shape)]].reshape(-1)


def has_separate_head(readers: dict, shape: list[int]) -> bool:
    """Does the folder have a head that differs from its embedding of this shape (V, D)?"""
    embedding, names = "model.embed_tokens.weight", [name for name in readers if name.startswith("lm_head.")]
    if not names or embedding not in readers or readers[embedding][1].get_slice(embedding).get_shape() != shape:
        return False
    if names != ["lm_head.weight"]:  # quantized
        return True
    head, embedding = (readers[name][1].get_slice(name) for name in (*names, embedding))
    if head.get_shape() != shape:
        return True
    return not all(torch.equal(head[rows].float(), embedding[rows].float()) for rows in row_chunks(*shape))


def check_headers(folder: Path, expected: dict[str, tuple], readers: dict, tied: bool) -> None:
    """ValueError that lists missing and unexpected tensors, and those of another shape or type than expected."""
    absent = [name for name in expected if name not in readers]
    # Old checkpoints store RoPE's frequencies, and some store a tied head.
    allowed = {*expected, "lm_head.weight"} if tied else expected
    extra = [name for name in readers if name not in allowed and not name.endswith("rotary_emb.inv_freq")]
    wrong = []
    for name in expected.keys() & readers.keys():
        header = readers[name][1].get_slice(name)
        shape, types = expected[name]
        if tuple(header.get_shape()) != shape:
            wrong.append(f"{name} is {header.get_shape()} instead of {list(shape)}")
        elif header.get_dtype() not in types:
            wrong.append(f"{name} is of type {header.get_dtype()}; {', '.join(types)} can be read")
    problems = [("missing", absent), ("unexpected", extra), ("misshapen", wrong)]
    messages = [f"{problem}: {_list_names(names)}" for problem, names in problems if names]
    if absent == ["lm_head.weight"]:
        messages.append(
            "if the head shares the embedding's weights, config.json should say tie_word_embeddings: true"
            " (at its top, where it has a text_config)"
        )
    bare = {name.removeprefix("model.") for name in absent} - {"lm_head.weight"}
    if bare and bare <= {*extra}:
        messages.append(
            "names without 'model.' are a bare model's, saved without its head: save its AutoModelForCausalLM"
        )
    if messages:
        raise ValueError(f"{folder}: the tensors do not fit config.json; {'; '.join(messages)}")


def _list_names(names: list[str]) -> str:
    names = [one_line(name)[:160] for name in sorted(names)]
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def shard_name(number: int, num_shards: int) -> str:
    return f"model-{number:05d}-of-{num_shards:05d}.safetensors"


def save_tensors(file: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file atomically."""
    write_atomically(file, lambda partial: save_file(tensors, partial, metadata={"format": "pt"}))


def write_index(folder: Path, files: dict[str, str]) -> None:
    """Write model.safetensors.index.json, without which a folder of shards does not load."""
    index = json.dumps({"metadata": {}, "weight_map": files}, indent=1)
    write_atomically(folder / "model.safetensors.index.json", lambda partial: partial.write_text(index))


@contextlib.contextmanager
def complete_folder(folder: Path) -> Iterator[Path]:
    """A new folder named NAME.partial, renamed to NAME when the block ends. An error, a signal or a kill leaves
    NAME.partial behind; the next attempt deletes it."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        os.rename(partial, folder)
    except OSError as error:
        raise OSError(f"{error}; what was written lies in {partial}, which may be deleted") from None


def write_atomically(file: Path, write: Callable[[Path], object]) -> None:
    """write(NAME.partial), flush it to disk, then rename it to NAME. OSError for a full disk."""
    partial = file.with_name(f"{file.name}.partial")
    try:
        write(partial)
    except (SafetensorError, RuntimeError) as error:  # raised by safetensors and torch.save for an OSError
        raise OSError(f"{file}: cannot be written: {one_line(error)}") from None
    partial.chmod(0o644)  # safetensors creates files that only their owner can read
    with partial.open("rb") as stream:
        os.fsync(stream.fileno())
    os.replace(partial, file)
