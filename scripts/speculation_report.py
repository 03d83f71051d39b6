"""Does this drafter pay for this target, on this text and this machine? A table, and with --plot a picture.

    python -m scripts.speculation_report --draft_checkpoint checkpoints/demo-draft --text stories.txt --plot report.png

    measure     acceptance by generating from prompts cut out of the text; costs of drafting and verifying by K
    table       by K: costs, tokens a round, speed-up and operations that acceptance and costs lead to
    plot        the same against K and against alpha, with this pair marked, and speed-up against operations

Formulas, with their equation numbers, are speculative.py's. Drafters are named as in generate.py's flags.
"""

import argparse
import json
from pathlib import Path

from cli.errors import fail
from cli.flags import DTYPES, Parser, positive
from cli.load import compiles, load, pick_device
from cli.report import speculative
from decoding.sampling import Sampling
from decoding.timing import Timing
from decoding.validation import check_lengths
from generate import Engine, generate
from speculative import Costs, expected_tokens
from tp import ALONE, check_single_process

ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
K_MEASURED = 5  # drafted a round while acceptance is measured


def measure(args: argparse.Namespace) -> dict:
    """Acceptance, costs and speed-ups, measured. ValueError for a text that is too short."""
    device = pick_device(args.device)
    model, tokenizer, drafter = load(args, device, ALONE)
    if drafter is None:
        raise ValueError("give a drafter: --draft_checkpoint DIR or --draft SPEC")
    prompts = windows(tokenizer, args)
    length = max(map(len, prompts)) + args.new_tokens
    if length > model.config.max_seq_length:
        raise ValueError(f"{length} positions are over the model's context of {model.config.max_seq_length}")
    check_lengths(model, prompts, [args.new_tokens] * len(prompts), length, drafter)
    sampling = Sampling(args.temperature)
    compile = compiles(args.compile, device)
    engine = Engine(model, 1, length, compile=compile, drafter=drafter, speculate_k="auto")
    if compile:
        engine.warm_up(sampling.kind)
    engine.calibrate(sampling, length - args.new_tokens // 2, rounds=7)
    engine.speculate_k, timings = K_MEASURED, []
    for number, prompt in enumerate(prompts):
        timings.append(Timing())
        list(
            generate(model, [prompt], sampling=sampling, max_new_tokens=args.new_tokens, seed=number, engine=engine,
                     timing=timings[-1])
        )  # fmt: skip
    found = speculative(engine, timings)
    if found["alpha"] is None:
        raise ValueError("nothing was drafted on this text: alpha is not known")
    reached = zip(found["accepted_by_position"], found["reached_by_position"], strict=True)
    alpha, k, c_ops = found["alpha"], K_MEASURED, found["c_ops"]
    return {
        "alpha": alpha, "draft_share": 1 - found["rounds_by_k"].get(0, 0) / found["rounds"],
        "by_position": [a / n if n else None for a, n in reached], "k": k, "c_ops": c_ops,
        "tokens_per_round": found["tokens_per_round"], "measured_speedup": found["measured_speedup"],
        "predicted_speedup": found["predicted_speedup"], "costs": engine.costs,
    }  # fmt: skip


def windows(tokenizer, args: argparse.Namespace) -> list[list[int]]:
    """Prompts of equal length, spread over the text."""
    ids = tokenizer.encode(Path(args.text).read_text(encoding="utf-8")[: 40_000 * args.samples], bos=False)
    size = args.prompt_tokens
    if len(ids) < size * args.samples:
        raise ValueError(f"{args.text}: {len(ids)} tokens are too few for {args.samples} prompts of {size}")
    before = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    stride = len(ids) // args.samples
    return [before + ids[i * stride : i * stride + size] for i in range(args.samples)]


def table(found: dict) -> list[dict]:
    """One row for each K whose costs were measured. Steps in which nothing was drafted are plain ones."""
    costs, alpha, share, rows = found["costs"], found["alpha"], found["draft_share"], []
    for k in sorted(costs.verify_s):
        tokens, drafting = 1 + share * (expected_tokens(alpha, k) - 1), share * k * costs.c(k)
        rows.append({
            "k": k, "c": costs.c(k), "v": costs.v(k), "tokens_per_round": tokens,
            "speedup": costs.speedup(k, alpha, share, share), "speedup_if_v_were_1": tokens / (1 + drafting),
            "operations": (1 + share * k * (found["c_ops"] + 1)) / tokens,
        })  # fmt: skip
    return rows


def print_table(found: dict, rows: list[dict]) -> None:
    by_position = " ".join("–" if a is None else f"{a:.2f}" for a in found["by_position"])
    print(f"alpha {found['alpha']:.3f} (D_LK {1 - found['alpha']:.3f}), accepted by position {by_position}")
    if found["draft_share"] < 1:
        print(f"drafted in {found['draft_share']:.1%} of the rounds; the others are plain steps, here as in the table")
    print(
        f"K = {found['k']}: {found['tokens_per_round']:.2f} tokens a round, speed-up {found['measured_speedup']:.2f}"
        f" measured, {found['predicted_speedup']:.2f} predicted; the drafter's operations are"
        f" {found['c_ops']:.3f} of the target's"
    )
    print("  K      c      v  tokens  speed-up  (v = 1)  operations")
    for r in rows:
        print(
            f"{r['k']:3d} {r['c']:6.3f} {r['v']:6.3f} {r['tokens_per_round']:7.2f} {r['speedup']:9.2f}"
            f" {r['speedup_if_v_were_1']:8.2f} {r['operations']:11.2f}"
        )
    k, best = found["costs"].best(found["alpha"], found["draft_share"], found["draft_share"])
    print(f"best: K = {k}, speed-up {best:.2f}" + ("" if k else " (plain decoding)"))


def plot(found: dict, rows: list[dict], file: str) -> None:
    """Three panels: speed-up against K for several alpha; against alpha for each K; speed-up against operations."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    costs: Costs = found["costs"]
    ks, alpha, shares = [r["k"] for r in rows], found["alpha"], (found["draft_share"],) * 2
    figure, (by_k, by_alpha, trade) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for a in ALPHAS:
        by_k.plot(ks, [costs.speedup(k, a, *shares) for k in ks], color="0.7")
        by_k.annotate(f"{a}", (ks[-1], costs.speedup(ks[-1], a, *shares)), color="0.5")
    by_k.plot(ks, [r["speedup"] for r in rows], "o-", label=f"this pair, alpha = {alpha:.2f}")
    by_k.plot([found["k"]], [found["measured_speedup"]], "x", color="tab:red", markersize=10, label="measured")
    by_k.set(xlabel="K", ylabel="speed-up", title="by draft length (grey: other alpha)")
    by_k.legend()
    grid = [i / 50 for i in range(50)]
    for k in ks:
        by_alpha.plot(grid, [costs.speedup(k, a, *shares) for a in grid], label=f"K = {k}")
    by_alpha.axvline(alpha, linestyle=":", color="0.5")
    by_alpha.set(xlabel="alpha", title="by acceptance (dotted: this pair)")
    by_alpha.legend()
    trade.plot([r["operations"] for r in rows], [r["speedup"] for r in rows], "o-")
    for r in rows:
        trade.annotate(f"K = {r['k']}", (r["operations"], r["speedup"]), xytext=(4, 4), textcoords="offset points")
    trade.set(xlabel="operations per token, times plain decoding's", title="speed-up for operations")
    for axes in (by_k, by_alpha, trade):
        axes.axhline(1, color="0.8", linewidth=0.8)
    figure.savefig(file, dpi=120)


def parse_args() -> argparse.Namespace:
    parser = Parser(description="What a drafter is worth to a target: acceptance, costs, expected speed-up.")
    add = parser.add_argument
    add("--checkpoint", default=str(Path(__file__).parent.parent / "checkpoints" / "demo"), help="the target")
    draft = parser.add_mutually_exclusive_group()
    draft.add_argument("--draft_checkpoint", metavar="PATH")
    draft.add_argument("--draft", metavar="SPEC", help="as generate.py's")
    add("--draft_quantize", metavar="SCHEME")
    add("--text", required=True, metavar="FILE", help="prompts are cut out of it")
    add("--samples", type=positive, default=16, help="prompts")
    add("--prompt_tokens", type=positive, default=32)
    add("--new_tokens", type=positive, default=96, help="generated from each")
    add("--temperature", type=float, default=0.8)
    add("--device")
    add("--dtype", choices=DTYPES)
    add("--compile", action=argparse.BooleanOptionalAction)
    add("--plot", metavar="FILE", help="draw the table (needs matplotlib)")
    add("--json", action="store_true")
    # Flags of generate.py that loading asks for.
    parser.set_defaults(random_weights=None, quantize=None, quantize_head=None, draft_tp="replicated")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    try:
        check_single_process()
        found = measure(args)
        rows = table(found)
        if args.plot:
            plot(found, rows, args.plot)
    except (ValueError, OSError, ImportError) as error:
        fail(error)
    if args.json:
        print(json.dumps({**found, "costs": vars(found["costs"]), "by_k": rows}))
    else:
        print_table(found, rows)


if __name__ == "__main__":
    main()
