"""The flags of the scripts that are a file each. This one needs no torch, whose import takes
seconds."""

import argparse
import sys
from collections.abc import Sequence
from typing import NamedTuple

from cli.flags import FLAGS, Parser, draft_options, model_options, positive
from cli.options import PromptOptions
from loading.hub import PATH_HELP, checkpoint_path
from loading.options import DraftOptions, ModelOptions

# Perplexity scores at most this many positions at once; longer windows run in smaller batches.
MAX_POSITIONS = 2**13


def add_model(parser: argparse.ArgumentParser) -> None:
    """The flags of the model that a program loads."""
    FLAGS["checkpoint"].add_to(parser, required=True, default=None, help=PATH_HELP)
    for key in ("quantize", "quantize_head", "dtype", "device"):
        FLAGS[key].add_to(parser)


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
    FLAGS["prompt"].add_to(source)
    FLAGS["prompt_file"].add_to(source)
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
    add_model(parser)
    add("--text", required=True, metavar="FILE", help="UTF-8 text to score")
    add("--context", type=positive, default=512, help="tokens of a window; default: %(default)s")
    batch_help = f"windows scored together, up to {MAX_POSITIONS:,} tokens; default: %(default)s"
    add("--batch_size", type=positive, default=8, help=batch_help)
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
    add_model(parser)
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
    draft = parser.add_mutually_exclusive_group()
    FLAGS["draft_checkpoint"].add_to(draft)
    FLAGS["draft"].add_to(draft)
    args = parser.parse_args()
    return EvaluationOptions(model_options(args), draft_options(args), vars(args))


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
    dtype_help = "of plain weights; default: %(default)s"
    FLAGS["dtype"].add_to(parser, default="bfloat16", help=dtype_help)
    FLAGS["quantize"].add_to(parser)
    FLAGS["quantize_head"].add_to(parser)
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
