"""A real model learns how the demo's stories are told, and writes more of them for
benchmarks.train_demo.

    python -m benchmarks.self_stories learn --checkpoint FILE --text stories.txt --heldout other.txt
    --output writer python -m benchmarks.self_stories write --checkpoint writer --text stories.txt
    --compile --output more.txt

    restrict_vocabulary     the model of only those tokens that the given stories use
    learn                   trains the model's last layers on the stories; writes a folder
    write                   samples stories from it, and writes the plain ones
    is_plain                ASCII alone, nearly all words known from the given stories, a last
                            sentence that ends

Lines that hold only `<|endoftext|>` separate the stories, as in benchmarks.train_demo.
"""

import argparse
import json
import re
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from cli.errors import exit_on_error, use_threads
from cli.flags import Parser
from decoding.engine import Engine
from decoding.sampling import Sampling
from loading.checkpoint import load_model
from loading.files import complete_folder, require_json
from loading.saving import save_model
from loading.tokenizer import Tokenizer, copy_files, load_tokenizer
from model import Transformer
from scripts.distill.distill_draft import adamw, learning_rate, update
from scripts.distill.draft_text import END, Windows, log, read_documents
from weights.walker import pack_model

CONTEXT, BATCH = 256, 8  # tokens of a row, rows of a training step
SLOTS, MAX_TOKENS = 128, 420  # stories at a time, tokens of a story
TEMPERATURE = 0.95
# words of a story; share of its words that the given stories lack
MIN_WORDS, MAX_UNKNOWN = (50, 0.02)
IDS = "story_ids.json"  # in the writer's folder: the real model's id of each of its tokens
WORD = re.compile(r"[a-z]+(?:'[a-z]+)?")


def story_documents(file: Path, tokenizer: Tokenizer) -> list[Tensor]:
    """Ids (n,) of each story. END leads it, and so ends the one before."""
    start = torch.tensor([tokenizer.specials[END]], dtype=torch.int32)
    return [torch.cat((start, ids)) for ids in read_documents(file, tokenizer, None)]


def restrict_vocabulary(model: Transformer, ids: Tensor) -> Transformer:
    """The model whose token i is token ids[i] (V,) of `model`, with its embeddings and tied head. A
    tenth of the vocabulary writes half as fast again: the head and the draws are much of a small
    model's step."""
    model.embed.weight = model.lm_head.weight = torch.nn.Parameter(
        model.embed.weight[ids], requires_grad=False
    )
    model.embed.num_embeddings = model.lm_head.out_features = len(ids)
    model.config = replace(model.config, vocab_size=len(ids))
    return model


# ------------------------------------------------------------------------------------------ learn


