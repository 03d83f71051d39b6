"""The flags of generate.py -> Options. argparse's Namespace stays in this file.

    parser, parse_args      the flags, and the options of a command line
    options_of              Namespace -> Options, whose groups check themselves
    with_chosen_seed        a random number in place of --seed -1

This file needs no torch, whose import takes seconds. Other programs take `Parser` and `positive`
from it.
"""

import argparse
import difflib
import importlib.metadata
import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TypeVar

from cli.exits import fail, print_status
from cli.options import Options, OutputOptions, PromptOptions, RequestDefaults, RunOptions
from decoding.errors import UserError
from decoding.options import CACHE_NAMES, VERIFICATIONS, EngineOptions
from decoding.settings import (
    DEFAULT_K,
    DEFAULT_NEW_TOKENS,
    DEFAULT_TEMPERATURE,
    RANDOM_SEED,
    SETTINGS,
    default_sampling,
    is_random,
    random_seed,
)
from loading.hub import PATH_HELP, checkpoint_path
from loading.options import (
    DTYPES,
    SAMPLING_KEYS,
    SPEC_HELP,
    DraftOptions,
    ModelOptions,
    folder_sampling,
    split_folder,
)
from weights.schemes import HEAD_HELP, SCHEMES

VERSION = "0.3.0.dev0"

Group = TypeVar("Group")


class Parser(argparse.ArgumentParser):
    def __init__(self, **options):
        super().__init__(**options)
        torch = importlib.metadata.version("torch")
        line = f"quickdraft {VERSION}, torch {torch}, Python {platform.python_version()}"
        self.add_argument("--version", action="version", version=line)

    def error(self, message: str):
        words = message.removeprefix("unrecognized arguments: ").split()
        similar = difflib.get_close_matches(words[0], self._option_string_actions, n=1)
        if similar and words[0].startswith("--"):
            message = f"{message}; did you mean {similar[0]}?"
        fail(message)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def json_object(text: str) -> dict:
    return checked_json(text, dict, "an object")


def json_list(text: str) -> list:
    """A list in JSON, or the name of a file that holds one."""
    if not text.lstrip().startswith("["):
        text = Path(text).read_text(encoding="utf-8") if Path(text).is_file() else text
    return checked_json(text, list, "a list, or a file that holds one")


def checked_json(text: str, json_type: type, description: str) -> object:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, json_type):
        raise argparse.ArgumentTypeError(f"{text!r:.99} is not {description} in JSON")
    return value


def draft_length(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} must be a number of tokens from 0 on, or auto")
    return int(text)


def parse_args(argv: Sequence[str] | None = None) -> Options:
    """The options of generate.py's command line, checked."""
    return options_of(parser().parse_args(argv))


