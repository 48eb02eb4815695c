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
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.nn import Module
from torch.optim import Optimizer

from shardopt.checkpoint.chunks import Chunks
from shardopt.checkpoint.contents import (
    Content,
    Owner,
    contents_of,
    model_chunks,
    model_key,
    names_by_group,
    optimizer_chunks,
    with_common_scales,
)
from shardopt.checkpoint.errors import ReplacedError, plain_errors
from shardopt.checkpoint.groups import describe
from shardopt.checkpoint.index import load_index
from shardopt.checkpoint.interrupts import deferred_interrupts
from shardopt.checkpoint.pieces import buffers_of
from shardopt.checkpoint.ranks import gathered, on_every_rank
from shardopt.checkpoint.replicas import ReplicaPlanner
from shardopt.checkpoint.restore import Restoration
from shardopt.checkpoint.staging import Staged, Stager
from shardopt.checkpoint.storage import PortableReader, PortableWriter
from shardopt.integrations.deepspeed.engine import is_engine, opened, refresh

_TRIES = 10  # of a load that other saves overtake
_ONE_PROCESS = "torch.distributed is disabled, unavailable or uninitialized"  # a warning of torch's


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
    Another save into the folder is waited for, up to 10 seconds. Ranks may hold different parameters under different
    names (pipeline stages, experts): all are saved. Parameters and state that several ranks hold by one name must have
    the same bits, buffers are those of the first rank. Ctrl-C takes effect between pieces of a few MiB, or at the end.

    Args:
        path: the folder, which all ranks see.
        model: plain, or wrapped by DDP, FSDP1 or FSDP2, with DTensor parameters or without; or a DeepSpeed engine.
        optimizer: one of shardopt's, or a ZeroRedundancyOptimizer of one; None to save the model only, and with a
            DeepSpeed engine, which has its own.
        extra: what else to save, the same on all ranks: tensors, and what JSON can hold.

    Raises:
        CheckpointError: it could not be saved, ranks hold different tensors by one name, or another save into the
            folder goes on. Nothing was changed, on any rank.
        TypeError: ``extra`` has something else in it, or the optimizer is not shardopt's.
    """
    with deferred_interrupts():
        tensors, writer, planner = _to_save(path, model, optimizer, extra)
        with plain_errors(writer.discard), _no_warning_of_one_process():
            state_dict_saver.save(tensors, storage_writer=writer, planner=planner, no_dist=not dist.is_initialized())


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
        Done when the checkpoint is complete. Its ``result()`` raises what :func:`save` would. It cannot be cancelled.

    Raises:
        RuntimeError: there is no memory for the copy. Other ranks raise a CheckpointError that says so.
        TypeError: see :func:`save`.
    """
    global _last_saving
    with deferred_interrupts():
        tensors, writer, planner = _to_save(path, model, optimizer, extra)
        stager = _free_stager()
        with plain_errors(writer.discard):
            staged = on_every_rank(lambda: stager.stage(tensors))
        done = _Saving(stager)
        if not dist.is_initialized():  # for good: the warning comes from a thread of torch's, whenever it begins
            warnings.filterwarnings("ignore", _ONE_PROCESS)
        with plain_errors(partial(_give_up, writer, done)):
            saving = state_dict_saver.async_save(
                staged,
                storage_writer=writer,
                planner=planner,
                process_group=_group_of_saves(),
                async_stager=Staged(),
                no_dist=not dist.is_initialized(),
            )
        saving.add_done_callback(partial(_finish, writer, done))  # type: ignore[union-attr]
        _last_saving = weakref.ref(done)
    return done


def _finish(writer: PortableWriter, done: _Saving, saved: Future[Any]) -> None:
    try:
        with plain_errors(partial(_give_up, writer, done)):
            saved.result()
    except BaseException as error:  # it is the waiting thread's to handle
        done.set_exception(error)
    else:
        done.stager.in_use = False  # first: who waits may begin the next save at once
        done.set_result(None)


def _give_up(writer: PortableWriter, done: _Saving) -> None:
    """Leaves nothing of a save that failed."""
    done.stager.in_use = False
    writer.discard()


