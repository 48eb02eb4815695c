"""DeepSpeed's offload to NVMe, and activation checkpointing: the bits are those without.

NVMe is tested with files that Python reads and writes in place of DeepSpeed's ``async_io`` op, which it would compile.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.functional import silu

import shardopt
from ranks.deepspeed import (
    BF16,
    OFFLOAD,
    STEPS,
    SUB_GROUPS,
    assert_as_whole,
    config,
    engine_snapshot,
    import_deepspeed,
    make_engine,
    masters,
    step_engine,
    stepped_engine,
    stepped_whole,
)
from ranks.models import TOKENS, loss_of, make_batch
from ranks.pool import Pool
from ranks.snapshot import Snapshot, assert_same
from shardopt.sharding.deepspeed.offload import masters_in_memory
from slow_cases import slow


def _cpu(*what: str, **options: Any) -> dict[str, Any]:
    return {f"offload_{name}": {"device": "cpu", **options} for name in what}


def _check(engine: Any, whole: nn.Module, optimizer: Any) -> None:
    with masters_in_memory(engine.optimizer):
        assert_as_whole(engine, whole, optimizer)


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


def _nvme(path: Path, *what: str, pipeline: bool = False) -> dict[str, Any]:
    """Sub-groups of which some are swapped: DeepSpeed leaves those below a MiB in memory."""
    to_disk = {"device": "nvme", "nvme_path": str(path), "buffer_count": 8}
    zero: dict[str, Any] = {"sub_group_size": 250000, "stage3_param_persistence_threshold": 0, **_cpu("optimizer")}
    if "optimizer" in what:
        zero["offload_optimizer"] = {**to_disk, "pipeline_read": pipeline, "pipeline_write": pipeline}
    if "param" in what:
        zero["offload_param"] = {**to_disk, "buffer_size": 600000}
    return zero


def _large(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [nn.Linear(600, 900), nn.Linear(900, 600), nn.LayerNorm(600), nn.Linear(600, 950)]
        return nn.Sequential(*layers)


def _large_engine(settings: dict[str, Any], steps: int, *, seed: int = 0) -> Any:
    return stepped_engine(settings, steps, _large(seed))


def _large_whole(settings: dict[str, Any], steps: int) -> tuple[nn.Module, Any]:
    return stepped_whole(settings, steps, _large())


@pytest.mark.deepspeed_ranks(2)
@pytest.mark.parametrize(
    ("what", "pipeline", "other"),
    [
        (("optimizer",), False, {}),
        (("optimizer",), True, BF16),
        (("optimizer", "param"), False, BF16),
        *slow([(("optimizer", "param"), True, {}), (("param",), False, {})]),
    ],
)
def test_nvme(tmp_path: Path, what: tuple[str, ...], pipeline: bool, other: dict[str, Any]) -> None:
    settings = config(3, zero=_nvme(tmp_path, *what, pipeline=pipeline), **other)
    with _plain_files(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = _large_engine(settings, STEPS)
        _check(engine, *_large_whole(settings, STEPS))
        step_engine(engine, STEPS)
        _check(engine, *_large_whole(settings, STEPS + 1))
        told = [str(w.message) for w in caught if "stays in the host's memory" in str(w.message)]
        on_disk = settings["zero_optimization"]["offload_optimizer"]["device"] == "nvme"
        assert len(told) == int(on_disk and torch.distributed.get_rank() == 0)
        if on_disk:
            files = list(Path(engine.optimizer.optimizer_swapper.swap_folder).iterdir())
            held = [file for file in files if "gradient" not in file.name]
            swappable = [engine.optimizer._swappable_optimizer_subgroup(i) for i in range(len(masters(engine)))]
            assert 0 < len(held) == sum(swappable) < len(swappable)  # masters, and nothing else


def _nvme_settings(path: Path) -> dict[str, Any]:
    return config(3, zero=_nvme(path / "nvme", "optimizer", "param"), **BF16)


def _save_from_nvme(path: Path) -> None:
    settings = _nvme_settings(path)
    with _plain_files():
        engine = _large_engine(settings, STEPS)
        engine.save_checkpoint(str(path / "own"))
        shardopt.checkpoint.save(path / "portable", engine)
        step_engine(engine, STEPS)
        _check(engine, *_large_whole(settings, STEPS + 1))


def _load_to_nvme(path: Path, own: bool) -> None:
    settings = _nvme_settings(path / "other")
    with _plain_files():
        engine = _large_engine(settings, 1, seed=1)
        if own:
            assert engine.load_checkpoint(str(path / "own"))[0] is not None
        else:
            shardopt.checkpoint.load(path / "portable", engine)
        _check(engine, *_large_whole(settings, STEPS))
        step_engine(engine, STEPS)
        _check(engine, *_large_whole(settings, STEPS + 1))


def test_checkpoints_from_and_to_nvme(deepspeed_ranks: Pool, tmp_path: Path) -> None:
    deepspeed_ranks.run(2, _save_from_nvme, tmp_path)
    for own in (True, False):
        deepspeed_ranks.run(2, _load_to_nvme, tmp_path, own)


class Blocks(nn.Module):
    """Guesses tokens through blocks that may be computed a second time in the backward pass."""

    def __init__(self, checkpoint: Callable[..., Tensor] | None) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 66)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(66), nn.Linear(66, 97), nn.SiLU(), nn.Linear(97, 66)) for _ in range(2)
        )
        self.head = nn.Linear(66, TOKENS)
        self._checkpoint = checkpoint

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + (block(x) if self._checkpoint is None else self._checkpoint(block, x))
        return self.head(silu(x))


def _trained(settings: dict[str, Any], checkpoint: Callable[..., Tensor] | None) -> tuple[Snapshot, int]:
    """Masters and state after some steps, and how often a block was computed."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Blocks(checkpoint)
    calls: list[nn.Module] = []
    for block in model.blocks:
        block[1].register_forward_hook(lambda module, inputs, output: calls.append(module))
    engine = make_engine(model, settings)
    for step in range(STEPS):
        engine.backward(loss_of(engine, make_batch(step, torch.distributed.get_rank())))
        engine.step()
    return engine_snapshot(engine), len(calls)


@pytest.mark.deepspeed_ranks(2)
@pytest.mark.parametrize(
    ("kind", "stage", "zero"),
    [
        ("deepspeed", 1, {}),
        ("reentrant", 3, {**_cpu("optimizer", "param"), **SUB_GROUPS}),
        ("torch", 2, OFFLOAD),
    ],
)
def test_activation_checkpointing(kind: str, stage: int, zero: dict[str, Any]) -> None:
    settings = config(stage, zero=zero)
    plain, once = _trained(settings, None)
    if kind == "deepspeed":
        checkpointing = import_deepspeed().checkpointing
        checkpointing.configure(None, partition_activations=False)
        checkpoint = checkpointing.checkpoint
    else:
        checkpoint = partial(torch.utils.checkpoint.checkpoint, use_reentrant=kind == "reentrant")
    again, twice = _trained(settings, checkpoint)
    assert (once, twice) == (2 * STEPS, 4 * STEPS)
    assert_same(again, plain)
