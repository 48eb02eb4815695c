"""Parts of a model's parameters on each rank of FSDP1, DDP or ZeRO, and the whole put together from them.

Where the parts lie is FSDP's own word (``_shard_param_infos``), and which blocks they touch is counted element by
element: nothing here asks the code under test, but for the parts of a flat buffer's state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer

from ranks.layouts import Shape, values
from ranks.pickling import from_all_ranks
from ranks.snapshot import Snapshot, as_tensor
from shardopt.optim import ShardedOptimizer
from shardopt.state.slice_spec import ROW_MOMENTS, StateDict
from shardopt.wrapper import QuantizedState

_WRAPPERS = ("_fsdp_wrapped_module", "module")

Change = Callable[[int, Tensor], Tensor]

_PARAMETER = ""  # the key of the parameter itself beside those of its state


class Piece(NamedTuple):
    """The elements of a parameter that are on this rank, by its name in the bare model and its whole shape.

    The ``numel`` elements begin at ``offset`` in ``tensor``, the optimizer's parameter (flattened), and at ``start`` in
    the flattened whole. ``segment`` is the parameter's place in a flat buffer, None if ``tensor`` is of this parameter
    alone.
    """

    name: str
    shape: Shape
    tensor: Tensor
    offset: int
    start: int
    numel: int
    segment: int | None

    def of(self, tensor: Tensor) -> Tensor:
        """The piece of a tensor laid out like the optimizer's parameter: a flat view."""
        return tensor.detach().reshape(-1)[self.offset : self.offset + self.numel]

    def cut(self, whole: Tensor) -> Tensor:
        """The piece of the whole parameter, or of a tensor of its shape: flat."""
        return whole.detach().reshape(-1)[self.start : self.start + self.numel]


def remember_bare(wrapped: nn.Module, bare: Mapping[str, Shape]) -> nn.Module:
    """Notes at a wrapped model what parameters it had, in order, before anything was wrapped."""
    wrapped.bare_shapes = dict(bare)  # type: ignore[assignment]
    return wrapped


def bare_shapes(model: nn.Module) -> dict[str, Shape]:
    """Names and shapes of a bare model's parameters."""
    return {name: tuple(param.shape) for name, param in model.named_parameters()}


def is_flat(model: nn.Module) -> bool:
    """Whether :func:`pieces` and what follows are for this model."""
    return hasattr(model, "bare_shapes")


def pieces(model: nn.Module) -> list[Piece]:
    """One piece per parameter, in the bare model's order; some may be empty."""
    found = {piece.name: piece for piece in _pieces(model)}
    assert found.keys() == model.bare_shapes.keys()
    assert all(piece.shape == model.bare_shapes[name] for name, piece in found.items())
    return [found[name] for name in model.bare_shapes]


def _pieces(model: nn.Module) -> Iterator[Piece]:
    units = {name: m for name, m in model.named_modules() if isinstance(m, FullyShardedDataParallel) and m._handle}
    in_units: set[int] = set()
    for prefix, unit in units.items():
        flat = unit._handle.flat_param
        own = flat._params or [flat] * len(flat._fqns)
        in_units |= {id(param) for param in (flat, *own, *(flat._shared_params or ()))}
        for index, (fqn, shape, info) in enumerate(zip(flat._fqns, flat._shapes, flat._shard_param_infos, strict=True)):
            alone = flat._params is not None
            offset = 0 if alone or not info.in_shard else info.offset_in_shard
            start, numel = (info.intra_param_start_idx, info.numel_in_shard) if info.in_shard else (0, 0)
            name = _bare_name(f"{prefix}.{fqn}")
            yield Piece(name, tuple(shape), own[index], offset, start, numel, None if alone else index)
    for name, param in model.named_parameters():
        if id(param) not in in_units:
            yield Piece(_bare_name(name), tuple(param.shape), param, 0, 0, param.numel(), None)


def _bare_name(name: str) -> str:
    return ".".join(part for part in name.split(".") if part and part not in _WRAPPERS)


def forget_shards(model: nn.Module) -> None:
    """As if the model had been wrapped before shardopt was imported."""
    for param in model.parameters():
        vars(param).pop("_shardopt_shard", None)


