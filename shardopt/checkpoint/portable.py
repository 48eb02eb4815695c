"""The portable checkpoint: saved under one sharding and number of ranks, loaded under any other, bit for bit.

A checkpoint holds the unwrapped model's parameters and buffers by their fully qualified names (``model.<name>``), and
the optimizer's state by the parameters' names (``optimizer.<name>.<entry>``): codes and scales unchanged. All tensors
are global, so that names, shapes and values do not depend on the sharding. The header has the param groups' options.
"""

from __future__ import annotations

import atexit
import logging
import math
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from shardopt.checkpoint.contents import Contents, check_arguments, contents_of, opened
from shardopt.checkpoint.errors import CheckpointError, ReplacedError
from shardopt.checkpoint.index import load_index
from shardopt.checkpoint.items import Chunks
from shardopt.checkpoint.ranks import Ranks, on_device_of
from shardopt.checkpoint.restore import Restoration
from shardopt.checkpoint.saving import check_keep_last, write_checkpoint
from shardopt.checkpoint.storage import Folder, PathLike, folder_at
from shardopt.checkpoint.wording import first_of
from shardopt.kernels.autograd import without_autograd
from shardopt.kernels.memory import copy_to_host
from shardopt.layout import engines_of

_ATTEMPTS = 10  # attempts of a load that other saves interrupt by replacing the checkpoint
_ALIGNMENT = 64  # bytes, in a staging buffer
_logger = logging.getLogger("shardopt")


class Loaded(NamedTuple):
    """The result of :func:`load`.

    Attributes:
        extra: the ``extra`` arguments of :func:`save`.
        converted: by name of each parameter whose state or dtype was converted: from what to what, in words.
        hyper_parameters: by index of each param group of which the load changed hyper-parameters: their values before
            and after, by name. A learning rate is left out if a schedule set it, with the same ``initial_lr``.
    """

    extra: dict[str, Any]
    converted: dict[str, str]
    hyper_parameters: dict[int, dict[str, tuple[Any, Any]]]


@without_autograd
def save(
    path: PathLike, model: Module, optimizer: Optimizer | None = None, *, keep_last: int | None = None, **extra: Any
) -> None:
    """Saves a model and its optimizer into a folder. All ranks must call this.

    Replaces a checkpoint in the folder; the previous checkpoint stays unchanged until the new one is complete, and if
    saving fails. Waits up to 10 seconds for another save into the folder. Ranks may hold different parameters under
    different names (pipeline stages, experts): all are saved. Parameters and state that several ranks hold under one
    name must have the same bits; buffers are saved from the first rank. After 20 seconds the log names the ranks that
    do not call this; the others raise after the process group's timeout (at least 600 seconds), or after the seconds in
    the environment variable ``SHARDOPT_WAIT_FOR_RANKS``.

    Args:
        path: the folder, which all ranks must see, or a URL that the package fsspec opens, such as
            ``s3://bucket/run/step-1000``. An object store has no locks: let only one run save there.
        model: a plain model, or one wrapped by DDP, FSDP1 or FSDP2, with or without DTensor parameters; or a DeepSpeed
            engine.
        optimizer: an optimizer of shardopt or the result of :func:`shardopt.quantize_state`, or a
            ZeroRedundancyOptimizer of one; None to save the model only. A DeepSpeed engine's own may be left out.
        keep_last: removes older checkpoints once this one is complete, so that so many are left with it; None keeps
            all. Checkpoints of a run are folders beside each other whose names differ in the number at the end, such as
            ``step-1000`` and ``step-2000``; those with larger numbers stay, and do not count. On a file system with
            locks, folders of smaller numbers without a checkpoint go, too, unless a save into one is under way.
        extra: other values to save, the same on all ranks (if others differ, the log warns, and rank 0's are saved):
            tensors, and values that JSON can hold, infinities and NaN, with at most a hundred nested lists and dicts.

    Raises:
        CheckpointError: the checkpoint could not be written, ranks hold different tensors under one name, some ranks
            did not call this, or another save into the folder goes on. Nothing was changed, on any rank.
        ValueError: ``keep_last`` is no positive whole number, or the folder's name does not end with a number.
        TypeError: ``extra`` has a value that is no tensor and that JSON cannot hold, the optimizer is not one of
            these, or is not that of the DeepSpeed engine.
    """
    folder = folder_at(path)
    check_arguments(model, optimizer)
    with on_device_of(model):
        write_checkpoint(folder, keep_last, lambda: contents_of(model, optimizer, extra), Ranks.met("save"))


