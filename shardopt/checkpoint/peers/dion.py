"""The dion package's Muon: matrices have ``momentum``, a sum of gradients; AdamW's parameters ``variance`` as well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardopt.checkpoint.peers.base import Peer, PeerState
from shardopt.checkpoint.peers.structure import are_floats
from shardopt.checkpoint.wording import shown
from shardopt.codec import Moment

_STEP = "step_dev"
_ADJUSTMENTS = {"spectral_norm": "spectral_norm", "rms_norm": "match_rms_adamw"}


class Dion(Peer):
    name = "dion"
    form = "momentum and variance in float"

    def recognizes(self, state: Mapping[str, Any]) -> bool:
        return "momentum" in state and state.keys() <= {"momentum", "variance", _STEP}

    def read(
        self, state: Mapping[str, Any], group: Mapping[str, Any], expected: Sequence[Moment], name: str
    ) -> PeerState:
        return super().read(_as_torch(state, group, name), group, expected, name)

    def hyper(self, group: Mapping[str, Any], moments: Sequence[str]) -> dict[str, Any]:
        names = {"mu": "momentum", "epsilon": "eps"}
        hyper = {names.get(key, key): value for key, value in group.items() if key not in ("beta1", "beta2", "step")}
        if {"beta1", "beta2"} <= group.keys():
            hyper["betas"] = (group["beta1"], group["beta2"])
        if group.get("algorithm") == "muon":  # there it guards a division, which is done otherwise here
            hyper.pop("eps", None)
        adjustment = hyper.pop("adjust_lr", None)
        if adjustment in _ADJUSTMENTS:
            hyper["adjust_lr_fn"] = _ADJUSTMENTS[adjustment]
        return hyper


def _as_torch(state: Mapping[str, Any], group: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The state under torch.optim's names."""
    step = {"step": torch.tensor(float(group.get("step", 0)), device="cpu")}
    if {"momentum", "variance"} <= state.keys():
        return {**step, "exp_avg": state["momentum"], "exp_avg_sq": state["variance"]}
    if "momentum" not in state:  # of another package, refused by its entries
        return state
    if group.get("algorithm") == "lion":
        return {**step, "exp_avg": state["momentum"]}
    momentum = group.get("mu")
    if not isinstance(momentum, float) or not 0.0 <= momentum < 1.0:
        raise ValueError(f"{name}: got mu={shown(momentum)}, expected a decay rate below 1; save the state dict again")
    total = state["momentum"]  # a sum of gradients; ours is their average
    return {**step, "momentum_buffer": total * (1.0 - momentum) if are_floats(total) else total}
