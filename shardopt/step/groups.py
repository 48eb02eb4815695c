"""The options of the param groups in a step, and the tables by which the kernels read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardopt import _C
from shardopt.state.rule import Rule, hyper_row


class Group(NamedTuple):
    """The options of a param group in a step, checked and converted for the kernels.

    Attributes:
        rule: the update rule.
        table_format: the options in :data:`shardopt.state.options.TABLE_FORMAT`, whose change needs new tables.
        hyper: the rule's hyper-parameters.
        lr: the learning rate if it is a tensor on a GPU, which the kernels read there; ``hyper["lr"]`` is then 0.
        gradient_sign: a factor of the gradient: -1 with ``maximize=True``, otherwise 1.
        nonfinite: the option ``nonfinite``.
    """

    rule: Rule
    table_format: dict[str, Any]
    hyper: dict[str, float]
    lr: Tensor | None
    gradient_sign: float
    nonfinite: str

    @property
    def table_options(self) -> tuple[Any, ...]:
        """The options on which table rows and messages between ranks depend; a change makes cached tables invalid."""
        return self.rule, self.table_format, self.nonfinite == "raise"


class GroupTables:
    """The options as kernels read them, a row of ``_C.group_row`` per param group; cached until the options change."""

    def __init__(self, groups: list[Group]) -> None:
        self.groups = groups
        self._of_step: Sequence[Mapping[str, float]] = ()  # per param group; see override()
        self._tables: dict[tuple[torch.device, object], npt.NDArray[np.void]] = {}
        self._lr: dict[tuple[torch.device, int], Tensor] = {}  # float32, by device and index of the param group

    @property
    def memory(self) -> list[Tensor]:
        """The tensors whose addresses are in the tables: copies of learning rates on GPUs."""
        return list(self._lr.values())

    def replace(self, groups: Mapping[int, Group], rates: Mapping[int, float | None]) -> bool:
        """Replaces groups, and rates of others, by index; returns whether cached :class:`StepTables` remain valid."""
        is_valid = all(group.table_options == self.groups[index].table_options for index, group in groups.items())
        for index, lr in rates.items():
            group = groups[index] if lr is None else self.groups[index]
            self.groups[index] = group if lr is None else group._replace(hyper={**group.hyper, "lr": lr}, lr=None)
        self._tables = {key: table.copy() for key, table in self._tables.items() if not groups and key[1] is None}
        for table in self._tables.values():
            table["hyper"][list(rates), 0] = list(rates.values())  # every rule's first hyper-parameter
            table["lr"][list(rates)] = 0
        return is_valid

    def override(self, hyper: Sequence[Mapping[str, float]]) -> None:
        """Overrides hyper-parameters of each param group, or none, by values of the present step."""
        self._of_step, tables = hyper, self._tables if hyper or not self._of_step else {}
        self._tables = {key: self._overridden(table.copy() if hyper else table) for key, table in tables.items()}

    def _overridden(self, table: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
        for index, hyper in enumerate(self._of_step):
            names = _C.rules[self.groups[index].rule.name]["hyper"]
            for name, value in hyper.items():
                table["hyper"][index, names.index(name)] = value
        return table

    def rows_for(
        self, kernel_device: torch.device, scales: tuple[tuple[int, float], ...] | None = None
    ) -> npt.NDArray[np.void]:
        """The table of options for the kernels of a device: a row per param group, or per entry of ``scales``.

        ``scales`` are for Muon's second pass, which updates weights by orthogonalized directions: per row the index of
        the param group, and a factor of its learning rate.
        """
        key = (kernel_device, scales)
        if key not in self._tables:
            which = [(index, None) for index in range(len(self.groups))] if scales is None else scales
            table = np.array([self._row(kernel_device, *each) for each in which], _C.group_row)
            self._tables[key] = self._overridden(table)
        return self._tables[key]

    def _row(self, kernel_device: torch.device, index: int, scale: float | None) -> tuple[Any, ...]:
        """A row of ``_C.group_row``; see :meth:`rows_for`.

        A learning rate on a GPU is copied, in the current stream, to a float32 scalar to which the row points. For
        kernels that run on the CPU the row has its value, for which the host waits.
        """
        group = self.groups[index]
        rule, hyper, sign = group.rule.name, group.hyper, group.gradient_sign
        lr = 0
        if group.lr is not None and kernel_device.type == "cpu":
            hyper = {**hyper, "lr": float(group.lr)}
        elif group.lr is not None:
            if (kernel_device, index) not in self._lr:
                self._lr[kernel_device, index] = torch.zeros((), dtype=torch.float32, device=kernel_device)
            lr = self._lr[kernel_device, index].copy_(group.lr.reshape(())).data_ptr()
        if scale is not None:  # directions have the gradient's sign already
            assert group.rule.orthogonalized is not None
            rule, hyper, sign = group.rule.orthogonalized.applied_rule, {**hyper, "scale": scale}, 1.0
        row = {"hyper": hyper_row(rule, hyper), "lr": lr, "gradient_scale": sign, "rule": _C.rules[rule]["index"]}
        row["nonfinite"] = int(_C.NonFinite.propagate if group.nonfinite == "propagate" else _C.NonFinite.skip)
        return tuple(row[name] for name in _C.group_row.fields or ())
