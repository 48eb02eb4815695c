"""DeepSpeed's memory: bf16 masters with offload, tensors that stay when masters go to NVMe, and shared storage.

DeepSpeed keeps masters beside the parameters and copies them to the parameters after each step, even if both have one
dtype (``bf16_master_weights_and_grads``, or a model in float32). Here both share memory if they are on one device, and
masters in the host's memory share it with the staging buffer through which they are copied to the device, as ZeRO 3's
two copies of gradients do. DeepSpeed's copies between tensors that share memory then do nothing.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardopt.optim import ShardedOptimizer


def keep_state_in_memory(wrapper: Any) -> None:
    """Has ZeRO 3 with ``offload_optimizer: {device: nvme}`` swap masters and sector-aligned gradients only.

    DeepSpeed would read state back into buffers of the masters' dtype, and a gradient to its offset in the sub-group's
    gradient: at an offset within a disk's sector its ``async_io`` op reads nothing, and reports success.
    """
    swapper = getattr(wrapper, "optimizer_swapper", None)
    if swapper is None:
        return
    swap_out = swapper._swap_out_gradients

    def _swap_out_gradients(
        parameter: Tensor, gradient_offsets: list[int], gradient_tensors: list[Tensor], gradient_swapper: Any
    ) -> None:
        for offset, gradient in zip(gradient_offsets, gradient_tensors, strict=True):
            if offset * gradient.element_size() % 512:  # direct reads (O_DIRECT) begin at a sector of the disk
                gradient.swappable = False  # type: ignore[attr-defined]
        swap_out(parameter, gradient_offsets, gradient_tensors, gradient_swapper)

    swapper._swap_out_gradients = _swap_out_gradients
    swapper._get_state_tensors = lambda parameter: []
    if dist.get_rank() == 0:
        warnings.warn(
            "offload_optimizer.device is nvme: masters and gradients go there, the optimizer's state (codes, scales) "
            "stays in the host's memory",
            RuntimeWarning,
            stacklevel=2,
        )


def hook_offload_states(wrapper: Any) -> None:
    """Has ZeRO's ``offload_states`` and ``reload_states`` move our state: ZeRO 3 moves that of FusedAdam only.

    After a reload, masters and parameters have separate memory again: :func:`share_storage` is then repeated.
    """
    if not hasattr(wrapper, "reload_states"):
        return
    reload = wrapper.reload_states
    if type(wrapper).__name__ == "DeepSpeedZeroOptimizer_Stage3":
        reload = _hook_offload_states_of_stage3(wrapper)

    def reload_states(*args: Any, **kwargs: Any) -> None:
        reload(*args, **kwargs)
        share_storage(wrapper)

    wrapper.reload_states = reload_states


def _hook_offload_states_of_stage3(wrapper: Any) -> Callable[..., None]:
    """Replaces ZeRO 3's ``offload_states``, to move our state, too; returns a ``reload_states`` that moves it back."""
    from deepspeed.ops.adam.fused_adam import FusedAdam  # type: ignore[import-untyped]
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum  # type: ignore[import-untyped]

    optimizer, offload, reload = wrapper.optimizer, wrapper.offload_states, wrapper.reload_states
    stateless = object.__new__(FusedAdam)
    stateless.state = {}

    @contextmanager
    def fused_adam() -> Iterator[None]:
        wrapper.optimizer = stateless
        try:
            yield
        finally:
            wrapper.optimizer = optimizer

    def offload_states(include: Container[Any] | None = None, *args: Any, **kwargs: Any) -> None:
        if include is None or OffloadStateTypeEnum.optim_states in include:
            optimizer.offload()
            optimizer.synchronize()
        with fused_adam():
            offload(include, *args, **kwargs)

    def reload_states(*args: Any, **kwargs: Any) -> None:
        with fused_adam():
            reload(*args, **kwargs)
        optimizer.reload()

    wrapper.offload_states = offload_states
    return reload_states


