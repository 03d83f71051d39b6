"""torch's compiler: the only call of it, its settings, and the workarounds for it.

    compiled                    a function as one graph; StepCompiler keeps those of an engine
    compile_options             Inductor's settings for decode steps and for prompts
    mark_dynamic                let a dimension change without recompiling
    is_small_batch              compare a number of rows that may be dynamic with a bound
    filter_guards               the conditions that compiled code checks before it runs
    probe_vector_isa            find the processor's vector instructions in the background
    register_handle             a number for a module that the compiler cannot trace; module_of
                                returns the module

More workarounds live at the code they concern, such as these: `Block.forward` is a nested region,
so that one block is compiled for all layers, and on a GPU so is the hash of sampling.uniform;
`Linear.forward` flattens its input before adding a bias; `ModelRunner` keeps one position of slack
and never prefills a single position alone. benchmarks/NOTES.md has the time that each saves.
"""

import functools
import inspect
import itertools
import re
import threading
import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn

# A value that is read more than twice is stored, so that RMSNorm is not recomputed for each output
# of a product. The other two bounds are far above Inductor's own, with which a kernel that unpacks
# sixteen codes at once writes half of its sums to memory.
ONE_KERNEL = {
    "realize_reads_threshold": 2,
    "realize_acc_reads_threshold": 200,
    "realize_opcount_threshold": 400,
}

# Coordinate descent also turns a product of one row into a multiplication and a sum, fused with the
# operations around. A native product is one kernel with the unpacking of its weights and the
# operations around, on tensor cores, for 2 rows or more. Combined kernels write rotated queries,
# keys and values with one launch.
GPU_OPTIONS = {
    "coordinate_descent_tuning": True,
    "triton.native_matmul": True,
    "combo_kernels": True,
    "combo_kernels_pointwise_only": True,
    **ONE_KERNEL,
}

# Inductor's checks of sizes and alignment take 4 % of SmolLM2's step on a CPU. A CUDA graph replays
# without them.
UNCHECKED = {"size_asserts": False, "alignment_asserts": False}

# Bits of a vector, by torch's name for the level of instructions that it uses. Inductor keeps C++
# on disk without a note of the level: code whose loops count in vectors of one width would be
# compiled for those of another, and leave out half of the numbers. A width that is asked for is
# part of the key.
VECTOR_BITS = {"AVX512": 512, "AVX2": 256}

MAX_VARIANTS = 256  # compiled variants of one function: engines, sampling paths, draft lengths
CAN_ISOLATE = "isolate_recompiles" in inspect.signature(torch.compile).parameters

LIBRARY = torch.library.Library("quickdraft", "FRAGMENT")  # operators that take a handle
_handles = itertools.count()
_call_numbers = itertools.count()
_modules: "weakref.WeakValueDictionary[int, nn.Module]" = weakref.WeakValueDictionary()  # by handle


def register_handle(module: nn.Module) -> None:
    """Give a module that the compiler cannot trace a number, its buffer `handle`: compiled code
    passes it to an operator of LIBRARY."""
    handle = next(_handles)
    _modules[handle] = module
    module.register_buffer("handle", torch.tensor(handle), persistent=False)


def module_of(handle: Tensor) -> nn.Module:
    """The module with this handle."""
    return _modules[handle.item()]


def mark_dynamic(tensor: Tensor, dim: int) -> None:
    """Let this dimension change without recompiling."""
    torch._dynamo.mark_dynamic(tensor, dim)


def is_small_batch(num_rows: int, max_rows: int) -> bool:
    """Are these at most `max_rows` rows? False for compiled prompts: their number of rows is
    dynamic."""
    if not torch.compiler.is_compiling():
        return num_rows <= max_rows
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # here: imports sympy

    return statically_known_true(num_rows <= max_rows)


def filter_guards(guards: list) -> list[bool]:
    """True for each condition to check before every call: sizes and types of the argument tensors,
    and conditions on dynamic dimensions. The others guard modules, globals and settings, which an
    engine does not change. They are 1,450 checks and a tenth of a CPU's step for a model with 30
    layers; without them the thread count may change too."""
    return [
        guard.guard_type == "SHAPE_ENV"
        or (
            guard.guard_type == "TENSOR_MATCH"
            and not re.search(r"_buffers|_parameters|^G\[", guard.name)
        )
        for guard in guards
    ]


def compile_options(device: torch.device, prompts: bool) -> dict[str, object]:
    """Inductor's settings for steps, or for prompts, which have too many lengths for CUDA
    graphs."""
    options = torch._inductor.list_mode_options("default" if prompts else "reduce-overhead")
    device_options = {}
    if device.type == "cpu":
        probe_vector_isa()
        level = torch.backends.cpu.get_cpu_capability()
        device_options = {"cpp.simdlen": VECTOR_BITS.get(level)}
    if device.type == "cuda" and not prompts:
        # Those that this version knows.
        known_options = torch._inductor.config.get_config_copy()
        device_options = {name: x for name, x in GPU_OPTIONS.items() if name in known_options}
    return options | UNCHECKED | {"guard_filter_fn": filter_guards} | device_options


def compiled(function: Callable, device: torch.device, prompts: bool = False) -> Callable:
    """`function` as one graph with static shapes, except for dimensions marked dynamic. On a GPU
    steps are replayed as CUDA graphs; prompts have too many lengths for that.

    A function is compiled anew for each engine, sampling path and draft length, but torch keeps
    compiled code per function and stops at eight variants. torch 2.13 can keep it per call.
    """
    options = compile_options(device, prompts)
    if CAN_ISOLATE:
        isolation = {"isolate_recompiles": True}
    else:
        isolation = {}
        torch._dynamo.config.recompile_limit = MAX_VARIANTS
        # Two calls with equal options would share compiled code. Nothing reads this folder, because
        # Inductor's debug traces are off, and no key of torch's caches depends on it.
        options["trace.debug_dir"] = f"call-{next(_call_numbers)}"
    return torch.compile(function, fullgraph=True, dynamic=False, options=options, **isolation)


class StepCompiler:
    """The compiled forms of an engine's steps, or without `compile` the steps as they are. It does
    not refer to its engine, so drafters may keep it."""

    def __init__(self, device: torch.device, compile: bool):
        self.device = device
        self.compile = compile
        self.steps: dict[tuple, Callable] = {}

    def __call__(self, function: Callable, batch: nn.Module, *static) -> Callable:
        """The function, or its compiled form for the batch's sampling path and number of rows, and
        for `static`. A method is compiled once for all row views of its object."""
        if not self.compile:
            return function
        unbound = getattr(function, "__func__", function)
        instance = getattr(function, "__self__", None)
        key = (unbound, batch.sampling_path, len(batch.pos), *static)
        if key not in self.steps:
            self.steps[key] = compiled(unbound, self.device)
        return self.steps[key] if instance is None else functools.partial(self.steps[key], instance)


@functools.cache
def probe_vector_isa() -> None:
    """Find in a thread, during tracing, the vector instructions that generated C++ may use. torch
    would do so later and wait 1.3 s for ten short programs. The result is cached for this process
    alone."""
    from torch._inductor import cpu_vec_isa  # here: as slow to import as the rest of torch

    threading.Thread(target=cpu_vec_isa.valid_vec_isa_list, daemon=True).start()
