"""Hugging Face's Trainer, Accelerate and Lightning under every way of sharding: the bits of one process, also resumed.

Checkpoints are the client's own, or portable ones, which are loaded on any number of ranks and in any mode.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hugging_face
import lightning_runs
import shardopt
from needed import needs
from ranks.pool import Pool
from shardopt.checkpoint import CheckpointError

#: The function that trains with each client.
CLIENTS: dict[str, Callable[..., dict[str, str]]] = {
    "Trainer": hugging_face.trained,
    "Accelerate": hugging_face.accelerated,
    "Lightning": lightning_runs.trained,
}
hugging = needs("transformers", "accelerate")
lightning = needs("lightning")
peft = needs("transformers", "accelerate", "peft")

Plain = Callable[[str], tuple[dict[str, str], Path]]


@pytest.fixture(scope="module")
def plain(client_ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """Gives a client's run in one process, and its folder."""

    @cache
    def of(client: str) -> tuple[dict[str, str], Path]:
        folder = tmp_path_factory.mktemp("plain")
        (found,) = client_ranks.run(1, CLIENTS[client], "plain", folder)
        assert any(name.endswith("exp_avg_sq_codes") for name in found)
        return found, folder

    return of


def cases(client: str, *rows: tuple[Any, ...]) -> list[Any]:
    """Cases that need a client's packages, and DeepSpeed if one of their modes does."""
    marks = [lightning if client == "Lightning" else hugging]
    return [
        pytest.param(client, *row, marks=[*marks, needs("deepspeed")] if "zero" in str(row) else marks) for row in rows
    ]


HUGGING_FACE = ("plain", "ddp", "fsdp1", "fsdp1 sharded", "fsdp2", "fsdp2 sharded", "zero2", "zero2 offload")
LIGHTNING = ("ddp", "fsdp1", "fsdp1 sharded", "fsdp2", "fsdp2 in one file")


@pytest.mark.parametrize(
    ("client", "mode"),
    [
        *cases("Trainer", *((mode,) for mode in (*HUGGING_FACE, "zero2 by name"))),
        *cases("Accelerate", *((mode,) for mode in HUGGING_FACE)),
        *cases("Lightning", *((mode,) for mode in ("plain", *LIGHTNING))),
    ],
)
def test_sharded(client_ranks: Pool, plain: Plain, client: str, mode: str, tmp_path: Path) -> None:
    """Training goes on from the client's own checkpoint; our optimizer stays where DeepSpeed offloads it."""
    world_size = 1 if mode == "plain" else 2
    expected = [plain(client)[0]] * world_size
    assert client_ranks.run(world_size, CLIENTS[client], mode, tmp_path) == expected
    assert client_ranks.run(world_size, CLIENTS[client], mode, tmp_path, tmp_path) == expected


@hugging
@pytest.mark.parametrize(
    ("make", "release"),
    [(hugging_face.tiny_llama, False), (hugging_face.tiny_llama, True), (hugging_face.tiny_qwen, False)],
)
def test_sharded_by_transformers_itself(client_ranks: Pool, make: Any, release: bool, tmp_path: Path) -> None:
    """By its models' own plans; the embedding of one is its output layer as well."""
    pytest.importorskip("transformers.distributed.fsdp", reason="transformers has FSDP2 of its own from 5.24 on")
    for plain, sharded in client_ranks.run(2, hugging_face.natively_sharded, make, tmp_path, release):
        assert sharded == plain