def next_token_loss(model: Transformer, rows: Tensor) -> Tensor:
    """rows (B, T + 1). Cross-entropy with the next token, in nats."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(rows[:, :-1], torch.arange(rows.size(1) - 1))  # (B, T, V)
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def nats_per_character(
    model: Transformer, windows: Windows, num_characters: int, num_tokens: int
) -> float:
    """Held-out loss per character, which models with other vocabularies can be compared by."""
    rows = windows.consecutive()[:64]
    loss = sum(next_token_loss(model, part).item() * len(part) for part in rows.split(BATCH)) / len(
        rows
    )
    return loss * num_tokens / num_characters


def learn(args: argparse.Namespace) -> None:
    """Train the last --layers layers and the final norm on --text; the rest stays as it is."""
    tokenizer = load_tokenizer(args.checkpoint)
    stories = [story_documents(file, tokenizer) for file in (args.text, args.heldout)]
    ids = torch.cat(stories[0] + stories[1]).unique()  # (V,) ascending
    windows, heldout = (
        Windows(
            [torch.searchsorted(ids, story).int() for story in documents], CONTEXT, None, str(file)
        )
        for documents, file in zip(stories, (args.text, args.heldout))
    )
    model = restrict_vocabulary(load_model(args.checkpoint, dtype=torch.float32), ids)
    for module in (*model.layers[-args.layers :], model.norm):
        module.requires_grad_()
    trained = torch.nn.ModuleList([*model.layers[-args.layers :], model.norm])
    optimizer = adamw(trained)
    num_characters = len(args.heldout.read_text())
    begin = time.perf_counter()
    for step in tqdm(range(args.steps), unit="step", mininterval=5):
        if step % 50 == 0:
            score = nats_per_character(model, heldout, num_characters, len(heldout.ids))
            log(
                f"step {step}: held-out {score:.4f} nats a character,"
                f" {time.perf_counter() - begin:.0f} s"
            )
        loss = next_token_loss(model, windows.random(0, step, BATCH))
        loss.backward()
        update(trained, optimizer, learning_rate(step, args.steps, args.lr, warmup=20))
    score = nats_per_character(model, heldout, num_characters, len(heldout.ids))
    log(f"step {args.steps}: held-out {score:.4f} nats a character")
    with complete_folder(args.output) as partial:
        copy_files(args.checkpoint, partial)
        save_model(
            model.bfloat16(),
            partial,
            require_json(args.checkpoint / "config.json") | {"vocab_size": len(ids)},
        )
        (partial / IDS).write_text(json.dumps(ids.tolist()))


# ------------------------------------------------------------------------------------------ write


def words_of(file: Path) -> set[str]:
    return set(WORD.findall(file.read_text().lower()))


def is_plain(story: str, words: set[str]) -> bool:
    """Is the story in printable ASCII, nearly all of it in these words, and does its last sentence
    end?"""
    story_words = WORD.findall(story.lower())
    return (
        len(story_words) >= MIN_WORDS
        and all(" " <= character <= "~" or character == "\n" for character in story)
        and sum(word not in words for word in story_words) <= MAX_UNKNOWN * len(story_words)
        and story[-1] in '.!?"'
    )


def write(args: argparse.Namespace) -> None:
    """Append plain stories to --output until --tokens tokens are sampled."""
    tokenizer = load_tokenizer(args.checkpoint)
    words = words_of(args.text)
    ids = json.loads((args.checkpoint / IDS).read_text())
    end = ids.index(tokenizer.specials[END])
    model = load_model(args.checkpoint)
    pack_model(model)
    engine = Engine(model, SLOTS, MAX_TOKENS + 1, compile=args.compile)
    num_tokens, num_stories, num_plain, rows = 0, 0, 0, {}  # rows: request id -> its tokens
    with args.output.open("a") as file, tqdm(total=args.tokens, unit="token", mininterval=5) as bar:
        while num_tokens < args.tokens or rows:
            while num_tokens < args.tokens and len(rows) < 2 * SLOTS:
                seed = args.seed + num_stories + len(rows)
                id = engine.add_request(
                    [end],
                    sampling=Sampling(TEMPERATURE),
                    max_new_tokens=MAX_TOKENS,
                    stop_ids=[end],
                    seed=seed,
                )
                rows[id] = []
            for id, token in engine.step():
                rows[id].append(token)
                if token != end and len(rows[id]) < MAX_TOKENS:
                    continue
                row, num_stories = rows.pop(id), num_stories + 1
                story = tokenizer.decode(ids[token] for token in row[:-1]).strip()
                if token == end and is_plain(story, words):
                    file.write(f"{story}\n{END}\n")
                    file.flush()
                    num_plain += 1
                num_tokens += len(row)
                bar.update(len(row))
                bar.set_postfix_str(f"{num_plain} of {num_stories} stories are plain")


def main() -> None:
    parser = Parser(description="Have a real model write stories like given ones.")
    parser.add_argument("part", choices=("learn", "write"))
    parser.add_argument("--checkpoint", type=Path, required=True, help="a folder or a .gguf file")
    parser.add_argument("--text", type=Path, required=True, help="the given stories")
    parser.add_argument("--heldout", type=Path, help="other stories, for the figures of `learn`")
    parser.add_argument(
        "--output", type=Path, required=True, help="folder of the writer, or file of its stories"
    )
    parser.add_argument(
        "--steps", type=int, default=250, help=f"of {BATCH} windows of {CONTEXT} tokens"
    )
    parser.add_argument(
        "--layers", type=int, default=12, help="the last layers that learn; default: %(default)s"
    )
    parser.add_argument("--lr", type=float, default=4e-4)
    parser.add_argument(
        "--tokens", type=int, default=3_000_000, help="to sample; default: %(default)s"
    )
    parser.add_argument("--compile", action="store_true", help="compile the steps of `write`")
    parser.add_argument("--seed", type=int, default=0, help="of the first story")
    args = parser.parse_args()
    use_threads(None)
    with exit_on_error():
        {"learn": learn, "write": write}[args.part](args)


if __name__ == "__main__":
    main()
