"""Checkpoints in an object store, which is a folder behind fsspec: three ranks save and two load."""

from __future__ import annotations

from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

import shardopt
from ranks.pool import Pool
from ranks.runs import snapshot_of, trained
from ranks.snapshot import Snapshot, assert_same


class Store(LocalFileSystem):
    """Files that are objects for shardopt, which knows nothing of the protocol."""

    protocol = "store"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("store://")))


def _url(folder: Path, step: int) -> str:
    fsspec.register_implementation("store", Store, clobber=True)
    return f"store://{folder}/step-{step}"


def _save(folder: Path, step: int) -> Snapshot:
    model, optimizer = trained("fsdp", 1, seed=step)
    shardopt.checkpoint.save(_url(folder, step), model, optimizer, keep_last=2, step=step)
    return snapshot_of(model, optimizer)


def _load(folder: Path, step: int) -> Snapshot:
    model, optimizer = trained("fsdp", 1, seed=50)
    assert shardopt.checkpoint.load(_url(folder, step), model, optimizer).extra == {"step": step}
    return snapshot_of(model, optimizer)


def test_ranks_save_and_others_load(ranks: Pool, tmp_path: Path) -> None:
    stray = tmp_path / "step-0" / "0123456789abcdef-0.bin"
    stray.parent.mkdir()
    stray.write_bytes(b"data")  # another job might be saving it
    saved = [ranks.run(3, _save, tmp_path, step)[0] for step in (1, 2, 3)]
    assert stray.exists()
    for step in (2, 3):
        for loaded in ranks.run(2, _load, tmp_path, step):
            assert_same(loaded, saved[step - 1])
    assert list((tmp_path / "step-1").glob("*")) == []
