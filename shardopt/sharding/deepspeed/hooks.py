"""All hooks into DeepSpeed's engine, ZeRO and list of supported optimizers, and into Accelerate for its sake.

Each hook says what it replaces and why; docs/sharding.md says what users lose without them. In this package,
``wrapper`` is always the ``optimizer`` of a DeepSpeedEngine: DeepSpeed's object around the user's optimizer.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import partial, wraps
from glob import escape
from itertools import compress
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from shardopt.layout.names import number_parameters, parameter_names, use_numbers
from shardopt.optim import OPTIMIZERS, Muon, ShardedOptimizer
from shardopt.optim.muon_groups import muon_groups
from shardopt.sharding.deepspeed.engine import masters_in_groups, refuse_state_access, register_engine
from shardopt.sharding.deepspeed.offload import (
    hook_offload_states,
    keep_state_in_memory,
    share_storage,
    wrap_load_checkpoint,
)
from shardopt.sharding.deepspeed.partitions import assign_partitions
from shardopt.sharding.hooks import is_within
from shardopt.state.options import DEFAULTS, is_shardopt, refuse_unknown
from shardopt.wrapper.optimizer import QuantizedState

#: The supported versions of DeepSpeed, whose private attributes are known: from the first to before the second.
VERSIONS = ((0, 19, 8), (0, 20))

_MARK = "use_muon"  # attribute by which DeepSpeed tells Muon's parameters from others

#: Optimizers that a config may name, in any letter case. Names without a number are DeepSpeed's and PyTorch's.
TYPES = {name: kind for name, kind in OPTIMIZERS.items() if name.endswith(("4bit", "8bit"))}


def install(engine_module: ModuleType) -> None:
    """Hooks into ``deepspeed.runtime.engine``; in an unsupported version, has engines refuse shardopt's optimizers."""
    # Not deepspeed.__version__: the import of that module may still be under way.
    from deepspeed.git_version_info import version  # type: ignore[import-untyped]

    if not is_within(version, VERSIONS):
        _refuse_later(engine_module.DeepSpeedEngine, version)
        return
    from deepspeed.runtime.base_optimizer import ZeROOptimizer  # type: ignore[import-untyped]
    from deepspeed.runtime.zero import utils  # type: ignore[import-untyped]

    engine_class = engine_module.DeepSpeedEngine
    configure_basic, configure = engine_class._configure_basic_optimizer, engine_class._configure_optimizer
    is_supported = engine_class._is_supported_optimizer
    configure_master_weights = ZeROOptimizer._configure_master_weights

    def _is_supported_optimizer(self: Any, name: str) -> bool:  # whether a config may name this type
        return name.lower() in TYPES or is_supported(self, name)

    def _configure_basic_optimizer(self: Any, model_parameters: Iterable[Tensor]) -> Any:  # makes the named optimizer
        name = self.optimizer_name().lower()
        if name not in TYPES:
            return configure_basic(self, model_parameters)
        params = self.optimizer_params() or {}
        if issubclass(TYPES[name], Muon):
            model_parameters, params = _muon_param_groups(self.module, list(model_parameters), params)
        _check_params(TYPES[name], params)
        return _prepare_engine(self, TYPES[name](model_parameters, **params))

    # Puts the optimizer into DeepSpeed's wrapper, whose flat partitions are then known.
    def _configure_optimizer(self: Any, client_optimizer: Any, model_parameters: Iterable[Tensor]) -> None:
        if self.zero_use_cpu_optimizer():
            _refuse_replacement(client_optimizer)
        with ExitStack() as self._shardopt_pauses:  # stage 0 takes a step without gradients, which must do nothing
            if callable(client_optimizer) and not isinstance(client_optimizer, Optimizer):
                make = client_optimizer
                client_optimizer = lambda params: _prepare_engine(self, make(params))  # noqa: E731
            else:
                _prepare_engine(self, client_optimizer)
            configure(self, client_optimizer, model_parameters)
        if isinstance(self.basic_optimizer, ShardedOptimizer):
            assign_partitions(self)
            number_parameters(self.module)
            use_numbers(self.module.parameters())
            share_storage(self.optimizer)
            keep_state_in_memory(self.optimizer)
            hook_offload_states(self.optimizer)
            refuse_state_access(self.optimizer)
            register_engine(self)
            self.basic_optimizer._internals.open_groups = partial(masters_in_groups, self.optimizer)
            _print_optimizer(self)

    # Accepts bf16 masters with offload, for which DeepSpeed demands its own CPU Adam: ours keep low bits in the state.
    def _configure_master_weights(self: Any, **settings: Any) -> Any:
        if isinstance(self.optimizer, ShardedOptimizer):
            settings["bf16_offload_validator"] = None
        return configure_master_weights(self, **settings)

    engine_class._is_supported_optimizer = _is_supported_optimizer
    engine_class._configure_basic_optimizer = _configure_basic_optimizer
    engine_class._configure_optimizer = _configure_optimizer
    engine_class.load_checkpoint = wrap_load_checkpoint(engine_class.load_checkpoint)
    ZeROOptimizer._configure_master_weights = _configure_master_weights
    known = [ShardedOptimizer, *OPTIMIZERS.values()]  # in this list, users need no zero_allow_untested_optimizer
    utils.ZERO_SUPPORTED_OPTIMIZERS.extend(c for c in known if c not in utils.ZERO_SUPPORTED_OPTIMIZERS)


