"""What torch's compiler needs to be told, and every workaround for it. `compiled` in generate.py is what compiles.

    ONE_KERNEL, GPU_OPTIONS     settings under which a step on a GPU reads each weight once, in its stored form
    own_entries                 compiled code is kept per `torch.compile` call, not per function
    leave_open                  a dimension that may change without compiling anew

Workarounds that must stand where they act, and what each is for: `Block.forward` is a nested region, so that one block
is compiled for all layers; `Linear.forward` flattens before a bias; `CachedModel` keeps one position of slack and
never runs one position of a prompt alone. What each saves: benchmarks/NOTES.md.
"""

import inspect

import torch
from torch import Tensor

# Materialise a value that is read more than twice, so that RMSNorm is not recomputed for each output of a product. Let
# one kernel read and compute far more than Inductor likes: a kernel that unpacks sixteen codes at once would otherwise
# write half of its sums to memory in between.
ONE_KERNEL = {"realize_reads_threshold": 2, "realize_acc_reads_threshold": 200, "realize_opcount_threshold": 400}

# Coordinate descent also turns a product of one row into a multiplication and a sum, one kernel with its neighbours.
GPU_OPTIONS = {"coordinate_descent_tuning": True, **ONE_KERNEL}

MOST_FORMS = 256  # compiled forms of one function: engines, kinds of sampling, draft lengths


def own_entries() -> dict[str, bool]:
    """Arguments of `torch.compile` for code that is compiled once for each engine, kind and draft length.

    torch keeps compiled code per function and stops at eight forms of one. From torch 2.13 on each call may keep its
    own; before, the limit is raised.
    """
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        return {"isolate_recompiles": True}
    torch._dynamo.config.recompile_limit = MOST_FORMS
    return {}


def leave_open(tensor: Tensor, dim: int) -> None:
    """Compile no code for this size alone."""
    torch._dynamo.mark_dynamic(tensor, dim)
