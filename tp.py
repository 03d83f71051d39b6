"""Tensor parallelism: every matrix is sharded over N ranks, so that N devices read a token's
weights at once.

    PLAN, ShardSpec     the design as data: dimension and units of each matrix's shards
    shard, fill_shard   a rank's shard of a stored tensor; pure functions
    check_divisible     refuses sizes that do not divide, by name and number
    shrink_to_shard     a meta model -> the shapes of one rank
    Ranks               this process among the others, and the collectives: sum, max, gather,
                        broadcast
    connect             hooks the collectives behind a sharded model's matrices
    join, leave         the process group that torchrun prepared

The plan is Megatron's (Shoeybi et al., arXiv:1909.08053, section 3): q, k, v, gate and up by their
outputs, out and down by their inputs, so that a block needs two sums; embedding and head by the
vocabulary. The collectives are torch.distributed's functional ones, which compile into the graph.
model.py reads local head counts from the shapes of its matrices.
"""

import datetime
import gc
import importlib
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _resolve_process_group

from decoding.errors import UserError
from decoding.launcher import launched

# -------------------------------------------------------------------------------------------- plan

SUM = "sum"
GATHER = "gather"


class ShardSpec(NamedTuple):
    """How a matrix (out, in) is sharded."""

    dim: int  # 0: outputs, 1: inputs
    # For each source stacked in the matrix (q, k, v), the Config field that counts its units.
    units: tuple[str, ...]
    after: str | None = None  # the collective applied to the output: all-reduce, all-gather or none


PLAN = {  # every rank has the full norms, which are not listed
    "embed": ShardSpec(0, ("vocab_size",), SUM),
    "attention": ShardSpec(0, ("n_heads",)),  # the sinks
    "attention.qkv": ShardSpec(0, ("n_heads", "n_kv_heads", "n_kv_heads")),
    "attention.out": ShardSpec(1, ("n_heads",), SUM),
    "ffn.gate_up": ShardSpec(0, ("ffn_dim", "ffn_dim")),
    "ffn.down": ShardSpec(1, ("ffn_dim",), SUM),
    "ffn.experts": ShardSpec(1, (), SUM),  # one sum for all experts
    "ffn.experts.gate_up": ShardSpec(0, ("expert_dim", "expert_dim")),
    "ffn.experts.down": ShardSpec(1, ("expert_dim",)),
    "ffn.shared.gate_up": ShardSpec(0, ("shared_dim", "shared_dim")),
    "ffn.shared.down": ShardSpec(1, ("shared_dim",), SUM),
    "lm_head": ShardSpec(0, ("vocab_size",), GATHER),
}

HF_NAMES = {
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "ffn_dim": "intermediate_size",
    "expert_dim": "the experts' intermediate_size",
    "shared_dim": "shared_expert_intermediate_size",
}


def shard_spec(module: str) -> ShardSpec | None:
    """The row of PLAN for a module's full name, "layers.3.ffn.down" or "lm_head", or for one source
    of a fused matrix in parts, "layers.3.attention.qkv.2"."""
    fused, _, number = module.rpartition(".")
    if number.isdecimal():
        spec = shard_spec(fused)
        has_sources = spec is not None and spec.units
        return spec._replace(units=(spec.units[int(number)],)) if has_sources else None
    module = module.split(".", 2)[-1] if module.startswith("layers.") else module
    return PLAN.get(re.sub(r"experts\.\d+\.", "experts.", module))


class ShardRange(NamedTuple):
    """Units [begin, end) of a stored tensor, in memory for `size` units. A unit, such as a head, is
    never divided."""

    begin: int
    end: int
    size: int


def shard_range(
    config,
    units: str,
    rank: int,
    world: int,
) -> ShardRange:
    """The units of rank `rank` of `world`. UserError names the key that does not divide.

    The vocabulary's last shards may be padded. If there are fewer KV heads than ranks, neighbouring
    ranks hold the same head, in the order of its query heads.
    """
    n = getattr(config, units)
    if units == "vocab_size":
        size = math.ceil(n / world)
        begin = min(rank * size, n)
        return ShardRange(begin, min(begin + size, n), size)
    if units == "n_kv_heads" and n < world and world % n == 0:
        head = rank * n // world
        return ShardRange(head, head + 1, 1)
    if n % world:
        raise UserError(
            f"{HF_NAMES[units]} = {n} cannot be divided over {world} ranks; it must be a multiple"
            f" of them",
        )
    size = n // world
    return ShardRange(rank * size, rank * size + size, size)


