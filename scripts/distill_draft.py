"""Distil a draft for any target: a small model that learns the target's distribution, for --draft_checkpoint.

    python -m scripts.distill_draft --target DIR --layers 1 --dim 96 --text stories.txt --output DIR

    measure_costs, predict          c and v of this pair on this machine; the speed-up that a measured alpha predicts
    add_gradients, acceptance       KL(target || draft) of a window; alpha by position on held-out text
    Run, train, export              the training state, the loop for all kinds, the folder --output

draft_kinds.py has the kinds of drafts, draft_start.py their sizes and first weights, draft_text.py the text. Training
ends at --steps, or when the predicted speed-up no longer grows. The best evaluation's weights are written, in bfloat16
as they were evaluated. Every evaluation and Ctrl-C save a state in --work, from which the same command continues
(SIGTERM ends at once).
"""

if __name__ == "__main__":  # before torch is imported: --help and wrong flags are answered at once
    from cli.start import answer_flags
    from scripts.flags import distill_draft_args

    answer_flags(distill_draft_args)

import argparse
import json
import math
import os
import pickle
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from cli.errors import defer_interrupts, ending_plainly, use_threads
from cli.load import compiles, pick_device
from decoding.sampling import Sampling
from generate import Engine
from loading.checkpoint import fingerprints, load_config, load_model, pick_dtype
from loading.files import complete_folder, open_shards, read_json, shards, write_atomically
from loading.tokenizer import copy_files, load_tokenizer
from model import Config, Transformer
from scripts import draft_text
from scripts.draft_kinds import KINDS, Kind, tokens_per_round
from scripts.draft_start import check_sizes, draft_config, init_weights, project_embedding, weights_of_layers
from scripts.draft_text import Windows, check_settings, digest, hold_out, ids_of, log, read_documents, sampled_documents
from scripts.flags import distill_draft_args as parse_args
from speculative import Costs
from weights.walker import pack_model

MAX_LOGITS = 2**24  # computed at once: positions times vocabulary

# ---------------------------------------------------------------------------------------------- theory


