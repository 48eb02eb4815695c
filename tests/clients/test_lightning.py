"""Lightning trains with our optimizers under its strategies, and resumes bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

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


def refused_deepspeed(folder: Path) -> str:
    with pytest.raises(RuntimeError) as caught:
        trained("deepspeed", folder)
    return str(caught.value)


@needs("deepspeed")
def test_deepspeed_needs_a_gpu(client_ranks: Pool, tmp_path: Path) -> None:
    """The reason why docs/clients.md has no result for it: to be replaced by one as soon as this fails."""
    assert "only supported on CUDA GPUs" in client_ranks.run(1, refused_deepspeed, tmp_path)[0]


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision_clips(precision: str, tmp_path: Path) -> None:
    """With one line: Lightning then unscales gradients before it clips them."""
    import lightning
    import torch

    import shardopt

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(64, 64)
            self.norms: list[float] = []

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return 100 * self.layer(batch).square().mean()

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            self.before = torch.nn.utils.get_total_norm([p.grad for p in self.parameters()])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            optimizer = shardopt.AdamW8bit(self.parameters(), lr=1e-2)
            optimizer._step_supports_amp_scaling = False
            step = optimizer.step

            def seen(closure: object = None) -> object:
                self.norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in self.parameters()])))
                return step()

            optimizer.step = seen if precision == "16-mixed" else step
            return optimizer

    module = Module()
    plugin = None
    if precision == "16-mixed":  # Lightning's own is for GPUs alone
        plugin = lightning.pytorch.plugins.MixedPrecision(
            precision, "cpu", torch.amp.GradScaler("cpu", init_scale=64.0)
        )
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=2, gradient_clip_val=0.1, logger=False, enable_checkpointing=False,
        precision=None if plugin else precision, plugins=plugin, default_root_dir=tmp_path, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(torch.randn(4, 2, 64)))
    assert trainer.global_step == 2
    assert float(module.before) > 0.2
    if plugin:
        assert module.norms == pytest.approx([0.1, 0.1], rel=1e-3)
