"""Options and prompts -> an LLM that is ready to decode them, and the rows.

open_llm        checks memory, loads, encodes, makes an engine of the right size and warms it up
"""

import functools
import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from cli.errors import free_memory
from cli.exits import print_broken, print_status
from cli.memory import check_memory
from cli.options import Options
from cli.prompts import Prompt, Row, encode_all
from cli.report import cached_bytes
from cli.running import warm_up
from decoding.engine import Engine
from decoding.errors import UserError
from decoding.runner import cache_class
from decoding.sampling import PATHS as SAMPLING_PATHS
from decoding.sampling import Sampling
from decoding.settings import DEFAULT_LENGTH
from decoding.validation import check_logprobs
from drafts.base import Drafter
from drafts.registry import load_models
from generate import LLM
from loading.checkpoint import Checkpoint
from loading.target import Target
from model import Config, Transformer, takes_long_factors
from tp import ALONE, Ranks
from weights.walker import batch_invariant_rows

# With so many prompt tokens, compiling their pass pays on a CPU (benchmarks/NOTES.md).
COMPILED_PROMPTS = 8192
# An engine's positions are a multiple: prompts of many lengths load the same compiled step.
COMPILED_LENGTHS = 512
MAX_ROWS = 32  # decoded at a time, of a file, without --batch_size


class Opened(NamedTuple):
    llm: LLM
    rows: list[Row]
    refused: list[str]  # an error for each line that does not fit


def open_llm(
    options: Options,
    device: torch.device,
    ranks: Ranks = ALONE,
    prompts: Sequence[Prompt] = (),
    num_slots: int | None = None,
) -> Opened:
    """Load the models, and make and warm up an engine: one that these prompts fit in, or one for
    prompts of all kinds where they come later. `num_slots`: of a server."""
    target = Target(options.model)
    if options.draft.checkpoint:
        opened = Checkpoint.of(options.draft.checkpoint)
        options = replace(options, draft=replace(options.draft, checkpoint=opened))
    limit = context_limit(options, target.config)
    print_sampling(options)
    length_of = functools.partial(engine_length, options, device, limit)
    default = {"max_new_tokens": options.requests.max_new_tokens}
    new_tokens = [(default | prompt.settings)["max_new_tokens"] or 1 for prompt in prompts]
    num_rows = num_slots or smallest_batch(options, len(prompts))
    check_memory(options, target, device, ranks, num_rows, length_of(new_tokens))
    model, tokenizer, drafter = load_models(target, options.draft, device, ranks, progress=True)
    encoded = encode_all(prompts, options, tokenizer, model, limit)
    rows, refused = ranks.broadcast_object(encoded)
    print_broken(refused, rows)

    length = length_of([len(row.ids) + row.max_new_tokens for row in rows])
    if takes_long_factors(model.config, length):
        print_status(f"longrope takes its long factors, since texts may have {length} tokens")
    num_slots = num_slots or choose_slots(options, len(rows), length, model, drafter)
    num_prompt_tokens = sum(len(row.ids) for row in rows)
    compiles_prompts = device.type == "cuda" or num_prompt_tokens >= COMPILED_PROMPTS
    engine_options = replace(options.engine, compile_prompts=None if compiles_prompts else False)
    num_slots = ranks.broadcast_object(num_slots)
    engine = Engine(model, num_slots, length, engine_options, drafter)
    if rows:
        warm_up(engine, rows[0].sampling, sampling_paths(rows))
    else:  # prompts come later
        warm_up_for_later(engine, Sampling(**options.requests.sampling))
    stop_ids = frozenset() if options.requests.ignore_eos else tokenizer.stop_ids
    return Opened(
        LLM.from_engine(engine, tokenizer, ranks.broadcast_object(stop_ids)), rows, refused
    )


def print_sampling(options: Options) -> None:
    """Say what the checkpoint's own sampling changes."""
    settings = options.requests.of_folder
    if settings:
        words = ", ".join(f"{name} {value:g}" for name, value in settings.items())
        print_status(f"{options.model.checkpoint}: generation_config.json asks for {words}")


def warm_up_for_later(engine: Engine, sampling: Sampling) -> None:
    """Compile the steps that prompts which come later may need. A GPU compiles anew at every start,
    and so begins with the step of a single prompt with the default sampling."""
    paths = SAMPLING_PATHS
    if engine.runner.uses_cuda_graphs:
        paths = [sampling.path]
        engine.planner.row_counts = [1]
        print_status("steps of several prompts and of other samplings compile when first needed")
    warm_up(engine, sampling, paths)


def context_limit(options: Options, config: Config) -> int:
    """Positions of a row. UserError for flags that this model cannot serve."""
    longest = config.max_seq_length
    requested = options.run.max_seq_length
    limit = longest if requested is None else requested
    if not 2 <= limit <= longest:  # a prompt and a new token
        raise UserError(f"--max_seq_length {limit} must lie between 2 and the model's {longest}")
    check_logprobs(options.engine.logprobs, config.vocab_size)
    return limit


def engine_length(
    options: Options, device: torch.device, limit: int, lengths: Collection[int]
) -> int:
    """Positions of a row of an engine for requests of these lengths, or for any without them."""
    if options.run.max_seq_length is not None:
        return limit
    length = min(limit, max(lengths, default=DEFAULT_LENGTH))
    compiles = options.engine.compile
    if compiles or (compiles is None and device.type == "cuda"):
        return min(limit, math.ceil(length / COMPILED_LENGTHS) * COMPILED_LENGTHS)
    return length


def smallest_batch(options: Options, num_prompts: int) -> int:
    """Rows that are decoded at a time at least."""
    num_rows = num_prompts * options.prompts.num_samples
    return max(1, min(options.run.batch_size or 1, num_rows))


def choose_slots(
    options: Options, num_rows: int, length: int, model: Transformer, drafter: Drafter | None
) -> int:
    """The rows that are decoded at a time: --batch_size, or a number that is printed. That many
    caches of `length` positions fit into half of the free memory, and a step of them is
    batch-invariant."""
    num_rows = max(1, num_rows)
    if options.run.batch_size is not None:
        return min(options.run.batch_size, num_rows)
    num_rows = min(num_rows, MAX_ROWS)
    K = 0
    if drafter is not None or options.engine.fixed_width_steps:
        K = options.engine.speculate_k
    if K == "auto":
        K = max(drafter.auto_k)
    models = [model]
    if drafter is not None and drafter.num_first_inputs:
        models.append(drafter.model)
    per_position = cached_bytes(models, cache_class(options.engine.cache_type))
    max_fitting = free_memory(model.norm.weight.device) / 2 // ((length + K) * per_position)
    max_alone = batch_invariant_rows(model) // (K + 1) or num_rows
    num_slots = int(max(1, min(num_rows, max_fitting, max_alone)))
    if num_rows > 1:
        print_status(f"{num_slots} rows are decoded at a time; --batch_size sets another number")
    return num_slots


def sampling_paths(rows: list[Row]) -> list[str]:
    """The sampling paths that these rows have."""
    paths = {row.sampling.path for row in rows}
    return [path for path in SAMPLING_PATHS if path in paths]
