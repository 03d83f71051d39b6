"""The checks of arguments, from host integers, before anything runs.

    integer_per_row     one integer, or one a row -> a list of ints
    value_per_row       one value, or one a row -> a list
    check_lengths       do prompts and new tokens fit in the context?
    check_settings      seed, stop ids and logit_bias of a request
    check_draft_length  is it a number of tokens, or "auto"?
    check_engine        does an existing engine have room for these texts?
    rounded_up          a prompt's length, rounded up to one of a few

Every ValueError names the row, the number and a remedy. This file imports no project file.
"""

import math
import operator
from collections.abc import Collection, Sequence


def integer_per_row(name: str, value: int | Sequence[int], rows: int) -> list[int]:
    """`value`, an integer of Python, numpy or torch, for each of `rows` rows; or a sequence of them as a list."""
    try:
        return [operator.index(value)] * rows
    except TypeError:
        return value_per_row(name, [operator.index(number) for number in value], rows)


def value_per_row(name: str, value, rows: int) -> list:
    """`value` for each of `rows` rows, or a sequence of values as a list."""
    values = list(value) if isinstance(value, Sequence) else [value] * rows
    if len(values) != rows:
        raise ValueError(f"{name}: {len(values)} for {rows} prompts; give one, or one a prompt")
    return values


def check_lengths(model, prompts: Sequence[Sequence[int]], budgets: Sequence[int], limit: int) -> None:
    """ValueError unless every prompt and its new tokens fit in `limit` positions."""
    if not prompts:
        raise ValueError("no prompt given")
    V = model.config.vocab_size
    for row, (prompt, new) in enumerate(zip(prompts, budgets, strict=True)):
        if new < 1 or new != int(new):
            raise ValueError(f"max_new_tokens = {new} must be a number of tokens, at least 1")
        if not len(prompt):
            raise ValueError(f"prompt {row} is empty: it has no token, and the model has no BOS to start from")
        if len(prompt) + new > limit:
            raise ValueError(
                f"prompt {row} has {len(prompt)} tokens; with {new} new ones that is {len(prompt) + new}, over the"
                f" limit of {limit} positions: shorten the prompt, or lower --max_new_tokens"
            )
        unknown = next((id for id in prompt if not 0 <= id < V), None)
        if unknown is not None:
            raise ValueError(f"prompt {row} holds token id {unknown}, outside the vocabulary of {V}")


def check_engine(engine, model, max_seq_length: int) -> None:
    """ValueError unless the engine is this model's, and has max_seq_length positions."""
    if engine.model is not model:
        raise ValueError("the engine was made for another model: give the engine's own, engine.model")
    if max_seq_length > engine.max_seq_length:
        limit = engine.max_seq_length
        raise ValueError(f"max_seq_length = {max_seq_length} is over the engine's {limit} positions")


def check_settings(model, sampling, seed: int, stop_ids: Collection[int], max_stop_ids: float) -> None:
    """ValueError for a seed of more than 64 bits, too many stop ids, or a logit_bias of unknown tokens."""
    V = model.config.vocab_size
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed = {seed} must lie between -2^63 and 2^63 - 1: seeds are 64-bit integers")
    if len(stop_ids) > max_stop_ids:
        raise ValueError(f"{len(stop_ids)} stop ids are more than the {max_stop_ids} that fit")
    if unknown := [id for id, _ in sampling.logit_bias if not 0 <= id < V]:
        raise ValueError(f"logit_bias holds token id {unknown[0]}, outside the vocabulary of {V}")


def check_draft_length(k: int | str, limit: float = math.inf, one_width: bool = False) -> None:
    """ValueError for anything but "auto" and a number of tokens that a drafter of at most `limit` a round can draft;
    with `one_width` only a number will do."""
    if k == "auto" and one_width:
        raise ValueError("one_width needs a speculate_k that is a number, not 'auto'")
    if isinstance(k, int) and k > limit:
        raise ValueError(f"speculate_k = {k}: this draft has at most {limit} tokens a round")
    if k != "auto" and not (isinstance(k, int) and k >= 0):
        raise ValueError(f"speculate_k = {k!r} must be a number of tokens from 0 on, or 'auto'")


def check_logprobs(num_logprobs: int | None, vocab_size: int) -> None:
    """ValueError for more log-probabilities of a token than there are tokens, or fewer than none."""
    if num_logprobs is None:
        return
    if num_logprobs > vocab_size:
        raise ValueError(f"logprobs = {num_logprobs} is more than the {vocab_size} tokens that there are")
    if num_logprobs < 0:
        raise ValueError(f"logprobs = {num_logprobs} must be a number from 0 on")


def rounded_up(n: int) -> int:
    """n rounded up to one of 32 lengths up to 512, by at most 7 or an eighth: oneDNN keeps 0.8 MB of machine code for
    each shape of a bfloat16 product."""
    step = max(8, (1 << n.bit_length()) // 16)
    return math.ceil(n / step) * step
