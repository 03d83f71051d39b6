"""A Hugging Face folder -> the Source of its model.

    Folder          its files, each read once
    Layout          where a program stores a quantized matrix;  Layouts  one for each module
    Matrix          the stored tensors of one quantized matrix
    OwnLayout       one of our formats, as quantize.py and save_model write it; quantized/ has those
                    of other programs
    checked_source  the Source, all headers checked

A config.json says in which Layout matrices are quantized, and the tensors say which of them are. So
checked_source begins with the tensors that the model has in full precision, puts those of its
quantized matrices in their place, compares them all with the stored headers, and asks every Layout
which of our schemes holds its matrices exactly.
"""

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from decoding.errors import UserError
from loading.files import (
    SINGLE_FILE,
    Expected,
    check_headers,
    open_tensors,
    read_config_json,
    read_index,
    stored_dtype,
)
from loading.models import empty_model, expected_tensors
from loading.plain_files import error_prefix, refused
from loading.stored import Source, Stored
from loading.weight_names import stored_names
from model import Config
from weights.formats import FORMATS
from weights.walker import named_linears

HEAD = "lm_head"
EMBEDDING = "model.embed_tokens"
# Keys beside "scheme" in config.json's "quantization". Loading does not read "kept", the matrices
# in full precision, because the tensors show them.
OWN_KEYS = {"head", "method", "kept"}


class Folder:
    """A folder's files. Nothing is read before it is asked for."""

    def __init__(self, path: Path):
        self.path = path

    @cached_property
    def hf(self) -> dict:
        return read_config_json(self.path / "config.json")

    @cached_property
    def index(self) -> dict[str, str]:
        return read_index(self.path)

    @property
    def files(self) -> list[Path]:
        """model.safetensors, or those in the index, in the order of their names."""
        names = sorted({*self.index.values()}) or [SINGLE_FILE]
        return [self.path / name for name in names]

    @cached_property
    def tensors(self) -> dict[str, object]:
        return open_tensors(self.files)

    def as_stored(self, tensor) -> Stored:
        """A tensor that is not one of a quantized matrix."""
        return Stored(tuple(tensor.get_shape()), floats=partial(tensor.__getitem__, ...))


class Layout(Protocol):
    """Where a program stores a quantized matrix."""

    key: str  # the part whose tensor marks a matrix as quantized
    note: str  # for the user, when such a folder is loaded
    stacks_with_plain: bool  # may matrices in full precision be stacked with quantized ones?

    def tensors(self, m: "Matrix") -> dict[str, Expected]:
        """Part -> shape and types of its stored tensor."""

    def fit(self, matrices: Collection["Matrix"]) -> "Fit":
        """The Fit of all matrices in this layout."""

    def part(self, m: "Matrix", scheme: str, part: str) -> Tensor:
        """One part of a scheme that holds the matrix exactly."""

    def weight(self, m: "Matrix") -> Tensor:
        """The weights (out, in) in float32, where no scheme holds them."""


class Fit(NamedTuple):
    """The scheme of ours that holds a layout's matrices exactly, or None. Where none does, `near`
    is the scheme to quantize them to again, or None if they are read as floats."""

    exact: str | None = None
    near: str | None = None
    stored_type: str = ""  # what the matrices are stored in, where no scheme holds that
    reason: str = ""  # why none does


class Layouts(Protocol):
    """The Layout of every module of a folder."""

    keeps_plain: bool  # do matrices in full precision stay so, whatever --quantize says?
    unused: tuple[str, ...]  # endings of the names of tensors that are not read
    zeros: tuple[str, ...]  # tensors of a quantized matrix that may be there if they are zeros

    def of(self, module: str) -> Layout | None:
        """None: it is stored in full precision."""


class Matrix(NamedTuple):
    """One quantized matrix (out, in) of a folder, under its Hugging Face name."""

    name: str
    rows: int
    columns: int
    tensors: dict[str, object]  # all of the folder's: name -> stored tensor
    layout: Layout

    def stored(self, part: str):
        """None for a tensor that does not exist."""
        return self.tensors.get(f"{self.name}.{part}")

    def get(self, part: str) -> Tensor:
        return self.stored(part)[...]

    def shape_of_number(self, part: str) -> tuple[int, ...]:
        """The stored shape of a single number, which writers choose: () or (1,)."""
        stored = self.stored(part)
        shape = () if stored is None else tuple(stored.get_shape())
        return shape if math.prod(shape) == 1 else (1,)


@dataclass(frozen=True)
class OwnLayout:
    """The parts of one of our formats, bit for bit."""

    format: str
    note: str = ""
    key = "codes"
    stacks_with_plain = True

    def tensors(self, m: Matrix) -> dict[str, Expected]:
        shapes = FORMATS[self.format].shapes(m.rows, m.columns)
        return {part: (shape, (stored_dtype(dtype),)) for part, (shape, dtype) in shapes.items()}

    def fit(self, matrices: Collection[Matrix]) -> Fit:
        return Fit(self.format)

    def part(self, m: Matrix, scheme: str, part: str) -> Tensor:
        return m.get(part)


class OwnLayouts(NamedTuple):
    """The layouts of a folder of ours, by the entry "quantization" of its config.json."""

    block_scheme: str | None
    head_scheme: str | None

    keeps_plain = True
    unused = ()
    zeros = ()

    def of(self, module: str) -> OwnLayout | None:
        scheme = self.head_scheme if module == HEAD else self.block_scheme
        return OwnLayout(scheme) if scheme else None