def wrap_load_checkpoint(load: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``DeepSpeedEngine.load_checkpoint``, which with masters on NVMe reads swap files only: loads our state."""
    signature = inspect.signature(load)

    def load_checkpoint(self: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = load(self, *args, **kwargs)
        call = signature.bind(self, *args, **kwargs)
        call.apply_defaults()
        has_state = call.arguments["load_optimizer_states"] and not call.arguments["load_module_only"]
        is_ours = isinstance(getattr(self, "basic_optimizer", None), ShardedOptimizer)
        if is_ours and has_state and loaded[0] is not None and self.zero_nvme_offload_optimizer():
            load_dir = call.arguments["load_dir"]
            _load_state(self, load_dir, os.path.relpath(os.path.dirname(loaded[0]), load_dir))
        return loaded

    return load_checkpoint


def _load_state(engine: Any, load_dir: str, tag: str) -> None:
    """Loads the optimizer's state, and the masters that were not swapped, from this rank's file."""
    wrapper = engine.optimizer
    saved = engine._get_all_zero_checkpoints(load_dir, tag)[dist.get_rank(wrapper.dp_process_group)]
    wrapper._set_fp32_optimizer_param_groups()
    try:
        engine.basic_optimizer.load_state_dict(saved["optimizer_state_dict"])
    finally:
        wrapper._clear_fp32_optimizer_param_groups()
    masters = zip(wrapper.fp32_partitioned_groups_flat, saved["fp32_flat_groups"], strict=True)
    for index, (master, value) in enumerate(masters):
        if not wrapper._swappable_optimizer_subgroup(index):
            master.data.copy_(value)
            wrapper._reassign_or_swap_out_partitioned_parameters(index)
    wrapper.checkpoint_event_epilogue()


@contextmanager
def masters_in_memory(wrapper: Any) -> Iterator[None]:
    """Context in which masters that ZeRO 3 keeps on NVMe are in the host's memory; on exit, they are written back."""
    swapped: list[int] = []
    if getattr(wrapper, "swap_optimizer", False):
        sub_groups = range(len(wrapper.fp32_partitioned_groups_flat))
        swapped = [index for index in sub_groups if wrapper._swappable_optimizer_subgroup(index)]
    copies = []
    for index in swapped:
        wrapper._optimizer_states_and_gradient_swap_in(index)  # into one of the swapper's few buffers
        copies.append(wrapper.fp32_partitioned_groups_flat[index].detach().clone())
        wrapper._release_swap_buffers(index)
    for index, copy in zip(swapped, copies, strict=True):
        wrapper.fp32_partitioned_groups_flat[index].data = copy
    try:
        yield
    finally:
        for index, copy in zip(swapped, copies, strict=True):
            master = wrapper.fp32_partitioned_groups_flat[index]
            master.data = torch.empty(0, dtype=copy.dtype, device="cpu")
            wrapper._optimizer_states_and_gradient_swap_in(index)  # takes a buffer, which the swap-out needs
            master.data.copy_(copy)
            wrapper._optimizer_states_and_gradient_swap_out(index)


def share_storage(wrapper: Any) -> None:
    """Makes tensors that DeepSpeed's optimizer wrapper holds twice share their storage, where the masters are.

    Saves 2 bytes per owned parameter with masters in bf16, 4 in float32; twice as much (gradients, too) under ZeRO 3
    that offloads the parameters, too.
    """
    kind = type(wrapper).__name__
    if kind == "DeepSpeedZeroOptimizer":
        _share_stages_1_and_2(wrapper)
    elif kind == "DeepSpeedZeroOptimizer_Stage3":
        _share_stage_3(wrapper)


def _share_stages_1_and_2(wrapper: Any) -> None:
    """ZeRO 1 and 2: masters share storage with parameters, or under offload with the staging buffer."""
    masters = wrapper.single_partition_of_fp32_groups
    if wrapper.cpu_offload:
        staging = wrapper.param_buffer_of_bit16_for_cpu_offload_groups
        if not _frees_by_address():
            staging[:] = [m.data if _are_alike(m, x) else x for m, x in zip(masters, staging, strict=True)]
        return
    shared = False
    for index, master in enumerate(masters):
        rank = dist.get_rank(wrapper.real_dp_process_group[index])
        shared |= _share(master, wrapper.parallel_partitioned_bit16_groups[index][rank])
    if shared:
        wrapper._link_all_hp_params()  # renews the parameters' views of masters, which have the old memory
    if shared and "_get_groups_without_padding" not in vars(wrapper):
        without_padding = wrapper._get_groups_without_padding
        # Clones for checkpoints: torch.save writes a view's whole storage, here the parameters of all ranks.
        wrapper._get_groups_without_padding = lambda groups: [group.clone() for group in without_padding(groups)]


def _share_stage_3(wrapper: Any) -> None:
    """ZeRO 3: masters share storage with parameters, and the two copies of offloaded gradients share theirs."""
    masters = wrapper.fp32_partitioned_groups_flat
    if bool(wrapper.offload_optimizer) == bool(wrapper.offload_param):
        for master, partition in zip(masters, wrapper.fp16_partitioned_groups_flat, strict=True):
            if partition is not None:  # None: it is on NVMe
                _share(master, partition)
    if wrapper.offload_optimizer and not _frees_by_address():
        start = 0
        for index, master in enumerate(masters):
            numel = int(wrapper.fp16_partitioned_groups_flat_numel[index])
            gradient = wrapper.grad_partitions_flat_buffer.narrow(0, start, numel)
            start += numel
            if master.grad is not None and _are_alike(master.grad, gradient):
                master.grad = gradient


def _share(master: Tensor, partition: Tensor) -> bool:
    """Makes a master share a partition's storage if both have the same shape, dtype and device; returns whether."""
    if not _are_alike(master, partition):
        return False
    master.data = partition.data
    return True


def _are_alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def _frees_by_address() -> bool:
    """Whether DeepSpeed pins memory itself and frees it by address: two tensors must then not share pinned memory."""
    return os.environ.get("DS_PIN_MEMORY_BACKEND", "torch").strip().lower() == "native"
