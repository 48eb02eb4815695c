"""The parts of a model and its optimizer that one rank contributes to a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from shardopt.checkpoint.chunks import Chunks
from shardopt.checkpoint.errors import CheckpointError
from shardopt.checkpoint.owner import Owner
from shardopt.checkpoint.pieces import Piece, buffers_of, parameter_chunks, pieces_of, state_chunks
from shardopt.checkpoint.quantized.owner import QuantizedOwner
from shardopt.checkpoint.ranks import on_every_rank
from shardopt.layout import FlatBuffer, FlatShard, assigned, read_model
from shardopt.optim import ShardedOptimizer
from shardopt.report.memory import owner_of
from shardopt.state.flat_encoding import encode_flat, shared_blocks
from shardopt.state.slice_spec import SliceSpec
from shardopt.wrapper.optimizer import QuantizedState

_CPU = torch.device("cpu")


def owner_for(optimizer: Optimizer) -> Owner:
    """The owner for an optimizer of shardopt, of quantize_state, or a wrapper of one; see :func:`owner_of`.

    Raises:
        TypeError: the optimizer is none of these.
    """
    inner = owner_of(optimizer)
    if isinstance(inner, QuantizedState):
        return QuantizedOwner(optimizer.param_groups, inner)
    if isinstance(inner, ShardedOptimizer):
        return Owner(optimizer.param_groups, inner)
    raise TypeError(
        f"got an optimizer of {type(optimizer).__name__}, expected one of shardopt's, or the result of quantize_state; "
        "save others with torch.distributed.checkpoint"
    )


class Content(NamedTuple):
    """One parameter of the bare model and its state: this rank's part.

    Attributes:
        piece: the parameter.
        group: the index of the parameter's param group; None if no optimizer has the parameter.
        spec: the form of the state; None if no optimizer has the parameter.
        state: the state's entries as plain tensors; empty if this rank has no state of the parameter.
    """

    piece: Piece
    group: int | None
    spec: SliceSpec | None
    state: Mapping[str, Tensor]


def contents_of(model: Module, owner: Owner | None) -> list[Content]:
    """All parameters of a model, in the same order on all ranks.

    Raises:
        CheckpointError: the optimizer has parameters that the model does not have.
    """
    read_model(model)
    if owner is not None:
        owner.synchronize()
    group_of = {} if owner is None else owner.group_of
    own = {id(param) for param in model.parameters()}
    pieces = list(pieces_of(model, [p for p in group_of if id(p) not in own and isinstance(assigned(p), FlatBuffer)]))
    strangers = set(group_of) - {piece.param for piece in pieces}
    if strangers:
        shapes = sorted(tuple(param.shape) for param in strangers)
        raise CheckpointError(
            f"got an optimizer with {len(strangers)} parameters that the model has not, of shapes {shapes[:5]}, "
            "expected the optimizer of this model; make it after fully_shard, parallelize_module and the like, which "
            "replace parameters"
        )
    slices = {} if owner is None else {param: owner.slices(param, group) for param, group in group_of.items()}
    contents = []
    for piece in pieces:
        spec, state = slices[piece.param][piece.segment or 0] if piece.param in slices else (None, {})
        contents.append(Content(piece, group_of.get(piece.param), spec, state))
    return contents


def names_by_group(contents: Sequence[Content], count: int) -> list[list[str]]:
    """The names of the parameters in each of `count` param groups."""
    names: list[list[str]] = [[] for _ in range(count)]
    for content in contents:
        if content.group is not None:
            names[content.group].append(content.piece.name)
    return names


def model_chunks(model: Module, contents: Sequence[Content]) -> dict[str, Chunks]:
    """The tensors of the model, by their names in a checkpoint."""
    pieces = [*(content.piece for content in contents), *buffers_of(model)]
    here = [piece for piece in pieces if piece.shard.is_here]
    return {model_key(piece.name): parameter_chunks(piece.shard, piece.local) for piece in here}


def optimizer_chunks(owner: Owner, contents: Sequence[Content]) -> dict[str, Chunks]:
    """The state of the optimizer, by its names in a checkpoint.

    A rank that holds no element of a flat shard does not know whether the parameter has state: it assumes so.
    """
    tensors = {state_key("", entry): chunks for entry, chunks in owner.common_chunks().items()}
    for content in contents:
        if content.spec is None or not content.spec.shard.is_here:
            continue
        state, is_assumed = content.state, False
        if not state and owner.has_fixed_entries and isinstance(content.spec.shard, FlatShard):
            has_rule = content.spec.shard.partition is not None
            is_assumed = has_rule and content.spec.shard.numel == 0
            state = content.spec.new(_CPU) if is_assumed else state
        for entry, chunks in state_chunks(content.spec, state).items():
            chunks.is_assumed = is_assumed
            tensors[state_key(content.piece.name, entry)] = chunks
    return tensors


def held_tensors(model: Module, optimizer: Optimizer) -> dict[str, Chunks]:
    """The parameters, buffers and optimizer state that this rank holds, by their names in a checkpoint.

    Semipublic: for tools that compare or digest a run's tensors without saving them, as ``launch/lm/digests.py`` does.
    Nothing is copied: ``Chunks.written`` has this rank's rectangles of a tensor as they are.

    Args:
        model: the model, in any wrapping but DeepSpeed's.
        optimizer: its optimizer.

    Raises:
        TypeError: the optimizer is none of shardopt's, nor of quantize_state.
        CheckpointError: the optimizer has parameters that the model does not have.
    """
    owner = owner_for(optimizer)
    contents = contents_of(model, owner)
    return {**model_chunks(model, contents), **optimizer_chunks(owner, contents)}


def model_key(name: str) -> str:
    """A parameter's or buffer's name in a checkpoint."""
    return f"model.{name}"


def state_key(name: str, entry: str) -> str:
    """A state entry's name in a checkpoint; ``name`` is empty for state that belongs to no parameter."""
    return f"optimizer.{name}.{entry}"


def with_common_scales(contents: Sequence[Content]) -> list[Content]:
    """Encodes anew the cut blocks whose fragments have scales of their own, and returns other contents unchanged.

    All ranks must call this, and none of them within :func:`on_every_rank`: this function has a collective of its own,
    before which the ranks agree on whether all of them reach the collective.
    """
    cut = on_every_rank(lambda: _with_fragments(contents))
    specs, values = [spec for spec, _ in cut.values()], [moments for _, moments in cut.values()]
    encoded = on_every_rank(lambda: encode_flat(specs, values))
    common = list(contents)
    for index, spec, state in zip(cut, specs, encoded, strict=True):
        if state is not None:
            common[index] = common[index]._replace(spec=spec, state={**common[index].state, **state})
    return common


def _with_fragments(contents: Sequence[Content]) -> dict[int, tuple[SliceSpec, list[Tensor] | None]]:
    """The spec with common scales, and the moments, of parameters with a scale per fragment, by their indices."""
    cut: dict[int, tuple[SliceSpec, list[Tensor] | None]] = {}
    for index, content in enumerate(contents):
        if content.spec is None or content.spec.exact_cut_blocks:
            continue
        exact = replace(content.spec, exact_cut_blocks=True)
        if shared_blocks(exact):
            cut[index] = exact, content.spec.decode(content.state) if content.state else None
    return cut
