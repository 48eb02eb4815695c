"""The pool of ranks itself: what fails, dies or hangs on a rank becomes a message, and the next run works."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ranks.pool import Pool, RankFailure


def _sum_of_ranks(base: int) -> tuple[int, torch.Tensor]:
    total = torch.tensor([base + dist.get_rank()])
    dist.all_reduce(total)
    return dist.get_world_size(), total


def _fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("a test's own error")
    dist.barrier()


def _die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()


def _hang() -> None:
    time.sleep(600)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_runs_on_every_rank(ranks: Pool, world_size: int) -> None:
    expected = 10 * world_size + sum(range(world_size))
    for size, total in ranks.run(world_size, _sum_of_ranks, 10):
        assert size == world_size
        assert total.item() == expected


def test_an_error_comes_back_with_its_traceback(ranks: Pool) -> None:
    with pytest.raises(RankFailure, match=r"(?s)rank 1 of 3 raised.*_fail_on.*ValueError: a test's own error"):
        ranks.run(3, _fail_on, 1)
    assert len(ranks.run(3, _sum_of_ranks, 0)) == 3


def test_a_dead_rank_is_reported(ranks: Pool) -> None:
    with pytest.raises(RankFailure, match="rank 0 of 2 died with exit code 7"):
        ranks.run(2, _die_on, 0)
    assert len(ranks.run(2, _sum_of_ranks, 0)) == 2


def test_a_hanging_rank_is_given_up(ranks: Pool) -> None:
    with pytest.raises(RankFailure, match=r"rank 0 of 2 gave no answer in 0\.5 s"):
        ranks.run(2, _hang, timeout=0.5)
    assert len(ranks.run(2, _sum_of_ranks, 0)) == 2


@pytest.mark.ranks(2)
def test_a_marked_test_runs_on_ranks(tmp_path: Path) -> None:
    assert dist.get_world_size() == 2
    (tmp_path / str(dist.get_rank())).touch()
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.xfail(raises=RankFailure, strict=True)
@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [3])
def test_a_marked_test_fails_if_one_rank_fails(world_size: int) -> None:
    assert dist.get_rank() != world_size - 1
