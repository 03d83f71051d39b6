"""What torch's compiler makes of a GPU's steps, where there is no GPU: `python -m
benchmarks.generated bf16 int8 --k 0 5`.

    launches        kernels that a piece of Inductor's code launches
    compile_kernel  one of its Triton kernels, compiled for a target
    Machine code    registers, stack, instructions a weight

Inductor generates the code of a step of the 8B shape as for an H100 (benchmarks/gpu_code.py), and
Triton and ptxas compile its kernels. The counts are facts about that code; no time is known. It
needs a CUDA build of torch with its Triton, and a C compiler.
"""

import argparse
import ast
import collections
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.shapes import GPU_SHAPES, config_json
from cli.errors import exit_on_error
from tests.attacks.emulate import run_with_library
from weights.schemes import SCHEMES

LAYERS = 2  # of the model whose code is generated: a block is what is launched once for each


# --------------------------------------------------------------------------------------- launches


@dataclass
class Launches:
    """Names of the kernels that one call of a step launches, in order."""

    block: list[str]
    outside: list[str]


def launches(code: str) -> Launches:
    """Read a file of Inductor's. A block is a function that is called once for each layer."""
    functions = {}
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.FunctionDef) and re.search("subgraph|partition|^call$", node.name):
            functions[node.name] = list(called_names(node))
    calls = collections.Counter(name for names in functions.values() for name in names)
    blocks = {name for name in functions if calls[name] == LAYERS}

    def kernels(names: list[str]) -> list[str]:
        kernel_names = []
        for name in names:
            if name in functions:
                kernel_names += kernels(functions[name])
            elif re.search(r"^triton_.*\.run$|^extern_kernels\.|^torch\.ops\.", name):
                kernel_names.append(name.removesuffix(".run"))
        return kernel_names

    block = [name for names in map(functions.get, sorted(blocks)) for name in kernels(names)]
    outside = []
    for name, names in functions.items():
        if name not in blocks:
            outside += kernels([other for other in names if other not in functions])
    return Launches(block, outside)


def called_names(function: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


# ------------------------------------------------------------------------------------- compilation

SASS_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?);")
SASS_LABEL = re.compile(r"^\s*(\.L\w+):")
PTX_LABEL = re.compile(r"^(\$L\w+):")
PTX_BRANCH = re.compile(r"bra(?:\.uni)?\s+(\$L\w+);")


@dataclass
class MachineCode:
    """A kernel compiled for an NVIDIA GPU."""

    registers: int
    stack: int  # bytes: spilled registers
    num_instructions: int  # of a thread that goes through every loop once
    loop: list[str] = field(default_factory=list)  # instructions of the longest loop
    loads: dict[int, int] = field(default_factory=dict)  # bytes a thread -> loads of that size

    @property
    def num_products(self) -> int:
        return sum(name.startswith(("HMMA", "IMMA", "QMMA", "HGMMA")) for name in self.loop)

    @property
    def num_loads(self) -> int:
        return sum(name.startswith("LDG") for name in self.loop)


def kernel_sources(code: str) -> dict[str, str]:
    """Triton kernels of a file of Inductor's: name -> source."""
    found = re.finditer(
        r"(\w+) = async_compile\.triton\('\w+', '''(.*?)''', device_str", code, re.S
    )
    return {match[1]: match[2] for match in found}


def load_kernel(source: str, folder: Path):
    """Inductor's autotuner of a kernel. Triton reads the source from a file."""
    from torch._inductor.runtime import triton_helpers
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    triton_helpers.set_driver_to_gpu = lambda: None
    file = folder / f"kernel{len(list(folder.glob('kernel*.py')))}.py"
    file.write_text(source)
    scope = {"__name__": file.stem, "__file__": str(file)}
    exec(compile(source, str(file), "exec"), scope)
    (tuner,) = (value for value in scope.values() if isinstance(value, CachingAutotuner))
    return tuner


def compile_kernel(tuner, config, target):
    """A kernel in one of its configurations (triton.Config), compiled for a GPUTarget."""
    import triton
    from triton.compiler import ASTSource

    meta = tuner.triton_meta
    constants = {**meta["constants"], **config.kwargs}
    source = ASTSource(tuner.fn, meta["signature"], constants, meta["configs"][0])
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if meta.get("launch_pdl") and target.backend == "cuda":
        options["launch_pdl"] = True
    return triton.compile(source, target=target, options=options)


