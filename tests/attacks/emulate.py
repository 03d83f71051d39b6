"""Run a program's GPU path where there is no GPU: slowly, and with its answers.

    python -m tests.attacks.emulate generate.py --max_new_tokens 5 --max_seq_length 64
    python -m tests.attacks.emulate -m pytest -m gpu tests/test_engine.py tests/test_benchmarks.py

It needs a CUDA build of torch with its Triton, and a C compiler. emulate.c goes before libcudart: a
device's memory is the host's. Everything above that is as on a GPU: what Inductor generates for
one, Dynamo's guards, CUDA graphs with their static inputs, which graphs are skipped, which calls
wait for the device, the attention that is chosen.

    build_library           the library in C
    run_with_library        a command's exit status with the library in front; install follows
    host, do, on_event      a CUDA tensor's memory as a CPU tensor; an action, now or in the graph
                            that is recorded
    operator, special       aten's operators on CUDA tensors, computed by their CPU versions
    report                  the number of calls, the contents of each CUDA graph; status 1 if a
                            kernel was not computed

No time that is taken here means anything. What it cannot see: how a kernel is compiled and runs,
two kernels at once, several devices, cuDNN's and cuBLAS's own arithmetic.
"""

import atexit
import collections
import contextlib
import ctypes
import functools
import os
import runpy
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from decoding.errors import UserError

EMULATED = "QUICKDRAFT_EMULATED"  # in the environment of a process that runs with the library
# ------------------------------------------------------------------------------------- the library


def build_library(folder: Path) -> Path:
    """emulate.c as libcuda.so.1. UserError where it cannot be built here."""
    site = Path(sysconfig.get_paths()["purelib"])
    include = [*site.glob("nvidia/cu*/include"), *site.glob("triton/backends/nvidia/include")]
    if torch.version.cuda is None or not include:
        raise UserError("emulating a GPU needs a CUDA build of torch with its headers, and triton")
    file = folder / "libcuda.so.1"
    source = str(Path(__file__).with_suffix(".c"))
    flags = ["-O1", "-w", "-shared", "-fPIC", *(f"-I{path}" for path in include)]
    subprocess.run(["cc", *flags, source, "-o", str(file)], check=True)
    return file


def run_with_library(command: list[str]) -> int:
    """The exit status of a command that runs with the library in front."""
    with tempfile.TemporaryDirectory() as folder:
        file = str(build_library(Path(folder)))
        env = os.environ | {
            EMULATED: file,
            "LD_PRELOAD": file,
            "LD_LIBRARY_PATH": folder,
            "TRITON_LIBCUDA_PATH": folder,
            "TRITON_INTERPRET": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            # what is generated here suits no GPU, and the reverse
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        }
        return subprocess.run(command, env=env).returncode


# ----------------------------------------------------------------------------- memory, and graphs

COPY, SET, BEGIN, REPLAY, KERNEL = range(5)
graphs: dict[int, list] = {}  # number -> (name, action)
counts: collections.Counter = collections.Counter()
skipped: collections.Counter = collections.Counter()  # torch's own kernels, which nothing computes
is_computing = True


def host(tensor):
    """A CPU tensor on a CUDA tensor's memory; anything else as it is."""
    if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cuda":
        return tensor
    storage = tensor.untyped_storage()
    if tensor.numel() == 0:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    values = torch.frombuffer(memory, dtype=torch.uint8)
    values = values[: len(values) // tensor.itemsize * tensor.itemsize].view(tensor.dtype)
    return values.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def do(name: str, action) -> None:
    graph = library.emulate_capturing()
    counts[name] += 1
    if not is_computing:
        return
    graphs[graph].append((name, action)) if graph else action()


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
def on_event(kind, a, b, n):
    """A call that emulate.c reports."""
    if kind == COPY:
        do("copy", lambda: ctypes.memmove(a, b, n))
    elif kind == SET:
        do("set", lambda: ctypes.memset(a, b or 0, n))
    elif kind == BEGIN:
        graphs[a] = []
    elif kind == REPLAY:
        counts["replay"] += 1
        for _, action in graphs[a]:
            action()
    elif kind == KERNEL:
        skipped[ctypes.cast(a, ctypes.c_char_p).value.decode()] += 1


# -------------------------------------------------------------------------------------- operators

# What only allocates, or looks at memory in another way, needs no kernel.
NATIVE = {
    "empty.memory_format",
    "empty_strided",
    "as_strided",
    "view",
    "_reshape_alias",
    "unfold",
    "resize_",
    "set_",
    "set_.source_Storage",
    "set_.source_Storage_storage_offset",
    "set_.source_Tensor",
    "_local_scalar_dense",
    "record_stream",
    "is_pinned",
    "_pin_memory",
    "_fused_sdp_choice",
    "is_set_to",
    "view_as_real",
    "view_as_complex",
    "_efficientzerotensor",
    "_assert_async",
    "_assert_async.msg",
}
COMPOSITE = {"ldexp.Tensor", "ldexp.out", "ldexp_"}  # for all devices, with a kernel for each
SPECIAL = {}  # that have no CPU version, or are more than a kernel


def special(function):
    SPECIAL[function.__name__] = function
    return function


def compute(name: str, out: torch.Tensor, function, *tensors) -> torch.Tensor:
    """out, once function(CPU tensors) has been copied there."""
    target, inputs = host(out), [host(tensor) for tensor in tensors]
    do(name, lambda: target.copy_(function(*inputs)))
    return out


@special
def copy_(to, source, non_blocking=False):
    """Between devices it is torch's own, which decides whether to wait, and says so."""
    if to.device != source.device:
        return native_copy.call_boxed(
            torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), to, source, non_blocking
        )
    return compute("copy_", to, lambda values: values, source)


