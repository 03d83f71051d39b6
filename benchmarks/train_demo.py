"""Train the demo target that ships with the repository, checkpoints/demo;
scripts.distill_draft makes its draft.

    python -m benchmarks.train_demo --text tinystories_train.txt --heldout tinystories_heldout.txt

    train_tokenizer     a sentencepiece vocabulary (BPE, byte fallback)
    Windows             random windows of the text, the same ones for the same seed and step
    train, evaluate     next-token loss, with dropout and without

Lines that hold only `<|endoftext|>` separate the stories of a text. Every --save_every steps the
training state goes to
--work, and an interrupted run continues from there. A finished run only evaluates and exports.
"""

import argparse
import io
import json
import random
import sys
import time
from pathlib import Path

import sentencepiece
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from benchmarks.shapes import config_json
from cli.errors import exit_on_error
from cli.flags import Parser
from loading.checkpoint import load_model
from loading.config import config_from_hf
from loading.files import write_atomically
from loading.saving import save_model
from model import Transformer
from scripts.distill.distill_draft import adamw, init_weights, learning_rate, update

BOS, EOS, END_OF_STORY = 1, 2, "<|endoftext|>"
# Every input dimension divides by 32 after a split over 4 ranks, so that no quantization group is
# split.
TARGET = config_json("demo")


def train_tokenizer(text: Path, output: Path) -> None:
    """Write output/tokenizer.model. The story separator is one piece, which is also the
    end-of-sequence token."""
    model = io.BytesIO()  # in memory: the model would hold the paths of files
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.read_text().splitlines()),
        model_writer=model,
        vocab_size=TARGET["vocab_size"],
        model_type="bpe",
        byte_fallback=True,
        split_digits=True,
        character_coverage=0.9999,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        max_sentence_length=100_000,
        unk_id=0,
        bos_id=BOS,
        eos_id=EOS,
        eos_piece=END_OF_STORY,
        user_defined_symbols=[END_OF_STORY],
        num_threads=1,
        minloglevel=1,
    )
    write_atomically(
        output / "tokenizer.model", lambda partial: partial.write_bytes(model.getvalue())
    )


class Windows:
    """Random windows of a text, each led by BOS. Half of them begin with a story, the others behind
    any space."""

    def __init__(self, text: str, tokenizer, context: int, seed: int):
        self.text, self.tokenizer, self.context, self.seed = text, tokenizer, context, seed
        separator = f"{END_OF_STORY}\n"
        self.stories = [0] + [
            i + len(separator) for i in range(len(text)) if text.startswith(separator, i)
        ]
        self.stories = [i for i in self.stories if i < len(text) - 2]

    def batch(self, step: int, rows: int) -> Tensor:
        """(rows, context + 1) ids, a function of seed and step alone, so that a resumed run sees
        the same data."""
        rng = random.Random(f"{self.seed} {step}")
        return torch.tensor([self.row(rng) for _ in range(rows)])

    def row(self, rng: random.Random) -> list[int]:
        while True:
            start = rng.choice(self.stories)
            if rng.random() < 0.5:
                start = self.text.find(" ", rng.randrange(len(self.text))) + 1
            # 6 characters a token are enough for English. A window that is too short is drawn
            # again.
            ids = [BOS, *self.tokenizer.encode(self.text[start : start + 6 * self.context])]
            if len(ids) > self.context:
                return ids[: self.context + 1]


def add_dropout(model: Transformer, p: float) -> None:
    """Dropout on the outputs of the embedding, attention and feed-forward; model.py has none."""

    def drop(module, args, output):
        return F.dropout(output, p, training=model.training)

    for module in [
        model.embed,
        *(part for layer in model.layers for part in (layer.attention, layer.ffn)),
    ]:
        module.register_forward_hook(drop)


def next_token_loss(model: Transformer, rows: Tensor) -> Tensor:
    """rows (B, T + 1). Cross-entropy with the next token."""
    logits = model(rows[:, :-1], torch.arange(rows.size(1) - 1, device=rows.device))  # (B, T, V)
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def autocast(device: str) -> torch.autocast:
    return torch.autocast(device.split(":")[0], dtype=torch.bfloat16)


@torch.no_grad()
def evaluate(model: Transformer, rows: Tensor) -> float:
    """Mean loss over rows (N, T + 1), four rows at a time, without dropout."""
    model.eval()
    with autocast(rows.device.type):
        losses = [next_token_loss(model, part).item() * len(part) for part in rows.split(4)]
    model.train()
    return sum(losses) / len(rows)


