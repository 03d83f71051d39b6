"""Tensor parallelism: every matrix cut over N ranks, so that N devices read a token's weights at once.

    PLAN, Cut           which matrices are cut, along which dimension, in which units: the design as data
    share, take, stack  pure functions: what of a stored tensor belongs to a rank, and where it goes
    check, shrink       what cannot be divided, refused by name; a meta model -> the shapes that a rank holds
    Ranks               who takes part, and what they say to each other: sum, gather, broadcast
    connect             what makes a cut model whole: sums behind `out`, `down` and `embed`, gathered logits
    join, leave         the process group that torchrun prepared

The cut is Megatron's (Shoeybi et al., arXiv:1909.08053, section 3): q, k, v, gate and up by their outputs, out and
down by their inputs, so that a block needs two sums; embedding and head by the vocabulary. Collectives are
torch.distributed's functional ones, which compile into the graph. This file does not know formats, files, sampling or
decoding: local head counts follow from the matrices' shapes, which model.py reads by itself.
"""

import datetime
import gc
import importlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _resolve_process_group

# ------------------------------------------------------------------------------------------------ plan

SUM, GATHER = "sum", "gather"


class Cut(NamedTuple):
    """How one matrix (out, in) is divided. `units` names, for each source stacked in it, the Config field that counts
    what must stay in one piece; `after` is what makes the ranks' results whole."""

    dim: int  # 0: outputs, 1: inputs
    units: tuple[str, ...]
    after: str | None = None


PLAN = {  # what is not listed, the norms, is whole on every rank
    "embed": Cut(0, ("vocab_size",), SUM),
    "attention": Cut(0, ("n_heads",)),  # its sinks
    "attention.qkv": Cut(0, ("n_heads", "n_kv_heads", "n_kv_heads")),
    "attention.out": Cut(1, ("n_heads",), SUM),
    "ffn.gate_up": Cut(0, ("ffn_dim", "ffn_dim")),
    "ffn.down": Cut(1, ("ffn_dim",), SUM),
    "ffn.experts": Cut(1, (), SUM),  # one sum for all experts, whose matrices are cut as any feed-forward's
    "ffn.experts.gate_up": Cut(0, ("expert_dim", "expert_dim")),
    "ffn.experts.down": Cut(1, ("expert_dim",)),
    "ffn.shared.gate_up": Cut(0, ("shared_dim", "shared_dim")),
    "ffn.shared.down": Cut(1, ("shared_dim",), SUM),
    "lm_head": Cut(0, ("vocab_size",), GATHER),
}

HF_NAMES = {
    "n_heads": "num_attention_heads", "n_kv_heads": "num_key_value_heads", "ffn_dim": "intermediate_size",
    "expert_dim": "the experts' intermediate_size", "shared_dim": "shared_expert_intermediate_size",
}  # fmt: skip


def cut_of(module: str) -> Cut | None:
    """The row of PLAN for a module's full name, "layers.3.ffn.down" or "lm_head"."""
    module = module.split(".", 2)[-1] if module.startswith("layers.") else module
    return PLAN.get(re.sub(r"experts\.\d+\.", "experts.", module))


class Share(NamedTuple):
    """Units [begin, end) of a stored tensor, in room for `size` of them."""

    begin: int
    end: int
    size: int


