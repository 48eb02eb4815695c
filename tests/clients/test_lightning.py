"""Lightning trains with our optimizers under its strategies, and resumes bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardopt
from lightning_runs import trained, validated
from needed import needs
from ranks.pool import Pool

pytestmark = needs("lightning")


@pytest.fixture(scope="module")
def plain(client_ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], Path]:
    """A run in one process, and its folder."""
    folder = tmp_path_factory.mktemp("plain")
    (found,) = client_ranks.run(1, trained, "plain", folder)
    assert any(name.endswith("exp_avg_sq_codes") for name in found)
    return found, folder


def test_resume_in_one_process(client_ranks: Pool, plain: tuple[dict[str, str], Path]) -> None:
    assert client_ranks.run(1, trained, "plain", plain[1], True) == [plain[0]]


@pytest.mark.parametrize("mode", ["ddp", "fsdp1", "fsdp1 full", "fsdp1 sharded", "fsdp2", "fsdp2 in one file"])
def test_sharded(client_ranks: Pool, plain: tuple[dict[str, str], Path], mode: str, tmp_path: Path) -> None:
    """Training is that of one process, and goes on from a checkpoint on as many ranks, or on one, as if unbroken."""
    assert client_ranks.run(2, trained, mode, tmp_path) == [plain[0]] * 2
    assert client_ranks.run(2, trained, mode, tmp_path, True) == [plain[0]] * 2
    assert client_ranks.run(1, trained, "plain" if mode == "ddp" else mode, tmp_path, True) == [plain[0]]


def test_fsdp1_validates(client_ranks: Pool, plain: tuple[dict[str, str], Path], tmp_path: Path) -> None:
    client_ranks.run(2, trained, "fsdp1", tmp_path)
    expected = client_ranks.run(1, validated, "plain", plain[1])
    assert client_ranks.run(2, validated, "fsdp1", tmp_path) == expected * 2


def test_clipped_by_the_exact_norm(client_ranks: Pool, plain: tuple[dict[str, str], Path], tmp_path: Path) -> None:
    """By ``configure_gradient_clipping``, which Lightning calls within the optimizer's closure."""
    (expected,) = client_ranks.run(1, trained, "plain", tmp_path / "plain", False, 0.1)
    assert expected != plain[0]
    for mode in ("ddp", "fsdp1", "fsdp2"):
        assert client_ranks.run(2, trained, mode, tmp_path / mode, False, 0.1) == [expected] * 2


def mixed(precision: Any, exactly: bool, kind: str) -> list[list[float]]:
    """The weight after each of three steps that Lightning, or the exact norm, clips; the second has infinities."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.plugins.precision import MixedPrecision

    class Net(LightningModule):
        weight = torch.nn.Parameter(torch.linspace(-2, 2, 8))

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return (self.weight * batch).square().sum()

        def configure_optimizers(self) -> Any:
            if kind == "torch":
                return torch.optim.SGD([self.weight], lr=1.0)
            optimizer = shardopt.SGD8bit([self.weight], lr=1.0)
            optimizer._step_supports_amp_scaling = False
            return optimizer

        def configure_gradient_clipping(self, optimizer: Any, *limits: Any, **named: Any) -> None:
            if exactly and kind == "ours":
                shardopt.clip_grad_norm_([self.weight], 0.125, optimizer=optimizer)
            else:
                self.clip_gradients(optimizer, *limits, **named)

        def on_train_batch_end(self, *_: Any) -> None:
            found.append(self.weight.tolist())

    found: list[list[float]] = []
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, max_epochs=1,
        plugins=[MixedPrecision(precision, "cpu"), LightningEnvironment()], gradient_clip_val=0.125,
    )  # fmt: skip
    data = torch.ones(3, 8)
    data[1] = torch.inf if precision == "16-mixed" else 3.0
    trainer.fit(Net(), torch.utils.data.DataLoader(data, batch_size=None))
    return found


@pytest.mark.parametrize("exactly", [False, True])
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_clips_in_mixed_precision(client_ranks: Pool, precision: str, exactly: bool) -> None:
    """Unscaled gradients, by Lightning's own norm and by the exact one."""
    (found,), (expected,) = (client_ranks.run(1, mixed, precision, exactly, kind) for kind in ("ours", "torch"))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))
    assert (found[0] == found[1]) == (precision == "16-mixed")
    lengths = torch.tensor([torch.linspace(-2, 2, 8).tolist(), *found]).diff(dim=0).norm(dim=1)
    torch.testing.assert_close(lengths, torch.tensor([0.125, 0.0 if precision == "16-mixed" else 0.125, 0.125]))
