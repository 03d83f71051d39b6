"""--prompt_cache FILE: the cached positions of a prompt, stored between runs as safetensors.

The file has a slot's ids and their keys and values, under the names of runner.caches_by_name. Its metadata has the
settings that computed them, and a checksum, which safetensors lacks. A damaged file, or one of another model, is
refused.
"""

import argparse
import contextlib
import hashlib
import json
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from decoding.runner import caches_by_name
from decoding.scheduler import common_prefix
from generate import Engine
from loading.adapter import adapter_hash
from loading.checkpoint import fingerprints, read_config
from loading.files import open_shards, shards, write_atomically
from loading.plain_files import plain_file

FORMAT = "a prompt cache of quickdraft, 2"  # 1 had rotated keys in fp8 too
SCHEMES = ("quantize", "quantize_head", "draft_quantize", "kv_cache_dtype")  # flags that change keys and values


class PromptCache:
    """The file of --prompt_cache; without the flag nothing happens. ValueError for a file of other flags (before a
    model is loaded) or of other models (after it)."""

    def __init__(self, args: argparse.Namespace):
        self.file = None if args.prompt_cache is None else Path(args.prompt_cache)
        self.metadata, self.tensors = {}, {}
        self.stored_prefix = [], []  # ids; is_long of the slot
        self.origin = {} if self.file is None else origin(args)
        if self.file and self.file.exists():
            with self.refusing():
                readers = open_shards([plain_file(self.file, sys.maxsize)])
                reader = next((reader for _, reader in readers.values() if hasattr(reader, "metadata")), None)
                self.metadata = (reader and reader.metadata()) or {}
                self.check(self.origin)
                self.tensors = {name: reader.get_tensor(name) for name in readers}  # mapped, not read

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, OSError) as error:
            reason = str(error).removeprefix(f"{self.file}: ")
            raise ValueError(f"--prompt_cache {self.file}: {reason}; delete it, or name another file") from None

    def check(self, ours: dict[str, str]) -> None:
        compare({name: self.metadata.get(name) for name in ours}, ours)

    @contextlib.contextmanager
    def around(self, engine: Engine, prompts: list[list[int]]) -> Iterator[None]:
        """Fill a slot from the file. After the block, and at Ctrl-C, write a slot if it has more positions than the
        file: those of the prompts' common beginning, or in a chat those of the conversation."""
        if self.tensors:
            self.load(engine)
        try:
            yield
        except KeyboardInterrupt:
            self.save_longer(engine, prompts)
            raise
        self.save_longer(engine, prompts)

    def save_longer(self, engine: Engine, prompts: list[list[int]]) -> None:
        if self.file:
            slot = max(engine.scheduler.slots, key=lambda slot: common_prefix(slot.ids, *prompts))
            # A draft's own caches may lack the positions that a round or plain steps decided.
            limit = slot.num_draft if len(engine.runners) > 1 else len(slot.ids)
            n = min(common_prefix(slot.ids, *prompts), limit)
            if n > len(self.stored_prefix[0]) or (n and list(slot.is_long) != self.stored_prefix[1]):
                self.save(engine, slot.index, slot.ids[:n], slot.is_long)

    def load(self, engine: Engine) -> None:
        """Fill slot 0 with the file's positions, as many as fit."""
        start, empty = time.perf_counter(), contents(engine, 0, [], ())
        with self.refusing():
            self.check(dtypes(engine))
            N = self.tensors.get("ids", torch.empty(0)).numel()
            shapes = {name: (x.dtype, [size or N for size in x.shape]) for name, x in empty.items()}  # 0: of positions
            compare({name: (x.dtype, list(x.shape)) for name, x in self.tensors.items()}, shapes)
            self.check(checksum(self.tensors))
        self.stored_prefix = self.tensors.pop("ids").tolist(), self.tensors.pop("long").tolist()
        n = engine.max_seq_length
        slot = engine.scheduler.slots[0]
        slot.ids, slot.is_long, slot.num_draft = self.stored_prefix[0][:n], tuple(self.stored_prefix[1]), min(n, N)
        rows = contents(engine, 0, slot.ids, slot.is_long)
        for name, x in self.tensors.items():
            rows[name].copy_(x.narrow(list(empty[name].shape).index(0), 0, min(n, N)))
        self.tensors = {}
        print(f"{self.file}: {min(n, N)} tokens read in {time.perf_counter() - start:.2f} s", file=sys.stderr)

    def save(self, engine: Engine, slot: int, ids: list[int], is_long: tuple[bool, ...]) -> None:
        tensors = contents(engine, slot, ids, is_long)
        tensors = {name: x.cpu().clone(memory_format=torch.contiguous_format) for name, x in tensors.items()}
        metadata = self.origin | dtypes(engine) | checksum(tensors)
        write_atomically(self.file, lambda partial: save_file(tensors, partial, metadata=metadata))
        print(f"{self.file}: {len(ids)} tokens written", file=sys.stderr)


def compare(theirs: dict, ours: dict) -> None:
    """ValueError names the first entry that differs."""
    for name in ours | theirs:
        there, here = theirs.get(name), ours.get(name)
        if there != here:
            difference = f"{there} there, {here} here"
            raise ValueError(f"{name}: {difference if len(difference) < 120 else 'another one there than here'}")


def origin(args: argparse.Namespace) -> dict[str, str]:
    """The flags and files that determine keys and values, without paths."""
    read_config(Path(args.random_weights or Path(args.checkpoint, "config.json")))  # an error names a missing file
    identity, target = {"format": FORMAT}, None if args.random_weights else args.checkpoint
    for flag, path in (("--checkpoint", target), ("--draft_checkpoint", args.draft_checkpoint)):
        identity[flag] = json.dumps(path and checkpoint_identity(Path(path)))
    identity["--adapter"] = str(args.adapter and adapter_hash(args.adapter))
    shape = args.random_weights and hashlib.sha256(Path(args.random_weights).read_bytes()).hexdigest()
    identity["--random_weights"] = str(shape)
    return identity | {f"--{flag}": str(getattr(args, flag, None)) for flag in SCHEMES}


def checkpoint_identity(folder: Path) -> dict[str, object]:
    """Fingerprints, which read a sample of each tensor; sizes and dates of files, which change with all of it."""
    files = shards(folder)
    stats = [file.stat() for file in files]
    return fingerprints(folder, open_shards(files)) | {"its files": [[s.st_size, s.st_mtime_ns] for s in stats]}


def dtypes(engine: Engine) -> dict[str, str]:
    return {"--dtype": ", ".join(str(runner.model.norm.weight.dtype) for runner in engine.runners)}


def contents(engine: Engine, slot: int, ids: list[int], is_long: tuple[bool, ...]) -> dict[str, Tensor]:
    """The file's tensors of these ids: views of a slot."""
    caches = caches_by_name(engine.runners)
    views = {f"{name}.{x}": y for name, cache in caches.items() for x, y in cache.at(slot, 0, len(ids)).items()}
    is_long = torch.tensor(is_long or [False] * len(engine.runners))
    return views | {"ids": torch.tensor(ids, dtype=torch.int64), "long": is_long}


def checksum(tensors: dict[str, Tensor]) -> dict[str, str]:
    """CRC-32 of the bytes: a twentieth of a second for 8,192 positions of 1.1B."""
    crc = 0
    for _, x in sorted(tensors.items()):
        crc = zlib.crc32(x.reshape(-1).view(torch.uint8).numpy(), crc)
    return {"checksum": str(crc)}
