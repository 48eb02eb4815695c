"""The portable checkpoint: saved under one sharding and number of ranks, loaded under any other, bit for bit.

It holds the parameters and buffers of the bare model by their fully qualified names (``model.<name>``), and the state
of the optimizer by those names (``optimizer.<name>.<entry>``): codes and scales as they are, as tensors of the global
shape. The header has the hyper-parameters and options of the param groups. How shards were cut does not show.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.nn import Module
from torch.optim import Optimizer

from shardopt.checkpoint.chunks import Chunks
from shardopt.checkpoint.contents import Content, Owner, contents_of, model_chunks, optimizer_chunks
from shardopt.checkpoint.errors import plain_errors
from shardopt.checkpoint.groups import describe
from shardopt.checkpoint.ranks import on_every_rank
from shardopt.checkpoint.restore import Restoration
from shardopt.checkpoint.staging import Stager
from shardopt.checkpoint.storage import PortableReader, PortableWriter
from shardopt.integrations.deepspeed.engine import is_engine, opened, refresh


class Loaded(NamedTuple):
    """What :func:`load` found.

    Attributes:
        extra: what was given to :func:`save` beside model and optimizer.
        converted: the names of parameters whose state or dtype was converted, with what was done.
    """

    extra: dict[str, Any]
    converted: dict[str, str]


def save(path: str | os.PathLike[str], model: Module, optimizer: Optimizer | None = None, **extra: Any) -> None:
    """Saves a model and its optimizer into a folder. All ranks must call this.

    A checkpoint in the folder is replaced; until the new one is complete, and if saving fails, it stays as it was.

    Args:
        path: the folder, which all ranks see.
        model: plain, or wrapped by DDP, FSDP1 or FSDP2, with DTensor parameters or without; or a DeepSpeed engine.
        optimizer: one of shardopt's, or a ZeroRedundancyOptimizer of one; None to save the model only, and with a
            DeepSpeed engine, which has its own.
        extra: what else to save, the same on all ranks: tensors, and what JSON can hold.

    Raises:
        CheckpointError: it could not be saved. Nothing was changed, on any rank.
        TypeError: ``extra`` has something else in it, or the optimizer is not shardopt's.
    """
    tensors, writer = on_every_rank(lambda: _to_save(path, model, optimizer, extra))
    with plain_errors(writer.discard), _no_warning_of_one_process():
        state_dict_saver.save(
            tensors, storage_writer=writer, planner=_save_planner(), no_dist=not dist.is_initialized()
        )


def async_save(
    path: str | os.PathLike[str], model: Module, optimizer: Optimizer | None = None, **extra: Any
) -> Future[None]:
    """Copies a model and its optimizer to the host's memory, and saves the copy while training goes on.

    Costs the host as much memory as this rank's part of the checkpoint, as long as the returned future is there. The
    next save, if it begins before that future is dropped, copies into the same memory, which takes a fraction of the
    time that new memory takes. All ranks must call this. Wait for one save before beginning another. The ranks talk in
    a gloo group of their own, beside the training's collectives.

    Args:
        path: see :func:`save`, as for the others.
        model: the model.
        optimizer: its optimizer.
        extra: what else to save.

    Returns:
        Done when the checkpoint is complete. Its ``result()`` raises what :func:`save` would.
    """
    tensors, writer = on_every_rank(lambda: _to_save(path, model, optimizer, extra))
    done = _Saving(_free_stager())
    saving = state_dict_saver.async_save(
        tensors,
        storage_writer=writer,
        planner=_save_planner(),
        process_group=_group_of_saves(),
        async_stager=done.stager,
        no_dist=not dist.is_initialized(),
    )

    def finish(saved: Future[Any]) -> None:
        try:
            with plain_errors(writer.discard):
                saved.result()
        except BaseException as error:  # it is the waiting thread's to handle
            done.set_exception(error)
        else:
            done.set_result(None)

    saving.add_done_callback(finish)  # type: ignore[union-attr]
    global _last_saving
    _last_saving = weakref.ref(done)
    return done


def load(
    path: str | os.PathLike[str], model: Module, optimizer: Optimizer | None = None, *, convert: bool = False
) -> Loaded:
    """Loads what :func:`save` saved, under whatever sharding and number of ranks. All ranks must call this.

    Everything is read and verified before anything is changed; this takes as much of the host's memory as this rank's
    part of the checkpoint. Codes, scales and parameters come back bit for bit.

    Args:
        path: the folder.
        model: see :func:`save`; the same bare model, in any wrapping.
        optimizer: with the same parameters; None to load the model only.
        convert: allow that the optimizer's codec, block size or weight format, or a parameter's dtype, is another than
            the checkpoint's: moments are decoded and coded again, weights rounded.

    Returns:
        What else was saved, and what was converted.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, of a newer format, or of another model or optimizer.
            Nothing was changed, on any rank.
        TypeError: the optimizer is not shardopt's.
    """
    with _opened(model, optimizer) as (bare, own):
        restoration = on_every_rank(lambda: Restoration(path, bare, own, convert=convert))
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with plain_errors(), _no_warning_of_one_process():
            state_dict_loader.load(
                restoration.tensors,
                storage_reader=PortableReader(path),
                planner=planner,
                no_dist=not dist.is_initialized(),
            )
        on_every_rank(restoration.convert)
        restoration.commit()
    if is_engine(model):
        refresh(model)
    return Loaded(restoration.extra, restoration.converted)


@contextmanager
def _opened(model: Module, optimizer: Optimizer | None) -> Iterator[tuple[Module, Optimizer | None]]:
    """Model and optimizer as they are, or those of a DeepSpeed engine."""
    if not is_engine(model):
        yield model, optimizer
        return
    if optimizer is not None:
        raise TypeError("got an optimizer beside a DeepSpeed engine, expected the engine only; leave the optimizer out")
    with opened(model) as (bare, own):
        yield bare, own


class _Saving(Future[None]):
    """An asynchronous save, with the memory of its copies."""

    def __init__(self, stager: Stager) -> None:
        super().__init__()
        self.stager = stager


_last_saving: weakref.ref[_Saving] | None = None


def _free_stager() -> Stager:
    """The last save's, if its future is still there and it is complete."""
    last = None if _last_saving is None else _last_saving()
    return last.stager if last is not None and last.done() else Stager()


