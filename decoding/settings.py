"""The settings of a request and their defaults, without torch. decoding/sampling.py applies them.

Setting, SETTINGS   the list that flags, keys of JSON, the fields of Sampling and tensors follow
default_sampling    those of a program, where nothing else is asked for
check_numbers       UserError for what is no number, or out of range
new_tokens          how many tokens an answer may have
is_random, random_seed   seeds that nobody chose
"""

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import NamedTuple

from decoding.errors import UserError

FLOAT32_TINY = 2.0**-126  # the smallest normal number
FLOAT32_MAX = math.ldexp(1 - 2.0**-24, 128)
DEFAULT_K = 5  # tokens drafted a round
DEFAULT_NEW_TOKENS = 200
DEFAULT_TEMPERATURE = 0.8  # of programs and LLM
DEFAULT_LENGTH = 4096  # positions for prompts that come later, capped by the context
LARGEST_SEED = 2**62
RANDOM_SEED = -1  # stands for a seed that nobody chose, as in vLLM and llama.cpp


class Setting(NamedTuple):
    """A numeric field of Sampling. A new one takes a row of SETTINGS, a field there, and a filter
    or a penalty."""

    help: str
    rule: str  # ends the sentence "NAME = VALUE must …"
    is_valid: Callable[[float], bool]
    default: float | None
    neutral: float  # the value that changes nothing; None stands for it
    type: type = float


SETTINGS: dict[str, Setting] = {
    "temperature": Setting(
        "0: the most likely token",
        f"be 0 (greedy) or a number from {FLOAT32_TINY:.0e} on",
        lambda x: x == 0 or FLOAT32_TINY <= x <= FLOAT32_MAX,
        default=1.0,
        neutral=1.0,
    ),
    "top_k": Setting(
        "keep the N most likely tokens and those as likely as the last of them; 1: the most likely"
        " token, as temperature 0",
        "be a whole number of tokens; 0 for no limit",
        lambda x: 0 <= x < 2**62 and x == int(x),
        default=None,
        neutral=0,
        type=int,
    ),
    "top_p": Setting(
        "keep the most likely tokens that together reach this mass",
        "lie in (0, 1]; 1 for no limit",
        lambda x: 0 < x <= 1,
        default=None,
        neutral=1.0,
    ),
    "min_p": Setting(
        "keep tokens at least this likely relative to the most likely one",
        "lie in [0, 1]; 0 for no limit",
        lambda x: 0 <= x <= 1,
        default=None,
        neutral=0.0,
    ),
    "repetition_penalty": Setting(
        "divides positive logits of tokens in prompt or output, and multiplies negative ones",
        "lie in [0.01, 100]; 1 for none",
        lambda x: 0.01 <= x <= 100,
        default=1.0,
        neutral=1.0,
    ),
    "presence_penalty": Setting(
        "subtracted from the logits of tokens in the output",
        "lie in [-2, 2]; 0 for none",
        lambda x: -2 <= x <= 2,
        default=0.0,
        neutral=0.0,
    ),
    "frequency_penalty": Setting(
        "subtracted from a logit once for each time that its token is in the output",
        "lie in [-2, 2]; 0 for none",
        lambda x: -2 <= x <= 2,
        default=0.0,
        neutral=0.0,
    ),
}


def check_numbers(values: Mapping[str, float | None]) -> None:
    """UserError for what is no number, and for one out of range. None is neutral."""
    for name, setting in SETTINGS.items():
        value = values[name]
        is_valid = isinstance(value, Real) and setting.is_valid(value)
        if value is not None and not is_valid:
            raise UserError(f"{name} = {value!r} must {setting.rule}")


def default_sampling(settings: Mapping[str, float]) -> dict[str, float | None]:
    """A program's or an LLM's values of all SETTINGS, in which these replace the defaults.
    UserError for one that is out of range."""
    defaults = {name: setting.default for name, setting in SETTINGS.items()}
    numbers = {**defaults, "temperature": DEFAULT_TEMPERATURE, **settings}
    check_numbers(numbers)
    return numbers


def new_tokens(requested: int | None, prompt: Sequence[int], limit: int) -> int:
    """A number of new tokens, unchecked: by default as many as fit in `limit` positions, up to
    DEFAULT_NEW_TOKENS."""
    if requested is not None:
        return requested
    return max(1, min(DEFAULT_NEW_TOKENS, limit - len(prompt)))


def is_random(seed: object) -> bool:
    """Does this seed of a flag or a request ask for a random one?"""
    return type(seed) is int and seed == RANDOM_SEED


def random_seed() -> int:
    """A seed that nobody chose, below 2^53: JSON readers that hold numbers as doubles keep it."""
    return secrets.randbelow(2**53)
