"""A Hugging Face folder or a GGUF file, opened: each of its files is read and checked once.

    Checkpoint      its config, tensors, weights and fingerprints; `load` makes a Transformer
    load_model      Checkpoint or path -> Transformer
    load_config     Checkpoint or path -> Config

All headers are checked before the first byte of a weight is copied. folder.py reads folders and
gguf.py llama.cpp's files, models.py builds and fills the model, and saving.py writes folders.
"""

import hashlib
import json
import math
import os
import sys
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from tqdm import tqdm

from decoding.errors import UserError
from loading.adapter import adapter_hash, merge_adapter
from loading.config import config_from_hf
from loading.families import FAMILIES, family_of
from loading.files import (
    fingerprint,
    has_separate_head,
    read_config_json,
    text_model_tensors,
)
from loading.folder import Folder, Layouts, checked_source, own_layouts
from loading.models import allocate, check_shards, empty_model, load_weights
from loading.plain_files import error_prefix, is_gguf, plain_file
from loading.quantization import QUICKDRAFT_CONFIG, choose_schemes, plain_note
from loading.stored import Source
from model import Config, Transformer
from tp import ALONE, Ranks


class Checkpoint:
    """A Hugging Face folder or a GGUF file, which is read like a folder. Nothing is read before it
    is asked for. Its tensors come in five forms: `tensors` as stored; `text_tensors`, without
    vision and renamed; `model_tensors`, with experts apart; `source`, each with the scheme that
    holds it; and `spare_tensors`, which may be there without being expected.

    `adapter`: a LoRA folder of PEFT, merged as the weights are read.

    A Checkpoint is a path too: `Path(checkpoint)` is the folder or file. UserError names a path
    that is neither.
    """

    def __init__(self, path: str | os.PathLike, adapter: str | os.PathLike | None = None):
        self.path = Path(path)
        self.adapter = None if adapter is None else Path(adapter)
        self.is_gguf = is_gguf(self.path)
        if self.is_gguf:
            from loading.gguf_folder import GgufModel

            self.storage = GgufModel(self.path)
            return
        if self.path.is_file():
            plain_file(self.path, math.inf)  # refuses a Git LFS pointer
            raise UserError(f"{self.path}: neither a folder nor a GGUF file")
        if not self.path.is_dir():
            raise UserError(f"{self.path}: no such folder or GGUF file")
        self.storage = Folder(self.path)

    @classmethod
    def of(cls, checkpoint: "str | os.PathLike | Checkpoint") -> "Checkpoint":
        """An opened checkpoint as it is; a path is opened."""
        return checkpoint if isinstance(checkpoint, cls) else cls(checkpoint)

    def with_keys(self, keys: dict) -> "Checkpoint":
        """The same files, read as if config.json had these keys."""
        changed = Checkpoint(self.path, self.adapter)
        changed.storage.hf = self.hf | keys
        return changed

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def hf(self) -> dict:
        """config.json, or what the keys of a GGUF file say in its place. It is shared: copy it
        before you change it."""
        return self.storage.hf

    @property
    def config_file(self) -> Path:
        """The file that `hf` is read from, for messages."""
        return self.path if self.is_gguf else self.path / "config.json"

    @cached_property
    def config(self) -> Config:
        """The model's Config. UserError names the file, the key and the value that cannot be
        used."""
        return config_of(self.hf, self.config_file)

    @property
    def files(self) -> list[Path]:
        """The files that hold its tensors."""
        return self.storage.files

    @property
    def tensors(self) -> dict[str, object]:
        """Name -> the stored tensor: get_shape(), get_dtype(), and [...] to read it or [a:b] to
        read rows of it."""
        return self.storage.tensors

    @cached_property
    def text_tensors(self) -> dict[str, object]:
        """Those of `tensors` that are the text model's, by its names."""
        return text_model_tensors(self.tensors, family_of(self.hf), self.config.n_layers)

    @cached_property
    def spare_tensors(self) -> dict[str, object]:
        """Those of `text_tensors` that the folder's index does not name: check_headers accepts
        them, whether the model has them or not."""
        index = self.storage.index or self.tensors
        unnamed = {name: self.tensors[name] for name in self.tensors.keys() - index.keys()}
        return text_model_tensors(unnamed, family_of(self.hf), self.config.n_layers)

    @cached_property
    def model_tensors(self) -> dict[str, object]:
        """`text_tensors`, in which every expert has tensors of its own."""
        if FAMILIES[self.config.family].merged_experts is None:
            return self.text_tensors
        from loading.quantized.merged_experts import split_experts

        return split_experts(self.text_tensors, self.config)

    @cached_property
    def source(self) -> Source:
        """What is stored in it, all headers checked. UserError lists tensors that are missing,
        unexpected, or of a wrong shape or type."""
        config = self.config
        tensors = self.model_tensors
        notes = []
        if num_unused := len(self.tensors) - len(self.text_tensors):
            notes.append(f"{num_unused} tensors are not the text model's and are not used")
        if config.tie_embeddings and has_separate_head(tensors):
            # As in transformers, whatever config.json says.
            config = replace(config, tie_embeddings=False)
            notes.append(
                "tie_word_embeddings is true, but lm_head.weight differs from the embedding and is"
                " used as the head"
            )
        source = checked_source(
            self.path,
            config,
            tensors,
            self.layouts,
            self.spare_tensors,
            self.storage.as_stored,
        )
        stored = source.tensors
        if self.adapter is not None:
            if source.keeps_plain or not all(tensor.is_float for tensor in stored.values()):
                raise UserError(
                    f"--adapter {self.adapter}: {self.path} is stored quantized; merge into the"
                    f" original weights"
                )
            stored = merge_adapter(self.adapter, family_of(self.hf), config, stored)
        return source._replace(tensors=stored, notes=(*notes, *source.notes))

    def load(
        self,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        quantize: str | None = None,
        head_scheme: str | None = None,
        tp: Ranks | None = None,
        progress: bool = False,
        pack: bool = True,
    ) -> Transformer:
        """Its model, filled tensor by tensor.

        `dtype`: of what is not quantized, whatever the files hold; some routers stay float32.
        `quantize`: a scheme of quantize.py. Matrices are quantized as they are read, so the model
            is never held in full precision. Without it, quantized folders and GGUF blocks that one
            of our schemes holds are loaded as stored. Another program's format that none of our
            schemes represents exactly is requantized or held as plain weights, with a note on
            stderr.
        `head_scheme`: a scheme for lm_head and a tied embedding. None or "none" leaves them as
            stored; "auto" takes the one that goes with `quantize`: int8 with int4, otherwise none.
        `tp`: the Ranks over which the model is sharded. This process reads and holds its shard
        alone.
        `progress`: show a bar on stderr, if that is a terminal.
        `pack`: False leaves quantized matrices as stored, to be saved, copied or packed later.

        UserError names file and tensor before any weight is copied. A matrix that is quantized here
        and holds NaN or infinity is refused when it is read.
        """
        ranks = tp or ALONE
        source = self.source
        schemes = choose_schemes(source, self.path, quantize, head_scheme)
        with error_prefix(self.path):
            check_shards(source.config, schemes, ranks.world)
            model = empty_model(source.config, dtype, schemes, ranks)
        ranks.check_same(self.fingerprints)
        allocate(model, device)
        total = sum(parameter.nbytes for parameter in model.parameters())
        bar = tqdm(
            total=total,
            unit="B",
            unit_scale=True,
            desc=f"load {self.path.name}",
            disable=None if progress else True,
        )
        with bar, error_prefix(self.path):
            model = load_weights(model, source.tensors, ranks, pack, bar.update)
        if ranks.rank == 0:
            notes = [*source.notes, plain_note(source, schemes)]
            near, reason = source.nearest
            is_requantized = any(
                scheme and tensor.near
                for name, scheme in schemes.items()
                for tensor in source.of(name)
            )
            if is_requantized:
                notes.append(f"{reason}; quantized again to {quantize or near}")
            for note in filter(None, notes):
                print(f"{self.path}: {note}", file=sys.stderr)
        return model

    @property
    def layouts(self) -> Layouts:
        """The Layouts of its quantized matrices: another program's, or ours."""
        return foreign_layouts(self.hf) or own_layouts(self.hf, self.config_file)

    @property
    def stored_scheme(self) -> str | None:
        """The scheme, or the other program's quant_method, in its config.json; None for full
        precision."""
        layouts = own_layouts(self.hf, self.config_file)
        quantization_config = self.hf.get("quantization_config")
        if not isinstance(quantization_config, dict):  # what is no object is refused elsewhere
            quantization_config = {}
        return layouts.block_scheme or quantization_config.get("quant_method")

    def fingerprints(self) -> dict[str, str]:
        """Hashes of config.json, of the tensors and of the adapter.

        Dates of files do not count, because ranks compare the hashes of copies on several machines.
        """
        hashes = {
            "its config.json": hashlib.sha256(json.dumps(self.hf).encode()).hexdigest(),
            "its tensors": fingerprint(self.tensors),
        }
        if self.adapter is not None:
            hashes["its adapter"] = adapter_hash(self.adapter)
        return hashes