def heldout_rows(text: str, tokenizer, context: int) -> Tensor:
    """The held-out text, encoded once, in consecutive windows with BOS in front: (N, context +
    1)."""
    ids = tokenizer.encode(text)
    starts = range(0, len(ids) - context + 1, context)
    return torch.tensor([[BOS, *ids[i : i + context]] for i in starts])


def train(windows: Windows, heldout: Tensor, args: argparse.Namespace) -> Transformer:
    """The target, trained from the start, from the folder --start or from the state in --work, in
    eval mode."""
    if args.start:
        model = load_model(args.start, dtype=torch.float32).requires_grad_()
    else:
        model = Transformer(config_from_hf(TARGET))
        init_weights(model, args.seed)
    model.to(args.device)
    add_dropout(model, args.dropout)
    optimizer, state_file, first = adamw(model), args.work / "demo.pt", 0
    if state_file.exists():
        state = torch.load(state_file, weights_only=True, map_location=args.device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    loss_of = torch.compile(next_token_loss) if args.compile else next_token_loss
    bar = tqdm(
        range(first, args.steps),
        initial=first,
        total=args.steps,
        desc="demo",
        unit="step",
        mininterval=5,
    )
    for step in bar:
        torch.manual_seed(args.seed * 1_000_003 + step)  # the same dropout after a resume
        with autocast(args.device):
            loss = loss_of(model, windows.batch(step, args.batch).to(args.device))
        loss.backward()
        update(model, optimizer, learning_rate(step, args.steps, args.lr))
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            score = evaluate(model, heldout[: args.eval_rows])
            bar.write(
                f"step {step + 1}: train {loss.item():.4f} held-out {score:.4f}", file=sys.stderr
            )
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": step + 1,
            }
            write_atomically(state_file, lambda partial, state=state: torch.save(state, partial))
    return model.eval()


def export(model: Transformer, tokenizer_file: Path, output: Path) -> None:
    """Write a Hugging Face folder in bfloat16, over an old one."""
    output.mkdir(parents=True, exist_ok=True)
    # save_model writes it last; until then the folder does not load
    (output / "config.json").unlink(missing_ok=True)
    (output / "tokenizer.model").write_bytes(tokenizer_file.read_bytes())
    settings = {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": True,
        "add_eos_token": False,
        "legacy": False,
        "bos_token": "<s>",
        "eos_token": END_OF_STORY,
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
    }
    (output / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    generation = {"bos_token_id": BOS, "eos_token_id": EOS}
    (output / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    save_model(model.to("cpu", torch.bfloat16), output, TARGET)


def parse_args() -> argparse.Namespace:
    parser = Parser(description="Train the demo target.")
    add = parser.add_argument
    add("--text", type=Path, required=True, help="training stories")
    add("--heldout", type=Path, required=True, help="other stories, for the figures")
    add(
        "--output",
        type=Path,
        default=Path("checkpoints"),
        help="folder for demo/; default: %(default)s",
    )
    add(
        "--work", type=Path, default=Path("build/train_demo"), help="training state, to resume from"
    )
    add(
        "--start",
        type=Path,
        help="a demo folder to go on from, with its tokenizer; default: random weights",
    )
    add("--steps", type=int, default=4500)
    add(
        "--batch",
        type=int,
        default=8,
        help="rows of --context tokens in a step; default: %(default)s",
    )
    add("--context", type=int, default=512)
    add("--lr", type=float, default=2e-3)
    add("--dropout", type=float, default=0.1)
    add("--save_every", type=int, default=250)
    add("--eval_rows", type=int, default=16, help="held-out rows for the progress line")
    add("--seed", type=int, default=0)
    add(
        "--compile",
        action="store_true",
        help="compile the training step: a quarter faster on a CPU",
    )
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def run(args: argparse.Namespace) -> dict:
    """Train and write the folder; returns its figures."""
    args.work.mkdir(parents=True, exist_ok=True)
    tokenizer_file = (args.start or args.work) / "tokenizer.model"
    if not tokenizer_file.exists():
        train_tokenizer(args.text, args.work)
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer_file))
    windows = Windows(args.text.read_text(), tokenizer, args.context, args.seed)
    heldout = heldout_rows(args.heldout.read_text(), tokenizer, args.context).to(args.device)
    start = time.perf_counter()
    target = train(windows, heldout, args)
    figures = {
        "heldout_loss": evaluate(target, heldout),
        "heldout_tokens": heldout[:, 1:].numel(),
        "seconds": round(time.perf_counter() - start),
    }
    export(target, tokenizer_file, args.output / "demo")
    return figures


def main() -> None:
    args = parse_args()
    with exit_on_error():
        print(json.dumps(run(args)))


if __name__ == "__main__":
    main()
