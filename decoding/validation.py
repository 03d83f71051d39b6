"""The checks of arguments, from host integers, before anything runs.

    is_whole            a number without a fraction
    value_per_row       one value, or one a row -> a list
    check_lengths       whether prompts and new tokens fit in the context
    PromptError         its error, which has the prompt's row and the reason apart
    check_seed          a seed
    check_settings      seed, number of stop ids and logit_bias of a request
    check_stop_ids      stop ids as integers
    check_request       all of this, for one prompt
    check_logprobs      the number of top tokens to record
    check_count         a number of rows or positions
    stop_strings, bias_pairs, check_schema      settings of a request that come in several forms
    check_template, check_messages      a conversation and the settings of its template

A UserError names the argument, or the row, and the number that does not fit.
"""

import json
import math
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Integral, Real
from operator import index

from decoding.errors import UserError

# The names in chat_template_kwargs that this project sets itself.
RESERVED = ("messages", "tools", "add_generation_prompt", "prefill", "self", "tokenizer")


class PromptError(UserError):
    """A prompt that cannot be decoded. The message is the `reason`, after the number of the row."""

    def __init__(self, row: int, reason: str):
        super().__init__(f"prompt {row} {reason}")
        self.row = row
        self.reason = reason


def reason_of(error: UserError) -> str:
    """The message for one prompt, which needs no number."""
    return error.reason if isinstance(error, PromptError) else str(error)


def is_whole(value) -> bool:
    """Is it a number without a fraction, as 5 and 5.0 are?"""
    return isinstance(value, Real) and value % 1 == 0


def value_per_row(name: str, value, rows: int) -> list:
    """`value` for each of `rows` rows, or a sequence of values as a list."""
    values = list(value) if hasattr(value, "__len__") else [value] * rows
    if len(values) != rows:
        raise UserError(f"{name}: {len(values)} for {rows} prompts; give one, or one a prompt")
    return values


def check_lengths(
    model, prompts: Sequence[Sequence[int]], budgets: Sequence[int], limit: int
) -> None:
    """PromptError unless every prompt and its new tokens fit in `limit` positions. UserError for a
    number of new tokens that is none, and without prompts."""
    if not prompts:
        raise UserError("no prompt: give at least one")
    V = model.config.vocab_size
    for row, (prompt, new) in enumerate(zip(prompts, budgets, strict=True)):
        if not is_whole(new) or new < 1:
            raise UserError(f"max_new_tokens = {new!r} must be a number of tokens, at least 1")
        if not len(prompt):
            raise PromptError(
                row, "is empty: it needs a token, because the model has no BOS to start from"
            )
        total = len(prompt) + new
        if total > limit:
            raise PromptError(
                row,
                f"has {len(prompt)} tokens; with {new} new ones that is {total}, over the limit of"
                f" {limit} positions: shorten the prompt, or lower max_new_tokens",
            )
        if problem := unknown_id(prompt, V):
            raise PromptError(row, problem)


def unknown_id(ids: Iterable[int], vocab_size: int) -> str:
    """What is wrong with the first id that the model does not have; "" if it has all of them."""
    for id in ids:
        try:
            is_known = int(id) == id and 0 <= id < vocab_size
        except (TypeError, ValueError, OverflowError):
            is_known = False
        if not is_known:
            return f"holds token id {id!r:.99}, outside the vocabulary of {vocab_size}"
    return ""


def check_stop_ids(stop_ids: Iterable[int]) -> frozenset[int]:
    """The stop ids as Python integers, given a tensor's or numpy's too. UserError for an id that is
    no integer of 64 bits."""
    try:
        return frozenset(array("q", map(index, stop_ids)))
    except (TypeError, OverflowError):
        raise UserError(f"stop_ids = {stop_ids!r:.99} must be token ids") from None


def check_seed(seed: int) -> None:
    """UserError for a seed of more than 64 bits."""
    if not is_whole(seed) or not -(2**63) <= seed < 2**63:
        raise UserError(
            f"seed = {seed!r} must lie between -2^63 and 2^63 - 1: seeds are 64-bit integers"
        )