def parser() -> argparse.ArgumentParser:
    parser = Parser(
        description="Decode text with a Llama-architecture model from a Hugging Face folder or"
        " GGUF file. Text streams"
        " to stdout, everything else to stderr.",
        epilog="On several devices: torchrun --nproc_per_node=N generate.py …",
    )
    add = parser.add_argument_group("model").add_argument
    demo = Path(__file__).parent.parent / "checkpoints" / "demo"
    help = f"{PATH_HELP}; default: checkpoints/demo"
    add("-m", "--checkpoint", default=str(demo), metavar="PATH", help=help)
    add("--adapter", metavar="DIR", help="a LoRA adapter in PEFT's layout, merged while loading")
    add(
        "--random_weights",
        metavar="CONFIG.json",
        help="this shape with random weights, instead of --checkpoint",
    )
    add(
        "--quantize", metavar="SCHEME", help=f"quantize weights while loading: {', '.join(SCHEMES)}"
    )
    add("--quantize_head", default="auto", metavar="SCHEME", help=HEAD_HELP)
    add("--dtype", choices=DTYPES, help="default: the checkpoint's")

    group = parser.add_argument_group("prompt")
    add = group.add_argument
    source = group.add_mutually_exclusive_group()
    source.add_argument("text", metavar="PROMPT", nargs="?", help="the same as --prompt PROMPT")
    source.add_argument(
        "-p", "--prompt", metavar="TEXT", default="Once upon a time", help='default: "%(default)s"'
    )
    jsonl = (
        'one prompt a line, or JSONL objects with "prompt" or "messages", "id", "seed" …; - for'
        " stdin"
    )
    source.add_argument("-f", "--prompt_file", metavar="FILE", help=jsonl)
    source.add_argument(
        "-i",
        "--interactive",
        action="store_true",
        help="chat, in the folder's own format if it has one",
    )
    add("--system", metavar="TEXT", help="system message for --interactive")
    add(
        "--parse_special",
        action="store_true",
        help="read names of special tokens in a prompt as the tokens themselves; default: as"
        " text, and always so in conversations",
    )
    add(
        "--chat_template",
        metavar="FILE",
        help="a template in jinja, instead of the one that the checkpoint has",
    )
    add(
        "--chat_template_kwargs",
        type=json_object,
        default={},
        metavar="JSON",
        help="variables of the template, such as '{\"enable_thinking\": false}'",
    )
    add(
        "--tools",
        type=json_list,
        metavar="JSON",
        help="tools for the template: a list, or a file that holds one",
    )
    add("--prefill", default="", metavar="TEXT", help="text that each answer begins with")
    add("--prompt_cache", metavar="FILE", help="read and write the computed positions of a prompt")
    add(
        "--batch_size",
        type=positive,
        metavar="N",
        help="rows decoded together; default: all samples of"
        " --prompt; of a file, up to 32 that fit in memory",
    )
    add(
        "--num_samples",
        type=positive,
        default=1,
        metavar="N",
        help="answers to each prompt, with seeds --seed, --seed + 1, …",
    )

    add = parser.add_argument_group("sampling").add_argument
    for name, setting in SETTINGS.items():
        default = DEFAULT_TEMPERATURE if name == "temperature" else setting.default
        usual = "" if default is None else f"; default: {default:g}"
        if name in SAMPLING_KEYS:
            usual = f"{usual or '; default: none'}, or the folder's"
        help = setting.help.replace("%", "%%") + usual
        add(f"--{name}", type=setting.type, metavar="N", help=help)
    seed_help = f"default: 0; {RANDOM_SEED}: a random one, which stderr and --json show"
    add("--seed", type=int, default=0, metavar="N", help=seed_help)

    add = parser.add_argument_group("length and stopping").add_argument
    add(
        "-n",
        "--max_new_tokens",
        type=int,
        metavar="N",
        help=f"default: {DEFAULT_NEW_TOKENS}; in a chat, as many as fit",
    )
    add(
        "--max_seq_length",
        type=int,
        metavar="N",
        help="positions for prompt and new tokens; default: as many"
        " as they need; of a chat or scripts.serve, the context, at most 4096",
    )
    stop_help = (
        "end before any of these strings, or at a special token that one names; empty ones"
        " are ignored"
    )
    add("--stop", nargs="+", action="extend", default=[], metavar="TEXT", help=stop_help)
    add("--ignore_eos", action="store_true", help="do not end at the model's stop tokens")

    group = parser.add_argument_group("drafting")
    add = group.add_argument
    draft = group.add_mutually_exclusive_group()
    draft.add_argument(
        "-d",
        "--draft_checkpoint",
        metavar="PATH",
        help="a smaller model, a PARD, an EAGLE-3, a DFlash or a DSpark draft",
    )
    draft.add_argument("--draft", metavar="SPEC", help=SPEC_HELP)
    add(
        "--speculate_k",
        type=draft_length,
        metavar="N|auto",
        help=f"tokens drafted a round; auto: the fastest; default: {DEFAULT_K}",
    )
    add(
        "--verification",
        choices=VERIFICATIONS,
        default="block",
        help="accept sampled draft tokens as a block or one by one; default: block",
    )
    draft_quantize_help = "quantize the weights of --draft_checkpoint or --draft mtp"
    add("--draft_quantize", metavar="SCHEME", help=draft_quantize_help)
    add(
        "--fixed_width_steps",
        action="store_true",
        help="run every step over K + 1 positions, drafted or not, so that greedy text is identical"
        " with and without a draft even where the report says up to rounding",
    )
    add(
        "--show_drafts",
        action="store_true",
        help="mark drafted tokens: accepted ones blue, rejected ones struck through beside the red"
        " one that corrects them; without a terminal as {==accepted==} and {~~rejected~>own~~}",
    )

    add = parser.add_argument_group("where it runs").add_argument
    add("--device", help="cpu, cuda, cuda:N or mps; default: cuda if there is a GPU")
    add(
        "--threads",
        type=positive,
        metavar="N",
        help="threads of a CPU; default: as many as torch takes, at most the container's share",
    )
    add(
        "--kv_cache_dtype",
        choices=CACHE_NAMES,
        default="model",
        help="type of keys and values; int8 and fp8 take half the bytes; default: the model's",
    )
    add(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="compile the decode step; default: on cuda",
    )

    add = parser.add_argument_group("under torchrun").add_argument
    add(
        "--draft_tp",
        nargs="?",
        const="sharded",
        choices=("sharded", "replicated"),
        default="replicated",
        help="divide --draft_checkpoint over the ranks too; default: every rank holds all of it",
    )
    add(
        "--timeout",
        type=float,
        default=600,
        metavar="S",
        help="seconds to wait for another rank; default: 600",
    )

    add = parser.add_argument_group("output").add_argument
    add(
        "--json",
        action="store_true",
        help="one JSON object per sample and row on stdout, nothing else",
    )
    add(
        "--output",
        metavar="FILE",
        help="append --json's lines to this file",
    )
    add(
        "--ordered",
        action="store_true",
        help="--json in the file's order; default: each line as soon as its row ends",
    )
    add(
        "--logprobs",
        type=int,
        metavar="N",
        help="with --json: log-probabilities of each token and the N most likely,"
        " before penalties, temperature and filters",
    )
    add(
        "--report",
        metavar="FILE",
        help="a page of the answers: each token's origin, p and q, acceptance along the"
        " text, cost by K; records log-probabilities as --logprobs 0 does",
    )
    add(
        "--profile", metavar="FILE", help="a Chrome trace of everything after loading and compiling"
    )
    return parser


