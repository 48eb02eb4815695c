"""State of other packages that cannot be imported: import_state raises one line, and changes nothing.

One case for each message.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import shardopt
from foreign_states import BNB, KINDS, WRAPPED, by_hand, in_flashoptim, made_up, ours_of, params_of, stepped
from helpers import everything
from ranks.snapshot import assert_same
from shardopt.checkpoint import import_state
from shardopt.optim import ShardedOptimizer
from versions import adamw_names_itself

NAN = float("nan")
Change = Callable[[dict[str, Any]], object]


def first(change: Change, index: int = 0) -> Change:
    """A change of the state of a parameter, in a state dict."""

    def changed(state_dict: dict[str, Any]) -> None:
        state = state_dict["state"][index]
        change(state.get(WRAPPED, state))

    return changed


def group(**hyper: Any) -> Change:
    return lambda s: s["param_groups"][0].update(hyper)


def options_of(optimizer: ShardedOptimizer) -> str:
    return repr([[(k, v) for k, v in group.items() if k != "params"] for group in optimizer.param_groups])


def refused(ours: ShardedOptimizer, state_dict: Any, message: str) -> None:
    """Demands an error of one line, and that nothing was changed."""
    stepped(ours, 1)
    before, options = everything(ours), options_of(ours)
    with pytest.raises(ValueError, match=message) as error:
        import_state(ours, state_dict)
    assert "\n" not in str(error.value)
    assert_same(everything(ours), before)
    assert options_of(ours) == options


WRONG: dict[str, tuple[str, Change, str]] = {
    # of any package
    "other groups": (BNB, lambda s: s["param_groups"][0]["params"].pop(), r"got a state dict with \[7\]"),
    "never stepped": (BNB, lambda s: s["state"].clear(), "got no state at all"),
    "another package": (BNB, lambda s: s["state"].update({3: {"step": 1, "ema": torch.ones(3)}}), "with ema"),
    "two packages": (
        BNB,
        lambda s: s["state"].update({0: in_flashoptim(made_up((2, 4096), 0))[0]}),
        "got the state of bitsandbytes and flashoptim",
    ),
    "bad lr": ("torchao", group(lr=-1.0), "lr"),
    "float of nan": ("torchao", first(lambda s: s["exp_avg"].__setitem__(0, NAN), 6), r"^parameter 6 .*exp_avg"),
    "integers": ("torchao", first(lambda s: s.update(exp_avg=s["exp_avg"].int()), 6), "expected a dense tensor of fl"),
    "sparse": ("torchao", first(lambda s: s.update(exp_avg=s["exp_avg"].to_sparse()), 6), "^parameter 6 .*a dense"),
    "step": ("torchao", lambda s: s["state"][6].update(step=torch.tensor(NAN)), "step"),
    "other shape": (BNB, first(lambda s: s.update(state1=s["state1"].view(32, 256))), r"expected \(2, 4096"),
    # codes and scales
    "infinite scale": (BNB, first(lambda s: s["absmax1"].__setitem__(3, torch.inf)), "NaN or Inf"),
    "too few scales": (BNB, first(lambda s: s.update(absmax2=torch.ones(5))), "got scales of shape"),
    "a scale per tensor": (BNB, first(lambda s: s.update(max1=s.pop("absmax1"))), "got torch.uint8 and absmax2, max1"),
    "no map": (BNB, first(lambda s: s.pop("qmap1")), "float tensors qmap1 .256 values. and absmax1"),
    "map of nan": (BNB, first(lambda s: s["qmap1"].fill_(NAN)), "exp_avg"),
    "no scales": ("flashoptim", first(lambda s: s.pop("exp_avg::scales")), "got no scales"),
    "wrong codes": (
        "flashoptim",
        first(lambda s: s.update({"exp_avg::quantized": torch.ones(2, 4096)})),
        "codes of torch.float32, expected torch.int8",
    ),
    "Lion's state": ("flashoptim", first(lambda s: s.pop("exp_avg_sq::quantized")), "got state with exp_avg, expected"),
    "signed wrongly": ("torchao", first(lambda s: setattr(s["exp_avg"], "signed", False)), "signed=False, expected ui"),
    # kinds of optimizer of bitsandbytes
    "LAMB or LARS": ("SGD", first(lambda s: s.update(unorm_vec=torch.ones(1)), 7), "got state with unorm_vec, of LAMB"),
    "AdEMAMix": (BNB, group(betas=(0.8, 0.99, 0.995), alpha=4.0), "another optimizer of bitsandbytes"),
    "RMSprop": ("Lion", group(betas=(0.8, 0), eps=1e-7), "another optimizer of bitsandbytes"),
    "Adagrad": ("SGD", group(betas=(0.0, 0.0), eps=1e-7), "another optimizer of bitsandbytes"),
    "no momentum": ("SGD", group(betas=(0.0, 0)), "make the optimizer keep no mom"),
    "no betas": (BNB, group(betas=None), "another optimizer of bitsandbytes"),
    "a second moment": ("Lion", first(lambda s: s.update(state2=s["state1"])), "got state1, state2, expected"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_state_dict_changes_nothing(name: str) -> None:
    source, change, message = WRONG[name]
    state_dict, _ = by_hand(source)
    change(state_dict)
    refused(ours_of(source, params_of(), codec="dynamic8", block_size=256), state_dict, message)


def test_what_is_no_state_dict_of_another() -> None:
    params = [Parameter(torch.ones(64, 64))]
    ours = shardopt.AdamW8bit(params)
    stepped(ours, 1)
    whole = {"model": {}, "optimizer": torch.optim.AdamW(params).state_dict()}
    for state_dict, message in (
        ({"model": 1}, "got a state dict with model, expected a state dict with state"),
        (whole, "pass its entry 'optimizer'"),
        ("run/optimizer.pt", r"got a path, expected a state dict .*; read it with torch\.load, torch\.dist"),
        (ours.state_dict(), "with load_state_dict"),
    ):
        refused(ours, state_dict, message)


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_bitsandbytes_are_told_apart(kind: str) -> None:
    for other in {*KINDS} - {kind}:
        message = "another optimizer of bitsandbytes|expected the state of an optimizer with"
        refused(ours_of(kind, params_of()), by_hand(other)[0], message)
    without = (
        shardopt.SGD8bit,
        lambda p: shardopt.AdamW8bit(p, amsgrad=True),
        shardopt.RMSprop8bit,
        shardopt.AdEMAMix8bit,
    )
    for make in without:
        refused(make(params_of()), by_hand(kind)[0], "of bitsandbytes for an optimizer with .* begin with new state")


def test_decay_apart_from_the_gradient_is_not_adam() -> None:
    """bitsandbytes decays so in Adam, too; torch.optim says it from 2.7 on."""
    state_dict, _ = by_hand(BNB)
    ours = shardopt.Adam8bit(params_of())
    refused(ours, state_dict, "use AdamW")
    state_dict["param_groups"][0]["weight_decay"] = 0.0
    import_state(ours, state_dict)
    if adamw_names_itself:
        theirs = torch.optim.AdamW(params_of())
        stepped(theirs, 1)
        refused(ours, theirs.state_dict(), "use AdamW")


def test_averages_in_other_units_are_refused() -> None:
    """ADOPT's exp_avg has the name of Adam's, and averages gradients over the root of their mean square."""
    ours = shardopt.ADOPT8bit(params_of(), decoupled_weight_decay=True)
    for source in (BNB, "torch"):
        refused(ours, by_hand(source)[0], "expected exp_avg in units of its own, as adopt keeps it")


def test_flat_parameters_are_refused() -> None:
    param = Parameter(torch.zeros(2, 4096))
    param._fsdp_flattened = True
    with pytest.raises(ValueError, match="got flat parameters"):
        import_state(shardopt.AdamW8bit([param]), by_hand(BNB)[0])


def test_dion() -> None:
    params = [Parameter(torch.zeros(64, 96)), Parameter(torch.zeros(96))]
    groups = [{"params": [0], "algorithm": "muon"}, {"params": [1], "algorithm": "adamw"}]
    ours = shardopt.Muon8bit([{"params": params[:1]}, {"params": params[1:], "algorithm": "adamw"}])
    saved: dict[str, Any] = {"state": {0: {"momentum": torch.zeros(64, 96)}}, "param_groups": groups}
    with pytest.raises(ValueError, match="got mu=None"):
        import_state(ours, saved)
    groups[0]["mu"] = 0.95
    saved["state"][1] = {"exp_avg": torch.zeros(96), "step": torch.tensor(1.0)}
    with pytest.raises(ValueError, match="got state with exp_avg, expected exp_avg, exp_avg_sq"):
        import_state(ours, saved)
