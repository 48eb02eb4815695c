"""All hooks into other packages, and the environment variable ``SHARDOPT_HOOKS``, which leaves them out.

A hook is installed once its module is imported by somebody else; shardopt does not import it for the hook.
"""

from __future__ import annotations

import copy
import os
import re
import sys
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pkgutil import resolve_name
from types import ModuleType

#: By package, as ``SHARDOPT_HOOKS`` names it: modules that are hooked into, and the functions that install the hooks.
HOOKS = {
    "torch": (
        # FSDP1's parameters find their model, which says which elements they hold.
        ("torch.distributed.fsdp", "sharding.fsdp1:install"),
        # FSDP1's own optim_state_dict carries quantized state, packed.
        ("torch.distributed.fsdp", "sharding.fsdp1_state_dict:hook_fsdp1"),
        # get_optimizer_state_dict refuses state that cannot be packed before it takes a step without gradients.
        ("torch.distributed.checkpoint.state_dict", "sharding.fsdp1_state_dict:hook_state_dict"),
        # The optimizer inside ZeroRedundancyOptimizer learns of the parameters that other ranks step.
        ("torch.distributed.optim.zero_redundancy_optimizer", "sharding.zero_redundancy:install"),
    ),
    # DeepSpeed takes our optimizers, also by name, and they learn which parameters its flat tensors contain.
    "deepspeed": (("deepspeed.runtime.engine", "sharding.deepspeed.hooks:install"),),
    # Accelerate does not replace our optimizers by DeepSpeedCPUAdam.
    "accelerate": (("accelerate.accelerator", "sharding.deepspeed.hooks:hook_accelerate"),),
    "transformers": (
        # TrainingArguments(optim=...) takes our optimizers' names, and Trainer finds their classes.
        ("transformers.training_args", "clients.names:add_names"),
        ("transformers.trainer", "clients.names:patch_trainer"),
    ),
}
PACKAGES = tuple(HOOKS)


def hooked_packages() -> tuple[str, ...]:
    """The packages to hook into; ValueError if ``SHARDOPT_HOOKS`` is neither empty, ``0``, nor a list of them."""
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


def is_within(version: str, bounds: tuple[tuple[int, ...], tuple[int, ...]]) -> bool:
    """Whether a version such as "2.9.1+cu128" is at least the first of the bounds, and before the second."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
    return bounds[0] <= numbers < bounds[1]


def install_hooks(packages: Container[str]) -> None:
    """Installs the hooks into some packages: each once its module is imported, or now if it already is."""
    for package, hooks in HOOKS.items():
        for module, install in hooks if package in packages else ():
            # Imports shardopt's part only when it is called.
            after_import(module, partial(lambda name, found: resolve_name(f"shardopt.{name}")(found), install))


def after_import(name: str, callback: Callable[[ModuleType], None]) -> None:
    """Calls ``callback`` with a module: now if the module is imported, else once somebody imports it."""
    if (module := sys.modules.get(name)) is not None:
        callback(module)
    else:
        sys.meta_path.insert(0, _Finder(name, callback))


@dataclass(eq=False)
class _Finder(MetaPathFinder):
    """Import finder for one module: asks the finders behind it, and has their loader call back after the import."""

    _name: str
    _callback: Callable[[ModuleType], None]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        spec = next((spec for finder in others if (spec := finder.find_spec(fullname, path, target))), None)
        if spec is not None and spec.loader is not None:
            execute, loader = spec.loader.exec_module, copy.copy(spec.loader)  # the loader itself may be shared

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._callback(module)

            loader.exec_module = exec_module  # type: ignore[method-assign]
            spec.loader = loader
        return spec
