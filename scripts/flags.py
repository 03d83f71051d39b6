"""The flags of all scripts but scripts.serve. This file needs no torch, whose import takes
seconds."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cli.flags import DTYPES, Parser, draft_options, model_options, positive
from cli.options import PromptOptions
from loading.hub import PATH_HELP, checkpoint_path
from loading.options import SPEC_HELP, DraftOptions, ModelOptions
from weights.schemes import HEAD_HELP, SCHEMES

# Perplexity scores at most this many positions at once; longer windows run in smaller batches.
MAX_POSITIONS = 2**13
# scripts/distill/draft_kinds.py has their classes.
DRAFT_KINDS = ("model", "pard", "eagle3", "dflash", "dspark")


class CompareOptions(NamedTuple):
    a: str
    b: str
    prompts: PromptOptions
    rounds: int
    json: bool


def compare_args(argv: Sequence[str] | None = None) -> CompareOptions:
    parser = Parser(
        description="Compare the tokens and the rates of two configurations of generate.py."
    )
    add = parser.add_argument
    add(
        "--a",
        required=True,
        metavar="FLAGS",
        help='flags of generate.py, such as "--temperature 0"',
    )
    add("--b", required=True, metavar="FLAGS", help="the other configuration; ratios are b over a")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", default="Once upon a time", help="default: %(default)s")
    source.add_argument(
        "--prompt_file", metavar="FILE", help="one prompt a line, or JSONL, as in generate.py"
    )
    add(
        "--rounds",
        type=positive,
        default=1,
        metavar="N",
        help="decode each prompt N times by a, b, b, a; default: 1",
    )
    add("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(join_flags_of_sides(sys.argv[1:] if argv is None else argv))
    prompts = PromptOptions(prompt=args.prompt, file=args.prompt_file)
    return CompareOptions(args.a, args.b, prompts, args.rounds, args.json)


def join_flags_of_sides(words: Sequence[str]) -> list[str]:
    """--a FLAGS as --a=FLAGS: argparse would take a --compile after --a for a flag of its own."""
    joined = []
    for word in words:
        if joined and joined[-1] in ("--a", "--b"):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


class PerplexityOptions(NamedTuple):
    model: ModelOptions
    text: str
    context: int
    batch_size: int
    reference: str | None
    json: bool


def perplexity_args() -> PerplexityOptions:
    parser = Parser(description="Perplexity of a model on a text, and its distance to a reference.")
    add = parser.add_argument
    add("--checkpoint", required=True, metavar="PATH", help=PATH_HELP)
    add("--text", required=True, metavar="FILE", help="UTF-8 text to score")
    add("--context", type=positive, default=512, help="tokens of a window; default: %(default)s")
    batch_help = f"windows scored together, up to {MAX_POSITIONS:,} tokens; default: %(default)s"
    add("--batch_size", type=positive, default=8, help=batch_help)
    add("--dtype", choices=DTYPES, help="default: the checkpoint's")
    add("--device", help="cpu, cuda, cuda:N or mps; default: cuda if there is a GPU")
    add(
        "--quantize",
        metavar="SCHEME",
        help=f"quantize the weights while loading: {', '.join(SCHEMES)}",
    )
    add("--quantize_head", default="auto", metavar="SCHEME", help=HEAD_HELP)
    help = f"to compare with, by KL divergence and agreement: {PATH_HELP}"
    add("--reference", metavar="PATH", help=help)
    add("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    reference = checkpoint_path(args.reference)
    return PerplexityOptions(
        model_options(args), args.text, args.context, args.batch_size, reference, args.json
    )


class EvaluationOptions(NamedTuple):
    """`flags`: all flags by name; the lm-evaluation-harness reads most of them."""

    model: ModelOptions
    draft: DraftOptions
    flags: dict


def eval_lm_args() -> EvaluationOptions:
    parser = Parser(description="Run tasks of the lm-evaluation-harness on a model.")
    add = parser.add_argument
    add("--checkpoint", required=True, metavar="PATH", help=PATH_HELP)
    add(
        "--tasks",
        required=True,
        metavar="NAME,NAME",
        help="tasks of the harness, or of --include_path",
    )
    add("--include_path", metavar="DIR", help="a folder of your own YAML tasks")
    add("--limit", type=positive, metavar="N", help="only the first N documents of each task")
    add(
        "--num_fewshot",
        type=int,
        metavar="N",
        help="examples before each question; default: the task's",
    )
    add(
        "--batch_size",
        type=positive,
        default=8,
        help="requests that run together; default: %(default)s",
    )
    add(
        "--max_length",
        type=positive,
        metavar="N",
        help="input tokens of one pass; default: the model's context",
    )
    add(
        "--apply_chat_template",
        action="store_true",
        help="write prompts in the folder's chat template",
    )
    add("--system", metavar="TEXT", help="system message, or text before every prompt")
    add(
        "--gen_kwargs",
        metavar="KEY=VALUE,…",
        help="replace a task's settings, such as max_gen_toks or temperature",
    )
    add("--output", metavar="FILE", help="write the harness's results as JSON")
    add(
        "--quantize",
        metavar="SCHEME",
        help=f"quantize the weights while loading: {', '.join(SCHEMES)}",
    )
    add("--quantize_head", default="auto", metavar="SCHEME", help=HEAD_HELP)
    draft = parser.add_mutually_exclusive_group()
    help = "a smaller model that drafts generated text"
    draft.add_argument("--draft_checkpoint", metavar="PATH", help=help)
    draft.add_argument("--draft", metavar="SPEC", help=SPEC_HELP)
    add("--dtype", choices=DTYPES, help="default: the checkpoint's")
    add("--device", help="cpu, cuda, cuda:N or mps; default: cuda if there is a GPU")
    args = parser.parse_args()
    return EvaluationOptions(model_options(args), draft_options(args), vars(args))


def distill_draft_args(argv: Sequence[str] | None = None):
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
    add(
        "--depth",
        type=positive,
        default=5,
        help="tokens that all kinds but a model learn to draft in a round",
    )
    add(
        "--layers",
        type=positive,
        help="of a model or pard, without --from_layers, or of dflash or dspark (default: 1)",
    )
    add(
        "--from_layers",
        metavar="LAYERS",
        help="start from layers of the target, with its sizes: 0-1,28-29",
    )
    add(
        "--draft_vocab",
        type=positive,
        metavar="N",
        help="of eagle3: draft only the N most frequent tokens",
    )
    add(
        "--dim",
        type=positive,
        help="hidden size of a model or pard; the other kinds have the target's",
    )
    add(
        "--heads",
        type=positive,
        help="default: heads of 64, or of the largest even size below 64 that divides --dim",
    )
    add("--kv_heads", type=positive, help="default: as many as heads")
    add("--ffn", type=positive, help="default: 8/3 of --dim, rounded up to a multiple of 32")
    separators = "<|endoftext|> or, without any, by blank lines"
    add("--text", type=Path, metavar="FILE", help=f"documents, separated by {separators}")
    add(
        "--sampled",
        type=positive,
        metavar="TOKENS",
        help="learn on this many tokens that the target writes",
    )
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
        "--heldout",
        type=positive,
        default=20_000,
        metavar="TOKENS",
        help="of the last documents, to evaluate on",
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
    add("--steps", type=positive, default=3000, help="at most; default: 3000")
    add("--batch", type=positive, default=8, help="rows of --context tokens in a step; default: 8")
    add(
        "--context",
        type=positive,
        help="tokens of a training row; default: 512, or the target's context if less",
    )
    add(
        "--lr",
        type=float,
        help="peak of the learning rate; default: 0.004, falling as 1 / dim beyond 128",
    )
    add("--eval_every", type=positive, default=250, metavar="STEPS", help="default: 250")
    add(
        "--patience",
        type=positive,
        default=3,
        help="evaluations in turn without a better prediction; default: 3",
    )
    add("--seed", type=int, default=0)
    add("--device")
    add("--dtype", choices=DTYPES, help="of the target; default: the checkpoint's")
    add(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="compile while c and v are measured; default: on cuda",
    )
    args = parser.parse_args(argv)
    args.target = Path(checkpoint_path(args.target))
    return args


def tp_plan_args(argv: Sequence[str] | None = None):
    parser = Parser(
        description="The bytes that each rank of a tensor-parallel launch would hold, read and"
        " send."
    )
    add = parser.add_argument
    add("config", metavar="PATH", help="a config.json, a Hugging Face folder or a .gguf file")
    add(
        "--ranks",
        default="1,2,4,8",
        help="numbers of ranks, with commas between; default: %(default)s",
    )
    add(
        "--dtype", choices=DTYPES, default="bfloat16", help="of plain weights; default: %(default)s"
    )
    add("--quantize", metavar="SCHEME", help=f"quantize the weights: {', '.join(SCHEMES)}")
    add("--quantize_head", default="auto", metavar="SCHEME", help=HEAD_HELP)
    add(
        "--context",
        type=int,
        help="cached tokens of the predicted step; default: 1000, or all positions of the model",
    )
    add(
        "--bandwidth",
        type=float,
        default=3350,
        help="memory bandwidth of a device, GB/s; default: an H100's, 3350",
    )
    add(
        "--link",
        type=float,
        default=450,
        help="bandwidth between devices each way, GB/s; default: NVLink's, 450",
    )
    add(
        "--latency",
        type=float,
        default=20,
        help="latency of a collective, microseconds; default: 20",
    )
    add("--memory", type=float, help="memory of a device, GB: marks the launches that do not fit")
    add(
        "--json",
        action="store_true",
        help="print a JSON object for every number of ranks, in bytes and seconds",
    )
    return parser.parse_args(argv)
