"""The interface of an import to another package: recognizing and reading that package's state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from shardopt.checkpoint.foreign.moments import CodedMoment
from shardopt.checkpoint.wording import few
from shardopt.codec import Moment

#: The moments of one parameter under our names, in float or in codes.
Moments = dict[str, "Tensor | CodedMoment"]


class Peer:
    """Base class of the packages; the base itself reads torch.optim's names, with moments in float."""

    #: The package's name in errors and reports.
    name = "torch.optim"
    #: The form of the package's state, in words.
    form = "exp_avg, exp_avg_sq or momentum_buffer in float"
    #: Entries that a state may have beside the moments.
    extra: frozenset[str] = frozenset()

    def recognizes(self, state: Mapping[str, Any]) -> bool:
        """Whether the state of one parameter, without entries that are None, is of this form."""
        moments = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"}
        return state.keys() <= {"step", *moments} and all(
            isinstance(state[key], Tensor) for key in moments & set(state)
        )

    def unwrapped(self, state: Mapping[str, Any], group: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        """The entries of one parameter's state, without wrapping.

        Args:
            state: the state.
            group: the parameter's param group, as it was saved.
            name: the parameter's name, for errors.

        Raises:
            ValueError: the wrapping is damaged.
        """
        return state

    def check_together(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Checks the unwrapped states of all parameters for a kind of optimizer that only all of them tell.

        Raises:
            ValueError: shardopt has no such optimizer.
        """

    def moments(self, state: Mapping[str, Any], expected: Sequence[Moment], name: str) -> Moments:
        """The moments of one parameter.

        Args:
            state: an unwrapped state of a form that :meth:`recognizes` accepts, or of torch.optim's form.
            expected: the moments of the optimizer that imports.
            name: the parameter's name, for errors.

        Raises:
            ValueError: the state is of another kind of optimizer, or damaged.
        """
        found = set(state) - {"step"} - self.extra
        if found != {moment.name for moment in expected}:
            raise _other_optimizer(name, sorted(found), expected)
        return {moment.name: state[moment.name] for moment in expected}

    def hyper(self, group: Mapping[str, Any], expected: Sequence[Moment]) -> dict[str, Any]:
        """The hyper-parameters of a param group under torch.optim's names.

        Raises:
            ValueError: the hyper-parameters are of another kind of optimizer.
        """
        return dict(group)


def _other_optimizer(name: str, found: Sequence[str], expected: Sequence[Moment]) -> ValueError:
    return ValueError(
        f"{name}: got state with {few(found) or 'no moments'}, expected "
        f"{', '.join(moment.name for moment in expected) or 'none'}; import it into the optimizer of the same kind"
    )