def disassemble(cubin: bytes, folder: Path) -> MachineCode:
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)

    def output(*command: str) -> str:
        return subprocess.run(
            [tools / command[0], *command[1:], file], capture_output=True, text=True, check=True
        ).stdout

    usage = re.search(r"REG:(\d+)\s+STACK:(\d+)", output("cuobjdump", "-res-usage"))
    names, arguments, labels = [], [], {}
    for line in output("nvdisasm", "-c").splitlines():
        if match := SASS_LABEL.match(line):
            labels[match[1]] = len(names)
        elif match := SASS_INSTRUCTION.match(line):
            names.append(match[1])
            arguments.append(match[2])
    while names and names[-1].startswith(("NOP", "BRA")):  # padding behind the end
        names.pop()
    loop = []
    for i, name in enumerate(names):
        target = re.search(r"`\((\.L\w+)\)", arguments[i])
        if name.startswith("BRA") and target and labels.get(target[1], i) < i:
            body = names[labels[target[1]] : i + 1]
            loop = max(loop, body, key=len)
    return MachineCode(int(usage[1]), int(usage[2]), len(names), loop, load_widths(names))


def load_widths(names: list[str]) -> dict[int, int]:
    sizes = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
    widths = collections.Counter()
    for name in names:
        if name.startswith("LDG"):
            widths[next((sizes[part] for part in name.split(".") if part in sizes), 4)] += 1
    return dict(widths)


def unrolled(machine: MachineCode, ptx: str) -> int:
    """How many passes of the source's loop the loop of the machine code holds: ptxas unrolls."""
    body = ""
    lines = ptx.splitlines()
    begins = {match[1]: i for i, line in enumerate(lines) if (match := PTX_LABEL.match(line))}
    for i, line in enumerate(lines):
        if (match := PTX_BRANCH.search(line)) and begins.get(match[1], i) < i:
            body = max(body, "\n".join(lines[begins[match[1]] : i]), key=len)
    products = len(re.findall(r"\bw?g?mma[\w.]*\.m\d+n\d+k\d+", body))
    if products:
        return max(1, round(machine.num_products / products))
    loads = len(re.findall(r"\bld\.global|\bcp\.async\.c[ag]", body))
    return max(1, round(machine.num_loads / max(1, loads)))


# ----------------------------------------------------------------------------------------- products


def products_of(shape: str) -> dict[str, tuple[int, int]]:
    """Name -> (out, in) of the products of a step."""
    hf = config_json(GPU_SHAPES[shape])
    D, F, V = hf["hidden_size"], hf["intermediate_size"], hf["vocab_size"]
    E = hf.get("head_dim") or D // hf["num_attention_heads"]
    H, G = hf["num_attention_heads"], hf["num_key_value_heads"]
    return {
        "qkv": ((H + 2 * G) * E, D),
        "out": (D, H * E),
        "gate_up": (2 * F, D),
        "down": (D, F),
        "head": (V, D),
    }


def product_of(source: str, products: dict[str, tuple[int, int]]) -> str | None:
    """The product whose weights a kernel reads, by its sizes: a thread may read several codes of a
    word at once, or a row of gate and the one of up."""
    numels = {name: int(n) for name, n in re.findall(r"(\w+numel) = (\d+)\n", source)}
    R = numels.get("r0_numel", 1)
    columns = max(numels.get("xnumel", 1), numels.get("ynumel", 1))
    for name, (out, n) in products.items():
        has_rows = columns % out == 0 or 2 * columns == out
        weights_a_step, rest = divmod(out * n, columns * R)
        if has_rows and rest == 0 and weights_a_step <= 32:
            return name
    return None


@dataclass
class Kernel:
    """What is known of one kernel of a step."""

    name: str
    product: str | None
    config: str
    machine: MachineCode | None = None
    instructions_per_weight: float | None = None
    note: str = ""

    def __str__(self) -> str:
        name = self.product or f"…{self.name[-36:]}"
        if self.machine is None:
            return f"{name:40} {self.note}"
        weight = ""
        if self.instructions_per_weight is not None:
            weight = f"{self.instructions_per_weight:.1f} instructions a weight, "
        loads = ", ".join(f"{n} x {size}" for size, n in sorted(self.machine.loads.items()))
        return (
            f"{name:40} {self.machine.registers:3} registers, {self.machine.stack} bytes of stack,"
            f" {weight}loads of bytes: {loads}; {self.config}"
        )


