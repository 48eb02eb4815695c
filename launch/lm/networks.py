"""Makes a run's model, by the values of the option parametrization."""

from __future__ import annotations

import torch
from torch import nn

from lm import model, unit_model
from lm.model import ModelConfig
from shardopt import unit

Network = model.Transformer | unit_model.UnitTransformer

PARAMETRIZATIONS: dict[str, type[model.Transformer] | type[unit_model.UnitTransformer]] = {
    "sp": model.Transformer,
    "u-mup": unit_model.UnitTransformer,
}


def build(
    config: ModelConfig,
    context: int,
    seed: int,
    dtype: torch.dtype,
    fp8: bool = False,
    ranks: int = 1,
    accumulation: int = 1,
    dropout: float = 0.0,
) -> Network:
    """The model on the CPU with the same weights on every rank; the rotary tables stay float32.

    Args:
        config: its dimensions and parametrization.
        context: most positions.
        seed: of the weights.
        dtype: of the parameters.
        fp8: whether the linear layers of the blocks multiply in FP8.
        ranks: ranks that average gradients.
        accumulation: backward passes of a step, by which losses are divided.
        dropout: share of each layer's outputs that training drops.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = PARAMETRIZATIONS[config.parametrization](config, context)
    for parameter in network.parameters():
        parameter.data = parameter.data.to(dtype)
    for module in network.blocks.modules():
        if isinstance(module, model.Linear | unit.Linear):
            module.fp8 = fp8
        if isinstance(module, nn.Dropout):
            module.p = dropout
    if isinstance(network, unit_model.UnitTransformer):
        unit.set_split(network, ranks, accumulation)
        network.accumulation = accumulation
    return network
