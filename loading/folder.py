"""A Hugging Face folder -> the Source of its model.

    open_folder     the Source of a folder, all headers checked
    Matrix          the stored tensors of one quantized matrix
    Renamed         the parts of one of our formats, as we store them or under other names
    OwnLayouts      the layouts of a folder that quantize.py or save_model wrote

quantized/ has the layouts of other programs. A layout offers `key`, the tensor that marks a
quantized matrix; `tensors`, the headers of a matrix; `scheme`, that of several matrices; and the
readers `part` and `weight`.
"""

import math
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from decoding.errors import UserError
from loading.files import check_headers, stored_type
from loading.models import empty_model, expected_tensors
from loading.plain_files import error_prefix
from loading.stored import Source, Stored, in_floats
from loading.weight_names import sources
from model import Config
from weights.formats import FORMATS, check_finite
from weights.walker import named_linears

HEAD = "lm_head"
EMBEDDING = "model.embed_tokens"
UNSIGNED_WORDS = ("U32",)  # safetensors' name of a stored type
# Scales of activations, keys and values, which are not quantized here (detection.py's note).
UNUSED = (
    ".input_scale",
    ".activation_scale",
    ".output_scale",
    ".input_global_scale",
    ".input_zero_point",
    ".self_attn.q_scale",
    ".self_attn.k_scale",
    ".self_attn.v_scale",
    ".k_proj.k_scale",
    ".v_proj.v_scale",
)
# Tensors of zeros that some writers add to every matrix, as older AutoGPTQ did with biases.
ZEROS = ("bias", "weight_zero_point")


