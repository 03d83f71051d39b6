"""A walk over a model's Linears that replaces, quantizes or packs them one by one.

named_linears           the Linears in the order in which they compute
replace_linears         the loop that replaces them
quantize_model          a model quantized in place
quantized_copy          a quantized draft that shares all other modules
pack_model              every Linear in the form that its kernel reads, the last step before
                        decoding
batch_invariant_rows    the number of rows up to which a row's bits do not depend on other rows
"""

import copy
from collections.abc import Callable, Iterator

import torch
from torch import nn

from weights.experts import pack_experts
from weights.formats import release_memory
from weights.linears import (
    FUSING_DEVICE,
    FusedLinear,
    PackedLinear,
    QuantizedEmbedding,
    QuantizedLinear,
    check_unpacked,
)


def named_linears(
    model: nn.Module, routers: bool = False
) -> Iterator[tuple[str, nn.Linear | QuantizedLinear]]:
    """(name, Linear) in the order in which they compute: "layers.0.attention.qkv", … "lm_head". The
    routers of experts, which are small, sensitive and never quantized, come only with `routers`."""
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | QuantizedLinear)
        and (routers or not name.endswith("router"))
    ]
    # Read late: the loop may replace modules.
    return ((name, model.get_submodule(name)) for name in names)


def replace_linears(
    model: nn.Module, make: Callable[[str, nn.Module], nn.Module | None], routers: bool = False
) -> nn.Module:
    """Replace each Linear by make(name, linear), one by one; None keeps it. A tied embedding then
    reads the quantized head. Forward hooks move along: they are tensor parallelism's
    collectives."""
    for name, linear in named_linears(model, routers):
        replacement = make(name, linear)
        if replacement is not None:
            replacement._forward_hooks.update(linear._forward_hooks)
            model.set_submodule(name, replacement)
            if (
                name == "lm_head"
                and isinstance(replacement, QuantizedLinear)
                and model.config.tie_embeddings
            ):
                model.set_submodule("embed", QuantizedEmbedding(replacement))
    return model


def quantized_linears(model: nn.Module) -> list[QuantizedLinear]:
    return [module for module in model.modules() if isinstance(module, QuantizedLinear)]


@torch.no_grad()
def pack_quantized(model: nn.Module) -> None:
    """Pack a model's quantized Linears. On a GPU, experts are stacked first, from their stored
    parts."""
    if any(linear.codes.device.type == "cuda" for linear in quantized_linears(model)):
        pack_experts(model)
    for linear in quantized_linears(model):
        linear.pack()


@torch.no_grad()
def quantize_model(
    model: nn.Module, scheme: str | None, head_scheme: str | None = None
) -> nn.Module:
    """Quantize a model in place, one matrix at a time; do not pack it. `head_scheme` is lm_head's;
    None: as it is."""

    def quantize(name: str, linear: nn.Module) -> QuantizedLinear | None:
        target_scheme = head_scheme if name == "lm_head" else scheme
        return None if target_scheme is None else QuantizedLinear.from_float(linear, target_scheme)

    return replace_linears(model, quantize)


def quantized_copy(model: nn.Module, scheme: str) -> nn.Module:
    """A draft with quantized Linears in its blocks that shares all other modules with the model.
    It is not packed: `pack_model(model, copy)` packs both. UserError for a packed model."""
    check_unpacked(model, "copied")
    shared = [module for module in model.modules() if next(module.children(), None) is None]
    duplicate = copy.deepcopy(
        model, {id(part): part for part in [*shared, *model.parameters(), *model.buffers()]}
    )
    return quantize_model(duplicate, scheme)


def pack_plain(name: str, linear: nn.Linear) -> nn.Module | None:
    """A plain Linear in the form that its device multiplies fastest; None: as it is."""
    if linear.weight.device.type == "cpu":
        return PackedLinear(linear)
    if linear.weight.device.type == FUSING_DEVICE:
        return FusedLinear(linear, is_activated=name.endswith("down"))
    return None


@torch.no_grad()
def pack_model(model: nn.Module, *others: nn.Module) -> nn.Module:
    """Pack each Linear for its kernel, one by one, so that only one matrix exists twice at a time.

    The last step before decoding: a packed model stays on its device and is not trained, saved or
    copied. `others` are models that share modules with it, such as a draft of some of its layers;
    shared Linears are packed once. An embedding that shares its head's plain weights keeps them.
    """
    packed_by_id = {}  # id of a plain Linear -> its packed form
    for module in (model, *others):
        pack_experts(module)

    def pack(name: str, linear: nn.Module) -> nn.Module | None:
        if isinstance(linear, QuantizedLinear):
            linear.pack()
        elif id(linear) not in packed_by_id:
            packed_by_id[id(linear)] = pack_plain(name, linear)
            release_memory()
        return packed_by_id.get(id(linear))

    for module in (model, *others):
        replace_linears(module, pack, routers=True)
    return model


def batch_invariant_rows(model: nn.Module) -> int:
    """The largest batch for which every product of a packed model is batch-invariant: a row's
    result is bitwise equal whatever the other rows are. 0 if some product has no such batch, or
    does not run on a CPU."""
    return min(
        (
            getattr(linear, "batch_invariant_rows", 0)
            for linear in model.modules()
            if hasattr(linear, "in_features")
        ),
        default=0,
    )
