"""int4 products by a C kernel with AVX-512 VNNI, plugged in where Linears are packed.

    library         int4.c, compiled once into a cache folder
    pack_blocks     a Linear's stored parts in the order in which the kernel reads them
    multiply        the product, an operator that torch.compile leaves as it is
    VnniLinear      an Int4Linear that multiplies by it; `plug_in` makes it the class of every int4
                    scheme

An activation becomes two signed 8-bit digits, with a step per row and group. It is exact to step /
2 = max|x| / 65276.
"""

import ctypes
import functools
import hashlib
import math
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding.errors import UserError
from exact.products import ANY_ROWS
from weights.formats import pack_bits, row_chunks, unpack_bits
from weights.linears import KERNELS, Int4Linear

SOURCE = Path(__file__).with_name("int4.c")
LANGUAGE = ("-x", "c")
INSTRUCTIONS = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512vnni")
FLAGS = (*LANGUAGE, *INSTRUCTIONS, "-O3", "-ffp-contract=off", "-fopenmp", "-shared", "-fPIC")
LANES = 16  # outputs of a block
# the index of a type is the kernel's number for it
TYPES = (torch.bfloat16, torch.float16, torch.float32)


def find_compiler() -> str:
    """$CXX, or the first C++ compiler of the path: torch.compile needs the same. UserError if
    there is none."""
    names = ("g++", "clang++")
    if "CXX" in os.environ:
        names = (os.environ["CXX"], *names)
    for name in names:
        path = shutil.which(name)
        if path is not None:
            return path
    raise UserError("int4_vnni: no compiler; install g++ or clang++, or set CXX to the path of one")


@functools.cache
def library() -> ctypes.CDLL:
    """int4.c as a library, whose name depends on source, flags and compiler. UserError without a
    compiler or on a processor that lacks the instructions."""
    if not torch.cpu._is_vnni_supported():
        raise UserError(
            "int4_vnni: this processor has no AVX-512 VNNI; run generate.py, which needs none"
        )
    command = [find_compiler(), *FLAGS]
    key = hashlib.sha256(SOURCE.read_bytes() + "\0".join(command).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quickdraft"
    file = folder / f"int4_vnni-{key}.so"
    if not file.exists():
        compile_to(file, command)
    loaded = ctypes.CDLL(str(file))
    pointers = [ctypes.c_void_p] * 4
    sizes = [ctypes.c_long] * 3
    settings = [ctypes.c_int] * 5
    loaded.int4_product.argtypes = pointers + sizes + settings
    loaded.int4_product.restype = None
    return loaded


def compile_to(file: Path, command: list[str]) -> None:
    """Compile int4.c in a temporary folder, and then rename the library: another process may build
    at the same time. UserError with the compiler's message."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as partial:
        library_file = f"{partial}/library.so"
        command = [*command, str(SOURCE), "-o", library_file]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"int4_vnni: {command[0]} failed: {done.stderr.strip()[-400:]}")
        os.replace(library_file, file)


def pack_blocks(parts: dict[str, Tensor], group: int) -> Tensor:
    """Parts of (out, in) -> (ceil(out / 16), in / g, bytes of a block) uint8, as int4.c describes a
    block. Outputs beyond the last one have scales and zeros of 0."""
    out, groups = parts["scale"].shape
    block_bytes = LANES * (2 * parts["scale"].itemsize + group // 2)
    blocks = torch.empty(math.ceil(out / LANES), groups, block_bytes, dtype=torch.uint8)
    for chunk in row_chunks(len(blocks), LANES * groups * group):
        rows = slice(chunk.start * LANES, chunk.stop * LANES)
        padded = {}
        for name, part in parts.items():
            num_missing = -len(part[rows]) % LANES
            padded[name] = F.pad(part[rows], (0, 0, 0, num_missing))
        pair = torch.stack((padded["scale"], padded["zero"]))
        pair = pair.view(2, -1, LANES, groups)  # (2, b, 16, in / g)
        pair = pair.permute(1, 3, 0, 2).flatten(2)  # (b, in / g, 32)
        pair = pair.contiguous().view(torch.uint8)  # (b, in / g, 32 * itemsize)
        codes = unpack_bits(padded["codes"], 4).view(-1, LANES, groups, group // 8, 2, 4)
        codes = pack_bits(codes.permute(0, 2, 3, 1, 5, 4), 4).flatten(2)  # (b, in / g, 8 * g)
        blocks[chunk] = torch.cat((pair, codes), 2)
    return blocks


OPERATORS = torch.library.Library("int4_vnni", "DEF")
OPERATORS.define(
    "product(Tensor x, Tensor blocks, int outputs, int group, int center, int type) -> Tensor"
)


@torch.library.impl(OPERATORS, "product", "CPU")
def multiply(x: Tensor, blocks: Tensor, outputs: int, group: int, center: int, type: int) -> Tensor:
    """x (M, in) times blocks of (outputs, in) -> (M, outputs) in x's dtype. `type`: of the scales,
    an index of TYPES. A row's bits depend on the row alone. UserError for a dtype outside
    TYPES."""
    x = x.contiguous()
    M = x.size(0)
    groups = blocks.size(1)
    y = x.new_empty(M, outputs)
    digits = torch.empty(M * groups * (16 + 2 * group), dtype=torch.uint8)
    library().int4_product(
        x.data_ptr(),
        y.data_ptr(),
        blocks.data_ptr(),
        digits.data_ptr(),
        M,
        groups,
        outputs,
        group,
        center,
        type,
        TYPES.index(x.dtype),
        torch.get_num_threads(),
    )
    return y


@torch.library.register_fake("int4_vnni::product")
def _shape_of_product(
    x: Tensor, blocks: Tensor, outputs: int, group: int, center: int, type: int
) -> Tensor:
    return x.new_empty(x.size(0), outputs)


class VnniLinear(Int4Linear):
    """An Int4Linear whose products on a CPU are `multiply`, for any number of rows. Scale and zero
    keep their stored dtype. Packed, it holds the blocks alone, unless an embedding reads the stored
    parts."""

    def prepack(self):
        if self.codes.device.type != "cpu":
            return super().prepack()
        parts = self.parts()
        blocks = pack_blocks(parts, self.format.group)
        self.register_buffer("blocks", blocks, persistent=False)
        self.expanded_bytes = blocks.nbytes - self.stored_bytes  # of padding
        self.free(*parts)

    @property
    def batch_invariant_rows(self) -> int:
        return ANY_ROWS if hasattr(self, "blocks") else super().batch_invariant_rows

    def product(self, x: Tensor) -> Tensor:
        if not hasattr(self, "blocks"):
            return super().product(x)
        operator = torch.ops.int4_vnni.product if torch.compiler.is_compiling() else multiply
        type = TYPES.index(self.format.scale_dtype)
        return operator(
            x, self.blocks, self.out_features, self.format.group, self.format.center, type
        )


def plug_in() -> None:
    """Let every int4 scheme use the kernel from now on. UserError where the kernel cannot run."""
    library()
    KERNELS["int4"] = VnniLinear
