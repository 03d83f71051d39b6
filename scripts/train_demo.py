"""Train the demo pair that ships with the repository: checkpoints/demo and its distilled checkpoints/demo-draft.

    python -m scripts.train_demo --text tinystories_train.txt --heldout tinystories_heldout.txt

    train_tokenizer   one sentencepiece vocabulary for both (BPE, byte fallback)
    Windows           random windows of the text, the same ones for the same seed and step
    train             one loop for both models: next-token loss for the target, KL to the target for the draft
    evaluate          held-out loss of both, and mean sum min(p, q): the chance that a drafted token is accepted

Stories in the text are separated by lines that hold only `<|endoftext|>`. Every --save_every steps the whole
training state goes to --work, so that an interrupted run continues where it stopped; a finished run only
evaluates and exports. It knows nothing of decoding.
"""

import argparse
import io
import json
import math
import os
import random
import time
from pathlib import Path

import sentencepiece
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from checkpoint import save_model
from model import Config, Transformer

BOS, EOS, END_OF_STORY = 1, 2, "<|endoftext|>"
VOCAB_SIZE = 2048

SHARED = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "bos_token_id": BOS,
    "eos_token_id": EOS, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "dtype": "bfloat16",
    "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
# Every input dimension divides by 32 after a split over 4 ranks, so that each quantization group stays whole.
TARGET = SHARED | {
    "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32,
}  # fmt: skip
DRAFT = SHARED | {
    "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 16,
}  # fmt: skip


def train_tokenizer(text: Path, output: Path) -> None:
    """Write output/tokenizer.model. The story separator is one piece, which is also the end-of-sequence token."""
    model = io.BytesIO()  # fed and written through memory, so that no path of this machine ends up in the model
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.read_text().splitlines()), model_writer=model,
        vocab_size=VOCAB_SIZE, model_type="bpe",
        byte_fallback=True, split_digits=True, character_coverage=0.9999, normalization_rule_name="identity",
        remove_extra_whitespaces=False, allow_whitespace_only_pieces=True, max_sentence_length=100_000,
        unk_id=0, bos_id=BOS, eos_id=EOS, eos_piece=END_OF_STORY, user_defined_symbols=[END_OF_STORY],
        num_threads=1, minloglevel=1,
    )  # fmt: skip
    (output / "tokenizer.model").write_bytes(model.getvalue())


class Windows:
    """Random windows of a text, each led by BOS. Half of them start a story, the others after some space."""

    def __init__(self, text: str, tokenizer, context: int, seed: int):
        self.text, self.tokenizer, self.context, self.seed = text, tokenizer, context, seed
        separator = f"{END_OF_STORY}\n"
        self.stories = [0] + [i + len(separator) for i in range(len(text)) if text.startswith(separator, i)]
        self.stories = [i for i in self.stories if i < len(text) - 2]

    def batch(self, step: int, rows: int) -> Tensor:
        """(rows, context + 1) ids, a function of seed and step alone, so that a resumed run sees the same data."""
        rng = random.Random(f"{self.seed} {step}")
        return torch.tensor([self._row(rng) for _ in range(rows)])

    def _row(self, rng: random.Random) -> list[int]:
        while True:
            start = rng.choice(self.stories)
            if rng.random() < 0.5:
                start = self.text.find(" ", rng.randrange(len(self.text))) + 1
            # Two characters a token is a lower bound that English keeps; a text that breaks it is drawn again.
            ids = [BOS, *self.tokenizer.encode(self.text[start : start + 6 * self.context])]
            if len(ids) > self.context:
                return ids[: self.context + 1]


def init_weights(model: Transformer, seed: int) -> None:
    """GPT-2's scheme: normal(0, 0.02), with the two matrices that write to the residual stream scaled by depth."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            last = name.endswith(("attention.out.weight", "ffn.down.weight"))
            std = 0.02 / math.sqrt(2 * model.config.n_layers) if last else 0.02
            torch.nn.init.normal_(weight, std=std, generator=generator)


def add_dropout(model: Transformer, p: float) -> None:
    """Dropout on what the embedding and each half block write to the residual stream; model.py has none."""

    def drop(module, args, output):
        return F.dropout(output, p, training=model.training)

    for module in [model.embed, *(half for layer in model.layers for half in (layer.attention, layer.ffn))]:
        module.register_forward_hook(drop)


def learning_rate(step: int, steps: int, peak: float, warmup: int = 200) -> float:
    """Linear warm-up, then a cosine to a fiftieth of the peak."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (0.02 + 0.49 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))))


def next_token_loss(model: Transformer, rows: Tensor, teacher: Transformer | None = None) -> Tensor:
    """rows (B, T + 1). Cross-entropy with the next token, or KL(teacher || model) where there is a teacher."""
    tokens, pos = rows[:, :-1], torch.arange(rows.size(1) - 1, device=rows.device)
    logits = model(tokens, pos)  # (B, T, V)
    if teacher is None:
        return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    with torch.no_grad():
        target = teacher(tokens, pos).log_softmax(-1)
    return F.kl_div(logits.log_softmax(-1).flatten(0, 1), target.flatten(0, 1), log_target=True, reduction="batchmean")


def autocast(device: str) -> torch.autocast:
    return torch.autocast(device.split(":")[0], dtype=torch.bfloat16)


