"""The text that a draft learns in scripts.distill_draft: documents of a file, and documents that
the target writes.

    read_documents      the token ids of a file's documents
    find_openings       what the target continues
    sampled_documents   continuations and answers by the target, stored in --work for later runs
    hold_out, Windows   separates the last documents; cuts documents into rows of --context tokens
    hide, ids_of        a prompt's tokens are read, but not learned: they are stored as ~id, which
                        is negative
    log, digest, check_settings     messages; checks that a stored file has the same settings
"""

import hashlib
import itertools
import json
import random
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from decoding.engine import Engine
from decoding.errors import UserError
from decoding.sampling import Sampling
from loading.files import write_atomically
from loading.plain_files import error_prefix, utf8_text
from loading.tokenizer import Tokenizer, conversation_ids
from model import Transformer

END = "<|endoftext|>"
SAMPLE_ROWS = 128  # documents that are stored together
SLOTS = 64  # documents that the target writes at a time
OPENING = 8  # tokens of a document that the target continues
MAX_HELD_OUT = 0.1  # share of the tokens

Documents = list[Tensor]  # (n,) int32 each; ~id is a token that is not learned


def log(message: str) -> None:
    tqdm.write(message, file=sys.stderr)


def digest(documents: Documents) -> str:
    text = b"".join(ids.numpy().tobytes() + b"|" for ids in documents)
    return hashlib.sha256(text).hexdigest()[:16]


def hide(ids: Tensor, n: int) -> Tensor:
    """ids (m,), the first n of them not to be learned."""
    return torch.cat((~ids[:n], ids[n:]))


def ids_of(rows: Tensor) -> Tensor:
    """The token ids of rows that `hide` may have changed."""
    return torch.where(rows < 0, ~rows, rows)


def check_settings(file: Path, stored: dict, settings: dict) -> None:
    """UserError that names the first setting that has changed since `file` was started."""
    for name, value in settings.items():
        if stored.get(name) != value:
            raise UserError(
                f"{file} was started with {name} {stored.get(name)}, now it is {value}: give the"
                " same again, remove that file to start anew, or choose another --work"
            )


def read_text(file: Path) -> str:
    with error_prefix(file):
        return utf8_text(file.read_bytes())


def read_documents(file: Path, tokenizer: Tokenizer, end: int | None) -> Documents:
    """The ids of each document, with the token `end` last if there is one. END separates documents,
    or in a text without it, blank lines do."""
    text = read_text(file)
    separator = r"\r?\n(?:[ \t]*\r?\n)+"
    separator_name = "blank lines"
    if END in text:
        separator = re.escape(END) + r"(?:\r?\n)?"
        separator_name = END
    parts = [part for part in re.split(separator, text) if part.strip()]
    log(f"{file}: {len(parts)} documents, separated by {separator_name}")
    closing = [] if end is None else [end]
    documents = []
    for part in tqdm(parts, desc="encode", unit="document", leave=False):
        ids = tokenizer.encode(part, bos=False) + closing
        documents.append(torch.tensor(ids, dtype=torch.int32))
    return documents


def read_prompts(file: Path, tokenizer: Tokenizer, context: int) -> list[list[int]]:
    """The ids of each line as a user's message, up to its answer. UserError for a file without
    lines, or for a prompt that leaves no room in `context`."""
    lines = [line.strip() for line in read_text(file).split("\n") if line.strip()]
    prompts = [conversation_ids(tokenizer, [{"role": "user", "content": line}]) for line in lines]
    longest = max(map(len, prompts), default=0)
    if not 0 < longest < context:
        raise UserError(
            f"{file}: the longest of {len(prompts)} prompts has {longest} tokens; --context is"
            f" {context}"
        )
    return prompts


@dataclass
class Openings:
    """What the target continues: one of `prompts` in turn, or the first tokens of one of `texts`,
    or nothing but BOS."""

    prompts: list[list[int]]
    texts: Documents
    bos: list[int]  # in front of an opening; empty in front of a prompt, which has its own
    seed: int

    def of(self, number: int) -> list[int]:
        """The ids with which document `number` opens, after BOS."""
        if self.prompts:
            return [*self.prompts[number % len(self.prompts)]]
        if not self.texts:
            return []
        text = random.Random(f"{self.seed} opening {number}").choice(self.texts)
        return text[:OPENING].tolist()

    def digest(self) -> str:
        return digest([torch.tensor(ids) for ids in self.prompts] or self.texts)


def find_openings(tokenizer: Tokenizer, args, texts: Documents, end: int | None) -> Openings:
    """UserError where nothing, or the same thing again and again, would be continued."""
    if args.prompts:
        return Openings(read_prompts(args.prompts, tokenizer, args.context), texts, [], args.seed)
    start = end if tokenizer.bos_id is None else tokenizer.bos_id
    if start is None and not texts:
        raise UserError(
            f"--sampled: {args.target} has no BOS and no end token to start from; give --text too"
        )
    if args.temperature == 0 and not texts:
        raise UserError(
            "--sampled at --temperature 0 writes one document again and again; give --text or"
            " --prompts"
        )
    return Openings([], texts, [] if start is None else [start], args.seed)


