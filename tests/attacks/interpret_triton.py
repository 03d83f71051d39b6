"""Triton's kernels on a CPU, for tests.attacks.emulate: each runs in Triton's own interpreter.

    use_interpreter     replaces Inductor's launch of a kernel, and the interpreter's slowest
                        functions by numpy's

It knows nothing of devices, graphs and operators: emulate.py passes two functions for them.
"""

import inspect
from collections.abc import Callable

import numpy as np
import triton
import triton.language as tl
from torch._inductor.runtime import triton_helpers, triton_heuristics
from triton.runtime import interpreter


def use_interpreter(host: Callable, do: Callable) -> None:
    """Inductor's Triton kernels run in Triton's interpreter, with its slowest parts as numpy's.

    host(argument): a CUDA tensor's memory as a CPU tensor. do(name, action): run it, or record it
    in a CUDA graph.
    """

    def tensor(data, dtype):
        data = np.asarray(data)
        shape = tl.block_type(dtype, list(data.shape)) if data.ndim else dtype
        return tl.core.tensor(interpreter.TensorHandle(data.reshape(data.shape or 1), dtype), shape)

    names = {"fabs": "abs", "nearbyint": "rint", "round": "rint", "pow": "power"}

    class Libdevice:
        """By numpy."""

        def __getattr__(self, name):
            function = (
                (lambda x: 1 / np.sqrt(x))
                if name == "rsqrt"
                else getattr(np, names.get(name, name))
            )

            def call(*args):
                first = next(arg for arg in args if isinstance(arg, tl.core.tensor))
                data = function(
                    *(arg.handle.data if isinstance(arg, tl.core.tensor) else arg for arg in args)
                )
                kind = tl.int1 if data.dtype == bool else first.handle.dtype
                data = data if data.dtype == bool else data.astype(first.handle.data.dtype)
                return (
                    tensor(data, kind) if first.type.is_block() else tensor(data.reshape(()), kind)
                )

            return call

    def best(pick):
        """A reduction to the largest or least value, NaN where there is one; with indices the
        lowest of the best."""

        def indexed(x, index, dim):
            data = x.handle.data
            top = pick(data, axis=dim, keepdims=True)
            hit = (data == top) | (np.isnan(data) if data.dtype.kind == "f" else False)
            places = np.broadcast_to(index.handle.data, data.shape)
            lowest = np.where(hit, places, np.iinfo(places.dtype).max).min(axis=dim)
            return tensor(np.squeeze(top, dim), x.handle.dtype), tensor(lowest, index.handle.dtype)

        return lambda x, dim: tensor(pick(x.handle.data, axis=dim), x.handle.dtype), indexed

    triton_helpers.libdevice = Libdevice()
    triton_helpers.max2, triton_helpers.max_with_index = best(np.max)
    triton_helpers.min2, triton_helpers.min_with_index = best(np.min)
    triton_helpers.any = lambda x, dim: tensor(
        x.handle.data.astype(bool).any(axis=dim), x.handle.dtype
    )
    triton_helpers.promote_to_tensor = lambda x: x
    tl.extra.cuda.gdc_wait = tl.extra.cuda.gdc_launch_dependents = lambda *args, **kwargs: None

    usual_patch, patched = interpreter._patch_lang_tensor, set()

    def patch(kind, scope):
        usual_patch(kind, scope)
        scope.set_attr(
            kind, "__index__", lambda self: int(np.asarray(self.handle.data).reshape(-1)[0])
        )

    def device_function(self, *args, **kwargs):
        # once a kernel: it takes longer than most functions
        if id(self.fn.__globals__) not in patched:
            patched.add(id(self.fn.__globals__))
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    def interpret(function, grid, args, kwargs):
        patched.clear()
        executor = interpreter.GridExecutor(
            function.rewrite(), inspect.getfullargspec(function.fn).args, grid
        )
        executor._init_args_hst = lambda args, kwargs: (args, kwargs)  # they are on the host
        executor._restore_args_dev = lambda *args: None
        with np.errstate(all="ignore"):
            executor(*args, **kwargs)

    def large(config, numbers):
        """Blocks of up to 2^17 elements: the interpreter takes the same time for a block of any
        size. A product of matrices keeps its own."""
        blocks, room = dict(config.kwargs), 2**17
        if "YBLOCK" in blocks:
            return config
        for name in ("R0_BLOCK", "XBLOCK"):
            n = numbers.get(name.removesuffix("BLOCK").lower() + "numel")
            if name in blocks and n is not None:
                blocks[name] = min(1 << max(n - 1, 0).bit_length(), room)
                room = max(room // blocks[name], 1)
        return triton.Config(blocks)

    def run(self, *args, stream=None, **kwargs):
        numbers = dict(
            zip(
                [
                    name
                    for name, kind in self.triton_meta["signature"].items()
                    if kind != "constexpr"
                ],
                args,
            )
        )
        config = large(self.configs[0], numbers)
        args, grid = self._interpret_args_grid(args, config)
        args = [host(arg) for arg in args]
        do("Triton", lambda: interpret(self.fn, grid, args, {**kwargs, **config.kwargs}))

    def as_float32(handle):
        if handle.get_element_ty() != tl.bfloat16:
            return handle
        data = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(data, tl.float32)

    usual_dot = interpreter.InterpreterBuilder.create_dot

    def create_dot(self, a, b, *args):
        """The interpreter would multiply the bits of bfloat16 as integers."""
        return usual_dot(self, as_float32(a), as_float32(b), *args)

    interpreter.InterpreterBuilder.create_dot = create_dot
    interpreter._patch_lang_tensor = patch
    interpreter.InterpretedFunction.__call__ = device_function
    triton_heuristics.CachingAutotuner.run = run
    triton_heuristics.CachingAutotuner.precompile = lambda self, *args, **kwargs: None
