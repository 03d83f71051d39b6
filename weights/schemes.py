"""The names of quantization schemes, without torch. weights/formats.py has their arithmetic.

SCHEMES, STORED_SCHEMES     those to choose from, and those of other programs' files alone
check_scheme                UserError for a name that is neither
check_head                  UserError for a head in a scheme without one of the others
choose_head_scheme          --quantize_head -> the head's scheme
"""

from collections.abc import Collection

from decoding.errors import UserError

MLX_BITS = (2, 3, 4, 6, 8)
MLX_GROUPS = (32, 64, 128)
SCHEMES = ("int8", "int4-g32", "int4-g64", "int4-g128", "fp8", "mxfp8", "mxfp6", "mxfp4")
# Those that other programs store with scales in float32, named NAME-float32.
FLOAT32_SCHEMES = ("int8", "int4-g32", "int4-g64", "int4-g128", "fp8")
STORED_SCHEMES = (
    *(f"{name}-float32" for name in FLOAT32_SCHEMES),
    "q4_1",
    "q8_0",
    "q4_k",
    "fp8-g128",
    "fp8-g128-float32",
    "nvfp4",
    *(f"mlx{bits}-g{group}" for bits in MLX_BITS for group in MLX_GROUPS),
)
HEAD_HELP = (
    "scheme for lm_head and a tied embedding; none keeps them as stored; default: int8 with"
    " --quantize int4-*, otherwise none"
)


def check_scheme(scheme: str, names: Collection[str] = (*SCHEMES, *STORED_SCHEMES)) -> None:
    """UserError for a scheme that is none of `names`."""
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
    takes int8 beside int4, where a head in 16 bits would be a fifth of a step's bytes."""
    if choice == "auto":
        return "int8" if scheme is not None and scheme.startswith("int4") else None
    return None if choice == "none" else choice