@pytest.mark.parametrize(
    ("client", "before", "after", "portable"),
    [
        *cases(
            "Trainer",
            ((1, "plain"), (2, "ddp"), True),
            ((2, "ddp"), (1, "plain"), False),
            *(((2, mode), (1, mode), False) for mode in ("fsdp1", "fsdp2", "fsdp2 sharded")),
            *(((2, "fsdp1"), (size, "fsdp1"), True) for size in (1, 2)),
            ((2, "fsdp2"), (1, "fsdp2"), True),
            ((2, "zero2 offload"), (1, "plain"), True),
            ((2, "zero2"), (1, "zero2 offload"), True),
            ((2, "zero2 by name"), (4, "zero2 by name"), True),
        ),
        *cases(
            "Accelerate",
            ((2, "fsdp1"), (4, "fsdp1"), False),
            *(((2, mode), (1, mode), False) for mode in ("fsdp2", "fsdp2 sharded")),
            ((2, "fsdp1"), (1, "plain"), True),
            ((2, "fsdp2"), (2, "fsdp1"), True),
            ((2, "zero2 offload"), (4, "zero2"), True),
            ((2, "zero2"), (2, "fsdp1"), True),
        ),
        *cases("Lightning", *(((2, mode), (1, "plain" if mode == "ddp" else mode), False) for mode in LIGHTNING)),
    ],
)
def test_resumes_elsewhere(
    client_ranks: Pool,
    plain: Plain,
    client: str,
    before: tuple[int, str],
    after: tuple[int, str],
    portable: bool,
    tmp_path: Path,
) -> None:
    """On another number of ranks or in another mode, from the client's own checkpoint or the portable one."""
    run = partial(CLIENTS[client], portable=True) if portable else CLIENTS[client]
    expected, start = plain(client)[0], tmp_path / "before"
    assert client_ranks.run(before[0], run, before[1], start) == [expected] * before[0]
    assert client_ranks.run(after[0], run, after[1], tmp_path / "after", start) == [expected] * after[0]


@pytest.mark.parametrize("client", [case for client in CLIENTS for case in cases(client, ())])
def test_clipped_by_the_exact_norm(client_ranks: Pool, plain: Plain, client: str, tmp_path: Path) -> None:
    run = partial(CLIENTS[client], max_norm=0.1)
    (expected,) = client_ranks.run(1, run, "plain", tmp_path / "plain")
    assert expected != plain(client)[0]
    for mode in ("ddp", "fsdp1", "fsdp2"):
        assert client_ranks.run(2, run, mode, tmp_path / mode) == [expected] * 2


# Trainer --------------------------------------------------------------------------------------------------------------


@hugging
@needs("deepspeed")
def test_zero3_resumes(client_ranks: Pool, plain: Plain, tmp_path: Path) -> None:
    """ZeRO 3 multiplies matrices in an order of its own: its bits are compared with its own."""
    portable = partial(hugging_face.trained, portable=True)
    found = client_ranks.run(2, hugging_face.trained, "zero3", tmp_path)
    assert found[0].keys() == plain("Trainer")[0].keys()
    assert client_ranks.run(2, hugging_face.trained, "zero3", tmp_path, tmp_path) == found
    assert client_ranks.run(2, portable, "zero3", tmp_path / "a") == found
    for world_size, mode in ((1, "zero3"), (4, "zero3 offload")):
        resumed = client_ranks.run(world_size, portable, mode, tmp_path / mode, tmp_path / "a")
        assert resumed == found[:1] * world_size


def adapters(*given: Any, dropout: float = 0.5, **options: Any) -> Any:
    return hugging_face.trained(*given, model=partial(hugging_face.tiny_lora, dropout=dropout), **options)


@peft
@pytest.mark.parametrize(("mode", "portable"), [("plain", False), ("ddp", True), ("fsdp2", False)])
def test_lora(client_ranks: Pool, mode: str, portable: bool, tmp_path: Path) -> None:
    """Adapters train under dropout, which goes on with the same random numbers, of which each rank has its own."""
    run = partial(client_ranks.run, 1 if mode == "plain" else 2, partial(adapters, portable=portable), mode, tmp_path)
    expected = run()
    assert any("lora_B" in name and name.endswith("exp_avg_codes") for name in expected[0])
    assert run(tmp_path) == expected