def hook_accelerate(module: ModuleType) -> None:
    """Has Accelerate, and so Trainer, keep offloaded optimizers instead of making a DeepSpeedCPUAdam.

    Accelerate has the function only beside DeepSpeed. Where it is elsewhere, DeepSpeed's engine refuses the
    replacement.
    """
    replace = getattr(module, "map_pytorch_optim_to_deepspeed", None)
    if replace is None:
        return

    @wraps(replace)
    def map_pytorch_optim_to_deepspeed(optimizer: Any) -> Any:
        return optimizer if isinstance(optimizer, ShardedOptimizer) else replace(optimizer)

    module.map_pytorch_optim_to_deepspeed = map_pytorch_optim_to_deepspeed  # type: ignore[attr-defined]


def _prepare_engine(engine: Any, optimizer: Any) -> Any:
    """Checks that the config suits an optimizer of shardopt, and adapts the engine. Returns any optimizer."""
    if isinstance(optimizer, QuantizedState):
        raise RuntimeError(
            f"got quantize_state of {type(optimizer._inner).__name__} under DeepSpeed, which flattens parameters, "
            "expected one of shardopt's own optimizers; name one in the config, or shard with fully_shard (FSDP2)"
        )
    if isinstance(optimizer, ShardedOptimizer):
        _check_config(engine, optimizer.param_groups)
        if isinstance(optimizer, Muon):
            _clear_muon_marks(engine.module)
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
    """Raises if the config's ``optimizer.params`` has an option that the optimizer does not have."""
    if "max_grad_norm" in params:
        raise ValueError(
            "optimizer.params: got max_grad_norm, expected DeepSpeed to clip; set gradient_clipping beside optimizer"
        )
    known = [name for name in inspect.signature(optimizer).parameters if name not in ("params", "options")]
    refuse_unknown(params, [*known, *DEFAULTS], ValueError, f"optimizer.params of {optimizer.__name__}: ")


def _refuse_later(engine_class: Any, version: str) -> None:
    """Has engines of an unsupported version refuse shardopt's optimizers; other optimizers work as before."""
    initialize = engine_class.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        name = str(getattr(kwargs.get("config_class"), "optimizer_name", None) or "").lower()
        if name in TYPES or any(isinstance(value, ShardedOptimizer) for value in (*args, *kwargs.values())):
            known = " to before ".join(".".join(map(str, v)) for v in VERSIONS)
            raise RuntimeError(
                f"got DeepSpeed {version}, expected {known}, whose partitions are known; install one of these versions"
            )
        initialize(self, *args, **kwargs)

    engine_class.__init__ = __init__


def _check_config(engine: Any, groups: Iterable[Mapping[str, Any]]) -> None:
    """Raises if the config or an option (offload) asks for what would misread or lose shardopt's state."""
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
    for group in groups:
        if group["offload"] is not None:
            raise ValueError(
                f"offload: got {group['offload']!r} under DeepSpeed, which offloads by itself, expected None; leave "
                'offload out, and set zero_optimization.offload_optimizer to {"device": "cpu"} in the DeepSpeed config'
            )


def _print_optimizer(engine: Any) -> None:
    """Prints, on rank 0, which optimizer and codec are in force: DeepSpeed's own lines name its wrapper only."""
    from deepspeed.utils.logging import print_dist  # type: ignore[import-untyped]

    optimizer, kinds = engine.basic_optimizer, {}
    dtype = torch.bfloat16 if engine.bf16_master_weights_and_gradients() else torch.float32
    matrix = torch.empty(4096, 4096, dtype=dtype, device="meta")
    for group in optimizer.param_groups:
        state = optimizer._internals.state_of(matrix, group).new_state(matrix.device)
        nbytes = sum(entry.nbytes for entry in state.values()) / matrix.numel()
        kinds[f"codec {group['codec']} in blocks of {group['block_size']}, {nbytes:.3f} bytes per parameter"] = True
    print_dist(f"shardopt: {type(optimizer).__name__}, state of large matrices: {'; '.join(kinds)}", ranks=[0])


def _muon_param_groups(model: Module, given: list[Any], params: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Divides a model's parameters into Muon's and the others, unless the user has ``given`` param groups.

    ``params`` are the config's ``optimizer.params``, which may have arguments of :func:`shardopt.muon_groups`, too. If
    all parameters have DeepSpeed's mark ``use_muon``, those with ``use_muon=False`` are not Muon's. Returns param
    groups, and the optimizer's other arguments.
    """
    arguments = [name for name in inspect.signature(muon_groups).parameters if name not in ("model", "lr")]
    group_options = {name: params[name] for name in arguments if name in params}
    others = {name: value for name, value in params.items() if name not in group_options}
    if any(isinstance(item, Mapping) for item in given):
        return given, dict(params)
    chosen = {id(param) for param in given}
    if all(hasattr(param, _MARK) for param in given):
        named = parameter_names(model).items()
        unmarked = [escape(name) for name, param in named if not getattr(param, _MARK, False)]
        group_options["exclude"] = [*group_options.get("exclude", ()), *unmarked]
    groups = muon_groups(model, **({"lr": params["lr"]} if "lr" in params else {}), **group_options)
    for group in groups:
        kept = [id(param) in chosen for param in group["params"]]
        for key in ("params", "param_names"):
            group[key] = list(compress(group[key], kept))
    return [group for group in groups if group["params"]], others


def _clear_muon_marks(model: Module) -> None:
    """Sets DeepSpeed's ``use_muon`` marks to False: ZeRO would itself orthogonalize marked parameters' gradients."""
    for param in model.parameters():
        if getattr(param, _MARK, False):
            setattr(param, _MARK, False)
