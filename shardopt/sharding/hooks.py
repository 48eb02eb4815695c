"""All hooks into other packages, and the environment variable ``SHARDOPT_HOOKS``, which leaves them out.

A hook is installed once its module is imported by somebody else; shardopt does not import it for the hook.
"""

from __future__ import annotations

import os
import pkgutil
import sys
from collections.abc import Callable, Container, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NamedTuple


class Hook(NamedTuple):
    """A hook into another package.

    Attributes:
        package: the name of the hooked package in ``SHARDOPT_HOOKS``.
        module: the module that is hooked into.
        install: the function that installs the hook, below ``shardopt``.
        purpose: the effect on users.
    """

    package: str
    module: str
    install: str
    purpose: str


HOOKS = (
    Hook(
        "torch", "torch.distributed.fsdp", "sharding.fsdp1:install", "FSDP1's parameters know their places in the model"
    ),
    Hook(
        "torch",
        "torch.distributed.fsdp",
        "sharding.fsdp1_state_dict:hook_fsdp1",
        "FSDP1's own optim_state_dict carries quantized state, packed",
    ),
    Hook(
        "torch",
        "torch.distributed.checkpoint.state_dict",
        "sharding.fsdp1_state_dict:hook_state_dict",
        "get_optimizer_state_dict refuses state that cannot be packed before it takes a step without gradients",
    ),
    Hook(
        "torch",
        "torch.distributed.optim.zero_redundancy_optimizer",
        "sharding.zero_redundancy:install",
        "the optimizer inside ZeroRedundancyOptimizer knows the parameters of other ranks",
    ),
    Hook(
        "deepspeed",
        "deepspeed.runtime.engine",
        "sharding.deepspeed.hooks:install",
        "DeepSpeed takes our optimizers, also by name, and their blocks lie within parameters",
    ),
    Hook(
        "accelerate", "accelerate.accelerator", "sharding.accelerate:install", "DeepSpeedCPUAdam does not replace ours"
    ),
    Hook("transformers", "transformers.training_args", "clients.names:add_names", "optim= takes our names"),
    Hook("transformers", "transformers.trainer", "clients.names:find_by_name", "Trainer finds their classes"),
)
PACKAGES = tuple(dict.fromkeys(hook.package for hook in HOOKS))


def hooked_packages() -> tuple[str, ...]:
    """The packages that are hooked into: all known ones, unless the environment variable ``SHARDOPT_HOOKS`` says less.

    Raises:
        ValueError: ``SHARDOPT_HOOKS`` is neither empty, nor ``0``, nor a comma-separated list of known packages.
    """
    setting = os.environ.get("SHARDOPT_HOOKS", "").strip()
    if setting == "0":
        return ()
    names = [name.strip() for name in setting.split(",")] if setting else list(PACKAGES)
    if not set(names) <= set(PACKAGES):
        raise ValueError(
            f"SHARDOPT_HOOKS: got {setting!r}, expected 0 for no hooks, or some of {', '.join(PACKAGES)}, separated by "
            "commas; unset it for all hooks"
        )
    return tuple(package for package in PACKAGES if package in names)


def install_hooks(packages: Container[str]) -> None:
    """Has the hooks into some packages installed once their modules are imported."""
    for hook in HOOKS:
        if hook.package in packages:
            after_import(hook.module, _installer(hook.install))


def _installer(name: str) -> Callable[[ModuleType], None]:
    return lambda module: pkgutil.resolve_name(f"shardopt.{name}")(module)


def after_import(name: str, callback: Callable[[ModuleType], None]) -> None:
    """Calls ``callback`` with a module: now if the module is imported, else once somebody imports it."""
    module = sys.modules.get(name)
    if module is not None:
        callback(module)
    else:
        sys.meta_path.insert(0, _Finder(name, callback))


class _Finder(MetaPathFinder):
    """Finds one module by the other finders, and gives it a loader that calls back."""

    def __init__(self, name: str, callback: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._callback = callback

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self._callback)
                return spec
        return None


class _Loader(Loader):
    def __init__(self, loader: Loader, callback: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._callback = callback

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._callback(module)
