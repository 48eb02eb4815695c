"""Differences between versions of PyTorch that tests must know.

Tests of what an older version lacks are skipped there. :func:`mend_training_on_the_cpu` corrects faults of PyTorch 2.6
and 2.8 in the process that calls it. Other versions before 2.11 were not tried.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as dcp_state_dict
from torch.distributed.tensor.placement_types import _StridedShard

_RELEASE = tuple(int(number) for number in torch.__version__.split("+")[0].split(".")[:2])

needs_scaled_mm_on_the_cpu = pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm", "CPU"),
    reason="PyTorch has _scaled_mm on GPUs alone before 2.7",
)
needs_fsdp2_on_the_cpu = pytest.mark.skipif(
    _RELEASE < (2, 9), reason="FSDP2 on the CPU raises in PyTorch 2.6 and sums the gradients of ranks in 2.8"
)
needs_fsdp1_on_some_ranks = pytest.mark.skipif(
    not hasattr(dcp_state_dict, "_get_fsdp_process_group"),
    reason="PyTorch up to 2.11 waits for all ranks though the model is on some",
)

#: Whether the state dict of PyTorch's AdamW differs from Adam's; else nothing tells which it is.
adamw_names_itself = "decoupled_weight_decay" in torch.optim.AdamW([torch.zeros(1)]).defaults


def _cuts_uneven_strided_shards() -> bool:
    """Whether 97 rows in two parts, each in two, are what FSDP2 and tensor parallelism make of them, as from 2.11 on.

    PyTorch 2.6 refuses to cut them, and 2.8 cuts them otherwise than FSDP2.
    """
    placement: Any = _StridedShard(0, split_factor=2)
    try:
        parts, _ = placement._split_tensor(torch.empty(97), 2, with_padding=False)
    except AssertionError:
        return False
    return [len(part) for part in parts] == [25 + 24, 24 + 24]


cuts_uneven_strided_shards = _cuts_uneven_strided_shards()


def mend_training_on_the_cpu() -> None:
    """Lets models train on the CPU as on a GPU, in this process, on PyTorch 2.6 and 2.8, too.

    There Gloo's reduce-scatter sums where FSDP2 asks for a mean (https://github.com/pytorch/pytorch/issues/162338).
    In 2.6 streams on the CPU lack two methods, which do nothing there; gathering FSDP2's weights again for the
    backward pass counts as a change of them; and a group that is destroyed while one of its threads frees a tensor of
    Python waits for that thread, which waits for the interpreter.
    """
    if _RELEASE >= (2, 9):
        return
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group

    _fsdp_collectives._get_gradient_divide_factors = _divided_sums(_fsdp_collectives._get_gradient_divide_factors)
    if _RELEASE >= (2, 7):
        return
    dist.destroy_process_group = _with_threads_at_rest(dist.destroy_process_group)
    torch.cpu.Stream.record_event = lambda stream: "an event"
    torch.cpu.Stream.wait_event = lambda stream, event: None
    _fsdp_param_group.foreach_all_gather_copy_out = _without_new_versions(_fsdp_param_group.foreach_all_gather_copy_out)


def _divided_sums(factors_of: Callable[..., Any]) -> Callable[..., Any]:
    """Sums and a division where FSDP2 asks for means."""

    def factors(scatter: dist.ProcessGroup, reduce: dist.ProcessGroup | None, *others: Any, **options: Any) -> Any:
        found = factors_of(scatter, reduce, *others, **options)
        if found[1] is not None:
            return found
        ranks = scatter.size() * (1 if reduce is None else reduce.size())
        return 1.0, float(ranks), *(dist.ReduceOp.SUM for _ in found[2:])

    return factors


def _without_new_versions(copy_out: Callable[..., None]) -> Callable[..., None]:
    """The gathered weights keep the version that autograd saw."""

    def copy(result: Any, params: Any, *others: Any) -> None:
        outputs = [output for param in params for output in param.all_gather_outputs]
        versions = [output._version for output in outputs]
        copy_out(result, params, *others)
        for output, version in zip(outputs, versions, strict=True):
            torch._C._autograd._unsafe_set_version_counter(output, version)

    return copy


def _with_threads_at_rest(destroy: Callable[..., None]) -> Callable[..., None]:
    """Leaves Gloo's threads the interpreter for long enough to free what they hold."""

    def destroy_process_group(group: Any = None) -> None:
        time.sleep(0.1)
        destroy(group)

    return destroy_process_group
