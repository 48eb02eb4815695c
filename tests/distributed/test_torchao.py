"""Parameters of torchao's tensor subclasses: float8 training with FSDP2, int8 training, NF4 beside adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
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


@pytest.mark.ranks(1)
@pytest.mark.parametrize(("dtype", "options"), [(torch.float32, {}), (torch.bfloat16, {"master_weight_bits": 24})])
def test_float8_training(tmp_path: Path, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """On one rank: gloo gathers no float8."""
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor, precompute_float8_dynamic_scale_for_fsdp

    model = _float8_model(0, dtype)
    params = list(model.parameters())
    assert [type(p._local_tensor) for p in params].count(WeightWithDynamicFloat8CastTensor) == 3
    plain = [nn.Parameter(DTensor(_local(p).clone(), p._spec, requires_grad=True)) for p in params]
    optimizer, expected = (shardopt.AdamW8bit(each, lr=1e-2, **options) for each in (params, plain))
    for t in range(4):
        model(values((16, 64), t, dtype)).square().mean().backward()
        for param, other in zip(params, plain, strict=True):
            other.grad = DTensor(param.grad._local_tensor.clone(), other._spec, requires_grad=False)
        optimizer.step()
        expected.step()
        optimizer.zero_grad()
        precompute_float8_dynamic_scale_for_fsdp(model)
        assert all(torch.equal(_local(param), _local(other)) for param, other in zip(params, plain, strict=True))
    shardopt.checkpoint.save(tmp_path, model, optimizer)
    other = _float8_model(1, dtype)
    shardopt.checkpoint.load(tmp_path, other, shardopt.AdamW8bit(other.parameters(), lr=1e-2, **options))
    assert all(torch.equal(_local(a), _local(b)) for a, b in zip(other.parameters(), params, strict=True))


def test_int8_training_is_refused(tmp_path: Path) -> None:
    from torchao.prototype.quantized_training.int8 import Int8QuantizedTrainingLinearWeight

    model = nn.Linear(64, 128, bias=False)
    model.weight = nn.Parameter(Int8QuantizedTrainingLinearWeight.from_float(model.weight.detach()))
    optimizer = shardopt.AdamW8bit(model.parameters())
    model(torch.ones(3, 64)).sum().backward()
    with pytest.raises(RuntimeError, match=r"^parameter 0 .*got a tensor of Int8QuantizedTrainingLinearWeight with 0 "):
        optimizer.step()
    with pytest.raises(shardopt.checkpoint.CheckpointError, match=r"^weight: got a tensor of Int8Quantized"):
        shardopt.checkpoint.save(tmp_path, model)


def test_adapters_beside_nf4_weights(tmp_path: Path) -> None:
    """The frozen weights may be in the optimizer; checkpoints have the adapters alone."""
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4, to_nf4

    model = nn.Module()
    model.base = nn.Parameter(to_nf4(values((256, 256), 0), 64, 256), requires_grad=False)
    model.adapter = nn.Sequential(nn.Linear(256, 8), nn.Linear(8, 256))
    weight, start = model.base.get_original_weight(), model.adapter[1].weight.detach().clone()

    def step(optimizer: shardopt.AdamW8bit) -> Tensor:
        x = values((5, 256), 1)
        (linear_nf4(x, model.base) + model.adapter(x)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return model.adapter[1].weight.detach().clone()

    optimizer = shardopt.AdamW8bit(model.parameters(), lr=1e-2, min_quantized_numel=0)
    assert not torch.equal(step(optimizer), start)
    assert torch.equal(model.base.get_original_weight(), weight)
    assert model.base not in optimizer.state
    with pytest.raises(shardopt.checkpoint.CheckpointError, match=r"^base: got a tensor of NF4Tensor"):
        shardopt.checkpoint.save(tmp_path, model, optimizer)
    own = shardopt.AdamW8bit(model.adapter.parameters(), lr=1e-2, min_quantized_numel=0)
    saved = step(own)
    shardopt.checkpoint.save(tmp_path, model.adapter, own)
    step(own)
    shardopt.checkpoint.load(tmp_path, model.adapter, own)
    assert torch.equal(model.adapter[1].weight, saved)
