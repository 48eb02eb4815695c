"""Loading while other processes save into the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import shardopt
from checkpoint_folder import content_of, linear_run
from ranks.pool import Pool
from shardopt.checkpoint import CheckpointError, portable
from shardopt.checkpoint.index import Index, load_index
from shardopt.checkpoint.restore import Restoration
from shardopt.checkpoint.storage import Folder, LocalFolder, folder_at


def _replaced_at_each_plan(path: Path, times: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has another checkpoint saved each time after a load has read its index, so many times."""
    plan, saves = Restoration.plan, [0]

    def replacing(self: Restoration, *args: Any, **kwargs: Any) -> None:
        plan(self, *args, **kwargs)
        if saves[0] < times:
            saves[0] += 1
            shardopt.checkpoint.save(path, *linear_run(saves[0]), number=saves[0])

    monkeypatch.setattr(Restoration, "plan", replacing)
    return saves


@pytest.mark.parametrize("times", [1, 9])
def test_a_load_that_is_overtaken_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    shardopt.checkpoint.save(tmp_path, *linear_run(0), number=0)
    saves = _replaced_at_each_plan(tmp_path, times, monkeypatch)
    loaded = linear_run(20)
    assert shardopt.checkpoint.load(tmp_path, *loaded).extra == {"number": times}
    assert saves == [times]
    assert content_of(*loaded) == content_of(*linear_run(times))


def test_a_load_that_is_always_overtaken_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shardopt.checkpoint.save(tmp_path, *linear_run(0), number=0)
    _replaced_at_each_plan(tmp_path, 10, monkeypatch)
    loaded = linear_run(20)
    with pytest.raises(CheckpointError, match="another checkpoint was saved there while this one was loaded; load ag"):
        shardopt.checkpoint.load(tmp_path, *loaded)
    assert content_of(*loaded) == content_of(*linear_run(20))


def test_data_that_are_gone_without_a_new_checkpoint(tmp_path: Path) -> None:
    shardopt.checkpoint.save(tmp_path, *linear_run(0))
    for path in tmp_path.glob("*.bin"):
        path.unlink()
    with pytest.raises(CheckpointError, match="cannot be found"):
        shardopt.checkpoint.load(tmp_path, *linear_run(1))


def test_open_files_outlive_their_removal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a load has opened its files, a save that removes them changes nothing for it."""
    shardopt.checkpoint.save(tmp_path, *linear_run(0), number=0)
    read, opened, loads = portable.read_tensors, LocalFolder.open, []

    def open_and_replace(self: LocalFolder, name: str) -> Any:
        file = opened(self, name)
        monkeypatch.setattr(LocalFolder, "open", opened)
        shardopt.checkpoint.save(tmp_path, *linear_run(1), number=1)
        return file

    def replacing(*args: Any) -> None:
        loads.append(1)
        if len(loads) == 1:
            monkeypatch.setattr(LocalFolder, "open", open_and_replace)
        read(*args)

    monkeypatch.setattr(portable, "read_tensors", replacing)
    loaded = linear_run(20)
    assert shardopt.checkpoint.load(tmp_path, *loaded).extra == {"number": 0}
    assert content_of(*loaded) == content_of(*linear_run(0))
    assert len(loads) == 1


def _load_with_an_old_index_on_one_rank(path: Path) -> tuple[Any, int]:
    """Rank 1 sees the folder as it was before the last save, for the first time."""
    old: list[Index] = [load_index(folder_at(path))]
    dist.barrier()
    shardopt.checkpoint.save(path, *linear_run(1), number=1)
    reads = []

    def read(folder: Folder) -> Index:
        reads.append(folder)
        return old.pop() if old and dist.get_rank() == 1 else load_index(folder)

    portable.load_index, original = read, portable.load_index
    try:
        loaded = linear_run(20)
        extra = shardopt.checkpoint.load(path, *loaded).extra
    finally:
        portable.load_index = original
    assert content_of(*loaded) == content_of(*linear_run(1))
    return extra["number"], len(reads)


def test_ranks_agree_on_one_checkpoint(ranks: Pool, tmp_path: Path) -> None:
    shardopt.checkpoint.save(tmp_path, *linear_run(0), number=0)
    assert ranks.run(2, _load_with_an_old_index_on_one_rank, tmp_path) == [(1, 2), (1, 2)]
