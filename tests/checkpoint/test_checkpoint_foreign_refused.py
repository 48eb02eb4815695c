"""State of other packages that cannot be imported: an error, and nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import shardopt
from foreign_states import (
    STATES,
    by_hand,
    flashoptim_state,
    made_up,
    params_of,
    stepped,
)
from helpers import everything, step
from ranks.snapshot import assert_same
from shardopt.checkpoint import import_state
from versions import adamw_names_itself


def broken(change: Callable[[dict[str, Any]], None], package: str = "bitsandbytes") -> dict[str, Any]:
    state_dict, _ = by_hand(package)
    change(state_dict)
    return state_dict


def inner(state_dict: dict[str, Any]) -> dict[str, Any]:
    return state_dict["state"][0]["__bnb_optimizer_quant_state__"]


def infinite(state_dict: dict[str, Any]) -> None:
    inner(state_dict)["absmax1"][3] = torch.inf


def wrong_state_dicts() -> dict[str, tuple[dict[str, Any], str]]:
    own = shardopt.AdamW8bit([Parameter(torch.ones(64, 64))])
    step(own, {"w": own.param_groups[0]["params"][0]}, {"w": torch.ones(64, 64)})
    ademamix = {"alpha": 5.0, "betas": (0.9, 0.999, 0.9999)}
    return {
        "no state dict": ({"model": 1}, "got a state dict with model, expected a state dict with state"),
        "other groups": (broken(lambda s: s["param_groups"][0]["params"].pop()), r"got a state dict with \[7\]"),
        "never stepped": (broken(lambda s: s["state"].clear()), "got no state at all"),
        "ours": ({**own.state_dict(), "param_groups": by_hand("torchao")[0]["param_groups"]}, "with load_state_dict"),
        "another package": (
            broken(lambda s: s["state"].update({3: {"step": 1, "ema": torch.ones(3)}})),
            "with ema",
        ),
        "Adagrad": (
            broken(lambda s: s["state"].update({3: {"step": 1, "sum": torch.ones(3)}})),
            "group 0: got , expected the state",
        ),
        "a path": ("run/optimizer.pt", r"got a path, expected a state dict .*; read it with torch\.load, torch\.dist"),
        "two packages": (
            broken(lambda s: s["state"].update({0: flashoptim_state(made_up((16, 512), 0))[0]})),
            "got the state of bitsandbytes and flashoptim",
        ),
        "a scale per tensor": (broken(lambda s: inner(s).update(max1=torch.ones(1))), "scale per tensor"),
        "AdEMAMix": (broken(lambda s: s["param_groups"][0].update(ademamix)), "another optimizer of bitsandbytes"),
        "Lion's state": (
            broken(lambda s: [inner(s).pop(k) for k in ("state2", "qmap2", "absmax2")]),
            "got state1, exp",
        ),
        "Lion's state of flashoptim": (
            broken(lambda s: s["state"][0].pop("exp_avg_sq::quantized"), "flashoptim"),
            "got state with exp_avg, expected exp_avg, exp_avg_sq",
        ),
        "no scales": (broken(lambda s: s["state"][0].pop("exp_avg::scales"), "flashoptim"), "got no scales"),
        "no map": (broken(lambda s: inner(s).pop("qmap1")), "with qmap1 and absmax1"),
        "other shape": (
            broken(lambda s: inner(s).update(state1=inner(s)["state1"].view(32, 256))),
            r"expected \(16, 512",
        ),
        "scales missing": (broken(lambda s: inner(s).update(absmax2=torch.ones(5))), "got scales of shape"),
        "infinite scale": (broken(infinite), "NaN or Inf"),
        "signed wrongly": (
            broken(lambda s: setattr(s["state"][0]["exp_avg"], "signed", False), "torchao"),
            "signed=False, expected uint8, signed=True",
        ),
        "wrong codes": (
            broken(lambda s: s["state"][0].update({"exp_avg::quantized": torch.ones(16, 512)}), "flashoptim"),
            "codes of torch.float32, expected torch.int8",
        ),
        "amsgrad": (broken(lambda s: s["param_groups"][0].update(amsgrad=True), "torchao"), "amsgrad"),
        "bad lr": (broken(lambda s: s["param_groups"][0].update(lr=-1.0)), "lr"),
        "a later parameter": (
            broken(lambda s: s["state"][7]["__bnb_optimizer_quant_state__"].update(state1=torch.ones(3))),
            "parameter 7",
        ),
    }


@pytest.mark.parametrize("name", wrong_state_dicts())
def test_a_wrong_state_dict_changes_nothing(name: str) -> None:
    state_dict, message = wrong_state_dicts()[name]
    ours = shardopt.AdamW8bit(params_of(), lr=0.3, codec="dynamic8", block_size=256)
    stepped(ours, 1)
    before, groups = everything(ours), [dict(group) for group in ours.param_groups]
    with pytest.raises(ValueError, match=message):
        import_state(ours, state_dict)
    assert_same(everything(ours), before)
    assert [dict(group) for group in ours.param_groups] == groups


def test_decay_apart_from_the_gradient_is_not_adam() -> None:
    """bitsandbytes decays so in Adam, too; torch.optim says it from 2.7 on."""
    state_dict, _ = by_hand("bitsandbytes")
    ours = shardopt.Adam8bit(params_of())
    with pytest.raises(ValueError, match="use AdamW"):
        import_state(ours, state_dict)
    state_dict["param_groups"][0]["weight_decay"] = 0.0
    import_state(ours, state_dict)
    if adamw_names_itself:
        theirs = torch.optim.AdamW(params_of())
        stepped(theirs, 1)
        with pytest.raises(ValueError, match="use AdamW"):
            import_state(ours, theirs.state_dict())


@pytest.mark.parametrize("package", [*STATES, "torch"])
def test_averages_in_other_units_are_refused(package: str) -> None:
    """ADOPT's exp_avg has the name of Adam's, and averages gradients over the root of their mean square."""
    theirs = torch.optim.AdamW(params_of())
    stepped(theirs, 1)
    state_dict = theirs.state_dict() if package == "torch" else by_hand(package)[0]
    ours = shardopt.ADOPT8bit(params_of(), decoupled_weight_decay=True)
    with pytest.raises(ValueError, match="expected exp_avg in units of its own, as adopt keeps it"):
        import_state(ours, state_dict)
    assert not ours.state


def test_flat_parameters_are_refused() -> None:
    param = Parameter(torch.zeros(16, 512))
    param._fsdp_flattened = True
    with pytest.raises(ValueError, match="got flat parameters"):
        import_state(shardopt.AdamW8bit([param]), by_hand("bitsandbytes")[0])
