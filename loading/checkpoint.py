"""A Hugging Face folder or a GGUF file, opened: each of its files is read and checked once.

    Checkpoint      its config, tensors, weights and fingerprints; `load` makes a Transformer
    load_model      Checkpoint or path -> Transformer
    load_config     Checkpoint or path -> Config

All headers are checked before the first byte of a weight is copied. models.py builds what is filled
here, saving.py writes folders, quantized/reader.py reads those of other programs, and gguf.py reads
llama.cpp's files.
"""

import hashlib
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from decoding.errors import UserError
from loading.adapter import adapter_hash, merging_reader
from loading.config import config_from_hf
from loading.families import FAMILIES, family_of
from loading.files import (
    check_headers,
    fingerprint,
    has_separate_head,
    open_tensors,
    read_config_json,
    read_index,
    tensor_files,
    tensor_reader,
    text_model_tensors,
)
from loading.models import allocate, empty_model, expected_tensors, load_weights
from loading.plain_files import error_prefix, is_gguf, one_line, plain_file
from loading.quantization import (
    QUICKDRAFT_CONFIG,
    StoredForm,
    max_group,
    read_stored_form,
    resolve_schemes,
)
from loading.weight_names import pieces, sources
from model import Config, Transformer
from tp import ALONE, Ranks, check_divisible
from weights.walker import named_linears


class Weights(NamedTuple):
    """A checkpoint's tensors as the weights of a model, all headers checked.

    `config` differs from config.json's where a head is stored that is not the embedding.
    """

    config: Config
    form: StoredForm
    read: Callable[[str], Tensor]  # a Hugging Face name, or that of a part -> the tensor


class Checkpoint:
    """A Hugging Face folder or a GGUF file, which is read like a folder. Nothing is read before it
    is asked for.

    `adapter`: a LoRA folder of PEFT, merged as the weights are read.

    A Checkpoint is a path too: `Path(checkpoint)` is the folder or file. UserError names a path
    that is neither.
    """

    def __init__(self, path: str | os.PathLike, adapter: str | os.PathLike | None = None):
        self.path = Path(path)
        self.adapter = None if adapter is None else Path(adapter)
        self.is_gguf = is_gguf(self.path)
        if self.path.is_file() and not self.is_gguf:
            plain_file(self.path, math.inf)  # refuses a Git LFS pointer
            raise UserError(f"{self.path}: neither a folder nor a GGUF file")
        if not self.is_gguf and not self.path.is_dir():
            raise UserError(f"{self.path}: no such folder or GGUF file")

    @classmethod
    def of(cls, checkpoint: "str | os.PathLike | Checkpoint") -> "Checkpoint":
        """An opened checkpoint as it is; a path is opened."""
        return checkpoint if isinstance(checkpoint, cls) else cls(checkpoint)

    def __fspath__(self) -> str:
        return str(self.path)

    @cached_property
    def hf(self) -> dict:
        """config.json, or what the keys of a GGUF file say in its place. It is shared: copy it
        before you change it."""
        if not self.is_gguf:
            return read_config_json(self.path / "config.json")
        from loading.gguf_metadata import read_config

        return read_config(self.path)

    @cached_property
    def config(self) -> Config:
        """The model's Config. UserError names the file, the key and the value that cannot be
        used."""
        return config_of(self.hf, self.path / "config.json")

    @cached_property
    def files(self) -> list[Path]:
        """The files that hold its tensors."""
        if not self.is_gguf:
            return tensor_files(self.path)
        from loading.gguf import parts_of

        return parts_of(self.path)

    @cached_property
    def tensors(self) -> dict[str, object]:
        """Name -> the stored tensor: get_shape(), get_dtype(), and [...] to read it or [a:b] to
        read rows of it."""
        if not self.is_gguf:
            return open_tensors(self.files)
        from loading import gguf

        return gguf.open_tensors(self.path)

    @cached_property
    def text_tensors(self) -> dict[str, object]:
        """Those of `tensors` that are the text model's, by its names."""
        return text_model_tensors(self.tensors, family_of(self.hf), self.config.n_layers)

    @cached_property
    def spare_tensors(self) -> dict[str, object]:
        """Those of `text_tensors` that the folder's index does not name."""
        index = {} if self.is_gguf else read_index(self.path)
        unnamed = {name: self.tensors[name] for name in self.tensors if index and name not in index}
        return text_model_tensors(unnamed, family_of(self.hf), self.config.n_layers)

    @cached_property
    def model_tensors(self) -> dict[str, object]:
        """`text_tensors`, in which every expert has tensors of its own."""
        if FAMILIES[self.config.family].merged_experts is None:
            return self.text_tensors
        from loading.quantized.merged_experts import split_experts

        return split_experts(self.text_tensors, self.config)

    @cached_property
    def weights(self) -> Weights:
        """Its tensors as weights. UserError lists those that are missing, unexpected, or of a
        wrong shape or type."""
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
        form, read = open_weights(self, config, tensors)
        if self.adapter is not None:
            if form.is_quantized:
                raise UserError(
                    f"--adapter {self.adapter}: {self.path} is stored quantized; merge into the"
                    f" original weights"
                )
            read = merging_reader(self.adapter, family_of(self.hf), config, read)
        return Weights(config, form._replace(notes=(*notes, *form.notes)), read)

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

        `quantize`: a scheme of quantize.py. Every matrix is quantized as it is read, so the model
            is never held in full precision. Without it, quantized folders and GGUF blocks of 4 and
            8 bits are loaded as stored. Another program's format that none of our schemes
            represents exactly is requantized, with a note on stderr.
        `head_scheme`: a scheme for lm_head and a tied embedding, which otherwise stay as they are.
        `tp`: the Ranks over which the model is sharded. This process reads and holds its shard
        alone.
        `progress`: show a bar on stderr, if that is a terminal.
        `pack`: False leaves quantized matrices as stored, to be saved, copied or packed later.

        UserError names file and tensor, before any weight is copied, or a tensor with NaN or
        infinity.
        """
        ranks = tp or ALONE
        config, form, read = self.weights
        scheme, head_scheme, overrides = resolve_schemes(form, self.path, quantize, head_scheme)
        if form.requantize_to:
            *notes, reason = form.notes
            form = form._replace(notes=(*notes, f"{reason}; quantized again to {scheme}"))
        with error_prefix(self.path):
            check_divisible(config, ranks.world, max_group(scheme, overrides))
        ranks.check_same(self.fingerprints)
        model = empty_model(config, dtype, scheme, head_scheme, ranks, overrides)
        allocate(model, device)
        stored_names = {name for name, _ in named_linears(model)} if form.scheme else overrides
        total = sum(parameter.nbytes for parameter in model.parameters())
        desc = f"load {self.path.name}"
        bar = tqdm(
            total=total, unit="B", unit_scale=True, desc=desc, disable=None if progress else True
        )
        with bar, error_prefix(self.path):
            model = load_weights(model, read, ranks, pack, stored_names, bar.update)
        if ranks.rank == 0:
            for note in form.notes:
                print(f"{self.path}: {note}", file=sys.stderr)
        return model

    @property
    def stored_scheme(self) -> str | None:
        """The scheme, or the other program's quant_method, in its config.json; None for full
        precision."""
        form = read_stored_form(self.hf, self.path / "config.json")
        quantization_config = self.hf.get("quantization_config") or {}
        return form.scheme or quantization_config.get("quant_method")

    def fingerprints(self) -> dict[str, str]:
        """Hashes of config.json, of the tensors and of the adapter.

        Sizes and dates of files do not count, because ranks compare the hashes of copies on several
        machines.
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
        find_layouts(hf)  # refuses unsupported quantization
        return config_from_hf({**hf, "quantization_config": None})
    except UserError as error:
        raise UserError(f"{file}: {one_line(error).removeprefix('config.json: ')}") from None


