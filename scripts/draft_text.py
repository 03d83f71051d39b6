"""The text that a draft learns in scripts.distill_draft: documents of a file, and documents that the target writes.

    read_documents      the token ids of a file's documents
    sampled_documents   continuations and answers by the target, stored in --work for later runs
    hold_out, Windows   separates the last documents; cuts documents into rows of --context tokens
    hide, ids_of        a prompt's tokens are read, but not learned: they are stored as ~id, which is negative
    log, digest, check_settings     messages; checks that a stored file has the same settings

This file knows no draft and no training.
"""

import hashlib
import json
import random
import re
import sys
from argparse import Namespace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from cli.prompts import conversation_ids
from decoding.sampling import Sampling
from generate import Engine, generate
from loading.files import write_atomically
from loading.tokenizer import Tokenizer
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
    return hashlib.sha256(b"".join(ids.numpy().tobytes() + b"|" for ids in documents)).hexdigest()[:16]


def hide(ids: Tensor, n: int) -> Tensor:
    """ids (m,), the first n of them not to be learned."""
    return torch.cat((~ids[:n], ids[n:]))


def ids_of(rows: Tensor) -> Tensor:
    """The token ids of rows that `hide` may have changed."""
    return torch.where(rows < 0, ~rows, rows)


def check_settings(file: Path, stored: dict, settings: dict) -> None:
    """ValueError that names the first setting that has changed since `file` was started."""
    for name, value in settings.items():
        if stored.get(name) != value:
            raise ValueError(
                f"{file} was started with {name} {stored.get(name)}, now it is {value}: give the same again, remove"
                " that file to start anew, or choose another --work"
            )


