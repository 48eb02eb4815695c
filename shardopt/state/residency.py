"""Decides which device stores each parameter's state (the parameter's or, with ``offload``, the CPU), and moves it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from shardopt.kernels.memory import check_sign, check_storage
from shardopt.kernels.streamed import MAX_GRADIENT_BYTES, STATE_FIELDS, STEP_FIELDS, UNIT_OVERHEAD, CopiedFields
from shardopt.kernels.transfers_cuda import CudaTransfers
from shardopt.layout import FlatBuffer, FlatShard, UnknownShardError
from shardopt.state.full_precision import reset_stale_low_bits
from shardopt.state.host_memory import allocate_host_tensors, demand_host_memory
from shardopt.state.names import naming_errors
from shardopt.state.slice_spec import SliceSpec, StateDict
from shardopt.state.tensor_spec import TensorSpec
from shardopt.state.warn import warn_user

Offload = Literal["state", "step"] | None

#: The copies between host and GPU that a step makes, by the option ``offload``.
MOVES: Mapping[str, CopiedFields] = {"state": STATE_FIELDS, "step": STEP_FIELDS}

#: The most bytes that are copied at a time, which is the size of a staging slot.
CHUNK_BYTES = 32 << 20

_CPU, _META = torch.device("cpu"), torch.device("meta")


class Residency(NamedTuple):
    """The devices that store a parameter's moments and low bits, and its step count, where the kernels run.

    ``offload``: what a step copies between devices: None, "state", or "step" (gradients and parameters).
    """

    offload: Offload
    state_device: torch.device
    step_device: torch.device

    def unit_numel(self, spec: SliceSpec, param: Tensor) -> int:
        """How many elements of a slice (``param``: its local tensor) one copy takes, with all operands in one slot."""
        if self.offload == "step":
            element_bytes = float(param.element_size() + MAX_GRADIENT_BYTES)
        else:
            nbytes = sum(entry.allocate(_META).nbytes for key, entry in spec.entries.items() if key != "step")
            element_bytes = nbytes / max(param.numel(), 1)
        return max(int((CHUNK_BYTES - UNIT_OVERHEAD) / max(element_bytes, 1.0)), 1)


class _Decision(NamedTuple):
    """The residency that was chosen for a parameter, which holds until the parameter changes its device.

    ``entries``: if the state is offloaded, tensors like all its entries but ``step``: meta tensors; with
    ``offload="state"``, once allocated, the host tensors that store the entries, pinned for a GPU.
    """

    device: torch.device
    residency: Residency
    entries: dict[str, Tensor]


class _Movable(NamedTuple):
    """A state entry that :meth:`StateResidency.sleep` moves to the host, and ``wake`` back to the parameter's device.

    ``local`` is its plain tensor on this rank; in ``state``, the parameter's entries, the moved one replaces it.
    ``spec`` is None for a parameter in no param group now, as with ZeRO 3 between steps: its entries are plain tensors.
    """

    device: torch.device
    state: StateDict
    key: str
    local: Tensor
    spec: TensorSpec | None


class StateResidency:
    """Decides, once per parameter, which device stores its state, and owns the host memory of offloaded state.

    State of column shards that cut blocks stays on the parameter's device: each step all-reduces its blocks' extremes.
    A frozen parameter's residency is decided once it has a gradient or state: until then no memory is spent on it.

    Attributes:
        asleep: whether :meth:`sleep` has moved all state to host memory, which is kept for the next time: pinning it
            takes longer than the copies.
        unallocated_bytes: bytes of state that will be offloaded, but for which no host memory was allocated yet.
    """

    def __init__(self, optimizer: Optimizer, state_of: Callable[[Tensor, Mapping[str, Any]], TensorSpec]) -> None:
        self._optimizer, self._state_of = optimizer, state_of
        self._decisions: MutableMapping[Tensor, _Decision] = WeakIdKeyDictionary()  # type: ignore[no-untyped-call]
        self.unallocated_bytes = 0
        self._transfers: dict[tuple[torch.device, str], CudaTransfers] = {}
        self.asleep = False
        self._sleep_buffers: list[Tensor] = []  # host memory for state that is asleep

    def decide(self, param: Tensor) -> Residency:
        """Returns a parameter's residency. If it has none, decides on all parameters, and allocates host memory."""
        if self._needs_decision(param):
            self._decide_all()
        residency = Residency(None, param.device, param.device)  # of parameters on the CPU, or frozen without state
        if self._is_decided(param):
            residency = self._decisions[param].residency
        if self.asleep and residency.offload is None:  # sleep() moves the state
            return residency._replace(state_device=_CPU)
        return residency

    def sleep(self) -> None:
        """Moves all state that is on GPUs to host memory, until :meth:`wake`, to free GPU memory for other work.

        Raises MemoryError, and moves nothing, if the host has too little memory.
        """
        if self.asleep:
            return
        entries = self._movable_entries()
        formats = [torch.empty_like(entry.local, device=_META) for entry in entries]
        kept = [(buffer.shape, buffer.dtype) for buffer in self._sleep_buffers]
        if kept != [(x.shape, x.dtype) for x in formats]:  # first sleep, or the state has changed since the last
            self._sleep_buffers = []  # freed before new memory is allocated
            self._sleep_buffers = allocate_host_tensors(formats, pin=_first_gpu(entry.device for entry in entries))
        _move(entries, self._sleep_buffers)
        self.asleep = True

    def wake(self) -> None:
        """Undoes :meth:`sleep`. Raises RuntimeError in a CUDA graph capture: replays could not repeat the move."""
        if not self.asleep:
            return
        entries = self._movable_entries()
        if any(entry.device.type == "cuda" for entry in entries) and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "got a step captured into a CUDA graph while the state is offloaded, expected the state on the "
                "device; call optimizer.reload() before the capture"
            )
        dense = torch.contiguous_format
        _move(entries, [torch.empty_like(x.local, device=x.device, memory_format=dense) for x in entries])
        self.asleep = False

    def prepare_state(self, name: str, param: Tensor, spec: TensorSpec, state: StateDict) -> None:
        """Prepares ``state`` for a step, in place: creates or checks its entries, and moves them to their devices.

        Raises RuntimeError if an entry has no memory, is a negative view, or is not sharded like the parameter.
        """
        device = self.decide(param).state_device
        if not state:
            state.update(spec.new_state(device))
        reset_stale_low_bits(spec, param, state, device)
        for key in spec.entries.keys() & state.keys():
            with naming_errors(f"{name}: state {key}"):
                entry = state[key] if key == "step" else spec.shard.local(state[key])
            check_storage(name, f"state {key}", entry)
            check_sign(name, f"state {key}", entry)
        self.move_state(param, spec, state)

    def move_state(self, param: Tensor, spec: TensorSpec, state: StateDict) -> None:
        """Moves a parameter's entries to the devices of its residency; replaces them in ``state``.

        With ``offload="state"``, entries are copied into the host tensors that were allocated for them. Entries that
        are not offloaded, or of another shape than expected, stay where they are.
        """
        residency = self.decide(param)
        step = state.get("step")
        if isinstance(step, Tensor) and step.device != residency.step_device:  # ZeroRedundancyOptimizer's is on the CPU
            state["step"] = step.to(residency.step_device)
        if residency.offload == "step":
            for key, value in state.items():
                if key != "step" and spec.shard.local(value).device.type != "cpu":
                    state[key] = spec.wrap_local(key, spec.shard.local(value).cpu())
        host_entries = self._decisions[param].entries if residency.offload == "state" else {}
        for key in host_entries.keys() & state.keys():
            host, local = host_entries[key], spec.shard.local(state[key])
            is_moved, fits = local.data_ptr() == host.data_ptr(), (local.shape, local.dtype) == (host.shape, host.dtype)
            if fits and not is_moved:
                self.synchronize()  # copies of a step's results to this memory may be in flight
                host.copy_(local)
                state[key] = spec.wrap_local(key, host)

    def transfers(self, device: torch.device, offload: str) -> CudaTransfers:
        """Staging slots and copy streams of a device for ``offload`` "state" or "step", made on first use."""
        key = (device, offload)
        if key not in self._transfers:
            if offload == "step":
                warn_of_one_thread()
            self._transfers[key] = CudaTransfers(device, CHUNK_BYTES, to_host=offload == "step")
        return self._transfers[key]

    @property
    def buffer_bytes(self) -> dict[torch.device, int]:
        """Bytes of staging slots (with offload="step" on the host) and memory kept for a :meth:`sleep`, by device."""
        nbytes: Counter[torch.device] = Counter()
        for (device, offload), transfers in self._transfers.items():
            nbytes[_CPU if offload == "step" else device] += transfers.nbytes
        if self._sleep_buffers and not self.asleep:
            nbytes[_CPU] += sum(buffer.nbytes for buffer in self._sleep_buffers)
        return nbytes

    def synchronize(self) -> None:
        """Waits for all copies of steps' results to host memory that are in flight."""
        for transfers in self._transfers.values():
            transfers.synchronize()

    def check_host_memory(self, added_group: dict[str, Any] | None = None) -> None:
        """Checks that the host has memory for the offloaded state of all its ranks; updates :attr:`unallocated_bytes`.

        With ``added_group``, only the state of that new param group is added to the bytes that are known already.
        Raises MemoryError, or RuntimeError if ``offload`` is not possible for a parameter.
        """
        groups = self._optimizer.param_groups if added_group is None else [added_group]
        known = 0 if added_group is None else self.unallocated_bytes
        decisions = self._choose(groups).values()
        new = sum(entry.nbytes for decision in decisions for entry in decision.entries.values())
        if new:
            demand_host_memory(known + new, ranks_here())
        self.unallocated_bytes = known + new

    def _movable_entries(self) -> list[_Movable]:
        """Entries for :meth:`sleep` and :meth:`wake`: all but step counts, of GPU parameters that are not offloaded."""
        group_of = {param: group for group in self._optimizer.param_groups for param in group["params"]}
        entries = []
        for param, state in self._optimizer.state.items():
            if not state or not can_offload(param.device) or self.decide(param).offload is not None:
                continue  # no state, or the state is in host memory already
            spec = self._state_of(param, group_of[param]) if param in group_of else None
            for key, value in state.items():
                is_movable = type(value) is Tensor if spec is None else key in spec.entries
                if is_movable and key != "step":
                    local = value if spec is None else spec.shard.local(value)
                    entries.append(_Movable(param.device, state, key, local, spec))
        return entries

    def _is_decided(self, param: Tensor) -> bool:
        """Whether a residency was chosen for the parameter since its last change of device."""
        return param in self._decisions and self._decisions[param].device == param.device

    def _needs_decision(self, param: Tensor) -> bool:
        """Whether a GPU parameter has no decision yet, and has state or will get some: frozen ones wait."""
        if self._is_decided(param) or not can_offload(param.device):
            return False
        return param.requires_grad or param.grad is not None or bool(self._optimizer.state.get(param))

    def _choose(self, groups: Iterable[Mapping[str, Any]]) -> dict[Tensor, _Decision]:
        """Chooses a residency for all parameters in ``groups`` without a decision; allocates no memory."""
        chosen: dict[Tensor, _Decision] = {}
        for group in groups:
            for param in group["params"]:
                if not self._needs_decision(param):
                    continue
                entries = None  # stays on the device
                if group["offload"] is not None:
                    try:
                        entries = _offloaded_entries(self._state_of(param, group), group["offload"])
                    except UnknownShardError:  # decided once the parameter's shard is known
                        continue
                offload = None if entries is None else group["offload"]
                state_device = param.device if offload is None else _CPU
                step_device = _CPU if offload == "step" else param.device
                residency = Residency(offload, state_device, step_device)
                chosen[param] = _Decision(param.device, residency, entries or {})
        return chosen

    def _decide_all(self) -> None:
        """Chooses a residency for all parameters without one, and allocates host memory for offloaded state."""
        chosen = self._choose(self._optimizer.param_groups)
        offloaded = {param: x.entries for param, x in chosen.items() if x.residency.offload == "state"}
        formats = [entry for entries in offloaded.values() for entry in entries.values()]
        gpu = _first_gpu(param.device for param in offloaded)
        host_tensors = iter(allocate_host_tensors(formats, pin=gpu) if formats else ())
        for param, entries in offloaded.items():
            chosen[param] = chosen[param]._replace(entries={key: next(host_tensors) for key in entries})
        self._decisions.update(chosen)
        self.unallocated_bytes = 0


