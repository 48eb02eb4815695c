"""Unit scaling (arXiv 2303.11257) with the parametrization u-muP (arXiv 2407.17465): std 1 at initialisation.

Weights, activations and all gradients have std of about 1 at initialisation by factors that follow from shapes alone,
so that FP16 needs no loss scale and FP8 no scales at all. ``docs/unit_scaling.md`` has the table of operations.
``shardopt.param_groups(model, rule="u-mup", lr=...)`` has the learning rates.
"""

from shardopt.unit.functional import (
    add,
    attention,
    cross_entropy,
    dropout,
    embedding,
    gelu,
    layer_norm,
    linear,
    matmul,
    mse_loss,
    readout,
    residual_add,
    residual_split,
    rms_norm,
    scale_bwd,
    scale_fwd,
    silu,
    softmax,
    swiglu,
)
from shardopt.unit.modules import Attention, Embedding, Linear, Readout, RMSNorm, Stack, SwiGLU, set_split
from shardopt.unit.multipliers import residual_weights
from shardopt.unit.products import product, to_fp8

__all__ = [
    "Attention",
    "Embedding",
    "Linear",
    "RMSNorm",
    "Readout",
    "Stack",
    "SwiGLU",
    "add",
    "attention",
    "cross_entropy",
    "dropout",
    "embedding",
    "gelu",
    "layer_norm",
    "linear",
    "matmul",
    "mse_loss",
    "product",
    "readout",
    "residual_add",
    "residual_split",
    "residual_weights",
    "rms_norm",
    "scale_bwd",
    "scale_fwd",
    "set_split",
    "silu",
    "softmax",
    "swiglu",
    "to_fp8",
]
