"""Imports of other packages' Muon, from states as they write them: no package is needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import shardopt
from shardopt.checkpoint import import_state

MU = 0.95


def _params() -> list[Parameter]:
    torch.manual_seed(0)
    return [Parameter(torch.randn(64, 96)), Parameter(torch.randn(96))]


def _groups(params: list[Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[:1]}, {"params": params[1:], "algorithm": "adamw", "lr": 3e-4}]


def _stepped(params: list[Parameter], steps: int, optimizer: shardopt.Muon | None = None) -> shardopt.Muon:
    """The optimizer after so many steps with gradients that the step's number decides."""
    optimizer = optimizer or shardopt.Muon(_groups(params), codec="fp32")
    for step in range(steps):
        torch.manual_seed(100 + step)
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.step()
    return optimizer


def _sums_of_gradients(steps: int, params: list[Parameter]) -> list[Tensor]:
    """Momenta as dion keeps them: decayed sums, in float64."""
    sums = [torch.zeros_like(param, dtype=torch.float64) for param in params]
    for step in range(steps):
        torch.manual_seed(100 + step)
        sums = [MU * total + torch.randn_like(param).double() for total, param in zip(sums, params, strict=True)]
    return sums


def test_keller_jordan_and_deepspeed() -> None:
    """Keller Jordan's and DeepSpeed's Muon keep an average, too, and AdamW's moments under torch's names."""
    params = _params()
    own = _stepped(params, 3).state_dict()["state"]
    saved = {
        "state": {0: {"momentum_buffer": own[0]["momentum_buffer"]}, 1: dict(own[1])},
        "param_groups": [
            {"params": [0], "lr": 0.02, "momentum": 0.9, "weight_decay": 0.0, "use_muon": True},
            {"params": [1], "lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0, "use_muon": False},
        ],
    }
    optimizer = shardopt.Muon(_groups(params), codec="fp32")
    report = import_state(optimizer, saved)
    assert set(report.parameters.values()) == {"exact"}
    assert optimizer.param_groups[0]["momentum"] == 0.9
    assert optimizer.param_groups[0]["lr"] == 0.02
    assert optimizer.param_groups[1]["eps"] == 1e-10
    found = optimizer.state_dict()["state"]
    assert torch.equal(found[0]["momentum_buffer"], own[0]["momentum_buffer"])
    assert torch.equal(found[1]["exp_avg_sq"], own[1]["exp_avg_sq"])
    assert found[1]["step"] == 3


@pytest.mark.parametrize("codec", ["fp32", "log8"])
def test_second_moments_of_rows_begin_with_zeros(codec: str) -> None:
    """No package's state has ours: a run of Muon goes on as NorMuon."""
    params = _params()
    own = _stepped(params, 3).state_dict()["state"]
    groups = [{"params": [0], "use_muon": True}, {"params": [1], "use_muon": False}]
    saved = {"state": {0: {"momentum_buffer": own[0]["momentum_buffer"]}, 1: dict(own[1])}, "param_groups": groups}
    optimizer = shardopt.NorMuon(_groups(params), codec=codec)
    import_state(optimizer, saved)
    moments = optimizer.state[params[0]]["second_momentum_buffer"]
    assert moments.shape == (64, 1)
    assert not moments.any()
    _stepped(params, 1, optimizer)
    assert bool((moments > 0).all())


def test_dion() -> None:
    params = _params()
    own = _stepped(params, 3).state_dict()["state"]
    sums = _sums_of_gradients(3, params)
    common = {"mu": MU, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "step": 3, "weight_decay": 0.01, "flatten": False}
    saved = {
        "state": {
            0: {"momentum": sums[0].float()},
            1: {"momentum": own[1]["exp_avg"], "variance": own[1]["exp_avg_sq"], "step_dev": torch.tensor(3.0)},
        },
        "param_groups": [
            {"params": [0], "lr": 0.02, "algorithm": "muon", "adjust_lr": "rms_norm", "nesterov": False, **common},
            {"params": [1], "lr": 3e-4, "algorithm": "adamw", "adjust_lr": "rms_norm", "nesterov": False, **common},
        ],
    }
    optimizer = shardopt.Muon(_groups(params), codec="fp32")
    report = import_state(optimizer, saved)
    assert report.source == "dion"
    found = optimizer.state_dict()["state"]
    torch.testing.assert_close(found[0]["momentum_buffer"], own[0]["momentum_buffer"])
    assert torch.equal(found[1]["exp_avg"], own[1]["exp_avg"])
    assert found[1]["step"] == 3
    muon, adamw = optimizer.param_groups
    assert (muon["momentum"], muon["nesterov"], muon["adjust_lr_fn"]) == (MU, False, "match_rms_adamw")
    assert (adamw["betas"], adamw["eps"], adamw["algorithm"]) == ((0.9, 0.95), 1e-8, "adamw")


def test_dion_without_its_decay_rate() -> None:
    params = _params()
    saved = {
        "state": {0: {"momentum": torch.zeros(64, 96)}},
        "param_groups": [{"params": [0], "algorithm": "muon"}, {"params": [1], "algorithm": "adamw"}],
    }
    with pytest.raises(ValueError, match="got mu=None"):
        import_state(shardopt.Muon8bit(_groups(params)), saved)


def test_dion_beside_a_parameter_of_torch() -> None:
    params = _params()
    matrix = torch.zeros(64, 96)
    saved = {
        "state": {0: {"momentum": matrix}, 1: {"exp_avg": torch.zeros(96), "step": torch.tensor(1.0)}},
        "param_groups": [{"params": [0], "algorithm": "muon", "mu": MU}, {"params": [1], "algorithm": "adamw"}],
    }
    with pytest.raises(ValueError, match="got state with exp_avg, expected exp_avg, exp_avg_sq"):
        import_state(shardopt.Muon8bit(_groups(params)), saved)
