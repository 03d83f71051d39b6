"""The flags of generate.py -> Options. argparse's Namespace stays in this file.

    Flag, FLAGS             each flag with the options that it fills, from which other programs
                            know the flags that they take; SECTIONS has them as --help does
    parser, parse_args      a parser of all, and the options of a command line
    given                   the flags that a command line has
    options_of              Namespace -> Options, whose groups check themselves
    with_chosen_seed        a random number in place of --seed -1

This file needs no torch, whose import takes seconds. Other programs take `Parser`, `positive` and
single flags from it.
"""

import argparse
import difflib
import importlib.metadata
import json
import os
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
        words = message.removeprefix("unrecognized arguments: ").split() or [""]
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
    return checked_json(text, dict, f"{text!r:.99} is not an object")


def json_list(text: str) -> list:
    """A list in JSON, or the name of a file that holds one."""
    content = text
    if not text.lstrip().startswith("[") and os.path.isfile(text):  # which takes any length
        content = Path(text).read_text(encoding="utf-8-sig")
    return checked_json(content, list, f"{text!r:.99} is not a list, or a file that holds one")


def checked_json(text: str, json_type: type, refusal: str) -> object:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, json_type):
        raise argparse.ArgumentTypeError(f"{refusal} in JSON")
    return value


def draft_length(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} must be a number of tokens from 0 on, or auto")
    return int(text)


class Flag:
    """A flag, declared once for all programs that take it.

    fills       the options that it fills
    is_own      is it about generate.py's own prompts and output? Other programs have theirs
    of_request  does a server refuse it, because each request brings its own?
    is_path     may its value differ between the machines of a launch?
    settings    argparse's
    """

    def __init__(self, *names: str, fills: type, of_request: bool = False, **settings):
        self.names = names
        self.name = names[-1]
        self.key = self.name.removeprefix("--")  # in a Namespace
        self.fills = fills
        self.is_own = fills in (PromptOptions, OutputOptions)
        self.of_request = of_request or self.is_own
        self.is_path = settings.get("metavar") in ("PATH", "DIR", "FILE", "CONFIG.json")
        self.settings = settings

    def add_to(self, parser: argparse._ActionsContainer, **changes) -> None:
        """Let a parser, or a group of one, take it, with these settings replaced."""
        parser.add_argument(*self.names, **self.settings | changes)


def setting_flag(name: str) -> Flag:
    """The flag of one of SETTINGS."""
    setting = SETTINGS[name]
    default = DEFAULT_TEMPERATURE if name == "temperature" else setting.default
    usual = "none" if default is None else f"{default:g}"
    if name in SAMPLING_KEYS:
        usual += ", or the folder's"
    help = f"{setting.help.replace('%', '%%')}; default: {usual}"
    return Flag(f"--{name}", fills=RequestDefaults, type=setting.type, metavar="N", help=help)


DEMO = Path(__file__).parent.parent / "checkpoints" / "demo"

