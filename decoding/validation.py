"""The checks of arguments, from host integers, before anything runs.

    value_per_row       one value, or one a row -> a list
    check_lengths       whether prompts and new tokens fit in the context
    check_settings      seed, stop ids and logit_bias of a request
    check_logprobs      the number of top tokens to record

A ValueError names the argument, or the row, and the number that does not fit. This file imports no
project file.
"""

import math
from collections.abc import Collection, Iterable, Sequence


def value_per_row(name: str, value, rows: int) -> list:
    """`value` for each of `rows` rows, or a sequence of values as a list."""
    values = list(value) if hasattr(value, "__len__") else [value] * rows
    if len(values) != rows:
        raise ValueError(f"{name}: {len(values)} for {rows} prompts; give one, or one a prompt")
    return values


def check_lengths(
    model, prompts: Sequence[Sequence[int]], budgets: Sequence[int], limit: int
) -> None:
    """ValueError unless every prompt and its new tokens fit in `limit` positions."""
    if not prompts:
        raise ValueError("no prompt given")
    V = model.config.vocab_size
    for row, (prompt, new) in enumerate(zip(prompts, budgets, strict=True)):
        if new < 1 or new != int(new):
            raise ValueError(f"max_new_tokens = {new} must be a number of tokens, at least 1")
        if not len(prompt):
            raise ValueError(
                f"prompt {row} is empty: it has no token, and the model has no BOS to start from"
            )
        total = len(prompt) + new
        if total > limit:
            raise ValueError(
                f"prompt {row} has {len(prompt)} tokens; with {new} new ones that is {total}, over"
                f" the limit of {limit} positions: shorten the prompt, or lower --max_new_tokens"
            )
        check_ids(f"prompt {row}", prompt, V)


def check_ids(owner: str, ids: Iterable[int], vocab_size: int) -> None:
    """ValueError for an id that the model does not have."""
    for id in ids:
        if not 0 <= id < vocab_size:
            raise ValueError(f"{owner} holds token id {id}, outside the vocabulary of {vocab_size}")


def check_settings(
    model,
    sampling,
    seed: int,
    stop_ids: Collection[int],
    max_stop_ids: float = math.inf,
) -> None:
    """ValueError for a seed of more than 64 bits, too many stop ids, or a logit_bias of unknown
    tokens."""
    if not -(2**63) <= seed < 2**63:
        raise ValueError(
            f"seed = {seed} must lie between -2^63 and 2^63 - 1: seeds are 64-bit integers"
        )
    if len(stop_ids) > max_stop_ids:
        raise ValueError(f"{len(stop_ids)} stop ids are more than the {max_stop_ids} that fit")
    check_ids("logit_bias", dict(sampling.logit_bias), model.config.vocab_size)


def check_logprobs(num_logprobs: int | None, vocab_size: int) -> None:
    """ValueError for more log-probabilities of a token than there are tokens, or fewer than
    none."""
    if num_logprobs is not None and not 0 <= num_logprobs <= vocab_size:
        raise ValueError(
            f"logprobs = {num_logprobs} is more than the {vocab_size} tokens that there are, or"
            f" negative"
        )
