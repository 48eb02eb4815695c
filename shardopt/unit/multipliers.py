"""Computes, for each operation, the factors that keep outputs and gradients at std 1 for inputs of std 1.

Where a function returns one factor, it is that of the output and of all inputs' gradients, unless it says otherwise.
If an input reaches the loss by several paths, its gradient must have the output's factor (``constrained``): otherwise
the paths' gradients are scaled differently, and their sum changes its direction. Where there is only one path
(parameters, the readout's input, the loss's input), the gradient has its own factor. Formulas of nonlinear operations
are the empirical ones of arXiv 2407.17465, appendix B, and of the package unit-scaling.
"""

from __future__ import annotations

from math import exp, log, pi, sqrt
from typing import NamedTuple


class Factors(NamedTuple):
    """Factors of an operation's output, and of the gradients of its first and second operand."""

    output: float
    first: float
    second: float = 1.0


def _between(share: float, low: float, high: float) -> float:
    """Interpolates between ``low`` (share 0) and ``high`` (share 1) in logarithms."""
    return exp(share * log(high) + (1 - share) * log(low))


def linear(inputs: int, outputs: int, tokens: float, constrained: bool = True) -> Factors:
    """Factors for an input, (tokens, inputs), and a weight, (outputs, inputs); a bias has the weight's factor."""
    output = inputs**-0.5
    return Factors(output, output if constrained else outputs**-0.5, norm(tokens))


def readout(inputs: int, outputs: int, tokens: float) -> Factors:
    """Like :func:`linear` for the last layer, whose outputs have std ``inputs ** -0.5`` at initialisation."""
    return Factors(1 / inputs, outputs**-0.5, norm(tokens))


def matmul(rows: int, inner: int, columns: int, constrained: bool = True) -> Factors:
    """Factors for ``(rows, inner) @ (inner, columns)``."""
    output = inner**-0.5
    return Factors(output, output, output) if constrained else Factors(output, columns**-0.5, rows**-0.5)


def gelu(mult: float = 1.0, constrained: bool = True) -> Factors:
    """Factors for ``gelu(mult x) / mult``."""
    share = 1 / (1 + 0.25 / mult**2)
    output = _between(share, 2, sqrt(2 / (1 - 1 / pi)))
    return Factors(output, output if constrained else _between(share, 2, sqrt(2)))


def silu(mult: float = 1.0, constrained: bool = True) -> Factors:
    """Factors for ``x sigmoid(mult x)``."""
    output = gelu(mult).output
    return Factors(output, output if constrained else swiglu(mult))


def swiglu(mult: float = 1.0) -> float:
    """The factor for ``x gate sigmoid(mult gate)``."""
    return _between(1 / (1 + 1 / mult**2), 2, sqrt(2))


def softmax(entries: int, mult: float = 1.0, constrained: bool = True) -> Factors:
    """Factors for ``softmax(mult x)`` over ``entries``, which goes from uniform (small mult) to one-hot."""
    share = 1 / (1 + 4 / mult**2)
    output = _between(share, entries, sqrt(entries))
    return Factors(output, output if constrained else _between(share, entries / mult, sqrt(entries / mult)))


def attention(positions: int, head_dim: int, causal: bool, mult: float = 1.0, dropout: float = 0.0) -> float:
    """The factor for attention with logits ``query key^T mult / head_dim``.

    The output's variance is between 1, for all weight on one value, and 1 / number of values, for equal weights.
    """
    least = (log(positions) if causal and positions > 1 else 1.0) / positions
    return sqrt(1 - dropout) / _between(1 / (1 + 4 * head_dim / mult**2), sqrt(least), 1.0)


def query(head_dim: int, mult: float = 1.0) -> float:
    """The factor of the gradients of queries and keys; the gradients of their projections' inputs get its inverse.

    Attention gives queries and keys of std 1 gradients of std ``mult / sqrt(head_dim)``, because its logits are divided
    by ``head_dim``. These gradients are scaled up where they enter the projections and down where they leave, so that
    their sum with the gradients through the values keeps its direction.
    """
    return max(sqrt(head_dim) / mult, 1.0)


def norm(tokens: float) -> float:
    """The factor of the gradients of parameters that are broadcast over ``tokens`` rows, as gains of norms are."""
    return 1 / sqrt(tokens or 1)


def embedding(entries: int, tokens: float) -> float:
    """The factor of the weight's gradient only, for ``tokens`` look-ups in an embedding of ``entries`` rows."""
    return sqrt(entries / (tokens or 1))


def add(left: int, right: int, constrained: bool = True) -> Factors:
    """Factors for a sum of tensors whose elements are repeated ``left`` and ``right`` times by broadcasting."""
    output = sqrt(0.5)
    return Factors(output, output, output) if constrained else Factors(output, left**-0.5, right**-0.5)


def dropout(p: float) -> float:
    """The factor for PyTorch's dropout, which divides the elements that it keeps by 1 - p."""
    return sqrt(1 - p)


def cross_entropy(classes: int) -> float:
    """The factor of the logits' gradient only, for the sum of cross entropies over tokens."""
    return classes / sqrt(max(classes - 1, 1))


def mse_loss() -> float:
    """The factor of both inputs' gradients only, for the sum of squared errors."""
    return sqrt(1 / 8)


def branch_and_skip(tau: float) -> tuple[float, float]:
    """The weights of the branch and of the skip connection in a residual sum, ``(tau f(x) + x) / sqrt(1 + tau^2)``."""
    root = sqrt(1 + tau**2)
    return tau / root, 1 / root


def residual_weights(layers: int, mult: float = 1.0, attention_ratio: float = 1.0) -> tuple[float, ...]:
    """Computes the weight tau of each residual layer, attention and MLP in turn (arXiv 2407.17465, section G).

    Args:
        layers: the number of attention and MLP layers together: twice the number of blocks.
        mult: the contribution of all layers relative to the embedding's (alpha_res).
        attention_ratio: the contribution of attention layers relative to MLP layers' (rho).
    """
    mlp = mult * sqrt(2 / (1 + attention_ratio**2))
    weights = (attention_ratio * mlp, mlp)  # of attention and MLP layers, relative to sqrt(layers / 2) of the embedding
    taus = []
    for index in range(layers):
        variance = layers / 2 + (index + 1) // 2 * weights[0] ** 2 + index // 2 * mlp**2  # of the sum before this layer
        taus.append(weights[index % 2] / sqrt(variance))
    return tuple(taus)
