"""Where the state of each parameter lives: beside the parameter, or in the CPU's memory (the option ``offload``)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from shardopt.kernels.memory import check_sign, check_storage
from shardopt.kernels.streamed import MAX_GRADIENT_BYTES, STATE_MOVES, STEP_MOVES, UNIT_OVERHEAD, Moves
from shardopt.kernels.transfers_cuda import CudaTransfers
from shardopt.layout import FlatBuffer, FlatShard, UnknownShardError
from shardopt.state.full_precision import fit_low_bits
from shardopt.state.host_memory import demand_memory, make_homes
from shardopt.state.names import named
from shardopt.state.slice_spec import SliceSpec, StateDict
from shardopt.state.tensor_spec import TensorSpec
from shardopt.state.warn import warn_user

Offload = Literal["state", "step"] | None

MOVES: Mapping[str, Moves] = {"state": STATE_MOVES, "step": STEP_MOVES}

#: Bytes that are copied at a time, and size of a slot.
CHUNK_BYTES = 32 << 20

#: Makes copies from the CPU to the CPU in slots of so many bytes, for tests; None: parameters there are not offloaded.
FROM_CPU: Callable[[int], CudaTransfers] | None = None

_CPU, _META = torch.device("cpu"), torch.device("meta")


class Residency(NamedTuple):
    """Where a parameter's state lives.

    Attributes:
        offload: the operands that are copied for a step: None, "state" or "step" (gradients and parameters).
        state: the device of moments and low bits.
        steps: the device of the step count and the kernels.
    """

    offload: Offload
    state: torch.device
    steps: torch.device

    @classmethod
    def of(cls, offload: Offload, device: torch.device) -> Residency:
        """The place of a parameter on ``device``."""
        return cls(offload, device if offload is None else _CPU, _CPU if offload == "step" else device)

    def unit_numel(self, spec: SliceSpec, param: Tensor) -> int:
        """The number of elements that can be moved at a time."""
        if self.offload == "step":
            element_bytes = float(param.element_size() + MAX_GRADIENT_BYTES)
        else:
            nbytes = sum(entry.new(_META).nbytes for key, entry in spec.entries.items() if key != "step")
            element_bytes = nbytes / max(param.numel(), 1)
        return max(int((CHUNK_BYTES - UNIT_OVERHEAD) / max(element_bytes, 1.0)), 1)


class _Decision(NamedTuple):
    """Where a parameter's state lives.

    Attributes:
        device: the parameter's device at the time of the decision.
        residency: the place.
        entries: if the state is offloaded, its entries without memory, but the step count.
        homes: with ``offload="state"``, the entries in the host's memory.
    """

    device: torch.device
    residency: Residency
    entries: dict[str, Tensor]
    homes: dict[str, Tensor]


class _Movable(NamedTuple):
    """A state entry of a parameter that is moved from and to the parameter's device.

    Attributes:
        device: the parameter's device.
        state: the optimizer's entries of the parameter, of which this one is replaced.
        key: the entry's name.
        spec: describes the state; None for a parameter of no param group now, such as ZeRO 3's between steps, whose
            entries are plain tensors.
    """

    device: torch.device
    state: StateDict
    key: str
    spec: TensorSpec | None

    @property
    def local(self) -> Tensor:
        """This rank's part."""
        return self.state[self.key] if self.spec is None else self.spec.shard.local(self.state[self.key])


