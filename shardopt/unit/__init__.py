"""Unit scaling (arXiv 2303.11257) with the parametrization u-muP (arXiv 2407.17465): std 1 at initialisation.

Operations multiply by constant factors computed from shapes, so that weights, activations and gradients have a std of
about 1 at initialisation. So FP16 needs no loss scale, and FP8 no scales at all. ``docs/unit_scaling.md`` lists the
operations. ``shardopt.param_groups(model, rule="u-mup", lr=...)`` sets the learning rates that u-muP needs.
"""

from shardopt.unit.functional import add as add
from shardopt.unit.functional import attention as attention
from shardopt.unit.functional import cross_entropy as cross_entropy
from shardopt.unit.functional import dropout as dropout
from shardopt.unit.functional import embedding as embedding
from shardopt.unit.functional import gelu as gelu
from shardopt.unit.functional import layer_norm as layer_norm
from shardopt.unit.functional import linear as linear
from shardopt.unit.functional import matmul as matmul
from shardopt.unit.functional import mse_loss as mse_loss
from shardopt.unit.functional import readout as readout
from shardopt.unit.functional import residual_add as residual_add
from shardopt.unit.functional import residual_split as residual_split
from shardopt.unit.functional import rms_norm as rms_norm
from shardopt.unit.functional import silu as silu
from shardopt.unit.functional import softmax as softmax
from shardopt.unit.functional import swiglu as swiglu
from shardopt.unit.modules import Attention as Attention
from shardopt.unit.modules import Embedding as Embedding
from shardopt.unit.modules import Linear as Linear
from shardopt.unit.modules import Readout as Readout
from shardopt.unit.modules import RMSNorm as RMSNorm
from shardopt.unit.modules import Stack as Stack
from shardopt.unit.modules import SwiGLU as SwiGLU
from shardopt.unit.modules import set_split as set_split
from shardopt.unit.multipliers import residual_weights as residual_weights
from shardopt.unit.scaled import product as product
from shardopt.unit.scaled import scale_bwd as scale_bwd
from shardopt.unit.scaled import scale_fwd as scale_fwd
from shardopt.unit.scaled import to_fp8 as to_fp8