def find_layouts(hf: dict):
    """The Layouts of another program's weights, by config.json; None for plain weights and ours."""
    if hf.get("quantization_config") in (None, {}, QUICKDRAFT_CONFIG):
        return None
    from loading.quantized import detection

    return detection.find_layouts(hf)


# ----------------------------------------------------------------------------------- stored forms


def open_weights(
    checkpoint: Checkpoint, config: Config, tensors: dict
) -> tuple[StoredForm, Callable[[str], Tensor]]:
    """(form, read) of a checkpoint's tensors, whose headers are checked."""
    if checkpoint.is_gguf:
        return open_gguf(checkpoint, config, tensors)
    layouts = find_layouts(checkpoint.hf)
    if layouts is not None:
        return open_other_format(checkpoint, config, tensors, layouts)
    form = read_stored_form(checkpoint.hf, checkpoint.path / "config.json")
    read = tensor_reader(tensors)
    if FAMILIES[config.family].merged_experts:
        from loading.quantized import merged_experts

        if merged_experts.is_mxfp4(checkpoint.hf):
            form = StoredForm(overrides=expert_schemes(config, tensors))
            read = merged_experts.tensor_reader(tensors)
    model = empty_model(
        config, torch.float32, form.scheme, form.head_scheme, overrides=form.overrides
    )
    expected = expected_tensors(config, model)
    spare = checkpoint.spare_tensors
    check_headers(checkpoint.path, expected, tensors, config.tie_embeddings, spare)
    return form, read


def open_other_format(
    checkpoint: Checkpoint, config: Config, tensors: dict, layouts
) -> tuple[StoredForm, Callable[[str], Tensor]]:
    """`open_weights` of a folder that another program quantized, in these Layouts."""
    from loading.quantized import reader

    tensors = dict(tensors)  # `reader` leaves some out
    plain = empty_model(config, torch.float32)
    weights = {name: linear.weight for name, linear in named_linears(plain)}
    weights["embed"] = plain.embed.weight
    shapes = {}
    for name, weight in weights.items():
        module = "embed" if name == "lm_head" and config.tie_embeddings else name
        shapes[name] = {
            source.removesuffix(".weight"): tuple(part.shape)
            for source, part in pieces(config, f"{module}.weight", weight)
        }
    with error_prefix(checkpoint.path):
        quantized = reader.find_matrices(layouts, tensors, shapes)
        expected = reader.expected_tensors(quantized, expected_tensors(config, plain), tensors)
        spare = checkpoint.spare_tensors
        check_headers(checkpoint.path, expected, tensors, config.tie_embeddings, spare)
        schemes = reader.choose_schemes(quantized)
    read = reader.tensor_reader(quantized, schemes, tensor_reader(tensors))
    return reader.stored_form(quantized, schemes), read


def expert_schemes(config: Config, tensors: dict) -> dict[str, str]:
    """The experts of gpt-oss's folder that are stored in MXFP4, by our names."""
    names = (name for name, _ in named_linears(empty_model(config, torch.float32)))
    return {
        name: "mxfp4" for name in names if sources(config.family, f"{name}.codes")[0] in tensors
    }


def open_gguf(
    checkpoint: Checkpoint, config: Config, tensors: Mapping
) -> tuple[StoredForm, Callable[[str], Tensor]]:
    """`open_weights` of a GGUF file, in which every matrix has its own type."""
    from loading import gguf

    model = empty_model(config, torch.float32)
    check_headers(checkpoint.path, expected_tensors(config, model), tensors, config.tie_embeddings)
    return gguf.stored_form(model, tensors), gguf.tensor_reader(tensors)
