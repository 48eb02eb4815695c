"""Where the state of each parameter lives: beside it, or in the CPU's memory (the option ``offload``)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from shardopt.kernels.streamed import (
    MAX_GRADIENT_BYTES,
    PIECE_OVERHEAD,
    STATE_MOVES,
    STEP_MOVES,
    Moves,
    Transfers,
)
from shardopt.kernels.transfers import HostTransfers
from shardopt.layout import FlatBuffer, FlatShard, UnknownShardError
from shardopt.optim.options import bytes_of
from shardopt.optim.state import ParameterState, StateDict

if TYPE_CHECKING:
    from shardopt.optim.base import ShardedOptimizer
    from shardopt.optim.flat_state import AnyState

Offload = Literal["state", "step"] | None

MOVES: Mapping[str, Moves] = {"state": STATE_MOVES, "step": STEP_MOVES}

#: How much is copied at a time, and the size of each of the slots it is copied to.
CHUNK_BYTES = 32 << 20

#: Whether to offload from the CPU to the CPU, which is for tests only.
FROM_CPU = False

_CPU = torch.device("cpu")
_PAGE = 4096  # bytes
#: How entries of the state are aligned in the host's memory, in bytes.
ALIGNMENT = 64


class Place(NamedTuple):
    """Where a parameter's state lives.

    Attributes:
        offload: what is copied for a step: None, "state" or "step" (gradients and parameters).
        state: the device of moments and low bits.
        steps: that of the step count, where the kernels are.
    """

    offload: Offload
    state: torch.device
    steps: torch.device

    @classmethod
    def of(cls, offload: Offload, device: torch.device) -> Place:
        """The place of a parameter on ``device``."""
        return cls(offload, device if offload is None else _CPU, _CPU if offload == "step" else device)

    def piece_numel(self, spec: ParameterState, param: Tensor) -> int:
        """How many elements can be moved at a time."""
        if self.offload == "step":
            each = float(param.element_size() + MAX_GRADIENT_BYTES)
        else:
            scales = sum(spec.codec.scales(signed=m.signed) for m in spec.moments) if spec.codec.blockwise else 0
            each = spec.codec.code_dtype.itemsize * len(spec.moments) + spec.weights.low_bits / 8
            each += 4 * scales * (1 / spec.grid.block_size + 1 / spec.grid.row_numel) if scales else 0
        return max(int((CHUNK_BYTES - PIECE_OVERHEAD) / max(each, 1.0)), 1)


class Budget:
    """The bytes of state that may stay on the device: those of as many parameters as fit, in order.

    Args:
        nbytes: all of it.
        taken: what parameters before these have of it.
    """

    def __init__(self, nbytes: int, taken: int = 0) -> None:
        self._nbytes = nbytes
        self.taken = taken

    def takes(self, nbytes: int) -> bool:
        """Whether the state of the next parameter fits, which then has its part."""
        fits = self.taken + nbytes <= self._nbytes
        if fits:
            self.taken += nbytes
        return fits


class _Entry(NamedTuple):
    """A state entry's place in the host's memory."""

    memory: Tensor
    offset: int
    like: Tensor

    def view(self) -> Tensor:
        """Its elements, with a storage of their own: what shares one cannot be saved by torch.save."""
        part = self.memory.numpy()[self.offset : self.offset + self.like.nbytes]
        return torch.from_numpy(part).view(self.like.dtype).view(self.like.shape)


class StatePlaces:
    """Decides, once per parameter, where its state lives, and keeps the memory of what is offloaded.

    Parameters are taken in the optimizer's order. As long as their state fits into ``device_state_budget`` it stays
    beside them; so does that of column shards which cut blocks, whose scales other ranks have to see.

    Args:
        optimizer: whose parameters these are.
    """

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self._optimizer = optimizer
        self._places: dict[Tensor, tuple[torch.device, Place]] = {}  # with the device for which it was decided
        self._homes: dict[Tensor, dict[str, _Entry]] = {}
        self._taken = 0  # of the budget
        self._padding = 0
        self._pins = False
        self._transfers: dict[tuple[torch.device, str], Transfers] = {}

    def place(self, param: Tensor) -> Place:
        """Where a parameter's state lives."""
        if not self._is_decided(param) and _can_offload(param.device):
            self._decide()
        return self._places[param][1] if self._is_decided(param) else Place.of(None, param.device)

    def put(self, param: Tensor, spec: AnyState, state: StateDict) -> None:
        """Moves a parameter's state to where it lives, in place."""
        place = self.place(param)
        step = state.get("step")
        if isinstance(step, Tensor) and step.device != place.steps:  # ZeroRedundancyOptimizer leaves those on the CPU
            state["step"] = step.to(place.steps)
        if place.offload == "step":
            for key, value in state.items():
                if key != "step" and spec.shard.local(value).device.type != "cpu":
                    state[key] = spec.like(key, spec.shard.local(value).cpu())
        for key, entry in self._homes.get(param, {}).items():
            if key in state:
                local = spec.shard.local(state[key])
                home = entry.view()
                if local.data_ptr() != home.data_ptr() and (local.shape, local.dtype) == (home.shape, home.dtype):
                    self.synchronize()  # copies to where it lives may be under way
                    home.copy_(local)
                    state[key] = spec.like(key, home)

    def transfers(self, device: torch.device, offload: str) -> Transfers:
        """How what is offloaded of the parameters on a device is copied."""
        key = (device, offload)
        if key not in self._transfers:
            if device.type == "cpu":
                self._transfers[key] = HostTransfers(CHUNK_BYTES)
            else:
                from shardopt.kernels.transfers_cuda import CudaTransfers

                self._transfers[key] = CudaTransfers(device, CHUNK_BYTES, to_host=offload == "step", pin=self._pins)
        return self._transfers[key]

    @property
    def padding_bytes(self) -> int:
        """What aligning the entries takes of the host's memory."""
        return self._padding

    @property
    def buffer_bytes(self) -> dict[torch.device, int]:
        """What the copies take, by device."""
        found: dict[torch.device, int] = {}
        for (device, offload), transfers in self._transfers.items():
            there = _CPU if offload == "step" else device
            found[there] = found.get(there, 0) + transfers.nbytes
        return found

    def synchronize(self) -> None:
        """Waits until all that was computed is in the host's memory."""
        for transfers in self._transfers.values():
            transfers.synchronize()

    def check(self) -> None:
        """Checks the options of all param groups together, and that the host has memory for what is to be offloaded.

        Raises:
            ValueError: param groups that offload differ in an option that is to be the same.
            MemoryError: there is not enough.
        """
        self._agreed("pin_memory")
        undecided = self._undecided(self._budget())
        _demand_memory(sum(nbytes for *_, nbytes, offload in undecided if offload is not None))

    def _agreed(self, option: str) -> Any:
        """What all param groups that offload say.

        Raises:
            ValueError: they differ.
        """
        given = [group[option] for group in self._optimizer.param_groups if group["offload"] is not None]
        values = {bytes_of(value) if option == "device_state_budget" else value for value in given}
        if len(values) > 1:
            raise ValueError(
                f"{option}: got {', '.join(map(repr, given))} in the param groups that offload, expected the same in "
                "all, which share the memory; give it to the optimizer, not to param groups"
            )
        return next(iter(values), None)

    def _budget(self) -> Budget:
        """The budget, less what is taken by parameters that have their places."""
        return Budget(self._agreed("device_state_budget") or 0, self._taken)

    def _is_decided(self, param: Tensor) -> bool:
        return param in self._places and self._places[param][0] == param.device

    def _undecided(self, budget: Budget) -> list[tuple[Tensor, AnyState, int, Offload]]:
        """The parameters without a place: what their state looks like, its bytes, and what is offloaded."""
        found: list[tuple[Tensor, AnyState, int, Offload]] = []
        for group in self._optimizer.param_groups:
            offload = group["offload"]
            if offload is None:
                continue
            for param in group["params"]:
                if self._is_decided(param) or not _can_offload(param.device):
                    continue
                try:
                    spec = self._optimizer.state_spec(param, group)
                except UnknownShardError:
                    continue
                nbytes = _state_bytes(spec)
                if offload == "step" and isinstance(spec.shard, FlatShard | FlatBuffer):
                    raise RuntimeError(
                        "offload='step': got parameters of flat shards (FSDP1 or ZeRO), expected whole parameters or "
                        "DTensors; use offload='state', fully_shard, or DeepSpeed's offload_optimizer"
                    )
                stays = (isinstance(spec, ParameterState) and spec.exchanges_columns) or budget.takes(nbytes)
                found.append((param, spec, nbytes, None if stays else offload))
        return found

    def _decide(self) -> None:
        homes: list[tuple[Tensor, dict[str, tuple[int, Tensor]]]] = []
        end, on_cuda = 0, False
        budget, self._pins = self._budget(), self._agreed("pin_memory")
        for param, spec, _, offload in self._undecided(budget):
            self._places[param] = (param.device, Place.of(offload, param.device))
            if offload != "state":
                continue
            entries = {}
            for key, like in _local_entries(spec).items():
                if like.nbytes:
                    entries[key] = (end, like)
                    end += -(-like.nbytes // ALIGNMENT) * ALIGNMENT
                    self._padding += -like.nbytes % ALIGNMENT
            homes.append((param, entries))
            on_cuda |= param.device.type == "cuda"
        self._taken = budget.taken
        if not homes:
            return
        _demand_memory(end)
        memory = self._host_memory(end, pin=on_cuda and self._pins)
        for param, placed in homes:
            self._homes[param] = {key: _Entry(memory, offset, like) for key, (offset, like) in placed.items()}

    def _host_memory(self, nbytes: int, *, pin: bool) -> Tensor:
        """Memory of the CPU, for as long as the optimizer lives.

        Raises:
            MemoryError: there is not enough.
        """
        try:
            pages = torch.empty(nbytes + 2 * _PAGE, dtype=torch.uint8)
        except RuntimeError as error:
            raise MemoryError(
                f"offload: got no {nbytes / 2**30:.2f} GiB of host memory, expected it for the state; use more ranks, "
                "or keep a part on the device with device_state_budget"
            ) from error
        first = -pages.data_ptr() % _PAGE
        memory = pages[first : first + -(-nbytes // _PAGE) * _PAGE]  # whole pages: they are locked by nobody else
        if pin:
            from shardopt.kernels.transfers_cuda import pin_memory

            pin_memory(memory, self)
        return memory


def _can_offload(device: torch.device) -> bool:
    return device.type == "cuda" or (device.type == "cpu" and FROM_CPU)


def _local_entries(spec: AnyState) -> dict[str, Tensor]:
    """This rank's part of all entries but the step count, without memory."""
    state = spec.new(torch.device("meta"))
    return {key: spec.shard.local(value) for key, value in state.items() if key != "step"}


def _state_bytes(spec: AnyState) -> int:
    return sum(value.nbytes for value in _local_entries(spec).values())


def _demand_memory(nbytes: int) -> None:
    """Raises MemoryError where the host has not so much for each of its ranks."""
    available = _available_host_bytes()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if available is not None and nbytes * ranks > available:
        gib = 2**30
        raise MemoryError(
            f"offload: got {available / gib:.2f} GiB of available host memory, expected {nbytes * ranks / gib:.2f} "
            f"GiB, {nbytes / gib:.2f} for each of {ranks} ranks here; use more hosts, or keep a part on the device "
            "with device_state_budget"
        )


def _available_host_bytes() -> int | None:
    """What the system and the container say they could still give; None where they do not say."""
    found = []
    with suppress(OSError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    with suppress(OSError, ValueError):  # "max" where there is no limit
        limit, used = (int(Path("/sys/fs/cgroup", name).read_text()) for name in ("memory.max", "memory.current"))
        found.append(max(limit - used, 0))
    return min(found, default=None)