class StateResidency:
    """Decides, once per parameter, where its state lives, and keeps the memory of offloaded state.

    The state of column shards which cut blocks stays beside the parameters, as other ranks have to see its scales.
    Frozen parameters get a place when they are stepped or have state.

    Args:
        optimizer: the parameters' optimizer.
        state_of: describes the state of a parameter, given its param group.

    Attributes:
        asleep: whether all state is in the host's memory until :meth:`wake`. That memory is kept from one sleep to the
            next: page-locking memory takes longer than the copies.
        foreseen_bytes: bytes of the state that is to be offloaded and has no memory yet, until places are decided on.
    """

    def __init__(self, optimizer: Optimizer, state_of: Callable[[Tensor, Mapping[str, Any]], TensorSpec]) -> None:
        self._optimizer, self._state_of = optimizer, state_of
        self._decisions: MutableMapping[Tensor, _Decision] = WeakIdKeyDictionary()  # type: ignore[no-untyped-call]
        self.foreseen_bytes = 0
        self._transfers: dict[tuple[torch.device, str], CudaTransfers] = {}
        self.asleep = False
        self._sleep_buffers: list[Tensor] = []  # memory for the state while it sleeps

    def of(self, param: Tensor) -> Residency:
        """Where a parameter's state lives."""
        if not self._is_decided(param) and _can_offload(param.device) and self._has_use(param):
            self._decide()
        where = self._decisions[param].residency if self._is_decided(param) else Residency.of(None, param.device)
        return where._replace(state=_CPU) if self.asleep and where.offload is None else where

    def sleep(self) -> None:
        """Moves the state that is on devices to the host's memory.

        Raises:
            MemoryError: there is not enough. Nothing was moved.
        """
        if self.asleep:
            return
        entries = self._movable()
        likes = [torch.empty_like(entry.local, device=_META) for entry in entries]
        if [(x.shape, x.dtype) for x in likes] != [(bed.shape, bed.dtype) for bed in self._sleep_buffers]:
            self._sleep_buffers = []  # freed before new memory is allocated
            self._sleep_buffers = make_homes(likes, pin=_a_gpu(entry.device for entry in entries))
        _move(entries, self._sleep_buffers)
        self.asleep = True

    def wake(self) -> None:
        """Moves the state back. Raises RuntimeError in the capture of a CUDA graph, which could not replay it."""
        if self.asleep:
            entries, dense = self._movable(), torch.contiguous_format
            if any(entry.device.type == "cuda" for entry in entries) and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "got a step captured into a CUDA graph while the state is offloaded, expected the state on the "
                    "device; call optimizer.reload() before the capture"
                )
            _move(entries, [torch.empty_like(x.local, device=x.device, memory_format=dense) for x in entries])
            self.asleep = False

    def ready(self, name: str, param: Tensor, spec: TensorSpec, state: StateDict) -> None:
        """Readies a parameter's state for a step, in place: makes missing state, and puts it where it lives.

        Raises:
            RuntimeError: an entry has no memory, is a negative view, or is not sharded like the parameter.
        """
        if not state:
            state.update(spec.new(self.of(param).state))
        fit_low_bits(spec, param, state, self.of(param).state)
        for key in spec.entries.keys() & state.keys():
            with named(f"{name}: state {key}"):
                entry = state[key] if key == "step" else spec.shard.local(state[key])
            check_storage(name, f"state {key}", entry)
            check_sign(name, f"state {key}", entry)
        self.put(param, spec, state)

    def put(self, param: Tensor, spec: TensorSpec, state: StateDict) -> None:
        """Moves a parameter's state to where it lives, in place."""
        where = self.of(param)
        step = state.get("step")
        if isinstance(step, Tensor) and step.device != where.steps:  # ZeroRedundancyOptimizer leaves steps on the CPU
            state["step"] = step.to(where.steps)
        if where.offload == "step":
            for key, value in state.items():
                if key != "step" and spec.shard.local(value).device.type != "cpu":
                    state[key] = spec.like(key, spec.shard.local(value).cpu())
        homes = self._decisions[param].homes if self._is_decided(param) else {}
        for key, home in homes.items():
            if key in state:
                local = spec.shard.local(state[key])
                if local.data_ptr() != home.data_ptr() and (local.shape, local.dtype) == (home.shape, home.dtype):
                    self.synchronize()  # copies to this place may be under way
                    home.copy_(local)
                    state[key] = spec.like(key, home)

    def transfers(self, device: torch.device, offload: str) -> CudaTransfers:
        """Staging slots and copy streams for a device and a kind of offload, made on first use."""
        key = (device, offload)
        if key not in self._transfers:
            if device.type == "cpu":
                assert FROM_CPU is not None
                self._transfers[key] = FROM_CPU(CHUNK_BYTES)
            else:
                if offload == "step":
                    warn_of_one_thread()
                self._transfers[key] = CudaTransfers(device, CHUNK_BYTES, to_host=offload == "step")
        return self._transfers[key]

    @property
    def buffer_bytes(self) -> dict[torch.device, int]:
        """Bytes of the slots, and of memory that is kept for the next sleep, by device."""
        nbytes: dict[torch.device, int] = {}
        for (device, offload), transfers in self._transfers.items():
            where = _CPU if offload == "step" else device
            nbytes[where] = nbytes.get(where, 0) + transfers.nbytes
        if self._sleep_buffers and not self.asleep:
            nbytes[_CPU] = nbytes.get(_CPU, 0) + sum(bed.nbytes for bed in self._sleep_buffers)
        return nbytes

    def synchronize(self) -> None:
        """Waits until all results are in the host's memory."""
        for transfers in self._transfers.values():
            transfers.synchronize()

    def check(self, added: dict[str, Any] | None = None) -> None:
        """Checks that the host has memory for the state to be offloaded, of one added param group or of all.

        Raises:
            MemoryError: the host has too little memory for all its ranks, none of which has allocated any yet.
            RuntimeError: ``offload`` is not possible for a parameter.
        """
        before, groups = (0, self._optimizer.param_groups) if added is None else (self.foreseen_bytes, [added])
        chosen = self._choose(groups).values()
        new = sum(entry.nbytes for decision in chosen for entry in decision.entries.values())
        if new:
            demand_memory(before + new, ranks_here())
        self.foreseen_bytes = before + new

    def _movable(self) -> list[_Movable]:
        """Entries that :meth:`sleep` and :meth:`wake` move: all but step counts, of parameters without ``offload``."""
        group_of = {param: group for group in self._optimizer.param_groups for param in group["params"]}
        entries = []
        for param, state in self._optimizer.state.items():
            if state and _can_offload(param.device) and self.of(param).offload is None:
                spec = self._state_of(param, group_of[param]) if param in group_of else None
                for key, value in state.items():
                    if key != "step" and (type(value) is Tensor if spec is None else key in spec.entries):
                        entries.append(_Movable(param.device, state, key, spec))
        return entries

    def _is_decided(self, param: Tensor) -> bool:
        return param in self._decisions and self._decisions[param].device == param.device

    def _has_use(self, param: Tensor) -> bool:
        """Whether a parameter has state or is about to get some, unlike frozen parameters."""
        return param.requires_grad or param.grad is not None or bool(self._optimizer.state.get(param))

    def _choose(self, groups: Iterable[Mapping[str, Any]]) -> dict[Tensor, _Decision]:
        """Chooses places for all parameters of param groups that have none.

        Raises:
            RuntimeError: ``offload`` is not possible for a parameter.
        """
        chosen: dict[Tensor, _Decision] = {}
        for group in groups:
            for param in group["params"]:
                if self._is_decided(param) or not _can_offload(param.device) or not self._has_use(param):
                    continue
                offload, entries = group["offload"], {}
                if offload is not None:
                    try:
                        spec = self._state_of(param, group)
                    except UnknownShardError:
                        continue
                    if offload == "step" and isinstance(spec.shard, FlatShard | FlatBuffer):
                        raise RuntimeError(
                            "offload='step': got parameters of flat shards (FSDP1 or ZeRO), expected whole parameters "
                            "or DTensors; use offload='state', fully_shard, or DeepSpeed's offload_optimizer"
                        )
                    if spec.exchanges_columns:
                        offload = None
                    else:
                        entries = {key: entry.new(_META) for key, entry in spec.entries.items() if key != "step"}
                chosen[param] = _Decision(param.device, Residency.of(offload, param.device), entries, {})
        return chosen

    def _decide(self) -> None:
        """Decides for all parameters without a place."""
        chosen = self._choose(self._optimizer.param_groups)
        moved = {param: each.entries for param, each in chosen.items() if each.residency.offload == "state"}
        likes = [like for entries in moved.values() for like in entries.values()]
        homes = iter(make_homes(likes, pin=_a_gpu(param.device for param in moved)) if likes else ())
        for param, entries in moved.items():
            chosen[param] = chosen[param]._replace(homes={key: next(homes) for key in entries})
        self._decisions.update(chosen)
        self.foreseen_bytes = 0


