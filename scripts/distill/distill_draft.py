"""Distil a draft for any target: a small model that learns the target's distribution, for
--draft_checkpoint.

    python -m scripts.distill_draft --target DIR --layers 1 --dim 96 --text stories.txt --output DIR

    measure_costs, predict          c and v of this pair on this machine; the speed-up that a
                                    measured alpha predicts
    add_gradients, acceptance       the loss of a window, KL(target || draft) for most kinds; alpha
                                    by position on held-out text
    Run, train, export              the training state, the loop for all kinds, the folder --output

draft_kinds.py has the kinds of drafts, draft_start.py their sizes and first weights, draft_text.py
the text. Training ends at --steps, or when the predicted speed-up no longer grows. The best
evaluation's weights are written, in bfloat16 as they were evaluated. Every evaluation and Ctrl-C
save a state in --work, from which the same command continues (SIGTERM ends at once).
"""

import json
import math
import pickle
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from cli.errors import defer_interrupts, exit_on_error, use_threads
from decoding.costs import Costs
from decoding.engine import Engine
from decoding.errors import UserError
from decoding.sampling import Sampling
from decoding.validation import check_seed
from drafts.dflash import MAX_BLOCK
from loading.checkpoint import Checkpoint, load_config, load_model
from loading.config import text_part
from loading.files import complete_folder, write_atomically
from loading.models import pick_dtype
from loading.target import pick_device
from loading.tokenizer import Tokenizer, copy_files, load_tokenizer
from model import Config, Transformer
from scripts.distill import draft_text
from scripts.distill.distill_flags import parse_args
from scripts.distill.draft_kinds import KINDS, Kind, tokens_per_round
from scripts.distill.draft_start import (
    check_sizes,
    draft_config,
    init_weights,
    project_embedding,
    weights_of_layers,
)
from scripts.distill.draft_text import (
    Documents,
    Windows,
    check_settings,
    digest,
    find_openings,
    hold_out,
    ids_of,
    log,
    read_documents,
    sampled_documents,
)
from weights.walker import pack_model

MAX_LOGITS = 2**24  # positions times vocabulary that are computed at once
# The documents that the target writes depend on these settings.
SAMPLE_FLAGS = (
    "--temperature",
    "--context",
    "--seed",
    "--dtype",
    "--target's config.json",
    "--target's tensors",
)

# ------------------------------------------------------------------------------------------ theory


def measure_costs(target: Transformer, kind: Kind, args, dtype: torch.dtype) -> Costs:
    """Costs of a draft of this shape on this machine, with random weights and half a context
    filled."""
    device = target.norm.weight.device
    sampling = Sampling(args.temperature)
    draft = kind.new_model()
    init_weights(draft, args.seed)
    kind.bind(draft, target)
    drafter = kind.drafter(draft.to(device, dtype))
    pack_model(drafter.model)
    compile = device.type == "cuda" if args.compile is None else args.compile
    engine = Engine(target, 1, args.context, compile=compile, drafter=drafter, speculate_k="auto")
    if compile:
        engine.warm_up(sampling.path)
    return engine.calibrate(sampling, args.context // 2, rounds=15)


class Prediction(NamedTuple):
    k: int
    tokens_per_round: float
    speedup: float


def predict(costs: Costs, alphas: Sequence[float]) -> Prediction:
    """The speed-up of the best K >= 1, for alphas by position. Costs.best may choose K = 0, and
    could not compare drafts that are slower than plain decoding."""
    predictions = []
    for k in costs.verify_s:
        tokens = tokens_per_round(alphas, k)
        predictions.append(Prediction(k, tokens, tokens / costs.round(k)))
    return max(predictions, key=lambda prediction: prediction.speedup)


def best_evaluation(speedups: Sequence[float]) -> int:
    """The index of the largest prediction, of the first one on ties."""
    return max(range(len(speedups)), key=speedups.__getitem__)


def has_converged(speedups: Sequence[float], patience: int) -> bool:
    """Did `patience` evaluations in turn bring no better prediction?"""
    num_later = len(speedups) - 1 - best_evaluation(speedups)
    return num_later >= patience


# --------------------------------------------------------------------------------------- learning


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
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.02 + 0.49 * (1 + math.cos(math.pi * progress)))


