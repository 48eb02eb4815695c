"""Divides a model's parameters into param groups for Muon: hidden matrices by Muon, all others by another rule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from glob import escape
from typing import Any, Literal

from torch.nn import Embedding, EmbeddingBag, Linear, Module

from shardopt.layout.names import canonical_modules
from shardopt.optim.param_groups import GroupedParameter, ParamGroups, check_patterns, param_groups
from shardopt.state.rule import Split

#: Names that input and output embeddings usually have.
_EMBEDDING_PATTERNS = ("*embed*", "*lm_head*", "head.weight", "*.head.weight", "wte.*", "*.wte.*", "wpe.*", "*.wpe.*")


def muon_groups(
    model: Module,
    lr: float = 2e-2,
    adamw_lr: float = 3e-4,
    exclude: Iterable[str] = (),
    split: Mapping[str, Split] | None = None,
    no_decay: Iterable[str] | Literal["auto"] = (),
    other: Literal["adamw", "lion"] = "adamw",
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
) -> ParamGroups:
    """Divides a model into param groups for :class:`shardopt.Muon`: Muon for hidden matrices, AdamW for the rest.

    The rest are

    - parameters of one dimension: biases, norms;
    - embeddings: weights of ``torch.nn.Embedding`` and parameters tied to them;
    - the output head: the last linear layer, if it has as many outputs as the first embedding has entries;
    - parameters with "embed" or "lm_head" anywhere in their names (the matrices of a module "embedder", too), or with
      a module or parameter "head", "wte" or "wpe" in them;
    - parameters that match ``exclude``.

    When to call it, and how patterns match, is as for :func:`shardopt.param_groups`. Check the result's ``table()``.

    Args:
        model: the model.
        lr: learning rate of Muon.
        adamw_lr: learning rate of the rest.
        exclude: patterns of further parameters that are not for Muon.
        split: by pattern, how parameters are divided into matrices; see :class:`shardopt.Muon`.
        no_decay: patterns of parameters with ``weight_decay=0``, or "auto": all of fewer than two dimensions.
        other: the rule for the rest.
        overrides: by pattern, options and hyper-parameters, which win over those that this function gives. A pattern
            with another ``algorithm`` brings that algorithm's learning rate with it.

    Returns:
        A list of param groups; ``table()`` says which rule steps each parameter.

    Raises:
        TypeError: ``model`` is no Module.
        ValueError: a pattern matches no parameter or none of Muon's, an option is unknown, or one flat parameter (FSDP1
            with ``use_orig_params=False``) has parts for both.
    """
    if other not in ("adamw", "lion"):
        raise ValueError(f"other: got {other!r}, expected 'adamw' or 'lion'")
    if isinstance(exclude, str):
        raise ValueError(f'exclude: got {exclude!r}, expected several patterns; write ("*.qkv.*",) for one')
    exclude, split, overrides = tuple(exclude), split or {}, overrides or {}
    parameters = param_groups(model).parameters
    embeddings = [*_EMBEDDING_PATTERNS, *(escape(name) for name in _embedding_weights(model))]
    rest_options: dict[str, Any] = {"algorithm": other, "lr": adamw_lr}
    if other == "lion":
        rest_options["betas"] = (0.9, 0.99)  # Lion's default in place of Muon's, which suits AdamW
    options: dict[str, dict[str, Any]] = {}
    check_patterns([*exclude, *split], [name for parameter in parameters for name in parameter.names])
    for parameter in parameters:
        is_for_muon = len(parameter.shape) > 1 and not _matches(parameter, [*embeddings, *exclude])
        for pattern, pattern_options in overrides.items():
            if "algorithm" in pattern_options and _matches(parameter, [pattern]):
                is_for_muon = pattern_options["algorithm"] == "muon"
        chosen: dict[str, Any] = {"algorithm": "muon", "lr": lr} if is_for_muon else dict(rest_options)
        for pattern, value in split.items():
            if _matches(parameter, [pattern]):
                if not is_for_muon:
                    raise ValueError(
                        f"split[{pattern!r}]: got a pattern that matches {parameter.names[0]} of shape "
                        f"{parameter.shape}, expected matrices for Muon only; correct the pattern"
                    )
                chosen["split"] = value
        options[escape(parameter.names[0])] = chosen
    for pattern, pattern_options in overrides.items():  # moved to the end, as the last pattern that matches wins
        options[pattern] = {**options.pop(pattern, {}), **pattern_options}
    return param_groups(model, options, no_decay)


def _matches(parameter: GroupedParameter, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in parameter.names)


def _embedding_weights(model: Module) -> list[str]:
    """Names of embedding weights, and of the output head's: the last linear layer, with an output per embedding."""
    modules = list(canonical_modules(model, all_names=True))
    embeddings = {
        f"{prefix}weight": module for prefix, module in modules if isinstance(module, Embedding | EmbeddingBag)
    }
    linear = {f"{prefix}weight": module for prefix, module in modules if isinstance(module, Linear)}
    names = list(embeddings)
    if embeddings and linear:
        last_name, last_linear = list(linear.items())[-1]
        first_embedding = next(iter(embeddings.values()))
        if last_linear.out_features == first_embedding.num_embeddings:
            names.append(last_name)
    return names
