"""Hugging Face's Trainer trains with our optimizers under every way of sharding, and resumes bit for bit."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hugging_face
from hugging_face import trained
from needed import needs
from ranks.pool import Pool
from shardopt.checkpoint import CheckpointError

pytestmark = needs("transformers", "accelerate")
ZERO = [pytest.param(mode, marks=needs("deepspeed")) for mode in ("zero2", "zero2 offload", "zero2 by name")]


def trained_portably(
    mode: str, output: Path, resume: str | None = None, resume_from: str | None = None, **more: Any
) -> Any:
    from shardopt.clients.transformers import PortableCheckpoint

    more = {"save_only_model": True, **more}
    return trained(mode, output, resume, callbacks=[PortableCheckpoint(resume_from)], **more)


@pytest.fixture(scope="module")
def plain(client_ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], Path]:
    """A run in one process, and its folder."""
    output = tmp_path_factory.mktemp("plain")
    (found,) = client_ranks.run(1, trained, "plain", output)
    assert "optimizer.model.layers.0.mlp.up_proj.weight.exp_avg_sq_codes" in found
    return found, output


def test_resume_in_one_process(client_ranks: Pool, plain: tuple[dict[str, str], Path]) -> None:
    expected, output = plain
    assert client_ranks.run(1, trained, "plain", output, str(output / "checkpoint-3")) == [expected]


@pytest.mark.parametrize("mode", ["ddp", "fsdp1", "fsdp1 sharded", "fsdp2", "fsdp2 sharded", *ZERO])
def test_sharded(client_ranks: Pool, plain: tuple[dict[str, str], Path], mode: str, tmp_path: Path) -> None:
    """Training is that of one process, and goes on from Trainer's own checkpoint as if it had not stopped."""
    assert client_ranks.run(2, trained, mode, tmp_path) == [plain[0]] * 2
    assert client_ranks.run(2, trained, mode, tmp_path, str(tmp_path / "checkpoint-3")) == [plain[0]] * 2


@needs("deepspeed")
def test_zero3_resumes(client_ranks: Pool, plain: tuple[dict[str, str], Path], tmp_path: Path) -> None:
    """ZeRO 3 multiplies matrices in an order of its own: its bits are compared with its own."""
    found = client_ranks.run(2, trained, "zero3", tmp_path)
    assert found[0].keys() == plain[0].keys()
    assert client_ranks.run(2, trained, "zero3", tmp_path, str(tmp_path / "checkpoint-3")) == found
    assert client_ranks.run(2, trained_portably, "zero3", tmp_path / "a") == found
    start = str(tmp_path / "a" / "checkpoint-3")
    for world_size, mode in ((1, "zero3"), (4, "zero3 offload")):
        assert client_ranks.run(world_size, trained_portably, mode, tmp_path / mode, start) == found[:1] * world_size


#: Ranks and mode before, ranks and mode after, and whether by the portable checkpoint.
RESUMES: list[Any] = [
    (1, "plain", 2, "ddp", True),
    (2, "ddp", 1, "plain", False),
    *((2, mode, 1, mode, False) for mode in ("fsdp1", "fsdp2", "fsdp2 sharded")),
    *((2, "fsdp1", size, "fsdp1", True) for size in (1, 2)),
    (2, "fsdp2", 1, "fsdp2", True),
    pytest.param(2, "zero2 offload", 1, "plain", True, marks=needs("deepspeed")),
    pytest.param(2, "zero2", 1, "zero2 offload", True, marks=needs("deepspeed")),
    pytest.param(2, "zero2 by name", 4, "zero2 by name", True, marks=needs("deepspeed")),
]


@pytest.mark.parametrize(("ranks", "before", "world_size", "after", "portable"), RESUMES)
def test_resumes_elsewhere(
    client_ranks: Pool,
    plain: tuple[dict[str, str], Path],
    ranks: int,
    before: str,
    world_size: int,
    after: str,
    portable: bool,
    tmp_path: Path,
) -> None:
    """On another number of ranks or in another mode, from Trainer's own checkpoint or the portable one."""
    run = trained_portably if portable else trained
    assert client_ranks.run(ranks, run, before, tmp_path / "a")[0] == plain[0]
    start = str(tmp_path / "a" / "checkpoint-3")
    found = client_ranks.run(world_size, run, after, tmp_path / "b", start, *([start] if portable else []))
    assert found == [plain[0]] * world_size


