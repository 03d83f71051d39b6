"""What fills a model: tensors as they are stored, in whatever file and format.

Stored      one of them, with the functions that read its parts or its weights
Source      a checkpoint's config and all that is stored in it
in_floats   tensors in full precision, by a function that reads them
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from loading.weight_names import stored_names
from model import Config
from weights.formats import FORMATS, dequantize_tensor


@dataclass(frozen=True)
class Stored:
    """A matrix or vector as it is stored: in full precision, in a format that one of our schemes
    holds bit for bit, or in one that none of them holds. Nothing is read before it is asked for.

    shape         of its weights
    scheme        the scheme that holds it, or None
    part          reads a part of that scheme, by the part's name
    floats        reads the weights; it may be absent beside a scheme, whose parts give them too
    stored_type   what a quantized one is stored in, for messages; "" if that is the scheme
    near          where no scheme holds it: one to quantize it to, or None to load it as floats
    reason        why none holds it
    """

    shape: tuple[int, ...]
    scheme: str | None = None
    part: Callable[[str], Tensor] | None = None
    floats: Callable[[], Tensor] | None = None
    stored_type: str = ""
    near: str | None = None
    reason: str = ""

    @property
    def is_float(self) -> bool:
        """Is it stored in full precision?"""
        return not self.scheme and not self.stored_type

    def weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weights as floats. Those of a scheme are rounded to `dtype` as they are decoded, so
        that no float32 copy of the matrix is made; others come as they are read."""
        if self.scheme is None:
            return self.floats()
        names = FORMATS[self.scheme].shapes(*self.shape)
        return dequantize_tensor({name: self.part(name) for name in names}, self.scheme, dtype)


class Source(NamedTuple):
    """A checkpoint, all headers checked.

    `config` differs from config.json's where a head is stored that is not the embedding.
    """

    config: Config
    linears: list[str]  # our names, in the order in which they compute
    tensors: dict[str, Stored]  # by the Hugging Face name of a weight, bias, …
    notes: tuple[str, ...] = ()  # for the user
    # The scheme of all blocks, where the folder says that it is quantized to this one.
    scheme: str | None = None
    keeps_plain: bool = False  # do matrices in full precision stay so, with --quantize too?

    def of(self, linear: str) -> list[Stored]:
        """What is stored of a Linear, of a fused one by source."""
        return [self.tensors[weight] for weight in stored_names(self.config, f"{linear}.weight")]

    @property
    def nearest(self) -> tuple[str | None, str]:
        """`near` and `reason` of the tensors that no scheme holds; int8 goes before int4."""
        inexact = [(tensor.near, tensor.reason) for tensor in self.tensors.values() if tensor.near]
        return min(inexact, key=lambda pair: pair[0] != "int8", default=(None, ""))


def in_floats(headers: Mapping[str, tuple], read: Callable[[str], Tensor]) -> dict[str, Stored]:
    """Name -> a tensor in full precision, for `headers`: name -> (shape, stored types)."""
    return {name: Stored(shape, floats=partial(read, name)) for name, (shape, _) in headers.items()}
