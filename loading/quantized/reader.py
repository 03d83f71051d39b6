"""Folders that other programs quantized: their stored tensors -> the parts of one of our formats.

    find_matrices       the quantized matrices of a folder
    expected_tensors    the tensors that the folder must hold for them
    choose_schemes      the scheme of ours that holds the matrices of a layout
    stored_form         the scheme of every Linear
    tensor_reader       Hugging Face name -> our part or weight
    compressed_tensors_config, compressed_tensors_part      our format -> the one that other
    programs read

A part is converted when it is read, one matrix at a time. detection.py reads config.json;
layouts.py and floats.py know where each program keeps codes, scales and zero points.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from decoding.errors import UserError
from loading.plain_files import error_prefix
from loading.quantization import StoredForm, split_schemes
from loading.quantized.detection import Layouts
from loading.quantized.layouts import Matrix
from weights.formats import FORMATS, Fp8, Int8, dequantize_tensor

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


class QuantizedMatrices(NamedTuple):
    """The quantized matrices of a folder."""

    matrices: dict[str, Matrix]  # by Hugging Face name
    stacks: dict[str, list[Matrix]]  # those that make a Linear, by our name; [] if it is plain


def find_matrices(
    layouts: Layouts,
    tensors: dict,
    shapes: dict[str, dict[str, tuple[int, int]]],
) -> QuantizedMatrices:
    """The quantized ones among `shapes`: our name of a matrix -> {Hugging Face module stacked in
    it: (out, in)}. UserError names a matrix that is quantized in part."""
    matrices = {}
    stacks = {}
    keys = set()
    for ours, shape_by_name in shapes.items():
        stack = []
        plain_names = []
        for name, shape in shape_by_name.items():
            with error_prefix(name):
                layout = layouts.of(name)
            keys.add(layout.key)
            if f"{name}.{layout.key}" in tensors:
                matrices[name] = Matrix(name, *shape, tensors, layout)
                stack.append(matrices[name])
            else:
                plain_names.append(name)
        if stack and plain_names and not stack[0].layout.stacks_with_plain:
            raise UserError(
                f"{stack[0].name} is quantized and {plain_names[0]} is not, but both are one matrix"
                " here: quantize both"
            )
        if ours != "embed":
            stacks[ours] = stack
    if not matrices:
        raise UserError(
            f"config.json says that it is quantized, but none of its tensors is called"
            f" *.{' or *.'.join(sorted(keys))}"
        )
    return QuantizedMatrices(matrices, stacks)


def expected_tensors(
    quantized: QuantizedMatrices, plain: dict[str, tuple], tensors: dict
) -> dict[str, tuple]:
    """Tensor -> (shape, supported stored types) of the folder; `plain` has those of the model in
    full precision.

    Deletes from `tensors`, a copy, unused scales and tensors of zeros that some writers add.
    """
    for name in [name for name in tensors if name.endswith(UNUSED)]:
        del tensors[name]
    expected = dict(plain)
    for name, m in quantized.matrices.items():
        del expected[f"{name}.weight"]
        for part, header in m.layout.tensors(m).items():
            expected[f"{name}.{part}"] = header
        for extra in (f"{name}.{part}" for part in ZEROS):
            if extra in tensors and extra not in expected and not tensors[extra][...].float().any():
                del tensors[extra]
    return expected


def choose_schemes(quantized: QuantizedMatrices) -> dict:
    """Layout -> (the scheme that holds all its matrices, None), or (the nearest one, reason)."""
    matrices_by_layout = {}
    for m in quantized.matrices.values():
        matrices_by_layout.setdefault(m.layout, []).append(m)
    return {layout: layout.scheme(group) for layout, group in matrices_by_layout.items()}


def exact_schemes(stacks: dict, schemes: dict) -> dict[str, str]:
    """Name -> the scheme that holds its stack exactly, or that of each of its sources."""
    exact = {}
    for name, stack in stacks.items():
        results = [schemes[m.layout] for m in stack]
        # A stack with plain matrices lacks those, and its numbers would be wrong.
        is_complete = len({*results}) == 1 or not stack[0].layout.stacks_with_plain
        if is_complete and not any(reason for _, reason in results):
            exact |= split_schemes(name, [scheme for scheme, _ in results])
    return exact


def stored_form(quantized: QuantizedMatrices, schemes: dict) -> StoredForm:
    """One scheme, if it holds all matrices exactly. Otherwise one for each Linear that a scheme
    holds exactly, and a near scheme for all others, or plain weights if none is near."""
    notes = sorted({layout.note for layout in schemes if layout.note})
    stacks = {name: stack for name, stack in quantized.stacks.items() if stack}
    unquantized = dict.fromkeys(quantized.stacks.keys() - stacks.keys() - {"lm_head"})
    exact = exact_schemes(stacks, schemes)
    num_plain = sum(name not in exact and f"{name}.0" not in exact for name in stacks)
    names = {*exact.values()}
    if num_plain == 0 and len(names) == 1:
        return StoredForm(names.pop(), exact.get("lm_head"), unquantized, notes=tuple(notes))
    near = None
    reasons = [result for result in schemes.values() if result[1]]
    if reasons:
        near, reason = max(reasons)  # int8 rather than int4
        notes.append(reason)
    elif num_plain:
        notes.append(f"{num_plain} matrices whose parts have several schemes load as plain weights")
    return StoredForm(overrides=unquantized | exact, requantize_to=near, notes=tuple(notes))


def tensor_reader(
    quantized: QuantizedMatrices, schemes: dict, read: Callable[[str], Tensor]
) -> Callable[[str], Tensor]:
    """`read` (name -> stored tensor), extended by the schemes' parts, or the weights, of quantized
    matrices."""
    matrices = quantized.matrices

    def read_converted(name: str) -> Tensor:
        module, _, part = name.rpartition(".")
        if module == "lm_head" and part != "weight" and module not in matrices:
            module = "model.embed_tokens"  # a part of a tied head
        if module not in matrices or part == "bias":
            return read(name)
        m = matrices[module]
        scheme, reason = schemes[m.layout]
        if part != "weight":
            return m.layout.part(m, scheme, part)
        if reason:
            return m.layout.weight(m)
        names = FORMATS[scheme].shapes(m.rows, m.columns)
        return dequantize_tensor({part: m.layout.part(m, scheme, part) for part in names}, scheme)

    return read_converted


def compressed_tensors_config(format: Int8 | Fp8, has_head: bool) -> dict:
    """The quantization_config with which compressed-tensors reads a folder in `format`."""
    element_type = "float" if format.code_dtype.is_floating_point else "int"
    weights = {
        "num_bits": 8,
        "type": element_type,
        "strategy": "channel",
        "symmetric": True,
        "dynamic": False,
    }
    group = {"targets": ["Linear"], "format": f"{element_type}-quantized", "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{element_type}-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [] if has_head else ["lm_head"],
    }


def compressed_tensors_part(name: str, part: Tensor) -> tuple[str, Tensor]:
    """compressed-tensors' (name, tensor) of a part of our int8 or fp8."""
    module, _, part_name = name.rpartition(".")
    if part_name == "codes":
        return f"{module}.weight", part
    return f"{module}.weight_scale", part[:, None]
