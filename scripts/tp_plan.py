r"""The weights, cache and traffic of each rank of a tensor-parallel launch, computed before any GPU
is rented.

    python -m scripts.tp_plan benchmarks/shapes/llama-3.1-70b.json \
        --ranks 1,2,4,8,16 --bandwidth 3350 --memory 80

The model is the program's own on the meta device, sharded by tp.py and quantized by quantize.py.
The cache is allocated in full for every layer; a layer with a sliding window reads its window
alone.
"""

if __name__ == "__main__":  # before torch is imported
    from cli.process import prepare

    prepare()

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from cli.errors import exit_on_error
from cli.flags import FLAGS, Parser, positive
from cli.report import attended_bytes, position_bytes, stored_bytes, weight_bytes
from decoding.errors import UserError
from loading.checkpoint import Checkpoint, foreign_layouts, read_config
from loading.files import read_config_json
from loading.folder import own_layouts
from loading.models import check_shards, empty_model, same_schemes
from loading.plain_files import is_gguf, short_repr
from loading.quantization import choose_schemes
from loading.stored import Source, Stored
from loading.weight_names import stored_names
from model import Config
from tp import SUM, Ranks, shard_spec
from weights.formats import format_of


def plan(
    config: Config,
    world: int,
    dtype: torch.dtype = torch.bfloat16,
    schemes: Mapping[str, str | None] = MappingProxyType({}),
    context: int = 0,
) -> dict:
    """Rank 0 of `world`, in bytes: the weights that it holds, the weights that a step reads and,
    with `context` cached tokens, the keys and values, and a step's collectives. `schemes` as in
    models.empty_model. UserError for a model that tp.py cannot divide."""
    check_shards(config, schemes, world)
    model = empty_model(config, dtype, schemes, Ranks(0, world))
    kv_bytes = position_bytes(model)
    _, kv_heads = model.layers[0].attention.heads()
    num_reduces = 0
    if world > 1:
        specs = [shard_spec(name) for name, _ in model.named_modules()]
        num_reduces = sum(spec is not None and spec.after == SUM for spec in specs)
    return {
        "ranks": world,
        "weights": stored_bytes(model),
        "blocks": stored_bytes(model.layers),
        "head": stored_bytes(model.lm_head),
        "embedding": stored_bytes(model.embed),
        "read_per_token": weight_bytes(model),
        "kv_read": attended_bytes(kv_bytes, context),
        "kv_per_token": kv_bytes.total(),
        "kv_copies": world * kv_heads / config.n_kv_heads,  # ranks that hold one KV head
        "all_reduces": num_reduces,
        "all_reduce_bytes": config.dim * dtype.itemsize,
        "gather_bytes": config.vocab_size * dtype.itemsize,  # the logits of all ranks
    }


def kept_matrices(hf: dict, file: Path, linears: list[str]) -> list[str]:
    """The matrices that a folder of ours keeps in full precision."""
    kept = (hf.get("quantization") or {}).get("kept") or []
    if not isinstance(kept, list) or not all(name in linears for name in kept):
        raise UserError(f"{file}: quantization: kept = {short_repr(kept)} must list matrices")
    return kept


def storage(path: Path, quantize: str | None) -> Source:
    """What is stored in a folder, in a GGUF file or, by its config.json alone, in a folder without
    tensors. UserError if only the tensors show it, and neither tensors nor `quantize` are there."""
    if is_gguf(path) or any(path.glob("*.safetensors")):
        return Checkpoint(path).source
    file = path / "config.json" if path.is_dir() else path
    config = read_config(file)
    hf = read_config_json(file)
    layouts = own_layouts(hf, file)
    schemes = same_schemes(config, layouts.block_scheme, layouts.head_scheme)
    linears = list(schemes)
    schemes |= dict.fromkeys(kept_matrices(hf, file, linears))
    if layouts.block_scheme is None and foreign_layouts(hf) is not None:
        method = hf["quantization_config"]["quant_method"]
        if method == "mxfp4":  # of all experts of gpt-oss
            schemes = {name: "mxfp4" if ".experts." in name else None for name in schemes}
        elif quantize is None:
            raise UserError(
                f"{file}: quant_method = {method!r}: give the folder with its tensors, or a"
                " --quantize scheme"
            )
    tensors = {}
    for name, scheme in schemes.items():
        tensors |= dict.fromkeys(stored_names(config, f"{name}.weight"), Stored((), scheme))
    keeps_plain = layouts.block_scheme is not None
    return Source(config, linears, tensors, scheme=layouts.block_scheme, keeps_plain=keeps_plain)