def sampled_documents(
    target: Transformer, tokenizer: Tokenizer, args, openings: Openings, settings: dict
) -> Documents:
    """At least --sampled tokens that the target writes at --temperature, in documents of up to
    --context tokens. A prompt that opens a document is hidden. Each batch of documents is appended
    to a file in --work, whose first line has `settings`."""
    settings = settings | {"texts to continue": openings.digest()}
    file = args.work / "sampled.jsonl"
    documents = read_samples(file, settings)
    num_tokens = sum(map(len, documents))
    engine = Engine(target, SLOTS, args.context)
    bar = tqdm(total=args.sampled, initial=num_tokens, desc="sample", unit="token", leave=False)
    with file.open("a", encoding="utf-8") as stream, bar:
        while num_tokens < args.sampled:
            rows = sample_batch(engine, tokenizer, args, openings, len(documents))
            for ids in rows:
                line = json.dumps({"text": tokenizer.decode(ids), "tokens": ids})
                stream.write(line + "\n")
                documents.append(torch.tensor(ids, dtype=torch.int32))
                num_tokens += len(ids)
                bar.update(len(ids))
            stream.flush()
    log(f"{file}: {len(documents)} documents that the target wrote, {num_tokens} tokens")
    if openings.prompts:
        return [hide(ids, len(openings.of(n))) for n, ids in enumerate(documents)]
    return documents


def sample_batch(
    engine: Engine, tokenizer: Tokenizer, args, openings: Openings, first_number: int
) -> list[list[int]]:
    """The ids of the next SAMPLE_ROWS documents. Document n is drawn with seed --seed + n, in any
    batch."""
    numbers = range(first_number, first_number + SAMPLE_ROWS)
    rows = [openings.of(number) for number in numbers]
    prompts = [openings.bos + ids for ids in rows]
    tokens = engine.generate(
        prompts,
        sampling=Sampling(args.temperature),
        stop_ids=tokenizer.stop_ids,
        max_new_tokens=[args.context - len(prompt) for prompt in prompts],
        seed=[args.seed + number for number in numbers],
    )
    for row, id in tokens:
        rows[row].append(id)
    return rows


def read_samples(file: Path, settings: dict) -> Documents:
    """The documents of an earlier run's complete batches; an incomplete one is removed from the
    file, whose first line has the settings."""
    text = read_text(file) if file.exists() else json.dumps(settings) + "\n"
    lines = text.split("\n")[:-1]  # a last line without a newline was cut off
    check_settings(file, json.loads(lines[0]), settings)
    complete = lines[: 1 + (len(lines) - 1) // SAMPLE_ROWS * SAMPLE_ROWS]
    write_atomically(
        file, lambda partial: partial.write_text("\n".join(complete) + "\n", encoding="utf-8")
    )
    return [torch.tensor(json.loads(line)["tokens"], dtype=torch.int32) for line in complete[1:]]


def hold_out(documents: Documents, num_tokens: int) -> tuple[Documents, Documents]:
    """(training, held-out). Held out are the last documents that together have `num_tokens`, at
    most MAX_HELD_OUT of all tokens, rounded up to a whole document; one that has half of all tokens
    or more is cut."""
    total = sum(map(len, documents))
    required = min(num_tokens, int(MAX_HELD_OUT * total))
    first = len(documents)
    while required > 0:
        first -= 1
        ids = documents[first]
        if 2 * len(ids) >= total:
            heldout = [ids[-required:], *documents[first + 1 :]]
            return [*documents[:first], ids[:-required]], heldout
        required -= len(ids)
    return documents[:first], documents[first:]


class Windows:
    """Rows of T + 1 ids, T = context, cut out of concatenated documents; BOS leads each row, if
    there is one. UserError for documents with fewer tokens than one row."""

    def __init__(self, documents: Documents, context: int, bos: int | None, name: str):
        self.ids = torch.cat([torch.empty(0, dtype=torch.int32), *documents])  # (n,)
        self.lead = torch.tensor([] if bos is None else [bos], dtype=torch.int32)
        self.context = context
        self.size = context + 1 - len(self.lead)  # ids of a row after BOS
        if len(self.ids) < self.size:
            raise UserError(
                f"the {name} documents have {len(self.ids)} tokens, fewer than the {self.size} of"
                f" one window: give more text, or a smaller --context than {context}"
            )
        lengths = map(len, documents[:-1])
        self.starts = list(itertools.accumulate(lengths, initial=0))  # where documents start

    def row(self, start: int) -> Tensor:
        start = min(start, len(self.ids) - self.size)
        return torch.cat((self.lead, self.ids[start : start + self.size])).long()

    def random(self, seed: int, step: int, rows: int) -> Tensor:
        """(rows, T + 1), about half of them from the start of a document. They depend on seed and
        step alone, so that a continued run sees the same."""
        rng = random.Random(f"{seed} {step}")
        windows = []
        for _ in range(rows):
            starts = self.starts if rng.random() < 0.5 else range(len(self.ids))
            windows.append(self.row(rng.choice(starts)))
        return torch.stack(windows)

    def consecutive(self) -> Tensor:
        """(N, T + 1): every id is predicted once, but for a rest shorter than a row."""
        starts = range(0, len(self.ids) - self.size + 1, self.context)
        return torch.stack([self.row(start) for start in starts])