def read_documents(file: Path, tokenizer: Tokenizer, end: int | None) -> Documents:
    """The ids of each document, with the token `end` last if there is one. END separates documents, or in a text
    without it, blank lines do."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 text: {error}") from None
    has_end = END in text
    parts = re.split(re.escape(END) + "\n?" if has_end else r"\n(?:[ \t]*\n)+", text)
    parts = [part for part in parts if part.strip()]
    log(f"{file}: {len(parts)} documents, separated by {END if has_end else 'blank lines'}")
    closing = [] if end is None else [end]
    bar = tqdm(parts, desc="encode", unit="document", leave=False)
    return [torch.tensor(tokenizer.encode(part, bos=False) + closing, dtype=torch.int32) for part in bar]


def read_prompts(file: Path, tokenizer: Tokenizer, context: int) -> list[list[int]]:
    """The ids of each line as a user's message, up to its answer. ValueError for a file without lines, or for a prompt
    that leaves no room in `context`."""
    lines = [line.strip() for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
    prompts = [conversation_ids(tokenizer, [{"role": "user", "content": line}]) for line in lines]
    longest = max(map(len, prompts), default=0)
    if not 0 < longest < context:
        raise ValueError(f"{file}: the longest of {len(prompts)} prompts has {longest} tokens; --context is {context}")
    return prompts


def sampled_documents(
    target: Transformer, tokenizer: Tokenizer, args: Namespace, texts: Documents, end: int | None, settings: dict
) -> Documents:
    """At least --sampled tokens that the target writes at --temperature, in documents of up to --context tokens. A
    document starts with BOS, the first tokens of one of `texts`, or one of --prompts in turn, which is hidden. Document
    n is drawn with seed --seed + n, in any batch; each batch is appended to a file in --work."""
    prompts = read_prompts(args.prompts, tokenizer, args.context) if args.prompts else []
    start = tokenizer.bos_id if tokenizer.bos_id is not None else end
    if start is None and not texts and not prompts:
        raise ValueError(f"--sampled: {args.target} has no BOS and no end token to start from; give --text too")
    if args.temperature == 0 and not texts and not prompts:
        raise ValueError("--sampled at --temperature 0 writes one document again and again; give --text or --prompts")

    def opening(number: int) -> list[int]:
        if prompts:
            return [*prompts[number % len(prompts)]]
        return random.Random(f"{args.seed} opening {number}").choice(texts)[:OPENING].tolist() if texts else []

    settings["texts to continue"] = digest([torch.tensor(ids) for ids in prompts] or texts)
    file, bos = args.work / "sampled.jsonl", [] if start is None or prompts else [start]
    documents = read_samples(file, settings)
    engine = Engine(target, SLOTS, args.context)
    bar = tqdm(total=args.sampled, initial=sum(map(len, documents)), desc="sample", unit="token", leave=False)
    with file.open("a", encoding="utf-8") as stream, bar:
        while sum(map(len, documents)) < args.sampled:
            numbers = range(len(documents), len(documents) + SAMPLE_ROWS)
            rows = [opening(number) for number in numbers]
            for row, id in generate(
                target, [bos + ids for ids in rows], sampling=Sampling(args.temperature), stop_ids=tokenizer.stop_ids,
                max_new_tokens=[args.context - len(bos) - len(ids) for ids in rows],
                seed=[args.seed + number for number in numbers], engine=engine,
            ):  # fmt: skip
                rows[row].append(id)
            stream.write("".join(json.dumps({"text": tokenizer.decode(ids), "tokens": ids}) + "\n" for ids in rows))
            stream.flush()
            documents += [torch.tensor(ids, dtype=torch.int32) for ids in rows]
            bar.update(sum(map(len, rows)))
    log(f"{file}: {len(documents)} documents that the target wrote, {sum(map(len, documents))} tokens")
    return [hide(ids, len(opening(n))) for n, ids in enumerate(documents)] if prompts else documents


def read_samples(file: Path, settings: dict) -> Documents:
    """The documents of an earlier run's complete batches; an incomplete one is removed from the file, whose first line
    has the settings."""
    text = file.read_text(encoding="utf-8") if file.exists() else json.dumps(settings) + "\n"
    lines = text.split("\n")[:-1]  # a last line without a newline was cut off
    try:
        check_settings(file, json.loads(lines[0]), settings)
    except (IndexError, json.JSONDecodeError):
        raise ValueError(f"{file}: its first line holds no settings of this script; remove the file") from None
    complete = lines[: 1 + (len(lines) - 1) // SAMPLE_ROWS * SAMPLE_ROWS]
    write_atomically(file, lambda partial: partial.write_text("\n".join(complete) + "\n", encoding="utf-8"))
    return [torch.tensor(json.loads(line)["tokens"], dtype=torch.int32) for line in complete[1:]]


def hold_out(documents: Documents, num_tokens: int) -> tuple[Documents, Documents]:
    """(training, held-out). Held out are the last documents that together have `num_tokens`, at most
    MAX_HELD_OUT of all tokens."""
    required, first = min(num_tokens, int(MAX_HELD_OUT * sum(map(len, documents)))), len(documents)
    while required > 0:
        first -= 1
        required -= len(documents[first])
    return documents[:first], documents[first:]


class Windows:
    """Rows of T + 1 ids, T = context, cut out of concatenated documents; BOS leads each row, if there is one.
    ValueError for documents with fewer tokens than one row."""

    def __init__(self, documents: Documents, context: int, bos: int | None, name: str):
        self.ids = torch.cat([torch.empty(0, dtype=torch.int32), *documents])  # (n,)
        self.lead = torch.tensor([] if bos is None else [bos], dtype=torch.int32)
        self.context, self.size = context, context + 1 - len(self.lead)
        if len(self.ids) < self.size:
            raise ValueError(
                f"the {name} documents have {len(self.ids)} tokens, fewer than the {self.size} of one window: give"
                f" more text, or a smaller --context than {context}"
            )
        self.starts = [0, *torch.tensor([len(ids) for ids in documents]).cumsum(0).tolist()[:-1]]

    def row(self, start: int) -> Tensor:
        start = min(start, len(self.ids) - self.size)
        return torch.cat((self.lead, self.ids[start : start + self.size])).long()

    def random(self, seed: int, step: int, rows: int) -> Tensor:
        """(rows, T + 1), about half of them from the start of a document. They depend on seed and step alone, so that a
        continued run sees the same."""
        rng = random.Random(f"{seed} {step}")
        starts = [rng.choice(self.starts) if rng.random() < 0.5 else rng.randrange(len(self.ids)) for _ in range(rows)]
        return torch.stack([self.row(start) for start in starts])

    def consecutive(self) -> Tensor:
        """(N, T + 1): every id is predicted once, but for a rest shorter than a row."""
        return torch.stack([self.row(i) for i in range(0, len(self.ids) - self.size + 1, self.context)])
