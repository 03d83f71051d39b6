"""--draft_memory FILE: the answers of earlier runs that suffix drafts read, stored as JSON.

The file holds ids, the seeds of the noise that drew them, and checksums. This file drafts nothing.
"""

import contextlib
import hashlib
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

from cli.prompt_cache import compare
from cli.session import Session
from loading.files import write_atomically
from loading.plain_files import read_json

FORMAT = "a draft memory of quickdraft, 1"


@contextlib.contextmanager
def draft_memory(name: str | None, session: Session, writes: bool = True) -> Iterator[None]:
    """Fill the drafter's pool from the file, and write it after the block. ValueError for a file of another tokenizer
    or vocabulary, or a damaged one."""
    if name is None:
        yield
        return
    file, engine = Path(name), session.engine
    tokenizer = hashlib.sha256(b"\0".join(session.tokenizer.pieces())).hexdigest()
    origin = {"format": FORMAT, "tokenizer": tokenizer, "vocab_size": engine.model.config.vocab_size}
    if stored := engine.ranks.broadcast_object(read_json(file) if engine.ranks.rank == 0 else {}):
        texts = [stored.pop("ids", None), stored.pop("seeds", None)]
        try:
            compare(stored, origin | checksum(texts))
        except ValueError as error:
            raise ValueError(f"--draft_memory {file}: {error}; delete it, or name another file") from None
        engine.drafter.fill_pool(*texts)
    try:
        yield
    finally:
        if writes:
            engine.drafter.expect([], 0)  # moves the last answers to the pool
            pool = engine.drafter.pool[::-1]
            texts = [[id for text in pool for id in text.ids], [seed for text in pool for seed in text.seeds]]
            memory = origin | checksum(texts) | {"ids": texts[0], "seeds": texts[1]}
            write_atomically(file, lambda partial: partial.write_text(json.dumps(memory)))


def checksum(texts: list) -> dict[str, int]:
    return {"checksum": zlib.crc32(json.dumps(texts).encode())}