SECTIONS = {  # by titles of --help; "one of": they exclude each other
    "model": (
        Flag(
            "-m",
            "--checkpoint",
            fills=ModelOptions,
            default=str(DEMO),
            metavar="PATH",
            help=f"{PATH_HELP}; default: checkpoints/demo",
        ),
        Flag(
            "--adapter",
            fills=ModelOptions,
            metavar="DIR",
            help="a LoRA adapter in PEFT's layout, merged while loading",
        ),
        Flag(
            "--random_weights",
            fills=ModelOptions,
            metavar="CONFIG.json",
            help="this shape with random weights, instead of --checkpoint",
        ),
        Flag(
            "--quantize",
            fills=ModelOptions,
            metavar="SCHEME",
            help=f"quantize weights while loading: {', '.join(SCHEMES)}",
        ),
        Flag(
            "--quantize_head", fills=ModelOptions, default="auto", metavar="SCHEME", help=HEAD_HELP
        ),
        Flag("--dtype", fills=ModelOptions, choices=DTYPES, help="default: the checkpoint's"),
    ),
    "prompt, one of": (
        Flag(
            "PROMPT",
            fills=PromptOptions,
            nargs="?",
            help="the same as --prompt PROMPT",
        ),
        Flag(
            "-p",
            "--prompt",
            fills=PromptOptions,
            metavar="TEXT",
            default="Once upon a time",
            help='default: "%(default)s"',
        ),
        Flag(
            "-f",
            "--prompt_file",
            fills=PromptOptions,
            metavar="FILE",
            help='one prompt a line, or JSONL objects with "prompt" or "messages", "id", "seed" …;'
            " - for stdin",
        ),
        Flag(
            "-i",
            "--interactive",
            fills=PromptOptions,
            action="store_true",
            help="chat, in the folder's own format if it has one",
        ),
    ),
    "prompt": (
        Flag(
            "--system", fills=PromptOptions, metavar="TEXT", help="system message for --interactive"
        ),
        Flag(
            "--parse_special",
            fills=RequestDefaults,
            action="store_true",
            help="read names of special tokens in a prompt as the tokens themselves; default: as"
            " text, and always so in conversations",
        ),
        Flag(
            "--chat_template",
            fills=ModelOptions,
            metavar="FILE",
            help="a template in jinja, instead of the one that the checkpoint has",
        ),
        Flag(
            "--chat_template_kwargs",
            fills=RequestDefaults,
            of_request=True,
            type=json_object,
            default={},
            metavar="JSON",
            help="variables of the template, such as '{\"enable_thinking\": false}'",
        ),
        Flag(
            "--tools",
            fills=RequestDefaults,
            of_request=True,
            type=json_list,
            metavar="JSON",
            help="tools for the template: a list, or a file that holds one",
        ),
        Flag(
            "--prefill",
            fills=RequestDefaults,
            of_request=True,
            default="",
            metavar="TEXT",
            help="text that each answer begins with",
        ),
        Flag(
            "--prompt_cache",
            fills=PromptOptions,
            metavar="FILE",
            help="read and write the computed positions of a prompt",
        ),
        Flag(
            "--batch_size",
            fills=RunOptions,
            type=positive,
            metavar="N",
            help="rows decoded together; default: all samples of --prompt; of a file, up to 32"
            " that fit in memory",
        ),
        Flag(
            "--num_samples",
            fills=PromptOptions,
            type=positive,
            default=1,
            metavar="N",
            help="answers to each prompt, with seeds --seed, --seed + 1, …",
        ),
    ),
    "sampling": (
        *map(setting_flag, SETTINGS),
        Flag(
            "--seed",
            fills=RequestDefaults,
            type=int,
            default=0,
            metavar="N",
            help=f"default: 0; {RANDOM_SEED}: a random one, which stderr and --json show",
        ),
    ),
    "length and stopping": (
        Flag(
            "-n",
            "--max_new_tokens",
            fills=RequestDefaults,
            type=int,
            metavar="N",
            help=f"default: {DEFAULT_NEW_TOKENS}; in a chat, as many as fit",
        ),
        Flag(
            "--max_seq_length",
            fills=RunOptions,
            type=int,
            metavar="N",
            help="positions for prompt and new tokens; default: as many as they need; of a chat or"
            " scripts.serve, the context, at most 4096",
        ),
        Flag(
            "--stop",
            fills=RequestDefaults,
            nargs="+",
            action="extend",
            default=[],
            metavar="TEXT",
            help="end before any of these strings, or at a special token that one names; empty ones"
            " are ignored",
        ),
        Flag(
            "--ignore_eos",
            fills=RequestDefaults,
            action="store_true",
            help="do not end at the model's stop tokens",
        ),
    ),
    "drafting, one of": (
        Flag(
            "-d",
            "--draft_checkpoint",
            fills=DraftOptions,
            metavar="PATH",
            help="a smaller model, a PARD, an EAGLE-3, a DFlash or a DSpark draft",
        ),
        Flag("--draft", fills=DraftOptions, metavar="SPEC", help=SPEC_HELP),
    ),
    "drafting": (
        Flag(
            "--speculate_k",
            fills=EngineOptions,
            type=draft_length,
            metavar="N|auto",
            help=f"tokens drafted a round; auto: the fastest; default: {DEFAULT_K}",
        ),
        Flag(
            "--verification",
            fills=EngineOptions,
            choices=VERIFICATIONS,
            default="block",
            help="accept sampled draft tokens as a block or one by one; default: block",
        ),
        Flag(
            "--draft_quantize",
            fills=DraftOptions,
            metavar="SCHEME",
            help="quantize the weights of --draft_checkpoint or --draft mtp",
        ),
        Flag(
            "--fixed_width_steps",
            fills=EngineOptions,
            action="store_true",
            help="run every step over K + 1 positions, drafted or not, so that greedy text is"
            " identical with and without a draft even where the report says up to rounding",
        ),
        Flag(
            "--show_drafts",
            fills=OutputOptions,
            action="store_true",
            help="mark drafted tokens: accepted ones blue, rejected ones struck through beside the"
            " red one that corrects them; without a terminal as {==accepted==} and"
            " {~~rejected~>own~~}",
        ),
    ),
    "where it runs": (
        Flag(
            "--device",
            fills=ModelOptions,
            help="cpu, cuda, cuda:N or mps; default: cuda if there is a GPU",
        ),
        Flag(
            "--threads",
            fills=RunOptions,
            type=positive,
            metavar="N",
            help="threads of a CPU; default: as many as torch takes, at most the container's share",
        ),
        Flag(
            "--kv_cache_dtype",
            fills=EngineOptions,
            choices=CACHE_NAMES,
            default="model",
            help="type of keys and values; int8 and fp8 take half the bytes; default: the model's",
        ),
        Flag(
            "--compile",
            fills=EngineOptions,
            action=argparse.BooleanOptionalAction,
            help="compile the decode step; default: on cuda",
        ),
    ),
    "under torchrun": (
        Flag(
            "--draft_tp",
            fills=DraftOptions,
            nargs="?",
            const="sharded",
            choices=("sharded", "replicated"),
            default="replicated",
            help="divide --draft_checkpoint over the ranks too; default: every rank holds all of"
            " it",
        ),
        Flag(
            "--timeout",
            fills=RunOptions,
            type=float,
            default=600,
            metavar="S",
            help="seconds to wait for another rank; default: 600",
        ),
    ),
    "output": (
        Flag(
            "--json",
            fills=OutputOptions,
            action="store_true",
            help="one JSON object per sample and row on stdout, nothing else",
        ),
        Flag(
            "--output",
            fills=OutputOptions,
            metavar="FILE",
            help="append --json's lines to this file",
        ),
        Flag(
            "--ordered",
            fills=OutputOptions,
            action="store_true",
            help="--json in the file's order; default: each line as soon as its row ends",
        ),
        Flag(
            "--logprobs",
            fills=EngineOptions,
            of_request=True,
            type=int,
            metavar="N",
            help="with --json: log-probabilities of each token and the N most likely,"
            " before penalties, temperature and filters",
        ),
        Flag(
            "--report",
            fills=OutputOptions,
            metavar="FILE",
            help="a page of the answers: each token's origin, p and q, acceptance along the"
            " text, cost by K; records log-probabilities as --logprobs 0 does",
        ),
        Flag(
            "--profile",
            fills=OutputOptions,
            metavar="FILE",
            help="a Chrome trace of everything after loading and compiling",
        ),
    ),
}
FLAGS = {flag.key: flag for section in SECTIONS.values() for flag in section}


