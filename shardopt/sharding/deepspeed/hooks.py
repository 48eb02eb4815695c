"""All hooks into DeepSpeed, its engine, ZeRO and list of supported optimizers, and into Accelerate for its sake.

- ``DeepSpeedEngine._is_supported_optimizer`` decides which types a config may name: with the hook, shardopt's, too.
- ``DeepSpeedEngine._configure_basic_optimizer`` makes the optimizer that the config names: with the hook, shardopt's.
- ``DeepSpeedEngine._configure_optimizer`` wraps the optimizer: the hook then reads the contents of flat partitions.
- ``DeepSpeedEngine.load_checkpoint`` loads no state if masters are on NVMe: the hook loads ours, which is in memory.
- ``offload_states`` and ``reload_states`` of ZeRO 3 move FusedAdam's state only: the hooks move ours, too. In all
  stages they separate masters and parameters that are one tensor: the hook joins both again.
- ``ZeROOptimizer._configure_master_weights`` decides whether masters may be in bf16: with the hook they may.
- ``deepspeed.runtime.zero.utils.ZERO_SUPPORTED_OPTIMIZERS`` spares users ``zero_allow_untested_optimizer``.
- Accelerate, and so Hugging Face's Trainer, replaces offloaded optimizers by DeepSpeedCPUAdam, in 32 bits, unless the
  config says ``"zero_force_ds_cpu_optimizer": false``: with the hook, ours stay.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import wraps
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from shardopt.layout.names import number_parameters, use_numbers
from shardopt.optim import OPTIMIZERS, Muon, ShardedOptimizer
from shardopt.sharding.deepspeed.engine import own, refuse_single_states
from shardopt.sharding.deepspeed.masters import share_copies
from shardopt.sharding.deepspeed.muon import divided, leave_gradients
from shardopt.sharding.deepspeed.offload import (
    accepting_bf16_masters,
    loading_state_too,
    move_state_too,
    swap_what_survives,
)
from shardopt.sharding.deepspeed.partitions import assign_partitions
from shardopt.state.options import DEFAULTS, is_shardopt
from shardopt.wrapper.optimizer import QuantizedState

#: The supported versions of DeepSpeed, whose private attributes are known: [first, end).
VERSIONS = ((0, 19, 8), (0, 20))

#: Config types, which may be written in any letter case. DeepSpeed and PyTorch have the names without a number.
TYPES = {name: kind for name, kind in OPTIMIZERS.items() if name.endswith(("4bit", "8bit"))}


def install(engine_module: ModuleType) -> None:
    """Installs the hooks into DeepSpeed; in an unsupported version, has engines refuse shardopt's optimizers.

    Args:
        engine_module: ``deepspeed.runtime.engine``.
    """
    version = _version()
    if not is_known(version):
        _refuse_later(engine_module.DeepSpeedEngine, version)
        return
    from deepspeed.runtime.base_optimizer import ZeROOptimizer  # type: ignore[import-untyped]
    from deepspeed.runtime.zero import utils  # type: ignore[import-untyped]

    engine_class = engine_module.DeepSpeedEngine
    configure_basic, configure = engine_class._configure_basic_optimizer, engine_class._configure_optimizer
    is_supported = engine_class._is_supported_optimizer

    def _is_supported_optimizer(self: Any, name: str) -> bool:
        return name.lower() in TYPES or is_supported(self, name)

    def _configure_basic_optimizer(self: Any, model_parameters: Iterable[Tensor]) -> Any:
        name = self.optimizer_name().lower()
        if name not in TYPES:
            return configure_basic(self, model_parameters)
        params = self.optimizer_params() or {}
        if issubclass(TYPES[name], Muon):
            model_parameters, params = divided(self.module, list(model_parameters), params)
        _check_params(TYPES[name], params)
        return _accepted(self, TYPES[name](model_parameters, **params))

    def _configure_optimizer(self: Any, client_optimizer: Any, model_parameters: Iterable[Tensor]) -> None:
        if self.zero_use_cpu_optimizer():
            _refuse_replacement(client_optimizer)
        with ExitStack() as self._shardopt_pauses:  # stage 0 takes a step without gradients, which must do nothing
            if callable(client_optimizer) and not isinstance(client_optimizer, Optimizer):
                make = client_optimizer
                client_optimizer = lambda params: _accepted(self, make(params))  # noqa: E731
            else:
                _accepted(self, client_optimizer)
            configure(self, client_optimizer, model_parameters)
        if isinstance(self.basic_optimizer, ShardedOptimizer):
            assign_partitions(self)
            number_parameters(self.module)
            use_numbers(self.module.parameters())
            share_copies(self.optimizer)
            swap_what_survives(self.optimizer)
            move_state_too(self.optimizer)
            _warn_of_lost_updates(self)
            refuse_single_states(self.optimizer)
            own(self)

    engine_class._is_supported_optimizer = _is_supported_optimizer
    engine_class._configure_basic_optimizer = _configure_basic_optimizer
    engine_class._configure_optimizer = _configure_optimizer
    engine_class.load_checkpoint = loading_state_too(engine_class.load_checkpoint)
    ZeROOptimizer._configure_master_weights = accepting_bf16_masters(ZeROOptimizer._configure_master_weights)
    known = [ShardedOptimizer, *OPTIMIZERS.values()]
    utils.ZERO_SUPPORTED_OPTIMIZERS.extend(c for c in known if c not in utils.ZERO_SUPPORTED_OPTIMIZERS)


def hook_accelerate(module: ModuleType) -> None:
    """Hooks into ``accelerate.accelerator``, which has the function only if DeepSpeed is installed.

    If another version of Accelerate has the function elsewhere, DeepSpeed's engine refuses the replacement.
    """
    replace = getattr(module, "map_pytorch_optim_to_deepspeed", None)
    if replace is None:
        return

    @wraps(replace)
    def map_pytorch_optim_to_deepspeed(optimizer: Any) -> Any:
        return optimizer if isinstance(optimizer, ShardedOptimizer) else replace(optimizer)

    module.map_pytorch_optim_to_deepspeed = map_pytorch_optim_to_deepspeed  # type: ignore[attr-defined]


def _accepted(engine: Any, optimizer: Any) -> Any:
    """Prepares an engine for shardopt's optimizer; raises if the config does not suit it. Returns the optimizer."""
    if isinstance(optimizer, QuantizedState):
        raise RuntimeError(
            f"got quantize_state of {type(optimizer._inner).__name__} under DeepSpeed, which flattens parameters, "
            "expected one of shardopt's own optimizers; name one in the config, or shard with fully_shard (FSDP2)"
        )
    if isinstance(optimizer, ShardedOptimizer):
        _check_config(engine)
        _check_offload(optimizer.param_groups)
        if isinstance(optimizer, Muon):
            leave_gradients(engine.module)
        if engine.zero_use_cpu_optimizer():
            engine._config.zero_force_ds_cpu_optimizer = False  # shardopt's optimizers run on the CPU, too
        engine._shardopt_pauses.enter_context(optimizer._internals.paused())
    return optimizer


