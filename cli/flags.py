"""The flags of generate.py, and the refusals that need no model.

This file knows no device, file or model, and needs no torch, whose import takes seconds. Other programs take `Parser`
and `positive` from it.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from cli.exits import fail
from cli.version import Version
from decoding.launcher import launched
from decoding.settings import (
    DEFAULT_K,
    DEFAULT_NEW_TOKENS,
    LARGEST_SEED,
    RANDOM_SEED,
    SETTINGS,
    check_numbers,
    is_random,
    random_seed,
)
from loading.hub import PATH_HELP, checkpoint_path
from weights.schemes import HEAD_CHOICES, HEAD_HELP, SCHEMES, check_scheme, head_scheme

DTYPES = ("bfloat16", "float16", "float32")
CACHE_TYPES = ("model", "int8", "fp8")  # decoding/kv_8bit.py has the latter two
RESERVED = ("messages", "tools", "add_generation_prompt", "prefill", "self", "tokenizer")  # not in chat_template_kwargs


class Parser(argparse.ArgumentParser):
    def __init__(self, **options):
        super().__init__(**options)
        self.add_argument("--version", action=Version)

    def error(self, message: str):
        fail(message)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def thread_count(text: str) -> int:
    """At most one thread for each processor: thousands would freeze the machine."""
    count, max_threads = positive(text), os.cpu_count() or 1
    if count > max_threads:
        raise argparse.ArgumentTypeError(f"{count} threads are more than this machine's processors, {max_threads}")
    return count


def json_object(text: str) -> dict:
    return checked_json(text, dict, "an object")


def json_list(text: str) -> list:
    """A list in JSON, or the name of a file that holds one."""
    if not text.lstrip().startswith("["):
        text = Path(text).read_text(encoding="utf-8") if Path(text).is_file() else text
    return checked_json(text, list, "a list, or a file that holds one")


def checked_json(text: str, kind: type, kind_name: str) -> object:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, kind):
        raise argparse.ArgumentTypeError(f"{text!r:.99} is not {kind_name} in JSON")
    return value


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        description="Decode text with a Llama-architecture model from a Hugging Face folder or GGUF file. Text streams"
        " to stdout, everything else to stderr.",
        epilog="On several devices: torchrun --nproc_per_node=N generate.py …",
    )
    add = parser.add_argument_group("model").add_argument
    demo = Path(__file__).parent.parent / "checkpoints" / "demo"
    help = f"{PATH_HELP}; default: checkpoints/demo"
    add("--checkpoint", type=checkpoint_path, default=str(demo), metavar="PATH", help=help)
    add("--adapter", metavar="DIR", help="a LoRA adapter in PEFT's layout, merged while loading")
    add("--random_weights", metavar="CONFIG.json", help="this shape with random weights, instead of --checkpoint")
    add("--quantize", metavar="SCHEME", help=f"quantize weights while loading: {', '.join(SCHEMES)}")
    add("--quantize_head", default="auto", metavar="SCHEME", help=HEAD_HELP)
    add("--dtype", choices=DTYPES, help="default: the checkpoint's")

    group = parser.add_argument_group("prompt")
    source, add = group.add_mutually_exclusive_group(), group.add_argument
    source.add_argument("--prompt", metavar="TEXT", default="Once upon a time", help='default: "%(default)s"')
    jsonl = (
        'one a line, or JSONL objects with "prompt" or "messages", "id", "seed" …; - for stdin, where a pipe is'
        " answered line by line (under torchrun: once it has ended)"
    )
    source.add_argument("--prompt_file", metavar="FILE", help=jsonl)
    source.add_argument("--interactive", action="store_true", help="chat, in the folder's own format if it has one")
    add("--system", metavar="TEXT", help="system message for --interactive")
    add("--parse_special", action="store_true", help="names of special tokens in a prompt are these tokens; default:"
        " text. Conversations always take them as text")  # fmt: skip
    add("--chat_template_kwargs", type=json_object, default={}, metavar="JSON", help="variables of the template,"
        ' such as \'{"enable_thinking": false}\'')  # fmt: skip
    add("--tools", type=json_list, metavar="JSON", help="tools for the template: a list, or a file that holds one")
    add("--prefill", default="", metavar="TEXT", help="text that each answer begins with")
    add("--prompt_cache", metavar="FILE", help="read and write the computed positions of a prompt")
    add("--batch_size", type=positive, metavar="N", help="rows decoded together; default: all samples of"
        " --prompt; of a file, up to 32 that fit in memory; of a pipe, up to 8")  # fmt: skip
    add("--num_samples", type=positive, default=1, metavar="N", help="answers to each prompt, seeds seed, seed + 1, …")

    add = parser.add_argument_group("sampling").add_argument
    for name, setting in SETTINGS.items():
        default = 0.8 if name == "temperature" else setting.default
        usual = "" if default is None else f"; default: {default:g}"
        add(f"--{name}", type=setting.type, default=default, metavar="N", help=setting.help.replace("%", "%%") + usual)
    seed_help = f"default: 0; {RANDOM_SEED}: a random one, which stderr and --json tell"
    add("--seed", type=int, default=0, metavar="N", help=seed_help)

    add = parser.add_argument_group("length and stopping").add_argument
    add("--max_new_tokens", type=int, metavar="N", help=f"default: {DEFAULT_NEW_TOKENS}; in a chat, as many as fit")
    add("--max_seq_length", type=int, metavar="N", help="positions for prompt and new tokens; default: as many"
        " as they need; of a chat, an open pipe or scripts.serve, the context, at most 4096")  # fmt: skip
    stop_help = "end before any of these strings, or at a special token that one names; empty ones are ignored"
    add("--stop", nargs="+", action="extend", default=[], metavar="TEXT", help=stop_help)
    add("--ignore_eos", action="store_true", help="do not end at the model's stop tokens")

    group = parser.add_argument_group("drafting")
    draft, add = group.add_mutually_exclusive_group(), group.add_argument
    draft.add_argument(
        "--draft_checkpoint",
        type=checkpoint_path,
        metavar="PATH",
        help="a smaller model, a PARD, an EAGLE-3 or a DFlash draft",
    )
    draft.add_argument("--draft", metavar="SPEC", help="suffix[:N], ngram[:N], layers:0-7,24-31 or"
        " quantized:SCHEME")  # fmt: skip
    add("--speculate_k", metavar="N|auto", help=f"tokens drafted a round; auto: the fastest; default: {DEFAULT_K}")
    add("--draft_quantize", metavar="SCHEME", help="quantize the weights of --draft_checkpoint")
    add(
        "--one_width",
        action="store_true",
        help="run every step over K + 1 positions, drafted or not: so greedy text is the"
        " same with and without a draft, also where the report says up to rounding",
    )
    add("--show_drafts", action="store_true", help="colour accepted draft tokens blue and corrected ones red")

    add = parser.add_argument_group("where it runs").add_argument
    add("--device", help="cpu, cuda, cuda:N or mps; default: cuda when there is one")
    add("--threads", type=thread_count, metavar="N", help="threads of a CPU; default: all of them")
    add("--kv_cache_dtype", choices=CACHE_TYPES, default="model", help="of cached keys and values; int8 and fp8 take"
        " half the bytes; default: the model's")  # fmt: skip
    add("--compile", action=argparse.BooleanOptionalAction, help="compile the decode step; default: on cuda")

    add = parser.add_argument_group("under torchrun").add_argument
    add("--draft_tp", nargs="?", const="sharded", choices=("sharded", "replicated"), default="replicated",
        help="divide --draft_checkpoint over the ranks too; default: every rank holds all of it")  # fmt: skip
    add("--tp", type=positive, metavar="N", help="ranks of one replica of the model; replicas share"
        " the lines of --prompt_file; default: all ranks")  # fmt: skip
    add("--timeout", type=float, default=600, metavar="S", help="seconds to wait for another rank; default: 600")

    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="one JSON object per sample and row on stdout, nothing else")
    add("--output", metavar="FILE", help="append --json's lines to this file; prompts that it already answers"
        " are skipped")  # fmt: skip
    add("--ordered", action="store_true", help="--json in the file's order; default: each line as soon as its row ends")
    add("--logprobs", type=int, metavar="N", help="with --json: log-probabilities of each token and the N likeliest,"
        " before penalties, temperature and filters")  # fmt: skip
    add("--report", metavar="FILE", help="a page of the answers: each token's origin, p and q, acceptance along the"
        " text, cost by K; records log-probabilities as --logprobs 0 does")  # fmt: skip
    add("--profile", metavar="FILE", help="a Chrome trace of everything after loading and compiling")
    args = parser.parse_args(argv)
    args.json = args.json or args.output is not None
    args.has_random_seed = is_random(args.seed)
    args.logprobs = 0 if args.report and args.logprobs is None else args.logprobs
    if args.prompt_file is None:
        args.batch_size = args.batch_size or args.num_samples
    return args


def check_options(args: argparse.Namespace) -> None:
    """ValueError for flags that would fail later, or have no effect."""
    drafts = args.draft or args.draft_checkpoint
    check_numbers(sampling_settings(args))
    check_template_kwargs(args.chat_template_kwargs)
    chats = args.interactive or args.prompt_file
    world = int(os.environ.get("WORLD_SIZE", 1)) if launched() else 1
    tp = args.tp or world
    written = [(name, getattr(args, name)) for name in ("profile", "prompt_cache", "report")]
    for wrong, message in (
        (not RANDOM_SEED <= args.seed < LARGEST_SEED,
         f"--seed {args.seed} must lie between 0 and 2^62, or be {RANDOM_SEED} for a random one"),
        (args.max_new_tokens is not None and args.max_new_tokens < 1,
         f"--max_new_tokens {args.max_new_tokens} must be at least 1"),
        (args.system and not args.interactive, "--system needs --interactive"),
        ((args.chat_template_kwargs or args.tools is not None or args.prefill) and not chats,
         "--chat_template_kwargs, --tools and --prefill need a conversation: --interactive or a --prompt_file of them"),
        (args.parse_special and args.interactive,
         "--parse_special reads prompts; in --interactive the chat template alone writes special tokens"),
        (args.logprobs is not None and (args.logprobs < 0 or not (args.json or args.report)),
         f"--logprobs {args.logprobs} must be a number from 0 on, and needs --json"),
        (sys.stdin is None and (args.interactive or args.prompt_file == "-"),
         "stdin is closed, which --interactive and --prompt_file - read: give --prompt or a file"),
        (args.interactive and (args.json or args.num_samples > 1 or args.batch_size > 1),
         "--interactive is one conversation in text: not with --json, --num_samples or --batch_size"),
        (args.quantize_head not in HEAD_CHOICES and not args.quantize, "--quantize_head needs --quantize"),
        (args.adapter and args.random_weights, "--adapter needs the weights of a --checkpoint"),
        (args.draft_quantize and not args.draft_checkpoint, "--draft_quantize needs --draft_checkpoint"),
        (args.draft_tp == "sharded" and not args.draft_checkpoint,
         "--draft_tp needs --draft_checkpoint: other drafts are divided as the target is"),
        (not 0 < args.timeout < 1e6, f"--timeout {args.timeout} must be a positive number of seconds"),
        (not drafts and (args.show_drafts or (args.speculate_k is not None and not args.one_width)),
         "--speculate_k and --show_drafts need --draft_checkpoint or --draft"),
        (args.one_width and args.speculate_k == "auto", "--one_width needs a --speculate_k that is a number"),
        (world % tp, f"--tp {tp}: {world} ranks cannot be divided into replicas of {tp}"),
        (tp < world and not args.prompt_file,
         f"--tp {tp}: {world} ranks are {world // tp} replicas, which share the lines of a --prompt_file: give one"),
        (args.report and (args.interactive or tp < world),
         "--report is for the answers of one replica: not with --interactive or --tp"),
        (args.prompt_cache and launched(), "--prompt_cache is one process's: start it without torchrun"),
        *((file and not os.access(Path(file).resolve().parent, os.W_OK),
           f"--{name} {file}: its folder does not exist or cannot be written to") for name, file in written),
        *((file and Path(file).is_dir(), f"--{name} {file} is a folder: name a file in it") for name, file in written),
    ):  # fmt: skip
        if wrong:
            raise ValueError(message)
    for scheme in (args.quantize, head_scheme(args.quantize, args.quantize_head), args.draft_quantize):
        if scheme is not None:
            check_scheme(scheme)
    speculate_k(args)


def choose_seed(args: argparse.Namespace, broadcast: Callable[[int], int] = int) -> None:
    """Put a random number in place of --seed -1, the same on all ranks by `broadcast`, and print it."""
    if args.has_random_seed:
        args.seed = broadcast(random_seed())
        print(f"--seed {args.seed} repeats this run", file=sys.stderr)


def sampling_settings(args: argparse.Namespace) -> dict[str, float | None]:
    """The numbers of a Sampling, of the flags that a program has."""
    return {name: getattr(args, name, setting.default) for name, setting in SETTINGS.items()}


def check_template_kwargs(names: dict) -> None:
    """ValueError for a variable that this program sets itself."""
    if wrong := [name for name in RESERVED if name in names]:
        raise ValueError(f"chat_template_kwargs: {', '.join(wrong)} cannot be given there")


def speculate_k(args: argparse.Namespace) -> int | str:
    """--speculate_k: a number of tokens, or auto."""
    text = str(DEFAULT_K) if args.speculate_k is None else args.speculate_k
    if text != "auto" and not text.isdecimal():
        raise ValueError(f"--speculate_k {text} must be a number of tokens from 0 on, or auto")
    return text if text == "auto" else int(text)