def seconds(row: dict, bandwidth: float, latency: float, link: float) -> float:
    """Seconds of a step of a plan: its bytes over memory bandwidth, the sent bytes over the link,
    and the latency of every collective. A ring sends 2 (N - 1) / N of the bytes of an all-reduce.
    Rates of one rank in bytes/s."""
    N = row["ranks"]
    num_collectives = row["all_reduces"]
    if N > 1:
        num_collectives += 2  # the logits gathered, and the token broadcast
    num_sent = 2 * row["all_reduces"] * row["all_reduce_bytes"] + row["gather_bytes"]
    memory_s = (row["read_per_token"] + row["kv_read"]) / bandwidth
    link_s = (N - 1) / N * num_sent / link
    return memory_s + num_collectives * latency + link_s


def print_row(row: dict, context: int, memory: float | None) -> None:
    if "refused" in row:
        print(f"{row['ranks']:5}  refused: {row['refused']}")
        return
    notes = []
    if row["kv_copies"] > 1:
        notes.append(f"a KV head on {row['kv_copies']:.0f} ranks")
    size = row["weights"] + context * row["kv_per_token"]
    if memory is not None and size > memory * 1e9:
        notes.append(f"does not fit: {size / 1e9:.0f} GB with the cache")
    traffic = f"{row['all_reduces']} x {row['all_reduce_bytes'] / 1e3:.0f} kB"
    print(
        f"{row['ranks']:5}  {row['weights'] / 1e9:7.4g}  {row['read_per_token'] / 1e9:10.4g}"
        f"  {row['kv_per_token'] / 1e6:12.4f}  {traffic:>18}  {row['tok_s']:13.1f} "
        f" {'; '.join(notes)}"
    )


def rank_counts(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def positive_number(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be a positive number")
    return value


def latency(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be a number from 0 on")
    return value


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        description="The bytes that each rank of a tensor-parallel launch would hold, read and"
        " send."
    )
    add = parser.add_argument
    add("config", metavar="PATH", help="a config.json, a Hugging Face folder or a .gguf file")
    add(
        "--ranks",
        type=rank_counts,
        default="1,2,4,8",
        help="numbers of ranks, with commas between; default: %(default)s",
    )
    dtype_help = "of plain weights; default: %(default)s"
    FLAGS["dtype"].add_to(parser, default="bfloat16", help=dtype_help)
    FLAGS["quantize"].add_to(parser)
    FLAGS["quantize_head"].add_to(parser)
    add(
        "--context",
        type=int,
        help="cached tokens of the predicted step; default: 1000, or all positions of the model",
    )
    for name, number_type, default, help in (
        ("--bandwidth", positive_number, 3350, "memory bandwidth of a device, GB/s; an H100's"),
        ("--link", positive_number, 450, "bandwidth between devices each way, GB/s; NVLink's"),
        ("--latency", latency, 20, "latency of a collective, microseconds"),
    ):
        add(name, type=number_type, default=default, help=f"{help}; default: {default}")
    memory_help = "memory of a device, GB: marks the launches that do not fit"
    add("--memory", type=positive_number, help=memory_help)
    add(
        "--json",
        action="store_true",
        help="print a JSON object for every number of ranks, in bytes and seconds",
    )
    return parser.parse_args(argv)


@exit_on_error()
def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    path = Path(args.config)
    source = storage(path, args.quantize)
    config = source.config
    context = args.context
    if context is None:
        context = min(1000, config.max_seq_length)
    if not 0 <= context <= config.max_seq_length:
        limit = f"the model's {config.max_seq_length} positions"
        raise UserError(f"--context {context} is over {limit}, or negative")
    schemes = choose_schemes(source, path, args.quantize, args.quantize_head)
    for scheme in {*schemes.values()} - {None}:
        format_of(scheme)  # UserError for an unknown one, once and not in each row
    dtype = getattr(torch, args.dtype)
    if not args.json:
        formats = sorted({*schemes.values()} - {None}) or [args.dtype]
        print(f"{path.stem}, {' and '.join(formats)}; per rank, sizes in GB")
        print("ranks  weights  read/token  KV/1k tokens   all-reduces/token  tok/s at most  note")
    for world in args.ranks:
        try:
            row = plan(config, world, dtype, schemes, context)
        except UserError as error:
            row = {"ranks": world, "refused": str(error)}
        else:
            step_s = seconds(row, args.bandwidth * 1e9, args.latency / 1e6, args.link * 1e9)
            row |= {"step_s": step_s, "tok_s": 1 / step_s}
        if args.json:
            print(json.dumps(row))
        else:
            print_row(row, context, args.memory)


if __name__ == "__main__":
    main()
