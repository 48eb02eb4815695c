"""Saves memory where DeepSpeed holds two tensors with equal contents: both get the same storage.

DeepSpeed keeps masters beside the parameters and copies them to the parameters after each step, even if both have one
dtype (``bf16_master_weights_and_grads``, or a model in float32). Here masters and parameters of one dtype share memory
if both are on the device, or both on the host. Masters in the host's memory share it with the staging buffer through
which they are copied to the device, and ZeRO 3's two copies of gradients share theirs. DeepSpeed's copies between
tensors that share memory then do nothing.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch import Tensor


def share_storage(wrapper: Any) -> None:
    """Makes tensors that DeepSpeed's optimizer wrapper holds twice share their storage.

    Saves 2 bytes per owned parameter with masters in bf16, 4 in float32, where the masters are: on the device or in the
    host's memory. Under ZeRO 3 that offloads the parameters, too, twice as much: gradients and masters.
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
