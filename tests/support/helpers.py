"""Helpers of several tests: every rule under test, the reference step as an optimizer, odd storage, snapshots."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

import reference
import shardopt
import shardopt.codec as coding
from ranks.snapshot import Snapshot, snapshot
from shardopt.codec import CODECS
from shardopt.kernels.weights import noise_key
from shardopt.layout import shard_of
from shardopt.optim import ShardedOptimizer
from shardopt.state.options import DEFAULTS
from shardopt.state.rule import Rule
from shardopt.state.slice_spec import LOW_BITS, ROW_MOMENTS, SliceSpec
from shardopt.state.tensor_spec import tensor_spec_of
from shardopt.step.muon.matrices import matrix_shapes
from shardopt.step.muon.waves import normalized

Shape = tuple[int, ...]
Named = dict[str, Tensor]

#: The codecs that every rule can have.
CODEC_NAMES = tuple(name for name, codec in CODECS.items() if not codec.shared)
BLOCKWISE = tuple(name for name in CODEC_NAMES if CODECS[name].blockwise)
EIGHT_BIT = tuple(name for name in BLOCKWISE if CODECS[name].code_dtype == torch.uint8)


class RuleCase(NamedTuple):
    """An optimizer class with hyper-parameters that make every term of its rule count."""

    optimizer: type[ShardedOptimizer]
    hyper: Mapping[str, Any]

    def make(self, params: Any, **options: Any) -> ShardedOptimizer:
        return self.optimizer(params, **{**self.hyper, **options})


class RepaidCase(RuleCase):
    """AdamW that repays what codes lose where weights can hold that: with log8, and log4 for other codecs of blocks."""

    def make(self, params: Any, **options: Any) -> ShardedOptimizer:
        listed = list(params)
        groups = []
        for given in listed if isinstance(listed[0], dict) else [{"params": listed}]:
            group = {**options, **given}
            codec, bits = group.get("codec", "log8"), group.get("master_weight_bits")
            codec = "log4" if CODECS[codec].blockwise and codec != "log8" else codec
            wide = bits is not None or all(param.dtype == torch.float32 for param in group["params"])
            groups.append({**given, "codec": codec, "repay": wide and CODECS[codec].relative})
        return super().make(groups, **{**options, "codec": "log8", "repay": False})


def _case(optimizer: type[ShardedOptimizer], **hyper: Any) -> RuleCase:
    return RuleCase(optimizer, {"lr": 1e-2, **hyper})


RULES: dict[str, RuleCase] = {
    "adamw": _case(shardopt.AdamW8bit, weight_decay=0.1),
    "adam": _case(shardopt.Adam8bit, weight_decay=0.1),
    "repaid_adamw": RepaidCase(shardopt.AdamW8bit, {"lr": 1e-2, "weight_decay": 0.1}),
    "lion": _case(shardopt.Lion8bit, lr=1e-3, weight_decay=0.1),
    "momentum": _case(shardopt.SGD8bit, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "nesterov": _case(shardopt.SGD8bit, momentum=0.9, nesterov=True),
    "sgd": _case(shardopt.SGD8bit, weight_decay=0.01),
    "amsgrad": _case(shardopt.AdamW8bit, weight_decay=0.1, amsgrad=True),
    "nadam": _case(shardopt.NAdam8bit, weight_decay=0.1, momentum_decay=0.1),
    "radam": _case(shardopt.RAdam8bit, betas=(0.9, 0.95), weight_decay=0.1),
    "adamax": _case(shardopt.Adamax8bit, weight_decay=0.1),
    "ademamix": _case(shardopt.AdEMAMix8bit, weight_decay=0.1, alpha_steps=3, beta3_steps=4),
    "adopt": _case(shardopt.ADOPT8bit, weight_decay=0.1, decoupled_weight_decay=True),
    "adan": _case(shardopt.Adan8bit, weight_decay=0.1),
    "adagrad": _case(shardopt.Adagrad8bit, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.25),
    "rmsprop": _case(shardopt.RMSprop8bit, weight_decay=0.1),
    "rmsprop_momentum": _case(shardopt.RMSprop8bit, momentum=0.9),
    "centered_rmsprop": _case(shardopt.RMSprop8bit, alpha=0.5, centered=True, weight_decay=0.1),
    "centered_rmsprop_momentum": _case(shardopt.RMSprop8bit, alpha=0.5, centered=True, momentum=0.9),
    "lamb": _case(shardopt.LAMB8bit, weight_decay=0.1),
    "lars": _case(shardopt.LARS8bit, lr=10.0, weight_decay=0.1),
    "stable_adamw": _case(shardopt.StableAdamW8bit, betas=(0.9, 0.5), weight_decay=0.1),
    "cautious_adamw": _case(shardopt.AdamW8bit, weight_decay=0.1, cautious=True, cautious_weight_decay=True),
    "cautious_adam": _case(shardopt.Adam8bit, weight_decay=0.1, cautious=True),
    "cautious_decay_lion": _case(shardopt.Lion8bit, lr=1e-3, weight_decay=0.1, cautious_weight_decay=True),
    "cautious_lion": _case(shardopt.Lion8bit, lr=1e-3, weight_decay=0.1, cautious=True),
    # With an L2 penalty, which all gradients have in common, so that the estimate grows.
    "prodigy": _case(
        shardopt.Prodigy8bit, lr=0.5, d0=1e-3, d_coef=20.0, weight_decay=30.0, decouple=False, use_bias_correction=True
    ),
    "decoupled_prodigy": _case(
        shardopt.Prodigy8bit, lr=1.0, d0=1e-3, d_coef=1e3, weight_decay=0.1, growth_rate=1.1, safeguard_warmup=True
    ),
    "signum": _case(shardopt.Signum8bit, lr=1e-3, weight_decay=0.1),
}


class MuonCase(RuleCase):
    """Muon for all parameters of two dimensions or more, and AdamW for the others."""

    def make(self, params: Any, memory: int | None = None, **options: Any) -> ShardedOptimizer:
        groups: list[dict[str, Any]] = []
        for given in params:
            group = given if isinstance(given, dict) else {"params": [given]}
            for param in group["params"]:
                algorithm = "adamw" if len(getattr(param, "ds_shape", shard_of(param).global_shape)) < 2 else "muon"
                if not groups or groups[-1] != {**group, "params": groups[-1]["params"], "algorithm": algorithm}:
                    groups.append({**group, "params": [], "algorithm": algorithm})
                groups[-1]["params"].append(param)
        return limited(super().make(groups, **options), memory)


class WavesCase(MuonCase):
    """Muon in several waves."""

    def make(self, params: Any, memory: int | None = 100_000, **options: Any) -> ShardedOptimizer:
        return super().make(params, memory, **options)


def limited(optimizer: ShardedOptimizer, memory: int | None) -> ShardedOptimizer:
    """Muon whose directions and intermediate results take at most so many bytes at a time; None: as many as usual."""
    original = optimizer.rule

    def rule(group: Mapping[str, Any]) -> Rule:
        found = original(group)
        if memory is None or found.orthogonalized is None:
            return found
        return replace(found, orthogonalized=replace(found.orthogonalized, memory=memory))

    optimizer.rule = rule  # type: ignore[method-assign]
    return optimizer


#: Rules that treat parameters as matrices, beside those of single elements.
CASES: dict[str, RuleCase] = {
    **RULES,
    "muon": MuonCase(shardopt.Muon8bit, {"lr": 1e-2}),
    "muon_in_waves": WavesCase(shardopt.Muon8bit, {"lr": 1e-2}),
    "normuon": WavesCase(shardopt.NorMuon8bit, {"lr": 1e-2}),
}

#: Rules that the CPU and CUDA compile together with each usual codec (csrc/step/instances.h).
USUAL_RULES = ("adamw", "lion", "momentum")
_OTHER_RULES = [rule for rule in RULES if rule not in (*USUAL_RULES, "repaid_adamw")]

#: A cover of rules and codecs: usual rules with every codec; another rule, whose code knows of its codec only whether
#: it codes roots, with log8, which does, and a codec which does not; Prodigy's wide moments with each width; and repaid
#: AdamW with both codecs that it may have (companded8 stands for log4, see RepaidCase).
RULES_AND_CODECS = [
    *((rule, codec) for rule in USUAL_RULES for codec in CODEC_NAMES),
    *((rule, "log8") for rule in _OTHER_RULES),
    *((rule, ("bf16", "dynamic8", "fp32")[place % 3]) for place, rule in enumerate(_OTHER_RULES)),
    *(("prodigy", codec) for codec in ("companded16", "bf16")),
    *(("repaid_adamw", codec) for codec in ("log8", "companded8")),
]
ALL_RULES_AND_CODECS = [(rule, codec) for rule in RULES for codec in CODEC_NAMES]
#: For what concerns a rule or a codec, and not both: each once.
EACH_RULE_AND_CODEC = [
    *((rule, "log8") for rule in RULES),
    *(("adamw", codec) for codec in CODEC_NAMES if codec != "log8"),
]


def with_gradient(param: Tensor, gradient: Tensor) -> None:
    """Sets a parameter's gradient, of any dtype."""
    param.grad = None
    if hasattr(Tensor, "grad_dtype"):
        param.grad_dtype = gradient.dtype
        param.grad = gradient
    else:  # older versions of PyTorch check the dtype only where a gradient is assigned
        param.grad = gradient.to(param.dtype)
        param.grad.data = gradient


