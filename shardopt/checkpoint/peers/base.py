"""The interface to another package's optimizer state: recognizing and reading that package's state dicts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from shardopt.checkpoint.peers.coded import CodedMoment
from shardopt.checkpoint.wording import few
from shardopt.codec import Moment

#: Entries of torch.optim's state that follow from the step count.
_DERIVED = {"mu_product"}

#: The moments that optimizers of torch.optim keep.
_MOMENTS = {
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf"),
    *("momentum_buffer", "square_avg", "grad_avg", "sum"),
}


class PeerState(NamedTuple):
    """The state of one parameter in another package.

    Attributes:
        moments: the moments under shardopt's names, in float or in codes.
        step: the entry ``step``; empty if the package counts no steps.
        ignored: the names of entries that shardopt does not have.
    """

    moments: Mapping[str, Tensor | CodedMoment]
    step: Mapping[str, Any]
    ignored: Sequence[str]


class Peer:
    """Base class of the packages; the base itself reads torch.optim's names, with moments in float."""

    #: The package's name in errors and reports.
    name = "torch.optim"
    #: The form of the package's state, in words.
    form = "exp_avg, exp_avg_sq, momentum_buffer and the like in float"
    #: Entries that a state may have beside the moments.
    extra: frozenset[str] = frozenset()

    def recognizes(self, state: Mapping[str, Any]) -> bool:
        """Whether the state of one parameter, without entries that are None, is of this form."""
        return state.keys() <= {"step", *_DERIVED, *_MOMENTS} and all(
            isinstance(state[key], Tensor) for key in _MOMENTS & set(state)
        )

    def check_together(self, states: Collection[Mapping[str, Any]]) -> None:
        """Checks the states of all parameters for a kind of optimizer that only all of them tell.

        Raises:
            ValueError: shardopt has no such optimizer.
        """

    def read(
        self, state: Mapping[str, Any], group: Mapping[str, Any], expected: Sequence[Moment], name: str
    ) -> PeerState:
        """Reads the state of one parameter.

        Args:
            state: a state of a form that :meth:`recognizes` accepts, or of torch.optim's form.
            group: the parameter's param group, as it was saved.
            expected: the moments of the optimizer that takes over the state.
            name: the parameter's name, for errors.

        Raises:
            ValueError: the state is of another kind of optimizer, or damaged.
        """
        names = set(state) - {"step"} - _DERIVED - self.extra
        if names != {moment.name for moment in expected}:
            raise ValueError(
                f"{name}: got state with {few(names) or 'no moments'}, expected "
                f"{', '.join(moment.name for moment in expected) or 'none'}; choose the optimizer of the same kind"
            )
        return self.with_moments({moment.name: state[moment.name] for moment in expected}, state)

    def with_moments(self, moments: Mapping[str, Tensor | CodedMoment], state: Mapping[str, Any]) -> PeerState:
        """The state with these moments, and the other entries of ``state``."""
        step = {"step": state["step"]} if "step" in state else {}
        return PeerState(moments, step, sorted(self.extra & state.keys()))

    def hyper(self, group: Mapping[str, Any], moments: Sequence[str]) -> dict[str, Any]:
        """The hyper-parameters of a param group under torch.optim's names.

        Args:
            group: the param group.
            moments: the names of the moments that the optimizer keeps.

        Raises:
            ValueError: the hyper-parameters are of another kind of optimizer.
        """
        return dict(group)
