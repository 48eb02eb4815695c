"""Decides which device stores each parameter's state (the parameter's or, with ``offload``, the CPU), and moves it."""

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
from shardopt.state.full_precision import reset_stale_low_bits
from shardopt.state.host_memory import allocate_host_tensors, demand_host_memory
from shardopt.state.names import named
from shardopt.state.slice_spec import SliceSpec, StateDict
from shardopt.state.tensor_spec import TensorSpec
from shardopt.state.warn import warn_user

Offload = Literal["state", "step"] | None

MOVES: Mapping[str, Moves] = {"state": STATE_MOVES, "step": STEP_MOVES}

#: The most bytes that are copied at a time, which is the size of a staging slot.
CHUNK_BYTES = 32 << 20

#: For tests: makes CPU-to-CPU transfers with slots of the given size. None: state of CPU parameters is not offloaded.
MAKE_CPU_TRANSFERS: Callable[[int], CudaTransfers] | None = None

_CPU, _META = torch.device("cpu"), torch.device("meta")


class Residency(NamedTuple):
    """The devices that store a parameter's state and run its step.

    Attributes:
        offload: what a step copies between devices: None, "state", or "step" (gradients and parameters).
        state: the device that stores moments and low bits.
        steps: the device that stores the step count and runs the kernels.
    """

    offload: Offload
    state: torch.device
    steps: torch.device

    @classmethod
    def of(cls, offload: Offload, device: torch.device) -> Residency:
        """The residency for a parameter on ``device`` with this option."""
        return cls(offload, device if offload is None else _CPU, _CPU if offload == "step" else device)

    def unit_numel(self, spec: SliceSpec, param: Tensor) -> int:
        """How many of the parameter's elements can be copied at a time, so that all operands fit into one slot."""
        if self.offload == "step":
            element_bytes = float(param.element_size() + MAX_GRADIENT_BYTES)
        else:
            nbytes = sum(entry.allocate(_META).nbytes for key, entry in spec.entries.items() if key != "step")
            element_bytes = nbytes / max(param.numel(), 1)
        return max(int((CHUNK_BYTES - UNIT_OVERHEAD) / max(element_bytes, 1.0)), 1)


class _Decision(NamedTuple):
    """The residency that was chosen for a parameter, which holds until the parameter changes its device.

    Attributes:
        device: the parameter's device at the time of the decision.
        residency: the chosen devices.
        entries: if the state is offloaded, meta tensors like all its entries but ``step``.
        homes: with ``offload="state"``, host tensors that store these entries, pinned for a GPU.
    """

    device: torch.device
    residency: Residency
    entries: dict[str, Tensor]
    homes: dict[str, Tensor]


class _Movable(NamedTuple):
    """A state entry that :meth:`StateResidency.sleep` moves to the host, and ``wake`` back to the parameter's device.

    Attributes:
        device: the parameter's device.
        state: the parameter's entries, ``optimizer.state[param]``, in which the moved tensor replaces the old one.
        key: the entry's name.
        spec: describes the state; None for a parameter that is in no param group now, as with ZeRO 3 between steps:
            its entries are plain tensors.
    """

    device: torch.device
    state: StateDict
    key: str
    spec: TensorSpec | None

    @property
    def local(self) -> Tensor:
        """The entry's plain tensor on this rank, a DTensor's local tensor."""
        return self.state[self.key] if self.spec is None else self.spec.shard.local(self.state[self.key])


