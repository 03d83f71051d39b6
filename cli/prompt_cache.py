"""--prompt_cache FILE: the cached positions of a prompt, stored between runs as safetensors.

The tensors are those of decoding/stored_positions.py. The file's metadata has the settings that
computed them, hashes of the weights, and a checksum, which safetensors lacks. A damaged file, or
one of other weights or other settings, is refused.
"""

import contextlib
import hashlib
import json
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

import decoding.stored_positions as positions
from cli.exits import print_status
from cli.options import Options
from decoding.engine import Engine
from decoding.errors import UserError
from loading.adapter import adapter_hash
from loading.checkpoint import Checkpoint
from loading.files import open_safetensors, write_atomically
from loading.target import Target
from model import takes_long_factors

FORMAT = "a prompt cache of quickdraft, 5"
# Flags whose values change the cached keys and values.
KEY_VALUE_FLAGS = ("quantize", "quantize_head", "draft_quantize", "kv_cache_dtype")


class PromptCache:
    """The file of --prompt_cache; without the flag nothing happens. UserError for a file of other
    flags (before a model is loaded) or of other models (after it)."""

    def __init__(self, options: Options):
        self.file = None
        self.metadata = {}
        self.tensors = {}  # of the file, until an engine has them
        self.num_stored = 0
        if options.prompts.cache_file is None:
            return
        self.file = Path(options.prompts.cache_file)
        self.identity = cache_identity(options)
        self.paths = {
            "--checkpoint": None if options.model.random_weights else options.model.checkpoint,
            "--draft_checkpoint": options.draft.checkpoint,
        }
        if self.file.exists():
            with self.refusing():
                reader = open_safetensors(self.file)
                self.metadata = reader.metadata() or {}
                self.check(self.identity)
                self.check(self.weights())
                names = reader.keys()
                self.tensors = {name: reader.get_tensor(name) for name in names}

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        try:
            yield
        except (UserError, OSError) as error:
            reason = str(error).removeprefix(f"{self.file}: ")
            raise UserError(
                f"--prompt_cache {self.file}: {reason}; delete it, or name another file"
            ) from None

    def check(self, ours: dict[str, str]) -> None:
        """UserError names the first entry in which the file differs."""
        for name, here in ours.items():
            there = self.metadata.get(name)
            if there != here:
                difference = f"{there} there, {here} here"
                if len(difference) >= 120:
                    difference = "another one there than here"
                raise UserError(f"{name}: {difference}")

    def weights(self) -> dict[str, str]:
        """Hashes of the checkpoints' files. Files of the sizes and dates that the cache's metadata
        has are not read again."""
        hashes = {}
        for flag, path in self.paths.items():
            if path is not None:
                stats = file_stats(path)
                is_same = self.metadata.get(f"{flag}'s sizes and dates") == stats
                name = f"the files of {flag}"
                hashes[name] = self.metadata.get(name) if is_same else files_hash(path)
        return hashes

    @contextlib.contextmanager
    def around(self, engine: Engine, prompts: list[list[int]]) -> Iterator[None]:
        """Fill a slot from the file. After the block, and after Ctrl-C, write the longest cached
        prefix back (of all prompts, or of the chat) if it is longer than what the file holds."""
        if self.tensors:
            self.load(engine)
        try:
            yield
        except KeyboardInterrupt:
            self.save_longer(engine, prompts)
            raise
        self.save_longer(engine, prompts)

    def load(self, engine: Engine) -> None:
        """Fill a slot with the file's positions, as many as fit."""
        start = time.perf_counter()
        with self.refusing():
            self.check(model_identity(engine))
            self.check(checksum(self.tensors))
        prefix = positions.restore(engine, self.tensors)
        self.num_stored = len(self.tensors["ids"])
        self.tensors = {}
        seconds = time.perf_counter() - start
        print_status(f"{self.file}: {len(prefix.ids)} tokens read in {seconds:.2f} s")

    def save_longer(self, engine: Engine, prompts: list[list[int]]) -> None:
        if self.file is None:
            return
        prefix = positions.find_longest_prefix(engine, prompts)
        num_positions = len(prefix.ids)
        if num_positions <= self.num_stored:
            return
        tensors = {}
        for name, x in positions.prefix_tensors(engine, prefix).items():
            tensors[name] = x.cpu().clone(memory_format=torch.contiguous_format)
        metadata = self.identity | model_identity(engine) | checksum(tensors) | self.weights()
        for flag, path in self.paths.items():
            metadata[f"{flag}'s sizes and dates"] = file_stats(path)
        write_atomically(self.file, lambda partial: save_file(tensors, partial, metadata=metadata))
        print_status(f"{self.file}: {num_positions} tokens written")


def cache_identity(options: Options) -> dict[str, str]:
    """The flags and files that determine keys and values, without paths."""
    chosen = options.model
    _ = Target(chosen).config  # an error names a missing file
    target = chosen.checkpoint
    shape = None
    if chosen.random_weights:
        target = None
        shape = hashlib.sha256(Path(chosen.random_weights).read_bytes()).hexdigest()
    identity = {
        "format": FORMAT,
        "--checkpoint": checkpoint_identity(target),
        "--draft_checkpoint": checkpoint_identity(options.draft.checkpoint),
        "--draft mtp": checkpoint_identity(options.draft.head_folder(chosen.source)),
        "--adapter": str(chosen.adapter and adapter_hash(chosen.adapter)),
        "--random_weights": str(shape),
    }
    for flag in KEY_VALUE_FLAGS:
        identity[f"--{flag}"] = str(options.flags.get(flag))
    return identity


def checkpoint_identity(path: str | None) -> str:
    """JSON of fingerprints, which read a sample of each tensor."""
    return json.dumps(None if path is None else Checkpoint(path).fingerprints())


def file_stats(path: str | None) -> str:
    """The sizes and dates of a checkpoint's files, which change with all of it."""
    stats = [file.stat() for file in Checkpoint(path).files] if path else []
    return json.dumps([[stat.st_size, stat.st_mtime_ns] for stat in stats])


def files_hash(path: str) -> str:
    """A hash of all bytes of a checkpoint's files: copies of them have the same, in any folder."""
    digest = hashlib.sha256()
    for file in Checkpoint(path).files:
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def model_identity(engine: Engine) -> dict[str, str]:
    """What else determines keys and values: dtypes, and with longrope its factors."""
    models = [runner.model for runner in engine.runners]
    identity = {"--dtype": ", ".join(str(model.norm.weight.dtype) for model in models)}
    length = engine.max_seq_length
    rotated_long = [takes_long_factors(model.config, length) for model in models]
    if any(model.config.rope_long for model in models):
        identity["longrope's long factors"] = ", ".join(map(str, rotated_long))
    return identity


def checksum(tensors: dict[str, Tensor]) -> dict[str, str]:
    """CRC-32 of names, shapes and bytes: a twentieth of a second for 8,192 positions of 1.1B."""
    crc = 0
    for name, x in sorted(tensors.items()):
        crc = zlib.crc32(f"{name} {x.dtype} {x.shape}".encode(), crc)
        crc = zlib.crc32(x.reshape(-1).view(torch.uint8).numpy(), crc)
    return {"checksum": str(crc)}
