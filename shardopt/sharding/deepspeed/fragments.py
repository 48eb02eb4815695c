"""State for DeepSpeed's functions of single parameters: ``safe_get_full_optimizer_state`` and similar ones.

These functions look for float32 state of the masters' shape. Here they get a parameter's moments decoded. The functions
can write only float32 state: quantized blocks lie on several ranks, and moments depend on one another.
"""

from __future__ import annotations

from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardopt.layout import FlatBuffer, Segment, assigned
from shardopt.layout.names import parameter_names
from shardopt.optim import ShardedOptimizer
from shardopt.sharding.deepspeed.universal import stepped_groups
from shardopt.state.slice_spec import SliceSpec


class _Moment(NamedTuple):
    """This rank's part of a parameter's moment.

    Attributes:
        segment: the parameter's slice of the flat tensor.
        spec: describes the slice's state.
        local: float32, ``(segment.shard.numel,)``; if the state is float32, the state's own tensor.
    """

    segment: Segment
    spec: SliceSpec
    local: Tensor


class _Place(NamedTuple):
    """A parameter's slice of a flat tensor: the tensor, its param group's index, the slice's number."""

    flat: Tensor
    group: int
    number: int


class Fragments:
    """The state of an engine's parameters, one by one.

    Args:
        engine: a DeepSpeedEngine whose partitions are assigned.
    """

    def __init__(self, engine: Any) -> None:
        self._optimizer: ShardedOptimizer = engine.basic_optimizer
        places: dict[str, _Place] = {}
        with stepped_groups(engine) as groups:
            for group, params in enumerate(groups):
                for flat in params:
                    buffer = assigned(flat)
                    if isinstance(buffer, FlatBuffer):
                        segments = enumerate(buffer.segments)
                        places.update((segment.name, _Place(flat, group, index)) for index, segment in segments)
        named = parameter_names(engine.module).items()
        self._places = {id(param): places[name] for name, param in named if name in places}

    def full(self, param: Tensor, moment: str) -> Tensor:
        """A moment of one of the model's parameters, decoded, in full; all ranks must call this.

        Raises:
            ValueError: the optimizer does not keep the moment.
            RuntimeError: the parameter has no state yet.
        """
        segment, _, local = self._moment(param, moment)
        shard = segment.shard
        whole = torch.zeros(torch.Size(shard.global_shape).numel(), device=local.device)
        whole[shard.start : shard.end] = local
        if shard.exchange is not None:
            shard.exchange.all_reduce_sum(whole)
        return whole.view(shard.global_shape).to(param.device)

    def local(self, param: Any, moment: str) -> Tensor:
        """This rank's part of a moment under ZeRO 3, with zeros for padding."""
        local = self._moment(param, moment).local
        padding = int(param.partition_numel()) - local.numel()
        return torch.nn.functional.pad(local, (0, padding)).to(param.device)

    def device(self, param: Tensor, moment: str) -> torch.device:
        """The device of the state."""
        return self._moment(param, moment).local.device

    def set_full(self, param: Tensor, moment: str, value: Tensor) -> None:
        """Replaces a moment, given in full.

        Raises:
            ValueError: the optimizer does not keep the moment, or the value is not of the parameter's size.
            RuntimeError: the parameter has no state yet, or its state is quantized.
        """
        shard = self._moment(param, moment).segment.shard
        if value.numel() != torch.Size(shard.global_shape).numel():
            raise ValueError(f"got {moment} of shape {tuple(value.shape)}, expected {shard.global_shape}")
        self.set_local(param, moment, value.flatten()[shard.start : shard.end])

    def set_local(self, param: Tensor, moment: str, value: Tensor) -> None:
        """Replaces this rank's part of a moment; elements behind it are padding."""
        segment, spec, local = self._moment(param, moment)
        if spec.codec.code_dtype != torch.float32:
            raise RuntimeError(
                f"got a new {moment} for {segment.name}, whose state is quantized ({spec.codec.name}), expected a "
                'parameter with float32 state; give its param group codec="fp32", or load all state with '
                "load_state_dict"
            )
        if value.numel() < local.numel():
            raise ValueError(f"got {moment} of {value.numel()} elements for {segment.name}, expected {local.numel()}")
        local.copy_(value.flatten()[: local.numel()])

    def _moment(self, param: Tensor, moment: str) -> _Moment:
        flat, group, number = self._places[id(param)]
        spec = self._optimizer._internals.state_of(flat, self._optimizer.param_groups[group])
        assert isinstance(spec.shard, FlatBuffer)
        names = [m.name for m in spec.moments]
        if moment not in names:
            kind = type(self._optimizer).__name__
            raise ValueError(f"got {moment!r}, expected a moment of {kind}: {', '.join(names) or 'it has none'}")
        state = self._optimizer.state.get(flat)
        if not state:
            raise RuntimeError(f"got a call before the first step, expected state with {moment}; take a step first")
        slice_spec, entries = spec.slices[number].spec, spec.split(state)[number]
        is_float = slice_spec.codec.code_dtype == torch.float32
        local = entries[moment] if is_float else slice_spec.decode(entries)[names.index(moment)]
        return _Moment(spec.shard.segments[number], slice_spec, local)


