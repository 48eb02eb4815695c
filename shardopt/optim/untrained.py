"""Warns of parameters that nobody trains: frozen by mistake, or no longer the model's."""

from __future__ import annotations

import gc
from collections.abc import MutableMapping, Sequence
from typing import Any
from weakref import ref

from torch import Tensor
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from shardopt.state.names import listed_name
from shardopt.state.warn import warn_user

#: Consecutive steps without a gradient after which a parameter of no module, or one that was never stepped, is named.
#: Experts that get no token and layers that are skipped at random get a gradient in between.
REPLACED_AFTER, NEVER_AFTER = 3, 32
_MOST_NAMES = 5


class Untrained:
    """Watches which parameters get no gradient while others do; each is named once.

    Args:
        optimizer: the optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._is_first = True
        self._found_none = False
        self._without: dict[int, tuple[ref[Tensor], int]] = {}  # parameters, and for how many steps in a row
        #: Parameters that had no gradient for a while, and whether a module has them; others were named.
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
        if not changed and not self._without:
            return
        params = [
            (listed_name(group, index, position), param)
            for index, group in enumerate(self._optimizer.param_groups)
            for position, param in enumerate(group["params"])
        ]
        trained = [(name, param) for name, param in params if param.requires_grad and _is_here(param)]
        without = [(name, param) for name, param in trained if param.grad is None]
        is_first, self._is_first = self._is_first, False
        if is_first and params and not any(param.requires_grad or param.grad is not None for _, param in params):
            _warn(f"the first step found all {len(params)} parameters frozen", "unfreeze them with requires_grad_()")
        counts = {id(param): self._count(param) + 1 for _, param in without}
        self._without = {id(param): (ref(param), counts[id(param)]) for _, param in without}
        if trained and len(without) == len(trained):
            if is_first or (not self._found_none and all(count == REPLACED_AFTER for count in counts.values())):
                self._found_none = True
                when = "the first step" if is_first else f"each of {REPLACED_AFTER} steps"
                _warn(f"{when} found no gradient in any of {len(trained)} parameters and changed nothing", _REPLACED)
            return
        self._warn_of(
            [pair for pair in without if counts[id(pair[1])] >= REPLACED_AFTER and pair[1] not in self._settled],
            next((param for _, param in trained if param.grad is not None), None),
        )
        state = self._optimizer.state
        never = [
            (name, param)
            for name, param in without
            if counts[id(param)] == NEVER_AFTER and not state.get(param) and self._settled.get(param, True)
        ]
        if never:
            _warn(
                f"{_listed(never)}: got no gradient in {NEVER_AFTER} steps in which others had one",
                "look for what cuts it off from the loss, such as detach(), or freeze it with requires_grad_(False)",
            )

    def _count(self, param: Tensor) -> int:
        reference, count = self._without.get(id(param), (None, 0))
        return count if reference is not None and reference() is param else 0

    def _warn_of(self, suspects: Sequence[tuple[str, Tensor]], other: Tensor | None) -> None:
        """Warns of parameters that no module has, although a module has another parameter of the optimizer."""
        if not suspects or other is None:
            return
        owned = _in_modules([other, *(param for _, param in suspects)])
        self._settled.update((param, id(param) in owned) for _, param in suspects)
        replaced = [(name, param) for name, param in suspects if id(param) not in owned]
        if replaced and id(other) in owned:
            _warn(f"{_listed(replaced)}: got no gradient, and no module has the parameter", _REPLACED)


_REPLACED = (
    "make the optimizer after fully_shard, parallelize_module, resize_token_embeddings, load_state_dict(assign=True) "
    "and whatever else replaces parameters"
)


def _warn(found: str, remedy: str) -> None:
    warn_user(f"{found}; expected gradients of backward(): {remedy}", RuntimeWarning)


def _is_here(param: Tensor) -> bool:
    """Whether this rank has elements of a parameter: of a DTensor without any it never gets a gradient."""
    return getattr(param, "_local_tensor", param).numel() > 0


def _listed(params: Sequence[tuple[str, Tensor]]) -> str:
    names = [f"{name} {tuple(param.shape)}" for name, param in params[:_MOST_NAMES]]
    more = len(params) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


def _in_modules(params: Sequence[Tensor]) -> set[int]:
    """The ids of the parameters that are in a dict by a name, as modules have them. Looks through all objects."""
    wanted = {id(param) for param in params}
    found: set[int] = set()
    referrers: list[Any] = [holder for holder in gc.get_referrers(*params) if isinstance(holder, dict)]
    for holder in referrers:
        found.update(id(x) for key, x in list(holder.items()) if isinstance(key, str) and id(x) in wanted)
    return found
