"""DeepSpeed's offload to NVMe, and masters that are the parameters: the same bits.

NVMe is tested with files that Python reads and writes in place of DeepSpeed's ``async_io`` op, which it would compile.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn

import shardopt
from ranks.deepspeed import (
    ALL_OFFLOAD,
    BF16,
    OFFLOAD,
    PINNED,
    ROUND_ROBIN,
    STEPS,
    SUB_GROUPS,
    WITHOUT_MASTERS,
    assert_as_whole,
    config,
    goes_on_as_whole,
    import_deepspeed,
    masters,
    step_engine,
    step_whole,
    stepped_engine,
    stepped_whole,
    twins,
)
from shardopt.sharding.deepspeed import hooks
from shardopt.sharding.deepspeed.offload import masters_in_memory


class PlainFiles:
    """The ``aio_handle`` of DeepSpeed's ``async_io`` op without its speed: what it is asked for is done in wait()."""

    _locked: ClassVar[list[tuple[int, int]]] = []

    def __init__(self, **options: Any) -> None:
        self._pending: list[Callable[[], None]] = []

    def new_cpu_locked_tensor(self, numel: int, example: Tensor) -> Tensor:
        space = torch.empty((int(numel) + 1024) * example.element_size(), dtype=torch.uint8)
        space = space[-space.data_ptr() % 512 :]
        self._locked.append((space.data_ptr(), space.data_ptr() + space.nbytes))
        return space.view(example.dtype)[: int(numel)]

    def is_pinned(self, tensor: Tensor) -> bool:
        return any(begin <= tensor.data_ptr() < end for begin, end in self._locked)

    def async_pwrite(self, tensor: Tensor, path: str, offset: int) -> int:
        assert (offset, tensor.nbytes % 1024) == (0, 0)
        self._pending.append(lambda: Path(path).write_bytes(bytes(tensor.view(torch.uint8).numpy())))
        return 0

    def async_pread(self, tensor: Tensor, path: str, offset: int) -> int:
        assert (offset, tensor.nbytes % 1024) == (0, 0)
        if tensor.data_ptr() % 512:  # so does the op
            self._pending.append(lambda: None)
            return 0

        def read() -> None:
            content = bytearray(Path(path).read_bytes())
            assert len(content) >= tensor.nbytes
            tensor.view(torch.uint8).copy_(torch.frombuffer(content, dtype=torch.uint8)[: tensor.nbytes])

        self._pending.append(read)
        return 0

    def wait(self) -> int:
        done = len(self._pending)
        for work in self._pending:
            work()
        self._pending.clear()
        return done


@contextmanager
def _plain_files() -> Iterator[None]:
    import_deepspeed()
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from deepspeed.runtime.zero import Init

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncIOBuilder, "load", lambda self, verbose=False: SimpleNamespace(aio_handle=PlainFiles))
        patch.setattr(PlainFiles, "_locked", [])
        patch.setattr(Init, "param_id", 0)  # by which files are named: as in a process of its own
        yield


def _nvme(path: Path, parameters: bool) -> dict[str, Any]:
    """Sub-groups of which some are swapped: DeepSpeed leaves those below a MiB in memory."""
    to_disk = {"device": "nvme", "nvme_path": str(path), "buffer_count": 8}
    zero: dict[str, Any] = {"sub_group_size": 250000, "stage3_param_persistence_threshold": 0}
    if parameters:
        return {**zero, "offload_optimizer": to_disk, "offload_param": {**to_disk, "buffer_size": 600000}}
    return {**zero, "offload_optimizer": {**to_disk, "pipeline_read": True, "pipeline_write": True}}


def _large(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(600, 900), nn.LayerNorm(600), nn.Linear(600, 950))


def _check(engine: Any, whole: nn.Module, optimizer: Any) -> None:
    with masters_in_memory(engine.optimizer):
        assert_as_whole(engine, whole, optimizer)


@pytest.mark.deepspeed_ranks(2)
@pytest.mark.parametrize(("parameters", "other", "own"), [(False, {}, True), (True, BF16, False)])
def test_nvme(tmp_path: Path, parameters: bool, other: dict[str, Any], own: bool) -> None:
    """Masters are on the disk, and nothing else that lasts; checkpoints come from there and go there."""
    saved = tmp_path / "saved"
    settings = config(3, zero=_nvme(tmp_path / "disk", parameters), **other)
    whole = stepped_whole(settings, STEPS, _large())
    with _plain_files():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine = stepped_engine(settings, STEPS, _large())
        told = [str(w.message) for w in caught if "stays in the host's memory" in str(w.message)]
        assert len(told) == int(dist.get_rank() == 0)
        _check(engine, *whole)
        if own:
            engine.save_checkpoint(str(saved))
        else:
            shardopt.checkpoint.save(saved, engine)
        step_engine(engine, STEPS)
        step_whole(*whole, STEPS)
        _check(engine, *whole)
        files = list(Path(engine.optimizer.optimizer_swapper.swap_folder).iterdir())
        swappable = [engine.optimizer._swappable_optimizer_subgroup(i) for i in range(len(masters(engine)))]
        assert 0 < len([file for file in files if "gradient" not in file.name]) == sum(swappable) < len(swappable)
    settings = config(3, zero=_nvme(tmp_path / "other", parameters), **other)
    with _plain_files():
        engine = stepped_engine(settings, 1, _large(seed=1))
        if own:
            assert engine.load_checkpoint(str(saved))[0] is not None
        else:
            shardopt.checkpoint.load(saved, engine)
        step_engine(engine, STEPS)
        _check(engine, *whole)


