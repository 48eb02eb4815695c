"""param_groups(rule="u-mup"): learning rates by kinds and global shapes, before and after sharding."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import shardopt
from shardopt import unit

ETA, DECAY = 2.0**-4, 2e-4
#: Learning rates of width 128 and 4 blocks under ETA: fan_in 512 and 128 in the stack, embedding, readout.
RATES = (0.001381, 0.002762, 0.005524, 0.0625)


class Model(nn.Module):
    """Embedding, blocks with norms and biases, readout."""

    def __init__(self, dim: int = 128, layers: int = 4) -> None:
        super().__init__()
        self.embedding = unit.Embedding(96, dim)
        self.blocks = unit.Stack(
            nn.Sequential(unit.RMSNorm(dim, affine=True), unit.SwiGLU(dim, 4 * dim), unit.Linear(dim, dim, bias=True))
            for _ in range(layers)
        )
        self.norm = unit.RMSNorm(dim, affine=True)
        self.head = unit.Readout(dim, 96)


def groups_of(model: nn.Module, **options: Any) -> shardopt.ParamGroups:
    return shardopt.param_groups(model, rule="u-mup", **{"lr": ETA, "weight_decay": DECAY, **options})


def options_by_name(groups: shardopt.ParamGroups) -> dict[str, dict[str, Any]]:
    return {name: dict(parameter.options) for parameter in groups.parameters for name in parameter.names}


def test_worked_figures() -> None:
    groups = groups_of(Model())
    found = options_by_name(groups)
    of = {name: round(options["lr"], 6) for name, options in found.items()}
    assert of["blocks.0.1.down.weight"] == RATES[0]
    assert {of["blocks.3.1.up.weight"], of["blocks.0.1.gate.weight"], of["blocks.0.2.weight"]} == {RATES[1]}
    assert of["embedding.weight"] == RATES[2]
    assert of["head.weight"] == of["norm.weight"] == RATES[3]
    assert of["blocks.0.0.weight"] == of["blocks.1.2.bias"] == ETA / 2  # 4 blocks
    assert all(options["lr"] * options["weight_decay"] == pytest.approx(DECAY) for options in found.values())
    assert len(groups) == 5


def test_overrides_win_and_decay_stays_independent_of_their_rate() -> None:
    overrides = {"head.*": {"lr": 0.5}, "embedding.*": {"weight_decay": 0.3}, "norm.*": {"lr": 0.0}}
    found = options_by_name(groups_of(Model(), overrides=overrides, no_decay=("blocks.*.bias",)))
    assert found["head.weight"] == {"lr": 0.5, "weight_decay": DECAY / 0.5}
    assert found["embedding.weight"]["weight_decay"] == 0.3
    assert found["norm.weight"] == {"lr": 0.0, "weight_decay": 0.0}
    assert found["blocks.0.2.bias"] == {"lr": ETA / 2, "weight_decay": 0.0}


def test_kinds_by_pattern() -> None:
    model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 64), nn.Conv1d(64, 16, 3))
    kinds = {"*.weight": "weight", "*.bias": ("bias", 4), "2.weight": ("weight", 9)}
    found = {name: options["lr"] for name, options in options_by_name(groups_of(model, lr=1.0, kinds=kinds)).items()}
    assert found == pytest.approx(
        {"0.weight": 16**-0.5, "1.weight": 16**-0.5, "1.bias": 0.5, "2.weight": (64 * 3) ** -0.5 / 3, "2.bias": 0.5}
    )


class Mixer(nn.Module):
    """A module that names the kind of its parameter."""

    mup_types = {"matrix": "weight"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(4, 64))


def test_modules_of_ones_own_name_their_kinds() -> None:
    stack = unit.Stack([nn.ModuleList([unit.Stack([Mixer()] * 2)]), Mixer()])
    del stack[1]  # for a pipeline: the depth stays
    found = options_by_name(groups_of(nn.ModuleList([stack, Mixer()]), lr=1.0))
    assert found["0.0.0.0.matrix"]["lr"] == 64**-0.5 * 2**-0.5
    assert found["1.matrix"]["lr"] == 64**-0.5


def tied() -> nn.Module:
    model = Model()
    model.head.weight = model.embedding.weight
    return model


@pytest.mark.parametrize(
    ("model", "options", "complaint"),
    [
        (nn.Linear(2, 2), {}, "got parameter weight of unknown kind"),
        (tied(), {}, "got one parameter with the names embedding.weight (weight), head.weight (output)"),
        (Model(), {"lr": None}, "lr: got None, expected a positive number"),
        (Model(), {"lr": -1.0}, "lr: got -1.0"),
        (Model(), {"weight_decay": -1.0}, "weight_decay: got -1.0"),
        (Model(), {"rule": "mup"}, "rule: got 'mup', expected 'u-mup'"),
        (Model(), {"rule": None}, 'lr: got 0.0625 without a rule, expected rule="u-mup"'),
        (Model(), {"kinds": {"*.weight": "matrix"}}, "kinds['*.weight']: got 'matrix', expected one of weight"),
        (Model(), {"kinds": {"*.weight": ("weight", 0)}}, "kinds['*.weight']: got ('weight', 0)"),
        (Model(), {"kinds": {"haed.*": "output"}}, "got pattern 'haed.*', which matches no parameter"),
    ],
)
def test_refused(model: nn.Module, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)):
        shardopt.param_groups(model, **{"rule": "u-mup", "lr": ETA, **options})


def test_a_kind_for_all_names_of_a_shared_parameter() -> None:
    found = options_by_name(groups_of(tied(), kinds={"head.weight": "weight"}))
    assert found["head.weight"]["lr"] == ETA * 128**-0.5


@pytest.mark.ranks(2)
def test_sharded_models() -> None:
    """The rates are those of global shapes, by the modules' kinds, because FSDP2 drops parameters' attributes."""
    expected = groups_of(Model())
    model = Model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    groups = groups_of(model)
    assert groups.table() == expected.table()
    assert [group["param_names"] for group in groups] == [group["param_names"] for group in expected]
    # Under FSDP1 a flat parameter holds the block's matrices, whose rates differ.
    for original in (True, False):
        model = Model()
        for index, block in enumerate(model.blocks):
            model.blocks[index] = FullyShardedDataParallel(
                block, use_orig_params=original, device_id=torch.device("cpu")
            )
        if original:
            assert groups_of(model).table() == expected.table()
        else:
            with pytest.raises(ValueError, match="in one flat parameter"):
                groups_of(model)
