"""The tables of the param groups, which the kernels read beside those of the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardopt import _C
from shardopt.step.rows import Group, GroupRow


class Scaled(NamedTuple):
    """A param group in the pass that applies orthogonalized directions of some shape.

    Attributes:
        group: the param group's index.
        scale: factor of the learning rate.
    """

    group: int
    scale: float


class GroupTables:
    """Tables of ``_C.group_row``, cached until the options change.

    Args:
        groups: the param groups.
    """

    def __init__(self, groups: list[Group]) -> None:
        self.groups = groups
        self._from_totals: Sequence[Mapping[str, float]] | None = None
        self._tables: dict[object, npt.NDArray[np.void]] = {}
        self._lr: dict[tuple[torch.device, int], Tensor] = {}  # float32, by device and index of the param group

    @property
    def memory(self) -> list[Tensor]:
        """The tensors that the tables point to."""
        return list(self._lr.values())

    def replace(self, groups: list[Group]) -> None:
        """Takes new options."""
        self.groups = groups
        self._tables.clear()

    def follow_totals(self, hyper: Sequence[Mapping[str, float]] | None) -> None:
        """Takes hyper-parameters that follow from the sums over all parameters, per param group; None for none."""
        if hyper is not self._from_totals:
            self._from_totals = hyper
            self._tables.clear()

    def on(self, kernels: torch.device, applied: tuple[Scaled, ...] | None = None) -> npt.NDArray[np.void]:
        """A row per param group.

        Args:
            kernels: the kernels' device.
            applied: for the pass that applies orthogonalized directions, the param groups and scales of the rows.
        """
        key = (kernels, applied)
        if key not in self._tables:
            which: Sequence[Scaled | int] = range(len(self.groups)) if applied is None else applied
            self._tables[key] = np.array([self._row(kernels, one) for one in which], _C.group_row)
        return self._tables[key]

    def _row(self, kernels: torch.device, which: Scaled | int) -> GroupRow:
        """A row of the table; copies a learning rate on a device in the order of the current stream."""
        index = which if isinstance(which, int) else which.group
        group, lr = self.groups[index], self.groups[index].lr
        if self._from_totals is not None:
            group = group._replace(hyper={**group.hyper, **self._from_totals[index]})
        if lr is not None and kernels.type == "cpu":
            group, lr = group._replace(hyper={**group.hyper, "lr": float(lr)}), None
        elif lr is not None:
            if (kernels, index) not in self._lr:
                self._lr[kernels, index] = torch.zeros((), dtype=torch.float32, device=kernels)
            lr = self._lr[kernels, index].copy_(lr.reshape(()))
        return group.row(lr, None if isinstance(which, int) else which.scale)
