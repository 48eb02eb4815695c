"""A small model, and the ways in which the tests shard it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, sigmoid, silu
from torch.nn.parallel import DistributedDataParallel

from ranks.flat import Change, bare_shapes, is_flat, remember_bare, set_piece_gradients
from ranks.layouts import Layout, Shape, deep_layouts, distribute, layouts, mesh_of, shard, values

TOKENS = 97


class Net(nn.Module):
    """Guesses tokens. Dims of 97, 70 and 1; rows of 66, 70, 192 and 198 elements; biases and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 66)
        self.up = nn.Linear(66, 192)
        self.down = nn.Linear(192, 66)
        self.norm = nn.LayerNorm(66)
        self.conv = nn.Conv1d(66, 70, 3, padding=1)
        self.gate = nn.Linear(70, 1)
        self.head = nn.Linear(70, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = self.norm(x + self.down(silu(self.up(x))))
        x = silu(self.conv(x.transpose(1, 2)).transpose(1, 2))
        return self.head(x * sigmoid(self.gate(x)))


class Odds(nn.Module):
    """Parameters of odd shapes, in submodules: each of ``UNITS`` is one; the last shapes are the model's own."""

    #: A long one beside a bias; fewer elements than there may be ranks; one row; rows that are one block, or less;
    #: blocks that four ranks share; a row that one rank may hold a single element of.
    UNITS: tuple[tuple[Shape, ...], ...] = (
        ((97, 130), (97,)),
        ((3,),),
        ((1, 4099),),
        ((3, 257), (2, 33), (9, 64)),
        ((1, 64),),
        ((1, 40),),
        ((2, 33), (1,)),
        ((70, 96), (33, 31), (1,)),
    )

    def __init__(self) -> None:
        super().__init__()
        *units, own = self.UNITS
        self.units = nn.ModuleList(_Holder(shapes, seed) for seed, shapes in enumerate(units))
        self.own = _Holder(own, len(units))


class Tied(nn.Module):
    """A weight that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, 40)
        self.mix = nn.Linear(40, 40)
        self.head = nn.Linear(40, 97, bias=False)
        self.head.weight = self.embed.weight


class Matrices(nn.Module):
    """A parameter for each of these layouts of DTensors."""

    def __init__(self, ways: Sequence[Layout]) -> None:
        super().__init__()
        self.ways = ways
        for index, way in enumerate(ways):
            whole = nn.Parameter(values(way.shape, index, way.dtype))
            self.register_parameter(f"{index}: {way}".replace(".", " "), whole)

    def sharded(self) -> nn.Module:
        """The model itself, with each parameter sharded by its layout."""
        for (name, whole), way in zip(list(self.named_parameters()), self.ways, strict=True):
            self.register_parameter(name, nn.Parameter(shard(whole.detach(), way)))
        return self


class _Holder(nn.Module):
    def __init__(self, shapes: tuple[Shape, ...], seed: int) -> None:
        super().__init__()
        for index, shape in enumerate(shapes):
            self.register_parameter(f"weight{index}", nn.Parameter(values(shape, 1000 * seed + index)))


def make_net(dtype: torch.dtype = torch.float32, seed: int = 0) -> Net:
    """One model, equal on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net().to(dtype)


def make_frozen(seed: int) -> Net:
    """The model with a matrix and a bias that are not trained."""
    model = make_net(seed=seed)
    for param in (model.embed.weight, model.gate.bias):
        param.requires_grad_(False)
    return model


def make_batch(seed: int, rank: int = 0, size: int = 4) -> Tensor:
    """Tokens ``(size, 12)``, which differ between seeds and between ranks."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(TOKENS, (size, 12), generator=generator)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """The mean loss of guessing each token's follower."""
    logits = model(tokens[:, :-1])
    return cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def named_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The parameters by the names that they have in the unsharded model."""
    named = model.named_parameters()
    return {name.removeprefix("module.").replace("_fsdp_wrapped_module.", ""): param for name, param in named}


def set_gradients(model: nn.Module, seed: int, change: Change = lambda place, whole: whole) -> None:
    """Gives the parameters, sharded or not, gradients that depend on the seed alone.

    ``change`` makes another gradient of a parameter's place and its whole gradient.
    """
    if is_flat(model):
        set_piece_gradients(model, seed, change)
        return
    for index, param in enumerate(model.parameters()):
        whole = change(index, values(tuple(param.shape), 100 * seed + index, param.dtype))
        if isinstance(param, DTensor):
            param.grad = distribute(whole, param.device_mesh, param.placements)
        else:
            param.grad = whole


def _fsdp(model: nn.Module, mesh: DeviceMesh | None = None, columns: int = 0, **options: object) -> nn.Module:
    """FSDP2, every other layer a unit of its own. Shards dim 1 where ``columns`` ranks can share it evenly."""

    def placement(param: Tensor) -> Shard | None:
        return Shard(1) if columns and param.ndim > 1 and param.shape[1] % columns == 0 else None

    for layer in (model.up, model.conv, model):
        fully_shard(layer, mesh=mesh, shard_placement_fn=placement, **options)
    return model


def _tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Cuts the columns of `embed` and `down` and the rows of `up`; the rest stays whole."""
    plan = {
        "embed": ColwiseParallel(output_layouts=Replicate()),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    return parallelize_module(model, mesh, plan)


def _fsdp_tensor_parallel(model: nn.Module, columns: int = 0) -> nn.Module:
    mesh = mesh_of((2, dist.get_world_size() // 2), "data", "tensor")
    return _fsdp(_tensor_parallel(model, mesh["tensor"]), mesh["data"], columns)


def _hsdp(model: nn.Module, replicas: int, **options: object) -> nn.Module:
    mesh = mesh_of((replicas, dist.get_world_size() // replicas), "replicas", "shards")
    return _fsdp(model, mesh, **options)


def fsdp1(model: nn.Module, layers: Iterable[str] | None = None, **options: object) -> nn.Module:
    """Wraps the model by FSDP1, in place: these layers, by default every other one, are units, and what remains.

    ``use_orig_params`` is True unless said otherwise.
    """
    bare = bare_shapes(model)
    wrap = partial(FullyShardedDataParallel, **{"use_orig_params": True, "device_id": torch.device("cpu"), **options})
    for path in ("up", "conv") if layers is None else layers:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, wrap(model.get_submodule(path)))
    return remember_bare(wrap(model), bare)


def make_odds(**options: Any) -> tuple[nn.Module, nn.Module]:
    """The model of odd shapes, whole and under FSDP1."""
    return Odds(), _odds(Odds(), **options)


def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Copies weights into a model that is sharded alike."""
    for mine, theirs in zip(target.parameters(), source.parameters(), strict=True):
        mine.detach().copy_(theirs.detach())


def _fsdp1_nested(model: nn.Module, **options: object) -> nn.Module:
    """A unit per layer, one of them twice, so that some units have no parameters of their own."""
    layers = [name for name, _ in model.named_children()]
    return fsdp1(model, [*layers, "up"], **options)


def _fsdp1_hybrid(model: nn.Module, **options: object) -> nn.Module:
    mesh = mesh_of((2, dist.get_world_size() // 2))
    return fsdp1(model, sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh, **options)


def _zero(model: nn.Module) -> nn.Module:
    """The model under a ZeroRedundancyOptimizer: its parameters are everywhere, its state is not."""
    return remember_bare(DistributedDataParallel(model), bare_shapes(model))


BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

FSDP1_BFLOAT16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
_FLAT = {"use_orig_params": False}

#: Ways to shard a model by FSDP1; those named flat leave the optimizer one parameter per unit.
FSDP1_WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "fsdp1": fsdp1,
    "fsdp1 flat": partial(fsdp1, **_FLAT),
    "fsdp1 grad": lambda model: fsdp1(
        model, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, device_mesh=mesh_of((dist.get_world_size(),))
    ),
    "fsdp1 grad flat": partial(fsdp1, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, **_FLAT),
    "fsdp1 none": partial(fsdp1, sharding_strategy=ShardingStrategy.NO_SHARD),
    "fsdp1 none flat": partial(fsdp1, sharding_strategy=ShardingStrategy.NO_SHARD, **_FLAT),
    "fsdp1 hybrid": _fsdp1_hybrid,
    "fsdp1 hybrid flat": partial(_fsdp1_hybrid, **_FLAT),
    "fsdp1 bf16": partial(fsdp1, mixed_precision=FSDP1_BFLOAT16),
    "fsdp1 bf16 flat": partial(fsdp1, mixed_precision=FSDP1_BFLOAT16, **_FLAT),
    "fsdp1 nested": _fsdp1_nested,
    "fsdp1 nested flat": partial(_fsdp1_nested, **_FLAT),
}


def _dtensors(third: int) -> Sequence[Layout]:
    """Every third of the layouts, from this one on."""
    return layouts(dist.get_world_size())[third::3]


def _deep_dtensors() -> Sequence[Layout]:
    return deep_layouts(dist.get_world_size())


def _odds(model: nn.Module, **options: object) -> nn.Module:
    return fsdp1(model, [f"units.{index}" for index in range(len(Odds.UNITS) - 1)], **options)


#: Ways to shard :class:`Odds`.
ODDS_WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {"odds": _odds, "odds flat": partial(_odds, **_FLAT)}

#: Ways to shard :class:`Matrices`, and the layouts of DTensors in each: all ways that PyTorch can make, in thirds.
MATRICES_WAYS: dict[str, Callable[[], Sequence[Layout]]] = {
    **{f"dtensors {third}": partial(_dtensors, third) for third in range(3)},
    "deep dtensors": _deep_dtensors,
}

#: Ways to shard a model, in place.
WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "single": lambda model: model,
    "ddp": DistributedDataParallel,
    "fsdp": _fsdp,
    "fsdp columns": lambda model: _fsdp(model, columns=dist.get_world_size()),
    "fsdp bf16": partial(_fsdp, mp_policy=BFLOAT16),
    "fsdp offload": partial(_fsdp, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "hsdp": lambda model: _hsdp(model, replicas=2),
    "hsdp columns": lambda model: _hsdp(model, replicas=2, columns=dist.get_world_size() // 2),
    "hsdp of one": lambda model: _hsdp(model, replicas=dist.get_world_size()),
    "tp": lambda model: _tensor_parallel(model, mesh_of((dist.get_world_size(),), "tensor")),
    "fsdp tp": _fsdp_tensor_parallel,
    "fsdp columns tp": lambda model: _fsdp_tensor_parallel(model, columns=dist.get_world_size()),
    **FSDP1_WAYS,
    **ODDS_WAYS,
    **dict.fromkeys(MATRICES_WAYS, Matrices.sharded),
    "zero": _zero,
}


def make_bare(way: str) -> Callable[..., nn.Module]:
    """Makes the model that one of the ``WAYS`` is for: of a dtype, or None for the model's own, and a seed."""
    if way in ODDS_WAYS:
        return lambda dtype=None, seed=0: _of_dtype(Odds(), dtype, seed)
    if way in MATRICES_WAYS:
        return lambda dtype=None, seed=0: _of_dtype(Matrices(MATRICES_WAYS[way]()), dtype, seed)
    return lambda dtype=None, seed=0: make_net(dtype or torch.float32, seed)


def _of_dtype(model: nn.Module, dtype: torch.dtype | None, seed: int) -> nn.Module:
    for place, param in enumerate(model.parameters()):
        if seed:
            param.data = values(tuple(param.shape), 999 * seed + place, param.dtype)
    return model if dtype is None else model.to(dtype)