def parse_args(argv: Sequence[str] | None = None) -> Options:
    """The options of generate.py's command line, checked."""
    return options_of(parser().parse_args(argv))


def parser(**changes) -> argparse.ArgumentParser:
    """A parser of all flags, with these of their settings replaced."""
    parser = Parser(
        description="Decode text with a Llama-architecture model from a Hugging Face folder or"
        " GGUF file. Text streams"
        " to stdout, everything else to stderr.",
        epilog="On several devices: torchrun --nproc_per_node=N generate.py …",
    )
    for title, section in SECTIONS.items():
        group = parser.add_argument_group(title)
        if title.endswith("one of"):
            group = group.add_mutually_exclusive_group()
        for flag in section:
            flag.add_to(group, **changes)
    return parser


def given(words: Sequence[str]) -> list[Flag]:
    """The flags that a command line has, be it with their default value."""
    args = parser(default=argparse.SUPPRESS).parse_args(words)
    return [FLAGS[key] for key in vars(args)]


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
    flags = vars(args)
    numbers = {name: flags[name] for name in SETTINGS if flags[name] is not None}
    of_folder = {}
    if not model.random_weights:
        of_folder = folder_sampling(model, default_sampling, numbers)
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
        ),
        prompts=group(
            PromptOptions,
            args,
            prompt=args.prompt if args.PROMPT is None else args.PROMPT,
            file=args.prompt_file,
            cache_file=args.prompt_cache,
        ),
        output=group(OutputOptions, args, json=as_json, file=args.output),
        run=group(RunOptions, args, batch_size=batch_size),
        flags=flags,
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


def add_model(parser: argparse.ArgumentParser) -> None:
    """The flags of the model that a program loads."""
    FLAGS["checkpoint"].add_to(parser, required=True, default=None, help=PATH_HELP)
    for key in ("quantize", "quantize_head", "dtype", "device"):
        FLAGS[key].add_to(parser)


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