def attention_scores(q, k, bias=None, causal=False, scale=None):
    scores = q.float() @ k.float().mT * (q.size(-1) ** -0.5 if scale is None else scale)
    if causal:
        scores = scores.masked_fill(
            ~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf
        )
    if bias is not None:
        scores = (
            scores.masked_fill(~bias, -torch.inf)
            if bias.dtype == torch.bool
            else scores + bias.float()
        )
    return scores


def attention(q, k, v, bias=None, causal=False, scale=None):
    """0 for a query that sees no key, as torch's kernels write."""
    scores = attention_scores(q, k, bias, causal, scale)
    is_blind = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.softmax(-1).masked_fill(is_blind, 0) @ v.float()


def seeds() -> tuple:
    return tuple(torch.empty((), dtype=torch.int64, device="cuda") for _ in range(2))


def transposed(q, v) -> torch.Tensor:
    """(B, n, T, E) laid out as (B, T, n, E)."""
    B, n, T, _ = q.shape
    return torch.empty(B, T, n, v.size(-1), dtype=q.dtype, device="cuda").transpose(1, 2)


@special
def _scaled_dot_product_efficient_attention(
    q, k, v, bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None
):
    tensors = (q, k, v) if bias is None else (q, k, v, bias)
    run = functools.partial(attention, causal=is_causal, scale=scale)
    out = compute("efficient attention", transposed(q, v), run, *tensors)
    if not compute_log_sumexp:
        return out, torch.empty(*q.shape[:2], 0, device="cuda"), *seeds()
    num_padding = -q.size(2) % 32

    def logsumexp(q, k, v, bias=None):
        sums = attention_scores(q, k, bias, is_causal, scale).logsumexp(-1)
        return F.pad(sums, (0, num_padding), value=torch.inf)

    sums = torch.empty(*q.shape[:2], q.size(2) + num_padding, device="cuda")
    return out, compute("log-sum-exp", sums, logsumexp, *tensors), *seeds()


@special
def _scaled_dot_product_flash_attention(
    q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None
):
    run = functools.partial(attention, causal=is_causal, scale=scale)
    out = compute("flash attention", transposed(q, v), run, q, k, v)
    empty = torch.empty(0, device="cuda")
    return out, empty, None, None, q.size(2), k.size(2), *seeds(), empty


@special
def _scaled_dot_product_cudnn_attention(
    q,
    k,
    v,
    bias,
    compute_log_sumexp,
    dropout_p=0.0,
    is_causal=False,
    return_debug_mask=False,
    *,
    scale=None,
):
    """Laid out as the queries."""
    tensors = (q, k, v) if bias is None else (q, k, v, bias)
    run = functools.partial(attention, causal=is_causal, scale=scale)
    out = compute("cudnn attention", torch.empty_like(q), run, *tensors)
    return out, torch.empty(0, device="cuda"), None, None, q.size(2), k.size(2), *seeds(), None


@special
def _convert_weight_to_int4pack(pairs, tiles):
    """pairs (out, in / 2) uint8, the first code high, in the shape of the kernel's tiles but the
    order they came in."""
    rows, columns = pairs.size(0), 2 * pairs.size(1)
    assert pairs.dtype == torch.uint8 and rows % 8 == 0 and columns % (tiles * 16) == 0, (
        pairs.shape,
        tiles,
    )
    out = torch.empty(
        rows // 8, columns // (tiles * 16), 32, tiles // 2, dtype=torch.int32, device="cuda"
    )
    return compute(
        "int4 packing",
        out,
        lambda x: x.flatten().view(torch.int32).view(out.shape),
        pairs.contiguous(),
    )


@special
def _weight_int4pack_mm(x, packed, group, scales_and_zeros):
    rows = 8 * packed.size(0)
    assert x.dtype == scales_and_zeros.dtype == torch.bfloat16 and x.is_contiguous(), (
        x.dtype,
        x.stride(),
    )
    assert scales_and_zeros.shape == (x.size(1) // group, rows, 2), scales_and_zeros.shape

    def run(x, packed, scales_and_zeros):
        byte = packed.flatten().view(torch.uint8).view(rows, -1)
        codes = (
            torch.stack((byte >> 4, byte & 15), -1).flatten(1).unflatten(1, (-1, group)).float() - 8
        )
        scale, zero = scales_and_zeros.float().transpose(0, 1).unbind(-1)  # (out, in / g)
        return x.float() @ (codes * scale[..., None] + zero[..., None]).flatten(1).T

    out = torch.empty(x.size(0), rows, dtype=x.dtype, device="cuda")
    return compute("int4 product", out, run, x, packed, scales_and_zeros)


generators: dict = {}


def on_host(value):
    """An argument for a CPU version."""
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, torch.Generator) and value.device.type == "cuda":
        return generators.setdefault(value, torch.Generator().manual_seed(value.initial_seed()))
    return host(value)