_groups_of_saves: dict[dist.ProcessGroup, dist.ProcessGroup] = {}


def _group_of_saves() -> dist.ProcessGroup | None:
    """All ranks, once more: collectives of saving and of training must not get into each other's way."""
    if not dist.is_initialized():
        return None
    world = dist.group.WORLD
    assert world is not None
    if world not in _groups_of_saves:
        _groups_of_saves.clear()  # of a process group that is gone
        _groups_of_saves[world] = dist.new_group(backend="gloo")
    return _groups_of_saves[world]


@contextmanager
def _no_warning_of_one_process() -> Iterator[None]:
    """Keeps torch.distributed.checkpoint from warning that there is no process group, which it was told."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


def _save_planner() -> DefaultSavePlanner:
    return DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)


def _to_save(
    path: str | os.PathLike[str], model: Module, optimizer: Optimizer | None, extra: dict[str, Any]
) -> tuple[dict[str, Any], PortableWriter]:
    """The tensors to be saved, and where to."""
    with _opened(model, optimizer) as (bare, own):
        return _described(path, bare, own, extra)


def _described(
    path: str | os.PathLike[str], model: Module, optimizer: Optimizer | None, extra: dict[str, Any]
) -> tuple[dict[str, Any], PortableWriter]:
    owner = None if optimizer is None else Owner.of(optimizer)
    contents = contents_of(model, owner)
    tensors: dict[str, Any] = model_chunks(model, contents)
    header: dict[str, Any] = {"extra": {k: v for k, v in extra.items() if not isinstance(v, Tensor)}}
    if owner is not None:
        tensors.update(optimizer_chunks(contents))
        header["optimizer"] = type(owner.sharded).__name__
        header["param_groups"] = [
            describe(group, _names_in(contents, index)) for index, group in enumerate(owner.groups)
        ]
    for key, value in extra.items():
        if isinstance(value, Tensor):
            tensors[f"extra.{key}"] = Chunks.whole(value)
    return tensors, PortableWriter(path, header)


def _names_in(contents: Sequence[Content], group: int) -> list[str]:
    return [content.piece.name for content in contents if content.group == group]
