"""Megatron-Core and Megatron-Bridge: shardopt's optimizers inside of Megatron's DistributedOptimizer.

Megatron's DistributedOptimizer takes no optimizer but Adam, so Megatron makes its Adam, and :func:`replace_adam`
replaces that Adam before it has state. Megatron still does gradient scaling, clipping, the schedule, the reduce-scatter
of gradients and the all-gather of parameters.

Each data-parallel rank steps one contiguous range of every bucket of parameters. Ranges are computed from Megatron's
buffers, and checked against Megatron's own tables. In Megatron a rank's Adam has no tensor for a parameter outside of
the rank's ranges. Here the parameter gets an empty tensor, as quantization blocks may span ranks, and these must list
the same parameters in the same order to exchange scales.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import distrib_optimizer as _theirs
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from shardopt.layout import Engines, FlatShard, Kind, UnknownShardError, assign, keeps_float32_state, register
from shardopt.optim import AdamW, ShardedOptimizer
from shardopt.sharding.in_model import replaced_parameters
from shardopt.sharding.rank_group import rank_group_of

#: The moments in Megatron's checkpoints, by the names that both optimizers have.
_MOMENTS = ("exp_avg", "exp_avg_sq")
#: The options that Megatron's Adam and shardopt's have in common.
_COMMON = ("lr", "weight_decay", "betas", "eps")
#: By model chunk, and by module that a chunk wraps, its DistributedOptimizers: shardopt.checkpoint looks them up.
_wrappers_by_model: weakref.WeakKeyDictionary[Module, tuple[weakref.ref[Any], ...]] = weakref.WeakKeyDictionary()


def replace_adam(optimizer: Any, optimizer_class: type[ShardedOptimizer], **options: Any) -> Any:
    """Replaces the Adam in a Megatron optimizer by one of shardopt's, before the first step; returns the optimizer.

    The learning rate, the weight decay and the param groups are Megatron's. So are betas and eps for AdamW and Adam;
    other rules have their own defaults. All ranks must call this.

    Args:
        optimizer: the result of ``get_megatron_optimizer`` with ``use_distributed_optimizer=True``.
        optimizer_class: ``shardopt.AdamW8bit``, for example.
        **options: arguments of the class, such as ``codec``.

    Raises:
        TypeError: Megatron's optimizer is or contains another than DistributedOptimizer.
        ValueError: the optimizer has state already; Megatron's config leaves weights or state to its own Adam; or the
            rule has sums over parameters, or treats them as matrices, of which each rank has a part only. In this last
            case Megatron's optimizer was changed already: make a new one.
    """
    wrappers = [wrapper for wrapper in _unchained(optimizer) if not getattr(wrapper, "is_stub_optimizer", False)]
    for wrapper in wrappers:
        _check_replaceable(wrapper)
    for wrapper in wrappers:
        wrapper.__class__ = DistributedOptimizer
        wrapper.replace(optimizer_class, options, is_alone=len(wrappers) == 1)
    for model in (model for wrapper in wrappers for chunk in wrapper.model_chunks for model in _unwrapped(chunk)):
        _wrappers_by_model[model] = tuple(map(weakref.ref, wrappers))
    return optimizer


def _unchained(optimizer: Any) -> list[Any]:
    """The optimizers inside of Megatron's ChainedOptimizer; a list of the optimizer itself if it is not chained."""
    optimizers: list[Any] = getattr(optimizer, "chained_optimizers", [optimizer])
    return optimizers


