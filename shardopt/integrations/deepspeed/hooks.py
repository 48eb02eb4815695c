"""All that is hooked into DeepSpeed: three methods of its engine, and its list of optimizers that ZeRO supports.

- ``DeepSpeedEngine._is_supported_optimizer`` says what types a config may name.
- ``DeepSpeedEngine._configure_basic_optimizer`` makes the optimizer that the config names: it learns our types.
- ``DeepSpeedEngine._configure_optimizer`` wraps it: afterwards we look at what its flat partitions are made of.
- ``deepspeed.runtime.zero.utils.ZERO_SUPPORTED_OPTIMIZERS`` spares users ``zero_allow_untested_optimizer``.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

import shardopt.optim
from shardopt.integrations.deepspeed.partitions import assign_partitions
from shardopt.optim import ShardedOptimizer
from shardopt.optim.options import DEFAULTS

#: The versions of DeepSpeed whose insides are known: [first, end).
VERSIONS = ((0, 19), (0, 20))

#: Config types, which may be written in any letter case.
TYPES: dict[str, type[ShardedOptimizer]] = {
    name.lower(): getattr(shardopt.optim, name) for name in shardopt.optim.__all__ if name.endswith("8bit")
}


def install(engine_module: ModuleType) -> None:
    """Hooks into DeepSpeed.

    Args:
        engine_module: ``deepspeed.runtime.engine``.
    """
    from deepspeed.runtime.zero import utils  # type: ignore[import-untyped]

    engine_class = engine_module.DeepSpeedEngine
    configure_basic, configure = engine_class._configure_basic_optimizer, engine_class._configure_optimizer
    is_supported = engine_class._is_supported_optimizer

    def _is_supported_optimizer(self: Any, name: str) -> bool:
        if name.lower() in TYPES or is_supported(self, name):
            return True
        ours = ", ".join(sorted(c.__name__ for c in TYPES.values()))
        raise ValueError(
            f"got optimizer type {name!r}, expected one of shardopt's ({ours}), of DeepSpeed's "
            f"({', '.join(engine_module.DEEPSPEED_OPTIMIZERS)}) or of torch.optim's"
        )

    def _configure_basic_optimizer(self: Any, model_parameters: Iterable[Tensor]) -> Any:
        name = self.optimizer_name().lower()
        if name not in TYPES:
            return configure_basic(self, model_parameters)
        params = self.optimizer_params() or {}
        _check_params(TYPES[name], params)
        return TYPES[name](model_parameters, **params)

    def _configure_optimizer(self: Any, client_optimizer: Any, model_parameters: Iterable[Tensor]) -> None:
        def accepted(optimizer: Any) -> Any:
            if isinstance(optimizer, ShardedOptimizer) and self.zero_use_cpu_optimizer():
                self._config.zero_force_ds_cpu_optimizer = False  # ours is one for the CPU, too
            return optimizer

        if callable(client_optimizer) and not isinstance(client_optimizer, Optimizer):
            make = client_optimizer
            client_optimizer = lambda params: accepted(make(params))  # noqa: E731
        else:
            accepted(client_optimizer)
        with ShardedOptimizer.paused():  # stage 0 takes a step without gradients, which is none
            configure(self, client_optimizer, model_parameters)
        if isinstance(self.basic_optimizer, ShardedOptimizer):
            _check_version()
            _check_config(self)
            assign_partitions(self)

    engine_class._is_supported_optimizer = _is_supported_optimizer
    engine_class._configure_basic_optimizer = _configure_basic_optimizer
    engine_class._configure_optimizer = _configure_optimizer
    known = [c for c in vars(shardopt.optim).values() if isinstance(c, type) and issubclass(c, ShardedOptimizer)]
    utils.ZERO_SUPPORTED_OPTIMIZERS.extend(c for c in known if c not in utils.ZERO_SUPPORTED_OPTIMIZERS)


def _check_params(optimizer: type[ShardedOptimizer], params: Mapping[str, Any]) -> None:
    if "max_grad_norm" in params:
        raise ValueError(
            "optimizer.params: got max_grad_norm, which is DeepSpeed's to do; set gradient_clipping beside it"
        )
    known = [name for name in inspect.signature(optimizer).parameters if name not in ("params", "options")]
    known += DEFAULTS
    unknown = sorted(params.keys() - set(known))
    if unknown:
        raise ValueError(
            f"optimizer.params of {optimizer.__name__}: got {', '.join(unknown)}, expected some of {', '.join(known)}"
        )


def _check_version() -> None:
    import deepspeed  # type: ignore[import-untyped]

    version = tuple(int(part) for part in deepspeed.__version__.split("+")[0].split(".")[:2])
    if not VERSIONS[0] <= version < VERSIONS[1]:
        known = " to before ".join(".".join(map(str, v)) for v in VERSIONS)
        raise RuntimeError(
            f"got DeepSpeed {deepspeed.__version__}, expected {known}, whose partitions are known; install such a one"
        )


def _check_config(engine: Any) -> None:
    if engine.zero_optimization() and engine.zero_elastic_checkpoint():
        raise ValueError(
            "zero_optimization.elastic_checkpoint: got true, expected false: it takes padding off tensors without; "
            "use shardopt.checkpoint.save, which loads on any number of ranks"
        )
