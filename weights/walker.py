"""The Linears of a model: one loop finds them, replaces them, quantizes them and packs them for their kernels.

    matrices, replace_linears         the Linears in the order in which they compute; the only loop that swaps them
    quantize_model, quantized_copy    a model quantized in place; a quantized draft that shares the other modules
    pack_model                        the last step before decoding: each Linear in the form that its kernel reads
    batch_invariant_rows              rows up to which every product rounds alike

This file knows no checkpoint, no rank and no step of decoding.
"""

import copy
from collections.abc import Callable, Iterator

import torch
from torch import nn

from weights.experts import pack_experts
from weights.formats import release
from weights.linears import PackedLinear, QuantizedEmbedding, QuantizedLinear, check_unpacked


def matrices(model: nn.Module, routers: bool = False) -> Iterator[tuple[str, nn.Linear | QuantizedLinear]]:
    """(name, Linear) in the order in which they compute: "layers.0.attention.qkv", … "lm_head". Routers of experts,
    which nothing quantizes, only where asked for."""
    kinds = nn.Linear | QuantizedLinear
    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, kinds)]
    names = [name for name, module in linears if routers or not getattr(module, "is_router", False)]
    return ((name, model.get_submodule(name)) for name in names)


def replace_linears(
    model: nn.Module, make: Callable[[str, nn.Module], nn.Module | None], routers: bool = False
) -> nn.Module:
    """Put make(name, linear) in place of each Linear, one by one; None leaves it. A quantized head then serves a tied
    embedding too. Forward hooks stay: they are tensor parallelism's sums."""
    for name, linear in matrices(model, routers):
        made = make(name, linear)
        if made is not None:
            made._forward_hooks.update(linear._forward_hooks)
            model.set_submodule(name, made)
            if name == "lm_head" and isinstance(made, QuantizedLinear) and model.config.tie_embeddings:
                model.set_submodule("embed", QuantizedEmbedding(made))
    return model


def quantized_linears(model: nn.Module) -> list[QuantizedLinear]:
    return [module for module in model.modules() if isinstance(module, QuantizedLinear)]


@torch.no_grad()
def pack_quantized(model: nn.Module) -> None:
    """Pack a model's quantized Linears. Experts on a GPU are stacked before, of what is stored."""
    if any(linear.codes.device.type == "cuda" for linear in quantized_linears(model)):
        pack_experts(model)
    for linear in quantized_linears(model):
        linear.pack()


@torch.no_grad()
def quantize_model(model: nn.Module, scheme: str | None, head: str | None = None) -> nn.Module:
    """A model in memory, quantized in place, not packed. Each matrix's full precision is freed before the next."""

    def quantized(name: str, linear: nn.Module) -> QuantizedLinear | None:
        target_scheme = head if name == "lm_head" else scheme
        return None if target_scheme is None else QuantizedLinear.from_float(linear, target_scheme)

    return replace_linears(model, quantized)


def quantized_copy(model: nn.Module, scheme: str) -> nn.Module:
    """The model's quantized self, for drafting: its blocks' Linears are new, all other modules are the model's own. Not
    packed: `pack_model(model, copy)` packs both. ValueError for a packed model."""
    check_unpacked(model, "copied")
    shared = [module for module in model.modules() if next(module.children(), None) is None]
    duplicate = copy.deepcopy(model, {id(part): part for part in [*shared, *model.parameters(), *model.buffers()]})
    return quantize_model(duplicate, scheme)


@torch.no_grad()
def pack_model(model: nn.Module, *others: nn.Module) -> nn.Module:
    """Give each Linear the form that its kernel reads, one by one, so that one matrix exists twice at a time.

    The last step before decoding: a packed model stays on its device and is not trained, saved or copied. `others` are
    models that share modules with it, such as a draft that is a part of the model; what they share is packed once. An
    embedding that shares its head's plain weights keeps them, to look rows up in.
    """
    made = {}  # id of a plain Linear -> what takes its place; every Linear exists from the beginning
    for module in (model, *others):
        pack_experts(module)

    def packed(name: str, linear: nn.Module) -> PackedLinear | None:
        if isinstance(linear, QuantizedLinear):
            linear.pack()
        elif id(linear) not in made and linear.weight.device.type == "cpu":
            made[id(linear)] = PackedLinear(linear)
            release()
        return made.get(id(linear))

    for module in (model, *others):
        replace_linears(module, packed, routers=True)
    return model


def batch_invariant_rows(model: nn.Module) -> int:
    """Rows up to which every product of a packed model gives a row the same bits, whatever the other rows; 0 where one
    does not, or is no product on a CPU."""
    return min(
        (getattr(linear, "batch_invariant_rows", 0) for linear in model.modules() if hasattr(linear, "in_features")),
        default=0,
    )