def check_settings(
    model,
    sampling,
    seed: int,
    stop_ids: Collection[int],
    max_stop_ids: float = math.inf,
) -> None:
    """UserError for a seed of more than 64 bits, too many stop ids, or a logit_bias of unknown
    tokens."""
    check_seed(seed)
    if len(stop_ids) > max_stop_ids:
        raise UserError(f"{len(stop_ids)} stop ids are more than the {max_stop_ids} that fit")
    if problem := unknown_id(dict(sampling.logit_bias), model.config.vocab_size):
        raise UserError(f"logit_bias {problem}")


def check_request(
    model,
    prompt: Sequence[int],
    max_new_tokens: int,
    sampling,
    seed: int,
    stop_ids: Iterable[int],
) -> frozenset[int]:
    """UserError for what a plain loop of one prompt cannot decode in the model's context; returns
    `check_stop_ids`."""
    ids = check_stop_ids(stop_ids)
    check_lengths(model, [prompt], [max_new_tokens], model.config.max_seq_length)
    check_settings(model, sampling, seed, ids)
    return ids


def check_logprobs(num_logprobs: int | None, vocab_size: int) -> None:
    """UserError for more log-probabilities of a token than there are tokens, or fewer than
    none."""
    if num_logprobs is None:
        return
    check_count("logprobs", num_logprobs, 0)
    if num_logprobs > vocab_size:
        raise UserError(
            f"logprobs = {num_logprobs} is more than the {vocab_size} tokens that there are"
        )


def check_count(name: str, value: object, minimum: int) -> None:
    if not isinstance(value, Integral):
        raise UserError(f"{name} = {value!r:.99} must be a whole number")
    if value < minimum:
        raise UserError(f"{name} = {value} must be at least {minimum}")


def stop_strings(stop: object) -> list[str]:
    """Strings before which an answer ends: of one string, of several, or of None."""
    stops = [stop] if isinstance(stop, str) else stop
    is_list = isinstance(stops, list | tuple | set | frozenset)
    if stops is not None and not (is_list and all(isinstance(text, str) for text in stops)):
        raise UserError(f"stop = {stop!r:.99} must be a string or a list of strings")
    return list(stops or ())


def bias_pairs(logit_bias: object) -> tuple[tuple[int, float], ...]:
    """Sampling's logit_bias, of pairs, of {token id: bias} or of None."""
    pairs = logit_bias.items() if isinstance(logit_bias, Mapping) else logit_bias
    try:
        return tuple((index(id), bias + 0.0) for id, bias in pairs or ())
    except (TypeError, ValueError):
        raise UserError(f"logit_bias = {logit_bias!r:.99} must map token ids to numbers") from None


def check_schema(schema: object) -> None:
    try:
        is_schema = isinstance(schema, dict) and bool(json.dumps(schema))
    except (TypeError, ValueError):
        is_schema = False
    if not is_schema:
        raise UserError(
            f"schema = {schema!r:.99} must be a JSON schema as a dict; a pydantic model's is"
            " model_json_schema()"
        )


def check_template_kwargs(names: Mapping) -> None:
    """UserError for a variable of the chat template that this project sets itself."""
    if wrong := [name for name in RESERVED if name in names]:
        raise UserError(f"chat_template_kwargs: {', '.join(wrong)} cannot be given there")


def check_template(
    is_conversation: bool, tools: object = None, prefill: object = None, chat_template_kwargs=None
) -> dict:
    """The settings of a conversation's template, as loading.tokenizer.conversation_ids takes them.
    UserError for those of a prompt that is none."""
    settings = {"tools": tools, "prefill": prefill, "chat_template_kwargs": chat_template_kwargs}
    settings = {name: value for name, value in settings.items() if value}
    types = {"tools": (list, "list"), "prefill": (str, "string")}
    for name, value in settings.items():
        expected, noun = types.get(name, (Mapping, "dict"))
        if not isinstance(value, expected):
            raise UserError(f"{name} = {value!r:.99} must be a {noun}")
    if settings and not is_conversation:
        raise UserError(f"{', '.join(settings)}: only messages have a chat template")
    names = settings.pop("chat_template_kwargs", {})
    check_template_kwargs(names)
    return settings | dict(names)


def check_messages(messages: object) -> None:
    """UserError for what is no list of dicts, or an empty one."""
    is_list = isinstance(messages, Sequence) and bool(messages)
    if not is_list or not all(isinstance(message, dict) for message in messages):
        raise UserError(
            f'messages = {messages!r:.99} must be a list of {{"role", "content"}}, at least one;'
            " generate takes texts"
        )