@peft
@pytest.mark.parametrize(("mode", "after", "portable"), [("ddp", "plain", False), ("fsdp2", "fsdp2", True)])
def test_lora_resumes_on_another_number_of_ranks(
    client_ranks: Pool, mode: str, after: str, portable: bool, tmp_path: Path
) -> None:
    """Without dropout, whose random numbers belong to a rank."""
    run = partial(adapters, portable=portable, dropout=0.0)
    (expected,) = client_ranks.run(1, run, "plain", tmp_path / "plain")
    assert client_ranks.run(2, run, mode, tmp_path / "a") == [expected] * 2
    assert client_ranks.run(1, run, after, tmp_path / "b", tmp_path / "a") == [expected]


def refusals(output: Path, theirs: Path) -> None:
    from transformers import TrainerState, TrainingArguments

    from shardopt.clients.transformers import ClipGradNorm, PortableCheckpoint

    portable = partial(hugging_face.trained, "plain", portable=True)
    with pytest.raises(ValueError, match="got save_only_model=False with PortableCheckpoint"):
        portable(output, save_only_model=False)
    state, given = TrainerState(is_hyper_param_search=True), dict.fromkeys(("model", "optimizer", "lr_scheduler"))
    with pytest.raises(ValueError, match=r"hyper-parameter search.*leave the callback out"):
        PortableCheckpoint().on_train_begin(TrainingArguments(use_cpu=True), state, None, **given)
    with pytest.raises(CheckpointError, match="there is no such folder, or nothing in it"):
        portable(output, theirs)
    with pytest.raises(ValueError, match=r"expected TrainingArguments\(max_grad_norm=0.0\)"):
        ClipGradNorm(0.1).on_init_end(SimpleNamespace(max_grad_norm=1.0), None, None)


@hugging
def test_what_the_callbacks_refuse(client_ranks: Pool, plain: Plain, tmp_path: Path) -> None:
    """Runs of a search have folders that callbacks are not told; a checkpoint of Trainer's alone has none of ours."""
    client_ranks.run(1, refusals, tmp_path, plain("Trainer")[1])


@hugging
@pytest.mark.client_ranks(1)
def test_schedulers_with_milestones() -> None:
    """JSON would make text of their numbers; the constructor makes them again."""
    from torch.optim import SGD
    from torch.optim.lr_scheduler import MultiStepLR

    from shardopt.clients.transformers import _saved_state

    first, second = (MultiStepLR(SGD([torch.zeros(1, requires_grad=True)], lr=1.0), [2, 4]) for _ in range(2))
    first.optimizer.step()
    first.step()
    second.load_state_dict(json.loads(json.dumps(_saved_state(first))))
    second.optimizer.step()
    second.step()
    assert second.get_last_lr() == [0.1]


# Accelerate -----------------------------------------------------------------------------------------------------------


@hugging
@pytest.mark.client_ranks(1)
@pytest.mark.parametrize(
    ("name", "max_norm", "schedule_first"),
    [("AdamW8bit", None, False), ("AdamW8bit", None, True), ("Muon8bit", 1.0, True)],
)
def test_skipped_steps_in_fp16(name: str, max_norm: float | None, schedule_first: bool) -> None:
    """Accelerate's schedule waits for a step with an infinite gradient, which the loss scaler leaves out.

    Found are whether Accelerate counts a step as skipped, whether it changed the weights, and the rate afterwards.
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
    assert found == [(False, True, 0.5), (True, False, 0.5), (False, True, 0.25)]


# Lightning ------------------------------------------------------------------------------------------------------------


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


@lightning
@pytest.mark.parametrize("exactly", [False, True])
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_clips_in_mixed_precision(client_ranks: Pool, precision: str, exactly: bool) -> None:
    """Unscaled gradients, by Lightning's own norm and by the exact one."""
    (found,), (expected,) = (client_ranks.run(1, mixed, precision, exactly, kind) for kind in ("ours", "torch"))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))
    assert (found[0] == found[1]) == (precision == "16-mixed")
    lengths = torch.tensor([torch.linspace(-2, 2, 8).tolist(), *found]).diff(dim=0).norm(dim=1)
    torch.testing.assert_close(lengths, torch.tensor([0.125, 0.0 if precision == "16-mixed" else 0.125, 0.125]))
