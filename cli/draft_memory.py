"""--draft_memory FILE: the earlier answers that suffix drafts read, kept between runs as JSON.

The file holds ids, the seeds of the noise that drew them, and the tokenizer's checksum. This file drafts nothing.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from cli.session import Session
from loading.files import write_atomically
from loading.vocabularies import read_json

FORMAT = "a draft memory of quickdraft, 1"


@contextlib.contextmanager
def draft_memory(name: str | None, session: Session, writes: bool = True) -> Iterator[None]:
    """Fill the drafter's pool from the file, and write it after the block. ValueError for a file that does not fit the
    tokenizer or the model."""
    if name is None:
        yield
        return
    file, drafter, ranks = Path(name), session.engine.drafter, session.engine.ranks
    tokenizer = hashlib.sha256(b"\0".join(session.tokenizer.pieces())).hexdigest()
    stored = ranks.broadcast_object(read_json(file) if ranks.rank == 0 else {})
    ids, seeds = stored.get("ids", []), stored.get("seeds", [])
    if stored and stored.get("format") != FORMAT:
        reason = f"format = {stored.get('format')!r:.60} is not {FORMAT!r}"
    elif stored and stored.get("tokenizer") != tokenizer:
        reason = "it belongs to another tokenizer"
    elif not are_texts(ids, seeds, V := session.engine.model.config.vocab_size):
        reason = f"its ids and seeds are not those of texts of {V} tokens"
    else:
        reason = None
    if reason:
        raise ValueError(f"--draft_memory {file}: {reason}; delete it, or name another file")
    drafter.pool[0].extend(ids, seeds)
    try:
        yield
    finally:
        if writes:
            drafter.expect([], 0)  # the last answers
            ids, seeds = ([x for text in drafter.pool[::-1] for x in getattr(text, part)] for part in ("ids", "seeds"))
            memory = {"format": FORMAT, "tokenizer": tokenizer, "ids": ids, "seeds": seeds}
            write_atomically(file, lambda partial: partial.write_text(json.dumps(memory)))


def are_texts(ids: object, seeds: object, vocab_size: int) -> bool:
    """Are these equal lists of ids, -1 between texts, and of seeds, None for greedy text?"""
    if not isinstance(ids, list) or not isinstance(seeds, list) or len(ids) != len(seeds):
        return False
    are_ids = all(type(id) is int and -1 <= id < vocab_size for id in ids)
    return are_ids and all(seed is None or type(seed) is int for seed in seeds)
