"""The interface of a tokenizer library to the rest of the project.

Runtime             text -> ids, id -> bytes, special and added tokens
end_ids             the tokens that end a turn or a text
library_errors      every exception of a library, Rust's panics among them, as a UserError
"""

import contextlib
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path

from decoding.errors import UserError
from loading.plain_files import one_line

# Tokens that end a turn or a text. A chat model stops at each, although its config often lists only
# one.
END_NAMES = """
<|end_of_text|> <|eot_id|> <|eom_id|> <|im_end|> <|endoftext|> <|end|> <|end_of_turn|>
<end_of_turn> <｜end▁of▁sentence｜>
"""
# Of gpt-oss and of Solar Open, where <|end|> ends a message, such as the analysis, and the answer
# follows.
MESSAGE_ENDS = ({"<|call|>", "<|return|>"}, {"<|calls|>", "<|flush|>"})


# Two noncharacters, put inside a name, keep it from becoming a token.
APART = "\ufdd1\ufdd0"


class Runtime(ABC):
    """Text <-> ids of one vocabulary. Special tokens have no bytes; literals, the other added
    tokens, do."""

    apart = APART  # inside a name it turns a token into text; parse_special drops it
    strip_first_space = False  # does the library put a space before every text?
    add_bos = True  # are `leading_ids` put in front unless the caller says otherwise?

    def __init__(
        self,
        vocab_size: int,
        specials: dict[str, int],
        literals: dict[str, int],
        bos_id: int | None,
        eos_id: int | None,
        literals_are_raw: bool = False,
    ):
        """`bos_id` and `eos_id` are special tokens, or there are none."""
        self._lock = threading.Lock()  # a library encodes in one mode at a time
        self.vocab_size = vocab_size  # one more than the largest id
        self.specials = specials  # name -> id, matched with parse_special alone
        self.literals = literals  # name -> id, matched in any text
        names = {id: name for name, id in specials.items()}
        self.special_names = names
        self.bos_id = bos_id if bos_id in names else None
        self.leading_ids = [bos_id] if bos_id in names else []
        self.stop_ids = end_ids(specials | literals) | ({eos_id} & names.keys())
        # Of a chat template, unless the settings name these tokens otherwise.
        ids = {"bos_token": bos_id, "eos_token": eos_id}
        self.variables = {key: names[id] for key, id in ids.items() if id in names}
        # Bytes of added tokens that the library does not decode.
        self.bytes_by_id = {id: name.encode() for name, id in literals.items() if literals_are_raw}
        self.bytes_by_id |= dict.fromkeys(names, b"")

    def __getstate__(self) -> dict:
        return vars(self) | {"_lock": None}  # which cannot be copied

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state, _lock=threading.Lock())

    @abstractmethod
    def encode(self, text: str, parse_special: bool = False) -> list[int]:
        """Ids of text, in which the names of special tokens are text, or, with `parse_special`,
        these tokens. No BOS."""

    def to_bytes(self, id: int) -> bytes:
        """The bytes of an id amid others; b"" for a special token and for an id that no token
        has."""
        return self.bytes_by_id[id] if id in self.bytes_by_id else self.token_bytes(id)

    def piece(self, id: int) -> bytes:
        """The bytes of an id, or a special token's name."""
        return self.special_names.get(id, "").encode() or self.to_bytes(id)

    @abstractmethod
    def token_bytes(self, id: int) -> bytes:
        """`to_bytes` of an id that is no special token."""


def end_ids(ids: Mapping[str, int]) -> set[int]:
    """The tokens that end a turn or a text, of those with names."""
    names = END_NAMES.split()
    for ends in MESSAGE_ENDS:
        if ids.keys() >= ends:
            names = [*ends, "<|endoftext|>"]
    return {ids[name] for name in names if name in ids}


def replace_surrogates(text: str) -> str:
    """The text with a question mark for each lone surrogate, which UTF-8 cannot encode."""
    return text.encode(errors="replace").decode()


def byte_of(piece: str) -> bytes | None:
    """The byte of a piece such as <0x0A>; None for other pieces."""
    match = re.fullmatch("<0x([0-9A-Fa-f]{2})>", piece)
    return bytes.fromhex(match[1]) if match else None


@contextlib.contextmanager
def library_errors(file: Path, message: str) -> Iterator[None]:
    """Turn every exception of a library into a UserError, which names the file or folder. Rust's
    panics are BaseExceptions."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, AttributeError, ImportError, NameError):
        raise  # the last three are our own mistakes
    except BaseException as error:
        if isinstance(error, UserError) and str(file) in str(error):
            raise
        raise UserError(f"{file}: {message}: {one_line(error)}") from None