def _offloaded_entries(spec: TensorSpec, offload: Offload) -> dict[str, Tensor] | None:
    """Meta tensors like the entries that are offloaded for a parameter; None if its state stays on its device.

    Raises RuntimeError if ``offload`` is not possible for the parameter.
    """
    if offload == "step" and isinstance(spec.shard, FlatShard | FlatBuffer):
        raise RuntimeError(
            "offload='step': got parameters of flat shards (FSDP1 or ZeRO), expected whole parameters or DTensors; use "
            "offload='state', fully_shard, or DeepSpeed's offload_optimizer"
        )
    if spec.has_column_cut_blocks:  # each step all-reduces the blocks' extremes, which must be on the device
        return None
    return {key: entry.allocate(_META) for key, entry in spec.entries.items() if key != "step"}


def _move(entries: Sequence[_Movable], destinations: Sequence[Tensor]) -> None:
    """Copies entries into ``destinations``, waits for the copies, and replaces the entries in the state by these."""
    for entry, destination in zip(entries, destinations, strict=True):
        destination.copy_(entry.local, non_blocking=True)
    for device in {entry.device for entry in entries if entry.device.type == "cuda"}:
        torch.cuda.synchronize(device)
    for (_, state, key, _, spec), destination in zip(entries, destinations, strict=True):
        state[key] = destination if spec is None else spec.wrap_local(key, destination)


def _first_gpu(devices: Iterable[torch.device]) -> torch.device | None:
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


def can_offload(device: torch.device) -> bool:
    """Whether state of parameters on ``device`` can be moved to the host. Tests replace this function."""
    return device.type == "cuda"