def show_state(engine: Any) -> None:
    """Has DeepSpeed's functions for single parameters find their state.

    ZeRO 1, 2 and BF16_Optimizer bind methods to the model's parameters, and do so again after loading; ZeRO 3 has
    methods of its own.
    """
    wrapper = engine.optimizer
    kind = type(wrapper).__name__
    if kind not in ("DeepSpeedZeroOptimizer", "BF16_Optimizer", "DeepSpeedZeroOptimizer_Stage3"):
        return
    fragments = Fragments(engine)
    if kind == "DeepSpeedZeroOptimizer_Stage3":
        _bind_stage3(wrapper, fragments)
        return
    wrapper._hp_optimizer_states_linked = True  # else DeepSpeed would keep views of any tensor of the masters' shape
    link = wrapper._link_all_hp_params

    def _link_all_hp_params() -> None:
        link()
        if kind == "DeepSpeedZeroOptimizer":
            _link_in_order(wrapper)
        for group in wrapper.bf16_groups if kind == "BF16_Optimizer" else wrapper.bit16_groups:
            for param in group:
                _bind(param, fragments)

    wrapper._link_all_hp_params = _link_all_hp_params
    _link_all_hp_params()


def _link_in_order(wrapper: Any) -> None:
    """Links parameters to the offsets that ``round_robin_gradients`` gave them, as DeepSpeed uses the old offsets."""
    from deepspeed.utils import link_hp_params  # type: ignore[import-untyped]

    for index, flat in enumerate(wrapper.single_partition_of_fp32_groups):
        params, in_order = wrapper.bit16_groups[index], wrapper.round_robin_bit16_groups[index]
        if all(one is other for one, other in zip(params, in_order, strict=True)):
            continue
        offsets = zip(in_order, wrapper.round_robin_bit16_offsets[index], strict=True)
        offset_of = {id(param): offset for param, offset in offsets}
        group = wrapper.real_dp_process_group[index]
        link_hp_params(
            lp_param_list=params,
            flat_hp_partition=flat,
            gradient_dict=wrapper.averaged_gradients,
            offload_gradient_dict=wrapper.offload_gradient_dict,
            use_offload=wrapper.cpu_offload,
            param_group_index=index,
            partition_start=dist.get_rank(group) * flat.numel(),
            partition_size=flat.numel(),
            dp_group=group,
            param_offsets=[offset_of[id(param)] for param in params],
        )
    wrapper._param_slice_mappings = wrapper._create_param_mapping()


def _bind(param: Any, fragments: Fragments) -> None:
    get, put = param.get_full_hp_param, param.set_full_hp_param

    def get_full_hp_param(self: Tensor, optim_state_key: str | None = None) -> Any:
        return get() if optim_state_key is None else fragments.full(self, optim_state_key)

    def set_full_hp_param(self: Tensor, value: Tensor, optim_state_key: str | None = None) -> None:
        if optim_state_key is None:
            put(value)
        else:
            fragments.set_full(self, optim_state_key, value)

    param.get_full_hp_param = MethodType(get_full_hp_param, param)
    param.set_full_hp_param = MethodType(set_full_hp_param, param)


def _bind_stage3(wrapper: Any, fragments: Fragments) -> None:
    def reading(name: str, read: Any) -> None:
        original = getattr(wrapper, name)

        def method(param: Any, optim_state_key: str | None = None) -> Any:
            if optim_state_key is None or not param.requires_grad:
                return original(param, optim_state_key)
            return read(param, optim_state_key)

        setattr(wrapper, name, method)

    def writing(name: str, write: Any) -> None:
        original = getattr(wrapper, name)

        def method(value: Tensor, param: Any, optim_state_key: str | None = None) -> None:
            if optim_state_key is None or not param.requires_grad:
                original(value, param, optim_state_key)
            else:
                write(param, optim_state_key, value)

        setattr(wrapper, name, method)

    reading("get_full_hp_param", fragments.full)
    reading("get_local_fp32_param", fragments.local)
    reading("get_hp_param_device", fragments.device)
    writing("set_full_hp_param", fragments.set_full)
    writing("set_local_hp_param", fragments.set_local)
