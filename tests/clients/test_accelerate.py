"""A training loop with Accelerate: prepare, save_state and load_state with our optimizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardopt
from hugging_face import accelerated
from needed import needs
from ranks.pool import Pool

pytestmark = needs("accelerate", "transformers")
ZERO = [pytest.param(mode, marks=needs("deepspeed")) for mode in ("zero2", "zero2 offload")]


@pytest.fixture(scope="module")
def plain(client_ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], Path]:
    """A run in one process, and its checkpoint."""
    folder = tmp_path_factory.mktemp("plain")
    (found,) = client_ranks.run(1, accelerated, "plain", folder)
    return found, folder


def test_one_process(client_ranks: Pool, plain: tuple[dict[str, str], Path]) -> None:
    expected, folder = plain
    assert client_ranks.run(1, accelerated, "plain", folder, "state", True) == [expected]
    assert any(name.endswith("exp_avg_sq_codes") for name in expected)


@pytest.mark.parametrize("mode", ["ddp", "fsdp1", "fsdp1 sharded", "fsdp2", "fsdp2 sharded", *ZERO])
def test_sharded(client_ranks: Pool, plain: tuple[dict[str, str], Path], mode: str, tmp_path: Path) -> None:
    """The bits are those of one process: our optimizer stays where DeepSpeed offloads it."""
    assert client_ranks.run(2, accelerated, mode, tmp_path) == [plain[0]] * 2
    assert client_ranks.run(2, accelerated, mode, tmp_path, "state", True) == [plain[0]] * 2


#: Mode on 2 ranks before, ranks and mode after, and what saves: "state" by Accelerate, "portable" by shardopt.
LOADS: list[Any] = [
    ("fsdp1", 4, "fsdp1", "state"),
    ("fsdp2", 1, "fsdp2", "state"),
    ("fsdp2 sharded", 1, "fsdp2 sharded", "state"),
    ("fsdp1", 1, "plain", "portable"),
    ("fsdp2", 2, "fsdp1", "portable"),
    *(
        pytest.param(before, size, after, "portable", marks=needs("deepspeed"))
        for before, size, after in (("zero2 offload", 4, "zero2"), ("zero2", 2, "fsdp1"))
    ),
]


@pytest.mark.parametrize(("before", "world_size", "after", "way"), LOADS)
def test_loads_elsewhere(
    client_ranks: Pool,
    plain: tuple[dict[str, str], Path],
    before: str,
    world_size: int,
    after: str,
    way: str,
    tmp_path: Path,
) -> None:
    """On another number of ranks; by shardopt.checkpoint, which takes what was prepared, in any other mode, too."""
    assert client_ranks.run(2, accelerated, before, tmp_path, way) == [plain[0]] * 2
    assert client_ranks.run(world_size, accelerated, after, tmp_path, way, True) == [plain[0]] * world_size


def test_clipped_by_the_exact_norm(client_ranks: Pool, plain: tuple[dict[str, str], Path], tmp_path: Path) -> None:
    (expected,) = client_ranks.run(1, accelerated, "plain", tmp_path, "state", False, 0.1)
    assert expected != plain[0]
    for mode in ("ddp", "fsdp1", "fsdp2"):
        assert client_ranks.run(2, accelerated, mode, tmp_path, "state", False, 0.1) == [expected] * 2


def fp16_steps(name: str, schedule_first: bool, max_norm: float | None) -> list[tuple[bool, bool, float]]:
    """Steps of Accelerate's optimizer in fp16, with an infinite gradient and without.

    For each whether Accelerate counts it as skipped, whether it changed the weights, and the learning rate afterwards.
    """
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler

    Accelerator(cpu=True)
    param = torch.nn.Parameter(torch.ones(8, 8))
    inner = getattr(shardopt, name)([param], lr=1.0)
    schedules = [torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)] if schedule_first else []
    scaler = torch.amp.GradScaler("cpu")
    optimizer = AcceleratedOptimizer(inner, device_placement=False, scaler=scaler)
    schedule = AcceleratedScheduler(*(schedules or [torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)]), optimizer)
    found = []
    for factor in (1.0, float("inf"), 1.0):
        before = param.detach().clone()
        scaler.scale((param * factor).sum()).backward()
        if max_norm is not None:
            scaler.unscale_(inner)
            shardopt.clip_grad_norm_([param], max_norm, optimizer=inner)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        found.append((optimizer.step_was_skipped, not torch.equal(param.detach(), before), schedule.get_last_lr()[0]))
    return found


@pytest.mark.parametrize(
    ("name", "max_norm", "schedule_first"),
    [("AdamW8bit", None, False), ("AdamW8bit", None, True), ("Muon8bit", 1.0, True)],
)
def test_skipped_steps_in_fp16(client_ranks: Pool, name: str, max_norm: float | None, schedule_first: bool) -> None:
    """Accelerate's schedule waits for a step that the loss scaler leaves out."""
    (found,) = client_ranks.run(1, fp16_steps, name, schedule_first, max_norm)
    assert found == [(False, True, 0.5), (True, False, 0.5), (False, True, 0.25)]