def _check_replaceable(wrapper: Any) -> None:
    """Raises TypeError or ValueError unless Megatron's optimizer is of a kind whose Adam can be replaced, and new."""
    if not isinstance(wrapper, _theirs.DistributedOptimizer):
        raise TypeError(
            f"got Megatron's {type(wrapper).__name__}, expected DistributedOptimizer; set "
            "use_distributed_optimizer=True in the configs of the optimizer and of DistributedDataParallel"
        )
    if wrapper.ddp_config.use_megatron_fsdp:
        raise TypeError("got use_megatron_fsdp=True, expected Megatron's DistributedDataParallel; switch it off")
    if wrapper.config.use_precision_aware_optimizer:
        raise ValueError(
            "got use_precision_aware_optimizer=True, with which Megatron's FusedAdam keeps the weights, expected "
            "False; switch it off: shardopt's state is smaller"
        )
    if isinstance(wrapper.optimizer, HybridDeviceOptimizer):
        raise ValueError(
            'got optimizer_cpu_offload=True, expected False; give replace_adam offload="state" for state in the '
            "host's memory"
        )
    if wrapper.optimizer.state:
        raise ValueError("got an optimizer that has state already, expected a new one; replace its Adam before steps")


def _on_decoded_adam(name: str, *, loads: bool = False) -> Any:
    """Wraps a checkpoint method of Megatron's, so that it sees an Adam with float32 moments."""

    def method(self: DistributedOptimizer, *args: Any, **kwargs: Any) -> Any:
        with self._decoded_adam(loads=loads):
            return getattr(_theirs.DistributedOptimizer, name)(self, *args, **kwargs)

    return method


class DistributedOptimizer(_theirs.DistributedOptimizer):  # type: ignore[misc]
    """Megatron's DistributedOptimizer around one of shardopt's optimizers; :func:`replace_adam` makes it.

    Megatron's checkpoints hold float32 moments: quantized state is decoded to save, and encoded again to load. This may
    change scales and so the last bits of moments. Checkpoints of Megatron's Adam load here and vice versa. Saving or
    loading temporarily takes 8 bytes per element of this rank's ranges.

    Attributes:
        stepped: per param group, a dict from the model's parameters to the tensors that the optimizer steps.
    """

    optimizer: Any  # one of shardopt's; Megatron's methods for checkpoints see a _DecodedAdam
    stepped: list[dict[Tensor, Tensor]]

    def replace(self, optimizer_class: type[ShardedOptimizer], options: dict[str, Any], *, is_alone: bool) -> None:
        """Replaces Megatron's Adam; see :func:`replace_adam`. Collective.

        ``is_alone`` says that the model has no other DistributedOptimizer. Detaches Megatron's views of parameters.
        """
        self._nonempty = nonempty_by_group(self)  # what Megatron clips and saves: no empty tensors
        self.stepped = stepped_by_group(shards_of(self), self._nonempty, self.data_parallel_group)
        adam, groups = self.optimizer, []
        adopted = _COMMON if issubclass(optimizer_class, AdamW) else ("lr", "weight_decay")
        self._adam_only: list[dict[str, Any]] = []  # per param group, options that only Megatron's checkpoints need
        for group, tensors in zip(adam.param_groups, self.stepped, strict=True):
            adam_only = {key: value for key, value in group.items() if key in adam.defaults and key not in adopted}
            kept = {key: value for key, value in group.items() if key not in adam_only and key not in options}
            groups.append({**kept, "params": [*tensors.values()]})
            self._adam_only.append(adam_only)
        self.optimizer = optimizer_class(groups, **options)
        self._check_rule(is_alone)

    def _check_rule(self, is_alone: bool) -> None:
        """Raises ValueError if the rule needs whole parameters, or sums over all, which this optimizer's ranks lack."""
        rules = [self.optimizer.rule(group) for group in self.optimizer.param_groups]
        name = type(self.optimizer).__name__
        only_data_parallel = dist.get_world_size(self.data_parallel_group) == dist.get_world_size()
        if not only_data_parallel and any(rule.sum_count or rule.orthogonalized is not None for rule in rules):
            raise ValueError(
                f"got {name}, which needs whole parameters, with tensor, pipeline or expert parallelism, expected data "
                "parallelism only; take AdamW8bit or another rule of single elements"
            )
        if not is_alone and any(rule.has_totals for rule in rules):
            raise ValueError(
                f"got {name}, which needs sums over all parameters, with several DistributedOptimizers, as experts and "
                "overlap_param_gather_with_optimizer_step have, expected one; take AdamW8bit or another rule of single "
                "elements"
            )

    def get_parameters(self) -> list[Tensor]:
        """The tensors with elements on this rank, whose gradients Megatron clips: without empty tensors."""
        return [tensor for tensors in self._nonempty for tensor in tensors.values()]

    def _collect_main_grad_data_for_unscaling(self) -> list[Tensor]:
        """The gradients of :meth:`get_parameters`, which Megatron unscales in place."""
        return [tensor.grad.detach() for tensor in self.get_parameters() if tensor.grad is not None]

    @property
    def optimizer_state_keys(self) -> tuple[str, ...]:
        """The names of the moments, as keys in Megatron's checkpoints."""
        return _MOMENTS

    state_dict = _on_decoded_adam("state_dict")
    load_state_dict = _on_decoded_adam("load_state_dict", loads=True)
    sharded_state_dict = _on_decoded_adam("sharded_state_dict")
    save_parameter_state = _on_decoded_adam("save_parameter_state")
    load_parameter_state = _on_decoded_adam("load_parameter_state", loads=True)

    def _get_main_param_and_optimizer_states(self, model_param: Tensor) -> dict[str, Tensor]:
        """The float32 weight and moments of a parameter, which Megatron's sharded checkpoints save."""
        (tensor,) = (tensors[model_param] for tensors in self._nonempty if model_param in tensors)
        return {"param": tensor, **{name: self.optimizer.state[tensor][name] for name in _MOMENTS}}

    def _set_main_param_and_optimizer_states(self, model_param: Tensor, tensors: dict[str, Any]) -> None:
        """Overwrites the float32 weight and moments of a parameter, when Megatron loads a sharded checkpoint."""
        for name, tensor in self._get_main_param_and_optimizer_states(model_param).items():
            tensor.detach().copy_(tensors[name])

    @contextmanager
    def _decoded_adam(self, *, loads: bool) -> Iterator[None]:
        """A context in which :attr:`optimizer` is a _DecodedAdam; with ``loads`` encodes its moments at the end."""
        ours = self.optimizer
        if isinstance(ours, _DecodedAdam):  # a checkpoint method has called another one
            yield
            return
        if not isinstance(ours, AdamW) or any(group["amsgrad"] for group in ours.param_groups):
            raise RuntimeError(
                f"got {type(ours).__name__} for Megatron's own checkpoint, which knows Adam's two moments only, "
                "expected AdamW or Adam without amsgrad; use shardopt.checkpoint.save and load"
            )
        self.optimizer = decoded = _DecodedAdam(ours, self._nonempty, self._adam_only)
        try:
            yield
        finally:
            self.optimizer = ours
        if loads:
            decoded.encode(ours)


