"""Parameters of torchao's tensor subclasses: float8 training with FSDP2, int8 training, NF4 beside adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import shardopt
from needed import needs
from ranks.layouts import values

pytestmark = needs("torchao")


def _float8_model(seed: int, dtype: torch.dtype) -> Any:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 112, bias=False), nn.Linear(112, 64), nn.Linear(64, 48)).to(dtype)
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    convert_to_float8_training(model, config=config)
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def _local(param: Any) -> Tensor:
    local = param._local_tensor
    return getattr(local, "_tensor", local)


def _local_gradient(param: Any) -> Tensor:
    return param.grad._local_tensor


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("dtype", "options"), [(torch.float32, {}), (torch.bfloat16, {"master_weight_bits": 24})])
def test_float8_training(tmp_path: Path, world_size: int, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Trains with one rank; gloo gathers no float8, so that gradients are given where there are more."""
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor, precompute_float8_dynamic_scale_for_fsdp

    model = _float8_model(0, dtype)
    params = list(model.parameters())
    assert [type(p._local_tensor) for p in params].count(WeightWithDynamicFloat8CastTensor) == 3
    plain = [nn.Parameter(DTensor(_local(p).clone(), p._spec, requires_grad=True)) for p in params]
    optimizer, expected = (shardopt.AdamW8bit(each, lr=1e-2, **options) for each in (params, plain))

    def step(t: int) -> None:
        if dist.get_world_size() == 1:
            model(values((16, 64), t, dtype)).square().mean().backward()
        for index, (param, other) in enumerate(zip(params, plain, strict=True)):
            if dist.get_world_size() > 1:
                part = values(tuple(_local(param).shape), 10 * t + index, dtype)
                param.grad = DTensor(part, other._spec, requires_grad=False)
            other.grad = DTensor(_local_gradient(param).clone(), other._spec, requires_grad=False)
        optimizer.step()
        expected.step()
        optimizer.zero_grad()
        precompute_float8_dynamic_scale_for_fsdp(model)
        for param, other in zip(params, plain, strict=True):
            assert torch.equal(_local(param), _local(other))

    for t in range(4):
        step(t)
    shardopt.checkpoint.save(tmp_path, model, optimizer)
    other = _float8_model(1, dtype)
    shardopt.checkpoint.load(tmp_path, other, shardopt.AdamW8bit(other.parameters(), lr=1e-2, **options))
    for param, saved in zip(other.parameters(), params, strict=True):
        assert torch.equal(_local(param), _local(saved))


def test_int8_training_is_refused(tmp_path: Path) -> None:
    from torchao.prototype.quantized_training.int8 import Int8QuantizedTrainingLinearWeight

    model = nn.Linear(64, 128, bias=False)
    model.weight = nn.Parameter(Int8QuantizedTrainingLinearWeight.from_float(model.weight.detach()))
    codes = model.weight.int_data.clone()
    optimizer = shardopt.AdamW8bit(model.parameters())
    model(torch.ones(3, 64)).sum().backward()
    with pytest.raises(RuntimeError, match=r"^parameter 0 .*got a tensor of Int8QuantizedTrainingLinearWeight with 0 "):
        optimizer.step()
    assert torch.equal(model.weight.int_data, codes)
    with pytest.raises(shardopt.checkpoint.CheckpointError, match=r"^weight: got a tensor of Int8Quantized"):
        shardopt.checkpoint.save(tmp_path, model)


class _Adapted(nn.Module):
    """A frozen weight in NF4 and a trainable adapter."""

    def __init__(self) -> None:
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

        super().__init__()
        self.base = nn.Parameter(to_nf4(values((256, 256), 0), 64, 256), requires_grad=False)
        self.adapter = nn.ModuleDict({"down": nn.Linear(256, 8), "up": nn.Linear(8, 256)})

    def forward(self, x: Tensor) -> Tensor:
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4

        return linear_nf4(x, self.base) + self.adapter["up"](self.adapter["down"](x))


def test_adapters_beside_nf4_weights(tmp_path: Path) -> None:
    """The frozen weights may be in the optimizer; checkpoints have the adapters alone."""
    torch.manual_seed(0)
    model = _Adapted()
    weight = model.base.get_original_weight()
    before = model.adapter["up"].weight.detach().clone()
    optimizer = shardopt.AdamW8bit(model.parameters(), lr=1e-2, min_quantized_numel=0)
    for _ in range(3):
        model(torch.randn(5, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(model.adapter["up"].weight, before)
    after = model.base.get_original_weight()
    assert torch.equal(after, weight)
    assert model.base not in optimizer.state
    with pytest.raises(shardopt.checkpoint.CheckpointError, match=r"^base: got a tensor of NF4Tensor"):
        shardopt.checkpoint.save(tmp_path, model, optimizer)
    own = shardopt.AdamW8bit(model.adapter.parameters(), lr=1e-2, min_quantized_numel=0)
    model(torch.randn(5, 256)).square().mean().backward()
    own.step()
    shardopt.checkpoint.save(tmp_path, model.adapter, own)
    saved = model.adapter["up"].weight.detach().clone()
    own.step()
    shardopt.checkpoint.load(tmp_path, model.adapter, own)
    assert torch.equal(model.adapter["up"].weight, saved)