def blocks(target: Transformer, h: Tensor, at: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For each block of n positions of the target's states h (B, T, D): its logits (B, n, V), the
    indices of entries of `at` (N,) that lie in the block, and their positions in it."""
    n = max(1, MAX_LOGITS // (len(h) * target.config.vocab_size))
    for start in range(0, h.size(1), n):
        is_inside = (at >= start) & (at < start + n)
        indices = is_inside.nonzero()[:, 0]
        logits = target.head(h[:, start : start + n])
        yield logits, indices, at[indices] - start


def add_gradients(
    kind: Kind, draft: Transformer, target: Transformer, rows: Tensor, seed: int = 1
) -> float:
    """Add the gradients of the kind's loss, and return it: the mean over the draft's states for
    rows (B, T + 1) whose next token is not hidden, weighted by position in a draft. The loss reads
    the tokens that the kind drafts. Logits exist for one block at a time."""
    h, drafted = kind.states(draft, target, ids_of(rows[:, :-1]), seed)
    states = drafted.states.detach()
    is_learned = rows[:, drafted.at + 1] >= 0  # (B, N)
    weights = kind.loss_weights.to(states.device)[drafted.position] * is_learned
    count = weights.sum().clamp(min=1e-6)
    gradient = torch.zeros_like(states)
    total = 0.0
    for logits, indices, positions in blocks(target, h, drafted.at):
        log_p = kind.select(logits.log_softmax(-1))  # (B, n, V of the draft)
        leaf = states[:, indices].requires_grad_()
        log_q = kind.logits(draft, leaf).log_softmax(-1)
        losses = kind.losses(log_p[:, positions], log_q) * weights[:, indices]  # (B, c)
        loss = losses.sum() / count
        loss.backward()
        gradient[:, indices] = leaf.grad
        total += loss.item()
    drafted.states.backward(gradient)
    return total


@torch.no_grad()
def acceptance(
    kind: Kind, draft: Transformer, target: Transformer, rows: Tensor, temperatures: Sequence[float]
) -> dict[float, list[float]]:
    """{temperature: alphas by position in a draft}. Alpha, a drafted token's probability of
    acceptance, is the mean over rows (N, T + 1), where the next token is not hidden, of sum min(p,
    q) over tokens (arXiv:2211.17192, cor. 3.6). The text's tokens stand for those drafted
    before."""
    counts = torch.zeros(kind.num_positions, dtype=torch.float64)
    totals = {temperature: torch.zeros_like(counts) for temperature in temperatures}
    for batch in rows.split(4):
        h, drafted = kind.states(draft, target, ids_of(batch[:, :-1]), None)
        learned = (batch[:, drafted.at + 1] >= 0).double()  # (B, N)
        counts.index_add_(0, drafted.position.cpu(), learned.sum(0).cpu())
        for logits, indices, positions in blocks(target, h, drafted.at):
            draft_logits = kind.logits(draft, drafted.states[:, indices])  # (B, c, V of the draft)
            for temperature, total in totals.items():
                sampling = Sampling(temperature)
                p = kind.select(sampling.probs(logits))[:, positions]
                q = sampling.probs(draft_logits)
                overlaps = torch.minimum(p, q).sum(-1) * learned[:, indices]  # (B, c)
                total.index_add_(0, drafted.position[indices].cpu(), overlaps.sum(0).cpu())
    counts = counts.clamp(min=1)
    return {temperature: (total / counts).tolist() for temperature, total in totals.items()}


# ------------------------------------------------------------------------------------------- loop


class Run:
    """The draft in training, with its optimizer and evaluations. `save` stores them for `load`."""

    def __init__(
        self, kind: Kind, target: Transformer, args, device: torch.device, dtype: torch.dtype
    ):
        self.kind = kind
        self.target = target
        self.args = args
        self.draft = kind.new_model()
        init_weights(self.draft, args.seed)
        self.draft.to(device)
        self.optimizer = adamw(self.draft)
        # Holds the draft's weights in the dtype in which they will be loaded.
        self.eval_model = kind.empty_model(dtype, device)
        for model in (self.draft, self.eval_model):
            kind.bind(model, target)
        self.settings: dict = {}
        self.costs: Costs | None = None
        self.step = 0
        self.seconds = 0.0
        self.losses: list[float] = []  # since the last evaluation
        self.evaluations: list[dict] = []
        self.best: dict[str, Tensor] = {}  # weights of the best evaluation, bfloat16

    def save(self) -> None:
        names = ("settings", "step", "seconds", "losses", "evaluations", "best")
        state = {name: getattr(self, name) for name in names}
        state["costs"] = vars(self.costs)
        state["draft"] = self.draft.state_dict()
        state["optimizer"] = self.optimizer.state_dict()
        write_atomically(self.args.work / "state.pt", lambda partial: torch.save(state, partial))

    def load(self, state: dict) -> None:
        self.draft.load_state_dict(state.pop("draft"))
        self.optimizer.load_state_dict(state.pop("optimizer"))
        vars(self).update(state, costs=Costs(**state["costs"]))

    @property
    def speedups(self) -> list[float]:
        """The prediction of every evaluation."""
        return [evaluation["predicted_speedup"] for evaluation in self.evaluations]

    @property
    def is_done(self) -> bool:
        if not self.evaluations:
            return False
        return self.step >= self.args.steps or has_converged(self.speedups, self.args.patience)

    def learn(self, rows: Tensor) -> None:
        """One step on rows (B, T + 1)."""
        args = self.args
        seed = 1 + args.seed + self.step
        loss = add_gradients(self.kind, self.draft, self.target, rows, seed)
        if not math.isfinite(loss):
            raise UserError(
                f"step {self.step}: the loss is {loss}; a lower --lr than {args.lr} may help"
            )
        self.losses.append(loss)
        warmup = min(200, args.steps // 10)
        update(self.draft, self.optimizer, learning_rate(self.step, args.steps, args.lr, warmup))
        self.step += 1

    @torch.no_grad()
    def evaluate(self, heldout: Tensor) -> None:
        """Measure alpha on heldout (N, T + 1), print the prediction, and copy the weights if it is
        the best so far."""
        weights = {name: weight.bfloat16() for name, weight in self.draft.named_parameters()}
        for name, weight in self.eval_model.named_parameters():
            weight.copy_(weights[name])
        temperature = self.args.temperature
        temperatures = sorted({1.0, temperature})
        by_temperature = acceptance(self.kind, self.eval_model, self.target, heldout, temperatures)
        alphas = by_temperature[temperature]
        alpha = statistics.mean(alphas)
        alpha_1 = statistics.mean(by_temperature[1.0])
        if not math.isfinite(alpha + alpha_1):
            raise UserError(
                f"step {self.step}: alpha = {alpha}: the target's logits are not finite"
            )
        prediction = predict(self.costs, alphas)
        evaluation = {
            "step": self.step,
            "train_loss": statistics.mean(self.losses) if self.losses else None,
            "alpha": alpha,
            "alpha_temperature_1": alpha_1,
            "predicted_speedup": prediction.speedup,
            "predicted_tokens_per_round": prediction.tokens_per_round,
            "best_k": prediction.k,
            "c": self.costs.c(prediction.k),
            "v": self.costs.v(prediction.k),
        }
        if self.kind.num_positions > 1:
            evaluation["alpha_by_position"] = alphas
        self.evaluations.append(evaluation)
        self.losses = []
        if best_evaluation(self.speedups) == len(self.evaluations) - 1:
            self.best = {name: weight.cpu() for name, weight in weights.items()}
        log_evaluation(evaluation, temperature)


def log_evaluation(evaluation: dict, temperature: float) -> None:
    loss = "–"
    if evaluation["train_loss"] is not None:
        loss = f"{evaluation['train_loss']:.4f}"
    alpha = f"{evaluation['alpha']:.4f}"
    if temperature != 1:
        alpha += f" at temperature {temperature:g}, {evaluation['alpha_temperature_1']:.4f} at 1"
    if "alpha_by_position" in evaluation:
        positions = ", ".join(f"{x:.3f}" for x in evaluation["alpha_by_position"])
        alpha += f" (by position {positions})"
    log(
        f"step {evaluation['step']}: train loss {loss}, held-out alpha {alpha}; predicted with"
        f" K = {evaluation['best_k']}: {evaluation['predicted_tokens_per_round']:.2f} tokens a"
        f" round, speed-up {evaluation['predicted_speedup']:.3f}"
    )


def train(run: Run, windows: Windows, heldout: Tensor) -> None:
    """Train until --steps, or until --patience evaluations in turn bring no better prediction.
    Ctrl-C raises KeyboardInterrupt once the step is done and saved."""
    args = run.args
    bar = tqdm(initial=run.step, total=args.steps, desc="distill", unit="step", mininterval=5)
    with defer_interrupts() as interrupts, bar:
        while not run.is_done:
            start = time.perf_counter()
            if run.evaluations:  # the first evaluation is of the untrained draft
                rows = windows.random(args.seed, run.step, args.batch)
                run.learn(rows.to(heldout.device))
                bar.update()
            is_due = run.step % args.eval_every == 0 or run.step == args.steps
            if is_due:
                run.evaluate(heldout)
            run.seconds += time.perf_counter() - start
            if is_due or interrupts:
                run.save()
            if interrupts:
                log(
                    f"interrupted after step {run.step}, which is saved: the same command continues"
                )
                raise KeyboardInterrupt


def export(run: Run, hf: dict, heldout: Tensor) -> dict:
    """Write --output with the best evaluation's weights, under another name until it is complete.
    Returns the result that `main` prints."""
    args = run.args
    best = run.evaluations[best_evaluation(run.speedups)]
    names = ("alpha", "alpha_temperature_1", "c", "v", "predicted_speedup", "best_k")
    result = {name: best[name] for name in names}
    result |= {
        "temperature": args.temperature,
        "steps": run.step,
        "best_step": best["step"],
        "seconds": round(run.seconds, 1),
        "heldout_tokens": int((heldout[:, 1:] >= 0).sum()),
    }
    model = run.kind.empty_model(torch.bfloat16, "cpu")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(run.best[name])
    ids = {key: hf[key] for key in ("bos_token_id", "eos_token_id") if key in hf}
    facts = {
        "made_by": "scripts.distill_draft",
        "settings": run.settings,
        **result,
        "evaluations": run.evaluations,
    }
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
        raise UserError(
            f"{file}: not a training state ({str(error).splitlines()[0]}); remove it"
        ) from None
    check_settings(file, state["settings"], settings)
    return state


# ---------------------------------------------------------------------------------------- program


def check_request(args) -> Config:
    """Check flags before hours of work, and set the defaults that depend on the target. Returns the
    target's Config."""
    if args.output.exists():
        raise UserError(f"{args.output}: exists already; remove it or choose another --output")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    if args.text is None and args.sampled is None:
        raise UserError("nothing to learn on: give --text FILE, --sampled TOKENS, or both")
    if args.prompts and not args.sampled:
        raise UserError("--prompts needs --sampled TOKENS: how much the target answers")
    config = load_config(args.target)
    check_sizes(args, config)
    args.context = args.context or min(512, config.max_seq_length)
    min_context = 2 * draft_text.OPENING
    if not min_context <= args.context <= config.max_seq_length:
        raise UserError(
            f"--context {args.context} must lie between {min_context} and the target's"
            f" {config.max_seq_length} positions"
        )
    if args.kind != "model" and args.depth >= args.context:
        raise UserError(f"--depth {args.depth} must be less than --context {args.context}")
    max_depth = {"dflash": MAX_BLOCK - 1, "dspark": MAX_BLOCK}.get(args.kind, args.depth)
    if args.depth > max_depth:
        raise UserError(f"--depth {args.depth}: --kind {args.kind} drafts at most {max_depth}")
    check_seed(args.seed)
    Sampling(args.temperature)  # UserError for one that is out of range
    if args.lr is None:
        args.lr = 4e-3 * min(1, 128 / args.dim)
    if not 0 < args.lr < 1:
        raise UserError(f"--lr {args.lr} must lie between 0 and 1")
    args.work = args.work or Path("build") / "distill" / args.output.name
    return config


def settings_of(args, checkpoint: Checkpoint) -> dict[str, str]:
    """What a stopped run must have in common with the one that continues it, by name."""
    settings = {}
    for name, value in vars(args).items():
        if name not in ("output", "work"):
            settings[f"--{name}"] = str(value)
    for name, value in checkpoint.fingerprints().items():
        settings[f"--target's {name.removeprefix('its ')}"] = value[:16]
    return settings


def make_kind(args, hf: dict, config: Config) -> Kind:
    options = {"vocab": args.draft_vocab} if args.draft_vocab else {}
    return KINDS[args.kind](draft_config(hf, args), config, args.depth, **options)


def end_token(hf: dict) -> int | None:
    """The end of a document: the first of the target's eos_token_id."""
    end = hf.get("eos_token_id")
    if isinstance(end, list):
        return end[0] if end else None
    return end


def make_windows(
    args, tokenizer: Tokenizer, training: Documents, heldout: Documents
) -> tuple[Windows, Tensor]:
    """The windows to learn, and the rows (N, T + 1) to evaluate on. UserError for too little
    text."""
    bos = None if args.prompts else tokenizer.bos_id
    windows = Windows(training, args.context, bos, "training")
    return windows, Windows(heldout, args.context, bos, "held-out").consecutive()


def distill(args) -> dict:
    """Make the folder --output, and return the result that `main` prints. Ctrl-C saves a state from
    which the same command continues."""
    config = check_request(args)
    device = pick_device(args.device)
    checkpoint = Checkpoint(args.target)
    hf = text_part(checkpoint.hf)
    kind = make_kind(args, hf, config)
    dtype = pick_dtype(args.dtype, config.dtype, device)
    tokenizer = load_tokenizer(checkpoint)
    settings = settings_of(args, checkpoint)
    state = read_state(args.work / "state.pt", settings)
    args.work.mkdir(parents=True, exist_ok=True)

    end = end_token(hf)
    documents = read_documents(args.text, tokenizer, end) if args.text else []
    training, heldout = hold_out(documents, args.heldout)
    if args.sampled:
        openings = find_openings(tokenizer, args, training, end)
    target = load_model(checkpoint, device=device, dtype=dtype, progress=True, pack=False)
    first_weights = {}
    if args.from_layers and state is None:
        first_weights = weights_of_layers(kind.new_model(), target, args.from_layers)
    pack_model(target)
    if args.sampled:
        sample_settings = {name: settings[name] for name in SAMPLE_FLAGS}
        samples = sampled_documents(target, tokenizer, args, openings, sample_settings)
        sampled_training, sampled_heldout = hold_out(samples, args.heldout)
        training = training + sampled_training
        heldout = heldout + sampled_heldout
    windows, rows = make_windows(args, tokenizer, training, heldout)
    settings["the tokens to learn"] = digest(training)
    settings["the held-out tokens"] = digest(heldout)

    kind.choose_ids(windows.ids[windows.ids >= 0])
    draft_dtype = dtype if kind.aux_layer_ids else pick_dtype(args.dtype, "bfloat16", device)
    run = Run(kind, target, args, device, draft_dtype)
    if state is None:
        start(run, settings, first_weights)
    else:
        check_settings(args.work / "state.pt", state["settings"], settings)
        run.load(state)
        log(f"continues after step {run.step}")
    log_text(run, windows, rows)
    train(run, windows, rows.to(device))
    return export(run, kind.hf, rows)


def start(run: Run, settings: dict, first_weights: dict[str, Tensor]) -> None:
    run.settings = settings
    run.costs = measure_costs(run.target, run.kind, run.args, run.eval_model.norm.weight.dtype)
    if run.args.project:
        project_embedding(run.draft, run.target)
    run.draft.load_state_dict(first_weights, strict=False)  # a tied head is the embedding


def log_text(run: Run, windows: Windows, heldout: Tensor) -> None:
    costs = ", ".join(
        f"{k}: {run.costs.c(k):.3f} and {run.costs.v(k):.3f}" for k in run.costs.verify_s
    )
    num_learned = (windows.ids >= 0).sum()
    num_heldout = (heldout[:, 1:] >= 0).sum()
    log(f"{num_learned} tokens to learn, {num_heldout} held out; c and v by K {costs}")


def main() -> None:
    args = parse_args()
    use_threads(None)
    with exit_on_error():
        print(json.dumps(distill(args)))