def check_divisible(config, world: int, group: int = 0) -> None:
    """UserError, with both numbers, for sizes that do not divide into `world` shards. `group`:
    neighbouring inputs that share a scale; 0 if the full row does."""
    if world == 1:
        return
    if config.qk_norm == "full":
        raise UserError(
            f"queries are normed over all heads at once and cannot be divided over {world} ranks;"
            f" use one",
        )
    unused = "ffn_dim" if config.sparse and all(config.sparse) else None
    for name, spec in PLAN.items():
        if unused in spec.units:
            continue
        for units in spec.units:
            local = shard_range(config, units, 0, world)
            num_inputs = local.size * (config.head_dim if units == "n_heads" else 1)
            if spec.dim == 1 and group and num_inputs % group:
                raise UserError(
                    f"{name}: {num_inputs * world} inputs over {world} ranks are {num_inputs} each,"
                    f" which splits a group of {group} that share a scale; use fewer ranks, or a"
                    f" scheme with smaller groups"
                )


def shard(
    stored: Tensor,
    spec: ShardSpec | None,
    source: int,
    config,
    ranks: "Ranks",
    is_stacked: bool = False,
) -> Tensor:
    """This rank's shard, a view, of a stored tensor: the weight, bias or quantized part of source
    number `source` of a matrix. A tensor without an input dimension is not sharded by inputs.

    `is_stacked`: all sources are stored as one tensor (Phi-3's q, k and v). Each is sharded by
    itself; the result is a copy.
    """
    if spec is None or spec.dim >= stored.dim():
        return stored
    if is_stacked and len(spec.units) > 1:
        sources = stored.split(source_rows(spec, len(stored), config, ALONE))
        shards = [shard(part, spec, i, config, ranks) for i, part in enumerate(sources)]
        return torch.cat(shards)
    units = spec.units[source]
    num_units = getattr(config, units)
    local = shard_range(config, units, ranks.rank, ranks.world)
    # One unit of packed codes may be a fraction of a byte; a rank's units fill bytes.
    size = stored.size(spec.dim)
    begin = local.begin * size // num_units
    end = local.end * size // num_units
    return stored.narrow(spec.dim, begin, end - begin)


def fill_shard(
    part: Tensor,
    stored: Tensor,
    spec: ShardSpec | None,
    source: int,
    config,
    ranks: "Ranks",
    is_stacked: bool,
) -> None:
    """Copy this rank's shard of a stored tensor into `part`. A tensor of the same size for any
    number of inputs, such as a codebook, is not sharded by inputs."""
    if spec is not None and spec.dim == 1 and stored.shape[1:] == part.shape[1:]:
        spec = None
    stored = shard(stored, spec, source, config, ranks, is_stacked)
    part[: len(stored)].copy_(stored)  # casts and moves without a copy between
    part[len(stored) :].zero_()  # a vocabulary's padding


