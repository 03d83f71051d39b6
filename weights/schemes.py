"""The names of quantization schemes, without torch. weights/formats.py has their arithmetic.

Scheme                      what flags must know of a scheme
SCHEMES, STORED_SCHEMES     those to choose from, and those of other programs' files alone
scheme_of                   a name -> Scheme
check_scheme                UserError for a name that is neither
check_head                  UserError for a head in a scheme without one of the others
choose_head_scheme          --quantize_head -> the head's scheme
"""

from collections.abc import Collection
from typing import NamedTuple

from decoding.errors import UserError

MLX_BITS = (2, 3, 4, 6, 8)
MLX_GROUPS = (32, 64, 128)


class Scheme(NamedTuple):
    """What flags must know of a scheme before torch is imported."""

    head: str | None = None  # the scheme of lm_head beside it, unless the user chooses one
    has_ranges: bool = False  # do its groups have ranges, which `search` and `gptq` choose?


INT4 = Scheme(head="int8", has_ranges=True)  # a head in 16 bits would be a fifth of a step's bytes
SCHEMES = {
    "int8": Scheme(),
    "int4-g32": INT4,
    "int4-g64": INT4,
    "int4-g128": INT4,
    "fp8": Scheme(),
    "mxfp8": Scheme(),
    "mxfp6": Scheme(),
    "mxfp4": Scheme(),
}
# Those that other programs store with scales in float32, named NAME-float32.
FLOAT32_SCHEMES = ("int8", "int4-g32", "int4-g64", "int4-g128", "fp8")
STORED_SCHEMES = {f"{name}-float32": SCHEMES[name] for name in FLOAT32_SCHEMES}
OTHERS = (
    "q4_1",
    "q8_0",
    "q4_k",
    "q5_k",
    "q6_k",
    "fp8-g128",
    "fp8-g128-float32",
    "nvfp4",
    *(f"mlx{bits}-g{group}" for bits in MLX_BITS for group in MLX_GROUPS),
)
STORED_SCHEMES |= dict.fromkeys(OTHERS, Scheme())
HEAD_HELP = (
    "scheme for lm_head and a tied embedding; none keeps them as stored; default: int8 with"
    " --quantize int4-*, otherwise none"
)


def scheme_of(name: str | None) -> Scheme:
    """The Scheme of this name; of none, and of one that nobody has declared, the default."""
    return (SCHEMES | STORED_SCHEMES).get(name, Scheme())


def check_scheme(scheme: str, names: Collection[str] | None = None) -> None:
    """UserError for a scheme that is none of `names`, by default of those to choose from and those
    of files."""
    names = names or (*SCHEMES, *STORED_SCHEMES)
    if scheme not in names:
        raise UserError(
            f"quantization scheme {scheme!r} does not exist; there are {', '.join(names)}"
        )


def check_head(head_scheme: str | None, scheme: str | None) -> None:
    """UserError for a head in a scheme where the other matrices have none."""
    if head_scheme and not scheme:
        raise UserError(
            f"head {head_scheme} (--quantize_head) needs a scheme of the other matrices"
            " (--quantize)"
        )


def choose_head_scheme(scheme: str | None, choice: str | None) -> str | None:
    """The head's scheme for --quantize_head. None leaves the head as stored, as "none" does; "auto"
    takes the one that the scheme says."""
    if choice == "auto":
        return scheme_of(scheme).head
    return None if choice == "none" else choice
