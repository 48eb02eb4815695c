"""The interface to another package's optimizer state: recognizing and reading that package's state dicts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from shardopt.checkpoint.peers.coded import CodedMoment, ScaledMoment
from shardopt.checkpoint.wording import few
from shardopt.codec import Moment

#: The moments of one parameter under shardopt's names, in float or in codes.
Moments = dict[str, "Tensor | CodedMoment | ScaledMoment"]

#: Entries of torch.optim's state that follow from the step count.
DERIVED = frozenset(["mu_product"])

#: torch.optim's classes by the moments of their state, where these tell the class.
_CLASSES = {
    frozenset(["momentum_buffer"]): "SGD",
    frozenset(["exp_avg", "exp_inf"]): "Adamax",
    frozenset(["square_avg"]): "RMSprop",
    frozenset(["square_avg", "momentum_buffer"]): "RMSprop",
    frozenset(["square_avg", "grad_avg"]): "RMSprop",
    frozenset(["square_avg", "momentum_buffer", "grad_avg"]): "RMSprop",
    frozenset(["sum"]): "Adagrad",
}
_ADAM = (frozenset(["exp_avg", "exp_avg_sq"]), frozenset(["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]))


class Peer:
    """Base class of the packages; the base itself reads torch.optim's names, with moments in float."""

    #: The package's name in errors and reports.
    name = "torch.optim"
    #: The form of the package's state, in words.
    form = "exp_avg, exp_avg_sq or momentum_buffer in float"
    #: Entries that a state may have beside the moments.
    extra: frozenset[str] = frozenset()
    #: shardopt's codec with the codes and scales of the package; None if the package has no codes.
    codec: str | None = None

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

    def check_together(self, states: Collection[Mapping[str, Any]]) -> None:
        """Checks the unwrapped states of all parameters for a kind of optimizer that only all of them tell.

        Raises:
            ValueError: shardopt has no such optimizer.
        """

    def moment_names(
        self, states: Collection[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
    ) -> tuple[str, ...]:
        """The names of the moments that an optimizer keeps, by all its unwrapped states and its param groups.

        Raises:
            ValueError: these do not tell which kind of optimizer it is.
        """
        return tuple(sorted({key for state in states for key in state} - {"step"} - DERIVED - self.extra))

    def class_name(self, moments: Sequence[str], groups: Sequence[Mapping[str, Any]]) -> str:
        """The class of shardopt for an optimizer with these moments, named by :meth:`moment_names`.

        Raises:
            ValueError: several classes keep such moments, or none does.
        """
        names, keys = frozenset(moments), {key for group in groups for key in group}
        if names in _ADAM and "momentum_decay" in keys:
            return "NAdam"
        if names in _ADAM:
            decoupled = {group.get("decoupled_weight_decay") for group in groups}
            if decoupled <= {True, False}:
                return "AdamW" if True in decoupled else "Adam"
            if not any(group.get("weight_decay") for group in groups):
                return "AdamW"
        elif names == {"momentum_buffer"} and "ns_steps" in keys:
            return "Muon"
        elif names in _CLASSES:
            return _CLASSES[names]
        raise ValueError(
            f"got state with {few(names) or 'no moments'} and hyper-parameters {few(keys - {'params'})}, expected "
            "those of a known optimizer; name the class with --optimizer"
        )

    def moments(self, state: Mapping[str, Any], expected: Sequence[Moment], name: str) -> Moments:
        """The moments of one parameter.

        Args:
            state: an unwrapped state of a form that :meth:`recognizes` accepts, or of torch.optim's form.
            expected: the moments of the optimizer that takes over the state.
            name: the parameter's name, for errors.

        Raises:
            ValueError: the state is of another kind of optimizer, or damaged.
        """
        names = set(state) - {"step"} - DERIVED - self.extra
        if names != {moment.name for moment in expected}:
            raise ValueError(
                f"{name}: got state with {few(names) or 'no moments'}, expected "
                f"{', '.join(moment.name for moment in expected) or 'none'}; choose the optimizer of the same kind"
            )
        return {moment.name: state[moment.name] for moment in expected}

    def hyper(self, group: Mapping[str, Any], moments: Sequence[str]) -> dict[str, Any]:
        """The hyper-parameters of a param group under torch.optim's names.

        Args:
            group: the param group.
            moments: the names of the moments that the optimizer keeps.

        Raises:
            ValueError: the hyper-parameters are of another kind of optimizer.
        """
        return dict(group)