def own_layouts(hf: dict, file: Path) -> OwnLayouts:
    """UserError names config.json, `file`."""
    entry = hf.get("quantization")
    schemes = list(FORMATS)  # a list, because values of other programs may not be hashable
    match entry:
        case None:
            return OwnLayouts(None, None)
        case {"scheme": scheme, **rest} if scheme in schemes and rest.keys() <= OWN_KEYS:
            head_scheme = rest.get("head")
            if head_scheme in (None, *schemes):
                return OwnLayouts(scheme, head_scheme)
    reason = f"is not supported; schemes: {', '.join(schemes)}"
    raise refused(f"{file}: quantization", entry, reason)


def checked_source(
    path: Path,
    config: Config,
    tensors: dict,
    layouts: Layouts,
    spare: Collection[str],
    as_stored: Callable[[object], Stored],
) -> Source:
    """The Source of a folder, or a GGUF file, whose quantized matrices have these layouts. `spare`:
    names that may be stored, whatever is expected; `as_stored`: plain tensor -> Stored. UserError
    names a tensor or a setting that cannot be read."""
    tensors = {name: tensors[name] for name in tensors if not name.endswith(layouts.unused)}
    model = empty_model(config, torch.float32)
    plain = expected_tensors(config, model)  # as if nothing were quantized
    linears = [name for name, _ in named_linears(model)]
    # The embedding too: a tied one may be stored as the quantized head.
    stacks = [stored_names(config, f"{name}.weight") for name in ("embed", *linears)]
    with error_prefix(path):
        matrices = find_matrices(layouts, tensors, plain, stacks, config.tie_embeddings)
        expected = with_quantized(plain, matrices)
        drop_zeros(expected, tensors, matrices.values(), layouts.zeros)
        check_headers(path, expected, tensors, config.tie_embeddings, spare)
        quantized = stored_matrices(matrices)
    stored = {name: quantized.get(name) or as_stored(tensors[name]) for name in plain}
    notes = {m.layout.note for m in matrices.values()}
    keeps_plain = layouts.keeps_plain and bool(matrices)
    heads = stored_names(config, "lm_head.weight")
    schemes = {tensor.scheme for weight, tensor in quantized.items() if weight not in heads}
    # The only scheme of the blocks: --quantize may not ask for another. The head may differ.
    scheme = schemes.pop() if keeps_plain and len(schemes) == 1 else None
    return Source(config, linears, stored, tuple(sorted(filter(None, notes))), scheme, keeps_plain)


def with_quantized(plain: dict[str, Expected], matrices: dict[str, Matrix]) -> dict[str, Expected]:
    """What a folder must hold: the tensors of its quantized matrices in place of their weights."""
    return {weight: header for weight, header in plain.items() if weight not in matrices} | {
        f"{m.name}.{part}": header
        for m in matrices.values()
        for part, header in m.layout.tensors(m).items()
    }


def drop_zeros(
    expected: dict[str, Expected], tensors: dict, matrices: Iterable[Matrix], parts: Iterable[str]
) -> None:
    """Delete from `tensors` those of zeros that some writers add to quantized matrices."""
    for m in matrices:
        for part in parts:
            name = f"{m.name}.{part}"
            if name in tensors and name not in expected and not m.get(part).float().any():
                del tensors[name]


def find_matrices(
    layouts: Layouts,
    tensors: dict,
    plain_tensors: dict[str, Expected],
    stacks: list[list[str]],
    tied: bool,
) -> dict[str, Matrix]:
    """Weight -> its Matrix, for the quantized ones. Each of `stacks` has the weights that make one
    matrix here. UserError names a matrix that is quantized in part."""
    matrices = {}
    keys = set()
    for stack in stacks:
        for weight in stack:
            name = stored_module(weight, tensors, tied)
            with error_prefix(name):
                layout = layouts.of(name)
            if layout is None:
                continue
            keys.add(layout.key)
            if f"{name}.{layout.key}" in tensors:
                (rows, columns), _ = plain_tensors[weight]
                matrices[weight] = Matrix(name, rows, columns, tensors, layout)
        quantized = [matrices[weight] for weight in stack if weight in matrices]
        plain = [weight for weight in stack if weight not in matrices]
        if quantized and plain and not quantized[0].layout.stacks_with_plain:
            raise UserError(
                f"{quantized[0].name} is quantized and {plain[0].removesuffix('.weight')} is not,"
                " but both are one matrix here: quantize both"
            )
    if keys and not matrices and layouts.keeps_plain:
        raise UserError(
            f"config.json says that it is quantized, but none of its tensors is called"
            f" *.{' or *.'.join(sorted(keys))}"
        )
    return matrices


def stored_module(weight: str, tensors: dict, tied: bool) -> str:
    """The name of a matrix in the folder. quantize.py writes a `tied` embedding under the head's
    name alone."""
    name = weight.removesuffix(".weight")
    if not tied or name != EMBEDDING or any(other.startswith(f"{name}.") for other in tensors):
        return name
    return HEAD


def stored_matrices(matrices: dict[str, Matrix]) -> dict[str, Stored]:
    """Weight -> what is stored of it. Equal layouts, which are hashable, have one Fit."""
    matrices_by_layout = {}
    for m in matrices.values():
        matrices_by_layout.setdefault(m.layout, []).append(m)
    fits = {layout: layout.fit(group) for layout, group in matrices_by_layout.items()}
    stored = {}
    for weight, m in matrices.items():
        layout = m.layout
        fit = fits[layout]
        shape = (m.rows, m.columns)
        if fit.exact:
            stored[weight] = Stored(shape, fit.exact, partial(layout.part, m, fit.exact))
        else:
            stored[weight] = Stored(
                shape,
                floats=partial(layout.weight, m),
                stored_type=fit.stored_type,
                near=fit.near,
                reason=fit.reason,
            )
    return stored