@without_autograd
def async_save(
    path: PathLike,
    model: Module,
    optimizer: Optimizer | None = None,
    *,
    keep_last: int | None = None,
    staging_dir: str | os.PathLike[str] | None = None,
    **extra: Any,
) -> Future[None]:
    """Copies a model and its optimizer to host memory or a local disk, and saves the copy while training goes on.

    Needs memory equal to this rank's tensors, replicated ones included, until the returned future is dropped. The next
    save, if it begins before that future is dropped, copies into the same memory, which takes a fraction of the time
    that new memory takes. All ranks must call this. A save that begins while another goes on waits for that one, in the
    background. The ranks communicate in a gloo group of their own, beside the training's collectives.

    Args:
        path: the folder; see :func:`save` for all arguments.
        model: the model.
        optimizer: the model's optimizer.
        keep_last: how many checkpoints stay.
        staging_dir: a folder on a local disk of each node to which the copy goes, in place of host memory; the file has
            no name there, so nothing is left of it if the process ends. ``path`` gets the data in the background.
        extra: other values to save.

    Returns:
        A future that is done when the checkpoint is complete. The future's ``result()`` raises the errors of
        :func:`save`, which are logged, too. The future cannot be cancelled.

    Raises:
        RuntimeError: there is not enough host memory for the copy. Other ranks raise a CheckpointError that says so.
        CheckpointError: there is not enough room for the copy in ``staging_dir``, on any rank.
        ValueError, TypeError: as in :func:`save`.
    """
    global _last_future
    folder = folder_at(path)
    check_arguments(model, optimizer)
    stager = _reusable_stager(None if staging_dir is None else Path(staging_dir))

    def staged() -> Contents:
        check_keep_last(folder, keep_last)
        contents = contents_of(model, optimizer, extra)
        return contents._replace(tensors=stager.stage(contents.tensors))

    with on_device_of(model):
        contents = Ranks.met("async_save").agree(staged)
        future = _SaveFuture(stager)
        _last_future = weakref.ref(future)
        ranks = Ranks(_background_group(dist.group.WORLD))
    _start_thread(future, lambda: write_checkpoint(folder, keep_last, lambda: contents, ranks))
    return future


_thread: threading.Thread | None = None  # the thread of the last asynchronous save


def _start_thread(future: _SaveFuture, work: Callable[[], None]) -> None:
    """Starts a thread that runs ``work`` after the last save's thread, as their collectives must not mix."""
    global _thread
    last = _thread
    if last is None:
        # At exit, waits before other packages' executors end, which object stores need. Python itself waits later.
        getattr(threading, "_register_atexit", atexit.register)(_wait_for_thread)

    def run() -> None:
        try:
            if last is not None:
                last.join()
            work()
        except BaseException as error:  # raised by the future's result(), which nobody may call
            _logger.error("async_save failed: %s", error)
            future.set_exception(error)
        else:
            future.set_result(None)

    thread = threading.Thread(target=run, name="shardopt save")
    thread.start()
    _thread = thread


def _wait_for_thread() -> None:
    """Waits for the last asynchronous save, and so for all."""
    if _thread is not None:
        _thread.join()


@without_autograd
def load(
    path: PathLike,
    model: Module,
    optimizer: Optimizer | None = None,
    *,
    convert: bool = False,
    hyper_parameters: Literal["saved", "keep"] = "saved",
) -> Loaded:
    """Loads a checkpoint of :func:`save`, under any sharding and number of ranks. All ranks must call this.

    Reads and verifies the whole checkpoint before changing anything. Takes as much host memory as this rank's part of
    the checkpoint. Makes the new state on the optimizer's device before freeing the old state. Codes, scales and
    parameters are restored bit for bit. Loads the new checkpoint if another process replaces the checkpoint meanwhile.
    Only Ctrl-C at the end, while model and optimizer are changed, may leave a part of them unchanged: load again.

    Args:
        path: the folder.
        model: the bare model that was saved, in any wrapping that :func:`save` takes. All parameters of the model must
            be in the checkpoint, and each tensor of the checkpoint must be in the model of some rank.
        optimizer: an optimizer of the same parameters; None to load the model only.
        convert: allow another codec, block size or weight format of the optimizer, or another dtype of a parameter,
            than the checkpoint's: moments are decoded and encoded again, weights are rounded.
        hyper_parameters: ``"saved"``: the checkpoint's learning rate, weight decay and so on replace those of the
            optimizer's param groups, and a line of the log lists what changes. ``"keep"``: the optimizer's stay.

    Returns:
        The other values that were saved, the conversions, and the changed hyper-parameters.

    Raises:
        CheckpointError: there is no checkpoint in the folder, the checkpoint is damaged, of a newer format, or of
            another model or optimizer, or another rank failed or did not call this. Nothing was changed, on any rank.
        RuntimeError: there is not enough memory for the load, as with torch.OutOfMemoryError. Nothing was changed, on
            any rank.
        TypeError: the optimizer is none that :func:`save` takes, or is not that of the DeepSpeed engine.
        ValueError: ``hyper_parameters`` is neither.
    """
    if hyper_parameters not in ("saved", "keep"):
        raise ValueError(f"hyper_parameters: got {hyper_parameters!r}, expected 'saved' or 'keep'")
    folder = folder_at(path)
    check_arguments(model, optimizer)
    with on_device_of(model):
        ranks = Ranks.met("load")
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                with opened(model, optimizer) as (bare_model, bare_optimizer):
                    loaded = _load(folder, bare_model, bare_optimizer, ranks, convert, hyper_parameters)
                break
            except ReplacedError:
                if attempt == _ATTEMPTS:
                    raise
        engines = engines_of(model)
        if engines is not None:
            engines.copy_masters(model)
    return loaded


