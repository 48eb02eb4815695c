"""Every recipe of docs/moving_over.md runs, on files of the packages that it names."""

from __future__ import annotations

import re
from argparse import Namespace
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
)

import shardopt
from foreign_states import SOURCES, in_flashoptim, made_up
from hugging_face import make_trainer
from needed import needs
from ranks.deepspeed import STEPS, config, stepped_engine
from ranks.models import WAYS, make_net, named_parameters, set_gradients
from ranks.pool import Pool
from ranks.runs import snapshot_of
from ranks.snapshot import Snapshot, assert_same, snapshot

PAGE = Path(__file__).parents[2] / "docs" / "moving_over.md"
RECIPES = {
    title: re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    for title, text in re.findall(r"^### (.*?)$(.*?)(?=^### |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
}
FULL = StateDictOptions(full_state_dict=True)
DCP = "FSDP2 and torch.distributed.checkpoint"


def run(title: str, folder: Path, place: int = 0, **given: Any) -> dict[str, Any]:
    """Runs a recipe with these names and its files in a folder; returns all names afterwards."""
    names = {"torch": torch, "shardopt": shardopt, **given}
    exec(RECIPES[title][place].replace('"run/', f'"{folder}/'), names)
    return names


def trained(way: str = "single", kind: Any = torch.optim.AdamW) -> tuple[nn.Module, Any]:
    model = WAYS[way](make_net())
    optimizer = kind(model.parameters(), lr=0.1, weight_decay=0.2)
    for step in range(STEPS):
        set_gradients(model, step)
        optimizer.step()
    return model, optimizer


def expected_of(weights: dict[str, Tensor], state: dict[str, Any]) -> Snapshot:
    """The weights, and the state of AdamW8bit that torch's functions make of full state dicts."""
    model = make_net(seed=1)
    optimizer = shardopt.AdamW8bit(model.parameters())
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    assert any("codes" in key for entries in optimizer.state.values() for key in entries)
    return snapshot(named_parameters(model), optimizer)


def found_by(names: dict[str, Any]) -> Snapshot:
    return snapshot(named_parameters(names["model"]), names["optimizer"])


def test_torch_save(tmp_path: Path) -> None:
    model, theirs = trained()
    torch.save({"model": model.state_dict(), "optimizer": theirs.state_dict()}, tmp_path / "state.pt")
    names = run("torch.save", tmp_path, model=make_net(seed=1))
    assert_same(found_by(names), expected_of(*get_state_dict(model, theirs)))
    assert names["optimizer"].param_groups[0]["weight_decay"] == 0.2


def _save_by_dcp(way: str, folder: Path) -> tuple[Any, Any]:
    """Saves a run of torch.optim, and returns its full state dicts."""
    model, theirs = trained(way)
    full = get_state_dict(model, theirs, options=FULL)
    weights, state = get_state_dict(model, theirs)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / "step-100")
    return full


def _go_on_by_dcp(way: str, folder: Path) -> Snapshot:
    return found_by(run(DCP, folder, model=WAYS[way](make_net(seed=1))))


@pytest.mark.parametrize("way", ["fsdp", "fsdp1"])
def test_torch_distributed_checkpoint(ranks: Pool, tmp_path: Path, way: str) -> None:
    expected = expected_of(*ranks.run(2, _save_by_dcp, way, tmp_path)[0])
    assert_same(_go_on_by_dcp("single", tmp_path), expected)
    if way == "fsdp":
        assert_same(ranks.run(3, _go_on_by_dcp, way, tmp_path)[0], expected)


def _save_by_fsdp1(folder: Path) -> tuple[Any, Any]:
    model, theirs = trained("fsdp1")
    on_cpu = FullOptimStateDictConfig(offload_to_cpu=False)  # else torch gives all moments one buffer there
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(), on_cpu):
        saved = {"model": model.state_dict(), "optimizer": FullyShardedDataParallel.optim_state_dict(model, theirs)}
    if dist.get_rank() == 0:
        torch.save(saved, folder / "fsdp1.pt")
    return get_state_dict(model, theirs, options=FULL)


def _go_on_by_fsdp1(folder: Path) -> Snapshot:
    model = WAYS["fsdp1"](make_net(seed=1))
    optimizer = shardopt.AdamW8bit(model.parameters())
    shardopt.checkpoint.load(folder / "moved", model, optimizer)
    return snapshot_of(model, optimizer)


def test_fsdp1(ranks: Pool, tmp_path: Path) -> None:
    expected = expected_of(*ranks.run(2, _save_by_fsdp1, tmp_path)[0])
    assert_same(found_by(run("FSDP1", tmp_path, model=make_net(seed=1))), expected)
    assert_same(ranks.run(3, _go_on_by_fsdp1, tmp_path)[0], expected)


def _go_on_from_bitsandbytes(folder: Path) -> None:
    first = make_trainer("plain", folder, optim="adamw_bnb_8bit")
    first.train()
    options = {"lr": 1e-2, "codec": "dynamic8", "block_size": 256}
    trainer = make_trainer("plain", folder, options=options)
    optimizer = run("bitsandbytes under the Trainer", folder, trainer=trainer)["optimizer"]
    assert trainer.state.global_step == 6
    assert {float(state["step"]) for state in optimizer.state.values()} == {6.0}