def set_piece_gradients(model: nn.Module, seed: int, change: Change) -> None:
    """The gradients that :func:`ranks.models.set_gradients` gives the bare model; zeros for padding."""
    found = pieces(model)
    for piece in found:
        if piece.tensor.requires_grad:
            piece.tensor.grad = torch.zeros_like(piece.tensor) if piece.tensor.numel() else None
    for index, piece in enumerate(found):
        if piece.tensor.grad is not None:
            whole = change(index, values(piece.shape, 100 * seed + index, piece.tensor.dtype))
            piece.of(piece.tensor.grad).copy_(piece.cut(whole))


def gathered_parameters(model: nn.Module) -> Snapshot:
    """All parameters in full; all ranks must call this."""
    return gathered_tensors(model, {piece.tensor: piece.tensor for piece in pieces(model)})


def gathered_tensors(model: nn.Module, tensors: Mapping[Tensor, Tensor]) -> Snapshot:
    """Tensors like the optimizer's parameters, which those are the keys of, in full; all ranks must call this."""
    own = {p.name: {_PARAMETER: p.of(tensors[p.tensor])} if p.tensor in tensors else {} for p in pieces(model)}
    everyone = from_all_ranks((own, {piece.name: (piece.start, piece.numel) for piece in pieces(model)}))
    return {name: _elements(everyone, name, shape, _PARAMETER) for name, shape in model.bare_shapes.items()}


def gathered(model: nn.Module, optimizer: Optimizer, on_all: bool = True) -> Snapshot:
    """Parameters and state in full, in the form of :func:`ranks.snapshot.snapshot`; all ranks must call this."""
    inner = sharded_optimizer(optimizer)
    groups = {param: group for group in inner.param_groups for param in group["params"]}
    held = [(piece, groups.get(piece.tensor)) for piece in pieces(model)]
    return assembled(model.bare_shapes, inner, held, on_all)


def assembled(
    shapes: Mapping[str, Shape],
    optimizer: ShardedOptimizer | QuantizedState,
    held: Sequence[tuple[Piece, Mapping[str, Any] | None]],
    on_all: bool = True,
) -> Snapshot:
    """Parameters (``shapes`` of all, by name) and state in full; all ranks must call this.

    Copies on several ranks must agree, and a cut block's scales on its owners. ``held`` has this rank's pieces with the
    param groups of their tensors, if this rank's optimizer has them. Ranks but the first get the result ``on_all``.
    """
    options = optimizer._internals.options if isinstance(optimizer, QuantizedState) else {}
    own: dict[str, StateDict] = {}
    places: dict[str, tuple[int, int]] = {}
    sizes: dict[str, int] = {}
    states: dict[Tensor, dict[int | None, StateDict]] = {}
    for piece, group in held:
        if piece.tensor not in states:
            states[piece.tensor] = _states(optimizer, group, piece)
        if group is not None:
            sizes[piece.name] = {**group, **options}["block_size"]
        own[piece.name] = {_PARAMETER: piece.of(piece.tensor), **states[piece.tensor].get(piece.segment, {})}
        places[piece.name] = piece.start, piece.numel
    assert own.keys() == shapes.keys()
    everyone: list[Any] = []
    block_sizes: dict[str, int] = {}
    for own_there, places_there, sizes_there in from_all_ranks((own, places, sizes), on_all):
        everyone.append((own_there, places_there))
        block_sizes |= sizes_there
    found: Snapshot = {}
    for name, shape in shapes.items() if everyone else ():
        found[name] = _elements(everyone, name, shape, _PARAMETER)
        for key in sorted({key for there, _ in everyone for key in there[name]} - {_PARAMETER}):
            copies = [as_tensor(there[name][key]) for there, _ in everyone if key in there[name]]
            if copies[0].dim() == 0:
                assert all(torch.equal(copy, copies[0]) for copy in copies), f"{name}: got {key} {copies}"
                found[f"{name}/{key}"] = copies[0]
            elif key.endswith("_scales"):
                found[f"{name}/{key}"] = _scales(everyone, name, shape, key, block_sizes[name])
            elif key == ROW_MOMENTS:  # with rows as blocks
                found[f"{name}/{key}"] = _scales(everyone, name, shape, key, torch.Size(shape[1:]).numel())
            else:
                found[f"{name}/{key}"] = _elements(everyone, name, shape, key)
    return found