class Matrix(NamedTuple):
    """One quantized matrix (out, in) of a folder, under its Hugging Face name."""

    name: str
    rows: int
    columns: int
    tensors: dict  # name -> stored tensor
    layout: object

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
class Renamed:
    """The parts of one of our formats, bit for bit. `names`: our part -> the stored tensor and its
    types; empty for folders of our own."""

    format: str
    names: dict[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict, hash=False)
    note: str | None = None

    @property
    def key(self) -> str:
        name, _ = self.names.get("scale", ("codes", ()))
        return name

    @property
    def stacks_with_plain(self) -> bool:
        """May matrices in full precision be stacked with quantized ones?"""
        return not self.names

    def tensors(self, m: Matrix) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
        headers = {}
        for part, (shape, dtype) in FORMATS[self.format].shapes(m.rows, m.columns).items():
            name, types = self.names.get(part) or (part, (stored_type(dtype),))
            if self.names and part == "global_scale":
                shape = m.shape_of_number(name)
            if self.names and types == UNSIGNED_WORDS:  # of four bytes
                shape = (m.rows, shape[1] // 4)
            headers[name] = (shape, types)
        return headers

    def scheme(self, matrices: Iterable[Matrix]) -> tuple[str, None]:
        return self.format, None

    def part(self, m: Matrix, scheme: str, part: str) -> Tensor:
        if not self.names:
            return m.get(part)
        name, _ = self.names[part]
        stored = m.get(name)
        if name == "weight_scale_2":
            stored = 1 / stored
        if part == "codes" and stored.is_floating_point():  # ours would read NaN as a number
            check_finite(stored, f"{m.name}.{name}: ")
        shape, dtype = FORMATS[scheme].shapes(m.rows, m.columns)[part]
        converted = stored.to(dtype) if dtype.is_floating_point else stored.view(dtype)
        return converted.expand(shape)


class OwnLayouts(NamedTuple):
    """The layouts of a folder of ours, by the entry "quantization" of its config.json."""

    block_scheme: str | None
    head_scheme: str | None
    kept: tuple[str, ...] = ()  # our names of matrices in full precision

    # Are matrices in full precision to stay so, and all in one scheme?
    is_fixed = True

    def of(self, module: str) -> Renamed | None:
        scheme = self.head_scheme if module == HEAD else self.block_scheme
        return Renamed(scheme) if scheme else None


def own_layouts(hf: dict, file: Path) -> OwnLayouts:
    """UserError names config.json, `file`."""
    entry = hf.get("quantization")
    if entry is None:
        return OwnLayouts(None, None)
    schemes = list(FORMATS)  # a list, because values of other programs may not be hashable
    keys = set(entry) if isinstance(entry, dict) else set()
    if "scheme" in keys <= {"scheme", "head", "method", "kept"}:
        head_scheme = entry.get("head")
        if entry["scheme"] in schemes and head_scheme in (None, *schemes):
            return OwnLayouts(entry["scheme"], head_scheme, tuple(entry.get("kept") or ()))
    raise UserError(
        f"{file}: quantization = {reprlib.repr(entry)} is not supported; schemes:"
        f" {', '.join(schemes)}"
    )


def open_folder(
    path: Path,
    config: Config,
    tensors: dict,
    layouts,
    spare: Iterable[str] = (),
) -> Source:
    """A folder in these layouts: OwnLayouts, or another program's detection.Layouts. `spare` as in
    check_headers. UserError names a tensor or a setting that cannot be read."""
    is_own = isinstance(layouts, OwnLayouts)
    tensors = used_tensors(tensors, is_own)
    model = empty_model(config, torch.float32)
    headers = expected_tensors(config, model)
    stored = in_floats(headers, lambda name: tensors[name][...])
    linears = [name for name, _ in named_linears(model)]
    stacks = [sources(config, f"{name}.weight") for name in ("embed", *linears)]
    with error_prefix(path):
        matrices = find_matrices(layouts, tensors, headers, stacks, config.tie_embeddings)
        expect_quantized(headers, matrices)
        drop_zeros(headers, tensors, () if is_own else matrices.values())
        check_headers(path, headers, tensors, config.tie_embeddings, spare)
        stored |= stored_matrices(matrices)
    notes = {m.layout.note for m in matrices.values()} | {mixed_note(stacks, stored)}
    notes |= {one.note for one in stored.values() if not one.near}
    is_fixed = layouts.is_fixed and bool(matrices)
    inner = {weight for stack in stacks[1:] for weight in stack}
    schemes = {stored[weight].scheme for weight in inner & matrices.keys()}
    if is_own:
        schemes = {layouts.block_scheme}
    scheme = schemes.pop() if is_fixed and len(schemes) == 1 else None
    return Source(config, linears, stored, tuple(sorted(filter(None, notes))), scheme, is_fixed)


def mixed_note(stacks: list[list[str]], stored: dict[str, Stored]) -> str:
    """What a user should know of experts whose gate and up are stored in unlike schemes."""
    stacks = [stack for stack in stacks if ".experts." in stack[0]]
    count = sum(len({stored[weight].scheme for weight in stack}) > 1 for stack in stacks)
    if not count:
        return ""
    return f"{count} matrices whose parts have several schemes load as plain weights"


def used_tensors(tensors: dict, is_own: bool) -> dict:
    """Without other programs' scales of activations."""
    unused = () if is_own else UNUSED
    return {name: tensors[name] for name in tensors if not name.endswith(unused)}


def expect_quantized(headers: dict[str, tuple], matrices: dict[str, Matrix]) -> None:
    """Put the headers of quantized matrices in place of their weights'."""
    for weight, m in matrices.items():
        del headers[weight]
        headers |= {f"{m.name}.{part}": header for part, header in m.layout.tensors(m).items()}


def drop_zeros(headers: dict[str, tuple], tensors: dict, matrices: Iterable[Matrix]) -> None:
    """Leave out tensors of zeros that some writers add to quantized matrices."""
    for m in matrices:
        for part in ZEROS:
            name = f"{m.name}.{part}"
            if name in tensors and name not in headers and not m.get(part).float().any():
                del tensors[name]


def find_matrices(
    layouts, tensors: dict, headers: dict[str, tuple], stacks: list[list[str]], tied: bool
) -> dict[str, Matrix]:
    """The quantized ones among `stacks`, the names of weights that make one matrix here. UserError
    names a matrix that is quantized in part."""
    matrices = {}
    keys = set()
    for stack in stacks:
        for weight in stack:
            name = stored_name(weight, tensors, tied)
            with error_prefix(name):
                layout = layouts.of(name)
            if layout is None:
                continue
            keys.add(layout.key)
            if f"{name}.{layout.key}" in tensors:
                (rows, columns), _ = headers[weight]
                matrices[weight] = Matrix(name, rows, columns, tensors, layout)
        quantized = [matrices[weight] for weight in stack if weight in matrices]
        plain = [weight for weight in stack if weight not in matrices]
        if quantized and plain and not quantized[0].layout.stacks_with_plain:
            raise UserError(
                f"{quantized[0].name} is quantized and {plain[0].removesuffix('.weight')} is not,"
                " but both are one matrix here: quantize both"
            )
    if keys and not matrices and layouts.is_fixed:
        raise UserError(
            f"config.json says that it is quantized, but none of its tensors is called"
            f" *.{' or *.'.join(sorted(keys))}"
        )
    return matrices


def stored_name(weight: str, tensors: dict, tied: bool) -> str:
    """The name of a matrix in the folder. quantize.py writes a `tied` embedding under the head's
    name alone."""
    name = weight.removesuffix(".weight")
    if not tied or name != EMBEDDING or any(other.startswith(f"{name}.") for other in tensors):
        return name
    return HEAD


def stored_matrices(matrices: dict[str, Matrix]) -> dict[str, Stored]:
    """All matrices of a layout have the same scheme."""
    matrices_by_layout = {}
    for m in matrices.values():
        matrices_by_layout.setdefault(m.layout, []).append(m)
    schemes = {layout: layout.scheme(group) for layout, group in matrices_by_layout.items()}
    stored = {}
    for weight, m in matrices.items():
        layout = m.layout
        scheme, reason = schemes[layout]
        shape = (m.rows, m.columns)
        if reason:
            stored[weight] = Stored(
                shape, floats=partial(layout.weight, m), near=scheme, note=reason
            )
        else:
            stored[weight] = Stored(shape, scheme, partial(layout.part, m, scheme))
    return stored
