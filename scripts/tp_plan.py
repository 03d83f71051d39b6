"""The weights, cache and traffic of each rank of a tensor-parallel launch, computed before any GPU is rented.

    python -m scripts.tp_plan benchmarks/shapes/llama-3.1-70b.json --ranks 1,2,4,8,16 --bandwidth 3350 --memory 80

The model is the program's own on the meta device, sharded by tp.py and quantized by quantize.py. The cache is allocated
in full for every layer; a layer with a sliding window reads its window alone.
"""

if __name__ == "__main__":  # before torch is imported: --help and wrong flags are answered at once
    from cli.start import answer_flags
    from scripts.flags import tp_plan_args

    answer_flags(tp_plan_args)

import json
import math
from pathlib import Path

import torch

from cli.errors import ending_plainly
from cli.report import attended_bytes, position_bytes, stored_bytes, weight_bytes
from loading import checkpoint
from loading.plain_files import is_gguf
from loading.quantized.merged_experts import is_mxfp4
from loading.quantized.reader import find_layout
from model import Config
from quantize import format_of
from scripts.flags import tp_plan_args as parse_args
from tp import SUM, Ranks, check_divisible, shard_spec
from weights.schemes import head_scheme
from weights.walker import named_linears


def plan(
    config: Config, world: int, dtype: torch.dtype = torch.bfloat16, scheme: str | None = None, head: str | None = None,
    overrides: dict[str, str | None] | None = None, context: int = 0,
) -> dict:  # fmt: skip
    """Rank 0 of `world`, in bytes: the weights that it holds, the weights that a step reads and, with `context` cached
    tokens, the keys and values, and a step's collectives. `scheme` is that of the blocks, `head` of the head,
    `overrides` of single matrices by name. ValueError for a model that tp.py cannot divide."""
    check_divisible(config, world, checkpoint.max_group(scheme, overrides or {}))
    model = checkpoint.empty_model(config, dtype, scheme, head, Ranks(0, world), overrides or {})
    specs, kv_bytes = [shard_spec(name) for name, _ in model.named_modules()], position_bytes(model)
    return {
        "ranks": world,
        "weights": stored_bytes(model), "blocks": stored_bytes(model.layers),
        "head": stored_bytes(model.lm_head), "embedding": stored_bytes(model.embed),
        "read_per_token": weight_bytes(model),
        "kv_read": attended_bytes(kv_bytes, context), "kv_per_token": kv_bytes.total(),
        "kv_copies": world * model.layers[0].attention.heads()[1] / config.n_kv_heads,  # ranks that hold one KV head
        "all_reduces": sum(spec is not None and spec.after == SUM for spec in specs) if world > 1 else 0,
        "all_reduce_bytes": config.dim * dtype.itemsize,
        "gather_bytes": config.vocab_size * dtype.itemsize,  # the logits of all ranks
    }  # fmt: skip


def storage(path: Path, config: Config, quantize: str | None) -> checkpoint.StoredForm:
    """The schemes of the weights of a folder, of a GGUF file or of a config.json alone. ValueError if only the tensors
    show them, and neither tensors nor `quantize` are there."""
    if is_gguf(path) or any(path.glob("*.safetensors")):
        return checkpoint.open_folder(path, config)[0]
    file = path / "config.json" if path.is_dir() else path
    hf, stored = checkpoint.read_json(file), checkpoint.read_stored_form(file)
    if is_mxfp4(hf):
        names = [name for name, _ in named_linears(checkpoint.empty_model(config, torch.float32))]
        return checkpoint.StoredForm(overrides={name: "mxfp4" for name in names if ".experts." in name})
    if stored.scheme is None and quantize is None and find_layout(hf) is not None:
        method = hf["quantization_config"]["quant_method"]
        raise ValueError(f"{file}: quant_method = {method!r}: give the folder with its tensors, or a --quantize scheme")
    return stored


def seconds(row: dict, bandwidth: float, latency: float, link: float) -> float:
    """Seconds of a step of a plan: its bytes over memory bandwidth, the sent bytes over the link, and the latency of
    every collective. A ring sends 2 (N - 1) / N of the bytes of an all-reduce. Rates of one rank in bytes/s."""
    N = row["ranks"]
    num_collectives = row["all_reduces"] + 2 * (N > 1)  # and the logits gathered, the token broadcast
    sent = (N - 1) / N * (2 * row["all_reduces"] * row["all_reduce_bytes"] + row["gather_bytes"])
    return (row["read_per_token"] + row["kv_read"]) / bandwidth + num_collectives * latency + sent / link


def print_row(row: dict, context: int, memory: float | None) -> None:
    if "refused" in row:
        print(f"{row['ranks']:5}  refused: {row['refused']}")
        return
    size = row["weights"] + context * row["kv_per_token"]
    notes = [f"a KV head on {row['kv_copies']:.0f} ranks"] * (row["kv_copies"] > 1)
    notes += [f"does not fit: {size / 1e9:.0f} GB with the cache"] * (memory is not None and size > memory * 1e9)
    traffic = f"{row['all_reduces']} x {row['all_reduce_bytes'] / 1e3:.0f} kB"
    print(f"{row['ranks']:5}  {row['weights'] / 1e9:7.4g}  {row['read_per_token'] / 1e9:10.4g}"
          f"  {row['kv_per_token'] / 1e6:12.4f}  {traffic:>18}  {row['tok_s']:13.1f}  {'; '.join(notes)}")  # fmt: skip


@ending_plainly()
def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    for scheme in (args.quantize, head_scheme(args.quantize, args.quantize_head)):
        scheme and format_of(scheme)  # ValueError for an unknown one, once and not in each row
    if not all(part.isdigit() and int(part) for part in args.ranks.split(",")):
        raise ValueError(f"--ranks {args.ranks} must be numbers from 1 on, such as 1,2,4,8")
    sizes = (args.bandwidth, args.link, 1.0 if args.memory is None else args.memory)
    if not all(0 < size < math.inf for size in sizes) or not 0 <= args.latency < math.inf or (args.context or 0) < 0:
        raise ValueError("--bandwidth, --link and --memory must be positive, --latency and --context not negative")
    path = Path(args.config)
    config = checkpoint.read_config(path / "config.json" if path.is_dir() or is_gguf(path) else path)
    context = min(1000, config.max_seq_length) if args.context is None else args.context
    if context > config.max_seq_length:
        raise ValueError(f"--context {context} is over the model's {config.max_seq_length} positions")
    stored = storage(path, config, args.quantize)
    scheme, head, overrides = checkpoint.resolve_schemes(stored, path, args.quantize, args.quantize_head)
    if not args.json:
        formats = sorted({scheme, head, *overrides.values()} - {None}) or [args.dtype]
        print(f"{path.stem}, {' and '.join(formats)}; per rank, sizes in GB")
        print("ranks  weights  read/token  KV/1k tokens   all-reduces/token  tok/s at most  note")
    for world in map(int, args.ranks.split(",")):
        try:
            row = plan(config, world, getattr(torch, args.dtype), scheme, head, overrides, context)
            step_s = seconds(row, args.bandwidth * 1e9, args.latency / 1e6, args.link * 1e9)
            row |= {"step_s": step_s, "tok_s": 1 / step_s}
        except ValueError as error:
            row = {"ranks": world, "refused": str(error)}
        print(json.dumps(row)) if args.json else print_row(row, context, args.memory)


if __name__ == "__main__":
    main()