class StateResidency:
    """Decides, once per parameter, which device stores its state, and owns the host memory of offloaded state.

    State of column shards that cut blocks stays on the parameter's device: each step all-reduces its blocks' extremes.
    A frozen parameter's residency is decided once it has a gradient or state.

    Args:
        optimizer: the parameters' optimizer.
        state_of: describes the state of a parameter, given its param group.

    Attributes:
        asleep: whether :meth:`sleep` has moved all state to host memory, until :meth:`wake`. That memory is kept for
            the next sleep: pinning it takes longer than the copies.
        unallocated_bytes: bytes of state that will be offloaded, but has no host memory yet as nothing is decided.
    """

    def __init__(self, optimizer: Optimizer, state_of: Callable[[Tensor, Mapping[str, Any]], TensorSpec]) -> None:
        self._optimizer, self._state_of = optimizer, state_of
        self._decisions: MutableMapping[Tensor, _Decision] = WeakIdKeyDictionary()  # type: ignore[no-untyped-call]
        self.unallocated_bytes = 0
        self._transfers: dict[tuple[torch.device, str], CudaTransfers] = {}
        self.asleep = False
        self._sleep_buffers: list[Tensor] = []  # host memory for state that is asleep

    def of(self, param: Tensor) -> Residency:
        """A parameter's residency; the first call decides it for all parameters, and allocates host memory."""
        if not self._is_decided(param) and _can_offload(param.device) and self._has_use(param):
            self._decide()
        where = self._decisions[param].residency if self._is_decided(param) else Residency.of(None, param.device)
        return where._replace(state=_CPU) if self.asleep and where.offload is None else where

    def sleep(self) -> None:
        """Moves all state that is on GPUs to host memory, until :meth:`wake`, to free GPU memory for other work.

        Raises:
            MemoryError: the host has too little memory. Nothing was moved.
        """
        if self.asleep:
            return
        entries = self._movable()
        likes = [torch.empty_like(entry.local, device=_META) for entry in entries]
        if [(x.shape, x.dtype) for x in likes] != [(bed.shape, bed.dtype) for bed in self._sleep_buffers]:
            self._sleep_buffers = []  # freed before new memory is allocated
            self._sleep_buffers = allocate_host_tensors(likes, pin=_a_gpu(entry.device for entry in entries))
        _move(entries, self._sleep_buffers)
        self.asleep = True

    def wake(self) -> None:
        """Undoes :meth:`sleep`. Raises RuntimeError in a CUDA graph capture: replays could not repeat the move."""
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
        """Prepares ``state`` for a step, in place: creates or checks its entries, and moves them to their devices.

        Raises:
            RuntimeError: an entry has no memory, is a negative view, or is not sharded like the parameter.
        """
        if not state:
            state.update(spec.new_state(self.of(param).state))
        reset_stale_low_bits(spec, param, state, self.of(param).state)
        for key in spec.entries.keys() & state.keys():
            with named(f"{name}: state {key}"):
                entry = state[key] if key == "step" else spec.shard.local(state[key])
            check_storage(name, f"state {key}", entry)
            check_sign(name, f"state {key}", entry)
        self.put(param, spec, state)

    def put(self, param: Tensor, spec: TensorSpec, state: StateDict) -> None:
        """Moves the step count to its device, and offloaded entries into host memory; replaces them in ``state``."""
        where = self.of(param)
        step = state.get("step")
        if isinstance(step, Tensor) and step.device != where.steps:  # ZeroRedundancyOptimizer leaves steps on the CPU
            state["step"] = step.to(where.steps)
        if where.offload == "step":
            for key, value in state.items():
                if key != "step" and spec.shard.local(value).device.type != "cpu":
                    state[key] = spec.wrap_local(key, spec.shard.local(value).cpu())
        homes = self._decisions[param].homes if self._is_decided(param) else {}
        for key, home in homes.items():
            if key in state:
                local = spec.shard.local(state[key])
                if local.data_ptr() != home.data_ptr() and (local.shape, local.dtype) == (home.shape, home.dtype):
                    self.synchronize()  # copies to this memory may be in flight
                    home.copy_(local)
                    state[key] = spec.wrap_local(key, home)

    def transfers(self, device: torch.device, offload: str) -> CudaTransfers:
        """Staging slots and copy streams of a device for ``offload`` "state" or "step", made on first use."""
        key = (device, offload)
        if key not in self._transfers:
            if device.type == "cpu":
                assert MAKE_CPU_TRANSFERS is not None
                self._transfers[key] = MAKE_CPU_TRANSFERS(CHUNK_BYTES)
            else:
                if offload == "step":
                    warn_of_one_thread()
                self._transfers[key] = CudaTransfers(device, CHUNK_BYTES, to_host=offload == "step")
        return self._transfers[key]

    @property
    def buffer_bytes(self) -> dict[torch.device, int]:
        """Bytes of staging slots, and of host memory that is kept for the next :meth:`sleep`, by device."""
        nbytes: dict[torch.device, int] = {}
        for (device, offload), transfers in self._transfers.items():
            where = _CPU if offload == "step" else device
            nbytes[where] = nbytes.get(where, 0) + transfers.nbytes
        if self._sleep_buffers and not self.asleep:
            nbytes[_CPU] = nbytes.get(_CPU, 0) + sum(bed.nbytes for bed in self._sleep_buffers)
        return nbytes

    def synchronize(self) -> None:
        """Waits for all copies of steps' results to host memory that are in flight."""
        for transfers in self._transfers.values():
            transfers.synchronize()

    def check(self, added: dict[str, Any] | None = None) -> None:
        """Checks that host memory suffices to offload all state, or an added param group's; sets ``unallocated_bytes``.

        Raises:
            MemoryError: the host has too little memory for all its ranks, if none has allocated its part yet.
            RuntimeError: ``offload`` is not possible for a parameter.
        """
        before, groups = (0, self._optimizer.param_groups) if added is None else (self.unallocated_bytes, [added])
        chosen = self._choose(groups).values()
        new = sum(entry.nbytes for decision in chosen for entry in decision.entries.values())
        if new:
            demand_host_memory(before + new, ranks_here())
        self.unallocated_bytes = before + new

    def _movable(self) -> list[_Movable]:
        """Entries for :meth:`sleep` and :meth:`wake`: all but step counts, of parameters that are not offloaded."""
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
        """Whether a parameter has or will get state: False for a frozen parameter without a gradient and state."""
        return param.requires_grad or param.grad is not None or bool(self._optimizer.state.get(param))

    def _choose(self, groups: Iterable[Mapping[str, Any]]) -> dict[Tensor, _Decision]:
        """Chooses a residency for all parameters in ``groups`` without a decision; allocates no memory.

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
                    if spec.has_column_cut_blocks:
                        offload = None
                    else:
                        entries = {key: entry.allocate(_META) for key, entry in spec.entries.items() if key != "step"}
                chosen[param] = _Decision(param.device, Residency.of(offload, param.device), entries, {})
        return chosen

    def _decide(self) -> None:
        """Chooses a residency for all parameters without one, and allocates host memory for offloaded state."""
        chosen = self._choose(self._optimizer.param_groups)
        moved = {param: each.entries for param, each in chosen.items() if each.residency.offload == "state"}
        likes = [like for entries in moved.values() for like in entries.values()]
        homes = iter(allocate_host_tensors(likes, pin=_a_gpu(param.device for param in moved)) if likes else ())
        for param, entries in moved.items():
            chosen[param] = chosen[param]._replace(homes={key: next(homes) for key in entries})
        self._decisions.update(chosen)
        self.unallocated_bytes = 0


def _move(entries: Sequence[_Movable], places: Sequence[Tensor]) -> None:
    """Copies entries into the given tensors, waits, and puts those tensors into the state."""
    for entry, place in zip(entries, places, strict=True):
        place.copy_(entry.local, non_blocking=True)
    for device in {entry.device for entry in entries if entry.device.type == "cuda"}:
        torch.cuda.synchronize(device)
    for (_, state, key, spec), place in zip(entries, places, strict=True):
        state[key] = place if spec is None else spec.wrap_local(key, place)


def _a_gpu(devices: Iterable[torch.device]) -> torch.device | None:
    """The first GPU among ``devices``; None if there is none."""
    return next((device for device in devices if device.type == "cuda"), None)


def ranks_here() -> int:
    """The number of ranks on this host, from LOCAL_WORLD_SIZE, which launchers such as torchrun set."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


@cache  # once in a process
def warn_of_one_thread() -> None:
    """Warns if CPU steps run in one thread, as torchrun sets, though this rank's share of the cores is larger."""
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
    return device.type == "cuda" or (device.type == "cpu" and MAKE_CPU_TRANSFERS is not None)