def load_model(checkpoint_dir: str | os.PathLike | Checkpoint, **options) -> Transformer:
    """The model of a Hugging Face folder (config.json and safetensors; no tokenizer is needed) or a
    GGUF file.

    `checkpoint_dir`: its path, or an opened Checkpoint, which may have a LoRA adapter.
    `options`: those of Checkpoint.load: device, dtype, quantize, head_scheme, tp, progress, pack.
    """
    return Checkpoint.of(checkpoint_dir).load(**options)


def load_config(checkpoint_dir: str | os.PathLike | Checkpoint) -> Config:
    """The Config of a folder or GGUF file. UserError names the file, the key and the value that
    cannot be used."""
    return Checkpoint.of(checkpoint_dir).config


def read_config(file: Path) -> Config:
    """The Config of a config.json without a folder."""
    return config_of(read_config_json(file), file)


def config_of(hf: dict, file: Path) -> Config:
    """The Config of a config.json. UserError begins with the path that the user gave."""
    try:
        foreign_layouts(hf)  # for its UserErrors alone
        # None, because config_from_hf refuses the key with any settings.
        return config_from_hf({**hf, "quantization_config": None})
    except UserError as error:
        raise UserError(f"{file}: {str(error).removeprefix('config.json: ')}") from None


def foreign_layouts(hf: dict) -> Layouts | None:
    """The Layouts of another program's weights, by config.json; None for plain weights and ours."""
    if hf.get("quantization_config") in (None, {}, QUICKDRAFT_CONFIG):
        return None
    from loading.quantized import detection

    return detection.find_layouts(hf)