class _DecodedAdam(Optimizer):
    """An imitation of Megatron's Adam, for its checkpoint methods, with the decoded moments of shardopt's optimizer."""

    def __init__(
        self, ours: AdamW, nonempty: Sequence[Mapping[Tensor, Tensor]], adam_only: Sequence[Mapping[str, Any]]
    ) -> None:
        decoded = ours.state_dict(dequantize=True)["state"]
        state = {param: decoded[index] for param, index in _indices(ours).items() if index in decoded}
        steps = sorted({int(entries.pop("step")) for entries in state.values()}) or [0]
        if len(steps) > 1:
            raise RuntimeError(
                f"got parameters with {steps} steps for Megatron's own checkpoint, which knows one number, expected "
                "the same; use shardopt.checkpoint.save and load"
            )
        groups = [
            {**options, **_adam_entries(ours, group), "step": steps[0], "params": [*tensors.values()]}
            for group, tensors, options in zip(ours.param_groups, nonempty, adam_only, strict=True)
        ]
        super().__init__(groups, {})
        for param in (param for group in self.param_groups for param in group["params"]):
            moments = state.get(param) or {name: torch.zeros_like(param) for name in _MOMENTS}  # before the first step
            if not _theirs.HAVE_APEX_OR_TE:  # torch's Adam, whose state has the step
                moments["step"] = torch.tensor(float(steps[0]), device="cpu")
            self.state[param] = moments

    def encode(self, ours: AdamW) -> None:
        """Loads the float32 moments, steps and options into shardopt's optimizer. All ranks must call this."""
        indices, groups, state = _indices(ours), [], {}
        for group, loaded in zip(ours.param_groups, self.param_groups, strict=True):
            options = {key: loaded.get(key, value) for key, value in _adam_entries(ours, group).items()}
            groups.append({**options, "params": [indices[param] for param in group["params"]]})
            for param in loaded["params"]:
                step = torch.tensor(float(loaded.get("step", 0)), device="cpu")
                state[indices[param]] = {**self.state[param], "step": step}
        ours.load_state_dict({"state": state, "param_groups": groups})