def empty_on_cuda(tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cuda")


def operator(name: str):
    """aten's operator for CUDA tensors, by its CPU version."""
    packet_name, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, packet_name)
    version = getattr(packet, overload or "default")
    written = [
        a.name
        for a in version._schema.arguments
        if a.alias_info is not None and a.alias_info.is_write
    ]
    places = [a.name for a in version._schema.arguments]

    def call(args, kwargs):
        try:
            return version(*args, **kwargs)
        except RuntimeError as error:
            if "Cast error" not in str(error):
                raise
            return packet(*args, **kwargs)  # a number that torch had made a tensor of

    def run(*args, **kwargs):
        here_args, here_kwargs = tree_map(on_host, list(args)), tree_map(on_host, dict(kwargs))
        if not written:
            out = tree_map_only(torch.Tensor, empty_on_cuda, call(here_args, here_kwargs))
            targets = tree_map(host, out)

            def recompute():
                for target, value in zip(
                    tree_leaves(targets), tree_leaves(call(here_args, here_kwargs))
                ):
                    if isinstance(target, torch.Tensor) and target.numel():
                        target.copy_(value)

            do(name, recompute)
            return out
        arguments = dict(zip(places, args)) | kwargs
        outs = [arguments[place] for place in written]
        if any(isinstance(out, torch.Tensor) and out.numel() == 0 for out in outs):  # to be resized
            for place, out in zip(written, outs):
                fresh, index = torch.empty(0, dtype=out.dtype), places.index(place)
                if index < len(args):
                    here_args[index] = fresh
                else:
                    here_kwargs[place] = fresh
            call(here_args, here_kwargs)
            here = dict(zip(places, here_args)) | here_kwargs
            for place, out in zip(written, outs):
                out.resize_(here[place].shape)
                compute(name, out, lambda value=here[place]: value)
        else:
            do(name, lambda: call(here_args, here_kwargs))
        returns = len(version._schema.returns)
        return None if returns == 0 else outs[0] if returns == 1 else tuple(outs)

    return run


def has_kernel(name: str) -> bool:
    if name in COMPOSITE:
        return True
    on_cuda = torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA")
    return on_cuda and torch._C._dispatch_has_computed_kernel_for_dispatch_key(
        f"aten::{name}", "CPU"
    )


def replace_operators() -> torch.library.Library:
    operators = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings(action="ignore"):
        for full in torch._C._dispatch_get_all_op_names():
            name = full.removeprefix("aten::")
            if name == full or name in NATIVE:
                continue
            with contextlib.suppress(AttributeError):  # an operator that Python has no name for
                if name in SPECIAL or has_kernel(name):
                    operators.impl(name, SPECIAL.get(name) or operator(name), "CUDA")
    return operators


# ------------------------------------------------------------------------------------------- main


def report() -> None:
    common = ", ".join(f"{n} {name}" for name, n in counts.most_common(8))
    print(f"emulated: {common}", file=sys.stderr)
    kinds = collections.Counter(
        tuple(
            sorted(
                collections.Counter(name for name, _ in graph).items(), key=lambda item: -item[1]
            )
        )
        for graph in graphs.values()
    )
    for kind, n in kinds.most_common():
        print(
            f"{n} CUDA graphs of {', '.join(f'{count} {name}' for name, count in kind)}",
            file=sys.stderr,
        )
    for name, n in skipped.most_common():
        print(
            f"WRONG: a kernel of torch's own, called {n} times, computed nothing: {name[:150]}",
            file=sys.stderr,
        )
    if skipped:
        sys.stdout.flush()
        os._exit(1)


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
    elif EMULATED in os.environ:
        run_emulated()
    else:
        from cli.errors import exit_on_error

        with exit_on_error():
            command = [sys.executable, "-m", "tests.attacks.emulate", *sys.argv[1:]]
            sys.exit(run_with_library(command))


def install(computes: bool = True) -> None:
    """CUDA tensors work in this process from here on. Without `computes` no operator and no Triton
    kernel computes anything: for those who want nothing but the code."""
    global library, native_copy, replaced, is_computing
    is_computing = computes
    library = ctypes.CDLL(os.environ[EMULATED])
    library.emulate_capturing.restype = ctypes.c_long
    library.emulate_callback(on_event)
    torch.cuda.init()
    native_copy = torch.library.get_kernel("aten::copy_", "CUDA")
    replaced = replace_operators()
    from tests.attacks.interpret_triton import use_interpreter  # a CPU's torch may have no Triton

    use_interpreter(host, do)


def run_emulated() -> None:
    """The program named in sys.argv, as if it had been started itself."""
    install()
    atexit.register(report)
    sys.argv = sys.argv[1:]
    if sys.argv[0] == "-m":
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