def load(
    path: str | os.PathLike[str], model: Module, optimizer: Optimizer | None = None, *, convert: bool = False
) -> Loaded:
    """Loads what :func:`save` saved, under whatever sharding and number of ranks. All ranks must call this.

    Everything is read and verified before anything is changed; this takes as much of the host's memory as this rank's
    part of the checkpoint; and the state is made on the optimizer's device before its old state, if it has any, goes.
    Codes, scales and parameters come back bit for bit. Where another process replaces the checkpoint meanwhile, the new
    one is loaded. Ctrl-C changes nothing, or comes when all is loaded.

    Args:
        path: the folder.
        model: see :func:`save`; the same bare model, in any wrapping. All its parameters must be in the checkpoint, and
            each tensor of the checkpoint in the model of some rank.
        optimizer: with the same parameters; None to load the model only.
        convert: allow that the optimizer's codec, block size or weight format, or a parameter's dtype, is another than
            the checkpoint's: moments are decoded and coded again, weights rounded.

    Returns:
        What else was saved, and what was converted.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, of a newer format, or of another model or optimizer; or
            another rank failed. Nothing was changed, on any rank.
        RuntimeError: there is no memory for it, such as torch.OutOfMemoryError. Nothing was changed, on any rank.
        TypeError: the optimizer is not shardopt's.
    """
    with deferred_interrupts():
        loaded = _load_unreplaced(path, model, optimizer, convert)
        if is_engine(model):
            refresh(model)
    return loaded


def _load_unreplaced(path: str | os.PathLike[str], model: Module, optimizer: Optimizer | None, convert: bool) -> Loaded:
    """Loads, and begins again where another process replaces the checkpoint meanwhile."""
    for _ in range(_TRIES - 1):
        with suppress(ReplacedError), _opened(model, optimizer) as (bare, own):
            return _load(path, bare, own, convert)
    with _opened(model, optimizer) as (bare, own):
        return _load(path, bare, own, convert)


def _load(path: str | os.PathLike[str], model: Module, optimizer: Optimizer | None, convert: bool) -> Loaded:
    index = on_every_rank(lambda: load_index(Path(path)))
    if len(set(gathered(index.crc32))) > 1:
        raise ReplacedError(
            f"{path}: got different checkpoints on different ranks, expected one; is it a folder that all ranks see, "
            "and does nobody save into it?"
        )
    restoration = on_every_rank(lambda: Restoration(path, index, model, optimizer))
    claimed = gathered(restoration.claimed)
    on_every_rank(lambda: restoration.plan(claimed, convert=convert))
    with plain_errors(), _no_warning_of_one_process():
        state_dict_loader.load(
            restoration.tensors,
            storage_reader=PortableReader(path, index),
            planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            no_dist=not dist.is_initialized(),
        )
    restoration.convert()
    restoration.commit()
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
    """An asynchronous save, with the memory of its copies. It cannot be cancelled: the copies are being written."""

    def __init__(self, stager: Stager) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self.stager = stager
        stager.in_use = True


_last_saving: weakref.ref[_Saving] | None = None


def _free_stager() -> Stager:
    """The last save's, if its future is still there and nobody reads its copies any more."""
    last = None if _last_saving is None else _last_saving()
    return Stager() if last is None or last.stager.in_use else last.stager


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
        warnings.filterwarnings("ignore", _ONE_PROCESS)
        yield


def _to_save(
    path: str | os.PathLike[str], model: Module, optimizer: Optimizer | None, extra: dict[str, Any]
) -> tuple[dict[str, Any], PortableWriter, ReplicaPlanner]:
    """The tensors to be saved, where to, and by what plan. All ranks must call this."""
    with _opened(model, optimizer) as (bare, own):
        owner, contents = on_every_rank(lambda: _read(bare, own))
        common = with_common_scales(contents)
        return on_every_rank(lambda: _described(path, bare, owner, common, extra))


def _read(model: Module, optimizer: Optimizer | None) -> tuple[Owner | None, list[Content]]:
    owner = None if optimizer is None else Owner.of(optimizer)
    return owner, contents_of(model, owner)


def _described(
    path: str | os.PathLike[str],
    model: Module,
    owner: Owner | None,
    contents: Sequence[Content],
    extra: dict[str, Any],
) -> tuple[dict[str, Any], PortableWriter, ReplicaPlanner]:
    tensors: dict[str, Any] = model_chunks(model, contents)
    header: dict[str, Any] = {"extra": {k: v for k, v in extra.items() if not isinstance(v, Tensor)}}
    if owner is not None:
        tensors.update(optimizer_chunks(contents))
        header["optimizer"] = type(owner.sharded).__name__
        names = names_by_group(contents, len(owner.groups))
        header["param_groups"] = [describe(group, own) for group, own in zip(owner.groups, names, strict=True)]
    for key, value in extra.items():
        if isinstance(value, Tensor):
            tensors[f"extra.{key}"] = Chunks.whole(value)
    buffers = {model_key(piece.name) for piece in buffers_of(model)}
    return tensors, PortableWriter(path, header), ReplicaPlanner(buffers)
