"""What would each rank hold, read and send? A table from a config.json, a folder or a GGUF file, before anything is
rented.

    python -m scripts.tp_plan benchmarks/shapes/llama-3.1-70b.json --ranks 1,2,4,8,16 --bandwidth 3350 --memory 80

    plan        one number of ranks: bytes held and read, keys and values, collectives; or why it is refused
    seconds     a step from bandwidth and latency: weights and cache once, and every collective
    storage     what the weights are stored in already, and what --quantize makes of the rest
    show        the table

Shapes are those of the program itself: the same meta model, cut by tp.py and quantized by quantize.py, counted by
cli/report.py. The cache is held in full for every layer; a layer with a sliding window reads its window of it. The
prediction is a floor: kernels that reach less than the bandwidth, and launches, come on top.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from cli.errors import fail
from cli.flags import DTYPES, Parser
from cli.report import attended_bytes, held, position_bytes, weight_bytes
from loading.checkpoint import (
    StoredForm,
    empty_model,
    max_group,
    open_folder,
    read_config,
    read_json,
    read_stored_form,
    resolve_schemes,
)
from loading.gguf import is_gguf
from loading.quantized.merged_experts import is_mxfp4
from loading.quantized.reader import find_layout
from model import Config
from quantize import SCHEMES, format_of
from tp import SUM, Ranks, check_divisible, shard_spec
from weights.walker import named_linears

TOKENS = 1000  # cached tokens that the table speaks of
CONTEXT = 1000  # --context, where the model has as many positions


def plan(
    config: Config, world: int, dtype: torch.dtype = torch.bfloat16, scheme: str | None = None, head: str | None = None,
    overrides: Mapping[str, str | None] = MappingProxyType({}), context: int = 0,
) -> dict:  # fmt: skip
    """Rank 0 of `world`, in bytes: weights held and read per token (of blocks, head and embedding), keys and values
    that one token takes and that a step reads with `context` tokens cached, and what one token sends. Schemes are those
    of `empty_model`. ValueError for what tp.py refuses."""
    check_divisible(config, world, max_group(scheme, overrides))
    model = empty_model(config, dtype, scheme, head, Ranks(0, world), overrides)
    replicated = sum(x.nbytes for name, x in model.named_parameters() if shard_spec(name.rpartition(".")[0]) is None)
    specs, kv_bytes = [shard_spec(name) for name, _ in model.named_modules()], position_bytes(model)
    sums = sum(spec is not None and spec.after == SUM for spec in specs)
    return {
        "ranks": world,
        "sparse": bool(config.sparse),
        "weights": held(model),
        "blocks": held(model.layers),
        "head": held(model.lm_head),
        "embedding": held(model.embed),
        "read_per_token": weight_bytes(model),
        "replicated": replicated if world > 1 else 0,
        "kv_copies": world * model.layers[0].attention.heads()[1] / config.n_kv_heads,
        "kv_per_token": kv_bytes.total(),
        "kv_read": attended_bytes(kv_bytes, context),
        "all_reduces": sums if world > 1 else 0,
        "all_reduce_bytes": config.dim * dtype.itemsize,
        "gather_bytes": config.vocab_size * dtype.itemsize,  # logits of every rank
    }


def storage(path: Path, config: Config, quantize: str | None) -> StoredForm:
    """The form in which a folder, a GGUF file or a config.json alone has its weights. ValueError without `quantize`
    where the tensors alone could tell."""
    if is_gguf(path) or any(path.glob("*.safetensors")):
        return open_folder(path, config)[0]
    file = path / "config.json" if path.is_dir() else path
    hf = read_json(file)
    if is_mxfp4(hf):
        names = (name for name, _ in named_linears(empty_model(config, torch.float32)))
        return StoredForm(overrides={name: "mxfp4" for name in names if ".experts." in name})
    stored = read_stored_form(file)
    if stored.scheme is None and quantize is None and find_layout(hf) is not None:
        method = hf["quantization_config"]["quant_method"]
        raise ValueError(
            f"{file}: only its tensors tell which scheme holds weights of quant_method = {method!r}: give the folder"
            " with them, or name a scheme with --quantize"
        )
    return stored


def seconds(row: dict, bandwidth: float, latency: float, link: float) -> float:
    """Of one step of a plan: bytes over bandwidth (both of one rank), and for each collective its latency and a ring's
    2 (N - 1) / N of its bytes over the link. Bandwidths in bytes/s, latency in s."""
    N = row["ranks"]
    compute = (row["read_per_token"] + row["kv_read"]) / bandwidth
    if N == 1:
        return compute
    ring = 2 * (N - 1) / N * row["all_reduce_bytes"] / link
    decided = 2 * latency + (N - 1) / N * row["gather_bytes"] / link  # logits gathered, the token broadcast
    return compute + row["all_reduces"] * (latency + ring) + decided


def show(rows: list[dict], args: argparse.Namespace, formats: list[str]) -> None:
    print(f"{Path(args.config).stem}, {' and '.join(formats)}; per rank, in GB unless said")
    print("ranks  weights  read/token  KV/1k tokens   all-reduces/token  tok/s at most  note")
    for row in rows:
        if "refused" in row:
            print(f"{row['ranks']:5}  refused: {row['refused']}")
            continue
        notes = [f"a KV head on {row['kv_copies']:.0f} ranks"] if row["kv_copies"] > 1 else []
        need = row["weights"] + args.context * row["kv_per_token"]
        if args.memory and need > args.memory * 1e9:
            notes.append(f"does not fit: {need / 1e9:.0f} GB with the cache")
        sent = f"{row['all_reduces']} x {row['all_reduce_bytes'] / 1e3:.0f} kB"
        print(
            f"{row['ranks']:5}  {row['weights'] / 1e9:7.4g}  {row['read_per_token'] / 1e9:10.4g}"
            f"  {TOKENS * row['kv_per_token'] / 1e9:12.4f}  {sent:>18}  {row['tok_s']:13.1f}  {'; '.join(notes)}"
        )
    largest = rows[-1]
    if "refused" not in largest:
        whole = (
            f"norms{' and routers' if largest['sparse'] else ''} on every rank, {largest['replicated'] / 1e6:.1f} MB"
            if largest["replicated"]
            else "nothing"
        )
        print(f"replicated: {whole}; everything else is divided, embedding and head by the vocabulary")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(description="What each rank of a tensor-parallel launch would hold, read and send.")
    add = parser.add_argument
    add("config", metavar="PATH", help="a config.json, a Hugging Face folder or a .gguf file")
    add("--ranks", default="1,2,4,8", help="numbers of ranks, default 1,2,4,8")
    add("--dtype", choices=DTYPES, default="bfloat16")
    add("--quantize", metavar="SCHEME", help=", ".join(SCHEMES))
    add("--quantize_head", metavar="SCHEME")
    add("--context", type=int, help=f"tokens cached in the step that is predicted, default {CONTEXT}")
    add("--bandwidth", type=float, default=3350, help="of one device's memory, GB/s; default: an H100's datasheet")
    add("--link", type=float, default=450, help="between devices, GB/s each way; default: an H100's NVLink")
    add("--latency", type=float, default=20, help="of one collective, microseconds")
    add("--memory", type=float, help="of one device, GB: says what does not fit")
    add("--json", action="store_true", help="one object per number of ranks, in bytes and seconds")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    try:
        for scheme in (args.quantize, args.quantize_head):
            if scheme is not None:
                format_of(scheme)
        if not all(part.isdigit() and int(part) for part in args.ranks.split(",")):
            raise ValueError(f"--ranks {args.ranks} must be numbers from 1 on, such as 1,2,4,8")
        if min(args.bandwidth, args.link) <= 0 or args.latency < 0 or (args.context or 0) < 0:
            raise ValueError("--bandwidth and --link must be positive, --latency and --context not negative")
        path = Path(args.config)
        config, rows = read_config(path / "config.json" if path.is_dir() or is_gguf(path) else path), []
        args.context = min(CONTEXT, config.max_seq_length) if args.context is None else args.context
        if args.context > config.max_seq_length:
            raise ValueError(f"--context {args.context} is over the model's {config.max_seq_length} positions")
        scheme, head, overrides = resolve_schemes(
            storage(path, config, args.quantize), path, args.quantize, args.quantize_head
        )
        for world in map(int, args.ranks.split(",")):
            try:
                row = plan(config, world, getattr(torch, args.dtype), scheme, head, overrides, args.context)
                step_s = seconds(row, args.bandwidth * 1e9, args.latency / 1e6, args.link * 1e9)
                rows.append({**row, "step_s": step_s, "tok_s": 1 / step_s})
            except ValueError as error:
                rows.append({"ranks": world, "refused": str(error)})
    except ValueError as error:
        fail(error)
    if args.json:
        for row in rows:
            print(json.dumps(row))
    else:
        show(rows, args, sorted({scheme, head, *overrides.values()} - {None}) or [args.dtype])


if __name__ == "__main__":
    main()
