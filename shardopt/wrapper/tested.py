"""Optimizers that were tested, by class, and those that cannot be quantized or are quantized already."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

from torch.optim.optimizer import Optimizer

from shardopt.wrapper.coding import coded_names


class Kind(Enum):
    """Elements on which the update of an element depends, beside itself."""

    ELEMENTWISE = "no others"
    BY_PARAMETER = "others of the parameter, through norms or products of matrices"
    TOGETHER = "all parameters, or a stream of random numbers"
    UNKNOWN = "untested"


#: Modules and classes.
_ELEMENTWISE = """
torch.optim: adadelta.Adadelta adagrad.Adagrad adam.Adam adamax.Adamax adamw.AdamW asgd.ASGD nadam.NAdam radam.RAdam
    rmsprop.RMSprop rprop.Rprop sgd.SGD
timm.optim: adabelief.AdaBelief adopt.Adopt laprop.LaProp lion.Lion nadamw.NAdamW rmsprop_tf.RMSpropTF
pytorch_optimizer.optimizer: adopt.ADOPT ademamix.AdEMAMix lion.Lion tiger.Tiger yogi.Yogi
    schedulefree.ScheduleFreeAdamW schedulefree.ScheduleFreeRAdam schedulefree.ScheduleFreeSGD
schedulefree: adamw_schedulefree.AdamWScheduleFree radam_schedulefree.RAdamScheduleFree
    sgd_schedulefree.SGDScheduleFree
"""

_BY_PARAMETER = """
torch.optim: Adafactor _adafactor.Adafactor Muon _muon.Muon
timm.optim: adan.Adan lamb.Lamb lars.Lars mars.Mars
pytorch_optimizer.optimizer: adafactor.AdaFactor adamp.AdamP adamw.StableAdamW adan.Adan amos.Amos apollo.APOLLO
    came.CAME fadam.FAdam fira.Fira galore.GaLore grokfast.GrokFastAdamW lamb.Lamb mars.MARS muon.muon.Muon
    ranger21.Ranger21 sm3.SM3 soap.SOAP
"""

_TOGETHER = """
pytorch_optimizer.optimizer: adams.AdamS dadapt.DAdaptAdaGrad dadapt.DAdaptAdam dadapt.DAdaptAdan dadapt.DAdaptLion
    dadapt.DAdaptSGD prodigy.Prodigy spam.SPAM
prodigyopt: prodigy.Prodigy
"""

#: Options that make an elementwise optimizer depend on the whole parameter.
_BY_PARAMETER_OPTIONS = ("adanorm", "caution", "cautious", "orthograd", "stable_adamw", "use_gc")

_REFUSED = {
    "LBFGS": "its state is one history of all parameters, and its step evaluates a closure several times",
    "SparseAdam": "its gradients are sparse",
}
_QUANTIZED = ("bitsandbytes", "shardopt", "torchao")


def _listed(table: str) -> Iterator[str]:
    module = ""
    for word in table.split():
        if word.endswith(":"):
            module = word[:-1]
        else:
            yield f"{module}.{word}"


KINDS = {
    **dict.fromkeys(_listed(_ELEMENTWISE), Kind.ELEMENTWISE),
    **dict.fromkeys(_listed(_BY_PARAMETER), Kind.BY_PARAMETER),
    **dict.fromkeys(_listed(_TOGETHER), Kind.TOGETHER),
}


def kind_of(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]] | None = None) -> Kind:
    """The kind of an optimizer with its options. Classes are listed by full name; subclasses are untested.

    Args:
        optimizer: the optimizer.
        groups: the param groups that it is to have; None for the present ones.
    """
    groups = optimizer.param_groups if groups is None else groups
    if _clips_all(optimizer, groups):
        return Kind.TOGETHER
    kind = KINDS.get(full_name(optimizer), Kind.UNKNOWN)
    options: list[Mapping[str, Any]] = [*groups, vars(optimizer)]
    if kind is Kind.ELEMENTWISE and any(values.get(name) for values in options for name in _BY_PARAMETER_OPTIONS):
        return Kind.BY_PARAMETER
    return kind


def is_tested(optimizer: Optimizer) -> bool:
    """Whether the optimizer's class is in the tables here."""
    return full_name(optimizer) in KINDS


def full_name(optimizer: Optimizer) -> str:
    """The module and the name of the optimizer's class."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _clips_all(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the optimizer clips by the norm of all gradients."""
    clips = any(group.get("max_grad_norm") for group in groups)
    return clips and bool(getattr(optimizer, "pre_norm", True))  # pytorch_optimizer's Lamb has both options


def refuse(optimizer: object) -> None:
    """Checks that the state of an optimizer can be quantized.

    Raises:
        TypeError: ``optimizer`` is no torch.optim.Optimizer, is quantized already, wraps another optimizer, or is of a
            class whose step or state cannot be divided by parameters.
    """
    name, package = type(optimizer).__name__, type(optimizer).__module__.partition(".")[0]
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"quantize_state: got {name}, expected a torch.optim.Optimizer")
    if package in _QUANTIZED:
        raise TypeError(
            f"quantize_state: got {name} of {package}, whose state is quantized already, expected another optimizer; "
            "use it as it is"
        )
    for base in type(optimizer).__mro__:
        if base.__name__ in _REFUSED:
            raise TypeError(
                f"quantize_state: got {name}, expected another optimizer, as {_REFUSED[base.__name__]}; use {name} "
                "without quantize_state"
            )
    inner = next((type(x).__name__ for x in vars(optimizer).values() if isinstance(x, Optimizer)), None)
    if inner is not None:
        raise TypeError(
            f"quantize_state: got {name} around {inner}, expected {inner}, which has the state; quantize that one and "
            f"put {name} around the result"
        )
    states = [optimizer.state.get(param, {}) for group in optimizer.param_groups for param in group["params"]]
    coded = next((entry for state in states for entry in coded_names(state)), None)
    if coded is not None:
        raise TypeError(
            f"quantize_state: got {name} with {coded} in codes, expected floats; use the result of the first call of "
            "quantize_state, which has this optimizer inside"
        )


def refuse_options(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError if a param group is differentiable, which state in codes cannot be."""
    if any(group.get("differentiable") for group in groups):
        raise ValueError("differentiable: got True, which quantized state cannot be; leave the option out")
