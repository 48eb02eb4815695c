"""Tables of the optimizer classes that were tested with quantize_state, and of those that it refuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim.optimizer import Optimizer


def _full_names(**packages: str) -> frozenset[str]:
    """Names such as ``torch.Adam``, given the names of each package's classes, separated by spaces."""
    return frozenset(f"{package}.{name}" for package, names in packages.items() for name in names.split())


#: Tested classes that update each element independently of all others: shards can be stepped.
ELEMENTWISE = _full_names(
    torch="ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD",
    timm="AdaBelief Adopt LaProp Lion NAdamW RMSpropTF",
    pytorch_optimizer="ADOPT AdEMAMix Lion ScheduleFreeAdamW ScheduleFreeRAdam ScheduleFreeSGD Tiger Yogi",
    schedulefree="AdamWScheduleFree RAdamScheduleFree SGDScheduleFree",
)
#: Tested classes whose update uses norms or matrix products over the whole parameter, which must not be sharded.
BY_PARAMETER = _full_names(
    torch="Adafactor Muon",
    timm="Adan Lamb Lars Mars",
    pytorch_optimizer="APOLLO AdaFactor AdamP Adan Amos CAME FAdam Fira GaLore GrokFastAdamW Lamb MARS Muon "
    "Ranger21 SM3 SOAP StableAdamW",
)
#: Options that make an element-wise optimizer depend on the whole parameter.
_BY_PARAMETER_OPTIONS = ("adanorm", "caution", "cautious", "orthograd", "stable_adamw", "use_gc")

_COUPLED = "Prodigy DAdaptAdaGrad DAdaptAdam DAdaptAdan DAdaptLion DAdaptSGD AdamS SPAM"
#: Reasons to refuse an optimizer, by the name of its class or of a base class.
_REFUSED = {
    "LBFGS": "its state is one history of all parameters, and its step evaluates a closure several times",
    "SparseAdam": "its gradients are sparse",
    **dict.fromkeys(_COUPLED.split(), "it looks at all parameters together, and would be given one at a time"),
}
#: Packages whose optimizers quantize their state themselves.
_QUANTIZED = ("bitsandbytes", "shardopt", "torchao")


def full_name(optimizer: object) -> str:
    """The top-level package and the name of the optimizer's class: ``torch.AdamW``."""
    return f"{type(optimizer).__module__.partition('.')[0]}.{type(optimizer).__qualname__}"


def is_known(optimizer: Optimizer) -> bool:
    """Whether this very class was tested with quantize_state; subclasses of tested classes count as untested."""
    return full_name(optimizer) in ELEMENTWISE | BY_PARAMETER


def is_elementwise(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the optimizer is known to update each element independently, given the options in its param groups."""
    options: list[Mapping[str, Any]] = [*groups, vars(optimizer)]
    by_option = any(values.get(name) for values in options for name in _BY_PARAMETER_OPTIONS)
    return full_name(optimizer) in ELEMENTWISE and not by_option


def check_supported(optimizer: object) -> None:
    """Raises TypeError for an optimizer that cannot be stepped per parameter, or whose state is quantized already."""
    name, why = type(optimizer).__name__, None
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"quantize_state: got {name}, expected a torch.optim.Optimizer")
    inner = next((type(x).__name__ for x in vars(optimizer).values() if isinstance(x, Optimizer)), None)
    reasons = [_REFUSED[base.__name__] for base in type(optimizer).__mro__ if base.__name__ in _REFUSED]
    if full_name(optimizer).partition(".")[0] in _QUANTIZED:
        why = "its state is quantized already; use it as it is"
    elif inner is not None:
        why = f"the state is that of {inner} inside; quantize {inner}, and put {name} around the result"
    elif reasons:
        why = f"{reasons[0]}; use {name} as it is"
    if why is not None:
        raise TypeError(f"quantize_state: got {name}, expected another optimizer, as {why}")


def check_supported_options(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError if a param group has an option that fails when parameters are stepped one at a time."""
    if any(group.get("differentiable") for group in groups):
        raise ValueError("differentiable: got True, which quantized state cannot be; leave the option out")
    if any(group.get("max_grad_norm") for group in groups) and getattr(optimizer, "pre_norm", True):
        raise ValueError(
            f"max_grad_norm: got a number for {type(optimizer).__name__}, expected None, as the norm is that of all "
            "parameters, and a step is given one at a time; leave it out, and call clip_grad_norm_ before the step"
        )
