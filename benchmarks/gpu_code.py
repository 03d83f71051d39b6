"""Write what Inductor generates for a GPU's steps: `python -m benchmarks.generated` runs this with
tests.attacks.emulate's false library in front.

    python -m benchmarks.gpu_code FOLDER --formats int8,bf16 --k 0,5

FOLDER/FORMAT.kK.py is the code of a step, or of the verification of K drafted tokens, and
FOLDER/FORMAT.kK.json the CPU seconds that tracing and generating it took. Shapes are true; no
number is computed.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.gpu_step import FixedDraft, larger_chunks
from benchmarks.shapes import GPU_SHAPES, config_json, scheme_of
from decoding.engine import Engine
from decoding.planner import Step
from decoding.sampling import Sampling
from loading.config import config_from_hf
from loading.models import empty_model, same_schemes
from model import Transformer
from tests.attacks import emulate
from weights.walker import pack_model

FILLED = 100  # positions before the step


def packed_model(shape: str, layers: int, format: str, device: torch.device) -> Transformer:
    """A model in the form that a GPU's kernels read, whose numbers are whatever memory held."""
    config = config_from_hf(config_json(GPU_SHAPES[shape]) | {"num_hidden_layers": layers})
    scheme = scheme_of(format)
    model = empty_model(config, torch.bfloat16, same_schemes(config, scheme, scheme))
    with FakeTensorMode(), larger_chunks(device):
        reallocate(model, device)
        pack_model(model)
    reallocate(model, device)
    return model


def reallocate(model: nn.Module, device: torch.device) -> None:
    """Give every tensor memory on the device, but for those of a packed model that are on meta."""
    is_packed = any(getattr(module, "is_packed", False) for module in model.modules())

    def empty_like(tensor: Tensor) -> Tensor:
        if is_packed and tensor.is_meta:
            return tensor
        return torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device
        )

    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = empty_like(buffer)
        for name, parameter in module.named_parameters(recurse=False):
            module._parameters[name] = nn.Parameter(empty_like(parameter), False)


def engine_of(model: Transformer, num_drafted: int, device: torch.device) -> Engine:
    options = {}
    if num_drafted:
        drafted = torch.zeros(1, num_drafted, dtype=torch.int64, device=device)
        options = {"drafter": FixedDraft(drafted), "speculate_k": num_drafted}
    engine = Engine(model, 1, 1024, compile=True, **options)
    engine.batch.pos.fill_(FILLED - 1)
    engine.batch.sampling_path = Sampling(0).path
    return engine


@torch.inference_mode()
def generate(engine: Engine, k: int) -> tuple[str, float]:
    """(the code of a step that verifies k drafted tokens, CPU seconds)"""
    from torch._inductor.utils import run_and_get_code

    rows = engine.rows(0, 1)
    start = time.process_time()
    _, codes = run_and_get_code(engine.run, Step(rows, FILLED, k))
    seconds = time.process_time() - start
    return max(codes, key=len), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--formats", default="bf16")
    parser.add_argument("--k", default="0")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--capability", type=int, default=90, help="of the GPU: 80, 90, …")
    args = parser.parse_args()
    emulate.install(computes=False)
    torch.cuda.get_device_capability = lambda device=None: divmod(args.capability, 10)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    torch.backends.cuda.enable_cudnn_sdp(False)  # as loading.target.pick_device
    ks = [int(k) for k in args.k.split(",")]
    for format in args.formats.split(","):
        model = packed_model(args.shape, args.layers, format, device)
        engine = engine_of(model, max(ks), device)
        for k in ks:
            code, seconds = generate(engine, k)
            file = args.folder / f"{format}.k{k}.py"
            file.write_text(code)
            file.with_suffix(".json").write_text(json.dumps({"cpu_seconds": seconds}))
        torch._dynamo.reset()


if __name__ == "__main__":
    main()
