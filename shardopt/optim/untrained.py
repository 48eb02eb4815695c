"""Warns of parameters that nobody trains: frozen by mistake, or no longer the model's."""

from __future__ import annotations

import gc
import math
from collections.abc import MutableMapping, Sequence

from torch import Tensor
from torch.nn import Module
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from shardopt.state.names import listed_name
from shardopt.state.warn import warn_user

#: Consecutive steps without a gradient after which a parameter of no module is named, one that was never stepped, and
#: one that was stepped in most steps before. Experts and layers that are skipped at random get a gradient in between.
REPLACED_AFTER, NEVER_AFTER, LATER_AFTER = _LIMITS = 3, 32, 128
_MOST_NAMES = 5


class Untrained:
    """Watches which parameters get no gradient while others do; each is named once.

    Looks at the parameters only where others have a gradient than in the step before, and where one reaches a limit.

    Args:
        optimizer: the optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._is_first = True
        self._found_none = False
        #: Parameters without a gradient, and for how many steps in a row.
        self._without: MutableMapping[Tensor, int] = WeakIdKeyDictionary()  # type: ignore[no-untyped-call]
        self._steps = 0  # since the last look
        self._due = math.inf  # steps after a look until one of them reaches a limit
        #: Parameters that had no gradient for a while, and whether a module has them; False for those that were named.
        self._settled: MutableMapping[Tensor, bool] = WeakIdKeyDictionary()  # type: ignore[no-untyped-call]

    def skip(self) -> None:
        """Forgets what was seen: steps are taken in backward passes."""
        self._is_first = False
        self._without.clear()

    def look(self, *, changed: bool) -> None:
        """Looks for gradients after a step.

        Args:
            changed: whether other parameters may have had a gradient than in the last step.
        """
        self._steps += 1
        if not changed and self._steps < self._due:
            return
        params = [param for group in self._optimizer.param_groups for param in group["params"]]
        before, is_first = self._without, self._is_first
        without = {
            param: before[param] + self._steps if param in before else 1
            for param in params
            # A rank without elements of a DTensor never gets a gradient of it.
            if param.grad is None and param.requires_grad and getattr(param, "_local_tensor", param).numel() > 0
        }
        self._without = WeakIdKeyDictionary(without)  # type: ignore[no-untyped-call]
        self._is_first, self._steps = False, 0
        self._due = min((limit - n for limit in _LIMITS for n in without.values() if n < limit), default=math.inf)
        other = next((param for param in params if param.grad is not None and param.requires_grad), None)
        if other is None:
            never = not self._found_none and set(without.values()) == {REPLACED_AFTER}
            if without and (is_first or never):
                self._found_none = True
                when = "the first step" if is_first else f"each of {REPLACED_AFTER} steps"
                _warn(f"{when} found no gradient in any of {len(without)} parameters and changed nothing", _REPLACED)
            elif is_first and params and not any(param.requires_grad or param.grad is not None for param in params):
                _warn(
                    f"the first step found all {len(params)} parameters frozen", "unfreeze them with requires_grad_()"
                )
            return
        if new := [param for param, n in without.items() if n >= REPLACED_AFTER and param not in self._settled]:
            owned = _in_modules([other, *new])
            knows = id(other) in owned  # otherwise the optimizer's parameters are in no modules at all
            self._settled.update((param, not knows or id(param) in owned) for param in new)
            replaced = [param for param in new if not self._settled[param]]
            self._name(replaced, ": got no gradient, and no module has the parameter", _REPLACED)
        for steps in (NEVER_AFTER, LATER_AFTER):
            if suspects := [param for param, n in without.items() if n == steps and self._settled.get(param)]:
                taken = {p: float(state["step"].max()) for p, state in self._optimizer.state.items() if "step" in state}
                most = max(taken.values(), default=0.0) - steps
                cut_off = [
                    p for p in suspects if (taken.get(p, 0) > most / 2 if steps == LATER_AFTER else p not in taken)
                ]
                self._name(cut_off, f": got no gradient in {steps} steps in which others had one", _CUT_OFF)

    def _name(self, params: Sequence[Tensor], found: str, remedy: str) -> None:
        """Warns of parameters, once."""
        if not params:
            return
        self._settled.update((param, False) for param in params)
        names = {
            id(param): listed_name(group, index, position)
            for index, group in enumerate(self._optimizer.param_groups)
            for position, param in enumerate(group["params"])
        }
        listed = ", ".join(f"{names[id(param)]} {tuple(param.shape)}" for param in params[:_MOST_NAMES])
        more = len(params) - _MOST_NAMES
        _warn(f"{listed}{f' and {more} more' if more > 0 else ''}{found}", remedy)


_CUT_OFF = "look for what cuts it off from the loss, such as detach(), or freeze it with requires_grad_(False)"
_REPLACED = (
    "make the optimizer after fully_shard, parallelize_module, resize_token_embeddings, load_state_dict(assign=True) "
    "and whatever else replaces parameters"
)


def _warn(found: str, remedy: str) -> None:
    warn_user(f"{found}; expected gradients of backward(): {remedy}", RuntimeWarning)


def _in_modules(params: Sequence[Tensor]) -> set[int]:
    """The ids of the parameters that modules have. Looks through all objects of the process."""
    wanted = {id(param) for param in params}
    found: set[int] = set()
    for holder in gc.get_objects():
        if issubclass(type(holder), Module):
            found.update(id(param) for param in vars(holder).get("_parameters", {}).values() if id(param) in wanted)
    return found
