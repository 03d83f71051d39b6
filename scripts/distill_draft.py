"""Distil a draft for any target: a small Llama that learns the target's distribution, for --draft_checkpoint.

    python -m scripts.distill_draft --target DIR --layers 1 --dim 96 --text stories.txt --output DIR

    draft_config                    the draft's config.json: sizes from the flags or of some of the target's layers
    documents, sampled_documents    what it learns on: a text, what the target itself writes or answers, or both
    project_embedding               the draft's embedding as the best approximation of the target's
    hold_out, Windows               the last documents are kept apart; the others are learned in random windows
    measure_costs, predict          c and v of this pair on this machine, and the speed-up that alpha leads to
    add_gradients, acceptance       KL(target || draft) of a window, and alpha: mean sum of min(p, q) on held-out text,
                                    at each position of a draft where a kind (draft_kinds.py) learns several
    Run, train, export              the loop, everything that a stop must not lose, and the folder that it ends in

A text's documents are separated by `<|endoftext|>`, or where it holds none by blank lines. With --prompts the target
answers each line in its chat format, again and again in turn. What is evaluated is what will be written: the weights in
bfloat16. Training ends when the predicted speed-up no longer grows, or at --steps; the best evaluation's weights are
kept. The training state goes to --work at every evaluation and at Ctrl-C (SIGTERM ends at once, as a crash does); the
same command continues from it. This file does not know how drafts are used: that is speculative.py and generate.py.
"""

import argparse
import hashlib
import json
import math
import os
import pickle
import random
import re
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from cli.errors import ending_plainly, interrupts_held, use_threads
from cli.flags import DTYPES, Parser, positive
from cli.load import compiles, pick_device
from cli.prompts import conversation_ids
from decoding.sampling import Sampling
from generate import Engine, generate
from loading.checkpoint import fingerprints, load_config, load_model
from loading.config import config_from_hf, text_part
from loading.drafts import pick_dtype
from loading.files import complete_folder, open_shards, read_json, shards, write_atomically
from loading.tokenizer import Tokenizer, copy_files, load_tokenizer
from model import Config, Transformer
from scripts.draft_kinds import KINDS, Model, by_position, deployed
from speculative import Costs, layer_subset, parse_layers
from weights.linears import QuantizedLinear
from weights.walker import check_unpacked, pack_model

END = "<|endoftext|>"
SAMPLE_ROWS = 16  # documents that the target writes together
OPENING = 8  # tokens of a document of the text that the target continues
LOGITS = 2**24  # made at once: positions times vocabulary
HELD_OUT = 0.1  # of the tokens, at most

