"""Reports parameters that get no gradients: frozen by mistake, cut off from the loss, or replaced in the model."""

from __future__ import annotations

import gc
import math
from collections.abc import Collection, Iterable, Iterator, MutableMapping

from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from shardopt.state.names import param_name
from shardopt.state.warn import warn_user

#: Consecutive steps without a gradient until a warning, for parameters that no module has, that were never stepped, and
#: that were stepped in most steps before. Experts and layers skipped at random get gradients more often than that.
REPLACED_AFTER, NEVER_AFTER, CEASED_AFTER = _LIMITS = 3, 32, 128


class MissingGradients:
    """Counts the steps in which a parameter has no gradient while others do, and warns once per parameter.

    Raises in the second step that finds gradients only in parameters that have replaced the optimizer's. To be cheap,
    scans parameters only if the set of gradients changed or a count reaches a limit.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._is_first_step = True
        self._warned_of_all = False  # that no parameter has a gradient
        #: Parameters without a gradient at the last scan, and for how many steps in a row.
        self._missing_steps: MutableMapping[Tensor, int] = WeakIdKeyDictionary()  # type: ignore[no-untyped-call]
        self._steps_since_scan = 0
        self._steps_to_limit = math.inf  # from the last scan until the first count reaches a limit
        self._warned_of: MutableMapping[Tensor, bool] = WeakIdKeyDictionary()  # type: ignore[no-untyped-call]

    def reset(self) -> None:
        """Forgets all counts. The next step does not count as the first, after which missing gradients warn at once."""
        self._is_first_step = False
        self._missing_steps.clear()

    def count_step(self, *, gradients_changed: bool) -> None:
        """Counts a step and warns of limits; ``gradients_changed``: whether other parameters may have gradients now."""
        self._steps_since_scan += 1
        if gradients_changed or self._steps_since_scan >= self._steps_to_limit:
            self._scan()

    def _scan(self) -> None:
        """Updates the counts of all parameters, and warns."""
        params = [param for group in self._optimizer.param_groups for param in group["params"]]
        before, is_first = self._missing_steps, self._is_first_step
        missing = {
            # Parameters not in ``before`` lost their gradient in this step: any change of the set causes a scan.
            param: before[param] + self._steps_since_scan if param in before else 1
            for param in params
            # A rank without elements of a DTensor never gets a gradient of it.
            if param.grad is None and param.requires_grad and getattr(param, "_local_tensor", param).numel() > 0
        }
        self._missing_steps = WeakIdKeyDictionary(missing)  # type: ignore[no-untyped-call]
        self._is_first_step, self._steps_since_scan = False, 0
        to_limits = (limit - count for limit in _LIMITS for count in missing.values() if count < limit)
        self._steps_to_limit = min(to_limits, default=math.inf)
        if any(param.grad is not None and param.requires_grad for param in params):
            self._warn_of_limits(missing)
        elif missing:
            if is_first:
                self._steps_to_limit = 1  # the next step, too, is looked at
            elif set(missing.values()) == {2} and not any(self._optimizer.state.values()) and _were_replaced(missing):
                raise RuntimeError(
                    f"got no gradient in two steps, and no module that has any of the optimizer's {len(missing)} "
                    f"parameters, expected the model's, which have gradients; {_REPLACED}. Nothing was changed"
                )
            all_reach_limit = set(missing.values()) == {REPLACED_AFTER}
            if is_first or (all_reach_limit and not self._warned_of_all):
                self._warned_of_all = True
                when = "the first step" if is_first else f"each of {REPLACED_AFTER} steps"
                _warn(f"{when} found no gradient in any of {len(missing)} parameters and changed nothing", _REPLACED)
        elif is_first and params and not any(param.requires_grad or param.grad is not None for param in params):
            _warn(f"the first step found all {len(params)} parameters frozen", "unfreeze them with requires_grad_()")

    def _warn_of_limits(self, missing: dict[Tensor, int]) -> None:
        """Warns of parameters whose count of steps without a gradient has just reached a limit."""
        trained = [param for group in self._optimizer.param_groups for param in group["params"] if param not in missing]
        for limit in _LIMITS:
            suspects = [param for param, count in missing.items() if count == limit and param not in self._warned_of]
            if not suspects:
                continue
            steps, remedy = f"{limit} steps in which others had one", _CUT_OFF
            state = self._optimizer.state.items()
            step_counts = {param: float(entries["step"].max()) for param, entries in state if "step" in entries}
            if limit == REPLACED_AFTER:
                steps, remedy = f"{limit} steps, and no module has the parameter", _REPLACED
                in_modules = _in_modules([*trained, *suspects])
                # If no module has even the trained ones, the user trains plain tensors: nothing was replaced.
                is_model = any(id(param) in in_modules for param in trained)
                found = {param for param in suspects if is_model and id(param) not in in_modules}
            elif limit == NEVER_AFTER:
                found = {param for param in suspects if param not in step_counts}
            else:  # stepped in most steps before the gradients ceased
                steps_before = max(step_counts.values(), default=0.0) - limit
                found = {param for param in suspects if step_counts.get(param, 0.0) > steps_before / 2}
            names = [
                f"{param_name(group, index, position)} {tuple(param.shape)}"
                for index, group in enumerate(self._optimizer.param_groups)
                for position, param in enumerate(group["params"])
                if param in found
            ]
            if names:
                self._warned_of.update(dict.fromkeys(found, True))
                _warn(f"{', '.join(names[:5] + ['...'] * (len(names) > 5))}: got no gradient in {steps}", remedy)


def _were_replaced(params: Collection[Tensor]) -> bool:
    """Whether no module has any of the parameters, but modules have gradients of others of their shapes and dtypes.

    False without a matrix among several: a temperature or dual variable has a norm's shape, and may be trained later.
    """
    trained = {(param.shape, param.dtype) for param in _module_parameters() if param.grad is not None}
    are_alike = all(isinstance(param, Parameter) and (param.shape, param.dtype) in trained for param in params)
    is_model = len(params) > 1 and any(param.dim() > 1 for param in params)
    return is_model and are_alike and not _in_modules(params)


def _in_modules(params: Iterable[Tensor]) -> set[int]:
    """The ids of those parameters that any module in the process has, found by scanning the garbage collector."""
    wanted = set(map(id, params))
    return {id(param) for param in _module_parameters() if id(param) in wanted}


def _module_parameters() -> Iterator[Tensor]:
    """The parameters of all modules in the process; of a module's own attributes."""
    for candidate in gc.get_objects():
        if issubclass(type(candidate), Module):  # not isinstance(), which runs code of lazy proxies (__class__)
            yield from (param for param in vars(candidate).get("_parameters", {}).values() if param is not None)


_CUT_OFF = "look for what cuts it off from the loss, such as detach(), or freeze it with requires_grad_(False)"
_REPLACED = (
    "make the optimizer after fully_shard, parallelize_module, resize_token_embeddings, load_state_dict(assign=True) "
    "and whatever else replaces parameters"
)


def _warn(found: str, remedy: str) -> None:
    warn_user(f"{found}; expected gradients of backward(): {remedy}", RuntimeWarning)
