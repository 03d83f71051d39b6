"""A folder's files: JSON and safetensors, checked when they are read, whole or not there when they are written.

    read_json           a JSON object of bounded size
    shards, open_shards the files of tensors of a folder, and what their headers say; check_headers  does it fit?
    fingerprints        hashes that tell one folder from another
    write_atomically, complete_folder   a file, or a folder, that has another name until it is complete

A GGUF file is read like a folder: FILE.gguf/config.json is what its keys say. Every ValueError names the file. This
file does not know models or what the tensors mean.
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

import loading.gguf as gguf
import loading.gguf_metadata as gguf_folder
import loading.vocabularies as vocabularies
from loading.chat_templates import one_line
from weights.formats import row_chunks

MOST_NAMES = 8  # an error lists so many tensors and counts the rest
# Samples of a tensor: so many runs of rows, evenly spread, of at least so many bytes; fewer where tensors are many.
SAMPLE_RUNS, SAMPLE_BYTES, ALL_RUNS = 16, 4096, 2**14


def read_json(file: Path) -> dict:
    """A JSON object from a file that must be there, or that a GGUF file stands for. A config.json comes with what a
    folder of ModelOpt may say in hf_quant_config.json alone."""
    if gguf.is_gguf(file.parent):
        return gguf_folder.read_json(file.parent, file.name)
    if not vocabularies.is_there(file):
        others = sorted(file.parent.glob("*.gguf"))
        raise ValueError(f"{file}: no such file" + (f"; give {others[0].name} itself" if others else ""))
    found = vocabularies.read_json(file)
    if file.name == "config.json":
        stored = found.get("quantization_config")
        if stored is None:
            stored = vocabularies.read_json(file.with_name("hf_quant_config.json")).get("quantization")
            found |= {"quantization_config": {"quant_method": "modelopt", **stored}} if isinstance(stored, dict) else {}
        elif isinstance(stored, dict) and stored.get("quant_library") == "modelopt":  # as its version 0.29 writes it
            stored["quant_method"] = "modelopt"
    return found


def shards(folder: Path) -> list[Path]:
    """The safetensors files of a folder: model.safetensors, or those that the index names. The parts of a GGUF file."""
    if gguf.is_gguf(folder):
        return gguf.parts_of(folder)
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if vocabularies.is_there(single):
        return [single]
    if not vocabularies.is_there(index):
        pickles, parts = [*folder.glob("*.bin"), *folder.glob("*.pth")], sorted(folder.glob("*-of-*.safetensors"))
        hint = f"; {pickles[0].name} is a pickle: convert the folder to safetensors first" if pickles else ""
        if parts:
            hint = f"; {parts[0].name} is a shard: fetch {index.name} too, from where the shards came"
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
            vocabularies.plain_file(file, sys.maxsize)
            is_gguf = gguf.is_gguf(file)
            reader = gguf.Tensors(file, files[0]) if is_gguf else safe_open(file, framework="pt", device="cpu")
        except (SafetensorError, OSError, MemoryError) as error:  # the last: too large to be mapped
            raise ValueError(f"{file}: not a readable safetensors file: {one_line(error)}") from None
        for name in reader.keys():  # noqa: SIM118, a reader is no dict
            if name in readers:
                raise ValueError(f"{file}: {_some([name])} stands in {readers[name][0].name} too")
            readers[name] = (file, reader)
    return readers


class Renamed:
    """An open file of which one tensor has another name."""

    def __init__(self, reader, stored: str):
        self.reader, self.stored = reader, stored

    def get_slice(self, name: str):
        return self.reader.get_slice(self.stored)

    def get_tensor(self, name: str) -> Tensor:
        return self.reader.get_tensor(self.stored)


# Families that hold a text model among others: what leads its names there, and what leads those of the others.
WITHIN = {
    "mistral3": (
        {"language_model.model.": "model.", "language_model.lm_head.": "lm_head.", "model.language_model.": "model."},
        ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
    ),
    "mimo": ({}, ("model.mtp_layers.",)),
}


def text_only(readers: dict[str, tuple[Path, object]], family: str | None) -> tuple[dict, tuple[str, ...]]:
    """`open_shards`' dictionary with the text model's tensors alone, by a text model's names, and what to say of the
    others."""
    if family not in WITHIN:
        return readers, ()
    leads, others = WITHIN[family]
    found, unused = {}, []
    for name, (file, reader) in readers.items():
        lead = next((lead for lead in leads if name.startswith(lead)), None)
        if lead is None and name.startswith(others):
            unused.append(name)
            continue
        own = name if lead is None else leads[lead] + name.removeprefix(lead)
        found[own] = (file, reader if lead is None else Renamed(reader, name))
    said = f"{len(unused)} tensors are not the text model's and are not used: {_some(unused)}"
    return found, (said,) if unused else ()


def reading(readers: dict) -> Callable[[str], Tensor]:
    """Hugging Face name -> its tensor in the mapped file."""
    return lambda name: readers[name][1].get_tensor(name)


def fingerprints(folder: Path, readers: dict) -> dict[str, str]:
    """Hashes that tell one folder from another: of config.json; and of every tensor's name, shape, type and a sample of
    its bytes, all of them up to 64 KB. That takes 18 ms for a GGUF file of 135 million parameters. Sizes and dates of
    files are left out: ranks compare these hashes, and two machines hold copies with other dates."""
    tensors, num_runs = hashlib.sha256(), min(SAMPLE_RUNS, max(2, ALL_RUNS // max(1, len(readers))))
    for name in sorted(readers):
        header = readers[name][1].get_slice(name)
        tensors.update(f"{name} {header.get_shape()} {header.get_dtype()}".encode())
        for run in sample(header, num_runs):
            tensors.update(run.contiguous().view(torch.uint8).numpy())
    config = hashlib.sha256(json.dumps(read_json(folder / "config.json")).encode())
    return {"its config.json": config.hexdigest(), "its tensors": tensors.hexdigest()}


def sample(header, num_runs: int) -> Iterator[Tensor]:
    """Runs of a stored tensor's rows, first and last ones too, flattened; of long rows, such as matrices in a stack,
    parts. A GGUF file's tensors as they are stored."""
    stored = getattr(header, "bytes", header)
    shape = header.get_shape() if stored is header else [*stored.shape]
    if not shape or 0 in shape:  # cannot be cut
        yield header[...].reshape(-1)
        return
    rows, columns = [*shape, 1][:2]
    num_bytes = stored[(slice(1), slice(1))[: len(shape)]].nbytes  # of a row and a column, with what lies deeper
    width = columns if columns * num_bytes <= SAMPLE_RUNS * SAMPLE_BYTES else max(1, SAMPLE_BYTES // num_bytes)
    height = min(rows, max(1, SAMPLE_BYTES // (width * num_bytes)))
    if width == columns and rows <= height * num_runs:
        yield stored[:].reshape(-1)
        return
    for i in range(num_runs):
        top, left = ((n - size) * i // (num_runs - 1) for n, size in ((rows, height), (columns, width)))
        yield stored[(slice(top, top + height), slice(left, left + width))[: len(shape)]].reshape(-1)


def has_own_head(readers: dict, shape: list[int]) -> bool:
    """Is there a head that differs from an embedding of this shape (V, D) that is stored too?"""
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
    """Every expected tensor is there, with its shape and one of its types, and no other. ValueError lists the rest."""
    missing = [name for name in expected if name not in readers]
    # Old checkpoints store RoPE's frequencies; a tied head may be stored although the embedding stands for it.
    extra = [
        name
        for name in readers
        if name not in expected and not name.endswith("rotary_emb.inv_freq") and not (tied and name == "lm_head.weight")
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
        found.append(
            "if the head shares the embedding's weights, config.json should say tie_word_embeddings: true"
            " (at its top, where it has a text_config)"
        )
    bare = {name.removeprefix("model.") for name in missing} - {"lm_head.weight"}
    if bare and bare <= {*extra}:
        found.append("names without 'model.' are a bare model's, saved without its head: save its AutoModelForCausalLM")
    if found:
        raise ValueError(f"{folder}: the tensors do not fit config.json; {'; '.join(found)}")


def _some(names: list[str]) -> str:
    names = [one_line(name)[:160] for name in sorted(names)]
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def shard_name(number: int, of: int) -> str:
    return f"model-{number:05d}-of-{of:05d}.safetensors"


def save_tensors(file: Path, tensors: dict[str, Tensor]) -> None:
    """A safetensors file, whole or not at all."""
    write_atomically(file, lambda partial: save_file(tensors, partial, metadata={"format": "pt"}))


def write_index(folder: Path, files: dict[str, str]) -> None:
    """The file that names all others: without it a folder of shards does not load."""
    index = json.dumps({"metadata": {}, "weight_map": files}, indent=1)
    write_atomically(folder / "model.safetensors.index.json", lambda partial: partial.write_text(index))


@contextlib.contextmanager
def complete_folder(folder: Path) -> Iterator[Path]:
    """A new folder to be filled, which has another name, NAME.partial, until the block is done. What stops the block,
    an error, a signal or a kill, leaves it there under that name; the next attempt starts anew."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        os.rename(partial, folder)
    except OSError as error:
        raise OSError(f"{error}; what was written lies in {partial}, which may be deleted") from None


def write_atomically(file: Path, write: Callable[[Path], object]) -> None:
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
