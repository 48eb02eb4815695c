"""Optimizers that were tested, by class, and those whose state cannot be quantized one parameter at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.optim.optimizer import Optimizer

#: Modules and classes. The update of an element depends on no other element.
_ELEMENTWISE = """
torch.optim: adadelta.Adadelta adagrad.Adagrad adam.Adam adamax.Adamax adamw.AdamW asgd.ASGD nadam.NAdam radam.RAdam
    rmsprop.RMSprop rprop.Rprop sgd.SGD
timm.optim: adabelief.AdaBelief adopt.Adopt laprop.LaProp lion.Lion nadamw.NAdamW rmsprop_tf.RMSpropTF
pytorch_optimizer.optimizer: adopt.ADOPT ademamix.AdEMAMix lion.Lion tiger.Tiger yogi.Yogi
    schedulefree.ScheduleFreeAdamW schedulefree.ScheduleFreeRAdam schedulefree.ScheduleFreeSGD
schedulefree: adamw_schedulefree.AdamWScheduleFree radam_schedulefree.RAdamScheduleFree
    sgd_schedulefree.SGDScheduleFree
"""
#: The update of an element depends on others of the parameter, through norms or products of matrices.
_BY_PARAMETER = """
torch.optim: Adafactor _adafactor.Adafactor Muon _muon.Muon
timm.optim: adan.Adan lamb.Lamb lars.Lars mars.Mars
pytorch_optimizer.optimizer: adafactor.AdaFactor adamp.AdamP adamw.StableAdamW adan.Adan amos.Amos apollo.APOLLO
    came.CAME fadam.FAdam fira.Fira galore.GaLore grokfast.GrokFastAdamW lamb.Lamb mars.MARS muon.muon.Muon
    ranger21.Ranger21 sm3.SM3 soap.SOAP
"""
#: Options that make an element-wise optimizer depend on the whole parameter.
_BY_PARAMETER_OPTIONS = ("adanorm", "caution", "cautious", "orthograd", "stable_adamw", "use_gc")

#: By the name of the class, or of one that it is derived from.
_REFUSED = {
    "LBFGS": "its state is one history of all parameters, and its step evaluates a closure several times",
    "SparseAdam": "its gradients are sparse",
}
_TOGETHER = {"Prodigy", "DAdaptAdaGrad", "DAdaptAdam", "DAdaptAdan", "DAdaptLion", "DAdaptSGD", "AdamS", "SPAM"}
_QUANTIZED = ("bitsandbytes", "shardopt", "torchao")


def _listed(table: str) -> Iterator[str]:
    module = ""
    for word in table.split():
        if word.endswith(":"):
            module = word[:-1]
        else:
            yield f"{module}.{word}"


ELEMENTWISE, BY_PARAMETER = frozenset(_listed(_ELEMENTWISE)), frozenset(_listed(_BY_PARAMETER))


def full_name(optimizer: object) -> str:
    """The module and the name of the optimizer's class."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def is_known(optimizer: Optimizer) -> bool:
    """Whether the optimizer's class was tested; a subclass of one was not."""
    return full_name(optimizer) in ELEMENTWISE | BY_PARAMETER


def is_elementwise(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the optimizer, with these param groups, is known to update each element by itself."""
    options: list[Mapping[str, Any]] = [*groups, vars(optimizer)]
    by_option = any(values.get(name) for values in options for name in _BY_PARAMETER_OPTIONS)
    return full_name(optimizer) in ELEMENTWISE and not by_option


def refuse(optimizer: object) -> None:
    """Raises TypeError for an optimizer whose state is quantized already, or whose step or state cannot be divided."""
    name, why = type(optimizer).__name__, None
    bases = [base.__name__ for base in type(optimizer).__mro__]
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"quantize_state: got {name}, expected a torch.optim.Optimizer")
    states = [state for state in optimizer.state.values() if isinstance(state, Mapping)]
    inner = next((type(x).__name__ for x in vars(optimizer).values() if isinstance(x, Optimizer)), None)
    if full_name(optimizer).partition(".")[0] in _QUANTIZED:
        why = "its state is quantized already; use it as it is"
    elif any(str(key).endswith("_scales") for state in states for key in state):
        why = "it has state in codes; use the result of the first call of quantize_state, which has it inside"
    elif inner is not None:
        why = f"the state is that of {inner} inside; quantize {inner}, and put {name} around the result"
    elif any(base in _TOGETHER for base in bases):
        why = f"it looks at all parameters together, and would be given one at a time; use {name} as it is"
    elif refused := [_REFUSED[base] for base in bases if base in _REFUSED]:
        why = f"{refused[0]}; use {name} as it is"
    if why is not None:
        raise TypeError(f"quantize_state: got {name}, expected another optimizer, as {why}")


def refuse_options(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError if a param group has an option that does not go with one parameter at a time."""
    if any(group.get("differentiable") for group in groups):
        raise ValueError("differentiable: got True, which quantized state cannot be; leave the option out")
    if any(group.get("max_grad_norm") for group in groups) and getattr(optimizer, "pre_norm", True):
        raise ValueError(
            f"max_grad_norm: got a number for {type(optimizer).__name__}, expected None, as the norm is that of all "
            "parameters, and a step is given one at a time; leave it out, and call clip_grad_norm_ before the step"
        )
