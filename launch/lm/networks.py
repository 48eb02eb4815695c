"""Makes a run's model, by the values of the option parametrization."""

from __future__ import annotations

import torch
from torch import nn

from lm.model import Linear, ModelConfig, Transformer
from lm.unit_model import UnitTransformer
from shardopt import unit

PARAMETRIZATIONS = {"sp": Transformer, "u-mup": UnitTransformer}


def build(
    config: ModelConfig,
    context: int,
    seed: int,
    dtype: torch.dtype,
    fp8: bool = False,
    ranks: int = 1,
    accumulation: int = 1,
    dropout: float = 0.0,
) -> Transformer:
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
        if isinstance(module, Linear | unit.Linear):
            module.fp8 = fp8
        if isinstance(module, nn.Dropout):
            module.p = dropout
    if isinstance(network, UnitTransformer):
        unit.set_split(network, ranks, accumulation)
        network.accumulation = accumulation
    return network