@torch.no_grad()
def evaluate(model: Transformer, rows: Tensor, teacher: Transformer | None = None) -> float:
    """Mean loss over rows (N, T + 1), four rows at a time, without dropout."""
    model.eval()
    with autocast(rows.device.type):
        losses = [next_token_loss(model, part, teacher).item() * len(part) for part in rows.split(4)]
    model.train()
    return sum(losses) / len(rows)


@torch.no_grad()
def acceptance(target: Transformer, draft: Transformer, rows: Tensor) -> float:
    """alpha: mean over positions of sum over tokens of min(p, q), at temperature 1 (arXiv:2211.17192, cor. 3.6)."""
    pos = torch.arange(rows.size(1) - 1, device=rows.device)
    total = 0.0
    for part in rows.split(4):
        p, q = (model(part[:, :-1], pos).softmax(-1) for model in (target, draft))
        total += torch.minimum(p, q).sum(-1).mean().item() * len(part)
    return total / len(rows)


def heldout_rows(text: str, tokenizer, context: int) -> Tensor:
    """The held-out text, encoded once, in consecutive windows led by BOS: (N, context + 1)."""
    ids = tokenizer.encode(text)
    starts = range(0, len(ids) - context + 1, context)
    return torch.tensor([[BOS, *ids[i : i + context]] for i in starts])


def train(name: str, hf: dict, windows: Windows, heldout: Tensor, args, teacher: Transformer | None = None):
    """Train one model, or continue from args.work/name.pt. Returns it in eval mode."""
    steps, peak = (args.steps, args.lr) if teacher is None else (args.draft_steps, args.draft_lr)
    model = Transformer(Config.from_hf(hf))
    init_weights(model, args.seed)
    model.to(args.device)
    add_dropout(model, args.dropout if teacher is None else 0.0)
    matrices = [w for w in model.parameters() if w.dim() > 1]
    vectors = [w for w in model.parameters() if w.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.98), fused=True)
    state_file, first = args.work / f"{name}.pt", 0
    if state_file.exists():
        state = torch.load(state_file, weights_only=True, map_location=args.device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    loss_of = torch.compile(next_token_loss) if args.compile else next_token_loss
    bar = tqdm(range(first, steps), initial=first, total=steps, desc=name, unit="step", mininterval=5)
    for step in bar:
        torch.manual_seed(args.seed * 1_000_003 + step)  # dropout, also the same after a resume
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, peak)
        with autocast(args.device):
            loss = loss_of(model, windows.batch(step, args.batch).to(args.device), teacher)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % args.save_every == 0 or step + 1 == steps:
            score = evaluate(model, heldout[: args.eval_rows], teacher)
            bar.write(f"{name} step {step + 1}: train {loss.item():.4f} held-out {score:.4f}")
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, f"{state_file}.tmp")
            os.replace(f"{state_file}.tmp", state_file)
    return model.eval()


def export(model: Transformer, hf: dict, tokenizer_file: Path, output: Path) -> None:
    """A normal Hugging Face folder in bfloat16."""
    save_model(model.to("cpu", torch.bfloat16), output, hf)
    (output / "tokenizer.model").write_bytes(tokenizer_file.read_bytes())
    settings = {
        "tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False, "legacy": False,
        "bos_token": "<s>", "eos_token": END_OF_STORY, "unk_token": "<unk>", "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    (output / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    generation = {"bos_token_id": BOS, "eos_token_id": EOS}
    (output / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the demo pair.")
    parser.add_argument("--text", type=Path, required=True, help="training stories")
    parser.add_argument("--heldout", type=Path, required=True, help="stories kept apart for the figures")
    parser.add_argument("--output", type=Path, default=Path("checkpoints"), help="gets demo/ and demo-draft/")
    parser.add_argument("--work", type=Path, default=Path("build/train_demo"), help="training state, to resume from")
    parser.add_argument("--steps", type=int, default=4500)
    parser.add_argument("--draft_steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=8, help="rows of --context tokens")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--draft_lr", type=float, default=4e-3)
    parser.add_argument("--dropout", type=float, default=0.1, help="target only")
    parser.add_argument("--save_every", type=int, default=250)
    parser.add_argument("--eval_rows", type=int, default=16, help="held-out rows for the progress line")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="compile the training step: a quarter faster on a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    tokenizer_file = args.work / "tokenizer.model"
    if not tokenizer_file.exists():
        train_tokenizer(args.text, args.work)
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer_file))
    windows = Windows(args.text.read_text(), tokenizer, args.context, args.seed)
    heldout = heldout_rows(args.heldout.read_text(), tokenizer, args.context).to(args.device)
    start = time.perf_counter()
    target = train("demo", TARGET, windows, heldout, args)
    draft = train("demo-draft", DRAFT, windows, heldout, args, teacher=target)
    figures = {
        "target_heldout_loss": evaluate(target, heldout), "draft_heldout_loss": evaluate(draft, heldout),
        "sum_min_p_q": acceptance(target.eval(), draft.eval(), heldout), "heldout_tokens": heldout[:, 1:].numel(),
        "seconds": round(time.perf_counter() - start),
    }  # fmt: skip
    export(target, TARGET, tokenizer_file, args.output / "demo")
    export(draft, DRAFT, tokenizer_file, args.output / "demo-draft")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