def _indices(optimizer: Optimizer) -> dict[Tensor, int]:
    """The index of each parameter in the optimizer's state dict."""
    return {p: index for index, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}


def _adam_entries(ours: AdamW, group: dict[str, Any]) -> dict[str, Any]:
    """The entries of a param group for Megatron's Adam: options that it knows, and Megatron's own entries."""
    only_ours = ours.defaults.keys() - set(_COMMON)
    return {key: value for key, value in group.items() if key != "params" and key not in only_ours}


def shards_of(wrapper: Any) -> dict[Tensor, FlatShard]:
    """Computes this rank's range (may be empty) of each parameter in a DistributedOptimizer's buffers, in model order.

    Quantization blocks are laid out in the parameter's shape on this rank: its shard under tensor parallelism.

    Raises:
        UnknownShardError: Megatron's tables of this rank's ranges differ from the ranges computed from the buckets.
    """
    group = wrapper.data_parallel_group
    ranks = rank_group_of(group)
    shards = {}
    for buffer, ranges_by_dtype in zip(wrapper.buffers, wrapper.gbuf_ranges, strict=True):
        (ranges,) = ranges_by_dtype.values()  # by bucket
        for param, (begin, _, number) in buffer.param_index_map.items():
            bucket = buffer.buckets[number]
            size = bucket.grad_data.numel() // dist.get_world_size(group)
            shard = FlatShard(tuple(param.shape), begin - bucket.offset, size, ranks)
            entry = ranges[number]["param_map"].get(param)
            listed = (entry["param"].start, entry["param"].end) if entry else (0, 0)
            computed = (shard.start, shard.end) if shard.numel else (0, 0)
            if listed != computed:
                raise UnknownShardError(
                    f"got elements {listed} of a parameter of shape {tuple(param.shape)} on this rank, expected "
                    f"{computed} by the parameter's bucket; this version of Megatron-Core shards in a way that "
                    "shardopt does not know"
                )
            shards[param] = shard
    ordered = dict.fromkeys(param for chunk in wrapper.model_chunks for param in chunk.parameters())
    return {param: shards[param] for param in ordered if param in shards}


def nonempty_by_group(wrapper: Any) -> list[dict[Tensor, Tensor]]:
    """Per param group, a dict from each parameter that this rank has elements of to the float32 tensor of them.

    Detaches the wrapper's views of float32 parameters in place, as torch.optim accepts only leaves of autograd.
    """
    groups = []
    for models, views, halves, masters in zip(
        wrapper.model_fp32_groups,
        wrapper.shard_fp32_groups,
        wrapper.model_float16_groups,
        wrapper.shard_fp32_from_float16_groups,
        strict=True,
    ):
        for position, view in enumerate(views):
            views[position] = view.detach()
            views[position].__dict__.update(view.__dict__)  # Megatron's marks, which its norm of gradients reads
        groups.append({**dict(zip(models, views, strict=True)), **dict(zip(halves, masters, strict=True))})
    return groups


