"""The flags of scripts.distill_draft. This file needs no torch, whose import takes seconds."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from cli.flags import FLAGS, Parser, positive
from loading.hub import PATH_HELP, checkpoint_path

NUMBERS = {  # flags of whole numbers -> (default, help)
    "--depth": (5, "tokens that all kinds but a model learn to draft in a round; default: 5"),
    "--layers": (None, "of a model or pard without --from_layers, of dflash or dspark; default: 1"),
    "--draft_vocab": (None, "of eagle3: draft only the N most frequent tokens"),
    "--dim": (None, "hidden size of a model or pard; the other kinds have the target's"),
    "--heads": (
        None,
        "default: heads of 64, or of the largest even size below 64 that divides --dim",
    ),
    "--kv_heads": (None, "default: as many as heads"),
    "--ffn": (None, "default: 8/3 of --dim, rounded up to a multiple of 32"),
    "--context": (None, "tokens of a training row; default: 512, or the target's context if less"),
    "--sampled": (None, "learn on this many tokens that the target writes"),
    "--heldout": (20_000, "tokens of the last documents, to evaluate on; default: 20000"),
    "--steps": (3000, "at most; default: 3000"),
    "--batch": (8, "rows of --context tokens in a step; default: 8"),
    "--eval_every": (250, "steps from one evaluation to the next; default: 250"),
    "--patience": (3, "evaluations in turn without a better prediction; default: 3"),
}
# draft_kinds.py has their classes.
DRAFT_KINDS = ("model", "pard", "eagle3", "mtp", "dflash", "dspark")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        description="Distil a draft for a target: a folder for generate.py's --draft_checkpoint."
    )
    add = parser.add_argument
    help = f"the model to draft for: {PATH_HELP}"
    add("--target", required=True, metavar="PATH", help=help)
    add(
        "--kind",
        choices=DRAFT_KINDS,
        default="model",
        help="default: a model that drafts token by token",
    )
    for name, (default, help) in NUMBERS.items():
        add(name, type=positive, default=default, metavar="N", help=help)
    add(
        "--from_layers",
        metavar="LAYERS",
        help="start from layers of the target, with its sizes: 0-1,28-29",
    )
    separators = "<|endoftext|> or, without any, by blank lines"
    add("--text", type=Path, metavar="FILE", help=f"documents, separated by {separators}")
    add(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="questions, one a line, that the target answers for --sampled",
    )
    add(
        "--project",
        action="store_true",
        help="start from the target's embedding, projected to --dim columns",
    )
    add(
        "--temperature",
        type=float,
        default=1.0,
        help="of --sampled and of the predicted speed-up; default: 1",
    )
    add("--output", type=Path, required=True, metavar="DIR", help="folder to create")
    add(
        "--work",
        type=Path,
        metavar="DIR",
        help="training state and sampled text; default: build/distill/NAME",
    )
    add(
        "--lr",
        type=float,
        help="peak of the learning rate; default: 0.004, falling as 1 / dim beyond 128",
    )
    add("--seed", type=int, default=0)
    FLAGS["device"].add_to(parser)
    FLAGS["dtype"].add_to(parser, help="of the target; default: the checkpoint's")
    FLAGS["compile"].add_to(parser, help="compile while c and v are measured; default: on cuda")
    args = parser.parse_args(argv)
    args.target = Path(checkpoint_path(args.target))
    return args