def _refuse_replacement(optimizer: Any) -> None:
    """Raises if a framework has replaced an optimizer of shardopt, as Accelerate does under offload."""
    groups = getattr(optimizer, "param_groups", [])
    if not isinstance(optimizer, ShardedOptimizer) and any(is_shardopt(group) for group in groups):
        raise ValueError(
            f"got {type(optimizer).__name__} with the param groups of one of shardopt's optimizers, expected "
            "shardopt's optimizer itself, which may be offloaded; set "
            '"zero_force_ds_cpu_optimizer": false in the DeepSpeed config'
        )


def _check_params(optimizer: type[ShardedOptimizer], params: Mapping[str, Any]) -> None:
    if "max_grad_norm" in params:
        raise ValueError(
            "optimizer.params: got max_grad_norm, expected DeepSpeed to clip; set gradient_clipping beside optimizer"
        )
    known = [name for name in inspect.signature(optimizer).parameters if name not in ("params", "options")]
    known += DEFAULTS
    unknown = sorted(params.keys() - set(known))
    if unknown:
        raise ValueError(
            f"optimizer.params of {optimizer.__name__}: got {', '.join(unknown)}, expected some of {', '.join(known)}"
        )


def _version() -> str:
    # Not deepspeed.__version__: the import of that module may still be under way.
    from deepspeed.git_version_info import version  # type: ignore[import-untyped]

    return str(version)


def is_known(version: str) -> bool:
    """Whether a version of DeepSpeed is supported, so that its private attributes are as shardopt expects."""
    return VERSIONS[0] <= tuple(int(part) for part in re.findall(r"\d+", version)[:3]) < VERSIONS[1]


def _refuse_later(engine_class: Any, version: str) -> None:
    """Has engines of an unsupported version refuse shardopt's optimizers; other optimizers work as before."""
    initialize = engine_class.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given = [*args, *kwargs.values()]
        config = kwargs.get("config_class")
        named = str(getattr(config, "optimizer_name", None) or "").lower()
        if named in TYPES or any(isinstance(value, ShardedOptimizer) for value in given):
            known = " to before ".join(".".join(map(str, v)) for v in VERSIONS)
            raise RuntimeError(
                f"got DeepSpeed {version}, expected {known}, whose partitions are known; install one of these versions"
            )
        initialize(self, *args, **kwargs)

    engine_class.__init__ = __init__


def _check_config(engine: Any) -> None:
    if engine.zenflow_config() is not None:
        raise ValueError("zero_optimization.zenflow: got a setting, expected null; leave zenflow out")
    if engine.zero_optimization() and engine.zero_elastic_checkpoint():
        raise ValueError(
            "zero_optimization.elastic_checkpoint: got true, expected false, as it would strip padding from tensors "
            "without padding; use shardopt.checkpoint.save, which loads on any number of ranks"
        )
    if engine.load_universal_checkpoint():
        raise ValueError(
            "checkpoint.load_universal: got true, expected false, as DeepSpeed's universal checkpoints have float32 "
            "moments only; use shardopt.checkpoint.save(path, engine) and load, for any number of ranks and any stage"
        )


def _check_offload(groups: Iterable[Mapping[str, Any]]) -> None:
    """Raises if an optimizer is to offload its state by itself: DeepSpeed moves masters, gradients and state."""
    for group in groups:
        if group["offload"] is not None:
            raise ValueError(
                f"offload: got {group['offload']!r} under DeepSpeed, which offloads by itself, expected None; leave "
                'offload out, and set zero_optimization.offload_optimizer to {"device": "cpu"} in the DeepSpeed config'
            )


def _warn_of_lost_updates(engine: Any) -> None:
    """Warns of bf16 masters that lose small updates, as DeepSpeed's own check is switched off for our optimizers."""
    groups = engine.basic_optimizer.param_groups
    kept = all(group["master_weight_bits"] or group["stochastic_rounding"] for group in groups)
    if engine.bf16_master_weights_and_gradients() and not kept and dist.get_rank() == 0:
        warnings.warn(
            "got bf16_master_weights_and_grads without master_weight_bits: updates smaller than half of a weight's "
            "last place are lost; set master_weight_bits to 24 or 32, or stochastic_rounding, in optimizer.params",
            RuntimeWarning,
            stacklevel=2,
        )