def _move(entries: Sequence[_Movable], places: Sequence[Tensor]) -> None:
    """Moves entries to other places, and waits for the copies."""
    for entry, place in zip(entries, places, strict=True):
        place.copy_(entry.local, non_blocking=True)
    for device in {entry.device for entry in entries if entry.device.type == "cuda"}:
        torch.cuda.synchronize(device)
    for (_, state, key, spec), place in zip(entries, places, strict=True):
        state[key] = place if spec is None else spec.like(key, place)


def _a_gpu(devices: Iterable[torch.device]) -> torch.device | None:
    """The first GPU among devices."""
    return next((device for device in devices if device.type == "cuda"), None)


def ranks_here() -> int:
    """The number of ranks on this host, as launchers tell it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


@cache  # once in a process
def warn_of_one_thread() -> None:
    """Warns if the CPU steps in one thread, to which torchrun sets it, though this rank's share of cores is larger."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = cores // ranks_here()
    if torch.get_num_threads() == 1 and share > 1:
        warn_user(
            f"offload='step': got 1 thread for the CPU's steps, expected up to {share}, this rank's share of the "
            f"cores. torchrun sets OMP_NUM_THREADS=1 where it is not set: set it, or call "
            f"torch.set_num_threads({share}) before the first step, and leave some cores to data loaders",
            RuntimeWarning,
        )


def _can_offload(device: torch.device) -> bool:
    return device.type == "cuda" or (device.type == "cpu" and FROM_CPU is not None)