def inspect_kernel(name: str, source: str, shape: str, target, folder: Path, config=None) -> Kernel:
    """Compile a kernel in its first configuration, and count."""
    tuner = load_kernel(source, folder)
    config = config or tuner.configs[0]
    blocks = config.kwargs
    text = ", ".join(f"{key} {n}" for key, n in blocks.items())
    products = products_of(shape)
    kernel = Kernel(name, product_of(source, products), f"{text}, {config.num_warps} warps")
    try:
        compiled = compile_kernel(tuner, config, target)
    except Exception as error:  # what Triton refuses is a result
        kernel.note = f"refused: {str(error).strip().splitlines()[-1][:150]}"
        return kernel
    if target.backend != "cuda":
        counts = collections.Counter(
            re.findall(r"(?:global|buffer)_load_\w+", compiled.asm["amdgcn"])
        )
        kernel.note = f"compiles; {dict(counts)}"
        return kernel
    kernel.machine = disassemble(compiled.asm["cubin"], folder)
    if kernel.product:
        out, n = products[kernel.product]
        passes = unrolled(kernel.machine, compiled.asm["ptx"])
        numels = {key: int(n) for key, n in re.findall(r"(\w+numel) = (\d+)\n", source)}
        programs = 1
        for axis in ("x", "y"):
            programs *= math.ceil(
                numels.get(f"{axis}numel", 1) / blocks.get(f"{axis.upper()}BLOCK", 1)
            )
        trips = math.ceil(numels["r0_numel"] / blocks.get("R0_BLOCK", numels["r0_numel"]))
        instructions = kernel.machine.num_instructions
        if kernel.machine.loop:
            instructions += len(kernel.machine.loop) * (trips / passes - 1)
        threads = 32 * config.num_warps * programs
        kernel.instructions_per_weight = instructions * threads / (out * n)
    return kernel


def target_of(name: str):
    """cuda:90 or hip:gfx942 as Triton's GPUTarget."""
    from triton.backends.compiler import GPUTarget

    backend, _, arch = name.partition(":")
    return GPUTarget(backend, int(arch), 32) if backend == "cuda" else GPUTarget(backend, arch, 64)


# ------------------------------------------------------------------------------------------- main


def generate(
    folder: Path,
    formats: list[str],
    ks: list[int],
    shape: str = "8b",
    capability: int = 90,
) -> None:
    """Write FORMAT.kK.py and FORMAT.kK.json into the folder, for a GPU of this capability (80 is
    8.0)."""
    options = ["--formats", ",".join(formats), "--k", ",".join(map(str, ks)), "--shape", shape]
    options += ["--capability", str(capability)]
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu_code", str(folder), *options]
    command += ["--layers", str(LAYERS)]
    status = run_with_library(command)
    if status:
        raise SystemExit(status)


def kernels_of(code: str, names: list[str], shape: str, target_name: str) -> list[Kernel]:
    """These kernels of a file, each once, compiled for a target."""
    sources, target = kernel_sources(code), target_of(target_name)
    with tempfile.TemporaryDirectory() as folder:
        return [
            inspect_kernel(name, sources[name], shape, target, Path(folder))
            for name in dict.fromkeys(names)
            if name in sources
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("formats", nargs="+", choices=["bf16", *SCHEMES])
    parser.add_argument("--k", type=int, nargs="+", default=[0, 5], help="drafted tokens")
    parser.add_argument("--shape", choices=GPU_SHAPES, default="8b")
    parser.add_argument(
        "--capability", type=int, default=90, help="of the GPU that is generated for"
    )
    parser.add_argument("--targets", default="cuda:90", help="such as cuda:80,hip:gfx942; or none")
    parser.add_argument("--folder", type=Path, help="keep the generated code here")
    parser.add_argument("--read", action="store_true", help="read the folder; generate nothing")
    parser.add_argument("--all", action="store_true", help="compile small kernels as well")
    args = parser.parse_args()
    os.environ.setdefault("TRITON_ALWAYS_COMPILE", "1")
    with exit_on_error(), tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(exist_ok=True)
        if not args.read:
            generate(folder, args.formats, args.k, args.shape, args.capability)
        for format in args.formats:
            for k in args.k:
                report(folder / f"{format}.k{k}.py", args)


def report(file: Path, args: argparse.Namespace) -> None:
    code = file.read_text()
    seconds = json.loads(file.with_suffix(".json").read_text())["cpu_seconds"]
    counts = launches(code)
    print(
        f"{file.stem}: {len(counts.block)} launches a block, {len(counts.outside)} outside;"
        f" generated in {seconds:.1f} CPU seconds"
    )
    sources = kernel_sources(code)
    products = products_of(args.shape)
    names = [
        name
        for name in counts.block
        if name in sources and (args.all or product_of(sources[name], products))
    ]
    for target in args.targets.split(",") if args.targets != "none" else ():
        print(f"  {target}")
        for kernel in kernels_of(code, names, args.shape, target):
            print(f"    {kernel}", flush=True)


if __name__ == "__main__":
    main()
