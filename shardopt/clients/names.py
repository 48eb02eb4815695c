"""Selecting shardopt's optimizers by name in Hugging Face's ``TrainingArguments(optim="shardopt_adamw_8bit")``.

Two patches of transformers: the enumeration ``training_args.OptimizerNames`` gets a member per optimizer, and
``Trainer.get_optimizer_cls_and_kwargs`` returns its class. ``import shardopt`` installs them as import hooks.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from glob import escape
from importlib import metadata
from types import ModuleType
from typing import Any

from torch.nn import Module

from shardopt.optim import OPTIMIZERS, Muon, ShardedOptimizer
from shardopt.optim.muon_groups import muon_groups
from shardopt.optim.param_groups import ParamGroups, param_groups
from shardopt.sharding.hooks import hooked_packages, install_hooks, is_within

#: Every optimizer by its name for Trainer: "shardopt_adamw", "shardopt_adamw_8bit", "shardopt_adamw_4bit", ...
NAMES: dict[str, type[ShardedOptimizer]] = {
    re.sub(r"(\dbit)$", r"_\1", f"shardopt_{name}"): kind for name, kind in OPTIMIZERS.items()
}
#: The versions of transformers that can be patched: from the first, to before the second.
VERSIONS = ((4, 57), (6, 0))

#: Defaults of TrainingArguments' adam_beta1, adam_beta2, adam_epsilon: left so, the optimizer's own defaults apply.
_BETAS, _EPS = (0.9, 0.999), 1e-8
#: Options in ``optim_args`` that are muon_groups' arguments instead of Muon's.
_GROUP_OPTIONS = inspect.signature(muon_groups).parameters.keys() - {"model", "lr"}


def register() -> None:
    """Patches transformers to accept shardopt's optimizers by name: now if it is imported, else when it will be.

    ``import shardopt`` does so already, unless the environment variable ``SHARDOPT_HOOKS`` leaves transformers out.

    Raises:
        RuntimeError: the installed version of transformers has not been tried.
    """
    version = installed_version()
    if version is not None and not is_within(version, VERSIONS):
        first, end = (".".join(map(str, numbers)) for numbers in VERSIONS)
        raise RuntimeError(
            f"got transformers {version}, expected {first} or later, before {end}, to name optimizers by optim=; pass "
            "optimizer_cls_and_kwargs=(shardopt.AdamW8bit, {...}) to Trainer, or install one of these versions"
        )
    if "transformers" not in hooked_packages():
        install_hooks(["transformers"])


def installed_version() -> str | None:
    """The version of transformers; None if transformers is not installed."""
    try:
        return metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return None


def add_names(training_args: ModuleType) -> None:
    """Adds shardopt's names to the enumeration ``OptimizerNames``, if this version of transformers can be patched."""
    if not is_within(installed_version() or "", VERSIONS):
        return
    names = training_args.OptimizerNames
    for value in NAMES:
        if value in names._value2member_map_:
            continue
        member = str.__new__(names, value)  # an Enum refuses new members, so they are put into its tables
        member._name_, member._value_ = value.upper(), value
        setattr(names, value.upper(), member)
        names._member_names_.append(value.upper())
        names._member_map_[value.upper()] = member
        names._value2member_map_[value] = member


def patch_trainer(trainer: ModuleType) -> None:
    """Patches Trainer to find shardopt's classes by name, if this version of transformers can be patched."""
    if not is_within(installed_version() or "", VERSIONS):
        return
    original = trainer.Trainer.get_optimizer_cls_and_kwargs

    @functools.wraps(original)
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, dict[str, Any]]:
        kind = NAMES.get(getattr(args.optim, "value", args.optim))
        return original(args, model) if kind is None else (kind, _arguments(kind, args, model))

    trainer.Trainer.get_optimizer_cls_and_kwargs = staticmethod(get_optimizer_cls_and_kwargs)


def parse_options(text: str | None) -> dict[str, Any]:
    """Parses ``TrainingArguments.optim_args``: ``"codec=log8, block_size=128, betas=(0.9, 0.95)"``.

    Values that are not Python literals, such as ``log8``, become strings.

    Raises:
        ValueError: a part is not of the form ``name=value``, or no comma separates two options.
    """
    options: dict[str, Any] = {}
    for part in re.split(r",\s*(?=\w+\s*=)", text.strip().rstrip(",")) if text else ():
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not name.isidentifier() or not equals:
            raise ValueError(f'optim_args: got {part!r}, expected options such as "codec=log8, block_size=128"')
        try:
            options[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            if re.search(r"\s\w+\s*=", value):
                raise ValueError(
                    f'optim_args: got {part!r}, expected commas between options, as in "codec=log8, block_size=128"'
                ) from None
            options[name] = value
    return options


def _arguments(kind: type[ShardedOptimizer], args: Any, model: Any) -> dict[str, Any]:
    """Translates TrainingArguments into an optimizer's arguments; options in ``optim_args`` have priority."""
    given = parse_options(args.optim_args)
    if "weight_decay" in given:
        raise ValueError(
            f"optim_args: got weight_decay={given['weight_decay']}, expected TrainingArguments(weight_decay=...), as "
            "Trainer writes that one into its param groups; move the value there"
        )
    adam_options = _changed_adam_options(kind, args)
    if not issubclass(kind, Muon):
        return {"lr": args.learning_rate, **adam_options, **given}
    if model is None:
        raise ValueError(
            f"optim: got {kind.__name__} from a trainer that passes no model, expected a model, as Muon's groups need "
            "the parameters' names; choose another optimizer"
        )
    adamw_eps = adam_options.pop("eps", None)  # not for matrices: Muon's eps is another quantity
    options = {"lr": args.learning_rate, "weight_decay": args.weight_decay, **adam_options, **given}
    group_options = {name: options.pop(name) for name in _GROUP_OPTIONS & options.keys()}
    groups = _muon_groups(model, options["lr"], group_options)
    for group in groups:
        if adamw_eps is not None and "eps" not in given and group["algorithm"] == "adamw":
            group.setdefault("eps", adamw_eps)
    return {"params": groups, **options}


def _changed_adam_options(kind: type[ShardedOptimizer], args: Any) -> dict[str, Any]:
    """``betas`` and ``eps`` of TrainingArguments, if changed from its defaults and if the optimizer has them."""
    parameters = inspect.signature(kind).parameters
    if "betas" not in parameters:
        return {}
    changed: dict[str, Any] = {}
    betas = list(parameters["betas"].default)
    for index, beta in enumerate((args.adam_beta1, args.adam_beta2)):
        if beta != _BETAS[index]:
            betas[index] = beta
            changed["betas"] = tuple(betas)  # a beta that was left alone keeps the optimizer's default
    if args.adam_epsilon != _EPS and "eps" in parameters:
        changed["eps"] = args.adam_epsilon
    return changed


def _muon_groups(model: Module, lr: float, options: dict[str, Any]) -> ParamGroups:
    """Makes Muon's param groups: vectors have no weight decay, as in Trainer's groups.

    Frozen parameters are under AdamW, since Muon would exchange frozen matrices between ranks in every step.
    """
    parameters = param_groups(model).parameters
    frozen = {escape(each.names[0]): {"algorithm": "adamw"} for each in parameters if "frozen" in each.notes}
    options = {"no_decay": "auto", **options, "overrides": {**frozen, **options.get("overrides", {})}}
    return muon_groups(model, lr, **options)
