"""Compiled functions on disk: a later process loads them in place of tracing them again.

    StoredFunction      a function with its compiled variants: loaded, or compiled and stored
    describe            the shapes, settings and functions that the arguments of a call hold
    loaded_code         the code that a trace may read; settings  torch's version and settings, and the processor
    load, store         one file of the cache folder

Inductor's own cache holds kernels, but a process traces for seconds before it can read them. A stored variant is used
if its key is the same, a digest of these descriptions, and if its conditions on dynamic dimensions hold. Anything else
is compiled. This file knows no model and no step.
"""

import collections
import enum
import functools
import hashlib
import io
import os
import sys
import sysconfig
import tempfile
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath

import torch
from torch import Tensor

TORCH_VALUES = (torch.dtype, torch.device, torch.layout)
PLAIN = (type(None), type(...), bool, int, float, complex, str, bytes, enum.Enum, PurePath, *TORCH_VALUES)
MAX_FILES = 200  # of some megabytes; the oldest are deleted
MAX_OBJECTS = 200_000  # of one key: a description of more would take longer than a trace
PROJECT = ("model", "generate", "speculative", "quantize", "tp", "decoding", "drafts", "loading", "weights")  # modules
LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "CXX", "OMP_NUM_THREADS")


class Undescribed(Exception):
    """An object whose description would be incomplete: nothing that depends on it is stored."""


def describe(value: object, memo: dict[int, tuple[int, object]]) -> Iterator[str]:
    """A description in pieces. `memo`: id -> (number, object) of those described before. A class names in `untraced`
    the attributes that compiled functions do not read. Undescribed for code of a user's program, and for objects that
    are neither Python's data nor functions nor tensors, and hold attributes outside of a __dict__."""
    if isinstance(value, PLAIN):
        yield f"{type(value).__name__} {value!r}"
        return
    if id(value) in memo:
        yield f"object {memo[id(value)][0]}"
        return
    if len(memo) > MAX_OBJECTS:
        raise Undescribed(f"more than {MAX_OBJECTS} objects")
    memo[id(value)] = len(memo), value  # which also keeps its id from being used again
    refuse_user_code(value)
    yield f"({type(value).__qualname__}"
    if isinstance(value, Tensor):
        strides = value.stride() if value.layout == torch.strided else None
        yield f"{value.dtype} {tuple(value.shape)} {strides} {value.device} {value.layout} {value.requires_grad}"
        yield f"{getattr(value, '_dynamo_dynamic_indices', None)}"
    elif isinstance(value, types.CodeType):
        yield f"{value.co_code!r} {value.co_names} {value.co_varnames} {value.co_freevars} {value.co_flags}"
        yield from describe(value.co_consts, memo)
    elif isinstance(value, types.FunctionType):
        yield f"{value.__module__}.{value.__qualname__}"
        if value.__module__.partition(".")[0] != "torch":
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            yield from describe([value.__code__, value.__defaults__, value.__kwdefaults__, cells], memo)
    elif isinstance(value, (set, frozenset)):
        yield from sorted(" ".join(describe(item, {})) for item in value)
    elif isinstance(value, (tuple, list, collections.deque)):
        for item in value:
            yield from describe(item, memo)
    elif isinstance(value, (dict, types.MappingProxyType)):
        for key, item in value.items():
            yield from describe(key, memo)
            yield from describe(item, memo)
    elif isinstance(value, types.MethodType):
        yield from describe((value.__func__, value.__self__), memo)
    elif isinstance(value, functools.partial):
        yield from describe((value.func, value.args, value.keywords), memo)
    elif isinstance(value, (staticmethod, classmethod)):
        yield from describe(value.__func__, memo)
    elif isinstance(value, functools._lru_cache_wrapper):
        yield from describe(value.__wrapped__, memo)
    elif isinstance(value, property):
        yield from describe((value.fget, value.fset), memo)
    elif isinstance(value, type):
        yield f"{value.__module__}.{value.__qualname__}"
    elif isinstance(value, (types.BuiltinFunctionType, types.ModuleType, weakref.ReferenceType)):
        yield getattr(value, "__name__", "")
    elif isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        yield str(value)
    elif hasattr(value, "__dict__") and not any(getattr(base, "__slots__", ()) for base in type(value).__mro__):
        yield from describe(type(value), memo)
        for name in sorted(vars(value).keys() - set(getattr(value, "untraced", ()))):
            yield name
            yield from describe(vars(value)[name], memo)
    else:
        raise Undescribed(type(value).__qualname__)
    yield ")"


def refuse_user_code(value: object) -> None:
    """Undescribed for a function, class or object of a user's program: it may read what the program computes."""
    name = getattr(value, "__module__", None) or ""
    file = getattr(sys.modules.get(name), "__file__", None)
    if file and name.partition(".")[0] not in (*PROJECT, "torch") and not file.startswith(LIBRARIES):
        raise Undescribed(name)


def functions_of(value: type) -> dict[str, object]:
    """The functions and plain constants of a class."""
    kinds = (*PLAIN, types.FunctionType, staticmethod, classmethod, property)
    return {key: member for key, member in vars(value).items() if isinstance(member, kinds)}