def measure_costs(target: Transformer, kind: Kind, args: argparse.Namespace, dtype: torch.dtype) -> Costs:
    """Costs of a draft of this shape on this machine, with random weights and half a context filled."""
    device, sampling = target.norm.weight.device, Sampling(args.temperature)
    draft = kind.new_model()
    init_weights(draft, args.seed)
    kind.bind(draft, target)
    drafter = kind.drafter(draft.to(device, dtype))
    pack_model(drafter.model)
    compile = compiles(args.compile, device)
    engine = Engine(target, 1, args.context, compile=compile, drafter=drafter, speculate_k="auto")
    if compile:
        engine.warm_up(sampling.kind)
    return engine.calibrate(sampling, args.context // 2, rounds=15)


def predict(costs: Costs, alphas: Sequence[float]) -> tuple[int, float, float]:
    """(K, tokens a round, speed-up) of the best K >= 1, for alphas by position. Costs.best may choose K = 0, and could
    not compare drafts that are slower than plain decoding."""
    k = max(costs.verify_s, key=lambda k: tokens_per_round(alphas, k) / costs.round(k))
    return k, tokens_per_round(alphas, k), tokens_per_round(alphas, k) / costs.round(k)


def best_evaluation(predictions: Sequence[float], patience: int) -> tuple[int, bool]:
    """(index of the best prediction, the first on ties; are there `patience` or more predictions after it?)."""
    best = max(range(len(predictions)), key=predictions.__getitem__)
    return best, len(predictions) - 1 - best >= patience


# -------------------------------------------------------------------------------------------- learning


def adamw(model: Transformer) -> torch.optim.AdamW:
    """With weight decay on matrices alone. `update` sets the learning rate."""
    matrices = [w for w in model.parameters() if w.dim() > 1]
    vectors = [w for w in model.parameters() if w.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)


def update(model: Transformer, optimizer: torch.optim.AdamW, lr: float) -> None:
    """One step with the accumulated gradients; clears them."""
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
    """For each block of n positions of the target's states h (B, T, D): its logits (B, n, V), the indices of entries of
    `at` (N,) that lie in the block, and their positions in it."""
    n = max(1, MAX_LOGITS // (len(h) * target.config.vocab_size))
    for start in range(0, h.size(1), n):
        (indices,) = ((at >= start) & (at < start + n)).nonzero(as_tuple=True)
        yield target.head(h[:, start : start + n]), indices, at[indices] - start


def add_gradients(kind: Kind, draft: Transformer, target: Transformer, rows: Tensor, seed: int = 1) -> float:
    """Add the gradients of KL(target || draft), and return it: the mean over the draft's states for rows (B, T + 1)
    whose next token is not hidden, weighted by position in a draft. The sum over tokens takes those that the kind
    drafts. Logits exist for one block at a time."""
    h, drafted = kind.states(draft, target, ids_of(rows[:, :-1]), seed)
    states, total = drafted.states.detach(), 0.0
    weights = kind.loss_weights.to(states.device)[drafted.position] * (rows[:, drafted.at + 1] >= 0)  # (B, N)
    gradient, count = torch.zeros_like(states), weights.sum().clamp(min=1e-6)
    for logits, indices, positions in blocks(target, h, drafted.at):
        log_p = kind.select(logits.log_softmax(-1))  # (B, n, V of the draft)
        leaf = states[:, indices].requires_grad_()
        log_q = kind.logits(draft, leaf).log_softmax(-1)
        losses = F.kl_div(log_q, log_p[:, positions], log_target=True, reduction="none").sum(-1)  # (B, c)
        loss = (losses * weights[:, indices]).sum() / count
        loss.backward()
        gradient[:, indices] = leaf.grad
        total += loss.item()
    drafted.states.backward(gradient)
    return total


@torch.no_grad()
def acceptance(
    kind: Kind, draft: Transformer, target: Transformer, rows: Tensor, temperatures: Sequence[float]
) -> dict[float, list[float]]:
    """{temperature: alphas by position in a draft}. Alpha, a drafted token's probability of acceptance, is the mean
    over rows (N, T + 1), where the next token is not hidden, of sum min(p, q) over tokens (arXiv:2211.17192, cor. 3.6).
    The text's tokens stand for those drafted before."""
    totals = {temperature: torch.zeros(kind.num_positions, dtype=torch.float64) for temperature in temperatures}
    counts = torch.zeros(kind.num_positions, dtype=torch.float64)
    for batch in rows.split(4):
        h, drafted = kind.states(draft, target, ids_of(batch[:, :-1]), None)
        learned = (batch[:, drafted.at + 1] >= 0).double()  # (B, N)
        counts.index_add_(0, drafted.position.cpu(), learned.sum(0).cpu())
        for logits, indices, positions in blocks(target, h, drafted.at):
            draft_logits = kind.logits(draft, drafted.states[:, indices])  # (B, c, V of the draft)
            for temperature, total in totals.items():
                sampling = Sampling(temperature)
                p, q = kind.select(sampling.probs(logits)), sampling.probs(draft_logits)
                overlap = (torch.minimum(p[:, positions], q).sum(-1) * learned[:, indices]).sum(0)  # (c,)
                total.index_add_(0, drafted.position[indices].cpu(), overlap.cpu())
    return {temperature: (total / counts.clamp(min=1)).tolist() for temperature, total in totals.items()}


# ------------------------------------------------------------------------------------------------ loop


class Run:
    """The draft in training, with its optimizer and evaluations. `save` stores them for `load`."""

    def __init__(
        self, kind: Kind, target: Transformer, args: argparse.Namespace, device: torch.device, dtype: torch.dtype
    ):
        self.kind, self.target, self.args, self.draft = kind, target, args, kind.new_model()
        init_weights(self.draft, args.seed)
        self.draft.to(device)
        self.optimizer = adamw(self.draft)
        self.eval_model = kind.empty_model(dtype, device)  # the draft's weights as they will be loaded
        for model in (self.draft, self.eval_model):
            kind.bind(model, target)
        self.settings: dict = {}
        self.costs: Costs | None = None
        self.step, self.seconds, self.losses = 0, 0.0, []  # losses since the last evaluation
        self.evaluations: list[dict] = []
        self.best: dict[str, Tensor] = {}  # weights of the best evaluation, bfloat16

    def save(self) -> None:
        names = ("settings", "step", "seconds", "losses", "evaluations", "best")
        state = {name: getattr(self, name) for name in names} | {"costs": vars(self.costs)}
        state |= {"draft": self.draft.state_dict(), "optimizer": self.optimizer.state_dict()}
        write_atomically(self.args.work / "state.pt", lambda partial: torch.save(state, partial))

    def load(self, state: dict) -> None:
        self.draft.load_state_dict(state.pop("draft"))
        self.optimizer.load_state_dict(state.pop("optimizer"))
        vars(self).update(state, costs=Costs(**state["costs"]))

    @property
    def best_evaluation(self) -> tuple[int, bool]:
        return best_evaluation([evaluation["predicted_speedup"] for evaluation in self.evaluations], self.args.patience)

    def learn(self, rows: Tensor) -> None:
        """One step on rows (B, T + 1)."""
        self.losses.append(add_gradients(self.kind, self.draft, self.target, rows, 1 + self.args.seed + self.step))
        if not math.isfinite(self.losses[-1]):
            message = f"the loss is {self.losses[-1]}; a lower --lr than {self.args.lr} may help"
            raise ValueError(f"step {self.step}: {message}")
        warmup = min(200, self.args.steps // 10)
        update(self.draft, self.optimizer, learning_rate(self.step, self.args.steps, self.args.lr, warmup))
        self.step += 1

    @torch.no_grad()
    def evaluate(self, heldout: Tensor) -> None:
        """Measure alpha on heldout (N, T + 1), print the prediction, and copy the weights if it is the best so far."""
        weights = {name: weight.bfloat16() for name, weight in self.draft.named_parameters()}
        for name, weight in self.eval_model.named_parameters():
            weight.copy_(weights[name])
        temperature = self.args.temperature
        alphas = acceptance(self.kind, self.eval_model, self.target, heldout, sorted({1.0, temperature}))
        alpha, alpha_1 = (statistics.mean(alphas[t]) for t in (temperature, 1.0))
        if not math.isfinite(alpha + alpha_1):
            raise ValueError(f"step {self.step}: alpha = {alpha}: the target's logits are not finite")
        k, tokens, speedup = predict(self.costs, alphas[temperature])
        loss = statistics.mean(self.losses) if self.losses else None
        self.evaluations.append({
            "step": self.step, "train_loss": loss, "alpha": alpha, "alpha_temperature_1": alpha_1,
            "predicted_speedup": speedup, "predicted_tokens_per_round": tokens, "best_k": k,
            "c": self.costs.c(k), "v": self.costs.v(k),
        } | ({"alpha_by_position": alphas[temperature]} if self.kind.num_positions > 1 else {}))  # fmt: skip
        self.losses = []
        if self.best_evaluation[0] == len(self.evaluations) - 1:
            self.best = {name: weight.cpu() for name, weight in weights.items()}
        loss_text = "–" if loss is None else f"{loss:.4f}"
        at_1 = "" if temperature == 1 else f" at temperature {temperature:g}, {alpha_1:.4f} at 1"
        positions = ", ".join(f"{alpha:.3f}" for alpha in alphas[temperature])
        by_position = f" (by position {positions})" if self.kind.num_positions > 1 else ""
        log(f"step {self.step}: train loss {loss_text}, held-out alpha {alpha:.4f}{at_1}{by_position};"
            f" predicted with K = {k}: {tokens:.2f} tokens a round, speed-up {speedup:.3f}")  # fmt: skip


def train(run: Run, windows: Windows, heldout: Tensor) -> None:
    """Train until --steps, or until --patience evaluations in turn bring no better prediction. Ctrl-C raises
    KeyboardInterrupt once the step is done and saved."""
    args, bar = run.args, tqdm(initial=run.step, total=run.args.steps, desc="distill", unit="step", mininterval=5)
    with defer_interrupts() as interrupts, bar:
        while not run.evaluations or (run.step < args.steps and not run.best_evaluation[1]):
            start = time.perf_counter()
            if run.evaluations:  # the first evaluation is of the untrained draft
                run.learn(windows.random(args.seed, run.step, args.batch).to(heldout.device))
                bar.update()
            is_due = run.step % args.eval_every == 0 or run.step == args.steps
            if is_due:
                run.evaluate(heldout)
            run.seconds += time.perf_counter() - start
            if is_due or interrupts:
                run.save()
            if interrupts:
                log(f"interrupted after step {run.step}, which is saved: the same command continues")
                raise KeyboardInterrupt


def export(run: Run, hf: dict, heldout: Tensor) -> dict:
    """Write --output with the best evaluation's weights, under another name until it is complete. Returns the result
    that `main` prints."""
    args, best = run.args, run.evaluations[run.best_evaluation[0]]
    names = ("alpha", "alpha_temperature_1", "c", "v", "predicted_speedup", "best_k")
    result = {name: best[name] for name in names} | {
        "temperature": args.temperature, "steps": run.step, "best_step": best["step"],
        "seconds": round(run.seconds, 1), "heldout_tokens": int((heldout[:, 1:] >= 0).sum()),
    }  # fmt: skip
    model = run.kind.empty_model(torch.bfloat16, "cpu")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(run.best[name])
    ids = {key: hf[key] for key in ("bos_token_id", "eos_token_id") if key in hf}
    facts = {"made_by": "scripts.distill_draft", "settings": run.settings, **result, "evaluations": run.evaluations}
    with complete_folder(args.output) as partial:
        (partial / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n")
        copy_files(args.target, partial)
        (partial / "distill.json").write_text(json.dumps(facts, indent=2) + "\n")
        run.kind.save(model, partial)
    (args.work / "state.pt").unlink()
    if best["predicted_speedup"] < 1:
        log("no K pays on this machine: plain decoding is predicted to be faster than this draft")
    return result


def read_state(file: Path, settings: dict) -> dict | None:
    """The state of an earlier run with the same settings; None without a file."""
    if not file.exists():
        return None
    try:
        state = torch.load(file, weights_only=True, map_location="cpu")
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{file}: not a training state ({str(error).splitlines()[0]}); remove it") from None
    check_settings(file, state["settings"], settings)
    return state


# --------------------------------------------------------------------------------------------- program


def check_request(args: argparse.Namespace) -> Config:
    """Check flags before hours of work, and set the defaults that depend on the target. Returns the target's Config."""
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
    check_sizes(args, config)
    args.context = args.context or min(512, config.max_seq_length)
    if not 2 * draft_text.OPENING <= args.context <= config.max_seq_length:
        limits = f"{2 * draft_text.OPENING} and the target's {config.max_seq_length} positions"
        raise ValueError(f"--context {args.context} must lie between {limits}")
    Sampling(args.temperature)
    args.lr = 4e-3 * min(1, 128 / args.dim) if args.lr is None else args.lr
    if not 0 < args.lr < 1:
        raise ValueError(f"--lr {args.lr} must lie between 0 and 1")
    if not 0 <= args.seed < 2**31:
        raise ValueError(f"--seed {args.seed} must lie between 0 and 2^31")
    args.work = args.work or Path("build") / "distill" / args.output.name
    return config


def distill(args: argparse.Namespace) -> dict:
    """Make the folder --output, and return the result that `main` prints. Ctrl-C saves a state from which the same
    command continues."""
    config, device = check_request(args), pick_device(args.device)
    hf, options = read_json(args.target / "config.json"), {"vocab": args.draft_vocab} if args.draft_vocab else {}
    kind = KINDS[args.kind](draft_config(hf, args), config, args.depth, **options)
    dtype, tokenizer = pick_dtype(args.dtype, config.dtype, device), load_tokenizer(args.target)
    if tokenizer.vocab_size > config.vocab_size:
        sizes = f"{tokenizer.vocab_size} tokens, the model's vocabulary only {config.vocab_size}"
        raise ValueError(f"{args.target}: the tokenizer has {sizes}")
    # A stopped run continues only with the same settings.
    flags = {f"--{name}": str(value) for name, value in vars(args).items() if name not in ("output", "work")}
    for name, value in fingerprints(args.target, open_shards(shards(args.target))).items():
        flags[f"--target's {name.removeprefix('its ')}"] = value[:16]
    state = read_state(args.work / "state.pt", flags)
    args.work.mkdir(parents=True, exist_ok=True)

    def windows_of(training: list[Tensor], heldout: list[Tensor]) -> tuple[Windows, Tensor]:
        bos = None if args.prompts else tokenizer.bos_id
        windows = Windows(training, args.context, bos, "training")
        return windows, Windows(heldout, args.context, bos, "held-out").consecutive()

    end = hf.get("eos_token_id")
    end = next(iter(end), None) if isinstance(end, list) else end
    training, heldout = hold_out(read_documents(args.text, tokenizer, end) if args.text else [], args.heldout)
    if not args.sampled:
        windows_of(training, heldout)  # raises for too little text before the target is loaded
    target = load_model(args.target, device=device, dtype=dtype, progress=True, pack=False)
    copied = weights_of_layers(kind.new_model(), target, args.from_layers) if args.from_layers and not state else {}
    pack_model(target)
    if args.sampled:
        names = ("--temperature", "--context", "--seed", "--dtype", "--target's config.json", "--target's tensors")
        samples = sampled_documents(target, tokenizer, args, training, end, {name: flags[name] for name in names})
        parts = hold_out(samples, args.heldout)
        training, heldout = training + parts[0], heldout + parts[1]
    windows, rows = windows_of(training, heldout)
    settings = flags | {"the tokens to learn": digest(training), "the held-out tokens": digest(heldout)}

    kind.choose_ids(windows.ids[windows.ids >= 0])
    draft_dtype = dtype if kind.aux_layer_ids else pick_dtype(args.dtype, "bfloat16", device)
    run = Run(kind, target, args, device, draft_dtype)
    if state is None:
        run.settings, run.costs = settings, measure_costs(target, kind, args, run.eval_model.norm.weight.dtype)
        if args.project:
            project_embedding(run.draft, target)
        run.draft.load_state_dict(copied, strict=False)  # a tied head is the embedding
    else:
        check_settings(args.work / "state.pt", state["settings"], settings)
        run.load(state)
        log(f"continues after step {run.step}")
    costs = ", ".join(f"{k}: {run.costs.c(k):.3f} and {run.costs.v(k):.3f}" for k in run.costs.verify_s)
    log(f"{(windows.ids >= 0).sum()} tokens to learn, {(rows[:, 1:] >= 0).sum()} held out; c and v by K {costs}")
    train(run, windows, rows.to(device))
    return export(run, kind.hf, rows)


def main() -> None:
    args = parse_args()
    use_threads(None)
    with ending_plainly():
        print(json.dumps(distill(args)))


if __name__ == "__main__":
    main()