def sharded_optimizer(optimizer: Optimizer) -> ShardedOptimizer | QuantizedState:
    """The optimizer inside a ZeroRedundancyOptimizer, or the optimizer."""
    inner = getattr(optimizer, "optim", optimizer)
    assert isinstance(inner, ShardedOptimizer | QuantizedState)
    return inner


def _states(
    optimizer: ShardedOptimizer | QuantizedState, group: Mapping[str, Any] | None, piece: Piece
) -> dict[int | None, StateDict]:
    """The states of all pieces of a piece's tensor, by their segments: views; empty where it has none."""
    state = optimizer.state.get(piece.tensor)
    if not state or group is None:
        return {}
    if piece.segment is None:
        return {None: dict(state)}
    assert isinstance(optimizer, ShardedOptimizer)
    return dict(enumerate(optimizer._internals.state_of(piece.tensor, group).split(state)))


def block_numbers(shape: Shape, block_size: int) -> Tensor:
    """For every element of the flattened parameter the number of its block, counted row by row."""
    row_numel = torch.Size(shape[1:]).numel()
    elements = torch.arange(torch.Size(shape).numel())
    per_row = -(-row_numel // block_size)
    return elements // row_numel * per_row + elements % row_numel // block_size


def _blocks(shape: Shape, start: int, numel: int, block_size: int) -> list[int]:
    return block_numbers(shape, block_size)[start : start + numel].unique().tolist()


def _elements(everyone: list[Any], name: str, shape: Shape, key: str) -> Tensor:
    """A tensor like the parameter (with dimensions behind its own) from the ranks' pieces of it."""
    whole: Tensor | None = None
    known = torch.zeros(torch.Size(shape).numel(), dtype=torch.bool)
    for rank, (states, places) in enumerate(everyone):
        start, numel = places[name]
        if key not in states[name]:
            continue
        own = states[name][key]
        assert own.numel() % max(numel, 1) == 0, f"{name} on rank {rank}: {own.numel()} of {key} for {numel} elements"
        if numel == 0:
            assert own.numel() == 0
            continue
        own = own.reshape(numel, -1)
        whole = torch.zeros((len(known), own.shape[1]), dtype=own.dtype) if whole is None else whole
        _put(whole, known, torch.arange(start, start + numel), own, f"{name}/{key} on rank {rank}")
    assert whole is not None
    assert known.all(), f"{name}/{key}: no rank has {(~known).sum()} elements of it"
    return whole.reshape(shape if whole.shape[1] == 1 else (*shape, whole.shape[1]))


def _scales(everyone: list[Any], name: str, shape: Shape, key: str, block_size: int) -> Tensor:
    per_row = -(-torch.Size(shape[1:]).numel() // block_size)
    whole: Tensor | None = None
    known = torch.zeros(shape[0] * per_row, dtype=torch.bool)
    for rank, (states, places) in enumerate(everyone):
        if key not in states[name]:
            continue
        blocks, own = _blocks(shape, *places[name], block_size), states[name][key]
        if not blocks:
            assert own.numel() == 0
            continue
        own = own.reshape(len(blocks), -1)
        whole = torch.zeros((len(known), own.shape[1])) if whole is None else whole
        _put(whole, known, torch.tensor(blocks), own, f"{name}/{key} on rank {rank}")
    assert whole is not None
    assert known.all(), f"{name}/{key}: no rank has the scales of {(~known).nonzero().flatten().tolist()}"
    return whole.reshape((shape[0], per_row) if whole.shape[1] == 1 else (shape[0], per_row, whole.shape[1]))


def _put(whole: Tensor, known: Tensor, places: Tensor, own: Tensor, what: str) -> None:
    """Puts rows where they belong; where others were put before, they must be the same bits."""
    assert own.dtype == whole.dtype, what
    before = known[places]
    same = (whole[places].view(torch.uint8) == own.contiguous().view(torch.uint8)).all(1)
    assert (same | ~before).all(), f"{what}: ranks disagree at {places[before & ~same].tolist()[:10]}"
    whole[places] = own
    known[places] = True
