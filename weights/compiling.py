"""What torch's compiler needs to be told, and every workaround for it. `compiled` in generate.py is what compiles.

    compile_options             the settings of steps and of prompts
    ONE_KERNEL, GPU_OPTIONS     settings under which a step on a GPU reads each weight once, in its stored form
    UNCHECKED                   settings without Inductor's checks of itself
    own_entries                 compiled code is kept per `torch.compile` call, not per function
    leave_open                  a dimension that may change without compiling anew
    known_few                   whether a number of rows, which may be such a dimension, is small
    may_change                  what compiled code checks before it runs
    probe_early                 a second that torch would wait for
    remove_truncated            libraries that an interrupted compilation left unfinished

Workarounds that must stand where they act, and what each is for: `Block.forward` is a nested region, so that one block
is compiled for all layers; `Linear.forward` flattens before a bias; `ModelRunner` keeps a position of slack and
never runs one position of a prompt alone. What each saves: benchmarks/NOTES.md.
"""

import functools
import inspect
import os
import re
import struct
import sys
import threading

import torch
from torch import Tensor

# Materialise a value that is read more than twice, so that RMSNorm is not recomputed for each output of a product. Let
# one kernel read and compute far more than Inductor likes: a kernel that unpacks sixteen codes at once would otherwise
# write half of its sums to memory in between.
ONE_KERNEL = {"realize_reads_threshold": 2, "realize_acc_reads_threshold": 200, "realize_opcount_threshold": 400}

# Coordinate descent also turns a product of one row into a multiplication and a sum, one kernel with its neighbours.
GPU_OPTIONS = {"coordinate_descent_tuning": True, **ONE_KERNEL}

# Without Inductor's checks that its operators made what it had planned, 4 % of SmolLM2's step on a CPU. A CUDA graph
# replays without them in any case.
UNCHECKED = {"size_asserts": False, "alignment_asserts": False}

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


def known_few(rows: int, most: int) -> bool:
    """Is this number of rows at most `most`? False for compiled prompts: their number of rows is dynamic."""
    if not torch.compiler.is_compiling():
        return rows <= most
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # here: it imports sympy

    return statically_known_true(rows <= most)


def may_change(guards: list) -> list[bool]:
    """Which of the conditions that torch would check before every call are worth a check: the sizes and types of
    tensors that come as arguments, and what follows from open dimensions. The others say that modules, globals and
    settings are those of the trace, and an engine changes none of them. Of a model with 30 layers they are 1,450, a
    tenth of a step on a CPU; without them the number of threads may change, too."""
    return [
        guard.guard_type == "SHAPE_ENV"
        or (guard.guard_type == "TENSOR_MATCH" and not re.search(r"_buffers|_parameters|^G\[", guard.name))
        for guard in guards
    ]


def compile_options(device: torch.device, prompts: bool) -> dict[str, object]:
    """Inductor's settings for steps, which a GPU replays, or for prompts, which have too many lengths for that."""
    prepare_cache()
    if device.type == "cpu":
        probe_early()
    options = torch._inductor.list_mode_options("default" if prompts else "reduce-overhead")
    own = GPU_OPTIONS if device.type == "cuda" and not prompts else {}
    return options | UNCHECKED | {"guard_filter_fn": may_change} | own


@functools.cache
def prepare_cache() -> None:
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # here: it takes long to import

    remove_truncated(cache_dir())


def remove_truncated(folder: str) -> None:
    """Delete unfinished libraries (folder/??/*.so) of Inductor's cache. torch takes a file that exists for a finished
    one: a kernel fails to load in every later run, and a probe costs the processor its vector instructions. A file that
    another process is writing now stays: its lock is taken."""
    from torch.utils._filelock import FileLock

    with os.scandir(folder) as parts:
        parts = [part.path for part in parts if len(part.name) == 2]
    for part in parts:
        for name in os.listdir(part):
            path = f"{part}/{name}"
            if not name.endswith(".so") or not is_truncated(path):
                continue
            os.makedirs(f"{folder}/locks", exist_ok=True)
            lock = FileLock(f"{folder}/locks/{name.partition('.')[0]}.lock")
            try:
                with lock.acquire(timeout=0):
                    os.unlink(path)
            except TimeoutError:
                continue


def is_truncated(path: str) -> bool:
    """Is a library empty, or does its ELF header point beyond the file's end? The linker writes the header last."""
    with open(path, "rb", buffering=0) as file:
        header, size = file.read(64), os.fstat(file.fileno()).st_size
    if sys.platform != "linux":
        return not header
    if len(header) < 64 or not header.startswith(b"\x7fELF"):
        return True
    (table,), (entry, count) = struct.unpack_from("<Q", header, 40), struct.unpack_from("<HH", header, 58)
    return not 0 < table <= size - entry * count


@functools.cache
def probe_early() -> None:
    """Ask now, beside the tracing, which vector instructions generated C++ may use. torch asks later and waits: it runs
    ten short programs, 1.3 s in all, and keeps the answer for this process alone."""
    from torch._inductor import cpu_vec_isa  # here: it takes as long to import as the rest of torch

    threading.Thread(target=cpu_vec_isa.valid_vec_isa_list, daemon=True).start()