def stepped_by_group(
    shards: Mapping[Tensor, FlatShard], nonempty: Sequence[Mapping[Tensor, Tensor]], group: dist.ProcessGroup
) -> list[dict[Tensor, Tensor]]:
    """Returns ``nonempty`` with empty tensors for other ranks' parameters, and assigns all tensors their shards.

    Collective in ``group``, with ``shards`` of the same parameters in the same order: a rank knows the param group of a
    parameter only if it has elements of it. The result has the same parameters on all ranks.
    """
    numbers = {param: number for number, param in enumerate(shards)}
    known = [(numbers[param], index) for index, params in enumerate(nonempty) for param in params]
    messages = rank_group_of(group).all_gather(json.dumps(known).encode()).values()
    group_indices = dict(pair for message in messages for pair in json.loads(message))
    stepped: list[dict[Tensor, Tensor]] = [{} for _ in nonempty]
    for param, shard in shards.items():
        index = group_indices.get(numbers[param])
        if index is None:  # the parameter of another optimizer of the same buffers
            continue
        tensor = nonempty[index].get(param)
        if tensor is None:
            tensor = torch.empty(0, dtype=torch.float32, device=param.device)
        assign(tensor, shard.with_float32_state() if keeps_float32_state(param) else shard)
        stepped[index][param] = tensor
    return stepped


def _unwrapped(model: Module) -> Iterator[Module]:
    """Gives a model, then the modules inside of its wrappers (DistributedDataParallel, Float16Module) one by one."""
    yield model
    while isinstance(wrapped := getattr(model, "module", None), Module):
        model = wrapped
        yield model


def _wrappers_of(model: Module) -> list[Any]:
    """The DistributedOptimizers that :func:`replace_adam` has set up for a model, if they still exist."""
    wrappers = (reference() for reference in _wrappers_by_model.get(model, ()))
    return [wrapper for wrapper in wrappers if wrapper is not None]


def _has_optimizer(model: Module, optimizer: Optimizer) -> bool:
    """Whether an optimizer given to shardopt.checkpoint is the model's: Megatron's, or shardopt's inside of it."""
    known = [each for wrapper in _wrappers_of(model) for each in (wrapper, wrapper.optimizer)]
    return any(given in known for given in _unchained(optimizer))


@contextmanager
def _opened(model: Module) -> Iterator[tuple[Module, Optimizer]]:
    """For checkpoints: the unwrapped model with the tensors that are stepped as its parameters, and the optimizer."""
    wrapper = _only_wrapper(model)
    *_, bare = _unwrapped(model)
    tensors = {param: tensor for group in wrapper.stepped for param, tensor in group.items()}
    with replaced_parameters(bare, tensors):
        yield bare, wrapper.optimizer


def _only_wrapper(model: Module) -> Any:
    """A model's DistributedOptimizer; ValueError if shardopt.checkpoint could not name all ranks' parameters."""
    wrappers = _wrappers_of(model)
    if len(wrappers) != 1 or len(wrappers[0].model_chunks) != 1:
        chunks = [len(wrapper.model_chunks) for wrapper in wrappers]
        raise ValueError(
            f"got a Megatron model with {len(wrappers)} DistributedOptimizers of {chunks} model chunks, expected one "
            "of one chunk; save with Megatron's own checkpoints, which hold the moments as float32"
        )
    data_parallel = dist.get_world_size(wrappers[0].data_parallel_group)
    if data_parallel != dist.get_world_size():
        raise ValueError(
            f"got a Megatron model on {dist.get_world_size()} ranks with data parallelism of {data_parallel}, expected "
            "data parallelism only, as ranks hold different parameters under one name otherwise; save with Megatron's "
            "own checkpoints, which hold the moments as float32"
        )
    return wrappers[0]


def _refresh(model: Module) -> None:
    """After a load: copies the loaded float32 tensors into the model's parameters, and all-gathers the parameters."""
    wrapper = _only_wrapper(model)
    wrapper._copy_main_params_to_model_params()
    wrapper.model_chunks[0].start_param_sync(force_sync=True)


class _Megatron(Kind):
    """Tells shardopt.checkpoint how to find the optimizer of a Megatron model, and to save and load both."""

    def engines_of(self, model: Module) -> Engines | None:
        """The functions for models whose Adam was replaced; None for any other model."""
        return Engines("Megatron", _has_optimizer, _opened, _refresh) if _wrappers_of(model) else None


register(_Megatron())
