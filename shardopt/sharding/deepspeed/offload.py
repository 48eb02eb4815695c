"""DeepSpeed's offload: bf16 masters with offload, and tensors that stay in memory when masters go to NVMe."""

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
from shardopt.sharding.deepspeed.masters import share_storage

#: Bytes of a disk's sector: direct reads (O_DIRECT) must begin at a multiple.
_SECTOR = 512


def wrap_configure_master_weights(configure: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``ZeROOptimizer._configure_master_weights``: accepts bf16 masters for our optimizers, even with offload.

    For bf16 masters with offload DeepSpeed demands its own CPU Adam, with moments in bf16. Our optimizers step bf16
    parameters anywhere, and keep the low bits of masters in their state (``master_weight_bits``).
    """

    def _configure_master_weights(self: Any, **settings: Any) -> Any:
        if isinstance(self.optimizer, ShardedOptimizer):
            settings["bf16_offload_validator"] = None
        return configure(self, **settings)

    return _configure_master_weights


def keep_state_in_memory(wrapper: Any) -> None:
    """Has ZeRO 3 with ``offload_optimizer: {device: nvme}`` swap masters and sector-aligned gradients only.

    DeepSpeed reads state back into buffers of the masters' dtype, which corrupts quantized codes: all state stays in
    memory. DeepSpeed reads a gradient back to its offset in the sub-group's gradient. If the offset is no multiple of a
    disk's sector, DeepSpeed's ``async_io`` op reads nothing and reports success: such gradients stay in memory, too.
    """
    swapper = getattr(wrapper, "optimizer_swapper", None)
    if swapper is None:
        return
    swap_out = swapper._swap_out_gradients

    def _swap_out_gradients(
        parameter: Tensor, gradient_offsets: list[int], gradient_tensors: list[Tensor], gradient_swapper: Any
    ) -> None:
        for offset, gradient in zip(gradient_offsets, gradient_tensors, strict=True):
            if offset * gradient.element_size() % _SECTOR:
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
    """Has ZeRO's ``offload_states`` and ``reload_states`` move our state.

    ZeRO 1 and 2 move any state; ZeRO 3 demands FusedAdam, and moves its moments only. After a reload, masters and
    parameters have separate memory again: :func:`share_storage` is then repeated.
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
    """Replaces ZeRO 3's ``offload_states``, to move our state, too; returns a ``reload_states`` that moves it back.

    DeepSpeed's own methods run while the wrapper's optimizer is a FusedAdam without state, which they demand.
    """
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