def loaded_code() -> Iterator[str]:
    """The sources of all loaded modules that are no libraries; the project's functions and plain constants as they are
    now, without this file's, which no trace reads. Undescribed where a program put its own code in place of the
    project's, and for a main program without a file, whose code cannot be told from other code."""
    memo: dict[int, tuple[int, object]] = {}
    for name, module in sorted(sys.modules.items()):
        package, _, _ = name.partition(".")
        file, is_project = getattr(module, "__file__", None), package in PROJECT
        if file is None and name == "__main__":
            raise Undescribed("__main__")
        file = file or ""
        is_library = package == "torch" or file.startswith(LIBRARIES)  # torch's generated code lies anywhere
        if not file.endswith(".py") or not os.path.isfile(file) or (is_library and not is_project):
            continue
        yield name + hashlib.sha256(Path(file).read_bytes()).hexdigest()
        for attribute, value in sorted(vars(module).items()) if is_project and name != __name__ else ():
            refuse_user_code(value)  # put there by a program
            if isinstance(value, (type, types.FunctionType)) and value.__module__ != name:
                continue  # of another module
            if isinstance(value, type):
                yield from (attribute, *describe(functions_of(value), memo))
            elif isinstance(value, (*PLAIN, types.FunctionType, types.MethodType, functools.partial)):
                yield from (attribute, *describe(value, memo))


def settings() -> str:
    """Versions, the processor and torch's settings, as far as generated code depends on them."""
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text().splitlines() if cpu_info.exists() else []
    facts = (
        torch.__version__, sys.version, torch.backends.cpu.get_cpu_capability(), torch.get_num_threads(),
        [line for line in lines if line.startswith(("model name", "flags", "Features"))][:2],
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(), [os.environ.get(name) for name in VARIABLES],
    )  # fmt: skip
    return repr(facts)


def can_store(device: torch.device) -> bool:
    """Has this version of torch compiled functions that can be stored? A CUDA graph cannot. Before 2.13 some of them
    read other attributes than those that they were traced with."""
    return device.type == "cpu" and torch.__version__ >= torch.torch_version.TorchVersion("2.13")


class StoredFunction:
    """`function` compiled with static shapes, except for dimensions marked dynamic. All calls pass objects that are
    alike, as those of one kind and number of rows of an engine: a variant is chosen by its dynamic dimensions alone.

    `compile(options)` is torch.compile of the function. If it cannot be stored, it is compiled as usual.
    """

    def __init__(self, function: Callable, compile: Callable, options: dict):
        self.function, self.compile, self.options = function, compile, options
        self.variants: list = []  # torch's AOTCompiledFunction
        self.unstored: Callable | None = None  # compiled as usual

    def __call__(self, *args):
        if self.unstored is None:
            for variant in self.variants * 2:  # torch takes an interrupt inside a guard for a guard that fails
                if variant.guard_check(*args):
                    return variant.fn(*args)
            variant = self.variant(args)
            if variant is not None:
                self.variants.append(variant)
                return variant.fn(*args)
            self.unstored = self.compile(self.options)
        return self.unstored(*args)

    def variant(self, args: tuple):
        """The variant for these arguments: loaded, or compiled and stored; None if it cannot be stored. RuntimeError
        where torch's stance forbids compiling again."""
        if self.variants and torch._dynamo.eval_frame._stance.stance == "fail_on_recompile":
            raise RuntimeError(f"a call of {self.function.__qualname__} needs another variant than those compiled")
        try:
            key = self.key(args)
        except Undescribed:
            return None
        folder = cache_folder()
        for file in sorted(folder.glob(f"{key}.*")) if folder else ():
            if (variant := load(file)) is not None and variant.guard_check(*args):
                return variant
        try:
            variant = self.compile(self.options | {"guard_filter_fn": keep_dynamic_dimensions}).aot_compile((args, {}))
        except Exception:  # whatever it is, the usual way says it, or does without
            return None
        if folder is not None:
            store(variant, folder, key)
        return variant

    def key(self, args: tuple) -> str:
        """A digest of all that a variant depends on, but for its dynamic dimensions."""
        options = sorted((name, value) for name, value in self.options.items() if isinstance(value, PLAIN))
        digest = hashlib.sha256(f"{settings()} {options}".encode())
        for piece in (*loaded_code(), *describe((self.function, args), {})):
            digest.update(piece.encode(errors="backslashreplace") + b"\n")
        return digest.hexdigest()


def keep_dynamic_dimensions(guards: list) -> list[bool]:
    """True for the conditions on dynamic dimensions. A key describes all others."""
    return [guard.guard_type == "SHAPE_ENV" for guard in guards]


def cache_folder() -> Path | None:
    """A folder beside Inductor's cache; None where it cannot be written."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # here: a slow import

    folder = Path(cache_dir()) / "quickdraft"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder


def load(file: Path):
    """A stored variant; None for a file that is unfinished, changed or of another torch."""
    try:
        content = file.read_bytes()
        if hashlib.sha256(content).hexdigest() != file.suffix[1:]:
            return None
        return torch.compiler.load_compiled_function(io.BytesIO(content))
    except Exception:  # a pickle fails in any way, and compiling does without it
        return None


def store(variant, folder: Path, key: str) -> None:
    """Write KEY.DIGEST, whole or not at all, and delete the oldest files beyond MAX_FILES."""
    try:
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            partial = Path(temporary) / "partial"
            variant.save_compiled_function(str(partial))
            os.replace(partial, folder / f"{key}.{hashlib.sha256(partial.read_bytes()).hexdigest()}")
        files = [(file.stat().st_mtime, file) for file in folder.iterdir() if file.is_file()]
        for _, file in sorted(files)[:-MAX_FILES]:
            file.unlink(missing_ok=True)
    except Exception:  # a full disk, or a function that torch cannot store: the next process compiles again
        return
