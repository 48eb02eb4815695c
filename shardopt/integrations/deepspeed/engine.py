"""A DeepSpeed engine as a model and an optimizer, for checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn import Module
from torch.optim import Optimizer


def is_engine(model: Module) -> bool:
    """Whether a module is a DeepSpeedEngine; DeepSpeed is not imported to find out."""
    return any(cls.__name__ == "DeepSpeedEngine" for cls in type(model).__mro__)


@contextmanager
def opened(engine: Any) -> Iterator[tuple[Module, Optimizer]]:
    """The engine's bare model and our optimizer, with the flat masters that it steps in its param groups.

    ZeRO 3 shows them to the optimizer one at a time, and none between steps. Parameters that no optimizer has (frozen
    ones) are gathered meanwhile, whole on every rank, and written back.
    """
    wrapper = engine.optimizer
    if not hasattr(wrapper, "_set_fp32_optimizer_param_groups"):
        yield engine.module, engine.basic_optimizer
        return
    from deepspeed.runtime.zero import GatheredParameters  # type: ignore[import-untyped]

    stepped = {id(param) for group in wrapper.fp16_groups for param in group}
    frozen = [param for param in engine.module.parameters() if id(param) not in stepped]
    wrapper._set_fp32_optimizer_param_groups()
    try:
        with GatheredParameters(frozen, modifier_rank=0, enabled=bool(frozen)):
            yield engine.module, engine.basic_optimizer
    finally:
        wrapper._clear_fp32_optimizer_param_groups()


def refresh(engine: Any) -> None:
    """Makes the parameters that the model computes with what the masters say, after these were loaded."""
    wrapper = engine.optimizer
    if hasattr(wrapper, "update_lp_params"):  # ZeRO 1 and 2, BF16_Optimizer
        wrapper.update_lp_params()
    elif hasattr(wrapper, "_reassign_or_swap_out_partitioned_parameters"):  # ZeRO 3
        for index in range(len(wrapper.fp32_partitioned_groups_flat)):
            wrapper._reassign_or_swap_out_partitioned_parameters(index)
        persistent = wrapper.persistent_parameters
        if persistent:
            persistent[0].partition(persistent)
            persistent[0].all_gather(persistent)