# What a draft must share with its target, or a user of both expects to be the same.
SHARED = (
    "vocab_size", "max_position_embeddings", "original_max_position_embeddings", "rms_norm_eps", "rope_theta",
    "rope_scaling", "rope_parameters", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip
OWN_ROPES = ("phi3", "olmo3", "hunyuan_v1_dense", "ministral3")  # which a Llama's config.json cannot say

# ----------------------------------------------------------------------------------------------- shape


def draft_config(hf: dict, args: argparse.Namespace) -> dict:
    """config.json of the draft, from the target's: a Llama that rotates as the target does, or where none can, by
    its theta alone. ValueError for sizes that do not divide."""
    if args.from_layers:
        return layers_config(hf, args.from_layers)
    D, hf = args.dim, text_part(hf)
    if hf.get("model_type") in OWN_ROPES:
        theta = config_from_hf({**hf, "quantization_config": None}).rope_theta
        ropes = ("rope_scaling", "rope_parameters", "original_max_position_embeddings")
        hf = {**hf, **dict.fromkeys(ropes), "rope_theta": theta}
    if D % 2:
        raise ValueError(f"--dim {D} is odd, and RoPE rotates pairs: {D + 1} would work")
    heads = args.heads or D // max(E for E in range(2, 65, 2) if D % E == 0)
    if D % (2 * heads):
        fitting = [H for H in range(1, D // 2 + 1) if D % (2 * H) == 0]
        raise ValueError(
            f"--dim {D} does not divide into --heads {heads} of an even size; heads that would work:"
            f" {', '.join(map(str, fitting))}"
        )
    kv_heads = args.kv_heads or heads
    if heads % kv_heads:
        fitting = [G for G in range(1, heads + 1) if heads % G == 0]
        raise ValueError(
            f"--heads {heads} is not a multiple of --kv_heads {kv_heads}; kv_heads that would work:"
            f" {', '.join(map(str, fitting))}"
        )
    found = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": D,
        # 8/3 D as in Llama, rounded up to a multiple of 32 for group-wise quantization
        "intermediate_size": args.ffn or math.ceil(8 * D / 3 / 32) * 32, "num_hidden_layers": args.layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": D // heads,
        "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False, "dtype": "bfloat16",
        **{key: hf[key] for key in SHARED if hf.get(key) is not None},
    }  # fmt: skip
    config_from_hf(found)
    return found


def layers_config(hf: dict, kept: Sequence[int]) -> dict:
    """config.json of a model of some of the target's layers."""
    if not 0 <= min(kept) <= max(kept) < hf["num_hidden_layers"]:
        raise ValueError(f"--from_layers {list(kept)}: the target has layers 0 to {hf['num_hidden_layers'] - 1}")
    found = {key: value for key, value in hf.items() if key != "quantization_config"}
    if found.get("layer_types"):
        found["layer_types"] = [found["layer_types"][i] for i in kept]
    if found.get("model_type") == "smollm3":
        rope_types = config_from_hf({**hf, "quantization_config": None}).rope_types
        found["no_rope_layers"] = [int(rope_types[i] is not None) for i in kept]
    return found | {"num_hidden_layers": len(kept), "dtype": "bfloat16"}


# ------------------------------------------------------------------------------------------------ text


def documents(file: Path, tokenizer: Tokenizer, end: int | None) -> list[Tensor]:
    """The ids of every document of a text, each (n,) int32, closed by `end` where there is such an id."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 text: {error}") from None
    marked = END in text
    parts = re.split(re.escape(END) + "\n?" if marked else r"\n(?:[ \t]*\n)+", text)
    parts = [part for part in parts if part.strip()]
    tell(f"{file}: {len(parts)} documents, separated by {END if marked else 'blank lines'}")
    closing = [] if end is None else [end]
    bar = tqdm(parts, desc="encode", unit="document", leave=False)
    return [torch.tensor(tokenizer.encode(part, bos=False) + closing, dtype=torch.int32) for part in bar]


def sampled_documents(
    target: Transformer, tokenizer: Tokenizer, args: argparse.Namespace, texts: list[Tensor], asked: list[list[int]],
    end: int | None, settings: dict,
) -> list[Tensor]:  # fmt: skip
    """--sampled tokens or a little more that the target writes at --temperature, in documents of --context tokens or
    fewer: what follows BOS, the first words of documents of the text, or a prompt. Batches are kept in --work as they
    come."""
    first = tokenizer.bos_id if tokenizer.bos_id is not None else end
    if first is None and not texts and not asked:
        raise ValueError(f"--sampled: {args.target} has no BOS and no end token to start from; give --text too")
    if args.temperature == 0 and not texts:
        raise ValueError("--sampled at --temperature 0 writes the same document again and again; give --text too")
    file = args.work / "sampled.jsonl"
    found, lead = read_samples(file, settings), [] if first is None or asked else [first]
    bar = tqdm(total=args.sampled, initial=sum(map(len, found)), desc="sample", unit="token", leave=False)
    with file.open("a", encoding="utf-8") as stream, bar:
        while sum(map(len, found)) < args.sampled:
            numbers = range(len(found), len(found) + SAMPLE_ROWS)
            openings = [asked[n % len(asked)] if asked else opening(texts, args.seed, n) for n in numbers]
            rows = write_documents(target, tokenizer, args, [lead + ids for ids in openings], numbers)
            rows = [before + ids for before, ids in zip(openings, rows, strict=True)]
            lines = [json.dumps({"text": tokenizer.decode(ids), "tokens": ids}) + "\n" for ids in rows]
            stream.write("".join(lines))
            stream.flush()
            found += [torch.tensor(ids, dtype=torch.int32) for ids in rows]
            bar.update(sum(map(len, rows)))
    tell(f"{file}: {len(found)} documents that the target wrote, {sum(map(len, found))} tokens")
    return found


def with_samples(
    texts: tuple[list[Tensor], list[Tensor]], target: Transformer, tokenizer: Tokenizer, args: argparse.Namespace,
    end: int | None, flags: dict,
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """(learned, kept apart) with what the target writes added to both."""
    decisive = ("--temperature", "--context", "--seed", "--dtype", "--target's config.json", "--target's tensors")
    asked = prompts(args.prompts, tokenizer, args.context) if args.prompts else []
    settings = {name: flags[name] for name in decisive}
    settings["texts to continue"] = digest([torch.tensor(ids) for ids in asked] or texts[0])
    written = sampled_documents(target, tokenizer, args, texts[0], asked, end, settings)
    learned, kept = hold_out(written, args.heldout)
    return texts[0] + learned, texts[1] + kept


def prompts(file: Path, tokenizer: Tokenizer, context: int) -> list[list[int]]:
    """The ids of every line of a file as a user's message, ready for the answer. ValueError for none, and for one that
    leaves no room in `context`."""
    lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    found = [conversation_ids(tokenizer, [{"role": "user", "content": line}]) for line in lines]
    longest = max(map(len, found), default=0)
    if not 0 < longest < context:
        raise ValueError(f"{file}: the longest of {len(found)} prompts has {longest} tokens; --context is {context}")
    return found


def opening(texts: list[Tensor], seed: int, number: int) -> list[int]:
    """The first tokens of one of the texts; none where there are none."""
    return random.Random(f"{seed} opening {number}").choice(texts)[:OPENING].tolist() if texts else []


def write_documents(
    target: Transformer, tokenizer: Tokenizer, args: argparse.Namespace, prompts: list[list[int]], numbers: range
) -> list[list[int]]:
    """What the target writes after each prompt; document n is drawn with seed --seed + n, whatever its batch is."""
    rows = [[] for _ in prompts]
    for row, id in generate(
        target, prompts, sampling=Sampling(args.temperature), stop_ids=tokenizer.stop_ids,
        max_new_tokens=[args.context - len(prompt) for prompt in prompts], seed=[args.seed + n for n in numbers],
    ):  # fmt: skip
        rows[row].append(id)
    return rows


def read_samples(file: Path, settings: dict) -> list[Tensor]:
    """Whole batches that an earlier run wrote, after a first line with its settings. What a kill cut off is dropped
    from the file too."""
    text = file.read_text(encoding="utf-8") if file.exists() else json.dumps(settings) + "\n"
    lines = text.split("\n")[:-1]  # without a newline it was cut off
    try:
        check_same(file, json.loads(lines[0]), settings)
    except (IndexError, json.JSONDecodeError):
        raise ValueError(f"{file}: its first line is not what this script writes; remove the file") from None
    whole = lines[: 1 + (len(lines) - 1) // SAMPLE_ROWS * SAMPLE_ROWS]
    write_atomically(file, lambda partial: partial.write_text("\n".join(whole) + "\n", encoding="utf-8"))
    return [torch.tensor(json.loads(line)["tokens"], dtype=torch.int32) for line in whole[1:]]


def hold_out(texts: list[Tensor], tokens: int) -> tuple[list[Tensor], list[Tensor]]:
    """(what is learned, what is kept apart): the last documents that together have so many tokens, or a tenth of all
    tokens where that is less."""
    wanted, first = min(tokens, int(HELD_OUT * sum(map(len, texts)))), len(texts)
    while wanted > 0:
        first -= 1
        wanted -= len(texts[first])
    return texts[:first], texts[first:]


class Windows:
    """Rows of T + 1 ids, T = context, cut out of documents that stand one after the other; each is led by BOS where
    there is one. ValueError where they have too few tokens for one row."""

    def __init__(self, texts: list[Tensor], context: int, bos: int | None, name: str):
        self.ids = torch.cat([torch.empty(0, dtype=torch.int32), *texts])  # (n,)
        self.lead = [] if bos is None else [bos]
        self.context, self.size = context, context + 1 - len(self.lead)
        if len(self.ids) < self.size:
            raise ValueError(
                f"the {name} documents have {len(self.ids)} tokens, fewer than the {self.size} of one window: give"
                f" more text, or a smaller --context than {context}"
            )
        self.starts = [0, *torch.tensor([len(text) for text in texts]).cumsum(0).tolist()[:-1]]

    def row(self, start: int) -> Tensor:
        start = min(start, len(self.ids) - self.size)
        return torch.cat((torch.tensor(self.lead, dtype=torch.int32), self.ids[start : start + self.size])).long()

    def random(self, seed: int, step: int, rows: int) -> Tensor:
        """(rows, T + 1), half of them from a document's start; a function of seed and step alone, so that a resumed run
        sees the same."""
        rng = random.Random(f"{seed} {step}")
        starts = [rng.choice(self.starts) if rng.random() < 0.5 else rng.randrange(len(self.ids)) for _ in range(rows)]
        return torch.stack([self.row(start) for start in starts])

    def consecutive(self) -> Tensor:
        """(N, T + 1): all of it once, but for a shorter rest."""
        return torch.stack([self.row(i) for i in range(0, len(self.ids) - self.size + 1, self.context)])


def cut(texts: tuple[list[Tensor], list[Tensor]], context: int, bos: int | None) -> tuple[Windows, Tensor]:
    """Windows to learn on, and all of the held-out text (N, T + 1)."""
    learned, kept = texts
    return Windows(learned, context, bos, "training"), Windows(kept, context, bos, "held-out").consecutive()


# ---------------------------------------------------------------------------------------------- theory


def measure_costs(target: Transformer, kind: Model, args: argparse.Namespace, dtype: torch.dtype) -> Costs:
    """Of this shape, with random weights, as a drafter for the target on this machine, half a context filled."""
    device, sampling = target.norm.weight.device, Sampling(args.temperature)
    draft = kind.trained()
    init_weights(draft, args.seed)
    kind.bind(draft, target)
    drafter = kind.drafter(draft.to(device, dtype))
    pack_model(drafter.model)
    compile = compiles(args.compile, device)
    engine = Engine(target, 1, args.context, compile=compile, drafter=drafter, speculate_k="auto")
    if compile:
        engine.warm_up(sampling.kind)
    return engine.calibrate(sampling, args.context // 2, rounds=15)


def predict(costs: Costs, alpha: float | Sequence[float]) -> tuple[int, float]:
    """(K, speed-up) of the K that pays best, at least 1, for one alpha or one for each position of a draft. It grows
    with alpha, also where it is below 1 and nothing pays yet: Costs.best, which may choose not to draft, would stand
    still there."""
    alphas = alpha if isinstance(alpha, Sequence) else [alpha]
    found = {k: by_position(alphas, k) / costs.round(k) for k in costs.verify_s}
    k = max(found, key=found.get)
    return k, found[k]


def best_and_over(predictions: Sequence[float], patience: int) -> tuple[int, bool]:
    """(index of the best evaluation, the first one on ties; whether `patience` more have not been better)."""
    best = max(range(len(predictions)), key=predictions.__getitem__)
    return best, len(predictions) - 1 - best >= patience


# -------------------------------------------------------------------------------------------- learning


def init_weights(model: Transformer, seed: int) -> None:
    """GPT-2's scheme: normal(0, 0.02), with the two matrices that write to the residual stream scaled by depth."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            last = name.endswith(("attention.out.weight", "ffn.down.weight"))
            std = 0.02 / math.sqrt(2 * model.config.n_layers) if last else 0.02
            torch.nn.init.normal_(weight, std=std, generator=generator)


@torch.no_grad()
def weights_of_layers(draft: Transformer, target: Transformer, kept: Sequence[int]) -> dict[str, Tensor]:
    """What the draft begins with: the weights of some of the target's layers, its norm and its embedding, in float32.
    A mask's row of the embedding is the mean of all rows. ValueError for a packed target."""
    check_unpacked(target, "copied")
    chosen = layer_subset(target, kept)
    if (chosen.windows, chosen.rope_types) != (draft.windows, draft.rope_types):
        raise ValueError(
            f"--from_layers {list(kept)}: config.json cannot say what these layers attend to and rotate by"
        )
    source, found = dict(chosen.named_modules()), {}
    for name, parameter in draft.named_parameters():
        module, _, kind = name.rpartition(".")
        part = source[module]
        stored = part.dequantized(torch.float32) if isinstance(part, QuantizedLinear) and kind == "weight" else None
        if module == "embed":
            stored = part(torch.arange(target.config.vocab_size, device=target.norm.weight.device))
        stored = (getattr(part, kind) if stored is None else stored).float()
        extra = stored.mean(0, keepdim=True).expand(len(parameter) - len(stored), *stored.shape[1:])
        found[name] = torch.cat((stored, extra))
    return found


@torch.no_grad()
def project_embedding(draft: Transformer, target: Transformer) -> None:
    """The target's embedding E on its D leading directions: no other table of D columns gives products of rows nearer
    to E's own. Scaled, so that what the first norm sees and logits of a first hidden state are of a usual size."""
    ids = torch.arange(target.config.vocab_size, device=target.norm.weight.device)
    E = target.embed(ids).float()  # (V, D of the target), quantized or not
    _, directions = torch.linalg.eigh(E.T @ E)  # in ascending order
    projected = E @ directions[:, -draft.config.dim :].flip(1)  # (V, D)
    draft.embed.weight[: len(projected)].copy_(projected * (0.02 / projected.std()))  # a mask has no row to project


def adamw(model: Transformer) -> torch.optim.AdamW:
    """Weight decay on matrices alone. The learning rate is set at each step."""
    matrices = [w for w in model.parameters() if w.dim() > 1]
    vectors = [w for w in model.parameters() if w.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)


def update(model: Transformer, optimizer: torch.optim.AdamW, lr: float) -> None:
    """One step with the gradients that have been added up, which it clears."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def learning_rate(step: int, steps: int, peak: float, warmup: int = 200) -> float:
    """Linear warm-up, then a cosine to a fiftieth of the peak."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (0.02 + 0.49 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))))


def blocks(target: Transformer, h: Tensor, at: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The target's logits (B, n, V), of as many of its states (B, T, D) at a time as may be held; which of a draft's
    states belong to these, as an index into `at` (N,); and to which of the n each does."""
    n = max(1, LOGITS // (len(h) * target.config.vocab_size))
    for begin in range(0, h.size(1), n):
        (chosen,) = ((at >= begin) & (at < begin + n)).nonzero(as_tuple=True)
        yield target.head(h[:, begin : begin + n]), chosen, at[chosen] - begin


def add_gradients(kind: Model, draft: Transformer, target: Transformer, rows: Tensor, seed: int = 1) -> float:
    """Add to the draft's gradients those of KL(target || draft), the mean over what the kind learns of rows (B, T + 1);
    that mean. Of a draft for some tokens alone, the terms of these. All logits are never held at once."""
    h, drafted = kind.states(draft, target, rows[:, :-1], seed)
    states, total = drafted.states.detach(), 0.0
    gradient, count = torch.zeros_like(states), states.size(0) * states.size(1)
    for logits, chosen, which in blocks(target, h, drafted.at):
        log_p = kind.drafts(logits.log_softmax(-1))  # (B, n, V of the draft)
        leaf = states[:, chosen].requires_grad_()
        log_q = kind.logits(draft, leaf).log_softmax(-1)
        loss = F.kl_div(log_q, log_p[:, which], log_target=True, reduction="sum") / count
        loss.backward()
        gradient[:, chosen] = leaf.grad
        total += loss.item()
    drafted.states.backward(gradient)
    return total


@torch.no_grad()
def acceptance(
    kind: Model, draft: Transformer, target: Transformer, rows: Tensor, temperatures: Sequence[float]
) -> dict[float, list[float]]:
    """{temperature: alphas}: at each position of a draft the mean over rows (N, T + 1) of the sum over tokens of
    min(p, q), the chance that a drafted token is accepted (arXiv:2211.17192, cor. 3.6), where the text's own tokens
    were drafted before."""
    totals = {temperature: torch.zeros(kind.positions, dtype=torch.float64) for temperature in temperatures}
    counts = torch.zeros(kind.positions, dtype=torch.float64)
    for part in rows[:, :-1].split(4):
        h, drafted = kind.states(draft, target, part, None)
        counts += len(part) * torch.bincount(drafted.position, minlength=kind.positions).cpu()
        for logits, chosen, which in blocks(target, h, drafted.at):
            own = kind.logits(draft, drafted.states[:, chosen])  # (B, c, V of the draft)
            for temperature, total in totals.items():
                sampling = Sampling(temperature)
                p, q = kind.drafts(sampling.probs(logits)), sampling.probs(own)
                overlap = torch.minimum(p[:, which], q).sum(-1).double().sum(0)  # (c,)
                total.index_add_(0, drafted.position[chosen].cpu(), overlap.cpu())
    return {temperature: (total / counts).tolist() for temperature, total in totals.items()}


class Run:
    """The draft while it learns, and all that a stop must not lose."""

    def __init__(
        self, kind: Model, target: Transformer, args: argparse.Namespace, device: torch.device, dtype: torch.dtype
    ):
        self.kind, self.draft = kind, kind.trained()
        init_weights(self.draft, args.seed)
        self.draft.to(device)
        self.optimizer = adamw(self.draft)
        self.deployed = deployed(kind, dtype, device)  # as it will be loaded: evaluations ask this one
        for each in (self.draft, self.deployed):
            kind.bind(each, target)
        self.settings: dict = {}
        self.costs: Costs | None = None
        self.step, self.seconds, self.losses = 0, 0.0, []  # losses since the last evaluation
        self.evaluations: list[dict] = []
        self.best: dict[str, Tensor] = {}  # weights of the best evaluation, bfloat16

    def save(self, file: Path) -> None:
        names = ("settings", "step", "seconds", "losses", "evaluations", "best")
        state = {name: getattr(self, name) for name in names} | {"costs": vars(self.costs)}
        state |= {"draft": self.draft.state_dict(), "optimizer": self.optimizer.state_dict()}
        write_atomically(file, lambda partial: torch.save(state, partial))

    def load(self, state: dict) -> None:
        self.draft.load_state_dict(state.pop("draft"))
        self.optimizer.load_state_dict(state.pop("optimizer"))
        vars(self).update(state, costs=Costs(**state["costs"]))

    @property
    def shown_costs(self) -> str:
        return ", ".join(f"{k}: {self.costs.c(k):.3f} and {self.costs.v(k):.3f}" for k in self.costs.verify_s)

    def over(self, patience: int) -> bool:
        return bool(self.evaluations) and best_and_over(self.predictions, patience)[1]

    @property
    def predictions(self) -> list[float]:
        return [found["predicted_speedup"] for found in self.evaluations]

    @torch.no_grad()
    def evaluate(self, target: Transformer, heldout: Tensor, temperature: float) -> None:
        """Note alpha and what it leads to, and keep the weights if they are the best so far."""
        stored = {name: weight.bfloat16() for name, weight in self.draft.named_parameters()}
        for name, weight in self.deployed.named_parameters():
            weight.copy_(stored[name])
        wanted = sorted({1.0, temperature})
        found = acceptance(self.kind, self.deployed, target, heldout, wanted)
        alphas = {each: statistics.mean(listed) for each, listed in found.items()}
        if not all(map(math.isfinite, alphas.values())):
            raise ValueError(f"step {self.step}: alpha = {alphas[temperature]}: the target's logits are not finite")
        k, expected = predict(self.costs, found[temperature])
        loss = sum(self.losses) / len(self.losses) if self.losses else None
        self.evaluations.append({
            "step": self.step, "train_loss": loss, "alpha": alphas[temperature], "alpha_temperature_1": alphas[1.0],
            "predicted_speedup": expected, "best_k": k, "c": self.costs.c(k), "v": self.costs.v(k),
        })  # fmt: skip
        if self.kind.positions > 1:
            self.evaluations[-1]["alpha_by_position"] = found[temperature]
        self.losses = []
        if best_and_over(self.predictions, 1)[0] == len(self.evaluations) - 1:
            self.best = {name: weight.cpu() for name, weight in stored.items()}


def line(found: dict, temperature: float) -> str:
    """One evaluation for people."""
    loss = "–" if found["train_loss"] is None else f"{found['train_loss']:.4f}"
    other = "" if temperature == 1 else f" at temperature {temperature:g}, {found['alpha_temperature_1']:.4f} at 1"
    each = ", ".join(f"{alpha:.3f}" for alpha in found.get("alpha_by_position", ()))
    return (
        f"step {found['step']}: train loss {loss}, held-out alpha {found['alpha']:.4f}{other}"
        f"{f' (by position {each})' if each else ''}, predicted speed-up"
        f" {found['predicted_speedup']:.3f} with K = {found['best_k']}"
    )


def train(run: Run, target: Transformer, windows: Windows, heldout: Tensor, args: argparse.Namespace) -> None:
    """Until --steps, or until the prediction has not grown for --patience evaluations. KeyboardInterrupt at Ctrl-C,
    when the step is done and saved."""
    file, device = args.work / "state.pt", heldout.device
    bar = tqdm(initial=run.step, total=args.steps, desc="distill", unit="step", mininterval=5)
    with interrupts_held() as interrupts, bar:
        while not run.evaluations or (run.step < args.steps and not run.over(args.patience)):
            start = time.perf_counter()
            if run.evaluations:  # the first one is of the untrained draft
                learn(run, target, windows.random(args.seed, run.step, args.batch).to(device), args)
                bar.update()
            due = run.step % args.eval_every == 0 or run.step == args.steps
            if due:
                run.evaluate(target, heldout, args.temperature)
                tell(line(run.evaluations[-1], args.temperature))
            run.seconds += time.perf_counter() - start
            if due or interrupts:
                run.save(file)
            if interrupts:
                tell(f"interrupted after step {run.step}, which is saved: the same command continues")
                raise KeyboardInterrupt


def learn(run: Run, target: Transformer, rows: Tensor, args: argparse.Namespace) -> None:
    """One step on rows (B, T + 1)."""
    run.losses.append(add_gradients(run.kind, run.draft, target, rows, 1 + args.seed + run.step))
    if not math.isfinite(run.losses[-1]):
        raise ValueError(f"step {run.step}: the loss is {run.losses[-1]}; a lower --lr than {args.lr} may help")
    warmup = min(200, args.steps // 10)
    update(run.draft, run.optimizer, learning_rate(run.step, args.steps, args.lr, warmup))
    run.step += 1


# ------------------------------------------------------------------------------------- files and flags


def tell(message: str) -> None:
    tqdm.write(message, file=sys.stderr)


def check_same(file: Path, found: dict, wanted: dict) -> None:
    """ValueError that names the first setting that has changed since `file` was begun."""
    for name, value in wanted.items():
        if found.get(name) != value:
            raise ValueError(
                f"{file} was begun with {name} {found.get(name)}, now it is {value}: give the same again, remove that"
                " file to start anew, or choose another --work"
            )


def read_state(file: Path, settings: dict) -> dict | None:
    """The saved run, if there is one, made with the same settings."""
    if not file.exists():
        return None
    try:
        state = torch.load(file, weights_only=True, map_location="cpu")
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{file}: not a training state ({str(error).splitlines()[0]}); remove it") from None
    check_same(file, state["settings"], settings)
    return state


def digest(texts: list[Tensor]) -> str:
    return hashlib.sha256(b"".join(ids.numpy().tobytes() + b"|" for ids in texts)).hexdigest()[:16]


def export(run: Run, hf: dict, args: argparse.Namespace, result: dict) -> None:
    """The folder --output, under another name until it is whole."""
    model = deployed(run.kind, torch.bfloat16, "cpu")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(run.best[name])
    ids = {key: hf[key] for key in ("bos_token_id", "eos_token_id") if key in hf}
    made = {"made_by": "scripts.distill_draft", "settings": run.settings, **result, "evaluations": run.evaluations}
    with complete_folder(args.output) as partial:
        (partial / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n")
        copy_files(args.target, partial)
        (partial / "distill.json").write_text(json.dumps(made, indent=2) + "\n")
        run.kind.save(model, partial)


def check_request(args: argparse.Namespace) -> Config:
    """The target's Config. Resolves defaults that depend on it; ValueError for what would only fail later."""
    if args.output.exists():
        raise ValueError(f"{args.output}: exists already; remove it or choose another --output")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(args.output.parent, os.W_OK):
        raise ValueError(f"{args.output.parent}: cannot be written to")
    if args.text is None and args.sampled is None:
        raise ValueError("nothing to learn on: give --text FILE, --sampled TOKENS, or both")
    if args.prompts and not args.sampled:
        raise ValueError("--prompts needs --sampled TOKENS: how much the target answers")
    config = load_config(args.target)
    if args.kind == "eagle3":
        if args.layers not in (None, 1) or args.dim not in (None, config.dim) or args.project:
            raise ValueError(
                f"--kind eagle3 has one layer of --dim {config.dim}, the target's, and nothing to --project"
            )
        args.layers, args.dim = 1, config.dim
        if args.from_layers or not 1 <= (args.draft_vocab or 1) <= config.vocab_size:
            raise ValueError(f"--kind eagle3 takes no --from_layers, and --draft_vocab up to {config.vocab_size}")
    elif args.draft_vocab:
        raise ValueError(f"--draft_vocab {args.draft_vocab} is for --kind eagle3; --kind {args.kind} has all tokens")
    if args.from_layers:
        if any(config.sparse):
            raise ValueError("--from_layers: layers of experts make no quick draft; give --layers and --dim")
        args.from_layers = parse_layers(args.from_layers)
        if any((args.layers, args.dim, args.heads, args.kv_heads, args.ffn, args.project)):
            raise ValueError("--from_layers takes sizes and embedding from the target: give no sizes, and no --project")
        args.layers, args.dim = len(args.from_layers), config.dim
    if args.layers is None or args.dim is None:
        raise ValueError(f"--kind {args.kind} needs --layers and --dim")
    if args.project and args.dim > config.dim:
        raise ValueError(f"--project: --dim {args.dim} is more than the target's {config.dim}")
    args.context = args.context or min(512, config.max_seq_length)
    if not 2 * OPENING <= args.context <= config.max_seq_length:
        limits = f"{2 * OPENING} and the target's {config.max_seq_length} positions"
        raise ValueError(f"--context {args.context} must lie between {limits}")
    Sampling(args.temperature)
    args.lr = 4e-3 * min(1, 128 / args.dim) if args.lr is None else args.lr
    if not 0 < args.lr < 1:
        raise ValueError(f"--lr {args.lr} must lie between 0 and 1")
    if not 0 <= args.seed < 2**31:
        raise ValueError(f"--seed {args.seed} must lie between 0 and 2^31")
    args.work = args.work or Path("build") / "distill" / args.output.name
    return config


def settings_of(args: argparse.Namespace) -> dict[str, str]:
    """What a saved run must have been told alike, and what tells its target from another."""
    flags = {f"--{name}": str(value) for name, value in vars(args).items() if name not in ("output", "work")}
    target = fingerprints(args.target, open_shards(shards(args.target)))
    return flags | {f"--target's {name.removeprefix('its ')}": value[:16] for name, value in target.items()}


def finish(run: Run, hf: dict, args: argparse.Namespace, heldout: Tensor) -> dict:
    """Write the folder of the best evaluation; what the last line says."""
    best = run.evaluations[best_and_over(run.predictions, 1)[0]]
    names = ("alpha", "alpha_temperature_1", "c", "v", "predicted_speedup", "best_k")
    result = {name: best[name] for name in names} | {
        "temperature": args.temperature, "steps": run.step, "best_step": best["step"],
        "seconds": round(run.seconds, 1), "heldout_tokens": heldout[:, 1:].numel(),
    }  # fmt: skip
    export(run, hf, args, result)
    (args.work / "state.pt").unlink()
    if best["predicted_speedup"] < 1:
        tell("no K pays on this machine: with this draft, plain decoding is expected to be faster")
    return result


def distill(args: argparse.Namespace) -> dict:
    """Make the folder --output; what the last line says. KeyboardInterrupt leaves a state to continue from."""
    config, device = check_request(args), pick_device(args.device)
    hf = read_json(args.target / "config.json")
    chosen = {"vocab": args.draft_vocab} if args.kind == "eagle3" else {}
    kind = KINDS[args.kind](draft_config(hf, args), config, args.depth, **chosen)
    draft_hf, dtype = kind.hf, pick_dtype(args.dtype, config.dtype, device)
    tokenizer, flags = load_tokenizer(args.target), settings_of(args)
    if tokenizer.vocab_size > config.vocab_size:
        sizes = f"{tokenizer.vocab_size} tokens, the model's vocabulary only {config.vocab_size}"
        raise ValueError(f"{args.target}: the tokenizer has {sizes}")
    state = read_state(args.work / "state.pt", flags)
    args.work.mkdir(parents=True, exist_ok=True)

    end = hf.get("eos_token_id")
    end = next(iter(end), None) if isinstance(end, list) else end
    texts = hold_out(documents(args.text, tokenizer, end) if args.text else [], args.heldout)
    if not args.sampled:
        cut(texts, args.context, tokenizer.bos_id)  # too little text is said before any work
    target = load_model(args.target, device=device, dtype=dtype, progress=True, pack=False)
    begun = weights_of_layers(kind.trained(), target, args.from_layers) if args.from_layers and not state else None
    pack_model(target)
    if args.sampled:
        texts = with_samples(texts, target, tokenizer, args, end, flags)
    windows, heldout = cut(texts, args.context, None if args.prompts else tokenizer.bos_id)
    settings = flags | {"the tokens to learn": digest(texts[0]), "the held-out tokens": digest(texts[1])}

    if args.kind == "eagle3":
        kind.choose(windows.ids)
    drafted = dtype if args.kind == "eagle3" else pick_dtype(args.dtype, "bfloat16", device)  # as loading does
    run = Run(kind, target, args, device, drafted)
    if state is None:
        run.settings, run.costs = settings, measure_costs(target, kind, args, run.deployed.norm.weight.dtype)
        if args.project:
            project_embedding(run.draft, target)
        if begun is not None:
            run.draft.load_state_dict(begun, strict=False)  # a tied head is the embedding
    else:
        check_same(args.work / "state.pt", state["settings"], settings)
        run.load(state)
        tell(f"continues after step {run.step}")
    tell(f"{len(windows.ids)} tokens to learn on, {heldout[:, 1:].numel()} held out; c and v by K {run.shown_costs}")
    train(run, target, windows, heldout.to(device), args)
    return finish(run, draft_hf, args, heldout)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(description="Distil a draft for a target: a folder for generate.py's --draft_checkpoint.")
    add = parser.add_argument
    add("--target", type=Path, required=True, metavar="PATH", help="the model to draft for: a folder or a .gguf file")
    add("--kind", choices=KINDS, default="model", help="what it will be: default: a model that drafts token by token")
    add("--depth", type=positive, default=5, help="tokens of a round that pard and eagle3 learn to draft")
    add("--layers", type=positive, default=None, help="of a model and of pard")
    add("--from_layers", metavar="LAYERS", help="start from these of the target, such as 0-1,28-29; sizes are its own")
    add("--draft_vocab", type=positive, metavar="N", help="of eagle3: draft the N most frequent tokens alone")
    add("--dim", type=positive, default=None, help="of a model and of pard; eagle3 has the target's")
    add("--heads", type=positive, help="default: heads of 64, or of the largest even size below that divides --dim")
    add("--kv_heads", type=positive, help="default: as many as heads")
    add("--ffn", type=positive, help="default: 8/3 of --dim, up to a multiple of 32")
    add("--text", type=Path, metavar="FILE", help=f"documents, separated by {END} or, without any, by blank lines")
    add("--sampled", type=positive, metavar="TOKENS", help="learn on so many tokens that the target writes itself")
    add("--prompts", type=Path, metavar="FILE", help="lines that the target answers, for --sampled")
    add("--project", action="store_true", help="start from the target's embedding, on its leading --dim directions")
    add("--heldout", type=positive, default=20_000, metavar="TOKENS", help="of the last documents, not learned")
    add("--temperature", type=float, default=1.0, help="to sample, and to predict the speed-up for")
    add("--output", type=Path, required=True, metavar="DIR", help="folder to create")
    add("--work", type=Path, metavar="DIR", help="training state and sampled text; default: build/distill/NAME")
    add("--steps", type=positive, default=3000, help="at most")
    add("--batch", type=positive, default=8, help="rows of --context tokens a step")
    add("--context", type=positive, help="positions that it learns to use; default: 512, or the target's context")
    add("--lr", type=float, help="peak of the learning rate; default: 0.004, falling as 1 / dim beyond 128")
    add("--eval_every", type=positive, default=250, metavar="STEPS")
    add("--patience", type=positive, default=3, help="evaluations without a better prediction that end the run")
    add("--seed", type=int, default=0)
    add("--device")
    add("--dtype", choices=DTYPES, help="of the target; default: the checkpoint's")
    add("--compile", action=argparse.BooleanOptionalAction, help="while c and v are measured; as generate.py's")
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args()
    use_threads(None)
    with ending_plainly():
        print(json.dumps(distill(args)))


if __name__ == "__main__":
    main()
