"""Moments of AdamW in the middle of a run, and how far they are from those of the float32 run of the same seed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

#: exp_avg, and the root of exp_avg_sq, as by it the step divides: float32 on the CPU, all parameters in one row.
Moments = dict[str, Tensor]
NAMES = ("exp_avg", "exp_avg_sq")
_BNB_BLOCK = 256


def moments_of(optimizer: Optimizer) -> Moments:
    """The decoded moments of torch's, shardopt's and bitsandbytes' AdamW."""
    if any("state1" in state for state in optimizer.state.values()):
        states = [_of_bitsandbytes(state) for state in optimizer.state.values()]
    elif type(optimizer).__module__.startswith("torch."):
        states = list(optimizer.state.values())
    else:
        states = list(optimizer.state_dict(dequantize=True)["state"].values())  # type: ignore[call-arg]
    rows = {name: torch.cat([state[name].detach().float().cpu().flatten() for state in states]) for name in NAMES}
    return {"exp_avg": rows["exp_avg"], "exp_avg_sq": rows["exp_avg_sq"].sqrt()}


def _of_bitsandbytes(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {
        name: _looked_up(state[f"state{number}"], state.get(f"qmap{number}"), state.get(f"absmax{number}"))
        for number, name in enumerate(NAMES, 1)
    }


def _looked_up(codes: Tensor, table: Tensor | None, maxima: Tensor | None) -> Tensor:
    """Values of bitsandbytes' codes, whose blocks of 256 go over rows; small tensors have float32 state, no codes."""
    if table is None or maxima is None or codes.dtype == torch.float32:
        return codes
    scales = maxima.repeat_interleave(_BNB_BLOCK)[: codes.numel()]
    return table[codes.flatten().long()] * scales


def drift(moments: Moments, exact: Moments) -> dict[str, float]:
    """How far moments are from the float32 run's.

    Returns:
        For each moment "NAME", the norm of the difference over the norm of the float32 run's, and "NAME_norm", the
        ratio of their norms: the former grows as runs part ways, the latter tells moments that became too small.
    """
    figures: dict[str, float] = {}
    for name, ours in moments.items():
        theirs, norm = exact[name], exact[name].norm()
        figures[name] = _rounded((ours - theirs).norm() / norm)
        figures[f"{name}_norm"] = _rounded(ours.norm() / norm)
    return figures


def _rounded(value: Tensor) -> float:
    return float(f"{value.item():.5g}")


class Kept:
    """The moments of a float32 run at its marks: files of a folder, which are made anew if they are gone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, step: int) -> Path:
        return self.folder / f"{step}.pt"

    def keep(self, step: int, optimizer: Optimizer) -> dict[str, float]:
        """Writes the moments of the float32 run, whose drift is nothing."""
        self.folder.mkdir(parents=True, exist_ok=True)
        new = self.path(step).with_suffix(f".{os.getpid()}")  # two processes may make them at a time
        torch.save(moments_of(optimizer), new)
        new.replace(self.path(step))
        return {}

    def drift(self, step: int, optimizer: Optimizer) -> dict[str, float]:
        """The drift of another run's moments from the float32 run's, nothing if that one diverged before."""
        if not self.path(step).exists():
            return {}
        return drift(moments_of(optimizer), torch.load(self.path(step), weights_only=True))