@needs("transformers", "accelerate", "bitsandbytes")
def test_bitsandbytes_under_the_trainer(tmp_path: Path) -> None:
    with closing(Pool()) as pool:  # frameworks leave state in a process
        pool.run(1, _go_on_from_bitsandbytes, tmp_path)


def _save_by_deepspeed(folder: Path) -> tuple[Any, Any]:
    """Saves a run of torch.optim's AdamW in ZeRO-2, and returns its float32 weights and moments."""
    from deepspeed.checkpoint.ds_to_universal import main
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    params = {"lr": 2e-2, "weight_decay": 0.2, "torch_adam": True}
    engine = stepped_engine({**config(2, None), "optimizer": {"type": "AdamW", "params": params}}, STEPS)
    assert type(engine.basic_optimizer) is torch.optim.AdamW
    named = dict(engine.module.named_parameters())
    weights = {name: safe_get_full_fp32_param(param) for name, param in named.items()}
    keys = ("exp_avg", "exp_avg_sq")
    moments = {name: {key: safe_get_full_optimizer_state(p, key) for key in keys} for name, p in named.items()}
    engine.save_checkpoint(str(folder))
    dist.barrier()
    if dist.get_rank() == 0:
        folders = {"input_folder": str(folder / f"global_step{STEPS}"), "output_folder": str(folder / "universal")}
        options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
        main(Namespace(**folders, **options, inject_missing_state=True))
    dist.barrier()
    return weights, moments


def test_deepspeed(deepspeed_ranks: Pool, tmp_path: Path) -> None:
    weights, moments = deepspeed_ranks.run(2, _save_by_deepspeed, tmp_path)[0]
    group = torch.optim.AdamW([torch.zeros(1)]).state_dict()["param_groups"][0]
    state = {name: {"step": torch.tensor(float(STEPS)), **entries} for name, entries in moments.items()}
    expected = expected_of(weights, {"state": state, "param_groups": [{**group, "params": list(state)}]})
    assert_same(found_by(run("DeepSpeed ZeRO-2", tmp_path, model=make_net(seed=1))), expected)


def _matrices() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(512, 64, bias=False), nn.Linear(64, 96, bias=False))


def test_flashoptim_in_its_form(tmp_path: Path) -> None:
    """A state dict made by hand: the package quantizes on GPUs only."""
    states = {i: in_flashoptim(made_up(tuple(p.shape), i))[0] for i, p in enumerate(_matrices().parameters())}
    state_dict = {"state": states, "param_groups": [{"lr": 0.5, **SOURCES["flashoptim"].group, "params": [0, 1]}]}
    torch.save({"model": _matrices().state_dict(), "optimizer": state_dict}, tmp_path / "flashoptim.pt")
    _assert_codes_of_flashoptim(tmp_path, "cpu")


@pytest.mark.gpu
@needs("flashoptim")
def test_flashoptim(tmp_path: Path) -> None:
    import flashoptim

    model = _matrices().cuda()
    theirs = flashoptim.FlashAdamW(model.parameters(), lr=1e-2)
    set_gradients(model, 0)
    theirs.step()
    torch.save({"model": model.state_dict(), "optimizer": theirs.state_dict()}, tmp_path / "flashoptim.pt")
    _assert_codes_of_flashoptim(tmp_path, "cuda")


def _assert_codes_of_flashoptim(folder: Path, device: str) -> None:
    names = run("FlashOptim", folder, model=_matrices().to(device))
    for entries, saved in zip(
        names["optimizer"].state.values(), names["saved"]["optimizer"]["state"].values(), strict=True
    ):
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(entries[f"{key}_codes"], saved[f"{key}::quantized"].view(torch.uint8))


def _assert_moments(theirs: torch.optim.Optimizer, model: nn.Module, optimizer: Any, params: list[Tensor]) -> None:
    """Demands that torch's optimizer has the decoded moments, and takes a step from them."""
    expected = optimizer.state_dict(dequantize=True)["state"]
    for index, param in enumerate(params):
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(theirs.state[param][key], expected[index][key])
    set_gradients(model, STEPS)
    theirs.step()


def test_back_by_torch_save(tmp_path: Path) -> None:
    model, optimizer = trained(kind=shardopt.AdamW8bit)
    names = run("Back to torch.optim", tmp_path, model=model, optimizer=optimizer)
    _assert_moments(names["theirs"], model, optimizer, list(model.parameters()))


def _back_by_dcp(folder: Path) -> None:
    model, optimizer = trained("fsdp", shardopt.AdamW8bit)
    run("Back to torch.optim", folder, 1, model=model, optimizer=optimizer)


def test_back_by_torch_distributed_checkpoint(ranks: Pool, tmp_path: Path) -> None:
    """A program of torch's alone goes on from the folder."""
    ranks.run(2, _back_by_dcp, tmp_path)
    model = make_net(seed=1)
    theirs = torch.optim.AdamW(model.parameters())
    weights, state = get_state_dict(model, theirs)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=tmp_path / "back")
    set_state_dict(model, theirs, model_state_dict=weights, optim_state_dict=state)
    bare, optimizer = trained(kind=shardopt.AdamW8bit)
    assert all(map(torch.equal, weights.values(), bare.state_dict().values()))
    assert theirs.param_groups[0]["lr"] == 0.1
    _assert_moments(theirs, model, optimizer, list(model.parameters()))
