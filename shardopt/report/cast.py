"""Cast of a model to a 16-bit dtype, except the layers that need more precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

_Kept = Callable[[str, nn.Module], bool]


def is_norm(name: str, module: nn.Module) -> bool:
    """Whether a module is a normalization: one of PyTorch's, or of a class whose name ends in "Norm".

    Args:
        name: ignored.
        module: any module.
    """
    known = isinstance(module, (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase))
    return known or type(module).__name__.endswith("Norm")


def cast_model(model: nn.Module, dtype: torch.dtype = torch.bfloat16, keep: _Kept = is_norm) -> nn.Module:
    """Casts a model's parameters in place, except in modules that ``keep`` chooses.

    A kept module computes in the dtype of its own parameters: its floating-point inputs are cast to this dtype, and its
    outputs to ``dtype``, so that the rest of the model sees one dtype only. Buffers are not cast: running statistics
    and tables such as rotary frequencies need their precision.

    Cast the model before it is wrapped or sharded. FSDP2 takes one dtype per ``fully_shard`` call: call
    ``fully_shard(norm)`` for kept modules by themselves. Do not cast the module inside a DistributedDataParallel: its
    gradients would no longer be reduced, and this function cannot notice.

    Args:
        model: changed in place.
        dtype: bfloat16 or float16.
        keep: returns whether a module, given its name and the module, is kept with all its submodules. To add to the
            default: ``lambda name, module: shardopt.is_norm(name, module) or name == "head"``.

    Returns:
        The model.

    Raises:
        ValueError: ``dtype`` is another, or a kept module shares a parameter with a module that is not kept. Nothing
            was changed.
        RuntimeError: the model is wrapped or sharded already. Nothing was changed.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"dtype: got {dtype}, expected torch.bfloat16 or torch.float16; use model.to() for others")
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise RuntimeError(
            "got a model in DistributedDataParallel, which would no longer reduce the gradients, expected a model that "
            "is not wrapped; cast the model before wrapping it"
        )
    kept_modules: list[nn.Module] = []
    kept: dict[Tensor, str] = {}
    cast: dict[Tensor, str] = {}
    _collect(model, "", keep, kept_modules, kept, cast)
    for param in kept.keys() & cast.keys():
        raise ValueError(
            f"got {kept[param]}, which is kept, and {cast[param]}, which is not, as one shared parameter, expected all "
            "modules that share a parameter to be kept, or none of them"
        )
    for param, name in cast.items():
        if hasattr(param, "device_mesh") or hasattr(param, "_fsdp_flattened"):
            raise RuntimeError(
                f"got {name} as a part of a parameter, expected a whole one; cast the model before sharding it"
            )
    for param in cast:
        if param.is_floating_point():
            param.data = param.data.to(dtype)
            if param.grad is not None:
                param.grad = param.grad.to(dtype)
    for module in kept_modules:
        module.register_forward_pre_hook(_cast_inputs, with_kwargs=True)
        module.register_forward_hook(_CastOutputs(dtype))
    return model


def _collect(
    module: nn.Module,
    prefix: str,
    keep: _Kept,
    modules: list[nn.Module],
    kept: dict[Tensor, str],
    cast: dict[Tensor, str],
) -> None:
    """Adds the parameters below a module to ``kept`` or ``cast``, by name, and kept modules to ``modules``."""
    if keep(prefix.rstrip("."), module):
        if module not in modules:
            modules.append(module)
        kept |= {param: prefix + name for name, param in module.named_parameters()}
        return
    cast |= {param: prefix + name for name, param in module.named_parameters(recurse=False)}
    for name, child in module.named_children():
        _collect(child, f"{prefix}{name}.", keep, modules, kept, cast)


def _cast_inputs(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """A forward pre-hook that casts inputs to the dtype of the module's parameters."""
    dtype = next((param.dtype for param in module.parameters() if param.is_floating_point()), None)
    return (args, kwargs) if dtype is None else (_to(args, dtype), _to(kwargs, dtype))


class _CastOutputs:
    """A forward hook that casts outputs; a class, so that the model can be copied and pickled."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return _to(output, self._dtype)


def _to(value: Any, dtype: torch.dtype) -> Any:
    """Casts floating-point tensors, including those in tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_to(v, dtype) for v in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_to(v, dtype) for v in value)
    if type(value) is dict:
        return {key: _to(v, dtype) for key, v in value.items()}
    return value
