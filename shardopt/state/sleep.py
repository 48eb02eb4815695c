"""State that sleeps in the host's memory while other work has the device: see ``ShardedOptimizer.offload``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardopt.state.host_memory import Entry, make_homes
from shardopt.state.slice_spec import StateDict
from shardopt.state.tensor_state import TensorState


class Stateful(NamedTuple):
    """A parameter whose state is moved.

    Attributes:
        device: the parameter's device.
        state: the optimizer's entries of the parameter, which are replaced in place.
        spec: describes the state; None for a parameter of no param group now, such as ZeRO 3's between steps, whose
            entries are plain tensors.
    """

    device: torch.device
    state: StateDict
    spec: TensorState | None

    def entries(self) -> dict[str, Tensor]:
        """This rank's part of the entries that are moved: all but the step count, 4 bytes that the kernels count up."""
        if self.spec is None:
            return {key: value for key, value in self.state.items() if key != "step" and type(value) is Tensor}
        names = [key for key in self.state if key in self.spec.state_names and key != "step"]
        return {key: self.spec.shard.local(self.state[key]) for key in names}

    def replace(self, key: str, local: Tensor) -> None:
        """Replaces this rank's part of an entry; its sharding does not change."""
        self.state[key] = local if self.spec is None else self.spec.like(key, local)


class Sleep:
    """Moves the state to the host's memory and back. A stream of its own copies from and to a GPU.

    The host's memory is kept from one sleep to the next: page-locking memory takes longer than the copies.

    Attributes:
        asleep: whether the state is in the host's memory, or on the way there.
    """

    def __init__(self) -> None:
        self.asleep = False
        self._beds: list[dict[str, Entry]] = []  # the entries' places in the host's memory
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._arriving: dict[torch.device, torch.cuda.Event] = {}  # the ends of copies to devices

    def begin(self, tensors: Sequence[Stateful]) -> None:
        """Copies the state of all parameters to the host's memory, and lets go of the device's.

        Args:
            tensors: all parameters with state.

        Raises:
            MemoryError: the host has too little memory. Nothing was moved.
        """
        entries = [tensor.entries() for tensor in tensors]
        gpu = next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)
        formats = [{key: (local.shape, local.dtype) for key, local in of.items() if local.nbytes} for of in entries]
        if formats != [{key: (bed.like.shape, bed.like.dtype) for key, bed in beds.items()} for beds in self._beds]:
            self._beds = []  # freed before new memory is allocated
            likes = [
                {key: torch.empty(x.shape, dtype=x.dtype, device="meta") for key, x in of.items()} for of in entries
            ]
            self._beds = make_homes(likes, pin=gpu) if any(formats) else [{} for _ in formats]
        self._follow(tensors)
        for tensor, of, beds in zip(tensors, entries, self._beds, strict=True):
            for key, bed in beds.items():
                home = bed.view()
                self._copy(home, of[key], tensor.device)
                tensor.replace(key, home)
        self._arriving.clear()
        self.asleep = True

    def end(self, tensors: Sequence[Stateful]) -> None:
        """Copies the state of all parameters to the parameters' devices."""
        entries = [tensor.entries() for tensor in tensors]
        places = [
            {key: torch.empty(local.shape, dtype=local.dtype, device=tensor.device) for key, local in of.items()}
            for tensor, of in zip(tensors, entries, strict=True)
        ]
        self._follow(tensors)
        for tensor, of, places_of in zip(tensors, entries, places, strict=True):
            for key, there in places_of.items():
                self._copy(there, of[key], tensor.device)
                tensor.replace(key, there)
        self._arriving = {device: stream.record_event() for device, stream in self._streams.items()}
        self.asleep = False

    def arrive(self) -> bool:
        """Has the current streams wait for the copies to their devices.

        Returns:
            Whether all copies are complete.

        Raises:
            RuntimeError: copies are under way while a CUDA graph is captured, as the graph could not wait for them.
        """
        for device, event in list(self._arriving.items()):
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "got a step captured into a CUDA graph while reload() copies the state, expected copies that are "
                    "complete; call optimizer.synchronize() before the capture"
                )
            if event.query():  # type: ignore[no-untyped-call]
                del self._arriving[device]
            else:
                torch.cuda.current_stream(device).wait_event(event)
        return not self._arriving

    def synchronize(self) -> None:
        """Waits until all copies are complete."""
        for stream in self._streams.values():
            stream.synchronize()
        self._arriving.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of the host's memory outside of state entries: all of it while awake, else the alignment's."""
        hosts = {id(bed.host): bed.host.memory.nbytes for beds in self._beds for bed in beds.values()}
        taken = sum(bed.like.nbytes for beds in self._beds for bed in beds.values()) if self.asleep else 0
        return sum(hosts.values()) - taken

    def _follow(self, tensors: Sequence[Stateful]) -> None:
        """Has copies wait for work that is queued now, which may use the state and freed memory."""
        for device in {tensor.device for tensor in tensors if tensor.device.type == "cuda"}:
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._streams[device].wait_stream(torch.cuda.current_stream(device))

    def _copy(self, to: Tensor, source: Tensor, device: torch.device) -> None:
        if device.type != "cuda":
            to.copy_(source)
            return
        stream = self._streams[device]
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)
        (to if to.is_cuda else source).record_stream(stream)  # it may be freed before the copy is made
