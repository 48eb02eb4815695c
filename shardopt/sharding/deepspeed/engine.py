"""Lets checkpoints take a DeepSpeed engine for a model: finds its bare model, its optimizer and the master weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from shardopt.sharding.deepspeed.offload import masters_in_memory
from shardopt.sharding.deepspeed.partitions import unnamed_experts
from shardopt.sharding.in_model import replaced_parameters

#: Engines by their bare models, which Hugging Face's Trainer hands to callbacks.
_engines: weakref.WeakKeyDictionary[Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def register_engine(engine: Any) -> None:
    """Registers an engine, so that :func:`engine_of` finds it by its bare model."""
    _engines[engine.module] = weakref.ref(engine)


def engine_of(model: Module) -> Any:
    """The engine that a model is, or that a bare model is in; None for any other model."""
    if any(cls.__name__ == "DeepSpeedEngine" for cls in type(model).__mro__):
        return model
    reference = _engines.get(model)
    return None if reference is None else reference()


def has_optimizer(model: Module, optimizer: Optimizer) -> bool:
    """Whether an optimizer is the engine's wrapper, the optimizer inside it, or Accelerate's wrapper of one of them."""
    engine = engine_of(model)
    candidates = (optimizer, getattr(optimizer, "optimizer", None))
    return any(known is not None and known in (engine.optimizer, engine.basic_optimizer) for known in candidates)


@contextmanager
def open_engine(model: Module) -> Iterator[tuple[Module, Optimizer]]:
    """Yields the engine's bare model and shardopt's optimizer, with the flat master weights in its param groups.

    Outside of this context, ZeRO 3's param groups have one master at a time, or none. Inside, frozen parameters, which
    no optimizer has, are all-gathered; then each rank's part is written back. Under ZeRO 0 with bf16 or fp16, masters
    have the parameters' shapes and replace the parameters in the model.
    """
    engine = engine_of(model)
    wrapper, unnamed = engine.optimizer, unnamed_experts(engine.module)
    if engine.pipeline_parallelism or max(engine.autotp_size(), engine.mp_world_size) > 1 or unnamed:
        raise ValueError(
            "got a DeepSpeed engine with tensor or pipeline parallelism or AutoEP, whose ranks hold different "
            "parameters under one name, expected data parallelism and experts of deepspeed.moe.layer.MoE only; use "
            "engine.save_checkpoint and load_checkpoint"
        )
    with ExitStack() as stack:
        if hasattr(wrapper, "fp32_groups"):  # ZeRO 0 with bf16 or fp16
            stack.enter_context(replaced_parameters(engine.module, _masters(wrapper)))
        stack.enter_context(masters_in_groups(wrapper))
        if hasattr(wrapper, "_set_fp32_optimizer_param_groups"):  # ZeRO 3
            from deepspeed.runtime.zero import GatheredParameters  # type: ignore[import-untyped]

            stepped = {id(param) for group in wrapper.fp16_groups for param in group}
            frozen = [param for param in engine.module.parameters() if id(param) not in stepped]
            # On exit, rank 0's values are broadcast, as a load may have changed them.
            stack.enter_context(GatheredParameters(frozen, modifier_rank=0, enabled=bool(frozen)))
        yield engine.module, engine.basic_optimizer


@contextmanager
def masters_in_groups(wrapper: Any) -> Iterator[None]:
    """Puts ZeRO 3's flat masters into memory and into the param groups, where other stages have theirs anyway."""
    with masters_in_memory(wrapper):
        getattr(wrapper, "_set_fp32_optimizer_param_groups", lambda: None)()
        try:
            yield
        finally:
            getattr(wrapper, "_clear_fp32_optimizer_param_groups", lambda: None)()


def _masters(wrapper: Any) -> dict[Tensor, Tensor]:
    """ZeRO 0: the float32 masters, by parameter."""
    groups = zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True)
    return {param: master for params, masters in groups for param, master in zip(params, masters, strict=True)}


def copy_masters(model: Module) -> None:
    """Copies the master weights, after a checkpoint was loaded into them, to the model's parameters."""
    wrapper = engine_of(model).optimizer
    if hasattr(wrapper, "fp32_groups"):  # ZeRO 0 with bf16 or fp16
        for param, master in _masters(wrapper).items():
            param.data.copy_(master.data)
    elif hasattr(wrapper, "update_lp_params"):  # ZeRO 1 and 2, BF16_Optimizer
        wrapper.update_lp_params()
    elif hasattr(wrapper, "_reassign_or_swap_out_partitioned_parameters"):  # ZeRO 3
        wrapper.checkpoint_event_prologue()  # drops parameters that a forward pass has gathered
        with masters_in_memory(wrapper):
            for index in range(len(wrapper.fp32_partitioned_groups_flat)):
                wrapper._reassign_or_swap_out_partitioned_parameters(index)
        wrapper.checkpoint_event_epilogue()


def refuse_state_access(wrapper: Any) -> None:
    """Has DeepSpeed's ``safe_get_full_optimizer_state`` and the like raise on all ranks for our state."""
    if type(wrapper).__name__ == "DeepSpeedZeroOptimizer_Stage3":
        wrapper._get_fp32_opt_state_partition = _refuse_states(wrapper._get_fp32_opt_state_partition)
    elif hasattr(wrapper, "_link_all_hp_params"):  # ZeRO 1 and 2, BF16_Optimizer
        wrapper._hp_optimizer_states_linked = True  # else DeepSpeed keeps views of any tensor of the masters' shape
        link = wrapper._link_all_hp_params

        def _link_all_hp_params() -> None:
            link()  # binds methods to the parameters
            for group in wrapper.bf16_groups if hasattr(wrapper, "bf16_groups") else wrapper.bit16_groups:
                for param in group:
                    param.get_full_hp_param = _refuse_states(param.get_full_hp_param)
                    param.set_full_hp_param = _refuse_states(param.set_full_hp_param)

        wrapper._link_all_hp_params = _link_all_hp_params
        _link_all_hp_params()


def _refuse_states(access: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a DeepSpeed method that accesses a master or its state: raises unless ``optim_state_key`` is None."""

    @wraps(access)
    def method(*args: Any, optim_state_key: str | None = None, **kwargs: Any) -> Any:
        key = next((arg for arg in args if isinstance(arg, str)), optim_state_key)  # by position or by name
        if key is not None:
            raise RuntimeError(
                f"got a call for the optimizer state {key!r} of one parameter, expected none, as the state is "
                "quantized; use shardopt.checkpoint.save(path, engine), and load it without DeepSpeed to look into it"
            )
        return access(*args, **kwargs)

    return method
