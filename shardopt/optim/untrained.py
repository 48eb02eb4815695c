"""Warns of parameters that get no gradients: frozen by mistake, cut off from the loss, or replaced in the model."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, MutableMapping

from torch import Tensor
from torch.nn import Module
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from shardopt.state.names import param_name
from shardopt.state.warn import warn_user

#: Consecutive steps without a gradient until a warning, for parameters that no module has, that were never stepped, and
#: that were stepped in most steps before. Experts and layers skipped at random get gradients more often than that.
REPLACED_AFTER, NEVER_AFTER, LATER_AFTER = _LIMITS = 3, 32, 128


class Untrained:
    """Counts steps in which a parameter has no gradient while others do, and warns once per parameter.

    To be cheap, scans parameters only after steps in which the set of gradients changed or a count reaches a limit.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._is_first = True
        self._found_none = False
        #: Parameters without a gradient, and for how many steps in a row.
        self._without: MutableMapping[Tensor, int] = WeakIdKeyDictionary()  # type: ignore[no-untyped-call]
        self._steps = 0  # since the last look
        self._due = math.inf  # steps after a look until one of them reaches a limit
        self._named: MutableMapping[Tensor, bool] = WeakIdKeyDictionary()  # type: ignore[no-untyped-call]

    def skip(self) -> None:
        """Resets the counts when gradients are released, as the backward pass then steps and frees them."""
        self._is_first = False
        self._without.clear()

    def look(self, *, changed: bool) -> None:
        """Updates the counts after a step, and warns; ``changed``: the set of parameters with gradients may differ."""
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
        if any(param.grad is not None and param.requires_grad for param in params):
            self._name(without)
        elif without:
            if is_first or (not self._found_none and set(without.values()) == {REPLACED_AFTER}):
                self._found_none = True
                when = "the first step" if is_first else f"each of {REPLACED_AFTER} steps"
                _warn(f"{when} found no gradient in any of {len(without)} parameters and changed nothing", _REPLACED)
        elif is_first and params and not any(param.requires_grad or param.grad is not None for param in params):
            _warn(f"the first step found all {len(params)} parameters frozen", "unfreeze them with requires_grad_()")

    def _name(self, without: dict[Tensor, int]) -> None:
        """Warns of parameters whose count of steps without a gradient has just reached a limit."""
        trained = [param for group in self._optimizer.param_groups for param in group["params"] if param not in without]
        state = self._optimizer.state
        for limit in _LIMITS:
            suspects = [param for param, n in without.items() if n == limit and param not in self._named]
            if not suspects:
                continue
            steps, remedy = f"{limit} steps in which others had one", _CUT_OFF
            taken = {param: float(entries["step"].max()) for param, entries in state.items() if "step" in entries}
            if limit == REPLACED_AFTER:
                steps, remedy = f"{limit} steps, and no module has the parameter", _REPLACED
                owned = _in_modules([*trained, *suspects])
                is_known = any(id(param) in owned for param in trained)  # else its parameters are those of no model
                found = {param for param in suspects if is_known and id(param) not in owned}
            elif limit == NEVER_AFTER:
                found = {param for param in suspects if param not in taken}
            else:
                most = max(taken.values(), default=0.0) - limit
                found = {param for param in suspects if taken.get(param, 0.0) > most / 2}
            names = [
                f"{param_name(group, index, position)} {tuple(param.shape)}"
                for index, group in enumerate(self._optimizer.param_groups)
                for position, param in enumerate(group["params"])
                if param in found
            ]
            if names:
                self._named.update(dict.fromkeys(found, True))
                _warn(f"{', '.join(names[:5] + ['...'] * (len(names) > 5))}: got no gradient in {steps}", remedy)


def _in_modules(params: Iterable[Tensor]) -> set[int]:
    """The ids of those parameters that any module in the process has, found by scanning the garbage collector."""
    wanted = set(map(id, params))
    found: set[int] = set()
    for holder in gc.get_objects():
        if issubclass(type(holder), Module):
            found.update(id(param) for param in vars(holder).get("_parameters", {}).values() if id(param) in wanted)
    return found


_CUT_OFF = "look for what cuts it off from the loss, such as detach(), or freeze it with requires_grad_(False)"
_REPLACED = (
    "make the optimizer after fully_shard, parallelize_module, resize_token_embeddings, load_state_dict(assign=True) "
    "and whatever else replaces parameters"
)


def _warn(found: str, remedy: str) -> None:
    warn_user(f"{found}; expected gradients of backward(): {remedy}", RuntimeWarning)