def options_of(args: argparse.Namespace) -> Options:
    """The groups of these flags. UserError for flags that would fail later, or have no effect."""
    num_logprobs = args.logprobs
    if args.report and num_logprobs is None:
        num_logprobs = 0
    batch_size = args.batch_size
    if args.prompt_file is None and batch_size is None:
        batch_size = args.num_samples
    as_json = args.json or args.output is not None
    if num_logprobs is not None and not (as_json or args.report):
        raise UserError(f"--logprobs {num_logprobs} needs --json")
    k = DEFAULT_K if args.speculate_k is None else args.speculate_k
    model = model_options(args)
    numbers = {name: getattr(args, name) for name in SETTINGS}
    numbers = {name: value for name, value in numbers.items() if value is not None}
    of_folder = {}
    if not model.random_weights:
        of_folder = folder_sampling(model.checkpoint, default_sampling, numbers)
    return Options(
        model=model,
        draft=draft_options(args),
        engine=group(
            EngineOptions,
            args,
            speculate_k=k,
            logprobs=num_logprobs,
            cache_type=args.kv_cache_dtype,
        ),
        requests=group(
            RequestDefaults,
            args,
            sampling=default_sampling(of_folder | numbers),
            of_folder=of_folder,
            has_random_seed=is_random(args.seed),
        ),
        prompts=group(
            PromptOptions,
            args,
            prompt=args.prompt if args.text is None else args.text,
            file=args.prompt_file,
            cache_file=args.prompt_cache,
        ),
        output=group(OutputOptions, args, json=as_json, file=args.output),
        run=group(RunOptions, args, batch_size=batch_size),
        flags=vars(args),
    )


def group(options_type: type[Group], args: argparse.Namespace, **overrides) -> Group:
    """A group of options: each field is the flag of its name, or an override, or its default."""
    flags = vars(args) | overrides
    return options_type(
        **{field.name: flags[field.name] for field in fields(options_type) if field.name in flags}
    )


def model_options(args: argparse.Namespace) -> ModelOptions:
    """The model of the flags that a program has. A name on the hub becomes the path of its
    files."""
    return group(ModelOptions, args, checkpoint=checkpoint_path(args.checkpoint))


def draft_options(args: argparse.Namespace) -> DraftOptions:
    spec, folder = split_folder(args.draft)
    if args.draft_checkpoint is not None:
        folder = args.draft_checkpoint
    return DraftOptions(
        checkpoint=checkpoint_path(folder),
        spec=spec,
        quantize=getattr(args, "draft_quantize", None),
        sharded=getattr(args, "draft_tp", None) == "sharded",
    )


def with_chosen_seed(options: Options, broadcast: Callable[[int], int] = int) -> Options:
    """The options with a random number in place of --seed -1, the same on all ranks by `broadcast`;
    prints it."""
    if not is_random(options.requests.seed):
        return options
    seed = broadcast(random_seed())
    print_status(f"--seed {seed} repeats this run")
    return replace(options, requests=replace(options.requests, seed=seed))
