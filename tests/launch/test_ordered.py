"""The job with ordered gradients: its losses, weights and state do not depend on the number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from ranks.pool import Pool
from train_job import TINY, assert_same_run, run_on
from versions import needs_fsdp2_on_the_cpu

pytestmark = needs_fsdp2_on_the_cpu

ORDERED = (*TINY, "--ordered", "--micro-batches", "6", "--clip", "0.2", "--dropout", "0.1")


@pytest.fixture(scope="module")
def alone(ranks: Pool, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run in one process."""
    output = tmp_path_factory.mktemp("alone")
    run_on(ranks, 1, *ORDERED, "--backend", "single", "--data", text, "--output", output)
    return output


@pytest.mark.parametrize(("backend", "world_size"), [("fsdp2", 2), ("ddp", 3)])
def test_same_bits(ranks: Pool, alone: Path, text: Path, tmp_path: Path, backend: str, world_size: int) -> None:
    run_on(ranks, world_size, *ORDERED, "--backend", backend, "--data", text, "--output", tmp_path)
    assert_same_run(tmp_path, alone)


def test_a_run_that_changes_its_number_of_ranks_twice(ranks: Pool, alone: Path, text: Path, tmp_path: Path) -> None:
    job = (*ORDERED, "--backend", "fsdp2", "--data", text, "--output", tmp_path, "--resume", "auto")
    for world_size, step in ((3, 3), (1, 6), (2, 8)):
        run_on(ranks, world_size, *job, "--checkpoint-interval", 1, "--stop-at-step", step)
    assert_same_run(tmp_path, alone)
