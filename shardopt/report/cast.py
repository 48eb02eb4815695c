"""Casts a model to a 16-bit dtype but for the layers that need more."""

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
        name: is not looked at.
        module: any.
    """
    known = isinstance(module, (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase))
    return known or type(module).__name__.endswith("Norm")


def cast_model(model: nn.Module, dtype: torch.dtype = torch.bfloat16, keep: _Kept = is_norm) -> nn.Module:
    """Casts a model's parameters in place, but for those in modules that ``keep`` names.

    A kept module computes in the dtype of its own parameters: what floating-point tensors it is given are cast to it,
    and what it returns is cast to ``dtype``, so that the rest of the model sees one dtype only. Buffers stay as they
    are: running statistics and tables such as rotary frequencies need their precision.

    Call it before the model is wrapped or sharded. FSDP2 takes one dtype per unit: give kept modules units of their
    own (``fully_shard(norm)``). The model inside a DistributedDataParallel must not be cast either, which cannot be
    noticed from here if it is given by itself: its gradients would no longer be reduced.

    Args:
        model: changed in place.
        dtype: bfloat16 or float16.
        keep: told a module's name and the module, whether it stays as it is, with all that is in it. To add to the
            default: ``lambda name, module: shardopt.is_norm(name, module) or name == "head"``.

    Returns:
        The model.

    Raises:
        ValueError: ``dtype`` is another, or a parameter is shared by a kept module and one that is not. Nothing was
            changed.
        RuntimeError: the model is wrapped or sharded already. Nothing was changed.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"dtype: got {dtype}, expected torch.bfloat16 or torch.float16; use model.to() for others")
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise RuntimeError(
            "got a model in DistributedDataParallel, which would no longer reduce the gradients, expected one that is "
            "not wrapped; cast the model before wrapping it"
        )
    kept_modules: list[nn.Module] = []
    kept: dict[Tensor, str] = {}
    cast: dict[Tensor, str] = {}
    _collect(model, "", keep, kept_modules, kept, cast)
    for param in kept.keys() & cast.keys():
        raise ValueError(
            f"got {kept[param]}, which is kept, and {cast[param]}, which is not, as one shared parameter, expected "
            "both or neither in modules to keep"
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
    """Sorts the parameters below a module."""
    if keep(prefix.rstrip("."), module):
        if module not in modules:
            modules.append(module)
        kept |= {param: prefix + name for name, param in module.named_parameters()}
        return
    cast |= {param: prefix + name for name, param in module.named_parameters(recurse=False)}
    for name, child in module.named_children():
        _collect(child, f"{prefix}{name}.", keep, modules, kept, cast)


def _cast_inputs(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """A forward pre-hook: everything in the dtype of the module's parameters."""
    dtype = next((param.dtype for param in module.parameters() if param.is_floating_point()), None)
    return (args, kwargs) if dtype is None else (_to(args, dtype), _to(kwargs, dtype))


class _CastOutputs:
    """A forward hook; a class, so that the model can be copied and pickled."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return _to(output, self._dtype)


def _to(value: Any, dtype: torch.dtype) -> Any:
    """Casts floating-point tensors, in tuples, lists and dicts too."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_to(v, dtype) for v in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_to(v, dtype) for v in value)
    if type(value) is dict:
        return {key: _to(v, dtype) for key, v in value.items()}
    return value
