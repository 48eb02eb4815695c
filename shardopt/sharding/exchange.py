"""How ranks agree on something: collectives of torch.distributed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroup, ReduceOp, all_reduce


@dataclass(frozen=True)
class RanksExchange:
    """Agreement among ranks. Equal ones share one collective.

    Attributes:
        groups: the ranks: those of one group, or of several that are gone through one after another, as along the
            dimensions of a mesh.
        device_type: of the tensors that the groups' back end takes.
    """

    groups: tuple[ProcessGroup, ...]
    device_type: str

    def all_reduce_max(self, tensor: Tensor) -> None:
        self._all_reduce(tensor, ReduceOp.MAX)

    def all_reduce_sum(self, tensor: Tensor) -> None:
        self._all_reduce(tensor, ReduceOp.SUM)

    def _all_reduce(self, tensor: Tensor, op: Any) -> None:
        there = tensor.to(self.device_type)  # of an offloaded parameter it lies on the host, out of NCCL's reach
        for group in self.groups:
            all_reduce(there, op, group=group)
        if there is not tensor:
            tensor.copy_(there)
