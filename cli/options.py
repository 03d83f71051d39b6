"""What the command line asks for, as frozen groups. cli/flags.py makes them; this file needs no
torch.

    Options             all groups of one run, and the flags that they came from
    RequestDefaults     how each prompt is answered, unless a line of a file says otherwise
    PromptOptions       where prompts come from
    OutputOptions       where answers go
    RunOptions          rows, positions, threads and ranks
    QuantizeOptions     what `python quantize.py` makes of a checkpoint

loading/options.py has the groups of the models, decoding/options.py those of the engine. A group
checks itself; Options checks what lies between groups. Each check is a UserError that names the
flag.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from decoding.errors import UserError
from decoding.launcher import launched
from decoding.options import EngineOptions
from decoding.settings import LARGEST_SEED, RANDOM_SEED
from decoding.validation import check_template_kwargs
from loading.options import DraftOptions, ModelOptions
from loading.plain_files import is_gguf
from weights.schemes import check_scheme, scheme_of

MAX_THREADS = 1024  # torch takes minutes to start 5,000, and crashes with 40,000
TEMPLATE_KEYS = ("chat_template_kwargs", "tools", "prefill")  # they need a conversation


@dataclass(frozen=True)
class RequestDefaults:
    """How a prompt is answered. `sampling` has the numbers of SETTINGS by name, and `of_folder`
    those of them that the checkpoint's generation_config.json asks for."""

    sampling: Mapping[str, float | None]
    of_folder: Mapping[str, float]
    seed: int
    max_new_tokens: int | None
    stop: list[str]
    ignore_eos: bool
    parse_special: bool
    tools: list | None
    prefill: str
    chat_template_kwargs: Mapping

    def __post_init__(self):
        check_template_kwargs(self.chat_template_kwargs)
        if not RANDOM_SEED <= self.seed < LARGEST_SEED:
            raise UserError(
                f"--seed {self.seed} must lie between 0 and 2^62, or be {RANDOM_SEED} for a random"
                f" one"
            )
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise UserError(f"--max_new_tokens {self.max_new_tokens} must be at least 1")


@dataclass(frozen=True)
class PromptOptions:
    prompt: str
    file: str | None  # "-" is stdin
    interactive: bool = False
    system: str | None = None
    cache_file: str | None = None
    num_samples: int = 1

    def __post_init__(self):
        if self.system and not self.interactive:
            raise UserError("--system needs --interactive")
        check_writable("prompt_cache", self.cache_file)
        if self.cache_file and launched():
            raise UserError("--prompt_cache is one process's: start it without torchrun")


@dataclass(frozen=True)
class OutputOptions:
    json: bool
    file: str | None
    ordered: bool
    report: str | None
    profile: str | None
    show_drafts: bool

    def __post_init__(self):
        check_writable("profile", self.profile)
        check_writable("report", self.report)


@dataclass(frozen=True)
class RunOptions:
    """`batch_size` and `max_seq_length` are chosen by need where they are None."""

    batch_size: int | None
    max_seq_length: int | None
    threads: int | None
    timeout: float

    def __post_init__(self):
        if not 0 < self.timeout < 1e6:
            raise UserError(f"--timeout {self.timeout} must be a positive number of seconds")
        if (self.threads or 0) > MAX_THREADS:
            raise UserError(f"--threads {self.threads}: at most {MAX_THREADS}")


@dataclass(frozen=True)
class Options:
    """All that one run asks for. `flags` has the values of all flags by name: ranks compare
    theirs."""

    model: ModelOptions
    draft: DraftOptions
    engine: EngineOptions
    requests: RequestDefaults
    prompts: PromptOptions
    output: OutputOptions
    run: RunOptions
    flags: Mapping[str, object]

    def __post_init__(self):
        self._check_conversation()
        if self.output.report and self.prompts.interactive:
            raise UserError("--report does not work with --interactive")
        has_k = self.flags.get("speculate_k") is not None and not self.engine.fixed_width_steps
        if self.draft.source is None and (self.output.show_drafts or has_k):
            raise UserError("--speculate_k and --show_drafts need --draft_checkpoint or --draft")

    def _check_conversation(self) -> None:
        prompts = self.prompts
        requests = self.requests
        has_template_settings = any(getattr(requests, key) for key in TEMPLATE_KEYS)
        if has_template_settings and not (prompts.interactive or prompts.file):
            raise UserError(
                "--chat_template_kwargs, --tools and --prefill need a conversation: --interactive"
                " or a --prompt_file of them"
            )
        if requests.parse_special and prompts.interactive:
            raise UserError(
                "--parse_special reads prompts; in --interactive the chat template alone writes"
                " special tokens"
            )
        has_rows = self.output.json or prompts.num_samples > 1 or (self.run.batch_size or 1) > 1
        if prompts.interactive and has_rows:
            raise UserError(
                "--interactive is one conversation in text: not with --json, --output,"
                " --num_samples or --batch_size"
            )


@dataclass(frozen=True)
class QuantizeOptions:
    """A quantized folder: `scheme` of the matrices, `head_scheme` of lm_head, `dtype` of other
    weights; None leaves them as they are. `context`: tokens of a window of the calibration text."""

    checkpoint: str
    output: str
    adapter: str | None
    scheme: str | None
    method: str
    head_scheme: str | None
    dtype: str | None
    calibration: str | None
    samples: int
    context: int | None
    device: str

    def __post_init__(self):
        for scheme in (self.scheme, self.head_scheme):
            if scheme is not None:
                check_scheme(scheme)
        is_plain = self.scheme is None
        if is_plain and (
            self.head_scheme or self.method != "rtn" or not is_gguf(Path(self.checkpoint))
        ):
            need = "only a .gguf file becomes a folder of plain weights without it"
            raise UserError(f"--scheme is missing; {need}")
        if self.method != "rtn" and not scheme_of(self.scheme).has_ranges:
            raise UserError(
                f"--method {self.method} chooses int4 codes; {self.scheme} takes --method rtn"
            )
        if (self.method == "gptq") != (self.calibration is not None):
            raise UserError("--method gptq and --calibration FILE need each other")
        if Path(self.output).exists():
            raise UserError(f"{self.output}: exists already; remove it or choose another --output")


def check_writable(flag: str, file: str | None) -> None:
    """UserError for a file that cannot be written when the run has ended."""
    if file is None:
        return
    path = Path(file)
    if path.is_dir():
        raise UserError(f"--{flag} {file} is a folder: name a file in it")
    is_device = path.exists() and not path.is_file()
    if not os.access(path if is_device else path.resolve().parent, os.W_OK):
        raise UserError(f"--{flag} {file}: its folder does not exist or cannot be written to")