def _config(stage: int, zero: dict[str, Any], **options: Any) -> dict[str, Any]:
    return config(stage, zero=zero, params={"master_weight_bits": 24}, bf16=WITHOUT_MASTERS, **options)


@contextmanager
def _apart() -> Iterator[None]:
    """Engines made inside keep all the copies that DeepSpeed makes."""
    share, hooks.share_storage = hooks.share_storage, lambda wrapper: None
    try:
        yield
    finally:
        hooks.share_storage = share


def _sizes(engine: Any) -> dict[int, int]:
    """The bytes of each piece of memory that parameters, masters, gradients and staging buffers stand in."""
    wrapper = engine.optimizer
    tensors = [flat for flat, _ in masters(engine)]
    tensors += [flat.grad for flat, _ in masters(engine) if flat.grad is not None]
    tensors += [getattr(param, "ds_tensor", param) for param in engine.module.parameters()]
    tensors += getattr(wrapper, "param_buffer_of_bit16_for_cpu_offload_groups", [])
    tensors += [x for x in [getattr(wrapper, "grad_partitions_flat_buffer", None)] if x is not None]
    return {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}


@pytest.mark.deepspeed_ranks(2)
@pytest.mark.parametrize(
    ("stage", "zero", "saved"),
    [
        (2, ROUND_ROBIN, 2),  # masters
        (1, {**OFFLOAD, **ROUND_ROBIN}, 2),  # staging
        (3, {**PINNED, **SUB_GROUPS}, 2),  # gradients
        (3, {**ALL_OFFLOAD, **SUB_GROUPS}, 4),  # both
    ],
)
def test_shared_copies_save_memory(stage: int, zero: dict[str, Any], saved: int) -> None:
    """So many bytes per parameter that a rank owns; ``test_deepspeed.py`` has the bits."""
    one = stepped_engine(_config(stage, zero), 1)
    with _apart():
        other = stepped_engine(_config(stage, zero), 1)
    owned = sum(flat.numel() for flat, _ in masters(one))
    assert owned == sum(flat.numel() for flat, _ in masters(other))
    assert sum(_sizes(other).values()) - sum(_sizes(one).values()) == saved * owned


@pytest.mark.deepspeed_ranks(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_native_pinning_shares_nothing_offloaded(stage: int) -> None:
    """DeepSpeed's own pinning would free shared memory twice, so the tensors stay apart."""
    with _apart():
        apart = stepped_engine(_config(stage, OFFLOAD), STEPS)
    before = _sizes(apart)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_PIN_MEMORY_BACKEND", "native")
        hooks.share_storage(apart.optimizer)
    assert _sizes(apart) == before


@pytest.mark.deepspeed_ranks(2)
@pytest.mark.parametrize(("stage", "zero"), [(2, ROUND_ROBIN), (3, SUB_GROUPS)])
def test_masters_that_were_away(tmp_path: Path, stage: int, zero: dict[str, Any]) -> None:
    """Masters are the parameters again, though DeepSpeed brings each back to memory of its own."""
    of = twins(_config(stage, zero))
    engine = of.engine(STEPS)
    wrapper, rank = engine.optimizer, dist.get_rank()
    for _ in range(2):
        engine.offload_states()  # with buffers of its own even on the CPU
        engine.reload_states()
        partitions = (
            wrapper.fp16_partitioned_groups_flat
            if stage == 3
            else [partitions[rank] for partitions in wrapper.parallel_partitioned_bit16_groups]
        )
        addresses = [partition.data_ptr() for partition in partitions]
        assert [flat.data_ptr() for flat, _ in masters(engine)] == addresses
    engine.save_checkpoint(str(tmp_path))
    dist.barrier()
    other = of.engine(2, seed=1)
    shared = set(_sizes(other))
    assert other.load_checkpoint(str(tmp_path))[0] is not None
    assert set(_sizes(other)) == shared
    for each in (other, engine):
        goes_on_as_whole(each, of)