def source_rows(
    spec: ShardSpec | None,
    rows: int,
    config,
    ranks: "Ranks",
) -> list[int]:
    """The numbers of rows that the sources of a local matrix of `rows` rows fill, in order."""
    if spec is None or len(spec.units) == 1:
        return [rows]
    sizes = local_units(spec, config, ranks)
    return [rows // sum(sizes) * size for size in sizes]


def local_units(spec: ShardSpec, config, ranks: "Ranks") -> list[int]:
    """The number of units of each source that this rank has memory for."""
    return [shard_range(config, units, ranks.rank, ranks.world).size for units in spec.units]


def shrink_to_shard(model: nn.Module, ranks: "Ranks") -> None:
    """Give the parameters of a meta model, in place, the shapes of this rank's shards. A bias of a
    matrix that is sharded by inputs stays on rank 0 alone, so that it is added once."""
    if ranks.world == 1:
        return
    config = model.config
    for name, module in model.named_modules():
        spec = shard_spec(name)
        if spec is None or not spec.units:
            continue
        num_units = sum(getattr(config, units) for units in spec.units)
        num_local_units = sum(local_units(spec, config, ranks))
        for key, parameter in list(module.named_parameters(recurse=False)):
            if spec.dim < parameter.dim():
                shape = list(parameter.shape)
                shape[spec.dim] = shape[spec.dim] // num_units * num_local_units
                local = nn.Parameter(parameter.new_empty(shape), False)
                module.register_parameter(key, local)
            elif ranks.rank > 0:
                module.register_parameter(key, None)
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
    if config.tie_embeddings:
        model.lm_head.weight = model.embed.weight


# ------------------------------------------------------------------------------------------ ranks

# Some collectives wait for a person to type, or for other lines of a file.
HOST_TIMEOUT = datetime.timedelta(days=7)


@dataclass(frozen=True)
class Ranks:
    """This process as rank `rank` of `world`, with the collectives. `group` is torch's name of the
    process group; None for a plan without processes.

    All ranks must call every collective in the same order with the same shapes. In a world of 1
    each is the identity.
    """

    rank: int = 0
    world: int = 1
    group: str | None = None
    host: str | None = None  # the group of `broadcast_object`, which may wait for a person to type
    timeout_s: float | None = None

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x."""
        return self._collective("all_reduce", x, "sum")

    def max(self, x: Tensor) -> Tensor:
        """The elementwise maximum of all ranks' x."""
        return self._collective("all_reduce", x, "max")

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's x. Kernels of different ranks may differ in the last bit, so rank 0 alone takes
        decisions."""
        return self._collective("broadcast", x, 0)

    def gather(self, x: Tensor) -> Tensor:
        """x (..., n) of every rank -> (..., world * n), in rank order."""
        flat = x.reshape(1, -1)  # (1, ... * n)
        gathered = self._collective("all_gather_into_tensor", flat, self.world)
        gathered = gathered.view(self.world, *x.shape)
        return gathered.movedim(0, -2).flatten(-2)  # (world, ..., n) -> (..., world * n)

    def _collective(self, name: str, x: Tensor, argument: object) -> Tensor:
        """A collective by torch's name for it, with its one argument beside x and the group."""
        if self.world == 1:
            return x
        operators = torch.ops._c10d_functional
        return operators.wait_tensor(getattr(operators, name)(x, argument, self.group))

    def broadcast_object(self, value: object) -> object:
        """Rank 0's value, any Python object, on the host."""
        if self.world == 1:
            return value
        payload = [value]
        dist.broadcast_object_list(payload, group_src=0, group=_resolve_process_group(self.host))
        return payload[0]

    def check_same(self, get_values: Callable[[], dict[str, object]]) -> None:
        """UserError, on every rank, that names a value that differs from rank 0's. A
        single process does not call `get_values`."""
        if self.world == 1:
            return
        values_by_rank: list[dict] = [{}] * self.world
        dist.all_gather_object(
            values_by_rank,
            get_values(),
            group=_resolve_process_group(self.group),
        )
        for rank, values in enumerate(values_by_rank):
            for name, value in values_by_rank[0].items():
                if values.get(name) != value:
                    raise UserError(
                        f"rank {rank} differs from rank 0 in {name}: every rank must be given the"
                        f" same",
                    )


ALONE = Ranks()


def ranks_of(model: nn.Module) -> Ranks:
    """The ranks of a connected model."""
    return getattr(model, "ranks", ALONE)


# ------------------------------------------------------------------------------------------ hooks


class EmbeddingPart(nn.Module):
    """This rank's rows [begin, end) of the embedding: tokens (...) -> (..., D), zeros for other
    tokens."""

    def __init__(
        self,
        part: nn.Module,
        begin: int,
        end: int,
    ):
        super().__init__()
        self.part = part
        self.begin = begin
        self.end = end

    def forward(self, tokens: Tensor) -> Tensor:
        inside = (tokens >= self.begin) & (tokens < self.end)
        rows = self.part(torch.where(inside, tokens - self.begin, 0))
        return torch.where(inside[..., None], rows, 0)


def connect(model: nn.Module, ranks: Ranks) -> nn.Module:
    """Hook PLAN's collectives behind the matrices of a model that holds this rank's shards. Call
    this last: a module that replaces a hooked one must take over its hooks."""
    if ranks.world == 1:
        return model
    begin, end, _ = shard_range(model.config, "vocab_size", ranks.rank, ranks.world)
    model.embed = EmbeddingPart(model.embed, begin, end)
    model.ranks = ranks

    def sum_parts(module: nn.Module, args, part: Tensor) -> Tensor:
        """Partial sums of a matrix sharded by inputs -> its outputs."""
        return ranks.sum(part)

    def gather_logits(module: nn.Module, args, local: Tensor) -> Tensor:
        """Logits of this rank's part of the vocabulary (..., V / N) -> (..., V), without
        padding."""
        return ranks.gather(local)[..., : model.config.vocab_size]

    for name, module in model.named_modules():
        spec = shard_spec(name)
        if spec is not None and spec.after is not None:
            module.register_forward_hook(sum_parts if spec.after == SUM else gather_logits)
    return model


# ----------------------------------------------------------------------------------------- launch


def local_device(requested: str | None) -> str | None:
    """The device of this rank. Under torchrun that is GPU number LOCAL_RANK of its machine, unless
    --device is cpu or there is no GPU. UserError for more ranks on a machine than GPUs."""
    if not launched() or requested == "cpu":
        return requested
    if requested not in (None, "cuda"):
        raise UserError(
            f"--device {requested}: with several ranks use cpu or cuda; each rank takes its own GPU"
        )
    # Slurm does not set LOCAL_WORLD_SIZE. Then at least the GPUs up to this rank's must be there.
    local_rank = int(os.environ["LOCAL_RANK"])
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", local_rank + 1))
    num_gpus = torch.cuda.device_count()
    if requested is None and num_gpus == 0:
        return None
    if num_local > num_gpus:
        raise UserError(
            f"--nproc_per_node {num_local}: this machine has {num_gpus} GPUs; start no more ranks"
            f" on it",
        )
    return f"cuda:{local_rank}"


def join(device: torch.device, timeout_s: float) -> Ranks:
    """The ranks that torchrun started, with NCCL between GPUs and gloo between CPUs; ALONE without
    torchrun. A rank that waits longer than `timeout_s` for another one raises RuntimeError, or
    NCCL's watchdog ends it."""
    if not launched():
        return ALONE
    # The compiler's imports store the current group as a default argument. Imported after the group
    # exists, they keep gloo's threads alive beyond `leave`, and the process can abort at exit
    # (torch 2.13).
    importlib.import_module("torch._dynamo")
    on_gpu = device.type == "cuda"
    options = {"device_id": device} if on_gpu else {}
    # Rank and world size are torchrun's global ones; LOCAL_RANK only chooses the GPU.
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timeout, **options)
    except ValueError as error:  # a variable of torchrun's that another launcher did not set
        raise UserError(f"{error}; torchrun sets it") from None
    # Store names: a reference to a group would keep its threads alive after `leave`.
    name = dist.group.WORLD.group_name
    host = dist.new_group(backend="gloo", timeout=HOST_TIMEOUT).group_name
    return Ranks(dist.get_rank(), dist.get_world_size(), name, host, timeout_s)


def leave() -> None:
    """End the group of `join`. NCCL waits for CUDA graphs with collectives, so the graphs are freed
    first."""
    if not dist.is_initialized():
        return
    if dist.get_backend() == "nccl":
        torch.cuda.synchronize()
        torch._dynamo.reset()
        gc.collect()
    dist.destroy_process_group()


def lost_contact(error: RuntimeError) -> bool:
    """Did a collective raise this because another rank died or timed out?"""
    return isinstance(error, dist.DistError) or (launched() and "gloo" in str(error))