def _load(
    folder: Folder, model: Module, optimizer: Optimizer | None, ranks: Ranks, convert: bool, hyper_parameters: str
) -> Loaded:
    """One attempt of :func:`load`, for the bare model; a ReplacedError if the checkpoint is replaced meanwhile."""

    def opened_checkpoint() -> tuple[Restoration, bytes]:
        index = load_index(folder)
        restoration = Restoration(folder, index, model, optimizer)
        return restoration, index.crc32.to_bytes(4, "little") + restoration.claimed

    restoration, messages = ranks.exchange(opened_checkpoint)
    if len({message[:4] for message in messages}) > 1:
        raise ReplacedError(
            f"{folder}: got different checkpoints on different ranks, expected one; is it a folder that all ranks see, "
            "and does nobody save into it?"
        )
    claimed, keep = [message[4:] for message in messages], hyper_parameters == "keep"
    host = ranks.agree(lambda: restoration.read(claimed, convert=convert, keep=keep))
    states = ranks.agree(lambda: restoration.make_states(host))
    restoration.commit(host, states)
    if host.hyper_parameters and ranks.rank == 0:
        changes = [
            f"{key} of param group {index} from {old} to {new}"
            for index, changed in host.hyper_parameters.items()
            for key, (old, new) in changed.items()
        ]
        _logger.warning("load changed %s; hyper_parameters='keep' keeps the optimizer's own values", first_of(changes))
    return Loaded(host.extra, host.converted, host.hyper_parameters)


class Stager:
    """Copies tensors to host memory, or to a file without a name, in ``folder``, that is mapped into memory.

    All copies lie in one staging buffer, which the next :meth:`stage` uses again: the system clears each page of new
    memory on first touch, which takes several times as long as copying. The buffer grows when more memory is needed.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")

    def stage(self, tensors: Mapping[str, Chunks]) -> dict[str, Chunks]:
        """Copies this rank's rectangles into the staging buffer, over earlier copies, and returns chunks of the copies.

        Raises RuntimeError if there is not enough memory, CheckpointError if the folder has no room for the file.
        """
        rectangles = [tensor for chunks in tensors.values() for tensor in chunks.parts.values()]
        sizes = [math.ceil(tensor.nbytes / _ALIGNMENT) * _ALIGNMENT for tensor in rectangles]
        total = sum(sizes)
        if self._buffer.numel() < total:
            self._buffer = self._buffer.new_empty(0)  # frees the old buffer before the new one is allocated
            self._buffer = self._buffer.new_empty(total) if self.folder is None else _mapped(self.folder, total)
        pieces = torch.split(self._buffer[:total], sizes)
        copies = [
            piece[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for piece, tensor in zip(pieces, rectangles, strict=True)
        ]
        copy_to_host(copies, rectangles)
        in_order = iter(copies)
        return {
            name: replace(chunks, parts={offsets: next(in_order) for offsets in chunks.parts})
            for name, chunks in tensors.items()
        }


def _mapped(folder: Path, size: int) -> Tensor:
    """A tensor of bytes that is mapped to an unnamed file in a folder; the file exists as long as the tensor."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, size)  # a write to a mapped page without room would kill the process
            return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
    except OSError as error:
        raise CheckpointError(
            f"{folder}: cannot stage {size} bytes: {error.strerror or error}; make room or choose another staging_dir"
        ) from None


class _SaveFuture(Future[None]):
    """The future of an asynchronous save, which keeps the staging buffer alive. Always running: not to be cancelled."""

    def __init__(self, stager: Stager) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self.stager = stager


_last_future: weakref.ref[_SaveFuture] | None = None


def _reusable_stager(folder: Path | None) -> Stager:
    """The last save's staging buffer, if its future is done and still referenced (in the same folder), or a new one."""
    last = None if _last_future is None else _last_future()
    is_free = last is not None and last.done() and last.stager.folder == folder
    return last.stager if last is not None and is_free else Stager(folder)


def _forget_stager() -> None:
    """Called in a forked child, which must not write into a mapped staging file that the parent process also uses."""
    global _last_future
    _last_future = None


os.register_at_fork(after_in_child=_forget_stager)


@lru_cache(maxsize=1)
def _background_group(world: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """A gloo group of all ranks, so that collectives in the saving thread do not mix with the training's.

    All ranks must call this: the first call makes the group. None if there is one process without torch.distributed.
    """
    return None if world is None else dist.new_group(backend="gloo")