def step(optimizer: ShardedOptimizer, params: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
    """One step with these gradients, moved to where the parameters are."""
    for name, param in params.items():
        with_gradient(param, gradients[name].to(param.device))
    optimizer.step()


def stepped(gradient: Tensor, rule: str, codec: str, **hyper: Any) -> dict[str, Tensor]:
    """The state after the first step of the compiled kernels, in blocks of 256."""
    param = Parameter(torch.zeros_like(gradient))
    options = {"codec": codec, "block_size": 256, "min_quantized_numel": 0}
    optimizer = RULES[rule].make([param], **{"weight_decay": 0.0, **hyper, **options})
    with_gradient(param, gradient)
    optimizer.step()
    return optimizer.state[param]


def parameters(values: Mapping[str, Tensor]) -> Named:
    """Parameters with copies of these values."""
    return {name: Parameter(value.clone()) for name, value in values.items()}


def at_odd_offset(tensor: Tensor, offset: int = 3) -> Tensor:
    """A contiguous copy whose storage begins ``offset`` elements before it, and ends one after."""
    buffer = torch.zeros(tensor.numel() + offset + 1, dtype=tensor.dtype, device=tensor.device)
    view = buffer[offset : offset + tensor.numel()].view(tensor.shape)
    return view.copy_(tensor)


class ReferenceOptimizer:
    """Steps copies of an optimizer's parameters (``params``, by name) and state with the reference step."""

    def __init__(self, params: Mapping[str, Tensor], optimizer: ShardedOptimizer) -> None:
        self._optimizer = optimizer
        self._groups = {param: group for group in optimizer.param_groups for param in group["params"]}
        self._places = {param: place for place, param in enumerate(self._groups)}
        self._originals = dict(params)
        self.params = {name: param.detach().clone() for name, param in params.items()}
        self.state: dict[str, dict[str, Tensor]] = {}
        for name, param in params.items():
            state = optimizer.state.get(param) or self._spec(name).new_state(torch.device("cpu"))
            self.state[name] = {key: value.clone() for key, value in state.items()}
        self.nonfinite = 0
        first = optimizer.param_groups[0]
        kept = first.keys() - {*DEFAULTS, "params", "lr", "weight_decay"} if optimizer.rule(first).has_totals else ()
        self._found = {key: first[key] for key in kept}  # sums over all parameters change these, here and there

    def step(self, gradients: Mapping[str, Tensor], gradient_scale: float = 1.0) -> None:
        for name in gradients:
            self.state[name]["step"] += 1
        twin = copy.copy(self._optimizer)
        twin.param_groups = [{**group, **self._found} for group in self._optimizer.param_groups]
        hyper = [dict(twin.hyper(group)) for group in twin.param_groups]
        group_of = {param: i for i, group in enumerate(twin.param_groups) for param in group["params"]}
        groups = {name: group_of[self._originals[name]] for name in gradients}

        def referred(name: str, **more: Any) -> Any:
            own = hyper[groups[name]]
            return self._reference(name, gradients[name], own, gradient_scale=gradient_scale, **more)

        if any(twin.rule(group).has_totals for group in twin.param_groups):
            terms = [referred(name, products_only=True) for name in gradients]
            totals = [math.fsum(x for each in of_sum for x in each) for of_sum in zip(*terms, strict=True)]
            for own, more in zip(hyper, twin.hyper_from_totals(totals), strict=True):
                own.update(more)
            self._found = {key: twin.param_groups[0][key] for key in self._found}
        for name in gradients:
            spec, state, stepped = self._spec(name), self.state[name], referred(name)
            self.params[name] = stepped.param
            if stepped.low_bits is not None:
                state[LOW_BITS] = stepped.low_bits
            state.update(spec.state_from_coded(stepped.coded))
            self.nonfinite += stepped.nonfinite

    def _reference(self, name: str, gradient: Tensor, hyper: Mapping[str, float], **more: Any) -> Any:
        original, spec, state = self._originals[name], self._spec(name), self.state[name]
        group = self._groups[original]
        rule = self._optimizer.rule(group)
        step = {"step": int(state["step"]), "block_size": group["block_size"], "nonfinite": group["nonfinite"]}
        coded = [spec.codes_and_scales(state, moment) for moment in spec.moments]
        weights = {
            "param": self.params[name],
            "weights": spec.weights,
            "low_bits": state.get("master_low_bits"),
            "noise_key": noise_key(group["stochastic_rounding_seed"], self._places[original]),
        }
        first = partial(
            reference.step, rule.name, spec.moments, spec.codec, coding, gradient=gradient, coded=coded,
            hyper=hyper, **step, **more,
        )  # fmt: skip
        if rule.orthogonalized is None:
            return first(**weights)
        direction = first(param=torch.zeros_like(original, dtype=torch.bfloat16))
        apply = partial(
            reference.step, rule.orthogonalized.applied_rule, [], spec.codec, coding, coded=[], **weights, **step
        )  # fmt: skip
        param, low_bits, skipped = [], [], direction.nonfinite
        for start, rows, cols in matrix_shapes(name, tuple(original.shape), rule.orthogonalized.split):
            part = slice(start, start + rows * cols)
            matrix = direction.param.flatten()[part].view(rows, cols).clone()
            whole, result = torch.zeros_like(direction.param), rule.orthogonalized.newton_schulz(matrix)
            if rule.orthogonalized.row_decay is not None:
                row_moments = state[ROW_MOMENTS].view(-1)[start // cols : start // cols + rows]
                result = normalized(result, row_moments, rule.orthogonalized.row_decay)
            whole.view(-1)[part] = result.bfloat16().flatten()
            # As noise depends on an element's place, the parameter is stepped whole, once for each of its matrices.
            applied = apply(gradient=whole, hyper={**hyper, "scale": rule.orthogonalized.scale(rows, cols)})
            param.append(applied.param.flatten()[part])
            if applied.low_bits is not None:
                low_bits.append(applied.low_bits.reshape(original.numel(), -1)[part])
            skipped += applied.nonfinite
        return reference.Stepped(
            torch.cat(param).view(original.shape),
            torch.cat(low_bits).view(weights["low_bits"].shape) if low_bits else None,
            direction.coded,
            skipped,
        )

    def snapshot(self) -> Snapshot:
        """In the form of :func:`ranks.snapshot.snapshot`."""
        found: Snapshot = {}
        for name, param in self.params.items():
            found[name] = param.clone()
            found |= {f"{name}/{entry}": value.clone() for entry, value in sorted(self.state[name].items())}
        return found

    def _spec(self, name: str) -> SliceSpec:
        param = self._originals[name]
        group = self._groups[param]
        return tensor_spec_of(param, group, self._optimizer.rule(group).moments).slices[0]


def single(optimizer: ShardedOptimizer) -> tuple[Tensor, dict[str, Any]]:
    """The only parameter of an optimizer, and its state."""
    ((param,),) = (group["params"] for group in optimizer.param_groups)
    return param, optimizer.state[param]


def everything(optimizer: torch.optim.Optimizer) -> Snapshot:
    """All parameters and state entries of an optimizer, by their place in its groups."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return snapshot({str(index): param for index, param in enumerate(params)}, optimizer)


def through_a_file(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The value after torch.save and torch.load."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