def clipped(mode: str, output: Path) -> Any:
    from shardopt.clients.transformers import ClipGradNorm

    with pytest.raises(ValueError, match=r"expected TrainingArguments\(max_grad_norm=0.0\)"):
        ClipGradNorm(0.1).on_init_end(SimpleNamespace(max_grad_norm=1.0), None, None)
    return trained(mode, output, callbacks=[ClipGradNorm(0.1)], save_strategy="no")


def test_clipped_by_the_exact_norm(client_ranks: Pool, plain: tuple[dict[str, str], Path], tmp_path: Path) -> None:
    (expected,) = client_ranks.run(1, clipped, "plain", tmp_path)
    assert expected != plain[0]
    for mode in ("ddp", "fsdp1", "fsdp2"):
        assert client_ranks.run(2, clipped, mode, tmp_path) == [expected] * 2


def adapters(mode: str, output: Path, resume: str | None = None, portable: bool = False, dropout: float = 0.5) -> Any:
    run = trained_portably if portable else trained
    return run(mode, output, resume, model=partial(hugging_face.tiny_lora, dropout=dropout))


@needs("peft")
@pytest.mark.parametrize(("mode", "portable"), [("plain", False), ("ddp", True), ("fsdp2", False)])
def test_lora(client_ranks: Pool, mode: str, portable: bool, tmp_path: Path) -> None:
    """Adapters train under dropout, which goes on with the same random numbers, of which each rank has its own."""
    run = partial(client_ranks.run, 1 if mode == "plain" else 2, partial(adapters, portable=portable), mode, tmp_path)
    expected = run()
    assert any("lora_B" in name and name.endswith("exp_avg_codes") for name in expected[0])
    assert run(str(tmp_path / "checkpoint-3")) == expected


@needs("peft")
@pytest.mark.parametrize(("mode", "after", "portable"), [("ddp", "plain", False), ("fsdp2", "fsdp2", True)])
def test_lora_resumes_on_another_number_of_ranks(
    client_ranks: Pool, mode: str, after: str, portable: bool, tmp_path: Path
) -> None:
    """Without dropout, whose random numbers belong to a rank."""
    run = partial(adapters, portable=portable, dropout=0.0)
    (expected,) = client_ranks.run(1, run, "plain", tmp_path / "plain")
    assert client_ranks.run(2, run, mode, tmp_path / "a") == [expected] * 2
    assert client_ranks.run(1, run, after, tmp_path / "a", str(tmp_path / "a" / "checkpoint-3")) == [expected]


def refusals(output: Path, theirs: Path) -> None:
    from transformers import TrainerState, TrainingArguments

    from shardopt.clients.transformers import PortableCheckpoint

    with pytest.raises(ValueError, match="got save_only_model=False with PortableCheckpoint"):
        trained_portably("plain", output, save_only_model=False)
    state, given = TrainerState(is_hyper_param_search=True), dict.fromkeys(("model", "optimizer", "lr_scheduler"))
    with pytest.raises(ValueError, match=r"hyper-parameter search.*leave the callback out"):
        PortableCheckpoint().on_train_begin(TrainingArguments(use_cpu=True), state, None, **given)
    with pytest.raises(CheckpointError, match="there is no such folder, expected one with a checkpoint of shardopt"):
        trained_portably("plain", theirs, str(theirs / "checkpoint-3"))


def test_what_the_callback_refuses(client_ranks: Pool, plain: tuple[dict[str, str], Path], tmp_path: Path) -> None:
    """Runs of a search have folders that callbacks are not told; a checkpoint of Trainer's alone has none of ours."""
    client_ranks.run(1, refusals, tmp_path, plain[1])


def milestones_are_left_out() -> None:
    from torch.optim import SGD
    from torch.optim.lr_scheduler import MultiStepLR

    from shardopt.clients.transformers import _saved

    first, second = (MultiStepLR(SGD([torch.zeros(1, requires_grad=True)], lr=1.0), [2, 4]) for _ in range(2))
    first.optimizer.step()
    first.step()
    second.load_state_dict(json.loads(json.dumps(_saved(first))))
    second.optimizer.step()
    second.step()
    assert second.get_last_lr() == [0.1]


def test_schedulers_with_milestones(client_ranks: Pool) -> None:
    """JSON would make text of their numbers; the constructor makes them again."""
    client_ranks.run(1, milestones_are_left_out)