def share(config, units: str, rank: int, world: int) -> Share:
    """What rank `rank` of `world` holds of so many units. ValueError names the key that does not divide.

    A vocabulary may leave the last ranks with padding. KV heads, when there are fewer than ranks, are held by several:
    query heads in order stay with theirs.
    """
    n = getattr(config, units)
    if units == "vocab_size":
        size = -(-n // world)
        return Share(min(rank * size, n), min((rank + 1) * size, n), size)
    if units == "n_kv_heads" and n < world and world % n == 0:
        return Share(rank * n // world, rank * n // world + 1, 1)
    if n % world:
        raise ValueError(f"{HF_NAMES[units]} = {n} cannot be divided over {world} ranks; it must be a multiple of them")
    return Share(rank * n // world, (rank + 1) * n // world, n // world)


def check(config, world: int, group: int = 0) -> None:
    """ValueError, with both numbers, for what cannot be cut into `world` parts; `group`: neighbouring inputs of a row
    that share a scale, 0 where the whole row does."""
    if world == 1:
        return
    if config.qk_norm == "full":
        raise ValueError(f"queries are normed over all heads at once, which {world} ranks would divide; use one")
    unused = "ffn_dim" if config.sparse and all(config.sparse) else None
    for name, cut in PLAN.items():
        if unused in cut.units:
            continue
        for units in cut.units:
            share(config, units, 0, world)
        if cut.dim == 1 and cut.units:
            units = cut.units[0]
            inputs = getattr(config, units) * (config.head_dim if units == "n_heads" else 1)
            if inputs // world % (group or 1):
                raise ValueError(
                    f"{name}: {inputs} inputs over {world} ranks are {inputs // world} each, which cuts a group of"
                    f" {group} that share a scale; use fewer ranks, or a scheme with smaller groups"
                )


def take(stored: Tensor, cut: Cut | None, source: int, config, ranks: "Ranks", alone: bool = False) -> Tensor:
    """This rank's part, a view, of a stored tensor: the weight, bias or quantized part behind source number `source`
    of a matrix. One value per output stays whole when inputs are cut. `alone`: there is no other source, so that all
    that is stacked in the matrix is stored as one tensor too, and the part is a copy."""
    if cut is None or cut.dim >= stored.dim():
        return stored
    if alone and len(cut.units) > 1:
        whole = stored.split(stack(cut, len(stored), config, ALONE))
        return torch.cat([take(part, cut, number, config, ranks) for number, part in enumerate(whole)])
    units = getattr(config, cut.units[source])
    mine = share(config, cut.units[source], ranks.rank, ranks.world)
    size = stored.size(cut.dim)  # in bytes of packed codes a unit may be a fraction; a rank's units never are
    begin, end = mine.begin * size // units, mine.end * size // units
    return stored.narrow(cut.dim, begin, end - begin)


def fill_share(part: Tensor, stored: Tensor, cut: Cut | None, number: int, config, ranks: "Ranks", alone: bool) -> None:
    """Copy this rank's share of a stored tensor into place. What has nothing for each input is not cut by inputs: a
    codebook."""
    has_inputs = cut is not None and (cut.dim == 0 or stored.shape[1:] != part.shape[1:])
    stored = take(stored, cut if has_inputs else None, number, config, ranks, alone)
    part[: len(stored)].copy_(stored)  # casts and moves on the way, no copy between
    part[len(stored) :].zero_()  # a vocabulary's padding


def stack(cut: Cut | None, rows: int, config, ranks: "Ranks") -> list[int]:
    """How many of a local matrix's `rows` each of its sources fills, in order."""
    if cut is None or len(cut.units) == 1:
        return [rows]
    sizes = [share(config, units, ranks.rank, ranks.world).size for units in cut.units]
    return [rows // sum(sizes) * size for size in sizes]


def shrink(model: nn.Module, ranks: "Ranks") -> None:
    """Give the matrices of a meta model, in place, the shapes that this rank holds. The bias of a matrix whose inputs
    are cut stays with rank 0: it must be added once."""
    config = model.config
    for name, module in list(model.named_modules()):
        cut = cut_of(name)
        if cut is None or ranks.world == 1 or not cut.units:
            continue
        if isinstance(getattr(module, "sinks", None), nn.Parameter):
            module.sinks = nn.Parameter(module.sinks.new_empty(len(module.sinks) // ranks.world), False)
        if not hasattr(module, "weight"):
            continue
        whole = sum(getattr(config, units) for units in cut.units)
        size = sum(share(config, units, ranks.rank, ranks.world).size for units in cut.units)
        shape = list(module.weight.shape)
        shape[cut.dim] = shape[cut.dim] // whole * size
        module.weight = nn.Parameter(module.weight.new_empty(shape), False)
        if isinstance(module, nn.Embedding):
            module.num_embeddings = shape[0]
            continue
        module.out_features, module.in_features = shape
        if module.bias is not None:
            kept = cut.dim == 0 or ranks.rank == 0
            module.bias = nn.Parameter(module.bias.new_empty(shape[0]), False) if kept else None
    if config.tie_embeddings:
        model.lm_head.weight = model.embed.weight


# ----------------------------------------------------------------------------------------------- ranks

HOST_TIMEOUT = datetime.timedelta(days=7)  # of what may wait for a person to type, or for all other lines


@dataclass(frozen=True)
class Ranks:
    """This process as rank `rank` of `world`; `group` is torch's name of their process group, None for a plan alone.

    Every collective must be called by all ranks, in the same order, with the same shapes. With a world of 1 each is the
    identity.
    """

    rank: int = 0
    world: int = 1
    group: str | None = None
    host: str | None = None  # the name of the group that `tell` uses, which may wait for a person to type
    timeout_s: float | None = None

    def replica(self, size: int) -> "Ranks":
        """This rank among the `size` neighbours that hold one model together. All ranks must call it, and `size` must
        divide their number."""
        mine = self
        for begin in range(0, self.world if 1 < size < self.world else 0, size):
            members = range(begin, begin + size)
            options = {"ranks": list(members), "timeout": datetime.timedelta(seconds=self.timeout_s)}
            both = dist.new_group(**options), dist.new_group(**options | {"backend": "gloo", "timeout": HOST_TIMEOUT})
            if self.rank in members:
                mine = Ranks(self.rank - begin, size, *(group.group_name for group in both), self.timeout_s)
        return ALONE if size == 1 else mine

    def sum(self, x: Tensor) -> Tensor:
        """Of all ranks' x."""
        return x if self.world == 1 else self._wait(torch.ops._c10d_functional.all_reduce(x, "sum", self.group))

    def largest(self, x: Tensor) -> Tensor:
        """Elementwise, of all ranks' x."""
        return x if self.world == 1 else self._wait(torch.ops._c10d_functional.all_reduce(x, "max", self.group))

    def gather(self, x: Tensor) -> Tensor:
        """x (..., n) of every rank -> (..., world * n), in rank order."""
        if self.world == 1:
            return x
        flat = x.reshape(1, -1)  # (1, ... * n)
        both = self._wait(torch.ops._c10d_functional.all_gather_into_tensor(flat, self.world, self.group))
        return both.view(self.world, *x.shape).movedim(0, -2).flatten(-2)  # (world, ..., n) -> (..., world * n)

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's x. Kernels of different ranks may differ in the last bit, so what all act upon is decided once."""
        return x if self.world == 1 else self._wait(torch.ops._c10d_functional.broadcast(x, 0, self.group))

    @staticmethod
    def _wait(x: Tensor) -> Tensor:
        return torch.ops._c10d_functional.wait_tensor(x)

    def tell(self, value: object) -> object:
        """Rank 0's value, any Python object, on the host."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, group_src=0, group=_resolve_process_group(self.host))
        return box[0]

    def check_same(self, what: Callable[[], dict[str, object]]) -> None:
        """ValueError, on every rank, that names what differs from rank 0's. `what` runs only where there are others."""
        if self.world == 1:
            return
        every: list[dict] = [{}] * self.world
        dist.all_gather_object(every, what(), group=_resolve_process_group(self.group))
        for rank, other in enumerate(every):
            for name, value in every[0].items():
                if other.get(name) != value:
                    raise ValueError(f"rank {rank} differs from rank 0 in {name}: every rank must be given the same")


ALONE = Ranks()


def ranks_of(model: nn.Module) -> Ranks:
    """Who holds the other parts of a connected model."""
    hooks = model.lm_head._forward_hooks.values()
    return next((hook.ranks for hook in hooks if isinstance(hook, Gather)), ALONE)


# ----------------------------------------------------------------------------------------------- hooks


class Gather:
    """Behind a head cut by the vocabulary: logits (..., V / N) of this rank -> (..., V), the padding cut off."""

    def __init__(self, config, ranks: Ranks):
        self.ranks, self.vocab_size = ranks, config.vocab_size

    def __call__(self, module: nn.Module, args, local: Tensor) -> Tensor:
        return self.ranks.gather(local)[..., : self.vocab_size]


class Sum:
    """Behind a matrix cut by its inputs: a part of every output -> the outputs."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks

    def __call__(self, module: nn.Module, args, part: Tensor) -> Tensor:
        return self.ranks.sum(part)


class EmbeddingPart(nn.Module):
    """An embedding of which this rank holds the rows [begin, end): tokens (...) -> (..., D), zeros for other tokens."""

    def __init__(self, part: nn.Module, begin: int, end: int):
        super().__init__()
        self.part, self.begin, self.end = part, begin, end

    @property
    def weight(self) -> Tensor | None:
        """The rows that this rank holds; None where they are a quantized head's."""
        return getattr(self.part, "weight", None)

    def forward(self, tokens: Tensor) -> Tensor:
        inside = (tokens >= self.begin) & (tokens < self.end)
        rows = self.part(torch.where(inside, tokens - self.begin, 0))
        return torch.where(inside[..., None], rows, 0)


def connect(model: nn.Module, ranks: Ranks) -> nn.Module:
    """Hook PLAN's collectives behind the matrices of a model that holds this rank's parts. To be done last: a module
    put in place of a hooked one must take over its hooks."""
    if ranks.world == 1:
        return model
    begin, end, _ = share(model.config, "vocab_size", ranks.rank, ranks.world)
    model.embed = EmbeddingPart(model.embed, begin, end)
    for name, module in model.named_modules():
        cut = cut_of(name)
        if cut is not None and cut.after is not None:
            module.register_forward_hook(Sum(ranks) if cut.after == SUM else Gather(model.config, ranks))
    return model


# ---------------------------------------------------------------------------------------------- launch


def launched() -> bool:
    """Did torchrun start this process as one of several?"""
    return "LOCAL_RANK" in os.environ and int(os.environ.get("WORLD_SIZE", 1)) > 1


def check_single_process() -> None:
    """ValueError under torchrun, for programs whose processes would not divide the work."""
    if launched():
        raise ValueError("only generate.py divides its work over ranks: start this program without torchrun")


def local_device(asked: str | None) -> str | None:
    """The device of this rank when torchrun started it: GPU number LOCAL_RANK of its machine, unless --device says
    otherwise. ValueError where the ranks of a machine are more than its GPUs."""
    if not launched() or asked not in (None, "cuda"):
        if launched() and asked != "cpu":
            raise ValueError(f"--device {asked}: with several ranks say cpu or cuda; each rank takes a GPU of its own")
        return asked
    # Slurm does not set LOCAL_WORLD_SIZE: then at least the GPUs up to this rank's own must be there.
    local = int(os.environ.get("LOCAL_WORLD_SIZE", int(os.environ["LOCAL_RANK"]) + 1))
    here = torch.cuda.device_count()
    if asked is None and here == 0:
        return None
    if local > here:
        raise ValueError(f"--nproc_per_node {local}: this machine has {here} GPUs; start at most so many ranks on it")
    return f"cuda:{os.environ['LOCAL_RANK']}"


def join(device: torch.device, timeout_s: float) -> Ranks:
    """The ranks that torchrun started, NCCL between GPUs, gloo between CPUs; ALONE without torchrun. A rank that waits
    longer than `timeout_s` for another one raises RuntimeError, or is ended by NCCL's watchdog. `leave` ends the
    group."""
    if not launched():
        return ALONE
    # Some of what the compiler imports makes the group of that moment a default argument. Imported later, it would keep
    # gloo's threads beyond `leave`, and the process could abort at exit (torch 2.13).
    importlib.import_module("torch._dynamo")
    on_gpu = device.type == "cuda"
    options = {"device_id": device} if on_gpu else {}
    # Rank and world size are torchrun's global ones; LOCAL_RANK only chooses the GPU.
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=datetime.timedelta(seconds=timeout_s), **options)
    # Names, not groups: whoever keeps a group keeps its threads beyond its end.
    name = dist.group.WORLD.group_name
    host = dist.new_group(backend="gloo", timeout=HOST_TIMEOUT).group_name
    return Ranks(dist.get_rank(), dist.get_world_size(), name, host, timeout_s)


def leave() -> None:
    """End the group that `join` made. NCCL waits for CUDA graphs that hold collectives, so the graphs go first."""
    if not dist.is_initialized():
        return
    if dist.get_backend() == "nccl":
        torch.cuda.synchronize()
        torch._dynamo.reset()
        gc.collect()
    dist.destroy_process_group()


def lost_contact(error: RuntimeError) -> bool:
    """Is this what a collective raises when another rank has died, or has not come in time?"""
    return isinstance(error, dist.DistError) or (launched() and "gloo" in str(error))
