"""Computes, for each operation, the factors that keep outputs and gradients at std 1 for inputs of std 1.

Functions return the output's factor, then a factor for each input's gradient, then one for the parameters' gradients.
If an input reaches the loss by several paths, its gradient must have the output's factor (``constrained``): otherwise
the paths' gradients are scaled differently, and their sum changes its direction. Where there is only one path
(parameters, the readout's input, the loss's input), the gradient has its own factor. Formulas of nonlinear operations
are the empirical ones of arXiv 2407.17465, appendix B, and of the package unit-scaling.
"""

from __future__ import annotations

from math import exp, log, pi, sqrt


def _between(share: float, low: float, high: float) -> float:
    """Interpolates between ``low`` (share 0) and ``high`` (share 1) in logarithms."""
    return exp(share * log(high) + (1 - share) * log(low))


def linear(inputs: int, outputs: int, tokens: float, constrained: bool = True) -> tuple[float, float, float]:
    """Factors of output, input and parameters for a weight ``(outputs, inputs)`` and ``tokens`` rows of input."""
    output = inputs**-0.5
    return output, output if constrained else outputs**-0.5, 1 / sqrt(tokens or 1)


def readout(inputs: int, outputs: int, tokens: float) -> tuple[float, float, float]:
    """Factors of output, input and parameters for the last layer, whose outputs start with std ``inputs ** -0.5``."""
    return 1 / inputs, outputs**-0.5, 1 / sqrt(tokens or 1)


def matmul(rows: int, inner: int, columns: int, constrained: bool = True) -> tuple[float, float, float]:
    """Factors of output, left and right for ``(rows, inner) @ (inner, columns)``."""
    output = inner**-0.5
    return (output, output, output) if constrained else (output, columns**-0.5, rows**-0.5)


def gelu(mult: float = 1.0, constrained: bool = True) -> tuple[float, float]:
    """Factors of output and input for ``gelu(mult x) / mult``."""
    share = 1 / (1 + 0.25 / mult**2)
    output = _between(share, 2, sqrt(2 / (1 - 1 / pi)))
    return output, output if constrained else _between(share, 2, sqrt(2))


def silu(mult: float = 1.0, constrained: bool = True) -> tuple[float, float]:
    """Factors of output and input for ``x sigmoid(mult x)``."""
    output = _between(1 / (1 + 0.25 / mult**2), 2, sqrt(2 / (1 - 1 / pi)))
    return output, output if constrained else swiglu(mult)


def swiglu(mult: float = 1.0) -> float:
    """The factor of output and both inputs for ``x gate sigmoid(mult gate)``."""
    return _between(1 / (1 + 1 / mult**2), 2, sqrt(2))


def softmax(entries: int, mult: float = 1.0, constrained: bool = True) -> tuple[float, float]:
    """Factors of output and input for ``softmax(mult x)`` over ``entries``, from uniform (small mult) to one-hot."""
    share = 1 / (1 + 4 / mult**2)
    output = _between(share, entries, sqrt(entries))
    return output, output if constrained else _between(share, entries / mult, sqrt(entries / mult))


def attention(positions: int, head_dim: int, causal: bool, mult: float = 1.0, dropout: float = 0.0) -> float:
    """The factor of output, query, key and value for attention with logits ``mult / head_dim`` times query by key."""
    averaged = (log(positions) if causal and positions > 1 else 1.0) / positions
    return sqrt(1 - dropout) / _between(1 / (1 + 4 * head_dim / mult**2), sqrt(averaged), 1.0)


def query(head_dim: int, mult: float = 1.0) -> float:
    """The factor of the gradients of queries and keys; the projections' inputs have its inverse.

    Attention gives queries and keys of std 1 gradients of std ``mult / sqrt(head_dim)``, because its logits are divided
    by ``head_dim``. These gradients are scaled up where they enter the projections and down where they leave, so that
    their sum with the gradients through the values keeps its direction.
    """
    return max(sqrt(head_dim) / mult, 1.0)


def norm(tokens: float) -> float:
    """The factor of the gradients of gains and biases for layer or RMS norms of ``tokens`` rows."""
    return 1 / sqrt(tokens or 1)


def embedding(entries: int, tokens: float) -> float:
    """The factor of the weight's gradient for an embedding of ``entries`` rows, of which ``tokens`` are looked up."""
    return sqrt(entries / (tokens or 1))


def add(left: int, right: int, constrained: bool = True) -> tuple[float, float, float]:
    """Factors of output, left and right for a sum whose operands' elements are broadcast ``left``, ``right`` times."""
    output = sqrt(0.5)
    return (output, output, output) if constrained else (output, left**-0.5, right**-0.5)


def dropout(p: float) -> float:
    """The factor of output and input for PyTorch's dropout, which divides the elements that it keeps by 1 - p."""
    return sqrt(1 - p)


def cross_entropy(classes: int) -> float:
    """The factor of the logits' gradient for the sum of cross entropies."""
    return classes / sqrt(max(classes - 1, 1))


def mse_loss() -> float:
    """The factor of both inputs' gradients for the sum of squared errors."""
    return sqrt(1 / 8)


def residual(tau: float) -> tuple[float, float]:
    """The weights of branch and skip connection in ``(tau f(x) + x) / sqrt(1 + tau^2)``."""
    whole = sqrt(1 + tau**2)
    return tau / whole, 1 / whole


def residual_weights(layers: int, mult: float = 1.0, attention_ratio: float = 1.0) -> tuple[float, ...]:
    """Computes the weight tau of each residual layer, attention and MLP in turn (arXiv 2407.17465, section G).

    Args:
        layers: the number of attention and MLP layers together: twice the number of blocks.
        mult: the contribution of all layers relative to the embedding's (alpha_res).
        attention_ratio: the contribution of attention layers relative to MLP layers' (rho).
    """
    mlp = mult * sqrt(2 / (1 + attention_ratio**2))
    of_kind = (attention_ratio * mlp, mlp)
    return tuple(
        of_kind[index % 2] / sqrt(layers / 2 + (index + 1) // 2 * of_kind[0] ** 2 + index // 2 * mlp**2)
        for index in range(layers)
    )
